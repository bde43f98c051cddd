"Wanda and SparseGPT by hand, and beside plain optimal brain surgery in float64"
import copy,math,numpy as np,pytest,torch,warnings
from fastsparse.all import *
from fastsparse.model.layers import register_layer
from fastsparse.prune.inputs import layer_patches
from fastsparse.weights.find import masked_params
from helpers import *
from test_inputs import convs
from test_magnitude import bagged,best_nm,data_of,legal_along,live_of,net_of
from torch import nn
from torch.nn import functional as F

def test_wanda_by_hand():
    "abs(w)*norm of the input column, the same number in each row; weights stay"
    layer = nn.Linear(4, 2, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([[1.,2.,3.,4.],[-4.,3.,-2.,1.]]))
    x = torch.tensor([[3.,0.,1.,0.],[4.,2.,0.,1.]])  # norms 5, 2, 1, 1: scores [5,4,3,4] and [20,6,2,1]
    prune_wanda(layer, .5, [x])
    assert layer.weight.tolist()==[[1.,2.,0.,0.],[-4.,3.,0.,0.]]
    layer = nn.Linear(4, 2, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([[1.,2.,3.,4.],[-4.,3.,-2.,1.]]))
    prune_wanda(layer, .6, [x])  # round(.4*8)=3 live: two in the first row, one in the second
    assert layer.weight.tolist()==[[1.,2.,0.,0.],[-4.,0.,0.,0.]]

def test_wanda_beside_infinities():
    "An infinite weight lives; one that is NaN, or infinite where no input comes, doesn't"
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): layer.weight.copy_(torch.tensor([[math.nan,math.inf,-math.inf,1e-9]]))
    prune_wanda(layer, .5, [torch.tensor([[1.,0.,1.,1.]])])
    assert layer.weight_mask.tolist()==[[False,False,True,True]]

def test_wanda_on_a_convolution():
    "Norms of unfolded, padded inputs, a group of channels at a time; 2:4 along input channels"
    torch.manual_seed(0)
    conv,x = nn.Conv2d(8, 6, 3, padding=1, groups=2, bias=False),torch.randn(5,8,6,6)
    score = torch.stack([F.unfold(o, 3, padding=1).square().sum((0,2)).sqrt().view(4,3,3) for o in x.chunk(2, 1)])
    score = (conv.weight.abs().view(2,3,4,3,3)*score[:,None]).view(6,4,3,3).detach()
    prune_wanda(conv, '2:4', [x[:2],x[2:]])
    got = conv.weight_mask.movedim(1,-1).reshape(-1,4).numpy()
    assert np.array_equal(got, best_nm(score.movedim(1,-1).reshape(-1,4).numpy(), 2, 4))

def _obs(w, H, groups, choose):
    "Plain float64 optimal brain surgery of one row: an inverse of the rest of H for each column"
    w,mask = w.copy(),np.ones(len(w), bool)
    for q in range(len(w)):
        inv = lambda j: np.linalg.inv(H[j:,j:])
        if (g := [o for o in groups if o[0]==q]): mask[g[0][0]:g[0][1]] = choose(np.array([w[j]**2/inv(j)[0,0] for j in range(*g[0])]))
        if not mask[q]:
            i = inv(q)
            w[q:] -= w[q]/i[0,0]*i[0]
            w[q] = 0
    return w,mask

def _hessian(patches, damp):
    H = 2/len(patches)*patches.T@patches
    dead = np.diag(H)==0
    H[dead,dead] = 1
    return H+damp*np.diag(H).mean()*np.eye(len(H)),dead

