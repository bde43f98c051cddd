"The command: what it prints, what it writes and what it refuses, in words of its own"
import pytest,re,shlex,subprocess,sys,torch,warnings
from fastsparse import cli
from fastsparse.cli import main
from fastsparse.prune.magnitude import prune_magnitude
from fastsparse.all import load_sparse,plain_copy
from torch import nn

@pytest.fixture
def files(tmp_path, monkeypatch):
    "Weights by name, a whole model, a pruned one, and a batch"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))
    torch.save(m.state_dict(), 'weights.pt')
    torch.save(m, 'whole.pt')
    prune_magnitude(m, .75)
    torch.save(m, 'sparse.pt')
    torch.save(torch.randn(4,8), 'x.pt')
    return tmp_path

def says(capsys, *args):
    "What the command prints, its complaints too"
    try: main(list(args))
    except SystemExit as e: return str(e)
    return capsys.readouterr().out

def test_summary_of_a_whole_model(files, capsys):
    "The refusal says --trust, and then --trust is there; masks are no weights"
    assert '--trust' in says(capsys, 'summary', 'whole.pt')
    assert says(capsys, 'summary', 'whole.pt', '--trust')==says(capsys, 'summary', 'weights.pt')
    text = says(capsys, 'summary', 'sparse.pt', '--trust')
    assert 'mask' not in text and '0.7500' in text

@pytest.mark.filterwarnings('ignore')
def test_summary_reads_what_others_wrote(files, capsys):
    "`learn.save`, a Lightning checkpoint, `save_sparse`, a folder of `save_pretrained`: weights of the pruned model, without --trust"
    from fastai_data import learner
    from fastsparse.all import save_run,save_sparse
    m = torch.load('sparse.pt', weights_only=False)
    learn = learner(files, model=m)
    learn.create_opt()
    learn.save('m1')
    save_sparse(m, 'm2.safetensors')
    torch.save({'state_dict':m.state_dict(), 'pytorch-lightning_version':'2.5', 'callbacks':{}, 'epoch':1}, 'm3.ckpt')
    save_run('m4.pt', m)
    (files/'folder').mkdir()
    pytest.importorskip('safetensors.torch').save_file(m.state_dict(), 'folder/model.safetensors')
    want = says(capsys, 'summary', 'sparse.pt', '--trust')
    lines = sorted(want.splitlines())
    for f in ('models/m1.pth','m2.safetensors','m3.ckpt','m4.pt','folder'): assert sorted(says(capsys, 'summary', f).splitlines())==lines, f
    assert 'has no model.safetensors' in says(capsys, 'summary', 'models')

def test_a_sparse_model_is_pruned_further(files, capsys):
    "A whole one, and its weights, whose masks follow; asked for less, it says what to pass"
    torch.save(torch.load('sparse.pt', weights_only=False).state_dict(), 'state.pt')
    before = torch.load('state.pt')
    for f,flags in (('sparse.pt',['--trust']),('state.pt',[])):
        says(capsys, 'prune', f, '--sparsity', '.875', '--out', 'more.pt', *flags)
        more = torch.load('more.pt', weights_only=False)
        state = more.state_dict() if flags else more
        live = [int(state[f'{k}.weight'].count_nonzero()) for k in (0,2)]
        assert sum(live)==24 and all(int(state[f'{k}.weight_mask'].sum())==n for k,n in zip((0,2), live))
        assert not any((state[f'{k}.weight_mask'] & ~before[f'{k}.weight_mask']).any() for k in (0,2))
    assert 'pass a higher sparsity' in says(capsys, 'prune', 'sparse.pt', '--sparsity', '.5', '--trust')

def test_a_folder_that_is_not_there(files, capsys):
    "It is named, and nothing is left behind"
    before = sorted(files.iterdir())
    assert "make 'nowhere'" in says(capsys, 'prune', 'weights.pt', '--sparsity', '.5', '--out', 'nowhere/a.pt')
    assert sorted(files.iterdir())==before

def test_export_says_whether_it_wrote(files, capsys):
    "Without --out it only measures"
    assert 'nothing was written' in says(capsys, 'export', 'sparse.pt', '--format', 'dense', '--sample', 'x.pt', '--trust')
    assert 'written: a.safetensors' in says(capsys, 'export', 'sparse.pt', '--format', 'safetensors', '--sample', 'x.pt', '--trust', '--out', 'a.safetensors')
    assert (files/'a.safetensors').is_file()

