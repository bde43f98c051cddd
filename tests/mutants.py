"Do the tests notice a mistake? Change one thing in a room, run its tests, and see whether they fail: `python tests/mutants.py --help`"
import argparse,ast,csv,json,multiprocessing,os,random,re,shutil,sys,tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fastprogress.fastprogress import progress_bar
from pathlib import Path

root = Path(__file__).resolve().parent.parent
rooms = {  # and the tests of each, those that are likely to notice first
    'core.checks': 'project refusals', 'core.registry': 'registry method', 'core.patterns': 'patterns layers', 'core.files': 'files', 'core.ranks': 'init distributed',
    'core.optimizers': 'growth scores callback',
    'masks.selection': 'selection', 'masks.structures': 'structures', 'masks.distributions': 'distributions', 'masks.apportion': 'apportion', 'masks.schedules': 'schedules',
    'masks.scores': 'scores',
    'weights.optimizers': 'scores growth', 'weights.gradient': 'weights', 'weights.weight': 'sparsify layers enforcement weights', 'weights.find': 'weights', 'weights.guard': 'enforcement weights', 'weights.hooks': 'sparsify enforcement',
    'model.layers': 'init layers sparsify', 'model.running': 'init sparsify', 'model.init': 'init', 'model.choose': 'layers sparsify constants', 'model.trained': 'init',
    'model.starting': 'sparsify init', 'model.buffers': 'sparsify enforcement copies', 'model.sparsify': 'sparsify enforcement layers', 'report.summary': 'sparsify init face',
    'train.method': 'method presets refusals', 'train.plan': 'outlook updates growth laws engine calls refusals', 'train.begin': 'calls refusals enforcement engine', 'train.moves': 'updates engine',
    'train.engine': 'method updates init engine presets runs', 'train.loop': 'engine resume live', 'train.growth': 'growth updates fit', 'train.presets': 'presets',
    'train.callback': 'calls callback restore init learner fit', 'train.fit': 'refusals fit',
    'kernels.vectors': 'vectors', 'kernels.linear': 'geometry linear', 'kernels.convolution': 'convolution geometry', 'kernels.blocks': 'blocks block_weights',
    'kernels.ops': 'ops geometry live_layers', 'kernels.timing': 'timing inputs',
    'live.tensor': 'live_tensor live_layers', 'live.values': 'live_tensor live_optimizers live_layers', 'live.products': 'live_layers geometry plan',
    'live.projection': 'live_moves', 'live.weight': 'live_layers geometry live', 'live.compute': 'live_layers fast_way geometry plan live',
    'live.run': 'live live_layers updates resume rules', 'live.born': 'born',
    'special.starts': 'starts', 'special.structures': 'structures',
    'card.together': 'updates', 'card.blocks': 'blocks block_weights', 'card.units': 'updates structures', 'shards.weight': 'distributed',
    'learned.sparseness': 'learned compat', 'learned.masks': 'learned learned_models', 'trainers.callbacks': 'schedules trainers',
    'save.disk': 'files shards', 'save.files': 'files', 'save.state': 'restore files', 'save.masks': 'sparsify restore files enforcement', 'save.run_file': 'restore any_run checkpoint resume',
    'save.checkpoint': 'calls checkpoint any_run resume', 'save.shapes': 'cut', 'save.load': 'calls told restore files cut', 'save.rules': 'rules',
    'report.flops': 'flops flops_training', 'report.history': 'history', 'report.cost': 'calls cost', 'report.pictures': 'pictures',
    'prune.magnitude': 'calls magnitude saliency sparsify', 'prune.inputs': 'calls layerwise refit inputs experts', 'prune.shards': 'shards',
    'prune.layerwise': 'calls layerwise refit inputs experts shards', 'prune.saliency': 'calls saliency sparsify', 'prune.tickets': 'calls tickets', 'prune.finetune': 'calls finetune',
    'cut.groups': 'shrink groups channels cuts', 'cut.walk': 'shrink groups channels cuts', 'cut.solve': 'solve', 'cut.config': 'cut', 'cut.call': 'call',
    'cut.channels': 'calls channels cuts', 'cut.experts': 'experts cut', 'cut.layers': 'cut', 'cut.tokens': 'tokens', 'cut.shrink': 'shrink groups cuts cut',
    'deploy.compact': 'compact', 'deploy.export': 'export export_files', 'deploy.rates': 'narrow', 'deploy.narrow': 'narrow fit',
    'deploy.search': 'narrow fit',
    'compat.cerebras': 'compat', 'compat.dmx': 'compat', 'compat.sparselearning': 'compat', 'compat.modelopt': 'compat',
    'circuits.language': 'circuits', 'circuits.model': 'circuits', 'circuits.train': 'circuits circuit_training', 'circuits.checkpoints': 'circuit_files',
    'circuits.search': 'circuits', 'circuits.draw': 'circuits', 'circuits.run': 'circuits cli'}
