"Many processes: data parallel and sharded training choose the masks of one process with the joined batch, bit for bit"
import os,pytest,subprocess,sys,warnings
import torch.distributed as dist
from datetime import timedelta
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets,GSE_presets,ITOP_presets
from fastsparse.methods.presets import ACDC_presets,DSD_presets,GraNet_presets,MEST_presets,SoftMEST_presets,SRigL_presets
from fastsparse.weights.optimizers import state_tensors
from fastsparse.compat.cerebras import LinearSchedule
from fastsparse.train.presets import Static_presets
from fastsparse.methods.parts import MagnitudePlusGradient
from fastsparse.masks.scores import fisher_saliency,gradient_redistribution,MeanGradient,SampledGradient
from fastsparse.masks.distributions import first_layer_dense_uniform
from fastsparse.special.distributions import global_sparsity
from fastsparse.masks.schedules import Schedule
from fastsparse.masks.selection import local_part
from forks import on_processes
from functools import partial
from helpers import *
from pathlib import Path

root = Path(__file__).parent.parent

# --- runs on one process and on many

def dense(first=6):
    "A small model whose rows fall unevenly on ranks"
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(first,12), nn.Tanh(), nn.Linear(12,8), nn.Tanh(), nn.Linear(8,3)).double()

def batch(t, first=6):
    g = torch.Generator().manual_seed(t)
    n = 21 if t%5==4 else 32  # the last of an epoch is smaller
    return torch.randn(n, first, generator=g).double(),torch.randn(n, 3, generator=g).double()

opts = dict(sgd=partial(torch.optim.SGD, lr=.1, momentum=.9), adam=partial(torch.optim.Adam, lr=.02), adamw=partial(torch.optim.AdamW, lr=.02, weight_decay=.1),
    adamax=partial(torch.optim.Adamax, lr=.01), plain=partial(torch.optim.SGD, lr=.1), zero=None)

every = dict(batches_per_update=4)
cases = dict(Static=dict(settings=Static_presets), SET=dict(settings=SET_presets(**every)), SNFS=dict(settings=SNFS_presets(**every)),
    RigL=dict(settings=RigL_presets(**every)), GSE=dict(settings=GSE_presets(**every)),
    ITOP=dict(settings=ITOP_presets(**every), opt='adam'), GMP=dict(settings=GMP_presets(**every, sparsity=.7)),
    GraNet=dict(settings=GraNet_presets(**every, sparsity=.7)), MEST=dict(settings=MEST_presets), SoftMEST=dict(settings=SoftMEST_presets(sparsity=.7)),
    SRigL=dict(settings=SRigL_presets(**every), structure='fan-in ablate 0.3'), ACDC=dict(settings=ACDC_presets(sparsity=.7), opt='adam'),
    DSD=dict(settings=DSD_presets(sparsity=.6)))
more = dict(inputs=dict(settings=ACDC_presets(sparsity=.85), opt='adam'),
    blocks=dict(settings=RigL_presets(**every, structure='block 1x2'), structure='block 1x2', opt='adam'),
    fan_in=dict(settings=RigL_presets(**every, structure='fan-in', redistribute_f=gradient_redistribution), structure='fan-in'),
    groups=dict(settings=SNFS_presets(**every, structure='1:2'), structure='1:2', sparsity=.5),
    fisher=dict(settings=RigL_presets(**every, keep_score_f=fisher_saliency, grow_score_f=MeanGradient(3)), opt='adamw'),
    global_fast=dict(settings=RigL_presets(**every, sparsity=LinearSchedule(.3, .02), sparse_f=global_sparsity), opt='plain'),
    accumulated=dict(settings=RigL_presets(**every), pieces=2), adamax=dict(settings=RigL_presets(**every), opt='adamax'),
    lottery=dict(settings=RigL_presets(**every, keep_score_f=fisher_saliency, grow_score_f=SampledGradient(3, 'grown'))),
    magnitude=dict(settings=RigL_presets(**every), mask_init='magnitude', sparse_f='erk'), values=dict(settings=SET_presets(**every, grow_init_f=.01)))

