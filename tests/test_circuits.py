"Circuits: the little language, its decoder, three ways to train it, the search, its tests, and the pictures"
import ast,fastsparse.circuits,json,math,pandas as pd,pytest,re,shutil,subprocess,torch
from fastsparse.circuits import *
from fastsparse.circuits.draw import bend,layout
from fastsparse.circuits.language import context,words
from fastsparse.circuits.run import main,Study
from fastsparse.circuits.train import lm_loss,valid_loss
from collections import Counter
from pathlib import Path
from torch import nn
from xml.etree import ElementTree

def lines(ids):
    "A program as lists of tokens, a list a line"
    return [l.split() for l in ' '.join(vocab[o] for o in ids[1:]).split('\n')][:-1]

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
    many = [Writer(f'1.{i}') for i in range(3)]
    for o in many:
        while len(o.tokens)<=context: o.line()
    assert programs(3, 1)[1]==pytest.approx(sum(o.nats for o in many)/sum(len(o.tokens)-1 for o in many))  # the first token is always the same
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
    (y := AbsTopK(2)(x)).sum().backward()
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

def test_the_largest_stay_and_each_row_its_floor():
    w = torch.tensor([[4.,-3.,2.,1.],[.4,.3,-.5,.1]])
    for args,want in (((3/8,1), [[4,-3,0,0],[0,0,-.5,0]]), ((1e-9,), [[4,0,0,0],[0,0,0,0]])): assert keep_largest_(w.clone(), *args).tolist()==want

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

class Two(nn.Module):
    "The answer is 4 times the first input, rectified; the second is noise"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.head = nn.Linear(2, 2, bias=False),nn.ReLU(),nn.Linear(2, 2, bias=False)
        self.a.weight.data = torch.eye(2)
        self.head.weight.data = torch.tensor([[4.,0.],[0.,0.]])

    def forward(self, x): return self.head(self.b(self.a(x)))
    def links(self): return [Link('a', 'b', torch.eye(2), 'same'), Link('b', 'head', self.head.weight.detach())]

def two_task(n=80):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0))
    x[::2,0],x[1::2,0] = 2.,0.
    right = torch.arange(n)%2
    return Task('first input', x, right, 1-right)

def two_circuit(): return find_circuit(Two(), two_task(), ['a','b'], Two().links(), starts=1, progress=False)

def test_the_mode_of_a_model_and_its_statistics_play_no_part():
    "A network in training mode, with dropout and batch norm, gives the circuit and the tests that it gives in evaluation, and stays as it is"
    before = [p.clone() for p in Two().parameters()]
    found = []
    for training,seed in ((True,1),(True,2),(False,3)):
        m = Two()
        m.b = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2), nn.Dropout(.5))
        m.train(training)
        torch.manual_seed(seed)
        c = find_circuit(m, two_task(), ['a','b'], starts=1, progress=False)
        found.append((c.nodes, c.loss, check_circuit(m, c, two_task())))
        assert all(a.equal(b) and b.requires_grad for a,b in zip(before, [m.a.weight,m.head.weight])) and not m.a._forward_hooks
        assert m.training==m.b[2].training==training and m.b[1].num_batches_tracked==0 and not m.b[1].running_mean.any()
    assert found[0]==found[1]==found[2]

def test_found_is_said_of_prompts_that_were_held_back():
    "Answers that are learned by heart are no circuit"
    n = 64
    x,right = torch.eye(n),torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0))
    heart = nn.Sequential(nn.Identity(), nn.Linear(n, 2, bias=False))
    heart[1].weight.data = torch.stack([1.-right,right.float()])*8-4
    c = find_circuit(heart, Task('by heart', x, right, 1-right), ['0'], starts=1, goal=.3, progress=False)
    assert c.found==(c.loss<=.3)