def test_live_values_need_no_sample(files, capsys):
    "A file of safetensors is small, and every other format says what is missing"
    torch.save(nn.Linear(256, 256), 'wide.pt')
    says(capsys, 'prune', 'wide.pt', '--sparsity', '.95', '--trust', '--out', 'pruned.pt')
    says(capsys, 'prune', 'wide.pt', '--sparsity', '.95', '--trust', '--out', 'pruned.safetensors')
    assert 'written' in says(capsys, 'export', 'pruned.pt', '--format', 'safetensors', '--trust', '--out', 'a.safetensors')
    assert 'pass --sample' in says(capsys, 'export', 'pruned.pt', '--format', 'dense', '--trust')
    for file in ('a.safetensors','pruned.safetensors'): assert (files/file).stat().st_size<.1*(files/'wide.pt').stat().st_size

def test_one_count_of_zeros(files, capsys):
    "The command and `sparse_summary` agree, with masks and without; live weights that are zero are counted too"
    from fastsparse.report.summary import sparse_summary
    m = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 4, bias=False))
    prune_magnitude(m, .8)
    with torch.no_grad(): m[0].weight[:10] = 0
    for name in ('masked','plain'):
        if name=='plain': m = plain_copy(m)
        torch.save(m, f'{name}.pt')
        *rows,total = [o.split() for o in says(capsys, 'summary', f'{name}.pt', '--trust').splitlines()]
        df = sparse_summary(m).df
        assert float(total[-2])==pytest.approx(df.sparsity.iloc[-1], abs=1e-4)
        assert int(total[-1].replace(',', ''))==sum(int((p==0).sum()) for p in m.parameters())
        assert ('live weights are zero' in df.note[0])==(name=='masked')

def test_pruned_weights_are_exact(files, capsys):
    "Three of four weights of each matrix are zero, in weights and in safetensors"
    says(capsys, 'prune', 'weights.pt', '--sparsity', '.75')
    assert [int(v.count_nonzero()) for k,v in torch.load('weights-pruned.pt').items() if v.ndim==2]==[32,16]

def test_a_sample_that_does_not_fit_writes_nothing(files, capsys):
    torch.save(torch.randn(4,7), 'narrow.pt')
    text = says(capsys, 'export', 'sparse.pt', '--sample', 'narrow.pt', '--trust', '--format', 'safetensors', '--out', 'b.safetensors')
    assert '4x7' in text and not (files/'b.safetensors').exists()

# --- advice that works

def follow(capsys, text):
    "Do what a complaint says, where it says a command"
    return says(capsys, *shlex.split(re.search(r'fastsparse ((?:prune|export|summary) .*?)(?: first)?$', text)[1]))

def test_weights_stay_weights_whatever_is_said_of_trust(files, capsys):
    "The advice of one command is not refused by the next"
    assert says(capsys, 'prune', 'weights.pt', '--sparsity', '.75', '--trust')==says(capsys, 'prune', 'weights.pt', '--sparsity', '.75')
    for flags in ([], ['--trust']):
        text = says(capsys, 'export', 'weights-pruned.pt', '--sample', 'x.pt', *flags)
        assert 'holds weights by name' in text and 'torch.save(model, file)' in text and '--trust' not in text

def test_the_advice_of_export_leads_to_a_file(files, capsys):
    "A whole model without masks: prune it as the command says, and export what that wrote"
    assert '--trust' in says(capsys, 'export', 'whole.pt', '--sample', 'x.pt')
    text = says(capsys, 'export', 'whole.pt', '--sample', 'x.pt', '--trust')
    wrote = re.search('written: (.*)', follow(capsys, text))[1]
    assert 'name it with --out' in says(capsys, 'export', wrote, '--trust', '--sample', 'x.pt', '--format', 'safetensors')
    assert 'written: small.safetensors' in says(capsys, 'export', wrote, '--trust', '--sample', 'x.pt', '--format', 'safetensors', '--out', 'small.safetensors')

def test_wanda_says_all_that_it_needs(files, capsys):
    "Its data first, then a model, then that the model is trusted"
    assert '--data' in says(capsys, 'prune', 'weights.pt', '--sparsity', '.5', '--method', 'wanda')
    assert 'the whole model' in says(capsys, 'prune', 'weights.pt', '--sparsity', '.5', '--method', 'wanda', '--data', 'x.pt')
    assert '--trust' in says(capsys, 'prune', 'whole.pt', '--sparsity', '.5', '--method', 'wanda', '--data', 'x.pt')
    assert 'written' in says(capsys, 'prune', 'whole.pt', '--sparsity', '.5', '--method', 'wanda', '--data', 'x.pt', '--trust')

