"An update of the topology: what it drops and grows, how many, and that everything else is left alone"
import copy, fastai.optimizer as fo, math, numpy as np, pytest, torch
from fastsparse.all import *
from fastsparse.masks.apportion import regrow_counts
from fastsparse.masks.selection import keyed_generator
from fastsparse.masks.structures import Unstructured
from fastsparse.card.together import move_together
from fastsparse.card import together as moves
from fastsparse.special.distributions import global_sparsity
from fastsparse.train.moves import Score
from fastsparse.train.growth import fresh_value,reset_state
from fastsparse.weights.weight import Dense
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from reference import Reference
from torch import nn

inf,nan = math.inf,math.nan
state_opts = dict(SGD=dict(momentum=.9), Adam={}, AdamW={}, NAdam={}, RAdam={}, Adamax={}, RMSprop=dict(momentum=.9, centered=True), Adagrad={},
    Adadelta={}, ASGD={}, Rprop={}, Adafactor={})
vector = [4.,-.1,3.,.2,0.,0.,0.,0.],[True]*4+[False]*4,[1.,50.,1.,1.,9.,-7.,2.,3.]
half_at_2 = dict(n_steps=4, every=2, initial_drop_grow_pct=1., stop_pct=1.)  # the cosine is at half of 1 at t=2 of 4

# --- by hand (law 2)

@pytest.mark.parametrize('name', state_opts)
def test_rigl_vector(name):
    "With every optimizer: mask, weights, and state: kept for survivors and for the dropped that grew back, zero for the new and the dead"
    w,mask,grad = vector
    m,opt = by_hand(w, mask, None, getattr(torch.optim, name), lr=1e-30, **state_opts[name])
    dst = engine(m, opt, **half_at_2)
    for _ in range(2): step(dst, [1.,2.,3.,4.,5.,6.,7.,8.])
    before,weight = [t.clone() for t in states(opt, m.weight)],m.weight.detach().clone()
    others = {k:copy.deepcopy(v) for k,v in opt.state[m.weight].items() if not isinstance(v, torch.Tensor) or v.shape!=m.weight.shape}
    step(dst, grad)
    assert m.weight_mask.tolist()==[[True,True,True,False,True,False,False,False]]
    assert torch.allclose(m.weight, torch.tensor([[4.,-.1,3.,0.,0.,0.,0.,0.]]), atol=1e-5) and torch.equal(m.weight[0,:3], weight[0,:3])
    assert m.weight.grad is None or not m.weight.grad.any()
    for b,t in zip(before, states(opt, m.weight)): assert torch.equal(b[0,:3], t[0,:3]) and t[0,4]==0 and 0<=t[0,3:].min() and t[0,3:].max()<=1.2e-30
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(opt.state[m.weight][k])) for k,v in others.items())
    assert name=='Adafactor' or before

def score(*values): return lambda p: torch.tensor([values])

keeps,grows = torch.tensor([[True,False,False,True]+[False]*4]),torch.tensor([[False]*6+[True]*2])
w8,half = [4.,-3.,.1,2.,0.,0.,0.,0.],dict(initial_drop_grow_pct=.5)
to_five = dict(n_steps=10, updates=[2], drop_fraction=0., sparsity=1/6)
by_hands = {  # weights, how many of the first live, the gradient of the update, settings, which live afterwards
    'live zeros go before dead ones come, the lowest stays':([3.,0.,0.,2.,0.,0.], 4, [0.,0.,0.,0.,0.,1.], half, [0,1,3,5]),
    'ties grow at the lowest':(w8, 4, [0.]*8, half, [0,1,2,3]), 'what was dropped may grow back':(w8, 4, [9.,9.,9.,9.,0.,0.,0.,0.], half, [0,1,2,3]),
    'a kept one never grows':(w8, 4, [9.,9.,0.,9.,0.,0.,0.,-1.], half, [0,1,3,7]),
    'growth by magnitude':(w8, 4, [0.,0.,0.,0.,-1.,1.,-1.,1.], half, [0,1,3,4]), 'however small':(w8, 4, [0.]*5+[0.,-0.,1e-30], half, [0,1,3,7]),
    'no gradient at dead places':([2.,1.,3.,0.,0.,0.], 3, [1.,1.,1.,0.,0.,0.], {}, [0,1,2]),
    'more to grow than gradients':([2.,1.,3.,0.,0.,0.], 3, [0.]*6, to_five, [0,1,2,3,4]),
    'NaN never wins':([1.]*4+[0.]*4, 4, [0.]*8, dict(half, keep_score_f=score(nan,5.,-inf,7.,9.,9.,9.,9.),
        grow_score_f=lambda p: torch.where(p==0, torch.tensor([[9.,9.,9.,9.,nan,-inf,nan,0.]]), -9.)), [1,2,3,7]),
    'without growth, to a target':([5.,1.,4.,2.,3.,6.], 6, [0.]*6, dict(n_steps=100, grow_score_f=None, sparsity=.5), [0,2,5]),
    "2020's signed momentum picked kept weights":([4.,3.,2.,1.,0.,0.,0.,0.], 4, [-1.,-1.,-1.,-1.,-2.,-9.,-3.,-8.], dict(grow_score_f=gradient_momentum), [0,1,5,7]),
    'a score may be the mask':(vector[0], 4, [0.]*8, dict(keep_score_f=lambda p: keeps, grow_score_f=lambda p: grows), [0,3,6,7])}

