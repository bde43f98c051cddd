"What a part says of itself"
import pytest, torch
from fastsparse.all import *
from fastsparse.masks.scores import MeanGradient
from fastsparse.core.registry import get_part,needs_of,parts
from functools import partial
from helpers import *

def engine_of(grow, **kwargs):
    m = torch.nn.Linear(8, 1, bias=False)
    sparsify_model(m, .5, seed=0)
    return m,SparseEngine(m, torch.optim.SGD(m.parameters(), lr=0.), 100, batches_per_update=10, drop_fraction=.5, grow_score_f=grow, **kwargs)

def backward(m): m(torch.arange(8.)[None]+1).sum().backward()

def test_a_wrong_word_is_an_error():
    "At the place where it is written"
    with pytest.raises(TypeError, match='reads_gard'): declares(reads_gard=True)
    with pytest.raises(KeyError, match='skore'): declares('skore')(max)

def test_undeclared_gradient_is_refused():
    "A grow score that reads `p.grad` and didn't say so is refused at its first update, with nothing changed"
    m,engine = engine_of(lambda p: p.grad.abs())
    engine.prepare(10)
    backward(m)
    mask = m.weight_mask.clone()
    with pytest.raises(ValueError, match='reads_grad=True'): engine.before_step(10)
    assert m.weight_mask.equal(mask) and type(m.weight) is torch.nn.Parameter and m.weight.grad is not None

def test_declared_functions_instances_and_partials():
    "All of them say what they need, and work"
    score = declares(reads_grad=True, name='my_score')(lambda p, power=1: p.grad.abs()**power)
    for f in (score, partial(score, power=2), 'my_score'):
        m,engine = engine_of(f)
        engine.prepare(10)
        backward(m)
        assert engine.before_step(10)
    assert needs_of(MeanGradient(8)).collector.window==8 and needs_of(partial(score)).reads_grad and not needs_of(None).reads_grad
    assert get_part('score', 'my_score') is score

def test_a_new_score_works_in_a_file():
    "Without another line"
    @declares(reads_grad=True)
    def fresh_score(p, **kwargs): return p.grad.abs()
    (_,settings), = configure(dict(method='rigl', grow_score_f='fresh_score'))
    assert settings['grow_score_f'] is fresh_score

def test_update_by_hand():
    "It moves what the method moves if it was announced, and is refused by name if it wasn't"
    m,engine = engine_of(gradient_magnitude)
    backward(m)
    with pytest.raises(ValueError, match='update=True'): engine.update(10)
    m.zero_grad()
    engine.prepare(10, update=True)
    backward(m)
    dead = (~m.weight_mask[0]).nonzero().flatten().tolist()
    assert engine.update(10) and m.weight_mask.sum()==4 and m.weight_mask[0,max(dead)]  # the last input has the largest gradient

def test_update_after_the_step():
    "The optimizer makes its step with live gradients, and then the topology moves by that step's dense gradient"
    m = torch.nn.Linear(8, 1, bias=False)
    sparsify_model(m, .5, seed=0)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    dst = DynamicSparseTraining(m, opt, 100, updates=[1], drop_fraction=.5, update_after_step=True)
    for t in range(2):
        opt.zero_grad()
        before,mask = m.weight.detach().clone(),m.weight_mask.clone()
        backward(m)
        opt.step()
    kept = mask & m.weight_mask
    assert dst.n_updates==1 and not mask.equal(m.weight_mask) and m.weight_mask.sum()==4
    torch.testing.assert_close(m.weight[kept], (before-.1*(torch.arange(8.)[None]+1))[kept])
    assert not m.weight[~mask].any()

def test_methods_by_name():
    "A setting beside it goes before the method's own, and the repr says what runs"
    m,_ = engine_of(random_score)
    e = SparseEngine(m, torch.optim.SGD(m.parameters(), lr=0.), 1000, method='rigl', batches_per_update=50)
    assert e.methods[0].grow_score_f is gradient_magnitude and e.methods[0].every==50
    assert "batches_per_update=50), sparsity=0.5" in repr(e)
    cb = DynamicSparseTrainingCallback(method='rigl', sparsity=.9)
    assert cb.method.batches_per_update==100 and 'sparsity=0.9' in repr(cb)
    for make in (lambda: DynamicSparseTrainingCallback(RigL_presets), lambda: engine_of(random_score, sparse_modules=RigL_presets)):
        with pytest.raises(ValueError, match="method='RigL'"): make()

@pytest.mark.parametrize('change,say', [(None, 'the state is None'), ({}, 'the state is {}'), (dict(schema=0), "'schema': 0"), (dict(n_steps=7), 'n_steps=7'), (dict(seed=9), 'checksum')])
def test_states_are_not_believed(change, say):
    "Law 10: a state of another run, or one that was changed, is refused before anything changed"
    m,engine = engine_of(random_score)
    mine = engine.state_dict()
    with pytest.raises(ValueError, match=say): engine.load_state_dict({**mine, **change} if change else change)
    assert engine.state_dict()==mine
    engine.load_state_dict(mine)

def test_states_of_another_method_or_mask():
    "SET's state is refused by RigL's run, and so is a state whose targets were changed, or whose model was another"
    m,engine = engine_of(random_score)
    state = engine.state_dict()
    _,other = engine_of(gradient_magnitude)
    with pytest.raises(ValueError, match='grow_score_f=random_score'): other.load_state_dict(state)
    with pytest.raises(ValueError, match='checksum'): engine.load_state_dict({**state, 'slots':[{**state['slots'][0], 'target':1}]})
    m.weight_mask.copy_(m.weight_mask.flip(1))
    with pytest.raises(ValueError, match='masks don.t match the model.*first: weight'): engine.load_state_dict(state)

def test_an_update_counts_once():
    "An `on_update` that raises doesn't make a second update when the step is tried again"
    def stops(engine, t): raise RuntimeError('stop')
    m,engine = engine_of(random_score, on_update=stops)
    engine.prepare(10)
    backward(m)
    with pytest.raises(RuntimeError): engine.before_step(10)
    assert engine.n_updates==1 and engine.groups[0].pending is None
    engine.before_step(10)
    assert engine.n_updates==1

def test_gradients_that_are_never_finite():
    "After 10 updates that could not be done there is a warning"
    m,engine = engine_of(random_score, updates=5, stop_pct=1.)
    def spin():
        for t in range(0, 100):
            m.weight.grad = torch.full_like(m.weight, float('inf'))
            engine.before_step(t)
    with pytest.warns(UserWarning, match='the last ten'): spin()

def test_users_parts_have_names():
    "A distribution and a score that are declared are found by their names, and the error for another name says that a function will do"
    @declares('distribution', name='denser head')
    def own(ps, sparsity): return [sparsity]*(len(ps)-1)+[sparsity/2]
    @declares(elementwise=True, name='cubes')
    def cubes(p, **kwargs): return p.detach().abs()**3
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8,8), torch.nn.Linear(8,4))
        with pytest.warns(UserWarning, match='distribution own leads'): sparsify_model(model, .5, 'denser head')
        assert int(model[1].weight_mask.sum())==24
        run = DynamicSparseTraining(model, torch.optim.SGD(model.parameters(), .1), 10, method='set', keep_score_f='cubes', sparse_compute=False)
        assert run.methods[0].keep_score_f is cubes
    finally: del parts['distribution']['denser head'],parts['score']['cubes']
    with pytest.raises(ValueError, match="sparse_f is 'root'.*, or a function: "): sparsify_model(torch.nn.Linear(4,4), .5, 'root')
