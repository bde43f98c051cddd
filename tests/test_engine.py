"The engine in a loop: when it moves the topology, whose loops it follows, what users hand it, and what it says"
import copy, gc, math, pytest, torch, weakref
from fastsparse.all import *
from fastsparse.core.registry import declares
from fastsparse.masks.schedules import CyclingSchedule,PiecewiseSchedule
from fastsparse.masks.scores import MeanGradient
from fastsparse.model.init import is_fresh
from forks import run_code
from functools import partial
from helpers import *
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from unittest import mock

inf,nan = math.inf,math.nan

# --- when

def updates(dst, n):
    "Steps at which masks were updated, of `n`"
    times = []
    for t in range(n):
        k = dst.n_updates
        step(dst, *[torch.ones_like(o.p) for o in masked_params(dst.model)])
        times += [t]*(dst.n_updates-k)
    return times

@pytest.mark.parametrize('n,every,stop', [(30,5,.75),(30,7,1.),(12,2,.5),(10,9,1.),(10,8,1.),(40,3,.3)])
def test_due_times(n, every, stop):
    "t > 0, a multiple, t < stop*n, t < n-1, by the definition written out again"
    m,opt,_ = two_layers(lr=0.)
    dst = engine(m, opt, n_steps=n, every=every, stop_pct=stop, initial_drop_grow_pct=1.)
    expect = [t for t in range(1, n-1) if t%every==0 and t<stop*n and int(.5*(1+math.cos(math.pi*t/(stop*n)))*50)>0]
    assert updates(dst, n+3)==expect

@pytest.mark.parametrize('spoil,done', [((4,),5), ((4,5),6), ((4,5,6),7), ((4,5,6,7),8)])
def test_waits_for_finite_gradients(spoil, done):
    "An update is done at the next finite step, with the drop fraction of the step at which it fell due, in a resumed run too; NaN kills no mask"
    for resume in (False,True):
        m,extra = nn.Linear(100,1, bias=False),nn.Parameter(torch.zeros(1))
        sparsify_model(m, 0., seed=0)
        opt = torch.optim.SGD([m.weight, extra], lr=0.)
        new = lambda: engine(m, opt, n_steps=20, every=4, grow_score_f=None, initial_drop_grow_pct=1., stop_pct=1.)
        dst = new()
        for t in range(done+1):
            if resume and t==5:
                state = dst.state_dict()
                dst.remove()
                dst = new()
                dst.load_state_dict(state)
            extra.grad = torch.tensor([nan if t in spoil else 1.])
            assert int(m.weight_mask.sum())==100
            step(dst, torch.ones(100))
        due = 8 if done==8 else 4
        assert dst.n_updates==1 and int(m.weight_mask.sum())==100-int(.5*(1+math.cos(math.pi*due/20))*100)

def test_an_update_after_the_step_waits_where_another_group_replaces_it():
    "The step is left out, and with it the gradient; the second update is made after the next step"
    m,opt,_ = two_layers(lr=0.)
    rules = {'0':dict(replace_step=True), '2':dict(update_after_step=True)}
    dst = engine(m, opt, n_steps=12, every=4, rules=rules)
    first,second = dst.groups
    for t in range(6): step(dst, *[torch.ones_like(o.p) for o in masked_params(m)])
    assert first.updated_at==4 and (second.n_updates,second.pending)==(1,None)

def test_a_delayed_update_reads_dense_gradients():
    "Those of the step at which it is done"
    m,opt = by_hand([4.,3.,2.,1.,0.,0.,0.,0.], [True]*4+[False]*4, None, torch.optim.SGD, lr=0.)
    opt.add_param_group(dict(params=[extra := nn.Parameter(torch.zeros(1))]))
    dst = engine(m, opt, n_steps=8, every=2, initial_drop_grow_pct=.5, stop_pct=1.)
    for t,x in enumerate([[1.]*8, [1.]*8, [1.,1.,1.,1.,1.,1.,9.,1.], [1.,1.,1.,1.,1.,5.,2.,3.]]):
        opt.zero_grad()
        (m(torch.tensor([x])).sum()+extra.sum()*(nan if t==2 else 1.)).backward()
        dst.step()
        assert (dst.n_updates>0)==(t==3)
    assert m.weight_mask.tolist()==[[True,True,True,False,False,True,False,False]]