@pytest.mark.parametrize('case', by_hands)
def test_by_hand(case):
    "Drop among the live, grow among what was not kept; ties to the lowest index, and the live that stay keep their values"
    w,n,grad,kwargs,expect = by_hands[case]
    m,opt = by_hand(w, [i<n for i in range(len(w))], None, torch.optim.SGD, lr=0., momentum=.9)
    dst = engine(m, opt, **{**half_at_2, **kwargs})
    for _ in range(3): step(dst, grad)
    assert m.weight_mask.view(-1).nonzero().view(-1).tolist()==expect
    assert torch.equal(m.weight[0], torch.tensor([v if i in expect else 0. for i,v in enumerate(w)]))

# --- beside the reference

def beside(method, every=3, seed=0):
    rng,shapes = np.random.default_rng(seed),((40,12),(5,40))
    ws,masks = [rng.normal(size=s)*.4 for s in shapes],[rng.random(s)<.25 for s in shapes]
    x,y = rng.normal(size=(30,12)),rng.normal(size=(30,5))
    m = nn.Sequential(nn.Linear(12,40, bias=False, dtype=torch.double), nn.Tanh(), nn.Linear(40,5, bias=False, dtype=torch.double))
    with torch.no_grad():
        for l,w in zip((m[0],m[2]), ws): l.weight.copy_(torch.from_numpy(w))
    sparsify_model(m, .5, mask_init={f'{i}.weight':torch.from_numpy(mask) for i,mask in zip((0,2), masks)})
    n_steps = every*125
    presets = {**dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)[method], 'batches_per_update':every, 'stop_pct':1.}
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    draw = lambda i,u: torch.rand(shapes[i], generator=keyed_generator(seed, i, u)).numpy()
    ref = Reference(method, ws, masks, x, y, n_steps, every, presets['initial_drop_grow_pct'], 1., .05, .9, draw)
    return m,opt,DynamicSparseTraining(m, opt, n_steps, seed=seed, **presets),ref,torch.from_numpy(x),torch.from_numpy(y)

@pytest.mark.parametrize('method', ['SET','SNFS','RigL'])
def test_reference(method):
    "A hundred updates beside an independent NumPy float64 reference: equal masks after each, weights and momentum to 1e-9"
    m,opt,dst,ref,x,y = beside(method)
    moved = 0
    for t in range(375):
        before = masks_of(m)
        train(m, opt, 1, x, y)
        ref.step()
        assert same_masks(masks_of(m), [torch.from_numpy(o) for o in ref.masks]), f'step {t}'
        moved += not same_masks(before, masks_of(m))
        for o,w,b in zip(masked_params(m), ref.ws, ref.bufs):
            assert np.allclose(o.p.detach().numpy(), w, atol=1e-9) and np.allclose(opt.state[o.p]['momentum_buffer'].numpy(), b, atol=1e-9)
    assert moved>80 and ref.n_updates==dst.n_updates>=100

# --- counts (law 1)

