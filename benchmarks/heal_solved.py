"""What solving and tuning give back to cut networks: a small decoder, a mixture, and MiniLM, each cut plainly and with `heal=`, before and after tuning

    nice python benchmarks/heal_solved.py    # a table in benchmarks/results, to which a later call adds what is missing; a quarter of an hour on one core

Decoders are measured by loss on text that no training has seen, MiniLM by the cosine of its vectors to those of the whole one. Tuning has the whole network as
teacher, and the seed draws its batches."""
import argparse,copy,pandas as pd,random,torch
from fastsparse.all import *
from fastsparse.cut.experts import prune_experts
from fastsparse.cut.layers import prune_layers
from heal import Batches,decoder,fit,Logits,loss_of,Teacher
from measure import machine
from pathlib import Path
from transformers.utils import logging as tf_logging

file,seeds = Path(__file__).parent/'results/heal_solved.csv',3
rows = pd.read_csv(file).to_dict('records') if file.is_file() else []

def keep(**own):
    own['value'] = round(own['value'], 4)
    rows.append(dict(cpu=machine()['cpu'], **own))
    print(own, flush=True)
    pd.DataFrame(rows).to_csv(file, index=False)

def done(**own): return any(all(o[k]==v for k,v in own.items()) for o in rows)

def compare(model, gone, part, cut, tune, value):
    "Rows of one cut: without and with solving, before and after tuning by each seed"
    about = dict(model=model, gone=gone, part=round(part, 2))
    for solved in (False,True):
        small = None
        for seed in range(-1, seeds):
            way = ('solved' if solved else 'cut') if seed<0 else ('solved, tuned' if solved else 'tuned')
            if done(**about, way=way, seed=seed): continue
            small = cut(solved) if small is None else small
            own = copy.deepcopy(small)
            if seed>=0: tune(own, seed)
            keep(**about, way=way, seed=seed, value=value(own))

def decoders(steps, heal):
    data = [dict(input_ids=x) for x,_ in Batches(20, 5)]
    for kind in ('llama','mixtral'):
        torch.manual_seed(0)
        dense = decoder(kind)
        fit(dense, steps, 4e-3, 0)
        def tune(model, seed): fit(model, heal, 2e-3, 1+seed, [Teacher(Logits(dense).eval())])
        def value(model): return loss_of(Logits(model))
        if not done(model=kind, gone='nothing', way='dense'): keep(model=kind, gone='nothing', part=0., way='dense', seed=-1, value=value(dense))
        def widths(part, solved):
            prune_channels(m := copy.deepcopy(dense), part, data[0], heal=data if solved else None)
            return shrink(m, data[0])[0]
        def layers(part, solved):
            prune_layers(m := copy.deepcopy(dense), round(part*6), data, heal=solved or None)
            return m
        def experts(part, solved):
            prune_experts(m := copy.deepcopy(dense), part, data, heal=solved or None)
            return m
        ways = [('neurons and heads',widths,.25), ('neurons and heads',widths,.5), ('layers',layers,1/3)]
        if kind=='mixtral': ways = [('experts',experts,.25), ('experts',experts,.5)]
        for gone,f,part in ways: compare(kind, gone, part, lambda solved: f(part, solved), tune, value)

def encoder(steps):
    from heal_encoder import heal
    from small import batches,pretrained,quality,sentences,vectors
    texts,dense = sentences(),pretrained()
    test,data = batches(texts[:300]),batches(texts[300:2300])
    some,target = batches(texts[300:900]),torch.cat([*vectors(dense, test)])
    def tune(model, seed): heal(model, dense, random.Random(seed).sample(data, len(data)), steps)
    def value(model): return quality(model, test, target)[0]
    for structure,part in (('channels',.25),('heads',.25),('channels',.5)):
        def cut(solved):
            prune_channels(m := copy.deepcopy(dense), part, data[0], structure=structure, heal=some if solved else None)
            return shrink(m, data[0])[0].eval()
        compare('MiniLM', dict(channels='neurons and heads').get(structure, structure), part, cut, tune, value)

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--steps', type=int, default=300, help='of training a decoder')
    parser.add_argument('--heal', type=int, default=50, help='of tuning it')
    args = parser.parse_args()
    torch.set_num_threads(1)
    tf_logging.set_verbosity_error()
    tf_logging.disable_progress_bar()
    encoder(60)
    decoders(args.steps, args.heal)
