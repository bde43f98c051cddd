"Everything that a user writes: a star import gives the names that a guide page shows, and the others are here under their names"
from .masks.selection import *
from .masks.structures import *
from .model.layers import *
from .masks.registry import *
from .masks.distributions import *
from .masks.schedules import *
from .masks.scores import *
from .model.enforcement import *
from .model.init import init_kaiming_normal_sparse_
from .model.sparsify import *
from .model.restore import *
from .train.method import *
from .train.engine import *
from .train.growth import *
from .train.presets import *
from .train.rules import *
from .model.distributed import *
from .kernels.linear import *
from .kernels.convolution import *
from .kernels.live_layers import *
from .deploy.compact import *
from .deploy.shrink import plain_copy,shrink
from .deploy.export import *
from .train.trainers import *
from .prune.finetune import *
from .train.callback import *
from .report.flops import *
from .report.history import *
from .report.pictures import *
from .report.cost import *
from .train.checkpoint import *
from .train.pickles import *
from .train.fit import *
from .train.learned import *
from .prune.magnitude import *
from .prune.layerwise import *
from .prune.saliency import *
from .prune.tickets import *
from .deploy.narrow import compare_with_narrow,narrow_like
from .deploy.search import find_sparsity

_by_name = '''FanIn Interval LearnedMaskCallback MagnitudePlusGradient MeanGradient SampledGradient SoftMEST_presets WaitForSparsity
    animate_masks auto_presets fisher_saliency log_updates mask_penalty methods_table supar_init_ supar_lrs supar_splitter'''.split()
__all__ = [o for o in dir() if not o.startswith('_') and o not in _by_name]
