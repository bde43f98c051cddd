"The fastai side: when the callback moves the topology, what it leaves alone, and how it lives with fastai's other callbacks"
import copy,inspect,json,math,pickle,pytest,random,re,subprocess,sys,warnings
import numpy as np, torch, torch.distributed as dist, torch.nn.functional as F
from fastai.callback.core import CancelBatchException,CancelEpochException,CancelFitException,CancelStepException,CancelTrainException,Callback
from fastai.callback.schedule import *
from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
from fastai.callback.training import GradientAccumulation,GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner,load_learner
from fastai.losses import MSELossFlat
from fastai.optimizer import Adam,Lamb,OptimWrapper,QHAdam,RMSProp,SGD,ranger
from fastai.test_utils import synth_dbunch,synth_learner
from fastai_data import *
from fastcore.all import L,partial
from fastsparse.core.registry import declares
from fastsparse.masks.distributions import erdos_renyi_sparsity,first_layer_dense_uniform
from fastsparse.masks.scores import fisher_saliency,gradient_magnitude,gradient_momentum,random_score,weight_magnitude
from fastsparse.weights.weight import keeps_zero,sparse_params
from fastsparse.model.sparsify import sparse_summary,sparsify_model,unsparsify
from fastsparse.train.engine import DynamicSparseTraining
from fastsparse.train.presets import RigL_presets,SET_presets,SNFS_presets
from fastsparse.train.callback import DynamicSparseTrainingCallback
from itertools import permutations
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DST = DynamicSparseTrainingCallback
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
presets = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)
pytestmark = pytest.mark.filterwarnings('ignore:load_learner', 'ignore:Saved file')

def sparse_learner(path, sparsity=.9, seed=1, **kwargs):
    "10 batches an epoch; 2048 and 320 weights, of which `round(.1*2368)=237` live: 205 and 32"
    learn = learner(path, **kwargs)
    sparsify_model(learn, sparsity, seed=seed)
    return learn

def n_drop(live, t, n_steps, initial=.3, stop=.75):
    "The issue's formula"
    return int(initial/2*(1+math.cos(math.pi*t/(stop*n_steps)))*live)

def elsewhere(p, **kwargs):
    "Prefers weights that are zero, so not those just dropped: every update moves the mask"
    return -p.detach().abs()

@declares(reads_grad=True)
class Spy:
    "A grow score that remembers when it was asked, for how much, and the gradient it saw"
    def __init__(self, score=gradient_magnitude): self.score,self.asked,self.cb = score,[],None
    def __call__(self, p, step, n, name, **kwargs):
        self.asked.append((step, name, n, None if p.grad is None else p.grad.clone()))
        return self.score(p)
    @property
    def steps(self): return [o[0] for o in self.asked if o[1]=='0.weight']

def grads_of(model, x, y):
    "Dense gradients of the masked parameters, without touching `p.grad` or its hooks"
    return torch.autograd.grad(F.cross_entropy(model(x), y), [p for _,p,_ in masked(model)])

def n_hooks(model):
    "How many hooks the modules and parameters of `model` hold"
    grad_hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    return grad_hooks+sum(len(m._forward_pre_hooks)+len(m._forward_hooks) for m in model.modules())

def snapshot(model): return {k:v.clone() for k,v in model.state_dict().items()}

def agree(a, b):
    "Are two nested states equal, bit for bit?"
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys()==b.keys() and all(agree(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple,L)): return len(a)==len(b) and all(map(agree, a, b))
    return a==b

# The same engine with and without fastai

def history_in_fastai(path, opt_func, **settings):
    learn,watch = sparse_learner(path, opt_func=opt_func, lr=.01),Watch()
    learn.fit(3, cbs=[DST(**settings, repair=False, seed=5), watch])
    return watch.masks

