"Masks that follow a score, of tensors and of weights"
import copy,math,pickle,pytest
from dataclasses import dataclass
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastsparse.all import *
from fastsparse.learned.masks import SRSTE_presets,supermask_presets,TopKAST_presets
from fastsparse.compat.dmx import effective_weight
from fastsparse.demo import TensorData
from fastsparse.masks.structures import Unstructured
from fastsparse.model.sparsify import unsparsify_parameter
from fastsparse.learned.masks import dead_decay,explore_decay,LearnedMaskCallback,mask_penalty,own_magnitude,signed_constant_,sparsifiers,update_all
from fastsparse.learned.sparseness import as_sparseness,Sparseness,TopOf
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st

kinds = [('dense','dense'), ('top .5','top 0.5'), ('top 1','top 1.0'), ('top 1e-05','top 1e-05'), ('top 0.5 (M)','top 0.5 (M)'), ('bernoulli','bernoulli'),
    ('bernoulli (M)','bernoulli (M)'),
    ('2:4','2:4'), ('2:4(M)','2:4 (M)'), ('1:4 axis 0 pad','1:4 axis 0 pad'), ('top .25 fan-in','top 0.25 fan-in'),
    ('top .5 block 2x2 max (M)','top 0.5 block 2x2 max (M)'), (NM(2,4),'2:4'), (Unstructured(.5),'top 0.5')]

@pytest.mark.parametrize('spec,text', kinds)
def test_texts(spec, text):
    "What is parsed is printed, and pickles, copies and compares"
    kind = as_sparseness(spec)
    assert str(kind)==repr(kind)==text and as_sparseness(kind) is kind and hash(kind)==hash(as_sparseness(text))
    assert pickle.loads(pickle.dumps(kind))==copy.deepcopy(kind)==kind==as_sparseness(text)
    assert kind.mask_gradient==('(M)' in text)

specials = st.sampled_from([0.,-0.,1.,-1.,2.,float('inf'),-float('inf'),float('nan')])

@given(st.lists(st.floats(-3,3,width=32)|specials, min_size=1, max_size=40), st.floats(0,1))
@settings(max_examples=40)
def test_top_k_against_sorting(values, density):
    "The signed highest, ties to the lowest index, NaN last"
    score,n = np.array(values, dtype=np.float32),round(density*len(values))
    mask = TopOf(density=density).mask(torch.from_numpy(score))
    assert set(np.flatnonzero(mask))==set(oracle_order(score, np.ones(len(values), bool))[:n])

# gradients by hand: x=[1,2,3,4], the score keeps places 1 and 3 (as a probability too, and in blocks of two), upstream gradient g=[10,20,30,40]
x0,s0,g0 = [1.,2.,3.,4.],[-1.,2.,-.5,1.5],[10.,20.,30.,40.]
gx_live,gx_all = [0.,20.,0.,40.],g0
gs_all,gs_live = [10.,40.,90.,160.],[0.,40.,0.,160.]

@pytest.mark.parametrize('training', [True,False])
@pytest.mark.parametrize('kind', ['top 0.5','1:2 axis -1','bernoulli'])
@pytest.mark.parametrize('way', 'UM')
@pytest.mark.parametrize('mode,back,gx', [('STE',None,gx_live), ('STE','dense',gx_all), ('supermask',None,None), ('joint',None,gx_live),
    ('joint','dense',gx_all),
    ('STE','top 0.75',[0.,20.,30.,40.])])
def test_gradients_by_hand(kind, way, mode, back, gx, training):
    "Every kind and mode, masked or not, in training and in evaluation alike (002: (M) had no effect in blocks, and nothing was detached in evaluation)"
    spec = kind+' (M)'*(way=='M')
    sp = Sparsify(4, spec, mode, backward_sparseness=back).train(training)
    sp.update_mask(torch.tensor(s0))
    x = torch.tensor(x0, requires_grad=True)
    y = sp(x)
    y.backward(torch.tensor(g0))
    assert y.tolist()==[0.,2.,0.,4.] and is_positive_zero(y[~sp.mask])
    assert (x.grad is None) if gx is None else x.grad.tolist()==gx
    want = None if mode=='STE' else gs_live if way=='M' else gs_all
    assert (sp.score.grad is None) if want is None else sp.score.grad.tolist()==want

