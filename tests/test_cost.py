"FLOPs of whole runs: by hand, against the published formulas, and what was foreseen against what was counted"
import math,pickle,pytest,torch
import numpy as np
from fastai.callback.core import Callback,CancelFitException
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai_data import ConvNet,digits,learner,loaders,mlp as fmlp
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets,GSE_presets,ITOP_presets
from fastsparse.methods.presets import ACDC_presets,DSD_presets,GraNet_presets,MEST_presets
from fastsparse.train.presets import Static_presets
from fastsparse.masks.schedules import cubic_path,steps
from fastsparse.methods.parts import acdc_path
from fastsparse.masks.scores import MovingGradient,MeanGradient,SampledGradient
from fastsparse.weights.find import masked_params
from fastsparse.train.growth import reset_state
from fastsparse.report.flops import train_flops
from fastsparse.report.cost import batch_flops,dead_read,Ledger,model_bits,param_bits,predict_cost,RunCost
from helpers import mlp
from hypothesis import given,settings as hsettings,strategies as st
from torch import nn

every = dict(batches_per_update=4, seed=0)
moves = dict(sparsity=.75, mask_init='magnitude', initial_drop_grow_pct=0., replace_step=False, **every)
gmp = dict(moves, grow_score_f=None, sparsity_path=cubic_path())
acdc = dict(ACDC_presets, sparsity=.75, sparse_f=uniform_sparsity, sparsity_path=acdc_path(phase=.2, start=.2, stop=.9),
    updates=FreqSchedule(2, start=2), seed=0)

# ---- A batch ----

def masked(sizes, live):
    "Linear layers of which the first `live[i]` weights live"
    model = nn.Sequential(*[nn.Linear(a, b, bias=False) for a,b in zip(sizes, sizes[1:])])
    for m,n in zip(model, live): m.register_buffer('weight_mask', torch.arange(m.weight.numel()).view_as(m.weight)<n)
    return model

def test_batch_by_hand():
    "5x3 and 3x2 weights, 5 and 4 live, 2 rows: each dense gradient costs its dead weights' multiply-adds"
    model = masked((5,3,2), (5,4))
    a,b = [m.weight_mask for m in model]
    profile = flop_profile(model, torch.ones(2,5))
    assert batch_flops(profile)==(36,84,0)
    assert [batch_flops(profile, {id(m):1. for m in o})[2] for o in ([a], [b], [a,b])]==[40,8,48]
    a.fill_(True)
    assert batch_flops(profile, {id(a):1., id(b):1.})==(76,84,8)

def test_dense_layers_beside():
    "What has no mask costs its dense count always, and nothing beyond it"
    model = masked((5,3,2), (5,))
    profile = flop_profile(model, torch.ones(1,5))
    assert batch_flops(profile, {id(model[0].weight_mask):1.})==(2*(5+6),2*(15+6),20)

def test_whose_gradients_are_dense():
    "By rule: gradient growth in its updates, momentum always, random growth never, a mean over a window in its window, a keep score's gradient never"
    rules = [('0.*', {}), ('2.*', dict(grow_score_f=gradient_momentum)), ('4.*', dict(grow_score_f=random_score)),
        ('6.*', dict(grow_score_f=MeanGradient(2))), ('8.*', dict(keep_score_f=gradient_saliency, grow_score_f=random_score))]
    model = mlp((6,)*6)
    sparsify_model(model, .5, seed=0)
    engine = SparseEngine(model, torch.optim.SGD(model.parameters(), lr=.1, momentum=.9), 40, rules=rules, **every)
    names,got = {id(o.mask):o.name[0] for o in masked_params(model)},{}
    for t in range(6):
        engine.prepare(t)
        got[t] = ''.join(sorted(names[k] for k in dead_read(engine)))
        engine.last_t = t
    assert got=={0:'2', 1:'2', 2:'2', 3:'26', 4:'026', 5:'2'}

# ---- A run, foreseen ----

def dense_net(n=100): return nn.Linear(n, 10, bias=False)

