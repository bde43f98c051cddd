"Pruned models train on: with fixed masks, with every preset, and with learned masks"
import copy,pytest,torch
from contextlib import nullcontext
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastai.optimizer import SGD
from fastcore.basics import *
from fastcore.imports import noop
from fastsparse.all import *
from fastsparse.train.presets import *
from fastsparse.learned.masks import SRSTE_presets,STE_presets,supermask_presets,TopKAST_presets
from fastsparse.demo import TensorData
from fastsparse.weights.find import masked_params
from functools import partial
from helpers import *
from test_magnitude import data_of,net_of
from torch import nn
from torch.nn import functional as F

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

# --- adapters under the mask

def lora_nets():
    "Layers, what peft adapts in them, and an input"
    torch.manual_seed(0)
    return dict(linear=(nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,8)), torch.randn(5,16)),
        conv=(nn.Sequential(nn.Conv2d(4,8,3,padding=1), nn.ReLU(), nn.Conv2d(8,4,3,stride=2,bias=False)), torch.randn(5,4,9,9)),
        bf16=(nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,8)).bfloat16(), torch.randn(5,16).bfloat16()))

ways = dict(lora={}, rslora=dict(use_rslora=True), dora=dict(use_dora=True))

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('kind', ['linear','conv','bf16'])
@pytest.mark.parametrize('target', [.5,'2:4'])
def test_adapters_under_the_mask(kind, way, target):
    "The forward is that of W+mask*(scale*B@A), by hand; merging changes rounding only and fills no zero; unmerging brings the base back"
    peft = pytest.importorskip('peft')
    net,x = lora_nets()[kind]
    prune_magnitude(net, target)
    if target==.5:
        for m in net:
            if hasattr(m, 'weight_mask'): m.weight_mask[0] = False  # an output without live weights
        apply_masks(net)
    masks,old = masks_of(net),[m.weight.detach().clone() for m in net if hasattr(m, 'weight')]
    config = peft.LoraConfig(target_modules=['0','2'], r=4, lora_alpha=8, lora_dropout=.1, init_lora_weights=False, **ways[way])
    tuned = mask_adapters(peft.get_peft_model(net, config))
    opt = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], .01)
    for _ in range(3):
        opt.zero_grad()
        tuned(x).float().square().mean().backward()
        opt.step()
    y = tuned.eval()(x)
    layers = [m for m in tuned.modules() if hasattr(m, 'lora_A') and hasattr(m, 'get_base_layer')]
    by_hand,act = x,False
    for m in layers:
        base,a,b = m.get_base_layer(),m.lora_A['default'].weight.float(),m.lora_B['default'].weight.float()
        delta = (b.flatten(1)@a.flatten(1)).view(base.weight.shape)*(8/(2 if way=='rslora' else 4))
        w = base.weight.float()+base.weight_mask*delta
        if way=='dora': w *= (m.lora_magnitude_vector['default'].weight.flatten()/w.flatten(1).norm(dim=1)).nan_to_num().view(-1, *[1]*(w.ndim-1))
        if act: by_hand = by_hand.relu()
        bias,act = None if base.bias is None else base.bias.float(),True
        by_hand = base._conv_forward(by_hand, w, bias) if w.ndim==4 else F.linear(by_hand.float(), w, bias)
    close = partial(torch.allclose, rtol=.05 if kind=='bf16' else 1e-4, atol=.1 if kind=='bf16' else 1e-5)
    assert close(y.float(), by_hand)
    tuned.merge_adapter()
    assert close(tuned(x), y)
    tuned.unmerge_adapter()
    assert all(close(m.get_base_layer().weight, w) for m,w in zip(layers, old)) and close(tuned(x), y)
    merged = tuned.merge_and_unload(safe_merge=True)
    assert same_masks(masks, masks_of(merged)) and close(merged(x), y)
    for m in merged:
        if hasattr(m, 'weight'): assert not m.weight[~m.weight_mask].any() and m.weight.count_nonzero()>.9*m.weight_mask.sum()