def test_the_length_of_a_run_costs_nothing():
    "An engine doesn't count the updates of a run one by one"
    m,opt,_ = two_layers()
    engine(m, opt, 10**15, 5).remove()

# --- whose loops

def with_scaler(opt_f, scale, n=12, spoil=()):
    m,_,(xb,yb) = two_layers()
    opt,seen = opt_f(m.parameters()),[]
    @declares(reads_grad=True)
    def grow(p):
        seen.append(p.grad.abs().clone())
        return seen[-1]
    dst = engine(m, opt, n_steps=20, every=4, grow_score_f=grow)
    scaler = torch.amp.GradScaler('cpu', init_scale=scale or 1., growth_interval=1000, enabled=scale is not None)
    for i in range(n):
        opt.zero_grad()
        scaler.scale(nn.functional.mse_loss(m(xb), yb)*(inf if i in spoil else 1.)).backward()
        scaler.step(opt)
        scaler.update()
        assert_dead(m, opt)
    return m,dst.n_updates,seen,scaler

@pytest.mark.parametrize('fused', [False,True])
@pytest.mark.parametrize('name', ['SGD','Adam'])
def test_grad_scaler(name, fused):
    "A gradient scaler changes no bit: scores see unscaled gradients, also where a fused optimizer divides itself; where it finds infinities the update waits"
    f = partial(getattr(torch.optim, name), lr=.01, fused=fused, **(dict(momentum=.9) if name=='SGD' else {}))
    a,n,sa,_ = with_scaler(f, None)
    b,k,sb,_ = with_scaler(f, 2.**10)
    assert n==k==2 and len(sa)==4 and agree(sa, sb) and agree(a.state_dict(), b.state_dict())
    m,n,seen,scaler = with_scaler(f, 2.**10, n=7, spoil=(4,5))
    assert n==1 and len(seen)==2 and scaler.get_scale()==2.**8 and all(p.isfinite().all() for p in m.parameters())

@pytest.mark.parametrize('through', ['engine','optimizer'])
def test_closures(through):
    "`opt.step(closure)` evaluates the closure once, returns its loss, and gives the masks of the plain loop"
    def run(closure):
        m,opt,(xb,yb) = two_layers()
        dst,calls = engine(m, opt, n_steps=20, every=3),[]
        def f():
            opt.zero_grad()
            calls.append(1)
            return backward(m, xb, yb)
        for i in range(12):
            if closure: loss = (dst if through=='engine' else opt).step(f)
            else:
                f()
                dst.step()
            assert len(calls)==i+1 and (not closure or math.isfinite(loss))
        return m.state_dict()
    assert agree(run(False), run(True))

def test_compiled_training():
    "One graph without a break, compiled once while the topology moves, and equal to the eager one bit for bit"
    from torch._dynamo.testing import CompileCounter
    res,counter = [],CompileCounter()
    for compiled in (False,True):
        m,opt,(xb,yb) = two_layers(.8, (16,32,4))
        run = torch.compile(m, backend=counter, fullgraph=True) if compiled else m
        dst = engine(m, opt, 40, 5)
        for _ in range(16):
            opt.zero_grad()
            nn.functional.mse_loss(run(xb), yb).backward()
            opt.step()
        assert dst.n_updates==3
        res.append(m.state_dict())
    assert counter.frame_count==1 and agree(*res)

