"A killed run goes on bit for bit, a file that doesn't fit changes nothing, and the file is whole at any moment"
import copy,os,pytest,random,shutil,signal,subprocess,sys,time,torch,warnings
from fastai.callback.core import CancelFitException,Callback
from fastai.callback.schedule import *
from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.optimizer import Adam,OptimWrapper,ranger
from fastai.data.core import DataLoaders
from fastai_data import CpuMixedPrecision,digits,learner,loaders,momentum_sgd
from fastcore.all import partial
from fastsparse.all import *
from fastsparse.core.files import seal
from fastsparse.weights.weight import masked_params
from fastsparse.train.callback import WaitForSparsity
from fastsparse.save.run_file import _word,plain,random_state,read_run
from helpers import agree,full_disk,is_positive_zero,mlp
from pathlib import Path
from torch import nn

DST = DynamicSparseTrainingCallback
every4 = dict(batches_per_update=4)
presets = dict(Static=Static_presets, SET={**SET_presets, **every4}, SNFS={**SNFS_presets, **every4}, RigL={**RigL_presets, **every4},
    ITOP={**ITOP_presets, **every4}, GSE=GSE_presets(**every4), GMP={**GMP_presets, **every4, 'sparsity':.8}, GraNet={**GraNet_presets, **every4, 'sparsity':.8},
    MEST={**MEST_presets, 'updates':FreqSchedule(4, start=4)},
    SRigL={**SRigL_presets, **every4}, ACDC={**ACDC_presets, 'sparsity':.8}, DSD={**DSD_presets, 'sparsity':.5}, CHT={**CHT_presets, 'updates':FreqSchedule(4, start=4)})
opts = dict(sgd=momentum_sgd, adam=Adam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW), ranger=ranger, accumulate=momentum_sgd)
cases = [f'{m}-{o}' for m in presets for o in opts]

class Die(Callback):
    "End the fit as a dying process does, after so many batches"
    order = 200
    def __init__(self, at): self.at,self.n = at,0
    def after_batch(self):
        if self.training: self.n += 1
        if self.training and self.n==self.at: raise MemoryError('dead')

def small_learner(path, opt=momentum_sgd, seed=0, sizes=(64,16,12,10), **kwargs):
    "Eight batches an epoch, shuffled, with dropout"
    torch.manual_seed(seed), random.seed(seed)
    model = mlp(sizes, seed=seed, act=lambda: nn.Sequential(nn.ReLU(), nn.Dropout(.1)))
    return learner(path, model, opt, lr=.01, dls=loaders(*digits(n=160, dtype=torch.float), bs=16, n_valid=32, shuffle=True), **kwargs)

def one_fit(folder, case, seed=0, cbs=(), n=3, **kwargs):
    "The fit of a case; everything drawn before it depends on `seed`"
    method,opt = case.split('-')
    learn = small_learner(folder, opts[opt], seed)
    settings = presets[method]
    if 'sparsity' not in settings: sparsify_model(learn, .8, seed=seed, structure='fan-in ablate 0.3' if method=='SRigL' else None)
    cb = DST(**settings, seed=seed)
    more = [GradientAccumulation(40)]*(opt=='accumulate')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit_one_cycle(n, .01, cbs=[cb, SparseCheckpoint(Path(folder)/case, **{'every':3, **kwargs}), *more, *cbs])
    return learn,cb

def whole_state(learn, cb): return plain(dict(model=learn.model.state_dict(), opt=learn.opt.state_dict(), engine=cb.state_dict(), losses=learn.recorder.losses,
    values=[list(o) for o in learn.recorder.values], lrs=learn.recorder.lrs, rng=torch.get_rng_state()))

def go_on(folder):
    "In a process of its own: other weights, masks, seeds and random states, then the same fit"
    for case in cases: torch.save(whole_state(*one_fit(folder, case, seed=9)), f'{folder}/{case}-end')

def in_fresh_process(code, *args, **kwargs):
    "Python code in a process that has not trained before"
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], cwd=Path(__file__).parent, **kwargs)

@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
    "The folder with the ends of runs that died here, some in the middle of an epoch, and went on in another process"
    folder = tmp_path_factory.mktemp('runs')
    for i,case in enumerate(cases):
        with pytest.raises(MemoryError): one_fit(folder, case, cbs=[Die((5,11,14,20,17)[i%5])])
    res = in_fresh_process('import sys,test_checkpoint\ntest_checkpoint.go_on(sys.argv[1])', folder, capture_output=True, text=True, timeout=500)
    assert not res.returncode, res.stderr
    return folder

@pytest.mark.parametrize('case', cases)
def test_a_killed_fit_goes_on_bit_for_bit(case, resumed, tmp_path):
    "Law 6: model, masks, optimizer, engine, losses and random states are those of a fit that was never killed"
    end,mine = torch.load(resumed/f'{case}-end'),whole_state(*one_fit(tmp_path, case))
    for k in mine: assert agree(mine[k], end[k]), k

