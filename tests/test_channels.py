"Channels that `prune_channels` kills are dead behind their norms, stay so in training, and go"
import copy,pytest,torch,torch.nn.functional as F,warnings
from fastai.basics import accuracy,CrossEntropyLossFlat,Learner
from fastsparse.all import count_flops,load_sparse,save_sparse,shrink,sparse_summary,sparsify_model
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.kernels.timing import output_error
from fastsparse.cut.groups import channel_groups
from fastsparse.cut.channels import ChannelPruning,choose_groups,prune_channels,taylor_scores
from helpers import assert_dead
from test_groups import cases
from test_shrink import settle
from torch import nn

def n_weights(m): return sum(p.numel() for p in m.parameters())

@pytest.mark.parametrize('kind', cases)
def test_half_of_the_channels_go(kind):
    "Whatever the shifts of the norms are: nothing of them stays, without a word"
    torch.manual_seed(0)
    make,shape,want = cases[kind]
    model,x,y = settle(make()),torch.randn(shape),torch.randn(shape)
    prune_channels(model, .5, x)
    with warnings.catch_warnings(action='error'): small,_ = shrink(model, x)
    for (n,d),k in want.items(): assert small.get_parameter(n).shape[d]*2==model.get_parameter(n).shape[d] or k%2
    assert output_error(small(y), model(y))<1e-5 and not any('mask' in k for k in small.state_dict())

def net(): return nn.Sequential(nn.Conv2d(3,16,3,padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16,8,3,padding=1), nn.BatchNorm2d(8), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,4))

def test_ties_go_to_the_lowest():
    "In each layer, or in the first, of which one channel stays"
    groups = channel_groups(nn.Sequential(nn.Linear(3,30), nn.ReLU(), nn.Linear(30,30), nn.ReLU(), nn.Linear(30,2)), torch.randn(2,3))
    def gone(ranking): return [choose_groups(groups, torch.ones(groups.n), .5, ranking)[groups.axes[f'{i}.weight',0]].tolist() for i in (0,2)]
    assert gone('space')==[[True]*15+[False]*15]*2
    assert gone('global')==[[True]*29+[False],[False]*30]

def test_magnitudes_of_a_whole_group_decide():
    "The row of the writer, its bias, its scale and the column of the reader"
    model = nn.Sequential(nn.Linear(2,3), nn.ReLU(), nn.Linear(3,1)).requires_grad_(False)
    for p,v in zip(model.parameters(), ([[1.,1.],[5.,0.],[0.,0.]], [0.,1.,0.], [[3.,0.,9.]], [0.])): p.copy_(torch.tensor(v))  # 5, 6 and 9
    prune_channels(model, .34, torch.randn(2,2))
    assert model[0].weight_mask.tolist()==[[False]*2,[True]*2,[True]*2] and model[0].bias_mask.tolist()==[False,True,True]
    assert model[2].weight_mask.tolist()==[[False,True,True]] and not hasattr(model[2], 'bias_mask')

@pytest.mark.parametrize('opt', [lambda ps: torch.optim.Adam(ps, 1e-2), lambda ps: torch.optim.SGD(ps, .1, momentum=.9, weight_decay=.1)])
def test_dead_channels_stay_dead_in_training(opt):
    torch.manual_seed(0)
    model,x = net(),torch.randn(8,3,6,6)
    opt = opt(model.parameters())
    def step():
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    step()
    prune_channels(model, .5, x)
    for _ in range(3): step()
    model(x)
    assert_dead(model)
    h = model[:3](x)
    assert (h[:,~model[1].bias_mask]==0).all() and h[:,model[1].bias_mask].any()
    small,_,own = shrink(model, x, opt)
    assert small[0].out_channels==8 and {tuple(v.shape) for s in own.state.values() for k,v in s.items() if k!='step'}=={tuple(p.shape) for p in small.parameters()}

@pytest.mark.parametrize('budget', ['channels','weights','flops',lambda m, x: m[0].out_channels])
@pytest.mark.parametrize('ranking', ['space','global'])
def test_a_budget_is_met(budget, ranking):
    torch.manual_seed(0)
    model,x = net(),torch.randn(2,3,6,6)
    prune_channels(model, .4, x, budget=budget, ranking=ranking)
    small,_ = shrink(model, x)
    costs = dict(channels=lambda m: sum(o.out_channels for o in m if isinstance(o, nn.Conv2d)), weights=n_weights, flops=lambda m: count_flops(m, x))
    cost = costs.get(budget) or (lambda m: budget(m, x))
    assert .4<cost(small)/cost(model)<=.6+.05*(budget=='channels')

