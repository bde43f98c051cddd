"Masks that follow a score, of tensors and of weights"
import copy, io, math, numpy as np, pickle, pytest, torch, torch.utils.checkpoint, warnings
from fastai.callback.core import Callback
from fastai.callback.schedule import *
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner,load_learner
from fastai.optimizer import SGD
from fastsparse.all import *
from fastsparse.train.learned import mask_penalty,LearnedMaskCallback
from fastsparse.masks.selection import count_live
from fastsparse.masks.structures import Unstructured
from dataclasses import dataclass
from fastsparse.compat.dmx import effective_weight
from fastsparse.compat.cerebras import CosineDecaySchedule,CosineSchedule,ExpSchedule,LinearSchedule,PowerSchedule,SawtoothSchedule
from fastsparse.masks.schedules import ConstantSchedule,CyclingSchedule,epochs,FunctionSchedule,PiecewiseSchedule
from fastsparse.masks.schedules import PositionSchedule,samples,SquareSchedule,steps
from fastsparse.weights.weight import masked_params
from fastsparse.weights.hooks import enforce_masks
from fastsparse.model.sparsify import unsparsify_parameter
from fastsparse.train.learned import as_sparseness,dead_decay,explore_decay,own_magnitude,signed_constant_,Sparseness,Sparsify
from fastsparse.train.learned import sparsifiers,TopOf,update_all
from fastsparse.prune.tickets import rewind
from fastsparse.kernels.linear import backward
from fastsparse.demo import TensorData
from functools import partial
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn

kinds = [('dense','dense'), ('top .5','top 0.5'), ('top 1','top 1.0'), ('top 1e-05','top 1e-05'), ('top 0.5 (M)','top 0.5 (M)'), ('bernoulli','bernoulli'), ('bernoulli (M)','bernoulli (M)'),
    ('2:4','2:4'), ('2:4(M)','2:4 (M)'), ('1:4 axis 0 pad','1:4 axis 0 pad'), ('transposable 2:4','transposable 2:4'), ('top .25 fan-in','top 0.25 fan-in'),
    ('top .5 block 2x2 max (M)','top 0.5 block 2x2 max (M)'), (NM(2,4),'2:4'), (Unstructured(.5),'top 0.5')]

@pytest.mark.parametrize('spec,text', kinds)
def test_texts(spec, text):
    "What is parsed is printed, and pickles, copies and compares"
    kind = as_sparseness(spec)
    assert str(kind)==repr(kind)==text and as_sparseness(kind) is kind and hash(kind)==hash(as_sparseness(text))
    assert pickle.loads(pickle.dumps(kind))==copy.deepcopy(kind)==kind==as_sparseness(text)
    assert kind.mask_gradient==('(M)' in text)

@pytest.mark.parametrize('spec,what', [('', 'structure is'), ('FOO','structure is'), ('dense x','structure is'), ('TOPK{0.5}(U)','structure is'), ('top 0.5 (X)','structure is'), ('top 1.5',r'1\.5.*\[0,1\]'),
    ('top -.1',r'-0\.1.*\[0,1\]'), ('fan-in',"'top 0.1 fan-in'"), (None,'has no density'), ('5:4','5')])
def test_texts_refused(spec, what):
    "A text that means nothing, or whose density is out of range"
    with pytest.raises(ValueError, match=what): as_sparseness(spec)

@pytest.mark.parametrize('density,n,live', [(.9,10,9), (.5,10,5), (.25,10,2), (.35,10,4), (.3,10,3), (.1,10,1), (.04,10,0), (1.,7,7), (0.,7,0), (.29,100,29), (.57,100,57)])
def test_counts_are_rounded(density, n, live):
    "Trap 2: `round(density*n)`, never truncated (002 kept 10 of 10 at .9), whatever the ties"
    for score in (torch.rand(n), torch.zeros(n)): assert TopOf(density=density).mask(score).sum()==live

specials = st.sampled_from([0.,-0.,1.,-1.,2.,float('inf'),-float('inf'),float('nan')])

@given(st.lists(st.floats(-3,3,width=32)|specials, min_size=1, max_size=40), st.floats(0,1))
@settings(max_examples=40)
def test_top_k_against_sorting(values, density):
    "The signed highest, ties to the lowest index, NaN last"
    score,n = np.array(values, dtype=np.float32),round(density*len(values))
    mask = TopOf(density=density).mask(torch.from_numpy(score))
    assert set(np.flatnonzero(mask))==set(oracle_order(score, np.ones(len(values), bool))[:n])

def test_scores_of_any_layout():
    "002 failed on scores that aren't contiguous; bool, half and strided ones do"
    s = torch.randn(6,8)
    for t in (s.t(), s.half(), s.bfloat16(), s[:,::2], s>0):
        assert TopOf(density=.5).mask(t).sum()==t.numel()//2
        assert as_sparseness('1:2 axis 0').mask(t).sum()==t.numel()//2
    assert torch.equal(TopOf(density=.5).mask(s.t()), TopOf(density=.5).mask(s.t().contiguous()))

# gradients by hand: x=[1,2,3,4], the score keeps places 1 and 3 (as a probability too, and in blocks of two), upstream gradient g=[10,20,30,40]
x0,s0,g0 = [1.,2.,3.,4.],[-1.,2.,-.5,1.5],[10.,20.,30.,40.]
gx_live,gx_all = [0.,20.,0.,40.],g0
gs_all,gs_live = [10.,40.,90.,160.],[0.,40.,0.,160.]

