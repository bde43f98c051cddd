"Layers that hold live weights only give the dense layer's outputs, whatever the storage, layout, batch and type"
import copy,pickle,pytest,torch
from fastsparse.all import *
from fastsparse.deploy.compact import LiveMatrix,packed,PackedLinear,storable
from helpers import in_float,in_float_layers
from hypothesis import given,settings,strategies as st
from torch import nn

plain = ['rows']
torch.set_num_threads(1)

def sparse(shape, seed=0, density=.3, structure=None, dtype=torch.float):
    "A random weight; with ragged rows, of which the first and a column are empty, unless it has a structure"
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g)
    if structure: mask = as_structure(structure).top(torch.rand(shape, generator=g), as_structure(structure).count(shape, int(density*w.numel())))
    else:
        mask = torch.rand(shape, generator=g)<density
        mask[0],mask[:,1] = False,False
    return (w*mask).to(dtype)

def layer(make, w, bias=True):
    m = make(w, bias).to(w.dtype).eval().requires_grad_(False)
    m.weight.copy_(w)
    return m

def linear(w, bias): return nn.Linear(*w.shape[::-1], bias=bias)

@pytest.mark.parametrize('structure', [None, 'fan-in', 'fan-in ablate 0.3', 'block 4x4'])
@pytest.mark.parametrize('bias', [True,False])
@pytest.mark.parametrize('shape', [(12,), (1,12), (7,12), (2,3,12), (0,12)])
def test_linear(structure, bias, shape):
    "Vectors, one row, many, more dimensions and none"
    m = layer(linear, sparse((8,12), structure=structure), bias)
    x = torch.randn(shape)
    torch.testing.assert_close(packed(m, 'rows')(x), m(x), **in_float)
    torch.testing.assert_close(packed(m, 'rows').weight, m.weight)

@settings(max_examples=20)
@given(st.integers(1,20), st.integers(2,20), st.integers(1,70), st.floats(0,1), st.sampled_from(plain),
    st.sampled_from([torch.float,torch.double,torch.bfloat16]))
def test_any_linear(n_out, n_in, rows, density, how, dtype):
    "Ragged and empty rows and columns, also without a live weight; half precision where torch has its product"
    m = layer(linear, sparse((n_out,n_in), density=density, dtype=dtype))
    x = torch.randn(n_in,rows).to(dtype).t()
    tol = dict(rtol=.05, atol=.05) if dtype==torch.bfloat16 else dict(**in_float_layers)
    torch.testing.assert_close(packed(m, how)(x), m(x), **tol)

@pytest.mark.parametrize('how', plain)
@pytest.mark.parametrize('nd,stride', [(1,1), (2,1), (2,2), (3,1)])
def test_pointwise_convolutions(how, nd, stride):
    "A product for each pixel, also with strides, and of one image without a batch"
    conv = [nn.Conv1d,nn.Conv2d,nn.Conv3d][nd-1]
    m = layer(lambda w,b: conv(6, 8, 1, stride=stride, bias=b), sparse((8,6)+(1,)*nd))
    for x in (torch.randn(2, 6, *[5]*nd), torch.randn(6, *[5]*nd)): torch.testing.assert_close(packed(m, how)(x), m(x), **in_float)

def masks(kind):
    if kind=='none': return {}
    torch.manual_seed(1)
    res = dict(attn_mask=torch.rand(3,4)<.3)
    res['attn_mask'][:,0] = False
    if kind=='float': res = {k:v.float()*-2 for k,v in res.items()}
    if kind=='heads': res['attn_mask'] = res['attn_mask'].repeat(4,1,1)
    if kind!='bool': res['key_padding_mask'] = torch.tensor([[False]*4,[False,False,True,True]])
    if kind=='float': res['key_padding_mask'] = res['key_padding_mask'].float()*-3
    return res

@pytest.mark.parametrize('kind', ['none','bool','float','heads'])
@pytest.mark.parametrize('batch_first', [True,False])
@pytest.mark.parametrize('kdim', [None,6])
@pytest.mark.parametrize('bias', [True,False])
def test_attention(kind, batch_first, kdim, bias):
    "Every mask of torch's own, its averaged weights and the weights of each head, and none; keys of another width"
    torch.manual_seed(0)
    m = nn.MultiheadAttention(8, 2, batch_first=batch_first, kdim=kdim, vdim=kdim, bias=bias).eval().requires_grad_(False)
    for p in m.parameters(): p.mul_(torch.rand_like(p)<.5) if p.ndim>1 else p.normal_()
    q,k = torch.randn(2,3,8),torch.randn(2,4,kdim or 8)
    if not batch_first: q,k = q.transpose(0,1),k.transpose(0,1)
    new = packed(m, 'rows')
    for kwargs in (dict(need_weights=False), {}, dict(average_attn_weights=False)):
        a,b = m(q, k, k, **masks(kind), **kwargs),new(q, k, k, **masks(kind), **kwargs)
        torch.testing.assert_close(b[0], a[0], **in_float)
        assert (a[1] is None)==(b[1] is None)
        if a[1] is not None: torch.testing.assert_close(b[1], a[1], **in_float)