@pytest.mark.parametrize('block', [1,3,4,128])
@pytest.mark.parametrize('target,n,m', [('2:4',2,4), ('1:4',1,4), ('3:4',3,4), ('2:5 pad',2,5)])
def test_sparsegpt_nm_against_plain_obs(target, n, m, block):
    "Column by column in float64; keeps n of m (004 pruned n), updates weights (004 threw the updates away), a dead column, any block"
    torch.manual_seed(0)
    layer,x = nn.Linear(12, 5, dtype=torch.double),data_of(cols=12)[0].double()
    x[:,7] = 0
    w0,bias = layer.weight.detach().numpy().copy(),layer.bias.clone()
    H,dead = _hessian(x.numpy(), .02)
    w0[:,dead] = 0
    def best(s):
        keep = np.zeros(len(s), bool)
        keep[oracle_order(s, np.ones(len(s), bool))[:n]] = True
        return keep
    want = [_obs(w, H, [(i,min(i+m,12)) for i in range(0,12,m)], best) for w in w0]
    prune_sparsegpt(layer, target, [x[:16],x[16:]], block=block, damp=.02)
    assert np.allclose(layer.weight.detach().numpy(), np.stack([w for w,_ in want]), atol=1e-9)
    assert np.array_equal(layer.weight_mask.numpy(), np.stack([m for _,m in want])) and torch.equal(layer.bias, bias)
    assert not np.allclose(w0[layer.weight_mask.numpy()], layer.weight.detach().numpy()[layer.weight_mask.numpy()])

def test_sparsegpt_unstructured_against_plain_obs():
    "One block: the cheapest of the whole layer go first; each row is then plain OBS with that mask"
    torch.manual_seed(1)
    layer,x = nn.Linear(10, 6, dtype=torch.double),data_of(cols=10)[0].double()
    w0 = layer.weight.detach().numpy().copy()
    H,_ = _hessian(x.numpy(), .01)
    cost = np.array([[w[j]**2/np.linalg.inv(H[j:,j:])[0,0] for j in range(10)] for w in w0])
    mask = np.zeros(60, bool)
    mask[oracle_order(cost, np.ones(60, bool))[:round(.35*60)]] = True
    mask = mask.reshape(6,10)
    want = np.stack([_obs(w, H, [(0,10)], lambda s: m)[0] for w,m in zip(w0,mask)])
    prune_sparsegpt(layer, .65, [x])
    assert np.array_equal(layer.weight_mask.numpy(), mask) and np.allclose(layer.weight.detach().numpy(), want, atol=1e-9)

