"Structures against plain loops over indices: units are whole, groups are equal, counts are exact"
import copy, math, numpy as np, pickle, pytest, re, torch, weakref
from fastsparse.all import *
from fastsparse.masks import structures
from fastsparse.masks.selection import count_live,highest,lowest,put_
from fastsparse.masks.structures import as_structure,Block,FanIn,Kernels,NM,OutputChannels,Unstructured
from fastsparse.special import structures as special
from fastsparse.special.structures import AblatingFanIn,InputGroups,OutputGroups
from functools import partial
from hypothesis import assume,given,settings,strategies as st

# --- an oracle: which unit of which group an index belongs to, structure by structure

def flat_inputs(i, s): return int(np.ravel_multi_index(i[1:], s[1:]))

homes = {'unstructured': lambda i,s: ((), i), 'fan-in': lambda i,s: (i[0], i[1:]), 'kernels': lambda i,s: ((), i[:2]), 'kernels l2': lambda i,s: ((), i[:2]),
    '2:4': lambda i,s: ((i[0],i[1]//4,*i[2:]), i[1]), '2:4 pad': lambda i,s: ((i[0],i[1]//4,*i[2:]), i[1]), '1:3 axis 0': lambda i,s: ((i[0]//3,*i[1:]), i[0]),
    '3:8 flat': lambda i,s: ((i[0],flat_inputs(i, s)//8), flat_inputs(i, s)), '2:5 flat pad': lambda i,s: ((i[0],flat_inputs(i, s)//5), flat_inputs(i, s)),
    '1:2 axis 2': lambda i,s: ((*i[:2],i[2]//2,*i[3:]), i[2]), 'output groups 3': lambda i,s: (i[0]//(s[0]//3), i), 'input groups 2': lambda i,s: (i[1]//(s[1]//2), i),
    'block 1x2': lambda i,s: ((), i[0]//2), 'block 2x3': lambda i,s: ((), (i[0]//2,i[1]//3)), 'block 2x3 max': lambda i,s: ((), (i[0]//2,i[1]//3)),
    'output channels min': lambda i,s: ((), i[0]), 'input channels': lambda i,s: ((), i[1])}

shapes = {'unstructured':[(7,),(3,5),(2,3,2,2),(0,3)], '2:4':[(3,8),(2,4,3),(2,8,1,2),(1,4)], '2:4 pad':[(3,6),(2,5,2,2),(2,3),(1,1),(2,8)],
    '1:3 axis 0':[(6,4),(3,2,2)], '3:8 flat':[(3,8),(2,4,2,2)], '2:5 flat pad':[(3,7),(2,3,2,2)], '1:2 axis 2':[(2,3,4),(2,2,2,3)], 'fan-in':[(4,6),(3,2,2,2),(1,5)],
    'output groups 3':[(6,4),(3,),(3,2,2,2)], 'input groups 2':[(3,4),(2,4,3),(1,2,2,2)], 'block 1x2':[(6,)], 'block 2x3':[(4,6),(2,3,2,2),(2,9)], 'block 2x3 max':[(4,6),(2,6,1,2)],
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
    if grow is not None: n_drop = min(n_drop, len({i for g in gs for u in g if any(grow.flat[i]!=0 for i in u) for i in u}-live))
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

@settings(max_examples=60, deadline=None)
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
    "Law 2: dropped were live and no more than can grow, grown were not kept, exactly `n` live, legal, as the plain loops say, from any mask"
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

@pytest.mark.parametrize('text,shape', [c for c in cases if math.prod(c[1])])
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

@pytest.mark.parametrize('text,shape', [('2:4',(4,6)),('2:4',(6,)),('2:4 axis 0',(6,4)),('2:4 axis 2',(4,4)),('2:4 flat',(4,3,3,3)),('fan-in',(8,)),
    ('block 2x3',(4,4)),('block 2x3',(3,6)),('block 2x3',(6,)),('kernels',(6,)),('output channels',(6,)),('input channels',(6,)),('output groups 4',(6,4)),('output groups 4',()),('input groups 4',(4,6)),('input groups 4',(4,))])
def test_shapes_that_do_not_fit(text, shape):
    "Law 10: a shape that a structure doesn't divide is refused by check, count, top and move, with the shape and a way out (elsewhere padding is a dead path, or fails inside a reshape)"
    s = as_structure(text)
    for f in (lambda: s.check(torch.Size(shape)), lambda: s.count(shape, 0), lambda: s.top(torch.zeros(shape), 0), lambda: s.legal(torch.ones(shape).bool())):
        with pytest.raises(ValueError) as e: f()
        assert str(tuple(shape)) in str(e.value) and 'take another structure' in str(e.value) and text in str(e.value)
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

@pytest.mark.parametrize('shape', [(5,7),(4,7),(5,8),(1,1),(3,3),(9,13),(7,10,3),(4,8),(5,6,2,2)])
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
            moved = after(mask, dropped, grown)
            assert count_live(moved)==n and s.legal(moved) and all(b.all() or not b.any() for b in blocks_of(moved, 2, 4))
        mask = new

# --- axes that lie elsewhere

turned_texts = ['unstructured','2:4','2:4 axis 0','2:4 pad','2:4 flat','fan-in','fan-in ablate 0.3','block 2x4','kernels','output channels','input channels','output groups 2','input groups 2']

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

# --- units

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

@pytest.mark.parametrize('text', ['kernels','output channels','input channels','block 2x2'])
@pytest.mark.parametrize('f', [lambda x: x, lambda x: x.sum(), lambda x: x.mean(0), lambda x: 1., lambda x: x.mean(-1, keepdim=True)])
def test_bad_reductions(text, f):
    "A reduction of the wrong shape is one error with what came, the shape wanted and the fix, in choosing and in an update"
    score,s = torch.rand(4,6,2),type(as_structure(text))(*[2]*2*(text=='block 2x2'), reduce=f)
    wanted,mask = re.escape(str(tuple(s.split(score).shape[:-1]))),s.top(torch.zeros(4,6,2), 48)
    for act in (lambda: s.top(score, 24), lambda: s.move(mask, lambda: score, lambda _: score, 24, 24)):
        with pytest.raises(ValueError, match=rf'returned (float|torch.Size).*{wanted}.*x\.mean\(-1\)'): act()

@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_unit_scores_of_any_dtype(dtype):
    "Half precision doesn't overflow in a sum, and whole numbers have means"
    w = torch.zeros(3,64).to(dtype)
    w[1] = 1
    w[2,:40] = 1
    if dtype==torch.half: w = w*60000
    assert OutputChannels().top(w, 64).any(1).tolist()==[False,True,False]
    assert as_structure('fan-in').top(w, 3).nonzero().tolist()==[[0,0],[1,0],[2,0]]

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
    s = AblatingFanIn(gamma)
    n = max(s.count(shape, round(density*math.prod(shape))), shape[0])
    mask = s.top(torch.from_numpy(rng.random(shape)), n)
    for _ in range(5):
        keep,grow = rng.random(shape)*rng.random((shape[0],1))**3,rng.random(shape)*rng.random((shape[0],1))**3
        n_drop = min(int(.4*int(mask.sum())), int((~mask).sum()))
        dropped,grown = s.move(mask, lambda: torch.from_numpy(keep), lambda _: torch.from_numpy(grow), n_drop, n)
        new = after(mask, dropped, grown)
        if n_drop: assert np.array_equal(new.numpy(), oracle_ablate(gamma, mask.numpy(), keep, grow, n_drop, n))
        assert s.legal(new) and new.any() and not (new.any(1)&~mask.any(1)).any()
        assert mask.view(-1)[dropped].all() and not after(mask, dropped, grown[:0]).view(-1)[grown].any()
        mask = new

def test_keywords_of_the_core_give_structures_of_the_edge():
    assert FanIn(ablate=.3)==FanIn(.3)==as_structure('fan-in ablate 0.3') and FanIn()==as_structure('fan-in')!=FanIn(.3)
    assert Block(2, 4, pad=True)==Block(2, 4, 'mean', True)==as_structure('block 2x4 pad')!=Block(2, 4)

def test_ablated_outputs_stay_out():
    "Without a drop the other outputs grow alike, and without a grow score they shrink alike"
    s,new = AblatingFanIn(.9),torch.tensor([[1,1,0,1,0],[1,1,1,0,0],[1,1,0,1,0],[0]*5]).bool()
    assert s.legal(new) and not FanIn().legal(new) and [len(o) for o in s.move(new, None, None, 0, 8)]==[0,0]
    ones = lambda *_: torch.ones(4,5)
    assert after(new, *s.move(new, ones, ones, 0, 12)).int().tolist()==[[1,1,1,1,0]]*3+[[0]*5]
    assert after(new, *s.move(new, lambda: torch.rand(4,5), None, 3, 9)).sum(1).tolist()==[2,2,2,0]

# --- text

texts = ['unstructured','2:4','2:4 axis 0','1:4 axis 2 pad','2:4 flat','4:8 flat pad','1:1','block 16x16','block 1x4 l2','fan-in','fan-in ablate 0.3','fan-in ablate 0','fan-in ablate 1e-05',
    'kernels','kernels l2','output channels','output channels max','input channels min','output groups 4','input groups 1']

@pytest.mark.parametrize('text', texts)
def test_text_round_trip(text):
    "Text, object, pickle and copy are one structure; it is frozen, and a key of a dict"
    s = as_structure(text)
    assert str(s)==text and as_structure(s) is s and as_structure(str(s))==s==as_structure(text.replace(' ', '  '))
    assert pickle.loads(pickle.dumps(s))==copy.deepcopy(s)==s and {s: 1}[as_structure(f'  {text.upper()} ')]==1
    assert eval(repr(s), vars(structures)|vars(special)|globals())==s
    with pytest.raises(AttributeError): s.n = 3
    assert len({as_structure(t) for t in texts})==len(texts)

@pytest.mark.parametrize('text,mask,legal', [
    ('2:4', [[1,1,0,0]], True), ('2:4', [[1,1,1,0]], True), ('2:4', [[1,0,0,0]], False), ('2:4', [[0,0,0,0]], False), ('2:4', [[1,1,0,0],[1,1,1,0]], False), ('2:4 pad', [[1,1,0,0,1,1]], True),
    ('2:4 pad', [[1,1,0,0,1,0]], False), ('2:4 pad', [[1,1,0]], True), ('2:4 pad', [[1,0,0]], False), ('fan-in', [[1,0],[0,1]], True), ('fan-in', [[1,0],[0,0]], False), ('fan-in ablate 0.3', [[1,0],[0,0]], True),
    ('fan-in ablate 0.3', [[1,0],[1,1]], False), ('fan-in ablate 0.3', [[0,0],[0,0]], True), ('fan-in', [[0,0],[0,0]], True), ('block 2x2', [[1,1,0,0],[1,1,0,0]], True), ('block 2x2', [[1,1,0,0],[1,0,0,0]], False),
    ('input channels', [[1,0],[1,0]], True), ('input channels', [[1,0],[0,1]], False), ('output groups 2', [[1,0],[0,1]], True), ('output groups 2', [[1,1],[0,0]], False), ('input groups 2', [[1,0],[1,0]], False),
    ('unstructured', [[1,0],[0,0]], True)])
def test_legal_by_hand(text, mask, legal):
    "Units whole and groups equal; N:M holds N to M live; padding never lives"
    assert as_structure(text).legal(torch.tensor(mask).bool()) is legal

# --- refusals

ones = torch.ones(4,8).bool()
refusals = [(lambda text=text: as_structure(text).count((4,8), 33), '33') for text in ('unstructured','2:4')]
refusals += [(lambda: as_structure('fan-in').count((4,8), -1), '-1')]
refusals += [(lambda x=x: as_structure(x), 'must be None, a Structure, or a text such as') for x in ('', '2;4', '2:4 axis', '2:4 axis x', 'a 2:4', 'block 16', 'block 16x', 'kernels sum', 'fan-in ablate',
    'transposable 2:4', 'output groups', 'sparse', '2:4 pad flat', True, .5, 0, [2,4], b'2:4', torch.tensor(1))]
refusals += [(partial(f, *args), None) for f,*args in ((NM,4,2), (NM,-1,4), (NM,2.5,4), (NM,True,4), (NM,2,4,0,True),
    (Block,0,4), (Block,2,2.5), (Block,2,2,'sum'), (Kernels,3), *[(AblatingFanIn,o) for o in (1.5,-.1,math.nan,True)], (OutputGroups,0),
    (InputGroups,2.5), (as_structure,'4:2'), (as_structure,'fan-in ablate 2'), (as_structure,'block 0x4'), (as_structure,'fan-in ablate x'))]

@pytest.mark.parametrize('call,say', refusals)
def test_refused(call, say):
    "Law 10: counts that are not legal, drops that are not there, texts that are no structure, settings out of range"
    with pytest.raises(ValueError, match=say): call()
