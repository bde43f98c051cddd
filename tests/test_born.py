"A model on the meta device becomes sparse without its dense weights: the same masks, values by each layer's own rule, and training as of other live models"
import copy,pickle,pytest
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastsparse.all import *
from fastsparse.masks.selection import highest
from fastsparse.special.starts import checkerboard
from fastsparse.live.compute import store_dense
from fastsparse.train.engine import Score
from helpers import *

def net(n=64): return nn.Sequential(nn.Linear(12,n), nn.ReLU(), nn.Linear(n,n), nn.ReLU(), nn.Linear(n,5))

class Vision(nn.Module):
    "Convolutions with norms, attention, and an embedding that is tied to the last layer"
    def __init__(self):
        super().__init__()
        self.conv,self.norm,self.attn = nn.Conv2d(3, 16, 3, padding=1),nn.BatchNorm2d(16),nn.MultiheadAttention(16, 2, batch_first=True)
        self.up,self.emb,self.head = nn.Linear(16, 64),nn.Embedding(9, 64),nn.Linear(64, 9)
        self.head.weight = self.emb.weight
        self.conv.bias.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.conv(x)).flatten(2).mT
        return self.head(self.up(self.attn(x, x, x, need_weights=False)[0].mean(1)).relu())

def born(make=net, s=.9, seed=0, **kwargs):
    with torch.device('meta'): m = make()
    sparsify_model(m, s, seed=seed, **kwargs)
    return m

def kinds(m): return [w.store.kind for w in masked_params(m)]
def values(m): return [(w.p*1).detach() for w in masked_params(m)]

settings = dict(plain={}, uniform=dict(sparse_f='uniform'), fan_in=dict(structure='fan-in'), block=dict(structure='block 4x1', s=.95, chosen=['0.weight','2.weight']), nm=dict(structure='2:4', s=.5),
    even=dict(mask_init=checkerboard), some=dict(chosen='2.weight', s=.97), rules=dict(s={'0.weight':.8, '2.weight':.95}))

@pytest.mark.parametrize('kwargs', settings.values(), ids=settings)
def test_masks_are_those_of_a_model_with_values(kwargs):
    kwargs = dict(kwargs)
    s = kwargs.pop('s', .9)
    a,b = born(s=s, **kwargs),net()
    sparsify_model(b, s, seed=0, **kwargs)
    assert [w.name for w in masked_params(a)]==[w.name for w in masked_params(b)]
    for v,w in zip(masked_params(a), masked_params(b)):
        assert v.mask.equal(w.mask) and (v.store.kind=='rows')==(4*int(w.mask.sum())<=w.mask.numel())
        assert is_positive_zero((v.p*1)[~v.mask])
    assert not any(t.is_meta for t in (*a.parameters(), *a.buffers()))

def test_values_are_those_of_the_layer():
    "Uniform up to `1/sqrt(fan_in)` as of `nn.Linear`, and rescaled by the square root of density where masks would kill the signal"
    m = born(lambda: nn.Linear(400, 300), .9, sparse_init_mode=None)
    w,b = values(m)[0][m.weight_mask],m.bias.detach()
    for t in (w, b): assert t.abs().max()<=.05 and abs(float(t.mean()))<.003 and abs(float(t.std())-.05/3**.5)<.003
    deep = born(lambda: nn.Sequential(*[nn.Linear(100,100) for _ in range(4)]), .99)
    top = [float(v.abs().max()*(int(w.mask.sum())/w.mask.numel())**.5) for v,w in zip(values(deep), masked_params(deep))]
    assert all(.09<t<=.1 for t in top)

def test_the_seed_decides():
    "Equal seeds give equal masks and values, whatever else draws or the default device is; torch's own generator is left alone"
    torch.manual_seed(5)
    a = born()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.rand(3).equal(after)
    with torch.device('meta'):
        b,other = net(),net()
        for m,seed in ((b,0), (other,1)): sparsify_model(m, .9, seed=seed)
    assert all(torch.equal(p*1, q*1) for p,q in zip(a.parameters(), b.parameters()))
    assert not any(torch.equal(p*1, q*1) for p,q in zip(a.parameters(), other.parameters()))
    x,free = torch.randn(4, 12),born(seed=None)
    assert a(x).equal(b(x)) and not free(x).equal(a(x))

