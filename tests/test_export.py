"Exports give the dense model's outputs, in the bytes that they claim; what is missing is named"
import io,os,pickle,pytest,random,subprocess,sys,torch,torchvision
from copy import deepcopy
from fastsparse.all import *
from fastsparse.weights.weight import masked_params
from fastsparse.model.live_layers import LiveLayer
import fastsparse.deploy.export as export_module
from fastsparse.deploy.compact import LiveMatrix,PackedAttention,PackedConv,PackedLinear
from fastai_data import digits,loaders
from fastai.learner import Learner,load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.text.models.awdlstm import AWD_LSTM,awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from helpers import *
from torch import nn

class Small(nn.Module):
    "Convolutions, a norm, attention and a linear layer"
    def __init__(self):
        super().__init__()
        self.conv,self.bn,self.point = nn.Conv2d(3, 8, 3, padding=1),nn.BatchNorm2d(8),nn.Conv2d(8, 12, 1)
        self.attn,self.head = nn.MultiheadAttention(12, 2, batch_first=True),nn.Linear(12, 5)

    def forward(self, x):
        h = self.point(self.bn(self.conv(x)).tanh()).flatten(2).transpose(1, 2)
        return self.head(self.attn(h, h, h)[0].mean(1))

def small(sparsity=.8):
    torch.manual_seed(0)
    model = Small().eval()
    sparsify_model(model, sparsity, seed=0)
    return model,torch.randn(4, 3, 6, 6)

modules = ['auto','dense','shrunk','live','csr']

@pytest.mark.parametrize('format', modules)
def test_modules_give_the_same_outputs(format):
    "Within 1e-5 for the sample and for other batch sizes; a copy and a pickle too; the model is left as it was"
    model,xb = small()
    before = deepcopy(model.state_dict())
    model.train()
    new,report = export_sparse(model, format, xb, batch_sizes=[1,4])
    assert model.training and all(torch.equal(v, before[k]) for k,v in model.state_dict().items()) and list(before)==list(model.state_dict())
    assert report.error<1e-5 and list(report.speedup)==[1,4] and len(report.df)==2
    model.eval()
    for m in (new, deepcopy(new), pickle.loads(pickle.dumps(new))):
        for x in (xb,xb[:1]):
            with torch.no_grad(): torch.testing.assert_close(m(x), model(x), rtol=1e-5, atol=1e-5)

def test_dense_is_plain():
    "The folded model has no masks, hooks or types of ours, and exact zeros; also from a model that computes with live weights"
    model,xb = small()
    report = sparse_compute(model, xb, plan={'point.weight':'rows', 'attn.in_proj_weight':'rows', 'head.weight':'rows'})
    new = plain_copy(model)
    assert isinstance(model.head, LiveLayer)
    report.remove()
    assert list(new.state_dict())==list(Small().state_dict()) and not new._forward_pre_hooks and not masked_params(new)
    for o in masked_params(model):
        p = new.get_parameter(o.name)
        assert type(p) is nn.Parameter and is_positive_zero(p[~o.mask]) and torch.equal(p[o.mask], o.p[o.mask])

def test_live_uses_every_product():
    "Linear layers, attention's projections and 1x1 convolutions are stored sparse, others are dense; each live weight once, in 8 bytes"
    model,xb = small()
    new,report = export_sparse(model, 'live', xb)
    assert set(report.plan)=={'point','attn','head'} and set(report.plan.values())=={'rows'}
    assert isinstance(new.point, PackedConv) and isinstance(new.attn, PackedAttention) and isinstance(new.head, PackedLinear) and type(new.conv) is nn.Conv2d
    stored = sum(o.values.numel() for o in new.modules() if isinstance(o, LiveMatrix))
    assert stored==sum(int(o.mask.sum()) for o in masked_params(model) if o.name!='conv.weight')
    assert not masked_params(new) and not new._forward_pre_hooks and not any(p.requires_grad for p in new.parameters())

@pytest.mark.parametrize('format,structure', [('condensed','fan-in'),('block','block 4x4')])
def test_structured(format, structure):
    "Layers that have the structure are stored by it; the others stay dense, and the note says so"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16))
    sparsify_model(model, .5, seed=0, structure=structure)
    xb = torch.randn(4, 16)
    new,report = export_sparse(model, format, xb)
    assert set(report.plan)=={'0','2','4'} and report.error<1e-5 and not report.note
    model[2].weight_mask[:] = torch.eye(16).bool()
    model[2].weight_mask[0,:2] = True
    new,report = export_sparse(model, format, xb)
    assert set(report.plan)=={'0','4'} and report.note.startswith('2 is dense: ') and report.error<1e-5

def test_nothing_to_store():
    "A recurrent layer has no sparse product: a named storage says so, 'auto' is dense"
    class Rec(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4,4)
        def forward(self, x): return self.rnn(x)[0]
    model,xb = Rec(),torch.randn(3,2,4)
    sparsify_model(model, .5, seed=0)
    with pytest.raises(ValueError, match="no masked layer can be stored as 'rows'|no masked layer can be stored as 'csr'"): export_sparse(model, 'csr', xb)
    assert 'dense is fastest' in export_sparse(model, 'auto', xb)[1].note

def test_from_live_weights():
    "A model that computes with live weights is exported as the masked one is"
    model,xb = small()
    y = model(xb)
    report = sparse_compute(model, xb, plan={'attn.in_proj_weight':'rows', 'head.weight':'rows'})
    for format in modules: assert export_sparse(model, format, xb)[1].error<1e-5
    assert isinstance(model.head, LiveLayer)
    report.remove()
    torch.testing.assert_close(model(xb), y)

