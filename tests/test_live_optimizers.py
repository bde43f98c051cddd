"Optimizers step a live weight itself: torch's and fastai's, closures, schedules, clipping, scalers and averages make the masked run's network"
import copy,pytest,torch
from fastai.optimizer import Adam as FastaiAdam,Lookahead,QHAdam,RAdam,RMSProp,SGD as FastaiSGD,Lamb,Larc,OptimWrapper,ranger
from fastsparse.all import *
from functools import partial
from helpers import *
from torch import nn
from torch.optim.swa_utils import AveragedModel,get_ema_multi_avg_fn

x,y = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).double(),torch.randn(32, 3, generator=torch.Generator().manual_seed(1)).double()

def net(live, make, only=None, biases=True, sparsity=.6):
    "A network in float64 with an optimizer made by `make`; live weights are stored after it was made"
    m = mlp((6,16,12,3), dtype=torch.double)
    sparsify_model(m, sparsity, seed=0)
    opt = make([p for p in m.parameters() if biases or p.ndim>1])
    if live: go_live(m)
    return m,opt

def loss_of(m, i=0): return nn.functional.mse_loss(m(x+.01*i), y)

def step(m, opt, i=0, to_none=True):
    opt.zero_grad(**({} if to_none is None else dict(set_to_none=to_none)))
    loss_of(m, i).backward()
    opt.step()

def states_of(m, opt):
    "Weights, and state of single weights at live places"
    masks = {o.p:o.mask for o in masked_params(m)}
    ps = [dense_of(p)*masks.get(p, 1) for p in m.parameters()]
    opt = getattr(opt, 'opt', opt)
    state = [(p,opt.state[p]) for p in m.parameters() if p in opt.state]
    return ps+[dense_of(t)*masks.get(p, 1) for p,s in state for k,t in sorted(s.items()) if isinstance(t, torch.Tensor) and t.shape==p.shape]

def agrees(run, *args, tol=1e-9, **kwargs):
    "`run(live)` returns model and optimizer; both are the same, live and masked"
    (a,oa),(b,ob) = [run(live, *args, **kwargs) for live in (True,False)]
    assert_index_fits(a)
    loss_of(b)  # masks
    for u,v in zip(states_of(a, oa), states_of(b, ob), strict=True): torch.testing.assert_close(u, v, rtol=max(tol, 1e-7), atol=tol)
    return a,b

# --- torch's, in all its own configurations

of_torch = '''
Adadelta | foreach |  | lr=0.01 | weight_decay=0.1 | maximize=True | weight_decay=0.1, maximize=True | rho=0.95, weight_decay=0.9
Adafactor | foreach |  | weight_decay=0.1, lr=0.01 | weight_decay=0.1, maximize=True | beta2_decay=-1.0 | d=1.5
Adagrad | foreach fused |  | weight_decay=0.1 | weight_decay=0.1, maximize=True | lr=0.1 | initial_accumulator_value=0.1, weight_decay=0.1 \
     | lr=0.1, lr_decay=0.5, weight_decay=0.1 | lr=torch.tensor(.001)
Adam | foreach fused |  | lr=0.01 | weight_decay=0.1 | weight_decay=0.1, maximize=True | weight_decay=0.1, amsgrad=True
Adamax | foreach |  | lr=0.1 | weight_decay=0.1 | maximize=True | weight_decay=0.1, maximize=True
AdamW | foreach fused |  | lr=0.01 | weight_decay=0.1 | weight_decay=0.1, maximize=True | weight_decay=0.1, amsgrad=True
ASGD | foreach |  | lambd=0.1 | lr=0.02 | t0=100 | maximize=True | weight_decay=0.1 | weight_decay=0.1, maximize=True
LBFGS |  |  | lr=0.01 | lr=torch.tensor(.001) | tolerance_grad=1e-06 | line_search_fn='strong_wolfe' | maximize=True \
     | maximize=True, line_search_fn='strong_wolfe'
Muon |  |  | lr=0.01 | lr=torch.tensor(.001) | weight_decay=0.2 | momentum=0.8 | ns_steps=6 | ns_coefficients=(3.4, -4.7, 2.0) \
     | adjust_lr_fn='match_rms_adamw' | adjust_lr_fn='spectral_unclamped'
NAdam | foreach |  | lr=0.001 | momentum_decay=0.006 | weight_decay=0.1 | weight_decay=0.1, momentum_decay=0.006 \
     | weight_decay=0.1, momentum_decay=0.006, decoupled_weight_decay=True | weight_decay=0.1, maximize=True
RAdam | foreach |  | lr=0.002 | eps=1e-06 | weight_decay=0.1 | weight_decay=0.1, decoupled_weight_decay=True | weight_decay=0.1, maximize=True
RMSprop | foreach |  | lr=0.001 | weight_decay=0.1 | maximize=True | weight_decay=0.1, centered=True | maximize=True, weight_decay=0.1 \
     | weight_decay=0.1, centered=True, momentum=0.1 | weight_decay=0.1, centered=True, momentum=0.1, maximize=True
Rprop | foreach |  | lr=0.0002 | etas=(0.5, 1.5) | step_sizes=(2e-06, 100) | maximize=True
SGD | foreach fused |  | lr=0.01 | lr=torch.tensor(.001) | weight_decay=0.5 | momentum=0.9 | weight_decay=0.1, maximize=True \
     | momentum=0.9, dampening=0.5 | momentum=0.9, weight_decay=0.1 | momentum=0.9, nesterov=True, weight_decay=0.1
SparseAdam |  |  | lr=0.01 | lr=torch.tensor(.001) | maximize=True
'''
torchs = {name:[forms, *(eval(f'dict({o})', dict(torch=torch)) for o in kws)]
    for name,forms,*kws in ([o.strip() for o in l.split('|')] for l in of_torch.strip().splitlines())}

