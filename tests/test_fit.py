"One line that trains a sparse network, and what it refuses"
import math,pytest,torch,warnings
import numpy as np
from fastai.basics import Adam,Callback,CancelFitException,CancelStepException,CrossEntropyLossFlat,DataLoaders,Learner,SGD,accuracy,nn,set_seed
from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
from fastai.optimizer import OptimWrapper,QHAdam,RMSProp,ranger
from fastsparse.core.optimizers import is_adaptive
from fastsparse.train.callback import DynamicSparseTrainingCallback
from fastsparse.train.engine import DynamicSparseTraining
from fastsparse.masks.distributions import uniform_sparsity,usual_sparsity
from fastsparse.core.registry import needs_of
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.train.fit import auto_presets
from fastsparse.deploy.search import find_sparsity
from fastsparse.weights.weight import masked_params,sparse_params
from fastsparse.model.init import was_rescaled
from fastsparse.model.sparsify import sparsify_model
from functools import partial

def learner(opt=Adam, model=None):
    learn = Learner(digits_dls(), model or digits_mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=opt)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = lambda *args: None
    return learn

def sparsity_of(model):
    masks = [m for _,m,_ in sparse_params(model)]
    return 1-sum(int(m.sum()) for m in masks)/sum(m.numel() for m in masks)

def dead_are_zero(model): return all(not (o.p[~o.mask]!=0).any() for o in masked_params(model))

@pytest.mark.parametrize('n_steps', [1, 10, 100, 440, 3000, 100_000])
def test_a_run_looks_at_each_dead_weight_about_once(n_steps):
    "At most a tenth of all steps brings an update, and all updates together read no more gradients of dead weights than one dense gradient has"
    o = auto_presets(n_steps)
    n_updates = len([t for t in range(o['batches_per_update'], n_steps, o['batches_per_update']) if t<.75*n_steps])
    assert n_updates<=n_steps/10 and not o['replace_step']
    sample = needs_of(o['grow_score_f']).sample
    assert n_updates*sample.size(1000, 100, 0)<=901 and (n_steps<400 or n_updates*sample.size(1000, 100, 0)>=.9*900)

@pytest.mark.parametrize('opt,lr', [(partial(SGD, mom=.9), .1), (Adam, 1e-3), (Adam, 1e-2)])
def test_fit_sparse_learns_at_one_weight_in_a_hundred(opt, lr):
    learn = learner(opt)
    learn.fit_sparse(10, .99, lr, seed=0)
    assert learn.validate()[1]>.85
    assert abs(sparsity_of(learn.model)-.99)<1e-3 and dead_are_zero(learn.model)

@pytest.mark.parametrize('opt,lr,fit', [(partial(SGD, mom=.9), .1, 'fit'), (Adam, 1e-3, 'fit_one_cycle')])
def test_two_lines_learn_at_one_weight_in_a_hundred(opt, lr, fit):
    learn = learner(opt)
    sparsify_model(learn.model, .99, seed=0)
    with pytest.warns(UserWarning, match='had killed the signal'): getattr(learn, fit)(20, lr, cbs=DynamicSparseTrainingCallback(seed=0))
    assert learn.validate()[1]>.87
    assert abs(sparsity_of(learn.model)-.99)<1e-3 and dead_are_zero(learn.model)

@pytest.mark.parametrize('method', ['rigl', 'set', 'static', 'gmp', 'granet', 'mest', 'acdc', 'auto', None])
def test_every_method_ends_at_the_sparsity_that_was_asked_for(method):
    learn = learner()
    learn.fit_sparse(2, .9, method=method, seed=0)
    assert abs(sparsity_of(learn.model)-.9)<2e-3 and dead_are_zero(learn.model)

@pytest.mark.parametrize('name', ['Adafactor','Adagrad','Adadelta','ASGD','Rprop','RMSprop','NAdam'])
def test_optimizers_without_momentum(name):
    "fastai's own cycle fails with those that have none (KeyError: mom); here they follow the rates, all of them those of the cycle, and `find_sparsity` trains with them too"
    opt = partial(OptimWrapper, opt=getattr(torch.optim, name))
    learn = learner(opt)
    learn.fit_sparse(2, .8, 1e-3, seed=0)
    assert abs(sparsity_of(learn.model)-.8)<2e-3 and dead_are_zero(learn.model)
    rates = learn.recorder.hps['lr']
    assert max(rates)==pytest.approx(1e-3, rel=1e-2) and rates[0]==pytest.approx(1e-3/25) and rates[-1]<1e-5
    assert ('mom' in learn.recorder.hps)==(name in ('RMSprop','NAdam'))
    assert find_sparsity(learner(opt), budget=2, sparsities=(.8,), seeds=1, progress=False).suggested in (0.,.8)

