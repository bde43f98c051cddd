"""What a reader has to hold in the head: counts of the core and of the whole, each with a limit that may only fall

The core is `core`, `masks`, `weights`, `model` and `train` with every module of the package that these import. A change that needs a higher limit needs another
design; one that lowers a count lowers its limit here. Lines have no limit: joined lines met it, and nobody could read them. Nodes can be golfed and density can be
padded, so both are counted, and calls, which no text changes.

- nodes: of the syntax tree, on lines of code (a token that isn't comment, docstring or import); per_line: nodes a line; weights: nodes of all that makes a weight
- dense, wide: % of the lines with more than three operations, with more than 120 columns; nested, walrus: comprehensions in comprehensions, `:=`, per 1,000 lines
- for_if, conditions: loops over `x if c else y`, statements that are a conditional or an `and`, `or`
- members: what `dir()` shows of a masked weight, and the most of any class of weights; attributes: on objects and classes of a run
- step, update, sparsify: calls inside the package, files they are in
- circles: rooms that import each other, by whatever way; up: imports of a room whose pages come later
- names_median, names_most: names that a module of the core takes from the package
- writes_train, writes_weights: writes to attributes of other objects, per 1,000 lines
- kinds: questions in the core of how a weight is stored; frames: inspected ones; classes: set on objects; private: names of torch in the core
- raises: per 1,000 nodes of the core
- contract: names in it; past_contract: names that edges take from the core besides it, what a user writes, and the functions of `masks`"""
import ast,gc,io,json,pytest,re,sys,tokenize,torch
from collections import Counter
from forks import run_code
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from torch import nn

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

comprehensions = ast.ListComp,ast.SetComp,ast.DictComp,ast.GeneratorExp
operations = (ast.BinOp,ast.BoolOp,ast.Compare,ast.UnaryOp,ast.IfExp,ast.Lambda,ast.Call,ast.Subscript,ast.NamedExpr,ast.JoinedStr,*comprehensions)
no_code = tokenize.COMMENT,tokenize.NL,tokenize.NEWLINE,tokenize.INDENT,tokenize.DEDENT,tokenize.ENDMARKER

def code_lines(module):
    "Numbers of the lines that hold code"
    tokens = tokenize.generate_tokens(io.StringIO(code(module)).readline)
    lines = {t.start[0] for t in tokens if t.type not in no_code}
    for n in ast.walk(tree(module)):
        if isinstance(n, (ast.Import,ast.ImportFrom)): lines -= set(range(n.lineno, n.end_lineno+1))
        if not isinstance(n, (ast.Module,ast.ClassDef,ast.FunctionDef)) or ast.get_docstring(n, False) is None: continue
        lines -= set(range(n.body[0].lineno, n.body[0].end_lineno+1))
    return lines

def holds_comprehension(node): return any(isinstance(n, comprehensions) for n in ast.walk(node) if n is not node)

@cache
def density(module):
    "How many lines, nodes, dense and wide lines and so on a module has"
    lines,text,done,c = code_lines(module),code(module).split('\n'),Counter(),Counter()
    for n in ast.walk(tree(module)):
        if getattr(n, 'lineno', 0) in lines:
            c['nodes'] += 1
            done[n.lineno] += isinstance(n, operations)
        c['nested'] += isinstance(n, comprehensions) and holds_comprehension(n)
        c['walrus'] += isinstance(n, ast.NamedExpr)
        c['for_if'] += isinstance(n, ast.For) and isinstance(n.iter, ast.IfExp)
        c['conditions'] += isinstance(n, ast.Expr) and isinstance(n.value, (ast.IfExp,ast.BoolOp))
    c['lines'] = len(lines)
    c['dense'] = sum(k>3 for k in done.values())
    c['wide'] = sum(len(text[i-1].rstrip())>120 for i in lines)
    return c

