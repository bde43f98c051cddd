"Room 05: the engine. When it moves the topology, what it drops and grows, and that everything else is left alone"
import copy, fastsparse.train.engine, gc, math, numpy as np, os, pickle, pytest, re, subprocess, sys, torch, warnings, weakref
from fastsparse.all import *
from fastsparse.masks.selection import keyed_generator
from fastsparse.masks.structures import Kernels
from fastsparse.masks.schedules import cubic_path,PiecewiseSchedule,soft_bound_path
from fastsparse.weights.optimizers import state_tensors
from fastsparse.masks.scores import MovingGradient,MeanGradient,fisher_saliency
from fastsparse.weights.weight import ParamRef,masked_params
from fastsparse.weights.hooks import mask_hooks
from fastsparse.model.sparsify import candidates
from fastsparse.train.method import Method
from fastsparse.train.param import Scorer,SparseParam
from fastsparse.train.growth import initial_value
from fastsparse.kernels.linear import backward
from fastsparse.core.registry import declares
from fastsparse.masks.apportion import regrow_counts
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from reference import Reference
from torch import nn

state_opts = dict(SGD=dict(momentum=.9), Adam={}, AdamW={}, NAdam={}, RAdam={}, Adamax={}, RMSprop=dict(momentum=.9, centered=True), Adagrad={}, Adadelta={},
    ASGD={}, Rprop={}, Adafactor={})

def engine(m, opt, n_steps=100, every=2, **kwargs):
    "A `DynamicSparseTraining` that doesn't warn about runs without updates"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return DynamicSparseTraining(m, opt, n_steps, **{'batches_per_update':every, 'seed':0, **kwargs})

def step(dst, *grads):
    "One step with gradients by hand"
    for o,g in zip(masked_params(dst.model), grads): o.p.grad = torch.as_tensor(g).to(o.p.dtype).reshape(o.p.shape).clone()
    dst.step()

vector = [4.,-.1,3.,.2,0.,0.,0.,0.],[True]*4+[False]*4,[1.,50.,1.,1.,9.,-7.,2.,3.]
half_at_2 = dict(n_steps=4, every=2, initial_drop_grow_pct=1., stop_pct=1.)  # the cosine is at half of 1 at t=2 of 4

# --- an update by hand (law 2)

@pytest.mark.parametrize('name', state_opts)
def test_rigl_vector(name):
    "The issue's vector with every optimizer: mask, weights, and state: kept for survivors and for the dropped that grew back, zero for the new and the dead"
    w,live,grad = vector
    m,opt = by_hand(w, live, None, getattr(torch.optim, name), lr=1e-30, **state_opts[name])
    dst = engine(m, opt, **half_at_2)
    for _ in range(2): step(dst, [1.,2.,3.,4.,5.,6.,7.,8.])
    before = [t.clone() for t in state_tensors(opt, m.weight)]
    others = {k:copy.deepcopy(v) for k,v in opt.state[m.weight].items() if not isinstance(v, torch.Tensor) or v.shape!=m.weight.shape}
    weight = m.weight.detach().clone()
    step(dst, grad)
    assert m.weight_mask.tolist()==[[True,True,True,False,True,False,False,False]]
    assert torch.allclose(m.weight, torch.tensor([[4.,-.1,3.,0.,0.,0.,0.,0.]]), atol=1e-5) and torch.equal(m.weight[0,:3], weight[0,:3])
    assert m.weight.grad is None or not m.weight.grad.any()
    for b,t in zip(before, state_tensors(opt, m.weight)): assert torch.equal(b[0,:3], t[0,:3]) and is_positive_zero(t[0,3:])
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(opt.state[m.weight][k])) for k,v in others.items())
    assert name=='Adafactor' or before

def test_reset_momentum_is_not_inverted():
    "2020 zeroed the momentum of every old connection and kept it on new ones only"
    w,live,grad = vector
    m,opt = by_hand(w, live, None, torch.optim.SGD, lr=1e-30, momentum=.9)
    dst = engine(m, opt, **half_at_2)
    step(dst, [1.,2.,3.,4.,5.,6.,7.,8.])
    step(dst, [0.]*8)
    step(dst, grad)
    assert torch.allclose(opt.state[m.weight]['momentum_buffer'], torch.tensor([[.9,1.8,2.7,0.,0.,0.,0.,0.]]))

def test_live_zeros_are_dropped_before_dead_ones():
    "Live weights that are zero tie with dead zeros: the drop is a subset of the live (cerebras' wasn't), ties to the lowest index are kept"
    m,opt = by_hand([3.,0.,0.,2.,0.,0.], [True,True,True,True,False,False], None, torch.optim.SGD, lr=0.)
    dst = engine(m, opt, **{**half_at_2, 'initial_drop_grow_pct':.5})
    for g in ([0.]*6, [0.]*6, [0.,0.,0.,0.,0.,1.]): step(dst, g)
    assert m.weight_mask.tolist()==[[True,True,False,True,False,True]]

@pytest.mark.parametrize('grad,grown', [
    ([0.]*8, 2), ([0.,0.,0.,0.,math.inf,0.,0.,0.], 2), ([9.,9.,9.,9.,0.,0.,0.,0.], 2), ([9.,9.,0.,9.,0.,0.,0.,-1.], 7),
    ([0.,0.,0.,0.,-1.,1.,-1.,1.], 4), ([0.,0.,0.,0.,0.,-0.,0.,1e-30], 7)])
def test_growth_by_hand(grad, grown):
    "Growth among what was not kept only, by magnitude, exactly one, ties to the lowest index: never a kept one, however large its gradient"
    m,opt = by_hand([4.,-3.,.1,2.,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.SGD, lr=0.)
    dst = engine(m, opt, **{**half_at_2, 'initial_drop_grow_pct':.5})
    for g in ([0.]*8, [0.]*8, grad): step(dst, g)
    assert set(m.weight_mask.view(-1).nonzero().view(-1).tolist())=={0,1,3,grown}

def test_growth_where_gradients_are_zero():
    "More to grow than dead places with a gradient: dead ones are taken all the same, and the live stay (rigl-reproducibility zeroed a live weight, score 0 like the dead)"
    m,opt = by_hand([2.,1.,3.,0.,0.,0.], [True,True,True,False,False,False])
    dst = engine(m, opt, **half_at_2)
    for _ in range(3): step(dst, [1.,1.,1.,0.,0.,0.])
    assert m.weight_mask.tolist()==[[True,True,True,False,False,False]]
    m,opt = by_hand([2.,1.,3.,0.,0.,0.], [True,True,True,False,False,False])
    dst = engine(m, opt, 10, updates=[2], drop_fraction=0., sparsity=1/6)
    for _ in range(3): step(dst, [0.]*6)
    assert m.weight_mask.tolist()==[[True,True,True,True,True,False]] and m.weight.tolist()==[[2.,1.,3.,0.,0.,0.]]

def test_scores_with_nan():
    "NaN never wins: a NaN keep score is dropped first, a NaN grow score is taken last"
    m,opt = by_hand([1.,1.,1.,1.,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.SGD, lr=0.)
    keep,grow = torch.tensor([[math.nan,5.,-math.inf,7.,9.,9.,9.,9.]]),torch.tensor([[9.,9.,9.,9.,math.nan,-math.inf,math.nan,0.]])
    dst = engine(m, opt, keep_score_f=lambda p: keep, grow_score_f=lambda p: torch.where(p==0, grow, -9.), **{**half_at_2, 'initial_drop_grow_pct':.5})
    for _ in range(3): step(dst, [0.]*8)
    assert m.weight_mask.tolist()==[[False,True,True,True,False,False,False,True]]

def test_all_negative_momentum():
    "2020's signed momentum picked kept weights for growth and density fell (200 to 140): the count stays, and the largest magnitudes grow"
    m,opt = by_hand([4.,3.,2.,1.,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.SGD, lr=1e-30, momentum=.9)
    dst = engine(m, opt, grow_score_f=gradient_momentum, **half_at_2)
    for _ in range(3): step(dst, [-1.,-1.,-1.,-1.,-2.,-9.,-3.,-8.])
    assert m.weight_mask.tolist()==[[True,True,False,False,False,True,False,True]]

# --- beside the reference

def _beside(method, n_updates=100, every=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (40,12),(5,40)
    ws,masks = [rng.normal(size=s)*.4 for s in shapes],[rng.random(s)<.25 for s in shapes]
    x,y = rng.normal(size=(30,12)),rng.normal(size=(30,5))
    m = nn.Sequential(nn.Linear(12,40, bias=False, dtype=torch.double), nn.Tanh(), nn.Linear(40,5, bias=False, dtype=torch.double))
    with torch.no_grad():
        for l,w in zip((m[0],m[2]), ws): l.weight.copy_(torch.from_numpy(w))
    sparsify_model(m, .5, mask_init={f'{i}.weight':torch.from_numpy(mask) for i,mask in zip((0,2), masks)})
    n_steps = every*int(n_updates*1.25)
    presets = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=dict(RigL_presets))[method]
    settings = {**presets, 'batches_per_update':every, 'stop_pct':1.}
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = DynamicSparseTraining(m, opt, n_steps, seed=seed, **settings)
    draw = lambda i,u: torch.rand(shapes[i], generator=keyed_generator(seed, i, u)).numpy()
    ref = Reference(method, ws, masks, x, y, n_steps, every, settings['initial_drop_grow_pct'], 1., .05, .9, draw)
    return m,opt,dst,ref,torch.from_numpy(x),torch.from_numpy(y)

@pytest.mark.parametrize('method', ['SET','SNFS','RigL'])
def test_reference(method):
    "A hundred updates beside an independent NumPy float64 reference: equal masks after each, weights and momentum to 1e-9"
    m,opt,dst,ref,x,y = _beside(method)
    moved = 0
    for t in range(dst.n_steps):
        before = masks_of(m)
        opt.zero_grad()
        backward(m, x, y)
        opt.step()
        ref.step()
        assert same_masks(masks_of(m), [torch.from_numpy(o) for o in ref.masks]), f'step {t}'
        moved += not same_masks(before, masks_of(m))
        for o,w,b in zip(masked_params(m), ref.ws, ref.bufs):
            assert np.allclose(o.p.detach().numpy(), w, atol=1e-9) and np.allclose(opt.state[o.p]['momentum_buffer'].numpy(), b, atol=1e-9)
    assert moved>80 and ref.n_updates==dst.n_updates>=100

# --- counts

def test_count_is_constant():
    "0.0.5 kept everything and added growth: 50 live became 63, 61, 59 ... over seven updates"
    m = nn.Linear(10,10, bias=False)
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt, n_steps=40)
    for _ in range(30):
        m(torch.randn(4,10)).square().sum().backward()
        opt.step()
        opt.zero_grad()
        assert m.weight_mask.sum()==50
    assert dst.n_updates>=7

@pytest.mark.parametrize('start,end', [(.5,.9),(.9,.5),(.5,.5),(.5,0.),(0.,.8)])
def test_sparsity_moves_targets(start, end):
    "Every update leaves exactly the scheduled number, from above or below; equal targets change nothing; the target is the model's exact count"
    m = mlp((9,11,7,3))
    sparsify_model(m, start, erdos_renyi_sparsity, seed=0)
    xb,yb = data(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    first = masks_of(m)
    dst = engine(m, opt, sparsity=end, sparse_f=erdos_renyi_sparsity, initial_drop_grow_pct=.3 if start!=end else 0.)
    n = sum(o.numel() for o in first)
    train(m, opt, 2, xb, yb)
    assert same_masks(first, masks_of(m))
    train(m, opt, 1, xb, yb)
    assert sum(int(o.sum()) for o in masks_of(m))==round((1-end)*n)
    assert same_masks(first, masks_of(m))==(start==end)
    train(m, opt, 6, xb, yb)
    assert sum(int(o.sum()) for o in masks_of(m))==round((1-end)*n)
    assert_dead(m, opt)
    for o,(_,mask,shown) in zip(dst.all, sparse_params(m)): assert o.target==int(mask.sum())==o.live and np.float32(shown)==np.float32(1-o.live/o.n)

def test_grow_none_only_drops():
    "Without a grow score an update drops `int(f*live)`; nothing comes back, and the step's live weights are untouched"
    m = nn.Linear(10,10, bias=False)
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=0.)
    dst = engine(m, opt, n_steps=100, every=10, grow_score_f=None, initial_drop_grow_pct=.4, stop_pct=1.)
    live,mask = 50,m.weight_mask.clone()
    for t in range(99):
        step(dst, torch.randn(10,10))
        if t>0 and t%10==0: live -= int(.2*(1+math.cos(math.pi*t/100))*live)
        assert int(m.weight_mask.sum())==live and not (m.weight_mask & ~mask).any()
        mask = m.weight_mask.clone()

def test_grow_none_meets_a_target():
    "`grow_score_f=None` with `sparsity=` drops to the target, the smallest first, and stays there"
    m,opt = by_hand([5.,1.,4.,2.,3.,6.], [True]*6, None, torch.optim.SGD, lr=0.)
    dst = engine(m, opt, grow_score_f=None, sparsity=.5)
    for _ in range(9): step(dst, [0.]*6)
    assert m.weight_mask.tolist()==[[True,False,True,False,False,True]]

def test_buffer_written_by_the_user():
    "`weight_sparsity.fill_(.5)` is a new target, met exactly; the engine shows the achieved sparsity afterwards"
    m,_,_ = _two_layers(.8)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.01))
    m[0].weight_sparsity.fill_(.5)
    _spin(dst, 3)
    assert int(m[0].weight_mask.sum())==50 and int(m[2].weight_mask.sum())==20
    m[2].weight_sparsity.fill_(.95)
    _spin(dst, 2)
    assert int(m[2].weight_mask.sum())==5 and m[2].weight_sparsity==torch.tensor(.95) and int(m[0].weight_mask.sum())==50

