"Runs a model once and finds which channels can only go together, for `cut.groups`"
# Each index of each axis of a parameter has a number, its *label*. The labels of a tensor are *layers*: integer tensors that
# broadcast to it, with length 1 along the axes where they don't vary. A weight has one for its rows and one for its columns.
# Labels that must go together are joined in pairs, those that can't go are pinned. A second question is which values depend
# on the inputs. What a dead filter writes doesn't, and `cut.shrink` moves such constants into biases.
import torch
from collections import namedtuple
from dataclasses import dataclass
from fastcore.basics import *
from fastcore.imports import noop
from functools import partial
from itertools import repeat
from torch.nn.attention import SDPBackend,sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode,_disable_current_modes
from torch.utils._pytree import tree_leaves,tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from ..kernels.timing import fresh,output_tensors,tensors_in
from ..contract import call_model,evaluating,unfused

def varying(layer):
    "The axes along which a layer of labels varies"
    return {d for d,n in enumerate(layer.shape) if n>1}

def compact(t):
    "`t` with length 1 along each axis where it doesn't vary"
    for d,n in enumerate(t.shape):
        if n>1 and (not t.stride(d) or bool((t==t.narrow(d, 0, 1)).all())): t = t.narrow(d, 0, 1)
    return t

def any_at(hit, shape):
    "`hit` for a smaller `shape`: True where any of what is put together is"
    return _without(hit, [d for d,n in enumerate(shape) if n==1]).expand(shape)

def _without(varies, dims):
    "Does anything along `dims` vary?"
    if isinstance(varies, bool): return varies
    for d in dims: varies = varies.any(d, keepdim=True)
    return varies

def _settled(varies): return varies if isinstance(varies, bool) else bool(varies.any()) and (bool(varies.all()) or compact(varies))
def _at_rank(t, n): return t[(None,)*(n-t.ndim)]
def _as_tensor(varies): return torch.tensor(varies) if isinstance(varies, bool) else varies

@dataclass
class Known:
    "What is known of a tensor"
    layers:list # Of labels
    varies:object=True # Which of its values depend on the inputs: a bool, or a bool tensor that broadcasts to it
    decides:bool=False # Does it depend on floating-point numbers that depend on the inputs? Then Python must not branch on it

@dataclass
class Product:
    "A multiplication by a weight"
    w:torch.Tensor # The weight, a view of its parameter
    rows:torch.Tensor # Labels of what it writes, which broadcast to `w`; None if that has a single index
    cols:torch.Tensor # Labels of what it reads, or None
    const:torch.Tensor # Which of these are constant
    value:torch.Tensor # The constants
    padded:bool # Are zeros put around what it reads?
    name:str # Name of the parameter; None if the weight is computed

    def reads(self):
        "Which of `cols` are multiplied by a weight that isn't zero?"
        return any_at(self.w!=0, self.cols.shape)

Call = namedtuple('Call', 'f op args kwargs tensors')  # an operation of torch, its name, its arguments, and all tensors among them