def test_attention_without_a_batch():
    "Queries and keys of two dimensions"
    torch.manual_seed(0)
    m = nn.MultiheadAttention(8, 2).eval().requires_grad_(False)
    q,k,mask = torch.randn(3,8),torch.randn(4,8),torch.tensor([False,True,False,False])
    for a,b in zip(m(q, k, k, key_padding_mask=mask), packed(m, 'rows')(q, k, k, key_padding_mask=mask)): torch.testing.assert_close(b, a, **in_float)

@pytest.mark.parametrize('names', [['layers.0.linear1'], ['layers.0.self_attn','layers.1.linear2']])
def test_encoder_layers_leave_their_fused_path(names):
    "It takes dense weights from submodules that have none any more; with padding too, where nested tensors are used"
    torch.manual_seed(0)
    enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval().requires_grad_(False)
    new = pack(copy.deepcopy(enc), {n:'rows' for n in names})
    x,pad = torch.randn(2,4,8),torch.tensor([[False]*4,[False,False,True,True]])
    torch.testing.assert_close(new(x), enc(x), **in_float)
    a,b = enc(x, src_key_padding_mask=pad),new(x, src_key_padding_mask=pad)
    torch.testing.assert_close(b[~pad], a[~pad], **in_float)

def test_live_zeros_keep_their_place():
    "A weight that has just grown is zero and lives"
    m = nn.Sequential(nn.Linear(8,8)).requires_grad_(False)
    sparsify_model(m, .5, seed=0, structure='block 4x4')
    m[0].weight[tuple(m[0].weight_mask.nonzero()[0])] = 0
    new = packed(m[0], 'rows')
    assert new.matrix.values.numel()==32 and torch.allclose(new(torch.eye(8)), m[0](torch.eye(8)), atol=1e-6)

def test_shared_layers_and_roots():
    "A layer that stands twice is replaced in both places; one that is the whole model is returned"
    m = nn.Sequential(nn.Linear(4,4), nn.ReLU(), nn.Sequential()).requires_grad_(False)
    m[2].append(m[0])
    x = torch.randn(2,4)
    y = m(x)
    pack(m, {'0':'rows'})
    assert m[0] is m[2][0] and isinstance(m[0], PackedLinear) and torch.allclose(m(x), y, atol=1e-6)
    assert isinstance(pack(nn.Linear(4,4), {'':'rows'}), PackedLinear)

def test_copies_pickles_and_state():
    "Layers copy, pickle, and load into a layer of the same places"
    m = layer(linear, sparse((8,12)))
    new,x = packed(m, 'rows'),torch.randn(3,12)
    for o in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))): assert torch.equal(o(x), new(x))
    other = packed(layer(linear, 2*sparse((8,12))), 'rows')
    other.load_state_dict(new.state_dict())
    assert torch.equal(other(x), new(x)) and not any(p.requires_grad for p in new.parameters())

def test_what_can_be_stored():
    "Linear layers, 1x1 convolutions and attention, whose inner layer counts as its own"
    m = nn.ModuleDict(dict(a=nn.Linear(4,4), b=nn.Conv2d(4,4,3), c=nn.Conv2d(4,4,1), d=nn.Conv2d(4,4,1,groups=2), e=nn.MultiheadAttention(4,2),
        f=nn.MultiheadAttention(4,2,add_zero_attn=True), g=nn.LSTM(4,4), h=nn.Conv2d(4,4,1,padding=1), i=nn.ConvTranspose2d(4,4,1)))
    assert list(storable(m))==['a','c','e']

