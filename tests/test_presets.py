"Each preset beside an independent reference, mask for mask"
import math, numpy as np, pickle, pytest, re, reference_methods as ref, torch
import fastsparse.masks.schedules, fastsparse.masks.scores
from copy import copy,deepcopy
from forks import run_code
from fastsparse.all import *
from fastsparse.all import MagnitudePlusGradient,methods_table,SampledGradient
from fastsparse.train.presets import GMP_presets,GSE_presets,ITOP_presets
from fastsparse.methods.presets import ACDC_presets,DSD_presets,GraNet_presets,MEST_presets,SoftMEST_presets,SRigL_presets
from fastsparse.train.presets import Static_presets
from fastsparse.masks.selection import keyed_generator
from fastsparse.masks.schedules import cubic_path,update_steps
from fastsparse.methods.parts import acdc_path,soft_bound_path
from fastsparse.core.registry import parts_of
from fastsparse.methods import parts,presets as further
from fastsparse.train import presets as usual
from fastsparse.train.method import Method
from functools import partial
from helpers import *
from torch import nn

shapes = (40,12),(5,40)
N = 680

def net():
    return nn.Sequential(nn.Linear(12,40, bias=False, dtype=torch.double), nn.Tanh(), nn.Linear(40,5, bias=False, dtype=torch.double))

def start(density, seed=0):
    "Weights, masks and a batch in NumPy; `density` 0 is a fan-in of three and of ten, 1 is dense, below 0 it is exact in each layer"
    rng = np.random.default_rng(seed)
    ws = [rng.normal(size=s)*.4 for s in shapes]
    masks = [rng.random(s)<density for s in shapes]
    if density<0: masks = [(rng.permutation(m.size)<-density*m.size).reshape(m.shape) for m in masks]
    if not density: masks = [rng.random(s).argsort(1)<k for s,k in zip(shapes, (3,10))]
    return ws,masks,rng.normal(size=(30,12)),rng.normal(size=(30,5))

def keyed(i, u): return torch.rand(shapes[i], generator=keyed_generator(0, i, u)).numpy()
def keyed_ints(i, u):
    g = keyed_generator(0, i, u)
    return lambda n, k: torch.randint(n, (k,), generator=g).tolist()
def turns(n, steps): return {math.ceil(round(t*n, 6)):s for t,s in steps.items()}

acdc = {round(.1+.05*i, 2):.9*(i%2==0) for i in range(13)}|{.75:0., .85:.9}

cases = {}
cases['Static'] = .25, Static_presets, lambda *_: None, 60, 0, {}
cases['SET'] = .25, dict(SET_presets, batches_per_update=3), ref.rigl(3, .3, 1., keyed), 180, 43, {}
cases['RigL'] = .25, dict(RigL_presets, batches_per_update=3), ref.rigl(3, .3, .75), 180, 32, {}
cases['ITOP'] = .25, dict(ITOP_presets, batches_per_update=3), ref.rigl(3, .5, 1.), 180, 43, {}
cases['GSE'] = .25, dict(GSE_presets, batches_per_update=3), ref.gse(3, .2, .6, keyed_ints), 180, 21, {}
often = RigL_presets(batches_per_update=3)
cases['GSE_grown'] = .25, often(grow_score_f=SampledGradient(3, 'grown')), ref.gse(3, .3, .75, keyed_ints, 3, 'grown'), 180, 27, {}
cases['GSE_few'] = .25, often(grow_score_f=SampledGradient(.01)), ref.gse(3, .3, .75, keyed_ints, .01), 180, 27, {}
cases['GSE_half'] = .6, often(initial_drop_grow_pct=.9, grow_score_f=SampledGradient(1.)), ref.gse(3, .9, .75, keyed_ints, 1.), 180, 27, {}
cases['GMP'] = 1., dict(GMP_presets, batches_per_update=2, sparsity=.9), ref.gmp(2, .9), 150, 40, dict(replace=False)
cases['GraNet'] = .5, dict(GraNet_presets, batches_per_update=2, sparsity=.9), ref.granet(2, .9), 150, 40, {}
cases['GraNet_dense'] = 1., dict(GraNet_presets, batches_per_update=3, sparsity=.95, sparsity_path=cubic_path()), ref.granet(3, .95, 0.), 180, 32, {}
cases['MEST'] = -.25, MEST_presets, ref.mest(.1, keyed, (.8,.775,.75), (.75,)*3), 480, 23, dict(replace=False)
cases['SoftMEST'] = -.375, SoftMEST_presets(sparsity=.75), ref.mest(.1, keyed, (.75,)*3, (.625,.6875,.75)), 480, 23, dict(replace=False)
cases['SRigL'] = 0., dict(SRigL_presets, batches_per_update=3), ref.srigl(3, .3, (120,50)), 180, 27, {}
cases['SRigL_strict'] = 0., dict(SRigL_presets, batches_per_update=3, structure='fan-in ablate 0.7'), ref.srigl(3, .7, (120,50)), 180, 27, {}
cases['ACDC'] = 1., dict(ACDC_presets, sparsity=.9), ref.in_waves(turns(200, acdc), ref.global_counts, ref.each_output), 200, 15, dict(replace=False, forget=True)
cases['DSD'] = 1., dict(DSD_presets, sparsity=.5), ref.in_waves({30:.5, 60:0.}, lambda s,ws,masks: ref.uniform_counts(s, masks)), 90, 2, dict(replace=False)

