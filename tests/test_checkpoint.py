"Files of runs: whole at any moment, refused before anything changed where they don't fit, and what SparseCheckpoint keeps"
import copy,os,pytest,random,re,signal,time,warnings
from adversary import other_bytes
from fastai.callback.core import CancelFitException,Callback
from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
from fastai.learner import Recorder
from fastai.optimizer import Adam
from fastai_data import momentum_sgd
from fastsparse.all import *
from fastsparse.save.disk import alone_in
from fastsparse.save.files import seal
from fastsparse.save.checkpoint import _cb_state,_set_cb_state,WaitForSparsity
from fastsparse.save.run_file import _word,collect_run,plain,random_state,read_run,set_random_state
from helpers import *
from test_resume import Dead,Die,one_fit,presets,small_learner

DST = DynamicSparseTrainingCallback

def test_early_stopping_has_finished_and_a_stop_from_outside_has_not(tmp_path):
    class Stop(Callback):
        def after_epoch(self): raise CancelFitException
    one_fit(tmp_path, 'RigL-sgd', cbs=[Stop()])
    assert not (tmp_path/'RigL-sgd.pt').exists() or not read_run(tmp_path/'RigL-sgd.pt')['finished']
    one_fit(tmp_path, 'SET-sgd', cbs=[EarlyStoppingCallback(comp=lambda a,b: False, patience=2)], n=5)
    assert read_run(tmp_path/'SET-sgd.pt')['finished']

def test_another_run_is_refused_before_anything_changed(tmp_path):
    "Another length, model, optimizer or method: the error names both and the ways out"
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-sgd', stop=10)
    saved = (tmp_path/'RigL-sgd.pt').read_bytes()
    def attempt(n=3, sizes=(64,16,12,10), opt=momentum_sgd, settings=presets['RigL'], sparsity=.8, **kwargs):
        learn = small_learner(tmp_path, opt, 5, sizes)
        sparsify_model(learn, sparsity, seed=5)
        before = {k:v.clone() for k,v in learn.model.state_dict().items()}
        cbs = [DST(**settings), SparseCheckpoint(tmp_path/'RigL-sgd')]
        with pytest.raises(ValueError, match='resume=False|start a new run in another file|begin a new run') as e: learn.fit(n, cbs=cbs, **kwargs)
        assert agree(before, dict(learn.model.state_dict())) and (tmp_path/'RigL-sgd.pt').read_bytes()==saved
        return str(e.value)
    assert 'n_epoch is 3' in attempt(n=4)
    assert 'shape (16, 64) in the file' in attempt(sizes=(64,20,12,10))
    assert 'steps of the optimizer' in attempt(opt=Adam)
    assert 'the state is of a run with' in attempt(settings=presets['SET'])
    assert 'start_epoch' in attempt(start_epoch=1)
    assert re.search(r'the sparsity is 0\.80.*, and 0\.(90|89).* here', attempt(sparsity=.9))

def test_fits_do_not_share_a_path(tmp_path):
    "A second one is refused by the process of the first, before either has written; one that died holds nothing, and its callback may go into another learner"
    with alone_in(tmp_path/'RigL-sgd.pt'), pytest.raises(ValueError, match=f"RigL-sgd.pt' is being written by process {os.getpid()}: wait"):
        one_fit(tmp_path, 'RigL-sgd')
    assert not os.listdir(tmp_path)
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-sgd', stop=10)
    with alone_in(tmp_path/'RigL-sgd.pt'): pass
    learn = small_learner(tmp_path)
    learn.add_cbs([SparseCheckpoint(tmp_path/'own'), Die(3)])
    with pytest.raises(Dead): learn.fit(1)
    small_learner(tmp_path, cbs=SparseCheckpoint(tmp_path/'own')).fit(1)
    with alone_in(tmp_path/'own.pt'): pass

