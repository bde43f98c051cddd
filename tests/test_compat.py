"Other libraries' words in this library's parts; schedules are tested in test_schedules"
import copy, math, numpy as np, pickle, pytest, torch
from fastsparse.all import *
from fastsparse.compat.cerebras import mask_drop_minimum,mask_grow_maximum,mask_topk
from fastsparse.compat.dmx import BlockTopK,from_shorthand,SparsificationManager,to_shorthand,TopK
from fastsparse.masks.selection import count_live
from fastsparse.special.structures import InputGroups,OutputGroups
from fastsparse.model.layers import register_layer
from fastsparse.compat.sparselearning import MagnitudePruneDecay,masking_settings
from fastsparse.learned.masks import Sparsify
from fastsparse.learned.sparseness import as_sparseness,Bernoulli,Dense
from fastsparse.train.method import Method
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn

# --- Cerebras' mask functions

def B(*rows): return torch.tensor(rows).bool()

def test_builder_examples():
    "The examples of the score shapers' documentation"
    score = torch.tensor([[1.,2],[0,-1]])
    assert torch.equal(mask_topk(score, .25), B([1,1],[1,0])) and torch.equal(mask_topk(score, .75), B([0,1],[0,0]))
    assert torch.equal(mask_topk(score, .5, OutputGroups(2)), B([0,1],[1,0]))
    assert torch.equal(mask_topk(torch.tensor([[1.,0],[2,-1]]), .5, InputGroups(2)), B([0,1],[1,0]))
    assert mask_grow_maximum(torch.arange(9.,1,-1), torch.arange(8)<1, .5).tolist()==[True]*4+[False]*4

@pytest.mark.parametrize('s,live', [(.6,4),(.8,2),(.85,2),(.95,1),(.05,10),(0,10),(1,0)])
def test_builders_do_not_truncate(s, live):
    "Trap 2: float32 truncation keeps 3, 1, 1 and 0 of ten at .6, .8, .85 and .95; at sparsity 1 nothing lives (elsewhere one weight stays marked)"
    assert int(mask_topk(torch.rand(10), s).sum())==live
    assert int(mask_grow_maximum(torch.rand(10), torch.zeros(10).bool(), s).sum())==live

def test_drop_stays_inside_the_mask():
    "Trap 3: live zeros tie with dead zeros; the result is a subset of the mask with exactly int(f*live) fewer"
    w,mask = torch.tensor([3.,0,0,2,0,0,0,0]),torch.arange(8)<4
    for f,n in ((0,0),(.25,1),(.3,1),(.5,2),(.99,3),(1,4)):
        new = mask_drop_minimum(w, mask, f)
        assert not (new&~mask).any() and int(new.sum())==4-n
    assert mask_drop_minimum(w, mask, .25).tolist()==[True,True,False,True]+[False]*4

@pytest.mark.parametrize('text', ['unstructured','fan-in','output groups 4','input groups 2','block 2x2','2:4'])
def test_drop_then_grow(text):
    "With groups, counts are those of each group (elsewhere the whole mask's count is compared with a group's, and nothing grows); denser masks come back unchanged; inputs stay as they are"
    g = torch.Generator().manual_seed(0)
    a,b = torch.rand(8,8, generator=g),torch.rand(8,8, generator=g)
    mask = mask_topk(a, .5, text)
    was = mask.clone()
    less = mask_drop_minimum(a, mask, .5, text)
    assert int(less.sum())==16 and not (less&~mask).any()
    more = mask_grow_maximum(b, less, .5, text)
    assert int(more.sum())==32 and (more|~less).all() and as_structure(text).legal(more)
    denser = mask_grow_maximum(b, torch.ones(8,8).bool(), .5, text)
    assert denser.all() and torch.equal(mask, was)

@pytest.mark.parametrize('fraction', [.29,.57,.58])
def test_drop_what_is_meant(fraction):
    ".29 of 100 is 29, not the 28 of floating point"
    assert 100-count_live(mask_drop_minimum(torch.rand(100), torch.ones(100).bool(), fraction))==round(100*fraction)

def test_drop_rounds_down_in_groups():
    "int(.3*16)=4 of 16 live weights in three groups are one each; blocks of four pay for whole units only"
    mask = torch.ones(3,6).bool()
    assert mask_drop_minimum(torch.rand(3,6), mask, .3, 'output groups 3').sum(1).tolist()==[5,5,5]
    assert int(mask_drop_minimum(torch.rand(2,8), torch.ones(2,8).bool(), .4, 'block 2x2').sum())==12

