"Keeping dead weights dead: what is hooked when, and how a weight that is stored in another way takes part"
import copy, pickle, pytest, subprocess, sys, torch
from fastsparse.all import *
from fastsparse.methods import rewind
from fastsparse.guards import enforce_masks,enforcements,Guard,guard_of,masked_params,set_guard
from helpers import *
from torch import nn

def _run(code):
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert res.returncode==0 and not res.stderr, res.stderr

def _room(code): _run("import sys\n"+code)

def test_rooms_load_no_fastai():
    "The rooms from masks to the engine load neither fastai, nor torch._dynamo, nor pandas, and hook nothing"
    _room("""
import fastsparse.training
from torch.optim import optimizer
assert not [m for m in sys.modules if m.split('.')[0] in ('fastai','pandas') or m.startswith('torch._dynamo')]
assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
""")

def test_listening_begins_with_the_first_weight_and_ends_with_the_last():
    "torch's optimizers have global hooks, and fastai's a wrapped step, as long as a weight is guarded; fastai may come later"
    _room("""
import gc,torch
from fastsparse.sparsify import sparsify_model
from fastsparse.guards import *
from torch import nn
from torch.optim import optimizer
def n(): return len(optimizer._global_optimizer_pre_hooks)+len(optimizer._global_optimizer_post_hooks)
m,m2 = nn.Linear(8,8),nn.Linear(8,8)
hooks,hooks2 = sparsify_model(m, .5),sparsify_model(m2, .5)
assert n()==2
from fastai import optimizer as fo
was = fo.Optimizer.step,fo.Lookahead.step
opt = fo.SGD([m.weight], lr=.1, mom=.9)
for _ in range(3):
    m(torch.randn(4,8)).sum().backward()
    if _==0: assert fo.Optimizer.step is not was[0]
    opt.step()
    assert not m.weight[~m.weight_mask].any()
hooks.remove()
assert n()==2 and fo.Lookahead.step is not was[1]
del m2,hooks2
gc.collect()
assert n()==0 and (fo.Optimizer.step,fo.Lookahead.step)==was
""")

def test_one_hook_however_many_parameters():
    "48 parameters made sparse one by one have one hook on the root; each handle frees its own parameter"
    m = nn.Sequential(*[nn.Linear(4,4) for _ in range(48)])
    hooks = [sparsify_parameter(m, f'{i}.weight', .5, seed=i) for i in range(48)]
    assert len(m._forward_pre_hooks)==1 and len(enforcements(m))==1
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
    "`torch.compile` of an optimizer's step doesn't stumble over guards"
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
    def guard_for(self, attr): return _LiveGuard(self, attr)

class _LiveGuard(Guard):
    held = 'is stored sparse'
    def __init__(self, module, attr):
        self.module,self.attr,self.p = module,attr,module._parameters[attr]
        set_guard(self.p, self)
    def check(self): pass
    def remove(self): set_guard(self.p)

def test_a_module_may_store_its_weight_in_its_own_way():
    "`guard_for` of a module gives its guard; masks are listed with the dense shape, copies find theirs, and masks can't be taken off"
    lin = nn.Linear(8,4)
    sparsify_model(lin, .75, seed=0).remove()
    p = lin.weight
    m = nn.Sequential(_LiveOnly(lin))
    for c in (m, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        o, = masked_params(c)
        assert o.shape==(4,8) and o.p.shape==(8,)
        hooks = enforce_masks(c)
        assert type(guard_of(c[0].weight)) is _LiveGuard
        with pytest.raises(ValueError, match='0.weight is stored sparse'): unsparsify(c)
        hooks.remove()
        assert guard_of(c[0].weight) is None
    assert m[0].weight is p

def one_guard():
    m = nn.Linear(6, 5)
    held = sparsify_model(m, .5, seed=0)
    m(torch.randn(1, 6))
    return m,held,guard_of(m.weight)

def test_what_moves_starts_at_zero_with_its_state():
    "After a move weights, momentum and slow weights are zero at all that went and came, and as they were elsewhere"
    m,held,g = one_guard()
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
    m,held,g = one_guard()
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
    m,held,g = one_guard()
    e = enforce_masks(m)
    assert repr(e)=='Enforced(1 parameters)'
    e.remove()
    assert repr(e)=='Enforced()'

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
