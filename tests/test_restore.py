"Masks come back from a state dict, into a model that fits, or not at all"
import copy,io,os,pytest,torch
from fastai.learner import load_learner
from fastai_data import learner,mlp as double_mlp,sparse_learner
from fastsparse.all import *
from fastsparse.learned.masks import supermask_presets
from torch.nn.utils import prune
from fastsparse.weights.find import masked_params
from fastsparse.save.state import load_checked
from helpers import *
from test_magnitude import data_of,net_of
from torch import nn

def test_saved_and_restored():
    "Through a file into a fresh model, fully live masks included, and out to plain weights with equal outputs"
    net,x = net_of(),data_of()[0]
    prune_magnitude(net, {'0':'2:4'})
    buf = io.BytesIO()
    torch.save(net.state_dict(), buf)
    buf.seek(0)
    fresh = net_of(9)
    load_sparse(fresh, torch.load(buf))
    assert same_masks(masks_of(net), masks_of(fresh)) and torch.equal(net(x), fresh(x)) and fresh[2].weight_mask.all()
    y = net(x)
    unsparsify(net)
    assert torch.equal(net(x), y) and net.state_dict().keys()==net_of().state_dict().keys() and net[0].weight.count_nonzero()==48
    with pytest.raises(ValueError, match='no masks.*and no zeros'): load_sparse(net_of(), net_of().state_dict())

class WithMasks(nn.Module):
    "A buffer of the user's that ends like a mask of ours"
    def __init__(self, sizes=(8,12,6)):
        super().__init__()
        self.body = mlp(sizes)
        self.register_buffer('causal_mask', torch.ones(3, 3).tril().bool())
    def forward(self, x): return self.body(x)

def test_restored_only_where_it_fits():
    "Law 10: a checkpoint that doesn't fit is refused before anything changed; a buffer that ends in _mask is no mask, and what had none gets none"
    net,x = WithMasks(),data_of()[0]
    sparsify_model(net, .5, chosen='body.0.*', seed=0)
    state,fresh = net.state_dict(),WithMasks()
    load_sparse(fresh, state)
    assert torch.equal(fresh(x), net(x)) and [o.name for o in masked_params(fresh)]==['body.0.weight'] and fresh.state_dict().keys()==state.keys()
    for other,what in [(WithMasks((8,12,12,6)),r'body.2.weight is \(6, 12\) in the file, and \(12, 12\) in the model'), (WithMasks((8,11,6)),r'body.0.weight has shape \(12, 8\) in the file, and \(11, 8\) in the model'),
        (nn.ModuleDict(dict(head=net_of())),'no weights by the names of this model, such as head.0.weight'), (nn.ModuleDict(dict(body=net_of())),'causal_mask is not there in the model')]:
        old = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=what): load_sparse(other, state)
        assert other.state_dict().keys()==old.keys() and all(torch.equal(v, old[k]) for k,v in other.state_dict().items())

def test_restores_every_mask_that_folding_leaves():
    "Embeddings, bags, Bilinear and masks made by hand come back from a state dict, tied weights too"
    def make():
        net = nn.ModuleDict(dict(a=nn.Embedding(10,8), bag=nn.EmbeddingBag(6,8), bil=nn.Bilinear(8,8,4), b=nn.Linear(8,8), c=nn.Linear(8,8)))
        net['c'].weight = net['b'].weight
        return net
    net,fresh = make(),make()
    learn_masks(net, {'*':'top 0.5'}, seed=0)
    fold_masks(net)
    sparsify_parameter(net, 'b.bias', .5, seed=0)
    state = net.state_dict()
    load_sparse(fresh, state)
    assert [o.name for o in masked_params(fresh)]==['a.weight','bag.weight','bil.weight','b.weight','b.bias']
    assert fresh.state_dict().keys()==state.keys() and all(torch.equal(v, state[k]) for k,v in fresh.state_dict().items())
    assert_dead(fresh)
    load_sparse(fresh, state)
    with pytest.raises(ValueError, match='has a mask in the model only'): load_sparse(fresh, {k:v for k,v in state.items() if not k.startswith('bag.weight_')})
    other = make()
    load_sparse(once := make(), {k:v for k,v in state.items() if k!='c.weight'})  # as a file of safetensors holds it
    assert all(torch.equal(v, state[k]) for k,v in once.state_dict().items()) and once['c'].weight is once['b'].weight
    with pytest.raises(ValueError, match=r'a\.weight_mask has shape \(3, 8\)'): load_sparse(other, state|{'a.weight_mask': torch.ones(3,8).bool()})
    assert not masked_params(other)

# --- what was written by whom

def _save(o, path):
    torch.save(o, path)
    return path

