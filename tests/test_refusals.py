"What training refuses: call, exception, text; and nothing has changed by then (law 10)"
import copy, fastai.optimizer as fo, math, pytest, torch, types
from fastai.basics import Adam,Callback,DataLoader,DataLoaders,Learner
from fastai.losses import CrossEntropyLossFlat
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets
from fastsparse.methods.presets import ACDC_presets,MEST_presets
from fastsparse.deploy.search import find_sparsity
from fastsparse.masks.distributions import as_distribution
from fastsparse.masks.schedules import PiecewiseSchedule,cubic_path,epochs,samples
from fastsparse.train.method import Method,find_method
from functools import partial
from helpers import *
from torch import nn
from torch.utils.data import TensorDataset

inf,nan,DST = math.inf,math.nan,DynamicSparseTrainingCallback

def sgd(m): return torch.optim.SGD(m.parameters(), lr=.1)

def learner(m):
    dl = DataLoader(TensorDataset(torch.randn(16, 10), torch.arange(16)%3), bs=8)
    learn = Learner(DataLoaders(dl, dl), m, loss_func=CrossEntropyLossFlat(), opt_func=Adam)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = lambda *args: None
    return learn

def models():
    d,s = mlp((10,10,3)),mlp((10,10,3))
    sparsify_model(s, .5, seed=0)
    return types.SimpleNamespace(dense=d, sparse=s)

def refused(call, error, text):
    "`call` raises `error` with `text`; its models are as before, and an engine can still be attached"
    o = models()
    before = copy.deepcopy((o.dense.state_dict(), o.sparse.state_dict()))
    with pytest.raises(error, match=text): call(o)
    assert agree(before, (o.dense.state_dict(), o.sparse.state_dict()))
    engine(o.sparse, sgd(o.sparse)).remove()

# --- settings, wherever they are given

settings = [('batches_per_update', v, 'whole number from 1|batches_per_update is') for v in (0, -1, 2.5, '4')]
settings += [(k, v, rf'{k}.*\{l}0,1\]') for k,l in (('initial_drop_grow_pct','['), ('stop_pct','(')) for v in (-.1, 1.5, nan, None, 'a', True)]
settings += [('stop_pct', 0, r'\(0,1\]'), ('drop_fraction', 1.5, 'drop_fraction is 1.5')]
settings += [('sparsity', v, r'sparsity.*\[0,1\)') for v in (1, 1., -.1, 90, nan, True)]
settings += [(k, v, 'function; |function:|must be one of') for k in ('keep_score_f','sparse_f','drop_count_f') for v in (None, 'magnitude', 3)]
settings += [(k, v, 'function or None|must be one of') for k in ('grow_score_f','redistribute_f','sparsity_path','grow_state_f') for v in ('nonsense', 3)]
settings += [('grow_init_f', v, say) for v,say in (('zero','must be one of'), (nan,'finite'), (inf,'finite'))]
settings += [('structure', '4:2', 'from 0 to 2'), ('structure', 3, 'Structure')]
settings += [(k, v, f'{k} is .* True or False') for k,v in (('replace_step','no'), ('replace_step',1), ('update_after_step',None))]

@pytest.mark.parametrize('key,value,say', settings)
def test_settings(key, value, say):
    "By a method, also beside schedules, an engine, of a dense or sparse model, and a callback when it is made"
    given = {'batches_per_update':10, **(dict(sparsity=.5) if key=='sparsity_path' else {}), key:value}
    for more in ({}, dict(updates=[5]), dict(drop_fraction=.2)):
        if not (key=='batches_per_update' and 'updates' in more or key in more):
            with pytest.raises(ValueError, match=say): Method(**given, **more)
    with pytest.raises(ValueError, match=say): DST(**given)
    refused(lambda o: engine(o.sparse, sgd(o.sparse), 40, **given), ValueError, say)
    refused(lambda o: engine(o.dense, sgd(o.dense), 40, **{'sparsity':.5, **given}), ValueError, say)

@pytest.mark.parametrize('s', [1, 1., -1e-9, 2, nan, inf])
def test_sparsities(s):
    "Value, range and fix"
    with pytest.raises(ValueError, match=r'sparsity is .*\[0,1\): a fraction such as 0.9'): Method(sparsity=s)

