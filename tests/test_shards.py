"A model on disk, pruned block by block, beside the same call on the model in memory"
import copy,gc,pytest,subprocess,sys,tempfile,torch
from fastsparse.all import *
from fastsparse.prune.shards import open_model
from helpers import *
from test_experts import small

tf = pytest.importorskip('transformers')
st = pytest.importorskip('safetensors.torch')
quick = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)

def _llama(): return tf.LlamaForCausalLM(tf.LlamaConfig(**quick, num_key_value_heads=1, tie_word_embeddings=True))
def _bert(): return tf.BertForMaskedLM(tf.BertConfig(**quick))
def _gpt2(): return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2))
def _gpt_oss(): return tf.GptOssForCausalLM(tf.GptOssConfig(**small, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4))
def _vit():
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, image_size=8, patch_size=4))

def texts(n=3): return [dict(input_ids=torch.randint(64, (4,12), generator=torch.Generator().manual_seed(i))) for i in range(n)]
def images(n=3): return [dict(pixel_values=torch.randn(4,3,8,8, generator=torch.Generator().manual_seed(i))) for i in range(n)]

def on_disk(make, folder, **kwargs):
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(folder, **kwargs)
    return model

def read(folder, model):
    "What `from_pretrained` reads"
    return type(model).from_pretrained(folder).eval()

@pytest.mark.parametrize('f', [prune_wanda, prune_sparsegpt, prune_refit])
@pytest.mark.parametrize('make,also,exclude', [(_llama,None,None), (_bert,None,'cls*'), (_gpt2,None,None), (_gpt_oss,'*experts*_proj','lm_head*'),
    (_vit,None,['*embeddings*','classifier*'])])
def test_the_folder_holds_what_memory_would(f, make, also, exclude, tmp_path):
    "Equal zeros and weights, in one file or in several; the model in the first folder is as it was"
    model,data = on_disk(make, tmp_path/'dense', max_shard_size='8KB'),images() if make is _vit else texts()
    f(copied := copy.deepcopy(model), '2:4', data, also=also, exclude=exclude)
    assert f(tmp_path/'dense', '2:4', data, also=also, exclude=exclude, to=tmp_path/'new')==tmp_path/'new'
    got = dict(read(tmp_path/'new', model).named_parameters())
    for n,p in copied.named_parameters(): assert torch.allclose(got[n], p, atol=1e-4) and (got[n]==0).equal(p==0), n
    assert all(torch.equal(p, model.get_parameter(n)) for n,p in read(tmp_path/'dense', model).named_parameters())
    assert all(o.is_file() for o in (tmp_path/'dense').iterdir())
    assert not (tmp_path/'new'/'pruning.json').exists()

@pytest.mark.parametrize('f', [prune_sparsegpt, prune_refit])
def test_a_call_that_was_stopped_goes_on(f, tmp_path, monkeypatch):
    "Written blocks aren't pruned again, and the folder is that of one call"
    from fastsparse.prune import layerwise
    on_disk(_llama, tmp_path/'dense')
    f(tmp_path/'dense', .5, texts(), to=tmp_path/'whole')
    solved,real = [],layerwise.layers_in_order
    def until(n):
        def _f(*args):
            for o in real(*args):
                solved.append(o[0].name)
                if len(solved)==n: raise KeyboardInterrupt
                yield o
        return _f
    monkeypatch.setattr(layerwise, 'layers_in_order', until(10))  # each block has 7: stopped in the second
    with pytest.raises(KeyboardInterrupt): f(tmp_path/'dense', .5, texts(), to=tmp_path/'new')
    with pytest.raises(ValueError, match="new' was begun as .*0.5.*, and this is .*0.6"): f(tmp_path/'dense', .6, texts(), to=tmp_path/'new')
    with pytest.raises(ValueError, match='was begun as .*batches'): f(tmp_path/'dense', .5, texts(2), to=tmp_path/'new')
    monkeypatch.setattr(layerwise, 'layers_in_order', until(100))
    solved.clear()
    f(tmp_path/'dense', .5, texts(), to=tmp_path/'new')
    assert len(solved)==14 and not any('layers.0.' in n for n in solved)
    assert sorted(o.name for o in (tmp_path/'new').iterdir())==sorted(o.name for o in (tmp_path/'whole').iterdir())
    for file in (tmp_path/'whole').glob('*.safetensors'):
        a,b = st.load_file(file),st.load_file(tmp_path/'new'/file.name)
        assert a.keys()==b.keys() and all(a[k].equal(b[k]) for k in a)