def ways_of(name):
    "Keywords of each configuration, as torch chooses the form; the first and the last in each form that there is"
    impls,*given = torchs[name]
    for kw in given:
        yield kw
        if kw is given[0] or kw is given[-1] and not isinstance(kw.get('lr'), torch.Tensor): yield from ({**kw, way:True} for way in impls.split())

@pytest.mark.parametrize('name', torchs)
def test_torchs_optimizers_in_their_own_configurations(name):
    "Three steps; SparseAdam refuses dense gradients of both alike"
    make,lr = getattr(torch.optim, name),dict(lr=.01) if name=='SGD' else {}
    for kw in ways_of(name):
        def run(live):
            m,opt = net(live, lambda ps: make(ps, **{**lr, **copy.deepcopy(kw)}), biases=name!='Muon')
            for i in range(3):
                def closure():
                    opt.zero_grad()
                    (loss := loss_of(m, i)*(-1 if kw.get('maximize') else 1)).backward()
                    return loss
                if name!='LBFGS': closure()
                opt.step(*[closure]*(name=='LBFGS'))
            return m,opt
        if name!='SparseAdam': agrees(run, tol=1e-6)
        for live in (True,False)*(name=='SparseAdam'):
            with pytest.raises(RuntimeError, match='does not support dense gradients'): run(live)

@pytest.mark.full
def test_torch_has_these_configurations():
    "The table is what torch tests its optimizers with"
    for o in pytest.importorskip('torch.testing._internal.common_optimizers').optim_db:
        impls,*given = torchs[o.optim_cls.__name__]
        assert impls.split()==[i for i in o.supported_impls if i!='differentiable'] and given==[i.kwargs for i in o.optim_inputs_func(device='cpu')]


@pytest.mark.parametrize('make', [pytest.param(o, id=n) for n,o in dict(
    adafactor=torch.optim.Adafactor, lbfgs=torch.optim.LBFGS, lamb=partial(Lamb, lr=.01), larc=partial(Larc, lr=.01), ranger=partial(ranger, lr=.01)).items()])
def test_no_optimizer_is_refused(make):
    "Each steps the weight itself"
    m,opt = net(False, make)
    go_live(m, opt)

# --- fastai's

