"What an engine answers, and what a history records, against masks kept apart and counted plainly"
import copy,math,pickle,pytest,torch
import matplotlib.pyplot as plt
from fastai_data import At,learner
from fastcore.basics import ifnone
from fastsparse.all import *
from fastsparse.masks.schedules import cubic_path
from fastsparse.methods.parts import acdc_path
from fastsparse.weights.find import masked_params
from fastsparse.report.history import pack_mask,SparseHistory,unpack_mask
from helpers import backward,data,mlp
from hypothesis import given,settings,strategies as st

plt.switch_backend('agg')
fast = dict(RigL_presets, batches_per_update=4, seed=0)

class Plain:
    "Clones of the masks at the start and after each update, kept in full"
    def __init__(self): self.steps,self.masks,self.fractions = [],[],[]
    def begin(self, engine): self.masks.append([s.mask.clone() for s in engine.tallies])
    def __call__(self, engine, t):
        self.steps.append(t)
        self.masks.append([s.mask.clone() for s in engine.tallies])

def steps_of(model, opt, begin, end):
    for t in range(begin, end):
        opt.zero_grad()
        backward(model, *data(model, seed=100+t))
        opt.step()

def run(settings, n=40, sparsity=.8, sizes=(6,8,7,3), steps=None, **kwargs):
    "A model trained for `n` steps, its engine, a history and the plain record beside it"
    model = mlp(sizes)
    if sparsity is not None: sparsify_model(model, sparsity, seed=0)
    history,plain = SparseHistory(**kwargs),Plain()
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    dst = DynamicSparseTraining(model, opt, n, on_update=[history,plain], **settings)
    steps_of(model, opt, 0, ifnone(steps, n))
    return model,dst,history,plain

acdc = dict(sparsity=.75, sparsity_path=acdc_path(phase=.2, start=.2, stop=.9), batches_per_update=4, replace_step=False, seed=0, initial_drop_grow_pct=0.)
gmp = dict(grow_score_f=None, sparsity=.75, sparsity_path=cubic_path(), batches_per_update=4, replace_step=False, seed=0, mask_init='magnitude')
rules = dict(rules=[('0.*', dict(batches_per_update=4)), ('2.*', dict(batches_per_update=6, initial_drop_grow_pct=.5)), ('*', None)], stop_pct=1., seed=0)
presets = dict(RigL=RigL_presets, SET=SET_presets, SNFS=SNFS_presets)
runs = dict(ACDC=(acdc,None), GMP=(gmp,None), rules=(rules,.8), **{k:(dict(o, batches_per_update=4, seed=0),.8) for k,o in presets.items()})

@pytest.mark.parametrize('name', list(runs))
def test_against_masks_kept_in_full(name):
    "Live, dropped, grown, survivors and ever-live weights are what comparing whole masks gives, for each parameter and update"
    settings,sparsity = runs[name]
    model,dst,history,plain = run(settings, sparsity=sparsity)
    df = history.df
    assert len(plain.steps)>=3 and history.steps==[0]+plain.steps
    for k,masks in enumerate(plain.masks):
        rows = df[df['update']==k]
        for i,mask in enumerate(masks):
            row,past = rows.iloc[i],[o[i] for o in plain.masks[:k+1]]
            was = past[-2] if k else mask
            want = int(mask.sum()),int((was&~mask).sum()),int((mask&~was).sum()),int((mask&past[0]).sum()),int(torch.stack(past).any(0).sum())
            assert (row.live,row.dropped,row.grown,row.survivors,row.ever)==want
            assert (row.weights,row.density)==(mask.numel(),int(mask.sum())/mask.numel()) and row.target==row.live

def test_totals_are_sums():
    "By hand from the table: sums over parameters, and fractions of all weights, of the start and of what lived before"
    *_,history,plain = run(acdc, sparsity=None)
    df,t = history.to_frame(),history.totals()
    n = df[df['update']==0].weights.sum()
    for k in range(len(t)):
        rows,row = df[df['update']==k],t.iloc[k]
        before = df[df['update']==max(k-1, 0)].live.sum()
        assert row.live==rows.live.sum() and row.sparsity==1-rows.live.sum()/n and row.ever_live==rows.ever.sum()/n
        assert row.survival==rows.survivors.sum()/t.live[0] and row.drop_churn==rows.dropped.sum()/before and row.grow_churn==rows.grown.sum()/before
    assert t.ever_live.iloc[0]==1  # a dense start has tried everything

