"Prune a Llama of 2 GB from its folder, block by block: seconds, and memory above that of the interpreter"
import argparse,json,resource,subprocess,sys,time
from pathlib import Path

def generate(folder, layers=48, hidden=1024, inner=2816):
    "Write a Llama with random weights, one block at a time"
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig,LlamaForCausalLM
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(vocab_size=4096, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16,
        architectures=['LlamaForCausalLM'], dtype='float32')
    config.save_pretrained(folder)
    with torch.device('meta'): shapes = {n:p.shape for n,p in LlamaForCausalLM(config).named_parameters()}
    parts,where,size = {},{},0
    for n in shapes: parts.setdefault(n.split('.')[2] if '.layers.' in n else 'rest', []).append(n)
    for i,(o,names) in enumerate(parts.items()):
        g = torch.Generator().manual_seed(i)
        tensors = {n: torch.ones(shapes[n]) if len(shapes[n])==1 else torch.randn(shapes[n], generator=g)*shapes[n][-1]**-.5 for n in names}
        save_file(tensors, folder/f'model-{o}.safetensors', dict(format='pt'))
        where |= dict.fromkeys(names, f'model-{o}.safetensors')
        size += sum(t.numel()*4 for t in tensors.values())
    (folder/'model.safetensors.index.json').write_text(json.dumps(dict(metadata=dict(total_size=size), weight_map=where)))
    return size

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024

def prune(folder, to, method, n, tokens):
    "Print seconds and bytes of the peak above that before the call"
    import importlib,torch
    importlib.import_module("transformers")  # counts as interpreter
    from fastsparse import all as fs
    data = [dict(input_ids=torch.randint(4096, (4,tokens), generator=torch.Generator().manual_seed(i))) for i in range(n)]
    before,start = peak(),time.perf_counter()
    getattr(fs, f'prune_{method}')(folder, .5, data, to=to, progress=False)
    print(json.dumps(dict(seconds=time.perf_counter()-start, above=peak()-before, before=before)))

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('folder', type=Path, help='an empty folder, or one that a run has left')
    p.add_argument('--methods', nargs='+', default=['wanda','sparsegpt'], help='some of wanda, sparsegpt and refit')
    p.add_argument('--batches', type=int, default=4, help='of 4 sequences each')
    p.add_argument('--tokens', type=int, default=128, help='of a sequence')
    p.add_argument('--layers', type=int, default=48, help='of the model: memory does not depend on it, size and seconds do')
    p.add_argument('--one', nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one: return prune(args.folder/'dense', *args.one[:1], args.one[1], args.batches, args.tokens)
    if not (args.folder/'dense'/'model.safetensors.index.json').is_file(): generate(args.folder/'dense', args.layers)
    size = sum(f.stat().st_size for f in (args.folder/'dense').glob('*.safetensors'))
    print(f'model {size/1e9:.2f} GB, {args.batches*4*args.tokens} tokens')
    for m in args.methods:
        cmd = [sys.executable, __file__, args.folder, '--one', args.folder/f'{m}', m, '--batches', args.batches, '--tokens', args.tokens]
        got = json.loads(subprocess.run(list(map(str, cmd)), check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"{m}: {got['seconds']:.0f} s, peak {got['above']/1e9:.2f} GB above the {got['before']/1e9:.2f} GB of the imports")

if __name__=='__main__': main()
