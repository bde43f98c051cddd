"The look at a network's signal, and its repair"
import math,pytest,random,warnings
from copy import deepcopy
import numpy as np
from fastai.basics import CrossEntropyLossFlat,Learner,SGD,nn,set_seed
from fastcore.test import test_close as close,test_eq as eq
from fastsparse.all import *
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.model.init import dense_spread,output_spread,rate_scales
from fastsparse.model.layers import Axes
from fastsparse.model.running import batch_of
from fastsparse.model.trained import shows_training
from functools import cache
from helpers import *

def conv(): return nn.Sequential(nn.Conv2d(1,4,3), nn.BatchNorm2d(4), nn.Dropout(.5), nn.Flatten(), nn.Linear(4*36,3))

def learner(model): return Learner(digits_dls(), model, loss_func=CrossEntropyLossFlat(), opt_func=SGD)

def test_spread_is_the_mean_over_outputs_of_the_deviation_over_samples():
    "Of the first floating tensor that the model returns; norms use the statistics of the batch"
    m,x = nn.Linear(2, 3),torch.randn(16, 2)
    close(output_spread(m, x), np.std(m(x).detach().double().numpy(), axis=0, ddof=1).mean(), 1e-6)
    class Many(nn.Module):
        def forward(self, x): return x.long(),dict(a=x),x*9
    close(output_spread(Many(), torch.tensor([[0.],[2.]])), 2**.5)
    close(output_spread(nn.Sequential(nn.Linear(1,1), nn.BatchNorm1d(1)), torch.randn(64, 1)*100), (64/63)**.5, 1e-3)

def test_a_look_leaves_no_trace():
    m,x = conv(),torch.randn(8, 1, 8, 8)
    m[1].eval()
    was = {k:v.clone() for k,v in m.state_dict().items()}
    modes = [o.training for o in m.modules()]
    states = random.getstate(),np.random.get_state()[1].copy(),torch.get_rng_state()
    output_spread(m, x)
    for k,v in m.state_dict().items(): assert torch.equal(v, was[k]), k
    eq([o.training for o in m.modules()], modes)
    assert states[0]==random.getstate() and (states[1]==np.random.get_state()[1]).all() and torch.equal(states[2], torch.get_rng_state())

def test_a_batch_of_the_learner_changes_no_later_batch():
    def batches(look):
        set_seed(0)
        learn = learner(digits_mlp())
        if look: batch_of(learn)
        return [b[0] for b in learn.dls.train]
    for a,b in zip(batches(False), batches(True)): assert torch.equal(a, b)

@pytest.mark.parametrize('sparsity', [.9, .95, .99])
def test_a_learner_with_an_untouched_initialisation_is_repaired_as_supar_says(sparsity):
    plain,learn = digits_mlp(),learner(digits_mlp())
    sparsify_model(plain, sparsity, sparse_init_mode=None, seed=1)
    signal = sparsify_model(learn, sparsity, seed=1).signal
    assert signal.repaired and signal.kept<1/3 and signal.after>signal.dense/3
    for a,b in zip(masked_params(plain), masked_params(learn.model)):
        eq(a.mask, b.mask)
        close(b.p, a.p*(a.mask.numel()/a.mask.sum())**.5, 1e-6)

def test_a_batch_that_does_not_fit_is_refused_before_anything_changed():
    m = digits_mlp()
    was = m[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match='8x3'): sparsify_model(m, .9, xb=torch.randn(8,3))
    assert torch.equal(m[0].weight, was) and not masked_params(m)

def test_the_stand_in_of_a_dense_model_is_near_it_and_leaves_the_sparse_one():
    m,xb = digits_mlp(),torch.rand(64,64)
    dense = output_spread(m, xb)
    sparsify_model(m, .9, seed=1, sparse_init_mode=None)
    was = {k:v.clone() for k,v in m.state_dict().items()}
    assert .5<dense_spread(m, xb)/dense<2
    for k,v in m.state_dict().items(): assert torch.equal(v, was[k]), k

