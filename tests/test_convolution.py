"Convolutions of live weights give what dense convolutions of masked weights give"
import pytest,torch
from fastsparse.kernels import convolution as convolutions
from fastsparse.live.compute import reasons,sparse_compute
from fastsparse.kernels.convolution import ConvIndex,padding_of,sparse_conv2d
from fastsparse.model.sparsify import sparsify_model
from fastsparse.kernels.vectors import why_not
from torch import nn
from torch.nn import functional as nnf

pytestmark = pytest.mark.skipif(bool(why_not()), reason='no Numba')

cases = [ # images, channels in, out, rows, columns, kernel, stride, padding, dilation
    (16,3,5,8,8,(3,3),1,1,1), (16,4,6,16,16,(3,3),1,1,1), (32,4,6,16,17,(3,3),1,1,1), (5,2,3,7,9,(3,3),1,1,1),
    (37,3,4,6,5,(3,3),1,0,1), (16,3,4,32,32,(3,3),2,1,1), (16,3,4,9,11,(3,3),2,1,1), (20,3,4,12,10,(1,1),2,0,1),
    (16,4,4,8,8,(1,1),1,0,1), (16,2,3,20,21,(7,7),2,3,1), (17,2,3,12,12,(3,3),1,2,2), (16,2,3,13,12,(5,3),(2,1),(2,1),(1,2)),
    (16,2,2,4,4,(2,2),2,0,1), (16,2,2,3,3,(3,3),1,0,1), (18,2,2,1,1,(3,3),1,1,1), (16,2,3,10,10,(3,3),3,1,1),
    (1,2,3,5,40,(1,3),1,(0,1),1), (16,3,4,20,18,(1,1),1,1,1), (16,3,4,17,33,(3,3),1,(4,5),1), (33,3,4,1,40,(1,1),1,(0,2),1),
    (5,2,3,6,7,(2,3),2,(3,4),(2,1)), (16,3,4,3,12,(1,1),1,(0,3),1), (16,2,3,4,11,(1,2),1,(1,4),1), (16,2,3,1,1,(1,1),3,7,1)]

def both(case, density, bias, dtype, last=False, seed=0):
    n,c,o,h,w,k,s,p,d = case
    torch.manual_seed(seed)
    x,weight,b = torch.randn(n,c,h,w, dtype=dtype),torch.randn(o,c,*k, dtype=dtype),torch.randn(o, dtype=dtype) if bias else None
    if last: x = x.contiguous(memory_format=torch.channels_last)
    mask = torch.rand_like(weight)<density
    res = []
    g = None
    for sparse in (False,True):
        xs,ws = x.clone(memory_format=torch.preserve_format).requires_grad_(),(weight[mask] if sparse else weight*mask).clone().requires_grad_()
        bs = None if b is None else b.clone().requires_grad_()
        y = sparse_conv2d(xs, ws, ConvIndex(mask, s, p, d), bs) if sparse else nnf.conv2d(xs, ws, bs, s, p, d)
        g = torch.randn_like(y.detach(), memory_format=torch.contiguous_format) if g is None else g
        y.backward(g)
        res.append([y.detach(), xs.grad, ws.grad if sparse else ws.grad[mask], *([] if b is None else [bs.grad])])
    return res

@pytest.mark.parametrize('case', cases, ids=str)
@pytest.mark.parametrize('density', [0.,.1,.5,1.])
def test_results_and_gradients_are_those_of_the_masked_convolution(case, density):
    for a,b in zip(*both(case, density, density>.2, torch.double)): torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)

@pytest.mark.parametrize('last', [False,True])
def test_float32_and_channels_last(last):
    dense,sparse = both((32,8,6,14,14,(3,3),1,1,1), .2, True, torch.float, last)
    for a,b in zip(dense, sparse): torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)

def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setattr('fastsparse.kernels.linear._alone', 2**12)
    was = torch.get_num_threads()
    try:
        res = []
        for k in (1,2,3):
            torch.set_num_threads(k)
            res.append(both((48,8,6,14,14,(3,3),2,1,1), .3, True, torch.float)[1])
    finally: torch.set_num_threads(was)
    for other in res[1:]:
        for a,b in zip(res[0], other): assert torch.equal(a, b)

def test_nan_passes_through_live_weights_only():
    x,mask = torch.zeros(16,2,4,4),torch.zeros(2,2,1,1, dtype=torch.bool)
    x[3,0,1,1],mask[0,0],mask[1,1] = float('nan'),True,True
    y = sparse_conv2d(x, torch.ones(2), ConvIndex(mask))
    assert y[3,0,1,1].isnan() and y.isnan().sum()==1

def test_bad_input_is_refused_by_name():
    index = ConvIndex(torch.ones(2,3,3,3, dtype=torch.bool))
    v = torch.ones(len(index))
    with pytest.raises(ValueError, match='must be'): sparse_conv2d(torch.ones(1,2,5,5), v, index)
    with pytest.raises(ValueError, match='float32'): sparse_conv2d(torch.ones(1,3,5,5).half(), v, index)
    with pytest.raises(ValueError, match='kernel'): sparse_conv2d(torch.ones(1,3,2,2), v, index)
    with pytest.raises(ValueError, match='53 weights are given, and 54 live'): sparse_conv2d(torch.ones(1,3,5,5), v[1:], index)

