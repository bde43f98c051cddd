"Sparse training under other people's trainers: counts, laws and resumes, with the real packages"
import os
os.environ.setdefault('HF_HUB_OFFLINE', '1')
import pytest,torch
from fastsparse.all import *
from fastsparse.all import log_updates
from helpers import agree,assert_dead,engine,live,masked_params,masks_of,mlp,same_masks,snapshot,spin,warned
from torch import nn

tf,full = pytest.importorskip('transformers'),pytest.mark.full
tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()

tokens = torch.randint(64, (64,16), generator=torch.Generator().manual_seed(0))
ids = [dict(input_ids=t, labels=t) for t in tokens]
small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64)

def llama():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**small))

def density(model): return sum(live(model))/sum(o.mask.numel() for o in masked_params(model))
def assert_sparse(model, s, eps=1e-3):
    assert abs(1-density(model)-s)<eps
    assert_dead(model)

def trainer_of(model, folder, cb, data=ids, more=(), **kwargs):
    usual = dict(max_steps=12, save_steps=6, logging_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, seed=0)
    evals = dict(eval_dataset=ids) if 'eval_steps' in kwargs else {}
    args = tf.TrainingArguments(str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **{**usual, **kwargs})
    trainer = tf.Trainer(model, args, train_dataset=data, callbacks=[cb, *more], **evals)
    trainer.remove_callback(tf.PrinterCallback)
    return trainer

def callback(**kwargs): return SparseTrainerCallback(**{**dict(sparsity=.8, seed=0), **dict(RigL_presets, batches_per_update=3), **kwargs})
def by_name(name, **kwargs): return SparseTrainerCallback(sparsity=.8, seed=0, method=name, **({} if name=='acdc' else dict(batches_per_update=2)), **kwargs)

# --- Hugging Face

@pytest.mark.parametrize('kw', [dict(), dict(gradient_accumulation_steps=2), dict(bf16=True), 'gmp', 'granet', *(pytest.param(o, marks=full) for o in (dict(optim='sgd'),'acdc'))],
    ids=str)
def test_a_training_has_the_sparsity_asked_for_and_resumes_bit_for_bit(tmp_path, kw):
    "Methods that start dense too; the log holds sparsity and updates"
    make,kw = (callback,kw) if isinstance(kw, dict) else (lambda: by_name(kw),{})
    whole,part,cb = llama(),llama(),make()
    trainer = trainer_of(whole, tmp_path/'a', cb, **kw)
    trainer.train()
    assert_sparse(whole, .8, 1e-3 if make is callback else .01)
    if make is callback:
        first = trainer.state.log_history[0]
        assert cb.saved['n_updates']>=2 and first['sparsity']==pytest.approx(.8, abs=1e-3) and first['topology_updates']==1
    trainer_of(part, tmp_path/'a', make(), **kw).train(resume_from_checkpoint=str(tmp_path/'a'/'checkpoint-6'))
    assert agree(whole.state_dict(), part.state_dict())
    if kw: return
    (tmp_path/'a'/'checkpoint-6'/'sparse_engine.pt').unlink()
    with pytest.raises(ValueError, match='resume_from='): trainer_of(llama(), tmp_path, make(), **kw).train(resume_from_checkpoint=str(tmp_path/'a'/'checkpoint-6'))

def test_a_finished_training_continues_with_fixed_masks(tmp_path):
    "By the number of steps that it had, which the error names"
    whole,longer = llama(),llama()
    trainer_of(whole, tmp_path, callback()).train()
    end = str(tmp_path/'checkpoint-12')
    with pytest.raises(ValueError, match='pass n_steps=12'): trainer_of(llama(), tmp_path, callback(), max_steps=15).train(resume_from_checkpoint=end)
    trainer_of(longer, tmp_path, cb := callback(n_steps=12), max_steps=15).train(resume_from_checkpoint=end)
    assert cb.saved['t']==15 and same_masks(masks_of(whole), masks_of(longer)) and not agree(whole.state_dict(), longer.state_dict())
    assert_dead(longer)

kinds = dict(masked=[], linear=['body.3.weight','body.6.weight'], conv=['body.0.weight'])

