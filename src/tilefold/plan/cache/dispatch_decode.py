"""What `plan_splits` says of calls that the decode kernel serves: who owns which keys is found on the device, by their number."""

from dataclasses import replace
from typing import Any

from tilefold.plan.cache.decode import DecodePlan, DecodeProblem, decode_kernel_refusal, plan_decode, slices_of
from tilefold.plan.cost import Cost, live_keys
from tilefold.plan.dense.attention import Rejected
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem


def decode_fields(problem: AttentionProblem, device: Device, capacity: int, given: int) -> dict[str, Any] | None:
    """Fields of the decision for a cache and a problem whose seq_k are the keys that there are, None if attention_cached serves
    it."""
    whole = DecodeProblem(replace(problem, seq_k=capacity))
    if decode_kernel_refusal(whole.attention):
        return None
    plan = plan_decode(whole, device, given)
    return {**fields_of(problem, plan, given), "rejected": _rejected(plan, given)}


def fields_of(problem: AttentionProblem, plan: DecodePlan, given: int = 0) -> dict[str, Any]:
    """Fields of the decision where the decode kernel follows this plan."""
    working, merged = _working(problem, plan)
    partials = 2 * merged * min(plan.block_m, plan.problem.rows) * (problem.dim_v + 2) * 4
    once = replace(plan.problem, attention=problem).cost
    cost = Cost(once.flops, once.bytes + partials, once.exps, once.bytes + partials)
    parts = max(1, plan.splits)
    merge = "decode_combine" if plan.merge == "kernel" and plan.splits != 1 else ""
    return {
        "kernel": "attention_decode", "combine": merge, "block_m": plan.block_m, "block_n": plan.block_n,
        "tiles": plan.grid // parts, "splits": parts, "programs": plan.grid, "working": working, "slots": plan.programs,
        "reason": _reason(plan, given), "cost": cost, "rejected": plan.rejected,
    }  # fmt: skip


def _working(problem: AttentionProblem, plan: DecodePlan) -> tuple[int, int]:
    """(programs that have keys, parts that are merged) where every sequence has seq_k keys."""
    tiles = max(1, -(-live_keys(problem) // plan.block_n))
    if plan.splits:
        return plan.items * min(plan.splits, tiles), plan.items * plan.splits if plan.splits > 1 else 0
    if plan.items > 4096:  # nearly as many tiles for each program, few of them others', too
        return min(plan.programs, plan.items), 0
    owned = slices_of([tiles] * problem.batch, plan.items // problem.batch, plan.programs, plan.least)
    return sum(bool(pieces) for pieces in owned), sum(slot >= 0 for pieces in owned for *_, slot in pieces)


def _reason(plan: DecodePlan, given: int) -> str:
    who = "the last to arrive" if plan.merge == "last" else "decode_combine"
    if given:
        return f"The caller asked for {given}{f'; {who} merges' if given > 1 else ''}."
    if plan.splits:
        shares = f"{plan.splits} equal shares" if plan.splits > 1 else "one share"
        merges = f", and {who} merges" if plan.splits > 1 else ""
        return f"Few keys, or one sequence: those of each of {plan.items} KV heads and row blocks in {shares}{merges}."
    return (
        f"None by number: {plan.programs} programs own equal numbers of tiles of {plan.block_n} keys, "
        f"at least {plan.least} or none, whosever they are, and {who} merges what several have of one KV head."
    )


def _rejected(plan: DecodePlan, given: int) -> tuple[Rejected, ...]:
    group = plan.problem.attention.group
    why = (
        f"Reads keys {group} times, once a query head."
        if group > 1
        else "Splits by the capacity, not by the keys that there are."
    )
    found = [Rejected("attention_cached", why)]
    if plan.splits and not given:
        found.append(
            Rejected("even slices of all keys", "Fixed shares are sooner known, which counts where keys are few.")
        )
    elif not given:
        found.append(Rejected("equal splits", "Lengths are on the device: a long sequence would be the work of few."))
    return tuple(found)
