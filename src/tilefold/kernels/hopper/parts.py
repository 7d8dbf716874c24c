"""What the Hopper kernels share: the order of work, a list's entries, loads, columns and sums of accumulators, stores.

Layouts: an accumulator of wgmma gives a thread two rows of 64 and, in each, pairs of neighbouring columns; the four threads of a
quad share a row.  Statistics of rows that need no exchange inside the loop stay as four partial values a row (one per thread of
the quad) and are summed once, at the end.
"""

from .gluon import gl, jit, opaque, tma_load

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
PANEL = gl.constexpr(64)  # columns of a tile in shared memory that lie together: 128 bytes, the widest swizzle
LOWEST = gl.constexpr(-3.0e38)  # a row's maximum before its first key: finite, so that -inf - LOWEST is no NaN


# ---------------------------------------------------------------- which work, in which order


@jit
def draw_work(counter):
    """Take the next number from the counter.  The answer arrives in one thread of the warp, later: `read_work` waits for it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; mov.b32 $0, 0; "
        "@one atom.global.add.u32 $0, [$1], 1; }",
        "=&r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def read_work(drawn):
    """The number that was drawn, in every thread of the warp."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [drawn], dtype=gl.int32,
                                     is_pure=False, pack=1)  # fmt: skip


@jit
def place_of_item(item, q_blocks, heads):
    """-> query block, batch entry, head.  Query blocks go fastest: neighbours, whose lists often agree, share K and V in L2."""
    row = item // q_blocks
    return item - row * q_blocks, row // heads, row % heads


# ---------------------------------------------------------------- a query block's list


@jit
def list_of_item(lists, i_q, i_b, i_h):
    """Where the item's list begins."""
    return lists[0] + i_b.to(gl.int64) * lists[2] + i_h.to(gl.int64) * lists[3] + i_q.to(gl.int64) * lists[4]


@jit
def entry(index, i, count):
    """Entry i of a list, or -1 if it has none.  The address is clamped: i may be anything."""
    block = gl.load(index + gl.minimum(gl.maximum(i, 0), gl.maximum(count - 1, 0)), mask=count > 0, other=0)
    return gl.where((i >= 0) & (i < count), block, -1)


# ---------------------------------------------------------------- loads