def test_the_end_of_an_epoch_is_a_place_to_go_on_from(tmp_path):
    "Without `every`, the file of the last epoch's end serves"
    for case in ('RigL-adam','GMP-sgd','RigL-accumulate'):
        with pytest.raises(MemoryError): one_fit(tmp_path, case, cbs=[Die(13)], every=None)
        run = read_run(tmp_path/f'{case}.pt')
        assert (run['position']['epoch'],run['position']['batch'],run['finished'])==(1,0,False)
        again = whole_state(*one_fit(tmp_path, case, seed=3))
        (tmp_path/'b').mkdir(exist_ok=True)
        assert agree(again, whole_state(*one_fit(tmp_path/'b', case)))

def test_killed_twice(tmp_path):
    "A run that goes on can be killed again, in the same epoch too"
    for at in (5,3,9):
        with pytest.raises(MemoryError): one_fit(tmp_path, 'RigL-adam', seed=at, cbs=[Die(at)]) if at!=5 else one_fit(tmp_path, 'RigL-adam', cbs=[Die(at)])
    again = whole_state(*one_fit(tmp_path, 'RigL-adam', seed=4))
    (tmp_path/'b').mkdir()
    assert agree(again, whole_state(*one_fit(tmp_path/'b', 'RigL-adam')))

def test_a_finished_run_starts_anew(tmp_path):
    "The same fit again is another fit; resume=True says that there is nothing to go on with"
    one_fit(tmp_path, 'RigL-sgd')
    assert read_run(tmp_path/'RigL-sgd.pt')['finished']
    learn,_ = one_fit(tmp_path, 'RigL-sgd', seed=1)
    assert len(learn.recorder.losses)==24
    with pytest.raises(ValueError, match='has finished'): one_fit(tmp_path, 'RigL-sgd', resume=True)

def test_what_resume_says(tmp_path):
    "True needs a file, False starts anew over it"
    with pytest.raises(FileNotFoundError, match='is not there'): one_fit(tmp_path, 'RigL-sgd', resume=True)
    with pytest.raises(MemoryError): one_fit(tmp_path, 'RigL-sgd', cbs=[Die(10)])
    learn,_ = one_fit(tmp_path, 'RigL-sgd', seed=2, resume=False)
    assert len(learn.recorder.losses)==24

def test_early_stopping_has_finished_and_a_stop_from_outside_has_not(tmp_path):
    class Stop(Callback):
        def after_epoch(self): raise CancelFitException
    one_fit(tmp_path, 'RigL-sgd', cbs=[Stop()])
    assert not (tmp_path/'RigL-sgd.pt').exists() or not read_run(tmp_path/'RigL-sgd.pt')['finished']
    one_fit(tmp_path, 'SET-sgd', cbs=[EarlyStoppingCallback(comp=lambda a,b: False, patience=2)], n=5)
    assert read_run(tmp_path/'SET-sgd.pt')['finished']

def test_another_run_is_refused_before_anything_changed(tmp_path):
    "Another length, model, optimizer or method: the error names both and the ways out"
    with pytest.raises(MemoryError): one_fit(tmp_path, 'RigL-sgd', cbs=[Die(10)])
    saved = (tmp_path/'RigL-sgd.pt').read_bytes()
    def attempt(n=3, sizes=(64,16,12,10), opt=momentum_sgd, settings=presets['RigL'], **kwargs):
        learn = small_learner(tmp_path, opt, 5, sizes)
        sparsify_model(learn, .8, seed=5)
        before = {k:v.clone() for k,v in learn.model.state_dict().items()}
        with pytest.raises(ValueError, match='resume=False|start a new run in another file') as e: learn.fit(n, cbs=[DST(**settings), SparseCheckpoint(tmp_path/'RigL-sgd')], **kwargs)
        assert agree(before, dict(learn.model.state_dict())) and (tmp_path/'RigL-sgd.pt').read_bytes()==saved
        return str(e.value)
    assert 'n_epoch is 3' in attempt(n=4)
    assert 'shape (16, 64) in the file' in attempt(sizes=(64,20,12,10))
    assert 'steps of the optimizer' in attempt(opt=Adam)
    assert 'of the method is' in attempt(settings=presets['SET'])
    assert 'start_epoch' in attempt(start_epoch=1)

def test_a_dense_model_takes_its_masks_from_the_file(tmp_path):
    "The script forgot sparsify_model the second time"
    with pytest.raises(MemoryError): one_fit(tmp_path, 'RigL-adam', cbs=[Die(10)])
    learn = small_learner(tmp_path, Adam, 7)
    cb = DST(**presets['RigL'])
    learn.fit_one_cycle(3, .01, cbs=[cb, SparseCheckpoint(tmp_path/'RigL-adam', every=3)])
    (tmp_path/'b').mkdir()
    assert agree(whole_state(learn, cb), whole_state(*one_fit(tmp_path/'b', 'RigL-adam')))

