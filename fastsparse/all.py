"Everything: `from fastsparse.all import *`"
from .masks import *
from .structures import *
from .distributions import *
from .schedules import *
from .scores import *
from .sparsify import *
from .parts import *
from .training import *
from .methods import *
from .callback import *
from .flops import *
from .rules import *
from .kernels import *
from .compute import *
from .packing import *
from .shrinking import *
from .export import *
