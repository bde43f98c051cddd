"""Sparse training for fastai and PyTorch, from one small set of parts

Call `learn.fine_tune_sparse(4, .8)` instead of fastai's `learn.fine_tune(4)`, for pictures, text and tables, and `learn.fit_sparse(10, .95)` instead of `learn.fit_one_cycle(10)`. A plain loop uses `sparsify_model` and `DynamicSparseTraining`.

- **You have a trained network and want a smaller or faster one.** [Compare the ways](howto/smaller_faster.ipynb). At 95 % sparsity, `save_sparse` writes a tenth of the dense file. Inference with live weights only, on one CPU core, is 2.6 times as fast as the dense one (a transformer on a Xeon) to 6.3 times (a feed-forward network on an EPYC). [Fine-tune and prune](tutorials/pictures.ipynb), [prune with a few batches of data](tutorials/fine_tuning.ipynb), [cut whole channels](howto/channels.ipynb), [merge a LoRA adapter without filling zeros](howto/stay_sparse.ipynb).
- **You train wide layers on a CPU.** With fastai's Adam and the callback, a whole fit of an MLP of 1.9 million weights is 1.4 to 2.7 times as fast as the dense fit at 90 % sparsity and 1.8 to 3.3 times at 95 %; with `fit_sparse` 1.2 to 2.1 times at 90 %. The lower figures are of a Zen 3 core, which has AVX2 alone, the higher ones of a Zen 5 core. [Where it pays](howto/faster.ipynb), and [what was measured](measured.ipynb).
- **Memory is short.** [A billion weights](howto/billion.ipynb) train on one core in 2 GB at 99 % sparsity.
- **You want to know what a network does.** With few weights, its [wiring](tutorials/circuits.ipynb) can be read.
- **You study sparse training.** Every method is a combination of the same parts, exact and resumable, and is compared with [well-tuned baselines](leaderboard.ipynb).

For accuracy per second of training, a narrow dense network is often [just as good](howto/sparse_or_narrow.ipynb)."""

__version__ = "0.3.0"
# what registers parts, imported when the first is looked up: those of the core, then edges
edges = 'train.presets','train.growth','methods','live','shards','card','special'

from typing import TYPE_CHECKING
if TYPE_CHECKING: from .all import *  # what type checkers and editors read

def __getattr__(name):
    "What `fastsparse.all` has under `name`, or the module of that name, looked up late: a plain PyTorch loop loads no fastai"
    from importlib import import_module
    from importlib.util import find_spec
    if name.startswith('__') and name!='__all__': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f'{__name__}.{name}'): return import_module(f'{__name__}.{name}')
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
