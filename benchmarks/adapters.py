"What the mask costs an adapter: digits are learned, the network is pruned, and LoRA tunes it to digits that lie on their side"
import argparse,copy,csv,torch
from fastsparse.all import *
from pathlib import Path
from peft import LoraConfig,get_peft_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

def digits(turned=False, seed=0):
    "Images and classes, to train with and to test with"
    x,y = load_digits(return_X_y=True)
    x,y = torch.tensor(x).float().view(-1,8,8)/16,torch.tensor(y)
    x = (x.rot90(1, (1,2)) if turned else x).flatten(1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return (x[order[:1200]],y[order[:1200]]),(x[order[1200:]],y[order[1200:]])

def trained(model, data, steps, lr):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    sched,(x,y) = torch.optim.lr_scheduler.OneCycleLR(opt, lr, steps),data
    for i in range(steps):
        at = torch.randint(len(x), (64,))
        opt.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        opt.step()
        sched.step()
    return model

@torch.no_grad()
def quality(model, data):
    out = model.eval()(data[0])
    model.train()
    return dict(loss=F.cross_entropy(out, data[1]).item(), accuracy=(out.argmax(1)==data[1]).float().mean().item())

def runs(seed, rank, sparsities):
    torch.manual_seed(seed)
    (old,_),(new,test) = digits(seed=seed),digits(True, seed)
    dense = trained(nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,256), nn.ReLU(), nn.Linear(256,10)), old, 600, 2e-3)
    for s in sparsities:
        base = copy.deepcopy(dense)
        if s: prune_refit(base, s, [old[0].split(64)[0]], progress=False)
        def lora(): return get_peft_model(copy.deepcopy(base), LoraConfig(r=rank, lora_alpha=2*rank, target_modules=['0','2','4']))
        plain = trained(lora(), new, 600, 5e-3)
        found = {'before':base, 'LoRA, beside the base':plain}
        if s:
            found['LoRA, merged under the mask'] = merge_sparse(copy.deepcopy(plain))[0]
            found['LoRA under the mask, merged'] = merge_sparse(trained(mask_adapters(lora()), new, 600, 5e-3))[0]
        found['all live weights'] = trained(copy.deepcopy(base), new, 600, 2e-3)
        for way,m in found.items(): yield dict(sparsity=s, rank=rank, way=way, seed=seed, **quality(m, test))

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--seeds', type=int, default=5)
    p.add_argument('--ranks', type=int, nargs='+', default=[2,8])
    args = p.parse_args()
    rows = [o for seed in range(args.seeds) for r in args.ranks for o in runs(seed, r, [0.,.5,.8,.95])]
    with (Path(__file__).parent/'results'/'adapters.csv').open('w', newline='') as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator='\n')
        out.writeheader()
        out.writerows({k:round(v, 4) if isinstance(v, float) else v for k,v in o.items()} for o in rows)
    import pandas as pd
    print(pd.DataFrame(rows).groupby(['rank','sparsity','way'], sort=False)[['loss','accuracy']].agg(['median','std']).round(3))

if __name__=='__main__': main()