def test_drop_fractions():
    "The fraction that the update had: the cosine's value, or the value before the count of updates went up; NaN where a method had no update"
    *_,history,plain = run(dict(batches_per_update=4, drop_fraction=[.5,.25], seed=0))
    assert history.totals().drop_fraction.tolist()[1:]==[[.5,.25][i%2] for i in range(len(plain.steps))]
    *_,history,plain = run(fast)
    assert history.totals().drop_fraction.tolist()[1:]==pytest.approx([.15*(1+math.cos(math.pi*t/30)) for t in plain.steps])
    *_,history,plain = run(rules)
    df = history.to_frame()
    for t in plain.steps:
        a,b,c = df[df.step==t].drop_fraction
        assert math.isnan(a)==(t%4!=0) and math.isnan(b)==(t%6!=0) and math.isnan(c)

def test_masks_without_a_method():
    "They are recorded, rest, and have no drop fraction"
    model = mlp()
    sparsify_model(model, .5, seed=0)
    history = SparseHistory()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    dst = DynamicSparseTraining(model, opt, 20, sparse_modules=[model[0]], on_update=history, **fast)
    steps_of(model, opt, 0, 10)
    df = history.to_frame()
    rest = df[df.parameter!='0.weight']
    assert set(rest.parameter)=={'2.weight','4.weight'} and not rest.dropped.any() and not rest.grown.any() and rest.drop_fraction.isna().all()
    status = dst.status()
    assert status.n_params==3 and status.df.live[1]==status.df.target[1] and status.df.drop_fraction[1]==0

def test_needs_the_start():
    "A history that was appended after the engine was made is refused at the first update, or begun by hand"
    model = mlp()
    sparsify_model(model, .5, seed=0)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    dst,history = DynamicSparseTraining(model, opt, 20, **fast),SparseHistory()
    with pytest.raises(ValueError, match='on_update.*begin'): history(dst, 4)
    history.begin(dst)
    assert len(history.to_frame())==3 and 'History of 0 updates of 3' in repr(history)
    other = mlp((6,9,7,3))
    sparsify_model(other, .5, seed=0)
    with pytest.raises(ValueError, match='another model'): SparseEngine(other, torch.optim.SGD(other.parameters(), lr=.1), 20, on_update=history, **fast)

# ---- Fits, one after the other and resumed ----

def test_later_fits_continue(tmp_path):
    "The second fit's steps come behind the whole first one, and survival is still that of the very start"
    history = SparseHistory()
    cb = DynamicSparseTrainingCallback(**fast, on_update=history)
    learn = learner(tmp_path)
    sparsify_model(learn.model, .9, seed=0)
    start = [o.mask.clone() for o in masked_params(learn.model)]
    learn.fit(2, cbs=cb)
    assert history.steps==[0,4,8,12]  # of 20, until 15
    learn.fit(1, cbs=cb)
    assert history.steps==[0,4,8,12,24]  # 10 more, until 7.5
    learn.fit(2, cbs=cb)
    assert history.steps[5:]==[34,38,42]
    now = [o.mask for o in masked_params(learn.model)]
    assert history.totals().survivors.iloc[-1]==sum(int((a&b).sum()) for a,b in zip(start,now))

def test_resume_keeps_its_steps(tmp_path):
    "A history saved with a checkpoint and a resumed run give the record of the run that was never stopped"
    def start(history):
        model = mlp()
        sparsify_model(model, .8, seed=0)
        opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
        return model,opt,DynamicSparseTraining(model, opt, 24, on_update=history, **fast)
    for stop in (2,5):
        whole = SparseHistory(keep_masks=True)
        model,opt,dst = start(whole)
        steps_of(model, opt, 0, 24)
        first = SparseHistory(keep_masks=True)
        model,opt,dst = start(first)
        steps_of(model, opt, 0, stop)
        states = copy.deepcopy([o.state_dict() for o in (model, opt, dst)])
        first.save(tmp_path/'h')
        second = SparseHistory.load(tmp_path/'h')
        model,opt,dst = start(second)
        for o,state in zip((model, opt, dst), states): o.load_state_dict(state)
        steps_of(model, opt, stop, 24)
        assert second.to_frame().equals(whole.to_frame()) and second.masks==whole.masks, stop

@pytest.mark.parametrize('keep_masks', [False,True])
def test_round_trips(tmp_path, keep_masks):
    "Pickle, deepcopy, save and load, and a history that has not begun; the file loads without pickled code"
    *_,history,_ = run(fast, keep_masks=keep_masks)
    history.save(tmp_path/'h')
    torch.load(tmp_path/'h', weights_only=True)
    for o in (pickle.loads(pickle.dumps(history)), copy.deepcopy(history), SparseHistory.load(tmp_path/'h')):
        assert vars(o).keys()==vars(history).keys() and o.to_frame().equals(history.to_frame())
        assert all(getattr(o, k)==getattr(history, k) for k in vars(history) if k!='records')
    SparseHistory(keep_masks=keep_masks).save(tmp_path/'empty')
    assert SparseHistory.load(tmp_path/'empty').keep_masks==keep_masks

