"""MiniLM without a part of its neurons and heads, or of its layers, before and after tuning with the whole one as teacher

    python benchmarks/heal_encoder.py    # a table in benchmarks/results, to which a later call adds what is missing; a quarter of an hour on one core
"""
import argparse,copy,numpy as np,pandas as pd,random,time,torch
from fastsparse.all import *
from fastsparse.cut.layers import prune_layers
from pathlib import Path
from small import batches,pretrained,quality,sentences,vectors
from torch.nn import functional as F
from transformers.models.bert.modeling_bert import BertPooler

file = Path(__file__).parent/'results/heal_encoder.csv'

def channels(structure):
    def cut(model, sparsity, data):
        prune_channels(model, sparsity, data[0], structure=structure)
        return shrink(model, data[0])[0]
    return cut

def layers(model, part, data):
    model.pooler = BertPooler(model.config)  # of which the configuration says nothing
    prune_layers(model, round(6*part), data)
    model.pooler = None
    return model

ways = [('widths',channels('channels'),(.1,.25,.5)), ('heads',channels('heads'),(.25,)), ('layers',layers,(1/3,1/2))]

def heal(model, teacher, data, steps, lr=3e-4):
    "Tune the vectors of sentences to those of a teacher"
    opt,rng = torch.optim.AdamW(model.parameters()),random.Random(0)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, lr, steps)
    for _ in range(steps):
        b = rng.choice(data)
        goal,real = next(vectors(teacher, [b])),b['attention_mask'][...,None]
        own = (model(**b).last_hidden_state*real).sum(1)/real.sum(1)
        (1-F.cosine_similarity(own, goal)).mean().backward()
        opt.step()
        sched.step()
        opt.zero_grad()

def milliseconds(model, b, n=9):
    "Median of process time of one core"
    def once():
        t = time.process_time()
        next(vectors(model, [b]))
        return 1e3*(time.process_time()-t)
    return float(np.median([once() for _ in range(n)]))

def main(steps):
    texts,dense = sentences(),pretrained()
    test,data = batches(texts[:300]),batches(texts[300:2300])
    target,rows = torch.cat([*vectors(dense, test)]),pd.read_csv(file).to_dict('records') if file.is_file() else []
    for way,cut,part in [('dense',lambda m, part, data: m,0.), *((way,cut,part) for way,cut,parts in ways for part in parts)]:
        if (way,round(part, 2)) in [(o['way'],o['part']) for o in rows]: continue
        model = cut(copy.deepcopy(dense), part, data[:2]).eval()
        before = quality(model, test, target)
        if part: heal(model, dense, data, steps)
        after,n = quality(model, test, target),sum(p.numel() for p in model.parameters())
        rows.append(dict(way=way, part=round(part, 2), weights=n, kB=round(4*n/1e3), cosine_cut=round(before[0], 3), same_cut=round(before[1], 3),
            cosine=round(after[0], 3), same=round(after[1], 3), ms_torch=round(milliseconds(model, test[-1]), 1)))
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(file, index=False)

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--steps', type=int, default=60)
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))
