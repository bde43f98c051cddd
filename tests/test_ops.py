"The sparse products against dense ones: every shape and type, values and gradients, by kernels and by torch"
import gc,weakref
import numpy as np,pytest,torch,torch.nn.functional as F
from fastsparse.kernels.ops import sparse_linear,SparseIndex
from fastsparse.live.tensor import Cell,LiveParameter
from fastsparse.masks.selection import sparse_mask
from hypothesis import given,settings,strategies as st
from torch import nn
from torch.autograd import gradcheck

@pytest.fixture(autouse=True, params=['kernels','torch'])
def route(request, monkeypatch):
    "Each test runs twice: with kernels, where they run, and with torch's products"
    if request.param=='torch': monkeypatch.setattr('fastsparse.kernels.ops.kernels_take', lambda *ts: False)
    return request.param

def make(n_out, n_in, sparsity=.7, dtype=torch.double, seed=0):
    "A mask, its index, the live values and the dense weight"
    g = torch.Generator().manual_seed(seed)
    mask = sparse_mask((n_out,n_in), sparsity, g)
    dense = torch.randn(n_out, n_in, generator=g).to(dtype)*mask
    return mask,SparseIndex(mask),dense[mask],dense

def batch(*shape, dtype=torch.double, seed=1): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

def both(x, values, index, dense, bias):
    "Output and gradients of inputs, live weights and bias: sparse and dense"
    out = []
    for f,w in ((lambda *a: sparse_linear(*a[:2], index, a[2]), values), (F.linear, dense)):
        args = [t.detach().clone().requires_grad_() if t is not None else None for t in (x,w,bias)]
        y = f(*args)
        (y.float()**2).sum().backward()
        out.append([y.detach(), *[a.grad for a in args if a is not None]])
    return out

def assert_same(x, mask, index, values, dense, bias, **tol):
    mine,theirs = both(x, values, index, dense, bias)
    theirs[2] = theirs[2][mask]
    for a,b in zip(mine, theirs):
        assert a.shape==b.shape and a.dtype==b.dtype
        torch.testing.assert_close(a, b, **tol)

@settings(max_examples=40)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6), st.floats(0, 1))
def test_index_is_the_mask(n_out, n_in, seed, density):
    "Rows, columns and their transposes are those of numpy's `nonzero`, also with empty rows, columns and matrices"
    mask = np.random.default_rng(seed).random((n_out,n_in))<density
    index = SparseIndex(torch.from_numpy(mask))
    for o,m in ((index,mask), (index.t,mask.T)):
        rows,cols = m.nonzero()
        assert o.rows.tolist()==rows.tolist() and o.col.tolist()==cols.tolist()
        assert o.crow.tolist()==[0,*np.cumsum(m.sum(1)).tolist()]
        assert o.shape==m.shape and len(o)==m.sum()
    values = torch.arange(len(index))
    assert index.dense(values)[torch.from_numpy(mask)].equal(values)
    assert values[index.t.order].equal(index.dense(values).t()[torch.from_numpy(mask.T)])
    assert index.t.t.col.equal(index.col) and index.t.t.crow.equal(index.crow)

@pytest.mark.parametrize('n_in', [2**16-1,2**16,2**16+1,2**17])
def test_index_of_a_wide_matrix(n_in):
    "Columns that don't fit into 16 bits are transposed as others are"
    mask = np.random.default_rng(0).random((3,n_in))<.01
    mask[:,-1] = True
    t,(rows,cols) = SparseIndex(torch.from_numpy(mask)).t,mask.T.nonzero()
    assert t.rows.tolist()==rows.tolist() and t.col.tolist()==cols.tolist()

def test_an_index_says_its_size(): assert str(SparseIndex(torch.eye(3,4).bool()))=='SparseIndex(3 x 4, 3 live)'

def test_an_index_is_freed_at_once():
    "No memory waits for the garbage collector when an update replaces an index and its transpose"
    index = SparseIndex(torch.ones(3, 4, dtype=torch.bool))
    refs = [weakref.ref(o) for o in (index, index.t, index.t.t)]
    gc.disable()
    try:
        del index
        assert [o() for o in refs]==[None]*3
    finally: gc.enable()

def test_later_dimensions_of_a_mask_count_as_one():
    "A mask of a convolution is a matrix with a column for each input of an output"
    mask = sparse_mask((3,2,2,2), .5, torch.Generator().manual_seed(0))
    assert SparseIndex(mask).shape==(3,8) and SparseIndex(mask).col.equal(SparseIndex(mask.flatten(1)).col)

