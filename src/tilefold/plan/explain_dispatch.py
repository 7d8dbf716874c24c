"""Split decisions and traces of a generation as text for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tilefold.plan.cache.flash_split import FUNCTIONS
from tilefold.plan.explain import LABEL, WIDTH, laid_out, problem_text, scaled, time_text
from tilefold.plan.words import counted as count

if TYPE_CHECKING:
    from tilefold.plan.cache.dispatch import SplitDecision
    from tilefold.plan.trace import Trace, TraceRange

HEAD = (
    "",
    "steps",
    "queries",
    "keys",
    "kernel",
    "splits",
    "programs",
    "at work",
    "waves",
    "bytes",
    "bound us",
    "predicted us",
)


def explain_decision(made: SplitDecision) -> str:
    """The decision in aligned lines of at most 110 characters."""
    device, one = made.device, made.splits == 1
    unit = "CUs" if device.backend == "hip" else "SMs"
    title = f"Split decision of {made.policy} on {device.title} ({device.target}, {device.sms} {unit})"
    combine = f", then {made.combine}" if made.combine else ""
    times = "" if one else f" x {made.splits} splits"
    idle = f"; {made.working} of them have keys" if made.working < made.programs else ""
    partials = "" if one else ", partial results included"
    drawn = f"; tiles draw {scaled(made.cost.l2_bytes, 'B')} from L2" if made.cost.l2_bytes else ""
    rows = [
        ("problem", problem_text(made.problem)),
        ("call", _call(made)),
        ("kernel", f"{made.kernel}{combine}, tile {made.block_m} x {made.block_n}"),
        ("splits", f"{made.splits}. {made.reason}"),
        ("grid", f"{count(made.programs, 'program')}{_tiles(made, times)}{idle}: {made.share:.0%} of the "
                 f"{unit} have work, {made.waves:.2f} waves of {made.slots}."),
        ("cost", f"{scaled(made.cost.flops, 'FLOP')}, {scaled(made.cost.bytes, 'B')} of DRAM{partials}{drawn}."),
        ("bound", f"{made.bound.resource}: at least {time_text(made.bound.seconds)}; {time_text(made.predicted_s)} if an SM "
                  "draws its even share of the device."),
    ]  # fmt: skip
    return laid_out(title, rows, made.rejected)


def _tiles(made: SplitDecision, times: str) -> str:
    """How the programs come to be so many; those of even slices are a number of their own."""
    even = made.kernel == "attention_decode" and not made.asked
    return "" if even else f" = {count(made.tiles, 'query tile')}{times}"


def _call(made: SplitDecision) -> str:
    text = FUNCTIONS[made.call]
    if made.call == "kvcache":
        decides = "" if made.kernel == "attention_decode" else ", which is what decides"
        text += f", a cache of {count(made.capacity, 'row')}{decides}"
    return text + (", in pages" if made.paged else "") + (", new keys written first" if made.append else "")


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low}-{high}"


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def _cells(number: int, part: TraceRange) -> tuple[str, ...]:
    first, last = part.first, part.last
    return (
        str(number),
        _span(str(part.first_step), str(part.last_step)),
        str(first.problem.seq_q),
        _span(str(first.problem.seq_k), str(last.problem.seq_k)),
        first.kernel + (" + combine" if first.combine else ""),
        str(first.splits),
        str(first.programs),
        _span(str(first.working), str(last.working)),
        f"{first.waves:.2f}",
        _span(scaled(first.cost.bytes, "B"), scaled(last.cost.bytes, "B")),
        _span(_us(first.bound.seconds), _us(last.bound.seconds)),
        _span(_us(part.least_s), _us(part.most_s)),
    )


def explain_trace(trace: Trace) -> str:
    """The generation's header, a table of its ranges, the reason of each, and the sums."""
    run, device = trace.generation, trace.device
    heads = count(run.heads, "query head") + f" on {count(run.kv_heads, 'KV head')}"
    sms = f"{device.sms} {'CUs' if device.backend == 'hip' else 'SMs'}"
    cache = f"a cache of {run.rows} rows" if run.call == "kvcache" else "keys grow by one a step"
    lines = [
        f"{trace.policy} on {device.title} ({sms}), {FUNCTIONS[run.call]}, {cache}{', in pages' if run.paged else ''}",
        f"a prompt of {run.prompt} and {count(run.new, 'new token')}, {heads}, D={run.dim}, {run.dtype}, batch {run.batch}",
        "",
    ]
    table = [HEAD, *(_cells(i, part) for i, part in enumerate(trace.ranges, 1))]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    for cells in table:
        aligned = (
            text.ljust(width) if i == 4 else text.rjust(width)
            for i, (text, width) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append("  ".join(aligned).rstrip())
    lines.append("")
    for i, part in enumerate(trace.ranges, 1):
        lines += textwrap.wrap(f"{i:>{widths[0]}}  {part.first.reason}", WIDTH, subsequent_indent=" " * (widths[0] + 2))
    lines += ["", *_sums(trace)]
    return "\n".join(lines)


def _sums(trace: Trace) -> list[str]:
    two = sum(part.steps for part in trace.ranges if part.first.combine)
    text = (
        f"Of {count(trace.generation.new, 'step')} {two} launch two kernels a layer (partial results and their merge), "
        f"{trace.generation.new - two} one. Attention of one layer over all steps: bound {time_text(trace.bound_s)}, predicted "
        f"{time_text(trace.predicted_s)}."
    )
    return textwrap.wrap(text, WIDTH + LABEL)
