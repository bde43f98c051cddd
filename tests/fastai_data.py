"Tiny data in memory, models, learners and watchers for the tests of the fastai side"
import helpers,torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastcore.all import L,noop,partial,store_attr
from fastsparse.model.sparsify import sparsify_model
from fastsparse.train.callback import DynamicSparseTrainingCallback
from helpers import assert_dead,masked_params,masks_of,same_masks
from sklearn.datasets import load_digits
from torch import nn
from torch.amp import GradScaler,autocast

momentum_sgd = partial(SGD, mom=0.9)

class TensorData:
    "Pairs from two tensors held in memory"
    def __init__(self, x, y): store_attr()
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]
    def new_empty(self): return TensorData(self.x[:0], self.y[:0])

def digits(n=192, dtype=torch.double, flat=True):
    "The first `n` digits, standardised"
    d = load_digits()
    x,y = torch.tensor(d.images[:n], dtype=dtype),torch.tensor(d.target[:n])
    x = (x-x.mean())/x.std()
    return x.flatten(1) if flat else x[:,None], y

def loaders(x, y, bs=16, n_valid=32, shuffle=False):
    "The last `n_valid` pairs validate; the others train, in order unless `shuffle`"
    dsets = TensorData(x[:-n_valid], y[:-n_valid]),TensorData(x[-n_valid:], y[-n_valid:])
    return DataLoaders.from_dsets(*dsets, bs=bs, shuffle=shuffle, drop_last=False, num_workers=0, device='cpu')

def mlp(dtype=torch.double, seed=0, sizes=(64,32,10)):
    "A small network for the digits, whose starting weights follow from `seed`"
    return helpers.mlp(sizes, seed, act=nn.ReLU).to(dtype)

def learner(path, model=None, opt_func=momentum_sgd, lr=0.05, dls=None, cbs=None, **kwargs):
    "A quiet learner on 10 batches of 16 digits"
    dls = loaders(*digits(**kwargs)) if dls is None else dls
    model = mlp() if model is None else model
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=opt_func, lr=lr, path=path, cbs=cbs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def sparse_learner(path, sparsity=.9, seed=1, **kwargs):
    "10 batches an epoch; 2048 and 320 weights, of which `round(.1*2368)=237` live: 205 and 32"
    learn = learner(path, **kwargs)
    sparsify_model(learn, sparsity, 'uniform', seed=seed)
    return learn

def elsewhere(p, **kwargs):
    "A grow score that prefers weights that are zero, so not those just dropped: every update moves the mask"
    return 1/(1+p.detach().abs())

class Watch(Callback):
    "After each batch, the masks; the batches of the fit at which they changed"
    order,run_valid = 100,False
    def __init__(self): self.masks,self.moved = [],[]
    def before_fit(self):
        if not self.learn.lock.locked(): self.last = masks_of(self.learn.model)
    def after_batch(self):
        now = masks_of(self.learn.model)
        if not same_masks(now, self.last): self.moved.append(self.learn.epoch*len(self.dls.train)+self.learn.iter)
        self.masks.append(now)
        self.last = now

class Probe(Callback):
    "Dead weights, their gradients (when a step is about to be made) and their state are zero, each step"
    order,run_valid = 100,False
    def __init__(self, state=True, grads=True): self.state,self.grads,self.n_steps,self.n_checks = state,grads,0,0
    def before_step(self):
        self.n_steps += 1
        for o in masked_params(self.learn.model) if self.grads else []:
            assert o.p.grad is None or not o.p.grad[~o.mask].any(), f'{o.name}: the gradient of dead weights is not zero'
    def after_step(self):
        self.n_checks += 1
        assert_dead(self.learn.model, self.learn.opt, self.state)

class At(Callback):
    "Do `f(learn)` at `event` of the training batches `ts` of the fit"
    run_valid = False
    def __init__(self, event, ts, f, order=0):
        self.ts,self.f,self.order = ts,f,order
        setattr(self, event, self._go)
    def _go(self):
        if self.learn.epoch*len(self.dls.train)+self.learn.iter in self.ts: self.f(self.learn)

def cancel(ex):
    def _f(learn): raise ex
    return _f

class CpuMixedPrecision(MixedPrecision):
    "fastai's mixed precision where there is no GPU"
    def before_fit(self):
        self.autocast,self.learn.scaler,self.scales = autocast('cpu', torch.bfloat16),GradScaler('cpu', init_scale=1024.),L()

class ConvNet(nn.Module):
    "A body and a head, as a vision learner has"
    def __init__(self):
        super().__init__()
        conv = lambda i,o: [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.body = nn.Sequential(*conv(1,8), *conv(8,16))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16,32), nn.ReLU(), nn.Linear(32,10))
    def forward(self, x): return self.head(self.body(x))

def body_and_head(model): return L(model.body, model.head).map(lambda m: L(m.parameters()))

def fit(learn, n=1, cbs=(), start_epoch=0, **settings):
    "A fit with the callback; returns it, and the batches at which masks moved"
    cb,watch = DynamicSparseTrainingCallback(**{**dict(batches_per_update=4, grow_score_f=elsewhere), **settings}),Watch()
    learn.fit(n, cbs=[cb, watch, *cbs], start_epoch=start_epoch)
    return cb,watch.moved
