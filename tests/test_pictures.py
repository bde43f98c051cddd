"Room 10a: the picture of a topology can be read, whatever the model"
import matplotlib.pyplot as plt,pytest,torch
from fastcore.test import test_eq as eq
from fastsparse.all import *
from fastsparse.demo import digits_mlp
from fastsparse.report.pictures import degrees
from itertools import combinations
from test_layers import Experts
from torch import nn
from torchvision.models import resnet18

def mlp(): return digits_mlp()
def resnet(): return resnet18(num_classes=10)
def image_mlp(): return nn.Sequential(nn.Linear(784,30), nn.ReLU(), nn.Linear(30,10))
def deep(): return nn.Sequential(*(nn.Linear(16,16) for _ in range(40)))

def long_names():
    model = nn.Linear(20,10)
    for i in range(6): model = nn.ModuleDict({f'a_block_with_a_long_name_{i}':model})
    return nn.ModuleList([model, nn.Linear(10,10), nn.Linear(10,3)])

def recorded(model):
    "`model` after two updates, and their history"
    history,opt = SparseHistory(),torch.optim.SGD(model.parameters(), lr=.1)
    engine = DynamicSparseTraining(model, opt, 8, method='set', batches_per_update=2, on_update=history, steps_per_epoch=6)
    for _ in range(6):
        opt.zero_grad()
        sum(p.square().sum() for p in model.parameters()).backward()
        opt.step()
    engine.remove()
    return history

def words(ax):
    "The texts of `ax` that are drawn"
    yield from (ax.title, ax.xaxis.label, ax.yaxis.label)
    if ax.get_legend(): yield from ax.get_legend().get_texts()
    for axis in (ax.xaxis,ax.yaxis):
        low,high = sorted(axis.get_view_interval())
        yield from (t.label1 for t in axis.get_major_ticks() if low<=t.get_loc()<=high)
        yield from (t.label2 for t in axis.get_major_ticks() if low<=t.get_loc()<=high and t.label2.get_visible())

@pytest.mark.parametrize('with_history', [False,True])
@pytest.mark.parametrize('make', [mlp, resnet, image_mlp, deep, long_names])
def test_readable(make, with_history):
    "No two words of the picture overlap, none is cut off, and every layer's place is named or skipped regularly"
    model = make()
    sparsify_model(model, .9, 'erk', seed=0)
    fig = plot_topology(model, recorded(model) if with_history else None)
    try:
        fig.canvas.draw()
        boxes = [(t.get_text(), t.get_window_extent()) for ax in fig.axes for t in words(ax) if t.get_visible() and t.get_text().strip()]
        page = fig.bbox
        for s,b in boxes: assert b.x0>=-1 and b.y0>=-1 and b.x1<=page.width+1 and b.y1<=page.height+1, f'{s!r} is cut off'
        for (s,a),(t,b) in combinations(boxes, 2):
            w,h = min(a.x1,b.x1)-max(a.x0,b.x0),min(a.y1,b.y1)-max(a.y0,b.y0)
            assert w<1 or h<1, f'{s!r} and {t!r} overlap'
    finally: plt.close(fig)

def test_curves_over_the_whole_depth():
    "Where there are more layers than colours, the curves drawn are those of layers from the first to the last"
    model = deep()
    sparsify_model(model, .5, seed=0)
    fig = plot_topology(model)
    try: names = [t.get_text() for ax in fig.axes if ax.get_legend() for t in ax.get_legend().get_texts()]
    finally: plt.close(fig)
    eq(names, ['0','8','16','23','31','39'])

def test_a_dense_first_layer_is_no_picture():
    "The inputs shown are those of the first layer that is half dead, where there is one"
    model = nn.Sequential(nn.Linear(16,16), nn.Linear(16,9))
    sparsify_model(model, .2, layers_dense('0.*'), seed=0)
    fig = plot_topology(model)
    try:
        eq(fig.axes[0].get_title(), 'inputs of 1')
        eq(fig.axes[0].images[0].get_array().sum(), model[1].weight_mask.sum())
    finally: plt.close(fig)

def test_bars_are_densities():
    sparsify_model(model := mlp(), .8, 'erk', seed=0)
    fig = plot_topology(model)
    try:
        bars = [[p.get_width() for p in ax.patches] for ax in fig.axes if ax.get_title()=='layers']
        eq(bars, [[float(m.weight_mask.sum())/m.weight_mask.numel() for m in model.modules() if hasattr(m, 'weight_mask')]])
    finally: plt.close(fig)

def test_degrees_of_experts():
    "Each output of each expert has its own; an input is read by all"
    model = Experts(2, 3, 4)
    mask = torch.arange(24).view(2,3,4)%5==0  # 0 5 10 15 20
    sparsify_model(model, 19/24, also=Experts, mask_init={'up':mask})
    out,into = degrees(model)['up']
    eq(out.tolist(), [1,1,1,1,0,1])
    eq(into.tolist(), [2,1,1,1])

def test_without_masks(tmp_path):
    "A dense model has no degrees, and a history without masks no moving picture"
    with pytest.raises(ValueError, match='no masks'): degrees(nn.Linear(2,2))
    with pytest.raises(ValueError, match='keep_masks'): animate_masks(SparseHistory(), tmp_path/'a.gif')
