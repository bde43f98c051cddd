"What a sparse model refuses, whom it leaves alone, and what of it stays: loads, memories of optimizers, computed weights, layers that others replace"
import copy,pickle,pytest,warnings
import torch.nn.utils.prune as prune
from fastai.basics import DataLoader,DataLoaders,Learner
from fastai.optimizer import Adam,Lamb,OptimWrapper,ranger
from fastsparse.all import *
from fastsparse.save.masks import mask_to_bits
from fastsparse.weights.optimizers import state_tensors
from fastsparse.weights.hooks import mask_hooks,share_masks
from fastsparse.prune.tickets import rewind
from forks import run_code
from fastsparse.model.sparsify import unsparsify_parameter
from functools import partial
from helpers import *
from types import SimpleNamespace
from test_weights import copied_by,optimizers,stays_dead,Tasks,tasks,used_by
from torch.nn.utils import parametrizations

alone = """
import gc,torch
from torch import optim
import torch.optim.optimizer as base
from fastai import optimizer as fo
classes = optim.Optimizer,optim.SGD,torch.nn.Module,torch.nn.Parameter,torch.Tensor,fo.Optimizer,fo.Lookahead,fo.OptimWrapper
def now(): return [dict(vars(c)) for c in classes],len(base._global_optimizer_pre_hooks),len(base._global_optimizer_post_hooks)
was = now()
from fastsparse.model.sparsify import sparsify_model
m,m2 = torch.nn.Linear(8,8),torch.nn.Linear(8,8)
hooks,hooks2 = sparsify_model(m, .5),sparsify_model(m2, .5)
opt = fo.SGD([m.weight], lr=.1, mom=.9)
for _ in range(3):
    m(torch.randn(4,8)).sum().backward()
    opt.step()
    opt.state_dict()
    assert not m.weight[~m.weight_mask].any()
hooks.remove()
del m2,hooks2
gc.collect()
assert now()==was
"""

def test_nobody_else_is_changed():
    "Once the last sparse model is gone, classes of torch and fastai are as they were before the first"
    res = run_code(alone)
    assert res.returncode==0 and not res.stderr, res.stderr

# --- second moments, whose square roots are slow where they are zero

second_moments = dict(Adam=partial(torch.optim.Adam, lr=.01), foreach=partial(torch.optim.AdamW, lr=.01, foreach=True),
    amsgrad=partial(torch.optim.Adam, lr=.01, amsgrad=True), RMSprop=partial(torch.optim.RMSprop, lr=.01, alpha=.8, centered=True),
    Adagrad=partial(torch.optim.Adagrad, lr=.01), fastai=partial(Adam, lr=.01), ranger=partial(ranger, lr=.01),
    wrapped=partial(OptimWrapper, opt=torch.optim.Adam, lr=.01), lamb=partial(Lamb, lr=.01))

@pytest.mark.parametrize('dtype', [torch.float, torch.double])
@pytest.mark.parametrize('name', second_moments)
def test_zeros_under_a_root_do_no_harm(name, dtype):
    "What stands in for them changes no bit of weights and of live weights' memory; dead weights' is at most 1.2e-30 (law 3), saved so"
    m = mlp(dtype=dtype)
    sparsify_model(m, .6, seed=0)
    hand,masks = mlp(dtype=dtype),masks_of(m)
    hand.load_state_dict({k:v for k,v in m.state_dict().items() if '_' not in k})
    a,b = [second_moments[name](list(o.parameters())) for o in (m,hand)]
    ps = [p for p in hand.parameters() if p.ndim>1]
    for t in range(36):
        train(m, a, 1, *data(m))
        b.zero_grad()
        backward(hand, *data(hand))
        with torch.no_grad():
            for p,mask in zip(ps, masks): p.grad.masked_fill_(~mask, 0)
            b.step()
            for p,mask in zip(ps, masks): p.masked_fill_(~mask, 0)
        assert_dead(m, a)
    assert all(map(torch.equal, m.parameters(), hand.parameters()))
    for o,q in zip(masked_params(m), ps):
        for x,y in zip(state_tensors(a, o.p), state_tensors(b, q), strict=True): assert torch.equal(torch.where(o.mask, x, 0), torch.where(o.mask, y, 0))

