"Computing with live weights only against the masked run: equal masks, losses, checkpoints and memories of optimizers, and a way back"
import copy,gc,pickle,pytest
from fastai.optimizer import Adam as FastaiAdam,SGD as FastaiSGD
from fastsparse.all import *
from fastsparse.train.presets import GSE_presets
from fastsparse.methods.presets import MEST_presets
from fastsparse.kernels.vectors import why_not
from fastsparse.masks.scores import MovingGradient
from fastsparse.train.method import auto_presets
from functools import partial
from helpers import *

t = torch.optim
opts = dict(sgd=lambda ps: t.SGD(ps, lr=.05, momentum=.9, weight_decay=.01), plain=lambda ps: t.SGD(ps, lr=.1), adam=lambda ps: t.Adam(ps, lr=.01),
    adamw=lambda ps: t.AdamW(ps, lr=.01),
    rmsprop=lambda ps: t.RMSprop(ps, lr=.001), adagrad=lambda ps: t.Adagrad(ps, lr=.01), fused=lambda ps: t.AdamW(ps, lr=.01, fused=True),
    fastai_sgd=lambda ps: FastaiSGD(ps, lr=.05, mom=.9, wd=.01), fastai_adam=lambda ps: FastaiAdam(ps, lr=.01))

def notes(m):
    df = sparse_summary(m).df
    return {k:n for k,n,live in zip(df.parameter, df.note, df.target.notna()) if live}

def lives(m): return [k for k,n in notes(m).items() if 'live weights only' in n]
def full(m): return {o.name:'rows' for o in masked_params(m)}
dmlp = partial(mlp, (6,16,12,3), dtype=torch.double)

def make(live, net=dmlp, opt='sgd', sparsity=.7, plan=None):
    "A sparse model, masked or on live weights, its optimizer and the report"
    torch.manual_seed(0)
    m = net()
    sparsify_model(m, sparsity, seed=0)
    opt = opts[opt](list(m.parameters()))
    return m,opt,sparse_compute(m, None, opt, plan=plan or full(m)) if live else None

def pair(*args, **kwargs): return [make(live, *args, **kwargs) for live in (False,True)]

def steps(m, opt, n, xb, yb, stepper=None):
    losses = []
    for i in range(n):
        losses.append(backward(m, xb+.01*i, yb).item())
        (stepper or opt).step()
        opt.zero_grad()
    return losses

def equal(a, b, tol=1e-9):
    "Same keys, masks and weights, whatever they compute with"
    x,y = a.state_dict(),b.state_dict()
    assert list(x)==list(y)
    for k in x:
        assert x[k].shape==y[k].shape and x[k].dtype==y[k].dtype, k
        torch.testing.assert_close(x[k], y[k], rtol=tol, atol=tol)

# --- layers

class Attention(nn.Module):
    "Self-attention, then another with keys of its own"
    def __init__(self, d=8):
        super().__init__()
        self.own,self.cross = nn.MultiheadAttention(d, 2, batch_first=True),nn.MultiheadAttention(d, 2, kdim=d, vdim=6, batch_first=True)
        self.out = nn.Linear(d, 3)
    def forward(self, x):
        h = self.own(x, x, x)[0]
        return self.out(self.cross(h, x, x[...,:6])[0])

class InPlace(nn.Module):
    "Layers whose outputs are written to in place"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.conv = nn.Linear(6, 8),nn.Linear(8, 3),nn.Conv2d(1, 4, 1)
    def forward(self, x):
        h = self.a(x).mul_(2).relu_()
        return torch.relu_(self.b(h))+self.conv(h[:,None,:,None].detach()).relu_().sum()

class Pixels(nn.Module):
    "Convolutions of many kinds, of which some stay dense"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Conv2d(3, 8, 3, padding=1),nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.c = nn.Conv2d(8, 6, (5,3), padding='same', dilation=(1,2))
        self.d,self.e,self.f = nn.Conv2d(6, 6, 2, padding='valid'),nn.Conv1d(6, 5, 3, padding=2, stride=2),nn.Conv2d(6, 6, 1)
        self.groups,self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=2),nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.up,self.mirror = nn.ConvTranspose2d(6, 6, 1),nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect')
        self.norm = nn.BatchNorm2d(8)
    def forward(self, x):
        x = self.groups(self.norm(self.b(self.a(x).relu())).relu())
        return self.e(self.f(self.d(self.mirror(self.up(self.deep(self.c(x)))).tanh())).flatten(2).relu())

