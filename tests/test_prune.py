"Pruning at once, against references solved by hand, by plain NumPy and by autograd"
import copy, io, math, numpy as np, pytest, sys, threading, torch, weakref
from collections import UserDict
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastai.optimizer import SGD
from fastsparse.all import *
from fastsparse.weights.weight import masked_params
from fastsparse.prune.inputs import Calibration,layer_patches,layer_statistic
from fastsparse.prune.magnitude import global_masks,Goal,layer_masks,plan_pruning,prune_by,prune_random
from fastsparse.demo import TensorData
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn
import warnings
from fastsparse.model.layers import register_layer
from torch.nn import functional as F
from types import SimpleNamespace

def _net(seed=0): return mlp((8,12,6), seed=seed, act=nn.ReLU)
def _data(n=40, seed=3, cols=8, outs=6):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, cols, generator=g)@torch.randn(cols, cols, generator=g),torch.randn(n, outs, generator=g)

# ---- targets

@pytest.mark.parametrize('target,what', [(1.,r'1\.0.*\[0,1\)'), (-.1,r'-0\.1'), ('3:2','n is 3'), ('block 2x2','must have a sparsity in'), ((.8,'2:4'),r'0\.8.*has a sparsity of 0\.5'), ((.5,'nonsense'),'nonsense'),
    ({'1':.5},"nothing to prune"), ({'*':None},'nothing to prune'), ('3:5',r'0\.weight: .*5'), ({'2':'5:5 flat'},r'2\.weight')])
def test_targets_refused(target, what):
    "Law 10: value, range and way out, before anything changed, by every method"
    net,(x,y) = _net(),_data()
    state = copy.deepcopy(net.state_dict())
    methods = [prune_magnitude, prune_random, partial(prune_snip, data=[(x,y)], loss_func=F.mse_loss), partial(prune_grasp, data=[(x,y)], loss_func=F.mse_loss),
        partial(prune_synflow, xb=x), partial(prune_wanda, data=[x]), partial(prune_sparsegpt, data=[x])]
    for f in methods:
        with pytest.raises(ValueError, match=what): f(net, target)
    assert state.keys()==net.state_dict().keys() and all(torch.equal(v, net.state_dict()[k]) for k,v in state.items())

def test_sparse_models_are_refused():
    net = _net()
    prune_magnitude(net, .5)
    with pytest.raises(ValueError, match='unsparsify'): prune_magnitude(net, .8)

def test_rules():
    "The first rule that names a weight decides, by parameter or module; lm_head is dense unless a rule says otherwise"
    net = nn.ModuleDict(dict(body=_net(), lm_head=nn.Linear(8,4)))
    assert [o.name for o in plan_pruning(net, .5)]==['body.0.weight','body.2.weight']
    assert [(o.name,o.sparsity,str(o.structure)) for o in plan_pruning(net, {'body.0':(.75,'block 2x2'), 'body':'1:4', '*':.5})]==[
        ('body.0.weight',.75,'block 2x2'), ('body.2.weight',.75,'1:4'), ('lm_head.weight',.5,'unstructured')]
    prune_magnitude(net, .5)
    assert net['lm_head'].weight.count_nonzero()==32 and net['lm_head'].weight_mask.all()

def test_counts_and_rankings():
    "Law 1: totals are exact by layer and over all layers; the best live"
    for ranking in (layer_masks, global_masks):
        net = _net()
        flat = torch.cat([net[i].weight.detach().abs().flatten() for i in (0,2)]).numpy()
        prune_magnitude(net, .7, ranking)
        masks = masks_of(net)
        assert sum(int(m.sum()) for m in masks)==round(.3*168)
        if ranking is layer_masks: assert [int(m.sum()) for m in masks] in ([29,21],[28,22])
        else: assert set(np.flatnonzero(torch.cat([m.flatten() for m in masks])))==set(oracle_order(flat, np.ones(168, bool))[:50])
        assert_dead(net)

def test_a_sparsity_goes_through_few_functions():
    "Those that are given the number, a rule or a goal that holds it, until it is masks: at most eight in four files"
    def holds(v):
        if isinstance(v, (list,tuple)): return any(map(holds, v))
        return isinstance(v, Goal) or isinstance(v, float) and math.isclose(v, .83)
    def see(frame, event, arg):
        code = frame.f_code
        if event!='call' or 'fastsparse' not in code.co_filename or '<' in code.co_name: return
        if any(holds(frame.f_locals.get(n)) for n in code.co_varnames[:code.co_argcount]): found.add((code.co_filename, code.co_qualname))
    net,found,was = mlp((10,10,7), act=nn.ReLU),set(),sys.getprofile()
    sys.setprofile(see)
    try: prune_magnitude(net, .83)
    finally: sys.setprofile(was)
    assert 'prune_magnitude' in {name for _,name in found} and len(found)<=8 and len({file for file,_ in found})<=4, sorted(found)

# ---- N:M magnitude

def _best_nm(w, n, m):
    "The best pattern of each block by sorting, rows of a matrix, the last block shorter"
    mask = np.zeros(w.shape, bool)
    for r,row in enumerate(w):
        for i in range(0, len(row), m):
            for j in oracle_order(np.abs(row[i:i+m]), np.ones(len(row[i:i+m]), bool))[:n]: mask[r,i+j] = True
    return mask

specials = st.sampled_from([0.,1.,-1.,2.,float('inf'),-float('inf'),float('nan')])

@given(st.data(), st.integers(1,4), st.integers(0,3), st.sampled_from([(3,2),(2,3,2),(2,1,2,2),(1,2,1,1,2)]), st.booleans())
@settings(max_examples=40)
def test_nm_against_sorting(data, n, more, shape, flat):
    "Any N:M, Linear and Conv1-3d, along input channels or flattened, padded or not: ties to the lowest index, infinities live, NaN last"
    m = n+more
    pad = data.draw(st.booleans())
    if not pad: shape = (shape[0], shape[1]*m, *shape[2:])
    size = math.prod(shape)
    w = torch.tensor(data.draw(st.lists(st.floats(-3,3,width=32)|specials, min_size=size, max_size=size))).view(shape)
    layer = [nn.Linear,nn.Conv1d,nn.Conv2d,nn.Conv3d][len(shape)-2](shape[1], shape[0], *([shape[2:]] if len(shape)>2 else []), bias=False)
    with torch.no_grad(): layer.weight.copy_(w)
    prune_magnitude(layer, f'{n}:{m}'+' flat'*flat+' pad'*pad)
    view = (lambda t: t.flatten(1)) if flat else (lambda t: t.movedim(1,-1).reshape(-1,shape[1]))
    assert np.array_equal(view(layer.weight_mask).numpy(), _best_nm(view(w).numpy(), n, m))
    assert is_positive_zero(layer.weight[~layer.weight_mask])

@pytest.mark.parametrize('block,kept', [([1.,math.inf,3.,2.],[0,1,1,0]), ([5.,5.,5.,5.],[1,1,0,0]), ([math.nan,1.,math.nan,0.],[0,1,0,1]), ([-4.,3.,-3.,0.],[1,1,0,0])])
def test_asp_by_hand(block, kept):
    "Trap 13 and 004's inf*0: the infinity lives"
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([block]))
    prune_magnitude(layer, '2:4')
    assert layer.weight_mask.int().tolist()==[kept]

def test_large_groups_are_not_enumerated():
    "Trap 13: 16 of 64 has 5e14 patterns, and takes a sort"
    layer = nn.Linear(256, 8, bias=False)
    prune_magnitude(layer, '16:64')
    assert np.array_equal(layer.weight_mask.numpy(), _best_nm(layer.weight_mask.numpy()*1., 16, 64)) and (layer.weight_mask.view(-1,64).sum(1)==16).all()
    layer = nn.Linear(256, 8, bias=False)
    w = layer.weight.detach().numpy().copy()
    prune_magnitude(layer, '16:64')
    assert np.array_equal(layer.weight_mask.numpy(), _best_nm(w, 16, 64))

# ---- Wanda

def test_wanda_by_hand():
    "abs(w)*norm of the input column, the same number in each row; weights stay"
    layer = nn.Linear(4, 2, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([[1.,2.,3.,4.],[-4.,3.,-2.,1.]]))
    x = torch.tensor([[3.,0.,1.,0.],[4.,2.,0.,1.]])  # norms 5, 2, 1, 1: scores [5,4,3,4] and [20,6,2,1]
    prune_wanda(layer, .5, [x])
    assert layer.weight.tolist()==[[1.,2.,0.,0.],[-4.,3.,0.,0.]]
    layer = nn.Linear(4, 2, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([[1.,2.,3.,4.],[-4.,3.,-2.,1.]]))
    prune_wanda(layer, .6, [x])  # round(.4*8)=3 live: two in the first row, one in the second
    assert layer.weight.tolist()==[[1.,2.,0.,0.],[-4.,0.,0.,0.]]

