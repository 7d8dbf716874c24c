"""What the dense forward kernel for sm_90 computes with: tiles of any width, products by parts, the softmax step's variants.

Widths: a head dim that is no power of two is two tiles side by side, 96 = 64 + 32 and 192 = 128 + 64, since a tile's sides are
powers of two.  Buffers, views and accumulators of a head dim are therefore tuples of one or two.
"""

from .gluon import (
    KEEP_NAN,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    quick_log2,
    quick_reciprocal,
    reinterpret,
    scale_unless_one,
    tma_load,
    wgmma,
    wgmma_wait,
)
from .parts import (
    LOG2E,
    LOWEST,
    clear_rows,
    columns_of,
    quad_sums,
    reciprocal,
    rescale,
    softmax_step,
    store_accumulator,
    store_lse,
)

GROWTH = gl.constexpr(8.0)  # by how much (base 2) a row's maximum may pass the one its sums are relative to
P1, P2, P3 = gl.constexpr(0.6932829), gl.constexpr(0.242211), gl.constexpr(0.055008933)  # 2^f = 1 + f * (P1 + ...)
ROUNDS = gl.constexpr(12583039.0)  # 1.5 * 2^23 + 127: added to x, it leaves round(x) + 127 in the lowest bits


# ---------------------------------------------------------------- widths


@constexpr_function
def wide_of(dim):
    """The first of the tiles that a head dim makes: the largest power of two in it."""
    return 1 << (dim.bit_length() - 1)


@constexpr_function
def panel_of(dim):
    """Columns of a tile that lie together in shared memory: 64 (128 bytes, the widest swizzle) where they divide it, else 32."""
    return 64 if dim % 64 == 0 else 32


@constexpr_function
def swizzled(dim):
    """The layout of a tile of a head dim in shared memory, or of a panel of it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if dim % 64 == 0 else 64, element_bitwidth=16, rank=2)


@jit
def ring(DTYPE: gl.constexpr, NUMBER: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """Buffers of NUMBER tiles [ROWS, D], panel by panel: a tuple of [NUMBER * panels, ROWS, panel]."""
    PANEL: gl.constexpr = panel_of(D)
    WIDE: gl.constexpr = wide_of(D)
    first = gl.allocate_shared_memory(DTYPE, [NUMBER * (WIDE // PANEL), ROWS, PANEL], swizzled(D))
    if WIDE == D:
        return (first,)
    else:
        return (first, gl.allocate_shared_memory(DTYPE, [NUMBER * ((D - WIDE) // PANEL), ROWS, PANEL], swizzled(D)))


@jit
def tiles_of(buffers, NUMBER: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """The same memory as tiles: a tuple of [NUMBER, ROWS, width]."""
    WIDE: gl.constexpr = wide_of(D)
    first = reinterpret(buffers[0], buffers[0].dtype, [NUMBER, ROWS, WIDE], swizzled(D))
    if WIDE == D:
        return (first,)
    else:
        return (first, reinterpret(buffers[1], buffers[1].dtype, [NUMBER, ROWS, D - WIDE], swizzled(D)))


@jit
def tile_of(tiles, slot):
    """One of tiles_of's, a tuple of [ROWS, width]."""
    if len(tiles) == 1:
        return (tiles[0].index(slot),)
    else:
        return (tiles[0].index(slot), tiles[1].index(slot))


