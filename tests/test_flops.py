"FLOP counts: worked out by hand, against torch's own counter and the RigL paper's numbers, and without side effects"
import copy,gc,pickle,pytest,random,torch,weakref
import numpy as np, torch.nn.functional as F
from contextlib import nullcontext
from fastai.callback.core import *
from fastai.callback.schedule import *
from fastai.callback.tracker import TrackerCallback
from fastai.callback.training import GradientAccumulation,GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner,load_learner
from fastai.test_utils import synth_learner
from fastai.torch_core import to_device
from fastcore.basics import tuplify
from fastsparse.report.flops import count_flops,flop_profile,FlopsCounter,train_flops
from fastsparse.train.presets import RigL_presets,SET_presets
from fastsparse.masks.scores import fisher_saliency,MeanGradient,MovingGradient,Sampled
from fastsparse.core.registry import declares
from functools import partial
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence,pack_sequence
from torch.utils.flop_counter import FlopCounterMode

ones = torch.ones

def mask_all(model, sparsity=.8, seed=0):
    "Give every weight of two or more dimensions a random mask, in its own memory layout; returns `model`"
    g = torch.Generator().manual_seed(seed)
    for m in model.modules():
        for n,p in list(m._parameters.items()):
            if p is None or p.ndim<2: continue
            mask = torch.empty_like(p, dtype=torch.bool, requires_grad=False)
            m.register_buffer(f'{n}_mask', mask.copy_(torch.rand(p.shape, generator=g)>=sparsity))
    return model

def live(m, name='weight'): return int(getattr(m, f'{name}_mask').sum())
def dense(m, name='weight'): return getattr(m, name).numel()

# ---- Hand-worked numbers ----

layers = [
    # the 2 of a multiply-add * places where the weight is read * entries of the weight
    (nn.Linear(5,3), ones(4,5), 2*4*15),
    (nn.Linear(5,3), ones(5), 2*1*15),
    (nn.Linear(5,3), ones(4,7,5), 2*28*15),
    (nn.Linear(5,3,bias=False), ones(5,7,4).permute(2,1,0), 2*28*15),
    (nn.Conv1d(4,6,3), ones(2,4,10), 2*2*8*(6*4*3)),
    (nn.Conv1d(4,6,3,stride=2,padding=1), ones(2,4,10), 2*2*5*(6*4*3)),
    (nn.Conv1d(4,6,3,dilation=2), ones(2,4,10), 2*2*6*(6*4*3)),
    (nn.Conv1d(4,6,3,groups=2), ones(2,4,10), 2*2*8*(6*2*3)),
    (nn.Conv2d(3,8,3), ones(1,3,8,10), 2*6*8*(8*3*9)),
    (nn.Conv2d(3,8,3), ones(3,8,10), 2*6*8*(8*3*9)),
    (nn.Conv2d(3,8,(3,1),stride=(2,3),padding=(1,0)), ones(2,3,8,10), 2*2*4*4*(8*3*3)),
    (nn.Conv2d(3,8,3,padding='same',padding_mode='circular'), ones(2,3,8,10), 2*2*8*10*(8*3*9)),
    (nn.Conv2d(6,6,3,groups=6), ones(1,6,8,8), 2*6*6*(6*9)),
    (nn.Conv2d(1,3,3), ones(1,1,26,26), 2*24*24*27),
    (nn.Conv3d(2,4,3,padding=1,stride=2), ones(1,2,6,8,8), 2*3*4*4*(4*2*27)),
    (nn.Conv3d(2,4,3,dilation=2,groups=2), ones(1,2,6,8,8), 2*2*4*4*(4*1*27)),
    # a transposed convolution reads its weight once for each input place
    (nn.ConvTranspose1d(4,6,3,stride=2), ones(2,4,10), 2*2*10*(4*6*3)),
    (nn.ConvTranspose2d(4,6,3,stride=2,padding=1,output_padding=1), ones(2,4,5,5), 2*2*25*(4*6*9)),
    (nn.ConvTranspose2d(4,6,3,groups=2,dilation=2), ones(1,4,5,5), 2*25*(4*3*9)),
    (nn.ConvTranspose3d(2,3,2), ones(1,2,3,4,5), 2*60*(2*3*8)),
    (nn.Bilinear(5,4,3), (ones(7,5),ones(7,4)), 2*7*60)]

@pytest.mark.parametrize('m,xb,want', layers, ids=[f'{i}-{type(o[0]).__name__}' for i,o in enumerate(layers)])
def test_layers(m, xb, want):
    "Products and convolutions cost 2 * places * weights, and with a mask exactly the live share of that"
    m = mask_all(copy.deepcopy(m))
    assert count_flops(m, xb)==want
    assert count_flops(m, xb, sparse=True)==want//dense(m)*live(m)
    assert isinstance(count_flops(m, xb, sparse=True), int)

@pytest.mark.parametrize('training', [True,False])
@pytest.mark.parametrize('batch_first', [True,False])
def test_self_attention(training, batch_first):
    "In- and out-projection and the two products of scores, with and without the fast path and returned weights; each with its own mask"
    m = mask_all(nn.MultiheadAttention(8, 2, batch_first=batch_first)).train(training)
    x = ones(3,6,8) if batch_first else ones(6,3,8)
    scores = 2*(2*3*6*6*8)
    for need_weights in (True,False):
        xb = dict(query=x, key=x, value=x, need_weights=need_weights)
        assert count_flops(m, xb)==2*18*(3*64+64)+scores
        assert count_flops(m, xb, sparse=True)==2*18*(live(m,'in_proj_weight')+live(m.out_proj))+scores

