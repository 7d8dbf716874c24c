"""A KV cache as a kernel sees it: which rows are a sequence's keys, where tile i of them lies, what its bytes are worth.

Where a tile lies is asked one tile ahead: the fold over a cache (device.fold_cache) carries NEXT's answer from one tile to the
next, so that the load of a page number is under way while the tile before it is folded.

NEXT(i, source, BLOCK_N) -> what LOCATE of tile i needs from memory, 0 for nothing
LOCATE(i, ahead, source, BLOCK_N) -> rows, cols, live, as in device.source; rows = (outer, inner): offsets are
    outer * outer stride + inner * inner stride, outer a scalar int64 or [N] int64, inner [N] int32
"""

import triton
import triton.language as tl

from .fault import existing
from .grid import rows_of_sequence
from .source import load_lanes
from .tile import widen

# How the elements of K and V are stored: what QUANT says.
PLAIN = tl.constexpr(0)  # in the dtype of q
E4M3 = tl.constexpr(1)  # float8_e4m3fn, converted by the instruction (sm_89 and newer)
INT8 = tl.constexpr(2)  # int8, converted by bytes put into halves of 1024 + x (sm_80 and newer)
E4M3_BITS = tl.constexpr(3)  # float8_e4m3fn as bytes, converted by arithmetic (everywhere)
INT8_CAST = tl.constexpr(4)  # int8, converted by the compiler (everywhere)


@triton.jit
def keys_of_sequence(CuK, Lengths, Pads, i_b, capacity, more, PAGE: tl.constexpr):
    """-> first row (int64) and number of a sequence's keys.  They end at Lengths[b] + more, or where CuK or `capacity` say; the
    first Pads[b] of them are none.  Nobody checked the values on the host, so what is past the sequence's room is not read."""
    first, room = rows_of_sequence(CuK, i_b, capacity)
    length = room
    if PAGE > 0:
        room = capacity
    if Lengths is not None:
        length = tl.load(Lengths + i_b).to(tl.int32) + more
    length = tl.maximum(tl.minimum(length, room), 0)
    if Pads is not None:
        pad = tl.maximum(tl.load(Pads + i_b).to(tl.int32), 0)
        first += pad
        length -= pad
    return first, tl.maximum(length, 0)


@triton.jit
def next_none(i, source, BLOCK_N: tl.constexpr):
    """A contiguous sequence: nothing is to be loaded."""
    return 0


@triton.jit
def locate_run(i, ahead, source, BLOCK_N: tl.constexpr):
    """Tile i of one contiguous sequence, source = (length,): both strides are the row's, the outer one of the tile's first
    row."""
    start = i * BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    return (tl.cast(start, tl.int64), o_n), start + o_n, start + o_n < source[0]