def test_bernoulli():
    "0 never lives, 1 always; training draws anew, evaluation uses the last mask (trap 14), and the same seed draws the same"
    sp = Sparsify(1000, 'bernoulli', seed=3)
    with torch.no_grad(): sp.score.copy_(torch.cat([torch.zeros(200), torch.ones(200), torch.full((600,), .3)]))
    x,masks = torch.ones(1000),[]
    for _ in range(4):
        sp(x)
        masks.append(sp.mask)
        assert not sp.mask[:200].any() and sp.mask[200:400].all() and 120<sp.mask[400:].sum()<240
    assert not torch.equal(masks[0], masks[1])
    sp.eval()
    assert all(torch.equal(sp(x).bool(), masks[-1]) for _ in range(3)) and sp.density==masks[-1].sum().item()/1000
    twin = Sparsify(1000, 'bernoulli', seed=3)
    with torch.no_grad(): twin.score.copy_(sp.score)
    torch.manual_seed(99)
    for m in masks:
        twin(x)
        assert torch.equal(twin.mask, m)

def test_score_func_is_stored_and_run_at_each_update():
    "Trap 14: 002's next forward reverted to the random score"
    sp = Sparsify(4, 'top 0.5', score_func=lambda score,x: x.abs())
    a = torch.tensor([0.,-4.,3.,0.])
    assert sp(a).tolist()==[0.,-4.,3.,0.] and sp.score.tolist()==[0.,4.,3.,0.]
    assert sp(a).tolist()==[0.,-4.,3.,0.]
    assert sp(-a[[1,0,3,2]]).tolist()==[4.,0.,0.,-3.] and sp.score.tolist()==[4.,0.,0.,3.]
    sp.update_settings(score_func=lambda score,x: score+1)
    sp(a)
    assert sp.score.tolist()==[5.,1.,1.,4.]
    sp.eval()(torch.ones(4))
    assert sp.score.tolist()==[5.,1.,1.,4.]

def test_functional_call_and_double_backward():
    "Other tensors can take the parameter's place, and gradients have gradients"
    net = nn.Linear(3, 1, bias=False)
    sp, = learn_masks(net, 'top 0.34', 'joint')
    sp.update_mask(torch.tensor([[0.,1.,0.]]))
    w,x = torch.tensor([[1.,2.,3.]], requires_grad=True),torch.tensor([[5.,6.,7.]])
    net.eval()
    y = torch.func.functional_call(net, {'weight':w}, (x,)).square().sum()
    g, = torch.autograd.grad(y, w, create_graph=True)
    h, = torch.autograd.grad(g.sum(), w)
    assert y.item()==144 and g.tolist()==[[0.,144.,0.]] and h.tolist()==[[0.,72.,0.]]

def test_sr_ste_by_hand():
    "g + lambda*(1-m)*w: the gradient reaches dead weights, and they decay"
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): net.weight.copy_(torch.tensor([[1.,-2.,3.,-4.]]))
    learn_masks(net, **dict(SRSTE_presets, penalty=partial(dead_decay, decay=.5)))
    (net(torch.tensor([[10.,20.,30.,40.]])).sum()+mask_penalty(net)).backward()
    assert net.weight_mask.tolist()==[[False,False,True,True]] and net.weight.grad.tolist()==[[10.5,19.,30.,40.]]

def test_topkast_by_hand():
    "Gradients in B only; the penalty is w^2 in A and w^2/density in B but not in A; masks rest between updates"
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): net.weight.copy_(torch.tensor([[1.,-2.,3.,-4.]]))
    sp, = learn_masks(net, **dict(TopKAST_presets, sparseness='top 0.25', backward_sparseness='top 0.5', penalty=partial(explore_decay, decay=.5),
        rescale=False))
    y = net(torch.tensor([[10.,20.,30.,40.]]))
    penalty = mask_penalty(net)
    assert y.item()==-160 and penalty.item()==.5*(16+9*4)
    (y.sum()+penalty).backward()
    assert net.weight.grad.tolist()==[[0.,0.,30+.5*2*3*4,40-.5*2*4]]
    with torch.no_grad(): net.weight.copy_(torch.tensor([[9.,-2.,3.,-4.]]))
    for _ in range(99): net(torch.ones(1,4))
    assert net.weight_mask.tolist()==[[False,False,False,True]]
    net(torch.ones(1,4))
    assert net.weight_mask.tolist()==[[True,False,False,False]] and sp.backward_mask.tolist()==[[True,False,False,True]]

