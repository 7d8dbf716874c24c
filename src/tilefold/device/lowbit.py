"""Codes of few bits as `tilefold.quant.packing` lays them out, unpacked in registers.

A slab of 32 columns is one shift and one mask.

A tile of a plane is [rows, 32] elements of 16 bits; field J of all of them is slab J of the block.  At 3 bits a second tile,
of the plane of high bits, is shifted so that its field J belongs to the low tile's.
"""

import triton
import triton.language as tl


@triton.jit
def elements(plane):
    """The int32 plane as its elements of 16 bits, two a word."""
    return plane.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def high_tile(high, block):
    """The high bits' tile of block `block` // 2, so shifted that field J belongs to field J of the low tile of `block`."""
    return (high.to(tl.int32) & 0xFFFF) >> (8 * (block & 1))


@triton.jit
def slab_codes(low, high, J: tl.constexpr, BITS: tl.constexpr):
    """Codes of slab J, int32 [R, 32]; high: None but at 3 bits."""
    if BITS == 3:
        return ((low.to(tl.int32) >> (2 * J)) & 3) | (((high >> J) & 1) << 2)
    else:
        return (low.to(tl.int32) >> (BITS * J)) & ((1 << BITS) - 1)


@triton.jit
def exact_values(codes, zeros, scales, Table):
    """fp32 [R, 32]: (code - zero) * scale, or table[code] * scale, each step rounded as `QuantizedTensor.dequantize` does it.

    zeros: fp32 that broadcasts; Table: fp32, or None."""
    if Table is None:
        # 2^23 + code as a float's bits: converting an integer takes four times as long
        return ((codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0 - zeros) * scales
    else:
        return tl.load(Table + codes) * scales