def beside(density, presets, rule, n_steps, **kwargs):
    ws,masks,x,y = start(density)
    m = net()
    with torch.no_grad():
        for l,w in zip((m[0],m[2]), ws): l.weight.copy_(torch.from_numpy(w))
    if density<1: sparsify_model(m, .5, mask_init={f'{i}.weight':torch.from_numpy(o) for i,o in zip((0,2), masks)})
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = DynamicSparseTraining(m, opt, n_steps, seed=0, batch_size=30, steps_per_epoch=2, **presets)
    return dst,ref.Run(rule, ws, masks, x, y, n_steps, **kwargs),torch.from_numpy(x),torch.from_numpy(y)

def look_at_ablated(m, off):
    "Neurons are gone for good, and the rest share the budget to within half a fan-in each"
    for o,gone,budget in zip(masked_params(m), off, (120,50)):
        fan = o.mask.sum(1)
        now = set((fan==0).nonzero().view(-1).tolist())
        assert gone<=now and len(set(fan[fan>0].tolist()))==1 and abs(int(fan.sum())-budget)<=int((fan>0).sum())/2
        gone |= now

@pytest.mark.parametrize('name', cases)
def test_reference(name):
    "Beside a NumPy float64 reference on the same batches and draws: equal masks after every step, weights and momentum to 1e-9"
    density,presets,rule,n_steps,least,kwargs = cases[name]
    dst,run,x,y = beside(density, presets, rule, n_steps, **kwargs)
    m,opt = dst.model,dst.opt
    moved,off = 0,[set(),set()]
    for t in range(n_steps):
        before = masks_of(m)
        train(m, opt, 1, x, y)
        run.step()
        if name=='SRigL_strict': look_at_ablated(m, off)
        assert dst.n_updates==run.n_updates, f'step {t}'
        for o,mask,w,b in zip(masked_params(m), run.masks, run.ws, run.bufs or (0,0)):
            assert torch.equal(o.mask, torch.from_numpy(mask)), f'step {t}: {o.name}'
            assert np.allclose(o.p.detach().numpy(), w, atol=1e-9) and (run.bufs is None or np.allclose(opt.state[o.p]['momentum_buffer'].numpy(), b, atol=1e-9))
        moved += not same_masks(before, masks_of(m))
    assert moved>=least and (name!='SRigL_strict' or all(off))

def test_a_large_sample_is_all():
    "With as many candidates as there are dead weights GSE's growth is RigL's, and an update of a structured mask takes the drawn ones first"
    def masks(**settings):
        density,_,_,n_steps,_,_ = cases['RigL']
        dst,_,x,y = beside(density, {**RigL_presets, 'batches_per_update':3, **settings}, None, 60)
        train(dst.model, dst.opt, 60, x, y)
        return masks_of(dst.model)
    assert same_masks(masks(grow_score_f=SampledGradient(1e6)), masks()) and not same_masks(masks(grow_score_f=SampledGradient(.5)), masks())

def test_every_preset_has_a_reference():
    "Who adds a preset adds a case; SNFS has its own beside the engine's tests"
    presets = {k.removesuffix('_presets') for k in vars(usual)|vars(further) if k.endswith('_presets')}
    assert presets=={k.split('_')[0] for k in cases}|{'SNFS'}=={o.name for o in parts_of('method').values()}

# --- counts along every path, in a model of odd sizes

