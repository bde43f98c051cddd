"Files for engines: what MNN and onnxruntime run is what the model answers, nothing else happens on the way, and what can't be is refused by name"
import pytest,torch
from fastsparse.all import *
from fastsparse.deploy.mnn import open_mnn,pays_from
from fastsparse.deploy.onnx import open_onnx
from forks import run_code
from functools import partial
from importlib.util import find_spec
from test_export import layers,makers,net,samples
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(find_spec('MNN') is None, reason='MNN is not installed')

def conv(sparsity=.95):
    "Convolutions of two sizes, a norm and a head"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 128, 3), nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 128, 3), nn.ReLU(), nn.Conv2d(128, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    sparsify_model(m, sparsity, 'uniform', seed=0)
    return m.eval()

images = torch.randn(2, 3, 12, 12)

def test_a_file_for_mnn_stores_live_weights(tmp_path):
    "Sparse enough layers are stored without zeros, the file is small, and it runs other batches and sizes of images"
    model = conv()
    path,report = export_sparse(model, 'mnn', images, tmp_path/'m.mnn', batch_sizes=[1,2])
    assert report.plan==dict.fromkeys('0358', 'sparse') and report.bytes<.15*report.dense_bytes and report.error<1e-5
    assert list(report.ms)==list(report.onnx_ms)==list(report.int8_ms)==list(report.torch_ms)==[1,2] and set(report.speedup)=={1,2}
    run = open_mnn(path, ['input'], ['output'])
    for x in (torch.randn(5, 3, 12, 12), torch.randn(1, 3, 20, 15)):
        with torch.no_grad(): torch.testing.assert_close(run(x)[0], model(x), rtol=1e-4, atol=1e-5)
    assert [o.name for o in tmp_path.iterdir()]==['m.mnn']

def test_a_layer_that_pays_dense_is_stored_dense(tmp_path):
    "Between MNN's own threshold and the measured one zeros are stored, no answer changes, and the note names the layers"
    model = conv(.7)
    report = export_sparse(model, 'mnn', images, tmp_path/'m.mnn')[1]
    assert not report.plan and '0, 3, 5, 8' in report.note and report.error<1e-5 and report.bytes>.9*report.dense_bytes

def test_weights_of_8_bits(tmp_path):
    report = export_sparse(conv(), 'mnn', images, tmp_path/'m.mnn', int8=True)[1]
    assert report.bytes<.08*report.dense_bytes and 1e-7<report.error<.05

@pytest.mark.parametrize('shape,least', [((64,3,7,7), .96), ((64,64,3,3), .9), ((512,512,3,3), .75), ((64,64,1,1), .85), ((9,2048), .85)])
def test_the_least_sparsity_is_a_table(shape, least): assert pays_from(shape)==least

alone = """
import sys
seen = []
sys.addaudithook(lambda name, args: seen.append(name) if name.startswith(('subprocess','socket','os.system','os.exec','os.fork','os.posix_spawn','urllib')) else None)
import torch,test_roads as t
seen.clear()
t.export_sparse(t.conv(), 'mnn', t.images, sys.argv[1])
assert not [o for o in seen if not o.startswith('socket.__new__')] and not any(o.startswith('MNN.tools') for o in sys.modules), seen
"""

def test_an_export_starts_nothing_and_prints_nothing(tmp_path):
    "No process, no connection, no log of use, no line on stdout or stderr"
    res = run_code(alone, tmp_path/'m.mnn', PYTHONWARNINGS='ignore')
    assert not res.returncode and not res.stdout and not res.stderr, res

def test_mnn_is_silent_in_a_test_too(tmp_path, capfd):
    export_sparse(layers(8, 8), 'mnn', torch.randn(2, 8), tmp_path/'m.mnn')
    assert capfd.readouterr()==('','')

refused = [(lambda: makers['lstm'](), samples['lstm'], 'r is an nn.LSTM.*recurrent'),
    (lambda: layers(8, 8).double(), torch.randn(2, 8).double(), 'float64'),
    (lambda: net(lambda m, x: torch.fft.rfft(m.a(x)).real, a=nn.Linear(8, 8)), torch.randn(2, 8), 'no operator DFT'),
    (lambda: net(lambda m, x: torch.cond(x.sum()>0, m.a, lambda x: -m.a(x), (x,)), a=nn.Linear(8, 8)), torch.randn(2, 8), r'branch or loop \(If\)'),
    (lambda: net(lambda m, x: torch.bernoulli(m.a(x).sigmoid()), a=nn.Linear(8, 8)), torch.randn(2, 8), 'draws random numbers')]

@pytest.mark.parametrize('make,x,message', refused)
def test_what_mnn_cannot_run_is_named(make, x, message, tmp_path):
    "And nothing is written"
    with pytest.raises(ValueError, match=message): export_sparse(make().eval(), 'mnn', x, tmp_path/'m.mnn')
    assert not list(tmp_path.iterdir())


# In 8 bits

def test_convolutions_are_calibrated(tmp_path):
    "Static ranges need data, which may be a loader of inputs and targets; the report compares with the file in float32"
    model,data = conv(),[(torch.randn(4, 3, 12, 12), torch.zeros(4)) for _ in range(3)]
    with pytest.raises(ValueError, match='int8=dls.valid'): export_sparse(model, 'onnx', images, tmp_path/'m.onnx', int8=True)
    assert not list(tmp_path.iterdir())
    path,report = export_sparse(model, 'onnx', images, tmp_path/'m.onnx', int8=data)
    assert 'static' in report.note and report.bytes<.4*report.dense_bytes and 0<report.error<.1 and report.speedup and report.onnx_ms
    assert open_onnx(path)(torch.randn(3, 3, 12, 12))[0].shape==(3,10)

def test_linear_layers_need_no_data(tmp_path):
    model,x = layers(256, 256, 10),torch.randn(4, 256)
    report = export_sparse(model, 'onnx', x, tmp_path/'m.onnx', int8=True)[1]
    assert 'dynamic' in report.note and 'same in' in report.note and report.bytes<.35*report.dense_bytes and 0<report.error<.2

def test_only_engines_take_int8():
    with pytest.raises(ValueError, match="int8 is for 'onnx' and 'mnn'"): export_sparse(layers(8, 8), 'live', torch.randn(2, 8), int8=True)


# A learner stays a learner

@pytest.mark.parametrize('opt', ['Adam','AdamW'])
def test_a_shrunk_learner_trains_on(opt, tmp_path):
    "With its data, metrics, callbacks and rates, and the optimizer's state of the channels that are left; it says how many weights there are"
    from fastai.basics import Adam,CrossEntropyLossFlat,Learner,OptimWrapper,accuracy
    from fastai_data import digits,loaders
    x,y = digits(dtype=torch.float)
    m = nn.Sequential(nn.Linear(64,100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100,10))
    opt_func = Adam if opt=='Adam' else partial(OptimWrapper, opt=torch.optim.AdamW)
    def halves(m): return [[*m[0].parameters()],[*m[1:].parameters()]]
    learn = Learner(loaders(x, y), m, CrossEntropyLossFlat(), opt_func=opt_func, metrics=accuracy, path=tmp_path, splitter=halves)
    pruned,found = prune_channels(learn, .5)
    assert pruned is learn and repr(found).startswith('0.00771 → 0.00386 million weights')
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    assert int((m[0].weight.abs().sum(1)>0).sum())==50
    new,removed = shrink(learn, x[:4])
    assert removed==found
    assert isinstance(new, Learner) and new.model[0].weight.shape==(50,64) and learn.model[0].weight.shape==(100,64)
    assert repr(removed).startswith('0.00771 → 0.00386 million weights') and len(new.opt.hypers)==2
    live = learn.model[0].weight.abs().sum(1)>0
    state,old = [getattr(o.opt, 'opt', o.opt).state for o in (new, learn)]
    for k,t in old[learn.model[0].weight].items():
        if isinstance(t, torch.Tensor) and t.ndim==2: assert torch.equal(state[new.model[0].weight][k], t[live])
    with new.no_bar(), new.no_logging():
        before = new.validate()
        torch.testing.assert_close(torch.tensor(before), torch.tensor(learn.validate()), rtol=1e-3, atol=1e-4)
        new.fit(1, 1e-2)
        assert new.validate()[0]<before[0]


# In torch: zeros of anybody's, and convolutions

def counted(monkeypatch, n):
    "Measurements that find every storage `n` times as fast"
    for name in ('kernels.timing','deploy.export'): monkeypatch.setattr(f'fastsparse.{name}.speedup', lambda before, after, rounds=5: (before(), after(), n)[2])

@pytest.mark.parametrize('masked', [True,False])
def test_auto_stores_convolutions_with_masks_or_without(masked, monkeypatch):
    "Zeros count, whoever made them; other batches and sizes of images are computed right"
    counted(monkeypatch, 2)
    model = conv() if masked else plain_copy(conv())
    new,report = export_sparse(model, 'auto', images)
    assert set(report.plan.values())=={'kernel','rows'}
    assert report.error<1e-5 and report.bytes<.15*report.dense_bytes
    for x in (torch.randn(5, 3, 12, 12), torch.randn(1, 3, 17, 9)):
        with torch.no_grad(): torch.testing.assert_close(new(x), model(x), rtol=1e-4, atol=1e-5)

def test_zeros_without_masks_are_stored(tmp_path):
    "As live weights, and in a file of live values, which needs no sample"
    model = plain_copy(layers(256, 256, sparsity=.95))
    assert export_sparse(model, 'live', torch.randn(2, 256))[1].plan=={'0':'rows'}
    path,report = export_sparse(model, 'safetensors', path=tmp_path/'m.safetensors')
    assert report.bytes<.1*report.dense_bytes and report.ms=={} and 'safetensors' in repr(report)

@pytest.mark.parametrize('format', ['csr','condensed','block'])
def test_storages_that_go_say_so(format):
    with pytest.warns(FutureWarning, match="'live'"): assert export_sparse(layers(8, 8), format, torch.randn(2, 8))[1].plan=={'0':'rows'}

def test_a_model_from_accelerate_is_exported_in_its_own_type(tmp_path):
    "`prepare` puts autocast around the forward, which a file can't hold, and which would call the original's weights"
    accelerate = pytest.importorskip('accelerate')
    model,x = layers(16, 16, 4),torch.randn(2, 16)
    want = plain_copy(model)(x).detach()
    ready = accelerate.Accelerator(mixed_precision='bf16', cpu=True).prepare(model)
    path,report = export_sparse(ready, 'onnx', x, tmp_path/'m.onnx')
    torch.testing.assert_close(open_onnx(path)(x)[0], want, rtol=1e-4, atol=1e-5)
    new,_ = export_sparse(ready, 'dense', x)
    assert new(x).dtype==torch.float

def adds(m, x):
    x['h'] = m.a(x['x']).relu()
    return m.c(x['h'])
def pops(m, x): return m.c(m.a(x.pop('x')).relu())

@pytest.mark.parametrize('forward', [adds,pops])
@pytest.mark.parametrize('format', ['auto','onnx','safetensors'])
def test_a_forward_may_write_to_its_inputs(forward, format, tmp_path):
    "Each run gets containers of its own, and the sample stays as it is"
    model,sample = net(forward, a=nn.Linear(16, 64), c=nn.Linear(64, 4)).eval(),(dict(x=torch.randn(8, 16)),)
    prune_magnitude(model, .9)
    assert export_sparse(model, format, sample, tmp_path/f"m.{'pt2' if format=='auto' else format}")[1].error<1e-5 and list(sample[0])==['x']

def test_an_operator_that_onnx_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match='ONNX has no operator .*lgamma'):
        export_sparse(net(lambda m, x: torch.lgamma(m.a(x)), a=nn.Linear(8, 8)).eval(), 'onnx', torch.randn(4, 8), tmp_path/'m.onnx')
    assert not list(tmp_path.iterdir())

