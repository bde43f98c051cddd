"One more of the same: copies train sparse and averages are those of dense weights, an export holds all of a learner in fewer bytes, and nothing is lost on the way"
import base64,copy,math,pickle,pytest,warnings,zlib
from fastai.basics import Callback,CrossEntropyLossFlat,Datasets,Learner,load_learner,set_seed
from fastsparse.all import *
from functools import partial
from helpers import *
from test_weights import batch,copied_by,optimizers,pickled,product,started,stays_dead,step,tasks,used_by
from torch.optim.swa_utils import AveragedModel,get_ema_avg_fn,get_ema_multi_avg_fn

t = torch.optim

# --- copies, of a whole or of a part, which train without any forward of the whole

@pytest.mark.parametrize('used', used_by)
@pytest.mark.parametrize('copied', copied_by)
def test_a_copy_trains_as_sparse_as_the_original(copied, used):
    "Before and after training, with another optimizer each time, whichever part is called; what happens to the one does not reach the other"
    m = tasks()
    for opt in ('sgd','fastai_adam'):
        c,was = copied_by[copied](m),[p.detach().clone() for p in m.parameters()]
        assert len(masked_params(c))==7 and same_masks(masks_of(m), masks_of(c))
        stays_dead(c, optimizers[opt](list(c.parameters())), 3, used_by[used])
        assert copied in ('original','by_parts') or all(map(torch.equal, was, m.parameters()))
        if opt=='sgd': stays_dead(m, optimizers[opt](list(m.parameters())), 2, used_by['method'])

def test_a_model_and_its_optimizer_are_copied_together():
    m = tasks()
    own = optimizers['adam'](m.parameters())
    stays_dead(m, own, 3, used_by['parts'])
    c,opt = copy.deepcopy((m, own))
    stays_dead(c, opt, 3, used_by['parts'])

@pytest.mark.parametrize('how', ['deepcopy','pickle','file'])
def test_what_is_removed_from_one_stays_with_the_other(how):
    "`remove` of the original does not free a copy, `unsparsify` of the copy does, also before its first forward; a copy of a freed model is free"
    m = mlp()
    hooks = sparsify_model(m, .6, seed=0)
    c,d = copied_by[how](m),copied_by[how](m)
    unsparsify(d)
    hooks.remove()
    for o in (d, copied_by[how](m)):
        dead = [(p,p.eq(0)) for p in o.parameters() if p.ndim>1]
        train(o, t.SGD(o.parameters(), lr=.1), 1, *data(o))
        assert all(p[at].any() for p,at in dead)
    stays_dead(c, t.Adam(c.parameters(), lr=.01))
    sparsify_model(d, .5, mask_init='magnitude')
    stays_dead(d, t.Adam(d.parameters(), lr=.01))

def test_what_is_frozen_in_a_copy_is_enforced_once_it_trains():
    m = tasks()
    m.body.requires_grad_(False)
    c = copy.deepcopy(m)
    c.body.requires_grad_(True)
    opt = optimizers['sgd'](c.parameters())
    for _ in range(2):
        used_by['method'](c)
        opt.step()
        assert_dead(c, opt)

@pytest.mark.parametrize('way', [copy.deepcopy, pickled])
def test_the_copy_of_any_tied_layer_is_sparse(way):
    "The mask is a buffer of the first of them, and goes along with the others"
    m = nn.Sequential(nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16))
    m[2].weight = m[0].weight
    sparsify_model(m, .8, seed=1)
    for layer in (m[0], m[2]):
        c = way(layer)
        opt = t.SGD(c.parameters(), .1, momentum=.9)
        for _ in range(3):
            c(torch.randn(8,16)).square().mean().backward()
            opt.step()
        assert int(c.weight.count_nonzero())<=round(.2*256) and c.weight.ne(layer.weight).any()

# --- averages, by hand and by torch, while the topology moves

class OfState:
    "timm's way: a copy whose whole state follows"
    begins_with_copy = False
    def __init__(self, m): self.inside = copy.deepcopy(m)
    @torch.no_grad()
    def update(self, m):
        for a,b in zip(self.inside.state_dict().values(), m.state_dict().values()):
            if a.is_floating_point() and a.ndim: a.copy_(.9*a+.1*b)