def test_a_sparse_model_goes_on_or_moves():
    learn = learner()
    learn.fit_sparse(1, .9, method='static', seed=0)
    masks = [m.clone() for _,m,_ in sparse_params(learn.model)]
    learn.fit_sparse(1, .9, method='static', seed=0)
    assert all(torch.equal(a, m) for a,(_,m,_) in zip(masks, sparse_params(learn.model)))
    learn.fit_sparse(2, .95, seed=0)
    assert abs(sparsity_of(learn.model)-.95)<1e-3

def test_a_distribution_that_is_asked_for_moves_a_sparse_model():
    "Also where the sparsity of the whole model is reached already"
    learn = learner()
    sparsify_model(learn.model, .9, 'erk', seed=0)
    learn.fit_sparse(2, .9, sparse_f=uniform_sparsity, seed=0)
    for o in masked_params(learn.model): assert abs(int(o.mask.sum())-.1*o.mask.numel())<=1

def test_trained_weights_ask_for_magnitude_or_a_gradual_method():
    learn = learner()
    learn.fit(1, 1e-3)
    was = {k:v.clone() for k,v in learn.model.state_dict().items()}
    with pytest.raises(ValueError, match="mask_init='magnitude'"): learn.fit_sparse(1, .9)
    assert all(torch.equal(v, was[k]) for k,v in learn.model.state_dict().items())
    learn.fit_sparse(1, .9, mask_init='magnitude', seed=0)
    assert abs(sparsity_of(learn.model)-.9)<1e-3

def test_frozen_groups_stay():
    learn = learner()
    learn.splitter = lambda m: [list(m[0].parameters()), list(m[2:].parameters())]
    learn.freeze()
    sparsify_model(learn, .9, seed=0)
    was = learn.model[0].weight.detach().clone()
    learn.fit_sparse(1, .9, seed=0)
    assert torch.equal(learn.model[0].weight, was)

@pytest.mark.parametrize('method', [None, 'gmp'])
def test_frozen_layers_that_keep_a_run_from_its_sparsity_are_told(method):
    "Law 9: a frozen budget stays; so the model can't get as sparse as was asked, which is said before the fit"
    learn = learner()
    learn.splitter = lambda m: [list(m[0].parameters()), list(m[2:].parameters())]
    sparsify_model(learn, .9, seed=0)
    learn.freeze()
    n = int(learn.model[0].weight_mask.sum())
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*frozen')
        learn.fit_sparse(1, .9, seed=0)
    with pytest.warns(UserWarning, match='0.weight is frozen') as told: learn.fit_sparse(1, .95, method=method, seed=0)
    assert int(learn.model[0].weight_mask.sum())==n
    assert any(f'ends {sparsity_of(learn.model):.3f} sparse' in str(w.message) for w in told)

def test_ctrl_c_leaves_a_lawful_sparse_model():
    class Stop(Callback):
        def after_step(self):
            if self.train_iter==10: raise KeyboardInterrupt
    learn = learner()
    with pytest.raises(KeyboardInterrupt): learn.fit_sparse(2, .9, seed=0, cbs=Stop())
    assert abs(sparsity_of(learn.model)-.9)<1e-3 and dead_are_zero(learn.model)
    learn.fit_sparse(1, .9, seed=0)

def test_sgd_is_told_from_adam():
    for opt,expected in ((SGD,False), (partial(SGD, mom=.9),False), (Adam,True)):
        learn = learner(opt)
        learn.create_opt()
        assert is_adaptive(learn.opt)==expected
    assert is_adaptive(torch.optim.AdamW(digits_mlp().parameters())) and not is_adaptive(torch.optim.SGD(digits_mlp().parameters(), .1))