later = dict(clipped=dict(settings=RigL_presets(**every, keep_score_f=MagnitudePlusGradient(3.)), clip=.1),
    own_score=dict(settings=RigL_presets(**every, grow_score_f=declares(reads_grad=True)(lambda p: p.grad.abs()*p.grad.abs().sum(1, keepdim=True)))),
    own_share=dict(settings=SET_presets(**every, redistribute_f=lambda p: float(p.abs().max()))),
    own_start=dict(settings=SET_presets(**every, grow_init_f=lambda p: p*0+.01)),
    columns=dict(settings=RigL_presets(**every, structure='input channels'), structure='input channels'))
remember = 'SNFS','groups'  # whose momentum is dense

def shard(m):
    "As FSDP2 is meant to be used: layers, and then the root"
    from torch.distributed.fsdp import fully_shard
    fully_shard(m[0])
    return fully_shard(m)

def started(case, kind, seed=0):
    "Model, what trains it, optimizer and engine; `kind` is one, ddp, before (masks before shards) or after"
    m,how = dense(),{**cases, **more, **later}[case]
    settings = dict(how['settings'])
    masks = not settings.get('sparsity') or isinstance(settings['sparsity'], Schedule)
    if kind=='after': shard(m)
    if masks: sparsify_model(m, how.get('sparsity', .6), how.get('sparse_f', 'uniform'), seed=seed, structure=how.get('structure'),
        mask_init=how.get('mask_init', 'random'))
    if kind=='before': shard(m)
    net = nn.parallel.DistributedDataParallel(m) if kind=='ddp' else m
    opt = opts[how.get('opt', 'sgd')](m.parameters())
    return m,net,opt,DynamicSparseTraining(m, opt, 30, seed=seed, **settings)

def full(t): return (t.full_tensor() if hasattr(t, 'full_tensor') else t).detach().clone()

def steps(m, net, opt, dst, ts, rank=0, world=1, pieces=1, history=False, clip=1.):
    "Train, and show the masks after each step; dead weights and their state are looked at in each rank's own rows"
    seen = []
    for t in ts:
        opt.zero_grad()
        xb,yb = batch(t)
        for i in range(pieces):
            if hasattr(net, 'set_requires_gradient_sync'): net.set_requires_gradient_sync(i==pieces-1)
            at = slice(i*world+rank, None, pieces*world)
            loss = (net(xb[at])-yb[at]).square().sum()/(3*len(xb))*world
            if isinstance(net, nn.parallel.DistributedDataParallel) and i<pieces-1:
                with net.no_sync(): loss.backward()
            else: loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), clip)
        opt.step()
        for o in masked_params(m):
            dead = ~local_part(o.mask)
            held = [(o.p,0.), *((t,1.2e-30) for t in state_tensors(opt, o.p) if not history)]
            for t,most in held: assert not (local_part(t)[dead].abs()>most).any(), o.name
        seen.append([full(o.mask) for o in masked_params(m)])
    return seen

def result(m, opt, dst, seen):
    weights = {k:full(v) for k,v in m.named_parameters()}
    state = dst.state_dict()
    return dict(seen=seen, weights=weights, updates=dst.n_updates, live=[s.live for s in dst.moving], checksums=[o['masked'] for o in state['slots']])

def one_process(case):
    "The run that all others must equal"
    parts,how = started(case, 'one'),{**cases, **more, **later}[case]
    return result(*[parts[i] for i in (0,2,3)], steps(*parts, range(30), pieces=how.get('pieces', 1), history=case in remember, clip=how.get('clip', 1.)))

def assert_same(many, one, what):
    "Equal masks at each step, and weights up to the order of sums"
    for t,(a,b) in enumerate(zip(many['seen'], one['seen'])): assert all(map(torch.equal, a, b)), f'{what}: masks differ at step {t}'
    assert len(many['seen'])==len(one['seen']) and all(many[k]==one[k] for k in ('updates','live','checksums')), what
    assert all(torch.allclose(v, one['weights'][k], atol=1e-9) for k,v in many['weights'].items()), what

def meet(rank, folder, world, jobs):
    "One rank: all jobs, each written to a file; the first that fails ends it"
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=world, timeout=timedelta(seconds=600))
    for name,f,args in jobs:
        torch.manual_seed(1000+rank)  # ranks draw different numbers, and must agree all the same
        torch.save(f(rank, world, *args), f'{folder}/{name}.{rank}.pt')
    dist.destroy_process_group()

