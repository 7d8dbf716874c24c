"""What changes scores in the backward kernels: softcap, ALiBi, the user's score_mod and mask_mods.  See `score_mods`.

Scores are transposed here, [64 keys, QUERIES].  A mod works element by element, so it takes them as they lie: q_index
[1, QUERIES], kv_index [64, 1] (device.mods).

dS = P (dP - delta) is by the changed score.  The gradient by the product is that times the changes' derivative.  P takes the
derivative on before dP is there, so that it has no registers of its own while dP is in flight.
"""

from ...device.ranges import CAUSAL
from .backward_config import UNIT
from .gluon import aggregate, constexpr_function, field, gl, jit, opaque
from .parts import LOG2E, columns_of
from .score_mods import held, hide, softcap, subtract_distance


@aggregate
class BackwardMods:
    """softcap, ALiBi, score_mods and mask_mods, in this order; score_grads: a derivative of each score_mod.

    SOFTCAP, Slopes [B, H] by strides: as of ScoreMods.  KIND: of the BackwardMask."""

    scale: gl.tensor  # of the scores, > 0
    cap: gl.tensor | gl.constexpr
    Slopes: gl.tensor | gl.constexpr
    stride_b: gl.tensor | gl.constexpr
    stride_h: gl.tensor | gl.constexpr
    score_mods: gl.tuple | gl.constexpr  # as device.mods has them, or None
    score_grads: gl.tuple | gl.constexpr
    mask_mods: gl.tuple | gl.constexpr
    SOFTCAP: gl.constexpr
    KIND: gl.constexpr
    ON: gl.constexpr  # is anything changed?
    STEEP: gl.constexpr  # may the derivative be other than 1?

    @constexpr_function
    def __init__(self, scale, cap, Slopes, stride_b, stride_h, score_mods, score_grads, mask_mods, SOFTCAP, KIND):
        self.scale, self.cap, self.Slopes = scale, field(cap), field(Slopes)
        self.stride_b, self.stride_h = field(stride_b), field(stride_h)
        self.score_mods, self.mask_mods = held(score_mods or None), held(mask_mods or None)
        self.score_grads = held(score_grads or None)
        self.SOFTCAP, self.KIND = gl.constexpr(SOFTCAP), gl.constexpr(KIND)
        self.STEEP = gl.constexpr(bool(SOFTCAP or score_mods))
        self.ON = gl.constexpr(bool(SOFTCAP or score_mods or mask_mods or isinstance(Slopes, gl.tensor)))

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
    def slope(self, batch, head):
        """The slope of ALiBi of a head; anything without."""
        if self.Slopes is None:
            return self.scale
        else:
            return gl.load(self.Slopes + batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h)

    @jit
    def apply(self, s, slope, batch, head, query, key, lengths):
        """Scores [64, QUERIES] of keys from `key` on and queries from `query` on -> changed scores, and the derivative."""
        scale = self.scale
        steep = 1.0
        if self.SOFTCAP:
            s = softcap(s, self.scale / self.cap, self.SOFTCAP)
            scale = self.cap
            steep = 1.0 - s * s
        if (
            self.Slopes is not None
        ):  # rows are keys here: a distance without a sign is that of the forward pass, else its opposite
            sign: gl.constexpr = -1.0 if self.KIND == CAUSAL else 1.0
            s = subtract_distance(s, scale, slope * sign, key, query, lengths.seq_q - lengths.seq_k, self.KIND, 1)
            scale = 1.0
        if self.score_mods is not None or self.mask_mods is not None:
            place, kv_index = self.place(s, batch, head, query, key, lengths)
        if self.score_mods is not None:
            s = s * scale
            scale = 1.0
            for i in gl.static_range(len(self.score_mods)):
                args = self.score_mods[i][1] + place[3]
                steep = steep * self.score_grads[i][0](s, place[0], place[1], place[2], kv_index, args)
                s = self.score_mods[i][0](s, place[0], place[1], place[2], kv_index, args).to(gl.float32)
        if self.mask_mods is not None:
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
