"An example for each entry of the API; tests/test_site.py runs them all, each in a `scene` of its own"
import re
from fastcore.utils import *

about = '''In the examples `model` is a network, `opt` its torch optimizer, `learn` a fastai `Learner` of it, and `xb`, `yb` a batch. `net` is a copy with nine of ten weights dead; `p` is its first weight, with
a gradient, and `mask` the mask of that weight.'''

def scene():
    "What the examples begin with"
    import fastai.basics,fastsparse.all,torch
    from copy import deepcopy
    from fastsparse.demo import digits_dls,digits_mlp
    from torch import nn
    from torch.nn import functional as F
    dls,model = digits_dls(),digits_mlp(0)
    net = deepcopy(model)
    fastsparse.all.sparsify_model(net, .9, seed=0)
    xb,yb = dls.one_batch()
    F.cross_entropy(net(xb), yb).backward()
    learn = fastai.basics.Learner(dls, model, loss_func=fastai.basics.CrossEntropyLossFlat(), metrics=fastai.basics.accuracy)
    learn.logger,opt = noop,torch.optim.AdamW(model.parameters(), 1e-2)
    return dict(torch=torch, nn=nn, F=F, deepcopy=deepcopy, model=model, opt=opt, learn=learn, xb=xb, yb=yb, net=net, p=net[0].weight, mask=net[0].weight_mask)

def of(name, o):
    "The example of `name`, which is `o`; empty where its docstring has one"
    if isinstance(o, dict): return f'learn.fit_one_cycle(1, 1e-2, cbs=DynamicSparseTrainingCallback(sparsity=.9, **{name}))'
    return said.get(name, '')

def imports(name, text, public):
    "The line that imports `name` and the other `public` names that example `text` uses"
    if '.' in name: return 'from fastsparse.all import *  # adds it to every Learner'
    return f"from fastsparse.all import {','.join(uniqueify([name, *(o for o in re.findall(r'[A-Za-z_]+', text) if o in public)]))}"

