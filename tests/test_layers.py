"Which weights are chosen: layers of the table, and those that it doesn't know (law 9)"
import pytest,torch.nn.utils.prune,warnings
from fastsparse.all import *
from fastsparse.model.choose import decide
from fastsparse.model.layers import axes_of
from helpers import *
from test_weights import stays_dead

convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

def chosen(m): return [o.name for o in masked_params(m)]

@pytest.mark.parametrize('f,names', [
    (lambda: nn.MultiheadAttention(8,2), ['in_proj_weight','out_proj.weight']),
    (lambda: nn.MultiheadAttention(8,2, kdim=4, vdim=6), ['q_proj_weight','k_proj_weight','v_proj_weight','out_proj.weight']),
    (lambda: nn.MultiheadAttention(8,2, add_bias_kv=True), ['in_proj_weight','out_proj.weight']),
    (lambda: nn.MultiheadAttention(8,2, bias=False, batch_first=True), ['in_proj_weight','out_proj.weight']),
    (lambda: nn.LSTM(4,5,2), ['weight_ih_l0','weight_hh_l0','weight_ih_l1','weight_hh_l1']),
    (lambda: nn.LSTM(4,5, proj_size=3), ['weight_ih_l0','weight_hh_l0','weight_hr_l0']),
    (lambda: nn.GRU(4,5, bidirectional=True), ['weight_ih_l0','weight_hh_l0','weight_ih_l0_reverse','weight_hh_l0_reverse']),
    (lambda: nn.RNN(4,5), ['weight_ih_l0','weight_hh_l0']),
    (lambda: nn.LSTMCell(4,5), ['weight_ih','weight_hh']),
    (lambda: nn.GRUCell(4,5), ['weight_ih','weight_hh']),
    (lambda: nn.RNNCell(4,5), ['weight_ih','weight_hh']),
    (lambda: nn.Sequential(*[c(4,6,3) for c in convs]), [f'{i}.weight' for i in range(6)]),
    (lambda: nn.Sequential(nn.Embedding(9,4), nn.LayerNorm(4), nn.Linear(4,4), nn.BatchNorm1d(4), nn.GroupNorm(2,4), nn.RMSNorm(4)), ['2.weight']),
    (lambda: nn.TransformerEncoderLayer(8,2,16), ['self_attn.in_proj_weight','self_attn.out_proj.weight','linear1.weight','linear2.weight'])])
def test_who_is_chosen(f, names):
    "Recurrent weights, projections and attention's in_proj are chosen (2020: AttributeError, and in_proj lost); biases, bias_k/bias_v, norms and embeddings never"
    m = f()
    sparsify_model(m, .5, 'uniform', seed=0)
    assert chosen(m)==names
    for o in masked_params(m): assert int(o.p.count_nonzero())==int(o.mask.sum())<o.p.numel()
    others = [n for n,p in m.named_parameters() if n not in names]
    assert not any(f'{n}_mask' in m.state_dict() for n in others)

@pytest.mark.parametrize('make,xb', [(lambda: nn.LSTM(4,5, proj_size=3), (3,2,4)), (lambda: nn.GRU(4,5,2, bidirectional=True), (3,2,4)),
    (lambda: nn.LSTMCell(4,5), (2,4)),
    (lambda: nn.ConvTranspose2d(3,6,3), (2,3,5,5)), (lambda: nn.TransformerEncoderLayer(8,2,16,0.), (3,2,8))])
def test_all_kinds_train(make, xb):
    "Dead is dead in recurrent, transposed and attention layers"
    torch.manual_seed(0)
    m,x = make(),torch.randn(xb)
    sparsify_model(m, .5, seed=0)
    first = lambda y: y[0] if isinstance(y, tuple) else y
    stays_dead(m, torch.optim.Adam(m.parameters(), lr=.1, weight_decay=.1), 3, lambda m: first(m(x)).square().sum().backward())

def test_all_that_is_chosen_is_there():
    "`keep_zeros` reads names and places as `sparsify_model` does, and refuses an entry of a list that names nothing"
    m = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), nn.Linear(8,4))
    with torch.no_grad():
        for l in m: l.weight[0] = 0
    with pytest.raises(ValueError, match="chosen is '4' and names none.*0.weight"): keep_zeros(m, chosen=['0','4'])
    assert not chosen(m)
    keep_zeros(m, chosen=-1)
    assert chosen(m)==['2.weight']