@pytest.mark.parametrize('training', [True,False])
@pytest.mark.parametrize('kind', ['top 0.5','1:2 axis -1','bernoulli'])
@pytest.mark.parametrize('way', 'UM')
@pytest.mark.parametrize('mode,back,gx', [('STE',None,gx_live), ('STE','dense',gx_all), ('supermask',None,None), ('joint',None,gx_live), ('joint','dense',gx_all),
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

def test_dense_passes_as_it_is():
    "Dense: the same tensor, whatever the mode"
    x = torch.randn(3, requires_grad=True)
    for mode in ('STE','supermask','joint'): assert Sparsify(3, 'dense', mode)(x) is x

def test_dead_is_zero_whatever_stood_there():
    "The forward is mask*x with zeros that are +0, where NaN, infinities and negatives stood"
    sp = Sparsify(4, 'top 0.25')
    sp.eval().update_mask(torch.tensor([0.,1.,0.,0.]))
    y = sp(torch.tensor([float('nan'),2.,-3.,float('inf')]))
    assert y[1]==2 and is_positive_zero(y[[0,2,3]])

def test_leading_dimensions_share_the_mask():
    "A batch of activations: one mask, and the score's gradient sums over items"
    sp = Sparsify((2,), 'top 0.5', 'joint')
    sp.update_mask(torch.tensor([1.,0.]))
    x = torch.tensor([[1.,2.],[3.,4.]], requires_grad=True)
    sp(x).backward(torch.tensor([[1.,1.],[10.,10.]]))
    assert x.grad.tolist()==[[1.,0.],[10.,0.]] and sp.score.grad.tolist()==[31.,42.]
    with pytest.raises(ValueError, match=r'\(2, 3\).*\(2,\)'): sp(torch.randn(2,3))

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

def test_every():
    "Masks are chosen at training steps 0, every, 2*every"
    sp = Sparsify(2, 'top 0.5', score_func=lambda score,x: x, every=3)
    a,b = torch.tensor([1.,0.]),torch.tensor([0.,1.])
    assert [sp(x).sum().item() for x in (a,b,b,b,a,a,a)]==[1.,0.,0.,1.,0.,0.,1.]
    sp.eval()
    assert sp(b).sum()==0 and sp.step==7

@pytest.mark.parametrize('changes,what', [(dict(backward_mode='ste'),"'STE', 'supermask', 'joint'"), (dict(sparseness='TOPK'),'structure is'), (dict(every=0),'whole number from 1'),
    (dict(score_func=lambda s,x: s[:1]),'shape'), (dict(density=2.),r'\[0,1\]'), (dict(colour=1),'choose from sparseness, backward_mode'),
    (dict(k=2),'choose from'), (dict(sparseness='1:3'),'1:3 needs an axis 1')])
def test_refused_and_nothing_changed(changes, what):
    "Law 10, in one module and in many: all accept, or nothing changes"
    layer = nn.Linear(4, 4)
    sp, = learn_masks(layer, 'top 0.5')
    free = Sparsify(3, 'top 0.5')
    before = {**copy.deepcopy(layer.state_dict()), **free.state_dict()}
    for f in (sp.update_settings, partial(update_all, [free,sp])):
        with pytest.raises(ValueError, match=what): f(**changes)
    now = {**layer.state_dict(), **free.state_dict()}
    assert all(torch.equal(v, now[k]) if isinstance(v, torch.Tensor) else v==now[k] for k,v in before.items())

def test_settings_at_any_time():
    "Kind, a field of the kind, mode and score function; dense to top works"
    sp = Sparsify((4,8))
    assert sp.density==1
    sps = [sp, Sparsify(16)]
    update_all(sps, sparseness='top 0.5 (M)')
    assert [m.density for m in sps]==[.5,.5]
    update_all(sps, density=.25, backward_mode='joint')
    assert str(sp.sparseness)=='top 0.25 (M)' and sp.density==.25 and sp.backward_mode=='joint'
    update_all(sps, score_func=own_magnitude)
    big = torch.arange(32.).view(4,8)
    assert sp(-big).flatten().nonzero().flatten().tolist()==[*range(24,32)]
    assert sps[1](torch.arange(16.).flip(0)).nonzero().flatten().tolist()==[0,1,2,3]
    sp.update_settings('3:4 axis -1')
    assert sp.density==.75 and sp.mask.sum(1).tolist()==[6]*4
    mask = sp.mask
    sp.update_settings('3:4 axis -1')
    assert sp.mask is mask

def test_moved():
    "Trap 14: masks and scores go where the model goes"
    for o in (Sparsify((2,3), 'top 0.5', backward_sparseness='dense'), nn.Sequential(nn.Linear(3,2))):
        if isinstance(o, nn.Sequential): learn_masks(o, 'bernoulli', 'joint')
        assert {t.device.type for t in [*o.to('meta').parameters(), *o.buffers()]}=={'meta'}
    layer = nn.Linear(4, 4).double()
    sp, = learn_masks(layer, 'top 0.5', 'joint')
    assert sp.score.dtype==torch.double and sp.mask.dtype==torch.bool
    layer.half()
    assert sp.score.dtype==torch.half and sp.mask.dtype==torch.bool and sp.mask.sum()==8

def _trained(kind='top 0.5', mode='joint', **kwargs):
    sp = Sparsify((3,4), kind, mode, **kwargs)
    for i in range(3):
        sp(torch.ones(3,4)).square().sum().backward()
        with torch.no_grad(): sp.score.sub_(.1*sp.score.grad*torch.arange(12.).view(3,4).sin())
    return sp

@pytest.mark.parametrize('kind', ['top 0.5','2:4 axis -1 (M)','bernoulli'])
def test_saved_moved_pickled_copied(kind):
    "Trap 14: scores, masks and settings go with state dict, pickle, deepcopy and `.to`; a fresh module takes them over"
    sp = _trained(kind, backward_sparseness='top 0.75')
    fresh = Sparsify((3,4))
    buf = io.BytesIO()
    torch.save(sp.state_dict(), buf)
    buf.seek(0)
    fresh.load_state_dict(torch.load(buf))
    for other in (fresh, copy.deepcopy(sp), pickle.loads(pickle.dumps(sp)), sp.to(torch.double).to(torch.float)):
        assert torch.equal(other.mask, sp.mask) and torch.equal(other.score, sp.score) and torch.equal(other.backward_mask, sp.backward_mask)
        assert (str(other.sparseness),other.backward_mode,other.step,other.seed)==(kind,'joint',3,sp.seed)
        a,b = copy.deepcopy(other),copy.deepcopy(sp)
        assert torch.equal(a(torch.ones(3,4)), b(torch.ones(3,4))) and torch.equal(a.mask, b.mask)
    assert {'score','mask','backward_mask'}<=set(sp.state_dict())

def test_loading_one_mask_leaves_the_other():
    "A module whose two masks are one tensor takes two from a checkpoint"
    src,dst = Sparsify(8, 'top 0.25', backward_sparseness='dense'),Sparsify(8, 'top 0.5')
    dst.load_state_dict(src.state_dict())
    assert dst.density==.25 and dst.backward_mask.all()

class Net(nn.Module):
    "One layer of each type, and a weight that two layers share"
    def __init__(self):
        super().__init__()
        self.emb,self.bag = nn.Embedding(10, 8),nn.EmbeddingBag(10, 8)
        self.conv1,self.conv2,self.conv3 = nn.Conv1d(8, 4, 3, padding=1, groups=2),nn.Conv2d(1, 4, 3),nn.Conv3d(1, 2, 2)
        self.up = nn.ConvTranspose1d(4, 6, 2, stride=2)
        self.lstm,self.gru,self.cell = nn.LSTM(8, 5, 2, bidirectional=True),nn.GRU(8, 5),nn.LSTMCell(8, 5)
        self.att,self.att2 = nn.MultiheadAttention(8, 2, batch_first=True),nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)
        self.bil,self.lin,self.tied = nn.Bilinear(8, 8, 4),nn.Linear(8, 8),nn.Linear(8, 8)
        self.tied.weight = self.lin.weight

    def forward(self, i):
        x = self.emb(i)
        outs = [self.bag(i), self.conv1(x.mT), self.conv2(x[:,None]), self.conv3(x[:,None,:,:,None].expand(-1,-1,-1,-1,2)), self.up(self.conv1(x.mT))]
        outs += [self.lstm(x)[0], self.gru(x)[0], self.cell(x[:,0])[0], self.att(x, x, x)[0], self.att2(x, x[...,:6], x[...,:5])[0]]
        outs += [self.bil(x, x), self.tied(self.lin(x).relu())]
        return torch.cat([o.flatten() for o in outs])

@pytest.mark.parametrize('training', [True,False])
def test_every_layer_sees_its_masked_weight(training):
    "mask*weight in the forward of every layer (attention's out_proj, recurrent and shared weights too); parameters stay the same objects, dense"
    torch.manual_seed(0)
    net,i = Net(),torch.arange(12).view(2,6)%10
    params = dict(net.named_parameters())
    values = {k: v.clone() for k,v in params.items()}
    sps = learn_masks(net, {'*':'top 0.25'}, 'joint', seed=1)
    net.train(training)
    out = net(i)
    assert len(sps)==sum(p.ndim>1 for p in params.values())
    now = dict(net.named_parameters())
    assert all(now[k] is p and torch.equal(p, values[k]) for k,p in params.items()) and isinstance(net.lin.weight, nn.Parameter)
    ref = Net()
    masks = {o.name:o.mask for o in masked_params(net)}
    assert all(int(m.sum())==round(.25*m.numel()) for m in masks.values())
    ref.load_state_dict({k: torch.where(masks[k], v, 0) if k in masks else v for k,v in values.items()} | {'tied.weight': torch.where(masks['lin.weight'], values['lin.weight'], 0)})
    assert torch.equal(ref.train(training)(i), out)
    out.sum().backward()
    assert all(sp.weight.grad is not None and not sp.weight.grad[~sp.mask].any() and sp.score.grad is not None for sp in sps)
    fold_masks(net)
    assert torch.equal(net(i), out)
    assert_dead(net)
    assert set(net.state_dict())-set(values)-{'tied.weight'}=={f'{k}_{o}' for k in masks for o in ('mask','sparsity')}

@pytest.mark.parametrize('norm_first', [False,True])
def test_transformer_in_evaluation(norm_first):
    "The fast path of evaluation sees masks too"
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True, norm_first=norm_first)
    learn_masks(net, 'top 0.2', seed=0)
    x = torch.randn(2,5,8)
    net.eval()
    with torch.no_grad(): before = net(x)
    fold_masks(net)
    with torch.no_grad(): assert torch.allclose(net(x), before, atol=1e-5)
    assert not net.linear1._forward_hooks_always_called

