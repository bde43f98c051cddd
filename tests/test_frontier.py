"benchmarks/frontier.py: what it makes of a table, finished or not, and how two processes share the work"
import importlib.util,math,matplotlib.pyplot as plt,os,pandas as pd,pytest,subprocess,sys
from pathlib import Path

spec = importlib.util.spec_from_file_location('frontier', Path(__file__).parent.parent/'benchmarks'/'frontier.py')
frontier = importlib.util.module_from_spec(spec)
spec.loader.exec_module(frontier)

def rows(*points):
    "Points are method, seed, loss and edges (None: no circuit)"
    df = pd.DataFrame(points, columns='method seed valid_loss edges'.split()).assign(task='quotes', full_loss=.01, fails='')
    return df.assign(size=df.index, found=df.edges.notna())

def test_edges_are_compared_at_equal_loss():
    "At a loss of 1 to 2, 16 to 4 edges against 4 to 1 (in the middle of 16 at 0 and 1 at 2): 4 times as many"
    df = rows(('recipe',0,1.,16), ('recipe',0,2.,4), ('recipe',0,1.5,None), ('rigl',0,0.,16), ('rigl',0,2.,1), ('rigl',1,1.,5))
    assert frontier.ratios(df, 'recipe', 'rigl').to_dict()=={(0,'quotes'):pytest.approx(4)}
    assert not len(frontier.ratios(rows(('recipe',0,1.,9), ('recipe',0,2.,9), ('rigl',0,3.,9), ('rigl',0,4.,9)), 'recipe', 'rigl'))

def test_the_interval_is_over_seeds():
    "0 and 2: a mean of 1, a standard error of 1, and 12.706 of these on both sides; one seed has no interval"
    assert frontier.interval([0.,2.])==pytest.approx((1, -11.706, 13.706), abs=.001)
    mean,low,high = frontier.interval([3.])
    assert mean==3 and math.isnan(low) and math.isnan(high)

def test_a_partial_table_says_what_is_missing():
    df = rows(('recipe',0,1.,16), ('recipe',0,2.,4), ('rigl',0,1.,4), ('rigl',0,2.,1), ('rigl',1,1.,None))
    text = frontier.summary(df, 3)
    assert '5 of 240 searches: INCOMPLETE' in text and 'found in 4 of 5' in text and 'recipe/rigl at equal loss: 4.00, one seed' in text
    plt.close(frontier.picture(df))

def test_a_job_is_taken_once_and_a_dead_process_loses_it(tmp_path):
    file = tmp_path/'job'
    assert not frontier.taken(file) and frontier.taken(file)
    dead = subprocess.Popen([sys.executable,'-c',''])
    dead.wait()
    (tmp_path/'job.taken').write_text(str(dead.pid))
    assert not frontier.taken(file) and (tmp_path/'job.taken').read_text()==str(os.getpid())
