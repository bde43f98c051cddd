"Pruning by inputs of several experts in one parameter, beside one linear layer for each"
import copy,pytest,torch
from fastsparse.all import *
from helpers import *
from torch import nn
from torch.nn import functional as F

class Fused(nn.Module):
    "Experts in two parameters; each token goes to the one that its first entries name"
    def __init__(self, n=4, size=8, hidden=12, is_transposed=False):
        super().__init__()
        self.is_transposed = is_transposed
        self.up,self.down = [nn.Parameter(torch.randn(n, *o[::-1 if is_transposed else 1])/3) for o in ((hidden,size),(size,hidden))]
    def route(self, x): return x[:,:len(self.up)].argmax(1)
    def forward(self, x, to=None):
        to,out = self.route(x) if to is None else to,torch.zeros_like(x)
        for e in to.unique():
            h = x[to==e]
            if self.is_transposed: out[to==e] = F.gelu(h@self.up[e])@self.down[e]
            else: out[to==e] = F.linear(F.gelu(F.linear(h, self.up[e])), self.down[e])
        return out

class Apart(nn.Module):
    "The same, each expert in layers of its own"
    def __init__(self, fused):
        super().__init__()
        self.n = len(fused.up)
        for k in ('up','down'):
            for e,w in enumerate(getattr(fused, k).detach()):
                layer = nn.Linear(1, 1, bias=False)
                layer.weight = nn.Parameter((w.T if fused.is_transposed else w).clone().contiguous())
                self.add_module(f'{k}{e}', layer)
    def forward(self, x):
        to,out = x[:,:self.n].argmax(1),torch.zeros_like(x)
        for e in to.unique().tolist(): out[to==e] = getattr(self, f'down{e}')(F.gelu(getattr(self, f'up{e}')(x[to==e])))
        return out

def made(is_transposed=False, **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8,8), Fused(is_transposed=is_transposed, **kwargs))
    return net,[torch.randn(32,8) for _ in range(3)]

methods = [prune_wanda, prune_sparsegpt, prune_refit]

@pytest.mark.parametrize('is_transposed', [False,True])
@pytest.mark.parametrize('target', [.5,'2:4'])
@pytest.mark.parametrize('f', methods)
def test_an_expert_is_pruned_as_a_layer_of_its_own(f, target, is_transposed):
    "Masks and weights are those of one linear layer an expert, from any sparsity on"
    net,data = made(is_transposed)
    apart = nn.Sequential(copy.deepcopy(net[0]), Apart(net[1]))
    for t in (target, .75 if target==.5 else target):
        for m,also in ((net, ['*.up','*.down']), (apart, None)): f(m, {'0.weight':None, '*':t}, data, also=also)
        for k in ('up','down'):
            w,mask = getattr(net[1], k).detach(),getattr(net[1], f'{k}_mask')
            if is_transposed: w,mask = w.mT,mask.mT
            for e in range(4):
                layer = getattr(apart[1], f'{k}{e}')
                assert mask[e].equal(layer.weight_mask) and torch.allclose(w[e], layer.weight, atol=1e-5), (k, e)

@pytest.mark.parametrize('f', methods)
def test_an_expert_without_tokens_is_pruned_by_magnitude_and_told(f):
    "All inputs count the same there; its weights keep their values"
    net,data = made()
    data = [x[x[:,:4].argmax(1)!=2] for x in data]
    net[0] = nn.Identity()
    old = net[1].up.detach()[2].clone()
    with pytest.warns(UserWarning, match=r'^no token of the data reached 1\.up\[2\], 1\.down\[2\], which are pruned by magnitude'):
        f(net, '2:4', data, also=['*.up','*.down'])
    assert net[1].up_mask[2].equal(as_structure('2:4').top(old.abs(), old.numel()//2)) and torch.allclose(net[1].up.detach()[2], old*net[1].up_mask[2], atol=1e-6)

def test_an_axis_that_is_not_that_of_the_inputs():
    "Refused with the line that tells the right one, before anything changed"
    net,data = made(True)
    net[1].is_transposed = False
    net[1].forward = lambda x: x@net[1].up[0]
    old = net[1].up.detach().clone()
    with pytest.raises(ValueError, match=r"register_layer\(Fused, 'up', inputs=1, outputs=2, experts=0\)"): prune_wanda(net, .5, data, also='*.up')
    assert net[1].up.equal(old) and not masks_of(net)

small = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)

def _mixtral(tf): return tf.MixtralForCausalLM(tf.MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2))
def _qwen(tf): return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**small, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2))
def _gpt_oss(tf): return tf.GptOssForCausalLM(tf.GptOssConfig(**small, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=['full_attention']*2))

@pytest.mark.parametrize('make', [_mixtral, _qwen, _gpt_oss])
def test_experts_of_transformers(make):
    "All of them reach the sparsity, along their inputs for N:M; SparseGPT's and refit's outputs are nearer than magnitude's"
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    model,errors = make(tf).eval(),{}
    impl = model.config._experts_implementation
    data = [dict(input_ids=torch.randint(64, (8,24))) for _ in range(4)]
    with torch.no_grad(): want = model(**data[0]).logits
    for f in (prune_magnitude, prune_sparsegpt, prune_refit):
        m = copy.deepcopy(model)
        f(m, '2:4', *([] if f is prune_magnitude else [data]), also='*experts*_proj')
        experts = [o for o in masked_params(m) if 'experts' in o.name]
        assert len(experts)==4 and all(o.mask.sum()*2==o.mask.numel() for o in masked_params(m) if 'lm_head' not in o.name)
        for o in experts:
            mask = o.mask.mT if make is _gpt_oss else o.mask
            assert (mask.unflatten(-1, (-1,4)).sum(-1)==2).all(), o.name
        with torch.no_grad(): errors[f] = F.mse_loss(m(**data[0]).logits, want).item()
        assert m.config._experts_implementation==impl
    assert errors[prune_refit]<errors[prune_sparsegpt]<errors[prune_magnitude], errors