def test_pruned_again_and_further():
    "What was dead stays dead"
    torch.manual_seed(0)
    model,x = net(),torch.randn(2,3,6,6)
    prune_channels(model, .25, x)
    before = model[1].bias_mask.clone()
    with torch.no_grad(): model[0].weight.mul_(1-2*torch.rand_like(model[0].weight))
    prune_channels(model, .5, x)
    assert model[1].bias_mask.sum()==8 and not (model[1].bias_mask&~before).any()
    model = net()
    sparsify_model(model, .5, 'uniform', seed=0)
    alive = int(model[3].weight_mask.sum())
    prune_channels(model, .5, x)
    small,_ = shrink(model, x)
    assert small[3].weight.shape[:2]==(4,8) and small[3].weight_mask.sum()==model[3].weight_mask.sum()<alive
    assert output_error(small(x), model.eval()(x))<1e-5

@pytest.mark.parametrize('ranking', ['space','global'])
def test_what_stays_is_a_multiple(ranking):
    "Of eight where a layer has sixteen or more; smaller layers aren't rounded"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4,40), nn.ReLU(), nn.Linear(40,10), nn.ReLU(), nn.Linear(10,2))
    prune_channels(model, .3, x := torch.randn(2,4), multiple=8, ranking=ranking)
    small,_ = shrink(model, x)
    assert small[0].out_features in (24,32) and small[2].out_features<10
    if ranking=='space': assert (small[0].out_features,small[2].out_features)==(32,7)

@pytest.mark.parametrize('kind', ['heads','rotary'])
def test_heads_alone(kind):
    "Also where positions are turned, and two queries share a key"
    torch.manual_seed(0)
    layer = nn.Sequential(settle(cases[kind][0]()), nn.Linear(8,32), nn.ReLU(), nn.Linear(32,2))
    x = torch.randn(2,5,8)
    prune_channels(layer, .5, x, structure='heads')
    small,_ = shrink(layer, x)
    assert small[0].q.out_features==small[0].o.in_features==8 and small[1].out_features==32
    with pytest.raises(ValueError, match='Sequential has no heads that can go'): prune_channels(net(), .5, torch.randn(2,3,6,6), structure='heads')

def test_taylor():
    "A neuron that the loss doesn't depend on goes first, however large it is; the sum over its weights is the change of the loss, to first order"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8,6), nn.Tanh(), nn.Linear(6,3))
    with torch.no_grad():
        model[0].weight[2] *= 100
        model[2].weight[:,2] = 0
    data = [(torch.randn(16,8), torch.randint(3, (16,))) for _ in range(3)]
    scores = taylor_scores(model, data, nn.CrossEntropyLoss())
    loss = sum(F.cross_entropy(model(x), y) for x,y in data)/3
    for p,g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        torch.testing.assert_close(next(s for n,s in scores.items() if model.get_parameter(n) is p), p*g, rtol=1e-4, atol=1e-6)
    prune_channels(model, .17, data[0][0], scores=scores)
    assert model[0].bias_mask.tolist()==[True,True,False,True,True,True]

@pytest.mark.parametrize('args,match', [(dict(sparsity=1.), 'sparsity is 1.0'), (dict(sparsity=.5, structure='kernels'), 'structure is'), (dict(sparsity=.5, budget='joules'), 'budget is'),
    (dict(sparsity=.99, budget='weights'), 'with one channel in each layer'), (dict(sparsity=.5, ranking='layer'), 'ranking is')])
def test_refusals(args, match):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match): prune_channels(model, xb=torch.randn(2,3,6,6), **args)
    assert all(v.equal(before[k]) for k,v in model.state_dict().items())

def test_files_and_tables(tmp_path):
    torch.manual_seed(0)
    model,x = net().eval(),torch.randn(2,3,6,6)
    prune_channels(model, .5, x)
    assert 'whole model' in repr(sparse_summary(model)) and count_flops(model, x, sparse=True)<count_flops(model, x)
    other = net().eval()
    prune_channels(other, .25, x)
    other.load_state_dict(model.state_dict())
    assert other(x).equal(model(x))
    save_sparse(model, tmp_path/'m.safetensors')
    load_sparse(third := net().eval(), tmp_path/'m.safetensors')
    assert third(x).equal(model(x)) and not third[1].bias_mask.all()

@pytest.mark.parametrize('kwargs', [{}, dict(scores='taylor', ranking='global')])
def test_a_fit_that_prunes(kwargs):
    "In ten steps; nothing is dead at first, and all that was asked for at the end"
    learn = Learner(digits_dls(), digits_mlp(), CrossEntropyLossFlat(), metrics=accuracy)
    cb = ChannelPruning(.75, n_steps=4, **kwargs)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(4, 1e-2, cbs=cb)
    alive = [int(learn.model[i].bias_mask.sum()) for i in (0,2)]
    assert sum(alive)==128 and (alive==[64,64] or kwargs)
    assert_dead(learn.model)
    assert learn.validate()[1]>.9

