"""Vectorised CPU kernels for sparse linear layers, forward and backward

From above: loops, sizes of tables and blocks, memory, threads, and last the products of tensors; `multiply` and `gradients` are a layer's"""

# All loops multiply and add vectors of neighbouring numbers, `y += w*x`. So `tile_inputs` transposes `N` rows of a batch to a *table* in
# scratch memory, where a vector is one input of these rows. A live weight multiplies the row of the table in its column, and adds it to the
# sum of its output. A table of 1024 inputs by 128 rows takes 512 KB and stays in the second cache, where each number is used once for each
# live weight of its input. Backward, let X be the inputs and G the gradient of the outputs. Inputs have the gradient W'G, and a live weight
# the dot product of a row of X's table with a row of G's. Both read one row of G, so one pass over the transposed index computes both.
#
# Fixed when a kernel is compiled are the type `F` of numbers, the columns `N` of a table, the type `C` of an index's columns, whether
# outputs share inputs in fours (`FOURS`), the batch fits one table (`ONE`), and gradients of inputs are wanted (`DX`).

import numpy as np,os,threading,torch
from ..masks.selection import count_live
from .vectors import add,at,axpy,caches,fma,full,kernel,lane_products,load,numbers,put,store,sums16,take,total,turn16
from .vectors import vector_bytes,why_not,zero
from concurrent.futures import ThreadPoolExecutor
from functools import cache,lru_cache
from itertools import accumulate
from warnings import warn

# --- tables

F = np.float32
N = 16
C = np.int32
SUMS = 4
FOURS = False
ONE = True
DX = True

@kernel
def dots(val, col, j, e, x, a):
    "The vector `a` plus the live weights `j` to `e` times the rows of the table `x` in their columns"
    if SUMS==1:
        for q in range(j, e): a = axpy(at(val, q), load(N, x, at(col, q)*N), a)
        return a
    b = zero(N, x)  # a narrow sum waits for itself, so there are two or four
    if SUMS==2:
        m = j+(e-j)//2*2
        for q in range(j, m, 2):
            a = axpy(at(val, q), load(N, x, at(col, q)*N), a)
            b = axpy(at(val, q+1), load(N, x, at(col, q+1)*N), b)
        if m<e: a = axpy(at(val, m), load(N, x, at(col, m)*N), a)
        return add(a, b)
    c = zero(N, x)
    d = zero(N, x)
    m = j+(e-j)//4*4
    for q in range(j, m, 4):
        a = axpy(at(val, q), load(N, x, at(col, q)*N), a)
        b = axpy(at(val, q+1), load(N, x, at(col, q+1)*N), b)
        c = axpy(at(val, q+2), load(N, x, at(col, q+2)*N), c)
        d = axpy(at(val, q+3), load(N, x, at(col, q+3)*N), d)
    for q in range(m, e): a = axpy(at(val, q), load(N, x, at(col, q)*N), a)
    return add(add(a, b), add(c, d))

