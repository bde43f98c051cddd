"Exports make one copy and report its costs; files serve the processes and sizes that they claim, and damaged ones are refused"
import io,pytest,random,subprocess,sys,torch
from fastsparse.all import *
from fastsparse.deploy.onnx import open_onnx
from fastsparse.save.load import read_file
from fastsparse.weights.find import masked_params
from forks import run_code
from helpers import *
from fastai.learner import Learner
from fastai_data import digits,loaders
from test_export import Recurrent,Tokens,check,every,layers,makers,named,net,path_of,recurrent,samples,small,sparse,turned
from torch import nn

def count_copies(monkeypatch, shape):
    "A list that grows with each deep copy of a parameter of this shape"
    seen,copied = [],nn.Parameter.__deepcopy__
    def counted(p, memo):
        if p.shape==shape: seen.append(1)
        return copied(p, memo)
    monkeypatch.setattr(nn.Parameter, '__deepcopy__', counted)
    return seen

@pytest.mark.parametrize('format', every)
@pytest.mark.parametrize('file', [False,True])
def test_the_model_is_copied_once(format, file, tmp_path, monkeypatch):
    "Also from a learner, to a file, and where the graph can't be followed"
    if format in ('safetensors','onnx') and not file: return
    model,x = layers(40, 30, 4),torch.randn(2, 40)
    learn = Learner(loaders(*digits(dtype=torch.float)), model, nn.MSELoss(), cbs=DynamicSparseTrainingCallback())
    branching = sparse(lambda: net(lambda m, x: m.a(x) if x.sum()>0 else m.a(-x), a=nn.Linear(40, 30)))
    seen = count_copies(monkeypatch, (30,40))
    for m in (model, *([learn] if not file else []), *([branching] if format in ('dense','live','auto') and not file else [])):
        seen.clear()
        export_sparse(m, format, x, path_of(format, tmp_path) or (tmp_path/'m.pt' if file else None))
        assert len(seen)==1

@pytest.mark.parametrize('n,f', [(1,plain_copy), (1,lambda m: shrink(m, torch.randn(2, 40))), (0,lambda m: save_sparse(m, 'm.safetensors'))])
def test_other_calls_copy_at_most_once(n, f, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model,seen = layers(40, 30, 4),count_copies(monkeypatch, (30,40))
    f(model)
    assert len(seen)==n


def test_report():
    "Bytes as saved, and times of both sides for every batch size"
    model,xb = small()
    new,report = export_sparse(model, 'live', xb, batch_sizes=[1,3,8])
    for d in (report.ms,report.dense_ms,report.speedup): assert list(d)==[1,3,8] and all(v>0 for v in d.values())
    torch.save(new.state_dict(), f := io.BytesIO())
    assert report.bytes==f.tell() and list(report.df.batch)==[1,3,8] and report.df.share[0]==pytest.approx(report.bytes/report.dense_bytes, abs=1e-4)

def test_onnx_has_no_speedup(tmp_path):
    "A float32 file computes as the dense model does, so the report has its time and torch's, and nothing to be faster than"
    model,x = layers(64, 64, 8),torch.randn(4, 64)
    _,report = export_sparse(model, 'onnx', x, tmp_path/'m.onnx', batch_sizes=[2,4])
    assert list(report.torch_ms)==list(report.ms)==[2,4] and report.speedup is report.dense_ms is None and 'speedup' not in report.df
    assert all(low<=report.ms[n]<=high for n,(low,high) in report.quartiles['ms'].items()) and '[' in repr(report)
    report = export_sparse(model, 'dense', x)[1]
    assert report.speedup=={4:1} and report.torch_ms is None and 'torch_ms' not in report.df


# Files

def state_of(path): return {k:v for k,v in read_file(path).items() if not k.endswith('_mask')}

@pytest.mark.parametrize('dtype', [torch.float,torch.double,torch.bfloat16])
def test_safetensors(dtype, tmp_path):
    "The file holds live values and a bit a weight: at 95 % no more than .09 of dense, and it comes back bit for bit"
    model = mlp((300,400,300), dtype=dtype)
    sparsify_model(model, .95, seed=0)
    xb = torch.randn(4, 300).to(dtype)
    path,report = export_sparse(model, 'safetensors', xb, path=tmp_path/'m.safetensors')
    plain,state = plain_copy(model).state_dict(),state_of(path)
    assert agree(dict(plain), state) and all(v.dtype==dtype for v in state.values())
    n,live = sum(o.mask.numel() for o in masked_params(model)),sum(int(o.mask.sum()) for o in masked_params(model))
    assert path.stat().st_size==report.bytes<live*xb.element_size()+n/8+700*xb.element_size()+2000 and report.error==0
    if dtype==torch.float: assert report.bytes/report.dense_bytes<=.09

def test_a_tied_layer_is_stored_once(tmp_path):
    "One layer under four names costs a file what it costs under one, and each name is read back"
    layer = nn.Linear(200, 200)
    model = sparse(lambda: nn.Sequential(*[layer]*4), .95)
    path,report = export_sparse(model, 'safetensors', torch.randn(2, 200), path=tmp_path/'m.safetensors')
    state = state_of(path)
    assert len(state)==8 and agree(dict(plain_copy(model).state_dict()), state) and report.bytes<4*(2000+200)+200*200/8+2000

def damaged(data, rng):
    "`data` with one change"
    a,b = sorted(rng.sample(range(len(data)), 2))
    kinds = [lambda: data[:a]+bytes([data[a]^(1<<rng.randrange(8))])+data[a+1:], lambda: data[:a], lambda: data[:a]+data[b:], lambda: data[:b]+data[a:],
        lambda: data[a:], lambda: data[:a]+bytes(min(b-a, 64))+data[a+min(b-a, 64):], lambda: data+data[a:b],
        lambda: b'', lambda: bytes(rng.randrange(256) for _ in range(b))]
    while (new := rng.choice(kinds)())==data: pass
    return new

@pytest.mark.parametrize('n', [400, pytest.param(10000, marks=pytest.mark.full)])
def test_damaged_files_are_refused_by_name(n, tmp_path):
    "Bits turned, bytes cut, moved, doubled and made up; every single bit of the file is guarded"
    path = save_sparse(layers(9, 7, 3, sparsity=.6), tmp_path/'m.safetensors')
    whole,rng = path.read_bytes(),random.Random(0)
    def flipped(bit): return (int.from_bytes(whole, 'little')^(1<<bit)).to_bytes(len(whole), 'little')
    for data in [*(damaged(whole, rng) for _ in range(n)), *map(flipped, rng.choices(range(8*len(whole)), k=n))]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="m.safetensors' is"): read_file(path)

