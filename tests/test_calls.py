"Every public function with wrong types, ranges, shapes, None, NaN and empties: a named error, or a value that has a meaning; and nothing changed"
import csv,inspect,os,pytest,signal,tempfile,torch,traceback,warnings
import fastsparse.all
from functools import cached_property
from fastsparse.all import *
from helpers import mlp
from pathlib import Path
from torch import nn

# The world of a call, made anew for each: small models, an optimizer, data, and a folder

class World:
    "What calls are made with"
    def __init__(self, folder): self.folder = Path(folder)

    @cached_property
    def xb(self): return torch.ones(4,6)
    @cached_property
    def dense(self): return mlp((6,8,4))
    @cached_property
    def data(self): return [(self.xb, torch.ones(4,4))]

    @cached_property
    def model(self):
        model = mlp((6,8,4))
        sparsify_model(model, .5, sparse_init_mode=None, seed=0)
        return model

    @cached_property
    def opt(self):
        opt = torch.optim.SGD(self.model.parameters(), .1, momentum=.9)
        self.model(self.xb).square().sum().backward()
        opt.step()
        return opt

    @property
    def learned(self):
        model = mlp((6,8,4))
        learn_masks(model, seed=0)
        return model

    @property
    def p(self):
        self.opt
        return self.model[0].weight

    @property
    def mask(self): return self.model[0].weight_mask

    @property
    def params(self): return [p for p in self.dense.parameters() if p.ndim>1]

    @property
    def file(self): return save_sparse(self.model, self.folder/'m.safetensors')

    @property
    def run(self): return save_run(self.folder/'run.pt', self.model, self.opt)

    def state(self):
        "All that a refused call must leave as it was"
        made = vars(self)
        ts = [o for k in ('dense','model') if k in made for o in made[k].state_dict().items()]+([('xb', self.xb)] if 'xb' in made else [])
        if 'opt' in made: ts += [(k,v) for p in self.model.parameters() for k,v in self.opt.state[p].items() if isinstance(v, torch.Tensor)]
        return [(k, v.detach().clone()) for k,v in ts],os.listdir(self.folder)

def mse(out, y): return (out-y).square().mean()

def step(model): pass

# What each name is given that isn't wrong; a name without a line here takes nothing but its defaults