def sparse_net(sparsity=.8, n=100):
    model = dense_net(n)
    sparsify_model(model, sparsity, seed=0)
    return model

def test_empty_cost():
    c = RunCost()
    assert c.training==0 and np.isnan(c.of_dense) and np.isnan(c.inference) and c==RunCost() and c!=0

def test_classic_methods():
    "Static and SET cost 3S, SNFS 2S+D; RigL one dense gradient at each update, MeanGradient k of them, a moving average all; S=20, D=100 a batch"
    xb,S,D = torch.ones(1,10),400,2000
    model = lambda: sparse_net(n=100)
    xb = torch.ones(1,100)
    cost = lambda **kw: predict_cost(model(), xb, 101, **kw).training
    kw = dict(batches_per_update=10, drop_fraction=.3, stop_pct=1., seed=0)
    assert cost()==cost(keep_score_f=weight_magnitude, grow_score_f=random_score, **kw)==101*3*S
    assert cost(grow_score_f=gradient_momentum, **kw)==cost(grow_score_f=MovingGradient(), **kw)==101*(2*S+D)
    n = len([t for t in range(1,100) if t%10==0])  # never at the last step, 100
    assert cost(**kw)==101*3*S+n*(D-S)
    assert cost(grow_score_f=MeanGradient(4), **kw)==101*3*S+4*n*(D-S)+3*(D-S)*0

def test_paper_formula():
    "The period of RigL's formula, (3S*T+2S+D)/(T+1) = 60.792 for S=20, D=100, T=100: 101 batches of which one is an update"
    c = predict_cost(sparse_net(), torch.ones(1,100), 101, updates=[50], drop_fraction=.3, seed=0)
    assert c.training/101*100/2000==pytest.approx(60.792, abs=5e-4)==train_flops(20, 100, dict(RigL_presets))

def cubic(t, init=0., final=.8, start=100, stop=1000):
    "Zhu and Gupta's cubic"
    return final+(init-final)*(1-(min(max(t, start), stop)-start)/(stop-start))**3

def test_gradual_pruning_of_the_literature():
    "From 0 to .8 over steps 100..1000 of 2000, D=100: a mean forward of 33.02, and 2*33.02+100=166.04 where a dense history is kept; 3*33.02 where not"
    want = np.mean([100*(1-cubic(t)) for t in range(2000)])
    assert want==pytest.approx(33.02, abs=.05)
    kw = dict(batches_per_update=1, initial_drop_grow_pct=0., replace_step=False, sparsity=.8, sparsity_path=cubic_path(stop=steps(1000), start=100), seed=0)
    xb = torch.ones(1,100)
    c = predict_cost(dense_net(), xb, 2000, grow_score_f=None, **kw)
    assert c.inference*100==pytest.approx(want, abs=.1) and c.training==3*c.forward and c.n_dense==0
    def history(p, **kwargs): return p.abs()
    declares(dense_history=True)(history)
    c = predict_cost(dense_net(), xb, 2000, grow_score_f=None, keep_score_f=history, **kw)
    assert 100*c.training/c.dense_forward==pytest.approx(166.04, abs=.2)

def test_dense_phases():
    "AC/DC on 1000 weights over 20 steps, phases of 3 from 4 to 16: the update at 4 makes batches from 5 on sparse, those at 7, 10, 13 and 16 turn; grown by magnitude, nothing dense is read"
    phases = dict(acdc, sparsity_path=acdc_path(phase=steps(3), start=4, stop=steps(16)), updates=[4,7,10,13,16])
    c = predict_cost(dense_net(), torch.ones(1,100), 20, **phases)
    assert c.forward==2*sum([1000]*5+[250]*3+[1000]*3+[250]*3+[1000]*3+[250]*3) and c.training==3*c.forward

