"What was stopped goes on bit for bit: engines in loops, the callback in fits, live weights, learned masks; between steps, between the batches of a step, in a new process"
import copy,pytest,random,shutil,warnings
from fastai.callback.core import Callback
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam,OptimWrapper,ranger
from fastai_data import CpuMixedPrecision,digits,learner,loaders,momentum_sgd
from fastsparse.all import *
from fastsparse.learned.masks import supermask_presets
from fastsparse.train.presets import GMP_presets,GSE_presets,ITOP_presets
from fastsparse.methods.presets import ACDC_presets,DSD_presets,GraNet_presets,MEST_presets,SRigL_presets
from fastsparse.train.presets import Static_presets
from fastsparse.save.run_file import plain,read_run
from forks import run_code
from functools import partial
from helpers import *
from pathlib import Path

DST = DynamicSparseTrainingCallback

class Dead(Exception): pass

# --- loops: what → model, optimizer, engine (if any), and a batch

def conv(seed):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Conv2d(2,6,3,padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96,16), nn.ReLU(), nn.Dropout(.1), nn.Linear(16,4))
    sparsify_model(m, .8, 'erk', seed=seed)
    return m

def parts(kind, seed, n, dtype=None):
    "Model, optimizer and engine of `kind`; all that is drawn depends on `seed`"
    if kind=='learned':
        m = mlp((32,16,4), seed=seed)
        learn_masks(m, **dict(supermask_presets, sparseness='bernoulli'), seed=seed)
        return m,torch.optim.SGD(m.parameters(), lr=.5, momentum=.9)
    if kind=='rule':
        m = mlp((64,256,512,10), seed=seed, act=nn.ReLU)
        sparsify_model(m, .9, seed=seed)
    else: m = conv(seed)
    m = m.to(torch.bfloat16 if kind=='bfloat16' else dtype)
    opt = torch.optim.AdamW(m.parameters(), lr=.01)
    rows = dict(linear=['3.weight','6.weight'], conv=['0.weight']).get(kind)
    if rows: sparse_compute(m, None, opt, plan=dict.fromkeys(rows, 'rows'))
    settings = dict(GMP_presets(sparsity=.95), batches_per_update=2) if kind=='prune' else {**RigL_presets, 'batches_per_update':2, 'stop_pct':1.}
    return m,opt,DynamicSparseTraining(m, opt, n, sparse_compute=None if kind=='rule' else False, **settings, seed=seed)

shapes = dict(learned=(5,32), rule=(64,64))
kinds = 'masked','linear','conv','prune','bfloat16','rule','learned'

def go(kind, p, n_acc, i, n, set_to_none=True, after=lambda i: None):
    "Batches `i` to `n`, a step after every `n_acc`"
    m,opt = p[:2]
    x = shapes.get(kind, (5,2,4,4))
    while i<n:
        m(torch.randn(x).to(next(m.parameters()).dtype)).square().mean().backward()
        i += 1
        if i%n_acc==0:
            opt.step()
            opt.zero_grad(set_to_none=set_to_none)
        after(i)

def snapshot(*p): return copy.deepcopy([plain(o.state_dict()) for o in p])+[torch.get_rng_state()]