# ---- Packing ----

@given(st.lists(st.booleans(), max_size=70), st.lists(st.booleans(), max_size=70))
@settings(max_examples=60)
def test_packing(a, b):
    "Bits come back, and `&`, `|` and counting mean what they mean for masks; also where the layout is not contiguous"
    n = min(len(a), len(b))
    a,b = torch.tensor(a[:n], dtype=torch.bool),torch.tensor(b[:n], dtype=torch.bool)
    assert torch.equal(unpack_mask(pack_mask(a), a.shape), a)
    assert pack_mask(a)&pack_mask(b)==pack_mask(a&b) and pack_mask(a)|pack_mask(b)==pack_mask(a|b) and pack_mask(a).bit_count()==int(a.sum())

def test_packing_follows_the_logical_order():
    m = torch.rand(4,3,2,2)>.5
    assert pack_mask(m)==pack_mask(m.contiguous(memory_format=torch.channels_last)) and torch.equal(unpack_mask(pack_mask(m), m.shape), m)

# ---- Hooks ----

def hooked(n=24, steps=None, **settings):
    "What a hook sees after each update, and the masks then"
    model,seen = mlp(),[]
    def hook(engine, t): seen.append((engine.status(t), [int(o.mask.sum()) for o in masked_params(model)]))
    dst = DynamicSparseTraining(model, torch.optim.SGD(model.parameters(), lr=.1), n, on_update=hook, **settings)
    for t in range(ifnone(steps, n)):
        dst.opt.zero_grad()
        backward(model, *data(model, seed=t))
        dst.step()
    return dst,seen

def test_hook_is_about_the_update_just_made():
    "Its step, count, fraction and target, not those of the next one"
    dst,seen = hooked(sparsity=dict(type='cycling', values=[.8,.6,.4]), drop_fraction=[.5,.25], batches_per_update=4, stop_pct=1., seed=0)
    assert [s.step for s,_ in seen]==[4,8,12,16,20] and all(s.due for s,_ in seen)
    assert [s.drop_fraction for s,_ in seen]==[.5,.25,.5,.25,.5] and [s.n_updates for s,_ in seen]==[1,2,3,4,5]
    n = 6*8+8*7+7*3
    assert [s.n_target for s,_ in seen]==[round((1-o)*n) for o in (.6,.4,.8,.6,.4)]
    for s,live in seen: assert s.df.target.tolist()==s.df.live.tolist()==live and s.df.target_sparsity.tolist()==s.df.sparsity.tolist()

def test_hook_of_pruning():
    "The target is a third and two thirds of the way, and an update that has done all remains an update step"
    dst,seen = hooked(grow_score_f=None, sparsity=lambda step: min(.05*step, .9), updates=[6,12,18], replace_step=False, seed=0)
    assert [s.target_sparsity for s,_ in seen]==pytest.approx([.3,.6,.9], abs=.01) and [s.sparsity for s,_ in seen]==[s.target_sparsity for s,_ in seen]
    assert all(s.due for s,_ in seen) and dst.due(18) and not dst.due(12) and not dst.due(19)

def test_resumed_engine_knows_its_last_update():
    "An engine saved right after an update shows that update's numbers"
    same = dict(drop_fraction=[.5,.25], batches_per_update=4, sparsity=.8, seed=0)
    (dst,_),(twin,_) = hooked(steps=9, **same),hooked(steps=0, **same)
    state = dst.state_dict()
    twin.model.load_state_dict(dst.model.state_dict())
    twin.load_state_dict(state)
    assert twin.status().df.equals(dst.status().df) and twin.status().drop_fraction==.25 and twin.status(9).drop_fraction==.5

# ---- Status ----

def test_status_while_it_trains():
    "Before, at and after an update: due, fraction, counts and what moved; asking changes nothing"
    model,dst,history,plain = run(fast, steps=4)
    before = dst.state_dict()
    s = dst.status(4)
    assert (s.step,s.due,s.n_updates,s.dropped,s.grown)==(4,True,0,0,0)
    assert (s.n_params,s.n_weights,s.n_live)==(3,6*8+8*7+7*3,sum(int(o.mask.sum()) for o in masked_params(model)))
    assert s.drop_fraction==pytest.approx(.15*(1+math.cos(math.pi*4/30))) and not dst.status().due and dst.status().step==3
    assert dst.state_dict()==before
    model,dst,history,plain = run(fast, steps=5)
    s,row = dst.status(),history.totals().iloc[-1]
    assert (s.n_updates,s.dropped,s.grown,s.n_live)==(1,row.dropped,row.grown,row.live) and s.sparsity==s.target_sparsity==1-s.n_live/s.n_weights

