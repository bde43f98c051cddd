"Integers out of fractions, and counts of live weights: every total is exact"
import math, pytest, torch
from fastsparse.masks.apportion import lift_counts,legal_counts,live_counts,regrow_counts,share_out
from fastsparse.masks.distributions import erdos_renyi_sparsity,uniform_sparsity
from fastsparse.masks.selection import floor_product
from fractions import Fraction
from functools import partial
from hypothesis import given,settings,strategies as st

some = settings(max_examples=150, deadline=None)

@given(n=st.integers(0, 10**7), k=st.integers(0, 1000))
def test_whole_is_the_exact_floor(n, k):
    "The floor of thousandths of a count, as exact arithmetic gives it"
    assert floor_product(k/1000*n)==math.floor(Fraction(k, 1000)*n)

class Steps:
    "A holder whose counts are multiples of `d`, up to `most`"
    def __init__(self, d, n=100): self.unit,self.n = d,n//d*d
    def round_up_to_legal(self, n): return min((2*n+self.unit-1)//(2*self.unit)*self.unit, self.n)

@pytest.mark.parametrize('ds,wanted,expect', [
    ((4,1), (5,5), [4,6]),  # the smaller unit takes what the larger one leaves
    ((1,4), (5,5), [6,4]),
    ((2,2,2), (4,5,5), [4,4,6]),  # of equal units, the first passes on
    ((3,2), (4,3), [3,4]),
    ((4,4), (7,7), [8,4]),
    ((1,1,1), (3,4,5), [3,4,5]),
    ((5,), (13,), [15])])
def test_counts_that_structures_allow(ds, wanted, expect):
    "By hand: the largest units first, and what rounding leaves goes to the next"
    holders = [Steps(d) for d in ds]
    assert legal_counts(holders, list(wanted))==expect

@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=4))
def test_counts_are_legal_and_the_total_is_the_nearest(pairs):
    "Each count is one that its structure allows and within a unit of what is wanted; the total misses by half of the smallest unit at most"
    holders,wanted = [Steps(d) for d,_ in pairs],[n for _,n in pairs]
    counts,largest = legal_counts(holders, wanted),max(d for d,_ in pairs)
    assert all(c%h.unit==0 and 0<=c<=h.n and abs(c-n)<=largest for c,h,n in zip(counts, holders, wanted))
    assert abs(sum(wanted)-sum(counts))<=min(d for d,_ in pairs)/2

@pytest.mark.parametrize('n,wanted,expect', [(50, (2,50), [9,43]), (50, (2,48), [0,50]), (0, (90,0), [90,0]), (50, (85,50), [90,45]), (10, (4,9), [9,4]), (10, (4,0), [0,4])])
def test_a_unit_more_if_the_others_have_no_room(n, wanted, expect):
    "Kernels of nine, up to ninety, and `n` single weights: what can be met is met"
    assert legal_counts([Steps(9, 90), Steps(1, n)], list(wanted))==expect

# --- counts of live weights

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

shapes = st.lists(st.lists(st.integers(1,12), min_size=1, max_size=4), min_size=1, max_size=7)
er = partial(erdos_renyi_sparsity, include_kernel=False, erk_power_scale=.7)

@some
@given(shapes=shapes, s=st.floats(0,1,exclude_max=True), f=st.sampled_from([uniform_sparsity, erdos_renyi_sparsity, er]))
def test_totals(shapes, s, f):
    "Law 1: uniform, ER and ERK have exactly `round((1-s)*N)` live weights, each layer within one of its own, none past its size"
    sizes,sparsities = [math.prod(o) for o in shapes],f([torch.empty(*o) for o in shapes], s)
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

@given(counts=st.lists(st.tuples(st.integers(0,50), st.integers(0,50)), min_size=1, max_size=6))
def test_lifted_counts_keep_the_total_and_meet_their_floors(counts):
    "Where the floors fit into the total; else each has its floor, as the round up of a legal sparsity"
    counts,floors = map(list, zip(*counts))
    lifted = lift_counts(counts, floors)
    if sum(floors)>sum(counts): assert lifted==floors
    else: assert sum(lifted)==sum(counts) and all(n>=least for n,least in zip(lifted, floors))

@pytest.mark.parametrize('shares,total,room,grown', [([1,1],4,[4,4],[2,2]), ([3,1],4,[8,8],[3,1]), ([30,10],4,[8,8],[3,1]), ([1,0],5,[3,4],[3,2]), ([0,3],5,[4,3],[2,3]),
    ([0,0],3,[4,4],[2,1]), ([5,1,0],6,[2,2,2],[2,2,2]), ([1,1],3,[0,4],[0,3])])
def test_regrowth_by_hand(shares, total, room, grown):
    "In proportion to the shares, but to the room at most; a share of zero gets what the others have no room for"
    assert regrow_counts(shares, total, room)==grown

def test_sparsities_that_nearly_amount_to_the_model_s_are_meant_to():
    "31 weights at .50001 are 15.4997; half of them, which rounds to 16, where the model's sparsity is .5"
    assert live_counts([31], [.50001], .5)==[16] and live_counts([31], [.50001])==[15]
