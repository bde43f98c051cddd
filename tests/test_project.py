"The project: its metadata, texts and workflows fit each other, and the wheel holds the package alone"
import pytest,re,subprocess,sys,tarfile,tomllib,yaml
from fastsparse import __version__
from fastsparse.core.checks import pip_install
from pathlib import Path
from shutil import which
from try_dist import check_wheel

root = Path(__file__).parent.parent
project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
extras = project['optional-dependencies']
def text(name): return (root/name).read_text(encoding='utf-8')
sources = [p for o in ('nbs','docs','tests','benchmarks') for p in (root/o).rglob('*') if p.suffix in ('.ipynb','.py','.md') and not set(p.parts) & {'_build','.ipynb_checkpoints'}]
sources += root.glob('*.md')

def test_the_distribution_has_its_name_from_one_place():
    "What an error advises and what pages say follow from pyproject.toml, and name extras that are there"
    assert pip_install('export')==f"pip install '{project['name']}[export]'"
    named = {(p.name,*o) for p in sources for o in re.findall(r'\b(\w+)\[([a-z,]+)\](?=[\'" @`])', p.read_text(encoding='utf-8')) if 'sparse' in o[0]}
    assert {o[1] for o in named}=={project['name']}
    assert {e for o in named for e in o[2].split(',')}<=set(extras)
    assert all(o.startswith(f"{project['name']}[") for k in ('all','dev') for o in extras[k] if 'sparse[' in o)

def test_the_version_of_the_package_is_in_the_changelog():
    "Below a heading of its own, with the day"
    assert re.search(rf'^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$', text('CHANGELOG.md'), re.M)
    assert re.findall(r'^## \[(.+?)\]', text('CHANGELOG.md'), re.M)[0]=='Unreleased'

def test_the_workflows_run_what_is_there():
    "Each `make` target exists, and each supported Python is tested, with the oldest torch and with the newest"
    files = {p.stem: yaml.safe_load(p.read_text(encoding='utf-8')) for p in (root/'.github/workflows').glob('*.yml')}
    assert set(files)=={'test','docs','release'}
    steps = [s.get('run','') for f in files.values() for j in f['jobs'].values() for s in j['steps']]
    assert {t for s in steps for t in re.findall(r'\bmake ([\w-]+)', s)}<=set(re.findall(r'^([a-z-]+):', text('Makefile'), re.M))
    for t in {t for s in steps for t in re.findall(r'tests/test_\w+\.py', s)}: assert (root/t).is_file()
    runs = files['test']['jobs']['test']['strategy']['matrix']['include']
    supported = [o.split()[-1] for o in project['classifiers'] if re.search(r'Python :: 3\.\d+$', o)]
    assert sorted({o['python'] for o in runs})==sorted(supported)
    assert {o['torch'] for o in runs}=={'oldest','newest'} and supported[0]==project['requires-python'].removeprefix('>=')

def test_the_citation_names_papers_that_the_library_follows():
    "Each by the name under which it is used, a method's or that of the star"
    import fastsparse
    from fastsparse.core.registry import parts_of
    cite = yaml.safe_load(text('CITATION.cff'))
    assert cite['cff-version']=='1.2.0' and cite['license']==project['license']
    assert all((hasattr(fastsparse, o['notes']) or o['notes'].lower() in parts_of('method')) and o['authors'] and o['url'].startswith('https://arxiv.org/abs/') for o in cite['references'])

def test_the_texts_of_the_project_lead_somewhere():
    "Links between them, and to their headings"
    for p in root.glob('*.md'):
        for to,anchor in re.findall(r'\]\(([\w/.-]+\.md)(#[\w-]+)?\)', p.read_text(encoding='utf-8')):
            assert (p.parent/to).is_file(), (p.name, to)
            heads = [re.sub(r'[^\w -]', '', o.lower()).strip().replace(' ', '-') for o in re.findall(r'^#+ (.*)', text(to), re.M)]
            assert not anchor or anchor[1:] in heads, (p.name, to, anchor)

def test_ruff_finds_nothing():
    "In the configuration of pyproject.toml"
    if not which('ruff'): pytest.skip('ruff is a tool of the clone')
    assert not subprocess.run(['ruff', 'check', '-q'], cwd=root, capture_output=True, text=True).stdout

@pytest.mark.full
def test_types_of_the_public_names():
    "mypy follows a small program through them"
    done = subprocess.run([sys.executable, '-m', 'mypy'], cwd=root, capture_output=True, text=True)
    assert done.returncode==0, done.stdout

@pytest.mark.full
def test_the_wheel_is_the_package_and_the_sdist_has_what_its_tests_read(tmp_path):
    "Sub-packages and the mark of types in the one; notebooks, tests and pages in the other"
    subprocess.run(['uv', 'build', '-q', '-o', tmp_path], cwd=root, check=True, capture_output=True)
    check_wheel(next(tmp_path.glob('*.whl')))
    with tarfile.open(next(tmp_path.glob('*.tar.gz'))) as f: names = {o.split('/', 1)[1] for o in f.getnames() if '/' in o}
    tracked = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True).stdout.split()
    assert not {o for o in tracked if not o.startswith(('.ci/','.git'))}-names
