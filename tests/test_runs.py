"Every kind of run, in a loop and in fastai: accumulated, overflowing, copied, saved, resumed in another process, on two ranks (laws 6 and 8)"
import copy, json, math, os, pickle, pytest, sys, torch, torch.distributed as dist
from fastai.callback.core import Callback,CancelFitException
from fastai.optimizer import Adam,OptimWrapper
from fastai_data import Probe,Watch,digits,learner,loaders,momentum_sgd,sparse_learner,mlp as digits_mlp
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets
from fastsparse.methods.presets import ACDC_presets,GraNet_presets,MEST_presets,SRigL_presets
from fastsparse.methods.parts import soft_bound_path
from fastsparse.masks.scores import MovingGradient,MeanGradient,fisher_saliency
from fastsparse.train.growth import initial_value
from forks import run_code
from functools import partial
from helpers import *
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

going = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets, GraNet=dict(GraNet_presets, sparsity=.8), SRigL=SRigL_presets,
    soft=dict(MEST_presets, updates=4, drop_fraction=.3, sparsity=.85, sparsity_path=soft_bound_path(.3, .75)),
    collecting=dict(RigL_presets, keep_score_f=fisher_saliency, grow_score_f=MeanGradient(3)), moving=dict(SET_presets, grow_score_f=MovingGradient(.8)),
    cycling=dict(SET_presets, sparsity=[.6,.7,.8], drop_fraction=[.1,.3]), initial=dict(RigL_presets, grow_init_f=initial_value),
    blocks=dict(RigL_presets, structure='block 3x3', redistribute_f=gradient_redistribution), ACDC=dict(ACDC_presets, sparsity=.7),
    rules=dict(rules=[('0.*', dict(RigL_presets, batches_per_update=4)), ('2.*', SNFS_presets),
        ('4.*', dict(GMP_presets, batches_per_update=3, sparsity=.8))]))
presets = dict(SET=SET_presets, SNFS=SNFS_presets, RigL=RigL_presets)
runs = [(method,opt) for method in presets for opt in ('SGD','Adam')]+[(method, ('SGD','Adam')[i%2]) for i,method in enumerate(going) if i>2]

def start(method, opt, n_steps=40, dtype=torch.float, seed=None):
    "Model, optimizer and engine of one of `runs`"
    m = mlp((6,12,9,3), seed=4, dtype=dtype)
    structure = {'SRigL':'fan-in', 'blocks':'block 3x3'}.get(method)
    if method!='ACDC': sparsify_model(m, .7, erdos_renyi_sparsity, seed=5, structure=structure)
    opt = getattr(torch.optim, opt)(m.parameters(), lr=.03, **(dict(momentum=.9) if opt=='SGD' else {}))
    return m,opt,engine(m, opt, n_steps, **{**going[method], 'batches_per_update':4, 'seed':seed})

def go(m, opt, t0, t1):
    "Steps `t0` to `t1` with data that depend on the step only"
    for t in range(t0, t1): train(m, opt, 1, *data(m, seed=100+t))

def state(*run): return [o.state_dict() for o in run]

# --- in one process

@pytest.mark.parametrize('method', going)
def test_accumulated_and_overflowing(method):
    "Two halves accumulated are one batch; where a gradient overflows the scaler skips, nothing moves, all stays finite, and the update comes at the next step"
    made = []
    for halves in (1,2):
        m,opt,dst = start(method, 'SGD', dtype=torch.double, seed=7)
        for t in range(20):
            opt.zero_grad()
            for x,y in zip(*[o.chunk(halves) for o in data(m, seed=t)]): backward(m, x, y, 1/halves)
            opt.step()
        made.append((dst.n_updates, masks_of(m), [p.detach() for p in m.parameters()]))
    (n,a,ps),(k,b,qs) = made
    assert n==k>=2 and same_masks(a, b) and all(torch.allclose(p, q, atol=1e-10) for p,q in zip(ps, qs))
    m,opt,dst = start(method, 'SGD', seed=7)
    scaler,done = torch.amp.GradScaler('cpu', init_scale=64., growth_interval=1000),0
    for t in range(24):
        opt.zero_grad()
        xb,yb = data(m, seed=t)
        spoilt,before = t in (4,8,9,12,13),(dst.n_updates, masks_of(m))
        scaler.scale(nn.functional.mse_loss(m(xb), yb)*(math.inf if spoilt else 1.)).backward()
        scaler.step(opt)
        scaler.update()
        if spoilt: assert dst.n_updates==before[0] and same_masks(masks_of(m), before[1])
        done += not spoilt and dst.n_updates>before[0]
        assert all(p.isfinite().all() for p in m.parameters())
        assert_dead(m, opt, state=method not in ('SNFS','rules'))
    assert done>=2 and scaler.get_scale()==2.

