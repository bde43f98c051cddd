"Models whose masks follow scores: what each layer sees, which weights learn, and fits with schedules"
import copy,pickle,pytest,torch.utils.checkpoint,warnings
from fastai.callback.core import Callback
from fastai.callback.schedule import *
from fastai.learner import load_learner
from fastsparse.all import *
from fastsparse.compat.dmx import effective_weight
from fastsparse.masks.schedules import epochs,PiecewiseSchedule,PositionSchedule,samples
from fastsparse.prune.tickets import rewind
from fastsparse.learned.masks import dead_decay,LearnedMaskCallback,own_magnitude,sparsifiers,STE_presets,TopKAST_presets,update_all
from functools import partial
from helpers import *
from test_learned import _learner,learned

class Net(nn.Module):
    "One layer of each type, and a weight that two layers share"
    def __init__(self):
        super().__init__()
        self.emb,self.bag = nn.Embedding(10, 8),nn.EmbeddingBag(10, 8)
        self.conv1,self.conv2,self.conv3 = nn.Conv1d(8, 4, 3, padding=1, groups=2),nn.Conv2d(1, 4, 3),nn.Conv3d(1, 2, 2)
        self.up = nn.ConvTranspose1d(4, 6, 2, stride=2)
        self.lstm,self.gru,self.cell = nn.LSTM(8, 5, 2, bidirectional=True),nn.GRU(8, 5),nn.LSTMCell(8, 5)
        self.att,self.att2 = nn.MultiheadAttention(8, 2, batch_first=True),nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)
        self.bil,self.lin,self.tied = nn.Bilinear(8, 8, 4),nn.Linear(8, 8),nn.Linear(8, 8)
        self.tied.weight = self.lin.weight

    def forward(self, i):
        x = self.emb(i)
        outs = [self.bag(i), self.conv1(x.mT), self.conv2(x[:,None]), self.conv3(x[:,None,:,:,None].expand(-1,-1,-1,-1,2)), self.up(self.conv1(x.mT))]
        outs += [self.lstm(x)[0], self.gru(x)[0], self.cell(x[:,0])[0], self.att(x, x, x)[0], self.att2(x, x[...,:6], x[...,:5])[0]]
        outs += [self.bil(x, x), self.tied(self.lin(x).relu())]
        return torch.cat([o.flatten() for o in outs])

@pytest.mark.parametrize('training', [True,False])
def test_every_layer_sees_its_masked_weight(training):
    "mask*weight in the forward of every layer (attention's out_proj, recurrent and shared weights too); parameters stay the same objects, dense"
    torch.manual_seed(0)
    net,i = Net(),torch.arange(12).view(2,6)%10
    params = dict(net.named_parameters())
    values = {k: v.clone() for k,v in params.items()}
    sps = learn_masks(net, {'*':'top 0.25'}, 'joint', seed=1)
    net.train(training)
    out = net(i)
    assert len(sps)==sum(p.ndim>1 for p in params.values())
    now = dict(net.named_parameters())
    assert all(now[k] is p and torch.equal(p, values[k]) for k,p in params.items()) and isinstance(net.lin.weight, nn.Parameter)
    ref = Net()
    masks = {o.name:o.mask for o in masked_params(net)}
    assert all(int(m.sum())==round(.25*m.numel()) for m in masks.values())
    ref.load_state_dict({k: torch.where(masks[k], v, 0) if k in masks else v for k,v in values.items()} | {'tied.weight': torch.where(masks['lin.weight'],
        values['lin.weight'], 0)})
    assert torch.equal(ref.train(training)(i), out)
    out.sum().backward()
    assert all(sp.weight.grad is not None and not sp.weight.grad[~sp.mask].any() and sp.score.grad is not None for sp in sps)
    fold_masks(net)
    assert torch.equal(net(i), out)
    assert_dead(net)
    assert set(net.state_dict())-set(values)-{'tied.weight'}=={f'{k}_{o}' for k in masks for o in ('mask','sparsity')}

def test_an_error_in_the_forward_leaves_the_weight():
    "The parameter is back in its place after a forward that failed"
    net = nn.Linear(4, 4)
    p = net.weight
    learn_masks(net)
    with pytest.raises(RuntimeError): net(torch.randn(2,3))
    assert net.weight is p and 'weight' not in vars(net)