@triton.jit
def next_page(i, source, BLOCK_N: tl.constexpr):
    """The page of tile i, source = (length, table, 0, PAGE, pages), PAGE a multiple of N; past the end the table says nothing.
    pages: how many there are, None where the table is trusted; instead of others page 0 is read."""
    PAGE: tl.constexpr = source[3]
    start = i * BLOCK_N
    return existing(tl.load(source[1] + start // PAGE, mask=start < source[0], other=0), source[4])


@triton.jit
def locate_in_page(i, ahead, source, BLOCK_N: tl.constexpr):
    """Tile i in one page: the rows after its first in that page."""
    PAGE: tl.constexpr = source[3]
    start = i * BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    return (ahead.to(tl.int64), start % PAGE + o_n), start + o_n, start + o_n < source[0]


@triton.jit
def next_pages(i, source, BLOCK_N: tl.constexpr):
    """The page of each key of tile i, of pages of any size, the first source[2] rows of which are no keys: [N]."""
    PAGE: tl.constexpr = source[3]
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    return existing(tl.load(source[1] + (cols + source[2]) // PAGE, mask=cols < source[0], other=0), source[4])


@triton.jit
def locate_in_pages(i, ahead, source, BLOCK_N: tl.constexpr):
    """Tile i over pages of any size."""
    PAGE: tl.constexpr = source[3]
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    return (ahead.to(tl.int64), (cols + source[2]) % PAGE), cols, cols < source[0]


@triton.jit
def fetch_cache(side, rows, live, like, EDGE: tl.constexpr, EMULATE: tl.constexpr, QUANT: tl.constexpr, DIM: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    """[N, BLOCK_D] in the dtype of `like`, side = (base, outer stride, inner stride, scales or None, their stride): scales fp32
    are one a page, by which its elements are multiplied."""
    base, stride_outer, stride_inner, scales, stride_scale = side
    outer, inner = rows
    x = load_lanes(base, outer * stride_outer + inner * stride_inner, live, EDGE, False, DIM, BLOCK_D)
    if QUANT == PLAIN:
        x = widen(x, EMULATE)
    else:
        x = dequantise(x, like, QUANT)
        if scales is not None:
            x = (x.to(tl.float32) * load_factor(scales, outer, stride_scale, live, EDGE)).to(like.dtype)
    return x


@triton.jit
def load_factor(scales, outer, stride_scale, live, EDGE: tl.constexpr):
    """What a tile is to be multiplied with: of its page, or [N, 1] of the pages of its rows; 0 for rows that are no keys, whose
    page is anybody's."""
    p = scales + outer * stride_scale
    if len(outer.shape) == 0:
        return tl.load(p)
    elif EDGE:
        return tl.load(p, mask=live, other=0.0)[:, None]
    else:
        return tl.load(p)[:, None]


@triton.jit
def dequantise(x, like, QUANT: tl.constexpr):
    """What stored bytes stand for, exactly, in the dtype of `like`: float16 or float32."""
    if QUANT == INT8:
        # 0x6400 + u is 1024 + u in float16: two bytes go into two halves by one permutation.  The conversion instruction
        # has a quarter of the rate.
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 u, bias;
            xor.b32 u, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4140;
            prmt.b32 $1, u, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    elif QUANT == E4M3_BITS:
        # Sign, exponent and mantissa in their places of a float16 make a number 2^8 too small, subnormal ones too.
        u = x.to(tl.int16)
        bits = ((u & 0x80) << 8) | ((u & 0x7F) << 7)
        x = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((u & 0x7F) == 0x7F, float("nan"), x).to(tl.float16)
    return x.to(like.dtype)


@triton.jit
def fetch_pairs(
    side, rows, live, like, EDGE: tl.constexpr, QUANT: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """fetch_cache of bytes that lie in pairs in int16 -> the even columns and the odd ones, [N, BLOCK_D / 2] each.

    For the second operand of a product whose rows are keys: tensor cores want two keys side by side in a register, and matrices
    are turned in shared memory by 16 bits, not by 8."""
    base, stride_outer, stride_inner, scales, stride_scale = side
    outer, inner = rows
    x = load_lanes(base, outer * stride_outer + inner * stride_inner, live, EDGE, False, DIM // 2, BLOCK_D // 2)
    even, odd = split_bytes(x, like, QUANT)
    if scales is not None:
        factor = load_factor(scales, outer, stride_scale, live, EDGE)
        even = (even.to(tl.float32) * factor).to(like.dtype)
        odd = (odd.to(tl.float32) * factor).to(like.dtype)
    return even, odd


@triton.jit
def split_bytes(x, like, QUANT: tl.constexpr):
    """int16 -> what its low and its high bytes stand for, as `dequantise`."""
    if QUANT == INT8:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 u, bias;
            xor.b32 u, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4240;
            prmt.b32 $1, u, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif QUANT == E4M3:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 u;
            .reg .b16 low, high;
            prmt.b32 u, $2, 0, 0x3120;
            mov.b32 {low, high}, u;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = (x & 0xFF).to(tl.uint8)
        high = ((x >> 8) & 0xFF).to(tl.uint8)
        if QUANT == INT8_CAST:
            low = low.to(tl.int8, bitcast=True)
            high = high.to(tl.int8, bitcast=True)
        even = dequantise(low, like, QUANT)
        odd = dequantise(high, like, QUANT)
    return even.to(like.dtype), odd.to(like.dtype)


@triton.jit
def fit_float16(q):
    """q [M, D] as (float16, factor): q = float16 * factor, a power of two that puts the largest element just inside the range
    of float16, so that no row of a bfloat16 query is out of it."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), 1), 0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    known = (exponent > 0) & (exponent < 255)  # neither nothing nor inf nor NaN
    exponent = tl.minimum(tl.maximum(tl.where(known, exponent, 141), 15), 254)
    down = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(14 - e), e = exponent - 127
    up = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (wide * down).to(tl.float16), up
