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

class Block(nn.Module):
    "Causal attention and a feed-forward net, each behind a norm"
    def __init__(self, d, n_heads):
        super().__init__()
        self.n_heads,self.norm1,self.norm2 = n_heads,nn.LayerNorm(d),nn.LayerNorm(d)
        self.qkv,self.proj = nn.Linear(d, 3*d),nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4*d), nn.GELU(), nn.Linear(4*d, d))

    def attend(self, x):
        q,k,v = self.qkv(x).unflatten(-1, (3,self.n_heads,-1)).permute(2,0,3,1,4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x+self.attend(self.norm1(x))
        return x+self.mlp(self.norm2(x))

class GPT(nn.Module):
    "A decoder-only transformer of characters"
    def __init__(self, n_vocab=65, d=384, n_layers=6, n_heads=6, n_ctx=128):
        super().__init__()
        self.tokens,self.places = nn.Embedding(n_vocab, d),nn.Embedding(n_ctx, d)
        self.blocks = nn.Sequential(*[Block(d, n_heads) for _ in range(n_layers)], nn.LayerNorm(d))
        self.head = nn.Linear(d, n_vocab)

    def forward(self, x): return self.head(self.blocks(self.tokens(x)+self.places.weight[:x.shape[1]])).transpose(1, 2)

def images(bs, n_classes, size=32): return torch.randn(bs, 3, size, size),torch.randint(n_classes, (bs,))

make = dict(mlp=lambda: (mlp(), torch.randn(128,784), torch.randint(10, (128,))), resnet18=lambda: (resnet18(), *images(64, 1000)),
    resnet18_cifar=lambda: (cifar_resnet18(), *images(64, 10)), resnet50=lambda: (resnet50(), *images(8, 1000)),
    gpt=lambda: (GPT(), torch.randint(65, (8,128)), torch.randint(65, (8,128))))

titles = dict(mlp='MLP 784-300-100-10, batch 128', resnet18='ResNet-18, torchvision stem, 32x32, batch 64', resnet18_cifar='ResNet-18, CIFAR stem, batch 64',
    resnet50='ResNet-50', gpt='GPT 6 layers, width 384, 8x128 tokens')
