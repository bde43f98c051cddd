"What is cut from a model of transformers stands in its configuration: any process opens the folder, and computes the same"
import copy,json,pickle,pytest,subprocess,sys,torch,torch.nn.functional as F
from fastcore.basics import first
from fastsparse.all import load_cut,load_sparse,prune_channels,shrink,sparse_compute,sparsify_model
from fastsparse.kernels.timing import output_error
from fastsparse.cut.experts import expert_blocks,expert_scores,prune_experts
from fastsparse.cut.layers import layer_angles,prune_layers
from torch import nn
from torch.overrides import TorchFunctionMode

tf = pytest.importorskip('transformers')
small = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0)
gqa,moe = dict(num_key_value_heads=2),dict(num_key_value_heads=2, num_experts_per_tok=2)
seq = dict(vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_ffn_dim=40, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1)
t5 = dict(vocab_size=60, d_model=32, d_kv=4, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
gpt = dict(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
picture = dict(image_size=16, patch_size=8)

def ids(n=7): return torch.randint(3, 60, (2,n))
def words(): return dict(input_ids=ids())
def both(): return dict(input_ids=ids(), decoder_input_ids=ids(5))
def pixels(): return dict(pixel_values=torch.randn(2,3,16,16))
def sound(): return dict(input_features=torch.randn(2,8,20), decoder_input_ids=ids(5))

# kind of model, configuration, inputs, and the settings that half of the channels change: heads and neurons of attention and feed-forward nets
heads,neurons = 'num_attention_heads num_key_value_heads','intermediate_size'
def causal(name, settings=f'{heads} {neurons}', **kwargs): return f'{name}ForCausalLM',f'{name}Config',{**small,**kwargs},words,settings
def base(name, settings=neurons, **kwargs): return f'{name}Model',f'{name}Config',{**small,**kwargs},words,settings
def vision(name, settings=neurons, **kwargs): return f'{name}ForImageClassification',f'{name}Config',{**small,**picture,**kwargs},pixels,settings
told = f'{heads} head_dim {neurons}'  # the forward reads a setting that wasn't written down

families = dict(llama=causal('Llama', **gqa), mistral=causal('Mistral', **gqa), qwen2=causal('Qwen2', told, **gqa), qwen3=causal('Qwen3', **gqa, head_dim=8),
    gemma=causal('Gemma', **gqa, head_dim=8), gemma2=causal('Gemma2', **gqa, head_dim=8), phi=causal('Phi', told), phi3=causal('Phi3', told),
    olmo2=causal('Olmo2', neurons), smollm3=causal('SmolLM3', told), granite=causal('Granite', told), cohere=causal('Cohere', told),
    starcoder2=causal('Starcoder2', told, **gqa), stablelm=causal('StableLm', neurons, **gqa), gpt_neox=causal('GPTNeoX', neurons), falcon=causal('Falcon', 'ffn_hidden_size'),
    gpt2=('GPT2LMHeadModel','GPT2Config',gpt,words,'n_inner'), gptj=('GPTJForCausalLM','GPTJConfig',gpt | dict(rotary_dim=4),words,'n_inner'),
    opt=causal('OPT', 'ffn_dim', ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32),
    bert=base('Bert'), roberta=base('Roberta'), xlm_roberta=base('XLMRoberta'), electra=base('Electra'), albert=base('Albert', embedding_size=16),
    mpnet=base('MPNet'), modernbert=base('ModernBert', cls_token_id=1, sep_token_id=2), deberta=base('DebertaV2'),
    distilbert=('DistilBertModel','DistilBertConfig',dict(vocab_size=60, dim=32, hidden_dim=48, n_layers=2, n_heads=4),words,'hidden_dim'),
    t5=('T5ForConditionalGeneration','T5Config',t5,both,'num_heads d_ff'), t5_encoder=('T5EncoderModel','T5Config',t5,words,'num_heads d_ff'),
    bart=('BartForConditionalGeneration','BartConfig',seq | dict(max_position_embeddings=32),both,'encoder_ffn_dim decoder_ffn_dim'),
    whisper=('WhisperForConditionalGeneration','WhisperConfig',seq | dict(num_mel_bins=8, max_source_positions=10, max_target_positions=16),sound,
        'encoder_ffn_dim decoder_ffn_dim'),
    vit=vision('ViT'), deit=vision('DeiT'), beit=vision('Beit'), dinov2=vision('Dinov2', 'mlp_ratio'),
    clip=('CLIPModel','CLIPConfig',dict(text_config=small | dict(max_position_embeddings=16), vision_config=small | picture, projection_dim=16),
        lambda: words() | pixels(),'text_config vision_config'),
    mixtral=causal('Mixtral', told, **moe, num_local_experts=4), gpt_oss=causal('GptOss', f'{heads} {neurons}', **moe, head_dim=8, num_local_experts=4,
        layer_types=['full_attention','sliding_attention']),
    qwen3_moe=causal('Qwen3Moe', f'{heads} moe_intermediate_size', **moe, head_dim=8, moe_intermediate_size=24, num_experts=4),
    qwen2_moe=causal('Qwen2Moe', f'{heads} head_dim moe_intermediate_size shared_expert_intermediate_size', **moe, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4))
often = 'llama','phi3','t5','qwen2','gpt2','bert','dinov2','qwen3_moe'

def made(family):
    "A model and its inputs"
    torch.manual_seed(0)
    kind,config,settings,inputs,_ = families[family]
    return getattr(tf, kind)(getattr(tf, config)(**settings)).eval(),inputs()

def numbers(config): return {k:v for k,v in config.to_dict().items() if k not in ('dtype','architectures','_name_or_path')}

@pytest.fixture(scope='module')
def elsewhere():
    "Opens a folder with transformers alone, in a process that stays, and returns the outputs"
    code = """
import pathlib,sys,torch,transformers
for line in sys.stdin:
    try:
        folder = line.strip()
        kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
        readme = pathlib.Path(folder, 'README.md')
        _,*loader = readme.read_text().split('```python') if readme.exists() else ['']
        if loader:
            exec(loader[0].split('```')[0], scope := {})
            model = scope['load_cut'](folder)
        else:
            model,info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
            assert not any(info.values()), info
        assert 'fastsparse' not in sys.modules
        with torch.no_grad(): torch.save(model(**torch.load(f'{folder}/inputs.pt'))[0], f'{folder}/outputs.pt')
        print('opened', flush=True)
    except Exception as e: print(repr(e), flush=True)"""
    child = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    def opened(model, x, folder):
        model.save_pretrained(folder)
        torch.save(x, folder/'inputs.pt')
        child.stdin.write(f'{folder}\n')
        child.stdin.flush()
        assert (said := child.stdout.readline().strip())=='opened', said
        return torch.load(folder/'outputs.pt')
    yield opened
    child.stdin.close()
    child.wait()

@pytest.mark.parametrize('family', [f if f in often else pytest.param(f, marks=pytest.mark.full) for f in families])
def test_another_process_opens_what_is_left(family, elsewhere, tmp_path):
    "Half of what the configuration can say is gone, and nothing else"
    model,x = made(family)
    before = numbers(model.config)
    prune_channels(model, .5, x)
    cut,removed = shrink(model, x)
    with torch.no_grad(): want = model(**x)[0]
    assert removed and output_error(want, cut(**x)[0])<1e-5 and output_error(want, elsewhere(cut, x, tmp_path))<1e-5
    assert numbers(model.config)==before
    changed = {k for k,v in numbers(cut.config).items() if before.get(k)!=v}
    assert changed=={*families[family][-1].split()}

@pytest.mark.parametrize('width,width_of_head,n', [(32,8,4), (64,8,8), (48,8,6)])
def test_heads_are_told_from_their_width(width, width_of_head, n, tmp_path):
    "As many heads as each has numbers: with half of either, all shapes are the same"
    torch.manual_seed(0)
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**small | dict(hidden_size=width, head_dim=width_of_head, num_attention_heads=n, num_key_value_heads=n)))
    prune_channels(model, .5, x := words(), structure='heads')
    cut,_ = shrink(model.eval(), x)
    assert (cut.config.num_attention_heads,cut.config.head_dim)==(n//2,width_of_head)
    cut.save_pretrained(tmp_path)
    assert output_error(type(model).from_pretrained(tmp_path)(**x), model(**x))<1e-5

def llama(**kwargs):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**small | dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=8) | kwargs)).eval(),words()

