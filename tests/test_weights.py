"A weight as others see it: whoever reads, writes, copies, averages or steps a masked or a live weight meets the dense weight, with zeros where it is dead"
import copy,io,math,pickle,pytest,warnings
from fastai.optimizer import Adam,Lamb,Larc,Lookahead,OptimWrapper,QHAdam,RAdam,RMSProp,SGD,ranger
from fastcore.imports import noop
from fastsparse.all import *
from fastsparse.masks.selection import zero_dead_
from fastsparse.weights.gradient import mask_grad_
from fastsparse.weights import guard
from fastsparse.weights.hooks import enforce_masks
from functools import partial
from helpers import *
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_,clip_grad_value_,parameters_to_vector,vector_to_parameters
from torch.optim.swa_utils import AveragedModel

t = torch.optim
optimizers = dict(sgd=lambda ps: t.SGD(ps, lr=.1, momentum=.9, weight_decay=.01), adam=lambda ps: t.Adam(ps, lr=.01), adamw=lambda ps: t.AdamW(ps, lr=.01,
    weight_decay=.1), rmsprop=lambda ps: t.RMSprop(ps, lr=.01), adagrad=lambda ps: t.Adagrad(ps, lr=.01), nadam=lambda ps: t.NAdam(ps, lr=.01),
    fused=lambda ps: t.AdamW(ps, lr=.01, fused=True), fastai_sgd=lambda ps: SGD(ps, lr=.05, mom=.9, wd=.01), fastai_adam=lambda ps: Adam(ps, lr=.01, wd=.01),
    lookahead=lambda ps: Lookahead(SGD(ps, lr=.05, mom=.9), k=2))
plan = {'0.weight':'rows', '2.weight':'rows'}

def started(kind, opt='adam', sparsity=.7):
    "Model, optimizer and masks: masked, on live weights, or dense with masks that the test keeps by hand"
    m = mlp((12,32,4), dtype=torch.double)
    sparsify_model(m, sparsity, seed=0)
    masks = masks_of(m)
    if kind=='by hand': unsparsify(m)
    opt = optimizers[opt](list(m.parameters()))
    if kind=='live': sparse_compute(m, None, opt, plan=plan)
    return m,opt,masks

def batch(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 12, generator=g).double(),torch.randn(8, 4, generator=g).double()

def weights(m): return [m[0].weight,m[2].weight]

@torch.no_grad()
def zero(ts, masks):
    for o,mask in zip(ts, masks): o.masked_fill_(~mask, 0)

def step(m, opt, i, masks=None, loss=lambda m: 0., grads=lambda m: None):
    "One step; with `masks`, they are kept by hand"
    x,y = batch(i)
    opt.zero_grad()
    (F.mse_loss(m(x), y)+loss(m)).backward()
    if masks: zero([p.grad for p in weights(m)], masks)
    grads(m)
    if masks: zero([p.grad for p in weights(m)], masks)
    opt.step()
    if masks: zero(weights(m), masks)

# --- what is done to weights and gradients

def like(p, seed=0): return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
def each(f):
    @torch.no_grad()
    def _f(m):
        for p in m.parameters(): f(p)
    return _f

def as_file(m, legacy=False):
    torch.save(m, f := io.BytesIO(), _use_new_zipfile_serialization=not legacy)
    f.seek(0)
    return torch.load(f, weights_only=False)

def pickled(m): return pickle.loads(pickle.dumps(m))
def load(m, **kwargs): m.load_state_dict({**m.state_dict(), **{k:like(v) for k,v in m.state_dict().items() if k.endswith('weight')}}, **kwargs)
def set_grad(p): p.grad = like(p)
def set_grad_data(p): p.grad.data = like(p)
def set_data(p): p.data = like(p)
@torch.no_grad()
def from_vector(m): vector_to_parameters(like(parameters_to_vector(m.parameters())), m.parameters())

losses = dict(l1=lambda m: .01*sum(p.abs().sum() for p in m.parameters()), mean=lambda m: m[0].weight.abs().mean(),
    product=lambda m: (m[0].weight*1).square().sum()/9,
    rows=lambda m: (m[0].weight.square().sum(1)+1e-3).sqrt().mean(), read=lambda m: F.linear(batch(9)[0], m[0].weight).square().mean())
gradients = dict(clip=lambda m: clip_grad_norm_(m.parameters(), .1), clip_value=lambda m: clip_grad_value_(m.parameters(), .01),
    halved=each(lambda p: p.grad.div_(2)),
    noise=each(lambda p: p.grad.add_(like(p))), data_noise=each(lambda p: p.grad.data.add_(like(p))), new=each(set_grad), new_data=each(set_grad_data))
