"Tiny data in memory, models, learners and watchers for the tests of the fastai side"
import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastcore.all import L,noop,partial,store_attr
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
    "A small network whose starting weights follow from `seed`"
    torch.manual_seed(seed)
    layers = [l for i,o in zip(sizes, sizes[1:]) for l in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(dtype)

def learner(path, model=None, opt_func=momentum_sgd, lr=0.05, dls=None, cbs=None, **kwargs):
    "A quiet learner on 10 batches of 16 digits"
    dls = loaders(*digits(**kwargs)) if dls is None else dls
    model = mlp() if model is None else model
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=opt_func, lr=lr, path=path, cbs=cbs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def masked(model):
    "`(name, parameter, mask)` for every mask buffer, found without the library"
    return [(f'{n}.{k[:-5]}', m._parameters[k[:-5]], b) for n,m in model.named_modules() for k,b in m._buffers.items() if k.endswith('_mask')]

def masks_of(model): return {n:b.clone() for n,_,b in masked(model)}
def live(model): return [int(b.sum()) for *_,b in masked(model)]
def same(a, b): return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def states(opt, p):
    "Every tensor that `opt` or an optimizer inside it keeps for the single weights of `p`, once its state dict was read: law 3 binds what is shown"
    opt.state_dict()
    found = []
    if vars(opt).get('slow_weights') is not None:
        found += [s for ss,ps in zip(opt.slow_weights, opt.param_lists) for s,q in zip(ss,ps) if q is p]
    while 'opt' in vars(opt): opt = opt.opt
    return found + [v for v in opt.state.get(p, {}).values() if isinstance(v, torch.Tensor) and v.shape==p.shape]

def assert_dead(model, opt=None):
    "Every dead weight, and its state in `opt`, is exactly zero"
    assert masked(model)
    for name,p,mask in masked(model):
        for t in [p.data]+(states(opt, p) if opt is not None else []):
            assert not t[~mask].any(), f'{name}: {int(t[~mask].count_nonzero())} of {int((~mask).sum())} dead entries are not zero'

class Watch(Callback):
    "After each batch, the masks; the batches of the fit at which they changed"
    order,run_valid = 100,False
    def __init__(self): self.masks,self.moved = [],[]
    def before_fit(self):
        if not self.learn.lock.locked(): self.last = masks_of(self.learn.model)
    def after_batch(self):
        now = masks_of(self.learn.model)
        if not same(now, self.last): self.moved.append(self.learn.epoch*len(self.dls.train)+self.learn.iter)
        self.masks.append(now)
        self.last = now

class Probe(Callback):
    "Dead weights, their gradients (when a step is about to be made) and their state are zero, each step"
    order,run_valid = 100,False
    def __init__(self, state=True, grads=True): self.state,self.grads,self.n_steps,self.n_checks = state,grads,0,0
    def before_step(self):
        self.n_steps += 1
        if not self.grads: return
        for name,p,mask in masked(self.learn.model):
            if p.grad is not None: assert not p.grad[~mask].any(), f'{name}: the gradient of dead weights is not zero'
    def after_step(self):
        self.n_checks += 1
        assert_dead(self.learn.model, self.learn.opt if self.state else None)

class At(Callback):
    "Do `f(learn)` at `event` of the training batches `ts` of the fit"
    run_valid = False
    def __init__(self, event, ts, f, order=0):
        self.ts,self.f,self.order = ts,f,order
        setattr(self, event, self._go)
    def _go(self):
        if self.learn.epoch*len(self.dls.train)+self.learn.iter in self.ts: self.f(self.learn)

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