def test_second_derivatives_are_those_of_the_dense_layer():
    w = torch.randn(4,3,3,3).double()
    mask = w.abs()>.7
    index,found = ConvIndex(mask, 2, 1),[]
    for live in (True,False):
        x,v = torch.linspace(-1, 1, 2*3*49).double().view(2,3,7,7).requires_grad_(),w[mask].requires_grad_()
        y = sparse_conv2d(x, v, index) if live else nnf.conv2d(x, torch.zeros_like(w).masked_scatter(mask, v), stride=2, padding=1)
        first = torch.autograd.grad(y.pow(3).sum(), (x,v), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(t.sin().sum() for t in first), (x,v))])
    for mine,torchs in zip(*found): torch.testing.assert_close(mine, torchs)

def test_a_bias_of_another_type_or_one_number_is_as_torch_has_it():
    x,mask = torch.randn(2,3,6,6),torch.ones(4,3,3,3, dtype=torch.bool)
    w,index = torch.randn(4,3,3,3),ConvIndex(mask)
    for b in (torch.randn(4).double(), torch.randn(1)):
        torch.testing.assert_close(sparse_conv2d(x, w[mask], index, b), nnf.conv2d(x, w)+b.float().view(-1,1,1), rtol=1e-4, atol=1e-4)

def test_an_index_splits_an_input_into_the_parts_that_are_read():
    "A stride of two in both directions makes four, of which a kernel of one pixel reads one"
    index = ConvIndex(torch.ones(1,1,3,3, dtype=torch.bool), stride=2, padding=1)
    assert (index.n_parts,index.out_size(32, 32))==(4,(16,16))
    assert ConvIndex(torch.ones(1,1,1,1, dtype=torch.bool), stride=2).n_parts==1
    wide = ConvIndex(torch.ones(64,64,1,3, dtype=torch.bool))
    assert [wide.takes(1, 10**5),wide.takes(1, 2*10**6)]==[True,False]

def test_padding_of_both_sides():
    assert [padding_of(nn.Conv2d(4, 8, k, padding='same', dilation=d)) for k,d in ((3,1),(3,2),(2,1))]==[(1,1),(2,2),None]

def test_a_table_with_places_beyond_32_bits_is_left_to_the_dense_product(monkeypatch):
    "With a smaller limit, since such an input takes gigabytes"
    torch.manual_seed(0)
    model,x = nn.Conv1d(3, 4, 3, padding=1),torch.randn(2, 3, 50)
    sparsify_model(model, .5, seed=0)
    want = model(x)
    sparse_compute(model, None, plan={'weight':'rows'})
    torch.testing.assert_close(model(x), want)
    def _no(*args): raise AssertionError('a kernel was chosen')
    monkeypatch.setattr('fastsparse.live.products.sparse_conv2d', _no)
    with pytest.raises(AssertionError): model(x)
    monkeypatch.setattr(convolutions, '_most', 16*3*2*50)
    torch.testing.assert_close(model(x), want)

@pytest.mark.parametrize('padding,stride,longest', [((0,40),1,100+78), ((0,0),(1,3),100)])
def test_what_fits_into_32_bits(padding, stride, longest, monkeypatch):
    "The larger of input and result counts: 5 channels, 3 parts or none, 2 rows and 2 more of the kernel, 4 columns and those of the kernel more, 16 images"
    index = ConvIndex(torch.ones(2,5,3,3, dtype=torch.bool), stride, padding)
    n = 5*index.n_parts*(2+index.high_h-index.low_h)*(longest+4+index.high_w-index.low_w)*16
    for most,fits in ((n,False), (n+1,True)):
        monkeypatch.setattr(convolutions, '_most', most)
        assert index.takes(50, 100)==fits

def test_a_kernel_of_some_pixels_is_no_product_for_each():
    "A convolution of three dimensions has a kernel only where it is pointwise; one pixel in two of them is not enough"
    for kernel,stays in (((1,1,1),False), ((1,2,1),True), ((3,1,1),True)):
        layer = nn.Conv3d(2, 3, kernel)
        sparsify_model(layer, .5, seed=0)
        assert bool(reasons(layer)['weight'])==stays

def test_an_index_keeps_lists_of_eight_cuts():
    "Images of many sizes do not fill the memory, and an old size is listed anew"
    mask = torch.rand(3, 2, 3, 3, generator=torch.Generator().manual_seed(0))<.5
    w,index = torch.randn(3, 2, 3, 3),ConvIndex(mask)
    for n in [*range(3, 40), 3]:
        x = torch.randn(1, 2, n, n)
        torch.testing.assert_close(sparse_conv2d(x, w[mask], index), nnf.conv2d(x, w*mask), rtol=1e-4, atol=1e-4)
    assert len(index.lists)==8