def test_prediction_leaves_no_trace():
    "Model, masks, hooks, random state and listeners are as before, also with modules and listeners among the settings"
    model = mlp()
    sparsify_model(model, .8, seed=0)
    before,history = pickle.dumps(model.state_dict()),SparseHistory()
    hooks = len(model._forward_pre_hooks)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a = predict_cost(model, torch.ones(2,6), 40, sparse_modules=[model[0]], on_update=history, **dict(RigL_presets, batches_per_update=4))
    assert torch.equal(state, torch.get_rng_state()) and pickle.dumps(model.state_dict())==before and len(model._forward_pre_hooks)==hooks
    assert history.params==[] and not any(p.grad is not None for p in model.parameters())
    adam = dict(RigL_presets, batches_per_update=4, grow_state_f=reset_state)
    assert predict_cost(model, torch.ones(2,6), 40, sparse_modules=[model[0]], **adam)==a==predict_cost(model, torch.ones(2,6), 40, rules=[('0.*', adam), ('*', None)])
    dead = 48-int(model[0].weight_mask.sum())
    assert a.dense_grads==a.n_dense*2*2*dead>0

@pytest.mark.parametrize('score,per', [(SampledGradient(.5), 60), (SampledGradient(1.), 120), (SampledGradient(9.), 480),
    (SampledGradient(3, 'grown'), (0,3)), (SampledGradient(.25, 'dead'), (120,.25)), (gradient_magnitude, 480)])
def test_a_sample_costs_what_is_drawn(score, per):
    "600 weights, 120 live: an update reads the gradients of as many dead weights as are drawn, at 2 FLOPs a row and weight; at most all"
    model = nn.Sequential(nn.Linear(30, 20, bias=False))
    sparsify_model(model, .8, seed=0)
    c = predict_cost(model, torch.ones(5, 30), 40, batches_per_update=10, stop_pct=1., grow_score_f=score, replace_step=False, seed=0, initial_drop_grow_pct=.5)
    times = (10,20,30)
    grown = [120-(120-int(.25*(1+math.cos(math.pi*t/40))*120)) for t in times]
    fixed,each = per if isinstance(per, tuple) else (per,0)  # what was dropped is dead too
    assert c.n_dense==3 and c.dense_grads==pytest.approx(sum(2*5*(fixed+each*n) for n in grown), abs=3)

@given(st.integers(2, 9), st.floats(.1, .9), st.floats(.05, 1.), st.integers(1, 6))
@hsettings(max_examples=15)
def test_bounds(every, sparsity, stop, k):
    "Whatever the settings: 3S <= training <= 2S+D, each dense gradient counted, and never more of them than the window asks for"
    model = sparse_net(sparsity, 30)
    c = predict_cost(model, torch.ones(1,30), 40, batches_per_update=every, stop_pct=stop, grow_score_f=MeanGradient(k), seed=0)
    assert 3*c.forward<=c.training<=2*c.forward+c.dense_forward and c.n_batches==40
    assert c.n_dense<=k*40/every+k and c.dense_grads==c.n_dense*(c.dense_forward-c.forward)//40

# ---- Counted ----

static,rigl = {},RigL_presets|every
runs = dict(static=({},True), SET=(SET_presets|every,True), RigL=(rigl,True), mean=(rigl|dict(grow_score_f=MeanGradient(3)),True),
    moving=(rigl|dict(grow_score_f=MovingGradient()),True), GMP=(gmp,False), ACDC=(acdc,False), moved=(dict(rigl, sparsity=.9),True),
    rules=(dict(rules=[('0.*', {}), ('*', dict(batches_per_update=3, grow_score_f=random_score))], **every),True))

class Reference(Callback):
    "Counts by itself: live weights of linear layers, rows, and which batches are to have dense gradients"
    order,run_valid = 90,False
    def __init__(self, cb): self.cb,self.forward,self.dense,self.epochs = cb,0,0,[]
    def before_backward(self):
        rows = len(self.xb[0])
        for m in self.model:
            if not isinstance(m, nn.Linear): continue
            mask = getattr(m, 'weight_mask', torch.ones_like(m.weight))
            self.forward += 2*rows*int(mask.sum())
            self.dense += 2*rows*mask.numel()