between = dict(nothing=lambda m: None, halved=each(lambda p: p.data.mul_(.5)), copied=each(lambda p: p.copy_(like(p))),
    drawn=each(lambda p: nn.init.uniform_(p, .1, 1)),
    new_data=each(set_data), vector=from_vector, loaded=load, cast=lambda m: m.float().double(), deepcopy=copy.deepcopy, pickle=pickled, file=as_file,
    shadow=each(lambda p: p.data.copy_(p.detach().clone().mul_(.9))), lerp=each(lambda p: p.data.lerp_(torch.zeros(p.shape).double(), .1)))
operations = [(where,name) for where in ('losses','gradients','between') for name in globals()[where]]

def operated(kind, where, name, opt):
    "Four steps with an operation in each, or once after two"
    f = globals()[where][name]
    m,o,masks = started(kind, opt)
    masks = masks if kind=='by hand' else None
    for i in range(4):
        if i==2 and where=='between':
            new = f(m)
            if masks: zero(weights(m), masks)
            if isinstance(new, nn.Module) and new is not m: m,o = new,optimizers[opt](list(new.parameters()))
        step(m, o, i, masks, **{'losses':dict(loss=f), 'gradients':dict(grads=f)}.get(where, {}))
    return m

def product(*tables):
    "Every row"
    rows = [()]
    for o in tables: rows = [(*a, *(b if isinstance(b, tuple) else (b,))) for a in rows for b in o]
    return rows

@pytest.mark.parametrize('kind,where,name,opt', [o for o in product(('masked','live'), operations, optimizers) if (o[0],o[-1])!=('live','lookahead')])
def test_a_sparse_weight_trains_as_a_dense_one_whose_masks_are_kept_by_hand(kind, where, name, opt):
    m,hand = operated(kind, where, name, opt),operated('by hand', where, name, opt)
    for p,q,mask in zip(weights(m), weights(hand), [o.mask for o in masked_params(m)]):
        assert p.shape==q.shape and is_positive_zero((p*1)[~mask])
        torch.testing.assert_close(p*1, q*1, rtol=0, atol=1e-10 if kind=='live' else 0)

reads = dict(detach=lambda m,o: [p.detach() for p in weights(m)], times=lambda m,o: [p*1 for p in weights(m)], sums=lambda m,o: [p.sum(1) for p in weights(m)],
    norm=lambda m,o: [p.norm() for p in m.parameters()], state=lambda m,o: [v for k,v in m.state_dict().items() if 'weight_' not in k],
    data=lambda m,o: [p.data+0 for p in weights(m)], vector=lambda m,o: [parameters_to_vector(m.parameters())],
    numpy=lambda m,o: [torch.tensor(p.detach().numpy()) for p in weights(m)], product=lambda m,o: [F.linear(batch(9)[0], m[0].weight)],
    values=lambda m,o: [torch.linalg.svdvals(m[0].weight)], named=lambda m,o: [p*1 for _,p in m.named_parameters()],
    own=lambda m,o: [m[0].weight[3], m[0].weight.mT.contiguous()],
    memory=lambda m,o: [v for s in o.state_dict()['state'].values() for v in s.values() if isinstance(v, torch.Tensor)])

@pytest.mark.parametrize('kind,read', product(('masked','live'), reads))
def test_what_is_read_is_the_dense_weight(kind, read):
    (m,o,_),(hand,q,masks) = started(kind),started('by hand')
    for i in range(2): step(m, o, i), step(hand, q, i, masks)
    for a,b in zip(reads[read](m, o), reads[read](hand, q), strict=True): torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

@pytest.mark.parametrize('method', ['rigl','set','static'])
@pytest.mark.parametrize('kind', ['masked', 'live'])
def test_gradients_are_masked_after_every_backward(kind, method):
    "Clipping and norms see live gradients only, also in the step of an update"
    m,o,_ = started(kind)
    DynamicSparseTraining(m, o, 24, method=method, **({} if method=='static' else dict(batches_per_update=3)), seed=0)
    def look(m):
        for w in masked_params(m): assert w.p.grad.shape==w.mask.shape and is_positive_zero(w.p.grad[~w.mask])
    for i in range(12): step(m, o, i, grads=look)

# --- dead is dead (law 3), with every optimizer

