"Live weights in a run: by the rule from the second step on, the same network as with masks, dense again in the end"
import copy,pickle,pytest
from fastai.callback.core import Callback
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner,load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam as FastaiAdam,OptimWrapper
from fastai_data import digits,loaders
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets
from fastsparse.kernels.vectors import why_not
from forks import on_processes
from functools import partial
from helpers import *
from torch.nn import functional as F
from test_live_layers import dmlp,equal,lives as live_ones,make
from torch.utils.checkpoint import checkpoint

n_steps = 12

class Net(nn.Module):
    "Its second layer is wide enough to live at batches of 64; `how` says what else is done with its weight"
    def __init__(self, how=''):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.c,self.how = nn.Linear(64,256),nn.Linear(256,512),nn.Linear(512,10),how
    def forward(self, x):
        x = self.a(x).relu()
        if self.how=='read': return self.c(F.linear(x, self.b.weight, self.b.bias).relu())
        if self.how=='twice': return self.c((self.b(x)+self.b(x.flip(0))).relu())
        return self.c(self.b(x).relu())

class Odd(torch.optim.SGD): "An optimizer that might do anything"

opts = dict(sgd=lambda ps: torch.optim.SGD(ps, .05, momentum=.9), adam=lambda ps: torch.optim.AdamW(ps, 1e-3), odd=lambda ps: Odd(ps, .05))
penalties = dict(mean=lambda m: m.b.weight.abs().mean(), norm=lambda m: m.b.weight.square().sum(1).sqrt().mean())
calls = dict(recomputed=partial(checkpoint, use_reentrant=False), reentrant=partial(checkpoint, use_reentrant=True))

def start(way=None, opt='adam', steps=n_steps, sparsity=.9, how='', method='rigl', **kwargs):
    "Model, optimizer and engine, in float64"
    m = Net(how).double()
    sparsify_model(m, sparsity, seed=0)
    opt = opts[opt](m.parameters())
    return m,opt,DynamicSparseTraining(m, opt, steps, **dict(method=method, batches_per_update=3, seed=0, sparse_compute=way)|kwargs)

def go(m, opt, first, last, n_acc=1, run=None):
    how = getattr(m, 'how', '')
    for t in range(first, last):
        for i in range(n_acc):
            g = torch.Generator().manual_seed(10*t+i)
            x,y = torch.randn(64, 64, generator=g).double().requires_grad_(how in calls),torch.randint(10, (64,), generator=g)
            out = calls[how](m, x) if how in calls else (m if run is None else run)(x)
            (F.cross_entropy(out, y)+(.1*penalties[how](m) if how in penalties else 0)).backward()
        opt.step()
        opt.zero_grad()
    return m

def notes(m):
    df = sparse_summary(m).df
    return dict(zip(df.parameter, df.note))

def lives(m): return ['live weights only' in notes(m)[f'{o}.weight'] for o in 'abc']
def silent(m): return not any('masked:' in n or 'live weights only' in n for n in notes(m).values())

def same(a, b, exact=False):
    for (k,u),v in zip(a.state_dict().items(), b.state_dict().values()):
        assert u.equal(v) if exact or u.dtype==torch.bool else torch.allclose(u, v, rtol=0, atol=1e-9), k

@pytest.mark.parametrize('opt', ['sgd','adam'])
@pytest.mark.parametrize('method', ['rigl','set','static','auto'])
def test_a_plain_loop_goes_live_and_trains_the_same_network(method, opt):
    "After its first step, layers by the rule, and the summary says which and why; dense again after the last step, the same parameter objects"
    (m,o,dst),(masked,*rest) = start(None, opt, method=method),start(False, opt, method=method)
    ps = list(m.parameters())
    assert lives(m)==[False]*3
    go(m, o, 0, 1)
    assert lives(m)==[False,True,False] and dst.live.report.plan=={'a.weight':'dense','b.weight':'rows','c.weight':'dense'}
    assert all('masked: ' in notes(m)[f'{k}.weight'] and 'batches of 64' in notes(m)[f'{k}.weight'] for k in 'ac')
    go(m, o, 1, n_steps-1)
    assert lives(m)==[False,True,False]
    go(m, o, n_steps-1, n_steps)
    assert silent(m) and all(p is q and p.shape==r.shape for p,q,r in zip(ps, m.parameters(), masked.parameters()))
    go(m, o, n_steps, n_steps+2)
    same(m, go(masked, rest[0], 0, n_steps+2))
    assert method=='static' or dst.n_updates>1