@pytest.mark.parametrize('n_acc', [64, 128, 256, 1000])
def test_channels_die_under_accumulation(n_acc):
    "What falls due between two steps dies at the next: the end is that of a fit without accumulation, 40 of each 80 neurons"
    from fastai.callback.training import GradientAccumulation
    learn = Learner(digits_dls(bs=64), nn.Sequential(nn.Linear(64,80), nn.ReLU(), nn.Linear(80,10)), loss_func=CrossEntropyLossFlat(), lr=1e-3)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings(action='error', category=UserWarning):
        learn.fit(4, cbs=[ChannelPruning(.5, n_steps=5, stop_pct=.5), GradientAccumulation(n_acc)])
    assert int(learn.model[0].weight_mask.any(1).sum())==40

def test_a_fit_that_ends_before_the_last_channels_die_says_so():
    from fastai.callback.core import Callback,CancelFitException
    class Stop(Callback):
        def after_batch(self):
            if self.train_iter==5: raise CancelFitException()
    learn = Learner(digits_dls(bs=64), digits_mlp(), loss_func=CrossEntropyLossFlat())
    with learn.no_bar(), learn.no_logging(), pytest.warns(UserWarning, match='ended at batch 5'): learn.fit(2, cbs=[ChannelPruning(.5), Stop()])

@pytest.mark.parametrize('scores,text', [({}, 'must be a function'), ('taylor', 'must be a function'), ([1.], 'must be a function'), ({'_orig_mod.0.weight':torch.ones(80,64)}, 'scores names _orig_mod.0.weight'),
    ({'0.weight':torch.ones(64,80)}, 'has shape'), ({'0.weight':torch.full((80,64), torch.nan)}, 'holds NaN')])
def test_scores_that_are_none(scores, text):
    "Wrong names, shapes and values are refused before anything changed"
    net = nn.Sequential(nn.Linear(64,80), nn.ReLU(), nn.Linear(80,10))
    with pytest.raises(ValueError, match=text): prune_channels(net, .5, torch.randn(4,64), scores=scores)
    assert not list(net.buffers())

def test_a_batch_of_pictures_is_followed():
    "fastai's loaders give a `TensorImage`, which no operator trace takes"
    from fastai.torch_core import TensorImage
    net = nn.Sequential(nn.Conv2d(3,8,3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8,8,3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,2)).eval()
    xb = torch.randn(2,3,8,8)
    masks = []
    for batch in (xb, TensorImage(xb)):
        prune_channels(own := copy.deepcopy(net), .5, batch)
        masks.append([b for n,b in own.named_buffers() if n.endswith('_mask')])
        assert output_error(shrink(own, batch)[0](xb), own(xb))<1e-5
    assert all(map(torch.equal, *masks)) and not masks[0][0].all()

class Counted(nn.Module):
    "A forward that computes with the number of its channels"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,16),nn.Linear(16,4)
    def forward(self, x):
        h = self.a(x).relu().roll(1, 1)
        return self.b(h/h.shape[1])

@pytest.mark.parametrize('budget', ['channels','weights','flops','seconds'])
def test_channels_whose_number_counts_stay(budget):
    "Alone they are refused, beside others the others go; nothing is changed by a refusal"
    torch.manual_seed(0)
    model,x = Counted(),torch.randn(4,8)
    with pytest.raises(ValueError, match='no channels that can go .*the forward reads their number'): prune_channels(model, .5, x, budget=budget)
    assert not list(model.buffers())
    if budget=='seconds': return
    both = nn.Sequential(model, nn.Linear(4,32), nn.ReLU(), nn.Linear(32,2))
    prune_channels(both, .3, x, budget=budget)
    small,removed = shrink(both, x)
    assert '0.a' not in removed and removed['1']>9 and output_error(small(x), both.eval()(x))<1e-5

def test_seconds_are_measured_in_float32(monkeypatch):
    "Of cut copies of a model that is followed in float64; here a second for each FLOP"
    from torch.utils.flop_counter import FlopCounterMode
    def timed(fs, n):
        with FlopCounterMode(display=False) as counted: assert fs[0]().dtype==torch.float
        return [[counted.get_total_flops()]*n]
    monkeypatch.setattr('fastsparse.cut.channels.times_in_turns', timed)
    model,x = net(),torch.randn(2,3,6,6)
    prune_channels(model, .5, x, budget='seconds')
    assert .4<count_flops(shrink(model, x)[0], x)/count_flops(model, x)<=.5

def test_less_than_a_channel():
    model = net()
    with pytest.warns(UserWarning, match='sparsity is 0.01, less than one of the channels'): prune_channels(model, .01, torch.randn(2,3,6,6))
    with pytest.raises(ValueError, match=r'fails on xb, \(2, 4, 6, 6\) .*expected input'): prune_channels(model, .5, torch.randn(2,4,6,6))