def test_saved_models():
    "Pickle, deepcopy and state dicts of a model with learned masks; the copy learns on its own"
    torch.manual_seed(0)
    net = mlp()
    learn_masks(net, **STE_presets, seed=0)
    xb,yb = data(net)
    backward(net, xb, yb)
    fresh = mlp(seed=5)
    learn_masks(fresh, 'dense', score_func=own_magnitude)
    fresh.load_state_dict(net.state_dict())
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), fresh):
        assert same_masks(masks_of(twin), masks_of(net)) and str(twin[0].weight_sparsifier.sparseness)=='top 0.1'
        old = masks_of(net)
        with torch.no_grad(): twin[0].weight.copy_(twin[0].weight.flip(1))
        twin(xb)
        assert not torch.equal(twin[0].weight_mask, net[0].weight_mask) and same_masks(old, masks_of(net))
        assert twin[0].weight_sparsifier.weight is twin[0].weight and not hasattr(vars(twin[0]), 'weight')

def test_resume_is_bit_for_bit():
    "Law 6: model and optimizer state restore a run, Bernoulli masks and Top-KAST's backward sets included"
    for presets in (dict(supermask_presets, sparseness='bernoulli'), dict(TopKAST_presets, every=3), dict(SRSTE_presets, sparseness='1:2')):
        def start(seed):
            net = mlp((6,8,6,4), seed=seed)
            learn_masks(net, **presets, seed=seed)
            return net,torch.optim.SGD(net.parameters(), lr=.5, momentum=.9)
        def steps(net, opt, n):
            xb,yb = data(net)
            for _ in range(n):
                (nn.functional.mse_loss(net(xb), yb)+mask_penalty(net)).backward()
                opt.step()
                opt.zero_grad()
        a,b = start(0),start(1)
        steps(*a, 4)
        for mine,theirs in zip(b,a): mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        steps(*a, 4)
        torch.rand(3)
        steps(*b, 4)
        assert same_masks(masks_of(a[0]), masks_of(b[0])) and all(torch.equal(p,q) for p,q in zip(a[0].parameters(), b[0].parameters()))

