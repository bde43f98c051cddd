"Two studies: what an untuned setting costs, and what an accuracy costs in time"
import pandas as pd,time,torch,warnings
from fastai.basics import *
from fastai.callback.schedule import *
from fastsparse.all import *
from fastsparse.kernels.timing import shown
from measure import machine
from .contenders import Contender,Dense,NoValid,TrainRun
from .runs import read_results,write_runs
from .tasks import StepLoader,tasks

nine_settings = [(lr,every) for lr in (1e-3,3e-3,1e-2) for every in (5,20,80)]

def sensitivity_run(contender, lr, every, seed, n=600, sparsity=.99):
    "One of nine settings, on digits"
    torch.set_num_threads(1)
    o = TrainRun('digits_mlp', sparsity, seed, n, lr)
    with o.learn.no_bar(), o.learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if contender=='dense': o.fit(ledger=False)
        else: o.learn.fit_sparse(o.epochs, sparsity, lr, method=contender, seed=seed, batches_per_update=every, cbs=[NoValid()])
    valid,score = [o.t.score(o.learn.model, i) for i in (1,2)]
    return dict(contender=contender, lr=lr, interval=every, seed=seed, steps=o.n, sparsity=sparsity if contender!='dense' else 0., valid=valid, score=score)

def run_missing(path, todo, keys, run, progress):
    "Run what `path` doesn't hold yet"
    found = read_results(path) if Path(path).exists() else dict(machine=machine(), runs=[])
    done = {tuple(r[k] for k in keys) for r in found['runs']}
    for o in shown([o for o in todo if tuple(o[k] for k in keys) not in done], progress):
        found['runs'].append(run(**o))
        write_runs(path, found)
    return found['runs']

def run_sensitivity(path, seeds=5, progress=True):
    "All nine settings of both, and three rates of the dense network"
    settings = [('dense',lr,None) for lr in Dense.rates]+[(a,*o) for a in ('auto','rigl') for o in nine_settings]
    todo = [dict(contender=a, lr=lr, every=k, interval=k, seed=s) for s in range(seeds) for a,lr,k in settings]
    def run(interval, **kw): return sensitivity_run(**kw)
    return run_missing(path, todo, ('contender','lr','interval','seed'), run, progress)

def sensitivity_table(
    runs:list, # Of the file
) -> pd.Series: # Tuned dense network, what the worst setting of each method loses, and their quotient
    "Worst of nine settings against the tuned dense network"
    t = pd.DataFrame(runs).groupby(['contender','lr','interval'], dropna=False)[['valid','score']].mean()
    dense = t.loc['dense'].sort_values('valid').score.iloc[-1]
    lost = {a:dense-t.loc[a].score.min() for a in ('auto','rigl')}
    return pd.Series(dict(dense=dense, auto=lost['auto'], rigl=lost['rigl'], quotient=lost['auto']/lost['rigl']))

time_contenders = {'dense':0., 'sparse .9':.9, 'sparse .95':.95, 'sparse .98':.98}

def time_run(contender, epochs, lr, seed, width=1024, bs=128):
    "Seconds of one fit, and the accuracy on test data"
    torch.set_num_threads(1)
    t,s = tasks['digits_mlp'],time_contenders[contender]
    set_seed(seed)
    xs,y = t.parts[0]
    dls = DataLoaders(*[StepLoader((*xs,y), len(y)//bs, bs, seed) for _ in range(2)])
    learn = Learner(dls, t.make(width), loss_func=t.loss, opt_func=Adam)
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if not s: learn.fit_one_cycle(epochs, lr, cbs=[NoValid()])
        else: learn.fit_sparse(epochs, s, lr, method='set', seed=seed, sparse_compute=True, cbs=[NoValid()])
    seconds = time.process_time()-start
    valid,score = [t.score(learn.model, i) for i in (1,2)]
    return dict(contender=contender, sparsity=s, epochs=epochs, lr=lr, seed=seed, seconds=round(seconds, 3), valid=valid, score=score)

def run_time(path, seeds=3, epochs=(2,4,8,16,32), progress=True):
    "Contenders in turns; three rates of each with the first seed, and the best on validation data with the others"
    keys,grid = ('contender','epochs','lr','seed'),[(e,a) for e in epochs for a in time_contenders]
    runs = run_missing(path, [dict(contender=a, epochs=e, lr=lr, seed=0) for lr in Contender.rates for e,a in grid], keys, time_run, progress)
    best = {(e,a):max((r for r in runs if (r['epochs'],r['contender'],r['seed'])==(e,a,0)), key=lambda r: r['valid'])['lr'] for e,a in grid}
    return run_missing(path, [dict(contender=a, epochs=e, lr=best[e,a], seed=s) for s in range(seeds) for e,a in grid], keys, time_run, progress)