def fit(tmp_path, settings, sparse, n=3, sparsity=.8, cbs=(), **kwargs):
    learn = learner(tmp_path, fmlp())
    if sparse: sparsify_model(learn.model, sparsity, erdos_renyi_sparsity, seed=0)
    cb = DynamicSparseTrainingCallback(**settings) if settings else None
    ledger,ref = Ledger(**kwargs),Reference(cb)
    learn.fit(n, cbs=[o for o in (cb,ledger,ref,*cbs) if o is not None])
    return learn,cb,ledger,ref

@pytest.mark.parametrize('name', list(runs))
def test_foreseen_is_counted(name, tmp_path):
    "To the FLOP, for whole runs of 30 batches; forwards are also counted by plain multiplication"
    settings,sparse = runs[name]
    fresh = fmlp()
    if sparse: sparsify_model(fresh, .8, erdos_renyi_sparsity, seed=0)
    want = predict_cost(fresh, torch.zeros(16,64,dtype=torch.double), 30, **settings)
    learn,cb,ledger,ref = fit(tmp_path, settings, sparse)
    assert ledger.cost==want and (ref.forward,ref.dense)==(want.forward,want.dense_forward) and ledger.fwd_train_flops()==want.forward
    assert (want.n_dense>0)==(name in ('RigL','mean','moving','moved','rules'))

fast = dict(batches_per_update=5, seed=0)
same = dict(fast, sparsity=.8, sparse_f=erdos_renyi_sparsity)
presets = dict(Static=Static_presets|dict(seed=0), SET=SET_presets|fast, RigL=RigL_presets|fast, ITOP=ITOP_presets|fast, GSE=GSE_presets|fast,
    GMP=GMP_presets|same, GraNet=GraNet_presets|same, MEST=MEST_presets|dict(seed=0, updates=[5,10,15]),
    ACDC=ACDC_presets|dict(same, updates=[5,8,11,14,17,20,26]), DSD=DSD_presets|same)

@pytest.mark.parametrize('name', list(presets))
def test_presets_are_foreseen(name, tmp_path):
    "Each of the library's presets whose layers keep their counts, to the FLOP; dense gradients only where dead weights are ranked by them"
    settings = presets[name]
    learn,cb,ledger,ref = fit(tmp_path, settings, 'sparsity' not in settings)
    fresh = fmlp()
    if 'sparsity' not in settings: sparsify_model(fresh, .8, erdos_renyi_sparsity, seed=0)
    assert ledger.cost==predict_cost(fresh, torch.zeros(16,64,dtype=torch.double), 30, **settings)
    assert (ref.forward,ref.dense)==(ledger.cost.forward,ledger.cost.dense_forward)
    assert (ledger.cost.n_dense>0)==(name in ('RigL','ITOP','GSE','GraNet'))

@pytest.mark.parametrize('name,k', [('Static',0), ('SET',0), ('RigL',1), ('mean of 3',3), ('ITOP',1), ('GMP',0), ('SNFS',None), ('moving',None)])
def test_formulas_of_the_paper(name, k, tmp_path):
    "On a run of periods as the appendix of arXiv:1911.11134 takes them, nine batches and one with an update, `train_flops` of the run's forwards is what the ledger counted; by hand too"
    own = {'mean of 3':RigL_presets|dict(grow_score_f=MeanGradient(3)), 'moving':RigL_presets|dict(grow_score_f=MovingGradient()), 'SNFS':SNFS_presets}
    settings = {**presets, **own}[name]|dict(drop_fraction=.3, seed=0)
    if name!='Static': settings |= dict(updates=[5,15,25])
    c = fit(tmp_path, settings, 'sparsity' not in settings)[2].cost
    closed = {o:v for o,v in settings.items() if o!='updates' or name=='Static'}|dict(batches_per_update=9)
    assert c.n_batches==30 and train_flops(c.forward, c.dense_forward, closed)==pytest.approx(c.training, rel=1e-12)
    S,D = c.forward/30,c.dense_forward/30
    assert c.training==pytest.approx(30*3*S+(30 if k is None else 3*k)*(D-S)) and (name=='GMP' or S==pytest.approx(.2*D, rel=.01))

