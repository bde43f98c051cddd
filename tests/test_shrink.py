"Shrunk models give the dense model's outputs, without the channels that are dead or unread, and no channel more is gone"
import copy,pytest,torch,torch.nn.functional as F,torchvision,warnings
from fastsparse.all import *
from fastsparse.kernels.timing import output_error
from helpers import assert_dead,in_float,in_float_layers
from hypothesis import given,settings,strategies as st
from torch import nn

def settle(model, seed=0):
    "BatchNorms with statistics of their own, in evaluation"
    g = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for t in (m.running_mean, m.weight, m.bias): t.data.normal_(generator=g)
            m.running_var.uniform_(.5, 2, generator=g)
    return model.eval().requires_grad_(False)

def kill(m, rows=(), cols=()):
    for r in rows: m.weight[r] = 0
    for c in cols: m.weight[:,c] = 0

def check(model, x, removed, tol=1e-4, **kwargs):
    "Equal outputs, for other inputs as well, the channels gone that are expected, and the model as it was"
    before = copy.deepcopy(model.state_dict())
    small,got = shrink(model, x, **kwargs)
    assert got==removed and all(torch.equal(v, before[k]) for k,v in model.state_dict().items())
    for o in (x, torch.randn_like(x), x[:1]): torch.testing.assert_close(small(o), model(o), rtol=tol, atol=tol)
    return small

def test_neurons_without_inputs_or_readers():
    "Neuron 1 has no input: its bias goes through the activation into the next bias. Nobody reads neuron 3"
    torch.manual_seed(0)
    m = settle(nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,4)))
    kill(m[0], rows=[1]), kill(m[2], cols=[3])
    small = check(m, torch.randn(3,5), {'0':2})
    assert small[0].weight.shape==(4,5) and small[2].weight.shape==(4,4) and small[0].out_features==small[2].in_features==4
    torch.testing.assert_close(small[2].bias, m[2].bias+m[2].weight[:,1]*m[0].bias[1].tanh())

def test_one_removal_leads_to_the_next():
    "Who is read only by the dead is unread, and who reads only the dead is constant"
    torch.manual_seed(0)
    m = settle(nn.Sequential(nn.Linear(5,6), nn.ReLU(), nn.Linear(6,4), nn.ReLU(), nn.Linear(4,3), nn.ReLU(), nn.Linear(3,2)))
    kill(m[4], cols=[0])
    m[2].weight[:,2] = 0
    m[2].weight[0,2] = 1.
    check(m, torch.randn(3,5), {'0':1,'2':1})
    kill(m[0], rows=[4])
    m[2].weight[1] = 0
    m[2].weight[1,4] = 1.
    check(m, torch.randn(3,5), {'0':2,'2':2})

def test_outputs_and_inputs_stay():
    "A dead output is still an output; inputs are given"
    m = settle(nn.Sequential(nn.Linear(5,6), nn.ReLU(), nn.Linear(6,4)))
    kill(m[0], cols=[0]), kill(m[2], rows=[1])
    check(m, torch.randn(3,5), {})

def test_a_layer_that_is_dead_keeps_one_channel():
    "A tensor without channels would be no input for anybody"
    m = settle(nn.Sequential(nn.Linear(5,6), nn.ReLU(), nn.Linear(6,4)))
    m[0].weight.zero_()
    assert check(m, torch.randn(3,5), {'0':5})[0].weight.shape==(1,5)

def test_zero_padding_holds_back_constants():
    "Where a convolution pads, a constant that isn't zero is not constant at the border, and stays; without padding it goes"
    for padding,removed in ((1,{}),((0,1),{}),(0,{'0':1})):
        m = settle(nn.Sequential(nn.Conv2d(2,3,1), nn.ReLU(), nn.Conv2d(3,2,3,padding=padding)))
        kill(m[0], rows=[1])
        m[0].bias[1] = 1.
        check(m, torch.randn(2,2,5,5), removed)
        m[0].bias[1] = -1.
        check(m, torch.randn(2,2,5,5), {'0':1})

def test_batchnorm_is_folded():
    "Before or behind a layer without bias; where it can't be folded, it is cut"
    m = settle(nn.Sequential(nn.Conv2d(2,4,3,bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4,3,1), nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3,2,1)))
    kill(m[3], cols=[0]), kill(m[6], cols=[1,2])
    x = torch.randn(2,2,5,5)
    assert check(m, x, {'0':1,'1':1,'3':2,'5':2})[1].num_features==3
    small = check(m, x, {'0':1,'3':2,'5':2}, fold=True)
    assert isinstance(small[1], nn.Identity) and small[5].num_features==1 and len(small[5].running_var)==1

