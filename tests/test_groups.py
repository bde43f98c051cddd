"What goes together in a network is found through every operation, and goes; what holds a channel is named"
import pytest,torch,torch.nn.functional as F,torchvision,warnings
from fastsparse.all import prune_channels,shrink
from fastsparse.kernels.timing import output_error
from fastsparse.cut.groups import channel_groups,joined_labels
from functools import partial
from hypothesis import given,settings,strategies as st
from test_shrink import kill,settle
from torch import nn

class Net(nn.Module):
    "Layers by name, and a forward of them"
    def __init__(self, f, **layers):
        super().__init__()
        self.f = f
        for k,m in layers.items(): self.add_module(k, m)
    def forward(self, *xs): return self.f(self, *xs)

def swiglu(m, x): return m.down(F.silu(m.gate(x))*m.up(x))
def chunked(m, x):
    a,b = m.both(x).chunk(2, -1)
    return m.down(F.gelu(a)*b)
def gdfn(m, x):  # of Restormer: a gate between halves of a depthwise convolution
    a,b = m.depthwise(m.both(x)).chunk(2, 1)
    return m.down(F.gelu(a)*b)
def mbconv(m, x):
    h = F.hardswish(m.bn2(m.depthwise(F.hardswish(m.bn1(m.expand(x))))))
    return x+m.project(h*torch.sigmoid(m.wide(F.relu(m.squeeze(h.mean((2,3), keepdim=True))))))
def generator(m, x): return m.up(F.relu(m.lin(x).view(len(x), -1, 2, 2)))
def residual(m, x):
    h = F.relu(m.bn1(m.a(x)))
    h = F.relu(h+m.bn2(m.b(h)))
    return m.head(torch.flatten(F.adaptive_avg_pool2d(h+m.bn3(m.c(h)), 1), 1))
def dense_block(m, x):
    h = F.relu(m.a(x))
    return m.c(torch.cat([h,F.relu(m.b(h))], 1))
def shuffled(m, x): return m.b(F.pixel_shuffle(m.a(x), 2))
def unrolled(m, x):
    h = x.new_zeros(len(x), m.cell.hidden_size)
    for t in range(x.shape[1]): h = m.cell(x[:,t], h)
    return m.head(h)
def attention(m, x):
    q,k,v = [l(x).unflatten(-1, (-1,4)).transpose(1, 2) for l in (m.q,m.k,m.v)]
    return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
def rotary(m, x, turned=4):  # and what isn't turned, which may be nothing
    q,k,v = [l(x).unflatten(-1, (-1,4)).transpose(1, 2) for l in (m.q,m.k,m.v)]
    angle,half = torch.arange(x.shape[1]).to(x)[:,None]*torch.tensor([1.,.1,1.,.1])[:turned].to(x),turned//2
    def turn(t):
        t,rest = t[...,:turned],t[...,turned:]
        return torch.cat([t*angle.cos()+torch.cat([-t[...,half:],t[...,:half]], -1)*angle.sin(),rest], -1)
    k,v = [t.repeat_interleave(2, 1) for t in (turn(k),v)]
    return m.o(((turn(q)@k.transpose(2, 3)/2).softmax(-1)@v).transpose(1, 2).flatten(2))
def token(m, x): return m.head(F.relu(m.mlp(torch.cat([m.lin(x),m.first.weight.expand(len(x),1,-1)], 1)))[:,0])