@pytest.mark.parametrize('kind,n_acc,set_to_none', [*[(k,1,True) for k in kinds], *[(k,3,True) for k in kinds], ('linear',3,False), ('conv',2,False)])
def test_a_loop_goes_on_from_any_batch(kind, n_acc, set_to_none, tmp_path):
    "Law 6: from files, also between the batches of a step in which an update is due, and from states, in objects made anew and back in the same ones"
    n = 4*n_acc+4
    mine,states = parts(kind, 0, n),{}
    def keep(i):
        save_run(tmp_path/str(i), *mine, position=i, grads=True)
        if i%n_acc==0: states[i] = snapshot(*mine)
    go(kind, mine, n_acc, 0, n, set_to_none, keep)
    end = snapshot(*mine)
    assert len(mine)<3 or mine[2].n_updates>1
    for i in range(1, n, 2 if n_acc==3 else 1):  # at each batch of a step
        other = parts(kind, 3, n)
        go(kind, other, n_acc, load_run(tmp_path/str(i), *other), n, set_to_none)
        assert agree(end, snapshot(*other)), i
    if not set_to_none: return
    for i,state in list(states.items())[:-1]:
        for p in (parts(kind, 3, n), mine):
            for o,s in zip(p, copy.deepcopy(state)): o.load_state_dict(s)
            p[1].zero_grad()
            torch.set_rng_state(state[-1])
            go(kind, p, n_acc, i, n)
            assert agree(end, snapshot(*p)), f'from states, {i}'

@pytest.mark.parametrize('live', [False,True])
def test_a_gradient_of_dead_weights_alone_comes_back(live, tmp_path):
    "By hand: live weights read input 0, which is zero; the gradient of the others is the sum of their inputs"
    def make():
        m = nn.Linear(4, 2, bias=False)
        sparsify_model(m, .75, mask_init=dict(weight=torch.eye(4)[:1].bool().expand(2, 4)), seed=0)
        opt = torch.optim.SGD(m.parameters(), .1)
        own = dict(batches_per_update=1, replace_step=False, initial_drop_grow_pct=.9)
        return m,opt,DynamicSparseTraining(m, opt, 8, **RigL_presets|own, sparse_compute={'weight':'rows'} if live else False)
    a,b = make(),make()
    a[1].step()  # the first update is due at the second step
    a[0](torch.tensor([[0.,1,2,3]])).sum().backward()
    load_run(save_run(tmp_path/'run', *a, grads=True), *b)
    for m,*_ in (a,b): assert masked_params(m)[0].store.read_grad().tolist()==[[0.,1,2,3]]*2

def test_state_of_another_type_comes_back_in_it(tmp_path):
    "NAdam keeps a product in float32 beside weights in float64; torch's load casts it, and its later values are others"
    def run(n):
        torch.manual_seed(0)
        m = mlp((6,8,4), dtype=torch.double)
        sparsify_model(m, .5, seed=0)
        opt = torch.optim.NAdam(m.parameters(), lr=.01)
        spin_on(m, opt, 0, n)
        return m,opt
    def spin_on(m, opt, i, n):
        for j in range(i, n):
            opt.zero_grad()
            m(torch.randn(5,6, dtype=torch.double, generator=torch.Generator().manual_seed(j))).square().mean().backward()
            opt.step()
    whole,half,new = run(9),run(4),run(0)
    load_run(save_run(tmp_path/'a.pt', *half), *new)
    spin_on(*new, 4, 9)
    assert new[1].state[new[0][0].weight]['mu_product'].dtype==torch.float and agree(snapshot(*whole)[:2], snapshot(*new)[:2])

def loop(folder, seed=0, stop=None, kind='masked', n_acc=3):
    "The same in a file"
    n,path = 4*n_acc+4,Path(folder)/f'{kind}.pt'
    p = parts(kind, seed, n)
    torch.manual_seed(seed)
    start = load_run(path, *p, default=0)
    def after(i):
        if i!=stop: return
        save_run(path, *p, position=i, grads=True)
        raise Dead('dead')
    go(kind, p, n_acc, start, n, after=after)
    return snapshot(*p)

@pytest.mark.parametrize('kind,other', [('masked','linear'), ('linear','masked'), ('linear','conv'), ('conv','masked')])
def test_a_file_goes_on_however_weights_are_stored(kind, other, tmp_path):
    "Between the batches of a step too: the next update reads the same gradient. In float64: where a gradient is nearly zero, Adam steps by its rounding"
    mine,new = parts(kind, 0, 12, torch.double),parts(other, 3, 12, torch.double)
    go(kind, mine, 2, 0, 5)
    load_run(save_run(tmp_path/'a.pt', *mine, grads=True), *new)
    for p in (mine, new):
        torch.manual_seed(0)
        go(kind, p, 2, 5, 12)
    a,b = [dict(p[0].state_dict()) for p in (mine, new)]
    assert mine[2].n_updates>1
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=1e-7, atol=1e-9)

