"Room 04a: a method's parts: counts, paths, refusals, and times in steps, fractions, samples and epochs"
import math, numpy as np, pickle, pytest, torch
from fastsparse.all import *
from fastsparse.masks.distributions import as_distribution
from fastsparse.masks.schedules import acdc_path,cubic_path,epochs,samples,soft_bound_path
from fastsparse.masks.scores import Sampled,MeanGradient,fisher_saliency
from fastsparse.train.method import check_sparsity,drop_of_live,drop_of_target,find_method,Method,settings_of
from helpers import *
from hypothesis import given, strategies as st

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
    keep = method(drop_count_f=count).n_keep(live, target, f)
    assert 0<=keep<=min(live, target) and keep<=live-int(f*min(live, target)*(1-1e-9))

@pytest.mark.parametrize('live,target,f,target_is_explicit,keep', [(100,100,.3,False,70), (100,80,.3,False,70), (100,60,.3,False,70), (100,60,.3,True,60), (60,100,.3,True,60), (100,100,.3,True,100)])
def test_kept_without_growth(live, target, f, target_is_explicit, keep):
    "`grow_score_f=None` drops the fraction, unless a target was asked for: then down to it, and no more"
    assert method(grow_score_f=None).bind(100).n_keep(live, target, f, target_is_explicit)==keep

@pytest.mark.parametrize('bad', [51, -1, 2.5, None, math.nan])
def test_bad_drop_count(bad):
    "Law 10: a user's count outside of [0,live], or no integer, is refused by name"
    with pytest.raises(ValueError, match=r'drop_count_f returned.*\[0,50\]'): method(drop_count_f=lambda live,target,f: bad).n_keep(50, 50, .3)

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
    for m.n_updates in range(5): got.append((m.fraction(0), m.sparsity_at(0)))
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

@pytest.mark.parametrize('kwargs,bound,say', [
    (dict(updates=FreqSchedule(samples(640))), {}, 'batch_size'), (dict(updates=FreqSchedule(epochs(1))), {}, 'steps_per_epoch'),
    (dict(drop_fraction=CubicSchedule(.3, 0, stop=samples(640))), {}, 'batch_size'),
    (dict(sparsity=CubicSchedule(0, .5, stop=epochs(2))), {}, 'steps_per_epoch'), (dict(updates=[.5], drop_fraction=.3), dict(n_steps=None), 'n_steps'), ({}, dict(n_steps=None), 'n_steps is None.*drop_fraction= in steps'),
    ({}, dict(n_steps=0), 'n_steps is 0.*whole number from 1'), ({}, dict(n_steps=10.5), 'n_steps is 10.5'), (dict(updates=1), {}, 'every step.*replace_step=False'), (dict(updates=FreqSchedule(samples(70))), dict(batch_size=64), 'every step')])
def test_bind_refuses(kwargs, bound, say):
    "Law 10: the number that a time needs is named; steps of the run are an integer; an update that replaces every step would train nothing, however it is said"
    with pytest.raises(ValueError, match=say): method(**kwargs).bind(**dict(n_steps=100)|bound)

def test_no_length_needed():
    "A run without an end: times and drop fraction in steps"
    m = method(updates=FreqSchedule(5, start=5), drop_fraction=.2).bind()
    assert times(m, 21)==[5,10,15,20] and m.fraction(10**6)==.2

# --- refusals

bad_settings = [('batches_per_update', o, 'whole number from 1') for o in (0, -1, 2.5, None, '4')]
bad_settings += [(k, o, rf'\{l}0,1\]') for k,l in (('initial_drop_grow_pct','['), ('stop_pct','(')) for o in (-.1, 1.5, math.nan, None, 'a')]+[('stop_pct', 0, r'\(0,1\]')]
bad_settings += [('sparsity', o, r'\[0,1\)') for o in (1, 1., -.1, 90, math.nan, True)]
bad_settings += [(k, o, 'function; |function:|must be one of') for k in ('keep_score_f','sparse_f','drop_count_f') for o in (None, 'magnitude', 3)]
bad_settings += [(k, o, 'function or None|must be one of') for k in ('grow_score_f','redistribute_f','sparsity_path','grow_state_f') for o in ('nonsense', 3)]
bad_settings += [('grow_init_f', 'zero', 'must be one of'), ('grow_init_f', math.nan, 'finite'), ('grow_init_f', math.inf, 'finite'), ('structure', '4:2', 'from 0 to 2'), ('structure', 3, 'Structure')]

