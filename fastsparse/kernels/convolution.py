"""Convolutions that compute with live weights only, on the CPU, forward and backward

From above: where the weights are, tables of images, loops, how a product is cut, calls, `sparse_conv2d`, and which layers have a kernel"""

# A live weight multiplies all pixels of one input channel, shifted by its place in the kernel, and adds the result to one output channel.
# Sixteen images are computed at once: the same pixel of 16 images lies side by side and is one vector. So the inner loop is that of all
# products here, `y += w*x`, and images are copied to a *table* in which it reads one number after the other.
#
# With a stride, an output pixel at row `r` reads the input row `s*r + d*k - p` for stride `s`, dilation `d`, padding `p` and row `k` of the
# kernel. The input is split by the remainder of its row (and column) after division by `s`: such a *part* holds every `s`-th row, and the
# row that is read in it is `r` plus a shift. So kernels know neither stride nor dilation, only parts and shifts. Parts that no row of the
# kernel reaches are left out.
#
# Fixed when a kernel is compiled are the type `F` of numbers, the numbers `L` of a row of a tile, its `TILE_ROWS`, and whether gradients of
# inputs are wanted (`DX`).

import math,numpy as np,torch
from ..masks.selection import live_places
from .linear import call,empty,kinds,split_work
from .ops import dense_weight,need_all_values,need_plain_backward,uncompiled
from .vectors import add,at,axpy,caches,full,kernel,lane_products,load,numbers,put,store,sums16,turn16,vector_bytes,why_not,zero
from torch.autograd import Function
from torch.nn.grad import conv2d_input,conv2d_weight
from torch.nn.modules.conv import _ConvNd
from types import SimpleNamespace

# --- where the weights are

_most = 2**31  # numbers in a table

def _pair(v): return (v,v) if isinstance(v, int) else tuple(v)