# --- fits

class Die(Callback):
    "End the fit as a dying process does, after so many batches"
    order,run_valid = 200,False
    def __init__(self, at): self.at,self.n = at,0
    def after_batch(self):
        self.n += 1
        if self.n==self.at: raise Dead('dead')

every4 = dict(batches_per_update=4)
presets = dict(Static=Static_presets, SET=SET_presets(**every4), SNFS=SNFS_presets(**every4), RigL=RigL_presets(**every4), ITOP=ITOP_presets(**every4),
    GSE=GSE_presets(**every4), GMP=GMP_presets(**every4, sparsity=.8), GraNet=GraNet_presets(**every4, sparsity=.8),
    MEST=MEST_presets(updates=FreqSchedule(4, start=4)), SRigL=SRigL_presets(**every4), ACDC=ACDC_presets(sparsity=.8), DSD=DSD_presets(sparsity=.5))
opts = dict(sgd=momentum_sgd, adam=Adam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW), ranger=ranger, accumulate=momentum_sgd)
every_fit = [f'{m}-{o}' for m in presets for o in opts]
ways = 'live','mixed','in order','torch loader','two engines'
fits = 'SET-adam','SNFS-adamw','GMP-adam','GraNet-adamw','SRigL-adam','ACDC-sgd','RigL-accumulate',*(f'RigL-adam {w}' for w in ways)

def small_learner(path, opt=momentum_sgd, seed=0, sizes=(64,16,12,10), **kwargs):
    "Eight batches an epoch, shuffled, with dropout"
    torch.manual_seed(seed), random.seed(seed)
    model = mlp(sizes, seed=seed, act=lambda: nn.Sequential(nn.ReLU(), nn.Dropout(.1)))
    return learner(path, model, opt, lr=.01, **{**dict(dls=loaders(*digits(n=160, dtype=torch.float), bs=16, n_valid=32, shuffle=True)), **kwargs})

def torch_loaders():
    pairs = list(zip(*digits(n=160, dtype=torch.float)))
    return DataLoaders(*[torch.utils.data.DataLoader(o, batch_size=16, shuffle=o is not pairs[-32:]) for o in (pairs[:-32], pairs[-32:])])