def total(what, ms): return sum(density(m)[what] for m in ms)
def share(what, ms, of=1): return round(of*total(what, ms)/total('lines', ms), 2)

def densities(prefix, ms):
    "Counts of the modules that `ms()` gives"
    per = dict(per_line=('nodes',1), dense=('dense',100), wide=('wide',100), nested=('nested',1000), walrus=('walrus',1000))
    out = {f'{prefix}_{k}':lambda what=what,of=of: share(what, ms(), of) for k,(what,of) in per.items()}
    return out|{f'{prefix}_{k}':lambda k=k: total(k, ms()) for k in ('nodes','for_if','conditions')}

def weights_story(): return of_room('weights')+[m for m in ('live.weight','live.run','shards.weight','core.optimizers') if m in modules]

def run_attributes(module):
    "Names that classes of a module and functions patched onto them keep, each with its class"
    found = set()
    for n in tree(module).body:
        owner = n.name if isinstance(n, ast.ClassDef) else None
        if isinstance(n, ast.FunctionDef) and n.args.args and n.args.args[0].arg=='self': owner = ast.unparse(n.args.args[0].annotation)
        if owner is None: continue
        for o in ast.walk(n):
            if isinstance(o, ast.Attribute) and isinstance(o.ctx, ast.Store) and isinstance(o.value, ast.Name) and o.value.id=='self': found.add((owner, o.attr))
            if isinstance(o, ast.Call) and getattr(o.func, 'id', '')=='store_attr' and o.args: found |= {(owner, a) for a in ast.literal_eval(o.args[0]).split(',')}
        for o in n.body if isinstance(n, ast.ClassDef) else []:
            if isinstance(o, ast.AnnAssign): found.add((owner, o.target.id))
            if isinstance(o, ast.Assign): found |= {(owner, e.id) for t in o.targets for e in ast.walk(t) if isinstance(e, ast.Name)}
    return found

def n_attributes(): return sum(len(run_attributes(m)) for m in [*of_room('train'),*weights_story()])

def visible(o): return {n for n in dir(o) if not n.startswith('__')}
def heirs(cls): return {cls}.union(*map(heirs, cls.__subclasses__()))

def n_members():
    "Of a masked weight, and of the class of weights that has most"
    for kind in ('live','shards'): import_module(f'fastsparse.{kind}.weight')
    from fastsparse.weights.find import masked_params
    from fastsparse.weights.weight import Weight
    model,_ = trained_run()
    return len(visible(masked_params(model)[0])),max(len(visible(c)) for c in heirs(Weight))

def calls(f):
    "How many functions of the package `f()` calls, and in how many files"
    files,n = set(),0
    def trace(frame, event, arg):
        nonlocal n
        if event!='call' or not frame.f_code.co_filename.startswith(f'{root}/'): return
        n += 1
        files.add(frame.f_code.co_filename)
    sys.setprofile(trace)
    try: f()
    finally: sys.setprofile(None)
    return n,len(files)

def mlp(): return nn.Sequential(nn.Linear(20,64), nn.ReLU(), nn.Linear(64,64), nn.ReLU(), nn.Linear(64,5))

@cache
def trained_run():
    "A model with masks, and the calls and files of each step under RigL; four in ten are neither updates nor beside one"
    from fastsparse.all import DynamicSparseTraining,RigL_presets,sparsify_model
    model = mlp()
    sparsify_model(model, .9, 'erk', seed=0)
    opt,x,y = torch.optim.Adam(model.parameters()),torch.randn(16,20),torch.randint(0,5,(16,))
    run = DynamicSparseTraining(model, opt, 100, **{**RigL_presets,'batches_per_update':5}, seed=0, sparse_compute=False)
    def step():
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        run.step()
    return model,[calls(step) for _ in range(20)][5:]

def second_sparsify():
    "Calls and files of a second call: the first looks for plug-ins, too"
    from fastsparse.all import sparsify_model
    return [calls(lambda: sparsify_model(mlp(), .9, 'erk', seed=0)) for _ in range(2)][1]

