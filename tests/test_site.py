"The site: which names stand on the API's pages, what the search leads to, and what the pages show"
import inspect,json,pytest,re,sys
from functools import cache
from nbdev.processors import FilterDefaults
from pathlib import Path

root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'docs'))
import api,build,contents,examples
api.entry_md = cache(api.entry_md)  # the same entries are looked at several times

pages = {p.relative_to(root/'nbs').with_suffix('').as_posix(): p for p in sorted((root/'nbs').rglob('*.ipynb')) if not set(p.parts) & {'.ipynb_checkpoints','_proc'}}
shown = [n for n in pages if '/' in n]

def cells(name): return json.loads(pages[name].read_text(encoding='utf-8'))['cells']
def source(c): return ''.join(c['source'])

def test_every_name_has_one_page_of_the_api():
    "Whoever adds a name for users adds it to docs/contents.py"
    assert not api.unplaced()

@pytest.mark.parametrize('name', sorted(api.page_of()))
def test_an_entry_can_be_written(name):
    "A heading, something said, and no line that is left open"
    md = api.entry_md(name, 'there')
    assert md.startswith('## ') and len(md.splitlines())>4 and md.count('```')%2==0

@pytest.mark.parametrize('name', [n for n in sorted(api.page_of()) if not isinstance(api.find(n), dict)])
def test_an_entry_says_what_help_says(name):
    "The first line of the docstring stands there as one line, and its example as it is written"
    md,doc = api.entry_md(name, 'there'),inspect.getdoc(api.find(name))
    assert api.plain(doc.splitlines()[0]) in md.splitlines()
    assert '=Ellipsis' not in md
    if 'Examples\n' in doc: assert doc.split('Examples\n')[1].splitlines()[1] in md.splitlines()

@pytest.mark.parametrize('name', [n for n in sorted(api.page_of()) if 'Examples\n' not in (inspect.getdoc(api.find(n)) or '')])
def test_an_entry_has_an_example_that_runs(name, tmp_path, monkeypatch):
    "With its import line, and with the objects that each page of the API tells of"
    said = examples.of(name, api.find(name))
    assert said, f'{name} has no example in docs/examples.py'
    if 'peft' in said: pytest.importorskip('peft')
    monkeypatch.chdir(tmp_path)
    exec('from fastai.vision.all import *', names := {})
    names |= examples.scene()
    exec(api.example(name, api.find(name)), names)

def test_arguments_of_a_page_stand_there_once():
    "Entries that share many arguments with one above name them, and do not describe them again"
    text = dict(api.pages(lambda n: 'there'))['api/train']
    assert text.count('**batches\\_per\\_update**')==1 and text.count('**settings**')>=4

def test_a_page_that_a_search_leads_to_is_there():
    "By the name that it has on the site: without the number of its room"
    names = {re.sub(r'^\d+\w?_', '', n) for n in pages} | set(api.groups)
    assert not set(contents.searches)-names

def test_nothing_is_searched_for_twice():
    "A phrase leads to one page"
    phrases = [' '.join(o.lower().split()) for s in contents.searches.values() for o in s.split(',')]
    assert not {o for o in phrases if phrases.count(o)>1}

@pytest.mark.parametrize('query,page', [('prune a pretrained model', 'tutorials/fine_tuning'), ('faster training', 'howto/faster'), ('faster', 'howto/smaller_faster'), ('phone', 'howto/smaller_faster'), ('raspberry pi', 'howto/smaller_faster'),
    ('yolo', 'howto/detector'), ('android', 'howto/smaller_faster'), ('how sparse', 'howto/smaller_faster'), ('why is it not faster', 'howto/smaller_faster'), ('nan loss', 'howto/messages'), ('keyword inputs', 'howto/messages'), ('file size', 'howto/save'), ('resume', 'howto/resume'), ('learn.load', 'howto/save'), ('unexpected key', 'howto/save'), ('load_from_checkpoint', 'howto/save'),
    ('which sparsity', 'howto/choose'), ('lora', 'howto/stay_sparse'), ('amp', 'howto/mixed_precision'), ('autocast', 'howto/mixed_precision'),
    ('bf16', 'howto/mixed_precision'), ('huggingface', 'howto/share'), ('push_to_hub', 'howto/share'), ('quantize', 'howto/quantize'), ('accelerate', 'howto/accelerate'),
    ('prune', 'tutorials/fine_tuning'), ('rigl', 'api/methods'), ('torch.compile', 'howto/works_with'), ('ema', 'howto/works_with'), ('mixup', 'howto/works_with'),
    ('early stopping', 'howto/works_with'), ('hugging face bert', 'tutorials/transformers'), ('lightning', 'howto/lightning'), ('error message', 'howto/messages')])
