"Targets and masks by magnitude, beside plain sorting"
import copy,math,numpy as np,pytest,torch
from fastsparse.all import *
from fastsparse.prune.magnitude import global_masks,layer_masks,plan_pruning,prune_by
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn
from torch.nn import functional as F

def net_of(seed=0): return mlp((8,12,6), seed=seed, act=nn.ReLU)

def data_of(n=40, seed=3, cols=8, outs=6):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, cols, generator=g)@torch.randn(cols, cols, generator=g),torch.randn(n, outs, generator=g)

@pytest.mark.parametrize('target,what', [(1.,r'1\.0.*\[0,1\)'), (-.1,r'-0\.1'), ('3:2','n is 3'), ('block 2x2','must be a fraction in'), ((.8,'2:4'),r'0\.8.*has a sparsity of 0\.5'), ((.5,'nonsense'),'nonsense'),
    ({'1':.5},"nothing to prune"), ({'*':None},'nothing to prune'), ('3:5',r'0\.weight: .*5'), ({'2':'5:5 flat'},r'2\.weight')])
def test_targets_refused(target, what):
    "Law 10: value, range and way out, before anything changed, by every method"
    net,(x,y) = net_of(),data_of()
    state = copy.deepcopy(net.state_dict())
    methods = [prune_magnitude, partial(prune_snip, data=[(x,y)], loss_func=F.mse_loss), partial(prune_grasp, data=[(x,y)], loss_func=F.mse_loss),
        partial(prune_synflow, xb=x), partial(prune_wanda, data=[x]), partial(prune_sparsegpt, data=[x])]
    for f in methods:
        with pytest.raises(ValueError, match=what): f(net, target)
    assert state.keys()==net.state_dict().keys() and all(torch.equal(v, net.state_dict()[k]) for k,v in state.items())

def test_learned_masks_are_refused():
    net = net_of()
    learn_masks(net, seed=0)
    with pytest.raises(ValueError, match='fold_masks'): prune_magnitude(net, .8)

def test_rules():
    "The first rule that names a weight decides, by parameter or module; lm_head is dense unless a rule says otherwise"
    net = nn.ModuleDict(dict(body=net_of(), lm_head=nn.Linear(8,4)))
    assert [o.name for o in plan_pruning(net, .5)]==['body.0.weight','body.2.weight']
    assert [(o.name,o.sparsity,str(o.structure)) for o in plan_pruning(net, {'body.0':(.75,'block 2x2'), 'body':'1:4', '*':.5})]==[
        ('body.0.weight',.75,'block 2x2'), ('body.2.weight',.75,'1:4'), ('lm_head.weight',.5,'unstructured')]
    prune_magnitude(net, .5)
    assert net['lm_head'].weight.count_nonzero()==32 and net['lm_head'].weight_mask.all()

def test_counts_and_rankings():
    "Law 1: totals are exact by layer and over all layers; the best live"
    for ranking in (layer_masks, global_masks):
        net = net_of()
        flat = torch.cat([net[i].weight.detach().abs().flatten() for i in (0,2)]).numpy()
        prune_magnitude(net, .7, ranking)
        masks = masks_of(net)
        assert sum(int(m.sum()) for m in masks)==round(.3*168)
        if ranking is layer_masks: assert [int(m.sum()) for m in masks] in ([29,21],[28,22])
        else: assert set(np.flatnonzero(torch.cat([m.flatten() for m in masks])))==set(oracle_order(flat, np.ones(168, bool))[:50])
        assert_dead(net)

def best_nm(w, n, m):
    "The best pattern of each block by sorting, rows of a matrix, the last block shorter"
    mask = np.zeros(w.shape, bool)
    for r,row in enumerate(w):
        for i in range(0, len(row), m):
            for j in oracle_order(np.abs(row[i:i+m]), np.ones(len(row[i:i+m]), bool))[:n]: mask[r,i+j] = True
    return mask

specials = st.sampled_from([0.,1.,-1.,2.,float('inf'),-float('inf'),float('nan')])

