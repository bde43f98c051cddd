"Every public name of each other library stands in the tables of `coming_from.ipynb`"
import ast, builtins, html, importlib, json, re, pytest
from pathlib import Path
from torch import nn

NAMES = {
    'fastsparse of 2020': '''
        sparse_mask sparse_mask_like mask_from_tensor sparsity_from_tensor maybe_float sparse_params apply_masks is_sparseable_module
        sparseable_modules uniform_sparsity first_layer_dense_uniform erdos_renyi_sparsity init_kaiming_normal_sparse_ sparsify_model
        random_score weight_magnitude gradient_magnitude gradient_momentum momentum_redistribution top_k_mask DynamicSparseTrainingCallback
        SET_presets SNFS_presets RigL_presets count_flops FlopsCounter {p} {p}_mask {p}_sparsity''',
    'cstorch.sparse': '''
        SparsityAlgorithm algorithm.num_sparse_params algorithm.initialize algorithm.csx_annotate_sparsity algorithm.sparsity
        algorithm.sparsify_parameter algorithm.apply algorithm.sparsify_module algorithm.prune_weights algorithm._grad_hook
        algorithm.sparsify_optimizer algorithm.update algorithm.visit_state algorithm.state_dict algorithm.load_state_dict Static
        DynamicSparsityAlgorithm(update= DynamicSparsityAlgorithm(add_summaries= algorithm.is_update_step algorithm.update_mask GMP SET RigL
        Group group.add group.extend configure configure.default_sparse_param_filter init.random init.topk init.from_zeros
        init.checkerboard init.make_init_method HyperParameterSchedule schedule.compute schedule(step) schedule.update schedule.visit_state
        schedule.get_min_max_end Constant Linear Exp Power Cosine Cycling Lambda make_hyperparam_schedule UpdateSchedule.is_update_step
        FreqSchedule ListSchedule make_update_schedule ScoreShaper ScoreFlattener OutputGroupScoreShaper InputGroupScoreShaper
        make_mask_drop_minimum make_mask_grow_maximum make_mask_topk_sparsity''',
    'sparselearning': '''
        CosineDecay LinearDecay MagnitudePruneDecay initial_sparsity final_sparsity T_max T_start interval decay.cumulative_sparsity decay.step
        decay.get_dr abs_grad_growth momentum_growth no_growth random_growth struct_abs_grad_growth f(masking,name,total_regrowth,weight)
        erdos_renyi_init get_erdos_renyi_dist lottery_ticket_init random_init resume_init struct_erdos_renyi_init struct_random_init
        global_magnitude_prune magnitude_prune struct_magnitude_prune f(masking,mask,weight,name) grad_redistribution
        momentum_redistribution nonzero_redistribution f(masking,name,weight,mask)''',
    'dmx.compressor.sparse': '''
        Sparseness sparseness.mask_gradient sparseness.blocked Sparseness.from_shorthand sparseness.get_mask class-Own(Sparseness) Dense TopK
        BlockTopK Bernoulli Sparsify sparsify.configure sparsify.density sparsify.forward sparsify.update_mask sparsify.mask_str
        sparsify.extra_repr LazySparsify LazySparsify.initialize_parameters LazySparsify.reset_parameters LazySparsify.cls_to_become
        SparsificationManager(...).step WeightSparseMixin layer.init_sparsifier layer.effective_weight layer.weight_sparseness
        layer.check_sparseness_dim_consistency''',
    'torch.nn.utils.prune': '''
        identity random_unstructured l1_unstructured random_structured ln_structured global_unstructured custom_from_mask remove is_pruned
        BasePruningMethod PruningContainer amount weight_orig weight_mask''',
    'fasterai': '''
        Sparsifier sparsifier.sparsify_layer sparsifier.print_sparsity SparsifyCallback sparsity granularity context nm lth rewind_epoch
        one_shot iterative agp one_cycle cos lin dsd start_pct end_pct random large_final squared_final small_final large_init small_init
        movement magnitude_increase grad_crit wanda PruneCallback KnowledgeDistillationCallback QuantizeCallback''',
    'Torch-Pruning': '''
        DependencyGraph BasePruner ignored_layers global_pruning round_to iterative_steps pruner.step MagnitudeImportance TaylorImportance
        RandomImportance tp.utils.count_ops_and_params''',
    'llm-compressor': '''
        SparseGPTModifier WandaPruningModifier MagnitudePruningModifier ConstantPruningModifier mask_structure targets ignore''',
    'torchao': '''
        WeightNormSparsifier sparse_block_shape WandaSparsifier BaseScheduler CubicSL sparsifier.squash_mask apply_fake_sparsity
        block_sparse_weight SupermaskLinear''',
    'ModelOpt': '''
        MagnitudeSearcher compute_valid_1d_patterns create_asp_mask fill get_nmprune_info m4n2_1d mn_1d_best reshape_1d'''}