def on_ranks(folder, world, jobs):
    "What `f(rank, world, *args)` returned on each of `world` processes, for each job `(name, f, args)`"
    on_processes(meet, str(folder), world, jobs, n=world)
    return {name:[torch.load(folder/f'{name}.{r}.pt', weights_only=False) for r in range(world)] for name,*_ in jobs}

def whole_run(rank, world, case, kind):
    parts,how = started(case, kind),{**cases, **more, **later}[case]
    return result(*[parts[i] for i in (0,2,3)], steps(*parts, range(30), rank, world, how.get('pieces', 1), case in remember, how.get('clip', 1.)))

def whole_runs(pairs): return [(f'{case}-{kind}', whole_run, (case, kind)) for case,kind in pairs]

def compare(got, world, pairs):
    for case,kind in pairs:
        one = one_process(case)
        assert one['updates']>1 or case in ('Static','DSD'), case
        for r in range(world): assert_same(got[f'{case}-{kind}'][r], one, f'{case} {kind} on rank {r} of {world}')

some = ('RigL','ddp'),('RigL','before'),('SET','after'),('inputs','before')
chooses = [(case,'before') for case in later]

@pytest.fixture(scope='module')
def two(tmp_path_factory):
    "What two ranks returned, which start once and do the jobs of all tests below, one after the other"
    own = alone,asked_alone,one_bad_gradient,fsdp1,zeros,any_loop,own_masks,joined
    jobs = [*whole_runs([*some, *chooses]), *((name, chosen, (name,)) for name in ('starts','across')), *((f.__name__, f, ()) for f in own)]
    return on_ranks(tmp_path_factory.mktemp('two'), 2, jobs)

def test_two_ranks_choose_as_one(two):
    "RigL by data parallel and by shards, masks made before and after sharding"
    compare(two, 2, some)

def test_whatever_chooses_shards_choose_as_one_process(two):
    "Scores, shares and starts of one's own, groups that lie on many ranks, and a keep score that reads clipped gradients"
    compare(two, 2, chooses)

@pytest.mark.full
@pytest.mark.parametrize('world', [2,4])
def test_data_parallel_with_every_preset(tmp_path, world):
    "Equal masks on all ranks, and those of one process with the joined batch, with a smaller last batch"
    pairs = [(c,'ddp') for c in (*cases, *more)]
    compare(on_ranks(tmp_path, world, whole_runs(pairs)), world, pairs)

@pytest.mark.full
@pytest.mark.parametrize('world', [2,4])
@pytest.mark.parametrize('kind', ['before','after'])
def test_shards_with_every_preset(tmp_path, world, kind):
    "The same with FSDP2, where ranks may own fewer rows, or none"
    pairs = [(c,kind) for c in (*cases, *more)]
    compare(on_ranks(tmp_path, world, whole_runs(pairs)), world, pairs)

# --- masks that are chosen at the start

structures = 'unstructured', '2:4', '2:4 flat', '2:5 pad', 'block 2x1 max', 'fan-in', 'fan-in ablate 0.3', 'kernels', 'output channels'
ways = [*[dict(structure=o, **(dict(sparsity=.6) if o=='2:5 pad' else {})) for o in structures], *[dict(sparse_f=o) for o in ('erk','global',first_layer_dense_uniform)]]
starts = [dict(o, mask_init=i) for o in ways for i in ('random','magnitude')]
across = [dict(structure=o, mask_init='magnitude') for o in ('block 4x2','2:4 axis 0','output groups 4','input channels','input groups 2','block 4x3 pad')]
across += [dict(mask_init=lambda p: p.abs()/p.abs().sum(0, keepdim=True)), dict(mask_init='checkerboard'),
    dict(sparse_f=lambda ps, s: [float(p.abs().max()) and s for p in ps])]

def chosen(rank, world, ways, sharded=True):
    "The masks of each way to choose, or its error"
    out = []
    for kwargs in globals()[ways]:
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(16,16), nn.Tanh(), nn.Linear(16,12)) if kwargs.get('structure')!='kernels' else nn.Sequential(nn.Conv2d(8,16,3), nn.Tanh(),
            nn.Conv2d(16,12,1))
        if sharded: shard(m)
        try:
            sparsify_model(m, **{'sparsity':.5, **kwargs}, seed=1)
            out.append([full(o.mask) for o in masked_params(m)])
        except Exception as e: out.append(f'{type(e).__name__}: {e}')
    return out

