"How sparse each parameter is. Totals are exact, and no layer is asked for more than it has"
import json, math, numpy as np, pickle, pytest, torch, warnings, yaml
from fastsparse.masks.apportion import fill_budget,live_counts
from fastsparse.masks.distributions import as_distribution,erdos_renyi_sparsity,proportional_sparsity,reads_scores,uniform_sparsity
from fastsparse.special.distributions import balanced_flops_sparsity,given_sparsity,global_sparsity,layers_dense
from fastsparse.report.flops import flop_profile
from fastsparse.core.registry import call_with
from fastsparse.model.sparsify import sparsify_model
from helpers import oracle_order
from functools import partial
from hypothesis import assume,given,settings,strategies as st
from torch import nn

some = settings(max_examples=150, deadline=None)
alone = partial(global_sparsity, min_live=0)
sparsity = st.floats(0,1,exclude_max=True)
shapes = st.lists(st.lists(st.integers(1,12), min_size=1, max_size=4), min_size=1, max_size=7)
def params(shapes): return [torch.empty(*o) for o in shapes]

def water_fill(raw, sizes, budget):
    "Independent of ours: bisect the common factor until `sum(min(1, factor*raw)*size)` is the budget"
    raw,sizes = np.array(raw, float),np.array(sizes, float)
    lo,hi = 0.,1/raw.min()
    for _ in range(200):
        mid = (lo+hi)/2
        lo,hi = (lo,mid) if (np.minimum(1, mid*raw)*sizes).sum()>budget else (mid,hi)
    return np.minimum(1, hi*raw)

def raw_of(shapes, kernel, power): return [(sum(o)/math.prod(o))**power for o in (s if kernel else s[:2] for s in shapes)]

# --- Erdős-Rényi

net = [(8,3,3,3),(16,8,3,3),(10,16)]

@pytest.mark.parametrize('density,kernel,expect', [(.2,True,[.32883,.1088,.67894]), (.5,True,[1,.33681,1]), (.5,False,[1,.42459,.36798])])
def test_published_densities(density, kernel, expect):
    "The densities that another implementation's authors printed for this net, up to their rounding of counts"
    got = [1-s for s in erdos_renyi_sparsity(params(net), 1-density, include_kernel=kernel)]
    assert np.allclose(got, expect, atol=1.5e-3)

def test_erk_by_hand():
    "Two layers, sizes 4 and 100, raw 1 and .2: at density .25 (26 live) the factor is 26/24 and the first would exceed 1, so it is dense: 22/100 remain"
    assert np.allclose(erdos_renyi_sparsity(params([(2,2),(10,10)]), .75), [0,.78])
    assert np.allclose(erdos_renyi_sparsity(params([(2,2),(10,10)]), .9), [1-10.4/24, 1-.2*10.4/24])

@pytest.mark.parametrize('s', [0, 1e-12, 1e-6, .001, .01, .999, 1-1e-9])
@pytest.mark.parametrize('kernel', [True,False])
def test_no_zero_division(s, kernel):
    "2020: a tiny sparsity made every layer dense and then divided by nothing"
    for shapes in ([(2,2)], [(1,1),(1,1)], [(2,3),(3,2),(1,5)], [(1,50),(50,1)], [(64,)], net):
        out = erdos_renyi_sparsity(params(shapes), s, include_kernel=kernel)
        sizes = [math.prod(o) for o in shapes]
        assert all(0<=o<=1 for o in out)
        assert sum(live_counts(sizes, out, s))==round((1-s)*sum(sizes))

def test_empty_parameter():
    "A parameter without weights takes part in no budget and divides by nothing"
    for kernel in (True,False):
        out = erdos_renyi_sparsity(params([(0,4),(10,10),(20,10)]), .8, include_kernel=kernel)
        assert live_counts([0,100,200], out, .8)[0]==0 and sum(live_counts([0,100,200], out, .8))==60

