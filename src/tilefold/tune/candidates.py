"""Which plans are tried for a problem: groups of changes, one group after the other on the best so far, all within the limits.

Trying every combination would take hours.  What is changed together (a tile with its stages; a cut with its merge) is a group."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from tilefold.errors import PlanError
from tilefold.plan.cache.cached import MAX_SPLITS
from tilefold.plan.cache.decode import LEAST_KEYS, MERGES, DecodePlan, rules_decode
from tilefold.plan.dense.attention import AttentionPlan, rules_attention
from tilefold.plan.dense.attention_hopper import KERNEL as HOPPER
from tilefold.plan.dense.attention_hopper import hopper_options
from tilefold.plan.device import Device
from tilefold.plan.limits import BOX, POINTER, VARLEN, Tile
from tilefold.plan.matrix.matmul import MatmulPlan, rules_matmul
from tilefold.plan.matrix.tiles import DEEP, PORTABLE, is_deep
from tilefold.plan.matrix.tiles import HOPPER as HOPPER_MATMUL

Plan = AttentionPlan | DecodePlan | MatmulPlan
Changes = dict[str, Any]
Group = Callable[[Plan], Iterator[Changes]]

FIELDS = {
    "attention": ("kernel", "block_m", "block_n", "num_warps", "num_stages", "options"),
    "decode": ("block_m", "block_n", "num_warps", "num_stages", "programs", "least", "splits", "merge"),
    "matmul": ("kernel", "block_m", "block_n", "block_k", "num_warps", "num_stages", "group", "splits"),
}
# (queries, keys, warps, stages) of the portable attention kernels
_ATTENTION = ((64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 4, 3), (64, 32, 4, 3),
              (128, 32, 4, 3), (64, 64, 4, 2))  # fmt: skip
# of fp32, of wide heads, of few queries
_SMALL = ((64, 32, 8, 2), (32, 32, 4, 2), (32, 64, 4, 3), (16, 64, 4, 3), (32, 16, 4, 2), (16, 32, 4, 2))
# (queries, keys, stages) of the Hopper kernel
_HOPPER = (
    (128, 128, 2), (192, 128, 2), (64, 128, 2), (64, 64, 3), (128, 64, 4), (128, 64, 3), (192, 64, 3), (128, 128, 3),
)  # fmt: skip
# (rows, columns, k, warps, stages) of the portable matrix kernel, large ones first, then those of few rows
_MATMUL = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (64, 256, 64, 8, 3), (128, 64, 64, 4, 4),
           (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 32, 128, 4, 4), (32, 128, 64, 4, 4),
           (32, 64, 128, 4, 4), (32, 32, 128, 4, 4), (16, 128, 128, 4, 3), (16, 64, 128, 4, 4), (16, 32, 256, 4, 3),
           (16, 64, 256, 4, 3), (16, 64, 64, 2, 6))  # fmt: skip
# (keys, warps, stages)
_DECODE = (
    (128, 4, 3), (64, 4, 4), (128, 4, 2), (64, 4, 3), (128, 8, 3), (32, 4, 4), (64, 8, 4), (64, 2, 4), (256, 8, 2),
)  # fmt: skip
MOST_TILES = 40  # of a matrix product, an SM: with more a larger tile is better
MOST_SHARES = 64
_INTERPRETER = {"attention": ((32, 32, 4, 1), (16, 64, 4, 1)), "matmul": ((32, 64, 64, 4, 1), (64, 32, 32, 4, 1))}


def rules_plan(kind: str, problem: Any, device: Device) -> Plan:
    """What the rules alone choose, whatever a table says."""
    rules: Any = {"attention": rules_attention, "decode": rules_decode, "matmul": rules_matmul}[kind]
    plan: Plan = rules(problem, device)
    return plan


def fields_of(kind: str, plan: Plan) -> Changes:
    """The fields that make a plan, as the table keeps them."""
    return {name: getattr(plan, name) for name in FIELDS[kind]}


def applied(plan: Plan, changes: Changes) -> Plan:
    """A plan with fields changed.  PlanError if they do not fit."""
    if isinstance(plan, DecodePlan):
        made = replace(plan, **changes, reason="A candidate of the tuner.", rejected=())
        room = max(made.device.smem_per_block, _decode_bytes(plan))  # an estimate: no less than the rules' own plan has
        if _decode_bytes(made) > room:
            raise PlanError(f"needs {_decode_bytes(made)} bytes of shared memory, {made.device.name} has {room}")
        return made
    return plan.with_tile(**changes)


def shown(before: Changes, best: Changes) -> str:
    """What is different, for people: "block_n 64 -> 128, num_stages 3 -> 2"."""

    def text(value: Any) -> str:
        return "+".join(value) or "none" if isinstance(value, (list, tuple)) else str(value)

    return ", ".join(
        f"{name} {text(before[name])} -> {text(best[name])}" for name in best if before[name] != best[name]
    )


def groups_of(kind: str) -> tuple[Group, ...]:
    """The groups of changes in their order: each makes those that are worth a try on the best plan so far."""
    groups = {"attention": (_tiles, _options), "decode": (_cuts, _decode_tiles), "matmul": (_shapes, _shares, _depths)}
    return groups[kind]


# ---------------------------------------------------------------- attention


def _tiles(plan: Any) -> Iterator[Changes]:
    """Of the plan's own kernel first."""
    problem, device = plan.problem, plan.device
    if device.backend == "interpreter":
        yield from map(_attention_tile, _INTERPRETER["attention"])
        return
    hopper = []
    for rows, keys, stages in _HOPPER:
        each = rows, keys, 4, stages
        options = hopper_options(problem, Tile(*each), device)
        hopper.append({"kernel": HOPPER, **_attention_tile(each), "options": options})
    small = problem.dtype == "float32" or max(problem.block_qk, problem.block_v) > 128 or problem.seq_q <= 128
    fitting = (*_SMALL, *_ATTENTION) if small else _ATTENTION
    kernels = (VARLEN,) if problem.varlen else (BOX, POINTER)
    portable = [{"kernel": one, **_attention_tile(each), "options": ()} for each, one in product(fitting, kernels)]
    yield from hopper + portable[:4] if plan.kernel == HOPPER else portable + hopper