@pytest.mark.parametrize('pick', [lambda i: i%2, lambda i: int(i%3>0), lambda i: i//5%2], ids=['in turn','two of three','in blocks'])
@pytest.mark.parametrize('method', ['rigl','set'])
def test_an_update_reaches_the_state_of_each_optimizer(method, pick):
    "A second one that steps the same weights brings none back, and remembers nothing of those that died or grew"
    m,_,batch = two_layers(.8, (20,40,4))
    opts = torch.optim.Adam(m.parameters(), lr=.01),torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = engine(m, opts[0], 60, 3, method=method)
    for i in range(40):
        m.zero_grad()
        backward(m, *batch)
        opts[pick(i)].step()
        assert_dead(m, opts[1])
    assert dst.n_updates

# --- gradients of dead weights, where the step of their batch is made (law 3)

steps_made = dict(after=dict(update_after_step=True), kept=dict(replace_step=False), collected=dict(grow_score_f=MeanGradient(2), batches_per_update=4))

@pytest.mark.parametrize('kind', steps_made)
@pytest.mark.parametrize('parts', [1, 2])
def test_clipping_sees_live_gradients_only(kind, parts):
    "In each batch whose step is made, the gradient is that of live weights, and updates read all of it as it was before"
    def run(clip):
        m = mlp((12,16,4), dtype=torch.double)
        sparsify_model(m, .6, seed=0)
        opt = torch.optim.SGD(m.parameters(), lr=.05)
        engine(m, opt, 24, **{**dict(batches_per_update=3, stop_pct=1.), **steps_made[kind]})
        xb,yb = data(m)
        norms,made,masks = [],[],[]
        for t in range(14):
            opt.zero_grad(set_to_none=t%2==0)
            for x,y in zip(xb.chunk(parts), yb.chunk(parts)): backward(m, x, y, 1/parts)
            grads = [p.grad*m[int(n[0])].weight_mask if 'weight' in n else p.grad for n,p in m.named_parameters()]
            norm = torch.stack([g.norm() for g in grads]).norm()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), .01) if clip else norm)
            if not clip:
                for p in m.parameters(): p.grad *= .01/norm
            before = m[0].bias.clone()
            opt.step()
            made.append(not m[0].bias.equal(before))
            assert_dead(m, opt)
            masks.append(masks_of(m))
        return torch.stack(norms),made,masks
    (seen,made,a),(norms,_,b) = run(True),run(False)
    assert sum(made)>=11 and not same_masks(a[0], a[-1]) and all(map(same_masks, a, b))
    torch.testing.assert_close(seen[made], norms[made], rtol=1e-4, atol=0.)

def replaced(m, x): m.weight.grad = m.weight.grad.clone()
def another(m, x): torch.autograd.grad(m(x*3).cos().sum(), [m.weight])
between = dict(replaced=replaced, another=another, frozen=lambda m, x: None)

@pytest.mark.parametrize('name', between)
def test_growth_goes_by_the_backward(name):
    "Whatever reads or copies the gradient before the step, or freezes weights for some, and no step sees it at dead places"
    def run(change=None):
        torch.manual_seed(0)
        m,masks = nn.Linear(8, 4, bias=False).double(),[]
        sparsify_model(m, .5, seed=0)
        opt = torch.optim.SGD(m.parameters(), lr=0.)
        engine(m, opt, 10, stop_pct=1., replace_step=False, initial_drop_grow_pct=.5)
        for t in range(8):
            m.requires_grad_(name!='frozen' or t not in (2,3))
            x,y = torch.randn(6, 8).double().requires_grad_(),torch.randn(6, 4).double()
            opt.zero_grad()
            backward(m, x, y)
            if change and m.weight.requires_grad: change(m, x)
            assert m.weight.grad is None or not m.weight.grad[~m.weight_mask].any()
            opt.step()
            masks.append(m.weight_mask.clone())
        return masks
    masks,want = run(between[name]),run()
    assert same_masks(masks, want) and not same_masks(masks[:1], masks[-1:])

# --- an engine that goes