def test_two_constants_of_two_become_one():
    "Behind zeros one of them carries both"
    m = settle(nn.Sequential(nn.Conv2d(2,2,1), nn.ReLU(), nn.Conv2d(2,2,3,padding=1)))
    kill(m[0], rows=[0,1])
    m[0].bias[:] = torch.tensor([1.,2.])
    check(m, torch.randn(2,2,5,5), {'0':1})

@pytest.mark.parametrize('groups', [1,2])
def test_batchnorm_behind_a_transposed_convolution(groups):
    "Folded without groups"
    m = settle(nn.Sequential(nn.ConvTranspose2d(2,4,3,groups=groups), nn.BatchNorm2d(4)))
    small,_ = shrink(m, x := torch.randn(2,2,5,5), fold=True)
    assert isinstance(small[1], nn.Identity)==(groups==1) and output_error(small(x), m(x))<1e-5

def test_batchnorm_over_another_dimension_is_not_folded():
    "After a linear layer with three dimensions it is_adaptive the second, whatever sizes agree"
    m = settle(nn.Sequential(nn.Linear(5,4), nn.BatchNorm1d(4), nn.Linear(4,2)))
    check(m, torch.randn(3,4,5), {})

def test_flattened_pixels():
    "Each channel is several columns of the linear layer"
    m = settle(nn.Sequential(nn.Conv2d(2,4,2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4*4,3)))
    kill(m[0], rows=[1])
    m[4].weight[:,8:12] = 0
    assert check(m, torch.randn(2,2,5,5), {'0':2})[4].weight.shape==(3,8)

