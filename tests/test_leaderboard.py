"The leaderboard of benchmarks/: equal budgets, rates chosen on validation data, paired tests, runs that resume"
import math,numpy as np,pandas as pd,pytest,sys,torch
from fastai.callback.core import Callback
from fastsparse.model.enforcement import masked_params
from fastsparse.report.flops import flop_profile
from fastsparse.train.presets import method_names
from pathlib import Path
from scipy import stats
sys.path.append(str(Path(__file__).parent.parent/'benchmarks'))
import leaderboard.__main__ as command
from leaderboard import runs as runs_module,studies
from leaderboard.contenders import RigLTorchStep,TrainRun,contenders,core,forward_flops,small_width
from leaderboard.runs import chosen_rate,grid,least_steps,n_steps,pending_runs,read_results,run_leaderboard,train_run
from leaderboard.tables import goal_table,half_interval,holm,leaderboard_table,mean_ranks,paired_test,reported,standings
from leaderboard.tasks import advantages,ppo_loss,tasks

quick = dict(tasks=['wine'], sparsities=[.8], seeds=1, tries=1, times=.2, progress=False)

def run(contender, seed, score, valid=None, lr=3e-3, task='wine', sparsity=.9, budget='flops', **kw):
    valid = score if valid is None else valid
    return dict(dict(task=task, contender=contender, sparsity=sparsity, budget=budget, lr=lr, seed=seed, steps=9, score=score, valid=valid), **kw)

def all_rates(contender, scores, **kw):
    "Runs at the middle rate, which the first seed has chosen"
    rates = contenders[contender].rates_at(.9)
    return [run(contender, 0, 0., -9., lr) for lr in rates if lr!=rates[1]]+[run(contender, i, s, lr=rates[1], **kw) for i,s in enumerate(scores)]

# --- statistics

def test_holm_by_hand():
    assert np.allclose(holm([.01,.04,.03]), [.03,.06,.06])
    assert np.allclose(holm([.5,.6]), [1.,1.]) and holm([])==[]

def holm_by_definition(ps):
    "The largest of `(m-rank)*p` among all that are not larger"
    return [min(1., max((len(ps)-sum(r<q for r in ps))*q for q in ps if q<=p)) for p in ps]

@pytest.mark.parametrize('seed', range(5))
def test_holm_is_its_definition(seed):
    ps = list(np.random.default_rng(seed).uniform(0, .2, 9))
    assert np.allclose(holm(ps), holm_by_definition(ps))

def test_a_paired_test_is_scipys():
    a,b = np.random.default_rng(0).normal(size=(2,9))
    diff,p = paired_test(a, b)
    assert np.isclose(diff, (a-b).mean()) and np.isclose(p, stats.ttest_rel(a, b).pvalue)
    assert paired_test([1.,2.], [1.,2.])==(0.,1.) and paired_test([1.], [3.])==(-2.,1.)

def test_an_interval_is_scipys():
    xs = np.random.default_rng(1).normal(size=7)
    low,high = stats.t.interval(.95, 6, loc=xs.mean(), scale=stats.sem(xs))
    assert np.isclose(half_interval(xs), (high-low)/2) and math.isnan(half_interval([1.]))

def test_table_holds_means_and_corrected_tests_of_one_task_and_sparsity():
    rng = np.random.default_rng(2)
    scores = {a:rng.normal(m, .02, 6) for a,m in (('auto',.9),('set',.8),('rigl',.9),('gmp',.95))}
    runs = [r for a,xs in scores.items() for r in all_rates(a, xs)]
    t = leaderboard_table(runs).set_index('contender')
    ps = holm_by_definition([stats.ttest_rel(scores['auto'], scores[a]).pvalue for a in ('set','rigl','gmp')])
    assert np.allclose(t.p[['set','rigl','gmp']], ps) and np.allclose(t['mean'], [xs.mean() for xs in scores.values()])
    assert list(t.verdict)==['','win','tie','loss'] and (t.seeds==6).all()
    assert np.allclose(t.interval['set'], half_interval(scores['set']))
    counts = standings(t.reset_index()).set_index('contender')
    assert list(counts.loc['gmp',['win','tie','loss']])==[0,0,1]

def test_tests_pair_the_same_seeds():
    t = leaderboard_table(all_rates('auto', [1.,2.1])+all_rates('set', [0.,1.,99.])).set_index('contender')
    assert np.isclose(t.difference['set'], 1.05) and t.seeds['set']==3