@pytest.mark.parametrize('sparsity,left', [(.25,8), (.4,4), (.5,4), (.8,2), (.9,1)])
def test_a_number_that_the_configuration_does_not_take(sparsity, left):
    "Llama's heads divide its width of 64; the nearest number is taken, the larger of two"
    model,x = llama()
    prune_channels(model, sparsity, x)
    cut,_ = shrink(model, x)
    assert cut.config.num_attention_heads==cut.config.num_key_value_heads==left

@pytest.mark.parametrize('kwargs', [dict(ranking='global'), dict(ranking='global', budget='weights'), dict(multiple=8)])
def test_layers_are_alike(kwargs):
    "Also where they compete, and one of them has far smaller weights"
    model,x = llama(num_hidden_layers=3)
    for p in model.model.layers[1].parameters(): p.data *= .1
    prune_channels(model, .3, x, **kwargs)
    cut,_ = shrink(model, x)
    sizes = [(o.self_attn.q_proj.out_features,o.mlp.down_proj.in_features) for o in cut.model.layers]
    assert len({*sizes})==1 and sizes[0][1]==cut.config.intermediate_size<48

def uneven(model, x):
    "Half of one layer is gone, and a quarter of the others"
    prune_channels(model, {'*.0.*':.5,'*':.25}, x, even=False)
    return shrink(model, x)[0]