@jit
def load_panels(desc, bar, buffers, slot, i_b, i_h, row, D: gl.constexpr):
    """Have as many rows as a buffer has brought, from `row` on; buffers: [slots * panels, rows, 64], which is [slots, rows, D]
    swizzled.  `bar` must expect their bytes."""
    for p in gl.static_range(D // PANEL):
        tma_load(desc, [i_b, i_h, row, p * PANEL], bar, buffers.index(slot * (D // PANEL) + p))


# ---------------------------------------------------------------- scores in accumulators


@jit
def quad_sums(p):
    """p [M, N] fp32 -> [M, 4]: each thread's own sum of a row."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@jit
def columns_of(parts):
    """-> group, rest: column 8 * group + rest of scores [M, N], for parts, which is them as [M, N / 8, 4, 2]; rest is twice the
    thread of the quad plus 0 or 1.

    Compared as `8 * group < opaque(end - rest)`, the group is a constant of each register and only what is inside varies.  As one
    number (which the compiler would make of it again, if it could look inside), the columns would stay in 32 registers of each
    thread throughout the loop."""
    LAYOUT: gl.constexpr = parts.type.layout
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    ELEMENT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    group = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, parts.shape[1], layout=GROUP), 0), 2), 3)
    thread = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=THREAD), 0), 1), 3)
    element = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, layout=ELEMENT), 0), 1), 2)
    return group, thread * 2 + element


@jit
def cut_columns(s, live_0, live_1, KV_BLOCK: gl.constexpr):
    """Scores [M, 128] with -inf in the columns past a block's valid keys; live_1: of the second block, if there are two."""
    parts = s.reshape([s.shape[0], 16, 4, 2])
    group, rest = columns_of(parts)
    if KV_BLOCK == 64:
        live = gl.where(group < 8, group * 8 < opaque(live_0 - rest), group * 8 < opaque(live_1 + 64 - rest))
    else:
        live = group * 8 < opaque(live_0 - rest)
    return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)


@jit
def rescale(acc, alpha, ROW: gl.constexpr):
    """acc [M, D] times alpha [M]."""
    return acc * gl.expand_dims(gl.convert_layout(alpha, ROW), 1)


@jit
def clear_rows(tile, live, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of tile [ROWS, 64] in shared memory from `live` on: 0 * NaN is NaN, so a mask on the scores does not do."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    x = tile.load(LAYOUT)
    tile.store(gl.where(gl.expand_dims(o_r < live, 1), x, gl.zeros_like(x)))


# ---------------------------------------------------------------- the result


@jit
def reciprocal(l, ROW: gl.constexpr):
    """1 / the row's sum, from l [M, 4]: four partial sums a row; 0 where no key was live.  A NaN stays visible."""
    total = gl.convert_layout(gl.sum(l, 1), ROW)
    return gl.where(total == 0.0, 0.0, 1.0 / total)


@jit
def store_lse(lse, m, l, rows, live, ROW: gl.constexpr, HEADS: gl.constexpr = 1, stride_h=0):
    """The logarithm of the row's sum, natural, to the first `rows` of 64 places at `lse`; -inf from row `live` on.  HEADS: as of
    store_accumulator."""
    store_each(lse, (m + gl.log2(gl.convert_layout(gl.sum(l, 1), ROW))) * LN2, rows, live, HEADS, stride_h)


@jit
def store_each(lse, value, rows, live, HEADS: gl.constexpr, stride_h):
    """A value [64] of each row, where store_lse has its own."""
    o_r = gl.arange(0, 64, layout=value.type.layout)
    place = lse + o_r
    if HEADS > 1:
        place = lse + o_r // HEADS + (o_r % HEADS).to(gl.int64) * stride_h
    gl.store(place, gl.where(o_r < live, value, float("-inf")), mask=o_r < rows)


@jit
def _pack(lo, hi, DTYPE: gl.constexpr):
    """Two fp32 to one register of two 16-bit values, rounded to nearest even."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=gl.int32, is_pure=True,
                                         pack=1)  # fmt: skip
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=gl.int32, is_pure=True,
                                         pack=1)  # fmt: skip


@jit
def _from_neighbour(x):
    """Each thread's x of the thread beside it (lane xor 1)."""
    return gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32,
                                     is_pure=False, pack=1)  # fmt: skip


@jit
def store_accumulator(out, acc, rows, stride, DTYPE: gl.constexpr, columns=None, HEADS: gl.constexpr = 1,
                      stride_h=0):  # fmt: skip
    """Store acc [64, D] fp32 in DTYPE to the first `rows` rows at `out`, `stride` elements apart (a multiple of 4).  columns: how
    many of the D there are, a multiple of 4, of the device or a constant; None: all.  HEADS: row r is one of head r % HEADS,
    stride_h apart, and query r // HEADS.

    A thread holds 4 bytes here and 4 bytes there of a row.  Neighbours swap halves, so that each store is 8 bytes wide and every
    32-byte sector is written whole, straight from registers: shared memory is full."""
    D: gl.constexpr = acc.shape[1]
    lo, hi = acc.reshape([64, D // 2, 2]).split()
    # [64 rows, D/16 groups of 16 columns, 4 threads of a quad]: words of columns 0 to 7 and of columns 8 to 15
    a, b = _pack(lo, hi, DTYPE).reshape([64, D // 16, 2, 4]).permute((0, 1, 3, 2)).split()
    LAYOUT: gl.constexpr = a.type.layout
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    o_g = gl.arange(0, D // 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    o_t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    row = gl.expand_dims(gl.expand_dims(o_r, 1), 2)
    group = gl.expand_dims(gl.expand_dims(o_g, 0), 2)
    thread = gl.expand_dims(gl.expand_dims(o_t, 0), 0)
    odd = (thread & 1) != 0
    other = _from_neighbour(gl.where(odd, a, b))
    first = gl.where(odd, other, a).to(gl.uint32, bitcast=True).to(gl.uint64)
    second = gl.where(odd, b, other).to(gl.uint32, bitcast=True).to(gl.uint64)
    # in steps of 8 bytes
    column = group * 4 + (thread & 1) * 2 + (thread >> 1)
    if HEADS == 1:
        offset = row.to(gl.int64) * (stride // 4) + column.to(gl.int64)
    else:
        begin = (row // HEADS).to(gl.int64) * (stride // 4) + (row % HEADS).to(gl.int64) * (stride_h // 4)
        offset = begin + column.to(gl.int64)
    place = out.to(gl.pointer_type(gl.uint64), bitcast=True) + offset
    live = (row < rows) & (group >= 0) & (thread >= 0)
    if columns is not None:
        # not to be seen through: columns of an accumulator that are known to be dead make ptxas move the others between products
        live = live & (opaque(column) * 4 < columns)
    gl.store(place, first | (second << 32), mask=live)
