"Exports give the model's outputs, whatever the format and the network; what is refused is named"
import pickle,pytest,sys,torch,torchvision
from copy import deepcopy
from fastsparse.all import *
from fastsparse.weights.find import masked_params
from fastsparse.deploy.compact import LiveMatrix,PackedAttention,PackedConv,PackedLinear
from fastai_data import digits,loaders
from fastai.learner import Learner,load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.text.models.awdlstm import AWD_LSTM,awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from helpers import *
from torch import nn
from torch.nn import functional as F

modules = ['auto','dense','shrunk','live']
every = [*modules,'safetensors','onnx']

def net(forward, **layers):
    "A module of `layers`, with the method `forward`"
    m = type('Net', (nn.Module,), dict(forward=forward))()
    for n,l in layers.items(): m.add_module(n, l)
    return m

def sparse(make, sparsity=.5, **kwargs):
    torch.manual_seed(0)
    model = make().eval()
    sparsify_model(model, sparsity, 'uniform', seed=0, **kwargs)
    return model

def layers(*sizes, sparsity=.9, **kwargs): return sparse(lambda: mlp(sizes, act=nn.ReLU), sparsity, **kwargs)

def check(got, want, tol=1e-5): torch.testing.assert_close(got, want, rtol=10*tol, atol=tol)

class Small(nn.Module):
    "Convolutions, a norm, attention and a linear layer"
    def __init__(self):
        super().__init__()
        self.conv,self.bn,self.point = nn.Conv2d(3, 8, 3, padding=1),nn.BatchNorm2d(8),nn.Conv2d(8, 12, 1)
        self.attn,self.head = nn.MultiheadAttention(12, 2, batch_first=True),nn.Linear(12, 5)

    def forward(self, x):
        h = self.point(self.bn(self.conv(x)).tanh()).flatten(2).transpose(1, 2)
        return self.head(self.attn(h, h, h)[0].mean(1))

def small(): return sparse(Small, .8),torch.randn(4, 3, 6, 6)

class Stateful(nn.Module):
    "Counts its calls, changes its input, draws numbers, and keeps what it computed with its history"
    def __init__(self):
        super().__init__()
        self.a,self.h = nn.Linear(8, 4),None
        self.register_buffer('n', torch.zeros(()))

    def forward(self, x):
        self.n += 1
        x -= .5
        self.h = F.dropout(self.a(x), .5, True)
        return self.h


# Equal outputs

def path_of(format, folder): return folder/f'm.{format}' if format in ('safetensors','onnx') else None

@pytest.mark.parametrize('format', modules)
def test_modules(format):
    "Results, their copies and pickles compute the same for other batches too, and the model is as it was"
    model,xb = small()
    before = deepcopy(model.state_dict())
    model.train()
    new,report = export_sparse(model, format, xb, batch_sizes=[1,4])
    assert model.training and agree(dict(model.state_dict()), dict(before)) and report.error<1e-5 and list(report.speedup)==[1,4]
    model.eval()
    for m in (new, deepcopy(new), pickle.loads(pickle.dumps(new))):
        for x in (xb,xb[:1]): check(m(x), model(x))

@pytest.mark.parametrize('format', modules)
def test_live_models_are_exported_as_masked_ones_are(format):
    model,xb = small()
    want,plan = model(xb),{'point.weight':'rows', 'attn.in_proj_weight':'rows', 'head.weight':'rows'}
    report = sparse_compute(model, xb, plan=plan)
    new,res = export_sparse(model, format, xb)
    assert res.error<1e-5 and (format!='live' or set(res.plan)=={'point','attn','head'})
    check(new(xb), want)
    report.remove()
    check(model(xb), want)

def test_dense_is_plain():
    "No masks, hooks or types of this library, and exact zeros"
    model,_ = small()
    new = plain_copy(model)
    assert list(new.state_dict())==list(Small().state_dict()) and not new._forward_pre_hooks and not masked_params(new)
    for o in masked_params(model):
        p = new.get_parameter(o.name)
        assert type(p) is nn.Parameter and is_positive_zero(p[~o.mask]) and torch.equal(p[o.mask], o.p[o.mask])

