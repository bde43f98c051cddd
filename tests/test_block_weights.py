"Live weights of blocks train the masked network; where Triton interprets its kernels, in a process of its own, the CPU counts as a card"
import copy,json,os,pickle,pytest,subprocess,sys,torch,traceback,warnings
from fastsparse.all import *
from fastsparse.kernels import blocks as kernels
from fastsparse.kernels.blocks import BlockIndex
from fastsparse.kernels.ops import SparseIndex
from fastsparse.live.compute import live_weights
from fastsparse.weights.find import masked_params
from fastsparse.train.growth import initial_value
from fastsparse.live.tensor import block_of,Cell,LiveTensor
from functools import partial
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

n_steps,plan = 9,{'0.weight':'rows', '2.weight':'rows'}

def start(live, method='rigl', opt='adam', seed=0, n=n_steps, **kwargs):
    "Model, optimizer and engine; two layers have blocks of 16"
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(32,64), nn.ReLU(), nn.Linear(64,32), nn.ReLU(), nn.Linear(32,10))
    sparsify_model(m, .5, seed=seed, structure='block 16x16', exclude='4.weight')
    opt = torch.optim.AdamW(m.parameters(), 1e-2) if opt=='adam' else torch.optim.SGD(m.parameters(), .05, momentum=.9)
    method = dict(method=method, structure='block 16x16', batches_per_update=2)|(dict(sparsity=.8) if method=='gmp' else dict(initial_drop_grow_pct=.9) if method!='static' else {})
    return m,opt,DynamicSparseTraining(m, opt, n, seed=0, sparse_compute=plan if live else False, **method|kwargs)

def go(run, first=0, last=n_steps-1, f=None, between=lambda m: None):
    "Steps `first` to `last`; weights are live until the very last one of a run"
    m,opt,_ = run
    for t in range(first, last):
        g = torch.Generator().manual_seed(t)
        x,y = torch.randn(8, 32, generator=g),torch.randint(10, (8,), generator=g)
        x,y = [o.to(m[0].weight.device) for o in (x, y)]
        F.cross_entropy((f or m)(x), y).backward()
        between(m)
        opt.step()
        opt.zero_grad()
    return run

def indices(m): return [type(o.store.index) for o in live_weights(m)]
def state(run): return [*run[0].state_dict().values(), *(v for s in run[1].state_dict()['state'].values() for v in s.values() if isinstance(v, torch.Tensor))]

def same(a, b, exact=False):
    assert a[2].n_updates==b[2].n_updates
    for u,v in zip(state(a), state(b), strict=True):
        u,v = u+0,v+0  # plain ones
        assert u.shape==v.shape and (u.equal(v) if exact or u.dtype==torch.bool else torch.allclose(u, v, rtol=1e-4, atol=1e-6))

# --- in a process of its own

def trains_as_masked(method, opt):
    a,b = go(start(False, method, opt)),start(True, method, opt)
    assert indices(b[0])==[BlockIndex]*2
    go(b)
    assert indices(b[0])==[BlockIndex]*2 and bool(b[2].n_updates)==(method!='static')
    same(a, b)
    same(go(a, n_steps-1, n_steps), go(b, n_steps-1, n_steps))
    assert not live_weights(b[0])

def clips():
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), .1)
    same(go(start(False), between=clip), go(start(True), between=clip))

