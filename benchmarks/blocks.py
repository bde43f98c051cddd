"""Training in blocks against dense training on a card, in under five minutes: `python benchmarks/blocks.py [--only products decoder]`

Results are kept by card in results/blocks, each as soon as it is there, and a second run goes on where the first one stopped. `--accuracy 120` trains
dense networks and networks in blocks for 120 seconds each, which takes hours; `--smoke` tries the script on a CPU, in Triton's interpreter."""
import argparse,gc,json,math,os,statistics,sys,tempfile,time
if '--smoke' in sys.argv: os.environ['TRITON_INTERPRET'] = '1'
import torch,torch.nn.functional as F
from contextlib import nullcontext
from copy import deepcopy
from fastsparse.all import *
from fastsparse.kernels import blocks as kernels
from fastsparse.kernels.blocks import BlockIndex,block_inputs,block_linear,block_rows,block_values
from fastsparse.weights.find import masked_params
from measure import machine
from models import Block,GPT
from pathlib import Path
from torch import nn

class Run:
    "What is measured on which device, and the file that keeps it"
    def __init__(self, smoke=False, again=False, folder=None):
        self.smoke,self.again,self.device = smoke,again,'cpu' if smoke else 'cuda'
        self.name = 'smoke' if smoke else torch.cuda.get_device_name()
        self.path = Path(folder or Path(__file__).parent/'results'/'blocks')/(self.name.replace(' ', '_')+'.json')
        self.rows = json.loads(self.path.read_text())['rows'] if self.path.exists() else {}
        self.dtype,self.machine = torch.float if smoke else torch.bfloat16,dict(machine('triton'), device=self.name)

    def __call__(self, part, name, measure):
        "The result of `measure`, from the file if it is there"
        rows = self.rows.setdefault(part, {})
        if self.again or name not in rows:
            rows[name] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(dict(machine=self.machine, rows=self.rows), indent=1)+'\n')
            print(f'{part}: {name}:', json.dumps(rows[name]) if len(str(rows[name]))<300 else '...', flush=True)
        return rows[name]

    def milliseconds(self, f):
        "The median time of a call"
        if self.smoke: return 1e3*seconds(f)
        from triton.testing import do_bench
        return do_bench(f, warmup=8, rep=30, return_mode='median')

    def compiled(self, model): return model if self.smoke else torch.compile(model)
    def clear(self):
        "Free what a model left"
        if self.smoke: return
        torch.compiler.reset()
        gc.collect()

    def wait(self): return None if self.smoke else torch.cuda.synchronize()
    def autocast(self): return nullcontext() if self.smoke else torch.autocast('cuda', torch.bfloat16)

def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter()-start

def layer(run, n_in, n_out, block, sparsity, rows):
    "An index, values, `x` and `g` of a layer with random blocks"
    gen = torch.Generator(run.device).manual_seed(0)
    def rand(*shape): return torch.randn(shape, generator=gen, device=run.device, dtype=torch.float).to(run.dtype)
    R,C = n_out//block[0],n_in//block[1]
    score = torch.rand(R*C, generator=gen, device=run.device)
    live = torch.zeros_like(score, dtype=torch.bool).index_fill_(0, score.topk(max(round((1-sparsity)*R*C), 1)).indices, True)
    index = BlockIndex.of_blocks(live.view(R, C), block)
    return index,rand(index.n, *block)/math.sqrt(n_in*(1-sparsity)),rand(rows, n_in),rand(rows, n_out)

# --- products