@pytest.mark.parametrize('start,end', [(.5,.9),(.9,.5),(.5,.5),(.5,0.),(0.,.8)])
def test_sparsity_moves_targets(start, end):
    "Every update leaves exactly the scheduled number, from above or below; equal targets change nothing; the buffers show what is there"
    m = mlp((9,11,7,3))
    sparsify_model(m, start, erdos_renyi_sparsity, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    first = masks_of(m)
    dst = engine(m, opt, sparsity=end, sparse_f=erdos_renyi_sparsity, initial_drop_grow_pct=.3 if start!=end else 0.)
    for steps in (2,1,6):
        spin(dst, steps)
        if steps<6: assert same_masks(first, masks_of(m))==(steps==2 or start==end)
        if steps!=2: assert sum(live(m))==round((1-end)*197)
    assert_dead(m, opt)
    for o,(_,mask,shown) in zip(dst.moving, sparse_params(m)):
        assert o.target==int(mask.sum())==o.live and np.float32(shown)==np.float32(1-o.live/mask.numel())

def test_a_sparsity_that_is_written_is_a_target():
    "`weight_sparsity.fill_(.5)` is met exactly; the engine shows the achieved sparsity afterwards"
    m,opt,_ = two_layers(.8, lr=.01)
    dst = engine(m, opt)
    for layer,s,steps,expect in ((0,.5,3,[50,20]), (2,.95,2,[50,5])):
        m[layer].weight_sparsity.fill_(s)
        spin(dst, steps)
        assert live(m)==expect and m[layer].weight_sparsity==torch.tensor(s)

@pytest.mark.parametrize('cast', [lambda m: m.half().float(), lambda m: m.double(), lambda m: m.bfloat16().float(), lambda m: m.to('cpu')])
def test_casts_are_not_writes(cast):
    "Law 5: `.half()` rounds the sparsity buffer; that is not a target somebody wrote (833 of 1001 would move)"
    m = nn.Linear(1001,1, bias=False)
    sparsify_model(m, .168, seed=0)
    cast(m)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=0.), initial_drop_grow_pct=.3)
    for _ in range(3): step(dst, torch.randn(1,1001))
    assert dst.n_updates==1 and live(m)==[round((1-.168)*1001)]

@settings(max_examples=35, deadline=None)
@given(sizes=st.lists(st.integers(1,9), min_size=2, max_size=4), s=st.floats(0,.95), end=st.none()|st.floats(0,.95), f=st.floats(0,1), seed=st.integers(0,50),
    keep=st.sampled_from([weight_magnitude, random_score]), grow=st.sampled_from([gradient_magnitude, random_score, gradient_momentum, None]),
    share=st.sampled_from([None, momentum_redistribution, lambda p: 1., lambda p, n: float(n)]), replace=st.booleans(),
    opt=st.sampled_from(['SGD','Adam','Adamax']), begin=st.sampled_from([None, .1, fresh_value]), old=st.booleans())
@pytest.mark.filterwarnings('ignore')
def test_invariants(sizes, s, end, f, seed, keep, grow, share, replace, opt, begin, old):
    "Any settings: the model's count is constant, or exactly the new target, or falling where nothing grows; dead is dead after every step"
    m = mlp(sizes, seed)
    sparsify_model(m, s, seed=seed)
    n,at_first = sum(o.mask.numel() for o in masked_params(m)),sum(live(m))
    settings = dict(grow_init_f=begin, grow_state_f=reset_state if old else None)
    opt = getattr(torch.optim, opt)(m.parameters(), lr=.01, **(dict(momentum=.9) if opt=='SGD' else {}))
    settings |= dict(keep_score_f=keep, grow_score_f=grow, redistribute_f=share, sparsity=end, initial_drop_grow_pct=f, replace_step=replace, stop_pct=1.)
    dst = engine(m, opt, 20, **settings)
    for t in range(8):
        before = masks_of(m)
        spin(dst, 1)
        assert_dead(m, opt, state=grow is not gradient_momentum and share is not momentum_redistribution)
        assert all(p.isfinite().all() for p in m.parameters())
        assert all(k==o.live==o.target or end is not None and t<2 or grow is None for k,o in zip(live(m), dst.moving))
        if t<2: assert sum(live(m))==at_first
        elif grow is None: assert not any((b & ~a).any() for a,b in zip(before, masks_of(m)))
        else: assert sum(live(m))==(at_first if end is None else round((1-end)*n))

# --- redistribution

@pytest.mark.parametrize('shares,total,room,expect', [
    ([1.,1.], 4, [9,9], [2,2]), ([3.,1.], 4, [9,9], [3,1]), ([3.,1.], 4, [2,9], [2,2]), ([1.,0.], 4, [9,9], [4,0]),
    ([1.,0.], 4, [3,9], [3,1]), ([0.,0.], 4, [3,9], [1,3]), ([5.,1.,1.], 7, [1,9,9], [1,3,3]), ([1.,1.,1.], 2, [5,5,5], [1,1,0]),
    ([1.,2.], 0, [5,5], [0,0]), ([1e30,1.], 5, [9,9], [5,0]), ([1.,1.], 10, [5,5], [5,5]), ([1e-30,1e-30], 3, [9,9], [2,1]), ([1.,1.], 3, [0,9], [0,3])])
def test_regrow_counts_by_hand(shares, total, room, expect):
    "In proportion, none past its room, the surplus to the others, exact; nobody's share is zero: by room"
    assert regrow_counts(shares, total, room)==expect