pairs = [(ast.Lt,ast.LtE), (ast.Gt,ast.GtE), (ast.Eq,ast.NotEq), (ast.Is,ast.IsNot), (ast.In,ast.NotIn), (ast.Add,ast.Sub), (ast.Mult,ast.Div),
    (ast.And,ast.Or), (ast.BitAnd,ast.BitOr)]
swaps = {a:b for x,y in pairs for a,b in ((x,y),(y,x))}|{ast.FloorDiv:ast.Div}
names = dict(min='max', max='min', any='all', all='any', zeros_like='ones_like', floor='ceil', ceil='floor')

def changes(tree):
    "Each mistake that could be made in `tree`: a place, what is said of it, and what makes it"
    for n in ast.walk(tree):
        line = getattr(n, 'lineno', 0)
        if isinstance(n, ast.Compare) and type(n.ops[0]) in swaps: yield line,f'{type(n.ops[0]).__name__} swapped',(n,'ops',[swaps[type(n.ops[0])](), *n.ops[1:]])
        elif isinstance(n, (ast.BinOp,ast.AugAssign,ast.BoolOp)) and type(n.op) in swaps: yield line,f'{type(n.op).__name__} swapped',(n,'op',swaps[type(n.op)]())
        elif isinstance(n, ast.Constant) and isinstance(n.value, bool): yield line,f'{n.value} turned',(n,'value',not n.value)
        elif isinstance(n, ast.Constant) and isinstance(n.value, (int,float)): yield line,f'{n.value} plus 1',(n,'value',n.value+1)
        elif isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not): yield line,'not taken out',(n,'op',ast.UAdd())
        elif isinstance(n, ast.Name) and n.id in names: yield line,f'{n.id} swapped',(n,'id',names[n.id])
        elif isinstance(n, ast.Attribute) and n.attr in names: yield line,f'{n.attr} swapped',(n,'attr',names[n.attr])
        elif isinstance(n, ast.Expr) and isinstance(n.value, ast.Call): yield line,'statement taken out',(n,'value',ast.Constant(None))

def file_of(room): return Path('fastsparse', *room.split('.')).with_suffix('.py')

def source(room): return (root/file_of(room)).read_text(encoding='utf-8')

def in_messages(tree):
    "Lines of texts of errors and warnings, where a change is no mistake in what is computed"
    return {m.lineno for n in ast.walk(tree) if isinstance(n, ast.Raise) for m in ast.walk(n) if hasattr(m, 'lineno')}

def equal():
    "Mistakes that change nothing that a test may see, each with its reason in `mutants_equal.csv`; `*` is any in the line"
    with (root/'tests'/'mutants_equal.csv').open(encoding='utf-8') as f: return {tuple(o[:3]) for o in csv.reader(f)}

def sites(rooms):
    "All of them, by room"
    known = equal()
    for room in rooms:
        text = source(room)
        tree,lines = ast.parse(text),[o.strip() for o in text.splitlines()]
        said = in_messages(tree)
        for i,(line,what,_) in enumerate(changes(tree)):
            if line in said or line and {(room,lines[line-1],what), (room,lines[line-1],'*')}&known: continue
            yield room,i,line,what