def conv(i, o, k=3, **kwargs): return nn.Conv2d(i, o, k, padding=k//2, **kwargs)
lin,image,seq = nn.Linear,(2,3,8,8),(2,5,8)
# network, shape of its input, and what goes together: name of a parameter and axis → number of groups
cases = dict(swiglu=(lambda: Net(swiglu, gate=lin(8,12), up=lin(8,12), down=lin(12,4)), (3,8), {('down.weight',1):12}),
    chunk=(lambda: Net(chunked, both=lin(8,24), down=lin(12,4)), (3,8), {('both.weight',0):12}),
    gdfn=(lambda: Net(gdfn, both=conv(3,16,1), depthwise=conv(16,16,groups=16), down=conv(8,3,1)), image, {('both.weight',0):8}),
    mbconv=(lambda: Net(mbconv, expand=conv(3,12,1), bn1=nn.BatchNorm2d(12), depthwise=conv(12,12,groups=12), bn2=nn.BatchNorm2d(12), squeeze=conv(12,4,1),
        wide=conv(4,12,1), project=conv(12,3,1)), image, {('project.weight',1):12,('squeeze.weight',0):4}),
    generator=(lambda: Net(generator, lin=lin(5,32), up=nn.ConvTranspose2d(8,3,2)), (2,5), {('up.weight',0):8}),
    residual=(lambda: Net(residual, a=conv(3,8), bn1=nn.BatchNorm2d(8), b=conv(8,8), bn2=nn.BatchNorm2d(8), c=conv(8,8), bn3=nn.BatchNorm2d(8),
        head=lin(8,4)), image, {('head.weight',1):8}),
    cat=(lambda: Net(dense_block, a=conv(3,6), b=conv(6,4), c=conv(10,2)), image, {('a.weight',0):6,('b.weight',0):4}),
    shuffle=(lambda: Net(shuffled, a=conv(3,16), b=conv(4,2)), image, {('b.weight',1):4}),
    grouped=(lambda: nn.Sequential(conv(3,12), nn.ReLU(), conv(12,8,groups=4), nn.ReLU(), conv(8,2)), image, {('2.weight',0):4}),
    two=(lambda: nn.Sequential(conv(3,8), nn.ReLU(), conv(8,8,groups=2), nn.ReLU(), conv(8,2)), image, {('2.weight',0):2}),
    gru=(lambda: Net(lambda m, x: m.head(m.rnn(x)[0][:,-1]), rnn=nn.GRU(8,6,num_layers=2,batch_first=True), head=lin(6,3)), seq, {('head.weight',1):6}),
    lstm=(lambda: Net(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(8,6), head=lin(6,3)), seq, {('head.weight',1):6}),
    both_ways=(lambda: Net(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.RNN(8,6,bidirectional=True), head=lin(12,3)), seq, {('rnn.weight_hh_l0',1):6}),
    cell=(lambda: Net(unrolled, cell=nn.GRUCell(8,6), head=lin(6,3)), seq, {('head.weight',1):6}),
    heads=(lambda: Net(attention, q=lin(8,16), k=lin(8,16), v=lin(8,16), o=lin(16,8)), seq, {('o.weight',1):4}),
    rotary_part=(lambda: Net(partial(rotary, turned=2), q=lin(8,16), k=lin(8,8), v=lin(8,8), o=lin(16,8)), seq, {('k.weight',0):2}),
    rotary=(lambda: Net(rotary, q=lin(8,16), k=lin(8,8), v=lin(8,8), o=lin(16,8)), seq, {('k.weight',0):2}),
    one_value=(lambda: Net(lambda m, x: m.b(torch.cat([x[:,:1],m.a(x)], 1)), a=lin(8,6), b=lin(7,2)), (1,8), {('a.weight',0):6}),
    token=(lambda: Net(token, lin=lin(8,6), first=nn.Embedding(1,6), mlp=lin(6,5), head=lin(5,2)), seq, {('mlp.weight',1):6,('mlp.weight',0):5}))

def silence(model, groups, gone):
    "Zero what writes the groups `gone`, their norms and biases"
    written = {(p.name,o) for p in groups.products if p.rows is not None for o in groups.root[p.rows].unique().tolist()}
    ps = dict(model.named_parameters())
    for (n,d),r in groups.axes.items():
        own = torch.tensor([gone[o] and (n not in ps or ps[n].ndim==1 or (n,int(o)) in written and d==int(n.startswith('up'))) for o in r])
        if n in ps: ps[n].data.movedim(d, 0)[own] = 0

def case(kind):
    "A network, two inputs, its axes with their numbers of groups, and its groups"
    torch.manual_seed(0)
    make,shape,want = cases[kind]
    model = settle(make())
    x,y = torch.randn(shape),torch.randn(shape)
    return model,x,y,want,channel_groups(model, x)

@pytest.mark.parametrize('kind', cases)
def test_groups(kind):
    "Half of the groups of each space are silenced, shifts and all: what is left has exactly the size that the groups allow, and gives the same outputs"
    model,x,y,want,groups = case(kind)
    found = {at:len(groups.axes[at].unique()) for at in want}
    assert found==want and not any(o in groups.held for at in want for o in groups.axes[at].tolist())
    gone = groups.mask([])
    for at in want: gone |= groups.mask(groups.axes[at].unique()[::2].tolist())
    sizes = {n: [len(gone[groups.axes[n,d]])-int(gone[groups.axes[n,d]].sum()) if (n,d) in groups.axes else k for d,k in enumerate(p.shape)]
        for n,p in model.named_parameters()}
    for m in model.modules():
        if isinstance(m, nn.Embedding): m.weight.data[:,gone[groups.axes['first.weight',1]]] = 0
    silence(model, groups, gone)
    with warnings.catch_warnings(action='error'): small,removed = shrink(model, x)
    assert {n:list(p.shape) for n,p in small.named_parameters()}==sizes and removed
    assert output_error(small(y), model(y))<1e-5 and type(small) is type(model)

@pytest.mark.parametrize('kind', ['swiglu','mbconv','residual','gru','lstm','heads','cat'])
def test_what_is_not_read_goes(kind):
    "Columns of the readers are dead, and what writes them isn't"
    model,x,y,want,groups = case(kind)
    gone = groups.mask([o for at in want for o in groups.axes[at].unique()[1::2].tolist()])
    for p in groups.products:
        if p.cols is None or p.name is None: continue
        cols = gone[groups.root[p.cols]]
        w = model.get_parameter(p.name).data
        if cols.shape[0]==1 or p.w.shape==w.shape: w *= ~cols
        else: w *= ~cols.t()
    small,removed = shrink(model, x)
    assert removed and output_error(small(y), model(y))<1e-5
    for at in want: assert small.get_parameter(at[0]).shape[at[1]]<model.get_parameter(at[0]).shape[at[1]]

def test_a_whole_network_goes_as_far_as_its_groups_whatever_the_shifts_are():
    "ResNet-18 without .7 of its filters, layer by layer: a channel of a stage goes if it is dead in all of its layers. One channel a space may carry constants"
    sizes = []
    for shifts in (False,True):
        torch.manual_seed(0)
        m = torchvision.models.resnet18(num_classes=10).eval().requires_grad_(False)
        if shifts: settle(m)
        for o in m.modules():
            if isinstance(o, nn.Conv2d): kill(o, rows=o.weight.abs().flatten(1).mean(1).argsort()[:round(.7*len(o.weight))])
        with warnings.catch_warnings(action='ignore'): small,_ = shrink(m, x := torch.randn(1,3,64,64), fold=True)
        y = torch.randn_like(x)
        assert output_error(small(y), m(y))<1e-5*float(m(y).abs().max())
        sizes.append(sum(p.numel() for p in small.parameters()))
    assert sizes[0]<sizes[1]<2.4e6 and sizes[1]<1.05*sizes[0]

@pytest.mark.parametrize('kind', ['bert','llama'])
def test_models_of_transformers(kind):
    "Heads, with all queries of a key in one group, and neurons; the residual stream is held by its norms"
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    if kind=='bert': model,pre,key,out,down,heads = tf.BertForSequenceClassification(tf.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=4, intermediate_size=64)),'bert.encoder.layer.0','attention.self.key','attention.output.dense','output.dense',4
    else: model,pre,key,out,down,heads = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, use_cache=False)),'model.layers.0','self_attn.k_proj','self_attn.o_proj','mlp.down_proj',2
    x,y = torch.randint(50, (2,7)),torch.randint(50, (2,9))
    groups = channel_groups(model.eval(), dict(input_ids=x))
    assert len(groups.axes[f'{pre}.{key}.weight',0].unique())==heads and len(groups.axes[f'{pre}.{down}.weight',1].unique())==64
    assert 'norm' in groups.held[int(groups.axes[f'{pre}.{out}.weight',0][0])].lower()
    gone = groups.mask([*groups.axes[f'{pre}.{key}.weight',0].unique()[1:].tolist(), *groups.axes[f'{pre}.{down}.weight',1][::2].tolist()])
    silence(model.requires_grad_(False), groups, gone)
    small,_ = shrink(model, dict(input_ids=x))
    assert small.get_parameter(f'{pre}.{key}.weight').shape[0]==8 and small.get_parameter(f'{pre}.{down}.weight').shape[1]==32
    assert output_error(small(input_ids=y).logits, model(input_ids=y).logits)<1e-5

