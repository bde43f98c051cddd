"The face: which names a user meets, what `help` says of them, what importing costs, and the style of what is exported"
import ast,builtins,inspect,json,os,pytest,re,subprocess,sys
import fastsparse.all
from fastcore.docscrape import NumpyDocString
from pathlib import Path

FACE = '''
    sparse_mask sparse_mask_like mask_from_tensor sparsity_from_tensor maybe_float top_k_mask sparse_params apply_masks
    is_sparseable_module sparseable_modules uniform_sparsity first_layer_dense_uniform erdos_renyi_sparsity sparsify_model
    init_kaiming_normal_sparse_ DynamicSparseTrainingCallback SET_presets SNFS_presets RigL_presets random_score weight_magnitude
    gradient_magnitude gradient_momentum momentum_redistribution count_flops FlopsCounter
    SparseEngine DynamicSparseTraining unsparsify sparsify_parameter sparse_summary
    layers_dense global_sparsity balanced_flops_sparsity given_sparsity
    Schedule CubicSchedule FreqSchedule
    gradient_saliency fisher_saliency MeanGradient SampledGradient MagnitudePlusGradient gradient_redistribution
    NM Block FanIn as_structure
    prune_to find_ticket
    flop_profile SparseHistory predict_cost configure
    learn_masks fold_masks LearnedMaskCallback mask_penalty Sparsify
    prune_magnitude prune_wanda prune_sparsegpt prune_refit prune_snip prune_grasp prune_synflow
    sparse_compute pack shrink plain_copy save_sparse load_sparse load_cut prune_tokens export_sparse'''
COMING = '''
    find_sparsity Interval SparseCheckpoint save_run load_run plot_topology SparseTrainerCallback
    SparseLightningCallback keep_zeros mask_adapters merge_sparse register_layer declares register_method methods_table
    log_updates store_dense unsparsify_parameter given_value save_delta load_delta animate_masks WaitForSparsity compare_with_narrow narrow_like
    channel_groups prune_channels ChannelPruning taylor_scores'''


root = Path(__file__).parent.parent
of_2020 = FACE.split()[:26]
words = set('''steps samples epochs part says wants handler candidates matches packed highest lowest fitting decide fresh stamp evaluating preserved agree
    speedup storages rule_for matching has_hooks sensitivity rewind model learn dls opt mask masks x y xb yb p score scores loss seed sparsity density layer layers
    params weights grads batch bs lr data train valid test run runs results report history ledger rules method methods schedule'''.split())
def public(): return {k:v for k,v in vars(fastsparse.all).items() if not k.startswith('_')}

def run(code, *flags):
    "What `code` prints in a process of its own"
    res = subprocess.run([sys.executable, *flags, '-c', code], capture_output=True, text=True, timeout=900, cwd=root, env={**os.environ, 'PYTHONPATH': str(root)})
    assert not res.returncode, res.stderr
    return res.stdout

# --- the names

def test_all_has_the_names_of_the_list():
    "A new name for users is added here"
    assert set(public())==set((FACE+COMING).split())

def said():
    "Modules and the texts of their errors and warnings"
    for f in sorted((root/'fastsparse').rglob('*.py')):
        if f.stem=='_modidx' or f.parts[-2] in ('circuits','compat'): continue
        for o in ast.walk(ast.parse(f.read_text(encoding='utf-8'))):
            if not (isinstance(o, ast.Raise) or isinstance(o, ast.Call) and getattr(o.func, 'id', '')=='warn'): continue
            yield f.stem,''.join(c.value for c in ast.walk(o) if isinstance(c, ast.Constant) and isinstance(c.value, str))

def test_what_a_message_tells_to_call_is_in_the_star():
    "Names of ours that errors and warnings mention, where no import is said"
    modidx = ast.literal_eval((root/'fastsparse/_modidx.py').read_text(encoding='utf-8').partition('d = ')[2])['syms']
    ours = {k.rpartition('.')[2] for names in modidx.values() for k,(page,_) in names.items() if '#' in page and page.partition('#')[2].count('.')==0}
    told = {(n,f) for f,text in said() for n in re.findall(r'(?<![.\w])([a-z]+_\w+|[A-Z]\w+|\w+(?=\())', text) if n in ours and 'fastsparse.' not in text}
    assert not {(n,f) for n,f in told if n not in public() and n not in ('Structure','Method','Weight','PiecewiseSchedule','put_','export')}

def test_the_names_of_2020_stay():
    "What a script of 2020 imported is still there"
    assert of_2020[-1]=='FlopsCounter' and set(of_2020)<=set(public())

def test_no_name_is_a_word_that_people_give_to_variables():
    "A star import must not be what `steps` means in a notebook"
    assert not set(public()) & words and not set(public()) & set(dir(builtins))

@pytest.mark.parametrize('module', ['fastai.vision.all', 'fastai.text.all', 'fastai.tabular.all', 'fastai.collab'])
def test_no_name_replaces_one_of_fastai(module):
    "Both stars, either way round, give the same names"
    one,other = {},{}
    for ns,order in (one, (module, 'fastsparse.all')), (other, ('fastsparse.all', module)):
        for o in order: exec(f'from {o} import *', ns)
    assert one.keys()==other.keys() and not [k for k in one if k!='__builtins__' and one[k] is not other[k]]

# --- what importing costs and touches: a new interpreter for all that fastai must not be loaded for, and one for the rest