def test_all_kinds_of_layers():
    "Tied weights stay tied, frozen ones frozen, norms and embeddings begin as torch's do"
    m = born(Vision, .8, chosen=['conv.weight', 'attn.*', 'up.weight'])
    assert m.head.weight is m.emb.weight and not m.conv.bias.requires_grad and m.norm.running_var.eq(1).all() and m.norm.weight.eq(1).all()
    assert .9<float(m.emb.weight.detach().std())<1.1 and m.attn.out_proj.bias.eq(0).all() and kinds(m).count('rows')>2
    x,twin = torch.randn(6,3,4,4),copy.deepcopy(m)
    assert kinds(twin)==[None]*4 and torch.allclose(m.eval()(x), twin.eval()(x), atol=1e-5)
    m.train()(x).sum().backward()
    assert all(p.grad is not None for p in m.parameters() if p.requires_grad)

@pytest.mark.parametrize('method', ['rigl', 'set', 'gse', 'mest'])
def test_training_is_that_of_a_model_with_the_same_values(method):
    def run(m, sparse_compute):
        opt,losses = torch.optim.Adam(m.parameters(), .01),[]
        dst = DynamicSparseTraining(m, opt, 60, method=method, seed=3, sparse_compute=sparse_compute, updates=[10,20,30])
        for i in range(60):
            x,_ = data(m, seed=i)
            loss = nn.functional.cross_entropy(m(x), x[:,:5].argmax(1))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert dst.n_updates==3
        return losses
    m = born(lambda: net().double(), sparse_f='erk')
    twin,start = copy.deepcopy(m),[w.mask.clone() for w in masked_params(m)]
    a,b = run(m, None),run(twin, False)
    assert kinds(m)==['rows','rows',None] and kinds(twin)==[None]*3  # live weights stay so after the run
    assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-9) and a[-1]<a[0]
    assert all(v.mask.equal(w.mask) for v,w in zip(masked_params(m), masked_params(twin)))
    assert not any(w.mask.equal(old) for w,old in zip(masked_params(m)[:2], start))

def test_saved_and_loaded(tmp_path):
    "`state_dict`, pickle, `save_run` and `store_dense`, as of other live models; a run that was cut goes on bit for bit"
    def start():
        m = born(sparse_f='erk')
        opt = torch.optim.Adam(m.parameters(), .01)
        return m,opt,DynamicSparseTraining(m, opt, 40, method='rigl', seed=3, batches_per_update=5)
    def go(m, opt, n):
        for i in range(n):
            nn.functional.mse_loss(m(data(m, seed=i)[0]), data(m, seed=i)[1]).backward()
            opt.step()
            opt.zero_grad()
    m,opt,dst = start()
    go(m, opt, 12)
    save_run(tmp_path/'run.pt', m, opt, dst)
    go(m, opt, 9)
    n,opt2,dst2 = start()
    load_run(tmp_path/'run.pt', n, opt2, dst2)
    assert kinds(n)==['rows','rows',None]
    go(n, opt2, 9)
    assert all(torch.equal(p*1, q*1) for p,q in zip(m.parameters(), n.parameters()))
    other = born(seed=1, sparse_f='erk')
    other.load_state_dict(m.state_dict())
    dense = pickle.loads(pickle.dumps(m))
    x = data(m)[0]
    assert other(x).equal(m(x)) and torch.allclose(dense(x), m(x), atol=1e-6) and kinds(dense)==[None]*3
    store_dense(m)
    assert kinds(m)==[None]*3 and torch.allclose(m(x), other(x), atol=1e-6)

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by,self.layer = nn.Parameter(torch.ones(12)),nn.Linear(12,12)
    def forward(self, x): return self.layer(x*self.by)

def fails(p, **kwargs): raise ArithmeticError('a score that fails')

def some():
    "A model with one layer that has values"
    m = net()
    m[0] = nn.Linear(12, 64, device='cpu')
    return m

refused = {'no_initialisation':(Scale, {}, r'^by is on the meta device, and Scale has no reset_parameters\(\)'),
    'no_product':(lambda: nn.Sequential(nn.Linear(12,12), nn.GRU(12,12)), {}, r"^1.weight_ih_l0 is on the .*no sparse product in GRU.*exclude='1.weight_ih_l0'"),
    'batch':(net, dict(xb=torch.ones(2,12)), '^xb measures'), 'global':(net, dict(sparse_f='global'), 'is on the meta device and has no values'),
    'some_values':(some, {}, '^2.weight is on the meta device and has no values'), 'structure':(net, dict(structure='2:5'), '^0.weight')}

