"Room 04: a model and its masks. Who is chosen, and that dead is dead in any loop"
import copy, gc, io, math, numpy as np, pickle, pytest, torch, torch.nn.utils.prune, warnings, weakref
from fastai.layers import AdaptiveAvgPool,ConvLayer,Flatten
from fastai.optimizer import Adam,Lamb,Larc,Lookahead,OptimWrapper,QHAdam,RAdam,RMSProp,SGD,ranger
from fastsparse.all import *
from fastsparse.train.growth import supar_init_
from fastsparse.weights.weight import masked_params
from fastsparse.weights.hooks import enforce_masks,mask_hooks
from fastsparse.model.sparsify import decide,module_of,shows_training
from fastsparse.kernels.linear import backward
from fastsparse.model.layers import Axes
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn

torch_opts = dict(SGD=dict(lr=.05, weight_decay=.1), SGD_mom=dict(lr=.05, momentum=.9, weight_decay=.1), SGD_nesterov=dict(lr=.05, momentum=.9, nesterov=True),
    SGD_max=dict(lr=.01, momentum=.9, maximize=True), Adam=dict(lr=.01, weight_decay=.1), Adam_amsgrad=dict(lr=.01, amsgrad=True),
    Adam_eps0=dict(lr=.01, eps=0.), AdamW=dict(lr=.01), AdamW_foreach=dict(lr=.01, foreach=True), AdamW_fused=dict(lr=.01, fused=True), NAdam=dict(lr=.01),
    RAdam=dict(lr=.01), Adamax=dict(lr=.01), RMSprop=dict(lr=.01, momentum=.9, centered=True), Adagrad=dict(lr=.05, initial_accumulator_value=.3),
    Adadelta=dict(lr=1.), ASGD=dict(lr=.05, t0=2), Rprop=dict(lr=.01), Adafactor=dict(lr=.05), Muon=dict(lr=.02))
fastai_opts = dict(SGD=partial(SGD, lr=.05, mom=.9, wd=.1), SGD_plain=partial(SGD, lr=.05), SGD_l2=partial(SGD, lr=.05, mom=.9, wd=.1, decouple_wd=False),
    Adam=partial(Adam, lr=.01, wd=.1), RMSProp=partial(RMSProp, lr=.01, mom=.9), RAdam=partial(RAdam, lr=.01), QHAdam=partial(QHAdam, lr=.01),
    Larc=partial(Larc, lr=.05, wd=.1), Lamb=partial(Lamb, lr=.01, wd=.1), ranger=partial(ranger, lr=.01),
    lookahead=lambda ps: Lookahead(SGD(ps, lr=.05, mom=.9), k=2), wrapped=lambda ps: OptimWrapper(ps, torch.optim.AdamW, lr=.01),
    wrapped_muon=lambda ps: OptimWrapper([p for p in ps if p.ndim==2], torch.optim.Muon, lr=.02),
    lookahead_wrapped=lambda ps: Lookahead(OptimWrapper(ps, torch.optim.SGD, lr=.05, momentum=.9), k=2))

def torch_opt(name, params):
    "The torch optimizer `name` of `torch_opts`"
    ps = [p for p in params if p.ndim==2] if name=='Muon' else list(params)
    base = name.split('_')[0]
    if not hasattr(torch.optim, base): pytest.skip(f'no {base} in this torch')
    return getattr(torch.optim, base)(ps, **torch_opts[name])

def sparse_mlp(s=.6, seed=0, **kwargs):
    "A seeded sparse perceptron, its hooks, and a batch"
    m = mlp()
    hooks = sparsify_model(m, s, seed=seed, **kwargs)
    return m,hooks,*data(m)

# --- the 2020 page

def test_masks_by_hand():
    "Buffers named by hand make two `sparse_params`, a bias among them, and `apply_masks` leaves ten weights and two biases"
    m = nn.Linear(5, 10)
    with torch.no_grad(): nn.init.ones_(m.bias)
    m.register_buffer('weight_mask', sparse_mask_like(m.weight, .8))
    m.register_buffer('weight_sparsity', torch.tensor(.8))
    m.register_buffer('bias_mask', sparse_mask_like(m.bias, .8))
    found = sparse_params(m)
    assert [p is q for (p,*_),q in zip(found, (m.weight,m.bias))]==[True,True]
    assert isinstance(found[0][2], float) and math.isclose(found[0][2], .8, rel_tol=1e-6) and found[1][2] is None
    apply_masks(m)
    assert m.weight.count_nonzero()==10 and m.bias.count_nonzero()==2

def test_linear_regression_page():
    "`Linear(1,50), ReLU, Linear(50,1)` at .9 has ten live weights after a forward, and a hundred once hooks are gone and weights are one"
    m = nn.Sequential(nn.Linear(1,50), nn.ReLU(), nn.Linear(50,1))
    hooks = sparsify_model(m, .9)
    m(torch.randn(3,1))
    alive = lambda: sum(int(l.weight.count_nonzero()) for l in (m[0],m[2]))
    assert alive()==10
    hooks.remove()
    with torch.no_grad():
        for l in (m[0],m[2]): l.weight.fill_(1)
    m(torch.randn(3,1))
    assert alive()==100

def test_erk_page():
    "Four sparseable modules; ERK densities at .9 sum to a tenth; the first weight has a tenth within one when uniform"
    f = lambda: nn.Sequential(*[ConvLayer(a,b) for a,b in ((3,32),(32,128),(128,512))], AdaptiveAvgPool(), Flatten(), nn.Linear(512,10))
    m = f()
    ms = sparseable_modules(m)
    assert len(ms)==4
    ps = [o.weight for o in ms]
    sparsities = erdos_renyi_sparsity(ps, .9)
    assert math.isclose(sum((1-s)*p.numel() for s,p in zip(sparsities, ps)), .1*sum(p.numel() for p in ps), rel_tol=1e-9)
    sparsify_model(m, .9)
    assert abs(int(ps[0].count_nonzero())-.1*ps[0].numel())<=1

# --- counts and buffers

@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1,12), min_size=2, max_size=5), s=st.floats(0,1,exclude_max=True), seed=st.integers(0,99),
    f=st.sampled_from([uniform_sparsity, erdos_renyi_sparsity]))
def test_counts_exact(sizes, s, f, seed):
    "Law 1: the model's live weights are `round((1-s)*N)`; law 5: buffers for every chosen parameter, also at sparsity 0"
    m = mlp(sizes)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        sparsify_model(m, s, f, seed=seed)
    found = sparse_params(m)
    assert len(found)==len(sizes)-1
    assert sum(int(mask.sum()) for _,mask,_ in found)==round((1-s)*sum(p.numel() for p,*_ in found))
    for p,mask,shown in found: assert mask.dtype==torch.bool and np.float32(1-int(mask.sum())/p.numel())==np.float32(shown)

def test_buffers_do_not_depend_on_sparsity():
    "2020: a dense layer got no buffers, so the keys of a checkpoint depended on the sparsity"
    keys = set()
    for f,s in ((uniform_sparsity,0), (uniform_sparsity,.9), (first_layer_dense_uniform,.5)):
        m = mlp()
        sparsify_model(m, s, f)
        keys.add(tuple(m.state_dict()))
    assert len(keys)==1 and '0.weight_mask' in keys.copy().pop() and '0.weight_sparsity' in keys.pop()

def test_first_layer_dense():
    "First layer dense, the others at the given sparsity"
    m = mlp((4,10,10))
    sparsify_model(m, .8, first_layer_dense_uniform)
    assert [int(o.mask.sum()) for o in masked_params(m)]==[40,20]

def test_layer_left_without_weights_warns():
    "Law 1: a parameter left without live weights gives a warning that names it"
    with pytest.warns(UserWarning, match='2.weight'): sparsify_model(mlp((9,9,2,1)), .8, sparse_f=lambda ps,s: [s,1.,s])

