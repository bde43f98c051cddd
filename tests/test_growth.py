"Where grown weights start, and what the optimizer makes of them"
import copy, fastai.optimizer as fo, io, numpy as np, pytest, torch
from fastai.callback.schedule import *
from fastsparse.all import *
from fastsparse.core.optimizers import opt_state
from fastsparse.masks.selection import keyed_generator
from fastsparse.train.growth import fresh_value,given_value,initial_value,reset_state
from functools import partial
from helpers import *
from torch import nn

opts = dict(SGD=partial(torch.optim.SGD, lr=.03, momentum=.9), Adam=partial(torch.optim.Adam, lr=.03), fastai=partial(fo.Adam, lr=.03),
    lookahead=lambda ps: fo.Lookahead(fo.Adam(ps, lr=.03), k=3))

class Loop:
    "The engine in a plain loop, for torch's optimizers and fastai's: a batch a step, which depends on the step only"
    def __init__(self, opt, n_steps=40, s=.7, sizes=(6,12,9,3), dtype=torch.float, seed=5, sparse=True, **kwargs):
        self.m = mlp(sizes, seed=4, dtype=dtype)
        if sparse: sparsify_model(self.m, s, erdos_renyi_sparsity, sparse_init_mode=None, seed=seed)
        else: kwargs.update(sparsity=s)
        self.opt,self.t,self.new = opt(list(self.m.parameters())),0,{}
        self.engine = SparseEngine(self.m, self.opt, n_steps, **{**SET_presets, 'batches_per_update':4, 'seed':seed, **kwargs})

    def step(self, grads=None):
        "Was the step replaced?"
        self.engine.prepare(self.t)
        self.opt.zero_grad()
        if grads is None: backward(self.m, *data(self.m, seed=100+self.t))
        else: push(self.m, *grads)
        before = masks_of(self.m)
        replaced = self.engine.before_step(self.t)
        self.grown = [a & ~b for a,b in zip(masks_of(self.m), before)]
        if not replaced: self.opt.step()
        self.engine.after_step()
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
    push(m, [1.,50.,1.,1.,9.,-7.,2.,3.])
    assert engine.before_step(10)
    assert m.weight_mask.tolist()==[[True,True,True,False,True,False,False,False]]
    assert torch.allclose(m.weight, torch.tensor([[4.,-.1,3.,0.,14. if expect is None else expect,0.,0.,0.]]))
    assert_dead(m, opt)

@pytest.mark.parametrize('f', [initial_value, lambda p, initial: initial], ids=['initial_value','by its name'])
@pytest.mark.parametrize('sparse', [False,True])
@pytest.mark.parametrize('opt', ['SGD','fastai'])
def test_initial_value(sparse, opt, f):
    "A model that the engine makes sparse remembers its dense values: those dead from the start return to them too, not to the zeros that masks left"
    dense = [l.weight.detach().clone() for l in mlp((6,12,9,3), seed=4) if isinstance(l, nn.Linear)]
    loop = Loop(opts[opt], sparse=sparse, grow_init_f=f)
    start = [d*o.mask if sparse else d for d,o in zip(dense, masked_params(loop.m))]
    for _ in range(3):
        until_growth(loop)
        for o,g,s in zip(masked_params(loop.m), loop.grown, start): assert torch.equal(o.p[g], s[g])
    if not sparse: assert all((s[g]!=0).all() for g,s in zip(loop.grown, start))

def test_gone_initial_values_are_said():
    "Dead weights are zero already when `sparsify_model` was first, so a return to the start starts at zero: one warning when the engine is made, and none where nothing is lost"
    def said(**kwargs): return [o for o in warned(Loop, opts['SGD'], **kwargs) if 'initial values' in o]
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
        assert agree(before, (loop.m.state_dict(), loop.opt.state_dict()))

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

# --- resets

@pytest.mark.parametrize('opt', ['SGD','Adam','fastai'])
def test_reset_state(opt):
    "All history of a parameter is zero, its tensors are the same, and the step count stays"
    loop = Loop(opts[opt], grow_state_f=reset_state)
    for _ in range(4): loop.step()
    held = {o.name:[(t, t.clone()) for t in states(loop.opt, o.p)] for o in masked_params(loop.m)}
    p = loop.m[0].weight
    assert all(torch.equal(t, was) and was.any() for t,was in held['0.weight'])
    until_growth(loop)
    for ts in held.values(): assert ts and all(is_positive_zero(t) for t,_ in ts)
    assert opt=='SGD' or opt_state(loop.opt, p)['step']==4
    bias = loop.m[0].bias
    reset_state(bias, loop.opt)
    assert states(loop.opt, bias) and not any(t.any() for t in states(loop.opt, bias))

def test_grown_start_in_lookahead():
    "The slow copy of a grown weight starts where the weight does, and does not pull it to zero"
    loop = Loop(opts['lookahead'], grow_init_f=.5)
    until_growth(loop)
    for o,g in zip(masked_params(loop.m), loop.grown): assert all(torch.equal(t[g], o.p[g]) for t in states(loop.opt, o.p)[:1])

# --- the laws with every option

cares = dict(zero={}, number=dict(grow_init_f=.1), initial=dict(grow_init_f=initial_value), fresh=dict(grow_init_f=fresh_value),
    reset=dict(grow_state_f=reset_state))
fits = [(c,o,i%2) for i,(c,o) in enumerate((c,o) for c in cares for o in opts if o!='lookahead' or c=='fresh')]

@pytest.mark.parametrize('care,opt,rigl', fits)
def test_laws(care, opt, rigl):
    "Laws 2, 3 and 6: counts stay, dead weights and their state are +0 after every step, and a run that is saved and loaded goes on bit for bit in new objects"
    make = lambda: Loop(opts[opt], n_steps=20, **{**(RigL_presets if rigl else SET_presets), 'batches_per_update':2}, **cares[care])
    loop = make()
    n = live(loop.m)
    for t in range(16):
        if t==9:
            box = io.BytesIO()
            torch.save(loop.state(), box)
        was = [o.p.detach().clone() for o in masked_params(loop.m)]
        replaced = loop.step()
        assert_dead(loop.m, loop.opt)
        assert live(loop.m)==n
        for o,g,w in zip(masked_params(loop.m), loop.grown, was):
            if replaced: assert torch.equal(o.p[o.mask & ~g], w[o.mask & ~g])
            if care in ('zero','own') and replaced: assert not o.p[g].any() and not any(s[g].any() for s in states(loop.opt, o.p))
    torch.manual_seed(99)
    again = make()
    for _ in range(3): again.step()  # whatever was there before
    again.load(torch.load(io.BytesIO(box.getvalue()), weights_only=False))
    for _ in range(9, 16): again.step()
    assert agree(loop.state(), again.state()) and loop.engine.n_updates>=5

def flat(o, at=''):
    if isinstance(o, dict): return [x for k,v in o.items() for x in flat(v, f'{at}/{k}')]
    if isinstance(o, (list,tuple)): return [x for k,v in enumerate(o) for x in flat(v, f'{at}/{k}')]
    return [(at,o)]

