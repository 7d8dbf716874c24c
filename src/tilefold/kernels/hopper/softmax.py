"""The online softmax of a warpgroup's 64 rows, in its versions.

m [64] is what a row's sums are relative to (base 2), l [64, 4] are its partial sums, one for each thread of a quad.

Lazy rescaling has two versions.  SKIP: m follows a row's maximum only when that has grown by GROWTH, so that most factors of O
are 1, which warps leave out (VOTE).  LAZY, with SKIP: m is updated after a tile, by its sums; no maximum is looked for.  Where
sums exceed a limit, which may be infinite, an overflow flag has the query tile folded again, with the maxima of every tile.
"""

from .chunks import Totals
from .config import Config
from .fp8_parts import SHIFT, operand, packed
from .gluon import KEEP_NAN, aggregate, constexpr_function, field, gl, jit, quick_log2
from .parts import LOG2E, LOWEST, columns_of, quad_sums

GROWTH = gl.constexpr(8.0)  # by how much (base 2) a row's maximum may pass m
P1, P2, P3 = gl.constexpr(0.6932829), gl.constexpr(0.242211), gl.constexpr(0.055008933)  # 2^f = 1 + f * (P1 + ...)
ROUNDS = gl.constexpr(12583039.0)  # 1.5 * 2^23 + 127: added to x, it leaves round(x) + 127 in the lowest bits


@jit
def power_of_two(x):
    """2^x for x below 127 by a polynomial of degree 3 (relative error 1.0e-4, where fp16 rounds by 4.9e-4), on the FMA units and
    not the exponential one.  0 from -127 down, NaN of NaN.  An idea of FlashAttention-4's."""
    x = gl.maximum(x, -127.0, propagate_nan=KEEP_NAN)
    rounded = x + ROUNDS
    f = x - (rounded - ROUNDS)  # -0.5 to 0.5
    p = 1.0 + f * (P1 + f * (P2 + f * P3))
    return p * (rounded.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)