@kernel
def untile(t, y, i, ld, rows, width):
    "Columns of the table `t` as `rows` rows of `y`, `ld` apart from place `i` on"
    blocks = rows//16*16
    for r in range(0, blocks, 16):
        for k in range(0, width-15, 16): turn16(t, k*N+r, N, y, i+r*ld+k, ld)
    for r in range(rows):
        for k in range(width//16*16 if r<blocks else 0, width): put(y, i+r*ld+k, at(t, k*N+r))

@kernel
def tile_inputs(x, i, ld, rows, width, t):
    "`rows` rows of `x`, `ld` apart from place `i` on, as columns of the table `t`; columns without a row are zero"
    blocks = rows//16*16
    for k in range(0, width-15, 16):
        for r in range(0, blocks, 16): turn16(x, i+r*ld+k, ld, t, k*N+r, N)
    for k in range(width):
        for r in range(blocks if k<width//16*16 else 0, rows): put(t, k*N+r, at(x, i+r*ld+k))
        for r in range(rows, N): put(t, k*N+r, F(0))

# --- forward: `N` rows of inputs are copied to a table, `R` outputs are computed at a time, and copied back. If the table is larger than
# the first cache, inputs come in `nb` blocks of columns, each of which stays in that cache, and the `R` sums wait in scratch memory.

@kernel
def forward(x, starts, col, val, bias, y, r0, r1, o0, o1, n_in, n_out, nb, R, xt, yt):
    """Rows `r0` to `r1` of the batch and outputs `o0` to `o1`

    `x`: inputs; `starts`, `col`, `val`: where weights start by output and block, their columns, their values; `bias`: or 0; `y`: written.
    `nb`: blocks of inputs; `R`: outputs at a time; `xt`, `yt`: scratch memory for tables of the inputs and of `R` outputs."""
    starts = numbers(np.int32, starts)
    col = numbers(C, col)
    x = numbers(F, x)
    val = numbers(F, val)
    y = numbers(F, y)
    xt = numbers(F, xt)
    yt = numbers(F, yt)
    for r in range(r0, r1, N):
        m = min(N, r1-r)
        tile_inputs(x, r*n_in, n_in, m, n_in, xt)
        for o in range(o0, o1, R):
            w = min(R, o1-o)
            for k in range(nb):
                for i in range(0, w if FOURS else 0, 4): four_sums(starts, col, val, bias, o+i, k, nb, xt, yt, i*N)
                for i in range(0 if FOURS else w):
                    j = at(starts, (o+i)*nb+k)
                    e = at(starts, (o+i)*nb+k+1)
                    if k and j==e: continue
                    if k: a = load(N, yt, i*N)
                    else: a = full(N, at(numbers(F, bias), o+i)) if bias else zero(N, yt)
                    store(yt, i*N, dots(val, col, j, e, xt, a))
            untile(yt, y, r*n_out+o, n_out, m, w)

# --- backward: a row of X and its sum stay in registers. A dot product ends with a sum across a vector, which is slow, so 16 of them leave
# 16 sums each in a small table, which `sums16` adds up. `order` says where a weight stands in the forward's index: if the batch fits one
# table, values are looked up and gradients written there; if not, that is done once before and once after all tables.

@kernel
def finish(sums, l, dw, order, dv, q, v, first):
    "The `l` sums of products in the table `sums` are gradients of the weights from `q` on, `v` where they are kept in the transposed order"
    if not ONE and l==16: store(dv, v, sums16(sums, 0) if first else add(sums16(sums, 0), load(16, dv, v)))
    else:
        store(sums, 256, sums16(sums, 0))
        for s in range(l):
            if ONE: put(dw, at(order, q+s), at(sums, 256+s))
            else: put(dv, v+s, at(sums, 256+s)+(F(0) if first else at(dv, v+s)))

@kernel
def bias_sums(gt, db, n_out, first):
    "Add up the rows of a table"
    for o in range(n_out): put(db, o, total(load(N, gt, o*N))+(F(0) if first else at(db, o)))

@kernel
def backward(g, x, starts, row, order, val, dx, dw, db, rows, i0, i1, n_in, n_out, nb, R, gt, xt, dt, vt, dv, sums):
    """Inputs `i0` to `i1`, for all `rows` of the batch

    `g`, `x`: gradients of the outputs, and inputs.
    `starts`, `row`, `order`: the transposed index, in `nb` blocks of outputs; `val`: values of the weights.
    `dx`, `dw`, `db`: gradients of inputs, weights and bias, which are written; `db` may be 0.
    `R`: inputs at a time. Scratch memory: tables `gt` of the outputs' gradients, `xt` of `R` inputs, `dt` of their gradients,
    `vt`, `dv` values and their gradients in the transposed order, `sums` 17 times 16 numbers."""
    g = numbers(F, g)
    x = numbers(F, x)
    dx = numbers(F, dx)
    dw = numbers(F, dw)
    val = numbers(F, val)
    starts = numbers(np.int32, starts)
    row = numbers(np.int32, row)
    order = numbers(np.int32, order)
    gt = numbers(F, gt)
    xt = numbers(F, xt)
    dt = numbers(F, dt)
    vt = numbers(F, vt)
    dv = numbers(F, dv)
    sums = numbers(F, sums)
    q0 = at(starts, i0*nb)
    q1 = at(starts, i1*nb)
    if not ONE and DX:
        for q in range(q0, q1): put(vt, q-q0, at(val, at(order, q)))
    for r in range(0, rows, N):
        m = min(N, rows-r)
        tile_inputs(g, r*n_out, n_out, m, n_out, gt)
        if db: bias_sums(gt, numbers(F, db), n_out, r==0)
        for i in range(i0, i1, R):
            w = min(R, i1-i)
            tile_inputs(x, r*n_in+i, n_in, m, w, xt)
            for k in range(nb): input_block(starts, row, order, val, dw, i, w, k, nb, q0, r==0, gt, xt, dt, vt, dv, sums)
            if DX: untile(dt, dx, r*n_in+i, n_in, m, w)
    if not ONE:
        for q in range(q0, q1): put(dw, at(order, q), at(dv, q-q0))

@kernel
def input_block(starts, row, order, val, dw, i, w, k, nb, q0, first, gt, xt, dt, vt, dv, sums):
    """Block `k` of outputs for the `w` inputs from `i` on, for one table of rows

    `q0`: the first weight of this call, which is number 0 of `vt` and `dv`; `first`: is it the first table? The others as in `backward`."""
    for s in range(w):
        j = at(starts, (i+s)*nb+k)
        e = at(starts, (i+s)*nb+k+1)
        if k and j==e: continue
        a = load(N, dt, s*N) if k else zero(N, dt)
        xi = load(N, xt, s*N)
        for b in range(j, e, 16):
            l = min(16, e-b)
            for q in range(l):
                gi = load(N, gt, at(row, b+q)*N)
                if DX: a = axpy(at(val, at(order, b+q)) if ONE else at(vt, b+q-q0), gi, a)
                store(sums, 16*q, lane_products(xi, gi))
            finish(sums, l, dw, order, dv, b, b-q0, first)
        if DX: store(dt, s*N, a)

# --- one row of a batch needs no table: each live weight, its column and its input are read once, eight inputs to a vector

@kernel
def one_row(x, starts, col, val, bias, y, o0, o1, n_in, n_out, rows):
    "Outputs `o0` to `o1` of few rows"
    x = numbers(F, x)
    starts = numbers(np.int32, starts)
    col = numbers(C, col)
    val = numbers(F, val)
    y = numbers(F, y)
    for r in range(rows):
        for o in range(o0, o1):
            a = zero(8, x)
            j = at(starts, o)
            e = at(starts, o+1)
            m = j+(e-j)//8*8
            for q in range(j, m, 8): a = fma(load(8, val, q), take(8, x, r*n_in, col, q), a)
            s = total(a)
            for q in range(m, e): s += at(val, q)*at(x, r*n_in+at(col, q))
            put(y, r*n_out+o, s+at(numbers(F, bias), o) if bias else s)

# --- four outputs that share their inputs, as in masks of structure 'block 4x1': a row of the table is loaded once and multiplied by four
# weights, for four sums in registers, of half the width. At sparsity .9 they are 1.2 to 1.6 times as fast as the kernels above.

@kernel
def four_sums(starts, col, val, bias, o, k, nb, xt, yt, i):
    "The sums of outputs `o` to `o+4` from place `i` of `yt` on, with block `k` of their inputs added; block 0 begins with the bias"
    s = o*nb+k
    j = at(starts, s)
    e = at(starts, s+1)
    p = at(starts, s+nb)
    l = at(starts, s+2*nb)
    m = at(starts, s+3*nb)
    if k and j==e: return
    if k: a,b,c,d = load(N, yt, i),load(N, yt, i+N),load(N, yt, i+2*N),load(N, yt, i+3*N)
    elif bias:
        v = numbers(F, bias)
        a = full(N, at(v, o))
        b = full(N, at(v, o+1))
        c = full(N, at(v, o+2))
        d = full(N, at(v, o+3))
    else: a,b,c,d = zero(N, yt),zero(N, yt),zero(N, yt),zero(N, yt)
    for q in range(e-j):
        x = load(N, xt, at(col, j+q)*N)
        a = axpy(at(val, j+q), x, a)
        b = axpy(at(val, p+q), x, b)
        c = axpy(at(val, l+q), x, c)
        d = axpy(at(val, m+q), x, d)
    store(yt, i, a)
    store(yt, i+N, b)
    store(yt, i+2*N, c)
    store(yt, i+3*N, d)

# The backward goes over outputs too, four at a time. `H` numbers of each of their rows of G fill half of the registers.
H = 16  # columns of a table whose numbers of four outputs stay in registers

@kernel
def backward4(g, x, starts, col, val, dx, dw, db, rows, k0, k1, width, n_in, n_out, nb, gt, xt, dt, sums):
    """Blocks `k0` to `k1` of `width` inputs, for all `rows` of the batch

    `starts`, `col`, `val`: the index, in `nb` blocks of inputs, and the values; `g`, `x`, `dx`, `dw`, `db` as in `backward`.
    Scratch memory: tables `gt` of the outputs' gradients, `xt` of a block of inputs, `dt` of their gradients, and `sums`,
    65 times 16 numbers."""
    g = numbers(F, g)
    x = numbers(F, x)
    dx = numbers(F, dx)
    dw = numbers(F, dw)
    starts = numbers(np.int32, starts)
    col = numbers(C, col)
    gt = numbers(F, gt)
    xt = numbers(F, xt)
    dt = numbers(F, dt)
    sums = numbers(F, sums)
    val = numbers(F, val)
    for r in range(0, rows, N):
        m = min(N, rows-r)
        tile_inputs(g, r*n_out, n_out, m, n_out, gt)
        if db: bias_sums(gt, numbers(F, db), n_out, r==0)
        for k in range(k0, k1):
            i = k*width
            w = min(width, n_in-i)
            tile_inputs(x, r*n_in+i, n_in, m, w, xt)
            for s in range(w): store(dt, s*N, zero(N, dt))
            for o in range(0, n_out, 4): four_gradients(starts, col, val, dw, o*nb+k, nb, i, o*N, r==0, gt, xt, dt, sums)
            if DX: untile(dt, dx, r*n_in+i, n_in, m, w)

@kernel
def four_gradients(starts, col, val, dw, s, nb, i, o, first, gt, xt, dt, sums):
    """Gradients of a block of inputs, from input `i` on, and of the weights to four outputs, which are at `o` of `gt`

    `s`: where the weights of the first output and this block begin in `starts`; `first`: is it the first table of rows?"""
    j = at(starts, s)
    e = at(starts, s+1)
    k = at(starts, s+nb)
    l = at(starts, s+2*nb)
    m = at(starts, s+3*nb)
    if j==e: return
    for z in range(0, e-j, 16):
        n = min(16, e-j-z)
        for h in range(0, N, H):
            a = load(H, gt, o+h)
            b = load(H, gt, o+N+h)
            c = load(H, gt, o+2*N+h)
            d = load(H, gt, o+3*N+h)
            for q in range(n):
                x = load(H, xt, (at(col, j+z+q)-i)*N+h)
                add_products(sums, 16*q, x, a, h)
                add_products(sums, 256+16*q, x, b, h)
                add_products(sums, 512+16*q, x, c, h)
                add_products(sums, 768+16*q, x, d, h)
            for q in range(n if DX else 0):
                p = (at(col, j+z+q)-i)*N+h
                s = axpy(at(val, l+z+q), c, axpy(at(val, m+z+q), d, load(H, dt, p)))
                store(dt, p, axpy(at(val, j+z+q), a, axpy(at(val, k+z+q), b, s)))
        add_sums(sums, 0, n, dw, j+z, first)
        add_sums(sums, 256, n, dw, k+z, first)
        add_sums(sums, 512, n, dw, l+z, first)
        add_sums(sums, 768, n, dw, m+z, first)

# Fewer than sixteen dot products are added up at the end of `sums`, in the order of sixteen: results don't depend on where blocks end.
@kernel
def add_products(sums, i, x, y, more):
    "Put the 16 sums of `x*y` at `i` of `sums`, or add them if there is `more` there"
    store(sums, i, add(load(16, sums, i), lane_products(x, y)) if more else lane_products(x, y))

@kernel
def add_sums(sums, i, n, dw, q, first):
    "Add the `n` dot products in the table at `i` of `sums` to the gradients from `q` on"
    if n==16: store(dw, q, sums16(sums, i) if first else add(sums16(sums, i), load(16, dw, q)))
    else:
        for s in range(0 if first else n): put(sums, 1024+s, at(dw, q+s))
        store(sums, 1024, sums16(sums, i) if first else add(sums16(sums, i), load(16, sums, 1024)))
        for s in range(n): put(dw, q+s, at(sums, 1024+s))

# --- lists of live weights, in a nanosecond or two for each. `list_live` has no branch: each place of the mask writes its column where the
# next live one belongs, and only a live one advances that place. The transposed index is a counting sort by columns.

@kernel
def list_live(mask, n, width, crow, col):
    "Where the live weights of each of `n` rows of `mask` start, and their columns; `col` has room for one more"
    mask = numbers(np.int8, mask)
    crow = numbers(np.int32, crow)
    col = numbers(np.int32, col)
    q = 0
    for r in range(n):
        put(crow, r, q)
        for c in range(width):
            put(col, q, c)
            q += at(mask, r*width+c)
    put(crow, n, q)

@kernel
def turn_index(crow, col, n, m, tcrow, row, order):
    "Of `n` rows and `m` columns: where each column starts (`tcrow` is zero before), and the rows and places of its weights"
    crow = numbers(np.int32, crow)
    col = numbers(np.int32, col)
    tcrow = numbers(np.int32, tcrow)
    row = numbers(np.int32, row)
    order = numbers(np.int32, order)
    for q in range(at(crow, n)): put(tcrow, at(col, q)+1, at(tcrow, at(col, q)+1)+1)
    for c in range(m): put(tcrow, c+1, at(tcrow, c)+at(tcrow, c+1))
    for r in range(n):
        for q in range(at(crow, r), at(crow, r+1)):
            c = at(col, q)
            p = at(tcrow, c)
            put(row, p, r)
            put(order, p, q)
            put(tcrow, c, p+1)
    for c in range(m, 0, -1): put(tcrow, c, at(tcrow, c-1))
    put(tcrow, 0, 0)

@kernel
def block_starts(crow, col, n, width, nb, starts):
    "Where the weights of each of `n` rows start in each of `nb` blocks of `width` columns, and where the last ones end"
    crow = numbers(np.int32, crow)
    col = numbers(C, col)
    starts = numbers(np.int32, starts)
    for r in range(n):
        k = 0
        for q in range(at(crow, r), at(crow, r+1)):
            while k<nb and at(col, q)>=k*width:
                put(starts, r*nb+k, q)
                k += 1
        for b in range(k, nb): put(starts, r*nb+b, at(crow, r+1))
    put(starts, n*nb, at(crow, n))

# --- how large tables and blocks are, which follows from the caches and from the live weights that an output has in a block
# - A sum takes 8 registers: 128 float32s with 64 bytes a vector, 64 with 32. The backward has two vectors and a third that they read, so where
#   there are 16 registers, as with 32 bytes a vector, its vectors take 4. Small batches take the next power of two.
# - Below a density of 13 %, a table is made narrow enough for a part of the second cache, and isn't cut forward. Backward it is cut where
#   an output has more than 256 live weights and the table doesn't fit: a block of it is then half of the second cache, or a quarter where
#   the batch fits one table, since gradients of weights are then written in no order.
# - In denser matrices a block fills the first cache, or holds as many rows as give an output `2048/N` live weights on average (twice that
#   backward), whichever is more, or all rows if that is most of them. Backward a block takes at most an eighth of the second cache.
# - Where outputs share inputs in fours, a forward table has half the columns, since four sums are in registers, and a block of it fills the
#   second cache. In the backward a block of inputs with its gradients fills at most half of it.
# With caches of 32 KB and 1 MB this came within a tenth of the best of twenty settings, from 80 to 98 % sparsity.

def n_sums(
    width:int, # Bytes of a sum
) -> int: # 1, 2 or 4
    "How many sums of an output are in registers at once: they take eight, or one sum does"
    return next((k for k in (4,2) if k*width<=8*vector_bytes()), 1)

@lru_cache(1024)
def tiling(
    rows:int, # Of the batch
    n:int, # Rows of the table that is jumped over: inputs forward, outputs backward
    density:float, # Fraction of weights that live
    back=False, # Is it for the backward pass?
    size:int=4, # Bytes a number
    fours=False, # Do outputs share inputs in fours?
) -> tuple: # Columns of a table, rows of it in a block, results that are made together
    "The sizes of tables and blocks for a product"
    l1,l2 = caches()
    few = vector_bytes()<64  # registers: 16, not 32
    taken = 8
    if fours and not back: taken = 2 if few else 4
    elif back and few and not fours: taken = 4
    widest = max(taken*vector_bytes()//size, 16)
    N = next((k for k in (16,32,64) if rows<=k<=widest), widest)
    if fours: return N,max(min(n, l2//((4 if back else 1)*N*size)), 1),128
    if density<.13:
        while N>(64 if back else 32) and n*N*size>(3*l2 if back else l2)//8: N //= 2
        block = l2//((2 if rows>N else 4)*N*size) if back and n*density>256 else n
        R = 128
    else:
        block = max((4096 if back else 2048)/(N*density), l1/(N*size))
        R = 256
        if back and n*N*size>l2//4: block = min(block, l2/(8*N*size))
    return N,max(n, 1) if block>=.6*n else int(block),R

# --- scratch memory, of each thread its own. NumPy asks for large pages for pieces of 4 MB and more, which makes reading a table 10 to 20 %
# faster. Tests put guard words around each array that compiled code writes.

class Scratch(threading.local):
    n = 0
    def __call__(self, *sizes): # Bytes
        "Addresses of memory that this thread may write until it asks again"
        ends = [0, *accumulate(-(-n//64)*64 for n in sizes)]
        if ends[-1]>self.n:
            self.n = max(ends[-1], 2**22)
            self.piece = np.zeros(self.n+64, np.uint8)
            place = self.piece.ctypes.data
            self.piece = self.piece[-place%64:]
            self.start = place+-place%64
        return [self.start+i for i in ends[:-1]]

_scratch = Scratch()

def empty(shape, dtype):
    "A tensor for compiled code to write"
    return torch.empty(shape, dtype=dtype)

def address(a):
    "The address of a tensor or an array; 0 for None"
    return 0 if a is None else a.data_ptr() if isinstance(a, torch.Tensor) else a.ctypes.data

def call(
    f, # A compiled kernel
    *args, # Contiguous tensors and arrays, None and numbers
    scratch=(), # Bytes of each scratch array that it takes after these
):
    "Call compiled code with addresses"
    f(*[a if type(a) is int else address(a) for a in args], *(_scratch(*scratch) if scratch else ()))

# --- threads work on rows or outputs of their own forward, and on inputs of their own backward: results are the same for any number.
# A thread is often woken on the caller's core, where two take turns until the system moves one, so small products use one thread.

@cache
def _pool(pid): return ThreadPoolExecutor(os.cpu_count())

_alone = 2**22  # multiplications that one thread makes sooner than two

def split_work(f, n, unit, work):
    "Call `f(start, stop)` for shares of `n`, in multiples of `unit`: a thread for each `_alone` of the `work` multiplications"
    k = min(torch.get_num_threads(), -(-n//unit), work//_alone)
    if k<2: return f(0, n)
    ends = [min(round(-(-n//unit)*i/k)*unit, n) for i in range(k+1)]
    others = [_pool(os.getpid()).submit(f, *o) for o in zip(ends[1:], ends[2:])]
    f(*ends[:2])
    for o in others: o.result()

# --- products of tensors: of one type, float32 where they are narrower; results return to the type of the inputs

kinds = {torch.float:np.float32, torch.double:np.float64}
_taken = {*kinds, torch.bfloat16, torch.half}

@cache
def _run():
    "Do kernels run on this computer? If not, warns once and says why"
    if why := why_not(): warn(why)
    return not why

def kernels_take(*ts): # Tensors
    "Do kernels run on this computer, and for tensors like these?"
    return all(t.is_cpu and t.dtype in _taken for t in ts) and _run()

def _as_kernel_type(t, dtype=None):
    "`t` contiguous and of a type that kernels have, `dtype` if given"
    if dtype is None: dtype = t.dtype if t.dtype in kinds else torch.float
    return (t if t.dtype==dtype else t.detach().to(dtype)).contiguous()

def _as_type(t, like): return t if t is None or t.dtype==like.dtype else t.to(like.dtype)

def _column_type(col): return np.int16 if col.dtype==torch.int16 else np.int32

def _starts_of(index, width):
    "`block_starts` of an index"
    n = index.shape[0]
    n_blocks = -(-index.shape[1]//width)
    if n_blocks<2: return index.crow,1
    starts = index.starts.get(width)
    if starts is None:
        starts = empty((n*n_blocks+1,), torch.int)
        call(block_starts.compiled(C=_column_type(index.col)), index.crow, index.col, n, width, n_blocks, starts)
        index.starts[width] = starts  # another thread may read them
    return starts,n_blocks

def list_rows(mask):
    "Where the live weights of each row of a bool matrix start, and their columns"
    mask,(n,width) = mask.contiguous(),mask.shape
    crow = empty((n+1,), torch.int)
    col = empty((count_live(mask)+1,), torch.int)
    call(list_live.compiled(), mask, n, width, crow, col)
    return crow,col[:-1]

def transpose_index(index):
    "Where each column starts, and the rows and places of its weights"
    (n,m),size = index.shape,(len(index),)
    crow = empty((m+1,), torch.int).zero_()
    row = empty(size, torch.int)
    order = empty(size, torch.int)
    call(turn_index.compiled(), index.crow, index.col.int(), n, m, crow, row, order)
    return crow,row,order

def multiply(
    index, # `SparseIndex` of the weight
    values:torch.Tensor, # Live weights, in the index's order
    x:torch.Tensor, # Rows of inputs
    bias:torch.Tensor=None, # One number an output
) -> torch.Tensor: # Rows of outputs, of the type of `x`
    "`F.linear` with live weights only, without autograd"
    (n_out,n_in) = index.shape
    rows = x.shape[0]
    n = len(index)
    if x.shape!=(rows,n_in) or values.numel()!=n:
        raise ValueError(f"inputs are {tuple(x.shape)} and weights {values.numel()}; the index needs (rows, {n_in}) and {n}")
    xs = _as_kernel_type(x)
    work = n*rows
    dtype = xs.dtype
    columns = _column_type(index.col)
    size = xs.element_size()
    if bias is not None: bias = _as_kernel_type(bias if bias.shape==(n_out,) else bias.expand(n_out), dtype)
    v = _as_kernel_type(values, dtype)
    y = empty((rows,n_out), dtype)
    kind = kinds[dtype]
    if rows<3:
        f = one_row.compiled(F=kind, C=columns)
        split_work(lambda o0, o1: call(f, xs, index.crow, index.col, v, bias, y, o0, o1, n_in, n_out, rows), n_out, 256, work)
        return _as_type(y, x)
    N,fb,R = tiling(rows, n_in, n/max(n_in*n_out, 1), False, size, index.fours)
    (starts,nb) = _starts_of(index, fb)
    f = forward.compiled(F=kind, N=N, C=columns, SUMS=n_sums(N*size), FOURS=index.fours)
    def part(*of): call(f, xs, starts, index.col, v, bias, y, *of, n_in, n_out, nb, R, scratch=(n_in*N*size,R*N*size))
    if rows>N: split_work(lambda r0, r1: part(r0, r1, 0, n_out), rows, N, work)
    else: split_work(lambda o0, o1: part(0, rows, o0, o1), n_out, 64, work)
    return _as_type(y, x)

def gradients(
    index, # `SparseIndex` of the weight
    values:torch.Tensor, # Live weights, in the index's order; None if no gradients of inputs are wanted
    x:torch.Tensor, # Rows of inputs
    g:torch.Tensor, # Rows of gradients of the outputs
    bias=True, # Compute the gradient of the bias?
) -> tuple: # Gradients of inputs, live weights and bias; None where not wanted
    "The gradients of `multiply`"
    (n_out,n_in) = index.shape
    rows = x.shape[0]
    n = len(index)
    inputs = values is not None
    if x.shape!=(rows,n_in) or g.shape!=(rows,n_out) or inputs and values.numel()!=n:
        shapes = [tuple(t.shape) for t in (x,g,values) if t is not None]
        raise ValueError(f"inputs, gradients and weights are {shapes}; the index needs (rows, {n_in}), (rows, {n_out}) and ({n},)")
    xs = _as_kernel_type(x)
    dtype,size = xs.dtype,xs.element_size()
    v = _as_kernel_type(values, dtype) if inputs else None
    gs = _as_kernel_type(g, dtype)
    dx = empty(x.shape, dtype) if inputs else None
    dw = empty((n,), dtype)
    db = empty((n_out,), dtype) if bias else None
    if not rows or not n_in:
        dw.zero_()
        if bias: db.copy_(gs.sum(0))
        return _as_type(dx, x),_as_type(dw, x),_as_type(db, x)
    settings = dict(F=kinds[dtype], DX=inputs)
    N,width,R = tiling(rows, n_in if index.fours else n_out, n/max(n_in*n_out, 1), True, size, index.fours)
    if index.fours:
        width = max(1, min(width, -(-n_in//torch.get_num_threads())))
        (starts,nb) = _starts_of(index, width)
        held = min(N, 256//size if vector_bytes()==64 else 16)
        f = backward4.compiled(N=N, H=held, C=_column_type(index.col), **settings)
        def part(k0, k1):
            call(f, gs, xs, starts, index.col, v, dx, dw, None if k0 else db, rows, k0, k1, width, n_in, n_out, nb,
                scratch=(n_out*N*size,width*N*size,width*N*size,1040*size))
        split_work(part, nb, 1, n*rows)
    else:
        t,one = index.t,rows<=N
        (starts,nb) = _starts_of(t, width)
        f = backward.compiled(N=N, ONE=one, **settings)
        def part(i0, i1):
            kept = 0 if one else n if i1-i0==n_in else int(t.crow[i1]-t.crow[i0])
            call(f, gs, xs, starts, t.col, t.order, v, dx, dw, None if i0 else db, rows, i0, i1, n_in, n_out, nb, R,
                scratch=(n_out*N*size,R*N*size,R*N*size,kept*size,kept*size,272*size))
        split_work(part, n_in, 64, n*rows)
    return _as_type(dx, x),_as_type(dw, x),_as_type(db, x)
