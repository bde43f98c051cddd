"The first lines that a newcomer writes: with nothing else said they train by the recommended method, whatever drives the loop"
import pytest,tempfile,torch,torch.nn.functional as F
from fastai.basics import Adam,CrossEntropyLossFlat,DataLoader,DataLoaders,Learner
from fastsparse.all import *
from fastsparse.train.method import auto_presets
from helpers import *
from torch import nn
from torch.utils.data import TensorDataset

def sparse(sparsity=.8):
    m = mlp((16,64,64,8))
    sparsify_model(m, sparsity, erdos_renyi_sparsity, seed=0)
    return m

def loop(m, n=320, **kwargs): return DynamicSparseTraining(m, torch.optim.Adam(m.parameters(), lr=.01), n, **kwargs)
def parts(engine): return [settings_of_run(engine)[k] for k in ('keep_score_f','grow_score_f','batches_per_update','replace_step')]
def recommended(n): return parts(loop(sparse(), n, **auto_presets(n)))

@pytest.mark.parametrize('kwargs', [{}, dict(method='auto'), dict(seed=3)])
def test_a_plain_loop_needs_model_optimizer_and_steps(kwargs):
    "The recommended method: about 32 intervals, of which those before .75 of the run end in an update"
    m = sparse()
    dst,n,before = loop(m, 128, **kwargs),live(m),masks_of(m)
    assert parts(dst)==recommended(128) and "Auto_presets(" in repr(dst)
    spin(dst, 128)
    assert dst.n_updates>8 and not same_masks(before, masks_of(m)) and sum(live(m))==sum(n)
    assert_dead(m, dst.opt)

def test_settings_go_before_the_recommended_ones():
    "An interval, too; who gives one and no method gets the defaults of `Method`; a dense model needs a sparsity besides"
    said = settings_of_run(loop(sparse(), method='auto', batches_per_update=40, stop_pct=.5))
    assert (said['batches_per_update'],said['stop_pct'],said['keep_score_f'])==('40','0.5',recommended(320)[0])
    assert parts(loop(sparse(), batches_per_update=40))[:3]==['weight_magnitude','gradient_magnitude','40']
    loop(m := mlp((16,64,64,8)), sparsity=.75)
    assert sum(live(m))==round(.25*(16*64+64*64+64*8))

@pytest.mark.parametrize('kwargs,every', [({}, 'Interval(100)'), (dict(steps_per_epoch=30), 'Interval(30)'), (dict(batches_per_update=7), '7')])
@pytest.mark.parametrize('method', ['set',SNFS_presets], ids=['name','preset'])
def test_a_method_that_says_no_time_gets_one(method, kwargs, every):
    "Once an epoch, as under fastai, or every 100 steps; one's own interval goes before"
    assert parts(loop(sparse(), 3200, method=method, **kwargs))[2]==every

def learner(m):
    g = torch.Generator().manual_seed(0)
    dl = DataLoader(TensorDataset(torch.randn(64, 16, generator=g), torch.randint(8, (64,), generator=g)), bs=8)
    return Learner(DataLoaders(dl, dl), m, loss_func=CrossEntropyLossFlat(), opt_func=Adam)

def by_loop(m, sparsity, **kwargs): spin(loop(m, 64, sparsity=sparsity, seed=0, **kwargs), 64)

def by_callback(m, sparsity, **kwargs):
    learn = learner(m)
    with learn.no_bar(), learn.no_logging(): learn.fit(8, cbs=DynamicSparseTrainingCallback(sparsity=sparsity, seed=0, **kwargs))

def by_one_line(m, sparsity, **kwargs):
    learn = learner(m)
    with learn.no_bar(), learn.no_logging(): learn.fit_sparse(8, sparsity, seed=0, **kwargs)

def by_trainer(m, sparsity, **kwargs):
    hf = pytest.importorskip('transformers')
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = m
        def forward(self, x, labels): return dict(loss=F.cross_entropy(self.net(x), labels))
    rows = [dict(x=torch.randn(16), labels=i%8) for i in range(64)]
    with tempfile.TemporaryDirectory() as d:
        args = hf.TrainingArguments(d, num_train_epochs=8, per_device_train_batch_size=8, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy='no')
        hf.Trainer(Net(), args, train_dataset=rows, callbacks=[SparseTrainerCallback(sparsity=sparsity, seed=0, **kwargs)]).train()

@pytest.mark.parametrize('kwargs', [{}, dict(method='auto')], ids=str)
@pytest.mark.parametrize('by', [by_callback,by_trainer])
def test_all_take_a_sparsity_and_nothing_else(by, kwargs):
    "By the recommended method, as the length of the training is known when it begins"
    seen,m = [],mlp((16,64,64,8))
    by(m, .8, on_update=lambda engine, t: seen.append(parts(engine)), **(dict(method='auto') if by is by_callback else kwargs))
    assert seen and all(o==recommended(64) for o in seen) and sum(live(m))==round(.2*(16*64+64*64+64*8))

@pytest.mark.parametrize('by', [by_loop,by_callback,by_one_line,by_trainer])
def test_a_sparse_model_keeps_its_layers_shares_at_another_sparsity(by):
    "Half of 400, 600 and 120 live weights of 5632, and half as many again; what only drops reaches the sparsity too; other shares are asked for"
    only_drops = dict(grow_score_f=None, batches_per_update=10)
    cases = ([200,300,60],{}),([102,407,51],dict(sparse_f='uniform')),([600,900,180],{}),([200,300,60],only_drops)  # uniform: 101.8, 407.3, 50.9
    for expect,kwargs in cases if by is by_loop else cases[:2]:
        m = mlp((16,64,64,8))
        sparsify_model(m, 1-1120/5632, given_sparsity([1-400/1024, 1-600/4096, 1-120/512]), seed=0)
        assert live(m)==[400,600,120]
        by(m, 1-sum(expect)/5632, **kwargs)
        assert live(m)==expect
    with pytest.raises(ValueError, match=' sparse, and this method doesn.t move them'): by(sparse(), .9, method='static')
    by(sparse(), .8, method='static')
