"""What is measured: families of attention problems, as frozen records. FLOPs come from the planner's cost and nowhere else."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.bench.attention.lists import Pattern, density, kept_counts, listed_blocks, touched_blocks
from tilefold.errors import ValueRangeError
from tilefold.plan.cost import attention_cost
from tilefold.plan.problem import AttentionProblem

SIZES = ("full", "quick", "tiny")
DIRECTIONS = ("forward", "backward", "both")
# Matrix products of a backward over those of a forward: S and dP again, dV, dK and dQ, against S and O.
BACKWARD = (5, 2)
# So many query blocks and fewer are a decoding step: measured as CUDA-graph replays, too, and forward only.
FEW_BLOCKS = 2


# (head dim, heads, tokens, batch)
Shape = tuple[int, int, int, int]

# The shapes of flash-attention's own benchmark: 2048 / D heads and 16384 tokens in all. Compared numbers use the same ones.
DENSE: dict[str, tuple[Shape, ...]] = {
    "full": (
        (128, 16, 16384, 1),
        (128, 16, 4096, 4),
        (128, 16, 1024, 16),
        (64, 32, 16384, 1),
        (64, 32, 4096, 4),
        (256, 8, 16384, 1),
    ),
    "quick": ((128, 16, 4096, 4), (64, 32, 4096, 4), (256, 8, 4096, 4)),
    # For the interpreter, which does about a fifth of a GFLOP a second.
    "tiny": ((128, 1, 128, 1), (64, 2, 128, 1), (32, 2, 100, 2)),
}


def lognormal_lengths(count: int, mean: int, sigma: float = 0.8, seed: int = 3) -> tuple[int, ...]:
    """Lengths of `count` sequences, lognormal with that mean, the same everywhere: as documents of a training batch are."""
    draw = random.Random(seed)
    found = [draw.lognormvariate(0.0, sigma) for _ in range(count)]
    return tuple(max(1, round(each * mean * count / sum(found))) for each in found)


# Beside the published ones: from short to long, few KV heads, a window, and packed sequences of unequal lengths.
MORE_SHAPES: tuple[Shape, ...] = tuple(
    (dim, heads, tokens, max(1, 16384 // tokens))
    for dim, heads in ((128, 16), (64, 32))
    for tokens in (512, 1024, 2048, 8192, 65536)
    if (dim, tokens) != (128, 1024)
)
WINDOW = (4095, 0)
PACKED = lognormal_lengths(64, 1024)
TINY_PACKED = (33, 1, 0, 40)

# A video transformer's attention: 12 heads over a latent video of 16 x 28 x 52 tokens, 364 blocks of 64.
VIDEO = AttentionProblem(1, 23296, 23296, 12, 12, 128, 128)
DECODE = replace(VIDEO, seq_q=64)
TINY = AttentionProblem(1, 256, 256, 2, 1, 32, 32)
TINY_LATENT = (4, 8, 8)

Sparse = tuple[AttentionProblem, Pattern]
SPARSE: dict[str, tuple[Sparse, ...]] = {
    "full": (
        *((VIDEO, Pattern("random", sparsity)) for sparsity in (50, 65.1, 80, 90, 99)),
        *((VIDEO, Pattern("video", sparsity)) for sparsity in (65.1, 80, 90)),
        (VIDEO, Pattern("uneven")),
        (DECODE, Pattern("random", 9.9)),  # 328 of 364 blocks
        (DECODE, Pattern("random", 90)),  # 36
        (replace(VIDEO, kv_heads=3), Pattern("random", 80)),
        (replace(VIDEO, dim_qk=64, dim_v=64), Pattern("random", 80)),
        (replace(VIDEO, dtype="float16"), Pattern("random", 80)),
        *((VIDEO, Pattern("random", sparsity, 128, 128)) for sparsity in (50, 80, 90)),
        # Few enough blocks left out for dense attention to win: between them and 50 % lies the crossing.
        *((VIDEO, Pattern("random", sparsity)) for sparsity in (0, 25)),
        (replace(VIDEO, batch=4), Pattern("random", 80)),
    ),
    "quick": (
        *((VIDEO, Pattern("random", sparsity)) for sparsity in (50, 90)),
        (VIDEO, Pattern("video", 80)),
        (VIDEO, Pattern("uneven")),
        (DECODE, Pattern("random", 90)),
    ),
    "tiny": (
        (TINY, Pattern("random", 50, 64, 64)),
        (TINY, Pattern("video", 50, latent=TINY_LATENT)),
        (replace(TINY, seq_q=70, seq_k=200, batch=2), Pattern("uneven", 0, 32, 64)),
    ),
}
FAMILIES = ("dense", "sparse")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a benchmark table: a family, a problem, for "sparse" the pattern of its lists, and which way it is computed.

    backward: the gradients of q, k and v from that of the output are what is timed, and the forward is not.
    lengths: of a packed batch (problem.varlen), as many queries as keys in each sequence; else empty.
    """

    family: str
    problem: AttentionProblem
    pattern: Pattern | None = None
    backward: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name that `--case` filters and result files keep, such as "d128_h16_n16384x1_causal"."""
        p = self.problem
        heads = f"h{p.heads}" if p.heads == p.kv_heads else f"h{p.heads}k{p.kv_heads}"
        tokens = f"n{p.seq_q}" if p.seq_q == p.seq_k else f"q{p.seq_q}k{p.seq_k}"
        name = f"d{p.dim_qk}_{heads}_" + (f"packed{p.batch}" if self.lengths else f"{tokens}x{p.batch}")
        name += "_causal" if p.causal else ""
        name += "_window{}_{}".format(*p.window) if p.window != (-1, -1) else ""
        if self.pattern is not None:
            name += f"_{self.pattern.name}" + ("" if p.dtype == "bfloat16" else f"_{p.dtype}")
        return name + ("_backward" if self.backward else "")

    @property
    def dtype(self) -> str:
        return self.problem.dtype

    @property
    def direction(self) -> str:
        return "backward" if self.backward else "forward"

    @property
    def flops(self) -> int:
        """FLOPs of one call: 2 (dim_qk + dim_v) for each pair that causal leaves alive or a list names, times heads and batch;
        backward 2.5 times that."""
        p, whole = self.problem, sum(attention_cost(one).flops for one in self.sequences)
        if self.pattern is not None:
            # Every pair of blocks counts as a whole one, as the published figures do; tails make it an upper estimate.
            listed = listed_blocks(self.pattern, p) * self.pattern.block_q * self.pattern.block_k
            whole = 2 * (p.dim_qk + p.dim_v) * listed
        return whole * BACKWARD[0] // BACKWARD[1] if self.backward else whole

    @property
    def bytes(self) -> int:
        """DRAM bytes of one call with q, out, lse and the k and v that some query sees moved once; backward with the gradients
        of each and of the output, too."""
        p, moved = self.problem, sum(attention_cost(one).bytes for one in self.sequences)
        if self.pattern is not None:
            row = (p.dim_qk + p.dim_v) * p.itemsize
            unseen = p.seq_k * p.batch * p.kv_heads - touched_blocks(self.pattern, p) * self.pattern.block_k
            moved -= max(0, unseen) * row
        return 2 * moved if self.backward else moved

    @property
    def sequences(self) -> tuple[AttentionProblem, ...]:
        """The problem, or those of a packed batch's sequences."""
        if not self.lengths:
            return (self.problem,)
        return tuple(replace(self.problem, batch=1, seq_q=n, seq_k=n, varlen=False) for n in self.lengths)

    @property
    def density(self) -> float:
        """The share of all pairs of blocks that the lists name, 0 to 1; 1 without lists."""
        return 1.0 if self.pattern is None else density(self.pattern, self.problem)

    @property
    def kept(self) -> str:
        """How many KV blocks a list keeps, of how many: "73/364", "1-364/364"; "" without lists."""
        if self.pattern is None:
            return ""
        total = -(-self.problem.seq_k // self.pattern.block_k)
        least, most = kept_counts(self.pattern, self.problem)
        return f"{least}/{total}" if least == most else f"{least}-{most}/{total}"

    @property
    def replayed(self) -> bool:
        """Whether this is a decoding step, which runs from CUDA graphs in practice: measured as replays even unasked."""
        return self.pattern is not None and self.problem.seq_q <= FEW_BLOCKS * self.pattern.block_q < self.problem.seq_k


def dense_problem(shape: Shape, causal: bool, dtype: str) -> AttentionProblem:
    """The problem of one dense shape: as many keys as queries, one KV head a query head."""
    dim, heads, tokens, batch = shape
    return AttentionProblem(batch, tokens, tokens, heads, heads, dim, dim, dtype=dtype, causal=causal)


def cases_of(
    family: str,
    size: str = "full",
    dtype: str = "bfloat16",
    direction: str = "forward",
    sparsities: tuple[float, ...] = (),
) -> tuple[Case, ...]:
    """The cases of a family at a size: "full" (the published shapes), "quick" (minutes on a GPU) or "tiny" (without a GPU).

    direction: "forward", "backward" (without decoding steps) or "both", all forward cases first.
    sparsities: of "sparse" in place of its cases: random lists at each, in per cent, over the video's tokens ("tiny": over few).
    Raises ValueRangeError for an unknown family, size or direction and DtypeError for an unknown dtype.
    """
    for name, value, known in (
        ("family", family, FAMILIES),
        ("size", size, SIZES),
        ("direction", direction, DIRECTIONS),
    ):
        if value not in known:
            raise ValueRangeError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if family == "dense":
        found = _dense_cases(size, dtype)
    elif sparsities:
        problem = replace(TINY if size == "tiny" else VIDEO, dtype=dtype)
        found = (Case("sparse", problem, Pattern("random", sparsity)) for sparsity in sparsities)
    else:
        found = _sparse_cases(size, dtype)
    forward = tuple(dict.fromkeys(found))
    backward = tuple(replace(case, backward=True) for case in forward if not case.replayed)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def packed_case(dim: int, heads: int, lengths: tuple[int, ...], causal: bool, dtype: str) -> Case:
    """A packed batch of sequences, each attending itself."""
    shape = dim, heads, max(lengths), len(lengths)
    return Case("dense", replace(dense_problem(shape, causal, dtype), varlen=True), lengths=lengths)


def _dense_cases(size: str, dtype: str) -> Iterator[Case]:
    more = MORE_SHAPES if size == "full" else ()
    for shape in (*DENSE[size], *more):
        for causal in (False, True):
            yield Case("dense", dense_problem(shape, causal, dtype))
    if size == "quick":
        return
    tiny = size == "tiny"
    for shape in ((32, 1, 60, 1),) if tiny else ((128, 16, 16384, 1), (64, 32, 16384, 1)):
        yield Case("dense", replace(dense_problem(shape, False, dtype), window=(20, 0) if tiny else WINDOW))
    for causal in (False, True):
        grouped = (32, 4, 40, 1) if tiny else (128, 32, 8192, 2)
        yield Case("dense", replace(dense_problem(grouped, causal, dtype), kv_heads=grouped[1] // 4 if tiny else 4))
        for dim, heads in ((32, 1),) if tiny else ((128, 16), (64, 32)):
            yield packed_case(dim, heads, TINY_PACKED if tiny else PACKED, causal, dtype)


def _sparse_cases(size: str, dtype: str) -> Iterator[Case]:
    """In the dtype asked for; a problem that names one of its own other than bfloat16 keeps it."""
    for problem, pattern in SPARSE[size]:
        own = problem.dtype != "bfloat16"
        yield Case("sparse", problem if own else replace(problem, dtype=dtype), pattern)
