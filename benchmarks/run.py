"Measure what sparse training costs and what it is worth: `python benchmarks/run.py [--quick]`"
import argparse,json,multiprocessing,os,time
os.environ['OMP_NUM_THREADS'] = '1'
import billion,compute,costs,fits,inference,quality,roofline,structures,vision
import matplotlib.pyplot as plt,numpy as np
from concurrent.futures import ProcessPoolExecutor
from measure import machine,spread
from models import titles
from pathlib import Path

goals = dict(resnet18=1.05, resnet18_cifar=1.02, gpt=1.02, learner=1.05, reads=80, steady=1, update_peak=2, billion=2)

speed_goals = dict(mlp={.9:(2.9,3.1), .95:(4.2,4.4), .98:(5.5,5.8)}, ffn={.9:(2.8,3.1), .95:(4.5,4.7), .98:(6.4,8.)},
    gpt={.9:(2.1,2.4), .95:(2.4,2.8), .98:(2.7,3.2)})  # floor and goal
layer_goals = {(1,.9):8, (1,.95):14, (1,.98):30, (32,.9):6.2, (32,.95):11, (32,.98):22, (256,.9):3.4, (256,.95):5.9, (256,.98):12.5}
conv_goals = {.9:(3.1,3.2,3.6,4.05,1.5), .95:(4.1,4.7,5.8,6.3,2.)}  # nine tenths of a prototype's, layer by layer
resnet_goals = {.9:(2.2,2.5), .95:(2.8,3.5)}  # a training step, and a forward in evaluation where densities are equal
fours_goal = 1.4  # a training step
model_goals = dict(ffn=8, gpt=2.6)

context = multiprocessing.get_context('forkserver')  # new processes, for which torch is loaded once
context.set_forkserver_preload(['compute','inference','quality'])
os.environ['PYTHONPATH'] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get('PYTHONPATH')])])  # where its server looks

def in_new_process(f, *args):
    "`f(*args)` in a process of its own"
    with ProcessPoolExecutor(1, mp_context=context) as pool: return pool.submit(f, *args).result()

def measure_steps(quick):
    "Of each model, and of the first ResNet-18 through fastai's `Learner`"
    rounds = dict(mlp=10, resnet18=4) if quick else dict(mlp=60, resnet18=60, resnet18_cifar=15, gpt=30)
    rows = {name:dict(costs.training_step(name, n), goal=goals.get(name)) for name,n in rounds.items()}
    rows['learner'] = dict(costs.learner_step('resnet18', 2 if quick else 10, 3 if quick else 9), goal=goals['learner'])
    return rows

def measure_fits(quick):
    "Whole fits with each optimizer and of digits, or with the first optimizer"
    return [fits.beside_dense(o, quick) for o in fits.columns[:1 if quick else None]]

def measure_updates(quick):
    "Updates of each model and case; ratios of reads"
    names,rounds = (['resnet18'],4) if quick else (['resnet18','resnet50'],12)
    peer = costs.peer_reads('resnet18', 1 if quick else 3)
    return [dict(model=name, case=case, goal=goals['reads'], **costs.update_reads(costs.make[name]()[0], case, rounds),
        **({'rigl_torch':peer} if peer and (name,case)==('resnet18','normal') else {})) for name in names for case in costs.cases]

def measure_growth(quick):
    "Of sizes from a million to a hundred million weights"
    return [costs.growth(n, 3 if quick or n>5e7 else 7) for n in ([1e6,1e7] if quick else [1e6,3e6,1e7,3e7,1e8])]

def measure_memory(quick):
    "In processes of their own"
    if not Path('/proc/self/clear_refs').exists(): return {}
    names = ['resnet18'] if quick else ['resnet18','resnet50','gpt']
    return {name:in_new_process(costs.memory, name, 3) for name in names}

def measure_evaluation(quick):
    "Forward passes of each model"
    rounds = dict(resnet18=20) if quick else dict(mlp=100, resnet18=60, gpt=20)
    return {name:costs.evaluation(name, n) for name,n in rounds.items()}

def measure_quality(quick):
    "Only at 99 % and with two seeds if it should be quick"
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return quality.table(*(([.99],2) if quick else ([.95,.98,.99],8)), pool)

def over_processes(runs):
    "Of dicts of spreads from several processes: the spread of their medians"
    return {k:spread([r[k]['median'] for r in runs if k in r]) if isinstance(v, dict) and 'median' in v else v for k,v in runs[0].items()}

