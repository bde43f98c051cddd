"The laws under random operations in random order: a state machine of hypothesis over the public operations of a small model"
import copy, fastsparse.all, io, pickle, pytest, torch, warnings
from fastsparse.all import *
from fastsparse.weights.find import masked_params
from fastsparse.prune.tickets import rewind
from fastsparse.masks.schedules import cubic_path
from helpers import assert_dead
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

kinds = dict(sgd=(torch.optim.SGD,dict(lr=.1, momentum=.9)), adam=(torch.optim.Adam,dict(lr=.01)), adamw=(torch.optim.AdamW,dict(lr=.01)),
    rprop=(torch.optim.Rprop,dict(lr=.01)))

def optimizer(kind, model):
    cls,kw = kinds[kind]
    return cls(model.parameters(), **kw)

methods = dict(set='SET_presets', rigl='RigL_presets', snfs='SNFS_presets', static=None, gmp='GMP_presets')

class Laws(RuleBasedStateMachine):
    "A model, an optimizer, perhaps an engine; beside them the counts that must be"
    @initialize(seed=st.integers(0, 99), opt=st.sampled_from(sorted(kinds)), sparsity=st.sampled_from([0.,.3,.5,.8]))
    def begin(self, seed, opt, sparsity):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8,4, bias=False))
        self.kind,self.engine,self.saved,self.first = opt,None,None,copy.deepcopy(self.model.state_dict())
        self.sparsify(sparsity, seed)

    def sparsify(self, sparsity, seed):
        sparsify_model(self.model, sparsity, sparse_init_mode=None, seed=seed)
        self.renew()
        n = 6*8+8*4
        assert sum(self.counts())==round((1-sparsity)*n)

    def renew(self):
        self.opt = optimizer(self.kind, self.model)
        self.engine,self.method,self.saved = None,None,None
        self.expected,self.same = self.counts(),[*self.model.parameters()]

    def masks(self): return [o.mask for o in masked_params(self.model)]
    def counts(self): return [int(m.sum()) for m in self.masks()]

    def step(self, scale=1., bad=False):
        x = torch.randn(8,6)
        loss = self.model(x).square().mean()*scale
        loss.backward()
        if bad: self.model[3].weight.grad[0,0] = torch.nan

    @rule(n=st.integers(1, 4), clip=st.booleans(), accumulate=st.integers(1, 3))
    @precondition(lambda self: self.masks())
    def train(self, n, clip, accumulate):
        was = [m.clone() for m in self.masks()]
        for _ in range(n):
            self.opt.zero_grad()
            for _ in range(accumulate): self.step()
            if clip: nn.utils.clip_grad_norm_(self.model.parameters(), 1.)
            self.opt.step()
        if self.engine is None: assert all(map(torch.equal, was, self.masks()))
        self.moved()

    @rule()
    @precondition(lambda self: self.masks())
    def nan_gradient(self):
        "A step with gradients that aren't finite, which a scaler would leave out, moves nothing"
        was = [m.clone() for m in self.masks()]
        self.opt.zero_grad()
        self.step(bad=True)
        self.opt.zero_grad()
        assert all(map(torch.equal, was, self.masks()))

    @rule(name=st.sampled_from(sorted(methods)), seed=st.integers(0, 9))
    @precondition(lambda self: self.masks() and self.engine is None)
    def attach(self, name, seed):
        if methods[name] is None or (name,self.kind)==('snfs','rprop'): return  # Rprop keeps no average of gradients, and is refused by name
        self.method = name
        now = 1-sum(self.counts())/80
        goal = dict(sparsity=max(.9, now), sparsity_path=cubic_path(init=now)) if name=='gmp' else {}  # a path that begins at 0 would grow first
        settings = {**getattr(fastsparse.train.presets, methods[name]), 'batches_per_update':3, **goal}
        self.renew_opt()
        self.engine = DynamicSparseTraining(self.model, self.opt, 30, **settings, seed=seed)
        self.expected = self.counts()

    def renew_opt(self): self.opt,self.saved = optimizer(self.kind, self.model),None

    @rule()
    @precondition(lambda self: self.engine is not None)
    def detach(self):
        self.engine.remove()
        self.engine,self.saved = None,None

    @rule()
    @precondition(lambda self: self.engine is not None and self.method!='gmp')
    def move_by_hand(self):
        "An update between steps, with dense gradients where it reads them"
        self.opt.zero_grad()
        for s in self.engine.moving: s.p.grad = None
        try: self.engine.update(1)
        except ValueError as e: assert 'grad' in str(e)
        self.moved()

    def moved(self):
        if self.method!='gmp' or self.engine is None:
            if self.method!='snfs' or self.engine is None: assert self.counts()==self.expected
            else: assert sum(self.counts())==sum(self.expected)
        else: assert sum(self.counts())<=sum(self.expected)
        self.expected = self.counts()

    @rule()
    @precondition(lambda self: self.masks())
    def save(self):
        f = io.BytesIO()
        torch.save(dict(model=self.model.state_dict(), opt=self.opt.state_dict(), engine=self.engine and self.engine.state_dict()), f)
        self.saved = f.getvalue(),self.counts()

    @rule()
    @precondition(lambda self: self.masks() and self.saved is not None)
    def load(self):
        o = torch.load(io.BytesIO(self.saved[0]), weights_only=False)
        self.model.load_state_dict(o['model'])
        self.opt.load_state_dict(o['opt'])
        if self.engine is not None: self.engine.load_state_dict(o['engine'])
        self.expected = self.counts()
        assert self.expected==self.saved[1] and all(torch.equal(v, self.model.state_dict()[k]) for k,v in o['model'].items())

    @rule(strict=st.booleans())
    @precondition(lambda self: self.masks())
    def refused_load(self, strict):
        "A dense file, or one with a wrong shape, changes nothing"
        before = {k:v.clone() for k,v in self.model.state_dict().items()}
        for bad in ({**before, '3.weight':torch.ones(3,3)}, {**before, '0.weight_mask':torch.full((8,6), .5)}):
            with pytest.raises((ValueError,RuntimeError)): self.model.load_state_dict(bad, strict=strict)
        assert all(torch.equal(v, before[k]) for k,v in self.model.state_dict().items())

    @rule(how=st.sampled_from(['deepcopy','pickle']))
    def copied(self, how):
        "A copy goes on by itself, and the first model isn't touched"
        before = {k:v.clone() for k,v in self.model.state_dict().items()}
        other = copy.deepcopy(self.model) if how=='deepcopy' else pickle.loads(pickle.dumps(self.model))
        opt = optimizer(self.kind, other)
        for _ in range(2):
            other(torch.randn(8,6)).square().mean().backward()
            opt.step()
        if self.masks(): assert_dead(other, opt)
        assert all(torch.equal(v, before[k]) for k,v in self.model.state_dict().items())

    @rule()
    @precondition(lambda self: self.masks())
    def rewound(self):
        masks = [m.clone() for m in self.masks()]
        rewind(self.model, self.first)
        assert all(map(torch.equal, masks, self.masks()))
        self.saved = None

    @rule(frozen=st.booleans())
    def freeze(self, frozen): self.model[0].weight.requires_grad_(not frozen)

    @rule()
    @precondition(lambda self: self.masks())
    def written(self):
        "Somebody writes dense values; the next forward sees them masked"
        with torch.no_grad(): self.model[0].weight.fill_(.5)
        self.model(torch.randn(8,6))

    @rule(sparsity=st.sampled_from([.3,.6,.9]))
    @precondition(lambda self: self.engine is None)
    def prune(self, sparsity):
        if self.masks(): unsparsify(self.model)
        prune_magnitude(self.model, sparsity)
        self.renew()

    @rule()
    @precondition(lambda self: self.masks() and self.engine is None)
    def dense_again(self):
        before = [p.clone() for p in self.model.parameters()]
        unsparsify(self.model)
        assert all(map(torch.equal, before, self.model.parameters())) and not self.masks()
        self.expected,self.saved = [],None

    @rule(sparsity=st.sampled_from([0.,.5,.9]), seed=st.integers(0, 9))
    @precondition(lambda self: not self.masks())
    def sparse_again(self, sparsity, seed): self.sparsify(sparsity, seed)

    @rule()
    @precondition(lambda self: self.masks())
    def looked_at(self):
        "Summaries and copies leave all as it was, and agree with the masks"
        assert int(sparse_summary(self.model).df['live'].iloc[-2])==sum(self.counts())
        plain = plain_copy(self.model)
        x = torch.randn(8,6)
        was = self.model.training
        assert torch.equal(plain(x), self.model.eval()(x))
        self.model.train(was)

    @invariant()
    def laws(self):
        if not hasattr(self, 'model'): return
        assert [id(p) for p in self.model.parameters()]==[id(p) for p in self.same] if self.masks() else True
        for m in self.masks(): assert m.dtype==torch.bool
        if not self.masks(): return
        assert_dead(self.model, self.opt if self.engine is None or self.method!='snfs' else None)
        assert self.counts()==self.expected

def run(n, steps):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        machine = Laws.TestCase
        machine.settings = settings(max_examples=n, stateful_step_count=steps, deadline=None)
        machine().runTest()

def test_laws_hold_in_any_order(): run(8, 12)

@pytest.mark.full
def test_laws_hold_in_thousands_of_operations(): run(300, 40)