convs = {f'{o}.weight':'rows' for o in 'abcdef'}
dense_convs = {'groups.weight':'has groups', 'deep.weight':'depthwise', 'up.weight':'no sparse product in ConvTranspose2d',
    'mirror.weight':'padding_mode is reflect'}
rectified = lambda: nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Sequential(nn.Linear(24, 16), nn.ReLU()), nn.ReLU(), nn.Linear(16, 3))
nets = dict(mlp=(dmlp, (16,6)), attention=(Attention, (2,5,8)), encoder=(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True), (2,5,8)),
    inplace=(InPlace, (5,6)), one=(InPlace, (1,6)), rectified=(rectified, (8,6)),
    pointwise=(lambda: nn.Sequential(nn.Conv2d(4, 8, 1, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 6, 1, bias=False)), (3,4,6,6)),
    pixels=(Pixels, (5,3,11,9)), pixels_last=(lambda: Pixels().to(memory_format=torch.channels_last), (5,3,11,9)))
settings = dict(static=None, SET=SET_presets, RigL=RigL_presets(stop_pct=1.), GSE=GSE_presets(stop_pct=1.), auto=auto_presets(200)(stop_pct=1.),
    stepping=RigL_presets(stop_pct=1., replace_step=False), prune=dict(grow_score_f=None, sparsity=.9, replace_step=False),
    moving=dict(batches_per_update=5, grow_score_f=MovingGradient(.9), redistribute_f=gradient_redistribution),
    mest=MEST_presets(updates=FreqSchedule(4, start=4)))

def run(m, opt, method, n, x, every=6, loss=lambda m, x: (m(x)-1).pow(2).mean(), around=lambda m, opt, f: f().backward(), **kwargs):
    "Losses of `n` steps of a method"
    every = {} if method=='mest' else dict(batches_per_update=every)
    kind = DynamicSparseTraining if isinstance(opt, t.Optimizer) else SparseEngine
    dst,losses = kind(m, opt, n, **{**settings[method], **every, 'seed':0, **kwargs}) if settings[method] else None,[]
    for i in range(n):
        if type(dst) is SparseEngine: dst.prepare(i)
        def f():
            losses.append(loss(m, x+.01*i))
            return losses[-1]
        around(m, opt, f)
        if not (type(dst) is SparseEngine and dst.before_step(i)): opt.step()
        opt.zero_grad()
    assert method in ('static','prune') or dst.n_updates>2
    return [o.item() for o in losses]

def same_runs(net, x, method, opt='adam', n=36, tol=1e-8, **kwargs):
    plan = convs if net is Pixels or 'pixels' in str(kwargs.get('name')) else None
    kwargs.pop('name', None)
    (a,oa,_),(b,ob,_) = pair(lambda: net().double(), opt, plan=plan)
    assert lives(b)
    assert run(a, oa, method, n, x, **kwargs)==pytest.approx(run(b, ob, method, n, x, **kwargs), abs=tol)
    equal(a, b, 100*tol)
    with torch.no_grad(): torch.testing.assert_close(a.eval()(x), b.eval()(x), rtol=1e-6, atol=1e-6)
    return a,b

@pytest.mark.parametrize('name,method', [*[(n,m) for n in nets for m in ('static','RigL') if (n,m)!=('one','RigL')],
    *[('pixels',m) for m in ('SET','auto','prune')]])
def test_layers_train_as_the_masked_ones(name, method):
    "Linear layers, attention's projections, convolutions of every kind: losses, masks and weights, and outputs in evaluation"
    if why_not() and 'pixels' in name: pytest.skip('convolutions have kernels where Numba is')
    net,shape = nets[name]
    same_runs(net, torch.randn(shape, generator=torch.Generator().manual_seed(1)).double(), method, name=name, every=4, n=24, tol=1e-6)

