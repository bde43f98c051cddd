"What a core can do at the most, and how near products of live weights come: billions of multiplications and additions a second"
import numpy as np,torch,torch.nn.functional as F
from fastsparse.kernels.timing import times_in_turns
from fastsparse.kernels.linear import dots,gradients,multiply
from fastsparse.kernels.ops import SparseIndex
from fastsparse.kernels.vectors import at,axpy,kernel,load,numbers,store,zero

N = 16

@kernel
def in_registers(x, y, n):
    "`n` times a factor and a sum that never leave the registers"
    p = numbers(np.float32, x)
    a,b = load(N, p, 0),load(N, p, N)
    for i in range(n): a = axpy(at(p, 0), a, b)
    store(numbers(np.float32, y), 0, a)

@kernel
def from_table(x, col, val, y, n, n_times):
    "The sum of `n` rows of a table in any order, `n_times`"
    x,col,val,y = numbers(np.float32, x),numbers(np.int32, col),numbers(np.float32, val),numbers(np.float32, y)
    for i in range(n_times): store(y, 0, dots(val, col, 0, n, x, zero(N, y)))

def best(f): return min(times_in_turns([f])[0])

def axpys(kilobytes, width=128, n=1000):
    "From a table of so many kilobytes"
    g = torch.Generator().manual_seed(0)
    n_rows = kilobytes*256//width
    x,y,val = torch.randn(n_rows, width, generator=g),torch.empty(width),torch.randn(n, generator=g)
    col = torch.randint(n_rows, (n,), generator=g).int()
    f = from_table.compiled(N=width, F=np.float32, C=np.int32)
    return 2*width*n*100/best(lambda: f(x.data_ptr(), col.data_ptr(), val.data_ptr(), y.data_ptr(), n, 100))/1e9

def peak(width=128, n=100000):
    x,y = torch.ones(2*width),torch.empty(width)
    f = in_registers.compiled(N=width)
    return 2*width*n/best(lambda: f(x.data_ptr(), y.data_ptr(), n))/1e9

def product(sparsity, n_out=1024, n_in=784, rows=128):
    "Forward and backward of one layer, and the dense forward"
    g = torch.Generator().manual_seed(0)
    index = SparseIndex(torch.rand(n_out, n_in, generator=g)>=sparsity)
    v,b,x,dy,w = [torch.randn(s, generator=g) for s in ((len(index),),(n_out,),(rows,n_in),(rows,n_out),(n_out,n_in))]
    work = 2*len(index)*rows/1e9
    return dict(forward=work/best(lambda: multiply(index, v, x, b)), backward=2*work/best(lambda: gradients(index, v, x, dy)),
        dense=2*n_out*n_in*rows/1e9/best(lambda: F.linear(x, w, b)))

def roofline(quick=False):
    "Rows of what is done and how fast"
    rows = [dict(what='in registers', gflops=peak())]
    rows += [dict(what=f'rows of a table of {k} KB', gflops=axpys(k)) for k in (16, 512, 8192)]
    for s in (.9,) if quick else (.8,.9,.95,.98):
        rows += [dict(what=k if k!='dense' else 'dense forward', sparsity=s, gflops=v) for k,v in product(s).items()]
    return rows