def test_a_scaled_rate_is_that_of_a_parameter_group():
    "Two ways to a rate of sqrt(10) times .1, at which a step is large beside the weights"
    def train(scaled):
        set_seed(0)
        learn = learner(partial(Adam, wd=0.), nn.Sequential(nn.Linear(64,10,bias=False)))
        sparsify_model(learn.model, .9, sparse_init_mode=None, seed=0)
        learn.fit(1, .1*(1 if scaled else 10**.5), cbs=[DynamicSparseTrainingCallback(method='static', scale_rates=True)] if scaled else [])
        return learn.model[0].weight.detach()
    assert torch.allclose(train(True), train(False), atol=1e-3)

@pytest.mark.parametrize('args,named', [((0,.9),'n_epoch'), ((1,1.),r'\[0,1\)'), ((1,-.1),r'\[0,1\)'), ((1,'x'),'sparsity'), ((1,.9,-1.),'lr'), ((1,.9,None,'nope'),'nope'),
    ((1,.9,slice(-1,0)),'lr'), ((1,.9,slice('a',1.)),'lr'), ((1,.9,slice(None)),'lr'), ((1,.9,True),'lr')])
def test_bad_input_is_refused_before_anything_changed(args, named):
    learn = learner()
    with pytest.raises(ValueError, match=named): learn.fit_sparse(*args)
    assert not masked_params(learn.model) and learn.opt is None

def test_callbacks_are_looked_at_before_anything_changed():
    learn = learner()
    with pytest.raises(TypeError, match='cbs holds 3'): learn.fit_sparse(1, .9, cbs=[Callback(), 3])
    assert not masked_params(learn.model)
    learn.fit_sparse(1, .9, cbs=[Callback, Callback()])

@pytest.mark.parametrize('method', ['gmp','acdc','granet','softmest'])
def test_gradual_methods_take_a_model_that_is_sparse(method):
    learn = learner()
    sparsify_model(learn, .9, seed=0)
    learn.fit_sparse(2, .9, method=method, seed=0)
    assert abs(sparsity_of(learn.model)-.9)<2e-3 and dead_are_zero(learn.model)

@pytest.mark.parametrize('kwargs,named', [(dict(budget=2.5),'budget'), (dict(budget='a'),'budget'), (dict(seeds=0),'seeds is 0'), (dict(seeds=1.5),'seeds'),
    (dict(sparsities=('a',)),'sparsity'), (dict(tolerance='a'),'tolerance'), (dict(tolerance=-1),'tolerance'), (dict(lr=-1),'lr'),
    (dict(foo=1),'foo'), (dict(method='nope'),'nope'), (dict(seed=3),'seed'), (dict(mask_init='nope'),'mask_init'), (dict(sparse_f='nope'),'nope'), (dict(cbs=3),'cbs')])
def test_a_search_is_refused_before_any_training(kwargs, named, monkeypatch):
    learn = learner()
    monkeypatch.setattr(Learner, 'fit', lambda *args, **kw: pytest.fail('it trained'))
    with pytest.raises((ValueError,TypeError), match=named): find_sparsity(learn, **kwargs)
    assert not masked_params(learn.model) and learn.opt is None

def test_sparse_lr_find_leaves_the_learner_as_it_was():
    learn = learner(partial(SGD, mom=.9))
    sparsify_model(learn, .95, seed=0)
    was = {k:v.clone() for k,v in learn.model.state_dict().items()}
    rate = learn.sparse_lr_find(show_plot=False)
    assert 1e-3<rate<1 and learn.opt is None
    assert all(torch.equal(v, was[k]) for k,v in learn.model.state_dict().items())

@pytest.mark.parametrize('kwargs', [dict(start_lr=0), dict(start_lr=1., end_lr=.1), dict(end_lr=float('inf')), dict(start_lr='a'), dict(end_lr=None), dict(start_lr=True)])
def test_rates_to_sweep_are_numbers_in_order(kwargs):
    with pytest.raises(ValueError, match='0 < start_lr < end_lr'): learner().sparse_lr_find(**kwargs)

def test_a_dead_network_is_refused_by_name():
    learn = learner()
    sparsify_model(learn.model, .99, sparse_init_mode=None, seed=0)
    with pytest.raises(ValueError, match='Sequential is dead'): learn.sparse_lr_find()

