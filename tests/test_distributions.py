"Room 01: how sparse each parameter is. Totals are exact, and no layer is asked for more than it has"
import math, numpy as np, pytest, torch
from fastsparse.distributions import *
from hypothesis import given,settings,strategies as st

some = settings(max_examples=150, deadline=None)
shapes = st.lists(st.lists(st.integers(1,12), min_size=1, max_size=4), min_size=1, max_size=7)
def params(shapes): return [torch.empty(*o) for o in shapes]

def water_fill(raw, sizes, budget):
    "Independent of ours: bisect the common factor until `sum(min(1, factor*raw)*size)` is the budget"
    raw,sizes = np.array(raw, float),np.array(sizes, float)
    lo,hi = 0.,1/raw.min()
    for _ in range(200):
        mid = (lo+hi)/2
        lo,hi = (lo,mid) if (np.minimum(1, mid*raw)*sizes).sum()>budget else (mid,hi)
    return np.minimum(1, hi*raw)

def raw_of(shapes, kernel, power): return [(sum(o)/math.prod(o))**power for o in (s if kernel else s[:2] for s in shapes)]

# --- uniform and first layer dense

def test_uniform():
    "Every parameter the model's sparsity"
    assert uniform_sparsity(params([(3,4),(5,),(2,2)]), .7)==[.7]*3

def test_first_layer_dense():
    "The first parameter is dense (its README showed a 1, the wrong sign), the others keep the given sparsity, as in 2020"
    assert first_layer_dense_uniform(params([(1,32),(32,32),(32,1)]), .8)==[0.,.8,.8]
    assert first_layer_dense_uniform(params([(4,4)]), .8)==[0.]
    assert live_counts([32,1024,32], [0.,.8,.8], .8)==[32,205,6]  # 204.8+6.4 = 211.2: 211 in all, and the larger remainder is the second's

# --- Erdős-Rényi

net = [(8,3,3,3),(16,8,3,3),(10,16)]

@pytest.mark.parametrize('density,kernel,expect', [(.2,True,[.32883,.1088,.67894]), (.5,True,[1,.33681,1]), (.5,False,[1,.42459,.36798])])
def test_published_densities(density, kernel, expect):
    "The densities that another implementation's authors printed for this net (seeds.md 3.2), up to their rounding of counts"
    got = [1-s for s in erdos_renyi_sparsity(params(net), 1-density, include_kernel=kernel)]
    assert np.allclose(got, expect, atol=1.5e-3)

def test_erk_by_hand():
    "Two layers, sizes 4 and 100, raw 1 and .2: at density .25 (26 live) the factor is 26/24 and the first would exceed 1, so it is dense: 22/100 remain"
    assert np.allclose(erdos_renyi_sparsity(params([(2,2),(10,10)]), .75), [0,.78])
    assert np.allclose(erdos_renyi_sparsity(params([(2,2),(10,10)]), .9), [1-10.4/24, 1-.2*10.4/24])

@pytest.mark.parametrize('kernel', [True,False])
def test_power_scale(kernel):
    "A power of 0 is uniform, a power below 1 lies between; 2020 ignored it for ER"
    p = params([(8,16,3,3),(16,32,3,3),(10,128)])
    f = lambda power: np.array(erdos_renyi_sparsity(p, .9, include_kernel=kernel, erk_power_scale=power))
    assert np.allclose(f(0.), .9)
    assert np.ptp(f(.5))<np.ptp(f(1.))*.9 and np.ptp(f(.5))>.001
    raw = raw_of([o.shape for o in p], kernel, .5)
    assert np.allclose(1-f(.5), water_fill(raw, [o.numel() for o in p], .1*sum(o.numel() for o in p)))

@pytest.mark.parametrize('s', [0, 1e-12, 1e-6, .001, .01, .999, 1-1e-9])
@pytest.mark.parametrize('kernel', [True,False])
def test_no_zero_division(s, kernel):
    "2020: a tiny sparsity made every layer dense and then divided by nothing"
    for shapes in ([(2,2)], [(1,1),(1,1)], [(2,3),(3,2),(1,5)], [(1,50),(50,1)], [(64,)], net):
        out = erdos_renyi_sparsity(params(shapes), s, include_kernel=kernel)
        sizes = [math.prod(o) for o in shapes]
        assert all(0<=o<=1 for o in out)
        assert sum(live_counts(sizes, out, s))==round((1-s)*sum(sizes))

def test_empty_parameter():
    "A parameter without weights takes part in no budget and divides by nothing"
    for kernel in (True,False):
        out = erdos_renyi_sparsity(params([(0,4),(10,10),(20,10)]), .8, include_kernel=kernel)
        assert live_counts([0,100,200], out, .8)[0]==0 and sum(live_counts([0,100,200], out, .8))==60