@pytest.mark.parametrize('family,per_layer', [('llama','intermediate_size num_attention_heads num_key_value_heads'), ('vit','intermediate_size'),
    *(pytest.param(*o, marks=pytest.mark.full) for o in (('qwen3',f'{neurons} {heads}'), ('bert','intermediate_size'), ('gpt2','n_inner'), ('t5',''), ('modernbert','intermediate_size')))])
def test_layers_that_differ_open(family, per_layer, elsewhere, tmp_path):
    "By the code in the folder's README, in a process without this library; what a layer's settings can say is told"
    model,x = made(family)
    before = model.config.to_dict()
    cut = uneven(model, x)
    with torch.no_grad(): want = model(**x)[0]
    assert output_error(want, cut(**x)[0])<1e-5 and output_error(want, elsewhere(cut, x, tmp_path))<1e-5
    told = json.loads((tmp_path/'config.json').read_text())
    layers = told.get('per_layer_config', {})
    assert {k for o in layers.values() for k in o}=={*per_layer.split()}
    for k in per_layer.split():
        if k=='intermediate_size' and family!='modernbert':
            sizes = {int(n.split('layers.' if 'layers.' in n else 'layer.')[1].split('.')[0]):len(p) for n,p in cut.named_parameters() if n.endswith(('up_proj.weight','intermediate.dense.weight','fc1.weight'))}
            assert sizes=={i:layers.get(str(i), told)[k] for i in sizes}
    assert model.config.to_dict()==before

def test_a_copy_of_a_cut_model_is_saved_as_itself(tmp_path):
    "Copied or pickled; a README of somebody else stays"
    model,x = made('llama')
    cut = uneven(model, x)
    for i,own in enumerate((copy.deepcopy(cut), pickle.loads(pickle.dumps(cut)))):
        own.lm_head.weight.data.zero_()
        own.save_pretrained(tmp_path/str(i))
        assert not load_cut(tmp_path/str(i))(**x)[0].any() and cut(**x)[0].any()
    (tmp_path/'README.md').write_text('mine')
    cut.save_pretrained(tmp_path)
    assert (tmp_path/'README.md').read_text()=='mine'

@pytest.mark.parametrize('even', [True,False])
def test_a_class_that_reads_settings_of_layers(even, elsewhere, tmp_path):
    "Gemma 4 has widths of heads by layer: they stay; even cuts open by themselves"
    torch.manual_seed(0)
    config = tf.Gemma4TextConfig(**small | gqa, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=0, layer_types=['sliding_attention','full_attention'])
    model,x = tf.Gemma4ForCausalLM(config).eval(),words()
    if even: prune_channels(model, .5, x)
    cut = shrink(model, x)[0] if even else uneven(model, x)
    assert output_error(model(**x)[0], elsewhere(cut, x, tmp_path))<1e-5
    assert json.loads((tmp_path/'config.json').read_text())['per_layer_config']['1']['head_dim']==16
    assert ('```python' in (tmp_path/'README.md').read_text())!=even

def test_what_the_configuration_did_not_describe_is_not_saved(tmp_path):
    model,x = llama()
    model.lm_head = nn.Sequential(nn.Linear(64,20), nn.Linear(20,60))
    prune_channels(model, .25, x)
    cut,_ = shrink(model, x)
    with pytest.raises(ValueError, match="LlamaConfig didn't describe the model before the cut"): cut.save_pretrained(tmp_path/'new')
    assert not (tmp_path/'new').exists()

@pytest.mark.parametrize('family,why', [('bert','BertConfig has no number for it'), ('stablelm','StableLmConfig has no number for it'),
    ('gpt2','GPT2Config has no number for it'), ('olmo2',r"mean in 'model\.layers\.0\.self_attn\.q_norm'")])
def test_what_no_setting_holds(family, why):
    "Heads whose width follows from their number, and heads that one norm reads together"
    model,x = made(family)
    with pytest.raises(ValueError, match=f'no heads that can go .{why}'): prune_channels(model, .5, x, structure='heads')

def test_heads_that_no_setting_counts_open(elsewhere, tmp_path):
    "With `even=False` BERT's heads go, and the loader opens what is left"
    model,x = made('bert')
    prune_channels(model, .5, x, structure='heads', even=False)
    cut,_ = shrink(model, x)
    assert cut.encoder.layer[0].attention.self.query.out_features==16 and output_error(model(**x)[0], elsewhere(cut, x, tmp_path))<1e-5