def test_two_engines_of_one_fit(tmp_path):
    "Each with its own layers and method"
    def run(folder, seed=0, cbs=()):
        learn = small_learner(tmp_path, Adam, seed)
        sparsify_model(learn, .8, seed=seed)
        class Second(DST): pass
        both = [DST(learn.model[0], **presets['RigL'], seed=seed), Second(learn.model[2], **presets['SET'], seed=seed+1)]
        learn.fit(3, cbs=[*both, SparseCheckpoint(folder/'run', every=3), *cbs])
        return learn,both[1]
    (tmp_path/'b').mkdir()
    with pytest.raises(MemoryError): run(tmp_path, cbs=[Die(14)])
    assert agree(whole_state(*run(tmp_path, 5)), whole_state(*run(tmp_path/'b')))

def test_a_plain_loop_goes_on_from_a_fit(tmp_path):
    "A fit's file serves load_run, engine included"
    with pytest.raises(MemoryError): one_fit(tmp_path, 'RigL-adamw', cbs=[Die(10)])
    learn = small_learner(tmp_path, opts['adamw'], 5)
    sparsify_model(learn, .8, seed=5)
    learn.create_opt()
    engine = SparseEngine(learn.model, learn.opt, 24, **presets['RigL'])
    position = load_run(tmp_path/'RigL-adamw.pt', learn, learn.opt, engine)
    assert position['train_iter']==9 and engine.last_t==8

def test_validation_and_lr_find_leave_the_file_alone(tmp_path):
    learn = small_learner(tmp_path)
    sparsify_model(learn, .8, seed=0)
    learn.add_cb(SparseCheckpoint(tmp_path/'run', every=1))
    learn.validate(), learn.get_preds(), learn.lr_find(show_plot=False, num_it=4)
    assert not (tmp_path/'run.pt').exists()
    learn.fit(1)
    assert read_run(tmp_path/'run.pt')['finished']

@pytest.mark.parametrize('kw', [dict(every=0), dict(every=1.5), dict(keep=0), dict(keep=True), dict(keep=None), dict(resume='yes')])
def test_bad_settings(kw):
    with pytest.raises(ValueError, match='must be'): SparseCheckpoint('run', **kw)

def test_the_last_are_kept(tmp_path):
    "`keep=2`: the file before is another run to go on from"
    with pytest.raises(MemoryError): one_fit(tmp_path, 'RigL-sgd', cbs=[Die(10)], keep=2)
    assert sorted(os.listdir(tmp_path))==['RigL-sgd.1.pt','RigL-sgd.pt']
    assert [read_run(tmp_path/f)['position']['train_iter'] for f in ('RigL-sgd.pt','RigL-sgd.1.pt')]==[9,8]

# Plain loops

def parts(seed=0, opt=torch.optim.AdamW, sparsity=.8, sizes=(20,32,4), n_steps=40, **settings):
    model = mlp(sizes, seed=seed)
    sparsify_model(model, sparsity, seed=seed)
    opt = opt(model.parameters(), lr=.01)
    return model,opt,DynamicSparseTraining(model, opt, n_steps, **{**presets['RigL'], **settings}, seed=seed)

def steps(model, opt, n, sched=None):
    for _ in range(n):
        opt.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        opt.step()
        if sched is not None: sched.step()

def snapshot(model, opt, engine): return copy.deepcopy(plain(dict(model=model.state_dict(), opt=opt.state_dict(), engine=engine.state_dict())))

def test_plain_loops(tmp_path):
    "With a scheduler and a generator beside; the position comes back"
    def make(seed):
        model,opt,dst = parts(seed)
        return model,opt,dst,torch.optim.lr_scheduler.ExponentialLR(opt, .9),torch.Generator().manual_seed(seed)
    model,opt,dst,sched,gen = make(0)
    torch.manual_seed(0)
    steps(model, opt, 10, sched)
    save_run(tmp_path/'a.pt', model, opt, dst, position=dict(step=10), sched=sched, gen=gen)
    steps(model, opt, 15, sched)
    a = snapshot(model, opt, dst),sched.state_dict(),torch.rand(1),torch.rand(1, generator=gen)
    model,opt,dst,sched,gen = make(3)
    assert load_run(tmp_path/'a.pt', model, opt, dst, sched=sched, gen=gen)==dict(step=10)
    steps(model, opt, 15, sched)
    assert agree(a, (snapshot(model, opt, dst),sched.state_dict(),torch.rand(1),torch.rand(1, generator=gen)))
    with pytest.raises(ValueError, match='gen is in the file and was not given'): load_run(tmp_path/'a.pt', model, opt, dst, sched=sched)

def test_between_the_batches_of_a_step(tmp_path):
    "grads=True saves what is accumulated"
    model,opt,dst = parts()
    steps(model, opt, 3)
    model(torch.ones(8, 20)).sum().backward()
    save_run(tmp_path/'a.pt', model, opt, dst, grads=True)
    opt.step()
    other = parts(2)
    load_run(tmp_path/'a.pt', *other)
    other[1].step()
    assert agree(snapshot(model, opt, dst)['model'], snapshot(*other)['model'])

