"From scores to masks. Counts are exact, ties go to the lowest index, NaN never wins"
import hypothesis.extra.numpy as hnp, math, numpy as np, pytest, torch
from fastsparse.masks.selection import cut_above,floor_product,highest,keyed_generator,live_places,lowest,mask_from_tensor,maybe_float,n_live,put_
from fastsparse.masks.selection import sparse_mask,sparse_mask_like,sparsity_from_tensor,top_k_mask,zero_dead_
from fastsparse.save.masks import bits_to_mask,mask_to_bits
from helpers import *
from hypothesis import given,settings,strategies as st
from torch import nn

floats = [torch.float, torch.double, torch.half, torch.bfloat16]
some = settings(max_examples=60, deadline=None)

# --- counts

@pytest.mark.parametrize('s,live', [(.05,10),(.25,8),(.35,6),(.45,6),(.6,4),(.8,2),(.85,2),(.95,1),(0,10),(1,0)])
def test_bankers_rounding(s, live):
    "Law 1: `round((1-s)*10)` in float64, half to even; float32 truncation (cerebras) gives 3 at .6 and 1 at .8"
    assert n_live(10, s)==live
    assert int(sparse_mask((10,), s).sum())==live
    assert int(sparse_mask((2,5), s).sum())==live

@pytest.mark.parametrize('n,s,live', [(100,.6,40),(100,.8,20),(100,.85,15),(1000,.8,200),(5,.5,2),(7,.5,4),(3,.5,2),(1,.5,0),(0,.5,0),(2**31+1,.75,2**29)])
def test_counts(n, s, live):
    "Law 1: counts by hand, half to even; the first four are off by one in float32"
    assert n_live(n, s)==live

@pytest.mark.parametrize('s', [-.1, 1.2, math.nan, math.inf, -math.inf])
def test_sparsity_out_of_range(s):
    "Law 10: the 2020 `sparse_mask((10,),1.2)` had eight ones; now it is refused, naming value and range"
    with pytest.raises(ValueError, match=r'sparsity is .*\[0,1\]'): sparse_mask((10,), s)
    with pytest.raises(ValueError, match=r'\[0,1\]'): n_live(10, s)

@some
@given(shape=st.lists(st.integers(0,9), min_size=1, max_size=4), s=st.floats(0,1), seed=st.integers(0,2**32))
def test_sparse_mask_any_shape(shape, s, seed):
    "Law 1: any shape, any sparsity: the exact count, and the same mask for the same generator"
    m = sparse_mask(shape, s, torch.Generator().manual_seed(seed))
    assert m.shape==tuple(shape) and m.dtype==torch.bool
    assert int(m.sum())==round((1-s)*math.prod(shape))
    assert torch.equal(m, sparse_mask(shape, s, torch.Generator().manual_seed(seed)))

def test_sparse_mask_is_uniform():
    "Every place lives equally often: 2000 masks with 3 of 10, each place within five standard deviations of 600"
    g = torch.Generator().manual_seed(0)
    hits = sum(sparse_mask((10,), .7, g).int() for _ in range(2000))
    assert (hits-600).abs().max()<5*math.sqrt(2000*.3*.7)

def test_sparse_mask_like():
    "Shape and device are the parameter's"
    m = sparse_mask_like(nn.Parameter(torch.zeros(10,5)), .8)
    assert m.shape==(10,5) and m.dtype==torch.bool and m.sum()==10

# --- masks and sparsities from tensors

def test_mask_from_tensor():
    "Only zeros are dead: 1e-30, NaN and inf live, -0.0 does not"
    t = torch.tensor([0., -0., 1e-30, math.nan, math.inf, -2.])
    assert mask_from_tensor(t).tolist()==[False,False,True,True,True,True]

@pytest.mark.parametrize('t,s', [(torch.zeros(4),1), (torch.ones(4),0), (torch.tensor([0.,1,0,0]),.75), (torch.zeros(0),0), (torch.tensor([True,False]),.5)])
def test_sparsity_from_tensor(t, s):
    "A Python float, the fraction of zeros; an empty tensor divides by nothing"
    assert sparsity_from_tensor(t)==s and isinstance(sparsity_from_tensor(t), (float,int))

def test_maybe_float():
    "A float where possible, else the object itself"
    t = torch.ones(2)
    assert maybe_float(torch.tensor(.5))==.5 and maybe_float(3)==3. and maybe_float('2.5')==2.5
    assert maybe_float(None) is None and maybe_float(t) is t and maybe_float('a')=='a'

# --- top_k_mask

def test_top_k_by_hand():
    "The 2020 page's example is the last row; ties go to the lowest index (2020 kept the last three of six ones)"
    assert top_k_mask(torch.linspace(-.9,.9,20).reshape(4,5), 5).nonzero()[:,0].tolist()==[3]*5
    assert top_k_mask(torch.ones(6), 3).tolist()==[True]*3+[False]*3

