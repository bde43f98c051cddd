"Kernels of blocks against dense products in float64: test_blocks.py runs this file in Triton's interpreter, in a process of its own, and on a card"
import json,os,pytest,torch,torch.nn.functional as F
from fastsparse.kernels import blocks as kernels
from fastsparse.kernels.blocks import BlockIndex,block_inputs,block_linear,block_norms,block_rows,block_values
from importlib.util import module_from_spec,spec_from_file_location
from pathlib import Path
from torch.utils.checkpoint import checkpoint

kernels._triton()
device = torch.device(os.environ.get('FASTSPARSE_DEVICE', 'cpu'))
half = dict(rtol=2e-2, atol=2e-2)
close = {torch.float:dict(rtol=1e-4, atol=1e-4), torch.half:half, torch.bfloat16:dict(rtol=4e-2, atol=8e-2)}

def layer(block, R=3, C=4, rows=40, density=.4, dtype=torch.float, seed=0):
    "An index, and `x`, values, bias, `g` and the dense weight of a layer; one row of blocks is empty, one full"
    gen = torch.Generator().manual_seed(seed)
    live = torch.rand(R, C, generator=gen)<density
    if R>2: live[0],live[1] = False,True
    index = BlockIndex.of_blocks(live.to(device), block)
    def rand(*shape): return torch.randn(shape, generator=gen).to(device, dtype)
    values = rand(index.n, *block)/4
    return index,rand(rows, C*block[1]),values,rand(R*block[0]),rand(rows, R*block[0]),index.dense(values)

def wanted(x, w, bias, g):
    "Outputs and gradients of `x`, the weight and the bias in float64"
    x,w,bias = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    y = F.linear(x, w, bias)
    return y.detach(),*torch.autograd.grad(y, (x,w,bias), g.double())

def check(index, x, values, bias, g, w):
    "Outputs and gradients of a layer are those of float64"
    x,values,bias = [t.detach().requires_grad_() for t in (x, values, bias)]
    y = block_linear(x, values, index, bias)
    got = y.detach(),*torch.autograd.grad(y, (x,values,bias), g)
    want = wanted(x, w, bias, g)
    for a,b in zip(got, (*want[:2],index.take(want[2]),want[3])):
        torch.testing.assert_close(a.double(), b, **close[x.dtype], equal_nan=True)
        assert a.dtype==x.dtype

@pytest.mark.parametrize('block', [(16,16), (32,32), (64,64), (128,128), (16,128), (64,32)])
def test_sides_of_blocks(block): check(*layer(block, R=3, C=3))

# Triton's interpreter multiplies bfloat16 as if it were integers
@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16] if device.type=='cuda' else [torch.half])
def test_dtypes(dtype): check(*layer((32,32), dtype=dtype))

@pytest.mark.parametrize('rows', [1, 15, 16, 17, 300])
def test_any_number_of_rows(rows): check(*layer((32,16), rows=rows))

@pytest.mark.parametrize('density', [0, .1, 1])
def test_sparsities(density): check(*layer((16,32), R=2, C=12, density=density))

def test_uneven_rows_of_blocks():
    "One row has every block, others one"
    index,*_ = layer((16,16), 8, 16)
    live = torch.eye(8, 16, dtype=torch.bool, device=device)
    live[3] = True
    index = BlockIndex.of_blocks(live, (16,16))
    values = torch.randn(index.n, 16, 16, device=device)/4
    check(index, torch.randn(20, 256, device=device), values, torch.randn(128, device=device), torch.randn(20, 128, device=device), index.dense(values))

def test_no_rows_and_no_live_blocks():
    "Outputs are the bias, and gradients zero"
    index,x,values,bias,g,w = layer((16,16), rows=0)
    y = block_linear(x, values.requires_grad_(), index, bias)
    assert y.shape==(0, 48)
    y.sum().backward()
    assert not values.grad.any()
    none = BlockIndex.of_blocks(torch.zeros(2, 3, dtype=torch.bool, device=device), (16,16))
    check(none, torch.randn(5, 48, device=device), torch.zeros(0, 16, 16, device=device), torch.randn(32, device=device), torch.randn(5, 32, device=device),
        torch.zeros(32, 48, device=device))