def test_a_model_inside_another():
    "Its configuration changes; what is around it has none"
    class Classifier(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body,self.a,self.b = body,nn.Linear(32,10),nn.Linear(10,3)
        def forward(self, input_ids): return self.b(self.a(self.body(input_ids)[0][:,0]).relu())
    model,x = made('bert')
    model = Classifier(model).eval()
    prune_channels(model, .5, x)
    cut,_ = shrink(model, x)
    assert cut.body.config.intermediate_size==24 and cut.a.out_features==5 and output_error(cut(**x), model(**x))<1e-5

def test_a_model_that_its_configuration_does_not_describe():
    "An added layer: nothing is kept even, unless asked for, which is refused"
    model,x = llama()
    model.lm_head = nn.Sequential(nn.Linear(64,20), nn.Linear(20,60))
    with pytest.raises(ValueError, match='no configuration of transformers describes this'): prune_channels(model, .25, x, even=True)
    with pytest.raises(ValueError, match='no configuration of transformers describes this'): prune_channels(nn.Sequential(nn.Linear(2,4), nn.Linear(4,2)), .5, torch.ones(1,2), even=True)
    prune_channels(model, .25, x)
    cut,_ = shrink(model, x)
    assert cut.model.layers[0].self_attn.q_proj.out_features==48

def test_cut_twice(elsewhere, tmp_path):
    "In memory the modules keep the numbers that those of the opened folder have"
    def ints(model): return [{k:v for k,v in vars(m).items() if type(v) is int} for m in model.modules()]
    model,x = made('llama')
    for _ in range(2):
        prune_channels(model, .5, x)
        model,_ = shrink(model, x)
    assert model.config.intermediate_size==12 and output_error(elsewhere(model, x, tmp_path), model(**x)[0])<1e-5
    assert ints(model)==ints(type(model).from_pretrained(tmp_path))

def test_weights_that_are_elsewhere():
    with torch.device('meta'): model = tf.LlamaForCausalLM(tf.LlamaConfig(**small))
    for f in (lambda: prune_channels(model, .5, words()), lambda: shrink(model, words())):
        with pytest.raises(ValueError, match='embed_tokens.weight has no values, it is on meta'): f()

# --- experts

mixtures = dict(mixtral=families['mixtral'], gpt_oss=families['gpt_oss'], qwen3_moe=families['qwen3_moe'], qwen2_moe=families['qwen2_moe'],
    olmoe=causal('Olmoe', '', num_experts=4, num_experts_per_tok=2),
    deepseek_v3=causal('DeepseekV3', '', moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8))
families |= mixtures

class Elsewhere(TorchFunctionMode):
    "Routers give experts no chance: name of the router's weight → the experts"
    def __init__(self, gone):
        super().__init__()
        self.gone = gone
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            for w,es in self.gone:
                if args[1] is w: return out.index_fill(-1, torch.tensor(es), -torch.inf)
        return out

@pytest.mark.parametrize('family', [f if f in ('mixtral','gpt_oss') else pytest.param(f, marks=pytest.mark.full) for f in mixtures])
def test_tokens_of_cut_experts_go_elsewhere(family, elsewhere, tmp_path):
    "The model computes what the whole one does whose routers give the cut experts no chance; shared experts stay; any process opens the folder"
    model,x = made(family)
    model.set_experts_implementation('eager')
    whole = copy.deepcopy(model)
    gone = prune_experts(model, .25, [x])
    routers = [(first(p for r in o.routers for p in r.parameters() if p.ndim==2), gone[o.name]) for o in expert_blocks(whole)]
    with Elsewhere(routers): want = whole(**x)[0]
    n = [v for k,v in numbers(model.config).items() if k in ('num_experts','num_local_experts','n_routed_experts')]
    assert routers and {*n}=={3} and all(len(es)==1 for _,es in routers)
    assert output_error(want, model(**x)[0])<1e-5 and output_error(want, elsewhere(model, x, tmp_path))<1e-5

class Mixture(nn.Module):
    "Experts in a list, with a shared one; three get each token"
    def __init__(self, n=5):
        super().__init__()
        self.num_experts,self.top_k,self.gate,self.shared = n,3,nn.Linear(6,n,bias=False),nn.Linear(6,6)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6,7), nn.ReLU(), nn.Linear(7,6)) for _ in range(n)])
    def forward(self, x):
        weights,where = self.gate(x).softmax(-1).topk(self.top_k)
        out = self.shared(x)
        for e,m in enumerate(self.experts):
            rows,slot = (where==e).nonzero(as_tuple=True)
            out = out.index_add(0, rows, m(x[rows])*weights[rows,slot,None])
        return out