def wrapped(f, **kwargs): return lambda ps: OptimWrapper(ps, f, **kwargs)
fastais = dict(sgd=partial(FastaiSGD, lr=.05), momentum=partial(FastaiSGD, lr=.05, mom=.9, wd=.01), l2=partial(FastaiSGD, lr=.05, mom=.9, wd=.01,
    decouple_wd=False), rms=partial(RMSProp, lr=.01, mom=.9), adam=partial(FastaiAdam, lr=.01, wd=.01), radam=partial(RAdam, lr=.01),
    qhadam=partial(QHAdam, lr=.01), lamb=partial(Lamb, lr=.01), larc=partial(Larc, lr=.01), larc_clipped=partial(Larc, lr=.01, clip=False),
    ranger=partial(ranger, lr=.02), lookahead=lambda ps: Lookahead(FastaiSGD(ps, lr=.05), k=2), wrapped_adam=wrapped(torch.optim.AdamW, lr=.01),
    wrapped_sgd=wrapped(torch.optim.SGD, lr=.05, momentum=.9))

def some_steps(live, make, n=7, to_none=None):
    m,opt = net(live, make)
    for i in range(n): step(m, opt, i, to_none)
    return m,opt

@pytest.mark.parametrize('name', fastais)
def test_fastais_optimizers(name): agrees(some_steps, fastais[name])

@pytest.mark.parametrize('to_none', [True,False])
@pytest.mark.parametrize('make', [partial(torch.optim.SGD, lr=.05, momentum=.9), partial(torch.optim.AdamW, lr=.01), partial(torch.optim.AdamW, lr=.01, foreach=True),
    partial(torch.optim.AdamW, lr=.01, fused=True)], ids=['sgd','adamw','foreach','fused'])
def test_gradients_are_cleared_either_way(make, to_none): agrees(some_steps, make, to_none=to_none)

# --- closures

def with_closure(live, make, opt_zero=True, n=9, method=None):
    "Steps with a closure that clears gradients itself, with an engine of `method`"
    m,opt = net(live, make)
    if method: engine_on(m, opt, method, live)
    for i in range(n):
        def closure():
            (opt if opt_zero else m).zero_grad()
            (loss := loss_of(m, i)).backward()
            return loss
        opt.step(closure)
    return m,opt

def engine_on(m, opt, method, live, every=3, **kwargs):
    "An engine that leaves weights stored as they are"
    if method!='static': kwargs['batches_per_update'] = every
    return DynamicSparseTraining(m, opt, 30, method=method, seed=0, sparse_compute=None if live else False, **kwargs)

closing = dict(sgd=partial(torch.optim.SGD, lr=.05, momentum=.9), adamw=partial(torch.optim.AdamW, lr=.01), lbfgs=partial(torch.optim.LBFGS, lr=.5, max_iter=4),
    wolfe=partial(torch.optim.LBFGS, line_search_fn='strong_wolfe', max_iter=4))

@pytest.mark.parametrize('opt_zero', [True,False], ids=['opt.zero_grad','m.zero_grad'])
@pytest.mark.parametrize('name', closing)
def test_a_closure_that_clears_gradients(name, opt_zero):
    "Each step sees the gradient of its own batch, and L-BFGS's line search sees each point that it tries"
    a,b = agrees(with_closure, closing[name], opt_zero, tol=1e-6)
    if name in ('sgd','adamw'):  # the same without a closure
        m,opt = net(False, closing[name])
        for i in range(9): step(m, opt, i)
        loss_of(m)
        for p,q in zip(b.parameters(), m.parameters()): torch.testing.assert_close(p, q)

@pytest.mark.parametrize('method', ['static','rigl','set'])
@pytest.mark.parametrize('name', ['sgd','adamw'])
def test_a_closure_with_an_engine(name, method):
    "Gradients of live layers do not add up from step to step"
    agrees(with_closure, closing[name], method=method)

def test_a_closure_that_sets_the_rate_and_clips():
    "As a schedule inside of a closure has it"
    def run(live):
        m,opt = net(live, partial(torch.optim.SGD, lr=.05, momentum=.9))
        for i in range(8):
            def closure():
                opt.zero_grad()
                (loss := loss_of(m, i)).backward()
                for g in opt.param_groups: g['lr'] = .01*(i+1)
                nn.utils.clip_grad_norm_(m.parameters(), .05)
                return loss
            opt.step(closure)
        return m,opt
    agrees(run)

# --- sharpness-aware minimization

class SAM(torch.optim.Optimizer):
    "That of github.com/davda54/sam: two steps, or one with a closure"
    def __init__(self, params, base_optimizer, rho=.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g['params'] if p.grad is not None]), p=2)
        for group in self.param_groups:
            scale = group['rho']/(norm+1e-12)
            for p in group['params']:
                if p.grad is None: continue
                self.state[p]['old_p'] = p.data.clone()
                p.add_(p.grad*scale.to(p))
        if zero_grad: self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None: p.data = self.state[p]['old_p']
        self.base_optimizer.step()
        if zero_grad: self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