holds = dict(layer_norm=(lambda: nn.Sequential(lin(8,6), nn.LayerNorm(6), lin(6,2)), (3,8), '0', "layer_norm in '1'"),
    softmax=(lambda: nn.Sequential(lin(8,6), nn.Softmax(-1), lin(6,2)), (3,8), '0', "softmax in '1'"),
    fixed_view=(lambda: Net(lambda m, x: m.b(m.a(x).view(-1, 2, 3).flatten(1)), a=lin(8,6), b=lin(6,2)), (3,8), 'a', 'the forward fails without them: shape'),
    attention=(lambda: Net(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(8, 4)), seq, 'a', 'the forward fails without them'),
    input=(lambda: Net(lambda m, x: m.b(x+m.a(x)), a=lin(8,8), b=lin(8,2)), (3,8), 'a', 'add(?! in)'),
    sort=(lambda: Net(lambda m, x: m.b(m.a(x).sort(-1)[0]), a=lin(8,6), b=lin(6,2)), (3,8), 'a', 'sort(?! in)'),
    taken_out=(lambda: Net(lambda m, x: m.b(m.a(x))*m.a(x)[:,:1], a=lin(8,6), b=lin(6,2)), (3,8), 'a', 'slice(?! in)'),
    alone=(lambda: lin(8,6), (3,8), '', '1 of bias: it leaves the model'),
    output=(lambda: nn.Sequential(lin(8,6)), (3,8), '0', 'it leaves the model'))

