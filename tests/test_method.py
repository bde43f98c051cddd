"A method's parts: counts, paths, times in steps, fractions, samples and epochs, names, and the scores that users hand it"
import copy, math, numpy as np, pickle, pytest, torch
from fastsparse.all import *
from fastsparse.all import fisher_saliency
from fastsparse.methods.presets import MEST_presets
from fastsparse.core.registry import declares
from fastsparse.masks.distributions import as_distribution
from fastsparse.masks.schedules import cubic_path,epochs,samples
from fastsparse.methods.parts import acdc_path,drop_of_target,soft_bound_path
from fastsparse.masks.scores import MeanGradient,SampledGradient
from fastsparse.train.method import auto_presets,drop_of_live,Method
from functools import partial
from helpers import *
from hypothesis import given, strategies as st

inf,nan = math.inf,math.nan

def method(**kwargs): return Method(**dict(batches_per_update=10)|kwargs)
def times(m, n): return [t for t in range(n) if m.is_time(t)]

# --- counts

@pytest.mark.parametrize('live,target,f,of_live,of_target', [
    (100,100,.3,30,30), (100,80,.5,50,60), (100,80,.1,10,28), (10,10,.29,2,2), (100,100,.29,29,29),
    (100,50,.58,58,79), (1000,1000,.57,570,570), (10,10,.35,3,3), (7,7,1.,7,7), (0,5,.9,0,0),
    (5,9,.5,2,2), (100,0,.5,50,100), (3,3,0.,0,0)])
def test_drop_counts(live, target, f, of_live, of_target):
    "`int(f*n)` of all that live, or all that exceeds the target and `int(f*n)` of the rest (arXiv:2106.10404)"
    assert drop_of_live(live, target, f)==of_live and drop_of_target(live, target, f)==of_target

@given(live=st.integers(0,1000), target=st.integers(0,1000), f=st.floats(0,1), count=st.sampled_from([drop_of_live, drop_of_target]))
def test_kept_by_any_count(live, target, f, count):
    "Laws 1 and 2: never fewer than none nor more than live, never past the target, and room for all that is to grow"
    keep = method(drop_count_f=count).bind(100).n_keep(live, target, f)
    assert 0<=keep<=min(live, target) and keep<=live-int(f*min(live, target)*(1-1e-9))

@pytest.mark.parametrize('live,target,f,target_is_explicit,keep', [(100,100,.3,False,70), (100,80,.3,False,70), (100,60,.3,False,70), (100,60,.3,True,60), (60,100,.3,True,60), (100,100,.3,True,100)])
def test_kept_without_growth(live, target, f, target_is_explicit, keep):
    "`grow_score_f=None` drops the fraction, unless a target was asked for: then down to it, and no more"
    assert method(grow_score_f=None).bind(100).n_keep(live, target, f, target_is_explicit)==keep

# --- paths

def test_paths_by_hand():
    "s+(init-s)(1-t/stop)^3, and 1-(1-s)(1+extra) until the stop; both stay at the end and pickle; the cubic takes its end from `stop_pct`"
    expect = (cubic_path(), 0, .9-.9*.5**3), (cubic_path(.5), .5, .9-.4*.5**3), (soft_bound_path(.5, .5), .85, .85), (soft_bound_path(.1, .5), .89, .89)
    for path,first,half in expect:
        m = method(sparsity=.9, sparsity_path=pickle.loads(pickle.dumps(path)), stop_pct=.5).bind(200)
        assert [m.sparsity_at(t) for t in (0,50,100,150)]==pytest.approx([first,half,.9,.9])

def test_a_path_with_a_stop_of_its_own():
    "Only a `stop` without a default is filled with `stop_pct`"
    assert method(sparsity=.8, sparsity_path=lambda s, stop=.25: CubicSchedule(0, s, stop=stop)).bind(100).sparsity_at(25)==.8
    assert method(sparsity=.8, sparsity_path=acdc_path(), stop_pct=.1).bind(100).sparsity_at(90)==.8