@some
@given(shapes=shapes, s=st.floats(0,1,exclude_max=True), kernel=st.booleans(), power=st.floats(0,2))
def test_erk_is_the_water_level(shapes, s, kernel, power):
    "Law 1: densities in [0,1], proportional to the ratio until full, and they meet the budget in real numbers"
    sizes = [math.prod(o) for o in shapes]
    d = 1-np.array(erdos_renyi_sparsity(params(shapes), s, include_kernel=kernel, erk_power_scale=power))
    budget = (1-s)*sum(sizes)
    assert (d>=0).all() and (d<=1).all() and math.isclose((d*sizes).sum(), budget, rel_tol=1e-9, abs_tol=1e-9)
    assert np.allclose(d, water_fill(raw_of(shapes, kernel, power), sizes, budget), atol=1e-6)

@some
@given(raw=st.lists(st.floats(1e-6,1e6), min_size=1, max_size=8), data=st.data())
def test_fill_budget(raw, data):
    "The same for any raw densities"
    sizes = data.draw(st.lists(st.integers(1,1000), min_size=len(raw), max_size=len(raw)))
    budget = data.draw(st.floats(0,1))*sum(sizes)
    d = np.array(fill_budget(raw, sizes, budget))
    assert (d>=0).all() and (d<=1).all() and math.isclose((d*sizes).sum(), budget, rel_tol=1e-9, abs_tol=1e-9)
    assert np.allclose(d, water_fill(raw, sizes, budget), atol=1e-6)

# --- exact counts

@pytest.mark.parametrize('wanted,total,expect', [
    ([.5,.5,1.], 2, [1,0,1]),
    ([1.2,2.7,3.7], 8, [1,3,4]),
    ([1.2,2.7,3.7], 7, [1,3,3]),
    ([2.,3.], 5, [2,3]),
    ([.25,.25,.25,.25], 1, [1,0,0,0]),
    ([0.,.4,.6], 1, [0,0,1]),
    ([], 0, [])])
def test_share_out_by_hand(wanted, total, expect):
    "Largest remainder, ties to the lower index"
    given = list(wanted)
    assert share_out(wanted, total)==expect
    assert wanted==given

@some
@given(wanted=st.lists(st.floats(0,1e6), max_size=12), up=st.booleans())
def test_share_out(wanted, up):
    "The total is met and nobody moves by one or more"
    total = (math.ceil if up else math.floor)(math.fsum(wanted))
    out = share_out(wanted, total)
    assert sum(out)==total and all(math.floor(w)<=o<=math.ceil(w) for o,w in zip(out, wanted))

def _er(params, s): return erdos_renyi_sparsity(params, s, include_kernel=False, erk_power_scale=.7)

@some
@given(shapes=shapes, s=st.floats(0,1,exclude_max=True), f=st.sampled_from([uniform_sparsity, erdos_renyi_sparsity, _er]))
def test_totals(shapes, s, f):
    "Law 1: uniform, ER and ERK have exactly `round((1-s)*N)` live weights, each layer within one of its own, none past its size"
    p,sizes = params(shapes),[math.prod(o) for o in shapes]
    sparsities = f(p, s)
    counts = live_counts(sizes, sparsities, s)
    assert sum(counts)==round((1-s)*sum(sizes))
    assert all(0<=c<=n and abs(c-(1-o)*n)<1+1e-9 for c,n,o in zip(counts, sizes, sparsities))

@some
@given(cases=st.lists(st.tuples(st.integers(0,5000), st.floats(0,1)), min_size=1, max_size=9))
def test_users_own_totals(cases):
    "Law 1: a user's own distribution gets `round(sum((1-s_i)*n_i))`, each layer within one"
    sizes,sparsities = zip(*cases)
    counts = live_counts(list(sizes), list(sparsities))
    assert abs(sum(counts)-math.fsum((1-s)*n for n,s in cases))<=.5+1e-6
    assert all(0<=c<=n and abs(c-(1-s)*n)<1+1e-9 for c,(n,s) in zip(counts, cases))

@pytest.mark.parametrize('s,n,k,live', [(.9,5,2,1), (.5,5,2,5), (.5,1,4,2), (.8,3,3,2), (.9,1001,3,300)])
def test_uniform_counts_by_hand(s, n, k, live):
    "`k` layers of `n` at `s` share one rounding: .9 of 2x5 is 1 (each alone would round .5 to 0), the surplus to the lower index"
    counts = live_counts([n]*k, [s]*k, s)
    assert sum(counts)==live and counts==sorted(counts, reverse=True) and max(counts)-min(counts)<=1

@pytest.mark.parametrize('bad', [[.5], [.5,.5,.5], [.5,1.1], [.5,-.1], [math.nan,.5]])
def test_bad_distributions(bad):
    "Law 10: a wrong number of sparsities, or one outside of [0,1], is refused"
    with pytest.raises(ValueError, match='the distribution returned'): live_counts([10,10], bad, .5)