# --- loads

class _Renames(nn.Module):
    "Takes the names of an older version"
    def __init__(self):
        super().__init__()
        self.new = nn.Linear(6,6)
    def forward(self, x): return self.new(x)
    def _load_from_state_dict(self, state, prefix, *args):
        for k in [k for k in state if k.startswith(f'{prefix}old.')]: state[k.replace('old.', 'new.')] = state.pop(k)
        super()._load_from_state_dict(state, prefix, *args)

class _Extra(nn.Module):
    "Has state that is no tensor"
    n = 0
    def get_extra_state(self): return self.n
    def set_extra_state(self, n): self.n = n
    def forward(self, x): return x

def loadable(seed=0, sparsity=.5):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), _Extra(), nn.Linear(8,6), nn.Sequential(_Renames(), nn.Linear(6,2)))
    sparsify_model(model, sparsity, 'uniform', seed=seed)
    return model

def state_of_all(model): return {k:v.clone() for k,v in (*model.named_parameters(), *model.named_buffers())}

def without(*names): return lambda state: {k:v for k,v in state.items() if k not in names}

both,bad_loads = (True,False),{}  # kind → what spoils a state dict, the error, and for which `strict`
bad_loads['float_mask'] = lambda s: {**s, '4.1.weight_mask':s['4.1.weight_mask'].float()*.5}, '4.1.weight_mask .* float32.* must be one of bool', both
bad_loads['nan_mask'] = lambda s: {**s, '3.weight_mask':torch.full((6,8), torch.nan)}, '3.weight_mask .* must be one of bool', both
bad_loads['packed'] = lambda s: {**s, '3.weight_mask':mask_to_bits(s['3.weight_mask'])}, 'of uint8.*load_sparse', both
bad_loads['no_mask'] = lambda s: {**without('4.1.weight_mask','4.1.weight_sparsity')(s),
    '4.1.weight':torch.ones(2,6)}, '4.1.weight comes without its mask.*6 of its values.*prune_magnitude.*rewind', both
bad_loads['other_model'] = lambda s: mlp().state_dict(), 'weight comes without its mask', both

@pytest.mark.parametrize('strict', [True,False])
@pytest.mark.parametrize('kind', bad_loads)
def test_a_refused_load_leaves_the_model_as_it_was(kind, strict):
    "Law 10, bit for bit: what lies before the error in the file isn't written, extra state neither"
    spoil,message,refused = bad_loads[kind]
    if strict not in refused: return
    model,other = loadable(0),loadable(1)
    other[2].n = 7
    before,held = state_of_all(model),[id(p) for p in model.parameters()]
    state = spoil(other.state_dict())
    for assign in (False,True):
        with pytest.raises((RuntimeError,ValueError), match=message): model.load_state_dict(state, strict=strict, assign=assign)
        assert agree(before, state_of_all(model)) and model[2].n==0 and held==[id(p) for p in model.parameters()]

by_torch = dict(shape=lambda s: {**s, '4.1.bias':torch.zeros(3)}, mask_shape=lambda s: {**s, '3.weight_mask':torch.ones(3,3).bool()},
    missing=without('4.1.bias'), unexpected=lambda s: {**s, '4.2.bias':torch.zeros(2)}, no_tensor=lambda s: {**s, '4.1.bias':[1.,2.]},
    no_values=lambda s: {**s, '4.1.bias':torch.zeros(2, device='meta')})