def history_in_a_loop(path, **settings):
    learn = sparse_learner(path)
    model,batches = learn.model,list(learn.dls.train)
    opt = torch.optim.AdamW(model.parameters(), lr=.01, betas=(.9,.99), eps=1e-5, weight_decay=0)
    dst,masks = DynamicSparseTraining(model, opt, 3*len(batches), **settings, seed=5),[]
    for x,y in batches*3:
        learn.loss_func(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        masks.append(masks_of(model))
    return masks

@pytest.mark.parametrize('method', presets)
def test_fastai_and_plain_loop_have_the_same_masks(method, tmp_path):
    "Law 8, and one engine for both: fastai's Adam, torch's AdamW in fastai, and AdamW in a plain loop agree after every batch"
    settings = {**presets[method], 'batches_per_update':4, 'stop_pct':.75}
    ours = history_in_fastai(tmp_path, partial(Adam, mom=.9, sqr_mom=.99, eps=1e-5, wd=0.), **settings)
    wrapped = history_in_fastai(tmp_path, partial(adamw, betas=(.9,.99), eps=1e-5, weight_decay=0), **settings)
    plain = history_in_a_loop(tmp_path, **settings)
    moved = [t for t in range(1, 30) if not same(plain[t-1], plain[t])]
    assert moved==[4,8,12,16,20]  # t<22.5
    assert len(ours)==len(wrapped)==len(plain)==30
    assert all(map(same, plain, wrapped))
    assert all(map(same, plain, ours))

# When

def test_due_times_are_batches_of_the_fit(tmp_path):
    "An update falls due at t>0, t%4==0, t<.75*30, with the drop fraction of that t"
    learn,spy,watch = sparse_learner(tmp_path),Spy(elsewhere),Watch()
    learn.fit(3, cbs=[DST(batches_per_update=4, grow_score_f=spy), watch])
    assert watch.moved==spy.steps==[4,8,12,16,20]
    assert [n for _,name,n,_ in spy.asked if name=='0.weight']==[n_drop(205, t, 30) for t in (4,8,12,16,20)]
    assert [n for _,name,n,_ in spy.asked if name=='2.weight']==[n_drop(32, t, 30) for t in (4,8,12,16,20) if n_drop(32, t, 30)]

def test_updates_go_to_the_last_step_but_one(tmp_path):
    "With stop_pct=1 an update falls due at 28 of 30 and none at 29, the last step"
    learn,watch = sparse_learner(tmp_path),Watch()
    learn.fit(3, cbs=[DST(batches_per_update=14, grow_score_f=elsewhere, stop_pct=1., initial_drop_grow_pct=1.), watch])
    assert watch.moved==[14,28]
    learn,watch = sparse_learner(tmp_path),Watch()
    with pytest.warns(UserWarning, match='no update.*28'): learn.fit(3, cbs=[DST(batches_per_update=29, grow_score_f=elsewhere, stop_pct=1., initial_drop_grow_pct=1.), watch])
    assert watch.moved==[]

def test_start_epoch_goes_on_counting(tmp_path):
    "With start_epoch=1 the first batch is t=10"
    learn,spy,watch = sparse_learner(tmp_path),Spy(elsewhere),Watch()
    learn.fit(3, start_epoch=1, cbs=[DST(batches_per_update=4, grow_score_f=spy), watch])
    assert watch.moved==spy.steps==[12,16,20]
    assert [n for _,name,n,_ in spy.asked if name=='0.weight']==[n_drop(205, t, 30) for t in (12,16,20)]

def test_start_epoch_at_a_due_batch(tmp_path):
    "With start_epoch=2 of 4, t=20 is due at the first batch, and the dense gradient is there"
    learn,spy = sparse_learner(tmp_path),Spy()
    learn.fit(4, start_epoch=2, cbs=DST(batches_per_update=10, grow_score_f=spy))
    assert spy.steps==[20]
    mask = learn.model[0].weight_mask
    assert spy.asked[0][3][~mask].count_nonzero()>.5*(~mask).sum()

def test_once_an_epoch_by_default(tmp_path):
    "DynamicSparseTrainingCallback() alone updates at the first batch of each epoch but the first, while t<.75*40"
    learn,watch = sparse_learner(tmp_path),Watch()
    learn.fit(4, cbs=[DST(grow_score_f=elsewhere), watch])
    assert watch.moved==[10,20]
    learn,watch = sparse_learner(tmp_path),Watch()
    learn.fit(4, cbs=[DynamicSparseTrainingCallback(), watch])
    assert set(watch.moved)<={10,20} and 10 in watch.moved
    assert live(learn.model)==[205,32]

def test_alone_it_drops_by_weight_and_gradients(tmp_path):
    "At the update of t=10, the lowest abs(w)*rms(g) go, with the live gradients of batches 0 to 10"
    learn,squares,seen = sparse_learner(tmp_path),[],{}
    class Look(Callback):
        order,run_valid = DST.order-.1,False
        def before_step(self):
            o = self.learn.model[0]
            squares.append((o.weight.grad*o.weight_mask)**2)
            if len(squares)==11: seen.update(w=o.weight.detach().clone(), mask=o.weight_mask.clone())
    class After(Callback):
        order,run_valid = DST.order+.1,False
        def after_batch(self):
            if len(squares)==11: seen.setdefault('after', self.learn.model[0].weight_mask.clone())
    learn.fit(4, cbs=[DST(batches_per_update=10, grow_score_f=elsewhere), Look(), After()])
    score = seen['w'].abs()*(sum(squares[:11])/11).sqrt()
    worst = score[seen['mask']].sort().values[:n_drop(205, 10, 40)]
    gone = seen['mask'] & ~seen['after']
    assert gone.sum()==n_drop(205, 10, 40) and torch.allclose(score[gone].sort().values, worst)

def test_which_score_drops_where_nothing_is_said():
    "Saliency where weights move; magnitude where they are only pruned, and with a preset that names none"
    assert DST().settings['keep_score_f'] is DST(batches_per_update=5, grow_score_f='random_score').settings['keep_score_f'] is fisher_saliency
    for kwargs in (dict(grow_score_f=None), dict(method='static'), dict(method=dict(stop_pct=.5)), dict(RigL_presets), dict(method='rigl')):
        assert DST(**kwargs).settings['keep_score_f'] is weight_magnitude
    assert DST(method='static', keep_score_f=fisher_saliency).settings['keep_score_f'] is fisher_saliency

def test_second_fit_takes_its_own_length(tmp_path):
    "A callback reused: 10 batches give t=4, 30 give 4 to 20, and the drop fractions follow"
    learn,spy = sparse_learner(tmp_path),Spy(elsewhere)
    cb = DST(batches_per_update=4, keep_score_f=weight_magnitude, grow_score_f=spy)
    for n_epoch,due in ((1,[4]), (3,[4,8,12,16,20]), (2,[4,8,12])):
        spy.asked.clear()
        watch = Watch()
        learn.fit(n_epoch, cbs=[cb, watch])
        assert watch.moved==spy.steps==due
        assert [n for _,name,n,_ in spy.asked if name=='0.weight']==[n_drop(205, t, 10*n_epoch) for t in due]

def test_second_fit_draws_anew(tmp_path):
    "Law 8: random choices are keyed by the number of the update, which goes on counting in a second fit"
    draws = []
    def spy(p, name, generator, **kwargs):
        score = random_score(p, generator=generator)
        if name=='0.weight': draws.append(score)
        return score
    learn = sparse_learner(tmp_path)
    cb = DST(batches_per_update=4, grow_score_f=spy)
    for _ in range(2): learn.fit(1, cbs=cb)
    assert len(draws)==2 and not torch.equal(*draws)

def test_fit_without_update_warns(tmp_path):
    "10 batches: t<7.5, and at 7 `int(.0033*205)=0` would move, so 6 is the largest batches_per_update that gives an update"
    assert (n_drop(205, 6, 10), n_drop(205, 7, 10))==(5,0)
    learn,watch = sparse_learner(tmp_path),Watch()
    with pytest.warns(UserWarning, match=r'no update.*batches_per_update.*\b6\b'): learn.fit(1, cbs=[DST(grow_score_f=elsewhere), watch])
    assert watch.moved==[]
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        learn.fit(1, cbs=[DST(batches_per_update=6, grow_score_f=elsewhere), watch])
    assert watch.moved==[6] and not [w for w in ws if 'update' in str(w.message)]

# Resume

resume_cases = [f'{m}-{o}' for m in presets for o in ('sgd','adam')]

class Halt(Callback):
    "Save after the second epoch, and stop"
    def __init__(self, file, cb): self.file,self.cb = file,cb
    def after_epoch(self):
        if self.learn.epoch!=1: return
        self.learn.save(self.file)
        Path(f'{self.file}.json').write_text(json.dumps(self.cb.state_dict()))
        raise CancelFitException

def resumable(path, case, mask_seed, torch_seed, seed):
    method,opt = case.split('-')
    learn = sparse_learner(path, seed=mask_seed, model=mlp(seed=torch_seed), opt_func=dict(sgd=momentum_sgd, adam=Adam)[opt], lr=dict(sgd=.05, adam=.01)[opt])
    return learn,DST(**{**presets[method], 'batches_per_update':4}, seed=seed)

def whole_state(learn, cb): return dict(model=snapshot(learn.model), opt=learn.opt.state_dict(), engine=cb.state_dict())

def resume(path):
    "In a process of its own: other weights, masks and seeds, then go on from what was saved"
    for case in resume_cases:
        learn,cb = resumable(Path(path), case, 8, 8, 8)
        learn.load(Path(path)/case)
        cb.load_state_dict(json.loads((Path(path)/f'{case}.json').read_text()))
        learn.fit(4, start_epoch=2, cbs=cb)
        torch.save(whole_state(learn, cb), Path(path)/f'{case}-end')

# Both imports are looked at before anything else, and three processes are forked before any of them computes: imports are what costs here
fresh = """
import json,sys
heavy = lambda: [m for m in sys.modules if m.split('.')[0] in ('torchvision','accelerate') or m.startswith('fastai.vision')]
import fastsparse
one = heavy()
from fastsparse.all import *
json.dump([one, heavy()], open(f'{sys.argv[1]}/imports.json', 'w'))
import test_callback
test_callback.work_apart(sys.argv[1])
"""

def work_apart(path):
    "In a fresh process: resume, and two ranks"
    ctx = torch.multiprocessing.get_context('fork')
    procs = [ctx.Process(target=f, args=args) for f,args in ((resume, [path]), (ddp_rank, [0, path]), (ddp_rank, [1, path]))]
    for p in procs: p.start()
    for p in procs: p.join()
    Path(path, 'exits.json').write_text(json.dumps([p.exitcode for p in procs]))

@pytest.fixture(scope='module')
def apart(tmp_path_factory):
    "The folder with what other processes did: runs halted here and resumed there, and two ranks"
    path = tmp_path_factory.mktemp('apart')
    for case in resume_cases:
        learn,cb = resumable(path, case, 1, 0, 7)
        learn.fit(4, cbs=[cb, Halt(path/case, cb)])
    res = subprocess.run([sys.executable, '-c', fresh, str(path)], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=200)
    assert res.returncode==0, res.stderr
    (path/'errors').write_text(res.stderr)
    return path

def check_exits(path, which):
    "The processes `which` ended well"
    codes = json.loads((path/'exits.json').read_text())
    assert not any(codes[i] for i in which), (path/'errors').read_text()

@pytest.mark.parametrize('case', resume_cases)
def test_resume_bit_for_bit_in_a_fresh_process(case, apart, tmp_path):
    "Law 6: learn.save and cb.state_dict() restore weights, masks, optimizer and engine"
    check_exits(apart, [0])
    learn,cb = resumable(tmp_path, case, 1, 0, 7)
    watch = Watch()
    learn.fit(4, cbs=[cb, watch])
    assert [t for t in watch.moved if t>=20], 'nothing moved after the stop, so this test shows nothing'
    end = torch.load(apart/f'{case}-end', weights_only=False)
    mine = whole_state(learn, cb)
    assert agree(mine['model'], end['model'])
    assert agree(mine['engine'], end['engine'])
    assert agree(mine['opt'], end['opt'])

def test_halted_callback_gives_its_state_after_the_fit(tmp_path):
    "Law 6: what state_dict() says in the last epoch, it says after the fit; numbers, lists and strings only"
    learn,cb = resumable(tmp_path, 'RigL-sgd', 1, 0, 7)
    learn.fit(4, cbs=[cb, Halt(tmp_path/'x', cb)])
    saved = json.loads((tmp_path/'x.json').read_text())
    assert saved==json.loads(json.dumps(cb.state_dict())) and saved['n_updates']==4 and saved['seed']==7  # t=4,8,12,16

# Dense models, and targets

def test_dense_model_is_refused_with_both_ways_out(tmp_path):
    "Law 10: the error names sparsify_model and sparsity=, and nothing has changed"
    learn = learner(tmp_path)
    before = snapshot(learn.model)
    with pytest.raises(Exception) as e: learn.fit(1, cbs=DST(batches_per_update=4))
    assert isinstance(e.value, ValueError) and 'sparsify_model' in str(e.value) and 'sparsity=' in str(e.value)
    assert agree(before, snapshot(learn.model)) and not masked(learn.model)
    learn.fit(1)

@pytest.mark.parametrize('kw,word', [(dict(sparsity=1.), 'sparsity'), (dict(sparsity=-.1), 'sparsity'), (dict(batches_per_update=1), 'batches_per_update'),
    (dict(stop_pct=0), 'stop_pct'), (dict(initial_drop_grow_pct=1.5), 'initial_drop_grow_pct'), (dict(sparse_modules=[nn.Linear(2,2)]), 'sparse_modules')])
def test_bad_settings_are_refused_before_anything_changed(kw, word, tmp_path):
    "Law 10: the error names the argument; weights and masks are as before"
    learn = sparse_learner(tmp_path)
    before = snapshot(learn.model)
    with pytest.raises(ValueError, match=word): learn.fit(1, cbs=DST(**{'batches_per_update':4, **kw}))
    assert agree(before, snapshot(learn.model))
    assert n_hooks(learn.model)==n_hooks(sparse_learner(tmp_path).model)

def test_sparsity_on_a_dense_model_registers_masks(tmp_path):
    "Law 1: round(.1*2368)=237 live weights, by ERK as 64+32 to 32+10, so 164.9 and 72.1, shared out by largest remainder, dead from the first step on"
    learn,probe = learner(tmp_path),Probe()
    learn.fit(2, cbs=[DST(sparsity=.9, batches_per_update=4, seed=2), probe])
    assert live(learn.model)==[165,72] and probe.n_checks==20
    assert [round(s, 6) for *_,s in sparse_params(learn.model)]==[round(1-165/2048, 6), .775]

def test_sparsity_is_shared_out_by_sparse_f(tmp_path):
    "`sparse_f=`: first layer dense, .9 of the other, 2048 and 32"
    learn = learner(tmp_path)
    learn.fit(1, cbs=DST(sparsity=.9, sparse_f=first_layer_dense_uniform, batches_per_update=4))
    assert live(learn.model)==[2048,32]

@pytest.mark.parametrize('target,counts', [(.5, [1024,160]), (.95, [102,16]), (0., [2048,320])])
def test_sparsity_on_a_sparse_model_sets_targets(target, counts, tmp_path):
    "Law 1: each update leaves exactly the target, from above or below: .05*2368=118.4, so 102.4 and 16.0 become 102 and 16"
    learn,watch = sparse_learner(tmp_path),Watch()
    learn.fit(2, cbs=[DST(sparsity=target, batches_per_update=4, grow_score_f=elsewhere), watch])
    assert [int(m.sum()) for m in watch.masks[3].values()]==[205,32]
    assert all([int(m.sum()) for m in masks.values()]==counts for masks in watch.masks[4:])
    assert [s for *_,s in sparse_params(learn.model)]==pytest.approx([1-c/n for c,n in zip(counts, (2048,320))], abs=1e-6)

def test_equal_targets_change_nothing(tmp_path):
    "sparsity=.9 on a model that is so already gives the run without it, bit for bit"
    runs = []
    for kw in (dict(), dict(sparsity=.9)):
        learn = sparse_learner(tmp_path)
        learn.fit(2, cbs=DST(batches_per_update=4, seed=3, **kw))
        runs.append(snapshot(learn.model))
    assert agree(*runs)
    learn,watch = sparse_learner(tmp_path),Watch()
    with pytest.warns(UserWarning, match='no update'): learn.fit(1, cbs=[DST(sparsity=.9, batches_per_update=4, grow_score_f=None), watch])
    assert watch.moved==[] and live(learn.model)==[205,32]

def test_grow_none_only_drops_to_the_target(tmp_path):
    "`grow_score_f=None` with sparsity=: the 102 and 16 largest live weights stay"
    learn,watch,seen = sparse_learner(tmp_path),Watch(),[]
    look = At('before_step', [4], lambda learn: seen.extend((p.detach().clone(), m.clone()) for _,p,m in masked(learn.model)), order=10.2)
    learn.fit(1, cbs=[DST(sparsity=.95, batches_per_update=4, grow_score_f=None), watch, look])
    assert watch.moved==[4]
    for (p,m),(_,_,now),n in zip(seen, masked(learn.model), (102,16)):
        kept = sorted(m.flatten().nonzero().view(-1).tolist(), key=lambda i: (-p.flatten()[i].abs().item(), i))[:n]
        assert sorted(kept)==now.flatten().nonzero().view(-1).tolist()

def test_sparse_modules_move_and_the_others_stay(tmp_path):
    "`sparse_modules`: masks elsewhere stay as they are, and stay enforced"
    learn = sparse_learner(tmp_path)
    start = masks_of(learn.model)
    learn.fit(2, cbs=[DST(sparse_modules=[learn.model[2]], batches_per_update=4, grow_score_f=elsewhere), Probe()])
    end = masks_of(learn.model)
    assert torch.equal(start['0.weight'], end['0.weight']) and not torch.equal(start['2.weight'], end['2.weight'])

# Dead is dead

opt_funcs = dict(sgd=SGD, momentum=momentum_sgd, adam=Adam, adamw=adamw, torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, weight_decay=.1),
    ranger=partial(ranger, k=3), rmsprop=partial(RMSProp, mom=.9), lamb=Lamb, qhadam=QHAdam, rprop=partial(OptimWrapper, opt=torch.optim.Rprop))

