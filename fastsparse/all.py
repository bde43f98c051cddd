"Everything: `from fastsparse.all import *`"
from .masks import *
from .distributions import *
from .schedules import *
from .scores import *
from .sparsify import *
from .training import *
from .methods import *
from .callback import *
from .flops import *
from .kernels import *
from .compute import *
from .export import *
