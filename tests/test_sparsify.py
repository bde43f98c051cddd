"A model and its masks: who is chosen, how many live, where masks start, what is refused, and how it all ends"
import copy,gc,math,pytest,warnings,weakref
from fastai.optimizer import Adam,SGD
from fastsparse.all import *
from fastsparse.save.rules import rules_table
from fastsparse.weights.hooks import enforce_masks
from fastsparse.model.choose import choose
from fastsparse.model.running import module_of
from fastsparse.model.starting import by_rules
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st

def sparse_mlp(s=.6, **kwargs):
    "A seeded sparse perceptron, its hooks, and a batch"
    m = mlp()
    return m,sparsify_model(m, s, seed=0, **kwargs),*data(m)

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

# --- counts and buffers

@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1,12), min_size=2, max_size=5), s=st.floats(0,1,exclude_max=True), seed=st.integers(0,99),
    f=st.sampled_from([uniform_sparsity, erdos_renyi_sparsity]))
def test_counts_exact(sizes, s, f, seed):
    "Laws 1 and 5: `round((1-s)*N)` live weights, and buffers for every chosen parameter, whatever the sparsity; a parameter left without live weights is named"
    m = mlp(sizes)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        sparsify_model(m, s, f, seed=seed)
    found = sparse_params(m)
    assert sum(int(mask.sum()) for _,mask,_ in found)==round((1-s)*sum(p.numel() for p,*_ in found))
    assert [k for k in m.state_dict() if '_' in k]==[f'{2*i}.weight_{o}' for i in range(len(sizes)-1) for o in ('mask','sparsity')]
    assert all(mask.dtype==torch.bool and shown==1-int(mask.sum())/p.numel() for p,mask,shown in found)
    for o in masked_params(m): assert bool(o.mask.any()) or any(o.name in str(w.message) for w in told)

@pytest.mark.parametrize('f', [lambda m: sparsify_parameter(m, '0.weight', .5), lambda m: prune_magnitude(m, .5),
    lambda m: SparseEngine(m, torch.optim.SGD(m.parameters(), lr=.1), 100, sparsity=.5, batches_per_update=10), lambda m: learn_masks(m, 'top .5 (M)')])
def test_a_model_without_values_is_refused(f):
    "On the meta device there is nothing to mask, except by `sparsify_model`: one error that names the way, and nothing changed"
    with torch.device('meta'): m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))
    with pytest.raises(ValueError, match=r"0.weight is on the meta device.*to_empty\(device='cpu'\).*reset_parameters"): f(m)
    assert not [*m.buffers()] and len(sparse_summary(m).df)==6
    m.to_empty(device='cpu')
    for l in (m[0],m[2]): l.reset_parameters()
    f(m)
    assert all(torch.isfinite(p).all() for p in m.parameters())

def test_the_default_device_decides_nothing():
    "Law 8: with another default device, as torch.set_default_device('cuda') makes it, choices are drawn on the CPU all the same"
    def run(device, mask_init, structure):
        m = mlp((8,16,8))
        opt,x = torch.optim.SGD(m.parameters(), lr=.1),torch.randn(16,8)
        with torch.device(device):
            sparsify_model(m, .5, mask_init=mask_init, seed=0, structure=structure)
            engine = DynamicSparseTraining(m, opt, 40, method='set', batches_per_update=4, seed=0, structure=structure)
            for _ in range(9):
                opt.zero_grad()
                m(x).square().mean().backward()
                opt.step()
        assert engine.n_updates>1
        return [*m.parameters(), *masks_of(m)]
    for case in (('random',None), ('magnitude','2:4'), ('checkerboard','fan-in'), ('random','block 2x2')):
        assert all(torch.equal(a, b) for a,b in zip(run('cpu', *case), run('meta', *case))), case

# --- which layers, and how sparse

def nets(): return mlp((8,16,12,4))
def thin(m): return {o.name:int(o.mask.sum()) for o in masked_params(m) if not o.mask.all()}