class Residual(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way,self.a,self.b,self.c,self.head = way,nn.Conv2d(2,4,1),nn.Conv2d(4,4,3,padding=1),nn.Conv2d(4,4,1),nn.Linear(4,3)

    def forward(self, x):
        h = F.relu(self.a(x))
        if self.way=='twice': h = self.b(F.relu(self.b(h)))
        elif self.way=='view': h = self.b(h).view(x.shape[0], 4, -1).unflatten(2, (5,5))
        elif self.way=='by hand': h = self.b(h)*self.c.weight.sum()
        else: h = h+self.b(h)
        h = F.relu(self.c(h)) if self.way=='by hand' else torch.add(h, F.relu(self.c(h)))
        return self.head(h.mean((2,3)))

def test_residual_sums():
    "A channel goes only if it is dead or unread in every term"
    torch.manual_seed(0)
    m = settle(Residual('sum'))
    for o in (m.a,m.b): kill(o, rows=[2])
    m.a.bias[2],m.b.bias[2] = -1.,0.
    check(m, torch.randn(2,2,5,5), {})
    kill(m.c, rows=[2])
    assert check(m, torch.randn(2,2,5,5), dict(a=1, b=1, c=1)).head.in_features==3

@pytest.mark.parametrize('way', ['twice','view','by hand'])
def test_what_is_not_followed_stays(way):
    "Shared layers agree on both calls; `view` and parameters taken by hand keep the channels that they touch"
    torch.manual_seed(0)
    m = settle(Residual(way))
    for o in (m.a,m.b,m.c): kill(o, rows=[1])
    for t in (m.a.bias,m.b.bias,m.c.bias): t[1] = 0.
    for o in (m.b,m.c): kill(o, cols=[3])
    small,removed = shrink(m, x := torch.randn(2,2,5,5))
    torch.testing.assert_close(small(x), m(x), rtol=1e-4, atol=1e-4)
    if way=='view': assert removed=={'a':2}
    if way=='by hand': assert 'b' not in removed and 'c' not in removed

def test_tied_layers_stay():
    "A parameter in two layers would be cut for one of them only"
    m = settle(nn.Sequential(nn.Linear(4,4), nn.ReLU(), nn.Linear(4,4), nn.ReLU(), nn.Linear(4,4)))
    m[2].weight = m[0].weight
    kill(m[0], rows=[1])
    check(m, torch.randn(2,4), {})

class Branch(nn.Module):
    def forward(self, x): return x if x.sum()>0 else -x

def test_what_cannot_be_followed_is_refused_by_name():
    "A forward that depends on values"
    with pytest.raises(ValueError, match="Branch can't be followed .*depends on values.*'dense' or 'auto'"): shrink(Branch(), torch.ones(2))

def ragged(kind, sizes, dead, seed):
    "A random network with random dead rows, columns and weights"
    torch.manual_seed(seed)
    layers = []
    for i,o in zip(sizes, sizes[1:]):
        layer = nn.Linear(i, o) if kind=='linear' else nn.Conv2d(i, o, 3, padding=seed%2, bias=bool(seed%3))
        layers += [layer, *([nn.BatchNorm2d(o)] if kind=='conv' else []), [nn.ReLU(),nn.Tanh(),nn.Sigmoid()][seed%3]]
        w = layer.weight.data
        w *= (torch.rand(w.shape)<.5)&(torch.rand(o, *[1]*(w.ndim-1))>dead)&(torch.rand(1, i, *[1]*(w.ndim-2))>dead)
    return settle(nn.Sequential(*layers), seed)

@settings(max_examples=25)
@given(st.sampled_from(['linear','conv']), st.lists(st.integers(1,6), min_size=2, max_size=5), st.floats(0,.7), st.integers(0,1000))
def test_any_stack(kind, sizes, dead, seed):
    "Outputs are the same whatever is dead, and shrinking twice removes nothing more"
    m = ragged(kind, sizes, dead, seed).double()
    x = torch.randn(3, sizes[0], *([12]*2 if kind=='conv' else [])).double()
    small,_ = shrink(m, x)
    y = torch.randn_like(x)
    torch.testing.assert_close(small(y), m(y), rtol=1e-8, atol=1e-8)
    assert shrink(small, x)[1]=={}

def test_resnet18():
    "Dead channels inside blocks and across the residual sums of a stage; half of each gives a quarter of the weights there"
    torch.manual_seed(0)
    m = settle(torchvision.models.resnet18(num_classes=7))
    half = lambda n: range(n//2)
    for stage in (m.layer1, m.layer2):
        for block in stage:
            for conv,bn in ((block.conv1,block.bn1),(block.conv2,block.bn2),*([tuple(block.downsample)] if block.downsample else [])):
                kill(conv, rows=half(len(conv.weight)))
                for t in (bn.bias,bn.running_mean): t[:len(t)//2] = 0
    m.bn1.weight[:32],m.bn1.bias[:32] = 0,0
    small,removed = shrink(m, x := torch.randn(2,3,64,64), fold=True)
    torch.testing.assert_close(small(x), m(x), rtol=1e-4, atol=1e-4)
    assert removed['conv1']==32 and removed['layer1.1.conv2']==32 and removed['layer2.0.downsample.0']==removed['layer2.1.conv2']==64
    assert small.layer2[1].conv2.weight.shape==(64,64,3,3) and not any(isinstance(o, nn.BatchNorm2d) for o in small.modules())

class Alias(nn.Module):
    "A convolution with two names"
    def __init__(self):
        super().__init__()
        self.stem,self.bn = nn.Conv2d(3, 8, 3),nn.BatchNorm2d(8)
        self.convs = nn.ModuleList([self.stem, nn.Conv2d(8, 4, 1)])
    def forward(self, x): return self.convs[1](F.relu(self.bn(self.convs[0](x))))

class TakenByHand(nn.Module):
    "A convolution whose weight is used a second time, without its norm"
    def __init__(self):
        super().__init__()
        self.c,self.bn,self.d = nn.Conv2d(3, 8, 3),nn.BatchNorm2d(8),nn.Conv2d(8, 4, 1)
    def forward(self, x): return self.d(F.relu(self.bn(self.c(x)))).mean((2,3))+F.conv2d(x, self.c.weight).mean()

@pytest.mark.parametrize('make', [Alias, TakenByHand])
def test_norms_are_folded_under_every_name_and_never_into_what_is_taken_by_hand(make):
    torch.manual_seed(0)
    check(settle(make()), torch.randn(2,3,8,8), {})

def test_norms_without_weights_and_grouped_transposed_convolutions():
    "What torch can't fuse stays, and the outputs are equal"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16,4)).eval().requires_grad_(False)
    m[1].running_mean.normal_()
    check(m, torch.randn(3,8), {})
    check(settle(nn.Sequential(nn.ConvTranspose2d(4,8,3,groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8,2,1))), torch.randn(2,4,5,5), {})

def test_a_pool_over_features_pins_them():
    "Without a batch dimension of its own a pool runs along features"
    torch.manual_seed(0)
    m = settle(nn.Sequential(nn.Linear(8,16), nn.MaxPool1d(3,1,1), nn.Linear(16,4)))
    kill(m[0], rows=[2,3,4])
    check(m, torch.randn(5,8), {})

class Scaled(nn.Module):
    "A forward that reads a size"
    def __init__(self, by):
        super().__init__()
        self.a,self.b,self.by = nn.Linear(8,16),nn.Linear(16,4),by
    def forward(self, x): return self.b(F.relu(self.a(x)))*(1+self.by*self.b.in_features)

@pytest.mark.parametrize('by', [1,1e-7])
def test_a_forward_that_reads_sizes_keeps_them(by):
    "A channel less changes what the forward computes with, a lot or a little"
    torch.manual_seed(0)
    m = settle(Scaled(by))
    kill(m.a, rows=[1,2])
    with pytest.warns(UserWarning, match='2 of a: the outputs would differ by .*: the forward reads their number'): check(m, torch.randn(5,8), {})

class InPlace(nn.Module):
    "A value is read, and changed in place afterwards"
    def __init__(self, change):
        super().__init__()
        self.a,self.b,self.c,self.act,self.change = nn.Linear(8,16),nn.Linear(16,4),nn.Linear(16,4),nn.ReLU(inplace=True),change
    def forward(self, x):
        h = self.a(x)
        y = self.b(h)
        return y+self.c(self.change(self, h))

@pytest.mark.parametrize('change', [lambda m,h: m.act(h), lambda m,h: F.relu(h, inplace=True), lambda m,h: h.relu_()])
def test_values_changed_in_place(change):
    "What a reader saw is what the channel was when it was read"
    torch.manual_seed(0)
    m = settle(InPlace(change))
    kill(m.a, rows=[1,5,6])
    m.a.bias[[1,5]] = -1.
    check(m, torch.randn(3,8), {'a':3}, 1e-6)

class Alias2(nn.Module):
    "`+=` changes a value under another name, which a recorded graph doesn't know"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.d = nn.Linear(8,16),nn.Linear(16,16),nn.Linear(16,4)
    def forward(self, x):
        h = self.a(x)
        i = h
        h += self.b(h)
        return self.d(i)

class Hidden(nn.Module):
    "A forward that keeps what it computed"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.h = nn.Linear(8,16),nn.Linear(16,4),None
    def forward(self, x):
        if self.h is None: self.h = x.new_zeros(16)
        return self.b(self.a(x)+self.h)

def test_a_value_that_is_changed_in_place_is_followed_under_its_other_name():
    torch.manual_seed(0)
    m = settle(Alias2())
    for o in (m.a,m.b): kill(o, rows=[1,2])
    for o in (m.a,m.b): o.bias[[1,2]] = 0
    check(m, torch.randn(3,8), {'a':2,'b':2}, 1e-6)

class Optional(nn.Module):
    "A second input that need not be given"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,16),nn.Linear(16,4)
    def forward(self, x, mask=None, *, scale=1., twice=False):
        h = self.a(x)
        if mask is not None: h = h*mask
        if twice: h = h+h
        return self.b(h.relu())*scale

