"The contract of the fastsparse of 2020: its names, their order, defaults and keywords, as its page had them"
import ast,inspect,pytest,torch,warnings
import fastsparse.all
from fastsparse.all import *
from helpers import live,mlp

page = '''sparse_mask(sizes, sparsity)
sparse_mask_like(param, sparsity)
maybe_float(num)
sparse_params(module)
apply_masks(module, inplace=True)
is_sparseable_module(m, additional_types=[])
sparseable_modules(model, additional_types=[])
uniform_sparsity(params, model_sparsity)
first_layer_dense_uniform(params, model_sparsity)
erdos_renyi_sparsity(params, model_sparsity, include_kernel=True, erk_power_scale=1.)
sparsify_model(model, model_sparsity, sparse_f=uniform_sparsity, enforce_mask=True)
random_score(p)
weight_magnitude(p)
gradient_magnitude(p)
gradient_momentum(p, opt)
top_k_mask(t, n_keep)
DynamicSparseTrainingCallback(sparse_modules=None, batches_per_update=None, initial_drop_grow_pct=.3, stop_pct=.75,
    keep_score_f=weight_magnitude, grow_score_f=gradient_magnitude)'''.replace('\n    ', ' ').splitlines()
inside = dict(sparsity='model_sparsity')  # our word for theirs, where both are taken

@pytest.mark.parametrize('line', page)
def test_a_signature_stays(line):
    "Arguments in the page's order, with its defaults; what came later stands behind them"
    call = ast.parse(line, mode='eval').body
    wanted = [(o.id, inspect.Parameter.empty) for o in call.args]+[(o.arg, eval(ast.unparse(o.value), vars(fastsparse.all))) for o in call.keywords]
    found = [o for o in inspect.signature(getattr(fastsparse.all, call.func.id)).parameters.values() if o.kind!=o.VAR_POSITIONAL]
    names = [inside.get(o.name, o.name) if 'model_sparsity' in line else o.name for o in found]
    assert list(zip(names, [o.default for o in found]))[:len(wanted)]==wanted
    assert not [o for o in found[len(wanted):] if o.default is o.empty and o.kind!=o.VAR_KEYWORD]

def test_its_keywords_are_taken_without_a_warning():
    "Both words for the sparsity; uniform by default, and a half of 6*8, 8*8 and 8*4 weights"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for kw in (dict(model_sparsity=.5), dict(sparsity=.5), dict(model_sparsity=.5, sparse_f=uniform_sparsity, enforce_mask=True)):
            sparsify_model(m := mlp((6,8,8,4)), **kw)
            assert live(m)==[24,32,16]
        ps = [torch.ones(4,6), torch.ones(2,8)]
        assert uniform_sparsity(params=ps, model_sparsity=.5)==[.5,.5] and first_layer_dense_uniform(ps, model_sparsity=.5)==[0.,.5]
        assert erdos_renyi_sparsity(ps, model_sparsity=.5)==erdos_renyi_sparsity(ps, .5)
    with pytest.raises(TypeError, match='multiple values'): sparsify_model(mlp((6,8,4)), sparsity=.5, model_sparsity=.5)

def test_its_two_lines_drop_by_magnitude_and_grow_by_gradient():
    "As its defaults say; with a preset, what the call gives takes the place of the preset's own, and the rest is the preset's"
    cb = DynamicSparseTrainingCallback()
    assert (cb.method.keep_score_f,cb.method.grow_score_f,cb.method.initial_drop_grow_pct,cb.method.stop_pct)==(weight_magnitude,gradient_magnitude,.3,.75)
    assert DynamicSparseTrainingCallback(**SET_presets).method.grow_score_f is random_score
    cb = DynamicSparseTrainingCallback(None, 5, .3, .75, weight_magnitude, method='snfs')
    assert (cb.method.batches_per_update,cb.method.initial_drop_grow_pct,cb.method.stop_pct,cb.method.keep_score_f)==(5,.3,.75,weight_magnitude)
    assert DynamicSparseTrainingCallback(method='snfs').method.stop_pct==1. and cb.method.grow_score_f is gradient_momentum