def train_in_processes(name, sparsity, n, rounds):
    "Training in `n` new processes; the first one chooses the plan for all"
    first = in_new_process(compute.training, name, sparsity, rounds)
    return over_processes([first, *[in_new_process(compute.training, name, sparsity, rounds, first['plan']) for _ in range(n-1)]])

def measure_training(quick):
    "Training on live weights only, in processes of their own"
    names,sparsities,n = (['mlp'],[.9],1) if quick else (['mlp','ffn','gpt'],[.9,.95,.98],3)
    rounds = dict(mlp=4, ffn=3, gpt=2)
    bounds = lambda name, s: dict(zip(('floor','goal'), speed_goals[name][s]))
    return [dict(train_in_processes(name, s, n, rounds[name]), **bounds(name, s)) for name in names for s in sparsities]

def measure_vision(quick):
    "Convolutions alone, and ResNet-18"
    sparsities = [.9] if quick else [.9,.95]
    names = list(vision.layers)[1:2] if quick else list(vision.layers)
    alone = [dict(vision.layer(n, s, 3 if quick else 9), goal=conv_goals[s][i]) for i,n in enumerate(vision.layers) if n in names for s in sparsities]
    nets = [] if quick else ['cifar','torchvision']
    whole = [in_new_process(vision.resnet, n, s, 3, f) for n in nets for f in (['uniform','erk'] if n=='cifar' else ['uniform']) for s in sparsities]
    def goal(r):
        step,test = resnet_goals[r['sparsity']] if r['model']=='cifar' else (1,1)
        return step,test if r['distribution']=='uniform' else 1
    return dict(layers=alone, models=[dict(r, goal=goal(r)) for r in whole])

def measure_structures(quick):
    "Masks of fours beside masks of no structure, what they cost in accuracy, and two threads beside one"
    shapes = structures.shapes[:1] if quick else structures.shapes
    fours = [structures.fours(o, s, 3 if quick else 9) for o in shapes for s in (.8,.9)]
    pairs = [in_new_process(structures.threads, o, s) for o in ((1024,784,256),(3072,768,1024)) for s in (.9,.98)] if os.cpu_count()>1 and not quick else []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        accuracy = structures.accuracy([.8] if quick else [.8,.9,.95], 2 if quick else 8, pool)
    steps = [structures.step(n, s, 3 if quick else 9) for n in (['mlp'] if quick else ['mlp','ffn','gpt']) for s in (.7,.9,.95,.98)]
    return dict(fours=fours, steps=[dict(r, goal=fours_goal) for r in steps], threads=pairs, accuracy=accuracy)

def measure_table(quick):
    "Single layers, forward and backward"
    cells = [((1024,1024),128,s) for s in (.8,.9,.98)] if quick else [(n,b,s) for n in compute.shapes for b in compute.batches for s in compute.sparsities]
    return [compute.layer_cell(*cell) for cell in cells]

def measure_adam(quick):
    "Peak memory of training with Adam, dense and on live weights only"
    if not Path('/proc/self/clear_refs').exists(): return {}
    return {name:{k:in_new_process(compute.adam_memory, name, s) for k,s in (('dense',0),('sparse',.9))}
        for name in (['mlp'] if quick else ['mlp','ffn','gpt'])}

def measure_billion(quick):
    "Networks that are born sparse, in processes of their own"
    if not Path('/proc/self/clear_refs').exists(): return []
    return [dict(width=w, weights=billion.depth*w**2, peak=in_new_process(billion.memory, w), **in_new_process(billion.speed, w))
        for w in billion.widths[:1 if quick else None]]

def measure_layers(quick):
    "Inference of one large layer"
    cases = {(32,.9):7} if quick else layer_goals
    return [dict(inference.layer(rows, s, 5 if quick else 15), goal=goal) for (rows,s),goal in cases.items()]

def measure_models(quick):
    "Inference of whole models, and their files"
    names = ['mlp'] if quick else ['mlp','ffn','gpt']
    return [dict(inference.whole(name, .95, 5 if quick else 15), files=inference.files(name, .95), goal=model_goals.get(name)) for name in names]

def measure_roofline(quick):
    "Arithmetic of a core, and of products of live weights"
    return roofline.roofline(quick)