def test_a_path_may_be_anything_that_is_a_schedule():
    "A number, a list, a function; what it returns counts, not the sparsity that it was called with"
    for made,expect in ((lambda s: s/2, [.4]*3), (lambda s: [s, s/2], [.8,.4,.8]), (lambda s: lambda t: s-.1*t, [.8,.7,.6])):
        m = method(sparsity=.8, sparsity_path=made).bind(100)
        assert [m.sparsity_at(i, i) for i in range(3)]==pytest.approx(expect)

def test_the_path_ends_at_an_update():
    "While the sparsity moves, updates come every so many steps and also where the path ends, and go on after it: 4, 8, ..., 30, 32, 36"
    m = method(batches_per_update=4, sparsity=.9, sparsity_path=cubic_path()).bind(40)
    assert times(m, 40)==[4,8,12,16,20,24,28,30,32,36]
    assert m.sparsity_at(30)==.9 and m.sparsity_at(28)<.9
    assert times(method(batches_per_update=4).bind(40), 40)==[4,8,12,16,20,24,28]

@pytest.mark.parametrize('schedule,t,expect', [(lambda t: 7., 3, 1.), (lambda t: -2., 3, 0.), (lambda t: .9-.02*t, 60, 0.), ([.1,.2], 0, .1)])
def test_fractions_are_clamped(schedule, t, expect):
    "Drop fraction and sparsity lie in [0,1] after the schedule"
    m = method(drop_fraction=schedule, sparsity=schedule).bind(100)
    assert m.fraction(t)==m.sparsity_at(t)==expect

def test_cycling_counts_updates():
    "The first value from the start, the next at each update, and again from the first"
    m = method(drop_fraction=[.1,.2,.3], sparsity=[.5,.6]).bind(100)
    got = []
    for n in range(5): got.append((m.fraction(0, n), m.sparsity_at(0, n)))
    assert got==[(.1,.5),(.2,.6),(.3,.5),(.1,.6),(.2,.5)]

# --- times

@pytest.mark.parametrize('updates,expect', [
    (20, [0,20,40,60,80]), ([.1,.25,.5], [10,25,50]), (FreqSchedule(samples(640), stop=.5), [0,10,20,30,40]),
    (FreqSchedule(epochs(1), start=epochs(1)), [25,50,75]),
    (dict(freq=30, start=.05, stop=epochs(3)), [5,35,65]),
    ([samples(6400/4), epochs(.5)], [13,25]), (lambda t: t in (3,5), [3,5]), ([], []), (FreqSchedule(samples(100)), [*range(0,100,2)])])
def test_times(updates, expect):
    "Steps, fractions of 100 steps, samples of batches of 64, epochs of 25 steps; an interval goes to the nearest step, a time up to the next"
    assert times(method(updates=updates).bind(100, batch_size=64, steps_per_epoch=25), 100)==expect

def test_the_plain_rule():
    "`batches_per_update`, `stop_pct` and a cosine: 10 to 70 of 100, and .15 of the live at the middle"
    m = method(initial_drop_grow_pct=.3).bind(100)
    assert times(m, 100)==[10,20,30,40,50,60,70] and m.fraction(0)==.3 and m.fraction(75)==0
    assert m.fraction(37.5)==pytest.approx(.15)

def test_no_length_needed():
    "A run without an end: times and drop fraction in steps"
    m = method(updates=FreqSchedule(5, start=5), drop_fraction=.2).bind()
    assert times(m, 21)==[5,10,15,20] and m.fraction(10**6)==.2

# --- settings

def test_numbers_of_other_kinds():
    "NumPy's integers and floats are numbers"
    m = Method(batches_per_update=np.int64(10), sparsity=np.float32(.5), stop_pct=np.float64(.5)).bind(np.int64(100))
    assert times(m, 100)==[10,20,30,40] and m.path is None and m.sparsity==.5

def test_every_batch():
    "Without replacement an update may come at every batch"
    assert times(Method(batches_per_update=1, replace_step=False).bind(10), 10)==[1,2,3,4,5,6,7]
    assert times(Method(updates=1, replace_step=False).bind(4), 4)==[0,1,2,3]