def count_calls():
    gc.disable()  # what is collected meanwhile would count
    steps = sorted(trained_run()[1])
    print(json.dumps(dict(step=steps[2], update=steps[-1], sparsify=second_sparsify())))

@cache
def counted_calls(): return json.loads(run_code('import test_house\ntest_house.count_calls()').stdout)  # where no test has left a model

def step_calls(i): return counted_calls()['step'][i]
def update_calls(i): return counted_calls()['update'][i]
def sparsify_calls(i): return counted_calls()['sparsify'][i]

def room(module): return module.split('.')[0]
def sources(module): return {s if s in modules else f'{s}.{name}'.lstrip('.') for s,name in imports(module)}&set(modules)
def arrows(): return {(m, s) for m in modules for s in sources(m) if room(m)!=room(s)}

def n_circles():
    "How many rooms import themselves by way of others"
    ways = {(room(a), room(b)) for a,b in arrows()}
    while longer := {(a, c) for a,b in ways for b2,c in ways if b==b2}-ways: ways |= longer
    return sum(a==b for a,b in ways)

def n_up():
    "Imports between rooms, against the order of their pages"
    pages = [p.stem.partition('_') for p in (root.parent/'nbs').glob('[0-9]*_*.ipynb')]
    number = {name:int(n) for n,_,name in pages}
    first = {r:min(n for name,n in number.items() if room(name)==r) for r in map(room, number)}
    return sum(first.get(room(b), 0)>first.get(room(a), 1000) for a,b in arrows())

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

counts = dict(**densities('core', core), **densities('all', lambda: modules), weights_nodes=lambda: total('nodes', weights_story()), attributes=n_attributes,
    members=lambda: n_members()[0], members_most=lambda: n_members()[1], step_calls=lambda: step_calls(0), step_files=lambda: step_calls(1),
    update_calls=lambda: update_calls(0), update_files=lambda: update_calls(1), sparsify_calls=lambda: sparsify_calls(0),
    sparsify_files=lambda: sparsify_calls(1), circles=n_circles, up=n_up, names_median=lambda: median(map(names, core())),
    names_most=lambda: max(map(names, core())), writes_train=lambda: writes('train'), writes_weights=lambda: writes('weights'), kinds=lambda: matches(kind_words, core()),
    frames=lambda: matches(r'_getframe|currentframe', modules), classes=lambda: matches(r'__class__ ?=[^=]|__class__,\w', modules),
    private=lambda: len({o for m in core() for o in re.findall(private_torch, code(m))}),
    raises=lambda: round(1000*matches(r'\braise \w', core())/total('nodes', core()), 2), contract=lambda: len(listed('contract')),
    past_contract=lambda: len(past_contract()))

limits = dict(core_per_line=7.3, core_dense=12.7, core_wide=1.6, core_nested=.7, core_walrus=.7, core_nodes=33813, core_for_if=0, core_conditions=0,
    all_per_line=8.3, all_dense=16.8, all_wide=3.4, all_nested=.9, all_walrus=.8, all_nodes=146720, all_for_if=1, all_conditions=1,
    weights_nodes=10454, attributes=174, members=22, members_most=19, step_calls=108, step_files=13, update_calls=755, update_files=24,
    sparsify_calls=725, sparsify_files=25, circles=0, up=0, names_median=6, names_most=32, writes_train=4.3, writes_weights=6.6, kinds=3, frames=0,
    classes=2, private=4, raises=3.21, contract=49, past_contract=43)

@pytest.mark.parametrize('what', counts)
def test_a_count_stays_within_its_limit(what):
    count = counts[what]()
    assert count<=limits[what], f'{what}: {count}, and at most {limits[what]}'

def test_the_core_imports_no_edge(): assert {m.split('.')[0] for m in core()}=={*rooms}
