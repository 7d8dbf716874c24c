"""What a run has shown: throughput, waiting times, preemptions, and memory beside a contiguous cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from continuous.engine import Request, StepRecord
from tilefold.paged import CacheStatistics

__all__ = ["Run", "lines_of", "record_of"]

KEPT = ("number", "arrives", "first", "finished", "preempted")  # of a request, in its record


@dataclass(frozen=True)
class Run:
    """A finished run. seconds: of all steps together; peak: the cache's own figures at the step with the most pages in use."""

    requests: Sequence[Request]
    steps: Sequence[StepRecord]
    seconds: float
    peak: CacheStatistics
    page_size: int

    @property
    def generated(self) -> int:
        return sum(one.generated for one in self.steps)

    @property
    def computed(self) -> int:
        """Tokens that went through the model, those computed again included."""
        return sum(one.prefill + one.decode for one in self.steps)

    @property
    def again(self) -> int:
        """Tokens that were computed more than once."""
        return self.computed - sum(len(one.known) - 1 for one in self.requests)

    @property
    def mixed(self) -> int:
        """Steps that held prefill and decoding at once."""
        return sum(one.prefill > 0 and one.decode > 0 for one in self.steps)

    @property
    def most_running(self) -> int:
        return max(one.running for one in self.steps)

    @property
    def use(self) -> float:
        """Mean share of the rows of pages in use that held a token, 0 to 1."""
        rows = sum(one.pages for one in self.steps) * self.page_size
        return 1 - sum(one.wasted_rows for one in self.steps) / max(1, rows)

    @property
    def contiguous_bytes(self) -> int:
        """What as many requests as ran at a time would have taken with max_tokens rows each."""
        return self.most_running * self.peak.max_tokens * self.peak.row_bytes


def _middle(values: Sequence[int]) -> tuple[int, int]:
    """Median and largest."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[-1]


def lines_of(run: Run) -> list[tuple[str, str]]:
    """(what, figures) of a run, for people."""
    from tilefold.paged.statistics import readable_bytes

    waited = [one.first - one.arrives for one in run.requests if one.first is not None]
    took = [one.finished - one.arrives for one in run.requests if one.finished is not None]
    seconds, peak = max(run.seconds, 1e-9), run.peak
    generated, computed = run.generated / seconds, run.computed / seconds
    preempted, resumed = (sum(getattr(one, name) for one in run.steps) for name in ("preempted", "resumed"))
    in_pages, allocated, contiguous = map(
        readable_bytes, (peak.bytes_in_pages, peak.bytes_allocated, run.contiguous_bytes)
    )
    each = f"{run.seconds / len(run.steps) * 1e3:.1f} ms each"
    return [
        ("requests", f"{len(run.requests)}, at most {run.most_running} at a time"),
        ("steps", f"{len(run.steps)}, {run.mixed} of them with prefill and decoding, {each}"),
        ("throughput", f"{generated:.1f} generated tokens/s, {computed:.1f} computed tokens/s"),
        ("tokens", f"{run.generated} generated in {run.seconds:.2f} s"),
        ("first token", "after {} steps in the median, {} at most".format(*_middle(waited))),
        ("last token", "after {} steps in the median, {} at most".format(*_middle(took))),
        ("preempted", f"{preempted} times, {resumed} swapped in again, {run.again} tokens computed again"),
        ("pages", f"{peak.pages_used} of {peak.pages_total} at the peak, {peak.page_size} tokens each"),
        ("used rows", f"{run.use:.1%} of the rows in those pages, in the mean of all steps"),
        ("memory", f"{in_pages} of pages at the peak, {allocated} allocated"),
        ("contiguous", f"{contiguous} for {run.most_running} requests of {peak.max_tokens} tokens"),
    ]


def record_of(run: Run) -> dict[str, Any]:
    """The same for programs, and every request."""
    return {
        "seconds": run.seconds,
        "generated": run.generated,
        "computed": run.computed,
        "computed_again": run.again,
        "mixed_steps": run.mixed,
        "most_running": run.most_running,
        "row_use": run.use,
        "peak": {**asdict(run.peak), "bytes_in_pages": run.peak.bytes_in_pages},
        "contiguous_bytes": run.contiguous_bytes,
        "steps": [asdict(one) for one in run.steps],
        "requests": [
            {name: getattr(one, name) for name in KEPT} | {"prompt": list(one.prompt), "generated": one.generated}
            for one in run.requests
        ],
    }
