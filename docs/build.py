"Write README.md and the site in docs/_build/html from the notebooks, with Sphinx where nbdev would use Quarto"
import ast,contents,functools,json,subprocess,tomllib
from base64 import b64decode
from fastcore.nbio import *
from fastcore.script import call_parse
from fastcore.shutil import rmtree
from fastcore.utils import *
from fnmatch import fnmatchcase
from importlib import import_module
from nbdev.config import get_config,nbpath2html
from nbdev.doclinks import nbglob
from nbdev.serve import proc_nbs
from nbdev.showdoc import showdoc_nm
from os.path import relpath
from shutil import copytree,ignore_patterns
from urllib.parse import unquote,urlsplit

cfg = get_config()
root,nbs,docs = cfg.config_path,cfg.nbs_path,cfg.config_path/'docs'
src,site,images = docs/'_build/src',docs/'_build/html',docs/'images'
pages = {f: src/nbpath2html(f.relative_to(nbs)).with_suffix('.ipynb') for f in nbglob(as_path=True).sorted()}
texts = {f: src/f.name for f in sorted(root.glob('*.md')) if f.name!='README.md'}
symbol_links = {f"/{p.relative_to(src).with_suffix('.html').as_posix()}": f for f,p in pages.items()}  # nbdev's start at the site's root

_re_link = re.compile(r'\]\(([^)\s:#]*)(#[^)\s]*)?\)')
_re_module = re.compile(r'^#\| *default_exp +(\S+)', re.MULTILINE)
_re_bar = re.compile(r'[█|\- ]*(\d+\.\d+% \[[^]]*\]\s*)?')
_re_marks = re.compile(r'\[([^]]*)\]\([^)]*\)|[`*]')
_re_code = re.compile(r'<(code|pre|script)\b.*?</\1>', re.DOTALL)
_tags = {('echo','false'): 'remove-input', ('output','false'): 'remove-output', ('code-fold',''): 'hide-input'}  # a directive that is true has no value

@functools.cache
def api_pages():
    "The API's page of each name, in lower case. The API loads the whole package, which README.md needs not"
    import api
    return {n.lower(): page for n,page in api.page_of().items()}

def relink(s, f, to):
    "Send each link in markdown `s` of notebook `f` that leads to a file to `to(file, anchor, is_symbol)`"
    def _sub(m):
        t = symbol_links.get(m[1]) or (f.parent/m[1] if m[1] else f).resolve()
        return f"]({to(t, m[2] or '', m[1] in symbol_links)})" if t.exists() else m[0]
    return _re_link.sub(_sub, s)

def title_md(nb, *notes):
    "Title and description of processed `nb` as markdown, with `notes` between them"
    fm = nb_frontmatter(nb)
    return '\n\n'.join([f"# {fm['title']}", *notes, fm.get('description', '')])

def short(about):
    "The title that description `about` begins with: what stands before a colon, or before what it adds"
    return re.split(': |, (?=and |so |for |on |where |with )', about)[0]

def prose(s):
    "Markdown `s` of a cell without nbdev's directives, which say that it stands in llms.txt too"
    return re.sub(r'\A(#\|.*\n)+', '', s)

# The site

def is_exported(c): return c.cell_type=='code' and bool({'export','exports'} & c.directives.keys())

def defined(c):
    "Names of the public functions, classes and patched methods of exported cell `c`, in lower case"
    defs = [o for o in ast.parse(c.source).body if isinstance(o, (ast.FunctionDef,ast.ClassDef)) and o.name[0]!='_']
    return L(defs).map(lambda o: L(showdoc_nm(o))).concat().map(str.lower).unique()

def target(f, name):
    "The target of symbol `name`, in lower case, on the page of notebook `f`; targets are unique on the site"
    return f'{pages[f].stem}.{name}'

@functools.cache
def code_of(f):
    "All code of notebook `f`"
    return '\n'.join(c.source for c in read_nb(f).cells if c.cell_type=='code')

def png_width(o):
    "Pixels that the picture of output `o` is wide on a page: as its notebook says, or as many as it has; 0 without one"
    png = nested_idx(o, 'data', 'image/png')
    said = nested_idx(o, 'metadata', 'image/png', 'width')
    return said or (int.from_bytes(b64decode(join_out(png)[:32])[16:20]) if png else 0)

