"""Write vectorised CPU loops in Python, compiled by Numba

From above: the words of a loop, as plain functions of arrays; Numba; how LLVM, the compiler behind it, makes each word; `Kernel`; caches"""

# A processor multiplies and adds 4 to 16 neighbouring numbers in one instruction. A kernel is a function of addresses and integers that
# loops over such vectors:
#
#     @kernel
#     def double(x, y, n):
#         a,b = numbers(F, x),numbers(F, y)
#         for i in range(0, n, N): store(b, i, axpy(2, load(N, a, i), zero(N, a)))
#
#     double(x, y, 32)                                                       # plain Python, on NumPy arrays
#     double.compiled(F=np.float32, N=32)(x.ctypes.data, y.ctypes.data, 32)  # machine code, which imports Numba

import hashlib,logging,numpy as np,sys,time
from ..contract import pip_install
from fastcore.basics import IN_NOTEBOOK
from functools import cache
from pathlib import Path
from types import FunctionType

# --- words

def numbers(
    kind, # `np.float32`, `np.float64`, `np.int32`, `np.int16`
    address, # `data_ptr()` of a contiguous tensor, or a NumPy array when the kernel runs as plain Python
): # An array for the other words
    "An array of numbers of type `kind` that begins at an address"
    return address.reshape(-1).view(kind)

def at(p, i):
    "Number `i` of `p`; `i` may not be negative"
    return p[i]

def put(p, i, v):
    "Write the number `v` to place `i` of `p`"
    p[i] = v

def load(n, p, i):
    "The `n` numbers of `p` from place `i` on"
    return p[i:i+n].copy()

def store(p, i, x):
    "Write the vector `x` to `p` from place `i` on"
    p[i:i+len(x)] = x

def take(n, p, i, q, j):
    "The numbers of `p` at `n` places, counted from place `i` on, which `q` lists from place `j` on; none is negative"
    return p[i+q[j:j+n].astype(int)]

def zero(n, p):
    "`n` zeros of the type of `p`"
    return np.zeros(n, p.dtype)

def full(n, v):
    "`n` times the number `v`"
    return np.full(n, v)

def add(x, y):
    "The sum of two vectors"
    return x+y

# A fused multiply-add is the fastest instruction of a core: two operations for each number in half a cycle.
def axpy(a, x, y):
    "`a*x+y` for a number `a` and vectors `x`, `y`"
    return x.dtype.type(a)*x+y

def fma(x, y, z):
    "`x*y+z` for three vectors"
    return x*y+z

def lane_products(x, y):
    "The products of two vectors, added up to 16 sums, one for each lane"
    return (x*y).reshape(-1, 16).sum(0)

def total(x):
    "The sum of a vector, as a number"
    return x.sum()

# A sum across a vector is slow, so `sums16` makes 16 of them at once, by halves: 15 additions instead of 16 times 4. `turn16` uses the same
# shuffles.
def sums16(p, i):
    "The sums of the 16 rows of 16 numbers from place `i` of `p` on, as a vector"
    return p[i:i+256].reshape(16, 16).sum(1)

def turn16(p, i, ld, q, j, ldq):
    "Transpose 16 rows of 16 numbers from `p`, `ld` apart from place `i` on, to `q`, `ldq` apart from place `j` on"
    for k in range(16): q[j+k:j+k+15*ldq+1:ldq] = p[i+k*ld:i+k*ld+16]

# --- Numba, which compiles kernels for some seconds in the first fit on a machine; later processes read machine code from the disk

def _watch_compiling(event, show):
    "Log that Numba compiles kernels, once in a process, and `show` a bar while it does?"
    class Listener(event.Listener):
        said = False
        bar = None
        depth = 0
        n = 0

        def on_start(self, e):
            if not e.data['dispatcher'].py_func.__module__.startswith('fastsparse.'): return
            text = 'compiling sparse products, once on this machine'
            if not self.said: logging.getLogger('fastsparse').info(text)
            self.said,self.depth = True,self.depth+show
            if self.depth!=1: return
            from fastprogress.fastprogress import progress_bar
            if self.bar is None or time.time()-self.bar.last_t>5:  # not in a cell that ran long ago
                self.bar = progress_bar(range(0), total='noinfer', leave=False)
                self.n = 0
                self.bar.comment = text
            if self.n: self.bar.update_bar(self.n)
            else: self.bar.update(0)

        def on_end(self, e):
            if not self.depth: return
            self.depth -= 1
            if self.depth: return
            self.n = self.n+1
            self.bar.last_t = time.time()
            self.bar.on_iter_end()
    event.register('numba:compile', Listener())