def _learner(net, **kwargs):
    g = torch.Generator().manual_seed(0)
    ds = TensorData(torch.randn(24, 6, generator=g), torch.randn(24, 3, generator=g))
    dls = DataLoaders(DataLoader(ds, bs=4), DataLoader(ds, bs=8))
    return Learner(dls, net, loss_func=nn.MSELoss(), opt_func=partial(SGD, mom=.9), lr=.1, **kwargs)

@dataclass(frozen=True)
class Every(Sparseness):
    "Every `n`-th place lives, whatever the score"
    n:int=2
    first:int=0
    def choose(self, score): return (torch.arange(score.numel(), device=score.device)%self.n==self.first).view(score.shape)

class Wrong(Sparseness):
    def choose(self, score): return score

def test_a_kind_of_ones_own():
    "A dataclass with `choose`: pickled, changed by field, with gradients as asked; what it returns must be a mask"
    assert pickle.loads(pickle.dumps(Every(3, 1)))==Every(3, 1)
    sp = Sparsify(5, Every(mask_gradient=True), 'supermask')
    assert sp(torch.ones(5)).tolist()==[1,0,1,0,1]
    sp(torch.ones(5)).sum().backward()
    assert sp.score.grad.tolist()==[1,0,1,0,1]
    sp.update_settings(n=5, first=4)
    assert sp.mask.tolist()==[False]*4+[True] and sp.sparseness==Every(5, 4, mask_gradient=True)
    with pytest.raises(ValueError, match='torch.float32'): Sparsify((2,2), Wrong())

def test_counts_and_forward():
    "`round(density*n)`, never truncated, whatever the ties and the layout; the forward is mask*x with +0 where NaN and infinities stood; dense is the same tensor; a batch shares the mask"
    for density,n,live in [(.9,10,9), (.25,10,2), (.35,10,4), (.04,10,0), (1.,7,7), (0.,7,0), (.29,100,29), (.57,100,57)]:
        for score in (torch.rand(n), torch.zeros(n)): assert TopOf(density=density).mask(score).sum()==live
    s = torch.randn(6,8)
    for score in (s.t(), s.half(), s.bfloat16(), s[:,::2], s>0):
        assert TopOf(density=.5).mask(score).sum()==score.numel()//2==as_sparseness('1:2 axis 0').mask(score).sum()
    assert torch.equal(TopOf(density=.5).mask(s.t()), TopOf(density=.5).mask(s.t().contiguous()))
    sp,x = Sparsify(4, 'top 0.25'),torch.randn(3, requires_grad=True)
    sp.eval().update_mask(torch.tensor([0.,1.,0.,0.]))
    y = sp(torch.tensor([math.nan,2.,-3.,math.inf]))
    assert y[1]==2 and is_positive_zero(y[[0,2,3]]) and all(Sparsify(3, 'dense', mode)(x) is x for mode in ('STE','supermask','joint'))
    sp = Sparsify((2,), 'top 0.5', 'joint')
    sp.update_mask(torch.tensor([1.,0.]))
    x = torch.tensor([[1.,2.],[3.,4.]], requires_grad=True)
    sp(x).backward(torch.tensor([[1.,1.],[10.,10.]]))
    assert x.grad.tolist()==[[1.,0.],[10.,0.]] and sp.score.grad.tolist()==[31.,42.]
    with pytest.raises(ValueError, match=r'\(2, 3\).*\(2,\)'): sp(torch.randn(2,3))