@pytest.mark.parametrize('kind', by_torch)
def test_a_load_that_torch_refuses_leaves_dead_weights_at_zero(kind):
    "Law 10: with torch's own error, and what torch leaves, under masks"
    model = loadable(0)
    with pytest.raises(RuntimeError, match=r'Error\(s\) in loading state_dict'): model.load_state_dict(by_torch[kind](loadable(1).state_dict()))
    assert_dead(model)

def test_a_script_of_a_sparse_model_names_the_way_out():
    "torch.jit.script compiles no hooks"
    with pytest.raises(Exception, match=r'script plain_copy\(model\)'): torch.jit.script(loadable())

def test_good_loads_pass():
    "With masks, with other names, with assign=True, unstrict, into a part, of a copy, behind a wrapper"
    other = loadable(1)
    other[2].n = 7
    state = other.state_dict()
    old = {k.replace('.new.', '.old.'):v for k,v in state.items()}
    x = torch.randn(4,6)
    other.eval()
    for make in (loadable, lambda: copy.deepcopy(loadable()), lambda: pickle.loads(pickle.dumps(loadable()))):
        for given,kw in ((state,{}), (old,{}), (state,dict(assign=True)), ({**state, 'more':torch.ones(1)},dict(strict=False))):
            model = make().eval()
            model.load_state_dict(given, **kw)
            assert torch.equal(model(x), other(x)) and model[2].n==7
    wrapped = nn.Sequential(nn.Linear(6,6), loadable())
    wrapped.load_state_dict({**wrapped.state_dict(), **{f'1.{k}':v for k,v in state.items()}})
    assert torch.equal(wrapped[1].eval()(x), other(x))

def test_a_part_checks_its_own_load():
    "A module inside a sparsified model refuses as the whole does, and a wrapper's load reaches the model's own check"
    model = loadable()
    part,before = model[4],state_of_all(model)
    dense = nn.Linear(6,2)
    state = {**part.state_dict(), '1.bias':torch.zeros(5)}
    with pytest.raises(RuntimeError, match='size mismatch for 1.bias'): part.load_state_dict(state)
    with pytest.raises(ValueError, match='weight comes without its mask'): part[1].load_state_dict(dense.state_dict(), strict=False)
    wrapped = nn.ModuleDict(dict(module=model))
    with pytest.raises(ValueError, match='module.4.1.weight comes without its mask'): wrapped.load_state_dict({f'module.4.1.{k}':v for k,v in dense.state_dict().items()}, strict=False)
    assert agree(before, state_of_all(model))

def test_zeros_need_no_mask():
    "Weights that obey the masks are loaded without them, and so is a file that leaves weights out"
    model = loadable()
    w = torch.randn(2,6)*model[4][1].weight_mask
    model.load_state_dict({'4.1.weight':w, '4.1.bias':torch.ones(2)}, strict=False)
    assert torch.equal(model[4][1].weight, w)
    model.load_state_dict({'4.1.bias':torch.zeros(2)}, strict=False)
    assert torch.equal(model[4][1].weight, w) and not model[4][1].bias.any()

def test_rewind_keeps_masks_on_purpose():
    "It is the way that the refusal names"
    model = mlp()
    dense = copy.deepcopy(model.state_dict())
    sparsify_model(model, .5, seed=0)
    with torch.no_grad():
        for p in model.parameters(): p.mul_(2)
    rewind(model, dense)
    for o in masked_params(model): assert torch.equal(o.p, torch.where(o.mask, dense[o.name], 0.))

def test_after_enforcement_a_load_is_torchs_own():
    "`remove` and `unsparsify` leave no hook anywhere, also in a part that was taken out"
    for end in (lambda m,h: h.remove(), lambda m,h: unsparsify(m)):
        model = mlp()
        end(model, sparsify_model(model, .5, seed=0))
        kinds = '_load_state_dict_pre_hooks','_load_state_dict_post_hooks','_forward_pre_hooks','_state_dict_pre_hooks'
        assert not any(getattr(m, k) for m in model.modules() for k in kinds)
    model = loadable()
    part = model[4]
    unsparsify(part)
    assert not any(m._load_state_dict_pre_hooks for m in part.modules()) and model[0]._load_state_dict_pre_hooks