@settings(max_examples=60, deadline=None)
@given(layers=st.lists(st.tuples(st.floats(0,1e6), st.integers(0,2000)), min_size=1, max_size=8), f=st.floats(0,1))
def test_regrow_counts(layers, f):
    "The budget is met exactly and nobody exceeds its room, for any shares; proportional within one where there is room"
    shares,room = [list(o) for o in zip(*layers)]
    total = int(f*sum(room))
    out = regrow_counts(shares, total, room)
    assert sum(out)==total and all(0<=o<=r for o,r in zip(out, room))
    free = [(s,o) for s,o,r in zip(shares, out, room) if o<r-1 and s>0]
    assert all(s*(o2-1)<=s2*(o+1)*(1+1e-9)+1e-6 for s,o in free for s2,o2 in free)

def test_redistribution_moves_the_budget():
    "The model's count stays exactly; a layer fills up to dense and no further; then it sheds again (2020: 100 of 100 for ever)"
    m,opt,_ = two_layers(lr=1e-3, momentum=0)
    share = {'0.weight':1., '2.weight':1e-6}
    dst = engine(m, opt, n_steps=1000, redistribute_f=lambda p, name: share[name], initial_drop_grow_pct=.5)
    for _ in range(16):
        spin(dst, 1)
        assert sum(live(m))==100 and max(live(m))<=100 and [s.target for s in dst.moving]==live(m)
    assert live(m)[0]>=97
    share.update({'0.weight':1e-6, '2.weight':1.})
    spin(dst, 16)
    assert sum(live(m))==100 and live(m)[0]<=5
    assert_dead(m, opt)

structures = {'2:4':24, 'block 2x2':4, 'fan-in':12, 'fan-in ablate 0.3':12, 'kernels':1, 'output channels':12, 'input channels':12, 'output groups 2':2,
    'input groups 4':4}  # the largest step between counts, of layers of 12x8, 8x12 and 4x8

@pytest.mark.parametrize('share', [momentum_redistribution, lambda p, step: 1.+7*(p.shape[0]==(8,12,4)[step%3])], ids=['momentum','in turn'])
@pytest.mark.parametrize('text', structures)
def test_redistribution_under_a_structure(text, share):
    "Masks stay legal and the total is what it was, to less than a layer's step, however many updates round each layer (it drifted from 112 to 68)"
    m,legal = mlp((8,12,8,4), seed=1),as_structure(text).legal
    sparsify_model(m, .5, 'uniform', seed=0, structure=text)
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    updates = dict(updates=FreqSchedule(2, start=2), drop_fraction=.3, redistribute_f=share)
    dst,moved = engine(m, opt, 40, structure=text, **updates),set()
    for t in range(40):
        train(m, opt, 1, *data(m, seed=t))
        assert all(legal(o.mask) for o in masked_params(m)) and abs(sum(live(m))-112)<structures[text]
        assert_dead(m, opt, state=share is not momentum_redistribution)
        moved.add(tuple(live(m)))
    assert dst.n_updates>=15 and (len(moved)>1 or '2:4' in text)

