"Structures and starting masks for special needs"
from . import starts,structures