def check_chosen(got):
    for name in ('starts','across'):
        one = chosen(0, 1, name, False)
        for masks in got[name]:
            for how,a,b in zip(globals()[name], one, masks): assert not isinstance(a, str) and agree(a, b), (how,
                a if isinstance(a, str) else b if isinstance(b, str) else '')

def test_masks_of_shards_are_those_of_one_process(two):
    "Every structure, start and share, also where groups lie on many ranks"
    check_chosen(two)

def test_masks_where_ranks_have_fewer_rows(tmp_path): check_chosen(on_ranks(tmp_path, 3, [(name, chosen, (name,)) for name in ('starts','across')]))

# --- checkpoints, optimizers and enforcement

def saved(rank, world, case, kind, folder, ts):
    "Train and save with torch.distributed.checkpoint, or plainly where each rank has all"
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    m,net,opt,dst = started(case, kind)
    steps(m, net, opt, dst, ts, rank, world)
    model,optim = get_state_dict(m, opt)
    dcp.save(dict(model=model, optim=optim, engine=dst.state_dict()), checkpoint_id=folder)

def resumed(rank, world, case, kind, folder, ts):
    "Go on, on other ranks; their seeds and weights differ before the load"
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict,set_state_dict
    m,net,opt,dst = started(case, kind, seed=5)
    model,optim = get_state_dict(m, opt)
    state = dict(model=model, optim=optim, engine=dst.state_dict())
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(m, opt, model_state_dict=state['model'], optim_state_dict=state['optim'])
    dst.load_state_dict(state['engine'])
    return result(m, opt, dst, steps(m, net, opt, dst, ts, rank, world))

def check_resume(tmp_path, case, ways):
    one = one_process(case)
    one['seen'] = one['seen'][14:]
    for (kind,world),(then,others) in ways:
        folder = tmp_path/f'{kind}{world}{then}{others}'
        folder.mkdir()
        for name,f,ts,n,how in (('a', saved, range(14), world, kind), ('b', resumed, range(14, 30), others, then)):
            (folder/name).mkdir()
            got = on_ranks(folder/name, n, [(case, f, (case, how, str(folder/'run'), ts))])
        for r in range(others): assert_same(got[case][r], one, f'{case}: {kind} on {world}, then {then} on {others}')

@pytest.mark.full
def test_resume_on_another_number_of_ranks(tmp_path):
    "torch.distributed.checkpoint, shards of another size, and from one way of training to the other: the run that was never stopped"
    check_resume(tmp_path, 'RigL', [(('before',2),('after',3)), (('ddp',2),('before',4)), (('before',4),('ddp',1))])

@pytest.mark.full
def test_resume_with_collected_gradients(tmp_path):
    "What a score has collected is sharded too"
    check_resume(tmp_path, 'fisher', [(('before',2),('before',4))])

def asked_alone(rank, world):
    "The engine's state before, between and after updates, taken on the first rank only and then on all"
    parts,alone = started('RigL', 'before'),[]
    for ts in (range(2), range(2, 9)):
        steps(*parts, ts, rank, world)
        if rank==0: alone.append(parts[3].state_dict())
    return dict(alone=alone[-1:] or None, all=parts[3].state_dict())

def test_engine_state_on_one_rank_only(two):
    "It doesn't wait for the others, and is what all would have saved"
    first,second = two['asked_alone']
    assert first['alone']==[first['all']]==[second['all']] and first['all']['n_updates']==2

def one_bad_gradient(rank, world):
    "RigL on shards, with a gradient that isn't finite on the last rank in the step of an update"
    m,net,opt,dst = started('RigL', 'before')
    for t in range(5):
        opt.zero_grad()
        net(batch(t)[0]).square().sum().backward()
        if t==4 and rank==world-1: local_part(m[0].weight.grad)[local_part(m[0].weight_mask)] = float('nan')
        opt.step()
    return dict(updates=dst.n_updates, masks=[full(o.mask) for o in masked_params(m)], before=[full(o.mask) for o in masked_params(started('RigL', 'before')[0])])

def test_a_gradient_that_is_not_finite_on_one_rank(two):
    "No rank changes its masks, which stay alike"
    found = two['one_bad_gradient']
    assert all(o['updates']==0 and all(map(torch.equal, o['masks'], o['before'])) for o in found)