def test_rules_choose():
    "The first rule that names a weight decides, as everywhere; None leaves dense; without rules, what sparsify_model would choose"
    net = nn.ModuleDict(dict(emb=nn.Embedding(6,4), body=mlp((4,4,4)), lm_head=nn.Linear(4,6)))
    sps = learn_masks(net, {'body':'1:4', 'lm_head':None, lambda name,p: True:'top 0.5'})
    assert [(str(sp.sparseness),tuple(sp.score.shape)) for sp in sps]==[('top 0.5',(6,4))]+[('1:4',(4,4))]*2
    with pytest.warns(UserWarning, match="'lm_haed' has no effect"): learn_masks(mlp((4,4)), {'lm_haed':None, '*':'2:4'})
    net = nn.ModuleDict(dict(emb=nn.Embedding(6,4), body=mlp((4,4,4))))
    assert len(learn_masks(net, 'top 0.5'))==2
    assert effective_weight(net['emb']) is net['emb'].weight
    o = net['body'][0]
    assert torch.equal(effective_weight(o), o.weight*o.weight_mask)

def test_callback_follows_schedules(tmp_path):
    "Density and mode by functions of the step, the penalty in the loss; validation, get_preds and lr_find leave masks and step"
    learn = _learner(mlp(), path=tmp_path)
    learn_masks(learn, score_func=own_magnitude, backward_sparseness='dense', penalty=dead_decay, seed=0)
    seen = []
    class Look(Callback):
        def after_batch(self):
            if self.training: seen.append(sparsifiers(self.learn.model)[0].density)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, cbs=[LearnedMaskCallback(density=lambda t: 1-t/24, backward_mode=lambda t: 'joint' if t>5 else 'STE'), Look()])
        assert seen==[round((1-t/24)*48)/48 for t in range(12)] and sparsifiers(learn.model)[1].backward_mode=='joint'
        state = copy.deepcopy(learn.model.state_dict())
        learn.validate()
        learn.get_preds()
        learn.lr_find(num_it=5, show_plot=False)
    now = learn.model.state_dict()
    assert all(torch.equal(v, now[k]) if isinstance(v, torch.Tensor) else v==now[k] for k,v in state.items())
    learn.save('m')
    learn.export(tmp_path/'m.pkl')
    other = load_learner(tmp_path/'m.pkl')
    assert same_masks(masks_of(other.model), masks_of(learn.model)) and torch.equal(other.model.eval()(torch.ones(2,6)), learn.model.eval()(torch.ones(2,6)))
    learn.load('m')

def test_after_folding_training_goes_on():
    "Fixed masks hold, RigL moves them, and unsparsify leaves plain weights with equal outputs"
    learn = _learner(mlp())
    learn_masks(learn, **dict(STE_presets, sparseness='top 0.5'), seed=0)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        fold_masks(learn)
        masks = masks_of(learn.model)
        learn.fit(1)
        assert same_masks(masks, masks_of(learn.model))
        assert_dead(learn.model, learn.opt)
        learn.fit(2, cbs=DynamicSparseTrainingCallback(**dict(RigL_presets, batches_per_update=3)))
    assert not same_masks(masks, masks_of(learn.model)) and [int(m.sum()) for m in masks]==[int(m.sum()) for m in masks_of(learn.model)]
    assert_dead(learn.model)
    x = torch.randn(3,6)
    y = learn.model(x)
    unsparsify(learn.model)
    assert torch.equal(learn.model(x), y) and set(learn.model.state_dict())==set(mlp().state_dict())

def _wrapped(net, reentrant):
    f = partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    return lambda x: f(net, x)

@pytest.mark.parametrize('reentrant', [False,True])
@pytest.mark.parametrize('mode', ['STE','joint'])
def test_checkpointing_counts_a_step_once(mode, reentrant):
    "The forward that runs again in the backward uses the mask of the first, so gradients are those without checkpointing"
    nets = [mlp(),mlp()]
    for net in nets: learn_masks(net, 'bernoulli', mode, seed=0)
    g = torch.Generator().manual_seed(0)
    for t in range(3):
        x = torch.randn(4,6, generator=g).requires_grad_()
        for net,f in zip(nets, (nets[0], _wrapped(nets[1], reentrant))): f(x).square().sum().backward()
        assert [sp.step for sp in sparsifiers(nets[1])]==[t+1]*3 and same_masks(masks_of(nets[0]), masks_of(nets[1]))
        for a,b in zip(*[net.parameters() for net in nets]): assert (a.grad is None)==(b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))