others = dict(SGD_nesterov=dict(lr=.05, momentum=.9, nesterov=True),
    SGD_max=dict(lr=.01, momentum=.9, maximize=True), Adam_amsgrad=dict(lr=.01, amsgrad=True), Adam_eps0=dict(lr=.01, eps=0.),
    AdamW_foreach=dict(lr=.01, foreach=True), RAdam=dict(lr=.01), Adamax=dict(lr=.01), RMSprop_centered=dict(lr=.01, momentum=.9, centered=True),
    Adagrad_init=dict(lr=.05, initial_accumulator_value=.3), Adadelta=dict(lr=1.), ASGD=dict(lr=.05, t0=2), Rprop=dict(lr=.01), Adafactor=dict(lr=.05),
    Muon=dict(lr=.02))

def torch_opt(name):
    "The optimizer of torch before the underscore, with the settings in `others`"
    make = getattr(t, name.split('_')[0])
    return lambda ps: make([p for p in ps if p.ndim==2] if name=='Muon' else ps, **others[name])

zoo = {**{k:torch_opt(k) for k in others}, **optimizers}
zoo |= dict(fastai_plain=partial(SGD, lr=.05), fastai_l2=partial(SGD, lr=.05, mom=.9, wd=.1, decouple_wd=False),
    fastai_RMSProp=partial(RMSProp, lr=.01, mom=.9), fastai_RAdam=partial(RAdam, lr=.01), QHAdam=partial(QHAdam, lr=.01), Larc=partial(Larc, lr=.05, wd=.1),
    Lamb=partial(Lamb, lr=.01, wd=.1), ranger=partial(ranger, lr=.01), wrapped=lambda ps: OptimWrapper(ps, t.AdamW, lr=.01),
    wrapped_muon=lambda ps: OptimWrapper([p for p in ps if p.ndim==2], t.Muon, lr=.02),
    lookahead_wrapped=lambda ps: Lookahead(OptimWrapper(ps, t.SGD, lr=.05, momentum=.9), k=2))

def stays_dead(m, opt, n=5, loss=lambda m: backward(m, *data(m))):
    "Dead weights, their gradients and their state are zero in each of `n` steps, and live ones move"
    before = [o.p.detach().clone() for o in masked_params(m)]
    for _ in range(n):
        opt.zero_grad()
        loss(m)
        for o in masked_params(m): assert is_positive_zero(o.p.grad[~o.mask]), f'{o.name}: clipping would see the gradient of a dead weight'
        opt.step()
        assert_dead(m, opt)
    assert all((was!=o.p)[o.mask].any() for was,o in zip(before, masked_params(m)))

@pytest.mark.parametrize('dense_before', [False,True])
@pytest.mark.parametrize('name', zoo)
def test_dead_is_dead_with_any_optimizer(name, dense_before):
    "Without an engine; also when the model was trained dense, with momentum, before"
    m = mlp()
    opt = zoo[name](list(m.parameters()))
    if dense_before: train(m, opt, 3, *data(m))
    sparsify_model(m, .6, seed=0, mask_init='magnitude')
    stays_dead(m, opt, 7)

@pytest.mark.parametrize('bad', [math.nan,math.inf])
@pytest.mark.parametrize('opt', ['sgd','adam','fastai_sgd'])
def test_what_is_not_finite_ends_at_a_dead_place(opt, bad):
    "`grad*mask` keeps NaN; that of a live weight is the user's to see; no backward is needed"
    m,o,_ = started('masked', opt)
    for w in masked_params(m): w.p.grad = torch.where(w.mask, 1., bad).double()
    o.step()
    assert_dead(m, o)
    assert all(w.p.isfinite().all() for w in masked_params(m))
    m[0].weight.grad = torch.where(m[0].weight_mask, math.nan, 0.).double()
    o.step()
    assert m[0].weight[m[0].weight_mask].isnan().all() and is_positive_zero(m[0].weight[~m[0].weight_mask])

def test_hooks_that_spoil_a_dead_gradient_do_no_harm():
    m,o,_ = started('masked', 'sgd')
    for w in masked_params(m): w.p.register_hook(lambda g, mask=w.mask: g.masked_fill(~mask, math.nan))
    stays_dead(m, o)

@pytest.mark.parametrize('dtype', [torch.float,torch.double,torch.half,torch.bfloat16])
def test_large_gradients_are_masked_as_small_ones(dtype, monkeypatch):
    "Law 3: a kernel, in two threads too, leaves the bits that `zero_dead_` leaves, and autograd sees the write"
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    mask = torch.rand(1030, 1025)<.1
    grad = torch.randn(1030, 1025).to(dtype)
    grad.view(-1)[:4] = torch.tensor([math.nan,-1.,-0.,math.inf])
    mask.view(-1)[:4] = False
    expect,version = zero_dead_(grad.clone(), mask),grad._version
    assert mask_grad_(grad, mask) is grad and grad._version>version
    ints = {2:torch.int16, 4:torch.int32, 8:torch.int64}[grad.element_size()]
    assert grad.view(ints).equal(expect.view(ints))