texts = [('','structure is'), ('FOO','structure is'), ('dense x','structure is'), ('TOPK{0.5}(U)','from_shorthand'), ('top 0.5 (X)','structure is'),
    ('top 1.5',r'1\.5.*\[0,1\]'), ('top -.1',r'-0\.1.*\[0,1\]'),
    ('fan-in',"'top 0.1 fan-in'"), (None,'has no density'), ('5:4','5')]

changes = [(dict(backward_mode='ste'),"'STE', 'supermask', 'joint'"), (dict(sparseness='TOPK'),'from_shorthand'), (dict(every=0),'whole number from 1'),
    (dict(score_func=lambda s,x: s[:1]),'shape'), (dict(density=2.),r'\[0,1\]'), (dict(colour=1),'choose from sparseness, backward_mode'),
    (dict(k=2),'choose from'), (dict(sparseness='1:3'),'1:3 needs an axis 1')]

def learned(spec='top .5'):
    m = mlp((8,7,3))
    learn_masks(m, spec, seed=0)
    return m

def sparse():
    m = mlp((8,7,3))
    sparsify_model(m, .5, seed=0)
    return m

def dense(): return mlp((8,7,3))

def settled(f, many): return lambda m: (update_all if many else lambda sps, **kw: sps[0].update_settings(**kw))(sparsifiers(m), **f)
def trained_by_set(m): DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), .1), 20, method='set', batches_per_update=2)
def scheduled(m): _learner(m).fit(1, cbs=LearnedMaskCallback(density=lambda t: .5))

refused = [(dense,lambda m, s=s: as_sparseness(s),what) for s,what in texts]
refused += [(learned,settled(c, many),what) for c,what in changes for many in (False,True)]
refused += [(dense,lambda m: learn_masks(m, '2:4'),r'2\.weight: 2:4 needs an axis 1 that 4 divides'),
    (dense,lambda m: learn_masks(m, {'lm_haed':None,'0.weight':None}),'no weights'), (dense,lambda m: learn_masks(m, {'0.weight':None}),'no weights'),
    (dense,lambda m: learn_masks(m, 'x'),'structure is'), (dense,lambda m: learn_masks(m, scor_func=abs),"'scor_func' is no setting.*did you mean 'score_func'"), (sparse,learn_masks,'unsparsify'),
    (dense,fold_masks,'learn_masks'), (learned,learn_masks,'fold_masks'), (learned,unsparsify,r'0\.weight has a learned mask.*fold_masks'),
    (learned,lambda m: unsparsify_parameter(m, '2.weight'),r'2\.weight has a learned mask.*fold_masks'),
    (learned,lambda m: prune_to(m, .9),'0.weight has a learned mask: call fold_masks'), (learned,trained_by_set,'0.weight has a learned mask: call fold_masks'),
    (dense,scheduled,'no learned masks.*learn_masks')]

@pytest.mark.parametrize('make,f,what', refused)
@pytest.mark.filterwarnings('ignore')
def test_refused_and_nothing_changed(make, f, what):
    "Law 10, in texts, in one module and in many: all accept, or nothing changes"
    m = make()
    before = copy.deepcopy(dict(m.state_dict()))
    with pytest.raises((ValueError,TypeError), match=what): f(m)
    now = m.state_dict()
    assert before.keys()==now.keys() and all(torch.equal(v, now[k]) if isinstance(v, torch.Tensor) else v==now[k] for k,v in before.items())