def test_scores_of_experts_by_hand():
    "The mean over an expert's tokens of weight times norm; one without tokens has 0 and goes first"
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(6,6), Mixture()),[torch.randn(20,6), torch.randn(9,6)]
    model[1].gate.weight.data[3] = 0
    model[0].bias.data = model[1].gate.weight.data.sum(0)*9  # all others are likelier
    got,want = expert_scores(model, x)['1.experts'],torch.zeros(5)
    h = model[0](torch.cat(x))
    probs = model[1].gate(h).softmax(-1)
    for e in range(5):
        own = [float(p[e]*model[1].experts[e](t).norm()) for t,p in zip(h, probs) if p[e]>=p.topk(3)[0].min()]
        want[e] = sum(own)/len(own) if own else 0.
    assert torch.allclose(got.float(), want, rtol=1e-4) and (want==0).any() and not (want==0).all()
    whole,(least,) = copy.deepcopy(model),prune_experts(model, .2, x)['1.experts']
    assert least==int(want.argmin()) and len(model[1].experts)==model[1].num_experts==model[1].gate.out_features==4
    with Elsewhere([(whole[1].gate.weight,[least])]): assert output_error(whole(x[0]), model(x[0]))<1e-6

def test_of_many_experts_without_tokens_the_first_go():
    model = nn.Sequential(Mixture(40))
    model[0].gate.weight.data.copy_(torch.eye(40)[:,4:10]*torch.tensor([9.,8.,7.,1.,1.,1.]))  # tokens of ones go to 4, 5 and 6
    assert prune_experts(model, .5, [torch.ones(7,6)])['0.experts']==[*range(4), *range(7, 23)]

def test_two_experts_are_a_mixture():
    "If nothing says to how many each token goes, one is enough"
    del (m := Mixture(2)).top_k
    assert [(o.n,o.top_k) for o in expert_blocks(nn.Sequential(m))]==[(2,1)]

def test_a_gate_beside_a_layer_routes_to_no_experts(): assert not expert_blocks(nn.Sequential(nn.Sequential(nn.Linear(6,6), nn.Linear(6,1))))

def test_fused_experts_score_as_those_in_a_list():
    model,x = made('mixtral')
    block,inner = model.model.layers[0].mlp,{}
    block.register_forward_pre_hook(lambda m, args: inner.update(x=args[0].flatten(0, 1)))
    got = expert_scores(model, [x])['model.layers.0.mlp.experts']
    up,down = block.experts.gate_up_proj,block.experts.down_proj
    probs = F.linear(inner['x'], block.gate.weight).softmax(-1)
    weights,where = probs.topk(2)
    weights = weights/weights.sum(-1, keepdim=True)
    for e in range(4):
        a,b = F.linear(inner['x'], up[e]).chunk(2, -1)
        own = (F.linear(F.silu(a)*b, down[e]).norm(dim=1)[:,None]*weights)[where==e]
        assert torch.allclose(got[e].float(), own.mean(), rtol=1e-4)

@pytest.mark.parametrize('n', [1,20])
def test_neurons_of_experts_in_a_list(n):
    "Those of each are its own, and go also from an expert that no token reaches"
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(6,6), Mixture(), nn.Linear(6,2)),torch.randn(n,6)
    prune_channels(model, 4/7, x)
    cut,_ = shrink(model, x)
    assert [o[0].out_features for o in cut[1].experts]==[o[2].in_features for o in cut[1].experts]==[3]*5
    x = torch.randn(30,6)
    assert output_error(model(x), cut(x))<1e-6

def test_neurons_of_fused_experts_are_scored_together():
    "The score of a neuron is the sum over all experts; both halves of the gate go with it"
    model,x = made('mixtral')
    up,down = model.model.layers[0].mlp.experts.gate_up_proj,model.model.layers[0].mlp.experts.down_proj
    score = up[:,:48].abs().sum((0,2))+up[:,48:].abs().sum((0,2))+down.abs().sum((0,1))
    lowest = score.argsort()[:12].sort().values
    prune_channels(model, .25, x)
    assert (down==0).all(1).all(0).nonzero().flatten().equal(lowest) and (up==0).all(2).all(0).nonzero().flatten().equal(torch.cat([lowest,lowest+48]))

@pytest.mark.parametrize('args,text', [((.75,), 'each token goes to 2'), ((1.,), 'sparsity is 1.0'), (({'model.layers.0.mlp.experts':[1]},), 'leave the same number'),
    (({'experts':[1]},), 'names no experts'), (({'model.layers.0.mlp.experts':[4]},), 'has 4 experts')])
def test_experts_that_stay_whole(args, text):
    model,x = made('mixtral')
    before = {k:v.clone() for k,v in model.state_dict().items()}
    with pytest.raises(ValueError, match=text): prune_experts(model, *args, data=[x])
    assert model.config.num_local_experts==4 and all(v.equal(before[k]) for k,v in model.state_dict().items())
    with pytest.raises(ValueError, match='no experts'): prune_experts(nn.Sequential(nn.Linear(2,2)), .5, [torch.ones(1,2)])

def live(model, x):
    sparsify_model(model, .9, seed=0)
    return sparse_compute(model, x)

def shards(model, x):
    fsdp,dist = pytest.importorskip('torch.distributed.fsdp'),torch.distributed
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    return fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh('cpu', (1,)))

