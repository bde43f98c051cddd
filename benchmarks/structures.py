"What a structure and a second thread bring: masks whose outputs share inputs in fours beside masks of no structure, and two threads beside one"
import compute,quality,statistics,time,torch
from costs import sgd,stepper
from fastsparse.all import *
from fastsparse.kernels.linear import gradients,multiply
from fastsparse.kernels.ops import SparseIndex
from fastsparse.weights.find import masked_params
from measure import *
from torch.nn import functional as F

shapes = ((1024,784,128),(3072,768,256),(4096,4096,128))

def matrix(n_out, n_in, sparsity, structure=None):
    "Index and live values"
    kind,w = as_structure(structure),torch.randn(n_out, n_in)
    mask = kind.top(w, kind.count(w.shape, round((1-sparsity)*w.numel())))
    return SparseIndex(mask),torch.randn(int(mask.sum()))

def fours(shape, sparsity, rounds):
    "How many times faster than masks of no structure, and than dense, are products of `'block 4x1'`?"
    torch.manual_seed(0)
    n_out,n_in,rows = shape
    x,g,w = torch.randn(rows, n_in),torch.randn(rows, n_out),torch.randn(n_out, n_in)
    free,four = matrix(n_out, n_in, sparsity),matrix(n_out, n_in, sparsity, 'block 4x1')
    assert four[0].fours
    arms = {f'{k} forward':lambda o=o: multiply(*o, x) for k,o in (('free',free),('four',four))}
    arms |= {f'{k} backward':lambda o=o: gradients(*o, x, g) for k,o in (('free',free),('four',four))}
    times = interleaved_blocks(dict(arms, dense=lambda: F.linear(x, w), back=lambda: (g@w, g.t()@x)), rounds)
    whole = {k:[a+b for a,b in zip(times[f'{k} forward'], times[f'{k} backward'])] for k in ('free','four')}
    return dict(shape=shape, sparsity=sparsity, forward=spread(ratios(times['free forward'], times['four forward'])),
        backward=spread(ratios(times['free backward'], times['four backward'])), step=spread(ratios(whole['free'], whole['four'])),
        against_dense=spread([(a+b)/c for a,b,c in zip(times['dense'], times['back'], whole['four'])]))

def step(name, sparsity, rounds):
    "How many times faster is a whole training step in fours than one without structure?"
    def live(structure):
        torch.manual_seed(0)
        model,xb,yb = compute.make[name]()
        compute.sparsify(name, model, sparsity, structure)
        opt = sgd(model)
        sparse_compute(model, None, opt, {o.name:'rows' for o in masked_params(model) if not o.mask.all()})
        return stepper(model, opt, xb, yb)
    times = interleaved_blocks(dict(free=live(None), four=live('block 4x1 pad')), rounds, compute.block_seconds)
    return dict(model=name, sparsity=sparsity, free_ms=1e3*statistics.median(times['free']), step=spread(ratios(times['free'], times['four'])))

def accuracy(sparsities, seeds, pool):
    "What the structure costs on digits: mean accuracy over `seeds` with RigL, with and without; ten outputs are no fours, so the last layer is dense"
    grid = [(k,s) for s in sparsities for k in (None,'block 4x1')]
    accs = list(pool.map(quality.run_args, [('RigL',s,seed,40,k,['0','2']) for k,s in grid for seed in range(seeds)]))
    return [dict(structure=k or 'none', sparsity=s, mean=statistics.mean(a), sd=statistics.stdev(a), seeds=seeds)
        for i,(k,s) in enumerate(grid) for a in [accs[i*seeds:(i+1)*seeds]]]

def threads(shape, sparsity, rounds=9):
    "Forward and backward on the clock, with one thread and with two, dense and live; both cores must be free"
    torch.manual_seed(0)
    n_out,n_in,rows = shape
    x,g,w = torch.randn(rows, n_in),torch.randn(rows, n_out),torch.randn(n_out, n_in)
    index,values = matrix(n_out, n_in, sparsity)
    arms = dict(dense=lambda: (F.linear(x, w), g@w, g.t()@x), live=lambda: (multiply(index, values, x), gradients(index, values, x, g)))
    def on(n, f):
        torch.set_num_threads(n)
        f()
        start,k = time.perf_counter(),0
        while k<3 or time.perf_counter()-start<.05:
            f()
            k += 1
        return (time.perf_counter()-start)/k
    try: times = [{(k,n):on(n, f) for k,f in arms.items() for n in (1,2)} for _ in range(rounds)]
    finally: torch.set_num_threads(1)
    return dict(shape=shape, sparsity=sparsity, **{k:spread([t[k,1]/t[k,2] for t in times]) for k in arms})
