"The fastai side: when the callback moves the topology, what it leaves alone, and how it lives with fastai's other callbacks"
import copy,math,pytest
import torch, torch.nn.functional as F
from fastai.callback.core import CancelBatchException,CancelFitException,CancelStepException,Callback
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation,GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastai.optimizer import Adam,Lamb,OptimWrapper,QHAdam,RMSProp,SGD,ranger
from fastai_data import *
from fastcore.all import noop,partial
from fastsparse.all import *
from fastsparse.save.checkpoint import _lacks
from fastsparse.all import fisher_saliency
from fastsparse.train.presets import GMP_presets
from fastsparse.core.registry import declares
from helpers import agree,engine,live,masked_params,masks_of,same_masks,snapshot,states,warned
from torch import nn

DST = DynamicSparseTrainingCallback
presets = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)
wrapped = lambda opt, **kwargs: partial(OptimWrapper, opt=getattr(torch.optim, opt), **kwargs)
opt_funcs = dict(sgd=SGD, momentum=momentum_sgd, adam=Adam, adamw=wrapped('AdamW'), torch_sgd=wrapped('SGD', momentum=.9, weight_decay=.1),
    ranger=partial(ranger, k=3), rmsprop=partial(RMSProp, mom=.9), lamb=Lamb, qhadam=QHAdam, rprop=wrapped('Rprop'))
pytestmark = pytest.mark.filterwarnings('ignore:load_learner', 'ignore:Saved file')

def rate(t, n_steps, stop=.75): return .15*(1+math.cos(math.pi*t/(stop*n_steps)))

@declares(reads_grad=True)
class Spy:
    "A grow score that remembers when it was asked, for how much, and the gradient that it saw"
    def __init__(self, score=gradient_magnitude): self.score,self.asked = score,[]
    def __call__(self, p, step, n, name, **kwargs):
        self.asked.append((step, name, n, None if p.grad is None else p.grad.clone()))
        return self.score(p)
    @property
    def steps(self): return [o[0] for o in self.asked if o[1]=='0.weight']
    @property
    def counts(self): return [o[2] for o in self.asked if o[1]=='0.weight']

def test_ranks_begin_with_the_same_masks(monkeypatch, tmp_path):
    "Masks that were drawn before the process group was initialised may differ"
    from fastsparse.train import callback
    shared,learn = [],learner(tmp_path)
    for k,f in dict(in_many=lambda: True, share_masks=shared.append, of_first_rank=noop).items(): monkeypatch.setattr(callback, k, f)
    sparsify_model(learn.model, .8, seed=0)
    learn.fit(1, cbs=DST(method='set', batches_per_update=3, repair=False, seed=0))
    assert shared==[learn.model]

def test_a_fit_from_a_later_epoch_makes_up_for_nothing(tmp_path):
    "Ten batches an epoch: from the second one on the first update of every third step is the twelfth's, and not the ninth's"
    learn,seen = learner(tmp_path),[]
    sparsify_model(learn.model, .8, seed=0)
    learn.fit(3, start_epoch=1, cbs=DST(method='set', batches_per_update=3, seed=0, on_update=lambda engine, t: seen.append(t)))
    assert seen[:2]==[12,15]

def grads_of(model, x, y):
    "Dense gradients of the masked parameters, without touching `p.grad` or its hooks"
    return torch.autograd.grad(F.cross_entropy(model(x), y), [o.p for o in masked_params(model)])

# --- the same engine with and without fastai