@pytest.mark.parametrize('make,kwargs,text', refused.values(), ids=refused)
def test_what_cant_be_born_is_refused(make, kwargs, text):
    "One error, and nothing has changed"
    with torch.device('meta'): m = make()
    ps = list(m.parameters())
    with pytest.raises(ValueError, match=text): sparsify_model(m, .9, seed=0, **kwargs)
    assert all(p is q for p,q in zip(ps, m.parameters())) and not any(k.endswith('_mask') for k,_ in m.named_buffers())

def test_a_birth_that_fails_leaves_nothing():
    with torch.device('meta'): m = net()
    ps,calls = list(m.parameters()),[]
    def third(p, **kwargs): return fails(p) if calls.append(0) or len(calls)>2 else p.abs()
    with pytest.raises(ArithmeticError): sparsify_model(m, .9, seed=0, mask_init=third)
    assert all(p is q and p.is_meta for p,q in zip(ps, m.parameters())) and not [*m.buffers()] and masked_params(m)==[]
    sparsify_model(m, .9, 'erk', seed=0)
    assert kinds(m)==['rows','rows',None]

def test_magnitudes_of_initial_values():
    m = born(sparse_f='uniform', mask_init='magnitude')
    plain = born(sparse_f='uniform', sparse_init_mode=None)
    assert float(values(m)[1].abs()[m[2].weight_mask].min())>float(values(plain)[1].abs()[plain[2].weight_mask].mean())

def test_methods_that_read_dead_state_are_refused():
    m = born()
    with pytest.raises(ValueError, match='stored sparse has none'):
        DynamicSparseTraining(m, torch.optim.Adam(m.parameters()), 40, method='snfs', batches_per_update=5)

def test_the_callback_trains_it():
    xs = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    dl = DataLoader(list(zip(xs, xs[:,:5].argmax(1))), bs=16)
    cb = DynamicSparseTrainingCallback(method='rigl', batches_per_update=3)
    learn = Learner(DataLoaders(dl, dl), born(sparse_f='erk'), loss_func=nn.functional.cross_entropy, cbs=cb)
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    assert kinds(learn.model)==['rows','rows',None] and learn.validate()[0]<1.6

# --- an update of large live weights, in pieces

@pytest.mark.parametrize('case', ['plain', 'ties', 'nan', 'few', 'infinite', 'late', 'early'])
@pytest.mark.parametrize('n', [1, 40, 90_000])
def test_the_best_in_pieces(case, n):
    "The choice from pieces is that of all scores at once, and few places are kept where few will grow"
    m = born(lambda: nn.Linear(512, 600), .9, sparse_f='uniform')
    w, = masked_params(m)
    dst = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), .1), 40, method='rigl', batches_per_update=5)
    dst.moving[0].weight.store.ask_dense(True)
    torch.manual_seed(0)
    g = torch.randn(600, 512)
    if case=='ties': g = g.round()
    if case=='nan': g[torch.rand(600,512)<.5] = torch.nan
    if case=='few': g[torch.rand(600,512)<.95] = torch.nan
    if case=='infinite': g[torch.rand(600,512)<.3] = torch.inf
    if case=='late': g[:400] *= .01  # the first piece tells nothing of the others
    if case=='early': g[400:] *= .01  # or promises too much
    (m.weight*1).backward(g)
    class Small(Score): piece = 2**17
    score = Small(gradient_magnitude, dst.moving[0])
    places,scores = score.drawn(w.mask, n)
    if case=='plain': assert len(places)<=2*n+1000
    chosen = places[highest(scores, n, torch.ones_like(places, dtype=torch.bool))]
    assert chosen.equal(highest(g.abs(), n, ~w.mask))

@pytest.mark.parametrize('layer,x', [(nn.Linear(40,64), torch.randn(8,40)), (nn.Conv2d(4,16,3), torch.randn(2,4,8,8))])
def test_pieces_hold_weight_and_gradient(layer, x):
    "Also after the gradient was scaled, as by clipping"
    with torch.device('meta'): m = copy.deepcopy(layer).to('meta')
    sparsify_model(m, .9, seed=0)
    w, = masked_params(m)
    w.store.ask_dense(True)
    for _ in range(2): m(x).square().sum().backward()
    w.p.grad.mul_(.5)
    whole,parts = w.read(grad=True),list(w.store.pieces(100, True))
    assert torch.cat([p for _,p in parts]).equal(whole.reshape(-1)) and [i for i,_ in parts][1]%whole[0].numel()==0
    assert torch.allclose(torch.cat([p.grad for _,p in parts]), whole.grad.reshape(-1), atol=1e-5)