def test_find_sparsity_keeps_its_budget_and_leaves_the_learner():
    learn = learner()
    was = {k:v.clone() for k,v in learn.model.state_dict().items()}
    found = find_sparsity(learn, budget=6, sparsities=(.9,.99), seeds=1, tolerance=1., progress=False)
    assert found.suggested==.99 and list(found.table.index)==[0.,.9,.99]
    assert learn.opt is None and all(torch.equal(v, was[k]) for k,v in learn.model.state_dict().items())
    with pytest.raises(ValueError, match='budget.* is 2'): find_sparsity(learn, budget=2, sparsities=(.9,.99), seeds=1)
    with pytest.raises(ValueError, match='1.5'): find_sparsity(learn, sparsities=(1.5,))

# --- scaled rates

def scaled_fit(own, n=1):
    "One epoch of one batch at scaled rates beside the callback `own`"
    dls = DataLoaders.from_dsets([(torch.randn(8),0)]*8*n, [(torch.randn(8),0)]*8, bs=8, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Sequential(nn.Linear(8,8)), loss_func=nn.CrossEntropyLoss(), opt_func=Adam)
    sparsify_model(learn.model, .5, seed=0, sparse_init_mode=None)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[DynamicSparseTrainingCallback(method='static', scale_rates=True, seed=0), own])

@pytest.mark.parametrize('later', [-.1, .1])
def test_a_step_that_something_replaces_is_not_scaled(later):
    "What moved the weights instead of the step, such as stored values that change places, stays as it is"
    seen = {}
    class Moves(Callback):
        order = DynamicSparseTrainingCallback.order+later
        def before_step(self):
            p = self.learn.model[0].weight
            with torch.no_grad(): p.copy_(p.roll((4,4), (0,1))*self.learn.model[0].weight_mask)
            seen['moved'] = p.detach().clone()
            raise CancelStepException()
        def after_batch(self): seen['after'] = self.learn.model[0].weight.detach().clone()
    scaled_fit(Moves())
    assert torch.equal(seen['after'], seen['moved'])

def test_an_update_that_replaces_its_step_is_not_scaled():
    "RigL's rule: what was kept is as before, what was grown is zero"
    learn,seen = learner(),{}
    class Sees(Callback):
        order = DynamicSparseTrainingCallback.order+1
        def before_batch(self): self.was = self.model[0].weight.detach().clone(),self.model[0].weight_mask.clone()
        def after_batch(self):
            if self.train_iter==11: seen[11] = (*self.was, self.model[0].weight.detach().clone(), self.model[0].weight_mask.clone())
    learn.fit_sparse(2, .9, method='rigl', batches_per_update=10, seed=0, cbs=Sees())
    w,mask,after,moved = seen[11]
    kept = mask & moved
    assert not torch.equal(mask, moved) and torch.equal(after[kept], w[kept]) and not after[~kept].any()

rated = dict(fastai=partial(Adam, wd=.1), l2=partial(Adam, wd=.1, decouple_wd=False), rms=partial(RMSProp, mom=.9, wd=.1),
    qh=partial(QHAdam, wd=.1), ranger=partial(ranger, wd=.1),
    adamw=partial(OptimWrapper, opt=partial(torch.optim.AdamW, weight_decay=.1)), foreach=partial(OptimWrapper, opt=partial(torch.optim.Adam, foreach=True)),
    fused=partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True, weight_decay=.1)), nadam=partial(OptimWrapper, opt=torch.optim.NAdam))

class Groups(Callback):
    "Remembers what other callbacks see of the optimizer, and the batches"
    order = DynamicSparseTrainingCallback.order+1
    def __init__(self): self.seen,self.batches,self.rates = set(),[],{}
    def look(self): self.seen.add(tuple((tuple(map(id, ps)), h['lr']) for ps,h in zip(self.learn.opt.param_lists, self.learn.opt.hypers)))
    def before_batch(self): self.batches.append((self.learn.xb[0].clone(), self.learn.yb[0].clone()))
    def before_step(self):
        self.rates = {s.o.name:s.growth_state['rate'] for s in self.learn.dynamic_sparse_training.engine.all}
        self.look()
    def after_step(self): self.look()
    def after_batch(self):
        self.look()
        if len(self.batches)==4: raise CancelFitException()  # before Lookahead's first look back