def method(**kwargs): return Method(**dict(batches_per_update=10)|kwargs)
def bound(n=100, batch_size=None, **kwargs): return lambda o: method(**kwargs).bind(n, batch_size=batch_size)
def loop(of='sparse', n=100, every=5, opt=sgd, **kwargs):
    return lambda o: engine(m := getattr(o, of), opt(m), n, **({} if every is None else dict(every=every)), **kwargs)
def fit(*args, **kwargs): return lambda o: learner(o.dense).fit_sparse(*args, **kwargs)
def search(**kwargs): return lambda o: find_sparsity(learner(o.dense), progress=False, **kwargs)
def sweep(**kwargs): return lambda o: learner(o.dense).sparse_lr_find(**kwargs)
def rules(spec): return lambda o: configure(spec)
def ruled(rules): return loop('dense', rules=rules, every=4)
def hidden(preset, **kwargs): return lambda o: preset(**kwargs)
def foreign(m): return sgd(nn.Linear(2,2))
fo_sgd = lambda m: fo.SGD(list(m.parameters()), lr=.1)

calls = [
    # an engine
    *[(loop(n=n), 'n_steps') for n in (0, None, 10.)], (loop(sparse_modules=[nn.Linear(2,2)]), 'sparse_modules'),
    (loop('dense', sparsity=.5, sparse_modules=[nn.Linear(2,2)]), 'sparse_modules'), (loop(sparsity=.5, sparse_f=lambda p, s: [.5]), 'returned 1'),
    (loop(opt=lambda m: torch.optim.LBFGS(m.parameters())), 'LBFGS'), (loop(every=1), 'replace_step=False'), (loop('dense'), r'sparsify_model.*sparsity='),
    (lambda o: DynamicSparseTraining(o.dense, sgd(o.dense), 100), 'pass sparsity=0.9'), (loop(opt=fo_sgd), 'DynamicSparseTrainingCallback'),
    (loop(on_update=[3]), 'on_update holds 3'), (loop(opt=foreign), "optimizer doesn't hold"),
    (lambda o: DynamicSparseTraining(o.sparse, sgd(o.sparse)), "n_steps is None, and method 'auto'"),
    (lambda o: DynamicSparseTraining(o.sparse, sgd(o.sparse), 100, method='rigel'), "did you mean 'rigl'"),
    *[(f, "method='rigl'") for f in (lambda o: DynamicSparseTraining(o.sparse, sgd(o.sparse), 100, 'rigl'), lambda o: SparseEngine(o.sparse, sgd(o.sparse), 100, 'rigl'),
        lambda o: DST('rigl'), fit(1, .9, 'rigl'))],
    (lambda o: DynamicSparseTraining(o.sparse, sgd(o.sparse), 100, RigL_presets), "method='RigL'"),
    (lambda o: DynamicSparseTraining(o.sparse, sgd(o.sparse), 100, method='set', batches_per_update=0), 'batches_per_update is 0'),
    (loop('dense', every=2, **GMP_presets(sparsity=.6, sparse_f=layers_dense(0))), 'must be below 0.'),
    (loop(method='static', every=None, sparsity=.9), 'sparse, and this method doesn.t move them'),
    # times and counts of a method
    (bound(updates=FreqSchedule(samples(640))), 'batch_size'), (bound(updates=FreqSchedule(epochs(1))), 'steps_per_epoch'),
    (bound(drop_fraction=CubicSchedule(.3, 0, stop=samples(640))), 'batch_size'), (bound(sparsity=CubicSchedule(0, .5, stop=epochs(2))), 'steps_per_epoch'),
    (bound(None, updates=[.5], drop_fraction=.3), 'n_steps'), (bound(None), 'n_steps is None.*drop_fraction= in steps'), (bound(0), 'n_steps is 0.*whole number from 1'),
    (bound(10.5), 'n_steps is 10.5'), (bound(updates=1), 'every step.*replace_step=False'), (bound(batch_size=64, updates=FreqSchedule(samples(70))), 'every step'),
    *[(lambda o, n=n: method(drop_count_f=lambda live, target, f: n).bind(100).n_keep(50, 50, .3), r'drop_count_f returned.*\[0,50\]') for n in (51, -1, 2.5, None, nan)],
    (lambda o: setattr(method(), 'stop_pct', .5), "a method doesn't change: call it with stop_pct=", AttributeError),
    (bound(sparsity_path=cubic_path()), 'sparsity_path wants the number'),
    # names
    *[(f, f"did you mean '{meant}'") for f,meant in ((lambda o: as_distribution('unifrom'), 'uniform'), (lambda o: method(sparse_f='erkk'), 'erk'),
        (lambda o: find_method('rigle'), 'rigl'), (lambda o: method(keep_score_f='magnitude'), 'weight_magnitude'), (lambda o: DST(mask_init='rand'), 'random'),
        (lambda o: sparsify_model(o.dense, .5, mask_init='magnitud'), 'magnitude'))],
    (lambda o: as_distribution('given_sparsity'), r'pass given_sparsity\(...\)'),
    (lambda o: RigL_presets(zzz=1), "'zzz' is no setting of a method: take some of batch_size, batches_per_update, ", TypeError),
    *[(lambda o, k=k: DST(**{k:50}), f"'{k}' is no setting of a method: ", TypeError) for k in ('n_steps','model','opt')],
    # settings that a preset's own would hide
    *[(f, f'pass {instead}= instead of {list(kw)[0]}=') for preset,kw,instead in (
        (MEST_presets, dict(batches_per_update=3), 'updates'), (MEST_presets, dict(initial_drop_grow_pct=.5), 'drop_fraction'),
        (MEST_presets, dict(stop_pct=.5), 'updates'), (ACDC_presets, dict(stop_pct=.5), 'updates'))
        for f in (hidden(preset, **kw), lambda o, preset=preset, kw=kw: Method.named(preset.name.lower(), **kw))],
    *[(lambda o, name=name: Method.named(name, batches_per_update=3), 'pass updates= instead') for name in ('softmest','dsd')],
    (lambda o: SparseTrainerCallback(sparsity=.8, method='mest', batches_per_update=3), 'pass updates= instead'),
    # a callback
    *[(lambda o, way=way: DST(sparse_compute=way), 'sparse_compute is .*None .by a fixed rule., True .measured., False or a plan') for way in ('x', 1, ['0.weight'])],
    *[(lambda o, kw=kw: DST(**kw), say) for kw,say in ((dict(batch_size=0), 'batch_size is 0'), (dict(on_update=[3]), r'on_update holds 3'), (dict(scale_rates=3), 'scale_rates is 3'),
        (dict(rules=[('0.*', dict(sparsity=2))]), 'sparsity is 2'), (dict(rules=3), 'rules is 3'))],
    (lambda o: learner(o.dense).fit(1, cbs=DST()), r'sparsify_model.*sparsity=|sparsity=.*sparsify_model'),
    (lambda o: learner(o.sparse).fit(1, cbs=DST(sparse_modules=[nn.Linear(2,2)])), 'sparse_modules'),
    (lambda o: SparseTrainerCallback(sparsity=.8, sparse_compute=True), 'call sparse_compute'),
    # one line
    *[(fit(*args), say) for args,say in (((0,.9),'n_epoch'), ((1,1.),r'\[0,1\)'), ((1,-.1),r'\[0,1\)'), ((1,'x'),'sparsity'), ((1,.9,-1.),'lr'), ((1,.9,None,'nope'),'nope'),
        ((1,.9,slice(-1,0)),'lr'), ((1,.9,slice('a',1.)),'lr'), ((1,.9,slice(None)),'lr'), ((1,.9,True),'lr'))],
    (fit(1, .9, cbs=[Callback(), 3]), 'cbs holds 3', TypeError),
    (lambda o: learner(o.sparse).fit_sparse(1, .9, method='static'), 'sparse, and this method doesn.t move them'),
    *[(search(**kw), say, (ValueError,TypeError)) for kw,say in ((dict(budget=2.5),'budget'), (dict(budget='a'),'budget'), (dict(seeds=0),'seeds is 0'), (dict(seeds=1.5),'seeds'),
        (dict(sparsities=('a',)),'sparsity'), (dict(sparsities=(1.5,)),'1.5'), (dict(tolerance='a'),'tolerance'), (dict(tolerance=-1),'tolerance'), (dict(lr=-1),'lr'), (dict(foo=1),'foo'),
        (dict(method='nope'),'nope'), (dict(seed=3),'seed'), (dict(mask_init='nope'),'mask_init'), (dict(sparse_f='nope'),'nope'), (dict(cbs=3),'cbs'),
        (dict(budget=2, sparsities=(.9,.99), seeds=1),'budget.* is 2'))],
    *[(sweep(**kw), 'must be a number above') for kw in (dict(start_lr=0), dict(start_lr=1., end_lr=.1), dict(end_lr=inf), dict(start_lr='a'), dict(end_lr=None), dict(start_lr=True))],
    # rules
    *[(rules(spec), say) for spec,say in (
        (1., r'sparsity is 1.0.*\[0,1\)'), (-.1, r'\[0,1\)'), (nan, r'\[0,1\)'), (True, 'a rule is True'), (None, 'there are no rules'), ([], 'there are no rules'), ([['*', {}]], 'a rule is'),
        (dict(method='best'), "method is 'best'.*rigl.*static"), (dict(method=3), 'method is 3'), (dict(density=.1), "has 'density'.*params, method.*sparsity"),
        (dict(method='dense', sparsity=.5), "has 'sparsity'.*dense"), (dict(params=3), 'params is 3.*glob'), (dict(params=[]), 'glob'), (dict(params=None), 'glob'),
        (dict(params=['a',3]), 'glob'), (dict(structure='4:2'), '4'), (dict(sparse_f='best'), 'sparse_f is .best.*erdos_renyi'),
        (dict(keep_score_f=dict(lam=3)), 'keep_score_f is.*a dict with a name as its type'), (dict(sparse_f=dict(type=['uniform'])), 'a dict with a name as its type'),
        (dict(keep_score_f=dict(type='MagnitudePlusGradient', mu=3)), "argument 'mu'.*takes lam"), (dict(keep_score_f=3), 'keep_score_f is 3'),
        (dict(sparse_f=dict(type='erdos_renyi', power=.5)), "sparse_f has the argument 'power'.*takes include_kernel, erk_power_scale"),
        (dict(mask_init='foo'), "mask_init is 'foo'(?=.*random)(?=.*magnitude).*checkerboard"), (dict(mask_init=3), 'mask_init is 3.*checkerboard'),
        (dict(mask_init=None), 'mask_init is None.*random'), (dict(grow_init_f='foo'), 'grow_init_f is .foo.*fresh_value.*initial_value'),
        (dict(grow_state_f=3), 'grow_state_f is 3'), (dict(keep_score_f=None), 'keep_score_f is None.*a name.*weight_magnitude'),
        (dict(method='rigl', keep_score_f='os.system'), 'keep_score_f is .*must be one of .*random_score'),
        (dict(drop_fraction=dict(type='best')), 'best.*cubic'), (dict(drop_fraction='x'), 'no schedule'), (dict(updates='x'), 'no update schedule'), (dict(sparsity='0.9'), "'0.9' is no schedule"),
        (dict(method='set', batches_per_update=0), 'batches_per_update is 0'), ([dict(params='a', sparsity=.5), dict(params='b', stop_pct=2)], 'stop_pct is 2'))],
    *[(rules({'sparsity':.5, key:dict(type=name, **{bad:1})}), f"{key} has the argument '{bad}'.*{name} takes none") for key,name,bad in (
        ('keep_score_f','random_score','p'), ('grow_score_f','gradient_momentum','opt'), ('redistribute_f','gradient_redistribution','generator'),
        ('grow_init_f','initial_value','idx'), ('grow_state_f','reset_state','mu'), ('drop_count_f','drop_of_live','live'))],
    *[(ruled(spec), say) for spec,say in ((['a'], "rules is 'a'.*pair"), ('x', "rules is 'x'"), ([(3., {})], 'a pattern is 3'), ([('*', 3)], 'a rule is'), ({'*':3}, 'a rule is'),
        ([], 'no rule gives'), ([('*', None)], 'no rule gives'), ([('zzz', {})], 'no rule gives a method to any.*0.weight'),
        ([('0.*', dict(sparsity=.5)), ('*', dict(sparsity=.5, structure='block 7x7'))], '7'))]]

