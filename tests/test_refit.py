"prune_refit beside plain least squares, and beside all masks that there are"
import copy,itertools,numpy as np,pytest,torch
from fastsparse.all import *
from helpers import *
from test_inputs import convs
from test_magnitude import data_of
from torch import nn
from torch.nn import functional as F

def solved(w, x, y, mask, damp=.01):
    "Each row's ridge solution in its live columns: nearest to `y`, and to `w` where data say nothing; in float64"
    H,out = x.T@x,np.zeros(w.shape)
    ridge = damp*np.diag(H).mean()*np.eye(len(H))
    for i,m in enumerate(mask): out[i,m] = np.linalg.solve((H+ridge)[np.ix_(m,m)], (x.T@y[:,i]+ridge@w[i])[m])
    return out

@pytest.mark.parametrize('target', [.6,'2:4',(.5,'block 1x2'),(.5,'fan-in')])
def test_values_are_least_squares(target):
    "With the mask that was chosen, the weights are those of plain linear algebra, and their number is exact"
    torch.manual_seed(0)
    layer,x = nn.Linear(12, 5, bias=False, dtype=torch.double),data_of(cols=12)[0].double()
    w = layer.weight.detach().numpy().copy()
    prune_refit(layer, target, [x[:16],x[16:]])
    mask = layer.weight_mask.numpy()
    assert np.allclose(layer.weight.detach().numpy(), solved(w, x.numpy(), x.numpy()@w.T, mask), atol=1e-3)
    assert mask.sum()==round((.4 if target==.6 else .5)*60)

def test_later_layers_are_fitted_to_the_dense_network():
    "The inputs are those of the pruned network, the outputs those of the dense one"
    torch.manual_seed(1)
    net,x = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 6, bias=False)).double(),torch.randn(64,12).double()
    y,w = net(x).detach().numpy(),net[2].weight.detach().numpy().copy()
    prune_refit(net, .5, list(x.split(16)))
    seen = net[:2](x).detach().numpy()
    dense_seen = y@np.linalg.pinv(w.T)  # 6 outputs don't tell 10 inputs: the ridge needs these themselves
    want = solved(w, seen, y, net[2].weight_mask.numpy())
    assert np.abs(net[2].weight.detach().numpy()-want).max()<1e-3 and dense_seen.shape==seen.shape

def test_masks_are_near_the_best_there_are():
    "All masks of each row are tried: the error is at most 1.6 times the least possible on average, SparseGPT's more than twice that"
    ratios = []
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(80,8)@torch.randn(8,8)
        layer = nn.Linear(8, 4, bias=False)
        w,least = layer.weight.detach().double().numpy().copy(),0.
        X = x.double().numpy()
        for row in w:
            ms = [np.isin(np.arange(8), c)[None] for c in itertools.combinations(range(8), 4)]
            least += min(((X@solved(row[None], X, X@row[None].T, m).T-X@row[None].T)**2).sum() for m in ms)
        got = {}
        for f in (prune_refit, prune_sparsegpt):
            m = copy.deepcopy(layer)
            f(m, (.5,'fan-in') if f is prune_refit else .5, [x])
            got[f] = F.mse_loss(m(x), layer(x), reduction='sum').item()/least
        ratios.append([got[prune_refit], got[prune_sparsegpt]])
    refit,sparsegpt = np.exp(np.log(ratios).mean(0))
    assert refit<1.6 and sparsegpt>2*refit, (refit, sparsegpt)

@pytest.mark.parametrize('cls,kwargs,size', convs)
def test_convolutions(cls, kwargs, size):
    "Groups, strides and padding: nearer to the old outputs than SparseGPT, N:M along input channels"
    torch.manual_seed(0)
    for target in (.5,'2:4') if kwargs.get('groups', 1)==1 else (.5,):
        layer,x = cls(4, 8, 3, **kwargs),torch.randn(20, 4, *size)
        errs = {}
        for f in (prune_refit, prune_sparsegpt):
            m = copy.deepcopy(layer)
            f(m, target, [x])
            errs[f] = F.mse_loss(m(x), layer(x)).item()
            assert m.weight_mask.sum()==m.weight.numel()//2
            assert_dead(m)
        assert errs[prune_refit]<errs[prune_sparsegpt]

def test_attention_recurrent_and_routed_layers():
    "All that SparseGPT prunes; where tokens are routed in another way than in the dense network, a layer is fitted to its own outputs"
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.one,self.two = nn.Linear(8,8),nn.Linear(8,8),nn.Linear(8,8)
        def forward(self, x):
            x = self.a(x)
            first = x[:,0]>0
            return torch.cat([self.one(x[first]), self.two(x[~first])])
    torch.manual_seed(0)
    x = torch.randn(40,8)
    net = Routed()
    prune_refit(net, .75, list(x.split(10)))
    nets = [nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 6, batch_first=True)]
    prune_refit(nets[0], '2:4', lambda m: m(x[None], x[None], x[None]))
    prune_refit(nets[1], [('*_ih*', .5)], [x[None]])
    assert nets[0].in_proj_weight_mask.sum()==3*8*8//2 and nets[1].weight_ih_l0_mask.sum()==24*8//2
    for m in (net, *nets): assert_dead(m)
    for l in (net.a, net.one, net.two): assert l.weight_mask.sum()==16 and l.weight.isfinite().all()

def test_columns_without_inputs():
    "They lose their weights first"
    torch.manual_seed(0)
    layer,x = nn.Linear(8, 4),torch.randn(30,8)
    x[:,3] = 0
    prune_refit(layer, .25, [x])
    assert not layer.weight[:,3].any() and layer.weight_mask.sum()==24