# --- choices (law 9)

convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _chosen(m): return [o.name for o in masked_params(m)]

@pytest.mark.parametrize('f,names', [
    (lambda: nn.MultiheadAttention(8,2), ['in_proj_weight','out_proj.weight']),
    (lambda: nn.MultiheadAttention(8,2, kdim=4, vdim=6), ['q_proj_weight','k_proj_weight','v_proj_weight','out_proj.weight']),
    (lambda: nn.MultiheadAttention(8,2, add_bias_kv=True), ['in_proj_weight','out_proj.weight']),
    (lambda: nn.MultiheadAttention(8,2, bias=False, batch_first=True), ['in_proj_weight','out_proj.weight']),
    (lambda: nn.LSTM(4,5,2), ['weight_ih_l0','weight_hh_l0','weight_ih_l1','weight_hh_l1']),
    (lambda: nn.LSTM(4,5, proj_size=3), ['weight_ih_l0','weight_hh_l0','weight_hr_l0']),
    (lambda: nn.GRU(4,5, bidirectional=True), ['weight_ih_l0','weight_hh_l0','weight_ih_l0_reverse','weight_hh_l0_reverse']),
    (lambda: nn.RNN(4,5), ['weight_ih_l0','weight_hh_l0']),
    (lambda: nn.LSTMCell(4,5), ['weight_ih','weight_hh']),
    (lambda: nn.GRUCell(4,5), ['weight_ih','weight_hh']),
    (lambda: nn.RNNCell(4,5), ['weight_ih','weight_hh']),
    (lambda: nn.Sequential(*[c(4,6,3) for c in convs]), [f'{i}.weight' for i in range(6)]),
    (lambda: nn.Sequential(nn.Embedding(9,4), nn.LayerNorm(4), nn.Linear(4,4), nn.BatchNorm1d(4), nn.GroupNorm(2,4), nn.RMSNorm(4)), ['2.weight']),
    (lambda: nn.TransformerEncoderLayer(8,2,16), ['self_attn.in_proj_weight','self_attn.out_proj.weight','linear1.weight','linear2.weight'])])
def test_who_is_chosen(f, names):
    "Recurrent weights, projections and attention's in_proj are chosen (2020: AttributeError, and in_proj lost); biases, bias_k/bias_v, norms and embeddings never"
    m = f()
    sparsify_model(m, .5, seed=0)
    assert _chosen(m)==names
    for o in masked_params(m): assert int(o.p.count_nonzero())==int(o.mask.sum())<o.p.numel()
    others = [n for n,p in m.named_parameters() if n not in names]
    assert not any(f'{n}_mask' in m.state_dict() for n in others)

@pytest.mark.parametrize('make,xb', [
    (lambda: nn.LSTM(4,5, proj_size=3), lambda: torch.randn(3,2,4)), (lambda: nn.GRU(4,5,2, bidirectional=True), lambda: torch.randn(3,2,4)),
    (lambda: nn.LSTMCell(4,5), lambda: torch.randn(2,4)),
    (lambda: nn.ConvTranspose2d(3,6,3), lambda: torch.randn(2,3,5,5)), (lambda: nn.TransformerEncoderLayer(8,2,16,0.), lambda: torch.randn(3,2,8))])
def test_all_kinds_train(make, xb):
    "Law 3 in recurrent, transposed and attention layers, through three steps of Adam"
    torch.manual_seed(0)
    m = make()
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.Adam(m.parameters(), lr=.1, weight_decay=.1)
    before = [o.p.clone() for o in masked_params(m)]
    for _ in range(3):
        out = m(xb())
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        opt.step()
        opt.zero_grad()
        assert_dead(m, opt)
    assert all((b!=o.p)[o.mask].any() for b,o in zip(before, masked_params(m)))

def test_all_that_is_chosen_is_there():
    "An entry of a list that names nothing is refused, not left out; `keep_zeros` reads names and places as `sparsify_model` does"
    m = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), nn.Linear(8,4))
    with pytest.raises(ValueError, match="chosen is '4' and names none.*0.weight"): sparsify_model(m, .5, chosen=['0','4'])
    with torch.no_grad():
        for l in m: l.weight[0] = 0
    with pytest.raises(ValueError, match="chosen is '4' and names none.*0.weight"): keep_zeros(m, chosen=['0','4'])
    assert not _chosen(m)
    keep_zeros(m, chosen=-1)
    assert _chosen(m)==['2.weight']

def deferred():
    with torch.device('meta'): return nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))

@pytest.mark.parametrize('f', [lambda m: sparsify_model(m, .5), lambda m: sparsify_parameter(m, '0.weight', .5), lambda m: prune_magnitude(m, .5),
    lambda m: SparseEngine(m, torch.optim.SGD(m.parameters(), lr=.1), 100, sparsity=.5, batches_per_update=10), lambda m: learn_masks(m, 'top .5 (M)')])
def test_a_model_without_values_is_refused(f):
    "On the meta device there is nothing to mask, and masks made there would hold whatever `to_empty` finds: one error that names the way, and nothing changed"
    m = deferred()
    with pytest.raises(ValueError, match=r"0.weight is on the meta device.*to_empty\(device='cpu'\).*reset_parameters"): f(m)
    assert not [*m.buffers()] and len(sparse_summary(m).df)==6
    m.to_empty(device='cpu')
    for l in (m[0],m[2]): l.reset_parameters()
    f(m)
    assert all(torch.isfinite(p).all() for p in m.parameters())

def test_the_default_device_decides_nothing():
    "Law 8: with another default device, as torch.set_default_device('cuda') makes it, choices are drawn on the CPU all the same"
    def run(device, mask_init, structure):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,8))
        opt = torch.optim.SGD(m.parameters(), lr=.1)
        x = torch.randn(16,8)
        with torch.device(device):
            sparsify_model(m, .5, mask_init=mask_init, seed=0, structure=structure)
            engine = DynamicSparseTraining(m, opt, 40, method='set', batches_per_update=4, seed=0, structure=structure)
            for _ in range(20):
                opt.zero_grad()
                m(x).square().mean().backward()
                opt.step()
        assert engine.n_updates>2
        return [*m.parameters(), *masks_of(m)]
    for mask_init in ('random','magnitude','checkerboard'):
        for structure in (None,'2:4','fan-in','block 2x2'):
            assert all(torch.equal(a, b) for a,b in zip(run('cpu', mask_init, structure), run('meta', mask_init, structure))), (mask_init,structure)

def test_outputs_without_input_are_counted():
    "The summary says how many outputs of a layer have no live input, along the axis where outputs lie; not of layers without live weights"
    m = nn.Sequential(nn.Linear(4,6), nn.ConvTranspose2d(3,5,2), nn.Linear(2,2))
    masks = {f'{i}.weight':torch.ones_like(l.weight).bool() for i,l in enumerate(m)}
    masks['0.weight'][[1,4]] = False
    masks['1.weight'][:,2] = False
    with pytest.warns(UserWarning, match='2.weight is left without'): sparsify_model(m, .5, mask_init={**masks, '2.weight':torch.zeros(2,2).bool()})
    notes = sparse_summary(m).df.set_index('parameter').note
    assert notes['0.weight']=='2 of 6 outputs without input' and notes['1.weight']=='1 of 5 outputs without input' and notes['2.weight']==''

def test_depthwise_is_chosen_and_flagged():
    "Law 9: depthwise convolutions are chosen, and the summary says so"
    m = nn.Sequential(nn.Conv2d(6,6,3, groups=6), nn.Conv2d(6,6,3, groups=2))
    sparsify_model(m, .5)
    notes = sparse_summary(m).df.set_index('parameter')['note']
    assert 'depthwise' in notes['0.weight'] and 'depthwise' not in notes['1.weight']

