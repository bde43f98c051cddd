"Lottery tickets: rounds beside NumPy, and their parts by hand"
import math, numpy as np, pytest, reference_methods as ref, torch
from fastsparse.all import *
from fastsparse.weights.find import masked_params
from fastsparse.prune.tickets import rewind
from helpers import *
from test_presets import alone,N,net,shapes,start
from torch import nn

def parts_of(m): return [o.p.detach().numpy().copy() for o in masked_params(m)],[o.mask.numpy() for o in masked_params(m)]

@pytest.mark.parametrize('final,rate,warm', [(.9,.2,0), (.9,.5,3), (.35,.2,0), (.2,.5,5)])
def test_find_ticket(final, rate, warm):
    "arXiv:1803.03635, 1912.05671 beside NumPy: train, prune a rate of what lives across the model, rewind to the start or a little later, until the sparsity is met exactly"
    ws,_,x,y = start(1.)
    m = net()
    with torch.no_grad():
        for l,w in zip((m[0],m[2]), ws): l.weight.copy_(torch.from_numpy(w))
    n_rounds = []
    def fit(m, n=7):
        n_rounds.append(n)
        train(m, torch.optim.SGD(m.parameters(), lr=.05, momentum=.9), n, torch.from_numpy(x), torch.from_numpy(y))
    def fit_numpy(ws, masks, n=7):
        run = ref.Run(lambda *_: None, ws, masks, x, y, n)
        for _ in range(n): run.step()
        return run.ws
    find_ticket(m, fit, final, rate, warm_up=(lambda m: fit(m, warm)) if warm else None)
    ws,masks = ref.ticket(fit_numpy, fit_numpy(ws, [np.ones(o) for o in shapes], warm), final, rate)
    got,live = parts_of(m)
    assert all((a==b).all() for a,b in zip(live, masks)) and all(np.allclose(a, b, atol=1e-12) for a,b in zip(got, ws))
    assert sum(o.sum() for o in live)==round((1-final)*N) and n_rounds.count(7)==math.ceil(math.log(1-final)/math.log(1-rate)-1e-9)

def test_find_ticket_goes_on_from_masks():
    "A model that is sparse already loses a rate of what lives in each round, and not more than the ticket asks; less than it is, is refused before any training"
    m = mlp((6,10,4))
    sparsify_model(m, .5, 'uniform', seed=0)
    seen = []
    find_ticket(m, lambda m: seen.append(1-sum(int(o.mask.sum()) for o in masked_params(m))/100), .8, rate=.5)
    assert seen==[.5,.75] and sum(int(o.mask.sum()) for o in masked_params(m))==20
    with pytest.raises(ValueError, match=r'sparsity is 0.3.*0.8'): find_ticket(m, lambda m: seen.append('trained'), .3)
    assert seen==[.5,.75]

def test_warm_up_is_what_is_rewound_to():
    "arXiv:1912.05671: after each round live weights, biases and statistics are those after the warm-up; masks stay"
    m = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8,3))
    xb,yb = data(m)
    early = []
    def warm_up(m):
        train(m, torch.optim.SGD(m.parameters(), lr=.1), 3, xb, yb)
        early.append({k:v.clone() for k,v in m.state_dict().items()})
    find_ticket(m, lambda m: train(m, torch.optim.Adam(m.parameters()), 4, xb, yb), .6, rate=.4, warm_up=warm_up)
    for k,v in m.state_dict().items():
        if k.endswith(('_mask','_sparsity')): continue
        mask = m.state_dict().get(f'{k}_mask', torch.ones_like(v, dtype=torch.bool))
        assert torch.equal(v, torch.where(mask, early[0][k], 0)), k
    assert sum(int(o.mask.sum()) for o in masked_params(m))==round(.4*72)

@pytest.mark.parametrize('kwargs,match', [(dict(sparsity=1.), r'sparsity is 1.0.*\[0,1\)'), (dict(sparsity=.9, rate=0.), r'rate is 0.0.*\(0,1\)'), (dict(sparsity=.9, rate=20), 'rate is 20')])
def test_find_ticket_refuses(kwargs, match):
    "Law 10: before a mask is made or a step trained"
    m,called = mlp(),[]
    with pytest.raises(ValueError, match=match): find_ticket(m, called.append, **kwargs)
    assert not called and not masked_params(m)

