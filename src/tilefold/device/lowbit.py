"""Codes of few bits as `tilefold.quant.packing` lays them out, unpacked in registers.

A tile of a plane is [rows, 32] elements of 16 bits; field J of all of them is slab J of the block, 32 neighbouring columns: one
shift and one mask.  At 3 bits a second tile, of the plane of high bits, is shifted so that its field J belongs to the low one's.

How a weight's value is made (HOW):

    POST    code - zero in x's dtype, which is exact; the scale multiplies the product, in fp32
    PRE     (code - zero) * scale in x's dtype: rounded once, as the dequantised weight is
    WIDE    (code - zero) * scale, or table[code] * scale, in fp32, then rounded to x's dtype

With ASM two elements at a time: the code's bits under a 16-bit float's (128 + code in bf16, 1024 + code in fp16), so that one
addition takes off that and the zero point together.  8 bits do not fit under bf16's: there the two halves are subtracted.
"""

import triton
import triton.language as tl

from .partials import arrive
from .tile import narrow

POST = tl.constexpr(0)
PRE = tl.constexpr(1)
WIDE = tl.constexpr(2)
FEW = tl.constexpr(8192)  # elements of a tile whose parts are added by code without a loop: all loads at once


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
    """Codes of slab J, int32 like low; high: None but at 3 bits."""
    if BITS == 3:
        return ((low.to(tl.int32) >> (2 * J)) & 3) | (((high >> J) & 1) << 2)
    else:
        return (low.to(tl.int32) >> (BITS * J)) & ((1 << BITS) - 1)


