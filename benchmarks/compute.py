"What computing with live weights only gains: training steps, single layers and memory against dense training on the CPU"
import gc,statistics,torch
from bare import bare
from copy import deepcopy
from costs import amortised,every,rigl,sgd,stepper,stepper_at
from fastsparse.all import *
from fastsparse.weights.find import masked_params
from fastsparse.model.choose import decide
from measure import *
from models import GPT
from shutil import which
from torch import nn
from torch.autograd import Function

def ffn(d=768, n=4): return nn.Sequential(*[l for _ in range(n) for l in (nn.Linear(d, 4*d), nn.ReLU(), nn.Linear(4*d, d), nn.ReLU())][:-1])
def wide_mlp(): return nn.Sequential(nn.Linear(784,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10))

def classes(n, *shape): return torch.randint(n, shape)

make = dict(mlp=lambda: (wide_mlp(), torch.randn(128,784), classes(10, 128)), ffn=lambda: (ffn(), torch.randn(256,768), classes(768, 256)),
    gpt=lambda: (GPT(), classes(65, 8, 128), classes(65, 8, 128)))
titles = dict(mlp='MLP 784-1024-1024-10, batch 128', ffn='feed-forward stack, width 768, 19M weights, 256 rows', gpt='GPT 6 layers, width 384, 10.7M weights, 8x128 tokens')
dense_layers = dict(mlp=['4'], ffn=[], gpt=['head'])

def sparsify(name, model, sparsity, structure=None):
    "Masks for all but the heads"
    kept = [model.get_submodule(n).weight for n in dense_layers[name]]
    is_kept = lambda p: any(p is k for k in kept)
    def shares(ps, s):
        n,n_kept = sum(p.numel() for p in ps),sum(p.numel() for p in ps if is_kept(p))
        return [0. if is_kept(p) else s*n/(n-n_kept) for p in ps]
    n,n_kept = [sum(o.numel() for o in os) for os in ([o.module._parameters[o.attr] for o in decide(model) if not o.dense_reason], kept)]
    sparsify_model(model, sparsity*(1-n_kept/n), shares, structure=structure, seed=0)

def plain_stepper(model, xb, yb): return stepper(model, sgd(model), xb, yb)

def bf16_stepper(model, xb, yb):
    "A dense step in bfloat16, where the machine multiplies it faster"
    step = plain_stepper(model, xb, yb)
    def _f():
        with torch.autocast('cpu', torch.bfloat16): step()
    return _f

def compiled_stepper(model, xb, yb):
    "A dense step of `torch.compile`; None without a compiler"
    if not any(map(which, ('g++','clang++','cl'))): return
    step = plain_stepper(torch.compile(model), xb, yb)
    step()
    return step

_linear = torch.ops.mkldnn._linear_pointwise

class OneDnnProduct(Function):
    "A dense product and its gradients by oneDNN, which torch takes for float32 only when it is asked to"
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return _linear(x, w, b, 'none', [], '')

    @staticmethod
    def backward(ctx, g):
        x,w = ctx.saved_tensors
        g2,x2 = g.reshape(-1, g.shape[-1]),x.reshape(-1, x.shape[-1])
        return _linear(g2, w.t(), None, 'none', [], '').view(x.shape) if ctx.needs_input_grad[0] else None,_linear(g2.t(), x2.t(), None, 'none', [], ''),g2.sum(0)

class OneDnnLinear(nn.Linear):
    def forward(self, x): return OneDnnProduct.apply(x, self.weight, self.bias)

def onednn_stepper(model, xb, yb):
    "A dense step whose linear layers are oneDNN's, in float32"
    for m in model.modules():
        if type(m) is nn.Linear: m.__class__ = OneDnnLinear
    return plain_stepper(model, xb, yb)

def peer_stepper(name, model, xb, yb, sparsity):
    "The same with layers of sparselab, which has products in C++, and nothing to move weights; None if it isn't installed"
    try: from sparselab import SparseLinear
    except ImportError: return
    for n,m in list(model.named_modules()):
        if isinstance(m, nn.Linear) and n not in dense_layers[name]: model.set_submodule(n, SparseLinear(m.in_features, m.out_features, sparsity=sparsity))
    return plain_stepper(model, xb, yb)