class Recurrent(nn.Module):
    "States go in and come out; an encoder looks both ways, and sums over lengths"
    def __init__(self):
        super().__init__()
        self.e,self.r,self.o = nn.Embedding(30, 16),nn.LSTM(16, 24, 2, batch_first=True),nn.Linear(16, 5)
        self.g = nn.GRU(24, 8, batch_first=True, bidirectional=True)

    def forward(self, ids, state=None, lengths=None):
        h,state = self.r(self.e(ids), state)
        h = self.g(h)[0]
        if lengths is not None: h = (h*(torch.arange(ids.shape[1])<lengths[:,None])[...,None]).sum(1)
        return self.o(h),state

def recurrent(n, length):
    return dict(ids=torch.randint(30, (n,length)), state=(torch.randn(2, n, 24),torch.randn(2, n, 24)), lengths=torch.arange(n)%length+1)

class Mixing(nn.Module):
    "A block of an MLP-Mixer (arXiv:2105.01601): over tokens, then over channels"
    def __init__(self, d=16, n=9):
        super().__init__()
        def mlp(a, b): return nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, a))
        self.ln1,self.ln2,self.tokens,self.channels = nn.LayerNorm(d),nn.LayerNorm(d),mlp(n, 12),mlp(d, 24)

    def forward(self, x):
        x = x+self.tokens(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x+self.channels(self.ln2(x))

class Tokens(nn.Module):
    "A sentence encoder: token numbers, an option, and a mask of padding"
    def __init__(self):
        super().__init__()
        self.emb,self.body,self.head = nn.Embedding(30, 16),nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),nn.Linear(16, 5)

    def forward(self, ids, scale=None, pad=None):
        h = self.emb(ids)
        return self.head(self.body(h if scale is None else h*scale, src_key_padding_mask=pad))

def named(n, length): return dict(ids=torch.randint(30, (n,length)), pad=torch.arange(length).repeat(n, 1)>length//2)
def turned(xb): return dict(reversed(xb.items()))

class Scaled(nn.Module):
    "An option between the inputs"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 16),nn.Linear(16, 4)

    def forward(self, x, scale=None, y=None):
        x = x if scale is None else x*scale
        return self.b(self.a(x if y is None else x+y).relu())

def resnet():
    model = torchvision.models.resnet18(num_classes=5)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.running_mean.normal_(0, .1), m.running_var.uniform_(.8, 1.2), nn.init.normal_(m.bias, 0, .1)
    return model

def vit():
    model = torchvision.models.VisionTransformer(image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)
    nn.init.normal_(model.heads.head.weight, 0, .25)  # a head of zeros would hide all errors
    return model

def positional(m, x): return m.c(input=m.f(input=m.at(x, x, x, None, False)[0]))*m.at.embed_dim/m.c.out_channels
def attention(d): return nn.MultiheadAttention(d, 4, batch_first=True)
def encoder(): return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

makers = dict(resnet=resnet, vit=vit, scaled=Scaled, turned=Scaled, tokens=Tokens, turned_tokens=Tokens, nested=Recurrent)
makers['lstm'] = lambda: net(lambda m, x: m.o(m.r(m.e(x))[0]), e=nn.Embedding(11, 8), r=nn.LSTM(8, 12, 2, batch_first=True), o=nn.Linear(12, 11))
def mix(m, x): return m.head(m.blocks(m.stem(x).flatten(2).transpose(1, 2)).mean(1))
makers['mixer'] = lambda: net(mix, stem=nn.Conv2d(3, 16, 4, 4), blocks=nn.Sequential(Mixing(), Mixing()), head=nn.Linear(16, 5))
makers['padded'] = lambda: net(lambda m, x, pad: m.f(m.e(x, src_key_padding_mask=pad)), e=encoder(), f=nn.Linear(32, 5))
makers['positional'] = lambda: net(positional, at=attention(32), f=nn.Linear(32, 8), c=nn.Conv1d(6, 6, 1))
makers['a mask is no batch'] = lambda: net(lambda m, x, mask: m.at(x, x, x, attn_mask=mask)[0], at=attention(16))
makers['awd_lstm'] = lambda: get_language_model(AWD_LSTM, 50, dict(awd_lstm_lm_config, emb_sz=16, n_hid=24, n_layers=2))
xy = dict(x=torch.randn(2, 8), y=torch.randn(2, 8))
samples = dict(resnet=torch.randn(2,3,32,32), vit=torch.randn(2,3,16,16), lstm=torch.randint(11, (2,7)), mixer=torch.randn(2,3,12,12), scaled=xy)
samples |= dict(turned=turned(xy), tokens=named(2, 12), turned_tokens=turned(named(2, 12)), positional=torch.randn(2, 6, 32), awd_lstm=torch.randint(50, (2,7)))
samples['padded'] = torch.randn(2, 6, 32),torch.arange(6)[None]>=torch.tensor([6,3])[:,None]
samples['a mask is no batch'] = torch.randn(2,7,16),torch.zeros(7,7)
samples['nested'] = torch.randint(30, (2,5)),(torch.zeros(2, 2, 24),torch.zeros(2, 2, 24)),None
formats = dict(resnet=every, vit=every, lstm=every, mixer=every, scaled=every, turned=every, tokens=[o for o in every if o!='shrunk'],
    turned_tokens=['dense','live','auto','onnx'], awd_lstm=['dense','auto'])