@pytest.mark.parametrize('kind', holds)
def test_what_holds_a_channel_is_named(kind):
    torch.manual_seed(0)
    make,shape,name,why = holds[kind]
    model = make().requires_grad_(False).eval()
    x,y = torch.randn(shape),torch.randn(shape)
    if kind=='attention':
        for t in (model.a.in_proj_weight,model.a.in_proj_bias): t.view(3, 4, -1)[:,0] = 0
        model.a.out_proj.weight[:,:2] = 0
    else:
        kill(m := model.get_submodule(name), rows=[0])
        m.bias[0] = 0
    with pytest.warns(UserWarning, match='(?s)dead channels stay.*'+why): small,removed = shrink(model, x)
    assert not removed and output_error(small(y), model(y))<1e-6

def test_groups_as_text():
    "Where each group is and what holds it; the sides of a kernel are no channels"
    groups = channel_groups(nn.Sequential(conv(3,4), nn.ReLU(), conv(4,2)), torch.randn(image))
    assert str(groups).splitlines()==['4 groups: 0.bias 0, 0.weight 0, 2.weight 1', "3 groups: 0.weight 1 (held: convolution in '0')",
        '2 groups: 2.bias 0, 2.weight 0 (held: it leaves the model)']

def test_what_a_computed_kernel_writes_is_no_constant():
    "Even if the one output of a single example is the same everywhere"
    torch.manual_seed(0)
    model = Net(lambda m, x: m.b(F.conv2d(x, m.a.weight*x.mean()).flatten(1)), a=nn.Conv2d(3,4,2), b=lin(4,2)).requires_grad_(False)
    x,y = torch.randn(2,1,3,2,2)
    with warnings.catch_warnings(action='ignore'): small,_ = shrink(model, x, fold=True)
    assert output_error(small(y), model(y))<1e-6

@pytest.mark.parametrize('twice', [lambda y: torch.cat([y,y], 1), lambda y: torch.stack([y,y], 2).flatten(1, 2),
    lambda y: torch.cat([y,F.dropout(y, .5, False)], 1)])
