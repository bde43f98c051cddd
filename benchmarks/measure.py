"Clocks that can be trusted beside a busy neighbour: interleaved rounds, process CPU time, medians and quartiles"
import ctypes,gc,math,platform,re,statistics,time,torch
from functools import partial
from importlib.metadata import PackageNotFoundError,version
from pathlib import Path

def version_of(package):
    try: return version(package)
    except PackageNotFoundError: return 'not installed'

def machine(*packages):
    "What the numbers depend on, and the versions of `packages`"
    info = Path('/proc/cpuinfo')
    model = re.search(r'model name\s*:\s*(.*)', info.read_text()) if info.exists() else None
    import fastai,fastsparse
    from fastsparse.kernels.vectors import why_not
    versions = dict(python=platform.python_version(), torch=torch.__version__, fastai=fastai.__version__, fastsparse=fastsparse.__version__)
    versions |= {k:version_of(k) for k in packages}
    return dict(cpu=model[1] if model else platform.processor(), threads=torch.get_num_threads(), products='torch' if why_not() else 'kernels', **versions)

def cpu_time(f):
    "Seconds of CPU time that `f()` takes in this process"
    start = time.process_time()
    f()
    return time.process_time()-start

def spread(xs):
    "Median and quartiles of `xs`"
    q1,median,q3 = statistics.quantiles(xs, n=4, method='inclusive') if len(xs)>1 else [xs[0]]*3
    return dict(median=median, q1=q1, q3=q3, n=len(xs))

def interleaved(arms, rounds, warmup=2, budget=math.inf):
    "CPU seconds of each of `arms`, functions by name, one after the other in each round, in an order that turns; fewer rounds, but seven, when `budget` seconds are spent"
    names,times,start = list(arms),{name:[] for name in arms},time.process_time()
    for i in range(-warmup, rounds):
        if i>=7 and time.process_time()-start>budget: break
        for name in names[i%len(names):]+names[:i%len(names)]:
            t = cpu_time(arms[name])
            if i>=0: times[name].append(t)
    return times

def repeat(f, n):
    for _ in range(n): f()

def interleaved_blocks(arms, rounds, seconds=.05, **kwargs):
    "CPU seconds of a call of each of `arms`, which run in blocks of `seconds` or more: over and over again, as they do in use, with what they need in the caches"
    for f in arms.values(): f()
    n = {k:max(1, round(seconds/max(cpu_time(f), 1e-6))) for k,f in arms.items()}
    return {k:[t/n[k] for t in ts] for k,ts in interleaved({k:partial(repeat, f, n[k]) for k,f in arms.items()}, rounds, warmup=0, **kwargs).items()}

def ratios(a, b): return [x/y for x,y in zip(a,b)]

def one_read(n_bytes, big=torch.ones(2**26)):
    "Seconds to read `n_bytes` at the bandwidth of summing 256 MiB"
    return cpu_time(big.sum)*n_bytes/(big.numel()*big.element_size())

def _status(field): return 1024*int(re.search(rf'{field}:\s*(\d+)', Path('/proc/self/status').read_text())[1])

def give_back():
    "From now on, what this process frees goes back to the system at once, so that it is as large as what is alive in it (Linux)"
    ctypes.CDLL('libc.so.6').mallopt(-3, 2**16)

def resident():
    "Bytes of this process in memory, after garbage and free memory went back to the system (Linux)"
    gc.collect()
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    return _status('VmRSS')

def peak_over_resident(f):
    "Bytes by which `f()` raises the process's memory at its highest point; the kernel keeps that mark (Linux)"
    before = resident()
    Path('/proc/self/clear_refs').write_text('5')
    f()
    return _status('VmHWM')-before