def loop(m, **kwargs):
    "The warnings of a plain loop's first steps"
    opt = torch.optim.SGD(m.parameters(), .1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        DynamicSparseTraining(m, opt, 100, method='rigl', seed=0, **kwargs)
        was = [p.detach().clone() for p in m.parameters()]
        m(torch.rand(32,64))
        changed = not all(torch.equal(a, b) for a,b in zip(was, m.parameters()))
        m(torch.rand(32,64)).sum().backward()
        opt.step()
    return sum('have killed the signal' in str(o.message) for o in told),changed

@pytest.mark.parametrize('norm', [False,True])
@pytest.mark.parametrize('by', ['sparsify_model','engine','repaired','None','magnitude'])
def test_a_plain_loop_changes_nothing_and_warns_once(by, norm):
    "Where there is something to repair, which needs no batch without norms; where masks aren't random, or weights to be left alone, it's silent"
    m = nn.Sequential(nn.LayerNorm(64), *digits_mlp()) if norm else digits_mlp()
    kwargs = {'repaired':dict(xb=torch.rand(32,64)), 'None':dict(sparse_init_mode=None), 'magnitude':dict(mask_init='magnitude')}.get(by, {})
    if by!='engine': sparsify_model(m, .99, seed=1, **kwargs)
    eq(loop(m, **(dict(sparsity=.99) if by=='engine' else {})), (int(norm and not kwargs),False))

@pytest.mark.parametrize('lr,expected', [(1e-5,100.), (.1/50,50.), (1e-2,10.), (1.,10.)])
def test_steps_are_as_long_as_supar_says_where_they_are_small(lr, expected):
    "Live weights of 1, one in a hundred: 1/density until a step is a tenth of them, and never below 1/sqrt(density)"
    m = nn.Linear(100, 100)
    sparsify_model(m, .99, seed=0, sparse_init_mode=None)
    with torch.no_grad(): m.weight.copy_(m.weight_mask.float())
    close(rate_scales(m, lr)['weight'], expected, 1e-6)
    close(rate_scales(m, lambda p: lr)['weight'], expected, 1e-6)

@pytest.mark.parametrize('mode', ['fan_in','fan_out'])
@pytest.mark.parametrize('sparse_mode', ['fan_in','fan_out','fan_in_out'])
def test_sparse_kaiming(mode, sparse_mode):
    "Dense Kaiming draws times `sqrt(dense fan / sparse fan)`, fans counted by loops, 1 at least; zeros stay"
    mask = sparse_mask((4,5,3,3), .8, torch.Generator().manual_seed(1))
    mask[0] = False
    torch.manual_seed(7)
    dense = nn.init.kaiming_normal_(torch.empty(4,5,3,3), mode=mode).numpy()
    torch.manual_seed(7)
    t = mask.float()
    assert init_kaiming_normal_sparse_(t, mode=mode, sparse_mode=sparse_mode) is t
    for o in range(4):
        for i in range(5):
            fan_in,fan_out = max(int(mask[o].sum()), 1),max(int(mask[:,i].sum()), 1)
            ratio = dict(fan_in=45/fan_in, fan_out=36/fan_out, fan_in_out=(45+36)/(fan_in+fan_out))[sparse_mode]
            assert np.allclose(t[o,i].numpy(), dense[o,i]*mask[o,i].numpy()*math.sqrt(ratio), rtol=1e-5)
    assert is_positive_zero(t[~mask])

def test_init_by_axes():
    "Initialisation of a transposed weight is that of the weight itself; of experts, each by itself"
    mask = sparse_mask((200,50), .8)
    for _ in range(2):
        t = init_kaiming_normal_sparse_(mask.t().contiguous().float(), sparse_mode='fan_in', axes=Axes(1, 0))
        assert t.ne(0).equal(mask.t()) and abs(float(t[t!=0].std())-(2/10)**.5)<.03
    e = init_kaiming_normal_sparse_(torch.stack([mask, mask]).float(), sparse_mode='fan_in', axes=Axes(1, 2, 0))
    assert abs(float(e[e!=0].std())-(2/10)**.5)<.03 and not e[0].equal(e[1])

def test_random_masks_on_trained_weights_warn():
    "A random mask on weights that were trained gives a warning; fresh ones, magnitude masks and new initialisations don't"
    def trained():
        m = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3))
        opt = torch.optim.SGD(m.parameters(), lr=.1)
        for _ in range(3):
            m(torch.randn(9,6)).sum().backward()
            opt.step()
        return m
    with pytest.warns(UserWarning, match="mask_init='magnitude'"): sparsify_model(trained(), .5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(trained(), .5, mask_init='magnitude')
        sparsify_model(trained(), .5, sparse_init_mode='fan_in')
        for m in (mlp(), nn.Sequential(nn.Conv2d(3,4,3), nn.BatchNorm2d(4)), nn.TransformerEncoderLayer(8,2,16), nn.LSTM(3,4)): sparsify_model(m, .5)

def norm_model(*change):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for f in change: f(model)
    return model

@pytest.mark.parametrize('change,trained', [
    (lambda m: None, False),
    (lambda m: m[1].num_batches_tracked.fill_(1), True),
    (lambda m: m[1].weight.data.fill_(3.), False),
    (lambda m: m[1].weight.data[2:3].fill_(3.), False),  # transformers draws them
    (lambda m: m[1].running_mean[2:3].fill_(3.), True),
    (lambda m: m.append(nn.LayerNorm(4))[2].weight.data[2:3].fill_(3.), True),
    (lambda m: setattr(m[0].weight, 'grad', torch.zeros(4, 4)), True),
    (lambda m: [m[0].weight.data.add_(0) for _ in range(30)], False),  # torch doesn't count writes to `data`
    (lambda m: [m[0].weight.detach().add_(0) for _ in range(30)], True),
    (lambda m: [m[0].weight.detach().add_(0) for _ in range(5)], False)])
def test_what_shows_training(change, trained):
    "One batch through a norm, one entry of its mean or weight that differs, a gradient, or many writes show it, each by itself"
    assert shows_training(norm_model(change))==trained

inits = {k: getattr(nn.init, f'{k}_') for k in 'uniform normal xavier_uniform xavier_normal kaiming_uniform kaiming_normal trunc_normal orthogonal zeros'.split()}
inits |= dict(constant=lambda w: w.fill_(.1), sparse=lambda w: nn.init.sparse_(w, .1) if w.ndim==2 else w)
inits |= dict(identity=lambda w: nn.init.eye_(w) if w.ndim==2 else nn.init.dirac_(w))
inits |= dict(gates=lambda w: [nn.init.orthogonal_(o) for o in w.chunk(4)], parts=lambda w: [nn.init.xavier_uniform_(o) for o in w.chunk(3)])
inits |= dict(icnr=lambda w: w.copy_(w[::4].repeat_interleave(4, 0)[:len(w)]))

@pytest.mark.parametrize('name', list(inits))
def test_no_usual_initialisation_looks_trained(name):
    "Of layers of many shapes"
    torch.manual_seed(0)
    shapes = [(10,64),(256,64),(64,256),(1024,256),(1000,512),(8,2000),(32,9),(2000,8),(64,3,7,7),(256,64,3,3),(512,1,3,3),(64,512,1,1)]
    def conv(o, i, k, _): return nn.Conv2d(o, o, k, groups=o) if i==1 else nn.Conv2d(i, o, k)
    m = nn.Sequential(*[nn.Linear(*s[::-1]) if len(s)==2 else conv(*s) for s in shapes*3])
    with torch.no_grad():
        for p in m.parameters():
            if p.ndim>1: inits[name](p)
    m = deepcopy(m)  # some write column by column, which is counted
    assert not shows_training(m)

def fresh_models():
    "Networks as their libraries make them, each in a line"
    import torchvision
    from fastai.text.all import AWD_LSTM,get_text_classifier
    from fastai.tabular.all import TabularModel
    from fastai.vision.all import DynamicUnet,create_body,xresnet18
    yield 'xresnet',lambda: xresnet18(n_out=10)
    yield 'unet',lambda: DynamicUnet(create_body(torchvision.models.resnet18(weights=None)), 3, (64,64))
    yield 'awd_lstm',lambda: get_text_classifier(AWD_LSTM, 300, 3)
    yield 'tabular',lambda: TabularModel([(10,5)], 5, 2, [200,100])
    yield from ((k, lambda k=k: getattr(torchvision.models, k)(weights=None)) for k in ('resnet18','mobilenet_v3_small'))
    from torchvision.models.convnext import CNBlockConfig,ConvNeXt
    yield 'vit',lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128)
    yield 'swin',lambda: torchvision.models.SwinTransformer([4,4], 32, [1,1], [1,2], [7,7])
    yield 'convnext',lambda: ConvNeXt([CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 1)])
    yield 'transformer',lambda: nn.Transformer(64, 4, 2, 2, 128)
    yield 'lstm',lambda: nn.LSTM(64, 128, 2, bidirectional=True)