def test_a_circuit_that_fails_on_held_back_prompts_is_trimmed_less():
    "The first input is right but in 2 of 120 prompts of the search, and in 8 of 40 that are held back: there the second has the word"
    n = 160
    right,hard = torch.arange(n)%2,torch.zeros(n)
    hard[[4,5,*range(120, 128)]] = 1.
    side = 1.-2*right
    x = torch.stack([side*(1-2*hard), side*hard], 1)
    m = nn.Sequential(nn.Identity(), nn.Linear(2, 2, bias=False))
    m[1].weight.data = torch.tensor([[4.,8.],[0.,0.]])
    c = find_circuit(m, Task('two inputs', x, right, 1-right), ['0'], starts=1, progress=False)
    assert c.found and c.nodes=={'0':[0,1]}

def test_a_model_needs_only_names_of_nodes():
    c = find_circuit(Two(), two_task(), ['a','b'], starts=1, progress=False)
    assert c.edges is c.n_edges is None and c.n_nodes>=1 and set(sum(c.nodes.values(), []))=={0}

def test_means_and_margins_by_hand():
    "Means of inputs 2 and 0 are 1; cut there, the margin is 4 whatever the input"
    m,t = Two(),two_task(4)
    means = node_means(m, ['a'], t.x)
    assert means['a'][0]==1
    assert margins(m, t).tolist()==[8,0,8,0]
    cut = dict(a=torch.tensor([0.,1.]))
    assert margins(m, t, cut, means).tolist()==[4,-4,4,-4]

def test_a_node_that_is_called_twice_has_one_mean_over_both_calls():
    act,x = nn.ReLU(),torch.tensor([[1.,-2.],[3.,4.]])
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = act
        def forward(self, x): return self.act(-self.act(x)+5)
    assert node_means(Twice(), ['act'], x)['act'].tolist()==[(1+3+4+2)/4,(0+4+5+1)/4]

def test_calibration_finds_scale_and_shift():
    "A shift of 2 towards the lower answer is undone; margins without information stay at log 2"
    g = torch.Generator().manual_seed(0)
    side = torch.where(torch.arange(400)%2==0, 1., -1.)
    noise = torch.randn(400, generator=g)
    fit = calibrate(side*(side+noise+2), side)
    plain = calibrate(side*(side+noise), side)
    assert fit[0]==pytest.approx(plain[0], abs=.05) and fit[1]-plain[1]==pytest.approx(-2*fit[0], abs=.1)
    nothing = torch.randn(400, generator=g)*side
    assert task_loss(nothing, side, calibrate(nothing, side))==pytest.approx(math.log(2), abs=.02)
    assert task_loss(torch.zeros(5)).item()==pytest.approx(math.log(2))

def test_dead_ends_go_and_pairs_stay_together():
    "a→q,k,v by channel; k1 lacks its query, so it goes; v0 feeds the answer; q0 is of use through v0 of its head"
    eye,on = torch.eye(2),torch.tensor([True,True])
    links = [Link('a', 'q', torch.tensor([[1.,0.],[0.,0.]])), Link('a', 'k', eye), Link('a', 'v', eye),
        Link('q', 'k', eye, 'pair'), Link('q', 'v', torch.ones(2, 2), 'gate'), Link('k', 'v', torch.ones(2, 2), 'gate'),
        Link('v', 'out', torch.tensor([[3.,0.]]))]
    kept = core(dict(a=on, q=on, k=on, v=on, out=torch.tensor([True])), links)
    assert {k:v.tolist() for k,v in kept.items()}==dict(a=[True,False], q=[True,False], k=[True,False], v=[True,False], out=[True])
    assert edges_of(kept, links)==[('a',0,'q',0,1.), ('a',0,'k',0,1.), ('a',0,'v',0,1.), ('v',0,'out',0,3.)]
    nothing = core(dict(a=on, q=on, k=on, v=torch.tensor([False,True]), out=torch.tensor([True])), links)
    assert not any(v.any() for k,v in nothing.items() if k!='out')

