"Models and batches to train on: name → model, inputs, targets"
import torch
from torch import nn
from torchvision.models import resnet18,resnet50

def mlp(): return nn.Sequential(nn.Linear(784,300), nn.ReLU(), nn.Linear(300,100), nn.ReLU(), nn.Linear(100,10))

def cifar_resnet18():
    "ResNet-18 with the stem that CIFAR needs: 3x3, stride 1, no pooling"
    model = resnet18(num_classes=10)
    model.conv1,model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False),nn.Identity()
    return model

class GPT(nn.Module):
    "A decoder-only transformer of characters"
    def __init__(self, n_vocab=65, d=384, n_layers=6, n_heads=6, n_ctx=128):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, n_heads, 4*d, dropout=0., activation='gelu', batch_first=True, norm_first=True)
        self.tokens,self.places = nn.Embedding(n_vocab, d),nn.Embedding(n_ctx, d)
        self.blocks = nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Linear(d, n_vocab)

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.blocks(self.tokens(x)+self.places.weight[:x.shape[1]], mask=causal, is_causal=True)
        return self.head(h).transpose(1, 2)

def images(bs, n_classes, size=32): return torch.randn(bs, 3, size, size),torch.randint(n_classes, (bs,))

make = dict(mlp=lambda: (mlp(), torch.randn(128,784), torch.randint(10, (128,))), resnet18=lambda: (resnet18(), *images(64, 1000)),
    resnet18_cifar=lambda: (cifar_resnet18(), *images(64, 10)), resnet50=lambda: (resnet50(), *images(8, 1000)),
    gpt=lambda: (GPT(), torch.randint(65, (8,128)), torch.randint(65, (8,128))))

titles = dict(mlp='MLP 784-300-100-10, batch 128', resnet18='ResNet-18, torchvision stem, 32x32, batch 64', resnet18_cifar='ResNet-18, CIFAR stem, batch 64',
    resnet50='ResNet-50', gpt='GPT 6 layers, width 384, 8x128 tokens')
