"The table of a run is what the run does: its rows are the updates that are made"
import pytest,torch
from fastsparse.all import *
from fastsparse.core.registry import parts_of
from fastsparse.train.plan import outlook
from helpers import *
from torch import nn

models = dict(mlp=lambda: nn.Sequential(nn.Linear(12,48), nn.ReLU(), nn.Linear(48,24), nn.ReLU(), nn.Linear(24,4)),
    conv=lambda: nn.Sequential(nn.Conv2d(1,6,3), nn.ReLU(), nn.Conv2d(6,6,2), nn.Flatten(), nn.Linear(6,4)),
    frozen=lambda: nn.Sequential(nn.Linear(12,12).requires_grad_(False), nn.ReLU(), nn.Linear(12,12), nn.ReLU(), nn.Linear(12,4)))
falls = 'gmp','granet','acdc','dsd','softmest'  # to a sparsity that their runs need
totals = 'granet','acdc','snfs'  # where scores divide the weights among layers, only totals are known before

def run_of(name, kind, n, **settings):
    "Rows and updates as pairs of a step and the numbers of live weights after it"
    torch.manual_seed(0)
    model = models[kind]()
    settings = dict(sparsity=.8)|settings if name in falls else settings
    if name not in falls: sparsify_model(model, .6, structure='fan-in' if name=='srigl' else None, seed=0, sparse_init_mode=None)
    opt,made = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9),[]
    def note(engine, t): made.append((t, [tally.live for tally in engine.moving]))
    engine = DynamicSparseTraining(model, opt, n, method=name, seed=1, steps_per_epoch=10, sparse_compute=False, on_update=note, **settings)
    rows = [(row.t, row.live) for row in outlook(engine.groups[0])]
    x,y = torch.randn(8, *((1,4,4) if kind=='conv' else (12,))),torch.randint(4, (8,))
    for _ in range(n):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    if name in totals: rows,made = [[(t, sum(live)) for t,live in each] for each in (rows, made)]
    return rows,made

def check_run(name, kind, n):
    rows,made = run_of(name, kind, n)
    assert rows==made and (rows or name=='static')



@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', [*parts_of('method'), 'auto'])
def test_the_table_is_the_run(name): check_run(name, 'mlp', 40)

@pytest.mark.full
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('n', [40,90])
@pytest.mark.parametrize('name,kind', [(name, kind) for name in [*parts_of('method'), 'auto'] for kind in models if kind!='frozen' or name not in totals])
def test_the_table_is_any_run(name, kind, n):
    "What a frozen layer keeps from the others isn't known before, if scores divide the weights"
    check_run(name, kind, n)

@pytest.mark.parametrize('sizes,every,n_made', [((16,4,9),30,1), ((64,64,10),37,1), ((16,4,9),10,5)])
def test_a_warning_counts_the_updates_of_the_run(sizes, every, n_made):
    "The second update of 30 and 60 would drop .06 of so few weights that it moves none"
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:]))
    sparsify_model(model, .5, seed=0)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    said = ' '.join(warned(lambda: setattr(model, 'engine', DynamicSparseTraining(model, opt, 100, method='rigl', batches_per_update=every, seed=0))))
    assert len([*outlook(model.engine.groups[0])])==n_made
    assert (f'contains {n_made} update of' in said)==(n_made<5)

goals = dict(rigl=dict(batches_per_update=8), set=dict(batches_per_update=8), auto={})

@pytest.mark.parametrize('method', goals)
def test_a_goal_that_is_missed_is_said_for_every_method(method):
    "Ended before the first update, a model of .5 isn't the .8 that was asked for; after it, nothing is said"
    for steps,said in ((4,True), (40,False)):
        model = models['mlp']()
        sparsify_model(model, .5, seed=0)
        opt = torch.optim.SGD(model.parameters(), lr=.01)
        engine = DynamicSparseTraining(model, opt, 40, method=method, sparsity=.8, seed=0, **goals[method])
        for _ in range(steps):
            opt.zero_grad()
            model(torch.randn(8,12)).square().mean().backward()
            opt.step()
        assert any('0.500 sparse instead of 0.80' in text for text in warned(engine.remove))==said
