"""RigL on scikit-learn's digits, over several processes.

    torchrun --nproc_per_node 2 examples/train_distributed.py
    torchrun --nproc_per_node 4 examples/train_distributed.py --how fsdp2 --folder run --stop 60
    torchrun --nproc_per_node 2 examples/train_distributed.py --how fsdp2 --folder run    # goes on from step 60
    accelerate launch --multi_gpu --num_processes 2 examples/train_distributed.py         # on CPUs too
"""
import argparse,os,torch,torch.distributed as dist,torch.distributed.checkpoint as dcp,torch.nn.functional as F
from pathlib import Path
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict,set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from fastsparse.all import *

def digits():
    "Training and test data, the same on all ranks"
    x,y = map(torch.tensor, load_digits(return_X_y=True))
    x,order = x.float()/16,torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[i],y[i]) for i in (order[:1500],order[1500:])]

def prepared(how, device):
    "A sparse model, and what computes with it"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,256), nn.ReLU(), nn.Linear(256,10)).to(device)
    sparsify_model(model, .9, 'erk', seed=0)
    if how=='ddp': return model,DistributedDataParallel(model)
    for layer in model[::2]: fully_shard(layer)
    return model,fully_shard(model)

def save(folder, model, opt, dst):
    "Each rank writes what it has; the engine's state is small and plain"
    state,opt_state = get_state_dict(model, opt)
    dcp.save(dict(model=state, opt=opt_state), checkpoint_id=folder)
    engine = dst.state_dict()  # on all ranks: the checksums of masks are made together
    if dist.get_rank()==0: torch.save(engine, Path(folder)/'engine.pt')
    dist.barrier()

def load(folder, model, opt, dst):
    "Read it on any number of ranks"
    state,opt_state = get_state_dict(model, opt)
    dcp.load(dict(model=state, opt=opt_state), checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state, optim_state_dict=opt_state)
    dst.load_state_dict(torch.load(Path(folder)/'engine.pt', weights_only=True))  # last: filling an optimizer takes a step

def train(model, net, opt, dst, n_steps, batch_size, device):
    "Each rank takes its part of every batch"
    (x,y),rank,world = digits()[0],dist.get_rank(),dist.get_world_size()
    for t in range(dst.t, n_steps):
        i = torch.randint(len(x), (batch_size,), generator=torch.Generator().manual_seed(t))[rank::world]
        opt.zero_grad()
        F.cross_entropy(net(x[i].to(device)), y[i].to(device)).backward()
        opt.step()

def main(how='ddp', steps=120, batch_size=64, folder=None, stop=None):
    gpus = torch.cuda.is_available()
    dist.init_process_group('nccl' if gpus else 'gloo')
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpus else 'cpu')
    if gpus: torch.cuda.set_device(device)
    model,net = prepared(how, device)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    dst = DynamicSparseTraining(model, opt, steps, method='rigl', batches_per_update=10, seed=0)
    if folder and (Path(folder)/'engine.pt').exists(): load(folder, model, opt, dst)
    train(model, net, opt, dst, steps if stop is None else stop, batch_size, device)
    if folder: save(folder, model, opt, dst)
    x,y = digits()[1]
    with torch.no_grad(): right = (net(x.to(device)).argmax(1)==y.to(device)).float().mean().item()
    sums = [o['masked'] for o in dst.state_dict()['slots']]  # checksums of the masks
    if dist.get_rank()==0: print(f'{how} on {dist.get_world_size()} ranks, step {dst.t}: accuracy {right:.3f}, masks {sums}')
    dist.destroy_process_group()

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--how', choices=['ddp','fsdp2'], default='ddp')
    parser.add_argument('--steps', type=int, default=120, help='of the whole run')
    parser.add_argument('--batch_size', type=int, default=64, help='of all ranks together')
    parser.add_argument('--folder', help='a checkpoint: read if there is one, written at the end')
    parser.add_argument('--stop', type=int, help='the step to stop at')
    main(**vars(parser.parse_args()))
