"Which layers compute with live weights: what is measured, refused, or stays dense, and how transforms, compilers and copies get on with them"
import copy,pickle,pytest
from fastsparse.all import *
from fastsparse.kernels.vectors import why_not
from fastsparse.report.cost import model_bits
from functools import partial
from helpers import *
from test_live_layers import Attention,convs,dense_convs,equal,full,lives,make,notes,pair,Pixels,rectified,steps,xy
from torch.nn.attention import sdpa_kernel,SDPBackend


t = torch.optim

class Own(nn.Linear):
    def forward(self, x): return super().forward(x).relu()

def test_what_cant_be_live_stays_dense_and_says_why(monkeypatch):
    "Recurrent, hooked and shared weights; without Numba larger kernels too. Subclasses, replaced forwards and attention with extra keys are right"
    attn = nn.MultiheadAttention(4, 2, add_zero_attn=True)
    m = nn.ModuleDict(dict(own=Own(4,4), plain=nn.Linear(4,4), patched=nn.Linear(4,4), attn=attn, rnn=nn.LSTM(4,4), hooked=nn.Linear(4,4), after=nn.Linear(4,4),
        conv=nn.Conv2d(4,4,3), one=nn.Conv2d(4,4,1)))
    m['patched'].forward = m['plain'].forward
    sparsify_model(m, .5, seed=0)
    m['hooked'].weight.register_hook(lambda g: None)
    m['after'].weight.register_post_accumulate_grad_hook(lambda p: None)
    monkeypatch.setattr('fastsparse.kernels.convolution.why_not', lambda: 'no Numba here')
    x,own = torch.randn(3, 2, 4),['own.weight','plain.weight','patched.weight','attn.in_proj_weight','attn.out_proj.weight','one.weight']
    def outputs(): return [m['own'](x), m['patched'](x), m['attn'](x, x, x)[0]]
    before = outputs()
    report = sparse_compute(m, None, plan=dict.fromkeys(own, 'rows'))
    why = dict(zip(report.df.parameter, report.df.note))
    for name,reason in {'rnn.weight_ih_l0':'no sparse product in LSTM', 'hooked.weight':'hooks', 'after.weight':'hooks', 'conv.weight':'no Numba here'}.items():
        assert reason in why[name], name
    assert sorted(lives(m))==sorted(own)
    for a,b in zip(before, outputs()): torch.testing.assert_close(a, b)
    report.remove()
    if not why_not():
        monkeypatch.undo()
        _,_,report = make(True, Pixels, plan=convs)
        assert all(dict(zip(report.df.parameter, report.df.note))[n]==why for n,why in dense_convs.items())

class Counting(nn.Module):
    "Counts its forwards in an attribute and in a buffer, writes to its input, takes it by name, and returns no tensor"
    def __init__(self):
        super().__init__()
        self.inner,self.seen,self.drop = nn.Linear(512, 512),[],nn.Dropout(.5)
        self.register_buffer('n', torch.zeros(()))
    def forward(self, x, scale=None, y=None):
        self.seen.append(len(x))
        self.n += 1
        return torch.distributions.Normal(self.inner(self.drop(x.add_(1))+(0 if y is None else y)), 1.)

@pytest.mark.parametrize('named', [False,True])
def test_measuring_changes_nothing(named):
    "Attributes, weights, buffers, modes, gradients, the batch and random states; the plan makes the same choice again, and the summary shows it; an input that doesn't fit raises its own error"
    m,x,odd = Counting(),torch.zeros(64, 512),torch.randn(2, 5)
    sparsify_model(m, .98, seed=0)
    def state():
        values = {k:v.tolist() for k,v in m.state_dict().items()},[p.grad for p in m.parameters()]
        return torch.get_rng_state().tolist(),m.seen,values,[o.training for o in m.modules()],x.abs().sum().item()
    before = copy.deepcopy(state())
    with pytest.raises((RuntimeError,ValueError), match='features|shapes'): sparse_compute(m, odd)
    assert state()==before
    report = sparse_compute(m, dict(y=x.clone(), x=x) if named else x)
    assert state()==before and report.plan=={'inner.weight':'rows'} and report.ratios['inner.weight']>=1.1
    assert notes(m)['inner.weight']==f"live weights only, {report.ratios['inner.weight']:.1f} times as fast"
    report.remove()
    assert sparse_compute(m, x, plan=report.plan).plan==report.plan

refused = [({'nobody':'rows'},'plan names nobody'), ({'0.weight':'fast'},"the route 'fast'")]

