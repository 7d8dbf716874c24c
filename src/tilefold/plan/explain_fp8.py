"""A plan of attention with e4m3 inputs as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilefold.plan.cost import live_pairs, visited_tiles
from tilefold.plan.explain import _bound as bound_text
from tilefold.plan.explain import _cost as cost_text
from tilefold.plan.explain import _percent as percent
from tilefold.plan.explain import _problem as problem_text
from tilefold.plan.explain import _rejected as rejected_rows
from tilefold.plan.explain import _row as row
from tilefold.plan.fp8_hopper import KERNEL, fp8_consumers
from tilefold.plan.words import counted as count

if TYPE_CHECKING:
    from tilefold.plan.attention_fp8 import AttentionFp8Plan

__all__ = ["explain_fp8"]


def explain_fp8(plan: AttentionFp8Plan) -> str:
    """The plan in aligned lines of at most 110 characters."""
    device = plan.device
    lines = [f"Attention plan, e4m3 to bfloat16, for {device.title} ({device.target})"]
    rows = [
        ("problem", problem_text(plan.problem).replace("bfloat16", "float8_e4m3fn to bfloat16")),
        ("kernel", _kernel(plan)),
        ("rule", f"{plan.rule}. {plan.reason}"),
        ("evidence", plan.evidence),
        *(
            (("grid", _grid(plan)), ("tiles", _tiles(plan)), ("resources", _resources(plan)))
            if plan.kernel == KERNEL
            else ()
        ),
        ("cost", cost_text(plan)),
        ("bound", bound_text(plan)),
    ]
    for label, text in rows:
        lines += row(label, text)
    return "\n".join([*lines, *rejected_rows(plan)])


def _kernel(plan: AttentionFp8Plan) -> str:
    if plan.kernel != KERNEL:
        portable = plan.portable
        return f"{plan.kernel} q, k and v to bfloat16, then {portable.kernel}, tile {portable.tile}"
    number = {2: "two warpgroups fold", 3: "three warpgroups fold"}[fp8_consumers(plan.tile)]
    sums = "by the tensor cores" if "direct" in plan.options else "in fp32"
    versions = f" ({', '.join(plan.options)})" if plan.options else ""
    return (
        f"transpose_values, then {plan.kernel} (Q, K and V^T by descriptor boxes; {number}{versions}, one warp loads; tiles "
        f"summed {sums}), tile {plan.tile}"
    )


def _grid(plan: AttentionFp8Plan) -> str:
    n, blocks = plan.problem, plan.grid[0]
    if not blocks:
        return "0 programs: there is nothing to compute, so nothing is launched."
    drawing = count(min(plan.device.sms, blocks), "program")
    tiles = count(-(-n.seq_q // plan.block_m), "query tile")
    batch = "" if n.batch == 1 else f" x {n.batch} sequences"
    return f"{drawing}, one per SM, draw from a counter: {count(blocks, 'block')} = {tiles}{batch} x {count(n.heads, 'head')}."


def _tiles(plan: AttentionFp8Plan) -> str:
    n = plan.problem
    visited = visited_tiles(n, plan.block_m, plan.block_n)
    if not visited:
        return "No key is live, so no tile is visited."
    every = -(-n.seq_q // plan.block_m) * -(-n.seq_k // plan.block_n)
    use = live_pairs(n) / (visited * plan.block_m * plan.block_n)
    return f"{visited} of {count(every, 'score tile')} per head visited; {percent(use)} of their scores are live."


def _resources(plan: AttentionFp8Plan) -> str:
    have = plan.device.smem_per_block / 1024
    return f"{plan.shared_bytes / 1024:.0f} of {have:.0f} KiB shared memory, 1 program per SM."
