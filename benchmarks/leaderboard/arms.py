"Ways to train a network, and one training in a plain loop"
import math,time,torch,warnings
from dataclasses import dataclass
from fastai.basics import *
from fastai.callback.schedule import combined_cos
from fastsparse.all import *
from fastsparse.deploy.narrow import n_weights
from functools import lru_cache
from .tasks import tasks

@dataclass(frozen=True)
class Arm:
    "A way to train: a network, and how it becomes sparse"
    net:str # One of the task's networks
    width:int
    method:str='dense' # 'dense', 'one-shot', or the name of a preset
    sparsity:float=0.
    structure:str=None

    @property
    def name(self):
        own = '' if self.net in ('mlp','gpt') else f'{self.net} '
        sparse = f'@{self.sparsity:g}'.replace('0.', '.') if self.sparsity else ''
        return f"{self.method} {own}{self.width}{sparse}{' in blocks' if self.structure else ''}"

    @property
    def live_from(self): return {'one-shot':.5, 'gmp':.75}.get(self.method, 0.)

plans = {}  # task and arm → the layers that compute with live weights only

class Trainer:
    "A network, its optimizer, and what makes it sparse"
    def __init__(self, arm, task, data, n, lr, wd, drop, seed):
        store_attr()
        torch.manual_seed(seed)
        self.model,self.x = task.nets[arm.net](arm.width, drop),data[0][0][:task.bs]
        if arm.sparsity and arm.method not in ('one-shot','gmp'): self.mask('random')
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=wd, eps=1e-5, fused=True)
        if arm.sparsity and arm.method!='one-shot': self.engine(arm.method)
        if arm.sparsity and not arm.live_from: self.keep_live()
        cycles = 2 if arm.method=='one-shot' else 1
        self.rate,self.mom = [lambda t, f=combined_cos(.25, *o): f(min(t*cycles%1, 1)) for o in ((lr/25,lr,lr/1e5), (.95,.85,.95))]

    def mask(self, init):
        kw = dict(structure=self.arm.structure) if self.arm.structure else {}
        sparsify_model(self.model, self.arm.sparsity, erdos_renyi_sparsity, mask_init=init, seed=self.seed, xb=self.x, **kw)

    def engine(self, method):
        kw = dict(sparsity=self.arm.sparsity, sparse_f=erdos_renyi_sparsity) if method=='gmp' else {}
        if method in ('set','rigl','gmp'): kw['batches_per_update'] = max(self.n//32, 8)  # as often as auto
        if self.arm.structure: kw['structure'] = self.arm.structure
        DynamicSparseTraining(self.model, self.opt, self.n, False, method=method, seed=self.seed, **kw)  # live by a measurement

    def keep_live(self):
        "Keep live weights only, in the layers in which that was faster when it was measured first"
        found = sparse_compute(self.model, self.x, self.opt, plans.get((self.task.name,self.arm)))
        plans[self.task.name,self.arm] = found.plan

    def step(self, i, xb, yb):
        for g in self.opt.param_groups: g['lr'],g['betas'] = self.rate(i/self.n),(self.mom(i/self.n),.99)
        self.task.loss(self.model(xb), yb).backward()
        self.opt.step()
        self.opt.zero_grad()

    def train(self, stop=None):
        "Processor seconds of the steps, batches included"
        self.model.train()
        start,out = time.process_time(),0.
        change = math.ceil(self.arm.live_from*self.n)
        for i,(xb,yb) in enumerate(self.task.batches(self.data, ifnone(stop, self.n), self.seed, self.model)):
            if i==change and i:
                t = time.process_time()
                if self.arm.method=='one-shot': self.mask('magnitude')
                self.keep_live()
                self.model.train()
                out += time.process_time()-t
            self.step(i, xb, yb)
        return time.process_time()-start-out

def us_a_sample(model, xb):
    "Processor microseconds a sample in evaluation: the least of seven blocks of 10 ms"
    def calls(n):
        start = time.process_time()
        for _ in range(n): model(xb)
        return time.process_time()-start
    model.eval()
    with torch.no_grad():
        calls(2)
        n = max(round(.01/max(calls(1), 1e-6)), 1)
        return 1e6*min(calls(n) for _ in range(7))/n/len(xb)

def dense(net, *widths): return [Arm(net, w) for w in widths]
def sparse(net, width, sparsity, *methods): return [Arm(net, width, m, sparsity) for m in methods]

everyone = 'auto','set','rigl','gmp','static','one-shot'
small = *dense('mlp', 64, 128, 192, 320, 512, 1024),*sparse('mlp', 1024, .98, *everyone),*sparse('mlp', 512, .95, 'auto')
wider = *sparse('mlp', 2048, .99, 'auto', 'set'),Arm('mlp', 1024, 'auto', .98, 'block 4x1 pad')

text = *dense('gpt', 48, 64, 96, 128, 192, 256),*sparse('gpt', 256, .9, 'auto', 'set'),*sparse('gpt', 384, .95, 'auto'),*sparse('wide', 2048, .95, 'auto')

# The ways to train each task
arms = {}
arms['mnist1d'] = [*small, *wider, Arm('conv', 25)]
arms['mnist500'] = [*small, *sparse('mlp', 2048, .99, 'auto'), Arm('conv', 16)]
arms['digits'] = [*dense('mlp', 32, 64, 128, 192, 320, 512), *sparse('mlp', 512, .95, *everyone), *sparse('mlp', 1024, .98, 'auto', 'set'), Arm('conv', 16)]
arms['mnist'] = [*small, *sparse('mlp', 2048, .99, 'auto'), Arm('conv', 16)]
arms['conv'] = [*dense('conv', 8, 12, 16, 24, 32, 64), *sparse('conv', 64, .9, *everyone), *sparse('conv', 32, .8, 'auto', 'set')]
arms['diamonds'] = [*small, *sparse('mlp', 2048, .99, 'auto')]
arms['cartpole'] = [*dense('mlp', 16, 32, 64, 128, 256, 512), *sparse('mlp', 512, .95, *everyone), *sparse('mlp', 1024, .98, 'auto')]
arms['text'] = arms['text_once'] = text

@lru_cache(maxsize=4)
def data_of(task, seed): return tasks[task].data(seed)

@lru_cache(maxsize=None)
def warmed(task, arm):
    "Compile what the arm needs; returns processor seconds a step, roughly"
    t = tasks[task]
    with warnings.catch_warnings(action='ignore'):
        Trainer(arm, t, data_of(task, 0), 16, 1e-4, 0., 0., 0).train()
        return Trainer(arm, t, data_of(task, 0), 200, 1e-4, 0., 0., 0).train(40)/40

def run(
    task:str, # One of `tasks`
    arm:Arm,
    n:int, # Steps
    seed:int, # Of data, weights and batches
    lr:float, # The highest of the cycle, of AdamW
    wd:float, # Weight decay
    drop:float, # Dropout
) -> dict: # Scores on validation and test data, processor seconds, and µs a sample
    "Train once"
    warmed(task, arm)
    t,data = tasks[task],data_of(task, seed)
    with warnings.catch_warnings(action='ignore'):
        o = Trainer(arm, t, data, n, lr, wd, drop, seed)
        seconds = o.train()
    scores = [t.score(o.model, p) for p in data[1:]]
    valid,test = [round(s, 5) if math.isfinite(s) else None for s in scores]
    return dict(steps=n, seconds=round(seconds, 3), valid=valid, test=test, us=round(us_a_sample(o.model, o.x), 3),
        us_one=round(us_a_sample(o.model, o.x[:1]), 2), weights=n_weights(o.model))
