"""Write into the exported docstring of each name of `fastsparse.all` what `help`, `?` and an editor's hover show.

Run after `nbdev-export`, which takes it all out again: docments, prose and examples in the notebooks stay the only place where this is written.

- Arguments and result are the docments, with type and default.
- Errors are those that the function raises itself, or that a function of the package raises which it calls by name.
- The source is the arXiv id in the prose above the definition.
- The example is the first later cell marked `#| example name`, with its output if that is one line; else the first visible cell after the definition
  that uses the name and needs nothing but `fastai.basics` and `fastsparse.all`."""
import ast,builtins,importlib,inspect,re,symtable,textwrap
from fastcore.basics import *
from fastcore.docments import docments
from fastcore.nbio import read_nb
from fastcore.script import call_parse
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from pathlib import Path

cfg = get_config()
lib,pkg = cfg.lib_path,cfg.lib_path.name
_re_arxiv = re.compile(r'(?:arXiv:\s*|arxiv\.org/abs/)(\d{4}\.\d{4,5})')
_re_example = re.compile(r'^#\| *example +(.*)$', re.MULTILINE)
width,max_errors = 112,6

def directives(c): return set(re.findall(r'^#\| *([\w-]+)', c.source, re.MULTILINE))

def is_export(c): return c.cell_type=='code' and bool({'export','exports','exporti'} & directives(c))

def code_of(c): return '\n'.join(o for o in c.source.splitlines() if not o.startswith('#|')).strip()

def parsed(src):
    "Syntax tree of `src`, None if it is not plain Python"
    try: return ast.parse(src)
    except SyntaxError: return

def free_names(src):
    "Global names that `src` uses and does not make itself"
    used,made = set(),set()
    def _walk(t):
        for s in t.get_symbols():
            if t.get_type()=='module' and (s.is_assigned() or s.is_imported()): made.add(s.get_name())
            elif s.is_referenced() and (s.is_global() or t.get_type()=='module'): used.add(s.get_name())
        for o in t.get_children(): _walk(o)
    _walk(symtable.symtable(src, 'src', 'exec'))
    return used-made

def definitions(tree):
    "Functions and classes of module `tree`, patched methods as `Class.method`, with the methods that classes define"
    res = {}
    for o in tree.body:
        if not isinstance(o, (ast.FunctionDef,ast.ClassDef)): continue
        a = o.args.args[0].annotation if isinstance(o, ast.FunctionDef) and o.args.args else None
        is_patch = isinstance(o, ast.FunctionDef) and any(getattr(getattr(d, 'func', d), 'id', '').startswith('patch') for d in o.decorator_list)
        res[f'{ast.unparse(a)}.{o.name}' if is_patch and a else o.name] = o
        if isinstance(o, ast.ClassDef): res |= {f'{o.name}.{m.name}': m for m in o.body if isinstance(m, ast.FunctionDef)}
    return res

class Book:
    "A notebook: where names are defined, the prose above, and the examples below"
    def __init__(self, f):
        self.cells = [c for c in read_nb(f).cells if c.source.strip()]
        self.defs = {n:i for i,c in enumerate(self.cells) if is_export(c) for n in definitions(parsed(code_of(c)) or ast.parse(''))}
        found = re.search(r'^#\| *default_exp +(\S+)', '\n'.join(c.source for c in self.cells), re.MULTILINE)
        self.module = found and found[1]

    def sources(self, name):
        "arXiv ids in the prose above the definition of `name`"
        i,prose = self.defs[name]-1,[self.cells[self.defs[name]].source]
        while i>=0 and (self.cells[i].cell_type=='markdown' or 'exporti' in directives(self.cells[i])):
            prose.insert(0, self.cells[i].source)
            i -= 1
        return uniqueify(_re_arxiv.findall('\n'.join(prose)))

    def example(self, name, known):
        "Code that shows `name`"
        marked = [c for c in self.cells if c.cell_type=='code' and any(name in o.replace(',', ' ').split() for o in _re_example.findall(c.source))]
        if marked: return session(code_of(marked[0]), output(marked[0]))
        for c in self.cells[self.defs.get(name, 0)+1:]:
            if c.cell_type!='code' or is_export(c) or directives(c) & {'hide','slow','eval','default_exp'}: continue
            src = code_of(c)
            if not parsed(src) or len(src.splitlines())>10: continue
            names = free_names(src)
            if name in names and names<=known: return session(src, '')

def output(c):
    "The output of cell `c`, if it is one line"
    texts = [''.join(o['data'].get('text/plain', '')) for o in c.get('outputs', []) if o.output_type=='execute_result']
    return texts[0] if texts and len(texts[0].splitlines())==1 and ' at 0x' not in texts[0] else ''

def session(src, out):
    "Python `src`, with what its last line gives, `out`, beside it"
    return f'{src}  # gives {out}' if out and '#' not in src.splitlines()[-1] else src

# What a function raises

def message(o):
    "The text of error `o`, with `...` for what is filled in; None if it has none"
    if isinstance(o, ast.Constant) and isinstance(o.value, str): return o.value
    if isinstance(o, ast.JoinedStr): return ''.join(str(v.value) if isinstance(v, ast.Constant) else '...' for v in o.values)
    if isinstance(o, ast.BinOp) and isinstance(o.op, ast.Add): return (message(o.left) or '...')+(message(o.right) or '...')