def test_a_schedule_goes_before_a_path():
    "A schedule given as `sparsity` wins over a preset's `sparsity_path`"
    m = method(sparsity=[.5,.6], sparsity_path=cubic_path()).bind(100)
    assert [m.sparsity_at(0, i) for i in range(3)]==[.5,.6,.5]

def test_parts_and_methods_by_name():
    "A name means what the function means, and a setting beside a method goes before its own"
    assert method(grow_score_f='random_score').grow_score_f is random_score and method(sparse_f='erk').sparse_f is erdos_renyi_sparsity
    assert repr(method(keep_score_f='MeanGradient').keep_score_f)=='MeanGradient(n_batches=8)'

@pytest.mark.parametrize('s', [0, 0., .5, .999999, np.float32(.3)])
def test_sparsities(s): assert Method(sparsity=s).sparsity==s

# --- what the parts say of themselves

@pytest.mark.parametrize('kwargs,read', [({}, []), (dict(keep_score_f=fisher_saliency), [*range(31)]), (dict(grow_score_f=MeanGradient(3)), [8,9,10,18,19,20,28,29,30]),
    (dict(keep_score_f=MeanGradient(3), grow_score_f=MeanGradient(3)), [8,9,10,18,19,20,28,29,30])])
def test_what_is_collected(kwargs, read):
    "Parts that average gradients are asked at the steps before an update, or at all; two of one kind once"
    m = method(**kwargs).bind(100)
    assert [t for t in range(31) if any(m.collects(c, t) for c in m.averages)]==read and len(m.averages)==(1 if kwargs else 0)

@pytest.mark.parametrize('name', ['erk','ERK','er','first-dense','first-last-dense','global','erdos_renyi'])
def test_distributions_have_one_name_everywhere(name):
    "What sparsify_model and layers_dense take by name, a method and a file take too, and mean the same"
    def same(a, b): return a is b or (a.func,a.args,a.keywords)==(b.func,b.args,b.keywords)
    want = as_distribution(name)
    assert same(Method(batches_per_update=10, sparse_f=name).sparse_f, want)
    assert same(configure(dict(method='set', sparsity=.5, sparse_f=name.lower()))[0][1]['sparse_f'], want)

def test_a_declared_distribution_has_a_name_everywhere():
    "A distribution of the user's own goes by its name in sparsify_model too"
    @declares('distribution')
    def own_sparsity(params, model_sparsity): return [model_sparsity]*len(params)
    assert as_distribution('own') is as_distribution('own_sparsity') is Method(batches_per_update=10, sparse_f='own').sparse_f is own_sparsity

def test_masks_by_name_are_one_list():
    "Every named start of masks serves sparsify_model, engine and files"
    m = nn.Sequential(nn.Linear(8,8))
    sparsify_model(m, .5, mask_init='checkerboard', seed=0)
    assert (m[0].weight_mask.sum(0)==4).all() and (m[0].weight_mask.sum(1)==4).all()
    assert configure(dict(method='set', sparsity=.5, mask_init='checkerboard'))[0][1]['mask_init']=='checkerboard'

def test_a_setting_that_is_heard_beside_the_schedules_of_a_method_is_taken():
    assert MEST_presets(updates=None, batches_per_update=3)['batches_per_update']==3
    assert MEST_presets(updates=[.5], drop_fraction=None, initial_drop_grow_pct=.5)['initial_drop_grow_pct']==.5
    assert MEST_presets(sparsity_path=cubic_path(), stop_pct=.5)['stop_pct']==.5
    assert RigL_presets(stop_pct=.5, initial_drop_grow_pct=.2)['stop_pct']==.5
    assert MEST_presets(updates=[.5])(sparsity=.9)['updates']==[.5]

# --- scores and starts of users

class Ones:
    def __call__(self, p): return torch.ones_like(p)

def all_named(p, mask, name, module, step, n, generator, opt):
    return torch.ones_like(p)*(mask.dtype==torch.bool)*(module.weight.data_ptr()==p.data_ptr())*(name in ('0.weight','2.weight'))*(step==2)

