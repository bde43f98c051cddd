"What a dense network's settings reach when most weights are gone: two lines, `fit_sparse`, untuned settings, and a transformer"
import argparse,json,math,multiprocessing,statistics,time,torch,warnings
from collections import defaultdict
from fastai.basics import *
from fastai.callback.schedule import *
from fastprogress.fastprogress import progress_bar
from fastsparse.all import *
from fastsparse.demo import TensorData,digits_dls,digits_mlp
from functools import cache,partial
from measure import machine
from pathlib import Path

sgd = partial(SGD, mom=.9)
optimizers = dict(SGD=sgd, Adam=Adam)
rates = dict(SGD=.1, Adam=1e-3)
sparsities = (.9,.95,.99)
goals = {('lines','SGD','constant'):(.95,.94,.90), ('lines','Adam','constant'):(.93,.90,.60), ('lines','SGD','cycle'):(.93,.92,.88), ('lines','Adam','cycle'):(.91,.88,.58),
    ('fit_sparse','SGD','cycle'):(.95,.95,.94), ('fit_sparse','Adam','cycle'):(.95,.95,.94)}

def held_out():
    "Four fifths of the digits' training set to train on, and the rest in the place of the test set: what settings are chosen on"
    x,y = [torch.stack([torch.as_tensor(o) for o in os]) for os in zip(*digits_dls().train_ds)]
    cut = int(.8*len(x))
    dsets = [TensorData(x[i],y[i]) for i in (slice(cut),slice(cut,None))]
    return DataLoaders.from_dsets(*dsets, bs=64, num_workers=0, device='cpu')

def learner(opt, seed, tune):
    return Learner(held_out() if tune else digits_dls(), digits_mlp(seed), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=optimizers[opt])

def train(learn, arm, schedule, sparsity, lr, seed, interval=None, epochs=20):
    "Train `learn` in the way of `arm`"
    fit = learn.fit if schedule=='constant' else learn.fit_one_cycle
    own = {} if interval is None else dict(batches_per_update=interval)
    if arm=='dense': return fit(epochs, lr)
    if arm!='lines': return learn.fit_sparse(epochs, sparsity, lr, method={'fit_sparse':None}.get(arm, arm), seed=seed, **own)
    sparsify_model(learn, sparsity, 'uniform', seed=seed)
    fit(epochs, lr, cbs=DynamicSparseTrainingCallback(keep_score_f='fisher_saliency', seed=seed))

def digits_run(arm, opt, schedule, sparsity, lr, seed, interval=None, tune=False):
    "Accuracy on digits after 20 epochs"
    torch.set_num_threads(1)
    learn = learner(opt, seed, tune)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        train(learn, arm, schedule, sparsity, lr, seed, interval)
        return dict(arm=arm, opt=opt, schedule=schedule, sparsity=sparsity, lr=lr, seed=seed, interval=interval, accuracy=learn.validate()[1])