def test_an_error_in_the_forward_leaves_the_weight():
    "The parameter is back in its place after a forward that failed"
    net = nn.Linear(4, 4)
    p = net.weight
    learn_masks(net)
    with pytest.raises(RuntimeError): net(torch.randn(2,3))
    assert net.weight is p and 'weight' not in vars(net)

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
    sp, = learn_masks(net, **dict(TopKAST_presets, sparseness='top 0.25', backward_sparseness='top 0.5', penalty=partial(explore_decay, decay=.5), rescale=False))
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

def test_supermask_leaves_weights():
    "Scores learn, weights stay; their size is Kaiming's"
    net = mlp()
    for l in net[::2]: signed_constant_(l.weight)
    assert torch.allclose(net[0].weight.abs(), torch.tensor((2/6)**.5))
    learn_masks(net, **supermask_presets)
    w,s = net[0].weight.clone(),net[0].weight_sparsifier.score.clone()
    train(net, torch.optim.SGD(net.parameters(), lr=.1, momentum=.9, weight_decay=.1), 3, *data(net))
    assert torch.equal(net[0].weight, w) and not torch.equal(net[0].weight_sparsifier.score, s)

@pytest.mark.parametrize('spec,what', [('2:4',r'2\.weight: 2:4 needs an axis 1 that 4 divides'), ('2:4',r'2\.weight: 2:4 needs'), ({'lm_haed':None,'0.weight':None},'no weights'), ({'0.weight':None},'no weights'), ('x','structure is')])
def test_learn_masks_refuses(spec, what):
    "Law 10: named, and before anything changed"
    net = mlp((8,7,3))
    keys = set(net.state_dict())
    with pytest.raises(ValueError, match=what): learn_masks(net, spec)
    assert set(net.state_dict())==keys and not any(m._forward_pre_hooks for m in net.modules())

def test_a_mistyped_setting_of_learned_masks_is_guessed():
    with pytest.raises(TypeError, match="'scor_func' is no setting of learned masks: did you mean 'score_func'"): learn_masks(mlp(), scor_func=abs)

def test_keys_do_not_depend_on_sparsity():
    "Trap 9: dense, half and fully dead masks are all saved, and each loads into each"
    nets = []
    for spec in ('dense','top 0.5','top 0.0','top 1.0 (M)'):
        nets.append(mlp())
        learn_masks(nets[-1], spec, seed=0)
    for a in nets:
        b = mlp(seed=1)
        learn_masks(b, 'bernoulli')
        b.load_state_dict(a.state_dict())
        assert a.state_dict().keys()==nets[0].state_dict().keys() and same_masks(masks_of(a), masks_of(b))
        assert torch.equal(a.eval()(torch.ones(2,6)), b.eval()(torch.ones(2,6)))