class OfParameters(OfState):
    "ema-pytorch's way, and a Polyak step of stable-baselines3: parameters of a copy, through `.data`"
    @torch.no_grad()
    def update(self, m):
        for a,b in zip(self.inside.parameters(), m.parameters(), strict=True):
            a.data.mul_(.9)
            torch.add(a.data, b.data, alpha=.1, out=a.data)

class OfLerp(OfState):
    @torch.no_grad()
    def update(self, m):
        for (_,a),(_,b) in zip(self.inside.named_parameters(), m.named_parameters()): a.data.lerp_(b.data, .1)

class OfShadows:
    "diffusers' way and torch_ema's: a list of tensors, which is written into the model for a while"
    begins_with_copy = False
    def __init__(self, m): self.shadows,self.m = [p.clone().detach() for p in m.parameters()],m
    @torch.no_grad()
    def update(self, m):
        for s,p in zip(self.shadows, m.parameters(), strict=True): s.sub_(.1*(s-p))
    @property
    def inside(self):
        new = plain_copy(self.m)
        with torch.no_grad():
            for p,s in zip(new.parameters(), self.shadows): p.data.copy_(s.data)
        return new

class OfTorch:
    begins_with_copy = True
    def __init__(self, m, **kwargs): self.average = AveragedModel(m, **kwargs)
    def update(self, m): self.average.update_parameters(m)
    @property
    def inside(self): return self.average.module

multi = dict(multi_avg_fn=get_ema_multi_avg_fn(.9))
averages = dict(state=OfState, parameters=OfParameters, lerp=OfLerp, shadows=OfShadows, torch=partial(OfTorch, **multi), torch_buffers=partial(OfTorch,
    use_buffers=True, **multi), one_by_one=partial(OfTorch, avg_fn=get_ema_avg_fn(.9), use_buffers=True))

def dense_values(m): return [v.detach().clone() for k,v in m.state_dict().items() if k.endswith(('weight','bias'))]

def averaged(kind, make, since=0, n=25):
    "A model whose topology moved, its average, and the average of its dense weights by hand"
    m,opt,_ = started(kind, 'sgd', .8)
    dst = DynamicSparseTraining(m, opt, 40, **RigL_presets(batches_per_update=4, stop_pct=1.), seed=0)
    for i in range(n):
        if i==since: average,hand = make(m),dense_values(m)
        step(m, opt, i)
        if i<since: continue
        average.update(m)
        first = i==since and average.begins_with_copy
        hand = [b if first else .9*a+.1*b for a,b in zip(hand, dense_values(m))]
    assert dst.n_updates>3
    return m,opt,average,hand

@pytest.mark.parametrize('kind,since,name', product(('masked','live'), (0,5), averages))
def test_an_average_is_that_of_the_dense_weights(kind, since, name):
    "Made before the first step or later, and used in any way; the run itself is as without it"
    m,_,average,hand = averaged(kind, averages[name], since)
    plain,x = mlp((12,32,4), dtype=torch.double),batch(99)[0]
    with torch.no_grad():
        for p,v in zip(plain.parameters(), hand): p.copy_(v)
    inside = average.inside
    for _ in range(2):
        for a,b in zip(dense_values(inside), hand): torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        torch.testing.assert_close(inside(x), plain(x), rtol=0, atol=1e-9)
        sparse_summary(inside), m(x)
    alone = averaged(kind, OfShadows, since)[0]
    assert all(torch.equal(a, b) for a,b in zip(dense_values(m), dense_values(alone)))

@pytest.mark.parametrize('way', [lambda m: m, copy.deepcopy, pickled])
@pytest.mark.parametrize('name', ['state','parameters','torch'])
def test_an_average_that_trains_is_sparse_again(name, way):
    "Its own masks hold from its first step on"
    inside = way(averaged('masked', averages[name])[2].inside)
    opt = t.SGD(inside.parameters(), lr=.1, momentum=.9)
    for i in range(3):
        step(inside, opt, i)
        assert_dead(inside, opt)
    assert [int(o.mask.sum()) for o in masked_params(inside)]!=[o.p.numel() for o in masked_params(inside)]

@pytest.mark.parametrize('change', [lambda c: [o.p.data.fill_(1.) for o in masked_params(c)],
    lambda c: [o.mask.copy_(o.mask.flip(0)) for o in masked_params(c)], lambda c: None])