sections = dict(roofline=measure_roofline, fits=measure_fits, steps=measure_steps, updates=measure_updates, growth=measure_growth, memory=measure_memory,
    evaluation=measure_evaluation, training=measure_training, vision=measure_vision, structures=measure_structures, table=measure_table,
    adam=measure_adam, billion=measure_billion, layers=measure_layers, models=measure_models, quality=measure_quality)

def show(rows, heads):
    "Print `rows` of strings under `heads`, aligned"
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    for row in (heads, ['-'*w for w in widths], *rows): print('  '.join(cell.ljust(w) for cell,w in zip(row, widths)).rstrip())
    print(flush=True)

def quartiles(d, digits=3): return f"{d['median']:.{digits}f} ({d['q1']:.{digits}f} to {d['q3']:.{digits}f})"

def verdict(value, goal, digits=2): return '' if goal is None else f"{goal} {'met' if round(value, digits)<=goal else 'missed'}"

def reached(value, goal): return '' if goal is None else f"{goal} {'met' if value>=goal else 'missed'}"

def title(name): return titles.get(name, "the ResNet-18 through fastai's Learner")

def show_roofline(rows):
    show([[r['what'], str(r.get('sparsity', '')), f"{r['gflops']:.0f}"] for r in rows], ['billions of operations a second', 'sparsity', 'GF/s'])

def show_steps(rows):
    lines = [[title(k), f"{r['dense_ms']:.1f} ms", *[quartiles(r[c]) if c in r else '' for c in ('step','amortised','dense_again','rigl_torch')],
        verdict(r['step']['median'], r['goal'])] for k,r in rows.items()]
    show(lines, ['training step against dense', 'dense', 'between updates', 'update every 100', 'dense again', 'rigl_torch', 'goal'])

def show_fits(rows):
    show([[title, *[f"{quartiles(r[k], 2)} {verdict(r[k]['median'], fits.goal(r['column'], k))}" for r in rows]] for k,(title,*_) in fits.arms.items()],
        ['a whole fit against dense', *[f"{r['column']}, {r['dense_s']:.1f} s" for r in rows]])

def show_updates(rows):
    lines = [[f"{titles[r['model']].split(',')[0]}, {costs.case_titles[r['case']]}", f"{r['weights']:,}", f"{r['ms']:.0f} ms", quartiles(r['reads'], 1),
        quartiles(r['rigl_torch'], 0) if 'rigl_torch' in r else '', verdict(r['reads']['median'], r['goal'], 0)] for r in rows]
    show(lines, ['one update', 'weights', 'time', 'reads', 'of rigl_torch', 'goal'])

def grown(rows, key='ms'):
    "Exponent and factor of the power of the number of weights that the costs `key` follow"
    exponent,log_factor = np.polyfit(np.log([r['weights'] for r in rows]), np.log([r[key] for r in rows]), 1)
    return exponent,np.exp(log_factor)

def show_growth(rows):
    lines = [[f"{r['weights']:,}", f"{r['ms']:.1f} ms", quartiles(r['reads'], 1), f"{r['upkeep_ms']:.2f} ms"] for r in rows]
    show(lines, [f"growth: an update like weights to the power {grown(rows)[0]:.2f}", 'update', 'reads', f"masking a step (power {grown(rows, 'upkeep_ms')[0]:.2f})"])

def show_memory(rows):
    lines = [[titles[k].split(',')[0], f"{r['steady']:.2f}", verdict(r['steady'], goals['steady'], 1), quartiles(r['update_peak'], 2),
        verdict(r['update_peak']['median'], goals['update_peak'], 1)] for k,r in rows.items()]
    show(lines, ['extra bytes a weight', 'steady', 'goal', 'peak of an update', 'goal'])

def show_evaluation(rows):
    lines = [[titles[k], f"{r['dense_ms']:.2f} ms", quartiles(r['masked']), quartiles(r['dense_again']),
        f"as dense again {'met' if r['masked']['median']<=r['dense_again']['q3'] else 'missed'}"] for k,r in rows.items()]
    show(lines, ['forward in evaluation against dense', 'dense', 'masked', 'dense again', 'goal'])