@jit
def load_tile(desc, bar, buffers, slot, i_b, i_h, row, NUMBER: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr = 1):
    """Have NUMBER rows brought from `row` on; columns past the tensor's own become zeros.  PACK: row r is one of head r % PACK of
    those together, and of query r // PACK."""
    PANEL: gl.constexpr = panel_of(D)
    WIDE: gl.constexpr = wide_of(D)
    mbarrier.expect(bar, NUMBER * D * 2)
    for p in gl.static_range(WIDE // PANEL):
        _load_panel(desc, i_b, i_h, row, p * PANEL, bar, buffers[0].index(slot * (WIDE // PANEL) + p), PACK)
    for p in gl.static_range((D - WIDE) // PANEL):
        _load_panel(
            desc, i_b, i_h, row, WIDE + p * PANEL, bar, buffers[1].index(slot * ((D - WIDE) // PANEL) + p), PACK
        )


@jit
def _load_panel(desc, i_b, i_h, row, column, bar, buffer, PACK: gl.constexpr):
    if PACK == 1:
        tma_load(desc, [i_b, i_h, row, column], bar, buffer)
    else:
        tma_load(desc, [i_b, i_h, row // PACK, 0, column], bar, buffer)


@jit
def clear_tail(buffers, slot, live, KEYS: gl.constexpr, D: gl.constexpr):
    """Zero a tile's rows from `live` on.  Both readers of the tile do, with the same values, so neither waits for the other."""
    PANEL: gl.constexpr = panel_of(D)
    WIDE: gl.constexpr = wide_of(D)
    for p in gl.static_range(WIDE // PANEL):
        clear_rows(buffers[0].index(slot * (WIDE // PANEL) + p), live, KEYS, gl.num_warps())
    for p in gl.static_range((D - WIDE) // PANEL):
        clear_rows(buffers[1].index(slot * ((D - WIDE) // PANEL) + p), live, KEYS, gl.num_warps())
    fence_async_shared()


# ---------------------------------------------------------------- products


@jit
def multiply_keys(q, k, slot, nothing):
    """Begin S = Q K^T; one group of products for each tile of the head dim."""
    s = wgmma(q[0], k[0].index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if len(q) == 2:
        s = wgmma(q[1], k[1].index(slot).permute((1, 0)), s, is_async=True)
    return s


@jit
def multiply_values(p, v, slot, acc, REST: gl.constexpr):
    """Begin O += P V, for each tile of the head dim; REST: the layout of P for the second."""
    first = wgmma(p, v[0].index(slot), acc[0], is_async=True)
    if len(v) == 1:
        return (first,)
    else:
        return (first, wgmma(gl.convert_layout(p, REST), v[1].index(slot), acc[1], is_async=True))


@jit
def wait_values(flying):
    """The accumulators, when every product is done."""
    if len(flying) == 1:
        return (wgmma_wait(0, deps=(flying[0],)),)
    else:
        first, second = wgmma_wait(0, deps=(flying[0], flying[1]))
        return (first, second)


@jit
def rescale_all(acc, alpha, ROW: gl.constexpr, REST: gl.constexpr, SKIP: gl.constexpr):
    """Each accumulator times alpha [64]; ROW, REST: the layouts of their rows.  SKIP: not by warps all of whose factors are 1."""
    first = _rescale(acc[0], alpha, ROW, SKIP)
    if len(acc) == 1:
        return (first,)
    else:
        return (first, _rescale(acc[1], alpha, REST, SKIP))


@jit
def _rescale(acc, alpha, ROW: gl.constexpr, SKIP: gl.constexpr):
    if SKIP:
        return scale_unless_one(acc, gl.expand_dims(gl.convert_layout(alpha, ROW), 1))
    else:
        return rescale(acc, alpha, ROW)


# ---------------------------------------------------------------- the softmax step


@jit
def soften(s, inner, SOFTCAP: gl.constexpr):
    """tanh(s * inner) [64, KEYS] (device.mods.softcap; its cap goes into the scale).  SOFTCAP 1: 1 - 2 / (1 + e^2x), two
    instructions of the exponential unit, right to 4e-7 of 1; 2: by one instruction, right to 5e-4 of the result."""
    if SOFTCAP == 2:
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [s * inner], dtype=gl.float32, is_pure=True,
                                         pack=1)  # fmt: skip
    else:
        return 1.0 - 2.0 * quick_reciprocal(1.0 + gl.exp2(s * (inner * (2.0 * LOG2E))))


@jit
def power_of_two(x):
    """2^x for x <= 0 by a polynomial of degree 3 (relative error 1.0e-4, where fp16 rounds by 4.9e-4), on the FMA units and not
    the exponential one; 0 from -127 down, NaN of NaN.  An idea of FlashAttention-4's."""
    x = gl.maximum(x, -127.0, propagate_nan=KEEP_NAN)
    rounded = x + ROUNDS
    f = x - (rounded - ROUNDS)  # -0.5 to 0.5
    p = 1.0 + f * (P1 + f * (P2 + f * P3))
    return p * (rounded.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)


@jit
def exponentials(x, POLYNOMIAL: gl.constexpr):
    """2^x [64, KEYS]; POLYNOMIAL: how many of 16 groups of 8 columns by power_of_two (constants of a register: columns_of)."""
    if POLYNOMIAL == 0:
        return gl.exp2(x)
    else:
        parts = x.reshape([64, x.shape[1] // 8, 4, 2])
        group, _ = columns_of(parts)
        chosen = (group * POLYNOMIAL) % 16 < POLYNOMIAL
        made = gl.where(chosen, power_of_two(parts), gl.exp2(parts))
        return gl.convert_layout(made.reshape(x.shape), x.type.layout)


@jit
def fold_scores(
    s, m, l, scale, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr, POLYNOMIAL: gl.constexpr, SKIP: gl.constexpr
):
    """parts.softmax_step.  SKIP: a row keeps the number that its sums are relative to until its maximum has passed it by GROWTH,
    so that most factors alpha are 1; probabilities then reach 2^8, which fp16 and bf16 hold as well as 1."""
    if POLYNOMIAL == 0 and not SKIP:
        return softmax_step(s, m, l, scale, P_LAYOUT, DTYPE)
    else:
        m_new = gl.maximum(m, gl.max(s, 1) * scale)
        if SKIP:
            m_new = gl.where(m_new - m > GROWTH, m_new, m)
        p = exponentials(s * scale - gl.expand_dims(m_new, 1), POLYNOMIAL)
        alpha = gl.exp2(m - m_new)
        l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + quad_sums(p)
        return gl.convert_layout(p.to(DTYPE), P_LAYOUT), m_new, l, alpha


@constexpr_function
def reach_of(dtype):
    """Where sums of a tile's probabilities become too large: fp16 ends at 65504, and the accumulator takes them times V."""
    return 2.0**15 if dtype == gl.float16 else 2.0**48


@jit
def look(s, m, scale):
    """m after a look at the tile's maxima: with it, no sum of the tile is larger than 2^13."""
    top = gl.max(s, 1) * scale
    return gl.where(top - m > GROWTH, top, m)


@jit
def fold_lazily(s, m, m_next, l, scale, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """fold_scores with SKIP, but the number that a row's sums are relative to follows the sums, after the tile (`follow`),
    instead of the maxima, before it: no maximum is looked for, and the exponentials wait for none.  m_next is what it has become
    since m.  -> p, m_next, l, alpha, the tile's sums."""
    p = gl.exp2(s * scale - gl.expand_dims(m_next, 1))
    alpha = gl.exp2(m - m_next)
    part = quad_sums(p)
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + part
    return gl.convert_layout(p.to(DTYPE), P_LAYOUT), m_next, l, alpha, part


@jit
def follow(part, m, worst, DTYPE: gl.constexpr):
    """-> m for the next tile, and the largest sum of any: from the sums of this one (each thread's), which are relative to m.

    Sums of 2^8 to reach_of are right as they are (a float's mantissa does not care) and raise m.  Larger ones may be infinite,
    and so may be what they are added to; then the block has to be made again (`outgrown`)."""
    REACH: gl.constexpr = reach_of(DTYPE)
    largest = gl.convert_layout(gl.max(part, 1), m.type.layout)
    raised = (largest > 2.0**GROWTH) & (largest < REACH)
    return gl.where(raised, m + quick_log2(largest), m), gl.maximum(worst, largest)


@jit
def outgrown(worst, item, DTYPE: gl.constexpr):
    """[64] int32: item + 1 where some tile's sum was too large, else 0."""
    REACH: gl.constexpr = reach_of(DTYPE)
    return gl.where(worst >= REACH, item + 1, 0)


# ---------------------------------------------------------------- begin and end


@jit
def begin_fold(nothing, Sinks, stride_sinks, i_h, ROW: gl.constexpr, PACK: gl.constexpr):
    """-> m [64], l [64, 4] before the first key; a sink is a key with a score of its own (natural) and no value."""
    m = gl.full([64], LOWEST, gl.float32, ROW)
    l = gl.zeros_like(quad_sums(nothing))
    if Sinks is not None:
        head = i_h * PACK + gl.arange(0, 64, layout=ROW) % PACK
        m = gl.maximum(
            m, gl.load(Sinks + head.to(gl.int64) * stride_sinks).to(gl.float32) * LOG2E, propagate_nan=KEEP_NAN
        )
        seen = gl.convert_layout(gl.where(m == LOWEST, 0.0, 1.0), gl.SliceLayout(1, l.type.layout))
        first = gl.arange(0, 4, layout=gl.SliceLayout(0, l.type.layout)) == 0
        l = gl.where(gl.expand_dims(first, 0), gl.expand_dims(seen, 1), l)
    return m, l


@jit
def accumulators(D: gl.constexpr, WARPS: gl.constexpr):
    """Accumulators [64, D]: one, or two where D is no power of two."""
    WIDE: gl.constexpr = wide_of(D)
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16])
    first = gl.zeros([64, WIDE], gl.float32, FIRST)
    if D == WIDE:
        return (first,)
    else:
        REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D - WIDE, 16])
        return (first, gl.zeros([64, D - WIDE], gl.float32, REST))


@jit
def finish_block(
    out, lse, acc, m, l, rows, strides, DTYPE: gl.constexpr, ROW: gl.constexpr, DIM: gl.constexpr, PACK: gl.constexpr
):
    """Store `rows` of 64 rows and DIM columns, whose first is at out and lse.  strides: of out's queries and heads, of lse's
    heads; PACK: as of load_tile."""
    WIDE: gl.constexpr = acc[0].shape[1]
    store_lse(lse, m, l, rows, rows, ROW, PACK, strides[2])
    _finish_columns(out, acc[0], l, rows, strides, DTYPE, DIM, PACK)
    if len(acc) == 2:
        _finish_columns(out + WIDE, acc[1], l, rows, strides, DTYPE, DIM - WIDE, PACK)


@jit
def _finish_columns(out, acc, l, rows, strides, DTYPE: gl.constexpr, LEFT: gl.constexpr, PACK: gl.constexpr):
    acc = acc * gl.expand_dims(reciprocal(l, gl.SliceLayout(1, acc.type.layout)), 1)
    COLUMNS: gl.constexpr = None if LEFT >= acc.shape[1] else LEFT
    store_accumulator(out, acc, rows, strides[0], DTYPE, COLUMNS, PACK, strides[1])
