"""What the kernels of one rank take for themselves while they run under a plan of context parallelism, by their own plans."""

from tilefold.errors import TilefoldError

from .attention_backward import plan_attention_backward
from .device import Device
from .parallel import ParallelPlan
from .parallel_cost import memory_bytes
from .problem import AttentionProblem

__all__ = ["calls_of", "memory_on"]


def calls_of(plan: ParallelPlan) -> tuple[AttentionProblem, ...]:
    """The largest calls of a rank: of its own keys, and of others'; of one sequence, packed ones counted as one."""
    n = plan.problem
    own_q, own_k = (max(1, -(-rows // plan.ring)) for rows in (n.seq_q, n.seq_k))
    half = (
        n.window == (-1, 0) and n.kind == "zigzag"
    )  # half of the queries sees all of the others' keys, or all see half
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
        keys = others * own_k
        shapes = [(max(1, own_q // 2), keys), (own_q, max(1, keys // 2))] if half else [(own_q, keys)]
        found += [call(rows, columns, False, (-1, -1)) for rows, columns in shapes]
    return tuple(found)


def _run(n: AttentionProblem, device: Device) -> tuple[int, int, int]:
    """(bytes that the backward kernel of a call takes beyond the gradients that a summand is returned as; the same and those
    gradients in the dtype of q; what it takes by its own plan).  Where it adds dk and dv up in fp32, these are the summand."""
    plan = plan_attention_backward(n, device)
    rows, keys = n.batch * n.seq_q * n.heads * n.dim_qk, n.batch * n.seq_k * n.kv_heads * (n.dim_qk + n.dim_v)
    again = keys * n.itemsize if plan.queries_at_once else 0
    extra = plan.scratch_bytes - again
    return extra, extra + (rows + keys) * n.itemsize, plan.scratch_bytes


def memory_on(plan: ParallelPlan, device: Device) -> tuple[float, int]:
    """(bytes of memory at the worst moment, what the kernels take for themselves at the most: 0 without a backward pass and for
    dtypes or sizes that no kernel serves)."""
    if not plan.problem.backward or plan.problem.dtype == "float64":
        return plan.cost.memory, 0
    try:
        own, *others = (_run(call, device) for call in calls_of(plan))
    except TilefoldError:
        return plan.cost.memory, 0
    kernels = {"own": float(own[0])}
    if others:
        kernels |= {"others": float(max(one[0] for one in others)), "piece": float(max(one[1] for one in others))}
    most = memory_bytes(plan.problem, plan.links, plan.scheme, plan.heads, kernels)
    return most, max(one[2] for one in (own, *others))