def test_adapters_under_the_mask_are_saved_and_copied(tmp_path):
    "Files are peft's own, and a call masks what was loaded; a deepcopy is masked"
    import copy
    peft = pytest.importorskip('peft')
    net,x = lora_nets()['linear']
    prune_magnitude(net, .5)
    base = copy.deepcopy(net)
    tuned = mask_adapters(peft.get_peft_model(net, peft.LoraConfig(target_modules=['0','2'], r=4, init_lora_weights=False)))
    tuned.save_pretrained(tmp_path)
    again = mask_adapters(mask_adapters(peft.PeftModel.from_pretrained(base, tmp_path)))
    assert again.eval()(x).equal(tuned.eval()(x)) and copy.deepcopy(tuned)(x).equal(tuned(x))

def test_adapters_that_cannot_be_masked():
    "Law 10: before anything changed, with the way out"
    peft = pytest.importorskip('peft')
    config = peft.LoraConfig(target_modules=['0'], r=4)
    with pytest.raises(ValueError, match='keep_zeros'): mask_adapters(peft.get_peft_model(lora_nets()['linear'][0], config))
    net,_ = lora_nets()['linear']
    prune_magnitude(net, .5)
    tuned = peft.get_peft_model(net, config)
    tuned.merge_adapter()
    with pytest.raises(ValueError, match='unmerge'): mask_adapters(tuned)
    tuned.unmerge_adapter()
    mask_adapters(tuned)
    unsparsify(net)
    with pytest.raises(ValueError, match='merge_and_unload'): tuned(torch.ones(2,16))

def adapter_config(peft, targets=('0','2'), **kwargs):
    return peft.LoraConfig(target_modules=[*targets], r=4, lora_alpha=8, init_lora_weights=False, **kwargs)

def folder_of_adapter(peft, folder, **kwargs):
    "A folder with another adapter for these layers"
    torch.manual_seed(7)
    other = peft.get_peft_model(lora_nets()['linear'][0], adapter_config(peft, **kwargs))
    other.save_pretrained(folder)
    return folder

def added(t, peft, folder): t.add_adapter('b', adapter_config(peft))
def loaded(t, peft, folder): t.load_adapter(folder_of_adapter(peft, folder), 'b')
def weighted(t, peft, folder):
    added(t, peft, folder)
    t.add_weighted_adapter(['default','b'], [.7,.4], 'mix', combination_type='linear')
    return 'mix'
def again(t, peft, folder):
    added(t, peft, folder)
    t.delete_adapter('b')
    added(t, peft, folder)
def elsewhere(t, peft, folder):
    "On a layer that had no adapter"
    t.add_adapter('b', adapter_config(peft, targets=['2']))
def with_bias(t, peft, folder): t.add_adapter('b', adapter_config(peft, lora_bias=True))
def dora(t, peft, folder): t.add_adapter('b', adapter_config(peft, use_dora=True))

def masked_by_hand(net, x):
    "Each layer's W+mask*scale*B@A of the active adapters, with the biases of B"
    for m in net:
        if not hasattr(m, 'get_base_layer'):
            x = m(x)
            continue
        base,w,bias = m.get_base_layer(),m.get_base_layer().weight.clone(),m.get_base_layer().bias.clone()
        for n in [n for n in m.active_adapters if n in m.lora_A]:
            w = w+base.weight_mask*(m.lora_B[n].weight@m.lora_A[n].weight)*m.scaling[n]
            if m.lora_B[n].bias is not None: bias = bias+m.lora_B[n].bias*m.scaling[n]
            if n in m.lora_magnitude_vector: w = w*(m.lora_magnitude_vector[n].weight/w.norm(dim=1))[:,None]
        x = F.linear(x, w, bias)
    return x

@pytest.mark.parametrize('way', [added, loaded, weighted, again, elsewhere, with_bias, dora])
@pytest.mark.parametrize('call', ['whole','base'])
def test_an_adapter_that_comes_later(way, call, tmp_path):
    "It computes under the mask at its first forward, through whichever part is called, and merges exactly, whether it was there before or not"
    peft = pytest.importorskip('peft')
    net,x = lora_nets()['linear']
    prune_magnitude(net, .5)
    masks = masks_of(net)
    tuned = mask_adapters(peft.get_peft_model(net, adapter_config(peft, targets=['0'] if way is elsewhere else ('0','2'), lora_bias=way is with_bias)))
    tuned.set_adapter(way(tuned, peft, tmp_path) or 'b')
    y = (tuned if call=='whole' else tuned.base_model.model).eval()(x)
    torch.testing.assert_close(y, masked_by_hand(tuned.base_model.model, x), rtol=1e-4, atol=1e-5)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(x), y, rtol=1e-4, atol=1e-5)
    assert same_masks(masks, masks_of(merged)) and not any(m.weight[~m.weight_mask].any() for m in merged[::2])