@pytest.mark.parametrize('cast', [lambda m: m.half().float(), lambda m: m.double(), lambda m: m.bfloat16().float(), lambda m: m.to('cpu')])
def test_casts_are_not_writes(cast):
    "Law 5: `.half()` rounds the sparsity buffer; that is not a target somebody wrote (833 of 1001 would move)"
    m = nn.Linear(1001,1, bias=False)
    sparsify_model(m, .168, seed=0)
    cast(m)
    opt = torch.optim.SGD(m.parameters(), lr=0.)
    dst = engine(m, opt, initial_drop_grow_pct=.3)
    for _ in range(3): step(dst, torch.randn(1,1001))
    assert dst.n_updates==1 and int(m.weight_mask.sum())==round((1-.168)*1001)

# --- redistribution

def _two_layers(s, sizes=(10,10,10)):
    m = mlp(sizes)
    hooks = sparsify_model(m, s, seed=0)
    return m,hooks,data(m)

def _spin(dst, n):
    xb,yb = data(dst.model)
    train(dst.model, dst.opt, n, xb, yb)

@pytest.mark.parametrize('shares,total,room,expect', [
    ([1.,1.], 4, [9,9], [2,2]), ([3.,1.], 4, [9,9], [3,1]), ([3.,1.], 4, [2,9], [2,2]), ([1.,0.], 4, [9,9], [4,0]),
    ([1.,0.], 4, [3,9], [3,1]), ([0.,0.], 4, [3,9], [1,3]),
    ([5.,1.,1.], 7, [1,9,9], [1,3,3]), ([1.,1.,1.], 2, [5,5,5], [1,1,0]), ([1.,2.], 0, [5,5], [0,0]), ([1e30,1.], 5, [9,9], [5,0]), ([1.,1.], 10, [5,5], [5,5]),
    ([1e-30,1e-30], 3, [9,9], [2,1]), ([1.,1.], 3, [0,9], [0,3])])
def test_regrow_counts_by_hand(shares, total, room, expect):
    "In proportion, none past its room, the surplus to the others, exact; nobody's share is zero: by room"
    assert regrow_counts(shares, total, room)==expect

@settings(max_examples=150, deadline=None)
@given(layers=st.lists(st.tuples(st.floats(0,1e6), st.integers(0,2000)), min_size=1, max_size=8), f=st.floats(0,1))
def test_regrow_counts(layers, f):
    "The budget is met exactly and nobody exceeds its room, for any shares"
    shares,room = [list(o) for o in zip(*layers)]
    total = int(f*sum(room))
    out = regrow_counts(shares, total, room)
    assert sum(out)==total and all(0<=o<=r for o,r in zip(out, room))
    open_ = [(s,o) for s,o,r in zip(shares, out, room) if o<r-1 and s>0]
    for s,o in open_:
        for s2,o2 in open_: assert s*(o2-1)<=s2*(o+1)*(1+1e-9)+1e-6, 'proportional within one where there is room'

@pytest.mark.parametrize('bad', [math.nan, math.inf, -1.])
def test_bad_shares(bad):
    "Law 10: a share that is no number is refused before anything changed"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt, redistribute_f=lambda p: bad)
    before = masks_of(m)
    _spin(dst, 2)
    weights = [p.detach().clone() for p in m.parameters()]
    with pytest.raises(ValueError, match='redistribution'): _spin(dst, 1)
    assert same_masks(before, masks_of(m)) and all(torch.equal(a, b) for a,b in zip(weights, m.parameters())) and dst.n_updates==0

def test_redistribution_moves_the_budget():
    "The model's count stays exactly; a layer fills up to dense and no further; then it sheds again (2020: 100 of 100 for ever)"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=1e-3)
    share = {'0.weight':1., '2.weight':1e-6}
    dst = engine(m, opt, n_steps=1000, redistribute_f=lambda p, name: share[name], initial_drop_grow_pct=.5)
    live = lambda: [int(o.mask.sum()) for o in masked_params(m)]
    for _ in range(16):
        _spin(dst, 1)
        assert sum(live())==100 and max(live())<=100 and [s.target for s in dst.slots]==live()
    assert live()[0]>=97
    share.update({'0.weight':1e-6, '2.weight':1.})
    _spin(dst, 16)
    assert sum(live())==100 and live()[0]<=5
    assert_dead(m, opt)

def test_a_dense_layer_sheds_to_its_target():
    "Seeds 1.4: a layer at density 1 with target .5 stayed 100 of 100; here it meets the target at the first update"
    m,_,_ = _two_layers(0.)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.1), sparsity=.5)
    _spin(dst, 3)
    assert [int(o.mask.sum()) for o in masked_params(m)]==[50,50]

def test_snfs_default_state_is_dense():
    "`grow_score_f=gradient_momentum` alone: momentum of dead weights is real history, weights stay dead; it is masked once the engine is removed"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, grow_score_f=gradient_momentum)
    for _ in range(6):
        _spin(dst, 1)
        assert_dead(m, opt, state=False)
    o = masked_params(m)[0]
    assert opt.state[o.p]['momentum_buffer'][~o.mask].all()
    dst.remove()
    _spin(dst, 1)
    assert_dead(m, opt)

# --- when

def _updates(dst, n, spoil=()):
    "Steps at which masks were updated, of `n`; at the steps in `spoil` a gradient is not finite"
    times = []
    for t in range(n):
        k = dst.n_updates
        grads = [torch.ones_like(o.p) for o in masked_params(dst.model)]
        if t in spoil: grads[-1].view(-1)[0] = math.inf if t%2 else math.nan
        step(dst, *grads)
        times += [t]*(dst.n_updates-k)
    return times

@pytest.mark.parametrize('n,every,stop', [(30,5,.75),(30,7,1.),(12,2,.5),(10,9,1.),(10,8,1.),(40,3,.3)])
def test_due_times(n, every, stop):
    "t > 0, a multiple, t < stop*n, t < n-1, by the definition written out again"
    m,_,_ = _two_layers(.5)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=0.), n_steps=n, every=every, stop_pct=stop, initial_drop_grow_pct=1.)
    expect = [t for t in range(1, n-1) if t%every==0 and t<stop*n and int(.5*(1+math.cos(math.pi*t/(stop*n)))*50)>0]
    assert _updates(dst, n+3)==expect

def test_nothing_to_change_is_no_update():
    "An update that would change nothing doesn't replace the step: 3 live at .3 drop none"
    m,opt = by_hand([1.,2.,3.,0.], [True,True,True,False], None, torch.optim.SGD, lr=1.)
    dst = engine(m, opt)
    for _ in range(6): step(dst, [1.,1.,1.,1.])
    assert dst.n_updates==0 and m.weight.tolist()==[[-5.,-4.,-3.,0.]]

@pytest.mark.parametrize('spoil,done', [((4,),5), ((4,5),6), ((4,5,6),7), ((4,5,6,7),8)])
def test_waits_for_finite_gradients(spoil, done):
    "An update due while gradients aren't finite is done at the next finite step, with the drop fraction of the step at which it fell due; NaN kills no mask"
    m = nn.Linear(100,1, bias=False)
    extra = nn.Parameter(torch.zeros(1))
    sparsify_model(m, 0., seed=0)
    opt = torch.optim.SGD([m.weight, extra], lr=0.)
    dst = engine(m, opt, n_steps=20, every=4, grow_score_f=None, initial_drop_grow_pct=1., stop_pct=1.)
    for t in range(done+1):
        extra.grad = torch.tensor([math.nan if t in spoil else 1.])
        assert int(m.weight_mask.sum())==100
        step(dst, torch.ones(100))
    due = 8 if done==8 else 4
    assert dst.n_updates==1 and int(m.weight_mask.sum())==100-int(.5*(1+math.cos(math.pi*due/20))*100)

def test_rigl_reads_dense_gradients_when_it_was_delayed():
    "A waiting update gets dense gradients at the step that it is done"
    m,opt = by_hand([4.,3.,2.,1.,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.SGD, lr=0.)
    extra = nn.Parameter(torch.zeros(1))
    opt.add_param_group(dict(params=[extra]))
    dst = engine(m, opt, n_steps=8, every=2, initial_drop_grow_pct=.5, stop_pct=1.)
    seen = []
    x = torch.tensor([[1.,1.,1.,1.,1.,5.,2.,3.]])
    for t in range(4):
        opt.zero_grad()
        (m(x).sum()+extra.sum()*(math.nan if t==2 else 1.)).backward()
        seen.append(bool(m.weight.grad[~m.weight_mask].any()))
        dst.step()
    assert seen==[False,False,True,True] and m.weight_mask.tolist()==[[True,True,True,False,False,True,False,False]]

def test_gradients_are_dense_only_when_read():
    "Law 3: the mask of gradients is keep_dense_grad for exactly the batches that an update will read"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, n_steps=20, every=4)
    xb,yb = data(m)
    for t in range(12):
        opt.zero_grad()
        backward(m, xb, yb)
        o = masked_params(m)[0]
        assert bool(o.p.grad[~o.mask].any())==(t in (4,8))
        opt.step()
        assert_dead(m, opt)
    assert dst.n_updates==2