def pickled(o): return pickle.loads(pickle.dumps(o))

@pytest.mark.parametrize('copied,run', [(copy.deepcopy,o) for o in runs]+[(pickled,o) for o in runs[::3]],
    ids=lambda o: '-'.join(o) if isinstance(o, tuple) else o.__name__)
def test_copies_train_as_the_original(run, copied):
    "Copies of model, optimizer and engine, made before the first step and in mid-run, make the same steps bit for bit, and stay apart"
    whole = start(*run)
    early = copied(whole)
    go(*whole[:2], 0, 11)
    late = copied(whole)
    go(*whole[:2], 11, 20)
    go(*late[:2], 11, 20)
    go(*early[:2], 0, 20)
    assert whole[2].n_updates>1 and agree(state(*whole), state(*late)) and agree(state(*whole), state(*early))
    assert late[2].model is late[0] and late[2].opt is late[1] and not {id(p) for p in whole[0].parameters()} & {id(p) for p in late[0].parameters()}

def test_copies_of_live_weights_train_as_the_original():
    m,opt,dst = start('RigL', 'Adam')
    sparse_compute(m, data(m)[0], opt, plan=dict.fromkeys([o.name for o in masked_params(m)], 'rows'))
    go(m, opt, 0, 6)
    other = copy.deepcopy((m, opt, dst))
    go(m, opt, 6, 14)
    go(*other[:2], 6, 14)
    for k,v in m.state_dict().items(): torch.testing.assert_close(v, other[0].state_dict()[k], rtol=0, atol=1e-6)  # the copy is dense under masks
    assert dst.n_updates==other[2].n_updates==3

def test_copy_of_an_engine_alone():
    "It brings copies of its model and its optimizer, and its `remove()` leaves the original attached"
    m,opt,dst = start('RigL', 'Adam')
    go(m, opt, 0, 6)
    new = copy.deepcopy(dst)
    go(new.model, new.opt, 6, 12)
    new.remove()
    go(m, opt, 6, 12)
    assert agree(new.model.state_dict(), m.state_dict()) and new.n_updates==dst.n_updates==2
    go(new.model, new.opt, 12, 20)
    go(m, opt, 12, 20)
    assert new.n_updates==2 and dst.n_updates==4
    assert_dead(new.model, new.opt)

def test_state_is_plain():
    "The engine's state survives JSON; a function without a name in a module is named by Python when a run is pickled"
    m,opt,dst = start('SNFS', 'Adam')
    go(m, opt, 0, 9)
    assert json.loads(json.dumps(dst.state_dict()))==dst.state_dict()
    dst.on_update.append(lambda engine, t: None)
    with pytest.raises((pickle.PicklingError,AttributeError), match='lambda'): pickle.dumps((m, opt, dst))

def test_state_of_another_model():
    "Refused, and nothing is taken over"
    saved,(m,opt,_) = start('RigL', 'SGD')[2].state_dict(),two_layers()
    dst = engine(m, opt)
    before = dst.state_dict()
    with pytest.raises(ValueError, match='state'): dst.load_state_dict(saved)
    assert dst.state_dict()==before

def test_a_loop_that_made_its_model_sparse_goes_on_where_the_model_is_sparse():
    "In the new process masks come first, from the file, and the engine finds them"
    m = mlp((16,64,8))
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=.1), 20, 4, sparsity=.8)
    spin(dst, 12)
    again = mlp((16,64,8))
    sparsify_model(again, .5, seed=3)
    again.load_state_dict(m.state_dict())
    new = engine(again, torch.optim.SGD(again.parameters(), lr=.1), 20, 4, sparsity=.8)
    new.load_state_dict(dst.state_dict())
    assert new.n_updates==dst.n_updates==2

def masks_by_seed(dtype, noise):
    m = mlp((10,10,3)).to(dtype)
    with torch.no_grad():
        for i,p in enumerate(m.parameters()): p.copy_(torch.arange(1, p.numel()+1).reshape(p.shape)/256*(-1)**i)
    sparsify_model(m, .5, seed=7)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=0.), **{**SET_presets, 'seed':7})
    for i in range(12):
        if noise: torch.randn(i+noise)
        step(dst, *[torch.ones_like(o.p) for o in masked_params(m)])
    assert dst.n_updates==5
    return masks_of(m)