@pytest.mark.parametrize('method,opt', [*[('RigL',o) for o in opts if o!='plain'], *[(m,o) for m in settings for o in ('sgd','fastai_adam') if m!='RigL']])
def test_methods_are_the_masked_ones(method, opt):
    "With updates that replace the step, with one that a step follows, with counts that change by pruning or redistribution"
    same_runs(dmlp, data(dmlp())[0], method, opt, 80, tol=1e-7)

# --- what a loop does with gradients

def scaled(m, opt, f):
    "A loss scale of 1024 and back, as mixed precision has it"
    scaler = torch.amp.GradScaler('cpu', init_scale=1024.)
    scaler.scale(f()).backward()
    scaler.unscale_(opt)

def halved(m, opt, f):
    f().backward()
    for p in m.parameters(): p.grad.div_(2)

def bitten(m, opt, f):
    f().backward()
    nn.utils.clip_grad_norm_(m.parameters(), .1)

def accumulated(m, opt, f):
    for _ in range(3): f().backward()

def asked(of):
    "`autograd.grad` before the backward, as in adversarial training"
    def _f(m, opt, f):
        x = torch.randn(4, 6).double().requires_grad_()
        torch.autograd.grad(m(x).abs().sum(), x if of=='input' else list(m.parameters()))
        f().backward()
    return _f

def zeroed(m, opt, f):
    f().backward()
    opt.zero_grad(set_to_none=False)
    f().backward()

ways = dict(scaled=scaled, halved=halved, bitten=bitten, accumulated=accumulated, zeroed=zeroed, asked=asked('input'), asked_weights=asked('weights'),
    penalized=lambda m, opt, f: (f()+1e-2*sum(p.abs().sum() for p in m.parameters())).backward())

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('method', ['RigL','auto','stepping','moving','mest'])
def test_what_is_done_to_gradients_reaches_live_weights_as_masked_ones(method, way):
    "Updates choose, and start what they grow, as under masks"
    same_runs(dmlp, data(dmlp())[0], method, 'plain', 40, around=ways[way], every=4)

def test_grown_weights_step_by_the_clipped_gradient():
    "The step of a weight that an update grew is its gradient, computed by dense torch, times what clipping left of the norm"
    g = torch.Generator().manual_seed(1)
    x,y = torch.randn(64, 20, generator=g).double(),torch.randint(5, (64,), generator=g)
    m,opt,_ = make(True, lambda: mlp((20,32,5), dtype=torch.double, act=nn.ReLU), 'plain')
    DynamicSparseTraining(m, opt, 8, method='set', batches_per_update=3, replace_step=False, seed=3)
    n_new = 0
    for _ in range(4):
        was = {k:v.clone() for k,v in m.state_dict().items()}
        (100*nn.functional.cross_entropy(m(x), y)).backward()
        ps = [was[k].clone().requires_grad_() for k in ('0.weight','0.bias','2.weight','2.bias')]
        out = nn.functional.linear(nn.functional.linear(x, *ps[:2]).relu(), *ps[2:])
        w1,b1,w2,b2 = torch.autograd.grad(100*nn.functional.cross_entropy(out, y), ps)
        norm = torch.cat([(w1*was['0.weight_mask']).flatten(), b1, (w2*was['2.weight_mask']).flatten(), b2]).norm()
        nn.utils.clip_grad_norm_(m.parameters(), 1.)
        opt.step()
        opt.zero_grad()
        now = m.state_dict()
        new = now['0.weight_mask'] & ~was['0.weight_mask']
        n_new += int(new.sum())
        assert torch.allclose(now['0.weight'][new], -.1*w1[new]/norm, rtol=1e-4)
    assert n_new

def test_starts_of_live_weights_are_dense_tensors():
    m,opt,_ = make(True)
    DynamicSparseTraining(m, opt, 8, method='set', batches_per_update=2, grow_init_f='fresh_value', seed=3)
    steps(m, opt, 4, *data(dmlp()))
    assert sum(int(o.mask.sum()) for o in masked_params(m))==round(.3*sum(o.mask.numel() for o in masked_params(m)))

# --- there and back, when and whoever holds the optimizer

xy = data(dmlp())

def back(a, oa, report, live):
    if live: report.remove()