@pytest.fixture(scope='module')
def page():
    "Makes every table of the page, whose lines `nbdev-test` runs: lists of (main heading, HTML shown now, HTML stored)"
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    names,heading,found = {},None,[]
    for c in nb['cells']:
        source = ''.join(c['source'])
        if c['cell_type']=='markdown': heading = ([heading]+re.findall(r'^## (.*)$', source, re.M))[-1]
        if c['cell_type']!='code': continue
        *body,last = ast.parse(source).body
        shows = isinstance(last, ast.Expr)
        if shows and 'scene' in names and not found:
            usual = names['known'](names['scene']())
            names['check'] = lambda line, claim: names['imports_of'](line, usual)
        exec(compile(ast.Module(body if shows else [*body, last], []), 'page', 'exec'), names)
        if shows: found.append((heading, eval(compile(ast.Expression(last.value), 'page', 'eval'), names).data, stored(c)))
    return found

def stored(cell): return ''.join(''.join(o.get('data', {}).get('text/html', [])) for o in cell['outputs'])

def rows_of(page, library):
    "The names of the table of `library`, and their lines"
    shown, = [o for heading,o,_ in page if library in heading]
    pairs = re.findall(r'<tr><td[^>]*><code class="there"[^>]*>(.*?)</code>.*?<code class="here"[^>]*>(.*?)</code>', shown)
    return [[html.unescape(re.sub('<[^>]*>', '', o)) for o in pair] for pair in pairs]

def named(name, cell):
    "Does `name` stand in `cell` as a whole word?"
    return re.search(rf'(?<![\w{{}}]){re.escape(name)}(?!\w)', cell.replace(', ', ',')) is not None

@pytest.mark.parametrize('library', NAMES)
def test_every_name_of_the_library_has_a_row(page, library):
    "No public name is left without a line that does it here"
    left = [o[0] for o in rows_of(page, library)]
    missing = [n for n in NAMES[library].split() if not any(named(n.replace('-', ' '), o) for o in left)]
    assert not missing

@pytest.mark.parametrize('library', NAMES)
def test_every_row_has_a_line_that_fits_the_page(page, library):
    "A row without a line would be a promise, and a long one nobody reads; names stand above lines, one cell a row, and both may wrap, so that no screen is too narrow"
    rows = rows_of(page, library)
    assert rows and all(name and 0<len(line)<140 for name,line in rows)
    shown, = [o for heading,o,_ in page if library in heading]
    assert all(o.count('<td')+o.count('<th')==1 for o in shown.split('<tr>')[1:]) and 'table-layout:fixed;width:100%' in shown
    assert shown.count('<code class=')==shown.count('overflow-wrap:anywhere')

def test_the_page_shows_the_tables_of_its_cells(page):
    "A table that was not made by the cell above it could say anything"
    assert len(page)==len(NAMES) and all(now==then for _,now,then in page)