@pytest.mark.parametrize('name,compute', [(n,c) for n in rated for c in (None, {'0.weight':'rows', '4.weight':'rows'}) if not (c and n=='ranger')])
def test_a_longer_step_is_the_same_step_stretched(name, compute):
    "Beside a loop that copies weights before each step and stretches what it did; two groups with rates of their own, which nobody sees changed"
    def made():
        set_seed(0)
        learn = learner(rated[name])
        learn.splitter = lambda m: [list(m[0].parameters()), list(m[2:].parameters())]
        sparsify_model(learn.model, .9, sparse_init_mode=None, seed=0)
        learn.create_opt()
        return learn
    learn,groups = made(),Groups()
    learn.fit(1, slice(1e-3,2e-3), cbs=[DynamicSparseTrainingCallback(method='static', scale_rates=True, repair=False, sparse_compute=compute, seed=0), groups])
    assert len(groups.rates)==3 and min(groups.rates.values())>1.5 and len(groups.seen)==1
    other = made()
    other.opt.set_hyper('lr', [1e-3,2e-3])
    params = dict(other.model.named_parameters())
    for xb,yb in groups.batches:
        was = {n:params[n].detach().clone() for n in groups.rates}
        other.opt.zero_grad()
        nn.functional.cross_entropy(other.model(xb), yb).backward()
        other.opt.step()
        for n,w in was.items(): params[n].data.copy_(w+(params[n].data-w)*groups.rates[n])
    for n,p in learn.model.named_parameters(): assert (p-params[n]).abs().max()<1e-5, n

def test_a_step_that_fails_leaves_the_groups():
    "An error, or an interrupt, in the middle of a step"
    for opt in (Adam, partial(OptimWrapper, opt=torch.optim.AdamW)):
        learn = learner(opt)
        sparsify_model(learn.model, .9, sparse_init_mode=None, seed=0)
        learn.create_opt()
        was = [(list(map(id, ps)), {**h, 'lr':0}) for ps,h in zip(learn.opt.param_lists, learn.opt.hypers)]
        cb = DynamicSparseTrainingCallback(method='static', scale_rates=True, seed=0)
        class Breaks(Callback):
            order = DynamicSparseTrainingCallback.order+1
            def before_step(self): list(self.learn.opt.param_lists[0])[2].grad.resize_(1)
        with pytest.raises(RuntimeError): learn.fit(1, cbs=[cb, Breaks()])
        assert [(list(map(id, ps)), {**h, 'lr':0}) for ps,h in zip(learn.opt.param_lists, learn.opt.hypers)]==was

def test_sparse_compute_trains_as_without_at_scaled_rates():
    "Adam, with updates: the same masks and, within rounding, the same weights"
    def trained(compute):
        set_seed(0)
        learn = learner()
        learn.fit_sparse(1, .9, 1e-3, seed=0, sparse_compute=compute)
        return [(o.p.detach().clone(), o.mask.clone()) for o in masked_params(learn.model)]
    for (a,m),(b,n) in zip(trained(None), trained({f'{i}.weight':'rows' for i in (0,2,4)})):
        assert torch.equal(m, n)
        assert torch.allclose(a, b, atol=1e-4)

@pytest.mark.parametrize('scale,expected', [(True,2.), (None,1.), (False,1.)])
def test_whose_rates_are_scaled_is_a_setting(scale, expected):
    "No repair, half of the weights: the first step of plain Adam has the size of the rate, or twice that"
    learn = learner(partial(Adam, wd=0.))
    sparsify_model(learn.model, .5, sparse_init_mode=None, seed=0)
    was = learn.model[2].weight.detach().clone()
    class One(Callback):
        def after_batch(self):
            self.moved = (self.model[2].weight.detach()-was).abs().max().item()
            raise CancelFitException()
    one = One()
    learn.fit(1, 1e-4, cbs=[DynamicSparseTrainingCallback(method='static', scale_rates=scale, repair=False, seed=0), one])
    assert abs(one.moved/1e-4/expected-1)<.05

def test_scale_rates_is_refused_by_value():
    with pytest.raises(ValueError, match="scale_rates is 3"): DynamicSparseTrainingCallback(scale_rates=3)