class Walk(TorchDispatchMode):
    """Runs `model`, which is on the CPU, and joins the labels of what must go together; with `norms`, LayerNorm may lose channels.
    With `training`, a constant is one that training computes too"""
    def __init__(self, model, norms=False, training=False):
        super().__init__()
        self.model = model
        self.norms = norms
        self.training = training
        self.n = 0
        self.axes = {}
        self.stack = ['']
        self.joined = []
        self.pinned = []
        self.moving = []
        self.products = []
        self.heads = []
        self.names = {id(t):n for n,t in [*model.named_buffers(), *model.named_parameters()]}
        self.stores = {t.untyped_storage().data_ptr():n for n,t in model.named_parameters()}
        self.known = WeakIdKeyDictionary()
        self.uses = WeakIdKeyDictionary()
        self.made = WeakIdKeyDictionary()
        self.normed = []

    def run(self, xb):
        "Run the model; what leaves it is pinned"
        modules = {m:n for n,m in self.model.named_modules()}
        xb = fresh(xb)
        def push(m, *_): self.stack.append(modules[m])
        def pop(*_): del self.stack[-1]
        handles = [m.register_forward_pre_hook(push) for m in modules]+[m.register_forward_hook(pop, always_call=True) for m in modules]
        for t in tensors_in(xb): self.known[t] = Known([], True, t.is_floating_point())
        try:
            with evaluating(self.model), unfused(), sdpa_kernel(SDPBackend.MATH), _Chances(self), self: out = call_model(self.model, xb)
        finally:
            for h in handles: h.remove()
        for t in output_tensors(out): self.pin_all(t, 'it leaves the model')
        return self

    def __torch_dispatch__(self, f, types, args=(), kw=None):
        "Each operation has a rule: a function of the walk and the call, that gives what is known of each result"
        kw,name = kw or {},f.overloadpacket.__name__
        call = Call(f, name.rstrip('_'), args, kw, tensors_in((args, kw)))
        decides = any(self.of(t).decides for t in call.tensors)
        for t in call.tensors: self.uses[t] = self.uses.get(t, 0)+1
        rule = _rules.get(call.op) or (_pointwise if torch.Tag.pointwise in f.tags else _moved if f.is_view else _unknown)
        known = rule(self, call)
        res = f(*args, **kw)
        for t,k in zip(tensors_in(res), known): self.keep(t, k, call.op, decides, name!=call.op)
        return res

    # What is neither parameter nor result, such as an input, has no labels: its size is given, so what meets it is pinned
    def of(self, t):
        "What is known of `t`; a parameter gets its labels when it is first read"
        if t in self.known: return self.known[t]
        name = self.names.get(id(t))
        layers = []
        if name is not None and t.is_floating_point(): layers = self.new_labels(t.shape)
        if layers: self.axes[name] = {d:o.flatten() for o in layers for d in varying(o)}
        self.known[t] = Known(layers, False)
        return self.known[t]

    def new_labels(self, shape):
        "A layer for each axis"
        def layer(d, n):
            self.n += n
            return torch.arange(self.n-n, self.n).view([n if i==d else 1 for i in range(len(shape))])
        return [layer(d, n) for d,n in enumerate(shape) if n>1]

    def keep(self, t, known, op, decides, in_place):
        "Keep what is known of the result `t`; a label left alone is that of a channel that was taken out by its number"
        layers = [compact(o) for o in known.layers]
        varies = known.varies
        for layer in layers:
            if not varying(layer) and t.numel(): self.pin(layer, self.at(op))
        varies = _settled(varies)
        self.known[t] = Known([o for o in layers if varying(o)], varies, decides or t.is_floating_point() and varies is not False)
        if in_place and t._is_view() and t._base in self.known and varies is not False: self.known[t._base].varies = True
        if op in ('convolution','mm','addmm') and self.products: self.made[t] = self.products[-1].name

    def at(self, op): return f"{op.strip('_')} in {self.stack[-1]!r}" if self.stack[-1] else op.strip('_')
    def pin(self, layer, why): self.pinned.append((layer.unique(), why))
    def pin_all(self, t, why):
        for layer in self.of(t).layers: self.pin(layer, why)

    def join(self, a, b):
        pairs = torch.stack([o.flatten() for o in torch.broadcast_tensors(a, b)])
        self.joined.append(pairs[:,pairs[0]!=pairs[1]].unique(dim=1))

    # Attention splits an axis into heads and what is in a head, and sums over the latter: then the heads can still go, each as a whole
    def uncut(self, layer, axes, op):
        "The layer if nothing can be cut along `axes`: units of its outer axes go as a whole, or nothing goes"
        solid = varying(layer)&axes
        whole = layer
        if not solid: return layer
        if min(varying(layer)) in solid:
            self.pin(layer, self.at(op))
            return layer
        for d in solid: whole = whole.narrow(d, 0, 1)
        self.join(layer, whole)
        return whole

    # If one varies along heads and positions in them, and the other along positions alone, as rotary embeddings do, positions can't be cut
    def merge(self, a, b, op):
        "The layers of a result of two that vary along the same axis"
        both = varying(a)&varying(b)
        if min(varying(a)) in both and min(varying(b)) in both:
            a,b = [self.uncut(o, varying(o)-both, op) for o in (a,b)]
            self.join(a, b)
            return [b]
        return self.solid([a,b], both, op)

    def solid(self, layers, axes, op):
        "The layers that don't vary along `axes` where nothing can be cut along these"
        whole = [self.uncut(o, axes, op) for o in layers]
        return [o for o in whole if not varying(o)&axes]

    def combine(self, operands, op):
        "The layers of a pointwise result of `operands`: pairs of layers and shape, all of the same rank"
        out,todo = [],[o for layers,_ in operands for o in layers]
        while todo:
            layer = todo.pop(0)
            met = first(out, lambda o: varying(o)&varying(layer))
            out = [o for o in out if o is not met]
            if met is None: out.append(layer)
            else: todo = self.merge(met, layer, op)+todo
        for layers,shape in operands:
            solid = {d for d,n in enumerate(shape) if n>1}.difference(*map(varying, layers))
            out = [self.uncut(o, solid, op) for o in out]
        return out

