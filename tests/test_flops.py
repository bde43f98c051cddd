"FLOP counts: worked out by hand, against torch's own counter and the RigL paper's numbers, and without side effects"
import copy,gc,numpy as np,pytest,random,torch,torch.nn.functional as F,weakref
from contextlib import nullcontext
from fastai.test_utils import synth_learner
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.torch_core import to_device
from fastai.vision.models.xresnet import xresnet18
from fastcore.basics import tuplify
from fastsparse.report.flops import count_flops,flop_profile
from helpers import agree
from torch import nn
from torch.nn.utils.rnn import pack_sequence
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

layers = [
    # the 2 of a multiply-add * places where the weight is read * entries of the weight
    (nn.Linear(5,3), ones(4,5), 2*4*15),
    (nn.Linear(5,3), ones(4,7,5), 2*28*15),
    (nn.Linear(5,3,bias=False), ones(5,7,4).permute(2,1,0), 2*28*15),
    (nn.Conv1d(4,6,3,stride=2,padding=1), ones(2,4,10), 2*2*5*(6*4*3)),
    (nn.Conv1d(4,6,3,groups=2), ones(2,4,10), 2*2*8*(6*2*3)),
    (nn.Conv2d(3,8,3), ones(3,8,10), 2*6*8*(8*3*9)),
    (nn.Conv2d(3,8,(3,1),stride=(2,3),padding=(1,0)), ones(2,3,8,10), 2*2*4*4*(8*3*3)),
    (nn.Conv2d(3,8,3,padding='same',padding_mode='circular'), ones(2,3,8,10), 2*2*8*10*(8*3*9)),
    (nn.Conv2d(6,6,3,groups=6), ones(1,6,8,8), 2*6*6*(6*9)),
    (nn.Conv3d(2,4,3,dilation=2,groups=2), ones(1,2,6,8,8), 2*2*4*4*(4*1*27)),
    # a transposed convolution reads its weight once for each input place
    (nn.ConvTranspose2d(4,6,3,stride=2,padding=1,output_padding=1), ones(2,4,5,5), 2*2*25*(4*6*9)),
    (nn.ConvTranspose2d(4,6,3,groups=2,dilation=2), ones(1,4,5,5), 2*25*(4*3*9)),
    (nn.ConvTranspose3d(2,3,2), ones(1,2,3,4,5), 2*60*(2*3*8)),
    (nn.Bilinear(5,4,3), (ones(7,5),ones(7,4)), 2*7*60)]

@pytest.mark.parametrize('m,xb,want', layers, ids=[f'{i}-{type(o[0]).__name__}' for i,o in enumerate(layers)])
def test_layers(m, xb, want):
    "Products and convolutions cost 2 * places * weights, and with a mask exactly the live share of that"
    m = mask_all(copy.deepcopy(m))
    assert count_flops(m, xb)==want
    assert count_flops(m, xb, sparse=True)==want//m.weight.numel()*live(m)

def parts_of(m, n_rows):
    "Multiply-adds of the projections of queries, keys, values and outputs, each weight with its rows: dense, and of live weights"
    if m.in_proj_weight is None: ws = [(getattr(m, f'{k}_proj_weight'), getattr(m, f'{k}_proj_weight_mask')) for k in 'qkv']
    else: ws = [*zip(m.in_proj_weight.chunk(3), m.in_proj_weight_mask.chunk(3))]
    ws.append((m.out_proj.weight, m.out_proj.weight_mask))
    return sum(n*w.numel() for n,(w,_) in zip(n_rows, ws)),sum(n*int(k.sum()) for n,(_,k) in zip(n_rows, ws))

attentions = dict(itself=(6, 6, {}), others=(6, 10, {}), widths=(6, 10, dict(kdim=6, vdim=10)))

@pytest.mark.parametrize('need_weights', [True,False])
@pytest.mark.parametrize('training', [True,False])
@pytest.mark.parametrize('name', attentions)
def test_attention(name, training, need_weights):
    "Each projection reads its own rows of a weight and of its mask, as often as its inputs are long; scores and mixing read none; with and without the fast path"
    n,k,kw = attentions[name]
    m = mask_all(nn.MultiheadAttention(8, 2, batch_first=True, **kw)).train(training)
    q = ones(3,n,8)
    keys = (ones(3,k,kw['kdim']),ones(3,k,kw['vdim'])) if kw else (ones(3,k,8),)*2 if n!=k else (q,q)
    xb,scores = dict(query=q, key=keys[0], value=keys[1], need_weights=need_weights),2*2*(3*n*k*8)
    all_,alive = parts_of(m, (3*n,3*k,3*k,3*n))
    assert (count_flops(m, xb),count_flops(m, xb, sparse=True))==(2*all_+scores,2*alive+scores)

