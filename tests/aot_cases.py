"""Shared by the ahead-of-time tests: a device for each target, and attention problems of a common size."""

from tilefold.plan import AttentionProblem

DEVICES = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200", "gfx942": "mi300x"}


def problem(dim: int = 128, dim_v: int | None = None, **changes: object) -> AttentionProblem:
    shape = {"batch": 2, "seq_q": 4096, "seq_k": 4096, "heads": 16, "kv_heads": 4, "dim_qk": dim, "dim_v": dim_v or dim}
    return AttentionProblem(**{**shape, **changes})  # type: ignore[arg-type]
