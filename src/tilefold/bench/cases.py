"""What is measured: families of attention problems, as frozen records. FLOPs come from the planner's cost and nowhere else."""

from dataclasses import dataclass

from tilefold.errors import ValueRangeError
from tilefold.plan.cost import attention_cost
from tilefold.plan.problem import AttentionProblem

__all__ = ["FAMILIES", "SIZES", "Case", "cases_of", "select_cases"]

SIZES = ("full", "quick", "tiny")

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
FAMILIES: dict[str, dict[str, tuple[Shape, ...]]] = {"dense": DENSE}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a benchmark table: a family and a problem."""

    family: str
    problem: AttentionProblem

    @property
    def name(self) -> str:
        """The name that `--case` filters and result files keep, such as "d128_h16_n16384x1_causal"."""
        p = self.problem
        heads = f"h{p.heads}" if p.heads == p.kv_heads else f"h{p.heads}k{p.kv_heads}"
        tokens = f"n{p.seq_q}" if p.seq_q == p.seq_k else f"q{p.seq_q}k{p.seq_k}"
        return f"d{p.dim_qk}_{heads}_{tokens}x{p.batch}" + ("_causal" if p.causal else "")

    @property
    def flops(self) -> int:
        """FLOPs of one call: 2 (dim_qk + dim_v) for each pair that causal leaves alive, times heads and batch."""
        return attention_cost(self.problem).flops

    @property
    def bytes(self) -> int:
        """DRAM bytes of one call with q, k, v, out and lse moved once."""
        return attention_cost(self.problem).bytes


def dense_problem(shape: Shape, causal: bool, dtype: str) -> AttentionProblem:
    """The problem of one dense shape: as many keys as queries, one KV head a query head."""
    dim, heads, tokens, batch = shape
    return AttentionProblem(batch, tokens, tokens, heads, heads, dim, dim, dtype=dtype, causal=causal)


def cases_of(family: str, size: str = "full", dtype: str = "bfloat16") -> tuple[Case, ...]:
    """The cases of a family at a size: "full" (the published shapes), "quick" (minutes on a GPU) or "tiny" (the interpreter).

    Raises ValueRangeError for an unknown family or size and DtypeError for an unknown dtype.
    """
    if family not in FAMILIES:
        raise ValueRangeError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if size not in SIZES:
        raise ValueRangeError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    return tuple(
        Case(family, dense_problem(shape, causal, dtype))
        for shape in FAMILIES[family][size]
        for causal in (False, True)
    )


def select_cases(cases: tuple[Case, ...], pattern: str | None) -> tuple[Case, ...]:
    """The cases whose name contains every part of a pattern ("d128,causal"). Raises ValueRangeError if none is left."""
    if pattern is None:
        return cases
    parts = [part.strip().lower() for part in pattern.split(",") if part.strip()]
    chosen = tuple(case for case in cases if all(part in case.name for part in parts))
    if not chosen:
        raise ValueRangeError(f"case filter {pattern!r} matches none of: {', '.join(case.name for case in cases)}")
    return chosen