class ConvIndex:
    "Where the live weights of a convolution are: outputs, parts of input channels, and shifts"
    def __init__(self,
        mask, # Bool tensor (outputs, inputs, rows, columns)
        stride=1, # One number, or one for rows and one for columns
        padding=0, # As `stride`
        dilation=1, # As `stride`
    ):
        self.shape = tuple(mask.shape)
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        of = list(zip(self.shape[2:], self.dilation, self.padding, self.stride))
        (self.low_h,self.high_h),(self.low_w,self.high_w) = [[(k*d-p)//s for k in (0, n-1)] for n,d,p,s in of]
        rows,cols = [sorted({(k*d-p)%s for k in range(n)}) for n,d,p,s in of]
        self.slots = np.full(self.stride[0]*self.stride[1], -1)  # the number of each part, -1 where no weight reads it
        for i,(a,b) in enumerate((a, b) for a in rows for b in cols): self.slots[a*self.stride[1]+b] = i
        self.n_parts = len(rows)*len(cols)
        self.places = live_places(mask.cpu().reshape(-1))
        o,c,*kernel = np.unravel_index(self.places.numpy(), self.shape)
        at = [k*d-p for k,d,p in zip(kernel, self.dilation, self.padding)]
        (self.shift_h,self.shift_w),rest = [[f(a, s) for a,s in zip(at, self.stride)] for f in (np.floor_divide, np.mod)]
        self.o = o
        self.v = c*self.n_parts+self.slots[rest[0]*self.stride[1]+rest[1]]
        self.forward_order = np.lexsort((self.shift_w, self.shift_h, self.v, self.o))
        self.backward_order = np.lexsort((self.shift_w, self.shift_h, self.o, self.v))
        self.slots = np.concatenate([self.slots, np.repeat(rows, len(cols))]).astype(np.int64)  # and the row that begins each part
        self.lists = {}

    def __len__(self): return len(self.o)

    def out_size(self, h, w):
        "Rows and columns of the result for an input of `h` rows and `w` columns"
        return tuple((n+2*p-d*(k-1)-1)//s+1 for n,k,s,p,d in zip((h,w), self.shape[2:], self.stride, self.padding, self.dilation))

    def takes(self, h, w):
        "Do places in the tables for images of `h` rows and `w` columns fit into 32 bits? If not, the product is left to torch"
        longest = max(self.out_size(h, w)[1], w)+4+self.high_w-self.low_w
        return max(self.shape[1]*self.n_parts, self.shape[0])*(2+self.high_h-self.low_h)*longest*16<_most

    def list_for(self, *cut):
        "`_list` of a cut, made once for each of the last eight cuts"
        if cut not in self.lists:
            if len(self.lists)>=8: del self.lists[next(iter(self.lists))]
            self.lists[cut] = self._list(*cut)
        return self.lists[cut]

    def _list(self, back, cols, strip, block):
        "Where the weights of each block and row start, places in the table, the order of the weights, and the number of blocks"
        n_in = self.shape[1]*self.n_parts
        n_out = self.shape[0]
        if back: rows,inner,n,m,order = self.v,self.o,n_in,n_out,self.backward_order
        else: rows,inner,n,m,order = self.o,self.v,n_out,n_in,self.forward_order
        order = order[(inner[order]//block).argsort(kind='stable')]
        of = (self.shift_h,self.low_h,self.high_h),(self.shift_w,self.low_w,self.high_w)
        up,left = [(high-s if back else s-low)[order] for s,low,high in of]
        wide = cols+self.high_w-self.low_w
        tall = strip+self.high_h-self.low_h
        off = (((inner[order]*tall+up)*wide+left)*16).astype(np.int32)
        n_blocks = max(-(-m//block), 1)
        counts = np.bincount(inner//block*n+rows, minlength=n_blocks*n)
        return np.concatenate([[0], counts.cumsum()]).astype(np.int32),off,order,n_blocks

# --- tables of images: some rows of some channels of 16 images, part by part, row by row, and for each pixel the 16 numbers of the images.
# Borders are zeros. With more padding than a kernel reaches over, the table is narrower than the image: edges of the result see zeros alone.

# Fields of `shape`: the images of a call, and the table that holds 16 of them; FIRST_COL is the image's column in column 0 of the table
IMAGES,CHANNELS,HEIGHT,WIDTH,STRIDE_H,STRIDE_W,PARTS,FIRST_COL,COLS = range(9)

def _shape(n, channels, height, width, stride=(1,1), parts=1, first_col=0, cols=0):
    return np.array([n,channels,height,width,*stride,parts,first_col,cols], np.int64)

# Where a row has a stride or fewer than 16 columns, or there are fewer than 16 images, the pixels of a channel go through scratch memory.
@kernel
def pixels_of(x, tmp, start, ld, n_pixels, images):
    "Pixels of 16 images, `ld` apart, as vectors one after the other"
    u = numbers(F, x)
    w = numbers(F, tmp)
    if images==16 and n_pixels>=16:
        for p in range(0, n_pixels-15, 16): turn16(u, start+p, ld, w, p*16, 16)
        if n_pixels%16>0: turn16(u, start+n_pixels-16, ld, w, (n_pixels-16)*16, 16)
    else:
        for p in range(n_pixels):
            store(w, p*16, zero(16, w))
            for i in range(images): put(w, p*16+i, at(u, start+i*ld+p))

@kernel
def images_of(tmp, y, start, ld, n_pixels, images):
    "The way back"
    w = numbers(F, tmp)
    u = numbers(F, y)
    if images==16 and n_pixels>=16:
        for p in range(0, n_pixels-15, 16): turn16(w, p*16, 16, u, start+p, ld)
        if n_pixels%16>0: turn16(w, (n_pixels-16)*16, 16, u, start+n_pixels-16, ld)
    else:
        for p in range(n_pixels):
            for i in range(images): put(u, start+i*ld+p, at(w, p*16+i))

@kernel
def clear(t, n):
    "Make the first `n` vectors of 16 numbers of `t` zero"
    v = numbers(F, t)
    for i in range(n): store(v, 16*i, zero(16, v))

@kernel
def clear_rows(t, slots, shape, c0, c1, r0, rows):
    "Zeros for the rows of the table that lie outside of the image"
    s = numbers(np.int64, shape)
    m = numbers(np.int64, slots)
    v = numbers(F, t)
    height = at(s, HEIGHT)
    sh = at(s, STRIDE_H)
    sw = at(s, STRIDE_W)
    parts = at(s, PARTS)
    cols = at(s, COLS)
    for k in range((c1-c0)*parts):
        for r in range(rows):
            if r0+r<0 or (r0+r)*sh+at(m, sh*sw+k%parts)>=height:
                for q in range(0, cols*16, 16): store(v, (k*rows+r)*cols*16+q, zero(16, v))

@kernel
def spread(tmp, t, slots, shape, base, first, n_pixels, r0, rows):
    "Vectors of a channel's pixels, from row `first` on, to their places in the table"
    s = numbers(np.int64, shape)
    m = numbers(np.int64, slots)
    v = numbers(F, t)
    w = numbers(F, tmp)
    width = at(s, WIDTH)
    sh = at(s, STRIDE_H)
    sw = at(s, STRIDE_W)
    first_col = at(s, FIRST_COL)
    cols = at(s, COLS)
    row,col = first,0
    for p in range(n_pixels):
        k = at(m, row%sh*sw+col%sw)
        c = col//sw-first_col
        if k>=0 and c>=0 and c<cols: store(v, ((base+k)*rows+row//sh-r0)*cols*16+c*16, load(16, w, p*16))
        col += 1
        if col==width:
            col = 0
            row += 1

@kernel
def tile_images(x, t, tmp, slots, shape, n0, c0, c1, r0, rows):
    "Rows `r0` on of each part of channels `c0` to `c1`, of the images from `n0` on, as a table"
    s = numbers(np.int64, shape)
    u = numbers(F, x)
    v = numbers(F, t)
    channels = at(s, CHANNELS)
    height = at(s, HEIGHT)
    width = at(s, WIDTH)
    parts = at(s, PARTS)
    first_col = at(s, FIRST_COL)
    cols = at(s, COLS)
    sh = at(s, STRIDE_H)
    sw = at(s, STRIDE_W)
    images = min(16, at(s, IMAGES)-n0)
    first = max(r0, 0)*sh
    last = min((r0+rows)*sh, height)
    left = max(first_col, 0)  # without a stride: the columns of the image that have one in the table
    right = min(first_col+cols, width)
    clear_rows(t, slots, shape, c0, c1, r0, rows)
    for c in range(c0, c1):
        start = (n0*channels+c)*height*width
        ld = channels*height*width
        if sh==1 and sw==1 and images==16 and right-left>=16:
            for h in range(first, last):
                d = ((c-c0)*rows+h-r0)*cols*16-first_col*16
                for p in range(left, right-15, 16): turn16(u, start+h*width+p, ld, v, d+p*16, 16)
                if (right-left)%16>0: turn16(u, start+h*width+right-16, ld, v, d+(right-16)*16, 16)
        elif last>first:
            pixels_of(x, tmp, start+first*width, ld, (last-first)*width, images)
            spread(tmp, t, slots, shape, (c-c0)*parts, first, (last-first)*width, r0, rows)

@kernel
def gather(t, tmp, slots, shape, base, first, n_pixels, r0, rows):
    "Vectors of a channel's pixels from their places in the table; zero where no weight reaches"
    s = numbers(np.int64, shape)
    m = numbers(np.int64, slots)
    v = numbers(F, t)
    w = numbers(F, tmp)
    width = at(s, WIDTH)
    sh = at(s, STRIDE_H)
    sw = at(s, STRIDE_W)
    cols = at(s, COLS)
    row,col = first,0
    for p in range(n_pixels):
        k = at(m, row%sh*sw+col%sw)
        c = col//sw
        if k>=0 and c<cols: store(w, p*16, load(16, v, ((base+k)*rows+row//sh-r0)*cols*16+c*16))
        else: store(w, p*16, zero(16, w))
        col += 1
        if col==width:
            col = 0
            row += 1

@kernel
def untile_images(t, y, tmp, slots, shape, n0, c0, c1, r0, rows):
    "The table of channels `c0` to `c1`, without borders, back to images"
    s = numbers(np.int64, shape)
    u = numbers(F, y)
    v = numbers(F, t)
    channels = at(s, CHANNELS)
    height = at(s, HEIGHT)
    width = at(s, WIDTH)
    parts = at(s, PARTS)
    cols = at(s, COLS)
    sh = at(s, STRIDE_H)
    sw = at(s, STRIDE_W)
    images = min(16, at(s, IMAGES)-n0)
    first = r0*sh
    last = min((r0+rows)*sh, height)
    for c in range(c0, c1):
        start = (n0*channels+c)*height*width
        ld = channels*height*width
        if sh==1 and sw==1 and images==16 and width>=16:
            for h in range(first, last):
                d = ((c-c0)*rows+h-r0)*cols*16
                for p in range(0, width-15, 16): turn16(v, d+p*16, 16, u, start+h*width+p, ld)
                if width%16>0: turn16(v, d+(width-16)*16, 16, u, start+h*width+width-16, ld)
        elif last>first:
            gather(t, tmp, slots, shape, (c-c0)*parts, first, (last-first)*width, r0, rows)
            images_of(tmp, y, start+first*width, ld, (last-first)*width, images)

# --- forward: a tile is a few pixels of one or two rows. For each output channel, the sums of a tile stay in registers while the loop goes
# through the channel's live weights: a number, and the place in the table where its shifted pixels begin. Long lists are cut into blocks.

@kernel
def one_tile(ptr, off, val, bias, xt, yt, k, n_out, o, w, x0, y0, x_row, y_row, y_size):
    """Sums of one tile for outputs `o` to `o+w`, from block `k` of their weights

    `ptr`, `off`, `val`: where weights start, their places in the table, their values; `xt`, `yt`: tables of inputs and sums.
    The tile begins at `x0` and `y0`; its rows are `x_row` and `y_row` apart, outputs `y_size`."""
    starts = numbers(np.int32, ptr)
    places = numbers(np.int32, off)
    values = numbers(F, val)
    b = numbers(F, bias)
    x = numbers(F, xt)
    y = numbers(F, yt)
    for i in range(w):
        j = at(starts, k*n_out+o+i)
        e = at(starts, k*n_out+o+i+1)
        d = y0+i*y_size
        if k>0 and j==e: continue
        if k==0:
            s0 = full(L, at(b, o+i))
            s1 = s0
        else:
            s0 = load(L, y, d)
            if TILE_ROWS>1: s1 = load(L, y, d+y_row)
            else: s1 = s0
        for q in range(j, e):
            p = x0+at(places, q)
            v = at(values, q)
            s0 = axpy(v, load(L, x, p), s0)
            if TILE_ROWS>1: s1 = axpy(v, load(L, x, p+x_row), s1)
        store(y, d, s0)
        if TILE_ROWS>1: store(y, d+y_row, s1)

@kernel
def conv_forward(ptr, off, val, bias, x, y, slots, one, x_shape, y_shape, g0, g1, n_blocks, n_rows, strip, low, rows, xt, yt, tmp):
    """Groups `g0` to `g1` of 16 images: `strip` rows of results at a time, `n_rows` output channels at a time

    `ptr`, `off`, `val`: the list of weights, in `n_blocks` blocks; `slots`, `one`: numbers of the parts of inputs and of results.
    A strip of results from row `r0` on reads `rows` rows of each part, from `r0+low` on.
    Scratch memory: `xt`, `yt` tables of inputs and results, `tmp` the pixels of a channel."""
    sx = numbers(np.int64, x_shape)
    sy = numbers(np.int64, y_shape)
    channels = at(sx, CHANNELS)
    x_cols = at(sx, COLS)
    n_out = at(sy, CHANNELS)
    height = at(sy, HEIGHT)
    y_cols = at(sy, COLS)
    clear(xt, channels*at(sx, PARTS)*rows*x_cols)
    for g in range(g0, g1):
        for r0 in range(0, height, strip):
            tile_images(x, xt, tmp, slots, x_shape, g*16, 0, channels, r0+low, rows)
            for o in range(0, n_out, n_rows):
                w = min(n_rows, n_out-o)
                for r in range(0, min(strip, height-r0), TILE_ROWS):
                    for c in range(0, y_cols, L//16):
                        for k in range(n_blocks):
                            one_tile(ptr, off, val, bias, xt, yt, k, n_out, o, w, (r*x_cols+c)*16, (r*y_cols+c)*16, x_cols*16, y_cols*16,
                                strip*y_cols*16)
                untile_images(yt, y, tmp, one, y_shape, g*16, o, o+w, r0, strip)

# --- backward: the gradient of the input is the same loop, with lists by input channel and shifts the other way. A weight's gradient is the
# product of the same two vectors, so one pass makes both, and adds up sixteen products together, in the order of the list.

@kernel
def one_back(ptr, off, vt, gt, xt, dxt, dt, buf, k, n_in, o, w, g0, y0, g_row, y_row, y_size):
    """Gradients of one tile for inputs `o` to `o+w`, from block `k` of their weights

    `ptr`, `off`, `vt`: where weights start, their places in the table, their values; `dt`: gradients of weights; `buf`: 16 rows of sums.
    `gt`, `xt`, `dxt`: tables of the results' gradients, of inputs and of their gradients; places and distances as in `one_tile`."""
    starts = numbers(np.int32, ptr)
    places = numbers(np.int32, off)
    values = numbers(F, vt)
    g = numbers(F, gt)
    x = numbers(F, xt)
    dx = numbers(F, dxt)
    dw = numbers(F, dt)
    b = numbers(F, buf)
    clear_sums(b, 0, at(starts, k*n_in+o)&15)
    for i in range(w):
        j = at(starts, k*n_in+o+i)
        e = at(starts, k*n_in+o+i+1)
        d = y0+i*y_size
        if k>0 and j==e: continue
        s0 = zero(L, g)
        s1 = s0
        if k>0:
            s0 = load(L, dx, d)
            if TILE_ROWS>1: s1 = load(L, dx, d+y_row)
        x0 = load(L, x, d)
        x1 = load(L, x, d+y_row*(TILE_ROWS-1))
        for q in range(j, e):
            p = g0+at(places, q)
            v = at(values, q)
            a = load(L, g, p)
            if DX: s0 = axpy(v, a, s0)
            if TILE_ROWS>1:
                c = load(L, g, p+g_row)
                if DX: s1 = axpy(v, c, s1)
                store(b, 16*(q&15), add(lane_products(x0, a), lane_products(x1, c)))
            else: store(b, 16*(q&15), lane_products(x0, a))
            if q&15==15: store(dw, q-15, add(sums16(b, 0), load(16, dw, q-15)))
        if DX:
            store(dx, d, s0)
            if TILE_ROWS>1: store(dx, d+y_row, s1)
    last_sums(b, dw, at(starts, k*n_in+o+w))

# Where a range of channels begins or ends within sixteen weights, the sums of the others are zero.
@kernel
def clear_sums(b, i, e):
    "Make rows `i` to `e` of 16 sums zero"
    for q in range(i, e): store(b, 16*q, zero(16, b))

@kernel
def last_sums(b, dw, e):
    "Add up the sums of the weights before `e` that are no whole sixteen"
    if e&15>0:
        clear_sums(b, e&15, 16)
        store(dw, e-(e&15), add(sums16(b, 0), load(16, dw, e-(e&15))))

@kernel
def conv_backward(ptr, off, order, vt, gr, x, dx, dw, slots, one, g_shape, x_shape, a, b, n_blocks, n_channels, strip, low, rows,
    gt, xt, dxt, dt, buf, tmp):
    """Channels `a` to `b` of the input, `n_channels` at a time, for all images

    `ptr`, `off`, `order`, `vt`: the list of weights, in `n_blocks` blocks, their places among the values, and values in the list's order.
    `gr`, `x`: gradients of results, and inputs; `dx`, `dw`: gradients of inputs and of values, which are written.
    `slots`, `one`: numbers of the parts of inputs and of results; `strip`, `low`, `rows` as in `conv_forward`.
    Scratch memory: tables `gt`, `xt`, `dxt`, gradients of weights `dt`, 16 rows of sums `buf`, and the pixels of a channel `tmp`."""
    sg = numbers(np.int64, g_shape)
    sx = numbers(np.int64, x_shape)
    starts = numbers(np.int32, ptr)
    n = at(sx, IMAGES)
    channels = at(sx, CHANNELS)
    parts = at(sx, PARTS)
    cols = at(sx, COLS)
    sh = at(sx, STRIDE_H)
    n_out = at(sg, CHANNELS)
    g_cols = at(sg, COLS)
    height = (at(sx, HEIGHT)+sh-1)//sh
    clear(gt, n_out*rows*g_cols)
    clear(xt, n_channels*parts*strip*cols)
    clear(dt, (at(starts, n_blocks*channels*parts)+31)//16)
    for g in range((n+15)//16):
        for r0 in range(0, height, strip):
            tile_images(gr, gt, tmp, one, g_shape, g*16, 0, n_out, r0+low, rows)
            for c in range(a, b, n_channels):
                e = min(c+n_channels, b)
                tile_images(x, xt, tmp, slots, x_shape, g*16, c, e, r0, strip)
                for r in range(0, min(strip, height-r0), TILE_ROWS):
                    for q in range(0, cols, L//16):
                        for k in range(n_blocks):
                            one_back(ptr, off, vt, gt, xt, dxt, dt, buf, k, channels*parts, c*parts, (e-c)*parts,
                                (r*g_cols+q)*16, (r*cols+q)*16, g_cols*16, cols*16, strip*cols*16)
                if DX: untile_images(dxt, dx, tmp, slots, x_shape, g*16, c, e, r0, strip)
    for k in range(n_blocks):
        for q in range(at(starts, (k*channels+a)*parts), at(starts, (k*channels+b)*parts)):
            put(numbers(F, dw), at(numbers(np.int64, order), q), at(numbers(F, dt), q))

# --- how a product is cut: the sums of a tile take half of the registers. What a tile reads of a block of channels fills the first cache,
# and half as much again where fewer than a seventh of the weights live, so that each output has some in a block. A table of up to three
# times the second cache holds whole images; larger ones are cut to strips of half of that, whose edge rows are copied twice.

def tile_sizes(
    index:ConvIndex, # Where the live weights are
    size:tuple, # Rows and columns of the table's images: of the results, forward; of the input's parts, backward
    channels:int, # Channels of the table that all weights read
    itemsize:int=4, # Bytes of a number
) -> dict: # Pixels and rows of a tile, columns, channels of a block, outputs at a time, rows of a strip
    "The sizes of the pieces in which one convolution is computed"
    height,width = size
    px = min(range(1, 5 if vector_bytes()==64 else 3), key=lambda p: -(-width//p)*p*(1+.5/p))
    cols = -(-width//px)*px
    tile_rows = 2 if height>1 else 1
    halo_h = index.high_h-index.low_h
    halo_w = index.high_w-index.low_w
    near,far = caches()
    row = max(channels*(cols+halo_w)*16*itemsize, 1)
    whole = height+height%tile_rows
    fits = whole if (whole+halo_h)*row<=3*far else 3*far//2//row-halo_h
    strip = max(tile_rows, fits//tile_rows*tile_rows)
    near = near if 7*len(index)>math.prod(index.shape) else 3*near//2
    block = max(16, near//((px+halo_w)*(tile_rows+halo_h)*16*itemsize))
    return dict(px=px, tile_rows=tile_rows, cols=cols, block=min(block, channels), group=64, strip=strip)

# --- calls: threads split groups of images forward and channels of the input backward, so no sum depends on their number

_one_part = np.array([0,0], np.int64)  # the slots of a table without stride

def _forward(index, values, x, bias):
    "The convolution of `x`, contiguous, with live weights"
    (n,c,h,w) = x.shape
    n_out = index.shape[0]
    size = x.element_size()
    ho,wo = index.out_size(h, w)
    cut = tile_sizes(index, (ho,wo), c*index.n_parts, size)
    cols = cut['cols']
    strip = cut['strip']
    group = cut['group']
    ptr,off,order,n_blocks = index.list_for(False, cols, strip, cut['block'])
    wide = cols+index.high_w-index.low_w
    tall = strip+index.high_h-index.low_h
    y = empty((n,n_out,ho,wo), x.dtype)
    vals = values.detach()[torch.from_numpy(order)]
    b = x.new_zeros(n_out) if bias is None else bias.detach().to(x.dtype).expand(n_out).contiguous()
    xs = _shape(n, c, h, w, index.stride, index.n_parts, index.low_w, wide)
    ys = _shape(n, n_out, ho, wo, cols=cols)
    f = conv_forward.compiled(F=kinds[x.dtype], L=16*cut['px'], TILE_ROWS=cut['tile_rows'])
    scratch = [16*size*k for k in (c*index.n_parts*tall*wide, group*strip*cols, max(h*w, ho*wo))]
    def part(g0, g1):
        call(f, ptr, off, vals, b, x, y, index.slots, _one_part, xs, ys, g0, g1, n_blocks, group, strip, index.low_h, tall, scratch=scratch)
    if n: split_work(part, -(-n//16), 1, len(index)*y[:,0].numel())
    return y

def _backward(index, values, x, g, of_x):
    "Gradients of `x` (None if not `of_x`) and of the values, both contiguous"
    (n,c,h,w) = x.shape
    (ho,wo) = g.shape[2:]
    n_out = index.shape[0]
    parts = index.n_parts
    size = x.element_size()
    cut = tile_sizes(index, [-(-k//s) for k,s in zip((h,w), index.stride)], n_out, size)
    cols = cut['cols']
    strip = cut['strip']
    many = max(cut['group']//parts, 1)
    ptr,off,order,n_blocks = index.list_for(True, cols, strip, cut['block'])
    wide = cols+index.high_w-index.low_w
    tall = strip+index.high_h-index.low_h
    dx = empty(x.shape, x.dtype) if of_x else None
    dw = empty(values.shape, x.dtype)
    vals = values.detach()[torch.from_numpy(order)]
    gs = _shape(n, n_out, ho, wo, first_col=-index.high_w, cols=wide)
    xs = _shape(n, c, h, w, index.stride, parts, 0, cols)
    f = conv_backward.compiled(F=kinds[x.dtype], L=16*cut['px'], TILE_ROWS=cut['tile_rows'], DX=of_x)
    block = many*parts*strip*cols
    scratch = [16*size*k for k in (n_out*tall*wide, block, block, (len(order)+31)//16, 16, max(h*w, ho*wo))]
    def part(a, b):
        call(f, ptr, off, order, vals, g, x, dx, dw, index.slots, _one_part, gs, xs, a, b, n_blocks, many, strip, -index.high_h, tall,
            scratch=scratch)
    if n: split_work(part, c, 1, len(index)*g[:,0].numel())
    else: dw.zero_()
    return dx,dw

class _Conv(Function):
    @staticmethod
    def forward(ctx, x, values, bias, index, grad_hook):
        ctx.save_for_backward(values, x)
        ctx.index,ctx.grad_hook = index,grad_hook
        return _forward(index, values, x, bias)

    @staticmethod
    @uncompiled
    def backward(ctx, g):
        need_plain_backward(g)
        (values,x),g = ctx.saved_tensors,g.contiguous()
        o = ctx.index
        (of_x,of_values,of_bias) = ctx.needs_input_grad[:3]
        dx = None
        dw = None
        geometry = o.stride,o.padding,o.dilation
        def dense_grad(): return conv2d_weight(x, o.shape, g, *geometry)
        if ctx.grad_hook is not None and of_values: ctx.grad_hook(dense_grad().detach())
        if torch.is_grad_enabled():
            if of_x: dx = conv2d_input(x.shape, dense_weight(values, o.shape, o.places, ctx.grad_hook), g, *geometry)
            if of_values: dw = dense_grad().reshape(-1).index_select(0, o.places)
        elif of_x or of_values: dx,dw = _backward(o, values, x, g, of_x)
        return dx,dw,g.sum((0,2,3)) if of_bias else None,None,None

def sparse_conv2d(
    x, # Images (batch, channels, rows, columns), float32 or float64, on the CPU
    values, # The live weights, in row-major order of the mask
    index:ConvIndex, # Where they are
    bias=None, # One number an output channel
    grad_hook=None, # Called in the backward with the dense gradient of the weight, if given
): # Images (batch, outputs, rows, columns)
    "A convolution with live weights only, for one group of channels"
    need_all_values(values, index)
    if x.ndim!=4 or x.shape[1]!=index.shape[1]:
        raise ValueError(f"the input has shape {tuple(x.shape)}, and must be (batch, {index.shape[1]}, rows, columns)")
    if x.dtype!=values.dtype or x.dtype not in (torch.float,torch.double):
        raise ValueError(f"the input is of type {x.dtype} and the weight of {values.dtype}, and both must be float32 or both float64")
    if min(index.out_size(*x.shape[2:]))<1:
        raise ValueError(f"the input has {x.shape[2]} rows and {x.shape[3]} columns, less than the kernel {index.shape[2:]} needs: pad more")
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    y = _Conv.apply(x.contiguous(), values, bias, index, grad_hook)
    return y.contiguous(memory_format=torch.channels_last) if last else y

# --- which layers have a kernel: convolutions of one or two dimensions that pad with zeros, by the same number on both sides. Groups stay
# dense: a layer of 64 groups has 64 small products, none of which is worth its table.

def is_pointwise(m): # A module, or a namespace of what a convolution is called with
    "Is this a convolution with kernels of one pixel, which is a linear layer for each pixel?"
    if not isinstance(m, (_ConvNd,SimpleNamespace)) or m.transposed or m.padding_mode!='zeros' or m.groups>1: return False
    return max(m.kernel_size)==1 and all(o==0 for o in ([] if m.padding=='valid' else m.padding))

def padding_of(m):
    "What a convolution puts on each side; nothing if both sides aren't the same"
    if m.padding=='valid': return (0,)*len(m.kernel_size)
    if m.padding!='same': return m.padding
    both = [d*(k-1) for d,k in zip(m.dilation, m.kernel_size)]
    return None if any(o%2 for o in both) else tuple(o//2 for o in both)

def why_no_kernel(m):
    "Why a convolution has no kernel; empty if it has one"
    if m.groups>1: return 'depthwise' if m.groups==m.in_channels else 'has groups'
    if m.padding_mode!='zeros': return f'padding_mode is {m.padding_mode}'
    if len(m.kernel_size)>2: return 'has three dimensions'
    if padding_of(m) is None: return 'pads one side more than the other'
    return why_not()

def fits_kernel(v): return v.device.type=='cpu' and v.dtype in (torch.float,torch.double)