def test_missing_files(tmp_path):
    assert load_run(tmp_path/'a.pt', default=0)==0
    with pytest.raises(FileNotFoundError, match='default='): load_run(tmp_path/'a.pt')

refusals = dict(shape=lambda: parts(1, sizes=(20,30,4)), names=lambda: parts(1, sizes=(20,32,32,4)), optimizer=lambda: parts(1, opt=torch.optim.SGD),
    method=lambda: parts(1, **{**SET_presets, **every4}), times=lambda: parts(1, updates=[3,5]), length=lambda: parts(1, n_steps=50), type=lambda: double())

def double():
    model = mlp((20,32,4), dtype=torch.double)
    sparsify_model(model, .8, seed=1)
    opt = torch.optim.AdamW(model.parameters(), lr=.01)
    return model,opt,DynamicSparseTraining(model, opt, 40, **presets['RigL'])

@pytest.mark.parametrize('kind', refusals)
def test_a_refused_load_leaves_all_as_it_was(kind, tmp_path):
    "Law 10: model, optimizer, engine and random states, bit for bit"
    mine = parts()
    steps(*mine[:2], 6)
    save_run(tmp_path/'a.pt', *mine)
    other = refusals[kind]()
    if kind!='type': steps(*other[:2], 2)
    before,rng = snapshot(*other),random_state()
    with pytest.raises(ValueError, match='as in the run that was saved|settings of the run|as long as the run'): load_run(tmp_path/'a.pt', *other)
    assert agree(before, snapshot(*other)) and agree(rng, random_state())

def test_a_dense_file_is_not_put_into_a_sparse_model(tmp_path):
    "It would throw trained weights away; the ways out are named"
    save_run(tmp_path/'a.pt', mlp((20,32,4)))
    model,*_ = parts()
    with pytest.raises(ValueError, match='unsparsify.*prune_magnitude.*rewind'): load_run(tmp_path/'a.pt', model)
    unsparsify(model)
    load_run(tmp_path/'a.pt', model)

class Tied(nn.Module):
    "Two layers with one weight"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Linear(12, 12),nn.Linear(12, 12),nn.Linear(12, 3)
        self.b.weight = self.a.weight
    def forward(self, x): return self.c(self.b(self.a(x)))

def test_a_dense_model_takes_a_sparse_file(tmp_path):
    "Tied weights included; masks are enforced afterwards, and outputs equal"
    for make in (Tied, lambda: mlp((12,16,3)), lambda: nn.Sequential(*[nn.Linear(12, 12)]*2)):
        model,new = make(),make()
        sparsify_model(model, .7, seed=0)
        save_run(tmp_path/'a.pt', model)
        load_run(tmp_path/'a.pt', new)
        x = torch.randn(2, 12)
        assert agree(dict(model.state_dict()), dict(new.state_dict())) and torch.equal(model(x), new(x))
        opt = torch.optim.SGD(new.parameters(), .1)
        new(x).sum().backward()
        opt.step()
        assert all(is_positive_zero(o.p[~o.mask]) for o in masked_params(new))

def test_a_users_own_mask_is_no_mask(tmp_path):
    "A bool buffer beside another buffer of its shape is loaded like any buffer"
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp((12,16,3))
            self.register_buffer('pos', torch.randn(3))
            self.register_buffer('pos_mask', torch.tensor([True,False,True]))
        def forward(self, x): return self.body(x)
    model,new = Own(),Own()
    new.pos_mask.fill_(True)
    sparsify_model(model, .7, seed=0)
    save_run(tmp_path/'a.pt', model)
    load_run(tmp_path/'a.pt', new)
    assert agree(dict(model.state_dict()), dict(new.state_dict())) and [o.name for o in masked_params(new)]==['body.0.weight','body.2.weight']

def test_files_are_no_larger_than_dense_ones(tmp_path):
    "At 90 %, Adam's state included, a file is below a fifth of the dense one; with dense weights not above it but for a bit a weight"
    def size(sparsity):
        model = mlp((300,400,100))
        if sparsity is not None: sparsify_model(model, sparsity, seed=0)
        opt = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 300)).sum().backward()
        opt.step()
        return save_run(tmp_path/'a.pt', model, opt).stat().st_size
    dense = size(None)
    assert size(.9)<.2*dense and size(0.)<1.012*dense

def test_torch_reads_it_alone(tmp_path):
    "No class of ours is needed, and no code can run"
    path = save_run(tmp_path/'a.pt', *parts())
    assert torch.load(path, weights_only=True)['format']=='fastsparse run'

@pytest.mark.parametrize('schema', [torch.ones(2), torch.tensor(1), [], '1', None, True, 99])
def test_a_schema_is_a_number_that_is_known(tmp_path, schema):
    "Whatever stands in its place is refused by name"
    path = save_run(tmp_path/'a.pt', *parts())
    torch.save(dict(torch.load(path), schema=schema), path)
    seal(path, _word)
    with pytest.raises(ValueError, match='a.pt.* has schema'): read_run(path)