def test_a_copy_is_left_alone_until_it_is_stepped(change):
    "Masks stay its own, and what is written to it stays, through forwards of both, though the original's topology moves"
    m,opt,_ = started('masked')
    c = copy.deepcopy(m)
    change(c)
    masks,values = masks_of(c),dense_values(c)
    for o in masked_params(m): o.mask.copy_(~o.mask)
    m(batch(0)[0]), c.state_dict(), sparse_summary(c), m.state_dict(), step(m, opt, 0)
    assert same_masks(masks, masks_of(c)) and all(map(torch.equal, values, dense_values(c)))

# --- what is saved of an average is what was measured

def written(average, way, path):
    "A network that has what was saved of `average` in one of the usual ways"
    new = mlp((12,32,4), dtype=torch.double)
    if way=='file':
        torch.save(average.state_dict(), path)
        load_sparse(new, path)
    elif way=='state_dict':
        sparsify_model(new, .8, seed=3)
        new.load_state_dict(average.state_dict())
    elif way=='save_sparse': load_sparse(new, save_sparse(average, path.with_suffix('.safetensors')))
    elif way=='run':
        save_run(path, average)
        load_run(path, new)
    elif way=='export': new = export_sparse(average, 'live', batch(99)[0])[0]
    elif way=='parts':
        sparsify_model(new, .8, seed=3)
        for a,b in zip(new, average): a.load_state_dict(b.state_dict())
    return new

@pytest.mark.parametrize('way', ['file','state_dict','parts','save_sparse','run','export'])
@pytest.mark.parametrize('name', ['state','parameters','torch'])
def test_what_is_saved_of_an_average_is_what_was_measured(tmp_path, name, way):
    "The masks in a file are those of its values, so that what is read computes the same, and keeps doing so in training mode; it lives where it isn't zero"
    inside,x = averaged('masked', averages[name], 5)[2].inside,batch(99)[0]
    values,masks = dense_values(inside),masks_of(inside)
    new = written(inside, way, tmp_path/'a.pt')
    assert any((o.p.ne(0)&~o.mask).any() for o in masked_params(inside))  # else nothing is tested
    for mode in (False,True): torch.testing.assert_close(new.train(mode)(x), inside.eval()(x), rtol=0, atol=1e-12)
    live = {k:int(v.count_nonzero()) for k,v in inside.named_parameters()}
    assert dict(zip((df := sparse_summary(inside).df).parameter, df.live)).items()>=live.items()
    if way!='export':
        assert all(o.mask.equal(o.p.ne(0)) for o in masked_params(new)) and sparse_summary(new).df.equals(df.assign(note=sparse_summary(new).df.note))
    assert all(map(torch.equal, values, dense_values(inside))) and same_masks(masks, masks_of(inside))

def test_the_state_of_a_copy_is_its_own_where_nothing_was_written():
    "A live weight that is zero lives in the file too, and what is written to the tensors of the state reaches the copy"
    m = started('masked')[0]
    c = copy.deepcopy(m)
    with torch.no_grad(): [o.p.mul_(0) for o in masked_params(c)]
    state = c.state_dict()
    assert all(state[f'{o.name}_mask'].data_ptr()==o.mask.data_ptr() for o in masked_params(c))
    assert all(state[f'{o.name}_mask'].equal(o.mask) for o in masked_params(m))

packages = dict(timm=lambda m: pytest.importorskip('timm.utils').ModelEmaV2(m, decay=.9),
    timm3=lambda m: pytest.importorskip('timm.utils').ModelEmaV3(m, decay=.9),
    ema_pytorch=lambda m: pytest.importorskip('ema_pytorch').EMA(m, beta=.9, update_after_step=0, update_every=1, inv_gamma=1e-9, power=1.),
    diffusers=lambda m: pytest.importorskip('diffusers.training_utils').EMAModel(m.parameters(), decay=.9, min_decay=.9),
    torch_ema=lambda m: pytest.importorskip('torch_ema').ExponentialMovingAverage(m.parameters(), decay=.9, use_num_updates=False))