def _with_scaler(opt_f, scale, n=12, spoil=()):
    m,_,(xb,yb) = _two_layers(.5)
    opt = opt_f(m.parameters())
    seen = []
    @declares(reads_grad=True)
    def grow(p):
        seen.append(p.grad.abs().clone())
        return seen[-1]
    dst = engine(m, opt, n_steps=20, every=4, grow_score_f=grow)
    scaler = torch.amp.GradScaler('cpu', init_scale=scale or 1., growth_interval=1000, enabled=scale is not None)
    t = 0
    for i in range(n):
        opt.zero_grad()
        loss = nn.functional.mse_loss(m(xb), yb)
        scaler.scale(loss).backward()
        if i in spoil: m[0].weight.grad[0,0] = math.inf
        scaler.step(opt)
        scaler.update()
        assert_dead(m, opt)
        t = dst.t
    return m,t,seen,scaler

@pytest.mark.parametrize('fused', [False,True])
@pytest.mark.parametrize('name', ['SGD','Adam'])
def test_grad_scaler(name, fused):
    "A gradient scaler on the CPU changes no bit: scores see unscaled gradients, also where a fused optimizer divides itself; replaced steps keep the scaler in step"
    f = partial(getattr(torch.optim, name), lr=.01, fused=fused, **(dict(momentum=.9) if name=='SGD' else {}))
    a,ta,sa,_ = _with_scaler(f, None)
    b,tb,sb,_ = _with_scaler(f, 2.**10)
    assert ta==tb==12 and len(sa)==4 and all(torch.equal(p, q) for p,q in zip(sa, sb))
    assert same_masks(masks_of(a), masks_of(b)) and all(torch.equal(p, q) for p,q in zip(a.parameters(), b.parameters()))

@pytest.mark.parametrize('fused', [False,True])
def test_grad_scaler_skips(fused):
    "An infinite gradient at a due step: the scaler halves and skips, the update is done at the next finite step, weights stay finite"
    f = partial(torch.optim.SGD, lr=.01, momentum=.9, fused=fused)
    m,t,seen,scaler = _with_scaler(f, 2.**10, n=7, spoil=(4,5))
    assert len(seen)==2 and scaler.get_scale()==2.**8 and all(p.isfinite().all() for p in m.parameters())
    assert t==(7 if fused else 5)  # a plain optimizer's step isn't called when it is skipped, and t counts calls

@pytest.mark.parametrize('method', ['SET','SNFS','RigL'])
def test_accumulation_is_one_big_batch(method):
    "Two halves accumulated in a plain loop are one batch: equal masks, weights to rounding"
    presets = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)[method]
    def run(parts):
        m = mlp((6,8,7,3), dtype=torch.double)
        sparsify_model(m, .5, seed=0)
        opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
        dst = engine(m, opt, **{**presets, 'n_steps':30, 'every':3, 'batches_per_update':3})
        xb,yb = data(m)
        for _ in range(25):
            opt.zero_grad()
            for x,y in zip(xb.chunk(parts), yb.chunk(parts)): backward(m, x, y, 1/parts)
            dst.step()
            assert_dead(m, opt, state=method!='SNFS')
        assert dst.n_updates>=5
        return m
    a,b = run(1),run(2)
    assert same_masks(masks_of(a), masks_of(b)) and all(torch.allclose(p, q, atol=1e-10) for p,q in zip(a.parameters(), b.parameters()))

@pytest.mark.parametrize('through', ['engine','optimizer'])
def test_closures(through):
    "`opt.step(closure)` evaluates the closure once, returns its loss, and gives the masks of the plain loop"
    def run(closure):
        m,_,(xb,yb) = _two_layers(.5)
        opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
        dst = engine(m, opt, n_steps=20, every=3)
        calls = []
        def f():
            opt.zero_grad()
            calls.append(1)
            return backward(m, xb, yb)
        for i in range(15):
            if closure: loss = (dst if through=='engine' else opt).step(f)
            else:
                f()
                dst.step()
            assert len(calls)==i+1 and (not closure or math.isfinite(loss))
            assert_dead(m, opt)
        return m
    a,b = run(False),run(True)
    assert same_masks(masks_of(a), masks_of(b)) and all(torch.equal(p, q) for p,q in zip(a.parameters(), b.parameters()))

def test_lbfgs_is_refused():
    "Optimizers that need a closure are refused by name, and nothing is attached"
    m,_,_ = _two_layers(.5)
    with pytest.raises(ValueError, match='LBFGS'): engine(m, torch.optim.LBFGS(m.parameters()))

# --- what an update does to the step (law 4)

@pytest.mark.parametrize('name', ['SGD','Adam'])
def test_replaced_step(name):
    "The update takes the step's place: kept weights, biases, their momentum and step counters stay bit for bit, and its gradient reaches no later step"
    m,_,(xb,yb) = _two_layers(.5)
    opt = getattr(torch.optim, name)(m.parameters(), lr=.1, **(dict(momentum=.9) if name=='SGD' else {}))
    dst = engine(m, opt, n_steps=20, every=3)
    train(m, opt, 3, xb, yb)
    old,masks = [p.detach().clone() for p in m.parameters()],masks_of(m)
    state = copy.deepcopy([opt.state[p] for p in m.parameters()])
    opt.zero_grad()
    backward(m, xb, yb)
    opt.step()
    assert dst.n_updates==1 and not same_masks(masks, masks_of(m))
    survive = {id(o.p): o.mask & b for o,b in zip(masked_params(m), masks)}
    for p,q,s in zip(m.parameters(), old, state):
        both = survive.get(id(p), torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(p[both], q[both]) and p[~both].eq(0).all()
        for k,v in s.items(): assert torch.equal(v[both], opt.state[p][k][both]) if v.shape==p.shape else torch.equal(v, opt.state[p][k])
    assert all(p.grad is None or not p.grad.any() for p in m.parameters())
    backward(m, xb, yb)  # no zero_grad: only this batch's gradient may be there
    left = [p.grad.clone() for p in m.parameters()]
    opt.zero_grad()
    backward(m, xb, yb)
    assert all(torch.equal(a, p.grad) for a,p in zip(left, m.parameters()))

def test_step_beside_the_update():
    "`replace_step=False`: the same update, then the step with gradients masked by the new mask; every batch may have one"
    m,opt = by_hand(*vector[:2], None, torch.optim.SGD, lr=.5)
    dst = engine(m, opt, replace_step=False, **half_at_2)
    for _ in range(2): step(dst, [0.]*8)
    step(dst, vector[2])
    assert m.weight_mask.tolist()==[[True,True,True,False,True,False,False,False]]
    assert torch.allclose(m.weight, torch.tensor([[3.5,-25.1,2.5,0.,-4.5,0.,0.,0.]]))
    m,opt = by_hand(*vector[:2], None, torch.optim.SGD, lr=.1)
    dst = engine(m, opt, n_steps=10, every=1, replace_step=False, initial_drop_grow_pct=1.)
    assert _updates(dst, 10)==[1,2,3,4,5]  # at 6 and 7 of .75*10 int(f*4) is 0: f is .0955 and .0109

def test_every_batch_with_replacement_is_refused():
    "Law 4: it would train nothing"
    m,_,_ = _two_layers(.5)
    with pytest.raises(ValueError, match='replace_step=False'): engine(m, torch.optim.SGD(m.parameters(), lr=.1), every=1)

# --- left alone (law 9)

def test_frozen_and_unused_parameters():
    "A parameter that is frozen, or has no gradient at an update, is left exactly as it is, its budget stays, and the others move"
    m = mlp((10,10,10,10,3))
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, redistribute_f=lambda p: 1., initial_drop_grow_pct=.5)
    m[2].weight.requires_grad_(False)
    before = [(o.p.detach().clone(), o.mask.clone()) for o in masked_params(m)]
    for _ in range(5):
        for i,o in enumerate(masked_params(m)): o.p.grad = None if i in (1,2) else torch.randn(o.p.shape)
        dst.step()
    same = [torch.equal(a, o.p) and torch.equal(b, o.mask) for (a,b),o in zip(before, masked_params(m))]
    assert dst.n_updates>0 and same==[False,True,True,False]
    assert sum(int(o.mask.sum()) for o in masked_params(m))==sum(int(b.sum()) for _,b in before)

def test_momentum_that_is_not_there_yet():
    "A parameter whose first gradient comes at an update has no momentum yet: it is left as it is, and the others move"
    m,_,(xb,yb) = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, every=3, **{k:v for k,v in SNFS_presets.items()})
    m[2].weight.requires_grad_(False)
    _spin(dst, 3)
    m[2].weight.requires_grad_(True)
    before = masks_of(m)
    _spin(dst, 1)
    assert dst.n_updates==1 and [torch.equal(a, b) for a,b in zip(before, masks_of(m))]==[False,True]

def test_partial_scores_say_what_they_read():
    "A `functools.partial` of `gradient_momentum` still reads real history of dead weights"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    engine(m, opt, grow_score_f=partial(gradient_momentum, eps=1e-3))
    train(m, opt, 2, *data(m))
    o = masked_params(m)[0]
    assert opt.state[o.p]['momentum_buffer'][~o.mask].all()

def test_sparse_modules():
    "Only connections of the modules named move; masks elsewhere stay and stay enforced"
    m,_,(xb,yb) = _two_layers(.5, (10,10,10,3))
    opt = torch.optim.Adam(m.parameters(), lr=.1)
    dst = engine(m, opt, sparse_modules=[m[2]])
    before = masks_of(m)
    for _ in range(7):
        train(m, opt, 1, xb, yb)
        assert_dead(m, opt)
    assert [torch.equal(a, b) for a,b in zip(before, masks_of(m))]==[True,False,True] and dst.n_updates>0

def test_masks_by_hand():
    "Whoever registered `{name}_mask`, a bias too: the mask's own sparsity is the target"
    m = nn.Linear(6,10)
    m.register_buffer('weight_mask', sparse_mask_like(m.weight, .8))
    m.register_buffer('bias_mask', sparse_mask_like(m.bias, .5))
    m.register_buffer('weight_sparsity', torch.tensor(.8))
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, initial_drop_grow_pct=.5)
    before = masks_of(m)
    for _ in range(7):
        opt.zero_grad()
        (m(torch.randn(4,6))-1).square().sum().backward()
        opt.step()
        assert_dead(m, opt)
        assert [int(o.mask.sum()) for o in masked_params(m)]==[12,5]
    assert dst.n_updates>0 and not any(torch.equal(a, b) for a,b in zip(before, masks_of(m)))
    dst.remove()
    train_bias = m.bias.detach().clone()
    (m(torch.randn(4,6))-1).square().sum().backward()
    opt.step()
    assert (m.bias!=train_bias).sum()==10 and not mask_hooks(m)