def test_auto_says_that_dense_is_fastest():
    "Nothing pays in a tiny half-sparse layer: the result is plain and the report says so"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    sparsify_model(model, .1, seed=0)
    new,report = export_sparse(model, 'auto', torch.randn(2, 8))
    assert type(new[0]) is nn.Linear and not report.plan and 'dense is fastest' in report.note and 'dense is fastest' in repr(report)

@pytest.mark.parametrize('rows', [1,128])
def test_auto_takes_what_wins(rows):
    "A large layer at 98 % is stored by live weights, for one row as for many, and the rest of its model is as it was"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512))
    sparsify_model(model, .98, seed=0)
    new,report = export_sparse(model, 'auto', torch.randn(rows, 1024))
    assert '0' in report.plan and isinstance(new[0], PackedLinear) and report.speedup[rows]>1 and not report.note and report.error<1e-5

def test_auto_keeps_rows_for_models_that_call_view():
    "Results that lie feature by feature have no rows to view"
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(512,1024),nn.Linear(512,512)
        def forward(self, x): return self.b(self.a(x).view(-1, 512))
    torch.manual_seed(0)
    model = Viewing()
    sparsify_model(model, .98, seed=0)
    new,report = export_sparse(model, 'auto', torch.randn(64, 512))
    assert set(report.plan)=={'a','b'} and report.error<1e-5

def test_report():
    "Bytes as saved, times of both sides for every batch size, and the ratio's median; a copy stays what it was"
    model,xb = small()
    new,report = export_sparse(model, 'csr', xb, batch_sizes=[1,3,8])
    for d in (report.ms,report.dense_ms,report.speedup): assert list(d)==[1,3,8] and all(v>0 for v in d.values())
    torch.save(new.state_dict(), f := io.BytesIO())
    assert report.bytes==f.tell() and list(report.df.batch)==[1,3,8] and report.df.share[0]==pytest.approx(report.bytes/report.dense_bytes, abs=1e-4)

alone = """
import sys,torch
sys.modules['fastsparse'] = None
path,data = sys.argv[1:]
x,y = torch.load(data)
m = torch.export.load(path).module() if path.endswith('.pt2') else torch.load(path, weights_only=False)
for n in (len(x),1): torch.testing.assert_close(m(x[:n]).detach(), y[:n], rtol=1e-4, atol=1e-5)
assert 'fastsparse' not in [k for k,v in sys.modules.items() if v is not None]
"""

def test_files_that_load_with_torch_alone(tmp_path):
    "Dense and shrunk, and `.pt2` of every format that it can hold, for other batch sizes as well, in a process without this package"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3,8,1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8*16,24), nn.ReLU(), nn.Linear(24,8)).eval()
    sparsify_model(model, .75, seed=0, structure='fan-in')
    xb = torch.randn(3,3,4,4)
    torch.save((xb,model(xb).detach()), tmp_path/'data.pt')
    files = [('dense','a.pt'),('shrunk','b.pt'),('dense','c.pt2'),('shrunk','d.pt2'),('live','e.pt2'),('condensed','f.pt2'),('auto','g.pt2')]
    for format,name in files:
        path,report = export_sparse(model, format, xb, path=tmp_path/name, batch_sizes=[1,3])
        assert path==tmp_path/name and report.error<1e-5 and report.bytes==path.stat().st_size
    script = alone.replace('path,data = sys.argv[1:]', 'data,*paths = sys.argv[1:]').replace('m = ', 'for path in paths:\n  m = ').replace('for n in', '  for n in')
    subprocess.run([sys.executable, '-c', script, tmp_path/'data.pt', *[tmp_path/n for _,n in files]], check=True)

def test_one_row_does_not_fix_the_batch(tmp_path):
    "A sample of one row gives a `.pt2` file for any number of rows"
    model,xb = small()
    path,_ = export_sparse(model, 'live', xb[:1], path=tmp_path/'m.pt2', batch_sizes=[1,4])
    torch.testing.assert_close(torch.export.load(path).module()(xb), model(xb), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('dtype', [torch.float,torch.double,torch.bfloat16])
def test_safetensors(dtype, tmp_path):
    "The file holds live values and a bit a weight: at 95 % no more than .09 of dense, and it comes back bit for bit"
    pytest.importorskip('safetensors')
    torch.manual_seed(0)
    model = mlp((300,400,300), dtype=dtype)
    sparsify_model(model, .95, seed=0)
    xb = torch.randn(4, 300).to(dtype)
    path,report = export_sparse(model, 'safetensors', xb, path=tmp_path/'m.safetensors')
    plain = plain_copy(model)
    state = load_sparse(path)
    assert state.keys()==plain.state_dict().keys() and all(torch.equal(v, state[k]) and v.dtype==state[k].dtype for k,v in plain.state_dict().items())
    n,live = sum(o.p.numel() for o in masked_params(model)),sum(int(o.mask.sum()) for o in masked_params(model))
    assert path.stat().st_size==report.bytes<live*xb.element_size()+n/8+700*xb.element_size()+2000 and report.error==0
    if dtype==torch.float: assert report.bytes/report.dense_bytes<=.09

def test_a_tied_layer_is_stored_once(tmp_path):
    "One layer under four names costs a file what it costs under one, and each name is read back"
    pytest.importorskip('safetensors')
    layer = nn.Linear(200, 200)
    model = nn.Sequential(*[layer]*4)
    sparsify_model(model, .95, seed=0)
    path,report = export_sparse(model, 'safetensors', torch.randn(2, 200), path=tmp_path/'m.safetensors')
    state,plain = load_sparse(path),plain_copy(model).state_dict()
    assert state.keys()==plain.keys() and len(state)==8 and all(torch.equal(v, state[k]) for k,v in plain.items())
    assert report.bytes<4*(2000+200)+200*200/8+2000

class Recurrent(nn.Module):
    "A language model's shape: embedding, LSTM, head"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.head = nn.Embedding(11, 8),nn.LSTM(8, 12, 2, batch_first=True),nn.Linear(12, 11)

    def forward(self, x): return self.head(self.rnn(self.emb(x))[0])

class Mixing(nn.Module):
    "A block of an MLP-Mixer (arXiv:2105.01601): over tokens, then over channels"
    def __init__(self, d=16, n=9):
        super().__init__()
        def mlp(a, b): return nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, a))
        self.ln1,self.ln2,self.tokens,self.channels = nn.LayerNorm(d),nn.LayerNorm(d),mlp(n, 12),mlp(d, 24)

    def forward(self, x):
        x = x+self.tokens(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x+self.channels(self.ln2(x))

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem,self.blocks,self.head = nn.Conv2d(3, 16, 4, 4),nn.Sequential(Mixing(), Mixing()),nn.Linear(16, 5)

    def forward(self, x): return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))