def test_a_finished_run_of_another_model_is_kept(tmp_path):
    "The file of a run that has ended is not written over by a fit of another model, unless resume=False says so"
    path = tmp_path/'run.pt'
    small_learner(tmp_path, cbs=SparseCheckpoint(path)).fit(1)
    saved = path.read_bytes()
    with pytest.raises(ValueError, match='is of another run.*another path, or start anew with resume=False'):
        small_learner(tmp_path, sizes=(64,20,12,10), cbs=SparseCheckpoint(path)).fit(1)
    assert path.read_bytes()==saved
    small_learner(tmp_path, sizes=(64,20,12,10), cbs=SparseCheckpoint(path, resume=False)).fit(1)

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

def test_a_file_is_looked_for_before_other_callbacks_begin():
    "Right after fastai's TrainEvalCallback, which has -10"
    assert SparseCheckpoint('run').order==-9

class Halved(Callback):
    def before_fit(self): self.model.half()

def test_a_model_that_changes_when_the_fit_begins_is_no_longer_that_of_the_file(tmp_path):
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-sgd', stop=10)
    with pytest.raises(ValueError, match='float32 .* in the file, and torch.float16'): one_fit(tmp_path, 'RigL-sgd', cbs=[Halved()])

def test_a_model_without_memory_takes_nothing(tmp_path):
    sparsify_model(m := nn.Sequential(nn.Linear(4,4)), .5, seed=0)
    files = save_sparse(m, tmp_path/'a.safetensors'),save_run(tmp_path/'b.pt', m)
    with torch.device('meta'): empty = nn.Sequential(nn.Linear(4,4))
    for load in (lambda: load_sparse(empty, files[0]), lambda: load_run(files[1], empty)):
        with pytest.raises(ValueError, match='0.weight is on the meta device'): load()

def test_gradients_are_kept_if_asked_for():
    (m := nn.Linear(2,2))(torch.ones(2)).sum().backward()
    assert collect_run(m)['grads'] is None and {*collect_run(m, grads=True)['grads']}=={'weight','bias'}

def test_a_recorder_comes_back_as_it_was(tmp_path):
    "Its rows are of fastcore's type, its numbers are numbers"
    (learn := small_learner(tmp_path)).fit(2)
    _set_cb_state(new := Recorder(), _cb_state(learn.recorder))
    for k in ('lrs','iters','values'):
        a,b = getattr(new, k),getattr(learn.recorder, k)
        assert [*a]==[*b] and [type(o) for o in a]==[type(o) for o in b] and len(a)

def test_the_last_are_kept(tmp_path):
    "`keep=2`: the file before is another run to go on from"
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-sgd', stop=10, keep=2)
    assert sorted(os.listdir(tmp_path))==['RigL-sgd.1.pt','RigL-sgd.pt']
    assert [read_run(tmp_path/f)['position']['train_iter'] for f in ('RigL-sgd.pt','RigL-sgd.1.pt')]==[9,8]

def parts(seed=0, opt=torch.optim.AdamW, sparsity=.8, sizes=(20,32,4), n_steps=40, dtype=torch.float, **settings):
    model = mlp(sizes, seed=seed, dtype=dtype)
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

class Stubborn:
    "An object that writes a part of its state, then raises"
    n = 0
    def state_dict(self): return dict(n=self.n)
    def load_state_dict(self, state):
        self.n = state['n']
        if self.n==7: raise RuntimeError('never')