def test_enforce_mask_false_leaves_it_to_the_engine():
    "`enforce_mask=False`: the engine enforces while it is attached, and no longer"
    m = mlp((10,10,3))
    sparsify_model(m, .5, enforce_mask=False, seed=0)
    xb,yb = data(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt)
    for _ in range(5):
        train(m, opt, 1, xb, yb)
        assert_dead(m, opt)
    dst.remove()
    train(m, opt, 2, xb, yb)
    assert m[0].weight.all() and not mask_hooks(m)

def test_removing_hooks_after_the_engine():
    "Part enforced by `sparsify_model`, the rest by the engine: after `dst.remove()` the `Hooks` still end their part, no forward in between"
    m = mlp((10,10,3))
    hooks = sparsify_model(m[0], .5, seed=0)
    sparsify_model(m[2], .5, seed=0, enforce_mask=False)
    xb,yb = data(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt)
    train(m, opt, 3, xb, yb)
    dst.remove()
    hooks.remove()
    assert not mask_hooks(m)
    train(m, opt, 2, xb, yb)
    assert m[0].weight.all() and m[2].weight.all()

def test_removed_engine_rests():
    "After `remove()` the static method goes on: masks rest and stay enforced, steps are steps; a new engine can be attached"
    m,_,(xb,yb) = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt)
    with pytest.raises(ValueError, match=r'remove\(\)'): engine(m, opt)
    train(m, opt, 4, xb, yb)
    dst.remove()
    before = masks_of(m)
    train(m, opt, 6, xb, yb)
    assert same_masks(before, masks_of(m))
    assert_dead(m, opt)
    dst = engine(m, opt)
    train(m, opt, 3, xb, yb)
    assert dst.n_updates==1

def test_parameters_stay_the_same_objects():
    "Law 5: weights, masks and buffers are changed in place"
    m,_,(xb,yb) = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    ids = [(id(t),t.data_ptr()) for t in [*m.parameters(), *m.buffers()]]
    dst = engine(m, opt)
    train(m, opt, 7, xb, yb)
    assert dst.n_updates>1 and ids==[(id(t),t.data_ptr()) for t in [*m.parameters(), *m.buffers()]]

# --- scores of users

class _Ones:
    def __call__(self, p): return torch.ones_like(p)

def _all_named(p, mask, name, module, step, n, generator, opt):
    return torch.ones_like(p)*(mask.dtype==torch.bool)*(module.weight is p)*(name in ('0.weight','2.weight'))*(step==2)

@pytest.mark.parametrize('f', [lambda p: torch.ones_like(p), lambda param, opt=None, **kwargs: torch.ones_like(param), lambda param, opt: torch.ones_like(param),
    _Ones(), _all_named, partial(lambda k, p: torch.ones_like(p), 3), torch.ones_like, lambda p: torch.ones(p.shape, dtype=torch.int64),
    lambda p: torch.ones(p.shape, dtype=torch.double), lambda p: torch.ones_like(p).requires_grad_()*1, lambda p: torch.ones(p.shape[::-1]).t()])
def test_call_shapes(f):
    "Every shape of score function, and scores of other dtypes and layouts, as keep and as grow score: all ones keep and grow the lowest indices"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=0.)
    dst = engine(m, opt, keep_score_f=f, grow_score_f=f)
    before = masks_of(m)
    for _ in range(3): step(dst, *[torch.ones_like(o.p) for o in masked_params(m)])
    k = int(.15*(1+math.cos(math.pi*2/75))*50)
    for b,o in zip(before, masked_params(m)):
        keep = b.view(-1).nonzero().view(-1)[:50-k]
        new = torch.zeros(100, dtype=torch.bool)
        new[keep] = True
        new[(~new).nonzero().view(-1)[:k]] = True
        assert torch.equal(o.mask.view(-1), new)

def test_bool_scores_are_masks():
    "A score may be the mask itself: the kept, and the grown; a wrong count is refused"
    m,opt = by_hand(*vector[:2], None, torch.optim.SGD, lr=0.)
    keep,grow = torch.tensor([[True,False,False,True]+[False]*4]),torch.tensor([[False]*6+[True]*2])
    dst = engine(m, opt, keep_score_f=lambda p: keep, grow_score_f=lambda p: grow, **half_at_2)
    for _ in range(3): step(dst, [0.]*8)
    assert m.weight_mask.tolist()==[[True,False,False,True,False,False,True,True]]
    m,opt = by_hand(*vector[:2], None, torch.optim.SGD, lr=0.)
    dst = engine(m, opt, keep_score_f=lambda p: keep, grow_score_f=lambda p: ~grow, **half_at_2)
    for _ in range(2): step(dst, [0.]*8)
    with pytest.raises(ValueError, match='weight.*live weights'): step(dst, [0.]*8)

bad_scores = [lambda p: p.detach()[0], lambda p: p.detach().sum(), lambda p: torch.zeros(1,1), lambda p: None, lambda p: p.detach().tolist(), lambda p: 3.,
    lambda p: torch.ones(1, dtype=torch.bool), lambda p: torch.ones(*p.shape,1), lambda p: torch.ones(p.shape, dtype=torch.bool)[:1]]

@pytest.mark.parametrize('where,alone', [('keep_score_f',False),('keep_score_f',True),('grow_score_f',False)])
@pytest.mark.parametrize('f', bad_scores)
def test_scores_of_the_wrong_shape(f, where, alone):
    "Law 10: refused by the parameter's name with nothing changed, also when only the last parameter's score is wrong, or sees live weights alone"
    m,_,_ = _two_layers(.8)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    last = lambda p, module: f(p) if module is m[2] else p.detach().abs()
    declares(elementwise=alone)(last)
    dst = engine(m, opt, **{where:last})
    _spin(dst, 2)
    before,weights,state = masks_of(m),[p.detach().clone() for p in m.parameters()],copy.deepcopy(opt.state_dict()['state'])
    with pytest.raises(ValueError, match=r'2\.weight'): _spin(dst, 1)
    assert same_masks(before, masks_of(m)) and all(torch.equal(a, b) for a,b in zip(weights, m.parameters())) and dst.n_updates==0
    assert all(torch.equal(v['momentum_buffer'], opt.state_dict()['state'][k]['momentum_buffer']) for k,v in state.items())

# --- warnings and refusals

def _warned(n, every, s=.5, **kwargs):
    m,_,_ = _two_layers(s)
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), n, batches_per_update=every, **kwargs)
    return ' '.join(str(w.message) for w in ws if 'no update' in str(w.message))

@pytest.mark.parametrize('n,every,stop,best', [(20,50,.75,14), (20,18,1.,17), (10,100,1.,8), (5,3,.5,2), (100,75,.75,73), (8,8,1.,6)])
def test_no_update_warns(n, every, stop, best):
    "A run without an update warns and names the largest interval that gives one: `t < stop*n`, `t < n-1`, and `int(f*50)` at least 1 (found by trying all)"
    ok = lambda b: any(t<stop*n and t<n-1 and int(.15*(1+math.cos(math.pi*t/(stop*n)))*50) for t in range(b, n, b))
    best = max(b for b in range(2, n+1) if ok(b))
    assert f'is {best}' in _warned(n, every, stop_pct=stop) and not _warned(n, best, stop_pct=stop)

def test_no_interval_helps():
    "Dense masks, or a run of two steps: no interval gives an update, and the warning says so"
    assert 'no batches_per_update' in _warned(100, 10, s=0.)
    assert 'no batches_per_update' in _warned(2, 2)
    assert not _warned(100, 10)

@pytest.mark.parametrize('kwargs,match', [
    (dict(n_steps=0), 'n_steps'), (dict(n_steps=None), 'n_steps'), (dict(n_steps=10.), 'n_steps'), (dict(batches_per_update=0), 'batches_per_update'),
    (dict(batches_per_update=2.5), 'batches_per_update'), (dict(initial_drop_grow_pct=1.1), 'initial_drop_grow_pct'), (dict(initial_drop_grow_pct=-.1), 'initial_drop_grow_pct'),
    (dict(stop_pct=0.), 'stop_pct'), (dict(stop_pct=1.5), 'stop_pct'), (dict(stop_pct=math.nan), 'stop_pct'), (dict(sparsity=1.), r'sparsity.*\[0,1\)'), (dict(sparsity=-1.), r'\[0,1\)'),
    (dict(sparse_modules=[nn.Linear(2,2)]), 'sparse_modules'), (dict(sparsity=.5, sparse_f=lambda p,s: [.5]), 'returned 1'), (dict(sparsity=.5, sparse_modules=[nn.Linear(2,2)]), 'sparse_modules')])
@pytest.mark.parametrize('sparse', [True,False])
def test_refused_before_anything_changed(kwargs, match, sparse):
    "Law 10: a setting out of range names value and range; model, optimizer and hooks are as they were, whether the model was sparse or is to become so"
    m = mlp((10,10,3))
    if sparse: sparsify_model(m, .5, seed=0)
    else: kwargs = dict(sparsity=.5, **{k:v for k,v in kwargs.items() if k!='sparsity'}) if 'sparsity' not in kwargs else kwargs
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    keys,hooks,ws = list(m.state_dict()),len(m._forward_pre_hooks),[p.detach().clone() for p in m.parameters()]
    kwargs = dict(dict(n_steps=100, batches_per_update=5), **kwargs)
    with pytest.raises(ValueError, match=match): DynamicSparseTraining(m, opt, **kwargs)
    assert keys==list(m.state_dict()) and hooks==len(m._forward_pre_hooks) and all(torch.equal(a, b) for a,b in zip(ws, m.parameters()))
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks

@pytest.mark.parametrize('sparse', [True,False])
def test_optimizer_without_the_parameters(sparse):
    "Law 10: an optimizer that holds none, or only some, of the parameters that are to move is refused by the parameter's name"
    def make():
        m = mlp((10,10,3))
        if sparse: sparsify_model(m, .5, seed=0)
        return m,{} if sparse else dict(sparsity=.5)
    m,kw = make()
    with pytest.raises(ValueError, match="optimizer doesn't hold"): engine(m, torch.optim.SGD(mlp().parameters(), lr=.1), **kw)
    with pytest.raises(ValueError, match=r"optimizer doesn't hold 0\.weight"): engine(m, torch.optim.SGD(m[2].parameters(), lr=.1), **kw)
    assert sparse or not masked_params(m)
    m,kw = make()
    engine(m, torch.optim.SGD(m[2].parameters(), lr=.1), sparse_modules=[m[2]], **kw)
    m,kw = make()
    m[0].requires_grad_(False)
    engine(m, torch.optim.SGD(m[2].parameters(), lr=.1), **kw)

def test_no_masks():
    "Law 10: no masks and no `sparsity=` is an error that says what to call"
    m = mlp()
    with pytest.raises(ValueError, match=r'sparsify_model.*sparsity='): engine(m, torch.optim.SGD(m.parameters(), lr=.1))
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.1), sparsity=.75)
    assert sum(s.live for s in dst.slots)==round(.25*125)

def test_a_fastai_optimizer_is_refused():
    "`DynamicSparseTraining` is for torch's optimizers; the error names the callback"
    from fastai.optimizer import SGD
    m,_,_ = _two_layers(.5)
    with pytest.raises(ValueError, match='DynamicSparseTrainingCallback'): engine(m, SGD(list(m.parameters()), lr=.1))

# --- going on (law 6)

going = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets, GraNet=dict(GraNet_presets, sparsity=.8), SRigL=SRigL_presets,
    soft=dict(MEST_presets, updates=4, drop_fraction=.3, sparsity=.85, sparsity_path=soft_bound_path(.3, .75)),
    collecting=dict(RigL_presets, keep_score_f=fisher_saliency, grow_score_f=MeanGradient(3)), moving=dict(SET_presets, grow_score_f=MovingGradient(.8)),
    cycling=dict(SET_presets, sparsity=[.6,.7,.8], drop_fraction=[.1,.3]), initial=dict(RigL_presets, grow_init_f=initial_value),
    blocks=dict(RigL_presets, structure='block 3x3', redistribute_f=gradient_redistribution), ACDC=dict(ACDC_presets, sparsity=.7),
    rules=dict(rules=[('0.*', dict(RigL_presets, batches_per_update=4)), ('2.*', SNFS_presets), ('4.*', dict(GMP_presets, batches_per_update=3, sparsity=.8))]))
runs = [(method,opt) for method in ('SET','SNFS','RigL') for opt in ('SGD','Adam')]+[(method, ('SGD','Adam')[i%2]) for i,method in enumerate(going) if i>2]

def start(method, opt, n_steps=40, dtype=torch.float):
    "A run of one of `runs`: model, optimizer, engine, and a batch a step"
    m = mlp((6,12,9,3), seed=4, dtype=dtype)
    if method!='ACDC': sparsify_model(m, .7, erdos_renyi_sparsity, seed=5, structure={'SRigL':'fan-in', 'blocks':'block 3x3'}.get(method))
    opt = getattr(torch.optim, opt)(m.parameters(), lr=.03, **(dict(momentum=.9) if opt=='SGD' else {}))
    dst = engine(m, opt, n_steps, **{**going[method], 'batches_per_update':4, 'seed':None})
    return m,opt,dst

def go(m, opt, t0, t1):
    "Steps `t0` to `t1` with data that depend on the step only"
    for t in range(t0, t1):
        opt.zero_grad()
        backward(m, *data(m, seed=100+t))
        opt.step()

def resume_all(folder):
    "In a fresh process: load each run and finish it"
    for method,name in runs:
        torch.manual_seed(os.getpid())
        m,opt,dst = start(method, name)
        ck = torch.load(f'{folder}/{method}_{name}.pt')
        m.load_state_dict(ck['model'])
        opt.load_state_dict(ck['opt'])
        dst.load_state_dict(ck['dst'])
        go(m, opt, 17, 40)
        torch.save(dict(model=m.state_dict(), opt=opt.state_dict(), dst=dst.state_dict()), f'{folder}/{method}_{name}_end.pt')

@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
    "All of `runs`, interrupted at step 17 and finished in one fresh process"
    folder,ends = tmp_path_factory.mktemp('resume'),{}
    for method,name in runs:
        torch.manual_seed(3)
        m,opt,dst = start(method, name)
        go(m, opt, 0, 17)
        torch.save(dict(model=m.state_dict(), opt=opt.state_dict(), dst=dst.state_dict()), folder/f'{method}_{name}.pt')
        go(m, opt, 17, 40)
        ends[method,name] = dict(model=m.state_dict(), opt=opt.state_dict(), dst=dst.state_dict())
    code = f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_engine; test_engine.resume_all({str(folder)!r})'
    subprocess.run([sys.executable, '-c', code], check=True, timeout=300)
    return {k:(v, torch.load(folder/f'{k[0]}_{k[1]}_end.pt')) for k,v in ends.items()}

def _flat(o, at=''):
    if isinstance(o, dict): return [x for k,v in o.items() for x in _flat(v, f'{at}/{k}')]
    if isinstance(o, (list,tuple)): return [x for k,v in enumerate(o) for x in _flat(v, f'{at}/{k}')]
    return [(at,o)]

@pytest.mark.parametrize('run', runs, ids='-'.join)
def test_resume_bit_for_bit(resumed, run):
    "Law 6: a run saved between two updates and finished in a fresh process is the uninterrupted one, bit for bit: weights, masks, optimizer, engine"
    whole,halves = [_flat(o) for o in resumed[run]]
    assert [k for k,_ in whole]==[k for k,_ in halves] and len(whole)>20
    for (k,a),(_,b) in zip(whole, halves): assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a==b, k
    assert dict(whole)['/dst/n_updates']>=5

def test_state_is_plain():
    "The engine's state loads with torch's safe loader and survives JSON"
    import json
    m,opt,dst = start('SNFS', 'Adam')
    go(m, opt, 0, 9)
    assert json.loads(json.dumps(dst.state_dict()))==dst.state_dict()

def test_saved_while_waiting():
    "An update that waits for finite gradients is saved too"
    def run(split):
        m,opt,dst = start('RigL', 'SGD')
        torch.manual_seed(0)
        dst.seed = 1
        for t in range(4): go(m, opt, t, t+1)
        extra = nn.Parameter(torch.zeros(1))
        opt.add_param_group(dict(params=[extra], lr=0., momentum=0.))
        extra.grad = torch.tensor([math.nan])
        backward(m, *data(m, seed=104))
        for o in masked_params(m): o.p.grad.zero_()
        opt.step()
        assert dst.pending==4 and dst.n_updates==0
        if split:
            state = dst.state_dict()
            dst.remove()
            dst = engine(m, opt, 40, **{**RigL_presets, 'batches_per_update':4})
            dst.load_state_dict(state)
        go(m, opt, 5, 6)
        assert dst.n_updates==1
        return m
    assert same_masks(masks_of(run(False)), masks_of(run(True)))

def test_state_of_another_model():
    "Law 10: an engine state of another model is refused and nothing is taken over"
    m,opt,dst = start('RigL', 'SGD')
    go(m, opt, 0, 9)
    other,_,_ = _two_layers(.5)
    e = engine(other, torch.optim.SGD(other.parameters(), lr=.1))
    before = e.state_dict()
    with pytest.raises(ValueError, match='state'): e.load_state_dict(dst.state_dict())
    assert e.state_dict()==before

def test_engine_is_given_back():
    "No global keeps an engine, its model or its optimizer alive"
    m,hooks,(xb,yb) = _two_layers(.5)
    opt = torch.optim.Adam(m.parameters(), lr=.1)
    dst = engine(m, opt)
    train(m, opt, 5, xb, yb)
    refs = [weakref.ref(o) for o in (m, opt, dst, m[0].weight, m[0].weight_mask)]
    del m,opt,dst,hooks
    gc.collect()
    assert [r() for r in refs]==[None]*len(refs)

# --- law 8

def _set_run(dtype, noise):
    m = mlp((10,10,3)).to(dtype)
    with torch.no_grad():
        for i,p in enumerate(m.parameters()): p.copy_(torch.arange(1, p.numel()+1).reshape(p.shape)/256*(-1)**i)
    sparsify_model(m, .5, seed=7)
    opt = torch.optim.SGD(m.parameters(), lr=0.)
    dst = engine(m, opt, **{**SET_presets, 'seed':7})
    for i in range(12):
        if noise:
            torch.manual_seed(i+noise)
            torch.randn(i+1)
        step(dst, *[torch.ones_like(o.p) for o in masked_params(m)])
    assert dst.n_updates==5
    return masks_of(m)

def test_same_seed_same_masks():
    "Law 8: updates draw the same whatever else draws, and for a float32, float16, bfloat16 and float64 model"
    ref = _set_run(torch.float, 0)
    for dtype,noise in ((torch.float,3),(torch.half,0),(torch.bfloat16,5),(torch.double,0)): assert same_masks(ref, _set_run(dtype, noise))

def test_updates_and_parameters_draw_apart():
    "Two layers of one shape, and two updates, don't draw the same"
    m = nn.Sequential(nn.Linear(20,20), nn.Linear(20,20))
    seen = []
    def score(p, generator):
        seen.append(random_score(p, generator=generator))
        return seen[-1]
    sparsify_model(m, .5, seed=0)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=0.), grow_score_f=score)
    for _ in range(5): step(dst, torch.ones(20,20), torch.ones(20,20))
    assert len(seen)==4 and len({tuple(s.view(-1).tolist()) for s in seen})==4
    assert not torch.equal(m[0].weight_mask, m[1].weight_mask)

def ddp_worker(rank, folder):
    "One of two ranks: masks agree without a seed, stay out of the broadcast, and move alike"
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/init', rank=rank, world_size=2)
    out = {}
    for method,presets in dict(SET=SET_presets, RigL=RigL_presets, SNFS=SNFS_presets).items():
        m = mlp((6,12,9,3), seed=4, dtype=torch.double)
        torch.manual_seed(1000+rank)
        torch.rand(rank+1)
        sparsify_model(m, .6)
        ddp = DDP(m)
        m[0].weight_mask.logical_not_()
        ddp(data(m)[0])
        held = int(m[0].weight_mask.sum())
        if rank==1: m[0].weight_mask[0].logical_not_()
        mine = m[0].weight_mask.clone()
        ddp(data(m)[0])
        assert torch.equal(mine, m[0].weight_mask), 'the mask was broadcast'
        if rank==1: m[0].weight_mask[0].logical_not_()
        assert int(m[0].weight_mask.sum())==held
        opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
        dst = engine(ddp if method=='SET' else m, opt, 40, **{**presets, 'batches_per_update':4, 'seed':None})
        first = {k:v.clone() for k,v in m.state_dict().items()}
        for t in range(30):
            opt.zero_grad()
            xb,yb = data(m, 32, seed=t)
            backward(ddp, xb[rank::2], yb[rank::2])
            opt.step()
            assert_dead(m, opt, state=method!='SNFS')
        out[method] = dict(first=first, last=m.state_dict(), seed=dst.seed, n_updates=dst.n_updates)
        dst.remove()
    torch.save(out, f'{folder}/{rank}.pt')
    dist.destroy_process_group()

def test_two_ranks(tmp_path):
    "Law 8 on two gloo processes whose generators differ: equal masks and weights, masks out of DDP's broadcast, and the run of one process with the whole batch"
    torch.multiprocessing.spawn(ddp_worker, (str(tmp_path),), nprocs=2)
    a,b = [torch.load(tmp_path/f'{r}.pt') for r in (0,1)]
    for method,presets in dict(SET=SET_presets, RigL=RigL_presets, SNFS=SNFS_presets).items():
        x,y = a[method],b[method]
        assert x['seed']==y['seed'] and x['n_updates']==y['n_updates']>=5
        for part in ('first','last'): assert all(torch.equal(v, y[part][k]) for k,v in x[part].items()), method
        m = mlp((6,12,9,3), dtype=torch.double)
        sparsify_model(m, .6, seed=0)
        m.load_state_dict(x['first'])
        opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
        engine(m, opt, 40, **{**presets, 'batches_per_update':4, 'seed':x['seed']})
        for t in range(30):
            opt.zero_grad()
            backward(m, *data(m, 32, seed=t))
            opt.step()
        assert all(torch.equal(v, m.state_dict()[k]) if v.dtype==torch.bool else torch.allclose(v, m.state_dict()[k], atol=1e-8) for k,v in x['last'].items()), method

