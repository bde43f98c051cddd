"A live weight is a tensor: what is read from it, written to it or to a part of it, moved, saved or copied is the dense tensor's under its mask"
import copy,math,pytest,torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam as FastaiAdam
from fastsparse.all import *
from fastsparse.kernels.ops import SparseIndex
from fastsparse.live.tensor import Cell,LiveTensor
from helpers import *
from torch import nn
from torch.utils.data import DataLoader,TensorDataset

def linear(live=True, opt=None, dtype=torch.float, **kwargs):
    "A layer of 8x12 weights, and one of 5x8, at .7"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)
    return made(m, live, opt, '0.weight')

def conv(live=True, opt=None, dtype=torch.float):
    "A convolution of 8x4x3x3 weights, and a linear layer"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8*4, 5)).to(dtype)
    return made(m, live, opt, '0.weight')

def made(m, live, opt, *names):
    sparsify_model(m, .7, 'uniform', seed=0)
    opt = opt and opt(m.parameters())
    if live: go_live(m, opt, *names)
    return (m,opt) if opt else m

batch = {linear:(7,12), conv:(7,4,4,4)}

def loss_of(m, net, i=0):
    g = torch.Generator().manual_seed(i)
    return m(torch.randn(batch[net], generator=g).to(m[0].bias.dtype)).square().mean()

def plain(t): return dense_of(t) if isinstance(t, torch.Tensor) else t

def same(a, b):
    "Are two results equal, tensors by their values?"
    if isinstance(b, torch.Tensor): return a.shape==b.shape and a.dtype==b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    return abs(a-b).max()<1e-6 if hasattr(b, 'max') else a==b

def names(w, **kwargs): return dict(torch=torch, nn=nn, math=math, copy=copy, w=w, g=torch.Generator().manual_seed(1), **kwargs)

def tried(code, env, grad=False):
    "The result of an expression or of statements, and the error if there was one"
    torch.manual_seed(1)
    try:
        with torch.set_grad_enabled(grad):
            try: code = compile(code, code, 'eval')
            except SyntaxError: code = compile(code, code, 'exec')
            return eval(code, env),None
    except Exception as e: return None,e

def table(text): return [o.strip() for line in text.strip().splitlines() for o in line.split('|') if o.strip()]


# --- expressions

