"What the lines that everybody writes cost beside a dense fit: an MLP 784-1024-1024-10 on batches of 64, and the demo's small one on digits; Adam"
import statistics,torch,warnings
from fastai.basics import *
from fastsparse.all import *
from fastsparse.demo import digits_dls,digits_mlp
from functools import partial
from measure import interleaved,ratios,spread

bs = 64
optimizers = {"fastai's Adam":Adam, "torch's, foreach":partial(OptimWrapper, opt=partial(torch.optim.Adam, foreach=True)),
    "torch's, fused":partial(OptimWrapper, opt=partial(torch.optim.Adam, fused=True))}
columns = [*optimizers, 'digits']
masks = dict(sparse_compute=False)
arms = dict(again=('dense again', 0.), static=('static masks', .9), rigl=('two lines, RigL, masks', .9, dict(RigL_presets, **masks)), two_lines=('two lines, masks', .9, masks),
    default=('two lines', .9, {}), default_95=('two lines, .95', .95, {}), fit_sparse=('fit_sparse', .9), fit_sparse_98=('fit_sparse, .98', .98))
goals = dict(static=1.1, rigl=1.2, two_lines=1.25, default=.5, default_95=.42, fit_sparse=.5, fit_sparse_98=.38)

class Memory:
    "Batches of two tensors"
    bs = bs
    def __init__(self, *ts): self.ts = ts
    def __len__(self): return len(self.ts[0])//self.bs
    def __iter__(self): return zip(*[t.split(self.bs) for t in self.ts])

def goal(column, arm):
    "At most this much of a dense fit"
    if column!='digits': return goals.get(arm)
    return 1.2 if arm in ('default','fit_sparse') else None

def large():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10))

def fit(make, opt_func, dls, n_epoch, arm):
    "One fit, the making of masks included"
    model,(_,sparsity,*kwargs) = make(),arms.get(arm, ('', 0.))
    learn = Learner(dls, model, loss_func=nn.functional.cross_entropy, opt_func=opt_func)
    learn._do_epoch_validate = noop
    with learn.no_bar(), learn.no_logging():
        if 'fit_sparse' in arm: return learn.fit_sparse(n_epoch, sparsity, 1e-3, seed=0)
        if sparsity: sparsify_model(model, sparsity, erdos_renyi_sparsity, seed=0)
        learn.fit(n_epoch, 1e-3, cbs=[DynamicSparseTrainingCallback(**o, seed=0) for o in kwargs])

def beside_dense(column, quick):
    "Ratios to a dense fit for one of `columns`: an optimizer and the large network, some 5,000 samples and two epochs; or digits, twenty epochs"
    if column=='digits': make,opt,dls,n_epoch = digits_mlp,Adam,digits_dls(),5 if quick else 20
    else:
        data = torch.randn(78*bs, 784),torch.randint(10, (78*bs,))
        make,opt,dls,n_epoch = large,optimizers[column],DataLoaders(Memory(*data), []),1 if quick else 2
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of the signal that is repaired, and of short fits
        times = interleaved({k:partial(fit, make, opt, dls, n_epoch, k) for k in ('dense',*arms)}, 2 if quick else 7, warmup=1)
    dense = times.pop('dense')
    return dict(column=column, dense_s=statistics.median(dense), **{k:spread(ratios(t, dense)) for k,t in times.items()})
