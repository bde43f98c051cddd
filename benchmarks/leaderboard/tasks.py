"Nine tasks on real data that need no network: data, a network of some width, a loss and a score"
import math,numpy as np,torch
from fastai.basics import *
from fastai.tabular.model import TabularModel
from functools import cached_property,partial

class StepLoader(DataLoader):
    "Epochs of `n_steps` batches of `tensors`; the seed names the order of samples"
    def __init__(self, tensors, n_steps, bs=32, seed=0):
        super().__init__(tensors[0], bs=bs, n=n_steps*bs, num_workers=0)
        store_attr('tensors,n_steps,seed')
        self.at,self.per = 0,max(len(tensors[0])//bs, 1)

    def order(self, i): return torch.randperm(len(self.tensors[0]), generator=torch.Generator().manual_seed(100_003*self.seed+i))

    def __iter__(self):
        for _ in range(self.n_steps):
            idx = self.order(self.at//self.per)[self.at%self.per*self.bs:][:self.bs]
            yield tuple(t[idx] for t in self.tensors)
            self.at += 1

def split_data(xs, y, itself=False):
    "Inputs, standardised by the training data, and targets, of training, validation and test data"
    n,idx = len(y),torch.randperm(len(y), generator=torch.Generator().manual_seed(42))
    parts = idx.split([int(.6*n), int(.2*n), n-int(.6*n)-int(.2*n)])
    def _standard(x):
        if not (x.is_floating_point() and x.numel()): return x
        return (x-x[parts[0]].mean(0))/(x[parts[0]].std(0)+1e-3)
    xs = [_standard(x) for x in xs]
    return [(tuple(x[i] for x in xs), (xs[-1] if itself else y)[i]) for i in parts]

class Task:
    "Data, a network of some width, a loss and a score"
    def __init__(self,
        data, # () → a tuple of inputs, and targets
        make, # Width → network
        loss=F.cross_entropy, # f(outputs, targets) → a number
        width:int=128, # Of the dense network
        steps:int=300, # In which a static mask is trained
        bs:int=32, # Batch size
        unit:str='accuracy', # What the score is
        step:int=1, # Widths are multiples of it
    ): store_attr()

    @cached_property
    def parts(self): return split_data(*self.data(), itself=self.unit=='R² of itself')

    def loader(self, model, n_steps, seed):
        xs,y = self.parts[0]
        return StepLoader((*xs,y), n_steps, min(self.bs, len(y)), seed)

    def score(self,
        model:nn.Module, # Its mode comes back
        part:int, # 0 is training data, 1 validation, 2 test
    ) -> float: # More is better
        "How good is `model`?"
        (xs,y),was = self.parts[part],model.training
        with torch.no_grad(): out = model.eval()(*xs)
        model.train(was)
        if self.unit=='accuracy': return (out.argmax(-1)==y).float().mean().item()
        if self.unit=='nats': return -self.loss(out, y).item()
        return 1-((out-y)**2).sum().item()/((y-self.parts[0][1].mean(0))**2).sum().item()

def sklearn_data(name, shape=None, table=False):
    from sklearn import datasets
    data = getattr(datasets, f'load_{name}')()
    x,y = tensor(data.data).float(),tensor(data.target)
    x = x if shape is None else x.view(-1, *shape)
    y = y.long() if name!='diabetes' else ((y-y.mean())/y.std()).float()[:,None]
    return ((torch.zeros(len(x), 0).long(), x) if table else (x,)),y

def text_data():
    import argparse,ast,inspect,textwrap
    text = ''.join(inspect.getsource(o) for o in (textwrap,ast,argparse))
    x = tensor([min(ord(c), 127) for c in text][:32*3000]).view(-1, 32)
    return (x,),x

def mlp(n_in, n_out): return lambda w: nn.Sequential(nn.Linear(n_in,w), nn.ReLU(), nn.Linear(w,w), nn.ReLU(), nn.Linear(w,n_out))
def autoencoder(w): return nn.Sequential(nn.Linear(64,w), nn.ReLU(), nn.Linear(w,16), nn.ReLU(), nn.Linear(16,w), nn.ReLU(), nn.Linear(w,64))
def tabular(n_in, n_out): return lambda w: TabularModel([], n_in, n_out, [w,w])

def conv_net(w):
    convs = [nn.Conv2d(1,w,3,padding=1), nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w,2*w,3,2,padding=1), nn.BatchNorm2d(2*w), nn.ReLU()]
    return nn.Sequential(*convs, nn.Conv2d(2*w,2*w,3,2,padding=1), nn.BatchNorm2d(2*w), nn.ReLU(), nn.Flatten(), nn.Linear(8*w,10))

class NextChar(nn.Module):
    "Predict each character from those before it"
    def __init__(self, w, recurrent):
        super().__init__()
        self.emb,self.pos,self.out = nn.Embedding(128, w),nn.Parameter(torch.randn(32, w)*.02),nn.Linear(w, 128)
        if recurrent: self.body = nn.LSTM(w, w, batch_first=True)
        else: self.body = nn.TransformerEncoderLayer(w, 4, 2*w, 0., batch_first=True, norm_first=True)
        self.recurrent = recurrent

    def forward(self, x):
        h = self.emb(torch.cat([torch.zeros_like(x[:,:1]), x[:,:-1]], 1))+self.pos
        if self.recurrent: return self.out(self.body(h)[0])
        return self.out(self.body(h, src_mask=torch.triu(torch.full((32,32), -math.inf), 1)))

def char_loss(out, y): return F.cross_entropy(out.flatten(0,1), y.flatten())

def cartpoles(n, seed):
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
    "The clipped loss; `y` has columns of action, its logarithm of probability, advantage and return"
    action,old,adv,ret = y.unbind(1)
    logp = out[:,:2].log_softmax(1)
    ratio = (logp.gather(1, action.long()[:,None])[:,0]-old).exp()
    gain = torch.min(ratio*adv, ratio.clamp(.8, 1.2)*adv).mean()
    return -gain+.5*F.mse_loss(out[:,2], ret)-.01*-(logp.exp()*logp).sum(1).mean()

class PlayLoader(DataLoader):
    "Each epoch the `model` plays, and its moves are the batches, twice"
    def __init__(self, model, n_steps, bs, seed, n_games=32):
        super().__init__(range(n_steps*bs), bs=bs, num_workers=0)
        store_attr('model,n_steps,seed,n_games')
        (self.env,self.obs),self.g = cartpoles(n_games, seed),torch.Generator().manual_seed(seed)
        self.fresh = np.zeros(n_games, bool)

    def __iter__(self):
        most = math.ceil(self.n_steps/2)
        with torch.no_grad(): x,y = self.play(math.ceil(1.2*most*self.bs/self.n_games))
        for n in (most, self.n_steps-most):
            idx = torch.randperm(len(x), generator=self.g)
            for i in range(n): yield x[idx[i*self.bs:][:self.bs]],y[idx[i*self.bs:][:self.bs]]

    def moves(self, n):
        "Observation, action, its logarithm of probability, value, reward and end of `n` steps, and whether they were played"
        for _ in range(n):
            obs,used = tensor(self.obs),tensor(~self.fresh)
            out = self.model(obs)
            action = torch.multinomial(out[:,:2].softmax(1), 1, generator=self.g)
            self.obs,reward,ended,cut,_ = self.env.step(action[:,0].numpy())
            self.fresh = ended|cut
            logp = out[:,:2].log_softmax(1).gather(1, action)[:,0]
            yield obs,action[:,0].float(),logp,out[:,2],tensor(reward).float()/10,tensor(self.fresh).float(),used

    def play(self, n):
        "Rows of observation and target, without the steps in which a game was set up anew"
        was = self.model.training
        self.model.eval()
        obs,action,logp,value,reward,ends,used = map(torch.stack, zip(*self.moves(n)))
        last = self.model(tensor(self.obs))[:,2]
        self.model.train(was)
        adv = advantages(reward, torch.cat([value, last[None]]), ends)
        target = torch.stack([action, logp, (adv-adv[used].mean())/(adv[used].std()+1e-6), adv+value], -1)
        return obs[used],target[used]

class CartPole(Task):
    "CartPole; the score is the part of 500 steps for which the pole stands"
    def __init__(self, **kwargs): super().__init__(None, mlp(4, 3), ppo_loss, unit='part of the longest game', **kwargs)
    @cached_property
    def parts(self):
        x = torch.randn(self.bs, 4, generator=torch.Generator().manual_seed(0))
        return [((x,), torch.zeros(self.bs, 4))]*3

    def loader(self, model, n_steps, seed): return PlayLoader(model, n_steps, self.bs, seed)

    def score(self, model, part, n=24):
        (env,obs),alive,total,was = cartpoles(n, 10_000*part),np.ones(n, bool),0,model.training
        model.eval()
        while alive.any():
            with torch.no_grad(): action = model(tensor(obs))[:,:2].argmax(1)
            obs,_,ended,cut,_ = env.step(action.numpy())
            total += alive.sum()
            alive &= ~(ended|cut)
        model.train(was)
        return float(total)/500/n

digits,tables = partial(sklearn_data, 'digits'),partial(sklearn_data, table=True)
tasks = dict(digits_mlp=Task(digits, mlp(64,10), width=256), digits_conv=Task(partial(digits, (1,8,8)), conv_net, width=24))
tasks['cancer'] = Task(partial(tables, 'breast_cancer'), tabular(30,2))
tasks['wine'] = Task(partial(tables, 'wine'), tabular(13,3), steps=200)
tasks['diabetes'] = Task(partial(tables, 'diabetes'), tabular(10,1), F.mse_loss, unit='R²')
tasks['autoencoder'] = Task(digits, autoencoder, F.mse_loss, width=256, unit='R² of itself')
tasks['text_transformer'] = Task(text_data, partial(NextChar, recurrent=False), char_loss, width=64, bs=16, unit='nats', step=4)
tasks['text_lstm'] = Task(text_data, partial(NextChar, recurrent=True), char_loss, width=64, bs=16, unit='nats')
tasks['cartpole'] = CartPole(width=128, bs=128, steps=640)