_oldest = '0.61'

@cache
def _numba():
    "The modules Numba and llvmlite; an `ImportError` if Numba is missing, too old or broken"
    try: import llvmlite.binding,llvmlite.ir,numba,numba.extending
    except ModuleNotFoundError as e: raise ImportError(f"{e.name or 'Numba'} is not installed") from e
    except Exception as e: raise ImportError(f"Numba does not import ({type(e).__name__}: {e})") from e
    if tuple(map(int, numba.__version__.split('.')[:2]))<tuple(map(int, _oldest.split('.'))):
        raise ImportError(f"Numba is {numba.__version__}, and must be {_oldest} or newer")
    _watch_compiling(numba.core.event, IN_NOTEBOOK or sys.stdout.isatty())
    return numba,llvmlite

@cache
def why_not() -> str: # Empty if kernels run
    "Why kernels can't run on this computer"
    try: _vocabulary()
    except ImportError as e: return f"{e}: {pip_install('fast')} installs it; until then sparse layers run on slower torch kernels"
    return ''

# --- how LLVM makes each word: a function gives its types and its instructions, once Numba is imported
# Products and sums may be contracted to one instruction, and sums may change their order. Nothing assumes that numbers are finite, so NaN
# and infinities pass as IEEE says.

_lowered = {}

def _lowers(word):
    "Register the function that compiles `word`"
    def _register(f): _lowered[word] = f
    return _register

class _Parts:
    "The parts of Numba that compile words, imported on first use"
    def __getattr__(self, name):
        numba,llvmlite = _numba()
        vars(self).update(types=numba.types, ir=llvmlite.ir, intp=numba.types.intp, Vec=_vec_type())
        return vars(self)[name]

_nb,_free = _Parts(),('contract','reassoc','nsz')

@cache
def _vec_type():
    "Numba's type of a vector"
    numba,llvmlite = _numba()
    class Vec(numba.types.Type):
        def __init__(self, n, dtype):
            self.n,self.dtype = n,dtype
            super().__init__(f'Vec({n}, {dtype})')
    class VecModel(numba.extending.models.PrimitiveModel):
        def __init__(self, manager, t): super().__init__(manager, t, llvmlite.ir.VectorType(manager.lookup(t.dtype).get_value_type(), t.n))
    numba.extending.register_model(Vec)(VecModel)
    return Vec

@cache
def _vocabulary():
    "A dict from words to Numba's intrinsics"
    intrinsic = _numba()[0].extending.intrinsic
    return {word:intrinsic(prefer_literal=True)(f) for word,f in _lowered.items()}

def _place32(k): return _nb.ir.Constant(_nb.ir.IntType(32), k)

def _shuffle(b, x, y, places):
    "The numbers of the vectors `x` and `y`, in a row, that are at `places`"
    mask = _nb.ir.Constant(_nb.ir.VectorType(_nb.ir.IntType(32), len(places)), list(places))
    return b.shuffle_vector(x, y, mask)

def _splat(b, v, n):
    one = b.insert_element(_nb.ir.Constant(_nb.ir.VectorType(v.type, n), _nb.ir.Undefined), v, _place32(0))
    return _shuffle(b, one, one, [0]*n)

def _as_vector(b, p, i, n):
    "The place `i` of `p` as that of a vector"
    return b.bitcast(b.gep(p, [i]), _nb.ir.VectorType(p.type.pointee, n).as_pointer())

def _bytes(p): return p.dtype.bitwidth//8

def _fmadd(b, x, y, z): return b.fadd(b.fmul(x, y, flags=_free), z, flags=_free)

@_lowers(numbers)
def _(tc, kind, address):
    p = _nb.types.CPointer(kind.instance_type)
    def gen(ctx, b, sig, args): return b.inttoptr(args[1], ctx.get_value_type(p))
    return p(kind, _nb.intp),gen

@_lowers(at)
def _(tc, p, i):
    def gen(ctx, b, sig, args): return b.load(b.gep(args[0], [args[1]]))
    return p.dtype(p, _nb.intp),gen

@_lowers(put)
def _(tc, p, i, v):
    def gen(ctx, b, sig, args):
        b.store(args[2], b.gep(args[0], [args[1]]))
        return ctx.get_dummy_value()
    return _nb.types.void(p, _nb.intp, p.dtype),gen

# Vectors may start at any number: nothing is assumed about their alignment.
@_lowers(load)
def _(tc, n, p, i):
    def gen(ctx, b, sig, args): return b.load(_as_vector(b, args[1], args[2], n.literal_value), align=_bytes(p))
    return _nb.Vec(n.literal_value, p.dtype)(n, p, _nb.intp),gen