def mutant(room, i):
    "The text of a room with the mistake `i`; without any if that is None"
    tree = ast.parse(source(room))
    if i is not None:
        _,_,(node,attr,value) = list(changes(tree))[i]
        setattr(node, attr, value)
    return ast.unparse(ast.fix_missing_locations(tree))

def notebook(room): return next((p for p in sorted((root/'nbs').glob('*.ipynb')) if re.fullmatch(rf'\d+[a-z]?_{re.escape(room)}', p.stem)), None)

def run_notebook(path):
    "Run a notebook's examples and tests on the package as it is installed, not on the code that the notebook holds"
    from fastcore.nbio import read_nb
    from execnb.shell import CaptureShell
    nb,room,own = read_nb(path),Path(path).stem.partition('_')[2],r'#\|\s*exporti?\b'
    nb.cells = [c for c in nb.cells if c.cell_type=='code' and not re.search(r'#\|\s*eval:\s*false|show_doc', c.source)]
    for c in nb.cells:
        if re.search(own, c.source): c.source = f'import fastsparse.{room} as _room\nglobals().update({{k:v for k,v in vars(_room).items() if k[:2]!="__" and v is not None}})'
    os.environ['IN_TEST'] = '1'
    os.chdir(root/'nbs')
    CaptureShell(path).run_all(nb, exc_stop=True)

def alone(folder, f, *args):
    "Run `f` in this process, on the package in `folder`; its result is the process's exit status"
    paths = [folder, str(root/'tests'), str(root)]
    os.environ |= dict(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS='1')
    sys.path[:0] = paths
    os.chdir(folder)
    with open(os.devnull, 'w') as out:
        for o in (1,2): os.dup2(out.fileno(), o)
    sys.exit(f(*args))

class Reached:
    "Which tests run each line of the rooms, and the seconds of each test"
    def __init__(self, folder, rooms):
        self.rooms,self.seconds,self.tests,self.now = {str(Path(folder)/file_of(o)):o for o in rooms},Counter(),{o:{} for o in rooms},set()

    def call(self, frame, event, arg):
        code = frame.f_code
        return self.line if code.co_filename in self.rooms and code.co_name!='<module>' else None

    def line(self, frame, event, arg):
        self.now.add((self.rooms[frame.f_code.co_filename], frame.f_lineno))
        return self.line

    def pytest_runtest_logstart(self): sys.settrace(self.call)

    def pytest_runtest_logreport(self, report): self.seconds[report.nodeid] += report.duration

    def pytest_runtest_logfinish(self, nodeid):
        sys.settrace(None)
        for room,line in self.now: self.tests[room].setdefault(line, []).append(nodeid)
        self.now.clear()

class Chosen:
    "Runs these tests in this order"
    def __init__(self, ids): self.place = {k:i for i,k in enumerate(ids)}

    def pytest_collection_modifyitems(self, items): items[:] = sorted((o for o in items if o.nodeid in self.place), key=lambda o: self.place[o.nodeid])

