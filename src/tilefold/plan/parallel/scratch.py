"""What the kernels of one rank take for themselves while they run under a plan of context parallelism, by their own plans."""

from dataclasses import replace

from tilefold.errors import TilefoldError

from ..backward.attention_backward import plan_attention_backward
from ..device import Device
from ..problem import AttentionProblem
from .cost import memory_bytes
from .memory import Part, parts_of
from .plan import ParallelPlan


def calls_of(plan: ParallelPlan) -> tuple[AttentionProblem, ...]:
    """The largest calls of a rank: of its own keys, and of others'; of one sequence, packed ones counted as one."""
    return tuple(_call(plan, part, number == 0) for number, part in enumerate(_parts(plan)))


def _parts(plan: ParallelPlan) -> tuple[Part, ...]:
    n = plan.problem
    return parts_of(plan.scheme, plan.ring, n.halves, smaller=not n.deterministic and n.window != (-1, -1))


def _call(plan: ParallelPlan, part: Part, own: bool) -> AttentionProblem:
    n = plan.problem
    rows, keys = (
        max(1, int(share * -(-total // plan.ring))) for share, total in ((part.queries, n.seq_q), (part.keys, n.seq_k))
    )
    heads, kv_heads = n.heads // plan.heads, max(1, n.kv_heads // plan.heads)
    causal = n.window == (-1, 0)
    window = (-1, -1) if causal or not own else n.window
    return AttentionProblem(
        n.batch, rows, keys, heads, kv_heads, n.dim_qk, n.dim_v, n.dtype, causal=causal and own, window=window
    )


def _run(part: Part, n: AttentionProblem, device: Device, deterministic: bool) -> tuple[Part, int]:
    """The part with what its kernel takes, and all of that by the kernel's own plan, which rounds the gradients as well."""
    plan = plan_attention_backward(n, device, deterministic=deterministic)
    keys = n.batch * n.seq_k * n.kv_heads * (n.dim_qk + n.dim_v) * n.itemsize
    extra = plan.scratch_bytes - (keys if plan.queries_at_once else 0)
    return replace(part, extra=float(extra), exact=bool(plan.queries_at_once)), plan.scratch_bytes


def memory_on(plan: ParallelPlan, device: Device) -> tuple[float, int]:
    """(bytes of memory at the worst moment, what the kernels take for themselves at the most: 0 without a backward pass and for
    dtypes or sizes that no kernel serves)."""
    if not plan.problem.backward or plan.problem.dtype == "float64":
        return plan.cost.memory, 0
    try:
        found = [
            _run(*both, device, plan.problem.deterministic) for both in zip(_parts(plan), calls_of(plan), strict=True)
        ]
    except TilefoldError:
        return plan.cost.memory, 0
    parts, scratch = zip(*found, strict=True)
    return memory_bytes(plan.problem, plan.links, plan.scheme, plan.heads, parts), max(scratch)
