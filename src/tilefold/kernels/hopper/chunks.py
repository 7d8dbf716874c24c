"""numerics="invariant": chunks of keys that are folded from nothing and merged in their order, as attention_invariant does.

Both kernels have the same bits: softmax, merge and end are the same functions, on tiles of the same keys, counted from the
sequence's first one, by the same wgmma, whose accumulators give a thread the same elements of a row.  What a row does not see has
the factor 1, or 0 of nothing, and adds 0.  docs/invariance.md.

O of all chunks so far lies in shared memory or, where that has no room, in L2: registers hold that of the present one.  Each
thread has elements of its own."""

from ...device.state import LOG2E, add_sums, merge_next, partial_sums, state_weights_slowly, sum_of_quad
from .config import accumulator, wide_of
from .gluon import aggregate, constexpr_function, field, gl, jit, scale_unless_one


@aggregate
class Totals:
    """Room for O [64, DIM_V] of each consumer: buffers for its first and its second part, or None; Sums [programs, CONSUMERS, 64,
    DIM_V] fp32 for those without, or None.  TILE: keys of attention_invariant's tiles."""

    first: gl.shared_memory_descriptor | gl.constexpr
    rest: gl.shared_memory_descriptor | gl.constexpr
    Sums: gl.tensor | gl.constexpr
    TILE: gl.constexpr

    @constexpr_function
    def __init__(self, first, rest, Sums, TILE):
        self.first, self.rest, self.Sums = field(first), field(rest), field(Sums)
        self.TILE = gl.constexpr(TILE)

    @jit
    def load(self, config, CID: gl.constexpr, PART: gl.constexpr):
        """A consumer's part 0 or 1 of O, as its accumulator lies."""
        LAYOUT: gl.constexpr = config.OUT if PART == 0 else config.OUT_REST
        room = self.first if PART == 0 else self.rest
        if room is None:
            return gl.load(self._places(config, CID, PART), cache_modifier=".cg")
        else:
            return room.index(CID).load(LAYOUT)

    @jit
    def store(self, config, CID: gl.constexpr, PART: gl.constexpr, part):
        """What `load` brings later."""
        room = self.first if PART == 0 else self.rest
        if room is None:
            gl.store(self._places(config, CID, PART), part)
        else:
            room.index(CID).store(part)

    @jit
    def _places(self, config, CID: gl.constexpr, PART: gl.constexpr):
        WIDE: gl.constexpr = wide_of(config.DIM_V)
        COLUMNS: gl.constexpr = WIDE if PART == 0 else config.DIM_V - WIDE
        LAYOUT: gl.constexpr = config.OUT if PART == 0 else config.OUT_REST
        rows = (gl.program_id(0) * config.CONSUMERS + CID) * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        columns = PART * WIDE + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        return self.Sums + (gl.expand_dims(rows, 1) * config.DIM_V + gl.expand_dims(columns, 0))


@jit
def make_totals(config, Sums, SHARED: gl.constexpr, TILE: gl.constexpr):
    """SHARED: columns of O that lie in shared memory: all, those of the first part, or 0.  See `Totals`."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])  # spreads a quad's rows over the banks
    WIDE: gl.constexpr = wide_of(config.DIM_V)
    if SHARED == 0:
        return Totals(None, None, Sums, TILE)
    else:
        first = gl.allocate_shared_memory(gl.float32, [config.CONSUMERS, 64, WIDE], LAYOUT)
        if SHARED == WIDE:
            return Totals(first, None, Sums, TILE)
        else:
            rest = gl.allocate_shared_memory(gl.float32, [config.CONSUMERS, 64, config.DIM_V - WIDE], LAYOUT)
            return Totals(first, rest, Sums, TILE)


@jit
def first_chunk(softmax):
    """m [64], l [64, 4] before a chunk's first key."""
    TILE: gl.constexpr = softmax.totals.TILE
    LAYOUT: gl.constexpr = accumulator(TILE)
    none = gl.zeros([64, TILE], gl.float32, LAYOUT)
    return gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT)), gl.zeros_like(partial_sums(none))


@jit
def first_total(softmax, CID: gl.constexpr, acc, head):
    """m, l of the state before the first chunk: nothing, or the sink of each row's head.  acc: 0."""
    ROW: gl.constexpr = gl.SliceLayout(1, softmax.config.OUT)
    PACK: gl.constexpr = softmax.config.PACK
    _store_parts(softmax, CID, acc)
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
def step_of_chunk(softmax, s, m, l, scale):
    """As `Softmax.step`, of the chunk's own m [64] and l [64, 4].

    attention_invariant has a_2 (a_1 O + P_1 V_1) + P_2 V_2, this a_1 a_2 O + [a_2 P_1, P_2] V.  Factors are powers of two, or 0
    of nothing, and scale a wgmma's sum exactly.  bfloat16 has fp32's exponents; float16 has not: its KEYS are one tile."""
    config = softmax.config
    TILE: gl.constexpr = softmax.totals.TILE
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
    l = sum_of_quad(l)
    first, m_new, l_new = _merge_part(softmax, CID, 0, total, acc[0], m, l)
    if len(acc) == 1:
        return (first,), m_new, l_new
    else:
        rest, _, _ = _merge_part(softmax, CID, 1, total, acc[1], m, l)
        return (first, rest), m_new, l_new


@jit
def keep_chunk(softmax, CID: gl.constexpr, total, acc, m, l):
    """The same, with O left in memory -> m, l."""
    acc, m, l = merge_chunk(softmax, CID, total, acc, m, l)
    _store_parts(softmax, CID, acc)
    return m, l


@jit
def _merge_part(softmax, CID: gl.constexpr, PART: gl.constexpr, total, acc, m, l):
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    m_before, l_before = gl.convert_layout(total[0], ROW), gl.convert_layout(total[1], ROW)
    before = softmax.totals.load(softmax.config, CID, PART)
    return merge_next(before, m_before, l_before, acc, gl.convert_layout(m, ROW), gl.convert_layout(l, ROW))


@jit
def _store_parts(softmax, CID: gl.constexpr, acc):
    for part in gl.static_range(len(acc)):
        softmax.totals.store(softmax.config, CID, part, acc[part])
