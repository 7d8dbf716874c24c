"""numerics="invariant": chunks of keys that are folded from nothing and merged in their order, as attention_invariant does.

Both kernels have the same bits: softmax, merge and end are the same functions, on tiles of the same keys, counted from the
sequence's first one, by the same wgmma, whose accumulators give a thread the same elements of a row.  What a row does not see has
the factor 1, or 0 of nothing, and adds 0.  docs/invariance.md.

O of all chunks so far lies in shared memory, as registers hold that of the present one.  Each thread has elements of its own."""

from ...device.state import LOG2E, add_sums, merge_next, partial_sums, state_weights_slowly, sum_of_quad
from .config import accumulator
from .gluon import gl, jit, scale_unless_one

TILE = gl.constexpr(64)  # keys of a tile of attention_invariant's


@jit
def make_totals(config):
    """Room for O [64, DIM_V] of each consumer.  The swizzle spreads a quad's rows over the banks."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [config.CONSUMERS, 64, config.DIM_V], LAYOUT)


@jit
def first_chunk():
    """m [64], l [64, 4] before a chunk's first key."""
    LAYOUT: gl.constexpr = accumulator(TILE)
    none = gl.zeros([64, TILE], gl.float32, LAYOUT)
    return gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT)), gl.zeros_like(partial_sums(none))


@jit
def first_total(softmax, CID: gl.constexpr, acc, head):
    """m, l of the state before the first chunk: nothing, or the sink of each row's head.  acc: 0."""
    ROW: gl.constexpr = gl.SliceLayout(1, softmax.config.OUT)
    PACK: gl.constexpr = softmax.config.PACK
    softmax.totals.index(CID).store(acc[0])
    m, l = gl.full([64], float("-inf"), gl.float32, ROW), gl.zeros([64], gl.float32, ROW)
    if softmax.Sinks is not None:
        heads = head * PACK + gl.arange(0, 64, layout=ROW) % PACK
        m = gl.load(softmax.Sinks + heads.to(gl.int64) * softmax.stride_sinks).to(gl.float32) * LOG2E
        l = gl.where(m == float("-inf"), 0.0, 1.0)
    return m, l


@jit
def step_of_tile(s, m, l, scale):
    """One tile's scores -> p, alpha, m, l."""
    p, alpha, m = state_weights_slowly(m, s, scale)
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1)
    return p, alpha, m, add_sums(l, factor, partial_sums(p))


@jit
def step_of_chunk(config, s, m, l, scale):
    """As `Softmax.step`, of the chunk's own m [64] and l [64, 4].

    attention_invariant has a_2 (a_1 O + P_1 V_1) + P_2 V_2, this a_1 a_2 O + [a_2 P_1, P_2] V.  Factors are powers of two, or 0
    of nothing, and scale a wgmma's sum exactly.  bfloat16 has fp32's exponents; float16 has not: its KEYS are one tile."""
    if config.KEYS == TILE:
        p, alpha, m, l = step_of_tile(s, m, l, scale)
    else:
        LAYOUT: gl.constexpr = accumulator(TILE)
        first, second = gl.split(s.reshape([64, 2, TILE]).permute((0, 2, 1)))
        p_1, alpha_1, m, l = step_of_tile(gl.convert_layout(first, LAYOUT), m, l, scale)
        p_2, alpha_2, m, l = step_of_tile(gl.convert_layout(second, LAYOUT), m, l, scale)
        p_1 = scale_unless_one(p_1, gl.expand_dims(alpha_2, 1))
        p = gl.convert_layout(gl.join(p_1, p_2).permute((0, 2, 1)).reshape([64, config.KEYS]), config.SCORES)
        alpha = alpha_1 * alpha_2
    return gl.convert_layout(p.to(config.DTYPE), config.PROBS), m, l, alpha


@jit
def merge_chunk(softmax, CID: gl.constexpr, total, acc, m, l):
    """O, m, l of all chunks up to this one.  total: m and l of those before."""
    OUT: gl.constexpr = softmax.config.OUT
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    before = softmax.totals.index(CID).load(OUT)
    return merge_next(
        before, total[0], total[1], acc[0], gl.convert_layout(m, ROW), gl.convert_layout(sum_of_quad(l), ROW)
    )


@jit
def keep_chunk(softmax, CID: gl.constexpr, total, acc, m, l):
    """The same, with O left in memory -> m, l."""
    merged, m, l = merge_chunk(softmax, CID, total, acc, m, l)
    softmax.totals.index(CID).store(merged)
    return m, l