def test_wanda_beside_infinities():
    "An infinite weight lives; one that is NaN, or infinite where no input comes, doesn't"
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([[math.nan,math.inf,-math.inf,1e-9]]))
    prune_wanda(layer, .5, [torch.tensor([[1.,0.,1.,1.]])])
    assert layer.weight_mask.tolist()==[[False,False,True,True]]

def test_wanda_on_a_convolution():
    "Norms of unfolded, padded inputs, a group of channels at a time; 2:4 along input channels"
    torch.manual_seed(0)
    conv,x = nn.Conv2d(8, 6, 3, padding=1, groups=2, bias=False),torch.randn(5,8,6,6)
    score = torch.stack([F.unfold(o, 3, padding=1).square().sum((0,2)).sqrt().view(4,3,3) for o in x.chunk(2, 1)])
    score = (conv.weight.abs().view(2,3,4,3,3)*score[:,None]).view(6,4,3,3).detach()
    prune_wanda(conv, '2:4', [x[:2],x[2:]])
    got = conv.weight_mask.movedim(1,-1).reshape(-1,4).numpy()
    assert np.array_equal(got, _best_nm(score.movedim(1,-1).reshape(-1,4).numpy(), 2, 4))

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

# ---- SparseGPT

def _obs(w, H, groups, choose):
    "Plain float64 optimal brain surgery of one row: an inverse of the rest of H for each column"
    w,mask = w.copy(),np.ones(len(w), bool)
    for q in range(len(w)):
        inv = lambda j: np.linalg.inv(H[j:,j:])
        if (g := [o for o in groups if o[0]==q]): mask[g[0][0]:g[0][1]] = choose(np.array([w[j]**2/inv(j)[0,0] for j in range(*g[0])]))
        if not mask[q]:
            i = inv(q)
            w[q:] -= w[q]/i[0,0]*i[0]
            w[q] = 0
    return w,mask

def _hessian(patches, damp):
    H = 2/len(patches)*patches.T@patches
    dead = np.diag(H)==0
    H[dead,dead] = 1
    return H+damp*np.diag(H).mean()*np.eye(len(H)),dead

@pytest.mark.parametrize('block', [1,3,4,128])
@pytest.mark.parametrize('target,n,m', [('2:4',2,4), ('1:4',1,4), ('3:4',3,4), ('2:5 pad',2,5)])
def test_sparsegpt_nm_against_plain_obs(target, n, m, block):
    "Column by column in float64; keeps n of m (004 pruned n), updates weights (004 threw the updates away), a dead column, any block"
    torch.manual_seed(0)
    layer,x = nn.Linear(12, 5, dtype=torch.double),_data(cols=12)[0].double()
    x[:,7] = 0
    w0,bias = layer.weight.detach().numpy().copy(),layer.bias.clone()
    H,dead = _hessian(x.numpy(), .02)
    w0[:,dead] = 0
    def best(s):
        keep = np.zeros(len(s), bool)
        keep[oracle_order(s, np.ones(len(s), bool))[:n]] = True
        return keep
    want = [_obs(w, H, [(i,min(i+m,12)) for i in range(0,12,m)], best) for w in w0]
    prune_sparsegpt(layer, target, [x[:16],x[16:]], block=block, damp=.02)
    assert np.allclose(layer.weight.detach().numpy(), np.stack([w for w,_ in want]), atol=1e-9)
    assert np.array_equal(layer.weight_mask.numpy(), np.stack([m for _,m in want])) and torch.equal(layer.bias, bias)
    assert not np.allclose(w0[layer.weight_mask.numpy()], layer.weight.detach().numpy()[layer.weight_mask.numpy()])

def test_sparsegpt_unstructured_against_plain_obs():
    "One block: the cheapest of the whole layer go first; each row is then plain OBS with that mask"
    torch.manual_seed(1)
    layer,x = nn.Linear(10, 6, dtype=torch.double),_data(cols=10)[0].double()
    w0 = layer.weight.detach().numpy().copy()
    H,_ = _hessian(x.numpy(), .01)
    cost = np.array([[w[j]**2/np.linalg.inv(H[j:,j:])[0,0] for j in range(10)] for w in w0])
    mask = np.zeros(60, bool)
    mask[oracle_order(cost, np.ones(60, bool))[:round(.35*60)]] = True
    mask = mask.reshape(6,10)
    want = np.stack([_obs(w, H, [(0,10)], lambda s: m)[0] for w,m in zip(w0,mask)])
    prune_sparsegpt(layer, .65, [x])
    assert np.array_equal(layer.weight_mask.numpy(), mask) and np.allclose(layer.weight.detach().numpy(), want, atol=1e-9)

@pytest.mark.parametrize('block', [1,3,4])
def test_sparsegpt_blocks_against_plain_obs(block):
    "At the start of each block the cheapest of all outputs go, by weights that made up for what was pruned before; a plain inverse for each column"
    torch.manual_seed(3)
    layer,x = nn.Linear(12, 5, dtype=torch.double),_data(cols=12)[0].double()
    w = layer.weight.detach().numpy().copy()
    H,_ = _hessian(x.numpy(), .01)
    mask = np.ones(w.shape, bool)
    for q in range(12):
        if q%block==0:
            cost = w[:,q:q+block]**2/np.array([np.linalg.inv(H[j:,j:])[0,0] for j in range(q,q+block)])
            keep = oracle_order(cost, np.ones(cost.size, bool))[:cost.size*2//5]
            mask[:,q:q+block] = np.isin(np.arange(cost.size), keep).reshape(cost.shape)
        i = np.linalg.inv(H[q:,q:])
        for r in np.flatnonzero(~mask[:,q]): w[r,q:] -= w[r,q]/i[0,0]*i[0]
    prune_sparsegpt(layer, .6, [x], block=block)
    assert np.array_equal(layer.weight_mask.numpy(), mask) and np.allclose(layer.weight.detach().numpy(), w*mask, atol=1e-9)

@pytest.mark.parametrize('block', [3,4,7])
def test_sparsegpt_counts(block):
    "Law 1: the total is exact whatever the blocks"
    layer = nn.Linear(10, 7)
    prune_sparsegpt(layer, .37, [_data(cols=10)[0]], block=block)
    assert layer.weight_mask.sum()==round(.63*70)
    assert_dead(layer)

def test_sparsegpt_on_a_convolution_is_that_of_its_patches():
    "N:M runs along input channels, as magnitudes do (004: one did, the other not); each group of channels has its own Hessian"
    torch.manual_seed(2)
    conv = nn.Conv2d(8, 6, 3, padding=1, stride=2, groups=2, dtype=torch.double)
    x = torch.randn(4, 8, 9, 9, dtype=torch.double)
    patches,w0 = layer_patches(conv, x),conv.weight.detach().clone()
    prune_sparsegpt(conv, '2:4', [x])
    order = torch.arange(36).view(4,9).T.flatten()
    for g in range(2):
        lin = nn.Linear(36, 3, bias=False, dtype=torch.double)
        with torch.no_grad(): lin.weight.copy_(w0[3*g:3*g+3].flatten(1)[:,order])
        prune_sparsegpt(lin, '2:4', [patches[g][:,order]])
        assert torch.allclose(conv.weight[3*g:3*g+3].flatten(1)[:,order], lin.weight, atol=1e-9)
    assert (conv.weight_mask.sum(1)==2).all()

@pytest.mark.parametrize('cls,kwargs,size', convs)
def test_sparsegpt_beats_its_own_mask(cls, kwargs, size):
    "On every convolution the updated weights come nearer to the old outputs than the old weights under the same mask; flattened N:M too"
    torch.manual_seed(0)
    for target in (.5,'2:3 flat'):
        layer,x = cls(4, 8, 3, **kwargs),torch.randn(6 if size!=(7,) else 20, 4, *size)
        old,y = copy.deepcopy(layer),layer(x).detach()
        prune_sparsegpt(layer, target, [x])
        with torch.no_grad(): old.weight.mul_(layer.weight_mask)
        assert F.mse_loss(layer(x), y)<F.mse_loss(old(x), y)

def test_sparsegpt_refuses():
    layer,x = nn.Linear(8, 4),_data()[0]
    w = layer.weight.clone()
    for kwargs,what in [(dict(block=0),'block is 0'), (dict(damp=-1.),'damp is -1'), (dict(target='2:4 axis 0'),'along inputs'), (dict(target=(.5,'block 2x2')),'along inputs'),
        (dict(data=[]),'reached by the data'), (dict(data=None),'only a Learner'), (dict(data=[x*math.nan]),'not finite'), (dict(n_samples=0),'n_samples')]:
        with pytest.raises(ValueError, match=what): prune_sparsegpt(layer, **(dict(target=.5, data=[x])|kwargs))
    assert torch.equal(layer.weight, w) and 'weight_mask' not in dict(layer.named_buffers()) and not layer._forward_pre_hooks
    with torch.no_grad(): layer.weight[1,2] = math.nan
    with pytest.raises(ValueError, match='not finite'): prune_sparsegpt(layer, .5, [x])

@pytest.mark.parametrize('prune', [prune_sparsegpt, prune_wanda])
def test_data_of_another_width_change_nothing(prune):
    layer = nn.Linear(8, 4)
    with pytest.raises(RuntimeError): prune(layer, .5, [torch.randn(16,5)])
    assert 'weight_mask' not in dict(layer.named_buffers()) and layer.weight.count_nonzero()==32 and not layer._forward_pre_hooks

def test_all_or_nothing():
    "A layer that can't be solved leaves those before it as they were, without masks"
    net,x = nn.Sequential(nn.Linear(8,4), nn.Linear(4,20), nn.Linear(20,3)),_data(n=12)[0]
    net[0].register_forward_hook(lambda m,a,o: o*0 if m.weight.count_nonzero()<32 else o)
    old = copy.deepcopy(net.state_dict())
    with pytest.raises(torch.linalg.LinAlgError): prune_sparsegpt(net, .5, [x], damp=0.)
    assert net.state_dict().keys()==old.keys() and all(torch.equal(v, net.state_dict()[k]) for k,v in old.items())
    def fail(m): raise KeyboardInterrupt
    calls = iter(range(9))
    with pytest.raises(KeyboardInterrupt): prune_sparsegpt(net, .5, lambda m: m(x) if next(calls)<2 else fail(m))
    assert all(torch.equal(v, net.state_dict()[k]) for k,v in old.items()) and not any(m._forward_pre_hooks for m in net.modules()) and net.training

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('target', [.5,'2:4'])
def test_same_on_a_gpu(target):
    "The Hessian is added up once there too (004 did so twice): masks and weights as on the CPU"
    x = torch.randn(16, 4, 8, 8)
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Conv2d(4,8,3,padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512,16)))[1]
    for f in (prune_sparsegpt, prune_wanda):
        a,b = make(),make().cuda()
        f(a, target, [x])
        f(b, target, [x.cuda()])
        assert all((p.cpu()==q).float().mean()>.999 for p,q in zip(masks_of(b), masks_of(a))) and all(m.is_cuda for m in masks_of(b))
        assert torch.allclose(a(x), b(x.cuda()).cpu(), atol=1e-2)