@pytest.mark.parametrize('start', [0.,.5])
@pytest.mark.parametrize('text', structures)
def test_no_growth_under_a_structure(text, start):
    "An update without growth leaves the legal count next to what it would keep, never fewer than the structure has; without a change there is no update"
    m,s = mlp((8,12,8,4), seed=1),as_structure(text)
    sparsify_model(m, start, seed=0, structure=text)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.05), 30, structure=text, updates=FreqSchedule(2, start=2), drop_fraction=.3, grow_score_f=None)
    now,changes = live(m),0
    for t in range(12):
        spin(dst, 1)
        if t>1 and t%2==0:
            before = now
            now = [min(n, s.count(o.p.shape, max(n-int(.3*n), o.p.numel()//2*(':' in text)))) for o,n in zip(dst.moving, now)]
            changes += now!=before
        assert [o.live for o in dst.moving]==now==live(m) and all(s.legal(o.mask) for o in dst.moving)
    assert dst.n_updates==changes and (changes>=2 or ':' in text and start)

def test_kernels_meet_a_budget_that_can_be_met():
    "Kernels of nine and a linear layer that is full: 135+288+25 is 448, and two weights short (446) is one kernel more and seven single weights less"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(4,8,3), nn.ReLU(), nn.Conv2d(8,8,3), nn.Flatten(), nn.Linear(8,4))
    sparsify_model(m, .5, 'uniform', seed=0, structure='kernels')
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = engine(m, opt, 60, 4, structure='kernels', redistribute_f=momentum_redistribution, grow_score_f=gradient_momentum)
    for t in range(24):
        opt.zero_grad()
        m(torch.randn(16,4,5,5)).square().mean().backward()
        opt.step()
        assert sum(live(m))==448 and all(as_structure('kernels').legal(o.mask) for o in masked_params(m))
    assert dst.n_updates>=5

# --- what an update does to the step (law 4)

def test_nothing_to_change_is_no_update():
    "It doesn't replace the step: 3 live at .3 drop none"
    m,opt = by_hand([1.,2.,3.,0.], [True,True,True,False], None, torch.optim.SGD, lr=1.)
    dst = engine(m, opt)
    for _ in range(6): step(dst, [1.,1.,1.,1.])
    assert dst.n_updates==0 and m.weight.tolist()==[[-5.,-4.,-3.,0.]]

@pytest.mark.parametrize('name', ['SGD','Adam'])
def test_replaced_step(name):
    "The update takes the step's place: kept weights, biases, their momentum and step counters stay bit for bit, and its gradient reaches no later step"
    m,opt,(xb,yb) = two_layers(opt=name)
    dst = engine(m, opt, n_steps=20, every=3)
    train(m, opt, 3, xb, yb)
    old,masks,state = [p.detach().clone() for p in m.parameters()],masks_of(m),copy.deepcopy([opt.state[p] for p in m.parameters()])
    train(m, opt, 1, xb, yb)
    assert dst.n_updates==1 and not same_masks(masks, masks_of(m))
    survive = {id(o.p): o.mask & b for o,b in zip(masked_params(m), masks)}
    for p,q,s in zip(m.parameters(), old, state):
        both = survive.get(id(p), torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(p[both], q[both]) and p[~both].eq(0).all()
        for k,v in s.items(): assert torch.equal(v[both], opt.state[p][k][both]) if v.shape==p.shape else torch.equal(v, opt.state[p][k])
    assert all(p.grad is None or not p.grad.any() for p in m.parameters())

def test_step_beside_the_update():
    "`replace_step=False`: the same update, then the step with gradients masked by the new mask; every batch may have one"
    m,opt = by_hand(*vector[:2], None, torch.optim.SGD, lr=.5)
    dst = engine(m, opt, replace_step=False, **half_at_2)
    for g in ([0.]*8, [0.]*8, vector[2]): step(dst, g)
    assert m.weight_mask.tolist()==[[True,True,True,False,True,False,False,False]]
    assert torch.allclose(m.weight, torch.tensor([[3.5,-25.1,2.5,0.,-4.5,0.,0.,0.]]))

# --- what is left alone (laws 5, 9)

def test_frozen_and_unused_parameters():
    "A parameter that is frozen, or has no gradient at an update, is left exactly as it is, its budget stays, and the others move"
    m,opt,_ = two_layers(sizes=(10,10,10,10,3))
    dst = engine(m, opt, redistribute_f=lambda p: 1., initial_drop_grow_pct=.5)
    m[2].weight.requires_grad_(False)
    before,n = [(o.p.detach().clone(), o.mask.clone()) for o in masked_params(m)],sum(live(m))
    for _ in range(5): step(dst, *[None if i in (1,2) else torch.randn(o.p.shape) for i,o in enumerate(masked_params(m))])
    same = [torch.equal(a, o.p) and torch.equal(b, o.mask) for (a,b),o in zip(before, masked_params(m))]
    assert dst.n_updates>0 and same==[False,True,True,False] and sum(live(m))==n

@pytest.mark.parametrize('method,structure', [('rigl',None), ('rigl','block 4x4'), ('rigl','kernels'), ('gse',None), ('gse','block 4x4')])
def test_nothing_grows_where_no_gradient_comes(method, structure):
    "Law 2: inputs that are always zero get no new weights, so fewer are dropped"
    torch.manual_seed(0)
    m = nn.Conv2d(32, 8, 2) if structure=='kernels' else nn.Linear(32, 32)
    x = torch.randn(8, 32, *(2,2)[:m.weight.ndim-2])
    x[:,12:] = 0
    sparsify_model(m, .5, structure=structure, seed=0)
    opt,before,n = torch.optim.SGD(m.parameters(), .1),m.weight_mask.clone(),live(m)
    DynamicSparseTraining(m, opt, 40, method=method, structure=structure, batches_per_update=2, initial_drop_grow_pct=.9, seed=0, sparse_compute=False)
    for _ in range(7):
        opt.zero_grad()
        m(x).square().sum().backward()
        opt.step()
    new = m.weight_mask & ~before
    assert new.any() and live(m)==n and not new[:,12:].any()

def test_momentum_that_is_not_there_yet():
    "A parameter whose first gradient comes at an update is left as it is; without momentum anywhere the error names what is missing"
    m,opt,batch = two_layers()
    dst = engine(m, opt, every=3, **SNFS_presets)
    m[2].weight.requires_grad_(False)
    train(m, opt, 3, *batch)
    m[2].weight.requires_grad_(True)
    before = masks_of(m)
    train(m, opt, 1, *batch)
    assert dst.n_updates==1 and [torch.equal(a, b) for a,b in zip(before, masks_of(m))]==[False,True]
    at_0 = dict(updates=FreqSchedule(3), drop_fraction=.5, grow_score_f=gradient_momentum)
    m,opt,batch = two_layers()
    dst = engine(m, opt, 20, **at_0)
    for done in (0,1):
        train(m, opt, 1+2*done, *batch)
        assert dst.n_updates==done
    m,opt,_ = two_layers(momentum=0)
    with pytest.raises(ValueError, match='keeps no average'): engine(m, opt, 20, **at_0)

@pytest.mark.parametrize('make,fits', [(partial(torch.optim.SGD, momentum=.9), True), (torch.optim.SGD, False), (torch.optim.Adam, True),
    (torch.optim.Adafactor, False), (torch.optim.Adagrad, False), (torch.optim.RMSprop, False), (partial(torch.optim.RMSprop, momentum=.5), True),
    (partial(fo.SGD, mom=.9), True), (partial(fo.SGD, mom=0.), False), (fo.Adam, True)])
def test_momentum_is_asked_for_before_the_first_step(make, fits):
    "SNFS reads it: an optimizer that is known to keep none is refused when the engine is made"
    m = mlp((8,8,4))
    sparsify_model(m, .5, seed=0)
    opt = make(list(m.parameters()), lr=.1)
    if fits: SparseEngine(m, opt, 20, method='snfs')
    else:
        with pytest.raises(ValueError, match='keeps no average of `0.weight`'): SparseEngine(m, opt, 20, method='snfs')

@pytest.mark.parametrize('score', [gradient_momentum, partial(gradient_momentum, eps=1e-3)], ids=['itself','a partial'])
@pytest.mark.parametrize('opt', ['SGD','Adam'])
def test_momentum_of_dead_weights(opt, score):
    "Where a score reads it, it is real history while weights stay dead; when the engine lets go, nothing of it is left, nor a gradient"
    m,opt,batch = two_layers(opt=opt)
    dst = engine(m, opt, grow_score_f=score)
    for _ in range(6):
        train(m, opt, 1, *batch)
        assert_dead(m, opt, state=False)
    o = masked_params(m)[0]
    assert states(opt, o.p)[0][~o.mask].all(), 'the method needs it'
    dst.remove()
    assert_dead(m, opt)
    assert not o.p.grad[~o.mask].any() and states(opt, o.p)[0][o.mask].any(), 'live weights keep theirs'
    train(m, opt, 1, *batch)
    assert_dead(m, opt)

def test_sparse_modules():
    "Only connections of the modules named move; masks elsewhere stay and stay enforced; parameters and buffers are changed in place"
    for modules in (lambda m: [m[2]], lambda m: m[2]):
        m,opt,batch = two_layers(sizes=(10,10,10,3), opt='Adam')
        ids = [(id(t),t.data_ptr()) for t in [*m.parameters(), *m.buffers()]]
        dst,before = engine(m, opt, sparse_modules=modules(m)),masks_of(m)
        for _ in range(7):
            train(m, opt, 1, *batch)
            assert_dead(m, opt)
        assert [torch.equal(a, b) for a,b in zip(before, masks_of(m))]==[True,False,True] and dst.n_updates>1 and len(dst.moving)==1
        assert ids==[(id(t),t.data_ptr()) for t in [*m.parameters(), *m.buffers()]]

# --- what can't move, and says so

@pytest.mark.parametrize('structure,n,moves', [(None,3,False), (None,4,True), ('block 2x2',12,False), ('block 2x2',16,True), ('2:4',32,True), ('fan-in',8,True),
    ('output groups 4',12,False), ('output groups 4',16,True), ('block 3x3 pad',6,False)])
def test_an_update_moves_a_unit_or_is_none(structure, n, moves):
    "floor(.3*live) weights must be a whole unit, or one in each group; else no step is replaced for nothing, and the summary says why"
    m = nn.Sequential(nn.Linear(8,8))
    sparsify_model(m, 1-n/64, seed=0, structure=structure)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.1), initial_drop_grow_pct=.3, structure=structure)
    assert ("can't move: an update drops 0.3 of" in sparse_summary(m).df.note[0])!=moves
    seen,before = set(),m[0].weight.detach().clone()
    for t in range(40):
        train(m, dst.opt, 1, torch.randn(4,8), torch.zeros(4,8))
        seen.add(tuple(m[0].weight_mask.flatten().tolist()))
    assert (dst.n_updates>0)==(len(seen)>1)==moves and not torch.equal(before, m[0].weight)
    dst.remove()
    assert "can't move" not in sparse_summary(m).df.note[0]

@pytest.mark.parametrize('settings', [dict(method='static'), dict(method='gmp', sparsity=.97), dict(method='snfs')], ids=lambda o: o['method'])
def test_what_can_not_move_by_choice_has_no_note(settings):
    "A mask that is to stay, a schedule of sparsities, growth by shares, a dense layer"
    m = nn.Sequential(nn.Linear(8,8), nn.Linear(8,1))
    if 'sparsity' not in settings: sparsify_model(m, .95, seed=0)
    engine(m, torch.optim.SGD(m.parameters(), lr=.1, momentum=.9), **({} if settings['method']=='static' else dict(every=5)), **settings)
    assert not any("can't move" in o for o in sparse_summary(m).df.note)

# --- what it asks of a device

class Count(TorchDispatchMode):
    "Counts operations that compute, and those whose result the processor must wait for if tensors are on another device"
    views = {'view','detach','alias','t','transpose','slice','select','expand','unsqueeze','as_strided','empty','empty_like','new_empty',
        'lift_fresh','_local_scalar_dense','is_nonzero'}
    waiting = {'_local_scalar_dense','is_nonzero','nonzero','masked_select','allclose','equal','unique'}
    ops = waits = 0
    def __enter__(self):
        self.reads = {k:getattr(torch.Tensor, k) for k in ('tolist','numpy')}
        for k,f in self.reads.items(): setattr(torch.Tensor, k, lambda t, f=f: (setattr(self, 'waits', self.waits+1), f(t))[1])
        return super().__enter__()

    def __exit__(self, *args):
        for k,f in self.reads.items(): setattr(torch.Tensor, k, f)
        return super().__exit__(*args)

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f._schema.name.removeprefix('aten::')
        self.ops += name not in self.views
        self.waits += name in self.waiting or name=='index' and any(t is not None and t.dtype==torch.bool for t in args[1])
        return f(*args, **kwargs or {})

@pytest.fixture
def elsewhere(monkeypatch):
    "Updates as on a device that the processor runs ahead of"
    monkeypatch.setattr(moves, '_alone', [])
    monkeypatch.setattr(Dense, 'live_part', lambda self, grad: grad.detach().reshape(-1))
    monkeypatch.setattr(Score, 'checked', Score.value)  # which looks for NaN on a CPU alone

def counted(n, every=2):
    "Operations and waits of a RigL update of `n` layers; clipping has halved the gradients, so each finds the factor"
    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Linear(32, 32) for _ in range(n)])
    sparsify_model(m, .9, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = SparseEngine(m, opt, 1000, method='rigl', batches_per_update=every, seed=0)
    for t in range(3):
        dst.prepare(t)
        m(torch.randn(8, 32)).square().sum().backward()
        for p in m.parameters(): p.grad.mul_(.5)
        with Count() as count: moved = dst.before_step(t)
        assert moved==(t==2)
        if not moved: opt.step()
        opt.zero_grad()
    return count

def test_elsewhere_an_update_waits_four_times(elsewhere):
    "For finite gradients, the factors of clipping, the numbers of scores that aren't zero, and of changes; whatever the number of layers"
    few,many = counted(1),counted(9)
    assert few.waits==many.waits==4
    assert (many.ops-few.ops)/8<=36, (few.ops,many.ops)

@pytest.mark.parametrize('method', ['static','set','snfs','rigl','itop','gse','gmp','granet','auto'])
def test_elsewhere_updates_choose_the_same(method, request):
    "Layers of three sizes, chosen for together and each alone"
    def run():
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(24,40), nn.ReLU(), nn.Linear(40,16), nn.ReLU(), nn.Linear(16,3))
        kw = dict(sparsity=.9) if method in ('gmp','granet') else {}
        if not kw: sparsify_model(m, .8, seed=0)
        opt = torch.optim.Adam(m.parameters(), lr=.05)
        dst = SparseEngine(m, opt, 60, seed=0, method=method, batches_per_update=3, **kw)
        masks,g = [],torch.Generator().manual_seed(0)
        for t in range(40):
            dst.prepare(t)
            nn.functional.cross_entropy(m(torch.randn(8, 24, generator=g)), torch.randint(3, (8,), generator=g)).backward()
            if not dst.before_step(t): opt.step()
            dst.after_step()
            opt.zero_grad()
            masks.append([o.mask.clone() for o in masked_params(m)])
        return masks,[p.detach() for p in m.parameters()],[o.last_update for o in dst.moving]
    alone = run()
    request.getfixturevalue('elsewhere')
    together = run()
    for a,b in zip(alone[0], together[0]): assert all(map(torch.equal, a, b))
    assert all(torch.allclose(a, b, atol=1e-6) for a,b in zip(alone[1], together[1])) and alone[2]==together[2]

