"Sparse training under other people's trainers: counts, laws and resumes, with the real packages"
import os
os.environ.setdefault('HF_HUB_OFFLINE', '1')
import pytest,torch,warnings
from fastcore import test as t
from fastsparse.all import *
from fastsparse.weights.live import LiveWeight
from fastsparse.weights.weight import handler_of,masked_params
from fastsparse.train.trainers import log_updates,SparseLightningCallback,SparseTrainerCallback
from helpers import agree
from torch import nn

tf = pytest.importorskip('transformers')
tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()

tokens = torch.randint(64, (64,16), generator=torch.Generator().manual_seed(0))
ids = [dict(input_ids=t, labels=t) for t in tokens]
small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)

def llama():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**small))

def counts(model):
    os = masked_params(model)
    return sum(o.mask.numel() for o in os),sum(int(o.mask.sum()) for o in os)

def dead_are_zero(model): return all((o.p.detach()[~o.mask]==0).all() for o in masked_params(model))

def trainer_of(model, folder, cb, data=ids, eval_dataset=None, **kwargs):
    usual = dict(max_steps=12, save_steps=6, logging_steps=4, per_device_train_batch_size=8, report_to=[], disable_tqdm=True, use_cpu=True, seed=0)
    args = tf.TrainingArguments(str(folder), **{**usual, **dict(learning_rate=1e-2), **kwargs})
    trainer = tf.Trainer(model, args, train_dataset=data, eval_dataset=eval_dataset, callbacks=[cb])
    trainer.remove_callback(tf.PrinterCallback)
    return trainer

def callback(**kwargs): return SparseTrainerCallback(**{**dict(sparsity=.8, seed=0), **dict(RigL_presets, batches_per_update=3), **kwargs})

def test_the_model_has_the_sparsity_asked_for_and_dead_weights_are_zero(tmp_path):
    model,cb = llama(),callback()
    trainer_of(model, tmp_path, cb).train()
    n,live = counts(model)
    t.test_eq(live, round(.2*n))
    assert dead_are_zero(model) and cb.saved['n_updates']>=2 and cb.engine is None

@pytest.mark.parametrize('kw', [dict(), dict(gradient_accumulation_steps=2), dict(bf16=True), dict(optim='sgd')])
def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path, kw):
    whole,part = llama(),llama()
    trainer_of(whole, tmp_path/'a', callback(), **kw).train()
    trainer_of(part, tmp_path/'a', callback(), **kw).train(resume_from_checkpoint=str(tmp_path/'a'/'checkpoint-6'))
    for (k,a),b in zip(whole.state_dict().items(), part.state_dict().values()): assert torch.equal(a, b), k

kinds = dict(masked=[], linear=['body.3.weight','body.6.weight'], conv=['body.0.weight'])

class ConvNet(nn.Module):
    "ParamRef, or with live weights in some layers"
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

@pytest.mark.parametrize('kind,n_acc,stops', [(k,2,(5,)) for k in kinds]+[pytest.param(k, n, range(n+1,6*n), marks=pytest.mark.full) for k in kinds for n in (1,2,3)])
def test_a_training_that_dies_at_any_batch_goes_on_bit_for_bit(kind, n_acc, stops, tmp_path):
    "Weights, masks, optimizer and engine, also of layers that compute with live weights only"
    g = torch.Generator().manual_seed(0)
    rows = [dict(x=torch.randn(2,4,4, generator=g), labels=torch.randn(4, generator=g)) for _ in range(48)]
    def run(folder, seed=0, die=None, resume=None):
        model,cb = ConvNet(kind, seed),callback(sparsity=None, seed=seed, batches_per_update=2, stop_pct=1.)
        trainer = trainer_of(model, tmp_path/folder, cb, rows, max_steps=6, save_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=n_acc)
        if die: trainer.add_callback(Die(die))
        trainer.train(resume_from_checkpoint=resume)
        return dict(model.state_dict()),trainer.optimizer.state_dict()['state'],cb.saved
    whole = run('whole')
    assert whole[2]['n_updates']>1
    for i in stops:
        with pytest.raises(MemoryError): run(str(i), die=i)
        assert agree(whole, run(str(i), 3, resume=True)), i

class Wide(nn.Module):
    "Its first layer is wide enough to live at batches of 64"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(256,512), nn.ReLU(), nn.Linear(512,10))
    def forward(self, x, labels): return dict(loss=nn.functional.cross_entropy(self.body(x), labels))

