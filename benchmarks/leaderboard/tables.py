"Tables and pictures of the file of results"
import matplotlib.pyplot as plt,numpy as np,pandas as pd
from collections import Counter
from fastai.basics import *
from .arms import arms
from .runs import at_edge,shares
from .tasks import tasks

titles = dict(mnist1d='MNIST-1D', mnist500='MNIST, 500 images', digits='digits', mnist='MNIST, 3,000 images', diamonds='diamonds', cartpole='CartPole',
    conv='MNIST, convolutions', text='text, 100 kB', text_once='text, 6 MB')
looks = dict(dense=('#d55e00','s'), auto=('#0072b2','o'), set=('#009e73','^'), rigl=('#cc79a7','D'), gmp=('.45','v'), static=('.45','X'))
looks['one-shot'] = '.45','P'
methods = 'auto','set','rigl','static','gmp','one-shot'

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
    a, # Scores of one arm
    b, # Of the other, with the same seeds
) -> tuple: # Mean difference and p value; a p of 1 where there is no difference, or only one pair
    "A paired t-test"
    from scipy import stats
    d = np.asarray(a, dtype=float)-np.asarray(b, dtype=float)
    if len(d)<2 or not d.any(): return float(d.mean()) if len(d) else 0.,1.
    if d.std()==0: return float(d.mean()),0.
    return float(d.mean()),float(stats.ttest_1samp(d, 0.).pvalue)

def kind_of(arm, task):
    "'dense', 'conv' for a dense convolutional network beside others, or the name of the method"
    a = first(o for o in arms[task] if o.name==arm)
    return 'conv' if a.net=='conv' and task!='conv' else a.method

def counted(
    runs:list, # Of `read_results`
    task:str, # One of `tasks`
    share:float=1., # Of the task's seconds
) -> pd.DataFrame:
    "The trainings that count, with the kind of each arm"
    rows = [r for r in runs if (r['task'],r['share'])==(task,share) and r['test'] is not None]
    res = pd.DataFrame([dict(r, kind=kind_of(r['arm'], task)) for r in rows], columns=None if rows else ['arm','kind','valid','test','seed'])
    return res.drop_duplicates(['arm','seed'], keep='last')

def chosen(t):
    "The arm of each kind that is best on validation data"
    means = t.groupby(['kind','arm'], sort=False).valid.mean().reset_index()
    return means.loc[means.groupby('kind').valid.idxmax()].set_index('kind').arm

def arm_table(
    runs:list, # Of `read_results`
    task:str, # One of `tasks`
) -> pd.DataFrame: # A row for each arm
    "Scores, costs and settings; a star marks a rate at the edge of its grid"
    t = counted(runs, task)
    by = t.groupby('arm', sort=False)
    res = pd.DataFrame(dict(score=by.test.mean(), sd=by.test.std(), seeds=by.test.count()))
    for k in ('seconds','us','us_one'): res[k] = by[k].median()
    for k in ('weights','steps','lr','wd','drop'): res[k] = by[k].first()
    res['edge'] = ['*' if at_edge(dict(lr=lr)) else '' for lr in res.lr]
    return res

def verdicts(
    runs:list, # Of `read_results`
) -> pd.DataFrame: # A row for each task and sparse method
    "The best shape of each method against the best dense network of any width, both chosen on validation data"
    rows = []
    for task in tasks:
        t = counted(runs, task)
        best,by = chosen(t),{a:o.set_index('seed').test for a,o in t.groupby('arm')}
        if 'dense' not in best: continue
        part = []
        for m in [o for o in methods if o in best]:
            own,rival = by[best[m]],by[best['dense']]
            seeds = own.index.intersection(rival.index)
            diff,p = paired_test(own[seeds], rival[seeds])
            part.append(dict(task=task, method=m, arm=best[m], dense=best['dense'], score=own.mean(), rival=rival.mean(), difference=diff, seeds=len(seeds), p=p))
        for r,p in zip(part, holm([r['p'] for r in part])): r.update(p=p, verdict='tie' if p>=.05 else 'win' if r['difference']>0 else 'loss')
        rows += part
    return pd.DataFrame(rows)

def verdict_table(
    runs:list, # Of `read_results`
) -> pd.DataFrame: # A row for each method, a column for each task
    "Differences from the best dense network of any width, and the verdict"
    v = verdicts(runs)
    text = [f"{d:+.3f} {o}" for d,o in zip(v.difference, v.verdict)]
    t = v.assign(text=text).pivot(index='method', columns='task', values='text')
    return t.reindex(index=methods, columns=list(tasks)).fillna('–').rename(columns=titles)

