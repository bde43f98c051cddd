"A learner with a sparse model: loaded, exported, copied, validated, interrupted, and what users of the 2020 library do"
import copy,pickle,pytest,random,numpy as np,torch,torch.nn.functional as F
from fastai.callback.core import CancelBatchException,CancelEpochException,CancelFitException,Callback
from fastai.callback.schedule import *
from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
from fastai.learner import load_learner
from fastai.optimizer import Adam
from fastai.test_utils import synth_dbunch,synth_learner
from fastai_data import *
from fastsparse.all import *
from helpers import agree,assert_dead,live,masked_params,masks_of,same_masks,snapshot
from torch import nn

DST = DynamicSparseTrainingCallback
presets = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)
pytestmark = pytest.mark.filterwarnings('ignore:load_learner', 'ignore:Saved file')

def hooks_of(model):
    "How many hooks the modules and parameters of `model` hold"
    grad_hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    return grad_hooks+sum(len(m._forward_pre_hooks)+len(m._forward_hooks) for m in model.modules())

def test_masks_come_back_with_the_best_weights(tmp_path):
    "Law 6: SaveModelCallback reloads the weights of epoch 1 and with them its masks, counts and shown sparsities; `learn.load` brings them to a learner with other ones"
    learn,best = sparse_learner(tmp_path, opt_func=Adam, lr=.01),{}
    def best_at_one(pred, targ): return float(learn.epoch==1)
    learn.metrics = [best_at_one]
    class Keep(Callback):
        def after_epoch(self):
            if self.learn.epoch==1: best.update(snapshot(self.learn.model))
    cb,moved = fit(learn, 4, [Keep(), SaveModelCallback(monitor='best_at_one', with_opt=True)], sparsity=.8)
    assert moved[-1]>20 and agree(best, snapshot(learn.model)) and live(learn.model)==[410,64]
    learn.fit(2, cbs=[cb, Probe()])
    assert live(learn.model)==[410,64]
    other = sparse_learner(tmp_path, opt_func=Adam, seed=2)
    other.fit(1)
    other.load('model')
    other.fit(1, cbs=Probe())
    assert all(torch.equal(best[f'{o.name}_mask'], o.mask) for o in masked_params(other.model))
    fit(other, 1, [Probe()])
    assert live(other.model)==[410,64]

def test_checkpoints_that_do_not_fit(tmp_path):
    "Law 10: sparse into dense and dense into sparse name the mask, unstrict too; what obeys the masks comes in without them"
    sparse,dense = sparse_learner(tmp_path),learner(tmp_path, model=mlp(seed=3))
    sparse.save('sparse')
    dense.save('dense')
    learn = sparse_learner(tmp_path)
    for strict in (True,False):
        with pytest.raises(ValueError, match='0.weight_mask.*unsparsify'): learn.load('dense', strict=strict)
    masks = masks_of(learn.model)
    with torch.no_grad():
        for o,p in zip(masked_params(learn.model), (dense.model[0].weight, dense.model[2].weight)): p.mul_(o.mask)
    dense.save('dense')
    learn.load('dense', strict=False)
    learn.validate()
    assert_dead(learn.model)
    assert same_masks(masks, masks_of(learn.model)) and torch.equal(learn.model[0].weight, dense.model[0].weight)

@pytest.mark.parametrize('fitted', [False, True])
def test_lr_find(fitted, tmp_path):
    "Law 7: masks are enforced, topology rests; weights, masks, hooks and the engine's state are as before"
    cb,probe,watch = DST(batches_per_update=2, keep_score_f=weight_magnitude, grow_score_f=elsewhere, seed=4),Probe(),Watch()
    learn = sparse_learner(tmp_path, cbs=[cb, probe, watch])
    if fitted: learn.fit(2)
    before,hooks,state,n = snapshot(learn.model),hooks_of(learn.model),cb.state_dict(),probe.n_checks
    watch.moved.clear()
    learn.lr_find(num_it=15, end_lr=.1, show_plot=False, suggest_funcs=None)
    assert watch.moved==[] and probe.n_checks-n==15
    assert agree(before, snapshot(learn.model)) and hooks==hooks_of(learn.model) and state==cb.state_dict()
    learn.fit(1)
    assert watch.moved==[2,4,6] and cb.state_dict()['n_updates']==3+(6 if fitted else 0)  # 2 to 12 of 20: at 14 `int(.0033*205)=0` would move