@pytest.mark.parametrize('method', presets)
def test_fastai_and_plain_loop_have_the_same_masks(method, tmp_path):
    "fastai's Adam, torch's AdamW in fastai, and AdamW in a plain loop agree after every batch"
    settings = {**presets[method], 'batches_per_update':4, 'stop_pct':.75}
    def in_fastai(opt_func):
        learn,watch = sparse_learner(tmp_path, opt_func=opt_func, lr=.01),Watch()
        learn.fit(3, cbs=[DST(**settings, repair=False, seed=5), watch])
        return watch.masks
    learn,plain = sparse_learner(tmp_path),[]
    opt = torch.optim.AdamW(learn.model.parameters(), lr=.01, betas=(.9,.99), eps=1e-5, weight_decay=0)
    engine(learn.model, opt, 30, **settings, seed=5)
    for x,y in list(learn.dls.train)*3:
        F.cross_entropy(learn.model(x), y).backward()
        opt.step()
        opt.zero_grad()
        plain.append(masks_of(learn.model))
    assert [t for t in range(1, 30) if not same_masks(plain[t-1], plain[t])]==[4,8,12,16,20]  # t<22.5
    for opt_func in (partial(Adam, mom=.9, sqr_mom=.99, eps=1e-5, wd=0.), wrapped('AdamW', betas=(.9,.99), eps=1e-5, weight_decay=0)):
        ours = in_fastai(opt_func)
        assert len(ours)==30 and all(map(same_masks, plain, ours))

# --- when

to_the_end = dict(stop_pct=1., initial_drop_grow_pct=1.)

@pytest.mark.parametrize('n,kwargs,moved', [(3, {}, [4,8,12,16,20]), (3, dict(start_epoch=1), [12,16,20]), (4, dict(start_epoch=2, batches_per_update=10), [20]),
    (4, dict(batches_per_update=None), [10,20]), (3, dict(batches_per_update=14, **to_the_end), [14,28]), (3, dict(batches_per_update=29, **to_the_end), [])])
@pytest.mark.filterwarnings('ignore:.*no update')
def test_due_times_are_batches_of_the_fit(n, kwargs, moved, tmp_path):
    "Also where it starts later: t>0, a multiple, t<stop*n, not the last step, with the drop fraction of that t and a dense gradient; once an epoch by default"
    learn,spy = sparse_learner(tmp_path),Spy(elsewhere)
    assert fit(learn, n, grow_score_f=spy, **kwargs)[1]==spy.steps==moved
    if 'stop_pct' not in kwargs: assert spy.counts==[int(rate(t, 10*n)*205) for t in moved]
    assert live(learn.model)==[205,32] and all(o[3].count_nonzero()>.9*o[3].numel()*.5 for o in spy.asked)

def test_a_second_fit_takes_its_own_length_and_draws_anew(tmp_path):
    "A callback reused: 10 batches give t=4, 30 give 4 to 20; random choices are keyed by the number of the update, which goes on counting"
    learn,spy,draws = sparse_learner(tmp_path),Spy(elsewhere),[]
    @declares(reads_grad=True)
    def draw(p, name, generator, **kwargs):
        if name=='0.weight': draws.append(random_score(p, generator=generator))
        return spy(p, name=name, **kwargs)
    cb = DST(batches_per_update=4, keep_score_f=weight_magnitude, grow_score_f=draw)
    for n_epoch,due in ((1,[4]), (3,[4,8,12,16,20]), (2,[4,8,12])):
        spy.asked.clear()
        learn.fit(n_epoch, cbs=[cb, watch := Watch()])
        assert watch.moved==spy.steps==due and spy.counts==[int(rate(t, 10*n_epoch)*205) for t in due]
    assert len({tuple(o.flatten().tolist()) for o in draws})==9

def test_a_fit_without_update_warns(tmp_path):
    "10 batches: t<7.5, and 6 gives an update"
    learn,moved = sparse_learner(tmp_path),[]
    said = [' '.join(o for o in warned(lambda: moved.append(fit(learn, batches_per_update=every)[1])) if 'update' in o) for every in (None,6)]
    assert moved==[[],[6]] and 'no update' in said[0] and 'no update' not in said[1]

def test_fisher_saliency_drops_by_weight_and_gradients(tmp_path):
    "At the update of t=10, the lowest abs(w)*rms(g) go, with the live gradients of batches 0 to 10"
    learn,squares,seen = sparse_learner(tmp_path),[],[]
    class Look(Callback):
        order,run_valid = DST.order-.1,False
        def before_step(self):
            o = self.learn.model[0]
            squares.append((o.weight.grad*o.weight_mask)**2)
            if len(squares)==11: seen.extend([o.weight.detach().clone(), o.weight_mask.clone()])
    fit(learn, 4, [Look(), At('after_batch', [10], lambda learn: seen.append(learn.model[0].weight_mask.clone()), order=99)],
        batches_per_update=10, keep_score_f=fisher_saliency)
    w,before,after = seen
    score,gone = w.abs()*(sum(squares[:11])/11).sqrt(),before & ~after
    k = int(rate(10, 40)*205)
    assert gone.sum()==k and torch.allclose(score[gone].sort().values, score[before].sort().values[:k])