@pytest.mark.parametrize('block', [1,3,4])
def test_sparsegpt_blocks_against_plain_obs(block):
    "At the start of each block the cheapest of all outputs go, by weights that made up for what was pruned before; a plain inverse for each column"
    torch.manual_seed(3)
    layer,x = nn.Linear(12, 5, dtype=torch.double),data_of(cols=12)[0].double()
    w = layer.weight.detach().numpy().copy()
    H,_ = _hessian(x.numpy(), .01)
    mask = np.ones(w.shape, bool)
    for q in range(12):
        if q%block==0:
            cost = w[:,q:q+block]**2/np.array([np.linalg.inv(H[j:,j:])[0,0] for j in range(q,q+block)])
            keep = oracle_order(cost, np.ones(cost.size, bool))[:cost.size*2//5]
            mask[:,q:q+block] = np.isin(np.arange(cost.size), keep).reshape(cost.shape)
        i = np.linalg.inv(H[q:,q:])
        for r in np.flatnonzero(~mask[:,q]): w[r,q:] -= w[r,q]/i[0,0]*i[0]
    prune_sparsegpt(layer, .6, [x], block=block)
    assert np.array_equal(layer.weight_mask.numpy(), mask) and np.allclose(layer.weight.detach().numpy(), w*mask, atol=1e-9)

@pytest.mark.parametrize('block', [3,4,7])
def test_sparsegpt_counts(block):
    "Law 1: the total is exact whatever the blocks"
    layer = nn.Linear(10, 7)
    prune_sparsegpt(layer, .37, [data_of(cols=10)[0]], block=block)
    assert layer.weight_mask.sum()==round(.63*70)
    assert_dead(layer)

def test_sparsegpt_on_a_convolution_is_that_of_its_patches():
    "N:M runs along input channels, as magnitudes do (004: one did, the other not); each group of channels has its own Hessian"
    torch.manual_seed(2)
    conv = nn.Conv2d(8, 6, 3, padding=1, stride=2, groups=2, dtype=torch.double)
    x = torch.randn(4, 8, 9, 9, dtype=torch.double)
    patches,w0 = layer_patches(conv, x),conv.weight.detach().clone()
    prune_sparsegpt(conv, '2:4', [x])
    order = torch.arange(36).view(4,9).T.flatten()
    for g in range(2):
        lin = nn.Linear(36, 3, bias=False, dtype=torch.double)
        with torch.no_grad(): lin.weight.copy_(w0[3*g:3*g+3].flatten(1)[:,order])
        prune_sparsegpt(lin, '2:4', [patches[g][:,order]])
        assert torch.allclose(conv.weight[3*g:3*g+3].flatten(1)[:,order], lin.weight, atol=1e-9)
    assert (conv.weight_mask.sum(1)==2).all()

@pytest.mark.parametrize('cls,kwargs,size', convs)
def test_sparsegpt_beats_its_own_mask(cls, kwargs, size):
    "On every convolution the updated weights come nearer to the old outputs than the old weights under the same mask; flattened N:M too"
    torch.manual_seed(0)
    for target in (.5,'2:3 flat'):
        layer,x = cls(4, 8, 3, **kwargs),torch.randn(6 if size!=(7,) else 20, 4, *size)
        old,y = copy.deepcopy(layer),layer(x).detach()
        prune_sparsegpt(layer, target, [x])
        with torch.no_grad(): old.weight.mul_(layer.weight_mask)
        assert F.mse_loss(layer(x), y)<F.mse_loss(old(x), y)

def test_half_precision():
    "Statistics are kept in float64: a bfloat16 model of large inputs is pruned like its double"
    torch.manual_seed(0)
    net,x = nn.Linear(16, 8).bfloat16(),(data_of(cols=16)[0]*1e3).bfloat16()
    for f in (prune_wanda, prune_sparsegpt):
        a,b = copy.deepcopy(net),copy.deepcopy(net).double()
        f(a, '2:4', [x])
        f(b, '2:4', [x.double()])
        assert a.weight.dtype==torch.bfloat16 and torch.equal(a.weight_mask, b.weight_mask) and torch.allclose(a.weight.double(), b.weight, rtol=1e-2)

x8 = data_of()[0]
refused = [(prune_sparsegpt, dict(sparsity={'0':'2:4 axis 0'}), 'along inputs'), (prune_sparsegpt, dict(sparsity=(.5,'block 2x2')), 'along inputs'),
    *[(f, o, what) for f in (prune_wanda, prune_sparsegpt) for o,what in ((dict(data=[]),'reached by the data'), (dict(data=None),'only a Learner'),
        (dict(data=[x8*math.nan]),'not finite'), (dict(data=[x8[:,:5]]),'shapes cannot be multiplied'))],
    *[(f, {k:v}, f'{k} is {v!r}, and must be a whole number from 1') for k,f in (('n_samples',prune_wanda), ('bs',prune_wanda), ('block',prune_sparsegpt))
        for v in (True,0,-1,2.,'3',None)],
    *[(prune_sparsegpt, dict(damp=v), 'damp is .*must be a number from 0') for v in ('0.01',None,True,-1.,math.nan,math.inf,[.1])]]

@pytest.mark.parametrize('f,kwargs,what', refused)
def test_refused(f, kwargs, what):
    "Law 10: by value and range, before anything changed"
    net = net_of()
    old = copy.deepcopy(net.state_dict())
    with pytest.raises((ValueError,RuntimeError), match=what): f(net, **dict(dict(sparsity=.5, data=[x8]), **kwargs))
    assert agree(old, net.state_dict()) and not any(m._forward_pre_hooks for m in net.modules())

def test_sparsegpt_refuses_what_it_would_spread():
    "A weight that is not finite"
    layer = nn.Linear(8, 4)
    layer.weight.data[1,2] = math.nan
    with pytest.raises(ValueError, match='not finite'): prune_sparsegpt(layer, .5, [x8])

def test_all_or_nothing():
    "A layer that can't be solved leaves those before it as they were, without masks"
    net,x = nn.Sequential(nn.Linear(8,4), nn.Linear(4,20), nn.Linear(20,3)),data_of(n=12)[0]
    net[0].register_forward_hook(lambda m,a,o: o*0 if m.weight.count_nonzero()<32 else o)
    old = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r'inputs of 2\.weight depend on each other.*damp=0.01'): prune_sparsegpt(net, .5, [x], damp=0.)
    assert net.state_dict().keys()==old.keys() and all(torch.equal(v, net.state_dict()[k]) for k,v in old.items())
    def fail(m): raise KeyboardInterrupt
    calls = iter(range(9))
    with pytest.raises(KeyboardInterrupt): prune_sparsegpt(net, .5, lambda m: m(x) if next(calls)<2 else fail(m))
    assert all(torch.equal(v, net.state_dict()[k]) for k,v in old.items()) and not any(m._forward_pre_hooks for m in net.modules()) and net.training