def test_a_learning_rate_finder_before_is_no_training():
    learn = learner()
    with learn.no_bar(): learn.lr_find(num_it=20, show_plot=False, suggest_funcs=())
    learn.fit_sparse(1, .9, seed=0)
    assert sparsity_of(learn.model)>.89

@pytest.mark.parametrize('opt', [Adam, partial(SGD, mom=.9), SGD])
def test_training_is_seen_whatever_the_optimizer(opt):
    learn = learner(opt)
    learn.fit(1, 1e-3)
    with pytest.raises(ValueError, match='look trained'): learn.fit_sparse(1, .9)

def test_a_short_fit_does_not_warn_of_an_interval_that_nobody_gave():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner().fit_sparse(1, .9, seed=0)

@pytest.mark.parametrize('scale,lr,expected', [(True,1e-4,10**.5), (True,.1,10**.5), (False,1e-4,1.)])
def test_rates_of_what_was_repaired_follow_its_weights(scale, lr, expected):
    "fastai's plain Adam: the first step of each weight has the size of the rate"
    learn = learner(partial(Adam, wd=0.))
    sparsify_model(learn, .9, seed=0)
    assert was_rescaled(learn.model)
    was = learn.model[2].weight.detach().clone()
    class One(Callback):
        def after_batch(self):
            self.moved = (self.model[2].weight.detach()-was).abs().max().item()
            raise CancelFitException()
    one = One()
    learn.fit(1, lr, cbs=[DynamicSparseTrainingCallback(method='static', repair=scale, seed=0), one])
    assert abs(one.moved/lr/expected-1)<.05

@pytest.mark.parametrize('lr,expected', [(1e-4,10.), (.3,10**.5)])
def test_rates_follow_the_highest_rate_of_the_cycle_and_not_the_learners(lr, expected):
    "A tenth of the weights, and a learner whose own rate lies between"
    learn,seen = learner(),[]
    class One(Callback):
        def before_batch(self):
            seen.extend(s.growth_state['rate'] for s in self.learn.dynamic_sparse_training.engine.all)
            raise CancelFitException()
    learn.fit_sparse(1, .9, lr, sparse_f=uniform_sparsity, seed=0, cbs=One())
    assert len(seen)==3 and all(abs(o/expected-1)<.01 for o in seen)

def test_rates_of_groups_follow_their_own_highest_rate():
    learn,seen = learner(),[]
    learn.splitter = lambda m: [list(m[0].parameters()), list(m[2:].parameters())]
    class One(Callback):
        def before_batch(self):
            seen.extend(s.growth_state['rate'] for s in self.learn.dynamic_sparse_training.engine.all)
            raise CancelFitException()
    learn.fit_sparse(1, .9, slice(1e-5,1.), sparse_f=uniform_sparsity, seed=0, cbs=One())
    assert abs(seen[0]/10-1)<.01 and all(abs(o/10**.5-1)<.01 for o in seen[1:])

@pytest.mark.parametrize('every', [5, 20, 80])
def test_an_interval_of_one_s_own_keeps_the_looks_of_a_run(every):
    "With updates more seldom, or more often, each looks at more or fewer dead weights: at all of them about once in the run"
    learn = learner()
    cb = learn.fit_sparse(1, .9, 1e-3, seed=0, batches_per_update=every)
    sample,n_steps = needs_of(cb.settings['grow_score_f']).sample,len(learn.dls.train)
    n_updates = max(math.ceil(.75*n_steps/max(every, 8)), 1)
    assert sample.times==pytest.approx(1/n_updates, rel=.5) and cb.settings['batches_per_update']==every

@pytest.mark.parametrize('second', [.9009,.8991])
def test_a_second_fit_reaches_its_own_sparsity(second):
    "However near it is to the first one's"
    learn = learner()
    learn.fit_sparse(1, .9, seed=1)
    learn.fit_sparse(2, second, seed=1)
    n = 64*256+256*256+256*10
    assert sum(int(o.mask.sum()) for o in masked_params(learn.model))==round((1-second)*n)