@some
@given(shapes=shapes, s=sparsity, kernel=st.booleans(), power=st.floats(0,2))
def test_erk_is_the_water_level(shapes, s, kernel, power):
    "Law 1: densities in [0,1], proportional to the ratio until full, and they meet the budget in real numbers"
    sizes = [math.prod(o) for o in shapes]
    d = 1-np.array(erdos_renyi_sparsity(params(shapes), s, include_kernel=kernel, erk_power_scale=power))
    budget = (1-s)*sum(sizes)
    assert (d>=0).all() and (d<=1).all() and math.isclose((d*sizes).sum(), budget, rel_tol=1e-9, abs_tol=1e-9)
    assert np.allclose(d, water_fill(raw_of(shapes, kernel, power), sizes, budget), atol=1e-6)

@some
@given(raw=st.lists(st.floats(1e-6,1e6), min_size=1, max_size=8), data=st.data())
def test_fill_budget(raw, data):
    "The same for any raw densities"
    sizes = data.draw(st.lists(st.integers(1,1000), min_size=len(raw), max_size=len(raw)))
    budget = data.draw(st.floats(0,1))*sum(sizes)
    d = np.array(fill_budget(raw, sizes, budget))
    assert (d>=0).all() and (d<=1).all() and math.isclose((d*sizes).sum(), budget, rel_tol=1e-9, abs_tol=1e-9)
    assert np.allclose(d, water_fill(raw, sizes, budget), atol=1e-6)

# --- dense layers

names = ['stem.weight','blocks.0.attn.in_proj_weight','blocks.0.attn.out_proj.weight','blocks.1.fc.weight','head.weight']
layers = [(4,3,3,3),(24,8),(8,8),(16,8),(10,16)]
sizes = [108,192,64,128,160]

@pytest.mark.parametrize('patterns,places', [(0,[0]), (-1,[4]), ([0,-1],[0,4]), ('head',[4]), ('head.weight',[4]), ('blocks.*',[1,2,3]),
    ('*.attn.*',[1,2]), ('blocks.0.attn',[1,2]), (['stem','*.fc.*'],[0,3]), ('fc',[3]), ('attn',[1,2]), ('attn.out_proj',[2]), (('head','head',4),[4]), ('blocks.0.attn.out_proj',[2]), (lambda name,p: p.ndim==4,[0])])
def test_dense_by_pattern(patterns, places):
    "By parameter, by module (all its weights), by glob, by place, or by a function: the patterns of the whole library"
    assert [i for i,s in enumerate(layers_dense(patterns)(params(layers), .2, names=names)) if s==0]==places

@pytest.mark.parametrize('patterns', ['fd', 'Head', 'block', 5, -6, True, .5, None, ['head','haed'], 'blocks.0.attn.out_proj.bias', 'stem.'])
def test_dense_by_no_pattern(patterns):
    "A name, whole and in its case, or a place that isn't there is refused, with the names that are"
    with pytest.raises(ValueError, match='stem.weight|must be a name'): layers_dense(patterns)(params(layers), .5, names=names)

@some
@given(dense=st.sets(st.integers(0,4)), s=st.floats(0,.99), inner=st.sampled_from([uniform_sparsity, erdos_renyi_sparsity, global_sparsity]))
def test_layers_dense(dense, s, inner):
    "The model's sparsity is met exactly, or refused because nothing would be left"
    torch.manual_seed(0)
    ps = [torch.randn(*o) for o in layers]
    f = layers_dense(list(dense), inner)
    held = sum(sizes[i] for i in dense)
    if s>0 and (1-s)*652-held<1e-6:
        with pytest.raises(ValueError, match='fewer layers'): f(ps, s)
        return
    counts = live_counts(sizes, f(ps, s), s)
    assert all(counts[i]==sizes[i] for i in dense) and all(0<=c<=n for c,n in zip(counts, sizes))
    assert sum(counts)==round((1-s)*652)

