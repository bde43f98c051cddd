"An export holds all of a learner in fewer bytes: what comes back is equal, shares what was shared, and the learner itself is as it was"
import copy,os,pickle,pytest,torch
from fastai.basics import Callback,CrossEntropyLossFlat,Datasets,Learner,load_learner,math,set_seed
from fastsparse.all import *
from torch import nn

def item(i): return torch.full((16,), float(i))
def target(i): return i%4

def learner(model, cbs=None):
    dls = Datasets(list(range(32)), [[item],[target]]).dataloaders(bs=8, num_workers=0)
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cbs)

def mlp(): return nn.Sequential(nn.Linear(16,200), nn.ReLU(), nn.Linear(200,200), nn.ReLU(), nn.Linear(200,4))

def exported(learn, path, **kwargs):
    learn.export(path, **kwargs)
    return load_learner(path, **{k:v for k,v in kwargs.items() if k=='pickle_module'})

def same(a, b):
    a,b = a.state_dict(),b.state_dict()
    assert list(a)==list(b)
    for k in a: assert a[k].dtype==b[k].dtype and a[k].equal(b[k]), k

@pytest.mark.parametrize('kwargs', [{}, dict(pickle_protocol=4), dict(pickle_module=pickle)])
@pytest.mark.parametrize('dtype', [torch.float, torch.half, torch.bfloat16, torch.double])
def test_an_export_comes_back_equal_and_small(tmp_path, kwargs, dtype):
    learn,dense = learner(mlp().to(dtype)),learner(mlp().to(dtype))
    sparsify_model(learn.model, .9, seed=0)
    again = exported(learn, tmp_path/'sparse.pkl', **kwargs)
    same(again.model, learn.model)
    dense.export(tmp_path/'dense.pkl', **kwargs)
    assert os.path.getsize(tmp_path/'sparse.pkl')<os.path.getsize(tmp_path/'dense.pkl')
    x = torch.randn(3, 16, dtype=dtype)
    assert again.model.eval()(x).equal(learn.model.eval()(x))

def test_what_comes_back_keeps_the_laws(tmp_path):
    learn = learner(mlp())
    sparsify_model(learn, .9, seed=0)
    again = exported(learn, tmp_path/'a.pkl')
    with torch.no_grad(): again.model[0].weight.fill_(1.)
    again.model(torch.randn(2, 16))
    w,mask = again.model[0].weight,again.model[0].weight_mask
    assert w.eq(1).equal(mask)
    again.dls = learn.dls
    with again.no_bar(), again.no_logging(): again.fit(1, cbs=DynamicSparseTrainingCallback(**SET_presets(batches_per_update=2)))
    assert not w[~mask].any() and w.ne(0).sum()<=mask.sum()

def test_the_learner_goes_on_as_if_nothing_had_been(tmp_path):
    def trained(export):
        set_seed(1)
        learn = learner(mlp())
        sparsify_model(learn, .9, seed=0)
        cb = DynamicSparseTrainingCallback(method='rigl', batches_per_update=2, seed=0)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, cbs=cb)
            before = [id(t) for t in (*learn.model.parameters(), *learn.model.buffers())]
            if export: learn.export(tmp_path/'a.pkl')
            assert before==[id(t) for t in (*learn.model.parameters(), *learn.model.buffers())]
            learn.fit(1, cbs=cb)
        return learn.model
    same(trained(True), trained(False))

class Keeper(Callback):
    "Holds a layer and a parameter of the model"
    def __init__(self, layer): self.layer,self.weight = layer,layer.weight

@pytest.mark.parametrize('with_opt', [False, True])
def test_an_export_shares_what_was_shared(tmp_path, with_opt):
    model = mlp()
    model.append(nn.Linear(4, 4))
    model.append(nn.Linear(4, 4))
    model[6].weight = model[5].weight
    learn = learner(model, Keeper(model[2]))
    sparsify_model(learn, .8, seed=0)
    if with_opt: learn.create_opt()
    again = exported(learn, tmp_path/'a.pkl')
    same(again.model, model)
    assert again.keeper.layer is again.model[2] and again.keeper.weight is again.model[2].weight
    assert again.model[5].weight is again.model[6].weight and again.keeper.learn is again

def test_no_value_is_lost_that_others_wrote(tmp_path):
    learn = learner(mlp())
    sparsify_model(learn, .9, seed=0).remove()  # nobody keeps dead weights at zero now
    with torch.no_grad(): learn.model[2].weight.fill_(2.)
    same(exported(learn, tmp_path/'a.pkl').model, learn.model)

def test_odd_numbers_and_layouts_come_back(tmp_path):
    model = nn.Sequential(nn.Unflatten(1, (4,2,2)), nn.Conv2d(4, 8, 2), nn.Flatten(), nn.Linear(8, 4)).to(memory_format=torch.channels_last)
    learn = learner(model)
    sparsify_model(learn, .5, seed=0)
    with torch.no_grad(): learn.model[3].weight[learn.model[3].weight_mask] = math.nan
    again = exported(learn, tmp_path/'a.pkl').model
    assert again[1].weight.stride()==model[1].weight.stride() and again[1].weight.equal(model[1].weight)
    assert again[3].weight.isnan().equal(model[3].weight_mask) and not again[3].weight[~model[3].weight_mask].any()

def test_a_frozen_parameter_stays_frozen_and_keeps_its_attributes(tmp_path):
    learn = learner(mlp())
    sparsify_model(learn, .9, seed=0)
    learn.model[0].weight.requires_grad_(False)
    learn.model[0].weight.note = 'mine'
    again = exported(learn, tmp_path/'a.pkl').model
    assert not again[0].weight.requires_grad and again[0].weight.note=='mine' and again[2].weight.requires_grad

def test_copies_and_other_pickles_are_as_ever():
    learn = learner(mlp())
    sparsify_model(learn, .9, seed=0)
    assert copy.copy(learn).model is learn.model
    same(copy.deepcopy(learn).model, learn.model)
    learn.create_opt()
    again = pickle.loads(pickle.dumps((learn, learn.opt)))
    assert again[1] is again[0].opt and any(p is again[0].model[0].weight for g in again[1].param_groups for p in g['params'])

class Uncopied:
    def __deepcopy__(self, memo): raise TypeError('I am the only one')

def test_what_cannot_be_copied_is_exported_whole(tmp_path):
    learn = learner(mlp())
    sparsify_model(learn, .9, seed=0)
    learn.extra = Uncopied()
    same(exported(learn, tmp_path/'a.pkl').model, learn.model)
