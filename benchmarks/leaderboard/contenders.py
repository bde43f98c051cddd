"The ways to train that are compared: the library's methods, dense networks, and other libraries' methods"
import io,numpy as np,torch,warnings
from contextlib import redirect_stdout
from fastai.basics import *
from fastai.callback.schedule import *
from fastsparse.all import *
from fastsparse.train.learned import LearnedMaskCallback
from fastsparse.masks.schedules import Interval
from fastsparse.masks.selection import count_live
from fastsparse.model.enforcement import masked_params
from fastsparse.report.flops import flop_profile
from fastsparse.train.fit import auto_presets
from fastsparse.train.method import find_method
from fastsparse.train.presets import method_names
from functools import lru_cache
from .tasks import tasks

class NoValid(Callback):
    "Skip validation: scores are taken once, at the end"
    def before_validate(self): raise CancelValidException()

def n_epochs(task, n, halves=False):
    "Epochs of about the usual length, 40 at the most; an even number for `halves`"
    usual = 32 if task=='cartpole' else max(len(tasks[task].parts[0][1])//tasks[task].bs, 1)
    res = min(max(round(n/usual), 1), 40)
    return 2*max(round(res/2), 1) if halves else res

class TrainRun:
    "A learner of one task, and the settings of one training"
    def __init__(self, task, sparsity, seed, n, lr, width=None, halves=False):
        store_attr()
        self.t,self.ledger = tasks[task],Ledger(verbose=False)
        set_seed(seed)
        model = self.t.make(ifnone(width, self.t.width))
        self.epochs = n_epochs(task, n, halves)
        dl = self.t.loader(model, n//self.epochs, seed)
        self.n = self.epochs*(n//self.epochs)
        self.learn = Learner(DataLoaders(dl, dl), model, loss_func=self.t.loss, opt_func=Adam)
        self.learn.dls.n_inp = len(self.t.parts[0][0])

    def fit(self, epochs=None, cbs=(), ledger=True):
        "One cycle"
        self.learn.fit_one_cycle(ifnone(epochs, self.epochs), self.lr, cbs=[NoValid(), *([self.ledger] if ledger else []), *cbs])

    def make_sparse(self, **kwargs):
        "Masks of the sparsity of this run"
        return sparsify_model(self.learn, self.sparsity, erdos_renyi_sparsity, seed=self.seed, **kwargs)

    @property
    def reached(self):
        "Sparsity of all weights with masks"
        os = masked_params(self.learn.model)
        return 1-sum(count_live(o.mask) for o in os)/sum(o.mask.numel() for o in os) if os else 0.

@lru_cache
def models_of(task, sparsity):
    "A dense network, a static sparse one, and a batch for both"
    t,(model,sparse) = tasks[task],[tasks[task].make(tasks[task].width) for _ in range(2)]
    xb = tuple(x[:t.bs] for x in t.parts[0][0])
    sparsify_model(sparse, sparsity, erdos_renyi_sparsity, sparse_init_mode=None, seed=0)
    return model,sparse,xb

def forward_flops(
    task:str, # One of `tasks`
    sparsity:float, # Of the second number
) -> tuple: # Of the dense network, and of one with a static mask
    "FLOPs of the forward of a batch"
    model,sparse,xb = models_of(task, sparsity)
    return flop_profile(model, xb).total(),flop_profile(sparse, xb).total(sparse=True)

@lru_cache
def small_width(
    task:str, # One of `tasks`
    sparsity:float, # Of the sparse network
) -> int: # The width whose dense network costs about as many FLOPs as the sparse one
    "How wide is a dense network for the FLOPs of a sparse one?"
    t,(_,wanted),xb = tasks[task],forward_flops(task, sparsity),models_of(task, sparsity)[2]
    return min(range(t.step, t.width+1, t.step), key=lambda w: abs(flop_profile(t.make(w), xb).total()-wanted))

dense_rates = 3e-3,1e-2,3e-2

class Contender:
    "One way to train a network; `train` gets a `TrainRun`, and `cost` says before how many FLOPs `n` steps take"
    rates,needs,only = (1e-3,3e-3,1e-2),None,None  # rates to choose from; a module that must be installed; tasks it can do, None is all
    peer = published = halves = all_steps = False  # all_steps: takes all steps under both budgets
    def width(self, task, sparsity): return None
    def rates_at(self, sparsity): return self.rates

class Dense(Contender):
    "The network without masks"
    rates = dense_rates
    def cost(self, task, sparsity, n): return 3*n*forward_flops(task, sparsity)[0]
    def train(self, o): o.fit()

class SmallDense(Contender):
    "A dense network that is narrow enough to cost as much as the sparse one"
    rates,all_steps = dense_rates,True
    def width(self, task, sparsity): return small_width(task, sparsity)
    def cost(self, task, sparsity, n): return 3*n*forward_flops(task, sparsity)[1]
    def train(self, o): o.fit()

class Method(Contender):
    "`fit_sparse` with a preset, or with its own"
    def __init__(self, name):
        self.name,self.published,self.all_steps = name,name not in ('auto','static'),name=='static'
        if self.settings(100).get('sparsity_path') is not None and name!='softmest': self.rates = dense_rates
    def settings(self, n): return auto_presets(n) if self.name=='auto' else find_method(self.name)
    def cost(self, task, sparsity, n):
        model,_,xb = models_of(task, sparsity)
        k = n//n_epochs(task, n)
        settings = dict(batches_per_update=Interval(k), sparse_f=erdos_renyi_sparsity) | self.settings(n)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return predict_cost(model, xb, n, sparsity=sparsity, batch_size=tasks[task].bs, steps_per_epoch=k, **settings).training

    def train(self, o): o.learn.fit_sparse(o.epochs, o.sparsity, o.lr, method=self.name, seed=o.seed, cbs=[NoValid(), o.ledger])

class OneShot(Contender):
    "Half of the steps dense, then pruned by magnitude, then the other half"
    published,halves,rates = True,True,dense_rates
    def cost(self, task, sparsity, n):
        dense,sparse = forward_flops(task, sparsity)
        return 3*(n//2)*dense+3*(n-n//2)*sparse

    def prune(self, o): o.make_sparse(mask_init='magnitude')
    def train(self, o):
        o.fit(o.epochs//2)
        self.prune(o)
        o.fit(o.epochs-o.epochs//2, cbs=[DynamicSparseTrainingCallback(method='static', scale_rates=True, seed=o.seed)])

class Learned(Contender):
    "Masks that are chosen anew in each step; `grads` is the part of the weights whose gradient is computed"
    published,rates = True,dense_rates
    def __init__(self, preset, grads): store_attr()
    def cost(self, task, sparsity, n):
        dense,sparse = forward_flops(task, sparsity)
        return int(n*(2*sparse+sparse+self.grads(sparsity)*(dense-sparse)))

    def train(self, o):
        kept = {m.name:count_live(m.mask)/m.mask.numel() for m in masked_params(models_of(o.task, o.sparsity)[1])}
        settings = {k:v for k,v in self.preset.items() if k!='sparseness'}
        grads = self.grads(o.sparsity)
        if grads<1: settings['backward_sparseness'] = f'top {grads}'
        learn_masks(o.learn, {k:f'top {d}' for k,d in kept.items() if d<1} | {'*':None}, seed=o.seed, **settings)
        o.fit(ledger=False, cbs=[LearnedMaskCallback()])
        fold_masks(o.learn)
        n = sum(m.mask.numel() for m in masked_params(models_of(o.task, o.sparsity)[1]))
        o.live = lambda: 1-sum(m.mask.numel()-count_live(m.mask) for m in masked_params(o.learn.model))/n

plain_mlps = 'digits_mlp','autoencoder','cartpole'
no_text = tuple(k for k in tasks if not k.startswith('text'))

class Peer(Contender):
    "RigL of another library, which begins with our masks"
    peer = True
    def rates_at(self, sparsity): return tuple(r/(1-sparsity)**.5 for r in self.rates)
    def cost(self, task, sparsity, n):
        return predict_cost(*models_of(task, sparsity)[1:], n, **RigL_presets(batches_per_update=max(n//32, 5))).training

class RigLTorchStep(Callback):
    "rigl_torch's scheduler, with our masks and about 32 updates"
    def __init__(self, masks, n): store_attr()
    def before_fit(self):
        from rigl_torch.RigL import RigLScheduler
        from rigl_torch.util import get_W
        ws,linear = get_W(self.learn.model, return_linear_layers_mask=True)
        masks = [self.masks.get(id(w)) for w in ws]
        state = dict(S=[0. if m is None else 1-m.float().mean().item() for m in masks], N=[w.numel() for w in ws], backward_masks=masks,
            delta_T=max(self.n//32, 5), alpha=.3, T_end=int(.75*self.n), sparsity_distribution='uniform', ignore_linear_layers=False,
            static_topo=False, grad_accumulation_n=1, step=0, rigl_steps=0, _linear_layers_mask=linear)
        self.rigl = RigLScheduler(self.learn.model, self.learn.opt, state_dict=state)

    def before_step(self):
        if not self.rigl(): raise CancelStepException()

class RigLTorch(Peer):
    needs,only = 'rigl_torch',no_text
    def train(self, o):
        hooks = o.make_sparse()
        masks = {id(m.p):m.mask.clone() for m in masked_params(o.learn.model)}
        hooks.remove()
        cb = RigLTorchStep(masks, o.n)
        o.fit(ledger=False, cbs=[cb])
        for m in masked_params(o.learn.model): m.mask.copy_(m.p!=0)

class SparselabStep(Callback):
    "sparselab's RigL moves after each step until three quarters of the run"
    def __init__(self, algo, n): store_attr()
    def after_step(self):
        if self.train_iter<.75*self.n: self.algo.step()

class Sparselab(Peer):
    needs,only = 'sparselab',plain_mlps
    def train(self, o):
        import sparselab
        from sparselab.layout import from_dense
        o.make_sparse()
        weights = {m.name.rpartition('.')[0]:(m.p.detach().clone(), m.mask) for m in masked_params(o.learn.model)}
        algo = sparselab.RigL(o.sparsity, .3, max(o.n//32, 5), seed=o.seed)
        for k,(w,mask) in weights.items():
            old,new = o.learn.model.get_submodule(k),sparselab.SparseLinear(w.shape[1], w.shape[0], sparsity=o.sparsity)
            new._csr = from_dense(torch.where(mask, w, 0))
            new._values,new.bias = nn.Parameter(torch.from_numpy(np.asarray(new._csr.values))),old.bias
            o.learn.model.set_submodule(k, new)
        o.learn.model.apply(algo)
        layers = [o.learn.model.get_submodule(k) for k in weights]
        o.live = lambda: sum(m.nnz for m in layers)/sum(m.in_features*m.out_features for m in layers)
        o.fit(ledger=False, cbs=[SparselabStep(algo, o.n)])

class Fasterai(Contender):
    "fasterai's gradual pruning, along its cubic"
    peer,needs,only,rates = True,'fasterai',no_text,dense_rates
    def cost(self, task, sparsity, n):
        dense,sparse = forward_flops(task, sparsity)
        return int(3*n*(sparse+(dense-sparse)*(.2+.8/4)))  # a fifth dense, then (1-t)**3

    def train(self, o):
        from fasterai.core.criteria import large_final
        from fasterai.core.schedule import Schedule,sched_agp
        from fasterai.sparse.sparsify_callback import SparsifyCallback
        kinds = nn.Linear,nn.Conv2d
        cb = SparsifyCallback(o.sparsity, 'weight', 'local', large_final, Schedule(sched_agp, start_pct=.2), layer_type=kinds)
        with redirect_stdout(io.StringIO()): o.fit(ledger=False, cbs=[cb])
        ws = [m.weight for m in o.learn.model.modules() if isinstance(m, kinds)]
        o.live = lambda: sum(int(w.count_nonzero()) for w in ws)/sum(w.numel() for w in ws)

class TorchPrune(OneShot):
    "One-shot pruning by `torch.nn.utils.prune`, across layers"
    peer,published,only = True,False,no_text
    def prune(self, o):
        from torch.nn.utils import prune
        ps = [(m,'weight') for m in o.learn.model.modules() if isinstance(m, (nn.Linear,nn.Conv2d))]
        prune.global_unstructured(ps, prune.L1Unstructured, amount=o.sparsity)
        o.learn.opt = None
        o.live = lambda: sum(int(m.weight_mask.sum()) for m,_ in ps)/sum(m.weight_mask.numel() for m,_ in ps)

    def train(self, o):
        o.fit(o.epochs//2, ledger=False)
        self.prune(o)
        o.fit(o.epochs-o.epochs//2, ledger=False)

def all_grads(sparsity): return 1.
def twice_live(sparsity): return min(2*(1-sparsity), 1.)

contenders = dict(dense=Dense(), small_dense=SmallDense(), auto=Method('auto'), **{k:Method(k) for k in method_names}, oneshot=OneShot(),
    ste=Learned(STE_presets, all_grads), topkast=Learned(TopKAST_presets, twice_live), supermask=Learned(supermask_presets, all_grads),
    rigl_torch=RigLTorch(), sparselab=Sparselab(), fasterai=Fasterai(), torch_prune=TorchPrune())
core = 'dense','small_dense','oneshot','auto','static','set','rigl','gse','gmp'
