"Structures and starting masks for special needs"
from . import recognition,starts,structures
