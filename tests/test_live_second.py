"Second derivatives through live weights: penalties on gradients, inner loops and products with the Hessian, at any step of a run, are the masked ones"
import pytest,torch
from fastsparse.all import *
from functools import partial
from helpers import *
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F

def made(live, net, method=None, sparsity=.6, opt=partial(torch.optim.Adam, lr=.003), every=4, n=40):
    torch.manual_seed(0)
    m = net().double()
    sparsify_model(m, sparsity, seed=0)
    opt = opt(m.parameters())
    if live: go_live(m, opt, *([o.name for o in masked_params(m) if not (o.p.ndim==4 and o.p.shape[1]==1)]))
    every = {} if method=='static' else dict(batches_per_update=every)
    if method: DynamicSparseTraining(m, opt, n, method=method, seed=0, sparse_compute=None if live else False, **every)
    return m,opt

def agree_at_each_step(run, n=14, tol=1e-9, **kwargs):
    "`run` yields a loss after each step, and returns the model"
    runs,nets = [run(live, **kwargs) for live in (True,False)],[]
    for i in range(n):
        a,b = [next(r) for r in runs]
        (la,ma),(lb,mb) = a,b
        assert la==pytest.approx(lb, abs=tol), f'step {i}'
        for o,q in zip(masked_params(ma), masked_params(mb)):
            assert o.mask.equal(q.mask), f'{o.name} at step {i}'
            torch.testing.assert_close(dense_of(o.p), dense_of(q.p)*q.mask, rtol=tol, atol=tol)
    assert_index_fits(ma)

mlp2 = partial(mlp, (2,16,16,1))
def at(i, *shape): return torch.randn(*shape, generator=torch.Generator().manual_seed(i)).double()

def pinn(live, method):
    "A heat equation: u_t = u_xx, with two derivatives by the input and one by weights"
    m,opt = made(live, mlp2, method)
    for i in range(40):
        x = at(i, 24, 2).requires_grad_()
        u = m(x)
        du = grad(u.sum(), x, create_graph=True)[0]
        uxx = grad(du[:,0].sum(), x, create_graph=True)[0][:,0]
        loss = (du[:,1]-uxx).square().mean()+(u-x.detach().sin().sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss.item(),m

critic = lambda: nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Softplus(), nn.Conv2d(6, 6, 3, stride=2), nn.Softplus(), nn.Flatten(),
    nn.Linear(54, 16), nn.Tanh(), nn.Linear(16, 1))

def stepped(opt, loss):
    "The number `loss`, after a step on it"
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()

def wgan_gp(live, method):
    "A critic of pictures with a penalty on the norm of its gradient between real and false ones"
    m,opt = made(live, critic, method)
    for i in range(40):
        real,fake,e = at(i, 8, 1, 8, 8),at(100+i, 8, 1, 8, 8)*.5,at(200+i, 8, 1, 1, 1).sigmoid()
        x = (e*real+(1-e)*fake).requires_grad_()
        g = grad(m(x).sum(), x, create_graph=True)[0]
        loss = m(fake).mean()-m(real).mean()+10*(g.flatten(1).norm(dim=1)-1).square().mean()
        yield stepped(opt, loss),m

def r1(live, method, k=3):
    "R1 every `k` steps, as StyleGAN has it; the other steps are of first order"
    m,opt = made(live, critic, method)
    for i in range(40):
        x = at(i, 8, 1, 8, 8).requires_grad_(i%k==0)
        loss = F.softplus(-(y := m(x))).mean()
        if i%k==0: loss = loss+k*5*grad(y.sum(), x, create_graph=True)[0].square().flatten(1).sum(1).mean()
        yield stepped(opt, loss),m

def r1_apart(live, method, k=3):
    "The same with two backwards that add up"
    m,opt = made(live, critic, method)
    for i in range(40):
        opt.zero_grad()
        x = at(i, 8, 1, 8, 8).requires_grad_(i%k==0)
        loss = F.softplus(-m(x)).mean()
        loss.backward()
        if i%k==0: grad(m(x).sum(), x, create_graph=True)[0].square().flatten(1).sum(1).mean().backward()
        opt.step()
        yield loss.item(),m

def maml(live, method):
    "One inner step by gradients, whose graph is kept, through `functional_call`; the outer step reads the gradient of that"
    m,opt = made(live, mlp2, method)
    for i in range(40):
        ps,x,q = dict(m.named_parameters()),at(i, 12, 2),at(100+i, 12, 2)
        gs = grad((m(x)-x.sum(1, keepdim=True).sin()).square().mean(), list(ps.values()), create_graph=True)
        fast = {k:p-.1*g for (k,p),g in zip(ps.items(), gs)}
        loss = (torch.func.functional_call(m, fast, q)-q.sum(1, keepdim=True).sin()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss.item(),m

def first_order_maml(live, method):
    m,opt = made(live, mlp2, method)
    for i in range(40):
        ps,x,q = list(m.parameters()),at(i, 12, 2),at(100+i, 12, 2)
        gs = grad((m(x)-1).square().mean(), ps)
        with torch.no_grad():
            for p,g in zip(ps, gs): p.sub_(g, alpha=.1)
        loss = (m(q)-1).square().mean()
        opt.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p,g in zip(ps, gs): p.add_(g, alpha=.1)
        opt.step()
        yield loss.item(),m

def hessian(live, method):
    "A step against the product of the Hessian with the gradient: the norm of the gradient falls"
    m,opt = made(live, mlp2, method)
    for i in range(40):
        ps,x = list(m.parameters()),at(i, 16, 2)
        gs = grad((m(x)-x.cos().sum(1, keepdim=True)).square().mean(), ps, create_graph=True)
        loss = sum(g.square().sum() for g in gs)
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss.item(),m

def create_graph_backward(live, method):
    "`backward(create_graph=True)`, then a penalty on what arrived"
    m,opt = made(live, mlp2, method)
    for i in range(40):
        x = at(i, 16, 2)
        opt.zero_grad()
        loss = (m(x)-x.cos().sum(1, keepdim=True)).square().mean()
        loss.backward(create_graph=True)
        (.1*sum(p.grad.square().sum() for p in m.parameters())).backward()
        opt.step()
        yield loss.item(),m

def attention(live, method):
    "A gradient penalty through an encoder layer"
    m,opt = made(live, lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True, activation='gelu'), method)
    for i in range(40):
        x = at(i, 3, 5, 8).requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            g = grad(m(x).square().sum(), x, create_graph=True)[0]
            loss = g.square().mean()
            opt.zero_grad()
            loss.backward()
        opt.step()
        yield loss.item(),m