def show_training(rows):
    lines = [[compute.titles[r['model']], f"{r['sparsity']}", f"{r['dense_ms']:.0f} ms", *[quartiles(r[k], 2) if k in r else '' for k in ('onednn','compiled','bf16')], quartiles(r['sparselab'], 2) if 'sparselab' in r else 'not installed', quartiles(r['bare'], 2),
        quartiles(r['step'], 2), quartiles(r['amortised'], 2), reached(r['amortised']['median'], r['floor']), reached(r['amortised']['median'], r['goal'])] for r in rows]
    show(lines, ['training: times faster than dense', 'sparsity', 'dense', 'dense by oneDNN', 'dense compiled', 'dense in bfloat16', 'sparselab', 'bare products', 'between updates', 'update every 100', 'floor', 'goal'])

def show_table(rows):
    of = {(*r['shape'],r['batch'],r['sparsity']):f"{r['speedup']['median']:.2f}{'*' if r['swapped'] else ' '}" for r in rows}
    sparsities = sorted({r['sparsity'] for r in rows})
    lines = [[f'{o}x{i}, {b} rows', *[of.get((o,i,b,s), '') for s in sparsities]] for o,i,b in dict.fromkeys((*r['shape'],r['batch']) for r in rows)]
    swapped = [r['speedup']['median'] for r in rows if r['swapped']]
    show(lines, [f"one layer, forward and backward; * swapped, {f'at least {min(swapped):.2f}' if swapped else 'none'}", *map(str, sparsities)])

def show_vision(rows):
    show([[r['layer'], f"{r['sparsity']}", f"{r['dense_ms']:.1f} ms", quartiles(r['step'], 2), reached(r['step']['median'], r['goal'])] for r in rows['layers']],
        ['3x3 convolution, 64 images, forward and backward: times faster', 'sparsity', 'dense', 'live weights', 'goal'])
    show([[vision.titles[r['model']], r['distribution'], f"{r['sparsity']}", f"{r['swapped']} of {r['layers']}", f"{r['dense_ms']:.0f} ms", quartiles(r['step'], 2), reached(r['step']['median'], r['goal'][0]),
        quartiles(r['evaluation'], 2), reached(r['evaluation']['median'], r['goal'][1])] for r in rows['models']],
        ['times faster than dense', 'distribution', 'sparsity', 'swapped', 'dense step', 'training step', 'goal', 'evaluation', 'goal'])

def show_structures(rows):
    show([['{}x{}, {} rows'.format(*r['shape']), f"{r['sparsity']}", *[quartiles(r[k], 2) for k in ('forward','backward','step','against_dense')]] for r in rows['fours']],
        ["'block 4x1': times faster than no structure", 'sparsity', 'forward', 'backward', 'both', 'both, than dense'])
    show([[compute.titles[r['model']], f"{r['sparsity']}", f"{r['free_ms']:.1f} ms", quartiles(r['step'], 2), reached(r['step']['median'], r['goal'])] for r in rows['steps']],
        ["'block 4x1', a training step: times faster than no structure", 'sparsity', 'no structure', 'in fours', 'goal'])
    show([['{}x{}, {} rows'.format(*r['shape']), f"{r['sparsity']}", *[quartiles(r[k], 2) for k in ('dense','live')]] for r in rows['threads']],
        ['two threads: times faster than one', 'sparsity', 'dense', 'live weights'])
    show([[r['structure'], f"{r['sparsity']}", f"{100*r['mean']:.1f} ± {100*r['sd']:.1f}"] for r in rows['accuracy']], ['accuracy on digits by structure, %', 'sparsity', 'RigL'])

def show_adam(rows):
    lines = [[compute.titles[k], f"{r['dense']:.1f}", f"{r['sparse']:.1f}", f"{r['sparse']/r['dense']:.2f}", '0.5 '+('met' if r['sparse']<.5*r['dense'] else 'missed')] for k,r in rows.items()]
    show(lines, ['peak bytes a weight with Adam', 'dense', 'at 0.9', 'ratio', 'goal'])

def show_billion(rows):
    lines = [[f"{r['weights']:,}", f"{r['peak']/1e9:.2f} GB", verdict(r['peak']/1e9, goals['billion'] if r['weights']>1e9 else None),
        *[f'{r[k]:.2f} s' for k in ('make','step','update')], *[f'{np.mean(o):.2f}' for o in (r['losses'][:5], r['losses'][-5:])]] for r in rows]
    show(lines, ['weights, born 0.99 sparse', 'peak', 'goal', 'to make', 'a step', 'with an update', 'loss, first 5 steps', 'last 5 of 42'])