def test_others_are_checked_before_anything_changes(tmp_path):
    "An average of another shape, an object that raises, another class: all that load_run was given is as it was, and the text names the one"
    def make(seed, sizes=(20,32,4), n=0):
        model,opt,dst = parts(seed)
        stubborn = Stubborn()
        stubborn.n = n
        steps(model, opt, 3)
        return (model,opt,dst),dict(sched=torch.optim.lr_scheduler.ExponentialLR(opt, .9), average=torch.optim.swa_utils.AveragedModel(mlp(sizes, seed)),
            gen=torch.Generator().manual_seed(seed), own=stubborn)
    mine,others = make(0, n=7)
    save_run(tmp_path/'a.pt', *mine, **others)
    def state(o): return o.get_state() if isinstance(o, torch.Generator) else o.state_dict()
    def states(its, others): return snapshot(*its),copy.deepcopy({k:state(o) for k,o in others.items()}),random_state()
    for change,what in [({},'own doesn.t take its state.*never'), (dict(average=torch.optim.swa_utils.AveragedModel(mlp((20,8,4)))),'(?s)average doesn.t take.*size mismatch'),
        (dict(sched=torch.Generator()),'sched is a ExponentialLR in the file, and a Generator here'), (dict(gen=Stubborn()),'gen is a Generator in the file')]:
        its,theirs = make(1)
        theirs |= change
        before = states(its, theirs)
        with pytest.raises(ValueError, match=what) as e: load_run(tmp_path/'a.pt', *its, **theirs)
        assert 'damaged' not in str(e.value) and agree(before, states(its, theirs))

@pytest.mark.filterwarnings('ignore')
def test_a_sharded_model_is_told_what_to_write(tmp_path):
    "Before the engine's state is asked for, which needs all ranks"
    fsdp,dist = pytest.importorskip('torch.distributed.fsdp'),torch.distributed
    model,opt,dst = parts()
    dst.remove()
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh('cpu', (1,)))
        with pytest.raises(ValueError, match='0.weight is sharded over ranks.*torch.distributed.checkpoint.*from all ranks'): save_run(tmp_path/'a.pt', model, None, dst)
    finally: dist.destroy_process_group()
    assert not (tmp_path/'a.pt').exists()

def test_a_dense_file_is_not_put_into_a_sparse_model(tmp_path):
    "It would throw trained weights away; the ways out are named"
    save_run(tmp_path/'a.pt', mlp((20,32,4)))
    model,*_ = parts()
    with pytest.raises(ValueError, match='unsparsify.*prune_magnitude.*rewind'): load_run(tmp_path/'a.pt', model)
    unsparsify(model)
    load_run(tmp_path/'a.pt', model)

class Own(nn.Module):
    "With a bool buffer beside another of its shape, which is no mask"
    def __init__(self):
        super().__init__()
        self.body = mlp((12,16,3))
        self.register_buffer('pos', torch.randn(3))
        self.register_buffer('pos_mask', torch.tensor([True,False,True]))
    def forward(self, x): return self.body(x)

class Tied(nn.Module):
    "Two layers with one weight"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Linear(12, 12),nn.Linear(12, 12),nn.Linear(12, 3)
        self.b.weight = self.a.weight
    def forward(self, x): return self.c(self.b(self.a(x)))

@pytest.mark.parametrize('make', [Tied, lambda: mlp((12,16,3)), lambda: nn.Sequential(*[nn.Linear(12, 12)]*2), Own])
def test_a_dense_model_takes_a_sparse_file(make, tmp_path):
    "Tied weights and users' own masks included; masks are enforced afterwards, outputs equal, and torch reads the file alone"
    model,new,x = make(),make(),torch.randn(2, 12)
    sparsify_model(model, .7, seed=0)
    path = save_run(tmp_path/'a.pt', model)
    load_run(path, new)
    assert agree(dict(model.state_dict()), dict(new.state_dict())) and torch.equal(model(x), new(x))
    opt = torch.optim.SGD(new.parameters(), .1)
    new(x).sum().backward()
    opt.step()
    assert_dead(new)
    assert [o.name for o in masked_params(new)]==[o.name for o in masked_params(model)] and torch.load(path, weights_only=True)['format']=='fastsparse run'

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