def test_what_people_ask_first_has_an_answer(query, page):
    "These phrases are entries of the index; the build tells whether the search finds them"
    assert query in [' '.join(o.lower().split()) for o in contents.searches[page].split(',')]

@pytest.mark.parametrize('name', shown)
def test_a_page_shows_what_a_user_writes(name):
    "Assertions, tests and switched-off progress bars stand in hidden cells; `with learn.no_bar()` is right where a server predicts or a function trains many times"
    visible = [source(c) for c in cells(name) if c['cell_type']=='code' and not re.search(r'^#\| *hide$', source(c), re.M)]
    code = '\n'.join(visible)
    assert not re.search(r'^\s*(assert (?!\'(fastsparse|torch)\')|test_\w+\()', code, re.M), name

@pytest.mark.parametrize('about,title', [('A masked parameter: one object in any loop', 'A masked parameter'), ('Prune, cut and tune', 'Prune, cut and tune'),
    ('Save a sparse model to a small file, and load one from any file', 'Save a sparse model to a small file')])
def test_a_title_is_what_a_line_begins_with(about, title): assert build.short(about)==title

def test_modules_are_called_by_what_they_do():
    "Their pages have titles that differ, made of the line below the module's name"
    lines = [re.search(r'^> (.+)', source(cells(n)[0]), re.M) for n in pages if re.match(r'\d', n) and not n.endswith(('cli','demo'))]
    titles = [build.short(o[1]) for o in lines]
    assert len(set(titles))==len(titles) and max(map(len, titles))<110, sorted(titles, key=len)[-3:]

@pytest.mark.parametrize('name', sorted(pages))
def test_a_page_names_its_kernel(name):
    "The build runs a page by the kernel that its metadata name"
    assert json.loads(pages[name].read_text(encoding='utf-8'))['metadata'].get('kernelspec', {}).get('name')=='python3'

@pytest.mark.parametrize('name', sorted(pages))
def test_a_page_has_no_path_of_a_machine(name):
    "Neither in text nor in what a cell printed"
    text = pages[name].read_text(encoding='utf-8')
    assert not re.search(r'/(work|home|root|tmp)/\w', text), re.search(r'/(work|home|root|tmp)/\w.{40}', text)[0]

@pytest.mark.parametrize('name', shown)
def test_a_tutorial_or_concept_has_a_picture(name):
    "No wall of text"
    if name.startswith('howto/'): return
    outs = [d for c in cells(name) for o in c.get('outputs', []) for d in o.get('data', {})]
    assert 'image/png' in outs

@pytest.mark.parametrize('name,folded', [('000_core.checks', False), ('404_train.engine', False), ('990_cli', True)])
def test_a_page_shows_the_code_that_it_exports(name, folded):
    "Once, open where the library is explained and folded in a guide, below the targets of links to its names"
    nb = build.read_nb(pages[name])
    FilterDefaults()(nb)
    page = build.Page(pages[name], nb, set())
    made = [o for c in nb.cells for o in page.cell(c)]
    code = [source(c).split('\n', 1)[1] for c in cells(name) if re.match(r'#\| *export\n(?!#\| *hide)', source(c))]
    shown = [c for c in made if 'exported' in c.metadata.get('tags', [])]
    assert [c.source for c in shown]==code
    assert all(('hide-input' in c.metadata['tags'])==folded for c in shown)
    assert not any('show_doc' in c.source for c in made)

def test_an_entry_folds_its_source():
    "Once a page of the API; a preset has its settings instead"
    md = api.entry_md('sparse_mask', 'there')
    assert md.count('<details')==md.count('def sparse_mask(')==1 and '<details' not in api.entry_md('RigL_presets', 'there')