def test_a_compiled_backward_masks_large_gradients_in_silence():
    m = nn.Linear(600, 600)
    sparsify_model(m, .9, seed=0)
    @torch.compile(backend='eager')
    def backward(x): m(x).sum().backward()
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.filterwarnings('error', message='Dynamo detected')
        backward(torch.randn(8, 600))
    assert m.weight.grad.ne(0).equal(m.weight_mask)

@pytest.mark.parametrize('to_none', [True,False])
def test_gradients_that_accumulate_are_masked(to_none):
    m,o,_ = started('masked', 'sgd')
    for _ in range(3):
        for _ in range(2):
            backward(m, *data(m))
            assert all(is_positive_zero(w.p.grad[~w.mask]) for w in masked_params(m))
        o.step()
        assert_dead(m, o)
        o.zero_grad(set_to_none=to_none)

@pytest.mark.parametrize('dtype', [torch.double, torch.bfloat16, 'autocast'])
def test_other_types_of_number(dtype):
    m = mlp()
    sparsify_model(m, .6, seed=0)
    if dtype=='autocast':
        def loss(m):
            with torch.autocast('cpu', torch.bfloat16): backward(m, *data(m))
        stays_dead(m, t.SGD(m.parameters(), lr=.1, momentum=.9), loss=loss)
    else: stays_dead(m.to(dtype), t.Adam(m.parameters(), lr=.01))

@pytest.mark.parametrize('opt_f', [partial(t.SGD, lr=.1, momentum=.9), partial(t.Adam, lr=.01), partial(t.Adamax, lr=.01)])
def test_channels_last(opt_f):
    "Weights, masks and gradients that are not contiguous: the masks and weights of a contiguous run"
    def run(layout, late):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3,8,3), nn.ReLU(), nn.Conv2d(8,8,3))
        if not late: m = m.to(memory_format=layout)
        sparsify_model(m, .7, seed=3)
        m = m.to(memory_format=layout)
        opt,xb = opt_f(m.parameters()),torch.randn(2,3,8,8).to(memory_format=layout)
        stays_dead(m, opt, 4, lambda m: m(xb).square().mean().backward())
        return m
    ref = run(torch.contiguous_format, False)
    for m in (run(torch.channels_last, False), run(torch.channels_last, True)):
        assert not m[2].weight.is_contiguous() and same_masks(masks_of(ref), masks_of(m))
        assert all(torch.allclose(p, q, atol=1e-5) for p,q in zip(ref.parameters(), m.parameters()))

# --- who else takes the weights

@pytest.mark.parametrize('kind', ['masked','live'])
def test_functional_call(kind):
    "Tensors that are given are used as they are and left as they were, zeros or not; gradients by parameter are the dense model's"
    m,_,_ = started(kind)
    teacher,(x,y) = mlp((12,32,4), seed=7, dtype=torch.double),batch(0)
    was = [p.detach().clone() for p in teacher.parameters()]
    for f in (lambda p: p, lambda p: p.detach().clone(), lambda p: p*1.):
        torch.testing.assert_close(functional_call(m, {k:f(p) for k,p in teacher.named_parameters()}, x), teacher(x))
    assert all(map(torch.equal, was, teacher.parameters()))
    grads = torch.func.grad(lambda ps: F.mse_loss(functional_call(m, ps, x), y))({k:p.detach() for k,p in teacher.named_parameters()})
    F.mse_loss(teacher(x), y).backward()
    for k,p in teacher.named_parameters(): torch.testing.assert_close(grads[k], p.grad)
    torch.testing.assert_close(functional_call(m, dict(m.named_parameters()), x), m(x))

# --- what stands in the place of another

class Tasks(nn.Module):
    "A model with a loss of its own, and weights that no module's forward multiplies: in attention's `out_proj`, in an LSTM, tied, in `F.linear`"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.attend,self.recur,self.head = nn.MultiheadAttention(8, 2, batch_first=True),nn.LSTM(8, 8, batch_first=True),nn.Linear(8, 6)
        self.again = nn.Linear(8, 6, bias=False)
        self.again.weight = self.head.weight

    def forward(self, x): return self.again(self.head(self.recur(self.attend(*[self.body(x)]*3)[0])[0]).tanh()[...,:2].repeat(1, 1, 4))

    def loss(self, x):
        h = self.body(x)
        h = self.recur(self.attend(h, h, h)[0])[0]
        return (F.linear(h, self.head.weight)+self.again(h)).square().mean()

