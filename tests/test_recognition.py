"A sparse model keeps its structure: it is found in the masks, so training, pruning and files needn't repeat it"

import math,pytest,torch
from fastsparse.all import *
from fastsparse.special.recognition import find_structure
from fastsparse.model.layers import Axes
from fastsparse.prune.tickets import prune_to
from fastsparse.weights.find import masked_params
from helpers import live,warned
from torch import nn

texts = ['2:4','1:4','4:8','2:4 axis 0','2:4 flat','2:4 pad','block 16x16','block 8x1','block 4x4 pad','fan-in','kernels','output channels','input channels','output groups 4','input groups 4']

def drawn(text, shape, density):
    s,g = as_structure(text),torch.Generator().manual_seed(1)
    shape = tuple(n+2 for n in shape) if 'pad' in text else shape
    return s.top(torch.rand(shape, generator=g), s.count(shape, round(density*math.prod(shape))))

@pytest.mark.parametrize('text', texts)
def test_masks_show_their_structure(text):
    "Of two layers, whose number of inputs and outputs differs; 2:4 along all weights of an output is 2:4 along inputs in matrices"
    density = (as_structure(text).sparsity or .75)
    shapes = [(32,48,3,3),(64,32,3,3)] if text in ('kernels','2:4 flat') else [(64,48),(32,64)]
    density = .25 if as_structure(text).sparsity is None else 1-as_structure(text).sparsity
    masks = [drawn(text, shape, density) for shape in shapes]
    assert str(find_structure(masks, [Axes()]*2))==text

@pytest.mark.parametrize('axes,order', [(Axes(1,0), (1,0)), (Axes(1,2,0), (2,0,1)), (Axes(2,1,0), (2,1,0))])
def test_outputs_inputs_and_experts_are_where_the_layer_has_them(axes, order):
    mask = drawn('block 8x4', (32,64), .25)
    if len(order)==3: mask = torch.stack([mask, mask.roll(8, 0)])  # experts, outputs, inputs
    mask = mask.permute(0,2,1) if axes==Axes(2,1,0) else mask.T if axes==Axes(1,0) else mask
    assert str(find_structure([mask.contiguous()], [axes]))=='block 8x4'

def test_random_masks_have_none():
    "Nor have those that are in order by chance, whole or empty"
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        for shape,density in (((8,8),.25), ((4,6),.5), ((64,32),.1), ((16,8,3,3),.5)):
            assert find_structure([sparse_mask(shape, 1-density, g)], [Axes()])==as_structure(None)
    assert find_structure([torch.ones(8,8).bool(), torch.zeros(8,8).bool()], [Axes()]*2)==as_structure(None)
    assert find_structure([torch.tensor([[1,1,0,0],[0,1,0,1]]).bool()], [Axes()])==as_structure(None)

def run(m, method='rigl', n=16, **kw):
    opt = torch.optim.Adam(m.parameters())
    if method!='auto': kw = dict(batches_per_update=3)|kw
    d = DynamicSparseTraining(m, opt, n_steps=n, method=method, seed=0, **kw)
    for _ in range(n):
        opt.zero_grad()
        m(torch.randn(8, 32)).pow(2).mean().backward()
        opt.step()
    return d

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32,64), nn.Tanh(), nn.Linear(64,32))
def are_legal(m, text): return all(as_structure(text).legal(o.mask) for o in masked_params(m))

@pytest.mark.parametrize('text', ['2:4','block 8x8','fan-in','output channels'])
@pytest.mark.parametrize('method', ['rigl','set','auto'])
def test_training_keeps_the_structure(text, method, tmp_path):
    "By whatever method, also in a model that was read from a file"
    m = net()
    sparsify_model(m, .5, structure=text, seed=0)
    before = [o.mask.clone() for o in masked_params(m)]
    assert not any('structure' in o for o in warned(run, m, method))
    assert are_legal(m, text) and any(not o.mask.equal(was) for o,was in zip(masked_params(m), before))
    save_sparse(m, tmp_path/'m.safetensors')
    load_sparse(again := net(), tmp_path/'m.safetensors')
    run(again, method)
    assert are_legal(again, text)

def test_a_higher_sparsity_keeps_blocks():
    m = net()
    sparsify_model(m, .5, structure='block 8x8', seed=0)
    run(m, 'gmp', sparsity=.75)
    assert are_legal(m, 'block 8x8') and sum(live(m))==1024

def test_structure_is_given_up_by_name():
    "What can't be kept is said with the argument that gives it up, and with the argument nothing is said"
    m = net()
    sparsify_model(m, .5, structure='2:4', seed=0)
    said = warned(run, m, 'gmp', sparsity=.75)
    assert any("structure='unstructured'" in o and "'2:4'" in o for o in said) and sum(live(m))==1024
    m = net()
    sparsify_model(m, .5, structure='2:4', seed=0)
    assert not warned(run, m, 'rigl', structure='unstructured') and not are_legal(m, '2:4')

@pytest.mark.parametrize('prune', [lambda m: prune_magnitude(m, .75), lambda m: prune_to(m, .75), lambda m: prune_magnitude(m, {'*':.75})])
def test_pruning_at_once_keeps_the_structure(prune):
    "A block goes or stays as a whole, and none comes back"
    m = net()
    sparsify_model(m, .5, structure='block 8x8', seed=0)
    before = [o.mask.clone() for o in masked_params(m)]
    assert not warned(prune, m)
    assert are_legal(m, 'block 8x8') and sum(live(m))==1024
    assert not any((o.mask&~was).any() for o,was in zip(masked_params(m), before))
