"""Channels pruned and cut, here and by torch-pruning: weights, and time in onnxruntime on one core

    python benchmarks/channels.py                # a table and a picture in benchmarks/results
    python benchmarks/channels.py --peer python  # with torch-pruning, by a Python that has it
"""
import argparse,io,json,numpy as np,pandas as pd,subprocess,sys,time,torch,torchvision,warnings
from pathlib import Path
from torch import nn
from torch.nn import functional as F

here = Path(__file__).parent

class UNet(nn.Module):
    "Two levels down and up again, with concatenation"
    def __init__(self, c=16):
        super().__init__()
        def two(i, o): return nn.Sequential(*[m for a in (i,o) for m in (nn.Conv2d(a, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())])
        self.d1,self.d2,self.mid,self.u2,self.u1 = two(3, c),two(c, 2*c),two(2*c, 4*c),two(4*c, 2*c),two(2*c, c)
        self.up2,self.up1,self.head = nn.ConvTranspose2d(4*c, 2*c, 2, 2),nn.ConvTranspose2d(2*c, c, 2, 2),nn.Conv2d(c, 2, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        x = self.u2(torch.cat([self.up2(self.mid(F.max_pool2d(b, 2))),b], 1))
        return self.head(self.u1(torch.cat([self.up1(x),a], 1)))

class Recurrent(nn.Module):
    "Two layers of a GRU"
    def __init__(self):
        super().__init__()
        self.rnn,self.head = nn.GRU(32, 256, num_layers=2, batch_first=True),nn.Linear(256, 10)
    def forward(self, x): return self.head(self.rnn(x)[0][:,-1])

class Logits(nn.Module):
    "A model of transformers that returns logits"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(input_ids=x).logits

def bert():
    from transformers import BertConfig,BertForSequenceClassification
    sizes = dict(vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024)
    return Logits(BertForSequenceClassification(BertConfig(**sizes)))

def llama():
    from transformers import LlamaConfig,LlamaForCausalLM
    sizes = dict(vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=688)
    return Logits(LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)))

def image(n): return torch.randn(1, 3, n, n)
vision = torchvision.models
networks = {'ResNet-18':(lambda: vision.resnet18(num_classes=10), lambda: image(128)), 'MobileNetV3':(lambda: vision.mobilenet_v3_small(num_classes=10), lambda: image(128)),
    'U-Net':(UNet, lambda: image(64)), 'ConvNeXt-tiny':(lambda: vision.convnext_tiny(num_classes=10), lambda: image(64)), 'BERT':(bert, lambda: torch.randint(1000, (1,64))),
    'Llama':(llama, lambda: torch.randint(1000, (1,64))), 'GRU':(Recurrent, lambda: torch.randn(1,32,32))}

def network(name):
    "The network with norms that have statistics, scales and shifts of their own, and an input"
    torch.manual_seed(0)
    make,x = networks[name]
    model = make().eval().requires_grad_(True)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean,m.bias.data): t.normal_(0, .1)
            for t in (m.running_var,m.weight.data): t.uniform_(.5, 1.5)
    return model,x()

def n_weights(m): return sum(p.numel() for p in m.parameters())

def peer(name, fraction):
    "torch-pruning's `MagnitudePruner`, with the outputs left alone"
    import torch_pruning as tp
    model,x = network(name)
    last = [m for n,m in model.named_modules() if isinstance(m, (nn.Linear,nn.Conv2d)) and (m.weight.shape[0] in (2,10) or 'lm_head' in n)]
    ends = dict(query=8, key=8, value=8, q_proj=8, k_proj=4, v_proj=4)
    heads = {m:ends[k] for n,m in model.named_modules() if (k := n.rpartition('.')[2]) in ends and isinstance(m, nn.Linear)}
    tp.pruner.MagnitudePruner(model, x, importance=tp.importance.MagnitudeImportance(p=2), pruning_ratio=fraction, ignored_layers=last, round_to=8,
        num_heads=heads, prune_num_heads=bool(heads), head_pruning_ratio=fraction).step()
    model(x)
    return model,x

def ours(name, fraction):
    "`prune_channels`, then `shrink`; the largest difference of outputs is checked"
    from fastsparse.all import prune_channels,shrink
    model,x = network(name)
    prune_channels(model, fraction, x, multiple=8)
    with warnings.catch_warnings(action='ignore'): small,_ = shrink(model, x)
    with torch.no_grad(): want,off = model(x),(model(x)-small(x)).abs().max()
    assert off<1e-5*max(float(want.abs().max()), 1), (name, off)
    return small,x

