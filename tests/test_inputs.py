"Calibration: data of any kind, patches of any layer, and a walk that sees what a pass for each layer sees"
import copy,math,pytest,torch,warnings,weakref
from collections import UserDict
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastsparse.all import *
from fastsparse.demo import TensorData
from fastsparse.prune.inputs import _inside,attended,Calibration,Part,layer_patches,layer_statistic
from fastsparse.prune.magnitude import plan_pruning
from fastsparse.weights.find import masked_params
from functools import partial
from helpers import *
from test_magnitude import data_of,net_of
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip('transformers')

convs = [(nn.Conv1d, dict(padding=1), (6,)), (nn.Conv1d, dict(padding='same', dilation=2, groups=2), (7,)),
    (nn.Conv2d, dict(stride=2, padding=(1,2), groups=4), (7,6)), (nn.Conv2d, dict(padding=1, padding_mode='circular'), (5,5)),
    (nn.Conv2d, dict(padding=2, padding_mode='reflect', dilation=(1,2)), (6,6)), (nn.Conv3d, dict(padding=1, stride=(1,2,1)), (3,4,3))]

@pytest.mark.parametrize('cls,kwargs,size', convs)
def test_patches_are_what_a_convolution_multiplies(cls, kwargs, size):
    "Trap of 004's SparseGPT: padding, stride, dilation, groups and modes; patches times weights are the layer's output"
    torch.manual_seed(0)
    layer,x = cls(4, 8, 3, bias=False, **kwargs).double(),torch.randn(2, 4, *size, dtype=torch.double)
    x = x[:1] if size==(7,) else x
    got = layer_patches(layer, x)@layer.weight.flatten(1).unflatten(0, (layer.groups,-1)).mT
    want = layer(x).movedim(1, -1)
    assert torch.allclose(got.movedim(0,1).flatten(1), want.reshape(-1, 8))
    assert torch.equal(layer_patches(layer, x[0]), layer_patches(layer, x[:1]))

class Times(nn.Module):
    def forward(self, x, k): return x*k

def test_blocks_after_each_other_share_their_other_arguments():
    part = Part(a := Times(), [((torch.tensor(3.),2.), {}, None)]).after([a,Times(),b := Times()])
    assert part.model is b and [(float(x),y,tokens) for (x,y),_,tokens in part.batches]==[(12.,2.,None)]

class Told(nn.Module):
    told = [0.]
    def forward(self, x): return x,x*0+self.told[0]

class Teller(nn.Module):
    "A block whose second output is written into it by the model"
    def __init__(self, tell):
        super().__init__()
        self.block,self.tell = Told(),tell
    def forward(self, x):
        Told.told[0] = self.tell(x)
        return self.block(x)[0]

def test_a_block_runs_alone_only_if_all_its_outputs_are_the_same():
    batches = [(torch.full((2,3), v),) for v in (1.,2.)]
    for tell,alone in ((lambda x: 5., True), (torch.sum, False)):
        calib = Calibration(model := Teller(tell), batches)
        assert (_inside(calib, model.block) is not None)==alone

@pytest.mark.parametrize('layer,shape', [(nn.Linear(8,4),(5,6,8)), (nn.Conv2d(4,6,3,padding=1),(5,4,6,6)), (nn.Conv1d(4,6,3,groups=2),(4,9))])
def test_patches_in_pieces(layer, shape, monkeypatch):
    "However small the pieces, the Hessian is the same, and none is larger than the bound, or one item"
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes,whole = [],layer_patches(layer, x)
    o,calib = plan_pruning(layer, .5)[0],Calibration(layer, [x])
    for bound in (2**22, 500, 1):
        monkeypatch.setattr(f'{layer_statistic.__module__}._piece', bound)
        sizes.clear()
        total,rows = layer_statistic(calib, o, lambda p: sizes.append(p.numel()) or p.mT@p)
        assert rows==whole.shape[1] and torch.allclose(total, whole.mT@whole, atol=1e-4)
        item = x.shape[-1] if isinstance(layer, nn.Linear) else whole.numel()//max(len(x)*(x.ndim==4), 1)
        assert max(sizes)<=max(bound, item)

