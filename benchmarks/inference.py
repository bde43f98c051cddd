"What a trained sparse model costs after training: layers, whole models and files against dense"
import statistics,torch
from compute import make,sparsify
from fastsparse.all import *
from functools import partial
from measure import *
from pathlib import Path
from scipy.sparse import csr_array
from tempfile import TemporaryDirectory
from torch import nn
from torch.nn import functional as F

def forward(model, xb):
    with torch.inference_mode(): return model(xb)

def dense_routes(layer, x):
    "Other ways to the dense product on this machine: oneDNN's float32, and bfloat16"
    w,b = layer.weight.detach(),layer.bias.detach()
    w16,b16,x16 = [o.bfloat16() for o in (w,b,x)]
    wk,bk,xk = [o.to_mkldnn() for o in (w,b,x)]
    return dict(onednn=lambda: F.linear(xk, wk, bk), bfloat16=lambda: F.linear(x16, w16, b16))

def peer_products(layer, x):
    "The same product by scipy's CSR matrix, and by sparselab's if it is installed; inputs and results lie as they want them"
    w,xT = layer.weight.detach(),x.t().contiguous()
    csr = csr_array(w.numpy())
    arms = dict(scipy=lambda: csr@xT.numpy())
    try: from sparselab import PaddedCSR,spmm
    except ImportError: return arms
    padded = PaddedCSR.from_dense(w)
    return dict(arms, sparselab=lambda: spmm(padded, xT))

def against(dense, arms, rounds):
    "How many times faster than `dense` is each of `arms`?"
    times = interleaved_blocks(dict(dense=dense, **arms), rounds)
    return dict(dense_ms=1e3*statistics.median(times['dense']), **{k:spread(ratios(times['dense'], times[k])) for k in arms})

def layer(rows, sparsity, rounds, n=4096):
    "A large linear layer in the storage that `auto` finds fastest, and the dense routes of the machine"
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(n, n)),torch.randn(rows, n)
    sparsify_model(model, sparsity, 'uniform', seed=0)
    new,report = export_sparse(model, 'auto', x)
    plain = plain_copy(model)
    arms = dict(sparse=partial(forward, new, x), **dense_routes(plain[0], x), **peer_products(plain[0], x))
    return dict(rows=rows, sparsity=sparsity, plan=report.plan, error=report.error, **against(partial(forward, plain, x), arms, rounds))

def whole(name, sparsity, rounds):
    "A whole model, exported for the batch that it was trained with"
    torch.manual_seed(0)
    model,xb,_ = make[name]()
    sparsify(name, model, sparsity)
    new,report = export_sparse(model, 'auto', xb)
    plain = plain_copy(model)
    return dict(model=name, sparsity=sparsity, error=report.error, **against(partial(forward, plain, xb), dict(sparse=partial(forward, new, xb)), rounds))

def files(name, sparsity, formats=('dense','live','safetensors')):
    "Bytes of each format's file as a fraction of the dense model's"
    torch.manual_seed(0)
    model,xb,_ = make[name]()
    sparsify(name, model, sparsity)
    with TemporaryDirectory() as d:
        reports = {f:export_sparse(model, f, xb, path=Path(d)/f'model.{"safetensors" if f=="safetensors" else "pt"}')[1] for f in formats}
    return dict(model=name, sparsity=sparsity, **{f:r.bytes/r.dense_bytes for f,r in reports.items()})