def test_compiled_step():
    "`torch.compile` of an optimizer's step doesn't stumble over handlers"
    m = mlp()
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    step = torch.compile(lambda: opt.step(), backend='eager')
    for _ in range(3):
        opt.zero_grad()
        m(torch.randn(4, next(m.parameters()).shape[1])).square().sum().backward()
        step()
        assert_dead(m, opt)

# --- weights that are computed from others, after they were made sparse

def _no_longer(m):
    "The way out of torch's pruning, whose mask took the place of ours"
    prune.remove(m.body[2], 'weight')
    sparsify_parameter(m, 'body.2.weight', 0, mask_init='zeros')

off = lambda m: nn.utils.parametrize.remove_parametrizations(m.body[2], 'weight')
computed = {}  # what puts it on, the error, and the way out that the error names
computed['weight_norm'] = parametrizations.weight_norm, 'is parametrized.*remove_parametrizations', off
computed['spectral_norm'] = parametrizations.spectral_norm, 'is parametrized.*remove_parametrizations', off
computed['orthogonal'] = parametrizations.orthogonal, 'is parametrized.*remove_parametrizations', off
computed['of_ones_own'] = lambda l: nn.utils.parametrize.register_parametrization(l, 'weight', nn.Identity()), 'is parametrized.*remove_parametrizations', off
computed['old_weight_norm'] = nn.utils.weight_norm, 'has a weight norm.*remove_weight_norm', lambda m: nn.utils.remove_weight_norm(m.body[2])
computed['old_spectral_norm'] = nn.utils.spectral_norm, 'has a spectral norm.*remove_spectral_norm', lambda m: nn.utils.remove_spectral_norm(m.body[2])
computed['pruned'] = lambda l: prune.l1_unstructured(l, 'weight', .3), r'is pruned.*prune\.remove.*sparsify_parameter', _no_longer
computed['pruned_rows'] = lambda l: prune.ln_structured(l, 'weight', .3, 2, 0), r'is pruned.*prune\.remove.*sparsify_parameter', _no_longer

def _engine(m): DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 40, **RigL_presets(batches_per_update=4), seed=0)
def _step(used, opt='sgd'):
    def _f(m, copied=lambda m: m):
        m = copied(m)
        opt_f = optimizers[opt](list(m.parameters()))
        used_by[used](m)
        opt_f.step()
    return _f

noticed_by = dict(forward=lambda m: m(torch.randn(4, 3, 6)), evaluation=lambda m: m.eval()(torch.randn(4, 3, 6)),
    state=lambda m: m.state_dict(), engine=_engine, fit_sparse=lambda m: fit_sparse_on(m), parts=_step('parts'), method=_step('method'),
    fastai=_step('method', 'fastai_adam'))

def fit_sparse_on(m):
    x = torch.randn(16, 3, 6)
    dls = DataLoaders(DataLoader(list(zip(x, x)), bs=4), DataLoader(list(zip(x, x)), bs=4))
    Learner(dls, m, loss_func=nn.MSELoss(), cbs=DynamicSparseTrainingCallback(**SET_presets)).fit(1)

@pytest.mark.parametrize('noticed', noticed_by)
@pytest.mark.parametrize('kind', computed)
@pytest.mark.filterwarnings('ignore')
def test_a_weight_that_is_computed_after_it_was_made_sparse_is_refused(kind, noticed):
    "Law 10: by name, with the way out, at the first use, whichever it is; after the way out the model trains sparse, and nothing was written"
    put_on,error,take_off = computed[kind]
    m = tasks()
    mask = m.body[2].weight_mask.clone()
    put_on(m.body[2])
    with pytest.raises(ValueError, match=rf'(?s)body\.2\.weight.*{error}.*unsparsify'): noticed_by[noticed](m)
    take_off(m)
    if not kind.startswith('pruned'): assert m.body[2].weight_mask.equal(mask)
    m.train()
    m.zero_grad()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    m(torch.randn(4, 3, 6))
    stays_dead(m, opt, 3, used_by['method'])

