__version__ = "0.2.0"

from typing import TYPE_CHECKING
if TYPE_CHECKING: from .all import *  # what type checkers and editors read

def __getattr__(name):
    "What `fastsparse.all` has under `name`, or the module of that name, looked up late: a plain PyTorch loop loads no fastai"
    from importlib import import_module
    from importlib.util import find_spec
    if name.startswith('__') and name!='__all__': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name!='all' and find_spec(f'{__name__}.{name}'): return import_module(f'{__name__}.{name}')
    for module,names in () if name in ('all','__all__') else _modules():  # those that need fastai and matplotlib come last
        found = import_module(f'{__name__}.{module}')
        if name in (names.split(',') if names!='*' else found.__all__): return getattr(found, name)
    everything = import_module(f'{__name__}.all')
    if name=='all': return everything
    if name=='__all__': return everything.__all__
    if name in vars(everything): return vars(everything)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: names that are not for users are imported from their module, "
        f"such as `from {__name__}.masks.selection import put_`")

def _modules():
    "Modules of `fastsparse.all` in their order, and the names that it takes from each"
    import re
    from pathlib import Path
    return re.findall(r'^from \.(\S+) import (\S+)', Path(__file__).with_name('all.py').read_text(encoding='utf-8'), re.M)

def __dir__(): return sorted({*globals(), *(o for o in vars(__getattr__('all')) if not o.startswith('_'))})
