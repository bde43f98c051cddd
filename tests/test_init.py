"The look at a network's signal, and its repair"
import pytest,random,torch,warnings
import numpy as np
from fastai.basics import CrossEntropyLossFlat,Learner,SGD,nn,set_seed
from fastcore.test import test_close as close,test_eq as eq
from fastsparse.train.callback import DynamicSparseTrainingCallback
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.weights.weight import masked_params
from fastsparse.model.running import batch_of
from fastsparse.model.init import dense_spread,is_fresh,output_spread,rate_scales
from fastsparse.model.sparsify import sparsify_model
from fastsparse.train.engine import DynamicSparseTraining

def conv(): return nn.Sequential(nn.Conv2d(1,4,3), nn.BatchNorm2d(4), nn.Dropout(.5), nn.Flatten(), nn.Linear(4*36,3))

def learner(model): return Learner(digits_dls(), model, loss_func=CrossEntropyLossFlat(), opt_func=SGD)

def test_spread_is_the_mean_over_outputs_of_the_deviation_over_samples():
    m = nn.Linear(2, 3)
    x = torch.randn(16, 2)
    close(output_spread(m, x), np.std(m(x).detach().double().numpy(), axis=0, ddof=1).mean(), 1e-6)

def test_the_first_floating_tensor_counts():
    class M(nn.Module):
        def forward(self, x): return x.long(),dict(a=x),x*9
    close(output_spread(M(), torch.tensor([[0.],[2.]])), 2**.5)

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

def test_norms_use_the_statistics_of_the_batch():
    m,x = nn.Sequential(nn.Linear(1,1), nn.BatchNorm1d(1)),torch.randn(64, 1)*100
    close(output_spread(m, x), (64/63)**.5, 1e-3)

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

def test_xb_does_the_same_without_a_learner_and_nothing_happens_without_either():
    a,b,c = [digits_mlp() for _ in range(3)]
    xb = batch_of(learner(a))
    assert sparsify_model(a, .95, seed=1, xb=xb).signal.repaired
    assert sparsify_model(b, .95, seed=1).signal is None
    sparsify_model(c, .95, seed=1, sparse_init_mode=None)
    assert torch.equal(b[2].weight, c[2].weight) and not torch.equal(a[2].weight, c[2].weight)

@pytest.mark.parametrize('init', ['magnitude', 'zeros'])
def test_chosen_masks_are_never_rescaled(init):
    learn = learner(digits_mlp())
    was = learn.model[2].weight.detach().clone()
    assert not sparsify_model(learn, .95, mask_init=init, seed=1).signal.repaired
    assert torch.equal(learn.model[2].weight, was*learn.model[2].weight_mask)

def test_trained_weights_are_warned_of_and_never_rescaled():
    learn = learner(digits_mlp())
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    was = learn.model[2].weight.detach().clone()
    with pytest.warns(UserWarning, match='look trained'): signal = sparsify_model(learn, .95, seed=1).signal
    assert not signal.repaired and torch.equal(learn.model[2].weight, was*learn.model[2].weight_mask)

def test_a_healthy_network_is_left_alone():
    m = nn.Sequential(nn.Linear(64,64), nn.LayerNorm(64), nn.Linear(64,10))
    assert not sparsify_model(m, .1, seed=1, xb=torch.randn(32,64)).signal.repaired

def test_a_dense_spread_of_zero_is_no_judgement():
    m = digits_mlp()
    nn.init.zeros_(m[4].weight)
    signal = sparsify_model(m, .9, seed=1, xb=torch.randn(8,64)).signal
    assert signal.kept is None and not signal.repaired and 'no judgement' in repr(signal)

def test_a_batch_that_does_not_fit_is_refused_before_anything_changed():
    m = digits_mlp()
    was = m[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match='8x3'): sparsify_model(m, .9, xb=torch.randn(8,3))
    assert torch.equal(m[0].weight, was) and not masked_params(m)

