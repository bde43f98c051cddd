"Weights whose rows are sharded over processes"
from . import weight
