"Every geometry is computed exactly or left to the dense product: outputs and all gradients against dense torch in float64"
import ctypes,numpy as np,pytest,torch,warnings
from copy import deepcopy
from fastsparse.kernels import convolution as convolutions
from fastsparse.kernels import linear as kernels
from fastsparse.live.compute import reasons,sparse_compute
from fastsparse.live.weight import Rows
from fastsparse.weights.find import masked_params
from fastsparse.kernels.linear import call,empty
from fastsparse.model.sparsify import sparsify_model
from fastsparse.kernels.vectors import at,kernel,Kernel,load,numbers,put,store,sums16,take,turn16,why_not
from hypothesis import given,HealthCheck,settings,strategies as st
from torch import nn
from types import FunctionType

few = [1,2,3,5,7,11,13]
types = {torch.double:(1e-9,1e-9), torch.float:(1e-4,1e-3)}
tuples = lambda n, s: st.tuples(*[s]*n)

# --- a layer on live weights beside the masked one

def runs(layer, inputs, sparsity, structure=None, threads=1, of_x=True, stays=None, out=lambda y: y):
    "Compute with live weights what can be, forward and backward, and the same with torch's layer and zeros in float64; does all of it stay dense?"
    plain = deepcopy(layer).double()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # weights without a live one
        sparsify_model(layer, sparsity, structure=structure, sparse_init_mode=None, seed=0)
    plain.load_state_dict(layer.state_dict(), strict=False)
    why = reasons(layer)
    sparse_compute(layer, None, plan={n:'rows' for n,o in why.items() if not o})
    os,live = masked_params(layer),[n for n,o in why.items() if not o]
    assert live==[o.name for o in os if isinstance(o.store, Rows)] and bool(live)!=stays
    for o in os: o.store.ask_dense(True)
    outs,g,was = [],None,torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for m,to in ((layer,lambda t: t), (plain,torch.Tensor.double)):
            xs = [to(t.detach()).requires_grad_(of_x) if t.is_floating_point() else t for t in inputs]
            y = out(m(*xs))
            if g is None: g = torch.randn(y.shape, dtype=y.dtype)
            if y.requires_grad: y.backward(to(g))
            outs.append((y.detach(), [x.grad for x in xs]))
    finally: torch.set_num_threads(was)
    mine,theirs = [{n:p.grad for n,p in m.named_parameters()} for m in (layer,plain)]
    read = {o.name:o.store.read_grad() for o in os}  # what an update would
    for o in os:
        if (whole := theirs[o.name]) is None: continue
        theirs[o.name] = whole[o.mask]
        mine[o.name] = mine[o.name][o.mask]
        theirs[f'{o.name} for an update'],mine[f'{o.name} for an update'] = whole,read[o.name]
    return [(*o, grads) for o,grads in zip(outs, (mine,theirs))]

def same(a, b, tol, what=''):
    "Compare tensors, or lists and dicts of them; None is no gradient"
    if isinstance(a, dict): return [same(a[k], b[k], tol, f'{what} {k}') for k in {*a, *b}]
    if isinstance(a, (list,tuple)): return [same(*o, tol, f'{what} {i}') for i,o in enumerate(zip(a, b, strict=True))]
    if a is None or b is None: return pytest.fail(f'{what}: only one has a gradient') if (a is None)!=(b is None) else None
    torch.testing.assert_close(a.double(), b, rtol=tol[0], atol=tol[1], msg=lambda s: f'{what}: {s}')

def check(layer, inputs, *args, dtype=torch.double, **kwargs):
    layer,inputs = layer.to(dtype),[t.to(dtype) if t.is_floating_point() else t for t in inputs]
    for what,a,b in zip(('output','dX','gradient of'), *runs(layer, inputs, *args, **kwargs)): same(a, b, types[dtype], what)

# --- draws

common = st.fixed_dictionaries(dict(sparsity=st.sampled_from([0.,.5,.8,.95]), threads=st.sampled_from([1,2]), of_x=st.sampled_from([True,True,False])))
layouts = [lambda x: x, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1), lambda x: torch.stack([x, x], -1)[...,0]]