@pytest.mark.parametrize('kind', ['rows', 'inputs', 'values'])
@pytest.mark.parametrize('block', [(32,32), (64,128)])
def test_every_tile_gives_the_product(kind, block):
    index,x,values,bias,g,w = layer(block, 3, 2, rows=70)
    want = dict(rows=x@w.t(), inputs=g@w, values=index.take(g.t()@x))[kind]
    rows,cols,ptr,tptr,tidx,tat,_ = index.tensors
    tiles = {str(t):t for n in (16,64,256,8192) for t in kernels._tiles(kind, block, x.dtype, n)}
    for tile in tiles.values():
        if kind=='rows': got = kernels._products(x, values, None, ptr, cols, None, tile)
        elif kind=='inputs': got = kernels._products(g, values, None, tptr, tidx, tat, tile)
        else: got = kernels._live_blocks(g, x, index.tensors, block, tile)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)

def test_sums_in_parts_have_one_order(monkeypatch):
    "A walk that several programs share gives the product, and the same bits again"
    monkeypatch.setattr(kernels, '_programs', lambda device: 400)
    index,x,values,bias,g,w = layer((16,16), 2, 24, rows=30, density=.9)
    check(index, x, values, bias, g, w)
    rows = [t.repeat(20, 1) for t in (g, x)]
    first,again = [kernels._live_blocks(*rows, index.tensors, (16,16)) for _ in range(2)]
    assert torch.equal(first, again)
    torch.testing.assert_close(first, index.take(rows[0].t()@rows[1]), rtol=1e-4, atol=1e-2)
    assert torch.equal(*[block_rows(x, values, bias, index.tensors) for _ in range(2)])