def test_dead_weights_that_somebody_wrote_are_told_of(tmp_path):
    model,*_ = parts()
    model(torch.ones(1, 20))
    model[0].weight.data.add_(1.)
    with pytest.warns(UserWarning, match='0.weight has .* dead weights that are not zero.*apply_masks.*unsparsify'): save_run(tmp_path/'a.pt', model)

def test_plain_refuses_code():
    with pytest.raises(TypeError, match=r"position\['f'\] holds a function"): plain(dict(f=len.__class__ and (lambda: 0)), 'position')

@pytest.mark.parametrize('n', [200, pytest.param(10000, marks=pytest.mark.full)])
def test_mutated_files_are_refused_by_name(n, tmp_path):
    "Bits turned, bytes cut, moved and doubled: refused, and the model stays as it was"
    model,*rest = parts(sizes=(20,8,4))
    path = save_run(tmp_path/'a.pt', model, *rest)
    whole,rng = path.read_bytes(),random.Random(0)
    before = {k:v.clone() for k,v in model.state_dict().items()}
    for i in range(n):
        path.write_bytes(mutated(whole, rng))
        with pytest.raises(ValueError, match="a.pt' is"): load_run(path, model, *rest)
    assert agree(before, dict(model.state_dict()))

def mutated(data, rng):
    "`data` with one change, never none"
    a,b = sorted(rng.sample(range(len(data)), 2))
    kinds = [lambda: data[:a]+bytes([data[a]^(1<<rng.randrange(8))])+data[a+1:], lambda: data[:a], lambda: data[:a]+data[b:], lambda: data[:b]+data[a:],
        lambda: data[a:], lambda: data[:a]+bytes(min(b-a, 64))+data[a+min(b-a, 64):], lambda: data+data[a:b], lambda: b'']
    while (new := rng.choice(kinds)())==data: pass
    return new

# Kills

def write_on(path, n, sparsity):
    "Save until killed; each file goes on with the one before"
    model,opt,dst = parts(sizes=(20,n,4), sparsity=sparsity)
    start = load_run(path, model, opt, dst, default=0)
    if n>1000: steps(model, opt, 1)
    for step in range(start, 10**9): save_run(path, model, opt, dst, position=step+1, keep=2)

def killed_at_random(folder, n_kills, size, sparsity, seconds):
    "Kill a process that writes, again and again, from a parent that has imported all; the file is whole each time"
    path,rng,last = folder/'run.pt',random.Random(0),0
    for _ in range(n_kills):
        pid = os.fork()
        if not pid:
            try: write_on(path, size, sparsity)
            finally: os._exit(1)
        time.sleep(rng.uniform(*seconds))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        if not path.exists(): continue
        model,opt,dst = parts(1, sizes=(20,size,4), sparsity=sparsity)
        at = load_run(path, model, opt, dst)
        assert at>=last and all(is_positive_zero(o.p[~o.mask]) for o in masked_params(model))
        last = at
    assert last>0
    save_run(path, model, opt, dst, keep=2)
    assert sorted(os.listdir(folder))==['run.1.pt','run.pt']

small,large = (16,.8,(.02,.3)),(700_000,.05,(4.,14.))

@pytest.mark.parametrize('n,kind', [(15,small), pytest.param(100,small, marks=pytest.mark.full), pytest.param(20,large, marks=pytest.mark.full)], ids=['15','100','20 of 200 MB'])
def test_kills(n, kind, tmp_path):
    "SIGKILL at random moments: the old file or the new one is whole, nothing is lost, and no rest is left after the next write"
    killed_at_random(tmp_path, n, *kind)

@pytest.mark.parametrize('keep', [1,3])
def test_a_full_disk_leaves_the_old_file(keep, tmp_path):
    "One error names the file; it and its folder are as before"
    mine = parts()
    path = save_run(tmp_path/'a.pt', *mine, position=1)
    with pytest.raises(OSError, match='nothing was written.*a.pt'), full_disk(2000): save_run(path, *mine, position=2, keep=keep)
    assert os.listdir(tmp_path)==['a.pt'] and load_run(path)==1

