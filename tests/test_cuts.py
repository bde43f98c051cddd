"Random small networks: what `shrink` cuts is gone from evaluation and from training alike, and the optimizer that it returns trains the rest"
import copy,pytest,random,torch,warnings
from fastsparse.all import *
from fastsparse.cut.channels import prune_channels
from helpers import for_drawn
from test_live_optimizers import torchs
from torch import nn

class Block(nn.Module):
    "A block of `n` channels, by its way: how what its two layers give is put together"
    def __init__(self, way, layer, norm, act, n, flat):
        super().__init__()
        self.way,self.act,self.flat = way,act,flat
        self.a,self.na,self.b,self.nb = layer(n),norm(),layer(n),norm()
    def forward(self, x):
        h = self.act(self.na(self.a(x)))
        if self.way=='in a row': return self.nb(self.b(h))
        if self.way=='residual': return self.act(x+self.nb(self.b(h)))
        if self.way=='norm first': return x+self.b(self.act(self.nb(h)))
        if self.way=='gate': return h*self.nb(self.b(x)).sigmoid()
        if self.way=='squeeze': return x*self.b(h if self.flat else h.mean(tuple(range(2, h.ndim)), keepdim=True)).sigmoid()
        if self.way=='twice': return self.b(self.act(self.b(h)))
        if self.way=='scale': return self.nb(self.b(h))*2.-x.abs()
        return x+torch.cat([self.nb(self.b(h))[:,i:i+1] for i in range(x.shape[1])], 1)

class Network(nn.Module):
    "A stem, blocks with 1x1 layers between them that change the number of channels, a head; drawn by `rng`"
    def __init__(self, rng):
        super().__init__()
        self.kind = rng.choice(['linear','conv1','conv2'])
        k,pad,groups = rng.choice([1,3]),rng.choice(['zeros','zeros','circular']),rng.random()<.2
        conv = dict(conv1=nn.Conv1d, conv2=nn.Conv2d).get(self.kind)
        def layer(i, o=None, k=k):
            if conv is None: return nn.Linear(i, o or i, bias=rng.random()<.6)
            return conv(i, o or i, k, padding=k//2, padding_mode=pad, groups=i if groups and o is None else 1, bias=rng.random()<.6)
        flat = conv is None
        def norm(n):
            made = rng.choice(['batch','batch','batch','none','instance','plain batch'])
            dim = 1 if flat or self.kind=='conv1' else 2
            if made=='none' or made=='instance' and flat: return nn.Identity()
            batch,instance = [getattr(nn, f'{o}Norm{dim}d') for o in ('Batch','Instance')]
            return instance(n, affine=True) if made=='instance' else batch(n, affine=made=='batch')
        ways = ['in a row','residual','norm first','gate','squeeze','scale','twice']
        layers,n = [layer(3, rng.randint(2, 6), 1)],0
        n = layers[0].weight.shape[0]
        for _ in range(rng.randint(1, 3)):
            act = rng.choice([nn.ReLU(), nn.Tanh(), nn.GELU(), nn.Sigmoid()])
            layers.append(Block(rng.choice(ways), layer, lambda n=n: norm(n), act, n, flat))
            layers += [layer(n, m := rng.randint(2, 6), 1), norm(m), nn.ReLU()]
            n = m
        self.body,self.head = nn.Sequential(*layers),nn.Linear(n, 2)
        for m in self.modules():
            if not isinstance(m, nn.modules.batchnorm._BatchNorm): continue
            for t in (m.running_mean,m.weight,m.bias):
                if t is not None: t.data.normal_()
            m.running_var.uniform_(.5, 2)
            m.eps = 1e-2  # rounding of a constant grows tenfold in a norm, not 316 times, as it does by the default
    def forward(self, x): return self.head(self.body(x) if self.kind=='linear' else self.body(x).flatten(2).mean(2))
    def batch(self): return torch.randn(5, 3, *dict(linear=[], conv1=[7], conv2=[5,5])[self.kind]).double()

def network(seed):
    torch.manual_seed(seed)
    return Network(random.Random(seed)).double(),random.Random(seed+1)

def outputs(model, x, training):
    "Of a copy, so that no statistic of a norm moves"
    with torch.no_grad(): return copy.deepcopy(model).train(training)(x)

def equal(small, model, x, modes=(False,True)):
    "The same outputs in each mode, in float64"
    for training in modes:
        a,b = outputs(small, x, training),outputs(model, x, training)
        # a running mean within a millionth of a constant counts as that constant
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda s: f"{'training' if training else 'evaluation'}: {s}")

def deaden(model, rng):
    "Masks with dead rows, columns and single weights; the norms of some dead rows have seen enough batches to know them"
    masks = {}
    for n,m in model.named_modules():
        w = getattr(m, 'weight', None)
        if w is None or w.ndim<2: continue
        mask = torch.rand(w.shape)<rng.choice([.5,.9,1.])
        for d in (0,1):
            if rng.random()<.6 and w.shape[d]>1 and m is not model.head: mask.movedim(d, 0)[torch.rand(w.shape[d])<.4] = False
        masks[f'{n}.weight'] = mask
    sparsify_model(model, .5, mask_init=masks, seed=0, also=list(masks))
    for _ in range(rng.choice([0,0,250])): model.train()(model.batch())

