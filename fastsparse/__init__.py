__version__ = "0.2.0"

from typing import TYPE_CHECKING
if TYPE_CHECKING: from .all import *  # what type checkers and editors read

def __getattr__(name):
    "What `fastsparse.all` has under `name`, or the module of that name, looked up when it is asked for: a plain PyTorch loop loads no fastai"
    from importlib import import_module
    from importlib.util import find_spec
    if name.startswith('__') and name!='__all__': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name!='all' and find_spec(f'{__name__}.{name}'): return import_module(f'{__name__}.{name}')
    everything = import_module(f'{__name__}.all')
    if name=='all': return everything
    if name=='__all__': return [o for o in vars(everything) if not o.startswith('_')]
    if name in vars(everything): return vars(everything)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: names that are not for users are imported from their module, such as `from {__name__}.masks.selection import put_`")

def __dir__(): return sorted({*globals(), *__getattr__('__all__')})
