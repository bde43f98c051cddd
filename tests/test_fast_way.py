"The usual lines take the fast way: live weights where the fixed rule says that they pay, masks elsewhere, and the same training either way"
import pytest,torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam,Lamb,SGD
from fastai.torch_core import set_seed
from fastai_data import TensorData
from fastsparse.all import *
from fastsparse.model.live_layers import follow_rule
from fastsparse.weights.live import LiveWeight
from fastsparse.weights.weight import handler_of,masked_params
from functools import partial
from torch import nn

def learner(opt_func=Adam):
    "A network whose second layer is wide enough to live, and whose others are not"
    set_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 64, generator=g)
    y = x[:,:10].argmax(1)
    dls = DataLoaders.from_dsets(TensorData(x, y), TensorData(x[:64], y[:64]), bs=64, num_workers=0, device='cpu')
    model = nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,512), nn.ReLU(), nn.Linear(512,10))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=opt_func)

def fit(sparse_compute, sparsity=.9, settings=RigL_presets, opt_func=Adam, cbs=()):
    learn = learner(opt_func)
    sparsify_model(learn.model, sparsity, seed=0)
    cb = DynamicSparseTrainingCallback(seed=0, sparse_compute=sparse_compute, **{**settings, 'batches_per_update':3})
    with learn.no_bar(),learn.no_logging(): learn.fit(3, 1e-3, cbs=[cb, *cbs])
    return learn,cb

def same(a, b):
    for u,v in zip(masked_params(a.model), masked_params(b.model)): assert u.mask.equal(v.mask)
    for p,q in zip(a.model.parameters(), b.model.parameters()): assert p.shape==q.shape and torch.allclose(p, q, atol=1e-5)

@pytest.mark.parametrize('settings', [RigL_presets, SET_presets, Static_presets, dict()], ids=['rigl','set','static','usual'])
def test_both_ways_train_the_same_network(settings):
    "The same masks, and weights equal up to rounding"
    (a,cb),(b,_) = fit(None, settings=settings),fit(False, settings=settings)
    assert cb.report.plan=={'0.weight':'dense','2.weight':'rows','4.weight':'dense'} and not cb.why_masked
    same(a, b)

def test_fit_sparse_trains_the_same_network_either_way():
    "With the rates that it scales, too"
    def run(way):
        learn = learner()
        with learn.no_bar(),learn.no_logging(): learn.fit_sparse(3, .9, 1e-3, seed=0, sparse_compute=way)
        return learn
    same(run(None), run(False))

def test_a_gradual_method_goes_live_when_it_is_sparse_enough():
    "The rule is asked again with each change of the counts"
    seen = []
    def look(engine, step): seen.append(isinstance(handler_of(engine.model[2].weight), LiveWeight))
    def run(way):
        learn = learner()
        cb = DynamicSparseTrainingCallback(seed=0, sparse_compute=way, **GMP_presets(batches_per_update=2, sparsity=.95), on_update=look)
        with learn.no_bar(),learn.no_logging(): learn.fit(4, 1e-3, cbs=cb)
        return learn
    a = run(None)
    assert not seen[0] and seen[-1]
    same(a, run(False))

def test_accumulated_steps_are_the_same_either_way():
    "An update reads the dense gradient of all batches of its step"
    acc = lambda: [GradientAccumulation(128)]
    same(fit(None, cbs=acc())[0], fit(False, cbs=acc())[0])

@pytest.mark.parametrize('settings,opt_func,why', [(SNFS_presets, SGD, 'dense history'), (RigL_presets, Lamb, 'treats each weight by itself')], ids=['momentum','lamb'])
def test_what_needs_dense_weights_stays_masked_and_says_why(settings, opt_func, why):
    "No error where nobody asked for live weights; one where somebody did"
    if opt_func is SGD: opt_func = partial(SGD, mom=.9)
    _,cb = fit(None, settings=settings, opt_func=opt_func)
    assert why in cb.why_masked and cb.report is None
    with pytest.raises(ValueError, match=why): fit(True, settings=settings, opt_func=opt_func)

def test_without_the_extra_all_is_masked(monkeypatch):
    "And the report says what to install"
    monkeypatch.setattr('fastsparse.model.plan.kernels_take', lambda *ts: False)
    _,cb = fit(None)
    assert set(cb.report.plan.values())=={'dense'} and "pip install 'livesparse[fast]'" in cb.report.df.note[1]

@pytest.mark.parametrize('density,batch,live', [(.1,64,True), (.1,63,False), (.2,64,True), (.2,63,False), (.3,4096,False), (.01,64,True)])
def test_the_rule_is_a_function_of_size_density_and_batch(density, batch, live):
    "256 x 512 weights: from 2^23 products of weights and rows on, and at a density of at most .25"
    model = nn.Sequential(nn.Linear(256,512))
    sparsify_model(model, 1-density, seed=0)
    report = follow_rule(model, batch)
    report.remove()
    assert report.plan['0.weight']==('rows' if live else 'dense')

class Reads(nn.Module):
    "Its wide layer is never called: its weight is read, as in Swin's attention"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Linear(64,256),nn.Linear(256,512),nn.Linear(512,10)
    def forward(self, x): return self.c(nn.functional.linear(self.a(x).relu(), self.b.weight, self.b.bias).relu())

def test_a_layer_whose_weight_is_only_read_stays_masked():
    "By default, in the callback and fit_sparse: no error, and the report says why; a fit that asks for live weights fails loudly"
    def run(way):
        learn = learner()
        learn.model = Reads()
        with learn.no_bar(),learn.no_logging(): cb = learn.fit_sparse(2, .9, 1e-3, seed=0, sparse_compute=way)
        return learn,cb
    (a,cb),(b,_) = run(None),run(False)
    same(a, b)
    assert set(cb.report.plan.values())=={'dense'} and 'not called' in cb.report.df.note[1]
    with pytest.raises(RuntimeError): run({'b.weight':'rows'})

def test_a_resumed_fit_is_equal_bit_for_bit(tmp_path):
    "Law 6: stopped after any batch, the first step and live ones"
    class Stop(Callback):
        order = 90
        def __init__(self, at): self.at,self.i = at,0
        def after_batch(self):
            self.i += self.training
            if self.training and self.i==self.at: raise KeyboardInterrupt
    def run(folder, cbs=()):
        learn = learner()
        sparsify_model(learn.model, .9, seed=0)
        cb = DynamicSparseTrainingCallback(seed=0, **RigL_presets(batches_per_update=3))
        try:
            with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-3, cbs=[cb, SparseCheckpoint(tmp_path/folder, every=1), *cbs])
        except KeyboardInterrupt: pass
        return learn,cb
    whole,cb = run('whole')
    assert cb.report.plan['2.weight']=='rows'
    for at in (1,2,3,4,9):
        run(str(at), [Stop(at)])
        part,cb = run(str(at))
        assert cb.report.plan['2.weight']=='rows'
        for p,q in zip(whole.model.parameters(), part.model.parameters()): assert p.equal(q), at