@pytest.mark.parametrize('opt', opt_funcs)
@pytest.mark.parametrize('method', ['static','RigL','SET'])
def test_dead_is_dead(method, opt, tmp_path):
    "Law 3: after every step dead weights and all their state are exactly zero, and no step sees their gradient; two fits"
    learn = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01)
    cbs = [] if method=='static' else [DST(**{**presets[method], 'batches_per_update':4, 'grow_score_f':elsewhere if method=='SET' else gradient_magnitude})]
    start = masks_of(learn.model)
    for _ in range(2):
        probe = Probe()
        learn.fit(2, cbs=cbs+[probe], wd=None if opt=='rprop' else .05)  # Rprop knows no weight decay
        n_updates = 0 if method=='static' else len([t for t in range(4, 19, 4) if t<(15 if method=='RigL' else 19)])
        assert (probe.n_checks, probe.n_steps)==(20, 20-n_updates)
    assert same(start, masks_of(learn.model))==(method=='static')
    assert all((p!=0).sum()>.5*m.sum() for _,p,m in masked(learn.model)), 'live weights train'

@pytest.mark.parametrize('opt', ['momentum','adam','adamw','ranger'])
def test_dead_weights_with_a_dense_history(opt, tmp_path):
    "Law 3: where a score reads a dense history only that is dense: weights are zero after every step, and all of it once the fit is over"
    learn = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01)
    dense = []
    def look(learn): dense.extend(int(t[~m].count_nonzero()) for _,p,m in masked(learn.model) for t in states(learn.opt, p))
    learn.fit(2, cbs=[DST(**SNFS_presets, batches_per_update=4), Probe(state=False, grads=False), At('after_batch', [3], look)])
    assert max(dense)>100, 'the history should be dense while the fit runs'
    learn.fit(1, cbs=Probe())