@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('target', [.5,'2:4'])
def test_same_on_a_gpu(target):
    "The Hessian is added up once there too (004 did so twice): masks and weights as on the CPU"
    x = torch.randn(16, 4, 8, 8)
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Conv2d(4,8,3,padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512,16)))[1]
    for f in (prune_sparsegpt, prune_wanda):
        a,b = make(),make().cuda()
        f(a, target, [x])
        f(b, target, [x.cuda()])
        assert all((p.cpu()==q).float().mean()>.999 for p,q in zip(masks_of(b), masks_of(a))) and all(m.is_cuda for m in masks_of(b))
        assert torch.allclose(a(x), b(x.cuda()).cpu(), atol=1e-2)

def test_what_inputs_cannot_reach_stays_dense():
    "Recurrent weights have no inputs that data shows: a warning names them, and the sparsity that is reached"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.att,self.rnn,self.lin = nn.MultiheadAttention(8,2),nn.GRU(8,8),nn.Linear(8,8)
        def forward(self, x): return self.lin(self.rnn(self.att(x,x,x)[0])[0])
    net = Net()
    with pytest.warns(UserWarning, match=r'^rnn\.weight_hh_l0 .*stay dense'): prune_wanda(net, .5, [torch.randn(5,3,8)])
    assert {o.name: float(o.mask.float().mean()) for o in masked_params(net)}=={'att.in_proj_weight':.5, 'att.out_proj.weight':.5, 'rnn.weight_ih_l0':.5, 'rnn.weight_hh_l0':1., 'lin.weight':.5}

def test_transposed_convolutions_stay_dense_with_sparsegpt():
    "They can't be pruned by inputs: a warning, whatever the structure"
    net = nn.Sequential(nn.Conv1d(4,8,1), nn.ConvTranspose1d(8,4,2))
    with pytest.warns(UserWarning, match=r'1\.weight can.t be pruned by inputs'): prune_sparsegpt(net, '2:4', [torch.randn(8,4,5)])
    assert net[1].weight_mask.all() and legal_along(net[0].weight_mask, 1)

@pytest.mark.parametrize('f', [prune_wanda, prune_sparsegpt])
def test_unknown_products_stay_dense_by_name(f):
    "Pruning by inputs can't see what meets an expert, says so by name, and prunes the rest"
    m,x = bagged(),torch.randn(32,8)
    with pytest.warns(UserWarning, match="2.up can't be pruned by inputs"): f(m, .5, data=[(x,)], also='*.up')
    assert live_of(m)=={'0.weight_mask':32, '2.up_mask':512, '4.weight_mask':32} or '2.up_mask' not in live_of(m)

def _attended(att, q, k, v):
    "Multi-head attention in plain steps, up to what meets `out_proj`"
    E = att.embed_dim
    w,b = att.in_proj_weight.detach().double(),att.in_proj_bias.detach().double()
    q,k,v = [x.double()@w[i*E:(i+1)*E].T+b[i*E:(i+1)*E] for i,x in enumerate((q,k,v))]
    heads = lambda x: x.unflatten(-1, (att.num_heads,-1)).transpose(1,2)
    q,k,v = map(heads, (q,k,v))
    return ((q@k.mT/q.shape[-1]**.5).softmax(-1)@v).transpose(1,2).flatten(2)