def test_tied_linears_once():
    "Tied weights get one mask (2020: two masks of 50, and 24 weights)"
    m = nn.Sequential(nn.Linear(10,10), nn.ReLU(), nn.Linear(10,10))
    m[2].weight = m[0].weight
    sparsify_model(m, .5)
    m(torch.randn(2,10))
    assert len(sparse_params(m))==1 and int(m[0].weight.count_nonzero())==50
    assert len(sparse_summary(m).df.query("parameter.str.endswith('weight')"))==1

class _Tied(nn.Module):
    def __init__(self, first='emb'):
        super().__init__()
        for k in (('emb','lin') if first=='emb' else ('lin','emb')): setattr(self, k, nn.Embedding(10,4) if k=='emb' else nn.Linear(4,10, bias=False))
        self.other = nn.Linear(4,4)
        self.lin.weight = self.emb.weight

@pytest.mark.parametrize('first', ['emb','lin'])
def test_tied_with_an_embedding_stays_dense(first):
    "Law 9: a tensor shared with an embedding stays dense, whoever comes first, and the summary says why"
    m = _Tied(first)
    sparsify_model(m, .5)
    assert _chosen(m)==['other.weight'] and not hasattr(m.lin, 'weight_mask')
    assert any('embedding' in o for o in sparse_summary(m).df['note'])

def _pruned():
    m = nn.Linear(4,4)
    nn.utils.prune.l1_unstructured(m, 'weight', .5)
    return m

@pytest.mark.parametrize('f,way_out', [
    (lambda: nn.LazyLinear(3), 'batch'), (lambda: nn.LazyConv2d(3,3), 'batch'), (_pruned, r'prune\.remove'), (lambda: nn.utils.weight_norm(nn.Linear(4,4)), 'remove_weight_norm'),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4,4)), 'remove_parametrizations'), (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4,4)), 'remove_parametrizations'),
    (lambda: nn.utils.spectral_norm(nn.Linear(4,4)), 'remove_spectral_norm'), (lambda: nn.utils.weight_norm(nn.LSTM(4,4), 'weight_hh_l0'), 'remove_weight_norm')])
@pytest.mark.filterwarnings('ignore')
def test_computed_weights_are_refused(f, way_out):
    "Law 9: lazy, pruned and parametrized weights are refused by name with the way out (2020 skipped them silently); nothing is changed"
    m = nn.Sequential(nn.Linear(4,4), f())
    with pytest.raises(ValueError, match=rf'(?s)^1 .*{way_out}'): sparsify_model(m, .5)
    assert not any('_mask' in k and not k.startswith('1.') for k in m.state_dict()) and m[0].weight.all()

def test_additional_types():
    "The 2020 signature of the module filters"
    b = nn.Bilinear(2,3,4)
    assert not is_sparseable_module(b) and is_sparseable_module(b, [nn.Bilinear])
    assert sparseable_modules(nn.Sequential(b, nn.Linear(2,2)), [nn.Bilinear])[0] is b

# --- bad input (law 10)

@pytest.mark.parametrize('kwargs,match', [
    (dict(model_sparsity=1.), r'model_sparsity is 1.0.*\[0,1\)'), (dict(model_sparsity=-.1), r'\[0,1\)'), (dict(model_sparsity=math.nan), r'\[0,1\)'), (dict(model_sparsity=90), r'\[0,1\)'),
    (dict(model_sparsity=.5, sparse_f=lambda p,s: [.5]), 'returned 1 sparsities for 3'), (dict(model_sparsity=.5, sparse_f=lambda p,s: [.5,.5,2.]), r'returned 2\.0'),
    (dict(model_sparsity=.5, sparse_init_mode='fan'), "sparse_init_mode is 'fan'"), (dict(model_sparsity=.5, mask_init='nonsense'), "mask_init is 'nonsense'"),
    (dict(model_sparsity=.5, mask_init={'0.weigth': torch.ones(8,6)}), '0.weigth'), (dict(model_sparsity=.5, mask_init={'2.weight': torch.ones(6,8)}), r'2\.weight.*shape'),
    (dict(model_sparsity=.5, mask_init=lambda p: p[:1]), 'shape'), (dict(model_sparsity=.5, mask_init=lambda p: p>99), 'live weights'),
    (dict(model_sparsity=.5, mask_init=lambda p: None), '0.weight')])
def test_refused_before_anything_changed(kwargs, match):
    "Law 10: an error that names the value, the range and the fix; no buffer, no hook and no weight was touched"
    m = mlp()
    before = copy.deepcopy(m.state_dict())
    with pytest.raises(ValueError, match=match): sparsify_model(m, **kwargs)
    assert list(before)==list(m.state_dict()) and all(torch.equal(before[k], v) for k,v in m.state_dict().items())
    assert not m._forward_pre_hooks and not mask_hooks(m)

def test_nothing_to_sparsify():
    "Law 10: a model without weights to choose"
    for m in (nn.ReLU(), nn.Sequential(nn.BatchNorm1d(3)), nn.Embedding(3,3)):
        with pytest.raises(ValueError, match='no weights'): sparsify_model(m, .5)

def test_twice_is_refused():
    "2020: a second call stacked a hook and intersected masks (20 in the mask, 12 weights); now an error that names the ways out, and the first masks stay"
    m,_,xb,_ = sparse_mlp()
    before = masks_of(m)
    with pytest.raises(ValueError, match=r'unsparsify.*sparsity='): sparsify_model(m, .9)
    m(xb)
    assert same_masks(before, masks_of(m)) and len(mask_hooks(m))==1 and all(int(o.p.count_nonzero())==int(o.mask.sum()) for o in masked_params(m))
    with pytest.raises(ValueError, match='unsparsify'): sparsify_model(nn.Sequential(m, nn.Linear(3,3)), .9)

# --- starting masks

def test_mask_init_magnitude():
    "The largest stay, by hand; ties to the lowest index"
    m = nn.Linear(6,1, bias=False)
    with torch.no_grad(): m.weight.copy_(torch.tensor([[1.,-5.,2.,-2.,.5,3.]]))
    sparsify_model(m, .5, mask_init='magnitude')
    assert m.weight_mask.tolist()==[[False,True,True,False,False,True]] and m.weight.tolist()==[[0,-5,2,0,0,3]]

def test_mask_init_zeros():
    "Existing zeros are the mask, whatever the sparsity; 1e-30 lives"
    m = nn.Linear(4,1, bias=False)
    with torch.no_grad(): m.weight.copy_(torch.tensor([[0.,-0.,1e-30,2.]]))
    sparsify_model(m, .9, mask_init='zeros')
    assert m.weight_mask.tolist()==[[False,False,True,True]] and is_positive_zero(m.weight[~m.weight_mask])

def test_mask_init_function_and_dict():
    "A score function gets what it names; a mask of the right count is taken; a dict names some, the rest is dense"
    m,seen = mlp(),[]
    def score(p, name, n, generator):
        seen.append((name,n))
        return -p.abs()
    sparsify_model(m, .5, mask_init=score)
    assert seen==[('0.weight',24),('2.weight',28),('4.weight',10)] or seen==[('0.weight',24),('2.weight',28),('4.weight',11)]
    for o in masked_params(m): assert int(o.mask.sum())==dict(seen)[o.name]
    m = mlp()
    mask = torch.rand(7,8)<.3
    sparsify_model(m, .5, mask_init={'2.weight': mask})
    assert torch.equal(m[2].weight_mask, mask) and m[0].weight_mask.all()
    m[2].weight_mask.logical_not_()
    assert not torch.equal(m[2].weight_mask, mask), 'the mask given must not be shared'