# --- dense models, and targets

@pytest.mark.parametrize('sparse_f,counts', [(..., [165,72]), (first_layer_dense_uniform, [2048,32])])
def test_sparsity_on_a_dense_model_registers_masks(sparse_f, counts, tmp_path):
    "Law 1: round(.1*2368)=237 live, by ERK 164.9 and 72.1, by largest remainder; dead from the first step on; `sparse_f=` shares out otherwise"
    learn,probe = learner(tmp_path),Probe()
    fit(learn, 1, [probe], sparsity=.9, **({} if sparse_f is ... else dict(sparse_f=sparse_f)))
    assert live(learn.model)==counts and probe.n_checks==10

@pytest.mark.parametrize('target,counts', [(.5, [1024,160]), (.95, [102,16]), (0., [2048,320])])
def test_sparsity_on_a_sparse_model_sets_targets(target, counts, tmp_path):
    "Law 1: each update leaves exactly the target, from above or below: .05*2368=118.4, so 102.4 and 16.0 become 102 and 16"
    learn,watch = sparse_learner(tmp_path),Watch()
    fit(learn, 1, [watch], sparsity=target, stop_pct=1.)
    assert [[int(m.sum()) for m in o] for o in watch.masks]==4*[[205,32]]+6*[counts]
    assert [s for *_,s in sparse_params(learn.model)]==pytest.approx([1-c/n for c,n in zip(counts, (2048,320))], abs=1e-6)

# --- dead is dead (law 3)

@pytest.mark.parametrize('opt', opt_funcs)
def test_dead_is_dead(opt, tmp_path):
    "With masks alone, and in fits with updates, dead weights and all their state are exactly zero, and no step sees their gradient; fastai's own optimizers need no full upkeep for it"
    learn = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01)
    wd,first = None if opt=='rprop' else .05,masks_of(learn.model)  # Rprop knows no weight decay
    learn.fit(1, cbs=Probe(), wd=wd)
    assert same_masks(first, masks_of(learn.model))
    for replace in (True,False):
        learn.fit(2, cbs=[DST(**RigL_presets(batches_per_update=4), replace_step=replace), probe := Probe()], wd=wd)
        assert (probe.n_checks, probe.n_steps)==(20, 17 if replace else 20)  # at 4, 8 and 12 of 15
    assert not same_masks(first, masks_of(learn.model)) and all((o.p!=0).sum()>.5*o.mask.sum() for o in masked_params(learn.model)), 'live weights train'
    assert sparse_summary(learn).df.note.str.contains('upkeep').any()==(opt=='rprop')

@pytest.mark.parametrize('opt', ['momentum','adamw','ranger'])
@pytest.mark.parametrize('then', ['fit','lr_find','interrupt'])
def test_dead_weights_with_a_dense_history(then, opt, tmp_path):
    "Where a score reads a dense history only that is dense, Lookahead's copies are not; all is zero once the fit is over, is interrupted, or an lr_find put it back"
    learn,dense = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01),[]
    def look(learn):
        dense.extend(int(t[~o.mask].count_nonzero()) for o in masked_params(learn.model) for t in states(learn.opt, o.p))
        slow = [s for ss in getattr(learn.opt, 'slow_weights', None) or [] for s in ss if s.ndim>1]
        for o,s in zip(masked_params(learn.model), slow): assert not s[~o.mask].any()
    cbs = [DST(**SNFS_presets, batches_per_update=4), Probe(state=False, grads=False), At('after_batch', [3,5], look)]
    if then=='interrupt':
        with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=[*cbs, At('after_backward', [6], cancel(KeyboardInterrupt))])
    else: learn.fit(1, cbs=cbs)
    assert max(dense)>100, 'the history should be dense while the fit runs'
    if then=='lr_find': learn.lr_find(num_it=10, end_lr=.1, show_plot=False, suggest_funcs=None)
    learn.fit(1, cbs=Probe())