reads = table('''
w+1|w+w|w-1|1-w|w*2|2*w|w/3|w/w.abs().add(1)|3/(w.abs()+1)|w**2|w.abs()+.1|(w+1).sqrt()|w.abs().sqrt()|(w.abs().sqrt()+1e-3).reciprocal()|-w|w.exp()
w.sign()|w.sum()|w.mean()|w.norm()|w.norm(1)|w.norm(0)|torch.linalg.vector_norm(w,-math.inf)|w.std()|w.max()|w.min()|w.argmax()|w!=0|w==0|w>0
(w!=0).sum()|w.isfinite().all()|w.count_nonzero()|w.nonzero()|w[0]|w[:,1]|w[w!=0]|w.t()|w.view(-1)|w.flatten()|w.reshape(12,8)|w[None]|w.unsqueeze(0)
w.clone()|w.clone().add_(1)|w.clone().add_(1).mul_(2)|w.clone().clamp_(.1)|w.clone().fill_(3)|w.clone().copy_(torch.ones(8,12))
w.clone().index_fill_(0,torch.tensor([1]),2.)|w.abs().add_(1).sqrt_().mul_(2)|torch.zeros_like(w)|torch.ones_like(w)|torch.ones_like(w).mul_(w)
torch.zeros_like(w).add_(1)|torch.zeros_like(w).add_(torch.ones(8,12))|torch.zeros_like(w).lerp_(torch.ones(8,12),.3)|torch.empty_like(w).fill_(2)
torch.full_like(w,2)|torch.randn_like(w).shape|w.double()|w.half()|w.to(torch.float64)+1|w.bfloat16().float()|w.lerp(w*2,.3)|w.lerp(torch.ones(8,12),.3)
w.addcmul(w,w,value=.1)|w.addcdiv(w,w.abs()+1,value=.1)|w.mul(torch.tensor(2.))|w.add(torch.tensor(2.))|w.mul(torch.ones(8,12)*2)|w.mul(torch.ones(12))
w@w.t()|w.mm(w.t())|torch.cat([w,w])|torch.stack([w,w+1])|torch.where(w!=0,1.,2.)|w.maximum(w*0)|w.maximum(torch.tensor(.05))|torch.maximum(w,w+1)
w.softmax(1)|w.div(0)|w.mul(float('inf'))|w/0.|w.clone().div_(0)|w.tolist()|w.cpu()|w.contiguous()|w.detach()|w.data|copy.deepcopy(w)|w.type(torch.double)
w.sum(0)|w.abs().sum()|w.square().sum()|w.pow(0)|w.pow(2)|w.neg().add_(w)|w.masked_fill(w!=0,5)|torch.equal(w,w)|torch.allclose(w,w*1)
torch.isclose(w,w*1.1)|w.eq(w.clone())|w.lt(.1).any()|w.sort().values|w.kthvalue(3).values|w.cumsum(0)|w.new_zeros(3)|w.new_tensor([1.])|w.expand(2,8,12)
w.repeat(2,1)|w.chunk(2)[1]|w.split(3)[0]|w.unbind()[2]|w.select(0,1)|w.narrow(0,1,2)|w.diagonal()|w.permute(1,0)|w.transpose(0,1)|w.movedim(0,1)
w.unfold(0,2,1)|w.squeeze()|torch.flip(w,[0])|w.roll(1,0)|torch._foreach_add([w,w],1.)[0]|torch._foreach_mul([w],2.)[0]|torch._foreach_norm([w])[0]
torch._foreach_sqrt([w.abs()])[0]|torch._foreach_div([w],[w.abs()+1])[0]|torch.linalg.norm(w)|torch.linalg.matrix_norm(w)|w.svd()[1]|w.numel()|w.shape
w.stride()|w.is_contiguous()|w.element_size()|w.nelement()|len(w)|w.dtype|w.is_floating_point()|w.is_sparse|torch.is_tensor(w)|w.storage_offset()
w.numpy()|w.rsub(1)|w.rsqrt().isinf().sum()|w.fmod(.1)|w.remainder(.1)|w.lerp(w,torch.tensor(.5))
''')
more_reads = table('''
w.mul(float('nan'))|w*torch.tensor(float('nan'))|w.T|w.mT|w.ravel()|w.swapaxes(0,1)|w.view(2,4,12)|w.unflatten(0,(2,4))|w.view(torch.int32)|w.view_as(torch.ones(96))
w.topk(3).values|w.quantile(.5)|w.median()|w.var(1)|w.amax(1)|w.logsumexp(0)|w.abs().log1p()|w.tanh()|w.sigmoid()|w.relu()|w.clamp(-.1,.1)|w.round(decimals=1)
torch.einsum('ij,kj->ik',w,w)|torch.tensordot(w,w,2)|torch.outer(w[0],w[1])|w.kron(torch.ones(1,2))|torch.block_diag(w,w)|w.matmul(torch.ones(12))
torch.addmm(torch.ones(8,8),w,w.t())|torch.nn.functional.embedding(torch.tensor([1,3]),w)|torch.nn.functional.normalize(w,dim=1)|torch.nn.functional.pad(w,(1,1))
w.index_select(0,torch.tensor([2,0]))|w.gather(1,torch.tensor([[1],[2]]))|w.take(torch.tensor([5,20]))|w[torch.tensor([1,2]),torch.tensor([3,4])]|w[...,None]
w.masked_select(w>0)|w.bool()|w.long()|w.to_sparse().to_dense()|w.to_dense()|w.diag()|w.tril()|w.triu(1)|w.trace()|torch.linalg.svdvals(w)|torch.linalg.pinv(w)
w[0,0].item()|float(w.sum())|bool((w!=0).any())|w.sum().item()|[r.sum().item() for r in w]|list(w)[3]|w in [w]|w.is_leaf|w.ndim|w.dim()|w.size(1)|w.nbytes
w.itemsize|w.layout|w.device|w.requires_grad|w.is_complex()|w.is_contiguous(memory_format=torch.contiguous_format)|w.isnan().any()|torch.isinf(w).any()
torch.nan_to_num(w)|w.float()|torch.tensor(w.tolist())|torch.as_tensor(w)|torch.result_type(w,1.)|torch.broadcast_tensors(w,torch.ones(1,12))[0]|w.hypot(w)
torch.cat([w.flatten(),w.flatten()])|torch.hstack([w,w])|torch.stack([*w])|torch.nn.utils.parameters_to_vector([w,w])|torch.logical_and(w!=0,w>0)|w.new(2,3).shape
w.new_ones(2)|w.new_full((2,),3.)|torch.bernoulli(w.abs().clamp(0,1)).shape|w.unique().numel()|w.histc(5)|w.cdist(w)|w.corrcoef()|w.cov()|torch._foreach_add([w],[w*2],alpha=.5)[0]
torch._foreach_max([w])[0]|torch._foreach_norm([w],float('inf'))[0]|torch._foreach_pow([w],2)[0]|torch._foreach_reciprocal([w.abs()+1])[0]|torch._foreach_lerp([w],[w*2],.5)[0]
w.mul(other=2)|w.add(alpha=2,other=w)|torch.add(other=w*2,input=w,alpha=.5)|torch.lerp(weight=.3,end=w*2,input=w)|torch.where(other=w,condition=w>0,input=-w)
w.clamp(max=.1,min=-.1)|w.pow(exponent=2)|torch._foreach_max([-w.abs()-1])[0]|torch._foreach_norm([w],-1)[0]|torch._foreach_norm(ord=0,self=[w+1])[0]
torch._foreach_add(alpha=2,other=[w*2],self=[w])[0]|torch._foreach_maximum([w],.3)[0]|torch._foreach_add([w],[torch.tensor(.5)])[0]|torch._foreach_mul([w],[float('nan')])[0]
w.sqrt().isnan().sum()|w.abs()**.5|2**w|w//.1|w%.1|w.abs().pow(-1)|abs(w)|+w|w<torch.zeros(12)|torch.sgn(w)|w.copysign(-w)|w.heaviside(torch.tensor(1.))|w.xlogy(w.abs())
''')

