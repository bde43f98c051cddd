"Room 05a: where grown weights start, what the optimizer makes of them, and learning rates for sparse layers"
import copy, fastai.optimizer as fo, io, math, numpy as np, pytest, torch, warnings
from fastai.callback.core import Callback
from fastai.callback.schedule import *
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastsparse.all import *
from fastsparse.train.growth import supar_init_,supar_splitter,supar_lrs
from fastsparse.masks.selection import keyed_generator
from fastsparse.weights.optimizers import grad_history,slow_weights
from fastsparse.core.optimizers import opt_state
from fastsparse.weights.weight import handler_of,masked_params
from fastsparse.train.growth import fresh_value,given_value,initial_value,own_step_count,reset_state,second_moment_from_live,supar_groups
from fastsparse.train.growth import supar_scales
from fastsparse.kernels.linear import backward
from fastcore.basics import first
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn

presets = dict(SET=SET_presets, RigL=RigL_presets)
opts = dict(SGD=partial(torch.optim.SGD, lr=.03, momentum=.9), Adam=partial(torch.optim.Adam, lr=.03), fastai=partial(fo.Adam, lr=.03),
    lookahead=lambda ps: fo.Lookahead(fo.Adam(ps, lr=.03), k=3))

class Loop:
    "The engine in a plain loop, for torch's optimizers and fastai's: a batch a step, which depends on the step only"
    def __init__(self, opt, n_steps=40, s=.7, sizes=(6,12,9,3), dtype=torch.float, seed=5, sparse=True, **kwargs):
        self.m = mlp(sizes, seed=4, dtype=dtype)
        if sparse: sparsify_model(self.m, s, erdos_renyi_sparsity, seed=seed)
        else: kwargs.update(sparsity=s)
        self.opt,self.t,self.new = opt(list(self.m.parameters())),0,{}
        self.engine = SparseEngine(self.m, self.opt, n_steps, **{**SET_presets, 'batches_per_update':4, 'seed':seed, **kwargs})

    def step(self, grads=None):
        "Was the step replaced?"
        self.engine.prepare(self.t)
        self.opt.zero_grad()
        if grads is None: backward(self.m, *data(self.m, seed=100+self.t))
        else:
            for o,g in zip(masked_params(self.m), grads): o.p.grad = g.clone() if self.engine.slots[0].handler.keep_dense_grad else g*o.mask
        before = masks_of(self.m)
        replaced = self.engine.before_step(self.t)
        self.grown = [a & ~b for a,b in zip(masks_of(self.m), before)]
        if not replaced: self.opt.step()
        self.t += 1
        return replaced

    def state(self): return dict(model=self.m.state_dict(), opt=self.opt.state_dict(), engine=self.engine.state_dict(), t=self.t)

    def load(self, state):
        self.m.load_state_dict(state['model'])
        self.opt.load_state_dict(state['opt'])
        self.engine.load_state_dict(state['engine'])
        self.t = state['t']

def until_growth(loop):
    "Steps until something grows; the old values of weights and states"
    while True:
        was = [o.p.detach().clone() for o in masked_params(loop.m)]
        replaced = loop.step()
        if any(g.any() for g in loop.grown): return was,replaced

# --- where grown weights start

def _kept(p, **kwargs): return torch.arange(p.numel()).view_as(p)+10.

