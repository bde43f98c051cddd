"Compares dense, static and dynamic sparse training on handwritten digits: a table and a plot"
import matplotlib.pyplot as plt,pandas as pd,torch
from fastai.basics import *
from fastai.callback.schedule import *
from fastcore.parallel import parallel
from fastcore.script import *
from fastsparse.all import *
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.report.flops import train_flops
from functools import partial
from typing import Annotated

methods_of = dict(dense=None, static=None, SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)

def demo_run(
    method:str, # 'dense', 'static', 'SET', 'SNFS' or 'RigL'
    sparsity:float, # Fraction dead, in (0,1); a dense run ignores it
    seed:int=0, # Seed of weights, masks and the order of batches
    epochs:int=25, # Epochs
) -> dict: # Validation accuracy, live weights, and FLOPs as fractions of the dense network's
    "Train one network"
    torch.set_num_threads(1)
    model,preset = digits_mlp(seed),methods_of[method]
    if method=='dense': sparsity = 0.
    else: sparsify_model(model, sparsity, erdos_renyi_sparsity, sparse_init_mode='fan_in', seed=seed)
    if preset is not None: preset = dict(preset, batches_per_update=20)
    learn = Learner(digits_dls(), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=partial(SGD, mom=.9))
    with learn.no_bar(), learn.no_logging():
        cbs = [] if preset is None else DynamicSparseTrainingCallback(**preset, seed=seed)
        learn.fit_one_cycle(epochs, .1, moms=(.9,.9,.9), cbs=cbs)
        acc = learn.validate()[1]
    live = sum(int(mask.sum()) for _,mask,_ in sparse_params(model)) or sum(p.numel() for p in model.parameters() if p.ndim>1)
    dense,sparse = [count_flops(model, learn.dls.one_batch()[0][:1], sparse=o) for o in (False,True)]
    return dict(method=method, sparsity=sparsity, seed=seed, accuracy=acc, live=live, inference=sparse/dense,
        training=train_flops(sparse, dense, preset)/(3*dense))

def call(args): return demo_run(*args)

def train_all(methods=tuple(methods_of), sparsities=(.9,.95,.99), seeds=3, epochs=25, progress=False):
    "A row for each run"
    runs = [(m,s,seed,epochs) for m in methods for s in (sparsities if m!='dense' else (0.,)) for seed in range(seeds)]
    return pd.DataFrame(parallel(call, runs, n_workers=num_cpus(), progress=progress))

def table_of(runs):
    "Mean and standard deviation of accuracy, live weights, and FLOPs against dense, for each method and sparsity"
    groups = runs.groupby(['sparsity','method'], sort=False)
    acc = groups.accuracy.agg(lambda o: f'{100*o.mean():.1f}'+(f' ± {100*o.std():.1f}' if len(o)>1 else ''))
    flops = groups[['inference','training']].mean().map('{:.3f}x'.format)
    table = pd.concat([acc, groups.live.mean().map('{:,.0f}'.format), flops], axis=1).reset_index()
    names = ['sparsity','method','accuracy %','live weights','inference FLOPs','training FLOPs']
    return table.set_axis(names, axis=1).sort_values('sparsity', kind='stable')

def plot(runs):
    "Plot accuracy against sparsity"
    fig,ax = plt.subplots(figsize=(6.4,4))
    styles = dict(static=('o',':','.6'), SET=('s','-.','.45'), SNFS=('^','--','.25'), RigL=('D','-','0'))
    for m,rs in runs[runs.method!='dense'].groupby('method', sort=False):
        acc = rs.groupby('sparsity').accuracy.agg(['mean','std']).fillna(0)*100
        marker,ls,color = styles[m]
        ax.errorbar(-np.log10(1-acc.index), acc['mean'], acc['std'], marker=marker, ls=ls, color=color, capsize=3, label=m)
    dense = runs[runs.method=='dense'].accuracy.mean()*100
    if dense==dense: ax.axhline(dense, color='.3', lw=1, ls=(0,(6,4)), label='dense')
    ticks = sorted(set(runs[runs.method!='dense'].sparsity))
    ax.set(xticks=[-np.log10(1-s) for s in ticks], xticklabels=ticks, xlabel='sparsity', ylabel='validation accuracy (%)',
        title='Handwritten digits, 84,480 weights when dense')
    ax.legend()
    fig.tight_layout()
    return fig

@call_parse
def main(
    methods:Annotated[str, dict(nargs='+', choices=list(methods_of))]=tuple(methods_of), # Methods to compare
    sparsities:Annotated[float, dict(nargs='+')]=(.9,.95,.99), # Sparsities, each in (0,1)
    seeds:int=3, # Runs of each method and sparsity
    epochs:int=25, # Epochs of each run
    out:str='demo_results', # Folder for table and plot
):
    "Train sparse networks on handwritten digits, and compare methods"
    runs = train_all(methods, sparsities, seeds, epochs, progress=True)
    path = Path(out)
    path.mkdir(parents=True, exist_ok=True)
    table = table_of(runs)
    table.to_csv(path/'table.csv', index=False)
    plot(runs).savefig(path/'accuracy.png', dpi=150)
    print(f"\n{table.to_string(index=False)}\n\nplot: {path/'accuracy.png'}\ntable: {path/'table.csv'}")