def zeros(rank, world):
    "RigL with an optimizer whose state is shared out: what belongs to dead weights"
    from torch.distributed.optim import ZeroRedundancyOptimizer
    m = dense()
    sparsify_model(m, .6, seed=0)
    net = nn.parallel.DistributedDataParallel(m)
    opt = ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=.02)
    dst = DynamicSparseTraining(m, opt, 30, seed=0, **RigL_presets(batches_per_update=4))
    seen = steps(m, net, opt, dst, range(30), rank, world)
    left = [t[~o.mask] for o in masked_params(m) for t in opt.optim.state.get(o.p, {}).values() if t.shape==o.p.shape]
    return dict(result(m, opt, dst, seen), left=[bool((t.abs()>1.2e-30).any()) for t in left])

def any_loop(rank, world):
    "Static masks without an engine: gradients, norms and weights, whoever wrote to them, from the first step"
    m = dense()
    sparsify_model(m, .6, seed=0)
    shard(m)
    xb,yb = batch(0)
    m(xb).square().mean().backward()
    first = [bool(local_part(o.p.grad)[~local_part(o.mask)].any()) for o in masked_params(m)]
    opt = torch.optim.AdamW(m.parameters(), lr=.1)
    opt.step()
    with torch.no_grad():
        for p in m.parameters(): p.fill_(1.)
    with torch.no_grad(): y = m(xb)
    plain = dense()
    sparsify_model(plain, .6, seed=0)
    with torch.no_grad():
        for p in plain.parameters(): p.fill_(1.)
        return dict(first=first, same=torch.allclose(y, plain(xb)), summary=sparse_summary(m).df['live'].tolist(),
            whole=sparse_summary(plain).df['live'].tolist())