def show_layers(rows):
    lines = [[f"4096x4096, {r['rows']} rows", f"{r['sparsity']}", f"{r['dense_ms']:.2f} ms", *[quartiles(r[k], 2) if k in r else '' for k in ('onednn','bfloat16','scipy','sparselab','sparse')],
        reached(r['sparse']['median'], r['goal'])] for r in rows]
    show(lines, ['inference: times faster than F.linear', 'sparsity', 'dense', 'oneDNN', 'bfloat16', 'scipy', 'sparselab', 'sparse', 'goal'])

def show_models(rows):
    lines = [[compute.titles[r['model']], f"{r['dense_ms']:.1f} ms", quartiles(r['sparse'], 2), reached(r['sparse']['median'], r['goal']),
        ', '.join(f'{k} {v:.3f}' for k,v in r['files'].items() if k not in ('model','sparsity'))] for r in rows]
    show(lines, ['inference of whole models at 0.95', 'dense', 'times faster', 'goal', 'file bytes / dense'])

def show_quality(rows):
    sparsities = sorted({r['sparsity'] for r in rows if r['method']!='dense'})
    of = {(r['method'],r['sparsity']):f"{100*r['mean']:.1f} ± {100*r['sd']:.1f}" for r in rows}
    lines = [[m, *[of.get((m, s), of.get((m, 0.))) for s in sparsities]] for m in quality.methods]
    show(lines, ['test accuracy on digits, %', *[f'sparsity {s}' for s in sparsities]])

def plot_steps(rows):
    "Each model's ratios with their quartiles, beside the noise"
    fig,ax = plt.subplots(figsize=(7, .55*len(rows)+1.6), layout='constrained')
    ys = range(len(rows))[::-1]
    for key,label,dy,marker,color in (('dense_again','dense again (noise)',.2,'s','.6'), ('step','between updates',0,'o','0'), ('amortised','update every 100 steps',-.2,'^','.35')):
        xs = [r[key] for r in rows.values()]
        around = [[x['median']-x['q1'] for x in xs],[x['q3']-x['median'] for x in xs]]
        ax.errorbar([x['median'] for x in xs], [y+dy for y in ys], xerr=around, fmt=marker, color=color, capsize=3, label=label)
    ax.axvline(1, color='.6', lw=1)
    ax.set(yticks=list(ys), yticklabels=[title(k).replace(', ', '\n', 1) for k in rows], xlabel='CPU time of a training step, dense = 1 (median, quartiles)')
    return fig

def plot_training(rows):
    "Speed-up against sparsity, a line a model, and the goals"
    fig,ax = plt.subplots(figsize=(6.4,4), layout='constrained')
    for name,(marker,ls) in zip(compute.titles, (('o','-'),('s','--'),('^','-.'))):
        rs = [r for r in rows if r['model']==name]
        if not rs: continue
        xs,ys = [f"{r['sparsity']}" for r in rs],[r['amortised'] for r in rs]
        around = [[y['median']-y['q1'] for y in ys],[y['q3']-y['median'] for y in ys]]
        ax.errorbar(xs, [y['median'] for y in ys], yerr=around, marker=marker, ls=ls, color='0', capsize=3, label=compute.titles[name].split(',')[0])
        ax.plot(xs, [r['floor'] for r in rs], marker=marker, ls='', mfc='none', color='.5')
    ax.axhline(1, color='.6', lw=1)
    ax.set(xlabel='sparsity', ylabel='times faster than dense training (hollow: floor)')
    return fig

def plot_updates(rows):
    "Reads of each case, and the goal"
    fig,ax = plt.subplots(figsize=(7, .35*len(rows)+1.4), layout='constrained')
    labels = [f"{titles[r['model']].split(',')[0]}, {costs.case_titles[r['case']]}" for r in rows][::-1]
    ax.barh(labels, [r['reads']['median'] for r in rows][::-1], color='.7', edgecolor='0')
    ax.axvline(goals['reads'], color='0', ls='--', lw=1, label='goal')
    ax.set(xlabel='cost of an update, in reads of the weights')
    return fig