@pytest.fixture(scope='module')
def model(): return linear()

@pytest.mark.parametrize('code', reads+more_reads)
def test_an_expression_is_the_dense_one(code, model):
    "Value, shape and dtype, or an error of the same type; and the gradient of live weights, where the result has one"
    p,mask = model[0].weight,model[0].weight_mask
    q = nn.Parameter(dense_of(p))
    (a,ea),(b,eb) = [tried(code, names(o)) for o in (p,q)]
    assert type(ea)==type(eb), ea
    assert eb is not None or same(plain(a), plain(b))
    assert dense_of(p).equal(q.detach())
    (a,ea),(b,eb) = [tried(code, names(o), grad=True) for o in (p,q)]
    assert type(ea)==type(eb), ea
    if not isinstance(b, torch.Tensor) or not b.requires_grad: return
    assert a.requires_grad
    p.grad,es = None,[]
    for y in (a,b): es.append(None if y.is_leaf else tried('(w.double()*torch.arange(1., w.numel()+1).view(w.shape)).sum().backward()', names(y), grad=True)[1])
    assert type(es[0])==type(es[1]), es[0]
    assert (p.grad is None)==(q.grad is None)
    if q.grad is not None: assert same(dense_of(p.grad)[mask], q.grad[mask])

writes = table('''
w.mul_(2)|w.add_(1)|w.add_(w)|w.sub_(.1)|w.div_(2)|w.zero_()|w.fill_(2)|w.neg_()|w.abs_()|w.sqrt_()|w.clamp_(-.1,.1)|w.copy_(torch.ones(8,12))|w.copy_(w*2)
w.copy_(torch.ones(12))|w.addcmul_(w,w,value=2)|w.addcdiv_(w,w.abs()+1,value=2)|w.lerp_(w*3,.5)|w.lerp_(torch.ones(8,12),.5)|w.mul_(torch.ones(8,12)*3)
w.mul_(torch.arange(12.))|w.add_(torch.tensor(2.))|w.add_(torch.randn(8,12,generator=g),alpha=.1)|w[0].zero_()|w[:,1].mul_(3)|w.view(-1)[:20].fill_(1)
w.t()[2].add_(1)|w.data.mul_(2)|w.data[1]=3|w[2]=torch.ones(12)|w[w>0]=.5|w.data=torch.ones(8,12)|w.data=w.data*2|w.data.copy_(torch.ones(8,12))
w.index_fill_(0,torch.tensor([1]),2.)|w.masked_fill_(w!=0,5)|torch.mul(w,2,out=w)|torch.add(w,w,out=w)|w.pow_(2)|w.exp_()|w.tanh_()|nn.init.ones_(w)
nn.init.xavier_uniform_(w,generator=g)|nn.init.normal_(w,generator=g)|nn.init.orthogonal_(w,generator=g)|w.uniform_(generator=g)|w.normal_(generator=g)
w.set_(torch.ones(8,12))|torch._foreach_add_([w],1.)|torch._foreach_mul_([w,w],2.)|torch._foreach_addcmul_([w],[w],[w],value=.1)
torch._foreach_lerp_([w],[w*2],.5)|torch._foreach_copy_([w],[torch.ones(8,12)])|torch._foreach_zero_([w])|w-=.1*w|w+=1|w*=2|w/=2|w**=2
nn.utils.vector_to_parameters(torch.ones(96),[w])|w.clamp_min_(0.)|w.renorm_(2,0,.5)|w.chunk(2)[0].mul_(2)|[r.mul_(i) for i,r in enumerate(w)]|w.sign_()
w.sub_(w.abs())|w.squeeze_()|w.resize_(4,4)
''')
more_writes = table('''
w.data=w.data.clone()|w.data=w.data.t().clone().t()|w.data=torch.zeros(8,12)|w.data=w.data.double()|w.data+=1|w.data-=w.data*.5|w.detach().mul_(2)|w.data.data.mul_(2)
w.index_copy_(0,torch.tensor([1]),torch.ones(1,12))|w.index_add_(1,torch.tensor([1,1]),torch.ones(8,2))|w.scatter_(1,torch.tensor([[3]]),7.)|w.put_(torch.tensor([0,5,90]),torch.ones(3))
w.index_put_((torch.tensor([1,2]),torch.tensor([3,4])),torch.tensor(9.))|w.masked_scatter_(w!=0,torch.arange(96.))|w.fill_diagonal_(4)|w.tril_()|w.triu_(1)
w.bernoulli_(.5,generator=g).shape|w.random_(3,generator=g)|w.exponential_(generator=g)|w.cauchy_(generator=g)|nn.init.trunc_normal_(w,generator=g)|nn.init.sparse_(w,.5)
nn.init.eye_(w)|nn.init.kaiming_normal_(w,generator=g)|nn.init.constant_(w,.3)|w.addmm_(torch.ones(8,2),torch.ones(2,12))|w.baddbmm_|w.cumsum_(0)|w.floor_()|w.mul_(0)
w.lerp_(end=torch.ones(8,12),weight=.3)|w.lerp_(weight=w*2,end=w*3)|w.add_(other=torch.ones(12))|w.mul_(other=torch.arange(12.))|w.sub_(alpha=2,other=torch.ones(8,1))
w.addcmul_(tensor2=torch.ones(8,12),tensor1=w,value=2)|w.addcdiv_(w,tensor2=torch.ones(12)*2)|w.div_(rounding_mode='floor',other=torch.ones(12))|w.clamp_(max=torch.ones(12)*.1,min=-.1)
w.pow_(exponent=torch.ones(12)*2)|w.copy_(src=torch.ones(12))|w.copy_(2.)|torch.add(out=w,alpha=2,other=torch.ones(12),input=w)|torch._foreach_lerp_(weight=.5,tensors1=[torch.ones(8,12)],self=[w])
torch._foreach_addcmul_(tensor2=[torch.ones(8,12)],self=[w],tensor1=[w],value=2)|w.copy_(torch.full((8,12),float('nan')))|w.fill_(float('nan')).nan_to_num_(1.)|w.mul_(float('inf')).clamp_(-1,1)|w.atan2_(torch.ones(8,12))|w.swapaxes(0,1)[3]=2
w.clamp_(min=torch.zeros(12))|torch.sub(w,1,out=w)|torch.clamp(w,0,out=w)|torch._foreach_clamp_min_([w],0.)|torch._foreach_div_([w],2.)|torch._foreach_neg_([w])
torch._foreach_sub_([w],[torch.ones(8,12)])|torch._foreach_add_([w],[torch.ones(8,12)],alpha=-.5)|torch._foreach_addcdiv_([w],[w*2],[w.abs()+1])|torch._foreach_sqrt_([w])
torch._foreach_copy_([w],[w*3])|torch._foreach_mul_([w,torch.ones(3)],[w.clone(),torch.ones(3)])|torch._foreach_mul_([*w],2.)|torch._foreach_zero_([*w.chunk(2)])
nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([w])*2,[w])|w.mul_(w.data)|w.add_(w.t().t())|w.copy_(w.flip(0))|w[0].copy_(w[1])|w[0]=w[1]
''')

