"What holds on the CPU holds on a CUDA device: `make gpu`; without one these tests run on the CPU, so that they are right where a card is"
import os,pytest,torch
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets
from fastsparse.methods.presets import ACDC_presets,GraNet_presets,MEST_presets,SRigL_presets
from fastsparse.weights.find import masked_params
from torch import nn
from torch.nn import functional as F

device = os.environ.get('FASTSPARSE_DEVICE', 'cuda' if torch.cuda.is_available() else 'cpu')
pytestmark = pytest.mark.cuda

presets = dict(SET=SET_presets, RigL=RigL_presets, SNFS=SNFS_presets, GMP=GMP_presets, ACDC=ACDC_presets, SRigL=SRigL_presets,
    MEST=MEST_presets, GraNet=GraNet_presets)

def net(dtype=torch.float):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12,32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,24), nn.ReLU(), nn.Linear(24,4)).to(dtype)

def batch(t, dtype=torch.float):
    g = torch.Generator().manual_seed(t)
    return torch.randn(16, 12, generator=g, dtype=dtype).to(device),torch.randint(4, (16,), generator=g).to(device)

def step(model, opt, t, dtype=torch.float):
    x,y = batch(t, dtype)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()

def start(method, n=24, dtype=torch.float, opt=torch.optim.AdamW):
    model = net(dtype).to(device)
    risen = presets[method].get('sparsity_path') is not None
    if not risen: sparsify_model(model, .8, 'erk', seed=0, structure='fan-in' if method=='SRigL' else None)
    opt = opt(model.parameters(), lr=1e-2)
    every = {} if presets[method].get('updates') is not None else dict(batches_per_update=3)
    settings = {**presets[method], **every, **(dict(sparsity=.8) if risen else {})}
    return model,opt,DynamicSparseTraining(model, opt, n, **settings, batch_size=16, steps_per_epoch=6, seed=0)

def masks(model): return [o.mask.cpu() for o in masked_params(model)]

def assert_laws(model, opt, remembers=False):
    "Dead weights are exact zeros, and the optimizer remembers nothing of them (1.2e-30 at most), but for methods that grow by what it `remembers`"
    for o in masked_params(model):
        assert o.mask.device==o.p.device and not o.p[~o.mask].any()
        known = [t[~o.mask] for t in opt.state[o.p].values() if isinstance(t, torch.Tensor) and t.shape==o.p.shape]
        assert remembers or all(t.abs().max()<=1.2e-30 for t in known if len(t))

@pytest.mark.parametrize('sparse_f', ['uniform','erk','global'])
def test_random_masks_have_the_seeds_name_wherever_the_model_is(sparse_f):
    a,b = net(),net().to(device)
    for m in (a,b): sparsify_model(m, .9, sparse_f, seed=3)
    assert all(torch.equal(p, q) for p,q in zip(masks(a), masks(b)))

@pytest.mark.parametrize('structure', ['2:4','fan-in','block 4x1','kernels'])
def test_structures_choose_as_on_the_cpu(structure):
    a,b = net(),net().to(device)
    for m in (a,b): sparsify_model(m, .5, structure=structure, mask_init='magnitude', seed=0)
    assert all(torch.equal(p, q) for p,q in zip(masks(a), masks(b)))

@pytest.mark.parametrize('method', presets)
def test_methods_keep_the_laws(method):
    model,opt,dst = start(method)
    for t in range(24):
        step(model, opt, t)
        if masked_params(model): assert_laws(model, opt, method=='SNFS')
    assert dst.n_updates>0

@pytest.mark.parametrize('method', ['SET','RigL','SNFS','GMP'])
def test_given_equal_gradients_masks_are_the_cpus(method):
    "Gradients, weights and states are copied from a run on the CPU, so that only the choice is compared"
    global device
    runs,where = {},device
    for device in ('cpu',where): runs[device] = start(method, dtype=torch.double, opt=lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=.9))
    a,b = runs['cpu'],runs[where]
    device = where
    for t in range(24):
        g = torch.Generator().manual_seed(t)
        grads = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in a[0].parameters()]
        for model,opt,_ in (a,b):
            for p,grad in zip(model.parameters(), grads): p.grad = grad.to(p.device, copy=True)  # a step masks it
            opt.step()
        assert all(torch.equal(p, q) for p,q in zip(masks(a[0]), masks(b[0]))), t

@pytest.mark.parametrize('method', ['RigL','SNFS','ACDC'])
def test_a_run_goes_on_bit_for_bit(method, tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        a,opt,dst = start(method)
        for t in range(24):
            step(a, opt, t)
            if t==10: save_run(tmp_path/'run.pt', a, opt, dst)
        b,opt,dst = start(method)
        load_run(tmp_path/'run.pt', b, opt, dst)
        for t in range(11, 24): step(b, opt, t)
    finally: torch.use_deterministic_algorithms(False)
    for (k,p),q in zip(a.state_dict().items(), b.state_dict().values()): assert torch.equal(p, q), k

@pytest.mark.parametrize('kind', [torch.half, torch.bfloat16])
def test_mixed_precision_keeps_the_laws(kind):
    if device=='cpu' and kind is torch.half: pytest.skip('half precision is tried on CUDA')
    model,opt,dst = start('RigL')
    scaler = torch.amp.GradScaler(device, enabled=kind is torch.half)
    for t in range(24):
        x,y = batch(t)
        opt.zero_grad()
        with torch.autocast(device, kind): loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        assert_laws(model, opt)
    assert dst.n_updates>0

def test_a_model_that_moves_keeps_its_masks():
    model = net()
    sparsify_model(model, .9, seed=0)
    want = masks(model)
    model.to(device)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    for t in range(3): step(model, opt, t)
    assert_laws(model, opt)
    assert all(torch.equal(p, q) for p,q in zip(want, masks(model)))

def test_smaller_copies_are_made_where_the_model_is():
    model = nn.Sequential(nn.Linear(12,64), nn.ReLU(), nn.Linear(64,64), nn.ReLU(), nn.Linear(64,4)).to(device)
    x = batch(0)[0]
    small = narrow_like(model, .5, x)
    assert small(x).device==x.device and small[0].out_features==32
    sparsify_model(model, .95, seed=0)
    less,removed = shrink(model, x)
    assert removed
    torch.testing.assert_close(less(x), model(x))