def _unknown(walk, call):
    for t in call.tensors: walk.pin_all(t, walk.at(call.op))
    return repeat(Known([], any(walk.of(t).varies is not False for t in call.tensors)))

def _factory(walk, call): return [Known(walk.new_labels(call.f(*call.args, **call.kwargs).shape), False)]

def _any_of(found):
    found = [o for o in found if o is not False]
    if not found or any(o is True for o in found): return bool(found)
    n = max(o.ndim for o in found)
    return sum(_at_rank(o, n).int() for o in found)>0

def _operand(walk, t, at=noop): return [at(o) for o in walk.of(t).layers],at(t).shape

def _pointwise(walk, call):
    n = max((t.ndim for t in call.tensors), default=0)
    ranked = [_operand(walk, t, partial(_at_rank, n=n)) for t in call.tensors]
    varies = _any_of([walk.of(t).varies for t in call.tensors])
    if call.op=='mul' and len(call.tensors)==2 and varies is not False:
        for t in call.tensors:
            fixed = ~_as_tensor(walk.of(t).varies)
            if fixed.any(): varies = _as_tensor(varies)&~((t==0)&fixed)
    return [Known(walk.combine(ranked, call.op), varies)]

def _moved(walk, call):
    x = call.tensors[0]
    known = walk.of(call.tensors[0])
    def move(layer):
        def label(t): return layer.expand(x.shape).clone(memory_format=torch.contiguous_format) if t is x else t
        args,kwargs = tree_map_only(torch.Tensor, label, (call.args, call.kwargs))
        return tree_leaves(call.f(*args, **kwargs))
    varies = repeat(known.varies) if isinstance(known.varies, bool) else move(known.varies)
    layers = [move(o) for o in known.layers]
    if not layers and isinstance(known.varies, bool): return repeat(Known([], known.varies))
    return [Known(own, o) for o,*own in zip(varies, *layers)]

def _cat(walk, call):
    stacked = call.op=='stack'
    ts = [t for t in call.tensors if t.numel() or stacked] or call.tensors[:1]
    d = call.kwargs.get('dim', call.args[1] if len(call.args)>1 else 0)%(ts[0].ndim+stacked)
    def lift(t): return t.unsqueeze(d) if stacked else t
    own,shapes = zip(*[_operand(walk, t, lift) for t in ts])
    if any(shape[d] and not _those_along(layers, d) for layers,shape in zip(own, shapes)):
        own = [_as_a_whole(walk, layers, d, call.op) for layers in own]
    others = [_those_along(layers, d, False) for layers in own]
    layers = walk.combine([*zip(others, shapes)], call.op)
    along = [_those_along(layers, d) for layers in own]
    if any(along): layers.append(_in_a_row(walk, along, shapes, d, call.op))
    found = [walk.of(t).varies for t in ts]
    if isinstance(found[0], bool) and all(o is found[0] for o in found): return [Known(layers, found[0])]
    parts = [lift(_as_tensor(o).expand(t.shape)) for o,t in zip(found, ts)]
    return [Known(layers, torch.cat(parts, d))]

