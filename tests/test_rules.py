"Rules by name, from numbers, dicts, lists and files, safely read; who got what and why"
import copy, json, pandas as pd, pickle, pytest, torch, yaml
from fastsparse.all import *
from fastsparse.train.presets import GMP_presets
from fastsparse.masks.schedules import Interval
from fastsparse.masks.scores import nonzero_redistribution
from fastsparse.train.growth import fresh_value,initial_value,reset_state
from fastsparse.contract import decide
from fastsparse.save.rules import default_filter,is_layer_weight,rules_table
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

def run_of(model, rules, n_steps=40): return DynamicSparseTraining(model, torch.optim.SGD(model.parameters(), lr=.1), n_steps, rules=rules, seed=0)

# --- what is left out

kept = '''normalize_proj layernormalizer supernorm_proj blocks.0.normalize_proj normal enormous peak opener lm_heads head reembed_proj typed layers.0.mlp
    posterior wq'''.split()
left_out = '''norm norm1 x.LayerNorm batchnorm rmsnorm groupnorm1 model.input_layernorm q_norm layer_norm layers.3.norm2 ln ln_1 embed tok_embedding embeddings.word
    lm_head model.LM_head pe pe_helper encoder.pos_enc positional_encoding position_encoding pos_encoder.proj'''.split()

@pytest.mark.parametrize('name,takes', [(o,True) for o in kept]+[(o,False) for o in left_out])
def test_names_count_as_whole_parts(name, takes):
    "Norms, embeddings, the last layer of a language model and encodings of position are left out, whatever their case and number; `pe` in `opener` means nothing"
    assert default_filter(f'{name}.weight', torch.ones(2,2))==takes and not default_filter(f'{name}.weight', torch.ones(2))

class SmallGPT(nn.Module):
    "With a causal mask in a buffer"
    def __init__(self):
        super().__init__()
        self.wte,self.wpe,self.c_attn,self.head = nn.Embedding(64,16),nn.Embedding(8,16),nn.Linear(16,48),nn.Linear(16,64)
        self.register_buffer('bias', torch.ones(1,1,8,8).tril())

tiny = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
described = dict(LlamaForCausalLM=('LlamaConfig',tiny), MambaForCausalLM=('MambaConfig',dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)),
    T5ForConditionalGeneration=('T5Config',dict(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
    ViTForImageClassification=('ViTConfig',{k:v for k,v in tiny.items() if k!='vocab_size'}), BertModel=('BertConfig',tiny), CLIPModel=('CLIPConfig',{}),
    GPT2LMHeadModel=('GPT2Config',dict(vocab_size=64, n_embd=16, n_layer=1, n_head=2)),
    AlbertModel=('AlbertConfig',tiny | dict(embedding_size=8)), WhisperModel=('WhisperConfig',{}), DebertaV2Model=('DebertaV2Config',tiny))

@pytest.mark.parametrize('kind', ['SmallGPT',*described])
def test_names_in_a_file_say_what_types_say(kind):
    "The command prunes what `prune_magnitude` does"
    with torch.device('meta'):
        if kind=='SmallGPT': model = SmallGPT()
        else:
            tf = pytest.importorskip('transformers')
            config,settings = described[kind]
            model = getattr(tf, kind)(getattr(tf, config)(**settings))
    want = {o.name for o in decide(model) if not o.dense_reason and 'lm_head' not in o.name}
    assert {n for n,t in model.state_dict().items() if is_layer_weight(n, t)}==want

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
    warned(run_of, model, rules)
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
    with pytest.warns(UserWarning, match=r"'\*.mlp.\*' has no effect"): run_of(model, configure(mixed))
    live = counts(model)
    assert live.pop('blocks.0.mlp.weight', 96)==96 and live['blocks.1.mlp.weight']==48
    assert live['blocks.0.conv.weight']+live['blocks.1.conv.weight']==144 and live['blocks.0.normalize_proj.weight']==32
    assert sum(n for k,n in live.items() if 'rnn' in k)==round(.25*4*(216+108)/2) and 'lm_head.weight' not in live
    assert as_structure('2:4').legal(model.blocks[1].normalize_proj.weight_mask)

def test_callables():
    "A pattern may be a function of name and parameter, and shows its name in the table"
    def wide(name, p): return p.shape[0]>10
    got = table(Net(), [dict(params=wide, method='set', sparsity=.8), dict(params=lambda name, p: 'conv' in name, sparsity=.5)])
    assert got['blocks.0.mlp.weight']['rule']=='wide' and got['lm_head.weight']['sparsity']==.8 and got['blocks.0.conv.weight']['rule']=='<lambda>'
    assert got['blocks.0.normalize_proj.weight']['note']=='no rule'

def test_table_of_python_rules():
    "Pairs of pattern and settings; a preset has a name, and a plain dict none; the table changes nothing"
    model = Net()
    before = snapshot(model)
    pairs = [('*.mlp.*', GMP_presets(sparsity=.9)), ('*.conv.*', None), ('*.rnn.*', RigL_presets(batches_per_update=7, sparsity=.5)), ('lm_head.*', dict(sparsity=.3))]
    got = table(model, pairs)
    assert [got[o]['method'] for o in ('blocks.0.mlp.weight','blocks.0.rnn.weight_ih_l0','lm_head.weight')]==['gmp','rigl','own'] and got['blocks.0.conv.weight']['note']=='dense by rule'
    assert agree(before, snapshot(model)) and isinstance(rules_table(model, .5), pd.DataFrame)
    assert list(got)==[n for n,_ in model.named_parameters()]

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
    [dict(method='mest', grow_score_f=dict(type='MeanGradient', n_batches=2), redistribute_f='gradient_redistribution', drop_count_f='drop_of_target')]]

