"""How much of the transfers is hidden: the share of communication during which the device also computes, from a trace."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tilefold.bench.torch_trace import exported

__all__ = ["Hidden", "device_events", "hidden_of", "traced", "written"]

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

    @property
    def exposed(self) -> float:
        """Seconds of communication during which nothing else runs."""
        return self.communication - self.both

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


MARK = "tilefold: the measured call"


def traced(step: Callable[[], object], ready: Callable[[], object], keep: bool = False) -> tuple[Hidden, list[Any]]:
    """Of one call, by torch's profiler on the GPU, and with keep the events of the device, as a viewer reads them.

    ready: brings all ranks here.  The call is made twice: the first one under the profiler takes milliseconds longer, on each
    rank others, and NCCL's kernels of the faster ones would wait for the slower ones.
    NCCL's kernels are communication, every other kernel is computation (copies are neither: they are what pieces cost)."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
        ready()
        torch.cuda.synchronize()
        with record_function(MARK):
            step()
            torch.cuda.synchronize()
    events = list(profiler.events() or ())
    began = max((e.time_range.start for e in events if e.name == MARK and e.device_type.name == "CPU"), default=0.0)
    kinds: tuple[list[Span], list[Span]] = ([], [])
    for event in events:
        if event.device_type.name == "CUDA" and event.time_range.start >= began and not event.is_user_annotation:
            kind = _kind(event)
            if kind is not None:
                kinds[kind].append((event.time_range.start * 1e-6, event.time_range.end * 1e-6))
    found: list[Any] = []
    if keep:
        found = device_events(exported(profiler)["traceEvents"])
    return hidden_of(*kinds), found


def device_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of kernels and copies after the mark, from 0 on, in the order of time."""
    every = list(events)
    began = max((e["ts"] for e in every if e.get("name") == MARK and e.get("cat") == "user_annotation"), default=0)
    kept = [e for e in every if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= began]
    kept.sort(key=lambda e: e["ts"])
    return [{**e, "ts": e["ts"] - began} for e in kept]


def written(stem: str, traces: dict[str, dict[str, list[Any]]]) -> list[str]:
    """One file for each way, STEM-way.json.gz, with all its lines one below the other; traces: way, line, events.  The paths."""
    import gzip
    import json

    paths = []
    for way, lines in traces.items():
        every = []
        for number, (line, events) in enumerate(lines.items()):
            every.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{way}, {line}"}})
            every += [{**e, "pid": number} for e in events]
        paths.append(f"{stem}-{way}.json.gz")
        with gzip.open(paths[-1], "wt") as file:
            json.dump({"traceEvents": every}, file)
    return paths


def _kind(event: Any) -> int | None:
    """0 communication, 1 computation, None neither."""
    name = event.name.lower()
    if "nccl" in name:
        return 0
    return None if name.startswith(("memcpy", "memset")) else 1
