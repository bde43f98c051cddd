"Rules by name, from numbers, dicts, lists and files, safely read; who got what and why"
import copy, json, pandas as pd, pickle, pytest, torch, warnings, yaml
from fastsparse.all import *
from fastsparse.masks.schedules import Interval
from fastsparse.masks.scores import nonzero_redistribution
from fastsparse.weights.weight import masked_params
from fastsparse.train.growth import fresh_value,initial_value,own_step_count,reset_state,second_moment_from_live
from fastsparse.train.rules import default_filter
from helpers import *
from torch import nn

class Block(nn.Module):
    "Parameters with names that look alike: `normalize_proj` is no norm"
    def __init__(self):
        super().__init__()
        self.normalize_proj,self.mlp,self.norm1 = nn.Linear(8,8),nn.Linear(8,12),nn.LayerNorm(12)
        self.conv,self.rnn = nn.Conv1d(12,4,3),nn.GRU(12,6)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte,self.pos_enc,self.blocks,self.lm_head = nn.Embedding(20,8),nn.Linear(8,8),nn.ModuleList([Block(),Block()]),nn.Linear(12,20)

def table(model, rules): return {o['parameter']:o for o in rules_table(model, rules).to_dict('records')}
def counts(model): return {o.name:int(o.mask.sum()) for o in masked_params(model)}

def dst_of(model, rules, n_steps=20, **kwargs):
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return DynamicSparseTraining(model, opt, n_steps, rules=rules, seed=0, **kwargs)

# --- what is left out

@pytest.mark.parametrize('name', ['normalize_proj.weight','layernormalizer.weight','supernorm_proj.weight','blocks.0.normalize_proj.weight','normal.weight','enormous.weight','peak.weight','opener.weight','lm_heads.weight','head.weight',
    'reembed_proj.weight','typed.weight','layers.0.mlp.weight','posterior.weight','wq.weight'])
def test_kept_in(name):
    "Trap 15: names count as whole parts: `norm` in `normalize_proj`, `pe` in `opener`, `embed` in `reembed_proj` mean nothing"
    assert default_filter(name, torch.ones(2,2)) and not default_filter(name, torch.ones(2))

@pytest.mark.parametrize('name', ['norm.weight','norm1.weight','x.LayerNorm.weight','batchnorm.weight','rmsnorm.weight','groupnorm1.weight','model.input_layernorm.weight','q_norm.weight','layer_norm.weight','layers.3.norm2.weight','ln.weight','ln_1.weight','embed.weight','tok_embedding.weight','embeddings.word.weight',
    'lm_head.weight','model.LM_head.weight','pe.weight','pe_helper.weight','encoder.pos_enc.weight','positional_encoding.weight','position_encoding.weight','pos_encoder.proj.weight'])
def test_left_out(name):
    "Norms, embeddings, the last layer of a language model and encodings of position, whatever their case and number"
    assert not default_filter(name, torch.ones(2,2))

def test_types_and_names_together():
    "An embedding called `wte` goes by its type, `lm_head` and `pos_enc` by name, `normalize_proj`, recurrent and convolutional weights stay in; each says why"
    got = table(Net(), .5)
    note = lambda name: got[name]['note']
    assert note('wte.weight')=='embedding or norm' and note('lm_head.weight')==note('pos_enc.weight')=='no rule' and note('blocks.0.norm1.weight')=='embedding or norm'
    assert note('blocks.0.mlp.bias')=='bias'
    for o in ('normalize_proj.weight','mlp.weight','conv.weight','rnn.weight_ih_l0','rnn.weight_hh_l0'):
        assert got[f'blocks.1.{o}']['method']=='static' and got[f'blocks.1.{o}']['sparsity']==.5 and not note(f'blocks.1.{o}')

def test_requires_dense():
    "The opt-out of a module or of one parameter beats every rule, in the table and in the engine"
    model = Net()
    model.blocks[0].mlp.requires_dense = True
    model.blocks[1].mlp.weight.requires_dense = True
    rules = configure([dict(params='*', method='rigl', sparsity=.5)])
    got = table(model, rules)
    assert got['blocks.0.mlp.weight']['note']==got['blocks.1.mlp.weight']['note']=='requires_dense'
    dst_of(model, rules)
    assert not {'blocks.0.mlp.weight','blocks.1.mlp.weight'}&set(counts(model)) and 'lm_head.weight' in counts(model)

