"What the lines that everybody writes cost beside a dense fit: an MLP 784-1024-1024-10, batches of 64, Adam, 90 % sparse"
import statistics,torch,warnings
from fastai.basics import *
from fastsparse.all import *
from functools import partial
from measure import interleaved,ratios,spread

sparsity,bs = .9,64
optimizers = {"fastai's Adam":Adam, "torch's, foreach":partial(OptimWrapper, opt=partial(torch.optim.Adam, foreach=True)),
    "torch's, fused":partial(OptimWrapper, opt=partial(torch.optim.Adam, fused=True))}
titles = dict(again='dense again', static='static masks', rigl='two lines, RigL, masks', two_lines='two lines, masks', default='two lines', fit_sparse='fit_sparse')

class Memory:
    "Batches of two tensors"
    bs = bs
    def __init__(self, *ts): self.ts = ts
    def __len__(self): return len(self.ts[0])//self.bs
    def __iter__(self): return zip(*[t.split(self.bs) for t in self.ts])

def fit(arm, opt_func, dls, n_epoch):
    "One fit, the making of masks included"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10))
    learn = Learner(dls, model, loss_func=nn.functional.cross_entropy, opt_func=opt_func)
    learn._do_epoch_validate = noop
    with learn.no_bar(), learn.no_logging():
        if arm=='fit_sparse': return learn.fit_sparse(n_epoch, sparsity, 1e-3, seed=0)
        if arm not in ('dense','again'): sparsify_model(model, sparsity, erdos_renyi_sparsity, seed=0)
        cbs = dict(rigl=dict(RigL_presets, sparse_compute=False), two_lines=dict(sparse_compute=False), default={})
        learn.fit(n_epoch, 1e-3, cbs=DynamicSparseTrainingCallback(**cbs[arm], seed=0) if arm in cbs else None)

def beside_dense(opt, quick):
    "Ratios to a dense fit of some 5,000 samples and two epochs, for one of `optimizers`"
    n,n_epoch = 78,1 if quick else 2
    dls = DataLoaders(Memory(torch.randn(n*bs, 784), torch.randint(10, (n*bs,))), [])
    arms = {k:partial(fit, k, optimizers[opt], dls, n_epoch) for k in ('dense',*titles)}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of the signal that is repaired, and of short fits
        times = interleaved(arms, 2 if quick else 7, warmup=1)
    dense = times.pop('dense')
    return dict(optimizer=opt, dense_s=statistics.median(dense), **{k:spread(ratios(t, dense)) for k,t in times.items()})