@pytest.mark.parametrize('how', ['disk','cpu','mixed'])
def test_a_model_that_accelerate_offloads(how, tmp_path):
    "The same call with device_map; the model in the call stays dense, and still computes"
    model,data = on_disk(_llama, tmp_path/'dense'),texts()
    where = dict.fromkeys(['model.embed_tokens','model.rotary_emb','model.norm','lm_head',*[f'model.layers.{i}' for i in range(3)]], 'cpu')
    if how!='cpu': where |= {f'model.layers.{i}':'disk' for i in range(3) if how=='disk' or i!=1}
    loaded = type(model).from_pretrained(tmp_path/'dense', device_map=where, offload_folder=tmp_path/'off')
    with torch.no_grad(): want = loaded(**data[0]).logits
    if how!='cpu':
        with pytest.raises(ValueError, match='pass to='): prune_wanda(loaded, .5, data)
    prune_wanda(loaded, .5, data, to=tmp_path/'new')
    with torch.no_grad(): assert loaded(**data[0]).logits.equal(want)
    prune_wanda(model, .5, data)
    got = read(tmp_path/'new', model)
    assert all(p.equal(model.get_parameter(n)) for n,p in got.named_parameters())
    load_sparse(got, tmp_path/'new')
    assert all(o.mask.equal(model.get_buffer(f'{o.name}_mask')) for o in masked_params(got))

def test_what_is_refused(tmp_path):
    "A folder that isn't empty, one without a model, data that can't be read twice, and a block that sees more than the one before"
    model,data = on_disk(_llama, tmp_path/'dense'),texts()
    (tmp_path/'full').mkdir()
    (tmp_path/'full'/'mine.txt').write_text('mine')
    for to in (tmp_path/'full', tmp_path/'dense'):
        with pytest.raises(ValueError, match="isn't empty, and is no run that was stopped"): prune_wanda(tmp_path/'dense', .5, data, to=to)
    with pytest.raises(ValueError, match='data is a function'): prune_wanda(tmp_path/'dense', .5, lambda m: m(**data[0]), to=tmp_path/'new')
    with pytest.raises(ValueError, match='to= ?|pass to='): prune_wanda(tmp_path/'dense', .5, data)
    skip = type(model).from_pretrained(tmp_path/'dense')
    first,last = skip.model.layers[0],skip.model.layers[2]
    first.register_forward_hook(lambda m,args,out: setattr(skip, 'seen', out))
    last.register_forward_pre_hook(lambda m,args: (args[0]+skip.seen, *args[1:]))
    with pytest.raises(ValueError, match='a block reads more than'): prune_wanda(skip, .5, data, to=tmp_path/'skip')

@pytest.mark.parametrize('f', [prune_wanda, prune_refit])
def test_half_precision_stays(f, tmp_path):
    "Files keep their dtype, and zeros are exact"
    torch.manual_seed(0)
    _llama().to(torch.bfloat16).save_pretrained(tmp_path/'dense')
    f(tmp_path/'dense', '2:4', texts(), to=tmp_path/'new')
    got = tf.LlamaForCausalLM.from_pretrained(tmp_path/'new', dtype='auto')
    assert got.dtype==torch.bfloat16
    assert all((p==0).float().mean()==.5 for n,p in got.named_parameters() if '_proj' in n)

def stopped(monkeypatch, n, f, *args, **kwargs):
    "The call `f`, stopped before block `n` is written"
    from fastsparse.prune import shards
    real,written = shards._write,[]
    def until(file, *rest):
        written.append(file)
        if len(written)>n: raise KeyboardInterrupt
        real(file, *rest)
    with monkeypatch.context() as c:
        c.setattr(shards, '_write', until)
        with pytest.raises(KeyboardInterrupt): f(*args, **kwargs)
    return written[:n]

def other(folder, change):
    "The model of `on_disk`, changed"
    torch.manual_seed(0)
    model = _llama().eval()
    with torch.no_grad(): change(model)
    model.save_pretrained(folder)
    return folder

others = dict(embedding=lambda m: m.model.embed_tokens.weight.mul_(1.01), first=lambda m: m.model.layers[0].mlp.up_proj.weight[0,0].add_(.01),
    second=lambda m: m.model.layers[1].mlp.up_proj.weight[0,0].add_(.01))

@pytest.mark.parametrize('change', others)
def test_a_folder_knows_its_model(change, tmp_path, monkeypatch):
    "Another model of the same shapes doesn't continue it, wherever the two differ in what was read; the first one does, and nothing of the other is there"
    on_disk(_llama, tmp_path/'A')
    b,data = other(tmp_path/'B', others[change]),texts()
    prune_refit(tmp_path/'A', .5, data, to=tmp_path/'whole')
    done = stopped(monkeypatch, 2, prune_refit, tmp_path/'A', .5, data, to=tmp_path/'new')
    before = {o.name:o.read_bytes() for o in done}
    with pytest.raises(ValueError, match="new' was begun as .*model|was made of another model"): prune_refit(b, .5, data, to=tmp_path/'new')
    assert all((tmp_path/'new'/k).read_bytes()==v for k,v in before.items())
    prune_refit(tmp_path/'A', .5, data, to=tmp_path/'new')
    assert sorted(o.name for o in (tmp_path/'new').iterdir())==sorted(o.name for o in (tmp_path/'whole').iterdir())
    a,b = [{n:t for o in (tmp_path/k).glob('*.safetensors') for n,t in st.load_file(o).items()} for k in ('new','whole')]
    assert a.keys()==b.keys() and all(a[k].equal(b[k]) for k in a)