def test_table_shows_contenders_without_training():
    untrained = [dict(task='wine', contender='gmp', sparsity=.9, budget='flops', lr=lr, seed=0, steps=4, error='the budget holds no training') for lr in contenders['gmp'].rates]
    t = leaderboard_table(all_rates('auto', [1.,2.])+untrained).set_index('contender')
    assert t.verdict['gmp']=='no training' and t.seeds['gmp']==0

def test_goal_compares_with_the_best_published_method():
    worse = goal_table(all_rates('auto', [.8,.81,.8,.82])+all_rates('rigl', [.9,.91,.9,.92])+all_rates('set', [.5]*4)+all_rates('dense', [1.]*4)).iloc[0]
    assert worse.method=='rigl' and not worse.met and np.isclose(worse.difference, -.1)
    near = goal_table(all_rates('auto', [.8,.93])+all_rates('rigl', [.9,.9])).iloc[0]
    assert near.met  # within two standard errors of the difference

def test_mean_ranks_by_hand():
    places = dict(auto=(.9,.5), set=(.9,.7), gmp=(None,.6))  # on two tasks; gmp has no training on the first
    rows = [dict(task=task, sparsity=.9, contender=a, mean=math.nan if m is None else m) for a,ms in places.items() for task,m in zip('ab', ms)]
    rows.append(dict(task='a', sparsity=.9, contender='rigl', mean=1.))  # skips the second task
    r = mean_ranks(pd.DataFrame(rows))[.9].dropna()
    assert dict(r)==dict(auto=(1.5+3)/2, set=(1.5+1)/2, gmp=(3+2)/2)

# --- rates

def test_the_rate_is_chosen_on_validation_data():
    low,mid,high = contenders['set'].rates
    runs = [run('set', s, score, valid, lr) for s in (0,1) for lr,score,valid in ((low,.1,.9),(mid,.9,.1),(high,.9,.2))]
    assert chosen_rate(runs, 2)==low
    assert set(reported(runs).score)=={.1}  # the test scores of other rates don't count
    assert chosen_rate(runs[:4], 2) is None

def test_pending_runs_try_each_rate_before_the_best_gets_all_seeds():
    cell,rates = ('wine','set',.9,'flops'),contenders['set'].rates
    first_runs = pending_runs(cell, [], 4, 2)
    assert first_runs==[(*cell,r,s) for s in (0,1) for r in rates]
    runs = [run('set', s, 0., float(lr==rates[2]), lr) for *_,lr,s in first_runs]
    assert pending_runs(cell, runs, 4, 2)==[(*cell,rates[2],s) for s in (2,3)]

def test_pending_runs_are_ten_seeds_for_short_runs_else_five():
    cell,lr = ('wine','set',.9,'flops'),contenders['set'].rates[1]
    of = lambda seconds: [dict(o, seconds=seconds) for o in all_rates('set', [0.])]
    assert len(pending_runs(cell, of(2.), None, 1))==9 and len(pending_runs(cell, of(20.), None, 1))==4
    assert pending_runs(cell, of(2.), None, 1)[0]==(*cell,lr,1)

# --- budgets

@pytest.mark.parametrize('contender', [a for a in contenders if a not in ('rigl_torch','sparselab','fasterai')])
def test_contender_costs_no_more_than_a_static_mask(contender):
    n = n_steps('wine', contender, .8)
    assert n>=least_steps and contenders[contender].cost('wine', .8, n)<=1.01*3*tasks['wine'].steps*forward_flops('wine', .8)[1]

@pytest.mark.parametrize('contender', ['auto','rigl','gmp','snfs','softmest','oneshot','small_dense'])
def test_planned_cost_is_what_the_ledger_counts(contender):
    r = train_run('wine', contender, .8, 'flops', 3e-3, 0)
    assert np.isclose(r['flops'], contenders[contender].cost('wine', .8, r['steps']), rtol=.03)

def test_budgets_of_steps_by_hand():
    assert n_steps('wine', 'gmp', .8, 'steps')==200==n_steps('wine', 'static', .8) and n_steps('wine', 'dense', 0., 'long')==1000
    dense,sparse = forward_flops('wine', .8)
    assert n_steps('wine', 'dense', .8)==int(200*sparse/dense)