@pytest.mark.parametrize('copied', ['deepcopy','average'])
@pytest.mark.parametrize('kind', computed)
@pytest.mark.filterwarnings('ignore')
def test_a_computed_weight_is_refused_in_copies(kind, copied):
    "Where the model can be copied at all, and also where the optimizer was made before"
    m = tasks()
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    computed[kind][0](m.body[2])
    with pytest.raises(ValueError, match='body.2.weight'):
        used_by['parts'](m)
        opt.step()
    m.zero_grad()
    try: c = copied_by[copied](m)
    except RuntimeError: return  # torch itself copies no such model
    for use in (noticed_by['forward'], noticed_by['parts'], _engine):
        with pytest.raises(ValueError, match='body.2.weight'): use(c)

@pytest.mark.parametrize('kind', computed)
@pytest.mark.filterwarnings('ignore')
def test_unsparsify_frees_a_computed_weight(kind):
    "The other way out: the model trains as torch has it, in whatever way it is used, and no buffer of ours is left"
    m = Tasks()
    plain = set(m.state_dict())
    sparsify_model(m, .6, seed=0)
    computed[kind][0](m.body[2])
    unsparsify(m)
    for used in ('forward','method'):
        used_by[used](m)
        torch.optim.SGD(m.parameters(), lr=.1).step()
    assert not any('_sparsity' in k for k in m.state_dict())

def test_lora_on_a_sparse_layer_leaves_it_sparse():
    "peft freezes the base and calls none of its hooks: masks and zeros stay bit for bit, also in the copies that `modules_to_save` trains; the engine says that nothing can move"
    peft = pytest.importorskip('peft')
    for kw in (dict(target_modules=['body.2','head'], r=2), dict(target_modules=['body.2'], r=2, use_dora=True),
        dict(target_modules=['body.2'], r=2, modules_to_save=['body.0'])):
        m = tasks()
        base = m.body[2].weight.detach().clone()
        p = peft.get_peft_model(m, peft.LoraConfig(**kw))
        opt = torch.optim.AdamW([o for o in p.parameters() if o.requires_grad], lr=.01, weight_decay=.1)
        for _ in range(3):
            opt.zero_grad()
            p(torch.randn(4, 3, 6)).square().mean().backward()
            opt.step()
            assert_dead(p)
        assert torch.equal(m.body[2].base_layer.weight, base) and m.body[2].base_layer.weight_mask.sum()==26
        if 'modules_to_save' in kw: assert not torch.equal(m.body[0].modules_to_save['default'].weight, m.body[0].original_module.weight)
        with pytest.warns(UserWarning, match='is frozen'):
            DynamicSparseTraining(p, torch.optim.SGD(p.parameters(), lr=.1), 40, **SET_presets(batches_per_update=4), sparse_modules=m.body[2], seed=0)

def test_another_optimizer_is_no_business_of_a_computed_weight():
    "A model that isn't trained may be parametrized while another one trains"
    a,b = Tasks(),mlp()
    sparsify_model(a, .6, seed=0), sparsify_model(b, .5, seed=0)
    parametrizations.weight_norm(a.body[2])
    opt = torch.optim.SGD(b.parameters(), lr=.1)
    train(b, opt, 2, *data(b))
    assert_dead(b, opt)

# --- layers that were replaced by others

class _Quantised(nn.Linear):
    "A layer that takes over the weight, as quantisation aware training does it"
    def __init__(self, lin):
        super().__init__(lin.in_features, lin.out_features)
        self.weight,self.bias = lin.weight,lin.bias

