"Everything that a user writes: a star import gives the names that a guide page shows, and the others are here under their names"
from .core.registry import declares
from .masks.selection import sparse_mask,sparse_mask_like,mask_from_tensor,sparsity_from_tensor,maybe_float,top_k_mask
from .masks.schedules import Interval,Schedule,CubicSchedule,FreqSchedule
from .masks.structures import NM,FanIn,Block,as_structure
from .masks.scores import random_score,weight_magnitude,gradient_magnitude,gradient_momentum,gradient_saliency,MagnitudePlusGradient
from .masks.scores import MeanGradient,fisher_saliency,SampledGradient,momentum_redistribution,gradient_redistribution
from .masks.distributions import uniform_sparsity,first_layer_dense_uniform,erdos_renyi_sparsity,layers_dense,global_sparsity
from .masks.distributions import balanced_flops_sparsity,given_sparsity
from .weights.find import sparse_params,apply_masks
from .model.layers import register_layer
from .model.init import init_kaiming_normal_sparse_
from .model.sparsify import is_sparseable_module,sparseable_modules,sparsify_model,sparse_summary,unsparsify,sparsify_parameter
from .model.live_layers import sparse_compute
from .train.method import register_method
from .train.engine import SparseEngine,DynamicSparseTraining
from .train.growth import supar_init_,supar_splitter,supar_lrs
from .train.presets import Static_presets,SET_presets,SNFS_presets,RigL_presets,ITOP_presets,GSE_presets,GMP_presets,GraNet_presets
from .train.presets import MEST_presets,SoftMEST_presets,SRigL_presets,ACDC_presets,DSD_presets,CHT_presets,methods_table
from .train.rules import configure,rules_table
from .save.restore import restore_sparse,pack_masks,unpack_masks
from .deploy.compact import pack
from .deploy.shrink import plain_copy,shrink
from .deploy.export import save_sparse,load_sparse,export_sparse
from .train.trainers import SparseTrainerCallback,SparseLightningCallback,log_updates
from .prune.finetune import keep_zeros,merge_sparse,save_delta,load_delta
from .train.callback import DynamicSparseTrainingCallback,WaitForSparsity
from .train.fit import auto_presets
from .train.learned import supermask_presets,STE_presets,SRSTE_presets,TopKAST_presets,Sparsify,learn_masks,fold_masks,mask_penalty
from .train.learned import LearnedMaskCallback
from .save.checkpoint import save_run,load_run,SparseCheckpoint
from .report.flops import flop_profile,count_flops,FlopsCounter
from .report.history import SparseHistory
from .report.cost import predict_cost,Ledger
from .report.pictures import plot_topology,animate_masks
from .prune.magnitude import prune_magnitude
from .prune.layerwise import prune_wanda,prune_sparsegpt
from .prune.saliency import prune_snip,prune_grasp,prune_synflow
from .prune.tickets import prune_to,find_ticket
from .deploy.narrow import compare_with_narrow,narrow_like
from .deploy.search import find_sparsity

_by_name = '''FanIn Interval LearnedMaskCallback MagnitudePlusGradient MeanGradient SampledGradient SoftMEST_presets WaitForSparsity
    animate_masks auto_presets fisher_saliency log_updates mask_penalty methods_table supar_init_ supar_lrs supar_splitter'''.split()
__all__ = [o for o in dir() if not o.startswith('_') and o not in _by_name]
