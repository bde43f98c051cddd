"What torch asks of tensor subclasses as parameters, of modules that hold them and of its utilities, asked of a live weight"
import copy,gc,io,pytest,torch,warnings
from forks import on_processes
from fastsparse.all import *
from helpers import *
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations,parametrize,prune

def net(live=True):
    m = mlp((6,16,12,3))
    sparsify_model(m, .6, seed=0)
    if live: go_live(m)
    return m

x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

@pytest.fixture
def m(): return net()

# --- as in torch's test_subclass.py

def test_it_is_a_parameter(m):
    "For isinstance, named_parameters, trees, sets and dicts, and by identity"
    p = m[0].weight
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) and p.is_leaf and p.requires_grad and dict(m.named_parameters())['0.weight'] is p
    assert p in set(m.parameters()) and {p:1}[p]==1 and type(p.data) is not nn.Parameter and not isinstance(p+1, nn.Parameter)
    assert 'requires_grad' in repr(p) or 'live' in repr(p)
    assert not isinstance(p.detach(), nn.Parameter) and not p.detach().requires_grad

@pytest.mark.parametrize('requires_grad', [True,False])
def test_a_parameter_made_from_it(m, requires_grad):
    "test_param_construction: of the values, with the flag, and itself if it is one"
    q = nn.Parameter(m[0].weight.detach().clone(), requires_grad=requires_grad)
    assert isinstance(q, nn.Parameter) and q.requires_grad==requires_grad and dense_of(q).equal(dense_of(m[0].weight))
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = q
            self.ps = nn.ParameterList([nn.Parameter(q.detach().clone())])
            self.register_parameter('again', nn.Parameter(q.detach()))
    assert len(list(Holder().parameters()))==3
    with torch.no_grad(): assert Holder().p.sum()==dense_of(m[0].weight).sum()

def test_non_grad_parameter(m):
    "test_module_optimization and non_grad_param: flags go to and fro"
    p = m[0].weight
    p.requires_grad_(False)
    m(x).sum().backward()
    assert p.grad is None and m[2].weight.grad is not None
    p.requires_grad = True
    m(x).sum().backward()
    assert p.grad is not None and p.grad.shape==p.shape and p.grad.dtype==p.dtype

@pytest.mark.parametrize('as_param', [True,False])
def test_deepcopy(m, as_param):
    "test_deepcopy: equal, apart, of a kind that a parameter may be"
    p = m[0].weight if as_param else m[0].weight.detach()
    q = copy.deepcopy(p)
    assert q is not p and isinstance(q, nn.Parameter)==as_param and q.requires_grad==as_param and dense_of(q).equal(dense_of(p))
    with torch.no_grad(): q.add_(1)
    assert not dense_of(q).equal(dense_of(p))

@pytest.mark.parametrize('as_param', [True,False])
def test_serialization(m, as_param):
    "test_serialization: of a tensor alone, and in a dict with itself, which stays one object"
    p = m[0].weight if as_param else m[0].weight.detach()
    torch.save(dict(a=p, b=p), f := io.BytesIO())
    f.seek(0)
    out = torch.load(f, weights_only=True)
    assert dense_of(out['a']).equal(dense_of(p)) and out['a'].requires_grad==as_param and out['a'] is out['b']

def test_type_propagation_in_a_module(m):
    "test_module_optimization: gradients are of the parameter's shape, and a step is the masked one"
    other = net(False)
    for o in (m,other):
        opt = torch.optim.SGD(o.parameters(), .1)
        o(x).square().mean().backward()
        opt.step()
        o(x)
    for p,q in zip(m.parameters(), other.parameters()): torch.testing.assert_close(dense_of(p), q.detach())

def test_repr_and_format(m):
    "test_repr: prints, also inside of a list, of a gradient and in a module"
    m(x).sum().backward()
    for o in (m[0].weight, m[0].weight.grad, [m[0].weight], m[0].weight.data[1:3], m.state_dict(), m): assert str(o) and f'{o}'

def test_autograd_function_saves_it(m):
    "In `save_for_backward`, in hooks on saved tensors, and under anomaly detection"
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return 2*x@w.t()
        @staticmethod
        def backward(ctx, g):
            x,w = ctx.saved_tensors
            return 2*g@w,2*g.t()@x
    p,mask = m[0].weight,m[0].weight_mask
    Twice.apply(x, p).sum().backward()
    torch.testing.assert_close(dense_of(p.grad), 2*(torch.ones(16, 8)@x)*mask)
    p.grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), torch.autograd.detect_anomaly(check_nan=True): m(x).sum().backward()
    a = dense_of(p.grad)
    p.grad = None
    with torch.autograd.graph.save_on_cpu(): m(x).sum().backward()
    torch.testing.assert_close(a, dense_of(p.grad))