@pytest.mark.parametrize('bad', [-.1, 1.1, math.nan, math.inf])
def test_builders_refuse(bad):
    "Law 10: sparsity and drop fraction lie in the closed [0,1]; a mask must be one, and fit"
    score,mask = torch.rand(4,4),torch.ones(4,4).bool()
    with pytest.raises(ValueError, match=r'\[0,1\]'): mask_topk(score, bad)
    with pytest.raises(ValueError, match=r'drop_fraction.*\[0,1\]'): mask_drop_minimum(score, mask, bad)
    with pytest.raises(ValueError, match=r'\[0,1\]'): mask_grow_maximum(score, mask, bad)
    for wrong in (mask[:2], mask.float()):
        with pytest.raises(ValueError, match='the mask is'): mask_drop_minimum(score, wrong, .5)
        with pytest.raises(ValueError, match='the mask is'): mask_grow_maximum(score, wrong, .5)

@pytest.mark.parametrize('text', ['unstructured','2:4','2:4 axis 0','fan-in','block 2x2','kernels','output channels','output groups 2'])
@pytest.mark.parametrize('sparsity', [.75,.9,1,1.])
def test_grow_leaves_a_denser_mask(text, sparsity):
    "A mask that is denser than asked comes back unchanged, as a copy, up to sparsity 1, also where the structure has no mask of that sparsity"
    score = torch.randn(4,8)
    for mask in (mask_topk(score, .5, text), torch.ones(4,8).bool(), torch.arange(32).view(4,8)<13):
        new = mask_grow_maximum(score, mask, sparsity, text)
        assert torch.equal(new, mask) and new is not mask
    with pytest.raises(ValueError, match=r'\[0,1\]'): mask_grow_maximum(score, mask, 1.01, text)

def test_builders_take_scores_that_require_gradients():
    "Scores made of parameters are only read"
    p = nn.Parameter(torch.randn(4,8))
    for text in ('unstructured','2:4','fan-in','block 2x2','output groups 2'):
        mask = mask_topk(p.abs(), .5, text)
        assert int(mask_grow_maximum(p.abs(), mask_drop_minimum(p.abs(), mask, .5, text), .5, text).sum())==16

# --- dmx's kinds and modules

kinds = dict(DENSE=Dense(), BERN=Bernoulli())
kinds |= {'BERN(M)':Bernoulli(mask_gradient=True), 'TOPK{0.5}(U)':TopK(.5), 'TOPK{0.25}(M)':TopK(.25, True), 'TOPK{1e-05}(U)':TopK(1e-5)}
kinds |= {'BTOPK{4:8,-1}(U)':BlockTopK(4, 8, -1), 'BTOPK{2:4,1}(M)':BlockTopK(2, 4, 1, True)}

@pytest.mark.parametrize('text', kinds)
def test_shorthands(text):
    "Read, written, pickled, copied and compared"
    kind = from_shorthand(text)
    assert kind==kinds[text] and to_shorthand(kind)==text and pickle.loads(pickle.dumps(kind))==copy.deepcopy(kind)==kind

@pytest.mark.parametrize('text,shown', [('TOPK{1}(U)','TOPK{1.0}(U)'), ('TOPK{5e-1}(U)','TOPK{0.5}(U)'), ('TOPK{.25}(M)','TOPK{0.25}(M)')])
def test_numbers_of_a_shorthand(text, shown):
    "Other spellings of a number are written in one way"
    assert to_shorthand(from_shorthand(text))==shown

@pytest.mark.parametrize('text', ['', 'FOO', 'dense', 'DENSE ', 'DENSEx', 'DENSE(U)', 'TOPK{0.5}', 'TOPK{0.5}(X)', 'TOPK{0.5}(U)x', 'TOPK{}(U)', 'TOPK{a}(U)', 'TOPK{ 0.5}(U)', 'TOPK{nan}(U)',
    'BTOPK{4:8}(U)', 'BTOPK{4.0:8,-1}(U)', 'BERNx', 'BERN(U)', 'TOPK{\u0660.\u0665}(U)'])
def test_shorthands_are_strict(text):
    "No trailing text, no other letter than U and M, no digits that aren't ASCII"
    with pytest.raises(ValueError, match='must be DENSE, TOPK'): from_shorthand(text)

@pytest.mark.parametrize('f,what', [(lambda: TopK(1.5),r'1\.5.*\[0,1\]'), (lambda: from_shorthand('TOPK{-0.1}(U)'),r'-0\.1.*\[0,1\]'), (lambda: from_shorthand('BTOPK{5:4,-1}(U)'),'5'),
    (lambda: BlockTopK(2,4,2).mask(torch.rand(4,4)),'axis 2'), (lambda: BlockTopK(2,4).mask(torch.rand(4,6)),'4 divides')])
def test_ranges_of_kinds(f, what):
    with pytest.raises(ValueError, match=what): f()

specials = st.sampled_from([0.,-0.,1.,-1.,2.,float('inf'),-float('inf'),float('nan')])