def test_weights_can_be_written():
    "Trap 14: what is written into `.weight`, in place or through `.data`, is what the next forward masks (004 lost it)"
    layer = nn.Linear(4, 2, bias=False)
    learn_masks(layer, 'top 0.5', score_func=own_magnitude, seed=0)
    layer.weight.data.copy_(torch.tensor([[4.,3.,2.,1.],[0.,-9.,0.,8.]]))
    assert layer(torch.ones(1,4)).tolist()==[[7.,-1.]]
    with torch.no_grad(): layer.weight.zero_()
    assert layer(torch.ones(1,4)).tolist()==[[0.,0.]]

def test_one_master():
    "Learned masks on a sparse model, twice, folding nothing, and enforcement beside them are refused"
    net = mlp()
    sparsify_model(net, .5, seed=0)
    with pytest.raises(ValueError, match='unsparsify'): learn_masks(net)
    net = mlp()
    with pytest.raises(ValueError, match='learn_masks'): fold_masks(net)
    learn_masks(net)
    with pytest.raises(ValueError, match='fold_masks'): learn_masks(net)
    enforce_masks(net)
    with pytest.raises(RuntimeError, match='fold_masks'): net(torch.randn(2,6))

def test_rules_choose():
    "The first rule that names a weight decides, as everywhere; None leaves dense; without rules, what sparsify_model would choose"
    net = nn.ModuleDict(dict(emb=nn.Embedding(6,4), body=mlp((4,4,4)), lm_head=nn.Linear(4,6)))
    sps = learn_masks(net, {'body':'1:4', 'lm_head':None, lambda name,p: True:'top 0.5'})
    assert [(str(sp.sparseness),tuple(sp.score.shape)) for sp in sps]==[('top 0.5',(6,4))]+[('1:4',(4,4))]*2
    with pytest.warns(UserWarning, match="'lm_haed' serves no parameter"): learn_masks(mlp((4,4)), {'lm_haed':None, '*':'2:4'})
    net = nn.ModuleDict(dict(emb=nn.Embedding(6,4), body=mlp((4,4,4))))
    assert len(learn_masks(net, 'top 0.5'))==2
    assert effective_weight(net['emb']) is net['emb'].weight
    o = net['body'][0]
    assert torch.equal(effective_weight(o), o.weight*o.weight_mask)

def test_bernoulli_folds():
    "The last mask of training is the one of evaluation, and the one that stays"
    net,x = mlp(),torch.randn(5,6)
    sps = learn_masks(net, 'bernoulli', 'joint', seed=0)
    net(x)
    masks = masks_of(net)
    y = net.eval()(x)
    fold_masks(net)
    assert torch.equal(net(x), y) and same_masks(masks, masks_of(net)) and 0<sum(int(m.sum()) for m in masks)<sum(m.numel() for m in masks) and len(sps)==3
    assert_dead(net)

def _learner(net, **kwargs):
    g = torch.Generator().manual_seed(0)
    ds = TensorData(torch.randn(24, 6, generator=g), torch.randn(24, 3, generator=g))
    dls = DataLoaders(DataLoader(ds, bs=4), DataLoader(ds, bs=8))
    return Learner(dls, net, loss_func=nn.MSELoss(), opt_func=partial(SGD, mom=.9), lr=.1, **kwargs)

def test_callback_follows_schedules(tmp_path):
    "Density and mode by functions of the step, the penalty in the loss; validation, get_preds and lr_find leave masks and step"
    learn = _learner(mlp(), path=tmp_path)
    learn_masks(learn, score_func=own_magnitude, backward_sparseness='dense', penalty=dead_decay, seed=0)
    seen = []
    class Look(Callback):
        def after_batch(self):
            if self.training: seen.append(sparsifiers(self.learn.model)[0].density)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, cbs=[LearnedMaskCallback(density=lambda t: 1-t/24, backward_mode=lambda t: 'joint' if t>5 else 'STE'), Look()])
        assert seen==[round((1-t/24)*48)/48 for t in range(12)] and sparsifiers(learn.model)[1].backward_mode=='joint'
        state = copy.deepcopy(learn.model.state_dict())
        learn.validate()
        learn.get_preds()
        learn.lr_find(num_it=5, show_plot=False)
    now = learn.model.state_dict()
    assert all(torch.equal(v, now[k]) if isinstance(v, torch.Tensor) else v==now[k] for k,v in state.items())
    learn.save('m')
    learn.export(tmp_path/'m.pkl')
    other = load_learner(tmp_path/'m.pkl')
    assert same_masks(masks_of(other.model), masks_of(learn.model)) and torch.equal(other.model.eval()(torch.ones(2,6)), learn.model.eval()(torch.ones(2,6)))
    learn.load('m')

schedules = [ConstantSchedule(.3), LinearSchedule(1., -.05), ExpSchedule(1., -.1, .2), PowerSchedule(1., .9), CosineDecaySchedule(.9, .5, .1),
    CosineSchedule(.8, epochs(1), .2), CubicSchedule(1., .2), SawtoothSchedule(.2, .8, epochs(1)), PiecewiseSchedule((.9,.5,.2), (epochs(.5),samples(32))),
    CyclingSchedule((.5,.25,.75)), SquareSchedule(.2, .9, steps(3)), FunctionSchedule(lambda step: 1/(step+1)), PositionSchedule(lambda pos: 1-pos/2)]