def onnx_seconds(models, x, rounds=15):
    "Median seconds of each in onnxruntime on one thread, in turns"
    import onnxruntime as ort
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = []
    for m in models:
        with warnings.catch_warnings(action='ignore'):
            dynamo = isinstance(m, Logits)
            torch.onnx.export(m.requires_grad_(False), (x,), f := io.BytesIO(), dynamo=dynamo, input_names=['x'], verbose=False)
        sessions.append(ort.InferenceSession(f.getvalue(), options, providers=['CPUExecutionProvider']))
    times = [[] for _ in sessions]
    for _ in range(rounds):
        for s,own in zip(sessions, times):
            t = time.perf_counter()
            s.run(None, dict(x=x.numpy()))
            own.append(time.perf_counter()-t)
    return [float(np.median(t)) for t in times]

def rows(name, by, fractions=(.3,.5,.7)):
    "Fractions of weights and of time that are left"
    model,x = network(name)
    small,found = [model],[]
    for f in fractions:
        t = time.perf_counter()
        try: small.append(by(name, f)[0])
        except Exception as e:
            found.append(dict(network=name, pruned=f, note=f'{type(e).__name__}: {str(e).splitlines()[0][:80] if str(e) else ""}'))
            continue
        found.append(dict(network=name, pruned=f, weights=n_weights(small[-1])/n_weights(model), n=n_weights(small[-1]), seconds=time.perf_counter()-t))
    try: dense,*others = onnx_seconds(small, x)
    except Exception as e: return [dict(o, onnx=f'{type(e).__name__}') for o in found]
    others = iter(others)
    return [dict(o, time=next(others)/dense) if 'weights' in o else o for o in found]

def draw(df):
    import matplotlib.pyplot as plt
    names = list(dict.fromkeys(df.network))
    fig,axs = plt.subplots(2, -(-len(names)//2), figsize=(7.5,4.6), sharex=True, sharey=True, squeeze=False, layout='constrained')
    for ax in axs.flat[len(names):]: ax.set_visible(False)
    for ax,name in zip(axs.flat, names):
        for by,color,marker in (('fastsparse','#0072b2','o'),('torch-pruning','#d55e00','s')):
            own = df[(df.network==name)&(df.by==by)&df.weights.notna()]
            ax.plot(own.pruned, own.weights, marker=marker, color=color, label=f'{by}: weights')
            ax.plot(own.pruned, own.time, marker=marker, color=color, ls=':', label=f'{by}: time')
        ax.set(title=name, ylim=(0,1.1), xticks=[.3,.5,.7])
        ax.title.set_size(9)
    fig.supxlabel('channels pruned', fontsize=9)
    fig.supylabel('left, dense = 1', fontsize=9)
    handles,labels = axs[0,0].get_legend_handles_labels()
    fig.legend(handles, labels, loc='outside upper center', ncols=4, fontsize=8)
    fig.savefig(here/'results/channels.png', dpi=110)

if __name__=='__main__':
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--peer', help='a Python that has torch-pruning')
    args.add_argument('--networks', nargs='+', default=list(networks), choices=list(networks))
    args.add_argument('--timeout', type=int, default=120, help='seconds for torch-pruning on a network')
    args.add_argument('--as-peer', action='store_true', help='print the rows of torch-pruning as JSON')
    args = args.parse_args()
    torch.set_num_threads(1)
    if args.as_peer: print(json.dumps([r for n in args.networks for r in rows(n, peer)]))
    else:
        found = []
        for n in args.networks:
            found += [dict(r, by='fastsparse') for r in rows(n, ours)]
            if args.peer:
                try: res = subprocess.run([args.peer, __file__, '--as-peer', '--networks', n], capture_output=True, text=True, timeout=args.timeout)
                except subprocess.TimeoutExpired: found.append(dict(network=n, by='torch-pruning', note=f'no answer in {args.timeout} s'))
                else: found += [dict(r, by='torch-pruning') for r in json.loads(res.stdout.splitlines()[-1])] if not res.returncode else \
                    [dict(network=n, by='torch-pruning', note=res.stderr.splitlines()[-1][:100])]
            print(pd.DataFrame(found).to_string(), file=sys.stderr)
        df = pd.DataFrame(found)
        df.to_csv(here/'results/channels.csv', index=False, float_format='%.4g')
        draw(df)