@pytest.mark.parametrize('row', calls, ids=lambda row: row[1])
def test_calls(row):
    call,text,*error = row
    refused(call, error[0] if error else ValueError, text)

entries = dict(loop=lambda o, **kw: DynamicSparseTraining(o.sparse, sgd(o.sparse), 100, **kw), callback=lambda o, **kw: DST(**kw),
    engine=lambda o, **kw: SparseEngine(o.sparse, sgd(o.sparse), 100, **kw), fit_sparse=lambda o, **kw: learner(o.dense).fit_sparse(1, .8, **kw),
    preset=lambda o, **kw: RigL_presets(**kw), trainer=lambda o, **kw: SparseTrainerCallback(sparsity=.8, **kw),
    lightning=lambda o, **kw: SparseLightningCallback(sparsity=.8, **kw))

@pytest.mark.parametrize('entry', entries)
def test_a_mistyped_setting_is_guessed_in_every_entry(entry):
    "By its own name; no class that the user never met is named"
    for wrong,right in (('batch_per_update','batches_per_update'), ('keep_score','keep_score_f'), ('drop_frac','drop_fraction')):
        refused(lambda o: entries[entry](o, **{wrong:50}), TypeError, f"^{wrong!r} is no setting of a method: did you mean {right!r}\\?$")

