"Room 01a: integers out of fractions"
import math, pytest
from fastsparse.masks import whole_part
from fastsparse.sharing import whole_up
from fractions import Fraction
from hypothesis import given, strategies as st

@given(n=st.integers(0, 10**7), k=st.integers(0, 1000))
def test_whole_is_the_exact_floor(n, k):
    "The floor of thousandths of a count, as exact arithmetic gives it"
    assert whole_part(k/1000*n)==math.floor(Fraction(k, 1000)*n) and whole_up(k/1000*n)==math.ceil(Fraction(k, 1000)*n)

@pytest.mark.parametrize('x,expect', [(.29*100, 29), (.57*100, 57), (28.99, 28), (-.5, -1), (0., 0)])
def test_whole_by_hand(x, expect): assert whole_part(x)==expect