@pytest.mark.parametrize('key,value,say', bad_settings)
def test_settings_refused(key, value, say):
    "Law 10: one error that names the setting's value and what it may be, also beside schedules, in the engine before model, optimizer or hooks changed"
    settings = {'batches_per_update':10, **{key:value}, **(dict(sparsity=.5) if key=='sparsity_path' else {})}
    for more in ({}, dict(updates=[5]), dict(drop_fraction=.2)):
        if key!='batches_per_update' or 'updates' not in more:
            with pytest.raises(ValueError, match=say) as e: Method(**settings, **more)
            assert key in str(e.value) or key=='structure'
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    before = {k:v.clone() for k,v in m.state_dict().items()}
    if settings['batches_per_update'] is None: return  # 'auto' then
    with pytest.raises(ValueError, match=say): DynamicSparseTraining(m, opt, 40, **dict(sparsity=.5)|settings)
    assert all(torch.equal(v, before[k]) for k,v in m.state_dict().items()) and not m._forward_pre_hooks and not opt._optimizer_step_pre_hooks

def test_numbers_of_other_kinds():
    "NumPy's integers and floats are numbers"
    m = Method(batches_per_update=np.int64(10), sparsity=np.float32(.5), stop_pct=np.float64(.5)).bind(np.int64(100))
    assert times(m, 100)==[10,20,30,40] and m.path is None and m.sparsity==.5

def test_every_batch_with_replacement():
    "Law 4: refused; without replacement it is an update at every batch"
    with pytest.raises(ValueError, match='batches_per_update is 1.*replace_step=False'): Method(batches_per_update=1)
    assert times(Method(batches_per_update=1, replace_step=False).bind(10), 10)==[1,2,3,4,5,6,7]
    assert times(Method(updates=1, replace_step=False).bind(4), 4)==[0,1,2,3]

def test_path_without_a_number():
    "A path wants the number at which it ends"
    with pytest.raises(ValueError, match='sparsity_path wants the number'): method(sparsity_path=cubic_path())

def test_a_schedule_goes_before_a_path():
    "A schedule given as `sparsity` wins over a preset's `sparsity_path`"
    m = method(sparsity=[.5,.6], sparsity_path=cubic_path()).bind(100)
    assert [m.sparsity_at(0, i) for i in range(3)]==[.5,.6,.5]

def test_settings_stay():
    "What was checked can't be changed afterwards"
    m = method()
    with pytest.raises(AttributeError, match="can't be changed"): m.stop_pct = .5

def test_parts_and_methods_by_name():
    "A name means what the function means, and a setting beside a method goes before its own"
    assert method(grow_score_f='random_score').grow_score_f is random_score and method(sparse_f='erk').sparse_f is erdos_renyi_sparsity
    assert repr(method(keep_score_f='MeanGradient').keep_score_f)=='MeanGradient(n_batches=8)'

@pytest.mark.parametrize('key,value', [('replace_step','no'), ('replace_step',1), ('update_after_step',None)])
def test_switches_are_bools(key, value):
    "Law 10: what is not True or False is refused"
    with pytest.raises(ValueError, match=f'{key} is .* True or False'): method(**{key:value})

@pytest.mark.parametrize('s', [0, 0., .5, .999999, np.float32(.3)])
def test_check_sparsity(s): assert check_sparsity(s) is None

@pytest.mark.parametrize('s', [1, 1., -1e-9, 2, math.nan, math.inf])
def test_check_sparsity_refuses(s):
    "Law 10: value, range and fix"
    with pytest.raises(ValueError, match=r'sparsity is .*\[0,1\): pass the fraction of weights that is dead'): check_sparsity(s)

# --- what the parts say of themselves