def run_tests(ids, plugin=None):
    import pytest
    files = list(dict.fromkeys(str(root/o.partition('::')[0]) for o in ids))
    return int(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', f'--rootdir={root}', '-m', 'not full', *files], [plugin or Chosen(ids)]))

def write_reached(folder, rooms, files, to):
    plugin = Reached(folder, rooms)
    if res:=run_tests(files, plugin): return res
    Path(to).write_text(json.dumps(dict(tests=plugin.tests, seconds=plugin.seconds)))

def function_at(room, line):
    "The lines of the innermost function that holds this one"
    spans = [range(o.lineno, o.end_lineno+1) for o in ast.walk(ast.parse(source(room))) if isinstance(o, ast.FunctionDef) and o.lineno<=line<=o.end_lineno]
    return min(spans, key=len, default=())

def tests_of(room, line, reached):
    "Tests that run a line, or else its function, or else any of the room's; the quickest first"
    lines,of_room = {int(k):v for k,v in reached['tests'][room].items()},[f'tests/test_{o}.py' for o in rooms[room].split()]
    mine = {k:[o for o in v if o.partition('::')[0] in of_room] for k,v in lines.items()}
    ids = mine.get(line) or [o for k in function_at(room, line) for o in mine.get(k, [])] or [o for o in reached['seconds'] if o.partition('::')[0] in of_room]
    return sorted(set(ids), key=lambda o: reached['seconds'][o])

def outcome(site, reached, seconds, processes):
    "'killed', 'slow' (killed by the clock) or 'survived'"
    room,i,line = site[:3]
    with tempfile.TemporaryDirectory() as d:
        shutil.copytree(root/'fastsparse', Path(d)/'fastsparse')  # with compiled kernels, which hold for files that don't change
        (Path(d)/file_of(room)).write_text(mutant(room, i), encoding='utf-8')
        for f,o in (*[(run_notebook, str(page)) for page in [notebook(room)] if page], (run_tests, tests_of(room, line, reached))):
            p = processes.Process(target=alone, args=(d, f, o))
            p.start()
            p.join(seconds)
            if p.exitcode is None: return p.kill() or 'slow'
            if p.exitcode: return 'killed'
    return 'survived'

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--n', type=int, default=600, help='how many mistakes to make, drawn from all')
    p.add_argument('--seed', type=int, default=0, help='which')
    p.add_argument('--jobs', type=int, default=os.cpu_count(), help='how many at a time')
    p.add_argument('--seconds', type=int, default=600, help='after which tests that go on count as failed')
    p.add_argument('--to', default='mutants.csv', help='a row for each, and beside, as .json, which tests run which lines; a run that was stopped goes on')
    p.add_argument('--rooms', nargs='+', default=['masks','weights','train','model'], help='where to make them: packages, or modules')
    args = p.parse_args()
    chosen = {k:v for k,v in rooms.items() if k in args.rooms or k.partition('.')[0] in args.rooms}
    processes = multiprocessing.get_context('forkserver')
    processes.set_forkserver_preload(['fastai.vision.all', 'numba', 'pytest', 'hypothesis', 'execnb.shell'])
    every = list(sites(chosen))
    drawn = random.Random(args.seed).sample(every, min(args.n, len(every)))
    path = Path(args.to)
    done = {tuple(o[:2]):o for o in csv.reader(path.open())} if path.exists() else {}
    left = [o for o in drawn if (o[0],str(o[1])) not in done]
    kept = path.with_suffix('.json')
    def fails(f, *args):
        p = processes.Process(target=alone, args=(str(root), f, *args))
        p.start()
        p.join()
        return p.exitcode
    if not kept.exists():
        for room in chosen:
            if (page:=notebook(room)) and fails(run_notebook, str(page)): sys.exit(f'{page.name} fails without any mistake')
        files = sorted({f'tests/test_{o}.py' for v in chosen.values() for o in v.split()})
        if fails(write_reached, str(root), [*chosen], files, str(kept.resolve())): sys.exit(f'{" ".join(files)}: tests fail without any mistake')
    reached = json.loads(kept.read_text())
    with ThreadPoolExecutor(args.jobs) as pool, path.open('a', newline='') as f:
        for site,res in zip(progress_bar(left), pool.map(lambda o: outcome(o, reached, args.seconds, processes), left)):
            csv.writer(f, lineterminator='\n').writerow([*site, res])
            f.flush()
    found = [o for o in csv.reader(path.open())]
    for room in chosen:
        mine = [o for o in found if o[0]==room]
        if mine: print(f"{room}: {sum(o[4]!='survived' for o in mine)} of {len(mine)} noticed")
    print(f"of {len(found)}, drawn from {len(every)}, {sum(o[4]!='survived' for o in found)/max(len(found), 1):.1%} were noticed; survivors:")
    for o in found:
        if o[4]=='survived': print(f'  {o[0]}.py, line {o[2]}: {o[3]}')

if __name__=='__main__': main()
