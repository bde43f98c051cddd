"Computing with live weights only against the masked run: equal masks, losses, checkpoints and optimizer state, and a way back"
import io,pickle,pytest,re,subprocess,sys,torch
from copy import deepcopy
from fastai.callback.core import Callback
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner,load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam as FastaiAdam,Lookahead,OptimWrapper,SGD as FastaiSGD
from fastai_data import digits,loaders,mlp as digits_mlp
from fastsparse.kernels import live_layers as compute
from fastsparse.all import *
from fastsparse.train.fit import auto_presets
from fastsparse.masks.selection import zero_dead_
from fastsparse.weights.optimizers import grad_history
from fastsparse.core.optimizers import opt_state
from fastsparse.masks.scores import MovingGradient,MagnitudePlusGradient
from fastsparse.weights.weight import handler_of,masked_params
from fastsparse.weights.hooks import mask_hooks
from fastsparse.model.sparsify import unsparsify_parameter
from fastsparse.train.growth import own_step_count,reset_state
from fastsparse.report.cost import model_bits
from fastsparse.kernels.linear import backward
from fastsparse.model.live_layers import LiveLayer,store_dense,swappable
from fastsparse.weights.live import LiveWeight
from fastcore.imports import noop
from fastsparse.core.registry import declares
from fastsparse.kernels.vectors import why_not
from functools import partial
from helpers import *
from torch import nn
from torch.nn.attention import sdpa_kernel,SDPBackend
from torch.nn.utils.parametrizations import orthogonal,spectral_norm,weight_norm
from torch.optim import swa_utils

torch_opts = dict(sgd=lambda ps: torch.optim.SGD(ps, lr=.05, momentum=.9, weight_decay=.01), adam=lambda ps: torch.optim.Adam(ps, lr=.01),
    adamw=lambda ps: torch.optim.AdamW(ps, lr=.01), rmsprop=lambda ps: torch.optim.RMSprop(ps, lr=.001), adagrad=lambda ps: torch.optim.Adagrad(ps, lr=.01),
    fused=lambda ps: torch.optim.AdamW(ps, lr=.01, fused=True))
fastai_opts = dict(fastai_sgd=lambda ps: FastaiSGD(ps, lr=.05, mom=.9, wd=.01), fastai_adam=lambda ps: FastaiAdam(ps, lr=.01))
opts = {**torch_opts, **fastai_opts}

def is_live(o): return isinstance(handler_of(o.p), LiveWeight)

def full(model): return {o.name:'rows' for o in masked_params(model)}

def pair(make, opt_f, sparsity=.7, route='rows', dense=()):
    "The same sparse model twice, with optimizers: masked, and on live weights but for those named `dense`"
    runs = []
    for compute in (False,True):
        torch.manual_seed(0)
        model = make()
        sparsify_model(model, sparsity, seed=0)
        opt = opt_f(list(model.parameters()))
        report = sparse_compute(model, None, opt, plan={n:'dense' if n in dense else 'rows' if 'cross' in n else route for n in full(model)}) if compute else None
        runs.append((model,opt,report))
    return runs

def steps(model, opt, n, xb, yb, dst=None):
    losses = []
    for i in range(n):
        losses.append(backward(model, xb+.01*i, yb).item())
        (dst or opt).step()
        opt.zero_grad()
    return losses

def assert_equal_models(a, b, tol=1e-9):
    "Same keys, masks and weights, whatever they compute with"
    x,y = a.state_dict(),b.state_dict()
    assert list(x)==list(y)
    for k in x:
        assert x[k].shape==y[k].shape and x[k].dtype==y[k].dtype, k
        torch.testing.assert_close(x[k], y[k], rtol=tol, atol=tol)

class Attention(nn.Module):
    "Self-attention, then another with keys of its own"
    def __init__(self, d=8):
        super().__init__()
        self.own,self.cross = nn.MultiheadAttention(d, 2, batch_first=True),nn.MultiheadAttention(d, 2, kdim=d, vdim=6, batch_first=True)
        self.out = nn.Linear(d, 3)

    def forward(self, x):
        h = self.own(x, x, x)[0]
        return self.out(self.cross(h, x, x[...,:6])[0])

def convs(): return nn.Sequential(nn.Conv2d(4, 8, 1, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 6, 1, bias=False))
dmlp = lambda: mlp((6,16,12,3), dtype=torch.double)
cases = dict(mlp=(dmlp, lambda: data(dmlp())), attention=(lambda: Attention().double(), lambda: (torch.randn(2,5,8).double(),torch.randn(2,5,3).double())),
    encoder=(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True).double(), lambda: tuple(torch.randn(2,2,5,8).double())),
    convs=(lambda: convs().double(), lambda: (torch.randn(3,4,6,6).double(),torch.randn(3,6,3,3).double())))

@pytest.mark.parametrize('route', ['rows'])
@pytest.mark.parametrize('case', list(cases))
def test_static_training_is_the_masked_one(case, route):
    "Linear layers, attention's projections and 1x1 convolutions: equal losses and weights in training, equal outputs in evaluation"
    make,batch = cases[case]
    torch.manual_seed(1)
    xb,yb = batch()
    (a,oa,_),(b,ob,report) = pair(make, torch_opts['adam'], route=route)
    assert any(is_live(o) for o in masked_params(b))
    la,lb = steps(a, oa, 30, xb, yb),steps(b, ob, 30, xb, yb)
    assert la==pytest.approx(lb, abs=1e-9)
    assert_equal_models(a, b, 1e-7)
    with torch.no_grad(): torch.testing.assert_close(a.eval()(xb), b.eval()(xb))

@pytest.mark.parametrize('name', list(opts))
@pytest.mark.parametrize('method', ['static','SET','RigL','GSE','auto','stepping','prune'])
def test_methods_are_the_masked_ones(name, method):
    "200 steps in float64: equal masks, losses to 1e-6; with updates that replace the step, with one that a step follows, and with pruning, which changes counts"
    xb,yb = data(dmlp())
    parts = dict(SET=SET_presets, RigL={**RigL_presets, 'stop_pct':1.}, GSE=GSE_presets(stop_pct=1.),
        auto=auto_presets(200)(stop_pct=1.), stepping={**RigL_presets, 'stop_pct':1., 'replace_step':False},
        prune=dict(grow_score_f=None, sparsity=.9, replace_step=False))
    res = []
    for model,opt,_ in pair(dmlp, opts[name]):
        settings = {**parts.get(method, {}), 'batches_per_update':20, 'seed':0}
        engine = None if method=='static' else SparseEngine(model, opt, 200, **settings)
        losses = []
        for t in range(200):
            if engine: engine.prepare(t)
            losses.append(backward(model, xb+.001*t, yb).item())
            if not (engine and engine.before_step(t)): opt.step()
            opt.zero_grad()
        res.append((losses,masks_of(model),model))
        if method in ('SET','RigL','GSE','auto','stepping'): assert engine.n_updates>5
    assert res[0][0]==pytest.approx(res[1][0], abs=1e-6)
    assert same_masks(res[0][1], res[1][1])
    assert_equal_models(res[0][2], res[1][2], 1e-6)

def test_accumulated_micro_batches():
    "A dense gradient that an update reads is the sum over the step's micro-batches, also where gradients are zeroed in place"
    xb,yb = data(dmlp())
    for name in ('adam','fastai_adam'):
        res = []
        for model,opt,_ in pair(dmlp, opts[name]):
            engine = SparseEngine(model, opt, 60, **{**RigL_presets, 'stop_pct':1., 'batches_per_update':6}, seed=0)
            for t in range(60):
                for i in range(3):
                    engine.prepare(t, accumulating=True)
                    backward(model, xb+.1*i+.01*t, yb)
                if not engine.before_step(t): opt.step()
                opt.zero_grad()
            res.append(masks_of(model))
        assert same_masks(*res)

@pytest.mark.parametrize('zeroed', [False,True])
def test_a_dense_gradient_stays_when_weights_are_stored_another_way(zeroed):
    "What an update would read is the same before and after; zeros stay zeros, and fastai's optimizer can set it to zero in place"
    xb,yb = data(dmlp())
    _,(b,ob,report) = pair(dmlp, opts['fastai_adam'])
    engine = SparseEngine(b, ob, 60, **RigL_presets(batches_per_update=6))
    engine.expect_update()
    backward(b, xb, yb)
    if zeroed: ob.zero_grad()
    grads = [s.p.grad.clone() for s in engine.slots]
    assert all(g[~s.mask].any()!=zeroed for g,s in zip(grads, engine.slots))
    for again in (report.remove, lambda: sparse_compute(b, None, ob, plan=full(b))):
        again()
        assert all(torch.equal(g, s.p.grad) for g,s in zip(grads, engine.slots))
    ob.zero_grad()
    store_dense(b)
    ob.zero_grad()
    assert not any(s.p.grad.any() for s in engine.slots)

def test_redistribution_changes_counts():
    "Updates that move weights between layers give values and state new lengths, and the optimizer goes on with them"
    share = declares('redistribution', name='share', reads_grad=True)(lambda p, mask: float(p.grad.abs()[mask].mean()))
    xb,yb = data(dmlp())
    res = []
    for model,opt,_ in pair(dmlp, opts['adam']):
        dst = DynamicSparseTraining(model, opt, 60, **{**RigL_presets, 'stop_pct':1., 'batches_per_update':10}, redistribute_f=share, seed=0)
        res.append((steps(model, opt, 60, xb, yb, dst),masks_of(model),model,opt))
    assert res[0][0]==pytest.approx(res[1][0], abs=1e-6) and same_masks(res[0][1], res[1][1])
    assert {int(m.sum()) for m in res[0][1]}!={int(o.mask.sum()) for o in masked_params(pair(dmlp, opts['adam'])[0][0])}
    model,opt = res[1][2:]
    held = {id(p) for g in opt.param_groups for p in g['params']}
    assert held=={id(p) for p in model.parameters()} and all(opt.state[p]['exp_avg'].shape==p.shape for p in model.parameters())

@pytest.mark.parametrize('name', list(opts))
def test_there_and_back(name):
    "After `remove` the parameter is the same object, in model and optimizer, with the state that the masked run has; going on is equal"
    xb,yb = data(dmlp())
    (a,oa,_),(b,ob,report) = pair(dmlp, opts[name])
    c = [o.p for o in masked_params(a)]
    for m,o in ((a,oa),(b,ob)): steps(m, o, 5, xb, yb)
    report.remove()
    assert [type(o.p) for o in masked_params(b)]==[nn.Parameter]*3 and not report.handlers
    for p,q in zip(c, [o.p for o in masked_params(b)]):
        s,t = opt_state(oa, p),opt_state(ob, q)
        assert s.keys()==t.keys()
        for k in s:
            if isinstance(s[k], torch.Tensor): torch.testing.assert_close(s[k], t[k])
    assert_dead(b, ob)
    assert steps(a, oa, 5, xb, yb)==pytest.approx(steps(b, ob, 5, xb, yb), abs=1e-9)
    report = sparse_compute(b, None, ob, plan=full(b))
    steps(b, ob, 2, xb, yb)
    report.remove()
    unsparsify(b)