@pytest.mark.parametrize('n_acc', [1,2])
@pytest.mark.parametrize('how', ['read','twice',*penalties,*calls])
def test_whatever_else_is_done_with_a_weight_the_network_is_the_same(how, n_acc):
    "Swin's attention reads it; a penalty does, beside the layer; a layer is called twice, or again in the backward"
    (m,o,_),(masked,p,_) = start(how=how),start(False, how=how)
    same(go(m, o, 0, n_steps, n_acc), go(masked, p, 0, n_steps, n_acc))
    m,o,_ = start(how=how)
    go(m, o, 0, 1, n_acc)
    assert how not in ('twice',*calls) or lives(m)==[False,True,False]

def test_without_an_end_weights_stay_masked():
    "And the engine says why; who asks for live weights has them until remove()"
    endless = dict(steps=None, batches_per_update=None, updates=[2], drop_fraction=.3)
    m,o,dst = start(**endless)
    go(m, o, 0, 2)
    assert lives(m)==[False]*3 and 'n_steps' in dst.live.why_masked
    m,o,dst = start({'a.weight':'rows','b.weight':'rows'}, **endless)
    assert lives(m)==[True,True,False]
    go(m, o, 0, 4)
    dst.remove()
    assert lives(m)==[False]*3
    masked,o,_ = start(False, **endless)
    same(m, go(masked, o, 0, 4))

def test_measured():
    "The first step's batch is measured; a resumed run takes the plan"
    m,o,dst = start(True)
    go(m, o, 0, 5)
    assert dst.live.report.ratios
    again = start(True)
    for new,old in zip(again, (m,o,dst)): new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert lives(again[0])==lives(m)
    for k in ((m,o), again[:2]): go(*k, 5, n_steps)
    same(m, again[0], exact=True)

def test_a_bad_way_is_refused_before_anything_changed():
    m,o,dst = start()
    dst.remove()
    for way,match in (('rows','by a fixed rule'), ({'x.weight':'rows'},'plan names x.weight')):
        with pytest.raises(ValueError, match=match): DynamicSparseTraining(m, o, n_steps, way, method='rigl', batches_per_update=3)
    DynamicSparseTraining(m, o, n_steps, method='rigl', batches_per_update=3)