waves = [.5, .9, .3, .9]
square = (4,5,6,7,12,13,14,15,20,21,22,23,28,29,30,31)
paths = {}
paths['up'] = dict(sparsity=.95, sparsity_path=cubic_path()), lambda t,u: .95*(1-(1-min(t/30, 1))**3)
paths['down'] = dict(sparsity=lambda t: .9-.02*t), lambda t,u: .9-.02*t
paths['waves'] = dict(sparsity=waves), lambda t,u: waves[u%4]
paths['square'] = dict(sparsity=.8, sparsity_path=acdc_path(phase=.1, start=.1, stop=.9)), lambda t,u: .8 if t in square or t>=36 else 0.
paths['soft'] = dict(sparsity=.9, sparsity_path=soft_bound_path(.5, .75)), lambda t,u: .85 if t<30 else .9
distributions = dict(uniform=uniform_sparsity, erk=erdos_renyi_sparsity, globally=global_sparsity, dense_end=layers_dense(-1),
    dense_end_globally=layers_dense('4', global_sparsity))

@pytest.mark.filterwarnings('ignore:the last update|.* is left without live weights')
@pytest.mark.parametrize('sparse_f', distributions)
@pytest.mark.parametrize('name', paths)
def test_totals(name, sparse_f):
    "Law 1: after every update the model has `round((1-s)*N)` live weights, up, down and in waves; dead is dead, a dense end stays dense"
    path,s = paths[name]
    grow = (weight_magnitude, gradient_magnitude, random_score)[(list(paths).index(name)+list(distributions).index(sparse_f))%3]
    m = mlp((9,11,7,1))
    n = 99+77+7
    opt = torch.optim.SGD(m.parameters(), lr=.01, momentum=.9)
    parts = dict(updates=FreqSchedule(2, start=2), drop_fraction=.2, grow_score_f=grow, sparse_f=distributions[sparse_f], replace_step=False)
    dst = DynamicSparseTraining(m, opt, 40, seed=0, **parts, **path)
    def total(): return sum(live(m))
    assert total()==round((1-s(0,0))*n)
    xb,yb = data(m)
    for t in range(40):
        before = dst.n_updates
        train(m, opt, 1, xb, yb)
        if t and t%2==0: assert total()==round((1-s(t, before+1))*n), t
        if 'end' in sparse_f: assert m[4].weight_mask.all()
        assert_dead(m, opt)

# --- presets

alone = partial(global_sparsity, min_live=0)