_text = '''
# api/train
Learner.fine_tune_sparse
    learn.fine_tune_sparse(2, .8)
DynamicSparseTrainingCallback
    learn.fit_one_cycle(2, 1e-2, cbs=DynamicSparseTrainingCallback(sparsity=.9, method='rigl'))
SparseTrainerCallback
    rigl = SparseTrainerCallback(sparsity=.9, method='rigl')
    # Trainer(model, args, train_dataset=ds, callbacks=[rigl]).train()
SparseLightningCallback
    rigl = SparseLightningCallback(sparsity=.9, method='rigl')
    # Trainer(max_epochs=5, callbacks=[rigl]).fit(module, loader)
SparseEngine
    engine = SparseEngine(net, torch.optim.AdamW(net.parameters(), 1e-2), n_steps=1000)
    engine.n_updates
# api/choose
find_sparsity
    found = find_sparsity(learn, budget=6, sparsities=(.8,.95), seeds=1, lr_max=1e-2, progress=False)
    found.advice
compare_with_narrow
    compare_with_narrow(learn, 1, .9, widths=[.5], seeds=1, lrs=[1e-2], progress=False)
Learner.sparse_lr_find
    sparsify_model(learn, .9)
    lr = learn.sparse_lr_find(num_it=20, show_plot=False)
# api/sparsify
sparse_params
    for p,mask,sparsity in sparse_params(net): print(tuple(p.shape), int(mask.sum()), float(sparsity))
sparsify_parameter
    sparsify_parameter(model, '0.weight', .9)
unsparsify_parameter
    unsparsify_parameter(net, '0.weight')
apply_masks
    net[0].weight.data.fill_(1.)
    apply_masks(net)
register_layer
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))
    register_layer(Scaled)
sparseable_modules
    sparseable_modules(model)
is_sparseable_module
    is_sparseable_module(nn.LSTM(4, 8))
init_kaiming_normal_sparse_
    init_kaiming_normal_sparse_(p)
# api/distributions
erdos_renyi_sparsity
    sparsify_model(model, .9, erdos_renyi_sparsity)
uniform_sparsity
    sparsify_model(model, .9, uniform_sparsity)
first_layer_dense_uniform
    sparsify_model(model, .9, first_layer_dense_uniform)
layers_dense
    sparsify_model(model, .9, layers_dense('4.*'))
balanced_flops_sparsity
    sparsify_model(model, .9, balanced_flops_sparsity(flop_profile(model, xb)))
global_sparsity
    sparsify_model(model, .9, global_sparsity, mask_init='magnitude')
given_sparsity
    sparsify_model(model, .9, given_sparsity({'0.weight': .95, '2.weight': .9, '*': 0}))
# api/structures
NM
    sparsify_model(model, .5, structure=NM(2, 4))
Block
    sparsify_model(model, .9, structure=Block(4, 1), chosen=['0.weight','2.weight'])
FanIn
    sparsify_model(model, .9, structure=FanIn())
as_structure
    as_structure('2:4')
# api/methods
methods_table
    methods_table()
# api/own_method
declares
    @declares(reads_grad=True, elementwise=True)
    def grad_times_weight(p, **kwargs): return (p.grad*p).abs()
register_method
    register_method('my_rigl', {**RigL_presets, 'initial_drop_grow_pct': .5})
    learn.fit_sparse(1, .9, method='my_rigl')
weight_magnitude
    weight_magnitude(p)
gradient_magnitude
    gradient_magnitude(p)
gradient_momentum
    opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    opt.step()
    gradient_momentum(p, opt)
gradient_saliency
    gradient_saliency(p)
fisher_saliency
    DynamicSparseTrainingCallback(method='rigl', keep_score_f=fisher_saliency)
MagnitudePlusGradient
    DynamicSparseTrainingCallback(method='set', keep_score_f=MagnitudePlusGradient(lam=.5))
MeanGradient
    DynamicSparseTrainingCallback(method='rigl', grow_score_f=MeanGradient(4))
SampledGradient
    DynamicSparseTrainingCallback(method='rigl', grow_score_f=SampledGradient(.5))
random_score
    random_score(p)
given_value
    start = partial(given_value, values=model.state_dict())
    DynamicSparseTrainingCallback(method='rigl', grow_init_f=start)
momentum_redistribution
    DynamicSparseTrainingCallback(method='rigl', redistribute_f=momentum_redistribution)
gradient_redistribution
    DynamicSparseTrainingCallback(method='rigl', redistribute_f=gradient_redistribution)
Interval
    DynamicSparseTrainingCallback(method='rigl', updates=Interval(50))
Schedule
    class Halving(Schedule):
        at = lambda self, step, n_updates: .5**n_updates
CubicSchedule
    sparsity = CubicSchedule(.5, .95, stop=750)
    [round(sparsity(t), 3) for t in (0, 250, 750)]
FreqSchedule
    DynamicSparseTrainingCallback(method='rigl', updates=FreqSchedule(freq=50, start=100, stop=800))
# api/rules
configure
    rules = configure([dict(params='0.*', method='static', sparsity=.5), dict(method='rigl', sparsity=.9)])
# api/prune
prune_magnitude
    prune_magnitude(model, .9)
prune_wanda
    prune_wanda(model, .5, [xb])
prune_sparsegpt
    prune_sparsegpt(model, '2:4', [xb])
prune_refit
    prune_refit(model, .5, [xb])
prune_snip
    prune_snip(model, .9, [(xb,yb)], loss_func=F.cross_entropy)
prune_grasp
    prune_grasp(model, .9, [(xb,yb)], loss_func=F.cross_entropy)
prune_synflow
    prune_synflow(model, .9, xb, rounds=10)
prune_channels
    prune_channels(model, .5, xb)
    small,removed = shrink(model, xb)
ChannelPruning
    learn.fit_one_cycle(2, 1e-2, cbs=ChannelPruning(.5))
    small,removed = shrink(learn.model, xb)
prune_tokens
    from fastai.text.data import Numericalize
    words = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2))
    prune_tokens(words, Numericalize(['xxunk','a','bad','face']), [['bad','face']]).vocab
taylor_scores
    prune_channels(model, .5, xb, scores=taylor_scores(model, [(xb,yb)], F.cross_entropy))
channel_groups
    print(channel_groups(model, xb))
prune_to
    prune_to(net, .95)
find_ticket
    find_ticket(model, lambda m: learn.fit(1), .5, rate=.5)
# api/finetune
keep_zeros
    plain = plain_copy(net)  # zeros, and no masks
    keep_zeros(plain)
mask_adapters
    from peft import LoraConfig,get_peft_model
    tuned = get_peft_model(net, LoraConfig(target_modules=['0','2']))
    mask_adapters(tuned)
merge_sparse
    from peft import LoraConfig,get_peft_model
    tuned = get_peft_model(net, LoraConfig(target_modules=['0','2']))
    merged = merge_sparse(tuned, xb)
save_delta
    tuned = deepcopy(net)
    tuned[0].bias.data.add_(1.)
    save_delta(tuned, net.state_dict(), 'task.pt')
load_delta
    save_delta(net, net.state_dict(), 'task.pt')
    load_delta(net, 'task.pt')
# api/learned
learn_masks
    learn_masks(model, 'top 0.1')
fold_masks
    learn_masks(model, 'top 0.1')
    fold_masks(model)  # plain weights with zeros
LearnedMaskCallback
    learn_masks(model, 'top 0.1')
    learn.fit(1, 1e-2, cbs=LearnedMaskCallback())
mask_penalty
    from fastsparse.learned.masks import SRSTE_presets
    learn_masks(model, **SRSTE_presets)  # dead weights decay
    loss = F.cross_entropy(model(xb), yb)+mask_penalty(model)
Sparsify
    sp = Sparsify((64,), 'top 0.25')
    sp(xb)
# api/save
SparseCheckpoint
    learn.fit_sparse(1, .9, cbs=SparseCheckpoint('run.pt'))
save_run
    save_run('run.pt', net, torch.optim.AdamW(net.parameters()))
load_run
    save_run('run.pt', net)
    load_run('run.pt', net)
WaitForSparsity
    gmp = DynamicSparseTrainingCallback(method='gmp', sparsity=.9, batches_per_update=4)
    learn.fit(2, cbs=[gmp, WaitForSparsity(), SaveModelCallback()])
save_sparse
    save_sparse(net, 'net.safetensors')
load_sparse
    save_sparse(net, 'net.safetensors')
    load_sparse(model, 'net.safetensors')
load_cut
    from transformers import ViTConfig,ViTModel
    vit = ViTModel(ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)).eval()
    images = dict(pixel_values=torch.randn(1,3,16,16))
    prune_channels(vit, {'*.0.intermediate*':.5}, images, even=False)
    shrink(vit, images)[0].save_pretrained('cut')
    load_cut('cut')
# api/deploy
store_dense
    sparse_compute(net, xb)
    store_dense(net)
sparse_compute
    report = sparse_compute(net, xb)
export_sparse
    path,report = export_sparse(net, 'safetensors', xb, 'net.safetensors')
plain_copy
    plain = plain_copy(net)
shrink
    sparsify_model(model, .5, structure='output channels', chosen=['0.weight','2.weight'])
    smaller = shrink(model, xb)
pack
    packed = pack(net, {'2': 'rows'})
narrow_like
    narrow = narrow_like(model, .1, xb)
# api/look
plot_topology
    plot_topology(net)
animate_masks
    history = SparseHistory(keep_masks=True)
    learn.fit_sparse(1, .9, on_update=history)
    animate_masks(history, 'masks.gif')
SparseHistory
    history = SparseHistory()
    learn.fit_sparse(1, .9, on_update=history)
    history.totals()
log_updates
    learn.fit_sparse(1, .9, on_update=log_updates(print))
count_flops
    count_flops(net, xb[:1], sparse=True)
flop_profile
    flop_profile(net, xb[:1])
FlopsCounter
    learn.fit_sparse(1, .9, cbs=FlopsCounter())
predict_cost
    predict_cost(net, xb, 1000, method='rigl')
# api/masks
sparse_mask
    sparse_mask((16,32), .9)
sparse_mask_like
    sparse_mask_like(p, .9)
top_k_mask
    top_k_mask(p.abs(), 100)
mask_from_tensor
    mask_from_tensor(p)
sparsity_from_tensor
    sparsity_from_tensor(p)
maybe_float
    maybe_float(torch.tensor(.5))
'''
blocks = re.findall(r'^([\w.]+)\n((?:    .*\n)+)', _text, re.MULTILINE)
said = {k: '\n'.join(l[4:] for l in v.splitlines()) for k,v in blocks}