# --- who gets what

mixed = [dict(params='blocks.0.mlp.*', method='dense'), dict(params=['*.mlp.weight','*.conv.*'], method='rigl', sparsity=.5, batches_per_update=4),
    dict(params='*.mlp.*', method='set', sparsity=.9), dict(params='*.rnn.*', sparsity=.75), dict(params='*.normalize_proj.*', sparsity=.5, structure='2:4')]

def test_first_match_wins():
    "The first rule that matches, and only that; a list means any of its globs; what no rule means stays dense"
    model = Net()
    got = table(model, mixed)
    assert got['blocks.0.mlp.weight']['note']=='dense by rule' and got['blocks.1.mlp.weight']['method']=='rigl' and got['blocks.1.mlp.weight']['sparsity']==.5
    assert got['lm_head.weight']['note']=='no rule' and str(got['blocks.0.normalize_proj.weight']['structure'])=='2:4'
    assert got['blocks.0.conv.weight']['rule']=="['*.mlp.weight', '*.conv.*']" and got['blocks.0.conv.weight']['shape']=='4 x 12 x 3'
    with pytest.warns(UserWarning, match=r"'\*.mlp.\*' serves no parameter"): dst = DynamicSparseTraining(model, torch.optim.SGD(model.parameters(), lr=.1), 40, rules=configure(mixed), seed=0)
    live = counts(model)
    assert live.pop('blocks.0.mlp.weight', 96)==96 and live['blocks.1.mlp.weight']==48
    assert live['blocks.0.conv.weight']+live['blocks.1.conv.weight']==144 and live['blocks.0.normalize_proj.weight']==32
    assert sum(n for k,n in live.items() if 'rnn' in k)==round(.25*4*(216+108)/2) and 'lm_head.weight' not in live
    assert as_structure('2:4').legal(model.blocks[1].normalize_proj.weight_mask)
    assert [len(dst.slots_of(m)) for m in dst.methods]==[3,4,2]

def test_callables():
    "A pattern may be a function of name and parameter, and shows its name in the table"
    def wide(name, p): return p.shape[0]>10
    got = table(Net(), [dict(params=wide, method='set', sparsity=.8), dict(params=lambda name, p: 'conv' in name, sparsity=.5)])
    assert got['blocks.0.mlp.weight']['rule']=='wide' and got['lm_head.weight']['sparsity']==.8 and got['blocks.0.conv.weight']['rule']=='<lambda>'
    assert got['blocks.0.normalize_proj.weight']['note']=='no rule'

def test_table_of_python_rules():
    "Pairs of pattern and settings; a preset has a name, and a plain dict none; the table changes nothing"
    model = Net()
    before = {k:v.clone() for k,v in model.state_dict().items()}
    pairs = [('*.mlp.*', GMP_presets(sparsity=.9)), ('*.conv.*', None), ('*.rnn.*', RigL_presets(batches_per_update=7, sparsity=.5)), ('lm_head.*', dict(sparsity=.3))]
    got = table(model, pairs)
    assert [got[o]['method'] for o in ('blocks.0.mlp.weight','blocks.0.rnn.weight_ih_l0','lm_head.weight')]==['gmp','rigl','own'] and got['blocks.0.conv.weight']['note']=='dense by rule'
    assert model.state_dict().keys()==before.keys() and all(torch.equal(v, before[k]) for k,v in model.state_dict().items())

overridden = dict(method='rigl', updates=[5], grow_score_f='random_score', sparsity=.5), dict(method='set', updates=[], grow_score_f=None), dict(method='RigL', stop_pct=.5)

@pytest.mark.parametrize('spec', overridden)
def test_table_names_the_method_of_the_rule(spec):
    "Settings that override a preset's make no other method of it"
    assert table(Net(), dict(spec, params='*'))['lm_head.weight']['method']==spec['method'].lower()

# --- from plain data

