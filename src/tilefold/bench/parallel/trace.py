"""How much of the transfers is hidden: the share of communication during which the device also computes, from a trace."""

import gzip
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tilefold.bench.timers import Span, exported, joined


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


def hidden_of(communication: Iterable[Span], computation: Iterable[Span]) -> Hidden:
    """From (start, end) of every operation of each kind, in seconds, any order, overlapping or not."""
    first, second = joined(communication), joined(computation)
    both, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        both += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return Hidden(sum(b - a for a, b in first), sum(b - a for a, b in second), both)


MARK = "tilefold: the measured call"


class Trace(NamedTuple):
    """Of one call on one rank.  began: nanoseconds of the host's clock; events: of the device, microseconds since then."""

    began: int
    host: str
    events: list[Any]

    def spans(self, kind: int) -> list[Span]:
        """(start, end) in seconds of the host's clock, of one of `_kind`."""
        chosen = (e for e in self.events if _kind(e) == kind)
        return [(self.began * 1e-9 + e["ts"] * 1e-6, self.began * 1e-9 + (e["ts"] + e["dur"]) * 1e-6) for e in chosen]


def traced(step: Callable[[], object], ready: Callable[[], object]) -> Trace:
    """Of one call, by torch's profiler on the GPU.

    ready: brings all ranks here.  The call is made twice: the first one under the profiler takes milliseconds longer, on each
    rank others, and NCCL's kernels of the faster ones would wait for the slower ones."""
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
    began, events = device_events(exported(profiler))
    return Trace(began, socket.gethostname(), events)


def overlaps_of(ranks: Sequence[Trace], ring: bool) -> list[tuple[Hidden, float]]:
    """Of each rank: what is hidden of its transfers, and seconds in which it did nothing but wait for others to come to them.

    NCCL's kernels are communication, every other kernel is computation (copies are neither: they are what pieces cost).  A
    transfer begins when NCCL's kernel has begun on both sides (ring: on the rank before and the one after, else on all): what is
    before that is waiting.  Ranks on several hosts have no common clock; for them all of a kernel counts as transfer."""
    every, work = [one.spans(0) for one in ranks], [one.spans(1) for one in ranks]
    apart = len({one.host for one in ranks}) > 1 or len({len(one) for one in every}) > 1
    found = []
    for rank, spans in enumerate(every):
        size = len(every)
        sides = {rank} if apart else {(rank + step) % size for step in ((-1, 0, 1) if ring else range(size))}
        moving = []
        for i, (_, stop) in enumerate(spans):
            began = max(every[side][i][0] for side in sides)
            if began < stop:
                moving.append((began, stop))
        hidden = hidden_of(moving, work[rank])
        found.append((hidden, hidden_of(spans, work[rank]).exposed - hidden.exposed))
    return found


def device_events(document: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """(nanoseconds of the host's clock at the mark, kernels and copies after it, from 0 on, in the order of time)."""
    every = list(document["traceEvents"])
    began = max((e["ts"] for e in every if e.get("name") == MARK and e.get("cat") == "user_annotation"), default=0)
    kept = [e for e in every if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= began]
    kept.sort(key=lambda e: e["ts"])
    base = int(document.get("baseTimeNanoseconds", 0))
    return base + round(began * 1e3), [{**e, "ts": e["ts"] - began} for e in kept]


def written(stem: str, traces: dict[str, dict[str, list[Trace]]]) -> list[str]:
    """One file for each way, STEM-way.json.gz, as a viewer of Chrome traces reads it: its lines, and the ranks of each, one below
    the other; traces: way, line, ranks.  Ranks of one host are on one clock, others begin at 0.  The paths."""
    paths = []
    for way, lines in traces.items():
        every, number = [], 0
        for line, ranks in lines.items():
            began = {host: min(one.began for one in ranks if one.host == host) for host in {one.host for one in ranks}}
            for rank, one in enumerate(ranks):
                late = (one.began - began[one.host]) * 1e-3
                what = {"name": f"{way}, {line}, rank {rank}"}
                every.append({"ph": "M", "name": "process_name", "pid": number, "args": what})
                every += [{**e, "ts": e["ts"] + late, "pid": number} for e in one.events]
                number += 1
        paths.append(f"{stem}-{way}.json.gz")
        with gzip.open(paths[-1], "wt") as file:
            json.dump({"traceEvents": every}, file)
    return paths


def _kind(event: dict[str, Any]) -> int | None:
    """0 communication, 1 computation, None neither: copies, and the kernel that lets a transfer begin."""
    name = event["name"].lower()
    if "nccl" in name:
        return 0
    return 1 if event["cat"] == "kernel" and "spin_kernel" not in name else None