@_lowers(store)
def _(tc, p, i, x):
    def gen(ctx, b, sig, args):
        b.store(args[2], _as_vector(b, args[0], args[1], x.n), align=_bytes(p))
        return ctx.get_dummy_value()
    return _nb.types.void(p, _nb.intp, x),gen

# A processor's own instruction for numbers at listed places is slower than loading one after the other. The places come in words of 64
# bits, so that there is one load for several of them.
@_lowers(take)
def _(tc, n, p, i, q, j):
    vec,bits = _nb.Vec(n.literal_value, p.dtype),q.dtype.bitwidth
    def gen(ctx, b, sig, args):
        _,x,start,places,first = args
        x = b.gep(x, [start])
        word = first.type
        v = _nb.ir.Constant(ctx.get_value_type(vec), _nb.ir.Undefined)
        for k in range(vec.n):
            shift = k*bits%64
            if not shift: listed = b.load(b.bitcast(b.gep(places, [b.add(first, word(k))]), word.as_pointer()), align=bits//8)
            place = b.and_(b.lshr(listed, word(shift)), word(2**bits-1))
            v = b.insert_element(v, b.load(b.gep(x, [place])), _place32(k))
        return v
    return vec(n, p, _nb.intp, q, _nb.intp),gen

@_lowers(zero)
def _(tc, n, p):
    v = _nb.Vec(n.literal_value, p.dtype)
    def gen(ctx, b, sig, args): return _nb.ir.Constant(ctx.get_value_type(v), None)
    return v(n, p),gen

@_lowers(full)
def _(tc, n, v):
    def gen(ctx, b, sig, args): return _splat(b, args[1], n.literal_value)
    return _nb.Vec(n.literal_value, v)(n, v),gen

@_lowers(add)
def _(tc, x, y):
    def gen(ctx, b, sig, args): return b.fadd(*args, flags=_free)
    return y(x, y),gen

@_lowers(axpy)
def _(tc, a, x, y):
    def gen(ctx, b, sig, args): return _fmadd(b, _splat(b, args[0], x.n), args[1], args[2])
    return y(x.dtype, x, y),gen

@_lowers(fma)
def _(tc, x, y, z):
    def gen(ctx, b, sig, args): return _fmadd(b, *args)
    return z(x, y, z),gen

@_lowers(lane_products)
def _(tc, x, y):
    def gen(ctx, b, sig, args):
        parts = [[_shuffle(b, v, v, range(i, i+16)) for v in args] for i in range(0, x.n, 16)]
        sums = [b.fmul(*o, flags=_free) for o in parts[:2]]  # two sums hide the latency of one
        for k,(u,v) in enumerate(parts[2:]): sums[k%2] = _fmadd(b, u, v, sums[k%2])
        return sums[0] if len(sums)==1 else b.fadd(*sums, flags=_free)
    return _nb.Vec(16, x.dtype)(x, y),gen

@_lowers(total)
def _(tc, x):
    def gen(ctx, b, sig, args):
        v,n = args[0],x.n
        while n>1:
            n //= 2
            v = b.fadd(_shuffle(b, v, v, range(n)), _shuffle(b, v, v, range(n, 2*n)), flags=_free)
        return b.extract_element(v, _place32(0))
    return x.dtype(x),gen

# `sums16` and `turn16` take four rounds, with blocks of 8, 4, 2 and 1 numbers: `sums16` adds blocks of two vectors, `turn16` exchanges
# them.
def _halves(k):
    "Of two vectors of 16 with blocks of `k`: the even blocks of both in turn, and the odd ones"
    blocks = [[*range(o, o+k), *range(16+o, 16+o+k)] for o in range(0, 16, 2*k)]
    return sum(blocks, []),[p+k for o in blocks for p in o]

def _rows16(b, p, i, ld):
    "Where 16 rows of 16 numbers start"
    return [_as_vector(b, p, b.add(i, b.mul(ld, ld.type(k))), 16) for k in range(16)]

@_lowers(sums16)
def _(tc, p, i):
    def gen(ctx, b, sig, args):
        vs = [b.load(r, align=_bytes(p)) for r in _rows16(b, *args, args[1].type(16))]
        for k in (8,4,2,1):
            even,odd = _halves(k)
            vs = [b.fadd(_shuffle(b, x, y, even), _shuffle(b, x, y, odd), flags=_free) for x,y in zip(vs[:k], vs[k:])]
        return vs[0]
    return _nb.Vec(16, p.dtype)(p, _nb.intp),gen

@_lowers(turn16)
def _(tc, p, i, ld, q, j, ldq):
    def gen(ctx, b, sig, args):
        vs = [b.load(r, align=_bytes(p)) for r in _rows16(b, *args[:3])]
        for k in (8,4,2,1):
            even,odd = _halves(k)
            for r in range(16):
                if not r&k: vs[r],vs[r+k] = _shuffle(b, vs[r], vs[r+k], even),_shuffle(b, vs[r], vs[r+k], odd)
        for v,r in zip(vs, _rows16(b, *args[3:])): b.store(v, r, align=_bytes(q))
        return ctx.get_dummy_value()
    return _nb.types.void(p, _nb.intp, _nb.intp, q, _nb.intp, _nb.intp),gen

# --- kernels

@cache
def _mark_of(files): return hashlib.sha256(b''.join(Path(f).read_bytes() for f in files if Path(f).exists())).hexdigest()[:12]

class Kernel:
    """A function of addresses and numbers that Numba compiles when it is first used; called as it is, it runs as plain Python on arrays

    `compiled` sets the free names of the function, such as the type `F` and the width `N`, and compiles it with the words and kernels it
    calls. Machine code is stored beside the module or in the user's cache, if either can be written, under a name with the settings and a
    hash of the source files, so that code of an older version is never used."""
    def __init__(self, f):
        self.f,self.made = f,{}
        self.__doc__,self.__name__ = f.__doc__,f.__name__

    def __call__(self, *args): return self.f(*args)
    def __repr__(self): return f'kernel {self.__name__}'

    @property
    def kernels(self):
        found = {n:self.f.__globals__.get(n) for n in self.f.__code__.co_names}
        return {n:k for n,k in found.items() if isinstance(k, Kernel)}

    @property
    def names(self): return set(self.f.__code__.co_names).union(*[k.names for k in self.kernels.values()])

    @property
    def files(self): return {f.__code__.co_filename for f in (zero, self.f)}.union(*[k.files for k in self.kernels.values()])

    def compiled(self, **settings): # A value for each free name
        "Compile the kernel, once for each choice of settings"
        key = tuple(settings.items())
        if key in self.made: return self.made[key]
        f = self._source({k:v for k,v in settings.items() if k in self.names})
        njit = _numba()[0].njit
        options = dict(fastmath=set(_free), nogil=True, boundscheck=False, error_model='numpy')
        try: self.made[key] = njit(cache=True, **options)(f)
        except RuntimeError: self.made[key] = njit(**options)(f)  # Numba finds no folder that it may write
        return self.made[key]

    def _source(self, settings):
        "A copy of the function with compiled words and kernels, under a name that holds the settings"
        words,f = _vocabulary(),self.f
        used = {n:f.__globals__.get(n) for n in f.__code__.co_names}
        known = {n:words[w] for n,w in used.items() if callable(w) and not isinstance(w, Kernel) and w in words}
        known |= {n:k.compiled(**{o:v for o,v in settings.items() if o in k.names}) for n,k in self.kernels.items()}
        new = FunctionType(f.__code__, {**f.__globals__, **known, **settings}, f.__name__, f.__defaults__, f.__closure__)
        said = [f'{k}{getattr(v, "__name__", v)}' for k,v in sorted(settings.items())]
        new.__qualname__ = '_'.join([f.__qualname__, *said, _mark_of(tuple(sorted(self.files)))])
        new.__module__ = f.__module__
        return new

kernel = Kernel  # the decorator

# --- caches and vectors, whose sizes decide how a kernel divides its work: read from Linux; elsewhere common sizes are assumed

def _size(s): return int(s[:-1])*2**(10*(1+'KMG'.index(s[-1]))) if s[-1:].isalpha() else int(s)

@cache
def caches() -> tuple: # Bytes
    "The sizes of the first and second cache of a core; 32 KB and 1 MB if the system doesn't say"
    found = {1:2**15, 2:2**20}
    for d in Path('/sys/devices/system/cpu/cpu0/cache').glob('index*'):
        try: level,kind,size = [(d/n).read_text().strip() for n in ('level','type','size')]
        except OSError: continue
        if kind!='Instruction' and int(level) in found: found[int(level)] = _size(size)
    return found[1],found[2]

@cache
def vector_bytes() -> int: # 64, 32 or 16
    "The width of the vectors for which Numba compiles, in bytes"
    numba,llvmlite = _numba()
    given = numba.config.CPU_FEATURES
    features = (llvmlite.binding.get_host_cpu_features().flatten() if given is None else given).split(',')
    return 64 if '+avx512f' in features else 32 if '+avx2' in features else 16
