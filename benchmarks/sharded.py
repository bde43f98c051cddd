"""Training of 100 million weights over ranks: memory and time

    python benchmarks/sharded.py            # 1, 2 and 4 ranks, into results/sharded.json
    python benchmarks/sharded.py 1024       # the same with layers of 1024x1024, a quarter of the weights
"""
import json,os,subprocess,sys,tempfile,time,torch,torch.distributed as dist
from pathlib import Path
from torch import nn

here = Path(__file__).parent
n_layers,every,n_steps = 24,3,7
side = int(os.environ.get('SIDE', 2048))

def peak():
    "The high-water mark of this process in bytes"
    return next(int(l.split()[1])*1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))

def rank(i, world, folder):
    "One rank; alone it trains an ordinary model"
    from fastsparse.masks.selection import local_part
    from fastsparse.train.presets import RigL_presets
    from fastsparse.model.sparsify import sparsify_model
    from fastsparse.train.loop import DynamicSparseTraining
    from torch.distributed.fsdp import fully_shard
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=i, world_size=world)
    start = peak()
    with torch.device('meta'): model = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(n_layers)])
    if world>1:
        for layer in model: fully_shard(layer)
        fully_shard(model)
    model.to_empty(device='cpu')
    for p in model.parameters(): local_part(p.detach()).normal_(0, (10/side)**.5)
    sparsify_model(model, .9, 'uniform', seed=0, sparse_init_mode=None)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=.9)
    dst = DynamicSparseTraining(model, opt, n_steps, seed=0, **RigL_presets(stop_pct=1., batches_per_update=every))
    times = []
    for t in range(n_steps):
        x = torch.randn(8, side, generator=torch.Generator().manual_seed(t))[i::world]
        t0 = time.perf_counter()
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        times.append(time.perf_counter()-t0)
    updates = [t for t in range(n_steps) if t and t%every==0]
    plain = [s for t,s in enumerate(times) if t>1 and t not in updates]
    res = dict(ranks=world, peak=peak(), above_start=peak()-start, updates=dst.n_updates,
        step=sorted(plain)[len(plain)//2], update=sum(times[t] for t in updates)/len(updates), cpu=time.process_time())
    Path(folder, f'{i}.json').write_text(json.dumps(res))
    dist.destroy_process_group()

def measured(world):
    "The ranks' largest values"
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, 'OMP_NUM_THREADS':'1', 'MALLOC_MMAP_THRESHOLD_':'65536', 'MALLOC_TRIM_THRESHOLD_':'65536'}
        ps = [subprocess.Popen([sys.executable, __file__, str(i), str(world), folder], env=env) for i in range(world)]
        if any([p.wait() for p in ps]): raise SystemExit(f'a rank of {world} failed')
        found = [json.loads(Path(folder, f'{i}.json').read_text()) for i in range(world)]
    return {k:max(o[k] for o in found) for k in found[0]}

if __name__=='__main__':
    if len(sys.argv)>3: rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        if len(sys.argv)>1: os.environ['SIDE'] = sys.argv[1]
        side,rows = int(os.environ.get('SIDE', 2048)),[]
        for n in (1,2,4):
            r = measured(n)
            rows.append(r)
            (here/'results'/'sharded.json').write_text(json.dumps(dict(weights=n_layers*side**2, note='two cores, gloo; other work was running, so times are rough', rows=rows), indent=1)+'\n')
            print(r, f"{r['above_start']/rows[0]['above_start']:.3f} of one process above its start, {r['peak']/rows[0]['peak']:.3f} in all", flush=True)