def same(a, b):
    "Do two lists of rules say the same?"
    plain = lambda rules: [(p, s and {k:v if isinstance(v, dict) else repr(v) for k,v in s.items()}) for p,s in rules]
    return plain(a)==plain(b)

specs = [.9, 0, dict(method='rigl', sparsity=.5), mixed,
    [dict(params='*', method='gmp', sparsity=.9, sparsity_path=dict(type='cubic_path', init=.25), sparse_f='erdos_renyi', batches_per_update=10)],
    [dict(method='set', sparsity=dict(type='cubic', init=.3, end=.9), updates=dict(freq=dict(epochs=1), stop=.75), grow_init_f=.5)],
    [dict(method='mest', keep_score_f=dict(type='MagnitudePlusGradient', lam=.5), updates=20), dict(params='*', method=None)],
    [dict(method='cht', grow_score_f=dict(type='Sampled', score_f=dict(type='MeanGradient', n_batches=2), temperature=2.), redistribute_f='gradient_redistribution', drop_count_f='drop_of_target')]]

@pytest.mark.parametrize('i', range(len(specs)))
@pytest.mark.parametrize('kind', ['.yaml','.yml','.json'])
def test_files(i, kind, tmp_path):
    "From YAML and JSON the same rules as from plain data, also as pickle and copy"
    rules,path = configure(specs[i]),tmp_path/f'rules{kind}'
    path.write_text(json.dumps(specs[i]) if kind=='.json' else yaml.safe_dump(specs[i]))
    for o in (configure(path), configure(str(path)), copy.deepcopy(rules), pickle.loads(pickle.dumps(rules))): assert same(o, rules)

named = dict(grow_state_f={o.__name__:o for o in (own_step_count, second_moment_from_live, reset_state)},
    grow_init_f=dict(initial_value=initial_value, fresh_value=fresh_value),
    redistribute_f=dict(momentum=momentum_redistribution, gradient=gradient_redistribution, nonzero=nonzero_redistribution),
    sparse_f=dict(erdos_renyi=erdos_renyi_sparsity, uniform=uniform_sparsity), mask_init=dict(random='random', magnitude='magnitude', zeros='zeros', checkerboard='checkerboard'))

@pytest.mark.parametrize('key', named)
def test_names(key):
    "Every part that needs no data of its own has a name in a file"
    for name,want in named[key].items():
        (_,got), = configure({'method':'rigl', 'sparsity':.5, key:name})
        assert got[key]==want

def test_checkerboard_by_name():
    "A mask with evenly spaced live weights: at one half, each row of eight has four and each column too"
    model = Net()
    dst_of(model, configure(dict(params='*normalize_proj*', sparsity=.5, mask_init='checkerboard')))
    mask = model.blocks[0].normalize_proj.weight_mask
    assert (mask.sum(0)==4).all() and (mask.sum(1)==4).all()

def test_masks_by_hand():
    "From Python, `mask_init` may be a dict of masks, as in `sparsify_model`"
    masks = {'0.weight':torch.ones(3,4)}
    assert configure(dict(sparsity=.5, mask_init=masks))[0][1]['mask_init'] is masks

options = [('sparse_f', 'erdos_renyi', 'erdos_renyi_sparsity', dict(erk_power_scale=.5)), ('sparse_f', 'erdos_renyi_sparsity', 'erdos_renyi_sparsity', dict(include_kernel=False, erk_power_scale=2)),
    ('grow_init_f', 'fresh_value', 'fresh_value', dict(gain=1.))]

@pytest.mark.parametrize('key,said,name,kwargs', options)
def test_options_of_a_function(key, said, name, kwargs):
    "A dict whose type is a plain function binds the options that it names"
    (pattern,got), = configure({'method':'rigl', 'sparsity':.5, key:dict(type=said, **kwargs)})
    f = globals()[name]
    assert (got[key].func,got[key].args,got[key].keywords)==(f,(),kwargs)
    assert configure({'sparsity':.5, key:dict(type=said)})[0][1][key] is f