class Reusing(nn.Module):
    "Two layers share a weight, and a cell runs in a loop"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.cell = nn.Linear(6,6,bias=False),nn.Linear(6,6,bias=False),nn.RNNCell(6,6)
        self.b.weight = self.a.weight
    def forward(self, x):
        self.seen = []
        for f in (self.a, self.b): self.seen.append(f(torch.eye(6))!=0)
        h = torch.zeros_like(x)
        for _ in range(3): h = self.cell(x, h)
        return h+self.b(self.a(x))

def test_one_step_a_forward():
    "A weight that is used many times in a forward has one mask in it, drawn anew for the next; a part that runs alone counts its own"
    torch.manual_seed(0)
    net = Reusing()
    sps = learn_masks(net, 'bernoulli', 'joint', seed=0)
    masks = []
    for t in range(3):
        net(torch.randn(2,6)).sum().backward()
        masks.append(net.a.weight_mask.clone())
        assert torch.equal(net.seen[0], net.seen[1]) and torch.equal(net.seen[0], masks[-1].T) and [sp.step for sp in sps]==[t+1]*3
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    with pytest.raises(RuntimeError): net(torch.randn(2,5))
    net.cell(torch.randn(2,6))
    net.cell(torch.randn(2,6))
    assert [sp.step for sp in sps]==[4,6,6]  # the forward that failed reached the cell
    twin = pickle.loads(pickle.dumps(net))
    twin(torch.randn(2,6))
    assert [sp.step for sp in sparsifiers(twin)]==[5,7,7] and [sp.step for sp in sps]==[4,6,6]
    fold_masks(twin)
    assert not any(type(getattr(h, '__self__', h)).__module__=='fastsparse.learned.masks' for m in twin.modules() for h in (*m._forward_hooks.values(),
        *m._forward_pre_hooks.values()))

def test_structures_count_along_the_layers_axes():
    "Fan-in of a transposed convolution is an output's, and N:M goes along its inputs"
    net = nn.ConvTranspose2d(8, 4, 3)
    learn_masks(net, 'top .25 fan-in', seed=0)
    assert (net.weight_mask.sum((0,2,3))==18).all()
    net = nn.ConvTranspose2d(8, 4, 3)
    learn_masks(net, '2:4', seed=0)
    assert (net.weight_mask.unflatten(0, (2,4)).sum(1)==2).all()

@pytest.mark.parametrize('mode', ['supermask','joint','STE'])
@pytest.mark.parametrize('made', ['before','after'])
def test_scores_that_nobody_trains(mode, made):
    "An optimizer made before `learn_masks` doesn't hold the scores, so that masks would never move: said once for each weight, where scores are to learn"
    m = nn.Sequential(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,2))
    make = lambda: torch.optim.SGD(m.parameters(), lr=.1)
    opt = make() if made=='before' else None
    learn_masks(m, 'top .5', mode, seed=0)
    opt = opt or make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for _ in range(80):
            opt.zero_grad()
            m(torch.randn(4,8)).square().sum().backward()
            opt.step()
    said = [w for w in told if 'make the optimizer after learn_masks' in str(w.message)]
    assert len(said)==(2 if made=='before' and mode!='STE' else 0)

def encoder(**kwargs): return nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True, **kwargs)

@pytest.mark.parametrize('make,pad', [(encoder,False), (partial(encoder, norm_first=True),False), (lambda: nn.TransformerEncoder(encoder(), 2),False),
    (lambda: nn.TransformerEncoder(encoder(), 2),True)])
def test_transformers_in_evaluation(make, pad):
    "The fast path sees masks too, with and without a padding mask"
    torch.manual_seed(0)
    net,x = make(),torch.randn(2,5,8)
    learn_masks(net, 'top 0.2', seed=0)
    kwargs = dict(src_key_padding_mask=torch.tensor([[False]*5,[False]*3+[True]*2])) if pad else {}
    live = ~kwargs['src_key_padding_mask'] if pad else slice(None)
    net.eval()
    with torch.no_grad():
        before = net(x, **kwargs)
        fold_masks(net)
        assert torch.allclose(net(x, **kwargs)[live], before[live], atol=1e-5)