@pytest.mark.parametrize('format', ['safetensors','onnx','dense'])
def test_a_file_is_replaced_only_by_a_good_one(format, tmp_path):
    "A sample that doesn't fit is noticed after writing: the old file stays, and nothing else; so does what a killed write left"
    path,model = tmp_path/f'm.{"pt" if format=="dense" else format}',layers(8, 8)
    path.write_text('old')
    with pytest.raises(Exception): export_sparse(model, format, torch.zeros(2,5), path)
    assert path.read_text()=='old' and [o.name for o in tmp_path.iterdir()]==[path.name]
    (tmp_path/f'.m.part{path.suffix}').write_text('half')
    assert export_sparse(model, format, torch.zeros(2,8), path)[0]==path and path.stat().st_size>100 and len(list(tmp_path.iterdir()))==1

alone = """
import sys,torch
sys.modules['fastsparse'] = None
data,*paths = sys.argv[1:]
x,y = torch.load(data)
for path in paths:
    m = torch.export.load(path).module() if path.endswith('.pt2') else torch.load(path, weights_only=False)
    for n in (len(x),1): torch.testing.assert_close(m(x[:n]).detach(), y[:n], rtol=1e-4, atol=1e-5)
assert 'fastsparse' not in [k for k,v in sys.modules.items() if v is not None]
"""

some = ('dense','a.pt'),('shrunk','b.pt'),('live','e.pt2'),('live','f.pt2')

@pytest.mark.parametrize('files', [some, pytest.param([('dense','c.pt2'),('shrunk','d.pt2'),('auto','g.pt2')], marks=pytest.mark.full)], ids=len)
def test_files_that_load_with_torch_alone(files, tmp_path):
    "Dense and shrunk, and `.pt2` of every format that it can hold, for other batch sizes too, in a process without this package"
    model = sparse(lambda: nn.Sequential(nn.Conv2d(3,8,1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8*16,24), nn.ReLU(), nn.Linear(24,8)), .75,
        structure='fan-in')
    xb = torch.randn(3,3,4,4)
    torch.save((xb,model(xb).detach()), tmp_path/'data.pt')
    for format,name in files:
        path,report = export_sparse(model, format, xb, path=tmp_path/name, batch_sizes=[1,3])
        assert path==tmp_path/name and report.error<1e-5 and report.bytes==path.stat().st_size
    subprocess.run([sys.executable, '-c', alone, tmp_path/'data.pt', *[tmp_path/n for _,n in files]], check=True)