# ---- calibration

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
    x,y = _data()
    found = []
    for data in _loaders(x, y):
        net = _net()
        prune_sparsegpt(net, '2:4', data)
        found.append(net)
    for net in found[1:]:
        assert same_masks(masks_of(net), masks_of(found[0]))
        assert all(torch.allclose(a, b, atol=1e-5) for a,b in zip(net.parameters(), found[0].parameters()))
    learn = Learner(next(_loaders(x, y)), _net(), loss_func=MSELossFlat())
    prune_sparsegpt(learn, '2:4')
    assert same_masks(masks_of(learn.model), masks_of(found[0]))

@pytest.mark.parametrize('data,what', [(['ab'],'begins with a str'), ([[]],'begins with a list'), (iter(()),'reached by the data|no losses')])
def test_data_refused(data, what):
    "Law 10: what is no data, or holds none"
    for f in (prune_wanda, partial(prune_snip, loss_func=F.mse_loss)):
        with pytest.raises(ValueError, match=what): f(_net(), .5, data)

class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,8),nn.Linear(8,4)
    def forward(self, x, scale): return self.b(input=self.a(x).relu()*scale)

def test_batches_of_dicts_and_samples():
    "Keyword batches and inputs by keyword; no more batches are read than asked for"
    x,read = _data()[0],[]
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

def test_layer_by_layer():
    "Each layer is pruned by the inputs that the pruned layers before it make, in the order of the data, not of the definition"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last,self.first_ = nn.Linear(8,6),nn.Linear(8,8)
        def forward(self, x): return self.last(self.first_(x).relu())
    torch.manual_seed(0)
    net,x = Net(),_data()[0]
    a,b = copy.deepcopy(net.first_),copy.deepcopy(net.last)
    prune_sparsegpt(net, '2:4', [x])
    prune_sparsegpt(a, '2:4', [x])
    prune_sparsegpt(b, '2:4', [a(x).relu().detach()])
    assert torch.allclose(net.first_.weight, a.weight, atol=1e-6) and torch.allclose(net.last.weight, b.weight, atol=1e-5)

def test_nothing_runs_behind_the_layer_that_is_pruned():
    "A look at the order, then one walk that ends at the last layer, and one batch more to see that nothing was mixed up"
    net,(x,_) = mlp((8,)*6),_data()
    runs = []
    for i,l in enumerate(net[::2]): l.register_forward_hook(lambda m,a,o,i=i: runs.append(i))
    prune_wanda(net, .5, [x[:20],x[20:]])
    assert runs==[0,1,2,3,4]*2+[0,0,1,1,2,2,3,3]+[0,1,2,3,4]

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

def test_progress(monkeypatch):
    "A bar over layers, batches or rounds, if asked for"
    net,(x,y) = _net(),_data()
    bars = []
    monkeypatch.setattr('fastsparse.core.progress.progress_bar', lambda xs, total=None, **kwargs: bars.append(total or len(xs)) or xs)
    prunes = [partial(prune_wanda, data=[x]), partial(prune_sparsegpt, data=[x]), partial(prune_snip, data=[(x,y)]*3, loss_func=F.mse_loss),
        partial(prune_grasp, data=[(x,y)]*3, loss_func=F.mse_loss), partial(prune_synflow, xb=x, rounds=7)]
    for progress in (False,True):
        for f in prunes: f(_net(), .5, progress=progress)
        if not progress: assert not bars
    assert bars==[2,2,3,3,3,7]

class Routed(nn.Module):
    "Batches of positive sums go through `a` twice, others never"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,8),nn.Linear(8,4)
    def forward(self, x): return self.b(self.a(self.a(x)) if x.sum()>0 else x)

def test_routes_that_depend_on_data():
    "As many calls as batches, but not one in each: all of a layer's inputs count"
    torch.manual_seed(0)
    net,x = Routed(),_data()[0][:8]
    a,first_ = copy.deepcopy(net.a),x.abs()
    prune_wanda(net, .5, [first_, -first_])
    prune_wanda(a, .5, [torch.cat([first_, a(first_).detach()])])
    assert torch.equal(net.a.weight_mask, a.weight_mask)

# ---- all batches in one walk, against a pass of the whole model for each layer

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

def _walked(make, prune, target, batches, most=2):
    "Prune as ever, compare with the slow way, and count how often each layer runs for a batch"
    fast,slow,runs = make(),make(),{}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        masks = _pruned_slowly(slow, prune, target, batches)
        hooks = [m.register_forward_hook(lambda m,a,o: runs.update({m: runs.get(m, 0)+1})) for m in fast.modules() if not [*m.children()]]
        threads = threading.active_count()
        prune(fast, target, batches, n_samples=10**6)
    for h in hooks: h.remove()
    got = {o.name:o.mask for o in masked_params(fast)}
    assert got.keys()==masks.keys() and all(torch.equal(got[k], m) for k,m in masks.items())
    assert all(torch.allclose(a, b, atol=1e-4) for a,b in zip(fast.parameters(), slow.parameters()))
    assert threading.active_count()==threads and not any(m._forward_pre_hooks and not masked_params(m) for m in fast.children())
    assert max(runs.values())<=most*len(batches)+most-1, list(runs.values())
    return fast

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

def _seeded(f): return lambda: (torch.manual_seed(0), f())[1]

def _vectors(n=3, cols=8):
    x = _data(40*n, cols=cols)[0]
    return [*x.split(40)[:-1], x[-40:-7]]

def _tokens(): return [dict(input_ids=torch.randint(50, (4,k), generator=torch.Generator().manual_seed(k))) for k in (12,12,9)]

def _gpt2():
    from transformers import GPT2Config,GPT2Model
    return GPT2Model(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2))

def _bert():
    from transformers import BertConfig,BertModel
    return BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16))

