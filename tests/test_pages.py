"Shown is printed: what pages of the core show is what their cells print, in a process of its own"
import json,os,pytest,re,subprocess,sys
from pathlib import Path

root = Path(__file__).parents[1]
pages = sorted(p.name for p in (root/'nbs').glob('[0-5]*_*.ipynb') if int(p.name[:3])<=500)
fast = [p for p in pages if '#| slow' not in (root/'nbs'/p).read_text() and p[:3]!='409']  # others show more than is run here; 409 trains without a seed
few = [p for p in pages if p[:3] in ('003','306','500')]
run = '''import sys
from nbdev.test import test_nb
from pathlib import Path
for p in sys.argv[1:]: assert test_nb(Path(p), skip_flags=['slow'], profile=False, save=True)[0], p'''

def shown(path):
    "The texts that the cells of a page show, except bars of progress, by the cell's id"
    found = {}
    for cell in json.loads(path.read_text())['cells']:
        texts = [''.join(o.get('text', o.get('data', {}).get('text/plain', ''))) for o in cell.get('outputs', [])]
        found[cell['id']] = [re.sub(r'0x[0-9a-f]+', '0x', text) for text in texts if '\r' not in text]
    return found

def differences(names, folder):
    "Cells of the pages `names` whose outputs differ when they are run, with what is shown and what is printed"
    for name in names: (folder/name).write_text((root/'nbs'/name).read_text())
    (folder/'benchmarks').symlink_to(root/'benchmarks')
    command = [sys.executable, '-c', run, *[folder/name for name in names]]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ|dict(PYTHONPATH=str(root), PYTHONWARNINGS='ignore::FutureWarning'))
    assert not done.returncode, done.stderr[-2000:]
    pairs = [(name, shown(root/'nbs'/name), shown(folder/name)) for name in names]
    return [(name, i, was[i], now[i]) for name,was,now in pairs for i in was if was[i]!=now[i]]

def test_a_few_pages_show_what_they_print(tmp_path): assert not differences(few, tmp_path)

@pytest.mark.full
@pytest.mark.parametrize('page', fast)
def test_pages_show_what_they_print(page, tmp_path): assert not differences([page], tmp_path)
