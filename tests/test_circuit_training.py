"Training on your own ids: what data may be, other modules, resuming, bfloat16, and sharing"
import math,pytest,torch
from fastsparse.circuits import *
from fastsparse.circuits.train import lm_loss,valid_loss
from torch import nn

def text(n, seed=0, length=13, n_tokens=20):
    "Rows in which each token is followed by the next number, or by 0 after the last"
    start = torch.randint(n_tokens, (n,1), generator=torch.Generator().manual_seed(seed))
    return (start+torch.arange(length))%n_tokens

train,valid,small = text(200),text(40, 1),dict(d=16, n_layers=1, d_head=8, vocab=20, density=1/4, batch_size=8, every=4, progress=False)
def same(a, b): return all(p.equal(q) for p,q in zip(a.model.parameters(), b.model.parameters(), strict=True))

def test_a_decoder_takes_its_length_from_the_data_and_its_tokens_from_you():
    t = train_decoder('rigl', (train,valid), 200, **small)
    assert t.model.context==12 and t.model.vocab[19]=='19' and t.model(train[:2,:-1]).shape==(2,12,20)
    assert t.valid_loss<1.5<math.log(20) and t.valid_loss==pytest.approx(valid_loss(t.model, valid))

def test_a_token_that_the_decoder_has_not_is_refused():
    with pytest.raises(ValueError, match='a token 19, and the decoder has 5 tokens: pass vocab='): train_decoder('dense', train, 2, **{**small, 'vocab':5})

def test_ids_alone_train_without_a_validation_loss(): assert math.isnan(train_decoder('dense', train, 2, **small).valid_loss)

@pytest.mark.parametrize('method', ['dense','rigl'])
def test_a_function_and_an_iterable_give_the_batches(method):
    "Both train the same network, and rows of each batch are seen in order"
    seen = []
    def batch(i):
        seen.append(i)
        return text(8, 100+i)
    one = train_decoder(method, (batch,valid), 10, **small)
    first = method!='dense'  # RigL measures the signal of its first masks with one batch
    assert seen==list(range(10+first))
    two = train_decoder(method, ((text(8, 100+i) for i in range(30)),valid), 10, **small)
    assert same(one, two)

def test_batches_begin_again(tmp_path):
    "A list of three batches, a function that yields them, and a loader of tuples give the first again after the third; an iterator ends"
    def batches():
        for i in range(3): yield text(8, 100+i)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat([*batches()])), 8)
    want = train_decoder('dense', (lambda i: text(8, 100+i%3),valid), 7, **small)
    for o in ([*batches()],batches,loader): assert same(want, train_decoder('dense', (o,valid), 7, **small))
    with pytest.raises(ValueError, match='no more batches after 3: give a list'): train_decoder('dense', (batches(),valid), 7, **small)

class Stop(Exception): pass

@pytest.mark.parametrize('method', ['dense','recipe','set','rigl'])
@pytest.mark.parametrize('kind', ['tensor','function','iterable'])
def test_a_run_that_was_stopped_resumes_bit_for_bit(method, kind, tmp_path):
    def batches(end):
        for i in range(100):
            if i==end: raise Stop
            yield text(8, 100+i)
    def data(end=None):
        def f(i):
            if i==end: raise Stop
            return text(8, 100+i)
        return (dict(function=f, iterable=batches(end), tensor=train)[kind],valid)
    whole = train_decoder(method, data(), 30, **small)
    args = dict(small, file=tmp_path/'run.pt', save_every=11)
    if kind=='tensor':  # the file of step 22 is as good as that of a run that was stopped
        import fastsparse.circuits.train as m
        before,m.lm_loss = m.lm_loss,stopping(m.lm_loss, 25)
        try:
            with pytest.raises(Stop): train_decoder(method, data(), 30, **args)
        finally: m.lm_loss = before
    else:
        with pytest.raises(Stop): train_decoder(method, data(25), 30, **args)
    torch.rand(7)
    again = train_decoder(method, data(), 30, **args)
    assert same(whole, again) and again.valid_loss==whole.valid_loss and again.live_weights==whole.live_weights