def _images(): return [torch.randn(10,4,6,6, generator=torch.Generator().manual_seed(i)) for i in range(3)]

def _dicts(): return [dict(x=x, scale=2.) for x in _vectors()]

def _balanced(): return [x-x.mean()+k for x,k in zip(_vectors(), (.1,.01,-1.))]

walked = dict(mlp=(lambda: mlp((8,)*7, act=nn.ReLU), _vectors), convnet=(ConvNet, _images), gpt2=(_gpt2, _tokens), bert=(_bert, _tokens),
    branches=(Branching, _balanced), keywords=(Dicts, _dicts))

@pytest.mark.parametrize('prune', [prune_wanda, prune_sparsegpt])
@pytest.mark.parametrize('target', ['2:4',.5])
@pytest.mark.parametrize('name', walked)
def test_one_walk_gives_what_a_pass_for_each_layer_gives(name, target, prune):
    "Masks and weights are equal, and no layer runs more than twice a batch, and once more for the first batch"
    make,batches = walked[name]
    if name in ('gpt2','bert'): pytest.importorskip('transformers')
    _walked(_seeded(make), prune, target, batches(), most=3 if name=='branches' else 2)  # branches are two walks

@pytest.mark.parametrize('prune', [prune_wanda, prune_sparsegpt])
def test_memory_holds_the_activations_of_one_layer(prune):
    "However deep the model is: an output a batch that waits, and those of the batch at work"
    net,outputs,most = mlp((8,)*13, act=nn.ReLU),[],[]
    def f(m, args, out):
        outputs.append(weakref.ref(out))
        most.append(sum(o() is not None for o in outputs))
    for m in net: m.register_forward_hook(f)
    batches = _vectors(5)
    prune(net, .5, batches, n_samples=10**6)
    assert max(most)<=len(batches)+2

class Recurring(nn.Module):
    "`a` runs twice, `c` has the weight of `b`, and the others run once"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.d,self.e = [nn.Linear(8,8) for _ in range(5)]
        self.c.weight = self.b.weight
    def forward(self, x): return self.e(self.d(self.c(self.a(self.b(self.a(x).relu()).relu()).relu()).relu()).relu())

@pytest.mark.parametrize('prune', [prune_wanda, prune_sparsegpt])
def test_shared_layers_take_a_pass_of_their_own(prune):
    "All inputs of a shared layer count, so it is pruned after all of them were seen; the others are walked as ever"
    _walked(_seeded(Recurring), prune, '2:4', _vectors(), most=9)  # `a` runs twice in each of four passes

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

@pytest.mark.parametrize('make', [Restoring, Rerouted, Checked])
def test_what_batches_would_mix_up_is_done_layer_by_layer(make):
    "What a model keeps between its layers, or routes by what was pruned, gives the masks of the slow way"
    batches = [x+3*i for i,x in enumerate(_vectors())]
    for prune in (prune_wanda, prune_sparsegpt): _walked(_seeded(make), prune, '2:4', batches, most=9)

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

def test_a_walk_ends_whatever_the_model_catches():
    threads = threading.active_count()
    net = Stubborn()
    prune_wanda(net, '2:4', _vectors())
    assert threading.active_count()==threads and all(m.float().mean()==.5 for m in masks_of(net))

def test_a_walk_leaves_no_thread_behind():
    "Neither where a layer can't be solved, nor where it is interrupted"
    threads,net = threading.active_count(),mlp((8,)*5)
    old = copy.deepcopy(net.state_dict())
    with pytest.raises(torch.linalg.LinAlgError): prune_sparsegpt(net, .5, [x[:2] for x in _vectors()], damp=0.)
    net[4].register_forward_pre_hook(lambda m,a: (_ for _ in ()).throw(KeyboardInterrupt) if (net[2].weight==0).any() else None)
    with pytest.raises(KeyboardInterrupt): prune_wanda(net, .5, _vectors())
    assert threading.active_count()==threads and all(torch.equal(v, net.state_dict()[k]) for k,v in old.items()) and net.training

def test_a_walk_is_autocast_as_its_caller_is():
    seen = []
    net = mlp((8,)*4)
    net[2].register_forward_pre_hook(lambda m,a: seen.append(a[0].dtype))
    with torch.autocast('cpu', torch.bfloat16): prune_wanda(net, .5, _vectors())
    assert set(seen)=={torch.bfloat16} and not torch.is_autocast_enabled('cpu')

def test_many_batches_and_cores_make_no_army_of_threads(monkeypatch):
    "Each thread that computes has helpers: fewer of them where there are many batches, and as before afterwards"
    seen,n = [],torch.get_num_threads()
    monkeypatch.setattr(f'{layer_statistic.__module__}._most_threads', 6)
    net = mlp((8,)*4)
    net[2].register_forward_pre_hook(lambda m,a: seen.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(4)
        prune_wanda(net, .5, _vectors())
        assert torch.get_num_threads()==4 and seen==[4]*3+[2]*4
    finally: torch.set_num_threads(n)

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

def test_half_precision():
    "Statistics are kept in float64: a bfloat16 model of large inputs is pruned like its double"
    torch.manual_seed(0)
    net,x = nn.Linear(16, 8).bfloat16(),(_data(cols=16)[0]*1e3).bfloat16()
    for f in (prune_wanda, prune_sparsegpt):
        a,b = copy.deepcopy(net),copy.deepcopy(net).double()
        f(a, '2:4', [x])
        f(b, '2:4', [x.double()])
        assert a.weight.dtype==torch.bfloat16 and torch.equal(a.weight_mask, b.weight_mask) and torch.allclose(a.weight.double(), b.weight, rtol=1e-2)

def test_a_shared_layer_sees_all_its_inputs():
    "A layer that runs twice, and a weight that two layers share"
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(8,8,bias=False),nn.Linear(8,8,bias=False)
            self.b.weight = self.a.weight
        def forward(self, x): return self.b(self.a(self.a(x)))
    torch.manual_seed(0)
    net,x = Twice(),_data()[0]
    w = net.a.weight.detach()
    inputs = torch.cat([x, x@w.T, x@w.T@w.T])
    lin = nn.Linear(8, 8, bias=False)
    with torch.no_grad(): lin.weight.copy_(w)
    prune_wanda(lin, .5, [inputs])
    prune_wanda(net, .5, [x])
    assert torch.equal(net.a.weight_mask, lin.weight_mask)

def test_what_inputs_cannot_reach_stays_dense():
    "Recurrent weights have no inputs that data shows: a warning names them, and the sparsity that is reached"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.att,self.rnn,self.lin = nn.MultiheadAttention(8,2),nn.GRU(8,8),nn.Linear(8,8)
        def forward(self, x): return self.lin(self.rnn(self.att(x,x,x)[0])[0])
    net = Net()
    with pytest.warns(UserWarning, match=r'^rnn\.weight_hh_l0 .*stay dense'): prune_wanda(net, .5, [torch.randn(5,3,8)])
    assert {o.name: float(o.mask.float().mean()) for o in masked_params(net)}=={'att.in_proj_weight':.5, 'att.out_proj.weight':.5, 'rnn.weight_ih_l0':.5, 'rnn.weight_hh_l0':1., 'lin.weight':.5}

def _noisy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1,4,3,padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(.5), nn.Flatten(), nn.Linear(32,6))

@pytest.mark.parametrize('training', [True,False])
def test_the_rest_is_left_as_it_was(training):
    "Modes, BatchNorm statistics, gradients, biases and random state (law 7), by every method"
    x,y = _data()
    for f in (partial(prune_wanda, data=[x[:,None]]), partial(prune_sparsegpt, data=[x[:,None]]), partial(prune_synflow, xb=x[:,None]),
        partial(prune_snip, data=[(x[:,None],y)], loss_func=F.mse_loss), partial(prune_grasp, data=[(x[:,None],y)], loss_func=F.mse_loss), prune_magnitude):
        net = _noisy().train(training)
        net[0].eval()
        net[5].weight.requires_grad_(False)
        old,rng = copy.deepcopy(net),torch.get_rng_state()
        modes = [m.training for m in net.modules()]
        f(net, .5)
        assert torch.equal(rng, torch.get_rng_state())
        assert [m.training for m in net.modules()]==modes and [p.requires_grad for p in net.parameters()]==[p.requires_grad for p in old.parameters()]
        assert all(p.grad is None for p in net.parameters())
        keep = lambda m: {k:v for k,v in m.state_dict().items() if 'mask' not in k and 'sparsity' not in k and k not in ('0.weight','5.weight')}
        assert all(torch.equal(v, keep(net)[k]) for k,v in keep(old).items())
        if f is not prune_magnitude and f.func is not prune_sparsegpt:
            for i in (0,5): assert torch.equal(net[i].weight, old[i].weight*net[i].weight_mask)