def test_what_is_refused():
    "By name, before anything is replaced"
    m = nn.Sequential(nn.Linear(4,4), nn.Linear(4,4))
    for plan,message in (({'0':'rows','9':'rows'}, "a layer of plan is '9'"), ({'0':'zip'}, "the storage of 0 is 'zip'"), ({'0':'rows','1':'2:4'}, 'more than two of four')):
        with pytest.raises(ValueError, match=message): pack(m, plan)
        assert all(type(o) is nn.Linear for o in m)

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs CUDA')
def test_semi_structured():
    "2:4 on CUDA gives what the dense product gives, in half precision"
    w = sparse((128,128), density=.5, structure='2:4').cuda().half()
    m = layer(linear, w).cuda()
    x = torch.randn(64,128).cuda().half()
    torch.testing.assert_close(packed(m, '2:4')(x), m(x), rtol=1e-2, atol=1e-2)

def test_torch_export_takes_any_batch():
    "The traced product is embedding_bag, for batches of one and of many"
    m = layer(linear, sparse((8,12), structure='fan-in'))
    ep = torch.export.export(packed(m, 'rows'), (torch.randn(4,12),), dynamic_shapes=({0:torch.export.Dim.DYNAMIC},))
    assert any('embedding_bag' in str(n.target) for n in ep.graph.nodes)
    for n in (1,4,300): torch.testing.assert_close(ep.module()(x := torch.randn(n,12)), m(x), **in_float)

@pytest.mark.parametrize('n_in,kind', [(2**15,torch.int16), (2**15+1,torch.int)])
@pytest.mark.parametrize('rows', [1,20])
def test_columns_are_as_narrow_as_they_fit(n_in, kind, rows):
    "The last column included; others' columns, loaded in place, are seen"
    w = torch.zeros(3, n_in)
    w[0,-1],w[2,0] = 2.,3.
    m = LiveMatrix(w)
    x = torch.randn(rows, n_in)
    assert m.col.dtype==kind
    torch.testing.assert_close(m(x), x@w.t())
    m.load_state_dict(LiveMatrix(w.flip(1)).state_dict())
    torch.testing.assert_close(m(x), x@w.flip(1).t())

garbage = dict(beyond=lambda t: t.fill_(10_000), negative=lambda t: t.fill_(-1), zero=lambda t: t.zero_(), shifted=lambda t: t.add_(32))

@pytest.mark.parametrize('what', garbage)
@pytest.mark.parametrize('name', ['col','crow'])
def test_no_place_is_beyond_the_matrix(what, name):
    "Whoever wrote to the places (`to_empty`, `_apply`, a damaged file): an error before anything is read there, and the right places are right again"
    m = nn.Sequential(nn.Linear(32,16), nn.Tanh())
    sparsify_model(m, .75, seed=0)
    x = torch.randn(5,32)
    new = export_sparse(m, 'live', x)[0]
    y,state = new(x),{k:v.clone() for k,v in new.state_dict().items()}
    places = [k for k in state if k.endswith(f'.{name}')]
    for k in places: garbage[what](new.get_buffer(k))
    if (what,name)==('zero','col'): assert new(x).shape==y.shape  # a column that is there
    else:
        with pytest.raises(RuntimeError, match='places of live weights don.t fit a matrix of'): new(x)
    new.load_state_dict(state)
    assert new(x).equal(y)

def loaded(m, state, way):
    if way=='types': state = {k:v if v.is_floating_point() else v.long() for k,v in state.items()}
    with torch.inference_mode(way=='inference'): m.load_state_dict(state, assign=way!='load')
    return m

@pytest.mark.parametrize('before,after', [('block 4x4','fan-in'), ('fan-in','block 4x4')])
@pytest.mark.parametrize('way', ['load','assign','inference','types'])
def test_what_kernels_derive_from_places_follows_a_load(before, after, way):
    "Such as rows that share their columns in fours; whatever is loaded, the product is that of a dense layer"
    x,(old,new) = torch.randn(5,32),[layer(linear, sparse((16,32), i, .25, o)) for i,o in enumerate((before,after))]
    m = packed(old, 'rows')
    torch.testing.assert_close(m(x), old(x), **in_float)
    torch.testing.assert_close(loaded(m, packed(new, 'rows').state_dict(), way)(x), new(x), **in_float)

def test_kernels_read_copies_of_places_that_were_checked():
    "A write that torch doesn't count, through `.data`, reaches no kernel; a pickle and a copy leave the copies out"
    m,x = packed(layer(linear, sparse((16,32))), 'rows'),torch.randn(5,32)
    size,y = len(pickle.dumps(m)),m(x)
    assert len(pickle.dumps(m))==size and copy.deepcopy(m).matrix.made is None
    m.matrix.col.data.fill_(10_000)
    assert m(x).equal(y)
    m.matrix.values = nn.Parameter(m.matrix.values[1:])
    with pytest.raises(RuntimeError, match="don't fit a matrix of 16 x 32"): m(x)