@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 9), st.floats(0, 1), st.integers(0, 99), st.booleans())
def test_linear_is_the_dense_one(n_out, n_in, rows, sparsity, seed, with_bias):
    "Values and all three gradients, for ragged and empty rows and columns, no row, one row, and no live weight"
    mask,index,values,dense = make(n_out, n_in, sparsity, seed=seed)
    assert_same(batch(rows, n_in), mask, index, values, dense, batch(n_out, seed=2) if with_bias else None)

@pytest.mark.parametrize('dtype,tol', [(torch.float,1e-4), (torch.double,1e-10), (torch.bfloat16,.25)])
@pytest.mark.parametrize('shape', [(1,), (130,), (3,5), (2,3,4), ()])
def test_types_and_leading_dimensions(dtype, tol, shape):
    "Result and gradients have the input's type and shape, whatever comes before the features"
    mask,index,values,dense = make(33, 20, dtype=dtype)
    assert_same(batch(*shape, 20, dtype=dtype), mask, index, values, dense, batch(33, dtype=dtype), rtol=tol, atol=tol)

@pytest.mark.parametrize('view', [lambda x: x.t(), lambda x: x[:,::2], lambda x: x[:,3:4].expand(-1, 12), lambda x: x.t().unflatten(0, (2,6))])
def test_layouts_of_the_input(view):
    "Transposed, strided and expanded inputs give what copies of them give"
    x = view(batch(12, 12))
    mask,index,values,dense = make(7, x.shape[-1])
    assert_same(x, mask, index, values, dense, None)

@pytest.mark.parametrize('rows', [1,2,7])
@pytest.mark.parametrize('bias', [True,False])
def test_gradcheck(rows, bias):
    "Gradients agree with finite differences in float64"
    _,index,values,_ = make(5, 6)
    args = [batch(rows, 6), values, batch(5, seed=2) if bias else None]
    args = [a if a is None else a.clone().requires_grad_() for a in args]
    assert gradcheck(lambda x, v, b: sparse_linear(x, v, index, b), args)

def test_tap_sees_the_dense_gradient():
    "With a grad_hook the live weights' gradient is unchanged, and the product of what it gets is the dense layer's; frozen weights don't call it"
    mask,index,values,dense = make(9, 8)
    x,seen = batch(4, 8),[]
    grad_hook = lambda *args: seen.append(args)
    for v in (values.clone().requires_grad_(), values): sparse_linear(x.clone().requires_grad_(), v, index, grad_hook=grad_hook).pow(2).sum().backward()
    w,plain = [t.detach().clone().requires_grad_() for t in (dense, values)]
    F.linear(x, w).pow(2).sum().backward()
    sparse_linear(x, plain, index).pow(2).sum().backward()
    assert len(seen)==1
    gT,xT = seen[0]
    torch.testing.assert_close(gT@xT.t(), w.grad)
    torch.testing.assert_close((gT@xT.t())[mask], plain.grad)

def test_second_derivatives_are_those_of_the_dense_layer():
    "With any of its inputs frozen; many gradients at once are refused"
    w,index,values,mask = make(5, 6)
    for needs in ((1,1,1), (1,0,0), (0,1,0)):
        found = []
        for live in (True,False):
            x,b,v = [t.double().requires_grad_(bool(n)) for t,n in zip((batch(2, 6), batch(5, seed=1), values.detach()), needs)]
            dense = torch.zeros(30, dtype=torch.double).scatter(0, index.places, v).view(5, 6)
            y = sparse_linear(x, v, index, b) if live else F.linear(x, dense, b)
            ins = [t for t in (x,v,b) if t.requires_grad]
            first = torch.autograd.grad(y.pow(3).sum(), ins, create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(t.sin().sum() for t in first), ins)])
        for mine,torchs in zip(*found): torch.testing.assert_close(mine, torchs)
    x = batch(2, 6).requires_grad_()
    y = sparse_linear(x, values, index)
    with pytest.raises(RuntimeError, match='is_grads_batched=True'): torch.autograd.grad(y, x, batch(3, 2, 5), is_grads_batched=True)

