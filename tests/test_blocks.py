"Products of blocks: the index, torch's products, and kernels in Triton's interpreter, compiled without a card, and on one"
import json,os,pytest,subprocess,sys,torch
from fastsparse.kernels import blocks as kernels
from fastsparse.kernels.blocks import BlockIndex,block_inputs,block_linear,block_norms,block_values,why_no_blocks
from importlib.util import find_spec
from pathlib import Path

root = Path(__file__).parents[1]
has_triton = pytest.mark.skipif(find_spec('triton') is None, reason='needs Triton')

def kernel_tests(*args, **env):
    "Run the tests of kernels in a process of their own"
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', root/'tests'/'blocks_interpreted.py', *args], cwd=root, capture_output=True,
        text=True, env=dict(os.environ, **env))
    assert done.returncode==0, done.stdout[-4000:]+done.stderr[-2000:]

@has_triton
def test_kernels_in_tritons_interpreter(): kernel_tests(TRITON_INTERPRET='1')

@has_triton
@pytest.mark.full
def test_the_benchmark_in_tritons_interpreter(): kernel_tests('-m', 'full', TRITON_INTERPRET='1')

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_kernels_on_a_card(): kernel_tests(FASTSPARSE_DEVICE='cuda', TRITON_INTERPRET='0')

@has_triton
@pytest.mark.full
@pytest.mark.parametrize('more', [[], ['--accuracy','1']])
def test_all_of_the_benchmark_runs(tmp_path, more):
    "A decoder, updates and accuracy too, on tiny shapes"
    script = root/'benchmarks'/'blocks.py'
    done = subprocess.run([sys.executable, script, '--smoke', '--out', tmp_path, *more], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(root)))
    assert done.returncode==0, done.stderr[-2000:]
    assert {*json.loads((tmp_path/'smoke.json').read_text())['rows']}>=({'accuracy'} if more else {'decoder','updates'})

# --- the index

live = [[1,0,1], [0,0,0], [0,1,1]]

def index(block=(2,4)): return BlockIndex.of_blocks(torch.tensor(live).bool(), block)

def test_the_index_by_hand():
    "Blocks by rows, and by columns; `tat` says which block comes next in a column"
    ix = index()
    assert (ix.shape,ix.block,ix.n,len(ix))==((6,12), (2,4), 4, 32)
    by_hand = dict(rows=[0,0,2,2], cols=[0,2,1,2], ptr=[0,2,2,4], tptr=[0,1,2,4], tidx=[0,2,0,2], tat=[0,2,1,3])
    assert {k:getattr(ix, k).tolist() for k in by_hand}==by_hand
    assert all(t.dtype==torch.int for t in ix.tensors)
    assert ix.dense(torch.ones(4,2,4))[::2,::4].int().tolist()==live

@pytest.mark.parametrize('block,runs', [((16,64), [0,2,4,4,4]), ((16,128), [0,1,2,3]), ((16,32), [0,2,4])])
def test_runs_of_neighbours_by_hand(block, runs):
    "A run has up to 128 inputs and ends with its row of blocks; 4 says that there are no more"
    assert index(block).runs.tolist()==(runs+[4]*4)[:len(index(block).runs)]

def test_places_and_dense_matrices():
    ix,values = index(),torch.arange(1., 33.).view(4,2,4)
    dense = ix.dense(values)
    assert dense[0,:4].tolist()==[1,2,3,4] and dense[1,8:].tolist()==[13,14,15,16] and not dense[2:4].any()
    assert torch.equal(dense.view(-1)[ix.places], values.view(-1)) and torch.equal(ix.take(dense), values)
    for n in (None, 4): assert all(torch.equal(*o) for o in zip(BlockIndex(dense.view(6,4,3)!=0, (2,4), n).tensors, ix.tensors))

def test_a_mask_of_broken_blocks_is_refused():
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1,1] = False
    with pytest.raises(ValueError, match="blocks of 2x2 that are partly live: take a mask of structure='block 2x2'"): BlockIndex(mask, (2,2))

# --- torch's products

def double_layer():
    torch.manual_seed(0)
    ix = index()
    return ix,*[torch.randn(*shape, dtype=torch.double, requires_grad=True) for shape in ((3,12), (4,2,4), (6,))]

def test_first_and_second_derivatives():
    ix,x,values,bias = double_layer()
    def f(x, values, bias): return block_linear(x, values, ix, bias)
    g = torch.randn(3, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(f, (x,values,bias), fast_mode=True) and torch.autograd.gradgradcheck(f, (x,values,bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda g, values: block_inputs(g, values, ix.tensors), (g,values), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda g, x: block_values(g, x, ix.tensors), (g,x), fast_mode=True)

def test_what_does_not_fit_is_refused():
    ix,x,values,bias = double_layer()
    with pytest.raises(ValueError, match='has 11 features, and must have 12'): block_linear(x[:,1:], values, ix)
    with pytest.raises(ValueError, match='torch.float64, and the weight of torch.float32: give both the same'): block_linear(x, values.float(), ix)

def test_norms_of_blocks_are_those_of_the_dense_gradient():
    g,x = torch.randn(5, 6),torch.randn(5, 12)
    dense = (g.t()@x).view(3, 2, 3, 4).abs()
    for reduce,want in dict(mean=dense.mean((1,3)), max=dense.amax((1,3)), min=dense.amin((1,3)), l2=dense.square().sum((1,3)).sqrt()).items():
        torch.testing.assert_close(block_norms(g, x, (2,4), reduce), want)

# --- where kernels run

@has_triton
@pytest.mark.parametrize('args,says', [(((96,64),(48,64)), 'take sides of 16, 32, 64 or 128'), (((100,64),(64,64)), "don't divide a weight of shape (100, 64)"),
    (((64,64),(64,64),torch.double), 'in float16, bfloat16 or float32, not in torch.float64')])
def test_why_blocks_have_no_kernels(args, says): assert says in why_no_blocks(*args)

@has_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine without a CUDA device')
def test_without_a_card_one_line_says_so():
    for device,says in dict(cuda='masks take its place', cpu='move the model to a CUDA device first').items():
        assert why_no_blocks((64,64), (64,64), device=device).endswith(says if torch.version.cuda else 'install a build with it')

@has_triton
def test_old_cards_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla T4')
    for capability,ok in {(7,5):False, (8,0):True, (9,0):True}.items():
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
        assert (why_no_blocks((64,64), (64,64))=='')==ok
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7,5))
    assert why_no_blocks((64,64), (64,64))=='Tesla T4 has compute capability 7.5, and kernels for blocks need 8.0 or later'

