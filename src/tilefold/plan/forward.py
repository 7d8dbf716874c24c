"""Which kernel serves a call of `attention` or `attention_varlen`: a dense one, or, for few queries, the decode kernel.

A dense kernel gives each query head tiles of its own and folds all keys of a tile in one program.  With few queries that
leaves most SMs idle, and reads K and V once a query head.  The decode kernel makes the query heads of a KV head rows of one tile
and cuts the keys (split-KV)."""

from functools import lru_cache

from tilefold.plan.attention import AttentionPlan, plan_attention
from tilefold.plan.decode import DecodePlan, DecodeProblem, plan_decode, serves
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem

__all__ = ["LEAST_KEYS", "LEAST_WORK", "decodes", "plan_forward"]

LEAST_KEYS = 256  # below that a dense kernel's one program a tile is as soon done
LEAST_WORK = 1  # rows of a KV head times this must not exceed the keys


@lru_cache(maxsize=4096)
def plan_forward(problem: AttentionProblem, device: Device, portable: bool = False) -> AttentionPlan | DecodePlan:
    """The plan that a call of `attention` or `attention_varlen` follows.  portable: no Hopper kernels.

    Raises what `plan_attention` and `plan_decode` raise."""
    if decodes(problem):
        return plan_attention(problem, device, portable=portable)
    return plan_decode(DecodeProblem(problem), device)


def decodes(problem: AttentionProblem) -> str:
    """Empty if the decode kernel serves the call, else why not."""
    if "user" in problem.score_mods or "user" in problem.mask_mods:
        return "score_mod and mask_mod are the dense kernels'"
    if why := serves(DecodeProblem(problem)):
        return why
    if problem.seq_k < LEAST_KEYS:
        return f"{problem.seq_k} keys are fewer than {LEAST_KEYS}: there is nothing to split"
    return ""