def test_cross_attention():
    "Queries and keys of other lengths read their own rows of in_proj_weight"
    m = mask_all(nn.MultiheadAttention(8, 2, batch_first=True))
    q,kv = ones(2,5,8),ones(2,9,8)
    scores = 2*2*(2*5*9*8)
    mask = m.in_proj_weight_mask
    assert count_flops(m, (q,kv,kv))==2*(10*64+18*128+10*64)+scores
    assert count_flops(m, (q,kv,kv), sparse=True)==2*(10*int(mask[:8].sum())+18*int(mask[8:].sum())+10*live(m.out_proj))+scores

def test_attention_with_kdim_vdim():
    "Separate q, k and v weights"
    m = mask_all(nn.MultiheadAttention(8, 2, kdim=6, vdim=10, batch_first=True))
    xb = ones(2,5,8),ones(2,9,6),ones(2,9,10)
    scores = 2*2*(2*5*9*8)
    assert count_flops(m, xb)==2*(10*64+18*48+18*80+10*64)+scores
    qkv = 10*live(m,'q_proj_weight')+18*live(m,'k_proj_weight')+18*live(m,'v_proj_weight')
    assert count_flops(m, xb, sparse=True)==2*(qkv+10*live(m.out_proj))+scores

def test_transformer_in_evaluation():
    "torch's fast paths, with padding as nested tensors, would hide everything; the count is the same in train and eval"
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    m = mask_all(nn.TransformerEncoder(layer, 2))
    xb = dict(src=ones(2,5,8), src_key_padding_mask=torch.arange(5)[None].expand(2,5)>3)
    for training in (True,False):
        m.train(training)
        assert count_flops(m, xb)==2*2*(10*(4*64+2*128)+2*(2*5*5*8))
        assert count_flops(m, xb, sparse=True)==2*(10*sum(int(b.sum()) for n,b in m.named_buffers())+2*2*(2*5*5*8))

recurrent = [(nn.RNN,1,{}), (nn.GRU,3,{}), (nn.LSTM,4,{}), (nn.LSTM,4,dict(bidirectional=True)), (nn.GRU,3,dict(num_layers=3,bidirectional=True)),
    (nn.LSTM,4,dict(batch_first=True,bias=False)), (nn.LSTM,4,dict(num_layers=2,dropout=.5)), (nn.LSTM,4,dict(proj_size=3,num_layers=2,bidirectional=True))]

@pytest.mark.filterwarnings('ignore:LSTM with projections')
@pytest.mark.parametrize('cls,gates,kw', recurrent)
@pytest.mark.parametrize('packed', [False,True])
def test_recurrent(cls, gates, kw, packed):
    "Each element of a sequence meets each weight matrix once: layers, directions, projections, packed sequences, unbatched input"
    m = mask_all(cls(5, 6, **kw))
    layers,dirs,out = kw.get('num_layers', 1),1+kw.get('bidirectional', False),kw.get('proj_size') or 6
    weights = dirs*sum(gates*6*((out*dirs if i else 5)+out) + (out*6 if kw.get('proj_size') else 0) for i in range(layers))
    alive = sum(int(b.sum()) for b in m.buffers())
    x,n = (pack_sequence([ones(k,5) for k in (7,4,1)]),12) if packed else (ones(4,3,5),12)
    assert (count_flops(m, (x,)),count_flops(m, (x,), sparse=True))==(2*n*weights,2*n*alive)
    assert count_flops(m, x)==2*n*weights
    assert count_flops(m, dict(input=x))==2*n*weights
    if not packed: assert count_flops(m, x[:,0])==2*4*weights

@pytest.mark.parametrize('cls,gates', [(nn.RNNCell,1), (nn.GRUCell,3), (nn.LSTMCell,4)])
def test_cells(cls, gates):
    "Cells, once and unrolled: one entry in the profile for each weight, whatever the number of steps"
    m = mask_all(cls(5, 6))
    alive = live(m,'weight_ih')+live(m,'weight_hh')
    assert (count_flops(m, ones(3,5)),count_flops(m, ones(3,5), sparse=True))==(2*3*gates*66,2*3*alive)

    class Unrolled(nn.Module):
        def __init__(self): super().__init__(); self.cell = m  # chkstyle: ignore
        def forward(self, x):
            h = None
            for o in x: h = self.cell(o, h)
            return h
    profile = flop_profile(Unrolled(), ones(4,3,5))
    assert (profile.total(),profile.total(sparse=True),len(profile))==(4*2*3*gates*66,4*2*3*alive,2)

class Tied(nn.Module):
    "A weight that is used as it is and transposed, with one mask"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4,4),nn.Linear(4,4)
        self.b.weight = self.a.weight
    def forward(self, x): return F.linear(self.b(self.a(x)), self.a.weight.t())

def test_tied_weights_count_at_every_use():
    "Three uses of one parameter, and the mask may be on the second of its owners"
    m = Tied()
    m.b.register_buffer('weight_mask', torch.eye(4).bool())
    assert (count_flops(m, ones(3,4)),count_flops(m, ones(3,4), sparse=True))==(3*2*3*16,3*2*3*4)

def test_recurrent_subclass():
    "What a subclass returns doesn't matter"
    class Last(nn.GRU):
        def forward(self, x): return super().forward(x)[0][-1]
    assert count_flops(Last(5,6), ones(4,3,5))==2*12*18*11

def test_meta_device():
    "A model too large for memory is counted by shapes"
    with torch.device('meta'): m = nn.Sequential(nn.Linear(50_000,10_000), nn.BatchNorm1d(10_000), nn.Unflatten(1,(10,1000)), nn.LSTM(1000,1000))
    assert count_flops(m, ones(64,50_000,device='meta'))==2*64*(50_000*10_000 + 10*8*1000*1000)

def test_tables_by_hand():
    "A whole net: 3x3 convolutions 3-32-128-512 on 10x10, pooled, and a linear layer"
    m = nn.Sequential(nn.Conv2d(3,32,3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32,128,3), nn.Conv2d(128,512,3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512,10))
    assert count_flops(m, ones(2,3,10,10))==2*2*(64*32*27 + 36*128*32*9 + 16*512*128*9 + 5120)

