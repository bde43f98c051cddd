"The command: what it prints, what it writes and what it refuses, in words of its own"
import pytest,subprocess,sys,torch
from fastsparse.cli import main
from fastsparse.prune.oneshot import prune_magnitude
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

def test_a_folder_that_is_not_there(files, capsys):
    "It is named, and nothing is left behind"
    before = sorted(files.iterdir())
    assert 'the folder nowhere is not there' in says(capsys, 'prune', 'weights.pt', '--sparsity', '.5', '--out', 'nowhere/a.pt')
    assert sorted(files.iterdir())==before

def test_export_says_whether_it_wrote(files, capsys):
    "Without --out it only measures"
    assert 'nothing was written' in says(capsys, 'export', 'sparse.pt', '--format', 'dense', '--sample', 'x.pt', '--trust')
    assert 'written: a.safetensors' in says(capsys, 'export', 'sparse.pt', '--format', 'safetensors', '--sample', 'x.pt', '--trust', '--out', 'a.safetensors')
    assert (files/'a.safetensors').is_file()

def test_pruned_weights_are_exact(files, capsys):
    "Three of four weights of each matrix are zero, in weights and in safetensors"
    says(capsys, 'prune', 'weights.pt', '--sparsity', '.75')
    assert [int(v.count_nonzero()) for k,v in torch.load('weights-pruned.pt').items() if v.ndim==2]==[32,16]

@pytest.mark.parametrize('option', ['--rounds', '--rows'])
def test_bench_refuses_nothing_to_time(capsys, option):
    "The option is named before anything runs"
    text = says(capsys, 'bench', option, '0')
    assert option in text and '1 or more' in text

def test_demo_through_the_command_trains_in_processes(tmp_path):
    "What its processes are handed is found by name, though the command runs the module"
    args = ['demo', '--methods', 'dense', 'static', '--sparsities', '.9', '--seeds', '1', '--epochs', '1', '--out', str(tmp_path/'d')]
    done = subprocess.run([sys.executable, '-m', 'fastsparse', *args], capture_output=True, text=True)
    assert done.returncode==0, done.stderr
    assert any((tmp_path/'d').iterdir())

def test_export_names_a_sample_that_does_not_fit(files, capsys):
    "The file and its shape are named, and nothing is written"
    torch.save(torch.randn(4,7), 'narrow.pt')
    text = says(capsys, 'export', 'sparse.pt', '--sample', 'narrow.pt', '--trust', '--out', 'b.safetensors')
    assert '--sample narrow.pt' in text and '(4, 7)' in text
    assert not (files/'b.safetensors').exists()