@pytest.mark.parametrize('how', ['removed','dropped'])
@pytest.mark.parametrize('kwargs', [{}, dict(replace_step=False), dict(grow_score_f=gradient_momentum, replace_step=False)], ids=['replaced','kept','history'])
def test_an_engine_that_goes_leaves_masks_enforced(kwargs, how):
    "With `remove()`, or dropped with its optimizer just before an update: masks rest, dead is dead, and a new one can be attached, which an old one must give room"
    m,opt,batch = two_layers()
    dst = engine(m, opt, n_steps=20, **kwargs)
    with pytest.raises(ValueError, match=r'remove\(\)'): engine(m, opt)
    train(m, opt, 4, *batch)
    before = masks_of(m)
    if how=='removed': dst.remove()
    refs = [weakref.ref(o) for o in (dst, opt)]
    del dst,opt
    gc.collect()
    assert [r() for r in refs]==[None]*2, 'no global keeps them'
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    for _ in range(4):
        opt.zero_grad()
        backward(m, *batch)
        assert all(is_positive_zero(o.p.grad[~o.mask]) for o in masked_params(m))
        opt.step()
        assert_dead(m, opt)
    assert same_masks(before, masks_of(m))
    dst = engine(m, opt)
    train(m, opt, 3, *batch)
    assert dst.n_updates==1
    refs = [weakref.ref(o) for o in (m, opt, dst, m[0].weight, m[0].weight_mask)]
    del m,opt,dst
    gc.collect()
    assert [r() for r in refs]==[None]*5