@pytest.mark.parametrize('init,expect', [(None, 0.), (0, 0.), (.25, .25), (-3, -3.), (_kept, None)])
def test_start_by_hand(init, expect):
    "Law 2: what is new starts at the number or at the function's value there; survivors, and the dropped that grow back at once, keep their value"
    m,opt = by_hand([4.,-.1,3.,.2,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.SGD, lr=1e-30, momentum=.9)
    engine = SparseEngine(m, opt, 100, batches_per_update=10, drop_fraction=.5, grow_init_f=init, seed=0)
    engine.prepare(10)
    m.weight.grad = torch.tensor([[1.,50.,1.,1.,9.,-7.,2.,3.]])
    assert engine.before_step(10)
    assert m.weight_mask.tolist()==[[True,True,True,False,True,False,False,False]]
    assert torch.allclose(m.weight, torch.tensor([[4.,-.1,3.,0.,14. if expect is None else expect,0.,0.,0.]]))
    assert_dead(m, opt)

@pytest.mark.parametrize('sparse', [False,True])
@pytest.mark.parametrize('opt', ['SGD','fastai'])
def test_initial_value(sparse, opt):
    "A model that the engine makes sparse remembers its dense values: those dead from the start return to them too, not to the zeros that masks left"
    dense = [l.weight.detach().clone() for l in mlp((6,12,9,3), seed=4) if isinstance(l, nn.Linear)]
    loop = Loop(opts[opt], sparse=sparse, grow_init_f=initial_value)
    start = [d*o.mask if sparse else d for d,o in zip(dense, masked_params(loop.m))]
    for _ in range(3):
        until_growth(loop)
        for o,g,s in zip(masked_params(loop.m), loop.grown, start): assert torch.equal(o.p[g], s[g])
    if not sparse: assert all((s[g]!=0).all() for g,s in zip(loop.grown, start))

def test_gone_initial_values_are_said():
    "Dead weights are zero already when `sparsify_model` was first, so a return to the start starts at zero: one warning when the engine is made, and none where nothing is lost"
    def said(**kwargs):
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            Loop(opts['SGD'], **kwargs)
        return [str(w.message) for w in ws if 'initial values' in str(w.message)]
    text, = said(grow_init_f=initial_value)
    assert 'given_value' in text and 'sparsity=' in text and '0.weight' in text
    assert len(said(grow_init_f=partial(initial_value)))==1
    for kw in (dict(sparse=False, grow_init_f=initial_value), dict(s=0., grow_init_f=initial_value), dict(grow_init_f=fresh_value), {}): assert not said(**kw)

def test_given_value():
    "Values by name, on the way to a model that was sparsified first; a missing name and a wrong shape are refused before anything changed"
    values = mlp((6,12,9,3), seed=8).state_dict()
    loop = Loop(opts['Adam'], grow_init_f=partial(given_value, values=values))
    until_growth(loop)
    for o,g in zip(masked_params(loop.m), loop.grown): assert torch.equal(o.p[g], values[o.name][g])
    for bad,match in (({}, '0.weight'), ({**values, '2.weight':torch.zeros(3)}, r'2.weight has shape \(3,\)')):
        loop = Loop(opts['Adam'], grow_init_f=partial(given_value, values=bad))
        for _ in range(4): loop.step()
        before = copy.deepcopy((loop.m.state_dict(), loop.opt.state_dict()))
        with pytest.raises((KeyError,ValueError), match=match): loop.step()
        after = loop.m.state_dict(),loop.opt.state_dict()
        assert all(torch.equal(v, after[0][k]) for k,v in before[0].items()) and all(torch.equal(v['exp_avg'], after[1]['state'][k]['exp_avg']) for k,v in before[1]['state'].items())

@pytest.mark.parametrize('dtype', [torch.float, torch.double, torch.bfloat16])
def test_fresh_value(dtype):
    "The draw is torch's normal from the generator of seed, parameter and update, over the root of half the live inputs after the update, in float32 whatever the dtype and whatever else draws"
    loop = Loop(opts['SGD'], dtype=dtype, grow_init_f=fresh_value)
    for update in (1,2):
        torch.manual_seed(update)
        until_growth(loop)
        for i,(o,g) in enumerate(zip(masked_params(loop.m), loop.grown)):
            draw = torch.randn(o.p.shape, generator=keyed_generator(5, i, -update)).numpy()
            fan = o.mask.numpy().sum(1, keepdims=True)
            expect = torch.from_numpy(draw*np.sqrt(2/np.maximum(fan, 1))).to(dtype)
            assert torch.allclose(o.p[g].float(), expect[g].float(), rtol=1e-2 if dtype==torch.bfloat16 else 1e-6) and g.any()

def test_fresh_value_of_a_convolution():
    "The fan-in of an output counts its whole kernel; an output without live weights has a finite draw"
    mask = torch.zeros(3, 4, 3, 3, dtype=torch.bool)
    mask[0],mask[1,0] = True,True
    x = torch.stack([fresh_value(torch.empty(mask.shape), mask, keyed_generator(0, 0, i), gain=3.) for i in range(400)])
    assert torch.allclose(x.std((0,2,3,4)), torch.tensor([3/6,1.,3.]), rtol=.05)

# --- second moments and resets

def _second(opt, p): return first(opt_state(opt, p)[k] for k in ('exp_avg_sq','sqr_avg','square_avg') if k in opt_state(opt, p))

@pytest.mark.parametrize('opt', [opts['Adam'], opts['fastai'], opts['lookahead'], partial(torch.optim.AdamW, lr=.03, amsgrad=True), partial(torch.optim.NAdam, lr=.03),
    partial(torch.optim.RMSprop, lr=.03), partial(fo.RMSProp, lr=.03, mom=.9), partial(fo.OptimWrapper, opt=torch.optim.Adam, lr=.03)])
def test_second_moment_from_live(opt):
    "Grown weights get the mean over those that lived already, and nothing else is touched: neither the others' nor the first moment's zeros"
    loop = Loop(opt, grow_state_f=second_moment_from_live)
    for _ in range(4): loop.step()
    before = [_second(loop.opt, o.p).clone().numpy() for o in masked_params(loop.m)]
    until_growth(loop)
    for o,g,b in zip(masked_params(loop.m), loop.grown, before):
        old,new,v = (o.mask & ~g).numpy(),g.numpy(),_second(loop.opt, o.p).numpy()
        assert np.allclose(v[new], b[old].mean(), rtol=1e-5) and np.array_equal(v[old], b[old]) and not v[~o.mask.numpy()].any()
        for t in grad_history(loop.opt, o.p):
            if t is not _second(loop.opt, o.p): assert not t[g].any()

def test_second_moment_where_nothing_else_lives():
    "Without another live weight there is no mean: the second moment stays zero, and is no NaN"
    p = nn.Parameter(torch.ones(4))
    opt = torch.optim.Adam([p])
    p.grad = torch.ones(4)
    opt.step()
    v = opt.state[p]['exp_avg_sq'].zero_()
    second_moment_from_live(p, opt, torch.tensor([1]), torch.tensor([False,True,False,False]))
    assert is_positive_zero(v)
    second_moment_from_live(p, opt, torch.tensor([], dtype=torch.long), torch.ones(4, dtype=torch.bool))
    assert is_positive_zero(v)

@pytest.mark.parametrize('opt', ['SGD','Adam','fastai'])
def test_reset_state(opt):
    "All history of a parameter is zero, its tensors are the same, and the step count stays"
    loop = Loop(opts[opt], grow_state_f=reset_state)
    for _ in range(4): loop.step()
    held = {o.name:[(t, t.clone()) for t in grad_history(loop.opt, o.p)] for o in masked_params(loop.m)}
    p = loop.m[0].weight
    assert all(torch.equal(t, was) and was.any() for t,was in held['0.weight'])
    until_growth(loop)
    for ts in held.values(): assert ts and all(is_positive_zero(t) for t,_ in ts)
    assert opt=='SGD' or opt_state(loop.opt, p)['step']==4
    bias = loop.m[0].bias
    reset_state(bias, loop.opt)
    assert grad_history(loop.opt, bias) and not any(t.any() for t in grad_history(loop.opt, bias))

# --- an age of its own

class AgedAdam:
    "Adam in NumPy float64 with a step count for each weight"
    def __init__(self, w, mask, lr, b1=.9, b2=.999, eps=1e-8, l2=0., decay=0., amsgrad=False, sign=1.):
        self.w,self.m,self.v,self.top,self.age = [np.array(w, dtype=float)]+[np.zeros(w.shape) for _ in range(4)]
        self.mask,self.hypers = np.array(mask),(lr,b1,b2,eps,l2,decay,amsgrad,sign)

    def move(self, mask, grown):
        for t in (self.w,self.m,self.v,self.top,self.age): t[~mask | grown] = 0
        self.mask = np.array(mask)

    def step(self, g):
        lr,b1,b2,eps,l2,decay,amsgrad,sign = self.hypers
        on = self.mask
        g = (sign*g+l2*self.w)[on]
        self.age[on] += 1
        self.m[on],self.v[on] = b1*self.m[on]+(1-b1)*g,b2*self.v[on]+(1-b2)*g*g
        self.top = np.maximum(self.top, self.v) if amsgrad else self.v
        m,v = self.m[on]/(1-b1**self.age[on]),self.top[on]/(1-b2**self.age[on])
        self.w[on] = self.w[on]*(1-lr*decay)-lr*m/(np.sqrt(v)+eps)

A,W = torch.optim.Adam,torch.optim.AdamW
aged = {'Adam':(partial(A, lr=.02), {}), 'Adam fused':(partial(A, lr=.02, fused=True), {}), 'Adam foreach l2':(partial(A, lr=.02, foreach=True, weight_decay=.1), dict(l2=.1)),
    'Adam amsgrad':(partial(A, lr=.02, amsgrad=True, betas=(.8,.9)), dict(amsgrad=True, b1=.8, b2=.9)),
    'Adam maximize':(partial(A, lr=.02, maximize=True, eps=1e-3), dict(sign=-1., eps=1e-3)),
    'Adam decoupled':(partial(A, lr=.02, weight_decay=.3, decoupled_weight_decay=True), dict(decay=.3)), 'AdamW':(partial(W, lr=.02, weight_decay=.5), dict(decay=.5)),
    'AdamW tensor lr':(lambda ps: W(ps, lr=torch.tensor(.02, dtype=torch.double), foreach=False), dict(decay=.01)), 'no first':(partial(A, lr=.02, betas=(0.,.99)), dict(b1=0., b2=.99)),
    'fastai':(partial(fo.Adam, lr=.02), dict(b2=.99, eps=1e-5, decay=.01)), 'fastai l2':(partial(fo.Adam, lr=.02, wd=.2, decouple_wd=False), dict(b2=.99, eps=1e-5, l2=.2)),
    'wrapped':(partial(fo.OptimWrapper, opt=W, lr=.02), dict(decay=.01))}

@pytest.mark.parametrize('name', aged)
@pytest.mark.parametrize('replace', [True,False])
def test_own_step_count(name, replace):
    "Beside a per-weight Adam in NumPy, over several updates with given gradients: every weight, old, young, dropped and grown again, to 1e-12"
    opt,kw = aged[name]
    loop = Loop(opt, 60, s=.5, dtype=torch.double, grow_state_f=own_step_count, replace_step=replace, stop_pct=.6)
    refs = [AgedAdam(o.p.detach().numpy(), o.mask.numpy(), .02, **kw) for o in masked_params(loop.m)]
    rng,young = np.random.default_rng(0),0
    for t in range(50):
        grads = [torch.from_numpy(rng.normal(size=o.p.shape)) for o in masked_params(loop.m)]
        replaced = loop.step(grads)
        for o,r,g,new in zip(masked_params(loop.m), refs, grads, loop.grown):
            r.move(o.mask.numpy(), new.numpy())
            if not replaced: r.step(g.numpy())
            assert np.abs(o.p.detach().numpy()-r.w).max()<1e-12, (t, o.name)
            young += int(((r.age<t-5) & r.mask).sum())
        assert_dead(loop.m, loop.opt)
    assert young>100 and loop.engine.n_updates>=7

def test_own_step_count_in_torch_hooks():
    "torch tells handlers of a step before the update that grows weights within it: where the step is not replaced, they make their first one at once and by their own age"
    m,opt = by_hand([4.,3.,.2,.1,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.Adam, lr=.1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        dst = DynamicSparseTraining(m, opt, 100, batches_per_update=2, drop_fraction=.5, replace_step=False, grow_state_f=own_step_count, seed=0)
    for g in ([1.]*8, [1.]*8, [1.,1.,1.,1.,-9.,9.,2.,3.]):
        m.weight.grad = torch.tensor([g])
        dst.step()
    assert m.weight_mask.tolist()==[[True,True,False,False,True,True,False,False]]
    assert torch.allclose(m.weight[0,4:6], torch.tensor([.1,-.1]), atol=1e-6)  # a first step of Adam is the learning rate

def test_default_first_step_is_too_long():
    "What it is for: by the run's count the first step of a grown weight is `(1-b1)/sqrt(1-b2)` over the run's corrections, here 1.7 learning rates and not one"
    m,opt = by_hand([4.,3.,.2,.1,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.Adam, lr=.1)
    engine = SparseEngine(m, opt, 1000, batches_per_update=300, drop_fraction=.5, replace_step=False, seed=0)
    for t in range(301):
        engine.prepare(t)
        m.weight.grad = torch.tensor([[1.,1.,1.,1.,9.,9.,2.,3.]])*(1. if t==300 else m.weight_mask)
        engine.before_step(t)
        opt.step()
    expect = .1*(.1/(1-.9**301))/math.sqrt(.001/(1-.999**301))
    assert torch.allclose(m.weight[0,4:6].abs(), torch.tensor([expect]*2), rtol=1e-4) and expect>.15

def test_lookahead_and_moving_momentum():
    "Young weights see the momentum that the schedule has now, and Lookahead's slow copies follow the corrected ones"
    torch.manual_seed(0)
    loop = Loop(lambda ps: fo.Lookahead(fo.Adam(ps, lr=.02), k=4), 40, s=.5, dtype=torch.double, grow_state_f=own_step_count, stop_pct=.6)
    o = masked_params(loop.m)[0]
    ref,slow,count = AgedAdam(o.p.detach().numpy(), o.mask.numpy(), .02, b2=.99, eps=1e-5, decay=.01),o.p.detach().numpy().copy(),0
    rng = np.random.default_rng(0)
    for t in range(35):
        mom = .9-.01*t
        loop.opt.set_hyper('mom', mom)
        ref.hypers = (.02, mom, *ref.hypers[2:])
        grads = [torch.from_numpy(rng.normal(size=q.p.shape)) for q in masked_params(loop.m)]
        replaced = loop.step(grads)
        ref.move(o.mask.numpy(), loop.grown[0].numpy())
        slow[~o.mask.numpy() | loop.grown[0].numpy()] = 0
        if not replaced:
            ref.step(grads[0].numpy())
            count += 1
            if count%4==0:
                slow += .5*(ref.w-slow)
                ref.w = slow.copy()
        assert np.abs(o.p.detach().numpy()-ref.w).max()<1e-12, t

def test_grown_start_in_lookahead():
    "The slow copy of a grown weight starts where the weight does, and does not pull it to zero"
    loop = Loop(opts['lookahead'], grow_init_f=.5)
    until_growth(loop)
    for o,g in zip(masked_params(loop.m), loop.grown): assert all(torch.equal(t[g], o.p[g]) for t in slow_weights(loop.opt, o.p))

def test_skipped_steps_do_not_age():
    "A gradient scaler that skips a step of a fused Adam, and a step without gradient, leave weights and ages alone"
    loop = Loop(partial(A, lr=.02, fused=True), 100, dtype=torch.float, grow_state_f=own_step_count, stop_pct=.5)
    until_growth(loop)
    loop.step()
    loop.step()
    w,notes = [o.p.detach().clone() for o in masked_params(loop.m)],copy.deepcopy([s.growth_state for s in loop.engine.slots])
    loop.opt.grad_scale,loop.opt.found_inf = torch.tensor(1.),torch.tensor(1.)
    loop.opt.step()
    loop.opt.grad_scale = loop.opt.found_inf = None
    for o in masked_params(loop.m): o.p.grad = None
    loop.opt.step()
    assert all(torch.equal(a, o.p) for a,o in zip(w, masked_params(loop.m)))
    assert all(torch.equal(a['idx'], s.growth_state['idx']) and a['born']==s.growth_state['born'] for a,s in zip(notes, loop.engine.slots))

def test_young_weights_are_forgotten():
    "Notes hold live weights only, a place once, oldest first; they are dropped when both corrections are within 1e-6 of one, also where no update comes"
    loop = Loop(partial(A, lr=.02, betas=(.5,.6)), 60, grow_state_f=own_step_count, stop_pct=.5)
    seen = 0
    for _ in range(60):
        loop.step()
        for s in loop.engine.slots:
            if not s.growth_state: continue
            idx = s.growth_state['idx']
            assert s.mask.take(idx).all() and len(idx.unique())==len(idx)==sum(s.growth_state['sizes']) and s.growth_state['born']==sorted(s.growth_state['born'])
            assert all(.6**(opt_state(loop.opt, s.p)['step'].item()-1-b)>1e-6 for b in s.growth_state['born'])
            seen = max(seen, len(idx))
    assert seen>5 and all(not len(s.growth_state['idx']) and not s.growth_state['born'] for s in loop.engine.slots)  # .6**28 < 1e-6

def test_grown_before_the_first_step():
    "A weight that grows before the optimizer's first step is as old as the run: nothing is noted"
    m,opt = by_hand([4.,3.,0.,0.], [True,True,False,False], [1.,1.,1.,9.], torch.optim.Adam, lr=.1)
    engine = SparseEngine(m, opt, 100, batches_per_update=10, drop_fraction=.5, seed=0, grow_state_f=own_step_count)
    assert engine.before_step(10) and m.weight_mask[0,3] and not engine.slots[0].growth_state

def test_state_cleared_within_a_run():
    "An optimizer that is reset makes all weights equally old: notes of a later time are dropped"
    loop = Loop(opts['fastai'], grow_state_f=own_step_count)
    until_growth(loop)
    loop.opt.clear_state()
    loop.step()
    assert all(s.growth_state['born']==[] for s in loop.engine.slots)

def test_mask_changed_elsewhere():
    "A young weight that somebody else kills stays dead, with its state"
    loop = Loop(opts['Adam'], 100, grow_state_f=own_step_count)
    until_growth(loop)
    loop.step()
    s = loop.engine.slots[0]
    s.mask.view(-1)[s.growth_state['idx']] = False
    loop.step()
    assert_dead(loop.m, loop.opt)

def test_dense_history():
    "With scores that read momentum of dead weights, young ones are put right and dead ones stay zero; their history is kept"
    loop = Loop(opts['Adam'], **{**SNFS_presets, 'batches_per_update':4}, grow_state_f=own_step_count)
    for _ in range(30):
        loop.step()
        assert_dead(loop.m, loop.opt, state=False)
    assert any(t[~s.mask].any() for s in loop.engine.slots for t in grad_history(loop.opt, s.p)) and any(len(s.growth_state['idx']) for s in loop.engine.slots)

def test_engine_lets_go():
    "A removed engine leaves nothing around the step; another one, without ages, takes over"
    loop = Loop(opts['Adam'], grow_state_f=own_step_count)
    until_growth(loop)
    handlers = [s.handler for s in loop.engine.slots]
    assert all(g.around is not None for g in handlers)
    loop.engine.remove()
    assert all(g.around is None and g.finish is None for g in handlers)
    again = Loop(opts['Adam'], grow_state_f=own_step_count)
    SparseEngine(again.m, again.opt, 40, **SET_presets, batches_per_update=4, seed=0)
    assert all(s.handler.around is None for s in again.engine.slots)

# --- the laws with every option

cares = dict(zero={}, number=dict(grow_init_f=.1), initial=dict(grow_init_f=initial_value), fresh=dict(grow_init_f=fresh_value),
    live=dict(grow_state_f=second_moment_from_live), reset=dict(grow_state_f=reset_state), own=dict(grow_state_f=own_step_count),
    both=dict(grow_init_f=fresh_value, grow_state_f=own_step_count))
fits = [(c,o) for c in cares for o in opts if not (o=='SGD' and c in ('live','own','both') or o=='lookahead' and c not in ('fresh','live','own'))]

@pytest.mark.parametrize('method', presets)
@pytest.mark.parametrize('care,opt', fits)
def test_laws(care, opt, method):
    "Laws 2, 3 and 6: counts stay, dead weights and their state are +0 after every step, and a run that is saved and loaded goes on bit for bit in new objects"
    make = lambda: Loop(opts[opt], **{**presets[method], 'batches_per_update':4}, **cares[care])
    loop = make()
    live = [int(m.sum()) for m in masks_of(loop.m)]
    for t in range(40):
        if t==19:
            box = io.BytesIO()
            torch.save(loop.state(), box)
        was = [o.p.detach().clone() for o in masked_params(loop.m)]
        replaced = loop.step()
        assert_dead(loop.m, loop.opt)
        assert [int(m.sum()) for m in masks_of(loop.m)]==live
        for o,g,w in zip(masked_params(loop.m), loop.grown, was):
            if replaced: assert torch.equal(o.p[o.mask & ~g], w[o.mask & ~g])
            if care in ('zero','own') and replaced: assert not o.p[g].any() and not any(s[g].any() for s in grad_history(loop.opt, o.p))
    torch.manual_seed(99)
    again = make()
    for _ in range(3): again.step()  # whatever was there before
    again.load(torch.load(io.BytesIO(box.getvalue()), weights_only=False))
    for _ in range(19, 40): again.step()
    whole,halves = [flat(o.state()) for o in (loop, again)]
    assert [k for k,_ in whole]==[k for k,_ in halves] and loop.engine.n_updates>=5
    for (k,a),(_,b) in zip(whole, halves): assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a==b, k

def flat(o, at=''):
    if isinstance(o, dict): return [x for k,v in o.items() for x in flat(v, f'{at}/{k}')]
    if isinstance(o, (list,tuple)): return [x for k,v in enumerate(o) for x in flat(v, f'{at}/{k}')]
    return [(at,o)]

def test_state_is_a_snapshot():
    "A state that was taken does not change as the run goes on"
    loop = Loop(opts['Adam'], grow_state_f=own_step_count)
    until_growth(loop)
    state = loop.engine.state_dict()['slots']
    before = copy.deepcopy([o['growth_state'] for o in state])
    for _ in range(20): loop.step()
    assert all(torch.equal(a['idx'], o['growth_state']['idx']) and a['born']==o['growth_state']['born'] for a,o in zip(before, state))

@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1,8), min_size=2, max_size=4), s=st.floats(0,.95), end=st.none()|st.floats(0,.95), f=st.floats(0,1), seed=st.integers(0,50),
    care=st.sampled_from(list(cares)), grow=st.sampled_from([gradient_magnitude, random_score, gradient_momentum, None]), replace=st.booleans(),
    opt=st.sampled_from(['Adam','fastai','lookahead']))
def test_invariants(sizes, s, end, f, seed, care, grow, replace, opt):
    "Any settings: dead is dead, everything stays finite, and notes name live weights"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        settings = dict(grow_score_f=grow, initial_drop_grow_pct=f, stop_pct=1., batches_per_update=2, replace_step=replace, sparsity=end, **cares[care])
        loop = Loop(opts[opt], 20, s, tuple(sizes), seed=seed, **settings)
        for _ in range(10):
            loop.step()
            assert_dead(loop.m, loop.opt, state=not loop.engine.methods[0].dense_history)
            assert all(torch.isfinite(p).all() for p in loop.m.parameters())
            for slot in loop.engine.slots: assert not slot.growth_state or slot.mask.take(slot.growth_state['idx']).all()

@pytest.mark.parametrize('care,opt,match', [(own_step_count, opts['SGD'], 'SGD is not an Adam'), (own_step_count, partial(torch.optim.NAdam, lr=.1), 'NAdam is not an Adam'),
    (own_step_count, partial(fo.RAdam, lr=.1), 'not an Adam'), (own_step_count, partial(fo.SGD, lr=.1), 'not an Adam'), (second_moment_from_live, opts['SGD'], 'SGD keeps no second moment'),
    (second_moment_from_live, partial(fo.SGD, lr=.1, mom=.9), 'no second moment')])
@pytest.mark.parametrize('sparse', [True,False])
def test_refused_at_once(care, opt, match, sparse):
    "Law 10: an optimizer that the option doesn't know is refused when the engine is made, and nothing has changed"
    m = mlp()
    if sparse: sparsify_model(m, .5, seed=0)
    before = copy.deepcopy(m.state_dict())
    with pytest.raises(ValueError, match=match):
        SparseEngine(m, opt(list(m.parameters())), 100, batches_per_update=10, grow_state_f=care, sparsity=None if sparse else .5)
    assert before.keys()==m.state_dict().keys() and all(torch.equal(v, m.state_dict()[k]) for k,v in before.items())

def test_refused_before_an_update():
    "Adamax has betas and no second moment, which shows after its first step: the update is refused before it writes"
    loop = Loop(partial(torch.optim.Adamax, lr=.1), grow_state_f=second_moment_from_live)
    for _ in range(4): loop.step()
    before = masks_of(loop.m)
    with pytest.raises(ValueError, match='Adamax keeps no second moment'): loop.step()
    assert same_masks(before, masks_of(loop.m))

# --- with fastai's callback

class Digits:
    def __init__(self, n): self.x,self.y = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)),torch.arange(n)%3
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

