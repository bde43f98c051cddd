"Whoever comes from another library finds every name of it in the tables of `coming_from.ipynb`"
import html, json, re, pytest
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
        momentum_redistribution nonzero_redistribution f(masking,name,weight,mask)'''}

def sections():
    "The rows of all tables under each main heading: cells as text"
    nb = json.loads((Path(__file__).parent.parent/'nbs'/'coming_from.ipynb').read_text())
    found,heading = {},None
    for c in nb['cells']:
        if c['cell_type']=='markdown': heading = ([heading]+re.findall(r'^## (.*)$', ''.join(c['source']), re.M))[-1]
        for o in c.get('outputs', []):
            rows = re.findall(r'<tr>((?:<td>.*?</td>)+)</tr>', ''.join(o.get('data', {}).get('text/html', [])))
            cells = [[html.unescape(re.sub('<[^>]*>', '', td)) for td in re.findall('<td>(.*?)</td>', r)] for r in rows]
            found.setdefault(heading, []).extend(cells)
    return found

def rows_of(library):
    rows, = [v for k,v in sections().items() if library in k]
    return rows

def named(name, cell):
    "Does `name` stand in `cell` as a whole word?"
    return re.search(rf'(?<![\w{{}}]){re.escape(name)}(?!\w)', cell.replace(', ', ',')) is not None

@pytest.mark.parametrize('library', NAMES)
def test_every_name_of_the_library_has_a_row(library):
    "No public name is left without a line that does it here"
    left = [o[0] for o in rows_of(library)]
    missing = [n for n in NAMES[library].split() if not any(named(n, o) for o in left)]
    assert not missing

@pytest.mark.parametrize('library', NAMES)
def test_every_row_has_a_line_that_fits_the_page(library):
    "A row without a line would be a promise, and a long one makes the table scroll"
    rows = rows_of(library)
    assert rows and all(len(o)==3 and 0<len(o[1])<80 for o in rows)

@pytest.mark.parametrize('name,cell,fits', [('mask', 'sparse_mask(sizes)', False), ('{p}', '{p}_mask', False), ('{p}_mask', '{p}_mask', True),
    ('update', 'algorithm.update(optimizer)', True), ('update', 'update_mask(p)', False), ('f(a,b)', 'f(a, b)', True)])
def test_a_name_is_found_as_a_whole_word_only(name, cell, fits):
    "`sparse_mask_like` doesn't stand for `sparse_mask`"
    assert named(name, cell)==fits