def averages():
    "An average of weights is dense, and that of the masked run"
    def ends(live):
        run = start(live)
        ema = torch.optim.swa_utils.AveragedModel(run[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(.5))
        go(run, between=ema.update_parameters)
        return ema.module.state_dict().values()
    assert all(torch.allclose(u.float(), v.float(), atol=1e-6) for u,v in zip(ends(False), ends(True)))

def resumes(folder, last=5):
    "Bit for bit, from a file, in the middle of a step's gradient too; in the end the file of a masked run"
    whole,again = go(start(True), 0, last),start(True, seed=1)
    save_run(f'{folder}/run', *whole)
    load_run(f'{folder}/run', *again)
    assert indices(again[0])==[BlockIndex]*2
    same(go(whole, last), go(again, last), exact=True)

def copies():
    "A copy and a pickle of a run make its steps"
    whole = go(start(True), 0, 4)
    for copied in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert indices(copied[0])==[BlockIndex]*2
        same(go(copied, 4), go(copy.deepcopy(whole), 4), exact=True)

def moves_between():
    "Doubles have no kernel for blocks: the same weights are stored by rows, with their gradient, and by blocks again"
    m,opt,_ = go(start(True), 0, 4)
    before = copy.deepcopy(m.state_dict())
    m(torch.ones(2, 32)).sum().backward()
    grad = m[0].weight.grad+0
    m.double()
    m(torch.ones(2, 32).double()).sum().backward()
    assert indices(m)==[SparseIndex]*2 and torch.allclose(m[0].weight.grad+0, 2*grad.double())
    m.float()
    assert indices(m)==[BlockIndex]*2 and torch.allclose(m[0].weight.grad+0, 2*grad)
    assert all((u+0).equal(v) for u,v in zip(m.state_dict().values(), before.values()))

def breaks_into_rows():
    "A mask written by hand that is no longer one of blocks"
    (m,opt,_),(masked,*_) = start(True, 'static'),start(False, 'static')
    for o in (m, masked): o[0].weight_mask[0] = True
    x = torch.randn(4, 32)
    assert torch.allclose(m(x), masked(x), atol=1e-6) and set(indices(m))=={SparseIndex,BlockIndex}

def reads_values():
    "What scores read of a weight: values and gradients at places, rows after rows"
    m,opt,dst = start(True)
    dst.prepare(0, update=True)
    m(torch.randn(8, 32)).square().mean().backward()
    o = live_weights(m)[0]
    w,g,places = o.read(),o.store.read_grad(),torch.tensor([0, 5, 700, 2047])
    assert g[~o.mask].any() and torch.allclose(o.store.read_grad(places), g.view(-1)[places], atol=1e-7)
    assert o.read(places).equal(w.view(-1)[places])
    pieces = [*o.store.pieces(600, True)]
    assert torch.cat([p for _,p in pieces]).equal(w.view(-1)) and torch.allclose(torch.cat([p.grad for _,p in pieces]), g.view(-1), atol=1e-7)
    file = o.store.state()
    assert file['grad'].equal(o.p.grad.cell.dense()[o.mask])
    o.store.load(file)
    assert torch.allclose(o.store.read_grad(), g, atol=1e-7)

def starts_at_values(): same(*[go(start(live, grow_init_f=initial_value)) for live in (False,True)])

def differentiates():
    "Gradients of gradients, one gradient alone, and a forward that is made again"
    from torch.utils.checkpoint import checkpoint
    (m,*_),(masked,*_),x = start(True, 'static'),start(False, 'static'),torch.randn(4, 32)
    def recomputed(n):
        checkpoint(n, x, use_reentrant=False).square().mean().backward()
        return n[0].weight.grad
    for f in (lambda n: torch.autograd.grad(n(x).square().mean(), n[0].weight)[0],
        lambda n: torch.autograd.grad(torch.autograd.grad(n(x).square().mean(), n[0].weight, create_graph=True)[0].square().sum(), n[2].weight)[0],
        recomputed):
        a,b = [f(n)+0 for n in (m, masked)]
        assert torch.allclose(a[m[0].weight_mask] if a.shape==m[0].weight.shape else a[m[2].weight_mask],
            b[m[0].weight_mask] if a.shape==m[0].weight.shape else b[m[2].weight_mask], atol=1e-6)

def compiles(backend):
    "In one graph, batches of updates and frozen weights too; a run compiles for them once, and not again for other masks"
    torch._dynamo.reset()
    run = start(True, 'static')
    same(go(start(False, 'static')), go(run, f=torch.compile(run[0], backend=backend, fullgraph=True)))
    run = start(True)
    torch._dynamo.reset()
    n_graphs = counters['stats']['unique_graphs']
    same(go(start(False)), go(run, f=torch.compile(run[0], backend=backend, fullgraph=True)))
    assert counters['stats']['unique_graphs']-n_graphs<=4 and run[2].n_updates>1
    run[0][0].weight.requires_grad_(False)
    torch.compile(run[0], backend=backend, fullgraph=True)(torch.ones(2, 32)).sum().backward()
    assert run[0][0].weight.grad is None and run[0][2].weight.grad is not None

def convolves():
    "A convolution of one pixel, with a stride and in either memory format; a larger one stays masked and says why"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(32,48,1,stride=2), nn.ReLU(), nn.Conv2d(48,32,3))
    sparsify_model(m, .5, seed=0, structure='block 16x16')
    masked = copy.deepcopy(m)
    report = sparse_compute(m, None, plan={'0.weight':'rows'})
    assert indices(m)==[BlockIndex] and 'CPU' in report.notes.get('2.weight', 'CPU')
    for kind in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 32, 9, 9).to(memory_format=kind)
        for n in (m, masked):
            n.zero_grad()
            n(x).square().mean().backward()
        assert m[0](x).is_contiguous(memory_format=kind)
        assert torch.allclose(m(x), masked(x), atol=1e-5) and torch.allclose(m[0].weight.grad+0, masked[0].weight.grad*m[0].weight_mask, atol=1e-6)

def autocasts():
    m,opt,_ = start(True, 'static')
    with torch.autocast('cpu', torch.bfloat16): y = m(torch.randn(4, 32))
    y.float().sum().backward()
    assert y.dtype==torch.bfloat16 and m[0].weight.grad.dtype==torch.float