block_seconds = .3  # steps in a row, as training makes them

def training(name, sparsity, rounds, plan=None):
    "A step with the engine and an update every 100 steps against a dense step, in turns, for the same optimizer"
    torch.manual_seed(0)
    model,xb,yb = make[name]()
    arms = dict(dense=plain_stepper(deepcopy(model), xb, yb), sparselab=peer_stepper(name, deepcopy(model), xb, yb, sparsity))
    if plan is None:  # the same for all processes; bfloat16 is slow on machines without it
        arms |= {k:f(deepcopy(model), xb, yb) for k,f in dict(bf16=bf16_stepper, onednn=onednn_stepper, compiled=compiled_stepper).items()}
    sparsify(name, model, sparsity)
    products = bare(model)
    opt = sgd(model)
    report = sparse_compute(model, xb, opt, plan)
    dst = rigl(model, opt)
    at = stepper_at(dst, stepper(model, opt, xb, yb))
    arms = {k:f for k,f in dict(arms, bare=plain_stepper(products, xb, yb), step=lambda: at(1)).items() if f}
    times = interleaved_blocks(arms, rounds, block_seconds)
    upd = statistics.median(interleaved(dict(update=lambda: at(every)), 3, warmup=1)['update'])
    assert dst.n_updates
    return dict(model=name, sparsity=sparsity, dense_ms=1e3*statistics.median(times['dense']), update_ms=1e3*upd, plan=report.plan,
        **{k:spread(ratios(times['dense'], times[k])) for k in arms if k!='dense'}, amortised=spread([d/amortised(s, upd) for s,d in zip(times['step'], times['dense'])]))

shapes,batches,sparsities = [(256,256),(1024,1024),(3072,768),(4096,4096)],[1,16,128,1024],[.8,.9,.95,.98,.99]

def layer_cell(shape, batch, sparsity, rounds=5):
    "Forward and backward of one layer inside a network: how many times faster it is with live weights only, and is it swapped when it is measured?"
    torch.manual_seed(0)
    inner = lambda: nn.Sequential(nn.Tanh(), nn.Linear(*shape[::-1]))
    model,x = inner(),torch.randn(batch, shape[1])
    sparsify_model(model, sparsity, 'uniform', seed=0)
    dense = deepcopy(model)[1]
    report = sparse_compute(model, x)
    swapped = report.plan['1.weight']!='dense'
    if not swapped: sparse_compute(model, x, plan={'1.weight':'rows'})
    h,g = x.requires_grad_(),torch.randn(batch, shape[0])
    def step(m): return lambda: torch.autograd.grad(m(h), [h,*m.parameters()], g)
    times = interleaved_blocks(dict(dense=step(dense), sparse=step(model[1])), rounds)
    return dict(shape=shape, batch=batch, sparsity=sparsity, swapped=swapped, dense_ms=1e3*statistics.median(times['dense']),
        speedup=spread(ratios(times['dense'], times['sparse'])))

few = dict(mlp=8, ffn=8, gpt=1)  # samples, so that activations don't hide what a weight costs

def adam_steps(name, model, xb, yb, sparsity):
    "A function that trains with Adam for a few steps, with an update among them if there is a sparsity; it has trained for one"
    opt = torch.optim.Adam(model.parameters())
    step = stepper(model, opt, xb, yb)
    at = lambda t: step()
    if sparsity:
        sparsify(name, model, sparsity)
        sparse_compute(model, xb, opt, {o.name:'rows' for o in masked_params(model) if o.mask.count_nonzero()<o.mask.numel()})
        at = stepper_at(rigl(model, opt), step)
    step()
    def steps():
        for t in (1, every, every+1): at(t)
    return steps

def adam_memory(name, sparsity):
    "Bytes a weight at the highest point of training with Adam in a fresh process"
    give_back()
    def steps():
        torch.manual_seed(0)
        model,xb,yb = make[name]()
        return sum(p.numel() for p in model.parameters()),adam_steps(name, model, xb[:few[name]].clone(), yb[:few[name]].clone(), sparsity)
    steps()[1]()  # loads and builds whatever is needed once
    gc.collect()
    before = resident()
    n,go = steps()
    return (resident()-before+peak_over_resident(go))/n
