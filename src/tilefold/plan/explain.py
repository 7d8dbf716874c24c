"""A plan as text for people: the problem, the decision and its grounds, the grid, the cost, what was rejected."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilefold.plan.cost import live_pairs, visited_tiles
from tilefold.plan.dense.attention_hopper import consumers_of, packed_heads
from tilefold.plan.dense.fp8_hopper import KERNEL as FP8
from tilefold.plan.dense.specialised import SPECIALISED, folders
from tilefold.plan.limits import BOX, accumulator_registers, registers_estimate
from tilefold.plan.words import counted

if TYPE_CHECKING:
    from tilefold.plan.dense.attention import AttentionPlan, Rejected
    from tilefold.plan.dense.attention_fp8 import AttentionFp8Plan
    from tilefold.plan.problem import AttentionProblem

LABEL, WIDTH = 11, 110


def explain(plan: AttentionPlan) -> str:
    """The plan in aligned lines of at most 110 characters."""
    device = plan.device
    sms = "" if device.backend == "interpreter" else f", {device.sms} {'CUs' if device.backend == 'hip' else 'SMs'}"
    title = f"Attention plan for {device.title} ({device.target}{sms})"
    rows = [
        ("problem", problem_text(plan.problem)),
        ("kernel", f"{plan.kernel} ({_loads(plan)}), tile {plan.tile}"),
        ("rule", f"{plan.rule}. {plan.reason}"),
        ("evidence", plan.evidence),
        ("grid", _grid(plan, plan.programs_per_sm, plan.kernel in SPECIALISED)),
        ("tiles", _tiles(plan)),
        ("resources", _resources(plan)),
        ("cost", cost_text(plan)),
        ("bound", bound_text(plan)),
    ]
    return laid_out(title, rows, plan.rejected)


def laid_out(title: str, rows: Sequence[tuple[str, str]], rejected: Sequence[Rejected]) -> str:
    """A title, labelled sentences, and what was rejected and why, in aligned lines of at most 110 characters."""
    return "\n".join([title, *(line for label, text in rows for line in _row(label, text)), *_rejected(rejected)])


def _row(label: str, text: str, indent: str = "  ") -> list[str]:
    head = f"{indent}{label:<{LABEL}}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _rejected(rejected: Sequence[Rejected]) -> list[str]:
    if not rejected:
        return _row("rejected", "nothing")
    lines, width = ["  rejected"], max(len(entry.what) for entry in rejected) + 2
    for entry in rejected:
        head = f"    {entry.what:<{width}}"
        hang = " " * min(len(head), 40)
        lines += textwrap.wrap(entry.why, WIDTH, initial_indent=head, subsequent_indent=hang, break_on_hyphens=False)
    return lines


def scaled(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: 4.27 TB/s."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    places = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{places}f}"


def percent(share: float) -> str:
    """Two or three digits; 100% only if it is all."""
    if share < 1 and share > 0.9995:
        return "over 99.9%"
    return f"{share:.0%}" if share == 1 or 0.1 <= share < 0.995 else f"{share:.1%}"


def time_text(seconds: float) -> str:
    """Three significant digits in us, ms or s."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us" if seconds >= 1e-8 or not seconds else "under 0.01 us"


def problem_text(problem: AttentionProblem) -> str:
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
    mean = f", about {problem.mean_q} queries in the mean" if problem.mean_q else ""
    parts = [f"packed (varlen){mean}"] if problem.varlen else []
    if problem.causal:
        parts.append("causal")
    if problem.window != (-1, -1):
        left, right = ("unbounded" if side < 0 else str(side) for side in problem.window)
        parts.append(f"window (left {left}, right {right})")
    if problem.score_mods:
        parts.append("scores: " + " then ".join(problem.score_mods))
    if problem.mask_mods:
        parts.append("masks: " + " and ".join(problem.mask_mods))
    if problem.dropout:
        parts.append("dropout")
    return [*parts, "sinks"] if problem.sinks else parts


def _loads(plan: AttentionPlan) -> str:
    if own := SPECIALISED.get(plan.kernel):
        return own.loads(plan.problem, plan.tile, plan.options)
    return "K and V by descriptor boxes" if plan.kernel == BOX else "K and V by pointers"