def vit(): return torchvision.models.VisionTransformer(image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)

archs = dict(resnet18=(lambda: torchvision.models.resnet18(num_classes=5), lambda: torch.randn(2,3,32,32)), vit=(vit, lambda: torch.randn(2,3,16,16)),
    lstm=(Recurrent, lambda: torch.randint(11, (2,7))), mixer=(Mixer, lambda: torch.randn(2,3,12,12)))

def arch(name, sparsity=.9):
    make,batch = archs[name]
    torch.manual_seed(0)
    model,xb = make(),batch()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.running_mean.normal_(0, .1), m.running_var.uniform_(.8, 1.2), nn.init.normal_(m.bias, 0, .1)
    for p in model.parameters():
        if p.ndim==2: nn.init.normal_(p, 0, p.shape[1]**-.5)  # a head of zeros would hide all errors
    sparsify_model(model.eval(), sparsity, seed=0)
    return model,xb

@pytest.mark.parametrize('format', [*modules,'safetensors','onnx'])
@pytest.mark.parametrize('name', list(archs))
def test_architectures(name, format, tmp_path):
    "ResNet-18, a vision transformer, an LSTM and an MLP-Mixer, in every format, for the sample and one row"
    model,xb = arch(name)
    path = tmp_path/f'm.{format}' if format in ('safetensors','onnx') else None
    res,report = export_sparse(model, format, xb, path=path, batch_sizes=[1,2])
    assert report.error<2e-5 and list(report.ms)==[1,2] and (res==path if path else isinstance(res, nn.Module))

@pytest.mark.parametrize('name', list(archs))
def test_architectures_as_pt2(name, tmp_path):
    "Each also as a file for `torch.export.load`"
    model,xb = arch(name)
    _,report = export_sparse(model, 'shrunk' if name=='lstm' else 'live', xb, path=tmp_path/'m.pt2', batch_sizes=[1,2])
    assert report.error<2e-5

def test_shrunk_resnet():
    "Channels that a structure killed are gone, also across residual sums, and the file is smaller for it"
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5)
    sparsify_model(model, .5, seed=0, structure='output channels', chosen='*conv1.weight')
    new,report = export_sparse(model.eval(), 'shrunk', torch.randn(2,3,32,32))
    assert new.layer1[0].conv1.weight.shape==(32,64,3,3) and new.layer1[0].conv2.weight.shape==(64,32,3,3) and report.error<2e-5
    assert report.bytes<.75*report.dense_bytes

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
        torch.testing.assert_close(new.get_preds(dl=new.dls.valid)[0], ref, rtol=1e-4, atol=1e-5)
        new.export('m.pkl')
        torch.testing.assert_close(new.get_preds(dl=new.dls.valid)[0], ref, rtol=1e-4, atol=1e-5)
        loaded = load_learner(tmp_path/'m.pkl')
        dl = learn.dls.valid
        with loaded.no_bar(): torch.testing.assert_close(loaded.get_preds(dl=dl)[0], ref, rtol=1e-4, atol=1e-5)
    with learn.no_logging(), learn.no_bar(): learn.fit(1)

@pytest.mark.parametrize('format,package', [('safetensors','safetensors'), ('onnx','onnx')])
def test_missing_packages_are_named(format, package, tmp_path, monkeypatch):
    "With the way to install them"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f'{package}.torch', None)
    model,xb = small()
    with pytest.raises(ImportError, match=rf"{package} is not installed, and this needs it: pip install 'livesparse\[export\]'"): export_sparse(model, format, xb, path=tmp_path/'m')

def test_what_is_refused():
    "Each with the name of what is wrong"
    model,xb = small()
    refused = ((('zip',xb), {}, "format is 'zip'.*take one of these"), (('dense',), {}, 'sample is None'), (('onnx',xb), {}, 'path is missing'), (('2:4',xb), {}, '2:4.*point: .*(two of four|CUDA)'),
        (('block',xb), {}, 'point: .*no square blocks'), (('csr',xb), dict(path='m.pt2'), "torch.export can't write 'csr'"))
    for args,kwargs,message in refused:
        with pytest.raises((ValueError,TypeError), match=message): export_sparse(model, *args, **kwargs)
    with pytest.raises(ValueError, match='has no masks'): export_sparse(Small(), 'dense', xb)

class Branching(nn.Module):
    "A forward that depends on values"
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(600, 600)
    def forward(self, x): return self.a(x) if x.sum()>0 else self.a(-x)

def test_graphs_that_cannot_be_followed():
    "Shrinking refuses by name; 'auto' exports without it, and has no note of what nobody asked for"
    torch.manual_seed(0)
    model = Branching()
    sparsify_model(model, .98, seed=0)
    with pytest.raises(ValueError, match="graph of Branching can't be followed"): export_sparse(model, 'shrunk', torch.randn(64,600))
    new,report = export_sparse(model, 'auto', torch.randn(64,600))
    assert report.plan and not report.note