good = {}
good |= dict(sparsify_model=lambda w: dict(model=w.dense, model_sparsity=.5, sparse_init_mode=None, seed=0))
good |= dict(sparsify_parameter=lambda w: dict(module=w.dense, name='0.weight', sparsity=.5, seed=0))
good |= dict(sparse_summary=lambda w: dict(model=w.model), unsparsify=lambda w: dict(model=w.model), apply_masks=lambda w: dict(module=w.model))
good |= dict(sparse_params=lambda w: dict(module=w.model), plain_copy=lambda w: dict(model=w.model), fold_masks=lambda w: dict(model=w.learned))
good |= dict(is_sparseable_module=lambda w: dict(m=w.dense[0]), sparseable_modules=lambda w: dict(model=w.dense))
good |= dict(sparse_mask=lambda w: dict(sizes=(4,6), sparsity=.5), sparse_mask_like=lambda w: dict(param=w.params[0], sparsity=.5))
good |= dict(mask_from_tensor=lambda w: dict(t=w.p), sparsity_from_tensor=lambda w: dict(t=w.p), top_k_mask=lambda w: dict(t=w.params[0], n_keep=3))
good |= dict(uniform_sparsity=lambda w: dict(params=w.params, model_sparsity=.5), first_layer_dense_uniform=lambda w: dict(params=w.params, model_sparsity=.5))
good |= dict(erdos_renyi_sparsity=lambda w: dict(params=w.params, model_sparsity=.5), global_sparsity=lambda w: dict(params=w.params, model_sparsity=.5))
good |= dict(layers_dense=lambda w: dict(patterns='0.*'), balanced_flops_sparsity=lambda w: dict(flops={'0.weight':1.,'2.weight':2.}))
good |= dict(given_sparsity=lambda w: dict(spec={'0.weight':.5}), init_kaiming_normal_sparse_=lambda w: dict(t=w.params[0].detach().clone()))
good |= dict(weight_magnitude=lambda w: dict(p=w.p), gradient_magnitude=lambda w: dict(p=w.p), gradient_saliency=lambda w: dict(p=w.p))
good |= dict(random_score=lambda w: dict(p=w.p))
good |= dict(gradient_momentum=lambda w: dict(p=w.p, opt=w.opt), momentum_redistribution=lambda w: dict(p=w.p, opt=w.opt, mask=w.mask))
good |= dict(gradient_redistribution=lambda w: dict(p=w.p, mask=w.mask), pack_masks=lambda w: dict(state=w.model.state_dict()))
good |= dict(unpack_masks=lambda w: dict(state=pack_masks(w.model.state_dict())), restore_sparse=lambda w: dict(model=w.dense, state=w.model.state_dict()))
good |= dict(save_sparse=lambda w: dict(model=w.model, path=w.folder/'a.safetensors'), load_sparse=lambda w: dict(path=w.file))
good |= dict(save_run=lambda w: dict(path=w.folder/'a.pt', model=w.model, opt=w.opt), load_run=lambda w: dict(path=w.run, model=w.model, opt=w.opt))
good |= dict(prune_magnitude=lambda w: dict(model=w.dense, target=.5), prune_wanda=lambda w: dict(model=w.dense, target=.5, data=w.data))
good |= dict(prune_sparsegpt=lambda w: dict(model=w.dense, target=.5, data=w.data))
good |= dict(prune_snip=lambda w: dict(model=w.dense, target=.5, data=w.data, loss_func=mse))
good |= dict(prune_grasp=lambda w: dict(model=w.dense, target=.5, data=w.data, loss_func=mse))
good |= dict(prune_synflow=lambda w: dict(model=w.dense, target=.5, xb=w.xb, rounds=3))
good |= dict(prune_to=lambda w: dict(model=w.model, sparsity=.6), find_ticket=lambda w: dict(model=w.dense, train=step, sparsity=.6))
good |= dict(count_flops=lambda w: dict(model=w.model, xb=w.xb), flop_profile=lambda w: dict(model=w.model, xb=w.xb))
good |= dict(predict_cost=lambda w: dict(model=w.model, xb=w.xb, n_steps=10))
good |= dict(shrink=lambda w: dict(model=plain_copy(w.model), xb=w.xb), pack=lambda w: dict(model=plain_copy(w.model), plan={}))
good |= dict(learn_masks=lambda w: dict(model=w.dense), Sparsify=lambda w: dict(shape=(4,6)), mask_penalty=lambda w: dict(model=w.model))
good |= dict(SparseEngine=lambda w: dict(model=w.model, opt=w.opt, n_steps=40, batches_per_update=5))
good |= dict(DynamicSparseTraining=lambda w: dict(model=w.model, opt=w.opt, n_steps=40, batches_per_update=5))
good |= dict(configure=lambda w: dict(spec=[dict(params='*', sparsity=.5)]), rules_table=lambda w: dict(model=w.dense, rules={'*':dict(sparsity=.5)}))
good |= dict(as_structure=lambda w: dict(x='2:4'), NM=lambda w: dict(n=2, m=4), Block=lambda w: dict(rows=2, cols=2))
good |= dict(auto_presets=lambda w: dict(n_steps=100), Interval=lambda w: dict(every=10))
good |= dict(CosineSchedule=lambda w: dict(init=.3, half_period=10), CubicSchedule=lambda w: dict(init=0., end=.9))
good |= dict(LinearSchedule=lambda w: dict(init=.3, slope=-.1))
good |= dict(supar_init_=lambda w: dict(model=w.model), supar_lrs=lambda w: dict(model=w.model, lr=.1), supar_splitter=lambda w: dict(model=w.model))
good |= dict(save_delta=lambda w: dict(model=w.model, base=w.dense.state_dict(), path=w.folder/'d.safetensors'), SparseCheckpoint=lambda w: dict(path=w.folder/'c.pt'))
good |= dict(register_method=lambda w: dict(name='mine of calls', preset=dict(batches_per_update=3)))
good |= dict(sparse_compute=lambda w: dict(model=w.model, xb=w.xb, plan={'0.weight':'rows','2.weight':'dense'}))
good |= dict(export_sparse=lambda w: dict(model=w.model, format='dense', sample=w.xb))
for name in 'DynamicSparseTrainingCallback FlopsCounter FreqSchedule FanIn Ledger MagnitudePlusGradient MeanGradient SampledGradient SparseHistory LearnedMaskCallback'.split(): good[name] = lambda w: {}

