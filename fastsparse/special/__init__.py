"Structures and starting masks for special needs"
from . import paths,recognition,starts,structures