@pytest.mark.parametrize('text,bad', [('2:4',.6),('2:4',.25),('1:4',.5)])
def test_the_final_sparsity_of_a_structure(text, bad):
    "What `sparsify_model` refuses, the engine refuses for a dense model, in the same words: a number, a path or a schedule"
    fits = as_structure(text).sparsity
    for kw in (dict(sparsity=bad), dict(sparsity=bad, sparsity_path=cubic_path()), dict(sparsity=PiecewiseSchedule((0.,bad), (.5,))), dict(sparsity=[0.,bad])):
        m = mlp((8,12,8,4))
        with pytest.raises(ValueError, match=f'has a sparsity of {fits}') as said: sparsify_model(m, bad, structure=text)
        with pytest.raises(ValueError) as says: engine(m, sgd(m), 60, 5, structure=text, **kw)
        assert str(said.value)==str(says.value) and not masked_params(m)
        kw['sparsity'] = {float:fits, list:[0.,fits]}.get(type(kw['sparsity']), PiecewiseSchedule((0.,fits), (.5,)))
        engine(m, sgd(m), 60, 5, structure=text, **kw)
        assert all(as_structure(text).legal(o.mask) for o in masked_params(m))

@pytest.mark.parametrize('text', ['1:4','2:4','1:4 pad','2:4 axis 0'])
@pytest.mark.parametrize('name', ['gmp','granet','acdc','dsd','softmest'])
def test_a_sparse_model_under_a_structure_is_refused_at_once_or_trains_to_the_end(name, text):
    "Scores that starve a layer ended a run at an update: '4 of 32 weights are too few for 1:4'"
    fits = as_structure(text).sparsity
    for goal in (fits, fits+.05):
        m = mlp((8,12,8,4), seed=0)
        sparsify_model(m, fits, structure=text, seed=0)
        opt,before = sgd(m),masks_of(m)
        def make(): return SparseEngine(m, opt, 20, method=name, sparsity=goal, structure=text, sparse_f='global', seed=0,
            **(dict(batches_per_update=4) if name in ('gmp','granet') else {}))
        if goal>fits:
            with pytest.raises(ValueError, match=f'has a sparsity of {fits}'): make()
            assert same_masks(before, masks_of(m))
            continue
        dst = make()
        for t in range(20):
            with torch.no_grad(): m[(0,2,4)[t%3]].weight.mul_(1e-4)
            dst.prepare(t)
            m(torch.randn(4,8)).square().mean().backward()
            dst.before_step(t)
            dst.after_step()
        assert all(as_structure(text).legal(tally.mask) for tally in dst.tallies)