@pytest.mark.parametrize('schedule', schedules, ids=lambda o: type(o).__name__)
def test_any_schedule(schedule):
    "Times in epochs, samples and fractions are those of the fit; trap 7: densities are read anew at every step"
    learn,seen = _learner(mlp()),[]
    learn_masks(learn, seed=0)
    class Look(Callback):
        def after_batch(self):
            if self.training: seen.append([sp.density for sp in sparsifiers(self.learn.model)])
    with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=[LearnedMaskCallback(density=schedule), Look()])
    values = [schedule.bind(n_steps=12, batch_size=4, steps_per_epoch=6)(t, t) for t in range(12)]
    assert seen==[[round(v*n)/n for n in (48,56,21)] for v in values]

def test_a_learner_that_was_fit_learns_scores():
    "Its optimizer is made anew, with the scores in it; a scheduled mode finds them there too"
    learn = _learner(mlp())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        sps = learn_masks(learn, **supermask_presets)
        old = [sp.score.clone() for sp in sps]
        learn.fit(1)
        assert not any(torch.equal(o, sp.score) for o,sp in zip(old, sps))
        update_all(sparsifiers(learn.model), backward_mode='STE')
        old,w = [sp.score.clone() for sp in sps],learn.model[0].weight.clone()
        learn.fit(1, cbs=LearnedMaskCallback(density=lambda t, n_updates: .5-t/100))
        w2 = learn.model[0].weight.clone()
        assert all(torch.equal(o, sp.score) for o,sp in zip(old, sps))
        learn.fit(1, cbs=LearnedMaskCallback(backward_mode=lambda t: 'supermask'))
        assert torch.equal(w2, learn.model[0].weight)
    assert not any(torch.equal(o, sp.score) for o,sp in zip(old, sps)) and not torch.equal(w, w2)
    assert str(sps[0].sparseness)=='top 0.45'

@pytest.mark.parametrize('mask', [False,True])
def test_encoders_with_padding(mask):
    "A stack of transformer layers in evaluation, with and without a padding mask"
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    learn_masks(net, 'top 0.2', seed=0)
    x,pad = torch.randn(2,5,8),torch.tensor([[False]*5,[False]*3+[True]*2]) if mask else None
    net.eval()
    with torch.no_grad(): before = net(x, src_key_padding_mask=pad)
    fold_masks(net)
    with torch.no_grad(): after = net(x, src_key_padding_mask=pad)
    live = slice(None) if pad is None else ~pad
    assert torch.allclose(before[live], after[live], atol=1e-5)

def test_after_folding_training_goes_on():
    "Fixed masks hold, RigL moves them, and unsparsify leaves plain weights with equal outputs"
    learn = _learner(mlp())
    learn_masks(learn, **dict(STE_presets, sparseness='top 0.5'), seed=0)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        fold_masks(learn)
        masks = masks_of(learn.model)
        learn.fit(1)
        assert same_masks(masks, masks_of(learn.model))
        assert_dead(learn.model, learn.opt)
        learn.fit(2, cbs=DynamicSparseTrainingCallback(**dict(RigL_presets, batches_per_update=3)))
    assert not same_masks(masks, masks_of(learn.model)) and [int(m.sum()) for m in masks]==[int(m.sum()) for m in masks_of(learn.model)]
    assert_dead(learn.model)
    x = torch.randn(3,6)
    y = learn.model(x)
    unsparsify(learn.model)
    assert torch.equal(learn.model(x), y) and set(learn.model.state_dict())==set(mlp().state_dict())

@pytest.mark.parametrize('change', ['step','schedule'])
@pytest.mark.parametrize('mode', ['supermask','joint'])
def test_scores_learn_when_the_mode_is_changed_later(mode, change):
    "A Learner that was fit before holds the scores from the start: they rest while 'STE', and learn from the change on"
    learn = _learner(mlp())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        sps = learn_masks(learn, 'top 0.5', seed=0)
        start = [sp.score.clone() for sp in sps]
        learn.fit(1)
        assert all(torch.equal(o, sp.score) for o,sp in zip(start, sps))
        if change=='step': update_all(sparsifiers(learn.model), backward_mode=mode)
        learn.fit(2, cbs=LearnedMaskCallback(backward_mode=lambda t: 'STE' if t<4 else mode) if change=='schedule' else [])
    assert not any(torch.equal(o, sp.score) for o,sp in zip(start, sps))

def test_unsparsify_refuses_learned_masks():
    "Half a removal would leave hooks without masks: nothing is changed, and fold_masks is named"
    net,x = mlp(),torch.randn(4,6)
    learn_masks(net, 'top 0.5', seed=0)
    net.eval()
    y,keys = net(x),set(net.state_dict())
    with pytest.raises(ValueError, match=r'0\.weight has a learned mask.*fold_masks'): unsparsify(net)
    with pytest.raises(ValueError, match=r'2\.weight has a learned mask.*fold_masks'): unsparsify_parameter(net, '2.weight')
    assert torch.equal(net(x), y) and set(net.state_dict())==keys
    fold_masks(net)
    unsparsify(net)
    assert torch.equal(net(x), y)

def _wrapped(net, reentrant):
    f = partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    return lambda x: f(net, x)