@pytest.mark.parametrize('name', list(opts))
def test_checkpoints_are_the_masked_models(name):
    "A checkpoint of model and optimizer from either run goes on in either run, with other masks than the loader had"
    xb,yb = data(dmlp())
    (a,oa,_),(b,ob,_) = pair(dmlp, opts[name])
    for m,o in ((a,oa),(b,ob)): steps(m, o, 5, xb, yb)
    files = [deepcopy((m.state_dict(), o.state_dict())) for m,o in ((a,oa),(b,ob))]
    ref = steps(a, oa, 5, xb, yb)
    for ms,os in files:
        for model,opt,_ in pair(dmlp, opts[name], sparsity=.6):
            if model is not None: steps(model, opt, 1, xb, yb)
            model.load_state_dict(ms)
            opt.load_state_dict(deepcopy(os))
            assert steps(model, opt, 5, xb, yb)==pytest.approx(ref, abs=1e-9)

@pytest.mark.parametrize('name', list(opts))
def test_state_for_an_optimizer_made_later(name):
    "An optimizer made after the swap takes a masked run's state before its first step"
    xb,yb = data(dmlp())
    (a,oa,_),(b,_,_) = pair(dmlp, opts[name])
    steps(a, oa, 5, xb, yb)
    ms,os = deepcopy((a.state_dict(), oa.state_dict()))
    b.load_state_dict(ms)
    ob = opts[name](list(b.parameters()))
    ob.load_state_dict(os)
    assert steps(b, ob, 5, xb, yb)==pytest.approx(steps(a, oa, 5, xb, yb), abs=1e-9)

def test_copies_and_pickles():
    "`deepcopy` and pickle keep computing with live weights, apart from the original"
    xb,yb = data(dmlp())
    _,(b,ob,_) = pair(dmlp, opts['sgd'])
    for copy in (deepcopy(b), pickle.loads(pickle.dumps(b))):
        assert_equal_models(b, copy)
        assert all(is_live(o) for o in masked_params(copy))
        steps(copy, opts['sgd'](list(copy.parameters())), 3, xb, yb)
        assert not torch.equal(copy[0].weight.sum(), b[0].weight.sum())
        assert_dead_face(copy)
    torch.save(b.state_dict(), f := io.BytesIO())
    assert f.tell()

def assert_dead_face(model):
    for o in masked_params(model): assert is_positive_zero(o.weight[~o.mask])

def test_the_parameter_is_its_live_values():
    "It is the same object, in the order of the mask, and what is written to it is written; who wants to see the dense weight asks `sparse_params` or `state_dict`"
    (a,_,_),(b,_,report) = pair(dmlp, opts['sgd'])
    v,mask = b[0].weight,b[0].weight_mask
    assert type(v) is nn.Parameter and torch.equal(v.detach(), a[0].weight[mask].detach())
    for (p,_,_),(q,_,_) in zip(sparse_params(a), sparse_params(b)): assert torch.equal(p, q)
    for m in (a,b): sum(p.pow(2).sum() for p in m.parameters()).backward()
    torch.testing.assert_close(sparse_params(b)[0][0].grad, zero_dead_(a[0].weight.grad, mask))
    with torch.no_grad(): v.mul_(2)
    torch.testing.assert_close(b.state_dict()['0.weight'], 2*a.state_dict()['0.weight'])
    report.remove()
    assert b[0].weight is v and v.shape==mask.shape

def test_only_live_weights_cost_memory():
    "Parameters, gradients and state have as many numbers as weights live; the dense parameter's memory is gone"
    xb,yb = data(dmlp())
    _,(b,ob,report) = pair(dmlp, opts['adam'])
    backward(b, xb, yb)
    ob.step()
    for o in masked_params(b):
        v,n = o.module._parameters[o.attr],int(o.mask.sum())
        assert v.numel()==v.grad.numel()==n and all(t.numel()==n for t in grad_history(ob, v)) and grad_history(ob, v)
        assert v.untyped_storage().nbytes()==n*v.element_size()

def test_sparse_params_summary_and_hooks():
    "What looks at a sparse model sees the same as before"
    (a,_,_),(b,_,_) = pair(dmlp, opts['sgd'])
    for (p,m,s),(q,n,t) in zip(sparse_params(a), sparse_params(b)): assert torch.equal(p.detach(), q.detach()) and torch.equal(m, n) and s==t
    x,y = [sparse_summary(m).df for m in (a,b)]
    assert x.drop(columns='note').equals(y.drop(columns='note')) and all(o.endswith('live weights only') for o in y.note[y.target.notna()])
    apply_masks(b)
    with pytest.raises(ValueError, match='call remove'): unsparsify(b)

def test_mask_written_by_hand():
    "A mask that somebody writes to is followed: what dies is gone, what is born starts at zero"
    _,(b,ob,_) = pair(dmlp, opts['adam'])
    xb,yb = data(dmlp())
    steps(b, ob, 2, xb, yb)
    w,mask = sparse_params(b)[0][0].detach(),b[0].weight_mask
    born,died = (~mask).nonzero()[0],mask.nonzero()[0]
    mask[tuple(born)],mask[tuple(died)] = True,False
    steps(b, ob, 0, xb, yb)
    b(xb)
    new = sparse_params(b)[0][0].detach()
    assert new[tuple(born)]==0 and new[tuple(died)]==0
    keep = mask.clone()
    keep[tuple(born)] = False
    assert torch.equal(new[keep], w[keep])

class Norm2(torch.optim.SGD): "An optimizer that might do anything"

def test_what_is_refused():
    "Each with the name of what is wrong, before anything changes"
    def model():
        m = mlp()
        sparsify_model(m, .5, seed=0)
        return m
    m = model()
    names = [o.name for o in masked_params(m)]
    refused = [(dict(opt=Norm2(m.parameters(), lr=.1)), 'opt is a Norm2'), (dict(opt=torch.optim.LBFGS(m.parameters())), 'opt is a LBFGS'),
        (dict(opt=Lookahead(FastaiSGD(list(m.parameters()), lr=.1))), 'opt is a Lookahead'), (dict(plan={'nobody':'rows'}), 'plan names nobody'),
        (dict(plan={names[0]:'fast'}), "the route 'fast'")]
    for kwargs,message in refused:
        with pytest.raises(ValueError, match=message): sparse_compute(m, None, **kwargs)
        assert all(isinstance(o.p, nn.Parameter) for o in masked_params(m))
    with pytest.raises(ValueError, match='has no masks'): sparse_compute(mlp(), None)
    report = sparse_compute(m, None, plan=full(m))
    with pytest.raises(ValueError, match='computes sparsely already'): sparse_compute(m, None, plan=full(m))
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    with pytest.raises(ValueError, match='dense history'): DynamicSparseTraining(m, opt, 50, **{**SNFS_presets, 'batches_per_update':5})
    report.remove()

def test_measuring_changes_nothing():
    "Choosing leaves weights, buffers, modes, gradients and random numbers as they were, and the plan makes the same choice again"
    torch.manual_seed(0)
    body = nn.Conv2d(3, 40, 3),nn.BatchNorm2d(40),nn.Conv2d(40, 30, 1),nn.Dropout(.5),nn.Flatten()
    model = nn.Sequential(*body, nn.Linear(30*16, 300), nn.ReLU(), nn.Linear(300, 2))
    sparsify_model(model, .95, seed=0)
    xb = torch.randn(16, 3, 6, 6)
    before,random = deepcopy(model.state_dict()),torch.get_rng_state()
    report = sparse_compute(model, xb)
    assert all(torch.equal(before[k], v) for k,v in model.state_dict().items()) and list(before)==list(model.state_dict())
    assert all(m.training for m in model.modules()) and all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert set(report.plan)=={'0.weight','2.weight','5.weight','7.weight'}
    assert all((r!='dense')==(report.ratios[n]>=1.1) for n,r in report.plan.items())
    report.remove()
    again = sparse_compute(model, xb, plan=report.plan)
    assert again.plan==report.plan

def test_a_failing_model_is_left_as_it_was():
    "An input that doesn't fit raises its own error, and nothing is swapped"
    m = mlp()
    sparsify_model(m, .5, seed=0)
    with pytest.raises(ValueError, match='features'): sparse_compute(m, torch.randn(2, 5))
    assert all(isinstance(o.p, nn.Parameter) for o in masked_params(m))

def test_frozen_and_shared_weights():
    "A frozen weight stays frozen on both sides; a shared one stays dense"
    m = nn.Sequential(nn.Linear(4,4), nn.Linear(4,4), nn.Linear(4,4))
    m[2].weight = m[1].weight
    m[0].weight.requires_grad_(False)
    sparsify_model(m, .5, seed=0)
    report = sparse_compute(m, None, plan={'0.weight':'rows'})
    assert not m[0].weight.requires_grad and list(report.plan)==['0.weight']
    m(torch.randn(2,4)).sum().backward()
    assert m[0].weight.grad is None
    report.remove()
    assert not m[0].weight.requires_grad

def test_unsparsify_parameter_refuses_live_values():
    "As `unsparsify` does: the mask is what says where the live values lie"
    m = mlp()
    sparsify_model(m, .5, seed=0)
    report = sparse_compute(m, None, plan={'0.weight':'rows'})
    with pytest.raises(ValueError, match='0.weight is stored sparse: call remove'): unsparsify_parameter(m, '0.weight')
    assert '0.weight_mask' in m.state_dict()
    unsparsify_parameter(m, '2.weight')
    report.remove()
    unsparsify_parameter(m, '0.weight')

def test_dense_gradients_at_updates_only():
    "The whole gradient is there for a batch that an update reads, and forgotten after its step"
    xb,yb = data(dmlp())
    _,(b,ob,_) = pair(dmlp, opts['sgd'])
    engine,seen = SparseEngine(b, ob, 12, **{**RigL_presets, 'stop_pct':1., 'batches_per_update':4}, seed=0),[]
    for t in range(12):
        engine.prepare(t)
        backward(b, xb, yb)
        seen.append({bool(handler_of(o.p).dense_grad.terms) for o in masked_params(b)})
        if not engine.before_step(t): ob.step()
        ob.zero_grad()
    assert [t for t,o in enumerate(seen) if True in o]==[4,8] and all(len(o)==1 for o in seen)

