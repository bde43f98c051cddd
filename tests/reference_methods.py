"The methods of room 06 in float64 NumPy, one update each, from the papers' rules as the notebook gives them, on the small pieces of `reference`"
import math, numpy as np
from functools import cache
from reference import best, gradients

class Run:
    "A two-layer perceptron, SGD with momentum, and `rule(run, gradients)`, which returns new masks where an update is due, or None"
    def __init__(self, rule, ws, masks, x, y, n_steps, replace=True, forget=False, lr=.05, mom=.9):
        self.rule,self.ws,self.masks,self.bufs = rule,[w*m for w,m in zip(ws, masks)],[m.copy() for m in masks],None
        self.x,self.y,self.n,self.replace,self.forget,self.lr,self.mom,self.t,self.n_updates = x,y,n_steps,replace,forget,lr,mom,0,0

    def step(self):
        gs = gradients(self.ws, self.x, self.y)
        new = self.rule(self, gs)
        if new is not None: self.put(new)
        self.t += 1
        if new is not None and self.replace: return
        gs = [g*m for g,m in zip(gs, self.masks)]
        self.bufs = gs if self.bufs is None else [self.mom*b+g for b,g in zip(self.bufs, gs)]
        self.ws = [w-self.lr*b for w,b in zip(self.ws, self.bufs)]

    def put(self, new):
        "New weights start at zero with zero momentum; who lived on keeps both, unless the method forgets"
        if self.bufs is not None: self.bufs = [b*(m & old)*(not self.forget) for b,m,old in zip(self.bufs, new, self.masks)]
        self.ws,self.masks,self.n_updates = [w*m for w,m in zip(self.ws, new)],new,self.n_updates+1

def live(run): return [int(m.sum()) for m in run.masks]
def due(t, every, n, stop=1.): return t>0 and t%every==0 and t<min(stop*n, n-1)
def cosine(t, end, alpha): return alpha/2*(1+math.cos(math.pi*t/end)) if t<end else 0.
def cubic(t, end, a, b): return b+(a-b)*(1-min(t/end, 1))**3

def uniform_counts(s, masks):
    "Law 1: `round((1-s)*N)` in all, by largest remainder"
    wanted = [(1-s)*m.size for m in masks]
    counts = [math.floor(o) for o in wanted]
    for i in sorted(range(len(masks)), key=lambda i: (counts[i]-wanted[i], i))[:round(sum(wanted))-sum(counts)]: counts[i] += 1
    return counts

def global_counts(s, ws, masks, floor=1):
    "One live weight after the other, the largest of the model first, into its layer, as long as the rest pays for `floor` an output elsewhere; what is dead comes last"
    every = np.concatenate([np.where(m, abs(w), -1).ravel() for w,m in zip(ws, masks)])
    layer = np.repeat(range(len(ws)), [w.size for w in ws])
    floors = [min(floor*len(w), m.sum()) for w,m in zip(ws, masks)]
    n,counts = round((1-s)*len(every)),[0]*len(ws)
    if sum(floors)>=n: raise ValueError('the floors cost more than there is')
    for i in layer[np.argsort(-every, kind='stable')]:
        owed = sum(max(f-c, 0) for f,c in zip(floors, counts))
        if sum(counts)+owed<n or counts[i]<floors[i]: counts[i] += 1
    return counts

def drop_and_grow(run, n_keep, targets, keep=None, grow=lambda i: None):
    "The `n_keep` highest of the live stay (by magnitude), and the highest of all that did not stay come; None if nothing is to move"
    if n_keep==live(run)==targets: return None
    keep = [abs(w) for w in run.ws] if keep is None else keep
    scores = [grow(i) if n>min(k, m.sum()) else None for i,(k,n,m) in enumerate(zip(n_keep, targets, run.masks))]
    for i,(score,m,n) in enumerate(zip(scores, run.masks, targets)):
        if score is None: continue
        least = m.sum()-((score>0) & ~m).sum()
        if least<=n_keep[i]: continue
        n_keep[i] = min(least, n)  # no more is dropped than can grow
        scores[i] = grow(i)
    stay = [best(k, min(n, m.sum()), m) for k,n,m in zip(keep, n_keep, run.masks)]
    return [s | best(score, n-s.sum(), ~s) if n>s.sum() else s for s,score,n in zip(stay, scores, targets)]

def rigl(every, alpha, stop, draw=None):
    "RigL's rule, and by its numbers ITOP's; SET's with random numbers to grow by"
    def rule(run, gs):
        if not due(run.t, every, run.n, stop): return None
        return drop_and_grow(run, [n-int(cosine(run.t, stop*run.n, alpha)*n) for n in live(run)], live(run),
            grow=lambda i: abs(gs[i]) if draw is None else draw(i, run.n_updates+1))
    return rule

