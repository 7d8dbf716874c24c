"""A comparison of two runs as a table, as sentences and as markdown."""

from collections import Counter

from tilefold.bench.attention.grid import title_of
from tilefold.bench.page import Rows
from tilefold.bench.records.changes import LEAST_COVERAGE, Change, Comparison
from tilefold.bench.records.record import digits, table_lines
from tilefold.bench.records.runs import Key

__all__ = ["change_lines", "change_markdown", "change_table"]

NAMED = 6  # of what is missing; the others are counted


def change_table(found: Comparison) -> Rows:
    """A line a figure: old and new milliseconds, the ratio with its interval, the verdict."""
    several = len({one.key.family for one in found.changes}) > 1
    head = ("case", "implementation", "by", "old ms", "new ms", "new / old", "interval", "")
    return Rows(head, tuple(_line(one, several) for one in found.changes))


def _line(one: Change, several: bool) -> tuple[str, ...]:
    case = f"{one.key.family} {one.key.case}" if several else one.key.case
    old, new = (digits(ms) if ms else "-" for ms in (one.old_ms, one.new_ms))
    ratio = f"{one.ratio:.3f}" if one.ratio and one.interval else ""
    interval = f"{'~ ' if one.rough else ''}{one.interval.low:.3f} to {one.interval.high:.3f}" if one.interval else ""
    verdict = one.verdict.upper() if one.verdict == "worse" else one.verdict
    return case, title_of(one.key.implementation), one.method, old, new, ratio, interval, verdict


def change_lines(found: Comparison) -> list[str]:
    """How many became what, how sure that is, what the other libraries say of the machine, and what is missing on a side."""
    counts = Counter(one.verdict for one in found.changes if one.ours)
    lines = [
        f"tilefold: {', '.join(f'{count} {verdict}' for verdict, count in counts.items()) or 'nothing to compare'}"
    ]
    lines += [f"{one.key}: {one.note}" for one in found.changes if one.note]
    coverage = found.coverage
    if coverage is not None:
        share = " to ".join(dict.fromkeys(f"{100 * each:.0f}" for each in coverage))
        lines.append(
            f"intervals cover the ratio of the medians in {share} % of repetitions; beyond {100 * found.noise:g} % it counts"
            + (": too few rounds to conclude anything from some" if coverage[0] < LEAST_COVERAGE else "")
        )
    if any(one.rough for one in found.changes):
        lines.append(
            "~: one of the records holds percentiles only, no rounds: its interval is a rough one, which fails nothing"
        )
    if found.control is not None:
        mean, count = found.control
        lines.append(f"the other libraries took {mean:.3f} times as long as in the old run (geometric mean of {count})")
    lines += _missing("only in the old run", found.gone) + _missing("only in the new run", found.added)
    return lines


def _missing(where: str, keys: tuple[Key, ...]) -> list[str]:
    if not keys:
        return []
    some = ", ".join(map(str, keys[:NAMED]))
    return [f"{where} ({len(keys)}): {some}{', ...' if len(keys) > NAMED else ''}"]


def change_markdown(found: Comparison) -> str:
    """The same for a document."""
    table = change_table(found)
    lines = table_lines(table.head, table.rows, left=3) if table.rows else []
    said = [*(f"**Not the same setting**: {line}" for line in found.differences), *change_lines(found)]
    return "\n".join([*lines, *(f"\n{line}." for line in said)]) + "\n"