@pytest.mark.full
@pytest.mark.parametrize('name', ['vit_b_16','swin_t','convnext_tiny','googlenet'])
def test_no_fresh_network_of_full_size_looks_trained(name):
    models = pytest.importorskip('torchvision').models
    assert not shows_training(getattr(models, name)(weights=None))

def test_no_fresh_network_looks_trained():
    "Of fastai, torch and torchvision, of transformers where it is installed"
    for name,make in fresh_models(): assert not shows_training(m := make()), name
    hf = pytest.importorskip('transformers')
    size = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=300)
    for name in ('Bert','Llama','GPTNeoX','ViT','Mamba','Bloom'): assert not shows_training(getattr(hf, f'{name}Model')(getattr(hf, f'{name}Config')(**size))), name
    gpt,t5 = hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300),hf.T5Config(d_model=64, num_layers=2, num_heads=4, vocab_size=300)
    net = hf.EfficientNetConfig(width_coefficient=.5, depth_coefficient=.5)
    for m in (hf.GPT2Model(gpt), hf.T5Model(t5), hf.EfficientNetModel(net)): assert not shows_training(m), type(m)

@cache
def trained(opt, lr):
    dls,m = digits_dls(),digits_mlp()
    opt = getattr(torch.optim, opt)(m.parameters(), lr)
    assert not shows_training(m)
    for _ in range(10):
        for xb,yb in dls.train:
            nn.functional.cross_entropy(m(xb), yb).backward()
            opt.step()
            opt.zero_grad()
    return m

