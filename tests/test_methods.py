"Room 06: each preset beside an independent reference, mask for mask, and the parts that lottery tickets are found with"
import copy, math, numpy as np, pytest, reference_methods as ref, torch
from fastsparse.all import *
from functools import partial
from helpers import *
from torch import nn

shapes = (40,12),(5,40)
N = 680

def net():
    return nn.Sequential(nn.Linear(12,40, bias=False, dtype=torch.double), nn.Tanh(), nn.Linear(40,5, bias=False, dtype=torch.double))

def start(density, seed=0):
    "Weights, masks and a batch in NumPy; `density` 0 is a fan-in of three and of ten, 1 is dense"
    rng = np.random.default_rng(seed)
    ws = [rng.normal(size=s)*.4 for s in shapes]
    masks = [rng.random(s)<density for s in shapes]
    if not density: masks = [rng.random(s).argsort(1)<k for s,k in zip(shapes, (3,10))]
    return ws,masks,rng.normal(size=(30,12)),rng.normal(size=(30,5))

def keyed(i, u): return torch.rand(shapes[i], generator=keyed_generator(0, i, u)).numpy()
def keyed_exp(i, u): return torch.empty(shapes[i], dtype=torch.double).exponential_(generator=keyed_generator(0, i, u)).numpy()
def turns(n, steps): return {math.ceil(round(t*n, 6)):s for t,s in steps.items()}

acdc = {round(.1+.05*i, 2):.9*(i%2==0) for i in range(13)}|{.75:0., .85:.9}
def numbers(n, **kwargs): return dict(n_steps=n, **kwargs)

cases = dict(
    ITOP=(.25, dict(ITOP_presets, batches_per_update=3), ref.rigl(3, .5, 1.), 300, 80, {}),
    GMP=(1., dict(GMP_presets, batches_per_update=2, sparsity=.9), ref.gmp(2, .9), 250, 90, dict(replace=False)),
    GraNet=(.5, dict(GraNet_presets, batches_per_update=2, sparsity=.9), ref.granet(2, .9), 250, 90, {}),
    GraNet_dense=(1., dict(GraNet_presets, batches_per_update=3, sparsity=.95, sparsity_path=rising_path()), ref.granet(3, .95, 0.), 300, 70, {}),
    MEST=(.25, MEST_presets, ref.mest(10, .1, keyed), 900, 55, {}),
    MEST_soft=(.25, dict(MEST_presets, sparsity=.8, sparsity_path=soft_bound_path(.2)), ref.mest(10, .1, keyed, .8, .2), 900, 55, {}),
    SRigL=(0., dict(SRigL_presets, batches_per_update=3), ref.srigl(3, .3, (120,50)), 300, 60, {}),
    SRigL_strict=(0., dict(SRigL_presets, batches_per_update=3, structure='fan-in ablate 0.7'), ref.srigl(3, .7, (120,50)), 300, 60, {}),
    ACDC=(1., dict(ACDC_presets, sparsity=.9), ref.in_waves(turns(200, acdc), ref.global_counts), 200, 15, dict(replace=False, forget=True)),
    DSD=(1., dict(DSD_presets, sparsity=.5), ref.in_waves({30:.5, 60:0.}, lambda s,ws,masks: ref.uniform_counts(s, masks)), 90, 2, dict(replace=False)),
    CHT=(.25, CHT_presets, ref.cht(2, keyed_exp), 80, 39, dict(replace=False)))

def beside(density, presets, rule, n_steps, **kwargs):
    ws,masks,x,y = start(density)
    m = net()
    with torch.no_grad():
        for l,w in zip((m[0],m[2]), ws): l.weight.copy_(torch.from_numpy(w))
    if density<1: sparsify_model(m, .5, mask_init={f'{i}.weight':torch.from_numpy(o) for i,o in zip((0,2), masks)})
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = DynamicSparseTraining(m, opt, n_steps, seed=0, batch_size=30, steps_per_epoch=2, **presets)
    return dst,ref.Run(rule, ws, masks, x, y, n_steps, **kwargs),torch.from_numpy(x),torch.from_numpy(y)

@pytest.mark.parametrize('name', cases)
def test_reference(name):
    "Beside a NumPy float64 reference on the same batches and draws: equal masks after every step, weights and momentum to 1e-9"
    density,presets,rule,n_steps,least,kwargs = cases[name]
    dst,run,x,y = beside(density, presets, rule, n_steps, **kwargs)
    m,opt = dst.model,dst.opt
    moved = 0
    for t in range(n_steps):
        before = masks_of(m)
        train(m, opt, 1, x, y)
        run.step()
        assert dst.n_updates==run.n_updates, f'step {t}'
        for o,mask,w,b in zip(masked_params(m), run.masks, run.ws, run.bufs or (0,0)):
            assert torch.equal(o.mask, torch.from_numpy(mask)), f'step {t}: {o.name}'
            assert np.allclose(o.p.detach().numpy(), w, atol=1e-9) and (run.bufs is None or np.allclose(opt.state[o.p]['momentum_buffer'].numpy(), b, atol=1e-9))
        moved += not same_masks(before, masks_of(m))
    assert moved>=least