@pytest.mark.parametrize('i', range(len(specs)))
@pytest.mark.parametrize('kind', ['.yaml','.yml','.json'])
def test_files(i, kind, tmp_path):
    "From YAML and JSON the same rules as from plain data, also as pickle and copy"
    rules,path = configure(specs[i]),tmp_path/f'rules{kind}'
    path.write_text(json.dumps(specs[i]) if kind=='.json' else yaml.safe_dump(specs[i]))
    for o in (configure(path), configure(str(path)), copy.deepcopy(rules), pickle.loads(pickle.dumps(rules))): assert same(o, rules)

named = dict(grow_state_f={o.__name__:o for o in (reset_state,)},
    grow_init_f=dict(initial_value=initial_value, fresh_value=fresh_value),
    redistribute_f=dict(momentum=momentum_redistribution, gradient=gradient_redistribution, nonzero=nonzero_redistribution),
    sparse_f=dict(erdos_renyi=erdos_renyi_sparsity, uniform=uniform_sparsity), mask_init=dict(random='random', magnitude='magnitude', zeros='zeros', checkerboard='checkerboard'))

@pytest.mark.parametrize('key', named)
def test_names(key):
    "Every part that needs no data of its own has a name in a file"
    for name,want in named[key].items():
        (_,got), = configure({'method':'rigl', 'sparsity':.5, key:name})
        assert got[key]==want

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

def test_options_change_the_run():
    "The bound power reaches the distribution: at power 0 all layers have the same sparsity, as with the uniform one"
    live = []
    for sparse_f in (dict(type='erdos_renyi', erk_power_scale=0), 'uniform', 'erdos_renyi'):
        warned(run_of, model := Net(), configure(dict(sparsity=.5, sparse_f=sparse_f)))
        live.append(counts(model))
    assert live[0]==live[1]!=live[2]

# --- in the engine

def test_a_bare_name_serves_all_that_are_called_so():
    "A module's own name means it wherever it lies, in the engine and in the table; a full name comes first, and a place is one of all parameters"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv,self.blocks = nn.Linear(8,8),nn.ModuleList([nn.ModuleDict(dict(mlp=nn.Linear(8,8), conv=nn.Linear(8,8))) for _ in range(2)])
    def taken(rules):
        model = Net()
        got = {k:o['sparsity'] for k,o in table(model, rules).items() if not k.endswith('bias')}
        run_of(model, rules, 100)
        lives = {o.name:1-int(o.mask.sum())/64 for o in masked_params(model)}
        assert {k:v for k,v in got.items() if v!=''}==lives
        return list(lives)
    settings = dict(sparsity=.5, batches_per_update=10)
    assert taken([('mlp', settings)])==['blocks.0.mlp.weight','blocks.1.mlp.weight']
    assert taken([('conv', settings)])==['conv.weight']
    assert taken([('blocks', settings)])==[f'blocks.{i}.{k}.weight' for i in (0,1) for k in ('mlp','conv')]
    assert taken([(-1, settings)])==['blocks.1.conv.weight']

def test_an_interval_stays_one_in_a_file(tmp_path):
    "It is no plain number: it gets shorter in a short run"
    path = tmp_path/'rules.yaml'
    path.write_text('{method: rigl, sparsity: .8, batches_per_update: {type: Interval, every: 50}}')
    every = configure(path)[0][1]['batches_per_update']
    assert type(every) is Interval and every==50

def test_one_rule_may_be_given_without_a_list():
    model = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8))
    sparsify_model(model, .5, seed=0)
    one,listed = [run_of(model, rules).state_dict() for rules in (('1.*', dict(batches_per_update=4)), [('1.*', dict(batches_per_update=4))])]
    assert agree(one, listed)
