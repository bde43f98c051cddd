"Keeping dead weights dead: what is hooked when, and how a weight that is stored in another way takes part"
import copy, io, pickle, pytest, subprocess, sys, torch, torch.nn.utils.prune as prune, warnings
from fastai.basics import DataLoader,DataLoaders,Learner
from fastai.optimizer import Adam,Lamb,OptimWrapper,ranger,SGD
from fastsparse.all import *
from fastsparse.prune.tickets import rewind
from fastsparse.model.sparsify import unsparsify_parameter
from fastsparse.weights.weight import MaskHandler,handler_of,masked_params,set_handler
from fastsparse.weights.hooks import enforce_masks,mask_hooks
from fastsparse.weights.optimizers import state_tensors
from fastsparse.core.optimizers import base_opt
from functools import partial
from helpers import *
from torch import nn

def _run(code):
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert res.returncode==0 and not res.stderr, res.stderr

def _room(code): _run("import sys\n"+code)

def test_rooms_load_no_fastai():
    "The rooms from masks to the engine load neither fastai, nor torch._dynamo, nor pandas, and hook nothing"
    _room("""
import fastsparse.train.engine
from torch.optim import optimizer
assert not [m for m in sys.modules if m.split('.')[0] in ('fastai','pandas') or m.startswith('torch._dynamo')]
assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
""")

def test_listening_begins_with_the_first_weight_and_ends_with_the_last():
    "torch's optimizers have global hooks, fastai's a wrapped step, and both wrapped reads of their state, as long as a weight is guarded; fastai may come later"
    _room("""
import gc,torch
from fastsparse.model.sparsify import sparsify_model
from fastsparse.weights.weight import *
from torch import nn
from torch.optim import optimizer
def n(): return len(optimizer._global_optimizer_pre_hooks)+len(optimizer._global_optimizer_post_hooks)
m,m2,shows = nn.Linear(8,8),nn.Linear(8,8),torch.optim.Optimizer.state_dict
hooks,hooks2 = sparsify_model(m, .5),sparsify_model(m2, .5)
assert n()==2
from fastai import optimizer as fo
def methods(): return [vars(cls).get(name) for cls in (fo.Optimizer,fo.Lookahead) for name in ('step','state_dict','__reduce_ex__')]
was = methods()
opt = fo.SGD([m.weight], lr=.1, mom=.9)
for _ in range(3):
    m(torch.randn(4,8)).sum().backward()
    if _==0: assert fo.Optimizer.step is not was[0] and torch.optim.Optimizer.state_dict is not shows
    opt.step()
    assert not m.weight[~m.weight_mask].any()
hooks.remove()
assert n()==2 and fo.Lookahead.step is not was[3]
del m2,hooks2
gc.collect()
assert n()==0 and methods()==was and torch.optim.Optimizer.state_dict is shows and '__reduce_ex__' not in vars(torch.optim.Optimizer)
""")

# --- second moments, whose square roots are slow where they are zero

second_moments = dict(Adam=partial(torch.optim.Adam, lr=.01), foreach=partial(torch.optim.AdamW, lr=.01, foreach=True),
    amsgrad=partial(torch.optim.Adam, lr=.01, amsgrad=True), RMSprop=partial(torch.optim.RMSprop, lr=.01, alpha=.8, centered=True),
    Adagrad=partial(torch.optim.Adagrad, lr=.01), fastai=partial(Adam, lr=.01), ranger=partial(ranger, lr=.01),
    wrapped=partial(OptimWrapper, opt=torch.optim.Adam, lr=.01), lamb=partial(Lamb, lr=.01))
under_root = 'sqr_avg','exp_avg_sq','max_exp_avg_sq','square_avg','sum'

def adapted(opt, n=70, dtype=torch.float, seed=0):
    "A sparse perceptron that `opt` has trained for `n` steps with RigL, the optimizer, and its hooks"
    m = mlp(dtype=dtype)
    hooks = sparsify_model(m, .6, seed=0)
    opt = second_moments[opt](list(m.parameters()))
    engine = SparseEngine(m, opt, 1000, **{**RigL_presets, 'batches_per_update':9}, seed=0)
    xb,yb = data(m)
    for t in range(n):
        engine.prepare(t)
        opt.zero_grad()
        backward(m, xb, yb)
        if not engine.before_step(t): opt.step()
    assert engine.n_updates>=n//10
    engine.remove()
    return m,opt,hooks