def test_a_base_that_was_masked_masks_what_is_loaded(tmp_path):
    "A new peft model of it, several adapters in one batch, and one that is switched off"
    peft = pytest.importorskip('peft')
    net,x = lora_nets()['linear']
    prune_magnitude(net, .5)
    plain = net(x)
    base = mask_adapters(peft.get_peft_model(net, adapter_config(peft))).unload()
    tuned = peft.PeftModel.from_pretrained(base, folder_of_adapter(peft, tmp_path)).eval()
    y = tuned(x)
    torch.testing.assert_close(y, masked_by_hand(tuned.base_model.model, x), rtol=1e-4, atol=1e-5)
    tuned.add_adapter('b', adapter_config(peft))
    tuned.set_adapter('b')
    b,names = tuned(x),['default','__base__','b','b','default']
    mixed = torch.stack([dict(default=y, b=b, __base__=plain)[n][i] for i,n in enumerate(names)])
    torch.testing.assert_close(tuned(x, adapter_names=names), mixed, rtol=1e-4, atol=1e-5)
    with tuned.disable_adapter(): torch.testing.assert_close(tuned(x), plain)

@pytest.mark.parametrize('kind', ['LoHaConfig','LoKrConfig','AdaLoraConfig','OFTConfig','IA3Config'])
def test_other_adapters_are_refused_at_their_first_forward(kind):
    "Named, and on the masked layer only; one that scales rows keeps zeros and is taken"
    peft = pytest.importorskip('peft')
    net,x = lora_nets()['linear']
    prune_magnitude(net, .5)
    base = mask_adapters(peft.get_peft_model(net, adapter_config(peft))).unload()
    more = dict(IA3Config=dict(feedforward_modules=[]), AdaLoraConfig=dict(total_step=10), OFTConfig=dict(r=4, oft_block_size=0)).get(kind, {})
    tuned = peft.get_peft_model(base, getattr(peft, kind)(target_modules=['0','2'], **more))
    taken = nullcontext() if kind=='IA3Config' else pytest.raises(ValueError, match='an adapter is peft.tuners.*mask_adapters takes LoRA')
    with taken: tuned(x)

def test_which_zeros_are_kept():
    "Those of parameters that hold enough of them; a model without any is refused, and so is a fraction that is none"
    model = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8))
    with pytest.raises(ValueError, match='prune it first'): keep_zeros(model)
    model[1].weight.data[:4] = 0
    for bad in (-1, 2, True, 'x'):
        with pytest.raises((TypeError,ValueError), match='least is'): keep_zeros(model, bad)
    keep_zeros(model)
    assert [n for n,_ in model.named_buffers() if n.endswith('_mask')]==['1.weight_mask']

def test_a_delta_wants_the_same_masks(tmp_path):
    "One that has moved is refused; so is a merge without any"
    model = nn.Sequential(nn.Linear(8,8))
    model[0].weight.data[:4] = 0
    keep_zeros(model)
    base = copy.deepcopy(model.state_dict())
    model[0].weight_mask[0,0] = True
    with pytest.raises(ValueError, match='has changed'): save_delta(model, base, tmp_path/'task')
    with pytest.raises(ValueError, match='no masks'): merge_sparse(nn.Linear(2,2))

class Adapted(nn.Linear):
    def merge_and_unload(self):
        self.weight.data[self.weight_mask] = 3.
        return self

def test_the_error_of_a_merge_by_hand():
    "4 before and 3 after: the difference is a quarter of the output before"
    model = Adapted(2, 1, bias=False)
    model.weight.data[:] = torch.tensor([[4.,0.]])
    sparsify_model(model, .5, mask_init='magnitude')
    assert merge_sparse(model, torch.ones(1,2))[1]==.25