def test_inputs_that_are_not_given_have_their_defaults():
    torch.manual_seed(0)
    m = settle(Optional())
    kill(m.a, rows=[1,2])
    check(m, torch.randn(3,8), {'a':2}, 1e-6)
    x,mask = torch.randn(3,8),torch.randn(16)
    small,removed = shrink(m, (x,mask))  # multiplied by `mask`, channels are mixed with what isn't known
    assert not removed
    torch.testing.assert_close(small(x, mask), m(x, mask))

def test_a_forward_that_keeps_something_leaves_nothing_in_the_result():
    torch.manual_seed(0)
    m = settle(Hidden())
    kill(m.a, rows=[1,2])
    small,_ = shrink(m, x := torch.randn(3,8))
    assert small.h is None and m.h is None
    torch.testing.assert_close(small(x), m(x))

@pytest.mark.parametrize('where', ['a','bn','b'])
@pytest.mark.parametrize('before', [True,False])
def test_layers_with_hooks_stay_as_they_are(where, before):
    "A hook may change what a layer reads and gives, so that nothing is folded into it, and it is called afterwards too"
    torch.manual_seed(0)
    m,calls = settle(nn.Sequential()),[]
    for n,l in dict(a=nn.Linear(8,16), bn=nn.BatchNorm1d(16), b=nn.Linear(16,4)).items(): m.add_module(n, l)
    settle(m)
    kill(m.a, rows=[1,2])
    def pre(_, args): return calls.append(1) or (args[0]*1.003-1,)
    def post(_, args, out): return calls.append(1) or out*1.003-1
    layer = m.get_submodule(where)
    layer.register_forward_pre_hook(pre) if before else layer.register_forward_hook(post)
    small,_ = shrink(m, x := torch.randn(3,8))
    calls.clear()
    torch.testing.assert_close(small(x), m(x), **in_float)
    assert len(calls)==2