@pytest.mark.parametrize('opt', ['sgd','momentum','adam','ranger','rmsprop','lamb','qhadam','adamw','torch_sgd'])
def test_fastai_optimizers_are_known_to_keep_zeros(opt, tmp_path):
    "Law 11: fastai's own optimizers leave zeros alone, so they get no full upkeep and the summary reports none"
    learn = sparse_learner(tmp_path, opt_func=opt_funcs[opt])
    learn.fit(1)
    assert keeps_zero(learn.opt)
    assert not sparse_summary(learn).df.note.str.contains('upkeep').any()

def test_slow_weights_are_no_history(tmp_path):
    "Law 3: Lookahead's copies of dead weights are zero after every step, whatever the scores read"
    learn,probe = sparse_learner(tmp_path, opt_func=partial(ranger, k=3), lr=.01),Probe(state=False, grads=False)
    def look(learn):
        slow = [s for ss in learn.opt.slow_weights for s in ss]
        for (name,p,mask),s in zip(masked(learn.model), [s for s in slow if s.ndim>1]): assert not s[~mask].any(), f'{name}: slow weights of dead ones'
    cb = DST(batches_per_update=4, keep_score_f=weight_magnitude, grow_score_f=gradient_momentum, initial_drop_grow_pct=.5)
    learn.fit(2, cbs=[cb, probe, At('after_batch', range(20), look)])

def test_enforcement_left_to_the_engine(tmp_path):
    "`enforce_mask=False` registers and applies masks, and the callback keeps them"
    learn,probe = learner(tmp_path, opt_func=Adam),Probe()
    sparsify_model(learn, .9, enforce_mask=False, seed=1)
    learn.fit(2, cbs=[DST(batches_per_update=4), probe])
    assert probe.n_checks==20 and live(learn.model)==[205,32]

# Law 4

@pytest.mark.parametrize('opt', ['momentum','adam','adamw'])
def test_a_replaced_step_moves_nothing_else(opt, tmp_path):
    "Law 4: at an update kept weights and state are untouched, grown and dropped ones zero, biases untouched, gradients zero afterwards"
    learn,seen,n_seen = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01),{},[]
    params = lambda: [p for p in learn.model.parameters()]
    def before(learn):
        seen['masks'] = masks_of(learn.model)
        seen['values'] = [[t.clone() for t in [p.data]+states(learn.opt, p)] for p in params()]
    def after(learn):
        now = masks_of(learn.model)
        assert not same(now, seen['masks']), 'the update moved nothing'
        kept = {id(p):now[n]&seen['masks'][n] for n,p,_ in masked(learn.model)}
        for p,old in zip(params(), seen['values']):
            keep = kept.get(id(p), torch.ones_like(p, dtype=torch.bool))
            for a,b in zip(old, [p.data]+states(learn.opt, p)):
                assert torch.equal(a[keep], b[keep]) and not b[~keep].any(), 'a replaced step moved more than the update'
            assert p.grad is None or not p.grad.any(), 'gradients are left after a replaced step'
        n_seen.append(learn.iter)
    due = [4,8,12]
    learn.fit(2, cbs=[DST(batches_per_update=4), At('before_step', due, before, order=10.2), At('after_batch', due, after)], wd=.1)
    assert n_seen==[4,8,2]

@pytest.mark.parametrize('opt', ['momentum','adamw'])
def test_no_gradient_leaks_into_the_next_batch(opt, tmp_path):
    "Law 4: the gradient of batch t+1 is that batch's own, where the weights live, and zero elsewhere"
    learn,n_seen = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01),[]
    def look(learn):
        for g,(name,p,mask) in zip(grads_of(learn.model, *learn.xb, *learn.yb), masked(learn.model)):
            torch.testing.assert_close(p.grad, g*mask, rtol=1e-5, atol=1e-8, msg=f'{name} at {learn.iter}')
            assert not p.grad[~mask].any(), f'{name}: dead gradients at {learn.iter}'
        n_seen.append(learn.iter)
    learn.fit(2, cbs=[DST(batches_per_update=4), At('before_step', [3,5,9,13], look, order=10.7)])
    assert n_seen==[3,5,9,3]

def test_replace_step_false_makes_the_step(tmp_path):
    "Law 4: with replace_step=False the batch of an update is also a step, of live gradients only"
    learn,probe = sparse_learner(tmp_path),Probe()
    learn.fit(2, cbs=[DST(batches_per_update=4, replace_step=False), probe])
    assert (probe.n_checks, probe.n_steps)==(20,20)

def test_growth_reads_the_dense_gradient(tmp_path):
    "Law 2 in fastai: RigL grows the largest `abs(grad)` among what was not kept, worked out from the batch itself"
    learn,seen = sparse_learner(tmp_path),[]
    def look(learn):
        for g,(name,p,m) in zip(grads_of(learn.model, *learn.xb, *learn.yb), masked(learn.model)): seen.append((p.detach().clone(), m.clone(), g))
    learn.fit(1, cbs=[DST(batches_per_update=4, keep_score_f=weight_magnitude), At('before_batch', [4], look)])
    for (p,m,g),(name,_,now),n_live in zip(seen, masked(learn.model), (205,32)):
        k = n_drop(n_live, 4, 10)
        p,m,g = p.flatten(),m.flatten(),g.flatten()
        by_size = sorted(m.nonzero().view(-1).tolist(), key=lambda i: -p[i].abs().item())
        kept = by_size[:n_live-k]
        free = sorted(set(range(len(p)))-set(kept), key=lambda i: -g[i].abs().item())
        assert k>0 and sorted(kept+free[:k])==now.flatten().nonzero().view(-1).tolist()

# With fastai's other callbacks

class Accumulate(GradientAccumulation): "A user's own accumulation: fastai names its attribute after the subclass"