@pytest.mark.parametrize('text,kind,say', [('[1, 2', '.json', 'is damaged, or no'), ('a: [b', '.yaml', 'is damaged, or no'), ('', '.yaml', 'there are no rules'), ('rigl', '.yaml', "a rule is 'rigl'"),
    ('- 3', '.yaml', 'a rule is 3'), ('null', '.json', 'there are no rules'), ('{"sparsity": 2}', '.json', r'sparsity is 2.*\[0,1\)'),
    ('- params: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ["touched"]]', '.yaml', 'bad.yaml.*is damaged, or no')])
def test_files_of_rules(text, kind, say, tmp_path, monkeypatch):
    "By path or by what stands in it; a tag that would call a function is not followed"
    monkeypatch.chdir(tmp_path)
    (tmp_path/f'bad{kind}').write_text(text)
    with pytest.raises(ValueError, match=say): configure(tmp_path/f'bad{kind}')
    assert not (tmp_path/'touched').exists()

def test_what_is_dead_or_trained():
    "No rate is swept for a model without signal, nor masks drawn over trained weights; `mask_init` says that they are known to be trained"
    learn = learner(mlp((10,10,3), act=nn.ReLU))
    sparsify_model(learn.model, .97, sparse_init_mode=None, seed=0)
    with torch.no_grad(): learn.model[2].weight.zero_()
    with pytest.raises(ValueError, match='Sequential is dead'): learn.sparse_lr_find()
    for opt in (Adam, partial(fo.SGD, mom=.9), fo.SGD):
        learn = learner(mlp((10,10,3)))
        learn.opt_func = opt
        learn.fit(1, 1e-3)
        was = snapshot(learn.model)
        with pytest.raises(ValueError, match="look trained.*mask_init='magnitude'|mask_init='magnitude'.*look trained"): learn.fit_sparse(1, .9)
        assert agree(was, snapshot(learn.model))
    learn.fit_sparse(1, .8, mask_init='magnitude', seed=0)