# ---- Other ways to reach a weight ----

class Uses(nn.Module):
    def __init__(self, f): super().__init__(); self.f,self.weight = f,nn.Parameter(ones(3,5))  # chkstyle: ignore
    def forward(self, x): return self.f(self.weight, x)

mask35 = torch.tensor([[1,1,0,0,0],[0,1,0,0,1],[0,0,0,0,1]]).bool()
ways = {  # chkstyle: ignore-node
    'matmul':    (lambda w,x: x@w.t(), 4*5),
    'einsum':    (lambda w,x: torch.einsum('bi,oi->bo', x, w), 4*5),
    'mv':        (lambda w,x: w@x[0], 5),
    'addmv':     (lambda w,x: torch.addmv(ones(3), w, x[0]), 5),
    'dot':       (lambda w,x: w[0]@x[0], 2),
    'rows':      (lambda w,x: x@w[:2].t(), 4*4),
    'columns':   (lambda w,x: x[:,:2]@w[:,:2].t(), 4*3),
    'steps':     (lambda w,x: x[:,::2]@w[:,::2].t(), 4*3),
    'expanded':  (lambda w,x: torch.bmm(x.expand(7,4,5), w.t().expand(7,5,3)), 7*4*5),
    'conv':      (lambda w,x: F.conv1d(x[:,:,None], w[:,:,None]), 4*5),
    'product':   (lambda w,x: F.linear(x, w*mask35), 4*5),
    'where':     (lambda w,x: F.linear(x, torch.where(mask35, w, 0.)), 4*5),
    'filled':    (lambda w,x: F.linear(x, w.masked_fill(~mask35, 0)), 4*5),
    'cast':      (lambda w,x: F.linear(x.double(), w.double()), 4*5),
    'copied':    (lambda w,x: x@w.t().contiguous(), 4*5),
    'copied 2x': (lambda w,x: (x@(w*2).t().clone())[:,1:]@(w*2).t().clone()[1:3,1:], 4*(5+1)),
    'dropped':   (lambda w,x: F.linear(x, F.dropout(w, .5, training=True)), 4*5),
    'detached':  (lambda w,x: F.linear(x, w.detach()), 4*5),
    'data':      (lambda w,x: F.linear(x, w.data), 4*5)}

@pytest.mark.parametrize('way', ways)
def test_views_and_copies_of_a_weight(way):
    "The entries that an operation really reads are counted: slices, transposes, expansions, casts, products with the mask"
    f,madds = ways[way]
    m = Uses(f)
    m.register_buffer('weight_mask', mask35)
    total = count_flops(m, ones(4,5))
    assert count_flops(m, ones(4,5), sparse=True)==2*madds
    m.weight_mask = torch.ones_like(mask35)
    assert count_flops(m, ones(4,5), sparse=True)==total>2*madds

def test_what_is_computed_otherwise_counts_dense():
    "`w+1` has no zeros"
    m = Uses(lambda w,x: F.linear(x, w+1))
    m.register_buffer('weight_mask', mask35)
    assert count_flops(m, ones(4,5), sparse=True)==count_flops(m, ones(4,5))==2*4*15

def test_layouts_may_differ():
    "channels_last weights with a contiguous mask, and the other way round; a grouped slice tells them apart"
    for fmt in (torch.channels_last,torch.contiguous_format):
        m = nn.Conv2d(4,6,3).to(memory_format=fmt)
        m.f = lambda x: F.conv2d(x, m.weight[1:4,:2])
        mask = torch.rand(6,4,3,3)<.5
        for o in (mask,mask.contiguous(memory_format=torch.channels_last)):
            m.register_buffer('weight_mask', o)
            m.forward = m.f
            assert count_flops(m, ones(1,2,3,3), sparse=True)==2*int(mask[1:4,:2].sum())

def test_several_parameters_in_one_storage():
    "As cuDNN lays out recurrent weights"
    m,flat = nn.Sequential(nn.Linear(4,4,bias=False), nn.Linear(4,4,bias=False)),ones(32)
    for i in range(2): m[i].weight.data = flat[i*16:(i+1)*16].view(4,4)
    m[1].register_buffer('weight_mask', torch.eye(4).bool())
    assert count_flops(m, ones(3,4), sparse=True)==2*3*(16+4)

def test_two_parameters_in_one_product():
    "The weight comes last: a learned input with a mask of its own scales nothing"
    m = Uses(lambda w,x: F.linear(m.start, w))
    m.start = nn.Parameter(ones(4,5))
    m.register_buffer('weight_mask', mask35)
    m.register_buffer('start_mask', torch.zeros(4,5).bool())
    assert count_flops(m, ones(4,5), sparse=True)==2*4*5
    m.f,m.vector = (lambda w,x: w@m.vector),nn.Parameter(ones(5))
    m.register_buffer('vector_mask', torch.zeros(5).bool())
    assert count_flops(m, ones(4,5), sparse=True)==2*5

def test_a_bias_with_a_mask_costs_nothing():
    m = nn.Linear(5,3)
    m.register_buffer('bias_mask', torch.tensor([True,False,False]))
    assert count_flops(m, ones(4,5), sparse=True)==2*4*15