def stopping(f, n):
    count = iter(range(n))
    def g(*args):
        if next(count, None) is None: raise Stop
        return f(*args)
    return g

def test_a_run_that_has_ended_is_read_and_other_settings_are_refused(tmp_path):
    args = dict(small, file=tmp_path/'run.pt')
    one = train_decoder('rigl', (train,valid), 12, **args)
    assert same(one, train_decoder('rigl', (train,valid), 12, **args))
    with pytest.raises(ValueError, match='of a run with n_steps=12, and this has 13'): train_decoder('rigl', (train,valid), 13, **args)

class Recurrent(nn.Module):
    "A module of another kind, whose output has `logits`, with dropout"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.drop = nn.Embedding(20, 16),nn.GRU(16, 16, batch_first=True),nn.Dropout(.1)
        self.hidden,self.head = nn.Linear(16, 32),nn.Linear(32, 20)

    def forward(self, x):
        class Out: logits = self.head(self.drop(self.hidden(self.rnn(self.emb(x))[0]).relu()))
        return Out

@pytest.mark.parametrize('method', ['dense','recipe','set','rigl'])
def test_any_module_trains_and_resumes(method, tmp_path):
    def new():
        torch.manual_seed(3)
        return Recurrent()
    args = {k:v for k,v in small.items() if k not in ('d','n_layers','d_head','vocab')}
    t = train_decoder(method, (train,valid), 30, model=new(), **args)
    n = sum(p.numel() for p in t.model.parameters() if p.ndim>1)
    assert t.valid_loss<3.1 and (t.live_weights==n if method=='dense' else n/4-8<=t.live_weights<=n/4+8)
    def stopped(i):
        if i==25: raise Stop
        return text(8, 100+i)
    def batch(i): return text(8, 100+i)
    whole,args = train_decoder(method, (batch,valid), 30, model=new(), **args),dict(args, file=tmp_path/'run.pt', save_every=10)
    with pytest.raises(Stop): train_decoder(method, (stopped,valid), 30, model=new(), **args)
    assert same(whole, train_decoder(method, (batch,valid), 30, model=new(), **args))
    with pytest.raises(TypeError, match='the model is a Recurrent'): t.save(tmp_path/'m.pt')

@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA')])])
@pytest.mark.parametrize('method', ['dense','recipe','set','rigl'])
def test_bfloat16_learns_as_well_and_leaves_float_weights(method, device, tmp_path):
    "Linear layers compute in bfloat16, and loss, weights and optimizer stay in float; it resumes too"
    kinds = set()
    args = dict(small, device=device, bf16=True, file=tmp_path/'run.pt', save_every=60)
    t = train_decoder(method, (train,valid), 120, **args)
    f = train_decoder(method, (train,valid), 120, **small)
    assert {p.dtype for p in t.model.parameters()}=={torch.float32} and next(t.model.parameters()).device.type=='cpu'
    assert abs(t.valid_loss-f.valid_loss)<.3 and not same(t, f) and t.valid_loss<2.5
    t.model.blocks[0].q.register_forward_hook(lambda m, x, y: kinds.add(y.dtype))
    with torch.autocast('cpu', torch.bfloat16): assert lm_loss(t.model, valid).dtype==torch.float32
    assert kinds=={torch.bfloat16}
    assert same(t, train_decoder(method, (train,valid), 120, **args))

def test_a_rate_is_that_of_the_run():
    assert not same(*(train_decoder('dense', (train,valid), 5, lr=lr, **small) for lr in (None,1e-4)))
    assert same(*(train_decoder('dense', (train,valid), 5, lr=lr, **small) for lr in (None,3e-3)))
    assert not same(*(train_decoder('recipe', (train,valid), 8, anneal=o, **small) for o in (.5,.8)))