def rival_table(
    runs:list, # Of `read_results`
    method:str='auto', # A sparse method
) -> pd.DataFrame: # A row for each task
    "The best shape of a method beside the best dense network and a small convolutional one"
    rows = []
    for r in verdicts(runs).query('method==@method').itertuples():
        t = arm_table(runs, r.task)
        conv = first(o for o in t.index if kind_of(o, r.task)=='conv')
        def said(o): return f'{o}: {t.score[o]:.3f}, {t.us[o]:.1f} µs' if o else ''
        rows.append(dict(task=titles[r.task], dense=said(r.dense), sparse=said(r.arm), verdict=r.verdict, convolutions=said(conv)))
    return pd.DataFrame(rows)

def not_run(
    runs:list, # Of `read_results`
) -> dict: # Task → its arms that have fewer trainings that count than planned
    "What is missing"
    have = Counter((r['task'],r['arm']) for r in runs if r['share']==1)
    missing = {t:[a.name for a in arms[t] if have[t,a.name]<tasks[t].seeds] for t in tasks}
    return {t:o for t,o in missing.items() if o}

def plot_front(ax, rows, x):
    "Score against column `x`: the dense networks as a line, and the best shape of each method; a convolutional network is named above"
    best = chosen(rows)
    by = rows.groupby('arm', sort=False).agg(x=(x,'median'), y=('test','mean'), sd=('test','std'), kind=('kind','first'))
    for kind,(color,marker) in looks.items():
        o = by[by.kind==kind].sort_values('x') if kind=='dense' else by.loc[[best[kind]]] if kind in best else by.iloc[:0]
        if len(o): ax.errorbar(o.x, o.y, o.sd, color=color, marker=marker, capsize=2, ms=5, lw=1, ls='-' if kind=='dense' else '', label=kind)
    ax.set(xscale='log', xticks=[o*10**k for k in range(-1,5) for o in (1,2,5)], xlim=(.8*by.x.min(), 1.25*by.x.max()))
    ax.xaxis.set_major_formatter('{x:g}')
    ax.xaxis.set_minor_locator(plt.NullLocator())
    for o in by[by.kind=='conv'].itertuples(): ax.set_title(f'convolutions: {o.y:.3f} at {o.x:.1f} µs', fontsize=8, loc='right')

def plot_seconds(ax, runs, task, names):
    "Score against seconds of training, at a quarter, a half and all of them; `names` holds labels by arm, or by kind for its best shape"
    parts = [counted(runs, task, s) for s in shares]
    for k,label in names.items():
        color,marker = looks.get(k, ('.45','v'))
        found = [t[t.arm==chosen(t).get(k, k)] for t in parts]
        means = [t.agg(dict(seconds='median', test='mean')) for t in found if len(t)]
        if means: ax.plot([o.seconds for o in means], [o.test for o in means], color=color, marker=marker, lw=1, label=label)
    ax.set_xlim(0, 1.2*tasks[task].seconds)

def plot_task(runs, task):
    "Score against seconds of training, and against microseconds a sample"
    fig,axs = plt.subplots(1, 2, figsize=(9,3), sharey=True, layout='constrained')
    plot_seconds(axs[0], runs, task, {k:k for k in ('dense','auto','set','rigl')})
    plot_front(axs[1], counted(runs, task), 'us')
    axs[0].set(xlabel='processor seconds of training', ylabel=tasks[task].unit)
    axs[0].set_title(titles[task], loc='left')
    axs[1].set(xlabel='µs a sample, in batches')
    fig.legend(*axs[1].get_legend_handles_labels(), loc='outside right center', fontsize=8)
    return fig

def has_curve(runs, task): return any(len(counted(runs, task, s)) for s in shares if s<1)

def plot_fronts(runs, names):
    "Score against microseconds a sample, a panel for each task of `names`"
    fig,axs = plt.subplots(-(-len(names)//2), 2, figsize=(9,1.2+1.9*len(names)/2), layout='constrained')
    for ax,task in zip(axs.flat, names):
        plot_front(ax, counted(runs, task), 'us')
        ax.set(ylabel=tasks[task].unit)
        ax.set_title(titles[task], loc='left')
    for ax in axs.flat[len(names):]: ax.remove()
    for ax in axs.flat[len(names)-2:len(names)]: ax.set(xlabel='µs a sample, in batches')
    fig.legend(*axs.flat[0].get_legend_handles_labels(), loc='outside upper center', ncols=7, fontsize=8)
    return fig

def score_table(runs, names):
    "Test scores of the best dense network and of the best shape of each method, a row for each task of `names`"
    rows = []
    for task in names:
        t = counted(runs, task)
        scores,best = t.groupby('arm').test.mean(),chosen(t)
        rows.append({'':titles[task], 'seconds':f'{tasks[task].seconds:g}', **{k:f'{scores[best[k]]:.3f}' for k in ('dense',*methods) if k in best}})
    return pd.DataFrame(rows).fillna('–')