@pytest.mark.parametrize('schema', [torch.ones(2), torch.tensor(1), [], '1', None, True, 99])
def test_a_schema_is_a_number_that_is_known(tmp_path, schema):
    "Whatever stands in its place is refused by name"
    path = save_run(tmp_path/'a.pt', *parts())
    torch.save(dict(torch.load(path), schema=schema), path)
    seal(path, _word)
    with pytest.raises(ValueError, match='a.pt.* has schema'): read_run(path)

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
        path.write_bytes(other_bytes(whole, rng))
        with pytest.raises(ValueError, match="a.pt' is"): load_run(path, model, *rest)
    assert agree(before, dict(model.state_dict()))

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

@pytest.mark.parametrize('n,kind', [(15,small), pytest.param(100,small, marks=pytest.mark.full), pytest.param(20,large, marks=pytest.mark.full)],
    ids=['15','100','20 of 200 MB'])
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

def test_trackers_wait_for_the_sparsity(tmp_path):
    "The first epochs are the best by far, and the saved model has the sparsity all the same; without masks nothing waits, and what never comes is said"
    class Worse(Callback):
        "A validation loss that only grows"
        order = 55
        def after_epoch(self): self.learn.recorder.values[-1][1] = float(self.epoch)
    class Stop(Callback):
        order = 90
        def after_epoch(self): raise CancelFitException
    for wait in (True,False):
        learn = small_learner(tmp_path)
        learn.fit(6, cbs=[DST(**presets['GMP'], seed=0), SaveModelCallback(), EarlyStoppingCallback(patience=2), Worse()]+[WaitForSparsity()]*wait)
        sparsity = 1-sum(int(o.mask.sum()) for o in masked_params(learn.model))/sum(o.p.numel() for o in masked_params(learn.model))
        assert (abs(sparsity-.8)<2e-3)==wait
    (tmp_path/'models/model.pth').unlink()
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        small_learner(tmp_path).fit(1, cbs=[SaveModelCallback(), WaitForSparsity()])
    assert (tmp_path/'models/model.pth').exists()
    cbs = [DST(**presets['GMP'], seed=0), SaveModelCallback(), WaitForSparsity(), Stop()]
    with pytest.warns(UserWarning, match='below the requested one'): small_learner(tmp_path).fit(4, cbs=cbs)

def test_what_resume_says(tmp_path):
    "True needs a file that has not finished, False starts anew; a finished run starts anew too, and so does one that was never there where there is a default"
    with pytest.raises(FileNotFoundError, match='does not exist'): one_fit(tmp_path, 'RigL-sgd', resume=True)
    with pytest.raises(Dead): one_fit(tmp_path, 'RigL-sgd', stop=10)
    for seed,resume in ((2,False), (1,None)):
        learn,_ = one_fit(tmp_path, 'RigL-sgd', seed=seed, **({} if resume is None else dict(resume=resume)))
        assert len(learn.recorder.losses)==24 and read_run(tmp_path/'RigL-sgd.pt')['finished']
    with pytest.raises(ValueError, match='has finished'): one_fit(tmp_path, 'RigL-sgd', resume=True)
    def again(): return small_learner(tmp_path, cbs=SparseCheckpoint(tmp_path/'run')).fit(1)
    again()
    with pytest.warns(UserWarning, match='has finished, so this fit starts at epoch 0'): again()
    assert load_run(tmp_path/'a.pt', default=0)==0
    with pytest.raises(FileNotFoundError, match='default='): load_run(tmp_path/'a.pt')

def in_order(biases=1, weights=1, second=torch.optim.Adam):
    "Equal shapes, so that each layer could take another's moments"
    m = mlp((8,8,8))
    sparsify_model(m, .5, seed=0)
    return m,torch.optim.Adam([m[0].bias,m[2].bias][::biases]),second([m[0].weight,m[2].weight][::weights])

@pytest.mark.parametrize('kwargs,said', [(dict(biases=-1),'has 0.bias where this one has 2.bias'),
    (dict(weights=-1),'has 0.weight where this one has 2.weight'),
    (dict(second=torch.optim.SGD),'the optimizer in the file: Adam; here: SGD'), ({},None)])
