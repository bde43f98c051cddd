"Room 01a: integers out of fractions"
import math, pytest
from fastsparse.masks.selection import floor_product
from fastsparse.masks.apportion import legal_counts,whole_up
from fractions import Fraction
from hypothesis import given, strategies as st

@given(n=st.integers(0, 10**7), k=st.integers(0, 1000))
def test_whole_is_the_exact_floor(n, k):
    "The floor of thousandths of a count, as exact arithmetic gives it"
    assert floor_product(k/1000*n)==math.floor(Fraction(k, 1000)*n) and whole_up(k/1000*n)==math.ceil(Fraction(k, 1000)*n)

@pytest.mark.parametrize('x,expect', [(.29*100, 29), (.57*100, 57), (28.99, 28), (-.5, -1), (0., 0)])
def test_whole_by_hand(x, expect): assert floor_product(x)==expect

class Steps:
    "A holder whose counts are multiples of `d`, up to `most`"
    def __init__(self, d, most=100): self.d,self.most,self.n = d,most,most
    def round_up_to_legal(self, n): return n//self.d*self.d
    def adjacent_counts(self, c, way): return [n for n in (c+way*self.d,) if 0<=n<=self.most]

@pytest.mark.parametrize('ds,wanted,expect', [
    ((4,1), (5,5), [4,6]),  # the one whose step is the missing one takes it
    ((2,2,2), (4,5,5), [4,6,4]),  # of equal steps, the one that is furthest below what it wants; then the first
    ((3,2), (4,3), [3,4]),  # two are missing: a step of two is nearer than one of three
    ((4,4), (7,7), [8,4]),  # six are missing: a step of four leaves two, another one would leave as many
    ((1,1,1), (3,4,5), [3,4,5]),
    ((5,), (13,), [15])])
def test_counts_that_structures_allow(ds, wanted, expect):
    "By hand: what is missing in all goes where a step comes nearest"
    holders = [Steps(d) for d in ds]
    assert legal_counts(holders, list(wanted))==expect

def test_a_step_more_and_the_difference_back_in_finer_ones():
    "3 and 2 for wanted 3 and 3: no step brings the one that is missing, but three less here and four more there do"
    assert sum(legal_counts([Steps(3), Steps(2)], [3,3]))==6

@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=4))
def test_counts_are_legal_and_no_single_step_is_nearer(pairs):
    "Each count is one that its structure allows, and no step of one holder brings the total nearer to what is wanted"
    holders,wanted = [Steps(d) for d,_ in pairs],[n for _,n in pairs]
    counts = legal_counts(holders, wanted)
    off = abs(sum(wanted)-sum(counts))
    assert all(c%h.d==0 and 0<=c<=h.most for c,h in zip(counts, holders))
    steps = [n-c for c,h in zip(counts, holders) for way in (1,-1) for n in h.adjacent_counts(c, way)]
    assert all(abs(sum(wanted)-sum(counts)-d)>=off for d in steps)

class Ceiling(Steps):
    "Begins with more than it is asked for"
    def round_up_to_legal(self, n): return -(-n//self.d)*self.d

@pytest.mark.parametrize('ds,wanted,expect', [((1,4), (3,5), [4,4]), ((2,2), (3,3), [2,4]), ((1,1), (2,2), [2,2]), ((2,2,2), (4,3,3), [4,2,4])])
def test_too_many_are_given_back(ds, wanted, expect):
    "By hand: what is too much in all goes where a step comes nearest, first where most is above what is wanted"
    assert legal_counts([Ceiling(d) for d in ds], list(wanted))==expect
