"What sparse training costs over dense training, in time and memory"
import statistics,time,torch
from fastai.basics import *
from fastsparse.all import *
from fastsparse.contract import weight_of
from copy import deepcopy
from functools import partial
from measure import *
from models import *

sparsity,every = .9,100

def sgd(model): return torch.optim.SGD(model.parameters(), lr=.01, momentum=.9)

def stepper(model, opt, xb, yb):
    "A function that makes one training step"
    def step():
        nn.functional.cross_entropy(model(xb), yb).backward()
        opt.step()
        opt.zero_grad()
    return step

def rigl(model, opt): return DynamicSparseTraining(model, opt, 10**6, False, **{**RigL_presets, 'batches_per_update':every}, seed=0)

def stepper_at(dst, step):
    "A function that makes the training step `t` of the engine `dst`"
    def at(t):
        dst.t,dst.last_t = t,t-1
        if t%every==0: dst.prepare(t)  # after each step the engine prepares for the next, which here is no update
        step()
    return at

def sparse_stepper(model, xb, yb):
    "Steps of RigL on `model` between updates, and a step with an update"
    sparsify_model(model, sparsity, erdos_renyi_sparsity, seed=0)
    opt = sgd(model)
    dst = rigl(model, opt)
    at = stepper_at(dst, stepper(model, opt, xb, yb))
    def update():
        before = dst.n_updates
        at(every)
        assert dst.n_updates==before+1
    return lambda: at(1), update

def peer_stepper(model, xb, yb):
    "Steps of rigl_torch between updates, and a function that is its update after a batch; None if it isn't installed"
    try: from rigl_torch.RigL import RigLScheduler
    except ImportError: return None,None
    opt = sgd(model)
    peer = RigLScheduler(model, opt, dense_allocation=1-sparsity, T_end=10**6, delta=every, ignore_linear_layers=False)
    def backward(step):
        peer.step = step
        nn.functional.cross_entropy(model(xb), yb).backward()
    def step():
        backward(0)
        if peer(): opt.step()
        opt.zero_grad()
    def update():
        backward(every-1)
        return cpu_time(peer)
    return step,update

def amortised(step, update): return (step*(every-1)+update)/every

def summary(dense, again, step, update, peer=None):
    "Ratios to dense steps: of steps between updates, of all steps, and of dense steps once more, which shows the noise"
    upd = statistics.median(update)
    return dict(dense_ms=1e3*statistics.median(dense), update_step_ms=1e3*upd, step=spread(ratios(step, dense)),
        amortised=spread([amortised(s, upd)/d for s,d in zip(step,dense)]), dense_again=spread(ratios(again, dense)),
        **({'rigl_torch':spread(ratios(peer, dense))} if peer else {}))

def training_step(name, rounds, n_updates=5):
    "A masked training step against a dense one"
    torch.manual_seed(0)
    model,xb,yb = make[name]()
    dense,again = [stepper(m, sgd(m), xb, yb) for m in (deepcopy(model), deepcopy(model))]
    step,update = sparse_stepper(model, xb, yb)
    peer,_ = peer_stepper(make[name]()[0], xb, yb) if name in ('mlp','resnet18') else (None,None)
    times = interleaved_blocks({k:f for k,f in dict(dense=dense, step=step, again=again, peer=peer).items() if f}, rounds, budget=40)
    return summary(**times, update=interleaved(dict(update=update), n_updates, warmup=1)['update'])

class BatchTimer(Callback):
    "CPU time from each batch to the next"
    order = 1000
    def before_train(self): self.marks = []
    def before_batch(self): self.marks.append(time.process_time())
    def times(self): return [b-a for a,b in zip(self.marks, self.marks[1:])]

def fit_times(model, xb, yb, n, cbs):
    "Seconds of each of the first `n` batches of a fit from memory"
    timer = BatchTimer()
    dls = DataLoaders([(xb,yb)]*(n+1), [])
    learn = Learner(dls, model, loss_func=nn.functional.cross_entropy, opt_func=partial(SGD, mom=.9), cbs=timer)
    learn._do_epoch_validate = noop
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .01, cbs=cbs)
    return timer.times()

def learner_step(name, rounds, n=9):
    "The same through fastai's `Learner`: fits of `n` batches, the last one with an update"
    torch.manual_seed(0)
    model,xb,yb = make[name]()
    models = dict(dense=model, again=deepcopy(model), step=deepcopy(model))
    sparsify_model(models['step'], sparsity, erdos_renyi_sparsity, seed=0)
    rewire = {**RigL_presets, 'batches_per_update':n-1, 'stop_pct':1.}
    times = {k:[] for k in (*models,'update')}
    for i in range(-1, rounds):
        for k in list(models)[::1 if i%2 else -1]:
            cbs = [DynamicSparseTrainingCallback(**rewire, seed=0)] if k=='step' else []
            *steps,last = fit_times(models[k], xb, yb, n, cbs)
            if i<0: continue
            times[k].append(statistics.median(steps))
            if cbs: times['update'].append(last)
    return summary(**times)