def _by_name(m): return {o.name:o.mask for o in masked_params(m)}

def _pruned(m):
    "The same weights and masks, as `torch.nn.utils.prune` has them, with values where weights are dead"
    new,masks = copy.deepcopy(m),_by_name(m)
    unsparsify(new)
    for i in (0,2):
        new[i].weight.data[~masks[f'{i}.weight']] = 9.
        prune.custom_from_mask(new[i], 'weight', masks[f'{i}.weight'])
    return new

def _masks(m, end='', f=lambda t: t): return {f'{n}{end}':f(v) for n,v in _by_name(m).items()}
def _full(m): return {n:torch.where(_by_name(m)[n], p, 9.) if n in _by_name(m) else p for n,p in m.named_parameters()}
def _zeros(m): return plain_copy(m).state_dict()
def _named(state, before): return {f'{before}{k}':v for k,v in state.items()}
def safetensors(f): return getattr(pytest.importorskip('safetensors.torch'), f)

def _tensors(m, path):
    safetensors('save_file')(m.state_dict(), path)
    return path

writers = {}
writers['a state dict'] = lambda m, p: m.state_dict()
writers['torch.save of a state dict'] = lambda m, p: _save(m.state_dict(), p)
writers['the old format of torch.save'] = lambda m, p: torch.save(m.state_dict(), p, _use_new_zipfile_serialization=False) or p
writers['torch.save of a model'] = lambda m, p: _save(m, p)
writers['learn.save'] = lambda m, p: _learner_of(m, p).save('m')
writers['learn.save without optimizer'] = lambda m, p: _learner_of(m, p).save('m', with_opt=False)
writers['learn.export'] = lambda m, p: _learner_of(m, p).export('m.pkl') or p.parent/'m.pkl'
writers['safetensors'] = lambda m, p: _tensors(m, p)
writers['save_model'] = lambda m, p: safetensors('save_model')(m, p) or p
writers['save_sparse'] = lambda m, p: save_sparse(m, p)
writers['export_sparse'] = lambda m, p: export_sparse(m, 'safetensors', torch.randn(2,8), p.with_suffix('.safetensors'))[0]
writers['a folder'] = lambda m, p: _tensors(m, p.parent/'model.safetensors').parent
writers['save_run'] = lambda m, p: save_run(p, m, torch.optim.Adam(m.parameters()))
writers['masks in bits'] = lambda m, p: _save({k:torch.tensor(np.packbits(v.flatten().numpy())) if k.endswith('_mask') else v for k,v in m.state_dict().items()}, p)
writers['DDP'] = lambda m, p: _save(_named(m.state_dict(), 'module.'), p)
writers['torch.compile'] = lambda m, p: _save(torch.compile(m).state_dict(), p)
writers['a checkpoint'] = lambda m, p: _save(dict(epoch=3, optimizer=torch.optim.SGD(m.parameters(), .1).state_dict(), model=m.state_dict()), p)
writers['a checkpoint in another'] = lambda m, p: dict(args=dict(lr=.1), net=dict(state_dict=_named(m.state_dict(), 'net.')))
writers['torch.nn.utils.prune'] = lambda m, p: _save(_pruned(m).state_dict(), p)
writers['a checkpoint of prune'] = lambda m, p: _save(dict(state_dict=_named(_pruned(m).state_dict(), 'module.'), epoch=1), p)
writers['weights, masks beside them'] = lambda m, p: _save(dict(model=_full(m), masks=_masks(m)), p)
writers['masks of floats'] = lambda m, p: dict(model=_full(m), masks=_masks(m, f=torch.Tensor.float))
writers['masks by module'] = lambda m, p: dict(model=_full(m), masks={n.removesuffix('.weight'):v for n,v in _by_name(m).items()})
writers['masks of uint8 in the state'] = lambda m, p: {**_full(m), **_masks(m, '_mask', lambda t: t.byte()*255)}
writers['zeros'] = lambda m, p: _save(_zeros(m), p)

def _learner_of(m, p):
    learn = learner(p.parent, model=m)
    learn.create_opt()
    return learn

@pytest.mark.parametrize('writer', writers)
@pytest.mark.filterwarnings('ignore')
def test_load_sparse_reads_what_others_wrote(writer, tmp_path):
    "Weights and masks are equal, and dead weights stay dead"
    m = mlp((8,12,6), seed=1)
    sparsify_model(m, .7, seed=0)
    file,fresh = writers[writer](m, tmp_path/'m.pth'),mlp((8,12,6), seed=2)
    load_sparse(fresh, file, trust=writer in ('torch.save of a model','learn.export'))
    assert same_masks(masks_of(m), masks_of(fresh)) and all(torch.equal(p, q) for p,q in zip(m.parameters(), fresh.parameters()))
    opt = torch.optim.AdamW(fresh.parameters(), .1)
    train(fresh, opt, 2, *data(fresh))
    assert_dead(fresh)
    load_sparse(fresh, file, trust=True)
    assert torch.equal(fresh[0].weight, m[0].weight)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.filterwarnings('ignore')