def test_what_is_read():
    "A dense history, collectors by name and the steps whose gradients they want are those of the parts; a partial or a sampled one says the same"
    m = method().bind(100)
    assert not m.dense_history and not m.collectors and not any(m.reads_dense(t) for t in range(30))
    for key,f in dict(grow_score_f=gradient_momentum, keep_score_f=Sampled(gradient_momentum), redistribute_f=momentum_redistribution).items():
        assert method(**{key:f}).dense_history
    m = method(keep_score_f=fisher_saliency, grow_score_f=MeanGradient(3)).bind(100)
    assert set(m.collectors)=={'square','mean of 3'}
    assert [t for t in range(31) if m.reads_dense(t)]==[8,9,10,18,19,20,28,29,30]
    assert all(m.collects(m.collectors['square'], t) for t in range(31))
    assert len(method(keep_score_f=MeanGradient(3), grow_score_f=MeanGradient(3)).collectors)==1

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

def test_unknown_names_name_a_near_one():
    "A name with a slip is refused with the one that was probably meant; what makes a distribution isn't one"
    for f,meant in ((lambda: as_distribution('unifrom'),'uniform'), (lambda: Method(batches_per_update=10, sparse_f='erkk'),'erk'),
        (lambda: find_method('rigle'),'rigl'), (lambda: Method(batches_per_update=10, keep_score_f='magnitude'),'weight_magnitude'),
        (lambda: sparsify_model(nn.Linear(8,8), .5, mask_init='magnitud'),'magnitude')):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"): f()
    with pytest.raises(ValueError, match=r'pass given_sparsity\(...\)'): as_distribution('given_sparsity')

def test_masks_by_name_are_one_list():
    "Every named start of masks serves sparsify_model, engine and files"
    m = nn.Sequential(nn.Linear(8,8))
    sparsify_model(m, .5, mask_init='checkerboard', seed=0)
    assert (m[0].weight_mask.sum(0)==4).all() and (m[0].weight_mask.sum(1)==4).all()
    assert configure(dict(method='set', sparsity=.5, mask_init='checkerboard'))[0][1]['mask_init']=='checkerboard'

def test_settings_as_text():
    "A dict is written out up to eight entries"
    from fastsparse.train.method import part_text
    assert part_text({i:i for i in range(8)}).startswith('{0: 0, 1: 1') and part_text({i:i for i in range(9)})=='dict of 9'

def test_a_run_begins_with_nothing_done():
    "No update was made, missed or waits, and its plan ends where the method's fraction of the run does"
    run = Method(batches_per_update=10, stop_pct=.75).bind(100)
    assert (run.n_updates,run.missed,run.pending,run.keep_dense_grad,run.n_stop)==(0,0,None,None,75)
    assert Method(batches_per_update=10, stop_pct=.751).bind(100).n_stop==76

@pytest.mark.parametrize('name', ['mest','softmest','acdc','dsd','cht'])
def test_a_method_with_its_own_times_of_updates_refuses_an_interval_that_it_would_not_heed(name):
    with pytest.raises(ValueError, match='pass updates= instead'): settings_of(name, dict(batches_per_update=3))
    assert settings_of(name, dict(updates=[.5]))['updates']==[.5]

@pytest.mark.parametrize('preset,given,instead', [(CHT_presets, dict(batches_per_update=3), 'updates'), (MEST_presets, dict(batches_per_update=3), 'updates'),
    (MEST_presets, dict(initial_drop_grow_pct=.5), 'drop_fraction'), (CHT_presets, dict(initial_drop_grow_pct=.5), 'drop_fraction'),
    (MEST_presets, dict(stop_pct=.5), 'updates'), (ACDC_presets, dict(stop_pct=.5), 'updates')])
def test_a_setting_that_a_schedule_of_the_method_would_hide_is_refused(preset, given, instead):
    for f in (lambda: preset(**given), lambda: settings_of(preset.name.lower(), given)):
        with pytest.raises(ValueError, match=f'pass {instead}= instead of {list(given)[0]}='): f()

def test_a_setting_that_is_heard_beside_the_schedules_of_a_method_is_taken():
    assert CHT_presets(updates=None, batches_per_update=3)['batches_per_update']==3
    assert MEST_presets(updates=[.5], drop_fraction=None, initial_drop_grow_pct=.5)['initial_drop_grow_pct']==.5
    assert CHT_presets(sparsity_path=cubic_path(), stop_pct=.5)['stop_pct']==.5
    assert RigL_presets(stop_pct=.5, initial_drop_grow_pct=.2)['stop_pct']==.5
    assert CHT_presets(updates=[.5])(sparsity=.9)['updates']==[.5]