def test_outputs_without_input_are_counted():
    "Along the axis where outputs lie; not of layers without live weights; depthwise convolutions are flagged"
    m = nn.Sequential(nn.Linear(4,6), nn.ConvTranspose2d(3,5,2), nn.Linear(2,2), nn.Conv2d(6,6,3, groups=6), nn.Conv2d(6,6,3, groups=2))
    masks = {f'{i}.weight':torch.ones_like(l.weight).bool() for i,l in enumerate(m)}
    masks['0.weight'][[1,4]] = False
    masks['1.weight'][:,2] = False
    with pytest.warns(UserWarning, match='2.weight is left without'): sparsify_model(m, .5, mask_init={**masks, '2.weight':torch.zeros(2,2).bool()})
    notes = sparse_summary(m).df.set_index('parameter').note
    assert notes['0.weight']=='2 of 6 outputs without input' and notes['1.weight']=='1 of 5 outputs without input' and notes['2.weight']==''
    assert 'depthwise' in notes['3.weight'] and 'depthwise' not in notes['4.weight']

class Tied(nn.Module):
    def __init__(self, first='emb'):
        super().__init__()
        for k in (('emb','lin') if first=='emb' else ('lin','emb')): setattr(self, k, nn.Embedding(10,4) if k=='emb' else nn.Linear(4,10, bias=False))
        self.other = nn.Linear(4,4)
        self.lin.weight = self.emb.weight

def test_tied_linears_have_one_mask():
    m = nn.Sequential(nn.Linear(10,10), nn.ReLU(), nn.Linear(10,10))
    m[2].weight = m[0].weight
    sparsify_model(m, .5)
    m(torch.randn(2,10))
    assert len(sparse_params(m))==1 and int(m[0].weight.count_nonzero())==50 and len(sparse_summary(m).df.query("parameter.str.endswith('weight')"))==1

@pytest.mark.parametrize('first', ['emb','lin'])
def test_tied_with_an_embedding_stays_dense(first):
    "Law 9: a tensor shared with an embedding stays dense, whoever comes first, and the summary says why"
    m = Tied(first)
    sparsify_model(m, .5)
    assert chosen(m)==['other.weight'] and not hasattr(m.lin, 'weight_mask')
    assert any('embedding' in o for o in sparse_summary(m).df['note'])

def _pruned():
    m = nn.Linear(4,4)
    nn.utils.prune.l1_unstructured(m, 'weight', .5)
    return m

@pytest.mark.parametrize('f,way_out', [
    (lambda: nn.LazyLinear(3), 'batch'), (lambda: nn.LazyConv2d(3,3), 'batch'), (_pruned, r'prune\.remove'),
    (lambda: nn.utils.weight_norm(nn.Linear(4,4)), 'remove_weight_norm'),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4,4)), 'remove_parametrizations'),
    (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4,4)), 'remove_parametrizations'),
    (lambda: nn.utils.spectral_norm(nn.Linear(4,4)), 'remove_spectral_norm'),
    (lambda: nn.utils.weight_norm(nn.LSTM(4,4), 'weight_hh_l0'), 'remove_weight_norm')])
@pytest.mark.filterwarnings('ignore')
def test_computed_weights_are_refused(f, way_out):
    "Law 9: lazy, pruned and parametrized weights are refused by name with the way out (2020 skipped them silently); nothing is changed"
    m = nn.Sequential(nn.Linear(4,4), f())
    with pytest.raises(ValueError, match=rf'(?s)^1 .*{way_out}'): sparsify_model(m, .5)
    assert not any('_mask' in k and not k.startswith('1.') for k in m.state_dict()) and m[0].weight.all()

def test_a_parameter_named_like_half_a_norm_is_plain():
    m = nn.Linear(4,4)
    m.scale_g = nn.Parameter(torch.ones(4))
    sparsify_model(nn.Sequential(m), .5, seed=0)
    assert m.weight_mask.sum()==8

class Experts(nn.Module):
    "Three-dimensional parameters, a matrix an expert, as in Mixtral"
    def __init__(self, n=4, n_out=16, n_in=8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, n_out, n_in))
    def forward(self, x): return torch.einsum('eoi,bi->bo', self.up, x)