def _loaders(x, y):
    ds = TensorData(x, y)
    yield DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8))
    yield DataLoader(ds, bs=16)
    yield torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    yield ds
    yield torch.utils.data.TensorDataset(x, y)
    yield [(x[:20],y[:20]),(x[20:],y[20:])]
    yield ((a,b) for a,b in zip(x.split(7), y.split(7)))
    yield [x[:13],x[13:]]
    yield lambda model: [model(o) for o in x.split(9)]

def test_every_source_of_data():
    "The same examples in other clothes give the same masks and weights (Hessians are averaged over items, not batches)"
    x,y = data_of()
    found = []
    for data in _loaders(x, y):
        net = net_of()
        prune_sparsegpt(net, '2:4', data)
        found.append(net)
    for net in found[1:]:
        assert same_masks(masks_of(net), masks_of(found[0]))
        assert all(torch.allclose(a, b, atol=1e-5) for a,b in zip(net.parameters(), found[0].parameters()))
    learn = Learner(next(_loaders(x, y)), net_of(), loss_func=MSELossFlat())
    prune_sparsegpt(learn, '2:4')
    assert same_masks(masks_of(learn.model), masks_of(found[0]))

@pytest.mark.parametrize('data,what', [(['ab'],'begins with a str'), ([[]],'begins with a list'), (iter(()),'reached by the data|no losses')])
def test_data_refused(data, what):
    "Law 10: what is no data, or holds none"
    for f in (prune_wanda, partial(prune_snip, loss_func=F.mse_loss)):
        with pytest.raises(ValueError, match=what): f(net_of(), .5, data)

class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,8),nn.Linear(8,4)
    def forward(self, x, scale): return self.b(input=self.a(x).relu()*scale)

def test_batches_of_dicts_and_samples():
    "Keyword batches and inputs by keyword; no more batches are read than asked for"
    x,read = data_of()[0],[]
    def batches():
        for o in x.split(10):
            read.append(1)
            yield dict(x=o, scale=2.)
    net = Dicts()
    prune_wanda(net, .5, batches(), n_samples=15)
    assert len(read)==2 and [int(m.sum()) for m in masks_of(net)]==[32,16]
    other = Dicts()
    other.load_state_dict({k: v for k,v in net.state_dict().items() if k.endswith(('weight','bias'))})
    prune_wanda(other, .5, [UserDict(x=x[:20], scale=2.)])
    assert [int(m.sum()) for m in masks_of(other)]==[32,16]

@pytest.mark.parametrize('mask,padded', [([[1,1,1],[1,1,1]], False), ([[1,1,1],[1,1,0]], True), ([[1.,1.,1.],[1.,1.,0.]], True), ([[0.,0.,0.],[0.,0.,0.]], False),
    ([[0.,0.,0.],[0.,0.,-1e9]], True), ([[[[0.,-math.inf],[0.,0.]]]], False), ([[[[0.,-math.inf],[0.,-math.inf]]]], True),
    ([[[[True,False],[True,True]]]], False)])
def test_padding_is_what_nothing_attends_to(mask, padded):
    "Masks of ones and zeros, masks that are added to scores, and causal ones"
    assert bool((~attended(torch.tensor(mask))).any())==padded

def test_progress(monkeypatch):
    "A bar over layers, batches or rounds, if asked for"
    net,(x,y) = net_of(),data_of()
    bars = []
    monkeypatch.setattr('fastsparse.kernels.timing.progress_bar', lambda xs, total=None, **kwargs: bars.append(total or len(xs)) or xs)
    prunes = [partial(prune_wanda, data=[x]), partial(prune_sparsegpt, data=[x]), partial(prune_snip, data=[(x,y)]*3, loss_func=F.mse_loss),
        partial(prune_grasp, data=[(x,y)]*3, loss_func=F.mse_loss), partial(prune_synflow, xb=x, rounds=7)]
    for progress in (False,True):
        for f in prunes: f(net_of(), .5, progress=progress)
        if not progress: assert not bars
    assert bars==[2,2,3,3,3,7]