@pytest.mark.parametrize('accumulation', [GradientAccumulation, Accumulate])
def test_accumulated_gradient_is_that_of_the_big_batch(accumulation, tmp_path):
    "Four batches of 16 accumulated train, drop and grow as one batch of 64: same masks after each step, same weights"
    ends = []
    for bs,every,extra in ((16,8,[accumulation(64)]), (64,2,[])):
        learn,watch,spy = sparse_learner(tmp_path, dls=loaders(*digits(288), bs=bs)),Watch(),Spy()
        learn.fit(3, cbs=[DST(batches_per_update=every, grow_score_f=spy), watch, Probe(), *extra])
        ends.append((watch.masks[64//bs-1::64//bs], snapshot(learn.model), spy))
    (small,a,spy),(big,b,big_spy) = ends
    assert spy.steps==[8,16,24,32] and big_spy.steps==[2,4,6,8]
    for (_,name,n,g),(_,big_name,big_n,big_g) in zip(spy.asked, big_spy.asked):
        assert (name,n)==(big_name,big_n)
        torch.testing.assert_close(g, big_g, rtol=1e-5, atol=1e-8)
    assert all(map(same, small, big))
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-7)

@pytest.mark.parametrize('accumulate', [False, True])
@pytest.mark.parametrize('clip_first', [False, True])
def test_clipping_sees_live_gradients_only(clip_first, accumulate, tmp_path):
    "Law 3: each step of plain SGD is lr*max_norm long, which it is not where dead gradients count; the callbacks' order is no matter"
    learn,lengths = sparse_learner(tmp_path, opt_func=SGD, lr=.1),[]
    flat = lambda: torch.cat([p.detach().flatten() for p in learn.model.parameters()])
    class Length(Callback):
        order,run_valid = 49,False
        def before_step(self): self.was = flat()
        def after_step(self): lengths.append((self.learn.iter, (flat()-getattr(self, 'was', flat())).norm().item()))
    cbs = [GradientClip(1e-3), DST(batches_per_update=4)]
    learn.fit(1, wd=0., cbs=(cbs if clip_first else cbs[::-1])+[Length()]+accumulate*[GradientAccumulation(32)])
    update = 5 if accumulate else 4
    steps = [n for t,n in lengths if t!=update]
    assert len(steps)==(4 if accumulate else 9)
    assert steps==pytest.approx([1e-4]*len(steps), rel=2e-2)  # clip_grad_norm_ adds 1e-6 to the norm
    assert max(steps)<=1e-4*(1+1e-6)

def test_callbacks_in_any_order_give_the_same_run(tmp_path):
    "Accumulation, mixed precision, clipping and topology: all 24 orders of adding them end in the same masks and weights"
    ends = []
    for order in permutations(range(4)):
        learn,watch = sparse_learner(tmp_path, model=mlp(torch.float), dtype=torch.float),Watch()
        cbs = [DST(batches_per_update=4, seed=3), GradientClip(.5), CpuMixedPrecision(), GradientAccumulation(32)]
        learn.fit(1, cbs=[cbs[i] for i in order]+[watch, Probe()])
        ends.append(snapshot(learn.model))
        assert watch.moved==[5]
    assert all(agree(ends[0], o) for o in ends[1:])

def overflow(learn): learn.model[0].bias.grad[0] = math.inf

def amp_learner(path): return sparse_learner(path, model=mlp(torch.float), dtype=torch.float)

def watched_growth(learn, cbs, **settings):
    "Fit 3 epochs; the batches at which updates were made, the steps at which they fell due, and how dense their gradients were"
    spy,made,density,expected = Spy(),[],[],[]
    class Now(Callback):
        order,run_valid = 10.2,False
        def before_batch(self): self.grads = None
        def after_pred(self): self.grads = grads_of(self.learn.model, *self.learn.xb, *self.learn.yb)
    now = Now()
    @declares(reads_grad=True)
    def grow(p, step, n, name, **kwargs):
        i = [o[0] for o in masked(learn.model)].index(name)
        if name=='0.weight':
            made.append(learn.epoch*10+learn.iter)
            density.append(p.grad.count_nonzero().item()/now.grads[i].count_nonzero().item())
            expected.append((p.grad.float().clone(), now.grads[i].float()))
        return spy(p, step, n, name, **kwargs)
    watch = Watch()
    learn.fit(3, cbs=[DST(batches_per_update=4, grow_score_f=grow, **settings), watch, now, *cbs])
    return made,spy,density,expected,watch

def test_mixed_precision_shows_unscaled_gradients(tmp_path):
    "Scores see the true gradient (bfloat16 noise apart), not 1024 times it, and the scaler keeps in step"
    learn,amp,scales = amp_learner(tmp_path),CpuMixedPrecision(),[]
    made,spy,density,expected,watch = watched_growth(learn, [amp, Probe(), At('after_batch', range(30), lambda l: scales.append(l.scaler.get_scale()), order=60)])
    assert made==spy.steps==watch.moved==[4,8,12,16,20]
    for seen,true in expected: assert .95<seen.norm()/true.norm()<1.05 and F.cosine_similarity(seen.flatten(), true.flatten(), 0)>.99
    assert scales==[1024.]*30

def test_update_waits_while_gradients_overflow(tmp_path):
    "Law 4: due at 8, overflow at 8 and 9, done at 10 with the drop fraction of 8 and the dense gradient of batch 10"
    learn,probe = amp_learner(tmp_path),Probe()
    made,spy,density,expected,watch = watched_growth(learn, [CpuMixedPrecision(), At('after_backward', [8,9], overflow), probe])
    assert made==[4,10,12,16,20] and spy.steps==[4,8,12,16,20]
    assert [n for _,name,n,_ in spy.asked if name=='0.weight']==[n_drop(205, t, 30) for t in (4,8,12,16,20)]
    assert min(density)>.9, f'growth read masked gradients: {density}'
    for seen,true in expected: assert .95<seen.norm()/true.norm()<1.05
    assert probe.n_steps==30-2-5

def test_update_waits_without_a_scaler(tmp_path):
    "Law 4: gradients that are not finite, and a callback that skips such steps as fastai users write it"
    learn = sparse_learner(tmp_path)
    def skip(learn):
        if not all(p.grad.isfinite().all() for p in learn.model.parameters()): raise CancelStepException
    made,spy,density,expected,watch = watched_growth(learn, [At('after_backward', [8], overflow), At('before_step', range(30), skip, order=20)])
    assert made==[4,9,12,16,20] and spy.steps==[4,8,12,16,20]
    assert min(density)>.9, f'growth read masked gradients: {density}'

def cancel(ex):
    def _f(learn): raise ex
    return _f

@pytest.mark.parametrize('event,order,ex', [*((event, order, CancelBatchException) for event in ('before_batch','after_loss','before_step') for order in (0,20)),
    ('before_step', 0, CancelStepException), ('before_step', 20, CancelStepException)])
def test_update_waits_for_the_next_step(event, order, ex, tmp_path):
    "An update due at a batch that another callback cancels is done at the next step, with a dense gradient"
    learn = sparse_learner(tmp_path)
    made,spy,density,expected,watch = watched_growth(learn, [At(event, [8], cancel(ex), order=order), Probe()])
    if event=='before_step' and order==20:  # the callback was there first
        assert made==spy.steps==[4,8,12,16,20]
    else:
        assert made==[4,9,12,16,20] and spy.steps==[4,8,12,16,20]
        assert [n for _,name,n,_ in spy.asked if name=='0.weight']==[n_drop(205, t, 30) for t in (4,8,12,16,20)]
    assert min(density)>.9, f'growth read masked gradients: {density}'

def test_masks_come_back_with_the_best_weights(tmp_path):
    "Law 6: SaveModelCallback reloads the weights of epoch 1 and with them its masks, counts and shown sparsities"
    learn,at_best = sparse_learner(tmp_path, opt_func=Adam, lr=.01),{}
    def best_at_one(pred, targ): return float(learn.epoch==1)
    learn.metrics = [best_at_one]
    class Keep(Callback):
        def after_epoch(self):
            if self.learn.epoch==1: at_best.update(snapshot(self.learn.model))
    cb,watch = DST(batches_per_update=4, grow_score_f=elsewhere),Watch()
    learn.fit(4, cbs=[cb, watch, Keep(), SaveModelCallback(monitor='best_at_one', with_opt=True)])
    assert watch.moved[-1]==24 and not same({k:at_best[f'{k}_mask'] for k in watch.last}, watch.last)
    assert agree(at_best, snapshot(learn.model))
    learn.fit(2, cbs=[cb, Probe()])
    assert live(learn.model)==[205,32]

def test_early_stopping(tmp_path):
    "A fit that is stopped early leaves nothing keep_dense_grad, and the next fits keep dead weights dead"
    learn = sparse_learner(tmp_path)
    cb = DST(batches_per_update=4, grow_score_f=elsewhere)
    watch = Watch()
    learn.fit(5, cbs=[cb, watch, EarlyStoppingCallback(min_delta=1e9, patience=1)])
    assert watch.moved==[4,8,12,16]  # of the two epochs that ran; the fit's length is five
    learn.fit(1, cbs=Probe())
    again = Watch()
    learn.fit(1, cbs=[cb, Probe(), again])
    assert again.moved==[4]

@pytest.mark.parametrize('fitted', [False, True])
def test_lr_find(fitted, tmp_path):
    "Law 7: masks are enforced, topology rests; weights, masks, hooks and the engine's state are as before"
    cb,probe,watch = DST(batches_per_update=2, keep_score_f=weight_magnitude, grow_score_f=elsewhere, seed=4),Probe(),Watch()
    learn = sparse_learner(tmp_path, cbs=[cb, probe, watch])
    if fitted: learn.fit(2)
    before,hooks,state = snapshot(learn.model),n_hooks(learn.model),cb.state_dict()
    watch.moved.clear()
    n = probe.n_checks
    learn.lr_find(num_it=15, end_lr=.1, show_plot=False, suggest_funcs=None)
    assert watch.moved==[] and probe.n_checks-n==15
    assert agree(before, snapshot(learn.model)) and hooks==n_hooks(learn.model) and state==cb.state_dict()
    learn.fit(1)
    assert watch.moved==[2,4,6]
    assert cb.state_dict()['n_updates']==3+(6 if fitted else 0)  # 2 to 12 of 20: at 14 `int(.0033*205)=0` would move

def test_lr_find_after_a_dense_history(tmp_path):
    "Law 3: lr_find puts back optimizer state from a fit that kept it dense, and dead weights stay dead in the fit that follows"
    learn = sparse_learner(tmp_path, opt_func=Adam, lr=.01)
    learn.fit(2, cbs=DST(**SNFS_presets, batches_per_update=4))
    learn.lr_find(num_it=15, end_lr=.1, show_plot=False, suggest_funcs=None)
    learn.fit(1, cbs=Probe())

@pytest.mark.parametrize('dl', [list, lambda bs: torch.utils.data.DataLoader(bs, batch_size=None)])
def test_any_iterable_of_batches(dl):
    "DataLoaders hold whatever yields batches: lists and torch's loaders too"
    batches,watch = [(torch.randn(4, 30), torch.randn(4, 20)) for _ in range(6)],Watch()
    model = nn.Linear(30, 20)
    sparsify_model(model, .5, seed=0)
    learn = Learner(DataLoaders(dl(batches), dl(batches)), model, loss_func=MSELossFlat(), lr=.1)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[DST(batches_per_update=2, stop_pct=1., grow_score_f=elsewhere), watch])
    assert watch.moved==[2,4]

@pytest.mark.parametrize('opt_func', [momentum_sgd, Adam, opt_funcs['torch_sgd'], adamw])
def test_optimizer_state_loaded_alone(opt_func, tmp_path):
    "Law 3: state with entries of dead weights, loaded into an optimizer that has stepped before, moves no dead weight"
    learn = sparse_learner(tmp_path, opt_func=opt_func, lr=.01)
    dense = learner(tmp_path, opt_func=opt_func, lr=.01)
    dense.fit(1)
    learn.fit(1)
    learn.opt.load_state_dict(copy.deepcopy(dense.opt.state_dict()))
    learn.fit(1, cbs=Probe())

@pytest.mark.parametrize('opt', ['momentum','adam'])
def test_fine_tune_with_a_frozen_body(opt, tmp_path):
    "Law 9: while the body is frozen its weights and masks stay exactly as they are and the head's move; then the body's move too"
    cb,stages = DST(batches_per_update=4, grow_score_f=elsewhere),[]
    torch.manual_seed(0)
    learn = learner(tmp_path, model=ConvNet(), opt_func=opt_funcs[opt], cbs=[cb, Probe()], dtype=torch.float, flat=False)
    learn.splitter = body_and_head
    sparsify_model(learn, .8, erdos_renyi_sparsity, seed=1)
    counts = live(learn.model)
    class Stages(Callback):
        def before_fit(self): self.was = snapshot(self.learn.model)
        def after_fit(self): stages.append((self.was, snapshot(self.learn.model), self.frozen))
        def before_train(self): self.frozen = [n for n,p in self.learn.model.named_parameters() if not p.requires_grad]
    learn.fine_tune(1, freeze_epochs=2, cbs=Stages())
    (a,b,frozen),(c,d,none) = stages
    assert frozen==['body.0.weight','body.3.weight'] and none==[]
    for k in frozen: assert torch.equal(a[k], b[k]) and torch.equal(a[f'{k}_mask'], b[f'{k}_mask'])
    assert not torch.equal(a['head.2.weight_mask'], b['head.2.weight_mask'])
    for k in ('body.3.weight','head.2.weight'): assert not torch.equal(c[f'{k}_mask'], d[f'{k}_mask'])
    assert live(learn.model)==counts

def test_validate_changes_nothing(tmp_path):
    "Law 7: validate and get_preds leave weights, masks, BatchNorm, hooks, engine and mode as they were, and draw what they draw on a dense model"
    states = []
    for sparse in (False, True):
        torch.manual_seed(0)
        cb = DST(batches_per_update=2, seed=3)
        learn = learner(tmp_path, model=ConvNet(), cbs=[cb] if sparse else [], dtype=torch.float, flat=False)
        if sparse: sparsify_model(learn, .8, seed=1)
        learn.fit(1)
        before,hooks,state = snapshot(learn.model),n_hooks(learn.model),copy.deepcopy(cb.state_dict())
        grads = [p.grad.clone() for p in learn.model.parameters()]
        for seed in (torch.manual_seed, random.seed, np.random.seed): seed(3)
        learn.validate()
        learn.get_preds()
        states.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))
        assert agree(before, snapshot(learn.model)) and hooks==n_hooks(learn.model) and agree(state, cb.state_dict())
        assert all(torch.equal(p.grad, g) for p,g in zip(learn.model.parameters(), grads))
    assert agree(*states)

