"Choosing on devices that the processor runs ahead of"
from . import together,units
