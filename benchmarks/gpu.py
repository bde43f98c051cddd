"What sparse training costs on a CUDA device, and what 2:4 gives there: `python benchmarks/gpu.py [--device cpu]`; `make gpu` tests first"
import argparse,json,statistics,time,torch
from copy import deepcopy
from costs import amortised,every,rigl,sgd,sparsity,stepper,stepper_at
from fastsparse.all import *
from measure import machine,ratios,spread
from models import make,titles
from pathlib import Path
from torch import nn

def seconds(f, n, device):
    "Wall time of a call of `f`, of `n` in a row, with the device's work done"
    wait = torch.cuda.synchronize if device=='cuda' else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(n): f()
    wait()
    return (time.perf_counter()-start)/n

def interleaved(arms, rounds, n, device):
    "The same of each of `arms`, functions by name, one after the other in each round"
    for f in arms.values(): seconds(f, 2, device)
    times = {k:[] for k in arms}
    for i in range(rounds):
        for k in list(arms)[::1 if i%2 else -1]: times[k].append(seconds(arms[k], n, device))
    return times

def placed(name, device):
    model,*xy = make[name]()
    return model.to(device),*[t.to(device) for t in xy]

def training_step(name, device, rounds=9, n=20):
    "A step between updates, a step with one, and all steps, against dense"
    torch.manual_seed(0)
    model,xb,yb = placed(name, device)
    dense = stepper(again := deepcopy(model), sgd(again), xb, yb)
    sparsify_model(model, sparsity, erdos_renyi_sparsity, seed=0)
    opt = sgd(model)
    at = stepper_at(rigl(model, opt), stepper(model, opt, xb, yb))
    times = interleaved(dict(dense=dense, step=lambda: at(1)), rounds, n, device)
    update = [seconds(lambda: at(every), 1, device) for _ in range(7)][2:]
    upd = statistics.median(update)
    return dict(dense_ms=1e3*statistics.median(times['dense']), update_ms=1e3*upd, step=spread(ratios(times['step'], times['dense'])),
        amortised=spread([amortised(s, upd)/d for s,d in zip(times['step'], times['dense'])]))

def captured(f, n=10):
    "`n` calls of `f` as a CUDA graph, which has the card's time without the processor's"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): f()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        for _ in range(n): f()
    return graph.replay

def semi_structured(size, rows, device, rounds=9, n=50):
    "Training under 2:4 masks, and the exported product in half precision, against dense: called from Python, and as a CUDA graph"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size, bias=False)).to(device)
    x = torch.randn(rows, size, device=device)
    sparsify_model(model, .5, structure='2:4', mask_init='magnitude', sparse_init_mode=None)
    dense = deepcopy(plain_copy(model)).requires_grad_(True)
    def trains(m):
        opt = sgd(m)
        def step():
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return step
    times = interleaved(dict(dense=trains(dense), sparse=trains(model)), rounds, max(n//10, 1), device)
    res = dict(size=size, rows=rows, training=spread(ratios(times['sparse'], times['dense'])))
    if device!='cuda': return res
    half,xh = plain_copy(model).half().eval(),x.half()
    small = pack(deepcopy(half), {'0':'2:4'})
    with torch.inference_mode():
        error = (small(xh)-half(xh)).abs().max().item()
        arms = dict(dense=lambda: half(xh), small=lambda: small(xh))
        times = interleaved(arms, rounds, n, device)
        graphs = interleaved({k:captured(f) for k,f in arms.items()}, rounds, 10, device)
    return dict(res, error=error, dense_us=1e6*statistics.median(times['dense']),
        **{k:spread(ratios(t['dense'], t['small'])) for k,t in dict(inference=times, graph=graphs).items()})

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--device', default='cuda', choices=['cuda','cpu'], help='cpu tries the script')
    parser.add_argument('--quick', action='store_true', help='one model, few rounds')
    args = parser.parse_args()
    if args.device=='cuda' and not torch.cuda.is_available(): parser.error('there is no CUDA device here: --device cpu only tries the script')
    d,few,out = args.device,dict(rounds=3, n=3) if args.quick else {},Path(__file__).parent/'results'/'cuda'
    about = dict(machine(), device=torch.cuda.get_device_name() if d=='cuda' else 'cpu')
    print(*[f'{k} {v}' for k,v in about.items()], sep=', ')
    def write(name, rows):
        if d=='cpu' or args.quick: return
        out.mkdir(parents=True, exist_ok=True)
        (out/f'{name}.json').write_text(json.dumps(dict(machine=about, rows=rows), indent=1)+'\n')
    steps = {name:training_step(name, d, **few) for name in (['mlp'] if args.quick else ['mlp','resnet18','resnet18_cifar','gpt'])}
    for name,o in steps.items():
        print(f"{titles[name]}: dense {o['dense_ms']:.2f} ms, a step {o['step']['median']:.3f}, with updates every {every} {o['amortised']['median']:.3f}, an update {o['update_ms']:.1f} ms")
    write('steps', steps)
    sizes = [(256,32)] if args.quick else [(1024,4096),(4096,512),(4096,4096),(4096,16384),(8192,4096),(8192,16384)]
    semi = [semi_structured(*o, d, **few) for o in sizes]
    for o in semi: print(', '.join(f"{k} {v['median']:.2f}" if isinstance(v, dict) else f'{k} {v}' for k,v in o.items()))
    write('semi_structured', semi)

if __name__=='__main__': main()
