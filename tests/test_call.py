"A cut network of torchvision, timm or one's own comes with the call that builds it"
import pytest,torch,torchvision.models as models
from fastsparse.all import prune_channels,shrink
from fastsparse.cut.call import ModelCall,rebuilding_line
from fastsparse.kernels.timing import output_error
from functools import partial
from torch import nn
from torchvision.models.resnet import Bottleneck,ResNet
from torchvision.models.vgg import make_layers

def vgg(widths=[16,'M',32,'M'], hidden=64):
    return nn.Sequential(make_layers(widths, batch_norm=True), nn.Flatten(), nn.Linear(64*widths[-2], hidden), nn.ReLU(), nn.Linear(hidden, 3))
def timm(name, **kwargs): return partial(pytest.importorskip('timm').create_model, name, num_classes=3, **kwargs)

few = dict(num_classes=3)
rows = [[1,16,1,1],[6,24,2,2],[6,32,2,2]]
# function, and what half of the channels change; widths of MobileNetV2 are multiples of 8
calls = dict(resnet=(lambda: partial(ResNet, Bottleneck, [1,1,1,1], **few), dict(width_per_group=32)), vgg=(lambda: vgg, dict(widths=[8,'M',16,'M'], hidden=32)))
calls['resnet50'] = lambda: partial(models.resnet50, **few),dict(width_per_group=32)
calls['mobilenet'] = lambda: partial(models.MobileNetV2, inverted_residual_setting=rows, **few),dict(inverted_residual_setting=[[1,8,1,1],[6,16,2,2],[6,16,2,2]])
calls['densenet'] = lambda: partial(models.DenseNet, growth_rate=8, block_config=[2,2], num_init_features=16, **few),dict(bn_size=2)
calls['vit'] = lambda: partial(models.VisionTransformer, 32, 8, 2, 4, 64, mlp_dim=128, **few),dict(mlp_dim=64)
calls['timm_vit'] = lambda: timm('vit_tiny_patch16_224', img_size=32, depth=2),dict(mlp_ratio=2.)
calls['timm_resnet'] = lambda: timm('resnet18'),dict(channels=[64,64,128,256])
calls['timm_mixer'] = lambda: timm('mixer_s32_224', img_size=32),dict(mlp_ratio=[.25,2.])
long = 'resnet50','timm_mixer'

@pytest.mark.filterwarnings('ignore:dead channels stay')
@pytest.mark.parametrize('name', [pytest.param(k, marks=pytest.mark.full) if k in long else k for k in calls])
def test_the_line_builds_what_is_left(name):
    "The call differs in what is halved alone, and its network computes the same with the weights of the cut one"
    torch.manual_seed(0)
    make,new = calls[name]
    build,x = make(),torch.randn(2,3,32,32)
    model = build().eval()
    prune_channels(model, .5, x, even=build)
    small,removed = shrink(model, x)
    line,f = rebuilding_line(small, build, x),getattr(build, 'func', build)
    again = eval(line, {f.__name__:f, 'Bottleneck':Bottleneck}).eval()
    again.load_state_dict(small.state_dict())
    given = dict(getattr(build, 'keywords', {}))
    assert removed and line.endswith(', '.join(f'{k}={v!r}' for k,v in (given | new).items())+')')
    assert output_error(again(x), model(x))<1e-5 and sum(p.numel() for p in small.parameters())<sum(p.numel() for p in model.parameters())

def test_a_width_that_no_argument_holds():
    "The error names it, and the way out; so it is for one of two widths that share an argument"
    torch.manual_seed(0)
    build,x = partial(models.resnet18, num_classes=3),torch.randn(1,3,32,32)
    prune_channels(model := build(), .5, x)
    with pytest.raises(ValueError, match='bn1 keeps 32 of 64 groups, and resnet18 has no number for it.*export_sparse'): rebuilding_line(shrink(model, x)[0], build, x)
    def twice(width=8): return nn.Sequential(nn.Linear(4,width), nn.ReLU(), nn.Linear(width,width), nn.ReLU(), nn.Linear(width,2))
    model = twice()
    model[2].weight.data[:,4:] = 0
    with pytest.raises(ValueError, match='keeps 4 of 8 groups.* and twice has one width for both'):
        rebuilding_line(shrink(model, torch.randn(2,4))[0], twice, torch.randn(2,4))

def test_a_function_that_builds_another_model():
    with pytest.raises(ValueError, match='even is vgg, which builds another model'): prune_channels(vgg(hidden=9), .5, torch.randn(1,3,32,32), even=vgg)

def test_arguments_are_those_of_the_call_the_function_and_its_class():
    "What stands in the call is the last word; nothing but what changes is passed"
    class Net(nn.Linear):
        def __init__(self, a=2, b=(3,4), c=None): super().__init__(a, b[0])
    def net(a=5, **kwargs): return Net(a, **kwargs)
    call = ModelCall(partial(net, b=(6,7)))
    assert call.settings=={('a',):5, ('b',0):6, ('b',1):7, ('c',):None}
    assert call.line({('b',1):1})=='net(b=[6, 1])' and call.line({('a',):1})=='net(b=(6, 7), a=1)' and call.shapes({('a',):1})=={'weight':(6,1),'bias':(6,)}
