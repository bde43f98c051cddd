"One line that trains a sparse network, and the learning rates that its sparse layers take"
import math,pytest,torch,warnings
import numpy as np
from fastai.basics import Adam,Callback,CancelFitException,CancelStepException,CrossEntropyLossFlat,DataLoaders,Learner,SGD,accuracy,nn,set_seed
from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
from fastai.optimizer import OptimWrapper,QHAdam,RMSProp,ranger
from fastsparse.all import *
from fastsparse.train.method import auto_presets
from fastsparse.core.optimizers import is_adaptive
from fastsparse.core.registry import needs_of
from fastsparse.demo import digits_dls,digits_mlp
from fastsparse.deploy.search import find_sparsity
from fastsparse.masks.distributions import usual_sparsity
from contextlib import suppress
from copy import deepcopy
from functools import cache,partial
from helpers import agree,assert_dead,live,masked_params,masks_of,same_masks,snapshot,warned

DST,momentum = DynamicSparseTrainingCallback,partial(SGD, mom=.9)
N = 64*256+256*256+256*10

def learner(opt=Adam, model=None, split=False):
    learn = Learner(digits_dls(), model or digits_mlp(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=opt)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = lambda *args: None
    if split: learn.splitter = lambda m: [list(m[0].parameters()), list(m[2:].parameters())]
    return learn

def sparse(s=.9, repair=False, **kwargs):
    learn = learner(**kwargs)
    sparsify_model(learn.model, s, 'uniform', seed=0, **({} if repair else dict(sparse_init_mode=None)))
    return learn

def assert_sparse(learn, s, eps=1e-3):
    assert abs(1-sum(live(learn.model))/N-s)<eps
    assert_dead(learn.model)

# --- where it ends

@pytest.mark.parametrize('n_steps', [1, 10, 100, 440, 3000, 100_000])
def test_a_run_looks_at_each_dead_weight_about_once(n_steps):
    "At most a tenth of all steps brings an update, and all updates together read no more gradients of dead weights than one dense gradient has"
    o = auto_presets(n_steps)
    n_updates = len([t for t in range(o['batches_per_update'], n_steps, o['batches_per_update']) if t<.75*n_steps])
    looks = n_updates*needs_of(o['grow_score_f']).sample.size(1000, 100, 0)
    assert n_updates<=n_steps/10 and not o['replace_step'] and looks<=901 and (n_steps<400 or looks>=.9*900)

@pytest.mark.parametrize('every', [5, 20, 80])
def test_an_interval_of_one_s_own_keeps_the_looks_of_a_run(every):
    "With updates more seldom, or more often, each looks at more or fewer dead weights: at all of them about once in the run"
    learn = learner()
    cb = learn.fit_sparse(1, .9, 1e-3, seed=0, batches_per_update=every)
    n_updates = max(math.ceil(.75*len(learn.dls.train)/max(every, 8)), 1)
    assert needs_of(cb.method.grow_score_f).sample.times==pytest.approx(1/n_updates, rel=.5) and cb.method.batches_per_update==every

@pytest.mark.parametrize('opt,lr', [(momentum, .1), (Adam, 1e-3), (Adam, 1e-2)])
def test_fit_sparse_learns_at_one_weight_in_a_hundred(opt, lr):
    learn = learner(opt)
    learn.fit_sparse(10, .99, lr, seed=0)
    assert learn.validate()[1]>.85
    assert_sparse(learn, .99)

@pytest.mark.parametrize('opt,lr,fit', [(momentum, .1, 'fit'), (Adam, 1e-3, 'fit_one_cycle')])
def test_two_lines_learn_at_one_weight_in_a_hundred(opt, lr, fit):
    learn = sparse(.99, opt=opt, repair=True)
    assert not [o for o in warned(getattr(learn, fit), 16, lr, cbs=DST(keep_score_f='fisher_saliency', seed=0)) if 'signal' in o]
    assert learn.validate()[1]>.85
    assert_sparse(learn, .99)

@pytest.mark.parametrize('method', ['rigl', 'set', 'static', 'gmp', 'granet', 'mest', 'softmest', 'acdc', 'auto', None])
def test_every_method_ends_at_the_sparsity_that_was_asked_for(method):
    "From a dense model, and gradual ones from a sparse one; the layers' shares are `sparse_f`'s where it says so"
    learn,shares = learner(),digits_mlp()
    learn.fit_sparse(1, .9, method=method, sparse_f='uniform', seed=0)
    assert_sparse(learn, .9, 2e-3)
    sparsify_model(shares, .9, 'uniform')
    if method in ('static','gmp','granet','acdc'): assert live(learn.model)==live(shares)
    if method in ('gmp','granet','acdc','softmest'):
        learn = sparse(repair=True)
        learn.fit_sparse(1, .9, method=method, seed=0)
        assert_sparse(learn, .9, 2e-3)

@pytest.mark.parametrize('method', [None, 'static', 'rigl', 'gmp'])
def test_one_line_a_loop_and_a_callback_share_sparsity_out_alike(method):
    "The method's own distribution, Erdős–Rényi-Kernel where it has none"
    learn,other,model,expected = learner(),learner(),digits_mlp(),digits_mlp()
    learn.fit_sparse(1, .9, method=method, seed=0)
    settings = {} if method is None else dict(method=method)
    other.fit_one_cycle(1, cbs=DST(sparsity=.9, seed=0, **settings))
    sparsify_model(expected, .9, 'uniform' if method=='gmp' else usual_sparsity)
    if method!='gmp': DynamicSparseTraining(model, torch.optim.Adam(model.parameters()), 100, sparsity=.9, **settings)
    assert live(learn.model)==live(other.model)==live(expected) and (method=='gmp' or live(model)==live(expected))

@pytest.mark.parametrize('name', ['Adafactor','Adagrad','Adadelta','ASGD','Rprop','RMSprop','NAdam'])
def test_optimizers_without_momentum(name):
    "fastai's own cycle fails with those that have none (KeyError: mom); here they follow the rates, all of them those of the cycle, and `find_sparsity` too"
    opt = partial(OptimWrapper, opt=getattr(torch.optim, name))
    learn = learner(opt)
    learn.fit_sparse(1, .8, 1e-3, seed=0)
    assert_sparse(learn, .8, 2e-3)
    rates = learn.recorder.hps['lr']
    assert max(rates)==pytest.approx(1e-3, rel=1e-2) and rates[0]==pytest.approx(1e-3/25) and rates[-1]<1e-5
    assert ('mom' in learn.recorder.hps)==(name in ('RMSprop','NAdam'))
    if name=='Adafactor': assert find_sparsity(learner(opt), budget=2, sparsities=(.8,), seeds=1, progress=False).suggested in (0.,.8)

@pytest.mark.parametrize('second', [.9,.9009,.8991,.95])
def test_a_second_fit_reaches_its_own_sparsity(second):
    "However near it is to the first one's; what a static method does not reach it refuses, and trains nothing"
    learn = learner()
    learn.fit_sparse(1, .9, method='static', seed=1)
    before = snapshot(learn.model)
    if second==.9: learn.fit_sparse(1, second, method='static', seed=1)
    else:
        with pytest.raises(ValueError, match='0.9 sparse, and this method doesn.t move them'): learn.fit_sparse(1, second, method='static', seed=1)
        assert agree(before, snapshot(learn.model))
        learn.fit_sparse(1, second, seed=1)
    assert sum(live(learn.model))==round((1-second)*N)
    if second==.9:
        assert all(torch.equal(before[f'{o.name}_mask'], o.mask) for o in masked_params(learn.model))
        learn.fit_sparse(1, .9, sparse_f=uniform_sparsity, seed=0)  # whose shares are others, though the model is as sparse
        for o in masked_params(learn.model): assert abs(int(o.mask.sum())-.1*o.mask.numel())<=1

# --- what it takes

def test_a_fit_takes_what_a_cycle_takes():
    "Rates and momentums of the cycle, weight decay, the optimizer and the epoch it starts in, as `fit_one_cycle` does"
    cycle,seen = dict(div=10., div_final=100., pct_start=.4, wd=.3, moms=(.8,.7,.6), reset_opt=True, start_epoch=1),[]
    for fit in (lambda o: o.fit_one_cycle(3, 1e-3, **cycle), lambda o: o.fit_sparse(3, .9, 1e-3, seed=0, **cycle)):
        learn = learner()
        learn.create_opt()
        before = learn.opt
        fit(learn)
        assert learn.opt is not before and learn.opt.hypers[0]['wd']==.3
        seen.append({k:learn.recorder.hps[k] for k in ('lr','mom')})
    assert seen[0]==seen[1] and max(seen[1]['lr'])==pytest.approx(1e-3, rel=1e-2) and len(seen[1]['lr'])==2*len(learn.dls.train)

@pytest.mark.parametrize('method', [None, 'gmp', 'granet'])
@pytest.mark.parametrize('which,names', [(dict(chosen='2'), ['2.weight']), (dict(exclude=['0','4.weight']), ['2.weight']), (dict(exclude=nn.Linear, chosen=lambda n,p: n=='0.weight'), None),
    (dict(also='*_raw', exclude='fc'), ['a_raw'])])
def test_a_fit_takes_what_sparsify_model_takes(method, which, names):
    "Layers to include and to leave dense, also where the method starts dense; what leaves nothing is refused before anything changed"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_raw,self.fc = nn.Parameter(torch.randn(64, 64)/8),nn.Linear(64, 10)
        def forward(self, x): return self.fc((x.flatten(1)@self.a_raw).relu())
    learn = learner(model=Net() if 'also' in which else None)
    if names is None:
        with pytest.raises(ValueError, match='leaves nothing to make sparse'): learn.fit_sparse(1, .9, method=method, **which)
        assert not masked_params(learn.model)
        return
    learn.fit_sparse(1, .9, method=method, seed=0, **which)
    os = masked_params(learn.model)
    assert [o.name for o in os]==names and abs(float(os[0].mask.float().mean())-.1)<2e-3
    with pytest.raises(ValueError, match='sparse already, and chosen chooses'): learn.fit_sparse(1, .9, method=method, chosen=names[0])

@pytest.mark.parametrize('by', ['fit','callback','loop','sparsify'])
@pytest.mark.parametrize('structure', ['2:4','1:4','block 4x4'])
def test_a_structure_brings_its_distribution(structure, by):
    "Each layer at the structure's own sparsity, whoever makes the model sparse; blocks have none, and a fit shares them out as single weights"
    learn,s = learner(),.75 if structure=='1:4' else .5
    learn.model = nn.Sequential(*learn.model[:4], nn.Linear(256, 12))
    learn.loss_func = lambda out, y: nn.functional.cross_entropy(out, y)
    if by=='fit': learn.fit_sparse(1, s, structure=structure, seed=0)
    elif by=='callback': learn.fit(1, cbs=DST(sparsity=s, structure=structure, method='rigl', seed=0))
    elif by=='loop': DynamicSparseTraining(learn.model, torch.optim.Adam(learn.model.parameters()), 40, sparsity=s, structure=structure)
    else: sparsify_model(learn.model, s, structure=structure, seed=0)
    sparsities = [1-float(o.mask.float().mean()) for o in masked_params(learn.model)]
    if structure=='block 4x4' and by!='sparsify': assert sparsities[2]<sparsities[1]-.1
    else: assert sparsities==[s]*3

def test_rules_give_each_layer_its_sparsity():
    "As a dict or as pairs, by a fit as by `sparsify_model`; layers without a rule stay dense"
    for rules in ({'0':.9, '2.weight':.8, '4':None}, [('0.weight',.9), ('2',.8)]):
        learn,m = learner(),digits_mlp()
        learn.fit_sparse(1, rules, seed=0)
        sparsify_model(m, rules, seed=0)
        assert live(learn.model)==live(m)==[1639,13107]  # 1638.4 and 13107.2, whose sum is 14746 to the nearest
        for more in (dict(method='gmp'), {}):
            with pytest.raises(ValueError, match='rules.*pass a number'): (learner() if more else learn).fit_sparse(1, rules, **more)

def test_a_search_takes_what_a_fit_takes():
    "Weight decay and the rest of the cycle, and layers to leave dense; what a fit refuses it refuses before any training"
    learn = learner()
    find_sparsity(learn, budget=2, sparsities=(.8,), seeds=1, progress=False, lr_max=1e-3, wd=.2, pct_start=.5, exclude='4')
    with pytest.raises(ValueError, match='div is 0'): find_sparsity(learn, budget=2, sparsities=(.8,), seeds=1, div=0)

@pytest.mark.parametrize('kwargs,what', [(dict(div=0), 'div is 0'), (dict(div_final=-1), 'div_final is -1'), (dict(pct_start=1.), 'pct_start is 1.0'), (dict(wd=-1.), 'wd is -1.0'),
    (dict(moms=(.9,.8)), 'must be three momentums'), (dict(start_epoch=2), 'start_epoch is 2.*from 0 to 1'),
    (dict(lr_max='rigl'), "method='rigl'"), (dict(structure='2:4'), 'has a sparsity of 0.5'), (dict(structure='2:4 axis 0'), "exclude='4.weight'"), (dict(also='nothing'), 'also is')])
@pytest.mark.parametrize('fit', ['fit_sparse','fine_tune_sparse'])
def test_a_wrong_argument_is_refused_before_anything_changed(fit, kwargs, what):
    learn = learner()
    was = snapshot(learn.model)
    if fit=='fine_tune_sparse' and {'lr_max','reset_opt','start_epoch'} & set(kwargs): return
    with pytest.raises((ValueError,TypeError), match=what): getattr(learn, fit)(2, .9, **kwargs)
    assert agree(was, snapshot(learn.model)) and learn.opt is None and not masked_params(learn.model)

@cache
def trained():
    (learn := learner()).fit_one_cycle(3, 1e-3)
    for p in learn.model.parameters(): p.grad = None  # fastai's steps move what is frozen where there is one
    return learn.model

def pretrained(**kwargs):
    "A learner with a trained model whose layers are two groups, and the weights that it begins with"
    learn = learner(model=deepcopy(trained()), **kwargs)
    learn.splitter = lambda m: [list(m[:-1].parameters()), list(m[-1].parameters())]
    set_seed(0)
    return learn,[learn.model[i].weight.detach().clone() for i in (0,2,4)]

@pytest.mark.parametrize('method', [None,'rigl','gmp'])
def test_fine_tuning_goes_as_fastai_s(method):
    "The head first, while the body rests; then all, sparse from the first step unless the method starts dense"
    (learn,(was,*_)),seen = pretrained(),[]
    class Look(Callback):
        def after_epoch(self): seen.append((self.opt.frozen_idx, bool(masked_params(self.model)), self.model[0].weight.detach().clone()))
    cb = learn.fine_tune_sparse(3, .9, 2e-3, freeze_epochs=2, method=method, seed=0, cbs=Look())
    assert [o[0] for o in seen]==[1,1,0,0,0] and [o[1] for o in seen]==[False]*2+[True]*3 and all(torch.equal(o[2], was) for o in seen[:2])
    assert_sparse(learn, .9)
    assert (method=='gmp' or learn.validate()[1]>.85) and (cb.method.sparsity_path is None)==(method!='gmp')

@pytest.mark.parametrize('lr_mult', [1,10])
def test_all_layers_are_fine_tuned_at_twice_the_rate_of_the_head(lr_mult):
    "The body's peak is that over `lr_mult`; the rest of the schedule is that of `fine_tune`"
    (learn,_),highest = pretrained(),[]
    class Peak(Callback):
        def after_batch(self):
            if self.training: highest.append([h['lr'] for h in self.opt.hypers])
    learn.fine_tune_sparse(2, .9, 1e-3, lr_mult=lr_mult, seed=0, cbs=Peak())
    n = len(learn.dls.train)
    assert max(o[1] for o in highest[:n])==pytest.approx(1e-3, rel=.02)
    assert [max(o[i] for o in highest[n:]) for i in (0,1)]==pytest.approx([2e-3/lr_mult, 2e-3], rel=.02)
    other,fitted = learner(split=True),[]
    other.fit_one_cycle = lambda n, lr, **kwargs: fitted.append((n, lr, {k:kwargs.get(k) for k in ('pct_start','div','wd')}))
    other.fine_tune_sparse(3, .9, 4e-3, lr_mult=lr_mult, wd=.1)
    assert fitted==[(1, slice(4e-3), dict(pct_start=.99, div=25., wd=.1)), (3, slice(8e-3/lr_mult,8e-3), dict(pct_start=.3, div=5., wd=.1))]

def test_the_largest_pretrained_weights_stay():
    "At the first step each mask has the largest weights that the frozen part left, with their values"
    (learn,was),seen = pretrained(),[]
    class First(Callback):
        order = 100
        def before_batch(self):
            if masked_params(self.model) and not seen: seen.extend((o.p.detach().clone(), o.mask.clone()) for o in masked_params(self.model))
    learn.fine_tune_sparse(1, .8, seed=0, cbs=First())
    for (p,mask),w in zip(seen[:2], was): assert torch.equal(p, w*mask) and w[mask].abs().min()>=w[~mask].abs().max()
    assert sum(int(mask.sum()) for _,mask in seen)==round(.2*N)

def test_a_fine_tuned_sparse_network_is_about_as_good_as_a_dense_one():
    "Digits 5 to 9 by a network that knows 0 to 4: within five points of `fine_tune`, and better than guessing by far"
    def half(low):
        dls = digits_dls()
        for dl in (dls.train, dls.valid):
            keep = (dl.dataset.y//5==int(not low)).nonzero()[:,0]
            dl.dataset.x,dl.dataset.y = dl.dataset.x[keep],dl.dataset.y[keep]%5
        return DataLoaders.from_dsets(dls.train.dataset, dls.valid.dataset, bs=64, num_workers=0, device='cpu')
    found = []
    for fit in ('fine_tune','fine_tune_sparse'):
        (trained := learner()).dls = half(True)
        trained.fit_one_cycle(3, 3e-3)
        for p in trained.model.parameters(): p.grad = None
        (learn := learner(model=trained.model, split=True)).dls = half(False)
        learn.freeze()
        getattr(learn, fit)(4, *[.8][:fit!='fine_tune'], 2e-3)
        found.append(learn.validate()[1])
    assert found[1]>max(.7, found[0]-.05), found

def test_a_sparse_network_stays_so_while_it_is_frozen():
    "Masks and zeros rest through the frozen epochs, and drop and grow after them; its own sparsity stays"
    learn,seen = learner(split=True),[]
    learn.fit_one_cycle(3, 1e-3)
    prune_magnitude(learn.model, .9)
    before = masks_of(learn.model)
    class Look(Callback):
        def after_epoch(self):
            assert_dead(self.model)
            seen.append((self.opt.frozen_idx, same_masks(before, masks_of(self.model))))
    learn.fine_tune_sparse(2, .9, seed=0, cbs=Look())
    assert seen==[(1,True),(0,False),(0,False)]
    assert_sparse(learn, .9)

def test_a_rate_for_a_dense_model_needs_its_sparsity():
    "`sparse_lr_find` of a dense model takes one, and looks at a copy; without one it would answer for another network"
    learn = learner()
    was = snapshot(learn.model)
    with pytest.raises(ValueError, match='the model is dense.*pass sparsity=0.9'): learn.sparse_lr_find(show_plot=False)
    assert 1e-4<learn.sparse_lr_find(show_plot=False, sparsity=.95, sparse_f='uniform')<1
    assert agree(was, snapshot(learn.model)) and learn.opt is None and not masked_params(learn.model)
    sparsify_model(learn, .9)
    with pytest.raises(ValueError, match='the model has masks: leave sparsity out'): learn.sparse_lr_find(show_plot=False, sparsity=.9)

@pytest.mark.parametrize('method', [None, 'gmp'])
def test_frozen_layers_stay(method):
    "Law 9: with their budget; so the model can't get as sparse as was asked, which is said before the fit"
    learn = sparse(split=True)
    learn.freeze()
    was,n = learn.model[0].weight.detach().clone(),live(learn.model)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*frozen')
        learn.fit_sparse(1, .9, seed=0)
    with pytest.warns(UserWarning, match='0.weight is frozen') as said: learn.fit_sparse(1, .95, method=method, seed=0)
    assert live(learn.model)[0]==n and torch.equal(learn.model[0].weight, was)
    assert any(f'ends {1-sum(live(learn.model))/N:.3f} sparse' in str(w.message) for w in said)

def said_of_frozen(f, *args, **kwargs): return [o for o in warned(f, *args, **kwargs) if any(k in o for k in ('frozen','no update','training ended'))]

@pytest.mark.parametrize('way', ['fit_sparse','callback','loop'])
def test_a_body_is_never_cut_while_it_is_frozen_without_a_word(way):
    "With the number of frozen layers, and two ways out; nothing is said after `unfreeze`"
    for frozen in (True, False):
        learn,_ = pretrained()
        learn.freeze() if frozen else learn.unfreeze()
        if way!='fit_sparse': sparsify_model(learn, .9, mask_init='magnitude')
        run = dict(fit_sparse=partial(learn.fit_sparse, 1, .9, mask_init='magnitude'), callback=lambda: learn.fit(1, cbs=DST(batches_per_update=4)),
            loop=lambda: DynamicSparseTraining(learn.model, torch.optim.SGD(learn.model.parameters(), .1), 22))[way]
        said = said_of_frozen(run)
        assert len(said)==frozen
        if frozen: assert '0.weight is frozen (2 of 3 sparse layers are)' in said[0] and 'unfreeze()' in said[0] and 'fine_tune_sparse()' in said[0]

def test_one_frozen_layer_of_three_needs_no_word():
    learn,_ = pretrained()
    learn.model[0].requires_grad_(False)
    assert not said_of_frozen(learn.fit_sparse, 1, .9, mask_init='magnitude', seed=0)

@pytest.mark.parametrize('way', ['fine_tune_sparse','sparse','gmp'])
def test_the_frozen_part_of_fine_tuning_is_no_fault(way):
    "Nor is a callback in fastai's own `fine_tune`, whose frozen part has no update that moves the body"
    learn,_ = pretrained()
    learn.freeze()
    if way=='sparse': sparsify_model(learn, .9, mask_init='magnitude')
    own = dict(method='gmp', sparsity=.9) if way=='gmp' else dict(batches_per_update=21)
    run = partial(learn.fine_tune_sparse, 1, .9) if way=='fine_tune_sparse' else lambda: learn.fine_tune(2, cbs=DST(**own, seed=0))
    assert not said_of_frozen(run)
    assert_sparse(learn, .9)

def test_a_stopped_fine_tuning_goes_on_from_its_file(tmp_path):
    "The frozen part is run again, the sparse part from the epoch that was saved, and the model is the same to the bit"
    def tuned(*cbs):
        learn,_ = pretrained()
        try: learn.fine_tune_sparse(2, .9, seed=0, cbs=cbs)
        except KeyboardInterrupt: pass
        return masks_of(learn.model),[o.p.detach().clone() for o in masked_params(learn.model)]
    class Stop(Callback):
        def before_epoch(self):
            if self.n_epoch==2 and self.epoch==1: raise KeyboardInterrupt
    whole = tuned()
    tuned(SparseCheckpoint(tmp_path/'run'), Stop())
    masks,ps = tuned(SparseCheckpoint(tmp_path/'run', resume=True))
    assert same_masks(whole[0], masks) and all(map(torch.equal, whole[1], ps))

def test_ctrl_c_leaves_a_lawful_sparse_model():
    class Stop(Callback):
        def after_step(self):
            if self.train_iter==10: raise KeyboardInterrupt
    learn = learner()
    with pytest.raises(KeyboardInterrupt): learn.fit_sparse(2, .9, seed=0, cbs=Stop())
    assert_sparse(learn, .9)
    learn.fit_sparse(1, .9, seed=0, cbs=[Callback, Callback()])

class Stops(Callback):
    def __init__(self, error): self.error = error
    def after_batch(self):
        if self.training and self.train_iter==3: raise self.error('stop')

@pytest.mark.parametrize('error', [KeyboardInterrupt, CancelFitException, ValueError])
def test_an_interrupted_fit_tells_a_short_schedule(error):
    "Once, whatever ends it; a fit that is refused before its first batch says nothing of that"
    def stopped(cb, n=4):
        learn = learner()
        with suppress(error): learn.fit_sparse(n, .9, 1e-2, method='gmp', batches_per_update=2, cbs=cb)
    said = [o for o in warned(stopped, Stops(error)) if 'sparse instead of 0.900' in o]
    assert len(said)==1 and said[0].startswith('training ended after 3 of ')
    class Refuses(Callback):
        order = 99
        def before_fit(self): raise error('no')
    if error is ValueError: assert not [o for o in warned(stopped, Refuses()) if 'instead of' in o]

@pytest.mark.parametrize('cbs,told', [(lambda: EarlyStoppingCallback(patience=1, min_delta=9.), 'training ended after'),
    (lambda: SaveModelCallback(monitor='train_loss', comp=np.greater), 'WaitForSparsity'), (lambda: SaveModelCallback(monitor='train_loss'), None)])
def test_a_fit_that_ends_before_its_sparsity_says_so(cbs, told, tmp_path):
    "Stopped early, or put back to a model that was better before it was as sparse"
    learn = learner()
    learn.path = tmp_path
    said = [o for o in warned(learn.fit_sparse, 4, .9, 1e-2, method='gmp', batches_per_update=2, cbs=cbs()) if 'sparse instead of 0.900' in o]
    s = 1-sum(live(learn.model))/N
    assert (s<.89)==(told is not None) and len(said)==(told is not None) and all(told in o and f'{s:.3f}' in o for o in said)

def test_what_is_found_leaves_the_learner():
    "`sparse_lr_find` and `find_sparsity`, which keeps its budget; fastai's finder before is no training; a short fit doesn't warn of an interval that nobody gave"
    learn = learner(momentum)
    sparsify_model(learn, .95, seed=0)
    was = snapshot(learn.model)
    assert 1e-3<learn.sparse_lr_find(show_plot=False)<1 and learn.opt is None and agree(was, snapshot(learn.model))
    learn = learner()
    was = snapshot(learn.model)
    found = find_sparsity(learn, budget=3, sparsities=(.9,.99), seeds=1, tolerance=1., progress=False)
    assert found.suggested==.99 and list(found.table.index)==[0.,.9,.99] and learn.opt is None and agree(was, snapshot(learn.model))
    learn.lr_find(num_it=20, show_plot=False, suggest_funcs=())
    assert not warned(learn.fit_sparse, 1, .9, seed=0)
    assert_sparse(learn, .9)

# --- scaled rates: a longer step

class First(Callback):
    "How far each layer's weights moved in the first step, in learning rates, and no further"
    def before_batch(self): self.was = {n:p.detach().clone() for n,p in self.model.named_parameters()}
    def after_batch(self):
        self.moved = [(p.detach()-self.was[n]).abs().max().item() for n,p in self.model.named_parameters() if 'weight' in n]
        raise CancelFitException()

adam = partial(Adam, wd=0.)  # whose first step is as long as the rate

@pytest.mark.parametrize('settings,lr,expected', [(dict(scale_rates=True, repair=False), 1e-4, 10.), (dict(scale_rates=True, repair=False), .1, 10**.5),
    (dict(repair=False), 1e-4, 1.), (dict(scale_rates=False), 1e-4, 1.), (dict(), 1e-4, 10**.5), (dict(), .1, 10**.5)])
def test_whose_rates_are_scaled(settings, lr, expected):
    "What was asked for, by the rate itself; or what was repaired, as its weights were: a tenth of the weights"
    learn = learner(adam)
    sparsify_model(learn.model, .9, 'uniform', seed=0, **(dict(sparse_init_mode=None) if 'repair' in settings else {}))
    learn.fit(1, lr, cbs=[DST(method='static', seed=0, **settings), first := First()])
    assert first.moved[1]/lr==pytest.approx(expected, rel=.05)

@pytest.mark.parametrize('lr,expected', [(1e-4,[10.]*3), (.3,[10**.5]*3), (slice(1e-5,1.),[10.,10**.5,10**.5])])
def test_rates_follow_the_highest_rate_of_the_cycle(lr, expected):
    "Each group's own, and not the learner's, which lies between"
    learn = learner(adam, split=isinstance(lr, slice))
    learn.fit_sparse(1, .9, lr, sparse_f=uniform_sparsity, seed=0, cbs=(first := First()))
    lrs = [lr.start/25,lr.stop/25,lr.stop/25] if isinstance(lr, slice) else [lr/25]*3
    assert [m/r for m,r in zip(first.moved, lrs)]==pytest.approx(expected, rel=.05)

def test_sgd_takes_no_longer_steps():
    for opt,expected in ((SGD,False), (momentum,False), (Adam,True)):
        learn = learner(opt)
        learn.create_opt()
        assert is_adaptive(learn.opt)==expected
    assert is_adaptive(torch.optim.AdamW(digits_mlp().parameters())) and not is_adaptive(torch.optim.SGD(digits_mlp().parameters(), .1))

@pytest.mark.parametrize('later', [-.1, .1])
def test_a_step_that_something_replaces_is_not_scaled(later):
    "What moved the weights instead of the step, such as stored values that change places, stays as it is"
    seen = {}
    class Moves(Callback):
        order = DST.order+later
        def before_step(self):
            o = self.learn.model[0]
            with torch.no_grad(): o.weight.copy_(o.weight.roll((4,4), (0,1))*o.weight_mask)
            seen['moved'] = o.weight.detach().clone()
            raise CancelStepException()
        def after_batch(self): seen['after'] = self.learn.model[0].weight.detach().clone()
    dls = DataLoaders.from_dsets([(torch.randn(8),0)]*8, [(torch.randn(8),0)]*8, bs=8, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Sequential(nn.Linear(8,8)), loss_func=nn.CrossEntropyLoss(), opt_func=Adam)
    sparsify_model(learn.model, .5, seed=0, sparse_init_mode=None)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[DST(method='static', scale_rates=True, seed=0), Moves()])
    assert torch.equal(seen['after'], seen['moved'])

def test_an_update_that_replaces_its_step_is_not_scaled():
    "RigL's rule: what was kept is as before, what was grown is zero"
    seen = []
    class Sees(Callback):
        order = DST.order+1
        def before_batch(self): self.was = self.look()
        def look(self): return self.model[0].weight.detach().clone(),self.model[0].weight_mask.clone()
        def after_batch(self):
            if self.train_iter==11: seen.extend([*self.was, *self.look()])
    learner().fit_sparse(1, .9, method='rigl', batches_per_update=10, seed=0, cbs=Sees())
    w,mask,after,moved = seen
    kept = mask & moved
    assert not torch.equal(mask, moved) and torch.equal(after[kept], w[kept]) and not after[~kept].any()

def wrap(opt, **kwargs): return partial(OptimWrapper, opt=partial(getattr(torch.optim, opt), **kwargs))
rated = dict(fastai=partial(Adam, wd=.1), l2=partial(Adam, wd=.1, decouple_wd=False), rms=partial(RMSProp, mom=.9, wd=.1), qh=partial(QHAdam, wd=.1),
    ranger=partial(ranger, wd=.1), adamw=wrap('AdamW', weight_decay=.1), foreach=wrap('Adam', foreach=True), fused=wrap('AdamW', fused=True, weight_decay=.1), nadam=wrap('NAdam'))

class Steps(Callback):
    "Batches, weights after each, and what other callbacks see of the optimizer"
    order = DST.order+1
    def __init__(self): self.seen,self.batches,self.weights = set(),[],[]
    def look(self): self.seen.add(tuple((tuple(map(id, ps)), h['lr']) for ps,h in zip(self.learn.opt.param_lists, self.learn.opt.hypers)))
    def before_batch(self): self.batches.append((self.learn.xb[0].clone(), self.learn.yb[0].clone()))
    def before_step(self): self.look()
    def after_step(self): self.look()
    def after_batch(self):
        self.look()
        self.weights.append(snapshot(self.learn.model))
        if len(self.batches)==4: raise CancelFitException()  # before Lookahead's first look back

@pytest.mark.parametrize('name,compute', [(n,c) for n in rated for c in (None, {'0.weight':'rows', '4.weight':'rows'}) if not (c and n in ('l2','rms','ranger'))])
def test_a_longer_step_is_the_same_step_stretched(name, compute):
    "Beside a loop that copies weights before each step and stretches what it did; two groups with rates of their own, which nobody sees changed"
    def made():
        set_seed(0)
        learn = sparse(opt=rated[name], split=True)
        learn.create_opt()
        return learn
    learn,steps,other,rates = made(),Steps(),made(),{}
    learn.fit(1, slice(1e-3,2e-3), cbs=[DST(method='static', scale_rates=True, repair=False, sparse_compute=compute, seed=0), steps])
    assert len(steps.seen)==1
    other.opt.set_hyper('lr', [1e-3,2e-3])
    for (xb,yb),after in zip(steps.batches, steps.weights):
        was = snapshot(other.model)
        other.opt.zero_grad()
        nn.functional.cross_entropy(other.model(xb), yb).backward()
        other.opt.step()
        for o in masked_params(other.model):
            w,d = was[o.name],o.p.data-was[o.name]
            rate = rates.setdefault(o.name, ((after[o.name]-w)*d).sum()/(d*d).sum())
            o.p.data.copy_(w+d*rate)
        for n,p in other.model.named_parameters(): assert (p-after[n]).abs().max()<1e-5, n
    assert len(rates)==3 and min(rates.values())>1.5

def test_a_step_that_fails_leaves_the_groups():
    "An error, or an interrupt, in the middle of a step"
    for opt in (Adam, wrap('AdamW')):
        learn = sparse(opt=opt)
        learn.create_opt()
        def groups(): return [(list(map(id, ps)), {**h, 'lr':0}) for ps,h in zip(learn.opt.param_lists, learn.opt.hypers)]
        was = groups()
        class Breaks(Callback):
            order = DST.order+1
            def before_step(self): list(self.learn.opt.param_lists[0])[2].grad.resize_(1)
        with pytest.raises(RuntimeError): learn.fit(1, cbs=[DST(method='static', scale_rates=True, seed=0), Breaks()])
        assert groups()==was

def test_live_weights_train_the_same_at_scaled_rates():
    "Adam, with updates: the same masks and, within rounding, the same weights"
    ends = []
    for compute in (None, {f'{i}.weight':'rows' for i in (0,2,4)}):
        set_seed(0)
        learn = learner()
        learn.fit_sparse(1, .9, 1e-3, seed=0, sparse_compute=compute)
        ends.append((masks_of(learn.model), [o.p.detach().clone() for o in masked_params(learn.model)]))
    assert same_masks(ends[0][0], ends[1][0]) and all(torch.allclose(a, b, atol=1e-4) for a,b in zip(ends[0][1], ends[1][1]))

def test_rates_of_masks_that_rest_are_saved():
    "`scale_rates` also holds for layers outside of `sparse_modules`, and a resumed fit knows their rates"
    class Stop(Callback):
        def after_epoch(self):
            if self.epoch==0:
                self.saved = [cb.state_dict() for cb in self.learn.cbs if isinstance(cb, DST)][0]
                raise CancelFitException
    def callback(): return DST(method='rigl', scale_rates=True, sparse_modules=[learn.model[0]], sparse_compute=False, repair=False, seed=2)
    learn,stop,moved = sparse(opt=partial(adam, sqr_mom=0., mom=0., eps=1e-12)),Stop(),[]  # each step is as long as the rate
    class Look(First):
        def after_batch(self):
            try: super().after_batch()
            except CancelFitException: moved.append(self.moved)
    learn.fit(2, 1e-3, cbs=[callback(), stop, Look()])
    again = callback()
    again.load_state_dict(stop.saved)
    learn.fit(2, 1e-3, start_epoch=1, cbs=[again, first := First()])
    assert first.moved==pytest.approx(moved[0], rel=.01) and all(m>1.5e-3 for m in first.moved)

late = dict(unnamed=(dict(sparsity={'nope*':.5}), 'name none of the weights'), over=(dict(sparsity={'1*':2.}), r'2.0.*\[0,1\)'),
    text=(dict(sparsity={'1*':'a'}), r"sparsity is 'a'.*\[0,1\)"),
    distribution=(dict(sparse_f='nope'), "sparse_f is 'nope'"), plan=(dict(sparse_compute={'nope':'rows'}), 'sparse_compute names nope'),
    rules=(dict(rules=[('*',None)]), 'no rule gives a method'), modules=(dict(sparse_modules=[nn.Linear(2,2)]), 'sparse_modules'),
    moms=(dict(moms=(.9,.8)), r'moms is \(0.9, 0.8\).*three'), mult=(dict(lr_mult=0), 'lr_mult is 0.*above 0'), base=(dict(base_lr=None), 'base_lr is None'),
    rate=(dict(lr_max=1e-3), 'base_lr='), start=(dict(mask_init='random'), "look trained.*pass mask_init='magnitude'"), name=(dict(lr=1e-3), "has no lr: .*base_lr=|did you mean 'lr_max'"))

@pytest.mark.parametrize('case', late)
def test_what_a_fit_refuses_it_refuses_before_its_first_step(case):
    "Law 10: both phases of `fine_tune_sparse`, and `fit_sparse`, leave a learner as it was"
    kw,said = late[case]
    learn = Learner(digits_dls(), nn.Sequential(nn.Flatten(), nn.Linear(64,16), nn.ReLU(), nn.Linear(16,10)), loss_func=CrossEntropyLossFlat())
    with torch.no_grad(): learn.model[1].weight.mul_(torch.linspace(.1, 30, 64))  # looks trained
    before = deepcopy(learn.model.state_dict())
    calls = [partial(learn.fine_tune_sparse, 1)]
    if case not in ('mult','base','rate'): calls.append(partial(learn.fit_sparse, 1, **{} if case=='start' else dict(mask_init='magnitude')))
    for call in calls:
        with pytest.raises((ValueError,TypeError), match=said): call(**{'sparsity':.8, **kw})
        assert agree(before, learn.model.state_dict()) and all(p.requires_grad for p in learn.model.parameters()) and learn.opt is None
