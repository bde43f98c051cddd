"Loss against circuit size: dense networks of several widths, and recipe, RigL and SET at several densities"
import argparse,json,matplotlib.pyplot as plt,numpy as np,os,pandas as pd,time,torch
from fastsparse.circuits import check_circuit,disjoint_circuits,find_circuit,overlap,shuffled,together
from fastsparse.circuits import load_programs,make_task,programs,train_decoder,Trained
from pathlib import Path
from scipy.stats import t as student

densities = {o:1/o for o in (16,40,101,256)}  # the reciprocals are the names
widths = (16,32,64,128)
tasks = 'loop_words opens_block indentation quotes brackets'.split()
rates = dict(recipe=6e-3, rigl=1e-2, set=1e-2, dense=4e-3)

def size(method, o): return dict(d=o) if method=='dense' else dict(density=densities[o])
def sizes(method): return widths if method=='dense' else tuple(densities)

def write(file, text):
    "Write a file whole or not at all"
    part = file.with_name(f'{file.name}.{os.getpid()}')
    part.write_text(text)
    part.replace(file)

def taken(file):
    "Mark a job as taken; True if another process that is alive has it"
    mark = file.with_name(file.name+'.taken')
    try:
        with os.fdopen(os.open(mark, os.O_CREAT|os.O_EXCL|os.O_WRONLY), 'w') as f: f.write(str(os.getpid()))
        return False
    except FileExistsError:
        try:
            os.kill(int(mark.read_text() or 0), 0)
            return True
        except (ProcessLookupError, FileNotFoundError):
            mark.unlink(missing_ok=True)
            return taken(file)

def choose(out, data, method, o, n_steps, more):
    "The rate (and annealing) of the lowest validation loss after a short run with another seed; a best rate at the edge moves the edge"
    file = out/f'choice_{method}_{o}.json'
    tried = json.loads(file.read_text())['tried'] if file.exists() else []
    def loss(i, anneal=.5):
        for t in tried:
            if (t['i'],t['anneal'])==(i,anneal): return t['loss']
        kw = dict(lr=rates[method]*2**i, **(dict(anneal=anneal) if method=='recipe' else {}))
        trained = train_decoder(method, data, n_steps, seed=100, progress=False, **size(method, o), **kw, **more)
        tried.append(dict(i=i, anneal=anneal, loss=trained.valid_loss, kw=kw))
        write(file, json.dumps(dict(tried=tried)))
        return trained.valid_loss
    ends = [-1,0,1]
    while True:
        best = min(ends, key=loss)
        if best not in (ends[0],ends[-1]) or abs(best)==6: break
        ends.append(best+1 if best>0 else best-1)
        ends.sort()
    if method=='recipe': loss(best, .8)
    write(file, json.dumps(dict(tried=tried, best=min(tried, key=lambda t: t['loss'])['kw']), indent=1))