@pytest.mark.parametrize('name,format', [(n,f) for n in makers for f in formats.get(n, ['dense','live','auto'])])
def test_any_network(name, format, tmp_path):
    "Images, sentences and states, by position and by name, for the sample's rows and for one"
    model,path,xb = sparse(makers[name], .8),path_of(format, tmp_path),samples[name]
    if name=='awd_lstm': model.train()(xb)[0].sum().backward(), model.reset()  # its weights are computed, with a history
    res,report = export_sparse(model, format, xb, path, [2] if name in ('nested','awd_lstm') else [1,2])
    assert report.error<2e-5 and report.ms.keys()>={2} and (res==path if path else isinstance(res, nn.Module))
    if name=='awd_lstm': res.reset()

@pytest.mark.parametrize('format', ['auto','dense','live','shrunk'])
def test_nothing_is_left_behind(format):
    "Neither in the model, nor in the sample, the result, or the random state; what a forward changes or draws is no error"
    model,x = sparse(Stateful),torch.randn(4, 8)
    model(x.clone())
    kept,before,seed = model.h,x.clone(),torch.get_rng_state()
    new,report = export_sparse(model, format, x, batch_sizes=[1,4])
    assert report.error<1e-6 and torch.equal(x, before) and torch.equal(torch.get_rng_state(), seed)
    assert model.h is kept and model.n==new.n==1

def test_padding():
    "Outputs are compared off torch's fused path, which puts zeros in the place of padding; that path is on again afterwards"
    model,(x,pad) = sparse(makers['padded'], .8),samples['padded']
    new,_ = export_sparse(model, 'live', (x,pad))
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(): check(new(x, pad)[~pad], plain_copy(model)(x, pad)[~pad])

def test_the_error_is_against_what_the_model_answered():
    "These masks aren't enforced, so the model answers with all weights, and an export without some differs from it"
    model,x = mlp((8,8)),torch.randn(2, 8)
    sparsify_model(model, .5, seed=0).remove()
    with torch.no_grad(): model[0].weight.add_(.1)
    new,report = export_sparse(model, 'dense', x)
    assert report.error>0 and abs(report.error-(new(x)-model(x)).abs().max().item())<1e-6

@pytest.mark.parametrize('format', modules)
def test_learners(format, tmp_path):
    "A trained learner gives a learner: it predicts, exports, and loads to predict the same; the first one trains on"
    x,y = digits(dtype=torch.float)
    model = nn.Sequential(nn.Linear(64,300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300,10))
    learn = Learner(loaders(x, y), model, CrossEntropyLossFlat(), path=tmp_path, cbs=DynamicSparseTrainingCallback(batches_per_update=4, seed=0))
    sparsify_model(learn, .9, seed=0)
    with learn.no_logging(), learn.no_bar(): learn.fit(1)
    new,report = export_sparse(learn, format, x[:8])
    assert isinstance(new, Learner) and new.model is not learn.model and new.dls is learn.dls and learn.opt is not None and report.error<1e-5
    with new.no_bar(), learn.no_bar():
        ref = learn.get_preds(dl=learn.dls.valid)[0]
        new.export('m.pkl')
        loaded = load_learner(tmp_path/'m.pkl')
        with loaded.no_bar():
            for o in (new, loaded): check(o.get_preds(dl=learn.dls.valid)[0], ref)
    with learn.no_logging(), learn.no_bar(): learn.fit(1)


# What is stored how

def test_live_uses_every_product():
    "Linear layers, attention's projections and 1x1 convolutions are stored sparse, each live weight once; others are dense"
    model,xb = small()
    new,report = export_sparse(model, 'live', xb)
    assert set(report.plan)=={'point','attn','head'} and set(report.plan.values())=={'rows'}
    assert [type(o) for o in (new.conv,new.point,new.attn,new.head)]==[nn.Conv2d,PackedConv,PackedAttention,PackedLinear]
    stored = sum(o.values.numel() for o in new.modules() if isinstance(o, LiveMatrix))
    assert stored==sum(int(o.mask.sum()) for o in masked_params(model) if o.name!='conv.weight')
    assert not masked_params(new) and not new._forward_pre_hooks and not any(p.requires_grad for p in new.parameters())

