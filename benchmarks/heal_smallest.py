"""MiniLM as small as it gets without training: the tokens of its sentences alone, a quarter of its neurons and heads solved away, 8 bits

    nice python benchmarks/heal_smallest.py    # a row for each step in benchmarks/results; two minutes on one core
"""
import copy,pandas as pd,tempfile,torch,torch.nn.functional as F
from fastsparse.all import *
from fastsparse.deploy.onnx import open_onnx
from pathlib import Path
from small import batches,pretrained,sentences,tokens,vectors
from transformers.utils import logging

def mean(hidden, b):
    real = b['attention_mask'][...,None]
    return F.normalize((hidden*real).sum(1)/real.sum(1), dim=-1)

def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    texts,dense,rows = sentences()[:900],pretrained(),[]
    target = torch.cat([*vectors(dense, batches(texts[:300]))])
    def own(texts, tokenizer):
        texts = sorted(texts, key=len)
        parts = [texts[i:i+32] for i in range(0, len(texts), 32)]
        return [dict(tokenizer(o, padding=True, truncation=True, max_length=32, return_tensors='pt')) for o in parts]
    def row(what, model, tokenizer, int8=None):
        test = own(texts[:300], tokenizer)
        with tempfile.TemporaryDirectory() as d:
            export_sparse(model, 'onnx', test[0], file := Path(d)/'model.onnx', int8=int8)
            run = open_onnx(file)
            v = torch.cat([mean(run(**b)[0], b) for b in test])
            MB = file.stat().st_size/1e6
        n = sum(p.numel() for p in model.parameters())
        rows.append(dict(what=what, weights=n, MB=round(MB, 1), cosine=round(float((v*target).sum(1).mean()), 3)))
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(Path(__file__).parent/'results/heal_smallest.csv', index=False)
    row('dense', dense, tokens)
    row('int8', dense, tokens, int8=True)
    model = copy.deepcopy(dense)
    fewer = prune_tokens(model, tokens, texts)
    row('tokens of these sentences', model, fewer)
    data = own(texts[300:], fewer)
    prune_channels(model, .25, data[0], heal=data)
    small,_ = shrink(model, data[0])
    row('and a quarter of neurons and heads, solved', small, fewer)
    row('and int8', small, fewer, int8=True)

if __name__=='__main__': main()
