"Tokens that texts don't need leave the model, its head, its tokenizer and its configuration; what stays computes the same bits"
import pytest,torch
from fastsparse.all import prune_tokens
from fastsparse.cut.tokens import needed_tokens
from torch import nn

tf = pytest.importorskip('transformers')
letters = 'abcdefgh'
words = ['[PAD]','[UNK]','[CLS]','[SEP]','[MASK]','bad','##e','##gg','head','##d','face',*letters,*(f'##{o}' for o in letters if o not in 'de'),'cafe','##de']

@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path/'vocab.txt').write_text('\n'.join(words))
    return tf.BertTokenizerFast.from_pretrained(tmp_path)

def made(kind):
    torch.manual_seed(0)
    config = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return getattr(tf, kind)(tf.BertConfig(vocab_size=len(words), **config)).eval()

def test_what_the_texts_need_and_no_more(tokenizer):
    "Tokens of the texts, of one character, and special ones"
    gone = {words[i] for i in range(len(words))}-{words[i] for i in needed_tokens(tokenizer, ['bad face'])}
    assert gone=={'##gg','head','cafe','##de'}

@pytest.mark.parametrize('kind', ['BertModel','BertForMaskedLM'])
def test_folders_open_and_compute_the_same(kind, tokenizer, tmp_path):
    model,texts = made(kind),['bad face','face bade']
    stay,batch = needed_tokens(tokenizer, texts),tokenizer(texts, return_tensors='pt', padding=True)
    want = model(**batch)[0].detach()
    small = prune_tokens(model, tokenizer, texts)
    model.save_pretrained(tmp_path/'small')
    small.save_pretrained(tmp_path/'small')
    again,own = getattr(tf, kind).from_pretrained(tmp_path/'small').eval(),tf.AutoTokenizer.from_pretrained(tmp_path/'small')
    got = again(**own(texts, return_tensors='pt', padding=True))[0].detach()
    if kind=='BertForMaskedLM': want = want[...,stay]
    assert got.equal(want) and again.config.vocab_size==len(own)==len(stay)<len(words)
    assert again.get_input_embeddings().weight.shape[0]==len(stay) and again.config.pad_token_id==own.pad_token_id
    assert own.convert_ids_to_tokens(own('head')['input_ids'])==['[CLS]','h','##e','##a','##d','[SEP]']

@pytest.mark.parametrize('case,match', [('text', 'texts is one text'), ('sparse', 'unsparsify'), ('other', 'no model of transformers'), ('kind', 'of kind BPE'), ('small', 'the tokenizer of this model')])
def test_refused_before_anything_changed(case, match, tokenizer):
    model,texts = made('BertModel'),['bad']
    if case=='text': texts = 'bad'
    if case=='sparse':
        from fastsparse.all import sparsify_model
        sparsify_model(model, .5)
    if case=='other': model = nn.Linear(2,2)
    if case=='small': model = tf.BertModel(tf.BertConfig(vocab_size=9, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
    if case=='kind':
        tokenizers = pytest.importorskip('tokenizers')
        tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE({'a':0,'b':1}, [])))
    n = sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match=match): prune_tokens(model, tokenizer, texts)
    assert sum(p.numel() for p in model.parameters())==n

# --- fastai's vocabularies

def language_model(vocab, kind='lm', **kwargs):
    from fastai.text.models import awdlstm,core
    torch.manual_seed(0)
    config = getattr(awdlstm, f'awd_lstm_{kind}_config') | dict(emb_sz=8, n_hid=9, n_layers=2) | kwargs
    if kind=='lm': return core.get_language_model(awdlstm.AWD_LSTM, len(vocab), config).eval()
    return core.get_text_classifier(awdlstm.AWD_LSTM, len(vocab), 3, seq_len=5, config=config).eval()

def fastai_vocab(front=()):
    from fastai.text.core import defaults
    return [*front,*defaults.text_spec_tok,'the','bad','face','head','cafe','xxfake','xxfake']

@pytest.mark.parametrize('kind,kwargs', [('lm',{}), ('lm',dict(tie_weights=False)), ('lm',dict(out_bias=False)), ('clas',{})])
def test_vocabularies_of_fastai(kind, kwargs):
    "Rows of the embedding, of the decoder that may share them, and of its bias; numbers of padding follow"
    from fastai.text.data import Numericalize
    vocab = fastai_vocab()
    old,texts = Numericalize(vocab),[['xxbos','the','bad','head'],['face','xxmaj','the','bad']]
    model = language_model(vocab, kind, **kwargs)
    def outs(num, model):
        model.reset()
        return model(torch.stack([num.encodes(t) for t in texts]))[0].detach()
    want,words = outs(old, model),[*vocab]
    new = prune_tokens(model, old, texts)
    stay = [i for i,t in enumerate(vocab) if t in new.vocab]
    assert {*vocab}-{*new.vocab}=={'cafe','xxfake'} and [*old.vocab]==words and new.vocab[1]=='xxpad'
    assert outs(new, model).equal(want[...,stay] if kind=='lm' else want)
    assert new.encodes(['cafe'])[0]==new.o2i['xxunk']==0

@pytest.mark.parametrize('case,match', [('text','lists of tokens'), ('strings','lists of tokens'), ('other','the Numericalize of this model'), ('sparse','unsparsify'), ('learner','pass learn.model')])
def test_vocabularies_refused_before_anything_changed(case, match):
    from fastai.text.data import Numericalize
    vocab = fastai_vocab()
    model = language_model(vocab)
    n = sum(p.numel() for p in model.parameters())
    texts = dict(text='the bad', strings=['the bad']).get(case, [['the','bad']])
    if case=='sparse':
        from fastsparse.all import sparsify_model
        sparsify_model(model, .5)
    def call(): return prune_tokens(type('Learner', (), dict(model=model))() if case=='learner' else model, Numericalize(vocab[:-1] if case=='other' else vocab), texts)
    with pytest.raises(ValueError, match=match): call()
    assert sum(p.numel() for p in model.parameters())==n