def test_a_user_has_every_name_of_every_line(world):
    "Lines need what fastai and this package give, the import that the row shows, and the scene that the text tells: `is_pruned` once needed more"
    names,lines = world
    user = {}
    exec('from fastai.vision.all import *\nfrom fastsparse.all import *', user)
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    told = {o for c in nb['cells'] if c['cell_type']=='markdown' for o in re.findall(r'`(\w+)`', ''.join(c['source']))} | {'_','spec','kept','grown'}
    known = names['known'](names['scene']())
    for name,line in lines.items():
        tree = ast.parse(line)
        args = {o.arg for o in ast.walk(tree) if isinstance(o, ast.arg)}
        stored,used = [{o.id for o in ast.walk(tree) if isinstance(o, ast.Name) and isinstance(o.ctx, kind)} for kind in (ast.Store, ast.Load)]
        used -= args|stored
        shown = {o.split()[-1] for o in names['imports_of'](line, known)}
        assert not {o for o in used-told-shown if o not in user and not hasattr(builtins, o)}, (name,line)

def test_a_false_claim_stops_the_page():
    "Lines that fail and claims that don't hold are errors, not rows"
    names = {}
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    for c in nb['cells']:
        if c['cell_type']=='code' and 'table(\'' not in (source := ''.join(c['source'])): exec(source, names)
    with pytest.raises(AssertionError, match='sparse_mask'): names['table']('name | sparse_mask((10,), .5) | note\n    _.sum()==4')
    assert 'from fastsparse.core.patterns import indices_of' in names['table']("name | indices_of('b', ['a','b']) | note\n    _==[1]").data
    with pytest.raises(NameError): names['table']('name | nothing_like_it(3) | note\n    True')

@pytest.mark.parametrize('name,cell,fits', [('mask', 'sparse_mask(sizes)', False), ('{p}', '{p}_mask', False), ('{p}_mask', '{p}_mask', True),
    ('update', 'algorithm.update(optimizer)', True), ('update', 'update_mask(p)', False), ('f(a,b)', 'f(a, b)', True)])
def test_a_name_is_found_as_a_whole_word_only(name, cell, fits):
    "`sparse_mask_like` doesn't stand for `sparse_mask`"
    assert named(name, cell)==fits

# What a row says here is what the other library's own call does there, where both mean the same

def prune(): return pytest.importorskip('torch.nn.utils.prune')

def there_amount(m): prune().random_unstructured(m[0], 'weight', amount=20)
def there_random(m): prune().random_unstructured(m[0], 'weight', amount=.5)
def there_l1(m): prune().l1_unstructured(m[0], 'weight', amount=.5)
def there_scores(m): prune().l1_unstructured(m[0], 'weight', amount=.5, importance_scores=m[0].weight.detach().square())
def there_random_structured(m): prune().random_structured(m[0], 'weight', amount=.5, dim=0)
def there_ln(m): prune().ln_structured(m[0], 'weight', amount=.5, n=1, dim=0)
def there_global(m): prune().global_unstructured([(m[i], 'weight') for i in (0,4,6)], prune().L1Unstructured, amount=.5)