def follows_the_rule(how):
    "From the second step on, in a loop, a fit or compiled code; too few rows, an unmeasured type, or no blocks stay masked, and the summary says why"
    import fastsparse.card.blocks as card
    def made(structure='block 64x64', rows=0, way=None, sparsity=.75):
        card.measured_rows = rows
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(256,128), nn.ReLU(), nn.Linear(128,10))
        sparsify_model(m, sparsity, seed=0, structure=structure, exclude='2.weight')
        return m,(opt := torch.optim.SGD(m.parameters(), .1)),DynamicSparseTraining(m, opt, 9, method='static', sparse_compute=way)
    def trained(m, opt, dst, n=3, f=None, kind=torch.half):
        for t in range(n):
            with torch.autocast('cpu', kind, enabled=kind!=torch.float): y = (f or m)(torch.ones(16, 256))
            y.float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        return dst.live.report.plan if dst.live.report else dst.live.why_masked,indices(m),sparse_summary(m).df.note[0]
    if how=='compiled':
        torch._dynamo.reset()
        m,opt,dst = made()
        plan,stored,_ = trained(m, opt, dst, f=torch.compile(m, backend='eager', fullgraph=True))
        assert stored==[BlockIndex] and plan=={'0.weight':'rows'}, plan
        return
    plan,stored,note = trained(*made())
    assert stored==[BlockIndex] and plan=={'0.weight':'rows'} and 'live' in note, note
    for how,kind,why in ((dict(rows=2**36), torch.half, '16 rows'), ({}, torch.float, 'float32'), (dict(structure=None), torch.half, 'no blocks'),
        (dict(sparsity=.5), torch.half, 'masked is about as fast')):
        plan,stored,note = trained(*made(**how), kind=kind)
        assert plan=={'0.weight':'dense'} and not stored and why in note, (plan, note, why)

def one_of_two(rank, folder):
    "A rank of a data parallel run, masked and live; what it sends"
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/init', rank=rank, world_size=2)
    sent,reduce,found = [],dist.all_reduce,{}
    def noted(t, *args, **kwargs):
        sent.append(t.numel())
        return reduce(t, *args, **kwargs)
    dist.all_reduce = noted
    for live in (False,True):
        run = m,opt,_ = start(live)
        ddp = nn.parallel.DistributedDataParallel(m)
        kinds = indices(m)
        def own(x): return ddp(x+rank)
        go(run, 0, 2, f=own)
        n,stored = sum(sent),sum(o.p.cell.values.numel() if live else o.p.numel() for o in masked_params(m))
        sent.clear()
        go(run, 2, f=own)
        found[live] = state(run),run[2].n_updates,kinds,n,2*(stored+sum(p.numel() for k,p in m.named_parameters() if k not in plan))
        sent.clear()
    torch.save({k:([t+0 for t in ts], *rest) for k,(ts,*rest) in found.items()}, f'{folder}/{rank}.pt')
    dist.destroy_process_group()

def averages_over_ranks(folder):
    "The masked run's weights and masks on both ranks, of which each step sends the gradients of live weights alone"
    torch.multiprocessing.start_processes(one_of_two, (folder,), nprocs=2, start_method='fork')
    for rank in range(2):
        found = torch.load(f'{folder}/{rank}.pt', weights_only=False)
        (a,n,*_),(b,m,kinds,sent,stored) = found[False],found[True]
        assert n==m>0 and kinds==[BlockIndex]*2 and sent==stored, (n, m, kinds, sent, stored)
        assert all(u.equal(v) if u.dtype==torch.bool else torch.allclose(u, v, rtol=1e-4, atol=1e-6) for u,v in zip(a, b, strict=True))

cases = {f'{method}-{opt}':partial(trains_as_masked, method, opt) for method in ('static','set','rigl','gmp','auto') for opt in ('sgd','adam')}
more = clips,averages,copies,moves_between,breaks_into_rows,reads_values,starts_at_values,differentiates,convolves,autocasts
cases |= {f.__name__:f for f in more}
cases |= {'compiles-eager':partial(compiles, 'eager'), 'compiles-aot':partial(compiles, 'aot_eager')}
cases |= {f'rule-{how}':partial(follows_the_rule, how) for how in ('plain','compiled')}

def by_the_kernels(by_kernels):
    was,kernels._by_kernels = kernels._by_kernels,by_kernels
    trains_as_masked('rigl', 'adam')
    kernels._by_kernels = was

with_folder = averages_over_ranks,resumes  # which forks, and so comes before every backward