def test_inner_gets_its_share():
    "The inner distribution sees only its own parameters, names and scores, and whatever else was passed"
    seen = {}
    def inner(params, model_sparsity, names, scores, structure):
        seen.update(n=len(params), s=model_sparsity, names=names, scores=scores, structure=structure)
        return [model_sparsity]*len(params)
    out = call_with(layers_dense('blocks.*', inner), params(layers), .2, names=names, scores=[*'abcde'], structure='2:4', step=3)
    assert seen==dict(n=2, s=pytest.approx(.2*652/268), names=['stem.weight','head.weight'], scores=['a','e'], structure='2:4')
    assert out==[seen['s'],0,0,0,seen['s']]
    with pytest.raises(ValueError, match='5 sparsities of the other layers are given for 4'): layers_dense(0, lambda p,s: [.5]*5)(params(layers), .2)
    nested = layers_dense('head', layers_dense('stem'))
    assert call_with(nested, params(layers), .5, names=names)==layers_dense([0,-1])(params(layers), .5)

def test_wants_scores():
    "Scores are named, and so computed by who calls, only if the inner distribution wants them; nested too"
    assert not reads_scores(layers_dense(0)) and not reads_scores(layers_dense(0, erdos_renyi_sparsity))
    assert reads_scores(layers_dense(0, global_sparsity)) and reads_scores(layers_dense(0, layers_dense(-1, global_sparsity)))
    p = params(layers)
    up,down = [[torch.full(o, sign*i) for i,o in enumerate(layers)] for sign in (1.,-1.)]
    last = lambda f,scores: call_with(f, p, .5, names=names, scores=scores)[-1]
    assert last(layers_dense(0, alone), up)==0 and last(layers_dense(0, alone), down)==1  # 218 left for 192, 64, 128, 160
    nested = layers_dense(0, layers_dense(0, alone))
    assert last(nested, up)==pytest.approx(1-26/160) and last(nested, down)==1  # 26 left for 64, 128, 160

# --- by score

def test_global_in_real_numbers():
    "Law 1: half of 9 weights are 4.5, and the fifth best counts half. Beside a dense layer of 3, 2.5 of 8 live: 6 of 11 in all, not 3+2"
    a,b = torch.tensor([[9.,2.,8.,7.]]),torch.tensor([[4.,5.,3.,1.,0.]])
    assert alone([a,b], .5)==pytest.approx([.25,.7]) and alone([b,a], .5)==pytest.approx([.7,.25])
    assert live_counts([3,4,4], layers_dense(0, alone)([torch.ones(3,1), a, b[:,:4]], .5), .5)==[3,3,0]

def test_global_ties():
    "Ties go to the earlier layer, NaN never wins; nothing, and a parameter without weights, have counts too"
    a = torch.tensor([[.9,-.1,.8,-.7]])
    assert alone([a,a], 0)==[0,0] and alone([], .5)==[] and alone([torch.empty(0,3),a], .5)==[0,.5]
    assert alone([torch.ones(2,3), torch.ones(4,1)], .3)==pytest.approx([0,.75])
    assert alone([torch.tensor([[math.nan,1.]]), torch.tensor([[2.,3.]])], .5)==[1,0]

@some
@given(shapes=st.lists(st.tuples(st.integers(0,6), st.integers(1,6)), min_size=1, max_size=6), s=sparsity, data=st.data())
def test_global(shapes, s, data):
    "The counts are those of a plain sort of everything, and the total is exact (law 1)"
    given,levels = data.draw(st.booleans()),data.draw(st.sampled_from([3,1000]))
    g = torch.Generator().manual_seed(data.draw(st.integers(0,99)))
    draw = lambda: [torch.randint(-levels, levels, o, generator=g).to(t) for o,t in zip(shapes, [torch.float,torch.double,torch.half]*2)]
    ps,scores = draw(),draw() if given else None
    flat = np.concatenate([np.asarray(o.double()).ravel() for o in (scores or [p.abs() for p in ps])])
    ns = [math.prod(o) for o in shapes]
    k = round((1-s)*len(flat))
    kept = np.zeros(len(flat), bool)
    kept[oracle_order(flat, np.ones(len(flat), bool))[:k]] = True
    expect = [int(o.sum()) for o in np.split(kept, np.cumsum(ns)[:-1])]
    assert live_counts(ns, alone(ps, s, scores=scores), s)==expect and sum(expect)==k