@pytest.mark.parametrize('copied', ['original','deepcopy','pickle'])
def test_a_layer_that_is_replaced_by_a_dense_one_is_told(copied):
    "Once, by name; a layer that is cut off, or wrapped with its mask, is no such case"
    def told(change):
        m = tasks()
        m(torch.randn(4, 3, 6))
        m = copied_by[copied](m)
        change(m)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            for _ in range(3): m.body(torch.randn(4, 6)), m(torch.randn(4, 3, 6))
        return [str(w.message) for w in seen]
    for new in (lambda lin: nn.Linear(8, 8), _Quantised):
        text, = told(lambda m: m.body.__setitem__(2, new(m.body[2])))
        assert text.startswith('body.2.weight was sparse') and 'sparsify_parameter' in text
    assert not told(lambda m: None)
    assert not told(lambda m: m.body.__setitem__(2, nn.Identity()))
    assert not told(lambda m: m.body.__setitem__(2, nn.Sequential(m.body[2])))
    assert not told(lambda m: (unsparsify_parameter(m, 'body.2.weight'), m.body.__setitem__(2, nn.Linear(8, 8))))

def test_a_tie_between_two_masks_is_refused():
    "Two masks on one tensor would leave their intersection, fewer weights than either says; one of them has to go, and then all is well"
    m = nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16))
    sparsify_model(m, .8, seed=0)
    before,n = m[0].weight.detach().clone(),int(m[0].weight_mask.sum())
    for _ in range(2):
        with pytest.raises(ValueError, match='the weight of a Linear was tied.*another mask.*unsparsify_parameter'): m[2].weight = m[0].weight
        assert torch.equal(before, m[0].weight) and m[2].weight is not m[0].weight
    unsparsify_parameter(m, '2.weight')
    m[2].weight = m[0].weight
    opt = torch.optim.Adam(m.parameters())
    for _ in range(3):
        opt.zero_grad()
        m(torch.randn(8,16)).square().sum().backward()
        opt.step()
    assert int((m[2].weight!=0).sum())==int((m[0].weight!=0).sum())==n
    assert all(t[~m[0].weight_mask].max()<=1.2e-30 for t in opt.state_dict()['state'][0].values() if t.shape==before.shape)
    same = nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16))
    same[2].weight = same[0].weight
    sparsify_model(same, .8, seed=0)
    same(torch.randn(2,16))

class Ranks:
    "Stands for `torch.distributed`: two ranks, of which the other has these checksums, and sends ones"
    def __init__(self, other): self.other,self.sent = other,[]
    def get_world_size(self, group=None): return 2
    def all_gather_object(self, found, mine, group=None): found[:] = [mine, {**mine, **self.other}]
    def broadcast(self, box, root, group=None): self.sent.append((box.fill_(1), root))

def test_only_masks_that_differ_on_a_rank_are_sent(monkeypatch):
    "With the values under them; names come back"
    m = mlp((8,12,4))
    sparsify_model(m, .5, seed=0)
    for other,names in (({}, []), ({'2.weight':0}, ['2.weight'])):
        ranks = Ranks(other)
        monkeypatch.setattr('fastsparse.weights.hooks.dist', ranks)
        assert share_masks(m)==names and len(ranks.sent)==2*len(names)
    assert m[2].weight_mask.all() and m[2].weight.eq(1).all() and m[0].weight_mask.float().mean()==.5

def test_an_engine_that_moves_one_of_the_weights_is_refused_inside_join():
    "Ranks that end early would keep old masks of that one"
    m = mlp((8,12,4))
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = SparseEngine(m, opt, 10, sparse_modules=[m[2]], method='rigl', batches_per_update=2)
    hook = mask_hooks(m)[0]
    ddp = SimpleNamespace(_join_config=SimpleNamespace(enable=True, throw_on_early_termination=False))
    with pytest.raises(ValueError, match='inside Join'): hook.share(m, ddp)
    dst.remove()
    assert not any(weight.tally for weight in hook.weights)