@pytest.mark.parametrize('reentrant', [False,True])
@pytest.mark.parametrize('mode', ['STE','joint'])
def test_checkpointing_counts_a_step_once(mode, reentrant):
    "The forward that runs again in the backward uses the mask of the first, so gradients are those without checkpointing"
    nets = [mlp(),mlp()]
    for net in nets: learn_masks(net, 'bernoulli', mode, seed=0)
    g = torch.Generator().manual_seed(0)
    for t in range(3):
        x = torch.randn(4,6, generator=g).requires_grad_()
        for net,f in zip(nets, (nets[0], _wrapped(nets[1], reentrant))): f(x).square().sum().backward()
        assert [sp.step for sp in sparsifiers(nets[1])]==[t+1]*3 and same_masks(masks_of(nets[0]), masks_of(nets[1]))
        for a,b in zip(*[net.parameters() for net in nets]): assert (a.grad is None)==(b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))

def test_a_callback_without_masks_says_so():
    "A schedule that would change nothing is refused before training"
    learn = _learner(mlp())
    w = learn.model[0].weight.clone()
    with learn.no_bar(), learn.no_logging(), pytest.raises(ValueError, match='no learned masks.*learn_masks'): learn.fit(1, cbs=LearnedMaskCallback(density=lambda t: .5))
    assert torch.equal(w, learn.model[0].weight)

class Reusing(nn.Module):
    "Two layers share a weight, and a cell runs in a loop"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.cell = nn.Linear(6,6,bias=False),nn.Linear(6,6,bias=False),nn.RNNCell(6,6)
        self.b.weight = self.a.weight
    def forward(self, x):
        self.seen = []
        for f in (self.a, self.b): self.seen.append(f(torch.eye(6))!=0)
        h = torch.zeros_like(x)
        for _ in range(3): h = self.cell(x, h)
        return h+self.b(self.a(x))

def test_one_step_a_forward():
    "A weight that is used many times in a forward has one mask in it, drawn anew for the next; a part that runs alone counts its own"
    torch.manual_seed(0)
    net = Reusing()
    sps = learn_masks(net, 'bernoulli', 'joint', seed=0)
    masks = []
    for t in range(3):
        net(torch.randn(2,6)).sum().backward()
        masks.append(net.a.weight_mask.clone())
        assert torch.equal(net.seen[0], net.seen[1]) and torch.equal(net.seen[0], masks[-1].T) and [sp.step for sp in sps]==[t+1]*3
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    with pytest.raises(RuntimeError): net(torch.randn(2,5))
    net.cell(torch.randn(2,6))
    net.cell(torch.randn(2,6))
    assert [sp.step for sp in sps]==[4,6,6]  # the forward that failed reached the cell
    twin = pickle.loads(pickle.dumps(net))
    twin(torch.randn(2,6))
    assert [sp.step for sp in sparsifiers(twin)]==[5,7,7] and [sp.step for sp in sps]==[4,6,6]
    fold_masks(twin)
    assert not any(type(getattr(h, '__self__', h)).__module__=='fastsparse.train.learned' for m in twin.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))

@pytest.mark.parametrize('spec,text', kinds)
def test_a_kind_comes_back_from_a_state_dict(spec, text):
    "Masks are legal for the structure, and settings are read from their text"
    kind,net,other = as_sparseness(spec),nn.Linear(8,4),nn.Linear(8,4)
    sp, = learn_masks(net, kind, seed=0)
    other_sp, = learn_masks(other, 'dense', seed=1)
    other.load_state_dict(net.state_dict())
    assert other_sp.sparseness==sp.sparseness and torch.equal(net.weight_mask, other.weight_mask)
    if isinstance(kind, TopOf):
        s = kind.structure
        assert s.legal(net.weight_mask) and torch.equal(net.weight_mask, s.top(sp.score, count_live(net.weight_mask)))

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

def test_structures_count_along_the_layers_axes():
    "Fan-in of a transposed convolution is an output's, and N:M goes along its inputs"
    net = nn.ConvTranspose2d(8, 4, 3)
    learn_masks(net, 'top .25 fan-in', seed=0)
    assert (net.weight_mask.sum((0,2,3))==18).all()
    net = nn.ConvTranspose2d(8, 4, 3)
    learn_masks(net, '2:4', seed=0)
    assert (net.weight_mask.unflatten(0, (2,4)).sum(1)==2).all()

@pytest.mark.parametrize('k', [.1,.5])
def test_supermask_scale_by_density(k):
    "edge-popup's scaled constant is sqrt(2/(k*fan_in)) (arXiv:1911.13299)"
    net = nn.Linear(100, 50)
    signs = net.weight.detach().sign()
    signed_constant_(net.weight)
    learn_masks(net, **dict(supermask_presets, sparseness=f'top {k}'), seed=0)
    assert torch.allclose(net.weight, signs*math.sqrt(2/(k*100)))