@pytest.mark.parametrize('way', ['deepcopy','state_dict'])
@pytest.mark.parametrize('opt,lr', [('Adam',1e-3),('SGD',.1)])
def test_a_trained_network_without_norms_is_known_in_a_copy(way, opt, lr):
    "Ten epochs on the digits bring it above .9; random masks on the copy are warned of, and `fit_sparse` refuses them before anything changed"
    m = trained(opt, lr)
    copy = deepcopy(m) if way=='deepcopy' else digits_mlp()
    if way=='state_dict': copy.load_state_dict(m.state_dict())
    with pytest.warns(UserWarning, match='look trained'): sparsify_model(deepcopy(copy), .8)
    was = {k:v.clone() for k,v in copy.state_dict().items()}
    with pytest.raises(ValueError, match="mask_init='magnitude'"): learner(copy).fit_sparse(1, .8)
    assert agree(was, copy.state_dict())

def test_what_is_repaired_and_what_is_left_alone():
    "By a batch that is given, or by densities; not chosen masks, trained weights (which are warned of), healthy networks, or those without a dense spread"
    def made(change=lambda m: None, s=.95, m=None, alone=False, **kwargs):
        m = m or digits_mlp()
        change(m)
        was = [p.detach().clone() for p in m.parameters() if p.ndim>1]
        signal = sparsify_model(m, s, seed=1, **kwargs).signal
        assert all(torch.equal(o.p, w*o.mask) for o,w in zip(masked_params(m), was))!=(signal.repaired if signal else alone)
        return signal
    xb = torch.rand(32, 64)
    assert made(xb=xb).repaired and made(alone=True) is None and made(s=.3) is None and made(sparse_init_mode=None, xb=xb) is None
    assert made(m=nn.Sequential(nn.LayerNorm(64), *digits_mlp())) is None and made(mask_init='magnitude') is None
    assert not any(made(mask_init=o, xb=xb).repaired for o in ('magnitude','zeros'))
    assert not made(m=nn.Sequential(nn.Linear(64,64), nn.LayerNorm(64), nn.Linear(64,10)), s=.1, xb=xb).repaired
    signal = made(lambda m: nn.init.zeros_(m[4].weight), xb=xb)
    assert signal.kept is None and not signal.repaired and 'no judgement' in repr(signal)
    def fit(m):
        with (learn := learner(m)).no_bar(), learn.no_logging(): learn.fit(1, .1)
    with pytest.warns(UserWarning, match='look trained'): assert not made(fit, xb=xb).repaired

