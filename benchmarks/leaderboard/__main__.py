"Compare sparse and dense networks in seconds: in benchmarks/, `python -m leaderboard --help`"
import torch
from fastai.basics import *
from fastcore.script import *
from measure import machine
from typing import Annotated
from .runs import read_results,run_task,shares
from .tables import not_run,verdict_table,verdicts
from .tasks import tasks

results = Path(__file__).parent.parent/'results'
packages = 'mnist1d','mlxtend','plotnine','scikit-learn','gymnasium'

@call_parse
def main(
    task:Annotated[str, dict(nargs='+', choices=list(tasks))]=None, # Tasks; all by default
    names:Annotated[str, dict(nargs='+')]=None, # Arms such as 'dense 320'; all by default
    seeds:int=None, # Trainings of each arm that count; the task's number by default
    full:store_true=False, # Leave out the trainings of a half and a quarter of the seconds?
    show:store_true=False, # Only print the tables?
    to:str='here', # Folder in results/; runs that its file holds are not run again
):
    "Train sparse and dense networks for equal processor seconds, and print who won"
    path = results/to/'seconds.json'
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for share in [] if show else shares[:1] if full else shares:
        for t in ifnone(task, list(tasks)):
            for r in run_task(path, t, machine(*packages), seeds, names, share): print({k:r[k] for k in ('task','arm','share','seed','seconds','valid')}, flush=True)
    runs = read_results(path)['runs']
    print(verdicts(runs).round(4).to_string(index=False))
    print(verdict_table(runs).T.to_string())
    for t,arms in not_run(runs).items(): print(f"not run: {', '.join(arms)}: python -m leaderboard --task {t} --to {to}")