def run_all(folder):
    "Run all cases, and leave what became of them, and a run's file, in `folder`; kernels compute in one of them, and torch in the rest"
    warnings.simplefilter('ignore')
    found = {}
    by_kernels,kernels._by_kernels = kernels._by_kernels,lambda *args: False
    cases['rigl-adam'] = partial(by_the_kernels, by_kernels)
    for name,f in {**{f.__name__:partial(f, folder) for f in with_folder}, **cases}.items():
        try: found[name] = f() or ''
        except BaseException: found[name] = traceback.format_exc()
    Path(folder, 'found.json').write_text(json.dumps(found))

if __name__=='__main__': run_all(sys.argv[1])

# --- in this one

@pytest.fixture(scope='module')
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp('blocks')
    env = dict(os.environ, TRITON_INTERPRET='1')  # which Triton reads when it is loaded, so no fork will do
    res = subprocess.run([sys.executable, __file__, folder], env=env, capture_output=True, text=True, timeout=1800)
    assert not res.returncode, res.stderr[-3000:]
    return folder,json.loads((folder/'found.json').read_text())

@pytest.mark.parametrize('case', [*cases,*(f.__name__ for f in with_folder)])
def test_blocks_where_kernels_are_interpreted(case, found):
    "A line for each case, which the process of its own has run"
    assert not found[1][case], found[1][case]

def test_a_run_goes_on_by_rows_where_there_is_no_card(found):
    "Its file is read here, and ends as the masked run does"
    run = start(True, seed=1)
    load_run(found[0]/'run', *run)
    assert indices(run[0])==[SparseIndex]*2
    same(go(run, 5), go(start(False)))

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('method', ['static','set','rigl','gmp','auto'])
def test_a_run_on_a_card_is_the_masked_one(method):
    "By blocks there, by rows on the processor, and there again"
    a,b = start(False, method, 'sgd'),start(True, method, 'sgd')
    for run in (a, b): run[0].cuda()
    assert indices(b[0])==[BlockIndex]*2
    same(go(a), go(b))
    assert indices(b[0].cpu())==[SparseIndex]*2 and indices(b[0].cuda())==[BlockIndex]*2

def test_the_block_is_the_largest_that_the_mask_allows():
    "By hand: two rows of blocks, of which one is full"
    mask = torch.tensor([[1,0,1,1],[1,1,1,1]]).bool()
    whole = mask.repeat_interleave(96, 0).repeat_interleave(48, 1)
    assert block_of(whole)==((32,16), 7*96*48) and block_of(torch.ones(256, 64).bool())==((128,64), 256*64)
    whole[5,5] = False
    assert block_of(whole)==(None, 7*96*48-1)

@pytest.mark.parametrize('way', ['once','gradual'])
def test_what_blocks_dont_divide_stays_dense(way):
    "By name, in one warning, for a model that is made sparse now or on the way; where nothing fits, the call is refused"
    m = nn.Sequential(nn.Linear(32,32), nn.ReLU(), nn.Linear(32,10))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        if way=='once': sparsify_model(m, .5, structure='block 16x16', seed=0)
        else: DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), .1), 100, method='gmp', sparsity=.5, structure='block 16x16')
    assert [str(o.message).partition(':')[0] for o in told if 'divide' in str(o.message)]==["blocks of 16x16 don't divide the shape of 2.weight"]
    assert [n for n,_ in m.named_buffers()]==['0.weight_mask','0.weight_sparsity']
    with pytest.raises(ValueError, match='16 divides'): sparsify_model(nn.Linear(32,10), .5, structure='block 16x16')

def test_rows_and_blocks_hold_the_same():
    "A dense tensor, places, bands, and values in the order of places"
    mask = (torch.arange(8).view(2, 4)%3>0).repeat_interleave(16, 0).repeat_interleave(32, 1)
    w = torch.randn(mask.shape)*mask
    rows,blocks = SparseIndex(mask),BlockIndex(mask, (16,32))
    for index in (rows, blocks):
        values = index.take(w).reshape(-1)
        assert index.dense(values).equal(w) and w.view(-1)[index.places].equal(values) and len(index)==mask.sum()
        assert values[index.find(rows.places)].equal(rows.take(w)) and index.by_row(values).equal(w[mask])
        assert index.from_rows(index.by_row(values)).equal(values)
        for a,z,part in index.bands(2*w.shape[1]*16//2): assert index.places[part].div(w.shape[1], rounding_mode='floor').unique().tolist()==[*range(a, z)]
        gT,xT = torch.randn(32, 5),torch.randn(128, 5)
        assert torch.allclose(index.sampled(gT, xT), index.take(gT@xT.t()).reshape(-1), atol=1e-5)
        cell = Cell(values, index, w.shape, fill=.5)
        assert cell.dense().equal(torch.where(mask, w, .5)) and cell.mask().equal(mask)
        assert LiveTensor(Cell(values, index, w.shape)).square().sum().allclose(w.square().sum())