@pytest.mark.parametrize('rows,n,kept', [(2,1,2), (2,3,6), (2,20,1), (40,1,1)])
def test_a_dense_gradient_is_kept_as_small_as_it_can_be(rows, n, kept):
    "Two factors a micro-batch while they are smaller than the weight, else one tensor; it is the masked model's, also if the inputs are overwritten"
    make = lambda: mlp((12,16,3), dtype=torch.double)
    (a,oa,_),(b,ob,_) = pair(make, opts['sgd'])
    batches = [(torch.randn(rows, 12).double(),torch.randn(rows, 3).double()) for _ in range(n)]
    grads = []
    for model,opt in ((a,oa),(b,ob)):
        held = SparseEngine(model, opt, 100, **{**RigL_presets, 'batches_per_update':4}, seed=0)
        held.prepare(4)
        buffer = torch.zeros(rows, 12).double()
        for xb,yb in batches: backward(model, buffer.copy_(xb), yb)
        buffer.zero_()
        grads.append([o.weight.grad for o in masked_params(model)])
    for one,other in zip(*grads): torch.testing.assert_close(one, other)
    terms = handler_of(masked_params(b)[0].p).dense_grad.terms
    assert kept==(1 if isinstance(terms[0], torch.Tensor) else 2*len(terms))

@pytest.mark.parametrize('rows', [2, 40])
@pytest.mark.parametrize('grown,dropped', [(1,1), (3,0), (0,2)])
def test_a_dense_gradient_follows_a_mask_that_changes_before_it_is_read(rows, grown, dropped):
    "Another number of live weights between the backward and the reading: the gradient is the masked model's"
    grads = []
    xb,yb = torch.randn(rows, 12).double(),torch.randn(rows, 3).double()
    for model,opt,_ in pair(lambda: mlp((12,16,3), dtype=torch.double), opts['sgd']):
        held = SparseEngine(model, opt, 100, **{**RigL_presets, 'batches_per_update':4}, seed=0)
        held.prepare(4)
        backward(model, xb, yb)
        for o in masked_params(model):
            mask = o.mask.view(-1)
            dead,live = (~mask).nonzero()[:grown,0],mask.nonzero()[:dropped,0]
            mask[dead],mask[live] = True,False
            handler_of(o.p).check()
        grads.append([o.weight.grad for o in masked_params(model)])
    for one,other in zip(*grads): torch.testing.assert_close(one, other)

@pytest.mark.parametrize('reparametrize', [weight_norm, spectral_norm, orthogonal])
def test_a_reparametrization_that_is_refused_breaks_nothing(reparametrize):
    "It would compute on a vector of live values; the layer computes, trains, is saved and goes back as before"
    (a,oa,_),(b,ob,report) = pair(dmlp, opts['sgd'])
    xb,yb = data(dmlp())
    with pytest.raises((RuntimeError,ValueError), match='live weights was taken out|Got a tensor of 1 dim'): reparametrize(b[0])
    torch.testing.assert_close(steps(b, ob, 3, xb, yb), steps(a, oa, 3, xb, yb))
    assert_equal_models(a, b)
    report.remove()
    assert_equal_models(a, b)
    assert [n for n,_ in a.named_parameters()]==[n for n,_ in b.named_parameters()]

def test_second_derivatives_are_refused():
    "A penalty on gradients would be wrong without a word"
    (_,_,_),(b,ob,_) = pair(dmlp, opts['sgd'], dense=['0.weight'])
    x = torch.randn(4, 6).double().requires_grad_()
    with pytest.raises(RuntimeError, match='create_graph=True.*store_dense'): torch.autograd.grad(b(x).sum(), x, create_graph=True)

def test_a_gradient_that_is_zero_by_itself_is_no_new_step():
    "Two micro-batches, the first of them zero for all live weights: the dense gradient is the sum of both; zeros that somebody wrote start anew"
    for zeroed in (False,True):
        grads = []
        for compute in (False,True):
            model = nn.Sequential(nn.Linear(4, 2, bias=False)).double()
            sparsify_model(model, .5, seed=0)
            o, = masked_params(model)
            o.mask.copy_(torch.tensor([[1,1,0,0],[1,1,0,0]]).bool())
            opt = torch.optim.SGD(model.parameters(), lr=.1)
            if compute: sparse_compute(model, None, opt, {'0.weight':'rows'})
            held = SparseEngine(model, opt, 100, **{**RigL_presets, 'batches_per_update':4}, seed=0)
            held.prepare(4)
            model(torch.tensor([[0.,0,2,2]]).double()).sum().backward()
            if zeroed: opt.zero_grad(set_to_none=False)
            model(torch.tensor([[.5,1,0,3]]).double()).sum().backward()
            grads.append(masked_params(model)[0].weight.grad.clone())
        assert torch.equal(grads[1], torch.tensor([[.5,1,0,3]]*2).double() if zeroed else torch.tensor([[.5,1,2,5]]*2).double())
        if not zeroed: assert torch.equal(*grads)

@pytest.mark.parametrize('opt_f', [lambda ps: torch.optim.Adam(ps, lr=.1), lambda ps: FastaiAdam(ps, lr=.1)])
def test_an_optimizer_of_some_weights_trains_the_live_values(opt_f):
    "Made after the swap, from `layer.weight`"
    xb,yb = data(dmlp())
    (a,_,_),(b,_,_) = pair(dmlp, opts['sgd'])
    for m in (a,b): steps(m, opt_f([m[i].weight for i in (0,2,4)]), 3, xb, yb)
    assert_equal_models(a, b)

def test_a_part_of_a_model_goes_to_live_weights_and_back():
    "The whole goes on, whoever enforces its masks"
    runs = []
    xb,yb = data(dmlp())
    for compute in (False,True):
        torch.manual_seed(0)
        model = nn.Sequential(dmlp(), nn.Tanh())
        sparsify_model(model, .7, seed=0)
        opt = opts['sgd'](list(model.parameters()))
        losses = steps(model, opt, 2, xb, yb)
        if compute: report = sparse_compute(model[0], None, opt, full(model[0]))
        losses += steps(model, opt, 2, xb, yb)
        if compute: report.remove()
        losses += steps(model, opt, 2, xb, yb)
        if compute: sparse_compute(model, None, opt, full(model))
        if compute: store_dense(model[0])
        runs.append((model, losses+steps(model, opt, 2, xb, yb)))
    torch.testing.assert_close(runs[0][1], runs[1][1])
    assert_equal_models(runs[0][0], runs[1][0])

def test_an_encoder_with_padding_evaluates():
    "Nested tensors, torch's default there, want dense weights in all layers"
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    sparsify_model(model, .9, chosen='layers.1.*', seed=0)
    x,pad = torch.randn(2, 5, 16),torch.tensor([[0]*5,[0,0,0,1,1]]).bool()
    out = lambda: torch.where(pad[...,None], 0, model(x, src_key_padding_mask=pad))
    with torch.no_grad(): want = out()
    report = sparse_compute(model, None, plan=full(model))
    with torch.no_grad(): torch.testing.assert_close(out(), want)
    report.remove()
    assert model.use_nested_tensor

