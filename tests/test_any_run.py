"Random runs: what the front door takes keeps the laws, what it refuses is refused before anything changed, and a run that is stopped anywhere goes on bit for bit"
import copy,pytest,random,torch,warnings
from fastsparse.all import *
from fastsparse.save.run_file import plain
from functools import partial
from helpers import *
from torch import nn

class Attention(nn.Module):
    "A transformer's layer and a head"
    def __init__(self):
        super().__init__()
        self.layer,self.head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True),nn.Linear(8,4)
    def forward(self, x): return self.head(self.layer(x).mean(1))

class Recurrent(nn.Module):
    "A recurrent layer and a head"
    def __init__(self):
        super().__init__()
        self.cell,self.head = nn.LSTM(8,8, batch_first=True),nn.Linear(8,4)
    def forward(self, x): return self.head(self.cell(x)[0][:,-1])

def linear(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16,8), nn.Tanh(), nn.Linear(8,4, bias=False))
def conv(): return nn.Sequential(nn.Conv2d(2,8,3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8,8,3, groups=2), nn.Flatten(), nn.Linear(32,4))
models = dict(linear=(linear,(6,8)), conv=(conv,(4,2,4,4)), attention=(Attention,(4,3,8)), recurrent=(Recurrent,(4,3,8)))
opts = dict(SGD=dict(lr=.05), momentum=dict(lr=.05, momentum=.9, weight_decay=.01, nesterov=True), Adam=dict(lr=.01), foreach=dict(lr=.01, foreach=True),
    fused=dict(lr=.01, fused=True), AdamW=dict(lr=.01, amsgrad=True), RMSprop=dict(lr=.01, momentum=.9, centered=True), Adagrad=dict(lr=.05),
    NAdam=dict(lr=.01), RAdam=dict(lr=.01), Adadelta=dict(lr=.5), Adamax=dict(lr=.01), Rprop=dict(lr=.01), Adafactor=dict(lr=.01))
def optimizer(name, ps): return getattr(torch.optim, dict(momentum='SGD', foreach='AdamW', fused='AdamW').get(name, name))(ps, **opts[name])

methods = None,'static','set','rigl','snfs','itop','gse','gmp','granet','mest','srigl','acdc','dsd'
structures = None,None,None,'2:4','1:4','block 2x2','block 4x1','fan-in','kernels','output channels','input channels'

class Refused(Exception): "Before anything changed, with an error of the library"

def drawn(seed, **fixed):
    "A case: choices by name"
    rng = random.Random(seed)
    of = dict(model=models, opt=opts, method=methods, structure=structures, sparsity=(.3,.5,.5,.75,.9), sparse_f=('uniform','erk','er',None),
        mask_init=('random','random','magnitude'), every=(1,2,3,None), n_acc=(1,1,2,3), to_none=(True,True,False), clip=(False,False,True), live=(False,False,False,True),
        dense=(False,False,True), replace=(None,None,True,False), loop=('plain','plain','closure','engine'),
        dtype=(torch.float,torch.float,torch.double,torch.bfloat16))
    case = {k:rng.choice([*v]) for k,v in of.items()}|dict(seed=seed)|fixed
    if rng.random()<.9:  # most of what is refused for sure
        case['sparsity'] = {'2:4':.5, '1:4':.75}.get(case['structure'], case['sparsity'])
        if case['method'] in ('mest','acdc','dsd'): case['every'] = None
        if case['every']==1: case['replace'] = False
    return case

def made(case, seed=None, n=12):
    "Model, optimizer and engine of a case"
    seed = case['seed'] if seed is None else seed
    torch.manual_seed(seed)
    m = models[case['model']][0]().to(case['dtype'])
    before,settings = copy.deepcopy(m.state_dict()),{}
    try:
        ours = {k:case[k] for k in ('structure','mask_init')}|({} if case['sparse_f'] is None else dict(sparse_f=case['sparse_f']))
        if not case['dense']: sparsify_model(m, case['sparsity'], seed=seed, sparse_init_mode=None, **ours)
        else: settings['sparsity'] = case['sparsity']
        before = copy.deepcopy(m.state_dict())
        opt = optimizer(case['opt'], m.parameters())
        if case['structure']: settings['structure'] = case['structure']
        if case['every']: settings['batches_per_update'] = case['every']
        if case['replace'] is not None: settings['replace_step'] = case['replace']
        if not case['dense'] and case['method'] in ('gmp','granet','acdc','dsd'): settings['sparsity'] = max(case['sparsity'], .8)
        plan = None if not case['live'] else {w.name:'rows' for w in masked_params(m)}
        settings |= dict(sparse_compute=plan or False, method=case['method'], steps_per_epoch=4)
        engine = DynamicSparseTraining(m, opt, n, seed=seed, **settings)
    except (ValueError,TypeError) as e:
        assert len(str(e))>20 and agree(before, copy.deepcopy(m.state_dict())), e
        raise Refused(str(e)) from e
    return m,opt,engine

def batch(case): return torch.randn(models[case['model']][1]).to(case['dtype'])