def raised(node):
    "Errors that the code of `node` raises itself: `ValueError: text`"
    for o in ast.walk(node):
        if isinstance(o, ast.Raise) and isinstance(o.exc, ast.Call) and isinstance(o.exc.func, ast.Name) and o.exc.args:
            if (m := message(o.exc.args[0])) and 'Cancel' not in o.exc.func.id: yield f'{o.exc.func.id}: {m}'

def errors(node, everything):
    "What `node` raises, itself or through a function of the package that it calls by name"
    called = [o.func.id for o in ast.walk(node) if isinstance(o, ast.Call) and isinstance(o.func, ast.Name)]
    found = [*raised(node), *(m for n in uniqueify(called) if isinstance(everything.get(n), ast.FunctionDef) for m in raised(everything[n]))]
    return uniqueify(found)[:max_errors]

# The text

def shown(o):
    "Default `o` as one would write it"
    return getattr(o, '__name__', None) or repr(o)

def para(text, indent):
    "`text` wrapped, its first line at `indent` and others further in"
    return textwrap.fill(' '.join(text.split()), width, initial_indent=' '*indent, subsequent_indent=' '*(indent+4), break_long_words=False, break_on_hyphens=False)

def argument(name, d, annotated):
    "Argument `name` with docment record `d` as a line, with its type if that was written"
    kind = f' ({getattr(d.anno, "__name__", None) or d.anno})' if annotated else ''
    default = '' if d.default is inspect.Parameter.empty else f' [default: {shown(d.default)}]'
    return para(f"{name}{kind}: {d.docment or ''}{default}", 4)

def doc_of(o, name, node, book, everything, known, example=True):
    "The whole docstring of object `o`, which `node` defines, and whether an example is missing"
    parts = [ast.get_docstring(node).split('\n\n')[0]]
    d = docments(o.__new__ if '__new__' in vars(o) and '__init__' not in vars(o) else o, full=True)
    ret = d.pop('return', None)
    params = inspect.signature(o).parameters
    args = [argument(k, v, k in params and params[k].annotation is not inspect.Parameter.empty) for k,v in d.items() if k not in ('self','cls')]
    if args: parts.append('\n'.join(['Args:', *args]))
    if ret and (ret.docment or ret.anno not in (None,inspect.Parameter.empty)):
        kind = '' if ret.anno in (None,inspect.Parameter.empty) else getattr(ret.anno, '__name__', None) or str(ret.anno)
        parts.append('\n'.join(['Returns:', para(': '.join(filter(None, [kind, ret.docment])), 4)]))
    init = everything.get(f'{name}.__init__', everything.get(f'{name}.__new__', node)) if isinstance(node, ast.ClassDef) else node
    if found := errors(init, everything): parts.append('\n'.join(['Raises:', *(para(m, 4) for m in found)]))
    if ids := book.sources(name): parts.append('Source: '+', '.join(f'arXiv:{i}' for i in ids))
    code = book.example(name, known) if example else None
    if code: parts.append('Example:\n'+textwrap.indent(code, '    '))
    return '\n\n'.join(parts),code is None

def literal(text, indent):
    "`text` as a docstring at column `indent`"
    text = text.replace('"""', "'''")
    if text.endswith('"'): text += ' '
    body = '\n'.join([text.split('\n')[0], *((' '*indent+o if o else o) for o in text.split('\n')[1:]), ' '*indent]) if '\n' in text else text
    return ('r' if '\\' in body else '')+f'"""{body}"""'

def write_doc(src, node, text):
    "Source `src` with `text` as the docstring of `node`"
    o,lines = node.body[0].value,src.splitlines(keepends=True)
    at = lambda line,col: sum(map(len, lines[:line-1]))+len(lines[line-1].encode()[:col].decode())
    return src[:at(o.lineno, o.col_offset)]+literal(text, node.col_offset+4)+src[at(o.end_lineno, o.end_col_offset):]

def known_names():
    "What an example may use without an import"
    ns = {}
    exec(f'from fastai.basics import *\nfrom {pkg}.all import *', ns)
    return set(ns)|set(dir(builtins))

def owner(key, public): return key in public or '.' in key and key.split('.')[0] in public and not key.split('.')[1].startswith('_')

@call_parse
def main(
    missing:str='', # File for the names that have no example
):
    "Write the docstrings of the exported modules"
    public = {n:o for n,o in vars(importlib.import_module(f'{pkg}.all')).items() if not n.startswith('_')}
    known,lacking = known_names(),[]
    books = [b for b in (Book(f) for f in nbglob(as_path=True).sorted()) if b.module and b.defs]
    trees = {b.module: definitions(ast.parse((lib/f'{b.module}.py').read_text(encoding='utf-8'))) for b in books}
    everything = {k:v for o in trees.values() for k,v in o.items()}
    for b in books:
        path,module = lib/f'{b.module}.py',importlib.import_module(f'{pkg}.{b.module}')
        src = path.read_text(encoding='utf-8')
        for key,node in sorted(trees[b.module].items(), key=lambda o: -o[1].body[0].lineno):
            if not owner(key, public) or ast.get_docstring(node) is None: continue
            cls,_,method = key.rpartition('.')
            o = getattr(public[cls], method, None) if cls else getattr(module, key)
            if isinstance(o, property) or o is None or getattr(o, '__module__', '')!=module.__name__: continue
            text,lacks = doc_of(o, key, node, b, everything, known, not cls)
            src = write_doc(src, node, text)
            if lacks and not cls: lacking.append(f'{b.module}: {key}')
        path.write_text(src, encoding='utf-8')
    if missing: Path(missing).write_text('\n'.join(lacking)+'\n', encoding='utf-8')