@pytest.mark.parametrize('v,k,idx', [
    ([1.,math.nan,3.,2.], 2, [2,3]),
    ([math.nan,math.nan,3.], 2, [0,2]),
    ([math.nan]*3, 2, [0,1]),
    ([math.inf,1.,-math.inf,math.inf], 3, [0,1,3]),
    ([math.inf,math.nan,-math.inf,math.inf], 3, [0,2,3]),
    ([-0.,0.,-0.,1.], 2, [0,3]),
    ([-5.,-1.,-3.,-1.], 1, [1]),
    ([2.,2.,2.,2.], 0, []),
    ([2.,2.,2.,2.], 4, [0,1,2,3])])
@pytest.mark.parametrize('dtype', floats)
def test_top_k_specials(v, k, idx, dtype):
    "NaN never wins, -inf beats NaN, zero has no sign, ties to the lowest index"
    assert top_k_mask(torch.tensor(v, dtype=dtype), k).nonzero().view(-1).tolist()==idx

@pytest.mark.parametrize('k', [-1, 7])
def test_top_k_refuses(k):
    "Law 10: a count that isn't there is refused by name (2020: a RuntimeError, or silently less)"
    with pytest.raises(ValueError, match=f'n_keep is {k}'): top_k_mask(torch.ones(6), k)

# --- highest and lowest against a plain sort

def _same(score, among, *ks):
    "`highest` and `lowest` of `ks` are those of a full sort"
    order = oracle_order(numpy_of(score), among.numpy())
    for k in ks:
        assert np.array_equal(highest(score, k, among).numpy(), np.sort(order[:k])), f'highest {k} of {len(order)}'
        assert np.array_equal(lowest(score, k, among).numpy(), np.sort(order[len(order)-k:])), f'lowest {k} of {len(order)}'

values = st.sampled_from([0., -0., 1., -1., 2., .5, math.inf, -math.inf, math.nan, 3e-8, 6e4]) | st.floats(-10, 10, width=16)

@pytest.mark.parametrize('density', [0,1e-5,.001,.03,.0999,.11,.6,1])
@pytest.mark.parametrize('n', [2**17-1,2**17,2**17+1,2**17+7,2**18+3])
def test_live_places_of_long_vectors(n, density):
    "The places are numpy's, however few there are, also at the ends"
    m = np.random.default_rng(n).random(n)<density
    m[[0,-1]] = density>0
    for t in (torch.from_numpy(m), torch.from_numpy(np.repeat(m, 2))[::2], torch.from_numpy(np.append(m, True))[1:]):
        assert live_places(t).tolist()==t.numpy().nonzero()[0].tolist()

@settings(max_examples=150, deadline=None)
@given(v=hnp.arrays(np.float64, hnp.array_shapes(max_dims=4, max_side=6), elements=values), dtype=st.sampled_from(floats+[torch.int64,torch.int32,torch.bool]),
    data=st.data())
def test_selection_is_a_sort(v, dtype, data):
    "Laws 1 and 2: exact counts, among the given places only, for any shape, dtype, ties, infinities and NaN"
    if not dtype.is_floating_point: v = np.nan_to_num(v, posinf=7, neginf=-7)
    score = torch.from_numpy(v).to(dtype)
    among = torch.from_numpy(data.draw(hnp.arrays(bool, v.shape)))
    _same(score, among, data.draw(st.integers(0, int(among.sum()))))

@some
@given(v=hnp.arrays(np.float32, st.integers(0,40), elements=values), data=st.data())
def test_drop_and_grow_partition(v, data):
    "Law 2: what is dropped was live, what is grown was not kept; a keep and a drop add up to the live"
    among = torch.from_numpy(data.draw(hnp.arrays(bool, v.shape)))
    n = int(among.sum())
    k = data.draw(st.integers(0, n))
    low,high = lowest(torch.from_numpy(v), k, among).tolist(),highest(torch.from_numpy(v), n-k, among).tolist()
    assert sorted(low+high)==among.nonzero().view(-1).tolist()

shape,size = (250,400),100_000

