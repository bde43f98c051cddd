"A small program that uses the public names: mypy checks it, as a user's editor would"
from fastsparse import DynamicSparseTraining,RigL_presets,erdos_renyi_sparsity,export_sparse
from fastsparse import prune_magnitude,sparse_compute,sparse_mask_like,sparse_summary,sparsify_model
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.Adam(model.parameters())
xb = torch.randn(4, 8)

def train() -> None:
    sparsify_model(model, .5, erdos_renyi_sparsity, seed=0)
    DynamicSparseTraining(model, opt, 100, **RigL_presets, seed=0)
    sparse_compute(model, xb, opt)
    prune_magnitude(model, '2:4')
    print(sparse_summary(model))

def deploy() -> nn.Module:
    net,report = export_sparse(model, 'auto', xb)
    return net

mask = sparse_mask_like(torch.randn(4, 4), .5)