@pytest.mark.parametrize('ctx', [torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.autocast('cpu', dtype=torch.bfloat16)])
def test_modes_around_the_count(ctx):
    "Composite operations under inference_mode, casts under autocast, also where autocast has the cast weight in its cache"
    m = mask_all(nn.Sequential(nn.Linear(5,6), nn.Conv1d(1,3,3), nn.Flatten(), nn.Linear(12,2)))
    x = ones(4,1,5)
    want = 2*4*live(m[0])+2*4*4*live(m[1])+2*4*live(m[3])
    plain,lstm,attn = nn.LSTM(5,3),mask_all(nn.LSTM(5,3)),mask_all(nn.MultiheadAttention(4,2))
    with ctx():
        m(x)
        assert count_flops(m, x, sparse=True)==want
        assert count_flops(attn, (ones(3,4),)*3, sparse=True)==2*3*(live(attn,'in_proj_weight')+live(attn.out_proj))+2*2*9*4
        try: plain(ones(7,2,5))
        except RuntimeError: pytest.skip("torch has no LSTM in bfloat16 on this processor")
        assert count_flops(lstm, ones(7,2,5), sparse=True)==2*14*sum(int(b.sum()) for b in lstm.buffers())

@pytest.mark.filterwarnings('ignore::UserWarning')
def test_compiled_and_scripted_models():
    m = nn.Sequential(nn.Linear(5,6), nn.ReLU(), nn.Linear(6,2))
    for o in (torch.jit.script(m), torch.compile(m, backend='eager')):
        assert count_flops(o, ones(4,5))==2*4*(30+12)
        assert o.training

def test_awd_lstm():
    "fastai's language model keeps its hidden state and drops weights that it computes: counted, and left as they were"
    from fastai.text.models.awdlstm import AWD_LSTM
    m = AWD_LSTM(20, 4, 6, 2)
    wrapped = [o for o in m.modules() if hasattr(o, 'weight_hh_l0_raw')]
    for o in wrapped: o.register_buffer('weight_hh_l0_raw_mask', torch.rand(o.weight_hh_l0_raw.shape)<.2)
    x = torch.zeros(3,7).long()
    m(x)
    hidden,bs,flat = m.hidden,m.bs,[list(o.module._flat_weights) for o in wrapped]
    dense_ih,dense_hh = 24*4+16*6,24*6+16*4
    for training in (True,False):
        m.train(training)
        assert count_flops(m, x)==2*21*(dense_ih+dense_hh)
        assert count_flops(m, x, sparse=True)==2*21*(dense_ih+sum(live(o,'weight_hh_l0_raw') for o in wrapped))
    assert m.hidden is hidden and m.bs==bs
    assert all(a is b for o,ws in zip(wrapped, flat) for a,b in zip(o.module._flat_weights, ws))

# ---- Against others ----

def test_agrees_with_torch():
    "The dense count is FlopCounterMode's, on fastai's xresnets and a transformer"
    from fastai.vision.models.xresnet import xresnet18,xresnet50
    nets = [(f().eval(), torch.randn(1,3,64,64)) for f in (xresnet18,xresnet50)] + [(nn.Transformer(8,2,2,2,16,batch_first=True), (ones(2,5,8),ones(2,4,8)))]
    for m,xb in nets:
        with FlopCounterMode(display=False) as counter: m(*tuplify(xb))
        assert count_flops(m, xb)==counter.get_total_flops()>0

def test_resnet50_costs_what_the_paper_says():
    "8.2e9 FLOPs for a 224x224 image (table 2 of arXiv:1911.11134), and live weights * places when sparse"
    resnet50 = pytest.importorskip('torchvision.models').resnet50
    m = resnet50().eval()
    profile = flop_profile(m, torch.zeros(1,3,224,224))
    assert profile.total()==8_178_368_512 and round(profile.total()/1e9, 1)==8.2
    mask_all(m)
    places = {v.name:n//v.numel for v,n in profile.items()}
    assert profile.total(sparse=True)==sum(n*live(m.get_submodule(k.rpartition('.')[0])) for k,n in places.items())

def test_uniform_sparsity_of_resnet50_in_the_paper():
    "At 0.8 uniform sparsity with a dense first layer inference costs 0.2231 times dense (.2 of all but conv1's 0.0289); table 2 says 0.23"
    resnet50 = pytest.importorskip('torchvision.models').resnet50
    m = resnet50().eval()
    profile = flop_profile(m, torch.zeros(1,3,224,224))
    m = mask_all(m, sparsity=.8)
    m.conv1.weight_mask.fill_(True)
    assert abs(profile.total(sparse=True)/profile.total()-.2231)<.0005

# ---- Profiles follow masks ----

def test_profile_follows_masks():
    "Masks that are written to, through a view, replaced, registered and removed after the profile was made; and nothing is counted anew without a change"
    m = nn.Linear(5,3)
    profile = flop_profile(m, ones(4,5))
    assert profile.total(sparse=True)==2*4*15
    m.register_buffer('weight_mask', mask35.clone())
    assert profile.total(sparse=True)==2*4*5
    m.weight_mask[0,4] = True
    assert profile.total(sparse=True)==2*4*6
    m.weight_mask.view(torch.uint8)[0,3] = 1
    assert profile.total(sparse=True)==2*4*7
    m.weight_mask = mask35.clone()
    assert profile.total(sparse=True)==2*4*5
    view, = profile
    view.live = lambda: 1/0
    assert profile.total(sparse=True)==2*4*5
    del view.live
    del m.weight_mask
    assert profile.total(sparse=True)==2*4*15==profile.total()

def test_masks_and_models_made_in_inference_mode():
    "Inference tensors count no writes; their masks are read each time"
    with torch.inference_mode():
        m = nn.Sequential(nn.Linear(5,3), nn.BatchNorm1d(3))
        m[0].register_buffer('weight_mask', mask35.clone())
        profile = flop_profile(m, ones(4,5))
        assert profile.total(sparse=True)==2*4*5
        m[0].weight_mask[0,4] = True
    assert profile.total(sparse=True)==2*4*6==count_flops(m, ones(4,5), sparse=True)

# ---- No side effects ----

class Noisy(nn.Module):
    "Does in its forward what a model had better not do"
    def __init__(self, fails=False):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1,4,3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.5), nn.Flatten(), nn.Linear(16,8))
        self.rnn,self.attn = nn.LSTM(8,4),nn.MultiheadAttention(4,2)
        self.register_buffer('calls', torch.zeros(()))
        self.fails,self.n,self.log,self.state = fails,0,[],{}
    def forward(self, x):
        self.calls += 1
        self.n += 1
        self.log.append(self.n)
        self.state['x'] = x
        torch.rand(1),random.random(),np.random.rand()
        self.body[1].running_mean.add_(1)
        self.train()
        x,_ = self.rnn(self.body(x))
        if self.fails: raise ZeroDivisionError
        return self.attn(x, x, x)[0]