def test_random_labels_have_no_circuit():
    x,t = torch.rand(160, 2, generator=torch.Generator().manual_seed(1)),two_task(160)
    c = find_circuit(Two(), Task('noise', x, t.right, t.wrong), ['a','b'], Two().links(), starts=1, n_steps=60, progress=False)
    assert not c.found and c.loss>.5 and not c.nodes
    assert check_circuit(Two(), c, two_task())['fails']=='no circuit'

def test_a_table_of_tests_names_what_fails():
    "Cutting the only node of the only way leaves a coin; of other nodes there is one, and it changes nothing"
    m,c = Two(),two_circuit()
    row = check_circuit(m, c, two_task())
    assert row['necessity_loss']>=.69 and row['random_loss']==pytest.approx(row['full_loss'])
    assert 'necessity' not in row['fails'] and 'the network does not know it' in row['fails']  # 8 against 0: half of the prompts are at log 2
    df = faithfulness_table([dict(row, task='one', model='two'), dict(task='none', model='two')])
    assert list(df.columns[:11])=='task model seed valid_loss train_seconds live_weights nodes edges task_loss necessity_loss random_loss'.split()
    assert df.edges[0]==1 and df.edges.isna()[1]

def test_a_circuit_is_saved(tmp_path):
    one = two_circuit()
    one.save(tmp_path/'c.pt')
    two = Circuit.load(tmp_path/'c.pt')
    assert (two.nodes,two.edges,two.loss,two.found)==(one.nodes,one.edges,one.loss,True)
    assert all(two.masks()[k].equal(v) and two.masks(True)[k].equal(1-v) for k,v in one.masks().items())

def test_shuffling_keeps_wiring_and_values():
    m = small()
    for p in m.matrices().values(): p.data.mul_(torch.rand_like(p)<.1)
    s = shuffled(m)
    for (n,a),b in zip(m.matrices().items(), s.matrices().values()):
        assert (a!=0).equal(b!=0) and a.flatten().sort().values.equal(b.flatten().sort().values) and not a.equal(b)

def test_gpt2_of_transformers_has_circuits():
    "A foreign module: 2 blocks of width 16, searched by names and links alone"
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    m = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(vocab), n_positions=48, n_embd=16, n_layer=2, n_head=2)).eval()
    links = gpt2_links(m)
    gate = next(l for l in links if l.kind=='gate').weight
    own = torch.zeros(16,16)
    own[:8,:8] = own[8:,8:] = 1  # two heads of 8 channels
    assert gate[32:,:32].equal(torch.cat([own,own], 1)) and gate.sum()==2*own.sum()
    nodes = list(dict.fromkeys(l.source for l in links))
    t = make_task('quotes', 64)
    opt = torch.optim.Adam(m.parameters(), lr=1e-2)
    for _ in range(40):
        loss = task_loss(margins(m, t))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert loss<.05
    c = find_circuit(m, t, nodes, links, goal=.3, starts=1, n_steps=60, progress=False)
    assert c.found and 0<c.n_nodes<sum(len(v) for v in c.means.values()) and c.n_edges>0
    assert {e[2] for e in c.edges}<={*nodes,'lm_head'} and {e[3] for e in c.edges if e[2]=='lm_head'}<={*t.answers.tolist()}
    row = check_circuit(m, c, t)
    assert row['necessity_loss']>row['full_loss']

@pytest.fixture(scope='module')
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp('study')
    return Study(out, dict(rigl='rigl', recipe='recipe', dense='dense'), dict(rigl=40, recipe=20, dense=60), n_programs=300, seeds=2,
        todo=['loop_words','nonsense_words'], search=dict(starts=1, n_steps=40, goal=.6), controls=['loop_words'], d=32, n_layers=1, slopes=(0.,)).run(progress=False)

