"What several test files share: oracles by plain sorting, small models, runs in a loop, and a look at dead bits"
import os, pytest, signal, time, torch, numpy as np, warnings
from contextlib import contextmanager
from torch import nn
from fastsparse.all import *
from fastsparse.weights.find import masked_params

# what the same mathematics may differ by, where kernels sum in another order: one layer and several in float32, and training in float64
in_float,in_float_layers,in_double = [dict(rtol=r, atol=a) for r,a in ((1e-5,1e-5), (1e-4,1e-5), (1e-9,1e-9))]

ints = {1:torch.uint8, 2:torch.int16, 4:torch.int32, 8:torch.int64}

def is_positive_zero(t):
    "Is every entry of `t` exactly `+0.0`, bit for bit?"
    t = t.detach().contiguous()
    return not t.view(ints[t.element_size()]).any().item()

def oracle_order(score, among):
    "Indices of `among`, the highest of `score` first: by a full sort; NaN last, ties to the lowest index"
    s,idx = np.asarray(score).reshape(-1),np.flatnonzero(among)
    v = s[idx].astype(int) if s.dtype==bool else s[idx]
    nan = np.isnan(v)
    return idx[np.lexsort((idx, -np.where(nan, 0, v), nan))]

def numpy_of(t):
    "`t` as a NumPy array; bfloat16 goes through float32, which holds it exactly"
    return t.detach().to(torch.float if t.dtype==torch.bfloat16 else t.dtype).cpu().contiguous().numpy()

def mlp(sizes=(6,8,7,3), seed=0, dtype=torch.float, act=nn.Tanh):
    "A seeded multi-layer perceptron"
    torch.manual_seed(seed)
    layers = [l for a,b in zip(sizes, sizes[1:]) for l in (nn.Linear(a, b, dtype=dtype), act())]
    return nn.Sequential(*layers[:-1])

def data(model, n=16, seed=1):
    "A batch of inputs and targets for `model`"
    g = torch.Generator().manual_seed(seed)
    w = [o for m in model.modules() for k,p in m._parameters.items() if p is not None and (o := m._buffers.get(f'{k}_mask', p)).ndim>1]
    dtype = next(model.parameters()).dtype
    return torch.randn(n, w[0].shape[1], generator=g).to(dtype),torch.randn(n, w[-1].shape[0], generator=g).to(dtype)

def backward(model, xb, yb, scale=1.):
    "Mean squared error and its gradients"
    loss = nn.functional.mse_loss(model(xb), yb)*scale
    loss.backward()
    return loss.detach()

def train(model, opt, n, xb, yb):
    "`n` plain steps"
    for _ in range(n):
        opt.zero_grad()
        backward(model, xb, yb)
        opt.step()

def push(model, *grads):
    "Gradients by hand, through a backward: one for each masked parameter, None for one that takes no part"
    ps = [o.p for o in masked_params(model)]
    for p in ps: p.grad = None
    sum((p*torch.as_tensor(g).to(p.dtype).reshape(p.shape)).sum() for p,g in zip(ps, grads) if g is not None).backward()

def engine(m, opt, n_steps=100, every=2, **kwargs):
    "A `DynamicSparseTraining` that doesn't warn about runs without updates"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return DynamicSparseTraining(m, opt, n_steps, **{'batches_per_update':every, 'seed':0, **kwargs})

def step(dst, *grads):
    "One step of an engine with gradients by hand"
    push(dst.model, *grads)
    dst.step()

def two_layers(s=.5, sizes=(10,10,10), opt='SGD', **kwargs):
    "A model of layers of 100 weights, an optimizer and a batch"
    m = mlp(sizes)
    sparsify_model(m, s, seed=0)
    return m,getattr(torch.optim, opt)(m.parameters(), **{**dict(lr=.1), **(dict(momentum=.9) if opt=='SGD' else {}), **kwargs}),data(m)

def spin(dst, n): train(dst.model, dst.opt, n, *data(dst.model))

def settings_of_run(engine):
    "The settings of an engine's first method, as text"
    return engine.state_dict()['methods'][0]['settings']

second_moments = 'sqr_avg','exp_avg_sq','max_exp_avg_sq','square_avg','sum'