def gradients(case, mask):
    "A gradient and live weights for one of the cases that selection must bear"
    g,w = torch.randn(mask.shape),torch.randn(mask.shape)
    if case=='zeros': g *= torch.rand(mask.shape)<.02
    if case=='equal': g,w = torch.ones(mask.shape),torch.full(mask.shape, .1)
    return g,w

cases = ('normal','zeros','equal')
case_titles = dict(normal='normal weights and gradients', zeros='98 % of the gradients exactly zero', equal='all scores equal')

def rewirer(model, case):
    "An engine that is due, and a function that puts everything back as it was before an update"
    sparsify_model(model, sparsity, erdos_renyi_sparsity, seed=0)
    opt = sgd(model)
    dst = rigl(model, opt)
    starts = [(s, s.mask.clone(), *gradients(case, s.mask)) for s in dst.moving]
    for s,_,g,_ in starts: s.p.grad = g.clone()
    opt.step()
    @torch.no_grad()
    def reset():
        for s,mask,g,w in starts:
            s.mask.copy_(mask)
            s.p.copy_(w)
            s.p.grad = g
            s.w.check()
        for s in dst.moving: s.recount()
    reset()
    return dst,reset

def update_reads(model, case, rounds):
    "A whole update of masks, weights and state, in reads of the weights"
    torch.manual_seed(0)
    dst,reset = rewirer(model, case)
    n,before = sum(s.n for s in dst.moving),[s.mask.clone() for s in dst.moving]
    seconds,reads = [],[]
    for i in range(rounds+1):
        reset()
        read = statistics.median(one_read(4*n) for _ in range(3))
        seconds.append(cpu_time(lambda: dst.update(every)))
        reads.append(seconds[-1]/read)
    same = [int(s.mask.sum())==int(m.sum()) for s,m in zip(dst.moving, before)]
    assert all(same) and any(not s.mask.equal(m) for s,m in zip(dst.moving, before))
    return dict(weights=n, ms=1e3*statistics.median(seconds[1:]), reads=spread(reads[1:]))

def peer_reads(name, rounds):
    "An update of rigl_torch in reads of the weights; None if it isn't installed"
    torch.manual_seed(0)
    model,xb,yb = make[name]()
    _,update = peer_stepper(model, xb[:4], yb[:4])
    n = sum(p.numel() for p in model.parameters() if p.ndim>1)
    return spread([update()/one_read(4*n) for _ in range(rounds)]) if update else None

def upkeep(model, rounds):
    "Milliseconds to mask the gradients of `model` once"
    for p in model.parameters(): p.grad = torch.ones_like(p)
    weights = [weight_of(p) for p,*_ in sparse_params(model)]
    def once():
        for w in weights: w._arrived(w.p)
    return 1e3*statistics.median(interleaved(dict(mask=once), rounds)['mask'])

def growth(n, rounds):
    "What an update and the masking of a step cost a model of eight square layers with `n` weights in all"
    d = round((n/8)**.5)
    model = nn.Sequential(*[nn.Linear(d, d, bias=False) for _ in range(8)])
    row = update_reads(model, 'normal', rounds)
    return dict(row, upkeep_ms=upkeep(model, rounds))

def evaluation(name, rounds):
    "A forward pass in evaluation with masks enforced against the dense model's"
    torch.manual_seed(0)
    model,xb,_ = make[name]()
    models = dict(dense=model, masked=deepcopy(model), again=deepcopy(model))
    sparsify_model(models['masked'], sparsity, erdos_renyi_sparsity, seed=0)
    with torch.inference_mode(): times = interleaved_blocks({k:partial(m.eval(), xb) for k,m in models.items()}, rounds)
    dense = times['dense']
    return dict(dense_ms=1e3*statistics.median(dense), masked=spread(ratios(times['masked'], dense)), dense_again=spread(ratios(times['again'], dense)))

def memory(name, rounds):
    "Bytes a sparse weight that a fresh process holds more because of masks, and at the peak of an update"
    give_back()
    sparse_stepper(*make[name]())[1]()  # loads and builds whatever is needed once
    torch.manual_seed(0)
    model,xb,yb = make[name]()
    opt = sgd(model)
    def backward(): nn.functional.cross_entropy(model(xb[:4]), yb[:4]).backward()
    for _ in range(3):
        backward()
        opt.step()
    dense = resident()
    sparsify_model(model, sparsity, erdos_renyi_sparsity, mask_init='magnitude', seed=0)
    dst = rigl(model, opt)
    opt.step()
    steady = resident()-dense
    peaks = []
    for _ in range(rounds):
        dst.prepare(every)
        opt.zero_grad()
        backward()
        peaks.append(peak_over_resident(lambda: dst.update(every)))
        opt.step()
    n = sum(s.n for s in dst.moving)
    return dict(weights=n, steady=steady/n, update_peak=spread([p/n for p in peaks]))