def snapshot(m):
    "Everything that a count could disturb"
    def attribute(v): return type(v),v if isinstance(v, (int,float,str)) else [id(o) for o in v] if isinstance(v, (list,dict)) else id(v)
    seen = [{k:attribute(v) for k,v in vars(o).items()} for o in m.modules()]
    hooks = [[list(v) for k,v in vars(o).items() if k.endswith('hooks')] for o in m.modules()]
    tensors = [(t.clone(), t.requires_grad, t.data_ptr(), None if t.grad is None else t.grad.clone()) for t in [*m.parameters(), *m.buffers()]]
    rng = torch.get_rng_state(),random.getstate(),[*map(str, np.random.get_state())]
    flags = torch.is_grad_enabled(),torch.backends.mha.get_fastpath_enabled(),torch.is_autocast_cache_enabled(),torch._C._len_torch_dispatch_stack()
    return seen,hooks,tensors,rng,flags

def same(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, (tuple,list)): return len(a)==len(b) and all(map(same, a, b))
    return a==b

@pytest.mark.parametrize('fails', [False,True])
@pytest.mark.parametrize('training', [False,True])
@pytest.mark.parametrize('grad', [False,True])
def test_no_side_effects(fails, training, grad):
    "Flags of every submodule, other attributes, buffers, BatchNorm, gradients, hooks, three random states, grad mode and torch's switches, also after a failure"
    m = mask_all(Noisy())
    m(torch.randn(5,1,4,4)).sum().backward()
    m.train(training)
    m.body[1].train(not training)
    m.body.register_forward_hook(lambda *args: None)
    m.fails = fails
    with torch.set_grad_enabled(grad):
        before = snapshot(m)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext(): count_flops(m, torch.randn(5,1,4,4, generator=torch.Generator()), sparse=True)
        assert same(before, snapshot(m))
    assert [o.training for o in m.modules()]==[training,training,training,not training]+[training]*7

def test_no_eval_is_called():
    "Some models do more in `train` and `eval` than set flags (merge adapters, say): flags are set one by one"
    class Touchy(nn.Linear):
        def train(self, mode=True): raise AssertionError
    assert count_flops(Touchy(5,3), ones(4,5))==2*4*15

def test_autocast_still_trains_after_a_count():
    "Casts made without gradients in a count don't stay in autocast's cache"
    m = nn.Linear(5,3)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        count_flops(m, ones(4,5))
        m(ones(4,5)).sum().backward()
    assert m.weight.grad is not None

def test_a_profile_keeps_no_tensor_alive():
    "It can be kept for a long training: replaced weights and inputs go"
    m,x = nn.Linear(5,3),ones(4,5)
    profile,refs = flop_profile(m, x),[weakref.ref(o) for o in (m.weight,x)]
    m.weight = nn.Parameter(ones(3,5))
    del x
    gc.collect()
    assert profile.total()==2*4*15 and [r() for r in refs]==[None,None]

# ---- Inputs and errors ----

class Named(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(5,3)  # chkstyle: ignore
    def forward(self, x, scale=None, ys=()): return self.l(x)*(1 if scale is None else scale)

def test_kinds_of_input():
    "A tensor, positional and named inputs, a Learner, a wrapper"
    x = ones(4,5)
    for xb in (x, (x,), [x,2.], dict(x=x, scale=x[:,:3]), (x,None,[x,x])): assert count_flops(Named(), xb)==2*4*15
    assert count_flops(nn.DataParallel(Named()), x)==2*4*15
    learn = synth_learner()
    learn.model = Named()
    assert count_flops(learn, x)==2*4*15

def test_bad_input_is_named():
    m,x = nn.Linear(5,3),ones(4,5)
    with pytest.raises(TypeError, match='must be Tensor, not .*ndarray'): count_flops(m, np.ones((4,5)))
    with pytest.raises(TypeError, match='must be Tensor, not NoneType'): count_flops(m, None)
    with pytest.raises(TypeError, match='module or a Learner'): count_flops('model', x)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match='0.weight has no shape yet.*batch'): count_flops(lazy, x)
    assert isinstance(lazy[0], nn.LazyLinear)
    m.register_buffer('weight_mask', ones(3,4).bool())
    with pytest.raises(ValueError, match=r'weight_mask is a tensor of bool of shape \(3, 4\).*\(3, 5\)'): count_flops(m, x, sparse=True)
    nested = torch.nested.nested_tensor([ones(2,5),ones(3,5)], layout=torch.jagged)
    with pytest.raises(ValueError, match='nested.*padded'): count_flops(nn.Linear(5,3), nested)

# ---- While it trains ----

def mlp(): return nn.Sequential(nn.Linear(1,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,1))

def make_learner(model=None, n_trn=5, cbs=None, **kwargs):
    torch.manual_seed(0)
    learn = synth_learner(n_trn=n_trn, n_val=2, cbs=cbs, **kwargs)
    learn.model = model or mask_all(mlp(), .5)
    return learn