@pytest.mark.parametrize('plan,match', refused)
def test_refused_before_anything_is_stored(plan, match):
    m,_,_ = make(False)
    with pytest.raises(ValueError, match=match): sparse_compute(m, None, plan=plan)
    assert not lives(m)
    with pytest.raises(ValueError, match='has no masks'): sparse_compute(mlp(), None)

def _tied(m, opt):
    m[2].weight_mask.copy_(m[2].weight_mask.flip(0))
    m[2].weight = m[0].weight
    m(torch.ones(1, 8))

late = dict(tied=(_tied,'was tied to.*another mask'))
late['twice'] = lambda m, opt: sparse_compute(m, None, plan=full(m)), 'computes sparsely already'
late['unsparsify'] = lambda m, opt: unsparsify(m), 'call remove'
late['snfs'] = lambda m, opt: DynamicSparseTraining(m, opt, 50, **SNFS_presets(batches_per_update=5)), 'dense history'
late['after'] = lambda m, opt: DynamicSparseTraining(m, opt, 20, **RigL_presets(batches_per_update=4), update_after_step=True), 'update_after_step'
late['shape'] = lambda m, opt: m.load_state_dict({**m.state_dict(), '0.weight':torch.ones(3, 2)}), r'0.weight.*\[3, 2\].*\[8, 8\]'

@pytest.mark.parametrize('kind', late)
def test_refused_while_weights_are_live(kind):
    "The model is as it was, and goes back"
    f,match = late[kind]
    m,opt,report = make(True, partial(mlp, (8,8,8)))
    before = copy.deepcopy(m.state_dict())
    with pytest.raises((ValueError,RuntimeError), match=match): f(m, opt)
    if kind=='tied': return
    assert agree(dict(before), dict(m.state_dict())) and lives(m)
    report.remove()
    assert agree(dict(before), dict(m.state_dict()))

def test_frozen_and_replaced_weights():
    "A frozen weight stays frozen on both sides; another parameter in the place of a live one is masked and stored live at the next forward"
    m = mlp((4,4,4,4))
    m[0].weight.requires_grad_(False)
    sparsify_model(m, .5, seed=0)
    report = sparse_compute(m, None, plan=full(m))
    m(torch.randn(2,4)).sum().backward()
    assert m[0].weight.grad is None and m[2].weight.grad is not None
    for replace in (lambda p: setattr(m[2], 'weight', p), lambda p: m[2].load_state_dict(dict(m[2].state_dict(), weight=p), assign=True)):
        replace(nn.Parameter(torch.ones(4, 4)))
        opt = torch.optim.SGD(m.parameters(), lr=.1)
        m(torch.randn(2, 4)).sum().backward()
        assert is_live(m[2].weight) and dense_of(m[2].weight).equal(m[2].weight_mask.float())
        opt.step()
        assert not dense_of(m[2].weight)[~m[2].weight_mask].any()
    report.remove()
    m(torch.randn(2, 4))
    assert not m[0].weight.requires_grad and not is_live(m[2].weight) and not m[2].weight[~m[2].weight_mask].any()

def test_gradients_that_were_assigned_are_dense_ones():
    "An update grows by what was assigned, as under a mask"
    runs = []
    for live in (True,False):
        m,opt,_ = make(live)
        DynamicSparseTraining(m, opt, 40, **RigL_presets(batches_per_update=4), seed=0)
        ps = list(m.parameters())
        for i in range(9):
            if i%4==0: m.zero_grad()
            for p,g in zip(ps, torch.autograd.grad(nn.functional.mse_loss(m(xy[0]), xy[1]), ps)): p.grad = g
            opt.step()
        runs.append(m)
    equal(*runs)

# --- who else computes with them

transformed = dict(linear=(lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), (5,8)), conv=(lambda: nn.Conv2d(3, 4, 3, padding=2),
    (2,3,6,6)), pointwise=(lambda: nn.Conv1d(3, 4, 1), (2,3,6)), attention=(Attention, (2,5,8)))

@pytest.mark.parametrize('case', transformed)
def test_transformed_models_are_computed_densely(case):
    "vmap, derivatives of torch.func by sample and by weight, forward mode and functional calls: as the masked model has them"
    net,shape = transformed[case]
    (a,_,_),(b,_,_) = pair(lambda: net().double())
    x,tangent = torch.randn(2, *shape).double().unbind()
    assert lives(b)
    def dual(m):
        with torch.autograd.forward_ad.dual_level(): return torch.autograd.forward_ad.unpack_dual(m(torch.autograd.forward_ad.make_dual(x, tangent))).tangent
    with sdpa_kernel(SDPBackend.MATH):
        for f in (lambda m: torch.vmap(m)(torch.stack([x, tangent])), lambda m: torch.func.jvp(m, (x,), (tangent,)), lambda m: torch.func.jacrev(m)(x),
            dual): torch.testing.assert_close(f(b), f(a))
    torch.testing.assert_close(torch.func.functional_call(b, dict(a.state_dict()), (x,)), a(x))