@pytest.mark.parametrize('copied', [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=['deepcopy','pickle'])
def test_copies_of_a_run_make_the_same_steps_bit_for_bit(copied):
    "Made before the first step, and live; original and copies stay apart"
    whole = start()
    early = copied(whole)
    go(*whole[:2], 0, 4)
    late = copied(whole)
    assert lives(late[0])==[False,True,False]
    go(*whole[:2], 4, n_steps), go(*early[:2], 0, n_steps), go(*late[:2], 4, n_steps)
    for o in (early, late):
        same(whole[0], o[0], exact=True)
        assert lives(o[0])==[False]*3

def test_a_copy_that_is_kept_is_an_ordinary_model_in_the_end():
    "As the best model so far; also without an update since"
    m,o,dst = start(method='static')
    x = torch.ones(2, 64).double()
    go(m, o, 0, 4)
    kept = copy.deepcopy(m)
    y = kept(x)
    go(m, o, 4, 6)
    dst.remove()
    assert torch.allclose(kept(x), y) and kept.b.weight.shape==(512,256) and all(type(c) in (Net,nn.Linear) for k in (m,kept) for c in k.modules())

def test_an_error_in_a_forward_of_the_first_step_leaves_weights_in_place():
    m,o,dst = start()
    ps = list(m.parameters())
    with pytest.raises(RuntimeError): m(torch.randn(4, 65).double())
    assert all(a is b for a,b in zip(m.parameters(), ps))

def test_what_a_loop_did_by_hand_stays():
    "sparse_compute called after the engine was made"
    m,o,dst = start()
    report = sparse_compute(m, None, o, dict.fromkeys([p.name for p in masked_params(m)], 'rows'))
    go(m, o, 0, n_steps+1)
    assert lives(m)==[True]*3 and dst.live.report is None and 'already' in dst.live.why_masked
    report.remove()

@pytest.mark.parametrize('odd,why', [(dict(compiled='before'),'compiled'), (dict(compiled='after'),'compiled'), (dict(method='snfs', opt='sgd'),'dense history')])
def test_what_needs_dense_weights_stays_masked_and_says_why(odd, why):
    "A compiler, before or after the engine was made, a method; nothing stays in the summary"
    compiled = odd.pop('compiled', None)
    m,o,dst = start(**odd)
    run = m
    if compiled:
        run = torch.compile(m, backend='eager')
        if compiled=='before':
            dst.remove()
            dst = DynamicSparseTraining(run, o, n_steps, method='rigl', batches_per_update=3, seed=0)
    go(m, o, 0, 2, run=run)
    assert lives(m)==[False]*3 and why in dst.live.why_masked and why in notes(m)['a.weight']
    dst.remove()
    assert silent(m)

def test_a_given_batch_size_goes_before_the_one_seen():
    "A batch that is cut into pieces counts as what it is said to be"
    m,o,dst = start(batch_size=8)
    go(m, o, 0, 2)
    assert lives(m)==[False]*3 and 'batches of 8' in dst.live.report.df.note[1]

def test_a_hook_on_a_live_weight_sees_and_changes_its_gradient():
    "Of the dense shape, as under a mask"
    (m,o,_),(masked,p,_),seen = start(method='static'),start(False, method='static'),[]
    for n,opt in ((m,o), (masked,p)):
        go(n, opt, 0, 1)
        n.b.weight.register_hook(lambda g: seen.append(g.shape) or g*torch.linspace(0, 1, g.shape[1]).double())
        go(n, opt, 1, 5)
    assert set(seen)=={m.b.weight.shape}
    same(m, masked)

# --- in a fit, and on two ranks

class Losses(Callback):
    "Losses, and how many layers compute live"
    run_valid = False
    def __init__(self): self.losses,self.lives = [],[]
    def after_loss(self):
        self.losses.append(self.learn.loss.item())
        self.lives.append(len(live_ones(self.learn.model)) if masked_params(self.learn.model) else 0)

whole_plan = {'0.weight':'rows', '2.weight':'rows'}

def fitted(folder, compute=None, n=2, opt_func=FastaiAdam, cbs=(), sparsity=.7, **kwargs):
    "A learner on digits in float64, what it lost, and its callback"
    learn = Learner(loaders(*digits()), mlp((64,32,10), dtype=torch.double, act=nn.ReLU), CrossEntropyLossFlat(), path=folder, opt_func=opt_func)
    if sparsity: sparsify_model(learn, sparsity, seed=0)
    cb,watch = DynamicSparseTrainingCallback(sparse_compute=compute, **{**RigL_presets, 'batches_per_update':3, 'seed':0, **kwargs}),Losses()
    with learn.no_bar(), learn.no_logging(): learn.fit(n, 1e-3, cbs=[cb, watch, *cbs])
    return learn,watch,cb

class Saving(Callback):
    order,run_valid = 100,False
    def after_batch(self):
        if self.epoch==1 and self.iter==4: self.learn.save('now')
    def after_epoch(self): self.learn.export('now.pkl')

@pytest.mark.parametrize('opt_func', [FastaiAdam, partial(OptimWrapper, opt=torch.optim.Adam)])
@pytest.mark.parametrize('n_acc', [None,48])
def test_a_fit_is_the_masked_one(n_acc, opt_func, tmp_path):
    "With a plan: losses, masks and weights, also with accumulated batches; what is saved in the middle, optimizer included, is the masked run's, an export works on, and weights are dense in the end"
    runs = []
    for name,compute in (('a',None), ('b',whole_plan)):
        (tmp_path/name).mkdir()
        learn,watch,cb = fitted(tmp_path/name, compute, opt_func=opt_func, cbs=[Saving(), *[GradientAccumulation(n_acc)]*bool(n_acc)])
        loaded = load_learner(tmp_path/name/'now.pkl').model
        assert all(is_positive_zero(o.p[~o.mask]) for o in masked_params(loaded))
        runs.append((watch.losses, learn, cb, torch.load(tmp_path/name/'models'/'now.pth', weights_only=False), watch.lives, loaded))
    (la,a,_,fa,na,ea),(lb,b,cb,fb,nb,eb) = runs
    assert la==pytest.approx(lb, abs=1e-9) and cb.report.plan==whole_plan and cb.state['n_updates']>2 and max(na)==0 and min(nb)==2 and not live_ones(b.model)
    equal(a.model, b.model), equal(ea, eb)
    for k in fa['model']: torch.testing.assert_close(fa['model'][k], fb['model'][k], **in_double)
    x,y = [[v for s in (s.values() if isinstance(s, dict) else s) for v in s.values() if isinstance(v, torch.Tensor)] for s in (fa['opt']['state'],
        fb['opt']['state'])]
    for p,q in zip(x, y, strict=True): torch.testing.assert_close(p, q, **in_double)
    b.load('now', with_opt=True)

def test_a_fit_measures_once(tmp_path):
    "The first batch decides; the learning-rate finder rests"
    learn,_,cb = fitted(tmp_path, True)
    assert set(cb.report.plan)=={'0.weight','2.weight'} and cb.report.ratios
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=5, show_plot=False)
    assert not live_ones(learn.model)

