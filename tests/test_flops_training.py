"What training costs: forwards counted while it runs, whatever else a fit does, and the formulas of the RigL paper"
import numpy as np,pickle,pytest,random,torch,torch.nn.functional as F
from fastai.callback.core import *
from fastai.callback.schedule import *
from fastai.callback.tracker import TrackerCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner,load_learner
from fastai.test_utils import synth_learner
from fastsparse.core.registry import declares
from fastsparse.masks.schedules import Interval
from fastsparse.masks.scores import fisher_saliency,MeanGradient,MovingGradient
from fastsparse.report.flops import count_flops,FlopsCounter,train_flops
from fastsparse.train.presets import RigL_presets
from functools import partial
from test_flops import mask_all,ones
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

def mlp(): return nn.Sequential(nn.Linear(1,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,1))

def make_learner(model=None, n_trn=5, cbs=None, **kwargs):
    torch.manual_seed(0)
    learn = synth_learner(n_trn=n_trn, n_val=2, cbs=cbs, **kwargs)
    learn.model = model or mask_all(mlp(), .5)
    return learn

def fit(learn, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(*args, **kwargs)

class MoveMasks(Callback):
    "Draws new masks after each step, and adds up by hand what each batch cost"
    run_valid,want = False,0
    def after_pred(self): self.want += 2*16*sum(int(b.sum()) for n,b in self.model.named_buffers() if n.endswith('_mask'))
    def after_step(self):
        for n,b in self.model.named_buffers():
            if n.endswith('_mask'): b.copy_(torch.rand(b.shape)<random.random())

class Bf16(Callback):
    order = 10
    def before_batch(self): self.autocast = torch.autocast('cpu', dtype=torch.bfloat16).__enter__()
    def after_pred(self): self.learn.pred = self.pred.float()
    def after_loss(self): self.autocast.__exit__(None, None, None)

@pytest.mark.parametrize('given_to', ['learner','fit'])
def test_counter_follows_moving_masks(given_to):
    "The sum is that of the batches by hand, with masks that change at each step; the dense sum doesn't care"
    random.seed(0)
    fc,dense_fc,move = FlopsCounter(),FlopsCounter(sparse=False),MoveMasks()
    learn = make_learner(cbs=[fc,dense_fc,move] if given_to=='learner' else None)
    fit(learn, 3, cbs=None if given_to=='learner' else [fc,dense_fc,move])
    assert fc.fwd_train_flops()==move.want
    assert dense_fc.fwd_train_flops()==3*5*16*2*16
    assert isinstance(fc.fwd_train_flops(), int) and 'forward' not in vars(learn.model)

def test_only_training_counts(tmp_path):
    "`validate`, `get_preds` and `lr_find` before, between and after fits add nothing; fits add up"
    fc = FlopsCounter(verbose=True)
    learn = make_learner(cbs=fc, path=tmp_path)
    one = 5*16*2*sum(int(b.sum()) for n,b in learn.model.named_buffers() if n.endswith('_mask'))
    def others():
        with learn.no_bar(), learn.no_logging():
            assert len(learn.validate())==1
            learn.get_preds()
            learn.lr_find(show_plot=False, num_it=7)
    others()
    assert fc.fwd_train_flops()==0
    fit(learn, 1)
    assert fc.fwd_train_flops()==one
    others()
    fit(learn, 2)
    assert fc.fwd_train_flops()==3*one

def test_validate_inside_a_fit():
    "fastai's own nested validation runs before_fit and after_fit of every callback"
    class Validates(Callback):
        order,run_valid = 70,False
        def after_batch(self):
            if self.iter==2 and self.epoch==0:
                saved = {k:getattr(self.learn, k) for k in ('dl','xb','yb','pred','loss','iter','n_iter')}
                self.learn._do_epoch_validate()
                self.model.train()
                for k,v in (saved|dict(training=True)).items(): setattr(self.learn, k, v)
    fc = FlopsCounter(sparse=False)
    fit(make_learner(cbs=[fc,Validates()]), 2)
    assert fc.fwd_train_flops()==2*5*16*2*16

def test_counter_changes_nothing():
    "Weights, statistics and random state after a fit are the same bits with and without it, also under bfloat16 and with dropout, attention and recurrence"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.i,self.bn,self.o = nn.Linear(1,8),nn.BatchNorm1d(8),nn.Linear(8,1)
            self.rnn,self.attn = nn.GRU(8,8,2,dropout=.3),nn.MultiheadAttention(8,2,dropout=.1)
        def forward(self, x):
            x,_ = self.rnn(F.dropout(self.bn(self.i(x)), .2, self.training)[None])
            return self.o(self.attn(x, x, x)[0][0])
    def run(*cbs):
        random.seed(0)
        torch.manual_seed(0)
        learn = make_learner(mask_all(Net()), cbs=[*cbs])
        fit(learn, 2)
        return [*learn.model.state_dict().values(), torch.get_rng_state()]
    for cbs in ([],[Bf16]):
        fc = FlopsCounter()
        assert all(map(torch.equal, run(*(o() for o in cbs)), run(*(o() for o in cbs), fc)))
        assert fc.fwd_train_flops()>0

def test_counter_counts_under_autocast():
    "Weights are known through their casts"
    fc = FlopsCounter()
    learn = make_learner(cbs=[fc,Bf16()])
    fit(learn, 1)
    assert fc.fwd_train_flops()==5*16*2*sum(int(b.sum()) for n,b in learn.model.named_buffers() if n.endswith('_mask'))

class Lengths(nn.Module):
    "Packs by lengths that the shapes don't show"
    def __init__(self): super().__init__(); self.rnn,self.lengths = nn.RNN(1,4,batch_first=True),[]  # chkstyle: ignore
    def forward(self, x):
        n = len(self.lengths)%3+1
        self.lengths.append(n)
        packed = pack_padded_sequence(x[...,None].expand(16,3,1), torch.full((16,), n), batch_first=True)
        return self.rnn(packed)[1][0][:,:1]

def test_packed_lengths_count_each_time():
    fc = FlopsCounter()
    fit(make_learner(Lengths(), n_trn=6, cbs=fc), 1)
    assert fc.fwd_train_flops()==2*(1+2+3+1+2+3)*16*(4+16)

class Aux(nn.Module):
    "Like GoogLeNet: a second head, in training only"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(1,1),nn.Linear(1,1)  # chkstyle: ignore
    def forward(self, x): return self.a(x)+(self.b(x) if self.training else 0)

def test_what_training_really_does_counts():
    fc,m = FlopsCounter(),Aux()
    fit(make_learner(m, cbs=fc), 1)
    assert (fc.fwd_train_flops(),count_flops(m, ones(16,1)))==(5*2*16*2,2*16)

def test_root_that_is_recurrent():
    "A recurrent layer as the whole model; every batch has a forward, whether or not a step follows"
    class First(Callback):
        def after_pred(self): self.learn.pred = self.pred[0][:,:1]
    fc = FlopsCounter()
    fit(make_learner(nn.LSTM(1,4), cbs=[fc,First(),GradientAccumulation(32)]), 1)
    assert fc.fwd_train_flops()==5*2*16*4*(4+16)

def test_new_shapes_and_models():
    "Batches of other shapes, and masks and layers that change between fits"
    class Cut(Callback):
        order,run_valid = 20,False
        def before_batch(self):
            n = 16-self.iter%2*6
            self.learn.xb,self.learn.yb = (self.x[:n],),(self.y[:n],)
    fc = FlopsCounter()
    learn = make_learner(nn.Linear(1,1), cbs=[fc,Cut()])
    fit(learn, 1)
    assert fc.fwd_train_flops()==2*(3*16+2*10)
    learn.model = nn.Sequential(nn.Linear(1,2), nn.Linear(2,1))
    learn.create_opt()
    fit(learn, 1)
    assert fc.fwd_train_flops()==2*(3*16+2*10)*(1+4)

@pytest.mark.parametrize('cancel', [CancelBatchException,CancelTrainException,CancelEpochException,CancelFitException])
def test_cancelled_batches(cancel):
    "Batches whose forward never ran don't count, and no trace is left in the model"
    class Cancels(Callback):
        order,run_valid = 99,False
        def before_batch(self):
            if self.iter==0: raise cancel
    fcs = FlopsCounter(),FlopsCounter(sparse=False)
    learn = make_learner(nn.Linear(1,1), cbs=[*fcs,Cancels()])
    fit(learn, 1)
    want = 4*16*2 if cancel is CancelBatchException else 0
    assert [o.fwd_train_flops() for o in fcs]==[want,want] and 'forward' not in vars(learn.model)

@pytest.mark.parametrize('error', [ZeroDivisionError,KeyboardInterrupt])
def test_a_forward_that_fails(error):
    "Also an interrupt in the middle of a forward leaves torch and the model as they were"
    class Fails(nn.Module):
        def __init__(self): super().__init__(); self.l,self.fails = nn.LSTM(1,1),True  # chkstyle: ignore
        def forward(self, x):
            if self.fails: raise error
            return self.l(x)[0]
    fc = FlopsCounter()
    learn = make_learner(Fails(), cbs=fc)
    with pytest.raises(error): fit(learn, 1)
    assert torch._C._len_torch_dispatch_stack()==0 and torch.backends.mha.get_fastpath_enabled()
    assert 'forward' not in {**vars(learn.model), **vars(learn.model.l)}
    learn.model.fails = False
    fit(learn, 1)
    assert fc.fwd_train_flops()==5*2*16*8

def test_verbose_column(capsys):
    "The total stands behind the training loss; metrics, validate and trackers are as without it; nothing is printed"
    def mae2(p, y): return (p-y).abs().mean()
    learn = make_learner(nn.Linear(1,1), cbs=FlopsCounter(verbose=True), metrics=mae2)
    tracker = TrackerCallback(monitor='mae2', comp=np.less)
    fit(learn, 2, cbs=tracker)
    assert tracker.best==min(o[3] for o in learn.recorder.values)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','fwd_flops','valid_loss','mae2','time']
    assert [o[1] for o in learn.recorder.values]==[160,320]
    with learn.no_bar(), learn.no_logging(): assert len(learn.validate())==2
    assert capsys.readouterr().out==''

class Pairs:
    "Two tensors as a data set that `learn.export` can empty"
    def __init__(self, x, y): self.x,self.y = x,y
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]
    def new_empty(self): return Pairs(self.x[:0], self.y[:0])