class Interlude(Callback):
    "Validate and predict while a fit runs, then let training go on"
    order,run_valid = 70,False
    def __init__(self, event): setattr(self, event, self._go)
    def _go(self):
        if self.learn.lock.locked(): return  # this is the validation's own event
        keep = [(k, getattr(self.learn, k)) for k in ('training','dl','epoch','train_iter','pct_train','iter','n_iter')]
        self.learn.validate()
        self.learn.get_preds()
        for k,v in keep: setattr(self.learn, k, v)
        if self.learn.training: self.learn.model.train()

@pytest.mark.parametrize('event', ['after_batch','after_train','after_epoch'])
def test_validate_in_the_middle_of_a_fit(event, tmp_path):
    "Law 7: validating from another callback, after each batch or epoch, gives the run without it, bit for bit"
    runs = []
    for cbs in ([], [Interlude(event)]):
        learn,watch = sparse_learner(tmp_path),Watch()
        cb = DST(batches_per_update=4, seed=3)
        learn.fit(3, cbs=[cb, watch]+cbs)
        assert watch.moved==[4,8,12,16,20]
        runs.append((snapshot(learn.model), cb.state_dict()))
    assert agree(*runs)

def test_one_cycle_and_two_fits(tmp_path):
    "Schedules of other callbacks don't matter to when topology moves; exact counts after each fit"
    learn = sparse_learner(tmp_path, opt_func=Adam)
    cb = DST(batches_per_update=4, grow_score_f=elsewhere)
    for due in ([4,8,12], [4]):
        watch = Watch()
        learn.fit_one_cycle(2 if len(due)==3 else 1, 1e-2, cbs=[cb, watch, Probe()])
        assert watch.moved==due and live(learn.model)==[205,32]
    assert [n for n,_,_ in masked(learn.model)]==['0.weight','2.weight']

# Saving

def test_save_and_load_with_masks(tmp_path):
    "Law 6: a sparse checkpoint brings its masks into a learner with other ones, where they are enforced and are the counts to keep"
    a = sparse_learner(tmp_path, opt_func=Adam)
    a.fit(2, cbs=DST(batches_per_update=4, sparsity=.8))
    a.save('a')
    b = sparse_learner(tmp_path, opt_func=Adam, seed=2)
    b.fit(1)
    b.load('a')
    assert agree(snapshot(a.model), snapshot(b.model)) and live(b.model)==[410,64]
    b.fit(1, cbs=Probe())
    assert same(masks_of(a.model), masks_of(b.model))
    b.fit(1, cbs=[DST(batches_per_update=4), Probe()])
    assert live(b.model)==[410,64]

def test_checkpoints_that_do_not_fit(tmp_path):
    "Law 10: sparse into dense and dense into sparse name the mask, unstrict too; what obeys the masks comes in without them"
    sparse,dense = sparse_learner(tmp_path),learner(tmp_path, model=mlp(seed=3))
    sparse.save('sparse')
    dense.save('dense')
    with pytest.raises(RuntimeError, match='weight_mask'): learner(tmp_path).load('sparse')
    for strict in (True,False):
        with pytest.raises(ValueError, match='0.weight_mask.*unsparsify'): sparse_learner(tmp_path).load('dense', strict=strict)
    learn = sparse_learner(tmp_path)
    masks = masks_of(learn.model)
    with torch.no_grad():
        for k,mask in masks.items(): dense.model.get_parameter(k).mul_(mask)
    dense.save('dense')
    learn.load('dense', strict=False)
    learn.validate()
    assert_dead(learn.model)
    assert same(masks, masks_of(learn.model)) and torch.equal(learn.model[0].weight, dense.model[0].weight*masks['0.weight'])

