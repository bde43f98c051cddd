"Networks of 10 million to a billion weights that are born sparse, on one core: memory, seconds and loss; `python benchmarks/run.py --only billion`"
import statistics,time,torch
from fastsparse import DynamicSparseTraining,sparsify_model
from measure import give_back,peak_over_resident
from torch import nn

depth,rows,sparsity = 16,64,.99
widths = 800,1448,2560,4608,8192

def batches(width):
    "Noisy samples of 64 classes"
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(64, width, generator=g)
    while True:
        y = torch.randint(64, (rows,), generator=g)
        yield centres[y]+torch.randn(rows, width, generator=g),y

class Block(nn.Module):
    "A square layer with a residual connection"
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x): return x+self.layer(x).relu()*depth**-.5

def backward(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()

def train(width, steps, every):
    "CPU seconds to make the model, of a step and of one with an update, and the losses"
    start = time.process_time()
    with torch.device('meta'): model = nn.Sequential(*[Block(width) for _ in range(depth)])
    sparsify_model(model, sparsity, 'erk', seed=0)
    made = time.process_time()-start
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    dst = DynamicSparseTraining(model, opt, 1000, method='rigl', batches_per_update=every, seed=0)
    losses,times = [],{True:[], False:[]}
    for _,(x,y) in zip(range(steps), batches(width)):
        start,n = time.process_time(),dst.n_updates
        losses.append(backward(model, x, y))
        opt.step()
        opt.zero_grad()
        times[dst.n_updates>n].append(time.process_time()-start)
    return dict(make=made, update=statistics.median(times[True]), step=statistics.median(times[False]), losses=losses)

def memory(width):
    "Bytes at the highest point of a process above those before, with its libraries loaded"
    give_back()
    train(64, 3, 2)
    return peak_over_resident(lambda: train(width, 6, 3))

def speed(width):
    train(64, 3, 2)
    return train(width, 42, 20)

if __name__=='__main__':
    import run,sys
    sys.argv[1:] = ['--only','billion',*sys.argv[1:]]
    run.main()