def test_enforcement_that_the_engine_brought_ends_with_it():
    "Masks by hand, a bias too, and `enforce_mask=False`; hooks of `sparsify_model` end their own part"
    m = nn.Sequential(nn.Linear(6,10), nn.Tanh(), nn.Linear(10,10), nn.Tanh(), nn.Linear(10,10))
    m[0].register_buffer('weight_mask', sparse_mask_like(m[0].weight, .8))
    m[0].register_buffer('bias_mask', sparse_mask_like(m[0].bias, .5))
    sparsify_model(m[2], .5, enforce_mask=False, seed=0)
    hooks = sparsify_model(m[4], .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst,before = engine(m, opt, initial_drop_grow_pct=.5),masks_of(m)
    for _ in range(7):
        train(m, opt, 1, *data(m))
        assert_dead(m, opt)
    assert live(m)==[12,5,50,50] and not any(map(torch.equal, before, masks_of(m)))
    dst.remove()
    train(m, opt, 2, *data(m))
    assert m[0].weight.all() and m[0].bias.all() and m[2].weight.all() and not m[4].weight[~m[4].weight_mask].any()
    hooks.remove()
    train(m, opt, 2, *data(m))
    assert m[4].weight.all()

# --- what is said

def unseen(caught): return [o for o in caught if 'has not seen' in o]

class SAM(torch.optim.Optimizer):
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

def by_sam(m, opt, n):
    for _ in range(n):
        for half in (opt.first_step,opt.second_step):
            backward(m, *data(m))
            half()
            opt.zero_grad()

def another_one(m, opt, n): train(m, torch.optim.Adam(m.parameters(), lr=.1), n, *data(m))

def a_fastai_one(m, opt, n):
    from fastai.optimizer import SGD
    train(m, SGD(list(m.parameters()), lr=.1), n, *data(m))

@pytest.mark.parametrize('way,compute_live', [(another_one,False), (another_one,True), (a_fastai_one,False), (by_sam,False)])
def test_steps_that_are_never_seen(way, compute_live):
    "Law 10: another optimizer steps the weights, and that of the engine never does: one warning that names optimizer, weight and the way out"
    m,_,batch = two_layers()
    opt = (SAM if way is by_sam else torch.optim.SGD)(m.parameters(), lr=.1)
    dst = engine(m, opt, replace_step=way is not by_sam)
    if compute_live: sparse_compute(m, batch[0], opt, plan=dict.fromkeys(['0.weight','2.weight'], 'rows'))
    if way is not by_sam: train(m, opt, 4, *batch)
    done = dst.n_updates
    found, = unseen(warned(way, m, opt, 8))
    assert type(opt).__name__ in found and '.weight' in found and 'remove()' in found and dst.n_updates==done

@pytest.mark.parametrize('name', ['base_optimizer','base'])
def test_an_update_that_replaces_a_step_of_two_is_refused(name):
    "An engine with RigL's rule on SAM itself: by name, with the way out, and nothing is changed; without replacement, and with no updates, it's taken"
    m,_,batch = two_layers()
    opt = SAM(m.parameters(), lr=.1)
    inside = vars(opt)[name] = vars(opt).pop('base_optimizer')
    with pytest.raises(ValueError, match=f'step of SAM is two of its {name}: make the engine with opt.{name},'): engine(m, opt)
    for kw in (dict(replace_step=False), dict(method='static', every=None)): engine(m, opt, **kw).remove()
    engine(m, inside)

@pytest.mark.parametrize('n_calls', [1, 2])
def test_an_optimizer_may_call_its_closure_again(n_calls):
    "The closure is called as often as the optimizer does, each time with a gradient of its own; an update comes after the first call, and takes the step"
    class Again(torch.optim.Optimizer):
        def step(self, closure=None):
            for _ in range(n_calls):
                loss = closure()
                with torch.no_grad():
                    for p in m.parameters():
                        if p.grad is not None: p.sub_(p.grad, alpha=.1)
            return loss
    m,_,batch = two_layers()
    opt = Again(m.parameters(), {})
    dst,losses = engine(m, opt, every=3),[]
    def closure():
        opt.zero_grad()
        losses.append(backward(m, *batch))
        return losses[-1]
    for t in range(7):
        before,n = snapshot(m),dst.n_updates
        opt.step(closure)
        assert len(losses)==n_calls*(t+1)
        if dst.n_updates==n: continue
        for i in (0,2):
            stays = m[i].weight_mask & before[f'{i}.weight_mask']
            assert torch.equal(m[i].weight[stays], before[f'{i}.weight'][stays]) and torch.equal(m[i].bias, before[f'{i}.bias'])
    assert dst.n_updates==2 and all(a!=b for a,b in zip(losses[:n_calls*3], losses[1:n_calls*3]))

def test_steps_that_are_seen_give_no_warning():
    "Of an optimizer inside a wrapper; accumulation, an engine that has taken over, and gradients that nothing follows"
    m,_,batch = two_layers()
    opt = SAM(m.parameters(), lr=.1)
    dst = engine(m, opt.base_optimizer)
    assert not unseen(warned(by_sam, m, opt, 8)) and dst.n_updates==3
    m,opt,batch = two_layers()
    dst = engine(m, opt)
    def run():
        for _ in range(40): backward(m, *batch)
        opt.step()
        for _ in range(40): backward(m, *batch)
        other = engine(m, new := torch.optim.SGD(m.parameters(), lr=.1))
        train(m, new, 10, *batch)
        assert other.n_updates>2 and dst.n_updates==0
    assert not unseen(warned(run))

def new_parameter(m, opt): m[0].weight = nn.Parameter(m[0].weight.detach().clone())
def other_groups(m, opt): opt.param_groups[0]['params'] = [p for p in m.parameters() if p is not m[0].weight]
def dense_layer(m, opt):
    m[0] = nn.Linear(10, 10)
    opt.add_param_group(dict(params=list(m[0].parameters())))
def sparse_layer(m, opt):
    dense_layer(m, opt)
    sparsify_parameter(m, '0.weight', .5, seed=0)

@pytest.mark.parametrize('change', [new_parameter,other_groups,sparse_layer,dense_layer])
def test_a_weight_that_left_is_named_once(change):
    "One that the optimizer or the model no longer holds: one warning at the next update, which names it and the way out; the others move on"
    m,opt,batch = two_layers()
    dst = engine(m, opt)
    train(m, opt, 3, *batch)
    change(m, opt)
    found, = [o for o in warned(train, m, opt, 9, *batch) if '0.weight' in o]
    assert 'is dense now' in found if change is dense_layer else found.startswith('0.weight') and 'no longer' in found and 'remove()' in found
    assert dst.n_updates>=4

@pytest.mark.parametrize('eps', [0,1e-8])
@pytest.mark.parametrize('opt', [torch.optim.Adam, torch.optim.RMSprop])
def test_weights_that_are_lost_are_named_once(opt, eps):
    "eps=0 divides 0 by 0 where a live weight gets no gradient, as behind a unit without live outputs: said once, at the first update that can't be done"
    m = mlp((20,64,4))
    sparsify_model(m, .9, seed=0)
    dst = engine(m, opt(m.parameters(), lr=1e-3, eps=eps), 60, 3)
    said = [o for o in warned(spin, dst, 40) if 'wait for finite gradients' in o]
    if eps: assert dst.n_updates>10 and not said
    else: assert len(said)==1 and '0.weight had values' in said[0] and 'pass eps=1e-8' in said[0] and not dst.n_updates

def no_update(n, every, s=.5, **kwargs):
    m,opt,_ = two_layers(s)
    return ' '.join(o for o in warned(DynamicSparseTraining, m, opt, n, batches_per_update=every, **kwargs) if 'no update' in o)

@pytest.mark.parametrize('n,every,stop', [(20,50,.75), (20,18,1.), (10,100,1.), (5,3,.5), (100,75,.75), (8,8,1.)])
def test_no_update_warns(n, every, stop):
    "And names an interval that fits such a run, if one does: `int(f*50)` at least 1 at its first update, `t < stop*n` and `t < n-1`"
    said = no_update(n, every, stop_pct=stop)
    assert said and ('10 fits' in said)==(10<min(stop*n, n-1))
    assert '10 fits' in said and not no_update(n, 10, stop_pct=stop) or 'take a smaller number' in said and not no_update(n, 2, stop_pct=stop)

def test_no_interval_helps():
    "Dense masks, or a run of two steps: the warning says so"
    assert 'sparser masks' in no_update(100, 10, s=0.) and 'sparser masks' in no_update(2, 2) and not no_update(100, 10)

def net(): return nn.Sequential(nn.Linear(10,10,bias=False), nn.Linear(10,10,bias=False))

def test_the_sparsity_with_a_frozen_layer():
    "100 frozen live weights and 25 of the other 100: 1-125/200"
    m = net()
    m[0].requires_grad_(False)
    with pytest.warns(UserWarning, match='ends 0.375 sparse instead of 0.750'):
        DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='gmp', sparsity=.75, batches_per_update=4, seed=0)