def test_flops_of_a_linear_network_by_hand():
    dense,sparse = forward_flops('digits_mlp', .9)
    n = 64*256+256*256+256*10
    assert dense==2*32*n and sparse==2*32*round(.1*n)

def test_a_small_dense_network_costs_what_the_sparse_one_costs():
    for task in ('digits_mlp','text_lstm'):
        t,wanted = tasks[task],forward_flops(task, .9)[1]
        m = t.make(small_width(task, .9))
        got = flop_profile(m, tuple(x[:t.bs] for x in t.parts[0][0])).total()
        assert abs(got-wanted)<.1*wanted

# --- contenders and tasks

@pytest.mark.parametrize('task', list(tasks))
def test_parts_of_a_task_are_three_fifths_and_two_fifths_and_fit_its_network(task):
    if task=='cartpole': pytest.importorskip('gymnasium')
    t = tasks[task]
    out = t.make(t.width).eval()(*[x[:2] for x in t.parts[0][0]])
    assert torch.isfinite(t.loss(out, t.parts[0][1][:2]))
    if task!='cartpole': assert np.allclose([len(y)/sum(len(y) for _,y in t.parts) for _,y in t.parts], [.6,.2,.2], atol=.02)

def test_there_are_eight_tasks_and_every_preset(): assert len(tasks)>=8 and set(method_names)|{'auto','dense','small_dense','oneshot','ste'}<=set(contenders)

@pytest.mark.parametrize('contender', [a for a in contenders if not contenders[a].peer])
def test_contender_ends_at_its_sparsity(contender):
    r = train_run('wine', contender, .8, 'steps', 3e-3, 0, times=.3)
    assert 'error' not in r and math.isfinite(r['score'])
    wanted = 0. if contender in ('dense','small_dense','dsd') else .8
    assert abs(r['reached']-wanted)<(.06 if contender=='srigl' else .01)

@pytest.mark.parametrize('contender,module', [('rigl_torch','rigl_torch'), ('sparselab','sparselab'), ('fasterai','fasterai'), ('torch_prune','torch')])
def test_peers_run_on_the_same_data_and_end_at_the_sparsity(contender, module):
    pytest.importorskip(module)
    r = train_run('digits_mlp', contender, .9, 'flops', 1e-2, 0, times=.3)
    assert 'error' not in r and abs(r['reached']-.9)<.01

def test_rigl_torch_begins_with_our_masks():
    pytest.importorskip('rigl_torch')
    o = TrainRun('wine', .8, 0, 40, 3e-3)
    o.make_sparse()
    masks = {n:m.clone() for n,m in o.learn.model.named_buffers() if n.endswith('_mask')}
    seen = {}
    class Look(Callback):
        order = 90
        def before_batch(self):
            if not seen: seen.update({id(w):m.clone() for w,m in zip(cb.rigl.W, cb.rigl.backward_masks) if m is not None})
    cb = RigLTorchStep({id(m.p):m.mask.clone() for m in masked_params(o.learn.model)}, 40)
    o.fit(ledger=False, cbs=[cb, Look()])
    got = {n:seen[id(p)] for n,p in o.learn.model.named_parameters() if id(p) in seen}
    assert len(got)==len(masks) and all(torch.equal(masks[f'{n}_mask'], m) for n,m in got.items())

def test_the_same_seed_is_the_same_run():
    a,b = [train_run('wine', 'auto', .8, 'flops', 3e-3, 1, times=.3) for _ in range(2)]
    assert {k:v for k,v in a.items() if k!='seconds'}=={k:v for k,v in b.items() if k!='seconds'}

def test_contenders_see_the_same_batches_in_order():
    loaders = [TrainRun('wine', .8, 3, n, 1e-3).learn.dls.train for n in (12,20)]
    for a,b in zip(*map(iter, loaders)): assert torch.equal(a[-1], b[-1])

# --- CartPole

def test_advantages_by_hand():
    one = torch.ones(3,1)
    adv = advantages(one, torch.zeros(4,1), torch.tensor([[0.],[1.],[0.]]), decay=.5, lam=.5)
    assert torch.allclose(adv[:,0], torch.tensor([1.25,1.,1.]))

def test_the_loss_of_ppo_by_hand():
    out = torch.tensor([[0.,0.,2.]])
    y = torch.tensor([[1., math.log(.25), 1., 0.]])  # the ratio is 2, and is cut to 1.2
    assert np.isclose(ppo_loss(out, y).item(), -1.2+.5*4-.01*math.log(2))