def by_sorting(ps, k, floors):
    "One weight after the other, the highest first, as long as what is left pays for the floors of the others"
    flat = np.concatenate([np.asarray(p.abs().double()).ravel() for p in ps])
    layer = np.repeat(range(len(ps)), [p.numel() for p in ps])
    counts = [0]*len(ps)
    for i in oracle_order(flat, np.ones(len(flat), bool)):
        owed = sum(max(f-c, 0) for f,c in zip(floors, counts))
        if sum(counts)+owed<k or counts[layer[i]]<floors[layer[i]]: counts[layer[i]] += 1
    return counts

@some
@given(shapes=st.lists(st.tuples(st.integers(1,6), st.integers(1,6)), min_size=1, max_size=6), spare=st.floats(0,1), least=st.sampled_from([1,2,4]),
    seed=st.integers(0,99))
@pytest.mark.filterwarnings('ignore:scores alone')
def test_floor(shapes, spare, least, seed):
    "With the floors paid, the highest of the rest live: as by taking one after the other while that leaves enough; the total is exact"
    g = torch.Generator().manual_seed(seed)
    ps = [torch.randn(o, generator=g)*10**float(torch.randn(1, generator=g)) for o in shapes]
    sizes,floors = [p.numel() for p in ps],[min(least*p.shape[0], p.numel()) for p in ps]
    k = sum(floors)+round(spare*(sum(sizes)-sum(floors)))
    counts = live_counts(sizes, global_sparsity(ps, 1-k/sum(sizes), min_live=least), 1-k/sum(sizes))
    assert sum(counts)==k and all(c>=f for c,f in zip(counts, floors))
    assert counts==by_sorting(ps, k, floors)

def test_floor_by_hand():
    "Three layers of 4, 2 and 1 outputs: the first has the smallest weights and keeps one an output; a budget below the floors is shared as they are; dead weights (-inf) owe nothing"
    ps = [torch.full((4,2), .1), torch.full((2,4), 1.), torch.full((1,4), 2.)]
    live = lambda s,**kw: live_counts([8,8,4], global_sparsity(ps, s, **kw), s)
    with pytest.warns(UserWarning, match='more than a hundredth.*min_live=0'): assert live(.5)==[4,2,4]
    assert live(.5, min_live=0)==[0,6,4] and live(.5, min_live=.5)==[2,4,4]
    with pytest.warns(UserWarning): assert live(.8)==[2,1,1]  # 4 live weights for floors of 4, 2 and 1: 2.29, 1.14, .57
    dead = [torch.full((4,2), -math.inf), *ps[1:]]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert live(.5, scores=dead)==[0,6,4]
        big = [torch.rand(10,100)+1, torch.rand(2,100)]
        global_sparsity(big, .5)  # two weights of 600: not in earnest

# --- by cost

@some
@given(data=st.lists(st.tuples(st.integers(1,20), st.integers(1,20), st.integers(1,1000)), min_size=1, max_size=6), s=sparsity)
def test_balanced(data, s):
    "Layers that are not dense spend the same, dense ones no more, and the budget of weights is met"
    shapes,sizes = [o[:2] for o in data],[a*b for a,b,_ in data]
    assume((1-s)*sum(sizes)>1e-6)  # below, 1-s is mostly rounding
    flops = [2*n*k for n,(_,_,k) in zip(sizes, data)]
    d = 1-np.array(balanced_flops_sparsity(flops)(params(shapes), s))
    spent = d*flops
    level = water_fill([1/o for o in flops], sizes, (1-s)*sum(sizes))*flops
    assert np.allclose(spent, level, rtol=1e-5, atol=1e-6) and math.isclose((d*sizes).sum(), (1-s)*sum(sizes), rel_tol=1e-9, abs_tol=1e-9)
    partly = spent[d<1-1e-9]
    assert (np.ptp(partly)<=1e-6*partly.max() if len(partly) else True) and (spent<=max(partly, default=math.inf)*(1+1e-6)).all()