def test_a_layer_without_live_weights_is_not_told_that_it_is_stuck():
    m = net()
    with pytest.warns(UserWarning, match='0.weight is left without live weights'):
        sparsify_model(m, .75, mask_init={'0.weight':torch.zeros(10,10).bool(), '1.weight':torch.arange(100).view(10,10)%2==0})
    engine = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='set', batches_per_update=4, seed=0)
    assert [o.why_stuck() for o in engine.tallies]==['','']

def test_a_mean_is_collected_on_while_an_update_waits():
    "Otherwise from the batch before each update"
    sparsify_model(m := net(), .5, seed=0)
    group, = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='set', grow_score_f=MeanGradient(2), batches_per_update=8, seed=0).groups
    assert [t for t in range(20) if group.collecting(t)]==[7,8,15,16]
    group.pending = 8
    assert group.collecting(9)

def test_a_sparsity_that_goes_by_updates():
    "After the first update the second value, of 200 weights; before it masks are as they were"
    sparsify_model(m := net(), .2, seed=0)
    engine = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='gmp', sparsity=.75, sparsity_path=lambda end: CyclingSchedule((.2,.5,end)),
        batches_per_update=4, seed=0)
    assert sum(engine.groups[0].targets(4))==100

def test_layers_beside_count_in_the_sparsity():
    "Half of 200 weights are 100, of which the layer that rests has 80"
    sparsify_model(m := net(), .2, sparse_f=uniform_sparsity, seed=0)
    engine = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='gmp', sparsity=.5, batches_per_update=4, sparse_modules=m[1], seed=0)
    assert engine.groups[0].targets(39)==[20]

