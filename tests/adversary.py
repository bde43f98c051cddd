"Files of every format that the library reads, and changes to them: bytes turned and moved, values exchanged"
import copy,csv,io,json,torch,yaml
from fastsparse.all import *
from fastsparse.save.files import seal
from fastsparse.save.load import read_file
from helpers import mlp

# Changes of bytes

def other_bytes(data, rng):
    "`data` with one change, never none"
    a,b = sorted(rng.sample(range(len(data)), 2))
    kinds = [lambda: data[:a]+bytes([data[a]^(1<<rng.randrange(8))])+data[a+1:], lambda: data[:a], lambda: data[:a]+data[b:], lambda: data[:b]+data[a:],
        lambda: data[a:], lambda: data[:a]+bytes(min(b-a, 64))+data[a+min(b-a, 64):], lambda: data+data[a:b], lambda: b'', lambda: rng.randbytes(b)]
    while (new := rng.choice(kinds)())==data: pass
    return new

# Changes of what a file holds

odd = [lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 2**70, lambda: float('nan'), lambda: 1e308, lambda: 'x', lambda: '', lambda: [], lambda: {},
    lambda: {'x':1}, lambda: [[1,2],[3]], lambda: '0'*50]
odd_tensors = [lambda: torch.zeros(0), lambda: torch.full((8,), float('nan')), lambda: torch.tensor(-7), lambda: torch.ones(2,3).bool(),
    lambda: torch.zeros(3, dtype=torch.uint8), lambda: torch.ones(3, dtype=torch.complex64)]

def places(o):
    "Container and key of each node below `o`"
    for k in (list(o) if isinstance(o, dict) else range(len(o))):
        yield o,k
        if isinstance(o[k], (dict,list)): yield from places(o[k])

def changed(o, rng, values):
    "A copy of the tree `o` with one node exchanged, left out, added, doubled or renamed"
    o = copy.deepcopy(o)
    all_places = list(places(o)) if isinstance(o, (dict,list)) else []
    if not all_places or rng.random()<.02: return rng.choice(values)()
    at,k = rng.choice(all_places)
    kind = rng.randrange(8)
    if kind==0: del at[k]
    elif kind==1: at[k] = copy.deepcopy(rng.choice(all_places)[0])
    elif kind==2 and isinstance(at, dict): at[rng.choice(['x','',3,None])] = at.pop(k)
    elif kind==3 and isinstance(at[k], torch.Tensor) and at[k].numel():
        t = at[k]
        at[k] = rng.choice([lambda: t.flatten()[:-1].clone(), lambda: t.double(), lambda: t.flip(0) if t.ndim else t+1, lambda: t[None], lambda: t.bool()])()
    else: at[k] = rng.choice(values)()
    return o

# Formats: each has a file, what reads it, and how its contents are changed

class Format:
    "A file that is written once; `read` gives what it holds, by which two files can be compared"
    def __init__(self, folder):
        self.path = folder/self.name
        torch.manual_seed(0)
        self.make()
        self.whole = self.path.read_bytes()

    def contents(self, rng):
        "Other contents in a file that is otherwise as it should be; None where the format can't hold them"
        try: self.put(changed(self.get(), rng, self.values))
        except (RuntimeError,TypeError,RecursionError,OverflowError): return None
        return self.path.read_bytes()

class Archive(Format):
    "A zip archive of torch"
    values,word = odd+odd_tensors,None

    def get(self): return torch.load(io.BytesIO(self.whole), weights_only=True)

    def put(self, o):
        torch.save(o, self.path)
        if self.word: seal(self.path, self.word)

    ways = [Format.contents]

def parts():
    model = mlp((6,8,4))
    sparsify_model(model, .5, seed=0)
    opt = torch.optim.AdamW(model.parameters(), .01)
    return model,opt,DynamicSparseTraining(model, opt, 40, **RigL_presets(batches_per_update=3), seed=0)

def steps(model, opt, n=7):
    for _ in range(n):
        opt.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        opt.step()