class Cosine(nn.Linear):
    "A linear layer with a forward of its own"
    def forward(self, x): return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1), self.bias)*10

@pytest.mark.parametrize('format', ['live','auto'])
def test_layers_that_do_more_stay_dense(format):
    "A subclass with its own forward, and a layer with a hook, keep what they do"
    model = sparse(lambda: nn.Sequential(nn.Linear(16,64), nn.ReLU(), nn.Linear(64,32), Cosine(32,10)), .9)
    model[2].register_forward_hook(lambda m,i,o: o*2)
    new,report = export_sparse(model, format, torch.randn(4,16))
    assert report.error<1e-5 and type(new[3]) is Cosine and type(new[2]) is nn.Linear

@pytest.mark.parametrize('how', ['copied','averaged','loaded'])
@pytest.mark.parametrize('used', [False,True])
def test_copies_are_stored_sparse(how, used, tmp_path):
    "What enforces the masks of a copy is no hook of the user's, which would leave its layers dense"
    model,x = layers(64, 64, 8),torch.randn(4, 64)
    if how=='copied': new = deepcopy(model)
    if how=='averaged':
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        new = average.module
    if how=='loaded':
        torch.save(model, tmp_path/'m.pt')
        new = torch.load(tmp_path/'m.pt', weights_only=False)
    if used: new(x)
    assert export_sparse(new, 'live', x)[1].plan=={'0':'rows','2':'rows'}

def gains(monkeypatch, n):
    "Measurements that find every storage `n` times as fast"
    def f(before, after, rounds=5): return before(), after(), n
    for name in ('kernels.timing','deploy.export'): monkeypatch.setattr(f'fastsparse.{name}.speedup', lambda *a, **k: f(*a, **k)[2])

def test_auto(monkeypatch):
    "What is faster by a tenth is stored, any number of rows fits the result, and nothing is noted; else the model is dense, and it is said"
    viewing = sparse(lambda: net(lambda m, x: m.f(m.a(x).view(len(x), -1)), a=nn.Conv2d(64, 128, 1), f=nn.Linear(128*16, 10)), .97)
    gains(monkeypatch, 1.2)
    new,report = export_sparse(viewing, 'auto', torch.randn(1, 64, 4, 4))
    assert set(report.plan)=={'a','f'} and isinstance(new.a, PackedConv) and not report.note
    for n in (1,4): check(new(x := torch.randn(n, 64, 4, 4)), plain_copy(viewing)(x))
    for n in (1.05,.9):
        gains(monkeypatch, n)
        new,report = export_sparse(layers(8, 8), 'auto', torch.randn(2, 8))
        assert type(new[0]) is nn.Linear and not report.plan and 'dense is fastest' in report.note and 'dense is fastest' in repr(report)

def test_auto_without_what_fails(monkeypatch):
    "A graph that can't be followed isn't shrunk; a recurrent layer has no product; torch has none for bfloat16; a dead layer has no weights"
    gains(monkeypatch, 2)
    branching = sparse(lambda: net(lambda m, x: m.a(x) if x.sum()>0 else m.a(-x), a=nn.Linear(8, 8)))
    report = export_sparse(branching, 'auto', torch.randn(4, 8))[1]
    assert set(report.plan)=={'a'} and not report.note
    assert 'dense is fastest' in export_sparse(sparse(makers['lstm'], chosen='r.*'), 'auto', torch.randint(11, (2,7)))[1].note
    model = layers(64, 256, 16)
    export_sparse(deepcopy(model).bfloat16(), 'auto', torch.randn(32,64).bfloat16())
    for o in masked_params(model): o.mask.fill_(False)
    for format in ('auto','live'): assert export_sparse(model, format, torch.randn(32,64))[1].error==0

@pytest.mark.parametrize('format', ['auto','dense','shrunk'])
@pytest.mark.parametrize('inference', [False,True])
def test_dense_results_are_ordinary_modules(format, inference, monkeypatch):
    "They train, load a state dict and change their type, also if made in inference mode"
    gains(monkeypatch, 1)
    model,x = layers(8, 8, sparsity=.1),torch.randn(2, 8)
    with torch.inference_mode(inference): new,_ = export_sparse(model, format, x)
    new(x).sum().backward()
    assert all(p.grad is not None for p in new.parameters())
    new.load_state_dict(plain_copy(model).state_dict())
    assert new.double()(x.double()).dtype==torch.double