@pytest.mark.parametrize('opt', ['momentum','adam','torch_sgd','adamw'])
def test_optimizer_state_loaded_alone(opt, tmp_path):
    "State with entries of dead weights, loaded into an optimizer that has stepped before, moves no dead weight"
    learn,dense = [f(tmp_path, opt_func=opt_funcs[opt], lr=.01) for f in (sparse_learner,learner)]
    for o in (learn,dense): o.fit(1)
    learn.opt.load_state_dict(copy.deepcopy(dense.opt.state_dict()))
    learn.fit(1, cbs=Probe())

# --- an update and its batch (law 4)

@pytest.mark.parametrize('opt', ['momentum','adam','adamw'])
def test_a_replaced_step_moves_nothing_else(opt, tmp_path):
    "Kept weights, biases and state are untouched, grown and dropped ones zero, gradients zero afterwards, and in the next batch that batch's own"
    learn,seen,n_seen = sparse_learner(tmp_path, opt_func=opt_funcs[opt], lr=.01),[],[]
    params = lambda: list(learn.model.parameters())
    tensors = lambda: [[p.data]+states(learn.opt, p) for p in params()]
    def before(learn): seen[:] = [masks_of(learn.model), [[t.clone() for t in ts] for ts in tensors()]]
    def after(learn):
        kept = {id(o.p): o.mask&m for o,m in zip(masked_params(learn.model), seen[0])}
        assert not same_masks(seen[0], masks_of(learn.model))
        for p,old,new in zip(params(), seen[1], tensors()):
            keep = kept.get(id(p), torch.ones_like(p, dtype=torch.bool))
            assert all(torch.equal(a[keep], b[keep]) and not b[~keep].gt(1.2e-30).any() and not b[~keep].lt(0).any() for a,b in zip(old, new))
            assert p.grad is None or not p.grad.any(), 'gradients are left after a replaced step'
        n_seen.append(learn.iter)
    def own(learn):
        for g,o in zip(grads_of(learn.model, *learn.xb, *learn.yb), masked_params(learn.model)):
            torch.testing.assert_close(o.p.grad, g*o.mask, rtol=1e-5, atol=1e-8)
    due = [4,8,12]
    fit(learn, 2, [At('before_step', due, before, order=10.2), At('after_batch', due, after), At('before_step', [3,5,9,13], own, order=10.7)])
    assert n_seen==[4,8,2]

# --- with fastai's other callbacks

class Accumulate(GradientAccumulation): "A user's own accumulation: fastai names its attribute after the subclass"