@st.composite
def linears(draw, structures=(None,)):
    "A layer, a rectifier after it or not, and a batch in any number of dimensions"
    structure = draw(st.sampled_from(structures))
    n_in,n_out = [draw(st.sampled_from([4,8,12,20] if structure else few+[64,65])) for _ in range(2)]
    relu,settings = structure is None and draw(st.booleans()),draw(common)
    layer = nn.Sequential(nn.Linear(n_in, n_out, bias=draw(st.booleans())), *[nn.ReLU()]*relu)
    shape = draw(st.sampled_from([(0,),(1,),(2,),(5,),(16,),(71,),(),(1,1),(2,3),(0,3),(3,2,3)]))
    if structure=='2:4': settings['sparsity'] = .5
    return (layer, [draw(st.sampled_from(layouts))(torch.randn(*shape, n_in))]),dict(structure=structure, stays=False, **{**settings, 'of_x':relu or settings['of_x']})

@st.composite
def convs(draw):
    "A convolution of one to three dimensions with any kernel, padding, dilation and stride"
    n = draw(st.sampled_from([1,2,2,2,3]))
    kernel,dilation,stride = [draw(tuples(n, st.integers(1, k))) for k in (4,3,3)]
    if draw(st.sampled_from([False,False,False,True])): kernel = (1,)*n
    reach = [d*(k-1) for k,d in zip(kernel, dilation)]
    padding = draw(st.sampled_from(['sides','sides','sides','none','valid','same']))
    if padding=='same': stride = (1,)*n
    mode = draw(st.sampled_from(['zeros']*6+['circular','reflect','replicate']))
    sides = [0]*n if padding in ('none','valid') else [r//2 for r in reach] if padding=='same' else [draw(st.integers(0, r+3)) for r in reach]
    more = [[0,1,2,4,10,15,18]]*n if n<3 else [[0,1,2,4]]*3
    if n==2: more[0] = [0,1,3,6]
    size = [max(r+1-2*s, 1 if mode=='zeros' else s+2)+draw(st.sampled_from(o)) for r,s,o in zip(reach, sides, more)]
    groups = draw(st.sampled_from([1,1,1,1,1,2,3]))
    c_in,c_out = [groups*draw(st.sampled_from([1,2,3,5])) for _ in range(2)]
    how = padding if padding in ('valid','same') else tuple(sides)
    layer = getattr(nn, f'Conv{n}d')(c_in, c_out, kernel, stride, how, dilation, groups, draw(st.booleans()), mode)
    batch = draw(st.sampled_from([0,1,2,5,16,17,33]))
    x = torch.randn(batch, c_in, *size) if batch!=5 or draw(st.booleans()) else torch.randn(c_in, *size)
    if n==2 and x.ndim==4 and draw(st.booleans()): x = x.to(memory_format=torch.channels_last)
    pointwise = max(kernel)==1 and not any(sides) and padding!='same'
    uneven = padding=='same' and any(r%2 for r in reach)
    dense = groups>1 or mode!='zeros' or not pointwise and (n==3 or uneven or bool(why_not()))
    return (layer, [draw(st.sampled_from(layouts))(x)]),dict(stays=dense, **draw(common))

class Attention(nn.Module):
    "Attention to itself or to something else, with masks"
    def __init__(self, own, forward, **kwargs):
        super().__init__()
        self.inner,self.own,self.kwargs = nn.MultiheadAttention(**kwargs),own,forward

    def forward(self, x, *others):
        y,w = self.inner(*([x]*3 if self.own else [x, *others]), **self.kwargs)
        return y if w is None else torch.cat([y.flatten(), w.flatten()])

@st.composite
def attentions(draw):
    heads,head,queries,keys = [draw(st.sampled_from(o)) for o in ([1,2,3],[1,2,5],[1,2,7],[1,2,7])]
    own,first,n,width = draw(st.booleans()),draw(st.booleans()),draw(st.sampled_from([0,1,2,5])),heads*head
    if own: keys = queries
    widths = [width]*3 if own or draw(st.booleans()) else [width, *[draw(st.sampled_from(few)) for _ in range(2)]]
    alone = n==5 and draw(st.booleans())  # no batch
    xs = [torch.randn(*((l,w) if alone else (n,l,w) if first else (l,n,w))) for l,w in zip((queries,keys,keys), widths)]
    forbidden = torch.rand(queries, keys)<.3
    forbidden[:,0] = False
    forward = dict(need_weights=draw(st.booleans()), average_attn_weights=draw(st.booleans()), attn_mask=draw(st.sampled_from([None,forbidden])))
    layer = Attention(own, forward, embed_dim=width, num_heads=heads, bias=draw(st.booleans()), batch_first=first, kdim=widths[1], vdim=widths[2])
    return (layer, xs[:1] if own else xs),dict(stays=False, **draw(common))

@st.composite
def recurrents(draw):
    "Recurrent layers and cells, which stay dense"
    kind,n_in,n = draw(st.sampled_from([nn.RNN,nn.LSTM,nn.GRU,nn.RNNCell,nn.LSTMCell,nn.GRUCell])),draw(st.sampled_from(few)),draw(st.sampled_from(few))
    if 'Cell' in kind.__name__: layer,x = kind(n_in, n),torch.randn(draw(st.sampled_from([1,2,5])), n_in)
    else:
        layer = kind(n_in, n, draw(st.integers(1, 2)), bias=draw(st.booleans()), batch_first=draw(st.booleans()), bidirectional=draw(st.booleans()))
        x = torch.randn(draw(st.integers(1, 3)), draw(st.integers(1, 4)), n_in)
    return (layer, [x]),dict(stays=True, out=lambda y: y[0] if isinstance(y, tuple) else y, **draw(common))

structures = ['block 4x1','block 4x1','block 1x4','block 2x2','block 4x4','fan-in','2:4']
drawn = dict(linear=(linears(), 30), block=(linears(structures), 25), conv=(convs(), 40), attention=(attentions(), 25), recurrent=(recurrents(), 15))

@pytest.fixture
def small(monkeypatch):
    "Two threads share work of any size, and tables and tiles are narrow, so that there are few kernels to compile"
    monkeypatch.setattr(kernels, '_alone', 1)
    monkeypatch.setattr(kernels, 'vector_bytes', lambda: 16)

def cut_small(patch):
    "Cut the product of a convolution into many pieces, as is done with large ones only"
    whole = convolutions.tile_sizes
    def _sizes(*args):
        cut = whole(*args)
        return {**cut, 'block':min(2, cut['block']), 'group':2, 'strip':cut['tile_rows']}
    patch.setattr(convolutions, 'tile_sizes', _sizes)

def draw_all(kind, times, dtype):
    strategy,n = drawn[kind]
    @settings(max_examples=round(n*times), suppress_health_check=list(HealthCheck))
    @given(strategy, st.sampled_from(dtype))
    def _one(case, dtype):
        torch.manual_seed(0)
        check(*case[0], dtype=dtype, **case[1])
    _one()

@pytest.mark.parametrize('kind', list(drawn))
def test_a_layer_is_exact_or_stays_dense(kind, small, monkeypatch):
    draw_all(kind, 1, [torch.double])
    if kind!='conv': return
    cut_small(monkeypatch)
    draw_all(kind, .5, [torch.double])

@pytest.mark.parametrize('stride', [(1,1),(2,1),(1,2)])
@pytest.mark.parametrize('kernel,padding', [((3,1),(1,0)), ((2,3),(0,1)), ((1,3),(0,0))])
def test_sixteen_pixels_at_a_time_in_many_pieces(stride, kernel, padding, small, monkeypatch):
    "Two whole sixteens of images and one more, rows that hold sixteen pixels, and a product cut where large ones are"
    torch.manual_seed(0)
    cut_small(monkeypatch)
    for width in (18,37): check(nn.Conv2d(5, 7, kernel, stride, padding), [torch.randn(33, 5, 5, width)], .5)

@pytest.mark.full
@pytest.mark.parametrize('kind', list(drawn))
def test_many_layers_are_exact_or_stay_dense(kind, monkeypatch):
    "Twenty times as many, in both types, with the kernels that this machine has"
    monkeypatch.setattr(kernels, '_alone', 1)
    draw_all(kind, 20, list(types))

# --- what kernels read and write

needs_numba = pytest.mark.skipif(bool(why_not()), reason=why_not())

@kernel
def write(y, i, t):
    "One number to place `i` of the results, and one to the scratch memory"
    put(numbers(np.float32, y), i, np.float32(1))
    put(numbers(np.float64, t), i, 1.)

@needs_numba
@pytest.mark.parametrize('y,room', [(3,9), (9,3), (9,0)])
@pytest.mark.parametrize('i', [-1,None])
def test_a_number_written_too_far_is_noticed(y, room, i):
    "At either end, of a tensor and of scratch memory"
    f,i = write.compiled(),min(y, room) if i is None else i
    t = empty((y,), torch.float)
    assert t.isnan().all()
    with pytest.raises(RuntimeError, match='write wrote outside of the arrays'): call(f, t, i, scratch=(8*room,))
    if min(y, room): call(f, empty((y,), torch.float), 0, scratch=(8*room,))

@pytest.mark.parametrize('sizes', [(1,), (64,65,4160,4161), (70_000,1,70_000), (0,8,0), (2**23,300_000)])
def test_scratch_arrays_lie_apart(sizes):
    "Each begins at a whole 64 bytes, and ends before the next begins and before the memory ends"
    s = kernels.Scratch()
    places = s(*sizes)
    assert all(o%64==0 for o in places)
    assert all(o+n<=then for o,n,then in zip(places, sizes, [*places[1:], s.piece.ctypes.data+s.piece.nbytes])) and s.piece.ctypes.data<=places[0]

class Numbers:
    "An array whose ends are known to the words"
    def __init__(self, a): self.a,self.dtype = a,a.dtype
    def part(self, i, n=1):
        assert 0<=i and i+n<=len(self.a), f'{n} numbers at {i} of {len(self.a)}'
        return self.a[i:i+n]

def _put(p, i, v): p.part(i)[0] = v

def _store(p, i, x): p.part(i, len(x))[:] = x

def _turn16(p, i, ld, q, j, ldq):
    for k in range(16):
        for l,v in enumerate(p.part(i+k*ld, 16)): _put(q, j+k+l*ldq, v)

class Bounded:
    "Run kernels as plain Python, with a look at the place of every number that is read or written"
    words = {at:lambda p, i: p.part(i)[0].item(), put:_put, load:lambda n, p, i: p.part(i, n).copy(), store:_store, turn16:_turn16,
        take:lambda n, p, i, q, j: np.array([p.part(i+k)[0] for k in q.part(j, n).tolist()]), sums16:lambda p, i: sums16(p.part(i, 256), 0)}

    def __init__(self, patch):
        self.bytes,self.held,where = {},[],kernels.address
        self.words = {**Bounded.words, numbers:lambda kind, a: Numbers(self.bytes[int(a)].view(kind) if a else np.empty(0, kind))}
        def _address(a):
            if place := where(a): self.know(place, a.numel()*a.element_size() if isinstance(a, torch.Tensor) else a.nbytes)
            return place
        patch.setattr(kernels, 'address', _address)
        patch.setattr(kernels, '_scratch', self.room)
        patch.setattr(Kernel, 'compiled', lambda kernel, **given: self.plain(kernel, **given))

    def know(self, place, n): self.bytes[place] = np.ctypeslib.as_array((ctypes.c_uint8*n).from_address(place)) if n else np.empty(0, np.uint8)

    def room(self, *sizes):
        new = [np.full(max(n, 1), 255, np.uint8) for n in sizes]
        self.held += new  # another thread may use its own yet
        for a,n in zip(new, sizes): self.know(a.ctypes.data, n)
        return [a.ctypes.data for a in new]

    def plain(self, kernel, **given):
        names = {n:w for n,w in kernel.f.__globals__.items() if n in kernel.f.__code__.co_names}
        words = {n:self.words[w] for n,w in names.items() if isinstance(w, FunctionType) and w in self.words}
        used = {n:self.plain(w, **given) for n,w in names.items() if isinstance(w, Kernel)}
        return FunctionType(kernel.f.__code__, {**kernel.f.__globals__, **words, **used, **given}, kernel.__name__)

@needs_numba
@pytest.mark.parametrize('kind', ['linear','block','conv'])
def test_no_kernel_reads_or_writes_outside_of_its_arrays(kind, small, monkeypatch):
    "Numba checks the bounds of arrays; these kernels get addresses, of which it knows none, so the same code runs as Python on arrays that do"
    Bounded(monkeypatch)
    if kind=='conv': cut_small(monkeypatch)
    draw_all(kind, .3, [torch.double])