@pytest.mark.parametrize('exclude', ['4', '4.weight', ['4.weight'], lambda n,p: len(p)==4, 2])
def test_what_is_excluded_stays_dense(exclude):
    "By every kind of pattern, in `sparsify_model` and pruning alike; the others have the sparsity"
    for f,args in ((sparsify_model,[]), (prune_magnitude,[]), (prune_synflow,[torch.ones(2,8)])):
        f(m := nets(), .5, *args, exclude=exclude)
        assert list(thin(m))==['0.weight','2.weight'] and sum(thin(m).values())==(8*16+16*12)//2
    sparsify_model(m := nets(), .5, chosen=['2','4'], exclude=exclude)
    assert list(thin(m))==['2.weight']
    prune_magnitude(m := nets(), .5, chosen='0')
    assert list(thin(m))==['0.weight']
    sparsify_model(m := nets(), .5, exclude=())
    assert len(thin(m))==3

@pytest.mark.parametrize('rules', [{'0':.75, '2.weight':.5}, [('0.weight',.75), ('2',.5)], [(nn.Linear,None)], [('4',None), ('0.*',.75), ('*',.5)]])
def test_rules_are_read_alike_by_sparsifying_and_pruning(rules):
    "A dict or pairs; the first that names a layer decides, None and no rule leave it dense"
    for f in (sparsify_model, prune_magnitude):
        if rules==[(nn.Linear,None)]:
            with pytest.raises(ValueError, match='0.weight, 2.weight, 4.weight'): f(nets(), rules)
            continue
        f(m := nets(), rules)
        assert thin(m)=={'0.weight':32, '2.weight':96}

# --- bad input (law 10)

def layer(of): return lambda m: sparsify_model(of(), .5)
def dense_layer(m):
    m[0].requires_dense = m[2].requires_dense = m[4].requires_dense = True
    sparsify_model(m, .5)

def given_masks(start): return lambda m: sparsify_model(m, .5, mask_init=start)

refused = [(lambda m: sparsify_model(m, 1.), r'sparsity is 1.0.*\[0,1\)'), (lambda m: sparsify_model(m, -.1), r'\[0,1\)'),
    (lambda m: sparsify_model(m, math.nan), r'\[0,1\)'), (lambda m: sparsify_model(m, 90), r'\[0,1\)'), (lambda m: sparsify_model(m, '0.9'), r"'0.9'.*\[0,1\)"),
    (lambda m: sparsify_model(m, True), 'sparsity is True'), (lambda m: sparsify_model(m, None), 'sparsity is None'),
    (lambda m: sparsify_model(m, .5, 'erc'), "'erc'.*'erk'"), (lambda m: sparsify_model(m, .5, dict(drop_fraction=.3)), 'sparse_f is {'),
    (lambda m: sparsify_model(m, .5, lambda p,s: [.5]), 'returned 1 sparsities for 3'),
    (lambda m: sparsify_model(m, .5, lambda p,s: [.5,.5,2.]), r'returned is 2\.0'),
    (lambda m: sparsify_model(m, .5, sparse_init_mode='fan'), "sparse_init_mode is 'fan'"), (given_masks('nonsense'), "mask_init is 'nonsense'"),
    (given_masks({}), 'mask_init names no parameter'), (given_masks({'0.weigth': torch.ones(8,6)}), '0.weigth'),
    (given_masks({'2.weight': torch.ones(6,8)}), r'2\.weight.*shape'), (given_masks(lambda p: p[:1]), 'shape'), (given_masks(lambda p: p>99), 'live weights'),
    (given_masks(lambda p: None), '0.weight'), (lambda m: sparsify_parameter(m, '0.weight', True), 'sparsity is True'),
    (lambda m: sparsify_parameter(m, '0.weight', 1.5), 'sparsity is 1.5'), (lambda m: sparse_mask((4,), 'x'), "sparsity is 'x'"),
    (lambda m: sparsify_model(5, .5), 'model is 5'), (layer(nn.ReLU), 'no weights'), (layer(lambda: nn.Sequential(nn.BatchNorm1d(3))), 'no weights'),
    (layer(lambda: nn.Embedding(3,3)), 'no weights'), (dense_layer, '0.weight: requires_dense'),
    (lambda m: sparsify_model(m, .5, exclude='5'), "exclude is '5' and names none.*0.weight"), (lambda m: sparsify_model(m, .5, exclude=nn.Linear), 'leaves nothing'),
    (lambda m: sparsify_model(m, {'5':.5}), 'rules that name none'), (lambda m: sparsify_model(m, {'0':1.5}), r'sparsity is 1.5, and must lie in \[0,1\)'),
    (lambda m: sparsify_model(m, [.5]), "sparsity is 0.5, and must be pairs"), (lambda m: sparsify_model(m, {'0':.5}, 'erk'), 'sparse_f shares it out too'),
    (lambda m: sparsify_model(m, .5, structure='block 4x4'), "take another structure, or leave it dense by exclude='0.weight'"),
    (lambda m: sparsify_model(m, .5, structure='4x4'), "structure is '4x4'.{0,160}did you mean 'block 4x4'"),
    (lambda m: prune_snip(m, .5, [torch.randn(4, 6)]), 'returns a Tensor, which has no loss: pass loss_func='),
    (lambda m: sparsify_model(m, .5, chosen=['0','5']), "chosen is '5' and names none.*0.weight")]

