"Compare sparse training methods on real data: in benchmarks/, `python -m leaderboard --help`"
import os,pandas as pd
from fastai.basics import *
from fastcore.script import *
from importlib.util import find_spec
from typing import Annotated
from .contenders import contenders,core
from .runs import budgets,run_leaderboard
from .studies import run_sensitivity,run_time,sensitivity_table
from .tables import goal_table,leaderboard_table,standings
from .tasks import tasks

easy,hard = (.8,.9),(.95,.98,.99)  # sparsities for the core contenders, and for all
studies = 'methods','sensitivity','time'
results = Path(__file__).parent.parent/'results'

def installed(name): return name is None or find_spec(name) is not None
def installed_tasks(): return [k for k in tasks if k!='cartpole' or installed('gymnasium')]
def installed_contenders(): return tuple(k for k,o in contenders.items() if installed(o.needs))

def plans(
    quick, # The short form?
    names, # Of contenders, or None for the plan's
    sparsities, # Numbers, or None for the plan's
    kinds, # Names of budgets, or None for the plan's
) -> list: # Of contenders, sparsities and budgets
    "What to run"
    if quick: return [(ifnone(names, core), ifnone(sparsities, (.95,)), ifnone(kinds, ('flops',)))]
    both,everyone = ('flops','steps'),installed_contenders()
    if names or sparsities or kinds: return [(ifnone(names, everyone), ifnone(sparsities, easy+hard), ifnone(kinds, both))]
    return [(('dense',), (.95,), ('long',)), (everyone, hard, both), (core, easy, both)]

def report(runs, kinds):
    "Print a table for each budget"
    for kind in [k for k in kinds if k!='long']:
        t = leaderboard_table(runs, kind)
        print(f"\nequal {kind}: auto against each contender\n{standings(t).to_string(index=False)}\n")
        print(t.round(4).to_string(index=False))
    if 'flops' in kinds: print(f"\nauto and the best published method\n{goal_table(runs).round(4).to_string(index=False)}")

def run_study(study, path, seeds):
    path.parent.mkdir(parents=True, exist_ok=True)
    if study=='time': t = pd.DataFrame(run_time(path, ifnone(seeds, 3))).groupby(['contender','epochs'])[['seconds','score']].mean()
    else: t = sensitivity_table(run_sensitivity(path, ifnone(seeds, 5)))
    print(t.round(4).to_string())

@call_parse
def main(
    quick:store_true=False, # The short form: nine contenders at one sparsity with three seeds
    study:Annotated[str, dict(choices=studies)]='methods', # What to run
    task:Annotated[str, dict(nargs='+', choices=list(tasks))]=None, # Tasks; by default all that are installed
    names:Annotated[str, dict(nargs='+', choices=list(contenders))]=None, # Contenders; by default all that are installed, and fewer at .8 and .9
    sparsities:Annotated[float, dict(nargs='+')]=None, # Fractions of weights that are dead, each in (0,1); .8 to .99 by default
    seeds:int=None, # Seeds of each; 10 where a run takes under ten seconds, else 5, by default
    kinds:Annotated[str, dict(nargs='+', choices=budgets)]=None, # Budgets; all by default
    budget:float=1., # What multiplies the steps of a static mask, above 0
    tries:int=None, # Seeds with which each rate is tried; 2 by default, 1 if quick
    workers:int=None, # Processes; by default as many as there are cores
    to:str='here', # Folder in results/; runs that its file holds are not run again
):
    "Compare sparse training methods on real data"
    folder = results/('quick' if quick else to)
    if study!='methods': return run_study(study, folder/f'leaderboard_{study}.json', seeds)
    todo,n,task = plans(quick, names, sparsities, kinds),ifnone(workers, os.cpu_count()),ifnone(task, installed_tasks())
    seeds,tries = 3 if quick and seeds is None else seeds,ifnone(tries, 1 if quick else 2)
    for a,s,k in todo: runs = run_leaderboard(folder/'leaderboard.json', task, a, s, seeds, k, budget, tries, n)
    report(runs, dict.fromkeys(k for _,_,ks in todo for k in ks))