@pytest.mark.parametrize('how', ['sparse compute','mixed precision','no shuffle','a loader of torch'])
def test_other_ways_to_fit(how, tmp_path):
    "Live weights only, a gradient scaler, a loader that draws from torch's generator: bit for bit as well"
    def run(folder, seed=0, cbs=()):
        learn = small_learner(tmp_path, Adam, seed)
        x,y = digits(n=160, dtype=torch.float)
        if how=='no shuffle': learn.dls = loaders(x, y, n_valid=32)
        if how=='a loader of torch':
            pairs = list(zip(x, y))
            make = lambda o, shuffle: torch.utils.data.DataLoader(o, batch_size=16, shuffle=shuffle)
            learn.dls = DataLoaders(make(pairs[:-32], True), make(pairs[-32:], False))
        sparsify_model(learn, .8, seed=seed)
        cb = DST(**presets['RigL'], seed=seed, sparse_compute={'0.weight':'rows'} if how=='sparse compute' else None)
        more = [CpuMixedPrecision()]*(how=='mixed precision')
        learn.fit(3, cbs=[cb, SparseCheckpoint(folder/'run', every=3), *more, *cbs])
        return learn,cb
    (tmp_path/'b').mkdir()
    with pytest.raises(MemoryError): run(tmp_path, cbs=[Die(14)])
    assert read_run(tmp_path/'run.pt')['position']['batch']==4
    end,mine = whole_state(*run(tmp_path, 5)),whole_state(*run(tmp_path/'b'))
    for k in mine: assert agree(mine[k], end[k]), k

def test_bfloat16(tmp_path):
    def make(seed):
        model = mlp((20,32,4), seed=seed).bfloat16()
        sparsify_model(model, .8, seed=seed)
        opt = torch.optim.AdamW(model.parameters(), lr=.01)
        return model,opt,DynamicSparseTraining(model, opt, 40, **presets['RigL'], seed=seed)
    def train(model, opt, n):
        for _ in range(n):
            opt.zero_grad()
            model(torch.randn(8, 20).bfloat16()).square().mean().backward()
            opt.step()
    mine = make(0)
    train(*mine[:2], 6)
    save_run(tmp_path/'a.pt', *mine)
    train(*mine[:2], 10)
    other = make(1)
    load_run(tmp_path/'a.pt', *other)
    train(*other[:2], 10)
    assert agree(snapshot(*mine), snapshot(*other))

# Stopped at any batch

kinds = dict(masked=[], linear=['3.weight','6.weight'], conv=['0.weight'])
every_batch = [(kind, n_acc) for kind in kinds for n_acc in (1,2,3)]

def conv_net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2,6,3,padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96,16), nn.ReLU(), nn.Dropout(.1), nn.Linear(16,4))
    sparsify_model(model, .8, seed=seed)
    return model

def conv_parts(kind, seed, n, **kwargs):
    model = conv_net(seed)
    opt = torch.optim.AdamW(model.parameters(), lr=.01)
    if kinds[kind]: sparse_compute(model, None, opt, plan={k:'rows' for k in kinds[kind]})
    return model,opt,DynamicSparseTraining(model, opt, n, **{**RigL_presets, 'batches_per_update':2, 'stop_pct':1., **kwargs}, seed=seed)

def accumulate(model, opt, n_acc, i, n, set_to_none=True, after=lambda i: None):
    "Batches `i` to `n`, a step after every `n_acc`"
    while i<n:
        model(torch.randn(5,2,4,4)).square().mean().backward()
        i += 1
        if i%n_acc==0:
            opt.step()
            opt.zero_grad(set_to_none=set_to_none)
        after(i)

@pytest.mark.parametrize('kind,n_acc,set_to_none', [*[(*o,True) for o in every_batch], ('linear',3,False), ('conv',2,False)])
def test_a_plain_loop_goes_on_from_any_batch(kind, n_acc, set_to_none, tmp_path):
    "Law 6, also between the batches of a step in which an update is due: what it will read is in the file"
    n = 4*n_acc+4
    mine = conv_parts(kind, 0, n)
    accumulate(*mine[:2], n_acc, 0, n, set_to_none, lambda i: save_run(tmp_path/str(i), *mine, position=i, grads=True))
    assert mine[2].n_updates>1
    for i in range(1, n):
        other = conv_parts(kind, 3, n)
        accumulate(*other[:2], n_acc, load_run(tmp_path/str(i), *other), n, set_to_none)
        assert agree(snapshot(*mine), snapshot(*other)), i

class Copy(Callback):
    "Keep the file of each batch"
    order = 101
    def __init__(self, path): self.path = path
    def after_batch(self):
        if self.training and self.path.exists(): shutil.copy(self.path, self.path.with_name(f'{self.train_iter}.pt'))

def conv_fit(path, compute, n_acc, seed=0, cbs=()):
    "18 batches; fastai sets gradients to zero in place"
    random.seed(seed)
    g = torch.Generator().manual_seed(0)
    pairs = list(zip(torch.randn(36,2,4,4, generator=g), torch.randn(36,4, generator=g)))
    dls = DataLoaders.from_dsets(pairs, pairs[:4], bs=4, shuffle=True, num_workers=0, device='cpu')
    learn = Learner(dls, conv_net(seed), nn.MSELoss(), opt_func=Adam, path=path.parent)
    cb = DST(**{**RigL_presets, **every4, 'stop_pct':1.}, seed=seed, sparse_compute=compute)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, .01, cbs=[cb, GradientAccumulation(4*n_acc), SparseCheckpoint(path, every=1), *cbs])
    return whole_state(learn, cb)

