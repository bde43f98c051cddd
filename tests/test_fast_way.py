"The usual lines take the fast way: live weights where the fixed rule says that they pay, masks elsewhere, and the same training either way"
import pytest,torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam,Lamb
from fastai.torch_core import set_seed
from fastai_data import TensorData,momentum_sgd
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets,Static_presets
from helpers import masked_params
from torch import nn

class Reads(nn.Module):
    "Its wide layer is never called: its weight is read, as in Swin's attention"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Linear(64,256),nn.Linear(256,512),nn.Linear(512,10)
    def forward(self, x): return self.c(nn.functional.linear(self.a(x).relu(), self.b.weight, self.b.bias).relu())

def fit(way, settings=RigL_presets, opt_func=Adam, cbs=(), reads=False, one_line=False, sparsity=None, n=3):
    "A network whose second layer is wide enough to live, and whose others are not"
    set_seed(0)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    y = x[:,:10].argmax(1)
    dls = DataLoaders.from_dsets(TensorData(x, y), TensorData(x[:64], y[:64]), bs=64, num_workers=0, device='cpu')
    model = Reads() if reads else nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,512), nn.ReLU(), nn.Linear(512,10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=opt_func)
    if not one_line and sparsity is None: sparsify_model(model, .9, seed=0)
    with learn.no_bar(),learn.no_logging():
        if one_line: return learn,learn.fit_sparse(n, .9, 1e-3, seed=0, sparse_compute=way)
        cb = DynamicSparseTrainingCallback(seed=0, sparse_compute=way, **{**settings, 'batches_per_update':3}, **({} if sparsity is None else dict(sparsity=sparsity)))
        try: learn.fit(n, 1e-3, cbs=[cb, *cbs])
        except KeyboardInterrupt: pass
    return learn,cb

def same(a, b):
    for u,v in zip(masked_params(a.model), masked_params(b.model)): assert u.mask.equal(v.mask)
    for p,q in zip(a.model.parameters(), b.model.parameters()): assert p.shape==q.shape and torch.allclose(p, q, atol=1e-5)

ways = dict(rigl={}, set=dict(settings=SET_presets), static=dict(settings=Static_presets), usual=dict(settings={}), fit_sparse=dict(one_line=True, n=2),
    gradual=dict(settings=GMP_presets, sparsity=.95, n=4))

@pytest.mark.parametrize('kind', ways)
def test_both_ways_train_the_same_network(kind):
    "The same masks, and weights equal up to rounding; the rule is asked again with each change of the counts; an accumulated update reads all batches of its step"
    (a,cb),(b,_) = fit(None, **ways[kind]),fit(False, **ways[kind])
    assert cb.report.plan=={'0.weight':'dense','2.weight':'rows','4.weight':'dense'} and not cb.why_masked
    same(a, b)
    if kind=='rigl': same(*[fit(way, cbs=[GradientAccumulation(128)])[0] for way in (None,False)])

def test_what_needs_dense_weights_stays_masked_and_says_why():
    "No error where nobody asked for live weights; one where somebody did"
    _,cb = fit(None, settings=SNFS_presets, opt_func=momentum_sgd, n=1)
    assert 'dense history' in cb.why_masked and cb.report is None
    with pytest.raises(ValueError, match='dense history'): fit(True, settings=SNFS_presets, opt_func=momentum_sgd)

def test_an_optimizer_that_looks_at_whole_layers_trains_the_same_network():
    (a,cb),(b,_) = [fit(way, opt_func=Lamb, n=2) for way in (None,False)]
    same(a, b)
    assert cb.report.plan['2.weight']=='rows'

def test_without_the_extra_all_is_masked(monkeypatch):
    "And the report says what to install"
    monkeypatch.setattr('fastsparse.live.compute.kernels_take', lambda *ts: False)
    _,cb = fit(None, n=1)
    assert set(cb.report.plan.values())=={'dense'} and "pip install 'livesparse[fast]'" in cb.report.df.note[1]

@pytest.mark.parametrize('density,batch,lives', [(.1,64,True), (.1,63,False), (.2,64,True), (.2,63,False), (.3,4096,False), (.01,64,True)])
def test_the_rule_is_a_function_of_size_density_and_batch(density, batch, lives):
    "256 x 512 weights: from 2^23 products of weights and rows on, and at a density of at most .25"
    data = TensorData(torch.randn(batch, 256), torch.zeros(batch, dtype=torch.long))
    dls = DataLoaders.from_dsets(data, data, bs=batch, num_workers=0, device='cpu')
    learn,cb = Learner(dls, nn.Sequential(nn.Linear(256,512)), loss_func=CrossEntropyLossFlat()),DynamicSparseTrainingCallback(method='static', seed=0)
    sparsify_model(learn.model, 1-density, seed=0)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=cb)
    assert cb.report.plan['0.weight']==('rows' if lives else 'dense')

def test_a_layer_whose_weight_another_module_reads_is_live():
    "A product of it is one of live weights, whoever calls it"
    (a,cb),(b,_) = [fit(way, reads=True, one_line=True, n=2) for way in (None,False)]
    same(a, b)
    assert 'rows' in cb.report.plan.values()

def test_a_resumed_fit_is_equal_bit_for_bit(tmp_path):
    "Law 6: stopped after any batch, the first step and live ones"
    class Stop(Callback):
        order = 90
        def __init__(self, at): self.at,self.i = at,0
        def after_batch(self):
            self.i += self.training
            if self.training and self.i==self.at: raise KeyboardInterrupt
    def run(folder, *cbs):
        learn,cb = fit(None, cbs=[SparseCheckpoint(tmp_path/folder, every=1), *cbs], n=2)
        return learn,cb.report
    whole,report = run('whole')
    assert report.plan['2.weight']=='rows'
    for at in (1,3,9):
        run(str(at), Stop(at))
        part,report = run(str(at))
        assert report.plan['2.weight']=='rows'
        for p,q in zip(whole.model.parameters(), part.model.parameters()): assert p.equal(q), at
