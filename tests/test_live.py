"Live weights in a run: by the rule from the second step on, the same network as with masks, dense again in the end"
import copy,pickle,pytest,torch
from fastsparse.all import *
from fastsparse.model.live_layers import LiveLayer
from fastsparse.weights.live import LiveWeight
from fastsparse.weights.weight import handler_of,masked_params
from fastsparse.train.live import ForwardWatch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.optim.swa_utils import AveragedModel,get_ema_multi_avg_fn

n_steps = 12

class Net(nn.Module):
    "Its second layer is wide enough to live at batches of 64, unless its weight is only `read`"
    def __init__(self, read=False):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.c,self.read = nn.Linear(64,256),nn.Linear(256,512),nn.Linear(512,10),read
    def forward(self, x):
        x = self.a(x).relu()
        return self.c((F.linear(x, self.b.weight, self.b.bias) if self.read else self.b(x)).relu())

opts = dict(sgd=lambda ps: torch.optim.SGD(ps, .05, momentum=.9), adam=lambda ps: torch.optim.AdamW(ps, 1e-3))

def start(way=None, opt='adam', steps=n_steps, sparsity=.9, read=False, method='rigl', **kwargs):
    "Model, optimizer and engine, in float64"
    m = Net(read).double()
    if method!='gmp': sparsify_model(m, sparsity, seed=0)
    opt = opts[opt](m.parameters())
    settings = dict(method=method, batches_per_update=3, seed=0, sparse_compute=way)|kwargs
    if method=='gmp': settings['sparsity'] = sparsity
    return m,opt,DynamicSparseTraining(m, opt, steps, **settings)

def go(m, opt, first, last, n_acc=1, after=None):
    for t in range(first, last):
        for i in range(n_acc):
            g = torch.Generator().manual_seed(10*t+i)
            F.cross_entropy(m(torch.randn(64, 64, generator=g).double()), torch.randint(10, (64,), generator=g)).backward()
        opt.step()
        opt.zero_grad()
        if after: after(t)
    return m

def lives(m): return [isinstance(handler_of(o.p), LiveWeight) for o in masked_params(m)]

def same(a, b, exact=False):
    for (k,u),v in zip(a.state_dict().items(), b.state_dict().values()):
        assert u.equal(v) if exact or u.dtype==torch.bool else torch.allclose(u, v, rtol=0, atol=1e-9), k

@pytest.mark.parametrize('opt', opts)
@pytest.mark.parametrize('method', ['rigl','set','static','auto'])
def test_a_plain_loop_goes_live_after_its_first_step_and_trains_the_same_network(method, opt):
    "Which layers: by the rule. Dense again after the last step, the same parameter objects"
    (m,o,dst),(masked,*rest) = start(None, opt, method=method),start(False, opt, method=method)
    ps = list(m.parameters())
    assert lives(m)==[False]*3
    go(m, o, 0, 1)
    assert lives(m)==[False,True,False] and dst.live.report.plan=={'a.weight':'dense','b.weight':'rows','c.weight':'dense'}
    go(m, o, 1, n_steps-1)
    assert lives(m)==[False,True,False]
    go(m, o, n_steps-1, n_steps)
    assert lives(m)==[False]*3 and all(p is q and p.shape==r.shape for p,q,r in zip(ps, m.parameters(), masked.parameters()))
    go(m, o, n_steps, n_steps+2)
    same(m, go(masked, rest[0], 0, n_steps+2))
    assert method=='static' or dst.n_updates>1

def test_the_summary_says_which_and_why():
    "A line for each layer, which is gone when the run has ended"
    m,o,dst = start()
    go(m, o, 0, 1)
    notes = list(sparse_summary(m).df.note[[0,2,4]])
    assert notes[1]=='live weights only' and all(n.startswith('masked: ') and 'batches of 64' in n for n in (notes[0],notes[2]))
    dst.remove()
    assert lives(m)==[False]*3 and not any(sparse_summary(m).df.note[[0,2,4]])

def test_without_an_end_weights_stay_masked():
    "And the engine says why; who asks for live weights has them until remove()"
    m,o,dst = start(steps=None, batches_per_update=None, updates=[2], drop_fraction=.3)
    go(m, o, 0, 2)
    assert lives(m)==[False]*3 and 'n_steps' in dst.live.why_masked
    plan = {'a.weight':'rows','b.weight':'rows'}
    m,o,dst = start(plan, steps=None, batches_per_update=None, updates=[2], drop_fraction=.3)
    assert lives(m)==[True,True,False]
    go(m, o, 0, 4)
    dst.remove()
    assert lives(m)==[False]*3
    masked,o,_ = start(False, steps=None, batches_per_update=None, updates=[2], drop_fraction=.3)
    same(m, go(masked, o, 0, 4))

def test_measured():
    "The first step's batch is measured; a resumed run takes the plan"
    m,o,dst = start(True)
    go(m, o, 0, 5)
    assert dst.live.report.ratios and dst.seen['names']==[n for n,r in dst.live.report.plan.items() if r=='rows']
    again = start(True)
    for new,old in zip(again, (m,o,dst)): new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert lives(again[0])==lives(m)
    for k in ((m,o), again[:2]): go(*k, 5, n_steps)
    same(m, again[0], exact=True)