def learner(tmp_path, **kwargs):
    dls = DataLoaders.from_dsets(Digits(64), Digits(16), bs=8, shuffle=False, num_workers=0, device='cpu')
    m = mlp((6,16,3))
    sparsify_model(m, .5, seed=0)
    return Learner(dls, m, loss_func=nn.CrossEntropyLoss(), path=tmp_path, **kwargs)

class Look(Callback):
    order = 100
    def __init__(self): self.young = []
    def after_batch(self):
        if self.training: self.young.append(sum(len(s.growth_state.get('idx', ())) for s in self.learn.dynamic_sparse_training.engine.slots))

def test_fastai_fit(tmp_path):
    "A fit with ages of their own: young weights are noted, dead stay dead, validation changes nothing"
    look = Look()
    learn = learner(tmp_path, cbs=[DynamicSparseTrainingCallback(**{**RigL_presets, 'batches_per_update':3}, seed=0, grow_init_f=fresh_value, grow_state_f=own_step_count), look])
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(3, .01)
    assert max(look.young)>10
    assert_dead(learn.model, learn.opt)
    assert all(handler_of(o.p).around is None for o in masked_params(learn.model))

# --- learning rates of sparse layers

def test_supar_scales_by_hand():
    "Dense fan-in over live fan-in; with a narrower base, the base's fan-in over the live one; a sparse base counts its own"
    m,base = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)),nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert supar_scales(m)=={'0.weight':1, '2.weight':1}
    assert supar_scales(m, base)=={'0.weight':1, '2.weight':1/4}
    sparsify_model(m, .75, seed=0)
    assert supar_scales(m)=={'0.weight':4, '2.weight':4}
    assert supar_scales(m, base)=={'0.weight':4, '2.weight':1}
    sparsify_model(base, .5, seed=0)
    assert supar_scales(m, base)=={'0.weight':2, '2.weight':.5}
    assert supar_scales(m, m)=={'0.weight':1, '2.weight':1}

