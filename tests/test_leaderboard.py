"The leaderboard of benchmarks/: equal seconds, settings chosen on validation data, paired tests, runs that resume"
import math,numpy as np,pytest,sys,torch
from pathlib import Path
from scipy import stats
sys.path.append(str(Path(__file__).parent.parent/'benchmarks'))
from leaderboard import runs as runs_module
from leaderboard.arms import Arm,Trainer,arms,n_weights,run
from leaderboard.runs import at_edge,grids,key,near,next_run,read_results,run_task,search,start,steps_in
from leaderboard.tables import arm_table,holm,not_run,paired_test,verdict_table,verdicts
from leaderboard.tasks import Task,advantages,mlp,ppo_loss,split,tasks

def row(arm, seed, test, valid=None, task='digits', share=1., **kw):
    return dict(dict(task=task, arm=arm, share=share, seed=seed, steps=9, seconds=.7, valid=test if valid is None else valid, test=test, us=1., us_one=1.,
        weights=9, **start), **kw)

def rows(arm, tests, **kw): return [row(arm, i, o, **kw) for i,o in enumerate(tests)]

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

def test_methods_meet_the_best_dense_network_of_any_width():
    rng = np.random.default_rng(2)
    xs = {'dense 64':rng.normal(.7, .01, 6), 'dense 320':rng.normal(.8, .01, 6), 'auto 512@.95':rng.normal(.9, .01, 6), 'set 512@.95':rng.normal(.6, .01, 6)}
    v = verdicts([r for a,o in xs.items() for r in rows(a, o)]).set_index('method')
    ps = [stats.ttest_rel(xs[a], xs['dense 320']).pvalue for a in ('auto 512@.95','set 512@.95')]
    assert list(v.verdict[['auto','set']])==['win','loss'] and set(v.dense)=={'dense 320'}
    assert np.allclose(v.p[['auto','set']], holm_by_definition(ps))
    assert np.isclose(v.difference['auto'], (xs['auto 512@.95']-xs['dense 320']).mean())

def test_shapes_and_widths_are_chosen_on_validation_data():
    runs = rows('dense 64', [.9,.9], valid=.1)+rows('dense 320', [.5,.5], valid=.2)+rows('auto 512@.95', [.6,.6], valid=.3)+rows('auto 1024@.98', [.9,.9], valid=.2)
    v = verdicts(runs).iloc[0]
    assert (v.arm,v.dense)==('auto 512@.95','dense 320')

def test_a_convolutional_network_is_no_rival_of_another_kind():
    runs = rows('dense 320', [.5,.5])+rows('dense conv 16', [.9,.9])+rows('auto 512@.95', [.6,.6])
    assert verdicts(runs).iloc[0].dense=='dense 320'

def test_what_is_missing_is_named():
    runs = rows('dense 320', [.5]*tasks['digits'].seeds)+rows('auto 512@.95', [.6,.7])
    t = verdict_table(runs)
    assert t.loc['auto','digits'].startswith('+0.150') and t.loc['set','digits']=='–' and t.loc['auto','MNIST-1D']=='–'
    assert {'set 512@.95','auto 512@.95'}<=set(not_run(runs)['digits']) and 'dense 320' not in not_run(runs)['digits'] and len(not_run(runs)['mnist1d'])==len(arms['mnist1d'])

def test_rates_at_the_edge_are_flagged():
    t = arm_table(rows('dense 320', [.5], lr=grids['lr'][-1])+rows('dense 64', [.5]), 'digits')
    assert t.edge['dense 320']=='*' and t.edge['dense 64']==''
    assert at_edge(dict(start, lr=grids['lr'][0]))

# --- settings

def walk(score, order=('lr','wd','drop','wd drop','lr')):
    "All settings that the search tries, and the one that it takes"
    tried = {}
    while (o := search(tried, order))[1] is not None: tried[key(o[1])] = score(o[1])
    return tried,o[0]

def test_neighbours_on_the_grid():
    assert [o['wd'] for o in near(start, 'wd')]==[.03,.1,.3] and [o['drop'] for o in near(start, 'drop')]==[0.,0.,.1]
    assert [(o['wd'],o['drop']) for o in near(start, 'wd drop')]==[(.1,0.),(.1,0.),(.3,.1)]

def test_the_search_finds_the_top_of_a_hill_and_tries_the_rates_beside_it():
    top = dict(lr=grids['lr'][8], wd=.3, drop=.1)
    tried,best = walk(lambda o: -sum(abs(grids[k].index(o[k])-grids[k].index(top[k])) for k in top))
    assert best==top and all(key(o) in tried for o in near(top, 'lr'))

def test_a_training_without_a_score_is_not_chosen():
    _,best = walk(lambda o: None if o['lr']>start['lr'] else o['lr'])
    assert best['lr']==start['lr']