def test_validate_changes_nothing(tmp_path):
    "Law 7: validate and get_preds leave weights, masks, BatchNorm, hooks, engine and mode as they were, and draw what they draw on a dense model"
    draws = []
    for sparse in (False, True):
        cb = DST(batches_per_update=2, seed=3)
        learn = learner(tmp_path, model=ConvNet(), cbs=[cb] if sparse else [], dtype=torch.float, flat=False)
        if sparse: sparsify_model(learn, .8, 'uniform', seed=1)
        learn.fit(1)
        def now(): return [snapshot(learn.model), hooks_of(learn.model), cb.state_dict(), [p.grad.clone() for p in learn.model.parameters()]]
        before = copy.deepcopy(now())
        for seed in (torch.manual_seed, random.seed, np.random.seed): seed(3)
        learn.validate()
        learn.get_preds()
        draws.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))
        assert agree(before, now())
    assert agree(*draws)

class Interlude(Callback):
    "Validate, predict and export while a fit runs, then let training go on"
    order,run_valid = 70,False
    def __init__(self, event): setattr(self, event, self._go)
    def _go(self):
        if self.learn.lock.locked(): return  # this is the validation's own event
        keep = [(k, getattr(self.learn, k)) for k in ('training','dl','epoch','train_iter','pct_train','iter','n_iter')]
        self.learn.validate()
        self.learn.get_preds()
        for k,v in keep: setattr(self.learn, k, v)
        if self.learn.training: self.learn.model.train()
        else: self.learn.export('e.pkl')

@pytest.mark.parametrize('event', ['after_batch','after_epoch'])
def test_validate_and_export_in_the_middle_of_a_fit(event, tmp_path):
    "Law 7: from another callback, after each batch or epoch, gives the run without it, bit for bit"
    runs = []
    for cbs in ([], [Interlude(event)]):
        learn = sparse_learner(tmp_path)
        cb,moved = fit(learn, 2, cbs, seed=3)
        assert moved==[4,8,12]
        runs.append((snapshot(learn.model), cb.state_dict()))
    assert agree(*runs)
    if event=='after_epoch': assert agree(snapshot(load_learner(tmp_path/'e.pkl').model), runs[1][0])

@pytest.mark.parametrize('fitted', ['no','yes','interrupted'])
def test_export_and_load_learner(fitted, tmp_path):
    "Law 6: an exported learner keeps masks and enforcement, with the callback inside, and trains on"
    learn = sparse_learner(tmp_path, cbs=[DST(batches_per_update=4, seed=2)])
    if fitted=='yes': learn.fit(1)
    if fitted=='interrupted':
        with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=At('after_backward', [4], cancel(KeyboardInterrupt)))
    before = snapshot(learn.model)
    learn.export('e.pkl')
    twin = load_learner(tmp_path/'e.pkl')
    x = learn.dls.valid.one_batch()[0]
    assert agree(before, snapshot(learn.model)) and agree(before, snapshot(twin.model)) and torch.equal(learn.model.eval()(x), twin.model.eval()(x))
    for o in (learn, twin):
        o.dls = loaders(*digits())
        o.fit(1, cbs=[watch := Watch(), Probe()])
        assert watch.moved==[4] and live(o.model)==[205,32]
    assert fitted!='no' or same_masks(masks_of(learn.model), masks_of(twin.model))  # an export holds no optimizer state