def test_random_masks_on_trained_weights_warn():
    "A random mask on weights that were trained gives a warning; fresh ones, magnitude masks and new initialisations don't"
    def trained():
        m = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3))
        opt = torch.optim.SGD(m.parameters(), lr=.1)
        for _ in range(3):
            m(torch.randn(9,6)).sum().backward()
            opt.step()
        return m
    with pytest.warns(UserWarning, match="mask_init='magnitude'"): sparsify_model(trained(), .5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(trained(), .5, mask_init='magnitude')
        sparsify_model(trained(), .5, sparse_init_mode='fan_in')
        for m in (mlp(), nn.Sequential(nn.Conv2d(3,4,3), nn.BatchNorm2d(4)), nn.TransformerEncoderLayer(8,2,16), nn.LSTM(3,4)): sparsify_model(m, .5)

@pytest.mark.parametrize('mode', ['fan_in','fan_out'])
@pytest.mark.parametrize('sparse_mode', ['fan_in','fan_out','fan_in_out'])
def test_sparse_kaiming(mode, sparse_mode):
    "Dense Kaiming draws times `sqrt(dense fan / sparse fan)`, fans counted by loops, 1 at least; zeros stay"
    mask = sparse_mask((4,5,3,3), .8, torch.Generator().manual_seed(1))
    mask[0] = False
    torch.manual_seed(7)
    dense = nn.init.kaiming_normal_(torch.empty(4,5,3,3), mode=mode).numpy()
    torch.manual_seed(7)
    t = mask.float()
    assert init_kaiming_normal_sparse_(t, mode=mode, sparse_mode=sparse_mode) is t
    for o in range(4):
        for i in range(5):
            fan_in,fan_out = max(int(mask[o].sum()), 1),max(int(mask[:,i].sum()), 1)
            ratio = dict(fan_in=45/fan_in, fan_out=36/fan_out, fan_in_out=(45+36)/(fan_in+fan_out))[sparse_mode]
            assert np.allclose(t[o,i].numpy(), dense[o,i]*mask[o,i].numpy()*math.sqrt(ratio), rtol=1e-5)
    assert is_positive_zero(t[~mask])

def test_sparse_init_mode():
    "`sparse_init_mode` draws anew, where weights live only"
    m = mlp((50,60,3))
    sparsify_model(m, .9, sparse_init_mode='fan_in')
    o = masked_params(m)[0]
    assert int(o.p.count_nonzero())==int(o.mask.sum())
    assert .8<o.p[o.mask].std()/math.sqrt(2/5)<1.2

# --- dead is dead (law 3)

def _static_steps(m, opt, xb, yb, n=4):
    "`n` steps, looked at after each"
    for _ in range(n):
        opt.zero_grad()
        backward(m, xb, yb)
        for o in masked_params(m): assert is_positive_zero(o.p.grad[~o.mask])
        opt.step()
        assert_dead(m, opt)

@pytest.mark.parametrize('history', ['fresh','trained dense before'])
@pytest.mark.parametrize('name', torch_opts)
def test_static_torch(name, history):
    "Law 3 with every torch optimizer in a plain loop, no engine; also when the model was trained dense, with momentum, before"
    m = mlp()
    xb,yb = data(m)
    opt = torch_opt(name, m.parameters())
    if history!='fresh': train(m, opt, 3, xb, yb)
    sparsify_model(m, .6, seed=0, mask_init='magnitude')
    live = [o.p[o.mask].clone() for o in masked_params(m)]
    _static_steps(m, opt, xb, yb)
    assert all((a!=o.p[o.mask]).any() for a,o in zip(live, masked_params(m))), 'the live weights were not trained'

@pytest.mark.parametrize('history', ['fresh','trained dense before'])
@pytest.mark.parametrize('name', fastai_opts)
def test_static_fastai(name, history):
    "Law 3 with fastai's optimizers in a hand-written loop: their steps don't pass torch's hooks, Lookahead mixes in slow weights"
    m = mlp()
    xb,yb = data(m)
    opt = fastai_opts[name](list(m.parameters()))
    if history!='fresh': train(m, opt, 3, xb, yb)
    sparsify_model(m, .6, seed=0, mask_init='magnitude')
    live = [o.p[o.mask].clone() for o in masked_params(m)]
    _static_steps(m, opt, xb, yb, 7)
    assert all((a!=o.p[o.mask]).any() for a,o in zip(live, masked_params(m)))

def test_live_weights_train_as_if_nothing_was_there():
    "MaskHooks changes no bit of live weights: the same as masking weights and gradients by hand"
    m,_,xb,yb = sparse_mlp()
    ref = copy.deepcopy(m)
    os = [(o.p,o.mask.clone()) for o in masked_params(ref)]
    for e in mask_hooks(ref): e.remove()
    unsparsify(ref)
    a,b = [torch.optim.Adam(o.parameters(), lr=.01) for o in (m,ref)]
    for _ in range(10):
        a.zero_grad()
        b.zero_grad()
        backward(m, xb, yb)
        backward(ref, xb, yb)
        for p,mask in os: p.grad.mul_(mask)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p,q in zip(m.parameters(), ref.parameters()))

four_opts = [partial(torch.optim.SGD, lr=.1, momentum=.9), partial(torch.optim.Adam, lr=.1), partial(SGD, lr=.1, mom=.9), partial(torch.optim.Rprop, lr=.1)]
@pytest.mark.parametrize('opt_f', four_opts)
def test_gradients_by_hand(opt_f):
    "`p.grad` written by hand, without any backward or forward, reaches live weights only; NaN and inf at dead places too"
    m,*_ = sparse_mlp()
    opt = opt_f(list(m.parameters()))
    for i in range(3):
        for o in masked_params(m): o.p.grad = torch.where(o.mask, 1., [math.nan,math.inf,-3.][i])
        opt.step()
        assert_dead(m, opt)
        assert all(o.p.isfinite().all() and o.p[o.mask].all() for o in masked_params(m))
        for o in masked_params(m): o.p.grad.copy_(torch.where(o.mask, 1., 7.))
        opt.step()
        assert_dead(m, opt)

def test_nan_gradients_at_dead_places():
    "A NaN gradient of a dead weight ends there (`grad*mask` keeps it); a NaN of a live one is the user's to see"
    m,_,xb,yb = sparse_mlp()
    os = masked_params(m)
    for o in os: o.p.register_hook(lambda g, mask=o.mask: g.masked_fill(~mask, math.nan))
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    backward(m, xb, yb)
    assert all(is_positive_zero(o.p.grad[~o.mask]) for o in os)
    opt.step()
    assert_dead(m, opt)
    assert all(p.isfinite().all() for p in m.parameters())
    os[0].p.grad = torch.where(os[0].mask, math.nan, 0.)
    opt.step()
    assert os[0].p[os[0].mask].isnan().all()

def test_clipping_sees_live_gradients_only():
    "The norm that `clip_grad_norm_` returns is the live gradients'"
    m,_,xb,yb = sparse_mlp()
    dense = copy.deepcopy(m)
    unsparsify(dense)
    backward(m, xb, yb)
    backward(dense, xb, yb)
    masks = {id(o.p):o.mask for o in masked_params(m)}
    expect = math.sqrt(sum(((q.grad*masks[id(p)] if id(p) in masks else q.grad).double()**2).sum().item() for p,q in zip(m.parameters(), dense.parameters())))
    full = math.sqrt(sum((q.grad.double()**2).sum().item() for q in dense.parameters()))
    norm = nn.utils.clip_grad_norm_(m.parameters(), 1e9).item()
    assert math.isclose(norm, expect, rel_tol=1e-5) and norm<full*.99

def test_accumulated_gradients_are_masked():
    "Several backward calls into one gradient, with and without `zero_grad(set_to_none=False)`"
    m,_,xb,yb = sparse_mlp()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    for _ in range(3):
        for _ in range(2):
            backward(m, xb, yb)
            assert all(is_positive_zero(o.p.grad[~o.mask]) for o in masked_params(m))
        opt.step()
        assert_dead(m, opt)
        opt.zero_grad(set_to_none=False)