def correct(run):
    "Largest errors of outputs and gradients, relative to the largest number of float64's; a second run gives the same bits"
    kinds = dict(bfloat16=torch.bfloat16, float16=torch.half, float32=torch.float, tf32=torch.float)
    def errors(block, kind):
        index,values,x,g = layer(run, 4*block[1], 6*block[0], block, .5, 40 if run.smoke else 3000)
        values,x,g = [t.to(kinds[kind]) for t in (values, x, g)]
        torch.backends.cuda.matmul.fp32_precision = 'tf32' if kind=='tf32' else 'ieee'
        w = index.dense(values).double()
        got = block_rows(x, values, None, index.tensors),block_inputs(g, values, index.tensors),block_values(g, x, index.tensors)
        want = x.double()@w.t(),g.double()@w,index.take(g.double().t()@x.double())
        torch.backends.cuda.matmul.fp32_precision = 'ieee'
        res = [float((a-b).abs().max()/b.abs().max()) for a,b in zip(got, want)]
        again = block_values(g, x, index.tensors)
        limit = dict(float32=1e-5, tf32=5e-3, float16=5e-3, bfloat16=2e-2)[kind]
        return dict(errors=res, same_bits=torch.equal(again, got[2]) or kind=='tf32', right=max(res)<limit)
    for b in [(16,16)] if run.smoke else [(32,32), (64,64), (128,128)]:
        run('correct', f'{b[0]}x{b[1]}', lambda: errors(b, 'float32' if run.smoke else 'bfloat16'))
    chosen,known,kernels._known = kernels._chosen,kernels._known,{}
    kernels._chosen = lambda kind, block, dtype, precision, rows, device: kernels._tiles(kind, block, dtype, rows)[0]
    others = [] if run.smoke else [((16,16),'bfloat16'), ((64,128),'bfloat16'), ((128,32),'bfloat16')]+[((b,b),k) for k in kinds for b in (32,64,128)]
    for b,kind in others: run('correct', f'{b[0]}x{b[1]} {kind}, default tiles', lambda: errors(b, kind))
    kernels._chosen,kernels._known = chosen,known

shapes = [(2048,8192,16384), (8192,2048,16384), (4096,4096,8192), (1024,4096,16384)]

def products(run):
    "Forward, gradient of inputs and gradient of weights, against cuBLAS"
    for n_in,n_out,rows in [(64,128,32)] if run.smoke else shapes:
        def dense():
            x,g,w = [torch.randn(*s, device=run.device).to(run.dtype) for s in ((rows,n_in), (rows,n_out), (n_out,n_in))]
            return [run.milliseconds(f) for f in (lambda: x@w.t(), lambda: g@w, lambda: g.t()@x)]
        def blocks(b, sparsity):
            index,values,x,g = layer(run, n_in, n_out, (b,b), sparsity, rows)
            return [run.milliseconds(f) for f in (lambda: block_rows(x, values, None, index.tensors), lambda: block_inputs(g, values, index.tensors),
                lambda: block_values(g, x, index.tensors))]
        name = f'{n_in} x {n_out}, {rows} rows'
        known = run('products', f'{name}, dense', dense)
        for b in (16,) if run.smoke else (64,128,32):
            for sparsity in (.9,) if run.smoke else (.5,.8,.9,.95):
                def arm():
                    ms = blocks(b, sparsity)
                    return dict(ms=ms, faster=sum(known)/sum(ms), each=[d/s for d,s in zip(known, ms)])
                run('products', f'{name}, blocks of {b}, {sparsity}', arm)

def few_rows(run):
    "The forward of 1 to 256 rows, as a CUDA graph: without the time that Python takes to start it"
    from gpu import captured
    def ms(f): return run.milliseconds(f) if run.smoke else run.milliseconds(captured(f))/10
    for n_in,n_out in [(64,64)] if run.smoke else [(2048,8192), (8192,2048)]:
        for rows in (1,) if run.smoke else (1,16,64,256):
            def arm(b):
                index,values,x,_ = layer(run, n_in, n_out, (b,b), .9, rows)
                w = index.dense(values)
                block_rows(x, values, None, index.tensors)
                t = [ms(f) for f in (lambda: F.linear(x, w), lambda: block_rows(x, values, None, index.tensors))]
                return dict(us=[1e3*o for o in t], faster=t[0]/t[1])
            for b in (16,) if run.smoke else (64,128): run('few rows', f'{n_in} x {n_out}, {rows} rows, blocks of {b}, 0.9', lambda: arm(b))