@pytest.mark.parametrize('copied', [deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_the_route_and_the_remark(copied):
    "So that they go on bit for bit, and say the same"
    (_,_,_),(b,_,_) = pair(dmlp, opts['sgd'], route='rows')
    new = copied(b)
    assert [handler_of(o.p).kernel for o in masked_params(new)]==['rows']*3
    assert sparse_summary(new).df.equals(sparse_summary(b).df)

class Policy(nn.Module):
    "Returns no tensor"
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(256, 256)

    def forward(self, x): return torch.distributions.Normal(self.net(x), 1.)

def test_models_without_tensors_in_their_output_are_measured():
    "Whichever way is faster"
    model = Policy()
    sparsify_model(model, .98, seed=0)
    assert list(sparse_compute(model, torch.randn(256, 256)).plan)==['net.weight']

def test_inputs_by_name():
    "They are measured as inputs by position are"
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(512, 512)
        def forward(self, x, scale=None, y=None): return self.a(x+y)
    torch.manual_seed(0)
    model,x = Named(),torch.randn(32, 512)
    sparsify_model(model, .98, seed=0)
    want = model(x, y=x)
    report = sparse_compute(model, dict(y=x, x=x))
    assert report.plan=={'a.weight':'rows'} and 'a.weight' in report.df.parameter.tolist()
    torch.testing.assert_close(model(x, y=x), want, rtol=1e-4, atol=1e-5)

def test_inference_mode_leaves_nothing_behind():
    "Measured and stored dense again there, the model trains on"
    (a,oa,_),(b,ob,report) = pair(dmlp, opts['sgd'])
    xb,yb = data(dmlp())
    with torch.inference_mode():
        report.remove()
        sparse_compute(b, xb, ob).remove()
    torch.testing.assert_close(steps(b, ob, 2, xb, yb), steps(a, oa, 2, xb, yb))

@pytest.mark.parametrize('kwargs,match', [(dict(plan=['0.weight']), 'plan is a list'), (dict(plan='rows'), 'plan is a str'), (dict(opt='adam', plan={}), 'opt is a str')])
def test_arguments_of_other_types_are_refused_by_name(kwargs, match):
    "Before anything is swapped"
    model = dmlp()
    sparsify_model(model, .5, seed=0)
    with pytest.raises(ValueError, match=match): sparse_compute(model, None, **kwargs)

@pytest.mark.parametrize('settings,opt_func,match', [(dict(sparse_compute={'nobody':'rows'}), FastaiAdam, 'names nobody'),
    (dict(sparse_compute={'0.weight':'rows'}), lambda ps, lr: Lookahead(FastaiSGD(ps, lr=lr)), 'Lookahead'),
    (dict(SNFS_presets, sparse_compute=True), FastaiAdam, 'dense history'), (dict(sparse_compute=True, grow_state_f=own_step_count), FastaiAdam, 'own_step_count'),
    (dict(sparse_compute=True, grow_state_f=reset_state), FastaiAdam, 'grow_state_f'),
    (dict(sparse_compute=True, rules=[('4.weight', {}), ('*', dict(grow_score_f=gradient_momentum))]), FastaiAdam, 'dense history')])
def test_a_callback_that_is_refused_leaves_a_dense_model_dense(tmp_path, settings, opt_func, match):
    "Weights that a sparsity would have zeroed are there"
    learn = Learner(loaders(*digits()), digits_mlp(), opt_func=opt_func, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    before = deepcopy(learn.model.state_dict())
    with pytest.raises(ValueError, match=match), learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=DynamicSparseTrainingCallback(sparsity=.7, **{**RigL_presets, 'batches_per_update':3, **settings}))
    after = learn.model.state_dict()
    assert list(before)==list(after) and all(torch.equal(before[k], after[k]) for k in before)

def test_a_checkpoint_of_another_shape_is_refused_with_dense_shapes():
    "Both are named as users know them, and nothing is written"
    model = dmlp()
    sparsify_model(model, .5, seed=0)
    sparse_compute(model, None, plan={'0.weight':'rows'})
    state = model.state_dict()
    before,shape = deepcopy(state),tuple(state['0.weight'].shape)
    with pytest.raises(RuntimeError, match=re.escape(f'0.weight: the checkpoint has the shape (3, 2), and the model {shape}')): model.load_state_dict({**state, '0.weight':torch.ones(3, 2)})
    assert all(torch.equal(before[k], v) for k,v in model.state_dict().items())

def test_what_is_counted_is_the_masked_models():
    "FLOPs and bits, dense and sparse"
    (a,_,_),(b,_,_) = pair(dmlp, opts['sgd'])
    xb,_ = data(dmlp())
    for sparse in (False,True):
        assert count_flops(a, xb, sparse)==count_flops(b, xb, sparse)>0
        assert model_bits(a, sparse=sparse)==model_bits(b, sparse=sparse)
    assert all(is_live(o) for o in masked_params(b))

class Counting(nn.Module):
    "Counts its forwards in an attribute and in a buffer, and writes to its input"
    def __init__(self):
        super().__init__()
        self.inner,self.seen = nn.Linear(256, 256),[]
        self.register_buffer('n', torch.zeros(()))

    def forward(self, x):
        self.seen.append(len(x))
        self.n += 1
        return self.inner(x.add_(1))

def test_measuring_leaves_model_and_batch_as_they_were():
    "Attributes, buffers, modes, the batch and random states, whichever way is faster"
    model,xb = Counting(),torch.zeros(64, 256)
    sparsify_model(model, .95, seed=0)
    states = lambda: (torch.get_rng_state().tolist(), model.seen, model.n.item(), model.training, xb.abs().sum().item())
    before = deepcopy(states())
    sparse_compute(model, xb)
    assert states()==before

def test_the_summary_shows_the_choice():
    "With the ratio that was measured"
    m = nn.Sequential(nn.Linear(512,1024), nn.ReLU(), nn.Linear(1024,4))
    sparsify_model(m, .98, seed=0)
    report = sparse_compute(m, torch.randn(64,512))
    df = sparse_summary(m).df
    notes = dict(zip(df.iloc[:,0], df.note))
    assert report.plan['0.weight']!='dense' and notes['0.weight']==f"live weights only, {report.ratios['0.weight']:.1f} times as fast"

@pytest.mark.parametrize('method', ['static','SET','RigL'])
def test_float32_follows_the_masked_masks(method):
    "Losses to 1e-4 when the masks of the masked run are replayed"
    f32 = lambda: mlp((6,16,12,3))
    xb,yb = data(f32())
    (a,oa,_),(b,ob,_) = pair(f32, opts['sgd'])
    parts = dict(SET=SET_presets, RigL={**RigL_presets, 'stop_pct':1.})
    engine = None if method=='static' else SparseEngine(a, oa, 200, **{**parts[method], 'batches_per_update':20}, seed=0)
    for t in range(200):
        if engine: engine.prepare(t)
        losses = [backward(m, xb+.001*t, yb).item() for m in (a,b)]
        assert losses[0]==pytest.approx(losses[1], abs=1e-4)
        replaced = engine and engine.before_step(t)
        for m,o in ((a,oa),(b,ob)):
            if not replaced: o.step()
            o.zero_grad()
        for o,m in zip(masked_params(b), masks_of(a)): o.mask.copy_(m)
        b(xb)
    assert same_masks(masks_of(a), masks_of(b))

def test_an_engine_that_is_there_already():
    "Swapping after the engine was made, also right before an update, and back in the middle"
    xb,yb = data(dmlp())
    res = []
    for compute in (False,True):
        torch.manual_seed(0)
        m = dmlp()
        sparsify_model(m, .7, seed=0)
        opt = opts['adam'](list(m.parameters()))
        dst = DynamicSparseTraining(m, opt, 60, **{**RigL_presets, 'stop_pct':1., 'batches_per_update':6}, seed=0)
        losses = steps(m, opt, 6, xb, yb, dst)
        report = sparse_compute(m, None, opt, plan=full(m)) if compute else None
        losses += steps(m, opt, 18, xb, yb, dst)
        if compute: report.remove()
        losses += steps(m, opt, 18, xb, yb, dst)
        res.append((losses,masks_of(m)))
    assert res[0][0]==pytest.approx(res[1][0], abs=1e-9) and same_masks(res[0][1], res[1][1])
    m = mlp()
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    DynamicSparseTraining(m, opt, 50, **{**SNFS_presets, 'batches_per_update':5})
    with pytest.raises(ValueError, match='dense history'): sparse_compute(m, None, opt, plan=full(m))
    assert all(isinstance(o.p, nn.Parameter) for o in masked_params(m))

# --- the callback

class Losses(Callback):
    def __init__(self): self.losses = []
    def after_loss(self):
        if self.training: self.losses.append(self.learn.loss.item())

def fitted(folder, compute=None, n=2, opt_func=FastaiAdam, cbs=(), learn=None, **settings):
    "A learner on digits in float64, what it lost, and its callback"
    if learn is None:
        learn = Learner(loaders(*digits(), shuffle=False), digits_mlp(), CrossEntropyLossFlat(), path=folder, opt_func=opt_func)
        sparsify_model(learn, .7, seed=0)
    cb = DynamicSparseTrainingCallback(sparse_compute=compute, **{**RigL_presets, 'batches_per_update':3, 'seed':0, **settings})
    watch = Losses()
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-3, cbs=[cb, watch, *cbs])
    return learn,watch.losses,cb

whole_plan = {'0.weight':'rows', '2.weight':'rows'}

@pytest.mark.parametrize('n_acc', [None,48])
def test_callback(n_acc, tmp_path):
    "With a plan: the masked run's losses, masks and weights, and dense weights at the end; also with accumulated batches"
    cbs = [GradientAccumulation(n_acc)] if n_acc else []
    a,la,_ = fitted(tmp_path, cbs=cbs)
    b,lb,cb = fitted(tmp_path, whole_plan, cbs=cbs)
    assert la==pytest.approx(lb, abs=1e-9) and cb.report.plan==whole_plan and cb.state['n_updates']>2
    assert_equal_models(a.model, b.model, 1e-9)
    assert all(isinstance(o.p, nn.Parameter) for o in masked_params(b.model))

def test_callback_measures_once(tmp_path):
    "The first batch of the first fit decides; the next fit takes the plan, and so does a process that loads the saved state"
    learn,_,cb = fitted(tmp_path, True)
    assert set(cb.report.plan)=={'0.weight','2.weight'} and cb.report.ratios
    cb.plan = whole_plan
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=cb)
    assert cb.report.plan==whole_plan and not cb.report.ratios and cb.state['plan']==whole_plan
    other = DynamicSparseTrainingCallback(sparse_compute=True, **{**RigL_presets, 'batches_per_update':3})
    other.load_state_dict(cb.state)
    assert other.plan==whole_plan
    without = DynamicSparseTrainingCallback(**RigL_presets)
    without.load_state_dict(cb.state)
    assert without.plan is None

def test_callback_measures_again_when_half_has_died(tmp_path, monkeypatch):
    "A model that starts dense is swapped where it gets sparse enough on its way; losses and masks are the masked run's"
    densities,make = {},lambda: Learner(loaders(*digits(), shuffle=False), digits_mlp(), CrossEntropyLossFlat(), path=tmp_path, opt_func=FastaiAdam)
    def ratio(handler, *args, **kwargs):
        density = round(len(handler.index)/handler.p.numel(), 2)
        densities.setdefault(tuple(handler.shape), {})[density] = True
        return 2. if density<.4 else .5
    monkeypatch.setattr('fastsparse.model.plan._layer_speedup', ratio)
    settings = dict(GMP_presets, sparsity=.9, batches_per_update=2)
    (a,la,_),(b,lb,cb) = [fitted(tmp_path, o, learn=make(), **settings) for o in (None,True)]
    assert la==pytest.approx(lb, abs=1e-9) and all(torch.equal(p.mask, q.mask) for p,q in zip(masked_params(a.model), masked_params(b.model)))
    assert len(densities)==2 and set(cb.plan.values())<={'rows'}
    for first,*later in densities.values(): assert first==1 and later[-1]<.25 and all(y<=x/2 for x,y in zip([first,*later], later))

def test_callback_never_measures_where_a_plan_is_given(tmp_path, monkeypatch):
    "Not after half of the weights have died either"
    monkeypatch.setattr(compute, 'measure', lambda *args: pytest.fail('measured'))
    learn = Learner(loaders(*digits(), shuffle=False), digits_mlp(), CrossEntropyLossFlat(), path=tmp_path, opt_func=FastaiAdam)
    _,_,cb = fitted(tmp_path, whole_plan, learn=learn, **dict(GMP_presets, sparsity=.9, batches_per_update=2))
    assert cb.plan==whole_plan

@pytest.mark.parametrize('opt_func', [FastaiAdam, partial(OptimWrapper, opt=torch.optim.Adam)])
def test_callback_saves_the_masked_run(opt_func, tmp_path):
    "What is saved in the middle of a fit, optimizer included, loads into a masked learner, and an export works on"
    class Saving(Callback):
        order = 100
        def after_batch(self):
            if self.training and self.epoch==1 and self.iter==4: self.learn.save(self.name_)
        def after_epoch(self): self.learn.export(f'{self.name_}.pkl')
    res = []
    for name,compute in (('a',None),('b',whole_plan)):
        saving = Saving()
        saving.name_ = name
        learn,*_ = fitted(tmp_path, compute, opt_func=opt_func, cbs=[saving])
        res.append(torch.load(tmp_path/'models'/f'{name}.pth', weights_only=False))
        loaded = load_learner(tmp_path/f'{name}.pkl')
        for o in masked_params(loaded.model): assert o.weight.shape==o.mask.shape and is_positive_zero(o.weight[~o.mask])
    a,b = res
    assert list(a['model'])==list(b['model'])
    for k in a['model']: torch.testing.assert_close(a['model'][k], b['model'][k], rtol=1e-9, atol=1e-9)
    sa,sb = [o['opt']['state'] for o in res]
    for i in (sa if isinstance(sa, dict) else range(len(sa))):
        x,y = sa[i],sb[i]
        for k,t in x.items():
            if isinstance(t, torch.Tensor): torch.testing.assert_close(t, y[k], rtol=1e-9, atol=1e-9)
    learn.load('b', with_opt=True)

