"Masks that are N:M both ways, against all masks there are"
import itertools, math, numpy as np, pytest, torch
from fastsparse.masks.selection import put_
from fastsparse.masks.structures import NM
from fastsparse.special.transposable import TransposableNM
from hypothesis import given,settings,strategies as st

def as_bool(indices, shape):
    mask = np.zeros(math.prod(shape), bool)
    mask[sorted(indices)] = True
    return mask.reshape(shape)

def after(mask, dropped, grown): return put_(put_(mask.clone(), dropped, False), grown, True)

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