def test_supar_groups():
    "Every parameter once; weights of layers by their density, biases, norms, embeddings and what is left dense at the base's rate; a step of Adam is as long as its rate"
    m = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1), nn.Linear(8, 2))
    sparsify_model(m, .5, mask_init={'1.weight':torch.eye(8).bool(), '3.weight':torch.eye(8).bool()[...,None], '4.weight':torch.ones(2, 8).bool()})
    groups = supar_groups(m, .5)
    rates = {id(p):g['lr'] for g in groups for p in g['params']}
    assert len(rates)==sum(len(g['params']) for g in groups)==len(list(m.parameters())) and len(groups)==2
    assert {n for n,p in m.named_parameters() if rates[id(p)]==4.}=={'1.weight','3.weight'} and set(rates.values())=={.5,4.}
    opt = torch.optim.Adam(supar_groups(m, .5))
    before = [p.detach().clone() for p in m.parameters()]
    for p in m.parameters(): p.grad = torch.ones_like(p)
    opt.step()
    for b,(n,p) in zip(before, m.named_parameters()): assert torch.allclose((b-p)[p!=0], torch.tensor(rates[id(p)])), n

def test_supar_splitter(tmp_path):
    "A learner's groups are the splitter's, and a fit takes one rate for each"
    learn = learner(tmp_path, splitter=supar_splitter)
    rates = supar_lrs(learn.model, .01)
    assert len(rates)==2 and [r/.01 for r in rates]==[s if i==0 else 1. for i,s in enumerate((2.,1.))]
    learn.create_opt()
    assert [[id(p) for p in ps] for ps in learn.opt.param_lists]==[[id(p) for p in ps] for ps in supar_splitter(learn.model)]
    with learn.no_bar(), learn.no_logging(): learn.fit(1, rates)
    assert learn.opt.hypers.itemgot('lr')==rates
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, rates)

