"""What the usual lines cost beside dense, and at most may cost: `python benchmarks/floors.py [--rounds N] [--pictures]` ends with an error if one is over its floor

An MLP 784-1024-1024-10 on batches of 64, the digits' MLP, an MLP for a table, and with `--pictures` ResNet-18 on 64x64 pictures. CPU time, both sides in turns
in one process, medians. A processor with AVX2 alone has floors of its own, where they differ."""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse,fits,sys,torch,torch.nn.functional as F,warnings
from fastai.basics import *
from fastai.vision.models.xresnet import xresnet18
from fastsparse.all import *
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.kernels.vectors import vector_bytes,why_not
from functools import partial
from measure import interleaved,machine,ratios,spread
from torch.optim import AdamW

floors = {'two lines .9':.52, 'two lines .95':.42, 'fit_sparse .9':.55, 'fit_sparse .98':.40, 'two lines .9, masks':1.2, 'static masks .9':1.1,
    'loop SGD .9':.34, 'loop AdamW .9':.34, 'loop AdamW foreach .9':.34, 'loop AdamW fused .9':.34, 'loop SGD .9, zeroed in place':.34,
    'loop AdamW .9, zeroed in place':.34, "loop fastai's Adam .9":.21, 'fit_sparse .9 of pictures':.8, "digits' MLP, masks":1.15, "digits' MLP":1.15,
    'table of 94,000 weights, fit_sparse .9':1.2}
avx2 = {'two lines .9':.50, 'two lines .95':.38, 'static masks .9':1.08}  # goals: an EPYC of Zen 3 gave .63, .55 and 1.11 at best before sums fitted its registers
n_steps = 20
opts = {'SGD':lambda ps: torch.optim.SGD(ps, 1e-2, momentum=.9), 'AdamW':partial(AdamW, lr=1e-3, foreach=False), 'AdamW foreach':partial(AdamW, lr=1e-3, foreach=True),
    'AdamW fused':partial(AdamW, lr=1e-3, fused=True), "fastai's Adam":lambda ps: Adam(ps, lr=1e-3, wd=.01)}

def loop(name, sparsity, set_to_none=True):
    "A function that makes `n_steps` steps of a plain loop"
    model = fits.large()
    if sparsity:
        sparsify_model(model, sparsity, 'erk', seed=0)
        sparse_compute(model, None, plan={'0.weight':'rows', '2.weight':'rows'})
    opt,xb,yb = opts[name](list(model.parameters())),torch.randn(n_steps, fits.bs, 784),torch.randint(10, (n_steps,fits.bs))
    def run():
        for x,y in zip(xb, yb):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad(*[set_to_none] if isinstance(opt, torch.optim.Optimizer) else [])
    return run

def loops(rounds):
    "Ratios of plain loops on live weights to dense ones"
    found = {}
    for name in opts:
        for in_place in (False,True):
            key = f"loop {name} .9{', zeroed in place' if in_place else ''}"
            if key not in floors: continue
            times = interleaved(dict(dense=loop(name, 0, not in_place), live=loop(name, .9, not in_place)), rounds)
            found[key] = ratios(times['live'], times['dense'])
    return found

def whole_fits(rounds):
    "Ratios of whole fits to dense ones, with fastai's Adam"
    arms = {'two lines .9':'default', 'two lines .95':'default_95', 'fit_sparse .9':'fit_sparse', 'fit_sparse .98':'fit_sparse_98', 'two lines .9, masks':'two_lines',
        'static masks .9':'static'}
    data = torch.randn(78*fits.bs, 784),torch.randint(10, (78*fits.bs,))
    dls = DataLoaders(fits.Memory(*data), [])
    times = interleaved({k:partial(fits.fit, fits.large, Adam, dls, 2, k) for k in ('dense',*arms.values())}, rounds, warmup=1)
    return {k:ratios(times[arm], times['dense']) for k,arm in arms.items()}

def small_fits(rounds):
    "Ratios of fits of the digits' MLP to dense ones, with fastai's Adam"
    arms = {"digits' MLP, masks":'two_lines', "digits' MLP":'default'}
    times = interleaved({k:partial(fits.fit, digits_mlp, Adam, digits_dls(), 20, k) for k in ('dense',*arms.values())}, rounds, warmup=1)
    return {k:ratios(times[arm], times['dense']) for k,arm in arms.items()}

def table_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(44,256), nn.ReLU(), nn.Linear(256,256), nn.ReLU(), nn.Linear(256,64), nn.ReLU(), nn.Linear(64,10))

def table_fits(rounds):
    "Ratios of `fit_sparse` to dense fits of an MLP for a table with 44 columns"
    data = torch.randn(78*fits.bs, 44),torch.randint(10, (78*fits.bs,))
    dls = DataLoaders(fits.Memory(*data), [])
    times = interleaved({k:partial(fits.fit, table_mlp, Adam, dls, 5, k) for k in ('dense','fit_sparse')}, rounds, warmup=1)
    return {'table of 94,000 weights, fit_sparse .9':ratios(times['fit_sparse'], times['dense'])}

def pictures(rounds):
    "Ratios of `fit_sparse` of ResNet-18 to a dense fit"
    data = torch.randn(8*32, 3, 64, 64),torch.randint(10, (8*32,))
    def fit(sparse):
        torch.manual_seed(0)
        memory = fits.Memory(*data)
        memory.bs = 32
        learn = Learner(DataLoaders(memory, []), xresnet18(n_out=10), loss_func=F.cross_entropy)
        learn._do_epoch_validate = noop
        with learn.no_bar(), learn.no_logging(): learn.fit_sparse(2, .9, 1e-3, seed=0) if sparse else learn.fit(2, 1e-3)
    times = interleaved(dict(dense=partial(fit, False), sparse=partial(fit, True)), rounds, warmup=1)
    return {'fit_sparse .9 of pictures':ratios(times['sparse'], times['dense'])}

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--pictures', action='store_true')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    kind = 'no kernels' if why_not() else {64:'AVX-512', 32:'AVX2'}.get(vector_bytes(), 'neither AVX2 nor AVX-512')
    if kind=='AVX2': floors |= avx2
    print(', '.join(f'{k} {v}' for k,v in machine().items()), f'floors of {kind}', sep='; ')
    found,over = {},[]
    for measured in (loops,whole_fits,small_fits,table_fits): found |= measured(args.rounds)
    if args.pictures: found |= pictures(min(args.rounds, 5))
    for k,d in ((k, spread(rs)) for k,rs in found.items()):
        if d['median']>floors[k]: over.append(k)
        print(f"{k:34} {d['median']:.2f} ({d['q1']:.2f} to {d['q3']:.2f})  at most {floors[k]}{'  OVER' if k in over else ''}", flush=True)
    if over: sys.exit(f"over the floor: {', '.join(over)}")