def test_callback_on_a_dense_model_and_lr_find(tmp_path):
    "Masks that the engine makes are followed too; the learning-rate finder rests"
    learn = Learner(loaders(*digits()), digits_mlp(), CrossEntropyLossFlat(), path=tmp_path)
    fitted(tmp_path, whole_plan, learn=learn, sparsity=.5)
    assert sum(int(o.mask.sum()) for o in masked_params(learn.model))==round(.5*sum(o.p.numel() for o in masked_params(learn.model)))
    learn.add_cb(DynamicSparseTrainingCallback(sparse_compute=True, **RigL_presets))
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=5, show_plot=False)
    assert all(isinstance(o.p, nn.Parameter) for o in masked_params(learn.model))

@pytest.mark.parametrize('kwargs,message', [(dict(opt_func=lambda ps, lr: Lookahead(FastaiSGD(ps, lr=lr))), 'Lookahead'),
    (dict(grow_score_f=gradient_momentum, opt_func=partial(FastaiSGD, mom=.9)), 'dense history')])
def test_callback_refuses_by_name(kwargs, message, tmp_path):
    "Optimizers that are not elementwise and methods with a dense history; the model is left as it was"
    learn = Learner(loaders(*digits()), digits_mlp(), CrossEntropyLossFlat(), path=tmp_path, opt_func=kwargs.pop('opt_func'))
    sparsify_model(learn, .7, seed=0)
    before = deepcopy(learn.model.state_dict())
    with pytest.raises(ValueError, match=message): fitted(tmp_path, True, learn=learn, **kwargs)
    assert all(isinstance(o.p, nn.Parameter) for o in masked_params(learn.model)) and all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())

# --- two ranks

def two_ranks(rank, folder):
    "One of two ranks under data parallel training, on live weights and masked; each measures for itself"
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/init', rank=rank, world_size=2)
    out = {}
    for compute in (False,True):
        m = mlp((6,12,9,3), seed=4, dtype=torch.double)
        sparsify_model(m, .6, seed=0)
        opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
        if compute: sparse_compute(m, None, opt, plan=full(m))
        ddp = nn.parallel.DistributedDataParallel(m)
        if not compute:
            with pytest.raises(ValueError, match='wrapped for data parallel'): sparse_compute(ddp, None)
        settings = {**RigL_presets, 'stop_pct':1., 'batches_per_update':4}
        for changes in (dict(redistribute_f=lambda p, mask: 1.), dict(sparsity=CubicSchedule(.6, .8, 20)), dict(grow_score_f=None)) if compute else ():
            with pytest.raises(ValueError, match='take a method that keeps the number'): SparseEngine(m, opt, 30, **{**settings, **changes})
        engine = SparseEngine(m, opt, 30, **settings, seed=0)
        for t in range(30):
            engine.prepare(t)
            xb,yb = data(m if not compute else mlp((6,12,9,3), dtype=torch.double), 32, seed=t)
            backward(ddp, xb[rank::2], yb[rank::2])
            if not engine.before_step(t): opt.step()
            opt.zero_grad()
        out[compute] = {k:v.clone() for k,v in m.state_dict().items()}
    big = nn.Sequential(nn.Linear(256,512), nn.ReLU(), nn.Linear(512,256))
    sparsify_model(big, .95, seed=0)
    out['plan'] = sparse_compute(big, torch.randn(2+62*rank, 256)).plan
    torch.save(out, f'{folder}/{rank}.pt')
    dist.destroy_process_group()

def test_two_ranks(tmp_path):
    "Masks and weights of both ranks are the masked run's, whose gradients are averaged; rank 0's plan holds on both; methods that change a layer's number of live weights are refused"
    torch.multiprocessing.spawn(two_ranks, (str(tmp_path),), nprocs=2)
    a,b = [torch.load(tmp_path/f'{r}.pt') for r in (0,1)]
    assert a['plan']==b['plan']
    for o in (a,b):
        for k,v in a[False].items(): torch.testing.assert_close(o[True][k], v, rtol=1e-7, atol=1e-7)
    assert all(torch.equal(a[True][k], b[True][k]) for k in a[True] if k.endswith('_mask'))

class InPlace(nn.Module):
    "Layers whose outputs are written to in place"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.conv = nn.Linear(6, 8),nn.Linear(8, 3),nn.Conv2d(1, 4, 1)

    def forward(self, x):
        h = self.a(x).mul_(2).relu_()
        c = self.conv(h[:,None,:,None].detach()).relu_()
        return torch.relu_(self.b(h))+c.sum()

@pytest.mark.parametrize('n', [1,5])
@pytest.mark.parametrize('route', ['rows'])
def test_outputs_may_be_changed_in_place(route, n):
    "What a sparse layer returns can be written to, as a dense layer's can"
    (a,oa,_),(b,ob,_) = pair(InPlace, torch_opts['sgd'], route=route)
    xb,yb = torch.randn(n, 6),torch.randn(n, 3)
    for (x,y) in zip(steps(a, oa, 3, xb, yb), steps(b, ob, 3, xb, yb)): assert x==pytest.approx(y, abs=1e-5)
    assert_equal_models(a, b, 1e-5)

def _other_count(m, other): m[0].weight_mask[0] = True
def _other_checkpoint(m, other): m.load_state_dict(other.state_dict())

@pytest.mark.parametrize('opt_f', ['sgd','adam','fastai_adam'])
@pytest.mark.parametrize('change', [_other_count, _other_checkpoint, None])
def test_an_optimizer_made_after_the_swap_follows(change, opt_f):
    "It holds parameters that are replaced before its first step, by another number of live weights or by `remove`, and trains what replaced them"
    def make(s):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        sparsify_model(m, s, seed=0)
        return m
    a,b,other = make(.7),make(.7),make(.5)
    report = sparse_compute(b, None, plan=full(b))
    oa,ob = [opts[opt_f](list(m.parameters())) for m in (a,b)]
    for m in (a,b):
        if change: change(m, other)
    if not change: report.remove()
    xb,yb = torch.randn(6, 8),torch.randn(6, 4)
    before = b[0].weight.detach().clone()
    for x,y in zip(steps(a, oa, 4, xb, yb), steps(b, ob, 4, xb, yb)): assert x==pytest.approx(y, abs=1e-5)
    assert not before.equal(b[0].weight.detach())
    assert_equal_models(a, b, 1e-5)

@pytest.mark.parametrize('at_once', [1,7,40,10**6])
@pytest.mark.parametrize('batches', ['one','many','clipped'])
def test_rows_of_the_dense_weight_are_the_whole(at_once, batches, monkeypatch):
    "Weight and gradient, some rows at a time, are what the whole has there, of one backward or several, clipped or not"
    monkeypatch.setattr('fastsparse.weights.live._at_once', at_once)
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Unflatten(1, (9,1)), nn.Conv1d(9, 4, 1)).double()
    sparsify_model(m, .6, seed=0)
    sparse_compute(m, None, plan={'0.weight':'rows', '3.weight':'rows'})
    for o in masked_params(m): handler_of(o.p).keep_dense_grad = True
    for _ in range(5 if batches=='many' else 1): m(torch.randn(3, 5).double()).pow(2).sum().backward()
    if batches=='clipped': nn.utils.clip_grad_norm_(m.parameters(), .1)
    for o in masked_params(m):
        parts = list(handler_of(o.p).parts(True))
        w = o.weight
        assert len(parts)==-(-len(w)//max(1, at_once//w[0].numel(), len(w)//8)) and all(p.shape[1:]==w.shape[1:] for _,p in parts)
        torch.testing.assert_close(torch.cat([p for _,p in parts]), w.detach(), rtol=0, atol=0)
        torch.testing.assert_close(torch.cat([p.grad for _,p in parts]), w.grad, rtol=1e-12, atol=1e-12)

def test_updates_by_rows_are_the_masked_runs(monkeypatch):
    "Equal masks and losses in float64 where the dense gradient is made seven entries at a time"
    monkeypatch.setattr('fastsparse.weights.live._at_once', 7)
    losses,masks = [],[]
    for model,opt,_ in pair(lambda: nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)).double(), torch_opts['adam']):
        dst = DynamicSparseTraining(model, opt, 60, **{**RigL_presets, 'batches_per_update':3, 'seed':2})
        g,out = torch.Generator().manual_seed(0),[]
        for _ in range(60):
            xb,yb = torch.randn(8, 12, generator=g, dtype=torch.double),torch.randn(8, 4, generator=g, dtype=torch.double)
            loss = (model(xb)-yb).pow(2).mean()
            loss.backward()
            dst.step()
            dst.opt.zero_grad()
            out.append(loss.item())
        assert dst.n_updates>5
        losses.append(out)
        masks.append([o.mask.clone() for o in masked_params(model)])
    assert losses[0]==pytest.approx(losses[1], abs=1e-9) and all(map(torch.equal, *masks))

@pytest.mark.parametrize('grow', [gradient_magnitude,MagnitudePlusGradient(.1)])
def test_an_update_makes_no_dense_weight(grow, monkeypatch):
    "Nor a dense gradient of a whole layer, twice as large as all that lives: scores that look at each weight by itself are asked for rows"
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 8))
    sparsify_model(model, .8, seed=0)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    engine = SparseEngine(model, opt, n_steps=100, **{**RigL_presets, 'batches_per_update':10, 'grow_score_f':grow})
    sparse_compute(model, None, opt, plan=full(model))
    engine.expect_update()
    model(torch.randn(16, 40)).pow(2).sum().backward()
    before = [o.mask.clone() for o in masked_params(model)]
    def made(self): raise AssertionError('a dense weight was made')
    monkeypatch.setattr(LiveWeight, 'p', property(made))
    engine.update(10)
    monkeypatch.undo()
    assert not any(torch.equal(a, o.mask) for a,o in zip(before, masked_params(model)))

def test_rectifiers_in_a_row_of_layers():
    "Computed with the layer before them, to the bit what they were; each layer called alone, hooked, copied or stored dense is itself"
    torch.manual_seed(0)
    m,x = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Sequential(nn.Linear(24, 16), nn.ReLU()), nn.ReLU(), nn.Linear(16, 4)),torch.randn(8, 12)
    sparsify_model(m, .6, seed=0)
    report = sparse_compute(m, None, plan=full(m))
    assert isinstance(m[2], nn.Sequential) and type(m[2]) is type(m) is not nn.Sequential
    def grads(f):
        m.zero_grad()
        y = f(x)
        y.pow(2).sum().backward()
        return [y, *[p.grad.clone() for p in m.parameters()]]
    def apart(x): return m[4](m[3](m[2][1](m[2][0](m[1](m[0](x))))))
    for a,b in zip(grads(m), grads(apart)): assert a.equal(b)
    assert m[0](x).min()<0
    seen = []
    handle = m[0].register_forward_hook(lambda m, i, o: seen.append(o.min().item()))
    hooked = m(x)
    assert seen[0]<0 and hooked.equal(apart(x))
    handle.remove()
    for c in (deepcopy(m), pickle.loads(pickle.dumps(m))): assert c(x).equal(m(x))
    report.remove()
    assert type(m) is type(m[2]) is nn.Sequential
    torch.testing.assert_close(m(x), hooked)