@pytest.mark.parametrize('method', going)
def test_accumulated_and_overflowing(method):
    "Every kind of run: two halves accumulated are one batch; where a gradient overflows the scaler skips, nothing moves and stays finite, and the update comes at the next step"
    made = []
    for halves in (1,2):
        m,opt,dst = start(method, 'SGD', dtype=torch.double)
        dst.seed = 7
        for t in range(20):
            xb,yb = data(m, seed=t)
            opt.zero_grad()
            for x,y in zip(xb.chunk(halves), yb.chunk(halves)): backward(m, x, y, 1/halves)
            opt.step()
        made.append((dst.n_updates, masks_of(m)))
    assert made[0][0]==made[1][0]>=2 and same_masks(made[0][1], made[1][1])
    m,opt,dst = start(method, 'SGD')
    scaler,done = torch.amp.GradScaler('cpu', init_scale=64., growth_interval=1000),0
    for t in range(24):
        opt.zero_grad()
        scaler.scale(nn.functional.mse_loss(m(data(m, seed=t)[0]), data(m, seed=t)[1])).backward()
        spoilt,before = t in (4,8,9,12,13),(dst.n_updates, masks_of(m))
        if spoilt: m[2].weight.grad[m[2].weight_mask] = math.inf
        scaler.step(opt)
        scaler.update()
        if spoilt: assert dst.n_updates==before[0] and same_masks(masks_of(m), before[1])
        done += not spoilt and dst.n_updates>before[0]
        assert all(p.isfinite().all() for p in m.parameters())
        assert_dead(m, opt, state=not any(o.dense_history for o in dst.methods))
    assert done>=2 and scaler.get_scale()==2.

# --- structures, with everything else

structures = {'2:4':24, 'block 2x2':4, 'fan-in':12, 'fan-in ablate 0.3':12, 'kernels':1, 'output channels':12, 'input channels':12, 'output groups 2':2,
    'input groups 4':4, 'transposable 2:4':24}  # the largest step between counts, of layers of 12x8, 8x12 and 4x8

@pytest.mark.parametrize('share', [momentum_redistribution, lambda p, step: 1.+7*(p.shape[0]==(8,12,4)[step%3])])
@pytest.mark.parametrize('text', structures)
def test_redistribution_under_a_structure(text, share):
    "Law 1: masks stay legal and the total is what it was, to less than a layer's step, however many updates round each layer (it drifted from 112 to 68)"
    m = mlp((8,12,8,4), seed=1)
    sparsify_model(m, .5, seed=0, structure=text)
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = DynamicSparseTraining(m, opt, 40, seed=0, structure=text, updates=FreqSchedule(2, start=2), drop_fraction=.3, redistribute_f=share)
    assert sum(s.live for s in dst.slots)==112
    moved = set()
    for t in range(40):
        train(m, opt, 1, *data(m, seed=t))
        assert all(as_structure(text).legal(o.mask) for o in masked_params(m))
        assert_dead(m, opt, state=not dst.methods[0].dense_history)
        assert abs(sum(s.live for s in dst.slots)-112)<structures[text]
        moved.add(tuple(s.live for s in dst.slots))
    assert dst.n_updates>=15 and (len(moved)>1 or '2:4' in text)

@pytest.mark.parametrize('start', [0.,.5])
@pytest.mark.parametrize('text', structures)
def test_grow_none_under_a_structure(text, start):
    "An update without growth leaves the legal count next to what it would keep (it raised), never fewer than the structure has; without a change there is no update"
    m = mlp((8,12,8,4), seed=1)
    sparsify_model(m, start, seed=0, structure=text)
    opt = torch.optim.SGD(m.parameters(), lr=.05)
    dst = DynamicSparseTraining(m, opt, 30, seed=0, structure=text, updates=FreqSchedule(2, start=2), drop_fraction=.3, grow_score_f=None)
    s,live,changes = as_structure(text),[o.live for o in dst.slots],0
    for t in range(12):
        train(m, opt, 1, *data(m))
        if t>1 and t%2==0:
            before,live = live,[min(n, s.count(o.p.shape, max(n-int(.3*n), o.n//2*(':' in text)))) for o,n in zip(dst.slots, live)]
            changes += live!=before
        assert [o.live for o in dst.slots]==live==[int(o.mask.sum()) for o in dst.slots] and all(s.legal(o.mask) for o in dst.slots)
    assert dst.n_updates==changes and (changes>=2 or ':' in text and start)

@pytest.mark.parametrize('text,bad', [('2:4',.6),('2:4',.25),('transposable 2:4',.75),('1:4',.5)])
def test_final_sparsity_of_a_structure(text, bad):
    "One rule everywhere: what `sparsify_model` refuses, the engine refuses for a dense model (.6 became .5, and .25 three of four), a number, a path or a schedule; nothing has changed then"
    fits = as_structure(text).sparsity
    for kw in (dict(sparsity=bad), dict(sparsity=bad, sparsity_path=cubic_path()), dict(sparsity=PiecewiseSchedule((0.,bad), (.5,))), dict(sparsity=[0.,bad])):
        m = mlp((8,12,8,4), seed=1)
        opt = torch.optim.SGD(m.parameters(), lr=.05)
        with pytest.raises(ValueError) as said: sparsify_model(m, bad, structure=text)
        with pytest.raises(ValueError, match=re.escape(f'has a sparsity of {fits}')) as says: engine(m, opt, 60, 5, structure=text, **kw)
        assert str(said.value)==str(says.value) and not masked_params(m)
        dst = engine(m, opt, 60, 5, structure=text, **{**kw, 'sparsity':{float:fits, list:[0.,fits]}.get(type(kw['sparsity']), PiecewiseSchedule((0.,fits), (.5,)))})
        assert all(as_structure(text).legal(o.mask) for o in masked_params(m))

def test_kernels_meet_a_budget_that_can_be_met():
    "By hand: kernels of nine and a linear layer that is full: 135+288+25 is 448, and two weights short (446) is one kernel more and seven single weights less"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(4,8,3), nn.ReLU(), nn.Conv2d(8,8,3), nn.Flatten(), nn.Linear(8,4))
    sparsify_model(m, .5, seed=0, structure='kernels')
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = engine(m, opt, 60, 4, structure='kernels', redistribute_f=momentum_redistribution, grow_score_f=gradient_momentum)
    start = sum(s.live for s in dst.slots)
    for t in range(30):
        opt.zero_grad()
        m(torch.randn(16,4,5,5)).square().mean().backward()
        opt.step()
        assert sum(s.live for s in dst.slots)==start==448
        assert all(Kernels().legal(o.mask) for o in masked_params(m))
    assert dst.n_updates>=5

class Bare(SparseParam):
    "A slot of a parameter without a model"
    o = property(lambda self: self._o)
    p = property(lambda self: self._o.p)
    def __init__(self, o, i): self._o,self.n,self.method = o,o.p.numel(),Method(10, structure='kernels')

@given(st.lists(st.sampled_from([(4,3,3,3),(3,2,5,5),(2,2,1,1),(6,4),(9,3),(4,4,2)]), min_size=1, max_size=5), st.data())
@settings(max_examples=40, deadline=None)
def test_counts_are_exact_where_single_weights_have_room(shapes, data):
    "Counts are legal; the total is exact if layers that count in single weights could give or take the largest step, and never farther off than by rounding each layer alone"
    ps = [torch.empty(o) for o in shapes]
    slots = [Bare(ParamRef(str(i), None, '', p, None), i) for i,p in enumerate(ps)]
    wanted = [data.draw(st.integers(0, p.numel())) for p in ps]
    steps = [math.prod(o[2:]) for o in shapes]
    counts = fastsparse.masks.apportion.legal_counts(slots, wanted)
    assert all(0<=c<=p.numel() and c%d==0 for c,p,d in zip(counts, ps, steps))
    off,alone = abs(sum(counts)-sum(wanted)),abs(sum(d*math.ceil(w/d-.5) for w,d in zip(wanted, steps))-sum(wanted))
    assert off<=alone
    up,down = [sum(o for o,d in zip(os, steps) if d==1) for os in ([p.numel()-w for p,w in zip(ps, wanted)], wanted)]
    if max(up, down)>=2*sum(steps): assert not off

def test_momentum_at_the_first_step():
    "An update due at step 0 finds no momentum in any parameter yet: it is left out, and the error about optimizers without momentum comes only where there is none"
    m,_,(xb,yb) = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, 20, updates=FreqSchedule(3), drop_fraction=.5, grow_score_f=gradient_momentum)
    train(m, opt, 1, xb, yb)
    assert dst.n_updates==0
    train(m, opt, 3, xb, yb)
    assert dst.n_updates==1
    m,_,(xb,yb) = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    engine(m, opt, 20, updates=FreqSchedule(3), drop_fraction=.5, grow_score_f=gradient_momentum)
    with pytest.raises(ValueError, match='keeps no average'): train(m, opt, 4, xb, yb)

def test_start_functions_take_what_they_name():
    "`grow_init_f` that names `initial` gets the values before masks were made; a tensor of another shape is refused with nothing changed"
    m = mlp((8,12,4))
    first = [o.p.detach().clone() for o in candidates(m)]
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt, 20, sparsity=.5, updates=[2], drop_fraction=.5, grow_init_f=lambda p, initial: initial)
    train(m, opt, 2, *data(m))
    before = masks_of(m)
    train(m, opt, 1, *data(m))
    for o,old,w in zip(masked_params(m), before, first):
        new = o.mask & ~old
        assert new.any() and torch.equal(o.p[new], w[new])
    m = mlp((8,12,4))
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    engine(m, opt, 20, sparsity=.5, updates=[2], drop_fraction=.5, grow_init_f=lambda p, name: torch.zeros(3) if name=='2.weight' else p.detach())
    train(m, opt, 2, *data(m))
    before = {k:v.clone() for k,v in m.state_dict().items()}
    with pytest.raises(ValueError, match='a start for 2.weight has shape'): train(m, opt, 1, *data(m))
    assert all(torch.equal(v, before[k]) for k,v in m.state_dict().items())

def test_a_path_below_zero_ends_dense():
    "Fractions are clamped after the schedule: a line through 0 is followed, and the model is dense from there on"
    m = mlp((8,12,4))
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt, 30, sparsity=lambda t: .9-.1*t, updates=FreqSchedule(3), drop_fraction=.1, replace_step=False)
    train(m, opt, 15, *data(m))
    assert all(o.mask.all() for o in masked_params(m)) and dst.methods[0].sparsity_at(20)==0

def test_sparse_modules_may_be_one():
    "A module instead of a list; what is no module, or no function, is refused"
    m,*_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    with pytest.raises(AttributeError, match='modules'): engine(m, opt, 20, sparse_modules=['0'], batches_per_update=4)
    with pytest.raises(ValueError, match='on_update holds 3'): engine(m, opt, 20, on_update=[3], batches_per_update=4)
    assert len(engine(m, opt, 20, sparse_modules=m[0], batches_per_update=4).slots)==1

# --- anything goes

@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1,9), min_size=2, max_size=4), s=st.floats(0,.95), end=st.none()|st.floats(0,.95), f=st.floats(0,1), seed=st.integers(0,50),
    keep=st.sampled_from([weight_magnitude, random_score]), grow=st.sampled_from([gradient_magnitude, random_score, gradient_momentum, None]),
    share=st.sampled_from([None, momentum_redistribution, lambda p: 1., lambda p, n: float(n)]), replace=st.booleans(), opt=st.sampled_from(['SGD','Adam','Adamax']))