@given(st.data(), st.integers(1,4), st.integers(0,3), st.sampled_from([(3,2),(2,3,2),(2,1,2,2),(1,2,1,1,2)]), st.booleans())
@settings(max_examples=40)
def test_nm_against_sorting(data, n, more, shape, flat):
    "Any N:M, Linear and Conv1-3d, along input channels or flattened, padded or not: ties to the lowest index, infinities live, NaN last"
    m = n+more
    pad = data.draw(st.booleans())
    if not pad: shape = (shape[0], shape[1]*m, *shape[2:])
    size = math.prod(shape)
    w = torch.tensor(data.draw(st.lists(st.floats(-3,3,width=32)|specials, min_size=size, max_size=size))).view(shape)
    layer = [nn.Linear,nn.Conv1d,nn.Conv2d,nn.Conv3d][len(shape)-2](shape[1], shape[0], *([shape[2:]] if len(shape)>2 else []), bias=False)
    with torch.no_grad(): layer.weight.copy_(w)
    prune_magnitude(layer, f'{n}:{m}'+' flat'*flat+' pad'*pad)
    view = (lambda t: t.flatten(1)) if flat else (lambda t: t.movedim(1,-1).reshape(-1,shape[1]))
    assert np.array_equal(view(layer.weight_mask).numpy(), best_nm(view(w).numpy(), n, m))
    assert is_positive_zero(layer.weight[~layer.weight_mask])

@pytest.mark.parametrize('block,kept', [([1.,math.inf,3.,2.],[0,1,1,0]), ([5.,5.,5.,5.],[1,1,0,0]), ([math.nan,1.,math.nan,0.],[0,1,0,1]), ([-4.,3.,-3.,0.],[1,1,0,0])])
def test_asp_by_hand(block, kept):
    "The infinity lives, NaN doesn't, ties go to the lowest index"
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([block]))
    prune_magnitude(layer, '2:4')
    assert layer.weight_mask.int().tolist()==[kept]

def test_large_groups_are_not_enumerated():
    "16 of 64 has 5e14 patterns, and takes a sort"
    layer = nn.Linear(256, 8, bias=False)
    w = layer.weight.detach().numpy().copy()
    prune_magnitude(layer, '16:64')
    assert np.array_equal(layer.weight_mask.numpy(), best_nm(w, 16, 64))

def test_scores_of_ones_own():
    "A function or a dict; wrong shapes and missing names are refused"
    net = net_of()
    with pytest.raises(KeyError, match='2.weight'): prune_by(net, {'0.weight':net[0].weight}, .5)
    with pytest.raises(ValueError, match='shape'): prune_by(net, lambda p: p[:1], .5)
    prune_by(net, lambda p: torch.arange(p.numel()).view(p.shape), '2:4')
    big = nn.Linear(300, 300)
    prune_by(big, lambda p: p*p, .5)  # a score with a history
    assert big.weight_mask.sum()==45000
    assert net[0].weight_mask[0].tolist()==[False,False,True,True]*2

def legal_along(mask, axis):
    "Do two of every four places along `axis` live?"
    return bool((np.moveaxis(mask.numpy(), axis, -1).reshape(-1,4).sum(1)==2).all())

@pytest.mark.parametrize('layer', [nn.ConvTranspose1d(8,12,3), nn.ConvTranspose2d(8,6,2), nn.ConvTranspose2d(8,8,2,groups=2)])
def test_two_of_four_lie_along_the_inputs_of_transposed_convolutions(layer):
    "Their inputs are dimension 0 of the weight; axis 0, outputs, is dimension 1; flat stays"
    net = nn.Sequential(copy.deepcopy(layer))
    prune_magnitude(net, '2:4')
    w,mask = layer.weight.detach().movedim(0, -1).reshape(-1,4).abs().numpy(),net[0].weight_mask
    assert legal_along(mask, 0)
    assert all(set(np.flatnonzero(m))==set(oracle_order(s, np.ones(4, bool))[:2]) for s,m in zip(w, mask.movedim(0, -1).reshape(-1,4).numpy()))
    assert str(plan_pruning(nn.Sequential(layer), '2:4')[0].structure)=='2:4'
    assert [o.structure for o in plan_pruning(nn.Sequential(nn.Conv2d(8,4,2), nn.Linear(8,4)), '2:4')]==[as_structure('2:4')]*2
    if layer.weight.shape[1]%4==0:
        net = nn.Sequential(copy.deepcopy(layer))
        prune_magnitude(net, '2:4 axis 0')
        assert legal_along(net[0].weight_mask, 1)

class Bag(nn.Module):
    "Four experts in one parameter, and the mean of what they say"
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4,16,8, generator=torch.Generator().manual_seed(0)))
    def forward(self, x): return torch.einsum('eoi,bi->bo', self.up, x)/4