def test_a_language_model_begins_with_an_empty_state(tmp_path):
    "Its own state is not in the file, and batches of any size and length are right"
    model = makers['awd_lstm']().eval()
    model(samples['awd_lstm'])
    path,report = export_sparse(model, 'onnx', samples['awd_lstm'], tmp_path/'m.onnx')
    assert not report.note
    for x in (torch.randint(50, (2,19)), torch.randint(50, (5,3))):
        model.reset()
        with torch.no_grad(): torch.testing.assert_close(open_onnx(path)(x)[0], model(x)[0], rtol=1e-4, atol=1e-5)

def test_gelu_is_exact_in_mnn(tmp_path):
    "MNN's own is an approximation, which is wrong by 5e-4"
    model = net(lambda m, x: F.gelu(m.a(x)), a=nn.Linear(8, 8)).eval()
    assert export_sparse(model, 'mnn', 9*torch.randn(50, 8), tmp_path/'m.mnn')[1].error<5e-6

def test_mnn_runs_attention_with_a_mask(tmp_path):
    "torch's attention asks for NaN, which MNN has no operator for"
    def attend(m, x, mask): return F.scaled_dot_product_attention(m.q(x), m.q(x), x, attn_mask=mask[:,None,None])
    xb = torch.randn(2, 3, 6, 8),torch.ones(2, 6).bool()
    assert export_sparse(net(attend, q=nn.Linear(8, 8)).eval(), 'mnn', xb, tmp_path/'m.mnn')[1].error<1e-5