@pytest.mark.parametrize('buffers', [False,True])
@pytest.mark.parametrize('use', [lambda a: a(torch.ones(2, 12)), lambda a: a.state_dict(), lambda a: sparse_summary(a.module)])
def test_averages_of_live_weights_are_refused_once_the_topology_has_moved(buffers, use):
    "They mix weights of different places; with a topology at rest they are those of masked weights, and a copy that is trained or loaded is its own"
    def trained(stop):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
        sparsify_model(m, .7, seed=0)
        opt = torch.optim.SGD(m.parameters(), .1, momentum=.9)
        DynamicSparseTraining(m, opt, 40, **RigL_presets(batches_per_update=4, stop_pct=stop), seed=0)
        sparse_compute(m, None, opt, plan=full(m))
        average = swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(.5), use_buffers=buffers)
        for i in range(9):
            opt.zero_grad()
            m(torch.randn(8, 12)).square().mean().backward()
            opt.step()
            average.update_parameters(m)
        return m,average
    use(trained(.05)[1])
    m,average = trained(1.)
    with pytest.raises(ValueError, match='store_dense'): use(average)
    average.module.load_state_dict(m.state_dict())
    assert average(torch.ones(2, 12)).equal(m(torch.ones(2, 12)))
    copied = deepcopy(m)
    torch.optim.SGD(copied.parameters(), .1).step()
    use(swa_utils.AveragedModel(copied))
    mine = deepcopy(m)
    for o in masked_params(mine): o.mask.copy_(o.mask.flip(0))
    for _ in range(2): use(swa_utils.AveragedModel(mine)), mine(torch.ones(2, 12))

def to_other_counts(m, s):
    "Write masks of sparsity `s` into a sparse model"
    with torch.no_grad():
        for o in masked_params(m): o.mask.copy_(torch.rand(o.mask.shape, generator=torch.Generator().manual_seed(1))>=s)

def test_a_kept_list_of_parameters_stays_theirs():
    "Clipping by a list from before the swap clips all, after the number of live weights has changed too, and after the way back"
    torch.manual_seed(0)
    m,(xb,yb) = dmlp(),data(dmlp())
    sparsify_model(m, .5, seed=0)
    kept = list(m.parameters())
    report = sparse_compute(m, None, plan=full(m))
    for change in (noop, lambda: to_other_counts(m, .8), report.remove):
        change()
        m(xb)
        m.zero_grad()
        mse_of(m, xb, yb).mul(1e3).backward()
        assert len(kept)==len(list(m.parameters())) and all(p is q and p.grad.shape==p.shape for p,q in zip(kept, m.parameters()))
        nn.utils.clip_grad_norm_(kept, 1.)
        assert torch.stack([p.grad.norm() for p in m.parameters()]).norm().item()==pytest.approx(1)

def test_hooks_and_graphs_outlive_another_number_of_live_weights():
    "A hook on live values is called on; losses that are kept, with their graphs, don't disturb; a backward that comes too late says so"
    torch.manual_seed(0)
    m,(xb,yb) = dmlp(),data(dmlp())
    sparsify_model(m, .5, seed=0)
    sparse_compute(m, None, plan=full(m))
    v,seen,losses = m[0]._parameters['weight'],[],[]
    v.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.numel()))
    for s in (.5,.8,.3):
        to_other_counts(m, s)
        losses.append(mse_of(m, xb, yb))
        m.zero_grad()
        losses[-1].backward()
    assert len(set(seen))==3 and seen[-1]==int(m[0].weight_mask.sum())==v.numel()
    late = mse_of(m, xb, yb)
    to_other_counts(m, .6)
    m(xb)
    m.zero_grad()
    with pytest.raises(RuntimeError, match='before the number of live weights changed'): late.backward()

@pytest.mark.parametrize('sparsity', [.3,.8])
def test_a_backward_of_a_convolution_that_comes_too_late_says_so(sparsity):
    "With more and with fewer live weights than in the forward"
    m,x = nn.Sequential(nn.Conv2d(4, 8, 3)),torch.randn(2, 4, 6, 6)
    sparsify_model(m, .5, seed=0)
    sparse_compute(m, None, plan=full(m))
    late = m(x).sum()
    to_other_counts(m, sparsity)
    m(x)
    with pytest.raises(RuntimeError, match='before the number of live weights changed'): late.backward()

def test_a_weight_with_a_learned_mask_is_left_masked():
    "It is chosen anew by scores of all weights"
    m = nn.Sequential(nn.Linear(8, 8))
    learn_masks(m, 'top 0.5', seed=0)
    assert swappable(m)=={'0.weight':'its mask is learned'}

@pytest.mark.parametrize('route', ['rows'])
@pytest.mark.parametrize('of', ['input','weights'])
def test_gradients_that_are_only_asked_for_leave_no_trace(of, route):
    "`autograd.grad` before the backward, as in adversarial training: the dense gradient of an update is the backward's alone"
    losses,masks = [],[]
    for model,opt,_ in pair(lambda: nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)).double(), torch_opts['sgd'], route=route):
        dst = DynamicSparseTraining(model, opt, 30, **{**RigL_presets, 'batches_per_update':3, 'seed':2})
        g,out = torch.Generator().manual_seed(0),[]
        for _ in range(30):
            xb,yb = torch.randn(8, 12, generator=g, dtype=torch.double).requires_grad_(),torch.randn(8, 4, generator=g, dtype=torch.double)
            torch.autograd.grad((model(xb)+yb).abs().sum(), xb if of=='input' else list(model.parameters()))
            loss = (model(xb)-yb).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            out.append(loss.item())
        losses.append(out)
        masks.append([o.mask for o in masked_params(model)])
    torch.testing.assert_close(*losses, rtol=0, atol=1e-9)
    assert all(a.equal(b) for a,b in zip(*masks))

def test_live_layers_follow_types_and_given_tensors():
    "dtype after `double()`, dense tensors by `functional_call`, and assign=True is refused by name"
    (a,_,_),(b,_,report) = pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch_opts['sgd'])
    xb = torch.randn(3, 8)
    torch.testing.assert_close(torch.func.functional_call(b, dict(b.state_dict()), (xb,)), a(xb))
    with pytest.raises(ValueError, match='assign=False'): b.load_state_dict(b.state_dict(), assign=True)
    b.double()
    assert b[0].weight.dtype==torch.double and b(xb.double()).dtype==torch.double
    report.remove()
    assert b[0].weight.dtype==torch.double

def test_another_parameter_in_place_of_a_sparse_weight_is_refused():
    "It would be trained without its mask; the error says what to do, and does"
    _,(m,_,report) = pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch_opts['sgd'])
    m[0].weight = nn.Parameter(torch.ones(16, 8))
    with pytest.raises(RuntimeError, match='remove()'): m(torch.randn(2, 8))
    report.remove()
    m(torch.randn(2, 8))
    assert m[0].weight.detach().equal(m[0].weight_mask.float())

@pytest.mark.parametrize('opt_f', ['sgd','adam','fastai_adam'])
def test_an_optimizer_that_nobody_told_of_follows(opt_f):
    "It was made and used before the swap: it goes on with its state"
    (a,oa,_),(b,_,report) = pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), opts[opt_f])
    report.remove()
    ob,xb,yb = opts[opt_f](list(b.parameters())),torch.randn(6, 8),torch.randn(6, 4)
    for m,o in ((a,oa), (b,ob)): steps(m, o, 3, xb, yb)
    sparse_compute(b, None, plan=full(b))
    for x,y in zip(steps(a, oa, 4, xb, yb), steps(b, ob, 4, xb, yb)): assert x==pytest.approx(y, abs=1e-5)
    assert_equal_models(a, b, 1e-5)

def test_an_optimizer_made_later_is_refused_by_name_too():
    "One that looks at more than single weights can't train live values"
    _,(m,_,_) = pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch_opts['sgd'])
    opt = torch.optim.Adafactor(m.parameters())
    backward(m, torch.randn(2, 8), torch.randn(2, 4))
    with pytest.raises(ValueError, match='Adafactor'): opt.step()

def mse_of(model, xb, yb): return nn.functional.mse_loss(model(xb), yb)

def scaled(opt, loss, params):
    "A loss scale of 1024 and back, as mixed precision has it"
    scaler = torch.amp.GradScaler('cpu', init_scale=1024.)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)

def clipped(opt, loss, params):
    loss.backward()
    for p in params: p.grad *= 1e-3

def penalized(opt, loss, params): (loss+1e-2*sum(p.abs().sum() for p in params)).backward()

def trained(make_gradients, dense=(), **settings):
    "The masked model and the one on live weights, of which the weights named `dense` stay dense, after 40 steps"
    xb,yb = data(dmlp())
    def run(model, opt, _):
        dst = DynamicSparseTraining(model, opt, 40, seed=0, **settings)
        for i in range(40):
            make_gradients(opt, mse_of(model, xb+.1*i, yb), list(model.parameters()))
            dst.step()
            opt.zero_grad()
        return model
    return [run(*o) for o in pair(dmlp, lambda ps: torch.optim.SGD(ps, lr=.1), dense=dense)]

@pytest.mark.parametrize('change', [scaled,clipped])
@pytest.mark.parametrize('grow', [gradient_magnitude,MovingGradient(.9)])
def test_what_multiplies_gradients_changes_no_choice(change, grow):
    "An update reads gradients as the backward left them, so a loss scale and clipping reach the step alone: masks and weights are the masked run's"
    assert_equal_models(*trained(change, batches_per_update=5, grow_score_f=grow, redistribute_f=gradient_redistribution))

@pytest.mark.parametrize('preset', [RigL_presets, auto_presets(20)], ids=['rigl','auto'])
def test_penalties_are_in_what_updates_read(preset):
    "A term of the loss that sees the weights themselves reaches live ones, also those just dropped, as in the masked run"
    assert_equal_models(*trained(penalized, **{**preset, 'batches_per_update':4}))