def bagged(): return nn.Sequential(nn.Linear(8,8), nn.ReLU(), Bag(), nn.ReLU(), nn.Linear(16,4))
def live_of(m): return {k:int(v.sum()) for k,v in m.state_dict().items() if k.endswith('_mask')}

def test_also_with_structures_and_rules():
    "Structures go by expert, and rules may name what also= brings in"
    m = bagged()
    prune_magnitude(m, {'2.up':'2:4'}, also=Bag)
    assert (m[2].up_mask.view(4,16,2,4).sum(-1)==2).all() and m[0].weight_mask.all()
    with pytest.raises(ValueError, match='also= brings in others'), pytest.warns(UserWarning): prune_magnitude(bagged(), {'2.up':.5})

def test_a_goal_answers_for_its_weight():
    "What a ranking or a solver of one's own sees: the weight as everywhere else, and what is wanted of it"
    goal = plan_pruning(bagged(), '2:4', also='*.up')[1]
    assert (goal.name,goal.attr,goal.p.shape,goal.sparsity,goal.free)==('2.up','up',(4,16,8),.5,False) and goal.masked.p is goal.p

further = dict(magnitude=prune_magnitude, wanda=partial(prune_wanda, data=[torch.randn(40,16, generator=torch.Generator().manual_seed(0))]))
further |= {k:partial(f, data=further['wanda'].keywords['data']) for k,f in dict(sparsegpt=prune_sparsegpt, refit=prune_refit).items()}

@pytest.mark.parametrize('f', further.values(), ids=further)
def test_a_sparse_model_is_pruned_further(f):
    "What was dead stays dead, with exact counts; from any mask to one with at most two of four; a lower sparsity is refused, and nothing changed"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16,12), nn.ReLU(), nn.Linear(12,8))
    for target,n in ((.7, round(.3*(16*12+12*8))), (.9, round(.1*(16*12+12*8)))):
        was = [w.mask.clone() if hasattr(w.module, 'weight_mask') else None for w in masked_params(net)]
        f(net, target)
        assert sum(int(w.mask.sum()) for w in masked_params(net))==n
        assert not was or all(not (w.mask & ~m).any() for w,m in zip(masked_params(net), was))
        assert_dead(net)
    values = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match='take a higher sparsity'): f(net, .5)
    assert all(map(torch.equal, values, net.parameters()))
    net = nn.Sequential(nn.Linear(16,12), nn.ReLU(), nn.Linear(12,8))
    f(net, .3)
    was = [w.mask.clone() for w in masked_params(net)]
    f(net, '2:4')
    for w,m in zip(masked_params(net), was): assert w.mask.view(-1,4).sum(1).max()==2 and not (w.mask & ~m).any()
    opt = torch.optim.Adam(net.parameters())
    for _ in range(3):
        net(torch.randn(5,16)).square().sum().backward()
        opt.step()
    assert_dead(net)

def test_layers_that_are_sparser_stay():
    "Others keep what they leave, so that the total is exact; one without a mask gets one; the sparsity that is there changes nothing"
    net = nn.Sequential(nn.Linear(10,10), nn.Linear(10,10), nn.Linear(10,10))
    prune_magnitude(net, {'0':.9, '1':.2, '2':None})
    prune_magnitude(net, .5)
    assert [int(m.weight_mask.sum()) for m in net]==[10,65,75]  # the 40 that the first leaves, by the room of the others: 30 and 50
    masks = masks_of(net)
    prune_magnitude(net, .5)
    assert same_masks(masks, masks_of(net))

def test_rankings_by_name():
    a,b = net_of(),net_of()
    prune_magnitude(a, .8, 'global')
    prune_magnitude(b, .8, global_masks)
    assert same_masks(masks_of(a), masks_of(b))
    with pytest.raises(ValueError, match="'layer', 'global'"): prune_magnitude(net_of(), .8, 'nonsense')

@pytest.mark.parametrize('kw,pruned', [({}, False), (dict(also='lm_head.weight'), True), (dict(chosen='*'), True), (dict(chosen=nn.Linear), True), (dict(chosen='lm_head'), True)])
def test_a_head_is_pruned_if_it_is_named(kw, pruned):
    "By default the head of a language model stays dense, and a warning says so"
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.lm_head = nn.Linear(8,8),nn.Linear(8,20)
    net = Tiny()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        prune_magnitude(net, .5, **kw)
    assert bool(net.lm_head.weight.eq(0).any())==pruned and any('lm_head.weight stays dense' in str(w.message) for w in said)!=pruned