class ConvNet(nn.Module):
    "Masked, or with live weights in some layers"
    def __init__(self, kind, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Conv2d(2,6,3,padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96,16), nn.ReLU(), nn.Dropout(.1), nn.Linear(16,4))
        sparsify_model(self, .8, seed=seed)
        if kinds[kind]: sparse_compute(self, None, plan={k:'rows' for k in kinds[kind]})
    def forward(self, x, labels): return dict(loss=nn.functional.mse_loss(self.body(x), labels))

class Die(tf.TrainerCallback):
    "End the training after so many batches"
    def __init__(self, at): self.at = at
    def on_step_end(self, *args, **kwargs):
        self.at -= 1
        if not self.at: raise MemoryError('dead')
    on_substep_end = on_step_end

@pytest.mark.parametrize('kind,n_acc,stops', [(k,2,(5,)) for k in ('masked','conv')]+[pytest.param(k, n, range(n+1,6*n), marks=full) for k in kinds for n in (1,2,3)])
def test_a_training_that_dies_at_any_batch_goes_on_bit_for_bit(kind, n_acc, stops, tmp_path):
    "Weights, masks, optimizer and engine, also of layers that compute with live weights only"
    g = torch.Generator().manual_seed(0)
    rows = [dict(x=torch.randn(2,4,4, generator=g), labels=torch.randn(4, generator=g)) for _ in range(48)]
    def run(folder, seed=0, die=(), resume=None):
        model,cb = ConvNet(kind, seed),callback(sparsity=None, seed=seed, batches_per_update=2, stop_pct=1.)
        trainer = trainer_of(model, tmp_path/folder, cb, rows, die, max_steps=6, save_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=n_acc)
        trainer.train(resume_from_checkpoint=resume)
        return dict(model.state_dict()),trainer.optimizer.state_dict()['state'],cb.saved
    whole = run('whole')
    assert whole[2]['n_updates']>1
    for i in stops:
        with pytest.raises(MemoryError): run(str(i), die=[Die(i)])
        assert agree(whole, run(str(i), 3, resume=True)), i

class Wide(nn.Module):
    "Its first layer is wide enough to live at batches of 64"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(256,512), nn.ReLU(), nn.Linear(512,10))
    def forward(self, x, labels): return dict(loss=nn.functional.cross_entropy(self.body(x), labels))

@pytest.mark.parametrize('settings', [dict(RigL_presets, batches_per_update=2), pytest.param(dict(method='gmp', batches_per_update=2, sparsity=.95), marks=full)], ids=['rigl','gmp'])
def test_layers_go_live_by_the_rule_and_train_the_same_network(tmp_path, settings):
    "Bit for bit after a resume, and up to rounding as with masks; dense again in the end. Adam's first steps are all as long as the rate, so grown weights would tie"
    g = torch.Generator().manual_seed(0)
    rows = [dict(x=torch.randn(256, generator=g), labels=torch.randint(10, (), generator=g)) for _ in range(256)]
    def run(folder, resume=None, **kwargs):
        cb,model = SparseTrainerCallback(**{**dict(sparsity=.9, seed=0), **settings, **kwargs}),Wide()
        trainer_of(model, tmp_path/folder, cb, rows, per_device_train_batch_size=64, learning_rate=.1, optim='sgd').train(resume_from_checkpoint=resume)
        return model,cb
    (a,cb),(b,off),(c,_) = run('a'),run('b', sparse_compute=False),run('a', str(tmp_path/'a'/'checkpoint-6'))
    assert off.report is None and not cb.why_masked and cb.report.plan=={'body.0.weight':'rows','body.2.weight':'dense'} and agree(a.state_dict(), c.state_dict())
    for (k,u),v in zip(a.state_dict().items(), b.state_dict().values()): assert u.shape==v.shape and torch.allclose(u.float(), v.float(), atol=1e-5), k
    assert_dead(a)