def test_optimizers_of_another_kind_or_order_are_refused(kwargs, said, tmp_path):
    m,biases,second = in_order()
    m(torch.ones(2,8)).sum().backward()
    for o in (biases,second): o.step()
    save_run(tmp_path/'run', m, biases, second=second)
    m,biases,same = in_order(**kwargs)
    if said:
        with pytest.raises(ValueError, match=said): load_run(tmp_path/'run', m, biases, second=same)
    else:
        load_run(tmp_path/'run', m, biases, second=same)
        assert agree(same.state_dict(), second.state_dict())

refused = dict(shape=dict(sizes=(20,30,4)), names=dict(sizes=(20,32,32,4)), optimizer=dict(opt=torch.optim.SGD), method=SET_presets(batches_per_update=4),
    times=dict(updates=[3,5]), length=dict(n_steps=50), type=dict(dtype=torch.double))

@pytest.mark.parametrize('part', ['opt','engine','grads','random'])
@pytest.mark.parametrize('live', [False,True])
def test_a_load_that_fails_at_any_part_leaves_all_as_it_was(part, live, tmp_path):
    "An object that refuses what fits, a gradient of another shape, a random state at no place: before or after others were loaded"
    mine = parts()
    steps(*mine[:2], 6)
    save_run(path := tmp_path/'a.pt', *mine, grads=True)
    run = torch.load(path)
    if part=='grads': run['grads']['0.weight'] = dict(grad=torch.ones(2))
    if part=='random': run['random']['numpy']['state']['pos'] = 10**9
    torch.save(run, path)
    seal(path, _word)
    other = parts(1)
    steps(*other[:2], 2)
    if live: go_live(*other[:2])
    stubborn = dict(opt=other[1], engine=other[2]).get(part)
    def refuse(state):
        del stubborn.load_state_dict
        raise RuntimeError('not this one')
    if stubborn is not None: stubborn.load_state_dict = refuse
    before,rng = copy.deepcopy(snapshot(*other)),random_state()
    with pytest.raises(ValueError, match='a.pt'): load_run(path, *other)
    assert agree(before, copy.deepcopy(snapshot(*other))) and agree(rng, random_state())

def numpys(): return [getattr(np.random, o) for o in ('MT19937','PCG64','PCG64DXSM','Philox','SFC64')]

@pytest.mark.parametrize('kind', numpys())
@pytest.mark.parametrize('then', numpys()[:2])
def test_numpys_generator_of_any_kind_goes_on(kind, then, tmp_path):
    "Saved, and put back in the place of the same or another one; files of the first versions hold a tuple"
    was = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(3))
        np.random.randn(5)
        save_run(path := tmp_path/'a.pt', *(mine := parts()))
        drawn = [np.random.randn(3).tolist(), np.random.randint(2**31, size=3).tolist()]
        np.random.set_bit_generator(then(4))
        load_run(path, *mine)
        assert drawn==[np.random.randn(3).tolist(), np.random.randint(2**31, size=3).tolist()] and type(np.random.get_bit_generator()) is kind
        np.random.set_bit_generator(np.random.MT19937(5))
        old = plain(dict(random_state(), numpy=np.random.get_state()))
        a = np.random.randn()
        set_random_state(old)
        assert np.random.randn()==a
    finally: np.random.set_bit_generator(was)

@pytest.mark.parametrize('kind', refused)
def test_a_refused_load_leaves_all_as_it_was(kind, tmp_path):
    "Law 10: model, optimizer, engine and random states, bit for bit"
    mine = parts()
    steps(*mine[:2], 6)
    save_run(tmp_path/'a.pt', *mine)
    other = parts(1, **refused[kind])
    if kind!='type': steps(*other[:2], 2)
    before,rng = snapshot(*other),random_state()
    with pytest.raises(ValueError, match='as in the run that was saved|settings of the run|as long as the run'): load_run(tmp_path/'a.pt', *other)
    assert agree(before, snapshot(*other)) and agree(rng, random_state())