def test_a_bad_way_is_refused_before_anything_changed():
    m,o,dst = start()
    dst.remove()
    for way,match in (('rows','by a fixed rule'), ({'x.weight':'rows'},'plan names x.weight')):
        with pytest.raises(ValueError, match=match): DynamicSparseTraining(m, o, n_steps, way, method='rigl', batches_per_update=3)
    DynamicSparseTraining(m, o, n_steps, method='rigl', batches_per_update=3)

@pytest.mark.parametrize('method', ['rigl','gmp'])
@pytest.mark.parametrize('n', [1,2,7])
def test_resumed_runs_are_equal_bit_for_bit(n, method):
    "Law 6: from states, in objects made anew, also back in the same objects"
    whole = start(method=method, sparsity=.95)
    go(*whole[:2], 0, n)
    states = copy.deepcopy([o.state_dict() for o in whole])
    go(*whole[:2], n, n_steps)
    again = start(method=method, sparsity=.95)
    for o,s in zip(again, copy.deepcopy(states)): o.load_state_dict(s)
    go(*again[:2], n, n_steps)
    same(whole[0], again[0], exact=True)
    for o,s in zip(again, copy.deepcopy(states)): o.load_state_dict(s)
    go(*again[:2], n, n_steps)
    same(whole[0], again[0], exact=True)
    assert lives(again[0])==[False]*3

@pytest.mark.parametrize('stop', [1,3,5,6,8])
def test_resumed_from_files_between_accumulated_batches(stop, tmp_path):
    "The gradient of half a step is in the file; the first step's too"
    def run(m, opt, dst, first, last):
        for i in range(first, last):
            g = torch.Generator().manual_seed(i)
            F.cross_entropy(m(torch.randn(64, 64, generator=g).double()), torch.randint(10, (64,), generator=g)).backward()
            if i%2==0: continue
            opt.step()
            opt.zero_grad()
    whole,part,again = start(),start(),start()
    run(*whole, 0, 2*n_steps)
    run(*part, 0, stop)
    save_run(tmp_path/'run', *part, grads=True)
    load_run(tmp_path/'run', *again)
    run(*again, stop, 2*n_steps)
    same(whole[0], again[0], exact=True)

def _pickled(o): return pickle.loads(pickle.dumps(o))

@pytest.mark.parametrize('copied', [copy.deepcopy,_pickled], ids=['deepcopy','pickle'])
def test_copies_of_a_run_make_the_same_steps_bit_for_bit(copied):
    "Made before the first step, in the first step, and live; original and copies stay apart"
    whole = start()
    early = copied(whole)
    late = [early]
    go(*whole[:2], 0, 4)
    late.append(copied(whole))
    assert lives(late[1][0])==[False,True,False]
    go(*whole[:2], 4, n_steps)
    go(*late[0][:2], 0, n_steps)
    go(*late[1][:2], 4, n_steps)
    for o in late:
        same(whole[0], o[0], exact=True)
        assert lives(o[0])==[False]*3
        assert not any(isinstance(h, ForwardWatch) for m in o[0].modules() for h in m._forward_pre_hooks.values())

@pytest.mark.parametrize('buffers', [False,True])
@pytest.mark.parametrize('since', [0,1,5,10])
def test_averages_are_those_of_masks(since, buffers):
    "Made before the first step, while weights are live, and after the topology came to rest (stop_pct .75)"
    def run(way):
        m,o,dst = start(way, 'sgd')
        made = []
        def average(t):
            if t+1==since: made.append(AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(.5), use_buffers=buffers))
            for a in made: a.update_parameters(m)
        if not since: made.append(AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(.5), use_buffers=buffers))
        go(m, o, 0, n_steps, after=average)
        x = torch.ones(2, 64).double()
        return m,made[0](x),made[0].module,dst
    (m,y,a,dst),(masked,z,b,_) = run(None),run(False)
    same(m, masked)
    assert torch.allclose(y, z, rtol=0, atol=1e-9)
    same(a, b)
    assert lives(a)==[False]*3 and (since==10 or 'average' in dst.live.why_masked)

def test_a_copy_that_is_kept_is_an_ordinary_model_in_the_end():
    "As the best model so far; also without an update since"
    m,o,dst = start(method='static')
    kept = []
    go(m, o, 0, 6, after=lambda t: kept.append(copy.deepcopy(m)) if t==3 else None)
    y = kept[0](torch.ones(2, 64).double())
    dst.remove()
    assert not any(isinstance(c, LiveLayer) for k in (m,kept[0]) for c in k.modules())
    assert torch.allclose(kept[0](torch.ones(2, 64).double()), y) and kept[0].b.weight.shape==(512,256)

def test_a_layer_whose_weight_is_only_read_stays_masked_and_says_so():
    "Swin's attention does that: no error where nobody asked for live weights, also in fastai's callback"
    m,o,dst = start(read=True)
    go(m, o, 0, n_steps)
    masked,o,_ = start(False, read=True)
    same(m, go(masked, o, 0, n_steps), exact=True)
    assert set(dst.live.report.plan.values())=={'dense'} and 'not called' in dst.live.report.df.note[1]