def test_what_masks_a_model_gets(tmp_path):
    "A dense one's `mask_init` and `structure` as in `sparsify_model`; a sparse one is taken as it is, or led to another sparsity; one callback serves both"
    model,same = llama(),llama()
    sparsify_model(same, .5, 'erk', mask_init='magnitude', structure='2:4')
    trainer_of(model, tmp_path, SparseTrainerCallback(sparsity=.5, mask_init='magnitude', structure='2:4', method='set', batches_per_update=100))
    assert same_masks(masks_of(model), masks_of(same))
    cb = callback(sparsity=.9, method='set')
    for sparse,cb,expect in ((False,cb,.9), (True,cb,.9), (True,callback(sparsity=None),.5)):
        model = llama()
        if sparse: sparsify_model(model, .5, seed=1)
        trainer_of(model, tmp_path, cb).train()
        assert_sparse(model, expect)

class StopAt(tf.TrainerCallback):
    def __init__(self, at): self.at = at
    def on_step_end(self, args, state, control, **kwargs): control.should_training_stop = state.global_step==self.at

def test_a_training_that_ends_before_its_sparsity_says_so(tmp_path):
    "Stopped early, or put back to a checkpoint that was better"
    for name,end in (('gmp',True),('rigl',False)):
        said = warned(trainer_of(llama(), tmp_path, by_name(name), more=[StopAt(5)]).train)
        assert any('training ended after 5 of 12 steps' in o and 'instead of 0.800' in o for o in said)==end
    best = trainer_of(llama(), tmp_path, by_name('gmp'), eval_strategy='steps', eval_steps=4, save_steps=4, load_best_model_at_end=True,
        metric_for_best_model='loss', greater_is_better=True, learning_rate=10.)
    assert any('instead of 0.800' in o for o in warned(best.train)) and best.state.best_global_step<12

# --- Lightning

def lightning_net():
    L = pytest.importorskip('lightning')
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16,64), nn.ReLU(), nn.Linear(64,4))
        def training_step(self, batch, i): return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        def configure_optimizers(self): return torch.optim.Adam(self.parameters(), 1e-2)
    torch.manual_seed(0)
    return Net()

def lightning_fit(net, folder, *cbs, ckpt=None, max_epochs=4, **kwargs):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    x = torch.randn(64,16, generator=torch.Generator().manual_seed(0))
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:,:4].argmax(1)), batch_size=16)
    trainer = L.Trainer(max_epochs=max_epochs, accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[*cbs, ModelCheckpoint(folder, filename='{epoch}', save_top_k=-1)], **kwargs)
    trainer.fit(net, dl, ckpt_path=ckpt)
    return trainer

def lightning_callback(**kwargs): return SparseLightningCallback(**{**dict(sparsity=.8, seed=0), **dict(RigL_presets, batches_per_update=3), **kwargs})
def average(name, **kwargs): return getattr(pytest.importorskip('lightning.pytorch.callbacks'), name)(**kwargs)
of_lightning = pytest.mark.filterwarnings('ignore')

@of_lightning
def test_lightning_trains_to_the_sparsity_asked_for_and_resumes_bit_for_bit(tmp_path):
    whole,part,cb = lightning_net(),lightning_net(),lightning_callback()
    lightning_fit(whole, tmp_path/'a', cb)
    assert_sparse(whole, .8)
    assert cb.saved['n_updates']>=2
    lightning_fit(part, tmp_path/'b', lightning_callback(), ckpt=str(tmp_path/'a'/'epoch=1.ckpt'))
    assert agree(whole.state_dict(), part.state_dict())
    sparsify_model(net := lightning_net(), .5, seed=1)
    lightning_fit(net, tmp_path, cb)
    assert_sparse(net, .8)

@of_lightning
def test_a_finished_fit_of_lightning_continues_with_fixed_masks(tmp_path):
    whole,longer = lightning_net(),lightning_net()
    lightning_fit(whole, tmp_path/'a', lightning_callback())
    end = str(tmp_path/'a'/'epoch=3.ckpt')
    with pytest.raises(ValueError, match='pass n_steps=16'): lightning_fit(lightning_net(), tmp_path/'b', lightning_callback(), ckpt=end, max_epochs=5)
    lightning_fit(longer, tmp_path/'c', cb := lightning_callback(n_steps=16), ckpt=end, max_epochs=5)
    assert cb.saved['t']==20 and same_masks(masks_of(whole), masks_of(longer))