def test_invariants(sizes, s, end, f, seed, keep, grow, share, replace, opt):
    "Any settings: the model's count is constant, or exactly the new target, or falling where nothing grows; dead is dead after every step"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        m = mlp(sizes, seed)
        sparsify_model(m, s, seed=seed)
        total = lambda: sum(int(o.mask.sum()) for o in masked_params(m))
        n,live = sum(o.p.numel() for o in masked_params(m)),total()
        opt = getattr(torch.optim, opt)(m.parameters(), lr=.01, **(dict(momentum=.9) if opt=='SGD' else {}))
        settings = dict(keep_score_f=keep, grow_score_f=grow, redistribute_f=share, sparsity=end, initial_drop_grow_pct=f, replace_step=replace, stop_pct=1.)
        dst = engine(m, opt, 20, **settings)
        xb,yb = data(m)
        for t in range(8):
            before = masks_of(m)
            train(m, opt, 1, xb, yb)
            assert_dead(m, opt, state=not dst.methods[0].dense_history)
            assert all(int(o.mask.sum())==slot.live==slot.target or end is not None and t<2 or grow is None for o,slot in zip(masked_params(m), dst.all))
            if t<2: assert total()==live
            elif grow is None: assert not any((b & ~a).any() for a,b in zip(before, masks_of(m)))
            else: assert total()==(live if end is None else round((1-end)*n))

def test_compiled_training():
    "ParamRef training of a compiled model: one graph without a break, compiled once while the topology moves, and equal to the eager one bit for bit"
    from torch._dynamo.testing import CompileCounter
    xb,yb = torch.randn(8, 16),torch.randn(8, 4)
    res,counter = [],CompileCounter()
    for compiled in (False,True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,4))
        sparsify_model(model, .8, seed=0)
        opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
        run = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
        dst = DynamicSparseTraining(model, opt, 40, **{**RigL_presets, 'batches_per_update':5}, seed=0)
        for _ in range(30):
            nn.functional.mse_loss(run(xb), yb).backward()
            opt.step()
            opt.zero_grad()
        assert dst.n_updates==5
        res.append(model.state_dict())
    assert counter.frame_count==1
    assert all(a.equal(b) for a,b in zip(*[o.values() for o in res]))

@pytest.mark.parametrize('opt_f', [torch.optim.Adam, torch.optim.SGD])
def test_dead_weights_stay_dead_where_a_step_follows_a_drop(opt_f):
    "The optimizer was told before the update, and what was dropped has a gradient"
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    sparsify_model(model, .2, seed=0)
    opt = opt_f(model.parameters(), lr=.1)
    dst = DynamicSparseTraining(model, opt, 12, grow_score_f=None, sparsity=.8, replace_step=False, batches_per_update=3, seed=0)
    for _ in range(12):
        opt.zero_grad()
        model(torch.randn(4, 6)).pow(2).sum().backward()
        dst.step()
        for p,mask,_ in sparse_params(model): assert not p[~mask].any()

def test_state_of_dead_weights_is_gone_once_the_engine_is():
    "A method that reads the momentum of dead weights leaves none behind, nor a gradient, when its engine lets go"
    torch.manual_seed(0)
    model = mlp((6,8,4))
    sparsify_model(model, .5, seed=0)
    opt = torch.optim.Adam(model.parameters(), .1)
    engine = DynamicSparseTraining(model, opt, 10, **SNFS_presets(batches_per_update=3))
    model(torch.randn(4,6)).square().sum().backward()
    opt.step()
    dead = ~model[0].weight_mask
    assert opt.state[model[0].weight]['exp_avg'][dead].any(), 'the method needs it'
    engine.remove()
    state = opt.state_dict()['state'][0]
    for t in (model[0].weight, model[0].weight.grad, *[v for v in state.values() if v.ndim]): assert not t[dead].any()
    assert state['exp_avg'][~dead].any(), 'live weights keep theirs'

def test_the_length_of_a_run_costs_nothing():
    "An engine doesn't count the updates of a run one by one: it starts at once, however long the run"
    model = mlp((6,8,4))
    sparsify_model(model, .5, seed=0)
    DynamicSparseTraining(model, torch.optim.SGD(model.parameters(), .1), 10**15, batches_per_update=5).remove()

def test_parts_of_a_weight_are_scored_as_the_whole():
    "A handler that gives some rows at a time gets the score of all rows, and the one that is asked for a vector of places the score there"
    from types import SimpleNamespace
    w = nn.Parameter(torch.randn(5, 4))
    mask = torch.rand(5, 4)<.5
    handler = SimpleNamespace(mask=mask, p=w, trained=w, parts=lambda with_grad: ((slice(i, i+2), nn.Parameter(w.detach()[i:i+2])) for i in (0,2,4)),
        weights_at=lambda at, with_grad: w.detach().flatten()[at])
    slot = SimpleNamespace(o=ParamRef('w', nn.Linear(4, 5), 'weight', w, mask), handler=handler, shape=w.shape,
        initial=None, structure=None, grad_accumulators={}, method=SimpleNamespace(n_updates=0, keep_score_f=weight_magnitude))
    scorer = Scorer(weight_magnitude, slot)
    assert scorer().equal(w.detach().abs()) and scorer.at(torch.tensor([3,11])).equal(w.detach().abs().flatten()[[3,11]])

def test_an_update_waits_where_a_scaler_found_infinities():
    "A fused optimizer that was told of infinite gradients gets no update of the topology, one that was told of none does"
    for found in (0.,1.):
        m = mlp()
        sparsify_model(m, .5, seed=0)
        opt = torch.optim.SGD(m.parameters(), lr=.1)
        engine = SparseEngine(m, opt, 10, batches_per_update=2, grow_score_f=random_score, seed=0)
        opt.found_inf = torch.tensor(found)
        for t in range(4):
            engine.prepare(t)
            backward(m, *data(m))
            engine.before_step(t)
            opt.zero_grad()
        assert engine.n_updates==(0 if found else 1)

# --- what can't move, and says so

@pytest.mark.parametrize('structure,live,moves', [(None,3,False), (None,4,True), ('block 2x2',12,False), ('block 2x2',16,True), ('2:4',32,True), ('fan-in',8,True), ('output groups 4',12,False), ('output groups 4',16,True),
    ('block 3x3 pad',6,False), ('transposable 2:4',32,True)])
def test_an_update_moves_a_unit_or_is_none(structure, live, moves):
    "floor(.3*live) weights must be a whole unit, or one in each group; else no step is replaced for nothing, and the summary says why"
    m = nn.Sequential(nn.Linear(8,8))
    sparsify_model(m, 1-live/64, seed=0, structure=structure)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        engine = DynamicSparseTraining(m, opt, 100, batches_per_update=2, initial_drop_grow_pct=.3, structure=structure, seed=0)
    note = sparse_summary(m).df.note[0]
    assert ("can't move: an update drops 0.3 of" in note)!=moves
    seen,before = set(),m[0].weight.detach().clone()
    for _ in range(40):
        opt.zero_grad()
        m(torch.randn(4,8)).square().sum().backward()
        opt.step()
        seen.add(tuple(m[0].weight_mask.flatten().tolist()))
    assert (engine.n_updates>0)==(len(seen)>1)==moves and not torch.equal(before, m[0].weight)
    engine.remove()
    assert "can't move" not in sparse_summary(m).df.note[0]

def test_what_can_not_move_by_choice_has_no_note():
    "A mask that is to stay, a schedule of sparsities, growth by shares, a dense layer"
    for settings in (dict(method='static'), dict(method='gmp', sparsity=.97, batches_per_update=5), dict(method='snfs', batches_per_update=5)):
        m = nn.Sequential(nn.Linear(8,8), nn.Linear(8,1))
        if 'sparsity' not in settings: sparsify_model(m, .95, seed=0)
        SparseEngine(m, torch.optim.SGD(m.parameters(), lr=.1, momentum=.9), 100, seed=0, **settings)
        assert not any("can't move" in o for o in sparse_summary(m).df.note)

@pytest.mark.parametrize('eps', [0,1e-8])
@pytest.mark.parametrize('opt', [torch.optim.Adam, torch.optim.RMSprop])
def test_weights_that_are_lost_are_told_of_once(opt, eps):
    "eps=0 divides 0 by 0 where a live weight gets no gradient, as behind a unit without live outputs: said once, at the first update that can't be done"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(20,64), nn.Tanh(), nn.Linear(64,4))
    sparsify_model(m, .9, seed=0)
    opt = opt(m.parameters(), lr=1e-3, eps=eps)
    engine = DynamicSparseTraining(m, opt, 60, method='rigl', batches_per_update=3, seed=0)
    x = torch.randn(64,20)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for _ in range(60):
            opt.zero_grad()
            nn.functional.cross_entropy(m(x), torch.arange(64)%4).backward()
            opt.step()
    said = [str(w.message) for w in told if "can't move any more" in str(w.message)]
    assert (len(said)==1 and '0.weight holds values' in said[0] and 'pass eps=1e-8' in said[0] and not engine.n_updates) if not eps else engine.n_updates>10 and not said

class Branches(nn.Module):
    "`b` takes part as long as it is `used`"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.head,self.used = nn.Linear(16,32),nn.Linear(16,32),nn.Linear(32,4),True
    def forward(self, x): return self.head((self.a(x)+(self.b(x) if self.used else 0)).relu())

# --- copies of a run, and engines whose steps never come (law 10)

def _pickled(o): return pickle.loads(pickle.dumps(o))

@pytest.mark.parametrize('copied', [copy.deepcopy,_pickled], ids=['deepcopy','pickle'])
@pytest.mark.parametrize('run', runs, ids='-'.join)
def test_copies_train_as_the_original(run, copied):
    "Law 6: copies of model, optimizer and engine, made before the first step and in mid-run, make the same steps bit for bit, and stay apart"
    whole = start(*run)
    early = copied(whole)
    go(*whole[:2], 0, 17)
    late = copied(whole)
    go(*whole[:2], 17, 30)
    go(*late[:2], 17, 30)
    go(*early[:2], 0, 30)
    states = [[o.state_dict() for o in k] for k in (whole, late, early)]
    assert whole[2].n_updates>2 and agree(*states[:2]) and agree(states[0], states[2])
    assert late[2].model is late[0] and late[2].opt is late[1] and not {id(p) for p in whole[0].parameters()} & {id(p) for p in late[0].parameters()}

def test_copy_of_an_engine_alone():
    "A copied engine brings copies of its model and its optimizer, and its `remove()` leaves the original attached"
    m,opt,dst = start('RigL', 'Adam')
    go(m, opt, 0, 6)
    new = copy.deepcopy(dst)
    go(new.model, new.opt, 6, 12)
    new.remove()
    go(m, opt, 6, 12)
    assert agree(new.model.state_dict(), m.state_dict()) and new.n_updates==dst.n_updates==2
    go(new.model, new.opt, 12, 20)
    go(m, opt, 12, 20)
    assert new.n_updates==2 and dst.n_updates==4
    assert_dead(new.model, new.opt)