@pytest.mark.parametrize('dtype', [torch.float,torch.double,torch.bfloat16])
def test_types_are_kept(dtype):
    "Numbers are shrunk in 64 bits, and come back in the type that they had; also next to a part that insists on another"
    torch.manual_seed(0)
    m = settle(nn.Sequential(nn.Conv2d(3,6,1,bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6,4,1))).to(dtype)
    kill(m[0], rows=[1])
    m[1].running_mean[1] = 0
    small,removed = shrink(m, x := torch.randn(2,3,4,4).to(dtype))
    assert {t.dtype for t in [*small.parameters(),*small.buffers()] if t.ndim}=={dtype} and removed=={'0':1,'1':1}
    torch.testing.assert_close(small(x), m(x), rtol=.05 if dtype==torch.bfloat16 else 1e-5, atol=.05 if dtype==torch.bfloat16 else 1e-5)

@pytest.mark.parametrize('live', [False,True])
def test_a_sparse_model_is_shrunk_as_its_plain_copy_is(live):
    m = nn.Sequential(nn.Linear(32,64), nn.ReLU(), nn.Linear(64,64), nn.ReLU(), nn.Linear(64,4))
    x = torch.randn(8,32)
    sparsify_model(m, .95, seed=0)
    want,gone = shrink(plain_copy(m), x)
    if live: sparse_compute(m, x, torch.optim.SGD(m.parameters(), lr=.1), plan={'0.weight':'rows','2.weight':'rows'})
    before = {k:v.clone() for k,v in m.state_dict().items()}
    small,removed = shrink(m, x)
    assert removed==gone and removed and all(not w[~m].any() for w,m,_ in sparse_params(small))
    torch.testing.assert_close(small(x), m(x))
    torch.testing.assert_close(small(x), want(x))
    assert all(torch.equal(v, before[k]) for k,v in m.state_dict().items())

def test_weights_that_were_written_behind_a_mask_are_zero_in_both():
    "Also after a write through .data"
    m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))
    sparsify_model(m, .9, 'uniform', seed=0)
    m[0].weight.data[0] = 1.
    small,_ = shrink(m, x := torch.randn(2,8))
    torch.testing.assert_close(small(x), m(x))

# --- training the copy further

def unread_net(conv):
    "Two layers between which half of the channels are dead, and whose masks have other dead weights"
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)] if conv else [nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)]
    net = nn.Sequential(*layers)
    masks = {f'{i}.weight':torch.rand_like(net[i].weight)<.5 for i in (0, len(net)-1)}
    masks['0.weight'][::2] = False
    masks[f'{len(net)-1}.weight'][:,::2] = False
    sparsify_model(net, 0., mask_init=masks, seed=0)
    return net,torch.randn(6, *((3,8,8) if conv else (12,)))

@pytest.mark.parametrize('conv', [False,True])
@pytest.mark.parametrize('make', [lambda ps: torch.optim.Adam(ps, 1e-2), lambda ps: torch.optim.SGD(ps, .1, momentum=.9)])
def test_the_copy_trains_on_sparse_with_its_optimizer(conv, make):
    "Masks are cut with their weights; given the optimizer, the next steps are those of the whole model, and BatchNorm is there"
    net,x = unread_net(conv)
    opt = make(net.parameters())
    def step(m, o):
        o.zero_grad()
        m(x).square().mean().backward()
        o.step()
    for _ in range(3): step(net, opt)
    if not conv:
        for p in net[0].bias, : p.data[::2] = 0.
    small,removed,own = shrink(net, x, opt)
    assert removed=={'0':8} or removed=={'0':8,'1':8}
    last = str(len(net)-1)
    assert small[0].weight_mask.equal(net[0].weight_mask[1::2]) and small.get_submodule(last).weight_mask.equal(net.get_submodule(last).weight_mask[:,1::2])
    small.train()
    for _ in range(3):
        step(net, opt)
        step(small, own)
    assert_dead(small)
    if not conv: assert torch.allclose(small[0].weight, net[0].weight[1::2], atol=1e-5)
    assert not conv or isinstance(small[1], nn.BatchNorm2d)