def test_another_number_of_layers_is_another_model(tmp_path, monkeypatch):
    on_disk(_llama, tmp_path/'A')
    tf.LlamaForCausalLM(tf.LlamaConfig(**quick|dict(num_hidden_layers=4), num_key_value_heads=1, tie_word_embeddings=True)).save_pretrained(tmp_path/'B')
    stopped(monkeypatch, 2, prune_wanda, tmp_path/'A', .5, texts(), to=tmp_path/'new')
    with pytest.raises(ValueError, match="new' was begun as .*model"): prune_wanda(tmp_path/'B', .5, texts(), to=tmp_path/'new')

def flip(b): return b[:-9]+bytes([b[-9]^1])+b[-8:]

@pytest.mark.parametrize('change', [lambda b: b[:-9], flip, lambda b: b''])
def test_what_was_written_is_checked(change, tmp_path, monkeypatch):
    "A block that is cut or has another bit is named by its file, and so is a stray file that transformers would read"
    on_disk(_llama, tmp_path/'dense')
    def call(): return prune_wanda(tmp_path/'dense', .5, texts(), to=tmp_path/'new')
    _,file = stopped(monkeypatch, 2, prune_wanda, tmp_path/'dense', .5, texts(), to=tmp_path/'new')
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    with pytest.raises(ValueError, match=f"{file.name}.*is damaged"): call()
    file.write_bytes(whole)
    st.save_file({'a':torch.ones(2)}, tmp_path/'new'/'model.safetensors')
    with pytest.raises(ValueError, match="model.safetensors' is no file of this run"): call()
    (tmp_path/'new'/'model.safetensors').unlink()
    call()
    written = sorted((tmp_path/'new').glob('*.safetensors'))[0]
    written.write_bytes(flip(written.read_bytes()))
    with pytest.raises(ValueError, match=f"{written.name}.*is damaged"): load_sparse(_llama(), tmp_path/'new')

def test_one_process_a_folder(tmp_path):
    "Another one is refused with the number of the first; a process that was killed holds nothing"
    fcntl = pytest.importorskip('fcntl')
    on_disk(_llama, tmp_path/'dense')
    (tmp_path/'new').mkdir()
    code = "import sys,time; from pathlib import Path; from fastsparse.save.disk import alone_in\nwith alone_in(Path(sys.argv[1])): print('held', flush=True); time.sleep(900)"
    p = subprocess.Popen([sys.executable, '-c', code, str(tmp_path/'new')], stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline()=='held\n'
        with pytest.raises(ValueError, match=f"new' is being written by process {p.pid}: wait"):
            prune_wanda(tmp_path/'dense', .5, texts(), to=tmp_path/'new')
        assert [o.name for o in (tmp_path/'new').iterdir()]==['.lock']
    finally: p.kill(), p.wait()
    prune_wanda(tmp_path/'dense', .5, texts(), to=tmp_path/'new')
    assert not (tmp_path/'new'/'.lock').exists()

def test_what_stays_dense_on_disk_is_told(tmp_path):
    "An embedding has no inputs that a product multiplies"
    on_disk(_llama, tmp_path/'dense')
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight can't be pruned by inputs, and stay dense"):
        prune_wanda(tmp_path/'dense', .5, texts(), to=tmp_path/'new', also='*embed_tokens.weight')

def test_the_copy_on_disk_goes_with_its_model(tmp_path, monkeypatch):
    on_disk(_vit, tmp_path/'dense')
    (own := tmp_path/'own').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(own))
    model = open_model(tmp_path/'dense')
    assert [*own.iterdir()]
    del model
    gc.collect()
    assert not [*own.iterdir()]

def test_a_folder_that_is_not_there_is_not_looked_for_elsewhere(tmp_path, monkeypatch):
    "Nobody asks the hub; and a file of the model that is cut is named"
    monkeypatch.setattr(tf.AutoConfig, 'from_pretrained', lambda *args, **kwargs: pytest.fail('asked'))
    for name in (tmp_path/'no', 'no_folder', 'meta-llama/Llama-3.2-1B'):
        with pytest.raises(ValueError, match=f"'{name}' is no folder"): prune_wanda(name, .5, texts(), to=tmp_path/'new')
    monkeypatch.undo()
    on_disk(_llama, tmp_path/'dense')
    file = tmp_path/'dense'/'model.safetensors'
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="model.safetensors' is damaged"): prune_wanda(tmp_path/'dense', .5, texts(), to=tmp_path/'new')
    assert not (tmp_path/'new').exists()