def check_dead(seed):
    "What is dead anywhere, in one network"
    model,rng = network(seed)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        deaden(model, rng)
        for fold in (False,True):
            small,_ = shrink(model.eval(), model.batch(), fold=fold)
            equal(small, model, model.batch(), (False,) if fold else (False,True))

optimizers = dict(sgd=lambda ps: torch.optim.SGD(ps, .05, momentum=.9, weight_decay=.1), adam=lambda ps: torch.optim.AdamW(ps, .01, eps=1e-4))  # a bias before a norm has a gradient of rounding errors alone

def train(model, opt, batches):
    model.train()
    for x in batches:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return model

def check_pruned(seed):
    "Channels that are pruned, masked and cut: both train alike, bit by bit of the same mathematics"
    model,rng = network(seed)
    opt = optimizers[rng.choice(sorted(optimizers))](model.parameters())
    if rng.random()<.5: train(model, opt, [model.batch()])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if masked := rng.random()<.3: sparsify_model(model, .3, seed=seed)
        how = dict(ranking=rng.choice(['space','global']), multiple=rng.choice([1,2]), budget=rng.choice(['channels','weights','flops']))
        try: prune_channels(model, rng.choice([.2,.5,.7]), model.batch(), **how)
        except ValueError as e:
            assert 'that can go' in str(e) or 'with one channel in each layer' in str(e)
            return
        small,removed,own = shrink(model, model.batch(), opt)
    assert {id(p) for g in own.param_groups for p in g['params']}=={id(p) for p in small.parameters()}
    equal(small, model, model.batch())
    if masked: return  # a channel without live inputs is a constant there, whose own bias trains beside the one that takes it up
    batches = [model.batch() for _ in range(3)]
    equal(train(small, own, batches), train(model, opt, batches), model.batch())

class Depthwise(nn.Module):
    "Two of three constant channels are read by one convolution alone, where a padded one has no weights for them"
    def __init__(self):
        super().__init__()
        self.stem,self.a,self.b,self.end = nn.Conv1d(2, 4, 1),*[nn.Conv1d(4, 4, 3, padding=1, groups=4) for _ in range(2)],nn.Conv1d(4, 2, 1)
        with torch.no_grad():
            self.stem.weight[:3],self.a.weight[2],self.b.weight[:2] = 0,0,0
            self.b.weight[2] = torch.tensor([0.,1.,0.])
    def forward(self, x): return self.end((h := self.stem(x))+self.b(self.a(h)))

class Gated(nn.Module):
    "Channels 1 and 2 are constant for a padded convolution; behind a gate the first one varies, and isn't read"
    def __init__(self):
        super().__init__()
        self.stem,self.gate,self.a,self.end = nn.Conv1d(2, 4, 1),nn.Conv1d(2, 4, 1),nn.Conv1d(4, 2, 3, padding=1),nn.Conv1d(4, 2, 1)
        with torch.no_grad(): self.stem.weight[1:3],self.gate.weight[2],self.end.weight[:,1] = 0,0,0
    def forward(self, x): return self.a(h := self.stem(x))+self.end(h*self.gate(x).sigmoid())

@pytest.mark.parametrize('net', [Depthwise, Gated])
def test_a_channel_carries_only_what_it_adds_itself(net):
    "None of several constants carries the others' where outputs are its own, or where it varies and isn't read"
    torch.manual_seed(0)
    model,x = net().double().eval(),torch.randn(5, 2, 7).double()
    small,_ = shrink(model, x)
    equal(small, model, x)

checks = dict(dead=check_dead, pruned=check_pruned)

@pytest.mark.parametrize('check', checks)
def test_cut_networks_compute_what_masked_ones_do(check): for_drawn(checks[check], 8)

@pytest.mark.full
@pytest.mark.parametrize('check', checks)
def test_thousands_of_cut_networks_compute_what_masked_ones_do(check): for_drawn(checks[check], 1000)

elementwise = {*torchs}-{'Adafactor','LBFGS','Muon','SparseAdam'}

@pytest.mark.parametrize('name', [o for o in torchs if o!='SparseAdam'])
def test_a_cut_copy_goes_on_with_every_optimizer(name):
    "torch's own configurations: the optimizer that comes back has all parameters, groups and state, and trains the copy as the masked model is trained"
    for kw in torchs[name][1:]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6,8, bias=name!='Muon'), nn.Tanh(), nn.Linear(8,3, bias=name!='Muon')).double()
        opt,xs = getattr(torch.optim, name)(model.parameters(), **dict(dict(lr=.01)|kw)),[torch.randn(5,6).double() for _ in range(5)]
        def steps(model, opt, xs):
            for x in xs:
                def closure():
                    opt.zero_grad()
                    (loss := model(x).square().mean()*(-1 if kw.get('maximize') else 1)).backward()
                    return loss
                opt.step(closure) if name=='LBFGS' else (closure(), opt.step())
        steps(model, opt, xs[:2])
        prune_channels(model, .5, xs[0])
        small,_,own = shrink(model, xs[0], opt)
        assert {id(p) for g in own.param_groups for p in g['params']}=={id(p) for p in small.parameters()} and len(own.state)==len(opt.state)*(name!='LBFGS')
        assert [{k:v for k,v in g.items() if k!='params'} for g in own.param_groups]==[{k:v for k,v in g.items() if k!='params'} for g in opt.param_groups]
        for m,of in ((small,own),(model,opt)): steps(m.train(), of, xs[2:])
        if name in elementwise: equal(small, model, xs[0])
