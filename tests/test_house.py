"""What a reader has to hold in the head: counts of the core, each with a limit that may only fall

The core is `core`, `masks`, `weights`, `model` and `train` with every module of the package that these import. A change that needs a higher limit needs another
design; one that lowers a count lowers its limit here.

- lines: of the core; weights: of that room; live_choice: of the rule and the run of live weights
- names_median, names_most: names that a module of the core takes from the package
- writes_train, writes_weights: writes to attributes of other objects, per 1,000 lines
- kinds: questions in the core of how a weight is stored; frames: inspected ones; classes: set on objects; private: names of torch in the core
- raises: per 100 lines of the core
- contract: names in it; past_contract: names that edges take from the core besides it, what a user writes, and the functions of `masks`"""
import ast,pytest,re
from functools import cache
from pathlib import Path
from statistics import median

root = Path(__file__).parents[1]/'fastsparse'
rooms = 'core','masks','weights','model','train'

@cache
def tree(module): return ast.parse(path_of(module).read_text())

def path_of(module):
    p = root.joinpath(*module.split('.'))
    return p/'__init__.py' if p.is_dir() else p.with_suffix('.py')

def module_of(path): return '.'.join(path.relative_to(root).with_suffix('').parts)

modules = sorted(module_of(p) for p in root.rglob('*.py') if p.name not in ('_modidx.py','__init__.py','__main__.py'))

@cache
def imports(module):
    "Pairs of a module of the package and a name that `module` takes from it, in functions too"
    found = []
    for n in ast.walk(tree(module)):
        if not isinstance(n, ast.ImportFrom): continue
        if n.level:
            base = module.split('.')[:-n.level]
            source = '.'.join([*base, *filter(None, [n.module])])
        elif (n.module or '').startswith('fastsparse'): source = n.module.removeprefix('fastsparse').lstrip('.')
        else: continue
        found += [(source, o.name) for o in n.names]
    return found

@cache
def core():
    "The modules of the core"
    todo,found = [m for m in modules if m.split('.')[0] in rooms],set()
    while todo:
        m = todo.pop()
        if m in found or m not in modules: continue
        found.add(m)
        todo += [source if source in modules else f'{source}.{name}'.lstrip('.') for source,name in imports(m)]
    return sorted(found)

def code(module): return path_of(module).read_text()
def of_room(room): return [m for m in modules if m.split('.')[0]==room]

def written(module):
    "Attributes that functions of a module set on objects other than their own"
    targets = []
    for n in ast.walk(tree(module)):
        if isinstance(n, ast.Assign): targets += n.targets
        elif isinstance(n, (ast.AugAssign,ast.AnnAssign)): targets.append(n.target)
    flat = [t for o in targets for t in (o.elts if isinstance(o, (ast.Tuple,ast.List)) else [o])]
    return [t for t in flat if isinstance(t, ast.Attribute) and not (isinstance(t.value, ast.Name) and t.value.id in ('self','cls','ctx'))]

def n_lines(ms): return sum(len(code(m).splitlines()) for m in ms)
def matches(pattern, ms): return sum(len(re.findall(pattern, code(m))) for m in ms)
def writes(room): return round(1000*sum(len(written(m)) for m in of_room(room))/n_lines(of_room(room)), 1)
def names(m): return len({name for _,name in imports(m)})

kind_words = r"\.kind\b|isinstance\([^)]*\b(?:Live|Sharded)\b|hasattr\([^)]*'cell'|type\(\w+\) is Masked|is_sharded\("
private_torch = r'torch\.(?:[a-z]\w*\.)*_[A-Za-z]\w*(?:\.\w+)*'

def listed(module): return {o.name for n in tree(module).body if isinstance(n, ast.ImportFrom) for o in n.names}

def past_contract():
    "The names that edges take from rooms of the core, and shouldn't"
    known,edges = listed('contract')|listed('all'),[m for m in modules if m.split('.')[0] not in (*rooms,'contract','all')]
    return {name for m in edges for source,name in imports(m) if source.split('.')[0] in ('core','weights','model','train')}-known

counts = dict(lines=lambda: n_lines(core()), names_median=lambda: median(map(names, core())), names_most=lambda: max(map(names, core())),
    writes_train=lambda: writes('train'), writes_weights=lambda: writes('weights'), kinds=lambda: matches(kind_words, core()),
    frames=lambda: matches(r'_getframe|currentframe', modules), classes=lambda: matches(r'__class__ ?=[^=]|__class__,\w', modules),
    private=lambda: len({o for m in core() for o in re.findall(private_torch, code(m))}),
    raises=lambda: round(100*matches(r'\braise \w', core())/n_lines(core()), 2), weights=lambda: n_lines(of_room('weights')),
    live_choice=lambda: n_lines(['live.compute','live.run']), contract=lambda: len(listed('contract')), past_contract=lambda: len(past_contract()))

limits = dict(lines=6662, names_median=6, names_most=32, writes_train=4.8, writes_weights=7.3, kinds=3,
    frames=0, classes=3, private=4, raises=1.74, weights=955, live_choice=423, contract=49, past_contract=45)

@pytest.mark.parametrize('what', counts)
def test_a_count_stays_within_its_limit(what):
    count = counts[what]()
    assert count<=limits[what], f'{what}: {count}, and at most {limits[what]}'

def test_the_core_imports_no_edge(): assert {m.split('.')[0] for m in core()}=={*rooms}