class Look(Callback):
    "Counts each batch's forward anew"
    order,run_valid = 90,False
    def __init__(self): self.forward = 0
    def before_backward(self): self.forward += count_flops(self.model, self.xb, sparse=True)

def test_redistribution_is_counted(tmp_path):
    "SNFS moves weights between layers that cost differently: the count follows them, while the prediction is of layers that keep what they have"
    learn,settings = learner(tmp_path, ConvNet().double(), dls=loaders(*digits(flat=False))),SNFS_presets|every
    sparsify_model(learn.model, .8, seed=0)
    xb = learn.dls.one_batch()[0]
    start,want = count_flops(learn.model, xb, sparse=True),predict_cost(learn, xb, 30, **settings)
    ledger,look = Ledger(),Look()
    learn.fit(3, cbs=[DynamicSparseTrainingCallback(**settings),ledger,look])
    assert want.forward==30*start!=look.forward==ledger.cost.forward and want.dense_forward==ledger.cost.dense_forward
    assert ledger.cost.training==2*ledger.cost.forward+ledger.cost.dense_forward

def test_columns(tmp_path):
    "Names and values in the progress table are those of the report; in `lr_find`, `validate` and `get_preds` nothing counts"
    learn,cb,ledger,ref = fit(tmp_path, rigl, True)
    names = list(learn.recorder.metric_names)
    assert names[:6]==['epoch','train_loss','sparsity','ever_live','train_flops','valid_loss']
    last = dict(zip(names[1:], learn.recorder.values[-1]))
    masks = [o.mask for o in masked_params(learn.model)]
    n,live = sum(m.numel() for m in masks),sum(int(m.sum()) for m in masks)
    assert last['sparsity']==1-live/n and last['train_flops']==ledger.cost.of_dense and last['ever_live']==ledger.history.ever_live==ledger.report['ever_live']
    assert live/n<last['ever_live']<1 and ledger.history.totals().ever_live.iloc[-1]==last['ever_live']
    was = ledger.cost.training
    learn.add_cb(ledger)
    learn.validate()
    learn.get_preds()
    with learn.no_bar(): learn.lr_find(show_plot=False, num_it=5)
    assert ledger.cost.training==was
    quiet = fit(tmp_path, rigl, True, verbose=False)
    assert list(quiet[0].recorder.metric_names[:3])==['epoch','train_loss','valid_loss'] and quiet[2].report==ledger.report

def test_report(tmp_path):
    "Dense, static and pruned: sparsity, tried weights, forwards and bits by hand"
    learn,cb,ledger,ref = fit(tmp_path, None, False)
    n = 64*32+32+32*10+10
    assert ledger.report==dict(sparsity=0., ever_live=1., train_flops=1., inference=1., mean_inference=1., bits=64*n, dense_bits=64*n)
    learn,cb,ledger,ref = fit(tmp_path, None, True)
    live = sum(int(o.mask.sum()) for o in masked_params(learn.model))
    assert ledger.report['ever_live']==live/2368 and ledger.report['sparsity']==1-live/2368 and ledger.report['bits']==64*(live+42)+2368
    learn,cb,ledger,ref = fit(tmp_path, gmp, False)
    r = ledger.report
    assert r['ever_live']==1 and r['inference']==pytest.approx(.25, abs=.01) and .25<r['mean_inference']<r['train_flops']+1e-9<1

def test_history_is_shared(tmp_path):
    "A history that the callback has is used; otherwise a ledger brings its own, and the caller's list stays as it is"
    history,listeners = SparseHistory(keep_masks=True),[]
    ledger = fit(tmp_path, dict(rigl, on_update=history), True)[2]
    assert ledger.history is history and len(history.masks)==len(history.steps)
    ledger = fit(tmp_path, dict(rigl, on_update=listeners), True)[2]
    assert listeners==[] and len(ledger.history.steps)==len(history.steps)

