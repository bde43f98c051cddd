"Paired tests, and the tables of a file of results"
import math,numpy as np,pandas as pd
from fastai.basics import *
from .contenders import contenders
from .runs import chosen_rate,run_key

def holm(
    ps, # p values, each in [0,1]
) -> list: # Corrected ones, in the same order
    "Holm's correction for many tests"
    order,res,last = np.argsort(ps),[0.]*len(ps),0.
    for rank,i in enumerate(order):
        last = max(last, min(1., (len(ps)-rank)*ps[i]))
        res[i] = float(last)
    return res

def paired_test(
    a, # Scores of one contender
    b, # Of the other, with the same seeds
) -> tuple: # Mean difference and p value; a p of 1 where there is no difference, or only one pair
    "A paired t-test"
    from scipy import stats
    d = np.asarray(a, dtype=float)-np.asarray(b, dtype=float)
    if len(d)<2 or not d.any(): return float(d.mean()) if len(d) else 0.,1.
    if d.std()==0: return float(d.mean()),0.
    return float(d.mean()),float(stats.ttest_1samp(d, 0.).pvalue)

def half_interval(
    xs, # Scores
) -> float: # nan for fewer than two
    "Half of the 95 % interval of the mean"
    from scipy import stats
    n = len(xs)
    return float(stats.t.ppf(.975, n-1)*np.std(xs, ddof=1)/n**.5) if n>1 else math.nan

def _best_rate(rs, contender, s):
    "By validation data of the seeds that all rates have; None where a rate has not been tried"
    seeds = set.intersection(*({r['seed'] for r in rs if r['lr']==lr} for lr in contenders[contender].rates_at(s)))
    return chosen_rate(rs, 0, seeds) if seeds else None

def reported(
    runs:list, # Of `read_results`
    budget:str='flops', # One of `budgets`
) -> pd.DataFrame: # Runs of each cell at the rate that is best on validation data
    "The runs whose test scores count"
    by,res = groupby(runs, lambda r: tuple(r[k] for k in run_key)),[]
    sparsities = sorted({k[2] for k in by if k[2]})
    for (task,contender,s,kind),rs in by.items():
        kinds = ('flops','steps') if contenders[contender].all_steps else (kind,)
        where = [s] if s or budget!='steps' else sparsities  # a dense network of as many steps is the same at each
        lr = _best_rate(rs, contender, s) if budget in kinds else None
        res += [dict(r, budget=budget, sparsity=o) for r in rs if r['lr']==lr for o in where]
    return pd.DataFrame(res, columns=None if any('score' in r for r in res) else [*run_key,'lr','seed','steps','score'])

def leaderboard_table(
    runs:list, # Of the file of results: `json.loads(path.read_text())['runs']`
    budget:str='flops', # 'flops' for equal training FLOPs, 'steps' for equal steps
    base:str='auto', # The contender that others are compared with
) -> pd.DataFrame: # A row for each task, sparsity and contender
    "Mean, half of the 95 % interval, and what a paired test with `base` says of `base`"
    rows = []
    for (task,s),cell in reported(runs, budget).groupby(['task','sparsity'], sort=False):
        by = {contender:g for contender,g in cell.groupby('contender', sort=False)}
        part = [dict(task=task, sparsity=s, contender=contender, **_compare(g, by.get(base))) for contender,g in by.items()]
        rest = [r for r in part if r['contender']!=base and r['p']==r['p']]
        for r,p in zip(rest, holm([r['p'] for r in rest])): r['p'] = p
        rows += [dict(r, verdict=_verdict(r, base)) for r in part]
    return pd.DataFrame(rows)

def _compare(g, ref):
    "Statistics of the runs `g` of a contender, and of those of the base with the same seeds"
    own,ref = [pd.Series(dtype=float) if o is None else o[o.score.notna()].set_index('seed').score for o in (g,ref)]
    both = own.index.intersection(ref.index)
    diff,p = paired_test(ref[both], own[both]) if len(both) else (math.nan,math.nan)
    res = dict(lr=g.lr.iloc[0], steps=g.steps.iloc[0], seeds=len(own), mean=own.mean(), interval=half_interval(own))
    return dict(res, difference=diff, p=p)

def _verdict(r, base):
    if not r['seeds']: return 'no training'
    if r['contender']==base or r['p']!=r['p']: return ''
    return 'tie' if r['p']>=.05 else 'win' if r['difference']>0 else 'loss'

def standings(
    table:pd.DataFrame, # From `leaderboard_table`
) -> pd.DataFrame: # A row for each contender and sparsity
    "How often the base won, tied and lost"
    t = table[table.verdict!='']
    counts = t.groupby(['sparsity','contender'], sort=False).verdict.value_counts().unstack(fill_value=0)
    return counts.reindex(columns=['win','tie','loss','no training'], fill_value=0).reset_index()

def mean_ranks(
    table:pd.DataFrame, # From `leaderboard_table`
) -> pd.DataFrame: # A row for each contender, a column for each sparsity
    "The mean place of each contender over tasks, 1 is the best; a contender without a training comes last, and one that skips a task is left out"
    means = table.pivot_table(index='contender', columns=['sparsity','task'], values='mean', aggfunc='first', dropna=False)
    tried = table.assign(one=1).pivot_table(index='contender', columns=['sparsity','task'], values='one', aggfunc='first', dropna=False)
    res = {}
    for s in sorted(set(table.sparsity)):
        there = tried[s].dropna(axis=1, how='all').dropna()
        res[s] = means[s].loc[there.index,there.columns].fillna(-math.inf).rank(ascending=False).mean(axis=1)
    return pd.DataFrame(res)

def goal_table(
    runs:list, # As for `leaderboard_table`
    base:str='auto', # The contender whose goal it is
) -> pd.DataFrame: # A row for each task and sparsity
    "Is `base` as good as the best published method of equal FLOPs, which is found on test data, and so favoured?"
    t,scores,rows = leaderboard_table(runs, base=base),reported(runs),[]
    for (task,s),g in t.groupby(['task','sparsity'], sort=False):
        rivals = g[g.contender.map(lambda a: contenders[a].published) & g['mean'].notna()]
        own = g[g.contender==base]
        if own.empty or rivals.empty: continue
        best = rivals.loc[rivals['mean'].idxmax()]
        by = scores[(scores.task==task) & (scores.sparsity==s)].pivot_table(index='seed', columns='contender', values='score')
        d = (by[base]-by[best.contender]).dropna()
        within = -d.mean()<=max(.01, 2*d.std()/len(d)**.5 if len(d)>1 else 0)
        rows.append(dict(task=task, sparsity=s, auto=own['mean'].iloc[0], best=best['mean'], method=best.contender, difference=best.difference,
            p=best.p, pairs=len(d), met=bool(within and best.verdict!='loss')))
    return pd.DataFrame(rows)
