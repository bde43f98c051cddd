"What isn't what was asked for is told, with the number: totals of distributions, given masks, scores without a value, other names of a parameter"
import copy,pytest,torch,warnings
from fastai.basics import Learner
from fastsparse.all import *
from fastsparse.masks.distributions import usual_sparsity
from fastsparse.save.load import read_file
from functools import partial
from helpers import live,masked_params,mlp,warned
from torch import nn

def half(params, sparsity): return [sparsity/2]*len(params)
def net(): return mlp((6,8,4))  # 48 and 32 weights

def run(model, **kwargs):
    "An engine of ten steps, with an update at the fifth"
    engine = SparseEngine(model, torch.optim.SGD(model.parameters(), .1), 10, updates=[5], replace_step=False, **kwargs)
    for t in range(6):
        engine.prepare(t)
        model(torch.ones(4,6)).square().sum().backward()
        engine.before_step(t)
        engine.after_step()

@pytest.mark.parametrize('by', ['sparsify','engine','moved','schedule'])
def test_a_distribution_that_misses_the_sparsity(by):
    "Half of .8 is dead: .4 of 80, and both numbers are said; once in a run with a schedule"
    m = net()
    if by=='moved': sparsify_model(m, .5)
    calls = dict(sparsify=lambda: sparsify_model(m, .8, half), schedule=lambda: run(m, sparsity=CubicSchedule(.2, .8), sparse_f=half, method=dict(updates=[5])))
    said = [o for o in warned(calls.get(by, lambda: run(m, sparsity=.8, sparse_f=half, method=dict(updates=[5])))) if 'asked for' in o]
    assert "the distribution half leads to a sparsity of 0.4, and 0.8 was asked for" in said and len(said)<=2

@pytest.mark.parametrize('sparse_f', [uniform_sparsity, erdos_renyi_sparsity, usual_sparsity, global_sparsity, partial(global_sparsity, min_live=0),
    first_layer_dense_uniform, layers_dense('0.*'), given_sparsity([.5,.9,.1]), given_sparsity({'0':.5}, rest='erk'), 'first-last-dense', 'er'])
@pytest.mark.parametrize('sparsity', [.3,.411])
def test_a_right_one_says_nothing(sparse_f, sparsity):
    "Nor one that never asks for the sparsity: first layer dense, sparsities that are given"
    assert not [o for o in warned(sparsify_model, mlp((6,8,8,4)), sparsity, sparse_f) if 'asked for' in o]

@pytest.mark.parametrize('init,s', [({'0.weight':torch.arange(48).view(8,6)<3}, .5625), ({'0.weight':torch.ones(8,6), '2.weight':torch.zeros(4,8)}, .4),
    ('zeros', .2), ({'0.weight':torch.arange(48).view(8,6)<8}, .5)])
def test_given_masks_of_another_sparsity(init, s):
    "45, 32, 16 and 40 of 80 are dead where .5 was asked for; with 0 nothing was asked for"
    m = net()
    with torch.no_grad(): m[0].weight[:2] = m[2].weight[:, :1] = 0.
    said = [o for o in warned(sparsify_model, m, .5, mask_init=init) if 'asked for' in o]
    assert said==([] if s==.5 else [f'the masks of mask_init have a sparsity of {s}, and 0.5 was asked for'])
    assert not [o for o in warned(sparsify_model, net(), 0., mask_init=init) if 'asked for' in o]

@pytest.mark.parametrize('kind', ['grow_score_f','keep_score_f','mask_init'])
def test_a_score_that_is_nan_everywhere(kind):
    "By the name of its weight; a NaN here and there is no weight's turn"
    def nan(p, **kwargs): return p.detach()/0*0
    def some(p, **kwargs): return p.detach().abs().where(torch.arange(p.numel()).view(p.shape)>3, torch.nan)
    for f,told in ((nan, 2), (some, 0)):
        if kind=='mask_init': said = warned(sparsify_model, net(), .5, mask_init=f)
        else:
            sparsify_model(m := net(), .5, sparse_init_mode=None)
            said = warned(run, m, **{kind:f})
        assert len({o for o in said if 'is NaN everywhere' in o})==told

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte,self.body,self.lm_head = nn.Embedding(9,4),nn.Linear(4,4),nn.Linear(4,9,bias=False)
        self.lm_head.weight = self.wte.weight
    def forward(self, x): return self.lm_head(self.body(self.wte(x)))