def test_fits_add_up(tmp_path):
    "A second fit is added to the first, with the same ledger; also after a pickle, and without its batches' profiles"
    learn = learner(tmp_path, fmlp())
    sparsify_model(learn.model, .8, seed=0)
    cb,ledger = DynamicSparseTrainingCallback(**rigl),Ledger()
    learn.fit(2, cbs=[cb,ledger])
    first_cost = ledger.cost.training
    ledger = pickle.loads(pickle.dumps(ledger))
    assert not hasattr(ledger, 'profile') and ledger.cost.n_batches==20 and ledger.report
    learn.fit(1, cbs=[cb,ledger])
    assert ledger.cost.n_batches==30 and ledger.cost.training>first_cost and ledger.history.steps[-1]>20

class Halt(Callback):
    "Keep copies of all states after the second epoch, and stop"
    def __init__(self, parts): self.parts = parts
    def after_epoch(self):
        if self.learn.epoch!=1: return
        self.states = pickle.dumps([o.state_dict() for o in (self.model, self.opt, *self.parts)])
        raise CancelFitException

@pytest.mark.parametrize('name', ['RigL','SNFS','GMP'])
def test_resumed(name, tmp_path):
    "Halted after two of four epochs, resumed by other objects from other masks, a ledger ends with the same numbers, columns and history, bit for bit"
    settings = dict(presets, SNFS=SNFS_presets|fast)[name]
    def start(seed):
        model = fmlp(seed=seed)
        if 'sparsity' not in settings: sparsify_model(model, .8, erdos_renyi_sparsity, seed=seed)
        return learner(tmp_path, model),DynamicSparseTrainingCallback(**dict(settings, seed=seed)),Ledger()
    whole,cb,ledger = start(1)
    whole.fit(4, cbs=[cb,ledger])
    learn,*parts = start(1)
    halt = Halt(parts)
    learn.fit(4, cbs=[*parts,halt])
    learn,*parts = start(2)
    if 'sparsity' in settings: sparsify_model(learn.model, 0.)
    learn.create_opt()
    for o,state in zip((learn.model, learn.opt, *parts), pickle.loads(halt.states)): o.load_state_dict(state)
    learn.fit(4, start_epoch=2, cbs=parts)
    again = parts[1]
    assert again.cost==ledger.cost and again.report==ledger.report and again.fwd_train_flops()==ledger.fwd_train_flops()
    assert again.history.to_frame().equals(ledger.history.to_frame()) and len(again.history.steps)>3
    columns = [[row[1:4] for row in o.recorder.values] for o in (whole, learn)]
    assert columns[0][2:]==columns[1][2:]

def test_accumulation_counts_all_as_dense(tmp_path):
    "The engine can't know which batch leads to an update, and prepares for all"
    ledger = fit(tmp_path, rigl, True, cbs=[GradientAccumulation(32)])[2]
    assert ledger.cost.n_dense==ledger.cost.n_batches==30

# ---- Bits ----

@pytest.mark.parametrize('n,live,bits,want', [(5000,1000,32,37_000), (5000,5000,32,160_000), (5000,0,32,5000), (0,0,32,0), (5000,1000,16,21_000), (5000,4999,32,164_968)])
def test_bits(n, live, bits, want):
    "n*bits*density+n where something is dead; the first row is the published one of a 100x50 layer at .8"
    assert param_bits(n, live, bits)==want

def test_model_bits():
    "Biases count in full, tied weights once, types by their size"
    model = nn.Sequential(nn.Linear(100,50), nn.Linear(100,50, bias=False))
    model[1].weight = model[0].weight
    assert model_bits(model)==32*5050
    sparsify_model(model, .8, seed=0)
    assert model_bits(model)==37_000+32*50 and model_bits(model.half())==16*1050+5000 and model_bits(model, bits=8, sparse=False)==8*5050