@pytest.mark.parametrize('dtype', [torch.double, torch.bfloat16])
def test_other_dtypes(dtype):
    "The whole model in another dtype"
    m,_,xb,yb = sparse_mlp()
    m = m.to(dtype)
    opt = torch.optim.Adam(m.parameters(), lr=.01)
    _static_steps(m, opt, xb.to(dtype), yb.to(dtype))

def test_autocast():
    "Under autocast the float32 weights stay enforced"
    m,_,xb,yb = sparse_mlp()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast('cpu', torch.bfloat16): loss = nn.functional.mse_loss(m(xb).float(), yb)
        loss.backward()
        opt.step()
        assert_dead(m, opt)

@pytest.mark.parametrize('opt_f', [partial(torch.optim.SGD, lr=.1, momentum=.9), partial(torch.optim.Adam, lr=.01), partial(torch.optim.Adamax, lr=.01)])
def test_channels_last(opt_f):
    "Weights, masks and gradients that are not contiguous: the same masks and weights as a contiguous run"
    def run(fmt, late):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3,8,3), nn.ReLU(), nn.Conv2d(8,8,3))
        if not late: m = m.to(memory_format=fmt)
        sparsify_model(m, .7, seed=3)
        m = m.to(memory_format=fmt)
        opt = opt_f(m.parameters())
        xb = torch.randn(2,3,8,8).to(memory_format=fmt)
        for _ in range(4):
            opt.zero_grad()
            m(xb).square().mean().backward()
            opt.step()
            assert_dead(m, opt)
        return m
    ref = run(torch.contiguous_format, False)
    for late in (False,True):
        m = run(torch.channels_last, late)
        assert not m[2].weight.is_contiguous() and same_masks(masks_of(ref), masks_of(m))
        assert all(torch.allclose(p, q, atol=1e-5) for p,q in zip(ref.parameters(), m.parameters()))

# --- others write to the weights

def _ones_state(m): return {k: torch.ones_like(v) if k.endswith('weight') else v for k,v in m.state_dict().items()}
def _each(f): return lambda m: [f(o, torch.ones_like(o.p)) for o in masked_params(m)]

def _same_place(o, ones):
    "Replace the data until the new storage lies where the old one lay"
    ptr = o.p.data_ptr()
    for _ in range(50):
        o.p.data = ones.clone()
        if o.p.data_ptr()==ptr: return

writes = dict(load_state_dict=lambda m: m.load_state_dict(_ones_state(m)), assign=lambda m: m.load_state_dict(_ones_state(m), assign=True),
    copy_=_each(lambda o,ones: o.p.detach().copy_(ones)), data=_each(lambda o,ones: setattr(o.p, 'data', ones)), data_same_place=_each(_same_place),
    parameter=_each(lambda o,ones: setattr(o.module, o.attr, nn.Parameter(ones))), init=_each(lambda o,ones: nn.init.ones_(o.p)),
    vector=lambda m: nn.utils.vector_to_parameters(torch.ones(sum(p.numel() for p in m.parameters())), m.parameters()))

@pytest.mark.parametrize('write', writes)
def test_foreign_writes_are_masked(write):
    "MaskHooks: whoever writes to a weight, dead ones are zero again in the next forward, and in training after it"
    m,_,xb,yb = sparse_mlp()
    m(xb)
    for _ in range(3):
        writes[write](m)
        m(xb)
        assert_dead(m)
        assert all(int(o.p.count_nonzero())==int(o.mask.sum()) for o in masked_params(m))
    _static_steps(m, torch.optim.Adam(m.parameters(), lr=.01), xb, yb)

@pytest.mark.parametrize('write', ['copy_','data','data_same_place','init'])
def test_foreign_writes_before_a_step(write):
    "The same without a forward in between: the step masks"
    m,_,xb,yb = sparse_mlp()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    train(m, opt, 2, xb, yb)
    backward(m, xb, yb)
    writes[write](m)
    opt.step()
    assert_dead(m, opt)

def _new_mask(o, how):
    new = sparse_mask_like(o.p, .8)
    if how=='written': o.mask.copy_(new)
    elif how=='data': o.mask.data = new
    else: o.module.register_buffer(f'{o.attr}_mask', new)

@pytest.mark.parametrize('how', ['written','data','replaced'])
def test_mask_changed_by_hand(how):
    "A mask that is written to or replaced is obeyed from the next forward on, in evaluation too"
    m,_,xb,yb = sparse_mlp()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    train(m, opt, 3, xb, yb)
    for training in (True,False):
        m.train(training)
        for _ in range(2): m(xb)
        for o in masked_params(m): _new_mask(o, how)
        m(xb)
        assert_dead(m)
    m.train()
    train(m, opt, 2, xb, yb)
    assert_dead(m, opt)