runs = dict(pinn=pinn, wgan_gp=wgan_gp, r1=r1, r1_apart=r1_apart, maml=maml, first_order_maml=first_order_maml,
    hessian=hessian, create_graph=create_graph_backward, attention=attention)

@pytest.mark.parametrize('method', ['static','rigl'])
@pytest.mark.parametrize('name', runs)
def test_a_run_with_second_derivatives_is_the_masked_one(name, method):
    "Losses, masks and weights, at each step: before, at and after updates"
    agree_at_each_step(runs[name], method=method)

# --- products with the Hessian, against finite differences

def flat(ts): return torch.cat([dense_of(t).flatten() for t in ts])

def masked_by(m, ts):
    "Tensors shaped like parameters, zero where weights are dead"
    masks = {o.name:o.mask for o in masked_params(m)}
    return [t*masks[n] if n in masks else t for (n,_),t in zip(m.named_parameters(), ts)]

@pytest.mark.parametrize('net,shape', [(mlp2,(16,2)), (critic,(4,1,8,8))], ids=['linear','convolution'])
def test_a_product_with_the_hessian_is_a_difference_of_gradients(net, shape):
    "By central differences of gradients, which are of first order; between parameters of one layer and of others"
    m,_ = made(True, net)
    x = at(0, *shape)
    def gradients(**kw): return grad(m(x).square().mean(), list(m.parameters()), **kw)
    vs = masked_by(m, [at(i, *p.shape) for i,p in enumerate(m.parameters())])
    hvp = flat(masked_by(m, [dense_of(h) for h in grad(sum((g*v).sum() for g,v in zip(gradients(create_graph=True), vs)), list(m.parameters()))]))
    sides = []
    for e in (1e-5, -1e-5):
        with torch.no_grad():
            for p,v in zip(m.parameters(), vs): p.add_(v, alpha=e)
        sides.append(flat(gradients()))
        with torch.no_grad():
            for p,v in zip(m.parameters(), vs): p.sub_(v, alpha=e)
    pieces = torch.split((sides[0]-sides[1])/2e-5, [p.numel() for p in m.parameters()])
    torch.testing.assert_close(hvp, flat(masked_by(m, [t.view(p.shape) for t,p in zip(pieces, m.parameters())])), rtol=1e-5, atol=1e-8)

def test_a_third_derivative():
    "By the input, of a network of three layers, and its gradient by weights"
    out = []
    for live in (True,False):
        m,_ = made(live, mlp2)
        x = at(0, 8, 2).requires_grad_()
        y = m(x).sum()
        for _ in range(3): y = grad(y, x, create_graph=True)[0].sum()
        gs = grad(y, list(m.parameters()), allow_unused=True)
        out.append([y.item(), *masked_by(m, [dense_of(g) if g is not None else torch.zeros(()) for g in gs])])
    assert out[0][0]==pytest.approx(out[1][0], abs=1e-9)
    for a,b in zip(out[0][1:], out[1][1:]): torch.testing.assert_close(a, b, **in_double)

@pytest.mark.parametrize('what', ['hessian','jacrev','jvp','vhp'])
def test_functions_of_torch(what):
    "torch.autograd.functional and torch.func, by the input"
    out = []
    for live in (True,False):
        m,_ = made(live, mlp2)
        f,x,v = lambda x: m(x).square().sum(),at(0, 3, 2),at(1, 3, 2)
        out.append(dict(hessian=lambda: torch.autograd.functional.hessian(f, x), jacrev=lambda: torch.func.jacrev(torch.func.grad(f))(x),
            jvp=lambda: torch.func.jvp(f, (x,), (v,))[1], vhp=lambda: torch.autograd.functional.vhp(f, x, v)[1])[what]())
    torch.testing.assert_close(*out, **in_double)

def test_retained_graphs():
    "Two backwards of one graph, and a loss of two forwards"
    out = []
    for live in (True,False):
        m,_ = made(live, mlp2)
        loss = (m(at(0, 8, 2)).square()+m(at(1, 8, 2))).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        out.append(masked_by(m, [dense_of(p.grad) for p in m.parameters()]))
    for a,b in zip(*out): torch.testing.assert_close(a, b, **in_double)
