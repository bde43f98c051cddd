"Pruned models train on: with fixed masks, with every preset, and with learned masks"
import pytest,torch
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastai.optimizer import SGD
from fastcore.basics import *
from fastcore.imports import noop
from fastsparse.all import *
from fastsparse.demo import TensorData
from fastsparse.weights.find import masked_params
from functools import partial
from helpers import *
from test_magnitude import data_of,net_of

def quiet_learner():
    ds = TensorData(*data_of())
    learn = Learner(DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8)), net_of(), loss_func=MSELossFlat(), opt_func=partial(SGD, mom=.9), lr=.05)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def test_pruned_in_the_middle_of_a_run():
    "An optimizer with momentum from dense steps stays the same one: dead weights and their state are zero after every step"
    learn = quiet_learner()
    learn.fit(1)
    opt = learn.opt
    for f in (prune_magnitude, prune_sparsegpt):
        unsparsify(learn)
        f(learn, '2:4')
        masks = masks_of(learn.model)
        learn.fit(1)
        assert learn.opt is opt and same_masks(masks, masks_of(learn.model))
        assert_dead(learn.model, learn.opt)

presets = {k: v for k,v in globals().items() if k.endswith('_presets') and hasattr(v, 'keys') and k not in ('supermask_presets','STE_presets','SRSTE_presets','TopKAST_presets','Static_presets')}

@pytest.mark.parametrize('name', presets)
def test_any_preset(name):
    "Every preset trains a pruned model, in its sparsity or towards its own"
    learn = quiet_learner()
    prune_magnitude(learn, (.5,'fan-in')) if name=='SRigL_presets' else prune_sparsegpt(learn, .5)
    own = dict(sparsity=.8) if name in ('GMP_presets','GraNet_presets','SoftMEST_presets') else dict(sparsity=.5) if name in ('ACDC_presets','DSD_presets') else {}
    kwargs = dict(presets[name], **own)
    if 'updates' not in kwargs: kwargs['batches_per_update'] = 3
    learn.fit(12, cbs=DynamicSparseTrainingCallback(**kwargs, seed=0))
    live = sum(int(m.sum()) for m in masks_of(learn.model))
    assert abs(live-round((1-own.get('sparsity', .5))*168))<=6 if name!='DSD_presets' else live==168
    if live<168: assert_dead(learn.model)

@pytest.mark.parametrize('preset', [STE_presets, SRSTE_presets, TopKAST_presets, supermask_presets])
def test_learned_masks(preset):
    "Masks of a pruned model can be learned from there: magnitudes begin where pruning ended"
    net,(x,y) = net_of(),data_of()
    prune_magnitude(net, '2:4')
    masks = masks_of(net)
    unsparsify(net)
    learn_masks(net, **dict(preset, sparseness='2:4'), seed=0)
    if preset is not supermask_presets: assert same_masks(masks, masks_of(net))
    train(net, torch.optim.SGD(net.parameters(), lr=.1), 2, x, y)
    fold_masks(net)
    assert [1-sparsity_from_tensor(o.mask) for o in masked_params(net)]==[.5,.5]

@pytest.mark.parametrize('target,more', [(.5, {}), ('2:4', dict(structure='2:4'))])
def test_fixed_masks_and_moving_ones(target, more):
    "Fixed masks hold, RigL moves them within the structure, and summaries count"
    learn = quiet_learner()
    prune_wanda(learn, target)
    masks,p = masks_of(learn.model),learn.model[0].weight
    learn.fit(2)
    assert same_masks(masks, masks_of(learn.model)) and learn.model[0].weight is p
    assert_dead(learn.model, learn.opt)
    learn.fit(3, cbs=DynamicSparseTrainingCallback(**dict(RigL_presets, batches_per_update=3, **more), seed=0))
    assert not same_masks(masks, masks_of(learn.model)) and sum(int(m.sum()) for m in masks_of(learn.model))==84
    if more: assert all((m.view(len(m),-1,4).sum(2)==2).all() for m in masks_of(learn.model))
    assert sparse_summary(learn).df.set_index('parameter').loc['sparse parameters','live']==84