def test_what_looks_like_masks_and_is_not():
    "Weights of zeros and ones beside their masks; a model given for a file; dead values that are no numbers; a single layer of a larger file"
    m = nn.Linear(4,2)
    nn.init.ones_(m.weight), nn.init.zeros_(m.bias)
    sparsify_model(m, .5, seed=0, sparse_init_mode=None)
    for file in (m.state_dict(), m, plain_copy(m), dict(fc=_named(m.state_dict(), 'fc.'))):
        load_sparse(fresh := nn.Linear(4,2), file)
        assert agree(m.state_dict(), fresh.state_dict())
    mask = m.weight_mask
    load_sparse(fresh := nn.Linear(4,2), dict(weight_orig=torch.where(mask, 2., torch.nan), weight_mask=mask.float(), bias=torch.ones(2)))
    assert torch.equal(fresh.weight, 2.*mask) and torch.equal(fresh.weight_mask, mask)
    with pytest.raises(ValueError, match="after each of '0.', '2.'.*removeprefix"): load_sparse(nn.Linear(4,4), mlp((4,4,4)).state_dict())

class Versioned(nn.Linear):
    "Its weight was stored negated in version 1"
    _version = 2
    def _load_from_state_dict(self, state, prefix, about, *args):
        if about.get('version', 1)<2: state[f'{prefix}weight'] = -state[f'{prefix}weight']
        super()._load_from_state_dict(state, prefix, about, *args)

def test_modules_hear_their_version_in_the_file(tmp_path):
    "As `load_state_dict` tells them, under a prefix too"
    m = nn.Sequential(Versioned(4,4))
    sparsify_model(m, .5, seed=0, sparse_init_mode=None)
    torch.save(dict(model=nn.DataParallel(m).state_dict()), tmp_path/'m.pth')
    for file in (m.state_dict(), tmp_path/'m.pth', save_run(tmp_path/'run.pt', m)):
        load_sparse(fresh := nn.Sequential(Versioned(4,4)), file)
        assert torch.equal(m[0].weight, fresh[0].weight), file

def test_masks_alone_keep_the_values_of_the_model():
    "By names of weights, of modules or of buffers; scores and wrong shapes are refused, and change nothing"
    m = mlp((8,12,6))
    sparsify_model(m, .7, seed=0)
    for masks in (_masks(m), _masks(m, '_mask'), dict(masks=_masks(m, f=torch.Tensor.half))):
        fresh = mlp((8,12,6), seed=2)
        want = fresh[2].weight.clone()*_by_name(m)['2.weight']
        load_sparse(fresh, masks)
        assert same_masks(masks_of(m), masks_of(fresh)) and torch.equal(fresh[2].weight, want)
    fresh = mlp((8,12,6), seed=2)
    before = copy.deepcopy(fresh.state_dict())
    for bad in ({'0.weight':_by_name(m)['2.weight']}, {'1.weight':_by_name(m)['2.weight'], **_masks(m)}, {**_full(m), **_masks(m, '_mask', lambda t: t*torch.rand(t.shape))}):
        with pytest.raises(ValueError): load_sparse(fresh, bad)
        assert agree(before, fresh.state_dict())

def test_what_fits_twice_is_refused_with_a_line_that_reads_one():
    "Two state dicts, two prefixes, two masks for one weight that differ"
    m,other = mlp((8,12,6)),mlp((8,12,6))
    for o,seed in ((m,0),(other,1)): sparsify_model(o, .7, seed=seed)
    for file,what in [(dict(model=m.state_dict(), ema=other.state_dict()),r"in \['model'\] and in \['ema'\]: open it by torch.load, and pass one.*load_sparse\(model, file\['model'\]\)"),
        ({**_named(m.state_dict(), 'student.'), **_named(other.state_dict(), 'teacher.')},r"after each of 'student.', 'teacher.'.*removeprefix\('student.'\)"),
        (dict(model=m.state_dict(), masks=_masks(other)),'two masks for 0.weight, and they differ')]:
        with pytest.raises(ValueError, match=what): load_sparse(mlp((8,12,6)), file)
    load_sparse(fresh := mlp((8,12,6)), dict(model=m.state_dict(), masks=_masks(m)))
    assert same_masks(masks_of(m), masks_of(fresh))