def convolutions(run, batch=128):
    "The convolutions of one pixel of ResNet-50 at 224 x 224, forward and backward: rows are pixels of channels_last"
    kinds = {}
    if run.smoke: kinds[32,64,3],batch = 1,2
    else:
        for size,mid,n in ((56,64,3), (28,128,4), (14,256,6), (7,512,3)):
            wide = 4*mid
            for k,times in (((wide,mid,size),n-1), ((mid,wide,size),n)): kinds[k] = kinds.get(k, 0)+times
    def arm(n_in, n_out, size):
        b = 16 if run.smoke else 64
        index,values,*_ = layer(run, n_in, n_out, (b,b), .9, 1)
        x = torch.randn(batch, n_in, size, size, device=run.device).to(run.dtype, memory_format=torch.channels_last).requires_grad_()
        w,values = index.dense(values)[...,None,None].detach().requires_grad_(),values.requires_grad_()
        def dense(): return F.conv2d(x, w),(x,w)
        def blocks(): return block_linear(x.movedim(1, -1), values, index).movedim(-1, 1),(x,values)
        g = torch.randn_like(dense()[0])
        def step(f):
            y,ps = f()
            torch.autograd.grad(y, ps, g)
        t = [run.milliseconds(lambda: step(f)) for f in (dense, blocks)]
        return dict(ms=t, faster=t[0]/t[1])
    found = {k:run('convolutions', '{} to {} channels, {} x {}, blocks of 64, 0.9'.format(*k, k[2]), lambda: arm(*k)) for k in kinds}
    total = [sum(n*found[k]['ms'][i] for k,n in kinds.items()) for i in (0,1)]
    run('convolutions', 'all', lambda: dict(ms=total, faster=total[0]/total[1]))

# --- a decoder

class QKNormBlock(Block):
    "Attention between queries and keys of one length"
    def attend(self, x):
        q,k,v = self.qkv(x).unflatten(-1, (3,self.n_heads,-1)).permute(2,0,3,1,4)
        q,k = [F.rms_norm(t, t.shape[-1:]) for t in (q,k)]
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

