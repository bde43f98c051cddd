"The products of live weights and nothing else, without masks, engine or updates: what a machine gives at the most"
import torch
from copy import deepcopy
from torch import nn
from torch.autograd import Function

class Places:
    "Row by row, where a matrix has weights that aren't zero"
    def __init__(self, w):
        csr = w.to_sparse_csr()
        self.crow,self.col,self.shape = csr.crow_indices().int(),csr.col_indices().int(),w.shape

    def times(self, values, xT): return torch.embedding_bag(xT, self.col, self.crow, False, 0, False, values, True)[0]
    def sampled(self, gT, xT):
        zeros = torch.sparse_csr_tensor(self.crow, self.col, gT.new_zeros(len(self.col)), self.shape, check_invariants=False)
        return torch.sparse.sampled_addmm(zeros, gT, xT.t()).values()

class Product(Function):
    @staticmethod
    def forward(ctx, xT, values, bias, layer):
        ctx.save_for_backward(xT, values)
        ctx.layer = layer
        return layer.places.times(values.detach(), xT).add_(bias.detach()[:,None])

    @staticmethod
    def backward(ctx, gT):
        (xT,values),layer,gT = ctx.saved_tensors,ctx.layer,gT.contiguous()
        gx = layer.turned.times(values[layer.order], gT) if ctx.needs_input_grad[0] else None
        return gx,layer.places.sampled(gT, xT),gT.sum(1),None

class Bare(nn.Module):
    "A linear layer of what lives in the weight of `m`; results lie feature by feature"
    def __init__(self, m):
        super().__init__()
        w = m.weight.detach()
        numbers = torch.zeros(w.shape, dtype=torch.long)
        numbers[w!=0] = torch.arange(w.count_nonzero())
        self.places,self.turned,self.order = Places(w),Places(w.t()),numbers.t()[w.t()!=0]
        self.values,self.bias = nn.Parameter(w[w!=0]),nn.Parameter(m.bias.detach().clone())

    def forward(self, x):
        xT = x.reshape(-1, x.shape[-1]).t().contiguous()
        return Product.apply(xT, self.values, self.bias, self).t().view(*x.shape[:-1], len(self.bias))

def bare(model):
    "A copy of a sparse `model` whose linear layers with zeros are bare products"
    model = deepcopy(model)
    for n,m in list(model.named_modules()):
        if isinstance(m, nn.Linear) and not m.weight.all(): model.set_submodule(n, Bare(m))
    return model