@pytest.mark.parametrize('code', writes+more_writes)
def test_a_write_is_the_dense_one_under_the_mask(code):
    "What a dense tensor would hold, zero where dead; or an error of the same type, and then nothing is written"
    m = linear()
    p,mask = m[0].weight,m[0].weight_mask
    q = nn.Parameter(dense_of(p))
    (_,ea),(_,eb) = [tried(code, names(o)) for o in (p,q)]
    assert type(ea)==type(eb), ea
    expect = torch.where(mask, q.detach().float(), 0.) if eb is None else torch.where(mask, q.detach(), 0.)
    assert same(dense_of(p).float(), expect)
    assert_index_fits(m)
    if p.dtype==torch.float: torch.testing.assert_close(loss_of(m, linear), loss_of(copy.deepcopy(m), linear), equal_nan=True)

moments = table('''
m.lerp_(end=v,weight=.5)|v.lerp_(weight=m,end=m)|m.add_(other=.5)|m.sub_(alpha=2,other=v)|v.mul_(other=c)|v.addcmul_(tensor2=v,tensor1=c,value=.5)|m.addcdiv_(tensor2=v,tensor1=m,value=-1)
m.div_(other=v,rounding_mode='floor')|m.add_(v,alpha=math.inf)|v.clamp_(max=1.,min=.1)|m.copy_(3.)|torch.mul(out=m,other=v,input=v)|torch._foreach_add_([m,v],[torch.tensor(.5)]*2)
torch._foreach_maximum_([m,v],.3)|torch._foreach_div_([m],[math.nan])|torch._foreach_mul_([m],torch.tensor(math.inf))|torch._foreach_lerp_(tensors1=[v],weight=.5,self=[m])|torch._foreach_norm([m+1,v],2)
torch._foreach_max([-v])|torch._foreach_sub_([v,c.clone()],[m,c],alpha=.5)|torch._foreach_copy_([m],[v])|torch.where(condition=c>6,input=m,other=v)''')

