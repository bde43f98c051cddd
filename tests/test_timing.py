"Times are taken in turns and compared turn by turn, on a clock that the test moves"
import math,pytest,torch
from dataclasses import dataclass
from fastsparse.kernels import timing as clocks
from fastsparse.kernels.timing import float_outputs,output_error,shown,speedup,times_in_turns

@pytest.fixture
def clock(monkeypatch):
    "A function that lets seconds pass"
    now = [0.]
    monkeypatch.setattr(clocks.time, 'perf_counter', lambda: now[0])
    def passes(seconds): now[0] += seconds
    return passes

def taking(clock, *seconds):
    "A function that takes the next of `seconds` at each call, the last one ever after"
    left = list(seconds)
    return lambda: clock(left.pop(0) if len(left)>1 else left[0])

def test_first_turn_only_warms_up(clock):
    assert times_in_turns([taking(clock, 9, 1, 2, 3), taking(clock, 7, 4)], rounds=3, seconds=0)==[(1,2,3),(4,4,4)]

def test_turns_go_on_until_the_time_is_up(clock):
    "Until `seconds` have passed, the first turn included, and never more than 50 that count"
    assert len(times_in_turns([taking(clock, 1)], rounds=2, seconds=10)[0])==9
    assert len(times_in_turns([taking(clock, 1)], rounds=2, seconds=1000)[0])==50

def test_order_of_calls(clock):
    calls = []
    times_in_turns([lambda: calls.append('a'), lambda: calls.append('b')], rounds=2, seconds=0)
    assert calls==list('ababab')

def test_speedup_is_that_of_the_best_turns(clock):
    "A first turn that is short doesn't count, and neither do turns that other processes made long"
    assert speedup(taking(clock, .1, 4, 2, 20, 2, 300), taking(clock, .1, 1, 10, 1, 1, 1))==2

def test_float_outputs():
    a,b = torch.zeros(2),torch.ones(1, dtype=torch.half)
    assert [id(o) for o in float_outputs(dict(x=[a, torch.tensor(1)], y=(b,None)))]==[id(a),id(b)]
    assert float_outputs(a)[0] is a and float_outputs(3)==[]

@dataclass
class Output:
    logits: torch.Tensor

def test_output_error():
    "The largest difference anywhere; another shape or number of tensors is no match, what both have instead of numbers is no difference, and without a tensor there's nothing to say"
    a = torch.zeros(2),dict(y=torch.ones(1, 3))
    assert output_error(a, (torch.tensor([0.,-.25]),dict(y=torch.ones(1, 3)+2)))==2
    assert output_error(a, (torch.zeros(2),dict(y=torch.ones(3))))==float('inf')
    assert output_error(torch.zeros(0), torch.zeros(0))==0 and math.isnan(output_error(3, 4))
    odd = torch.tensor([1.,math.inf,-math.inf,math.nan])
    assert output_error(odd, odd.clone())==0 and output_error(odd, odd+torch.tensor([.5,0,0,0]))==.5
    assert all(output_error((torch.zeros(4),odd), (torch.zeros(4),t))==math.inf for t in (odd.flip(0),torch.zeros(4)))
    assert output_error((odd,odd), (odd,))==math.inf and output_error(torch.tensor([True,False]), torch.tensor([True,True]))==1
    assert output_error(Output(odd), Output(odd+1))==1 and output_error(torch.tensor([1+2j]), torch.tensor([1+4j]))==2

@pytest.mark.parametrize('took,bars', [([.1]*10,[]), ([1.]*10,[9]), ([.25]*8,[]), ([1.]*3,[]), ([],[]), ([.1,.1,.1,3.,.1,.1,.1,.1],[4])])
def test_a_bar_comes_as_soon_as_it_is_seen_that_all_takes_long(monkeypatch, clock, took, bars):
    "More than 2 seconds at the pace so far, with more than two things left to do; all come once and in order"
    seen,items = [],lambda: (clock(t) or i for i,t in enumerate(took))
    monkeypatch.setattr(clocks, 'progress_bar', lambda xs, total, leave: seen.append(total) or xs)
    for progress in (False,None): assert [*shown(items(), progress, total=len(took))]==[*range(len(took))]
    assert seen==bars