def test_two_enforcements():
    "A model that is enforced twice stays enforced when one of them ends, gradients included"
    m,hooks,xb,yb = sparse_mlp()
    again = enforce_masks(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    train(m, opt, 2, xb, yb)
    for _ in range(2): m(xb)
    hooks.remove()
    for _ in range(3):
        opt.zero_grad()
        backward(m, xb, yb)
        assert all(is_positive_zero(o.p.grad[~o.mask]) for o in masked_params(m))
        opt.step()
        assert_dead(m, opt)
    again.remove()
    train(m, opt, 1, xb, yb)
    assert all(o.p[~o.mask].any() for o in masked_params(m))

def test_apply_masks_out_of_place():
    "`inplace=False` gives the weights a new storage and leaves the old one alone"
    m,hooks,*_ = sparse_mlp()
    hooks.remove()
    for o in masked_params(m): o.p.data.fill_(1.)
    old = [o.p.data for o in masked_params(m)]
    ids = [id(p) for p in m.parameters()]
    apply_masks(m, inplace=False)
    assert_dead(m)
    assert all(t.eq(1).all() for t in old) and ids==[id(p) for p in m.parameters()]
    for o in masked_params(m): o.p.data.fill_(1.)
    apply_masks(m)
    assert_dead(m)

def _whole(m):
    f = io.BytesIO()
    torch.save(m, f)
    f.seek(0)
    return torch.load(f, weights_only=False)

copies = dict(deepcopy=copy.deepcopy, pickle=lambda m: pickle.loads(pickle.dumps(m)), torch_save=_whole,
    deepcopy_of_copy=lambda m: copy.deepcopy(copy.deepcopy(m)))

@pytest.mark.parametrize('how', copies)
@pytest.mark.parametrize('when', ['before a forward','after training'])
def test_copies_stay_enforced(how, when):
    "Law 6: copies keep masks and enforcement, are independent of the original, and the original's `remove` doesn't free them (they are freed by `unsparsify`)"
    m,hooks,xb,yb = sparse_mlp()
    if when!='before a forward': train(m, torch.optim.SGD(m.parameters(), lr=.1, momentum=.9), 2, xb, yb)
    c = copies[how](m)
    assert same_masks(masks_of(m), masks_of(c)) and all(a.mask is not b.mask and a.p is not b.p for a,b in zip(masked_params(m), masked_params(c)))
    hooks.remove()
    writes['init'](c)
    _static_steps(c, torch.optim.Adam(c.parameters(), lr=.01), xb, yb)
    before = [p.clone() for p in m.parameters()]
    assert all(torch.equal(p, q) for p,q in zip(before, m.parameters()))
    unsparsify(c)
    writes_ones(c)
    train(c, torch.optim.SGD(c.parameters(), lr=.1), 1, xb, yb)
    assert not mask_hooks(c) and all(p.all() for p in c.parameters() if p.ndim>1) and not masked_params(c)

def writes_ones(m):
    "Every weight one"
    with torch.no_grad():
        for p in m.parameters(): p.fill_(1.)

@pytest.mark.parametrize('how', copies)
def test_unsparsify_a_copy_at_once(how):
    "A copy that saw no forward yet is freed as well, and can be made sparse again without a second hook"
    m,*_ = sparse_mlp()
    c = copies[how](m)
    unsparsify(c)
    assert not mask_hooks(c) and not c._forward_pre_hooks
    hooks = sparsify_model(c, .5)
    assert len(mask_hooks(c))==1
    hooks.remove()
    writes_ones(c)
    c(data(c)[0])
    assert all(p.all() for p in c.parameters())

def test_state_dict_into_a_fresh_process(tmp_path):
    "A state dict carries the masks: loaded strictly into a fresh model that was sparsified with another seed"
    m,_,xb,yb = sparse_mlp()
    torch.save(m.state_dict(), tmp_path/'m.pt')
    c,*_ = sparse_mlp(seed=9, s=.2)
    assert not same_masks(masks_of(m), masks_of(c))
    c.load_state_dict(torch.load(tmp_path/'m.pt'))
    assert same_masks(masks_of(m), masks_of(c)) and torch.equal(m(xb), c(xb))
    _static_steps(c, torch.optim.Adam(c.parameters(), lr=.01), xb, yb)

# --- freezing, removing

@pytest.mark.parametrize('armed', [False,True])
def test_freeze_and_unfreeze(armed):
    "A weight that was frozen when the handlers were set, or is frozen and unfrozen later, is enforced whenever it trains"
    m = mlp()
    if not armed: m[2].requires_grad_(False)
    sparsify_model(m, .6, seed=0)
    xb,yb = data(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    for frozen in (True,False,True,False):
        m[2].requires_grad_(not frozen)
        before = m[2].weight.clone()
        train(m, opt, 2, xb, yb)
        assert_dead(m, opt)
        assert torch.equal(before, m[2].weight)==frozen
        opt.zero_grad()
        backward(m, xb, yb)
        if not frozen: assert is_positive_zero(m[2].weight.grad[~m[2].weight_mask]), 'clipping would see it'

def test_remove_ends_it():
    "`remove()` ends enforcement of weights, gradients and state, and leaves masks, buffers and zeros; twice does no harm"
    m,hooks,xb,yb = sparse_mlp()
    opt = torch.optim.Adam(m.parameters(), lr=.01)
    train(m, opt, 2, xb, yb)
    keys = list(m.state_dict())
    hooks.remove()
    assert_dead(m)
    assert keys==list(m.state_dict()) and not m._forward_pre_hooks and not mask_hooks(m)
    train(m, opt, 2, xb, yb)
    assert all(o.p.all() and o.p.grad.all() for o in masked_params(m))
    hooks.remove()
    apply_masks(m)
    assert_dead(m)

def test_hooks_are_a_with_block():
    "What `sparsify_model` returns also works as a context manager"
    m = mlp()
    with sparsify_model(m, .5): assert mask_hooks(m)
    assert not mask_hooks(m) and masked_params(m)

def test_a_step_waits_for_nothing():
    "2020 recomputed `sparse_params`, an unordered set, and read each sparsity from the device in every forward: the order is the parameters', and no step reads a number back"
    from torch.utils._python_dispatch import TorchDispatchMode
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            reads.append(f._schema.name)
            return f(*args, **(kwargs or {}))
    m,reads = mlp((6,8,7,5,4,3)),[]
    sparsify_model(m, .5, seed=0)
    assert [id(p) for p,_,_ in sparse_params(m)]==[id(p) for p in m.parameters() if p.ndim>1]
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    xb,yb = data(m)
    train(m, opt, 1, xb, yb)
    with Reads(): train(m, opt, 2, xb, yb)
    assert 'aten::_local_scalar_dense' not in reads and len(reads)>20

def test_unsparsify_gives_back_a_plain_model():
    "Keys, hooks and DDP's ignore list are as before; zeros stay; the model can be made sparse again"
    m = mlp()
    keys = list(m.state_dict())
    sparsify_model(m, .6)
    zeros = [o.p.eq(0) for o in masked_params(m)]
    unsparsify(m)
    assert keys==list(m.state_dict()) and not m._forward_pre_hooks and not getattr(m, '_ddp_params_and_buffers_to_ignore', [])
    assert all(torch.equal(z, p.eq(0)) for z,p in zip(zeros, [p for p in m.parameters() if p.ndim>1]))
    xb,yb = data(m)
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 2, xb, yb)
    assert all(p.all() for p in m.parameters() if p.ndim>1)
    sparsify_model(m, .6, mask_init='magnitude')
    unsparsify(nn.Linear(2,2))

def test_masks_by_hand_are_enforced_by_name():
    "`enforce_masks` goes by buffer names: a bias mask is obeyed like a weight's"
    m = mlp()
    m[0].register_buffer('bias_mask', torch.tensor([True]*4+[False]*4))
    enforce_masks(m)
    xb,yb = data(m)
    _static_steps(m, torch.optim.Adam(m.parameters(), lr=.01), xb, yb)
    assert m[0].bias.count_nonzero()==4 and m[0].weight.all()

def test_enforce_mask_false():
    "Masks are registered and applied once; nothing is hooked, and training fills the dead again"
    m,hooks,xb,yb = sparse_mlp(enforce_mask=False)
    assert_dead(m)
    assert not m._forward_pre_hooks and not mask_hooks(m)
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 2, xb, yb)
    assert all(o.p.all() for o in masked_params(m))
    hooks.remove()

def test_parameters_are_the_same_objects():
    "Law 5: parameters stay the same objects through sparsify, training and unsparsify"
    m = mlp()
    ids = [(id(p),p.data_ptr()) for p in m.parameters()]
    sparsify_model(m, .5, sparse_init_mode='fan_in')
    xb,yb = data(m)
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 2, xb, yb)
    unsparsify(m)
    assert ids==[(id(p),p.data_ptr()) for p in m.parameters()]

# --- evaluation, other users of the model

def test_evaluation_changes_nothing():
    "Laws 7 and 11: an evaluation writes to no tensor, leaves hooks, random state and BatchNorm as they are, inference mode included"
    m = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3))
    sparsify_model(m, .5, seed=0)
    xb = torch.randn(5,6)
    m.train()
    m(xb)
    m.eval()
    state = {k:(v._version,v.clone()) for k,v in [*m.named_parameters(), *m.named_buffers()]}
    rng = torch.get_rng_state()
    m(xb)
    with torch.inference_mode(): m(xb)
    sparse_summary(m)
    assert all(state[k][0]==v._version and torch.equal(state[k][1], v) for k,v in [*m.named_parameters(), *m.named_buffers()])
    assert torch.equal(rng, torch.get_rng_state()) and len(m._forward_pre_hooks)==1

def test_transformer_keeps_its_fast_path():
    "No hook on inner modules: attention's out_proj is enforced and evaluation's fast path is taken, with equal results"
    torch.manual_seed(0)
    m = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8,2,16,0., batch_first=True), 2), nn.Linear(8,2))
    sparsify_model(m, .5, seed=0)
    xb = torch.randn(3,4,8)
    out = m(xb)
    m.eval()
    assert not any(s._forward_pre_hooks or s._forward_hooks for s in m[0].modules())
    with torch.no_grad(), torch.profiler.profile() as prof: fast = m(xb)
    assert any('_transformer_encoder_layer_fwd' in e.key for e in prof.key_averages())
    assert torch.allclose(out, fast, atol=1e-5)

def test_functional_call():
    "`torch.func` works on a sparse model: given tensors are used as they are, and gradients by parameter are right"
    m,_,xb,yb = sparse_mlp()
    ps = {k:v.detach().clone() for k,v in m.named_parameters()}
    expect = m(xb)
    assert torch.equal(torch.func.functional_call(m, ps, xb), expect)
    scaled = {k:v*1. for k,v in m.named_parameters()}
    assert torch.equal(torch.func.functional_call(m, scaled, xb), expect)
    grads = torch.func.grad(lambda ps: nn.functional.mse_loss(torch.func.functional_call(m, ps, xb), yb))(ps)
    dense = copy.deepcopy(m)
    unsparsify(dense)
    backward(dense, xb, yb)
    assert all(torch.allclose(grads[k], p.grad, atol=1e-6) for k,p in dense.named_parameters())
    _static_steps(m, torch.optim.Adam(m.parameters(), lr=.01), xb, yb)