def test_the_first_choice_of_tiles_stays(tmp_path):
    "Also that of another process that was faster; a folder that can't be written gives none"
    path = tmp_path/'a'/'tile.json'
    def slow():
        path.write_text(json.dumps(dict(BM=1)))
        return dict(BM=2)
    assert kernels._first_written(path, slow)==dict(BM=1)
    assert kernels._first_written(path, lambda: dict(BM=3))==dict(BM=1)
    assert [p.name for p in path.parent.iterdir()]==['tile.json']
    (tmp_path/'file').touch()
    assert kernels._first_written(tmp_path/'file'/'tile.json', dict) is None

# --- compiled without a card, by the compiler that Triton brings

def compiled(kernel, target, tile, **args):
    "A kernel's machine code: `args` are types such as '*bf16', or values that are fixed"
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    triton,kernel = kernels._triton(),getattr(kernels, kernel)
    options = {k:v for k,v in tile.items() if k.startswith('num_')}
    args = {**args, **{k:v for k,v in tile.items() if k not in options}}
    given = {k:args[k] for k in kernel.arg_names}
    def is_type(v): return isinstance(v, str) and v.lstrip('*') in ('bf16','fp16','fp32','i32')
    signature = {k:v if is_type(v) else 'constexpr' for k,v in given.items()}
    constants = {k:v for k,v in given.items() if not is_type(v)}
    aligned = {(i,):[['tt.divisibility', 16]] for i,(k,v) in enumerate(given.items()) if str(v).startswith('*') or k in ('sx','sg','per')}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget('cuda', target, 32), options=dict(options, enable_fp_fusion=True))

def rows_of(block, t, tile, target, by_cols=False, precision='ieee'):
    K,N = block[::-1] if not by_cols else block
    return compiled('_walk_rows', target, tile, x=t, v=t, bias=None if by_cols else t, y=t, ptr='*i32', idx='*i32', at='*i32' if by_cols else None, M='i32',
        R='i32', sx='i32', parts='i32', K=K, N=N, PRECISION=precision)

def values_of(block, t, tile, target, precision='ieee'):
    return compiled('_walk_values', target, tile, g=t, x=t, dv='*fp32', runs='*i32', rows='*i32', cols='*i32', ptr='*i32', n='i32', M='i32', sg='i32', sx='i32',
        per='i32', O=block[0], I=block[1], PRECISION=precision)

memory = {80:166_912, 90:232_448}  # bytes of shared memory that a program may have

@has_triton
def test_a_product_compiles_for_an_h100():
    "With its matrix units, and loads that don't wait"
    code = rows_of((64,64), '*bf16', kernels._tiles('rows', (64,64), torch.bfloat16, 8192)[0], 90).asm['ptx']
    assert 'wgmma.mma_async' in code and 'cp.async' in code

@has_triton
@pytest.mark.full
@pytest.mark.parametrize('target', [80, 90])
@pytest.mark.parametrize('dtype,precision', [(torch.bfloat16,'ieee'), (torch.float,'tf32'), (torch.float,'ieee')])
@pytest.mark.parametrize('block', [(16,16), (64,64), (128,128), (128,32)])
def test_every_default_compiles(block, dtype, precision, target):
    "Also those for few rows, and within the memory of an A100 and of an H100"
    t = {torch.bfloat16:'*bf16', torch.half:'*fp16', torch.float:'*fp32'}[dtype]
    for n in (16, 256, 8192):
        for by_cols in (False, True):
            assert rows_of(block, t, kernels._tiles('rows', block, dtype, n)[0], target, by_cols, precision).metadata.shared<=memory[target]
    for tile in kernels._tiles('values', block, dtype, 8192)[:1]: assert values_of(block, t, tile, target, precision).metadata.shared<=memory[target]

@has_triton
@pytest.mark.full
@pytest.mark.parametrize('block', [(32,32), (64,64), (128,128)])
def test_every_tile_compiles_for_an_h100(block):
    for n in (16, 64, 256, 8192):
        for tile in kernels._tiles('rows', block, torch.bfloat16, n): assert rows_of(block, '*bf16', tile, 90).metadata.shared<=memory[90]
    for tile in kernels._tiles('values', block, torch.bfloat16, 8192): assert values_of(block, '*bf16', tile, 90).metadata.shared<=memory[90]

@has_triton
@pytest.mark.full
def test_partial_sums_compile():
    compiled('_add_parts', 90, {}, a='*fp32', bias='*bf16', y='*bf16', n='i32', width='i32', parts='i32', BLOCK=1024)