# --- misuse that anybody may try once: each error names the line to write

def small(sparse=True):
    m = mlp((8,16,4))
    if sparse: sparsify_model(m, .5, seed=0)
    return m

def on_meta():
    with torch.device('meta'): return mlp((8,16,4))

def learned_state():
    m = small(False)
    learn_masks(m, '2:4')
    return m.state_dict()

def saved_run(m, path):
    save_run(path, m)
    return path

X,Y = torch.randn(6, 8),torch.arange(6)%4
ce = nn.functional.cross_entropy
@pytest.mark.parametrize('f,text', [(lambda p: load_sparse(on_meta(), small().state_dict()), '0.weight is on the meta device.*call sparsify_model first'),
    (lambda p: load_run(saved_run(small(), p/'r.pt'), on_meta()), '0.weight is on the meta device.*call sparsify_model first'),
    (lambda p: load_sparse(small(False), learned_state()), 'call learn_masks as its run did, or .*fold_masks'),
    (lambda p: prune_channels(small(False), .5), 'xb is None.*pass a batch'),
    (lambda p: merge_sparse(small()), r'get_peft_model\(base, config\)'),
    (lambda p: save_delta(small(), p/'x', small().state_dict()), r'save_delta\(model, base, path\)'),
    (lambda p: DynamicSparseTraining(small().parameters(), sgd(small()), 20), 'must be a torch module'),
    (lambda p: SparseHistory().plot(), 'fit with this history first'),
    (lambda p: sparsify_model(small(False), .5, seed='a'), "'str' object cannot be interpreted as an integer"),
    (lambda p: prune_wanda(small(False), .5, (X,Y)), r'such as \[\(xb, yb\)\]'),
    (lambda p: prune_snip(small(False), .5, [X], ce), r'such as \[\(xb, yb\)\]'),
    (lambda p: sparsify_model(nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)), .5, also='0.weight'),
        'make it with sparse=False'),
    (lambda p: register_method(RigL_presets(stop_pct=.5)), r"the name is 'RigL'.*register_method\('mine', preset\)"),
    (lambda p: sparsify_model(m := small(False), .5, chosen=m[0]), 'a pattern is Linear.*must be a name'),
    (lambda p: DynamicSparseTraining(small().parameters(), sgd(small())), r'DynamicSparseTraining\(model, opt, 10_000\)')])
def test_the_line_to_write(f, text, tmp_path):
    with pytest.raises((ValueError,TypeError), match=text): f(tmp_path)

def test_a_wrong_object_is_not_shown_whole():
    "A state dict of a large model in the place of the model"
    for f in (sparse_summary, lambda o: sparsify_model(o, .5), masked_params):
        with pytest.raises(TypeError) as e: f(mlp((100,100,4)).state_dict())
        assert len(str(e.value))<150
    for f in (lambda o: sparsify_model(small(False), o), lambda o: sparsify_model(small(False), .5, chosen=[o]), lambda o: SparseCheckpoint('a', keep=o),
        lambda o: export_sparse(small(), o, X), lambda o: sparsify_model(small(False), .5, structure=o),
        lambda o: sparsify_model(small(False), .5, sparse_f=[o]),
        lambda o: DynamicSparseTraining(small(), sgd(small()), 9, method=o)):
        with pytest.raises((ValueError,TypeError)) as e: f(torch.rand(40,40))
        assert len(str(e.value))<400

def test_a_loss_of_outputs_alone_needs_no_targets(): prune_snip(small(False), .5, [X], lambda out: out.square().mean())

def test_masks_by_modules_are_read():
    "As nni writes them: a dict of each module's masks"
    masks = {o.name:o.mask for o in masked_params(small())}
    for own in ('weight','weight_mask'):
        m = small(False)
        load_sparse(m, {n.rpartition('.')[0]:{own:mask, 'bias':None} for n,mask in masks.items()})
        assert all(o.mask.equal(masks[o.name]) for o in masked_params(m))