light = '''
import json,sys
found = {}
def look(step, *names): found[step] = [o for o in names if o in sys.modules]
import fastsparse as sparse
found['package'] = [o for o in sys.modules if o=='torch' or o.startswith('fastsparse.')]
heavy = 'fastai','pandas','matplotlib','fastprogress','IPython'
import fastsparse.train.engine
look('engine', *heavy, 'torch._dynamo')
from fastsparse import sparsify_model,DynamicSparseTraining,sparse_compute,export_sparse
look('names of a loop', *heavy[:1], 'matplotlib')
from fastsparse import RigL_presets,SparseTrainerCallback,sparse_mask,shrink
look('more names', *heavy[:1], 'matplotlib')
import fastsparse.kernels.blocks,fastsparse.kernels.vectors
look('kernels', 'triton.language', 'numba')
from torch import nn
sparse.sparsify_model(nn.Sequential(nn.Linear(4,4)), .5)
from fastsparse import *
import fastsparse.all
assert sparse.masks.selection.sparse_mask is sparse_mask is sparse.sparse_mask and sparsify_model is sparse.sparsify_model
assert {o for o in vars(fastsparse.all) if o[0]!='_'}<=set(dir(sparse)) and not hasattr(sparse, 'nothing_like_it')
try: sparse.nothing_like_it
except AttributeError as e: assert 'nothing_like_it' in str(e)
print(json.dumps(found))'''

def test_importing_loads_no_more_than_is_asked_for():
    """`import fastsparse` loads nothing, and then has every name and module; an engine loads neither fastai nor what comes along with it, nor do names that are
    asked of the package, which looks in the modules that need neither fastai nor matplotlib first; kernels load no compiler"""
    steps = json.loads(run(light))
    assert len(steps)==5 and not any(steps.values()), steps

star = '''
import sys,torch
from fastai.basics import *
from fastai.callback.all import *
from torch.optim import Optimizer as TorchOptimizer
def classes():
    for m in list(sys.modules.values()):
        if getattr(m, '__name__', '').split('.')[0] not in ('fastai','fastcore','torch'): continue
        for o in list(vars(m).values()):
            if isinstance(o, type) and o.__module__.split('.')[0] in ('fastai','fastcore','torch'): yield o
before = {o: dict(vars(o)) for o in set(classes())}
optim = vars(sys.modules[TorchOptimizer.__module__])
hooks = [v for k,v in optim.items() if k.startswith('_global_optimizer') and isinstance(v, dict)]
n = [len(o) for o in hooks]
assert hooks
from fastsparse.all import *
changed = [f'{c.__name__}.{k}' for c,d in before.items() for k in {**d, **vars(c)} if k!='__abstractmethods__' and not k.startswith(('_abc','__weakref'))
    and vars(c).get(k) is not d.get(k) and not (c is Learner and (k not in d or k=='load'))]
assert not changed and n==[len(o) for o in hooks], (changed, n, [len(o) for o in hooks])
heavy = 'torch._dynamo','torch._inductor','sympy','numba','onnx','torch.onnx','transformers','lightning','torchvision','accelerate','fastai.vision'
print([o for o in heavy if o in sys.modules])'''

def test_the_star_replaces_nothing_in_the_classes_of_others_and_loads_no_compiler():
    """`Learner` may gain methods, and its `load` reads masks; torch's global hooks come with the first sparse weight. Neither torch's compiler nor what it brings
    along is loaded, nor fastai.vision and what else a core needs not"""
    assert run(star).strip()=='[]'

@pytest.mark.full
def test_importing_costs_little_more_than_fastai():
    "At most 1.1 times the CPU time of `fastai.basics`, the least of five processes each"
    def cost(module): return min(float(run(f'import time\nt = time.process_time()\nfrom {module} import *\nprint(time.process_time()-t)')) for _ in range(5))
    assert cost('fastsparse.all')<=1.1*cost('fastai.basics')

# --- help

def examples():
    "Public names whose docstring has an example, and its code"
    docs = {k: NumpyDocString(inspect.getdoc(o)) for k,o in public().items() if (inspect.isfunction(o) or inspect.isclass(o)) and inspect.getdoc(o)}
    return [(k, d['Examples']) for k,d in sorted(docs.items()) if d['Examples']]

@pytest.mark.parametrize('name,code', examples())
def test_an_example_of_help_runs(name, code):
    "With fastai's basics and ours imported, and nothing else"
    ns = {}
    exec('from fastai.basics import *\nfrom fastsparse.all import *', ns)
    ns['torch'].manual_seed(0)
    exec(code, ns)

# --- how exported code looks

def unused():
    "Imports of the exported modules that nothing in them uses: chkstyle sees those of `#| export` cells only"
    for f in sorted((root/'fastsparse').rglob('*.py')):
        if f.stem in ('__init__','all','contract','_modidx'): continue
        tree = ast.parse(f.read_text(encoding='utf-8'))
        used = {o.id for o in ast.walk(tree) if isinstance(o, ast.Name)}
        for o in tree.body:
            if not isinstance(o, (ast.Import,ast.ImportFrom)): continue
            names = [(a.asname or a.name).split('.')[0] for a in o.names]
            for n in names:
                if n!='*' and n not in used: yield f'{f.stem}: {n}'

def test_rooms_name_what_they_use_of_other_rooms():
    "No star between rooms, and no import that nothing uses"
    stars = [f'{f.stem}: {l}' for f in sorted((root/'fastsparse').rglob('*.py')) if f.stem!='all' for l in f.read_text(encoding='utf-8').splitlines() if re.match(r'from (\.|fastsparse\.)[\w.]+ import \*', l)]
    assert not stars and not list(unused())