def fit(learn, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(*args, **kwargs)

class MoveMasks(Callback):
    "Draws new masks after each step, and adds up by hand what each batch cost"
    run_valid,want = False,0
    def after_pred(self): self.want += 2*16*sum(int(b.sum()) for n,b in self.model.named_buffers() if n.endswith('_mask'))
    def after_step(self):
        for n,b in self.model.named_buffers():
            if n.endswith('_mask'): b.copy_(torch.rand(b.shape)<random.random())

@pytest.mark.parametrize('given_to', ['learner','fit'])
def test_counter_follows_moving_masks(given_to):
    "The sum is that of the batches by hand, with masks that change at each step; the dense sum doesn't care"
    random.seed(0)
    fc,dense_fc,move = FlopsCounter(),FlopsCounter(sparse=False),MoveMasks()
    learn = make_learner(cbs=[fc,dense_fc,move] if given_to=='learner' else None)
    fit(learn, 3, cbs=None if given_to=='learner' else [fc,dense_fc,move])
    assert fc.fwd_train_flops()==move.want
    assert dense_fc.fwd_train_flops()==3*5*16*2*16
    assert isinstance(fc.fwd_train_flops(), int) and 'forward' not in vars(learn.model)

def test_only_training_counts(tmp_path):
    "`validate`, `get_preds` and `lr_find` before, between and after fits add nothing; fits add up"
    fc = FlopsCounter(verbose=True)
    learn = make_learner(cbs=fc, path=tmp_path)
    one = 5*16*2*sum(int(b.sum()) for n,b in learn.model.named_buffers() if n.endswith('_mask'))
    def others():
        with learn.no_bar(), learn.no_logging():
            assert len(learn.validate())==1
            learn.get_preds()
            learn.lr_find(show_plot=False, num_it=7)
    others()
    assert fc.fwd_train_flops()==0
    fit(learn, 1)
    assert fc.fwd_train_flops()==one
    others()
    fit(learn, 2)
    assert fc.fwd_train_flops()==3*one

def test_validate_inside_a_fit():
    "fastai's own nested validation runs before_fit and after_fit of every callback"
    class Validates(Callback):
        order,run_valid = 70,False
        def after_batch(self):
            if self.iter==2 and self.epoch==0:
                saved = {k:getattr(self.learn, k) for k in ('dl','xb','yb','pred','loss','iter','n_iter')}
                self.learn._do_epoch_validate()
                self.model.train()
                for k,v in (saved|dict(training=True)).items(): setattr(self.learn, k, v)
    fc = FlopsCounter(sparse=False)
    fit(make_learner(cbs=[fc,Validates()]), 2)
    assert fc.fwd_train_flops()==2*5*16*2*16

def test_counter_changes_nothing():
    "Weights, statistics and random state after a fit are the same bits with and without it, also under bfloat16 and with dropout, attention and recurrence"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.i,self.bn,self.o = nn.Linear(1,8),nn.BatchNorm1d(8),nn.Linear(8,1)
            self.rnn,self.attn = nn.GRU(8,8,2,dropout=.3),nn.MultiheadAttention(8,2,dropout=.1)
        def forward(self, x):
            x,_ = self.rnn(F.dropout(self.bn(self.i(x)), .2, self.training)[None])
            return self.o(self.attn(x, x, x)[0][0])
    class Bf16(Callback):
        order = 10
        def before_batch(self): self.autocast = torch.autocast('cpu', dtype=torch.bfloat16).__enter__()
        def after_pred(self): self.learn.pred = self.pred.float()
        def after_loss(self): self.autocast.__exit__(None, None, None)
    def run(*cbs):
        random.seed(0)
        torch.manual_seed(0)
        learn = make_learner(mask_all(Net()), cbs=[*cbs])
        fit(learn, 2)
        return [*learn.model.state_dict().values(), torch.get_rng_state()]
    for cbs in ([],[Bf16]):
        fc = FlopsCounter()
        assert all(map(torch.equal, run(*(o() for o in cbs)), run(*(o() for o in cbs), fc)))
        assert fc.fwd_train_flops()>0

def test_counter_counts_under_autocast():
    "Weights are known through their casts"
    class Bf16(Callback):
        order = 10
        def before_batch(self): self.autocast = torch.autocast('cpu', dtype=torch.bfloat16).__enter__()
        def after_pred(self): self.learn.pred = self.pred.float()
        def after_loss(self): self.autocast.__exit__(None, None, None)
    fc = FlopsCounter()
    learn = make_learner(cbs=[fc,Bf16()])
    fit(learn, 1)
    assert fc.fwd_train_flops()==5*16*2*sum(int(b.sum()) for n,b in learn.model.named_buffers() if n.endswith('_mask'))

class Lengths(nn.Module):
    "Packs by lengths that the shapes don't show"
    def __init__(self): super().__init__(); self.rnn,self.lengths = nn.RNN(1,4,batch_first=True),[]  # chkstyle: ignore
    def forward(self, x):
        n = len(self.lengths)%3+1
        self.lengths.append(n)
        packed = pack_padded_sequence(x[...,None].expand(16,3,1), torch.full((16,), n), batch_first=True)
        return self.rnn(packed)[1][0][:,:1]

def test_packed_lengths_count_each_time():
    fc = FlopsCounter()
    fit(make_learner(Lengths(), n_trn=6, cbs=fc), 1)
    assert fc.fwd_train_flops()==2*(1+2+3+1+2+3)*16*(4+16)

class Aux(nn.Module):
    "Like GoogLeNet: a second head, in training only"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(1,1),nn.Linear(1,1)  # chkstyle: ignore
    def forward(self, x): return self.a(x)+(self.b(x) if self.training else 0)

def test_what_training_really_does_counts():
    fc,m = FlopsCounter(),Aux()
    fit(make_learner(m, cbs=fc), 1)
    assert (fc.fwd_train_flops(),count_flops(m, ones(16,1)))==(5*2*16*2,2*16)

def test_root_that_is_recurrent():
    "A recurrent layer as the whole model"
    class First(Callback):
        def after_pred(self): self.learn.pred = self.pred[0][:,:1]
    fc = FlopsCounter()
    fit(make_learner(nn.LSTM(1,4), cbs=[fc,First()]), 1)
    assert fc.fwd_train_flops()==5*2*16*4*(4+16)

def test_new_shapes_and_models():
    "Batches of other shapes, and masks and layers that change between fits"
    class Cut(Callback):
        order,run_valid = 20,False
        def before_batch(self):
            n = 16-self.iter%2*6
            self.learn.xb,self.learn.yb = (self.x[:n],),(self.y[:n],)
    fc = FlopsCounter()
    learn = make_learner(nn.Linear(1,1), cbs=[fc,Cut()])
    fit(learn, 1)
    assert fc.fwd_train_flops()==2*(3*16+2*10)
    learn.model = nn.Sequential(nn.Linear(1,2), nn.Linear(2,1))
    learn.create_opt()
    fit(learn, 1)
    assert fc.fwd_train_flops()==2*(3*16+2*10)*(1+4)

@pytest.mark.parametrize('cancel', [CancelBatchException,CancelTrainException,CancelEpochException,CancelFitException])
def test_cancelled_batches(cancel):
    "Batches whose forward never ran don't count, and no trace is left in the model"
    class Cancels(Callback):
        order,run_valid = 99,False
        def before_batch(self):
            if self.iter==0: raise cancel
    fcs = FlopsCounter(),FlopsCounter(sparse=False)
    learn = make_learner(nn.Linear(1,1), cbs=[*fcs,Cancels()])
    fit(learn, 1)
    want = 4*16*2 if cancel is CancelBatchException else 0
    assert [o.fwd_train_flops() for o in fcs]==[want,want] and 'forward' not in vars(learn.model)

def test_nothing_but_cancelled_batches():
    class Cancels(Callback):
        order = 99
        def before_batch(self): raise CancelBatchException
    learn = make_learner(nn.Linear(1,1), cbs=[FlopsCounter(),FlopsCounter(sparse=False),Cancels()])
    fit(learn, 1)
    assert learn.flops_counter.fwd_train_flops()==0 and 'forward' not in vars(learn.model)

@pytest.mark.parametrize('error', [ZeroDivisionError,KeyboardInterrupt])
def test_a_forward_that_fails(error):
    "Also an interrupt in the middle of a forward leaves torch and the model as they were"
    class Fails(nn.Module):
        def __init__(self): super().__init__(); self.l,self.fails = nn.LSTM(1,1),True  # chkstyle: ignore
        def forward(self, x):
            if self.fails: raise error
            return self.l(x)[0]
    fc = FlopsCounter()
    learn = make_learner(Fails(), cbs=fc)
    with pytest.raises(error): fit(learn, 1)
    assert torch._C._len_torch_dispatch_stack()==0 and torch.backends.mha.get_fastpath_enabled()
    assert 'forward' not in {**vars(learn.model), **vars(learn.model.l)}
    learn.model.fails = False
    fit(learn, 1)
    assert fc.fwd_train_flops()==5*2*16*8

def test_gradient_accumulation_and_clipping():
    "Every batch has a forward, whether or not a step follows"
    fc = FlopsCounter()
    fit(make_learner(nn.Linear(1,1), cbs=[fc,GradientAccumulation(32),GradientClip(.1)]), 2)
    assert fc.fwd_train_flops()==2*5*2*16

def test_verbose_column(capsys):
    "The total stands behind the training loss; metrics, validate and trackers are as without it; nothing is printed"
    def mae2(p, y): return (p-y).abs().mean()
    learn = make_learner(nn.Linear(1,1), cbs=FlopsCounter(verbose=True), metrics=mae2)
    tracker = TrackerCallback(monitor='mae2', comp=np.less)
    fit(learn, 2, cbs=tracker)
    assert tracker.best==min(o[3] for o in learn.recorder.values)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','fwd_flops','valid_loss','mae2','time']
    assert [o[1] for o in learn.recorder.values]==[160,320]
    with learn.no_bar(), learn.no_logging(): assert len(learn.validate())==2
    assert capsys.readouterr().out==''

class Pairs:
    "Two tensors as a data set that `learn.export` can empty"
    def __init__(self, x, y): self.x,self.y = x,y
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]
    def new_empty(self): return Pairs(self.x[:0], self.y[:0])