def tasks():
    m = Tasks()
    sparsify_model(m, .6, 'uniform', seed=0)
    return m

def by_parts(m, x):
    h = m.body[2](m.body[1](m.body[0](x)))
    return (m.head(m.recur(m.attend(h, h, h)[0])[0])+m.again(h)).square().mean()

x3 = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
used_by = dict(forward=lambda m: m(x3).square().mean().backward(), parts=lambda m: by_parts(m, x3).backward(), method=lambda m: m.loss(x3).backward())

def of_parts(m):
    "Each part copied by itself, tied ones together"
    new = copy.copy(m)
    new._modules = dict(zip(m._modules, [copy.deepcopy(m.body), pickled(m.attend), as_file(m.recur), *copy.deepcopy([m.head, m.again])]))
    return new

copied_by = dict(original=lambda m: m, deepcopy=copy.deepcopy, pickle=pickled, file=as_file, legacy_file=partial(as_file, legacy=True),
    again=lambda m: copy.deepcopy(pickled(copy.deepcopy(m))),
    inside=lambda m: copy.deepcopy([nn.ModuleDict(dict(m=m)), m])[0]['m'], average=lambda m: AveragedModel(m).module, by_parts=of_parts)

def _swapped_by_torch(m):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try: m.double().float()
    finally: torch.__future__.set_swap_module_params_on_conversion(False)

def _same_place(m):
    "New data until its storage lies where the old one lay"
    p = m.body[0].weight
    for _ in range(50):
        at,p.data = p.data_ptr(),torch.ones(8, 6)
        if p.data_ptr()==at: return

def _emptied(m):
    m.body[0].to_empty(device='cpu').reset_parameters()
    m.body[0].weight_mask.copy_(torch.rand(8, 6)<.4)

@torch.no_grad()
def _drawn(m): nn.init.ones_(m.body[0].weight)
def _mask_data(m): m.body[0].weight_mask.data = m.body[0].weight_mask.flip(0)

def _assign(m): m.body.load_state_dict({k:torch.ones_like(v) if k.endswith('weight') else v for k,v in m.body.state_dict().items()}, assign=True)
def _parameter(m): m.body[0].weight = nn.Parameter(torch.ones(8, 6))
def _data(m): m.body[0].weight.data = torch.ones(8, 6)

replaced = dict(assign=_assign, parameter=_parameter, data=_data, same_place=_same_place, drawn=_drawn,
    new_mask=lambda m: m.body[0].register_buffer('weight_mask', m.body[0].weight_mask.flip(0)),
    written_mask=lambda m: m.body[0].weight_mask.copy_(m.body[0].weight_mask.flip(0)), mask_data=_mask_data, dtype=lambda m: m.double().float(),
    swap=lambda m: torch.utils.swap_tensors(m.body[0].weight, nn.Parameter(torch.ones(8, 6))), swap_by_torch=_swapped_by_torch,
    share=lambda m: m.share_memory(), empty=_emptied)
replaced['mask_by_data'] = lambda m: m.body[0].weight_mask.data.copy_(m.body[0].weight_mask.flip(0))

@pytest.mark.parametrize('copied', ['original','deepcopy'])
@pytest.mark.parametrize('when', ['before','after'])
@pytest.mark.parametrize('name', replaced)
def test_what_is_put_in_the_place_of_another_is_followed(name, when, copied):
    "A weight, a mask or a parameter, between backward and step too: at the next forward dead weights are zero, and so they stay"
    m = copied_by[copied](tasks())
    if when=='after': used_by['method'](m)
    m.zero_grad()
    replaced[name](m)
    opt = optimizers['sgd'](m.parameters())
    used_by['parts'](m)
    opt.step()
    m(x3)
    assert_dead(m, opt)
    stays_dead(m, opt, 3, used_by['method'])
    if copied=='original':
        m.zero_grad()
        replaced[name](m)
        m.eval()(x3)
        assert_dead(m)

@pytest.mark.parametrize('kind', ['masked', 'live'])
def test_a_load_is_masked_at_once(kind):
    "A compiled model runs no hook before its forward"
    m,*_ = started(kind)
    load(m)
    assert all(is_positive_zero((o.p*1)[~o.mask]) and o.p.count_nonzero()==o.mask.sum() for o in masked_params(m))

def masked_by_hand(m):
    "A dense copy, whose weights are multiplied by the masks"
    masks,plain = {o.name:o.mask for o in masked_params(m)},plain_copy(m)
    return plain,{n:p*masks[n] if n in masks else p for n,p in plain.named_parameters()}

