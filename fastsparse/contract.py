"The names that edges may take from the core"
from .core.registry import call_with,closest_name,get_part,needs_of,parts_of,register_part,wants
from .weights.weight import Dense,register_store
from .weights.guard import weight_of
from .weights.find import masked_params
from .weights.hooks import before_state,enforce_masks
from .core.optimizers import base_opt
from .model.layers import axes_of
from .model.running import batch_of,call_model,evaluating,module_copy,module_of,preserved,same_random_state,unfused
from .model.choose import decide,need_dense,need_masks,need_values,Param
from .model.trained import shows_training
from .model.starting import check_score,draw_seed,need_structure
from .model.buffers import keep_from_broadcast,register_mask
from .model.sparsify import refuse_locked
from .train.method import dense_batches,find_method,Method,method_settings
from .core.checks import need_batch,need_bools,need_choice,need_fraction,need_number,need_package,pip_install
from .core.files import as_path,read_data,reading

__all__ = [o for o in dir() if not o.startswith('_') and o not in ('core','masks','weights','model','train')]
