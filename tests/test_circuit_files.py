"Published networks: files in both layouts, made up here, against a forward pass written down from their facts"
import json,math,pytest,torch
from fastsparse.circuits import *

d,heads,n_mlp,n_tokens,n_ctx,layers = 12,3,20,11,16,2

def abs_top(x, k):
    "The `k` channels of largest magnitude, the others zero"
    keep = x.abs().sort(dim=-1, descending=True).indices[...,:k]
    out = torch.zeros_like(x)
    for i in range(k): out.scatter_(-1, keep[...,i:i+1], x.gather(-1, keep[...,i:i+1]))
    return out

def reference(p, x, o):
    "Logits of a batch of ids, from tensors named as in circuit_sparsity without `transformer.`"
    def cut(y, where): return abs_top(y, int(o['afrac']*y.shape[-1])) if o['afrac'] and where in o['where'] else y
    def norm(y, name):
        w = p[f'{name}.weight']
        if o['rms']: return w*y/(y.square().mean(-1, keepdim=True)+torch.finfo(torch.float32).eps).sqrt()
        y = (y-y.mean(-1, keepdim=True))/(y.var(-1, unbiased=False, keepdim=True)+1e-5).sqrt()
        return w*y+p.get(f'{name}.bias', 0)
    def linear(y, name): return y@p[f'{name}.weight'].T+p.get(f'{name}.bias', 0)
    def act(y): return y.clamp(min=0) if o['act']=='relu' else y*(1+torch.erf(y/2**.5))/2
    def stream(y, where): return cut(y.clamp(min=0) if o['stream']=='relu' else y, where)
    n,t = x.shape
    r = p['wte.weight'][x]
    if 'wpe.weight' in p and not o['d_pos']: r = r+p['wpe.weight'][:t]
    for i in range(layers):
        def read(name, name_p, where):
            y = norm(r, f'h.{i}.{name}')
            if o['d_pos']: y = torch.cat([y, norm(p['wpe.weight'][:t], f'h.{i}.{name_p}').expand(n, t, -1)], -1)
            return cut(y, where)
        qkv = linear(read('ln_1', 'ln_p1', 'attn_in'), f'h.{i}.attn.c_attn')
        width = qkv.shape[-1]//3
        q,k,v = (cut(qkv[...,j*width:(j+1)*width], w) for j,w in enumerate(('attn_q','attn_k','attn_v')))
        parts,each = [],width//heads
        sink = p.get(f'h.{i}.attn.sink')
        for h in range(heads):
            s = slice(h*each, (h+1)*each)
            a = q[...,s]@k[...,s].transpose(1, 2)/math.sqrt(each)
            a = torch.exp(a)*torch.ones(t, t).tril()
            total = a.sum(-1, keepdim=True)
            if sink is not None: total = total+torch.exp(sink[h if len(sink)>1 else 0])
            parts.append(a/total@v[...,s])
        r = stream(r+cut(linear(torch.cat(parts, -1), f'h.{i}.attn.c_proj'), 'attn_out'), 'resid_post_attn')
        y = cut(act(linear(read('ln_2', 'ln_p2', 'mlp_in'), f'h.{i}.mlp.c_fc')), 'mlp_neuron')
        r = stream(r+cut(linear(y, f'h.{i}.mlp.c_proj'), 'mlp_out'), 'resid_post_mlp')
    y = norm(r, 'ln_f')@p['lm_head.weight'].T+p.get('final_logits_bias', 0)
    return y+p['bigram_table'][x] if 'bigram_table' in p else y

every_place = 'attn_in,attn_out,mlp_in,mlp_out,mlp_neuron,attn_q,attn_k,attn_v,resid_post_attn,resid_post_mlp'
usual = dict(rms=True, act='gelu', stream='identity', afrac=None, where=every_place, d_pos=None, bias=False, ln_bias=False, tied=False, bigram=False,
    sink=0, positions=True, d_head=4, n_mlp=n_mlp)