def test_a_study_writes_table_pictures_and_page(study):
    "Models and tasks stand in the order of the jobs; every circuit comes back from its file"
    df = pd.read_csv(study.out/'table.csv')
    assert list(df.model)==[*['rigl']*2, *['recipe']*2, *['dense']*2, 'shuffled']*2 and list(df.seed)==[0]*7+[1]*7
    assert {'edges.png','index.html'}<={o.name for o in study.out.iterdir()}
    for (m,s,t),c in study.circuits.items():
        if c.found: assert Circuit.load(study.out/f'{m}_{s}_{t}.circuit.pt').edges==c.edges
    assert Trained.load(study.out/'rigl_1.pt').valid_loss==study.trained['rigl',1].valid_loss

def test_a_study_that_was_stopped_goes_on(study):
    "With the same settings nothing is trained or searched again, and a seed is added; others, and another method of that name, are refused"
    def again(ways=study.ways, **kw):
        done = []
        class Spy(Study):
            def find(self, *args):
                n = len(self.rows)
                super().find(*args)
                done.append(len(self.rows)-n)
        args = dict(steps=study.steps, n_programs=300, seeds=2, todo=study.todo, search=study.search, controls=study.controls, **study.decoder)
        s = Spy(study.out, ways, **{**args, **kw})
        for _,f,a in s.jobs(): f(*a)
        return s,done
    s,done = again(seeds=3)
    assert done==[0]*14+[1]*7
    assert {k:c.edges for k,c in s.circuits.items() if k[1]<2 and c.found}=={k:c.edges for k,c in study.circuits.items() if c.found}
    assert list(s.table.seed)==[0]*7+[1]*7+[2]*7 and s.table.iloc[:14].edges.equals(study.table.edges)
    with pytest.raises(ValueError, match='holds a study of .*name another folder'): again(search=dict(starts=1, n_steps=20))
    with pytest.raises(ValueError, match="rigl_0.pt' holds a network of 'rigl', and 'rigl' is 'set' here"): again(ways=dict(rigl='set'))

def test_the_ratio_of_edges_is_a_geometric_mean_a_seed():
    "4 and 16 times as many edges are 8 times as many; nonsense and tasks that one can't do don't count"
    rows = [dict(model=m, seed=s, task=t, edges=n) for m,s,t,n in (('sparse',0,'quotes',2), ('dense',0,'quotes',8), ('sparse',0,'brackets',1),
        ('dense',0,'brackets',16), ('sparse',0,'nonsense_words',1), ('dense',0,'nonsense_words',9), ('dense',0,'loop_words',5),
        ('sparse',1,'quotes',3), ('dense',1,'quotes',6))]
    assert edge_ratios(faithfulness_table(rows), 'sparse').to_dict()==pytest.approx({0:8, 1:2})

def drawn():
    "A network and a circuit in it of five nodes, made by hand"
    m = small(d=16, n_layers=1)
    nodes = {'at.emb':[3], 'blocks.0.at.read1':[3], 'blocks.0.at.v':[5], 'blocks.0.at.write1':[7], 'at.read':[7]}
    means = node_means(m, m.nodes, programs(20)[0][:,:-1])
    answers = make_task('quotes', 2).answers
    masks = {k:torch.zeros(len(v), dtype=torch.bool) for k,v in means.items()}
    masks['head'] = torch.zeros(len(vocab), dtype=torch.bool).index_fill_(0, answers, True)
    for k,i in nodes.items(): masks[k][i] = True
    return m,Circuit('quotes', nodes, edges_of(masks, m.links()), means, (1.,0.), .1, 1., 2.)