@pytest.mark.parametrize('key', ['keep_score_f','grow_score_f','redistribute_f','grow_init_f','grow_state_f','drop_count_f'])
def test_what_the_engine_passes_is_no_option(key):
    "What the engine calls a function with, no file can bind, nor what the function doesn't name"
    name = dict(keep_score_f='random_score', grow_score_f='gradient_momentum', redistribute_f='gradient_redistribution', grow_init_f='initial_value', grow_state_f='reset_state',
        drop_count_f='drop_of_live')[key]
    for bad in ('p','opt','generator','idx','live','mu'):
        with pytest.raises(ValueError, match=f"{key} has the argument '{bad}'.*{name} takes none"): configure({'sparsity':.5, key:dict(type=name, **{bad:1})})

def test_options_change_the_run():
    "The bound power reaches the distribution: at power 0 all layers have the same sparsity, as with the uniform one"
    live = [counts(model) for sparse_f in (dict(type='erdos_renyi', erk_power_scale=0), 'uniform', 'erdos_renyi') for model in [Net()]
        if dst_of(model, configure(dict(sparsity=.5, sparse_f=sparse_f)))]
    assert live[0]==live[1]!=live[2]

def test_files_run_no_code(tmp_path):
    "YAML is loaded safely: a tag that would call a function is refused, and so are dotted names of functions"
    path = tmp_path/'evil.yaml'
    path.write_text(f'- params: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ["{tmp_path}/touched"]]\n')
    with pytest.raises(ValueError, match='evil.yaml.*is damaged, or no'): configure(path)
    assert not (tmp_path/'touched').exists()
    with pytest.raises(ValueError, match='keep_score_f is .*must be one of .random_score'): configure(dict(method='rigl', keep_score_f='os.system'))

@pytest.mark.parametrize('text,kind,say', [('[1, 2', '.json', 'is damaged, or no'), ('a: [b', '.yaml', 'is damaged, or no'), ('', '.yaml', 'there are no rules'), ('rigl', '.yaml', "a rule is 'rigl'"),
    ('- 3', '.yaml', 'a rule is 3'), ('null', '.json', 'there are no rules'), ('{"sparsity": 2}', '.json', r'sparsity is 2.*\[0,1\)')])
def test_bad_files(text, kind, say, tmp_path):
    "Law 10: what is no file of rules is refused by path or by what stands in it"
    (tmp_path/f'bad{kind}').write_text(text)
    with pytest.raises(ValueError, match=say): configure(tmp_path/f'bad{kind}')

@pytest.mark.parametrize('spec,say', [(1., r'sparsity is 1.0.*\[0,1\)'), (-.1, r'\[0,1\)'), (float('nan'), r'\[0,1\)'), (True, 'a rule is True'), (None, 'there are no rules'), ([], 'there are no rules'),
    ([['*', {}]], 'a rule is'), (dict(method='best'), "method is 'best'.*static.*rigl"), (dict(method=3), 'method is 3'),
    (dict(density=.1), "says 'density'.*params, method.*sparsity"), (dict(method='dense', sparsity=.5), "says 'sparsity'.*dense"), (dict(params=3), 'params is 3.*glob'), (dict(params=[]), 'glob'),
    (dict(params=None), 'glob'), (dict(params=['a',3]), 'glob'), (dict(structure='4:2'), '4'), (dict(sparse_f='best'), 'sparse_f is .best.*erdos_renyi'),
    (dict(keep_score_f=dict(lam=3)), 'keep_score_f is.*a dict with a name as its type'), (dict(keep_score_f=dict(type='MagnitudePlusGradient', mu=3)), "argument 'mu'.*takes lam"),
    (dict(keep_score_f=3), 'keep_score_f is 3'), (dict(sparse_f=dict(type='erdos_renyi', power=.5)), "sparse_f has the argument 'power'.*takes include_kernel, erk_power_scale"),
    (dict(sparse_f=dict(type=['uniform'])), 'a dict with a name as its type'), 
    (dict(mask_init='foo'), "mask_init is 'foo'(?=.*random)(?=.*magnitude).*checkerboard"), (dict(mask_init=3), 'mask_init is 3.*checkerboard'), (dict(mask_init=None), 'mask_init is None.*random'),
    (dict(grow_init_f='foo'), 'grow_init_f is .foo.*initial_value.*fresh_value'), (dict(grow_state_f=3), 'grow_state_f is 3.*own_step_count'),
    (dict(keep_score_f=None), 'keep_score_f is None.*a name.*weight_magnitude'), (dict(drop_fraction=dict(type='best')), 'best.*cubic'), (dict(drop_fraction='x'), 'no schedule'), (dict(updates='x'), 'no update schedule'),
    (dict(sparsity='0.9'), "'0.9' is no schedule"), (dict(method='set', batches_per_update=0), 'batches_per_update is 0'), ([dict(params='a', sparsity=.5), dict(params='b', stop_pct=2)], 'stop_pct is 2')])