def test_a_fit_whose_masks_rest_refuses_another_sparsity():
    "Static training can't reach it, so nothing is trained"
    learn = learner()
    learn.fit_sparse(1, .9, seed=1)
    before = {k:v.clone() for k,v in learn.model.state_dict().items()}
    with pytest.raises(ValueError, match='0.9 sparse, and rest by this method'): learn.fit_sparse(1, .95, method='static', seed=1)
    assert all(v.equal(before[k]) for k,v in learn.model.state_dict().items())
    learn.fit_sparse(1, .9, method='static', seed=1)

def test_rates_of_masks_that_rest_are_saved():
    "`scale_rates` also holds for layers outside of `sparse_modules`, and a resumed engine knows their rates"
    class Stop(Callback):
        def after_epoch(self):
            if self.epoch==0:
                self.saved = [cb.state_dict() for cb in self.learn.cbs if isinstance(cb, DynamicSparseTrainingCallback)]
                raise CancelFitException
    learn,stop = learner(),Stop()
    sparsify_model(learn.model, .9, seed=1)
    def callback(): return DynamicSparseTrainingCallback(method='rigl', scale_rates=True, sparse_modules=[learn.model[0]], sparse_compute=False, seed=2)
    learn.fit(2, 1e-3, cbs=[callback(), stop])
    class Look(Callback):
        def before_batch(self): self.rates = [o.handler.rate for cb in self.learn.cbs if isinstance(cb, DynamicSparseTrainingCallback) for o in cb.engine.all]
    first,again,look = callback(),callback(),Look()
    again.load_state_dict(stop.saved[0])
    learn.fit(2, 1e-3, start_epoch=1, cbs=[again, look])
    resumed = look.rates
    learn.fit(1, 1e-3, cbs=[first, look])
    assert resumed==look.rates and all(r!=1 for r in resumed)

def layers(model): return [m.sum().item() for _,m,_ in sparse_params(model)]

@pytest.mark.parametrize('method', [None, 'static', 'rigl', 'gmp'])
def test_one_line_a_loop_and_a_callback_share_sparsity_out_alike(method):
    "Whoever names no distribution gets the same one everywhere: the method's own, Erdős–Rényi-Kernel where it has none"
    learn,other = learner(),learner()
    learn.fit_sparse(1, .9, method=method, seed=0)
    settings = {} if method is None else dict(method=method)
    other.fit_one_cycle(1, cbs=DynamicSparseTrainingCallback(sparsity=.9, seed=0, **settings))
    model = digits_mlp()
    if method!='gmp': DynamicSparseTraining(model, torch.optim.Adam(model.parameters()), 100, sparsity=.9, **settings)
    expected = digits_mlp()
    sparsify_model(expected, .9, 'uniform' if method=='gmp' else usual_sparsity)
    assert layers(learn.model)==layers(other.model)==layers(expected if method=='gmp' else model)==layers(expected)

@pytest.mark.parametrize('method', ['gmp', 'granet', 'acdc'])
def test_a_distribution_reaches_methods_that_start_dense(method):
    "`sparse_f` was not heard where the method leads to the sparsity"
    learn = learner()
    learn.fit_sparse(1, .9, method=method, sparse_f='uniform', seed=0)
    model = digits_mlp()
    sparsify_model(model, .9, 'uniform')
    assert layers(learn.model)==layers(model)

@pytest.mark.parametrize('cbs,told', [(lambda: EarlyStoppingCallback(patience=1, min_delta=9.), 'training ended after'), (lambda: SaveModelCallback(monitor='train_loss', comp=np.greater), 'WaitForSparsity'),
    (lambda: SaveModelCallback(monitor='train_loss'), None)])
def test_a_fit_that_ends_before_its_sparsity_says_so(cbs, told, tmp_path):
    "Stopped early, or put back to a model that was better before it was as sparse"
    learn = learner()
    learn.path = tmp_path
    with learn.no_bar(), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        learn.fit_sparse(6, .9, 1e-2, method='gmp', batches_per_update=2, cbs=cbs())
    s = 1-sum(int(o.mask.sum()) for o in masked_params(learn.model))/sum(o.mask.numel() for o in masked_params(learn.model))
    assert (s<.89)==(told is not None)
    found = [str(o.message) for o in w if 'sparse instead of 0.900' in str(o.message)]
    assert len(found)==(told is not None) and all(told in o and f'{s:.3f}' in o for o in found)
