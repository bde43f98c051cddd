"Keeping dead weights dead: what is hooked when, and how a weight that is stored in another way takes part"
import copy, pickle, pytest, subprocess, sys, torch
from fastsparse.all import *
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
