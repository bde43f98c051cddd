"Some forty hostile files, and a function that opens all of them in one process with two gigabytes of memory beyond what it has; prints for each what came of it"
import copy,io,json,os,pickle,signal,torch,warnings,zipfile
from adversary import agree
from fastsparse.all import *
from fastsparse.save.files import seal
from fastsparse.save.load import read_file,write_sealed
from pathlib import Path
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,4))

def parts():
    sparsify_model(m := net(), .8, seed=0)
    opt = torch.optim.Adam(m.parameters(), .01)
    return m,opt,DynamicSparseTraining(m, opt, n_steps=20, method='rigl', batches_per_update=3, seed=0)

class Touch:
    def __reduce__(self): return os.system,('touch touched',)

def index(text):
    "A folder with an index of this text"
    def make(name):
        os.mkdir(name)
        (Path(name)/'model.safetensors.index.json').write_text(text)
    return make

def saved(make): return lambda name: torch.save(make(), name)
def few(*shape, dtype=torch.float): return torch.zeros(1, dtype=dtype).expand(*shape)

def compressed(name):
    "An archive of torch with megabytes of zeros in a few kilobytes"
    torch.save({'0.weight':torch.zeros(2**22)}, buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(name, 'w', zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist(): new.writestr(info.filename, old.read(info))

def run_with(change):
    "A file of a run, changed and sealed again"
    def make(name):
        save_run(name, *parts(), grads=True)
        run = torch.load(name)
        change(run)
        torch.save(run, name)
        seal(name, b'sparrun')
    return make

def sparse_file(shape, n_bits):
    bits = torch.zeros(n_bits, dtype=torch.uint8)
    return lambda name: write_sealed({'0.weight':torch.zeros(0), '0.weight:mask':bits}, name, {'0.weight':'x'.join(map(str, shape))})

def cyclic():
    d = {'0.weight':torch.zeros(32,16)}
    d['more'] = d
    return d

def laughs():
    d = {'0.weight':torch.zeros(32,16)}
    for _ in range(60): d = dict(a=d, b=d)
    return d

def deep():
    d = {}
    for _ in range(400): d = dict(a=d)
    return dict(a=d)

def put(*keys, value):
    def change(run):
        for k in keys[:-1]: run = run[k]
        run[keys[-1]] = value
    return change

def header(n): return lambda name: Path(name).write_bytes(n.to_bytes(8, 'little')+b'{"a"')

weights = {
    'up':index('{"weight_map":{"a":"../good.safetensors"}}'), 'absolute':lambda name: index(json.dumps(dict(weight_map=dict(a=os.path.abspath('good.safetensors')))))(name),
    'number':index('{"weight_map":{"a":5}}'), 'itself':index('{"weight_map":{"a":"."}}'), 'list':index('[1]'), 'nested':index('['*100_000), 'none':index('{'), 'nul':index('{"weight_map":{"a":"\\u0000"}}'),
    'absent':index('{"weight_map":{"a":"b.safetensors"}}'),
    'stride.pt':saved(lambda: {'0.weight':few(20_000, 25_000)}), 'mask.pt':saved(lambda: {'0.weight_mask':few(100_000, 100_000, dtype=torch.bool)}),
    'other.pt':saved(lambda: {'0.weight':torch.ones(32,16), 'x':few(10**6, 10**6)}), 'bits.pt':saved(lambda: {'0.weight':torch.ones(32,16), '0.weight_mask':few(10**10, dtype=torch.uint8)}),
    'coo.pt':saved(lambda: {'0.weight':torch.sparse_coo_tensor(torch.zeros(2,1).long(), torch.ones(1), (10**6,10**6))}),
    'meta.pt':saved(lambda: {'0.weight':torch.empty(10**6, 10**6, device='meta')}), 'cyclic.pt':saved(cyclic), 'laughs.pt':saved(laughs), 'deep.pt':saved(deep),
    'dots.pt':saved(lambda: {'a.'*100_000+'weight':torch.ones(2)}), 'keys.pt':saved(lambda: {None:1, 3:torch.ones(2), ('a',):torch.ones(3)}),
    'code.pt':saved(lambda: dict(a=Touch())), 'code.pkl':lambda name: Path(name).write_bytes(pickle.dumps(Touch())), 'zip.pt':compressed,
    'shape.safetensors':sparse_file((10**6, 10**6), 8), 'wide.safetensors':sparse_file((2**16, 2**13), 2**26), 'header.safetensors':header(2**62), 'header2.safetensors':header(2**33),
    'noshape.safetensors':lambda name: write_sealed({'0.weight':torch.zeros(1), '0.weight:mask':torch.zeros(64, dtype=torch.uint8)}, name, {'0.weight':'-1x-512'}),
    'empty.pt':lambda name: Path(name).write_bytes(b''), 'cut.pt':lambda name: Path(name).write_bytes(Path('good.pt').read_bytes()[:300])}

state = 'model','0.weight'
runs = {
    'before.pt':run_with(put('engine', 't', value=-1)), 'never.pt':run_with(put('engine', 't', value=2**70)), 'last.pt':run_with(put('engine', 'last_t', value=2**70)),
    'seen.pt':run_with(put('engine', 'seen', value=[1])), 'others.pt':run_with(put('engine', 'others', value=7)), 'slot.pt':run_with(put('engine', 'slots', 0, 'live', value=2**40)),
    'stride.pt':run_with(put(*state, value=few(10**6, 10**6))), 'shape.pt':run_with(put(*state, value=dict(live=torch.ones(1), fill=torch.zeros(1), shape=[10**6, 10**6]))),
    'bits.pt':run_with(put('model', '0.weight_mask', value=dict(bits=few(10**10, dtype=torch.uint8), shape=[10**6, 8*10**4]))), 'pos.pt':run_with(put('random', 'numpy', 'state', 'pos', value=10**9)),
    'numpy.pt':run_with(put('random', 'numpy', 'bit_generator', value='os')), 'torch.pt':run_with(put('random', 'torch', value=torch.ones(3, dtype=torch.uint8))),
    'product.pt':run_with(put('grads', value={'0.weight':dict(grad=torch.zeros(102), terms=[(torch.ones(10**6,1), torch.ones(10**6,1))], live_grad=torch.zeros(102))})),
    'moment.pt':run_with(put('opt', value=dict(state=dict(state={0:dict(exp_avg=few(10**6, 10**6))}, param_groups=[]), names=['0.weight'])))}

def opened(read):
    "What came of a file: the error, or that it was read; a second at most"
    signal.alarm(20)
    try: read()
    except ValueError as e: return f'refused {str(e)[:300]}'
    except BaseException as e: return f'{type(e).__name__} {str(e)[:200]}'
    finally: signal.alarm(0)
    return 'read'

def late(*args): raise TimeoutError('twenty seconds are over')

def open_all(folder):
    "A line for each file, of its name and what two readers made of it"
    import resource
    warnings.simplefilter('ignore')
    os.chdir(folder)
    signal.signal(signal.SIGALRM, late)
    sparsify_model(good := net(), .8, seed=0)
    save_sparse(good, 'good.safetensors')
    torch.save(good.state_dict(), 'good.pt')
    for name,make in weights.items(): make(name)
    os.mkdir('runs')
    for name,make in runs.items(): make(f'runs/{name}')
    mine,used = parts(),int(Path('/proc/self/statm').read_text().split()[0])*os.sysconf('SC_PAGE_SIZE')
    before = copy.deepcopy([mine[0].state_dict(), mine[2].state_dict()])
    resource.setrlimit(resource.RLIMIT_AS, (used+2**31,)*2)
    for name in weights: yield name,opened(lambda: load_sparse(net(), name)),opened(lambda: read_file(name))
    for name in runs: yield name,opened(lambda: load_run(f'runs/{name}', *mine)),''
    yield 'code',os.path.exists('touched'),''
    yield 'as it was',agree(before, [mine[0].state_dict(), mine[2].state_dict()]),''
    yield 'good',opened(lambda: load_sparse(net(), 'good.safetensors')),opened(lambda: read_file('good.pt'))
