"The API's pages as markdown, written from signatures, docments and docstrings of the package"
import ast,contents,examples,fastsparse.all,functools,inspect,re,textwrap
from fastai.basics import Learner
from fastcore.docments import docments
from fastcore.docscrape import NumpyDocString
from fastcore.utils import *

groups = {f'api/{k}': (title, about, names.split()) for k,(title,about,names) in contents.api.items()}
public = {k: v for k,v in vars(fastsparse.all).items() if not k.startswith('_')}

def page_of():
    "The API's page of each name"
    return {n: page for page,(*_,names) in groups.items() for n in names}

def unplaced():
    "Names that users may write and that stand on no page of the API, on two, or that are not there"
    names = [n for *_,o in groups.values() for n in o]
    added = {o for o in page_of() if o.startswith('Learner.')}
    return sorted({o for o in names if names.count(o)>1} | (set(public) ^ (set(names)-added)) | {o for o in added if not hasattr(Learner, o.split('.')[1])})

def find(name): return getattr(Learner, name.split('.')[1]) if '.' in name else public[name]

def written(o):
    "Default `o` as one would write it; `...` if it is no Python, and where a method has its own"
    if o is ...: return '...'
    s = getattr(o, '__name__', None) or repr(o)
    try: ast.parse(s)
    except SyntaxError: return '...'
    return s

def plain(s):
    "`s` without what markdown would take for markup outside of code"
    return ''.join(o if i%2 else re.sub(r'([*_<\[\]$])', r'\\\1', o) for i,o in enumerate(re.split(r'(`[^`]*`)', s)))

def signature(name, o, without=()):
    "How `name` is called, over several lines if that gets long; `**settings` stands for the arguments in `without`"
    params = [p.replace(annotation=p.empty) for p in inspect.signature(o).parameters.values() if p.name not in ('self', *without)]
    args = [f"{'*'*(p.kind==p.VAR_POSITIONAL)+'**'*(p.kind==p.VAR_KEYWORD)}{p.name}" + ('' if p.default is p.empty else f'={written(p.default)}') for p in params]
    line = f"{name}({', '.join(args+['**settings']*bool(without))})"
    return line if len(line)<=88 else textwrap.fill(line, 88, subsequent_indent='    ', break_long_words=False, break_on_hyphens=False)

@functools.cache
def arguments(o):
    "What each argument of `o` is"
    found = docments(o.__new__ if '__new__' in vars(o) and '__init__' not in vars(o) else o, full=True)
    return {k: d.docment for k,d in found.items() if k not in ('self','cls','return') and d.docment}

def shared_with(name, least=6, own=('model','opt','data','sparsity','sparseness','method','sparse_compute')):
    "The first entry of the page that has at least `least` arguments of `name` above it, and these without the `own` ones, which most people set"
    page,args = groups[page_of()[name]][2],arguments(find(name))
    for other in page[:page.index(name)]:
        same = [] if isinstance(find(other), dict) else [k for k in args if k in arguments(find(other)) and k not in own]
        if len(same)>=least: return other,same
    return None,[]

def returned(o, doc):
    "What function `o` with the docstring `doc` returns; docments shows what a function that shares its arguments does"
    if not inspect.isfunction(o): return ''
    if doc['Returns']: return docments(o, full=True)['return'].docment
    said = re.search(r'^(?:def .*)?\)(?: -> .+?)?: *# *(.+)$', inspect.getsource(o), re.MULTILINE)
    return said[1] if said else ''

def settings(name, o):
    "What preset `o` sets"
    about,paper = getattr(o, 'about', ''),getattr(o, 'paper', None)
    rows = [f'- **{plain(k)}**: `{written(v)}`' for k,v in o.items()]
    return [about[:1].upper()+about[1:], '\n'.join(rows), f'Source: [arXiv:{paper}](https://arxiv.org/abs/{paper})' if paper else '']

def described(name, o):
    "What function or class `o` takes and gives: signature, docments or a numpy docstring"
    doc = NumpyDocString(inspect.getdoc(o) or '')
    text = f"{doc['Summary']}\n{doc['Extended']}".strip()
    other,same = shared_with(name)
    args = [f'- **{plain(k)}**: {plain(v)}' for k,v in arguments(o).items() if k not in same]
    if other: args.append(f"- **settings**: {len(same)} more, those of [{plain(other)}](#{other.lower().replace('.', '')})")
    parts = [f'```python\n{signature(name, o, same)}\n```', plain(text), '\n'.join(args)]
    if ret := returned(o, doc): parts.append('**Returns** '+plain(ret))
    if doc['Raises']: parts.append('**Errors**\n\n'+'\n'.join(f"- `{o.type}`: {plain(' '.join(o.desc))}" for o in doc['Raises']))
    if doc['References']: parts.append('Source: '+', '.join(f'[arXiv:{i}](https://arxiv.org/abs/{i})' for i in re.findall(r'arXiv:(\d+\.\d+)', doc['References'])))
    return parts

def example(name, o):
    "The example of `name`, its docstring's if that has one, below what it imports"
    text = NumpyDocString(inspect.getdoc(o) or '')['Examples'] or examples.of(name, o)
    return f'{examples.imports(name, text, public)}\n\n{text}'

def source(o):
    "The code of `o`, folded; a preset has none but its settings"
    if isinstance(o, dict): return ''
    return f'<details class="hide">\n<summary>Source</summary>\n\n```python\n{inspect.getsource(o).rstrip()}\n```\n\n</details>'

def entry_md(name, room):
    "The entry of `name`, whose link to its room is `room`"
    o = find(name)
    parts = settings(name, o) if isinstance(o, dict) else described(name, o)
    parts = [f'## {plain(name)}', *parts, f'**Example**\n\n```python\n{example(name, o)}\n```', source(o), f'How it is made: {room}']
    return '\n\n'.join(filter(None, parts))

def pages(room_link):
    "Text of each page of the API; `room_link(name)` is a link to where a name is explained"
    for page,(title,about,names) in groups.items():
        yield page,'\n\n'.join([f'# {title}', about, examples.about, *(entry_md(n, room_link(n)) for n in names)])+'\n'