def test_what_export_writes_can_be_looked_at(files, capsys):
    "A model of zeros, and one in safetensors"
    for out in ('dense.pt','w.safetensors'):
        fmt = 'dense' if out=='dense.pt' else 'safetensors'
        says(capsys, 'export', 'sparse.pt', '--format', fmt, '--sample', 'x.pt', '--trust', '--out', out)
        assert '0.weight' in says(capsys, 'summary', out, '--trust')

# --- the command itself

def test_commands_are_functions_too(files, capsys):
    "The same names and arguments, from Python"
    cli.prune('weights.pt', sparsity=.75, out='a.pt')
    cli.summary('a.pt')
    out = capsys.readouterr().out
    assert 'written: a.pt' in out and '0.7500' in out
    with pytest.raises(FileNotFoundError, match='nothing.pt'): cli.summary('nothing.pt')

@pytest.mark.parametrize('error', [RuntimeError, KeyError, AssertionError])
def test_debug_keeps_the_traceback_of_an_internal_error(files, capsys, monkeypatch, error):
    "Without it one line says what happened, and how to see where"
    def broken(*args): raise error('inside')
    monkeypatch.setattr(cli, 'read_file', broken)
    text = says(capsys, 'summary', 'weights.pt')
    assert error.__name__ in text and 'inside' in text and '--debug' in text
    for args in (['summary','weights.pt','--debug'], ['--debug','summary','weights.pt']):
        with pytest.raises(error, match='inside'): main(args)

@pytest.mark.parametrize('args', [['--help'], ['--version'], ['prune','--help'], ['nothing']])
def test_what_needs_no_torch_loads_none(args):
    "So the answer takes a fraction of a second"
    code = f"import sys\nfrom fastsparse.cli import main\ntry: main({args})\nexcept SystemExit: pass\nprint([o for o in ('torch','numpy','fastai','matplotlib') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip().endswith('[]')

@pytest.mark.full
@pytest.mark.parametrize('arg', ['--help', '--version'])
def test_an_answer_takes_half_a_second_of_processor_time(arg):
    import resource
    def cost():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, '-m', 'fastsparse', arg], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime+after.ru_stime-before.ru_utime-before.ru_stime
    assert min(cost() for _ in range(3))<.5

def test_help_names_every_command_and_a_typing_error_is_guessed(capsys):
    text = says(capsys, '--help')
    assert all(o in text for o in ('summary','prune','export','--debug','--version'))
    assert says(capsys)==text and says(capsys, '--version').startswith('fastsparse ')
    assert "did you mean 'export'" in says(capsys, 'exprot')

def test_a_warning_is_one_line(files, capsys, monkeypatch):
    "Without file and line, and none of torch's about what other packages still call"
    def loud(*args):
        warnings.warn('mind the gap')
        warnings.warn('soon gone', FutureWarning)
        return torch.load('weights.pt')
    monkeypatch.setattr(cli, 'read_file', loud)
    main(['summary', 'weights.pt'])
    assert capsys.readouterr().err=='fastsparse: mind the gap\n'

def odd_files():
    w = torch.randn(8, 8)
    return dict(nothing=({'a.bias':torch.ones(4), 'norm.weight':torch.ones(4)}, 'there is nothing to prune'), float8=({'a.weight':w.to(torch.float8_e4m3fn)}, 'a.weight is of torch.float8'),
        sparse=({'a.weight':w.to_sparse()}, 'a.weight is a sparse tensor'), meta=({'a.weight':w.to('meta')}, 'a.weight is on the meta device'),
        numbers=({0:w, 1:w}, 'without weights by name'), mixed=({'a.weight':w, 1:w}, 'has the key 1, and names must be text'),
        quantized=({'a.weight':torch.quantize_per_tensor(w, .1, 0, torch.qint8)}, 'a.weight is of torch.qint8'))

@pytest.mark.parametrize('name', odd_files())
def test_files_that_cannot_be_pruned(name, tmp_path, monkeypatch, capsys):
    "One line, exit status 1, and no file"
    monkeypatch.chdir(tmp_path)
    state,text = odd_files()[name]
    torch.save(state, 'odd.pt')
    with pytest.raises(SystemExit, match=text): main(['prune', 'odd.pt', '--sparsity', '.5'])
    assert [o.name for o in tmp_path.iterdir()]==['odd.pt']
    if name in ('float8','sparse'):
        main(['summary', 'odd.pt'])
        assert ' 64 ' in capsys.readouterr().out

