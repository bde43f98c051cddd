"Accuracy on handwritten digits: dense, static and dynamic sparse training at very high sparsity"
import statistics,torch
from fastsparse.all import *
from functools import cache
from sklearn.datasets import load_digits
from torch import nn

methods = dict(dense=None, static=None, SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)
bs,lr,update_every = 64,.1,20

@cache
def digits():
    "Training and test rows and classes, a fifth to test on; the split is always the same"
    data = load_digits()
    x,y = torch.tensor(data.data).float()/16,torch.tensor(data.target)
    idx = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    cut = len(y)//5
    return x[idx[cut:]],y[idx[cut:]],x[idx[:cut]],y[idx[:cut]]

def run(method, sparsity, seed, epochs=40, structure=None, chosen=None):
    "Test accuracy after one training"
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x,y,x_test,y_test = digits()
    model = nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,256), nn.ReLU(), nn.Linear(256,10))
    for p in model.parameters(): nn.init.kaiming_normal_(p) if p.ndim>1 else nn.init.zeros_(p)
    if method!='dense': sparsify_model(model, sparsity, erdos_renyi_sparsity, sparse_init_mode='fan_in', structure=structure, chosen=chosen, seed=seed)
    opt,n_steps = torch.optim.SGD(model.parameters(), lr=lr, momentum=.9),epochs*(len(x)//bs)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, n_steps)
    if methods[method] is not None: DynamicSparseTraining(model, opt, n_steps, **{**methods[method], 'batches_per_update':update_every}, seed=seed)
    for _ in range(epochs):
        for idx in torch.randperm(len(x)).split(bs)[:len(x)//bs]:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x[idx]), y[idx]).backward()
            opt.step()
            decay.step()
    with torch.no_grad(): return (model(x_test).argmax(1)==y_test).float().mean().item()

def run_args(args): return run(*args)

def table(sparsities, seeds, pool):
    "Mean and deviation over `seeds` of each method and sparsity; the dense network once"
    grid = [('dense',0.)]+[(m,s) for s in sparsities for m in methods if m!='dense']
    accs = list(pool.map(run_args, [(m,s,seed) for m,s in grid for seed in range(seeds)]))
    of = lambda i: accs[i*seeds:(i+1)*seeds]
    return [dict(method=m, sparsity=s, mean=statistics.mean(of(i)), sd=statistics.stdev(of(i)), seeds=seeds) for i,(m,s) in enumerate(grid)]