class View:
    "What the keys of a profile of FLOPs have"
    def __init__(self, name): self.name = name

def test_balanced_by_name():
    "A dict by name or a profile with several entries a parameter, and None for what reads none"
    expect = balanced_flops_sparsity([1000,100])(params([(2,5),(10,10)]), .9)
    for flops in (dict(a=1000, b=100, c=7), {View('a'):600, View('b'):100, None:50, View('a'):400}):
        f = pickle.loads(pickle.dumps(balanced_flops_sparsity(flops)))
        assert f(params([(2,5),(10,10)]), .9, names=['a','b'])==expect

def test_balanced_by_profile():
    "What `flop_profile` returns is taken as it is: an image of 6x6, 16 places of the convolution's output and one of the linear layer's"
    model = nn.Sequential(nn.Conv2d(2,4,3), nn.ReLU(), nn.Flatten(), nn.Linear(64,3))
    p = [model[0].weight,model[3].weight]
    f = balanced_flops_sparsity(flop_profile(model, torch.randn(5,2,6,6)))
    assert f(p, .8, names=['0.weight','3.weight'])==pytest.approx(balanced_flops_sparsity([72*16,192])(p, .8))

# --- given

@pytest.mark.parametrize('spec,expect', [
    ([.1,.2,.3,.4,0], [.1,.2,.3,.4,0]), ((0,0,0,0,1), [0,0,0,0,1]), ({'*':.5}, [.5]*5), ({'head':0, '*':.9}, [.9,.9,.9,.9,0]),
    ({'blocks.0.*':.7, 'blocks.*':.8, '*':0}, [0,.7,.7,.8,0]), ({'[h]ead.weight*':.1, '*':.5}, [.5,.5,.5,.5,.1]),
    ([('head',0), (lambda name,p: p.ndim==4,.3), ('*',.9)], [.3,.9,.9,.9,0]), (dict(zip(names, [.1,.2,.3,.4,.5])), [.1,.2,.3,.4,.5]),
    ({'stem':.1, 'blocks.0.attn.in_proj_weight':.2, 'blocks.0.attn':.3, 'blocks.1.fc':.4, 'head':.5}, [.1,.2,.3,.4,.5])])
def test_given(spec, expect):
    "By place or by rule, the first that names a parameter; the model's sparsity plays no part"
    for s in (0,.99): assert given_sparsity(spec)(params(layers), s, names=names)==expect

@pytest.mark.parametrize('rest', ['erk', uniform_sparsity, global_sparsity, layers_dense('stem','er')])
def test_given_and_the_rest(rest):
    "Given sparsities are exact, the others keep the model's in all, and share it as their distribution does alone"
    ps = params(layers)
    f = given_sparsity({'head':.5, 'blocks.1.fc':0}, rest=rest)
    got = f(ps, .45, names=names)
    assert got[3:]==[0,.5] and sum((1-s)*n for s,n in zip(got, sizes))==pytest.approx(.55*652)
    left = 1-(.55*652-80-128)/364
    own = as_distribution(rest)
    assert got[:3]==pytest.approx(own(ps[:3], left, names=names[:3]) if isinstance(own, partial) else own(ps[:3], left))
    with pytest.raises(ValueError, match='sparsity is 0.9'): f(ps, .9, names=names)
    with pytest.raises(ValueError, match='sparsity is 0.1'): given_sparsity({'head':1, 'blocks.1.fc':.9}, rest=rest)(ps, .1, names=names)

