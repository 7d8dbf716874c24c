"""A profile as a record, a table, Markdown and JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from tilefold.bench.page import Heading, Part, Rows, Words, to_markdown
from tilefold.profiling.evidence import Evidence, Region
from tilefold.profiling.verdict import Verdict, judge

HEAD = (
    "kernel", "x", "us", "%", "GB/s", "TFLOP/s", "of bound", "regs", "spills", "smem KiB", "prog/SM", "waves",
    "filled", "verdict",
)  # fmt: skip
# column of the table of counters -> field of `Counters`
COUNTED = {
    "DRAM": "dram",
    "L2": "l2",
    "L2 to SM": "l2_to_sm",
    "L1": "l1",
    "tensor": "tensor",
    "exp": "exp",
    "warps": "occupancy",
}
NAME_WIDTH = 44
FEW = 3  # instruction families that a line names, and stall reasons of a table


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel: what is known of it, and what that says."""

    evidence: Evidence
    verdict: Verdict

    @classmethod
    def of(cls, evidence: Evidence) -> "Row":
        """With the verdict on it."""
        return cls(evidence, judge(evidence))


@dataclass(frozen=True, slots=True)
class Profile:
    """Kernels by time, longest first; the region that they ran in and the verdict on it, None where the device was busy."""

    device: str
    rows: tuple[Row, ...]
    region: Region | None
    verdict: Verdict | None
    notes: tuple[str, ...] = ()

    def row(self, kernel: str) -> Row:
        """The first row of a kernel by name. KeyError if it did not run."""
        for row in self.rows:
            if row.evidence.kernel == kernel:
                return row
        raise KeyError(kernel)

    def table(self) -> tuple[tuple[str, ...], ...]:
        """Cells under `HEAD`; empty where nobody measured."""
        return tuple(_cells(row) for row in self.rows)

    def lines(self) -> tuple[str, ...]:
        """The verdicts in words: of the region, then of each kernel, then what else is to be known."""
        whole = (f"the region: {self.verdict}",) if self.verdict else ()
        each = tuple(f"{_short(row.evidence.kernel)}: {row.verdict}{_more(row.evidence)}" for row in self.rows)
        return (*whole, *each, *self.notes)

    def parts(self) -> list[Part]:
        """Tables and verdicts; that of hardware counters where some were read."""
        counters = self.counters()
        counted = [Rows(("kernel", *COUNTED, "waits for"), counters)] if counters else []
        words = (Words(line, "") for line in self.lines())
        return [Heading(self.device), Rows(HEAD, self.table()), *counted, *words]

    def markdown(self) -> str:
        """`parts` for a document."""
        return to_markdown(self.parts())

    def counters(self) -> tuple[tuple[str, ...], ...]:
        """Cells of hardware counters, a row a kernel that has some: percent of the machine's peak, of `warps` of the most that
        can be resident; and what warps wait for most, in shares of all waiting."""
        found = []
        for row in self.rows:
            if (c := row.evidence.counters) is None:
                continue
            shares = [getattr(c, name) for name in COUNTED.values()]
            waits = ", ".join(f"{reason} {share:.0%}" for reason, share in c.waits[:FEW])
            cells = ("" if share is None else f"{share:.0f} %" for share in shares)
            found.append((_short(row.evidence.kernel), *cells, waits))
        return tuple(found)

    def document(self) -> dict[str, Any]:
        """Plain values for JSON; `tilefold roofline` draws the kernels whose work was declared."""
        return {"kind": "profile", **asdict(self), "points": [_point(row) for row in self.rows if _point(row)]}

    def to_json(self) -> str:
        """`document` as text."""
        return json.dumps(self.document(), indent=2, allow_nan=False) + "\n"

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(HEAD, *self.table(), strict=True)]
        table = (HEAD, *self.table())
        rows = ["  ".join(cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
                for row in table]  # fmt: skip
        return "\n".join([self.device, *rows, "", *self.lines()])


def _point(row: Row) -> dict[str, Any] | None:
    e = row.evidence
    moved = e.bytes if e.bytes else e.counters.dram_bytes if e.counters else None
    if not e.flops or not moved or not e.seconds:
        return None
    return {
        "name": e.kernel, "flops": e.flops, "bytes": moved, "seconds": e.seconds, "verdict": row.verdict.resource,
        "detail": row.verdict.sentence,
    }  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def _cells(row: Row) -> tuple[str, ...]:
    e, w = row.evidence, row.evidence.waves

    def number(value: float | None, form: str = "{:.0f}", scale: float = 1.0) -> str:
        return "" if value is None else form.format(value * scale)

    rates = [work / e.seconds if work and e.seconds else None for work in (e.bytes, e.flops)]
    shares = [share for share in (e.tensor_share, e.dram_share, e.l2_share) if share is not None]
    return (
        _short(e.kernel),
        str(e.launches),
        number(e.seconds, "{:.1f}", 1e6),
        number(e.share, "{:.1f}", 100),
        number(rates[0], "{:.0f}", 1e-9),
        number(rates[1], "{:.1f}", 1e-12),
        number(max(shares) if shares else None, "{:.0f} %"),
        number(e.registers),
        number(e.spills),
        number(e.shared_bytes, "{:.1f}", 1 / 1024),
        f"{e.resident} ({e.limit})" if e.resident is not None else "",
        number(w.waves if w else None, "{:.2f}"),
        number(w.filled if w else None, "{:.0f} %", 100),
        row.verdict.resource,
    )


def _more(e: Evidence) -> str:
    """Counters and instruction mix, where known, after the verdict."""
    parts = []
    c = e.counters
    if c is not None:
        named = {title: getattr(c, name) for title, name in COUNTED.items()}
        parts.append(", ".join(f"{name} {share:.0f} %" for name, share in named.items() if share is not None))
        if c.top_stall:
            parts.append(f"waits most for {c.top_stall[0]} ({100 * c.top_stall[1]:.0f} %)")
    work = {name: count for name, count in e.opcodes.items() if name != "NOP"}
    if work:
        first, total = sorted(work.items(), key=lambda entry: -entry[1])[:FEW], sum(work.values())
        parts.append(f"code: {', '.join(f'{name} {100 * count / total:.0f} %' for name, count in first)}")
    return f" [{'; '.join(part for part in parts if part)}]" if any(parts) else ""
