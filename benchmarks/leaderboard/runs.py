"Budgets, one run, and the plan: what a file of results lacks is run, and saved after each run"
import json,math,time,torch,warnings
from concurrent.futures import ProcessPoolExecutor
from fastai.basics import *
from fastsparse.kernels.timing import shown
from fastsparse.masks.files import whole_file
from functools import lru_cache,partial
from measure import machine
from .contenders import TrainRun,contenders,forward_flops
from .tasks import tasks

budgets = 'flops','steps','long'
least_steps = 8
peer_packages = 'scikit-learn','scipy','rigl-torch','sparselab','fasterai','gymnasium'

@lru_cache
def n_steps(
    task:str, # One of `tasks`
    contender:str, # One of `contenders`
    sparsity:float, # In (0,1)
    budget:str='flops', # One of `budgets`
    times:float=1., # What multiplies the budget
) -> int: # Fewer than `least_steps` is no training
    "How many steps may a contender take?"
    n,a = int(times*tasks[task].steps),contenders[contender]
    if budget=='steps': return n
    if budget=='long': return 5*n
    limit = 3*n*forward_flops(task, sparsity)[1]
    res = n
    for _ in range(4):
        if res<least_steps: return res
        cost = a.cost(task, sparsity, res)
        if cost<=1.01*limit and (res==n or cost>=.97*limit): break
        res = min(int(res*limit/cost), n)
    return res

def train_run(
    task:str, # One of `tasks`
    contender:str, # One of `contenders`
    sparsity:float, # In (0,1)
    budget:str, # One of `budgets`
    lr:float, # The highest rate of the cycle, of Adam
    seed:int, # Of weights, masks and the order of batches
    times:float=1., # What multiplies the budget
) -> dict: # Settings, steps, scores on validation and test data, sparsity that was reached, FLOPs and processor seconds; or the error
    "Train one network"
    res,a = dict(task=task, contender=contender, sparsity=sparsity, budget=budget, lr=lr, seed=seed),contenders[contender]
    n = n_steps(task, contender, sparsity, budget, times)
    if n<least_steps: return dict(res, steps=n, error='the budget holds no training')
    start,o = time.process_time(),TrainRun(task, sparsity, seed, n, lr, a.width(task, sparsity), a.halves)
    o.live = lambda: 1-o.reached
    with o.learn.no_bar(), o.learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: a.train(o)
        except (ValueError,TypeError,RuntimeError) as e: return dict(res, steps=n, error=f'{type(e).__name__}: {e}'[:200])
    seconds,scores = time.process_time()-start,[o.t.score(o.learn.model, i) for i in (1,2)]
    counted = o.ledger.cost.training or a.cost(task, sparsity, o.n)
    if not all(map(math.isfinite, scores)): return dict(res, steps=o.n, error='the score is not finite')
    valid,score,reached,seconds = [round(x, 5) for x in (*scores, 1-o.live(), seconds)]
    return dict(res, steps=o.n, valid=valid, score=score, reached=reached, flops=int(counted), seconds=seconds)

run_key = 'task','contender','sparsity','budget'

def grid(
    tasks, # Names
    names, # Names
    sparsities, # Each in (0,1)
    kinds, # Names from `budgets`
) -> list: # Tuples
    "What to measure, each once: dense networks of `'steps'` and `'long'` don't depend on the sparsity, and some contenders take all steps under both budgets"
    def wanted(t, a, kind):
        if contenders[a].only and t not in contenders[a].only: return False
        return a=='dense' if kind=='long' else not (kind=='steps' and contenders[a].all_steps)
    cells = [(t,a,s,k) for k in kinds for s in (sparsities if k!='long' else (0.,)) for t in tasks for a in names if wanted(t, a, k)]
    res = [(t, a, 0. if a=='dense' and k!='flops' else s, k) for t,a,s,k in cells]
    return list(dict.fromkeys(res))