def test_views_of_other_tensors():
    "Rows apart in memory, columns apart, and one row repeated"
    index,x,values,bias,g,w = layer((16,32))
    for t in (x.repeat(1, 2)[:,:x.shape[1]], x.t().contiguous().t(), x[:1].expand(40, -1), x.repeat_interleave(2, 0)[::2]):
        torch.testing.assert_close(block_linear(t, values, index, bias), F.linear(t, w, bias), rtol=1e-4, atol=1e-4)
    for t in (g.t().contiguous().t(), torch.ones((), device=device).expand(g.shape)):
        torch.testing.assert_close(block_inputs(t, values, index.tensors), t@w, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(block_values(t, x, index.tensors), index.take(t.t()@x), rtol=1e-4, atol=1e-4)
    turned = values.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(block_linear(x, turned, index), block_linear(x, values, index))

@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_nan_and_infinity_pass_live_blocks_only(bad):
    "As in a dense product of the live part alone"
    live = torch.tensor([[True,False], [False,True]], device=device)
    index = BlockIndex.of_blocks(live, (16,16))
    x,values = torch.ones(4, 32, device=device),torch.ones(2, 16, 16, device=device)
    x[1,3] = bad
    y = block_linear(x, values, index)
    assert (~y[1,:16].isfinite()).all() and y[1,16:].isfinite().all() and y[[0,2,3]].isfinite().all()
    g = torch.ones(4, 32, device=device)
    g[2,20] = bad
    dx,dv = block_inputs(g, values, index.tensors),block_values(g, torch.ones_like(g), index.tensors)
    assert (~dx[2,16:].isfinite()).all() and dx[2,:16].isfinite().all()
    assert dv[0].isfinite().all() and (~dv[1,4].isfinite()).all() and dv[1,:4].isfinite().all()

def test_second_use_in_a_graph_checkpoints_and_second_derivatives():
    index,x,values,bias,g,w = layer((16,16), 3, 3, rows=8)
    x,values,w = [t.requires_grad_() for t in (x, values, w.detach())]
    def twice(x, f): return f(torch.tanh(f(x)))
    def sparse(x): return block_linear(x, values, index, bias)
    def dense(x): return F.linear(x, w, bias)
    a,b = [torch.autograd.grad(twice(x, f).square().sum(), (x,p)) for f,p in ((sparse,values), (dense,w))]
    torch.testing.assert_close(a[0], b[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(a[1], index.take(b[1]), rtol=1e-3, atol=1e-3)
    again = torch.autograd.grad(checkpoint(twice, x, sparse, use_reentrant=False).square().sum(), (x,values))
    assert all(torch.equal(*o) for o in zip(a, again))
    def penalty(f, p):
        gx, = torch.autograd.grad(torch.tanh(f(x)).sum(), x, create_graph=True)
        return torch.autograd.grad(gx.square().sum(), p)[0]
    got,want = penalty(lambda x: block_linear(x, values, index), values),penalty(lambda x: F.linear(x, w), w)
    torch.testing.assert_close(got, index.take(want), rtol=1e-3, atol=1e-3)

def test_compiled_without_a_break():
    "The whole function is one graph, and gives what eager gives"
    index,x,values,bias,g,w = layer((16,16), rows=8)
    x,values,bias = [t.requires_grad_() for t in (x, values, bias)]
    def net(x): return torch.tanh(block_linear(x.view(2, 4, -1), values, index, bias)).sum()
    eager = torch.autograd.grad(net(x), (x,values,bias))
    compiled = torch.compile(net, fullgraph=True, backend='aot_eager')
    assert torch.equal(net(x), compiled(x))
    assert all(torch.equal(*o) for o in zip(eager, torch.autograd.grad(compiled(x), (x,values,bias))))

def test_operators_pass_torchs_own_check():
    index,x,values,bias,g,w = layer((16,16), rows=8)
    x,values,g = [t.requires_grad_() for t in (x, values, g)]
    checks = 'test_schema','test_autograd_registration','test_faketensor'
    for op,args in (block_rows,(x,values,bias,index.tensors)),(block_inputs,(g,values,index.tensors)),(block_values,(g,x,index.tensors)):
        torch.library.opcheck(op.op, args, test_utils=checks)

def test_autocast_casts_as_for_a_dense_layer():
    index,x,values,bias,g,w = layer((16,16))
    with torch.autocast(device.type, torch.bfloat16):
        y = block_linear(x, values.requires_grad_(), index, bias)
        assert y.dtype==torch.bfloat16
    y.float().sum().backward()
    assert values.grad.dtype==torch.float
    with torch.no_grad(): torch.testing.assert_close(y.float(), F.linear(x, w, bias), **close[torch.bfloat16])

def test_kernels_are_what_runs(monkeypatch):
    "Not torch's products"
    for name in ('_torch_rows','_torch_values'): monkeypatch.delattr(kernels, name)
    check(*layer((16,16)))

def test_norms_of_all_blocks():
    index,x,values,bias,g,w = layer((16,32), dtype=torch.bfloat16)
    dense = (g.double().t()@x.double()).view(3, 16, 4, 32)
    torch.testing.assert_close(block_norms(g, x, (16,32)).double(), dense.abs().mean((1,3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(block_norms([g,g], [x,x], (16,32), 'l2').double(), 2*dense.square().sum((1,3)).sqrt(), rtol=1e-5, atol=1e-5)

@pytest.mark.full
@pytest.mark.skipif(device.type=='cuda', reason='the benchmark runs there itself')
def test_the_benchmark_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    "Its short parts on tiny shapes; what its file holds isn't measured again"
    path = Path(__file__).parents[1]/'benchmarks'/'blocks.py'
    monkeypatch.syspath_prepend(path.parent)
    spec = spec_from_file_location('benchmark_of_blocks', path)
    spec.loader.exec_module(script := module_from_spec(spec))
    def run():
        script.main(['--smoke', '--out', str(tmp_path), '--only', 'correct', 'products', 'few', 'convolutions'])
        return json.loads((tmp_path/'smoke.json').read_text())['rows']
    first = run()
    assert {*first}=={'correct','products','few rows','convolutions'}
    assert run()==first
