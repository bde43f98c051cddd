"What kernels compute, at odd sizes, in every way to cut, for any number of threads and on other processors"
import numpy as np,pytest,torch
from fastcore.test import test_eq as eq
from fastsparse.kernels.linear import dots,gradients,list_rows,multiply,tiling
from fastsparse.kernels.ops import SparseIndex
from fastsparse.kernels.vectors import why_not
from forks import run_code

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

def test_a_kernel_is_plain_python_too():
    "Two live weights, 2 and 3, of the inputs 1 and 4, for 16 rows of the batch"
    table = np.arange(5*16, dtype=np.float32)
    eq(dots(np.float32([2,3]), np.int32([1,4]), 0, 2, table, np.zeros(16, np.float32)), 2*table[16:32]+3*table[64:80])

def make(n_out, n_in, rows, density=.3, dtype=torch.float, seed=0, fours=False):
    "Index, live values, bias, inputs, gradients of outputs, and the dense weight"
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(n_out//4 if fours else n_out, n_in, generator=g)<density
    if fours: mask = mask.repeat_interleave(4, 0)
    w,b,x,dy = [torch.randn(*s, generator=g).to(dtype) for s in ((n_out,n_in),(n_out,),(rows,n_in),(rows,n_out))]
    return mask,SparseIndex(mask),(w*mask)[mask],b,x,dy,w*mask

def check(n_out, n_in, rows, density=.3, dtype=torch.float, tol=1e-5, fours=False):
    "Outputs and gradients against float64"
    mask,index,v,b,x,dy,w = make(n_out, n_in, rows, density, dtype, fours=fours)
    assert index.fours>=fours
    mine = multiply(index, v, x, b),*gradients(index, v, x, dy)
    w,x,dy = w.double(),x.double(),dy.double()
    for a,r in zip(mine, (x@w.t()+b.double(), dy@w, (dy.t()@x)[mask], dy.sum(0))): torch.testing.assert_close(a.double(), r, rtol=tol, atol=tol*10)

@pytest.mark.parametrize('shape', [(7,9),(1,1),(3,0),(0,3),(5,64)])
@pytest.mark.parametrize('density', [0,.3,1])
def test_live_weights_are_listed(shape, density):
    "Row by row, in order: as `nonzero` finds them, of a mask that lies in another order too"
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0))<density
    for m in (mask, mask.t().contiguous().t()):
        crow,col = list_rows(m)
        rows,cols = m.nonzero().unbind(1)
        eq(col.tolist(), cols.tolist())
        eq(crow.tolist(), [0, *rows.bincount(minlength=len(m)).cumsum(0).tolist()])

sizes = [(65,30,77),(10,79,200),(33,47,1),(38,18,3),(1,1,1),(130,200,130),(16,16,16),(5,300,0),(0,4,3),(4,0,3)]

@pytest.mark.parametrize('size', sizes)
@pytest.mark.parametrize('density', [0,.05,.3,1])
def test_odd_sizes(size, density):
    "Sizes that no register divides, one row, none, no inputs, no outputs, no live weight and all"
    check(*size, density)

@pytest.mark.parametrize('dtype,tol', [(torch.double,1e-12), (torch.bfloat16,.04), (torch.half,5e-3)])
def test_types(dtype, tol):
    "Results are of the inputs' type; narrow types are added up in float32"
    check(65, 30, 77, dtype=dtype, tol=tol)
    _,index,v,b,x,dy,_ = make(9, 8, 5, dtype=dtype)
    eq({t.dtype for t in (multiply(index, v, x, b), *gradients(index, v, x, dy))}, {dtype})

@pytest.mark.parametrize('N', [16,64,128])
@pytest.mark.parametrize('width,R', [(1,1),(7,5),(48,32),(1000,512)])
def test_every_way_to_cut(N, width, R, monkeypatch):
    "Blocks of one column, ragged ones, tables of several tiles"
    monkeypatch.setattr('fastsparse.kernels.linear.tiling', lambda *args: (N,width,R))
    check(37, 50, 150)

@pytest.mark.parametrize('size', [(64,30,77),(4,5,1),(12,79,200),(128,200,130),(8,50,150)])
@pytest.mark.parametrize('density', [0,.05,.3,1])
def test_outputs_that_share_inputs_in_fours(size, density): check(*size, density, fours=True)

def test_fours_in_any_type_and_cut(monkeypatch):
    check(64, 30, 77, dtype=torch.double, tol=1e-12, fours=True)
    for cut in ((16,1,4),(64,7,8),(64,48,512)):
        monkeypatch.setattr('fastsparse.kernels.linear.tiling', lambda *args: cut)
        check(40, 50, 150, fours=True)