@pytest.mark.parametrize('repair', [True, False])
def test_the_callback_repairs_a_bare_model_unless_told_not_to(repair):
    m = digits_mlp()
    sparsify_model(m, .99, seed=1)
    cb,learn = DynamicSparseTrainingCallback(repair=repair, seed=0),learner(m)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        learn.fit(1, .1, cbs=cb)
    eq(bool(cb.signal), repair)
    eq(sum('killed the signal' in str(o.message) for o in told), int(repair))

@pytest.mark.parametrize('change', ['load', 'write', 'train'])
def test_what_was_written_to_since_is_not_fresh(change):
    m = digits_mlp()
    sparsify_model(m, .99, seed=1)
    assert is_fresh(m)
    if change=='load': m.load_state_dict({k:v.clone() for k,v in m.state_dict().items()})
    elif change=='write':
        with torch.no_grad(): m[0].weight.mul_(2)
    else:
        m(torch.randn(4,64)).sum().backward()
        torch.optim.SGD(m.parameters(), .1).step()
    assert not is_fresh(m)

def test_the_stand_in_of_a_dense_model_is_near_it_and_leaves_the_sparse_one():
    m,xb = digits_mlp(),torch.rand(64,64)
    dense = output_spread(m, xb)
    sparsify_model(m, .9, seed=1)
    was = {k:v.clone() for k,v in m.state_dict().items()}
    assert .5<dense_spread(m, xb)/dense<2
    for k,v in m.state_dict().items(): assert torch.equal(v, was[k]), k

def test_weights_that_fastai_trained_are_not_fresh():
    "fastai's optimizers write to `p.data`, which no version counter sees"
    m = digits_mlp()
    sparsify_model(m, .99, seed=1)
    with (learn := learner(m)).no_bar(), learn.no_logging(): learn.fit(1, .1)
    assert not is_fresh(m)

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

@pytest.mark.parametrize('by', ['sparsify_model', 'engine'])
def test_a_plain_loop_changes_nothing_and_warns_once(by):
    m = digits_mlp()
    if by=='sparsify_model': sparsify_model(m, .99, seed=1)
    eq(loop(m, **(dict(sparsity=.99) if by=='engine' else {})), (1,False))

@pytest.mark.parametrize('how', ['repaired', 'told not to', 'magnitude'])
def test_a_plain_loop_is_silent_where_there_is_nothing_to_repair(how):
    m = digits_mlp()
    kwargs = {'repaired':dict(xb=torch.rand(32,64)), 'told not to':dict(sparse_init_mode=None), 'magnitude':dict(mask_init='magnitude')}[how]
    sparsify_model(m, .99, seed=1, **kwargs)
    eq(loop(m), (0,False))

def test_a_callback_that_sparsifies_repairs_too():
    learn,cb = learner(digits_mlp()),DynamicSparseTrainingCallback(sparsity=.99, method='rigl', seed=0)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, .1, cbs=cb)
    assert cb.signal.repaired

def test_the_finder_of_learning_rates_repairs_nothing():
    m = digits_mlp()
    sparsify_model(m, .99, seed=1)
    cb,learn = DynamicSparseTrainingCallback(seed=0),learner(m)
    learn.add_cb(cb)
    with learn.no_bar(): learn.lr_find(num_it=5, show_plot=False, suggest_funcs=())
    assert cb.signal is None

@pytest.mark.parametrize('lr,expected', [(1e-5,100.), (.1/50,50.), (1e-2,10.), (1.,10.)])
def test_steps_are_as_long_as_supar_says_where_they_are_small(lr, expected):
    "Live weights of 1, one in a hundred: 1/density until a step is a tenth of them, and never below 1/sqrt(density)"
    m = nn.Linear(100, 100)
    sparsify_model(m, .99, seed=0, sparse_init_mode=None)
    with torch.no_grad(): m.weight.copy_(m.weight_mask.float())
    close(rate_scales(m, lr)['weight'], expected, 1e-6)
    close(rate_scales(m, lambda p: lr)['weight'], expected, 1e-6)