g = torch.Generator().manual_seed(0)
wide_rows = [dict(x=torch.randn(256, generator=g), labels=torch.randint(10, (), generator=g)) for _ in range(256)]

def look(engine, t): kinds_seen.append(type(handler_of(masked_params(engine.model)[0].p)))
kinds_seen = []

@pytest.mark.parametrize('settings', [dict(RigL_presets, batches_per_update=2), dict(method='gmp', batches_per_update=2, sparsity=.95)], ids=['rigl','gmp'])
def test_layers_go_live_by_the_rule_and_train_the_same_network(tmp_path, settings):
    "Bit for bit after a resume, and up to rounding as with masks; dense again in the end. Adam's first steps are all as long as the rate, so grown weights would tie"
    def run(folder, resume=None, **kwargs):
        kinds_seen.clear()
        cb,model = SparseTrainerCallback(**{**dict(sparsity=.9, seed=0, on_update=look), **settings, **kwargs}),Wide()
        trainer_of(model, tmp_path/folder, cb, wide_rows, per_device_train_batch_size=64, learning_rate=.1, optim='sgd').train(resume_from_checkpoint=resume)
        return model,cb,list(kinds_seen)
    (a,cb,seen),(b,off,never) = run('a'),run('b', sparse_compute=False)
    assert seen[-1] is LiveWeight and LiveWeight not in never and off.report is None and not cb.why_masked
    assert cb.report.plan=={'body.0.weight':'rows','body.2.weight':'dense'}
    c = run('a', str(tmp_path/'a'/'checkpoint-6'))[0]
    for (k,u),v,w in zip(a.state_dict().items(), b.state_dict().values(), c.state_dict().values()):
        assert u.shape==v.shape and torch.allclose(u.float(), v.float(), atol=1e-5) and u.equal(w), k
    assert dead_are_zero(a)

def test_an_interval_that_the_method_would_not_heed_is_refused():
    with pytest.raises(ValueError, match='pass updates= instead'): SparseTrainerCallback(sparsity=.8, method='cht', batches_per_update=3)

def test_plans_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match='call sparse_compute'): callback(sparse_compute=True)

@pytest.mark.parametrize('name', ['GMP_presets','ACDC_presets'])
def test_methods_that_start_dense_resume_too(tmp_path, name):
    import fastsparse.train.presets as methods
    preset = dict(getattr(methods, name))
    if name=='GMP_presets': preset['batches_per_update'] = 2
    whole,part = llama(),llama()
    make = lambda: SparseTrainerCallback(sparsity=.8, seed=0, **preset)
    trainer_of(whole, tmp_path/'a', make()).train()
    n,live = counts(whole)
    t.test_close(live/n, .2, eps=.01)
    trainer_of(part, tmp_path/'a', make()).train(resume_from_checkpoint=str(tmp_path/'a'/'checkpoint-6'))
    for (k,a),b in zip(whole.state_dict().items(), part.state_dict().values()): assert torch.equal(a, b), k

@pytest.mark.parametrize('name', ['gmp','acdc','granet'])
def test_a_method_by_name_that_starts_dense_ends_at_the_sparsity_asked_for(tmp_path, name):
    model = llama()
    trainer_of(model, tmp_path, SparseTrainerCallback(sparsity=.8, seed=0, method=name, batches_per_update=2) if name!='acdc' else
        SparseTrainerCallback(sparsity=.8, seed=0, method=name)).train()
    n,live = counts(model)
    t.test_close(live/n, .2, eps=.01)

def test_a_pretrained_model_starts_with_its_largest_weights(tmp_path):
    "`mask_init` and `structure` say which masks a dense model gets, as in `sparsify_model`"
    model,same = llama(),llama()
    sparsify_model(same, .5, 'erk', mask_init='magnitude', structure='2:4')
    trainer_of(model, tmp_path, SparseTrainerCallback(sparsity=.5, mask_init='magnitude', structure='2:4', method='set', batches_per_update=100))
    for a,b in zip(masked_params(model), masked_params(same)): assert torch.equal(a.mask, b.mask), a.name