def gse(every, alpha, stop, draws, times=1., of='live'):
    "RigL's rule, but what grows is chosen among dead weights that were drawn, `times` as many as live ones (or as those that grow); too few are drawn again, twice as many"
    def rule(run, gs):
        if not due(run.t, every, run.n, stop): return None
        n_keep = [n-int(cosine(run.t, stop*run.n, alpha)*n) for n in live(run)]
        @cache
        def grow(i):
            stays,n = best(abs(run.ws[i]), n_keep[i], run.masks[i]).ravel(),run.masks[i].sum()
            dead = stays.size-stays.sum()
            n_draws = math.ceil(min(max(times*(n if of=='live' else n-n_keep[i]), n-n_keep[i]), dead)*stays.size/dead)
            throw = draws(i, run.n_updates+1)
            while True:
                drawn = set(range(stays.size)) if n_draws>=stays.size else set(throw(stays.size, n_draws))
                found = [j for j in drawn if not stays[j]]
                if len(found)>=n-n_keep[i]: break
                n_draws *= 2
            score = np.full(stays.size, -1.)
            score[found] = abs(gs[i]).ravel()[found]
            return score.reshape(gs[i].shape)
        return drop_and_grow(run, n_keep, live(run), grow=grow)
    return rule

def on_the_way(run, every, stop): return due(run.t, every, run.n) or run.t==math.ceil(stop*run.n)<run.n-1

def gmp(every, final, stop=.75):
    "The largest weights of each layer stay; the sparsity rises along a cubic from 0"
    def rule(run, gs):
        if not on_the_way(run, every, stop): return None
        counts = uniform_counts(cubic(run.t, stop*run.n, 0., final), run.masks)
        return drop_and_grow(run, counts, counts)
    return rule

def granet(every, final, init=.5, alpha=.5, stop=.75):
    "Prune globally to the cubic, then drop a part of what is left of each layer by magnitude, and grow as many by gradient"
    def rule(run, gs):
        if not on_the_way(run, every, stop): return None
        counts = global_counts(cubic(run.t, stop*run.n, init, final), run.ws, run.masks, floor=0)
        n_keep = [n-int(cosine(run.t, stop*run.n, alpha)*n) for n in counts]
        return drop_and_grow(run, n_keep, counts, grow=lambda i: abs(gs[i]))
    return rule

def mest(lam, draw, lower, upper):
    "The authors' `update_mask`: every 5 of 160 epochs prune to a lower bound and grow to an upper one, of all weights; the next pair from epochs 90 and 120 on"
    def rule(run, gs):
        epoch = 160*run.t/run.n
        if run.t==0 or epoch%5: return None
        stage = (epoch>=90)+(epoch>=120)
        n_keep,targets = [[round((1-bounds[stage])*m.size) for m in run.masks] for bounds in (lower, upper)]
        return drop_and_grow(run, n_keep, targets, [abs(w)+lam*abs(g) for w,g in zip(run.ws, gs)], lambda i: draw(i, run.n_updates+1))
    return rule

def ablate(w, g, mask, n_drop, n, gamma):
    "SRigL: salient are the largest live weights but `n_drop`, and as many new ones by gradient; who has too few loses all, the others share `n`"
    on = mask.any(1)
    stay = best(abs(w), mask.sum()-n_drop, mask)
    salient = stay | best(abs(g), n-stay.sum(), ~stay & on[:,None])
    fan = lambda rows: min(range(1, mask.shape[1]+1), key=lambda k: (abs(k*rows.sum()-n), k))
    on = on & (salient.sum(1)>=max(1, gamma*fan(on)-1e-9))
    if not on.any(): on[salient.sum(1).argmax()] = True
    new = np.zeros_like(mask)
    for i in np.flatnonzero(on):
        kept = best(abs(w[i]), min(stay[i].sum(), fan(on)), stay[i])
        new[i] = kept | best(abs(g[i]), fan(on)-kept.sum(), ~kept)
    return new

def srigl(every, gamma, budget, alpha=.3, stop=.75):
    "RigL's times and numbers; `budget` is what each layer had, and what active neurons share"
    def rule(run, gs):
        n_drop = [int(cosine(run.t, stop*run.n, alpha)*n) for n in live(run)]
        if not due(run.t, every, run.n, stop) or not any(n_drop): return None
        return [ablate(w, g, m, d, n, gamma) if d else m for w,g,m,d,n in zip(run.ws, gs, run.masks, n_drop, budget)]
    return rule

def each_output(w, n, mask):
    "Magnitudes, where the largest of each row goes before all others if `n` is enough for all rows"
    score = np.where(mask, abs(w), 0)
    if len(w)<=n<w.size: score[range(len(w)),score.argmax(1)] = np.inf
    return score

def in_waves(turns, counts, keep=lambda w, n, mask: abs(w)):
    "AC/DC and DSD: at the steps of `turns` dense, or as sparse as they say by magnitude"
    def rule(run, gs):
        if run.t not in turns: return None
        n = counts(turns[run.t], run.ws, run.masks) if turns[run.t] else [m.size for m in run.masks]
        return drop_and_grow(run, n, n, [keep(w, k, m) for w,k,m in zip(run.ws, n, run.masks)], lambda i: np.zeros(run.ws[i].shape))
    return rule

def ticket(train, ws, final, rate, sparsity=0., masks=None):
    "Train, prune `rate` of what lives in the whole model by magnitude, put the rest back to `ws`, and again until `final`"
    masks = [np.ones(w.shape, bool) for w in ws] if masks is None else masks
    while sparsity<final:
        sparsity = min(1-(1-sparsity)*(1-rate), final)
        trained = train([w*m for w,m in zip(ws, masks)], masks)
        masks = [best(each_output(w, n, m), n, m) for w,n,m in zip(trained, global_counts(sparsity, trained, masks), masks)]
    return [w*m for w,m in zip(ws, masks)],masks