def test_other_files(tmp_path, monkeypatch):
    "A graph of ONNX, weights in the place of a batch, and tied weights, which stay tied"
    monkeypatch.chdir(tmp_path)
    (tmp_path/'m.onnx').write_bytes(b'graph')
    with pytest.raises(SystemExit, match='m.onnx holds an ONNX graph'): main(['summary', 'm.onnx'])
    torch.save(m := nn.Sequential(nn.Linear(8,8)), 'model.pt')
    torch.save(m.state_dict(), 'state.pt')
    with pytest.raises(SystemExit, match='state.pt holds weights by name, and must hold a batch'):
        main(['prune', 'model.pt', '--sparsity', '.5', '--method', 'wanda', '--data', 'state.pt', '--trust'])
    for odd,text in (('model.pt', 'holds a model or other objects, and must hold a batch'), ('m.onnx', 'holds a model or other objects, and must hold a batch')):
        with pytest.raises(SystemExit, match=text): main(['prune', 'model.pt', '--sparsity', '.5', '--method', 'wanda', '--data', odd, '--trust'])
    w = torch.randn(8, 8)
    torch.save({'a.weight':w, 'b.weight':w}, 'tied.pt')
    main(['prune', 'tied.pt', '--sparsity', '.5', '--out', 'out.pt'])
    out = torch.load('out.pt')
    assert out['a.weight'].data_ptr()==out['b.weight'].data_ptr() and out['a.weight'].count_nonzero()==32

def test_tables_and_constants_stay(tmp_path, monkeypatch):
    "Embeddings, also where a head shares them, and what is in a buffer"
    monkeypatch.chdir(tmp_path)
    table,mask = torch.randn(8,4),torch.ones(1,1,8,8).tril()
    torch.save({'wte.weight':table, 'head.weight':table, 'attn.bias':mask, 'attn.weight':torch.randn(12,4)}, 'gpt.pt')
    main(['prune', 'gpt.pt', '--sparsity', '.5', '--out', 'out.pt'])
    out = torch.load('out.pt')
    assert out['wte.weight'].equal(table) and out['head.weight'].equal(table) and out['attn.bias'].equal(mask) and out['attn.weight'].count_nonzero()==24

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 8, bias=False),nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

def test_tied_tensors_are_written_once(tmp_path, monkeypatch):
    "In safetensors, live values only, with the other name in the notes: another run of the command keeps the tie"
    monkeypatch.chdir(tmp_path)
    safetensors = pytest.importorskip('safetensors.torch')
    safetensors.save_model(m := Tied(), 'm.safetensors')
    torch.save(m.state_dict(), 'm.pt')
    for source,out in (('m.safetensors','a.safetensors'), ('m.pt','b.safetensors'), ('a.safetensors','c.pt')):
        main(['prune', source, '--sparsity', '.5', '--out', out])
    for file in ('a.safetensors','b.safetensors'):
        assert set(safetensors.load_file(file))=={'a.weight','a.weight:mask'} and safetensors.load_file(file)['a.weight'].shape==(32,)
        load_sparse(n := Tied(), file)
        assert n.a.weight is n.b.weight and torch.equal(n.a.weight[n.a.weight!=0], m.a.weight[n.a.weight!=0]) and n.a.weight.count_nonzero()==32
    out = torch.load('c.pt')
    assert out['a.weight'].data_ptr()==out['b.weight'].data_ptr() and out['a.weight'].count_nonzero()==32

class WithBuffers(nn.Module):
    "A causal mask with more zeros than most weights have, and a mask of the model's own"
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(8, 16)
        self.register_buffer('bias', torch.ones(1,1,8,8).tril())
        self.register_buffer('pad', torch.ones(8))
        self.register_buffer('pad_mask', torch.ones(3).bool())

@pytest.mark.parametrize('sparse', [False,True])
def test_buffers_are_written_as_they_are(sparse, tmp_path, monkeypatch):
    "Zeros of a buffer are no mask, and a buffer called so isn't one either: the file opens in the model"
    monkeypatch.chdir(tmp_path)
    pytest.importorskip('safetensors')
    m,new = WithBuffers(),WithBuffers()
    if sparse: prune_magnitude(m, .25)
    torch.save(m.state_dict(), 'm.pt')
    main(['prune', 'm.pt', '--sparsity', '.5', '--out', 'm.safetensors'])
    load_sparse(new, 'm.safetensors')
    assert new.attn.weight_mask.sum()==64 and all(t.equal(m.get_buffer(k)) for k,t in new.named_buffers() if not k.startswith('attn'))