@pytest.mark.filterwarnings('ignore:load_learner')
def test_pickle_and_export(tmp_path):
    "A counter that has run goes along with its learner, its sum too, but not its profiles; the loaded one counts on"
    dls = DataLoaders.from_dsets(*[Pairs(ones(32,1), ones(32,1))]*2, bs=16, num_workers=0)
    learn = Learner(dls, nn.Linear(1,1), loss_func=F.mse_loss, cbs=FlopsCounter(verbose=True), path=tmp_path)
    fit(learn, 1)
    learn.export()
    other = load_learner(tmp_path/'export.pkl')
    assert other.flops_counter.fwd_train_flops()==2*16*2 and not hasattr(other.flops_counter, 'profiles')
    assert pickle.loads(pickle.dumps(learn.flops_counter)).fwd_train_flops()==2*16*2
    other.dls = dls
    fit(other, 1)
    assert (other.flops_counter.fwd_train_flops(),learn.flops_counter.fwd_train_flops())==(2*2*16*2,2*16*2)

# ---- Training FLOPs ----

def momentum(p, **kwargs): return p
def gradient(p, **kwargs): return p
def magnitude(p, **kwargs): return p
declares(dense_history=True)(momentum)
declares(reads_grad=True)(gradient)

costs = [
    # the appendix of arXiv:1911.11134 for a sparse forward of 20 and a dense one of 100
    (None, 60), (dict(updates=[], grow_score_f=None), 60), (dict(batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=magnitude), 60),
    (dict(keep_score_f=magnitude, grow_score_f=None), 60),
    (dict(keep_score_f=gradient, grow_score_f=None, batches_per_update=100), 60),
    (dict(keep_score_f=magnitude, grow_score_f=gradient, batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=gradient, batches_per_update=1), (60+140)/2),
    (dict(keep_score_f=magnitude, grow_score_f=magnitude, redistribute_f=gradient, batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=momentum, redistribute_f=magnitude), 140),
    (dict(keep_score_f=momentum, grow_score_f=gradient, batches_per_update=100), 140),
    # a mean over the last k batches: k of 101 have a dense gradient, all where k exceeds the interval; a moving average reads them all
    (dict(keep_score_f=magnitude, grow_score_f=MeanGradient(8), batches_per_update=100), (93*60+8*140)/101),
    (dict(keep_score_f=MeanGradient(3), grow_score_f=gradient, batches_per_update=9), (7*60+3*140)/10),
    (dict(keep_score_f=magnitude, grow_score_f=MeanGradient(1), batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=MeanGradient(50), batches_per_update=9), 140),
    (dict(keep_score_f=magnitude, grow_score_f=Sampled(MovingGradient(.9))), 140),
    (dict(keep_score_f=fisher_saliency, grow_score_f=magnitude), 60),
    (dict(keep_score_f=fisher_saliency, grow_score_f=gradient, batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(grow_score_f=partial(momentum)), 140), (dict(grow_score_f=partial(gradient), batches_per_update=1), 100)]

@pytest.mark.parametrize('preset,want', costs)
def test_training_flops(preset, want): assert train_flops(20, 100, preset)==pytest.approx(want, rel=1e-12)

def test_training_flops_of_the_paper():
    "SET 60, SNFS 140, RigL 60.792; dense 3 times the forward; totals of a run as well as samples"
    rigl = dict(grow_score_f=gradient, batches_per_update=100)
    assert round(train_flops(20, 100, rigl), 3)==60.792
    assert train_flops(100, 100)==300
    assert train_flops(20*50, 100*50, rigl)==pytest.approx(50*train_flops(20, 100, rigl))

def test_training_flops_refuse():
    rigl = dict(grow_score_f=gradient)
    with pytest.raises(ValueError, match='batches_per_update is None'): train_flops(20, 100, rigl)
    with pytest.raises(ValueError, match='batches_per_update is None'): train_flops(20, 100, {})  # the callback's defaults grow by gradient
    with pytest.raises(ValueError, match=r'updates is \[5, 9\].*predict_cost'): train_flops(20, 100, dict(rigl, batches_per_update=4, updates=[5,9]))
    with pytest.raises(ValueError, match='batches_per_update is 0'): train_flops(20, 100, dict(rigl, batches_per_update=0))
    with pytest.raises(ValueError, match='sparse_fwd is 100.* 0 to 20'): train_flops(100, 20)
    with pytest.raises(ValueError, match='sparse_fwd is -1'): train_flops(-1, 20)
    with pytest.raises(ValueError, match="did you mean 'rigl'"): train_flops(20, 100, 'RigLe')

# ---- On a GPU ----

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('half', [False,True])
def test_same_counts_on_a_gpu(half):
    "Other kernels, same counts: cuDNN's recurrent layers and convolutions, fused attention and cells"
    attn = nn.MultiheadAttention(64, 4, batch_first=True)
    cases = [(nn.Conv2d(8,8,3), ones(2,8,9,9)), (nn.LSTM(8,8,2,bidirectional=True,proj_size=4), ones(5,3,8)), (nn.GRU(8,8), ones(5,3,8)),
        (nn.LSTMCell(8,8), ones(3,8)), (attn, dict(query=ones(2,8,64), key=ones(2,8,64), value=ones(2,8,64), need_weights=False)), (nn.Linear(8,8), ones(3,8))]
    for m,xb in cases:
        mask_all(m)
        want = count_flops(m, xb),count_flops(m, xb, sparse=True)
        m,state = m.cuda(),torch.cuda.get_rng_state()
        with torch.autocast('cuda', torch.float16, enabled=half): got = count_flops(m, to_device(xb, 'cuda')),count_flops(m, to_device(xb, 'cuda'), sparse=True)
        assert got==want and torch.equal(state, torch.cuda.get_rng_state())

def test_an_interval_knows_how_long_the_run_is():
    "RigL's 100 steps become fewer in a short run, and dense gradients come more often; a plain number is taken as it is"
    from fastsparse.all import Interval,RigL_presets
    every = Interval(100).resolve(400, .75)
    by_hand = 3*20+(100-20)/(every+1)
    assert every<100 and train_flops(20, 100, RigL_presets, n_steps=400)==by_hand
    assert train_flops(20, 100, RigL_presets(batches_per_update=100), n_steps=400)==train_flops(20, 100, RigL_presets)==3*20+80/101

def test_attention_products_stand_under_their_layer():
    "Scores and mixing read no weight: they are counted under the layer that makes them, and the total stays"
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn,self.head = nn.MultiheadAttention(8, 2, batch_first=True),nn.Linear(8,4)
        def forward(self, x): return self.head(self.attn(x, x, x)[0])
    m,x = mask_all(Block()),ones(1,5,8)
    profile = flop_profile(m, x)
    by_name = {repr(k):n for k,n in profile.items()}
    assert by_name['attn']==2*2*(5*5*8) and None not in profile and 'forward' not in vars(m.attn)
    assert profile.total()==2*5*(3*64+64+32)+by_name['attn']==count_flops(m, x)

def test_training_flops_by_name():
    "A preset's name stands for the preset"
    assert train_flops(10, 100, 'RigL')==train_flops(10, 100, RigL_presets) and train_flops(10, 100, 'set')==train_flops(10, 100, SET_presets)