def test_attention_products_stand_under_their_layer():
    "Scores and mixing read no weight: they bear the name of the layer that makes them"
    m = nn.ModuleDict(dict(attn=nn.MultiheadAttention(8, 2, batch_first=True)))
    m.forward = lambda x: m.attn(x, x, x)[0]
    assert {repr(k):n for k,n in flop_profile(m, ones(1,5,8)).items()}['attn']==2*2*(5*5*8) and 'forward' not in vars(m.attn)

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

class Unrolled(nn.Module):
    "A cell, once for each element"
    def __init__(self, cell): super().__init__(); self.cell = cell  # chkstyle: ignore
    def forward(self, x):
        h = None
        for o in x: h = self.cell(o, h)
        return h

@pytest.mark.parametrize('cls,gates', [(nn.RNNCell,1), (nn.GRUCell,3), (nn.LSTMCell,4)])
def test_cells(cls, gates):
    "Cells, once and unrolled: one entry in the profile for each weight, whatever the number of steps"
    m = mask_all(cls(5, 6))
    alive = live(m,'weight_ih')+live(m,'weight_hh')
    for net,xb,n in ((m, ones(3,5), 1), (Unrolled(m), ones(4,3,5), 4)):
        profile = flop_profile(net, xb)
        assert (profile.total(),profile.total(sparse=True),len(profile))==(n*2*3*gates*66,n*2*3*alive,2)

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

class Last(nn.GRU):
    def forward(self, x): return super().forward(x)[0][-1]

class Touchy(nn.Linear):
    def train(self, mode=True): raise AssertionError("flags are set one by one")