def goes_on_from(folder, compute, n_acc, stops):
    "Does a fit end as it did, from each of `stops`?"
    (folder/'whole').mkdir()
    whole = conv_fit(folder/'whole'/'run.pt', compute, n_acc, cbs=[Copy(folder/'whole'/'run.pt')])
    assert whole['engine']['n_updates']>2
    for i in stops:
        if i==9: continue  # an epoch ends
        shutil.copy(folder/'whole'/f'{i}.pt', folder/'run.pt')
        assert agree(whole, conv_fit(folder/'run.pt', compute, n_acc, 3)), i

@pytest.mark.parametrize('kind,n_acc,stops', [(k,3,(3,4,5,7)) for k in kinds]+[pytest.param(*o, range(1,18), marks=pytest.mark.full) for o in every_batch])
def test_a_fit_goes_on_from_any_batch(kind, n_acc, stops, tmp_path): goes_on_from(tmp_path, {k:'rows' for k in kinds[kind]} or None, n_acc, stops)

def test_a_fit_that_measured_goes_on_from_any_batch(tmp_path, monkeypatch):
    "The plan comes from the file, and weights are stored so before their gradients are read"
    monkeypatch.setattr('fastsparse.model.plan._layer_speedup', lambda *args: 2.)
    goes_on_from(tmp_path, True, 3, (4,5))

@pytest.mark.parametrize('kind,other', [('masked','linear'),('linear','masked'),('linear','conv'),('conv','masked')])
def test_gradients_go_on_however_weights_are_stored(kind, other, tmp_path):
    "A file of live weights goes on masked, and the other way: the next update reads the same gradient"
    mine,new = conv_parts(kind, 0, 10),conv_parts(other, 3, 10)
    accumulate(*mine[:2], 2, 0, 5)
    load_run(save_run(tmp_path/'a.pt', *mine, grads=True), *new)
    for a,b in zip(mine[2].slots, new[2].slots):
        assert a.p.grad[~a.mask].any()
        torch.testing.assert_close(a.p.grad, b.p.grad)
    accumulate(*new[:2], 2, 5, 10)

@pytest.mark.parametrize('kind', kinds)
def test_an_update_by_hand_goes_on_between_its_batches(kind, tmp_path):
    "Gradients still arrive dense after the load"
    mine,new = [conv_parts(kind, i, 100, batches_per_update=50) for i in (0,3)]
    mine[2].expect_update()
    accumulate(*mine[:2], 9, 0, 1)
    load_run(save_run(tmp_path/'a.pt', *mine, grads=True), *new)
    for model,opt,engine in (mine,new):
        torch.manual_seed(0)
        accumulate(model, opt, 9, 1, 2)
        engine.update(5)
    assert mine[2].n_updates==1 and agree(snapshot(*mine), snapshot(*new))

@pytest.mark.parametrize('kind', ['linear','conv'])
def test_gradients_that_were_set_to_zero_are_forgotten(kind):
    "In place and without a step, as after an update that replaced it: what comes next starts anew, whatever the tensors' versions"
    model,opt,engine = conv_parts(kind, 0, 100, batches_per_update=50)
    for version in range(4):
        engine.expect_update()
        accumulate(model, opt, 9, 0, 1)
        live = [s.handler.trained for s in engine.slots]
        for p in live: p.grad = p.grad.clone()
        for p in live:
            for _ in range(version+1): p.grad.zero_()
        assert not any(s.p.grad.any() for s in engine.slots)
        torch.manual_seed(version)
        accumulate(model, opt, 9, 0, 1)
        seen = [s.p.grad.clone() for s in engine.slots]
        opt.zero_grad()
        torch.manual_seed(version)
        accumulate(model, opt, 9, 0, 1)
        assert all(torch.equal(a, s.p.grad) for a,s in zip(seen, engine.slots))
        opt.zero_grad()

# The best model that is sparse enough

def test_trackers_wait_for_the_sparsity(tmp_path):
    "The first epochs are the best by far, and the saved model has the sparsity all the same"
    class Worse(Callback):
        "A validation loss that only grows"
        order = 55
        def after_epoch(self): self.learn.recorder.values[-1][1] = float(self.epoch)
    for n,wait in ((6,True),(6,False)):
        learn = small_learner(tmp_path)
        learn.fit(n, cbs=[DST(**presets['GMP'], seed=0), SaveModelCallback(), EarlyStoppingCallback(patience=2), Worse()]+[WaitForSparsity()]*wait)
        sparsity = 1-sum(int(o.mask.sum()) for o in masked_params(learn.model))/sum(o.p.numel() for o in masked_params(learn.model))
        assert (abs(sparsity-.8)<2e-3)==wait

