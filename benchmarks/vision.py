"Convolutions of live weights: single layers, and whole steps and forward passes of ResNet-18, against the faster of torch's dense layouts"
import statistics,torch
from compute import block_seconds
from copy import deepcopy
from costs import amortised,every,rigl,sgd,stepper,stepper_at
from fastsparse.all import *
from fastsparse.kernels.convolution import ConvIndex,sparse_conv2d
from measure import *
from models import cifar_resnet18,images
from torch import nn
from torchvision.models import resnet18

layers = {'64 to 64, 32x32':(64,64,32,1), '128 to 128, 16x16':(128,128,16,1), '256 to 256, 8x8':(256,256,8,1), '512 to 512, 4x4':(512,512,4,1),
    '64 to 128, 32x32, stride 2':(64,128,32,2)}

def last(t): return t.to(memory_format=torch.channels_last)

def faster(dense, other): return [min(o) for o in zip(dense, other)]

def layer(name, sparsity, rounds):
    "Forward and backward of a 3x3 convolution for 64 images"
    torch.manual_seed(0)
    n_in,n_out,size,stride = layers[name]
    x,w,g = torch.randn(64, n_in, size, size),torch.randn(n_out, n_in, 3, 3),torch.randn(64, n_out, size//stride, size//stride)
    mask = as_structure(None).top(w, round((1-sparsity)*w.numel()))
    index,values = ConvIndex(mask, stride, 1),w[mask].requires_grad_()
    def dense(x, w, g):
        x,w = x.requires_grad_(),w.requires_grad_()
        return lambda: torch.autograd.grad(nn.functional.conv2d(x, w, stride=stride, padding=1), [x,w], g)
    def live():
        x.requires_grad_()
        return torch.autograd.grad(sparse_conv2d(x, values, index), [x,values], g)
    times = interleaved_blocks(dict(dense=dense(x.clone(), w, g), last=dense(last(x), last(w), last(g)), live=live), rounds)
    best = faster(times['dense'], times['last'])
    return dict(layer=name, sparsity=sparsity, dense_ms=1e3*statistics.median(best), step=spread(ratios(best, times['live'])))

nets = dict(cifar=(cifar_resnet18, lambda: images(64, 10)), torchvision=(resnet18, lambda: images(16, 1000, 224)))
titles = dict(cifar='ResNet-18, CIFAR stem, 32x32, 64 images', torchvision="ResNet-18, torchvision's stem, 224x224, 16 images")

def resnet(name, sparsity, rounds, distribution='uniform'):
    "A training step with the engine and an update every 100 steps, and a forward pass in evaluation"
    torch.manual_seed(0)
    make,batch = nets[name]
    model,(xb,yb) = make(),batch()
    arms = {k:stepper(m, sgd(m), x, yb) for k,m,x in (('dense',deepcopy(model),xb), ('last',last(deepcopy(model)),last(xb)))}
    tests = {k:m.eval() for k,m in dict(dense=deepcopy(model), last=last(deepcopy(model))).items()}
    sparsify_model(model, sparsity, distribution, seed=0)
    opt = sgd(model)
    report = sparse_compute(model, xb, opt)
    dst = rigl(model, opt)
    at = stepper_at(dst, stepper(model, opt, xb, yb))
    times = interleaved_blocks(dict(arms, live=lambda: at(1)), rounds, block_seconds)
    update = statistics.median(interleaved(dict(update=lambda: at(every)), 2, warmup=1)['update'])
    model.eval()
    def answer(m, x):
        def _f():
            with torch.inference_mode(): m(x)
        return _f
    quick = interleaved_blocks(dict(dense=answer(tests['dense'], xb), last=answer(tests['last'], last(xb)), live=answer(model, xb)), rounds, block_seconds)
    best,best_eval = [faster(t['dense'], t['last']) for t in (times, quick)]
    return dict(model=name, sparsity=sparsity, distribution=distribution, dense_ms=1e3*statistics.median(best), eval_ms=1e3*statistics.median(best_eval),
        swapped=sum(o!='dense' for o in report.plan.values()), layers=len(report.plan),
        step=spread([d/amortised(s, update) for s,d in zip(times['live'], best)]), evaluation=spread(ratios(best_eval, quick['live'])))
