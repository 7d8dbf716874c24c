"""What a launch of dense attention is about: the sizes of the problem and the constants of the version."""

from .gluon import aggregate, constexpr_function, field, gl


@constexpr_function
def wide_of(dim):
    """Columns of the first tile of a head dim: the largest power of two in it.

    A tile's sides are powers of two.  Other head dims are two tiles side by side: 96 = 64 + 32, 192 = 128 + 64."""
    return 1 << (dim.bit_length() - 1)


@constexpr_function
def accumulator(columns, bits=16):
    """The layout of an accumulator [64, columns] of a warpgroup, of products of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@aggregate
class Problem:
    """Run-time sizes.  CuQ, CuK: offsets of `batch` packed sequences, else None."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
    CuQ: gl.tensor | gl.constexpr
    CuK: gl.tensor | gl.constexpr
    batch: gl.tensor | gl.constexpr
    total_q: gl.tensor | gl.constexpr

    @constexpr_function
    def __init__(self, seq_q, seq_k, heads, group, CuQ, CuK, batch, total_q):
        self.seq_q, self.seq_k, self.heads, self.group = seq_q, seq_k, heads, group
        self.CuQ, self.CuK = field(CuQ), field(CuK)
        self.batch, self.total_q = field(batch), field(total_q)


@aggregate
class Config:
    """Constants of the main loop, and the layouts of its tensors."""

    DTYPE: gl.constexpr  # of the result
    DIM_V: gl.constexpr  # columns of V that a consumer folds
    KEYS: gl.constexpr  # of a tile
    CONSUMERS: gl.constexpr  # warpgroups that fold 64 rows
    PACK: gl.constexpr  # query heads that share a tile
    VARLEN: gl.constexpr
    FENCE: gl.constexpr  # does the wait for O stay behind the softmax (`schedule_fence`)?
    LATE: gl.constexpr  # is a tile's K released with its V, not as soon as S is there?
    BITS: gl.constexpr  # of an element of K and V
    OUTSIDE: gl.constexpr  # are sums over KV tiles made outside of wgmma?
    CHUNK: gl.constexpr  # tiles of KEYS that are folded from nothing and then merged; 0: one fold (see `chunks`)
    RELOCATE: gl.constexpr  # is the work tile worked out again behind the main loop?
    SCORES: gl.constexpr  # layouts: of S [64, KEYS],
    OUT: gl.constexpr  # of the first part of O [64, DIM_V],
    OUT_REST: gl.constexpr  # of the second,
    PROBS: gl.constexpr  # and of P as the left operand of either
    PROBS_REST: gl.constexpr

    @constexpr_function
    def __init__(self, DTYPE, DIM_V, KEYS, CONSUMERS, PACK, VARLEN, FENCE, LATE, BITS=16, OUTSIDE=False, CHUNK=0):
        self.DTYPE, self.DIM_V, self.KEYS = gl.constexpr(DTYPE), gl.constexpr(DIM_V), gl.constexpr(KEYS)
        self.CONSUMERS, self.PACK, self.VARLEN = gl.constexpr(CONSUMERS), gl.constexpr(PACK), gl.constexpr(VARLEN)
        self.FENCE, self.LATE = gl.constexpr(FENCE), gl.constexpr(LATE)
        self.BITS, self.OUTSIDE = gl.constexpr(BITS), gl.constexpr(OUTSIDE)
        self.CHUNK = gl.constexpr(CHUNK)
        # what lives across the main loop takes registers that are not there
        self.RELOCATE = gl.constexpr((DIM_V > 128 or BITS == 8) and not VARLEN)
        wide = wide_of(DIM_V)
        first, rest = accumulator(wide, BITS), accumulator(DIM_V - wide or wide, BITS)
        self.SCORES = gl.constexpr(accumulator(KEYS, BITS))
        self.OUT, self.OUT_REST = gl.constexpr(first), gl.constexpr(rest)
        self.PROBS = gl.constexpr(gl.DotOperandLayout(0, first, k_width=32 // BITS))
        self.PROBS_REST = gl.constexpr(gl.DotOperandLayout(0, rest, k_width=32 // BITS))
