"""The products of the main loop, S = Q K^T and O += P V, over head dims of one or two tiles, and the accumulators of O."""

from .config import wide_of
from .gluon import gl, jit, scale_unless_one, wgmma, wgmma_wait
from .parts import rescale


@jit
def issue_scores(q, k, stage, nothing):
    """Issue S = Q K^T: one wgmma group for each part of the head dim.  q: Q's parts; k: the pipeline."""
    s = wgmma(q[0], k.part(stage, 0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if len(q) == 2:
        s = wgmma(q[1], k.part(stage, 1).permute((1, 0)), s, is_async=True)
    return s


@jit
def issue_output(p, v, stage, acc, REST: gl.constexpr, ADD: gl.constexpr = True):
    """Issue O += P V for each part of the head dim, or P V alone.  v: the pipeline; REST: the layout of P for the second part."""
    first = wgmma(p, _rows_of_keys(v, stage, 0), acc[0], use_acc=ADD, is_async=True)
    if len(acc) == 1:
        return (first,)
    else:
        return (
            first,
            wgmma(gl.convert_layout(p, REST), _rows_of_keys(v, stage, 1), acc[1], use_acc=ADD, is_async=True),
        )


@jit
def _rows_of_keys(v, stage, PART: gl.constexpr):
    if v.TRANSPOSED:
        return v.part(stage, PART).permute((1, 0))
    else:
        return v.part(stage, PART)


@jit
def wait_output(flying):
    """The accumulators, when every product is done."""
    if len(flying) == 1:
        return (wgmma_wait(0, deps=(flying[0],)),)
    else:
        first, second = wgmma_wait(0, deps=(flying[0], flying[1]))
        return (first, second)


@jit
def zero_output(config):
    """Accumulators [64, DIM_V]: one, or two where that is no power of two."""
    WIDE: gl.constexpr = wide_of(config.DIM_V)
    first = gl.zeros([64, WIDE], gl.float32, config.OUT)
    if config.DIM_V == WIDE:
        return (first,)
    else:
        return (first, gl.zeros([64, config.DIM_V - WIDE], gl.float32, config.OUT_REST))


@jit
def rescale_output(acc, alpha, VOTE: gl.constexpr):
    """Each accumulator times alpha [64].  VOTE: not by warps all of whose factors are 1."""
    first = _rescale(acc[0], alpha, VOTE)
    if len(acc) == 1:
        return (first,)
    else:
        return (first, _rescale(acc[1], alpha, VOTE))


@jit
def add_output(acc, more):
    """The sum of two of them."""
    if len(acc) == 1:
        return (acc[0] + more[0],)
    else:
        return (acc[0] + more[0], acc[1] + more[1])


@jit
def _rescale(acc, alpha, VOTE: gl.constexpr):
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    if VOTE:
        return scale_unless_one(acc, gl.expand_dims(gl.convert_layout(alpha, ROW), 1))
    else:
        return rescale(acc, alpha, ROW)