def test_by_name():
    "Names of distributions, and of their functions"
    ps = params(layers)
    assert as_distribution('uniform')(ps, .5)==[.5]*5 and as_distribution('first-dense')(ps, .5)==[0]+[.5]*4
    assert as_distribution('er')(ps, .5)==erdos_renyi_sparsity(ps, .5, include_kernel=False)
    assert as_distribution('ERK') is as_distribution('erdos_renyi') is as_distribution('erdos_renyi_sparsity') is erdos_renyi_sparsity
    assert as_distribution('global')(ps, .5)==global_sparsity(ps, .5)
    assert as_distribution('first-last-dense')(ps, .3)==layers_dense([0,-1])(ps, .3)

def test_experts_count_by_expert():
    "A parameter of e experts has the ratio of one of them; where its axes lie doesn't matter to the ratio"
    for axes,shape in (((1,2,0),(8,6,4)), ((2,1,0),(8,4,6)), ((0,1,2),(6,4,8)), ((1,0,None),(4,6))):
        alone,e = torch.rand(6,4),math.prod(shape)//24
        got = erdos_renyi_sparsity([alone, torch.rand(shape), torch.rand(50,50)], .9, axes=[(0,1,None),axes,(0,1,None)])
        eps = .1*(24+24*e+2500)/((24+24*e)*10/24+2500*100/2500)
        assert [1-s for s in got]==pytest.approx([eps*10/24, eps*10/24, eps*100/2500])
        assert erdos_renyi_sparsity([alone, torch.rand(shape)], .9, False, axes=[(0,1,None),axes])==pytest.approx([.9]*2)

@some
@given(data=st.lists(st.tuples(st.integers(0,12), st.integers(1,12), st.sampled_from([0,.2,.5,.9,1])), min_size=1, max_size=6), s=sparsity)
def test_proportional(data, s):
    "The water level over the given densities; a layer that is given none gets none, and a budget past the others is refused"
    shapes,spec = [o[:2] for o in data],[o[2] for o in data]
    ns = [math.prod(o) for o in shapes]
    room = sum(n for n,o in zip(ns, spec) if o<1)
    if (1-s)*sum(ns)>room+1e-6:
        with pytest.raises(ValueError, match='at least'): proportional_sparsity(spec)(params(shapes), s)
        return
    d = 1-np.array(proportional_sparsity(spec)(params(shapes), s))
    keep = [i for i,o in enumerate(spec) if o<1 and ns[i]]
    assert all(d[i]==0 for i,o in enumerate(spec) if o==1)
    if keep: assert np.allclose(d[keep], water_fill([1-spec[i] for i in keep], [ns[i] for i in keep], (1-s)*sum(ns)), atol=1e-6)
    assert sum(live_counts(ns, d.__rsub__(1).tolist(), s))==round((1-s)*sum(ns))

# --- files

def test_json_and_yaml(tmp_path):
    "A list or a dict, as `given_sparsity` takes them"
    spec = {'head':0, '*':.9}
    (tmp_path/'a.json').write_text(json.dumps(spec))
    (tmp_path/'b.yml').write_text(yaml.safe_dump(spec, sort_keys=False))
    (tmp_path/'c.JSON').write_text('[0.5, 0.25]')
    for name in ('a.json','b.yml'): assert given_sparsity(tmp_path/name)(params(layers), .5, names=names)==[.9,.9,.9,.9,0]
    assert given_sparsity(str(tmp_path/'c.JSON'))(params([(2,2),(3,3)]), .5)==[.5,.25]

made = [layers_dense([0,-1]), layers_dense('head', erdos_renyi_sparsity), global_sparsity, balanced_flops_sparsity([3,1,4,1,5]),
    proportional_sparsity([.8,.8,.8,.8,.1]), given_sparsity([.5]*5)]

@pytest.mark.parametrize('f', made)
def test_made(f):
    "One sparsity in [0,1] for each parameter, the same again after pickling, parameters untouched"
    torch.manual_seed(1)
    ps = [torch.randn(*o) for o in layers]
    before = [p.clone() for p in ps]
    out = call_with(f, ps, .5, names=names)
    assert len(out)==5 and all(0<=o<=1 for o in out) and all(map(torch.equal, ps, before))
    assert call_with(pickle.loads(pickle.dumps(f)), ps, .5, names=names)==out
    assert sum(live_counts(sizes, out, .5))==326

