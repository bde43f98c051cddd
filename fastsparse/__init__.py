__version__ = "0.2.0"
edges = 'live','shards','card','special'  # what the core imports by itself, when the first part is looked up

from typing import TYPE_CHECKING
if TYPE_CHECKING: from .all import *  # what type checkers and editors read

def __getattr__(name):
    "What `fastsparse.all` has under `name`, or the module of that name, looked up late: a plain PyTorch loop loads no fastai"
    from importlib import import_module
    from importlib.util import find_spec
    if name.startswith('__') and name!='__all__': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f'{__name__}.{name}'): return import_module(f'{__name__}.{name}')
    import_module(f'{__name__}.train.presets')  # brings every part that a text may name
    room = _rooms().get(name)
    if room: return getattr(import_module(f'{__name__}.{room}'), name)
    everything = import_module(f'{__name__}.all')
    if name in vars(everything): return vars(everything)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: names that are not for users are imported from their module, "
        f"such as `from {__name__}.masks.selection import put_`")

def _rooms():
    "The module of each name in `fastsparse.all`, read from its imports, without making them"
    import ast
    from pathlib import Path
    imports = ast.parse(Path(__file__).with_name('all.py').read_text(encoding='utf-8')).body
    return {o.name:n.module for n in imports if isinstance(n, ast.ImportFrom) for o in n.names}

def __dir__(): return sorted({*globals(), *(o for o in vars(__getattr__('all')) if not o.startswith('_'))})
