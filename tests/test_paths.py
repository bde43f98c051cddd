"Live weights can live: a start has a path from inputs to outputs, and no weight is put where no gradient can come"
import pytest,torch,warnings
from fastsparse.all import *
from fastsparse.special.paths import meets_padding
from fastsparse.weights.find import masked_params
from helpers import live
from torch import nn

def mlp(*sizes):
    torch.manual_seed(0)
    layers = [l for a,b in zip(sizes, sizes[1:]) for l in (nn.Linear(a,b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])

def n_reached(m):
    "Outputs of a chain of linear layers that its inputs reach, by products of masks"
    a = torch.ones(m[0].in_features)
    for l in m:
        if isinstance(l, nn.Linear): a = (getattr(l, 'weight_mask', torch.ones_like(l.weight)).float()@a>0).float()
    return int(a.sum())

@pytest.mark.parametrize('structure,sparsity,sizes', [('block 64x64',.75,(64,256,256,10)), ('block 64x64',.9,(64,256,256,10)), (None,.995,(64,256,256,10)),
    (None,.999,(16,64,64,64,4)), ('input channels',.9,(16,64,64,16)), ('output channels',.9,(16,64,64,16)), ('fan-in',.98,(64,64,64,64))])
@pytest.mark.parametrize('init', ['random','magnitude'])
def test_a_start_has_a_path(structure, sparsity, sizes, init):
    "With exact counts and a legal structure, for every seed"
    counts = set()
    for seed in range(10 if init=='random' else 1):
        m = mlp(*sizes)
        sparsify_model(m, sparsity, 'erk' if structure is None else 'uniform', structure=structure, seed=seed, mask_init=init)
        if min(live(m)): assert n_reached(m)
        assert all(as_structure(structure).legal(o.mask) for o in masked_params(m))
        counts.add(tuple(live(m)))
    assert len(counts)==1

def test_a_path_leads_through_convolutions_and_what_lies_transposed():
    for seed in range(10):
        torch.manual_seed(seed)
        m = nn.Sequential(nn.Conv2d(4,32,3,padding=1), nn.ConvTranspose2d(32,32,3,padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32,32), nn.Linear(32,2))
        sparsify_model(m, .99, seed=seed, sparse_init_mode=None)
        for l in m:
            if hasattr(l, 'weight'): l.weight.data.abs_(), l.bias.data.zero_()
        assert min(live(m)) and m(torch.ones(1,4,8,8)).abs().sum()>0

def test_masks_with_a_path_are_the_drawn_ones():
    "Each is what it is alone, by seed and place"
    m = mlp(16,64,64,4)
    sparsify_model(m, .5, seed=3)
    for o,n in zip(masked_params(m), live(m)):
        g = keyed(3, [o.name for o in masked_params(m)].index(o.name))
        assert o.mask.equal(top_k_mask(torch.rand(o.shape, generator=g), n))

def keyed(seed, i):
    from fastsparse.masks.selection import keyed_generator
    return keyed_generator(seed, i)

@pytest.mark.parametrize('layer,sizes,idle', [(nn.Conv2d(1,1,3,padding=1), (1,1), 8), (nn.Conv2d(1,1,3,padding=1), (2,2), 0),
    (nn.Conv2d(1,1,3,padding=1,stride=2), (2,2), 5), (nn.Conv1d(1,1,5,padding=2), (2,), 2), (nn.Conv2d(1,1,3,padding=2,dilation=2), (2,2), 8),
    (nn.Conv2d(1,1,3,padding=1,padding_mode='circular'), (1,1), 0),
    (nn.ConvTranspose2d(1,1,3,padding=1), (1,1), 8), (nn.Conv2d(1,1,3), (3,3), 0)])
def test_where_a_kernel_meets_padding(layer, sizes, idle):
    "Where a gradient of ones is zero"
    assert int(meets_padding(layer, sizes).sum())==idle

def test_no_weight_starts_where_no_gradient_can_come():
    "A 3x3 kernel over pictures of one pixel: centres first, and the rest only if counts ask for more"
    m = nn.Sequential(nn.Conv2d(4,8,3,padding=1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8,16,3,padding=1), nn.Flatten())
    sparsify_model(m, .9, 'uniform', seed=0, xb=torch.randn(8,4,4,4))
    mask = m[2].weight_mask
    assert mask[:,:,1,1].sum()==mask.sum()==round(.1*8*16*9) and m[0].weight_mask[:,:,0].any()
    m = nn.Sequential(nn.Conv2d(4,4,3,padding=1), nn.Flatten())
    sparsify_model(m, .5, seed=0, xb=torch.randn(8,4,1,1))
    assert m[0].weight_mask.sum()==72 and m[0].weight_mask[:,:,1,1].all()

def trained(m, x, method='rigl', n=13, **kw):
    opt = torch.optim.SGD(m.parameters(), .01)
    d = DynamicSparseTraining(m, opt, n, method=method, batches_per_update=4, seed=0, **kw)
    for _ in range(n):
        opt.zero_grad()
        m(x).pow(2).mean().backward()
        opt.step()
    return d

@pytest.mark.parametrize('structure', [None,'block 1x4','block 1x4 pad'])
def test_an_update_moves_no_more_than_can_live(structure):
    "Of 16 inputs eight are always zero: nothing grows there, and counts stay"
    m = nn.Sequential(nn.Linear(16,8))
    mask = torch.zeros(8,16).bool()
    mask[:,:7] = True
    if structure: mask[:,7] = mask[:,4:8].any(1)
    if structure: mask[0,:4] = False
    else: mask[0,0] = False
    sparsify_model(m, .5, mask_init={'0.weight':mask}, sparse_init_mode=None)
    n = int(mask.sum())
    x = torch.randn(32,16)
    x[:,8:] = 0
    trained(m, x, structure=structure or 'unstructured', sparse_compute=False)
    assert int(m[0].weight_mask.sum())==n and not m[0].weight_mask[:,8:].any()

def test_the_summary_says_how_many_live_weights_are_zero():
    m = nn.Linear(8,8)
    sparsify_model(m, .5, seed=0)
    assert 'zero' not in sparse_summary(m).df.note[0]
    m.weight.data[0] = 0
    n = int(m.weight_mask[0].sum())
    assert f'{n} of 32 live weights are zero' in sparse_summary(m).df.note[0]

@pytest.mark.parametrize('live', [False,True])
@pytest.mark.parametrize('first_row', [True,False])
def test_an_update_that_loses_the_last_path_says_so(first_row, live):
    "By scores that move all of one layer to an output, and all of the next to an input, that output's or another; said once, of the layer before the gap"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(32,32), nn.Tanh(), nn.Linear(32,32), nn.Tanh(), nn.Linear(32,8))
    sparsify_model(m, .97, 'uniform', seed=0, exclude='4')
    opt = torch.optim.Adam(m.parameters(), 1e-3)
    def to_output(p, **kwargs): return (32-torch.arange(32.))[:,None].expand_as(p).clone()
    def to_input(p, **kwargs): return (32-torch.arange(32.) if first_row else 1+torch.arange(32.)).expand_as(p).clone()
    rules = [('0', dict(grow_score_f=to_output)), ('2', dict(grow_score_f=to_input))]
    plan = {'2.weight':'rows'} if live else False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        DynamicSparseTraining(m, opt, 40, method='set', rules=rules, batches_per_update=3, initial_drop_grow_pct=1., seed=0, sparse_compute=plan)
        for _ in range(9):
            m(torch.randn(8,32)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    texts = [str(o.message) for o in found if 'no gradient reaches' in str(o.message)]
    assert bool(n_reached(m))==first_row and bool(texts)==(not first_row)
    if texts: assert all('no gradient reaches 0.weight after the update at step' in o for o in texts)