def test_refused(spec, say):
    "Law 10: without a model, `configure` names what is wrong and what may stand there"
    with pytest.raises(ValueError, match=say): configure(spec)

# --- in the engine

@pytest.mark.parametrize('rules,say', [(['a'], "rules is 'a'.*pair"), ('x', "rules is 'x'"), ([(3., {})], 'a pattern is 3'), ([('*', 3)], 'a rule is'), ({'*':3}, 'a rule is'), ([], 'no rule gives'),
    ([('*', None)], 'no rule gives'), ([('zzz', {})], 'no rule gives a method to any.*blocks.0.mlp.weight'), ([('*.mlp.*', dict(sparsity=.5)), ('*', dict(sparsity=.5, structure='block 7x7'))], '7')])
def test_engine_refuses(rules, say):
    "Law 10: rules that are none, serve nobody, or whose last one can't be followed, before model, optimizer or hooks changed"
    model = Net()
    before = {k:v.clone() for k,v in model.state_dict().items()}
    with pytest.raises(ValueError, match=say): dst_of(model, rules, batches_per_update=4)
    assert model.state_dict().keys()==before.keys() and not model._forward_pre_hooks and all(torch.equal(v, before[k]) for k,v in model.state_dict().items())

def test_a_rule_that_serves_nobody_warns():
    "A glob that no parameter has is a likely mistake"
    m = mlp()
    rules = [('typo.*', dict(sparsity=.5)), ('*', dict(sparsity=.5))]
    with pytest.warns(UserWarning, match=r"'typo.\*' serves no parameter"):
        DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 20, rules=rules, batches_per_update=4, seed=0)

def test_a_bare_name_serves_all_that_are_called_so():
    "A module's own name means it wherever it lies, in the engine and in the table; a full name comes first, and a place is one of all parameters"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv,self.blocks = nn.Linear(8,8),nn.ModuleList([nn.ModuleDict(dict(mlp=nn.Linear(8,8), conv=nn.Linear(8,8))) for _ in range(2)])
    def taken(rules):
        model = Net()
        got = {k:o['sparsity'] for k,o in table(model, rules).items() if not k.endswith('bias')}
        engine = SparseEngine(model, torch.optim.SGD(model.parameters(), lr=.1), 100, rules=rules)
        lives = {o.name:1-int(o.mask.sum())/64 for o in masked_params(model)}
        assert {k:v for k,v in got.items() if v!=''}==lives
        engine.remove()
        return list(lives)
    settings = dict(sparsity=.5, batches_per_update=10)
    assert taken([('mlp', settings)])==['blocks.0.mlp.weight','blocks.1.mlp.weight']
    assert taken([('conv', settings)])==['conv.weight']
    assert taken([('blocks', settings)])==[f'blocks.{i}.{k}.weight' for i in (0,1) for k in ('mlp','conv')]
    assert taken([(-1, settings)])==['blocks.1.conv.weight']

def test_table_is_a_frame(): assert isinstance(rules_table(mlp(), .5), pd.DataFrame) and list(table(mlp(), .5))==[n for n,_ in mlp().named_parameters()]

def test_an_interval_stays_one_in_a_file(tmp_path):
    "It is no plain number: it gets shorter in a short run"
    path = tmp_path/'rules.yaml'
    path.write_text('{method: rigl, sparsity: .8, batches_per_update: {type: Interval, every: 50}}')
    every = configure(path)[0][1]['batches_per_update']
    assert type(every) is Interval and every==50