@triton.jit
def exact_values(codes, zeros, scales, Table):
    """fp32: (code - zero) * scale, or table[code] * scale, each step rounded as `QuantizedTensor.dequantize` does it.

    zeros: fp32 that broadcasts; Table: fp32, or None."""
    if Table is None:
        # 2^23 + code as a float's bits: converting an integer takes four times as long
        return ((codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0 - zeros) * scales
    else:
        return tl.load(Table + codes) * scales


@triton.constexpr_function
def unpack_text(bits, j, fp16, scaled):
    """PTX: two elements of $1 (and of high bits, $2, at 3 bits) -> two values; operands after them: zeros, scales if `scaled`."""
    first = 3 if bits == 3 else 2
    zeros, scales = f"${first}", f"${first + 1}"
    width = 2 if bits == 3 else bits
    kind, magic = ("f16x2", 0x64006400) if fp16 else ("bf16x2", 0x43004300)
    one = "0x3c003c00" if fp16 else "0x3f803f80"
    text = f"{{ .reg .b32 t, u, v, one, less, none; mov.b32 one, {one}; mov.b32 less, 0xbf80bf80; mov.b32 none, 0x80008000; "
    text += f"shr.u32 t, $1, {width * j}; " if j else "mov.b32 t, $1; "
    if bits == 8 and not fp16:  # 128 + low seven bits, minus 128 or 256: the sign of code - 128 is the inverted top bit
        text += "lop3.b32 u, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 v, t, 0x00800080, 0x43004300, 0xae; "
        text += "fma.rn.bf16x2 u, v, less, u; "
    else:
        mask = (1 << width) - 1
        text += f"lop3.b32 u, t, {hex(mask | mask << 16)}, {hex(magic)}, 0xea; "
    if bits == 3:
        text += f"shl.b32 v, $2, {2 - j}; " if j <= 2 else f"shr.u32 v, $2, {j - 2}; "
        text += "lop3.b32 u, v, 0x00040004, u, 0xea; "
    text += f"fma.rn.{kind} {'u' if scaled else '$0'}, u, one, {zeros}; "
    if scaled:
        text += f"fma.rn.{kind} $0, u, {scales}, none; "
    return text + "}"


@triton.jit
def shifted_high(high, block, ASM: tl.constexpr):
    """The high bits' tile (int16) as `weight_slab` takes it."""
    if ASM:
        amount = tl.full(high.shape, 0, tl.int16) + (8 * (block & 1)).to(tl.int16)
        return tl.inline_asm_elementwise("{ .reg .b32 t; and.b32 t, $2, 255; shr.u32 $0, $1, t; }", "=r,r,r", [high, amount],
                                         dtype=tl.int16, is_pure=True, pack=2)  # fmt: skip
    else:
        return high_tile(high, block)


@triton.jit
def zero_term(zeros, BITS: tl.constexpr, HOW: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """What `weight_slab` takes for zero points (fp32): what is to be added in x's dtype, exactly."""
    if ASM and HOW != 2:
        if BITS == 8 and DTYPE == tl.bfloat16:
            return (128.0 - zeros).to(DTYPE)
        else:
            return (-(1024.0 if DTYPE == tl.float16 else 128.0) - zeros).to(DTYPE)
    else:
        return zeros


@triton.jit
def group_terms(
    Scales, Zeros, lane, i_g, o_n, m_n, stride_sg, stride_sn, BITS: tl.constexpr, HOW: tl.constexpr, ASM: tl.constexpr,
    WORDS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """-> zeros as weight_slab takes them, and scales, of groups i_g (int64) and rows o_n, shaped as both are together.

    WORDS: rows lie next to each other, N is a multiple of 4, o_n below N: then each value is read as the word of four bytes
    that it lies in, which asynchronous copies can bring; single bytes and halves would be waited for.  lane: o_n & 3 loaded
    from memory (int32), as the compiler moves values to where products have their operands only if they are made of loads and
    constants."""
    at = i_g * stride_sg
    if WORDS:
        if Scales.dtype.element_ty.primitive_bitwidth == 16:
            word = tl.load(Scales.to(tl.pointer_type(tl.int32), bitcast=True) + ((at >> 1) + (o_n >> 1)))
            scales = (word >> ((lane & 1) << 4)).to(tl.int16).to(Scales.dtype.element_ty, bitcast=True)
        else:
            scales = tl.load(Scales + (at + o_n))
    else:
        scales = tl.load(Scales + (at + o_n * stride_sn), mask=m_n, other=0.0)
    if Zeros is None:
        zeros = zero_term(tl.full(scales.shape, 1 << (BITS - 1), tl.float32), BITS, HOW, ASM, DTYPE)
    elif WORDS:
        word = tl.load(Zeros.to(tl.pointer_type(tl.int32), bitcast=True) + ((at >> 2) + (o_n >> 2)))
        code = (word >> (lane << 3)) & 255
        if ASM and HOW != 2 and (BITS < 8 or DTYPE == tl.float16):  # -(magic + zero) by its bits
            zeros = (code | (0xE400 if DTYPE == tl.float16 else 0xC300)).to(tl.int16).to(DTYPE, bitcast=True)
        else:
            zeros = zero_term(code.to(tl.float32), BITS, HOW, ASM, DTYPE)
    else:
        zeros = tl.load(Zeros + (at + o_n * stride_sn), mask=m_n, other=0).to(tl.float32)
        zeros = zero_term(zeros, BITS, HOW, ASM, DTYPE)
    return zeros, scales


@triton.jit
def side_by_side(a, b):
    """[R, C] and [R, C] -> [R, 2 C]; where operands of products lie, no register moves."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def weight_slabs(low, high, zeros, scales, Table, J: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr,
                 HOW: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Slabs J to J + COUNT (a power of two) of a tile side by side."""
    if COUNT == 1:
        return weight_slab(low, high, zeros, scales, Table, J, BITS, HOW, ASM, DTYPE, COMPUTE)
    else:
        HALF: tl.constexpr = COUNT // 2
        a = weight_slabs(low, high, zeros, scales, Table, J, HALF, BITS, HOW, ASM, DTYPE, COMPUTE)
        b = weight_slabs(low, high, zeros, scales, Table, J + HALF, HALF, BITS, HOW, ASM, DTYPE, COMPUTE)
        return side_by_side(a, b)


@triton.jit
def weight_slab(low, high, zeros, scales, Table, J: tl.constexpr, BITS: tl.constexpr, HOW: tl.constexpr, ASM: tl.constexpr,
                DTYPE: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Slab J of a tile as COMPUTE, rounded to DTYPE.  zeros, of `zero_term`, and scales have a 1 where low has its lanes."""
    if ASM and HOW != 2:
        z = tl.broadcast_to(zeros, low.shape)
        if HOW == 1:
            s = tl.broadcast_to(scales, low.shape)
            if BITS == 3:
                return tl.inline_asm_elementwise(unpack_text(BITS, J, DTYPE == tl.float16, True), "=r,r,r,r,r", [low, high, z, s],
                                                 dtype=zeros.dtype, is_pure=True, pack=2)  # fmt: skip
            else:
                return tl.inline_asm_elementwise(unpack_text(BITS, J, DTYPE == tl.float16, True), "=r,r,r,r", [low, z, s],
                                                 dtype=zeros.dtype, is_pure=True, pack=2)  # fmt: skip
        elif BITS == 3:
            return tl.inline_asm_elementwise(unpack_text(BITS, J, DTYPE == tl.float16, False), "=r,r,r,r", [low, high, z],
                                             dtype=zeros.dtype, is_pure=True, pack=2)  # fmt: skip
        else:
            return tl.inline_asm_elementwise(unpack_text(BITS, J, DTYPE == tl.float16, False), "=r,r,r", [low, z],
                                             dtype=zeros.dtype, is_pure=True, pack=2)  # fmt: skip
    else:
        codes = slab_codes(low, high, J, BITS)
        if HOW == 0:
            return (codes.to(tl.float32) - zeros).to(COMPUTE)
        else:
            value = exact_values(codes, zeros, scales.to(tl.float32), Table)
            return rounded(value, DTYPE, COMPUTE)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """fp32 to DTYPE, held as COMPUTE: the interpreter truncates to bf16 and multiplies it wrongly, so there COMPUTE is fp32."""
    if COMPUTE == tl.float32 and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(COMPUTE)


@triton.jit
def finish(acc, Out, Bias, Part, Arrived, item, i_k, o_m, o_n, M, N, stride_om, SPLITS: tl.constexpr, ATOMIC: tl.constexpr,
           EMULATE: tl.constexpr):  # fmt: skip
    """Store acc [BLOCK_N, BLOCK_M]; or all SPLITS' sum, made by the last to arrive, in order unless ATOMIC."""
    inside = (o_m[None, :] < M) & (o_n[:, None] < N)
    last = True
    if SPLITS > 1:
        place = o_m[None, :].to(tl.int64) * N + o_n[:, None]
        size = M.to(tl.int64) * N
        if ATOMIC:
            tl.atomic_add(Part + place, acc, mask=inside, sem="relaxed")
        else:
            tl.store(Part + i_k * size + place, acc, mask=inside)
        last = arrive(Arrived, item, SPLITS)
        if last:
            acc = tl.zeros(acc.shape, tl.float32)
            if ATOMIC:
                acc = tl.load(Part + place, mask=inside, other=0.0, cache_modifier=".cg")
            elif acc.shape[0] * acc.shape[1] < FEW:
                for s in tl.static_range(SPLITS):
                    acc += tl.load(Part + s * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            else:
                for s in range(tl.num_programs(1)):
                    acc += tl.load(Part + s * size + place, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if Bias is not None:
            acc += tl.load(Bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
        p_out = Out + o_m[None, :].to(tl.int64) * stride_om + o_n[:, None]
        tl.store(p_out, narrow(acc, Out.dtype.element_ty, EMULATE), mask=inside)