@jit
def exponentials(x, POLYNOMIAL: gl.constexpr):
    """2^x [64, KEYS].  POLYNOMIAL: how many of 16 groups of 8 columns by power_of_two (constants of a register: columns_of)."""
    if POLYNOMIAL == 0:
        return gl.exp2(x)
    else:
        parts = x.reshape([64, x.shape[1] // 8, 4, 2])
        group, _ = columns_of(parts)
        chosen = (group * POLYNOMIAL) % 16 < POLYNOMIAL
        made = gl.where(chosen, power_of_two(parts), gl.exp2(parts))
        return gl.convert_layout(made.reshape(x.shape), x.type.layout)


@constexpr_function
def limit_of(dtype):
    """Where sums of a tile's probabilities become too large: fp16 ends at 65504, and the accumulator takes them times V
    (2^48: up to |V| of 1e23)."""
    return 2.0**15 if dtype == gl.float16 else 2.0**48


@aggregate
class Softmax:
    """The version, and the attention sinks [H] by their stride, or None."""

    Sinks: gl.tensor | gl.constexpr
    stride_sinks: gl.tensor | gl.constexpr
    config: Config
    POLYNOMIAL: gl.constexpr
    SKIP: gl.constexpr
    LAZY: gl.constexpr
    totals: Totals | gl.constexpr  # see `chunks`, or None
    VOTE: gl.constexpr  # are warps left out of rescaling O all of whose factors are 1?

    @constexpr_function
    def __init__(self, Sinks, stride_sinks, config, POLYNOMIAL, SKIP, LAZY, totals=None):
        self.Sinks, self.stride_sinks, self.config = field(Sinks), field(stride_sinks), config
        self.totals = field(totals)
        self.POLYNOMIAL, self.SKIP, self.LAZY = gl.constexpr(POLYNOMIAL), gl.constexpr(SKIP), gl.constexpr(LAZY)
        self.VOTE = gl.constexpr(SKIP or config.BITS == 8 or config.CHUNK > 0)

    @jit
    def begin(self, like, head):
        """-> m, l before the first key.  A sink is a key with a score of its own (natural) and no value."""
        ROW: gl.constexpr = gl.SliceLayout(1, self.config.SCORES)
        m = gl.full([64], LOWEST, gl.float32, ROW)
        l = gl.zeros_like(quad_sums(like))
        if self.Sinks is not None:
            head = head * self.config.PACK + gl.arange(0, 64, layout=ROW) % self.config.PACK
            sink = gl.load(self.Sinks + head.to(gl.int64) * self.stride_sinks).to(gl.float32)
            m = gl.maximum(m, sink * LOG2E, propagate_nan=KEEP_NAN)
            seen = gl.convert_layout(gl.where(m == LOWEST, 0.0, 1.0), gl.SliceLayout(1, l.type.layout))
            first = gl.arange(0, 4, layout=gl.SliceLayout(0, l.type.layout)) == 0
            l = gl.where(gl.expand_dims(first, 0), gl.expand_dims(seen, 1), l)
        return m, l

    @jit
    def step(self, s, m, l, scale):
        """Scores [64, KEYS] -> p for `operand`, m, l, alpha [64]: what O is to be multiplied with.  scale: to base 2.

        SKIP: probabilities reach 2^8, which fp16 and bf16 hold as well as 1.  e4m3: m is SHIFT below the largest score, so that
        probabilities and sums are 2^SHIFT times as large alike; l sums them before they are rounded."""
        top = gl.max(s, 1) * scale
        if self.config.BITS == 8:
            top = top - SHIFT
        m_new = gl.maximum(m, top)
        if self.SKIP:
            m_new = gl.where(m_new - m > GROWTH, m_new, m)
        p = exponentials(s * scale - gl.expand_dims(m_new, 1), self.POLYNOMIAL)
        alpha = gl.exp2(m - m_new)
        l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + quad_sums(p)
        if self.config.BITS == 8:
            return packed(p), m_new, l, alpha
        else:
            return gl.convert_layout(p.to(self.config.DTYPE), self.config.PROBS), m_new, l, alpha

    @jit
    def operand(self, p, zero):
        """p as the left operand of the product with V.  zero: a number that is 0, as the compiler does not know."""
        if self.config.BITS == 8:
            return operand(p, zero, self.config.PROBS)
        else:
            return p

    @jit
    def step_lazily(self, s, m, m_next, l, scale):
        """`step` of LAZY: no maximum is looked for, and the exponentials wait for none.  m_next: what m was updated to since.
        -> p, m_next, l, alpha, the tile's sums."""
        p = gl.exp2(s * scale - gl.expand_dims(m_next, 1))
        alpha = gl.exp2(m - m_next)
        part = quad_sums(p)
        l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + part
        return gl.convert_layout(p.to(self.config.DTYPE), self.config.PROBS), m_next, l, alpha, part

    @jit
    def check(self, s, m, scale):
        """LAZY: m after a look at the tile's maxima.  No sum of the tile exceeds 2^13 then."""
        top = gl.max(s, 1) * scale
        return gl.where(top - m > GROWTH, top, m)

    @jit
    def update(self, part, m, worst):
        """LAZY: -> m for the next tile, and the largest sum of any, from the tile's sums (each thread's), relative to m.

        Sums of 2^8 to the limit are right as they are (a float's mantissa does not care) and raise m."""
        LIMIT: gl.constexpr = limit_of(self.config.DTYPE)
        largest = gl.convert_layout(gl.max(part, 1), m.type.layout)
        raised = (largest > 2.0**GROWTH) & (largest < LIMIT)
        return gl.where(raised, m + quick_log2(largest), m), gl.maximum(worst, largest)

    @jit
    def overflowed(self, worst, item):
        """LAZY: [64] int32, item + 1 where some tile's sum exceeded the limit, else 0."""
        LIMIT: gl.constexpr = limit_of(self.config.DTYPE)
        return gl.where(worst >= LIMIT, item + 1, 0)
