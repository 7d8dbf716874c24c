"""numerics="invariant": chunks of keys that are folded from nothing and merged in their order, as attention_invariant does.

Both kernels have the same bits: softmax, merge and end are its functions, on tiles of the same keys, counted from the sequence's
first one, by the same wgmma, whose accumulators give a thread the same elements of a row.  What a row does not see is multiplied
by 1 and adds 0.  docs/invariance.md."""

from ...device.state import LOG2E, state_weights
from ..cache.attention_invariant import merge_next
from .gluon import gl, jit


@jit
def first_chunk(config):
    """m, l [64] before a chunk's first key."""
    ROW: gl.constexpr = gl.SliceLayout(1, config.SCORES)
    return gl.full([64], float("-inf"), gl.float32, ROW), gl.zeros([64], gl.float32, ROW)


@jit
def first_total(softmax, acc, head):
    """The state (O, m, l) before the first chunk: nothing, or the sink of each row's head."""
    ROW: gl.constexpr = gl.SliceLayout(1, softmax.config.OUT)
    PACK: gl.constexpr = softmax.config.PACK
    m, l = gl.full([64], float("-inf"), gl.float32, ROW), gl.zeros([64], gl.float32, ROW)
    if softmax.Sinks is not None:
        heads = head * PACK + gl.arange(0, 64, layout=ROW) % PACK
        m = gl.load(softmax.Sinks + heads.to(gl.int64) * softmax.stride_sinks).to(gl.float32) * LOG2E
        l = gl.where(m == float("-inf"), 0.0, 1.0)
    return acc[0], m, l


@jit
def step_of_chunk(config, s, m, l, scale):
    """As `Softmax.step`, of the chunk's own m and l [64]."""
    p, alpha, m, l = state_weights(m, l, s, scale)
    return gl.convert_layout(p.to(config.DTYPE), config.PROBS), m, l, alpha


@jit
def merge_chunk(config, total, acc, m, l):
    """The state of all chunks up to this one."""
    ROW: gl.constexpr = gl.SliceLayout(1, config.OUT)
    return merge_next(total[0], total[1], total[2], acc[0], gl.convert_layout(m, ROW), gl.convert_layout(l, ROW))