def test_a_schedule_is_checked_from_its_first_step():
    m = net()
    with pytest.raises(ValueError, match='sparsity is 1.0'):
        DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='gmp', sparsity=.5, batches_per_update=4, seed=0,
            sparsity_path=lambda end: PiecewiseSchedule((1.,end), (1,)))

def test_a_file_of_a_run_that_goes_on_says_so(tmp_path):
    m = net()
    engine = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='gmp', sparsity=.5, batches_per_update=4, seed=0)
    with pytest.warns(UserWarning, match='saved before the schedule has ended, and the model is 0.000 sparse instead of 0.500'): save_sparse(m, tmp_path/'a.safetensors')
    engine.remove()

def test_masks_that_an_engine_makes_of_an_untrained_model_are_fresh():
    m = net()
    DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, method='set', sparsity=.5, batches_per_update=4, seed=0)
    assert is_fresh(m)

def test_no_update_is_due_that_would_prune_nothing():
    m = net()
    sparsify_model(m, .75, seed=0)
    engine = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, grow_score_f=None, sparsity=.75, sparsity_path=lambda x: .75,
        batches_per_update=4, replace_step=False, seed=0, initial_drop_grow_pct=0.)
    assert engine.groups[0].method.is_time(8) and not any(map(engine.due, range(40)))

@pytest.mark.parametrize('ends', ['frozen','removed','whole'])
def test_a_plain_loop_that_ends_before_its_sparsity_says_so(ends):
    "A layer that was frozen after the start keeps its weights; `remove` may come too early"
    m = mlp((10,10,3))
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.1), 20, 2, method='gmp', sparsity=.8)
    def run():
        spin(dst, 4)
        if ends=='removed': return dst.remove()
        m[0].requires_grad_(ends!='frozen')
        spin(dst, 16)
        dst.remove()
    said = [o for o in warned(run) if 'instead of 0.800' in o]
    assert {o.split(', and ')[0] for o in said}==dict(frozen={'training ended after 20 of 20 steps'}, removed={'training ended after 4 of 20 steps'},
        whole=set())[ends]
    assert all('0.weight is frozen' in o for o in said)==(ends!='removed')

left = """
import torch
from helpers import *
from pathlib import Path
m = mlp((10,10,3))
dst = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 20, sparse_compute=False, method='gmp', sparsity=.8, batches_per_update=2)
spin(dst, {n})
"""

@pytest.mark.parametrize('ends', ['collected','saved','exported','copied','taken','process'])
def test_a_schedule_that_ends_short_says_so_without_remove(ends, tmp_path):
    "Where the engine is collected with its optimizer, the model is written, or the process ends; not where another engine has taken the weights, nor twice"
    if ends=='process':
        said = [run_code(left.format(n=n)).stderr for n in (4,20)]
        assert 'the engine was left before its end, and the model is 0.' in said[0] and 'instead of 0.800' in said[0] and not said[1]
        return
    m = mlp((10,10,3))
    def run():
        dst = engine(m, torch.optim.SGD(m.parameters(), lr=.1), 20, 2, method='gmp', sparsity=.8)
        spin(dst, 4)
        if ends=='saved': save_sparse(m, tmp_path/'m.safetensors')
        if ends=='exported': export_sparse(m, 'dense', torch.randn(2,10))
        if ends=='copied': save_sparse(copy.deepcopy(m), tmp_path/'m.safetensors')
        if ends!='collected': dst.remove()
        if ends=='taken': second.append(engine(m, torch.optim.SGD(m.parameters(), lr=.1), 20, 2, method='static'))
    second = []
    said = [o.split(', and ')[0] for o in warned(lambda: (run(), gc.collect())) if 'instead of 0.800' in o]
    ended = 'training ended after 4 of 20 steps'
    assert said==dict(collected=['the engine was left before its end'], saved=['saved before the schedule has ended', ended],
        exported=['exported before the schedule has ended', ended], copied=[ended], taken=[ended])[ends]
    assert_dead(m)
    assert ends=='taken' or all(o.tally is None for o in masked_params(m)), 'an engine that is gone is still asked'