@pytest.mark.parametrize('call,match', refused)
def test_refused_before_anything_changed(call, match):
    "An error names the value, the range and the fix; no buffer, no hook and no weight was touched"
    m = mlp()
    before = copy.deepcopy(dict(m.state_dict()))
    with pytest.raises((ValueError,TypeError), match=match): call(m)
    assert agree(before, dict(m.state_dict())) and not masked_params(m) and not m._forward_pre_hooks

def test_twice_is_refused():
    "The ways out are named, and the first masks stay; in a larger model too"
    m,_,xb,_ = sparse_mlp()
    before = masks_of(m)
    for again in (lambda: sparsify_model(m, .9), lambda: sparsify_model(nn.Sequential(m, nn.Linear(3,3)), .9)):
        with pytest.raises(ValueError, match=r'unsparsify.*sparsity='): again()
    m(xb)
    assert same_masks(before, masks_of(m)) and all(int(o.p.count_nonzero())==int(o.mask.sum()) for o in masked_params(m))

# --- starting masks

def test_mask_init_function_and_dict():
    "A function gets what it names; a dict names some, the rest is dense, and shares no mask"
    m,seen = mlp(),[]
    def score(p, name, n, generator):
        seen.append((name,n))
        return -p.abs()
    sparsify_model(m, .5, mask_init=score)
    assert [(o.name,int(o.mask.sum())) for o in masked_params(m)]==seen
    m,mask = mlp(),torch.rand(7,8)<.3
    sparsify_model(m, .5, mask_init={'2.weight': mask})
    assert torch.equal(m[2].weight_mask, mask) and m[0].weight_mask.all()
    m[2].weight_mask.logical_not_()
    assert not torch.equal(m[2].weight_mask, mask)

# --- how it goes on and ends

@pytest.mark.parametrize('way', ['remove','with','enforce_mask=False'])
def test_without_enforcement_masks_and_zeros_stay(way):
    "Training fills the dead again; `remove` twice does no harm, and `apply_masks` zeroes them once, also in a new storage"
    m,hooks,xb,yb = sparse_mlp(enforce_mask=way!='enforce_mask=False')
    keys,opt = list(m.state_dict()),torch.optim.Adam(m.parameters(), lr=.01)
    if way!='enforce_mask=False': train(m, opt, 2, xb, yb)
    if way=='with':
        with hooks: pass
    hooks.remove(), hooks.remove()
    assert_dead(m)
    assert keys==list(m.state_dict()) and not m._forward_pre_hooks and len(masked_params(m))==3
    train(m, opt, 2, xb, yb)
    assert all(o.p.all() and o.p.grad.all() for o in masked_params(m))
    old,ids = [o.p.data for o in masked_params(m)],[id(p) for p in m.parameters()]
    apply_masks(m, inplace=False)
    assert_dead(m)
    assert all(t.all() for t in old) and ids==[id(p) for p in m.parameters()]
    for o in masked_params(m): o.p.data.fill_(1.)
    apply_masks(m)
    assert_dead(m)