def train(out, data, method, o, seed, n_steps, more):
    ends = sizes(method)[0],sizes(method)[-1]
    near = ends[sizes(method).index(o)*2//len(sizes(method))]
    kw = json.loads((out/f'choice_{method}_{near}.json').read_text())['best']
    t = train_decoder(method, data, n_steps, seed=seed, progress=False, **size(method, o), **kw, **more)
    t.save(out/f'{method}_{o}_{seed}.part')
    (out/f'{method}_{o}_{seed}.part').replace(out/f'{method}_{o}_{seed}.pt')
    print(method, o, seed, t, f'{t.train_seconds:.0f} s', kw, flush=True)

def load(out, method, o, seed, task):
    "A network, the facts of it, and the arguments of its search"
    t = Trained.load(out/f'{method}_{o}_{seed}.pt')
    facts = dict(method=method, size=o, seed=seed, task=task, **{k:getattr(t, k) for k in ('valid_loss','train_seconds','live_weights')})
    xb = programs(200, 'means')[0][:,:-1]
    return t.model,facts,dict(task=make_task(task), xb=xb, starts=1, seed=seed, progress=False)

def search(out, method, o, seed, task):
    "The circuit of a task in a network, and its tests"
    model,facts,kw = load(out, method, o, seed, task)
    start = time.process_time()
    c = find_circuit(model, **kw)
    seconds = time.process_time()-start
    if c.found: c.save(out/f'{method}_{o}_{seed}_{task}.circuit')
    row = dict(facts, found=c.found, search_seconds=seconds, **check_circuit(model, c, make_task(task, 100, seed=1), seed=seed))
    write(out/f'{method}_{o}_{seed}_{task}.json', json.dumps(row))
    print(method, o, seed, c, f'{seconds:.0f} s', flush=True)

def criticize(out, method, o, seed, task):
    "How many circuits that share no node, what is necessary then, what other seeds of the search find, and all that in the shuffled network"
    model,facts,kw = load(out, method, o, seed, task)
    new,rows = make_task(task, 100, seed=1),[]
    for name,m in (('trained',model), ('shuffled',shuffled(model, seed))):
        found = disjoint_circuits(m, **kw)
        again = [c for c in found[:1]+[find_circuit(m, **{**kw, 'seed':100+i}) for i in range(2)] if c.found]
        row = dict(facts, network=name, disjoint=len(found), edges=', '.join(str(c.n_edges) for c in found))
        row['overlap'] = overlap(again) if len(again)>1 else None
        tests = [check_circuit(m, c, new, seed=seed) for c in [*found[:1], *([together(found)] if len(found)>1 else [])]]
        kept = 'necessity_loss random_loss swap_loss rest_loss full_loss fails'.split()
        for t,end in zip(tests, ('','_together')): row |= {f'{k}{end}':t[k] for k in kept}
        rows.append(row)
    write(out/f'critics_{method}_{o}_{seed}_{task}.json', json.dumps(rows))
    print('critics', method, o, seed, task, [r['disjoint'] for r in rows], flush=True)

def jobs(out, data, seeds, n_steps, n_choice, more):
    "Tuples of the file that a job writes, whether it is written, whether it can begin, a function, and its arguments"
    def chosen(file): return file.exists() and 'best' in json.loads(file.read_text())
    choice = [(m, o, out/f'choice_{m}_{o}.json') for m in rates for o in (sizes(m)[0],sizes(m)[-1])]
    for m,o,f in choice: yield f,chosen(f),True,choose,(out,data,m,o,n_choice,more)
    ready = all(chosen(f) for *_,f in choice)
    for seed in range(seeds):
        for i in range(4):
            for m in rates:
                o = sizes(m)[i]
                f = out/f'{m}_{o}_{seed}.pt'
                yield f,f.exists(),ready,train,(out,data,m,o,seed,n_steps,more)
        for task in tasks:
            for i in range(4):
                for m in rates:
                    o = sizes(m)[i]
                    f = out/f'{m}_{o}_{seed}_{task}.json'
                    yield f,f.exists(),(out/f'{m}_{o}_{seed}.pt').exists(),search,(out,m,o,seed,task)
    for task in tasks:
        for m in rates:
            o = sizes(m)[1]
            f = out/f'critics_{m}_{o}_0_{task}.json'
            yield f,f.exists(),(out/f'{m}_{o}_0.pt').exists(),criticize,(out,m,o,0,task)

def work(out, *args):
    "Do all jobs that no other process has taken, and wait for the others"
    while todo := [j for j in jobs(out, *args) if not j[1]]:
        for file,_,ready,f,a in todo:
            if not ready or taken(file): continue
            try: f(*a)
            finally: file.with_name(file.name+'.taken').unlink()
            break
        else: time.sleep(5)

def table(out):
    "All searches that are done, a row each"
    rows = [json.loads(f.read_text()) for f in out.glob('*_*_*_*.json') if not f.name.startswith('critics')]
    df = pd.DataFrame(rows).assign(order=lambda d: d.method.map([*rates].index))
    return df.sort_values(['order','size','seed','task']).drop(columns='order').reset_index(drop=True)

def ratios(df, one, other, n=50):
    """Edges of `one` divided by those of `other` at equal loss, a geometric mean for each seed and task

    Log edges are interpolated in the loss between the networks in which a circuit was found, and compared where both have some.
    Circuits of networks that don't know the task don't count."""
    out = {}
    for (seed,task),d in df[df.found & (df.full_loss<=.15)].groupby(['seed','task']):
        curves = [d[d.method==m].sort_values('valid_loss') for m in (one,other)]
        if min(len(c) for c in curves)<2: continue
        low,high = max(c.valid_loss.min() for c in curves),min(c.valid_loss.max() for c in curves)
        if low>=high: continue
        x = np.linspace(low, high, n)
        a,b = (np.interp(x, c.valid_loss, np.log(c.edges.astype(float))) for c in curves)
        out[seed,task] = float(np.exp((a-b).mean()))
    return pd.Series(out, dtype=float)

def interval(logs):
    "Mean, and the ends of the 95 % t-interval; no ends for one number"
    n,mean = len(logs),np.mean(logs)
    half = student.ppf(.975, n-1)*np.std(logs, ddof=1)/n**.5 if n>1 else np.nan
    return mean,mean-half,mean+half

def ratio_table(df):
    "The ratios of edges, a geometric mean with its interval over seeds, and that of each task"
    rows = []
    for one,other in (('recipe','rigl'), ('recipe','set'), ('set','rigl'), ('dense','rigl'), ('dense','recipe')):
        logs = np.log(ratios(df, one, other))
        if not len(logs): continue
        seeds = logs.groupby(level=0).mean()
        mean,low,high = np.exp(interval(seeds))
        by_task = np.exp(logs.groupby(level=1).mean())
        rows.append(dict(edges=f'{one}/{other}', ratio=mean, low=low, high=high, seeds=len(seeds), **by_task))
    return pd.DataFrame(rows)

def summary(df, n_seeds):
    "Text: what is missing, failures, and the ratios with an interval over seeds"
    n,every = len(df),n_seeds*len(tasks)*sum(len(sizes(m)) for m in rates)
    knows,others,own = df[df.full_loss<=.15],df[df.full_loss>.15],df[df.found]
    fails = own.fails.str.split(', ').explode().replace('', np.nan).value_counts()
    lines = [f'{n} of {every} searches'+('' if n==every else ': INCOMPLETE'),
        f'circuits found in {knows.found.sum()} of {len(knows)} searches where the network knows the task, {others.found.sum()} of {len(others)} elsewhere',
        f'failed tests of {len(own)} circuits: '+', '.join(f'{k} {v}' for k,v in fails.items())]
    for r in ratio_table(df).to_dict('records'):
        over = f"95 % interval {r['low']:.2f} to {r['high']:.2f} over {r['seeds']} seeds" if r['seeds']>1 else 'one seed'
        lines.append(f"{r['edges']} at equal loss: {r['ratio']:.2f}, {over}")
    return '\n'.join(lines)+'\n'

def picture(df):
    df = df.assign(edges=df.edges.where(df.full_loss<=.15))
    fig,ax = plt.subplots(figsize=(7,4.4), layout='constrained')
    for m,marker,color in zip(rates, 'soDv', ['#d55e00','#0072b2','#009e73','#666666']):
        d = df[df.method==m]
        if not len(d): continue
        for i,g in enumerate((['seed','size'], ['size'])):
            def middle(v): return np.exp(np.log(v.dropna().astype(float)).mean())
            e = d.groupby(g).agg(loss=('valid_loss','mean'), edges=('edges',middle), missed=('edges', lambda v: int(v.isna().sum())))
            if not i: ax.scatter(e.loss, e.edges, s=14, color=color, alpha=.4, marker=marker)
            else:
                ax.plot(e.loss, e.edges, color=color, marker=marker, label=dict(rigl='RigL', set='SET').get(m, m))
                for r in e[e.missed>0].itertuples():
                    ax.annotate(f'{r.missed} none', (r.loss,r.edges), (6,4), textcoords='offset points', fontsize='x-small', color=color)
    ax.set(yscale='log', xlabel='validation loss (nats per token)', ylabel='edges, geometric mean over tasks with a circuit')
    ax.legend(frameon=False)
    return fig

def write_results(out, to, n_seeds):
    "Write table, summary and picture of all that is done"
    df = table(out)
    to.mkdir(parents=True, exist_ok=True)
    df.round(6).to_csv(to/'frontier.csv', index=False)
    text = summary(df, n_seeds)
    ratio_table(df).round(3).to_csv(to/'frontier_ratios.csv', index=False)
    critics = [r for f in sorted(out.glob('critics_*.json')) for r in json.loads(f.read_text())]
    if critics: pd.DataFrame(critics).round(6).to_csv(to/'critics.csv', index=False)
    choice = {f.stem[7:]:json.loads(f.read_text()) for f in sorted(out.glob('choice_*.json'))}
    trials = [dict(network=k, **{'lr':None, 'anneal':None, **t['kw']}, valid_loss=t['loss'], chosen=t['kw']==c.get('best'))
        for k,c in choice.items() for t in c['tried']]
    pd.DataFrame(trials).round(6).to_csv(to/'frontier_rates.csv', index=False)
    (to/'frontier.txt').write_text(text)
    picture(df).savefig(to/'frontier.png', dpi=150)
    print(text)

def main():
    p = argparse.ArgumentParser(description=__doc__+'. Stop it at any time; the same command goes on. For two cores, run it twice at once.')
    p.add_argument('out', type=Path, help='a folder for networks and circuits')
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--steps', type=int, default=1500, help='of training')
    p.add_argument('--choice', type=int, default=500, help='steps of a run that chooses a rate')
    p.add_argument('--blocks', type=int, default=2, help='of each network')
    p.add_argument('--device', help="to train on, such as 'cuda'; the searches stay on the processor")
    p.add_argument('--write', action='store_true', help='do no job; write the results of those done')
    p.add_argument('--to', type=Path, default=Path(__file__).parent/'results'/'circuits')
    a = p.parse_args()
    if not a.write:
        torch.set_num_threads(1)
        a.out.mkdir(parents=True, exist_ok=True)
        work(a.out, load_programs(), a.seeds, a.steps, a.choice, dict(n_layers=a.blocks, device=a.device))
    write_results(a.out, a.to, a.seeds)

if __name__=='__main__': main()