class Named(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(5,3)  # chkstyle: ignore
    def forward(self, x, scale=None, ys=()): return self.l(x)*(1 if scale is None else scale)

def on_meta():
    with torch.device('meta'): return nn.Sequential(nn.Linear(50_000,10_000), nn.Unflatten(1,(10,1000)), nn.LSTM(1000,1000))

def learner():
    learn = synth_learner()
    learn.model = Named()
    return learn

x45 = ones(4,5)
odd = dict(subclass=(lambda: Last(5,6), ones(4,3,5), 2*12*18*11), meta=(on_meta, ones(64,50_000,device='meta'), 2*64*(50_000*10_000+10*8*1000*1000)),
    scripted=(lambda: torch.jit.script(nn.Linear(5,3)), x45, 120), compiled=(lambda: torch.compile(nn.Linear(5,3), backend='eager'), x45, 120),
    touchy=(lambda: Touchy(5,3), x45, 120), parallel=(lambda: nn.DataParallel(Named()), x45, 120), learner=(learner, x45, 120), one=(Named, (x45,), 120),
    several=(Named, [x45,2.], 120), by_name=(Named, dict(x=x45, scale=x45[:,:3]), 120), nested=(Named, (x45,None,[x45,x45]), 120))

@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', odd)
def test_models_and_inputs(name):
    "Subclasses, models too large for memory, scripted, compiled and wrapped ones; positional and named inputs"
    make,xb,want = odd[name]
    assert count_flops(make(), xb)==want

class Uses(nn.Module):
    def __init__(self, f): super().__init__(); self.f,self.weight = f,nn.Parameter(ones(3,5))  # chkstyle: ignore
    def forward(self, x): return self.f(self.weight, x)

mask35 = torch.tensor([[1,1,0,0,0],[0,1,0,0,1],[0,0,0,0,1]]).bool()
ways = {  # chkstyle: ignore-node
    'matmul':    (lambda w,x: x@w.t(), 4*5),
    'first':     (lambda w,x: w@x.t(), 4*5),
    'einsum':    (lambda w,x: torch.einsum('bi,oi->bo', x, w), 4*5),
    'mv':        (lambda w,x: w@x[0], 5), 'addbmm': (lambda w,x: torch.addbmm(ones(4,3), x[None], w.t()[None]), 4*5),
    'addmv':     (lambda w,x: torch.addmv(ones(3), w, x[0]), 5),
    'dot':       (lambda w,x: w[0]@x[0], 2),
    'columns':   (lambda w,x: x[:,:2]@w[:,:2].t(), 4*3),
    'steps':     (lambda w,x: x[:,::2]@w[:,::2].t(), 4*3),
    'expanded':  (lambda w,x: torch.bmm(x.expand(7,4,5), w.t().expand(7,5,3)), 7*4*5),
    'conv':      (lambda w,x: F.conv1d(x[:,:,None], w[:,:,None]), 4*5),
    'product':   (lambda w,x: F.linear(x, w*mask35), 4*5),
    'where':     (lambda w,x: F.linear(x, torch.where(mask35, w, 0.)), 4*5),
    'filled':    (lambda w,x: F.linear(x, w.masked_fill(~mask35, 0)), 4*5),
    'cast':      (lambda w,x: F.linear(x.double(), w.double()), 4*5),
    'copied 2x': (lambda w,x: (x@(w*2).t().clone())[:,1:]@(w*2).t().clone()[1:3,1:], 4*(5+1)),
    'dropped':   (lambda w,x: F.linear(x, F.dropout(w, .5, training=True)), 4*5),
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

def test_dense_after_all():
    "`w+1` has no zeros, a bias multiplies nothing, and of two parameters in a product the last is the weight"
    m = Uses(lambda w,x: F.linear(x, w+1))
    m.register_buffer('weight_mask', mask35)
    assert count_flops(m, x45, sparse=True)==2*4*15
    m = nn.Linear(5,3)
    m.register_buffer('bias_mask', torch.tensor([True,False,False]))
    assert count_flops(m, x45, sparse=True)==2*4*15
    m = Uses(lambda w,x: F.linear(m.start, w))
    m.start = nn.Parameter(ones(4,5))
    m.register_buffer('weight_mask', mask35)
    m.register_buffer('start_mask', torch.zeros(4,5).bool())
    assert count_flops(m, x45, sparse=True)==2*4*5

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

def test_awd_lstm():
    "fastai's language model keeps its hidden state and drops weights that it computes: counted, and left as they were"
    m = AWD_LSTM(20, 4, 6, 2)
    wrapped,x = [o for o in m.modules() if hasattr(o, 'weight_hh_l0_raw')],torch.zeros(3,7).long()
    for o in wrapped: o.register_buffer('weight_hh_l0_raw_mask', torch.rand(o.weight_hh_l0_raw.shape)<.2)
    m(x)
    hidden,ih,hh = m.hidden,24*4+16*6,24*6+16*4
    for training in (True,False):
        m.train(training)
        assert (count_flops(m, x),count_flops(m, x, sparse=True))==(2*21*(ih+hh),2*21*(ih+sum(live(o,'weight_hh_l0_raw') for o in wrapped)))
    assert m.hidden is hidden

def test_agrees_with_torch():
    "The dense count is FlopCounterMode's, on fastai's xresnet and a transformer"
    for m,xb in ((xresnet18().eval(), torch.randn(1,3,64,64)), (nn.Transformer(8,2,2,2,16,batch_first=True), (ones(2,5,8),ones(2,4,8)))):
        with FlopCounterMode(display=False) as counter: m(*tuplify(xb))
        assert count_flops(m, xb)==counter.get_total_flops()>0

def test_resnet50_of_the_paper():
    "8.2e9 FLOPs for a 224x224 image, and .2231 of them (23 %) at a sparsity of .8 with a dense first layer (table 2 of arXiv:1911.11134)"
    m = pytest.importorskip('torchvision.models').resnet50().eval()
    profile = flop_profile(m, torch.zeros(1,3,224,224))
    assert profile.total()==8_178_368_512
    mask_all(m).conv1.weight_mask.fill_(True)
    places = {v.name:n//v.numel for v,n in profile.items()}
    assert profile.total(sparse=True)==sum(n*live(m.get_submodule(k.rpartition('.')[0])) for k,n in places.items())
    assert abs(profile.total(sparse=True)/profile.total()-.2231)<.0005

def test_profile_follows_masks(monkeypatch):
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
    with monkeypatch.context() as p:
        p.setattr('fastsparse.report.flops.count_live', lambda m: 1/0)
        assert profile.total(sparse=True)==2*4*5
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
        assert agree(before, snapshot(m))

def test_autocast_still_trains_after_a_count():
    "Casts made without gradients in a count don't stay in autocast's cache"
    m = nn.Linear(5,3)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        count_flops(m, x45)
        m(x45).sum().backward()
    assert m.weight.grad is not None

def test_a_profile_keeps_no_tensor_alive():
    "It can be kept for a long training: replaced weights and inputs go"
    m,x = nn.Linear(5,3),ones(4,5)
    profile,refs = flop_profile(m, x),[weakref.ref(o) for o in (m.weight,x)]
    m.weight = nn.Parameter(ones(3,5))
    del x
    gc.collect()
    assert profile.total()==2*4*15 and [r() for r in refs]==[None,None]

nested = torch.nested.nested_tensor([ones(2,5),ones(3,5)], layout=torch.jagged)
wrong_mask = nn.Linear(5,3)
wrong_mask.register_buffer('weight_mask', ones(3,4).bool())
refused = [(nn.Linear(5,3), np.ones((4,5)), TypeError, 'must be Tensor, not .*ndarray'), (nn.Linear(5,3), None, TypeError, 'must be Tensor, not NoneType'),
    ('model', x45, TypeError, 'module or a Learner'), (nn.Sequential(nn.LazyLinear(3)), x45, ValueError, '0.weight has no shape yet.*batch'),
    (wrong_mask, x45, ValueError, r'weight_mask is a tensor of bool of shape \(3, 4\).*\(3, 5\)'), (nn.Linear(5,3), nested, ValueError, 'nested.*padded')]

@pytest.mark.parametrize('m,xb,error,what', refused)
def test_refused(m, xb, error, what):
    "Law 10: by the fault's name"
    with pytest.raises(error, match=what): count_flops(m, xb, sparse=True)

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