class _Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = nn.MultiheadAttention(8, 2, batch_first=True)
    def forward(self, q, kv): return self.att(q, kv, kv*2, need_weights=False)[0]

def _row_oracle(w, norms, n):
    "The highest of |w|*norm in each row, equally many"
    score,k = (w.double().abs()*norms).numpy(),n//len(w)
    mask = np.zeros(score.shape, bool)
    for i,row in enumerate(score): mask[i, np.argsort(-row, kind='stable')[:k]] = True
    return torch.from_numpy(mask)

def test_wanda_for_attention():
    "Queries, keys and values have norms of their own, also where they are of different lengths; out_proj sees what the pruned projections give"
    torch.manual_seed(0)
    net,q,kv = _Cross(),torch.randn(5,3,8)*torch.arange(1,9),torch.randn(5,7,8)
    w,out = net.att.in_proj_weight.detach().clone(),net.att.out_proj.weight.detach().clone()
    prune_wanda(net, .5, [(q,kv,torch.zeros(5))], n_samples=5)
    norms = [x.reshape(-1,8).double().norm(dim=0) for x in (q,kv,kv*2)]
    for i in range(3): assert torch.equal(net.att.in_proj_weight_mask[i*8:(i+1)*8], _row_oracle(w[i*8:(i+1)*8], norms[i], 32))
    x = _attended(net.att, q, kv, kv*2).reshape(-1,8)
    assert torch.equal(net.att.out_proj.weight_mask, _row_oracle(out, x.norm(dim=0), 32))

def test_sparsegpt_for_attention():
    "Each projection is pruned as a linear layer of its own with the same inputs would be"
    torch.manual_seed(0)
    net,q,kv = _Cross(),torch.randn(40,3,8)@torch.randn(8,8),torch.randn(40,7,8)@torch.randn(8,8)
    alone = []
    for i,x in enumerate((q,kv,kv*2)):
        layer = nn.Sequential(nn.Linear(8,8))
        with torch.no_grad(): layer[0].weight.copy_(net.att.in_proj_weight[i*8:(i+1)*8])
        prune_sparsegpt(layer, '2:4', [x.reshape(-1,8)], n_samples=1)
        alone.append(layer[0])
    prune_sparsegpt(net, '2:4', [(q,kv,torch.zeros(40))], n_samples=40)
    assert torch.equal(net.att.in_proj_weight_mask, torch.cat([o.weight_mask for o in alone]))
    assert torch.allclose(net.att.in_proj_weight, torch.cat([o.weight for o in alone]), atol=1e-5)

@pytest.mark.parametrize('method', [prune_wanda, prune_sparsegpt])
@pytest.mark.parametrize('target', [.9, '2:4'])
def test_transformers_are_pruned_whole(method, target):
    "An encoder layer reaches what was asked for, without a word; SparseGPT's outputs are nearer to the dense ones than Wanda's"
    torch.manual_seed(0)
    net,x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),torch.randn(64,6,16)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        method(net, target, [x], n_samples=64)
    n,live = sum(o.p.numel() for o in masked_params(net)),sum(int(o.p.count_nonzero()) for o in masked_params(net))
    assert len(masked_params(net))==4 and live==round(n*(.1 if target==.9 else .5))

class _Padded(nn.Module):
    "Classifies padded sequences, as torch's own encoder does by default"
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16,3)
    def forward(self, x, attention_mask): return self.head(self.enc(x, src_key_padding_mask=~attention_mask.bool())[:,0])