def test_copies_of_live_weights_train_as_the_original():
    "The same where only live values are stored"
    m,opt,dst = start('RigL', 'Adam')
    sparse_compute(m, data(m)[0], opt, plan=dict.fromkeys([o.name for o in masked_params(m)], 'rows'))
    go(m, opt, 0, 9)
    m2,opt2,dst2 = copy.deepcopy((m, opt, dst))
    go(m, opt, 9, 20)
    go(m2, opt2, 9, 20)
    assert agree(m.state_dict(), m2.state_dict()) and agree(dst.state_dict(), dst2.state_dict()) and dst2.n_updates>=4

def test_a_function_without_a_name_in_a_module_is_not_pickled():
    "Python says which function it is"
    m,opt,dst = start('RigL', 'SGD')
    dst.on_update.append(lambda engine, t: None)
    with pytest.raises((pickle.PicklingError,AttributeError), match='lambda'): pickle.dumps((m, opt, dst))

class _SAM(torch.optim.Optimizer):
    "Sharpness-aware minimisation as people write it: two half steps, of which the second calls the `step()` of an optimizer inside"
    def __init__(self, params, rho=.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]['params']:
            self.state[p]['was'] = p.detach().clone()
            p.add_(p.grad, alpha=.05)

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]['params']: p.copy_(self.state[p]['was'])
        self.base_optimizer.step()

def _by_sam(m, opt, n):
    for t in range(n):
        backward(m, *data(m, seed=t))
        opt.first_step()
        opt.zero_grad()
        backward(m, *data(m, seed=t))
        opt.second_step()
        opt.zero_grad()

def _by_hand(m, n):
    for t in range(n):
        m.zero_grad()
        backward(m, *data(m, seed=t))
        for p in m.parameters(): p.data.sub_(p.grad, alpha=.1)

def _unseen(caught): return [str(w.message) for w in caught if 'has not seen' in str(w.message)]

@pytest.mark.parametrize('way', ['new optimizer','fastai','SAM','by hand','live'])
def test_steps_that_are_never_seen(way):
    "Law 10: gradients arrive and weights change, but the optimizer of the engine never steps: one warning that names optimizer, weight and the way out"
    from fastai.optimizer import SGD
    m,_,_ = _two_layers(.5)
    opt = _SAM(m.parameters(), lr=.1) if way=='SAM' else torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt)
    if way=='live': sparse_compute(m, data(m)[0], opt, plan=dict.fromkeys([o.name for o in masked_params(m)], 'rows'))
    if way!='SAM': go(m, opt, 0, 4)
    done = dst.n_updates
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        if way=='SAM': _by_sam(m, opt, 8)
        elif way=='by hand': _by_hand(m, 8)
        else: go(m, SGD(list(m.parameters()), lr=.1) if way=='fastai' else torch.optim.Adam(m.parameters(), lr=.1), 0, 8)
    assert dst.n_updates==done
    found = _unseen(caught)
    assert len(found)==1 and type(opt).__name__ in found[0] and '.weight' in found[0] and 'remove()' in found[0]

def test_steps_of_the_optimizer_inside_are_seen():
    "An engine on the optimizer inside a wrapper sees each step, and updates"
    m,_,_ = _two_layers(.5)
    opt = _SAM(m.parameters(), lr=.1)
    dst = engine(m, opt.base_optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        _by_sam(m, opt, 8)
    assert dst.n_updates==3 and not _unseen(caught)

def test_no_warning_where_steps_are_seen():
    "Accumulation, a skipped scaler step, a second engine that has taken over, and gradients that nothing follows: no warning"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for t in range(40): backward(m, *data(m, seed=t))
        opt.step()
        for t in range(40): backward(m, *data(m, seed=t))
        new = torch.optim.SGD(m.parameters(), lr=.1)
        other = engine(m, new)
        go(m, new, 0, 10)
    assert not _unseen(caught) and other.n_updates>2 and dst.n_updates==0

def _new_parameter(m, opt): m[0].weight = nn.Parameter(m[0].weight.detach().clone())
def _other_groups(m, opt): opt.param_groups[0]['params'] = [p for p in m.parameters() if p is not m[0].weight]
def _sparse_layer(m, opt):
    m[0] = nn.Linear(10, 10)
    sparsify_parameter(m, '0.weight', .5, seed=0)
    opt.add_param_group(dict(params=list(m[0].parameters())))

@pytest.mark.parametrize('change', [_new_parameter,_other_groups,_sparse_layer])
def test_a_weight_that_left_is_named_once(change):
    "A weight that the optimizer or the model no longer holds: one warning at the next update, which names it and the way out"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    engine(m, opt)
    go(m, opt, 0, 3)
    change(m, opt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        go(m, opt, 3, 12)
    found = [str(w.message) for w in caught if 'no longer' in str(w.message)]
    assert len(found)==1 and found[0].startswith('0.weight') and 'remove()' in found[0]

def test_a_dense_layer_in_place_of_a_sparse_one_is_named_once():
    "A layer that is replaced after the engine was made trains dense, and one warning says so"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = engine(m, opt)
    go(m, opt, 0, 3)
    m[0] = nn.Linear(10, 10)
    opt.add_param_group(dict(params=list(m[0].parameters())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        go(m, opt, 3, 12)
    found = [str(w.message) for w in caught if '0.weight' in str(w.message)]
    assert len(found)==1 and 'is dense now' in found[0] and dst.n_updates>=4

@pytest.mark.parametrize('pick', [lambda i: i%2, lambda i: int(i%3>0), lambda i: i//5%2], ids=['in turn','two of three','in blocks'])
@pytest.mark.parametrize('method', ['rigl','set'])
def test_an_update_reaches_the_state_of_each_optimizer(method, pick):
    "A second one that steps the same weights brings none back, and remembers nothing of those that died or grew"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4))
    sparsify_model(m, .8, seed=0, sparse_init_mode=None)
    opts = torch.optim.Adam(m.parameters(), lr=.01),torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    engine = DynamicSparseTraining(m, opts[0], 60, method=method, batches_per_update=3, seed=0)
    x,y = torch.randn(64, 20),torch.randn(64, 4)
    for i in range(40):
        (m(x)-y).square().mean().backward()
        opts[pick(i)].step()
        m.zero_grad()
        for o in masked_params(m): assert not o.p[~o.mask].any() and not opts[1].state[o.p].get('momentum_buffer', o.p)[~o.mask].any()
    assert engine.n_updates

# --- gradients of dead weights, where the step of their batch is made

_steps_made = dict(after=dict(update_after_step=True), kept=dict(replace_step=False),
    collected=dict(grow_score_f=MeanGradient(2), batches_per_update=4))

@pytest.mark.parametrize('kind', _steps_made)
@pytest.mark.parametrize('parts', [1, 2])
def test_clipping_sees_live_gradients_only(kind, parts):
    "Law 3: in each batch whose step is made, the gradient is that of live weights, and updates read all of it as it was before"
    def run(clip):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(12,16), nn.ReLU(), nn.Linear(16,4)).double()
        sparsify_model(m, .6, seed=0)
        opt = torch.optim.SGD(m.parameters(), lr=.05)
        DynamicSparseTraining(m, opt, n_steps=24, **{**dict(batches_per_update=3, stop_pct=1., seed=0), **_steps_made[kind]})
        xb,yb = data(m)
        norms,made,masks = [],[],[]
        for t in range(14):
            opt.zero_grad(set_to_none=t%2==0)
            for x,y in zip(xb.chunk(parts), yb.chunk(parts)): backward(m, x, y, 1/parts)
            live = [p.grad*m[int(n[0])].weight_mask if 'weight' in n else p.grad for n,p in m.named_parameters()]
            norm = torch.stack([g.norm() for g in live]).norm()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), .01) if clip else norm)
            if not clip:
                for p in m.parameters(): p.grad *= .01/norm
            before = m[0].bias.clone()
            opt.step()
            made.append(not m[0].bias.equal(before))
            assert_dead(m, opt)
            masks.append(masks_of(m))
        return torch.stack(norms),made,masks
    (seen,made,a),(live,_,b) = run(True),run(False)
    assert sum(made)>=11 and not same_masks(a[0], a[-1])
    torch.testing.assert_close(seen[made], live[made], rtol=1e-4, atol=0.)
    assert all(same_masks(o, p) for o,p in zip(a, b))

@pytest.mark.parametrize('kwargs', [{}, dict(replace_step=False), dict(grow_score_f=gradient_momentum, replace_step=False)],
    ids=['replaced','kept','history'])
def test_a_dropped_engine_leaves_gradients_masked(kwargs):
    "Law 3: who drops engine and optimizer just before an update, without remove(), goes on with masks alone"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(m, opt, n_steps=20, every=2, **kwargs)
    xb,yb = data(m)
    train(m, opt, 2, xb, yb)
    del dst,opt
    gc.collect()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    m.zero_grad()
    backward(m, xb, yb)
    assert all(is_positive_zero(o.p.grad[~o.mask]) for o in masked_params(m))
    opt.step()
    assert_dead(m, opt)

def test_a_dropped_engine_leaves_the_next_one_alone():
    "An engine that is gone, removed or not, takes nothing from one that was made after it"
    m,_,_ = _two_layers(.5)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    old = SparseEngine(m, opt, n_steps=20, batches_per_update=2, seed=0)
    new = SparseEngine(m, opt, n_steps=20, batches_per_update=2, seed=0)
    new.expect_update()
    del old
    gc.collect()
    backward(m, *data(m))
    assert all(o.p.grad[~o.mask].any() for o in masked_params(m)[:1])

def _clone(m, x): m.weight.grad = m.weight.grad.clone()
def _other(m, x): torch.autograd.grad(m(x*3).cos().sum(), [m.weight])
_between = dict(clone=_clone, other=_other, frozen=lambda m, x: None)

def _aside(change=None, freeze=()):
    "Masks after each step, weights that don't move, and what clipping would see"
    torch.manual_seed(0)
    m = nn.Linear(8, 4, bias=False).double()
    sparsify_model(m, .5, seed=0)
    opt,masks,dead = torch.optim.SGD(m.parameters(), lr=0.),[],[]
    DynamicSparseTraining(m, opt, n_steps=10, batches_per_update=2, stop_pct=1., seed=0, replace_step=False, initial_drop_grow_pct=.5)
    for t in range(8):
        m.requires_grad_(t not in freeze)
        x,y = torch.randn(6, 8).double().requires_grad_(),torch.randn(6, 4).double()
        opt.zero_grad()
        backward(m, x, y)
        if t not in freeze:
            if change: change(m, x)
            dead.append(bool(m.weight.grad[~m.weight_mask].any()))
        opt.step()
        masks.append(m.weight_mask.clone())
    return masks,dead

@pytest.mark.parametrize('name', _between)
def test_what_is_done_between_backward_and_step_leaves_growth_alone(name):
    "Growth goes by the gradient of the backward, whatever reads or copies it before the step, and no step sees it at dead places"
    freeze = (2,3) if name=='frozen' else ()
    (masks,dead),(want,_) = _aside(_between[name], freeze),_aside(None, freeze)
    assert same_masks(masks, want) and not same_masks(masks[:1], masks[-1:]) and not any(dead)

def test_a_gradient_that_was_made_by_hand_is_told_of():
    "Another tensor with other values between backward and step: growth goes by the backward's, and says so"
    with pytest.warns(UserWarning, match='replaced after its backward.*expect_update'):
        masks,_ = _aside(lambda m, x: setattr(m.weight, 'grad', torch.randn(4, 8).double()*m.weight_mask))
