"""What changes the scores in the dense forward kernel for sm_90 beyond softcap: an additive bias, ALiBi, a boolean mask.

A bias or mask comes as keys and values do: the loading warp has boxes of it brought into a ring in shared memory, a ring for each
folding warpgroup, since each reads 64 rows of its own.  A tile lies swizzled there, and a thread's part of it is what it holds of
the scores: 16-bit elements by ldmatrix, eight instructions for 64 x 128, without a conflict of banks.  One row for all queries
is a tile of one row.  The distance of ALiBi is worked out from the columns, which are constants of each register.
"""

from ...device.ranges import CAUSAL
from .gluon import barriers, constexpr_function, fence_async_shared, gl, jit, mbarrier, opaque, reinterpret, tma_load
from .parts import columns_of

# ---------------------------------------------------------------- tiles of a bias or a mask


@constexpr_function
def panel_of_tile(dtype, rows, keys):
    """Keys that lie together in shared memory: 128 bytes, the widest swizzle, or a row that is not swizzled."""
    return keys if rows == 1 else min(keys, 1024 // dtype.primitive_bitwidth)


@constexpr_function
def tile_layout(dtype, rows, keys):
    """The layout of a tile in shared memory, or of a panel of it."""
    bits = dtype.primitive_bitwidth
    width = 0 if rows == 1 else min(128, keys * bits // 8)
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=2)


@constexpr_function
def places_of_tile(dtype, rows, keys):
    """How many tiles' room one takes: boxes begin at multiples of 128 bytes."""
    return max(1, 1024 // (dtype.primitive_bitwidth * rows * keys))


@jit
def tile_ring(desc, ROWS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """-> (panels, full, empty): SLOTS tiles [ROWS, KEYS] and as many pairs of barriers for each warpgroup that folds."""
    DTYPE: gl.constexpr = desc.dtype
    PANELS: gl.constexpr = KEYS // panel_of_tile(DTYPE, ROWS, KEYS) * places_of_tile(DTYPE, ROWS, KEYS)
    LAYOUT: gl.constexpr = tile_layout(DTYPE, ROWS, KEYS)
    shape: gl.constexpr = [CONSUMERS * SLOTS * PANELS, ROWS, panel_of_tile(DTYPE, ROWS, KEYS)]
    panels = gl.allocate_shared_memory(DTYPE, shape, LAYOUT)
    return panels, barriers(CONSUMERS * SLOTS, 1), barriers(CONSUMERS * SLOTS, 1)


@jit
def load_tiles(source, ring, t, i_b, i_h, row, key, ROWS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
               CONSUMERS: gl.constexpr):  # fmt: skip
    """Have tile number t brought for each warpgroup, 64 rows each from `row` on.  source: (descriptor [B, H, Sq, Sk], and 1 or,
    for a dimension of size 1, 0 to multiply batch entry and head with); what lies past the ends becomes zeros."""
    desc, step_b, step_h = source
    panels, full, empty = ring
    DTYPE: gl.constexpr = desc.dtype
    PANEL: gl.constexpr = panel_of_tile(DTYPE, ROWS, KEYS)
    PLACES: gl.constexpr = places_of_tile(DTYPE, ROWS, KEYS)
    slot = t % SLOTS
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(empty.index(c * SLOTS + slot), ((t // SLOTS) & 1) ^ 1)
        bar = full.index(c * SLOTS + slot)
        mbarrier.expect(bar, ROWS * KEYS * DTYPE.primitive_bitwidth // 8)
        first = row + c * 64 if ROWS > 1 else 0
        for p in gl.static_range(KEYS // PANEL):
            tma_load(desc, [i_b * step_b, i_h * step_h, first, key + p * PANEL], bar,
                     panels.index((c * SLOTS + slot) * (KEYS // PANEL * PLACES) + p))  # fmt: skip


@jit
def wait_tile(ring, t, like, CID: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr):
    """Tile number t [ROWS, KEYS] of warpgroup CID in registers, as the scores `like` lie there."""
    panels, full, _ = ring
    KEYS: gl.constexpr = like.shape[1]
    DTYPE: gl.constexpr = panels.dtype
    PLACES: gl.constexpr = places_of_tile(DTYPE, ROWS, KEYS)
    shape: gl.constexpr = [panels.shape[0] * ROWS * panels.shape[2] // (ROWS * KEYS), ROWS, KEYS]
    tiles = reinterpret(panels, DTYPE, shape, tile_layout(DTYPE, ROWS, KEYS))
    slot = t % SLOTS
    mbarrier.wait(full.index(CID * SLOTS + slot), (t // SLOTS) & 1)
    return tiles.index((CID * SLOTS + slot) * PLACES).load(like.type.layout)


@jit
def release_tile(ring, t, CID: gl.constexpr, SLOTS: gl.constexpr):
    """Every thread of the warpgroup has read its part of tile number t.

    The fence makes the copy engine's next writes come after these reads: a barrier among threads alone does not order the
    two, and reads that queue behind the products' operands were seen to find the tile after the next."""
    fence_async_shared()
    mbarrier.arrive(ring[2].index(CID * SLOTS + t % SLOTS), count=1)


# ---------------------------------------------------------------- the changes


@jit
def load_slopes(like, Slopes, stride_b, stride_h, i_b, i_h, PACK: gl.constexpr):
    """The slope of a block's head, or [64, 1, 1, 1] of PACK heads that are rows of one block."""
    begin = Slopes + i_b.to(gl.int64) * stride_b
    if PACK == 1:
        return gl.load(begin + i_h.to(gl.int64) * stride_h)
    else:
        parts = like.reshape([64, like.shape[1] // 8, 4, 2])
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
        head = i_h * PACK + gl.arange(0, 64, layout=ROW) % PACK
        slope = gl.load(begin + head.to(gl.int64) * stride_h)
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(slope, 1), 2), 3)


@jit
def subtract_distance(s, scale, slope, row, begin, shift, KIND: gl.constexpr, PACK: gl.constexpr):
    """s * scale - slope * |distance| (device.mods.alibi) of rows from `row` on, PACK to a query, and keys from `begin` on.

    The distance by the first of a thread's columns less a constant of each register: two instructions a score where no seen key
    lies after its query (what is not seen gets some number), three elsewhere.  Whole numbers up to 2^24 are exact."""
    KEYS: gl.constexpr = s.shape[1]
    parts = s.reshape([64, KEYS // 8, 4, 2])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
    query = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 64, layout=ROW), 1), 2), 3) + row
    if PACK > 1:
        query = query // PACK
    group, rest = columns_of(parts)
    first = (query + shift - begin - rest).to(gl.float32)
    if KIND == CAUSAL:
        parts = parts * scale - (opaque(first * slope) - (group * 8).to(gl.float32) * slope)
    else:
        parts = parts * scale - gl.abs(opaque(first) - (group * 8).to(gl.float32)) * slope
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@jit
def add_bias(s, scale, ring, t, CID: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr):
    """s * scale + tile number t of the bias."""
    s = s * scale + wait_tile(ring, t, s, CID, ROWS, SLOTS).to(gl.float32)
    release_tile(ring, t, CID, SLOTS)  # behind the sum, so that not all of the tile has to be in registers at a time
    return s


@jit
def drop_masked(s, ring, t, CID: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr):
    """s, -inf where tile number t of the mask is 0."""
    s = gl.where(wait_tile(ring, t, s, CID, ROWS, SLOTS) != 0, s, float("-inf"))
    release_tile(ring, t, CID, SLOTS)
    return s


@jit
def change_scores(s, scale, rings, t, slope, row, begin, shift, CID: gl.constexpr, KIND: gl.constexpr, PACK: gl.constexpr,
                  ALIBI: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, BIAS_SLOTS: gl.constexpr,
                  MASK_SLOTS: gl.constexpr):  # fmt: skip
    """Scores [64, KEYS] with ALiBi, bias and mask, in this order.  With one of the first two they come out times `scale`,
    else as they were."""
    if ALIBI:
        s = subtract_distance(s, scale, slope, row, begin, shift, KIND, PACK)
    if BIAS:
        s = add_bias(s, 1.0 if ALIBI else scale, rings[0], t, CID, BIAS, BIAS_SLOTS)
    if MASK:
        s = drop_masked(s, rings[1], t, CID, MASK, MASK_SLOTS)
    return s
