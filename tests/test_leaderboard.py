"Paired tests, runs that go on, and what is refused"
import json,numpy as np,pandas as pd,pytest
from fastsparse.leaderboard import holm,leaderboard_table,paired_test
from fastsparse.leaderboard import leaderboard_tasks,run_leaderboard,task_data
from scipy import stats

def test_holm_by_hand():
    assert np.allclose(holm([.01,.04,.03]), [.03,.06,.06])
    assert np.allclose(holm([.5,.6]), [1.,1.]) and holm([])==[]

def test_a_paired_test_is_scipys():
    a,b = np.random.default_rng(0).normal(size=(2,9))
    diff,p = paired_test(a, b)
    assert np.isclose(diff, (a-b).mean()) and np.isclose(p, stats.ttest_rel(a, b).pvalue)
    assert paired_test([1.,2.], [1.,2.])==(0.,1.)

def test_a_table_compares_the_same_seeds_only():
    runs = pd.DataFrame([dict(task='t', sparsity=.9, arm=a, seed=s, score=v) for a,s,v in (('auto',0,1.),('auto',1,2.1),('x',0,0.),('x',1,1.),('x',2,99.))])
    x = leaderboard_table(runs).set_index('arm').loc['x']
    assert np.isclose(x.difference, -1.05) and x.seeds==3

def test_runs_go_on_where_they_stopped(tmp_path):
    path = tmp_path/'r.json'
    first = run_leaderboard(path, ['iris'], ['static'], [.8], 1, progress=False)
    again = run_leaderboard(path, ['iris'], ['static','dense'], [.8], 1, progress=False)
    assert again.iloc[0].seconds==first.iloc[0].seconds and list(again.arm)==['static','dense']
    assert {'torch','machine','cores'}<=set(json.loads(path.read_text()))

def test_the_parts_of_a_task_share_no_sample():
    dls,test = task_data('digits_mlp', 0)
    assert len(dls.train_ds)+len(dls.valid_ds)+len(test.dataset)==1797 and len(leaderboard_tasks)>=8

@pytest.mark.parametrize('change,named', [(dict(tasks=['x']),"task 'x'"), (dict(arms=['x']),"arm 'x'"), (dict(sparsities=[1.]),'sparsity 1.0'), (dict(seeds=0),'seeds is 0')])
def test_what_is_not_known_is_refused_before_anything_is_written(tmp_path, change, named):
    with pytest.raises(ValueError, match=named): run_leaderboard(tmp_path/'r.json', **{**dict(tasks=['iris'], arms=['auto'], sparsities=[.9], seeds=1), **change})
    assert not (tmp_path/'r.json').exists()