def test_unsparsify_gives_back_a_plain_model():
    "Keys, hooks, parameters and their storage are as before; zeros stay until it trains; it can be made sparse again, and a dense model is no error"
    m = mlp()
    keys,ids = list(m.state_dict()),[(id(p),p.data_ptr()) for p in m.parameters()]
    sparsify_model(m, .6, sparse_init_mode='fan_in')
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 2, *data(m))
    zeros = [o.p.eq(0) for o in masked_params(m)]
    unsparsify(m)
    assert keys==list(m.state_dict()) and ids==[(id(p),p.data_ptr()) for p in m.parameters()]
    assert not m._forward_pre_hooks and not getattr(m, '_ddp_params_and_buffers_to_ignore', [])
    ps = [p for p in m.parameters() if p.ndim>1]
    assert all(torch.equal(z, p.eq(0)) for z,p in zip(zeros, ps))
    train(m, torch.optim.SGD(m.parameters(), lr=.1), 2, *data(m))
    assert all(p.all() for p in ps)
    sparsify_model(m, .6, mask_init='magnitude')
    unsparsify(nn.Linear(2,2))

def test_parts_made_sparse_one_by_one():
    "Each `remove` frees its own"
    m = nn.Sequential(*[nn.Linear(4,4) for _ in range(6)])
    hooks = [*[sparsify_parameter(m, f'{i}.weight', .5, seed=i) for i in range(4)], sparsify_model(m[4], .5), sparsify_model(m[5], .5)]
    hooks[0].remove(), hooks[4].remove()
    with torch.no_grad():
        for p in m.parameters(): p.fill_(1.)
    m(torch.randn(5,4)), m[5](torch.randn(5,4))
    assert [int(l.weight.count_nonzero()) for l in m]==[16,8,8,8,16,8]
    for h in hooks: h.remove()
    assert not any(o._forward_pre_hooks or o._load_state_dict_post_hooks for o in m.modules())

def test_evaluation_changes_nothing():
    "Laws 7 and 11: it writes to no tensor, leaves hooks, random state and BatchNorm as they are, inference mode included"
    m,xb = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3)),torch.randn(5,6)
    sparsify_model(m, .5, seed=0)
    m(xb), m.eval()
    def state(): return [(k,v._version,v.tolist()) for k,v in [*m.named_parameters(),
        *m.named_buffers()]],torch.get_rng_state().tolist(),len(m._forward_pre_hooks)
    before = state()
    m(xb)
    with torch.inference_mode(): m(xb)
    sparse_summary(m)
    assert state()==before

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
    "Law 8: whatever else draws, in whatever dtype; a given seed leaves torch's generator alone, None takes one number from it"
    def masks(seed, dtype=torch.float, noise=0):
        m = mlp().to(dtype)
        torch.manual_seed(noise)
        torch.rand(noise)
        state = torch.get_rng_state()
        sparsify_model(m, .6, seed=seed)
        assert torch.equal(state, torch.get_rng_state())==(seed is not None)
        return masks_of(m)
    ref = masks(3)
    assert same_masks(ref, masks(3, noise=5)) and all(same_masks(ref, masks(3, d)) for d in (torch.half, torch.double, torch.bfloat16)) and not same_masks(ref,
        masks(4))
    assert same_masks(masks(None), masks(None)) and not same_masks(masks(None), masks(None, noise=5))

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