@pytest.mark.parametrize('method', [prune_wanda, prune_sparsegpt])
def test_padded_sequences(method):
    "Layers are seen one by one, not in torch's fused path with its nested tensors; padding is left out"
    torch.manual_seed(0)
    net,x = _Padded().eval(),torch.randn(8,5,16)
    mask = (torch.arange(5)<torch.tensor([5,4,3,2,1,5,5,5])[:,None]).long()
    w,want = net.enc.layers[0].linear1,[]
    old,seen = w.weight.detach().clone(),w.register_forward_pre_hook(lambda m, args: want.append(args[0].detach()))
    net(x, mask)
    seen.remove()
    method(net, {'enc.layers.0.linear1': .5}, [dict(x=x, attention_mask=mask)])
    assert torch.backends.mha.get_fastpath_enabled()
    if method is prune_wanda: assert torch.equal(w.weight_mask, _row_oracle(old, want[0].double()[mask.bool()].norm(dim=0), 256))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        method(_Padded(), .5, [dict(x=x, attention_mask=torch.ones_like(mask))])

@pytest.mark.parametrize('kind', [nn.LSTM,nn.GRU,nn.RNN])
@pytest.mark.parametrize('started', [False,True])
def test_wanda_for_recurrent_inputs(kind, started):
    "Each layer's input projection is pruned by what it sees, both ways and from the states it starts in; recurrent weights stay dense, and the number that is reached is said"
    torch.manual_seed(0)
    net,x = kind(6, 4, num_layers=3, bidirectional=True, batch_first=True),torch.randn(9,5,6)*torch.arange(1,7)
    h,dense = 3*torch.randn(6,9,4),copy.deepcopy(net)
    def start(h): return (h,h.flip(0)) if kind is nn.LSTM else h
    n_all = sum(p.numel() for p in net.parameters() if p.ndim>1)
    n_ih = sum(p.numel() for n,p in net.named_parameters() if 'weight_ih' in n)
    with pytest.warns(UserWarning, match=f'weight_hh_l0.*stay dense.*sparsity of {.5*n_ih/n_all:.4g} instead of 0.5'):
        prune_wanda(net, .5, [dict(input=x, hx=start(h)) if started else x], n_samples=9)
    for d in ('','_reverse'):
        w = getattr(dense, f'weight_ih_l0{d}').detach()
        assert torch.equal(getattr(net, f'weight_ih_l0{d}_mask'), _row_oracle(w, x.reshape(-1,6).double().norm(dim=0), w.numel()//2))
    one = kind(6, 4, bidirectional=True, batch_first=True)
    one.load_state_dict({k: v for k,v in net.state_dict().items() if '_l0' in k and not k.endswith(('_mask','_sparsity'))})
    states = (h[:2],h.flip(0)[:2]) if kind is nn.LSTM else h[:2]
    seen = one(x, states if started else None)[0].detach().reshape(-1,8).double().norm(dim=0)
    for d in ('','_reverse'):
        w = getattr(dense, f'weight_ih_l1{d}').detach()
        assert torch.equal(getattr(net, f'weight_ih_l1{d}_mask'), _row_oracle(w, seen, w.numel()//2))

class _InputsFirst(nn.Linear):
    def __init__(self, ins, outs):
        super().__init__(ins, outs, bias=False)
        self.weight = nn.Parameter(torch.randn(ins, outs))
    def forward(self, x): return x@self.weight

register_layer(_InputsFirst, inputs=0, outputs=1, product='linear')

@pytest.mark.parametrize('method', [prune_wanda, prune_sparsegpt])
@pytest.mark.parametrize('target', [.5, '2:4'])
def test_inputs_first_is_the_transpose(method, target):
    "A weight that lies inputs x outputs is pruned as its transpose is"
    torch.manual_seed(0)
    x,turned = torch.randn(64,8)@torch.randn(8,8),nn.Sequential(_InputsFirst(8,4))
    plain = nn.Sequential(nn.Linear(8,4,bias=False))
    with torch.no_grad(): plain[0].weight.copy_(turned[0].weight.T)
    for net in (plain,turned): method(net, target, [x], n_samples=64)
    assert torch.equal(plain[0].weight_mask.T, turned[0].weight_mask) and torch.allclose(plain[0].weight.T, turned[0].weight)