def _two(w0, w1):
    m = nn.Sequential(nn.Linear(len(w0), 1, bias=False), nn.Linear(1, len(w1), bias=False))
    with torch.no_grad():
        m[0].weight.copy_(torch.tensor([w0]))
        m[1].weight.copy_(torch.tensor(w1)[:,None])
    sparsify_model(m, 0.)
    return m

def test_prune_to_by_hand():
    "Of the ten weights the five largest of all stay; then of those two; a distribution shares it out otherwise; buffers show it; ties to the lowest index"
    m = _two([5.,1.,-9.,0.,4.,2.], [3.,-8.,.5,4.])
    assert prune_to(m, .5, alone)==5
    assert m[0].weight_mask.tolist()==[[True,False,True,False,True,False]] and m[1].weight_mask.view(-1).tolist()==[False,True,False,True]
    assert m[0].weight.tolist()==[[5.,0.,-9.,0.,4.,0.]] and m[1].weight_sparsity==.5
    assert prune_to(m, .8, alone)==3 and prune_to(m, .8, alone)==0
    assert [o.mask.view(-1).nonzero().view(-1).tolist() for o in masked_params(m)]==[[2],[1]]
    m = _two([5.,1.,-9.,0.,4.,2.], [3.,-8.,.5,4.])
    prune_to(m, .5, uniform_sparsity)
    assert [o.mask.view(-1).nonzero().view(-1).tolist() for o in masked_params(m)]==[[0,2,4],[1,3]]
    prune_to(m, .8, uniform_sparsity, score_f=lambda p, mask, name: -p.abs())
    assert [o.mask.view(-1).nonzero().view(-1).tolist() for o in masked_params(m)]==[[4],[3]]

def test_pruned_weights_stay_dead():
    "Law 3: what `prune_to` kills in the midst of training stays dead, its momentum too, with no call besides"
    m = mlp((6,8,3))
    sparsify_model(m, .2, seed=0)
    opt = torch.optim.Adam(m.parameters())
    train(m, opt, 3, *data(m))
    prune_to(m, .7)
    train(m, opt, 2, *data(m))
    assert_dead(m, opt)
    assert sum(int(o.mask.sum()) for o in masked_params(m))==round(.3*72)

def test_prune_to_nan():
    "Law 2: NaN never wins, but a live NaN doesn't bring a dead weight back; scores may be masks, of integers, and must have the right shape"
    m = _two([5.,1.,-9.,0.,4.,2.], [3.,-8.,.5,4.])
    prune_to(m, .2, alone)
    assert [o.mask.view(-1).nonzero().view(-1).tolist() for o in masked_params(m)]==[[0,1,2,4,5],[0,1,3]]
    with torch.no_grad(): m[0].weight[0,:3] = math.nan
    prune_to(m, .5, uniform_sparsity)
    assert m[0].weight_mask.view(-1).nonzero().view(-1).tolist()==[0,4,5]
    prune_to(m, .8, uniform_sparsity, lambda p: p.detach()==2)
    assert m[0].weight_mask.view(-1).nonzero().view(-1).tolist()==[5]
    before = masks_of(m)
    with pytest.raises(ValueError, match='a score for 0.weight has shape'): prune_to(m, .9, score_f=lambda p: p.detach()[:1,:2])
    assert same_masks(before, masks_of(m))