@pytest.mark.filterwarnings('ignore')
def test_a_whole_model_is_opened_only_if_trusted(tmp_path):
    "A pickle runs what it holds; a damaged file and one that isn't there are named"
    class Evil:
        def __reduce__(self): return os.mkdir,(str(tmp_path/'ran'),)
    m = mlp((8,12,6))
    sparsify_model(m, .7, seed=0)
    for o in (m, dict(model=m.state_dict(), more=Evil())):
        torch.save(o, tmp_path/'whole.pth')
        with pytest.raises(ValueError, match='whole.pth.*trust=True'): load_sparse(mlp((8,12,6)), tmp_path/'whole.pth')
    assert not (tmp_path/'ran').exists()
    torch.save(m.state_dict(), tmp_path/'m.pth')
    raw = (tmp_path/'m.pth').read_bytes()
    at = raw.index(m[2].bias.detach().numpy().tobytes())
    for bad in (raw[:len(raw)//2], raw[:at]+bytes([raw[at]^1])+raw[at+1:], b'nothing', b''):
        (tmp_path/'m.pth').write_bytes(bad)
        with pytest.raises(ValueError, match='m.pth.*damaged'): load_sparse(mlp((8,12,6)), tmp_path/'m.pth')
    with pytest.raises(FileNotFoundError, match='none.pth'): load_sparse(mlp((8,12,6)), tmp_path/'none.pth')

def test_a_model_whose_weights_are_computed_is_refused_by_name():
    "One that `torch.nn.utils.prune` has changed: `prune.remove` leaves its zeros, which `keep_zeros` keeps"
    m = mlp((8,12,6))
    prune.random_unstructured(m[0], 'weight', .5)
    for f in (keep_zeros, lambda m: load_sparse(m, m.state_dict())):
        with pytest.raises(ValueError, match='0 .*prune.remove'): f(m)
    prune.remove(m[0], 'weight')
    keep_zeros(m)
    assert [int(o.mask.sum()) for o in masked_params(m)]==[48]

def test_learned_masks_load_into_a_model_that_was_prepared_alike():
    "And not into a dense one, which has no scores"
    def make(seed):
        m = mlp((8,12,6), seed=seed)
        learn_masks(m, **supermask_presets, seed=seed)
        return m
    a,b = make(0),make(1)
    load_sparse(b, a.state_dict())
    assert agree(a.state_dict(), b.state_dict())
    with pytest.raises(ValueError, match='call learn_masks as its run did'): load_sparse(mlp((8,12,6)), a.state_dict())

def test_a_load_looks_at_each_name_once():
    "In a model of many layers in a row, four times as many names are four times the work; torch's own load_state_dict compares each with each"
    looks = [0]
    class Name(str):
        def startswith(self, *args):
            looks[0] += 1
            return str.startswith(self, *args)
    def n_looks(n):
        sparsify_model(m := mlp([4]*n), .5, seed=0, sparse_init_mode=None)
        state,looks[0] = {Name(k):v for k,v in m.state_dict().items()},0
        load_checked(m, state)
        return looks[0]
    assert 0<n_looks(101)<=4.4*n_looks(26)

# --- loads of fastai

@pytest.mark.filterwarnings('ignore')
def test_learn_load_brings_masks_to_a_dense_learner(tmp_path):
    "Also without the optimizer; one that doesn't fit leaves the learner dense, one of a dense model loads as ever"
    m = sparse_learner(tmp_path)
    m.fit(1)
    dense = learner(tmp_path)
    dense.save('dense')
    for with_opt in (True,False):
        m.save('sparse', with_opt=with_opt)
        learn = learner(tmp_path, model=double_mlp(seed=5))
        assert learn.load('sparse') is learn
        assert same_masks(masks_of(m.model), masks_of(learn.model)) and agree(m.model.state_dict(), learn.model.state_dict())
        learn.fit(1)
        assert_dead(learn.model)
    other = learner(tmp_path, model=nn.Sequential(nn.Linear(3,4)))
    before = copy.deepcopy(other.model.state_dict())
    for strict in (True,False):
        with pytest.raises(RuntimeError, match='unchanged'): other.load('sparse', strict=strict)
        assert agree(before, other.model.state_dict()) and not other.model[0]._load_state_dict_pre_hooks
    learn = learner(tmp_path, model=double_mlp(seed=5)).load('dense')
    assert not masked_params(learn.model) and agree(dense.model.state_dict(), learn.model.state_dict())

@pytest.mark.filterwarnings('ignore')
def test_load_learner_keeps_masks(tmp_path):
    "In training after it too"
    m = sparse_learner(tmp_path)
    m.export('m.pkl')
    learn = load_learner(m.path/'m.pkl')
    assert same_masks(masks_of(m.model), masks_of(learn.model))
    learn.dls = m.dls
    learn.fit(1)
    assert_dead(learn.model)