def _those_along(layers, d, yes=True): return [o for o in layers if (d in varying(o))==yes]

def _as_a_whole(walk, layers, d, op):
    "Heads with a part that has no labels go as a whole"
    def is_inner(layer): return d in varying(layer) and min(varying(layer))!=d
    return [walk.uncut(o, {d}, op) if is_inner(o) else o for o in layers]

def _in_a_row(walk, along, shapes, d, op):
    "The layers `along` the axis `d` one after another, with pinned labels for tensors that have none"
    axes = {d}.union(*(varying(o) for layers in along for o in layers))
    parts = []
    for layers,shape in zip(along, shapes):
        if not layers:
            layers = walk.new_labels([n if i==d else 1 for i,n in enumerate(shape)])
            layers = layers or [walk.new_labels([1]*d+[2]+[1]*(len(shape)-d-1))[0].narrow(d, 0, 1)]
            walk.pin(layers[0], walk.at(op))
        parts.append(layers[0].expand([n if i in axes else 1 for i,n in enumerate(shape)]))
    return torch.cat(parts, d)

def _reduced(walk, call):
    x = call.args[0]
    given = dict(zip(('dim','keepdim'), call.args[1:])) | call.kwargs
    asked = given.get('dim')
    keeps = given.get('keepdim', False)
    if isinstance(asked, int): asked = [asked]
    dims = {d%max(x.ndim, 1) for d in asked or range(x.ndim)}
    def cut(t):
        for d in sorted(dims, reverse=True):
            t = t.select(d, 0)
            if keeps: t = t.unsqueeze(d)
        return t
    layers = walk.solid(walk.of(x).layers, dims, call.op)
    varies = _without(walk.of(x).varies, dims)
    if not isinstance(varies, bool): varies = cut(varies)
    return repeat(Known([*map(cut, layers)], varies))

def _along(walk, call):
    x = call.args[0]
    dim = {call.args[1]%max(call.args[0].ndim, 1)}
    return [Known([walk.uncut(o, dim, call.op) for o in walk.of(x).layers], _without(walk.of(x).varies, dim))]