whole = dict(masked=(lambda m, x: sparsify_model(m, .5, seed=0), 'call unsparsify first'), live=(live, 'call unsparsify first'), sharded=(shards, 'cut the model before fully_shard'),
    quantized=(lambda m, x: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True), "MixtralConfig doesn't describe"),
    adapted=(lambda m, x: setattr(m, 'lm_head', nn.Sequential(m.lm_head)), "MixtralConfig doesn't describe"))
cuts = [lambda m, x: prune_experts(m, .25, [x]), lambda m, x: prune_layers(m, 1, [x]), lambda m, x: prune_channels(m, .5, x), shrink]

def state_of(model):
    "Which modules and parameters stand where, their sums, and the configuration"
    values = [float(p.detach().sum()) for p in model.parameters()]
    return [(n,id(m),*map(id, m.parameters())) for n,m in model.named_modules()],values,model.config.to_dict()

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('kind', whole)
def test_models_that_can_not_be_cut(kind):
    "One error before anything changed; what is sharded loses no channels either"
    model,x = made('mixtral')
    alter,why = whole[kind]
    alter(model, x)
    before = state_of(model)
    try:
        for cut in cuts[:4 if kind=='sharded' else 2]:
            with pytest.raises(ValueError, match=why): cut(model, x)
            assert state_of(model)==before
    finally:
        if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()

def test_experts_in_groups():
    "Each group of DeepSeek's router must have as many experts as the others"
    kind,config,settings,inputs,_ = mixtures['deepseek_v3']
    model = getattr(tf, kind)(getattr(tf, config)(**settings | dict(n_group=2, topk_group=1)))
    with pytest.raises(ValueError, match='routed in groups'): prune_experts(model, .25, [inputs()])

# --- layers

four = dict(num_hidden_layers=4)
sliding = dict(sliding_window=3, layer_types=['sliding_attention','sliding_attention','full_attention','sliding_attention'])
stacks = dict(llama=causal('Llama', **four), gemma2=causal('Gemma2', **gqa, head_dim=8, **four, **sliding), bert=base('Bert', **four),
    gpt2=('GPT2LMHeadModel','GPT2Config',gpt | dict(n_layer=4),words,''), qwen3=causal('Qwen3', **gqa, **four, **sliding, head_dim=8, use_sliding_window=True),
    qwen3_moe=causal('Qwen3Moe', **moe, head_dim=8, moe_intermediate_size=24, num_experts=4, mlp_only_layers=[3], **four),
    t5=('T5ForConditionalGeneration','T5Config',t5 | dict(num_layers=4),both,''),
    whisper=families['whisper'][:2]+(seq | dict(decoder_layers=4, num_mel_bins=8, max_source_positions=10, max_target_positions=16),sound,''))

def stack(family):
    torch.manual_seed(0)
    kind,config,settings,inputs,_ = stacks[family]
    return getattr(tf, kind)(getattr(tf, config)(**settings)).eval(),inputs()

def without(model, name, gone):
    "What blocks return is replaced by what they are given"
    def skip(m, args, kwargs, out): return args[0] if isinstance(out, torch.Tensor) else (args[0],*out[1:])
    for i in gone: model.get_submodule(name)[i].register_forward_hook(skip, with_kwargs=True)

@pytest.mark.parametrize('family,name,gone', [('llama','model.layers',[1,2]), ('gemma2','model.layers',[0,3]), ('gpt2','transformer.h',[0]),
    *(pytest.param(*o, marks=pytest.mark.full) for o in [('qwen3','model.layers',[1]), ('bert','encoder.layer',[1,3]), ('qwen3_moe','model.layers',[3]),
        ('t5','encoder.block',[1,2]), ('t5','decoder.block',[3]), ('whisper','model.decoder.layers',[0,2])])])
def test_layers_that_are_skipped_may_go(family, name, gone, elsewhere, tmp_path):
    "The model computes what the whole one does without these blocks, with their kinds of attention; any process opens the folder"
    model,x = stack(family)
    whole = copy.deepcopy(model)
    assert prune_layers(model, gone, [x], blocks=name)==gone
    without(whole, name, gone)
    with torch.no_grad():
        want = whole(**x)[0]
        assert output_error(want, model(**x)[0])<1e-5 and output_error(want, elsewhere(model, x, tmp_path))<1e-5

def test_a_cache_of_fewer_layers():
    "Tokens are the same with a cache of keys and values and without"
    model,x = stack('gemma2')
    prune_layers(model, [0,1], [x])
    assert [m.self_attn.layer_idx for m in model.model.layers]==[0,1] and model.config.layer_types==['full_attention','sliding_attention']
    a,b = [model.generate(**x, max_new_tokens=8, do_sample=False, use_cache=o) for o in (True,False)]
    assert a.equal(b)

class Turning(nn.Module):
    "Turns the plane by an angle"
    def __init__(self, angle):
        super().__init__()
        c,s = torch.tensor(angle).cos(),torch.tensor(angle).sin()
        self.layer_idx,self.turn = 0,nn.Parameter(torch.stack([torch.stack([c,-s]), torch.stack([s,c])]))
    def forward(self, x): return x@self.turn.T