def test_topkast_begins_with_the_dense_signal():
    "The live weights' sum of squares is the dense weight's, so activations start with the dense network's size; masks are those without the scale"
    torch.manual_seed(0)
    net = nn.Linear(400, 300)
    dense,again = net.weight.detach().clone(),copy.deepcopy(net)
    learn_masks(net, **dict(TopKAST_presets, sparseness='top .05'), seed=0)
    learn_masks(again, **dict(TopKAST_presets, sparseness='top .05', rescale=False), seed=0)
    assert torch.equal(net.weight_mask, again.weight_mask) and torch.equal(again.weight, dense)
    assert effective_weight(net).norm().item()==pytest.approx(dense.norm().item(), rel=1e-5)
    assert torch.allclose(net.weight/dense, (net.weight/dense).mean()) and torch.equal(net.weight_sparsifier.score, net.weight.abs())

def test_masks_are_refreshed_in_a_short_fit():
    "`every` above a thirtieth of the fit is lowered for that fit, and is what it was afterwards; None leaves it"
    for refreshes,every in ((30,2), (10,6), (None,100), (1,60)):
        seen = []
        class See(Callback):
            run_valid = False
            def before_batch(self): seen.append(sparsifiers(self.model)[0].every)
        learn = small_learner(20)
        learn_masks(learn, **dict(TopKAST_presets, sparseness='top .5'))
        learn.fit(3, cbs=[LearnedMaskCallback(refreshes=refreshes), See()])
        assert set(seen)=={every} and len(seen)==60 and sparsifiers(learn.model)[0].every==100

def small_learner(n):
    "A learner of `n` batches"
    dl = DataLoader([(torch.randn(8), torch.randn(1)) for _ in range(n*4)], bs=4)
    learn = Learner(DataLoaders(dl, dl), mlp((8,8,1)), loss_func=nn.MSELoss(), opt_func=SGD)
    learn.remove_cbs(learn.cbs[1:])
    return learn

def test_learned_masks_of_unknown_layers():
    "also= brings a raw parameter in; without it the largest that stay dense are named"
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(64,8))
        def forward(self, x): return x@self.kernel
    build = lambda: nn.Sequential(nn.Linear(8,64), Raw())
    m = build()
    sps = learn_masks(m, '2:4', also='*.kernel', seed=0)
    m(torch.randn(2,8))
    assert len(sps)==2 and int(m[1].kernel_mask.sum())==256
    with pytest.warns(UserWarning, match='1.kernel .*also='): assert len(learn_masks(build(), 'top .5'))==1

@pytest.mark.parametrize('mode', ['supermask','joint','STE'])
@pytest.mark.parametrize('made', ['before','after'])
def test_scores_that_nobody_trains(mode, made):
    "An optimizer made before `learn_masks` doesn't hold the scores, so that masks would never move: said once for each weight, where scores are to learn"
    m = nn.Sequential(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,2))
    make = lambda: torch.optim.SGD(m.parameters(), lr=.1)
    opt = make() if made=='before' else None
    learn_masks(m, 'top .5', mode, seed=0)
    opt = opt or make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for _ in range(80):
            opt.zero_grad()
            m(torch.randn(4,8)).square().sum().backward()
            opt.step()
    said = [w for w in told if 'make the optimizer after learn_masks' in str(w.message)]
    assert len(said)==(2 if made=='before' and mode!='STE' else 0)

def learned_net():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(6,16), nn.Tanh(), nn.Linear(16,4))
    learn_masks(m, 'top 0.3', 'supermask', seed=0)
    return m,torch.optim.Adam(m.parameters(), lr=.03)

def train_learned(m, opt, n):
    x = torch.linspace(-1, 1, 120).view(20, 6)
    for _ in range(n):
        (m(x)-x[:,:4]).square().mean().backward()
        opt.step()
        opt.zero_grad()

def test_a_run_in_a_file_goes_on_bit_for_bit_with_the_values_of_dead_weights(tmp_path):
    "They may come back, so they are part of the run; `rewind` and `apply_masks` leave them alone too"
    (m,opt),(a,other) = learned_net(),learned_net()
    train_learned(m, opt, 10)
    save_run(tmp_path/'run', m, opt)
    load_run(tmp_path/'run', a, other)
    assert a[0].weight.count_nonzero()==96
    for o in ((m, opt), (a, other)): train_learned(*o, 20)
    assert agree(dict(m.state_dict()), dict(a.state_dict()))
    apply_masks(a)
    rewind(a, m.state_dict())
    assert a[0].weight.count_nonzero()==96

def test_what_needs_zeros_refuses_learned_masks_before_anything_changed():
    for f in (lambda m, opt: prune_to(m, .9), lambda m, opt: DynamicSparseTraining(m, opt, 20, method='set', batches_per_update=2)):
        m,opt = learned_net()
        train_learned(m, opt, 1)
        before = copy.deepcopy(dict(m.state_dict()))
        with pytest.raises(ValueError, match='0.weight has a learned mask: call fold_masks'): f(m, opt)
        assert agree(dict(m.state_dict()), before)

class ByHand(nn.Module):
    "Multiplies by its layer's weight itself"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x): return x@self.layer.weight.t()

def test_a_learned_mask_that_cannot_act_is_told_once():
    "The layer's own forward never runs, so its weight would train dense in silence"
    m,x = ByHand(),torch.randn(4,8)
    learn_masks(m, 'top 0.2', seed=1)
    with pytest.warns(UserWarning, match='1 of 1 weights with learned masks were not used.*include='): m(x)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        m(x)
        usual = nn.Sequential(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,8))
        learn_masks(usual, 'top 0.2', seed=1)
        usual(x).sum().backward()