def test_submodules_sparsified_apart():
    "Two parts made sparse by two calls: each `remove` ends its own part"
    m = mlp()
    a,b = sparsify_model(m[0], .5),sparsify_model(m[2], .5)
    xb,yb = data(m)
    _static_steps(m, torch.optim.Adam(m.parameters(), lr=.01), xb, yb)
    a.remove()
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 1, xb, yb)
    assert m[0].weight.all() and is_positive_zero(m[2].weight[~m[2].weight_mask])
    b.remove()
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 1, xb, yb)
    assert m[2].weight.all()

def test_memory_is_given_back():
    "No global keeps a model, its masks or its optimizer alive"
    m,hooks,xb,yb = sparse_mlp()
    opt = torch.optim.Adam(m.parameters(), lr=.01)
    train(m, opt, 2, xb, yb)
    c = copy.deepcopy(m)
    c(xb)
    refs = [weakref.ref(o) for o in (m, c, opt, m[0].weight, m[0].weight_mask, c[2].weight)]
    del m,hooks,opt,c
    gc.collect()
    assert [r() for r in refs]==[None]*len(refs)

# --- law 8

def test_same_seed_same_masks():
    "Law 8: whatever else draws, whatever dtype, at whichever position the numbers of torch's generator stand"
    def masks(seed, dtype=torch.float, noise=0):
        m = mlp().to(dtype)
        torch.manual_seed(noise)
        torch.rand(noise)
        sparsify_model(m, .6, seed=seed)
        return masks_of(m)
    ref = masks(3)
    assert same_masks(ref, masks(3, noise=5)) and all(same_masks(ref, masks(3, d)) for d in (torch.half, torch.double, torch.bfloat16))
    assert not same_masks(ref, masks(4))
    state = torch.get_rng_state()
    m = mlp()
    state = torch.get_rng_state()
    sparsify_model(m, .6, seed=3)
    assert torch.equal(state, torch.get_rng_state()), 'a given seed leaves torch alone'

def test_seed_none_takes_one_number():
    "`seed=None` takes it from torch's generator: manual_seed repeats a run, and two models in a row differ"
    def two():
        torch.manual_seed(11)
        a,b = nn.Linear(20,20),nn.Linear(20,20)
        sparsify_model(a, .5)
        sparsify_model(b, .5)
        return a.weight_mask,b.weight_mask
    (a,b),(c,d) = two(),two()
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)

# --- summary

def test_summary():
    "One line a parameter, tied ones once, exact totals, and why the rest is dense"
    m = nn.Sequential(nn.Embedding(10,4), nn.Linear(4,10), nn.LayerNorm(10))
    sparsify_model(m, .75, seed=0)
    df = sparse_summary(m).df.set_index('parameter')
    assert list(df.index[:5])==['0.weight','1.weight','1.bias','2.weight','2.bias']
    assert df.loc['1.weight',['weights','live','sparsity','target']].tolist()==[40,10,.75,.75]
    assert 'embedding' in df.loc['0.weight','note'] and 'bias' in df.loc['1.bias','note'] and 'norm' in df.loc['2.weight','note']
    assert df.loc['sparse parameters',['weights','live']].tolist()==[40,10] and df.loc['whole model',['weights','live']].tolist()==[110,80]
    assert '1.weight' in repr(sparse_summary(m)) and '<table' in sparse_summary(m)._repr_html_()

@pytest.mark.parametrize('opt_f,slow_optimizer', [(partial(torch.optim.Rprop, lr=.01), 'Rprop'), (partial(torch.optim.Adamax, lr=.01), 'Adamax'), (partial(torch.optim.Adam, lr=.01), ''),
    (partial(SGD, lr=.01, mom=.9), ''), (partial(Adam, lr=.01), '')])
def test_costs_are_reported(opt_f, slow_optimizer):
    "Law 11: an optimizer that writes where the gradient is zero costs more, and the summary says so; SGD's and Adam's don't"
    m,_,xb,yb = sparse_mlp()
    train(m, opt_f(list(m.parameters())), 1, xb, yb)
    note = sparse_summary(m).df['note'][0]
    assert (slow_optimizer in note) if slow_optimizer else note==''

@pytest.mark.parametrize('mask', [torch.ones(3,5), torch.ones(5,3,dtype=torch.bool), torch.ones(15,dtype=torch.bool)])
def test_masks_by_hand_are_checked(mask):
    "Law 10: a mask of another type or shape is named, with what it must be, wherever it is used"
    m = nn.Linear(5, 3)
    m.register_buffer('weight_mask', mask)
    before = m.weight.detach().clone()
    for f in (sparse_params, apply_masks, enforce_masks, sparse_summary):
        with pytest.raises(ValueError, match=r'weight_mask.*must be one of bool.*\(3, 5\)'): f(m)
    assert m.weight.equal(before)

def test_sparse_params_are_exact():
    "The sparsity is that of the mask to the last bit, although the buffer has 32 bits; another number in the buffer is what was asked for"
    m = nn.Linear(7, 9)
    sparsify_model(m, .9, seed=0)
    (_,mask,s), = sparse_params(m)
    assert s==1-int(mask.sum())/mask.numel()
    m.weight_sparsity.fill_(.5)
    assert sparse_params(m)[0][2]==.5

@pytest.mark.parametrize('f,match', [(lambda m: sparsify_model(m, '0.9'), "'0.9'.*\\[0,1\\)"), (lambda m: sparsify_model(m, .5, 'erc'), "'erc'.*'erk'"),
    (lambda m: sparsify_model(m, .5, dict(drop_fraction=.3)), 'sparse_f is {'), (lambda m: sparsify_model(m, .5, mask_init={}), 'mask_init names no parameter'),
    (lambda m: sparsify_model(m, True), 'model_sparsity is True'), (lambda m: sparsify_model(m, None), 'model_sparsity is None'),
    (lambda m: sparsify_parameter(m, '0.weight', True), 'sparsity is True'),
    (lambda m: sparsify_parameter(m, '0.weight', 1.5), 'sparsity is 1.5'),
    (lambda m: sparse_mask((4,), 'x'), "sparsity is 'x'")])
def test_wrong_arguments_are_named(f, match):
    "Law 10: the value and what it must be, and nothing changed"
    m = nn.Sequential(nn.Linear(4,4))
    with pytest.raises(ValueError, match=match): f(m)
    assert not masked_params(m)

def test_no_model_and_nothing_to_make_sparse():
    "What is no model is named; a model without a layer to make sparse says why each is left out"
    with pytest.raises(TypeError, match='model is 5'): sparsify_model(5, .5)
    m = nn.Sequential(nn.Linear(4,4))
    m[0].requires_dense = True
    with pytest.raises(ValueError, match='0.weight: requires_dense'): sparsify_model(m, .5)

def test_a_module_whose_part_is_called_model():
    "A module is itself, also with a child called `model`, and a Learner is its model; every call that takes both agrees"
    whole = nn.Module()
    whole.model,whole.head = nn.Linear(8,8),nn.Linear(8,4)
    assert module_of(whole) is whole and module_of(type('L', (), dict(model=whole))) is whole
    assert rules_table(whole, .5).parameter.tolist()==['model.weight','model.bias','head.weight','head.bias']
    sparsify_model(whole, .5, seed=0)
    before = whole.head.weight.detach().clone()
    supar_init_(whole)
    torch.testing.assert_close(whole.head.weight, before*2**.5)