@pytest.mark.parametrize('code', moments)
def test_a_moment_is_the_dense_one_whole(code):
    "The number where nothing is stored included, with as many values as the layer has inputs"
    mask = torch.zeros(8, 12, dtype=torch.bool).view(-1).index_fill_(0, torch.arange(0, 96, 8), True).view(8, 12)
    index,names,results = SparseIndex(mask),[],[]
    def live(fill): return LiveTensor(Cell(torch.linspace(.1, 2, 12), index, mask.shape, fill))
    for way in (lambda t: t, dense_of):
        names.append(dict(m=way(live(0.)), v=way(live(.25)), c=torch.arange(1., 13), torch=torch, math=math))
        out,error = tried(code, names[-1])
        assert error is None
        results.append([*map(plain, out if isinstance(out, (list,tuple)) else [out])])
    for a,b in zip(*results): assert same(a, b)
    for k in 'mv': assert same(dense_of(names[0][k]), names[1][k])

class ScheduleFree(torch.optim.Optimizer):
    "SGD of two sequences; `eval` and `train` interpolate with both operands by keyword, as https://arxiv.org/abs/2405.15682 is written"
    def __init__(self, ps): super().__init__(ps, dict(lr=.1))
    def swap(self, weight):
        for p in self.param_groups[0]['params']:
            if 'z' in self.state[p]: p.lerp_(end=self.state[p]['z'], weight=weight)

    @torch.no_grad()
    def eval(self): self.swap(1-1/.9)

    @torch.no_grad()
    def train(self): self.swap(1-.9)

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]['params']:
            z = self.state[p].setdefault('z', p.clone(memory_format=torch.preserve_format))
            p.lerp_(end=z, weight=.1).add_(p.grad, alpha=-.05)
            z.sub_(p.grad, alpha=.1)

def test_a_schedule_free_optimizer_trains_live_weights():
    def trained(live):
        m,opt = linear(live, ScheduleFree)
        for i in range(6):
            if i: opt.train()
            opt.zero_grad()
            loss_of(m, linear, i).backward()
            opt.step()
            opt.eval()
        return dense_of(m[0].weight)
    torch.testing.assert_close(trained(True), trained(False))