@pytest.mark.parametrize('fitted', [False, True])
def test_export_and_load_learner(fitted, tmp_path):
    "Law 6: an exported learner keeps masks and enforcement, with the callback inside, and trains on"
    learn = sparse_learner(tmp_path, cbs=[DST(batches_per_update=4, seed=2)])
    if fitted: learn.fit(1)
    before = snapshot(learn.model)
    learn.export('e.pkl')
    assert agree(before, snapshot(learn.model))
    twin = load_learner(tmp_path/'e.pkl')
    assert agree(before, snapshot(twin.model))
    x = learn.dls.valid.one_batch()[0]
    assert torch.equal(learn.model.eval()(x), twin.model.eval()(x))
    for o in (learn, twin):
        o.dls,watch = loaders(*digits()),Watch()
        o.fit(1, cbs=[watch, Probe()])
        assert watch.moved==[4] and live(o.model)==[205,32]
    assert fitted or same(masks_of(learn.model), masks_of(twin.model))  # an export holds no optimizer state

def test_export_in_the_middle_of_a_fit(tmp_path):
    "Law 6: exporting after each epoch from another callback neither fails nor disturbs the fit"
    class Exporter(Callback):
        def after_epoch(self): self.learn.export('e.pkl')
    learn,watch = sparse_learner(tmp_path, cbs=[DST(batches_per_update=4, grow_score_f=elsewhere)]),Watch()
    learn.fit(3, cbs=[Exporter(), watch, Probe()])
    assert watch.moved==[4,8,12,16,20]
    assert agree(snapshot(load_learner(tmp_path/'e.pkl').model), snapshot(learn.model))

@pytest.mark.parametrize('clone', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy','pickle'])
def test_copies_of_the_model_are_enforced(clone, tmp_path):
    "Law 6: a copy keeps masks and enforcement, and its training doesn't touch the original"
    learn = sparse_learner(tmp_path)
    learn.fit(1, cbs=DST(batches_per_update=4))
    before = snapshot(learn.model)
    twin = clone(learn.model)
    opt = torch.optim.SGD(twin.parameters(), .1, momentum=.9, weight_decay=.1)
    for x,y in learn.dls.train:
        F.cross_entropy(twin(x), y).backward()
        opt.step()
        assert_dead(twin, opt)
        opt.zero_grad()
    assert agree(before, snapshot(learn.model)) and not agree(before, snapshot(twin))
    other = learner(tmp_path, model=clone(learn.model))
    other.fit(1, cbs=[DST(batches_per_update=4), Probe()])

def test_copy_made_while_a_fit_runs(tmp_path):
    "Law 6: a model copied at a batch whose gradients arrive dense is enforced all the same"
    learn,copies = sparse_learner(tmp_path),[]
    learn.fit(1, cbs=[DST(batches_per_update=4), At('after_pred', [4], lambda l: copies.append(copy.deepcopy(l.model)))])
    learner(tmp_path, model=copies[0]).fit(1, cbs=Probe())

# Fits that end badly

@pytest.mark.parametrize('ex', [CancelFitException, CancelTrainException, CancelEpochException, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize('event,order', [('before_batch',20), ('after_backward',0), ('before_step',0), ('after_batch',0)])
def test_cancelled_fits_leave_nothing_lifted(event, order, ex, tmp_path):
    "Law 3: a fit cut short at a batch with dense gradients (an interrupt fires no after_fit); without the callback dead stays dead, with it all works"
    learn,cb = sparse_learner(tmp_path),DST(batches_per_update=4, keep_score_f=weight_magnitude, grow_score_f=elsewhere)
    stop = At(event, [4], cancel(ex('stop')), order=order)
    if issubclass(ex, (CancelFitException, CancelTrainException, CancelEpochException)): learn.fit(1, cbs=[cb, stop])
    else:
        with pytest.raises(ex): learn.fit(1, cbs=[cb, stop])
    learn.fit(1, cbs=Probe())
    watch = Watch()
    learn.fit(3, cbs=[cb, watch, Probe()])
    assert watch.moved==[4,8,12,16,20] and live(learn.model)==[205,32]

def test_interrupted_fit_with_a_dense_history(tmp_path):
    "Law 3: after an interrupt of SNFS a fit without the callback has dead weights and dead state"
    learn,cb = sparse_learner(tmp_path, opt_func=Adam),DST(**SNFS_presets, batches_per_update=4)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=[cb, At('after_backward', [6], cancel(KeyboardInterrupt))])
    learn.fit(1, cbs=Probe())

def test_interrupted_fit_and_lr_find(tmp_path):
    "Law 7: topology rests in lr_find, also after an interrupt with the callback on the learner"
    cb,watch = DST(batches_per_update=2, grow_score_f=elsewhere),Watch()
    learn = sparse_learner(tmp_path, cbs=[cb, watch, Probe()])
    with pytest.raises(KeyboardInterrupt): learn.fit(3, cbs=At('after_backward', [4], cancel(KeyboardInterrupt)))
    watch.moved.clear()
    learn.lr_find(num_it=15, end_lr=.1, show_plot=False, suggest_funcs=None)
    assert watch.moved==[]

def test_interrupted_fit_and_export(tmp_path):
    "Law 6: a learner can be exported after an interrupt"
    learn = sparse_learner(tmp_path, cbs=[DST(batches_per_update=2)])
    with pytest.raises(KeyboardInterrupt): learn.fit(3, cbs=At('after_backward', [4], cancel(KeyboardInterrupt)))
    learn.export('e.pkl')
    assert agree(snapshot(load_learner(tmp_path/'e.pkl').model), snapshot(learn.model))

def test_cancelled_batches_keep_the_count(tmp_path):
    "t counts batches of the fit, also those that were cancelled"
    learn,watch = sparse_learner(tmp_path),Watch()
    learn.fit(3, cbs=[DST(batches_per_update=4, grow_score_f=elsewhere), watch, At('before_batch', [2,3,6,7,13], cancel(CancelBatchException)), Probe()])
    assert watch.moved==[4,8,12,16,20]

# What users of the 2020 library do

def test_2020_synthetic_regression():
    "MLP 1-32-32-1, .8 with a dense first layer, momentum growth: the validation loss ends near the noise, .01"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1,32), nn.ReLU(), nn.Linear(32,32), nn.ReLU(), nn.Linear(32,1))
    learn = synth_learner(data=synth_dbunch(bs=100), model=model)
    sparsify_model(learn.model, .8, sparse_f=first_layer_dense_uniform)
    watch = Watch()
    with learn.no_bar(), learn.no_logging(): learn.fit(10, lr=1e-2, cbs=[DST(stop_pct=.5, grow_score_f=gradient_momentum), watch])
    assert learn.validate()[0]<.1
    assert watch.moved and set(watch.moved)<={10,20,30,40} and live(model)==[32,205,6]  # 204.8 and 6.4 of round(243.2)-32

def test_2020_resnet18(tmp_path):
    "vision_learner at .9 ERK: every sparsity shown equals 1-n_alive/n_total after fit_one_cycle, and the total is a tenth"
    from fastai.vision.all import resnet18,vision_learner
    torch.manual_seed(0)
    dls = loaders(torch.randn(40,3,32,32), torch.arange(40)%2, bs=4, n_valid=4)
    learn = vision_learner(dls, resnet18, n_out=2, pretrained=False, loss_func=nn.CrossEntropyLoss(), path=tmp_path)
    sparsify_model(learn.model, .9, sparse_f=erdos_renyi_sparsity)
    watch = Watch()
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(2, 1e-2, cbs=[DST(batches_per_update=8, stop_pct=.5, grow_score_f=gradient_momentum), watch])
    assert watch.moved==[8]  # of 18
    params = sparse_params(learn.model)
    assert len(params)==22  # 17 convolutions, 3 shortcuts, 2 linear layers of the head
    for p,mask,s in params: assert s==pytest.approx(1-int(mask.sum())/p.numel(), abs=1e-6)
    assert sum(int(m.sum()) for _,m,_ in params)==round(.1*sum(p.numel() for p,*_ in params))
    assert_dead(learn.model)

def test_2020_sparsify_a_learner(tmp_path):
    "sparsify_model and unsparsify take a Learner; the hooks' remove() ends enforcement"
    learn = learner(tmp_path)
    hooks = sparsify_model(learn, .9, seed=1)
    assert live(learn.model)==[205,32]
    learn.fit(1, cbs=Probe())
    hooks.remove()
    learn.fit(1)
    assert (learn.model[0].weight!=0).sum()>1000 and live(learn.model)==[205,32]
    unsparsify(learn)
    assert not masked(learn.model) and n_hooks(learn.model)==0