class Turns(nn.Module):
    def __init__(self, *angles):
        super().__init__()
        self.blocks = nn.ModuleList(map(Turning, angles))
    def forward(self, x):
        for m in self.blocks: x = m(x)
        return x

def test_angles_by_hand():
    "Turns of .1, 3, -3 and .2: the second and third together do nothing, the first alone least"
    model,x = Turns(.1, 3., -3., .2),[torch.randn(5,3,2)]
    blocks = {f'blocks.{i}':m for i,m in enumerate(model.blocks)}
    assert torch.allclose(torch.tensor(layer_angles(model, blocks, 2, x)), torch.tensor([3.1,0.,2.8])/torch.pi, atol=1e-3)
    assert prune_layers(copy.deepcopy(model), 1, x)==[0]
    assert prune_layers(model, 2, x)==[1,2] and len(model.blocks)==2

def test_layers_by_loss():
    "The target is a turn by .3. Without the last the whole turns by .25, which is nearest, then without the third by .5"
    model,x = Turns(.3, .2, -.25, .04),torch.randn(6,2)
    assert prune_layers(model, 2, [(x, Turning(.3)(x).detach())], by='loss', loss_func=F.mse_loss)==[2,3]

@pytest.mark.parametrize('data', [True,False])
@pytest.mark.parametrize('kind,config,gone,blocks', [('DiffLlamaForCausalLM','DiffLlamaConfig',[0],None), ('AlbertModel','AlbertConfig',[1],'encoder.albert_layer_groups')])
def test_blocks_that_compute_with_their_number_stay_with_and_without_data(kind, config, gone, blocks, data):
    "A number of its own in each layer, and a member of a list that isn't a layer"
    torch.manual_seed(0)
    more = dict(embedding_size=8, num_hidden_groups=3) if 'Albert' in kind else gqa
    model = getattr(tf, kind)(getattr(tf, config)(**small | dict(num_hidden_layers=6) | more)).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, 0, .25)
    n = len(model.state_dict())
    with pytest.raises(ValueError, match='gives another model without these blocks'): prune_layers(model, gone, [words()] if data else None, blocks=blocks)
    assert len(model.state_dict())==n

def test_a_model_of_sounds_needs_data():
    "Its configuration says nothing of their length"
    with pytest.raises(ValueError, match='pass data'): prune_layers(stack('whisper')[0], [0])

def test_a_backbone_says_its_stages():
    "They follow from the number of layers"
    model = tf.Dinov2Model(tf.Dinov2Config(hidden_size=16, num_attention_heads=2, image_size=16, patch_size=4, num_hidden_layers=5)).eval()
    x,last = torch.randn(2,3,16,16),model.encoder.layer[4]
    want = copy.deepcopy(model)
    want.encoder.layer[4].forward = lambda x, *args, **kwargs: x
    prune_layers(model, [4])
    assert model.config.num_hidden_layers==4 and model.config.stage_names==['stem','stage1','stage2','stage3','stage4']
    assert torch.allclose(model(x).last_hidden_state, want(x).last_hidden_state)

def test_what_a_block_adds_to_scores_of_experts_goes_with_them():
    own = dict(moe_intermediate_size=8, num_dense_layers=0, use_expert_bias=True, layer_types=['full_attention']*2, num_experts=6)
    model = tf.Lfm2MoeForCausalLM(tf.Lfm2MoeConfig(**{**small, **moe, **own})).eval()
    prune_experts(model, {o.name:[0,4] for o in expert_blocks(model)})
    block = model.model.layers[0].feed_forward
    assert block.expert_bias.shape==(4,) and model.config.num_experts==4 and model(**words()).logits.isfinite().all()

def test_layers_that_a_configuration_can_not_say():
    "The first block of T5 computes positions for all; the one dense block of a mixture has its number written down"
    model,x = stack('t5')
    with pytest.raises(ValueError, match="T5Config can't say what would be left"): prune_layers(model, [0], [x], blocks='encoder.block')
    assert 0 not in prune_layers(model, 2, [x], blocks='encoder.block') and model.config.num_layers==2
    for n,text in ((4, 'one stays at least'), ([4], 'numbered from 0'), (0, 'n is 0')):
        with pytest.raises(ValueError, match=text): prune_layers(stack('llama')[0], n, [words()])
    with pytest.raises(ValueError, match="by is 'x'"): prune_layers(stack('llama')[0], 1, [words()], by='x')

# --- any architecture, by the shapes of a file

def picture_net(): return nn.Sequential(nn.Conv2d(3,12,3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12,12,3,groups=12,bias=False), nn.ReLU(), nn.Conv2d(12,8,1),
    nn.ReLU(), nn.Flatten(), nn.Linear(128,3))