def _pruned_slowly(net, prune, target, batches):
    "For each layer, in the order of the first calls, the whole model runs on all batches, and a copy of the layer alone is pruned by what it saw"
    layers = {m:m.weight for m in net.modules() if isinstance(getattr(m, 'weight', None), nn.Parameter) and m.weight.ndim>1 and not isinstance(m, nn.Embedding)}
    def seen(p):
        inputs,order = [],[]
        def f(m, args, kwargs):
            order.append(m)
            if m.weight is p: inputs.append([*args,*kwargs.values()][0])
        hooks = [m.register_forward_pre_hook(f, with_kwargs=True) for m in layers]
        net.eval()
        with torch.no_grad():
            for b in batches: net(**b) if isinstance(b, dict) else net(b)
        for h in hooks: h.remove()
        return inputs,list(dict.fromkeys(order))
    done,masks = [],{}
    for m in seen(None)[1]:
        p = layers[m]
        if any(p is o for o in done): continue
        done.append(p)
        alone = nn.Sequential(copy.deepcopy(m))
        prune(alone, target, seen(p)[0], n_samples=10**6)
        with torch.no_grad(): p.copy_(alone[0].weight)
        masks[next(n for n,q in net.named_parameters() if q is p)] = alone[0].weight_mask
    return masks

def _walked(make, prune, target, batches, most=3):
    "Prune as ever, compare with the slow way, and count how often the first layer runs for a batch"
    fast,slow,runs = make(),make(),[]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        masks = _pruned_slowly(slow, prune, target, batches)
        hook = next(m for m in fast.modules() if getattr(m, 'weight', None) is not None and m.weight.ndim>1).register_forward_hook(lambda *_: runs.append(1))
        prune(fast, target, batches, n_samples=10**6)
    hook.remove()
    got = {o.name:o.mask for o in masked_params(fast)}
    assert got.keys()==masks.keys() and all(torch.equal(got[k], m) for k,m in masks.items())
    assert all(torch.allclose(a, b, atol=1e-4) for a,b in zip(fast.parameters(), slow.parameters()))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in fast.modules() if m is not fast and not masked_params(m))
    assert len(runs)<=most*len(batches), len(runs)/len(batches)

class ConvNet(nn.Module):
    "Two branches that meet again, and groups"
    def __init__(self):
        super().__init__()
        self.stem,self.left,self.right,self.head = nn.Conv2d(4,8,3,padding=1),nn.Conv2d(8,8,3,padding=1,groups=2),nn.Conv2d(8,8,1),nn.Linear(8,8)
        self.norm = nn.BatchNorm2d(8)
    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        return self.head((self.left(x)+self.right(x)+x).relu().mean((2,3)))

class Branching(nn.Module):
    "Which layer comes first depends on the batch, and some batches leave one out"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.d = [nn.Linear(8,8) for _ in range(4)]
    def forward(self, x):
        if x.sum()>10: return self.d(self.c(self.b(self.a(x)).relu()).relu())
        if x.sum()>0: return self.d(self.b(self.c(self.a(x)).relu()).relu())
        return self.d(self.b(self.a(x).relu()))

def _vectors(n=3, cols=8):
    x = data_of(40*n, cols=cols)[0]
    return [*x.split(40)[:-1], x[-40:-7]]

def _tokens(): return [dict(input_ids=torch.randint(50, (4,k), generator=torch.Generator().manual_seed(k))) for k in (12,12,9)]

def _gpt2(): return transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2))

def _bert():
    small = dict(num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, hidden_size=16, **small))