def _resized(walk, call):
    x,op = call.args[0],call.op
    if op=='constant_pad_nd': last = {x.ndim-1-i//2 for i,n in enumerate(call.args[1]) if n}
    else: last = {*range(x.ndim-int(first(filter(str.isdigit, op))), x.ndim)}
    return repeat(Known(walk.solid(walk.of(x).layers, last, op), _without(walk.of(x).varies, last)))

def _batch_norm(walk, call):
    x,w = call.args[:2]
    def at(t): return t.view(1, -1, *[1]*(x.ndim-2))
    more = [_operand(walk, t, at) for t in call.tensors[1:]]
    layers = walk.combine([_operand(walk, x), *more], 'batch_norm')
    varies = walk.of(x).varies
    if walk.training and varies is not True:
        moves,const,value = _constants(walk, x, 1)
        same = const&_reached(value, *call.args[3:])
        varies = at(~same)
        walk.moving += [(o.flatten()[~moves&~same], _moved_by_norm) for o in layers if varying(o)=={1}]
    if w is not None and not call.args[5] and varies is not False: varies = _as_tensor(varies)&at(w!=0)
    if x in walk.made: walk.normed.append((x, walk.made[x], walk.stack[-1]))
    return [Known(layers, varies)]

_alone = 'pass fold=True for evaluation alone'
_moved_by_norm = f'in training BatchNorm makes another constant of them until its running mean is theirs: train longer, or {_alone}'
_moved_by_chance = f'in training dropout scales their constant by chance: {_alone}'

class _Chances(TorchFunctionMode):
    "Dropout, which is no operation in evaluation: in training it makes another value of each constant but zero"
    def __init__(self, walk):
        super().__init__()
        self.walk = walk

    def __torch_function__(self, f, types, args=(), kwargs=None):
        own = kwargs or {}
        name = getattr(f, '__name__', '')
        res = f(*args, **own)
        p = own.get('p', [*args[1:2], .5][0])
        if self.walk.training and 'dropout' in name and p: self.scale(res, 'alpha' in name)
        return res

    @_disable_current_modes()
    def scale(self, t, zeros):
        known = self.walk.of(t)
        moves = ~_as_tensor(known.varies).expand(t.shape)&(zeros|(t!=0))
        known.varies = _settled(moves|_as_tensor(known.varies))
        self.walk.moving += [(o.expand(t.shape)[moves], _moved_by_chance) for o in known.layers]

def _reached(value, mean, var, by_batch, _, eps):
    "Where a channel is `value`, does BatchNorm's running mean say so, as near as float32 gets? Then training computes what evaluation does"
    return by_batch or (value-mean).abs()<=1e-6*(value.abs()+(var+eps).sqrt())

def _layer_norm(walk, call):
    x = call.args[0]
    dims = {call.args[0].ndim-1-i for i in range(0 if walk.norms else len(call.args[1]))}
    def own(t): return [walk.uncut(_at_rank(o, x.ndim), dims, 'layer_norm') for o in walk.of(t).layers],_at_rank(t, x.ndim).shape
    return [Known(walk.combine([own(t) for t in call.tensors], 'layer_norm'), walk.of(x).varies is not False)]

def _embedding(walk, call):
    w,idx = call.args[:2]
    for layer in walk.of(w).layers:
        if 0 in varying(layer): walk.pin(layer, walk.at(call.op))
    return [Known([_at_rank(o[0], idx.ndim+1) for o in walk.of(w).layers if 1 in varying(o)])]

def _index(walk, call):
    x = call.args[0]
    idx = call.args[1]
    axes = set()
    varies = [walk.of(t).varies for t in call.tensors]
    for i in idx: axes |= {*range(len(axes), len(axes)+(i.ndim if i is not None and i.dtype in (torch.bool,torch.uint8) else 1))}
    axes = {d for d in axes if d>=len(idx) or idx[d] is not None}
    layers = walk.solid(walk.of(x).layers, axes, call.op)
    return [Known([call.f(o.expand(x.shape), idx) for o in layers], any(o is not False for o in varies))]

def _item(walk, call):
    if walk.of(call.args[0]).decides: raise ValueError("its forward depends on values")
    return []

# A product is a pointwise one in a space with all axes of both operands, followed by a sum over one of them

def _constants(walk, x, axis):
    "Which indices along `axis` depend on the inputs, which have a constant value, the same everywhere, and the values"
    flat = x.movedim(axis, 0).flatten(1)
    varies = walk.of(x).varies
    moves = torch.full((len(flat),), varies) if isinstance(varies, bool) else varies.movedim(axis, 0).flatten(1).any(1).expand(len(flat))
    if not x.numel(): moves = torch.ones_like(moves)  # an expert without tokens
    if moves.all(): return moves,~moves,torch.zeros(len(flat), dtype=x.dtype)
    return moves,~moves&(flat==flat[:,:1]).all(1),flat[:,0].clone()

def _multiplied(walk, w, rows, cols, const, value, padded=False):
    "Keep a product with the weight `w`"
    if rows is None and cols is None: return
    walk.products.append(Product(w, rows, cols, const, value, padded, walk.stores.get(w.untyped_storage().data_ptr())))

def _summed(walk, layers, k, op, kept):
    "Layers after a sum over the axis `k`; what is summed over is read by a product that was kept, or else can't be cut"
    for layer in layers:
        if varying(layer)=={k} and not kept: walk.pin(layer, walk.at(op))
        elif k in varying(layer) and not kept: walk.heads.append(layer.unique())
    return walk.solid([o for o in layers if varying(o)!={k}], {k}, op)

def _with_bias(walk, layers, shape, bias, op, at):
    if bias is None: return layers
    return walk.combine([(layers, shape), _operand(walk, bias, at)], op)

def _mm(walk, call):
    bias,a,b = call.args[:3] if 'add' in call.op else (None,*call.args[:2])
    k = a.ndim-1  # the axis of the sum, behind the rows of `a` and before the columns of `b`
    left = _operand(walk, a, lambda t: t.unsqueeze(-1))
    right = _operand(walk, b, lambda t: t.unsqueeze(-3))
    layers = walk.combine([left, right], call.op)
    fixed = walk.of(b).varies is False
    kept = fixed and (b.ndim==2 or not b.stride(0))
    varies = _by_weight(walk, a, b, layers) if kept else _either_varies(walk, a, b)
    if not fixed: walk.heads += [o.unique() for o in layers if varying(o)&{*range(k-1)}]  # side by side
    out = [o.squeeze(k) for o in _summed(walk, layers, k, call.op, kept)]
    shape = *a.shape[:-1],b.shape[-1]
    def at(t): return _at_rank(t, len(shape))
    return [Known(_with_bias(walk, out, shape, bias, call.op, at), varies)]

def _only_along(layers, d): return first(o for o in layers if varying(o)=={d})

def _by_weight(walk, x, weight, layers):
    "Keep a product with a weight that the inputs don't change; which of its outputs depend on them?"
    k = x.ndim-1
    w = weight if weight.ndim==2 else weight[0]
    moves,const,value = [t[:,None] for t in _constants(walk, x, k)]
    cols = _only_along(layers, k)
    rows = _only_along(layers, k+1)
    if cols is not None: cols = cols.view(-1, 1)
    if rows is not None: rows = rows.view(1, -1)
    _multiplied(walk, w, rows, cols, const, value)
    return ((w!=0)&moves).any(0).view(*[1]*k, -1)

def _grouped_mm(walk, call):
    "Tokens (T,k), sorted by expert, times a weight (E,k,n) of all experts"
    a,w = call.args[:2]
    if a.ndim!=2 or w.ndim!=3 or walk.of(w).varies is not False: return _unknown(walk, call)
    tokens = _operand(walk, a, lambda t: t[:,None,:,None])
    experts = _operand(walk, w, lambda t: t[None])
    layers = walk.combine([tokens, experts], call.op)
    _,const,value = _constants(walk, a, 1)
    cols = _only_along(layers, 2)
    rows = _only_along(layers, 3)
    if cols is not None: cols = cols[0]
    if rows is not None: rows = rows[0]
    _multiplied(walk, w, rows, cols, const[:,None], value[:,None])
    for o in layers:
        if 1 in varying(o): walk.pin(o, walk.at(call.op))
    return [Known([o[:,0,0] for o in _summed(walk, layers, 2, call.op, True) if varying(o)=={3}])]

def _either_varies(walk, a, b):
    "Which entries of `a@b` depend on the inputs"
    va = walk.of(a).varies
    vb = walk.of(b).varies
    if va is vb and isinstance(va, bool): return va
    va,vb = [_as_tensor(o).expand(t.shape) for o,t in ((va,a),(vb,b))]
    return (va.double()@(vb|(b!=0)).double()+(va|(a!=0)).double()@vb.double())>0

# A depthwise convolution has one input and output in each group, which go together; in larger groups all of a group do
@dataclass
class _ConvSpace:
    "Labels of input and weight of a convolution as (batch, groups, outputs of a group, inputs of a group, positions)"
    g:int # Groups
    O:int # Outputs of a group
    I:int # Inputs of a group
    n:int # Dimensions of a position
    turned:bool # Is it transposed? Then the weight's first axis counts inputs

    def of_x(self, t): return t.view(len(t), *((self.g,1,self.I) if t.shape[1]>1 else (1,1,1)), *t.shape[2:])
    def of_w(self, t):
        outer = (self.g,self.I if self.turned else self.O) if t.shape[0]>1 else (1,1)
        t = t[:,:,*[slice(0,1)]*self.n].reshape(*outer, t.shape[1], *[1]*self.n)
        return (t.transpose(1, 2) if self.turned else t)[None]

    def to_w(self, t):
        "From the space to something that broadcasts to the weight"
        if self.g>1: t = t.expand(1, self.g, self.O, self.I, *[1]*self.n)
        return (t.transpose(2, 3) if self.turned else t)[0].flatten(0, 1)

    def weight_labels(self, layers, d):
        "Labels along the axis `d`, or along the groups, as they broadcast to the weight; None if there are none"
        found = first([*_those_along(layers, d), *_those_along(layers, 1)])
        return None if found is None else self.to_w(found)

    def to_y(self, t): return t.expand(-1, self.g, self.O, *t.shape[3:]).flatten(1, 3) if varying(t)&{1,2} else t.flatten(1, 3)

def _convolution(walk, call):
    x,w,bias,_,padding,_,turned,_,g = call.args
    if x.ndim<w.ndim: return _unknown(walk, call)
    ones = [1]*(x.ndim-2)
    positions = {*range(4, 2+x.ndim)}
    space = _ConvSpace(g, w.shape[1] if turned else len(w)//g, x.shape[1]//g, len(ones), turned)
    def at(t): return t.view(1, -1, *ones)
    layers,shape = _operand(walk, x, space.of_x)
    inputs = [walk.uncut(o, positions, call.op) for o in layers],shape
    weights = [space.of_w(o) for o in walk.of(w).layers if varying(o)<={0,1}],(1,g,space.O,space.I,*ones)
    layers = walk.combine([inputs, weights], call.op)
    kept = walk.of(w).varies is False
    varies = True
    if kept:
        moves,const,value = [space.of_x(at(t)) for t in _constants(walk, x, 1)]
        rows = space.weight_labels(layers, 2)
        cols = space.weight_labels(layers, 3)
        if rows is not None and not turned: rows = rows[:,:1]
        _multiplied(walk, w, rows, cols, space.to_w(const), space.to_w(value), padded=turned or any(padding))
        live = space.of_w(any_at(w!=0, (*w.shape[:2],*ones)))
        varies = space.to_y((live&moves).any(3, keepdim=True))
    out = [space.to_y(o) for o in _summed(walk, layers, 3, call.op, kept) if not varying(o)&positions]
    return [Known(_with_bias(walk, out, (len(x),g*space.O,*ones), bias, call.op, at), varies)]

# An operation in none of these lines is pointwise or a view if torch says so, or else unknown, and then all that it reads is pinned
_table = {
    _factory: 'zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty',
    _pointwise: '_to_copy copy clone hardswish native_dropout lift_fresh detach alias',  # labels at the same place go together
    _moved: '''_unsafe_view repeat flip roll unsafe_split unsafe_split_with_sizes index_select pixel_shuffle pixel_unshuffle transpose
        squeeze unsqueeze t''',  # so are their labels
    _cat: 'cat stack',  # labels along its axis are put one after another, others meet as in a sum
    _reduced: 'mean sum amax amin max min var', _along: '_softmax _safe_softmax _log_softmax cumsum cumprod',  # no label may go
    _resized: '''max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
        constant_pad_nd''',
    _batch_norm: 'native_batch_norm', _layer_norm: 'native_layer_norm',  # of all channels, also of dead ones
    _embedding: 'embedding', _index: 'index', _grouped_mm: '_grouped_mm', _item: '_local_scalar_dense', _convolution: 'convolution',
    _mm: 'mm addmm bmm baddbmm'}
_rules = {op:rule for rule,ops in _table.items() for op in ops.split()}