def test_runs_come_in_order():
    arm = arms['digits'][3]
    first_run = next_run('digits', arm, [row(arm.name, 100, .5, share='rehearse', steps=90)], 2)
    assert (first_run['share'],first_run['seed'],first_run['n'])==('choose',100,90)  # ninety steps took .7 seconds
    done = [row(arm.name, 100, .5, share='choose', **dict(zip(start, k))) for k in walk(lambda o: .5)[0]]
    assert [next_run('digits', arm, done, 2)[k] for k in ('share','seed')]==[1.,0]
    assert next_run('digits', arm, done+rows(arm.name, [.5,.5]), 2) is None

def test_steps_of_a_time_by_hand():
    runs = [row('dense 64', 100, .5, share='choose', seconds=s, steps=100) for s in (1.,2.,4.)]
    assert steps_in(3., runs, 'digits', arms['digits'][0])==150

# --- tasks

def test_test_data_is_the_same_for_all_seeds_and_apart():
    x = torch.arange(100)
    a,b = split(x, x, 20, 50, 0),split(x, x, 20, 50, 1)
    assert a[2][0].equal(b[2][0]) and not a[0][0].equal(b[0][0]) and [len(o[0]) for o in a]==[50,30,20]
    assert torch.cat([o[0] for o in a]).sort().values.equal(x)

def test_advantages_by_hand():
    one = torch.ones(3,1)
    adv = advantages(one, torch.zeros(4,1), torch.tensor([[0.],[1.],[0.]]), decay=.5, lam=.5)
    assert torch.allclose(adv[:,0], torch.tensor([1.25,1.,1.]))

def test_the_loss_of_ppo_by_hand():
    out,y = torch.tensor([[0.,0.,2.]]),torch.tensor([[1., math.log(.25), 1., 0.]])  # the ratio is 2, and is cut to 1.2
    assert np.isclose(ppo_loss(out, y).item(), -1.2+.5*4-.01*math.log(2))

@pytest.mark.parametrize('task', [k for k,t in arms.items() if k!='cartpole'])
def test_networks_of_a_task_take_a_batch(task):
    arm = arms[task][-1]
    net = tasks[task].nets[arm.net](8, .1)
    x = torch.zeros(2,64).long() if task.startswith('text') else torch.zeros(2, dict(mnist1d=40, digits=64, diamonds=26).get(task, 784))
    assert len(net(x))==2

def test_each_task_has_six_widths_and_names_are_unique():
    for os in arms.values(): assert len({o.name for o in os})==len(os) and sum(o.method=='dense' and o.width!=25 for o in os)>=6

# --- trainings

@pytest.fixture
def small(monkeypatch):
    "A task of two clusters that takes a fraction of a second"
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    t = Task(lambda seed: split(x, (x[:,0]>0).long(), 50, 100, seed), dict(mlp=mlp(16,2)), seconds=.05, seeds=2, choose=('lr',), bs=20)
    t.name = 'small'
    monkeypatch.setitem(tasks, 'small', t)
    monkeypatch.setitem(arms, 'small', [Arm('mlp', 8), Arm('mlp', 64, 'set', .8)])
    return t

@pytest.mark.parametrize('method', ['dense','auto','set','rigl','static','gmp','one-shot'])
def test_an_arm_ends_at_its_sparsity(small, method):
    arm = Arm('mlp', 64, method, 0. if method=='dense' else .8)
    r = run('small', arm, 40, 0, 1e-2, .1, 0.)
    n = 16*64+64*64+64*2
    assert r['weights']==(n if method=='dense' else round(.2*n))+64+64+2 and r['test']>.6 and r['us']>0

def test_the_same_seed_is_the_same_training(small):
    a,b = [run('small', Arm('mlp', 64, 'auto', .8), 40, 1, 1e-2, .1, .2) for _ in range(2)]
    assert (a['valid'],a['test'])==(b['valid'],b['test'])

def test_one_shot_learns_dense_at_first(small):
    o = Trainer(Arm('mlp', 64, 'one-shot', .8), small, small.data(0), 40, 1e-2, 0., 0., 0)
    o.train(20)
    assert n_weights(o.model)==sum(p.numel() for p in o.model.parameters())

def test_runs_resume(small, tmp_path):
    path = tmp_path/'r.json'
    some = list(run_task(path, 'small', {}, seeds=1, names=['dense 8']))
    assert [r['share'] for r in some][:2]==['rehearse','choose'] and some[-1]['share']==1.
    assert list(run_task(path, 'small', {}, seeds=1, names=['dense 8']))==[]
    list(run_task(path, 'small', {}))
    found = read_results(path)['runs']
    assert found[:len(some)]==some and sum(r['share']==1. for r in found)==4
    more = list(run_task(path, 'small', {}, share=.5))
    assert {r['share'] for r in more}=={.5} and len(more)==4

def test_interrupted_runs_leave_a_whole_file(small, tmp_path, monkeypatch):
    path,n = tmp_path/'r.json',[]
    def stopping(*args, **kw):
        n.append(1)
        if len(n)==3: raise KeyboardInterrupt
        return run(*args, **kw)
    monkeypatch.setattr(runs_module, 'run', stopping)
    with pytest.raises(KeyboardInterrupt): list(run_task(path, 'small', {}))
    assert len(read_results(path)['runs'])==2
