"""Explains which kernel serves a call over keys, in how many parts: flash-attention's decision, and ours of dense/forward.py and
cache/decode.py."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilefold.errors import PlanError, ShapeError, Unsupported, ValueRangeError
from tilefold.plan import serialise
from tilefold.plan.base import Plan
from tilefold.plan.cache.cached import LEAST_TILES, MAX_SPLITS, plan_cached
from tilefold.plan.cache.decode import DecodePlan, DecodeProblem, decode_kernel_refusal, plan_decode, slices_of
from tilefold.plan.cache.flash_split import (
    CALLS,
    COMBINE,
    ENOUGH,
    GOOD,
    PLAIN,
    SPLIT,
    Candidate,
    FlashWork,
    fills,
    flash_candidates,
    flash_head_dim,
    flash_plain_tile,
    flash_split_tile,
    flash_splits,
    flash_work,
)
from tilefold.plan.cost import Bound, Cost, attention_cost, bound, live_keys, visited_tiles
from tilefold.plan.dense.attention import Rejected
from tilefold.plan.dense.forward import decode_refusal, plan_forward
from tilefold.plan.dense.specialised import SPECIALISED
from tilefold.plan.device import Device
from tilefold.plan.explain_dispatch import explain_decision
from tilefold.plan.limits import require_supported
from tilefold.plan.problem import AttentionProblem

POLICIES = ("flash-attn", "tilefold")
"""Whose choice `plan_splits` answers for."""


@dataclass(frozen=True, slots=True)
class SplitDecision(Plan):
    """The decision of one policy for one call on one device.  `print` it; keep it as JSON.

    problem: seq_k are the keys that are attended; capacity: rows of the cache, which is what decides with call "kvcache".
    call: "dense", "varlen" or "kvcache" (flash_attn's three functions); paged: with a block table; append: with new keys.
    asked: the caller's number of splits, 0: the policy chose.
    kernel, combine: what is launched; combine is "" where no second kernel merges. block_m, block_n: its tile (rows, keys).
    tiles: programs without splits. splits: parts of the keys (1 where they are cut by their number, for all heads together).
    programs: tiles * splits; working: those that have keys.
    slots: programs that the policy takes to run at a time; waves: programs / slots.
    cost: the call's work, partial results written and read included; l2_bytes: keys and values that tiles load.
    """

    policy: str
    problem: AttentionProblem
    device: Device
    call: str
    capacity: int
    paged: bool
    append: bool
    asked: int
    kernel: str
    combine: str
    block_m: int
    block_n: int
    tiles: int
    splits: int
    programs: int
    working: int
    slots: int
    reason: str
    cost: Cost
    bound: Bound
    rejected: tuple[Rejected, ...] = ()

    def __str__(self) -> str:
        return explain_decision(self)

    @property
    def waves(self) -> float:
        """Programs a slot."""
        return self.programs / self.slots

    @property
    def share(self) -> float:
        """Share of the SMs that have work, 1 if all."""
        return min(1.0, self.working / self.device.sms)

    @property
    def predicted_s(self) -> float:
        """Seconds by the roofline, if an SM draws no more than its even share of the device: the bound divided by `share`."""
        return self.bound.seconds / self.share if self.working else 0.0

    @classmethod
    def from_json(cls, text: str) -> "SplitDecision":
        """The decision that `to_json` wrote.  PlanError if it is not what the policy decides for its problem and device."""
        found = serialise.from_json(cls, text)
        made = plan_splits(
            found.problem, found.device, found.policy, call=found.call, capacity=found.capacity, paged=found.paged,
            append=found.append, splits=found.asked,
        )  # fmt: skip
        for name in (
            "kernel",
            "combine",
            "block_m",
            "block_n",
            "tiles",
            "splits",
            "programs",
            "working",
            "slots",
            "cost",
        ):
            if getattr(found, name) != getattr(made, name):
                raise PlanError(
                    f"decision field {name} must be {getattr(made, name)!r} for this call, got {getattr(found, name)!r}"
                )
        return found


@lru_cache(maxsize=4096)
def plan_splits(
    problem: AttentionProblem,
    device: Device,
    policy: str = "tilefold",
    *,
    call: str = "kvcache",
    capacity: int | None = None,
    paged: bool = False,
    append: bool = False,
    splits: int = 0,
) -> SplitDecision:
    """The decision of a policy ("flash-attn" or "tilefold") for a call: pure, the same every time, no GPU needed.

    problem: seq_k are the keys attended, bottom-right aligned.  call: "dense", "varlen" or "kvcache".
    capacity: rows of the cache with "kvcache" (default: seq_k; with a block table, pages * page size).
    paged: there is a block table ("varlen", "kvcache"); append: new keys are written first ("kvcache").
    splits: 0: the policy chooses; else the caller's number ("kvcache"; for tilefold "varlen" with pages, too), at most 128.

    Raises ValueRangeError, ShapeError and, for what the policy's library refuses, Unsupported, each naming the argument."""
    capacity = problem.seq_k if capacity is None else capacity
    _check(problem, policy, call, capacity, paged, append, splits)
    decide = _flash if policy == "flash-attn" else _ours
    return decide(problem, device, call, capacity, paged, append, splits)


def _check(
    problem: AttentionProblem, policy: str, call: str, capacity: int, paged: bool, append: bool, splits: int
) -> None:
    if policy not in POLICIES:
        raise ValueRangeError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if call not in CALLS:
        raise ValueRangeError(f"call must be one of {', '.join(CALLS)}, got {call!r}")
    for name in ("batch", "seq_q", "seq_k"):
        if not getattr(problem, name):
            raise ShapeError(f"{name} must be at least 1 where a decision is asked for, got 0")
    if capacity < problem.seq_k or (call != "kvcache" and capacity != problem.seq_k):
        least = "at least the keys" if call == "kvcache" else f"the keys with call {call!r}, which has no cache"
        raise ShapeError(f"capacity must be {least}, {problem.seq_k}, got {capacity}")
    if paged and call == "dense":
        raise Unsupported("paged needs call 'varlen' or 'kvcache': flash_attn_func has no block table")
    if append and call != "kvcache":
        raise Unsupported(f"append needs call 'kvcache', got {call!r}")
    if problem.dropout and call == "kvcache":
        raise Unsupported("dropout needs call 'dense' or 'varlen': flash_attn_with_kvcache has none")
    if not 0 <= splits <= MAX_SPLITS:
        raise ValueRangeError(f"splits must be 0 to {MAX_SPLITS}, got {splits}")
    if splits and call != "kvcache" and not (paged and policy == "tilefold"):
        raise Unsupported(f"splits needs call 'kvcache', the function with num_splits, got {call!r}")


def _keys_drawn(problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """Keys that the query tiles of one head load together."""
    if problem.seq_q <= block_m:
        return live_keys(problem)
    return visited_tiles(problem, block_m, block_n) * block_n


def _cost(problem: AttentionProblem, heads: int, keys: int, splits: int, width: int) -> Cost:
    """The call's cost with `keys` keys loaded for each of so many heads, and partials of `width` channels."""
    rows = problem.batch * problem.seq_q * problem.heads
    partials = 2 * splits * rows * (width + 1) * 4 if splits > 1 else 0
    drawn = problem.batch * heads * keys * (problem.dim_qk + problem.dim_v) * problem.itemsize
    once = attention_cost(problem)
    return replace(once, bytes=once.bytes + partials, l2_bytes=drawn + partials)


# ---------------------------------------------------------------- flash-attention's


def _flash(
    problem: AttentionProblem, device: Device, call: str, capacity: int, paged: bool, append: bool, given: int
) -> SplitDecision:
    work = flash_work(problem, device, call, capacity, paged, append)
    splits = given or (flash_splits(work.tiles, work.slots, work.blocks) if work.chooses else 1)
    split_kernel = splits > 1 or work.forced
    dim = problem.dim_qk
    tile = flash_split_tile(dim) if split_kernel else flash_plain_tile(dim, device, work.causal, problem.dropout)
    tiles = problem.batch * work.heads * -(-work.rows // tile[0])
    keys = live_keys(problem) if work.packed else _keys_drawn(problem, *tile)
    width = -(-dim // 32) * 32 if dim <= 192 else flash_head_dim(dim)
    cost = _cost(problem, work.heads, keys, splits, width)
    return SplitDecision(
        policy="flash-attn", problem=problem, device=device, call=call, capacity=capacity, paged=paged, append=append,
        asked=given, kernel=SPLIT if split_kernel else PLAIN, combine=COMBINE if splits > 1 else "",
        block_m=tile[0], block_n=tile[1], tiles=tiles, splits=splits, programs=tiles * splits,
        working=tiles * _flash_splits_with_keys(problem, work, splits), slots=work.slots,
        reason=_flash_reason(problem, work, splits, given, paged), cost=cost, bound=bound(cost, device, problem.dtype),
        rejected=_flash_rejected(work, splits, given),
    )  # fmt: skip


def _flash_splits_with_keys(problem: AttentionProblem, work: FlashWork, splits: int) -> int:
    """Splits are cut from the whole cache, so those behind the keys of a cache that is not full have nothing to do."""
    each = -(-work.blocks // splits)
    first = (problem.seq_k - live_keys(problem)) // work.key_block
    return (problem.seq_k - 1) // work.key_block // each - first // each + 1


def _flash_reason(problem: AttentionProblem, work: FlashWork, splits: int, given: int, paged: bool) -> str:
    if given:
        text = f"The caller asked for {given}."
    elif problem.dropout:
        text = "It never splits with dropout."
    elif not work.chooses:
        text = (
            "Its varlen function asks the heuristic only where query heads become rows (one query, grouped heads, no window, "
            "no ALiBi, no dropout)."
        )
    else:
        text = _flash_weighed(problem, work, splits)
    if work.forced and splits == 1:
        text += f" Only the split kernel {'reads pages' if paged else 'appends keys'}, so it runs, with one split."
    return text


def _flash_weighed(problem: AttentionProblem, work: FlashWork, splits: int) -> str:
    tiles = f"{work.tiles} query tile{'s' if work.tiles > 1 else ''}"
    packed = f" (the {problem.group} query heads of a KV head are rows of one)" if work.packed else ""
    if fills(work.tiles, work.slots):
        return f"{tiles}{packed} fill at least {ENOUGH:.0%} of {work.slots} slots, two an SM."
    under = f"{tiles}{packed} for {work.slots} slots, two an SM, are under {ENOUGH:.0%}"
    if work.blocks <= 1:
        return f"{under}, but the keys are one block of {work.key_block}, which is not cut."
    weighed = flash_candidates(work.tiles, work.slots, work.blocks)
    best, taken = _best(weighed), _taken(weighed, splits)
    text = f"{under}; for {work.blocks} blocks of {work.key_block} keys {splits} is the fewest splits that"
    if best is taken:
        return f"{text} fills its waves best ({taken.efficiency:.1%})."
    most = f"what the best, {best.splits}, does ({best.efficiency:.1%})"
    return f"{text} fills its waves ({taken.efficiency:.1%}) to at least {GOOD:.0%} of {most}."


def _best(weighed: tuple[Candidate, ...]) -> Candidate:
    return max(weighed, key=lambda one: (one.efficiency, -one.splits))


def _taken(weighed: tuple[Candidate, ...], splits: int) -> Candidate:
    return next(one for one in weighed if one.splits == splits)


def _flash_rejected(work: FlashWork, splits: int, given: int) -> tuple[Rejected, ...]:
    """One split, the numbers next to the one taken, the best one, and the least that was not weighed."""
    if given or not work.chooses or work.blocks <= 1 or fills(work.tiles, work.slots):
        return ()
    weighed = flash_candidates(work.tiles, work.slots, work.blocks)
    at, best, found = weighed.index(_taken(weighed, splits)), _best(weighed), []
    for one in dict.fromkeys((weighed[0], *weighed[max(0, at - 1) : at + 2], best)):
        if one.splits < splits:
            why = f"Fills {one.efficiency:.1%} of its waves, under {GOOD:.0%} of the best, {best.efficiency:.1%}."
        elif one.splits > splits:
            why = f"Fills {one.efficiency:.1%}; {splits} {'do' if splits > 1 else 'does'} enough with less to merge."
        else:
            continue
        found.append(Rejected(f"{one.splits} split{'s' if one.splits > 1 else ''}", why))
    eligible = {one.splits for one in weighed}
    skipped = next((n for n in range(splits + 1, min(MAX_SPLITS, work.blocks) + 1) if n not in eligible), None)
    if skipped:
        each = -(-work.blocks // skipped)
        some = f"{each} block{'s' if each > 1 else ''}"
        why = (
            f"Not weighed: {some} a split, as with {skipped - 1}."
            if skipped <= work.slots
            else "More splits than slots are not weighed."
        )
        found.append(Rejected(f"{skipped} splits", why))
    return tuple(found)


# ---------------------------------------------------------------- tilefold's


def _ours(
    problem: AttentionProblem, device: Device, call: str, capacity: int, paged: bool, append: bool, given: int
) -> SplitDecision:
    require_supported(problem, device)
    same: dict[str, Any] = {"policy": "tilefold", "problem": problem, "device": device, "call": call,
                            "capacity": capacity, "paged": paged, "append": append, "asked": given}  # fmt: skip
    if call == "kvcache" or paged:
        return _ours_cached(same, problem, device, capacity, given)
    packed = call == "varlen"
    plan = plan_forward(replace(problem, varlen=packed, descriptors=problem.descriptors and not packed), device)
    if isinstance(plan, DecodePlan):
        return SplitDecision(**same, **_decode_fields(problem, plan), rejected=plan.rejected)
    cost = plan.cost
    if plan.kernel not in SPECIALISED:
        cost = _cost(problem, problem.heads, _keys_drawn(problem, plan.block_m, plan.block_n), 1, problem.dim_v)
    reason = f"Not split, since {decode_refusal(plan.problem, device)}; {plan.rule}: {plan.reason}"
    return SplitDecision(
        **same, kernel=plan.kernel, combine="", block_m=plan.block_m, block_n=plan.block_n, tiles=plan.grid[0],
        splits=plan.splits, programs=plan.grid[0], working=plan.grid[0], slots=device.sms * plan.programs_per_sm,
        reason=reason, cost=cost, bound=bound(cost, device, problem.dtype), rejected=plan.rejected,
    )  # fmt: skip


def _ours_cached(
    same: dict[str, Any], problem: AttentionProblem, device: Device, capacity: int, given: int
) -> SplitDecision:
    extra = [mod for mod in (*problem.score_mods, *problem.mask_mods) if mod not in ("softcap", "alibi")]
    if extra:
        raise Unsupported(f"policy tilefold: over a cache scores have softcap and alibi only, got {', '.join(extra)}")
    whole = replace(problem, seq_k=capacity)
    if not decode_kernel_refusal(whole):
        plan = plan_decode(DecodeProblem(whole), device, given)
        return SplitDecision(**same, **_decode_fields(problem, plan, given), rejected=_decode_rejected(plan, given))
    tile, splits = plan_cached(whole, device, given)
    tiles = -(-problem.seq_q // tile.block_m) * problem.batch * problem.heads
    parts = -(-live_keys(problem) // tile.block_n)
    cost = _cost(problem, problem.heads, _keys_drawn(problem, tile.block_m, tile.block_n), splits, problem.dim_v)
    return SplitDecision(
        **same, kernel="attention_cached", combine="combine" if splits > 1 else "", block_m=tile.block_m,
        block_n=tile.block_n, tiles=tiles, splits=splits, programs=tiles * splits, working=tiles * min(splits, parts),
        slots=device.sms, reason=_ours_reason(tiles, splits, tile.block_n, device, capacity, given), cost=cost,
        bound=bound(cost, device, problem.dtype), rejected=_ours_rejected(problem, tiles, splits, tile.block_n, given),
    )  # fmt: skip


def _ours_reason(tiles: int, splits: int, block_n: int, device: Device, capacity: int, given: int) -> str:
    if given:
        return f"The caller asked for {given}."
    fit, most = device.sms // tiles, -(-capacity // block_n) // LEAST_TILES
    programs = f"{tiles} query tile{'s' if tiles > 1 else ''}"
    if fit <= 1:
        return f"{programs} for {device.sms} SMs: two splits would be more than one wave."
    if most <= 1:
        return f"A cache of {capacity} keys has no {LEAST_TILES} tiles of {block_n} for each of two splits."
    if splits == fit:
        return f"{programs}: {splits} splits are the most that fit {device.sms} SMs at once."
    if splits == MAX_SPLITS:
        return f"{programs} leave room for {fit} splits on {device.sms} SMs; {MAX_SPLITS} are the most."
    return (
        f"{programs} leave room for {fit} splits on {device.sms} SMs, but a cache of {capacity} keys gives {splits} of them "
        f"{LEAST_TILES} tiles of {block_n}."
    )


def _ours_rejected(
    problem: AttentionProblem, tiles: int, splits: int, block_n: int, given: int
) -> tuple[Rejected, ...]:
    found = []
    if not given and splits > 1:
        found.append(Rejected("1 split", f"Would leave all but {tiles} SMs without work."))
    if not given:
        why = f"More programs than SMs, or under {LEAST_TILES} tiles of {block_n} keys a split when the cache is full."
        found.append(Rejected(f"{splits + 1} splits", why if splits < MAX_SPLITS else "More than the kernel takes."))
    if problem.group > 1:
        why = f"One tile for the {problem.group} query heads of a KV head would read K and V once; this kernel does not pack."
        found.append(Rejected("packed heads", why))
    return tuple(found)


# ---------------------------------------------------------------- calls of the decode kernel


def _decode_fields(problem: AttentionProblem, plan: DecodePlan, given: int = 0) -> dict[str, Any]:
    """Fields of the decision where the decode kernel follows this plan; who owns which keys is found on the device."""
    working, merged = _decode_working(problem, plan)
    partials = 2 * merged * min(plan.block_m, plan.problem.rows) * (problem.dim_v + 2) * 4
    once = replace(plan.problem, attention=problem).cost
    cost = Cost(once.flops, once.bytes + partials, once.exps, once.bytes + partials)
    parts = max(1, plan.splits)
    merge = "decode_combine" if plan.merge == "kernel" and plan.splits != 1 else ""
    return {
        "kernel": "attention_decode", "combine": merge, "block_m": plan.block_m, "block_n": plan.block_n,
        "tiles": plan.grid // parts, "splits": parts, "programs": plan.grid, "working": working, "slots": plan.programs,
        "reason": _decode_reason(plan, given), "cost": cost, "bound": bound(cost, plan.device, problem.dtype),
    }  # fmt: skip


def _decode_working(problem: AttentionProblem, plan: DecodePlan) -> tuple[int, int]:
    """(programs that have keys, parts that are merged) where every sequence has seq_k keys."""
    tiles = max(1, -(-live_keys(problem) // plan.block_n))
    if plan.splits:
        return plan.items * min(plan.splits, tiles), plan.items * plan.splits if plan.splits > 1 else 0
    if plan.items > 4096:  # nearly as many tiles for each program, few of them others', too
        return min(plan.programs, plan.items), 0
    owned = slices_of([tiles] * problem.batch, plan.items // problem.batch, plan.programs, plan.least)
    return sum(bool(pieces) for pieces in owned), sum(slot >= 0 for pieces in owned for *_, slot in pieces)


def _decode_reason(plan: DecodePlan, given: int) -> str:
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


def _decode_rejected(plan: DecodePlan, given: int) -> tuple[Rejected, ...]:
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