@pytest.mark.parametrize('penalty', [lambda gs: sum(g.square().sum() for g in gs), lambda gs: sum((g+1).pow(3).sum() for g in gs)])
def test_a_gradient_that_is_differentiated_is_that_of_live_weights(penalty):
    "A penalty on gradients, by `autograd.grad` or by `backward(create_graph=True)`, is that of masks by hand, and so is its gradient"
    for how in ('grad','backward'):
        m,(x,y) = mlp(),data(mlp())
        sparsify_model(m, .6, seed=0)
        plain,ws = masked_by_hand(m)
        masks = {o.name:o.mask for o in masked_params(m)}
        want = torch.autograd.grad(F.mse_loss(functional_call(plain, ws, x), y), list(plain.parameters()), create_graph=True)
        penalty(want).backward()
        loss = F.mse_loss(m(x), y)
        if how=='grad': got = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        else:
            loss.backward(create_graph=True)
            got = [p.grad for p in m.parameters()]
            m.zero_grad()
        torch.testing.assert_close(got, want)
        penalty(got).backward()
        for (n,a),b in zip(m.named_parameters(), plain.parameters()): torch.testing.assert_close(a.grad, b.grad*masks.get(n, 1))

def test_an_inner_loop_that_is_differentiated_stays_sparse():
    "As in MAML with one step"
    m,(x,y) = mlp(),data(mlp())
    sparsify_model(m, .6, seed=0)
    gs = torch.autograd.grad(F.mse_loss(m(x), y), list(m.parameters()), create_graph=True)
    fast = {n:p-.1*g for (n,p),g in zip(m.named_parameters(), gs)}
    assert not any(fast[o.name][~o.mask].any() for o in masked_params(m))

class Wrapping(t.Optimizer):
    "An optimizer around another one without torch's own `__init__`, as timm's Lookahead"
    def __init__(self, inside):
        self._optimizer_step_pre_hooks,self._optimizer_step_post_hooks = {},{}
        self.inside,self.param_groups,self.defaults,self.state = inside,inside.param_groups,inside.defaults,inside.state
        self.slow = [p.detach().clone() for g in self.param_groups for p in g['params']]
        self._patch_step_function()

    def state_dict(self): return self.inside.state_dict()

    @torch.no_grad()
    def step(self):
        self.inside.step()
        for s,p in zip(self.slow, [p for g in self.param_groups for p in g['params']]): p.copy_(s.lerp_(p, .5))

@pytest.mark.parametrize('make', [Wrapping, pytest.param(lambda opt: pytest.importorskip('timm.optim.lookahead').Lookahead(opt, k=2), marks=pytest.mark.full)])
def test_optimizers_around_others_step_a_sparse_model(make):
    m = mlp()
    sparsify_model(m, .6, seed=0)
    before = [p.detach().clone() for p in m.parameters()]
    stays_dead(m, make(t.Adam(m.parameters(), lr=.01)))
    assert not any(map(torch.equal, before, m.parameters()))

class Around(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)

class Own(nn.Module):
    "A root of a user's class, whose hooks run outside of the compiler"
    def __init__(self):
        super().__init__()
        self.body = mlp()
    def forward(self, x): return self.body(x)

def compiled_in_place(m, **kwargs):
    m.compile(**kwargs)
    return m

compiled_by = dict(module=torch.compile, in_place=compiled_in_place, around=lambda m, **kwargs: torch.compile(Around(m), **kwargs),
    inside=lambda m, **kwargs: Around(torch.compile(m, **kwargs)), function=lambda m, **kwargs: Around(torch.compile(lambda x: m(x), **kwargs)),
    copy=lambda m, **kwargs: torch.compile(copy.deepcopy(m), **kwargs), copied=lambda m, **kwargs: copy.deepcopy(torch.compile(m, **kwargs)))