@of_lightning
def test_lightning_loads_a_sparse_checkpoint_into_a_dense_module(tmp_path):
    "With the callback in a test and a fit, and with one line of the module in `load_from_checkpoint`; one that doesn't fit leaves it dense"
    import lightning as L
    net = lightning_net()
    lightning_fit(net, tmp_path, lightning_callback())
    ckpt = str(tmp_path/'epoch=3.ckpt')
    def trainer(): return L.Trainer(max_epochs=5, accelerator='cpu', logger=False, enable_progress_bar=False, default_root_dir=tmp_path, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[lightning_callback(sparsity=None)])
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32,16), torch.zeros(32).long()), batch_size=16)
    tested,fitted,loaded = lightning_net(),lightning_net(),lightning_net()
    type(tested).test_step = lambda self, batch, i: self.training_step(batch, i)
    trainer().test(tested, dl, ckpt_path=ckpt, verbose=False)
    load_sparse(loaded, ckpt)
    type(net).on_load_checkpoint = lambda self, checkpoint: load_sparse(self, checkpoint)
    for o in (tested,loaded,type(net).load_from_checkpoint(ckpt)): assert same_masks(masks_of(net), masks_of(o)) and agree(net.state_dict(), o.state_dict())
    lightning_fit(fitted, tmp_path/'again', lightning_callback(sparsity=None), ckpt=str(tmp_path/'epoch=1.ckpt'))
    assert agree(net.state_dict(), fitted.state_dict())
    for o in (tested,fitted): assert 'on_load_checkpoint' not in vars(o)
    other = lightning_net()
    other.layers = nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,4))
    type(other).test_step = type(tested).test_step
    with pytest.raises(RuntimeError, match='unchanged'): trainer().test(other, dl, ckpt_path=ckpt, verbose=False)
    assert not masked_params(other)

@of_lightning
def test_lightning_modules_that_fit_no_engine_are_refused(tmp_path):
    "Two optimizers, and an average that was copied before there were masks"
    net = lightning_net()
    net.automatic_optimization = False
    net.configure_optimizers = lambda: [torch.optim.SGD(net.layers[i].parameters(), .1) for i in (0,2)]
    with pytest.raises(ValueError, match='2 optimizers'): lightning_fit(net, tmp_path, lightning_callback())
    with pytest.raises(ValueError, match='put SparseLightningCallback before it'):
        lightning_fit(lightning_net(), tmp_path, average('EMAWeightAveraging'), lightning_callback())

averages = [('EMAWeightAveraging', dict(decay=.9)), ('EMAWeightAveraging', dict(decay=.9, use_buffers=False)), ('StochasticWeightAveraging', dict(swa_lrs=.01, swa_epoch_start=.3))]

@of_lightning
@pytest.mark.parametrize('name,kwargs', averages)
@pytest.mark.parametrize('first', [True,False])
def test_lightnings_averages_do_not_average_masks(tmp_path, name, kwargs, first):
    "The masks of the model that comes out are those of a training without averages; its file holds zeros where weights are dead, also of many masks"
    plain,net = lightning_net(),lightning_net()
    lightning_fit(plain, tmp_path/'a', lightning_callback(stop_pct=1.))
    cbs = [lightning_callback(stop_pct=1.),average(name, **kwargs)]
    if not first: sparsify_model(net, .8, erdos_renyi_sparsity, seed=0)
    lightning_fit(net, tmp_path/'b', *(cbs if first else cbs[::-1]), limit_val_batches=0)
    if name=='EMAWeightAveraging' and first: assert agree(dict(plain.named_buffers()), dict(net.named_buffers()))
    state = torch.load(tmp_path/'b'/'epoch=3.ckpt', weights_only=False)['state_dict']
    for o in masked_params(net): assert not state[o.name][~state[f'{o.name}_mask']].any() and int(state[f'{o.name}_mask'].sum())==int(o.mask.sum())
    assert_sparse(net, .8)
    for o,(*_,s) in zip(masked_params(net), sparse_params(net)): assert s==pytest.approx(1-o.mask.float().mean().item(), abs=1e-6)
    if name=='StochasticWeightAveraging':
        lightning_fit(gradual := lightning_net(), tmp_path/'c', lightning_callback(method='gmp', batches_per_update=2), average(name, **kwargs))
        assert_dead(gradual)

