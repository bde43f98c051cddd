"The critics' tests of circuits: values of another prompt, circuits that share no node, searches with other seeds"
import pytest,torch
from fastsparse.circuits import *
from fastsparse.circuits.search import Search
from torch import nn

log2 = pytest.approx(.6931, abs=1e-3)

class Both(nn.Module):
    "The answer is the sum of `weights` times the inputs, each -1 or 1; a node is an input"
    def __init__(self, *weights):
        super().__init__()
        self.a,self.head = nn.Identity(),nn.Linear(len(weights), 2, bias=False)
        self.head.weight.data = torch.tensor([weights,[0.]*len(weights)])

    def forward(self, x): return self.head(self.a(x))
    def links(self): return [Link('a', 'head', self.head.weight.detach())]

def task(*signs, n=80):
    "Each input is 1 where answer 0 is right and -1 where answer 1 is, times its sign; a sign of 0 is noise"
    right = torch.arange(n)%2
    x = (1.-2*right)[:,None]*torch.tensor(signs)+torch.rand(n, len(signs), generator=torch.Generator().manual_seed(0))*(torch.tensor(signs)==0)
    return Task('sum', x, right, 1-right)

def search(f, model, t, **kw): return f(model, t, ['a'], model.links(), starts=1, n_steps=100, progress=False, **kw)

def test_values_of_the_other_prompt_decide():
    "Swapping the only node that has a weight gives the other answer: margins of 8 become -8; the rest changes nothing"
    m,t = Both(8.,0.),task(1.,0.)
    row = check_circuit(m, search(find_circuit, m, t), t)
    assert row['swap_loss']==pytest.approx(row['full_loss'])==pytest.approx(row['rest_loss'])==pytest.approx(.000335, rel=.01)
    assert row['fails']==''

def test_a_task_that_is_done_twice_has_two_circuits():
    """Either input does the task with a margin of 4, so cutting one leaves 4, and swapping one leaves a coin

    Cutting both leaves a coin: necessity holds for the two together. With the third input nothing can be done."""
    m,t = Both(4.,4.,0.),task(1.,1.,0.)
    one,two = search(disjoint_circuits, m, t)
    assert {o.nodes['a'][0] for o in (one,two)}=={0,1} and one.n_nodes==two.n_nodes==1
    row,both = check_circuit(m, one, t),check_circuit(m, together([one,two]), t)
    assert row['necessity_loss']==pytest.approx(.01815, rel=.01) and row['swap_loss']==log2==row['rest_loss']
    assert 'necessity' in row['fails'] and 'swap' in row['fails'] and 'rest' in row['fails']
    assert both['necessity_loss']==log2 and both['nodes']==both['edges']==2 and both['fails']==''
    assert one.n_nodes==1 and len(search(disjoint_circuits, m, t, most=1))==1

def test_forbidden_nodes_are_never_in_a_circuit():
    m,t = Both(4.,4.),task(1.,1.)
    assert search(find_circuit, m, t, forbidden=dict(a=[0])).nodes==dict(a=[1])
    assert not search(find_circuit, m, t, forbidden=dict(a=[0,1])).found

def test_overlap_by_hand():
    "{1,2} and {2,3} share one of three nodes, {1,2} and {1,2} two of two, {2,3} and {1,2} one of three: 5/9"
    one,two,three = (Circuit('t', dict(a=o), [], {}, (1.,0.), 0., 1., 1.) for o in ([1,2],[2,3],[1,2]))
    assert overlap([one,two,three])==pytest.approx(5/9)

def test_where_the_network_knows_the_task_a_tenth_of_the_price_is_tried(monkeypatch):
    "10 nats a node leave nothing; another pass at 1 finds it, and one in a network that doesn't know the task would be in vain"
    prices,sweep = [],Search.sweep
    monkeypatch.setattr(Search, 'sweep', lambda self, bar, n, price, **kw: prices.append(tuple(price)) or sweep(self, bar, n, price, **kw))
    assert search(find_circuit, Both(8.,0.), task(1.,0.), prices=(10.,10.), every=50).nodes==dict(a=[0]) and prices==[(10.,10.),(1.,1.)]
    assert not search(find_circuit, Both(0.,0.), task(1.,0.), prices=(10.,10.), every=50).found and prices[2:]==[(10.,10.)]