def test_same_seed_same_masks():
    "Updates draw the same whatever else draws, and for a float32, float16, bfloat16 and float64 model"
    ref = masks_by_seed(torch.float, 0)
    for dtype,noise in ((torch.float,3),(torch.half,0),(torch.bfloat16,5),(torch.double,0)): assert same_masks(ref, masks_by_seed(dtype, noise))

def test_updates_and_parameters_draw_apart():
    "Two layers of one shape, and two updates, don't draw the same"
    m,seen = nn.Sequential(nn.Linear(20,20), nn.Linear(20,20)),[]
    def score(p, generator):
        seen.append(random_score(p, generator=generator))
        return seen[-1]
    sparsify_model(m, .5, seed=0)
    dst = engine(m, torch.optim.SGD(m.parameters(), lr=0.), grow_score_f=score)
    for _ in range(5): step(dst, torch.ones(20,20), torch.ones(20,20))
    assert len(seen)==4 and len({tuple(s.view(-1).tolist()) for s in seen})==4
    assert not torch.equal(m[0].weight_mask, m[1].weight_mask)

# --- in other processes: one imports, and forks three before any of them computes, as imports are what costs

def resume_loops(folder):
    "Load each run of the loop and finish it"
    for method,name in runs:
        torch.manual_seed(os.getpid())
        run = start(method, name)
        for o,s in zip(run, torch.load(folder/f'{method}_{name}.pt')): o.load_state_dict(s)
        go(*run[:2], 11, 26)
        torch.save(state(*run), folder/f'{method}_{name}_end.pt')

class Halt(Callback):
    "Save after the second epoch, and stop"
    def __init__(self, file, cb): self.file,self.cb = file,cb
    def after_epoch(self):
        if self.learn.epoch!=1: return
        self.learn.save(self.file)
        Path(f'{self.file}.json').write_text(json.dumps(self.cb.state_dict()))
        raise CancelFitException

fits = [f'{m}-{o}' for m in presets for o in ('sgd','adam')]

def fit_of(path, case, mask_seed=1, torch_seed=0, seed=7):
    method,opt = case.split('-')
    opts = dict(sgd=dict(opt_func=momentum_sgd, lr=.05), adam=dict(opt_func=Adam, lr=.01))[opt]
    learn = sparse_learner(path, seed=mask_seed, model=digits_mlp(seed=torch_seed), **opts)
    return learn,DynamicSparseTrainingCallback(**{**presets[method], 'batches_per_update':4}, seed=seed)

def state_of(learn, cb): return [snapshot(learn.model), learn.opt.state_dict(), cb.state_dict()]

def resume_fits(folder):
    "Other weights, masks and seeds, then go on from what was saved"
    for case in fits:
        learn,cb = fit_of(folder, case, 8, 8, 8)
        learn.load(folder/case)
        cb.load_state_dict(json.loads((folder/f'{case}.json').read_text()))
        learn.fit(4, start_epoch=2, cbs=cb)
        torch.save(state_of(learn, cb), folder/f'{case}-end')

def resume(folder):
    resume_loops(folder)
    resume_fits(folder)

def loop_of(m, run, method, seed, half=slice(None)):
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    dst = engine(run if method=='SET' else m, opt, 24, **{**presets[method], 'batches_per_update':4, 'seed':seed})
    first = snapshot(m)
    for t in range(20):
        train(run, opt, 1, *[o[half] for o in data(m, 32, seed=t)])
        assert_dead(m, opt, state=method!='SNFS')
    return dict(first=first, last=snapshot(m), seed=dst.seed, n_updates=dst.n_updates)

def loop_on_ranks(rank, method):
    "A run in a loop whose masks are those of rank 0 from the first batch on, and no part of later broadcasts"
    m = mlp((6,12,9,3), seed=4, dtype=torch.double)
    torch.manual_seed(1000+rank)
    sparsify_model(m, .6)
    ddp = DDP(m)
    ddp(data(m)[0])
    was = snapshot(m)
    if rank==1: m[0].weight_mask[0].logical_not_()
    mine = m[0].weight_mask.clone()
    ddp(data(m)[0])
    assert torch.equal(mine, m[0].weight_mask), 'the mask was broadcast'
    m.load_state_dict(was)
    return loop_of(m, ddp, method, None, slice(rank, None, 2))

