"Guard words around each array that compiled kernels write, checked after each call; they and unset memory are NaN, so reading them shows in the result"
import math,numpy as np,torch
from fastsparse.kernels import linear

gap,guard,unset = 1024,-23131,-1  # words of 4 bytes; as bits NaNs of float32, and two of them are one of float64

class Fence:
    "Guard words in `words`, a piece of memory, around its `arrays`, which are slices"
    def __init__(self, words, arrays):
        self.words,self.arrays = words,arrays
        words[:] = guard
        for a in arrays: words[a] = unset

    def is_whole(self):
        ends = [0, *[e for a in self.arrays for e in (a.start,a.stop)], len(self.words)]
        return all((self.words[i:j]==guard).all() for i,j in zip(ends[::2], ends[1::2]))

class Guarded(linear.Scratch):
    fence = None
    def __call__(self, *sizes):
        starts = super().__call__(4*gap, *[n for size in sizes for n in (size,4*gap)])
        words = self.piece[:starts[-1]-self.start+4*gap].view(np.int32)
        self.fence = Fence(words, [slice((i-self.start)//4, (i-self.start+n)//4) for i,n in zip(starts[1::2], sizes)])
        return starts[1::2]

def empty(shape, dtype):
    n = math.prod(shape)*dtype.itemsize//4
    fence = Fence(np.empty(n+2*gap, np.int32), [slice(gap, gap+n)])
    words = fence.words[gap:gap+n].view(torch.empty(0, dtype=dtype).numpy().dtype)
    t = torch.from_numpy(words.reshape(shape))  # a view in torch could not be written in place
    t.fence = fence
    return t

_call = linear.call

def call(f, *args, scratch=()):
    _call(f, *args, scratch=scratch)
    fences = [getattr(linear._scratch, 'fence', None) if scratch else None, *[getattr(a, 'fence', None) for a in args]]
    if not all(o is None or o.is_whole() for o in fences): raise RuntimeError(f"{f.__name__} wrote outside of the arrays that it was given")

def watch():
    "Before other modules import these by name"
    linear.call,linear.empty,linear._scratch = call,empty,Guarded()