def is_wide(c, phone=660):
    "Has cell `c` a picture wider than `phone` pixels, which a phone would make too small to read?"
    return any(png_width(o)>phone for o in c.outputs)

def columns(d):
    "How many columns the table of output data `d` has"
    rows = re.findall(r'<tr.*?</tr>', join_out(d['text/html']), re.DOTALL)
    return max((len(re.findall('<t[dh]', o)) for o in rows), default=0)

def is_bar(o):
    "Is output `o` what a progress bar leaves behind?"
    return o.output_type=='stream' and all(_re_bar.fullmatch(l) for l in join_out(o.text).splitlines())

class Page:
    "Notebook `f`, processed as `nb`, on its way to Sphinx; `symbols` are the notebooks and names of all that is exported"
    def __init__(self, f, nb, symbols):
        store_attr()
        self.path = pages[f]
        self.name = self.path.relative_to(src).with_suffix('').as_posix()
        guides = ['index', *contents.reference, *contents.parts, *(o for _,globs in contents.parts.values() for o in globs)]
        self.is_guide = any(fnmatchcase(self.name, o) for o in guides)

    def _to(self, t, a, is_symbol):
        "Address of file `t` from this page; a method that no cell defines by itself is found at its class"
        a = a.lower()
        if is_symbol and (name := api_pages().get(a[1:])) and pages.get(t)!=self.path: return relpath(src/f'{name}.md', self.path.parent) + a.replace('.', '')
        to = relpath((pages|texts).get(t, t), self.path.parent)
        if not is_symbol: return to + a.replace('.', '')
        name = first(o for o in (a[1:], a[1:].split('.')[0]) if (t,o) in self.symbols)
        return f'{to}#{target(t, name)}' if name else to

    def md(self, s):
        "Markdown `s`, written for Quarto, as a cell for Sphinx"
        return mk_cell(relink(s, self.f, self._to), 'markdown')

    def cell(self, c):
        "Processed cell `c`: exported code below the targets of its names, Quarto's options as tags, tables in the theme's style"
        if c.cell_type=='raw': return []
        if c.cell_type=='markdown': return [self.md(fills[c.source](self.f) if c.source in fills else prose(c.source))]
        dirs,exported = c.directives,is_exported(c)
        c.remove_directives()
        if not c.source: return []
        c.outputs = [o for o in c.outputs if not is_bar(o)]
        image = dict(alt=dirs.get('fig-alt', ''), classes='wide' if is_wide(c) else '')
        tags = [t for o,t in _tags.items() if o in dirs.items()] + ['exported']*exported + ['hide-input']*(exported and self.is_guide)
        c.metadata = dict(tags=tags, mystnb=dict(image=image))
        for d in L(c.outputs).attrgot('data').filter():
            if 'text/html' in d: d['text/html'] = re.sub('<table[^>]*>', f'<table class="docutils{" wide"*(columns(d)>4)}">', join_out(d['text/html']))
            if 'text/markdown' in d: d['text/markdown'] = self.md(join_out(d['text/markdown'])).source
        targets = [f'({target(self.f, o)})=' for o in defined(c)] if exported else []
        return [*[mk_cell('\n'.join(targets), 'markdown')]*bool(targets), c]

    def title(self):
        "Title and description as markdown; a module is called by what it does, with its name below"
        fm = nb_frontmatter(self.nb)
        title,about = contents.titles.get(self.name, fm['title']),fm.get('description', '')
        if self.is_guide: return f'# {title}\n\n{about}'
        lines = [f'# {short(about)}', f'`{cfg.lib_path.name}.{title}`']
        return '\n\n'.join(lines if short(about)==about else [*lines, about])

    def save(self, *extra):
        "Write the page, with markdown `extra` at its end"
        about = found_by(self.name, nb_frontmatter(self.nb).get('description', ''))
        cells = [self.md(self.title()), *L(self.nb.cells).map(self.cell).concat(), *L(about, *extra).map(self.md)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_nb(new_nb(cells, dict(kernelspec=self.nb.metadata.kernelspec)), self.path)

def toctree(names, caption=None, hidden=True):
    "Pages `names` as a part of the sidebar, and in the text of their page unless they are `hidden`"
    called = {k: title for k,(title,_) in contents.parts.items()}
    lines = [f'{called[o]} </{o}>' if o in called else f'/{o}' for o in names]
    return '\n'.join(['```{toctree}', ':maxdepth: 1', *[':hidden:']*hidden, *[f':caption: {caption}']*bool(caption), '', *lines, '```'])

def in_parts(names):
    "Pages that are folded below the first page of each part; a page that no part names is one of the internals"
    named = [*contents.reference, *contents.parts]
    left = [n for n in names if n not in named]
    for first_page,globs in ({k: globs for k,(_,globs) in contents.parts.items()}|contents.folds).items():
        found = uniqueify(n for g in globs for n in left if fnmatchcase(n, g))
        left = [n for n in left if n not in found]
        if found: yield first_page,found

def plain_modules(room):
    "Links to the source of the modules of `room` that have no notebook, a line of markdown each"
    for p in sorted((cfg.lib_path/room).glob('[!_]*.py')):
        if 'AUTOGENERATED! DO NOT EDIT!' not in p.read_text(encoding='utf-8'): yield f'- [{room}.{p.stem}]({relpath(p, src/"internals")}): a module without a page'

def write_folds(parts):
    "Write the pages whose links the sidebar folds: the API, and the internals room by room; the names of the two"
    import api
    rooms = {f'internals/{k}': about for k,about in contents.rooms.items()}
    pages = {k: (short(about), f"`{cfg.lib_path.name}.{Path(k).name}`: {about}", parts[k], []) for k,about in rooms.items()}
    for name,title,about,inside in (
        ('api/index', 'API', 'Everything that `from fastsparse.all import *` gives, by what you want to do', {k: f'{o[0]}: {o[1]}' for k,o in api.groups.items()}),
        ('internals/index', 'Internals', 'How the library is made: modules are notebooks, and these are their pages', rooms)):
        lines = [f'- [](/{k}.md){o.removeprefix(short(o))}' for k,o in inside.items()]
        pages[name] = (title, about, list(inside), ['\n'.join(lines)])
    for name,(title,about,names,text) in pages.items():
        p = src/f'{name}.md'
        p.parent.mkdir(exist_ok=True)
        p.write_text('\n\n'.join([f'# {title}', about, *text, toctree(names, hidden=bool(text)), *plain_modules(p.stem), found_by(name, about)])+'\n', encoding='utf-8')
    return ['api/index','internals/index']

def gallery(f):
    "Links from notebook `f` to the tutorials, each with one of its pictures, as markdown"
    cards = []
    for name,cell in contents.thumbs.items():
        g = nbs/f'{name}.ipynb'
        nb = read_nb(g)
        outs = [o for c in nb.cells if c.id==cell for o in c.outputs]
        png = src/f'thumbs/{g.stem}.png'
        png.parent.mkdir(exist_ok=True)
        png.write_bytes(b64decode(first(join_out(o['data']['image/png']) for o in outs if 'image/png' in o.get('data', {}))))
        title = re.search('^# (.*)', nb.cells[0].source)[1]
        cards.append(f'[![](thumbs/{g.stem}.png){title}]({relpath(g, f.parent)})')
    return '\n\n'.join(['## What to do with it', '````{container} gallery', *cards, '````'])

def circuit(f):
    "The page on which a click opens a node of a circuit, as the tutorial shows it"
    outs = [o for c in read_nb(nbs/'tutorials/circuits.ipynb').cells if c.id==contents.circuit for o in c.outputs]
    html = first(join_out(o['data']['text/html']) for o in outs if 'text/html' in o.get('data', {}))
    return '\n\n'.join([fenced(html, '{raw} html'), 'Circles are channels of the network: `emb:69` is channel 69 of the embedding. Lines are weights, positive ones '
        'blue and negative ones orange; along a dotted line a channel is carried on.'])

fills = {f'<!-- {o.__name__} -->': o for o in (gallery,circuit)}  # what a markdown cell of the index stands for; the README leaves it out

def found_by(name, about):
    "What engines show of page `name`, a line in markdown, and what Sphinx's search shall find it by: whole phrases before all else, and their words"
    phrases = [' '.join(o.split()) for o in contents.searches.get(name, '').split(',') if o.strip()]
    words = sorted({w for o in phrases for w in re.findall(r'\w+', o)})
    plain = _re_marks.sub(lambda m: m[1] or '', about).strip()
    lines = ['.. meta::', f'   :description: {plain}'] + [f'   :keywords: {", ".join(words)}']*bool(words)
    return '\n'.join(['```{eval-rst}', *lines, '', *(f'.. index:: ! {o}' for o in phrases), '```'])

def undescribed():
    "Pages without a line that says what they are"
    for p in site.rglob('*.html'):
        if p.stem not in ('search','genindex') and not re.search(r'<meta content="[^"]+" name="description"', p.read_text(encoding='utf-8')):
            yield f'{p.relative_to(site)} has no description'

def lost_searches():
    "What people search for and the search does not lead to the page of `contents.searches`"
    index = json.loads((site/'searchindex.js').read_text(encoding='utf-8').removeprefix('Search.setIndex(').removesuffix(')'))
    for name,phrases in contents.searches.items():
        for o in phrases.split(','):
            led = [index['docnames'][i] for i,_,main in index['indexentries'].get(' '.join(o.lower().split()), []) if main]
            if led!=[name]: yield f'{name}: a search for "{o.strip()}" leads to {led}'

def write_api(symbols):
    "Write the API's pages; each name is linked to the code that makes it, on its page of `symbols` or in a module without a page"
    import api
    modules = {import_module(f'{cfg.lib_path.name}.{m[1]}'): f for f in pages if (m := _re_module.search(code_of(f)))}
    def _link(n):
        o = api.find(n)
        f = first(f for m,f in modules.items() if (o.__module__==m.__name__ if '.' in n else n in getattr(m, '__all__', ()) and getattr(m, n) is o))
        if not f: return f'[{o.__module__}]({relpath(inspect.getsourcefile(o), src/"api")})'
        path = pages[f].relative_to(src).with_suffix('')
        return f"[{path}](../{path}.ipynb{f'#{target(f, n.lower())}' if (f,n.lower()) in symbols else ''})"
    (src/'api').mkdir()
    for name,text in api.pages(_link): (src/f'{name}.md').write_text(f'{text}{found_by(name, api.groups[name][1])}\n', encoding='utf-8')

def dead_links():
    "Links within the site that lead to no page, or to no place on it, or stayed markdown"
    htmls = {p.resolve(): p.read_text(encoding='utf-8') for p in site.rglob('*.html')}
    ids = {p: set(re.findall(r'\sid="([^"]+)"', s)) for p,s in htmls.items()}
    for p,s in htmls.items():
        for l in re.findall(r'\]\([^)\s]*\)', _re_code.sub('', s)): yield f'{p.relative_to(site)}: {l}'
        for l in set(re.findall(r'\s(?:href|src)="([^"]+)"', s)):
            u = urlsplit(l)
            t = (p.parent/unquote(u.path)).resolve() if u.path else p
            if not u.scheme and (not t.exists() or u.fragment and u.fragment not in ids.get(t, ())): yield f'{p.relative_to(site)}: {l}'

def write_site(proc):
    "Build the site from the processed notebooks in `proc`"
    import api
    rmtree(src.parent, ignore_errors=True)  # a search index that is built again lacks the entries of pages that stay
    copytree(proc, src, ignore=ignore_patterns('*.ipynb', '*.txt', '*.yml'))
    for f,p in texts.items():
        text = f.read_text(encoding='utf-8')
        about = first(o for o in text.split('\n\n') if o[0]!='#')
        p.write_text('\n'.join([text, found_by(p.stem, ' '.join(about.split())), '']), encoding='utf-8')
    read = {f: read_nb(proc/f.relative_to(nbs)) for f in pages}
    symbols = {(f,o) for f,nb in read.items() for c in nb.cells if is_exported(c) for o in defined(c)}
    index,*rest = sorted((Page(f, nb, symbols) for f,nb in read.items()), key=lambda o: o.f!=nbs/cfg.readme_nb)
    parts = dict(in_parts([*L(rest).attrgot('name'), *api.groups]))
    for o in rest:
        folded = [toctree(parts[o.name])] if o.name in contents.parts else []
        o.save(*folded)
    write_api(symbols)
    reference = [*contents.reference, *write_folds(parts), *(p.stem for p in texts.values())]
    index.save(toctree(contents.parts, 'What do you want to do?'), toctree(reference, 'Reference'))
    rc = subprocess.run([sys.executable, '-m', 'sphinx', '-W', '--keep-going', *([] if sys.stdout.isatty() else ['-q']), '-c', docs, src, site]).returncode
    wrong = [*dead_links(), *undescribed(), *lost_searches(), *(f'{o} must stand on one page of docs/contents.py' for o in api.unplaced())]
    if rc or wrong: sys.exit('\n'.join(['The site has warnings, dead links or lost names:', *wrong]))

# The README

def md_table(h):
    "HTML table `h` as a markdown table, its first row as the head"
    rows = [re.findall(r'<t[hd][^>]*>(.*?)</t[hd]>', o, re.DOTALL) for o in re.findall(r'<tr.*?</tr>', h, re.DOTALL)]
    rows = [[re.sub(r'<[^>]*>', '', o).strip().replace('|', '\\|') for o in r] for r in rows]
    rows.insert(1, ['---']*len(rows[0]))
    return '\n'.join(f"| {' | '.join(r)} |" for r in rows)

def readme_md(s):
    "Markdown `s` of the index with links to pages leading to their notebooks, and links to the index staying in the README"
    return relink(s, nbs/cfg.readme_nb, lambda t,a,is_symbol: a if t==nbs/cfg.readme_nb and a else relpath(t, root))

def md_output(o, png, alt):
    "Output `o` of a cell as markdown; a picture is written to `png`, described by `alt`, and shown at its notebook's size"
    data = {k: join_out(v) for k,v in o.get('data', {}).items()}
    if kind := first(o for o in ('image/gif','image/png') if o in data):
        images.mkdir(exist_ok=True)
        path = png.with_suffix(f".{kind.split('/')[1]}")
        path.write_bytes(b64decode(data[kind]))
        width = nested_idx(o, 'metadata', kind, 'width') or '100%'
        return f'<img src="{path.relative_to(root).as_posix()}" alt="{alt}" width="{width}">'
    if 'text/markdown' in data: return readme_md(data['text/markdown'])
    if '<table' in data.get('text/html', ''): return md_table(data['text/html'])
    return fenced(render_text([o]).strip())

def readme_cell(c):
    "Processed cell `c` of the index as parts of the README"
    if c.cell_type=='raw' or c.source.startswith('<!--'): return []
    if c.cell_type=='markdown': return [readme_md(prose(c.source))]
    dirs = c.directives
    c.remove_directives()
    code = [] if dirs.get('echo')=='false' else [fenced(c.source, 'python')]
    outs = [] if dirs.get('output')=='false' else concat_streams(c.outputs)
    return code + [md_output(o, images/f'{c.id}_{i}.png', dirs.get('fig-alt', '')) for i,o in enumerate(outs)]

def badge(name, value, to):
    "A picture that says `name` and `value`, written to docs/images, as a link to file `to`"
    a,b = [7*len(o)+14 for o in (name,value)]
    text = ''.join(f'<text x="{x}" y="14" text-anchor="middle">{o}</text>' for x,o in ((a/2,name), (a+b/2,value)))
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{a+b}" height="20" role="img" aria-label="{name}: {value}"><rect width="{a}" height="20" fill="#444"/>' \
        f'<rect x="{a}" width="{b}" height="20" fill="#0072b2"/><g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{text}</g></svg>'
    images.mkdir(exist_ok=True)
    (images/f'{name}.svg').write_text(svg+'\n', encoding='utf-8')
    return f'[![{name}: {value}](docs/images/{name}.svg)]({to})'

def badges():
    "What holds without asking a server: who runs the tests, which Python, which licence"
    project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
    said = [('tests', 'make test', 'CONTRIBUTING.md'), ('python', project['requires-python'].replace('>=', '')+' or newer', 'pyproject.toml'),
        ('licence', project['license'], 'LICENSE')]
    return ' '.join(badge(*o) for o in said)

def write_readme(proc):
    "Write README.md, and its pictures to docs/images, from the processed index in `proc`"
    rmtree(images, ignore_errors=True)
    nb = read_nb(proc/cfg.readme_nb)
    parts = [title_md(nb, '<!-- Written by docs/build.py from nbs/index.ipynb -->', badges()), *L(nb.cells).map(readme_cell).concat()]
    (root/'README.md').write_text('\n\n'.join(parts)+'\n', encoding='utf-8')

@call_parse
def main(
    readme_only:bool=False, # Write README.md and no site?
):
    "Write README.md with its pictures in docs/images, and the site in docs/_build/html"
    proc = proc_nbs(force=True, n_workers=0, file_glob=cfg.readme_nb if readme_only else '')  # workers would load everything again
    write_readme(proc)
    if not readme_only: write_site(proc)