@pytest.mark.parametrize('compute', [True,whole_plan])
def test_a_fit_that_starts_dense_is_measured_again_when_half_has_died(compute, tmp_path, monkeypatch):
    "And live where it gets sparse enough; never where a plan is given; the run is the masked one"
    seen = []
    def ratio(weight, *args, **kwargs):
        seen.append(1)
        return 2. if len(seen)>4 else .5
    monkeypatch.setattr('fastsparse.live.compute._speedup', ratio)
    (a,wa,_),(b,wb,cb) = [fit_dense(tmp_path, o) for o in (None, compute)]
    assert wa.losses==pytest.approx(wb.losses, abs=1e-9) and bool(seen)==(compute is True) and max(wb.lives)==2
    equal(a.model, b.model)

def fit_dense(folder, compute):
    learn = Learner(loaders(*digits()), mlp((64,32,10), dtype=torch.double, act=nn.ReLU), CrossEntropyLossFlat(), path=folder, opt_func=FastaiAdam)
    cb,watch = DynamicSparseTrainingCallback(sparse_compute=compute, **GMP_presets(sparsity=.9, batches_per_update=2), seed=0),Losses()
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-3, cbs=[cb, watch])
    return learn,watch,cb

def test_a_layer_that_becomes_dense_trains_on(tmp_path):
    "From .97 to .5: layers are stored masked again, with a gradient that fastai can set to zero"
    torch.manual_seed(0)
    x,y = digits(640)
    net = nn.Sequential(nn.Linear(64,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(), nn.Linear(1024,10)).double()
    learn = Learner(loaders(x, y), net, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    sparsify_model(net, .97, seed=0)
    with learn.no_bar(),learn.no_logging(): learn.fit_sparse(1, .5, seed=0)
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    assert abs(sum(int(m.sum()) for _,m,_ in sparse_params(net))/sum(m.numel() for _,m,_ in sparse_params(net))-.5)<1e-5

@pytest.mark.parametrize('settings,opt_func,match', [(dict(sparse_compute={'nobody':'rows'}),FastaiAdam,'names nobody'),
    (dict(SNFS_presets),FastaiAdam,'dense history'),
    (dict(rules=[('2.weight', {}), ('*', dict(grow_score_f=gradient_momentum))]),FastaiAdam,'dense history')])
def test_a_fit_that_is_refused_leaves_a_dense_model_dense(tmp_path, settings, opt_func, match):
    "Weights that a sparsity would have zeroed are there"
    learn = Learner(loaders(*digits()), mlp((64,32,10), dtype=torch.double), opt_func=opt_func, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    before = copy.deepcopy(dict(learn.model.state_dict()))
    with pytest.raises(ValueError, match=match), learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=DynamicSparseTrainingCallback(sparsity=.7, **{**RigL_presets, 'batches_per_update':3, 'sparse_compute':True, **settings}))
    assert agree(before, dict(learn.model.state_dict()))

@pytest.mark.skipif(bool(why_not()), reason='convolutions have kernels where Numba is')
def test_a_vision_learner_trains_on_live_weights(tmp_path, monkeypatch):
    "With one argument; it pickles on its way"
    from fastai.data.core import DataLoaders
    from fastai.vision.learner import vision_learner
    from torchvision.models import resnet18
    monkeypatch.setattr('fastsparse.live.compute._speedup', lambda *args: 2.)
    g = torch.Generator().manual_seed(0)
    items = [(torch.randn(3, 32, 32, generator=g), i%2) for i in range(12)]
    dls = DataLoaders.from_dsets(items, items[:4], bs=4, num_workers=0, device='cpu')
    dls.c = 2
    learn = vision_learner(dls, resnet18, pretrained=False, normalize=False, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    class Look(Losses):
        def after_epoch(self): self.copy = pickle.loads(pickle.dumps(self.learn.model))
    cb = DynamicSparseTrainingCallback(**RigL_presets(batches_per_update=2), sparsity=.9, sparse_compute=True)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, 1e-3, cbs=[cb, look := Look()])
    assert max(look.lives)>=20 and cb.state['n_updates']>0 and not live_ones(learn.model)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(look.copy.eval()(x), learn.model.eval()(x), rtol=1e-3, atol=1e-4)

@pytest.mark.parametrize('way', [None, True])
def test_a_model_inside_data_parallel_stays_masked(way, tmp_path):
    "Its wrapper averages the tensors that it found, so those that an engine on the inner model would store live after it stay as they are, and train"
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/init', rank=0, world_size=1)
    try:
        sparsify_model(m := Net(), .95, seed=0)
        ddp,x = nn.parallel.DistributedDataParallel(m),torch.randn(64, 64)
        engine = DynamicSparseTraining(m, opt := torch.optim.SGD(m.parameters(), .1), n_steps, method='set', sparse_compute=way)
        for _ in range(4):
            opt.zero_grad()
            ddp(x).square().mean().backward()
            opt.step()
        assert engine.live.why_masked=='several processes train this model' and not live_ones(m)
    finally: torch.distributed.destroy_process_group()

def two_ranks(rank, folder):
    "One of two ranks under data parallel training, on live weights and masked; each measures for itself"
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/init', rank=rank, world_size=2)
    out = {}
    for live in (False,True):
        m,opt,_ = make(live, opt='adam')
        ddp = nn.parallel.DistributedDataParallel(m)
        if not live:
            with pytest.raises(ValueError, match='wrapped for data parallel'): sparse_compute(ddp, None)
        DynamicSparseTraining(m, opt, 30, **RigL_presets(stop_pct=1., batches_per_update=4), seed=0)
        for i in range(30):
            xb,yb = data(dmlp(), 32, seed=i)
            backward(ddp, xb[rank::2], yb[rank::2])
            opt.step()
            opt.zero_grad()
        out[live] = {k:v.clone() for k,v in m.state_dict().items()}
    big = mlp((256,512,256), act=nn.ReLU)
    sparsify_model(big, .95, seed=0)
    out['plan'] = sparse_compute(big, torch.randn(2+62*rank, 256)).plan
    torch.save(out, f'{folder}/{rank}.pt')
    dist.destroy_process_group()

def test_two_ranks(tmp_path):
    "Masks and weights of both are the masked run's, whose gradients are averaged; rank 0's plan holds on both"
    on_processes(two_ranks, str(tmp_path))
    a,b = [torch.load(tmp_path/f'{r}.pt') for r in (0,1)]
    assert a['plan']==b['plan']
    for o in (a,b):
        for k,v in a[False].items(): torch.testing.assert_close(o[True][k], v, rtol=1e-7, atol=1e-7)
    assert all(torch.equal(a[True][k], b[True][k]) for k in a[True] if k.endswith('_mask'))