class Run(Archive):
    "A checkpoint"
    name,word = 'a run.pt',b'sparrun'
    def make(self):
        self.parts = parts()
        steps(*self.parts[:2])
        save_run(self.path, *self.parts, position=dict(epoch=1))

    def read(self):
        position = load_run(self.path, *self.parts)
        return [position, *[copy.deepcopy(o.state_dict()) for o in self.parts]]

class History(Archive):
    name = 'a history.pt'
    def make(self):
        model,opt,_ = parts()
        opt = torch.optim.AdamW(model.parameters(), .01)
        history = SparseHistory(keep_masks=True)
        DynamicSparseTraining(model, opt, 40, **RigL_presets(batches_per_update=3), seed=0, on_update=history)
        steps(model, opt)
        history.save(self.path)

    def read(self): return SparseHistory.load(self.path).state_dict()
    ways = []

class Delta(Archive):
    "What fine-tuning has changed"
    name = 'a delta.pt'
    def make(self):
        model = mlp((6,8,4))
        sparsify_model(model, .5, seed=0)
        self.base = copy.deepcopy(model.state_dict())
        self.fresh = mlp((6,8,4))
        sparsify_model(self.fresh, .5, seed=0)
        with torch.no_grad():
            model[0].weight[0] *= 2
            model[2].bias += 1
        save_delta(model, self.base, self.path)

    def read(self):
        self.fresh.load_state_dict(self.base)
        try: load_delta(self.fresh, self.path)
        except Exception:
            assert agree(dict(self.fresh.state_dict()), dict(self.base)), 'a refused delta has changed the model'
            raise
        return dict(self.fresh.state_dict())

class Safetensors(Format):
    name,values = 'a model.safetensors',odd
    def make(self):
        model = mlp((6,8,4))
        sparsify_model(model, .6, seed=0)
        save_sparse(model, self.path)

    def read(self): return read_file(self.path)

    ways = []

class Text(Format):
    def contents(self, rng):
        try: return self.said(changed(self.spec, rng, odd)).encode()
        except (ValueError,TypeError,RecursionError,csv.Error): return None

    ways = [contents]

rules = [dict(params='0.*', method='rigl', sparsity=.5, batches_per_update=10, keep_score_f=dict(type='MagnitudePlusGradient', lam=.1)),
    dict(params=['2.*','9'], structure='2:4', sparsity=.5, updates=[3,5,9], drop_fraction=dict(type='cubic', init=.3, end=0)),
    dict(params='2.weight', method='gmp', sparsity=.8, sparse_f='uniform', stop_pct=.5)]
sparsities = {'0.weight':.5, '2.*':.25, '*':0}

class RulesYaml(Text):
    name,spec = 'some rules.yaml',rules
    said = staticmethod(lambda o: yaml.safe_dump(o))
    def make(self): self.path.write_text(self.said(self.spec))
    def read(self): return configure(self.path)

class RulesJson(RulesYaml):
    name = 'some rules.json'
    said = staticmethod(lambda o: json.dumps(o))

class SparsitiesYaml(RulesYaml):
    name,spec = 'sparsities.yaml',sparsities
    def read(self): return given_sparsity(self.path)

class SparsitiesJson(SparsitiesYaml):
    name,said = 'sparsities.json',staticmethod(RulesJson.said)

formats = {o.__name__:o for o in (Run,History,Delta,Safetensors,RulesYaml,RulesJson,SparsitiesYaml,SparsitiesJson)}
binary = ('Run','History','Delta','Safetensors')

def agree(a, b):
    "Are two nested states equal, bit for bit?"
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return all(isinstance(o, torch.Tensor) for o in (a,b)) and (a.dtype,a.layout)==(b.dtype,b.layout) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict): return isinstance(b, dict) and list(a)==list(b) and all(agree(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return isinstance(b, (list,tuple)) and len(a)==len(b) and all(map(agree, a, b))
    return a==b or a!=a and b!=b

def changes(f, n, rng):
    "`n` changed files of the format `f`: bytes, whether the change can go unseen in a file that is checked, and the kind"
    for i in range(n):
        way = (None, *f.ways)[i%(1+len(f.ways))]
        data = other_bytes(f.whole, rng) if way is None else way(f, rng)
        if data is not None and data!=f.whole: yield data,way
