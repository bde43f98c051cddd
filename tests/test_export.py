"Exports give the dense model's outputs, in the bytes that they claim; what is missing is named"
import pickle,pytest,sys,torch
from copy import deepcopy
from fastsparse.all import *
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

@pytest.mark.parametrize('format', ['dense','live','auto'])
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
    report = sparse_compute(model, xb, plan={'point.weight':'rows', 'attn.in_proj_weight':'rows', 'head.weight':'features'})
    new = fold_masks(model)
    assert isinstance(model.head.weight, SparseWeight)
    report.remove()
    assert list(new.state_dict())==list(Small().state_dict()) and not new._forward_pre_hooks and not masked_params(new)
    for o in masked_params(model):
        p = new.get_parameter(o.name)
        assert type(p) is nn.Parameter and is_positive_zero(p[~o.mask]) and torch.equal(p[o.mask], o.p[o.mask])

def test_live_uses_every_product():
    "Linear layers, attention's projections and 1x1 convolutions are stored sparse, others are dense"
    model,xb = small()
    new,_ = export_sparse(model, 'live', xb)
    assert {o.name for o in masked_params(new) if isinstance(o.p, SparseWeight)}=={'point.weight','attn.in_proj_weight','attn.out_proj.weight','head.weight'}
    assert not any(p.requires_grad for p in new.parameters())

def test_auto_says_that_dense_is_fastest():
    "Nothing pays in a tiny half-sparse layer: the result is plain and the report says so"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    sparsify_model(model, .1, seed=0)
    new,report = export_sparse(model, 'auto', torch.randn(2, 8))
    assert not masked_params(new) and 'dense is fastest' in report.note and 'dense is fastest' in repr(report)

def test_auto_takes_what_wins():
    "A large layer at 98 % is computed with live weights"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 1024))
    sparsify_model(model, .98, seed=0)
    new,report = export_sparse(model, 'auto', torch.randn(128, 768))
    assert isinstance(new[0].weight, SparseWeight) and report.speedup[128]>1 and not report.note

@pytest.mark.parametrize('dtype', [torch.float,torch.double,torch.bfloat16])
def test_safetensors(dtype, tmp_path):
    "The file holds live values and a bit a weight: at 95 % no more than .09 of dense, and it comes back bit for bit"
    pytest.importorskip('safetensors')
    torch.manual_seed(0)
    model = mlp((300,400,300), dtype=dtype)
    sparsify_model(model, .95, seed=0)
    xb = torch.randn(4, 300).to(dtype)
    path,report = export_sparse(model, 'safetensors', xb, path=tmp_path/'m.safetensors')
    plain = fold_masks(model)
    state = load_sparse(path)
    assert state.keys()==plain.state_dict().keys() and all(torch.equal(v, state[k]) and v.dtype==state[k].dtype for k,v in plain.state_dict().items())
    n,live = sum(o.p.numel() for o in masked_params(model)),sum(int(o.mask.sum()) for o in masked_params(model))
    assert path.stat().st_size==report.bytes<live*xb.element_size()+n/8+700*xb.element_size()+2000 and report.error==0
    if dtype==torch.float: assert report.bytes/report.dense_bytes<=.09

def test_onnx(tmp_path):
    "onnxruntime gives the same outputs"
    for name in ('onnx','onnxscript','onnxruntime'): pytest.importorskip(name)
    model,xb = small()
    path,report = export_sparse(model, 'onnx', xb, path=tmp_path/'m.onnx')
    assert path.exists() and report.error<1e-5

@pytest.mark.parametrize('format,package', [('safetensors','safetensors'), ('onnx','onnx')])
def test_missing_packages_are_named(format, package, tmp_path, monkeypatch):
    "With the way to install them"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f'{package}.torch', None)
    model,xb = small()
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'fastsparse\[export\]'"): export_sparse(model, format, xb, path=tmp_path/'m')

def test_what_is_refused():
    "Each with the name of what is wrong"
    model,xb = small()
    for args,kwargs,message in ((('zip',xb), {}, "format is 'zip'"), (('dense',), {}, 'sample is missing'), (('onnx',xb), {}, 'path is missing')):
        with pytest.raises(ValueError, match=message): export_sparse(model, *args, **kwargs)
    with pytest.raises(ValueError, match='has no masks'): export_sparse(Small(), 'dense', xb)
    report = sparse_compute(model, xb, plan={'head.weight':'rows'})
    with pytest.raises(ValueError, match='call remove'): export_sparse(model, 'live', xb)
    report.remove()

