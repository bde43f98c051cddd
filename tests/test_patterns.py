"Patterns that name parameters, and rules in order"
import pytest
from collections import OrderedDict
from fastsparse.core.patterns import assign,indices_of,need_named,read_rules
from torch import nn

def block(i, o): return nn.Sequential(OrderedDict(conv=nn.Conv2d(i,o,3), norm=nn.BatchNorm2d(o)))

model = nn.Sequential(OrderedDict(first=block(3,8), second=block(8,8), head=nn.Linear(8,10)))
names,params = zip(*[(n,p) for n,p in model.named_parameters() if p.ndim>1])
deep = ['a.weight','b.mlp.fc.weight','c.mlp.fc.weight','c.mlp.out.weight']

@pytest.mark.parametrize('pattern,found', [('head.weight', [2]), ('first', [0]), ('fir', []), ('*.conv.weight', [0,1]), ('conv', [0,1]), (nn.Conv2d, [0,1]),
    (nn.Sequential, [0,1,2]), (lambda n,p: p.ndim==2, [2]), (0, [0]), (-1, [2]), (3, []), (-4, []), (['head',0,'first'], [0,2]), ([], [])])
def test_what_a_pattern_names(pattern, found):
    "Names, globs, types, functions, indices and lists"
    assert indices_of(pattern, names, params, model)==found

@pytest.mark.parametrize('text,among,found', [('a', deep, [0]), ('mlp', deep, [1,2,3]), ('mlp.fc', deep, [1,2]), ('fc', deep, [1,2]), ('weight', deep, [0,1,2,3]), ('fc.', deep, []), ('m', deep, []),
    ('', deep, []), ('a[0].weight', ['a[0].weight','a0.weight'], [0]), ('0', ['0.weight','10.weight','1.0.weight'], [0]), ('0', ['1.0.weight'], [])])
def test_a_text_at_any_depth(text, among, found):
    "A name that begins with a digit is found at the top only"
    assert indices_of(text, among)==found

def test_what_is_no_pattern():
    "And a pattern that names nothing, where one is needed"
    for bad in (None, True, 1.5, b'head', ['head',None]):
        with pytest.raises(ValueError, match='a pattern is'): indices_of(bad, names)
    with pytest.raises(ValueError, match='is a type'): indices_of(nn.Conv2d, names)
    for bad in ('haed', ['head','haed'], [], 7):
        with pytest.raises(ValueError, match='chosen is .* names none'): need_named(bad, names, what='chosen')
    assert need_named(['head','first'], names)==[0,2]

def test_rules_in_order():
    "The first that names a parameter decides; one without effect is told of"
    assert read_rules([('a',1),['b',2]])==[('a',1),('b',2)]
    assert read_rules(('a',1))==[('a',1)] and read_rules((('a',1),('b',2)))==[('a',1),('b',2)]
    for bad in (None, 'ab', 3, [1], [('a',)], [('a',1,2)]):
        with pytest.raises(ValueError, match='rules is .* pairs'): read_rules(bad)
    assert assign([('head',0),('*',1)], names)==[1,1,0] and assign([('head',0)], names)==[None,None,0]
    with pytest.warns(UserWarning, match='put it before them'): assert assign([('*',0),('head',1)], names)==[0,0,0]
    with pytest.warns(UserWarning, match='it matches none of'): assert assign([('haed',0),('*',1)], names)==[1,1,1]

def test_a_text_that_begins_with_a_digit_names_from_the_root():
    "'0.weight' of a model is that of its first layer, and of no block inside; words name what is inside too"
    names = ['0.weight','block.0.weight','block.fc.weight']
    assert indices_of('0.weight', names)==[0] and indices_of('0.weight', names[1:])==[] and indices_of('fc', names)==[2]
