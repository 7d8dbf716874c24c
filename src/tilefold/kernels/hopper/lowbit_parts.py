"""Weights of few bits in Gluon: two neighbouring elements of a tile become two 16-bit values in three or four instructions.

Elements, slabs and the arithmetic are those of `tilefold.device.lowbit`, whose PTX these kernels use.
"""

from ...device.lowbit import unpack_text
from .gluon import constexpr_function, gl, jit


@jit
def zero_terms(zeros, BITS: gl.constexpr, DTYPE: gl.constexpr):
    """What is added to magic + code, in DTYPE, for zero points fp32."""
    if BITS == 8 and DTYPE == gl.bfloat16:
        return (128.0 - zeros).to(DTYPE)
    elif DTYPE == gl.float16:
        return (-1024.0 - zeros).to(DTYPE)
    else:
        return (-128.0 - zeros).to(DTYPE)


@jit
def middle(BITS: gl.constexpr, DTYPE: gl.constexpr):
    """The same for symmetric codes, a number."""
    MAGIC: gl.constexpr = -128.0 if BITS == 8 and DTYPE == gl.bfloat16 else 1024.0 if DTYPE == gl.float16 else 128.0
    return -MAGIC - (1 << (BITS - 1))


@jit
def unpack(low, high, zeros, scales, J: gl.constexpr, BITS: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr):
    """Slab J of elements `low` (int16; and of the high bits' at 3 bits) in DTYPE; zeros and scales like low, in DTYPE."""
    TEXT: gl.constexpr = unpack_text(BITS, J, DTYPE == gl.float16, SCALED)
    if BITS == 3:
        if SCALED:
            return gl.inline_asm_elementwise(
                TEXT, "=r,r,r,r,r", [low, high, zeros, scales], dtype=zeros.dtype, is_pure=True, pack=2
            )
        else:
            return gl.inline_asm_elementwise(
                TEXT, "=r,r,r,r", [low, high, zeros], dtype=zeros.dtype, is_pure=True, pack=2
            )
    elif SCALED:
        return gl.inline_asm_elementwise(
            TEXT, "=r,r,r,r", [low, zeros, scales], dtype=zeros.dtype, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(TEXT, "=r,r,r", [low, zeros], dtype=zeros.dtype, is_pure=True, pack=2)


@constexpr_function
def _word_text(bits, j, fp16):
    """The same of a word of two elements, with two results; $2 zeros, $3 the word of high bits ($3, $4 where there is one)."""
    text = unpack_text(bits, j, fp16, False)
    for old in (3, 2, 1, 0):
        text = text.replace(f"${old}", f"#{old}")
    text = text.replace("#0", "u").replace("#1", "$2").replace("#2", "$3").replace("#3", "$4")
    return text[:-1] + "mov.b32 {$0, $1}, u; }"


@jit
def pairs(low, high):
    """[W, R, 16] of the even and of the odd elements -> [W, R, 32]."""
    return gl.join(low, high).reshape([low.shape[0], low.shape[1], 32])


@jit
def halves(words, DTYPE: gl.constexpr):
    """Words [W, R, 16] as 16-bit values [W, R, 32]."""
    like = words.to(gl.int16).to(DTYPE, bitcast=True)
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(like.dtype, like.dtype),
                                          is_pure=True, pack=1)  # fmt: skip
    return pairs(low, high)


@jit
def twice(x):
    """A word of two of each 16-bit value."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@jit
def unpack_words(low, high, zeros, J: gl.constexpr, BITS: gl.constexpr, DTYPE: gl.constexpr):
    """code - zero of slab J of words [W, R, 16] (and of the high bits' at 3 bits) as [W, R, 32]; zeros: `twice` the terms."""
    TEXT: gl.constexpr = _word_text(BITS, J, DTYPE == gl.float16)
    kind = zeros.to(gl.int16).to(DTYPE, bitcast=True)
    if BITS == 3:
        even, odd = gl.inline_asm_elementwise(
            TEXT, "=h,=h,r,r,r", [low, high, zeros], (kind.dtype, kind.dtype), is_pure=True, pack=1
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            TEXT, "=h,=h,r,r", [low, zeros], (kind.dtype, kind.dtype), is_pure=True, pack=1
        )
    return pairs(even, odd)


@jit
def shift_high(high, amount):
    """Elements of the high bits, both of a word moved down by `amount` (int16, like high): only the low eight of each count."""
    return gl.inline_asm_elementwise("{ .reg .b32 t; and.b32 t, $2, 255; shr.u32 $0, $1, t; }", "=r,r,r", [high, amount],
                                     dtype=gl.int16, is_pure=True, pack=2)  # fmt: skip