dtypes = torch.float,torch.double,torch.bfloat16,torch.int32,torch.bool

@pytest.mark.parametrize('dtype', dtypes, ids=str)
@pytest.mark.parametrize('seed', range(5))
def test_moves_chosen_together_are_those_chosen_alone(dtype, seed):
    "Few different scores, so that many tie; NaN and infinities; empty parameters; nothing or everything moves, but no more than could grow"
    g = torch.Generator().manual_seed(seed)
    def draw(n): return torch.randint(n+1, (), generator=g).item()
    jobs = []
    for shape in [(5,7), (0,3), (31,), (4,3,2), (1,), (16,16)]*2:
        n = torch.Size(shape).numel()
        mask = torch.rand(shape, generator=g)<draw(10)/10
        live,values = int(mask.sum()),torch.tensor([-2,-1,0,1,3.] if dtype in (torch.int32,torch.bool) else [-math.inf,-1,-0.,0,1,2,math.inf,math.nan])
        keep,grow = [values[torch.randint(len(values), shape, generator=g)].to(dtype) for _ in range(2)]
        jobs.append((mask, live, keep, grow, draw(live), draw(n)))
    masks,lives,keep,grow,n_keep,targets = map(list, zip(*jobs))
    grows,targets = (None,n_keep) if seed==4 else (grow,targets)
    def f(scores): return [(lambda *stay, s=s: s) for s in scores] if scores else [None]*len(masks)
    moves = move_together(masks, lives, f(keep), f(grows), n_keep, targets)
    possible = [int(((score!=0)&~mask).sum()) if grows and dtype!=torch.bool else live for score,mask,live in zip(grow, masks, lives)]
    for (gone,new,*_),mask,live,k,n,most,(keep_f,grow_f) in zip(moves, masks, lives, n_keep, targets, possible, zip(f(keep), f(grows))):
        dropped,grown = Unstructured().move(mask, keep_f, grow_f, min(live-k, most), n)
        assert set(gone.tolist())==set(dropped.tolist())-set(grown.tolist()) and gone.tolist()==sorted(gone.tolist())
        assert set(new.tolist())==set(grown.tolist())-set(dropped.tolist()) and new.tolist()==sorted(new.tolist())


