"What a score may ask for, and what it returns"
import functools, math, numpy as np, pytest, torch
from fastai.optimizer import Adam,Lookahead,Lamb,OptimWrapper,QHAdam,RMSProp,SGD,ranger
from fastsparse.core.registry import call_with,needs_of
from fastsparse.core.optimizers import base_opt
from fastsparse.masks.scores import DeadWeightSampler,GradAverage,Live,densify,gradient_magnitude,gradient_momentum,gradient_saliency
from fastsparse.weights.optimizers import state_tensors
from fastsparse.masks.scores import MeanGradient,momentum_redistribution,MovingGradient,random_score,SampledGradient
from fastsparse.methods.parts import MagnitudePlusGradient
from fastsparse.masks.scores import weight_magnitude
from helpers import *
from torch import nn

torch_momentum = dict(SGD=dict(momentum=.9), Adam={}, AdamW={}, NAdam={}, RAdam={}, Adamax={}, RMSprop=dict(momentum=.9))

def _param(n=8, seed=0):
    torch.manual_seed(seed)
    return nn.Parameter(torch.randn(2, n//2))

def _steps(opt, p, k=3):
    "`k` steps with known gradients, which are returned in float64"
    grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i in range(k)]
    for g in grads:
        p.grad = g.clone()
        opt.step()
    return [numpy_of(g).astype(np.float64) for g in grads]

def test_random_score():
    "Uniform in [0,1), float32 whatever the parameter is (law 8), from the generator it is given, else torch's"
    p,h = torch.zeros(50,40),torch.zeros(50,40, dtype=torch.half)
    g = lambda: torch.Generator().manual_seed(3)
    r = random_score(p, generator=g())
    assert torch.equal(r, random_score(h, generator=g(), opt=None, anything=1)) and r.dtype==torch.float and r.shape==p.shape
    assert 0<=r.min() and r.max()<1 and abs(r.mean()-.5)<.03
    torch.manual_seed(5)
    a = random_score(p)
    torch.manual_seed(5)
    assert torch.equal(a, torch.rand(50,40))

def test_magnitudes():
    "Absolute values, without history"
    p = nn.Parameter(torch.tensor([-2.,1.,0.]))
    p.grad = torch.tensor([3.,-4.,0.])
    assert weight_magnitude(p, opt=None).tolist()==[2.,1.,0.] and not weight_magnitude(p).requires_grad
    assert gradient_magnitude(p, opt=None).tolist()==[3.,4.,0.]

def test_momentum_of_sgd_by_hand():
    "abs(buffer), buffer = .9*buffer + g: magnitudes, never signed (2020's signed momentum made density fall)"
    p = nn.Parameter(torch.zeros(3))
    opt = torch.optim.SGD([p], lr=.1, momentum=.9)
    for g in ([1.,-2.,0.],[1.,-2.,-1.]):
        p.grad = torch.tensor(g)
        opt.step()
    assert torch.allclose(gradient_momentum(p, opt), torch.tensor([1.9,3.8,1.]))

def test_momentum_of_adam_by_hand():
    "abs(m)/(sqrt(v)+eps), from gradients 1 and -3: m = .9*.1-.3, v = .999*.001+.009"
    p = nn.Parameter(torch.zeros(1))
    opt = torch.optim.Adam([p], lr=.1, eps=1e-3)
    for g in (1.,-3.):
        p.grad = torch.tensor([g])
        opt.step()
    assert math.isclose(gradient_momentum(p, opt).item(), .21/(math.sqrt(.009999)+1e-3), rel_tol=1e-5)

@pytest.mark.parametrize('wrap', [False,True])
@pytest.mark.parametrize('name', torch_momentum)
def test_momentum_of_torch(name, wrap):
    "Every torch optimizer with momentum, bare and behind OptimWrapper: not negative, of the parameter's shape, and no copy of the state is changed"
    p = _param()
    f = functools.partial(getattr(torch.optim, name), **torch_momentum[name])
    opt = OptimWrapper([p], f) if wrap else f([p], lr=.01)
    _steps(opt, p)
    before = [t.clone() for t in state_tensors(opt, p)]
    score = gradient_momentum(p, opt)
    assert before and score.shape==p.shape and (score>=0).all() and score.max()>0
    assert all(torch.equal(a, b) for a,b in zip(before, state_tensors(opt, p)))

@pytest.mark.parametrize('f', [functools.partial(SGD, mom=.9), Adam, functools.partial(RMSProp, mom=.9), QHAdam, Lamb, ranger])
def test_momentum_of_fastai(f):
    "fastai's optimizers, and Lookahead around them"
    p = _param()
    opt = f([p], lr=.01)
    _steps(opt, p)
    score = gradient_momentum(p, opt)
    assert score.shape==p.shape and (score>=0).all() and score.max()>0

def test_fastai_adam_by_numbers():
    "fastai's Adam: abs(grad_avg)/(sqrt(sqr_avg)+eps), worked out in float64"
    p = _param()
    opt = Adam([p], lr=.01, mom=.9, sqr_mom=.99, eps=1e-5)
    m,v = 0.,0.
    for g in _steps(opt, p): m,v = .9*m+.1*g,.99*v+.01*g*g
    assert np.allclose(gradient_momentum(p, opt).numpy(), np.abs(m)/(np.sqrt(v)+1e-5), rtol=1e-4)

@pytest.mark.parametrize('opt_f', [functools.partial(torch.optim.SGD, lr=.1), functools.partial(torch.optim.RMSprop, lr=.1), functools.partial(SGD, lr=.1, mom=0.),
    functools.partial(torch.optim.Adagrad, lr=.1)])
def test_no_momentum(opt_f):
    "Where there is no average of gradients the error names the parameter and says how to set one"
    p = _param()
    opt = opt_f([p])
    _steps(opt, p, 1)
    with pytest.raises(ValueError, match=r"0\.weight.*momentum"): gradient_momentum(p, opt, name='0.weight')

def test_momentum_redistribution_by_hand():
    "Mean abs(momentum) over the live, not normalised; 0 where none lives"
    p = nn.Parameter(torch.zeros(4))
    opt = torch.optim.SGD([p], lr=.1, momentum=.9)
    p.grad = torch.tensor([1.,-3.,50.,-50.])
    opt.step()
    assert momentum_redistribution(p, opt, torch.tensor([True,True,False,False]), name='w', step=3)==2.
    assert momentum_redistribution(p, opt, torch.zeros(4, dtype=torch.bool))==0.

@pytest.mark.parametrize('f', [weight_magnitude,gradient_magnitude,gradient_saliency,MagnitudePlusGradient(.3),functools.partial(weight_magnitude)])
def test_elementwise_scores_need_no_other_weights(f):
    "What is said to look at each weight by itself scores some weights as it scores them among all"
    g = torch.Generator().manual_seed(0)
    p,some = torch.randn(6, 5, generator=g),torch.tensor([0,7,13,29])
    p.grad = torch.randn(6, 5, generator=g)
    v = p.view(-1)[some]
    v.grad = p.grad.view(-1)[some]
    assert needs_of(f).elementwise and f(v).equal(f(p).view(-1)[some])

@pytest.mark.parametrize('f', [random_score,gradient_momentum,SampledGradient(),MeanGradient(),MovingGradient()])
def test_other_scores_see_all_weights(f): assert not needs_of(f).elementwise

def test_scores_say_what_they_read():
    "An attribute says that a score reads the state of dead weights"
    assert needs_of(gradient_momentum).dense_history and needs_of(momentum_redistribution).dense_history
    assert not any(needs_of(f).dense_history for f in (random_score, weight_magnitude, gradient_magnitude))

@pytest.mark.parametrize('f,got', [
    (lambda p: (p,), ('P',)),
    (lambda param, opt: (param,opt), ('P','O')),
    (lambda param, opt=None, **kwargs: (param,opt,sorted(kwargs)), ('P','O',['mask','n'])),
    (lambda x, n, mask: (x,n,mask), ('P',4,'M')),
    (lambda p, *, opt: (p,opt), ('P','O')),
    (lambda p, unknown=7, n=0: (p,unknown,n), ('P',7,4)),
    (functools.partial(lambda a, p, n: (a,p,n), 1), (1,'P',4)),
    (functools.partial(lambda p, k, n: (p,k,n), k=2), ('P',2,4))])
def test_call_shapes(f, got):
    "A score takes what it names: the 2020 shape `f(param, opt=..., **kwargs)`, plain `f(param, opt)`, keyword-only, partials"
    assert call_with(f, 'P', opt='O', mask='M', n=4)==got

class _Score:
    def __call__(self, p, n): return p,n
    def method(self, p, opt): return p,opt

def test_call_objects():
    "Objects with `__call__`, bound methods and functions written in C are functions too"
    assert call_with(_Score(), 'P', opt='O', n=4)==('P',4)
    assert call_with(_Score().method, 'P', opt='O', n=4)==('P','O')
    assert call_with(torch.abs, torch.tensor([-1.]), opt='O', n=4).tolist()==[1.]

def test_unwrapping():
    "The optimizer inside OptimWrapper and Lookahead holds the state; slow weights count as state"
    p = _param()
    opt = OptimWrapper([p], torch.optim.AdamW)
    _steps(opt, p)
    assert base_opt(opt) is opt.opt and {t.data_ptr() for t in state_tensors(opt, p)}=={opt.opt.state[p][k].data_ptr() for k in ('exp_avg','exp_avg_sq')}
    la = Lookahead(SGD([p], lr=.1, mom=.9), k=2)
    _steps(la, p)
    assert base_opt(la) is la.opt and any(t is la.slow_weights[0][0] for t in state_tensors(la, p)) and len(state_tensors(la, p))==2

def test_state_tensors_have_the_shape():
    "Step counters and tensors of another shape are left out"
    p = nn.Parameter(torch.randn(3,4))
    opt = torch.optim.Adafactor([p], lr=.1)
    _steps(opt, p)
    assert all(t.shape==p.shape for t in state_tensors(opt, p)) and not any(t.ndim==0 for t in state_tensors(opt, p))
    assert state_tensors(torch.optim.Adam([p]), p)==[]

@pytest.mark.parametrize('make,say', [(lambda: MagnitudePlusGradient(-1.), 'lam is -1.0.*from 0'), (lambda: MeanGradient(2.5), 'n_batches is 2.5.*whole number from 1'),
    (lambda: MovingGradient(1.), r'decay is 1.0.*\(0,1\)'), (lambda: SampledGradient(0), 'candidates is 0.*above 0'),
    (lambda: SampledGradient(of='alive'), "must be one of 'live', 'dead', 'grown'")])
def test_parts_refuse_when_made(make, say):
    "Law 10: a score with arguments that can't work is refused when it is made, not at the first update"
    with pytest.raises(ValueError, match=say): make()

@pytest.mark.parametrize('c', [GradAverage('sum'), GradAverage('square', power=2), GradAverage('moving', decay=.5)])
@pytest.mark.parametrize('storages', ['llll', 'lldd', 'ddll', 'lLLl', 'dlLd'])
def test_what_is_collected_of_live_weights_is_what_is_collected_of_all(c, storages):
    "Gradients that are zero where weights are dead give the same mean whether they come whole (d) or as numbers of the live ones (l; L is another topology)"
    g,shape = torch.Generator().manual_seed(0),torch.Size((4,5))
    masks = {k:torch.rand(shape, generator=g)<.4 for k in 'lL'}
    lives = {k:Live(m.flatten().nonzero()[:,0], shape) for k,m in masks.items()}
    memo,whole = None,None
    for k in storages:
        grad = torch.randn(shape, generator=g)*masks.get(k, masks['l'])
        memo = c.add(memo, grad) if k=='d' else c.add(memo, grad[masks[k]], lives[k])
        whole = c.add(whole, grad)
        assert c.value(memo).equal(c.value(whole)) and densify(memo)['total'].equal(whole['total'])
        for at in (lives['l'].places, lives['L'].places): assert c.value(memo, at).equal(c.value(whole).flatten()[at])
    assert (memo['live'] is not None)==(storages=='llll')

@pytest.mark.parametrize('f,window,decay', [(MeanGradient(3), 3, None), (MovingGradient(.7), None, .7)])
def test_gradients_of_some_batches_are_declared(f, window, decay):
    "Both read gradients of dead weights, of as many batches as they say"
    needs = needs_of(f)
    assert needs.reads_grad and needs.collector.dense and (needs.collector.window,needs.collector.decay)==(window,decay)

@pytest.mark.parametrize('of', ['live','dead','grown'])
@pytest.mark.parametrize('times', [.1,1.,3.,100.])
def test_a_sample_is_of_dead_weights_and_large_enough(times, of):
    "Each place once and in order, at least as many as grow"
    mask = torch.arange(100)<10
    for least in (0,1,30,90):
        found = DeadWeightSampler(times, of).draw(mask, least)
        assert least<=len(found)<=90 and (found>=10).all() and (found.diff()>0).all()

def test_the_size_of_a_sample():
    "At least what grows, at most all dead; some places are drawn twice; none where none is wanted or none is dead"
    samplers = DeadWeightSampler(3., 'grown'),DeadWeightSampler(2.),DeadWeightSampler(.1),DeadWeightSampler(9.)
    assert [o.size(100, 15, 5) for o in samplers]==[15,30,5,90]
    sizes = [len(DeadWeightSampler(1.).draw(torch.arange(100_000)<5000, 0)) for _ in range(20)]
    assert abs(sum(sizes)/20-5000*(1-5000/95_000/2))<60
    assert not len(DeadWeightSampler(3., 'grown').draw(torch.arange(100)<10, 0)) and not len(DeadWeightSampler(1.).draw(torch.ones(9).bool(), 0))

def test_scores_of_a_sample():
    "The gradient's magnitude where a weight was drawn, below zero elsewhere"
    torch.manual_seed(0)
    p,live = nn.Parameter(torch.randn(1000)),torch.rand(1000)<.1
    p.grad = torch.randn(1000)
    score,drawn = [f(torch.Generator().manual_seed(1)) for f in (lambda g: SampledGradient()(p, live, n=30, generator=g),
        lambda g: DeadWeightSampler(1.).draw(live, 30, g))]
    rest = torch.ones(1000).bool().index_fill_(0, drawn, False)
    assert torch.equal(score[drawn], p.grad.abs()[drawn]) and (score[rest]<0).all() and not live[drawn].any()

def test_what_a_score_declares_can_not_be_written_to():
    "It is shared by all who use the score, and a key of what is collected"
    average = needs_of(MeanGradient(3)).collector
    with pytest.raises(AttributeError): average.window = 1
    assert hash(average)==hash(needs_of(MeanGradient(3)).collector)

def test_averages_by_hand():
    "The mean of 2 and 4; a moving average of decay .5 is .5*1+.5*4 = 2.5, over 1-.5**2"
    for average,expect in ((GradAverage('a'),3.), (GradAverage('b', decay=.5),2.5/.75), (GradAverage('c', power=2),10.)):
        memo = average.add(average.add(None, torch.tensor([2.])), torch.tensor([4.]))
        assert average.value(memo).item()==pytest.approx(expect)

def test_the_first_draw_of_a_sample_by_hand():
    "Four of the seven dead ones are wanted: of ten places that is ten times 4/7, rounded up"
    assert len(next(DeadWeightSampler(1., 'live').places(10, 4, 1)))==6
