"Circuits: the little language, its decoder, three ways to train it, the search, its tests, and the pictures"
import math,pytest,torch
from fastsparse.circuits import *
from fastsparse.circuits.language import context,words
from fastsparse.circuits.train import lm_loss,valid_loss
from torch import nn

# --- the language

def lines(ids):
    "A program as lists of tokens, a list a line"
    out = [[]]
    for o in ids[1:].tolist():
        if vocab[o] in ('\n','\n\t'): out.append([])
        else: out[-1].append(vocab[o])
    return out[:-1]

def test_what_a_line_begins_with_decides_how_it_ends():
    "Quotes and brackets close as they opened, loops have their word, and a name is used as what it was made"
    for row in programs(200, 3)[0]:
        made = {}
        for l in lines(row):
            if l[0]=='for': assert l[2]=='in' and l[-1]==':'
            elif l[0]=='while': assert l[2]=='<' and l[-1]==':'
            elif l[0] in ('with','import'): assert (l[-1]==':')==(l[0]=='with')
            elif l[1:2]==['.add(']: assert made[l[0]]=='set()'
            elif l[1:2]==['+=']: assert made[l[0]]=="''"
            elif l[1:2]==['=']:
                made[l[0]] = l[2]
                if l[2] in ("'",'"'): assert l[-1]==l[2]
                elif l[2]=='[': assert l[-1]==(']]' if l[3]=='[' else ']')
            else: assert l[0] in ('yield','return')

def test_a_block_goes_on_after_yield_and_ends_after_return():
    for row in programs(200, 4)[0]:
        text = [vocab[i] for i in row]
        for i,t in enumerate(text):
            if t not in ('yield','return'): continue
            end = next((o for o in text[i:] if o in ('\n','\n\t')), None)
            assert end in (None, '\n\t' if t=='yield' else '\n')

def test_the_entropy_is_that_of_the_choices():
    "A fair coin tells log 2, and the same seed writes the same program"
    w = Writer(0)
    w.pick(['a','b'])
    w.pick(['only'])
    w.pick(['a','b'], [.25,.75])
    assert w.nats-math.log(2) in (pytest.approx(math.log(4)), pytest.approx(math.log(4/3)))
    assert programs(3, 1)[0].equal(programs(3, 1)[0]) and not programs(3, 1)[0].equal(programs(3, 2)[0])

@pytest.mark.parametrize('name', [*tasks, *nonsense])
def test_the_answers_of_a_pair_are_each_others_opposites(name):
    t = make_task(name, 50)
    assert len(t)==100 and t.x.shape[1]<=context
    if name!='nonsense_labels': assert t.right[::2].equal(t.wrong[1::2]) and t.wrong[::2].equal(t.right[1::2])
    assert len(t.answers)==2 and not (t.right==t.wrong).any()
    assert t.side.equal(torch.where(t.right==t.answers[0], 1., -1.))
    assert {vocab[t.x[i,t.at[i]]] for i in range(100)}&{*words,*'abcdefgh0123456789','['}  # the last token doesn't tell

@pytest.fixture(scope='module')
def texts(): return [' '.join([*(vocab[i] for i in row), '']) for row in programs(1500, 5)[0]]

@pytest.mark.parametrize('name', [o for o in tasks if o!='set_or_string'])
def test_the_language_gives_the_answers(name, texts):
    "The last line of a prompt and its right answer stand in programs; with the wrong one it never does"
    seen,t = [0,0],make_task(name, 20)
    for x,at,*answers in zip(t.x, t.at, t.right, t.wrong):
        prompt = [vocab[i] for i in x[:at+1]]
        start = max(i for i,o in enumerate(prompt) if o in ('<s>','\n','\n\t'))
        for i,a in enumerate(answers): seen[i] += any(' '.join([*prompt[start+1:], vocab[a], '']) in o for o in texts)
    assert seen[0] and not seen[1]

def test_labels_drawn_at_random_are_as_often_one_as_the_other():
    t = make_task('nonsense_labels', 300)
    assert .42<(t.right==t.answers[0]).float().mean()<.58
    assert t.right.equal(make_task('nonsense_labels', 300).right)

def test_a_split_keeps_pairs_together():
    one,two = make_task('quotes', 10).split(.7)
    assert (len(one),len(two))==(14,6) and one.right[::2].equal(one.wrong[1::2]) and two.right[::2].equal(two.wrong[1::2])

# --- the decoder

def small(**kw):
    torch.manual_seed(0)
    return Decoder(**{**dict(d=32, n_layers=2), **kw})

@pytest.mark.parametrize('kw', [{}, dict(top=.25), dict(sink=False, bigram=False), dict(slopes=(0.,))])
def test_a_token_sees_only_what_comes_before(kw):
    m,x = small(**kw),programs(2)[0][:,:-1]
    later = x.clone()
    later[:,20:] = 3
    assert torch.allclose(m(x)[:,:20], m(later)[:,:20], atol=1e-5) and not torch.allclose(m(x)[:,20:], m(later)[:,20:])

def test_abs_top_k_keeps_magnitudes_and_their_gradients():
    x = torch.tensor([[1.,-3.,2.,0.]], requires_grad=True)
    y = AbsTopK(2)(x)
    y.sum().backward()
    assert y.tolist()==[[0,-3,2,0]] and x.grad.tolist()==[[0,1,1,0]]