# --- modules

def test_another_parameter_is_masked_and_stored_live(m):
    "At the next forward; a plain tensor is refused by torch, and the model is as before"
    y,p = m(x),m[0].weight
    with pytest.raises(TypeError): m[0].weight = torch.ones(16, 6)
    assert m[0].weight is p
    torch.testing.assert_close(m(x), y)
    m[0].weight = nn.Parameter(torch.ones(16, 6))
    m(x)
    assert type(m[0].weight) is type(p)
    torch.testing.assert_close(m[0](x), F.linear(x, m[0].weight_mask.float(), m[0].bias))

def test_its_own_parameter_may_be_assigned(m):
    "As libraries do that tie or re-register weights"
    y = m(x)
    m[0].weight = m[0].weight
    m[0].register_parameter('weight', m[0].weight)
    torch.testing.assert_close(m(x), y)

def test_an_own_module_computes_with_it():
    "By F.linear, by a product with its transpose, by einsum and by rows, as by a dense weight"
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(5, 6))
        def forward(self, x): return F.linear(x, self.weight)+x@self.weight.t()+torch.einsum('bi,oi->bo', x, self.weight)+torch.stack([x@r for r in self.weight], 1)
    outs = []
    for live in (True,False):
        m = Own()
        sparsify_model(m, .5, also='weight', seed=0)
        if live: go_live(m)
        m(x).square().sum().backward()
        outs.append((m(x).detach(), dense_of(m.weight.grad)*m.weight_mask))
    for a,b in zip(*outs): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('how', ['parametrize','weight_norm','spectral_norm','orthogonal'])
def test_parametrizations_are_refused_or_right(m, how):
    "A parametrized weight has no place for a mask: an error says so, at once or at the next forward"
    class Double(nn.Module):
        def forward(self, w): return 2*w
    with pytest.raises((ValueError,RuntimeError), match='parametriz'):
        if how=='parametrize': parametrize.register_parametrization(m[0], 'weight', Double())
        else: getattr(parametrizations, how)(m[0])
        m(x).sum().backward()

@pytest.mark.parametrize('f', [lambda m: prune.l1_unstructured(m[0], 'weight', .5), lambda m: prune.random_structured(m[0], 'weight', 2, dim=0)],
    ids=['l1','structured'])
def test_torchs_pruning_is_refused_or_right(m, f):
    "It moves the parameter to another name"
    with pytest.raises((ValueError,RuntimeError), match='prune'):
        f(m)
        m(x).sum().backward()

def test_utilities(m):
    "Norms, clipping, vectors, `skip_init`, stateless calls, flops"
    d = net(False)
    for o in (m,d): o(x).square().sum().backward()
    assert nn.utils.clip_grad_norm_(m.parameters(), 1.).item()==pytest.approx(nn.utils.clip_grad_norm_(d.parameters(), 1.).item(), rel=1e-4)
    assert nn.utils.get_total_norm([p.grad for p in m.parameters()]).item()==pytest.approx(1, rel=1e-3)
    nn.utils.clip_grads_with_norm_(m.parameters(), .5, torch.tensor(1.))
    assert torch.equal(nn.utils.parameters_to_vector(m.parameters()), nn.utils.parameters_to_vector(d.parameters()))
    out = torch.func.functional_call(m, {n:p*2 for n,p in m.named_parameters()}, x)
    torch.testing.assert_close(out, torch.func.functional_call(d, {n:p*2 for n,p in d.named_parameters()}, x))
    a,b = nn.utils.parametrize.is_parametrized(m),sum(p.numel() for p in m.parameters())
    assert not a and b==sum(p.numel() for p in d.parameters())

def test_hooks(m):
    "On the tensor, after it accumulated, and on modules"
    seen,p = [],m[0].weight
    h = [p.register_hook(lambda g: seen.append(tuple(g.shape))), p.register_post_accumulate_grad_hook(lambda p: seen.append('post')),
        m[0].register_forward_hook(lambda *a: seen.append('forward')), m[0].register_full_backward_hook(lambda *a: seen.append('backward'))]
    m(x).sum().backward()
    assert {(16,6),'post','forward','backward'}<=set(seen)
    for o in h: o.remove()
    seen.clear()
    m(x).sum().backward()
    assert not seen