def _images(): return [torch.randn(10,4,6,6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
def _shifted(): return [x+3*i for i,x in enumerate(_vectors())]

class Routed(nn.Module):
    "Batches of positive sums go through `a` twice, others never"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,8),nn.Linear(8,4)
    def forward(self, x): return self.b(self.a(self.a(x)) if x.sum()>0 else x)

class Recurring(nn.Module):
    "`a` runs twice, `c` has the weight of `b`, and the others run once"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.d,self.e = [nn.Linear(8,8) for _ in range(5)]
        self.c.weight = self.b.weight
    def forward(self, x): return self.e(self.d(self.c(self.a(self.b(self.a(x).relu()).relu()).relu()).relu()).relu())

class Restoring(nn.Module):
    "Keeps the mean of a batch, to be added again between later layers, as normalisation of time series does"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = [nn.Linear(8,8) for _ in range(3)]
    def forward(self, x):
        self.mean = x.mean()
        return self.c(self.b(self.a(x-self.mean).relu())+self.mean)

class Rerouted(nn.Module):
    "Which of two layers comes first depends on how sparse the first is: a batch comes back to a layer that was done"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = [nn.Linear(8,8) for _ in range(3)]
    def forward(self, x):
        pruned,x = bool((self.a.weight==0).any()),self.a(x).relu()
        for l in (self.c,self.b) if pruned and x.sum()>self.at else (self.b,self.c): x = l(x).relu()
        return x
    at = 0.

class Checked(Restoring):
    "Fails where batches are mixed up, and catches what it can"
    def forward(self, x):
        self.n = len(x)
        try: y = self.b(self.a(x).relu())
        except ZeroDivisionError: y = x
        if len(y)!=self.n: raise KeyError('another batch')
        return self.c(y)

class Outside(nn.Module):
    "A block that depends on what the model around it has set"
    class Block(nn.Sequential):
        def forward(self, x): return super().forward(x)*self.scale[0]
    def __init__(self):
        super().__init__()
        self.scale = [0.]
        self.a,self.block = nn.Linear(8,8),self.Block(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,8))
        self.block.scale = self.scale
        self.head = nn.Linear(8,8)
    def forward(self, x):
        self.scale[:] = [float(x.abs().mean())]
        return self.head(self.block(self.a(x)))

class Cleared(Outside):
    "A block that can't run alone"
    def forward(self, x):
        out = super().forward(x)
        self.scale.clear()
        return out

walked = dict(mlp=(lambda: mlp((8,)*7, act=nn.ReLU), lambda: _vectors(12), 3), convnet=(ConvNet, _images, 5), gpt2=(_gpt2, _tokens, 6),
    bert=(_bert, _tokens, 12), branches=(Branching, lambda: [x-x.mean()+k for x,k in zip(_vectors(), (.1,.01,-1.))], 5),
    keywords=(Dicts, lambda: [dict(x=x, scale=2.) for x in _vectors()], 4), shared=(Recurring, _vectors, 99),
    routed=(Routed, lambda: [_vectors()[0].abs(), -_vectors()[0].abs()], 99),
    **{c.__name__:(c, _shifted, 99) for c in (Restoring, Rerouted, Checked, Outside, Cleared)})

@pytest.mark.parametrize('prune', [prune_wanda, prune_sparsegpt])
@pytest.mark.parametrize('target', ['2:4',.5])
@pytest.mark.parametrize('name', walked)
def test_blocks_see_what_a_pass_for_each_layer_sees(name, target, prune):
    "Masks and weights are equal, and the first layer runs few times, however many blocks there are"
    make,batches,most = walked[name]
    _walked(lambda: (torch.manual_seed(0), make())[1], prune, target, batches(), most)

def test_memory_holds_the_activations_of_one_layer():
    "However deep the model is: what goes into a layer and what comes out, of each batch, and those of the batch at work"
    net,outputs,most = mlp((8,)*13, act=nn.ReLU),[],[]
    def f(m, args, out):
        outputs.append(weakref.ref(out))
        most.append(sum(o() is not None for o in outputs))
    for m in net: m.register_forward_hook(f)
    batches = _vectors(5)
    prune_wanda(net, .5, batches, n_samples=10**6)
    assert max(most)<=2*len(batches)+3