class Cosine(nn.Linear):
    "A linear layer with a forward of its own"
    def forward(self, x): return nn.functional.linear(nn.functional.normalize(x, dim=-1), nn.functional.normalize(self.weight, dim=-1), self.bias)*10

@pytest.mark.parametrize('format', ['live','csr','auto'])
def test_layers_that_do_more_than_torchs_stay_dense(format):
    "A subclass with its own forward, and a layer with a hook, keep what they do"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(16,64), nn.ReLU(), nn.Linear(64,32), Cosine(32,10)).eval()
    m[2].register_forward_hook(lambda m,i,o: o*2)
    sparsify_model(m, .9, seed=0)
    new,report = export_sparse(m, format, torch.randn(4,16))
    assert report.error<1e-5 and type(new[3]) is Cosine and type(new[2]) is nn.Linear

def test_inputs_of_other_lengths_are_left_as_they_are():
    "A mask beside the batch is no batch"
    class ParamRef(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        def forward(self, x, mask): return self.attn(x, x, x, attn_mask=mask)[0]
    torch.manual_seed(0)
    m = ParamRef().eval()
    sparsify_model(m, .8, seed=0)
    xb = torch.randn(3,7,16),torch.zeros(7,7)
    for sizes in (None, [1,3,5]): assert export_sparse(m, 'live', xb, batch_sizes=sizes)[1].error<1e-5

def test_auto_passes_over_what_torch_cannot_multiply():
    "bfloat16 has no CSR product on the CPU; a layer without live weights has nothing to store; both are exported"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,16)).eval()
    sparsify_model(m, .95, seed=0)
    export_sparse(deepcopy(m).bfloat16(), 'auto', torch.randn(32,64).bfloat16())
    for o in masked_params(m): o.mask.fill_(False)
    for format in ('auto','condensed','live'): assert export_sparse(m, format, torch.randn(32,64))[1].error==0

def test_unbatched_images_and_sizes_of_stored_layers():
    "A convolution takes an image without a batch; a linear layer tells its sizes"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(4,8,1)).eval()
    sparsify_model(m, .5, seed=0)
    new,_ = export_sparse(m, 'live', torch.randn(2,4,5,5))
    x = torch.randn(4,5,5)
    torch.testing.assert_close(new(x), m(x))
    lin = nn.Sequential(nn.Linear(4,8)).eval()
    sparsify_model(lin, .5, seed=0)
    new,_ = export_sparse(lin, 'live', torch.randn(2,4))
    assert (new[0].in_features,new[0].out_features)==(4,8)

def sparse_layers(*sizes, sparsity=.9, structure=None):
    model = mlp(sizes, act=nn.ReLU)
    sparsify_model(model, sparsity, seed=0, structure=structure)
    return model

def test_a_dense_result_is_an_ordinary_module(tmp_path):
    "It trains, loads a state dict, changes its type and goes to a `.pt2` file"
    model,x = sparse_layers(8, 8, sparsity=.1),torch.randn(2, 8)
    new,report = export_sparse(model, 'auto', x)
    assert 'dense is fastest' in report.note
    new(x).sum().backward()
    new.load_state_dict(plain_copy(model).state_dict())
    assert new.double()(x.double()).dtype==torch.double and export_sparse(model, 'auto', x, tmp_path/'m.pt2')[1].error<1e-5

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.e,self.f = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),nn.Linear(32, 5)
    def forward(self, x, pad): return self.f(self.e(x, src_key_padding_mask=pad))

@pytest.mark.parametrize('format', ['auto','live','csr','dense'])
def test_padded_sequences(format):
    "Outputs are compared off torch's fused path, which puts zeros in the place of padding"
    torch.manual_seed(0)
    model = Encoder()
    sparsify_model(model, .9, seed=0)
    pad = torch.arange(6)[None]>=torch.tensor([6,3,4,2])[:,None]
    new,report = export_sparse(model, format, (x := torch.randn(4, 6, 32), pad))
    assert report.error<1e-5 and torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(): torch.testing.assert_close(new(x, pad)[~pad], plain_copy(model)(x, pad)[~pad], rtol=1e-4, atol=1e-5)

class Positional(nn.Module):
    "Attention whose options are told by position, and a layer whose input is told by name"
    def __init__(self):
        super().__init__()
        self.at,self.f,self.c = nn.MultiheadAttention(32, 4, batch_first=True),nn.Linear(32, 8),nn.Conv1d(6, 6, 1)
    def forward(self, x): return self.c(input=self.f(input=self.at(x, x, x, None, False)[0]))*self.at.embed_dim/self.c.out_channels

@pytest.mark.parametrize('format', ['auto','live','csr'])
def test_layers_in_storage_are_called_and_asked_as_before(format):
    torch.manual_seed(0)
    model = Positional()
    sparsify_model(model, .9, seed=0)
    assert export_sparse(model, format, torch.randn(4, 6, 32))[1].error<1e-5

def test_layouts_suit_every_batch_size(monkeypatch):
    "A sample of one row says nothing about `view`: the result takes more as well, even where features were faster"
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.f = nn.Conv2d(64, 128, 1),nn.Linear(128*16, 10)
        def forward(self, x): return self.f(self.a(x).view(len(x), -1))
    def always(before, after, rounds=5):
        before(), after()
        return 2.
    for name in ('kernels.timing','deploy.export'): monkeypatch.setattr(f'fastsparse.{name}.speedup', always)
    torch.manual_seed(0)
    model = Viewing()
    sparsify_model(model, .97, seed=0)
    new,report = export_sparse(model, 'auto', torch.randn(1, 64, 4, 4))
    assert set(report.plan)=={'a','f'}
    for n in (1,4): torch.testing.assert_close(new(x := torch.randn(n, 64, 4, 4)), plain_copy(model)(x), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('format', ['live','csr'])
def test_autocast_of_stored_layers(format):
    "Under autocast results have its type, next to dense layers too"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8*16, 5))
    sparsify_model(model, .8, seed=0)
    new,_ = export_sparse(model, format, x := torch.randn(2, 3, 6, 6))
    with torch.autocast('cpu', torch.bfloat16): y,ref = new(x),plain_copy(model)(x)
    assert y.dtype==ref.dtype==torch.bfloat16
    torch.testing.assert_close(y, ref, rtol=.05, atol=.05)