class OfPackage:
    def __init__(self, name, m): self.average,self.model,self.begins_with_copy = packages[name](m),m,name in ('ema_pytorch','diffusers')
    def update(self, m):
        a = self.average
        a.step(m.parameters()) if hasattr(a, 'step') and hasattr(a,
            'copy_to') else a.update(*[] if hasattr(a, 'online_model') else [m.parameters()] if hasattr(a, 'copy_to') else [m])
    @property
    def inside(self):
        a = self.average
        if not hasattr(a, 'copy_to'): return getattr(a, 'module', None) or a.ema_model
        new = plain_copy(self.model)
        a.copy_to(new.parameters())
        return new

@pytest.mark.full
@pytest.mark.parametrize('kind', ['masked','live'])
@pytest.mark.parametrize('name', packages)
def test_averages_of_other_packages(name, kind):
    "Against those by hand, whose formulas they have"
    m,_,average,hand = averaged(kind, partial(OfPackage, name))
    for a,b in zip(dense_values(average.inside), hand): torch.testing.assert_close(a, b, rtol=0, atol=1e-6)

@pytest.mark.full
def test_a_polyak_step_of_stable_baselines():
    "A target network follows a sparse one"
    polyak = pytest.importorskip('stable_baselines3.common.utils').polyak_update
    (m,opt,_),target = started('masked'),mlp((12,32,4), dtype=torch.double)
    hand = [p.detach().clone() for p in target.parameters()]
    for i in range(4):
        step(m, opt, i)
        polyak(m.parameters(), target.parameters(), .1)
        hand = [.9*a+.1*b for a,b in zip(hand, dense_values(m))]
    for a,b in zip(target.parameters(), hand): torch.testing.assert_close(a, b)

# --- exports

def item(i): return torch.full((16,), float(i))
def target(i): return i%4

def learner(model, cbs=None):
    dls = Datasets(list(range(32)), [[item],[target]]).dataloaders(bs=8, num_workers=0)
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cbs)

def exported(learn, path, **kwargs):
    learn.export(path, **kwargs)
    return load_learner(path, **{k:v for k,v in kwargs.items() if k=='pickle_module'})
wide = partial(mlp, (16,200,200,4), act=nn.ReLU)
def same(a, b): return agree(dict(a.state_dict()), dict(b.state_dict()))

def sparse_learner(model=None, cbs=None):
    learn = learner(model or wide(), cbs)
    sparsify_model(learn.model, .9, seed=0)
    return learn

@pytest.mark.parametrize('dtype,kwargs', [(torch.float,{}), (torch.half,dict(pickle_protocol=4)), (torch.bfloat16,dict(pickle_module=pickle)),
    (torch.double,{})])
def test_an_export_comes_back_equal(tmp_path, dtype, kwargs):
    "And keeps the laws"
    learn = sparse_learner(wide(dtype=dtype))
    again = exported(learn, tmp_path/'sparse.pkl', **kwargs).model
    assert same(again, learn.model)
    x = torch.randn(3, 16, dtype=dtype)
    assert again.eval()(x).equal(learn.model.eval()(x))
    again.train()
    stays_dead(again, t.SGD(again.parameters(), .1))

def test_an_export_trains_on(tmp_path):
    learn = sparse_learner()
    again = exported(learn, tmp_path/'a.pkl')
    again.dls = learn.dls
    with again.no_bar(), again.no_logging(): again.fit(1, cbs=DynamicSparseTrainingCallback(**SET_presets(batches_per_update=2)))
    assert_dead(again.model)
    assert not same_masks(masks_of(again.model), masks_of(learn.model))

def test_the_learner_goes_on_as_if_nothing_had_been(tmp_path):
    def trained(export):
        set_seed(1)
        learn = sparse_learner()
        cb = DynamicSparseTrainingCallback(method='rigl', batches_per_update=2, seed=0)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, cbs=cb)
            before = [id(o) for o in (*learn.model.parameters(), *learn.model.buffers())]
            if export: learn.export(tmp_path/'a.pkl')
            assert before==[id(o) for o in (*learn.model.parameters(), *learn.model.buffers())]
            learn.fit(1, cbs=cb)
        return learn.model
    assert same(trained(True), trained(False))

class Keeper(Callback):
    "Holds a layer and a parameter of the model"
    def __init__(self, layer): self.layer,self.weight = layer,layer.weight