def test_equal_results_in_threads(m):
    "Two threads read and differentiate at once"
    from concurrent.futures import ThreadPoolExecutor
    y = m(x)
    with ThreadPoolExecutor(2) as pool: outs = list(pool.map(lambda _: m(x), range(6)))
    for o in outs: assert o.equal(y)

def test_versions(m):
    "A write between forward and backward is noticed, as with dense weights that a product has saved"
    p = m[2].weight
    version = p._version
    with torch.no_grad(): p.mul_(2)
    assert p._version>version

def test_every_module_function_on_it(m):
    "zero_grad, requires_grad_, train, eval, apply, named_buffers, half-and-back leave it live and right"
    y = m(x)
    m.apply(lambda o: None).train().eval().requires_grad_(False).requires_grad_(True)
    m.zero_grad()
    m.half().float()
    assert all(is_live(o.p) for o in masked_params(m))
    torch.testing.assert_close(m(x), y, rtol=1e-2, atol=1e-3)
    m.apply(lambda o: isinstance(o, nn.Linear) and o.reset_parameters())
    assert_index_fits(m)
    assert not m(x).equal(y)

def test_its_class_makes_a_parameter_of_a_tensor(m):
    "accelerate and others write `type(p)(value, requires_grad=p.requires_grad)`: a parameter with these values"
    p = m[0].weight
    q = type(p)(torch.ones(16, 6), requires_grad=False)
    assert isinstance(q, nn.Parameter) and not q.requires_grad and dense_of(q).eq(1).all()

# --- processes, compilers and profilers

def computes_alike(rank, m, x, y): assert torch.allclose(m(x), y, atol=1e-6) and not any(map(is_live, m.parameters()))

@pytest.mark.parametrize('trained', [False,True])
def test_another_process_gets_a_dense_copy(m, trained):
    "Several layers at once; also in the middle of a run, and if values are shared, which is said"
    if trained:
        opt = torch.optim.Adam(m.parameters())
        dst = engine(m, opt, method='rigl')
        for _ in range(3): train(m, opt, 1, x, torch.ones(8, 3))
        m.zero_grad()
    with torch.no_grad(): y = m(x)
    on_processes(computes_alike, m, x, y, n=1)
    from multiprocessing.reduction import ForkingPickler
    with pytest.warns(UserWarning, match='shares no memory: call store_dense'): ForkingPickler.dumps(m.share_memory())

@pytest.mark.parametrize('make', [net, pytest.param(lambda live=True: conv_net(live), marks=pytest.mark.full)], ids=['linear','conv'])
def test_a_whole_step_is_compiled_as_far_as_can_be(make):
    "Forward, backward and the optimizer's step in one compiled function: the same losses as without, and no error of the compiler"
    xb = x if make is net else torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    def losses(compiled):
        m = make()
        opt = torch.optim.Adam(m.parameters(), .01)
        def step():
            loss = m(xb).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()
        if compiled: step = torch.compile(step, backend='eager')
        return torch.stack([step() for _ in range(3)])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.testing.assert_close(losses(True), losses(False))

def conv_net(live=True):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3))
    sparsify_model(m, .6, seed=0)
    if live: go_live(m)
    return m

@pytest.mark.parametrize('start,stop', [(0,3), (3,7), (0,7)])
def test_a_profiler_that_holds_weights_makes_them_wait(start, stop):
    "Where weights would become live, or dense at the run's end: no error, the numbers of a masked run, and live or dense as soon as it lets go"
    def run(compute):
        m = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
        for p in m.parameters(): nn.init.normal_(p, std=.05, generator=torch.Generator().manual_seed(p.numel()))
        sparsify_model(m, .95, seed=0, sparse_init_mode=None)
        opt,xb = torch.optim.SGD(m.parameters(), .1),torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        dst,kinds = DynamicSparseTraining(m, opt, 7, method='static', sparse_compute=compute),[]
        def steps(n):
            for _ in range(n):
                train(m, opt, 1, xb, torch.ones(64, 3))
                kinds.append(is_live(m[2].weight))
        steps(start)
        with torch.profiler.profile(record_shapes=True): steps(stop-start)
        gc.collect()  # which is when it lets go
        steps(7-stop)
        store_dense(m)
        return dense_of(m[2].weight),kinds
    (a,kinds),(b,_) = run(None),run(False)
    torch.testing.assert_close(a, b, **in_float_layers)
    if start==0<stop<7: assert kinds==[False]*3+[True]*3+[False]
    if start: assert kinds[:3]==[True]*3