def test_status_of_a_sparsity_that_moves():
    "The target runs ahead of the masks: half a cube's way after half the time"
    model,dst,history,plain = run(gmp, sparsity=None, steps=4)
    s = dst.status(15)
    want = .75*(1-(1-15/30)**3)
    assert s.sparsity==0 and s.n_target==round((1-want)*s.n_weights) and s.target_sparsity==pytest.approx(want, abs=.01)

@pytest.mark.filterwarnings('ignore:scores alone', 'ignore:the engine was left')
def test_status_where_layers_compete():
    "Their targets are those of the last update, since only scores tell the next ones"
    model,dst,history,plain = run(dict(gmp, sparse_f='global'), sparsity=None, steps=9)
    assert dst.status().n_target==dst.status(20).n_target==int(sum(o.sum() for o in plain.masks[-1]))

def test_status_of_a_moved_count():
    "A fixed sparsity that was asked for is the target until an update reaches it"
    model,dst,history,plain = run(dict(fast, sparsity=.9), sparsity=.5, steps=5)
    n = sum(o.p.numel() for o in masked_params(model))
    model,dst,history,plain = run(dict(fast, sparsity=.9), sparsity=.5, steps=2)
    s = dst.status()
    assert s.n_target==round(.1*n) and s.n_live==round(.5*n)
    assert history.totals().target.tolist()==[s.n_target]

def test_last_update_of_rules():
    "A method that had no update has moved nothing in the last one, whatever it did before"
    model,dst,history,plain = run(rules, steps=7)
    assert plain.steps==[4,6]
    s = dst.status()
    assert s.df.dropped.tolist()[::2]==[0,0] and s.df.dropped[1]==int((plain.masks[-2][1]&~plain.masks[-1][1]).sum())

def test_callback_answers_after_the_fit(tmp_path):
    "During the fit the engine's answers, afterwards the same counts, also from a pickle"
    seen = []
    cb = DynamicSparseTrainingCallback(**fast)
    with pytest.raises(ValueError, match='no fit yet'): cb.status()
    learn = learner(tmp_path)
    sparsify_model(learn.model, .9, seed=0)
    learn.fit(1, cbs=[cb, At('after_batch', [4,9], lambda learn: seen.append(cb.status()))])
    s = cb.status()
    assert cb.engine is None and [o.step for o in seen]==[4,9] and seen[0].grown==s.grown>0
    assert s.n_live==seen[1].n_live==sum(int(o.mask.sum()) for o in masked_params(learn.model)) and s.n_updates==1 and not s.due
    assert pickle.loads(pickle.dumps(cb)).status().df.equals(s.df) and pickle.loads(pickle.dumps(s)).df.equals(s.df)
    assert s.drop_fraction==0 and not s.df.drop_fraction.any()
    head,columns,first,*_ = repr(s).splitlines()
    assert 'not an update step' in head and columns.split()[:2]==['parameter','weights'] and first.split()[0]=='0.weight'

# ---- Plots ----

def test_plots_show_the_table():
    "The lines that are drawn are the columns"
    *_,history,_ = run(fast, keep_masks=True)
    t,df = history.totals(),history.to_frame()
    ax = history.plot_survival()
    assert [list(l.get_ydata()) for l in ax.lines]==[t.survival.tolist(), t.ever_live.tolist()]
    ax = history.plot_schedules()
    assert [list(l.get_ydata()) for l in ax.lines]==[t.drop_fraction.tolist()[1:], t.target_sparsity.tolist()]
    ax = history.plot_layers()
    assert [l.get_label() for l in ax.lines]==['0.weight','2.weight','4.weight','all']
    assert list(ax.lines[0].get_ydata())==df[df.parameter=='0.weight'].density.tolist()
    fig = history.plot()
    assert tuple(fig.get_size_inches())==(7,5.5) and len(fig.axes)==4 and history.plot_churn(fig.axes[0]) is fig.axes[0]
    plt.close('all')

def test_many_layers():
    "Beyond eight parameters only the whole is named"
    *_,history,_ = run(fast, sizes=(6,)*12)
    ax = history.plot_layers()
    assert len(ax.lines)==12 and [o.get_text() for o in ax.get_legend().get_texts()]==['all']
    plt.close('all')

def test_a_tensor_that_is_marked_as_a_folder_is_refused(tmp_path):
    "torch.load leaves its memory as it finds it"
    path = tmp_path/'a.pt'
    model,history = mlp(),SparseHistory(keep_masks=True)
    sparsify_model(model, .5, seed=0)
    history.begin(DynamicSparseTraining(model, torch.optim.SGD(model.parameters(), lr=.1), 20, **fast))
    history.save(path)
    data = bytearray(path.read_bytes())
    data[data.rfind(b'PK\1\2')+38] |= 16
    path.write_bytes(data)
    with pytest.raises(ValueError, match='a.pt.* is damaged'): SparseHistory.load(path)
