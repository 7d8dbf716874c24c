"""How much of the transfers is hidden: the share of communication during which the device also computes, from a trace."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Hidden", "hidden_of", "traced"]

Span = tuple[float, float]


class Hidden(NamedTuple):
    """Seconds of communication, of computation, and of both at once, on one device."""

    communication: float
    computation: float
    both: float

    @property
    def share(self) -> float:
        """Of the communication that is hidden behind computation; 1 if there is none."""
        return self.both / self.communication if self.communication else 1.0

    def __str__(self) -> str:
        return (
            f"{self.communication * 1e3:.2f} ms of transfers, {self.both * 1e3:.2f} ms ({self.share:.0%}) of them behind "
            f"{self.computation * 1e3:.2f} ms of kernels"
        )


def hidden_of(communication: Iterable[Span], computation: Iterable[Span]) -> Hidden:
    """From (start, end) of every operation of each kind, in seconds, any order, overlapping or not."""
    first, second = _joined(communication), _joined(computation)
    both, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        both += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return Hidden(sum(b - a for a, b in first), sum(b - a for a, b in second), both)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Disjoint and ascending."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def traced(step: Callable[[], object], path: str | None = None) -> Hidden:
    """Of one call, by torch's profiler on the GPU; path: also write the trace for a viewer.

    NCCL's kernels are communication, every other kernel is computation (copies are neither: they are what pieces cost)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(path)
    kinds: tuple[list[Span], list[Span]] = ([], [])
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            kind = _kind(event)
            if kind is not None:
                kinds[kind].append((event.time_range.start * 1e-6, event.time_range.end * 1e-6))
    return hidden_of(*kinds)


def _kind(event: Any) -> int | None:
    """0 communication, 1 computation, None neither."""
    name = event.name.lower()
    if "nccl" in name:
        return 0
    return None if name.startswith(("memcpy", "memset")) else 1
