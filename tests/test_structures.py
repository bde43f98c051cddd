"Structures, starting masks and mask builders, against plain loops over indices: units are whole, groups are equal, counts are exact"
import copy, itertools, math, numpy as np, pickle, pytest, re, torch, weakref
from fastai.basics import DataLoader,DataLoaders,Learner,MSELossFlat
from fastai.callback.schedule import *
from fastsparse.compat.cerebras import mask_grow_maximum,mask_topk
from fastsparse.masks import structures
from fastsparse.all import *
from fastsparse.masks.selection import count_live,highest,keyed_generator,lowest,n_live,put_
from fastsparse.weights.weight import masked_params
from fastsparse.masks.structures import as_structure,Block,FanIn,InputGroups,Kernels
from fastsparse.masks.starts import checkerboard,masks_like
from fastsparse.masks.structures import NM,OutputChannels,OutputGroups,TransposableNM,Unstructured
from functools import partial
from helpers import *
from hypothesis import assume,given,settings,strategies as st
from torch import nn

some = settings(max_examples=60, deadline=None)

# --- an oracle: which unit of which group an index belongs to, structure by structure

def flat_inputs(i, s): return int(np.ravel_multi_index(i[1:], s[1:]))

homes = {'unstructured': lambda i,s: ((), i), 'fan-in': lambda i,s: (i[0], i[1:]), 'kernels': lambda i,s: ((), i[:2]), 'kernels l2': lambda i,s: ((), i[:2]),
    '2:4': lambda i,s: ((i[0],i[1]//4,*i[2:]), i[1]), '2:4 pad': lambda i,s: ((i[0],i[1]//4,*i[2:]), i[1]), '1:3 axis 0': lambda i,s: ((i[0]//3,*i[1:]), i[0]),
    '3:8 flat': lambda i,s: ((i[0],flat_inputs(i, s)//8), flat_inputs(i, s)), '2:5 flat pad': lambda i,s: ((i[0],flat_inputs(i, s)//5), flat_inputs(i, s)),
    '1:2 axis 2': lambda i,s: ((*i[:2],i[2]//2,*i[3:]), i[2]), 'output groups 3': lambda i,s: (i[0]//(s[0]//3), i), 'input groups 2': lambda i,s: (i[1]//(s[1]//2), i),
    'block 2x3': lambda i,s: ((), (i[0]//2,i[1]//3)), 'block 2x3 max': lambda i,s: ((), (i[0]//2,i[1]//3)),
    'output channels min': lambda i,s: ((), i[0]), 'input channels': lambda i,s: ((), i[1])}

shapes = {'unstructured':[(7,),(3,5),(2,3,2,2),(0,3)], '2:4':[(3,8),(2,4,3),(2,8,1,2),(1,4)], '2:4 pad':[(3,6),(2,5,2,2),(2,3),(1,1),(2,8)],
    '1:3 axis 0':[(6,4),(3,2,2)], '3:8 flat':[(3,8),(2,4,2,2)], '2:5 flat pad':[(3,7),(2,3,2,2)], '1:2 axis 2':[(2,3,4),(2,2,2,3)], 'fan-in':[(4,6),(3,2,2,2),(1,5)],
    'output groups 3':[(6,4),(3,),(3,2,2,2)], 'input groups 2':[(3,4),(2,4,3),(1,2,2,2)], 'block 2x3':[(4,6),(2,3,2,2),(2,9)], 'block 2x3 max':[(4,6),(2,6,1,2)],
    'kernels':[(3,4,2,2),(3,4)], 'kernels l2':[(3,4,2,2)], 'output channels min':[(5,3),(4,2,3)], 'input channels':[(3,5),(2,4,2,2)]}
cases = [(t,s) for t in shapes for s in shapes[t]]
reductions = dict(mean=np.mean, max=np.max, min=np.min, l2=lambda v: math.sqrt(sum(v*v)))

def groups_of(text, shape):
    "Lists of units, which are lists of row-major indices; units in the order of their first index"
    found = {}
    for flat,i in enumerate(np.ndindex(*shape)):
        g,u = homes[text](i, shape)
        found.setdefault(g, {}).setdefault(u, []).append(flat)
    return [list(g.values()) for g in found.values()]

def unit_score(text, score, unit):
    v = score.reshape(-1)[unit].astype(float)
    if not text.startswith(('block','kernels','output channels','input channels')): return v[0]
    words = text.split()
    return float(reductions[words[-1] if words[-1] in reductions else 'mean'](np.abs(v)))

def ranked(text, score, units):
    "`units`, the best first: NaN last, ties to the lowest index"
    scores = [unit_score(text, score, u) for u in units]
    return [units[i] for i in sorted(range(len(units)), key=lambda i: (math.isnan(scores[i]), 0 if math.isnan(scores[i]) else -scores[i], units[i][0]))]

def least(text): return int(text[0]) if ':' in text else 0
def counts(text, shape):
    "How many live for each number of units in a group"
    gs = groups_of(text, shape)
    most = int(text[2]) if ':' in text else max([len(g) for g in gs], default=0)
    return {k: sum(len(u) for g in gs for u in g[:k]) for k in range(least(text), most+1)}

def as_bool(indices, shape):
    mask = np.zeros(math.prod(shape), bool)
    mask[sorted(indices)] = True
    return mask.reshape(shape)

def oracle_top(text, score, k): return as_bool([i for g in groups_of(text, score.shape) for u in ranked(text, score, g)[:k] for i in u], score.shape)

def oracle_move(text, mask, keep, grow, n_drop, k):
    "The prose, in loops: `keep` and `grow` are arrays, `grow` may be None"
    gs,live = groups_of(text, mask.shape),set(np.flatnonzero(mask).tolist())
    units = [[u for u in g if set(u)&live] for g in gs]
    E = len(gs[0][0])
    if (':' in text or text=='fan-in') and grow is not None:
        order = [u for u in ranked(text, keep, sorted(u for g in units for u in g))]
        stay = {u[0] for u in order[:len(order)-n_drop]}
        kept = [[u for u in ranked(text, keep, g) if u[0] in stay][:k] for g in units]
    else: kept = [ranked(text, keep, g)[:max(0, min(k, len(g)-n_drop//E//max(sum(map(bool, units)), 1)))] for g in units]
    stay = {i for g in kept for u in g for i in u}
    dropped = live-stay
    if grow is None: return sorted(dropped),[]
    new = {i for g,have in zip(gs, kept) for u in have+ranked(text, grow, [u for u in g if u not in have])[:max(0, k-len(have))] for i in u}
    return sorted(dropped),sorted(new-(stay&live))

def some_scores(rng, shape):
    "Few values, so that there are ties"
    return rng.choice([0., -0., 1., 2., 2., -2., 3., .5, 5., math.inf, -math.inf, math.nan], size=shape)

def some_mask(rng, text, shape, k, kind):
    if kind=='dense': return np.ones(shape, bool)
    return rng.random(shape)<.5 if kind=='random' else oracle_top(text, rng.random(shape), k)

def layouts(t):
    "`t` in other memory formats"
    yield t
    if t.ndim==4: yield t.to(memory_format=torch.channels_last)
    if t.ndim>1: yield t.transpose(0,-1).contiguous().transpose(0,-1)

def after(mask, dropped, grown): return put_(put_(mask.clone(), dropped, False), grown, True)

# --- counts, choices and updates against the oracle

@pytest.mark.parametrize('text,shape', cases)
def test_counts(text, shape):
    "Law 1: the nearest legal count, the smaller of two equally near, for every budget; all alive is always legal, and N:M never falls below N"
    s,by_k = as_structure(text),counts(text, shape)
    legal,total = sorted(set(by_k.values())),math.prod(shape)
    assert s.count(shape, total)==total
    low = total*(1-s.sparsity) if s.sparsity is not None else 0
    everything = sorted({*legal, *(sum(len(u) for g in groups_of(text, shape) for u in g[:k]) for k in range(least(text)))})
    for n in range(total+1):
        near = min(everything, key=lambda c: (abs(c-n), c))
        if near<legal[0] and n<=low-1:
            with pytest.raises(ValueError, match='keeps at least'): s.count(shape, n)
        else: assert s.count(shape, n)==max(near, legal[0])

@some
@given(case=st.sampled_from(cases), seed=st.integers(0,10**6), dtype=st.sampled_from([torch.float,torch.double,torch.half,torch.bfloat16]), data=st.data())
def test_top(case, seed, dtype, data):
    "Law 1: exactly the best legal mask, with ties, infinities and NaN, for every dtype and memory format; it owns its memory and is legal"
    (text,shape),rng = case,np.random.default_rng(seed)
    s,by_k,score = as_structure(text),counts(text, shape),some_scores(rng, shape)
    k = data.draw(st.sampled_from(sorted(by_k)))
    for t in layouts(torch.from_numpy(score).to(dtype)):
        mask = s.top(t, by_k[k])
        assert mask.dtype==torch.bool and mask.is_contiguous() and np.array_equal(mask.numpy(), oracle_top(text, score, k))
        assert s.legal(mask) and all(s.legal(m) for m in layouts(mask))
        put_(mask, torch.arange(min(1, mask.numel())), False)

@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from([c for c in cases if math.prod(c[1])]), seed=st.integers(0,10**6), kind=st.sampled_from(['legal','dense','random']), grows=st.booleans(), data=st.data())
def test_move(case, seed, kind, grows, data):
    "Law 2: dropped were live, grown were not kept, exactly `n` live, legal, as the plain loops say, from legal, dense and random masks"
    (text,shape),rng = case,np.random.default_rng(seed)
    s,by_k = as_structure(text),counts(text, shape)
    draw_k = lambda: data.draw(st.sampled_from(sorted(by_k)))
    k0,k = draw_k(),draw_k()
    before,keep,grow = torch.from_numpy(some_mask(rng, text, shape, k0, kind)),some_scores(rng, shape),some_scores(rng, shape)
    live,n = int(before.sum()),by_k[k]
    n_drop = data.draw(st.integers(0, live))
    assume(kind!='random' or n_drop or n!=live)
    E = len(groups_of(text, shape)[0][0])
    expect = oracle_move(text, before.numpy(), keep, grow if grows else None, n_drop//E if ':' in text or text=='fan-in' else n_drop, k)
    for mask in layouts(before):
        now = mask.clone()
        dropped,grown = s.move(mask, lambda: torch.from_numpy(keep), (lambda _: torch.from_numpy(grow)) if grows else None, n_drop, n)
        assert dropped.dtype==grown.dtype==torch.long and torch.equal(mask, now)
        assert (dropped.tolist(),grown.tolist())==expect
        new = after(mask, dropped, grown)
        if grows: assert int(new.sum())==n and s.legal(new)
        elif kind!='random': assert int(new.sum())<=n

@pytest.mark.parametrize('text,shape', cases)
def test_dense_to_sparse_and_back(text, shape):
    "A schedule may begin dense and go down and up again: every legal count is reached exactly from every other, through legal masks"
    s,rng = as_structure(text),np.random.default_rng(0)
    mask = torch.ones(shape, dtype=torch.bool)
    for n in [*sorted(counts(text, shape).values(), reverse=True), *sorted(counts(text, shape).values())]:
        keep,grow = [torch.from_numpy(rng.random(shape)) for _ in range(2)]
        mask = after(mask, *s.move(mask, lambda: keep, lambda _: grow, int(mask.sum())//3, n))
        assert int(mask.sum())==n and s.legal(mask)

@pytest.mark.parametrize('text,shape', [c for c in cases if math.prod(c[1])]+[('transposable 2:4',(4,8))])
def test_scores_are_made_when_needed(text, shape):
    "Each score is made at most once, the keep score first, and none where nothing moves"
    s,made = as_structure(text),[]
    def score(name):
        made.append(name)
        return torch.rand(shape)
    dense = torch.ones(shape, dtype=torch.bool)
    total = dense.numel()
    n = s.count(shape, total*2//3)
    mask = s.top(torch.rand(shape), n)
    empty = s.move(mask, lambda: score('keep'), lambda _: score('grow'), 0, n)
    assert not made and not len(empty[0]) and not len(empty[1]) and empty[0].dtype==torch.long
    s.move(dense, lambda: score('keep'), lambda _: score('grow'), 0, n)
    assert made==['keep'] if n<total else not made
    made.clear()
    s.move(mask, lambda: score('keep'), lambda _: score('grow'), 0, total)
    assert made==['grow'] if n<total else not made
    made.clear()
    s.move(mask, lambda: score('keep'), lambda _: score('grow'), n, n)
    assert made in (['keep','grow'], ['keep'] if n==0 else ['keep','grow'])

@pytest.mark.parametrize('text', ['unstructured','2:4','fan-in','block 2x4'])
def test_refusals_of_move_and_top(text):
    "Law 10: counts that are not legal and drops that are not there are refused by name"
    s,mask = as_structure(text),torch.ones(4,8).bool()
    with pytest.raises(ValueError, match='n_drop is 33.* from 0 to 32'): s.move(mask, None, None, 33, 16)
    with pytest.raises(ValueError, match='33'): s.count((4,8), 33)
    with pytest.raises(ValueError, match='-1'): s.count((4,8), -1)
    with pytest.raises(ValueError, match='count'): s.top(torch.rand(4,8), 33)
    if text!='unstructured':
        with pytest.raises(ValueError, match=r'not legal.*count'): s.top(torch.rand(4,8), 15)
        with pytest.raises(ValueError, match=r'not legal.*count'): s.move(mask, None, None, 0, 17)

@pytest.mark.parametrize('text,shape', [('2:4',(4,6)),('2:4',(6,)),('2:4 axis 0',(6,4)),('2:4 axis 2',(4,4)),('2:4 flat',(4,3,3,3)),('transposable 2:4',(4,6)),('transposable 2:4',(6,4)),('fan-in',(8,)),
    ('block 2x3',(4,4)),('block 2x3',(3,6)),('block 2x3',(6,)),('kernels',(6,)),('output channels',(6,)),('input channels',(6,)),('output groups 4',(6,4)),('output groups 4',()),('input groups 4',(4,6)),('input groups 4',(4,))])
def test_shapes_that_do_not_fit(text, shape):
    "Law 10: a shape that a structure doesn't divide is refused by check, count, top and move, with the shape and a way out (elsewhere padding is a dead path, or fails inside a reshape)"
    s = as_structure(text)
    for f in (lambda: s.check(torch.Size(shape)), lambda: s.count(shape, 0), lambda: s.top(torch.zeros(shape), 0), lambda: s.legal(torch.ones(shape).bool())):
        with pytest.raises(ValueError) as e: f()
        assert str(tuple(shape)) in str(e.value) and ('leave' in str(e.value)) and text in str(e.value)
    if text=='2:4': assert '2:4 pad' in str(e.value)

def test_vectors_have_one_axis():
    "A vector's N:M is that of its only axis, whichever of outputs and inputs is named; '-1' is the last axis of any tensor; 0:M is dead"
    score = torch.tensor([4.,1,3,2,1,2,3,4])
    for text in ('2:4','2:4 axis 0','2:4 axis -1','2:4 flat'): assert as_structure(text).top(score, 4).int().tolist()==[1,0,1,0,0,0,1,1]
    with pytest.raises(ValueError, match='3 or more dimensions'): as_structure('2:4 axis 2').check((8,))
    x = torch.rand(2,3,8)
    assert torch.equal(as_structure('2:4 axis -1').top(x, 24), as_structure('2:4 axis 2').top(x, 24))
    assert as_structure('0:4').count((2,4), 0)==0 and as_structure('0:4').sparsity==1

def blocks_of(mask, r, c):
    "Every block of a mask of two dimensions, those at the ends smaller, in plain loops"
    return [mask[i:i+r,j:j+c] for i in range(0, mask.shape[0], r) for j in range(0, mask.shape[1], c)]

@pytest.mark.parametrize('shape', [(5,7),(4,7),(5,8),(1,1),(3,3),(9,13)])
def test_padded_blocks(shape):
    "Smaller blocks at the ends are whole too; every count that is legal is met, by top, by move and by growing; all and none are legal"
    s,g = as_structure('block 2x4 pad'),torch.Generator().manual_seed(0)
    assert str(s)=='block 2x4 pad' and as_structure(str(s))==s
    legal = sorted({s.count(shape, n) for n in range(math.prod(shape)+1)})
    assert legal[0]==0 and legal[-1]==math.prod(shape)
    mask = None
    for n in legal:
        new = s.top(torch.rand(shape, generator=g), n)
        assert count_live(new)==n and s.legal(new) and all(b.all() or not b.any() for b in blocks_of(new, 2, 4))
        if mask is not None:
            dropped,grown = s.move(mask, lambda: torch.rand(shape, generator=g), lambda stay: torch.rand(shape, generator=g), count_live(mask)//2, n)
            moved = put_(put_(mask.clone(), dropped, False), grown, True)
            assert count_live(moved)==n and s.legal(moved) and all(b.all() or not b.any() for b in blocks_of(moved, 2, 4))
            assert count_live(mask_grow_maximum(torch.rand(shape, generator=g), mask, 1-n/math.prod(shape), s))==n
        assert count_live(checkerboard(torch.empty(shape), n, s))==n
        mask = new

def test_padding_is_asked_for():
    "Blocks that divide a weight are as without pad, and without it the error names it"
    s = as_structure('block 2x4 pad')
    assert s.count((3,6), 18)==18 and s.count((3,6), 0)==0
    assert s.top(torch.rand(4,8), 16).shape==(4,8)
    with pytest.raises(ValueError, match="'block 2x4 pad'"): as_structure('block 2x4').check((3,6))

@pytest.mark.parametrize('how', ['mean','max'])
@pytest.mark.parametrize('shape', [(4,4), (4,4,2), (4,6,3,3), (4,4,2,2,2)])
def test_blocks_hold_whole_kernels(shape, how):
    "jaxpruner's rule: a block's score is pooled over 2 outputs, 2 inputs and all positions of their kernels, and the best round((1-s)*blocks) live whole"
    score = np.random.default_rng(0).random(shape)
    pool = dict(mean=np.mean, max=np.max)[how]
    pooled = {(i,j): pool(score[2*i:2*i+2,2*j:2*j+2]) for i in range(shape[0]//2) for j in range(shape[1]//2)}
    best = sorted(pooled, key=pooled.get)[len(pooled)-round(.8*len(pooled)):]
    expected = np.zeros(shape, bool)
    for i,j in best: expected[2*i:2*i+2,2*j:2*j+2] = True
    assert torch.equal(mask_topk(torch.from_numpy(score), .2, f'block 2x2 {how}'), torch.from_numpy(expected))

def test_blocks_of_one_weight_are_kernels():
    score = torch.rand(4,6,3,3)
    assert torch.equal(mask_topk(score, .5, 'block 1x1'), mask_topk(score, .5, 'kernels'))

@pytest.mark.parametrize('text', ['block 2x2','block 3x4 pad'])
def test_padded_blocks_of_kernels(text):
    "Through top, updates and growth each kernel lives whole, and blocks too"
    s,shape = as_structure(text),(6,8,3,3) if 'pad' not in text else (7,10,3)
    whole = lambda m: torch.equal(m, m.flatten(2)[...,0].reshape(*m.shape[:2], *[1]*(m.ndim-2)).expand_as(m))
    flat = lambda m: m.flatten(2)[...,0]
    for wanted in (60, 120, 150):
        n = s.count(shape, wanted)
        mask = s.top(torch.rand(shape), n)
        assert count_live(mask)==n and whole(mask) and s.legal(mask)
        moved = after(mask, *s.move(mask, lambda: torch.rand(shape), lambda _: torch.rand(shape), n//3, n))
        assert count_live(moved)==n and whole(moved) and s.legal(moved)
        assert all(b.all() or not b.any() for b in blocks_of(flat(moved), s.rows, s.cols))

def test_blocks_in_vectors():
    "A block with a side of 1 lies along a vector"
    score = torch.tensor([1.,1,5,5,2,2,9])
    assert as_structure('block 1x2').top(score[:6], 4).int().tolist()==[0,0,1,1,1,1]
    s = as_structure('block 2x1 pad')
    assert s.top(score, s.count((7,), 5)).int().tolist()==[0,0,1,1,1,1,1]
    with pytest.raises(ValueError, match='a side of 1'): as_structure('block 2x2').check((4,))

def test_a_structure_may_bring_its_sparsity():
    "'top .25' is any mask, and a sparsity of .75"
    assert as_structure('top .25').sparsity==.75 and as_structure('unstructured').sparsity is None
    m = nn.Linear(8,8)
    sparsify_model(m, .75, structure='top .25')
    assert count_live(m.weight_mask)==16
    with pytest.raises(ValueError, match='has a sparsity of 0.75'): sparsify_model(nn.Linear(8,8), .5, structure='top .25')

# --- axes that lie elsewhere

turned_texts = ['unstructured','2:4','2:4 axis 0','2:4 pad','2:4 flat','transposable 2:4','fan-in','fan-in ablate 0.3','block 2x4','kernels','output channels','input channels','output groups 2','input groups 2']

@pytest.mark.parametrize('text', turned_texts)
def test_inputs_first_is_the_transpose(text):
    "With inputs first, masks, counts and moves are those of the transposed weight"
    s,p = as_structure(text),torch.rand(8,4,3)
    turned,t = s.for_axes((1,0,None)),p.transpose(0,1).contiguous()
    n = s.count(t.shape, 48)
    assert turned.count(p.shape, 48)==n and str(turned)==text
    mask = turned.top(p, n)
    assert torch.equal(mask, s.top(t, n).transpose(0,1)) and turned.legal(mask) and mask.is_contiguous()
    grow = torch.rand(8,4,3)
    places = turned.move(mask, lambda: p, lambda stay: grow, 12, n)
    theirs = s.move(mask.transpose(0,1).contiguous(), lambda: t, lambda stay: grow.transpose(0,1), 12, n)
    flat = torch.arange(96).view(8,4,3).transpose(0,1).flatten()
    for ours,o in zip(places, theirs): assert ours.tolist()==sorted(flat[o].tolist())

@pytest.mark.parametrize('axes', [(1,2,0),(2,1,0),(0,1,2)])
@pytest.mark.parametrize('text', [o for o in turned_texts if o not in ('unstructured','fan-in ablate 0.3')])
def test_experts_keep_to_themselves(text, axes):
    "Each expert's mask is legal alone; where groups are equal it is the one that the expert would have had alone"
    s,shape = as_structure(text),[0,0,0]
    for k,n in zip(axes, (8,4,3)): shape[k] = n
    p,turned = torch.rand(shape),s.for_axes(axes)
    n = turned.count(p.shape, 48)
    mask = turned.top(p, n)
    assert count_live(mask)==n and turned.legal(mask)
    alone = [(o.permute(*sorted((0,1), key=lambda k: axes[k])) if axes[0]>axes[1] else o) for o in mask.unbind(axes[2])]
    assert all(s.legal(o.contiguous()) for o in alone)
    if s.layout((8,4))[-1][0]>1:
        scores = [o.T if axes[0]>axes[1] else o for o in p.unbind(axes[2])]
        for m,o in zip(alone, scores): assert torch.equal(m, s.top(o.contiguous(), s.count((8,4), 16)))

def test_usual_axes_cost_nothing():
    "The usual axes, and structures without axes, are served by the structure itself"
    for text,axes in (('2:4',(0,1,None)),('unstructured',(1,2,0)),('unstructured',(1,0,None))):
        s = as_structure(text)
        assert s.for_axes(axes) is s
    with pytest.raises(ValueError, match=r'\(8, 4\)'): as_structure('2:4').for_axes((1,2,0)).check((8,4))
    with pytest.raises(ValueError, match=r'outputs first'): as_structure('2:4').for_axes((1,0,None)).check((6,4))

# --- unstructured

def test_unstructured_is_the_selection_of_masks():
    "The common case is `lowest` and `highest` and nothing else; the keep score is gone before the grow score is made"
    g = torch.Generator().manual_seed(0)
    w,grad,mask = torch.randn(300,400, generator=g),torch.randn(300,400, generator=g),torch.rand(300,400, generator=g)<.3
    live,held = int(mask.sum()),[]
    def keep():
        score = w.abs()
        held.append(weakref.ref(score))
        return score
    def grow(stay):
        assert held[0]() is None
        return grad.abs()
    for n in (live, live-5000, live+5000):
        held.clear()
        dropped,grown = Unstructured().move(mask, keep, grow, 1000, n)
        assert torch.equal(dropped, lowest(w.abs(), max(1000, live-n), among=mask))
        assert torch.equal(grown, highest(grad.abs(), n-live+len(dropped), among=put_(~mask, dropped, True)))
    assert torch.equal(Unstructured().top(w, 12345), top_k_mask(w, 12345))

def test_live_zeros():
    "Trap 3: live weights that are zero are live; dead ones that are zero never enter a drop"
    w,mask = torch.zeros(2,4),torch.tensor([[1,1,1,0],[0,1,1,0]]).bool()
    for text in ('unstructured','2:4','fan-in','output groups 2'):
        dropped,grown = as_structure(text).move(mask, lambda: w, None, 2, 8)
        assert len(dropped)==2 and mask.take(dropped).all() and not len(grown)

# --- N:M

def test_two_to_four_like_asp():
    "The m4n2_1d pattern search keeps the two largest magnitudes of four consecutive inputs, in convolutions of input channels at each position"
    w = torch.randn(6,8,3,3, generator=torch.Generator().manual_seed(0))
    mask = as_structure('2:4').top(w.abs(), w.numel()//2)
    for o,h,v in itertools.product(range(6), range(3), range(3)):
        for c in (0,4):
            a = w[o,c:c+4,h,v].abs()
            best = max(itertools.combinations(range(4), 2), key=lambda p: a[list(p)].sum())
            assert mask[o,c:c+4,h,v].nonzero().view(-1).tolist()==list(best)

def test_infinity_wins_and_nan_loses_in_a_group():
    "Trap 13: a product with a pattern makes `inf*0` NaN and drops the infinity"
    assert as_structure('2:4').top(torch.tensor([[1.,math.inf,3,2],[math.nan,1,math.nan,math.nan]]), 4).int().tolist()==[[0,1,1,0],[1,1,0,0]]

def test_large_m_is_quick():
    "Trap 13: no enumeration of M! patterns"
    w = torch.rand(64,64)
    assert (as_structure('16:32').top(w, 2048).view(-1,32).sum(1)==16).all() and (as_structure('32:64').top(w, 2048).sum(1)==32).all()

def test_srigl_refills_each_group():
    "arXiv:2305.02299: the lowest go across the layer, then each group is full again; a group that lost nothing keeps all"
    w = torch.tensor([[9.,8,0,0,1,2,0,0],[7,6,0,0,3,4,0,0]])
    dropped,grown = as_structure('2:4').move(w!=0, lambda: w, lambda _: 10-w, 3, 8)
    assert (dropped.tolist(),grown.tolist())==([4,5,12],[6,7,14])

# --- units

def test_signed_means():
    "Trap 13: a kernel whose signed mean is zero is the largest here; magnitudes are taken first, whatever the reduction"
    w = torch.tensor([[5.,-5,5,-5],[1,1,1,1],[-2,-2,-2,-2]]).view(3,1,2,2)
    for how in ('mean','max','min','l2'): assert Kernels(how).top(w, 8).flatten(1).any(1).tolist()==[True,False,True]
    assert Kernels(lambda x: x.mean(-1)).top(w, 8).flatten(1).any(1).tolist()==[True,True,False]

def test_reductions_differ():
    "Mean, highest, lowest and norm of two units, by hand: (0,6) and (4,4) and (3,3)"
    w = torch.tensor([[0.,6],[4,4],[3,3]])
    best = {how: OutputChannels(how).top(w, 2).any(1).nonzero().item() for how in ('mean','max','min','l2')}
    assert best==dict(mean=1, max=0, min=1, l2=0)
    assert OutputChannels('mean').top(w, 4).any(1).tolist()==[True,True,False]

def test_reductions_take_what_they_name():
    "A reduction gets the scores as groups by units by entries, and the structure if it names it or takes all; builtins and partials work"
    w,seen = torch.tensor([[0.,6],[4,4],[3,3]]),[]
    def by_name(x, structure): return seen.append((x.shape, structure)) or x.amin(-1)
    def by_all(x, **kwargs): return seen.append((x.shape, kwargs['structure'])) or x.amin(-1)
    def by_word(x, *, structure=None): return seen.append((x.shape, structure)) or x.amin(-1)
    for f in (by_name, by_all, by_word):
        s = OutputChannels(f)
        assert s.top(w, 2).any(1).tolist()==[False,True,False] and seen.pop()==((1,3,2), s)
    for f in (lambda x: x.amin(-1), lambda x, dim=-1: x.amin(dim), partial(torch.amin, dim=-1)):
        assert OutputChannels(f).top(w, 2).any(1).tolist()==[False,True,False]

wrong_reductions = [(lambda x: x, None), (lambda x: x.sum(), '()'), (lambda x: x.mean(0), None), (lambda x: 1., 'a float'),
    (lambda x: x.mean(-1, keepdim=True), None)]

@pytest.mark.parametrize('text', ['kernels','output channels','input channels','block 2x2'])
@pytest.mark.parametrize('f,got', wrong_reductions)
def test_bad_reductions(text, f, got):
    "A reduction of the wrong shape is one error with the shape that came, the shape wanted and the fix, in choosing and in an update"
    score = torch.rand(4,6,2)
    s = type(as_structure(text))(*[2]*2*(text=='block 2x2'), reduce=f)
    shape = tuple(s.split(score).shape)
    came = got or str(tuple(f(torch.rand(shape)).shape))
    mask = s.top(torch.zeros(4,6,2), 48)
    for act in (lambda: s.top(score, 24), lambda: s.move(mask, lambda: score, lambda _: score, 24, 24)):
        with pytest.raises(ValueError, match=re.escape(str(shape[:-1]))+r'.*x\.mean\(-1\)') as e: act()
        assert f'returned {came}' in str(e.value) or f'returned shape {came},' in str(e.value)

def test_whole_kernels_through_updates():
    "Kernels stay whole from the first mask through updates, with a random one as a start repaired"
    s,mask = Kernels(),torch.rand(6,5,3,3)<.2
    for i in range(4):
        mask = after(mask, *s.move(mask, lambda: torch.rand(6,5,3,3), lambda _: torch.rand(6,5,3,3), int(mask.sum())//3, 9*12))
        assert int(mask.sum())==9*12 and torch.equal(mask, mask[:,:,:1,:1].expand_as(mask))

@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_unit_scores_of_any_dtype(dtype):
    "Half precision doesn't overflow in a sum, and whole numbers have means"
    w = torch.zeros(3,64).to(dtype)
    w[1] = 1
    w[2,:40] = 1
    if dtype==torch.half: w = w*60000
    assert OutputChannels().top(w, 64).any(1).tolist()==[False,True,False]
    assert as_structure('fan-in').top(w, 3).nonzero().tolist()==[[0,0],[1,0],[2,0]]

# --- transposable, against all masks there are

def tile_masks(m, k):
    rows = [r for r in itertools.product((0,1), repeat=m) if sum(r)==k]
    return np.array([p for p in itertools.product(rows, repeat=m) if all(sum(c)==k for c in zip(*p))], bool)

def tiles_of(t, m=4): return t.reshape(t.shape[0]//m, m, t.shape[1]//m, m, -1).transpose(0,2,4,1,3).reshape(-1, m, m)

@pytest.mark.parametrize('m,k', [(4,2),(4,1),(4,3),(3,2),(2,1)])
@pytest.mark.parametrize('kind', ['normal','heavy','ties','scaled'])
def test_transposable_is_the_best(m, k, kind):
    "arXiv:2102.08124: exactly k in each row and column of each tile; not only half of the best sum, but the best of all masks"
    w = np.random.default_rng(0).normal(size=(6*m,5*m,2))
    w = dict(normal=w, heavy=np.exp(4*w), ties=w.round(), scaled=1e30*w)[kind]
    s = TransposableNM(k, m)
    mask = s.top(torch.from_numpy(w), w.size*k//m).numpy()
    x,v = tiles_of(mask, m),tiles_of(w, m)
    assert (x.sum(1)==k).all() and (x.sum(2)==k).all()
    best = np.max([(v*p).sum((1,2)) for p in tile_masks(m, k)], axis=0)
    assert np.allclose((v*x).sum((1,2)), best, rtol=1e-9, atol=1e-9*np.abs(w).max())
    assert s.legal(torch.from_numpy(mask)) and NM(k, m).legal(torch.from_numpy(mask)) and NM(k, m, axis=0).legal(torch.from_numpy(mask))

def test_transposable_large_tiles():
    "16 by 16 with one in each row is an assignment, which SciPy solves exactly; 4:8 is at least as good as any exchange of two places"
    from scipy.optimize import linear_sum_assignment
    g = np.random.default_rng(1)
    w = g.random((32,32))
    x = tiles_of(TransposableNM(1, 16).top(torch.from_numpy(w), 64).numpy(), 16)
    for xi,v in zip(x, tiles_of(w, 16)): assert math.isclose((v*xi).sum(), v[linear_sum_assignment(v, maximize=True)].sum(), rel_tol=1e-9)
    x,v = tiles_of(TransposableNM(4, 8).top(torch.from_numpy(w), 512).numpy(), 8),tiles_of(w, 8)
    assert (x.sum(1)==4).all() and (x.sum(2)==4).all()
    for xi,vi in zip(x, v):
        for a,b,c,d in itertools.product(range(8), repeat=4):
            if xi[a,b] and xi[c,d] and not xi[a,d] and not xi[c,b]: assert vi[a,b]+vi[c,d]>=vi[a,d]+vi[c,b]-1e-9

def test_transposable_specials():
    "Infinity wins, minus infinity loses, NaN loses to everything, also where all are equal or infinite"
    w = torch.rand(4,4)
    w[0,0] = w[1,1] = math.inf
    w[2,3] = w[3,3] = math.nan
    mask = TransposableNM(2,4).top(w, 8)
    assert mask[0,0] and mask[1,1] and not mask[2,3] and not mask[3,3]
    w = torch.rand(4,4)
    w[0] = torch.tensor([-math.inf,1.,math.nan,2.])
    assert TransposableNM(2,4).top(w, 8)[0].tolist()==[False,True,False,True]
    for v in (0., math.inf, -math.inf, math.nan): assert TransposableNM(2,4).legal(TransposableNM(2,4).top(torch.full((4,4), v), 8))

@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0,10**6), n_drop=st.integers(0,16), k0=st.sampled_from([2,3,4]), k=st.sampled_from([2,3,4]), grows=st.booleans())
def test_transposable_move(seed, n_drop, k0, k, grows):
    "The lowest go; of the rest the largest part that some legal mask holds stays, by number and then by sum; the best completion of it grows"
    g = np.random.default_rng(seed)
    s,(keep,grow) = TransposableNM(2,4),g.random((2,4,8))
    mask = s.top(torch.from_numpy(g.random((4,8))), 8*k0)
    dropped,grown = s.move(mask, lambda: torch.from_numpy(keep), (lambda _: torch.from_numpy(grow)) if grows else None, n_drop, 8*k)
    new = after(mask, dropped, grown)
    if not grows: k,n_drop = min(k, k0-n_drop//8),0
    left = mask.numpy().reshape(-1).copy()
    order = sorted(np.flatnonzero(left), key=lambda i: (keep.flat[i], -i))
    left[order[:n_drop]] = False
    for x,d,l,v,b in zip(*[tiles_of(t) for t in (new.numpy(), as_bool(dropped.tolist(), (4,8)), left.reshape(4,8), keep, grow)]):
        all_masks = tile_masks(4, k) if k else np.zeros((1,4,4), bool)
        held = max(((p&l).sum(), (v*(p&l)).sum()) for p in all_masks)
        kept = l&~d
        assert kept.sum()==held[0] and math.isclose((v*kept).sum(), held[1], rel_tol=1e-9)
        if not grows: continue
        best = max((b*(p&~kept)).sum() for p in all_masks if (p|~kept).all())
        assert any((x==p).all() for p in all_masks) and math.isclose((b*(x&~kept)).sum(), best, rel_tol=1e-9, abs_tol=1e-9)
    assert grows or not len(grown)

def test_transposable_repairs_and_fits_convolutions():
    "A random mask is repaired by an update, at each position of a kernel; the page's rules of count hold"
    s,mask = TransposableNM(2,4),torch.rand(8,4,3,3)<.5
    new = after(mask, *s.move(mask, lambda: torch.rand(8,4,3,3), lambda _: torch.rand(8,4,3,3), 10, 144))
    assert s.legal(new) and int(new.sum())==144 and s.legal(new.to(memory_format=torch.channels_last))
    assert [s.count((4,8), n) for n in (32,29,28,27,20,16,15,13)]==[32,32,24,24,16,16,16,16]
    with pytest.raises(ValueError, match='0.5 or less'): s.count((4,8), 12)
    with pytest.raises(ValueError, match='m is 33'): TransposableNM(2, 33)

# --- constant fan-in with ablation

def oracle_ablate(gamma, mask, keep, grow, n_drop, n):
    "arXiv:2305.02299, in loops: what an unstructured update would leave alive is salient"
    O,I = mask.shape
    order = lambda score,places: sorted(places, key=lambda i: (-score.flat[i], i))
    live = np.flatnonzero(mask).tolist()
    on = [o for o in range(O) if mask[o].any()]
    near = lambda rows: min(I, max(1, math.ceil(n/len(rows)-.5)))
    by_keep = order(keep, live)
    m = min(len(live)-n_drop, n)
    salient = by_keep[:m]
    salient = salient+order(grow, [i for i in range(mask.size) if i not in salient and i//I in on])[:n-m]
    each = [sum(i//I==o for i in salient) for o in range(O)]
    if n_drop: on = [o for o in on if each[o]>=max(1, gamma*near(on)-1e-9)] or [max(range(O), key=lambda o: (each[o], -o))]
    k,stay = near(on),by_keep[:len(live)-n_drop]
    kept = {o: [i for i in stay if i//I==o][:k] for o in on}
    new = np.zeros(mask.size, bool)
    for o in on: new[kept[o]+order(grow, [i for i in range(o*I, (o+1)*I) if i not in kept[o]])[:k-len(kept[o])]] = True
    return new.reshape(O, I)

@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0,10**6), gamma=st.sampled_from([0.,.3,.5,.9,1.]), shape=st.sampled_from([(4,5),(6,8),(1,4),(3,12)]), density=st.floats(.15,.9))
def test_ablation(seed, gamma, shape, density):
    "Five updates as the loops say: ablated outputs stay dead, one always remains, the others have equal fan-in and a count as near `n` as that allows"
    rng = np.random.default_rng(seed)
    s = FanIn(ablate=gamma)
    n = max(s.count(shape, round(density*math.prod(shape))), shape[0])
    mask = s.top(torch.from_numpy(rng.random(shape)), n)
    for _ in range(5):
        keep,grow = rng.random(shape)*rng.random((shape[0],1))**3,rng.random(shape)*rng.random((shape[0],1))**3
        n_drop = int(.4*int(mask.sum()))
        dropped,grown = s.move(mask, lambda: torch.from_numpy(keep), lambda _: torch.from_numpy(grow), n_drop, n)
        new = after(mask, dropped, grown)
        if n_drop: assert np.array_equal(new.numpy(), oracle_ablate(gamma, mask.numpy(), keep, grow, n_drop, n))
        assert s.legal(new) and new.any() and not (new.any(1)&~mask.any(1)).any()
        assert mask.view(-1)[dropped].all() and not after(mask, dropped, grown[:0]).view(-1)[grown].any()
        mask = new

def test_ablation_by_hand():
    "Four outputs, fan-in 2, γ=.9: two of the eight are dropped, all of the last output; its budget makes the others' fan-in round(8/3)=3"
    s = FanIn(ablate=.9)
    w = torch.tensor([[9.,8,0,0,0],[9,8,0,0,0],[9,8,0,0,0],[1,2,0,0,0]])
    grad = torch.tensor([[0.,0,5,6,1],[0,0,1,1,1],[0,0,1,2,1],[0,0,0,0,0]])
    dropped,grown = s.move(w!=0, lambda: w, lambda _: grad, 2, 8)
    new = after(w!=0, dropped, grown)
    assert new.int().tolist()==[[1,1,0,1,0],[1,1,1,0,0],[1,1,0,1,0],[0]*5]
    assert s.legal(new) and not FanIn().legal(new) and s.count((4,5), 8)==8
    assert [len(o) for o in s.move(new, None, None, 0, 8)]==[0,0]
    dropped,grown = s.move(new, lambda: torch.ones(4,5), lambda _: torch.ones(4,5), 0, 12)
    assert after(new, dropped, grown).int().tolist()==[[1,1,1,1,0]]*3+[[0]*5]
    dropped,grown = s.move(new, lambda: torch.rand(4,5), None, 3, 9)
    assert after(new, dropped, grown).sum(1).tolist()==[2,2,2,0] and not len(grown)

def test_ablation_of_convolutions():
    "Fan-in counts kernels' weights; a channels_last mask gives the same"
    g = torch.Generator().manual_seed(0)
    s,keep,grow = FanIn(.5),torch.rand(6,4,3,3, generator=g)*torch.arange(6).view(6,1,1,1),torch.rand(6,4,3,3, generator=g)*torch.arange(6).view(6,1,1,1)
    mask = s.top(torch.rand(6,4,3,3, generator=g), 60)
    a = s.move(mask, lambda: keep, lambda _: grow, 20, 60)
    b = s.move(mask.to(memory_format=torch.channels_last), lambda: keep, lambda _: grow, 20, 60)
    new = after(mask, *a)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and 0<new.flatten(1).any(1).sum()<6 and s.legal(new)

# --- text

texts = ['unstructured','2:4','2:4 axis 0','1:4 axis 2 pad','2:4 flat','4:8 flat pad','1:1','transposable 2:4','block 16x16','block 1x4 l2','fan-in','fan-in ablate 0.3','fan-in ablate 0','fan-in ablate 1e-05',
    'kernels','kernels l2','output channels','output channels max','input channels min','output groups 4','input groups 1']

@pytest.mark.parametrize('text', texts)
def test_text_round_trip(text):
    "Text, object, pickle and copy are one structure; it is frozen, and a key of a dict"
    s = as_structure(text)
    assert str(s)==text and as_structure(s) is s and as_structure(str(s))==s
    assert pickle.loads(pickle.dumps(s))==copy.deepcopy(s)==s and {s: 1}[as_structure(f'  {text.upper()} ')]==1
    assert eval(repr(s), vars(structures))==s
    with pytest.raises(AttributeError): s.n = 3
    assert len({as_structure(t) for t in texts})==len(texts)

@pytest.mark.parametrize('text,canonical', [('2:4  axis 1','2:4'),(' 2:4 axis 1','2:4'),('Block 4x4 mean','block 4x4'),('OUTPUT  groups 4','output groups 4'),('02:4','2:4'),(None,'unstructured')])
def test_text_variants(text, canonical):
    "A double space or a capital is no other structure "
    assert str(as_structure(text))==canonical

@pytest.mark.parametrize('x', ['','2;4','2:4 axis','2:4 axis x','2:4x','a 2:4','block 16','block 16x','kernels sum','fan-in ablate','fan-in ablate x','transposable','output groups','sparse','2:4 pad flat',True,False,.5,0,2,[2,4],(2,4),b'2:4',torch.tensor(1)])
def test_text_refused(x):
    "Law 10: what is no structure is refused, with all texts that are"
    with pytest.raises(ValueError, match='structure is|float|could not') as e: as_structure(x)
    if 'ablate x' not in str(x): assert 'transposable 2:4' in str(e.value)

refused = [(NM,4,2), (NM,-1,4), (NM,2.5,4), (NM,True,4), (NM,2,4,0,True), (TransposableNM,5,4), (TransposableNM,0,4),
    (Block,0,4), (Block,2,2.5), (Block,2,2,'sum'), (Kernels,3), (FanIn,1.5), (FanIn,-.1), (FanIn,math.nan), (FanIn,True), (OutputGroups,0), (InputGroups,2.5),
    (as_structure,'4:2'), (as_structure,'fan-in ablate 2'), (as_structure,'block 0x4')]

@pytest.mark.parametrize('f,args', [(f, args) for f,*args in refused])
def test_settings_refused(f, args):
    "Law 10: N above M, N below 0, fractions for whole numbers, fractions out of range, unknown reductions"
    with pytest.raises(ValueError): f(*args)

def test_own_function_in_the_text():
    "A function of one's own is shown by its name; functions pickle by theirs"
    assert str(Kernels(torch.amax))=='kernels amax' and Kernels(torch.amax)==Kernels(torch.amax) and Kernels(torch.amax)!=Kernels()

@pytest.mark.parametrize('text,mask,legal', [
    ('2:4', [[1,1,0,0]], True), ('2:4', [[1,1,1,0]], True), ('2:4', [[1,0,0,0]], False), ('2:4', [[0,0,0,0]], False), ('2:4', [[1,1,0,0],[1,1,1,0]], False), ('2:4 pad', [[1,1,0,0,1,1]], True),
    ('2:4 pad', [[1,1,0,0,1,0]], False), ('2:4 pad', [[1,1,0]], True), ('2:4 pad', [[1,0,0]], False), ('fan-in', [[1,0],[0,1]], True), ('fan-in', [[1,0],[0,0]], False), ('fan-in ablate 0.3', [[1,0],[0,0]], True),
    ('fan-in ablate 0.3', [[1,0],[1,1]], False), ('fan-in ablate 0.3', [[0,0],[0,0]], True), ('fan-in', [[0,0],[0,0]], True), ('block 2x2', [[1,1,0,0],[1,1,0,0]], True), ('block 2x2', [[1,1,0,0],[1,0,0,0]], False),
    ('input channels', [[1,0],[1,0]], True), ('input channels', [[1,0],[0,1]], False), ('output groups 2', [[1,0],[0,1]], True), ('output groups 2', [[1,1],[0,0]], False), ('input groups 2', [[1,0],[1,0]], False),
    ('transposable 1:2', [[1,0],[0,1]], True), ('transposable 1:2', [[1,1],[0,0]], False), ('transposable 1:2', [[1,1],[1,1]], True), ('transposable 1:2', [[0,0],[0,0]], False), ('unstructured', [[1,0],[0,0]], True)])
def test_legal_by_hand(text, mask, legal):
    "Units whole and groups equal; N:M holds N to M live; padding never lives"
    assert as_structure(text).legal(torch.tensor(mask).bool()) is legal

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

# --- starting patterns

def lines(mask): return [''.join(map(str, o)) for o in mask.int().tolist()]

def test_checkerboard_by_hand():
    "Quarter and half, as published; both counts are exact"
    assert lines(checkerboard(torch.empty(4,8), 8))==['00010001','10001000','01000100','00100010']
    assert lines(checkerboard(torch.empty(3,7), n_live(21, .5)))==['0101010','1010101','0101010']
    assert lines(checkerboard(torch.empty(3,4), 9))==['0111','1011','1101']

@some
@given(shape=st.sampled_from([(5,),(4,8),(3,7),(12,5),(2,3,4),(4,3,3,3),(1,9),(9,1),(0,4)]), s=st.floats(0,1))
def test_checkerboard_counts(shape, s):
    "Law 1: exact counts at every sparsity, 1 included, and for every rank (elsewhere sparsity 1 divides by zero and only matrices are rolled)"
    n = n_live(math.prod(shape), s)
    mask = checkerboard(torch.empty(shape), n)
    assert mask.shape==shape and mask.dtype==torch.bool and int(mask.sum())==n

@pytest.mark.parametrize('shape', [(8,16),(16,8),(32,32),(20,30)])
@pytest.mark.parametrize('s', [.5,.75,.8,.9])
def test_checkerboard_is_even(shape, s):
    "No output and no input has two live weights more or less than its share"
    mask = checkerboard(torch.empty(shape), n_live(math.prod(shape), s))
    for d in (0,1): assert (mask.sum(1-d)-mask.sum()/shape[d]).abs().max()<2

@pytest.mark.parametrize('text,shape', [c for c in cases if math.prod(c[1])]+[('transposable 2:4',(4,8))])
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
    return model,[model, learn, model.state_dict(), str(tmp_path/'state.pt'), tmp_path/'state.pt', learn.save('learner'), learn.save('weights', with_opt=False),
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

def test_masks_like_is_a_snapshot():
    "What happens to the source later doesn't matter"
    model = net()
    sparsify_model(model, .6, seed=1)
    was = masks_of(model)
    f = masks_like(model)
    for o in masked_params(model): o.mask.zero_()
    other = net()
    sparsify_model(other, .6, mask_init=f)
    assert same_masks(was, masks_of(other))

def test_shuffled_tickets():
    "The lottery's control: as many in each layer, at places that the seed names, not the source"
    model,(a,b,c) = net(),(net(),net(),net())
    sparsify_model(model, .6, erdos_renyi_sparsity, seed=1)
    for other,seed in ((a,5),(b,5),(c,6)): sparsify_model(other, .6, erdos_renyi_sparsity, mask_init=masks_like(model, shuffle=True), seed=seed)
    assert same_masks(masks_of(a), masks_of(b)) and not same_masks(masks_of(a), masks_of(c)) and not same_masks(masks_of(a), masks_of(model))
    assert [int(m.sum()) for m in masks_of(a)]==[int(m.sum()) for m in masks_of(model)]

@pytest.mark.parametrize('text', ['2:4','fan-in','block 2x2','transposable 2:4'])
def test_shuffled_structures(text):
    "New places obey the structure"
    s = as_structure(text)
    mask = s.top(torch.rand(8,8), 32)
    f = masks_like({'w_mask': mask}, shuffle=True)
    new = f(torch.empty(8,8), n=None, name='w', generator=keyed_generator(0, 0), structure=text)
    assert s.legal(new) and int(new.sum())==32 and not torch.equal(new, mask)

def test_masks_like_refuses(tmp_path):
    "Law 10: unknown names, other shapes, sources without masks, files that would run code"
    f = masks_like({'a_mask': torch.ones(2,2).bool()})
    for other in (f, *map(masks_like, (net(), {}, {'a': torch.ones(2)}, {'a_mask': 3}))):
        with pytest.raises(KeyError, match='b'): other(torch.empty(2,2), name='b')
    m = nn.Sequential(nn.Linear(3,2))
    with pytest.raises(ValueError, match=r'\(2, 2\).*\(2, 3\)'): sparsify_model(m, .5, mask_init=masks_like({'0.weight_mask': torch.ones(2,2).bool()}))
    assert not masked_params(m)
    with pytest.raises(FileNotFoundError): masks_like(tmp_path/'none.pt')
    torch.save({'a_mask': torch.ones(2), 'code': Evil()}, tmp_path/'evil.pt')
    with pytest.raises(pickle.UnpicklingError): masks_like(tmp_path/'evil.pt')

class Evil:
    def __reduce__(self): return print,('this must not run',)

def test_masks_of_another_model_ask_no_distribution():
    "Their counts are the other model's, so a distribution that can't be called is never called"
    def never(*args, **kwargs): raise AssertionError('asked')
    source,model = mlp(),mlp(seed=1)
    sparsify_model(source, .5, seed=0)
    sparsify_model(model, .5, never, mask_init=masks_like(source))
    assert same_masks(masks_of(source), masks_of(model))