def plot_growth(rows):
    "Costs against size, and the power that fits them"
    fig,ax = plt.subplots(figsize=(6.4,4), layout='constrained')
    n = np.array([r['weights'] for r in rows])
    for key,label,marker,ls in (('ms','an update','o','-'),('upkeep_ms','masking the gradients of a step','s','--')):
        exponent,factor = grown(rows, key)
        ax.plot(n, [r[key] for r in rows], marker=marker, ls='', color='0', label=label)
        ax.plot(n, factor*n**exponent, ls=ls, color='.5', label=f'like weights to the power {exponent:.2f}')
    ax.set(xscale='log', yscale='log', xlabel='weights', ylabel='milliseconds, one thread')
    return fig

def plot_adam(rows):
    "Peak bytes a weight, dense and on live weights only"
    fig,ax = plt.subplots(figsize=(6.4,3), layout='constrained')
    labels = [compute.titles[k].split(',')[0] for k in rows]
    for dx,key,label,color in ((-.2,'dense','dense','.3'),(.2,'sparse','live weights only, 90 % sparse','.75')):
        ax.bar([i+dx for i in range(len(rows))], [r[key] for r in rows.values()], .4, color=color, edgecolor='0', label=label)
    ax.set(xticks=range(len(rows)), xticklabels=labels, ylabel='peak bytes a weight with Adam')
    return fig

def plot_billion(rows):
    "Seconds and memory against the number of weights"
    fig,axs = plt.subplots(1, 2, figsize=(7,3.2), layout='constrained')
    n = [r['weights'] for r in rows]
    for key,label,marker,ls in (('make','to make',':','s'), ('update','a step with an update','--','^'), ('step','a step','-','o')):
        axs[0].plot(n, [r[key] for r in rows], ls=marker, marker=ls, color='0', label=label)
    axs[1].plot(n, [r['peak']/1e9 for r in rows], '-D', color='0', label='peak memory')
    axs[1].plot(n, [16*x/1e9 for x in n], '--', color='.5', label='dense weights, gradients and Adam')
    for ax,what in zip(axs, ('seconds, one core','GB')): ax.set(xscale='log', yscale='log', xlabel='weights', ylabel=what)
    return fig

def plot_quality(rows):
    "Accuracy against sparsity, a line a method"
    fig,ax = plt.subplots(figsize=(6.4,4), layout='constrained')
    styles = dict(static=('o',':','.6'), SET=('s','-.','.45'), SNFS=('^','--','.25'), RigL=('D','-','0'))
    for method,(marker,ls,color) in styles.items():
        rs = [r for r in rows if r['method']==method]
        ax.errorbar([f"{r['sparsity']}" for r in rs], [100*r['mean'] for r in rs], [100*r['sd'] for r in rs], marker=marker, ls=ls, color=color, capsize=3, label=method)
    ax.axhline(100*rows[0]['mean'], color='.3', lw=1, ls=(0,(6,4)), label='dense')
    ax.set(xlabel='sparsity', ylabel='test accuracy on digits (%)')
    return fig

def plot(rows, f, path):
    fig = f(rows)
    fig.legend(loc='outside upper center', ncols=2, frameon=False)
    fig.savefig(path, dpi=110)
    plt.close(fig)

shows = dict(roofline=show_roofline, fits=show_fits, steps=show_steps, updates=show_updates, growth=show_growth, memory=show_memory,
    evaluation=show_evaluation, training=show_training, vision=show_vision, structures=show_structures, table=show_table,
    adam=show_adam, billion=show_billion, layers=show_layers, models=show_models, quality=show_quality)
plots = dict(steps=plot_steps, updates=plot_updates, growth=plot_growth, training=plot_training, adam=plot_adam, billion=plot_billion, quality=plot_quality)

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--quick', action='store_true', help='fewer models, rounds and seeds, in under three minutes; results go to results/quick')
    parser.add_argument('--only', nargs='+', choices=list(sections), default=list(sections), help='sections to measure')
    parser.add_argument('--to', default='here', metavar='NAME', help='folder in results/, a machine each')
    args = parser.parse_args()
    out = Path(__file__).parent/'results'/('quick' if args.quick else args.to)
    out.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(*[f'{k} {v}' for k,v in about.items()], sep=', ', end='\n\n', flush=True)
    for name in args.only:
        start = time.time()
        rows = sections[name](args.quick)
        (out/f'{name}.json').write_text(json.dumps(dict(machine=about, seconds=round(time.time()-start), rows=rows), indent=1)+'\n')
        shows[name](rows)
        if name in plots: plot(rows, plots[name], out/f'{name}.png')

if __name__=='__main__': main()
