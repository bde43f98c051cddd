"Constants among the weights: what doesn't train in a model that does"
import pytest,torch
from fastsparse.all import *
from helpers import warned
from torch import nn

class Head(nn.Module):
    "The distances 0 to 7 are read by a frozen kernel, as in YOLOv8's heads"
    def __init__(self, n=8):
        super().__init__()
        self.a,self.b,self.distance = nn.Conv2d(16, 32, 3, padding=1),nn.Conv2d(32, 4*n, 1),nn.Conv2d(n, 1, 1, bias=False)
        self.distance.requires_grad_(False).weight.data[:] = torch.arange(n).float().view(1, n, 1, 1)

    def forward(self, x):
        y = self.b(self.a(x).relu()).flatten(2).view(len(x), 4, 8, -1)
        return self.distance(y.transpose(1, 2).softmax(1)).squeeze(1)

@pytest.mark.parametrize('f', [lambda m: prune_magnitude(m, .5), lambda m: sparsify_model(m, .8, seed=0), lambda m: prune_wanda(m, .5, [torch.randn(2,16,8,8)]),
    lambda m: prune_magnitude(m, .5, exclude='distance*')])
def test_whole_numbers_that_do_not_train_stay_dense(f):
    m = Head()
    assert not any('distance' in o for o in warned(f, m))
    assert m.distance.weight.flatten().tolist()==list(range(8)) and not hasattr(m.distance, 'weight_mask')
    assert sparse_summary(m).df.set_index('parameter').loc['distance.weight'].note=='constant'

def test_a_frozen_filter_is_named():
    "With the argument that keeps it; not where the whole body is frozen, as in fine-tuning, nor with that argument"
    def net(frozen):
        m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 32, 3), nn.Flatten(), nn.Linear(32, 10))
        m[frozen].requires_grad_(False)
        return m
    said = [o for o in warned(sparsify_model, net(0), .5, seed=0) if 'train' in o]
    assert len(said)==1 and "exclude='0.weight'" in said[0]
    for m,kw in ((net(2), {}), (net(0), dict(exclude='0.weight')), (net(0), dict(chosen=['0','2']))):
        assert not any("doesn't train" in o for o in warned(sparsify_model, m, .5, seed=0, **kw))