def test_changed_values_are_noticed():
    "Writing to the live weights between forward and backward raises, as for a dense layer"
    _,index,values,_ = make(5, 6)
    v = values.clone().requires_grad_()
    y = sparse_linear(batch(2, 6).requires_grad_(), v, index).sum()
    with torch.no_grad(): v.add_(1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'): y.backward()

def test_autocast():
    "Under autocast the product has autocast's type, and gradients have their parameters'"
    _,index,values,dense = make(16, 12, dtype=torch.float)
    v,x = values.clone().requires_grad_(),batch(5, 12, dtype=torch.float)
    with torch.autocast('cpu', torch.bfloat16): y,ref = sparse_linear(x, v, index),F.linear(x, dense)
    assert y.dtype==ref.dtype==torch.bfloat16
    torch.testing.assert_close(y, ref, rtol=.05, atol=.05)
    y.float().sum().backward()
    assert v.grad.dtype==torch.float

def test_wrong_width_is_refused():
    "An input that doesn't fit is named"
    _,index,values,_ = make(5, 6)
    with pytest.raises(ValueError, match='has 5 features, and must have 6'): sparse_linear(batch(3, 5), values, index)
    with pytest.raises(ValueError, match=f'{len(index)-1} weights are given, and {len(index)} live'): sparse_linear(batch(3, 6), values[1:], index)
    with pytest.raises(ValueError, match='the input is of type torch.float32, and the weight of torch.float64'): sparse_linear(batch(3, 6).float(), values, index)

@pytest.mark.parametrize('n', [0,2])
@pytest.mark.parametrize('spatial,stride', [((6,5),(1,1)), ((6,5),(2,2)), ((7,4),(2,1)), ((9,),(2,)), ((3,4,5),(1,)), ((6,5),(3,))])
@pytest.mark.parametrize('channels_last', [False,True])
def test_conv_is_the_dense_one(n, spatial, stride, channels_last):
    "Kernels of one pixel in one, two and three dimensions, strides, both memory formats, no images, with gradients"
    mask,index,values,dense = make(7, 6)
    x,bias = batch(n, 6, *spatial),batch(7, seed=3)
    if channels_last and len(spatial)==2: x = x.to(memory_format=torch.channels_last)
    conv,shape = {1:F.conv1d, 2:F.conv2d, 3:F.conv3d}[len(spatial)],(7,6)+(1,)*len(spatial)
    steps,res = stride if len(stride)>1 else stride[0],[]
    for w in LiveParameter(Cell(values, index, shape), True),nn.Parameter(dense.view(shape)):
        x,bias = [t.detach().clone().requires_grad_() for t in (x,bias)]
        y = conv(x, w, bias, stride=steps)
        y.pow(2).sum().backward()
        res.append([y.detach(), x.grad, w.grad.cell.values if isinstance(w, LiveParameter) else w.grad.view(7, 6)[mask], bias.grad])
        if n and channels_last and stride==(1,1): assert y.is_contiguous(memory_format=torch.channels_last)
    for a,b in zip(*res): torch.testing.assert_close(a, b)

@pytest.mark.parametrize('sparsity', [0.,1.])
def test_all_and_nothing(sparsity):
    "Every weight alive is a dense layer; none alive gives the bias, and zero gradients"
    mask,index,values,dense = make(6, 5, sparsity)
    assert_same(batch(4, 5), mask, index, values, dense, batch(6, seed=2))

def test_threads_change_nothing(monkeypatch):
    "Outputs and gradients are the same to the bit with one thread and with three"
    monkeypatch.setattr('fastsparse.kernels.linear._alone', 2**12)
    def run(n):
        torch.set_num_threads(n)
        _,index,values,_ = make(300, 200, .9, torch.float)
        res = []
        for rows in (500,1):
            args = [t.clone().requires_grad_() for t in (batch(rows, 200, dtype=torch.float), values, batch(300, dtype=torch.float))]
            y = sparse_linear(*args[:2], index, args[2])
            y.backward(batch(rows, 300, dtype=torch.float))
            res += [y.detach(), *[a.grad for a in args]]
        return res
    before = torch.get_num_threads()
    try: one,three = run(1),run(3)
    finally: torch.set_num_threads(before)
    for a,b in zip(one, three): assert a.equal(b)

def test_frozen_weights_keep_no_inputs():
    "Values without a gradient need the inputs for nothing, and save only themselves"
    _,index,values,_ = make(5, 6)
    for v,n in ((values, 1), (values.clone().requires_grad_(), 2)):
        x = batch(4, 6).requires_grad_()
        y = sparse_linear(x, v, index)
        node = y.grad_fn
        while '_Linear' not in type(node).__name__: node = node.next_functions[0][0]
        assert sum(t is not None for t in node.saved_tensors)==n
        y.sum().backward()
        assert x.grad is not None