def test_waiting_where_there_is_nothing_to_wait_for(tmp_path):
    "Models are saved from the first epoch on, and nothing is said"
    learn = small_learner(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        learn.fit(1, cbs=[SaveModelCallback(), WaitForSparsity()])
    assert (tmp_path/'models/model.pth').exists()

def test_a_sparsity_that_never_comes_is_told_of(tmp_path):
    class Stop(Callback):
        order = 90
        def after_epoch(self): raise CancelFitException
    learn = small_learner(tmp_path)
    with pytest.warns(UserWarning, match='never reached'): learn.fit(4, cbs=[DST(**presets['GMP'], seed=0), SaveModelCallback(), WaitForSparsity(), Stop()])

def test_other_callbacks_see_each_batch_once(tmp_path):
    "Those that were done before the file was written too"
    class Count(Callback):
        order = 300
        def __init__(self): self.seen = []
        def before_batch(self): self.seen.append('before')
        def after_batch(self): self.seen.append('after')
    count,case = Count(),'RigL-sgd'
    with pytest.raises(MemoryError): one_fit(tmp_path, case, cbs=[Die(6)], n=1, every=5)
    one_fit(tmp_path, case, cbs=[count], n=1, every=5)
    assert count.seen==['before','after']*(3+2)  # three of eight are left, and two to validate

def test_an_optimizer_with_its_parameters_in_another_order_is_refused(tmp_path):
    "Equal shapes would let each layer take another's moments"
    def make(way):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(16,16,bias=False), nn.Tanh(), nn.Linear(16,16,bias=False))
        sparsify_model(m, .8, seed=0)
        return m,torch.optim.Adam(list(m.parameters())[::way], lr=.01)
    m,opt = make(1)
    m(torch.ones(2,16)).sum().backward()
    opt.step()
    save_run(tmp_path/'run', m, opt)
    with pytest.raises(ValueError, match='the optimizer in the file has 0.weight where this one has 2.weight'): load_run(tmp_path/'run', *make(-1))
    load_run(tmp_path/'run', *make(1))

def test_other_optimizers_and_plain_parameters_are_checked_too(tmp_path):
    "Biases of one shape in another order; a second optimizer, of another kind or in another order"
    def make(biases=1, weights=1, kind=torch.optim.Adam):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(8,8), nn.Tanh(), nn.Linear(8,8))
        sparsify_model(m, .5, seed=0)
        return m,torch.optim.Adam([m[0].bias,m[2].bias][::biases]),kind([m[0].weight,m[2].weight][::weights])
    m,biases,second = make()
    m(torch.ones(2,8)).sum().backward()
    for o in (biases,second): o.step()
    save_run(tmp_path/'run', m, biases, second=second)
    m,biases,same = make()
    load_run(tmp_path/'run', m, biases, second=same)
    assert agree(same.state_dict(), second.state_dict())
    for kwargs,said in ((dict(biases=-1), 'has 0.bias where this one has 2.bias'), (dict(weights=-1), 'has 0.weight where this one has 2.weight'),
        (dict(kind=torch.optim.SGD), 'the optimizer in the file: Adam; here: SGD')):
        m,biases,second = make(**kwargs)
        with pytest.raises(ValueError, match=said): load_run(tmp_path/'run', m, biases, second=second)

def language_learner():
    "A loader that goes on shuffling its documents from epoch to epoch, and a model whose hidden state goes on from batch to batch"
    from fastai.text.all import AWD_LSTM,awd_lstm_lm_config,CrossEntropyLossFlat,get_language_model,LMDataLoader,ModelResetter,RNNCallback
    torch.manual_seed(0)
    docs = [torch.randint(20, (50+i,), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    train,valid = [LMDataLoader([(o,) for o in docs], bs=4, seq_len=16, shuffle=s) for s in (True,False)]
    model = get_language_model(AWD_LSTM, 20, {**awd_lstm_lm_config, 'emb_sz':16, 'n_hid':24, 'n_layers':2})
    learn = Learner(DataLoaders(train, valid), model, loss_func=CrossEntropyLossFlat(), cbs=[ModelResetter(), RNNCallback()])
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = lambda *args: None
    return learn

class DieAt(Callback):
    order,run_valid = 200,False
    def __init__(self, at): self.at = at
    def after_batch(self):
        if self.learn.train_iter==self.at: raise MemoryError('dead')

@pytest.mark.parametrize('every,at', [(None,15),(None,24),(1,5),(2,17)])
def test_a_language_model_goes_on_bit_for_bit(tmp_path, every, at):
    def run(name, seed, *cbs):
        learn = language_learner()
        torch.manual_seed(seed)
        random.seed(seed)
        learn.fit_sparse(3, .8, 1e-2, method='rigl', batches_per_update=3, seed=0, cbs=[SparseCheckpoint(tmp_path/name, every=every), *cbs])
        return learn
    whole = run('whole', 1)
    with pytest.raises(MemoryError): run('part', 1, DieAt(at))
    part = run('part', 2)
    for (k,a),b in zip(whole.model.state_dict().items(), part.model.state_dict().values()): assert torch.equal(a, b), k
    assert whole.recorder.values==part.recorder.values