@pytest.mark.parametrize('case', transformed)
def test_derivatives_by_weight_are_the_masked_models(case):
    net,shape = transformed[case]
    (a,_,_),(b,_,_),x = *pair(lambda: net().double()),torch.randn(shape).double()
    dense,live = [torch.func.grad(lambda ps: torch.func.functional_call(m, ps, (x,)).pow(2).sum())(dict(m.named_parameters())) for m in (a,b)]
    for k in dense: torch.testing.assert_close(live[k]*1, dense[k])

@pytest.mark.parametrize('case', transformed)
def test_traced_models_compute_the_same(case):
    "torch.fx and torch.export follow live weights, or their dense form; torch.jit.trace is refused by name"
    net,shape = transformed[case]
    b,_,_ = make(True, net)
    x = torch.randn(shape)
    y = b.eval()(x)
    for traced in (torch.fx.symbolic_trace(b), torch.export.export(b, (x,)).module()): torch.testing.assert_close(traced(x), y)
    with pytest.raises(RuntimeError, match="can't follow live weights: call store_dense"): torch.jit.trace(b, (x,))

def test_compiled():
    "A compiled model, forward and backward, with updates between, is the masked run"
    torch.compiler.reset()
    (a,oa,_),(b,ob,_) = pair(opt='adam')
    for m,o in ((a,oa),(b,ob)): DynamicSparseTraining(m, o, 12, **RigL_presets(batches_per_update=3), seed=0)
    assert steps(a, oa, 12, *xy)==pytest.approx(steps(torch.compile(b, backend='aot_eager'), ob, 12, *xy), abs=1e-9)
    equal(a, b)

def test_layers_are_themselves():
    "Rows of layers, copied or pickled, compute what each alone does; images without a batch and autocast are served"
    m,_,report = make(True, rectified)
    x = torch.randn(8, 6)
    def apart(x): return m[4](m[3](m[2][1](m[2][0](m[1](m[0](x))))))
    for c in (m, copy.deepcopy(m), pickle.loads(pickle.dumps(m))): torch.testing.assert_close(c(x), apart(x), rtol=0, atol=0 if c is m else 1e-6)
    y = m(x)
    report.remove()
    torch.testing.assert_close(m(x), y)
    if why_not(): return
    (a,_,_),(b,_,_),x = *pair(Pixels, plan=convs),torch.randn(2, 3, 11, 9)
    torch.testing.assert_close(b.a(x[0]), a.a(x[0]))
    with torch.autocast('cpu'): assert b.a(x).dtype==torch.bfloat16
    torch.testing.assert_close(b.bfloat16().a(x.bfloat16()).float(), a.a(x), rtol=.1, atol=.1)

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

def test_what_is_counted_is_the_masked_models():
    "FLOPs, bits, sparse_params and the summary"
    (a,_,_),(b,_,_) = pair()
    for sparse in (False,True): assert count_flops(a, xy[0], sparse)==count_flops(b, xy[0], sparse)>0 and model_bits(a, sparse=sparse)==model_bits(b,
        sparse=sparse)
    for (p,m,s),(q,n,u) in zip(sparse_params(a), sparse_params(b)): assert torch.equal(p.detach(), q.detach()) and torch.equal(m, n) and s==u
    x,y = [sparse_summary(m).df.drop(columns='note') for m in (a,b)]
    assert x.equals(y) and lives(b)

@pytest.mark.parametrize('n', [1, 2, 3])
def test_convolutions_of_each_rank_are_measured(n):
    "Each by its own product, in a plain batch and in fastai's"
    from fastai.torch_core import TensorImage
    conv,xb = getattr(nn, f'Conv{n}d'),torch.randn(2, 4, *[6]*n)
    for batch in (xb, TensorImage(xb)):
        net = nn.Sequential(conv(4, 8, 3, padding=1), nn.ReLU(), conv(8, 8, 3), nn.Flatten(), nn.Linear(8*4**n, 3))
        sparsify_model(net, .9, seed=0)
        out = net(xb)
        report = sparse_compute(net, batch)
        assert set(report.plan)=={'0.weight','2.weight','4.weight'}-{*report.df.parameter[report.df.note!='']} and torch.allclose(net(xb), out, atol=1e-5)
