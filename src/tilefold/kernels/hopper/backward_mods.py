"""What changes scores in the backward kernels: softcap, ALiBi, mods that load (a bias among them), masks.  See `score_mods`.

Scores are transposed here, [64 keys, QUERIES].  A mod works element by element, so it takes them as they lie: q_index
[1, QUERIES], kv_index [64, 1] (device.mods).

dS = P (dP - delta) is by the changed score.  The gradient by the product is that times the changes' derivative.  P takes the
derivative on before dP is there, so that it has no registers of its own while dP is in flight.

A mask tensor comes with the queries: the producer issues TMA loads of a tile for each consumer, its 64 keys, at the barrier of q.
Both read theirs turned: a thread has two keys, and its columns are rows in shared memory.  The swizzle has the four rows of a
quad in different banks.
"""

from ...device.ranges import CAUSAL
from .backward_config import UNIT
from .gluon import aggregate, constexpr_function, descriptor, field, gl, jit, opaque, tma_load
from .parts import LOG2E, columns_of
from .score_mods import held, hide, places_of_tile, softcap, subtract_distance, tile_layout
from .structs import Buffer, Value, struct


@struct
class ModTiles:
    """Tiles [ROWS, 64 keys] of a mask, one for each slot of q and each consumer; ROWS QUERIES, 1 for all queries, or 0: none.

    desc [B or 1, H or 1, Sq or 1, Sk].  step_b, step_h: 1, or 0 where one tile serves all batch entries, heads."""

    desc: descriptor | gl.constexpr
    step_b: Value
    step_h: Value
    tiles: Buffer
    ROWS: gl.constexpr
    BYTES: gl.constexpr  # of a slot

    @jit
    def load(self, slot, bar, batch, head, query, key):
        """Issue the TMA loads of a tile of queries from `query` on.  What lies past the ends becomes zeros."""
        PLACES: gl.constexpr = places_of_tile(self.desc.dtype, self.ROWS, UNIT)
        first = query if self.ROWS > 1 else 0
        for c in gl.static_range(2):
            place = [batch * self.step_b, head * self.step_h, first, key + c * UNIT]
            tma_load(self.desc, place, bar, self.tiles.index((slot * 2 + c) * PLACES))

    @jit
    def read(self, slot, like, CID: gl.constexpr):
        """Consumer CID's tile of a slot, turned, as the scores `like` lie; [64, 1] where one row serves all queries."""
        PLACES: gl.constexpr = places_of_tile(self.desc.dtype, self.ROWS, UNIT)
        tile = self.tiles.index((slot * 2 + CID) * PLACES)
        if self.ROWS > 1:
            return tile.permute((1, 0)).load(like.type.layout)
        else:
            return gl.expand_dims(tile.reshape([UNIT]).load(gl.SliceLayout(1, like.type.layout)), 1)


@jit
def make_mod_tiles(desc, step_b, step_h, ROWS: gl.constexpr, SLOTS: gl.constexpr):
    """With their memory."""
    if ROWS == 0:
        return ModTiles(None, None, None, None, 0, 0)
    else:
        PLACES: gl.constexpr = places_of_tile(desc.dtype, ROWS, UNIT)
        LAYOUT: gl.constexpr = tile_layout(desc.dtype, ROWS, UNIT)
        BYTES: gl.constexpr = 2 * ROWS * UNIT * desc.dtype.primitive_bitwidth // 8
        tiles = gl.allocate_shared_memory(desc.dtype, [2 * SLOTS * PLACES, ROWS, UNIT], LAYOUT)
        return ModTiles(desc, step_b, step_h, tiles, ROWS, BYTES)


@jit
def make_softcap(scale, cap, SOFTCAP: gl.constexpr, KIND: gl.constexpr):
    """Softcap alone, or nothing."""
    return BackwardMods(scale, cap, None, None, None, (), (), make_mod_tiles(None, None, None, 0, 0), (), SOFTCAP, KIND)