def dead_seconds(m, opt):
    "What `opt` holds under roots where weights of `m` are dead, as it lies there"
    return [t[~o.mask] for o in masked_params(m) for k,t in base_opt(opt).state[o.p].items() if k in under_root]

def read_by(how, opt):
    "The state of each parameter of `opt`, in their order, as `how` gives it"
    if how=='state_dict':
        states = opt.state_dict()['state']
        return list(states.values()) if isinstance(states, dict) else states
    return list((copy.deepcopy if how=='deepcopy' else lambda o: pickle.loads(pickle.dumps(o)))(base_opt(opt)).state.values())

@pytest.mark.parametrize('name', second_moments)
def test_zeros_under_a_root_are_shown_as_zeros(name):
    "While training they may be tiny, also many steps later; saved, copied, read by parts of a method, or without masks, they are zero"
    m,opt,hooks = adapted(name)
    normal,tiny = torch.finfo(torch.float).tiny,2e-30
    keep_dense_grad = dead_seconds(m, opt)
    if torch.backends.mkl.is_available(): assert keep_dense_grad and all(((normal<=t) & (t<tiny)).all() for t in keep_dense_grad)
    places = [i for i,p in enumerate(m.parameters()) if p.ndim>1]
    for how in ('state_dict','deepcopy','pickle'):
        states = read_by(how, opt)
        for i,o in zip(places, masked_params(m)): assert all(is_positive_zero(t[~o.mask]) for k,t in states[i].items() if k in under_root)
        for t in dead_seconds(m, opt): assert is_positive_zero(t)
        backward(m, *data(m))
        opt.step()
        if torch.backends.mkl.is_available(): assert all((t>0).any() for t in dead_seconds(m, opt))
    assert_dead(m, opt)
    backward(m, *data(m))
    opt.step()
    hooks.remove()
    for t in dead_seconds(m, opt): assert is_positive_zero(t)

@pytest.mark.parametrize('dtype', [torch.float, torch.double])
@pytest.mark.parametrize('name', second_moments)
def test_what_stands_in_for_zero_changes_nothing(name, dtype, monkeypatch):
    "Weights, masks and all that is saved are the same, bit for bit, as with zeros at each step"
    def trained():
        m,opt,_ = adapted(name, dtype=dtype)
        return [*m.state_dict().values(), *(t for p in m.parameters() for t in state_tensors(opt, p))]
    ours = trained()
    monkeypatch.setattr('fastsparse.weights.weight.lift_dead', lambda *args: None)
    for a,b in zip(ours, trained(), strict=True): assert torch.equal(a, b)

def test_half_precision_and_what_keeps_nothing_zero_stay_as_they_are():
    "Roots of halves are quick; an optimizer that nobody knows is masked after each step"
    for dtype,opt in ((torch.bfloat16,torch.optim.Adam), (torch.float,type('Own', (torch.optim.Adam,), {}))):
        m = mlp(dtype=dtype)
        sparsify_model(m, .5, seed=0)
        opt = opt(m.parameters(), lr=.01)
        backward(m, *data(m))
        opt.step()
        for t in dead_seconds(m, opt): assert is_positive_zero(t)

def test_one_hook_however_many_parameters():
    "48 parameters made sparse one by one have one hook on the root; each handle frees its own parameter"
    m = nn.Sequential(*[nn.Linear(4,4) for _ in range(48)])
    hooks = [sparsify_parameter(m, f'{i}.weight', .5, seed=i) for i in range(48)]
    assert len(m._forward_pre_hooks)==1 and len(mask_hooks(m))==1
    hooks[0].remove()
    with torch.no_grad():
        for p in m.parameters(): p.fill_(1.)
    m(torch.ones(2,4))
    assert m[0].weight.all() and [int(l.weight.count_nonzero()) for l in m[1:]]==[8]*47
    for h in hooks: h.remove()
    assert not m._forward_pre_hooks and not m._load_state_dict_post_hooks

def test_load_is_followed_by_a_look():
    "A model that was compiled runs no hook before its forward: dead weights are zero as soon as dense ones were loaded"
    m = mlp()
    dense = copy.deepcopy(m.state_dict())
    sparsify_model(m, .5, seed=0)
    m.load_state_dict({**m.state_dict(), **dense})
    assert_dead(m)
    c = pickle.loads(pickle.dumps(copy.deepcopy(m)))
    c.load_state_dict({**c.state_dict(), **dense})
    assert_dead(c)

# --- loads

