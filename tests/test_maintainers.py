"The notebooks for maintainers in benchmarks/ run"
import json,pytest
from pathlib import Path

folder = Path(__file__).parent.parent/'benchmarks'

@pytest.mark.parametrize('name', ['measured','networks'])
def test_runs(name, monkeypatch):
    "From the result files, cell by cell"
    import matplotlib
    matplotlib.use('agg')
    monkeypatch.chdir(folder)
    names = dict(display=lambda o: o._repr_html_())
    for c in json.loads((folder/f'{name}.ipynb').read_text(encoding='utf-8'))['cells']:
        if c['cell_type']=='code': exec(''.join(c['source']), names)
