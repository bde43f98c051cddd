"Narrower copies of a model, and the comparison with them"
import math,pandas as pd,pytest,re,torch
from copy import deepcopy
from dataclasses import replace
from fastai.basics import nn,accuracy,Callback,CrossEntropyLossFlat,Learner
from fastcore.test import test_eq as eq
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.deploy import narrow
from fastsparse.deploy.narrow import NarrowComparison,compare_with_narrow,narrow_like
from fastsparse.deploy.search import find_sparsity
from fastsparse.weights.find import masked_params

def mlp(): return nn.Sequential(nn.Linear(64,40), nn.ReLU(), nn.Linear(40,40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40,10))

def shapes(m): return [tuple(p.shape) for p in m.parameters()]

@pytest.mark.parametrize('fraction,n', [(.5,20), (.26,10), (.01,1), (1.,40)])
def test_hidden_layers_get_narrower_and_ends_stay(fraction, n):
    "`round(fraction*n)` channels of each hidden layer, at least one; the model stays as it is"
    m = mlp()
    before = deepcopy(m.state_dict())
    small = narrow_like(m, fraction, torch.randn(2,64))
    eq(shapes(small), [(n,64), (n,), (n,n), (n,), (n,), (n,), (10,n), (10,)])
    assert small.training and small(torch.randn(3,64)).shape==(3,10)
    assert all((v==before[k]).all() for k,v in m.state_dict().items())

def test_weights_are_scaled_to_the_new_number_of_inputs():
    "16 inputs become 4: each weight is twice what it was; biases, and weights of a layer that reads the inputs, stay"
    m = nn.Sequential(nn.Linear(3,16), nn.ReLU(), nn.Linear(16,2))
    with torch.no_grad():
        for p in m.parameters(): p.fill_(1.)
    small = narrow_like(m, .25, torch.randn(2,3))
    assert (small[0].weight==1).all() and (small[0].bias==1).all() and (small[2].weight==2).all() and (small[2].bias==1).all()

def test_the_seed_chooses_the_channels():
    m,xb = nn.Sequential(nn.Linear(3,64), nn.ReLU(), nn.Linear(64,2)),torch.randn(2,3)
    a,b,c = [narrow_like(m, .5, xb, seed=s)[0].weight for s in (0,0,1)]
    assert (a==b).all() and not (a==c).all()

def test_a_resnet_keeps_its_sums():
    "Channels that are added to each other go together; a third of the width has about a ninth of the weights"
    from torchvision.models import resnet18
    m,xb = resnet18(num_classes=10),torch.randn(2,3,32,32)
    small = narrow_like(m, 1/3, xb)
    assert small.train()(xb).shape==(2,10)
    n,n_small = [sum(p.numel() for p in o.parameters()) for o in (m,small)]
    assert .1<n_small/n<.12
    eq(small.layer1[0].conv2.out_channels, 21)

def test_an_xresnet_is_followed():
    from fastai.vision.models.xresnet import xresnet18
    xb = torch.randn(2,3,64,64)
    assert narrow_like(xresnet18(n_out=10), .5, xb)(xb).shape==(2,10)

def test_models_of_transformers_get_fewer_heads():
    "Heads keep their size, and all widths follow their number"
    tf = pytest.importorskip('transformers')
    configs = [(tf.GPT2LMHeadModel, tf.GPT2Config(n_embd=64, n_head=8, n_layer=1, vocab_size=99)),
        (tf.BertModel, tf.BertConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=1, intermediate_size=128, vocab_size=99)),
        (tf.ViTModel, tf.ViTConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=1, intermediate_size=128, image_size=16, patch_size=8))]
    for cls,config in configs:
        small = narrow_like(cls(config), .25)
        eq((type(small), small.config.hidden_size, small.config.num_attention_heads), (cls, 16, 2))