@pytest.mark.parametrize('kwargs,match', [(dict(base=nn.Linear(3, 3)), 'base has no weight called 0.weight'), ({}, '2.weight has no live weights')])
def test_supar_refusals(kwargs, match):
    "A base of another architecture, and a layer without live weights, are refused by name"
    m = mlp((4,4,3))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        sparsify_model(m, .5, mask_init={'0.weight':torch.ones(4, 4).bool(), '2.weight':torch.zeros(3, 4).bool()})
    with pytest.raises(ValueError, match=match): supar_groups(m, .1, **kwargs)

def test_supar_init():
    "Each layer's variance is divided by its density, so that outputs of a sparse layer vary as a dense one's do; dead weights and dense layers are left"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(400, 300, bias=False), nn.Linear(300, 5, bias=False))
    dense = [p.detach().clone() for p in m.parameters()]
    sparsify_model(m, .9, chosen='0.weight', seed=0)
    supar_init_(m)
    mask = m[0].weight_mask
    assert torch.allclose(m[0].weight[mask], dense[0][mask]*math.sqrt(10), rtol=1e-5) and is_positive_zero(m[0].weight[~mask])
    assert torch.equal(m[1].weight, dense[1])
    x = torch.randn(200, 400)
    assert abs((m[0](x).var()/(x@dense[0].T).var()).item()-1)<.1
