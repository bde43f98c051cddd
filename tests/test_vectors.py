"Words of vectors mean the same to Python and to the compiler, and a computer without Numba is told so"
import numpy as np,pytest
from fastcore.test import test_eq as eq
from fastsparse.kernels.vectors import _lowered,_size,add,at,axpy,caches,fma,full,kernel,lane_products,load,numbers
from fastsparse.kernels.vectors import put,store,sums16,take,total,turn16,why_not,zero
from forks import run_code

needs_numba = pytest.mark.skipif(bool(why_not()), reason=why_not())
F,N = np.float32,16

@kernel
def words(x, y, n):
    "Each word once"
    a,b = numbers(F, x),numbers(F, y)
    u,v = load(N, a, 0),load(N, a, N)
    store(b, 0, axpy(at(a, 3), u, v))
    store(b, N, fma(u, v, add(u, zero(N, a))))
    store(b, 2*N, full(N, total(u)))
    store(b, 3*N, lane_products(u, v))
    store(b, 3*N+16, sums16(a, 5))
    turn16(a, 2, 18, b, 3*N+32, 17)
    put(b, n, at(a, n))

@kernel
def twice(x, y, n):
    words(x, y, n)
    put(numbers(F, y), 0, at(numbers(F, x), 1))

def both(f, kind, width, x, n):
    "What the plain and the compiled kernel write"
    global F,N
    F,N,plain,fast = kind,width,np.zeros(n, kind),np.zeros(n, kind)
    f(x, plain, 1)
    f.compiled(F=kind, N=width)(x.ctypes.data, fast.ctypes.data, 1)
    return plain,fast

@needs_numba
@pytest.mark.parametrize('kind', [np.float32,np.float64])
@pytest.mark.parametrize('width', [16,128])
def test_the_compiler_and_python_agree_on_each_word(kind, width):
    x = np.random.default_rng(0).normal(size=400).astype(kind)
    for f in (words,twice): np.testing.assert_allclose(*both(f, kind, width, x, 4*width+32+16*17), rtol=2e-5, atol=1e-5)

C = np.int32

@kernel
def taken(x, places, y, n):
    for k in range(0, n, N): store(numbers(F, y), k, take(N, numbers(F, x), 3, numbers(C, places), 1+k))

@needs_numba
@pytest.mark.parametrize('kind,places', [(np.float32,np.int16), (np.float32,np.int32), (np.float64,np.int16)])
@pytest.mark.parametrize('width', [2,8,16])
def test_numbers_are_taken_from_listed_places(kind, places, width):
    "From place 3 on, in the order of the list, which begins at its second number; the last place has all 15 bits"
    x,listed,y = np.arange(2**15+3, dtype=kind),np.random.default_rng(0).integers(2**15, size=33).astype(places),np.zeros(32, kind)
    listed[-1] = 2**15-1
    taken.compiled(F=kind, C=places, N=width)(x.ctypes.data, listed.ctypes.data, y.ctypes.data, 32)
    eq(y, listed[1:]+3.)
    eq(take(width, x, 3, listed, 1), y[:width])

def test_words_are_functions_of_arrays():
    x,y,a,b = np.arange(32, dtype=np.float32),np.ones(32, np.float32),np.arange(256.),np.zeros(256)
    eq(axpy(2, load(4, x, 8), load(4, y, 0)), [17,19,21,23])
    eq(take(4, x, 0, np.array([3,1,4,1], np.int16), 0), [3,1,4,1])
    eq(lane_products(x, y), np.arange(16)*2+16)
    turn16(a, 0, 16, b, 0, 16)
    eq(b.reshape(16, 16), a.reshape(16, 16).T)

def test_sizes_of_caches_are_read():
    eq((_size('48K'), _size('2M'), _size('512')), (49152, 2**21, 512))
    assert all(c>=2**12 for c in caches())

def test_each_word_is_known_to_the_compiler():
    eq({w.__name__ for w in _lowered}, {'numbers','at','put','load','store','zero','full','add','axpy','fma','lane_products','total','sums16','take','turn16'})

@needs_numba
def test_not_a_number_and_infinity_pass_as_ieee_says():
    x = np.ones(400, np.float32)
    x[[3,4]] = np.inf,np.nan  # the factor of axpy, and a number of its vector
    _,y = both(words, np.float32, 16, x, 400)
    assert np.isnan(y[4]) and np.isinf(y[[0,2,3,5]]).all()
    x[3] = 0
    _,y = both(words, np.float32, 16, x, 400)
    assert np.isnan(y[4]) and np.isfinite(y[[0,2,3,5]]).all()

def run(code, **env):
    "Output of Python code in a process that has loaded the library, and no Numba"
    done = run_code(f"import sys; assert 'numba' not in sys.modules\n{code}", **env)
    assert not done.returncode, done.stderr
    return done.stdout.strip()