def test_products_load_no_compiler():
    "Neither swapping nor a product, forward and backward, imports torch's, which takes seconds"
    code = """import sys,torch
from fastsparse.all import *
m = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
sparsify_model(m, .5)
sparse_compute(m, None, plan={'0.weight':'rows', '2.weight':'rows'})
m(torch.randn(3, 4)).sum().backward()
print('torch._dynamo' in sys.modules)"""
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=240).stdout.strip()=='False'

def test_compiled():
    "A compiled model, forward and backward, with updates between, is the masked run"
    torch.compiler.reset()
    runs = [(m,o,DynamicSparseTraining(m, o, 12, **{**RigL_presets, 'batches_per_update':3}, seed=0)) for m,o,_ in pair(dmlp, torch_opts['adam'])]
    xb,yb = data(dmlp())
    losses = [steps(f(m), o, 12, xb, yb, dst) for (m,o,dst),f in zip(runs, (noop,partial(torch.compile, backend='aot_eager')))]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-9, atol=1e-9)
    assert_equal_models(runs[0][0], runs[1][0])

def test_hooked_weights_stay_dense():
    "Somebody waits for their dense gradient, and a plan can't change that"
    torch.manual_seed(0)
    m,seen = dmlp(),[]
    sparsify_model(m, .7, seed=0)
    m[0].weight.register_hook(lambda g: seen.append(g.shape))
    m[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    assert [n for n,why in swappable(m).items() if not why]==['4.weight']
    with pytest.raises(ValueError, match='plan names 0.weight, which stays dense .hooks'): sparse_compute(m, None, plan=full(m))
    report = sparse_compute(m, None, plan={'4.weight':'rows'})
    m(data(dmlp())[0]).sum().backward()
    assert sorted(seen)==sorted([m[0].weight.shape,m[2].weight.shape])
    report.remove()

@pytest.mark.parametrize('swap_inside', [True,False])
def test_inference_mode_leaves_a_model_that_trains(swap_inside):
    "A mask that is followed there, and a swap, make ordinary tensors"
    torch.manual_seed(0)
    m,(xb,yb) = dmlp(),data(dmlp())
    sparsify_model(m, .7, seed=0)
    if swap_inside:
        with torch.inference_mode(): sparse_compute(m, None, plan=full(m))
    else: sparse_compute(m, None, plan=full(m))
    with torch.no_grad(): m[0].weight_mask.copy_(m[0].weight_mask.roll(1, 1))
    with torch.inference_mode(): m(xb)
    mse_of(m, xb, yb).backward()
    assert m[0].weight.grad is not None

def test_an_engine_takes_an_optimizer_from_before_the_swap():
    "The swap told another one; this one follows when the engine is made"
    torch.manual_seed(0)
    m = dmlp()
    sparsify_model(m, .7, seed=0)
    a,b = [torch.optim.SGD(m.parameters(), lr=.1) for _ in range(2)]
    sparse_compute(m, None, a, plan=full(m))
    dst = DynamicSparseTraining(m, b, 10, **RigL_presets, seed=0)
    mse_of(m, *data(dmlp())).backward()
    dst.step()
    assert all(any(p is q for q in b.param_groups[0]['params']) for p in m.parameters())

def test_gradients_that_were_assigned_are_noticed():
    "They say nothing of dead weights, and an update says so"
    torch.manual_seed(0)
    m,(xb,yb) = dmlp(),data(dmlp())
    sparsify_model(m, .7, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    sparse_compute(m, None, opt, plan=full(m))
    dst = DynamicSparseTraining(m, opt, 40, **{**RigL_presets, 'batches_per_update':4}, seed=0)
    ps = list(m.parameters())
    def step():
        for p,g in zip(ps, torch.autograd.grad(mse_of(m, xb, yb), ps)): p.grad = g
        dst.step()
    for _ in range(3): step()
    with pytest.warns(UserWarning, match='no backward of its layer'):
        for _ in range(3): step()

# --- convolutions

class Pixels(nn.Module):
    "Convolutions of many kinds, of which some stay dense"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Conv2d(3, 8, 3, padding=1),nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.c = nn.Conv2d(8, 6, (5,3), padding='same', dilation=(1,2))
        self.d,self.e,self.f = nn.Conv2d(6, 6, 2, padding='valid'),nn.Conv1d(6, 5, 3, padding=2, stride=2),nn.Conv2d(6, 6, 1)
        self.groups,self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=2),nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.up,self.mirror = nn.ConvTranspose2d(6, 6, 1),nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect')
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.groups(self.norm(self.b(self.a(x).relu())).relu())
        x = self.mirror(self.up(self.deep(self.c(x)))).tanh()
        return self.e(self.f(self.d(x)).flatten(2).relu())

live_convs = [f'{o}.weight' for o in 'abcdef']
dense_convs = {'groups.weight':'has groups', 'deep.weight':'depthwise', 'up.weight':'no sparse product in ConvTranspose2d', 'mirror.weight':'padding_mode is reflect'}

def pixels(opt_f=torch_opts['adam'], compute=True, layout=torch.contiguous_format):
    torch.manual_seed(0)
    model = Pixels().double().to(memory_format=layout)
    sparsify_model(model, .6, seed=0)
    opt = opt_f(list(model.parameters()))
    report = sparse_compute(model, None, opt, {n:'rows' for n in live_convs}) if compute else None
    return model,opt,report

@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('method', ['static','SET','RigL','auto','prune'])
def test_convolutions_train_as_the_masked_ones(method, layout):
    "Kernels, strides, padding, dilation, one dimension and two: losses, masks, weights and outputs in evaluation; others stay dense by name"
    if why_not(): pytest.skip('convolutions have kernels where Numba is')
    parts = dict(SET=SET_presets, RigL={**RigL_presets, 'stop_pct':1.}, auto=auto_presets(24)(stop_pct=1.),
        prune=dict(grow_score_f=None, sparsity=.8, replace_step=False))
    res,xb = [],torch.randn(5, 3, 11, 9, generator=torch.Generator().manual_seed(1)).double().to(memory_format=layout)
    for compute in (False,True):
        model,opt,report = pixels(compute=compute, layout=layout)
        if compute:
            notes = dict(zip(report.df.parameter, report.df.note))
            assert {o.name for o in masked_params(model) if is_live(o)}==set(live_convs) and all(notes[n]==why for n,why in dense_convs.items())
        dst = opt if method=='static' else DynamicSparseTraining(model, opt, 24, **{**parts[method], 'batches_per_update':5}, seed=0)
        losses = []
        for t in range(24):
            loss = (model(xb+.01*t)-1).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            dst.step()
            opt.zero_grad()
        with torch.no_grad(): res.append((losses, masks_of(model), model, model.eval()(xb)))
    (la,ma,a,ya),(lb,mb,b,yb) = res
    assert la==pytest.approx(lb, abs=1e-8) and same_masks(ma, mb)
    assert_equal_models(a, b, 1e-6)
    torch.testing.assert_close(ya, yb, rtol=1e-6, atol=1e-6)

def test_convolutions_copy_pickle_load_and_come_back():
    "Each is the masked model's, and images without a batch, autocast and tensors that are given are served"
    if why_not(): pytest.skip('convolutions have kernels where Numba is')
    (a,_,_),(b,ob,report) = pixels(compute=False),pixels()
    xb = torch.randn(2, 3, 11, 9).double()
    a.eval(),b.eval()
    with torch.no_grad():
        for m in (b, deepcopy(b), pickle.loads(pickle.dumps(b))): torch.testing.assert_close(m(xb), a(xb))
        torch.testing.assert_close(b.a(xb[0]), a.a(xb[0]))
        torch.testing.assert_close(torch.func.functional_call(b, dict(a.state_dict()), (xb,)), a(xb))
        with torch.autocast('cpu'): assert b.a(xb).dtype==torch.bfloat16
    b.load_state_dict({k:2*v if v.is_floating_point() else v for k,v in a.state_dict().items()})
    torch.testing.assert_close(b.state_dict()['c.weight'], 2*a.state_dict()['c.weight'])
    report.remove()
    assert [type(m) for m in b.modules()]==[type(m) for m in a.modules()] and '_live' not in vars(b.a)

def test_convolutions_without_kernels(monkeypatch):
    "Without Numba those of one pixel are products of torch's, and others stay dense by name; a weight of a type without kernels is made dense for each product"
    b,_,_ = pixels()
    x = torch.randn(2, 3, 11, 9)
    want = b.a(x.double())
    torch.testing.assert_close(b.bfloat16().a(x.bfloat16()).double(), want, rtol=.1, atol=.1)
    monkeypatch.setattr('fastsparse.kernels.convolution.why_not', lambda: 'no Numba here')
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3))
    sparsify_model(model, .5, seed=0)
    y = model(x)
    assert swappable(model)=={'0.weight':'', '1.weight':'no Numba here'}
    sparse_compute(model, None, plan={'0.weight':'rows'})
    torch.testing.assert_close(model(x), y)

def test_a_vision_learner_trains_on_live_weights(tmp_path, monkeypatch):
    "With one argument of the callback; a swapped ResNet pickles, and a plain one is left"
    if why_not(): pytest.skip('convolutions have kernels where Numba is')
    from fastai.data.core import DataLoaders
    from fastai.vision.learner import vision_learner
    from torchvision.models import resnet18
    monkeypatch.setattr('fastsparse.model.plan._layer_speedup', lambda *args: 2.)
    g = torch.Generator().manual_seed(0)
    items = [(torch.randn(3, 32, 32, generator=g), i%2) for i in range(12)]
    dls = DataLoaders.from_dsets(items, items[:4], bs=4, num_workers=0, device='cpu')
    dls.c = 2
    learn = vision_learner(dls, resnet18, pretrained=False, normalize=False, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    seen = []
    class Look(Callback):
        def after_batch(self): seen.append(sum(isinstance(m, compute.LiveConv2d) for m in self.learn.model.modules()))
        def after_epoch(self): self.copy = pickle.loads(pickle.dumps(self.learn.model))
    cb = DynamicSparseTrainingCallback(**{**RigL_presets, 'batches_per_update':2}, sparsity=.9, sparse_compute=True)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, 1e-3, cbs=[cb, look := Look()])
    assert max(seen)==20 and cb.state['n_updates']>0
    assert not any(isinstance(m, LiveLayer) for m in learn.model.modules()) and all(o.p.shape==o.mask.shape for o in masked_params(learn.model))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(look.copy.eval()(x), learn.model.eval()(x), rtol=1e-3, atol=1e-4)

# --- what stays dense, and what is told of it

class Own(nn.Linear):
    def forward(self, x): return super().forward(x).relu()