def test_a_sparse_model_is_taken_as_it_is(tmp_path):
    model = llama()
    sparsify_model(model, .5, seed=1)
    before = counts(model)
    trainer_of(model, tmp_path, callback(sparsity=None)).train()
    t.test_eq(counts(model), before)

def test_one_callback_serves_trainers_of_dense_and_of_sparse_models(tmp_path):
    cb = callback(sparsity=.9, method='set')
    trainer_of(llama(), tmp_path, cb).train()
    model = llama()
    sparsify_model(model, .5, seed=1)
    trainer_of(model, tmp_path, cb).train()
    n,live = counts(model)
    t.test_close(live/n, .1, eps=.001)

class StopAt(tf.TrainerCallback):
    def __init__(self, at): self.at = at
    def on_step_end(self, args, state, control, **kwargs): control.should_training_stop = state.global_step==self.at

def test_a_training_that_ends_before_its_sparsity_says_so(tmp_path):
    "Stopped early, or put back to a checkpoint that was better"
    for name,end in (('gmp',True),('rigl',False)):
        trainer = trainer_of(llama(), tmp_path, SparseTrainerCallback(sparsity=.8, seed=0, method=name, batches_per_update=2))
        trainer.add_callback(StopAt(5))
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter('always')
            trainer.train()
        t.test_eq(any('training ended after 5 of 12 steps' in str(o.message) and 'instead of 0.800' in str(o.message) for o in w), end)
    best = trainer_of(llama(), tmp_path, SparseTrainerCallback(sparsity=.8, seed=0, method='gmp', batches_per_update=2), eval_dataset=ids,
        eval_strategy='steps', eval_steps=4, save_steps=4, load_best_model_at_end=True, metric_for_best_model='loss', greater_is_better=True, learning_rate=10.)
    with pytest.warns(UserWarning, match='instead of 0.800'): best.train()
    assert best.state.best_global_step<12

def test_a_checkpoint_without_the_engines_file_is_refused_by_name(tmp_path):
    trainer_of(llama(), tmp_path, callback()).train()
    (tmp_path/'checkpoint-6'/'sparse_engine.pt').unlink()
    with pytest.raises(ValueError, match='resume_from='): trainer_of(llama(), tmp_path, callback()).train(resume_from_checkpoint=str(tmp_path/'checkpoint-6'))

def test_the_log_holds_sparsity_and_updates(tmp_path):
    trainer = trainer_of(llama(), tmp_path, callback())
    trainer.train()
    first = trainer.state.log_history[0]
    t.test_close(first['sparsity'], .8, eps=1e-3)
    t.test_eq(first['topology_updates'], 1)

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

def lightning_fit(net, folder, cb, epochs=4, ckpt=None, extra=(), **kwargs):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    x = torch.randn(64,16, generator=torch.Generator().manual_seed(0))
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:,:4].argmax(1)), batch_size=16)
    trainer = L.Trainer(max_epochs=epochs, accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[cb, ModelCheckpoint(folder, filename='{epoch}', save_top_k=-1), *extra], **kwargs)
    trainer.fit(net, dl, ckpt_path=ckpt)
    return trainer

def lightning_callback(**kwargs): return SparseLightningCallback(**{**dict(sparsity=.8, seed=0), **dict(RigL_presets, batches_per_update=3), **kwargs})

@pytest.mark.filterwarnings('ignore')
def test_lightning_trains_to_the_sparsity_asked_for_and_resumes_bit_for_bit(tmp_path):
    whole,part,cb = lightning_net(),lightning_net(),lightning_callback()
    lightning_fit(whole, tmp_path/'a', cb)
    t.test_eq(counts(whole)[1], round(.2*counts(whole)[0]))
    assert dead_are_zero(whole) and cb.saved['n_updates']>=2
    lightning_fit(part, tmp_path/'b', lightning_callback(), ckpt=str(tmp_path/'a'/'epoch=1.ckpt'))
    for (k,a),b in zip(whole.state_dict().items(), part.state_dict().values()): assert torch.equal(a, b), k

@pytest.mark.filterwarnings('ignore')
def test_one_lightning_callback_serves_dense_and_sparse_modules(tmp_path):
    cb,net = lightning_callback(sparsity=.9, method='set'),lightning_net()
    lightning_fit(lightning_net(), tmp_path, cb)
    sparsify_model(net, .5, seed=1)
    lightning_fit(net, tmp_path, cb)
    n,live = counts(net)
    t.test_close(live/n, .1, eps=.002)