def own_masks(rank, world):
    "Masks that each rank drew by itself, before data parallel training began"
    m = dense()
    sparsify_model(m, .6, seed=rank)
    before = [o.mask.clone() for o in masked_params(m)]
    net = nn.parallel.DistributedDataParallel(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = DynamicSparseTraining(net, opt, 30, seed=0, **RigL_presets(batches_per_update=4))
    began = [o.mask.clone() for o in masked_params(m)]
    return dict(before=before, began=began, seen=steps(m, net, opt, dst, range(9), rank, world), weights=[full(p) for p in m.parameters()])

def alone(rank, world):
    "Masks that each rank drew by itself, and no engine; evaluation on one rank waits for nobody"
    m = dense()
    sparsify_model(m, .6, seed=rank)
    net = nn.parallel.DistributedDataParallel(m)
    if rank==0:
        with torch.no_grad(): net.eval()(batch(0)[0]), net.train()
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    for t in range(3):
        opt.zero_grad()
        net(batch(t)[0][rank::world]).square().mean().backward()
        opt.step()
    return [*(o.mask.clone() for o in masked_params(m)), *(full(p) for p in m.parameters())]

def joined(rank, world):
    "Uneven batches inside torch's `Join`: masks that rest are right, an engine is refused"
    from torch.distributed.algorithms.join import Join
    m = dense()
    sparsify_model(m, .6, seed=0)
    masks = [o.mask.clone() for o in masked_params(m)]
    net = nn.parallel.DistributedDataParallel(m)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    def fit(n, **kwargs):
        with Join([net], **kwargs):
            for t in range(n):
                opt.zero_grad()
                net(batch(t)[0]).square().mean().backward()
                opt.step()
    fit(2+2*rank)
    m(batch(0)[0])
    weights = [full(p) for p in m.parameters()]
    assert all(torch.equal(o.mask, k) and not o.p[~k].any() for o,k in zip(masked_params(m), masks))
    dst = DynamicSparseTraining(net, opt, 30, seed=0, **SET_presets(batches_per_update=2))
    with pytest.raises(ValueError, match="inside Join.*as many batches"): fit(4)
    assert all(map(torch.equal, weights, m.parameters())) and dst.t==0
    with pytest.raises(RuntimeError, match='exhausted'): fit(4+rank, throw_on_early_termination=True)  # all ranks end at once
    return [*(o.mask.clone() for o in masked_params(m)), *weights]

def fsdp1(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel
    m = dense()
    sparsify_model(m, .5, seed=0)
    with pytest.raises(ValueError, match='FullyShardedDataParallel'): FullyShardedDataParallel(m, device_id=torch.device('cpu'))(batch(0)[0])

def test_other_things_on_two_ranks(two):
    "ZeroRedundancyOptimizer, enforcement without an engine, masks that differed before, uneven batches, and FSDP's first version, which is refused by name"
    for k in ('alone','joined'): assert all(map(torch.equal, *two[k])), f'ranks differ: {k}'
    a,b = two['own_masks']
    assert not all(map(torch.equal, a['before'], b['before'])) and all(map(torch.equal, a['before'], b['began'])), 'rank 0 decides'
    for x,y in zip([a['weights'],*a['seen']], [b['weights'],*b['seen']]): assert all(map(torch.equal, x, y))
    a,b = two['zeros']
    assert a['left'] and b['left'] and not any(a['left']+b['left'])
    for x,y in zip(a['seen'], b['seen']): assert all(map(torch.equal, x, y))
    for o in two['any_loop']: assert o['same'] and not any(o['first']) and o["summary"]==o["whole"]

# --- scripts

def script(*cmd, timeout=500):
    res = subprocess.run([*cmd], capture_output=True, text=True, timeout=timeout, cwd=root,
        env={**os.environ, 'PYTHONPATH':str(root), 'OMP_NUM_THREADS':'1', 'PYTHONWARNINGS':'ignore'})
    assert not res.returncode, res.stderr
    return [l for l in res.stdout.splitlines() if 'masks' in l]

launchers = dict(torchrun=[sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2'], accelerate=[sys.executable, '-m',
    'accelerate.commands.launch', '--multi_gpu', '--num_processes', '2', '--num_machines', '1', '--mixed_precision', 'no', '--dynamo_backend', 'no'])

@pytest.mark.full
@pytest.mark.parametrize('launcher', launchers)
def test_the_example_runs(launcher, tmp_path):
    "By torchrun and by accelerate, both ways, and on from a checkpoint: the same masks"
    pytest.importorskip('accelerate')
    def run(*args): return script(*launchers[launcher], 'examples/train_distributed.py', *args)
    ddp,fsdp2 = run(),run('--how', 'fsdp2')
    run('--how', 'fsdp2', '--folder', str(tmp_path/'run'), '--stop', '55')
    later = run('--how', 'fsdp2', '--folder', str(tmp_path/'run'))
    sums = [o[0].partition('masks')[2] for o in (ddp,fsdp2,later)]
    assert len(ddp)==len(fsdp2)==1 and sums[0] and len(set(sums))==1

fit_code = '''
import sys,torch,zlib
from fastai.basics import *
from fastai.distributed import *
from fastsparse.all import *
if not torch.cuda.is_available(): torch.Tensor.cuda = lambda t: t  # fastai's loader broadcasts its indices by the GPU
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8,32), nn.ReLU(), nn.Linear(32,4))
x = torch.randn(100,8, generator=torch.Generator().manual_seed(1))
data = [(a, int(a[:4].argmax())) for a in x]
dls = DataLoaders.from_dsets(data, data, bs=16, num_workers=0, device='cpu')
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=SGD)
torch.manual_seed(100+int(os.environ['RANK']))
sparsify_model(learn, .8)
cb = DynamicSparseTrainingCallback(method='rigl', batches_per_update=3)
with learn.distrib_ctx(cpu=True, sync_bn=False), learn.no_bar(), learn.no_logging(): learn.fit(3, cbs=cb)
found = [zlib.crc32(m.numpy().tobytes()) for _,m,_ in sparse_params(model)],cb.state['n_updates'],float(sum(p.abs().sum() for p in model.parameters()))
(Path(__file__).parent/f"rank{os.environ['RANK']}").write_text(str(found))
'''

@pytest.mark.full
def test_distrib_ctx(tmp_path):
    "fastai's `distrib_ctx` on two ranks whose generators differ: equal masks and weights after a fit"
    pytest.importorskip('accelerate')
    (tmp_path/'fit.py').write_text(fit_code)
    script(*launchers['torchrun'], str(tmp_path/'fit.py'))
    first,second = [(tmp_path/f'rank{i}').read_text() for i in (0,1)]
    assert first==second and eval(first)[1]>1, (first,second)
