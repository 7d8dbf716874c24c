"""A plan as text for people: the problem, the decision and its grounds, the grid, the cost, what was rejected."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tilefold.plan.attention_hopper import KERNEL as HOPPER
from tilefold.plan.attention_hopper import REGISTERS, consumers_of, hopper_programs, packed_heads, width_of
from tilefold.plan.cost import live_pairs, visited_tiles
from tilefold.plan.limits import BOX, accumulator_registers, registers_estimate
from tilefold.plan.words import counted

if TYPE_CHECKING:
    from tilefold.plan.attention import AttentionPlan
    from tilefold.plan.attention_fp8 import AttentionFp8Plan
    from tilefold.plan.dispatch import SplitDecision
    from tilefold.plan.problem import AttentionProblem

__all__ = ["explain"]

LABEL, WIDTH = 11, 110


def explain(plan: AttentionPlan) -> str:
    """The plan in aligned lines of at most 110 characters."""
    device = plan.device
    sms = "" if device.backend == "interpreter" else f", {device.sms} {'CUs' if device.backend == 'hip' else 'SMs'}"
    lines = [f"Attention plan for {device.title} ({device.target}{sms})"]
    rows = [
        ("problem", _problem(plan.problem)),
        ("kernel", f"{plan.kernel} ({_loads(plan)}), tile {plan.tile}"),
        ("rule", f"{plan.rule}. {plan.reason}"),
        ("evidence", plan.evidence),
        ("grid", _grid(plan)),
        ("tiles", _tiles(plan)),
        ("resources", _resources(plan)),
        ("cost", _cost(plan)),
        ("bound", _bound(plan)),
    ]
    for label, text in rows:
        lines += _row(label, text)
    lines += _rejected(plan)
    return "\n".join(lines)


def _row(label: str, text: str, indent: str = "  ") -> list[str]:
    head = f"{indent}{label:<{LABEL}}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _rejected(plan: AttentionPlan | AttentionFp8Plan | SplitDecision) -> list[str]:
    if not plan.rejected:
        return _row("rejected", "nothing")
    lines, width = ["  rejected"], max(len(entry.what) for entry in plan.rejected) + 2
    for entry in plan.rejected:
        head = f"    {entry.what:<{width}}"
        hang = " " * min(len(head), 40)
        lines += textwrap.wrap(entry.why, WIDTH, initial_indent=head, subsequent_indent=hang, break_on_hyphens=False)
    return lines


def _scaled(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: 4.27 TB/s."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    places = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{places}f}"


def _percent(share: float) -> str:
    """Two or three digits; 100% only if it is all."""
    if share < 1 and share > 0.9995:
        return "over 99.9%"
    return f"{share:.0%}" if share == 1 or 0.1 <= share < 0.995 else f"{share:.1%}"


def _time(seconds: float) -> str:
    """Three significant digits in us, ms or s."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us" if seconds >= 1e-8 or not seconds else "under 0.01 us"


def _problem(problem: AttentionProblem) -> str:
    heads = counted(problem.heads, "head")
    if problem.group > 1:
        heads += f" on {counted(problem.kv_heads, 'KV head')}"
    dims = f"D={problem.dim_qk}" if problem.dim_qk == problem.dim_v else f"D={problem.dim_qk} (V {problem.dim_v})"
    upto = "up to " if problem.varlen else ""
    size = "1 sequence" if problem.batch == 1 else f"{problem.batch} sequences"
    parts = [f"{size} of {upto}{counted(problem.seq_q, 'query', 'queries')} and {upto}{counted(problem.seq_k, 'key')}"]
    parts += [heads, dims, problem.dtype, *_mask(problem)]
    return ", ".join(parts)


def _mask(problem: AttentionProblem) -> list[str]:
    parts = ["packed (varlen)"] if problem.varlen else []
    if problem.causal:
        parts.append("causal")
    if problem.window != (-1, -1):
        left, right = ("unbounded" if side < 0 else str(side) for side in problem.window)
        parts.append(f"window (left {left}, right {right})")
    if problem.score_mods:
        parts.append("scores: " + " then ".join(problem.score_mods))
    if problem.mask_mods:
        parts.append("masks: " + " and ".join(problem.mask_mods))
    return [*parts, "sinks"] if problem.sinks else parts


def _loads(plan: AttentionPlan) -> str:
    if plan.kernel == HOPPER:
        number = ("one warpgroup folds", "two warpgroups fold", "three warpgroups fold")[consumers_of(plan.tile) - 1]
        versions = f" ({', '.join(plan.options)})" if plan.options else ""
        return f"Q, K and V by descriptor boxes; {number}{versions}, one warp loads"
    return "K and V by descriptor boxes" if plan.kernel == BOX else "K and V by pointers"


