"Room 02: when the topology moves, and how much of it. Pure functions of integers"
import math, pytest
from fastsparse.schedules import *
from hypothesis import example,given,settings,strategies as st

@pytest.mark.parametrize('every,n,stop,due', [
    (10, 100, .75, [10,20,30,40,50,60,70]),
    (25, 100, .75, [25,50]),
    (25, 100, 1., [25,50,75]),
    (9, 10, 1., []),
    (8, 10, 1., [8]),
    (1, 5, 1., [1,2,3]),
    (3, 13, 1., [3,6,9]),
    (4, 12, .5, [4]),
    (2, 2, 1., []),
    (2, 3, 1., []),
    (100, 50, .75, [])])
def test_due(every, n, stop, due):
    "t > 0, a multiple, before `stop_pct*n_steps` (exclusive), and never the last step"
    assert [t for t in range(n+5) if update_due(t, every, n, stop)]==due

@pytest.mark.parametrize('t,expect', [(0,.3), (25,.3/2*(1+math.sqrt(.5))), (50,.15), (75,.3/2*(1-math.sqrt(.5))), (100,0.), (101,0.), (150,0.), (200,0.), (10**9,0.)])
def test_cosine_by_hand(t, expect):
    "Half a cosine to zero at step 100 of 200, and zero from there on: no rebound after the half period (cerebras' Cosine grows again)"
    assert math.isclose(cosine_drop(t, 200, .3, .5), expect, abs_tol=1e-12)

@settings(max_examples=100, deadline=None)
@example(n=1, initial=5e-324, stop=1.)
@given(n=st.integers(1,5000), initial=st.floats(0,1), stop=st.floats(.01,1))
def test_cosine_falls(n, initial, stop):
    "In [0, initial], never rising, zero at the end of its span; asking twice gives the same number"
    v = [cosine_drop(t, n, initial, stop) for t in range(0, n+2, max(n//50, 1))]
    assert all(0<=o<=initial for o in v) and all(a>=b for a,b in zip(v, v[1:])) and v[0]==initial
    assert cosine_drop(math.ceil(stop*n), n, initial, stop)==0
    assert v==[cosine_drop(t, n, initial, stop) for t in range(0, n+2, max(n//50, 1))]