class Stateful(nn.Module):
    "Counts its calls, changes its input, draws numbers, and keeps what it computed with its history"
    def __init__(self):
        super().__init__()
        self.a,self.h = nn.Linear(8, 4),None
        self.register_buffer('n', torch.zeros(()))
    def forward(self, x):
        self.n += 1
        x -= .5
        self.h = nn.functional.dropout(self.a(x), .5, True)
        return self.h

@pytest.mark.parametrize('format', ['auto','dense','live','shrunk'])
def test_nothing_is_left_behind(format):
    "Neither in the model, nor in the sample, the result, or the random state; and what a forward changes or draws is no error"
    torch.manual_seed(0)
    model,x = Stateful(),torch.randn(4, 8)
    sparsify_model(model, .5, seed=0)
    model(x.clone())
    kept,before,seed = model.h,x.clone(),torch.get_rng_state()
    new,report = export_sparse(model, format, x, batch_sizes=[1,4])
    assert report.error<1e-6 and torch.equal(x, before) and torch.equal(torch.get_rng_state(), seed)
    assert model.h is kept and model.n==new.n==1

def test_language_models_of_fastai():
    "Weight dropout keeps weights that are computed from others"
    torch.manual_seed(0)
    model = get_language_model(AWD_LSTM, 50, dict(awd_lstm_lm_config, emb_sz=16, n_hid=24, n_layers=2))
    sparsify_model(model, .5, seed=0)
    x = torch.randint(50, (3,7))
    model.train()(x)[0].sum().backward()
    model.reset()
    for format in ('dense','auto'):
        new,report = export_sparse(model, format, x)
        assert report.error<1e-5
        new.reset()

@pytest.mark.parametrize('sizes', [['a'],[-1],[1.5],[0]])
def test_batch_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match='a size in batch_sizes is '): export_sparse(sparse_layers(8, 8), 'dense', torch.zeros(2,8), batch_sizes=sizes)

def test_batch_sizes_that_a_model_cannot_take():
    "Its second input happens to be as long as the batch"
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 4)
        def forward(self, x, adj): return adj@self.a(x)
    torch.manual_seed(0)
    model,xb = Graph(),(torch.randn(4, 8),torch.eye(4))
    sparsify_model(model, .5, seed=0)
    assert export_sparse(model, 'live', xb)[1].error<1e-5
    model.forward = lambda x, adj: adj[:,:4]@model.a(x) if len(x)==4 else adj@torch.zeros(3, 1)
    with pytest.raises(ValueError, match="batch_sizes has 8, and the model can't take it"): export_sparse(model, 'dense', xb, batch_sizes=[8])

def test_nested_and_optional_inputs():
    "A recurrent layer with its state, and None"
    class Rec(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn,self.f = nn.LSTM(8, 8, batch_first=True),nn.Linear(8, 4)
        def forward(self, x, state, scale=None): return self.f(self.rnn(x, state)[0])
    torch.manual_seed(0)
    model = Rec()
    sparsify_model(model, .5, seed=0)
    for format in ('dense','live','auto'): assert export_sparse(model, format, (torch.randn(3, 2, 8),(torch.zeros(1, 3, 8),torch.zeros(1, 3, 8)),None))[1].error<1e-5

@pytest.mark.parametrize('format,name,message', [('dense','.','must be a file'), ('dense','no/m.pt','must be a file'), ('live','m.safetensors',"ends with .safetensors"), ('dense','m.onnx','ends with .onnx')])
def test_paths_where_nothing_can_be_written(format, name, message, tmp_path):
    with pytest.raises(ValueError, match=message): export_sparse(sparse_layers(8, 8), format, torch.zeros(2,8), tmp_path/name)

@pytest.mark.parametrize('format', ['safetensors','onnx','dense'])
def test_a_file_is_replaced_only_by_a_good_one(format, tmp_path):
    "A sample that doesn't fit is noticed after writing: the old file stays, and nothing else"
    path = tmp_path/f'm.{"pt" if format=="dense" else format}'
    path.write_text('old')
    with pytest.raises(Exception): export_sparse(sparse_layers(8, 8), format, torch.zeros(2,5), path)
    assert path.read_text()=='old' and [o.name for o in tmp_path.iterdir()]==[path.name]
    assert export_sparse(sparse_layers(8, 8), format, torch.zeros(2,8), path)[0]==path and path.stat().st_size>100 and len(list(tmp_path.iterdir()))==1

def test_types_without_a_product():
    "CSR and blocks have none for half precision on the CPU"
    model,x = sparse_layers(8, 8, structure='block 4x4', sparsity=.5).bfloat16(),torch.zeros(2,8).bfloat16()
    for format in ('csr','block'):
        with pytest.raises(ValueError, match='torch.bfloat16, and torch has this product for float32'): export_sparse(model, format, x)
    assert export_sparse(model, 'live', x)[1].error<.1

def test_condensed_files_of_a_dead_layer(tmp_path):
    "A layer without a live weight is its bias"
    model = sparse_layers(8, 8, 4, structure='fan-in', sparsity=.5)
    model[0].weight_mask[:] = False
    assert export_sparse(model, 'condensed', torch.randn(4,8), tmp_path/'m.pt2')[1].error<1e-5

def test_states_that_are_no_tensors(tmp_path):
    "safetensors has no place for them"
    class Extra(nn.Linear):
        def get_extra_state(self): return dict(a=1)
        def set_extra_state(self, state): pass
    torch.manual_seed(0)
    model = nn.Sequential(Extra(8,8))
    sparsify_model(model, .5, seed=0)
    with pytest.raises(ValueError, match='0._extra_state in the state dict is a dict'): export_sparse(model, 'safetensors', torch.zeros(2,8), tmp_path/'m.safetensors')

@pytest.mark.parametrize('suffix', ['pt2','onnx'])
def test_any_number_of_inputs(suffix, tmp_path):
    "A forward that takes `*xs` goes to files too"
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8,4)
        def forward(self, *xs): return self.a(sum(xs))
    torch.manual_seed(0)
    model = Many()
    sparsify_model(model, .5, seed=0)
    format = 'onnx' if suffix=='onnx' else 'live'
    assert export_sparse(model, format, (torch.randn(3,8),torch.randn(3,8)), tmp_path/f'm.{suffix}', batch_sizes=[1,3])[1].error<1e-5