def again(m, opt, report, live):
    "Back, and live once more"
    if not live: return
    report.remove()
    steps_of = [type(o.p) for o in masked_params(m)]
    assert steps_of==[nn.Parameter]*3 and not lives(m)
    sparse_compute(m, None, opt, plan=full(m))

def inference(m, opt, report, live):
    if not live: return
    with torch.inference_mode():
        report.remove()
        sparse_compute(m, xy[0], opt).remove()
        sparse_compute(m, None, opt, plan=full(m))
        m(xy[0])

def other_masks(m, opt, report, live):
    with torch.no_grad():
        for o in masked_params(m): o.mask.copy_(torch.rand(o.mask.shape, generator=torch.Generator().manual_seed(1))<.2)
    m(xy[0])

def other_checkpoint(m, opt, report, live):
    "Of another sparsity, from a model of the other kind, memory included"
    other,o,_ = make(not live, opt='adam', sparsity=.5)
    steps(other, o, 2, *xy)
    m.load_state_dict(other.state_dict())
    opt.load_state_dict(copy.deepcopy(o.state_dict()))

journeys = dict(back=back, again=again, inference=inference, masks=other_masks, checkpoint=other_checkpoint)

@pytest.mark.parametrize('opt', opts)
@pytest.mark.parametrize('journey', journeys)
def test_there_and_back(journey, opt):
    "Trained on, the model has the masked run's losses, weights and memory, and its parameters are the same objects"
    if journey=='checkpoint' and opt!='adam': return
    (a,oa,r),(b,ob,report) = pair(opt=opt)
    ids,kept = [id(p) for p in b.parameters()],list(b.parameters())
    for m,o,rep,live in ((a,oa,r,False), (b,ob,report,True)):
        steps(m, o, 3, *xy)
        journeys[journey](m, o, rep, live)
    assert steps(a, oa, 4, *xy)==pytest.approx(steps(b, ob, 4, *xy), abs=1e-9)
    equal(a, b)
    x,y = [[v for s in (s.values() if isinstance(s, dict) else s) for v in s.values() if isinstance(v, torch.Tensor)] for s in (oa.state_dict()['state'],
        ob.state_dict()['state'])]
    for p,q in zip(x, y, strict=True): torch.testing.assert_close(p, q)
    assert ids==[id(p) for p in b.parameters()]
    backward(b, *xy, scale=1e3)
    nn.utils.clip_grad_norm_(kept, 1.)
    assert torch.stack([p.grad.norm() for p in b.parameters()]).norm().item()==pytest.approx(1)

@pytest.mark.parametrize('opt', ['sgd','adam','fastai_adam'])
@pytest.mark.parametrize('when', ['after','untold','some','state','engine'])
def test_any_optimizer_follows(when, opt):
    "Made after the swap; before it, used, and not given; of some weights; with a masked run's state; and one that an engine brings"
    (a,oa,_),(b,_,report) = pair(opt=opt)
    if when=='engine' and opt.startswith('fastai'): pytest.skip('engines of torch optimizers')
    if when in ('untold','engine'):
        report.remove()
        ob = opts[opt](list(b.parameters()))
        for m,o in ((a,oa),(b,ob)): steps(m, o, 3*(when=='untold'), *xy)
        sparse_compute(b, None, plan=full(b))
    elif when=='state':
        steps(a, oa, 5, *xy)
        b.load_state_dict(a.state_dict())
        ob = opts[opt](list(b.parameters()))
        ob.load_state_dict(copy.deepcopy(oa.state_dict()))
    else: oa,ob = [opts[opt]([m[i].weight for i in (0,2,4)] if when=='some' else list(m.parameters())) for m in (a,b)]
    if when=='engine':
        for m,o in ((a,oa),(b,ob)): DynamicSparseTraining(m, o, 20, **RigL_presets(batches_per_update=3, stop_pct=1.), seed=0)
    assert steps(a, oa, 12, *xy)==pytest.approx(steps(b, ob, 12, *xy), abs=1e-9)
    equal(a, b)

