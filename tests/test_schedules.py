"Schedules: when the topology moves, how much of it and towards which sparsity; also those of `compat.cerebras`"
import copy, json, math, numpy as np, pickle, pytest, yaml
from dataclasses import FrozenInstanceError,dataclass
from fastai.callback.schedule import SchedCos,SchedExp,SchedLin,SchedPoly,combine_scheds,combined_cos
from fastsparse.compat.cerebras import CosineDecaySchedule,CosineSchedule,ExpSchedule,LinearSchedule,PowerSchedule,SawtoothSchedule,schedule_spec
from fastsparse.masks.schedules import ConstantSchedule,cosine_drop,cubic_path,CubicSchedule,CyclingSchedule,epochs
from fastsparse.methods.parts import acdc_path,dsd_path,soft_bound_path,SquareSchedule
from fastsparse.masks.schedules import fraction_at,FreqSchedule,FunctionSchedule,FunctionUpdateSchedule,in_steps,Interval,ListSchedule,make_schedule
from fastsparse.masks.schedules import make_update_schedule,min_max_end,PiecewiseSchedule,PositionSchedule,samples,Schedule
from fastsparse.masks.schedules import steps,Time,update_due,update_steps
from functools import partial
from hypothesis import example,given,settings,strategies as st

some = settings(max_examples=60, deadline=None)
unit = st.floats(0,1)
near = partial(pytest.approx, abs=1e-5, rel=1e-5)

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