@pytest.mark.parametrize('with_opt', [False, True])
def test_an_export_shares_what_was_shared(tmp_path, with_opt):
    "And a frozen parameter stays so, with its own attributes"
    model = nn.Sequential(*wide(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[6].weight = model[5].weight
    learn = sparse_learner(model, Keeper(model[2]))
    model[0].weight.requires_grad_(False)
    model[0].weight.note = 'mine'
    if with_opt: learn.create_opt()
    again = exported(learn, tmp_path/'a.pkl')
    new = again.model
    assert same(new, model) and again.keeper.layer is new[2] and again.keeper.weight is new[2].weight and again.keeper.learn is again
    assert new[5].weight is new[6].weight and not new[0].weight.requires_grad and new[0].weight.note=='mine' and new[2].weight.requires_grad

class Uncopied:
    def __deepcopy__(self, memo): raise TypeError('I am the only one')

@pytest.mark.parametrize('odd', ['written','nan','layout','uncopied'])
def test_nothing_is_lost_in_an_export(tmp_path, odd):
    "Dead weights that nobody keeps at zero, odd numbers, layouts, and a learner that can't be copied"
    model = nn.Sequential(nn.Unflatten(1, (4,2,2)), nn.Conv2d(4, 8, 2), nn.Flatten(),
        nn.Linear(8, 4)).to(memory_format=torch.channels_last) if odd=='layout' else wide()
    learn = learner(model)
    hooks,w = sparsify_model(learn, .5, seed=0),(model[1] if odd=='layout' else model[2]).weight
    if odd=='written': hooks.remove()
    if odd=='uncopied': learn.extra = Uncopied()
    with torch.no_grad():
        if odd=='written': w.fill_(2.)
        if odd=='nan': w[model[2].weight_mask] = math.nan
    again = exported(learn, tmp_path/'a.pkl').model
    for (k,a),b in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert a.dtype==b.dtype and a.stride()==b.stride() and torch.equal(a.nan_to_num(7), b.nan_to_num(7)), k

def test_other_pickles_of_a_learner_are_as_ever():
    learn = sparse_learner()
    assert copy.copy(learn).model is learn.model and same(copy.deepcopy(learn).model, learn.model)
    learn.create_opt()
    again = pickle.loads(pickle.dumps((learn, learn.opt)))
    assert again[1] is again[0].opt and any(p is again[0].model[0].weight for g in again[1].param_groups for p in g['params'])

def test_training_an_average_says_what_it_drops():
    "Values outside of the masks that a copy was made with are zeroed by its first training step, with their number; none are lost in one that has none"
    m = mlp()
    sparsify_model(m, .6, seed=0)
    average,other = copy.deepcopy(m),copy.deepcopy(m)
    dead = sum(int((~o.mask).sum()) for o in masked_params(m))
    with torch.no_grad():
        for p in average.parameters(): p.fill_(1.)
    with warnings.catch_warnings(action='error'): train(other, t.SGD(other.parameters(), lr=0.), 1, *data(other))
    with pytest.warns(UserWarning, match=f'^{dead} values of 0.weight, 2.weight, 4.weight are set to zero.*load its state_dict'):
        train(average, t.SGD(average.parameters(), lr=0.), 1, *data(average))
    assert_dead(average)
    with warnings.catch_warnings(action='error'): train(average, t.SGD(average.parameters(), lr=0.), 1, *data(average))

# --- files of earlier versions

of_030 = b"".join([
    b'c-qxf&u<$=6yEi2ZO3lf&<JP?s_4z>!Agr8>I;zqYLS)(D3$6<H5%`ZJ=1Jvyfd@0f)ptn2q_xGA;S%E;ldTf4T=AS8~h1KNbvTDV>>aZ*Y06=cIJC;-uu2cZw~!$8+9jt%<EdnkhVE*?}{jmiE77;',
    b'6D+N%epn1n?Aqt{z_v_XOUyXqLwjtRXoMx+C7MW;FILBd4XL)~V&M>_n#IbRD@c-l%Hn8h03PYm%z`Fd35oXZz(UI`7xoH1cu1^SL9xIQ8c4B=`umzFKy9tMj&oS~suBPF-TlAbdiLYT*V>1bhkttT',
    b'K1iHaZv|2tNufn3VzdV_GQkrU0KH{ciJ8_hL4-#P^Q3azYrv%59}%S3XGA65LE^W17hqCRA$4*gsPsJeV_YZI!0-8)55b2?E%4J6_H6ZP8Mp{Jal$->#(fA}e_Bj761R5=Fx^gPV}1SJ#@pT7cQ@`O',
    b'h2L<LCSFk8)`|ZKczc>Si?A+kR}0acKYsZ7*VU8n-z|TgpMD8{%f9vt`^W}PPzk&v8+d_xWS^TRa1fJF0|lT*^CKA%Nuu{zs55CFSq(PF^eT+Lgpu+43@f{xnmX#IgTX}KW}z?I#cIdW<rZDpa$W`z',
    b'wuFcmYjF2Yr`uicypRSH?2HC3WbZCyJm)fF)m$z~Q&9Vg>HUJZ_x^dAOZT1Ioz8l9V~#fWKWLj^fi~AUeKt$d*4Cy}rREL91xKSSVFevQPpS_oqU|@<tfD>+cg9#kCy@kEA$F9_?ak%s((LqWh$%Ek',
    b'<9L4AZktPJAmlmx_4!#eW}2eRZa6`_c?N;wG2T}w#Bji(5_9Dgb0*BdF;@pz>AV<7yC@CSE)ZtvAsnm^^6`m%YESzq&bU(M#(A#`;(G-tjWt0L9PYWT>!zOdTFtT+P#Y3J>AVj=Fg_H@*dFD(ygF-t',
    b'Hv9_R26zo>^BHuL(&Bp2o&U#dX~7j!eBrJ@Pb40VNR%Z$y=eSgrhL0bNJ+SpZ<6l_eJIPibZ~5{<%oJ|UqKC>i$<t<Cfv*|eOyFeFCAqq&NLZE1A=ub;Xm-qMUm>6i3*@g%>Yg7=Gp==CzoI~Qxi&J',
    b'k`fK6XZ)OWu=F`xgj0!4ZHzVK2^Dk$_{B=GJz}3{3Ef0dG%9XRs5Ty*9ttfG8*(8D)XJIWe7@@tAbJ2v&>WD5p9Yl&o4?=M{29*UkyUBG{VxOZ$Y1',])

def test_a_model_that_0_3_pickled_opens_and_trains_sparse():
    "Its weights had another class. `nn.Linear(3,2,bias=False)`, seed 0, half of it live"
    m = pickle.loads(zlib.decompress(base64.b85decode(of_030)))
    w, = masked_params(m)
    assert w.n_live()==3 and w.p.count_nonzero()==3
    opt = t.SGD(m.parameters(), lr=.1, momentum=.9)
    for _ in range(2):
        m(torch.ones(4, 3)).sum().backward()
        opt.step()
    assert_dead(m, opt)
    assert m.weight_mask.equal(w.mask) and copy.deepcopy(m).weight.equal(m.weight)

# --- a module that keeps its own engine

class OwnEngine(nn.Module):
    "As LightningModules do; large enough that its weights are live"
    def __init__(self):
        super().__init__()
        self.net = mlp((16,1024,1024,4))

    def forward(self, x): return self.net(x)

@pytest.mark.parametrize('way', [None, {'net.2.weight':'rows'}], ids=['rule','plan'])
@pytest.mark.parametrize('n', [0,3])
@pytest.mark.parametrize('copied', ['deepcopy','pickle','average'])
def test_a_module_that_keeps_its_own_engine_is_copied_with_live_weights(copied, n, way):
    "The copy trains on with live weights from its second step at the latest, and moves its own connections only"
    x,y = torch.randn(64, 16),torch.randint(4, (64,))
    def step(m):
        m.zero_grad()
        nn.functional.cross_entropy(m(x), y).backward()
        m.engine.step()
    m = OwnEngine()
    sparsify_model(m, .95, seed=0)
    m.engine = DynamicSparseTraining(m, torch.optim.SGD(m.parameters(), lr=.1), 20, method='rigl', batches_per_update=4, sparse_compute=way, seed=0)
    for _ in range(n): step(m)
    masks,c = masks_of(m),copied_by[copied](m)
    assert c.engine.model is c and c.engine is not m.engine
    for _ in range(6): step(c)
    assert is_live(c.net[2].weight) and c.engine.n_updates==m.engine.n_updates+1+(n>1)
    assert_index_fits(c)
    assert [t.live for t in c.engine.tallies]==[int(w.mask.sum()) for w in masked_params(c)]
    assert same_masks(masks, masks_of(m)) and not same_masks(masks, masks_of(c))