@pytest.mark.parametrize('accumulation', [GradientAccumulation, Accumulate])
def test_accumulated_gradient_is_that_of_the_big_batch(accumulation, tmp_path):
    "Four batches of 16 accumulated train, drop and grow as one batch of 64: same masks after each step, same weights"
    ends = []
    for bs,every,extra in ((16,8,[accumulation(64)]), (64,2,[])):
        learn,watch,spy = sparse_learner(tmp_path, dls=loaders(*digits(288), bs=bs)),Watch(),Spy()
        fit(learn, 3, [watch, Probe(), *extra], batches_per_update=every, grow_score_f=spy)
        ends.append((watch.masks[64//bs-1::64//bs], snapshot(learn.model), spy))
    (small,a,spy),(big,b,big_spy) = ends
    assert spy.steps==[8,16,24,32] and big_spy.steps==[2,4,6,8] and spy.counts==big_spy.counts and all(map(same_masks, small, big))
    for o,p in zip(spy.asked, big_spy.asked): torch.testing.assert_close(o[3], p[3], rtol=1e-5, atol=1e-8)
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-7)

@pytest.mark.parametrize('accumulate', [False, True])
@pytest.mark.parametrize('clip_first', [False, True])
def test_clipping_sees_live_gradients_only(clip_first, accumulate, tmp_path):
    "Each step of plain SGD is lr*max_norm long, which it is not where dead gradients count; the callbacks' order is no matter"
    learn,lengths = sparse_learner(tmp_path, opt_func=SGD, lr=.1),[]
    flat = lambda: torch.cat([p.detach().flatten() for p in learn.model.parameters()])
    class Length(Callback):
        order,run_valid = 49,False
        def before_step(self): self.was = flat()
        def after_step(self): lengths.append((self.learn.iter, (flat()-getattr(self, 'was', flat())).norm().item()))
    cbs = [GradientClip(1e-3), DST(batches_per_update=4)]
    learn.fit(1, wd=0., cbs=(cbs if clip_first else cbs[::-1])+[Length()]+accumulate*[GradientAccumulation(32)])
    steps = [n for t,n in lengths if t!=4+accumulate]
    assert steps==pytest.approx([1e-4]*(4 if accumulate else 9), rel=2e-2) and max(steps)<=1e-4*(1+1e-6)  # clip_grad_norm_ adds 1e-6 to the norm

def test_callbacks_in_any_order_give_the_same_run(tmp_path):
    "Accumulation, mixed precision, clipping and topology: each before and after each other"
    ends = []
    for order in ((0,1,2,3),(3,2,1,0),(2,0,3,1),(1,3,0,2),(0,3,2,1),(1,2,3,0)):
        learn = sparse_learner(tmp_path, model=mlp(torch.float), dtype=torch.float)
        cbs = [DST(batches_per_update=4, seed=3), GradientClip(.5), CpuMixedPrecision(), GradientAccumulation(32)]
        learn.fit(1, cbs=[cbs[i] for i in order]+[watch := Watch(), Probe()])
        ends.append(snapshot(learn.model))
        assert watch.moved==[5] and agree(ends[0], ends[-1])

def overflow(learn): learn.model[0].bias.grad[0] = math.inf
def skip(learn):
    if not all(p.grad.isfinite().all() for p in learn.model.parameters()): raise CancelStepException

cancelled = [(event, order, CancelBatchException) for event in ('before_batch','after_loss','before_step') for order in (0,20)]+[
    ('before_step', order, CancelStepException) for order in (0,20)]
waits = {'mixed precision':(lambda: [CpuMixedPrecision()], 8), 'overflow twice':(lambda: [CpuMixedPrecision(), At('after_backward', [8,9], overflow)], 10),
    'skipped without a scaler':(lambda: [At('after_backward', [8], overflow), At('before_step', range(30), skip, order=20)], 9),
    **{f'{ex.__name__} in {event} at {order}':(lambda event=event, order=order, ex=ex: [At(event, [8], cancel(ex), order=order)],
        8 if (event,order)==('before_step',20) else 9) for event,order,ex in cancelled}}

@pytest.mark.parametrize('case', waits)
def test_update_waits_for_the_next_step(case, tmp_path):
    "Due at 8, where gradients overflow or another callback cancels: done at the next step, with the drop fraction of 8 and the dense, unscaled gradient of its batch"
    cbs,at = waits[case]
    amp = case in ('mixed precision','overflow twice')
    learn = sparse_learner(tmp_path, **(dict(model=mlp(torch.float), dtype=torch.float) if amp else {}))
    made,spy,now,density,scales = [],Spy(),[],[],[]
    class Now(Callback):
        order,run_valid = 10.2,False
        def after_pred(self): now[:] = grads_of(self.learn.model, *self.learn.xb, *self.learn.yb)
        def after_batch(self): scales.append(amp and self.learn.scaler.get_scale())
    @declares(reads_grad=True)
    def grow(p, step, n, name, **kwargs):
        if name=='0.weight':
            true,seen = now[0].float(),p.grad.float()
            made.append(learn.epoch*10+learn.iter)
            density.append(seen.count_nonzero()/true.count_nonzero())
            if amp: assert .95<seen.norm()/true.norm()<1.05 and F.cosine_similarity(seen.flatten(), true.flatten(), 0)>.99
        return spy(p, step, n, name, **kwargs)
    fit(learn, 3, [Now(), Probe(), *cbs()], grow_score_f=grow)
    assert made==[4,at,12,16,20] and spy.steps==[4,8,12,16,20] and spy.counts==[int(rate(t, 30)*205) for t in spy.steps]
    assert min(density)>.9, f'growth read masked gradients: {density}'
    if amp: assert set(scales)==({1024.} if at==8 else {1024.,512.,256.})

@pytest.mark.parametrize('dl', [list, lambda bs: torch.utils.data.DataLoader(bs, batch_size=None)])
def test_any_iterable_of_batches(dl):
    "DataLoaders hold whatever yields batches: lists and torch's loaders too"
    batches,model = [(torch.randn(4, 30), torch.randn(4, 20)) for _ in range(6)],nn.Linear(30, 20)
    sparsify_model(model, .5, seed=0)
    learn = Learner(DataLoaders(dl(batches), dl(batches)), model, loss_func=MSELossFlat(), lr=.1)
    with learn.no_bar(), learn.no_logging(): assert fit(learn, batches_per_update=2, stop_pct=1.)[1]==[2,4]

def test_fine_tune_with_a_frozen_body(tmp_path):
    "Law 9: while the body is frozen its weights and masks stay exactly as they are and the head's move; then the body's move too"
    stages = []
    torch.manual_seed(0)
    learn = learner(tmp_path, model=ConvNet(), cbs=[DST(batches_per_update=4, grow_score_f=elsewhere), Probe()], dtype=torch.float, flat=False)
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

@pytest.mark.parametrize('opt', ['sgd','torch'])
def test_momentum_growth_without_momentum_says_what_to_set(opt, tmp_path):
    "And dead weights are still dead afterwards"
    learn = sparse_learner(tmp_path, opt_func=dict(sgd=SGD, torch=wrapped('SGD'))[opt])
    with pytest.raises(ValueError, match='mom'): learn.fit(1, cbs=DST(**SNFS_presets, batches_per_update=4))
    learn.fit(1, cbs=Probe())

def test_two_callbacks_train_different_connections(tmp_path):
    "Beside each other; the same ones are refused"
    learn = sparse_learner(tmp_path)
    with pytest.raises(ValueError, match='two callbacks would move the connections of .*sparse_modules'):
        learn.fit(1, cbs=[DST(**SET_presets), DST(**RigL_presets)])
    for i in (0,2): learn.fit(1, cbs=[DST(**SET_presets, sparse_modules=learn.model[i]), DST(**RigL_presets, sparse_modules=[learn.model[2-i]])])

def test_how_much_sparsity_is_missing():
    "In fractions of the weights, up to one weight a parameter; nothing without a schedule"
    m = nn.Sequential(nn.Linear(10,20), nn.ReLU(), nn.Linear(20,10))
    engine = SparseEngine(m, torch.optim.SGD(m.parameters(), .1), 100, seed=0, **GMP_presets(sparsity=.8))
    lacks = _lacks(engine.groups[0])
    live = sum(s.live for s in engine.moving)
    assert lacks==pytest.approx(.8-(1-(live-2)/400)) and live==400
    sparsify_model(n := nn.Sequential(nn.Linear(10,20), nn.ReLU(), nn.Linear(20,10)), .5, seed=0)
    steady = SparseEngine(n, torch.optim.SGD(n.parameters(), .1), 100, seed=0, **SET_presets)
    assert _lacks(steady.groups[0])==0

def test_a_fit_that_goes_on_in_another_epoch_than_its_state(tmp_path):
    "Refused before the first batch, with the epoch to pass"
    class Stop(Callback):
        def after_epoch(self):
            if self.epoch==1: raise CancelFitException
    learn,cb = sparse_learner(tmp_path),DST(**{**RigL_presets, 'batches_per_update':4})
    learn.fit(4, cbs=[cb, Stop()])
    again = DST(**{**RigL_presets, 'batches_per_update':4})
    again.load_state_dict(cb.state_dict())
    before = copy.deepcopy(learn.model.state_dict())
    with pytest.raises(ValueError, match=r'continues in epoch 2, and this fit starts in epoch 1: pass start_epoch=2'): learn.fit(4, start_epoch=1, cbs=again)
    assert all(v.equal(before[k]) for k,v in learn.model.state_dict().items())