@pytest.mark.filterwarnings('ignore:load_learner')
def test_pickle_and_export(tmp_path):
    "A counter that has run goes along with its learner, its sum too, but not its profiles; the loaded one counts on"
    dls = DataLoaders.from_dsets(*[Pairs(ones(32,1), ones(32,1))]*2, bs=16, num_workers=0)
    learn = Learner(dls, nn.Linear(1,1), loss_func=F.mse_loss, cbs=FlopsCounter(verbose=True), path=tmp_path)
    fit(learn, 1)
    learn.export()
    other = load_learner(tmp_path/'export.pkl')
    assert other.flops_counter.fwd_train_flops()==2*16*2 and not hasattr(other.flops_counter, 'profiles')
    assert pickle.loads(pickle.dumps(learn.flops_counter)).fwd_train_flops()==2*16*2
    other.dls = dls
    fit(other, 1)
    assert (other.flops_counter.fwd_train_flops(),learn.flops_counter.fwd_train_flops())==(2*2*16*2,2*16*2)

# ---- Training FLOPs ----

def momentum(p, **kwargs): return p
def gradient(p, **kwargs): return p
def magnitude(p, **kwargs): return p
declares(dense_history=True)(momentum)
declares(reads_grad=True)(gradient)

costs = [
    # the appendix of arXiv:1911.11134 for a sparse forward of 20 and a dense one of 100
    (None, 60), (dict(updates=[], grow_score_f=None), 60), (dict(batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=magnitude), 60),
    (dict(keep_score_f=magnitude, grow_score_f=None), 60),
    (dict(keep_score_f=gradient, grow_score_f=None, batches_per_update=100), 60),
    (dict(keep_score_f=magnitude, grow_score_f=gradient, batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=gradient, batches_per_update=1), (60+140)/2),
    (dict(keep_score_f=magnitude, grow_score_f=magnitude, redistribute_f=gradient, batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=momentum, redistribute_f=magnitude), 140),
    (dict(keep_score_f=momentum, grow_score_f=gradient, batches_per_update=100), 140),
    # a mean over the last k batches: k of 101 have a dense gradient, all where k exceeds the interval; a moving average reads them all
    (dict(keep_score_f=magnitude, grow_score_f=MeanGradient(8), batches_per_update=100), (93*60+8*140)/101),
    (dict(keep_score_f=MeanGradient(3), grow_score_f=gradient, batches_per_update=9), (7*60+3*140)/10),
    (dict(keep_score_f=magnitude, grow_score_f=MeanGradient(1), batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(keep_score_f=magnitude, grow_score_f=MeanGradient(50), batches_per_update=9), 140),
    (dict(keep_score_f=magnitude, grow_score_f=MovingGradient(.9)), 140),
    (dict(keep_score_f=fisher_saliency, grow_score_f=magnitude), 60),
    (dict(keep_score_f=fisher_saliency, grow_score_f=gradient, batches_per_update=100), (3*20*100+2*20+100)/101),
    (dict(grow_score_f=partial(momentum)), 140), (dict(grow_score_f=partial(gradient), batches_per_update=1), 100)]

@pytest.mark.parametrize('preset,want', costs)
def test_training_flops(preset, want): assert train_flops(20, 100, preset)==pytest.approx(want, rel=1e-12)

rigl = dict(grow_score_f=gradient)
fixed = RigL_presets(batches_per_update=100)

@pytest.mark.parametrize('args,want', [((20, 100, dict(rigl, batches_per_update=100)), 60.792), ((100, 100), 300),
    ((1000, 5000, dict(rigl, batches_per_update=100)), 50*(60+80/101)),
    ((20, 100, 'RigL'), 60+80/101), ((20, 100, 'set'), 60), ((20, 100, RigL_presets), 60+80/101), ((20, 100, fixed, 400), 60+80/101),
    ((20, 100, RigL_presets, 400), 60+80/(Interval(100).resolve(400, .75)+1))])
def test_training_flops_of_presets(args, want):
    "RigL's 60.792 of the paper, of a sample and of a run; presets by name; an interval becomes shorter in a short run, a number stays"
    assert train_flops(*args)==pytest.approx(want, abs=1e-3)

@pytest.mark.parametrize('args,what', [((20, 100, rigl), 'batches_per_update is None'), ((20, 100, {}), 'batches_per_update is None'),
    ((20, 100, dict(rigl, batches_per_update=4, updates=[5,9])), r'updates is \[5, 9\].*predict_cost'), ((20, 100, dict(rigl, batches_per_update=0)), 'batches_per_update is 0'),
    ((100, 20), 'sparse_fwd is 100.* 0 to 20'), ((-1, 20), 'sparse_fwd is -1'), ((20, 100, 'RigLe'), "did you mean 'rigl'")])
def test_training_flops_refuse(args, what):
    with pytest.raises(ValueError, match=what): train_flops(*args)