def named_states(opt, p):
    "Every tensor that `opt`, or an optimizer inside it, keeps for the single weights of `p`, with its name"
    found = []
    if vars(opt).get('slow_weights') is not None: found += [('slow',s) for ss,ps in zip(opt.slow_weights, opt.param_lists) for s,q in zip(ss, ps) if q is p]
    while 'opt' in vars(opt): opt = opt.opt
    return found+[(k,v) for k,v in opt.state.get(p, {}).items() if isinstance(v, torch.Tensor) and v.shape==p.shape]

def states(opt, p): return [t for _,t in named_states(opt, p)]

def assert_dead(model, opt=None, state=True):
    "Law 3: dead weights, and optimizer state at their places, are exactly `+0.0`; a second moment is at most 1.2e-30"
    os = masked_params(model)
    assert os
    for o in os:
        assert is_positive_zero(o.p[~o.mask]), f'{o.name}: a dead weight is not +0'
        for k,t in (named_states(opt, o.p) if opt is not None and state else []):
            if t.shape!=o.mask.shape: continue
            dead = t[~o.mask]
            if k in second_moments: dead = dead.where((dead<0)|(dead>1.2e-30)|dead.isnan(), 0.)
            assert is_positive_zero(dead), f'{o.name}: {k} of a dead weight'

def for_drawn(check, n):
    "Call `check` with `n` seeds: the first ones, or with `FASTSPARSE_EXPLORE` those of this day"
    begin = 10_000*int(time.strftime('%Y%m%d') if os.environ.get('FASTSPARSE_EXPLORE') else 0)
    for seed in range(begin, begin+n):
        try: check(seed)
        except BaseException as e:
            e.add_note(f'with seed {seed}')
            raise

def masks_of(model): return [o.mask.clone() for o in masked_params(model)]
def same_masks(a, b): return len(a)==len(b) and all(torch.equal(x.cpu(), y.cpu()) for x,y in zip(a, b))
def live(model): return [int(o.mask.sum()) for o in masked_params(model)]
def snapshot(model): return {k:v.clone() for k,v in model.state_dict().items()}

def warned(f, *args, **kwargs):
    "The texts of all warnings that `f` gives"
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        f(*args, **kwargs)
    return [str(w.message) for w in ws]

def by_hand(p_value, mask, grad=None, opt_f=None, **kwargs):
    "A one-row `Linear` without bias with given weights and mask, and an optimizer for it"
    m = nn.Linear(len(p_value), 1, bias=False)
    with torch.no_grad(): m.weight.copy_(torch.tensor([p_value]))
    m.register_buffer('weight_mask', torch.tensor([mask], dtype=torch.bool))
    opt = (opt_f or torch.optim.SGD)(m.parameters(), **(kwargs or dict(lr=.1)))
    if grad is not None: m.weight.grad = torch.tensor([grad])
    return m,opt

def agree(a, b):
    "Are two nested states equal, bit for bit?"
    if isinstance(a, torch.Tensor): return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict): return a.keys()==b.keys() and all(agree(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(agree, a, b))
    return a==b

@contextmanager
def full_disk(n):
    "No file can have more than `n` bytes; skips where the system has no such limit"
    resource = pytest.importorskip('resource')
    (soft,hard),old = resource.getrlimit(resource.RLIMIT_FSIZE),signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n,hard))
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft,hard))
        signal.signal(signal.SIGXFSZ, old)

# --- live weights, by what users see; `places_of` and `is_live` alone know how they are stored

def is_live(t):
    "Does a tensor store live values only?"
    from fastsparse.live.tensor import LiveTensor
    return isinstance(t, LiveTensor)

def places_of(p): return p.cell.index.places

def dense_of(t):
    "A plain tensor with what `t` holds, of whatever kind it is"
    with torch.no_grad(): return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())

def go_live(m, opt=None, *names):
    "Store the weights of `names`, all that have masks if none is named, by their live values; the report"
    report = sparse_compute(m, None, opt, plan={o.name:'rows' for o in masked_params(m) if not names or o.name in names})
    assert all(is_live(o.p) for o in masked_params(m) if not names or o.name in names)
    return report

def assert_index_fits(m):
    "Live values stand at the places of the mask, and a dense reading has zeros elsewhere"
    for o in masked_params(m):
        if not is_live(o.p): continue
        d = dense_of(o.p)
        assert places_of(o.p).equal(o.mask.flatten().nonzero()[:,0]), o.name
        assert is_positive_zero(d[~o.mask]) and d.shape==o.mask.shape, o.name