def state_of(model): return {k:v.clone() for k,v in model.state_dict().items()}

def same_state(a, b): return a.keys()==b.keys() and all(a[k].dtype==b[k].dtype and torch.equal(a[k], b[k]) for k in a)

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
    sparsify_model(model, sparsity, seed=seed)
    return model

def without(*names): return lambda state: {k:v for k,v in state.items() if k not in names}

both,bad_loads = (True,False),{}  # kind → what spoils a state dict, the error, and for which `strict`
bad_loads['shape'] = lambda s: {**s, '4.1.bias':torch.zeros(3)}, 'size mismatch for 4.1.bias', both
bad_loads['mask_shape'] = lambda s: {**s, '3.weight_mask':torch.ones(3,3).bool()}, 'size mismatch for 3.weight_mask', both
bad_loads['missing'] = without('4.1.bias'), 'Missing.*4.1.bias', (True,)
bad_loads['unexpected'] = lambda s: {**s, '4.2.bias':torch.zeros(2)}, 'Unexpected.*4.2.bias', (True,)
bad_loads['no_tensor'] = lambda s: {**s, '4.1.bias':[1.,2.]}, "parameter named .4.1.bias", both
bad_loads['no_values'] = lambda s: {**s, '4.1.bias':torch.zeros(2, device='meta')}, 'no values', both
bad_loads['float_mask'] = lambda s: {**s, '4.1.weight_mask':s['4.1.weight_mask'].float()*.5}, '4.1.weight_mask .* float32.* must be one of bool', both
bad_loads['nan_mask'] = lambda s: {**s, '3.weight_mask':torch.full((6,8), torch.nan)}, '3.weight_mask .* must be one of bool', both
bad_loads['packed'] = pack_masks, 'of uint8.*unpack_masks', both
bad_loads['no_mask'] = lambda s: {**without('4.1.weight_mask','4.1.weight_sparsity')(s), '4.1.weight':torch.ones(2,6)}, '4.1.weight comes without its mask.*6 of its values.*prune_magnitude.*rewind', both
bad_loads['other_model'] = lambda s: mlp().state_dict(), 'Missing|Unexpected|size mismatch|0.weight comes without', both

@pytest.mark.parametrize('strict', [True,False])
@pytest.mark.parametrize('kind', bad_loads)
def test_a_refused_load_leaves_the_model_as_it_was(kind, strict):
    "Law 10, bit for bit: what lies before the error in the file isn't written, extra state neither"
    spoil,message,refused = bad_loads[kind]
    if strict not in refused: return
    model,other = loadable(0),loadable(1)
    other[2].n = 7
    before = state_of_all(model)
    state = spoil(other.state_dict())
    with pytest.raises((RuntimeError,ValueError), match=message): model.load_state_dict(state, strict=strict)
    assert same_state(before, state_of_all(model)) and model[2].n==0

def state_of_all(model): return {k:v.clone() for k,v in (*model.named_parameters(), *model.named_buffers())}

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
    assert same_state(before, state_of_all(model))

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

def test_a_load_copies_no_model():
    "What a refused load takes beside the model is less than a tenth of it"
    model = nn.Sequential(*[nn.Linear(256,256) for _ in range(20)])
    sparsify_model(model, .5, seed=0)
    state = {**model.state_dict(), '19.bias':torch.zeros(3)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        with pytest.raises(RuntimeError): model.load_state_dict(state)
    assert sum(max(e.cpu_memory_usage, 0) for e in prof.events())<.1*sum(p.nbytes for p in model.parameters())

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

# --- averages

from torch.optim.swa_utils import AveragedModel,get_ema_avg_fn,get_ema_multi_avg_fn

def timm_ema(name, **kwargs):
    make = getattr(pytest.importorskip('timm.utils'), name)
    return lambda m: make(m, decay=.9, **kwargs)

averages = dict(weights=AveragedModel, ema=lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(.9)))
averages |= dict(buffers=lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(.9), use_buffers=True))
averages |= dict(one_by_one=lambda m: AveragedModel(m, avg_fn=get_ema_avg_fn(.9), use_buffers=True))
averages |= dict(timm1=lambda m: timm_ema('ModelEma')(m), timm2=lambda m: timm_ema('ModelEmaV2')(m), timm3=lambda m: timm_ema('ModelEmaV3')(m))
averages |= dict(timm3_without=lambda m: timm_ema('ModelEmaV3', exclude_buffers=True)(m))
first_uses = dict(forward=lambda m: m(torch.ones(2,6)), summary=sparse_summary, state=lambda m: m.state_dict(), export=plain_copy, source=lambda m: None)

