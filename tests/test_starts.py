"Starting masks: evenly spaced, or those of another model"
import math, pytest, torch
from fastai.basics import DataLoader,DataLoaders,Learner,MSELossFlat
from fastsparse.all import *
from fastsparse.masks.selection import count_live,keyed_generator,n_live
from fastsparse.save.load import read_file
from fastsparse.special.starts import checkerboard,masks_like
from fastsparse.weights.find import masked_params
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn

fits = [('unstructured',(3,5)), ('2:4',(2,8,1,2)), ('2:4 pad',(3,6)), ('1:3 axis 0',(6,4)), ('2:5 flat pad',(2,3,2,2)), ('fan-in',(3,2,2,2)), ('output groups 3',(6,4)),
    ('input groups 2',(2,4,3)), ('block 2x3 max',(4,6)), ('block 2x3 pad',(5,7)), ('kernels l2',(3,4,2,2)), ('output channels min',(5,3)), ('input channels',(2,4,2,2))]

def test_checkerboard_is_as_even_as_counts_allow():
    "Rows and columns differ by at most one, units of blocks too; fan-in keeps its rows"
    assert checkerboard(torch.ones(4,10), 4).sum(1).tolist()==[1]*4
    for (rows,cols),ns in {(4,10):range(41), (64,64):(82,500,1000,2047), (7,13):range(92), (1,9):range(10), (9,1):range(10), (30,500):(100,1501)}.items():
        for n in ns:
            mask = checkerboard(torch.empty(rows,cols), n)
            assert count_live(mask)==n and all(o.max()-o.min()<=1 for o in (mask.sum(0),mask.sum(1)))
    for k in range(1,20):
        mask = checkerboard(torch.empty(12,20), 12*k, 'fan-in')
        assert (mask.sum(1)==k).all() and mask.sum(0).max()-mask.sum(0).min()<=1
        units = checkerboard(torch.empty(12,40), 8*k, 'block 2x4')[::2,::4]
        assert count_live(units)==k and all(o.max()-o.min()<=1 for o in (units.sum(0),units.sum(1)))
    mask = checkerboard(torch.empty(20,12), 20*3, as_structure('fan-in').for_axes((1,0,None)))
    assert (mask.sum(0)==5).all()

def lines(mask): return [''.join(map(str, o)) for o in mask.int().tolist()]

@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from([(5,),(4,8),(3,7),(12,5),(2,3,4),(4,3,3,3),(1,9),(9,1),(0,4)]), s=st.floats(0,1))
def test_checkerboard_counts(shape, s):
    "Law 1: exact counts at every sparsity, 1 included, and for every rank (elsewhere sparsity 1 divides by zero and only matrices are rolled)"
    n = n_live(math.prod(shape), s)
    mask = checkerboard(torch.empty(shape), n)
    assert mask.shape==shape and mask.dtype==torch.bool and int(mask.sum())==n

@pytest.mark.parametrize('text,shape', fits)
def test_checkerboard_of_structures(text, shape):
    "A legal mask with the count that was asked for"
    s = as_structure(text)
    for f in (.5,.75,1):
        n = s.count(shape, math.ceil(math.prod(shape)*f))
        mask = checkerboard(torch.empty(shape), n, structure=text, generator=None, name='w')
        assert int(mask.sum())==n and s.legal(mask)

def test_checkerboard_of_blocks():
    "Blocks are spaced, not piled up at the first index"
    mask = checkerboard(torch.empty(8,8), 32, 'block 2x2')
    assert lines(mask[::2,::2])==['0101','1010','0101','1010']
    assert lines(checkerboard(torch.empty(4,4,3,3), 72, 'kernels')[:,:,0,0])==['0101','1010','0101','1010']

def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2,4,3), nn.Flatten(), nn.Linear(16,8), nn.ReLU(), nn.Linear(8,3))

def sources(tmp_path):
    "One sparse model's masks, in every form they come in"
    model = net()
    sparsify_model(model, .6, seed=1)
    torch.save(model.state_dict(), tmp_path/'state.pt')
    dl = DataLoader([(torch.randn(2,4,4),torch.randn(3)) for _ in range(4)], bs=2)
    learn = Learner(DataLoaders(dl, dl), model, loss_func=MSELossFlat(), path=tmp_path)
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(1)
    return model,[model, learn, model.state_dict(), *map(read_file, (tmp_path/'state.pt', learn.save('learner'), learn.save('weights', with_opt=False))),
        {k: v for k,v in model.state_dict().items() if k.endswith('_mask')}, dict(model=model.state_dict(), opt=None)]

def test_masks_like(tmp_path):
    "Exactly the masks of the source (elsewhere a renamed key leaves them all zero, and so every weight), from every kind of source, as copies"
    model,kinds = sources(tmp_path)
    for source in kinds:
        other = net(1)
        sparsify_model(other, .6, mask_init=masks_like(source))
        assert same_masks(masks_of(model), masks_of(other)) and masks_of(other)[0].any()
        for o in masked_params(other): o.mask.zero_()
    assert all(m.any() for m in masks_of(model))

def test_shuffled_tickets():
    "The lottery's control: as many in each layer, at places that the seed names, not the source"
    model,(a,b,c) = net(),(net(),net(),net())
    sparsify_model(model, .6, erdos_renyi_sparsity, seed=1)
    for other,seed in ((a,5),(b,5),(c,6)): sparsify_model(other, .6, erdos_renyi_sparsity, mask_init=masks_like(model, shuffle=True), seed=seed)
    assert same_masks(masks_of(a), masks_of(b)) and not same_masks(masks_of(a), masks_of(c)) and not same_masks(masks_of(a), masks_of(model))
    assert [int(m.sum()) for m in masks_of(a)]==[int(m.sum()) for m in masks_of(model)]

@pytest.mark.parametrize('text', ['2:4','fan-in','block 2x2'])
def test_shuffled_structures(text):
    "New places obey the structure"
    s = as_structure(text)
    mask = s.top(torch.rand(8,8), 32)
    f = masks_like({'w_mask': mask}, shuffle=True)
    new = f(torch.empty(8,8), n=None, name='w', generator=keyed_generator(0, 0), structure=text)
    assert s.legal(new) and int(new.sum())==32 and not torch.equal(new, mask)

def test_masks_like_refuses():
    "Law 10: unknown names, other shapes, sources without masks"
    f = masks_like({'a_mask': torch.ones(2,2).bool()})
    for other in (f, *map(masks_like, (net(), {}, {'a': torch.ones(2)}))):
        with pytest.raises(KeyError, match='b'): other(torch.empty(2,2), name='b')
    m = nn.Sequential(nn.Linear(3,2))
    with pytest.raises(ValueError, match=r'\(2, 2\).*\(2, 3\)'): sparsify_model(m, .5, mask_init=masks_like({'0.weight_mask': torch.ones(2,2).bool()}))
    assert not masked_params(m)

def test_masks_of_another_model_ask_no_distribution():
    "Their counts are the other model's, so a distribution that can't be called is never called"
    def never(*args, **kwargs): raise AssertionError('asked')
    source,model = mlp(),mlp(seed=1)
    sparsify_model(source, .5, seed=0)
    sparsify_model(model, .5, never, mask_init=masks_like(source))
    assert same_masks(masks_of(source), masks_of(model))
