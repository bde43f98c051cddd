"The first lines that a newcomer writes: with nothing else said they train by the recommended method, and a typing error is guessed"
import pytest,tempfile,torch,torch.nn.functional as F
from fastai.basics import Adam,Callback,CrossEntropyLossFlat,DataLoader,DataLoaders,Learner
from fastsparse.all import *
from fastsparse.train.fit import auto_presets
from helpers import assert_dead,data,mlp,train
from fastsparse.weights.weight import masked_params
from torch import nn
from torch.utils.data import TensorDataset

def sparse(sparsity=.8):
    m = mlp((16,64,64,8))
    sparsify_model(m, sparsity, erdos_renyi_sparsity, seed=0)
    return m

def settings_text(engine):
    "Which parts an engine's method has"
    m = engine.methods[0].settings
    return [m[k] for k in ('keep_score_f','grow_score_f','batches_per_update','replace_step')]

def recommended(n):
    m = mlp()
    sparsify_model(m, .5, seed=0)
    return settings_text(SparseEngine(m, torch.optim.SGD(m.parameters(), lr=.1), n, **auto_presets(n)))

@pytest.mark.parametrize('kwargs', [{}, dict(method='auto'), dict(seed=3)])
def test_a_plain_loop_needs_model_optimizer_and_steps(kwargs):
    "The recommended method: about 32 intervals, of which those before .75 of the run end in an update"
    m = sparse()
    opt = torch.optim.Adam(m.parameters(), lr=.01)
    dst = DynamicSparseTraining(m, opt, 320, **kwargs)
    assert settings_text(dst)==recommended(320) and "method='auto'" in repr(dst)
    before = [o.mask.clone() for o in masked_params(m)]
    train(m, opt, 320, *data(m))
    assert dst.n_updates>20 and any(not torch.equal(a, o.mask) for a,o in zip(before, masked_params(m)))
    assert sum(int(o.mask.sum()) for o in masked_params(m))==round(.2*sum(o.mask.numel() for o in masked_params(m)))
    assert_dead(m, opt)

def test_a_dense_model_needs_a_sparsity_besides():
    "And the error without it says so"
    m = mlp((16,64,64,8))
    opt = torch.optim.Adam(m.parameters(), lr=.01)
    with pytest.raises(ValueError, match='pass sparsity=0.9'): DynamicSparseTraining(m, opt, 100)
    DynamicSparseTraining(m, opt, 100, sparsity=.75, seed=0)
    assert sum(int(o.mask.sum()) for o in masked_params(m))==round(.25*(16*64+64*64+64*8))

def test_settings_go_before_the_recommended_ones():
    "An interval of one's own, too, with as many dead weights looked at as fit its updates"
    m = sparse()
    dst = DynamicSparseTraining(m, torch.optim.Adam(m.parameters()), 320, method='auto', batches_per_update=40, stop_pct=.5)
    assert dst.methods[0].batches_per_update==40 and dst.methods[0].stop_pct==.5 and settings_text(dst)[0]==recommended(320)[0]

def test_what_names_its_times_is_taken_as_it_is():
    "Whoever gives an interval and no method gets the defaults of `Method`, as ever"
    m = sparse()
    dst = DynamicSparseTraining(m, torch.optim.Adam(m.parameters()), 320, batches_per_update=40)
    assert settings_text(dst)[:3]==['weight_magnitude','gradient_magnitude','40']

@pytest.mark.parametrize('kwargs,every', [({}, 100), (dict(steps_per_epoch=30), 30)])
@pytest.mark.parametrize('method', ['set','snfs',SNFS_presets])
def test_a_method_that_says_no_time_gets_one(method, kwargs, every):
    "Once an epoch, as under fastai, or every 100 steps; one's own interval goes before, and 0 is refused as ever"
    def made(**own):
        m = sparse()
        return DynamicSparseTraining(m, torch.optim.Adam(m.parameters()), 3200, method=method, **kwargs, **own)
    assert made().methods[0].batches_per_update==every and made(batches_per_update=7).methods[0].batches_per_update==7
    with pytest.raises(ValueError, match='batches_per_update is 0'): made(batches_per_update=0)

def test_without_steps_the_error_says_what_needs_them():
    m = sparse()
    with pytest.raises(ValueError, match="n_steps is None, and method 'auto'"): DynamicSparseTraining(m, torch.optim.Adam(m.parameters()))

def learner(n=64, bs=8):
    g = torch.Generator().manual_seed(0)
    dl = DataLoader(TensorDataset(torch.randn(n, 16, generator=g), torch.randint(8, (n,), generator=g)), bs=bs)
    return Learner(DataLoaders(dl, dl), sparse(), loss_func=CrossEntropyLossFlat(), cbs=[], opt_func=Adam)

def test_the_callback_takes_auto_by_name():
    "The length of the fit is known when it begins"
    learn,cb = learner(),DynamicSparseTrainingCallback(method='auto', seed=0)
    seen = []
    class Look(Callback):
        order = cb.order+1
        def before_fit(self): seen.append(settings_text(cb.engine))
    with learn.no_bar(), learn.no_logging(): learn.fit(40, cbs=[cb,Look()])
    assert seen==[recommended(320)]

