"""numerics="invariant": chunks of keys that are folded from nothing and merged in their order, as attention_invariant does.

Both kernels have the same bits: softmax, merge and end are the same functions, on tiles of the same keys, counted from the
sequence's first one, by the same wgmma, whose accumulators give a thread the same elements of a row.  What a row does not see is
multiplied by 1 and adds 0.  docs/invariance.md.

O of all chunks so far lies in shared memory, as registers hold that of the present one.  Each thread has elements of its own."""

from ...device.state import LOG2E, merge_next, state_weights_slowly
from .gluon import gl, jit


@jit
def make_totals(config):
    """Room for O [64, DIM_V] of each consumer.  The swizzle spreads a quad's rows over the banks."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [config.CONSUMERS, 64, config.DIM_V], LAYOUT)


@jit
def first_chunk(config):
    """m, l [64] before a chunk's first key."""
    ROW: gl.constexpr = gl.SliceLayout(1, config.SCORES)
    return gl.full([64], float("-inf"), gl.float32, ROW), gl.zeros([64], gl.float32, ROW)


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
def step_of_chunk(config, s, m, l, scale):
    """As `Softmax.step`, of the chunk's own m and l [64]."""
    p, alpha, m, l = state_weights_slowly(m, l, s, scale)
    return gl.convert_layout(p.to(config.DTYPE), config.PROBS), m, l, alpha


@jit
def merge_chunk(softmax, CID: gl.constexpr, total, acc, m, l):
    """O, m, l of all chunks up to this one.  total: m and l of those before."""
    OUT: gl.constexpr = softmax.config.OUT
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    before = softmax.totals.index(CID).load(OUT)
    return merge_next(before, total[0], total[1], acc[0], gl.convert_layout(m, ROW), gl.convert_layout(l, ROW))


@jit
def keep_chunk(softmax, CID: gl.constexpr, total, acc, m, l):
    """The same, with O left in memory -> m, l."""
    merged, m, l = merge_chunk(softmax, CID, total, acc, m, l)
    softmax.totals.index(CID).store(merged)
    return m, l