# ---- before training

def _two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3,4,dtype=torch.double), nn.Tanh(), nn.Linear(4,2,dtype=torch.double))

def _by_hand(net, x, y):
    "Loss of a two-layer tanh net as a function of its two weights"
    b1,b2 = net[0].bias.detach(),net[2].bias.detach()
    return lambda w1,w2: (((x@w1.T+b1).tanh()@w2.T+b2-y)**2).mean()

def _xy():
    g = torch.Generator().manual_seed(5)
    return torch.randn(10,3,generator=g,dtype=torch.double),torch.randn(10,2,generator=g,dtype=torch.double)

def test_snip_by_hand():
    "abs(w*g) of the mean loss over equal batches, ranked globally"
    net,(x,y) = _two_layers(),_xy()
    ws = [net[i].weight.detach().clone().requires_grad_() for i in (0,2)]
    grads = torch.autograd.grad(_by_hand(net, x, y)(*ws), ws)
    score = torch.cat([(w*g).abs().flatten() for w,g in zip(ws, grads)]).detach().numpy()
    prune_snip(net, .4, [(x[:5],y[:5]),(x[5:],y[5:])], F.mse_loss)
    assert set(np.flatnonzero(torch.cat([m.flatten() for m in masks_of(net)])))==set(oracle_order(score, np.ones(20, bool))[:12])

class OwnLoss(nn.Module):
    "Returns its loss, as language models do"
    def __init__(self):
        super().__init__()
        self.net = _two_layers()
    def forward(self, x, y): return SimpleNamespace(loss=F.mse_loss(self.net(x), y))

@pytest.mark.parametrize('f', [prune_snip, prune_grasp])
def test_batches_of_any_size_and_loops(f):
    "A short last batch counts by its items; a generator of losses, and a model that returns its loss, are as good"
    x,y = _xy()
    losses = lambda m: (F.mse_loss(m(a), b) for a,b in zip(x.split(5), y.split(5)))
    short = [(x[:7],y[:7]),(x[7:],y[7:])]
    cases = [(_two_layers(),[(x,y)],F.mse_loss), (_two_layers(),short,F.mse_loss), (_two_layers(),losses,None), (OwnLoss(),[dict(x=x, y=y)],None)]
    for net,data,loss_func in cases:
        f(net, .4, data, loss_func)
        assert same_masks(masks_of(net), masks_of(cases[0][0]))

def test_grasp_by_hand():
    "w*(Hg), H the full Hessian of the two weights by autograd, the highest live"
    net,(x,y) = _two_layers(),_xy()
    ws = [net[i].weight.detach().clone() for i in (0,2)]
    def loss(flat): return _by_hand(net, x, y)(flat[:12].view(4,3), flat[12:].view(2,4))
    flat = torch.cat([w.flatten() for w in ws])
    score = flat*(torch.autograd.functional.hessian(loss, flat)@torch.autograd.functional.jacobian(loss, flat))
    prune_grasp(net, .4, [(x[:5],y[:5]),(x[5:],y[5:])], F.mse_loss)
    got = torch.cat([m.flatten() for m in masks_of(net)])
    assert set(np.flatnonzero(got))==set(oracle_order(score.numpy(), np.ones(20, bool))[:12])

@pytest.mark.parametrize('rounds', [1,7,100])
def test_synflow_by_hand(rounds):
    "Rounds of w*dR/dw for positive weights, no biases and an input of ones; a linear net, so that R is a product of matrices"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3,4), nn.ReLU(), nn.Linear(4,2))
    a,b = [net[i].weight.detach().double().abs().numpy() for i in (0,2)]
    alive = np.ones(20, bool)
    for r in range(rounds):
        A,B = a*alive[:12].reshape(4,3),b*alive[12:].reshape(2,4)
        score = np.concatenate([(A*B.sum(0)[:,None]).ravel(), (B*A.sum(1)).ravel()])
        keep = oracle_order(score, alive)[:round(20*.4**((r+1)/rounds))]
        alive = np.zeros(20, bool)
        alive[keep] = True
    old = copy.deepcopy(net)
    prune_synflow(net, .6, torch.randn(5,3), rounds)
    assert np.array_equal(torch.cat([m.flatten() for m in masks_of(net)]).numpy(), alive)
    assert all(torch.equal(net[i].weight, old[i].weight*net[i].weight_mask) for i in (0,2))  # signs are back

def test_synflow_keeps_layers_alive():
    "At 99 %, where SNIP-like global magnitudes can lose a layer; scores of a deep net overflow in float32"
    torch.manual_seed(0)
    net = nn.Sequential(*[l for _ in range(40) for l in (nn.Linear(30,30),nn.ReLU())])
    with torch.no_grad():
        for l in net[::2]: l.weight.mul_(20)
    prune_synflow(net, .99, torch.ones(1,30))
    assert min(int(m.sum()) for m in masks_of(net))>0 and sum(int(m.sum()) for m in masks_of(net))==360

class Gated(nn.Module):
    "A buffer of booleans and one of integers, as attention has"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.register_buffer('gate', torch.tensor([True,False,True,True]))
        self.register_buffer('order', torch.tensor([3,-1,1,0]))
    def forward(self, x): return (self.lin(x)*self.gate)[...,self.order]

def test_synflow_beside_other_buffers():
    "Only floats are made positive; what a gate closes carries no flow"
    net = Gated()
    prune_synflow(net, .5, torch.randn(2,8))
    assert net.lin.weight_mask.sum()==16 and not net.lin.weight_mask[1].any() and net.order.tolist()==[3,-1,1,0]

def test_synflow_of_tokens_and_two_heads():
    "The flow begins in the embeddings of the first item's tokens, and R is the sum over all outputs"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.a,self.b = nn.Embedding(5, 3),nn.Linear(3, 4),nn.Linear(3, 2)
        def forward(self, x): return dict(a=self.a(self.emb(x)), b=self.b(self.emb(x)), ids=x)
    torch.manual_seed(0)
    net,x = Net(),torch.tensor([[1,3,3],[0,0,0]])
    flow = net.emb.weight.detach().double().abs()[x[0]].sum(0)
    score = torch.cat([(o.weight.detach().double().abs()*flow).flatten() for o in (net.a,net.b)])
    prune_synflow(net, .5, x, rounds=1)
    assert set(torch.cat([m.flatten() for m in masks_of(net)]).nonzero().flatten().tolist())==set(score.topk(9).indices.tolist())

def test_before_training_refuses():
    x,y = _data()
    for f in (prune_snip, prune_grasp):
        for data,loss_func,what in [(lambda m: [],None,'no losses'),
            (None,F.mse_loss,'only a Learner'), ([(x,y*math.nan)],F.mse_loss,'is nan, and must be finite')]:
            net = _net()
            with pytest.raises(ValueError, match=what): f(net, .5, data, loss_func)
            assert not masked_params(net) and all(torch.equal(a, b) for a,b in zip(net.parameters(), _net().parameters()))
    for kwargs,what in [(dict(),'only a Learner'), (dict(xb=x, rounds=0),'rounds is 0')]:
        with pytest.raises(ValueError, match=what): prune_synflow(_net(), .5, **kwargs)

def test_random_is_named_by_its_seed():
    "Law 8: same seed, same masks"
    nets = [_net() for _ in range(3)]
    for n,seed in zip(nets, (1,1,2)):
        torch.rand(seed)
        prune_random(n, .5, seed)
    assert same_masks(masks_of(nets[0]), masks_of(nets[1])) and not same_masks(masks_of(nets[0]), masks_of(nets[2]))

def test_scores_of_ones_own():
    "A function or a dict; wrong shapes and missing names are refused"
    net = _net()
    with pytest.raises(KeyError, match='2.weight'): prune_by(net, {'0.weight':net[0].weight}, .5)
    with pytest.raises(ValueError, match='shape'): prune_by(net, lambda p: p[:1], .5)
    prune_by(net, lambda p: torch.arange(p.numel()).view(p.shape), '2:4')
    big = nn.Linear(300, 300)
    prune_by(big, lambda p: p*p, .5)  # a score with a history
    assert big.weight_mask.sum()==45000
    assert net[0].weight_mask[0].tolist()==[False,False,True,True]*2

# ---- ratios, saving