def test_schedules_are_read_at_every_step():
    "Times in epochs, samples and fractions are those of the fit"
    for schedule in (CubicSchedule(1., .2), PiecewiseSchedule((.9,.5,.2), (epochs(.5),samples(32))), PositionSchedule(lambda pos: 1-pos/2)):
        learn,seen = _learner(mlp()),[]
        learn_masks(learn, seed=0)
        class Look(Callback):
            run_valid = False
            def after_batch(self): seen.append([sp.density for sp in sparsifiers(self.learn.model)])
        with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=[LearnedMaskCallback(density=schedule), Look()])
        values = [schedule.bind(n_steps=12, batch_size=4, steps_per_epoch=6)(t, t) for t in range(12)]
        assert seen==[[round(v*n)/n for n in (48,56,21)] for v in values]

@pytest.mark.parametrize('change', ['step','schedule','before'])
@pytest.mark.parametrize('mode', ['supermask','joint'])
def test_a_learner_that_was_fit_learns_scores(mode, change):
    "Its optimizer is made anew with the scores in it; they rest while 'STE', and learn from the change on; supermasks leave weights"
    learn = _learner(mlp())
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        sps = learn_masks(learn, 'top 0.5', 'STE' if change!='before' else mode, seed=0)
        start = [sp.score.clone() for sp in sps]
        if change!='before':
            learn.fit(1)
            assert all(torch.equal(o, sp.score) for o,sp in zip(start, sps))
        w = learn.model[0].weight.clone()
        if change=='step': update_all(sparsifiers(learn.model), backward_mode=mode)
        learn.fit(2, cbs=LearnedMaskCallback(backward_mode=lambda t: mode) if change=='schedule' else [])
    assert not any(torch.equal(o, sp.score) for o,sp in zip(start, sps)) and torch.equal(w, learn.model[0].weight)==(mode=='supermask')

def test_masks_are_refreshed_in_a_short_fit():
    "`every` above a thirtieth of the fit is lowered for that fit, and is what it was afterwards; None leaves it"
    for refreshes,every in ((30,2), (10,6), (None,100), (1,60)):
        seen = []
        class See(Callback):
            run_valid = False
            def before_batch(self): seen.append(sparsifiers(self.model)[0].every)
        learn = _learner(mlp())
        learn_masks(learn, **dict(TopKAST_presets, sparseness='top .5'))
        with learn.no_bar(), learn.no_logging(): learn.fit(10, cbs=[LearnedMaskCallback(refreshes=refreshes), See()])
        assert set(seen)=={every} and len(seen)==60 and sparsifiers(learn.model)[0].every==100

class ByHand(nn.Module):
    "Multiplies by its own parameter, or by its layer's weight itself"
    def __init__(self, n=64):
        super().__init__()
        self.kernel,self.layer = nn.Parameter(torch.randn(n,8)),nn.Linear(8, 8)
    def forward(self, x): return x@self.kernel@self.layer.weight.t()

def test_what_is_missed_is_said():
    "also= brings a raw parameter in; without it the largest that stay dense are named; a mask that can't act, because its layer's forward never runs, is named once"
    build = lambda n: nn.Sequential(nn.Linear(8,n), ByHand(n))
    m = build(64)
    sps = learn_masks(m, '2:4', also='*.kernel', seed=0)
    assert len(sps)==3 and int(m[1].kernel_mask.sum())==256
    with pytest.warns(UserWarning, match='1 of 3 weights with learned masks were not used.*include='): m(torch.randn(2,8))
    with pytest.warns(UserWarning, match='1.kernel .*also='): learn_masks(build(640), 'top .5')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        m(torch.randn(2,8))
        usual = mlp((8,8,8))
        learn_masks(usual, 'top 0.2', seed=1)
        usual(torch.randn(4,8)).sum().backward()

def test_values_of_dead_weights_stay(tmp_path):
    "They may come back, so they are part of a run in a file; `rewind` and `apply_masks` leave them alone too"
    m = learned('top .3')
    save_run(tmp_path/'run', m)
    load_run(tmp_path/'run', m)
    apply_masks(m)
    rewind(m, m.state_dict())
    assert m[0].weight.all()