def test_query_key_and_value_share_a_column_and_no_line_covers_another():
    "The middle of each curve is its own; what skips a column passes beside the nodes between"
    m,c = drawn()
    q,k,v = (f'blocks.0.at.{o}' for o in 'qkv')
    for o in (q,k): c.nodes[o] = [5]
    c.edges += [('blocks.0.at.read1',3,o,5,1.) for o in (q,k)]
    at,lines,headings = layout(c, m.links(), {})
    assert headings==['embedding','block 0: attention reads','block 0: query, key, value','block 0: attention writes','head reads','answer']
    assert at[q,5][0]==at[k,5][0]==at[v,5][0]==2 and len({at[o,5][1] for o in (q,k,v)})==3
    assert {(q,k),(q,v),(k,v)}<={(a[0],b[0]) for a,b,w in lines if w==0}
    middles = [tuple((p+2*o+r)/4 for p,o,r in zip(at[a], bend(at[a], at[b]), at[b])) for a,b,_ in lines]
    assert len({*middles})==len(middles) and not {*middles}&{*at.values()}
    assert bend((0,0), (1,2))==(.5,1) and bend((0,0), (3,0))[1]!=0 and bend((1,-1), (1,1))[0]!=1

def test_a_picture_shows_every_edge():
    "Two tokens that move the embedding, four weights, and two channels that are carried on; it is a file of its own"
    svg = draw_circuit(*drawn(), {('at.emb',3):[(-4.,'<',''), (2.,'a',''), (1.,'b','')]})
    paths = ElementTree.fromstring(svg).findall('{*}path')
    assert Counter(p.get('class') for p in paths)['same']==2 and len(paths)==8
    assert '↓ &lt;</text>' in svg and '↑ a</text>' in svg and '↑ b' not in svg and svg._repr_svg_()==svg

def test_a_page_stands_alone_and_escapes_tokens(tmp_path):
    "No address, no file; tokens such as < and quotes can't break it"
    m,c = drawn()
    text = circuit_page(m, [c], tmp_path/'p.html').read_text()
    assert 'http' not in text and 'src=' not in text and text.count('data-node=')==7+text.count('data-node="token')>7
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text, re.S)[1])
    assert len(data)==text.count('data-node=') and 'feeds' in data['at.read:7'] and '<code></' not in text

def test_a_click_opens_a_node_in_chromium(tmp_path):
    "The page's own script is run by the browser, which then prints the page"
    browser = shutil.which('chromium') or pytest.skip('no Chromium')
    path = circuit_page(*[o if i==0 else [o] for i,o in enumerate(drawn())], tmp_path/'p.html')
    path.write_text(path.read_text()+'<script>[...document.querySelectorAll("circle")].at(-1).dispatchEvent(new MouseEvent("click",{bubbles:true}))</script>')
    flags = '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync'
    res = subprocess.run([browser, *flags.split(), f'--user-data-dir={tmp_path}/u', '--dump-dom', f'file://{path}'], capture_output=True, text=True, timeout=120)
    told = [o.split('</svg>')[1].split('<script')[0] for o in (path.read_text(),res.stdout)]
    assert res.stdout.count('class="node open"')==1 and '<b>emb:3</b>: embedding, channel 3' in told[0] and '<b>read:7</b>: head reads, channel 7' in told[1]

@pytest.mark.parametrize('kw', [dict(ways='sparse,desne'), dict(todo='quotes,bracket')])
def test_the_command_refuses_a_name_before_it_trains(kw, tmp_path):
    with pytest.raises(ValueError, match='(desne|bracket) is none of'): main(str(tmp_path/'out'), **kw)
    assert not (tmp_path/'out').exists()

def test_the_room_needs_only_what_users_have():
    "Its modules import the star of the library by name, each other, and packages: they could live in another repository"
    for p in Path(fastsparse.circuits.__file__).parent.glob('*.py'):
        imports = [o for o in ast.walk(ast.parse(p.read_text())) if isinstance(o, ast.ImportFrom)]
        assert {o.module for o in imports if o.level==2}<={'all'}
        assert all(o.module.startswith(('fastsparse.all','fastsparse.circuits')) for o in imports if not o.level and 'fastsparse' in o.module)