def tensors(o, seed=0):
    "Random tensors of a network with these options"
    g,shapes,more,inner,norms = torch.Generator().manual_seed(seed),{},o['d_pos'] or 0,heads*o['d_head'],{}
    for i in range(layers):
        h = f'h.{i}.'
        norms |= {h+'ln_1':d, h+'ln_2':d}|({h+'ln_p1':more, h+'ln_p2':more} if more else {})
        for k,s in {'attn.c_attn':(3*inner,d+more), 'attn.c_proj':(d,inner), 'mlp.c_fc':(o['n_mlp'],d+more), 'mlp.c_proj':(d,o['n_mlp'])}.items():
            shapes[h+k+'.weight'] = s
            if o['bias']: shapes[h+k+'.bias'] = s[:1]
        if o['sink']: shapes[h+'attn.sink'] = (o['sink'],)
    norms['ln_f'] = d
    for k,size in norms.items():
        shapes[k+'.weight'] = (size,)
        if o['ln_bias'] and not o['rms']: shapes[k+'.bias'] = (size,)
    shapes |= {'wte.weight':(n_tokens,d), 'lm_head.weight':(n_tokens,d)}
    if o['positions']: shapes['wpe.weight'] = (n_ctx,more or d)
    if o['bigram']: shapes['bigram_table'] = (n_tokens,n_tokens)
    p = {k:torch.randn(s, generator=g)*.5 for k,s in shapes.items()}
    if o['tied']: p['lm_head.weight'] = p['wte.weight']
    return p

def write_first(folder, o, p, **more):
    "The layout of circuit_sparsity"
    c = dict(block_size=n_ctx, vocab_size=n_tokens, n_layer=layers, n_head=heads, d_model=d, bias=o['bias'], ln_bias=o['ln_bias'], rms_norm=o['rms'],
        residual_activation_type=o['stream'], activation_type=o['act'], afrac=o['afrac'], afrac_loctypes=o['where'], tied_unembed=o['tied'],
        tokenizer_name='tinypython_2k', enable_bigram_table=o['bigram'], learnable_bigram_table=True, d_pos_emb=o['d_pos'], sink=bool(o['sink']), flash=True)
    if o['d_head']*heads!=d: c['d_head'] = o['d_head']
    if o['n_mlp']!=4*d: c['n_mlp' if o['act']=='relu' else 'd_mlp'] = o['n_mlp']
    def name(k): return k if k in ('lm_head.weight','bigram_table','final_logits_bias') else 'transformer.'+k.replace('attn.sink', 'attn.attn_imp.sink_logit')
    (folder/'beeg_config.json').write_text(json.dumps({**c, **more}))
    torch.save({name(k):v for k,v in p.items()}, folder/'final_model.pt')

def write_second(folder, o, p):
    "The layout of sparse_pretrain"
    m = dict(n_layer=layers, d_model=d, n_ctx=n_ctx, d_head=o['d_head'], d_mlp=o['n_mlp'], vocab_size=n_tokens, use_rms_norm=o['rms'],
        tie_embeddings=o['tied'], use_positional_embeddings=o['positions'], use_bigram_table=o['bigram'], use_attention_sinks=bool(o['sink']),
        activation=o['act'], dropout=0., use_bias=o['bias'])
    s = dict(enable_activation_sparsity=bool(o['afrac']), activation_topk_fraction=o['afrac'] or .25, activation_sparsity_locations=o['where'])
    (folder/'config.json').write_text(json.dumps(dict(model_config=m, sparsity_config=s, training_config={})))
    def name(k): return k.replace('attn.sink', 'attn.attn_fn.sink_logit').replace('h.', 'blocks.', 1) if k[:2]=='h.' else k
    torch.save({name(k):v for k,v in p.items()}, folder/'pytorch_model.bin')

both = [{}, dict(rms=False, ln_bias=True), dict(act='relu'), dict(afrac=.25), dict(afrac=.5, where='mlp_neuron,attn_v'), dict(bias=True), dict(tied=True),
    dict(bigram=True), dict(sink=heads), dict(n_mlp=4*d), dict(rms=False, ln_bias=True, afrac=.3, bias=True, bigram=True, sink=heads, act='relu')]
first_only = [dict(rms=False), dict(stream='relu'), dict(stream='relu', afrac=.5), dict(d_pos=5), dict(d_pos=5, rms=False, ln_bias=True, afrac=.4, sink=1),
    dict(sink=1), dict(d_head=7), dict(d_head=2, d_pos=3, bias=True, bigram=True, stream='relu')]
x = torch.randint(n_tokens, (3,10), generator=torch.Generator().manual_seed(1))

def loaded(folder, write, p=None, **options):
    o = {**usual, **options}
    p = tensors(o) if p is None else p
    write(folder, o, p)
    return load_circuit_model(folder),reference(p, x, o)

@pytest.mark.parametrize('options', both+first_only)
def test_logits_are_those_of_the_first_layout(options, tmp_path):
    model,want = loaded(tmp_path, write_first, **options)
    with torch.no_grad(): assert torch.allclose(model(x), want, atol=1e-5, rtol=1e-5)
    assert not model.training and len(model.nodes)==len({*model.nodes})