def test_channels_that_come_back_twice(twice):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Conv2d(3,16,1),nn.Conv2d(32,8,1)
        def forward(self, x): return self.b(twice(self.a(x).relu())).mean((2,3))
    torch.manual_seed(0)
    model,x = Net().eval(),torch.randn(4,3,4,4)
    prune_channels(model, .5, x)
    small,removed = shrink(model, x)
    assert removed=={'a':8} and small.b.in_channels==16 and torch.allclose(small(x), model(x), atol=1e-6)

def test_joined_labels():
    assert joined_labels(7, torch.tensor([[5,3,6],[3,1,6]])).tolist()==[0,1,2,1,4,1,6]
    n = 1000
    assert joined_labels(n, torch.stack([torch.arange(n-1),torch.arange(1, n)])).eq(0).all()

def test_a_walk_leaves_the_model_as_it_was():
    model = settle(cases['residual'][0]()).train()
    before = {k:v.clone() for k,v in model.state_dict().items()}
    channel_groups(model, torch.randn(image))
    assert all(v.equal(before[k]) for k,v in model.state_dict().items()) and model.training and not model._forward_hooks

class Random(nn.Module):
    "A network of random operations on values of earlier ones"
    def __init__(self, ops, seed):
        super().__init__()
        self.ops,self.layers,sizes = ops,nn.ModuleList(),[3]
        g = torch.Generator().manual_seed(seed)
        def pick(n): return int(torch.randint(n, (), generator=g))
        self.at = []
        for op in ops:
            i = pick(len(sizes))
            same = [k for k,n in enumerate(sizes) if n==sizes[i]]
            j = same[pick(len(same))]
            n = sizes[i]
            if op in ('add','mul'): m = nn.Identity()
            elif op=='cat': n,m = n+sizes[j],nn.Identity()
            elif op=='half': n,m = max(n//2, 1),nn.Conv2d(n, 2*max(n//2, 1), 1)
            elif op=='norm': m = nn.BatchNorm2d(n)
            elif op=='depthwise': m = nn.Conv2d(n, n, 3, padding=pick(2), groups=n)
            elif op=='squeeze': m = nn.Conv2d(n, n, 1)
            else: n,m = 2+pick(4),None
            self.layers.append(m if m is not None else nn.Conv2d(sizes[i], n, 3, padding=1, bias=bool(pick(2))))
            self.at.append((i,j))
            sizes.append(n)
        self.head = nn.Conv2d(sizes[-1], 2, 1)

    def forward(self, x):
        hs = [x]
        for op,m,(i,j) in zip(self.ops, self.layers, self.at):
            a,b = hs[i],hs[j]
            n = min(a.shape[-1], b.shape[-1])
            a,b = a[...,:n,:n],b[...,:n,:n]
            if op=='add': h = a+b
            elif op=='mul': h = a*torch.sigmoid(b)
            elif op=='cat': h = torch.cat([a,b], 1)
            elif op=='half': h = torch.mul(*m(a).chunk(2, 1))
            elif op=='squeeze': h = a*torch.relu(m(a.mean((2,3), keepdim=True)))
            else: h = F.relu(m(a)) if op=='conv' else m(a)
            hs.append(h)
        return self.head(hs[-1])

@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(['conv','conv','norm','depthwise','add','mul','cat','half','squeeze']), min_size=1, max_size=9), st.floats(0, .8), st.integers(0, 10**6))
def test_any_network(ops, dead, seed):
    "Whatever is dead, in weights, biases and norms: outputs are equal for other inputs, and a second time nothing more goes"
    model = settle(Random(['conv',*ops], seed), seed).double()
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        for d in range(min(p.ndim, 2)): p.movedim(d, 0)[torch.rand(p.shape[d], generator=g)<dead/2] = 0
    x,y = torch.randn(2,3,24,24, dtype=torch.double),torch.randn(2,3,24,24, dtype=torch.double)
    with warnings.catch_warnings(action='ignore'):
        for fold in (False,True):
            small,_ = shrink(model, x, fold=fold)
            want = model(y)
            assert output_error(small(y), want)<=1e-8*max(float(want.abs().max()), 1)
        assert not shrink(small, x, fold=True)[1]