@pytest.mark.parametrize('name', ['resnet','lstm', *(pytest.param(o, marks=pytest.mark.full) for o in ('vit','mixer'))])
def test_networks_as_pt2(name, tmp_path):
    assert export_sparse(sparse(makers[name], .8), 'shrunk' if name=='lstm' else 'live', samples[name], path=tmp_path/'m.pt2', batch_sizes=[1,2])[1].error<2e-5

def test_files_of_a_dead_layer(tmp_path):
    "A layer without a live weight is its bias"
    model = layers(8, 8, 4, structure='fan-in', sparsity=.5)
    model[0].weight_mask[:] = False
    assert export_sparse(model, 'live', torch.randn(4,8), tmp_path/'m.pt2')[1].error<1e-5


# Axes that may have other lengths

def run_of(path): return torch.export.load(path).module() if path.suffix=='.pt2' else open_onnx(path)

def check_file(path, model, inputs):
    "The file gives for each of `inputs` what the model gives"
    run = run_of(path)
    for x in inputs:
        args,kwargs = ((),x) if isinstance(x, dict) else ((x,),{})
        with torch.no_grad(): want,got = model(*args, **kwargs),run(*args, **kwargs)
        want,got = [torch.utils._pytree.tree_leaves(o) for o in (want, got)]
        for a,b in zip(got, want, strict=True): check(a, b)

def tokens(): return sparse(Tokens, .8)
def conv(): return sparse(lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1)))
def pooled(): return sparse(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32, 5)))  # of one size of image
def many(): return sparse(lambda: net(lambda m, *xs: m.a(sum(xs)), a=nn.Linear(8,4)))
def stateful(): return sparse(Recurrent)

@pytest.mark.parametrize('make,format,sample,others', [
    *[(tokens, f, named(n, 12), [named(1, 7), named(5, 30)]) for f,n in (('onnx',4),('live',1),('dense',1))],
    *[(conv, f, torch.randn(1, 1, 12, 12), [torch.randn(3, 1, 20, 9)]) for f in ('live','dense')],
    (pooled, 'onnx', torch.randn(2, 3, 10, 10), [torch.randn(5, 3, 10, 10)]),
    (stateful, 'live', recurrent(1, 10), [recurrent(4, 10)]),
    *[(stateful, 'onnx', o, [recurrent(1, 10), recurrent(4, 6), recurrent(2, 17)]) for n in (1,3) for o in (recurrent(n, 10), turned(recurrent(n, 10)))]])
def test_axes(make, format, sample, others, tmp_path):
    "Batches, sentences, images and states of other lengths, where the forward leaves them free; a sample of one row fixes nothing"
    model = make()
    path,report = export_sparse(model, format, sample, tmp_path/('m.onnx' if format=='onnx' else 'm.pt2'))
    assert report.error<1e-5 and (make is pooled or report.note=='')
    check_file(path, model, others)

@pytest.mark.parametrize('suffix', ['onnx','pt2'])
def test_dynamic_shapes_as_given(suffix, tmp_path):
    "They name what is free, from where to where, and all else is fixed, the batch of one row too"
    model,length = tokens(),torch.export.Dim('length', min=2, max=20)
    path,_ = export_sparse(model, 'onnx' if suffix=='onnx' else 'live', named(1, 12), tmp_path/f'm.{suffix}', dynamic_shapes=dict(ids={1:length}, pad={1:length}))
    check_file(path, model, [named(1, 7)])
    with pytest.raises(Exception): run_of(path)(**named(2, 7))

@pytest.mark.parametrize('suffix', ['pt2','onnx'])
def test_any_number_of_inputs(suffix, tmp_path):
    "A forward that takes `*xs` goes to files too"
    xs = torch.randn(3,8),torch.randn(3,8)
    assert export_sparse(many(), 'onnx' if suffix=='onnx' else 'live', xs, tmp_path/f'm.{suffix}', batch_sizes=[1,3])[1].error<1e-5

class Named(nn.Module):
    "Two inputs, and outputs by name"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, left, right, scale=None):
        both = self.layer(left)+right
        return dict(logits=both, other=(both, 2*both))