def test_a_trained_decoder_is_shared_as_a_folder(tmp_path):
    words = [f'w{i}' for i in range(20)]
    t = train_decoder('rigl', (train,valid), 12, **{**small, 'vocab':words, 'density':1/16})
    t.save_pretrained(tmp_path/'mine')
    again = Trained.from_pretrained(tmp_path/'mine')
    assert same(t, again) and again.model.vocab==words and again.valid_loss==t.valid_loss and not again.model.training
    assert 'rigl' in (tmp_path/'mine/README.md').read_text()

def test_few_live_weights_make_a_small_file(tmp_path):
    model = Decoder(d=128, vocab=20)
    for p in model.matrices().values(): keep_largest_(p.data, 1/64)
    Trained(model, 'rigl', 0, 1., 1.).save(tmp_path/'m.pt')
    assert (tmp_path/'m.pt').stat().st_size<.15*4*sum(p.numel() for p in model.parameters())
    assert all(a.equal(b) for a,b in zip(model.parameters(), Trained.load(tmp_path/'m.pt').model.parameters()))

def test_push_and_from_pretrained_use_the_hub(tmp_path, monkeypatch):
    "The hub here is a folder"
    hub = pytest.importorskip('huggingface_hub')
    import shutil
    class Api:
        def __init__(self, token=None): pass
        def create_repo(self, repo_id, private=None, exist_ok=False): (tmp_path/repo_id).mkdir(parents=True)
        def upload_folder(self, repo_id, folder_path): shutil.copytree(folder_path, tmp_path/repo_id, dirs_exist_ok=True)
    monkeypatch.setattr(hub, 'HfApi', Api)
    monkeypatch.setattr(hub, 'hf_hub_download', lambda repo_id, filename, **kw: str(tmp_path/repo_id/filename))
    t = train_decoder('dense', (train,valid), 2, **small)
    t.push_to_hub('me/mine')
    assert same(t, Trained.from_pretrained('me/mine'))