@pytest.mark.filterwarnings('ignore')
def test_lightning_modules_with_two_optimizers_are_refused_by_name(tmp_path):
    net = lightning_net()
    net.automatic_optimization = False
    net.configure_optimizers = lambda: [torch.optim.SGD(net.layers[0].parameters(), .1), torch.optim.SGD(net.layers[2].parameters(), .1)]
    with pytest.raises(ValueError, match='2 optimizers'): lightning_fit(net, tmp_path, lightning_callback())

def lightning_average(name, **kwargs):
    pytest.importorskip('lightning')
    import lightning.pytorch.callbacks as cbs
    return getattr(cbs, name)(**kwargs)

kinds_of_average = [('EMAWeightAveraging', dict(decay=.9)), ('EMAWeightAveraging', dict(decay=.9, use_buffers=False)), ('StochasticWeightAveraging', dict(swa_lrs=.01, swa_epoch_start=.3))]

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name,kwargs', kinds_of_average)
@pytest.mark.parametrize('first', [True,False])
def test_lightnings_averages_do_not_average_masks(tmp_path, name, kwargs, first):
    "The masks of the model that comes out are those of a training without averages; its file holds zeros where weights are dead"
    plain,net = lightning_net(),lightning_net()
    lightning_fit(plain, tmp_path/'a', lightning_callback(stop_pct=1.))
    average,cb = lightning_average(name, **kwargs),lightning_callback(stop_pct=1.)
    if not first: sparsify_model(net, .8, erdos_renyi_sparsity, seed=0)
    trainer = lightning_fit(net, tmp_path/'b', cb if first else average, extra=[average if first else cb], limit_val_batches=0)
    if name=='EMAWeightAveraging' and first:
        for (n,a),b in zip(plain.named_buffers(), net.buffers()): assert torch.equal(a, b), n
    t.test_eq(counts(net)[1], round(.2*counts(net)[0]))
    state = torch.load(tmp_path/'b'/'epoch=3.ckpt', weights_only=False)['state_dict']
    for o in masked_params(net): assert not state[o.name][~state[f'{o.name}_mask']].any() and int(state[f'{o.name}_mask'].sum())==int(o.mask.sum())
    trainer.save_checkpoint(tmp_path/'end.ckpt')
    assert dead_are_zero(net)
    for o,(*_,s) in zip(masked_params(net), sparse_params(net)): t.test_close(s, 1-o.mask.float().mean().item(), 1e-6)

@pytest.mark.filterwarnings('ignore')
def test_a_module_that_took_an_average_of_many_masks_is_as_sparse_as_its_own():
    "Lightning's average is written into it after the last epoch, with weights that were live before; `layers` is called without the module"
    import tempfile
    net = lightning_net()
    with tempfile.TemporaryDirectory() as d:
        lightning_fit(net, d, lightning_callback(method='gmp', batches_per_update=2), extra=[lightning_average('StochasticWeightAveraging', swa_lrs=.01, swa_epoch_start=.3)])
    assert dead_are_zero(net)

@pytest.mark.filterwarnings('ignore')
def test_lightning_says_that_a_training_with_steps_of_its_own_ended_before_its_sparsity(tmp_path):
    "Lightning counts batches where a module steps by itself"
    net = lightning_net()
    net.automatic_optimization = False
    def training_step(batch, batch_idx):
        opt = net.optimizers()
        net.manual_backward(nn.functional.cross_entropy(net.layers(batch[0]), batch[1]))
        if batch_idx%2: opt.step()
        if batch_idx%2: opt.zero_grad()
    net.training_step = training_step
    with pytest.warns(UserWarning, match='training ended after 8 of 16 steps'): lightning_fit(net, tmp_path, lightning_callback(method='gmp', batches_per_update=2))

@pytest.mark.filterwarnings('ignore')
def test_an_average_of_a_dense_model_is_refused(tmp_path):
    "It was copied before there were masks"
    average = lightning_average('EMAWeightAveraging')
    with pytest.raises(ValueError, match='put SparseLightningCallback before it'): lightning_fit(lightning_net(), tmp_path, average, extra=[lightning_callback()])