def decoder(run, width, n_layers, n_vocab, n_ctx, block=None, sparsity=.9, seed=0):
    "A decoder without biases, in blocks of `block`: all weights but those of embeddings and head"
    torch.manual_seed(seed)
    model = GPT(n_vocab, width, n_layers, max(width//128, 1), n_ctx)
    model.blocks = nn.Sequential(*[QKNormBlock(width, max(width//128, 1)) for _ in range(n_layers)], nn.LayerNorm(width))
    for m in model.modules():
        if isinstance(m, nn.Linear): m.bias = None
    for p in model.parameters():
        if p.ndim==2: nn.init.normal_(p, 0, .02)
    model.to(run.device)
    if block: sparsify_model(model, sparsity, 'uniform', structure=f'block {block}x{block}', exclude='head.weight', seed=seed)
    return model

def stepper(run, model, opt, n_vocab, batch, n_ctx):
    x,y = [torch.randint(n_vocab, (batch,n_ctx), device=run.device) for _ in range(2)]
    def step():
        with run.autocast(): loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return step

def stored_in_blocks(model, opt):
    "Live values only, without an engine"
    return sparse_compute(model, None, opt, {o.name:'rows' for o in masked_params(model)})

def adam(run, model, lr=1e-4): return torch.optim.AdamW(model.parameters(), lr, fused=not run.smoke)

def memory(run): return 0. if run.smoke else torch.cuda.max_memory_allocated()/2**30

def timed(run, step, n=10):
    "Milliseconds of a step, and gigabytes at their highest"
    for _ in range(1 if run.smoke else 4): step()
    run.wait()
    if not run.smoke: torch.cuda.reset_peak_memory_stats()
    start,n = time.perf_counter(),1 if run.smoke else n
    for _ in range(n): step()
    run.wait()
    return dict(ms=1e3*(time.perf_counter()-start)/n, gb=memory(run))

sizes = {'2048 x 6':(2048,6,8192,16,1024), '4096 x 4':(4096,4,8192,16,1024)}

def steps(run):
    "A training step of a decoder, compiled: dense, in blocks, and a narrow dense one with as many weights in its layers as .39 of the wide one"
    for name,(width,n_layers,n_vocab,batch,n_ctx) in dict(smoke=(64,1,32,2,16)).items() if run.smoke else sizes.items():
        def arm(width, block, sparsity):
            model = decoder(run, width, n_layers, n_vocab, n_ctx, block, sparsity)
            opt = adam(run, model)
            if block: stored_in_blocks(model, opt)
            out = timed(run, stepper(run, run.compiled(model), opt, n_vocab, batch, n_ctx))
            del model,opt
            run.clear()
            return out
        dense = run('decoder', f'{name}, dense', lambda: arm(width, None, 0))
        arms = [(16,.9)] if run.smoke else [(64,.9), (128,.9)] if width==2048 else [(128,.9)]
        for block,sparsity in arms:
            def blocks():
                out = arm(width, block, sparsity)
                return dict(out, faster=dense['ms']/out['ms'], memory=out['gb']/max(dense['gb'], 1e-9))
            run('decoder', f'{name}, blocks of {block}, {sparsity}', blocks)
        if width==2048: run('decoder', f'{name}, dense, width 640', lambda: arm(640, None, 0))

def updates(run):
    "What an update of all layers by RigL costs, and a step between updates over one without an engine, in dense steps, not compiled"
    width,n_layers,n_vocab,batch,n_ctx = (64,1,32,2,16) if run.smoke else sizes['2048 x 6']
    every,block = (2,16) if run.smoke else (5,64)
    def arm(sparse, engine):
        model = decoder(run, width, n_layers, n_vocab, n_ctx, block if sparse else None)
        opt,times = adam(run, model),dict(step=[], update=[])
        if sparse and not engine: stored_in_blocks(model, opt)
        step = stepper(run, model, opt, n_vocab, batch, n_ctx)
        dst = DynamicSparseTraining(model, opt, 1000, method='rigl', structure=f'block {block}x{block}', batches_per_update=every, seed=0, sparse_compute=
            {o.name:'rows' for o in masked_params(model)}) if engine else None
        for i in range(3 if run.smoke else 30):
            before = dst.n_updates if engine else 0
            run.wait()
            t = seconds(lambda: (step(), run.wait()))
            if i>=(1 if run.smoke else 10): times['update' if engine and dst.n_updates>before else 'step'].append(1e3*t)
        return {k:statistics.median(v) for k,v in times.items() if v}
    def all_arms():
        dense,bare,moving = arm(False, False)['step'],arm(True, False)['step'],arm(True, True)
        return dict(dense_ms=dense, bare_ms=bare, step_ms=moving['step'], update_ms=moving['update'], engine=moving['step']/bare-1,
            update_in_dense_steps=(moving['update']-moving['step'])/dense)
    run('updates', 'decoder', all_arms)

# --- accuracy at equal seconds

def tokens():
    "Bytes of the Python sources of this installation, the last 3 % of files for validation"
    files = sorted(Path(os.__file__).parent.rglob('*.py'))
    files = [files[i] for i in torch.randperm(len(files), generator=torch.Generator().manual_seed(0))]
    def read(fs): return torch.frombuffer(bytearray(b'\n'.join(f.read_bytes() for f in fs)), dtype=torch.uint8)
    return read(files[:int(.97*len(files))]),read(files[int(.97*len(files)):])

def groups(model, rate_ends, rate_hidden):
    "Rates: of embeddings, head, norms and biases; of hidden weights, 256 live inputs at `rate_hidden`, by fan-in"
    live,out = {o.name:int(o.mask.sum()) for o in masked_params(model)},{}
    for name,p in model.named_parameters():
        hidden = p.ndim==2 and name.startswith('blocks.')
        lr = rate_hidden*256/(live.get(name, p.numel())/p.shape[0]) if hidden else rate_ends
        out.setdefault(lr, []).append(p)
    return [dict(params=ps, lr=lr) for lr,ps in out.items()]

def trained(run, data, width, block, sparsity, seconds_each, rates, seed, n_layers=6, batch=32, n_ctx=512):
    "The loss on validation data against seconds of a training that has as many steps as fit"
    if run.smoke: n_layers,batch,n_ctx = 1,2,16
    train,valid = [t.to(run.device) for t in data]
    model = decoder(run, width, n_layers, 256, n_ctx, block, sparsity, seed)
    opt = torch.optim.AdamW(groups(model, *rates), betas=(.9,.95), weight_decay=.1, fused=not run.smoke)
    ready,gen = run.compiled(model),torch.Generator().manual_seed(seed)
    def batch_of(t, gen):
        at = torch.randint(len(t)-n_ctx-1, (batch,), generator=gen).to(run.device)[:,None]+torch.arange(n_ctx+1, device=run.device)
        return t[at].long().tensor_split([n_ctx], 1)[0],t[at].long()[:,1:]
    def loss_of(x, y):
        with run.autocast(): return F.cross_entropy(ready(x), y)
    def step():
        loss_of(*batch_of(train, gen)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        opt.zero_grad()
    def tried():
        "Milliseconds of a step"
        if block: report = stored_in_blocks(model, opt)
        ms = timed(run, step, 30)['ms']
        if block: report.remove()
        return ms
    kept = deepcopy((model.state_dict(), opt.state_dict()))
    ms = tried()
    model.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    n = 3 if run.smoke else int(1e3*seconds_each/ms)
    def factor(i): return min((i+1)/100, 1)*(.05+.475*(1+math.cos(math.pi*min(i/n, 1))))
    schedule,curve = torch.optim.lr_scheduler.LambdaLR(opt, factor),[]
    moves = dict(method='rigl', structure=f'block {block}x{block}', batches_per_update=100, replace_step=False, seed=seed)
    if block: DynamicSparseTraining(model, opt, n, **moves, sparse_compute={o.name:'rows' for o in masked_params(model)})
    def validate():
        model.eval()
        g = torch.Generator().manual_seed(1)
        with torch.no_grad(): out = statistics.mean(loss_of(*batch_of(valid, g)).item() for _ in range(2 if run.smoke else 40))
        model.train()
        return out
    for i in range(n):
        step()
        schedule.step()
        if (i+1)%max(n//10, 1)==0 or i+1==n: curve.append((round((i+1)*ms/1e3, 1), round(validate(), 4)))
    return dict(steps=n, ms=ms, curve=curve, loss=curve[-1][1])

def best_rates(loss_at, start):
    "Double and halve either rate until no neighbour of the best is better"
    best = start
    while True:
        near = [(best[0]*a, best[1]*b) for a,b in ((2,1), (.5,1), (1,2), (1,.5))]
        better = min(near, key=loss_at)
        if loss_at(better)>=loss_at(best): return best
        best = better

def accuracy(run, seconds_each):
    "Three seeds for each arm, at rates chosen on validation data with the first"
    width,data = (64 if run.smoke else 1024),tokens()
    arms = {'dense':(width,None,0), 'dense, narrow':(width*5//16//64*64 or 32,None,0)}|{f'blocks of 64, {s}':(width,16 if run.smoke else 64,s) for s in (.8,.9,.95)}
    for name,arm in list(arms.items())[:3 if run.smoke else None]:
        def loss_at(rates, seed=0):
            key = f'{name}, {seconds_each} s, rates {rates[0]:.2g} and {rates[1]:.2g}, seed {seed}'
            return run('accuracy', key, lambda: trained(run, data, *arm, seconds_each, rates, seed))['loss']
        rates = (4e-3,2e-3) if run.smoke else best_rates(loss_at, (4e-3,2e-3))
        losses = [loss_at(rates, seed) for seed in range(1 if run.smoke else 3)]
        run('accuracy', f'{name}, {seconds_each} s', lambda: dict(rates=rates, losses=losses, mean=statistics.mean(losses)))

# --- the front

parts = dict(correct=correct, products=products, few=few_rows, decoder=steps, updates=updates, convolutions=convolutions)

def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='*', choices=parts, default=[*parts], help='parts to measure')
    parser.add_argument('--accuracy', type=float, metavar='SECONDS', help='train networks for as many seconds each, instead of the parts')
    parser.add_argument('--again', action='store_true', help='measure anew what is in the file')
    parser.add_argument('--out', help='a folder for the file, instead of results/blocks')
    parser.add_argument('--smoke', action='store_true', help='tiny shapes on a CPU')
    args = parser.parse_args(args)
    if not (args.smoke or torch.cuda.is_available()): parser.error('there is no CUDA device here: --smoke only tries the script')
    run,start = Run(args.smoke, args.again, args.out or (tempfile.mkdtemp() if args.smoke else None)),time.time()
    if args.accuracy: accuracy(run, args.accuracy)
    else:
        for name in args.only: parts[name](run)
    print(f'{time.time()-start:.0f} s, results in {run.path}')
    wrong = [k for k,o in run.rows.get('correct', {}).items() if not (o['right'] and o['same_bits'])]
    if wrong: sys.exit(f'wrong: {wrong}')

if __name__=='__main__': main()