class Twice(torch.optim.SGD):
    "One that calls its closure twice: it steps by the gradient a little ahead"
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad(): loss = closure()
        ps = [p for g in self.param_groups for p in g['params']]
        moved = [.1*p.grad for p in ps]
        for p,g in zip(ps, moved): p.add_(g)
        with torch.enable_grad(): closure()
        for p,g in zip(ps, moved): p.sub_(g)
        super().step()
        return loss

sam = partial(SAM, base_optimizer=torch.optim.SGD, lr=.05, momentum=.9)

def sam_steps(live, how, on=None, method=None, n=8):
    "SAM by two steps or by a closure, or the other; with an engine on itself or on its base"
    m,opt = net(live, partial(Twice, lr=.05, momentum=.9) if how=='twice' else sam)
    if method: engine_on(m, opt.base_optimizer if on=='base' else opt, method, live)
    seen = []
    for i in range(n):
        def closure():
            opt.zero_grad()
            (loss := loss_of(m, i)).backward()
            seen.append(sum(float(p.grad.abs().sum()) for p in m.parameters() if p.grad is not None))
            return loss
        if how=='two':
            closure()
            opt.first_step(zero_grad=True)
            closure()
            opt.second_step(zero_grad=True)
        elif how=='usual':
            closure()
            opt.step(closure)
        else: opt.step(closure)
    assert len(seen)==2*n and all(s>0 for s in seen)
    return m,getattr(opt, 'base_optimizer', opt)