def test_a_sink_takes_attention():
    "With a sink of log 3 beside a single token of logit 0, a quarter is left"
    b = small(d=16, n_layers=1, slopes=(0.,)).blocks[0]
    b.sink.data.fill_(math.log(3))
    zero,v = torch.zeros(1, 1, 16),torch.ones(1, 1, 16)
    assert torch.allclose(b.attend(zero, zero, v), torch.full((1,1,16), .25))

def test_a_head_with_a_slope_forgets():
    "Logits fall by the slope a token: of two equal tokens with slope log 3 the last gets three quarters"
    b = small(d=16, n_layers=1, slopes=(math.log(3),), sink=False).blocks[0]
    zero,v = torch.zeros(1, 2, 16),torch.tensor([0.,1.])[None,:,None].expand(1, 2, 16)
    assert torch.allclose(b.attend(zero, zero, v)[0,1], torch.tensor(.75))

def test_links_are_the_live_weights():
    "Edges of all links together are all live entries of all matrices but the embedding's"
    m = small()
    for p in m.matrices().values(): p.data.mul_(torch.rand_like(p)<.1)
    live = sum(int((l.weight!=0).sum()) for l in m.links() if l.kind=='weight')
    assert live==sum(int(p.count_nonzero()) for n,p in m.matrices().items() if n!='emb.weight')
    assert {l.source for l in m.links()}=={*m.nodes}

# --- training

def test_the_largest_stay_and_each_row_its_floor():
    w = torch.tensor([[4.,-3.,2.,1.],[.4,.3,-.5,.1]])
    assert keep_largest_(w.clone(), 3/8).tolist()==[[4,-3,2,0],[0,0,0,0]]
    assert keep_largest_(w.clone(), 3/8, floor=1).tolist()==[[4,-3,0,0],[0,0,-.5,0]]
    assert keep_largest_(w.clone(), 1e-9).tolist()==[[4,0,0,0],[0,0,0,0]]

def test_the_recipe_scales_gradients_and_rate():
    "With SGD a step is rate/sqrt(L0) times a gradient of root mean square 1; the rate is as it was after it"
    p = nn.Parameter(torch.zeros(2, 2))
    opt = torch.optim.SGD([p], lr=.1)
    keep = KeepLargest([], opt, n_steps=8, density=1/16)
    for want in (.1, .2, .4, .4):  # L0 is 1, 1/4, 1/16, 1/16 at steps 0, 2, 4, 6
        before = p.detach().clone()
        p.grad = torch.full((2,2), 7.)
        opt.step()
        assert torch.allclose(before-p, torch.full((2,2), want))
        assert opt.param_groups[0]['lr']==pytest.approx(.1)
        keep.t += 1

def test_a_weight_that_was_put_to_zero_comes_back():
    "It keeps its gradient: a step of 1/sqrt(1/2)*sqrt(2) = 2 rates leads from 0 past a weight of 1"
    p = nn.Parameter(torch.tensor([[1.,.9]]))
    opt = torch.optim.SGD([p], lr=.01)
    KeepLargest([p], opt, n_steps=2, density=1/2, anneal=.5)
    def step():
        p.grad = torch.tensor([[0.,-1.]])
        opt.step()
        return p.tolist()[0]
    assert step()[1]==pytest.approx(.9+.01*2**.5) and step()==[1.,0.]
    opt.param_groups[0]['lr'] = 1.
    assert step()==pytest.approx([0.,2.])

data = load_programs(300, 100)

@pytest.mark.parametrize('method', ['dense','recipe','set','rigl'])
def test_each_way_of_training_learns_and_keeps_its_count(method):
    t = train_decoder(method, data, 30, density=1/8, batch_size=16, every=5, d=32, n_layers=1, progress=False)
    live,n = t.live_weights,sum(p.numel() for p in t.model.matrices().values())
    assert t.valid_loss<3.8 and t.train_seconds>0
    if method=='dense': assert live==n
    else: assert 0<=sum(round(p.numel()/8) for p in t.model.matrices().values())-live<=5  # a weight that has just grown may still be 0
    assert not any('mask' in k for k in t.model.state_dict())

def test_training_ends_where_it_is_good_enough():
    "A look comes every 50 steps"
    one = train_decoder('dense', data, 60, stop_at=10., batch_size=4, d=16, n_layers=1, progress=False)
    assert one.valid_loss<10 and one.valid_loss==pytest.approx(valid_loss(one.model, data[1]))

def test_the_same_seed_trains_the_same_network():
    one,two = (train_decoder('rigl', data, 12, batch_size=4, every=4, d=16, n_layers=1, progress=False, density=1/4) for _ in range(2))
    assert all(a.equal(b) for a,b in zip(one.model.parameters(), two.model.parameters()))

def test_a_trained_decoder_is_saved(tmp_path):
    one = train_decoder('dense', data, 2, batch_size=4, d=16, n_layers=1, slopes=(0.,), top=.5, progress=False)
    one.save(tmp_path/'m.pt')
    two = Trained.load(tmp_path/'m.pt')
    assert (two.method,two.seed,two.valid_loss)==(one.method,one.seed,one.valid_loss) and two.model.config==one.model.config
    assert lm_loss(two.model, data[1]).equal(lm_loss(one.model, data[1]))
