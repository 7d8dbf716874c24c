"""What changes scores before the softmax: softcap, ALiBi, an additive bias, the user's score_mod, a boolean mask, mask_mods.

The user's functions are those of device.mods, inlined.  Their score has the layout of the product, and so have the indices, each
with one side of 1.  They make no tensor of their own, since it would have no layout: the compiler refuses that.

A bias or mask comes as keys and values do: the producer issues TMA loads of it into a ring in shared memory.  Each consumer has a
ring, since each reads 64 rows of its own.  A tile lies swizzled there, and a thread's part of it is what it holds of the scores:
16-bit elements by ldmatrix, eight instructions for 64 x 128, without a conflict of banks.  One row for all queries is a tile of
one row.  The distance of ALiBi is worked out from the columns, which are constants of each register.
"""

from ...device.mods import modify
from ...device.ranges import CAUSAL
from .fp8_parts import Scales
from .gluon import (
    aggregate,
    barriers,
    constexpr_function,
    descriptor,
    fence_async_shared,
    field,
    gl,
    jit,
    mbarrier,
    opaque,
    quick_reciprocal,
    reinterpret,
    tma_load,
)
from .parts import LOG2E, columns_of

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


@aggregate
class ModPipeline:
    """Rings of SLOTS tiles [ROWS, KEYS] of a bias or a mask, one for each consumer; ROWS 0: there is none.

    desc [B or 1, H or 1, Sq or 1, Sk].  step_b, step_h: 1, or 0 where one tile serves all batch entries, heads."""

    desc: descriptor | gl.constexpr
    step_b: gl.tensor | gl.constexpr
    step_h: gl.tensor | gl.constexpr
    panels: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor | gl.constexpr
    empty: gl.shared_memory_descriptor | gl.constexpr
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    SLOTS: gl.constexpr
    CONSUMERS: gl.constexpr

    @constexpr_function
    def __init__(self, desc, step_b, step_h, panels, full, empty, ROWS, KEYS, SLOTS, CONSUMERS):
        self.desc, self.step_b, self.step_h = field(desc), field(step_b), field(step_h)
        self.panels, self.full, self.empty = field(panels), field(full), field(empty)
        self.ROWS, self.KEYS = gl.constexpr(ROWS), gl.constexpr(KEYS)
        self.SLOTS, self.CONSUMERS = gl.constexpr(SLOTS), gl.constexpr(CONSUMERS)

    @jit
    def load(self, t, work, row, key):
        """Issue the TMA loads of tile number t for each consumer, 64 rows each from `row` on.  What lies past the ends becomes
        zeros."""
        DTYPE: gl.constexpr = self.desc.dtype
        PANEL: gl.constexpr = panel_of_tile(DTYPE, self.ROWS, self.KEYS)
        PLACES: gl.constexpr = places_of_tile(DTYPE, self.ROWS, self.KEYS)
        slot = t % self.SLOTS
        for c in gl.static_range(self.CONSUMERS):
            mbarrier.wait(self.empty.index(c * self.SLOTS + slot), ((t // self.SLOTS) & 1) ^ 1)
            bar = self.full.index(c * self.SLOTS + slot)
            mbarrier.expect(bar, self.ROWS * self.KEYS * DTYPE.primitive_bitwidth // 8)
            first = row + c * 64 if self.ROWS > 1 else 0
            for p in gl.static_range(self.KEYS // PANEL):
                place = [work.sequence * self.step_b, work.head * self.step_h, first, key + p * PANEL]
                tma_load(self.desc, place, bar,
                         self.panels.index((c * self.SLOTS + slot) * (self.KEYS // PANEL * PLACES) + p))  # fmt: skip

    @jit
    def read(self, t, like, CID: gl.constexpr):
        """Tile number t of consumer CID in registers, as the scores `like` lie there, when it has arrived."""
        DTYPE: gl.constexpr = self.panels.dtype
        ROWS: gl.constexpr = self.ROWS
        KEYS: gl.constexpr = self.KEYS
        PLACES: gl.constexpr = places_of_tile(DTYPE, ROWS, KEYS)
        shape: gl.constexpr = [self.panels.shape[0] * ROWS * self.panels.shape[2] // (ROWS * KEYS), ROWS, KEYS]
        tiles = reinterpret(self.panels, DTYPE, shape, tile_layout(DTYPE, ROWS, KEYS))
        slot = t % self.SLOTS
        mbarrier.wait(self.full.index(CID * self.SLOTS + slot), (t // self.SLOTS) & 1)
        return tiles.index((CID * self.SLOTS + slot) * PLACES).load(like.type.layout)

    @jit
    def release(self, t, CID: gl.constexpr):
        """Every thread of the consumer has read its part of tile number t.

        The fence makes the next TMA writes come after these reads: a barrier among threads alone does not order the two, and
        reads that queue behind the products' operands were seen to find the tile after the next."""
        fence_async_shared()
        mbarrier.arrive(self.empty.index(CID * self.SLOTS + t % self.SLOTS), count=1)


@jit
def make_mod_pipeline(desc, step_b, step_h, ROWS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
                      CONSUMERS: gl.constexpr):  # fmt: skip
    """Rings for each consumer, with two barriers for each slot; none if ROWS is 0."""
    if ROWS == 0:
        return ModPipeline(None, None, None, None, None, None, 0, KEYS, 0, CONSUMERS)
    else:
        DTYPE: gl.constexpr = desc.dtype
        PANELS: gl.constexpr = KEYS // panel_of_tile(DTYPE, ROWS, KEYS) * places_of_tile(DTYPE, ROWS, KEYS)
        shape: gl.constexpr = [CONSUMERS * SLOTS * PANELS, ROWS, panel_of_tile(DTYPE, ROWS, KEYS)]
        panels = gl.allocate_shared_memory(DTYPE, shape, tile_layout(DTYPE, ROWS, KEYS))
        full, empty = barriers(CONSUMERS * SLOTS, 1), barriers(CONSUMERS * SLOTS, 1)
        return ModPipeline(desc, step_b, step_h, panels, full, empty, ROWS, KEYS, SLOTS, CONSUMERS)


# ---------------------------------------------------------------- the changes


@constexpr_function
def held(mods):
    """Mods as an aggregate holds them: functions are constants."""
    return gl.tuple([held(each) for each in mods.values]) if isinstance(mods, gl.tuple) else field(mods)


@constexpr_function
def reads_memory(mods):
    """Whether an argument of some of the mods, or of the rules in them, is a pointer."""
    if isinstance(mods, gl.tuple):
        return any(reads_memory(each) for each in mods.values)
    return isinstance(mods, gl.tensor) and mods.type.scalar.is_ptr()


@aggregate
class ScoreMods:
    """softcap, ALiBi, bias, score_mods, mask and mask_mods, in this order.

    SOFTCAP 0: none; 1: 1 - 2 / (1 + e^2x), two instructions of the exponential unit, right to 4e-7 of 1; 2: by one instruction,
    right to 5e-4 of the result.  Slopes [B, H] of ALiBi by their strides, or None.  KIND, PACK: of the Mask, `band`."""

    scale: gl.tensor  # of the scores, > 0
    cap: gl.tensor | gl.constexpr
    Slopes: gl.tensor | gl.constexpr
    stride_b: gl.tensor | gl.constexpr
    stride_h: gl.tensor | gl.constexpr
    bias: ModPipeline
    mask: ModPipeline
    SOFTCAP: gl.constexpr
    KIND: gl.constexpr  # of the Mask
    PACK: gl.constexpr
    scales: Scales | gl.constexpr  # of e4m3's operands, or None
    score_mods: gl.tuple | gl.constexpr  # the user's, as device.mods has them, or None
    mask_mods: gl.tuple | gl.constexpr

    @constexpr_function
    def __init__(self, scale, cap, Slopes, stride_b, stride_h, bias, mask, SOFTCAP, band, scales=None, users=((), ())):
        self.scale, self.cap, self.Slopes = scale, field(cap), field(Slopes)
        self.stride_b, self.stride_h = field(stride_b), field(stride_h)
        self.bias, self.mask, self.scales = bias, mask, field(scales)
        self.score_mods, self.mask_mods = held(users[0] or None), held(users[1] or None)
        self.SOFTCAP, self.KIND, self.PACK = gl.constexpr(SOFTCAP), gl.constexpr(band.KIND), gl.constexpr(band.PACK)

    @jit
    def load(self, t, work, row, key):
        """The producer's part: the bias and the mask of KV tile number t."""
        if self.bias.ROWS:
            self.bias.load(t, work, row, key)
        if self.mask.ROWS:
            self.mask.load(t, work, row, key)

    @jit
    def scale_of_softmax(self):
        """What brings changed scores to base 2, but for the scales of e4m3's operands."""
        if self.Slopes is not None or self.bias.ROWS or self.score_mods is not None:
            return LOG2E  # what they are added to is scaled before
        elif self.SOFTCAP:
            return self.cap * LOG2E
        else:
            return self.scale * LOG2E

    @jit
    def scale_of_tile(self, scale, work):
        """The same for a work tile."""
        if self.scales is None:
            return scale
        else:
            return scale * self.scales.of_scores(work)

    @jit
    def inner_scale(self):
        """What scores are multiplied with before the tanh of softcap."""
        if self.SOFTCAP:
            return self.scale / self.cap
        else:
            return self.scale

    @jit
    def slope(self, like, work):
        """The slope of the work tile's head, or [64, 1, 1, 1] of PACK heads; anything without ALiBi."""
        if self.Slopes is None:
            return self.scale
        else:
            begin = self.Slopes + work.sequence.to(gl.int64) * self.stride_b
            if self.PACK == 1:
                return gl.load(begin + work.head.to(gl.int64) * self.stride_h)
            else:
                parts = like.reshape([64, like.shape[1] // 8, 4, 2])
                ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
                head = work.head * self.PACK + gl.arange(0, 64, layout=ROW) % self.PACK
                slope = gl.load(begin + head.to(gl.int64) * self.stride_h)
                return gl.expand_dims(gl.expand_dims(gl.expand_dims(slope, 1), 2), 3)

    @jit
    def apply(self, s, inner, slope, t, work, row, key, partial, CID: gl.constexpr, FIRST: gl.constexpr = False):
        """Scores [64, KEYS] of rows from `row` on and keys from `key` on, KV tile number t.  With ALiBi, a bias or a score_mod
        they come out scaled, else softmax scales them.  partial: may mask_mods hide some?  FIRST: of the query tile, which may
        have no key."""
        if self.SOFTCAP:
            s = softcap(s, inner, self.SOFTCAP)
        scale = self.cap if self.SOFTCAP else self.scale
        if self.Slopes is not None:
            s = subtract_distance(s, scale, slope, row, key, work.shift, self.KIND, self.PACK)
        if self.bias.ROWS:
            s = s * (1.0 if self.Slopes is not None else scale) + self.bias.read(t, s, CID).to(gl.float32)
            self.bias.release(t, CID)  # behind the sum, so that not all of the tile has to be in registers at a time
        if self.Slopes is not None or self.bias.ROWS:
            scale = 1.0
        if self.score_mods is not None:
            place, kv_index = self.place(s, work, row, key)
            s = s * scale
            if not (FIRST and reads_memory(self.score_mods)) or work.seq_k > 0:
                s = modify(s, place, kv_index, self.score_mods).to(gl.float32)
            scale = 1.0
        if self.mask.ROWS:
            s = gl.where(self.mask.read(t, s, CID) != 0, s, float("-inf"))
            self.mask.release(t, CID)
        if self.mask_mods is not None:
            if partial:
                if not (FIRST and reads_memory(self.mask_mods)) or work.seq_k > 0:
                    if self.score_mods is None:
                        place, kv_index = self.place(s, work, row, key)
                    s = hide(s, scale, place, kv_index, self.mask_mods)
        return s

    @jit
    def place(self, s, work, row, key):
        """-> (batch, head, q_index [64, 1], (seq_q, seq_k)), kv_index [1, KEYS]: what mods get (device.mods).

        A key's index is one number of a thread and a constant of each register.  Where nothing is read by the indices, those past
        the ends stay as they are: their scores are cut or not stored."""
        KEYS: gl.constexpr = s.shape[1]
        q_index = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, s.type.layout)), 1) + row
        group, rest = columns_of(s.reshape([64, KEYS // 8, 4, 2]))
        kv_index = gl.convert_layout((group * 8 + opaque(rest + key)).reshape([1, KEYS]), s.type.layout)
        if reads_memory(self.score_mods) or reads_memory(self.mask_mods):
            q_index = gl.minimum(q_index, work.seq_q - 1)
            kv_index = gl.minimum(kv_index, work.seq_k - 1)
        return (work.sequence, work.head, q_index, (work.seq_q, work.seq_k)), kv_index


@jit
def hide(s, scale, place, kv_index, mods):
    """device.mods.mask of scores that `scale` brings to those that mods get; they stay as they are."""
    batch, head, q_index, extent = place
    for i in gl.static_range(len(mods)):
        keep = mods[i][0](s * scale, batch, head, q_index, kv_index, mods[i][1] + extent)
        gl.static_assert(keep.dtype == gl.int1, "a mask_mod has to return booleans (a comparison), not scores")
        s = gl.where(keep, s, float("-inf"))
    return s


@jit
def softcap(s, inner, SOFTCAP: gl.constexpr):
    """tanh(s * inner) [64, KEYS] (device.mods.softcap; its cap goes into the scale)."""
    if SOFTCAP == 2:
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [s * inner], dtype=gl.float32, is_pure=True,
                                         pack=1)  # fmt: skip
    else:
        return 1.0 - 2.0 * quick_reciprocal(1.0 + gl.exp2(s * (inner * (2.0 * LOG2E))))


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