def by_hand_sam(how, n=8):
    "The same by a dense network that is masked by hand, with momentum of .9 by hand"
    m = mlp((6,16,12,3), dtype=torch.double)
    sparsify_model(m, .6, seed=0)
    masks = [o.mask for o in masked_params(m)]
    ps = [p.detach().clone().requires_grad_() for p in m.parameters()]
    ms = [masks[i//2] if i%2==0 else torch.tensor(1.) for i in range(len(ps))]
    bufs = [torch.zeros_like(p) for p in ps]
    def f(ps, i):
        h = x+.01*i
        for j in range(0, len(ps), 2):
            h = nn.functional.linear(h, ps[j]*ms[j], ps[j+1])
            h = h.tanh() if j<len(ps)-2 else h
        return nn.functional.mse_loss(h, y)
    for i in range(n):
        gs = torch.autograd.grad(f(ps, i), ps)
        norm = torch.stack([g.norm() for g in gs]).norm()
        ahead = [(p+g*(.1 if how=='twice' else .05/(norm+1e-12))).detach().requires_grad_() for p,g in zip(ps, gs)]
        gs = torch.autograd.grad(f(ahead, i), ahead)
        bufs = [.9*b+g for b,g in zip(bufs, gs)]
        ps = [(p-.05*b).detach().requires_grad_() for p,b in zip(ps, bufs)]
    return [p.detach()*k for p,k in zip(ps, ms)]

@pytest.mark.parametrize('how', ['two','usual','twice'])
def test_sam_gets_both_gradients(how):
    "Live, masked, and by hand"
    agrees(sam_steps, how)
    m,_ = sam_steps(True, how)
    for p,q in zip(m.parameters(), by_hand_sam(how)): torch.testing.assert_close(dense_of(p), q)

@pytest.mark.parametrize('how,live', [(h,l) for h in ('usual','twice') for l in (True,False)])
def test_sam_gets_both_gradients_under_an_engine_on_itself(how, live):
    "A static method: what there is without an engine"
    m,_ = sam_steps(live, how, method='static')
    loss_of(m)
    for p,q in zip(m.parameters(), by_hand_sam(how)): torch.testing.assert_close(dense_of(p), q)

@pytest.mark.parametrize('how', ['two','usual'])
@pytest.mark.parametrize('method', ['static','rigl','set'])
def test_sam_with_an_engine_on_its_base(how, method): agrees(sam_steps, how, 'base', method)

def test_an_engine_on_sam_that_replaces_steps_is_refused_by_name():
    "RigL takes the place of a step, of which SAM makes two halves"
    m,opt = net(False, sam)
    with pytest.raises(ValueError, match='SAM.*base_optimizer'): DynamicSparseTraining(m, opt, 20, method='rigl', batches_per_update=3, seed=0)
    DynamicSparseTraining(m, opt.base_optimizer, 20, method='rigl', batches_per_update=3, seed=0)

# --- what else a loop does

def clipped(m, opt, i):
    opt.zero_grad()
    loss_of(m, i).backward()
    ps = list(m.parameters())
    norms = [nn.utils.clip_grad_norm_(ps[:2], .02), nn.utils.clip_grad_norm_(ps[2:], .03, norm_type=float('inf'))]
    nn.utils.clip_grad_value_(ps, .01)
    assert nn.utils.get_total_norm([p.grad for p in ps])<1 and all(n>0 for n in norms)
    opt.step()

def scaled(m, opt, i, scaler={}):
    s = scaler.setdefault(opt, torch.amp.GradScaler('cpu', init_scale=2.**10, growth_interval=3))
    opt.zero_grad()
    s.scale(loss_of(m, i)*(float('inf') if i==4 else 1)).backward()
    s.unscale_(opt)
    nn.utils.clip_grad_norm_(m.parameters(), .1)
    before = dense_of(m[0].weight)
    s.step(opt)
    s.update()
    assert dense_of(m[0].weight).equal(before)==(i==4)

def frozen(m, opt, i):
    "Frozen for the third to the fifth step, without a gradient"
    m[2].weight.requires_grad_(not 2<=i<5)
    before = dense_of(m[2].weight)
    step(m, opt, i)
    assert dense_of(m[2].weight).equal(before)==(2<=i<5)

def scheduled(m, opt, i, schedules={}):
    if opt not in schedules:
        schedules[opt] = [torch.optim.lr_scheduler.OneCycleLR(opt, .05, total_steps=12), torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)]
    step(m, opt, i)
    for s,a in zip(schedules[opt], ((), (loss_of(m, i).item(),))): s.step(*a)

def by_steps(m, opt, i):
    "By hand, as in a page on gradient descent"
    opt.zero_grad()
    loss_of(m, i).backward()
    with torch.no_grad():
        for p in m.parameters(): p -= .05*p.grad

def by_data(m, opt, i):
    opt.zero_grad()
    loss_of(m, i).backward()
    for p in m.parameters(): p.data.add_(p.grad.data, alpha=-.05)

def assigned(m, opt, i):
    "Gradients that were computed elsewhere"
    for p,g in zip(m.parameters(), torch.autograd.grad(loss_of(m, i), list(m.parameters()))): p.grad = g*2
    opt.step()

def accumulated(m, opt, i):
    opt.zero_grad()
    for j in range(3): (loss_of(m, i+j)/3).backward()
    opt.step()

def noisy(m, opt, i):
    "Noise on gradients, of the same numbers at the same places"
    opt.zero_grad()
    loss_of(m, i).backward()
    g = torch.Generator().manual_seed(i)
    with torch.no_grad():
        for p in m.parameters(): p.grad += .01*torch.randn(p.shape, generator=g, dtype=p.dtype)
    opt.step()

def centred(m, opt, i):
    "Gradient centralization: the mean over live and dead weights of a row"
    opt.zero_grad()
    loss_of(m, i).backward()
    with torch.no_grad():
        for p in m.parameters():
            if p.ndim>1: p.grad.sub_(p.grad.mean(1, keepdim=True))
    opt.step()

def state_loaded(m, opt, i):
    step(m, opt, i)
    if i==3: opt.load_state_dict(copy.deepcopy(opt.state_dict()))

def group_added(m, opt, i):
    if i==3: opt.add_param_group(dict(params=[torch.ones(2, requires_grad=True, dtype=torch.double)], lr=.1))
    step(m, opt, i)

def ascended(m, opt, i):
    opt.zero_grad()
    (-loss_of(m, i)).backward()
    for p in m.parameters(): p.grad.neg_()
    opt.step()

loops = [clipped,scaled,frozen,scheduled,by_steps,by_data,assigned,accumulated,noisy,centred,state_loaded,group_added,ascended]
def of_groups(make):
    "Weights and biases with their own weight decay and rate"
    def made(ps):
        weights,biases = [[p for p in ps if (p.ndim>1)==is_weight] for is_weight in (True,False)]
        return make([dict(params=weights, weight_decay=.1), dict(params=biases, weight_decay=0., lr=.02)])
    return made
makers = dict(sgd=of_groups(partial(torch.optim.SGD, lr=.05, momentum=.9)), adamw=of_groups(partial(torch.optim.AdamW, lr=.01)))

no_update = by_steps,by_data,assigned  # the optimizer makes no step, or an update would read another gradient

@pytest.mark.parametrize('make', makers)
@pytest.mark.parametrize('loop,method', [*[(o,None) for o in loops], *[(o,'rigl') for o in loops if o not in no_update]])
def test_what_a_loop_does(loop, method, make):
    "With groups of their own weight decay and rates; alone, and under updates"
    def run(live):
        m,opt = net(live, makers[make])
        if method: engine_on(m, opt, method, live, 4, replace_step=False)
        for i in range(9): loop(m, opt, i)
        return m,opt
    agrees(run)

averages = dict(swa=AveragedModel, ema=partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(.8)))