def _adversary(kind, g):
    "Scores of which a sample is misleading"
    r = torch.randn(shape, generator=g)
    step = size//2**14
    flat = r.view(-1)
    col = torch.arange(size)%shape[1]
    if kind=='constant': flat.fill_(.25)
    elif kind=='zeros': flat.mul_(torch.rand(size, generator=g)<.02).abs_()
    elif kind=='ties': flat.mul_(2).round_()
    elif kind=='column': flat[col==7] = 100.
    elif kind=='low column': flat[col==13] = -100.
    elif kind=='nan heavy': flat[torch.rand(size, generator=g)<.97] = math.nan
    elif kind=='all nan': flat.fill_(math.nan)
    elif kind=='infinities': flat.copy_(torch.where(flat.abs()<1, math.copysign(math.inf,1), -math.inf))
    elif kind=='some infinities': flat[torch.rand(size, generator=g)<.3] = math.inf
    elif kind=='stride high': flat[::step|1] = 50.
    elif kind=='stride low': flat[::step|1] = -50.
    elif kind=='stride nan': flat[::step|1] = math.nan
    elif kind=='stride hides the top': flat.copy_(torch.where(torch.arange(size)%(step|1)==0, -1., flat.abs()))
    elif kind=='one block': flat.mul_(1e-3)[5000:6000] = 1e3
    elif kind=='sorted': flat.copy_(flat.sort().values)
    elif kind=='reversed': flat.copy_(flat.sort(descending=True).values)
    elif kind=='signed zeros': flat.copy_(torch.where(flat>0, 0., -0.))
    elif kind=='two values': flat.copy_((flat>1.3).float())
    return r

kinds = ['normal','constant','zeros','ties','column','low column','nan heavy','all nan','infinities','some infinities','stride high','stride low','stride nan',
    'stride hides the top','one block','sorted','reversed','signed zeros','two values']

@pytest.mark.parametrize('kind', kinds)
def test_large_adversaries(kind):
    "Over 65536 places are cut by a sample first: the finish is exact whatever the sample missed"
    g = torch.Generator().manual_seed(0)
    score = _adversary(kind, g)
    some = torch.rand(shape, generator=g)<.8
    half = torch.zeros(shape, dtype=torch.bool)
    half.view(-1)[:70_000] = True
    for among,fs in ((torch.ones_like(some), (1e-5,.03,.5)), (some, (1e-3,.999)), (half, (.01,))):
        _same(score, among, *[int(f*int(among.sum())) for f in fs])

@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16, torch.double, torch.int64, torch.int32, torch.bool])
def test_large_dtypes(dtype):
    "Large tensors of any dtype; float64 and int64 differ where float32 sees ties"
    g = torch.Generator().manual_seed(1)
    r = torch.randn(size, generator=g, dtype=torch.double)
    if dtype==torch.double: r = 1+r*1e-13
    score = (2**40+(r*1e3).long() if dtype==torch.int64 else (r*100).to(dtype) if dtype==torch.int32 else r>0 if dtype==torch.bool else r.to(dtype))
    among = torch.rand(size, generator=g)<.8
    _same(score, among, 1, 80, 8_000, 50_000)

@pytest.mark.parametrize('shape', [(8,6,3,3), (64,64,5,5)])
def test_memory_format_does_not_matter(shape):
    "Channels_last and transposed scores, places and targets: the row-major indices of the contiguous ones"
    g = torch.Generator().manual_seed(2)
    score,among = torch.randn(shape, generator=g).round(decimals=1),torch.rand(shape, generator=g)<.7
    k = int(among.sum())//5
    for f in (lambda t: t.to(memory_format=torch.channels_last), lambda t: t.transpose(0,3).contiguous().transpose(0,3)):
        s,a = f(score),f(among)
        assert not s.is_contiguous() and not a.is_contiguous()
        assert torch.equal(highest(s, k, a), highest(score, k, among))
        assert torch.equal(lowest(s, k, a), lowest(score, k, among))
        assert torch.equal(top_k_mask(s, k), top_k_mask(score, k))
        idx = highest(score, k, among)
        expect = torch.zeros(shape).view(-1).index_fill(0, idx, 3.).view(shape)
        assert torch.equal(put_(f(torch.zeros(shape)), idx, 3.), expect)

def test_slices_are_written_through():
    "`put_` and `zero_dead_` of a strided view change the tensor it looks into, and nothing beside it"
    base = torch.ones(4,6)
    view = base[:,::2]
    put_(view, torch.tensor([0,5]), 7.)
    zero_dead_(view, torch.tensor([[True]*3]*3+[[False]*3]))
    expect = torch.ones(4,6)
    expect[0,0],expect[1,4] = 7.,7.
    expect[3,::2] = 0.
    assert torch.equal(base, expect)

# --- dead is +0

@pytest.mark.parametrize('dtype', floats)
@pytest.mark.parametrize('layout', ['contiguous','channels_last','mixed'])
def test_zero_dead(dtype, layout):
    "Law 3: NaN, infinities and negatives at dead places become +0.0 bit for bit (`t*mask` keeps NaN and makes -0.0); live ones stay as they are"
    t = torch.randn(2,3,4,5).to(dtype)
    t.view(-1)[:6] = torch.tensor([math.nan, math.inf, -math.inf, -0., -1., 1e-7]).to(dtype)
    mask = torch.zeros(2,3,4,5, dtype=torch.bool)
    mask[1] = True
    mask[0,0,0,:3] = torch.tensor([True,True,False])
    before = t.clone()
    if layout!='contiguous': t = t.to(memory_format=torch.channels_last)
    if layout=='channels_last': mask = mask.to(memory_format=torch.channels_last)
    assert zero_dead_(t, mask) is t
    assert is_positive_zero(t[~mask])
    assert torch.equal(t[mask].view(ints[t.element_size()]), before[mask].view(ints[t.element_size()]))

