"Whoever comes from another library finds every name of it in the tables of `coming_from.ipynb`"
import ast, html, json, re, pytest
from pathlib import Path

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
        movement magnitude_increase grad_crit wanda''',
    'ModelOpt': '''
        MagnitudeSearcher compute_valid_1d_patterns create_asp_mask fill get_nmprune_info m4n2_1d mn_1d_best reshape_1d'''}

@pytest.fixture(scope='module')
def page():
    "Runs every cell of the page: lists of (main heading, HTML shown now, HTML stored)"
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    names,heading,found = {},None,[]
    for c in nb['cells']:
        source = ''.join(c['source'])
        if c['cell_type']=='markdown': heading = ([heading]+re.findall(r'^## (.*)$', source, re.M))[-1]
        if c['cell_type']!='code': continue
        *body,last = ast.parse(source).body
        shows = isinstance(last, ast.Expr)
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

def test_every_line_runs_and_the_page_shows_what_ran(page):
    "A table that was not made by the cell above it could say anything"
    assert len(page)==len(NAMES) and all(now==then for _,now,then in page)

def test_a_false_claim_stops_the_page():
    "Lines that fail and claims that don't hold are errors, not rows"
    names = {}
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    for c in nb['cells']:
        if c['cell_type']=='code' and 'table(\'' not in (source := ''.join(c['source'])): exec(source, names)
    with pytest.raises(AssertionError, match='sparse_mask'): names['table']('name | sparse_mask((10,), .5) | note\n    _.sum()==4')
    assert 'from fastsparse.patterns import named' in names['table']("name | named('b', ['a','b']) | note\n    _==[1]").data
    with pytest.raises(NameError): names['table']('name | nothing_like_it(3) | note\n    True')

@pytest.mark.parametrize('name,cell,fits', [('mask', 'sparse_mask(sizes)', False), ('{p}', '{p}_mask', False), ('{p}_mask', '{p}_mask', True),
    ('update', 'algorithm.update(optimizer)', True), ('update', 'update_mask(p)', False), ('f(a,b)', 'f(a, b)', True)])
def test_a_name_is_found_as_a_whole_word_only(name, cell, fits):
    "`sparse_mask_like` doesn't stand for `sparse_mask`"
    assert named(name, cell)==fits
