"""How long a call takes, in six ways, each for a question of its own.

time_alternating  which of several implementations is faster: rounds of short measurements in changing order, so that drifting
                  clocks and power caps meet all of them alike; the only one whose ratios are published.  What it samples:
event_samples     GPU time of one call that finds its inputs outside the L2 cache (flushed before each call)
queued_samples    the same where the host is ahead: the device waits for nobody, and what is left is kernels and gaps
graph_sampler     GPU time of one call without any launch overhead: replays of a CUDA graph over rotating buffers
wall_samples      wall-clock time of one call on the CPU
time_host         by itself: CPU time that one call costs its caller before it returns, whatever the GPU does meanwhile
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Call = Callable[[], object]
Span = tuple[float, float]  # begin and end
Sampler = Callable[[], list[float]]

# A CUDA stream takes about a thousand launches before it makes the host wait; a call may launch a few kernels.
QUEUE_DEPTH = 200
SPIN_CYCLES = 4_000_000  # 2 ms: longer than the host needs for any call that `queued_samples` times
CLEARED = 256 << 20  # bytes that are written to clear the L2 cache, as triton.testing.do_bench does


@dataclass(frozen=True, slots=True)
class Timing:
    """Median, 20th and 80th percentile of the samples in milliseconds, how many there were and how they were taken.

    values: the samples themselves in the order in which they were taken (rounds' medians where rounds alternate), which say how
    sure a comparison with another run is; () where nobody keeps them."""

    ms: float
    low: float
    high: float
    samples: int
    method: str
    values: tuple[float, ...] = ()

    @property
    def us(self) -> float:
        """The median in microseconds."""
        return self.ms * 1e3


def summarise(samples: Sequence[float], method: str) -> Timing:
    """A Timing from samples in milliseconds (at least one)."""
    low, high = np.quantile(samples, (0.2, 0.8)).tolist()
    return Timing(statistics.median(samples), low, high, len(samples), method, tuple(samples))


def event_samples(call: Call, warmup_ms: float = 10, rep_ms: float = 40) -> list[float]:
    """Times of single calls (ms) between CUDA events, the L2 cache cleared before each (triton.testing.do_bench)."""
    from triton.testing import do_bench

    times: list[float] = do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="all")
    return times


def hidden(call: Call) -> Call:
    """A call before which the L2 cache is cleared and the device spins, so that its launches are queued when their turn comes.
    `spin_kernel` marks where the work of the call begins and where it ends."""
    room = torch.empty(CLEARED, dtype=torch.int8, device="cuda")

    def run() -> object:
        room.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        result = call()
        torch.cuda._sleep(1)
        return result

    return run


def queued_samples(call: Call, samples: int = 10) -> list[float]:
    """Times of single calls (ms) between CUDA events, the L2 cache cleared and the host ahead of the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> None:
        start.record()
        call()
        end.record()

    covered, times = hidden(timed), []
    for _ in range(samples):
        covered()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def wall_samples(call: Call, budget_s: float = 0.3, least: int = 2) -> list[float]:
    """Wall-clock times of single calls (ms): at least `least`, more until the budget is spent. The caller warms up."""
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < least or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def time_alternating(
    samplers: Mapping[str, Sampler],
    rounds: int = 5,
    method: str = "alternating",
    failed: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    """Times several calls against each other: each round samples every call once, odd rounds in reverse order.

    samplers: name -> a function that measures its (warmed) call a few times and gives the times in ms, such as
    `lambda: event_samples(call)` on a GPU and `lambda: wall_samples(call)` on the CPU. rounds: how often each gets its turn.
    A figure is the median over the rounds' medians: a round that a clock change disturbed counts once, however many samples it
    holds.
    failed: takes what a sampler raises, by its name; that one is left out from then on, the others are still measured.
    """
    medians: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            if failed is not None and name in failed:
                continue
            try:
                medians[name].append(statistics.median(samplers[name]()))
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = error
    return {name: summarise(times, method) for name, times in medians.items() if name not in (failed or {})}


def rotations(bytes_per_call: int, l2_bytes: int) -> int:
    """How many sets of buffers a rotation needs (twice the L2 cache) so that a set has left it when its turn comes again."""
    return max(1, -(-2 * l2_bytes // max(1, bytes_per_call)))


def graph_sampler(calls: Sequence[Call], replays: int = 3, target_ms: float = 10.0) -> Sampler:
    """GPU time of a call replayed from a CUDA graph, which is captured here: no launch overhead, no gaps that a host would leave.

    calls: the same call over different buffers, `rotations` of them, so that no replayed call finds its inputs in the L2 cache.
    The graph goes around them until it holds about `target_ms` of work; the samples are replays divided by the calls in them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        once = _between_events(lambda: [call() for call in calls]) / len(calls)
        turns = max(1, round(target_ms / max(once, 1e-3) / len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(turns):
                for call in calls:
                    call()
        graph.replay()
        stream.synchronize()

    def sample() -> list[float]:
        with torch.cuda.stream(stream):
            return [_between_events(graph.replay) / (turns * len(calls)) for _ in range(replays)]

    return sample


def _between_events(call: Call) -> float:
    """Milliseconds of GPU time from before to after one call on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def time_host(call: Call, synchronize: Call, calls: int = 100, repetitions: int = 11) -> Timing:
    """CPU time per call until the call returns: what an eager caller pays, in ms (`us` for microseconds).

    Method: wait until the device is idle, note the time, make `calls` calls without waiting for any, note the time, then wait
    again. No call waits for the GPU, because the launches stay below the depth of the stream's queue (`calls` is cut to
    QUEUE_DEPTH). The first repetition is thrown away; the figure is the median of the others. Garbage collection is off while
    the clock runs. On the CPU, where a call finishes before it returns, this equals the wall time.
    """
    calls = max(1, min(calls, QUEUE_DEPTH))
    samples: list[float] = []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repetitions + 1):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - start) * 1e3 / calls)
        synchronize()
    finally:
        if collecting:
            gc.enable()
    return summarise(samples[1:], "host")


def joined(spans: Iterable[Span]) -> list[Span]:
    """What they cover, disjoint and ascending."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def l2_bytes() -> int:
    """Bytes of the current GPU's L2 cache."""
    return int(torch.cuda.get_device_properties().L2_cache_size)


def exported(profiler: Any) -> dict[str, Any]:
    """The Chrome trace of a profiler of torch's that has ended.

    The file is opened when it is written: torch may put another one in the place of one that is there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return document