@pytest.mark.parametrize('format', ['dense', 'shrunk'])
def test_an_export_made_in_inference_mode_can_be_trained(format):
    "Its weights are ordinary parameters"
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    sparsify_model(model, .5, seed=0)
    with torch.inference_mode(): new,_ = export_sparse(model, format, torch.randn(4, 8))
    new(torch.randn(4, 8)).sum().backward()
    assert all(p.grad is not None for p in new.parameters())

# Files that are damaged, and weights that somebody wrote

def damaged(data, rng):
    "`data` with one change"
    a,b = sorted(rng.sample(range(len(data)), 2))
    kinds = [lambda: data[:a]+bytes([data[a]^(1<<rng.randrange(8))])+data[a+1:], lambda: data[:a], lambda: data[:a]+data[b:], lambda: data[:b]+data[a:],
        lambda: data[a:], lambda: data[:a]+bytes(min(b-a, 64))+data[a+min(b-a, 64):], lambda: data+data[a:b],
        lambda: b'', lambda: bytes(rng.randrange(256) for _ in range(b))]
    while (new := rng.choice(kinds)())==data: pass
    return new

def small_file(path):
    model = sparse_layers(9, 7, 3, sparsity=.6)
    return save_sparse(model, path),plain_copy(model).state_dict()

@pytest.mark.parametrize('n', [400, pytest.param(10000, marks=pytest.mark.full)])
def test_damaged_files_are_refused_by_name(n, tmp_path):
    "Bits turned, bytes cut, moved, doubled and made up; every single bit of the file is guarded"
    path,_ = small_file(tmp_path/'m.safetensors')
    whole,rng = path.read_bytes(),random.Random(0)
    for _ in range(n):
        path.write_bytes(damaged(whole, rng))
        with pytest.raises(ValueError, match="m.safetensors' is"): load_sparse(path)
    for bit in rng.choices(range(8*len(whole)), k=n):
        path.write_bytes((int.from_bytes(whole, 'little')^(1<<bit)).to_bytes(len(whole), 'little'))
        with pytest.raises(ValueError, match="m.safetensors' is"): load_sparse(path)

def test_weights_written_behind_the_guards_back():
    "As LoRA's merge does: a copy without them would be another model, so it is refused with the ways out; both ways work"
    for way in (apply_masks, unsparsify):
        model,x = sparse_layers(8, 8, 4),torch.randn(2, 8)
        model(x)
        model[0].weight.data += .1
        for f in (lambda: plain_copy(model), lambda: export_sparse(model, 'dense', x)):
            with pytest.raises(ValueError, match='0.weight has .* dead weights that are not zero.*apply_masks.*unsparsify.*prune_magnitude'): f()
        way(model)
        if way is apply_masks: assert export_sparse(model, 'dense', x)[1].error<1e-6

def test_the_error_is_against_what_the_model_answered():
    "Nobody enforces these masks, so the model answers with all weights, and an export without some differs from it"
    torch.manual_seed(0)
    model,x = mlp((8,8)),torch.randn(2, 8)
    sparsify_model(model, .5, seed=0).remove()
    with torch.no_grad(): model[0].weight.add_(.1)
    answer = model(x).detach()
    new,report = export_sparse(model, 'dense', x)
    assert report.error>0 and abs(report.error-(new(x)-answer).abs().max().item())<1e-6

def test_a_killed_export_leaves_the_old_file(tmp_path):
    "What a killed write left is taken over by the next one"
    path,_ = small_file(tmp_path/'m.safetensors')
    old = path.read_bytes()
    (tmp_path/'.m.part.safetensors').write_bytes(old[:50])
    model = sparse_layers(9, 7, 3, sparsity=.6)
    save_sparse(model, path)
    assert [o.name for o in tmp_path.iterdir()]==['m.safetensors'] and load_sparse(path)


# Axes that move, inputs by name, times of one runtime

class Tokens(nn.Module):
    "A sentence encoder: token numbers, a mask of padding, and an option between them"
    def __init__(self):
        super().__init__()
        self.emb,self.body,self.head = nn.Embedding(30, 16),nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),nn.Linear(16, 5)

    def forward(self, ids, scale=None, pad=None):
        h = self.emb(ids)
        return self.head(self.body(h if scale is None else h*scale, src_key_padding_mask=pad))

def tokens(n=4, length=12):
    torch.manual_seed(0)
    model = Tokens().eval()
    sparsify_model(model, .8, seed=0)
    return model,named(n, length)

