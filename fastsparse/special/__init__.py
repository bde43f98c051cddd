"Structures, distributions and starting masks for special needs"
from . import distributions,paths,recognition,starts,structures