@pytest.mark.parametrize('clone', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy','pickle'])
def test_copies_of_the_model_are_enforced(clone, tmp_path):
    "Law 6: made after a fit or at a batch whose gradients are read dense, a copy keeps masks and enforcement, and its training doesn't touch the original"
    learn,copies = sparse_learner(tmp_path),[]
    fit(learn, 1, [At('after_pred', [4], lambda l: copies.append(clone(l.model)))])
    before = snapshot(learn.model)
    for twin in (copies[0], clone(learn.model)):
        opt,at_first = torch.optim.SGD(twin.parameters(), .1, momentum=.9, weight_decay=.1),snapshot(twin)
        for x,y in learn.dls.train:
            opt.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            opt.step()
            assert_dead(twin, opt)
        assert agree(before, snapshot(learn.model)) and not agree(at_first, snapshot(twin))
        fit(learner(tmp_path, model=clone(twin)), 1, [Probe()])

# --- fits that end badly

@pytest.mark.parametrize('event,order,ex', [('before_batch', 20, CancelFitException), ('after_backward', 0, KeyboardInterrupt), ('after_backward', 0, CancelEpochException),
    ('before_step', 0, ValueError), ('before_step', 0, CancelFitException), ('after_batch', 0, KeyboardInterrupt)])
def test_a_fit_cut_short_leaves_masks_enforced(event, order, ex, tmp_path):
    "At a batch whose gradients are read dense (an interrupt fires no after_fit): without the callback dead stays dead, lr_find rests, and with it all works"
    learn,cb = sparse_learner(tmp_path),DST(batches_per_update=4, keep_score_f=weight_magnitude, grow_score_f=elsewhere)
    try: learn.fit(1, cbs=[cb, At(event, [4], cancel(ex('stop')), order=order)])
    except (KeyboardInterrupt,ValueError) as e: assert isinstance(e, ex)
    learn.fit(1, cbs=Probe())
    masks = masks_of(learn.model)
    learn.lr_find(num_it=6, end_lr=.1, show_plot=False, suggest_funcs=None)
    assert same_masks(masks, masks_of(learn.model))
    learn.fit(2, cbs=[cb, watch := Watch(), Probe()])
    assert watch.moved==[4,8,12] and live(learn.model)==[205,32]

def test_stopped_early_and_cancelled_batches(tmp_path):
    "t counts batches of the fit that was asked for, also those that were cancelled, and the next fit starts anew; one-cycle schedules don't matter"
    learn = sparse_learner(tmp_path)
    cb,moved = fit(learn, 5, [EarlyStoppingCallback(min_delta=1e9, patience=1)])
    assert moved==[4,8,12,16]  # of the two epochs that ran; the fit's length is five
    learn.fit_one_cycle(1, 1e-2, cbs=[cb, Probe(), again := Watch()])
    assert again.moved==[4]
    assert fit(learn, 2, [At('before_batch', [2,3,6,7,13], cancel(CancelBatchException)), Probe()])[1]==[4,8,12]

# --- what users of the 2020 library do

def test_2020_synthetic_regression():
    "MLP 1-32-32-1, .8 with a dense first layer, momentum growth: the validation loss ends near the noise, .01"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1,32), nn.ReLU(), nn.Linear(32,32), nn.ReLU(), nn.Linear(32,1))
    learn = synth_learner(data=synth_dbunch(bs=100), model=model)
    sparsify_model(learn.model, .8, sparse_f=first_layer_dense_uniform)
    with learn.no_bar(), learn.no_logging(): learn.fit(10, lr=1e-2, cbs=[DST(stop_pct=.5, grow_score_f=gradient_momentum), watch := Watch()])
    assert learn.validate()[0]<.1
    assert watch.moved and set(watch.moved)<={10,20,30,40} and live(model)==[32,205,6]  # 204.8 and 6.4 of round(243.2)-32

def test_2020_resnet18(tmp_path):
    "vision_learner at .9 ERK: every sparsity shown equals 1-n_alive/n_total after fit_one_cycle, and the total is a tenth"
    from fastai.vision.all import resnet18,vision_learner
    torch.manual_seed(0)
    dls = loaders(torch.randn(40,3,32,32), torch.arange(40)%2, bs=4, n_valid=4)
    learn = vision_learner(dls, resnet18, n_out=2, pretrained=False, loss_func=nn.CrossEntropyLoss(), path=tmp_path)
    sparsify_model(learn.model, .9, sparse_f=erdos_renyi_sparsity)
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, 1e-2, cbs=[DST(batches_per_update=4, stop_pct=.5, grow_score_f=gradient_momentum), watch := Watch()])
    params = sparse_params(learn.model)
    assert watch.moved==[4] and len(params)==22  # of 9 batches; 17 convolutions, 3 shortcuts, 2 linear layers of the head
    for p,mask,s in params: assert s==pytest.approx(1-int(mask.sum())/p.numel(), abs=1e-6)
    assert sum(live(learn.model))==round(.1*sum(p.numel() for p,*_ in params))
    assert_dead(learn.model)

def test_2020_sparsify_a_learner(tmp_path):
    "sparsify_model and unsparsify take a Learner; the hooks' remove() ends enforcement"
    learn = learner(tmp_path)
    hooks = sparsify_model(learn, .9, uniform_sparsity, seed=1)
    learn.fit(1, cbs=Probe())
    hooks.remove()
    learn.fit(1)
    assert (learn.model[0].weight!=0).sum()>1000 and live(learn.model)==[205,32]
    unsparsify(learn)
    assert not masked_params(learn.model) and hooks_of(learn.model)==0

@pytest.mark.parametrize('preset,extra,moved', [('SET',dict(batches_per_update=32),[32,64,96,128]), ('SNFS',dict(batches_per_update=32),[32,64,96,128]), ('RigL',{},list(range(10, 120, 10)))])
def test_2020_presets_as_keywords(preset, extra, moved, tmp_path):
    "`**SNFS_presets, batches_per_update=32` works as it stands; RigL's brings its own interval, shorter in 160 steps: 10, where 30 updates don't fit"
    learn = sparse_learner(tmp_path, dls=loaders(*digits(192), bs=2))
    learn.fit(2, cbs=[DST(**presets[preset], **extra), watch := Watch()])
    assert watch.moved==moved and sum(live(learn.model))==237 and (preset=='SNFS' or live(learn.model)==[205,32])