def test_an_engine_and_a_part():
    "Live after the engine was made, right before an update, in the whole or a part, and back in the middle"
    for part in (False,True):
        runs = []
        for live in (False,True):
            torch.manual_seed(0)
            m = nn.Sequential(dmlp(), nn.Tanh())
            sparsify_model(m, .7, seed=0)
            opt = opts['adam'](list(m.parameters()))
            DynamicSparseTraining(m, opt, 60, **RigL_presets(stop_pct=1., batches_per_update=6), seed=0)
            losses = steps(m, opt, 6, *xy)
            report = sparse_compute(*([m[0]] if part else [m]), None, opt, plan=full(m[0] if part else m)) if live else None
            losses += steps(m, opt, 18, *xy)
            if live: report.remove()
            runs.append((losses+steps(m, opt, 18, *xy), m))
        assert runs[0][0]==pytest.approx(runs[1][0], abs=1e-9)
        equal(runs[0][1], runs[1][1])

@pytest.mark.parametrize('copied', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_the_route_and_the_remark(copied):
    "They are dense under masks, and go on apart"
    b,ob,_ = make(True)
    new = copied(b)
    equal(b, new, 0)
    assert lives(b)==['0.weight','2.weight','4.weight'] and not lives(new)
    o = opts['sgd'](list(new.parameters()))
    assert steps(b, ob, 3, *xy)==pytest.approx(steps(new, o, 3, *xy), abs=1e-9)
    equal(b, new)

def storage(*objects):
    "Bytes of all tensors that hold on to memory"
    found = {}
    for o in gc.get_objects():
        if not isinstance(o, torch.Tensor) or type(o).__name__=='FakeTensor' or hasattr(o, 'cell'): continue  # a cell's values are tensors too
        try: found[o.untyped_storage().data_ptr()] = o.untyped_storage().nbytes()
        except (RuntimeError,ValueError): pass  # live and lazy tensors have no storage of their own
    return sum(found.values())

def test_only_live_weights_cost_memory():
    "Parameters, gradients and memories of an optimizer have as many numbers as weights live, beside a mask and places"
    def cost(live):
        gc.collect()
        before = storage()
        m,opt,_ = make(live, lambda: mlp((256,512,8), dtype=torch.double), 'adam', .95)
        m(torch.randn(2, 256).double()).sum().backward()
        opt.step()
        gc.collect()
        return storage()-before,m,opt
    assert cost(True)[0]<.25*cost(False)[0]

def test_masks_written_by_hand_are_followed():
    "What dies is gone, what is born starts at zero, before anything was computed too"
    m,opt,_ = make(True, opt='adam')
    steps(m, opt, 2, *xy)
    w,mask = m.state_dict()['0.weight'].clone(),m[0].weight_mask
    born,died = tuple((~mask).nonzero()[0]),tuple(mask.nonzero()[0])
    mask[born],mask[died] = True,False
    want = w.clone()
    want[died] = want[born] = 0
    assert torch.equal(m.state_dict()['0.weight'], want)
    m(xy[0])
    assert torch.equal(m.state_dict()['0.weight'], want)
    with torch.no_grad(): m[2].weight_mask.copy_(m[2].weight_mask.roll(1, 1))
    with torch.inference_mode(): m(xy[0])
    backward(m, *xy)
    assert m[2].weight.grad is not None


def test_a_measurement_needs_a_batch():
    "Or a plan; refused by name before anything is measured or stored"
    m = mlp((8,64,4))
    sparsify_model(m, .75, seed=0)
    with pytest.raises(TypeError, match=r'^xb is .None,'): sparse_compute(m, None)
    assert not any(o.store.kind for o in masked_params(m))

def test_a_run_without_an_end_stays_masked():
    "Else its weights would stay live after the last step, whichever that is; the summary of the run says so"
    m = nn.Sequential(nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,4))
    sparsify_model(m, .98, seed=0)
    opt = torch.optim.SGD(m.parameters(), .1)
    dst = DynamicSparseTraining(m, opt, method='set', updates=FreqSchedule(4), drop_fraction=.1, seed=0)
    for _ in range(3):
        m(torch.ones(64,1024)).sum().backward()
        opt.step()
    assert not any(o.store.kind for o in masked_params(m)) and dst.live.why_masked.startswith('n_steps is not given')