# --- runs that resume

def test_runs_resume(tmp_path):
    path = tmp_path/'r.json'
    first_runs = run_leaderboard(path, names=['static'], **quick)
    again = run_leaderboard(path, names=['static','set'], **quick)
    assert again[:len(first_runs)]==first_runs and {r['contender'] for r in again}=={'static','set'} and len(again)==6
    found = read_results(path)
    assert found['settings']['budget']==.2 and {'cpu','torch','sparselab'}<=set(found['machine'])

def test_interrupted_runs_leave_a_whole_file(tmp_path, monkeypatch):
    path,n = tmp_path/'r.json',[]
    def stopping(*args, **kw):
        n.append(1)
        if len(n)==3: raise KeyboardInterrupt
        return train_run(*args, **kw)
    monkeypatch.setattr(runs_module, 'train_run', stopping)
    with pytest.raises(KeyboardInterrupt): run_leaderboard(path, names=['static'], **quick)
    assert len(read_results(path)['runs'])==2
    monkeypatch.setattr(runs_module, 'train_run', train_run)
    assert len(run_leaderboard(path, names=['static'], **quick))==3

def test_dense_networks_of_equal_steps_are_trained_once():
    cs = grid(['wine'], ['dense','small_dense','auto'], [.8,.9], ['steps'])
    assert ('wine','dense',0.,'steps') in cs and len(cs)==3  # and two of auto
    runs = [run('dense', 0, .5, lr=lr, sparsity=0., budget='steps') for lr in contenders['dense'].rates]+[run('auto', 0, .5, lr=lr, budget='steps') for lr in contenders['auto'].rates]
    assert set(reported(runs, 'steps').sparsity)=={.9}

def test_a_file_of_another_budget_is_refused(tmp_path):
    run_leaderboard(tmp_path/'r.json', names=['static'], **quick)
    with pytest.raises(ValueError, match='holds runs of 0.2'): run_leaderboard(tmp_path/'r.json', names=['static'], **{**quick, 'times':.3})

def test_plan_leaves_out_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(command, 'installed', lambda name: name not in ('sparselab','gymnasium'))
    left = {a for names,_,_ in command.plans(False, None, None, None) for a in names}
    assert set(contenders)-left=={'sparselab'} and set(tasks)-set(command.installed_tasks())=={'cartpole'}

def test_full_plan_has_fewer_contenders_at_easy_sparsities():
    assert len(command.plans(True, None, None, None))==1
    by = {s:set(a) for a,ss,kinds in command.plans(False, None, None, None) for s in ss if 'flops' in kinds}
    assert set(by)=={.8,.9,.95,.98,.99} and by[.8]==set(core)<by[.99]

# --- studies

def test_nine_settings_of_both_methods(tmp_path, monkeypatch):
    def run(contender, lr, every, seed):
        score = dict(dense=.9, auto=.8, rigl=.7)[contender]-(.1 if (lr,every)==(1e-3,5) else 0)
        return dict(contender=contender, lr=lr, interval=every, seed=seed, valid=lr, score=score)
    monkeypatch.setattr(studies, 'sensitivity_run', run)
    runs = studies.run_sensitivity(tmp_path/'s.json', 2, progress=False)
    assert len(runs)==2*(3+18) and len({(r['lr'],r['interval']) for r in runs if r['contender']=='rigl'})==9
    assert np.allclose(studies.sensitivity_table(runs), [.9,.2,.3,2/3])

def test_rates_of_the_study_of_time_are_chosen_once(tmp_path, monkeypatch):
    def run(contender, epochs, lr, seed): return dict(contender=contender, epochs=epochs, lr=lr, seed=seed, seconds=1., valid=lr, score=1.)
    monkeypatch.setattr(studies, 'time_run', run)
    runs = studies.run_time(tmp_path/'t.json', 2, (1,2), progress=False)
    assert len(runs)==8*(3+1) and {r['lr'] for r in runs if r['seed']==1}=={1e-2}

def test_a_time_is_measured_with_live_weights_only():
    r = studies.time_run('sparse .98', 1, 3e-3, 0, width=256)
    assert r['seconds']>0 and r['sparsity']==.98 and 0<r['score']<1