def test_layers_that_compute_in_their_own_way_stay_dense():
    "Subclasses and replaced forwards, attention with extra keys, and recurrent layers, each with its reason"
    attn = nn.MultiheadAttention(4, 2, add_zero_attn=True)
    model = nn.ModuleDict(dict(own=Own(4,4), plain=nn.Linear(4,4), patched=nn.Linear(4,4), attn=attn, rnn=nn.LSTM(4,4)))
    model['patched'].forward = model['plain'].forward
    sparsify_model(model, .5, seed=0)
    why = swappable(model)
    assert 'Own is a subclass of Linear' in why['own.weight'] and why['plain.weight']=='' and why['patched.weight']=='its forward was replaced'
    assert 'add_zero_attn' in why['attn.in_proj_weight'] and 'add_zero_attn' in why['attn.out_proj.weight'] and why['rnn.weight_ih_l0']=='no sparse product in LSTM'

def test_an_optimizer_is_left_as_it_was():
    "No methods and no hooks of ours stay with it; and while they are there, it pickles"
    for name in ('fastai_adam','adam'):
        _,(b,opt,report) = pair(dmlp, opts[name])
        steps(b, opt, 2, *data(dmlp()))
        if name=='fastai_adam': assert list(pickle.loads(pickle.dumps(opt)).state_dict()['state'][0])==list(opt.state_dict()['state'][0])
        report.remove()
        assert 'state_dict' not in vars(opt) and not getattr(opt, '_optimizer_state_dict_post_hooks', {}) and not getattr(opt, '_optimizer_load_state_dict_pre_hooks', {})

def test_updates_after_the_step_are_refused():
    "They keep a dense gradient through it"
    _,(b,opt,_) = pair(dmlp, opts['sgd'])
    with pytest.raises(ValueError, match='update_after_step'): DynamicSparseTraining(b, opt, 20, **{**RigL_presets, 'batches_per_update':4}, update_after_step=True)

transformed = dict(linear=(lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), (5,8)),
    conv=(lambda: nn.Conv2d(3, 4, 3, padding=2), (2,3,6,6)), pointwise=(lambda: nn.Conv1d(3, 4, 1), (2,3,6)), attention=(Attention, (2,5,8)))

@pytest.mark.parametrize('case', list(transformed))
def test_transformed_models_are_computed_densely(case):
    "vmap, per-sample and per-weight derivatives of torch.func, and forward mode: as the masked model has them"
    make,shape = transformed[case]
    (a,_,_),(b,_,_) = pair(lambda: make().double(), torch_opts['sgd'])
    x,t = torch.randn(2, *shape).double().unbind()
    assert any(is_live(o) for o in masked_params(b))
    def dual(m):
        with torch.autograd.forward_ad.dual_level(): return torch.autograd.forward_ad.unpack_dual(m(torch.autograd.forward_ad.make_dual(x, t))).tangent
    with sdpa_kernel(SDPBackend.MATH):
        for f in (lambda m: torch.vmap(m)(torch.stack([x, t])), lambda m: torch.func.jvp(m, (x,), (t,)), lambda m: torch.func.jacrev(m)(x), dual):
            torch.testing.assert_close(f(b), f(a))
    def weights(m): return torch.func.grad(lambda ps: torch.func.functional_call(m, ps, (x,)).pow(2).sum())(dict(m.named_parameters()))
    dense,live = weights(a),weights(b)
    for n,o in {o.name:o for o in masked_params(b)}.items(): torch.testing.assert_close(live[n], dense[n][o.mask] if is_live(o) else dense[n])

@pytest.mark.parametrize('case', list(transformed))
def test_traced_models_are_refused_by_one_sentence(case):
    "torch.fx, torch.export and torch.jit.trace can't see into a product"
    make,shape = transformed[case]
    _,(b,_,report) = pair(make, torch_opts['sgd'])
    x = torch.randn(shape)
    for f in (torch.fx.symbolic_trace, lambda m: torch.export.export(m, (x,)), lambda m: torch.jit.trace(m, (x,))):
        with pytest.raises(RuntimeError, match="can't follow products of live weights: call remove"): f(b.eval())
    report.remove()
    torch.testing.assert_close(torch.export.export(b, (x,)).module()(x), b(x))

@pytest.mark.parametrize('first', [False,True])
def test_attention_returns_what_can_be_viewed(first):
    "As torch's attention does where the batch comes second"
    _,(m,_,_) = pair(lambda: nn.MultiheadAttention(8, 2, batch_first=first), torch_opts['sgd'])
    x = torch.randn(5, 3, 8)
    assert m(x, x, x)[0].view(15, 8).shape==(15,8) and m(x[0], x[0], x[0])[0].is_contiguous()

def test_a_part_saves_what_lives_now():
    "Masks that were changed from outside hold in the state of a part, and in its dense weight, before anything was computed"
    for read in (lambda m: m[0].state_dict()['weight'], lambda m: handler_of(m[0].weight).dense_weight()):
        m = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
        sparsify_model(m, .5, seed=0)
        sparse_compute(m, None, plan={'0.weight':'rows'})
        was,dead = read(m).clone(),m[0].weight_mask.nonzero()[0]
        m[0].weight_mask[tuple(dead)] = False
        was[tuple(dead)] = 0
        assert read(m).equal(was) and len(m[0].weight)==23

def test_a_part_of_a_model_computes_with_live_weights():
    "Its masks and the others' are enforced as before, by one hook"
    m = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    sparsify_model(m, .5, seed=0)
    sparse_compute(m[:2], None, plan={'0.weight':'rows'})
    (hook,) = mask_hooks(m)
    assert [g is handler_of(p) for g,p in zip(hook.handlers, (m[0].weight, m[1].weight, m[2].weight), strict=True)]==[True]*3
    with torch.no_grad(): m[1].weight.fill_(1)
    m(torch.ones(1, 8))
    assert m[1].weight.count_nonzero()==12

def test_nothing_of_the_masked_weight_stays_on_its_parameter():
    "One handler listens for its gradient, before and after"
    m = nn.Sequential(nn.Linear(8, 6))
    sparsify_model(m, .5, seed=0)
    def listeners(p): return len(p._backward_hooks or ())+len(p._post_accumulate_grad_hooks or ())
    n = listeners(m[0].weight)
    sparse_compute(m, None, plan={'0.weight':'rows'})
    assert n==1==listeners(m[0].weight)

def test_live_weights_that_are_tied_later_need_one_mask():
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsify_parameter(m, '0.weight', .5, seed=0)
    sparsify_parameter(m, '1.weight', .5, seed=1)
    sparse_compute(m, None, plan={'0.weight':'rows', '1.weight':'rows'})
    m[1].weight = m[0].weight
    with pytest.raises(ValueError, match='which has another mask: tie weights before sparsify_model'): m(torch.ones(1, 8))

# --- what others do to gradients

class _Layers(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(20,32), nn.ReLU(), nn.Linear(32,5))
        self.double()
        sparsify_model(self, .7, seed=1)

def _clip(m, opt): nn.utils.clip_grad_norm_(m.parameters(), 1e9)
def _halve(m, opt): [p.grad.div_(2) for p in m.parameters()]

@pytest.mark.parametrize('method', [dict(method='set', replace_step=False, batches_per_update=3), dict(method='auto', batches_per_update=3), dict(method='mest')],
    ids=['set','auto','mest'])
@pytest.mark.parametrize('change', ['scaler','halve','clip'])
def test_live_weights_follow_what_is_done_to_gradients(method, change):
    "Unscaling, scaling by hand and a clip that doesn't bite: updates choose and start grown weights as under masks"
    g = torch.Generator().manual_seed(1)
    x,y = torch.randn(64, 20, generator=g).double(),torch.randint(5, (64,), generator=g)
    def trained(live):
        m = _Layers()
        opt = torch.optim.SGD(m.parameters(), .1)
        if live: sparse_compute(m, None, opt, plan={'0.weight':'rows', '2.weight':'rows'})
        DynamicSparseTraining(m, opt, 12, **method, seed=3)
        scaler = torch.amp.GradScaler('cpu', init_scale=2.**16, enabled=change=='scaler')
        for _ in range(10):
            scaler.scale(nn.functional.cross_entropy(m(x), y)).backward()
            scaler.unscale_(opt)
            if change!='scaler': dict(halve=_halve, clip=_clip)[change](m, opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return m.state_dict()
    masked,live = trained(False),trained(True)
    for k,v in masked.items(): assert v.equal(live[k]) if v.dtype==torch.bool else torch.allclose(v, live[k], atol=1e-12), k

def test_grown_live_weights_step_by_the_clipped_gradient():
    "The step of a weight that an update grew is its gradient, computed by dense torch, times what clipping left of the norm"
    g = torch.Generator().manual_seed(1)
    x,y,m = torch.randn(64, 20, generator=g).double(),torch.randint(5, (64,), generator=g),_Layers()
    opt = torch.optim.SGD(m.parameters(), .1)
    sparse_compute(m, None, opt, plan={'0.weight':'rows', '2.weight':'rows'})
    DynamicSparseTraining(m, opt, 8, method='set', batches_per_update=3, replace_step=False, seed=3)
    n_new = 0
    for _ in range(4):
        was = {k:v.clone() for k,v in m.state_dict().items()}
        (100*nn.functional.cross_entropy(m(x), y)).backward()
        ps = [was[k].clone().requires_grad_() for k in ('0.weight','0.bias','2.weight','2.bias')]
        out = nn.functional.linear(nn.functional.linear(x, *ps[:2]).relu(), *ps[2:])
        w1,b1,w2,b2 = torch.autograd.grad(100*nn.functional.cross_entropy(out, y), ps)
        norm = torch.cat([(w1*was['0.weight_mask']).flatten(), b1, (w2*was['2.weight_mask']).flatten(), b2]).norm()
        nn.utils.clip_grad_norm_(m.parameters(), 1.)
        opt.step()
        opt.zero_grad()
        now = m.state_dict()
        new = now['0.weight_mask'] & ~was['0.weight_mask']
        n_new += int(new.sum())
        assert torch.allclose(now['0.weight'][new], -.1*w1[new]/norm, rtol=1e-4)
    assert n_new

def test_starts_of_live_weights_have_the_dense_shape():
    "`grow_init_f` gives a tensor like the dense weight, however it is stored"
    m = _Layers()
    opt = torch.optim.SGD(m.parameters(), .1)
    sparse_compute(m, None, opt, plan={'0.weight':'rows', '2.weight':'rows'})
    DynamicSparseTraining(m, opt, 8, method='set', batches_per_update=2, grow_init_f='fresh_value', seed=3)
    for _ in range(4):
        m(torch.randn(8, 20).double()).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert sum(int(o.mask.sum()) for o in masked_params(m))==round(.3*(20*32+32*5))