def batches(case, m, opt, engine, begin, end, after=lambda i: None):
    "Train on batches `begin` to `end`"
    for i in range(begin, end):
        x = batch(case)
        def closure(clear=True):
            if clear: opt.zero_grad(set_to_none=case['to_none'])
            (loss := m.train()(x).square().mean()).backward()
            if case['clip'] and (i+1)%case['n_acc']==0: nn.utils.clip_grad_norm_(m.parameters(), 1.)
            return loss
        if case['loop']=='closure' and case['n_acc']==1: opt.step(closure)
        else:
            closure(clear=False)
            if (i+1)%case['n_acc']==0:
                (engine if case['loop']=='engine' else opt).step()
                opt.zero_grad(set_to_none=case['to_none'])
        after(i+1)

def laws(case, m, opt, engine, goals):
    "Laws 1, 3 and 5 after a step; those of enforcement in a forward"
    lives = live(m)
    if not goals['loose']: assert abs(sum(lives)-goals['live'])<goals['step'], 'the number of live weights'
    assert lives==[tally.live for tally in engine.tallies], 'the engine counts what lives'
    for tally in engine.moving: assert tally.mask.dtype==torch.bool and tally.structure.legal(tally.weight.full_mask()), tally.name
    if case['live']: assert_index_fits(m)
    else:
        assert_dead(m, None if any(group.method.dense_history for group in engine.groups) else opt)
        assert [id(p) for p in m.parameters()]==goals['ids']

def check_laws(seed, **fixed):
    "The front door: counts, zeros, structures and objects after each step; nothing moves in evaluation; copies and files compute the same"
    case = drawn(seed, **fixed)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        m,opt,engine = made(case, n=12//case['n_acc'])
        goals = dict(live=sum(live(m)), ids=[id(p) for p in m.parameters()], loose=case['method']=='srigl' or any(group.method.path for group in engine.groups))  # outputs that SRigL leaves have equally many
        steps = [tally.structure.n_weights(tally.shape, 1) for tally in engine.moving if case['structure'] and tally.method.redistribute_f]
        goals['step'] = max(steps, default=1)  # layers whose units have unequal sizes exchange them as well as they can
        def after(i):
            if i%case['n_acc']: return
            m.train()(x)  # what an optimizer wrote to dead weights is gone with the next forward
            laws(case, m, opt, engine, goals)
        x = batch(case)
        batches(case, m, opt, engine, 0, 12, after)
        before = snapshot(m)
        y = m.eval()(x)
        assert agree(before, snapshot(m)), 'evaluation changed something'
        tol = 10*torch.finfo(case['dtype']).eps*y.abs().max().item()+1e-9  # sums of at most 32 products in another order
        torch.testing.assert_close(plain_copy(m)(x), y, rtol=0, atol=tol)
        engine.remove()
        torch.testing.assert_close(m.eval()(x), y, rtol=0, atol=tol)
    return engine

def check_resumed(seed, folder, **fixed):
    "A run that was stopped after a drawn batch goes on bit for bit in objects made anew, from a file; twice the same seed is the same run"
    case = drawn(seed, **fixed)
    stop,n = case.get('stop') or random.Random(seed+1).randint(1, 11),12//case['n_acc']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        mine = made(case, n=n)
        path = folder/f'{seed}.pt'
        def keep(i):
            if i==stop: save_run(path, *mine, position=i, grads=True)
        batches(case, *mine, 0, 12, keep)
        end = state_of(mine)
        again = made(case, n=n)
        batches(case, *again, 0, 12)
        assert agree(end, state_of(again)), 'another run with the same seed'
        other = made(dict(case, mask_init='random'), seed+1000, n)
        batches(case, *other, load_run(path, *other), 12)
        assert agree(end, state_of(other)), f'stopped after {stop}'

def state_of(p): return copy.deepcopy([plain(o.state_dict()) for o in p])+[torch.get_rng_state()]

def check(f, seed, *args):
    try: f(seed, *args)
    except Refused: pass
    except ValueError as e:  # SNFS learns of an optimizer without momentum at its first update
        if 'which `gradient_momentum` reads' not in str(e): raise

def test_what_is_taken_keeps_the_laws(): for_drawn(partial(check, check_laws), 25)

def test_what_is_stopped_goes_on(tmp_path): for_drawn(lambda seed: check(check_resumed, seed, tmp_path), 15)

def test_half_of_a_batch_of_a_dense_history_goes_on(tmp_path):
    "The gradient that a file holds between two backward passes keeps its dead weights' entries, which momentum reads"
    case = dict(model='linear', opt='Adam', method='snfs', structure=None, sparsity=.75, every=1, replace=False, live=False, dense=False)
    check_resumed(0, tmp_path, **case, n_acc=2, stop=5, clip=False)

@pytest.mark.full
def test_what_is_taken_keeps_the_laws_in_thousands_of_runs(): for_drawn(partial(check, check_laws), 3000)

@pytest.mark.full
def test_what_is_stopped_goes_on_in_thousands_of_runs(tmp_path): for_drawn(lambda seed: check(check_resumed, seed, tmp_path), 2000)
