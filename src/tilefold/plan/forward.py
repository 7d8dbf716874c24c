"""Which kernel serves a call of `attention` or `attention_varlen`: a dense one, or, for few queries, the decode kernel.

A dense kernel gives each query head tiles of its own and folds all keys of a tile in one program.  With few queries that
leaves most SMs idle, and reads K and V once a query head.  The decode kernel makes the query heads of a KV head rows of one tile
and cuts the keys (split-KV)."""

from dataclasses import replace
from functools import lru_cache

from tilefold.plan.attention import AttentionPlan, Rejected, plan_attention
from tilefold.plan.attention_hopper import packed_heads
from tilefold.plan.decode import DecodePlan, DecodeProblem, plan_decode, serves
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem

__all__ = ["FILLED_ROWS", "LEAST_KEYS", "decodes", "plan_forward"]

FILLED_ROWS = 64  # query rows of a head, or of heads packed into one tile: with so many a dense kernel wastes little
LEAST_KEYS = 256  # of several queries: below that one program a tile is as soon done as several and a merge


@lru_cache(maxsize=4096)
def plan_forward(problem: AttentionProblem, device: Device, portable: bool = False) -> AttentionPlan | DecodePlan:
    """The plan that a call of `attention` or `attention_varlen` follows.  portable: no Hopper kernels.

    Raises what `plan_attention` and `plan_decode` raise."""
    dense = plan_attention(problem, device, portable=portable)
    if decodes(dense):
        return dense
    plan = plan_decode(DecodeProblem(problem, equal=not problem.varlen), device)
    tiles = f"{dense.grid[0]} program{'s' * (dense.grid[0] > 1)} for {device.sms} SMs, each with all keys of its rows"
    often = (
        f", and would read K and V {problem.group} times"
        if problem.group > packed_heads(problem, dense.options)
        else ""
    )
    return replace(plan, rejected=(Rejected(dense.kernel, f"Would be {tiles}{often}."), *plan.rejected[1:]))


def decodes(dense: AttentionPlan) -> str:
    """Empty if the decode kernel takes a call from the dense kernel of this plan, else why not."""
    problem, programs = dense.problem, dense.grid[0]
    if "user" in problem.score_mods or "user" in problem.mask_mods:
        return "score_mod and mask_mod are the dense kernels'"
    if why := serves(DecodeProblem(problem)):
        return why
    rows = problem.seq_q * packed_heads(problem, dense.options)
    if rows >= FILLED_ROWS and programs >= dense.device.sms:
        return f"{programs} tiles of at least {FILLED_ROWS} rows fill {dense.device.sms} SMs"
    alone = programs <= dense.device.sms or dense.device.backend == "interpreter"
    if problem.seq_k < LEAST_KEYS and alone and (problem.seq_q > 1 or dense.device.backend == "interpreter"):
        return f"{problem.seq_k} keys are fewer than {LEAST_KEYS}: one program a tile is as soon done as several and a merge"
    return ""