def named(n, length): return dict(ids=torch.randint(30, (n,length)), pad=torch.arange(length).repeat(n, 1)>length//2)

def onnx_run(path, **inputs):
    ort = pytest.importorskip('onnxruntime')
    session = ort.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return torch.from_numpy(session.run(None, {o.name:inputs[o.name].numpy() for o in session.get_inputs()})[0])

def test_axes_of_onnx_files_move(tmp_path):
    "Recorded with 4 sentences of 12 tokens: other numbers of either give what torch gives, in onnxruntime"
    model,xb = tokens()
    path,report = export_sparse(model, 'onnx', xb, tmp_path/'m.onnx')
    assert report.error<1e-5
    for n,length in ((1,12),(3,7),(5,30)):
        x = named(n, length)
        with torch.no_grad(): torch.testing.assert_close(onnx_run(path, **x), model(**x), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('format', ['live','dense'])
def test_axes_of_pt2_files_move(format, tmp_path):
    "So do those of files that torch loads; also of images, and of one row"
    model,xb = tokens(1)
    path,_ = export_sparse(model, format, xb, tmp_path/'m.pt2')
    for x in (named(1, 7),named(5, 30)):
        with torch.no_grad(): torch.testing.assert_close(torch.export.load(path).module()(**x), model(**x), rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1)).eval()
    sparsify_model(conv, .5, seed=0)
    path,_ = export_sparse(conv, format, torch.randn(1, 1, 12, 12), tmp_path/'c.pt2')
    x = torch.randn(3, 1, 20, 9)
    with torch.no_grad(): torch.testing.assert_close(torch.export.load(path).module()(x), conv(x), rtol=1e-4, atol=1e-5)

class Pooled(nn.Module):
    "The linear layer fixes the size of images"
    def __init__(self):
        super().__init__()
        self.a,self.pool,self.f = nn.Conv2d(3, 8, 3),nn.MaxPool2d(4),nn.Linear(32, 5)
    def forward(self, x): return self.f(self.pool(self.a(x)).flatten(1))

def test_axes_that_cannot_move_stay(tmp_path):
    "Batches move alone then"
    torch.manual_seed(0)
    model,x = Pooled().eval(),torch.randn(5, 3, 10, 10)
    sparsify_model(model, .5, seed=0)
    path,_ = export_sparse(model, 'onnx', x[:2], tmp_path/'m.onnx')
    with torch.no_grad(): torch.testing.assert_close(onnx_run(path, x=x), model(x), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('suffix', ['onnx','pt2'])
def test_dynamic_shapes_as_given(suffix, tmp_path):
    "They name what moves, from where to where, and all else is fixed, the batch of one row too"
    Dim,(model,xb) = torch.export.Dim,tokens(1)
    length = Dim('length', min=2, max=20)
    path,_ = export_sparse(model, 'onnx' if suffix=='onnx' else 'live', xb, tmp_path/f'm.{suffix}', dynamic_shapes=dict(ids={1:length}, pad={1:length}))
    run = (lambda **x: onnx_run(path, **x)) if suffix=='onnx' else torch.export.load(path).module()
    with torch.no_grad(): torch.testing.assert_close(run(**(x := named(1, 7))), model(**x), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception): run(**named(2, 7))

def test_dynamic_shapes_of_what_takes_any_size():
    model,xb = tokens()
    for format in ('dense','live'):
        with pytest.raises(ValueError, match="dynamic_shapes is for 'onnx' and .pt2 files"): export_sparse(model, format, xb, dynamic_shapes=dict(ids={0:torch.export.Dim.AUTO}))

@pytest.mark.parametrize('format', [*modules,'safetensors','onnx'])
@pytest.mark.parametrize('turned', [False,True])
def test_inputs_by_name(format, turned, tmp_path):
    "In any order, with other batch sizes"
    model,xb = tokens()
    if format=='shrunk':
        torch.manual_seed(0)
        model,xb = Scaled().eval(),dict(x=torch.randn(4, 8), y=torch.randn(4, 8))
        sparsify_model(model, .5, seed=0)
    if turned: xb = dict(reversed(xb.items()))
    path = tmp_path/f'm.{format}' if format in ('safetensors','onnx') else None
    _,report = export_sparse(model, format, xb, path, batch_sizes=[1,4,9])
    assert report.error<1e-5 and list(report.ms)==[1,4,9]

class Scaled(nn.Module):
    "An option between the inputs"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 16),nn.Linear(16, 4)
    def forward(self, x, scale=None, y=None):
        x = x if scale is None else x*scale
        return self.b(self.a(x if y is None else x+y).relu())

def test_shrinking_with_inputs_by_name():
    "Hidden units without inputs and without bias go, as with inputs by position"
    torch.manual_seed(0)
    model = Scaled().eval()
    x,y = torch.randn(4, 8),torch.randn(4, 8)
    with torch.no_grad(): model.a.weight[:6],model.a.bias[:6] = 0,0
    small,removed = shrink(model, dict(y=y, x=x))
    assert small.a.weight.shape==(10,8) and shrink(model, (x,None,y))[1]==removed
    with torch.no_grad(): torch.testing.assert_close(small(x=x, y=y), model(x=x, y=y))
    class ByName(Scaled):
        def forward(self, x, *, y): return super().forward(x, None, y)
    with pytest.raises(ValueError, match='y can be passed by name only'): shrink(ByName(), dict(x=x, y=y))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"): shrink(model, dict(y=y))

def test_onnx_is_compared_with_onnx(tmp_path, monkeypatch):
    "The dense time is onnxruntime's, of a network without zeros; torch's stands beside, for this format alone"
    model,ran = sparse_layers(64, 64, 8),[]
    times = export_module.times_in_turns
    def counted(fs): return ran.append([f() for f in fs]) or times(fs)
    monkeypatch.setattr(export_module, 'times_in_turns', counted)
    x = torch.randn(4, 64)
    _,report = export_sparse(model, 'onnx', x, tmp_path/'m.onnx', batch_sizes=[2,4])
    (ours,),(dense,),torch_out = ran[-1]
    torch.testing.assert_close(ours, torch_out, rtol=1e-4, atol=1e-5)
    assert dense.shape==ours.shape and not torch.allclose(dense, ours)
    assert list(report.torch_ms)==[2,4] and 'torch_ms' in report.df
    _,report = export_sparse(model, 'dense', x)
    assert len(ran[-1])==2 and report.torch_ms is None and 'torch_ms' not in report.df

silent = """
import sys,torch
from torch import nn
from fastsparse import export_sparse,sparsify_model
from transformers import BertConfig,BertModel
torch.manual_seed(0)
model = BertModel(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)).eval()
sparsify_model(model, .8, seed=0)
ids = torch.randint(40, (2,12))
xb = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
for format,file in (('onnx','m.onnx'),('live','m.pt2'),('auto',None)):
    report = export_sparse(model, format, xb, file and f'{sys.argv[1]}/{file}')[1]
    assert report.error<1e-4 and 'followed' not in report.note, report
"""

def test_nothing_is_printed(tmp_path):
    "Nor warned of, by us or by exporters, for a model of transformers"
    pytest.importorskip('transformers')
    res = subprocess.run([sys.executable, '-c', silent, tmp_path], capture_output=True, text=True, env={**os.environ, 'PYTHONWARNINGS':'ignore::FutureWarning'})
    assert not res.returncode and not res.stdout and not res.stderr, res

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,16),nn.Linear(16,4)

    def forward(self, x):
        h = self.a(x).relu()
        return self.b((2*h if x.shape[1]>6 else h).mean(1))