def fit_half(path, model, method, half=None, **kwargs):
    "A fit on batches of 16; `half` takes the first or last 8 of each"
    x,y = digits(192)
    rows = torch.arange(160).view(10,16)
    idx = rows.flatten() if half is None else rows[:,8*half:8*half+8].flatten()
    dls = loaders(torch.cat([x[idx],x[160:]]), torch.cat([y[idx],y[160:]]), bs=16 if half is None else 8)
    sgd = partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, weight_decay=.1)
    learn = learner(path, model=model, dls=dls, opt_func=sgd)
    probe = Probe(state=method!='SNFS', grads=method!='SNFS')
    learn.fit(2, cbs=[DynamicSparseTrainingCallback(**{**presets[method], 'batches_per_update':4}, repair=False, **kwargs), probe])

def fit_on_ranks(rank, method, path):
    "SET's without a seed"
    model = digits_mlp(seed=0)
    torch.manual_seed(100+rank)
    sparsify_model(model, .9, seed=None if method=='SET' else 1)
    fit_half(path, DDP(model), method, rank, seed=None if method=='SET' else 3)
    return snapshot(model)

def on_rank(rank, path):
    "One of two processes, with a random state of its own and half of each batch"
    dist.init_process_group('gloo', init_method=f'file://{path}/meet', rank=rank, world_size=2)
    torch.save({m:(loop_on_ranks(rank, m), fit_on_ranks(rank, m, path)) for m in presets}, f'{path}/{rank}.pt')
    dist.destroy_process_group()

def work_apart(path):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=.1)  # torch imports much with its first optimizer
    ctx = torch.multiprocessing.get_context('fork')
    procs = [ctx.Process(target=f, args=args) for f,args in ((resume, [path]), (on_rank, [0, path]), (on_rank, [1, path]))]
    for p in procs: p.start()
    for p in procs: p.join()
    sys.exit(any(p.exitcode for p in procs))

@pytest.fixture(scope='module')
def apart(tmp_path_factory):
    "The folder with what other processes did, and the ends of the runs that were finished here"
    path,ends = tmp_path_factory.mktemp('apart'),{}
    for method,name in runs:
        torch.manual_seed(3)
        run = start(method, name)
        go(*run[:2], 0, 11)
        torch.save(state(*run), path/f'{method}_{name}.pt')
        go(*run[:2], 11, 26)
        ends[method,name] = state(*run)
    for case in fits:
        learn,cb = fit_of(path, case)
        learn.fit(4, cbs=[cb, Halt(path/case, cb)])
        ends[case,'said'] = cb.state_dict()
    res = run_code('import sys,test_runs; from pathlib import Path; test_runs.work_apart(Path(sys.argv[1]))', path)
    assert res.returncode==0, res.stderr
    return path,ends

@pytest.mark.parametrize('run', runs, ids='-'.join)
def test_a_loop_resumes_bit_for_bit(apart, run):
    "Saved between two updates and finished in a fresh process it is the uninterrupted one: weights, masks, optimizer, engine"
    (path,ends),name = apart,'_'.join(run)
    assert agree(ends[run], torch.load(path/f'{name}_end.pt')) and ends[run][2]['n_updates']>=3

@pytest.mark.parametrize('case', fits)
def test_a_fit_resumes_bit_for_bit(case, apart, tmp_path):
    "`learn.save` and `cb.state_dict()` restore weights, masks, optimizer and engine; a callback that was halted says after the fit what it said then"
    path,ends = apart
    learn,cb = fit_of(tmp_path, case)
    learn.fit(4, cbs=[cb, watch := Watch()])
    assert [t for t in watch.moved if t>=20], 'nothing moved after the stop, so this test shows nothing'
    assert agree(state_of(learn, cb), torch.load(path/f'{case}-end', weights_only=False))
    assert json.loads((path/f'{case}.json').read_text())==json.loads(json.dumps(ends[case,'said']))

@pytest.mark.parametrize('method', presets)
def test_two_ranks_train_as_one(method, apart, tmp_path):
    "Masks and weights are equal, whatever else draws random numbers, and those of one process with whole batches"
    (loop,fit),(loop2,fit2) = [torch.load(apart[0]/f'{r}.pt')[method] for r in (0,1)]
    assert agree(loop, loop2) and agree(fit, fit2) and loop['n_updates']>=3
    m = mlp((6,12,9,3), dtype=torch.double)
    sparsify_model(m, .6, seed=0)
    m.load_state_dict(loop['first'])
    pairs = [(loop['last'], loop_of(m, m, method, loop['seed'])['last'])]
    if method!='SET':
        model = digits_mlp(seed=0)
        sparsify_model(model, .9, seed=1)
        fit_half(tmp_path, model, method, seed=3)
        pairs.append((fit, snapshot(model)))
    for two,one in pairs:
        for k,v in one.items(): torch.testing.assert_close(v, two[k], rtol=1e-6, atol=1e-8)