@pytest.mark.parametrize('name', parts_of('method'))
def test_preset_is_a_dict(name):
    "It spreads, merges, copies, pickles and compares as the dict that it is, reads what is usual, and a changed copy leaves it alone"
    p = parts_of('method')[name]
    assert isinstance(p, Method) and isinstance(p, dict) and {**p}==dict(p)==p and dict(p, sparsity=.5)==p(sparsity=.5)!=p
    for o in (p(), p.copy(), copy(p), deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert type(o) is Method and o==p and not o!=p and (o.name,o.about,o.paper)==(p.name,p.about,p.paper)
    assert 'sparsity' not in p
    assert p.paper is None or re.fullmatch(r'\d{4}\.\d{5}', p.paper)
    assert methods_table().loc[name, 'preset']==f'{p.name}_presets' and (vars(usual)|vars(further))[f'{p.name}_presets'] is p

def test_preset_says_its_parts():
    "Functions by name, what they hold in brackets, and nothing of memory places; where names suffice, the text makes an equal one"
    assert repr(RigL_presets(stop_pct=.5))=='RigL_presets(keep_score_f=weight_magnitude, grow_score_f=gradient_magnitude, initial_drop_grow_pct=0.3, stop_pct=0.5, batches_per_update=Interval(100))'
    assert 'sparse_f=global_sparsity(min_live=0)' in repr(GraNet_presets) and 'sparsity_path=cubic(init=0.5, start=0, power=3.0)' in repr(GraNet_presets)
    assert not any(' at 0x' in repr(o) for o in parts_of('method').values())
    known = {**vars(fastsparse.masks.schedules), **vars(fastsparse.masks.scores), **vars(parts), **vars(usual), **vars(further)}
    for o in (SET_presets, RigL_presets, ITOP_presets, SNFS_presets, SRigL_presets, MEST_presets): assert eval(repr(o), known)==o

def test_presets_differ():
    "Equal settings are equal, with functions of equal arguments too; another argument is another preset; a plain dict counts as well"
    assert GMP_presets==GMP_presets(sparsity_path=cubic_path())!=GMP_presets(sparsity_path=cubic_path(.1))
    assert MEST_presets==MEST_presets(keep_score_f=MagnitudePlusGradient(.1))!=MEST_presets(keep_score_f=MagnitudePlusGradient(.2))
    assert len({repr(o) for o in parts_of('method').values()})==13 and RigL_presets!=None and SET_presets!=RigL_presets

@pytest.mark.parametrize('target,bounds', [(.9, (.92,.91,.9)), (.95, (.96,.955,.95))])
def test_mest_fractions_are_those_of_the_scripts(target, bounds):
    "As the authors prune: all below a percentile of all magnitudes go, dead weights being the smallest; counts at the three stages of a run, at both targets of their scripts"
    rng = np.random.default_rng(0)
    n = 4000
    w = rng.normal(size=n)*(rng.permutation(n)>=round(target*n))
    fractions = MEST_presets['drop_fraction'].bind(n_steps=160)
    for epoch,bound in zip((5,90,120), bounds):
        kept = int((abs(w)>np.percentile(abs(w), 100*bound)).sum())
        live = int((w!=0).sum())
        assert live-round(fractions(epoch)*live)==kept, epoch
    assert [fractions(t) for t in (0,89,90,119,120)]==[.2,.2,.1,.1,0.]
    assert update_steps(MEST_presets['updates'].bind(n_steps=160), 160)==[*range(5, 160, 5)]

@pytest.mark.parametrize('presets', [ACDC_presets, GMP_presets(sparse_f=global_sparsity)], ids=['ACDC','GMP'])
@pytest.mark.filterwarnings('ignore:scores alone')
def test_no_layer_is_erased(presets):
    "PyTorch's own initialization and a global competition at .95: every layer keeps a live weight for each output, at every step; without a floor it doesn't"
    def fewest(sparse_f):
        m = mlp((64,64,256,64,10))
        opt = torch.optim.SGD(m.parameters(), lr=.01)
        dst = DynamicSparseTraining(m, opt, 40, seed=0, **presets(sparsity=.97, sparse_f=sparse_f, **({} if 'updates' in presets else dict(batches_per_update=4))))
        seen = []
        xb,yb = data(m)
        for _ in range(40):
            train(m, opt, 1, xb, yb)
            seen.append(min(int(o.mask.sum())-len(o.mask) for o in masked_params(m)))
        assert sum(live(m))==round(.03*sum(o.mask.numel() for o in masked_params(m)))
        return min(seen)
    assert fewest(global_sparsity)>=0>fewest(alone)

def without_input(m):
    "Outputs that have no live weight, of parameters that have one for each"
    os = [o for o in masked_params(m) if o.mask.sum()>=len(o.mask)]
    return sum(int((~o.mask.flatten(1).any(1)).sum()) for o in os),len(os)

@pytest.mark.parametrize('s', [.97,.98,.99])
@pytest.mark.filterwarnings('ignore:scores alone')
def test_every_output_keeps_an_input(s):
    "Law 12: where a layer has a weight for each output, AC/DC, `prune_to` and tickets leave none without, at every step; with magnitudes alone they do"
    def train_acdc(**settings):
        torch.manual_seed(0)
        m = mlp((128,128,128,10))
        opt = torch.optim.Adam(m.parameters(), 1e-3)
        DynamicSparseTraining(m, opt, 40, seed=0, **ACDC_presets(sparsity=s, **settings))
        worst = 0
        for _ in range(40):
            train(m, opt, 1, *data(m))
            worst = max(worst, without_input(m)[0])
        assert without_input(m)[1]==3 and sum(live(m))==round((1-s)*sum(o.mask.numel() for o in masked_params(m)))
        return worst
    assert train_acdc()==0<train_acdc(keep_score_f=weight_magnitude)
    def pruned(**settings):
        m = mlp((128,128,128,10))
        sparsify_model(m, 0.)
        prune_to(m, s, **settings)
        return m
    alone = pruned(score_f=weight_magnitude)
    assert without_input(pruned())[0]==0<without_input(alone)[0]
    assert live(pruned())==live(alone)
    m = mlp((128,128,128,10))
    find_ticket(m, lambda m: None, s, rate=.5)
    assert without_input(m)[0]==0

@pytest.mark.parametrize('layer', [nn.Linear(20,30), nn.Conv2d(6,8,3), nn.Conv2d(8,8,3, groups=8), nn.ConvTranspose2d(5,9,3), nn.LSTM(6,5)],
    ids=lambda l: type(l).__name__)
def test_what_an_output_costs(layer):
    "Each output that would be without an input takes its largest weight, and the layer's smallest of those that stay go: counts are equal, and so are all other places"
    for sparsity in (.3,.6,.85):
        plain,kept = deepcopy(layer),deepcopy(layer)
        for m,f in ((plain,weight_magnitude),(kept,'output_magnitude')):
            sparsify_model(m, 0.)
            prune_to(m, sparsity, uniform_sparsity, f)
        for a,b in zip(masked_params(plain), masked_params(kept)):
            out = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
            rows = lambda t: t.transpose(0, out).flatten(1)
            w,p,k = rows(getattr(layer, a.attr).detach().abs()),rows(a.mask),rows(b.mask)
            empty = ~p.any(1)
            new,gone = k & ~p,p & ~k
            if p.sum()<len(p):
                assert not new.any() and not gone.any()
                continue
            assert k.any(1).all() and torch.equal(new.any(1), empty) and int(new.sum())==int(gone.sum())==int(empty.sum())
            assert all(w[i].argmax()==new[i].int().argmax() for i in empty.nonzero())
            spare = p.clone()  # what might go: all but the largest of each row
            spare[range(len(p)),w.masked_fill(~p, -1).argmax(1)] = False
            assert not gone.any() or gone[spare].any() and w[gone].max()<=w[spare & ~gone].min()

def test_a_preset_of_a_file_of_0_3_is_one_of_today():
    "Its pickle held all settings as attributes, and the chosen ones as they were given: a name, a structure's text"
    old = Method.__new__(Method)
    dict.update(old, grow_score_f='random_score', structure='fan-in', stop_pct=.5)
    vars(old).update(grow_score_f=random_score, structure=as_structure('fan-in'), stop_pct=.5, name='Old', about='', paper=None, chosen=dict(old))
    now = Method('Old', grow_score_f=random_score, structure='fan-in', stop_pct=.5)
    read = pickle.loads(pickle.dumps(old))
    assert read==now and now==read and read()==now and read(stop_pct=.7)==now(stop_pct=.7) and read.settings==now.settings
    assert read.bind(100).settings==now.bind(100).settings and read.name=='Old'

moved = {'masks.scores':'output_magnitude MagnitudePlusGradient', 'masks.schedules':'SquareSchedule _soft_bound _dsd', 'train.method':'drop_of_target'}

@pytest.mark.parametrize('module,name', [(module, name) for module,names in moved.items() for name in names.split()])
def test_a_pickle_of_0_3_finds_the_parts_that_moved(module, name):
    "It names them in modules of the core; other names are missing as ever"
    assert pickle.loads(f'cfastsparse.{module}\n{name}\n.'.encode()) is getattr(parts, name)
    assert not hasattr(fastsparse.masks.schedules, 'zzz')

def test_parts_that_moved_are_found_before_anything_is_looked_up():
    code = "import pickle; f = pickle.loads(b'cfastsparse.masks.schedules\\n_dsd\\n.'); print(f(.5, .25, .5).values)"
    assert '(0.0, 0.5, 0.0)' in run_code(code).stdout

@pytest.mark.parametrize('structure,sparsity', [('2:4',.5), ('2:4 axis 0',.5), ('1:4',.75)])
@pytest.mark.parametrize('name', ['granet','acdc','gmp'])
def test_layers_compete_within_what_a_structure_allows(name, structure, sparsity):
    "Scores alone would leave one of the layers fewer weights than N:M does"
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(16,32), torch.nn.ReLU(), torch.nn.Linear(32,8))
    every = {} if name=='acdc' else dict(batches_per_update=5)
    opt = torch.optim.SGD(m.parameters(), lr=.05, momentum=.9)
    dst = DynamicSparseTraining(m, opt, 40, method=name, sparsity=sparsity, structure=structure, seed=0, sparse_compute=False, **every)
    for _ in range(40):
        opt.zero_grad()
        m(torch.randn(8,16)).square().mean().backward()
        opt.step()
    for tally in dst.tallies: assert tally.live==round((1-sparsity)*tally.n) and as_structure(structure).legal(tally.mask)