def there_own(m):
    "The half with the smallest squares goes, in each layer"
    class Own(prune().BasePruningMethod):
        PRUNING_TYPE = 'unstructured'
        def compute_mask(self, t, default_mask):
            mask = default_mask.clone()
            mask.view(-1)[t.square().view(-1).argsort()[:t.numel()//2]] = 0
            return mask
    for i in (0,4,6): Own.apply(m[i], 'weight')

def masks_there(m): return {n.removesuffix('_mask'):b.bool() for n,b in m.named_buffers() if n.endswith('weight_mask')}
def masks_here(names, m='model'): return {o.name:o.mask for o in names['masked_params'](names[m])}

@pytest.fixture(scope='module')
def world():
    "What the rows' lines begin with, and the lines of each library by the name in the row"
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    names,text = {},''
    for c in nb['cells']:
        source = ''.join(c['source'])
        if c['cell_type']!='code': continue
        if "table('''" in source: text += source
        else: exec(source, names)
    lines = {o.split(' | ')[0]:o.split(' | ')[1] for o in text.splitlines() if ' | ' in o and not o.startswith(' ')}
    return names,lines

def here(world, name):
    "Run the line of the row that begins with `name`, as `check` does; the names after it"
    names,lines = world
    own = names['scene']()
    for o in names['imports_of'](lines[name], names['known'](own)): exec(o, own)
    with own['learn'].no_bar(), own['learn'].no_logging(): own['_'] = names['value_of'](lines[name], own)
    return own

@pytest.mark.parametrize('row,there', [("l1_unstructured(m, 'weight', amount)", there_l1), ('importance_scores=t', there_scores),
    ("ln_structured(m, 'weight', amount, n=1, dim=0)", there_ln), ('global_unstructured(parameters, L1Unstructured, amount)', there_global)])
def test_the_same_weights_live_as_under_torchs_prune(world, row, there):
    m = world[0]['small']()
    there(m)
    mine = masks_here(here(world, row))
    for name,mask in masks_there(m).items(): assert mask.equal(mine[name]), name

@pytest.mark.parametrize('row,there', [("random_unstructured(m, 'weight', amount)", there_random), ('amount=20', there_amount),
    ("random_structured(m, 'weight', amount, dim=0)", there_random_structured)])
def test_as_many_weights_live_as_under_torchs_prune(world, row, there):
    m = world[0]['small']()
    there(m)
    mine = masks_here(here(world, row))['0.weight']
    theirs = masks_there(m)['0.weight']
    assert mine.sum()==theirs.sum()
    assert mine.flatten(1).any(1).sum()==theirs.flatten(1).any(1).sum()

def test_a_method_of_ones_own_of_torchs_prune(world):
    "Half of each layer by a score of one's own"
    m = world[0]['small']()
    there_own(m)
    mine = masks_here(here(world, 'class Own(BasePruningMethod)'))
    for name,mask in masks_there(m).items(): assert mask.equal(mine[name]), name

def test_pruning_again_and_again_as_torchs_container(world):
    "From the same half, down to a fifth by magnitude over all layers"
    own = here(world, 'PruningContainer')
    net,weights = world[0]['scene']()['net'],[]
    masks = masks_here(dict(own, net=net), 'net')
    m = world[0]['plain_copy'](net)
    for i in (0,4,6):
        prune().custom_from_mask(m[i], 'weight', masks[f'{i}.weight'])
        weights.append((m[i], 'weight'))
    live = sum(int(o.sum()) for o in masks.values())
    prune().global_unstructured(weights, prune().L1Unstructured, amount=live-own['_'] and own['_'])
    now = masks_here(own, 'net')
    for name,mask in masks_there(m).items(): assert mask.equal(now[name]), name

def test_a_model_that_torchs_prune_made_is_kept_sparse(world):
    "`prune.remove` leaves plain zeros, and `keep_zeros` masks of the same weights; without it the model is refused by name"
    m = world[0]['small']()
    there_global(m)
    masks = masks_there(m)
    with pytest.raises(ValueError, match='prune.remove'): world[0]['sparsify_model'](m, .5)
    for i in (0,4,6): prune().remove(m[i], 'weight')
    world[0]['keep_zeros'](m)
    mine = masks_here(dict(world[0], model=m))
    for name,mask in masks.items(): assert mask.equal(mine[name]), name

def fasterai(module):
    pytest.importorskip('fasterai')
    return importlib.import_module(f'fasterai.{module}')

def sparsifier(m, granularity, context, criteria, layer_type, **kwargs):
    return fasterai('sparse.sparsifier').Sparsifier(m, granularity, context, getattr(fasterai('core.criteria'), criteria), layer_type=layer_type, **kwargs)

def fasterai_masks(m): return {f'{n}.weight':o._mask.expand_as(o.weight).bool() for n,o in m.named_modules() if hasattr(o, '_mask')}

@pytest.mark.parametrize('row,args,sparsity', [
    ("Sparsifier(model, 'weight', 'local', large_final)", ('weight','local','large_final'), .9),
    ("sparsity={'0': .5, '4': .9}", ('weight','local','large_final'), {'0':.5, '4':.9}),
    ("context='global'", ('weight','global','large_final'), .5)])
def test_the_same_weights_live_as_under_fasterai(world, row, args, sparsity):
    "It keeps all scores from a threshold on, one or two of a layer more than the exact count"
    m = world[0]['small']()
    sparsifier(m, *args, (nn.Conv2d,nn.Linear)).sparsify_model(sparsity)
    mine = masks_here(here(world, row))
    for name,mask in fasterai_masks(m).items():
        if row.startswith('sparsity='): assert abs(int(mask.sum())-int(mine[name].sum()))<=2, name  # random there is no criterion here
        else: assert (mask!=mine[name]).sum()<=2, name

@pytest.mark.parametrize('row,granularity', [("granularity='filter'", 'filter'), ("granularity='kernel'", 'kernel')])
def test_whole_filters_and_kernels_as_under_fasterai(world, row, granularity):
    "The lowest go; its threshold keeps one group more than half"
    m = world[0]['small']()
    sparsifier(m, granularity, 'local', 'large_final', nn.Conv2d).sparsify_model(.5)
    mine,theirs = masks_here(here(world, row))['0.weight'],fasterai_masks(m)['0.weight']
    group = 36 if granularity=='filter' else 9
    assert (mine&~theirs).sum()==0 and (theirs&~mine).sum()==group

@pytest.mark.parametrize('row,criterion', [('small_final','small_final'), ('movement','movement'), ('magnitude_increase','magnitude_increase'),
    ('large_init, small_init','large_init')])
def test_a_criterion_chooses_as_under_fasterai(world, row, criterion):
    "All weights alive on both sides: the same ones go first"
    m = world[0]['small']()
    s = sparsifier(m, 'weight', 'local', criterion, (nn.Conv2d,nn.Linear))
    world[0]['steps_of'](m, world[0]['sgd'](m.parameters()), 3)
    own = world[0]['scene']()
    net = own['net'] = world[0]['small']()
    net.load_state_dict({k:v for k,v in m.state_dict().items() if '_init' not in k})
    world[0]['sparsify_model'](net, 0.)
    for o in world[0]['imports_of'](world[1][row], own): exec(o, own)
    exec(world[1][row], own)
    s.sparsify_model(.8)
    mine = masks_here(own, 'net')
    for name,mask in fasterai_masks(m).items(): assert (mask!=mine[name]).sum()<=2, name

@pytest.mark.parametrize('row,schedule,levels', [('one_shot','one_shot',{.9}), ('iterative','iterative',{.3,.6,.9})])
def test_levels_of_a_schedule_as_under_fasterai(world, row, schedule, levels):
    "The sparsities that a fit goes through"
    s = getattr(fasterai('core.schedule'), schedule)
    assert {round(.9*float(s.progress(i/100)), 6) for i in range(101)}-{0}==levels
    seen = set()
    names,lines = world
    own = names['scene']()
    for o in names['imports_of'](lines[row], own): exec(o, own)
    made = own['DynamicSparseTrainingCallback']
    def look(engine, t): seen.add(round(1-sum(o.live for o in engine.tallies)/sum(o.n for o in engine.tallies), 2))
    own['DynamicSparseTrainingCallback'] = lambda **kwargs: made(**kwargs, on_update=look)
    with own['learn'].no_bar(), own['learn'].no_logging(): exec(lines[row], own)
    assert seen==levels