def test_what_cannot_be_followed_is_refused_by_name():
    m = nn.Sequential(nn.Linear(8,32), nn.Unflatten(1, (4,8)), nn.Flatten(), nn.Linear(32,3))
    with pytest.raises(ValueError, match="'0' writes can't be followed.*pass them as widths"): narrow_like(m, .5, torch.randn(2,8))
    with pytest.raises(TypeError, match='xb is None'): narrow_like(m, .5)
    for bad in (0, 1.5, -1):
        with pytest.raises(ValueError, match='fraction is'): narrow_like(m, bad, torch.randn(2,8))

def compared(sparse, small, large, sign=1):
    "A comparison of three networks with these scores; the small one is the fastest"
    rows = [dict(network=k, score=s, seconds=2., us=u, weights=1, epochs=1, lr=.1, seed=i)
        for k,u,scores in (('sparse',3,sparse), ('small',1,small), ('large',9,large)) for i,s in enumerate(scores)]
    return NarrowComparison(pd.DataFrame(rows), pd.DataFrame(), .9, sign)

@pytest.mark.parametrize('sparse,small,large,sign,says', [
    ([.8,.81,.82], [.5,.51,.52], [.6,.61,.62], 1, 'no dense network.*the best is large'),
    ([.8,.81,.82], [.5,.51,.52], [.9,.91,.92], 1, 'large is better than sparse at 0.9'),
    ([.8,.81,.82], [.79,.81,.83], [.8,.82,.83], 1, 'small is as good as sparse at 0.9'),
    ([.8,.81,.82], [.5,.51,.52], [.9,.91,.92], -1, 'small is better than sparse'),
    ([.8], [.7], [.75], 1, 'no dense network'),
    ([.8,.81,.82], [.8,.81,math.nan], [.79,.81,.83], 1, 'large is as good as sparse'),
    ([.8,.81,.82], [math.nan]*3, [.5,.51,.52], 1, 'no dense network.*the best is large'),
    ([.8,.81,math.nan], [.5,.51,.52], [.5,.51,.52], 1, 'small is better than sparse')])
def test_the_finding(sparse, small, large, sign, says):
    "Better is more than two standard errors of the difference; of networks that are as good, the fastest is named"
    assert re.match(says, compared(sparse, small, large, sign).finding)