@pytest.mark.parametrize('options', both+[dict(positions=False)])
def test_logits_are_those_of_the_second_layout(options, tmp_path):
    options = dict(ln_bias=not options.get('rms', True), **{k:v for k,v in options.items() if k!='ln_bias'})
    model,want = loaded(tmp_path, write_second, **{'positions':len(options)%2==1, **options})
    with torch.no_grad(): assert torch.allclose(model(x), want, atol=1e-5, rtol=1e-5)

def test_each_option_changes_the_logits(tmp_path):
    "So that a test above can't pass by an option that does nothing"
    seen = []
    for i,options in enumerate(both+first_only):
        (tmp_path/str(i)).mkdir()
        seen.append(loaded(tmp_path/str(i), write_first, **options)[1])
    assert all(not torch.allclose(seen[0], o, atol=1e-2) for o in seen[1:])

def test_a_bias_of_the_logits_and_a_mask_of_slow_attention(tmp_path):
    p = tensors(usual)
    write_first(tmp_path, usual, {**p, 'final_logits_bias':torch.arange(n_tokens)/10, 'h.0.attn.bias':torch.ones(1, 1, n_ctx, n_ctx)})
    with torch.no_grad(): assert torch.allclose(load_circuit_model(tmp_path)(x), reference(p, x, usual)+torch.arange(n_tokens)/10, atol=1e-5)

def test_what_is_not_done_is_refused_by_name(tmp_path):
    p = tensors(usual)
    write_first(tmp_path, usual, p, use_tied_aux_matrix=True)
    with pytest.raises(ValueError, match='use_tied_aux_matrix'): load_circuit_model(tmp_path)
    write_first(tmp_path, usual, {**p, 'bridges.0.weight':torch.ones(2)})
    with pytest.raises(ValueError, match='bridges.0.weight is in .*has no such part'): load_circuit_model(tmp_path)
    write_first(tmp_path, usual, {k:v for k,v in p.items() if 'ln_f' not in k})
    with pytest.raises(ValueError, match='ln_f.weight is not in'): load_circuit_model(tmp_path)
    with pytest.raises(FileNotFoundError, match='neither beeg_config.json nor config.json'): load_circuit_model(tmp_path/'none')

@pytest.mark.parametrize('options', [{}, dict(stream='relu', sink=heads, bias=True), dict(d_pos=5), dict(afrac=.5, rms=False, ln_bias=True)])
def test_links_hold_every_live_weight(options, tmp_path):
    p = tensors({**usual, **options})
    for k,v in p.items():
        if v.ndim>1: v.mul_(torch.rand(v.shape, generator=torch.Generator().manual_seed(len(k)))<.2)
    model,_ = loaded(tmp_path, write_first, p, **options)
    edges = sum(int((l.weight!=0).sum()) for l in model.links() if l.kind=='weight')
    assert edges==sum(int(v.count_nonzero()) for k,v in model.matrices().items() if k!='wte.weight')
    assert {l.source for l in model.links()}=={*model.nodes} and {l.target for l in model.links()}-{*model.nodes}=={'lm_head'}
    means = node_means(model, model.nodes, x)
    for l in model.links(): assert l.weight.shape[1]==len(means[l.source]) and len(l.weight)==(n_tokens if l.target=='lm_head' else len(means[l.target]))

@pytest.mark.parametrize('options', [dict(sink=heads, bias=True), dict(stream='relu', bias=True, d_pos=2)])
def test_search_tests_and_pictures_run_on_one(options, tmp_path):
    "The right token is the one that the network itself finds likelier"
    model,_ = loaded(tmp_path, write_first, **options)
    ids = torch.randint(n_tokens, (400,8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(): more = model(ids)[:,-1,3]-model(ids)[:,-1,4]
    model.final_logits_bias[4] += more.median()  # so that each is the likelier one in half of the prompts
    more -= more.median()
    i = torch.stack([more.topk(40).indices, (-more).topk(40).indices], 1).flatten()
    right = torch.where(more[i]>0, 3, 4)
    task = Task('three or four', ids[i], right, 7-right, torch.full((80,), 7))
    circuit = find_circuit(model, task, starts=1, n_steps=200, prices=(1e-4,1e-2), goal=.3, progress=False)
    assert circuit.found and circuit.n_edges>0
    assert {'sufficiency','no circuit'}&{*check_circuit(model, circuit, task, goal=.3)['fails'].split(', ')}==set()
    assert not torch.equal(shuffled(model)(ids), model(ids))
    model.vocab = [f't{j}' for j in range(n_tokens)]
    words = node_words(model, circuit, ids)
    assert any(f'>{t}</text>' in draw_circuit(model, circuit, words) for t in ('t3','t4'))
    assert 't3' in circuit_page(model, [circuit], tmp_path/'p.html', words={circuit.task:words}).read_text()
