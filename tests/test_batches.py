"fastai's own batches: every public function that takes one takes what `dls.one_batch()` returns, with its targets or without, of learners of pictures, tables and texts"
import numpy as np,pandas as pd,pytest,torch
from fastai.tabular.all import Categorify,Normalize,tabular_learner,TabularDataLoaders
from fastai.text.all import AWD_LSTM,awd_lstm_clas_config,text_classifier_learner,TextDataLoaders
from fastai.vision.all import ImageDataLoaders,PILImage,resnet18,TensorImage,vision_learner
from fastsparse.all import *
from fastsparse.model.running import call_model
from torch import nn

pytestmark = pytest.mark.filterwarnings('ignore')
rng = np.random.default_rng(0)

def pictures(path):
    for i in range(12): PILImage.create(rng.integers(0, 255, (32,32,3), dtype=np.uint8)).save(path/f'{"ab"[i%2]}{i}.png')
    dls = ImageDataLoaders.from_name_re(path, sorted(path.glob('*.png')), r'([ab])\d+.png$', valid_pct=.34, bs=4, num_workers=0, seed=0)
    return vision_learner(dls, resnet18, pretrained=False, path=path)

def table(path):
    df = pd.DataFrame(dict(a=rng.integers(0, 3, 40).astype(str), b=rng.normal(size=40), c=rng.normal(size=40), y=rng.integers(0, 2, 40).astype(str)))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['a'], cont_names=['b','c'], y_names='y', bs=8, valid_idx=range(10))
    return tabular_learner(dls, layers=[16,8], path=path)

def texts(path):
    df = pd.DataFrame(dict(text=[' '.join(rng.choice(['good','bad','film','the'], 12)) for _ in range(30)], label=rng.integers(0, 2, 30)))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', bs=8, valid_pct=.3, seq_len=8)
    return text_classifier_learner(dls, AWD_LSTM, config=dict(awd_lstm_clas_config, emb_sz=8, n_hid=12, n_layers=2), pretrained=False, path=path)

learners = dict(pictures=pictures, table=table, texts=texts)

@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A learner of each kind, its batch, and the batch in four forms: as it comes, without targets in a tuple, in a list, and a lone input alone"
    found = {}
    for kind,make in learners.items():
        learn = make(tmp_path_factory.mktemp(kind))
        batch = learn.dls.one_batch()
        xs = batch[:learn.dls.n_inp]
        found[kind] = make,learn,[batch, tuple(xs), list(xs), xs[0] if len(xs)==1 else tuple(xs)]
    return found

def halved(model):
    sparsify_model(model, .5, seed=0)
    return model

takes = dict(count_flops=count_flops, flop_profile=flop_profile, channel_groups=channel_groups, sparsify=lambda m, xb: sparsify_model(m, .5, xb=xb),
    predict_cost=lambda m, xb: predict_cost(halved(m), xb, 10, method='rigl'), export=lambda m, xb: export_sparse(halved(m), 'dense', xb),
    compute=lambda m, xb: sparse_compute(halved(m), xb), shrink=lambda m, xb: shrink(halved(m), xb),
    prune_channels=lambda m, xb: prune_channels(m, .3, xb=xb), synflow=lambda m, xb: prune_synflow(m, .5, xb))

quick = 'count_flops','flop_profile','channel_groups','sparsify'

@pytest.mark.parametrize('kind,f', [(k, f) for k in learners for f in takes if k!='pictures' or f in (*quick, 'export', 'prune_channels')])
def test_a_function_takes_the_batch_in_each_form(f, kind, made, tmp_path):
    "Slow ones take it as it comes"
    make,_,forms = made[kind]
    for xb in forms if f in quick[:1 if kind=='pictures' else None] else forms[:1]: takes[f](make(tmp_path).model, xb)

@pytest.mark.parametrize('kind', learners)
def test_all_forms_mean_the_same(kind, made):
    "The model's outputs, bit for bit, and the number of FLOPs"
    _,learn,forms = made[kind]
    model = learn.model.eval()
    outs = []
    for xb in forms:
        if hasattr(model, 'reset'): model.reset()
        out = call_model(model, xb)
        outs.append(out[0] if isinstance(out, tuple) else out)
    assert all(torch.equal(o, outs[0]) for o in outs) and len({count_flops(model, xb) for xb in forms})==1

@pytest.mark.parametrize('kind', ['table','texts'])
@pytest.mark.parametrize('prune', [prune_wanda, prune_sparsegpt, prune_snip, prune_grasp])
def test_pruning_reads_batches(prune, kind, made, tmp_path):
    "The learner's own, and a list of batches as they come; where no loss is taken, of inputs alone too"
    make,_,forms = made[kind]
    prune(make(tmp_path), .5)
    if prune is prune_wanda: prune(make(tmp_path), .5, forms[1:2])
    prune(learn := make(tmp_path), .5, forms[:1])
    assert sum(float((p==0).float().mean())>.4 for p in learn.model.parameters() if p.ndim>1)>1

def test_taylor_scores_of_a_recurrent_model(made, tmp_path):
    "The weight times its gradient, by the learner's loss of the first of the model's outputs, which `RNNCallback` takes too"
    make,_,(batch,*_) = made['texts']
    learn = make(tmp_path)
    head = learn.model.eval()[1].layers[-1][-1].weight
    score = taylor_scores(learn, [batch])['1.layers.1.2.weight']
    learn.model.reset()
    g, = torch.autograd.grad(learn.loss_func(learn.model(batch[0])[0], batch[1]), [head])
    torch.testing.assert_close(score, g*head.detach())

class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Conv2d(3, 8, 3),nn.Linear(8, 4)
    def forward(self, image, scale): return self.b(self.a(image*scale).mean((2,3)))

@pytest.mark.parametrize('f', [f for f in takes if f!='compute'])
def test_a_dict_of_fastai_s_tensors(f): takes[f](ByName(), dict(image=TensorImage(torch.rand(2,3,8,8)), scale=torch.ones(1)))

def test_what_a_forward_takes_by_place():
    "As many as it names, all with `*args`, and targets stay out"
    cases = (lambda a: (a,), 1),(lambda a, b=0: (a,b), 2),(lambda *a: a, 3),(lambda a, *, c=0: (a,), 1)
    for f,n in cases: assert len(call_model(f, (1,2,3)))==n