@given(st.data(), st.integers(1,5), st.integers(1,3), st.integers(1,3), st.integers(-3,2))
@settings(max_examples=40)
def test_blocks_against_sorting(data, block, a, b, dim):
    "The highest of every block along any dimension, ties to the lowest index, NaN last"
    shape,k = [a,b,2],data.draw(st.integers(0,block))
    shape[dim] *= block
    values = data.draw(st.lists(st.floats(-3,3,width=32)|specials, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    score = np.array(values, dtype=np.float32).reshape(shape)
    mask = np.moveaxis(BlockTopK(k, block, dim).mask(torch.from_numpy(score)).numpy(), dim, -1).reshape(-1,block)
    for got,s in zip(mask, np.moveaxis(score, dim, -1).reshape(-1,block)): assert set(np.flatnonzero(got))==set(oracle_order(s, np.ones(block, bool))[:k])

def test_one_implementation_of_top_k_and_blocks():
    "TopK and BlockTopK are the masks of their structures, 0 of 8 too"
    score = torch.randn(4,3,16)
    for k in range(9): assert torch.equal(BlockTopK(k,8,-1).mask(score), NM(k,8,axis=2).top(score, 24*k))
    assert torch.equal(TopK(.3).mask(score), top_k_mask(score, 58))

def test_managers_take_models_and_lists():
    "A list of models means the masks in them, each once"
    net = mlp()
    sps = learn_masks(net, TopK(.5))
    for modules in (net, [net], [net,sps[0]], sps, tuple(sps)): assert SparsificationManager(modules).modules==sps
    SparsificationManager([net]).step(density=.25)
    assert [to_shorthand(sp.sparseness) for sp in sps]==['TOPK{0.25}(U)']*3

# --- words of others that were misread

def test_a_list_of_steps_is_one():
    "Cerebras' update schedule `{'steps': [...]}`, in rules too"
    updates = Method(updates={'steps':[3,1]}, drop_fraction=.3).bind(10)
    assert [t for t in range(10) if updates.is_time(t)]==[1,3]
    assert [t for t in range(250) if Method(updates={'steps':100}, drop_fraction=.3).bind(250).is_time(t)]==[0,100,200]

class Conv1D(nn.Module):
    "A linear layer whose weight lies inputs first, as in GPT-2"
    def __init__(self, outs, ins):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ins, outs))
    def forward(self, x): return x@self.weight

register_layer(Conv1D, inputs=0, outputs=1, product='linear', default=False)

def test_blocks_come_back_along_their_own_dimension():
    "A state dict of BlockTopK, loaded into a model prepared with another kind: the same masks after a training forward"
    torch.manual_seed(0)
    one,two = [Conv1D(8, 16) for _ in range(2)]
    learn_masks(one, {'*':BlockTopK(2, 4, 0)}, seed=0)
    learn_masks(two, {'*':'dense'}, seed=0)
    two.load_state_dict(one.state_dict())
    x = torch.randn(5,16)
    assert one(x).equal(two(x)) and one.weight_mask.equal(two.weight_mask) and (two.weight_mask.view(4,4,8).sum(1)==2).all()

@pytest.mark.parametrize('text', ['top 0.5 fan-in','2:4','2:4 flat','block 2x2 max','dense (M)'])
def test_what_has_no_shorthand_is_refused(text):
    if text.startswith('block'): text = 'top 0.5 '+text
    with pytest.raises(ValueError, match='no shorthand'): to_shorthand(as_sparseness(text))

def test_kinds_are_classes_with_the_keywords_of_the_peer():
    kind = BlockTopK(K=4, block_size=8, block_dim=-1)
    assert isinstance(kind, BlockTopK) and isinstance(TopK(.5), TopK) and not isinstance(kind, TopK)
    assert as_sparseness(str(kind)).mask(torch.arange(16.)).equal(kind.mask(torch.arange(16.)))
    for text in ('TOPK{0.5}(U)','BERN','DENSE','BTOPK{4:8,-1}(M)'):
        with pytest.raises(ValueError, match='from_shorthand'): Sparsify((4,8), text)

@pytest.mark.parametrize('kwargs,way', [(dict(prune_mode='global-magnitude'),"sparse_f='global'"), (dict(sparse_init='resume'),'load_sparse'),
    (dict(sparse_init='struct-random'),"structure='kernels'"), (dict(growth_mode='nonsense'),'growth_mode'), (dict(redistribution_mode='x'),'redistribution_mode')])
def test_modes_of_sparselearning_that_are_elsewhere(kwargs, way):
    "An error names the way out"
    with pytest.raises(ValueError, match=way): masking_settings(**kwargs)
    with pytest.raises(ValueError, match='batches_per_update=100'): MagnitudePruneDecay(interval=100)