@of_lightning
def test_lightning_says_that_a_training_with_steps_of_its_own_ended_before_its_sparsity(tmp_path):
    "Lightning counts batches where a module steps by itself"
    net = lightning_net()
    net.automatic_optimization = False
    def training_step(batch, batch_idx):
        net.manual_backward(nn.functional.cross_entropy(net.layers(batch[0]), batch[1]))
        if batch_idx%2:
            net.optimizers().step()
            net.optimizers().zero_grad()
    net.training_step = training_step
    with pytest.warns(UserWarning, match='training ended after 8 of 16 steps'): lightning_fit(net, tmp_path, lightning_callback(method='gmp', batches_per_update=2))

# --- logs

def logged(log):
    m = mlp((16,64,4))
    sparsify_model(m, .8, seed=0)
    spin(engine(m, torch.optim.SGD(m.parameters(), lr=.1), 20, 5, on_update=log), 20)

def test_tensorboard_files_hold_each_update(tmp_path):
    tb = pytest.importorskip('torch.utils.tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    with tb.SummaryWriter(tmp_path) as w: logged(log_updates(w, layers=True))
    acc = EventAccumulator(str(tmp_path))
    acc.Reload()
    assert [(o.step, o.value) for o in acc.Scalars('sparse/updates')]==[(5,1.),(10,2.)]
    assert acc.Scalars('sparse/density/0.weight')[0].value==pytest.approx(.2, abs=.01)

def test_mlflow_holds_each_update(tmp_path):
    mlflow = pytest.importorskip('mlflow')
    mlflow.set_tracking_uri(f'sqlite:///{tmp_path}/db')
    with mlflow.start_run() as run: logged(log_updates(mlflow))
    got = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, 'sparse/updates')
    assert [(o.step, o.value) for o in got]==[(5,1.),(10,2.)]

def test_wandb_offline_takes_each_update(tmp_path):
    wandb = pytest.importorskip('wandb')
    run = wandb.init(mode='offline', dir=str(tmp_path), project='p', settings=wandb.Settings(silent=True))
    logged(log_updates(run))
    assert run.summary['sparse/updates']==2
    run.finish()

# --- what transformers wrote comes back, and its architectures train

def _gpt2(): return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
def _mixtral(): return tf.MixtralForCausalLM(tf.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
def _bert(): return tf.BertForMaskedLM(tf.BertConfig(**small))
def _t5(): return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0))
def _vit():
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4))

pictures = [dict(pixel_values=torch.randn(3,8,8, generator=torch.Generator().manual_seed(i)), labels=torch.tensor(i%4)) for i in range(32)]
architectures = dict(gpt2=_gpt2, llama=llama, mixtral=_mixtral, bert=_bert, t5=_t5, vit=_vit)
@pytest.mark.parametrize('name', ['gpt2', 'mixtral', *[pytest.param(o, marks=full) for o in ('llama','bert','t5','vit')]])
def test_architectures_train_come_back_from_their_folder_and_export(tmp_path, name):
    "The whole model has the sparsity asked for; `load_sparse` gives equal outputs from what `save_pretrained` wrote, in one file or several; a plain copy too"
    torch.manual_seed(0)
    make,data = architectures[name],pictures if name=='vit' else ids
    model = make()
    trainer_of(model, tmp_path/'run', callback(sparsify=dict(also=['*experts*']) if name=='mixtral' else {}), data, max_steps=8, save_steps=100).train()
    assert_sparse(model, .8)
    batch = {k:v[None] for k,v in data[0].items()}
    with torch.no_grad(): want = model.eval()(**batch).logits
    for size in ('1GB','10KB'):
        model.save_pretrained(tmp_path/size, max_shard_size=size)
        other = make()
        load_sparse(other, tmp_path/size)
        assert live(other)==live(model) and (size=='1GB' or len(list((tmp_path/size).glob('*.safetensors')))>1)
        with torch.no_grad():
            for o in (other.eval(),plain_copy(model)): assert torch.equal(o(**batch).logits, want)

def test_what_is_no_folder_of_a_saved_model_is_named(tmp_path):
    "Nothing is changed by then"
    model = llama()
    with pytest.raises(ValueError, match='no model.safetensors'): load_sparse(model, tmp_path)
    (tmp_path/'model.safetensors').write_bytes(b'no tensors')
    with pytest.raises(ValueError, match='is damaged, or no whole file of safetensors'): load_sparse(model, str(tmp_path))
    assert not masked_params(model)