def fake(tmp_path, text):
    "A folder with a package `numba` of this text"
    (tmp_path/'numba').mkdir()
    (tmp_path/'numba'/'__init__.py').write_text(text)
    return f'sys.path[:0] = [{str(tmp_path)!r}]\n'

@pytest.mark.parametrize('text,says', [('raise ModuleNotFoundError("no", name="numba")', 'numba is not installed'), ('__version__="0.59.1"', '0.59.1, and must be 0.61'),
    ('raise ImportError("needs NumPy 1")', 'needs NumPy 1')])
def test_a_numba_that_does_not_fit_is_named_with_the_way_out(tmp_path, text, says):
    path = fake(tmp_path, text)
    (tmp_path/'numba'/'extending.py').write_text('')
    out = run(path+'from fastsparse.kernels.vectors import why_not; print(why_not())')
    assert says in out and "pip install 'livesparse[fast]'" in out

def test_without_numba_products_are_torchs_and_say_so_once(tmp_path):
    code = """import torch,warnings
from fastsparse.kernels.ops import sparse_linear,SparseIndex
index = SparseIndex(torch.eye(3)>0)
v = torch.ones(3, requires_grad=True)
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter('always')
    for _ in range(2): sparse_linear(torch.arange(6.).view(2, 3), v, index).sum().backward()
print(v.grad.tolist(), [str(o.message) for o in w if 'livesparse[fast]' in str(o.message)])"""
    out = run(fake(tmp_path, 'raise ModuleNotFoundError("no", name="numba")')+code)
    assert out.startswith('[6.0, 10.0, 14.0]') and out.count('numba is not installed')==1

_use = 'import numpy as np; from test_vectors import *; x=np.arange(400,dtype=np.float32); y=np.zeros(400,np.float32); words.compiled(F=np.float32,N=16)(x.ctypes.data,y.ctypes.data,1); print(y[0])'

@needs_numba
def test_a_kernel_runs_where_no_folder_can_be_written(tmp_path):
    "Numba tries the folder that the user names, the module's own and the user's cache; here none of them can be made"
    (tmp_path/'file').write_text('')
    code = 'import numba.core.caching as c; c.CacheImpl._locator_classes.clear(); '+_use
    eq(run(code, NUMBA_CACHE_DIR=str(tmp_path/'file'/'cache')), '16.0')

@needs_numba
def test_a_kernel_is_compiled_once_and_again_when_its_words_change(tmp_path):
    once = 'import fastsparse.kernels.vectors as v; v._mark_of=lambda f: "{}"; '+_use+'; d=words.compiled(F=np.float32,N=16); print(sum(d.stats.cache_hits.values()))'
    def hits(mark): return run(once.format(mark), NUMBA_CACHE_DIR=str(tmp_path)).split()[-1]
    eq([hits('a'), hits('a'), hits('b'), hits('b')], ['0','1','0','1'])

@needs_numba
def test_other_processors_compile_and_agree(tmp_path):
    "AVX2 and plain SSE2 code, asked of LLVM on this machine"
    for name,features,width in (('haswell','+avx,+avx2,+fma',32), ('x86-64','+sse2',16)):
        code = 'from test_vectors import *; from fastsparse.kernels.vectors import vector_bytes; print(vector_bytes()); [test_the_compiler_and_python_agree_on_each_word(k, n) for k in (np.float32,np.float64) for n in (16,)]'
        eq(run(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path)), str(width))

@needs_numba
def test_a_bar_shows_that_kernels_compile_the_first_time(tmp_path):
    "In a terminal; a second process takes them from the disk and shows nothing"
    pytest.importorskip('pty')
    code = '''import os,pty
from fastsparse.kernels.linear import list_live,call
import torch
zeros = lambda n: torch.zeros(n, dtype=torch.int)
out = os.dup(1)
here,there = pty.openpty()
for o in (0,1): os.dup2(there, o)
call(list_live.compiled(), torch.ones(4, dtype=torch.bool), 2, 2, zeros(3), zeros(5))
print('done', flush=True)
os.write(out, os.read(here, 4096))'''
    def shown(): return run(code, NUMBA_CACHE_DIR=str(tmp_path)).removesuffix('done').strip()
    assert 'compiling' in shown()
    assert shown()==''

@needs_numba
def test_a_log_says_once_that_kernels_compile(tmp_path):
    code = 'import logging\nlogging.basicConfig(level=logging.INFO)\nlogging.getLogger("numba").setLevel("ERROR")\n'\
        'from fastsparse.kernels.linear import list_live,call\nimport torch\nzeros = lambda n: torch.zeros(n, dtype=torch.int)\n'\
        'call(list_live.compiled(), torch.ones(4, dtype=torch.bool), 2, 2, zeros(3), zeros(5))'
    for expected in (1,0):
        res = run_code(code, NUMBA_CACHE_DIR=str(tmp_path))
        assert res.stderr.count('INFO:fastsparse:compiling sparse products')==expected, res.stderr