class Stubborn(nn.Module):
    "Catches everything"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = [nn.Linear(8,8) for _ in range(3)]
    def forward(self, x):
        for l in (self.a,self.b,self.c):
            try: x = l(x)
            except Exception: pass
        return x

def test_an_interrupt_leaves_all_as_it_was():
    net = mlp((8,)*5)
    old = copy.deepcopy(net.state_dict())
    net[4].register_forward_pre_hook(lambda m,a: (_ for _ in ()).throw(KeyboardInterrupt) if (net[2].weight==0).any() else None)
    with pytest.raises(KeyboardInterrupt): prune_wanda(net, .5, _vectors())
    assert all(torch.equal(v, net.state_dict()[k]) for k,v in old.items()) and net.training

def test_a_model_that_catches_everything():
    net = Stubborn()
    prune_wanda(net, '2:4', _vectors())
    assert all(m.float().mean()==.5 for m in masks_of(net))

def test_autocast_as_its_caller_is():
    seen = []
    net = mlp((8,)*4)
    net[2].register_forward_pre_hook(lambda m,a: seen.append(a[0].dtype))
    with torch.autocast('cpu', torch.bfloat16): prune_wanda(net, .5, _vectors())
    assert set(seen)=={torch.bfloat16} and not torch.is_autocast_enabled('cpu')

def test_an_expert_that_no_batch_reaches_any_more_stays_dense():
    "Its router was pruned before it: a warning names it"
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.c = [nn.Linear(8,8) for _ in range(3)]
        def forward(self, x): return self.c(self.a(x) if (self.a.weight==0).any() else self.b(self.a(x)))
    net = Experts()
    with pytest.warns(UserWarning, match=r'^b\.weight can.t be pruned'): prune_wanda(net, '2:4', _vectors())
    assert {o.name:float(o.mask.float().mean()) for o in masked_params(net)}=={'a.weight':.5, 'b.weight':1., 'c.weight':.5}

class Between(nn.Module):
    "Layers in a row, with a function in between that writes to what the first hands on, or doesn't"
    def __init__(self, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.layers,self.in_place = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)]),in_place
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = nn.functional.relu_(x) if self.in_place else nn.functional.relu(x)
        return x

def test_what_is_written_between_layers_is_seen():
    "The same masks as where it isn't written in place"
    data,models = [torch.randn(8, 16) for _ in range(3)],[Between(o) for o in (True,False)]
    for m in models: prune_wanda(m, .5, data)
    for p,q in zip(*[m.parameters() for m in models]): assert p.equal(q)

def test_layers_in_a_row_run_twice_a_batch():
    "Once for what sums up their inputs, and once with their new weights"
    m,counts = nn.Sequential(*[o for _ in range(8) for o in (nn.Linear(16, 16), nn.ReLU())]),[]
    for layer in m: layer.register_forward_hook(lambda *args: counts.append(args[0]))
    prune_wanda(m, .5, [torch.randn(8, 16) for _ in range(4)])
    assert sum(isinstance(o, nn.Linear) for o in counts)<=3*8*4

def test_layers_with_one_input_take_one_run():
    "Queries, keys and values, and gate and up, are run once for all; sums are those of a run for each"
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)).eval()
    data,counts = [dict(input_ids=torch.randint(60, (2,5))) for _ in range(16)],[]
    slow = copy.deepcopy(model)
    layers = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    for m in layers: m.register_forward_hook(lambda *args: counts.append(args[0]))
    prune_wanda(model, .5, data)
    assert len(counts)<=3.75*len(layers)*16, len(counts)/len(layers)/16
    def each(m):
        for b in data: m(**b)
    prune_wanda(slow, .5, each)
    for a,b in zip(masks_of(model), masks_of(slow), strict=True): assert a.equal(b)