def _grid(plan: AttentionPlan | AttentionFp8Plan, per_sm: int, draws: bool) -> str:
    """per_sm: programs at a time.  draws: they draw their blocks from a counter."""
    problem, programs = plan.problem, plan.grid[0]
    if not programs:
        return "0 programs: there is nothing to compute, so nothing is launched."
    pack = packed_heads(problem, plan.options)
    tiles = -(-problem.seq_q * pack // plan.block_m)
    batch = "" if problem.batch == 1 else f" x {problem.batch} sequences"
    made = f"{counted(programs, 'program')} = {counted(tiles, 'query tile')}{batch} x {counted(problem.heads // pack, 'head')}"
    if plan.device.backend == "interpreter":
        return f"{made}, run one after the other."
    sms, slots = plan.device.sms, plan.device.sms * per_sm
    if draws:
        running = min(slots, programs)
        each = "one" if running <= sms else "two" if running == 2 * sms else "up to two"
        drawing = f"{counted(running, 'program')}, {each} per SM"
        return f"{drawing}, draw from a counter: {made.replace('program', 'block', 1)}."
    unit = "CUs" if plan.device.backend == "hip" else "SMs"
    if programs < sms:
        return f"{made}: {programs} of {sms} {unit} have work ({programs / sms:.0%})."
    waves = programs / slots
    last = -(-programs // slots)
    full = f"{waves:.2f} waves of {slots} ({per_sm} per {unit[:-1]}), {waves / last:.0%} of their slots used"
    return f"{made}: all {sms} {unit} have work; {full}."


def _tiles(plan: AttentionPlan) -> str:
    problem = plan.problem
    rows = plan.block_m // packed_heads(problem, plan.options)  # queries of a block
    own = SPECIALISED.get(plan.kernel)
    padded = own.widths(problem) if own else (plan.block_qk, plan.block_v)
    dims = (problem.dim_qk + problem.dim_v) / sum(padded)
    return visited_text(problem, rows, plan.block_n, dims)


def visited_text(problem: AttentionProblem, rows: int, columns: int, dims: float = 1.0) -> str:
    """Of the tiles of so many rows and columns, those that the mask leaves something of; dims: what share of a tile's width is of
    head dims."""
    visited = visited_tiles(problem, rows, columns)
    if not visited:
        return "No key is live, so no tile is visited."
    every = -(-problem.seq_q // rows) * -(-problem.seq_k // columns)
    use = live_pairs(problem) / (visited * rows * columns)
    padded = f", {percent(dims)} of the padded head dims" if dims < 1 else ""
    return f"{visited} of {counted(every, 'score tile')} per head visited; {percent(use)} of their scores are live{padded}."


def _resources(plan: AttentionPlan) -> str:
    if plan.device.backend == "interpreter":
        return "The interpreter has no limits on shared memory or registers."
    shared = f"{plan.shared_bytes / 1024:.0f} of {plan.device.smem_per_block / 1024:.0f} KiB shared memory"
    programs = counted(plan.programs_per_sm, "program")
    if own := SPECIALISED.get(plan.kernel):
        return f"{shared}, {own.registers(plan.problem, plan.tile)} for accumulators, {programs} per SM."
    held = accumulator_registers(plan.problem, plan.device, plan.tile)
    wanted = registers_estimate(plan.problem, plan.device, plan.kernel, plan.tile)
    limit = plan.maxnreg or plan.device.registers_per_thread
    spill = f" (with everything else about {wanted}: may spill)" if wanted > limit else ""
    unit = "CU" if plan.device.backend == "hip" else "SM"
    return (
        f"about {shared}, {held} of {plan.device.registers_per_thread} registers per thread for accumulators{spill}, "
        f"about {programs} per {unit}."
    )


def cost_text(plan: AttentionPlan | AttentionFp8Plan) -> str:
    cost = plan.cost
    text = f"{scaled(cost.flops, 'FLOP')}, {scaled(cost.bytes, 'B')} of DRAM, {scaled(cost.exps, 'exp')}"
    upto = "at most " if plan.problem.varlen else ""
    return f"{upto}{text}, {_digits(cost.flops / cost.bytes)} FLOP per byte." if cost.bytes else f"{upto}{text}."


def bound_text(plan: AttentionPlan | AttentionFp8Plan) -> str:
    bound, cost = plan.bound, plan.cost
    if not bound.seconds:
        return "none: there is no work."
    if plan.device.backend == "interpreter":
        return f"interpreter: about {time_text(bound.seconds)}, at the rate that was measured for long tiles."
    rates = f"{scaled(cost.flops / bound.seconds, 'FLOP/s')}, {scaled(cost.bytes / bound.seconds, 'B/s')}"
    others = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in bound.times if name != bound.resource)
    least = time_text(bound.seconds)
    return f"{bound.resource}: {'' if least.startswith('under') else 'at least '}{least} ({rates}); {others}."


# ---------------------------------------------------------------- inputs in e4m3


def explain_fp8(plan: AttentionFp8Plan) -> str:
    """The plan in aligned lines of at most 110 characters."""
    device = plan.device
    title = f"Attention plan, e4m3 to bfloat16, for {device.title} ({device.target})"
    rows = [
        ("problem", problem_text(plan.problem).replace("bfloat16", "float8_e4m3fn to bfloat16")),
        ("kernel", _fp8_kernel(plan)),
        ("rule", f"{plan.rule}. {plan.reason}"),
        ("evidence", plan.evidence),
        *(_launched(plan) if plan.kernel == FP8 else ()),
        ("cost", cost_text(plan)),
        ("bound", bound_text(plan)),
    ]
    return laid_out(title, rows, plan.rejected)


def _fp8_kernel(plan: AttentionFp8Plan) -> str:
    if plan.kernel != FP8:
        portable = plan.portable
        return f"{plan.kernel} q, k and v to bfloat16, then {portable.kernel}, tile {portable.tile}"
    sums = "by the tensor cores" if "direct" in plan.options else "in fp32"
    return (
        f"transpose_values, then {plan.kernel} (Q, K and V^T by descriptor boxes; "
        f"{folders(consumers_of(plan.tile), plan.options)}; tiles summed {sums}), tile {plan.tile}"
    )


def _launched(plan: AttentionFp8Plan) -> tuple[tuple[str, str], ...]:
    have = plan.device.smem_per_block / 1024
    return (
        ("grid", _grid(plan, 1, draws=True)),
        ("tiles", visited_text(plan.problem, plan.block_m, plan.block_n)),
        ("resources", f"{plan.shared_bytes / 1024:.0f} of {have:.0f} KiB shared memory, 1 program per SM."),
    )