@cache
def text(n=64):
    "Python's help texts as rows of `n` characters, a fifth of them to test on"
    from pydoc_data.topics import topics
    codes = torch.tensor([min(ord(c), 127) for c in ''.join(topics[k] for k in sorted(topics))])
    rows = codes[:len(codes)//n*n].view(-1, n)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[len(rows)//5:],rows[:len(rows)//5]

class NextChar(nn.Module):
    "A pre-LN transformer that predicts each character from those before it"
    def __init__(self, n=64, width=64, layers=2):
        super().__init__()
        self.emb,self.pos = nn.Embedding(128, width),nn.Parameter(torch.randn(n, width)*.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4*width, 0., batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out,self.mask = nn.Linear(width, 128),torch.triu(torch.full((n,n), -math.inf), 1)

    def forward(self, x): return self.out(self.body(self.emb(x)+self.pos, self.mask))

def char_loss(model, rows): return F.cross_entropy(model(rows)[:,:-1].flatten(0,1), rows[:,1:].flatten())

inits = dict(dense=None, untouched=None, auto='auto')

def text_run(init, lr, seed, tune=False, steps=400, bs=32):
    "Nats a character on text that was held out, after `steps` of Adam with a warm-up and a cosine, masks as they were"
    torch.set_num_threads(1)
    rows,test = text()
    if tune: rows,test = rows[len(rows)//5:],rows[:len(rows)//5]
    torch.manual_seed(seed)
    model = NextChar()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if init!='dense': sparsify_model(model, .9, erdos_renyi_sparsity, sparse_init_mode=inits[init], xb=rows[:bs], seed=seed)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=steps, cycle_momentum=False)
    for _ in range(steps):
        opt.zero_grad()
        char_loss(model, rows[torch.randint(len(rows), (bs,))]).backward()
        opt.step()
        cycle.step()
    model.eval()
    with torch.no_grad(): return dict(init=init, lr=lr, seed=seed, loss=statistics.mean(char_loss(model, o).item() for o in test.split(256)))

def defaults_grid(seeds):
    "The two lines, at a constant rate and with one cycle, and `fit_sparse`, also at Adam's other rates"
    keys = [(*k,s,rates[k[1]]) for k in goals for s in sparsities]+[('fit_sparse','Adam','cycle',.99,lr) for lr in (3e-3,1e-2)]
    keys += [('dense',opt,'cycle',0.,rates[opt]) for opt in optimizers]
    return digits_run,[(*k,seed) for k in keys for seed in range(seeds)]

sweeps = dict(SGD=(.03,.1,.3), Adam=(1e-3,3e-3,1e-2))

def sensitivity_grid(seeds):
    "Three rates times three intervals at .99, and the dense network at all rates"
    grid = [('dense',opt,'cycle',0.,lr,seed) for opt in sweeps for lr in sweeps[opt] for seed in range(seeds)]
    nine = [(opt,'cycle',.99,lr,seed,every) for opt in sweeps for lr in sweeps[opt] for every in (10,20,40) for seed in range(seeds)]
    return digits_run,grid+[(arm,*o) for arm in ('auto','rigl') for o in nine]

def transformer_grid(seeds): return text_run,[(init,lr,seed) for init in inits for lr in (5e-3,) for seed in range(seeds)]

def spread_of(xs): return dict(mean=statistics.mean(xs), sd=statistics.stdev(xs) if len(xs)>1 else 0., runs=[round(x, 4) for x in xs])

def by_setting(runs, value):
    "One row a setting: its mean and deviation over seeds, and each run"
    groups = defaultdict(list)
    for r in runs: groups[tuple((k,v) for k,v in r.items() if k not in ('seed',value) and v is not None)].append(r[value])
    return [dict(k, **spread_of(xs)) for k,xs in groups.items()]

def goal_of(row):
    "The goal of a row, or None"
    if (row['arm'],row['sparsity'])==('fit_sparse',.99) and row['opt']=='Adam' and row['lr']>1e-3: return .92
    goal = goals.get((row['arm'],row['opt'],row['schedule']))
    return goal and goal[sparsities.index(row['sparsity'])]

def with_goals(rows): return [dict(r, goal=goal_of(r)) for r in rows]

def worst_losses(rows):
    "What the worst of nine settings of each method loses against the tuned dense network"
    best = {opt:max(r['mean'] for r in rows if r['arm']=='dense' and r['opt']==opt) for opt in sweeps}
    losses = lambda arm,opt: best[opt]-min(r['mean'] for r in rows if r['arm']==arm and r['opt']==opt)
    return {opt:dict(dense=best[opt], auto=losses('auto', opt), rigl=losses('rigl', opt)) for opt in sweeps}

sections = dict(defaults=(defaults_grid,'accuracy',5), sensitivity=(sensitivity_grid,'accuracy',3), transformer=(transformer_grid,'loss',3))

def _call(args): return args[0](*args[1])

def measure(name, seeds, tune, pool, only=''):
    "All runs of a section"
    f,grid = sections[name][0](seeds or sections[name][2])
    grid = [o for o in grid if only in ' '.join(map(str, o))]
    jobs = [(partial(f, tune=tune),o) for o in grid]
    rows = by_setting(list(progress_bar(pool.imap(_call, jobs), total=len(jobs))), sections[name][1])
    return with_goals(rows) if name=='defaults' else rows

def show(rows):
    "Print a line a setting"
    for r in rows:
        what = ' '.join(f'{v:g}' if isinstance(v, float) else str(v) for k,v in r.items() if k not in ('mean','sd','runs','goal'))
        met = '' if r.get('goal') is None else f"  {r['goal']:g} {'met' if r['mean']>=r['goal'] else 'missed'}"
        print(f"{what:44} {r['mean']:.4f} ± {r['sd']:.4f}{met}")

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='+', choices=list(sections), default=list(sections), help='sections to measure')
    parser.add_argument('--seeds', type=int, help='of each setting; 5 and 3 by default')
    parser.add_argument('--runs', default='', help="only runs whose settings contain this text, e.g. 'lines Adam'; nothing is written")
    parser.add_argument('--tune', action='store_true', help='measure on data held out from the training set, to choose settings with; nothing is written')
    parser.add_argument('--workers', type=int, default=2, help='processes')
    args = parser.parse_args()
    out,about = Path(__file__).parent/'results',machine()
    with multiprocessing.get_context('spawn').Pool(args.workers) as pool:
        for name in args.only:
            start = time.time()
            rows = measure(name, args.seeds, args.tune, pool, args.runs)
            show(rows)
            if args.tune or args.runs: continue
            found = dict(worst=worst_losses(rows)) if name=='sensitivity' else {}
            file = out/('defaults.json' if name=='defaults' else f'defaults_{name}.json')
            file.write_text(json.dumps(dict(machine=about, seconds=round(time.time()-start), **found, rows=rows), indent=1)+'\n')

if __name__=='__main__': main()