@pytest.mark.parametrize('make', [mlp, Own])
@pytest.mark.parametrize('by', compiled_by)
def test_a_write_is_masked_before_a_compiled_forward(by, make):
    "Before the first call, after it, and after `remove` not any more; nothing is compiled anew"
    torch.compiler.reset()
    graphs,m = [],make()
    sparsify_model(m, .6, seed=0)
    run = compiled_by[by](m, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    inner = next((o for o in run.modules() if type(o) is type(m)), m)
    if by in ('copy','copied'): enforce_masks(inner)  # else what is written to a copy stays
    for i in range(3):
        with torch.no_grad():
            for p in inner.parameters(): p.add_(1.)
        y = run(torch.ones(2,6))
        assert_dead(inner)
        torch.testing.assert_close(y, plain_copy(inner)(torch.ones(2,6)))
        n = n if i else len(graphs)
    assert len(graphs)==n and len(masked_params(inner))==3
    unsparsify(inner)
    with torch.no_grad():
        for p in inner.parameters(): p.fill_(1.)
    run(torch.ones(2,6))
    assert all(p.eq(1).all() for p in inner.parameters())

@pytest.mark.parametrize('trains', [False,True])
def test_a_write_is_masked_before_a_compiled_function(trains):
    "One that no module calls; a whole training step too"
    torch.compiler.reset()
    graphs,m = [],mlp()
    sparsify_model(m, .6, seed=0)
    opt = torch.optim.SGD(m.parameters(), .1)
    f = torch.compile(lambda x: m(x).square().sum(), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    for i in range(3):
        with torch.no_grad():
            for p in m.parameters(): p.add_(1.)
        y = f(torch.ones(2,6))
        assert_dead(m)
        torch.testing.assert_close(y, plain_copy(m)(torch.ones(2,6)).square().sum())
        if trains:
            opt.zero_grad()
            y.backward()
            opt.step()
    assert len(graphs)==1
    unsparsify(m)
    with torch.no_grad():
        for p in m.parameters(): p.fill_(1.)
    f(torch.ones(2,6))
    assert all(p.eq(1).all() for p in m.parameters())

def test_a_new_parameter_is_enforced_before_the_model_runs():
    "Also where its layer runs alone"
    m = mlp()
    sparsify_model(m, .5, seed=0)
    m[0].weight = nn.Parameter(torch.randn_like(m[0].weight))
    m[0](data(m)[0]).sum().backward()
    assert is_positive_zero(m[0].weight.grad[~m[0].weight_mask]) and m[0].weight.grad.any()

def test_a_parameter_that_is_out_while_another_model_steps_comes_back():
    "As `functional_call` takes one out, without an assignment that its module sees"
    m,other = mlp(),mlp()
    sparsify_model(m, .5, seed=0), sparsify_model(other, .5, seed=0)
    p = m[0].weight
    m[0]._parameters['weight'] = nn.Parameter(torch.ones_like(p))
    train(other, t.SGD(other.parameters(), lr=.1), 1, *data(other))
    m[0]._parameters['weight'] = p
    m[0](data(m)[0]).sum().backward()
    assert is_positive_zero(p.grad[~m[0].weight_mask]) and p.grad.any()

@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason='roots of zeros are fast there')
def test_second_moments_of_dead_weights_are_no_zeros():
    "Law 3: at most 1.2e-30, for the square root's sake"
    m = mlp()
    sparsify_model(m, .5, seed=0)
    train(m, opt := t.Adam(m.parameters()), 1, *data(m))
    for o in masked_params(m): assert ((v := opt.state[o.p]['exp_avg_sq'][~o.mask])>0).all() and v.max()<1.2e-30

@pytest.mark.parametrize('frozen_first', [False,True])
def test_freeze_and_unfreeze(frozen_first):
    "A weight that was frozen when masks were made, or is later, is left as it is, and enforced whenever it trains"
    m = mlp()
    if frozen_first: m[2].requires_grad_(False)
    sparsify_model(m, .6, seed=0)
    opt = t.SGD(m.parameters(), lr=.1, momentum=.9)
    for frozen in (True,False,True,False):
        m[2].requires_grad_(not frozen)
        before = m[2].weight.clone()
        opt.zero_grad()
        train(m, opt, 2, *data(m))
        assert_dead(m, opt)
        assert torch.equal(before, m[2].weight)==frozen and (frozen or is_positive_zero(m[2].weight.grad[~m[2].weight_mask]))

def test_enforced_twice_and_by_name():
    "A model that is enforced twice stays so when one of them ends; a bias with a mask is obeyed like a weight"
    m = mlp()
    m[0].register_buffer('bias_mask', torch.tensor([True]*4+[False]*4))
    enforce_masks(m)
    stays_dead(m, t.Adam(m.parameters(), lr=.01))
    assert m[0].bias.count_nonzero()==4 and m[0].weight.all()
    m = mlp()
    hooks = sparsify_model(m, .6, seed=0)
    again = enforce_masks(m)
    opt = t.SGD(m.parameters(), lr=.1, momentum=.9)
    stays_dead(m, opt, 2)
    hooks.remove()
    stays_dead(m, opt, 3)
    again.remove()
    assert not any('_weights' in vars(o) for o in m.modules())
    train(m, opt, 1, *data(m))
    assert all(o.p[~o.mask].any() for o in masked_params(m))

@pytest.mark.parametrize('same_address', [False,True])
def test_a_gradient_assigned_in_place_of_a_freed_one_is_read_whole(same_address):
    "Python gives a new tensor the id of one that has gone, so an id doesn't say which tensor it is"
    m = nn.Linear(8, 8, bias=False)
    sparsify_model(m, .5, seed=0)
    w, = masked_params(m)
    opt = torch.optim.SGD(m.parameters(), lr=0.)
    DynamicSparseTraining(m, opt, 40, **{**RigL_presets, 'batches_per_update':2}, seed=0)
    big,before,address = (~w.mask).flatten().nonzero().flatten()[-9:],w.mask.clone(),None  # an update moves 30 % of 32
    for _ in range(3):
        w.p.grad = None
        made = [torch.ones(8, 8)]
        while same_address and address is not None and id(made[-1])!=address and len(made)<5000: made.append(torch.ones(8, 8))
        grad = made.pop()
        made.clear()
        address = id(grad)
        grad.view(-1)[big] = 9.
        w.p.grad = grad
        del grad
        opt.step()
    assert (w.mask&~before).flatten().nonzero().flatten().equal(big)

@pytest.mark.parametrize('kind', ['masked','live'])
@pytest.mark.parametrize('swap', [False,True])
def test_another_dtype_between_backward_and_update(kind, swap):
    "Grown weights are chosen by the gradient that the backward left, also if torch swaps tensors where it converts"
    def run(change):
        m = mlp((32,24,4))
        sparsify_model(m, .8, seed=0)
        opt = t.SGD(m.parameters(), lr=.1, momentum=.9)
        if kind=='live': sparse_compute(m, None, opt, plan=plan)
        dst = DynamicSparseTraining(m, opt, 30, method='rigl', batches_per_update=2, seed=0)
        g = torch.Generator().manual_seed(0)
        for i in range(7):
            opt.zero_grad()
            m(torch.randn(16, 32, generator=g).to(m[0].bias)).square().sum().backward()
            if i==3 and change: change(m)
            opt.step()
        return [w.full_mask() for w in masked_params(m)],m
    def change(m):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try: m.double()
        finally: torch.__future__.set_swap_module_params_on_conversion(False)
    (got,m),(want,_) = run(change),run(None)
    assert all(map(torch.equal, got, want)) and m[0].weight.dtype==torch.double
    assert not any(w.p[~w.mask].any() for w in masked_params(m))

def test_the_summary_sees_what_is_enforced():
    "After a write through .data too"
    m = mlp((8,16,4))
    sparsify_model(m, .75, seed=0)
    m(torch.ones(2,8))
    m[0].weight.data.fill_(1)
    sparse_summary(m)
    assert not m[0].weight[~m[0].weight_mask].any()

# --- rates

def by_groups(make, ps, scaled, rate):
    "An optimizer of two groups: `scaled` parameters learn at `rate` times the other rate"
    lists = [[p for p in ps if id(p) in scaled], [p for p in ps if id(p) not in scaled]]
    if make is not Adam: return make([dict(params=lists[0], lr=.01*rate), dict(params=lists[1])], lr=.01)
    opt = Adam(lists, lr=.01)
    opt.set_hyper('lr', [.01*rate, .01])
    return opt

@pytest.mark.parametrize('make,around', [(t.AdamW,noop), (t.AdamW,lambda opt: OptimWrapper(opt=opt)), (Adam,noop), (Adam,Lookahead)],
    ids=['torch','OptimWrapper','fastai','Lookahead'])
def test_a_weight_with_a_rate_learns_as_in_a_group_of_its_own(make, around):
    "Bit for bit; the optimizer has its own groups again after each step, even after one that was interrupted"
    a,b = [mlp((12,32,4)) for _ in range(2)]
    b.load_state_dict(a.state_dict())
    for m in (a,b): sparsify_model(m, .7, seed=0)
    for w in masked_params(a): w.guard.rate = 3.
    one,two = around(make(a.parameters(), lr=.01)),around(by_groups(make, [*b.parameters()], {id(w.p) for w in masked_params(b)}, 3.))
    names,batch = [len(group['params']) for group in one.param_groups],(torch.randn(8, 12), torch.randint(4, (8,)))
    for i in range(6):
        for m,opt in ((a,one), (b,two)):
            F.cross_entropy(m(batch[0]), batch[1]).backward()
            if i==3 and m is a: guard._before_step(getattr(opt, 'opt', opt))  # and the step was interrupted
            a(batch[0])
            opt.step()
            opt.zero_grad()
        assert [(len(group['params']),group['lr']) for group in one.param_groups]==[(n,.01) for n in names]
    assert all(map(torch.equal, a.parameters(), b.parameters()))