def test_without_the_package_the_error_names_it(monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    t = Trained(Decoder(d=16, n_layers=1), 'dense', 0, 1., 1.)
    for f in (lambda: t.push_to_hub('me/mine'), lambda: Trained.from_pretrained('me/mine')):
        with pytest.raises(ImportError, match='huggingface_hub'): f()

def test_pictures_name_the_tokens_of_the_decoder(tmp_path):
    words = ['a','b',' c','\n',"'",'"',*(f'w{i}' for i in range(14))]
    assert show_tokens([0,2,3], words)=='a c⏎'
    torch.manual_seed(0)
    model = Decoder(d=16, n_layers=1, vocab=words, context=12)
    channel = torch.arange(16)==3
    nodes = {'at.emb':[3], 'at.read':[3]}
    means = node_means(model, model.nodes, train[:20,:-1])
    masks = {**{k:channel if k in nodes else torch.zeros_like(v, dtype=torch.bool) for k,v in means.items()}, 'head':torch.arange(20)==4}
    c = Circuit('end', nodes, edges_of(masks, model.links()), means, (1.,0.), .1, 1., 2.)
    found = node_words(model, c, train)
    assert {o[1] for o in found['at.emb',3]}<={*words}|{'⏎'}
    assert '>&#x27;</text>' in draw_circuit(model, c, found)
    assert '&#x27;' in circuit_page(model, [c], tmp_path/'p.html', words={'end':found}).read_text()

@pytest.mark.parametrize('kind', [torch.uint8, torch.int32, 'numpy'])
def test_ids_of_any_whole_numbers_train_the_same(kind):
    one,two = [(o.numpy(),v.numpy()) if kind=='numpy' else (o.to(kind),v.to(kind)) if kind else (o,v) for kind,o,v in ((None,train,valid), (kind,train,valid))]
    assert same(train_decoder('rigl', one, 5, **small), train_decoder('rigl', two, 5, **small))

@pytest.mark.parametrize('kw,text', [
    (dict(method='RigL'), "method is 'RigL', and must be one of 'dense', 'recipe', 'set', 'rigl'"), (dict(density=0), r'density is 0, and must lie in \(0,1\]'),
    (dict(density=math.nan), 'density is nan'), (dict(n_steps=0), 'n_steps is 0'),
    (dict(file='x.pt', save_every=0), 'save_every is 0'), (dict(batch_size=0), 'batch_size is 0'), (dict(file='no/x.pt'), "file is 'no/x.pt'"),
    (dict(data=train, stop_at=1.), 'stop_at is a validation loss, and there are no texts to validate with'),
    (dict(data=[train,train]), r'data is a list, and must be a tensor or a tuple \(train, valid\)'), (dict(data=(train,[valid])), 'valid is a list'),
    (dict(data=train.flatten()), r'ids of shape \(2600,\)'), (dict(data=train[:,:1]), r'ids of shape \(200, 1\)'), (dict(data=train[:0]), r'ids of shape \(0, 13\)'),
    (dict(d=20), 'd is 20, and must be a multiple of d_head, 8')], ids=lambda o: None if isinstance(o, str) else ' '.join(o))
def test_what_would_train_something_else_is_refused_before_the_first_step(kw, text):
    steps = []
    def data(i): return steps.append(i) or train
    with pytest.raises((ValueError,TypeError), match=text): train_decoder(**{**small, 'method':'rigl', 'data':(data,valid), 'n_steps':5, **kw})
    assert len(steps)<=1

def test_a_rate_of_zero_is_zero():
    torch.manual_seed(0)
    new = Decoder(d=16, n_layers=1, d_head=8, vocab=20, context=12)
    assert all(map(torch.equal, new.parameters(), train_decoder('dense', train, 3, lr=0., **small).model.parameters()))

def test_another_network_is_no_continuation(tmp_path):
    args = dict(small, file=tmp_path/'run.pt')
    train_decoder('rigl', (train,valid), 12, **args)
    for kw in (dict(slopes=(0.,)), dict(top=.5), dict(bf16=True), dict(vocab=[f'w{i}' for i in range(20)])):
        with pytest.raises(ValueError, match=f'of a run with {[*kw][0]}='): train_decoder('rigl', (train,valid), 12, **{**args, **kw})

def test_the_run_of_a_module_is_none_of_a_decoder(tmp_path):
    args = dict(density=1/4, file=tmp_path/'run.pt', progress=False)
    train_decoder('dense', train, 2, model=Recurrent(), **args)
    with pytest.raises(ValueError, match='of a run with d=None, and this has 128'): train_decoder('dense', train, 2, vocab=20, **args)

def test_arguments_of_a_decoder_have_no_place_beside_a_model():
    with pytest.raises(TypeError, match='vocab is an argument of a new Decoder, and model is given'): train_decoder('dense', train, 2, model=Recurrent(), vocab=20)

@pytest.mark.parametrize('method', ['recipe','rigl'])
def test_a_given_model_trains_with_dropout_and_frozen_layers_stay(method):
    torch.manual_seed(0)
    m,modes = Recurrent().eval(),[]
    m.hidden.requires_grad_(False)
    before = m.hidden.weight.clone()
    m.drop.register_forward_hook(lambda m, x, y: modes.append(m.training))
    train_decoder(method, train, 10, density=1/4, every=4, model=m, progress=False)
    assert modes[-1] and before.equal(m.hidden.weight)

@pytest.mark.parametrize('method', ['recipe','rigl'])
def test_an_error_in_the_middle_leaves_a_model_without_masks_and_hooks(method):
    def batch(i):
        if i==8: raise Stop
        return text(8, i)
    m = Recurrent()
    names,hooks = [*m.state_dict()],len(m._forward_pre_hooks)+len(m._forward_hooks)
    args = dict(n_steps=20, density=1/4, every=4, model=m, progress=False)
    with pytest.raises(Stop): train_decoder(method, batch, **args)
    assert [*m.state_dict()]==names and len(m._forward_pre_hooks)+len(m._forward_hooks)==hooks
    train_decoder(method, train, **args)
