"""What `tilefold bench parallel` found, as values and as text."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilefold.bench.page import Rows, to_markdown
from tilefold.bench.parallel.loads import Work
from tilefold.bench.parallel.setup import Rates
from tilefold.bench.record import number


@dataclass(frozen=True)
class Line:
    """One way at one length.  ms: of the slowest rank.  status: "ok", "WRONG", "failed" or "not usable", note says why.
    tflops: of one rank, the mean.  efficiency: beside what rank 0 reaches alone; of_all: beside what all ranks reach at once
    that exchange nothing; both as `rates` says.  memory: bytes at the peak of forward, and backward, beyond q, k, v and dout.
    predicted_*: by the plan, with the FLOP/s of the slowest rank, all at once.  hidden: share of the transfers behind kernels,
    exposed_ms: what is left of them, waiting_ms: for others to come to a transfer with nothing else to do; all of the worst
    rank."""

    way: str
    ranks: int
    tokens: int
    direction: str
    status: str
    note: str = ""
    ms: float = float("nan")
    tflops: float = float("nan")
    efficiency: float = float("nan")
    memory: int = 0
    predicted_ms: float = float("nan")
    predicted_memory: float = float("nan")
    hidden: float | None = None
    exposed_ms: float | None = None
    waiting_ms: float | None = None
    of_all: float = float("nan")
    rates: Rates | None = None


HEAD = (
    "way", "tokens", "direction", "ms", "predicted", "TFLOP/s", "of rank 0", "of all", "GB", "predicted", "hidden",
    "exposed", "waiting",
)  # fmt: skip


def cells_of(line: Line) -> tuple[str, ...]:
    """A line of the table."""
    first = (line.way, str(line.tokens), line.direction)
    if line.status != "ok":
        return (*first, line.status, *("",) * 9)
    return (
        *first, f"{line.ms:.3f}", number(line.predicted_ms, ".3f"), f"{line.tflops:.3g}", f"{line.efficiency:.1%}",
        number(line.of_all, ".1%"),
        f"{line.memory / 1e9:.3f}" if line.memory else "", number(line.predicted_memory / 1e9, ".3f"),
        number(line.hidden, ".0%"), number(line.exposed_ms, ".3f"), number(line.waiting_ms, ".3f"),
    )  # fmt: skip


def to_json(lines: Sequence[Line], setting: dict[str, Any], work: Work) -> str:
    return json.dumps({"setting": setting, "work": asdict(work), "lines": [asdict(line) for line in lines]}, indent=1)


def markdown(lines: Sequence[Line]) -> str:
    return to_markdown([Rows(HEAD, tuple(map(cells_of, lines)), left=3)])