def test_a_copy_without_other_dead_weights_is_dense():
    "Whole channels only: no masks, and a state dict as that of a plain model; another optimizer than torch's is refused"
    net,x = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)),torch.randn(4,12)
    sparsify_model(net, .5, structure='output channels', chosen='0.weight', seed=0, sparse_init_mode=None)
    small,_ = shrink(net, x)
    assert sorted(small.state_dict())==['0.bias','0.weight','2.bias','2.weight'] and small[0].weight.shape==(8,12)
    with pytest.raises(ValueError, match='torch optimizer'): shrink(net, x, 3)

@pytest.mark.parametrize('mean,gone', [(0.,True), (1e-7,True), (1e-3,False), (1.,False)])
def test_a_dead_filter_behind_batchnorm(mean, gone):
    "It is beta in training, and beta-mean/std*gamma in evaluation: the copy is equal in both, so it is cut once the running mean says the same"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2,4,3,bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4,3,1)).requires_grad_(False)
    kill(m[0], rows=[1])
    m[1].running_mean[1],m[1].bias[1] = mean,.5
    x = torch.randn(5,2,6,6)
    with warnings.catch_warnings(record=True, action='always') as told: small,removed = shrink(m.eval(), x)
    assert removed==({'0':1,'1':1} if gone else {}) and [str(w.message) for w in told]==([] if gone else ['dead channels stay:\n1 of 0: in training '
        'BatchNorm makes another constant of them until its running mean is theirs: train longer, or pass fold=True for evaluation alone'])
    for training in (False,True): torch.testing.assert_close(small.train(training)(x), m.train(training)(x), **in_float)
    assert shrink(m.eval(), x, fold=True)[1]=={'0':1}

def test_a_norm_of_scale_zero():
    "Whatever its filter writes, beta is all that is read, in training too"
    torch.manual_seed(0)
    m = settle(nn.Sequential(nn.Conv2d(2,4,3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4,3,1)))
    m[1].weight[2],m[1].bias[2] = 0,.5
    small,removed = shrink(m, x := torch.randn(5,2,6,6))
    assert removed=={'0':1,'1':1}
    for training in (False,True): torch.testing.assert_close(small.train(training)(x), m.train(training)(x), **in_float_layers)

class ByHand(nn.Module):
    def __init__(self, f, p):
        super().__init__()
        self.f,self.p = f,p
    def forward(self, x): return self.f(x, self.p, self.training)

drops = dict(module=nn.Dropout(.5), function=ByHand(F.dropout, .5), torch=ByHand(torch.dropout, .5), by_name=nn.Dropout(p=.1), channels=nn.Dropout1d(.5),
    alpha=nn.AlphaDropout(.5), never=nn.Dropout(0.))

@pytest.mark.parametrize('kind', drops)
@pytest.mark.parametrize('const', [-.5, 0.])
def test_a_dead_neuron_in_front_of_dropout(kind, const):
    "In training its constant is scaled by chance, so it stays, and what chance does to the output too; zero is zero, but for AlphaDropout, and `fold` is for evaluation"
    torch.manual_seed(0)
    m = settle(nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.Tanh(), drops[kind], nn.Linear(6,4)))
    kill(m[0], rows=[3]), kill(m[2], rows=[1])
    m[2].bias[1] = const
    x,stays = torch.randn(3,5),kind=='alpha' or const and kind!='never'
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        small = check(m, x, {'0':1} if stays else {'0':1,'2':1})
    assert [('by chance' in str(w.message), '1 of 2' in str(w.message)) for w in told]==[(True,True)]*bool(stays)
    if stays:
        outs = [(torch.manual_seed(1), o.train()(x))[1] for o in (small,m)]
        torch.testing.assert_close(*outs, **in_float)
    check(m.eval(), x, {'0':1,'2':1}, fold=True)