@settings(max_examples=100, deadline=None)
@example(n=1, initial=5e-324, stop=1.)
@given(n=st.integers(1,5000), initial=st.floats(0,1), stop=st.floats(.01,1))
def test_cosine_falls(n, initial, stop):
    "In [0, initial], never rising, zero at the end of its span; asking twice gives the same number"
    v = [cosine_drop(t, n, initial, stop) for t in range(0, n+2, max(n//50, 1))]
    assert all(0<=o<=initial for o in v) and all(a>=b for a,b in zip(v, v[1:])) and v[0]==initial
    assert cosine_drop(math.ceil(stop*n), n, initial, stop)==0
    assert v==[cosine_drop(t, n, initial, stop) for t in range(0, n+2, max(n//50, 1))]

# --- values by hand

tables = [
    (ConstantSchedule(1), {0:1, 10**6:1}),
    (LinearSchedule(.1, .01), {0:.1, 50:.6, 200:2.1}),
    (LinearSchedule(.3, -.0003), {0:.3, 1:.2997, 100:.27, 1000:0}),
    (ExpSchedule(0, math.log(.3)/1000), {0:0, 1000:.7, 2000:.91}),
    (ExpSchedule(2, -1, 0), {0:2, 1:2/math.e}),
    (PowerSchedule(.3, .5), {0:.3, 3:.0375}),
    (PowerSchedule(.3, 0), {0:.3, 1:0}),
    (CosineSchedule(.3, 1000), {0:.3, 250:.256066, 500:.15, 1000:0, 1500:.15, 2000:.3}),
    (CosineSchedule(.1, 4, .5), {0:.1, 2:.3, 4:.5, 6:.3, 8:.1}),
    (CosineDecaySchedule(.3, 1000), {0:.3, 250:.256066, 500:.15, 750:.3-.256066, 1000:0, 1500:0, 10**9:0}),
    (CosineDecaySchedule(.3, 10, .1), {0:.3, 5:.2, 10:.1, 11:.1}),
    (CubicSchedule(0, .8, 1000, 100), {0:0, 100:0, 200:.23813, 400:.56296, 550:.7, 1000:.8, 1001:.8}),
    (CubicSchedule(.9, .1, 4), {0:.9, 2:.2, 4:.1}),  # half way: 1-(1/2)^3 = 7/8 of the way down
    (CubicSchedule(.2, .6, 5, 5), {4:.2, 5:.6}),
    (CubicSchedule(0, .9, 100, power=.5), {0:0, 50:.9*(1-.5**.5), 100:.9, 500:.9}),
    (SawtoothSchedule(.2, .9, 4, stop=5, start=5), {4:.2, 5:.9, 6:.9}),  # no teeth
    (SawtoothSchedule(0, .8, 10, 30, 10), {0:0, 9:0, 10:0, 15:.7, 19:.8*(1-.001), 20:0, 25:.7, 29:.8*(1-.001), 30:.8, 99:.8}),
    (PiecewiseSchedule([0,.5,0], [30,60]), {0:0, 29:0, 30:.5, 59:.5, 60:0, 99:0}),
    (PiecewiseSchedule([.4], []), {0:.4, 9:.4}),
    (PiecewiseSchedule([.1,.2,.3], [5,5]), {4:.1, 5:.3}),
    (SquareSchedule(0, .9, 5, 30, 10), {0:0, 9:0, 10:.9, 14:.9, 15:0, 19:0, 20:.9, 25:0, 29:0, 30:.9, 99:.9}),
    (SquareSchedule(0, .9, 5, 37, 10), {25:0, 30:0, 36:0, 37:.9}),  # a pair takes 10: two fit, what is left stays dense
    (SquareSchedule(0, .9, 5, 12, 10), {10:0, 11:0, 12:.9}),
    (FunctionSchedule(lambda step: 1/(1+step)), {0:1, 3:.25}),
    (PositionSchedule(lambda pos: pos*pos, 10), {0:0, 5:.25, 10:1, 20:1})]

@pytest.mark.parametrize('s,values', tables, ids=lambda o: type(o).__name__)
def test_by_hand(s, values):
    "The formulas worked out by hand. Every value is a float, and asking twice, in any order, gives the same"
    got = {t: s(t) for t in values}
    assert got==near(values) and all(type(o) is float for o in got.values())
    assert [s(t) for t in reversed(values)]==[*got.values()][::-1]

# --- laws of shape

@some
@given(n=st.integers(1,3000), init=unit, stop=st.floats(.01,1))
@example(n=1001, init=.3, stop=.75)
@example(n=100, init=.3, stop=.07)
@example(n=1, init=5e-324, stop=1.)
def test_decay_is_cosine_drop(n, init, stop):
    "Bit for bit the function that RigL's engine uses, also where the end falls between two steps"
    s = CosineDecaySchedule(init, stop).bind(n_steps=n)
    ts = range(0, n+3, max(n//40, 1))
    assert [s(t) for t in ts]==[cosine_drop(t, n, init, stop) for t in ts]

@some
@example(a=.03, b=.9, start=0, length=9)
@given(a=unit, b=unit, start=st.integers(0,50), length=st.integers(0,100))
def test_monotone(a, b, start, length):
    "Cubic and decay move one way, hit both ends exactly, never pass them and never come back (a cosine that rebounds, one that never arrives)"
    for s,t0 in ((CubicSchedule(a, b, start+length, start), start), (CosineDecaySchedule(a, start+length, b), 0)):
        v = [s(t) for t in range(start+length+5)]
        assert all(x==a for x in v[:t0+(start+length>t0)]) and all(x==b for x in v[start+length:])
        assert all(min(a,b)<=x<=max(a,b) for x in v) and (v==sorted(v) or v==sorted(v, reverse=True))

@some
@given(init=unit, half=st.integers(1,400), minimum=unit, k=st.integers(0,50))
def test_cosine_swings(init, half, minimum, k):
    "The oscillating cosine is at `init` after every even half period and at `minimum` after every odd one"
    assert CosineSchedule(init, half, minimum)(k*half)==near(minimum if k%2 else init)

@some
@given(values=st.lists(unit, min_size=1, max_size=5), n=st.integers(0,40), step=st.integers(0,10**6))
def test_cycling(values, n, step):
    "The first value before any update, the next after each, the first again after the last; the step plays no part"
    s = CyclingSchedule(values)
    assert s(step, n)==values[n%len(values)] and s(step)==values[0]
    assert min_max_end(s, 0, 9)==(min(values),max(values),values[-1])

ranges = st.tuples(st.integers(0,60), st.integers(0,80)).map(lambda o: (o[0], o[0]+o[1]))
times = st.integers(1,40)|st.floats(.6,40).map(steps)
anyone = st.one_of(st.builds(ConstantSchedule, unit), st.builds(LinearSchedule, unit, st.floats(-.1,.1)),
    st.builds(ExpSchedule, unit, st.floats(-.5,.05), unit), st.builds(PowerSchedule, unit, st.floats(0,1.05)),
    st.builds(CosineSchedule, unit, times, unit), st.builds(CosineDecaySchedule, unit, times, unit),
    st.builds(lambda a,b,t,d: CubicSchedule(a, b, t+d, t), unit, unit, st.integers(0,30), st.integers(0,30)),
    st.builds(lambda a,b,p,t,d: SawtoothSchedule(a, b, p, t+d, t), unit, unit, times, st.integers(0,30), st.integers(0,90)),
    st.builds(lambda a,b,p,t,d: SquareSchedule(a, b, p, t+d, t), unit, unit, times, st.integers(0,30), st.integers(0,90)),
    st.builds(lambda a,b,c,t,d: PiecewiseSchedule([a,b,c], [t,t+d]), unit, unit, unit, st.integers(0,50), st.integers(0,50)),
    st.builds(FunctionSchedule, st.sampled_from([math.sin, math.cos])), st.builds(PositionSchedule, st.just(math.sqrt), times))

@settings(max_examples=300, deadline=None)
@given(s=anyone, r=ranges)
def test_min_max_end(s, r):
    "Equal to trying every step, whatever the schedule knows about itself"
    v = [s(t) for t in range(r[0], r[1]+1)]
    assert min_max_end(s, *r)==pytest.approx((min(v), max(v), v[-1]), abs=1e-14)
    assert s(r[1])==min_max_end(s, *r)[2]

@given(v=st.floats(-5,5))
def test_fraction(v):
    "Clamped to [0,1] after the schedule, and unchanged inside"
    assert fraction_at(ConstantSchedule(v), 0)==sorted((0.,v,1.))[1]

@pytest.mark.parametrize('s,t', [(PowerSchedule(1, 10), 400), (ExpSchedule(0, 1.), 10**4), (LinearSchedule(0, 1e308), 10),
    (FunctionSchedule(lambda step: math.nan), 0), (FunctionSchedule(lambda step: -math.inf), 3)])
def test_not_finite(s, t):
    "What is not finite is refused at the step where it happens, with the schedule's name"
    with pytest.raises(ValueError, match=f'{type(s).__name__}.*at step {t}.*finite'): s(t)

# --- time

@pytest.mark.parametrize('t,run,expect', [
    (100, {}, 100), (0, {}, 0), (1, dict(n_steps=50), 1), (1., dict(n_steps=50), 50), (steps(2.5), {}, steps(2.5)), (np.int64(7), {}, 7),
    (.75, dict(n_steps=1000), 750), (.75, dict(n_steps=1001), steps(750.75)), (samples(409600), dict(batch_size=64), 6400),
    (samples(100), dict(batch_size=64), steps(1.5625)), (epochs(5), dict(steps_per_epoch=391), 1955),
    (epochs(.5), dict(steps_per_epoch=391), steps(195.5)), (dict(samples=640), dict(batch_size=64), 10), (dict(steps=5), {}, steps(5))])
def test_in_steps(t, run, expect):
    "An int is steps, also 1, and a float a fraction, also 1.; nothing is rounded"
    got = in_steps(t, **run)
    assert got==expect and type(got) is type(expect)

@pytest.mark.parametrize('bad', [True, -1, -.1, 1.5, math.nan, math.inf, '5', None, [5], dict(weeks=1), dict(samples=1, epochs=2)])
def test_no_time(bad):
    "A bool, a negative number, a float past 1 and other things are no time"
    with pytest.raises(ValueError, match='must be a time'): in_steps(bad)
    with pytest.raises(ValueError, match="CosineDecaySchedule's stop"): CosineDecaySchedule(.3, bad)

@pytest.mark.parametrize('bad', [-1, math.nan, math.inf, True, '5', None])
def test_no_amount(bad):
    "A unit of a negative, infinite or missing amount is refused"
    for f in (steps,samples,epochs):
        with pytest.raises(ValueError, match=f.__name__): f(bad)

@pytest.mark.parametrize('t,need', [(.5,'n_steps'), (samples(5),'batch_size'), (epochs(2),'steps_per_epoch')])
def test_unbound(t, need):
    "A time that is not in steps is never taken for one: calling, looking ahead or binding without the number that it needs names it"
    value = [CosineDecaySchedule(.3, t), CubicSchedule(0, .9, t), PiecewiseSchedule([0,1], [t])]
    when = [FreqSchedule(t), ListSchedule([1,t]), FreqSchedule(3, 1, t)]
    asks = [partial(s, 0) for s in value+when]+[s.bind for s in value+when]+[partial(min_max_end, s, 0, 9) for s in value]
    asks += [partial(update_steps, s, 9) for s in when]+[partial(in_steps, t)]
    for f in asks:
        with pytest.raises(ValueError, match=rf'bind\({need}='): f()

def test_bound_needs_no_bind():
    "Schedules without other times work as they are, and binding them changes nothing"
    for s in (ConstantSchedule(1), CosineDecaySchedule(.3, 10), CubicSchedule(0, .9, 10), CyclingSchedule([1,2]), FreqSchedule(5),
        ListSchedule([1,2])):
        s(3)
        assert s.bind()==s and s.bind(n_steps=7, batch_size=3, steps_per_epoch=2)==s
    for n in (0,-1,math.nan,True,'9'):
        with pytest.raises(ValueError, match='n_steps is .* above 0'): CosineDecaySchedule(.3).bind(n_steps=n)

def test_units_differ():
    "Equal numbers in different units are different times, in sets and schedules too"
    ts = [5, .5, steps(5), samples(5), epochs(5)]
    assert len(set(ts))==5 and all((a==b)==(i==j) and (a!=b)==(i!=j) for i,a in enumerate(ts) for j,b in enumerate(ts))
    assert CosineDecaySchedule(.3, samples(1))!=CosineDecaySchedule(.3, 1.) and samples(5)==samples(5.)
    assert [pickle.loads(pickle.dumps(copy.deepcopy(t))) for t in ts]==ts and [eval(repr(t)) for t in ts]==ts

# --- one object

specs = [.3, 0, [.3,.4], dict(type='linear', init=.1, slope=.01), dict(type='exp', init=0, gamma=-.01, final=.5), dict(type='constant', value=1),
    dict(type='cosine', init=.3, half_period=dict(samples=1000)), dict(type='cosine_decay', init=.3, stop=.5), dict(type='power', init=.3, beta=.5),
    dict(type='cubic', init=0, end=.9, stop=dict(epochs=3), start=10), dict(type='sawtooth', init=0, end=.9, period=.25),
    dict(type='piecewise', values=[0,.5,0], times=[.01,dict(epochs=3)]), dict(type='square', init=0, end=.9, phase=5)]

@pytest.mark.parametrize('spec', specs, ids=str)
def test_round_trip(spec):
    "Made, written down as plain data, through JSON and YAML, and made again: the same schedule; also pickled, copied and printed"
    s = make_schedule(spec)
    plain = schedule_spec(s)
    assert make_schedule(plain)==s and make_schedule(json.loads(json.dumps(plain)))==s and make_schedule(yaml.safe_load(yaml.safe_dump(plain)))==s
    assert pickle.loads(pickle.dumps(s))==s==copy.deepcopy(s) and hash(s)==hash(copy.deepcopy(s))
    b = s.bind(n_steps=1001, batch_size=32, steps_per_epoch=7)
    assert make_schedule(schedule_spec(b))==b and [b(t) for t in range(9)]==[pickle.loads(pickle.dumps(b))(t) for t in range(9)]
    assert eval(repr(s), globals())==s
    with pytest.raises(FrozenInstanceError): s.init = 5

@pytest.mark.parametrize('spec', [None, 5, .1, dict(samples=4096), dict(freq=5, start=3, stop=13),
    dict(freq=dict(samples=4096), stop=.75), dict(start=5), [3,1], range(0,9,3)], ids=str)
def test_update_round_trip(spec):
    "The same for update schedules"
    s = make_update_schedule(spec)
    plain = schedule_spec(s)
    assert make_update_schedule(json.loads(json.dumps(plain)))==s==make_update_schedule(yaml.safe_load(yaml.safe_dump(plain)))==pickle.loads(pickle.dumps(s))
    b = s.bind(n_steps=100, batch_size=32, steps_per_epoch=7)
    assert make_update_schedule(schedule_spec(b))==b

@pytest.mark.parametrize('bad,say', [
    (True,'no schedule'), ('0.3','no schedule'), (None,'no schedule'), (samples(3),'no schedule'), (FreqSchedule(3),'no schedule'),
    (math.nan,'finite'), ([.1,True],r'values\[1\]'), (dict(init=3),"type is 'none'"), (dict(type='cosin', init=1),'cosine_decay'),
    (dict(type='cosine', init=True, half_period=3),"init is True"), (dict(type='cubic', init=0, end=1, power=-1),'above 0'),
    (dict(type='piecewise', values=[1,2], times=[]),'one value more'),
    (dict(type='power', init=1, beta=-1),'from 0')])
def test_refused(bad, say):
    "Each mistake has an error that names it (a bool as number, a type that isn't there)"
    with pytest.raises(ValueError, match=say): make_schedule(bad)

def test_order_after_bind():
    "Times in different units can be put in order only once they are bound"
    s = CubicSchedule(0, .9, stop=epochs(2), start=.5)
    assert s.bind(n_steps=100, steps_per_epoch=50)==CubicSchedule(0, .9, 100, 50)
    with pytest.raises(ValueError, match='start before'): s.bind(n_steps=100, steps_per_epoch=10)(0)

# --- functions

def counted(step, n_updates): return step+10*n_updates
def optional(step, scale=2): return step*scale
def named(step, *, n_updates): return n_updates

class Callable:
    "An object to call, with a method to call"
    def __call__(self, step): return 2*step
    def method(self, step, n_updates=0): return n_updates

@pytest.mark.parametrize('f,expect', [(lambda step: 3*step, 15), (lambda s,n_updates: s+n_updates, 7), (counted, 25), (optional, 10), (named, 2),
    (partial(counted, n_updates=1), 25), (Callable(), 10),
    (Callable().method, 2), (lambda *a: a[0], 5), (np.square, 25), (lambda step: np.float32(.5), .5)])
def test_functions(f, expect):
    "Any function of the step, or of step and updates, lambdas too; defaults of other names stay defaults"
    assert make_schedule(f)(5, 2)==expect

@pytest.mark.parametrize('f', [SchedCos(.3,0), SchedLin(.1,.9), SchedExp(.9,.1), SchedPoly(.9,0,3), combine_scheds([.25,.75],
    [SchedLin(0,.5),SchedCos(.5,0)]), combined_cos(.25,.1,.9,.2)])
def test_fastai_annealers(f):
    "fastai's annealers get the position, not the step, and stay at their end"
    s = make_schedule(f).bind(n_steps=200)
    assert isinstance(s, PositionSchedule) and [s(t) for t in (0,50,123,200,300)]==near([float(f(p)) for p in (0.,.25,.615,1.,1.)])

def test_functions_are_not_written():
    "A file holds no function"
    for f in (lambda step: step, counted, SchedCos(1, 0)):
        with pytest.raises(ValueError, match='file'): schedule_spec(make_schedule(f))

def test_own_class():
    "A user's own schedule is found by name, checks its fields and knows units"
    @dataclass(frozen=True)
    class HalfPipeSchedule(Schedule):
        depth:float
        width:Time=.5
        def at(self, step, n_updates): return self.depth*abs(step/self.width-1)
    s = make_schedule(dict(type='half_pipe', depth=2)).bind(n_steps=20)
    assert [s(t) for t in (0,5,10)]==[2,1,0] and min_max_end(s, 0, 15)==(0,2,1) and make_schedule(schedule_spec(s))==s

# --- when

@pytest.mark.parametrize('s,n,due', [
    (FreqSchedule(5), 16, [0,5,10,15]), (FreqSchedule(5, 3), 16, [3,8,13]), (FreqSchedule(5, 3, 13), 30, [3,8]),
    (FreqSchedule(5, 3, 14), 30, [3,8,13]), (FreqSchedule(), 3, [0,1,2]),
    (FreqSchedule(2, 5, 5), 30, []), (FreqSchedule(2, 9, 3), 30, []), (FreqSchedule(100), 50, [0]), (ListSchedule([7,3,3]), 10, [3,7]),
    (ListSchedule([7,3]), 7, [3]), (ListSchedule([]), 9, []),
    (FunctionUpdateSchedule(lambda step: step in (2,4)), 4, [2]), (FreqSchedule(2, stop=1), 9, [0])], ids=lambda o: str(o).split(' at 0x')[0])
def test_update_steps(s, n, due):
    "By hand; `stop` is exclusive. The list agrees with asking every step"
    assert [t for t in range(n) if s(t)]==due==[*update_steps(s, n)] and all(type(s(t)) is bool for t in range(n))

@some
@given(freq=st.integers(1,30), start=st.integers(0,60), length=st.none()|st.integers(0,90), n=st.integers(0,150))
def test_freq(freq, start, length, n):
    "`(step-start)%freq==0 and start<=step<stop`"
    stop = None if length is None else start+length
    s = FreqSchedule(freq, start, stop)
    due = [t for t in range(n) if t>=start and (t-start)%freq==0 and (stop is None or t<stop)]
    assert [*update_steps(s, n)]==due==[t for t in range(n) if s(t)]

@pytest.mark.parametrize('s,bound', [
    (FreqSchedule(samples(409600)), FreqSchedule(6400)), (FreqSchedule(samples(100)), FreqSchedule(2)),
    (FreqSchedule(samples(10)), FreqSchedule(1)), (FreqSchedule(.01, .1, .75), FreqSchedule(10, 101, 751)),
    (FreqSchedule(5, epochs(.5), 1.), FreqSchedule(5, 4, 1001)), (ListSchedule([.5,.5,10,epochs(1)]), ListSchedule([7,10,501]))])
def test_update_bind(s, bound):
    "Intervals to the nearest step and at least 1, starts, stops and lists up to the next: 1001 steps, batches of 64, 7 steps an epoch"
    assert s.bind(n_steps=1001, batch_size=64, steps_per_epoch=7)==bound

@pytest.mark.parametrize('stop,n,last', [(.07,100,7), (.29,100,29), (.57,100,57), (.1,30,3), (.7,10,7)])
def test_float_trifles(stop, n, last):
    "`.07*100` is 7.000000000000001 in floats: what stops or jumps at .07 of 100 steps does so at step 7, not 8"
    assert FreqSchedule(1, stop=stop).bind(n_steps=n).stop==last
    assert [PiecewiseSchedule([0,1], [stop]).bind(n_steps=n)(t) for t in (last-1,last)]==[0,1]
    assert [SquareSchedule(0, 1, .5, stop).bind(n_steps=n)(t) for t in (last-1,last)]==[0,1]

@settings(max_examples=40, deadline=None)
@given(every=st.integers(2,60), n=st.integers(2,400), eighths=st.integers(1,8))
def test_freq_is_update_due(every, n, eighths):
    "The engine's rule is an interval that starts after itself, stops at the fraction and leaves the last step alone"
    s = FreqSchedule(every, every, eighths/8).bind(n_steps=n)
    assert [t for t in update_steps(s, n) if t<n-1]==[t for t in range(n) if update_due(t, every, n, eighths/8)]

@pytest.mark.parametrize('spec,expect', [(None, FreqSchedule(1)), (7, FreqSchedule(7)), (.1, FreqSchedule(.1)),
    (samples(64), FreqSchedule(samples(64))), (dict(samples=64), FreqSchedule(samples(64))),
    (dict(freq=5, start=3), FreqSchedule(5, 3)), (dict(stop=9), FreqSchedule(stop=9)),
    (dict(steps=5), FreqSchedule(steps(5))), ((5,3), ListSchedule([5,3]))], ids=str)
def test_make_update_schedule(spec, expect):
    "Numbers are intervals, lists are steps"
    assert make_update_schedule(spec)==expect

@pytest.mark.parametrize('bad,say', [(True,'True'), (0,'above 0'), (-5,'must be a time'), (2.5,'must be a time'), ('5','no update schedule'),
    ([1,True],r'steps\[1\]'), ([1,-2],'must be a time'), (ConstantSchedule(1),'no update schedule'), (FreqSchedule,'no update schedule')])
def test_update_refused(bad, say):
    "Each mistake has an error that names it"
    with pytest.raises(ValueError, match=say): make_update_schedule(bad).bind()

# --- paths

@pytest.mark.parametrize('path,values', [
    (ConstantSchedule, [.9,.9,.9,.9]), (cubic_path(stop=.75), [0,.9*(1-(1-4/9)**3),.9*(1-(1-8/9)**3),.9]),
    (cubic_path(.5, 1/3, 1/3), [.5,.9,.9,.9]), (acdc_path(), [0,.9,0,.9]), (dsd_path(), [0,.9,0,0]),
    (dsd_path(.1, .4), [0,.9,0,0]), (soft_bound_path(), [.85,.85,.875,.9]), (soft_bound_path(20., .5), [0,0,.9,.9]),
    (partial(SawtoothSchedule, 0., period=.5), [0,.9*(1-(1/3)**3),.9*(1-(2/3)**3),.9])])
def test_paths(path, values):
    "From the final sparsity to a schedule; they pickle, and steps 0, 300, 600 and 900 of 900 are as worked out by hand"
    s = pickle.loads(pickle.dumps(path))(.9)
    assert s==path(.9)
    assert [s.bind(n_steps=900)(t) for t in (0,300,600,900)]==near(values)

def test_a_path_takes_a_stop_later():
    "A path without a stop of its own is given the method's; bounds need a stop each"
    assert cubic_path(power=2)(.9, stop=100)==CubicSchedule(0., .9, 100, power=2)
    with pytest.raises(ValueError, match='one value more'): soft_bound_path(.5)(.9)

# --- intervals

@pytest.mark.parametrize('every,n,stop,replaces,want', [
    (100, 40_000, .75, True, 100),   # 299 updates: the paper's own
    (100, 4_002, .75, True, 100),    # updates end before 3001.5: 100, 200, ..., 3000 are 30
    (100, 4_000, .75, True, 99),     # the 30th would come at 3000, where they have ended
    (100, 2_000, .75, True, 49),     # 49*30 = 1470 < 1500 = 50*30
    (100, 380, .75, True, 10),       # 30 would need every 9th step, and more than one in ten would be replaced
    (100, 380, .75, False, 9),       # 9*30 = 270 < 285
    (100, 220, 1., False, 7),        # never at the last step: 7*30 = 210 <= 218
    (4000, 380, 1., True, 12),       # 12*30 = 360 <= 378
    (1000, 30, .75, False, 1), (1000, 30, .75, True, 10), (1, 1, 1., False, 1),
    (4, 50, .75, True, 4)])          # a paper's interval is never made longer
def test_interval(every, n, stop, replaces, want):
    "The paper's where the run is long; 30 updates before the end where it is short; one replaced step in ten at most. By hand"
    got = Interval(every).resolve(n, stop, replaces)
    assert got==want and type(got) is int

@given(every=st.integers(1,5000), n=st.integers(1,3000), stop=st.floats(.05,1), replaces=st.booleans())
def test_interval_is_the_longest_that_fits(every, n, stop, replaces):
    "Counted step by step: at least 30 updates, or no shorter interval is allowed; the next longer one makes fewer, or is more than the paper's"
    due = lambda e: sum(update_due(t, e, n, stop) for t in range(n))
    got = Interval(every).resolve(n, stop, replaces)
    least = min(every, 10 if replaces else 1)
    assert least<=got<=every
    assert due(got)>=30 or got==least
    assert got==every or due(got+1)<30

def test_interval_is_an_integer():
    "It adds, compares, hashes, pickles and goes into JSON as the integer that it is; the kind survives copies, and says itself"
    i = Interval(100)
    for o in (pickle.loads(pickle.dumps(i)), copy.copy(i), copy.deepcopy(i)): assert type(o) is Interval and o==100 and o.resolve(220)==10
    assert repr(i)=='Interval(100)' and json.dumps(dict(every=i))=='{"every": 100}' and hash(i)==hash(100) and make_update_schedule(i)==FreqSchedule(100)

@pytest.mark.parametrize('bad', [0, -5, 2.5, True, None, '100'])
def test_interval_refuses(bad):
    "Law 10: what is no number of steps"
    with pytest.raises(ValueError, match='whole number from 1'): Interval(bad)

def test_an_interval_of_a_short_run_by_hand():
    "The last step that may bring an update over thirty: 749, 750 of .751, and 300 where only the end of the run bounds it"
    resolve = Interval(100).resolve
    assert resolve(1000)==24 and resolve(1000, .751)==25 and resolve(302, 1., replaces=False)==10
    assert resolve(100)==10 and resolve(100, replaces=False)==2 and Interval(7).resolve(10_000)==7

def test_times_by_hand():
    "Where no fraction of the run is given, updates end at three quarters; an interval of one is each step"
    assert update_due(70, 10, 100) and not update_due(80, 10, 100)
    assert [FreqSchedule(1).bind()(t) for t in range(3)]==[True,True,True]
