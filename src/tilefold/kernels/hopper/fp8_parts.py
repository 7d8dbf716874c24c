"""What the FP8 forward kernel for sm_90 computes with: tiles of bytes, the softmax step with e4m3 weights, the way out.

Widths: a tile of a head dim is 64, 128 or 256 bytes wide; what a head dim leaves of it the copy engine fills with zeros.
"""

from .gluon import constexpr_function, gl, jit, mbarrier, reinterpret, tma_load
from .parts import quad_sums, reciprocal, store_accumulator, store_lse
from .softmax import exponentials

SHIFT = gl.constexpr(
    8.0
)  # weights are 2^8 times as large: up to 256 of e4m3's 448, and normal from 2^-14 of the largest on


@constexpr_function
def panel_of(columns):
    """Bytes of a row of a tile that lie together in shared memory: 128, the widest swizzle, or 64."""
    return 128 if columns % 128 == 0 else 64


@constexpr_function
def swizzled(columns):
    """The layout in shared memory of a tile of so many bytes a row."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if columns % 128 == 0 else 64, element_bitwidth=8, rank=2)


@jit
def ring(NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Buffers of NUMBER tiles [ROWS, COLUMNS] of e4m3, panel by panel: [NUMBER * panels, ROWS, panel]."""
    PANEL: gl.constexpr = panel_of(COLUMNS)
    return gl.allocate_shared_memory(gl.float8e4nv, [NUMBER * (COLUMNS // PANEL), ROWS, PANEL], swizzled(COLUMNS))


@jit
def tiles_of(buffers, NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The same memory as tiles [NUMBER, ROWS, COLUMNS]."""
    return reinterpret(buffers, buffers.dtype, [NUMBER, ROWS, COLUMNS], swizzled(COLUMNS))


@jit
def load_rows(desc, bar, buffers, slot, i_b, i_h, row, NUMBER: gl.constexpr, COLUMNS: gl.constexpr):
    """Have a tile of NUMBER rows of Q or K brought, from `row` on."""
    PANEL: gl.constexpr = panel_of(COLUMNS)
    mbarrier.expect(bar, NUMBER * COLUMNS)
    for p in gl.static_range(COLUMNS // PANEL):
        tma_load(desc, [i_b, i_h, row, p * PANEL], bar, buffers.index(slot * (COLUMNS // PANEL) + p))


@jit
def load_keys_of_values(desc, bar, buffers, slot, i_b, i_h, key, DIM: gl.constexpr, KEYS: gl.constexpr):
    """Have a tile [DIM, KEYS] of V^T brought, from `key` on."""
    mbarrier.expect(bar, DIM * KEYS)
    tma_load(desc, [i_b, i_h, 0, key], bar, buffers.index(slot))


@jit
def weigh(s, m, l, scale, POLYNOMIAL: gl.constexpr):
    """Scores [64, KEYS], m [64], l [64, 4] -> weights in e4m3 (`packed`), m, l, alpha [64].  m is SHIFT below the largest score
    (base 2), so that weights and sums are 2^SHIFT times as large alike; l sums them before they are rounded."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale - SHIFT)
    p = exponentials(s * scale - gl.expand_dims(m_new, 1), POLYNOMIAL)
    alpha = gl.exp2(m - m_new)
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + quad_sums(p)
    return packed(p), m_new, l, alpha


@jit
def packed(p):
    """Weights [64, KEYS] fp32, at most 448 -> [64, KEYS / 16, 4] int32, each four of e4m3, rounded to nearest even.

    Of each 16 keys a thread of a quad has 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 in the accumulator and 4t to 4t + 3 in the operand: the
    keys change places, without an exchange, and V^T has them in the same order (kernels.transpose_values)."""
    first, second = p.reshape([64, p.shape[1] // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()
    a, c = first.split()
    b, d = second.split()
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def operand(words, zero, P_LAYOUT: gl.constexpr):
    """What `packed` made as the left operand [64, KEYS] of a product; zero: a number that is 0, as nobody but the caller knows.

    Bytes that live across a loop would each have a register, so words do.  They are made while the product before reads its own,
    and a mere move would be left out by the assembler, which then makes the one wait for the other: hence the instruction."""
    p = gl.join(gl.join(words, words), gl.join(words, words)).reshape([64, words.shape[1] * 16])
    p = gl.convert_layout(p, P_LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $5;", "=r,r,r,r,r,r,r,r,r", [p, zero], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@jit
def finish_block(out, lse, acc, m, l, factor, rows, stride, ROW: gl.constexpr, COLUMNS: gl.constexpr):
    """Store acc / l * factor as bf16 and the logarithm of the sums, `rows` of 64 rows and COLUMNS columns."""
    store_lse(lse, m, l, rows, rows, ROW)
    acc = acc * gl.expand_dims(reciprocal(l, gl.SliceLayout(1, acc.type.layout)) * factor, 1)
    WRITTEN: gl.constexpr = None if COLUMNS >= acc.shape[1] else COLUMNS
    store_accumulator(out, acc, rows, stride, gl.bfloat16, WRITTEN)