def test_autocast_of_stored_layers():
    "Under autocast results have its type, next to dense layers too"
    model = sparse(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8*16, 5)), .8)
    new,_ = export_sparse(model, 'live', x := torch.randn(2, 3, 6, 6))
    with torch.autocast('cpu', torch.bfloat16): y,ref = new(x),plain_copy(model)(x)
    assert y.dtype==ref.dtype==torch.bfloat16
    torch.testing.assert_close(y, ref, rtol=.05, atol=.05)

def test_shrunk_is_smaller():
    "Channels that a structure killed are gone, in blocks between residual sums too"
    model = sparse(lambda: torchvision.models.resnet18(num_classes=5), structure='output channels', chosen='*conv1.weight')
    new,report = export_sparse(model, 'shrunk', torch.randn(2,3,32,32))
    assert new.layer1[0].conv1.weight.shape==(32,64,3,3) and new.layer1[0].conv2.weight.shape==(64,32,3,3) and report.bytes<.75*report.dense_bytes


# What is refused

class Extra(nn.Linear):
    def get_extra_state(self): return dict(a=1)
    def set_extra_state(self, state): pass

def graph(m, x, adj): return m.a(x) if len(x)==4 else adj@torch.zeros(3, 1)

x8,vector = torch.zeros(2, 8),lambda: layers(8, 8)
refused = [(vector, dict(format='zip'), "format is 'zip'.*take one of these"), (vector, dict(sample=None), 'sample is None'),
    (vector, dict(format='onnx'), 'path is missing'), (lambda: mlp((8,8)), dict(format='live'), 'has no masks'),
    (lambda: layers(8, 8, sparsity=.1), dict(format='2:4'), '2:4.*0: .*(two of four|CUDA)'), (vector, dict(format='2:4', path='m.pt2'), "torch.export can't write '2:4'"),
    (lambda: sparse(makers['lstm'], chosen='r.*'), dict(format='live', sample=torch.zeros(2, 3).long()), "no masked layer can be stored as 'live'"),
    (lambda: sparse(lambda: net(lambda m, x: m.a(x) if x.sum()>0 else -x, a=nn.Linear(8, 8))), dict(format='shrunk'), "graph of Net can't be followed"),
    *[(vector, dict(batch_sizes=[n]), 'a size in batch_sizes is ') for n in ('a',-1,1.5,0)],
    (lambda: sparse(lambda: net(graph, a=nn.Linear(8, 4))), dict(sample=(torch.zeros(4, 8),torch.eye(4)), batch_sizes=[8]), "batch_sizes has 8, and the model can't take it"),
    *[(vector, dict(path=o), 'must be a file') for o in ('.','no/m.pt')],
    *[(vector, dict(path=f'm.{o}'), f'ends with .{o}') for o in ('safetensors','onnx')],
    (lambda: sparse(lambda: nn.Sequential(Extra(8, 8))), dict(format='safetensors', path='m.safetensors'), '0._extra_state in the state dict is a dict'),
    *[(vector, dict(format=f, dynamic_shapes={}), "dynamic_shapes is for 'onnx', 'mnn' and .pt2 files") for f in ('dense','live')]]

@pytest.mark.parametrize('make,kwargs,message', refused)
def test_refused(make, kwargs, message, tmp_path, monkeypatch):
    "By name, and nothing is written"
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError,TypeError), match=message): export_sparse(make(), **{'format':'dense', 'sample':x8, **kwargs})
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize('format,package', [('safetensors','safetensors'), ('onnx','onnx')])
def test_missing_packages_are_named(format, package, tmp_path, monkeypatch):
    for o in (package, f'{package}.torch'): monkeypatch.setitem(sys.modules, o, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed, and this needs it: pip install 'livesparse\[export\]'"):
        export_sparse(vector(), format, x8, path=tmp_path/'m')

def test_weights_written_behind_the_hooks():
    "As LoRA's merge does: dead weights are zero again, and the export is the model that is left"
    model = layers(8, 8, 4)
    model(x8)
    model[0].weight.data += .1
    new,report = export_sparse(model, 'dense', x8)
    assert report.error<1e-6 and int(new[0].weight.count_nonzero())==int(model[0].weight_mask.sum())