def _attention_tile(numbers: tuple[int, ...]) -> Changes:
    return dict(zip(("block_m", "block_n", "num_warps", "num_stages"), numbers, strict=True))


def _options(plan: Any) -> Iterator[Changes]:
    """Each version of the Hopper kernel the other way."""
    if plan.kernel == HOPPER:
        for one in ("lazy", "late", "skip", "fence", "turns", "pack", "polynomial 4"):
            others = tuple(each for each in plan.options if each != one)
            yield {"options": others if one in plan.options else (*others, one)}


# ---------------------------------------------------------------- decoding


def _cuts(plan: Any) -> Iterator[Changes]:
    """Shares of each item, or even slices of all tiles; and who merges."""
    if plan.device.backend == "interpreter":
        yield from ({"splits": 1}, {"splits": 2, "merge": "kernel"}, {"splits": 0, "programs": 3, "least": 1})
        return
    sms, items = plan.device.sms, max(1, plan.items)
    tiles = max(1, -(-plan.problem.attention.seq_k // plan.block_n))
    shares = [max(1, min(tiles, MAX_SPLITS, round(each * sms / items))) for each in (1, 2, 0.5, 4, 3, 1.5)]
    for splits, merge in product(dict.fromkeys(shares), MERGES):
        if splits > 1 or merge == "last":  # one share is not merged
            yield {"splits": splits, "merge": merge}
    for waves, merge in product((2, 1, 4), MERGES):
        yield {"splits": 0, "programs": waves * sms, "least": max(1, LEAST_KEYS // plan.block_n), "merge": merge}


def _decode_tiles(plan: Any) -> Iterator[Changes]:
    if plan.device.backend == "interpreter":
        yield from ({"block_n": 16}, {"block_n": 64})
        return
    for keys, warps, stages in _DECODE:
        yield {"block_n": keys, "num_warps": warps, "num_stages": stages}


def _decode_bytes(plan: DecodePlan) -> int:
    """Shared memory of a program, as `plan.decode` estimates it: queries, probabilities, tiles in flight."""
    problem, size = plan.problem, plan.problem.attention.itemsize
    spare = 0 if plan.block_m == 64 and plan.device.has("shared operands") else 1
    held = plan.block_m * (problem.block_k + problem.block_rest + plan.block_n) * size
    return held + max(1, plan.num_stages - spare) * plan.block_n * problem.row_bytes


# ---------------------------------------------------------------- matrix products


def _shapes(plan: Any) -> Iterator[Changes]:
    """Of the plan's own kernel first."""
    problem, device = plan.problem, plan.device
    if device.backend == "interpreter":
        yield from (_tile(PORTABLE, each) for each in _INTERPRETER["matmul"])
        return
    tiles = [_tile(PORTABLE, each) for each in DEEP if is_deep(problem, device) and problem.m > each[0] - 64]
    for each in _MATMUL:
        rows, columns = each[:2]
        made = -(-problem.m // rows) * -(-problem.n // columns) * problem.results
        if made <= MOST_TILES * device.sms and not _idle(rows, problem.m) and not _idle(columns, problem.n):
            *_, k, warps, stages = each
            if problem.dtype == "float32":
                k, stages = k // 2, min(stages, 3)
            if device.backend == "hip":  # 64 KiB of shared memory
                k, stages = min(k, 64), min(stages, 2)
            tiles.append(_tile(PORTABLE, (rows, columns, k, warps, stages)))
    hopper = [_tile(HOPPER_MATMUL, (128, n, 64, 4, stages)) for n, stages in ((256, 4), (128, 6), (256, 3), (128, 4))]
    if min(problem.m, problem.n) <= 32:  # most of 128 x 128 would be empty
        hopper = []
    yield from hopper + tiles[:4] if plan.kernel == HOPPER_MATMUL else tiles + hopper


def _shares(plan: Any) -> Iterator[Changes]:
    """As many as fill the device, fewer and more."""
    full = plan.device.sms / max(1, plan.tile.tiles(plan.problem))
    counts = [1, *(round(each * full) for each in (1, 2, 0.5, 4)), 2, 4, 8]
    yield from ({"splits": splits} for splits in dict.fromkeys(counts) if 1 <= splits <= MOST_SHARES)


def _depths(plan: Any) -> Iterator[Changes]:
    yield from ({"group": group} for group in (4, 16, 1, 32))
    if plan.device.backend != "interpreter":
        yield from ({"num_stages": stages} for stages in (3, 4, 5, 6, 8, 2))


def _idle(block: int, size: int) -> bool:
    """Whether half of the block would do."""
    return block > 16 and block >= 2 * size


def _tile(kernel: str, numbers: tuple[int, ...]) -> Changes:
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
    return {"kernel": kernel, **dict(zip(names, numbers, strict=True))}