@aggregate
class BackwardMods:
    """softcap, ALiBi, score_mods, mask and mask_mods, in this order; score_grads: the derivative of each score_mod, () for
    1.  A bias is the first of the score_mods, and a mask that no box reads of the mask_mods.

    SOFTCAP, Slopes [B, H] by strides: as of ScoreMods.  KIND: of the BackwardMask."""

    scale: gl.tensor  # of the scores, > 0
    cap: gl.tensor | gl.constexpr
    Slopes: gl.tensor | gl.constexpr
    stride_b: gl.tensor | gl.constexpr
    stride_h: gl.tensor | gl.constexpr
    score_mods: gl.tuple | gl.constexpr  # as device.mods has them, or None
    score_grads: gl.tuple | gl.constexpr
    mask: ModTiles
    mask_mods: gl.tuple | gl.constexpr
    SOFTCAP: gl.constexpr
    KIND: gl.constexpr
    SCORES: gl.constexpr  # are scores changed, beyond masks?
    ON: gl.constexpr  # is anything changed?
    STEEP: gl.constexpr  # may the derivative be other than 1?

    @constexpr_function
    def __init__(self, scale, cap, Slopes, stride_b, stride_h, score_mods, score_grads, mask, mask_mods, SOFTCAP, KIND):
        self.scale, self.cap, self.Slopes = scale, field(cap), field(Slopes)
        self.stride_b, self.stride_h = field(stride_b), field(stride_h)
        self.score_mods, self.mask_mods = held(score_mods or None), held(mask_mods or None)
        self.score_grads, self.mask = held(score_grads or None), mask
        self.SOFTCAP, self.KIND = gl.constexpr(SOFTCAP), gl.constexpr(KIND)
        self.STEEP = gl.constexpr(bool(SOFTCAP) or any(len(each) > 0 for each in score_grads))
        scores = bool(SOFTCAP or score_mods or isinstance(Slopes, gl.tensor))
        self.SCORES, self.ON = gl.constexpr(scores), gl.constexpr(scores or bool(mask_mods or mask.ROWS))

    @jit
    def to_base_2(self):
        """The factor that brings changed scores to base 2."""
        if self.Slopes is not None or self.score_mods is not None:
            return LOG2E
        elif self.SOFTCAP:
            return self.cap * LOG2E
        else:
            return self.scale * LOG2E

    @jit
    def capped(self, s):
        """-> products under softcap, what brings them to natural scores, the derivative."""
        if self.SOFTCAP:
            s = softcap(s, self.scale / self.cap, self.SOFTCAP)
            return s, self.cap, 1.0 - s * s
        else:
            return s, self.scale, 1.0

    @jit
    def slope(self, batch, head):
        """The slope of ALiBi of a head; anything without."""
        if self.Slopes is None:
            return self.scale
        else:
            return gl.load(self.Slopes + batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h)

    @jit
    def apply(self, s, slope, batch, head, query, key, lengths, partial, slot, CID: gl.constexpr):
        """Scores [64, QUERIES] of consumer CID's keys from `key` on and the queries of a slot, from `query` on -> changed scores,
        and the derivative.  partial: may mask_mods hide some?"""
        s, scale, steep = self.capped(s)
        if self.Slopes is not None:  # rows are keys here: a distance that has a sign has the other one
            sign: gl.constexpr = -1.0 if self.KIND == CAUSAL else 1.0
            s = subtract_distance(s, scale, slope * sign, key, query, lengths.seq_q - lengths.seq_k, self.KIND, 1)
            scale = 1.0
        if self.score_mods is not None:
            place, kv_index = self.place(s, batch, head, query, key, lengths)
            s = s * scale
            scale = 1.0
            for i in gl.static_range(len(self.score_mods)):
                args = self.score_mods[i][1] + place[3]
                if len(self.score_grads[i]) > 0:
                    steep = steep * self.score_grads[i][0](s, place[0], place[1], place[2], kv_index, args)
                s = self.score_mods[i][0](s, place[0], place[1], place[2], kv_index, args).to(gl.float32)
        if self.mask.ROWS:
            s = gl.where(self.mask.read(slot, s, CID) != 0, s, float("-inf"))
        if self.mask_mods is not None:
            if partial:
                if self.score_mods is None:
                    place, kv_index = self.place(s, batch, head, query, key, lengths)
                s = hide(s, scale, place, kv_index, self.mask_mods)
        return s, steep

    @jit
    def place(self, s, batch, head, query, key, lengths):
        """-> (batch, head, q_index [1, QUERIES], (seq_q, seq_k)), kv_index [64, 1]: what mods get (device.mods).

        Indices are inside the sequence: a derivative that is NaN past its end would enter dq as 0 * NaN."""
        QUERIES: gl.constexpr = s.shape[1]
        group, rest = columns_of(s.reshape([UNIT, QUERIES // 8, 4, 2]))
        q_index = gl.convert_layout((group * 8 + opaque(rest + query)).reshape([1, QUERIES]), s.type.layout)
        kv_index = gl.expand_dims(gl.arange(0, UNIT, layout=gl.SliceLayout(1, s.type.layout)), 1) + key
        kv_index = gl.minimum(kv_index, lengths.seq_k - 1)
        return (batch, head, gl.minimum(q_index, lengths.seq_q - 1), (lengths.seq_q, lengths.seq_k)), kv_index