@pytest.mark.parametrize('preset', presets)
def test_2020_presets_as_keywords(preset, tmp_path):
    "`**SNFS_presets, batches_per_update=32` works as it stands, SET's too; RigL's brings its own interval, which gets shorter in 160 steps: 10, where 30 updates don't fit"
    extra = {} if preset=='RigL' else dict(batches_per_update=32)
    learn,watch = sparse_learner(tmp_path, dls=loaders(*digits(192), bs=2)),Watch()
    learn.fit(2, cbs=[DynamicSparseTrainingCallback(**presets[preset], **extra), watch])
    assert watch.moved==(list(range(10, 120, 10)) if preset=='RigL' else [32,64,96,128])
    assert sum(live(learn.model))==237 and (preset=='SNFS' or live(learn.model)==[205,32])

@pytest.mark.parametrize('opt_func', [SGD, partial(OptimWrapper, opt=torch.optim.SGD)])
def test_momentum_growth_without_momentum_says_what_to_set(opt_func, tmp_path):
    "The error of gradient_momentum names the way out, and dead weights are still dead afterwards"
    learn = sparse_learner(tmp_path, opt_func=opt_func)
    with pytest.raises(ValueError, match='mom'): learn.fit(1, cbs=DST(**SNFS_presets, batches_per_update=4))
    learn.fit(1, cbs=Probe())

# Imports, and more than one process

def test_the_core_imports_no_vision(apart):
    "The core never imports fastai.vision, torchvision or accelerate: `import fastsparse`, and `from fastsparse.all import *`"
    assert json.loads((apart/'imports.json').read_text())==[[],[]]

def ddp_learner(path, model, method, half=None):
    "Batches of 16; `half` takes the first or last 8 of each"
    x,y = digits(192)
    train = torch.arange(160).view(10,16)
    idx = train.flatten() if half is None else train[:,8*half:8*half+8].flatten()
    dls = loaders(torch.cat([x[idx],x[160:]]), torch.cat([y[idx],y[160:]]), bs=16 if half is None else 8)
    return learner(path, model=model, dls=dls, opt_func=opt_funcs['torch_sgd'])

def ddp_rank(rank, path):
    "One of two processes: each has its own random state, half of each batch, and no seed is given"
    dist.init_process_group('gloo', init_method=f'file://{path}/meet', rank=rank, world_size=2)
    ends = {}
    for method in presets:
        model = mlp(seed=0)
        torch.manual_seed(100+rank)
        sparsify_model(model, .9, seed=1 if method=='RigL' else None)
        learn = ddp_learner(path, DistributedDataParallel(model), method, rank)
        learn.fit(3, cbs=[DST(**{**presets[method], 'batches_per_update':4}, repair=False), Probe(state=method!='SNFS', grads=method!='SNFS')])
        ends[method] = snapshot(model)
    torch.save(ends, f'{path}/{rank}.pt')
    dist.destroy_process_group()

@pytest.fixture
def ranks(apart):
    check_exits(apart, [1,2])
    return [torch.load(apart/f'{r}.pt') for r in range(2)]

@pytest.mark.parametrize('method', presets)
def test_two_processes_keep_the_same_masks(method, ranks):
    "Law 8: under DDP masks and weights of both ranks are equal, seeds given or not, whatever else draws random numbers"
    a,b = [r[method] for r in ranks]
    assert agree(a, b)
    assert int(sum(v.sum() for k,v in a.items() if k.endswith('_mask')))==237

def test_two_processes_train_as_one(ranks, tmp_path):
    "Law 8: two ranks with half of each batch end with the masks of one process with whole batches"
    model = mlp(seed=0)
    sparsify_model(model, .9, seed=1)
    start = masks_of(model)
    learn = ddp_learner(tmp_path, model, 'RigL')
    learn.fit(3, cbs=DST(**{**RigL_presets, 'batches_per_update':4}, repair=False))
    one,two = snapshot(model),ranks[0]['RigL']
    assert not same(start, masks_of(model))
    for k in one: torch.testing.assert_close(one[k], two[k], rtol=1e-6, atol=1e-9)

def test_distrib_ctx():
    "fastai's own way to several processes needs accelerate, which is no dependency"
    pytest.importorskip('accelerate', reason='accelerate is not installed; the tests above do by hand what it does')
    pytest.importorskip('fastai.distributed')
    assert callable(Learner.distrib_ctx)

@pytest.mark.parametrize('name', ['n_steps','model','opt'])
def test_what_the_fit_knows(name):
    "Model, optimizer and steps come from the fit: they are no settings, and the signature doesn't show them"
    assert name not in inspect.signature(DynamicSparseTrainingCallback).parameters
    with pytest.raises(TypeError, match=f"'{name}' is no setting of a method: "): DynamicSparseTrainingCallback(**{name:50})

@pytest.mark.parametrize('bad', ['x', 1, ['0.weight']])
def test_sparse_compute_is_checked_when_made(bad):
    "Law 10: None, True, False or a plan"
    with pytest.raises(ValueError, match='sparse_compute is .*None .by a fixed rule., True .measured., False or a plan'): DynamicSparseTrainingCallback(sparse_compute=bad)

@pytest.mark.parametrize('settings,told', [
    (dict(stop_pct=2), 'stop_pct is 2, and must lie in'), (dict(batches_per_update='x'), "batches_per_update is 'x'"), (dict(batch_size=0), 'batch_size is 0'),
    (dict(on_update=[3]), 'on_update holds 3'), (dict(mask_init='rand'), "did you mean 'random'"),
    (dict(rules=[('0.*', dict(sparsity=2))]), 'sparsity is 2'), (dict(rules=3), 'rules is 3'), (dict(drop_fraction=1.5), 'drop_fraction is 1.5'),
    (dict(initial_drop_grow_pct=True), 'initial_drop_grow_pct is True')], ids=str)
def test_what_no_fit_could_take_is_refused_when_the_callback_is_made(settings, told):
    "A slip of the pen is told of at once, and not when the fit begins"
    with pytest.raises(ValueError, match=re.escape(told)): DynamicSparseTrainingCallback(**settings)

def test_a_preset_refuses_a_setting_that_there_is_not():
    "A changed copy with a misspelt setting would train with the old one"
    with pytest.raises(TypeError, match="'batch_per_update' is no setting of a method: did you mean 'batches_per_update'"): RigL_presets(batch_per_update=20)

def test_batches_of_all_ranks_are_joined(monkeypatch):
    "As one batch in the order of ranks; None where any rank has none"
    from fastsparse.model import running
    def ranks(*found):
        monkeypatch.setattr(running, 'in_many', lambda: True)
        monkeypatch.setattr(dist, 'get_world_size', lambda: len(found))
        def gather(out, mine): out[:] = found
        monkeypatch.setattr(dist, 'all_gather_object', gather)
        return running.joined_batch(found[0])
    a,b = torch.zeros(2, 3),torch.ones(1, 3)
    assert ranks((a,7), (b,7))[0].equal(torch.cat([a, b])) and ranks((a,7), (b,7))[1]==7
    assert ranks((a,), None) is None and ranks(None, (a,)) is None and ranks(None, None) is None

def test_two_callbacks_of_the_same_connections_are_refused(tmp_path):
    "One by name, and two of different layers train beside each other"
    learn = sparse_learner(tmp_path)
    with pytest.raises(ValueError, match='two callbacks would move the connections of .*sparse_modules'):
        learn.fit(1, cbs=[DynamicSparseTrainingCallback(**SET_presets), DynamicSparseTrainingCallback(**RigL_presets)])
    learn = sparse_learner(tmp_path)
    layers = [m for m in learn.model.modules() if hasattr(m, 'weight_mask')]
    if len(layers)>1: learn.fit(1, cbs=[DynamicSparseTrainingCallback(**SET_presets, sparse_modules=layers[:1]),
        DynamicSparseTrainingCallback(**RigL_presets, sparse_modules=layers[1:])])