@pytest.mark.parametrize('make,x,names', [(lambda: nn.Sequential(nn.Linear(8,4)), torch.randn(3,8), (['input'],['output'])),
    (lambda: Named(), (torch.randn(3,8),torch.randn(3,4)), (['left','right'],['logits','other_0','other_1'])),
    (lambda: Named(), dict(right=torch.randn(3,4), left=torch.randn(3,8)), (['right','left'],['logits','other_0','other_1'])),
    (lambda: net(lambda m, seq: m.r(seq), r=nn.GRU(8, 4)), torch.randn(3,5,8), (['seq'],['output_0','output_1']))])
def test_an_onnx_file_has_the_names_of_the_forward(make, x, names, tmp_path):
    "Arguments by their names, the output called so, or by its key; several of one are numbered"
    onnx,model = pytest.importorskip('onnx'),make()
    sparsify_model(model, .5, seed=0)
    path,report = export_sparse(model, 'onnx', x, tmp_path/'m.onnx')
    graph = onnx.load(path).graph
    assert ([o.name for o in graph.input],[o.name for o in graph.output])==names and report.error<1e-5

def branch(m, x):
    h = m.a(x).relu()
    return m.b((2*h if x.shape[1]>6 else h).mean(1))

def traced(m, ids):
    out = m.r(m.e(ids))[0]
    return out if ids.sum()>0 else -out

@pytest.mark.parametrize('make,x,note', [(lambda: net(branch, a=nn.Linear(8,16), b=nn.Linear(16,4)), torch.randn(4,10,8), 'inputs with more than 6 entries along axis 1'),
    (lambda: net(traced, e=nn.Embedding(30, 16), r=nn.LSTM(16, 8)), torch.ones(3, 10).long(), 'values of the sample are fixed in the ONNX file')])
def test_an_onnx_file_of_one_branch_says_so(make, x, note, tmp_path):
    "A forward that branches is recorded in the sample's branch"
    with pytest.warns(UserWarning, match=note): report = export_sparse(sparse(make), 'onnx', x, tmp_path/'a.onnx')[1]
    assert note in report.note

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
    "Nor warned of, by the library or by exporters, for a model of transformers"
    pytest.importorskip('transformers')
    res = run_code(silent, tmp_path)
    assert not res.returncode and not res.stdout and not res.stderr, res


# What fastai's networks are made of

def texts(bs, n, seq_len=5):
    "Token ids as fastai's loaders pad them: the longest text is first, and others begin after whole chunks of padding"
    from fastai.text.data import pad_input_chunk
    lengths = [n,*sorted((random.randint(1, n) for _ in range(bs-1)), reverse=True)]
    return torch.stack([x for x, in pad_input_chunk([(torch.randint(2, 50, (k,)),) for k in lengths], seq_len=seq_len)])

@pytest.mark.parametrize('n,max_len', [(4,None),(13,None),(23,None),(23,10)])
def test_a_text_classifier(n, max_len, tmp_path):
    "Its file reads texts of any length in batches of any size, padded as fastai pads them"
    from fastai.text.models.awdlstm import AWD_LSTM,awd_lstm_clas_config
    from fastai.text.models.core import get_text_classifier
    torch.manual_seed(0)
    random.seed(0)
    config = dict(awd_lstm_clas_config, emb_sz=8, n_hid=12, n_layers=2)
    model = get_text_classifier(AWD_LSTM, 50, 3, seq_len=5, max_len=max_len, config=config).eval()
    path,report = export_sparse(model, 'onnx', texts(4, n), tmp_path/'m.onnx')
    assert report.error<1e-6 and not report.note
    check_file(path, model, [texts(bs, k) for bs,k in ((1,n),(7,n+9),(3,2),(5,31))])

@pytest.mark.parametrize('format', ['onnx','mnn','.pt2'])
def test_a_unet(format, tmp_path):
    "fastai's `DynamicUnet`, whose last layers change the type of a tensor"
    if format=='mnn': pytest.importorskip('MNN')
    from fastai.vision.models.unet import DynamicUnet
    model = DynamicUnet(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()), 3, (16,16)).eval()
    path = tmp_path/('m.pt2' if format=='.pt2' else f'm.{format}')
    report = export_sparse(model, 'dense' if format=='.pt2' else format, torch.randn(2,3,16,16), path)[1]
    assert report.error<1e-4
