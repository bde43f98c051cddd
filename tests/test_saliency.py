"SNIP, GraSP and SynFlow by hand, and what every method leaves as it was"
import copy,math,numpy as np,pytest,torch
from fastsparse.all import *
from fastsparse.weights.find import masked_params
from functools import partial
from helpers import *
from test_magnitude import bagged,data_of,live_of,net_of
from torch import nn
from torch.nn import functional as F
from types import SimpleNamespace

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
    "At 99 %, where global magnitudes can lose a layer; scores of a deep net overflow in float32"
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

def test_before_training_refuses():
    x,y = data_of()
    for f in (prune_snip, prune_grasp):
        for data,loss_func,what in [(lambda m: [],None,'no losses'),
            (None,F.mse_loss,'only a Learner'), ([(x,y*math.nan)],F.mse_loss,'is nan, and must be finite')]:
            net = net_of()
            with pytest.raises(ValueError, match=what): f(net, .5, data, loss_func)
            assert not masked_params(net) and all(torch.equal(a, b) for a,b in zip(net.parameters(), net_of().parameters()))
    for kwargs,what in [(dict(),'only a Learner'), *((dict(xb=x, rounds=v), f'rounds is {v!r}, and must be a whole number from 1') for v in (True,0,-1,2.,'3',None))]:
        with pytest.raises(ValueError, match=what): prune_synflow(net_of(), .5, **kwargs)

@pytest.mark.parametrize('f', [prune_magnitude, prune_snip, prune_grasp, prune_synflow])
def test_also_brings_in_unknown_layers(f):
    "Scores of every weight serve a parameter of any layer; without also= the largest that is left out is named"
    x,y = torch.randn(32,8),torch.arange(32)%4
    more = dict(xb=x) if f is prune_synflow else {} if f is prune_magnitude else dict(data=[(x,y)], loss_func=F.cross_entropy)
    m = bagged()
    f(m, .5, also='*.up', **more)
    assert set(live_of(m))=={'0.weight_mask','2.up_mask','4.weight_mask'} and sum(live_of(m).values())==320
    with pytest.warns(UserWarning, match='2.up .*also='): f(bagged(), .5, **more)

def _noisy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1,4,3,padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(.5), nn.Flatten(), nn.Linear(32,6))

@pytest.mark.parametrize('training', [True,False])
def test_the_rest_is_left_as_it_was(training):
    "Modes, BatchNorm statistics, gradients, biases and random state (law 7), by every method"
    x,y = data_of()
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