def one_fit(folder, case, seed=0, stop=None, n=3, cbs=(), **kwargs):
    "The learner and the callback after a fit, which goes on from its file; everything drawn before depends on `seed`"
    name,_,way = case.partition(' ')
    method,opt = name.split('-')
    dls = {'in order':lambda: loaders(*digits(n=160, dtype=torch.float), n_valid=32), 'torch loader':torch_loaders}.get(way)
    learn = small_learner(folder, opts[opt], seed, **(dict(dls=dls()) if dls else {}))
    settings = presets[method]
    if 'sparsity' not in settings: sparsify_model(learn, .8, seed=seed, structure='fan-in ablate 0.3' if method=='SRigL' else None)
    class Second(DST): pass
    mine = [DST(*[learn.model[0]]*(way=='two engines'), **settings, seed=seed, sparse_compute={'0.weight':'rows'} if way=='live' else None)]
    if way=='two engines': mine.append(Second(learn.model[2], **presets['SET'], seed=seed+1))
    more = [GradientAccumulation(40)]*(opt=='accumulate')+[CpuMixedPrecision()]*(way=='mixed')+[Die(stop)]*(stop is not None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit_one_cycle(n, .01, cbs=[*mine, SparseCheckpoint(Path(folder)/case, **{'every':3, **kwargs}), *more, *cbs])
    return learn,mine[-1]

def whole_state(learn, cb): return plain(dict(model=learn.model.state_dict(), opt=learn.opt.state_dict(), engine=cb.state_dict(), losses=learn.recorder.losses,
    values=[list(o) for o in learn.recorder.values], lrs=learn.recorder.lrs, rng=torch.get_rng_state()))

def fit(folder, seed=0, stop=None, case='', **kwargs): return whole_state(*one_fit(folder, case, seed, stop, **kwargs))

def language(folder, seed=0, stop=None, every=2):
    "A loader that goes on shuffling its documents from epoch to epoch, and a model whose hidden state goes on from batch to batch"
    from fastai.text.all import AWD_LSTM,awd_lstm_lm_config,CrossEntropyLossFlat,get_language_model,LMDataLoader,ModelResetter,RNNCallback
    torch.manual_seed(0)
    docs = [torch.randint(20, (50+i,), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    dls = DataLoaders(*[LMDataLoader([(o,) for o in docs], bs=4, seq_len=16, shuffle=s) for s in (True,False)])
    model = get_language_model(AWD_LSTM, 20, {**awd_lstm_lm_config, 'emb_sz':16, 'n_hid':24, 'n_layers':2})
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=[ModelResetter(), RNNCallback()])
    torch.manual_seed(seed), random.seed(seed)
    with learn.no_bar(), learn.no_logging():
        learn.fit_sparse(3, .8, 1e-2, method='rigl', batches_per_update=3, seed=0,
            cbs=[SparseCheckpoint(Path(folder)/'language', every=every), *[Die(stop)]*(stop is not None)])
    return plain(dict(model=learn.model.state_dict(), values=[list(o) for o in learn.recorder.values]))

runs = {o:partial(fit, case=o) for o in fits} | {k:partial(loop, kind=k) for k in kinds} | dict(language=language)

def go_on(folder, names):
    "In a process of its own: other weights, masks, seeds and random states, then the same run"
    for k in names: torch.save(runs.get(k, partial(fit, case=k))(folder, seed=9), f'{folder}/{k}-end')

def in_another_process(folder, names, runs=runs):
    for i,k in enumerate(names):
        with pytest.raises(Dead): runs[k](folder, stop=(5,11,14,20,17)[i%5] if k not in kinds else 5+i%5)
    res = run_code(f'import test_resume\ntest_resume.go_on({str(folder)!r}, {names!r})')
    assert not res.returncode, res.stderr
    (folder/'whole').mkdir()
    for k in names:
        whole,end = runs[k](folder/'whole'),torch.load(folder/f'{k}-end')
        if isinstance(whole, dict):
            for o in whole: assert agree(whole[o], end[o]), f'{k}: {o}'
        else: assert agree(whole, end), k

def test_a_new_process_goes_on(tmp_path):
    "Every kind of loop, and of fit with some methods: model, masks, optimizer, engine, losses and random states are those of a run that was never stopped"
    in_another_process(tmp_path, list(runs))

@pytest.mark.full
def test_a_new_process_goes_on_with_every_method_and_optimizer(tmp_path):
    runs.update({o:partial(fit, case=o) for o in every_fit})
    in_another_process(tmp_path, every_fit)

@pytest.mark.parametrize('case,stops,every', [('RigL-adam',(5,3,9),3), ('RigL-adam',(13,),None), ('GMP-sgd',(13,),None), ('RigL-accumulate',(13,),None),
    ('language',(15,),None), ('language',(5,),1)])
def test_a_fit_goes_on_again(case, stops, every, tmp_path):
    "Killed twice in the same epoch; from the end of an epoch, where `every` is None"
    run = runs.get(case, partial(fit, case=case))
    for i,at in enumerate(stops):
        with pytest.raises(Dead): run(tmp_path, seed=i, stop=at, every=every)
    if every is None and case!='language': assert (o := read_run(tmp_path/f'{case}.pt')) and (o['position']['epoch'],o['position']['batch'],o['finished'])==(1,0,False)
    (tmp_path/'b').mkdir()
    assert agree(run(tmp_path, seed=7, every=every), run(tmp_path/'b', every=every))

def test_what_was_forgotten_comes_from_the_file(tmp_path):
    "A dense model takes its masks from it; a plain loop goes on from a fit's"
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-adam', stop=10)
    dense = small_learner(tmp_path, Adam, 7)
    position = load_run(tmp_path/'RigL-adam.pt', *(p := small_parts(tmp_path)))
    assert position['train_iter']==9 and p[2].last_t==8
    cb = DST(**presets['RigL'])
    dense.fit_one_cycle(3, .01, cbs=[cb, SparseCheckpoint(tmp_path/'RigL-adam', every=3)])
    (tmp_path/'b').mkdir()
    assert agree(whole_state(dense, cb), fit(tmp_path/'b', case='RigL-adam'))

def small_parts(folder):
    learn = small_learner(folder, Adam, 5)
    sparsify_model(learn, .8, seed=5)
    learn.create_opt()
    return learn,learn.opt,SparseEngine(learn.model, learn.opt, 24, **presets['RigL'])

def test_other_callbacks_see_each_batch_once(tmp_path):
    "Those that were done before the file was written too"
    class Count(Callback):
        order = 300
        def __init__(self): self.seen = []
        def before_batch(self): self.seen.append('before')
        def after_batch(self): self.seen.append('after')
    count = Count()
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-sgd', stop=6, n=1, every=5)
    one_fit(tmp_path, 'RigL-sgd', n=1, every=5, cbs=[count])
    assert count.seen==['before','after']*(3+2)  # three of eight are left, and two to validate

class Copy(Callback):
    "Keep the file of each batch"
    order,run_valid = 101,False
    def __init__(self, path): self.path = path
    def after_batch(self):
        if self.path.exists(): shutil.copy(self.path, self.path.with_name(f'{self.train_iter}.pt'))

def conv_fit(path, compute, n_acc, seed=0, cbs=()):
    "18 batches; fastai sets gradients to zero in place"
    random.seed(seed)
    g = torch.Generator().manual_seed(0)
    pairs = list(zip(torch.randn(36,2,4,4, generator=g), torch.randn(36,4, generator=g)))
    dls = DataLoaders.from_dsets(pairs, pairs[:4], bs=4, shuffle=True, num_workers=0, device='cpu')
    learn = Learner(dls, conv(seed), nn.MSELoss(), opt_func=Adam, path=path.parent)
    cb = DST(**{**RigL_presets, **every4, 'stop_pct':1.}, seed=seed, sparse_compute=compute)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .01, cbs=[cb, GradientAccumulation(4*n_acc), SparseCheckpoint(path, every=1), *cbs])
    return whole_state(learn, cb)

computes = dict(masked=None, linear={'3.weight':'rows', '6.weight':'rows'}, conv={'0.weight':'rows'}, measured=True)

@pytest.mark.parametrize('kind,n_acc,stops', [(k,3,(4,5)) for k in computes]+[pytest.param(k, n, range(1,18),
    marks=pytest.mark.full) for k in computes for n in (1,2,3)])
def test_a_fit_goes_on_from_any_batch(kind, n_acc, stops, tmp_path, monkeypatch):
    "Measured: the plan comes from the file, and weights are stored so before their gradients are read"
    monkeypatch.setattr('fastsparse.live.compute._speedup', lambda *args: 2.)
    (tmp_path/'whole').mkdir()
    whole = conv_fit(tmp_path/'whole'/'run.pt', computes[kind], n_acc, cbs=[Copy(tmp_path/'whole'/'run.pt')])
    assert whole['engine']['n_updates']>2
    for i in stops:
        if i==9: continue  # an epoch ends
        shutil.copy(tmp_path/'whole'/f'{i}.pt', tmp_path/'run.pt')
        assert agree(whole, conv_fit(tmp_path/'run.pt', computes[kind], n_acc, 3)), i