def test_packed_checkpoints(tmp_path):
    "A file with masks of one bit a weight loads as the whole one does, through torch's own weights-only loader; what isn't a mask is untouched"
    make = lambda seed: sparsified(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.MultiheadAttention(6, 2)), seed)
    def sparsified(model, seed):
        sparsify_model(model, .7, seed=seed)
        model[1].register_buffer('some_mask', torch.ones(3, dtype=torch.bool))
        return model
    a,b = make(0),make(1)
    state = a.state_dict()
    packed = pack_masks(state)
    torch.save(packed, tmp_path/'packed.pt')
    loaded = unpack_masks(torch.load(tmp_path/'packed.pt', weights_only=True))
    b.load_state_dict(loaded)
    assert list(loaded)==list(state) and all(loaded[k].equal(t) and loaded[k].dtype==t.dtype for k,t in state.items())
    assert [k for k in state if packed[k] is not state[k]]==['0.weight_mask','2.in_proj_weight_mask','2.out_proj.weight_mask']
    assert all(t.equal(state[k]) for k,t in unpack_masks(state).items()) and packed._metadata==state._metadata
    assert all(x.equal(y) for x,y in zip(a.state_dict().values(), b.state_dict().values()))

# ---- Layers that the table doesn't know, and those that lie otherwise ----

class _Experts(nn.Module):
    "Three-dimensional parameters, a matrix an expert, as in Mixtral"
    def __init__(self, n=4, n_out=16, n_in=8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, n_out, n_in))
    def forward(self, x): return torch.einsum('eoi,bi->bo', self.up, x)

@pytest.mark.parametrize('also', [_Experts, '0.up', '0', '*.up', lambda n,p: p.ndim==3, [_Experts]])
def test_also_brings_in_parameters(also):
    "Types, names, modules, globs, functions and lists bring in what the table of layers lacks; trained, dead stays dead"
    m = nn.Sequential(_Experts(), nn.Linear(16,2))
    sparsify_model(m, .75, also=also, seed=0)
    assert [o.name for o in masked_params(m)]==['0.up','1.weight'] and sum(int(o.mask.sum()) for o in masked_params(m))==(512+32)//4
    opt = torch.optim.Adam(m.parameters())
    for _ in range(3):
        m(torch.randn(5,8)).square().sum().backward()
        opt.step()
    assert_dead(m, opt)

def test_what_is_missed_is_said_once():
    "When the table knows less than nine tenths of the matrix weights, one warning names the largest and both ways out; `also` of any kind silences it"
    def made(): return nn.Sequential(_Experts(), nn.Linear(16,2))
    with pytest.warns(UserWarning, match=r'0\.up.*512.*also=') as ws: sparsify_model(made(), .5)
    assert len(ws)==1
    for kw in (dict(also=()), dict(also=_Experts)):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            sparsify_model(made(), .5, **kw)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(nn.Sequential(nn.Embedding(1000,8), nn.Linear(8,2)), .5)
        sparsify_model(nn.Sequential(nn.Linear(64,64), nn.Linear(64,2)), .5, chosen='1')

def test_experts_go_by_expert():
    "ERK's size and the structure of a parameter of experts are those of one expert: (16+8)/(16*8) and two live inputs an output"
    seen = {}
    def sparse_f(params, s, axes):
        seen['axes'] = axes
        return erdos_renyi_sparsity(params, s, axes=axes)
    m = nn.Sequential(_Experts(), nn.Linear(16,2))
    sparsify_model(m, .75, sparse_f, also=_Experts, seed=0)
    assert seen['axes'][0].experts==0 and seen['axes'][1].is_usual
    raw = [(16+8)/(16*8), (16+2)/(16*2)]
    k = .25*(512+32)/(raw[0]*512+raw[1]*32)
    assert abs(int(m[0].up_mask.sum())-k*raw[0]*512)<=1
    m = nn.Sequential(_Experts(), nn.Linear(16,2))
    sparsify_model(m, .75, structure='fan-in', also=_Experts, seed=0)
    assert m[0].up_mask.sum(2).eq(2).all()

def test_conv1d_of_transformers():
    "transformers' `Conv1D` keeps inputs x outputs: fan-in counts the inputs of each output, and initialisation scales by them; tied GPT-2 works"
    tf = pytest.importorskip('transformers')
    m = tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(m, .75, structure='fan-in', sparse_init_mode='fan_in', seed=0)
    names = [o.name for o in masked_params(m)]
    assert len(names)==8 and not any('wte' in n or 'lm_head' in n for n in names)
    assert all((o.mask.sum(0)==o.mask.shape[0]//4).all() for o in masked_params(m))

def test_init_by_axes():
    "Initialisation of a transposed weight is that of the weight itself; of experts, each by itself"
    mask = sparse_mask((200,50), .8)
    for _ in range(2):
        t = init_kaiming_normal_sparse_(mask.t().contiguous().float(), sparse_mode='fan_in', axes=Axes(1, 0))
        assert t.ne(0).equal(mask.t()) and abs(float(t[t!=0].std())-(2/10)**.5)<.03
    e = init_kaiming_normal_sparse_(torch.stack([mask, mask]).float(), sparse_mode='fan_in', axes=Axes(1, 2, 0))
    assert abs(float(e[e!=0].std())-(2/10)**.5)<.03 and not e[0].equal(e[1])

def test_adapters_stay_dense():
    "peft's small matrices never become sparse silently; `also` names them"
    peft = pytest.importorskip('peft')
    m = peft.get_peft_model(nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,4)), peft.LoraConfig(target_modules=['0'], r=2))
    whys = {o.name:o.dense_reason for o in decide(m)}
    assert {n.rpartition('lora_')[2][0] for n,w in whys.items() if w=='adapter'}=={'A','B'}
    sparsify_model(m, .5)
    assert not any('lora_' in o.name for o in masked_params(m))

@pytest.mark.parametrize('sparsity,told', [(.99,True), (.5,False)])
def test_a_structure_that_rounds_far_off_is_told(sparsity, told):
    ".64 of 64 inputs is 1: 256 live ones where 164 were asked for"
    m = nn.Sequential(nn.Linear(64,256))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        sparsify_model(m, sparsity, structure='fan-in', seed=0)
    said = [str(o.message) for o in seen if 'rounds to its own unit' in str(o.message)]
    assert bool(said)==told and (not told or '256 weights live, and 164 were asked for' in said[0])

def norm_model(*change):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for f in change: f(model)
    return model

@pytest.mark.parametrize('change,trained', [
    (lambda m: None, False),
    (lambda m: m[1].num_batches_tracked.fill_(1), True),
    (lambda m: m[1].weight.data.fill_(3.), False),
    (lambda m: m[1].weight.data[2:3].fill_(3.), True),
    (lambda m: setattr(m[0].weight, 'grad', torch.zeros(4, 4)), True),
    (lambda m: [m[0].weight.data.add_(0) for _ in range(30)], False),  # torch doesn't count writes to `data`
    (lambda m: [m[0].weight.detach().add_(0) for _ in range(30)], True),
    (lambda m: [m[0].weight.detach().add_(0) for _ in range(5)], False)])
def test_what_shows_training(change, trained):
    "One batch through a norm, one entry of its weight that differs, a gradient, or many writes show it, each by itself"
    assert shows_training(model := norm_model(change), model)==trained

@pytest.mark.parametrize('mode,rescaled', [('auto', True), (None, False)])
def test_a_learner_s_batch_is_looked_at(mode, rescaled):
    "A deep network at .99 starves: 'auto' rescales it by the learner's own batch, None leaves weights alone"
    from fastai_data import learner
    import tempfile
    torch.manual_seed(0)
    model = nn.Sequential(*[l for a,b in ((64,128),(128,128),(128,128),(128,10)) for l in (nn.Linear(a, b), nn.ReLU())][:-1]).double()
    was = model[2].weight.detach().clone()
    with tempfile.TemporaryDirectory() as d, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        sparsify_model(learner(d, model), .99, seed=0, sparse_init_mode=mode)
    o = masked_params(model)[1]
    assert (not o.p[o.mask].equal(was[o.mask]))==rescaled