def test_the_rule_serves_every_size():
    "Also for no rows of a table, and none of a batch"
    for rows in (1,17,128,10**5):
        for n in (0,1,784,10**5):
            for density in (0,.01,.2,1):
                for back in (False,True):
                    N,width,R = tiling(rows, n, density, back)
                    assert N in (16,32,64,128) and width>0 and R>0

def test_what_is_not_asked_for_is_not_made():
    _,index,v,_,x,dy,_ = make(20, 30, 40)
    dx,dw,db = gradients(index, v, x, dy)
    for inputs in (False,True):
        for bias in (False,True):
            a,b,c = gradients(index, v if inputs else None, x, dy, bias)
            eq((a is None,c is None), (not inputs,not bias))
            assert b.equal(dw) and (a is None or a.equal(dx)) and (c is None or c.equal(db))

def test_what_belongs_together_is_brought_together_or_refused():
    "One type for all numbers, a bias of one number, columns of 16 bits; sizes that don't fit are an error"
    _,index,v,b,x,dy,_ = make(20, 30, 40)
    want,grads = multiply(index, v, x, b),gradients(index, v, x, dy)
    for a,r in zip((multiply(index, v.double(), x, b.double()), *gradients(index, v.double(), x, dy.double())), (want, *grads)): assert a.equal(r)
    assert multiply(index, v, x, b[:1]).equal(multiply(index, v, x, b[:1].expand(20).clone()))
    short = SparseIndex.of_parts(index.shape, index.crow, index.col.short())
    for a,r in zip((multiply(short, v, x, b), *gradients(short, v, x, dy)), (want, *grads)): assert a.equal(r)
    for args in ((v[1:],x,b), (v,x[:,1:],b), (v,x[0],b), (v,x,b[1:])):
        with pytest.raises((ValueError,RuntimeError)): multiply(index, *args)
    for args in ((v[1:],x,dy), (v,x[:,1:],dy), (v,x,dy[1:]), (v,x,dy[:,1:])):
        with pytest.raises(ValueError, match='the index needs'): gradients(index, *args)

@pytest.mark.parametrize('bad', [float('nan'),float('inf')])
@pytest.mark.parametrize('rows', [1,60])
def test_dead_weights_pass_nothing_and_live_ones_all(bad, rows):
    "A number that is not finite reaches exactly the outputs and gradients that live weights lead to, and a zero times it is not a number"
    mask,index,v,b,x,dy,w = make(40, 50, rows)
    v[0] = 0
    i,j = [int(o[0]) for o in mask.nonzero(as_tuple=True)]
    x[0,j],dy[0,i] = bad,bad
    y,(dx,dw,db) = multiply(index, v, x, b),gradients(index, v, x, dy)
    assert y[0].isfinite().equal(~mask[:,j]) and y[1:].isfinite().all() and y[0,i].isnan()
    assert dx[0].isfinite().equal(~mask[i]) and dx[1:].isfinite().all() and dx[0,j].isnan()
    at = torch.zeros_like(mask)
    at[i],at[:,j] = True,True
    assert dw.isfinite().equal(~at[mask]) and not db[i].isfinite() and db.isfinite().sum()==39

@pytest.mark.parametrize('rows', [1,100,300])
@pytest.mark.parametrize('fours', [False,True])
def test_threads_change_nothing(rows, fours, monkeypatch):
    "Results are the same to the bit with one thread and with three"
    monkeypatch.setattr('fastsparse.kernels.linear._alone', 2**14)
    _,index,v,b,x,dy,_ = make(*((2000,3000) if rows==1 else (300,400)), rows, .3, fours=fours)
    def run(n):
        torch.set_num_threads(n)
        return multiply(index, v, x, b),*gradients(index, v, x, dy)
    before = torch.get_num_threads()
    try: one,three = run(1),run(3)
    finally: torch.set_num_threads(before)
    for a,b in zip(one, three): assert a.equal(b)

haswell,plain = ('haswell','+avx,+avx2,+fma'),('x86-64','+sse2')
all_kinds = '[check(65, 30, 77, d) for d in (.03,.3)]; check(65, 30, 77, dtype=torch.double); check(64, 30, 77, fours=True); check(8, 30, 77, dtype=torch.double, fours=True)'

@pytest.mark.parametrize('processor,checks', [(haswell, 'check(65, 30, 77, .3); check(64, 30, 77, fours=True)'), (plain, 'check(65, 30, 77, .03); check(65, 30, 77, dtype=torch.double)'),
    *(pytest.param(o, all_kinds, marks=pytest.mark.full) for o in (haswell,plain))])
def test_other_processors(processor, checks, tmp_path):
    "AVX2 and plain code, which LLVM is asked for on this machine"
    name,features = processor
    done = run_code(f'from test_linear import *; {checks}; print("right")', NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))
    eq(done.stdout.strip(), 'right')