wrong = {'None':lambda: None, 'True':lambda: True, "'x'":lambda: 'x', "''":lambda: '', "b'x'":lambda: b'x', '-1':lambda: -1, '0':lambda: 0, '.5':lambda: .5, '1.5':lambda: 1.5,
    '2**70':lambda: 2**70, 'nan':lambda: float('nan'), 'inf':lambda: float('inf'), '[]':lambda: [], '()':lambda: (), '{}':lambda: {}, '{1:2}':lambda: {1:2}, '[None]':lambda: [None],
    'object()':object, 'tensor of 0':lambda: torch.zeros(0), 'tensor(nan)':lambda: torch.tensor(torch.nan), 'tensor of 2,3,5':lambda: torch.ones(2,3,5), 'Identity()':nn.Identity, 'int':lambda: int}
free = 'progress,kwargs,args,others,changes,settings,tracker,verbose'.split(',')

def parameters(name):
    "What a name takes, by name"
    ps = inspect.signature(getattr(fastsparse.all, name)).parameters.values()
    return [p.name for p in ps if p.kind not in (p.VAR_POSITIONAL,p.VAR_KEYWORD) and p.name not in free]

def cases(): return [(name,p,v) for name in sorted(good) for p in parameters(name) for v in wrong]

def is_ours(e):
    "Was `e` raised on purpose by a line of ours?"
    last = traceback.extract_tb(e.__traceback__)[-1]
    return '/fastsparse/' in last.filename and 'raise ' in last.line

def same(a, b):
    pairs = zip(a[0], b[0])
    return a[1]==b[1] and len(a[0])==len(b[0]) and all(n==k and u.dtype==v.dtype and torch.equal(u.nan_to_num(), v.nan_to_num()) for (n,u),(k,v) in pairs)

class Hang(Exception): pass

def too_long(*args): raise Hang

def outcome(name, param, value, folder):
    "'refused' (by name), 'raw' and the type of the error, 'changed' (refused too late) or 'taken'"
    w = World(folder)
    kw = {**good[name](w), param:wrong[value]()}
    before = w.state()
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 10)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            getattr(fastsparse.all, name)(**kw)
    except Exception as e:
        if not is_ours(e): return f'raw {type(e).__name__}'
        return 'refused' if same(before, w.state()) else 'changed'
    finally: signal.setitimer(signal.ITIMER_REAL, 0)
    return 'taken'

# What was found, row by row: whoever changes a room writes the table anew with `python tests/test_calls.py`

table = Path(__file__).parent/'calls.csv'

def rows():
    with open(table) as f: return [tuple(o) for o in csv.reader(f)]

def found(which):
    "Outcomes of these cases"
    for name,param,value in which:
        with tempfile.TemporaryDirectory() as folder:
            here = os.getcwd()
            os.chdir(folder)  # a file named 'x' is written there
            try: res = outcome(name, param, value, folder)
            finally: os.chdir(here)
        yield name,param,value,res

def worse(was, now):
    "Is it no longer refused by name?"
    return was=='refused' and now!='refused' or now=='changed' or now=='raw Hang'

def check(some):
    got = list(found([o[:3] for o in some]))
    bad = [(*now[:3], was[3], now[3]) for was,now in zip(some, got) if worse(was[3], now[3])]
    assert not bad, bad

def test_the_table_is_large():
    "At least 3,000 calls, and none that was refused after something had changed"
    assert len(rows())>=3000 and not [o for o in rows() if o[3]=='changed']

def test_errors_are_ours():
    "At least 98 % of the calls have a named error or a meaning"
    assert sum(o[3].startswith('raw') for o in rows())<=.02*len(rows())

def test_a_sample_of_calls(): check(rows()[::29])

@pytest.mark.full
def test_all_calls(): check(rows())

if __name__=='__main__':
    with open(table, 'w') as f: csv.writer(f, lineterminator='\n').writerows(found(cases()))