def by_lerp(m):
    ema = copy.deepcopy(m)
    def update(m):
        with torch.no_grad():
            for p,q in zip(ema.parameters(), m.parameters()): p.lerp_(q, .2)
    ema.update_parameters = update
    return ema

def by_state(m):
    "An average of state dicts"
    ema = copy.deepcopy(m)
    def update(m):
        with torch.no_grad():
            for a,b in zip(ema.state_dict().values(), m.state_dict().values()):
                if a.is_floating_point(): a.mul_(.8).add_(b, alpha=.2)
    ema.update_parameters = update
    return ema

@pytest.mark.parametrize('name', [*averages,'lerp','state'])
@pytest.mark.parametrize('method', [None,'rigl'])
def test_averages_of_weights(name, method):
    "SWA, EMA and averages by hand, of static masks and of moving ones: outputs, live and masked"
    outs = []
    for live in (True,False):
        m,opt = net(live, partial(torch.optim.AdamW, lr=.01))
        if method: engine_on(m, opt, method, live)
        ema = (averages|dict(lerp=by_lerp, state=by_state))[name](m)
        for i in range(8):
            step(m, opt, i)
            ema.update_parameters(m)
        with torch.no_grad(): outs.append(ema.eval()(x))
    torch.testing.assert_close(*outs, rtol=1e-7, atol=1e-9)

# --- state of weights without a gradient is zero

class AdaBelief(torch.optim.Optimizer):
    "Adds an epsilon to its second moment in each step"
    def __init__(self, params, lr=1e-2, eps=1e-4): super().__init__(params, dict(lr=lr, eps=eps))
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]['params']:
            state,eps = self.state[p],self.param_groups[0]['eps']
            if p.grad is None: continue
            if not state: state.update(exp_avg=torch.zeros_like(p), belief=torch.zeros_like(p))
            state['exp_avg'].mul_(.9).add_(p.grad, alpha=.1)
            off = p.grad-state['exp_avg']
            state['belief'].mul_(.99).addcmul_(off, off, value=.01).add_(eps)
            p.addcdiv_(state['exp_avg'], state['belief'].sqrt().add_(eps), value=-self.param_groups[0]['lr'])

@pytest.mark.parametrize('make', [AdaBelief, partial(torch.optim.Adagrad, lr=.05, initial_accumulator_value=.1)])
@pytest.mark.parametrize('first', [False,True])
def test_grown_weights_begin_without_state(make, first):
    "Live and masked alike, also where an optimizer adds a number to the state or begins with one (laws 2 and 3); made before or after masks"
    def run(live):
        m = mlp((6,16,12,3), dtype=torch.double)
        if first: opt = make(m.parameters())
        sparsify_model(m, .6, seed=0)
        if not first: opt = make(m.parameters())
        plan = {o.name:'rows' for o in masked_params(m)} if live else False
        dst = DynamicSparseTraining(m, opt, 20, method='rigl', batches_per_update=3, seed=0, sparse_compute=plan)
        for i in range(10): step(m, opt, i)
        assert dst.n_updates==3
        for o in masked_params(m):
            for t in opt.state[o.p].values():
                if t.shape==o.shape: assert dense_of(t)[~o.mask].abs().max()<=1.2e-30
        return m,opt
    agrees(run)