@pytest.mark.parametrize('make,n_outputs', [(lambda: nn.ConvTranspose2d(2, 6, 3), 6), (lambda: nn.ConvTranspose1d(8, 3, 2), 3), (lambda: nn.Linear(2, 6), 6)])
@pytest.mark.filterwarnings('ignore:scores alone')
def test_the_floor_counts_outputs_where_they_lie(make, n_outputs):
    "Transposed convolutions hold inputs first; a layer whose scores all lose keeps one weight for each of its outputs"
    low,high = make(),nn.Linear(40, 40)
    nn.init.constant_(low.weight, .01)
    nn.init.constant_(high.weight, 1.)
    sparsify_model(nn.Sequential(low, high), .5, global_sparsity, mask_init='magnitude', sparse_init_mode=None)
    assert int(low.weight_mask.sum())==n_outputs

def test_the_floor_counts_the_outputs_of_every_expert():
    "A parameter (experts, inputs, outputs) of 3 experts with 5 outputs owes 15 live weights"
    ps = [torch.full((3,4,5), .01), torch.full((20,20), 1.)]
    with pytest.warns(UserWarning): assert live_counts([60,400], global_sparsity(ps, .5, axes=[(2,1,0),(0,1,None)]), .5)==[15,215]

# --- refusals

def on(make, *args, ps=params(layers), s=.5, names=names, **kw):
    def call(tmp_path): return make(*args)(ps, s, names=names, **kw)
    return call

def of_file(name, text=None):
    def call(tmp_path):
        if text: (tmp_path/name).write_text(text)
        return given_sparsity(tmp_path/name)
    return call

two = params([(2,5),(10,10)])
refusals = [(on(balanced_flops_sparsity, o, ps=two, names=['a','b']), say) for o,say in (([1,2,3],'one for each'), ([1,0],'flops is 0.*above 0'),
    ([1,math.nan],'above 0'), ([1,math.inf],'above 0'), (dict(a=1, b=-1),'above 0'))]
refusals += [(on(given_sparsity, spec), say) for spec,say in (([.5]*4,'given for head.weight'),
    ({'head':.5},"given for stem.weight: add it, 0 for dense, '\\*'"), ({},'given for stem'), ([.5]*4+[90],'is 90'), ([.5]*4+[True],'True'),
    ([.5]*4+[math.nan],'nan'), ({'*':'0.5'},"is '0.5'"), ({'*':-.1},'-0.1'))]
refusals += [(on(f, o, names=given), 'names') for f,o in ((layers_dense,'head'), (given_sparsity,{'*':.5}),
    (balanced_flops_sparsity,dict(head=3)), (layers_dense,[0,'1.weight'])) for given in (names[:3],)]
refusals += [(lambda _, bad=bad: as_distribution(bad), say) for bad,say in (('x',"'first-dense'"), (3,"'first-dense'"), (None,"'first-dense'"),
    (['erk'],"'first-dense'"), ('proportional_sparsity','makes a distribution'))]
refusals += [(of_file('b.json', '[50.0]'), '50.0'), (lambda _: erdos_renyi_sparsity(two, 2.), 'sparsity is 2.0'),
    (lambda _: erdos_renyi_sparsity(two, .5, erk_power_scale=-1), 'erk_power_scale is -1'),
    (lambda _: global_sparsity(two, .5, scores=[torch.ones(5)]), 'one for each weight'), (lambda _: global_sparsity(two, .5, min_live=-1), 'min_live is'),
    (on(layers_dense, [0,-1], s=.95), 'sparsity is 0.95, and must be below 0.589')]  # the others' density would be negative

@pytest.mark.parametrize('call,say', refusals)
def test_refused(tmp_path, call, say):
    "Law 10: names, numbers and files that can't be meant, each with an error that says what is wrong"
    with pytest.raises(ValueError, match=say): call(tmp_path)

def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError): of_file('c.json')(tmp_path)