shapes = dict.fromkeys(table('w.t_()|w.unsqueeze_(0)|w.transpose_(0,1)|w.swapaxes_(0,1)|w.swapdims_(0,1)|w.as_strided_((4,4),(1,1))|w.resize_as_(torch.ones(4,4))'))

@pytest.mark.parametrize('code', shapes)
def test_a_weight_that_would_get_another_shape(code):
    "Has it, or an error says so; no call does nothing"
    m = linear()
    p,q = m[0].weight,nn.Parameter(dense_of(m[0].weight))
    before = dense_of(p)
    (_,ea),(_,eb) = [tried(code, names(o)) for o in (p,q)]
    if ea is None: assert eb is None and p.shape==q.shape
    else: assert p.shape==(8,12) and dense_of(p).equal(before) and len(str(ea))<400

# --- writes to a part

parts = table('''
w.data[:3]=0|w.data[:4].zero_()|w[:,3]=0|w.view(-1)[:n]=0|w.data.view(-1)[:n]=0|for r in w.data: r.mul_(.5)|w.view(-1).mul_(2)|w.transpose(0,1).mul_(2)
w.chunk(2)[0].mul_(2)|w.unbind()[1].zero_()|[o.mul_(2) for o in w.unbind(1)]|w[:4].copy_(torch.ones_like(w[:4]))|w.split(3)[1].add_(1)|w.narrow(0,1,2).neg_()
w.select(0,1).fill_(2)|w.select(1,0)[:]=5|w[1:6,:3]*=2|w[[0,2]]=1|w[torch.tensor([0,2])]*=3|w[w>0]*=2|w[-1]=w[0]|w.movedim(0,1)[1].mul_(2)|w.detach()[0].zero_()
w.flatten(1)[:,1].fill_(3)|w.flatten(1).t()[2].add_(1)|w.reshape(8,-1)[:2].zero_()|w.view(2,4,-1)[1]=0|w.unflatten(0,(2,4))[0].mul_(3)|w[None][0,1].zero_()
w.unsqueeze(0).mul_(2)|w.diagonal().zero_()|w.unfold(0,2,2)[1].mul_(2)|w.as_strided((4,),(2,)).zero_()|w.data.view(torch.int32)[0]=0|w.tensor_split(3)[2].zero_()
w[0].copy_(w[1])|w[:2].lerp_(torch.ones_like(w[:2]),.5)|w[:2].addcmul_(w[2:4],w[2:4])|torch.add(w[0],1,out=w[0])|torch._foreach_mul_([*w.unbind()],2.)
torch._foreach_zero_([*w.chunk(2)])|w.data.data[2].fill_(1)|w[1].data.zero_()|v=w[:4]; v[1]=2; v.mul_(2); v.t() if v.ndim==2 else None|v=w[2]; w.mul_(2); v.add_(1)
w.flatten(1).renorm_(2,0,1e-3)|w[:5].clamp_(-1e-3,1e-3)|w[1].masked_fill_(w[1]>0,7)|w[2].index_fill_(0,torch.arange(3),3.)
[r.div_(r.norm()+1) for r in w]|[r.copy_(r.flip(0)) for r in w.data]|w.data.chunk(2,1)[1].zero_()|nn.utils.vector_to_parameters(torch.ones(w[:2].numel()),[w[:2]])|w[2].swapaxes(0,-1).mul_(2)
nn.init.uniform_(w[:4])|nn.init.normal_(w[:4])|nn.init.trunc_normal_(w[:4])|nn.init.constant_(w[:4],.3)|nn.init.ones_(w[:4])|nn.init.zeros_(w[:4])
nn.init.xavier_uniform_(w[:4])|nn.init.xavier_normal_(w[:4])|nn.init.kaiming_uniform_(w[:4])|nn.init.kaiming_normal_(w[:4])|nn.init.orthogonal_(w)|nn.init.orthogonal_(w[:4])
''')
of_matrices = table('w.t().mul_(2)|w.T[1].zero_()|w.mT[1]=2|nn.init.eye_(w[:4])|nn.init.sparse_(w[:4],.5)|w.tril_()|w[:4,:4].fill_diagonal_(3)')
of_kernels = table('nn.init.dirac_(w)|nn.init.dirac_(w[:4])|w[:,:,1,1]=0|w[:,:,1].mul_(2)|w.permute(2,3,0,1)[1,1].fill_(2)|w.sum((2,3)); w[:,0].zero_()')