@pytest.mark.parametrize('t,density', [([[1.,0.,2.],[0.,0.,3.]],.5), ([],1.), ([0.],0.), ([True,False,True,True],.75)])
def test_density_and_sparsity(t, density):
    "Each under its own name (004's `fill` is density; an empty tensor raised)"
    t = torch.tensor(t)
    assert sparsity_from_tensor(t)==1-density

def test_saved_and_restored():
    "Through a file into a fresh model, fully live masks included (004 failed on them), and out to plain weights with equal outputs"
    net,x = _net(),_data()[0]
    prune_sparsegpt(net, {'0':'2:4'}, [x])
    buf = io.BytesIO()
    torch.save(net.state_dict(), buf)
    buf.seek(0)
    fresh = _net(9)
    restore_sparse(fresh, torch.load(buf))
    assert same_masks(masks_of(net), masks_of(fresh)) and torch.equal(net(x), fresh(x)) and fresh[2].weight_mask.all()
    y = net(x)
    unsparsify(net)
    assert torch.equal(net(x), y) and net.state_dict().keys()==_net().state_dict().keys() and net[0].weight.count_nonzero()==48
    with pytest.raises(ValueError, match='no masks'): restore_sparse(_net(), _net().state_dict())

def _loaders_learner(net=None):
    ds = TensorData(*_data())
    return Learner(DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8)), net or _net(), loss_func=MSELossFlat(), opt_func=partial(SGD, mom=.9), lr=.05)

class WithMasks(nn.Module):
    "A buffer of the user's that ends like a mask of ours"
    def __init__(self, sizes=(8,12,6)):
        super().__init__()
        self.body = mlp(sizes)
        self.register_buffer('causal_mask', torch.ones(3, 3).tril().bool())
    def forward(self, x): return self.body(x)

def test_restored_only_where_it_fits():
    "Law 10: a checkpoint that doesn't fit is refused before anything changed; a buffer that ends in _mask is no mask, and what had none gets none"
    net,x = WithMasks(),_data()[0]
    sparsify_model(net, .5, chosen='body.0.*', seed=0)
    state,fresh = net.state_dict(),WithMasks()
    restore_sparse(fresh, state)
    assert torch.equal(fresh(x), net(x)) and [o.name for o in masked_params(fresh)]==['body.0.weight'] and fresh.state_dict().keys()==state.keys()
    for other,what in [(WithMasks((8,12,12,6)),r'body.2.bias is \(12,\)'), (WithMasks((8,13,6)),r'body.0.bias is \(13,\)'), (_net(),'no masks for this model'),
        (nn.ModuleDict(dict(body=_net())),'causal_mask is not there in the model')]:
        old = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=what): restore_sparse(other, state)
        assert other.state_dict().keys()==old.keys() and all(torch.equal(v, old[k]) for k,v in other.state_dict().items())

def test_pruned_in_the_middle_of_a_run():
    "An optimizer with momentum from dense steps goes on: dead weights and their state are zero after every step"
    learn = _loaders_learner()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        opt = learn.opt
        for f in (prune_magnitude, prune_sparsegpt):
            unsparsify(learn)
            f(learn, '2:4')
            masks = masks_of(learn.model)
            learn.fit(1)
            assert learn.opt is opt and same_masks(masks, masks_of(learn.model))
            assert_dead(learn.model, learn.opt)

presets = {k: v for k,v in globals().items() if k.endswith('_presets') and hasattr(v, 'keys') and k not in ('supermask_presets','STE_presets','SRSTE_presets','TopKAST_presets','Static_presets')}

@pytest.mark.parametrize('name', presets)
def test_any_preset_goes_on(name):
    "Every preset trains a pruned model on, in its sparsity or towards its own"
    learn = _loaders_learner()
    prune_magnitude(learn, (.5,'fan-in')) if name=='SRigL_presets' else prune_sparsegpt(learn, .5)
    own = dict(sparsity=.8) if name in ('GMP_presets','GraNet_presets','SoftMEST_presets') else dict(sparsity=.5) if name in ('ACDC_presets','DSD_presets') else {}
    kwargs = dict(presets[name], **own)
    if 'updates' not in kwargs: kwargs['batches_per_update'] = 3
    with learn.no_bar(), learn.no_logging(): learn.fit(20, cbs=DynamicSparseTrainingCallback(**kwargs, seed=0))
    live = sum(int(m.sum()) for m in masks_of(learn.model))
    assert abs(live-round((1-own.get('sparsity', .5))*168))<=6 if name!='DSD_presets' else live==168
    assert_dead(learn.model) if live<168 else None

def test_structure_goes_on():
    "2:4 stays 2:4 under RigL that is told so"
    learn = _loaders_learner()
    prune_wanda(learn, '2:4')
    masks = masks_of(learn.model)
    with learn.no_bar(), learn.no_logging(): learn.fit(3, cbs=DynamicSparseTrainingCallback(**dict(RigL_presets, batches_per_update=3, structure='2:4'), seed=0))
    assert not same_masks(masks, masks_of(learn.model)) and all((m.view(len(m),-1,4).sum(2)==2).all() for m in masks_of(learn.model))

@pytest.mark.parametrize('preset', [STE_presets, SRSTE_presets, TopKAST_presets, supermask_presets])
def test_learned_masks_go_on(preset):
    "Masks of a pruned model can be learned from there: magnitudes begin where pruning ended"
    net,(x,y) = _net(),_data()
    prune_magnitude(net, '2:4')
    masks = masks_of(net)
    unsparsify(net)
    learn_masks(net, **dict(preset, sparseness='2:4'), seed=0)
    if preset is not supermask_presets: assert same_masks(masks, masks_of(net))
    train(net, torch.optim.SGD(net.parameters(), lr=.1), 2, x, y)
    fold_masks(net)
    assert [1-sparsity_from_tensor(o.mask) for o in masked_params(net)]==[.5,.5]

def test_training_goes_on():
    "Fixed masks hold, summaries count, and RigL moves them"
    learn = _loaders_learner()
    prune_wanda(learn, .5)
    masks,p = masks_of(learn.model),learn.model[0].weight
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
        assert same_masks(masks, masks_of(learn.model)) and learn.model[0].weight is p
        assert_dead(learn.model, learn.opt)
        learn.fit(3, cbs=DynamicSparseTrainingCallback(**dict(RigL_presets, batches_per_update=3)))
    assert not same_masks(masks, masks_of(learn.model)) and sum(int(m.sum()) for m in masks_of(learn.model))==84
    assert sparse_summary(learn).df.set_index('parameter').loc['sparse parameters','live']==84

def test_restores_every_mask_that_folding_leaves():
    "Embeddings, bags, Bilinear and masks made by hand come back from a state dict, tied weights too"
    def make():
        net = nn.ModuleDict(dict(a=nn.Embedding(10,8), bag=nn.EmbeddingBag(6,8), bil=nn.Bilinear(8,8,4), b=nn.Linear(8,8), c=nn.Linear(8,8)))
        net['c'].weight = net['b'].weight
        return net
    net,fresh = make(),make()
    learn_masks(net, {'*':'top 0.5'}, seed=0)
    fold_masks(net)
    sparsify_parameter(net, 'b.bias', .5, seed=0)
    state = net.state_dict()
    restore_sparse(fresh, state)
    assert [o.name for o in masked_params(fresh)]==['a.weight','bag.weight','bil.weight','b.weight','b.bias']
    assert fresh.state_dict().keys()==state.keys() and all(torch.equal(v, state[k]) for k,v in fresh.state_dict().items())
    assert_dead(fresh)
    with pytest.raises(ValueError, match='sparse already'): restore_sparse(fresh, state)
    other = make()
    restore_sparse(once := make(), {k:v for k,v in state.items() if k!='c.weight'})  # as a file of safetensors holds it
    assert all(torch.equal(v, state[k]) for k,v in once.state_dict().items()) and once['c'].weight is once['b'].weight
    with pytest.raises(ValueError, match=r'a\.weight.*shape'): restore_sparse(other, state|{'a.weight_mask': torch.ones(3,8).bool()})
    assert not masked_params(other)

@pytest.mark.parametrize('norm', [False,True])
def test_synflow_ignores_what_is_added(norm):
    "The paper's R is a product of weights: biases (those of norms too) and running means have no part in it, and no layer empties at 98 %"
    torch.manual_seed(0)
    block = lambda: (nn.Linear(30,30), *[nn.BatchNorm1d(30)]*norm, nn.ReLU())
    net = nn.Sequential(*[l for i in range(6) for l in block()], nn.Linear(30,2))
    bare = copy.deepcopy(net)
    with torch.no_grad():
        for k,p in bare.named_parameters():
            if k.endswith('bias'): p.zero_()
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d): m.running_mean.fill_(50.)
    for m in (net, bare): prune_synflow(m, .98, torch.randn(1,30))
    assert all(m.any() for m in masks_of(net)) and same_masks(masks_of(net), masks_of(bare))
    assert all(m.bias.any() for m in net if isinstance(m, nn.Linear))