@pytest.mark.parametrize('sparsity', [None,.5])
def test_a_file_cuts_the_full_architecture(sparsity, tmp_path):
    "Norms and depthwise filters too, with masks on what is left; another optimizer trains on"
    torch.manual_seed(0)
    model,x = picture_net().eval(),torch.randn(2,3,8,8)
    if sparsity: sparsify_model(model, sparsity, seed=0)
    prune_channels(model, .5, x)
    cut,_ = shrink(model, x)
    torch.save(cut.state_dict(), tmp_path/'cut.pt')
    with pytest.warns(match=r'5 layers were cut to the shapes of the file: 0.weight is \(6, 3, 3, 3\) now') as told:
        load_sparse(full := picture_net().eval(), tmp_path/'cut.pt')
    assert len(told)==1 and full[3].groups==6 and full(x).equal(cut(x)) and {*full.state_dict()}=={*cut.state_dict()}
    full(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape==p.shape for p in full.parameters())

@pytest.mark.parametrize('n,text', [(7, r'4.weight is \(5, 4\) in the file, and \(7, 4\) in the model'), (3, r'4.(weight|bias) (is|has shape) .*(5|3),')])
@pytest.mark.parametrize('cut', [True,False])
def test_another_number_of_classes_is_no_cut(n, text, cut):
    "Nothing reads outputs, so they can't be what a cut has taken; of masked files and of cut ones, with fewer classes and with more"
    torch.manual_seed(0)
    def make(n): return nn.Sequential(nn.Linear(6,8), nn.ReLU(), nn.Linear(8,4), nn.ReLU(), nn.Linear(4,n)).eval()
    model,x = make(5),torch.randn(2,6)
    if cut:
        prune_channels(model, {'0':.5}, x)
        model,_ = shrink(model, x)
    else: sparsify_model(model, .5, seed=0)
    full = make(n)
    before = {k:v.clone() for k,v in full.state_dict().items()}
    with pytest.raises(ValueError, match=text): load_sparse(full, model.state_dict())
    assert all(v.equal(before[k]) for k,v in full.state_dict().items())

def test_fewer_inputs_are_no_cut():
    full = nn.Sequential(nn.Linear(6,8), nn.ReLU(), nn.Linear(8,3))
    with pytest.raises(ValueError, match=r'0.weight is \(8, 5\) in the file, and \(8, 6\) in the model'):
        load_sparse(full, nn.Sequential(nn.Linear(5,8), nn.ReLU(), nn.Linear(8,3)).state_dict())

@pytest.mark.parametrize('family', ['mixtral','qwen3_moe'])
def test_a_file_with_fewer_experts_opens_in_the_whole_architecture(family):
    model,x = made(family)
    full = copy.deepcopy(model)
    prune_experts(model, {o.name:[0,3] for o in expert_blocks(model)})
    with pytest.warns(match='layers were cut'): load_sparse(full, model.state_dict())
    assert full(**x).logits.equal(model(**x).logits) and expert_blocks(full)[0].n==2
    assert [v for k,v in vars(full.config).items() if k in ('num_experts','num_local_experts')]==[2]

def test_a_file_of_fewer_embeddings():
    "What an embedding writes is read by a layer"
    class Words(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.embed,self.out = nn.Embedding(9, n),nn.Linear(n, 3)
        def forward(self, x): return self.out(self.embed(x))
    small,x = Words(4),torch.tensor([[1,2]])
    with pytest.warns(match='layers were cut'): load_sparse(full := Words(8), small.state_dict())
    assert full(x).equal(small(x))

def test_a_bias_that_a_cut_has_made():
    "What dead neurons add to the next layer is a bias there"
    torch.manual_seed(0)
    def make(): return nn.Sequential(nn.Linear(4,6), nn.Tanh(), nn.Linear(6,3,bias=False))
    model,x = make(),torch.randn(2,4)
    model[0].weight.data[2:] = 0
    cut,_ = shrink(model, x)
    with pytest.warns(match='2 layers were cut'): load_sparse(full := make(), cut.state_dict())
    assert full[2].bias is not None and full(x).equal(cut(x)) and full[0].out_features<6

@pytest.mark.parametrize('make', [lambda: nn.Sequential(nn.Linear(4,6), nn.ReLU(), nn.Linear(6,3)), lambda: nn.Sequential(nn.Linear(9,6), nn.ReLU(), nn.Linear(6,1))])
def test_a_file_of_another_architecture(make):
    "Refused if anything is larger there, and nothing is cut"
    torch.manual_seed(0)
    state = nn.Sequential(nn.Linear(9,4), nn.ReLU(), nn.Linear(4,3)).state_dict()
    model = make()
    before = {k:v.clone() for k,v in model.state_dict().items()}
    with pytest.raises(ValueError): load_sparse(model, state)
    assert all(v.equal(before[k]) for k,v in model.state_dict().items())