def weight(m, opt): return m[0].weight
def grad(m, opt): return m[0].weight.grad
def moment(m, opt): return opt.state[m[0].weight]['exp_avg']
def entry(m, opt): return m.state_dict()['0.weight']
def data_entry(m, opt): return dict(m.named_parameters())['0.weight'].data

def three_steps(live, net, of, code):
    "A step with AdamW, a gradient, a write to part of what `of` gives, then two more steps; what was written to, weights and moments"
    m,opt = net(live, lambda ps: torch.optim.AdamW(ps, .01))
    seen = []
    for i in range(3):
        loss_of(m, net, i).backward()
        if i==1:
            w,mask = of(m, opt),m[0].weight_mask
            before = dense_of(w)
            out,e = tried(code, names(w, n=w.numel()//3))
            seen += [dense_of(of(m, opt))[mask], before[mask], e]
            if of is weight: assert is_positive_zero(dense_of(w)[~mask]) or not live
        opt.step()
        opt.zero_grad()
    assert_index_fits(m) if live else None
    masks = {o.p:o.mask for o in masked_params(m)}
    return seen,*([dense_of(t)*masks.get(p, 1) for p,t in ts] for ts in ([(p,p) for p in m.parameters()], [(p,s['exp_avg']) for p,s in opt.state.items()]))

def cases():
    "All writes to a weight, and every fifth to what else holds its values"
    for i,of in enumerate((weight,grad,moment,entry,data_entry)):
        for net,codes in ((linear,parts+of_matrices), (conv,parts+of_kernels)):
            for code in codes if of is weight else codes[i%5::5]:
                yield pytest.param(of, net, code, id=f'{of.__name__}-{net.__name__}-{code}')

@pytest.mark.parametrize('of,net,code', cases())
def test_a_write_to_a_part_is_the_masked_models(of, net, code):
    "To the weight, its gradient, its moment, its entry of a state dict: what is read afterwards, and two steps later"
    (a,ps,ms),(b,qs,ns) = [three_steps(live, net, of, code) for live in (True,False)]
    assert type(a[2])==type(b[2]), a[2]
    assert same(a[1], b[1]) and same(a[0], b[0])
    for u,v in zip(ps+ms, qs+ns, strict=True): torch.testing.assert_close(u, v, rtol=1e-4, atol=1e-6)

def test_a_vector_of_all_parameters_goes_there_and_back():
    "As L-BFGS of SciPy, evolution strategies and federated averages do"
    m,d = linear(),linear(False)
    for o in (m,d):
        loss_of(o, linear)
        v = nn.utils.parameters_to_vector(o.parameters())
        assert not is_live(v)
        nn.utils.vector_to_parameters(torch.arange(1., len(v)+1), o.parameters())
    assert_index_fits(m)
    for o in (m,d): loss_of(o, linear)  # a forward masks
    torch.testing.assert_close(nn.utils.parameters_to_vector(m.parameters()), nn.utils.parameters_to_vector(d.parameters()))

class MaxNorm(Callback):
    "No row of a layer has a norm above .5"
    def __init__(self): self.live = []
    @torch.no_grad()
    def after_step(self):
        p = self.model[0].weight
        self.live.append(is_live(p))
        for r in p.data: r.mul_(.5/r.norm().clamp(min=.5))

@pytest.mark.parametrize('method', ['static','rigl'])
def test_a_max_norm_callback_holds_in_a_fit(method, tmp_path):
    "Rows of live weights are as short as those of masked ones, and the fit ends with the same network"
    out = []
    for way in ({'0.weight':'rows'}, False):
        torch.manual_seed(0)
        x = torch.randn(64, 12)
        dl = DataLoader(TensorDataset(x, x[:,:5].argmax(1)), bs := 16)
        net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
        learn = Learner(DataLoaders(dl, dl), net, loss_func=nn.CrossEntropyLoss(), opt_func=FastaiAdam, path=tmp_path)
        with learn.no_bar(), learn.no_logging(): learn.fit_sparse(4, .5, .1, method=method, sparse_compute=way, seed=0, cbs=(cb := MaxNorm()))
        assert cb.live[4]==bool(way) and net[0].weight.norm(dim=1).max()<.5+1e-5
        out.append(net.state_dict())
    for k in out[0]: torch.testing.assert_close(out[0][k], out[1][k], **in_float_layers)
