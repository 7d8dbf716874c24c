"""What the kernels of one rank take for themselves while they run under a plan of context parallelism, by their own plans."""

from tilefold.errors import TilefoldError

from .attention_backward import plan_attention_backward
from .device import Device
from .parallel import ParallelPlan, memory_with
from .problem import AttentionProblem

__all__ = ["calls_of", "memory_on", "scratch_of"]


def calls_of(plan: ParallelPlan) -> tuple[AttentionProblem, ...]:
    """The largest calls of a rank: of its own keys, and of others'; of one sequence, packed ones counted as one."""
    n = plan.problem
    own_q, own_k = (max(1, -(-rows // plan.ring)) for rows in (n.seq_q, n.seq_k))
    half = n.window == (-1, 0) and n.kind == "zigzag"  # one half of the queries sees all of the others' keys
    others = {"ring": 1, "two_level": 1, "all_gather": plan.ring - 1}.get(plan.scheme, 0) if plan.ring > 1 else 0
    heads, kv_heads = n.heads // plan.heads, max(1, n.kv_heads // plan.heads)
    causal = n.window == (-1, 0)
    window = (-1, -1) if causal else n.window

    def call(rows: int, keys: int, causal: bool, window: tuple[int, int]) -> AttentionProblem:
        return AttentionProblem(
            n.batch, rows, keys, heads, kv_heads, n.dim_qk, n.dim_v, n.dtype, causal=causal, window=window
        )

    found = [call(own_q, own_k, causal, window)]
    if others:
        found.append(call(max(1, own_q // 2) if half else own_q, others * own_k, False, (-1, -1)))
    return tuple(found)


def scratch_of(plan: ParallelPlan, device: Device) -> int:
    """Bytes, 0 without a backward pass and for dtypes or sizes that no kernel serves."""
    if not plan.problem.backward or plan.problem.dtype == "float64":
        return 0
    try:
        return max(plan_attention_backward(call, device).scratch_bytes for call in calls_of(plan))
    except TilefoldError:
        return 0


def memory_on(plan: ParallelPlan, device: Device) -> tuple[float, int]:
    """(bytes of memory at the worst moment, of which so many are the kernels' own)."""
    scratch = scratch_of(plan, device)
    return memory_with(plan, scratch), scratch