def engine_with(log):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16,64), nn.ReLU(), nn.Linear(64,4))
    sparsify_model(net, .8, seed=0)
    opt = torch.optim.SGD(net.parameters(), .1)
    e = DynamicSparseTraining(net, opt, 20, **dict(RigL_presets, batches_per_update=5), on_update=log)
    x = torch.randn(16,16)
    for _ in range(20):
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    return e

def test_tensorboard_files_hold_each_update(tmp_path):
    tb = pytest.importorskip('torch.utils.tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    w = tb.SummaryWriter(tmp_path)
    engine_with(log_updates(w, layers=True))
    w.close()
    acc = EventAccumulator(str(tmp_path))
    acc.Reload()
    t.test_eq([(o.step, o.value) for o in acc.Scalars('sparse/updates')], [(5,1.),(10,2.)])
    t.test_close(acc.Scalars('sparse/density/0.weight')[0].value, .2, eps=.01)

def test_mlflow_holds_each_update(tmp_path):
    mlflow = pytest.importorskip('mlflow')
    mlflow.set_tracking_uri(f'sqlite:///{tmp_path}/db')
    with mlflow.start_run() as run: engine_with(log_updates(mlflow))
    got = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, 'sparse/updates')
    t.test_eq([(o.step, o.value) for o in got], [(5,1.),(10,2.)])

def test_wandb_offline_takes_each_update(tmp_path, monkeypatch):
    wandb = pytest.importorskip('wandb')
    run = wandb.init(mode='offline', dir=str(tmp_path), project='p', settings=wandb.Settings(silent=True))
    engine_with(log_updates(run))
    t.test_eq(run.summary['sparse/updates'], 2)
    run.finish()

# ---- What transformers wrote comes back, and its architectures train

def _gpt2(tie=True): return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tie))
def _mixtral(): return tf.MixtralForCausalLM(tf.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
def _bert(): return tf.BertForMaskedLM(tf.BertConfig(**small))
def _t5(): return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0))
def _vit():
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4))

pictures = [dict(pixel_values=torch.randn(3,8,8, generator=torch.Generator().manual_seed(i)), labels=torch.tensor(i%4)) for i in range(32)]
architectures = dict(gpt2=_gpt2, llama=llama, mixtral=_mixtral, bert=_bert, t5=_t5, vit=_vit)
full = pytest.mark.full

@pytest.mark.parametrize('name', ['gpt2', 'mixtral', *[pytest.param(o, marks=full) for o in ('llama','bert','t5','vit')]])
def test_architectures_train_come_back_from_their_folder_and_export(tmp_path, name):
    "The whole model has the sparsity asked for; `restore_sparse` gives equal outputs from what `save_pretrained` wrote; a plain copy too"
    torch.manual_seed(0)
    make,data = architectures[name],pictures if name=='vit' else ids
    model = make()
    trainer_of(model, tmp_path/'run', callback(sparsify=dict(also=['*experts*']) if name=='mixtral' else {}), data, max_steps=8, save_steps=100).train()
    n,live = counts(model)
    t.test_eq(live, round(.2*n))
    assert dead_are_zero(model)
    model.save_pretrained(tmp_path/'saved')
    torch.manual_seed(1)
    other = make()
    restore_sparse(other, tmp_path/'saved')
    t.test_eq(counts(other), (n,live))
    batch = {k:v[None] for k,v in data[0].items()}
    with torch.no_grad():
        want = model.eval()(**batch).logits
        assert torch.equal(other.eval()(**batch).logits, want) and torch.equal(plain_copy(model)(**batch).logits, want)

def test_what_is_no_folder_of_a_saved_model_is_named(tmp_path):
    "Nothing is changed by then"
    model = llama()
    with pytest.raises(ValueError, match='no model.safetensors'): restore_sparse(model, tmp_path)
    (tmp_path/'model.safetensors').write_bytes(b'no tensors')
    with pytest.raises(ValueError, match='is damaged, or no file of safetensors'): restore_sparse(model, str(tmp_path))
    assert not masked_params(model)

def test_models_in_several_files_come_back(tmp_path):
    model = llama()
    sparsify_model(model, .8, seed=0)
    model.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('*.safetensors')))>1
    other = llama()
    restore_sparse(other, tmp_path)
    for (k,a),b in zip(model.state_dict().items(), other.state_dict().values()): assert torch.equal(a, b), k