@pytest.mark.parametrize('name', ['wte.weight','wte','lm_head.weight'])
def test_a_tied_parameter_goes_by_each_name(name):
    "`also=` brings it in under the name of the layer, `chosen=` and `exclude=` and rules know it then; 36 and 16 weights"
    sparsify_model(m := Tied(), .5, also=name)
    assert {o.name:int(o.mask.sum()) for o in masked_params(m)}=={'body.weight':8, 'lm_head.weight':18}
    prune_magnitude(m := Tied(), .5, also=name, chosen=name)
    assert live(m)==[16,18] and m.wte.weight is m.lm_head.weight
    sparsify_model(m := Tied(), {name:.25}, also=name)
    assert live(m)==[27]
    sparsify_model(m := Tied(), .5, also='lm_head', exclude=name)
    assert live(m)==[8]
    with pytest.raises(ValueError, match='names none'): sparsify_model(Tied(), .5, also='wpe.weight')
    with warnings.catch_warnings(record=True) as ws: sparsify_model(m := Tied(), .5)
    assert live(m)==[8] and not ws

# --- messages that name the way out

def test_the_advice_for_an_awd_lstm_makes_all_of_it_sparse():
    "fastai's `WeightDropout` holds the recurrent weights under `weight_hh_l0_raw`, in each of its layers"
    from fastai.text.models.awdlstm import AWD_LSTM
    def net(): return AWD_LSTM(20, 8, 12, 3)
    said, = warned(sparsify_model, net(), .5)
    advice = said.partition('e.g. also=')[2].partition(' or a type')[0]
    assert not warned(sparsify_model, m := net(), .5, also=eval(advice))
    assert [o.name for o in masked_params(m) if o.attr.endswith('_raw')]==[f'rnns.{i}.weight_hh_l0_raw' for i in range(3)]

def test_a_file_of_another_network(tmp_path):
    "Says what is of another shape, where a layer's name ends several names of the file; the layer that fits is taken"
    sparsify_model(m := mlp((6,8,4)), .5, seed=0)
    file = save_sparse(m, tmp_path/'m.safetensors')
    with pytest.raises(ValueError, match=r'different network: its 0.weight is \(8, 6\), and weight of the model is \(3, 3\)'): load_sparse(nn.Linear(3,3), file)
    load_sparse(layer := nn.Linear(8,4), file)
    assert layer.weight.equal(m[2].weight)

def test_a_file_whose_masks_are_of_another_sparsity(tmp_path):
    "Into a sparse model: both numbers; into a dense one, or with as many live weights, nothing was asked for"
    file = {}
    for s in (.5,.75):
        sparsify_model(m := mlp((6,8,4)), s, seed=0)
        file[s] = save_sparse(m, tmp_path/f'{s}.safetensors')
    assert warned(load_sparse, m, file[.5])==['the masks of the file have a sparsity of 0.5, and those of the model had 0.75']
    assert live(m)==[24,16] and not warned(load_sparse, m, file[.5]) and not warned(load_sparse, mlp((6,8,4)), file[.75])

def test_masks_of_another_sparsity_however_they_are_loaded(tmp_path):
    "Once, by torch's own load too, also under an engine that takes them as its target; not where all weights live, and not in a copy"
    def made(s=.5):
        sparsify_model(m := mlp((20,16,4)), s, seed=0)
        return m
    nine,said = made(.9),['the masks of the file have a sparsity of 0.901, and those of the model had 0.5']
    learns = [Learner(None, o, loss_func=nn.MSELoss(), path=tmp_path) for o in (nine, made())]
    learns[0].save('nine', with_opt=False)
    told = warned(learns[1].load, 'nine', with_opt=False)
    assert warned(made().load_state_dict, nine.state_dict())==said==[o for o in told if 'sparsity' in o]
    moved = made()
    engine = SparseEngine(moved, torch.optim.SGD(moved.parameters(), .1), 100, method='set')
    assert warned(moved.load_state_dict, nine.state_dict())==said
    for m,state in (made(0.),nine), (made(),made()), (copy.deepcopy(made()),nine): assert not warned(m.load_state_dict, state.state_dict())

@pytest.mark.parametrize('suffix', ['.onnx','.pt2'])
def test_an_exported_graph_is_no_file_of_weights(suffix, tmp_path):
    (file := tmp_path/f'm{suffix}').write_bytes(b'\x08\x0a\x12\x07pytorch')
    with pytest.raises(ValueError, match='exported graph'): load_sparse(mlp(), file)

@pytest.mark.parametrize('format', ['auto','dense','shrunk','safetensors'])
def test_a_dense_model_is_exported_as_the_baseline(format, tmp_path):
    "What comes out computes the same; formats of sparse layers still want masks"
    m,xb = mlp((6,8,4)),torch.randn(5,6)
    new,report = export_sparse(m, format, xb, tmp_path/'m.safetensors' if format=='safetensors' else None)
    if format=='safetensors': (new := mlp((6,8,4), seed=1)).load_state_dict(read_file(tmp_path/'m.safetensors'))
    assert torch.allclose(new(xb), m(xb), atol=1e-6)
    with pytest.raises(ValueError, match='no masks'): export_sparse(m, 'live', xb)

def test_channels_are_no_structure():
    with pytest.raises(ValueError, match='ChannelPruning'): as_structure('channels')