@pytest.mark.parametrize('kw', [{}, dict(sparsity=.5)], ids=['sparse','dense'])
def test_an_optimizer_holds_what_moves(kw):
    "One that holds only some is refused by the parameter's name; what is left out or frozen needs no optimizer"
    def made(frozen=False, only=False):
        m = mlp((10,10,3))
        if not kw: sparsify_model(m, .5, seed=0)
        m[0].requires_grad_(not frozen)
        engine(m, torch.optim.SGD(m[2].parameters(), lr=.1), **kw, **(dict(sparse_modules=m[2]) if only else {}))
    with pytest.raises(ValueError, match=r"optimizer doesn't hold 0\.weight"): made()
    made(only=True)
    made(frozen=True)

@pytest.mark.parametrize('t', [-1,1.5,None,'3'])
def test_an_update_at_no_step_is_refused(t):
    "Before a mask has changed"
    m = mlp((6,8,4))
    sparsify_model(m, .5, seed=0)
    engine,before = SparseEngine(m, torch.optim.SGD(m.parameters(), .1), 10, seed=0, **SET_presets),masks_of(m)
    with pytest.raises(ValueError, match=r'^t is'): engine.update(t)
    assert all(map(torch.equal, masks_of(m), before)) and engine.n_updates==0

@pytest.mark.parametrize('way', ['masks','live'])
@pytest.mark.parametrize('order', ['opt first','engine first'])
def test_both_ways_to_step(way, order):
    "Refused before the second, which would step twice; one way alone is as it was"
    m = mlp((6,32,4))
    sparsify_model(m, .8, seed=0)
    opt = torch.optim.SGD(m.parameters(), .1)
    if way=='live': sparse_compute(m, None, opt, plan={'0.weight':'rows'})
    dst = DynamicSparseTraining(m, opt, 40, seed=0, **SET_presets(batches_per_update=4))
    first,second = (opt.step,dst.step) if order=='opt first' else (dst.step,opt.step)
    for f in (first, first, first):
        opt.zero_grad()
        m(torch.ones(3,6)).sum().backward()
        f()
    before = copy.deepcopy(m.state_dict())
    with pytest.raises(ValueError, match='both were called'): second()
    assert all(v.equal(before[k]) for k,v in m.state_dict().items()) and dst.t==3

@pytest.mark.filterwarnings('error')
def test_an_engine_that_is_collected_after_its_masks_went_says_nothing():
    m = nn.Sequential(nn.Linear(8,8))
    sparsify_model(m, .5, seed=0)
    dst = SparseEngine(m, torch.optim.SGD(m.parameters(), lr=.1), 10, method='rigl', batches_per_update=2)
    slots = dst.moving
    dst.remove()
    unsparsify(m)
    with mock.patch('sys.unraisablehook') as told:
        del dst
        gc.collect()
    assert not told.called and len(slots)==1

def test_an_engine_that_is_collected_while_torch_traces_lets_its_weights_go():
    "Garbage is collected anywhere: in `FakeTensorMode` a tensor of the model can't be computed with, and its weights kept dense gradients"
    m,opt = mlp((8,12,4)),None
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = DynamicSparseTraining(m, opt, 20, method='snfs', batches_per_update=2, replace_step=False)
    train(m, opt, 5, *data(m))
    weights = masked_params(m)
    assert all(weight.tally and weight.dense_history for weight in weights)
    del dst,opt
    gc.disable()
    try:
        with FakeTensorMode(): gc.collect()
    finally: gc.enable()
    assert not any(weight.tally or weight.dense_history or weight.store.wants_dense for weight in weights)
