"Live weights: tensors of the dense shape that store their live values, and compute with them"
from . import born,products,projection,run,values