def averaged_over_updates(make, n=25):
    "A model whose topology moved, its average, and the module in it"
    m = mlp((6,32,10))
    sparsify_model(m, .8, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    DynamicSparseTraining(m, opt, 40, **RigL_presets(batches_per_update=4, stop_pct=1.), seed=0)
    average,g = make(m),torch.Generator().manual_seed(0)
    for _ in range(n):
        opt.zero_grad()
        m(torch.randn(8, 6, generator=g)).square().mean().backward()
        opt.step()
        average.update_parameters(m) if hasattr(average, 'update_parameters') else average.update(m)
    return m,average,getattr(average, 'module', None) or average.ema

@pytest.mark.parametrize('use', first_uses)
@pytest.mark.parametrize('kind', averages)
def test_averages_have_the_masks_of_their_source(kind, use):
    "Masks aren't averaged: after the first use of an average, or a forward of its source, they are the source's, and so is the sparsity; dead weights are zero, live ones averaged"
    m,average,inside = averaged_over_updates(averages[kind])
    if use=='source': m(torch.ones(2,6)), inside(torch.ones(2,6))
    else: first_uses[use](average if isinstance(average, nn.Module) and use!='export' else inside)
    inside(torch.ones(2,6))
    mine,theirs = masked_params(inside),masked_params(m)
    assert [int(o.mask.sum()) for o in mine]==[round(.2*o.p.numel()) for o in mine] and same_masks([o.mask for o in mine], [o.mask for o in theirs])
    assert_dead(inside)
    assert [s for *_,s in sparse_params(inside)]==[s for *_,s in sparse_params(m)] and not torch.equal(mine[0].p, theirs[0].p)

@pytest.mark.parametrize('way', [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['itself','copied','pickled'])
@pytest.mark.parametrize('kind', averages)
def test_parts_of_an_average_are_sparse_before_its_first_forward(kind, way):
    "A method of its own, or a part alone, may be all that is ever called"
    m,average,inside = averaged_over_updates(averages[kind])
    inside = way(inside)
    for part in inside: part(torch.ones(2, part.in_features) if isinstance(part, nn.Linear) else torch.ones(2, 2))
    assert_dead(inside)
    assert same_masks(masks_of(inside), masks_of(m))

@pytest.mark.parametrize('kind', ['weights','ema','timm3'])
def test_averages_of_parts_and_of_averages_are_sparse(kind):
    "An average of one layer, a copy of an average and an average of one, whichever way they are first used"
    def updated(average, m): average.update_parameters(m) if hasattr(average, 'update_parameters') else average.update(m)
    m,make = mlp((6,32,10)),averages[kind]
    sparsify_model(m, .8, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    DynamicSparseTraining(m, opt, 40, **RigL_presets(batches_per_update=4, stop_pct=1.), seed=0)
    whole,part,g = make(m),make(m[0]),torch.Generator().manual_seed(0)
    copied,again = copy.deepcopy(whole),make(getattr(whole, 'module', whole))
    for _ in range(25):
        opt.zero_grad()
        m(torch.randn(8, 6, generator=g)).square().mean().backward()
        opt.step()
        updated(part, m[0]), [updated(o, m) for o in (whole, copied)], updated(again, getattr(whole, 'module', whole))
    for average in (part, copied, again):
        inside = getattr(average, 'module', average)
        for c in (copy.deepcopy(average), pickle.loads(pickle.dumps(inside))): assert_dead_in_state(c.state_dict(), 'a copy')
        layer = inside if isinstance(inside, nn.Linear) else inside[0]
        layer(torch.ones(2,6))
        assert_dead(layer)
        assert_dead_in_state(average.state_dict(), 'itself')

def assert_dead_in_state(state, of):
    for k in (k for k in state if k.endswith('_mask')): assert is_positive_zero(state[k.removesuffix('_mask')][~state[k]]), of

def test_saved_averages_are_sparse(tmp_path):
    "Their state loads into a model of the same masks, and their file is the source's but for the values"
    m,average,inside = averaged_over_updates(averages['buffers'])
    torch.save(average.state_dict(), tmp_path/'a')
    state = {k.removeprefix('module.'):v for k,v in torch.load(tmp_path/'a').items() if k.startswith('module.')}
    assert all(is_positive_zero(state[o.name][~o.mask]) and torch.equal(state[f'{o.name}_mask'], o.mask) for o in masked_params(m))

def test_an_average_whose_source_is_gone_is_refused():
    "Nobody knows its masks then; the error names the way out"
    m,average,inside = averaged_over_updates(averages['buffers'])
    m = None
    import gc
    gc.collect()
    with pytest.raises(ValueError, match='0.weight_mask was averaged.*use_buffers=False'): average(torch.ones(2,6))

def test_copies_are_their_own():
    "What is done to a copy on purpose stays: loads, masks set by hand, a sparsity that is asked for, training of its own"
    def check(change):
        m = mlp((6,32,10))
        sparsify_model(m, .8, seed=0)
        c = copy.deepcopy(m)
        want = change(c) or masks_of(c)
        m(torch.ones(2,6)), c(torch.ones(2,6)), c.state_dict(), sparse_summary(c)
        assert same_masks(masks_of(c), want) and not same_masks(want, masks_of(m))
    other = mlp((6,32,10))
    sparsify_model(other, .5, seed=1)
    check(lambda c: c.load_state_dict(other.state_dict()) and None)
    def by_hand(c):
        for o in masked_params(c): o.mask.copy_(dict((a.name,a.mask) for a in masked_params(other))[o.name])
    check(by_hand)
    def asked(c):
        by_hand(c)
        for *_,o in [(o,) for o in masked_params(c)]: o.module._buffers['weight_sparsity'].fill_(.9)
    check(asked)
    def trained(c):
        opt = torch.optim.SGD(c.parameters(), lr=.1)
        DynamicSparseTraining(c, opt, 40, **RigL_presets(batches_per_update=2), seed=0)
        for _ in range(9):
            opt.zero_grad()
            c(torch.randn(8,6)).square().mean().backward()
            opt.step()
    check(trained)

class _LiveOnly(nn.Module):
    "A linear layer whose Parameter is the same object, with live values only"
    def __init__(self, lin):
        super().__init__()
        mask = lin.weight_mask
        lin.weight.data = lin.weight.data[mask]
        self.weight = lin.weight
        self.register_buffer('weight_mask', mask)
    def handler_for(self, attr): return _LiveGuard(self, attr)

class _LiveGuard(MaskHandler):
    locked_reason = 'is stored sparse'
    def __init__(self, module, attr):
        self.module,self.attr,self.p = module,attr,module._parameters[attr]
        set_handler(self.p, self)
    def check(self): pass
    def remove(self): set_handler(self.p)

def test_a_module_may_store_its_weight_in_its_own_way():
    "`handler_for` of a module gives its handler; masks are listed with the dense shape, copies find theirs, and masks can't be taken off"
    lin = nn.Linear(8,4)
    sparsify_model(lin, .75, seed=0).remove()
    p = lin.weight
    m = nn.Sequential(_LiveOnly(lin))
    for c in (m, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        o, = masked_params(c)
        assert o.shape==(4,8) and o.p.shape==(8,)
        hooks = enforce_masks(c)
        assert type(handler_of(c[0].weight)) is _LiveGuard
        with pytest.raises(ValueError, match='0.weight is stored sparse'): unsparsify(c)
        hooks.remove()
        assert handler_of(c[0].weight) is None
    assert m[0].weight is p

def one_handler():
    m = nn.Linear(6, 5)
    held = sparsify_model(m, .5, seed=0)
    m(torch.randn(1, 6))
    return m,held,handler_of(m.weight)

def test_what_moves_starts_at_zero_with_its_state():
    "After a move weights, momentum and slow weights are zero at all that went and came, and as they were elsewhere"
    m,held,g = one_handler()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    m(torch.randn(3, 6)).sum().backward()
    opt.step()
    was,buf = m.weight.detach().clone(),opt.state[m.weight]['momentum_buffer']
    buf.fill_(2.)
    gone,new = m.weight_mask.flatten().nonzero()[:2,0],(~m.weight_mask).flatten().nonzero()[:3,0]
    with torch.no_grad(): g.move(gone, new, opt)
    moved = torch.cat([gone, new])
    rest = torch.ones(30).bool().index_fill_(0, moved, False)
    for t,before in ((m.weight.detach(), was), (buf, torch.full_like(buf, 2.))):
        assert is_positive_zero(t.flatten()[moved]) and t.flatten()[rest].equal(before.flatten()[rest])

def test_what_is_around_a_step_ends_after_it():
    "A guard's `around` sees the optimizer before its step, and what it returns is called once, after the step"
    m,held,g = one_handler()
    opt,calls = torch.optim.SGD(m.parameters(), lr=1.),[]
    def around(o):
        calls.append(('before', o is opt, m.weight.detach().clone()))
        return lambda: calls.append(('after', m.weight.detach().clone()))
    g.around = around
    m(torch.ones(1, 6)).sum().backward()
    opt.step()
    assert [c[0] for c in calls]==['before','after'] and calls[0][1] and not calls[0][2].equal(calls[1][1])
    g.around = None
    opt.step()
    assert len(calls)==2

def test_what_enforces_says_so():
    m,held,g = one_handler()
    e = enforce_masks(m)
    assert repr(e)=='HookHandle(1 parameters)'
    e.remove()
    assert repr(e)=='HookHandle()'

def test_only_averaged_copies_get_their_source_s_masks():
    "A copy that was never written keeps its masks though its source has moved; one whose masks and weights were all averaged takes the source's"
    m = mlp()
    sparsify_model(m, .5, seed=0)
    m(torch.randn(1, 6))
    a,b = copy.deepcopy(m),copy.deepcopy(m)
    for o in masked_params(m): o.mask.copy_(o.mask.flip(0))
    kept = masks_of(a)
    a(torch.randn(1, 6))
    assert same_masks(masks_of(a), kept)
    with torch.no_grad():
        for x,y in zip((*b.parameters(), *b.buffers()), (*m.parameters(), *m.buffers())): x.copy_(y if x.dtype==torch.bool else (x+y)/2)
    b(torch.randn(1, 6))
    assert same_masks(masks_of(b), masks_of(m))

# --- copies, of a whole or of a part, which train without any forward of the whole

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
        return (nn.functional.linear(h, self.head.weight)+self.again(h)).square().mean()

def by_parts(m, x):
    h = m.body[2](m.body[1](m.body[0](x)))
    return (m.head(m.recur(m.attend(h, h, h)[0])[0])+m.again(h)).square().mean()

used_by = dict(forward=lambda m,x: m(x).square().mean(), parts=by_parts, method=lambda m,x: m.loss(x))

def as_file(legacy):
    def _f(m):
        f = io.BytesIO()
        torch.save(m, f, _use_new_zipfile_serialization=not legacy)
        f.seek(0)
        return torch.load(f, weights_only=False)
    return _f

def pickled(m): return pickle.loads(pickle.dumps(m))

ways_to_copy = dict(original=lambda m: m, deepcopy=copy.deepcopy, pickle=pickled, file=as_file(False), legacy_file=as_file(True),
    again=lambda m: copy.deepcopy(pickled(copy.deepcopy(m))),
    inside=lambda m: copy.deepcopy([nn.ModuleDict(dict(m=m)), m])[0]['m'], average=lambda m: AveragedModel(m).module, by_parts=lambda m: _of_parts(m))

def _of_parts(m):
    "Each part copied by itself, tied ones together"
    new = copy.copy(m)
    new._modules = dict(zip(m._modules, [copy.deepcopy(m.body), pickled(m.attend), as_file(False)(m.recur), *copy.deepcopy([m.head, m.again])]))
    return new

t = torch.optim
optimizers = dict(momentum=lambda ps: t.SGD(ps, lr=.1, momentum=.9), Adam=lambda ps: t.Adam(ps, lr=.01), AdamW=lambda ps: t.AdamW(ps, lr=.01, weight_decay=.1),
    Rprop=lambda ps: t.Rprop(ps, lr=.01), fastai_SGD=lambda ps: SGD(list(ps), lr=.1, mom=.9, wd=.1), fastai_Adam=lambda ps: Adam(list(ps), lr=.01, wd=.1))

def trains_sparse(m, opt, use, n=3):
    "Dead weights, their gradients and their state are zero in each of `n` steps, and live ones move"
    x,before = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)),[o.p.detach().clone() for o in masked_params(m)]
    assert all(int(o.p.count_nonzero())==int(o.mask.sum()) for o in masked_params(m))
    for _ in range(n):
        opt.zero_grad()
        use(m, x).backward()
        for o in masked_params(m): assert is_positive_zero(o.p.grad[~o.mask]), f'{o.name}: clipping would see the gradient of a dead weight'
        opt.step()
        assert_dead(m, opt)
    assert all((was!=o.p)[o.mask].any() for was,o in zip(before, masked_params(m)))

@pytest.mark.parametrize('opt', ['momentum','fastai_Adam'])
@pytest.mark.parametrize('used', used_by)
@pytest.mark.parametrize('copied', ways_to_copy)
def test_a_copy_is_as_sparse_as_the_original(copied, used, opt):
    "Whichever part of a copy is called: no forward of the whole is needed"
    m = Tasks()
    sparsify_model(m, .6, seed=0)
    c = ways_to_copy[copied](m)
    assert len(masked_params(c))==7 and same_masks(masks_of(m), masks_of(c))
    trains_sparse(c, optimizers[opt](c.parameters()), used_by[used])

@pytest.mark.parametrize('opt', optimizers)
def test_a_trained_copy_goes_on_sparse(opt):
    "After training, with its optimizer, through a method only"
    m = Tasks()
    sparsify_model(m, .6, seed=0)
    trains_sparse(m, optimizers[opt](m.parameters()), used_by['method'])
    for c in (copy.deepcopy(m), pickled(m)): trains_sparse(c, optimizers[opt](c.parameters()), used_by['method'])
    if opt.startswith('fastai'): return
    own = optimizers[opt](m.parameters())
    trains_sparse(m, own, used_by['parts'])
    c,opt = copy.deepcopy((m, own))
    trains_sparse(c, opt, used_by['parts'])

def test_a_copy_carries_enforcement_only_where_there_is_some():
    "A model whose hooks were removed has copies that train as they like; what is frozen in a copy is enforced once it trains"
    m = Tasks()
    hooks = sparsify_model(m, .6, seed=0)
    m.body.requires_grad_(False)
    c = copy.deepcopy(m)
    hooks.remove()
    d = pickled(m)
    train_by(d, 'method')
    assert all(o.p[~o.mask].any() for o in masked_params(d) if o.p.requires_grad)
    train_by(c, 'method')
    c.body.requires_grad_(True)
    train_by(c, 'method')
    assert_dead(c)
    dead = [(o.p, ~o.mask) for o in masked_params(c)]
    unsparsify(c)
    train_by(c, 'method')
    assert all(p[at].any() for p,at in dead)
    assert not any('_mask_handlers' in vars(o) for o in (*m.modules(), *c.modules(), *d.modules()))

def train_by(m, used):
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    for _ in range(2):
        opt.zero_grad()
        used_by[used](m, torch.randn(4, 3, 6)).backward()
        opt.step()

# --- others who change a layer, where no forward of the whole is made

def _assign(m): m.body.load_state_dict({k:torch.ones_like(v) if k.endswith('weight') else v for k,v in m.body.state_dict().items()}, assign=True)
def _new_parameter(m): m.body[0].weight = nn.Parameter(torch.ones(8, 6))
def _new_data(m): m.body[0].weight.data = torch.ones(8, 6)
def _new_mask(m): m.body[0].register_buffer('weight_mask', m.body[0].weight_mask.flip(0))
def _moved(m): m.double().float()
def _swapped(m): torch.utils.swap_tensors(m.body[0].weight, nn.Parameter(torch.ones(8, 6)))
def _shared(m): m.share_memory()
def _emptied(m):
    m.body[0].to_empty(device='cpu').reset_parameters()
    m.body[0].weight_mask.copy_(torch.rand(8, 6)<.4)
def _swapped_by_torch(m):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try: m.double().float()
    finally: torch.__future__.set_swap_module_params_on_conversion(False)

changes = dict(assign=_assign, parameter=_new_parameter, data=_new_data, mask=_new_mask, dtype=_moved,
    swap=_swapped, swap_by_torch=_swapped_by_torch, share=_shared, empty=_emptied)

@pytest.mark.parametrize('copied', ['original','deepcopy'])
@pytest.mark.parametrize('used', ['parts','method'])
@pytest.mark.parametrize('change', changes)
def test_changes_behind_the_guards_back_are_followed(change, used, copied):
    "A weight, a mask or a parameter that somebody put in the place of another: after the next step dead weights are zero, and so they stay"
    m = Tasks()
    sparsify_model(m, .6, seed=0)
    m = ways_to_copy[copied](m)
    changes[change](m)
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    used_by[used](m, torch.randn(4, 3, 6)).backward()
    opt.step()
    assert_dead(m, opt)
    trains_sparse(m, opt, used_by[used])

# --- weights that are computed from others, after they were made sparse

parametrizations = nn.utils.parametrizations


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
def _step(used, opt='momentum'):
    def _f(m, copied=lambda m: m):
        m = copied(m)
        opt_f = optimizers[opt](m.parameters())
        used_by[used](m, torch.randn(4, 3, 6)).backward()
        opt_f.step()
    return _f

noticed_by = dict(forward=lambda m: m(torch.randn(4, 3, 6)), evaluation=lambda m: m.eval()(torch.randn(4, 3, 6)),
    state=lambda m: m.state_dict(), engine=_engine, fit_sparse=lambda m: fit_sparse_on(m), parts=_step('parts'), method=_step('method'), fastai=_step('method', 'fastai_Adam'))

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
    m = Tasks()
    sparsify_model(m, .6, seed=0)
    mask = m.body[2].weight_mask.clone()
    put_on(m.body[2])
    with pytest.raises(ValueError, match=rf'(?s)body\.2\.weight.*{error}.*unsparsify'): noticed_by[noticed](m)
    take_off(m)
    if not kind.startswith('pruned'): assert m.body[2].weight_mask.equal(mask)
    m.train()
    m.zero_grad()
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    m(torch.randn(4, 3, 6))
    trains_sparse(m, opt, used_by['method'])

@pytest.mark.parametrize('copied', ['deepcopy','average'])
@pytest.mark.parametrize('kind', computed)
@pytest.mark.filterwarnings('ignore')
def test_a_computed_weight_is_refused_in_copies(kind, copied):
    "Where the model can be copied at all, and also where the optimizer was made before"
    m = Tasks()
    sparsify_model(m, .6, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    computed[kind][0](m.body[2])
    with pytest.raises(ValueError, match='body.2.weight'):
        used_by['parts'](m, torch.randn(4, 3, 6)).backward()
        opt.step()
    m.zero_grad()
    try: c = ways_to_copy[copied](m)
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
    train_by(m, 'forward')
    train_by(m, 'method')
    assert not any('_sparsity' in k for k in m.state_dict()) and not any('_mask_handlers' in vars(o) for o in m.modules())

def test_lora_on_a_sparse_layer_leaves_it_sparse():
    "peft freezes the base and calls none of its hooks: masks and zeros stay bit for bit, also in the copies that `modules_to_save` trains; the engine says that nothing can move"
    peft = pytest.importorskip('peft')
    for kw in (dict(target_modules=['body.2','head'], r=2), dict(target_modules=['body.2'], r=2, use_dora=True), dict(target_modules=['body.2'], r=2, modules_to_save=['body.0'])):
        m = Tasks()
        sparsify_model(m, .6, seed=0)
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
        with pytest.warns(UserWarning, match='no update'):
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
        m = Tasks()
        sparsify_model(m, .6, seed=0)
        m(torch.randn(4, 3, 6))
        m = ways_to_copy[copied](m)
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
    m[2].weight = m[0].weight
    before,n = m[0].weight.detach().clone(),int(m[0].weight_mask.sum())
    opt = torch.optim.Adam(m.parameters())
    for _ in range(2):
        with pytest.raises(ValueError, match='the weight of a Linear was tied.*another mask.*unsparsify_parameter'): m(torch.randn(2,16))
        assert torch.equal(before, m[0].weight)
    unsparsify_parameter(m, '2.weight')
    for _ in range(3):
        opt.zero_grad()
        m(torch.randn(8,16)).square().sum().backward()
        opt.step()
    assert int((m[2].weight!=0).sum())==int((m[0].weight!=0).sum())==n
    assert all(not t[~m[0].weight_mask].any() for t in opt.state_dict()['state'][0].values() if t.shape==before.shape)
    same = nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16))
    same[2].weight = same[0].weight
    sparsify_model(same, .8, seed=0)
    same(torch.randn(2,16))

@pytest.mark.parametrize('way', [copy.deepcopy, pickled], ids=['deepcopy','pickle'])
def test_the_copy_of_any_tied_layer_is_sparse(way):
    "The mask is a buffer of the first of them, and goes along with the others"
    m = nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16))
    m[2].weight = m[0].weight
    sparsify_model(m, .8, seed=1)
    for layer in (m[0], m[2]):
        c = way(layer)
        opt = torch.optim.SGD(c.parameters(), .1, momentum=.9)
        for _ in range(3):
            c(torch.randn(8,16)).square().mean().backward()
            opt.step()
        assert int(c.weight.count_nonzero())<=round(.2*256) and c.weight.ne(layer.weight).any()
    unsparsify(m)
    assert not any('_mask_handlers' in vars(o) for o in m.modules())