@pytest.mark.parametrize('make', [lambda: pytest.importorskip('timm').create_model('resnet10t', num_classes=4),
    lambda: __import__('torchvision').models.mobilenet_v2(num_classes=4)], ids=['timm','torchvision'])
def test_models_of_timm_and_torchvision_need_nothing(make):
    torch.manual_seed(0)
    model = make()
    sparsify_model(model, .8, seed=0)
    opt = torch.optim.SGD(model.parameters(), lr=.01)
    dst = engine(model, opt, 4, **RigL_presets(batches_per_update=2, stop_pct=1.))
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2,3,32,32)).square().mean().backward()
        opt.step()
    dst.remove()
    assert_sparse(model, .8)
    assert dst.n_updates>0

# --- deltas of finetuned models

def test_a_delta_says_when_the_base_had_no_masks(tmp_path):
    "Writing one from a state that was copied before `keep_zeros`, and reading one into a model without masks"
    def pruned():
        m = nn.Linear(8,8)
        nn.init.ones_(m.weight)
        with torch.no_grad(): m.weight[::2] = 0
        nn.init.zeros_(m.bias)
        return m
    base,bare,new = pruned(),pruned().state_dict(),pruned()
    keep_zeros(base)
    before = snapshot(base)
    with torch.no_grad(): base.bias += 1
    with pytest.raises(ValueError, match='weight_mask.*with the masks of keep_zeros'): save_delta(base, bare, tmp_path/'a')
    assert not (tmp_path/'a').exists()
    path = save_delta(base, before, tmp_path/'a')
    with pytest.raises(ValueError, match='with its masks'): load_delta(new, path)
    keep_zeros(new)
    load_delta(new, path)
    assert new.bias.equal(base.bias) and new.weight.equal(base.weight)

def test_a_delta_knows_the_order_of_its_base(tmp_path):
    "Rows that changed places are another base, though all numbers are the same"
    def made(): return nn.Linear(4, 4, bias=False)
    tuned,base = made(),made()
    base.load_state_dict(tuned.state_dict())
    turned = {'weight':base.weight.detach().flip(0)}
    with torch.no_grad(): tuned.weight[0] += 1
    save_delta(tuned, base.state_dict(), tmp_path/'a')
    other = made()
    other.load_state_dict(turned)
    with pytest.raises(ValueError, match='another base'): load_delta(other, tmp_path/'a')
    assert other.weight.equal(turned['weight'])
    load_delta(base, tmp_path/'a')
    assert base.weight.equal(tuned.weight)

def conv(): return nn.Sequential(nn.Conv2d(3,8,1), nn.Conv2d(8,4,3)).to(memory_format=torch.channels_last)
def causal(odd):
    def make():
        m = nn.Sequential(nn.Linear(6,16), nn.Tanh(), nn.Linear(16,3))
        m.register_buffer('causal', torch.full((4,4), odd).triu(1))
        return m
    return make

@pytest.mark.parametrize('make', [conv,causal(0.),causal(-torch.inf),causal(torch.nan)], ids=['conv','linear','-inf','nan'])
def test_a_delta_reaches(make, tmp_path):
    "Weights in another order of memory, live ones, a base with numbers that are not finite, as a causal mask's; another base is refused"
    def made(seed=0):
        torch.manual_seed(seed)
        m = make()
        sparsify_model(m, .5, seed=0)
        return m
    tuned,base,other = made(),made(),made(1)
    with torch.no_grad():
        for o in masked_params(tuned): o.p.mul_(2)
    save_delta(tuned, made().state_dict(), tmp_path/'a')
    with pytest.raises(ValueError, match='another base'): load_delta(other, tmp_path/'a')
    if make is not conv: sparse_compute(base, None, plan={'0.weight':'rows', '2.weight':'rows'})
    load_delta(base, tmp_path/'a')
    for (k,u),v in zip(tuned.state_dict().items(), base.state_dict().values()): assert torch.equal(u.nan_to_num(), v.nan_to_num()), k
