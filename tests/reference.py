"SET, RigL and SNFS in float64 NumPy, from the papers and DESIGN.md's laws, with SGD with momentum and a two-layer perceptron of their own"
import math, numpy as np

def gradients(ws, x, y):
    "Gradients of the mean squared error of `tanh(x W0') W1'`"
    h = np.tanh(x@ws[0].T)
    d = 2*(h@ws[1].T-y)/y.size
    return [((d@ws[1])*(1-h*h)).T@x, d.T@h]

def best(score, k, places):
    "The `k` of `places` with the highest score, ties to the lowest index"
    order = sorted(np.flatnonzero(places), key=lambda i: (-score.flat[i], i))
    out = np.zeros(score.size, bool)
    out[order[:k]] = True
    return out.reshape(score.shape)

def shared_out(shares, total, room):
    "`total` in proportion to `shares`, capped by `room`: fill who would overflow, share the rest again; largest remainder makes integers"
    wanted,open_ = np.zeros(len(room)),set(range(len(room)))
    while True:
        left = total-sum(wanted[i] for i in range(len(room)) if i not in open_)
        for i in open_: wanted[i] = left*shares[i]/sum(shares[j] for j in open_)
        over = {i for i in open_ if wanted[i]>room[i]}
        if not over: break
        for i in over: wanted[i] = room[i]
        open_ -= over
    whole = np.floor(wanted+1e-12).astype(int)
    for i in sorted(range(len(room)), key=lambda i: (whole[i]-wanted[i], i))[:total-whole.sum()]: whole[i] += 1
    return whole

class Reference:
    "One run: `step()` is a step of SGD, or at an update the method's drop and grow in its place"
    def __init__(self, method, ws, masks, x, y, n_steps, every, alpha, stop, lr, mom, draw):
        self.ws,self.masks,self.bufs = [w*m for w,m in zip(ws, masks)],[m.copy() for m in masks],None
        self.method,self.x,self.y,self.n_steps,self.every,self.alpha,self.stop = method,x,y,n_steps,every,alpha,stop
        self.lr,self.mom,self.draw,self.t,self.n_updates = lr,mom,draw,0,0

    def step(self):
        gs = gradients(self.ws, self.x, self.y)
        t,end = self.t,self.stop*self.n_steps
        self.t += 1
        n_drop = [int(self.alpha/2*(1+math.cos(math.pi*t/end))*m.sum()) for m in self.masks]
        if t>0 and t%self.every==0 and t<end and t<self.n_steps-1 and any(n_drop): return self.update(gs, n_drop)
        if self.method!='SNFS': gs = [g*m for g,m in zip(gs, self.masks)]
        self.bufs = [g.copy() for g in gs] if self.bufs is None else [self.mom*b+g for b,g in zip(self.bufs, gs)]
        self.ws = [(w-self.lr*b)*m for w,b,m in zip(self.ws, self.bufs, self.masks)]

    def update(self, gs, n_drop):
        self.n_updates += 1
        kept = [best(np.abs(w), m.sum()-k, m) for w,m,k in zip(self.ws, self.masks, n_drop)]
        n_grow = n_drop
        if self.method=='SNFS':
            shares = [np.abs(b)[m].mean() for b,m in zip(self.bufs, self.masks)]
            n_grow = shared_out(shares, sum(n_drop), [k.size-k.sum() for k in kept])
        for i,(keep,n) in enumerate(zip(kept, n_grow)):
            score = dict(SET=lambda: self.draw(i, self.n_updates), RigL=lambda: np.abs(gs[i]), SNFS=lambda: np.abs(self.bufs[i]))[self.method]()
            new = keep | best(score, n, ~keep)
            self.ws[i] = self.ws[i]*new
            self.bufs[i] = np.where(new & ~self.masks[i], 0, self.bufs[i]) if self.method=='SNFS' else self.bufs[i]*(new & self.masks[i])
            self.masks[i] = new