def chosen_rate(
    runs:list, # Of one cell
    tries:int, # Seeds with which each rate is tried
    seeds=None, # Those seeds, where it is not the first ones
) -> float: # None where rates are still to be tried
    "The rate that is best on validation data"
    rates,seeds = {},set(ifnone(seeds, range(tries)))
    for r in runs:
        if r['seed'] in seeds: rates.setdefault(r['lr'], []).append(r.get('valid', -math.inf))
    wanted = contenders[runs[0]['contender']].rates_at(runs[0]['sparsity']) if runs else ()
    if not runs or any(len(rates.get(lr, ()))<len(seeds) for lr in wanted): return None
    return max(wanted, key=lambda lr: (sum(rates[lr]), -abs(wanted.index(lr)-1)))

def pending_runs(
    cell:tuple, # As from `grid`
    runs:list, # That the cell has
    seeds:int, # Of each cell; None is 10 where a run takes under ten seconds, else 5
    tries:int, # Seeds with which each rate is tried
) -> list: # Arguments of `train_run`, in order
    "What a cell needs next"
    done = {(r['lr'],r['seed']) for r in runs}
    lr = chosen_rate(runs, tries)
    rates = contenders[cell[1]].rates_at(cell[2]) if lr is None else (lr,)
    if lr is None: n = tries
    elif all('error' in r for r in runs if r['lr']==lr): n = 0  # it can't be trained
    else: n = ifnone(seeds, 10 if max(r.get('seconds', 0) for r in runs)<10 else 5)
    return [(*cell,r,s) for s in range(n) for r in rates if (r,s) not in done]

def shared_settings(times):
    "What all runs have in common"
    of = {k:dict(width=t.width, steps=t.steps, batch=t.bs, score=t.unit) for k,t in tasks.items()}
    return dict(optimizer='Adam', schedule='fit_one_cycle', distribution='erdos_renyi_sparsity', budget=times,
        split='3/5 train, 1/5 valid, 1/5 test, seed 42', tasks=of, rates={k:list(a.rates) for k,a in contenders.items()})

def write_runs(
    path, # The file, which is replaced whole
    found:dict, # Machine, settings, and `runs`
):
    "A run a line"
    head = json.dumps({k:v for k,v in found.items() if k!='runs'}, indent=1)[:-2]
    lines = ',\n  '.join(json.dumps(r) for r in found['runs'])
    with whole_file(path) as part: Path(part).write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')

def read_results(
    path, # A file that `run_leaderboard` wrote
) -> dict: # Machine, settings, and `runs`, a list of dicts
    "The contents of a file of results"
    return json.loads(Path(path).read_text())

def work(job, times):
    torch.set_num_threads(1)
    return train_run(*job, times=times)

def next_runs(runs, cells, seeds, tries):
    "What `cells` need next, low seeds first"
    by = groupby(runs, lambda r: tuple(r[k] for k in run_key))
    return sorted((j for c in cells for j in pending_runs(c, by.get(c, []), seeds, tries)), key=lambda j: j[-1])

def run_leaderboard(
    path, # The file of results; runs that it holds are not run again
    tasks, # Names of tasks
    names, # Names of contenders
    sparsities, # Each in (0,1)
    seeds:int=None, # Of each cell; None is 10 where a run takes under ten seconds, else 5
    kinds=('flops',), # Names from `budgets`
    times:float=1., # What multiplies the steps of a static mask
    tries:int=2, # Seeds with which each rate is tried
    n_workers:int=0, # Processes; fewer than 2 is this one
    progress:bool=True, # Show a progress bar?
) -> list: # The runs of the file
    "Run what is missing, and save after each run"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = read_results(path) if path.exists() else dict(machine=machine(*peer_packages), settings=shared_settings(times), runs=[])
    if found['settings']['budget']!=times: raise ValueError(f"budget is {times}, and {path} holds runs of {found['settings']['budget']}")
    cells = grid(tasks, names, sparsities, kinds)
    pool = ProcessPoolExecutor(n_workers) if n_workers>1 else None
    try:
        while left := next_runs(found['runs'], cells, seeds, min(tries, ifnone(seeds, tries))):
            for r in shown((pool.map if pool else map)(partial(work, times=times), left), progress, total=len(left)):
                found['runs'].append(r)
                write_runs(path, found)
    finally:
        if pool: pool.shutdown(cancel_futures=True)
    return found['runs']