@pytest.mark.parametrize('layout', ['rows','channels_last','unlike','transposed'])
def test_zero_dead_of_a_large_one(layout):
    "Law 2: pieces cover a large tensor of any layout, and nothing beside it; `t` itself is changed, whatever the layout of its mask"
    g = torch.Generator().manual_seed(0)
    room = torch.randn(2+64*128*8*8, generator=g)
    t,mask = room[1:-1].view(64,128,8,8),torch.rand(64, 128, 8, 8, generator=g)<.3
    if layout in ('channels_last','unlike'): t = t.permute(0,3,1,2)
    if layout=='channels_last': mask = mask.permute(0,3,1,2)
    if layout=='unlike': mask = mask.permute(0,3,1,2).contiguous()
    if layout=='transposed': t,mask = t.transpose(0, 1),mask.transpose(0, 1)
    before,ends,version = t.clone(),room[[0,-1]].clone(),t._version
    assert zero_dead_(t, mask) is t and t._version>version
    assert t.equal(torch.where(mask, before, 0.)) and room[[0,-1]].equal(ends)

def test_zero_dead_of_a_leaf():
    "A parameter that requires gradients is changed in place, without a gradient history, and autograd sees the write"
    p = nn.Parameter(torch.tensor([1.,-2.,3.]))
    version = p._version
    zero_dead_(p, torch.tensor([True,False,True]))
    assert p.is_leaf and p.requires_grad and p.grad_fn is None and p._version>version and p.tolist()==[1.,0.,3.]

# --- keyed generators

def test_keyed_generator():
    "Law 8: numbers depend on (seed, index, update) alone, and torch's own generator is neither read nor moved"
    draw = lambda *key: torch.rand(5, generator=keyed_generator(*key)).tolist()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a = draw(3,1,2)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    torch.rand(7)
    assert draw(3,1,2)==a
    keys = [(3,1,2),(3,2,1),(1,3,2),(31,2,0),(3,12,0),(-3,1,2),(2**70,1,2),(3,1,0)]
    assert len({tuple(draw(*k)) for k in keys})==len(keys)

@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_bits_and_back(shape, seed):
    "A mask of any shape takes an eighth of its bytes, rounded up, and comes back equal"
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed))<.3
    bits = mask_to_bits(mask)
    assert bits.dtype==torch.uint8 and len(bits)==-(-mask.numel()//8)
    assert bits_to_mask(bits, shape).equal(mask)

def test_bits_of_another_mask_are_refused():
    "By their number, and by their type"
    for bits in (torch.zeros(2, dtype=torch.uint8), torch.zeros(1)):
        with pytest.raises(ValueError, match='must be one of uint8 of shape'): bits_to_mask(bits, (2,3))


# --- estimates

@pytest.mark.parametrize('x,whole', [(29.,29), (28.999999999999996,29), (29.1,29), (28.9,28), (.99,0), (1e6-1e-4,1e6), (1e6-.01,1e6-1), (0.,0)])
def test_a_product_is_rounded_down_but_for_errors_of_floats(x, whole):
    "What misses an integer by a billionth of itself is that integer: .29 of 100 is 29"
    assert floor_product(x)==whole

@pytest.mark.parametrize('k', [1, 50, 3000, 100_000])
def test_an_estimated_cut_lets_slightly_more_through_than_are_chosen(k):
    "In each of 20 draws, by a margin of at most eight standard deviations of the sample"
    n = 2**18
    for seed in range(20):
        s = torch.rand(n, generator=torch.Generator().manual_seed(seed))
        cut = cut_above(s, torch.ones(n, dtype=torch.bool), n, k)
        above,share = int((s>cut).sum()),2**14/n
        assert k<=above<=k+(10*math.sqrt(k*share)+16)/share
    for small in (s[:2**15], s.long()): assert cut_above(small, torch.ones(len(small), dtype=torch.bool), len(small), 10) is None

@pytest.mark.parametrize('dtype', [torch.float8_e4m3fn, *floats])
def test_zeros_are_positive_in_every_type(dtype):
    "Of one to eight bytes"
    t = zero_dead_(torch.tensor([1.,-1.,2.,-2.]).to(dtype), torch.tensor([True,False,False,True]))
    assert t.float().tolist()==[1.,0.,0.,-2.] and not t.float()[1:3].signbit().any()
