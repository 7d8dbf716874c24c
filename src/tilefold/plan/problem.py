"""The attention problem: what a call asks for, as a hashable value without tensors."""

from dataclasses import dataclass
from functools import cache
from operator import attrgetter

from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.plan.base import require_equal

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_HEAD_DIM, NARROW_HEAD_DIM = 512, 256  # of dense, packed and cached attention; of all else

_SIZES = ("batch", "seq_q", "seq_k", "mean_q", "heads", "kv_heads", "dim_qk", "dim_v")
_TILES = ("", "tiles", "keys")
_FLAGS = ("causal", "varlen", "sinks", "descriptors", "query_descriptors", "dropout", "mask_by_place")
_sizes_of, _flags_of = attrgetter(*_SIZES), attrgetter(*_FLAGS)


@cache  # a plan asks dozens of times
def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for n <= 1)."""
    return 1 if n <= 1 else 1 << (n - 1).bit_length()


@cache
def padded_head_dim(dim: int) -> int:
    """The width of a tile that holds a head dimension: a power of two, at least 16 as tensor cores need."""
    return max(16, next_power_of_two(dim))


@cache
def mean_of(total_q: int, batch: int) -> int:
    """`mean_q` of a packed batch of so many queries: a few values, so that batches share plans."""
    return next_power_of_two(-(-total_q // max(1, batch)))


SWIZZLED = 64  # columns of 16 bits in the widest swizzle of shared memory, 128 bytes


@cache
def padded_value_dim(dim_v: int, dim_qk: int) -> int:
    """Width of a tile of V: at least K's, up to the columns of one swizzle.

    A tile of V whose rows are swizzled less than K's goes wrong under ptxas 12.8 (Triton 3.6's): where both tiles go through
    registers to the same shared memory, the descriptors of their products differ in the swizzle alone, and the assembler adds
    V's to a uniform register that nobody wrote.  ptxas 12.9 and newer are right; `tilefold.aot.sass.undefined_registers` looks
    for it."""
    return max(padded_head_dim(dim_v), min(padded_head_dim(dim_qk), SWIZZLED))


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call: sizes, dtype, mask and modifications. Checked when made; equal problems get equal plans.

    batch, heads, kv_heads: counts; each KV head serves heads / kv_heads query heads.
    seq_q, seq_k: numbers of queries and keys (tokens); for a packed batch (`varlen`) the largest over its sequences.
    mean_q: of a packed batch, queries of a sequence in the mean, rounded up to a power of two; 0 where that is not known.
    dim_qk, dim_v: head dimension of Q and K, and of V and the output (elements).
    dtype: "float16", "bfloat16" or "float32", of q, k, v and the output. The lse is always float32.
    causal: query i sees keys up to i + seq_k - seq_q (aligned to the bottom right).
    window: (left, right), how many keys a query sees on either side of its own position, inclusive; -1 is unbounded.
    score_mods, mask_mods: names of the modifications in the order in which they are applied, such as
        ("softcap", "alibi", "bias", "user") and ("prefix", "mask", "user"); a "prefix" is a band: tiles past it are skipped.
    sinks: a learned score per head joins each softmax.
    descriptors: K and V can be read by tensor descriptors (16-byte aligned base and strides); query_descriptors: Q can.
    dropout: probabilities are dropped at random.
    bias_descriptors, mask_descriptors: how descriptors can read the bias and the mask: "tiles" of queries and keys, "keys"
        where one row serves all queries, or "" if they cannot.
    mask_by_place: tiles can be classified beforehand: by the "user" among mask_mods, which looks at indices alone, not at scores;
        without one by the "mask", which some heads share.

    Raises ShapeError (sizes), DtypeError (dtype, or a value of the wrong type), ValueRangeError (window, names).
    """

    batch: int
    seq_q: int
    seq_k: int
    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    varlen: bool = False
    score_mods: tuple[str, ...] = ()
    mask_mods: tuple[str, ...] = ()
    sinks: bool = False
    descriptors: bool = True
    query_descriptors: bool = True
    dropout: bool = False
    bias_descriptors: str = ""
    mask_descriptors: str = ""
    mask_by_place: bool = False
    mean_q: int = 0

    def __hash__(self) -> int:
        return hash((self.batch, self.seq_q, self.seq_k, self.heads, self.causal, self.window))  # tables ask often

    def __post_init__(self) -> None:
        self._check_sizes()
        if {*map(type, _flags_of(self))} != {bool}:
            name = next(name for name in _FLAGS if type(getattr(self, name)) is not bool)
            raise DtypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.dtype not in DTYPE_BYTES:
            raise DtypeError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        self._check_window()
        for name in ("score_mods", "mask_mods"):
            mods = getattr(self, name)
            if type(mods) is not tuple or not all(type(mod) is str and mod for mod in mods):
                raise ValueRangeError(f"{name} must be a tuple of names, such as ('softcap',), got {mods!r}")
        for name in ("bias_descriptors", "mask_descriptors"):
            if getattr(self, name) not in _TILES:
                raise ValueRangeError(f"{name} must be 'tiles', 'keys' or '', got {getattr(self, name)!r}")

    def _check_sizes(self) -> None:
        sizes = _sizes_of(self)
        if {*map(type, sizes)} != {int}:
            name, value = next(pair for pair in zip(_SIZES, sizes, strict=True) if type(pair[1]) is not int)
            raise DtypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
        for least, first, end in ((0, 0, 4), (1, 4, 8)):
            if (value := min(sizes[first:end])) < least:
                raise ShapeError(f"{_SIZES[sizes.index(value, first)]} must be at least {least}, got {value}")
        if self.mean_q and not self.varlen:
            raise ShapeError(f"mean_q is a packed batch's, got {self.mean_q} without varlen")
        if self.heads % self.kv_heads:
            raise ShapeError(f"kv_heads must divide heads, got kv_heads={self.kv_heads} and heads={self.heads}")

    def _check_window(self) -> None:
        window = self.window
        if type(window) is not tuple or len(window) != 2 or {*map(type, window)} != {int}:
            raise ValueRangeError(f"window must be a tuple (left, right) of two integers, got {window!r}")
        if min(window) < -1:
            raise ValueRangeError(
                f"window must be (left, right) with sides of at least 0, or -1 for unbounded, got {window!r}"
            )

    def of_lengths(self, seq_q: int, seq_k: int, mean_q: int = 0) -> "AttentionProblem":
        """The same problem with other lengths, of at least 0; nothing is checked again."""
        made = object.__new__(AttentionProblem)
        made.__dict__.update(self.__dict__, seq_q=seq_q, seq_k=seq_k, mean_q=mean_q)
        return made

    def require_same(self, other: "AttentionProblem") -> None:
        """PlanError, naming the field, unless a plan made for this problem serves `other`; what descriptors can read may differ,
        and is for the kernel's own limits, and so may the mean of a packed batch."""
        names = (name for name in self.__dataclass_fields__ if not name.endswith("descriptors") and name != "mean_q")
        require_equal(self, other, tuple(names))

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def block_qk(self) -> int:
        """Width of a tile of Q or K (elements)."""
        return padded_head_dim(self.dim_qk)

    @property
    def block_v(self) -> int:
        """Width of a tile of V or the output (elements)."""
        return padded_value_dim(self.dim_v, self.dim_qk)

    @property
    def itemsize(self) -> int:
        """Bytes per element of q, k, v and the output."""
        return DTYPE_BYTES[self.dtype]

    @property
    def sides(self) -> tuple[int, int]:
        """The window with the causal mask folded in: (left, right), -1 for unbounded."""
        left, right = self.window
        return left, (0 if self.causal else right)

    @property
    def band(self) -> str:
        """The first mask where it is a band whose tiles are skipped, as causal and window are; "" for none."""
        return self.mask_mods[0] if self.mask_mods and self.mask_mods[0] not in ("mask", "user") else ""

    @property
    def plain(self) -> bool:
        """Whether the scores are only scaled and cut (causal, window): no modification, no sinks, no dropout."""
        return self.unchanged and not self.sinks

    @property
    def unchanged(self) -> bool:
        """`plain`, but for sinks: dq, dk and dv know them from lse alone."""
        return not (self.score_mods or self.mask_mods or self.dropout)