@pytest.mark.parametrize('make', [
    lambda: pytest.importorskip('timm').create_model('resnet10t', num_classes=4), lambda: __import__('torchvision').models.mobilenet_v2(num_classes=4)], ids=['timm','torchvision'])
def test_models_of_timm_and_torchvision_need_nothing(make):
    torch.manual_seed(0)
    model = make()
    sparsify_model(model, .8, seed=0)
    n,live = counts(model)
    assert abs(live-.2*n)<=len(masked_params(model))
    opt = torch.optim.SGD(model.parameters(), lr=.01)
    engine = DynamicSparseTraining(model, opt, 4, **RigL_presets(batches_per_update=2, stop_pct=1.))
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2,3,32,32)).square().mean().backward()
        opt.step()
    engine.remove()
    assert dead_are_zero(model) and counts(model)==(n,live) and engine.n_updates>0

def test_a_delta_says_when_the_base_had_no_masks(tmp_path):
    "Writing one from a state that was copied before `keep_zeros`, and reading one into a model without masks"
    from fastsparse.prune.finetune import keep_zeros,load_delta,save_delta
    def pruned():
        m = nn.Linear(8,8)
        nn.init.ones_(m.weight)
        with torch.no_grad(): m.weight[::2] = 0
        nn.init.zeros_(m.bias)
        return m
    base,bare = pruned(),pruned().state_dict()
    keep_zeros(base)
    before = {k:v.clone() for k,v in base.state_dict().items()}
    with torch.no_grad(): base.bias += 1
    with pytest.raises(ValueError, match='weight_mask.*with the masks of keep_zeros'): save_delta(base, bare, tmp_path/'a')
    assert not (tmp_path/'a').exists()
    path,new = save_delta(base, before, tmp_path/'a'),pruned()
    with pytest.raises(ValueError, match='with its masks'): load_delta(new, path)
    keep_zeros(new)
    load_delta(new, path)
    assert new.bias.equal(base.bias) and new.weight.equal(base.weight)

def test_a_delta_reaches_weights_in_another_order_of_memory(tmp_path):
    from fastsparse.prune.finetune import load_delta,save_delta
    def make():
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3,8,1), nn.Conv2d(8,4,3)).to(memory_format=torch.channels_last)
        sparsify_model(m, .5, seed=0)
        return m
    base,tuned = make(),make()
    with torch.no_grad():
        for o in masked_params(tuned): o.p.add_(o.mask*.1)
    path = save_delta(tuned, {k:v.clone() for k,v in base.state_dict().items()}, tmp_path/'a')
    load_delta(base, path)
    assert all(a.equal(b) for a,b in zip(base.state_dict().values(), tuned.state_dict().values()))

def test_a_delta_reaches_live_weights_too(tmp_path):
    from fastsparse.prune.finetune import load_delta,save_delta
    def make():
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(6,16), nn.Tanh(), nn.Linear(16,3))
        sparsify_model(m, .7, seed=0)
        return m
    tuned,live = make(),make()
    with torch.no_grad():
        for o in masked_params(tuned): o.p.mul_(2)
    path = save_delta(tuned, make().state_dict(), tmp_path/'a')
    sparse_compute(live, None, plan={'0.weight':'rows', '2.weight':'rows'})
    load_delta(live, path)
    for (k,u),v in zip(tuned.state_dict().items(), live.state_dict().values()): assert u.equal(v), k

@pytest.mark.parametrize('odd', [-torch.inf,torch.nan])
def test_a_delta_knows_its_base_beside_numbers_that_are_not_finite(odd, tmp_path):
    "A buffer of a causal mask, full of -inf, hid that a base was another, and one with NaN refused its own"
    from fastsparse.prune.finetune import load_delta,save_delta
    def made(seed):
        torch.manual_seed(seed)
        m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,3))
        m.register_buffer('causal', torch.full((4,4), odd).triu(1))
        sparsify_model(m, .5, seed=0)
        return m
    tuned,base,other = made(0),made(0),made(1)
    with torch.no_grad(): tuned[0].bias += 1
    save_delta(tuned, made(0).state_dict(), tmp_path/'a')
    with pytest.raises(ValueError, match='another base'): load_delta(other, tmp_path/'a')
    load_delta(base, tmp_path/'a')
    for (k,u),v in zip(tuned.state_dict().items(), base.state_dict().values()): assert torch.equal(u.nan_to_num(), v.nan_to_num()), k