def test_every_network_trains_for_the_seconds_of_the_sparse_one(monkeypatch):
    "Its epochs over the seconds of one of the rival's; each has the rate that did best for it, and the learner comes back as it was"
    seen,clock = [],iter(range(10**6))
    monkeypatch.setattr(narrow.time, 'perf_counter', lambda: next(clock))  # each training epoch takes one second
    real = narrow.train_timed
    def train(learn, n_epoch, lr, seed, sparsity, **kwargs):
        seen.append((n_epoch, lr, seed, sparsity, tuple(kwargs)))
        return {**real(learn, 1, lr, seed, sparsity, **kwargs), 'seconds':6., 'score':float(lr==.02)}
    monkeypatch.setattr(narrow, 'train_timed', train)
    monkeypatch.setattr(narrow, 'epoch_seconds', lambda learn, model: 2.)
    monkeypatch.setattr(narrow, 'seconds_a_batch', lambda learn, rounds: (1.,1))
    torch.manual_seed(0)
    learn = Learner(digits_dls(bs=256), mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    before,state = deepcopy(learn.model.state_dict()),torch.random.get_rng_state()
    found = compare_with_narrow(learn, 4, .75, widths=[.5], seeds=2, lrs=[.01,.02], progress=False, method='set')
    eq(seen, [(4,.01,0,.75,('method',)), (4,.02,0,.75,('method',)), (4,.02,1,.75,('method',)), (4,.02,2,.75,('method',)),
        (3,.01,0,0,()), (3,.02,0,0,()), (3,.02,1,0,()), (3,.02,2,0,())])
    eq(list(found.table.index), ['sparse','dense of width 0.5'])
    n = sum(o.numel() for o in before.values())
    eq(found.table.weights['sparse'], n-.75*(40*64+40*40+10*40))
    assert not masked_params(learn.model) and all((v==before[k]).all() for k,v in learn.model.state_dict().items())
    assert (torch.random.get_rng_state()==state).all()

def test_networks_are_trained_as_the_learner_trains():
    "With its momentum, its batch norms and its clipping; what trains otherwise is named"
    from fastai.callback.training import GradientClip
    from fastsparse.deploy.rates import copy_of
    class Own(Callback): pass
    learn = Learner(digits_dls(bs=256), mlp(), loss_func=CrossEntropyLossFlat(), cbs=[GradientClip(.1), Own()], moms=(.8,.7,.8), train_bn=False)
    with pytest.warns(UserWarning, match="compared without the learner's Own"): new = copy_of(learn)
    assert new.moms==(.8,.7,.8) and not new.train_bn and new.gradient_clip.max_norm==.1 and new.gradient_clip is not learn.gradient_clip
    assert new.gradient_clip.learn is new and learn.gradient_clip.learn is learn

def test_callbacks_go_to_the_sparse_fit():
    "Also beside the clock that counts seconds of training; the first metric is the score"
    class Seen(Callback):
        n = 0
        def before_fit(self): self.n += 1
    seen = Seen()
    learn = Learner(digits_dls(bs=256), mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    row = narrow.train_timed(learn, 1, .01, 0, .5, method='set', cbs=seen)
    assert seen.n==1 and row['seconds']>0 and 0<=row['score']<=1 and row['us']>0

# --- in a search for a sparsity

def digits_learner(): return Learner(digits_dls(), digits_mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

def test_a_search_tries_the_narrow_network_too():
    "As many seeds, as long as the suggested sparse network; the advice follows the comparison"
    learn = digits_learner()
    found = find_sparsity(learn, budget=8, sparsities=(.9,), seeds=2, tolerance=1., progress=False)
    t = found.narrow.table
    assert found.suggested==.9 and list(t.index)==['sparse','dense of width 0.32'] and list(found.narrow.runs.seed)==[0,1,0,1]
    assert t.weights['sparse']-1000<t.weights['dense of width 0.32']<t.weights['sparse']+10_000
    runs = found.narrow.runs.assign(score=[.5,.5,.9,.9])
    assert replace(found, narrow=replace(found.narrow, runs=runs)).advice.startswith('train a dense network of width 0.32: dense of width 0.32 is better')
    assert replace(found, narrow=replace(found.narrow, runs=runs.assign(score=[.9,.9,.5,.5]))).advice.startswith('train a sparse network at 0.9: no dense network')
    assert replace(found, suggested=0.).advice.startswith('train the dense network')
    assert not masked_params(learn.model) and learn.opt is None

def test_a_search_says_why_no_narrow_network_was_tried():
    learn = digits_learner()
    learn.fit(1, 1e-3)
    found = find_sparsity(learn, budget=4, sparsities=(.5,), seeds=1, tolerance=1., progress=False, mask_init='magnitude')
    assert found.narrow is None and found.advice=='train a sparse network at 0.5; no narrow dense network was tried: the model is trained, and a narrow one would start anew'

def test_a_search_of_one_epoch_each_advises_nothing():
    "Neither sparse nor dense is better after so short a training"
    with pytest.warns(UserWarning, match='too short to compare'): found = find_sparsity(digits_learner(), budget=2, sparsities=(.5,), seeds=1, progress=False)
    assert 'longer trainings' in found.advice and 'budget=10 or more' in found.advice

def test_a_search_suggests_no_sparsity_at_which_a_training_diverges(monkeypatch):
    "A seed whose score isn't a number was left out of its mean"
    import fastsparse.deploy.search as search
    scores = {0.:[.8,.8], .5:[.8,.8], .9:[.8,math.nan]}
    monkeypatch.setattr(search, '_trial', lambda l, s, seed, *args: dict(sparsity=s, seed=seed, metric=scores[s][seed], seconds=1., bytes=1, row={}))
    monkeypatch.setattr(search, '_add_narrow', lambda *args: None)
    def suggested(): return find_sparsity(Learner(digits_dls(), mlp(), loss_func=CrossEntropyLossFlat()), 6, (.5,.9), progress=False).suggested
    assert suggested()==.5
    scores[0.][0] = scores[.5][0] = math.nan
    assert suggested()==0.
    scores[.9][1] = .7
    assert suggested()==.9