@pytest.mark.parametrize('also', [Experts, '0.up', '0', '*.up', lambda n,p: p.ndim==3, [Experts]])
def test_also_brings_in_parameters(also):
    "Types, names, modules, globs, functions and lists bring in what the table of layers lacks; trained, dead stays dead"
    m = nn.Sequential(Experts(), nn.Linear(16,2))
    sparsify_model(m, .75, also=also, seed=0)
    assert [o.name for o in masked_params(m)]==['0.up','1.weight'] and sum(int(o.mask.sum()) for o in masked_params(m))==(512+32)//4
    stays_dead(m, torch.optim.Adam(m.parameters()), 3, lambda m: m(torch.randn(5,8)).square().sum().backward())

def test_what_is_missed_is_said_once():
    "When the table knows less than nine tenths of the matrix weights, one warning names the largest and both ways out; `also` of any kind silences it"
    def made(): return nn.Sequential(Experts(), nn.Linear(16,2))
    with pytest.warns(UserWarning, match=r'0\.up.*512.*also=') as ws: sparsify_model(made(), .5)
    assert len(ws)==1
    for kw in (dict(also=()), dict(also=Experts)):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            sparsify_model(made(), .5, **kw)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(nn.Sequential(nn.Embedding(1000,8), nn.Linear(8,2)), .5)
        sparsify_model(nn.Sequential(nn.Linear(64,64), nn.Linear(64,2)), .5, chosen='1')

def test_experts_go_by_expert():
    "ERK's size and the structure of a parameter of experts are those of one expert: (16+8)/(16*8) and two live inputs an output"
    seen = {}
    def sparse_f(params, s, axes):
        seen['axes'] = axes
        return erdos_renyi_sparsity(params, s, axes=axes)
    m = nn.Sequential(Experts(), nn.Linear(16,2))
    sparsify_model(m, .75, sparse_f, also=Experts, seed=0)
    assert seen['axes'][0].experts==0 and seen['axes'][1]==(0,1,None)
    raw = [(16+8)/(16*8), (16+2)/(16*2)]
    k = .25*(512+32)/(raw[0]*512+raw[1]*32)
    assert abs(int(m[0].up_mask.sum())-k*raw[0]*512)<=1
    m = nn.Sequential(Experts(), nn.Linear(16,2))
    sparsify_model(m, .75, structure='fan-in', also=Experts, seed=0)
    assert m[0].up_mask.sum(2).eq(2).all()

def test_conv1d_of_transformers():
    "transformers' `Conv1D` keeps inputs x outputs: fan-in counts the inputs of each output, and initialisation scales by them; tied GPT-2 works"
    tf = pytest.importorskip('transformers')
    m = tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        sparsify_model(m, .75, 'uniform', structure='fan-in', sparse_init_mode='fan_in', seed=0)
    names = [o.name for o in masked_params(m)]
    assert len(names)==8 and not any('wte' in n or 'lm_head' in n for n in names)
    assert all((o.mask.sum(0)==o.mask.shape[0]//4).all() for o in masked_params(m))

def test_adapters_stay_dense():
    "peft's small matrices never become sparse silently; `also` names them"
    peft = pytest.importorskip('peft')
    m = peft.get_peft_model(nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,4)), peft.LoraConfig(target_modules=['0'], r=2))
    whys = {o.name:o.dense_reason for o in decide(m)}
    assert {n.rpartition('lora_')[2][0] for n,w in whys.items() if w=='adapter'}=={'A','B'}
    sparsify_model(m, .5)
    assert not any('lora_' in o.name for o in masked_params(m))

def test_axes_of_what_the_table_does_not_know():
    "Two dimensions are outputs and inputs, three are experts first, and a name without a tensor has the usual axes"
    m = nn.Module()
    m.two,m.three = nn.Parameter(torch.ones(4,3)),nn.Parameter(torch.ones(2,4,3))
    assert tuple(axes_of(m, 'two'))==tuple(axes_of(m, 'missing'))==(0,1,None) and tuple(axes_of(m, 'three'))==(1,2,0)
    m.is_transposed = True
    assert tuple(axes_of(m, 'three'))==(2,1,0) and tuple(axes_of(m, 'two'))==(0,1,None)

def test_a_tensor_that_one_of_its_layers_has_as_a_weight_is_chosen():
    "Tied to something that is no weight of a `Linear`, it is still the weight of another"
    m = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8))
    m[0].extra = m[1].weight
    assert chosen_names(m)==['0.weight','0.extra']
    m[0].alone = nn.Parameter(torch.ones(4,4))
    assert {o.name:o.dense_reason for o in decide(m)}['0.alone']=='no weight of Linear'

def chosen_names(m): return [o.name for o in decide(m) if not o.dense_reason]