@pytest.mark.parametrize('sparsity', [.5,.9,.99])
def test_without_a_batch_densities_decide(sparsity):
    "Of the signal of three layers `sqrt(d1*d2*d3)` is left: below a third each weight is divided by the root of its density, as with a batch; a norm leaves nothing to do"
    plain,m,normed = digits_mlp(),digits_mlp(),nn.Sequential(*digits_mlp(), nn.LayerNorm(10))
    for o,mode in ((plain, None), (m, 'auto'), (normed, 'auto')): sparsify_model(o, sparsity, sparse_init_mode=mode, seed=1)
    densities = [float(o.mask.float().mean()) for o in masked_params(plain)]
    repaired = math.prod(densities)**.5<1/3
    assert repaired==(sparsity>.5)
    for a,b,c,d in zip(masked_params(plain), masked_params(m), masked_params(normed), densities):
        close(b.p, a.p*d**-.5 if repaired else a.p, 1e-6)
        eq(c.p, a.p)

@pytest.mark.parametrize('how', ['callback','told not to','sparsity','lr_find'])
def test_the_callback_repairs_a_bare_model(how):
    "In silence; unless it is told not to, or learning rates are looked for"
    m = digits_mlp()
    m = nn.Sequential(nn.LayerNorm(64), *m)
    if how!='sparsity': sparsify_model(m, .99, seed=1)
    cb,learn = DynamicSparseTrainingCallback(repair=how!='told not to', seed=0, **(dict(sparsity=.99, method='rigl') if how=='sparsity' else {})),learner(m)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        if how=='lr_find':
            learn.add_cb(cb)
            learn.lr_find(num_it=5, show_plot=False, suggest_funcs=())
        else: learn.fit(1, .1, cbs=cb)
    eq(bool(cb.signal and cb.signal.repaired), how in ('callback','sparsity'))
    assert not any('signal' in str(o.message) for o in told)

@pytest.mark.parametrize('change', ['load','write','train','fastai'])
def test_what_was_written_to_since_is_not_judged(change):
    "fastai's optimizers write to `p.data`, which no version counter sees"
    m = digits_mlp()
    sparsify_model(m, .99, seed=1)
    if change=='load': m.load_state_dict({k:v.clone() for k,v in m.state_dict().items()})
    elif change=='write':
        with torch.no_grad(): m[0].weight.mul_(2)
    elif change=='train':
        m(torch.randn(4,64)).sum().backward()
        torch.optim.SGD(m.parameters(), .1).step()
    else:
        with (learn := learner(m)).no_bar(), learn.no_logging(): learn.fit(1, .1)
    eq(loop(m)[0], 0)

def test_a_layer_without_weights_takes_part():
    "Its mask takes nothing from the signal"
    m = nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 8), nn.ReLU(), nn.Linear(8, 4))
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.Adam(m.parameters(), 1e-2)
    dst = DynamicSparseTraining(m, opt, 20, method='rigl', batches_per_update=3, seed=0)
    for _ in range(8):
        m(torch.randn(8, 16)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert dst.n_updates and [o.n_live() for o in masked_params(m)]==[0,0,16]
