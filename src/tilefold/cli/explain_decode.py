"""`tilefold explain --cache`: the plan of `attention_kvcache`, from the shapes and a device's record alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem, Device
from tilefold.plan.cache.decode import DecodeProblem, decode_kernel_refusal, plan_decode

HELD = {"same": "plain", "e4m3": "float8_e4m3fn", "int8": "int8"}  # what `DecodeProblem` calls it


class CacheOptions(NamedTuple):
    """held: a key of HELD, or None for a call without a cache; page_size: 0 for one piece; part: V is a part of K."""

    held: str | None
    page_size: int
    num_splits: int
    part: bool


def check_cache(asked: CacheOptions, others: Mapping[str, object]) -> None:
    """Unsupported or ValueRangeError, naming the option; others: options that do not go with --cache, false if not given."""
    if asked.held is None:
        if asked.part:
            raise Unsupported("--v-in-k needs --cache")
        return
    if asked.held not in HELD:
        raise ValueRangeError(f"--cache must be one of {', '.join(HELD)}, got {asked.held!r}")
    for name, given in others.items():
        if given:
            raise Unsupported(f"{name} does not go with --cache")
    if asked.page_size < 0:
        raise ValueRangeError(f"--page-size must be at least 0, got {asked.page_size}")


def explain_cache(asked: CacheOptions, problem: AttentionProblem, device: Device, as_json: bool) -> str:
    """What `attention_kvcache` does, as text or JSON: a DecodePlan; of a prompt, which is attention_cached's, a SplitDecision."""
    from tilefold.plan import plan_splits

    if not (problem.batch and problem.seq_q):
        raise Unsupported("there is nothing to plan: no queries")
    made = _problem(asked, problem)
    prompt = decode_kernel_refusal(made.attention) if made.storage == "plain" and not made.shared else ""
    if not prompt:
        plan = plan_decode(made, device, asked.num_splits)
        return plan.to_json() if as_json else str(plan)
    room = made.attention.seq_k
    cut = plan_splits(problem, device, capacity=room, paged=asked.page_size > 0, splits=asked.num_splits)
    return cut.to_json() if as_json else f"attention_kvcache gives this call to attention_cached: {prompt}.\n{cut}"


def _problem(asked: CacheOptions, problem: AttentionProblem) -> DecodeProblem:
    """Of caches with room for problem.seq_k keys, all rows beginning at 16 bytes where they can."""
    storage = HELD[asked.held or "same"]
    itemsize = problem.itemsize if storage == "plain" else 1
    # V as part of K lies where K's rows begin
    boxes = all(dim * itemsize % 16 == 0 for dim in (problem.dim_qk, problem.dim_qk if asked.part else problem.dim_v))
    if problem.seq_k % max(1, asked.page_size):  # room comes in whole pages
        problem = replace(problem, seq_k=-(-problem.seq_k // asked.page_size) * asked.page_size)
    problem = replace(problem, descriptors=boxes, query_descriptors=problem.dim_qk * problem.itemsize % 16 == 0)
    return DecodeProblem(problem, storage, asked.page_size, asked.part)