def test_batch_statistics_mix_what_is_constant_at_a_place():
    "A constant with a border of zeros isn't one for BatchNorm in training, which takes its mean and spread. Circular padding is followed"
    torch.manual_seed(0)
    for mode,removed in (('circular',{'0':1,'2':1,'3':1}),('zeros',{})):
        m = nn.Sequential(nn.Conv2d(2,3,1,bias=False), nn.ReLU(), nn.Conv2d(3,3,3,padding=1,padding_mode=mode,groups=3,bias=False), nn.BatchNorm2d(3),
            nn.ReLU(), nn.Conv2d(3,2,1)).requires_grad_(False)
        kill(m[0], rows=[1]) if mode=='zeros' else kill(m[5], cols=[1])
        m[0].bias = nn.Parameter(torch.ones(3), requires_grad=False)
        with warnings.catch_warnings(action='ignore'): small,got = shrink(m.eval(), x := torch.randn(4,2,6,6))
        assert got==removed
        for training in (False,True): torch.testing.assert_close(small.train(training)(x), m.train(training)(x), **in_float_layers)

@pytest.mark.parametrize('fold', [False,True])
@pytest.mark.parametrize('named', [False,True])
def test_every_parameter_of_the_copy_is_trained(fold, named):
    "A bias that takes constants, or a norm's shift, too, as the weight beside it; a folded weight begins anew; what is no part of the model stays"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2,4,3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4,3,1,bias=False), nn.Flatten(), nn.Linear(48,2))
    x,other = torch.randn(3,2,6,6),nn.Parameter(torch.ones(3))
    with torch.no_grad():
        m[0].weight[1],m[1].bias[1] = 0,1
        m[1].running_mean[1] = m[0].bias[1]
    slow,fast = list(m[:4].named_parameters()),[*((f'5.{n}', p) for n,p in m[5].named_parameters()), ('other',other)]
    if not named: slow,fast = [[p for _,p in o] for o in (slow,fast)]
    opt = torch.optim.Adam([dict(params=slow, lr=.1), dict(params=fast, lr=.2)])
    sum((p**2).sum() for p in [*m.parameters(), other]).backward()
    opt.step()
    with torch.no_grad():
        m[0].weight[1],m[1].bias[1] = 0,1
        m[1].running_mean[1] = m[0].bias[1]
    small,removed,own = shrink(m.eval(), x, opt, fold=fold)
    assert removed=={'0':1, **({} if fold else {'1':1})} and small[3].bias.all()
    groups = [{id(p) for p in g['params']} for g in own.param_groups]
    assert groups==[{id(p) for p in small[:4].parameters()},{id(p) for p in small[5].parameters()}|{id(other)}] and [g['lr'] for g in own.param_groups]==[.1,.2]
    assert small[3].bias not in own.state and (small[0].weight in own.state)!=fold and own.state[small[5].weight]['exp_avg'].equal(opt.state[m[5].weight]['exp_avg'])
    if not fold: assert own.state[small[0].weight]['exp_avg'].equal(opt.state[m[0].weight]['exp_avg'][[0,2,3]])
    own.zero_grad()
    small.train()(x).square().sum().backward()
    before = small[3].bias.clone()
    own.step()
    assert not small[3].bias.equal(before)

def test_masks_of_norms_are_folded_too():
    torch.manual_seed(0)
    m,x = settle(nn.Sequential(nn.Conv2d(2,8,3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8,3,1))),torch.randn(2,2,5,5)
    from fastsparse.cut.channels import prune_channels
    sparsify_model(m, .5, 'erk', seed=0)
    prune_channels(m, .5, x)
    small,_ = shrink(m, x, fold=True)
    torch.testing.assert_close(small(x), m(x), **in_float_layers)
    assert small[0].out_channels==4 and not small[0].weight_mask.all() and not any(k.startswith('1.') for k in small.state_dict())

def test_an_optimizer_of_another_model():
    m,other = [nn.Sequential(nn.Linear(4,4), nn.Linear(4,2)) for _ in range(2)]
    with pytest.raises(ValueError, match='opt has none of the parameters of Sequential'): shrink(m, torch.randn(2,4), torch.optim.SGD(other.parameters(), .1))
    with pytest.raises(ValueError, match=r'fails on xb, \(2, 5\) '): shrink(m, torch.randn(2,5))