@pytest.mark.parametrize('f', [lambda p: torch.ones_like(p), lambda param, opt=None, **kwargs: torch.ones_like(param), lambda param, opt: torch.ones_like(param),
    Ones(), all_named, partial(lambda k, p: torch.ones_like(p), 3), torch.ones_like, lambda p: torch.ones(p.shape, dtype=torch.int64),
    lambda p: torch.ones(p.shape, dtype=torch.double), lambda p: torch.ones_like(p).requires_grad_()*1, lambda p: torch.ones(p.shape[::-1]).t()])
def test_call_shapes(f):
    "Every shape of score function, and scores of other dtypes and layouts: all ones keep and grow the lowest indices"
    m,opt,_ = two_layers(lr=0.)
    dst,before = engine(m, opt, keep_score_f=f, grow_score_f=f),masks_of(m)
    for _ in range(3): step(dst, torch.ones(10,10), torch.ones(10,10))
    k = int(.15*(1+math.cos(math.pi*2/75))*50)
    for b,o in zip(before, masked_params(m)):
        new = torch.zeros(100, dtype=torch.bool)
        new[b.view(-1).nonzero().view(-1)[:50-k]] = True
        new[(~new).nonzero().view(-1)[:k]] = True
        assert torch.equal(o.mask.view(-1), new)

bad_scores = [lambda p: p.detach()[0], lambda p: p.detach().sum(), lambda p: torch.zeros(1,1), lambda p: None, lambda p: p.detach().tolist(), lambda p: 3.,
    lambda p: torch.ones(1, dtype=torch.bool), lambda p: torch.ones(*p.shape,1), lambda p: torch.ones(p.shape, dtype=torch.bool)[:1]]

def last(f): return lambda p, module, name: f(p) if name=='2.weight' else p.detach().abs()
wrong = [({key:declares(elementwise=alone)(last(f))}, r'2\.weight') for key,alone in (('keep_score_f',False),('keep_score_f',True),('grow_score_f',False)) for f in bad_scores]
wrong += [(dict(redistribute_f=lambda p, bad=bad: bad), 'redistribution') for bad in (nan,inf,-1.)]
wrong += [(dict(grow_score_f=lambda p: torch.ones_like(p, dtype=torch.bool)), '0.weight.*live weights'),
    (dict(grow_init_f=lambda p, name: torch.zeros(3) if name=='2.weight' else p.detach()), 'a start for 2.weight has shape')]

@pytest.mark.parametrize('i', range(len(wrong)))
def test_wrong_scores_are_refused_with_nothing_changed(i):
    "Law 10: by the parameter's name, also when only the last one's score is wrong, or sees live weights alone; shares that are no numbers; starts of another shape"
    settings,said = wrong[i]
    m,opt,batch = two_layers(.8)
    dst = engine(m, opt, initial_drop_grow_pct=.5, **settings)
    train(m, opt, 2, *batch)
    before = copy.deepcopy((m.state_dict(), opt.state_dict()['state']))
    with pytest.raises(ValueError, match=said): train(m, opt, 1, *batch)
    assert agree(before, (m.state_dict(), opt.state_dict()['state'])) and dst.n_updates==0

@pytest.mark.parametrize('kwargs', [dict(n_steps=0), dict(n_steps=1.5), dict(n_steps=10, n_updates=0), dict(n_steps=10, n_updates=1.5)])
def test_auto_takes_whole_numbers(kwargs):
    "Of steps and of updates, from one"
    with pytest.raises(ValueError, match='must be'): auto_presets(**kwargs)

def test_defaults_of_a_run_by_hand():
    "An update every 100 steps or each epoch; `auto` looks at a share of the dead weights at each of its updates, all together once"
    assert Method('m').bind(n_steps=100_000).every==100 and Method('m').bind(n_steps=100_000, steps_per_epoch=40).every==40
    auto = auto_presets(100, 8)
    assert int(auto.batches_per_update)==12 and vars(auto.grow_score_f)==vars(SampledGradient(1/7, 'dead'))  # 75 steps hold 6 whole intervals and a part
    assert int(auto_presets(20, 32).batches_per_update)==8
    for bad in (2.5, 0, '4'):
        with pytest.raises(ValueError, match='batches_per_update'): Method.named('auto', 100, batches_per_update=bad)