class Attending(nn.Module):
    def __init__(self, att=F.scaled_dot_product_attention):
        super().__init__()
        self.qkv,self.out,self.att = nn.Linear(8,24),nn.Linear(8,6),att
    def forward(self, x):
        q,k,v = self.qkv(x)[:,None].chunk(3, dim=-1)
        return self.out(self.att(q, k, v)[:,0].mean(1))

def _attention(q, k, v): return (q@k.mT/q.shape[-1]**.5).softmax(-1)@v

def test_grasp_through_attention():
    "Fused attention has no second derivative: the scores are those of attention written out"
    torch.manual_seed(0)
    net,x,y = Attending(),torch.randn(6,5,8),torch.randn(6,6)
    ref = Attending(_attention)
    ref.load_state_dict(net.state_dict())
    for m in (net, ref): prune_grasp(m, .5, [(x,y)], F.mse_loss)
    assert same_masks(masks_of(net), masks_of(ref))

def _legal_along(mask, axis):
    "Do two of every four places along `axis` live?"
    return bool((np.moveaxis(mask.numpy(), axis, -1).reshape(-1,4).sum(1)==2).all())

@pytest.mark.parametrize('layer', [nn.ConvTranspose1d(8,12,3), nn.ConvTranspose2d(8,6,2), nn.ConvTranspose2d(8,8,2,groups=2)])
def test_two_of_four_lie_along_the_inputs_of_transposed_convolutions(layer):
    "Their inputs are dimension 0 of the weight; axis 0, outputs, is dimension 1; flat stays"
    net = nn.Sequential(copy.deepcopy(layer))
    prune_magnitude(net, '2:4')
    w,mask = layer.weight.detach().movedim(0, -1).reshape(-1,4).abs().numpy(),net[0].weight_mask
    assert _legal_along(mask, 0)
    assert all(set(np.flatnonzero(m))==set(oracle_order(s, np.ones(4, bool))[:2]) for s,m in zip(w, mask.movedim(0, -1).reshape(-1,4).numpy()))
    assert str(plan_pruning(nn.Sequential(layer), '2:4')[0].structure)=='2:4'
    assert [o.structure for o in plan_pruning(nn.Sequential(nn.Conv2d(8,4,2), nn.Linear(8,4)), '2:4')]==[as_structure('2:4')]*2
    if layer.weight.shape[1]%4==0:
        net = nn.Sequential(copy.deepcopy(layer))
        prune_magnitude(net, '2:4 axis 0')
        assert _legal_along(net[0].weight_mask, 1)

def test_transposed_convolutions_stay_dense_with_sparsegpt():
    "They can't be pruned by inputs: a warning, whatever the structure"
    net = nn.Sequential(nn.Conv1d(4,8,1), nn.ConvTranspose1d(8,4,2))
    with pytest.warns(UserWarning, match=r'1\.weight can.t be pruned by inputs'): prune_sparsegpt(net, '2:4', [torch.randn(8,4,5)])
    assert net[1].weight_mask.all() and _legal_along(net[0].weight_mask, 1)

def _refused(f, what):
    net = _net()
    with pytest.raises(ValueError, match=what): f(net, .5)
    assert not masked_params(net) and all(torch.equal(a, b) for a,b in zip(net.parameters(), _net().parameters()))

@pytest.mark.parametrize('v', [True,False,0,-1,2.,'3',None])
def test_counts_are_integers(v):
    "Law 10: a bool is no count"
    x,y = _data()
    wanda,gpt,synflow = partial(prune_wanda, data=[x]),partial(prune_sparsegpt, data=[x]),partial(prune_synflow, xb=x)
    for k,f in (('n_samples',wanda), ('bs',wanda), ('block',gpt), ('rounds',synflow)):
        _refused(partial(f, **{k:v}), f'{k} is {v!r}, and must be a whole number from 1')

@pytest.mark.parametrize('damp', ['0.01',None,True,-1.,math.nan,math.inf,[.1]])
def test_damp_is_a_number(damp):
    "Law 10: other types and values are refused with the range"
    _refused(partial(prune_sparsegpt, data=[_data()[0]], damp=damp), 'damp is .*must be a number from 0')

def test_synflow_copies_a_model_that_keeps_what_it_computed():
    "An activation in an attribute remembers where it came from, which `deepcopy` refuses"
    class Keeping(nn.Sequential):
        def forward(self, x):
            self.h = super().forward(x)
            return self.h
    torch.manual_seed(0)
    model,x = Keeping(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),torch.randn(2, 6)
    model(x)
    prune_synflow(model, .5, x, rounds=3)
    assert sum(int(o.mask.sum()) for o in masked_params(model))==36 and model.h.grad_fn is not None


# ---- attention and recurrent layers

def _attended(att, q, k, v):
    "Multi-head attention in plain steps, up to what meets `out_proj`"
    E = att.embed_dim
    w,b = att.in_proj_weight.detach().double(),att.in_proj_bias.detach().double()
    q,k,v = [x.double()@w[i*E:(i+1)*E].T+b[i*E:(i+1)*E] for i,x in enumerate((q,k,v))]
    heads = lambda x: x.unflatten(-1, (att.num_heads,-1)).transpose(1,2)
    q,k,v = map(heads, (q,k,v))
    return ((q@k.mT/q.shape[-1]**.5).softmax(-1)@v).transpose(1,2).flatten(2)

class _Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = nn.MultiheadAttention(8, 2, batch_first=True)
    def forward(self, q, kv): return self.att(q, kv, kv*2, need_weights=False)[0]

def _row_oracle(w, norms, n):
    "The highest of |w|*norm in each row, equally many"
    score,k = (w.double().abs()*norms).numpy(),n//len(w)
    mask = np.zeros(score.shape, bool)
    for i,row in enumerate(score): mask[i, np.argsort(-row, kind='stable')[:k]] = True
    return torch.from_numpy(mask)

def test_wanda_for_attention():
    "Queries, keys and values have norms of their own, also where they are of different lengths; out_proj sees what the pruned projections give"
    torch.manual_seed(0)
    net,q,kv = _Cross(),torch.randn(5,3,8)*torch.arange(1,9),torch.randn(5,7,8)
    w,out = net.att.in_proj_weight.detach().clone(),net.att.out_proj.weight.detach().clone()
    prune_wanda(net, .5, [(q,kv,torch.zeros(5))], n_samples=5)
    norms = [x.reshape(-1,8).double().norm(dim=0) for x in (q,kv,kv*2)]
    for i in range(3): assert torch.equal(net.att.in_proj_weight_mask[i*8:(i+1)*8], _row_oracle(w[i*8:(i+1)*8], norms[i], 32))
    x = _attended(net.att, q, kv, kv*2).reshape(-1,8)
    assert torch.equal(net.att.out_proj.weight_mask, _row_oracle(out, x.norm(dim=0), 32))

@pytest.mark.parametrize('method', [prune_wanda, prune_sparsegpt])
@pytest.mark.parametrize('target', [.9, '2:4'])
def test_transformers_are_pruned_whole(method, target):
    "An encoder layer reaches what was asked for, without a word; SparseGPT's outputs are nearer to the dense ones than Wanda's"
    torch.manual_seed(0)
    net,x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),torch.randn(64,6,16)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        method(net, target, [x], n_samples=64)
    n,live = sum(o.p.numel() for o in masked_params(net)),sum(int(o.p.count_nonzero()) for o in masked_params(net))
    assert len(masked_params(net))==4 and live==round(n*(.1 if target==.9 else .5))

class _Padded(nn.Module):
    "Classifies padded sequences, as torch's own encoder does by default"
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16,3)
    def forward(self, x, attention_mask): return self.head(self.enc(x, src_key_padding_mask=~attention_mask.bool())[:,0])

@pytest.mark.parametrize('method', [prune_wanda, prune_sparsegpt])
def test_padded_sequences(method):
    "Layers are seen one by one, not in torch's fused path with its nested tensors; padding is counted, which is said"
    torch.manual_seed(0)
    net,x = _Padded().eval(),torch.randn(8,5,16)
    mask = (torch.arange(5)<torch.tensor([5,4,3,2,1,5,5,5])[:,None]).long()
    w,want = net.enc.layers[0].linear1,[]
    old,seen = w.weight.detach().clone(),w.register_forward_pre_hook(lambda m, args: want.append(args[0].detach()))
    net(x, mask)
    seen.remove()
    with pytest.warns(UserWarning, match='padding counts'): method(net, {'enc.layers.0.linear1': .5}, [dict(x=x, attention_mask=mask)])
    assert torch.backends.mha.get_fastpath_enabled()
    if method is prune_wanda: assert torch.equal(w.weight_mask, _row_oracle(old, want[0].double().reshape(-1,16).norm(dim=0), 256))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        method(_Padded(), .5, [dict(x=x, attention_mask=torch.ones_like(mask))])

