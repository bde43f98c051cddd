"Settings chosen on validation data, then the trainings that count: what the file of results lacks is run, and saved after each run"
import json,statistics
from fastai.basics import *
from fastsparse.save.disk import whole_file
from .arms import Arm,arms,run,warmed
from .tasks import tasks

grids = dict(lr=[1e-3*2**k for k in range(-4, 8)], wd=[0.,.03,.1,.3,1.], drop=[0.,.1,.2,.4])
start = dict(lr=4e-3, wd=.1, drop=0.)
shares = 1.,.5,.25  # of a task's seconds; the shorter ones, for the picture, with three seeds

def key(setting): return tuple(setting[k] for k in start)

def moved(setting, ks, step):
    "The setting with those of `ks` a step further on their grids"
    at = {k:grids[k].index(setting[k])+step for k in ks.split()}
    return dict(setting, **{k:grids[k][i] for k,i in at.items()}) if all(0<=i<len(grids[k]) for k,i in at.items()) else setting

def near(setting, ks):
    "The setting, and those beside it on the grids of `ks`, names with spaces between"
    return [moved(setting, ks, o) for o in (-1,0,1)]

def search(
    tried:dict, # Score on validation data by `key`
    order:tuple, # Of settings to choose
) -> tuple: # The best setting so far, and the next to try or None
    "Walk along one setting at a time, or several together, for as long as the next value is better"
    best = start
    def score(o): return tried[key(o)] if tried[key(o)] is not None else -math.inf
    for k in order:
        while True:
            todo = [o for o in near(best, k) if key(o) not in tried]
            if todo: return best,todo[0]
            top = max(near(best, k), key=score)
            if score(top)<=score(best): break
            best = top
    return best,None

def at_edge(setting): return setting['lr'] in (grids['lr'][0], grids['lr'][-1])

def steps_in(seconds, runs, task, arm):
    "Steps that take so many seconds, by the median of the arm's earlier runs"
    found = [r['seconds']/r['steps'] for r in runs if r['share'] in ('rehearse','choose')]
    return max(round(seconds/(statistics.median(found) if found else warmed(task, arm))), 16)

def next_run(
    task:str, # One of `tasks`
    arm:Arm,
    runs:list, # That task and arm have
    seeds:int, # Trainings that count
    share:float=1., # Of the task's seconds
) -> dict: # Arguments of `run` and the share of the seconds, or None
    "What comes next?"
    t = tasks[task]
    if not runs: return dict(share='rehearse', seed=100, n=steps_in(t.seconds, runs, task, arm), **start)
    tried = {key(r):r['valid'] for r in runs if r['share']=='choose'}
    best,todo = search(tried, t.choose)
    if todo is not None: return dict(share='choose', seed=100, n=steps_in(t.seconds, runs, task, arm), **todo)
    done = {(r['share'],r['seed']) for r in runs if key(r)==key(best)}
    for seed in range(seeds if share==1 else min(seeds, 3)):
        if (share,seed) not in done: return dict(share=share, seed=seed, n=steps_in(share*t.seconds, runs, task, arm), **best)

def read_results(path): return json.loads(Path(path).read_text())

def write_results(path, found):
    "A run a line"
    head = json.dumps({k:v for k,v in found.items() if k!='runs'}, indent=1)[:-2]
    lines = ',\n  '.join(json.dumps(r) for r in found['runs'])
    with whole_file(path) as part: Path(part).write_text(f'{head},\n "runs": [\n  {lines}\n ]\n}}\n')

def run_task(path, task, machine, seeds=None, names=None, share=1.):
    "A run of each arm in turn, until none lacks one"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = read_results(path) if path.exists() else dict(machine=machine, runs=[])
    todo = [o for o in arms[task] if names is None or o.name in names]
    while todo:
        for arm in list(todo):
            own = [r for r in found['runs'] if (r['task'],r['arm'])==(task,arm.name)]
            job = next_run(task, arm, own, ifnone(seeds, tasks[task].seeds), share)
            if job is None: todo.remove(arm)
            else:
                kind = job.pop('share')
                r = run(task, arm, **job)
                found['runs'].append(dict(task=task, arm=arm.name, share=kind, seed=job['seed'], **{k:job[k] for k in start}, **r))
                write_results(path, found)
                yield found['runs'][-1]