def test_prune_to_refuses():
    "Law 10: no masks, a sparsity out of range, below what a layer has; also a structure that would bring dead weights back; nothing changed"
    with pytest.raises(ValueError, match='no masks.*sparsify_model'): prune_to(mlp(), .5)
    m = mlp((8,8,4))
    sparsify_model(m, .5, 'uniform', seed=0)
    before = {k:v.clone() for k,v in m.state_dict().items()}
    for kwargs,match in ((dict(sparsity=1.), r'sparsity is 1.0.*\[0,1\)'), (dict(sparsity=.2, sparse_f=uniform_sparsity), 'sparsity 0.2.*0.weight'),
        (dict(sparsity=.5, sparse_f=uniform_sparsity, structure='2:4'), '0.weight.*2:4'), (dict(sparsity=.5, sparse_f=uniform_sparsity, structure='fan-in'), 'fan-in')):
        with pytest.raises(ValueError, match=match): prune_to(m, **kwargs)
        assert all(torch.equal(v, before[k]) for k,v in m.state_dict().items())

@pytest.mark.parametrize('text', ['2:4','block 2x2','fan-in','output channels'])
def test_prune_to_structures(text):
    "The best legal mask of the live weights, by sorting units elsewhere: `structure.top`; counts as the structure rounds"
    m = mlp((8,8,4))
    sparsify_model(m, 0.)
    w = [o.p.detach().clone() for o in masked_params(m)]
    prune_to(m, .5, uniform_sparsity, structure=text)
    for o,w in zip(masked_params(m), w):
        assert as_structure(text).legal(o.mask) and int(o.mask.sum())==o.p.numel()//2
        assert torch.equal(o.mask, as_structure(text).top(w.abs(), o.p.numel()//2))

def test_rewind_keeps_masks():
    "Only masks and what shows them stay; dead weights of the old state stay dead; a state with other masks brings none"
    m = mlp((6,8,3))
    sparsify_model(m, 0.)
    state = {k:v.clone() for k,v in m.state_dict().items()}
    prune_to(m, .5)
    masks,shown = masks_of(m),[float(s) for _,_,s in sparse_params(m)]
    with torch.no_grad():
        for p in m.parameters(): p.mul_(3)
    rewind(m, state)
    assert same_masks(masks, masks_of(m)) and shown==[float(s) for _,_,s in sparse_params(m)]
    for o in masked_params(m): assert torch.equal(o.p, torch.where(o.mask, state[o.name], 0))
    assert torch.equal(m[0].bias, state['0.bias'])
    assert_dead(m)

def test_rewind_refuses():
    "Law 10: a state of another model is refused by the parameter's name, with nothing changed (`load_state_dict` copies what fits first)"
    m = mlp((6,8,3))
    sparsify_model(m, .5, 'uniform', seed=0)
    before = {k:v.clone() for k,v in m.state_dict().items()}
    for state in (mlp((6,8,4), seed=1).state_dict(), {k:v for k,v in mlp((6,8,3), seed=1).state_dict().items() if k!='2.weight'}):
        with pytest.raises(ValueError, match='state has no 2.weight'): rewind(m, state)
        assert all(torch.equal(v, before[k]) for k,v in m.state_dict().items())

@pytest.mark.filterwarnings('ignore:scores alone')
def test_tickets_keep_their_layers():
    "The same of `prune_to` and of `find_ticket`, whose count of pruned weights adds up"
    m = mlp((64,64,256,64,10))
    find_ticket(m, lambda m: None, .97, rate=.5)
    assert all(o.mask.sum()>=len(o.mask) for o in masked_params(m))
    n = sum(int(o.mask.sum()) for o in masked_params(m))
    assert prune_to(m, .975)==n-round(.025*sum(o.mask.numel() for o in masked_params(m)))
    assert all(o.mask.sum()>=len(o.mask) for o in masked_params(m))

def test_a_model_that_stores_live_weights_only_is_refused_whole():
    m = nn.Sequential(nn.Linear(20,40), nn.ReLU(), nn.Linear(40,30))
    sparsify_model(m, .8, seed=0)
    sparse_compute(m, torch.randn(64,20), torch.optim.SGD(m.parameters(), lr=.1), plan={'0.weight':'rows'})
    before = {k:v.clone() for k,v in m.state_dict().items()}
    for f in (lambda: prune_to(m, .9), lambda: find_ticket(m, lambda m: None, .9)):
        with pytest.raises(ValueError, match=r'0.weight is stored sparse: call remove\(\)'): f()
    assert all(torch.equal(v, before[k]) for k,v in m.state_dict().items())