def test_sparsegpt_for_attention():
    "Each projection is pruned as a linear layer of its own with the same inputs would be"
    torch.manual_seed(0)
    net,q,kv = _Cross(),torch.randn(40,3,8)@torch.randn(8,8),torch.randn(40,7,8)@torch.randn(8,8)
    alone = []
    for i,x in enumerate((q,kv,kv*2)):
        layer = nn.Sequential(nn.Linear(8,8))
        with torch.no_grad(): layer[0].weight.copy_(net.att.in_proj_weight[i*8:(i+1)*8])
        prune_sparsegpt(layer, '2:4', [x.reshape(-1,8)], n_samples=1)
        alone.append(layer[0])
    prune_sparsegpt(net, '2:4', [(q,kv,torch.zeros(40))], n_samples=40)
    assert torch.equal(net.att.in_proj_weight_mask, torch.cat([o.weight_mask for o in alone]))
    assert torch.allclose(net.att.in_proj_weight, torch.cat([o.weight for o in alone]), atol=1e-5)

@pytest.mark.parametrize('kind', [nn.LSTM,nn.GRU,nn.RNN])
def test_wanda_for_recurrent_inputs(kind):
    "Each layer's input projection is pruned by what it sees, both ways; recurrent weights stay dense, and the number that is reached is said"
    torch.manual_seed(0)
    net,x = kind(6, 4, num_layers=2, bidirectional=True, batch_first=True),torch.randn(9,5,6)*torch.arange(1,7)
    dense = copy.deepcopy(net)
    n_all = sum(p.numel() for p in net.parameters() if p.ndim>1)
    n_ih = sum(p.numel() for n,p in net.named_parameters() if 'weight_ih' in n)
    with pytest.warns(UserWarning, match=f'weight_hh_l0.*stay dense.*sparsity of {.5*n_ih/n_all:.4g} instead of 0.5'): prune_wanda(net, .5, [x], n_samples=9)
    for d in ('','_reverse'):
        w = getattr(dense, f'weight_ih_l0{d}').detach()
        assert torch.equal(getattr(net, f'weight_ih_l0{d}_mask'), _row_oracle(w, x.reshape(-1,6).double().norm(dim=0), w.numel()//2))
    one = kind(6, 4, bidirectional=True, batch_first=True)
    one.load_state_dict({k: v for k,v in net.state_dict().items() if '_l0' in k and not k.endswith(('_mask','_sparsity'))})
    seen = one(x)[0].detach().reshape(-1,8).double().norm(dim=0)
    for d in ('','_reverse'):
        w = getattr(dense, f'weight_ih_l1{d}').detach()
        assert torch.equal(getattr(net, f'weight_ih_l1{d}_mask'), _row_oracle(w, seen, w.numel()//2))

class _InputsFirst(nn.Linear):
    def __init__(self, ins, outs):
        super().__init__(ins, outs, bias=False)
        self.weight = nn.Parameter(torch.randn(ins, outs))
    def forward(self, x): return x@self.weight

register_layer(_InputsFirst, inputs=0, outputs=1, product='linear')

@pytest.mark.parametrize('method', [prune_wanda, prune_sparsegpt])
@pytest.mark.parametrize('target', [.5, '2:4'])
def test_inputs_first_is_the_transpose(method, target):
    "A weight that lies inputs x outputs is pruned as its transpose is"
    torch.manual_seed(0)
    x,turned = torch.randn(64,8)@torch.randn(8,8),nn.Sequential(_InputsFirst(8,4))
    plain = nn.Sequential(nn.Linear(8,4,bias=False))
    with torch.no_grad(): plain[0].weight.copy_(turned[0].weight.T)
    for net in (plain,turned): method(net, target, [x], n_samples=64)
    assert torch.equal(plain[0].weight_mask.T, turned[0].weight_mask) and torch.allclose(plain[0].weight.T, turned[0].weight)

# --- layers that the table doesn't know

class Bag(nn.Module):
    "Four experts in one parameter, and the mean of what they say"
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4,16,8, generator=torch.Generator().manual_seed(0)))
    def forward(self, x): return torch.einsum('eoi,bi->bo', self.up, x)/4

def bagged(): return nn.Sequential(nn.Linear(8,8), nn.ReLU(), Bag(), nn.ReLU(), nn.Linear(16,4))

def live_of(m): return {k:int(v.sum()) for k,v in m.state_dict().items() if k.endswith('_mask')}

@pytest.mark.parametrize('f', [prune_magnitude, prune_snip, prune_grasp, prune_synflow])
def test_also_brings_in_unknown_layers(f):
    "Scores of every weight serve a parameter of any layer; without also= the largest that is left out is named"
    x,y = torch.randn(32,8),torch.arange(32)%4
    more = dict(xb=x) if f is prune_synflow else {} if f is prune_magnitude else dict(data=[(x,y)], loss_func=F.cross_entropy)
    m = bagged()
    f(m, .5, also='*.up', **more)
    assert set(live_of(m))=={'0.weight_mask','2.up_mask','4.weight_mask'} and sum(live_of(m).values())==320
    with pytest.warns(UserWarning, match='2.up .*also='): f(bagged(), .5, **more)

def test_also_with_structures_and_rules():
    "Structures go by expert, and rules may name what also= brings in"
    m = bagged()
    prune_magnitude(m, {'2.up':'2:4'}, also=Bag)
    assert (m[2].up_mask.view(4,16,2,4).sum(-1)==2).all() and m[0].weight_mask.all()
    with pytest.raises(ValueError, match='also= brings in others'), pytest.warns(UserWarning): prune_magnitude(bagged(), {'2.up':.5})

@pytest.mark.parametrize('f', [prune_wanda, prune_sparsegpt])
def test_unknown_products_stay_dense_by_name(f):
    "Pruning by inputs can't see what meets an expert, says so by name, and prunes the rest"
    m,x = bagged(),torch.randn(32,8)
    with pytest.warns(UserWarning, match="2.up can't be pruned by inputs"): f(m, .5, data=[(x,)], also='*.up')
    assert live_of(m)=={'0.weight_mask':32, '2.up_mask':512, '4.weight_mask':32} or '2.up_mask' not in live_of(m)

def test_a_goal_answers_for_its_weight():
    "What a ranking or a solver of one's own sees: the weight as everywhere else, and what is wanted of it"
    goal = plan_pruning(bagged(), '2:4', also='*.up')[1]
    assert (goal.name,goal.attr,goal.p.shape,goal.sparsity,goal.free)==('2.up','up',(4,16,8),.5,False) and goal.masked.p is goal.p

def test_synflow_takes_inputs_by_name():
    "The masks are those of the same inputs in order"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(6,8),nn.Linear(8,3)
        def forward(self, x, gain): return self.b(self.a(x).relu()*gain)
    torch.manual_seed(0)
    nets,x,gain = [Net()],torch.randn(4,6),torch.randn(4,8)
    nets.append(copy.deepcopy(nets[0]))
    for net,xb in zip(nets, (dict(gain=gain, x=x), (x,gain))): prune_synflow(net, .7, xb, rounds=5)
    assert nets[0].a.weight_mask.equal(nets[1].a.weight_mask) and nets[0].b.weight_mask.equal(nets[1].b.weight_mask)
    assert sum(int(o.mask.sum()) for o in masked_params(nets[0]))==round(.3*72)

@pytest.mark.parametrize('mask,padded', [([[1,1,1],[1,1,1]], False), ([[1,1,1],[1,1,0]], True), ([[1.,1.,1.],[1.,1.,0.]], True), ([[0.,0.,0.],[0.,0.,0.]], False),
    ([[0.,0.,0.],[0.,0.,-1e9]], True), ([[[[0.,-math.inf],[0.,0.]]]], False), ([[[[0.,-math.inf],[0.,-math.inf]]]], True),
    ([[[[True,False],[True,True]]]], False)])
def test_padding_is_what_nothing_attends_to(mask, padded):
    "Masks of ones and zeros, masks that are added to scores, and causal ones"
    from fastsparse.prune.inputs import _has_padding
    assert _has_padding(dict(attention_mask=torch.tensor(mask)))==padded
