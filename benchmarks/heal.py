"""A small decoder without a part of its widths, heads, layers or experts, before and after tuning with the dense one as teacher; 2:4 and int8 beside it

    python benchmarks/heal.py    # a table in benchmarks/results, to which a later call adds what is missing; ten minutes on one core
"""
import argparse,copy,numpy as np,onnxruntime as ort,pandas as pd,tempfile,time,torch,torch.nn.functional as F,warnings
from fastai.basics import Callback,CrossEntropyLossFlat,DataLoaders,Learner
from fastai.callback.schedule import *
from fastsparse.all import *
from fastsparse.cut.experts import prune_experts
from fastsparse.cut.layers import prune_layers
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from pathlib import Path
from pydoc_data import topics
from torch import nn
from transformers import LlamaConfig,LlamaForCausalLM,MixtralConfig,MixtralForCausalLM
from transformers.utils import logging as tf_logging

n_ctx,bs = 64,32
text = ''.join(topics.topics[k] for k in sorted(topics.topics))
chars = sorted({*text})
ids = torch.tensor([chars.index(c) for c in text])

class Logits(nn.Module):
    "What a decoder predicts, as a tensor"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(input_ids=x, use_cache=False).logits

class Batches:
    "`n` batches at random from the first nine tenths of the text, or the last"
    def __init__(self, n, seed, train=True): self.n,self.seed,self.part = n,seed,ids[:len(ids)*9//10] if train else ids[len(ids)*9//10:]
    def __len__(self): return self.n
    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            at = torch.randint(len(self.part)-n_ctx-1, (bs,1), generator=g)+torch.arange(n_ctx+1)
            yield self.part[at[:,:-1]],self.part[at[:,1:]]

class Teacher(Callback):
    "Half of the loss is the distance from what a teacher predicts"
    def __init__(self, teacher): self.teacher = teacher
    def after_loss(self):
        if not self.training: return
        with torch.no_grad(): goal = self.teacher(*self.xb).log_softmax(-1)
        far = F.kl_div(self.pred.log_softmax(-1), goal, reduction='none', log_target=True).sum(-1).mean()
        self.learn.loss_grad = .5*self.loss_grad+.5*far

def fit(model, n, lr, seed, cbs=None):
    "Train a decoder for `n` steps"
    learn = Learner(DataLoaders(Batches(n, seed), Batches(1, 0, False)), Logits(model), CrossEntropyLossFlat(), cbs=cbs)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, lr)
    model.eval()

def decoder(kind):
    torch.manual_seed(0)
    small = dict(vocab_size=len(chars), hidden_size=64, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=n_ctx, bos_token_id=1,
        eos_token_id=2)
    if kind=='llama': return LlamaForCausalLM(LlamaConfig(**small, intermediate_size=192, num_hidden_layers=6))
    return MixtralForCausalLM(MixtralConfig(**small, intermediate_size=64, num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2,
        experts_implementation='eager'))

def loss_of(f):
    "Mean cross-entropy on text that no training has seen"
    with torch.no_grad(): return float(np.mean([F.cross_entropy(f(x).flatten(0, 1), y.flatten()).item() for x,y in Batches(30, 1, False)]))

def milliseconds(f, x, n=15):
    "Median of process time of one core"
    def once():
        t = time.process_time()
        with torch.no_grad(): f(x)
        return 1e3*(time.process_time()-t)
    for _ in range(3): f(x)
    return float(np.median([once() for _ in range(n)]))

def opened(file):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(file), options, providers=['CPUExecutionProvider'])
    return lambda x: torch.from_numpy(session.run(None, {session.get_inputs()[0].name:x.numpy()})[0])

def exported(model, file):
    with warnings.catch_warnings(action='ignore'):
        torch.onnx.export(Logits(copy.deepcopy(model)).eval(), (ids[:n_ctx][None].repeat(bs, 1),), file, dynamo=True, verbose=False, external_data=False)

def row(way, part, model, before, int8=False, sparse=False):
    "A row of the table"
    x,net = next(iter(Batches(1, 2, False)))[0],Logits(model)
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        f,ms = net,float('nan')
        if not isinstance(model, MixtralForCausalLM):
            exported(model, d/'m.onnx')
            f,file = opened(d/'m.onnx'),d/'m.onnx'
            if int8:
                quant_pre_process(d/'m.onnx', d/'p.onnx')
                quantize_dynamic(d/'p.onnx', d/'q.onnx')
                f,file = opened(d/'q.onnx'),d/'q.onnx'
            ms = milliseconds(f, x)
        if sparse: save_sparse(model, file := d/'s.safetensors')
        elif not int8:
            model.save_pretrained(d/'m')
            file = d/'m'/'model.safetensors'
        kB = file.stat().st_size/1e3
    n = sum(int(p.count_nonzero()) for p in model.parameters())
    ms_torch = float('nan') if int8 else milliseconds(net, x)
    return dict(way=way, part=part, weights=n, loss_cut=before, loss=loss_of(f if int8 else net), kB=round(kB), ms_onnx=ms, ms_torch=ms_torch)

def main(steps, heal):
    tf_logging.set_verbosity_error()
    tf_logging.disable_progress_bar()
    file,data = Path(__file__).parent/'results/heal.csv',[dict(input_ids=x) for x,_ in Batches(4, 5)]
    rows = pd.read_csv(file).to_dict('records') if file.is_file() else []
    def keep(**own):
        rows.append({k:round(v, 4) if isinstance(v, float) else v for k,v in own.items()})
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(file, index=False)
    for kind in ('llama','mixtral'):
        dense = decoder(kind)
        fit(dense, steps, 4e-3, 0)
        done = [(o['way'],o['part']) for o in rows]
        if (f'dense, {kind}',0.) not in done: keep(**row(f'dense, {kind}', 0., dense, loss_of(Logits(dense))))
        def channels(s, structure):
            m = copy.deepcopy(dense)
            prune_channels(m, s, data[0], structure=structure)
            return shrink(m, data[0])[0]
        def layers(s):
            prune_layers(m := copy.deepcopy(dense), round(s*6), data)
            return m
        def experts(s):
            prune_experts(m := copy.deepcopy(dense), s, data)
            return m
        def two_four(s):
            prune_refit(m := copy.deepcopy(dense), {'lm_head*':None, '*':'2:4'}, data)
            return m
        def whole(s): return copy.deepcopy(dense)
        def widths(s): return channels(s, 'channels')
        def heads(s): return channels(s, 'heads')
        ways = dict(llama=[*(('widths',widths,s) for s in (.1,.25,.5)), ('heads',heads,.5), *(('layers',layers,s) for s in (1/6,1/3,1/2)),
            ('2:4, refit',two_four,.5), ('int8',whole,0.)], mixtral=[('experts',experts,s) for s in (.125,.25,.5)])
        for way,cut,s in [(f'dense, {kind}, tuned',whole,0.), *ways[kind]]:
            if (way,round(s, 4)) in done: continue
            m = cut(s)
            before = loss_of(Logits(m))
            if way!='int8': fit(m, heal, 2e-3, 1, [Teacher(Logits(dense).eval())])
            keep(**row(way, s, m, before, int8=way=='int8', sparse=way.startswith('2:4')))

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--heal', type=int, default=50)
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))