def test_trainers_take_a_sparsity_and_nothing_else():
    "Hugging Face's trainer, by the recommended method"
    hf = pytest.importorskip('transformers')
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp((16,64,64,8))
        def forward(self, x, labels): return dict(loss=F.cross_entropy(self.net(x), labels))
    for kwargs in ({}, dict(method='auto')):
        torch.manual_seed(0)
        model,rows = Net(),[dict(x=torch.randn(16), labels=i%8) for i in range(64)]
        seen = []
        cb = SparseTrainerCallback(sparsity=.8, seed=0, on_update=lambda e,t: seen.append(settings_text(e)), **kwargs)
        with tempfile.TemporaryDirectory() as d:
            args = hf.TrainingArguments(d, num_train_epochs=8, per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy='no')
            hf.Trainer(model, args, train_dataset=rows, callbacks=[cb]).train()
        assert seen and all(o==recommended(128) for o in seen)
        assert sum(int(o.mask.sum()) for o in masked_params(model))==round(.2*(16*64+64*64+64*8))

entries = dict(loop=lambda **kw: DynamicSparseTraining(m := sparse(), torch.optim.SGD(m.parameters(), lr=.1), 100, **kw),
    engine=lambda **kw: SparseEngine(m := sparse(), torch.optim.SGD(m.parameters(), lr=.1), 100, **kw), callback=DynamicSparseTrainingCallback,
    fit_sparse=lambda **kw: learner().fit_sparse(1, .8, **kw), preset=RigL_presets, trainer=lambda **kw: SparseTrainerCallback(sparsity=.8, **kw),
    lightning=lambda **kw: SparseLightningCallback(sparsity=.8, **kw))

@pytest.mark.parametrize('entry', entries)
@pytest.mark.parametrize('wrong,right', [('batch_per_update','batches_per_update'), ('keep_score','keep_score_f'), ('drop_frac','drop_fraction')])
def test_a_mistyped_setting_is_guessed_in_every_entry(entry, wrong, right):
    "By its own name; no class that the user never met is named"
    with pytest.raises(TypeError) as e: entries[entry](**{wrong:50})
    assert str(e.value)==f"{wrong!r} is no setting of a method: did you mean {right!r}?"

def test_a_name_like_none_lists_what_there_is():
    with pytest.raises(TypeError, match="'zzz' is no setting of a method: take some of batch_size, batches_per_update, "): RigL_presets(zzz=1)
    with pytest.raises(ValueError, match="did you mean 'rigl'"): DynamicSparseTraining(m := sparse(), torch.optim.SGD(m.parameters(), lr=.1), 100, method='rigel')

def live_of(m): return [int(o.mask.sum()) for o in masked_params(m)]

def by_loop(m, sparsity, **kwargs):
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = DynamicSparseTraining(m, opt, 64, sparsity=sparsity, seed=0, **kwargs)
    train(m, opt, 64, *data(m))
    return dst

def by_callback(m, sparsity, **kwargs): return by_learner(m, lambda learn: learn.fit(8, cbs=DynamicSparseTrainingCallback(sparsity=sparsity, seed=0, **kwargs)))

def by_one_line(m, sparsity, **kwargs): return by_learner(m, lambda learn: learn.fit_sparse(8, sparsity, seed=0, **kwargs))

def by_learner(m, fit):
    learn = learner()
    learn.model = m
    with learn.no_bar(), learn.no_logging(): fit(learn)

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
        cb = SparseTrainerCallback(sparsity=sparsity, seed=0, **kwargs)
        hf.Trainer(Net(), args, train_dataset=rows, callbacks=[cb]).train()

@pytest.mark.parametrize('by', [by_loop,by_callback,by_one_line,by_trainer])
def test_a_sparse_model_keeps_its_layers_shares_at_another_sparsity(by):
    "Half of 400, 600 and 120 live weights of 5632, and half as many again; what only drops reaches the sparsity too"
    def uneven():
        m = mlp((16,64,64,8))
        sparsify_model(m, 1-1120/5632, given_sparsity([1-400/1024, 1-600/4096, 1-120/512]), seed=0)
        assert live_of(m)==[400,600,120]
        return m
    for live,kwargs in ((560,{}), (1680,{}), (560,dict(grow_score_f=None, batches_per_update=10))):
        m = uneven()
        by(m, 1-live/5632, **kwargs)
        assert live_of(m)==[400*live//1120, 600*live//1120, 120*live//1120]
    m = uneven()
    by(m, 1-560/5632, sparse_f='uniform')
    assert live_of(m)==[102,407,51]  # 101.8, 407.3 and 50.9

@pytest.mark.parametrize('by', [by_loop,by_callback,by_one_line])
def test_masks_that_rest_refuse_another_sparsity(by):
    "Static training can't reach it, in whatever entry"
    m = sparse()
    with pytest.raises(ValueError, match='0.8.* sparse, and rest by this method'): by(m, .9, method='static')
    by(m, .8, method='static')

def test_a_loop_that_made_its_model_sparse_goes_on_where_the_model_is_sparse():
    "In the new process masks come first, from the file, and the engine finds them"
    m = mlp((16,64,64,8))
    saved = by_loop(m, .8).state_dict()
    again = mlp((16,64,64,8))
    sparsify_model(again, .5, seed=3)
    again.load_state_dict(m.state_dict())
    dst = DynamicSparseTraining(again, torch.optim.SGD(again.parameters(), lr=.1), 64, sparsity=.8, seed=0)
    dst.load_state_dict(saved)
    assert dst.n_updates==saved['n_updates']