def test_an_onnx_file_of_one_branch_says_so(tmp_path):
    "A forward that branches on a length is recorded in the sample's branch, which is where the file is right"
    m = Branches().eval()
    sparsify_model(m, .5, seed=0)
    _,report = export_sparse(m, 'onnx', torch.randn(4,10,8), tmp_path/'a.onnx')
    assert 'x.size()[1] > 6' in report.note
    _,report = export_sparse(nn.Sequential(m.a, nn.Tanh()), 'onnx', torch.randn(4,10,8), tmp_path/'b.onnx')
    assert report.note==''

@pytest.mark.parametrize('how', ['copied','averaged','loaded'])
@pytest.mark.parametrize('used', [False,True])
def test_copies_averages_and_loaded_models_are_stored_sparse(how, used, tmp_path):
    "What watches over the masks of a copy is no foreign hook, which would leave its layers dense"
    model,x = sparse_layers(64, 64, 8),torch.randn(4, 64)
    if how=='copied': new = deepcopy(model)
    if how=='averaged':
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        new = average.module
    if how=='loaded':
        torch.save(model, tmp_path/'m.pt')
        new = torch.load(tmp_path/'m.pt', weights_only=False)
    if used: new(x)
    for format in ('live','csr'): assert export_sparse(new, format, x)[1].plan==export_sparse(model, format, x)[1].plan!={}

class Recurrent(nn.Module):
    "States go in and come out; the encoder before them looks both ways, and sums over lengths"
    def __init__(self):
        super().__init__()
        self.e,self.r,self.o = nn.Embedding(30, 16),nn.LSTM(16, 24, 2, batch_first=True),nn.Linear(16, 5)
        self.g = nn.GRU(24, 8, batch_first=True, bidirectional=True)
    def forward(self, ids, state, lengths=None):
        h,state = self.r(self.e(ids), state)
        h = self.g(h)[0]
        if lengths is not None: h = (h*(torch.arange(ids.shape[1])<lengths[:,None])[...,None]).sum(1)
        return self.o(h),state

def recurrent_inputs(n, length):
    return dict(ids=torch.randint(30, (n,length)), state=(torch.randn(2, n, 24),torch.randn(2, n, 24)), lengths=torch.arange(n)%length+1)

@pytest.mark.parametrize('n', [1,3])
@pytest.mark.parametrize('turned', [False,True])
def test_states_and_lengths_of_recurrent_layers_move(n, turned, tmp_path):
    "torch.export fixes the length of what they read, and its ONNX file failed on others, or was not written"
    pytest.importorskip('onnxruntime')
    torch.manual_seed(0)
    model,xb = Recurrent().eval(),recurrent_inputs(n, 10)
    sparsify_model(model, .5, seed=0)
    if turned: xb = dict(reversed(xb.items()))
    path,report = export_sparse(model, 'onnx', xb, tmp_path/'m.onnx')
    assert report.error<1e-5 and report.note==''
    run = export_module._open_onnx(path)
    for x in (recurrent_inputs(1, 10),recurrent_inputs(4, 6),recurrent_inputs(2, 17)):
        with torch.no_grad(): want,state = model(**x)
        for a,b in zip(run(**x), (want,*state)): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

def test_a_traced_forward_that_branches_says_so(tmp_path):
    pytest.importorskip('onnxruntime')
    class Branching(Recurrent):
        def forward(self, ids, state):
            out,state = super().forward(ids, state)
            return (out if ids.sum()>0 else -out),state
    model,xb = Branching().eval(),recurrent_inputs(3, 10)
    del xb['lengths']
    sparsify_model(model, .5, seed=0)
    assert 'reads sizes or values in Python' in export_sparse(model, 'onnx', xb, tmp_path/'m.onnx')[1].note

def test_one_row_with_a_state_does_not_fix_the_batch(tmp_path):
    "A state's rows come second"
    model = Recurrent().eval()
    sparsify_model(model, .5, seed=0)
    path,_ = export_sparse(model, 'live', recurrent_inputs(1, 10), tmp_path/'m.pt2')
    x = recurrent_inputs(4, 10)
    with torch.no_grad(): torch.testing.assert_close(torch.export.load(path).module()(**x)[0], model(**x)[0], rtol=1e-4, atol=1e-5)
