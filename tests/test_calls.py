"Calls that would train something else than was asked for, or leave something half-changed: a named error, and nothing changed"
import csv,os,pytest,torch,traceback
import fastsparse.all
from functools import cached_property
from fastsparse.all import *
from helpers import mlp
from pathlib import Path
from torch import nn

# The world of a call, made anew for each: small models, an optimizer, data, and a folder

class World:
    "What calls are made with"
    def __init__(self, folder): self.folder = Path(folder)

    @cached_property
    def xb(self): return torch.ones(4,6)
    @cached_property
    def dense(self): return mlp((6,8,4))
    @cached_property
    def data(self): return [(self.xb, torch.ones(4,4))]

    @cached_property
    def model(self):
        model = mlp((6,8,4))
        sparsify_model(model, .5, sparse_init_mode=None, seed=0)
        return model

    @cached_property
    def opt(self):
        opt = torch.optim.SGD(self.model.parameters(), .1, momentum=.9)
        self.model(self.xb).square().sum().backward()
        opt.step()
        return opt

    @property
    def learned(self):
        model = mlp((6,8,4))
        learn_masks(model, seed=0)
        return model

    @property
    def params(self): return [p for p in self.dense.parameters() if p.ndim>1]

    @property
    def file(self): return save_sparse(self.model, self.folder/'m.safetensors')

    @property
    def run(self): return save_run(self.folder/'run.pt', self.model, self.opt)

    def state(self):
        "All that a refused call must leave as it was"
        made = vars(self)
        ts = [o for k in ('dense','model') if k in made for o in made[k].state_dict().items()]+([('xb', self.xb)] if 'xb' in made else [])
        if 'opt' in made: ts += [(k,v) for p in self.model.parameters() for k,v in self.opt.state[p].items() if isinstance(v, torch.Tensor)]
        return [(k, v.detach().clone()) for k,v in ts],os.listdir(self.folder)

def mse(out, y): return (out-y).square().mean()

def step(model): pass

# What each name is given that isn't wrong; a name without a line here takes nothing but its defaults

good = {}
good |= dict(sparsify_model=lambda w: dict(model=w.dense, sparsity=.5, sparse_init_mode=None, seed=0))
good |= dict(sparsify_parameter=lambda w: dict(module=w.dense, name='0.weight', sparsity=.5, seed=0))
good |= dict(fold_masks=lambda w: dict(model=w.learned))
good |= dict(sparse_mask=lambda w: dict(sizes=(4,6), sparsity=.5), sparse_mask_like=lambda w: dict(param=w.params[0], sparsity=.5))
good |= dict(top_k_mask=lambda w: dict(t=w.params[0], n_keep=3))
good |= dict(uniform_sparsity=lambda w: dict(params=w.params, sparsity=.5), first_layer_dense_uniform=lambda w: dict(params=w.params, sparsity=.5))
good |= dict(erdos_renyi_sparsity=lambda w: dict(params=w.params, sparsity=.5), global_sparsity=lambda w: dict(params=w.params, sparsity=.5))
good |= dict(load_sparse=lambda w: dict(model=w.dense, file=w.file))
good |= dict(save_sparse=lambda w: dict(model=w.model, path=w.folder/'s.safetensors'))
good |= dict(save_run=lambda w: dict(path=w.folder/'a.pt', model=w.model, opt=w.opt), load_run=lambda w: dict(path=w.run, model=w.model, opt=w.opt))
good |= dict(prune_magnitude=lambda w: dict(model=w.dense, sparsity=.5), prune_wanda=lambda w: dict(model=w.dense, sparsity=.5, data=w.data))
good |= dict(prune_sparsegpt=lambda w: dict(model=w.dense, sparsity=.5, data=w.data), prune_refit=lambda w: dict(model=w.dense, sparsity=.5, data=w.data))
good |= dict(prune_snip=lambda w: dict(model=w.dense, sparsity=.5, data=w.data, loss_func=mse))
good |= dict(prune_grasp=lambda w: dict(model=w.dense, sparsity=.5, data=w.data, loss_func=mse))
good |= dict(prune_synflow=lambda w: dict(model=w.dense, sparsity=.5, xb=w.xb, rounds=3))
good |= dict(prune_to=lambda w: dict(model=w.model, sparsity=.6), find_ticket=lambda w: dict(model=w.dense, train=step, sparsity=.6))
good |= dict(predict_cost=lambda w: dict(model=w.model, xb=w.xb, n_steps=10))
good |= dict(learn_masks=lambda w: dict(model=w.dense))
good |= dict(SparseEngine=lambda w: dict(model=w.model, opt=w.opt, n_steps=40, batches_per_update=5))
good |= dict(DynamicSparseTraining=lambda w: dict(model=w.model, opt=w.opt, n_steps=40, batches_per_update=5))
good |= dict(as_structure=lambda w: dict(x='2:4'), NM=lambda w: dict(n=2, m=4), Block=lambda w: dict(rows=2, cols=2))
good |= dict(Interval=lambda w: dict(every=10))
good |= dict(CubicSchedule=lambda w: dict(init=0., end=.9))
good |= dict(save_delta=lambda w: dict(model=w.model, base=w.dense.state_dict(), path=w.folder/'d.safetensors'), SparseCheckpoint=lambda w: dict(path=w.folder/'c.pt'))
good |= dict(sparse_compute=lambda w: dict(model=w.model, xb=w.xb, plan={'0.weight':'rows','2.weight':'dense'}))
good |= dict(export_sparse=lambda w: dict(model=w.model, format='dense', sample=w.xb))
good |= dict(prune_channels=lambda w: dict(model=w.dense, sparsity=.5, xb=w.xb), ChannelPruning=lambda w: dict(sparsity=.5))
good |= dict(keep_zeros=lambda w: dict(model=w.dense), merge_sparse=lambda w: dict(model=w.model), mask_adapters=lambda w: dict(model=w.model))
for name in 'DynamicSparseTrainingCallback FlopsCounter FreqSchedule FanIn MagnitudePlusGradient MeanGradient SampledGradient SparseHistory LearnedMaskCallback'.split(): good[name] = lambda w: {}

wrong = {'None':None, "'x'":'x', '-1':-1, '0':0, '.5':.5, '1.5':1.5, 'nan':float('nan'), '[]':[], '{}':{}, '{1:2}':{1:2}, 'object()':object(), 'Identity()':nn.Identity()}

def is_ours(e):
    "Was `e` raised on purpose by a line of ours?"
    last = traceback.extract_tb(e.__traceback__)[-1]
    return '/fastsparse/' in last.filename and 'raise ' in last.line

def same(a, b):
    pairs = zip(a[0], b[0])
    return a[1]==b[1] and len(a[0])==len(b[0]) and all(n==k and u.dtype==v.dtype and torch.equal(u.nan_to_num(), v.nan_to_num()) for (n,u),(k,v) in pairs)

@pytest.mark.parametrize('name,param,value', [row[:3] for row in csv.reader((Path(__file__).parent/'calls.csv').read_text().splitlines())])
def test_a_call_that_would_do_something_else_is_refused(name, param, value, tmp_path, monkeypatch):
    "By an error of ours, before anything changed"
    monkeypatch.chdir(tmp_path)
    w = World(tmp_path)
    kw = {**good[name](w), param:wrong[value]}
    before = w.state()
    with pytest.raises((ValueError,TypeError,FileNotFoundError)) as e: getattr(fastsparse.all, name)(**kw)
    assert is_ours(e.value) and same(before, w.state())