def test_settings_at_any_time():
    "Kind, a field of the kind, mode, score function, how often; dense to top works; what is written into a weight is what the next forward masks"
    sps = [Sparsify((4,8)), Sparsify(16)]
    assert sps[0].density==1
    update_all(sps, sparseness='top 0.5 (M)')
    update_all(sps, density=.25, backward_mode='joint', score_func=own_magnitude)
    assert str(sps[0].sparseness)=='top 0.25 (M)' and [m.density for m in sps]==[.25,.25] and sps[0].backward_mode=='joint'
    assert sps[0](-torch.arange(32.).view(4,8)).flatten().nonzero().flatten().tolist()==[*range(24,32)]
    sps[0].update_settings('3:4 axis -1')
    mask = sps[0].mask
    assert mask.sum(1).tolist()==[6]*4
    sps[0].update_settings('3:4 axis -1')
    assert sps[0].mask is mask
    sp = Sparsify(2, 'top 0.5', score_func=lambda score,x: x, every=3)
    a,b = torch.tensor([1.,0.]),torch.tensor([0.,1.])
    assert [sp(x).sum().item() for x in (a,b,b,b,a,a,a)]==[1.,0.,0.,1.,0.,0.,1.]
    assert sp.eval()(b).sum()==0 and sp.step==7
    layer = nn.Linear(4, 2, bias=False)
    learn_masks(layer, 'top 0.5', score_func=own_magnitude, seed=0)
    layer.weight.data.copy_(torch.tensor([[4.,3.,2.,1.],[0.,-9.,0.,8.]]))
    assert layer(torch.ones(1,4)).tolist()==[[7.,-1.]]
    with torch.no_grad(): layer.weight.zero_()
    assert layer(torch.ones(1,4)).tolist()==[[0.,0.]]

@pytest.mark.parametrize('kind', ['top 0.5','2:4 (M)','bernoulli','dense','top 0.0'])
def test_saved_moved_pickled_copied(kind):
    "Scores, masks and settings go with state dict, pickle, deepcopy and `.to`, whatever the kind was there before; copies learn on by themselves"
    net = mlp((8,8,4))
    learn_masks(net, kind, 'joint', backward_sparseness='top 0.75', seed=0)
    xb,yb = data(net)
    train(net, torch.optim.SGD(net.parameters(), .1), 3, xb, yb)
    fresh,other = mlp((8,8,4), seed=5),mlp((8,8,4))
    learn_masks(fresh, 'dense')
    learn_masks(other, 'bernoulli')
    for o in (fresh, other): o.load_state_dict(net.state_dict())
    for twin in (fresh, other, copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.deepcopy(net).double().float()):
        assert same_masks(masks_of(twin), masks_of(net)) and all(torch.equal(a, b) for (k,a),b in zip(twin.state_dict().items(),
            net.state_dict().values()) if isinstance(a, torch.Tensor))
        a,b = [sparsifiers(o)[0] for o in (twin,net)]
        assert (str(a.sparseness),a.backward_mode,a.step,a.seed)==(kind,'joint',3,b.seed) and a.weight is twin[0].weight
        old,again = masks_of(net),copy.deepcopy(net)
        assert torch.equal(twin(xb), again(xb)) and same_masks(old, masks_of(net)) and same_masks(masks_of(twin), masks_of(again))
    meta,half = copy.deepcopy(net).to('meta'),copy.deepcopy(net).half()
    assert {o.device.type for o in [*meta.parameters(),
        *meta.buffers()]}=={'meta'} and half[0].weight_mask.dtype==torch.bool and sparsifiers(half)[0].score.dtype==torch.half

def test_sizes_of_the_start():
    "edge-popup's scaled constant is sqrt(2/(k*fan_in)) (arXiv:1911.13299); Top-KAST's live weights have the dense weight's sum of squares, under the masks without that scale"
    for k in (.1,.5):
        net = nn.Linear(100, 50)
        signs = net.weight.detach().sign()
        signed_constant_(net.weight)
        assert torch.allclose(net.weight.abs(), torch.tensor((2/100)**.5))
        learn_masks(net, **dict(supermask_presets, sparseness=f'top {k}'), seed=0)
        assert torch.allclose(net.weight, signs*math.sqrt(2/(k*100)))
    net = nn.Linear(400, 300)
    dense,again = net.weight.detach().clone(),copy.deepcopy(net)
    for o,kwargs in ((net,{}), (again,dict(rescale=False))): learn_masks(o, **{**TopKAST_presets, 'sparseness':'top .05', **kwargs}, seed=0)
    assert torch.equal(net.weight_mask, again.weight_mask) and torch.equal(again.weight, dense)
    assert effective_weight(net).norm().item()==pytest.approx(dense.norm().item(), rel=1e-5)
    assert torch.allclose(net.weight/dense, (net.weight/dense).mean()) and torch.equal(net.weight_sparsifier.score, net.weight.abs())