@pytest.mark.parametrize('method,live', [('set',False), ('rigl',False), ('rigl',True), ('gmp',True), ('snfs',False)])
def test_deterministic_algorithms_move_the_same(method, live):
    "All places that are written differ, so nothing is undetermined, in any memory format"
    def run():
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).to(memory_format=torch.channels_last)
        if method!='gmp': sparsify_model(m, .7, seed=0)
        opt = torch.optim.Adam(m.parameters(), 1e-2)
        settings = dict(sparsity=.7) if method=='gmp' else {}
        plan = {'3.weight':'rows'} if live else False
        DynamicSparseTraining(m, opt, 12, method=method, batches_per_update=3, seed=0, sparse_compute=plan, **settings)
        for i in range(9):
            opt.zero_grad()
            m(torch.randn(4, 3, 6, 6, generator=keyed_generator(0, i))).square().mean().backward()
            opt.step()
        return m.state_dict()
    want = run()
    torch.use_deterministic_algorithms(True)
    try: got = run()
    finally: torch.use_deterministic_algorithms(False)
    assert all(torch.equal(want[k], got[k]) for k in want)

def test_the_buffer_shows_the_sparsity_after_each_update():
    "Law 5: `1-live/n`, whatever an update leaves"
    m = mlp((8,12,4), seed=0)
    sparsify_model(m, .25, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = SparseEngine(m, opt, 12, seed=0, method='gmp', sparsity=.75, batches_per_update=2)
    for t in range(12):
        dst.prepare(t)
        m(torch.ones(2,8)).sum().backward()
        dst.before_step(t)
        for tally in dst.tallies:
            shown = tally.weight.module._buffers[f'{tally.weight.attr}_sparsity']
            assert shown.item()==pytest.approx(1-int(tally.mask.sum())/tally.n)
    assert dst.n_updates>2

def test_a_layer_that_scores_leave_without_weights_is_named():
    "Where all layers compete, one may lose all"
    m = mlp((8,12,4), seed=0)
    sparsify_model(m, 0., seed=0)
    with torch.no_grad(): m[0].weight.mul_(1e-6)
    dst = SparseEngine(m, torch.optim.SGD(m.parameters(), lr=.1), 4, seed=0, method='gmp', sparsity=.9, batches_per_update=1, stop_pct=.5,
        sparse_f=partial(global_sparsity, min_live=0))
    def updates():
        for t in range(4):
            m(torch.ones(2,8)).sum().backward()
            dst.before_step(t)
    assert '0.weight is left without live weights' in warned(updates)