@pytest.mark.parametrize('opt_f,slow_optimizer', [(partial(torch.optim.Rprop, lr=.01), 'Rprop'), (partial(torch.optim.Adamax, lr=.01), 'Adamax'),
    (partial(torch.optim.Adam, lr=.01), ''),
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
    "To the last bit, although the buffer has 32; another number in the buffer is what was asked for"
    m = nn.Linear(7, 9)
    sparsify_model(m, .9, seed=0)
    assert sparse_params(m)[0][2]==1-int(m.weight_mask.sum())/63
    m.weight_sparsity.fill_(.5)
    assert sparse_params(m)[0][2]==.5

def test_a_module_whose_part_is_called_model():
    "A module is itself, also with a child called `model`, and a Learner is its model"
    whole = nn.Module()
    whole.model,whole.head = nn.Linear(8,8),nn.Linear(8,4)
    assert module_of(whole) is whole and module_of(type('L', (), dict(model=whole))) is whole
    assert rules_table(whole, .5).parameter.tolist()==['model.weight','model.bias','head.weight','head.bias']

@pytest.mark.parametrize('sparsity,told', [(.99,True), (.5,False)])
def test_a_structure_that_rounds_far_off_is_told(sparsity, told):
    ".64 of 64 inputs is 1: 256 live ones where 164 were asked for"
    m = nn.Sequential(nn.Linear(64,256))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        sparsify_model(m, sparsity, structure='fan-in', seed=0)
    said = [str(o.message) for o in seen if 'rounds to its own unit' in str(o.message)]
    assert bool(said)==told and (not told or '256 weights live, and 164 were asked for' in said[0])

@pytest.mark.parametrize('start,s,w,live', [('magnitude',.5,[1.,-5,2,-2,.5,3],[0,1,1,0,0,1]), ('zeros',.9,[0.,-0.,1e-30,2],[0,0,1,1]),
    (lambda p: -p,.5,[1.,-5,2,-2],[0,1,0,1])])
def test_starts_by_hand(start, s, w, live):
    "The largest stay, ties to the lowest index; existing zeros are the mask whatever the sparsity; a score of one's own"
    m = nn.Linear(len(w), 1, bias=False)
    with torch.no_grad(): m.weight.copy_(torch.tensor([w]))
    sparsify_model(m, s, mask_init=start)
    assert m.weight_mask.int().tolist()==[live] and torch.equal(m.weight, torch.tensor([w])*torch.tensor(live)) and is_positive_zero(m.weight[~m.weight_mask])

def test_rules_in_total():
    "The sparsity of all that becomes sparse, by number of weights"
    os = choose(nn.Sequential(nn.Linear(10,20), nn.Linear(20,30)))
    kept,total,_ = by_rules({'0.weight':.5, '1.weight':.9}, os, None)
    assert [o.name for o in kept]==['0.weight','1.weight'] and total==pytest.approx((.5*200+.9*600)/800)

def test_one_entry_of_a_norm_shows_training():
    "Its weights are all one in a new network"
    net = nn.Sequential(nn.Linear(64,64), nn.LayerNorm(64), nn.Linear(64,8))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(copy.deepcopy(net), .9)
    net[1].weight.data[3] = 1.1
    with pytest.warns(UserWarning, match='look trained'): sparsify_model(net, .9)

def test_also_brings_in_a_matrix_that_stays_dense_by_default():
    "An embedding, by name"
    m = nn.Sequential(nn.Embedding(16,8), nn.Linear(8,4))
    sparsify_model(copy.deepcopy(m), .5, 'uniform')
    sparsify_model(m, .5, 'uniform', also='0.weight', seed=0)
    assert {o.name:o.n_live() for o in masked_params(m)}=={'0.weight':64, '1.weight':16}

def test_a_learned_mask_is_not_removed_with_the_others():
    "Its dead weights have values: folding comes first"
    m = nn.Sequential(nn.Linear(8,8), nn.Linear(8,4))
    learn_masks(m, '2:4')
    before = m.state_dict().keys()
    for f in (lambda: unsparsify(m), lambda: unsparsify_parameter(m, '0.weight')):
        with pytest.raises(ValueError, match='0.weight.*learn'): f()
    assert m.state_dict().keys()==before

def test_a_summary_counts_the_zeros_of_weights_without_masks():
    "Of two or more dimensions: vectors, such as biases, often begin at zero"
    m = nn.Sequential(nn.Linear(4,8), nn.Linear(8,4))
    with torch.no_grad(): m[1].weight[0,:3] = 0.
    nn.init.zeros_(m[1].bias)
    sparsify_model(m, .5, exclude='1.*', seed=0)
    rows = sparse_summary(m).df.set_index('parameter')
    assert rows.loc['1.weight','live']==29 and rows.loc['1.bias','live']==4 and rows.loc['0.weight','live']==16