def _grid(plan: AttentionPlan) -> str:
    problem, programs = plan.problem, plan.grid[0]
    if not programs:
        return "0 programs: there is nothing to compute, so nothing is launched."
    pack = packed_heads(problem, plan.options)
    tiles = -(-problem.seq_q * pack // plan.block_m)
    batch = "" if problem.batch == 1 else f" x {problem.batch} sequences"
    made = f"{counted(programs, 'program')} = {counted(tiles, 'query tile')}{batch} x {counted(problem.heads // pack, 'head')}"
    if plan.device.backend == "interpreter":
        return f"{made}, run one after the other."
    if plan.kernel == HOPPER:
        resident = hopper_programs(problem, plan.tile, plan.device)
        running, sms = min(resident, programs), plan.device.sms
        each = "one" if running <= sms else "two" if running == 2 * sms else "up to two"
        drawing = f"{counted(running, 'program')}, {each} per SM"
        return f"{drawing}, draw from a counter: {made.replace('program', 'block', 1)}."
    sms, slots = plan.device.sms, plan.device.sms * plan.programs_per_sm
    unit = "CUs" if plan.device.backend == "hip" else "SMs"
    if programs < sms:
        return f"{made}: {programs} of {sms} {unit} have work ({programs / sms:.0%})."
    waves = programs / slots
    last = -(-programs // slots)
    full = (
        f"{waves:.2f} waves of {slots} ({plan.programs_per_sm} per {unit[:-1]}), {waves / last:.0%} of their slots used"
    )
    return f"{made}: all {sms} {unit} have work; {full}."


def _tiles(plan: AttentionPlan) -> str:
    problem = plan.problem
    rows = plan.block_m // packed_heads(problem, plan.options)  # queries of a block
    visited = visited_tiles(problem, rows, plan.block_n)
    if not visited:
        return "No key is live, so no tile is visited."
    all_tiles = -(-problem.seq_q // rows) * -(-problem.seq_k // plan.block_n)
    use = live_pairs(problem) / (visited * rows * plan.block_n)
    hopper = plan.kernel == HOPPER
    padded = (width_of(problem.dim_qk), width_of(problem.dim_v)) if hopper else (plan.block_qk, plan.block_v)
    dims = (problem.dim_qk + problem.dim_v) / sum(padded)
    text = f"{visited} of {counted(all_tiles, 'score tile')} per head visited; {_percent(use)} of their scores are live"
    return f"{text}, {_percent(dims)} of the padded head dims." if dims < 1 else f"{text}."


def _resources(plan: AttentionPlan) -> str:
    if plan.device.backend == "interpreter":
        return "The interpreter has no limits on shared memory or registers."
    if plan.kernel == HOPPER:
        held = (width_of(plan.problem.dim_v) + plan.block_n) // 2
        return (
            f"{plan.shared_bytes / 1024:.0f} of {plan.device.smem_per_block / 1024:.0f} KiB shared memory, {held} of "
            f"{REGISTERS[consumers_of(plan.tile)][1]} registers per folding thread for accumulators, "
            f"{counted(plan.programs_per_sm, 'program')} per SM."
        )
    held = accumulator_registers(plan.problem, plan.device, plan.tile)
    have = plan.device.smem_per_block / 1024
    wanted = registers_estimate(plan.problem, plan.device, plan.kernel, plan.tile)
    limit = plan.maxnreg or plan.device.registers_per_thread
    spill = f" (with everything else about {wanted}: may spill)" if wanted > limit else ""
    unit = "CU" if plan.device.backend == "hip" else "SM"
    return (
        f"about {plan.shared_bytes / 1024:.0f} of {have:.0f} KiB shared memory, {held} of "
        f"{plan.device.registers_per_thread} registers per thread for accumulators{spill}, "
        f"about {counted(plan.programs_per_sm, 'program')} per {unit}."
    )


def _cost(plan: AttentionPlan | AttentionFp8Plan) -> str:
    cost = plan.cost
    text = f"{_scaled(cost.flops, 'FLOP')}, {_scaled(cost.bytes, 'B')} of DRAM, {_scaled(cost.exps, 'exp')}"
    upto = "at most " if plan.problem.varlen else ""
    return f"{upto}{text}, {_digits(cost.flops / cost.bytes)} FLOP per byte." if cost.bytes else f"{upto}{text}."


def _bound(plan: AttentionPlan | AttentionFp8Plan) -> str:
    bound, cost = plan.bound, plan.cost
    if not bound.seconds:
        return "none: there is no work."
    if plan.device.backend == "interpreter":
        return f"interpreter: about {_time(bound.seconds)}, at the rate that was measured for long tiles."
    rates = f"{_scaled(cost.flops / bound.seconds, 'FLOP/s')}, {_scaled(cost.bytes / bound.seconds, 'B/s')}"
    others = ", ".join(f"{name} {_time(seconds)}" for name, seconds in bound.times if name != bound.resource)
    least = _time(bound.seconds)
    return f"{bound.resource}: {'' if least.startswith('under') else 'at least '}{least} ({rates}); {others}."
