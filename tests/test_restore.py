"Masks come back from a state dict, into a model that fits, or not at all"
import copy,io,pytest,torch
from fastsparse.all import *
from fastsparse.weights.find import masked_params
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
    restore_sparse(fresh, torch.load(buf))
    assert same_masks(masks_of(net), masks_of(fresh)) and torch.equal(net(x), fresh(x)) and fresh[2].weight_mask.all()
    y = net(x)
    unsparsify(net)
    assert torch.equal(net(x), y) and net.state_dict().keys()==net_of().state_dict().keys() and net[0].weight.count_nonzero()==48
    with pytest.raises(ValueError, match='no masks'): restore_sparse(net_of(), net_of().state_dict())

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
    restore_sparse(fresh, state)
    assert torch.equal(fresh(x), net(x)) and [o.name for o in masked_params(fresh)]==['body.0.weight'] and fresh.state_dict().keys()==state.keys()
    for other,what in [(WithMasks((8,12,12,6)),r'body.2.bias is \(12,\)'), (WithMasks((8,13,6)),r'body.0.bias is \(13,\)'), (net_of(),'no masks for this model'),
        (nn.ModuleDict(dict(body=net_of())),'causal_mask is not there in the model')]:
        old = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=what): restore_sparse(other, state)
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
    restore_sparse(fresh, state)
    assert [o.name for o in masked_params(fresh)]==['a.weight','bag.weight','bil.weight','b.weight','b.bias']
    assert fresh.state_dict().keys()==state.keys() and all(torch.equal(v, state[k]) for k,v in fresh.state_dict().items())
    assert_dead(fresh)
    with pytest.raises(ValueError, match='sparse already'): restore_sparse(fresh, state)
    other = make()
    restore_sparse(once := make(), {k:v for k,v in state.items() if k!='c.weight'})  # as a file of safetensors holds it
    assert all(torch.equal(v, state[k]) for k,v in once.state_dict().items()) and once['c'].weight is once['b'].weight
    with pytest.raises(ValueError, match=r'a\.weight.*shape'): restore_sparse(other, state|{'a.weight_mask': torch.ones(3,8).bool()})
    assert not masked_params(other)
