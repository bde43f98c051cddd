"Methods beyond the usual ones, and the parts that only they have"
from . import parts,presets