penalties = dict(mean=lambda m: m.b.weight.abs().mean(), norm=lambda m: m.b.weight.square().sum(1).sqrt().mean())

@pytest.mark.parametrize('n_acc', [1,2])
@pytest.mark.parametrize('penalty', penalties)
def test_a_weight_that_the_loss_reads_too_stays_masked_and_says_so(penalty, n_acc):
    "A mean over live values would be another one than over all, and rows are gone in a vector"
    def trained(way):
        m,o,dst = start(way)
        for t in range(n_steps):
            for i in range(n_acc):
                g = torch.Generator().manual_seed(10*t+i)
                x,y = torch.randn(64, 64, generator=g).double(),torch.randint(10, (64,), generator=g)
                (F.cross_entropy(m(x), y)+.1*penalties[penalty](m)).backward()
            o.step()
            o.zero_grad()
            if t==n_steps//2: note = dst.live.report.df.note[1] if way is None else ''
        return m,note
    (m,note),(masked,_) = trained(None),trained(False)
    same(m, masked)
    assert 'more than it read' in note

class Twice(Net):
    def forward(self, x):
        x = self.a(x).relu()
        return self.c((self.b(x)+self.b(x.flip(0))).relu())

calls = dict(twice=lambda m, x: m(x), recomputed=partial(checkpoint, use_reentrant=False), reentrant=partial(checkpoint, use_reentrant=True))

@pytest.mark.parametrize('call', calls)
def test_a_layer_that_is_called_twice_or_under_checkpointing_goes_live(call):
    m = (Twice if call=='twice' else Net)().double()
    sparsify_model(m, .9, seed=0)
    o = opts['adam'](m.parameters())
    DynamicSparseTraining(m, o, n_steps, method='rigl', batches_per_update=3, seed=0)
    calls[call](m, torch.randn(64, 64, dtype=torch.double, requires_grad=True)).square().mean().backward()
    assert all(type(p) is nn.Parameter for p in m.parameters())
    o.step()
    assert lives(m)==[False,True,False]

def test_an_error_in_a_forward_of_the_first_step_leaves_weights_in_place():
    m,o,dst = start()
    ps = list(m.parameters())
    with pytest.raises(RuntimeError): m(torch.randn(4, 65).double())
    assert all(a is b for a,b in zip(m.parameters(), ps))

def test_what_a_loop_did_by_hand_stays():
    "sparse_compute called after the engine was made, and a second engine on other layers"
    m,o,dst = start()
    report = sparse_compute(m, None, o, dict.fromkeys([p.name for p in masked_params(m)], 'rows'))
    go(m, o, 0, n_steps+1)
    assert lives(m)==[True]*3 and dst.live.report is None and 'already' in dst.live.why_masked
    report.remove()

@pytest.mark.parametrize('odd,why', [('compiled','compiled'), ('lamb','treats each weight'), ('snfs','dense history')])
def test_what_needs_dense_weights_stays_masked_and_says_why(odd, why):
    "A compiler, an optimizer, a method"
    class Own(torch.optim.SGD): pass
    m = Net().double()
    sparsify_model(m, .9, seed=0)
    o = (Own if odd=='lamb' else torch.optim.SGD)(m.parameters(), .05, momentum=.9)
    net = torch.compile(m, backend='eager') if odd=='compiled' else m
    dst = DynamicSparseTraining(net, o, n_steps, method='snfs' if odd=='snfs' else 'rigl', batches_per_update=3, seed=0)
    go(net, o, 0, 2)
    assert lives(m)==[False]*3 and why in dst.live.why_masked and why in sparse_summary(m).df.note[0]

def test_a_model_compiled_after_the_engine_was_made_stays_masked():
    "The engine has the model, the loop calls what was compiled of it"
    m,o,dst = start()
    run = torch.compile(m, backend='eager')
    for t in range(2): go(run, o, t, t+1)
    assert lives(m)==[False]*3 and 'compiled' in dst.live.why_masked
    dst.remove()
    assert not any(sparse_summary(m).df.note[[0,2,4]])

def test_a_given_batch_size_goes_before_the_one_seen():
    "A batch that is cut into pieces counts as what it is said to be"
    m,o,dst = start(batch_size=8)
    go(m, o, 0, 2)
    assert lives(m)==[False]*3 and 'batches of 8' in dst.live.report.df.note[1]

@pytest.mark.parametrize('kind', ['register_hook','register_post_accumulate_grad_hook'])
def test_a_hook_on_a_live_weight_is_told_that_it_sees_live_gradients_only(kind):
    "Growth reads dead gradients as the backward made them: silence would be another topology than with masks"
    m,o,_ = start()
    go(m, o, 0, 1)
    getattr(m.b.weight, kind)(lambda t: None)
    with pytest.warns(UserWarning, match='hooks on a weight.*sparse_compute=False'): go(m, o, 1, 5)
