"""The launches of calls in the order in which they ran: from a trace of torch's profiler, or as the interpreter makes them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tilefold.bench import timers
from tilefold.bench.timers import exported
from tilefold.profiling.launches import Launched, Ran, ordered, product

MARK = "spin_kernel"  # of torch.cuda._sleep: `timers.hidden` puts one before a call and one behind
Call = Callable[[], object]


def between_marks(rans: Sequence[Ran]) -> Iterator[tuple[Ran, ...]]:
    """What ran between the first mark and the second, the third and the fourth, and so on."""
    inside: list[Ran] | None = None
    for ran in rans:
        if MARK in ran.kernel:
            if inside is not None:
                yield tuple(inside)
            inside = [] if inside is None else None
        elif inside is not None:
            inside.append(ran)


def traced(calls: Mapping[str, Call], samples: int = 5) -> dict[str, tuple[tuple[Ran, ...], ...]]:
    """What each call launches, `samples` times, the L2 cache cleared and the host ahead (`timers.hidden`): one trace of all.

    () for a call of which the trace does not hold every sample. Warm up before."""
    covered = {name: timers.hidden(call) for name, call in calls.items()}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for run in covered.values():
            for _ in range(samples):
                run()
        torch.cuda.synchronize()
    parts = list(between_marks(ordered(exported(profiler))))
    if len(parts) != samples * len(covered):
        return dict.fromkeys(calls, ())
    return {name: tuple(parts[i * samples : (i + 1) * samples]) for i, name in enumerate(covered)}


def interpreted(calls: Mapping[str, Call]) -> tuple[dict[str, tuple[tuple[Ran, ...], ...]], dict[str, float]]:
    """The same in the interpreter, once: launches by their wall time, and that of each call (ms)."""
    from tilefold.ops.launch import OBSERVERS

    found: dict[str, tuple[tuple[Ran, ...], ...]] = {}
    times = {}
    for name, call in calls.items():
        rans: list[Ran] = []

        def tell(kernel: str, grid: tuple[int, int, int], seconds: float, rans: list[Ran] = rans) -> None:
            rans.append(Ran(kernel, time.perf_counter() - seconds, seconds, product(grid)))

        OBSERVERS.append(tell)
        begin = time.perf_counter()
        try:
            call()
        finally:
            OBSERVERS.remove(tell)
        found[name], times[name] = (tuple(rans),), (time.perf_counter() - begin) * 1e3
    return found, times


def by_place(samples: Sequence[Sequence[Ran]]) -> tuple[Launched, ...]:
    """Each launch of a call with its times in all samples; samples that launched something else than the first are left out."""
    if not samples:
        return ()
    names = [ran.kernel for ran in samples[0]]
    same = [sample for sample in samples if [ran.kernel for ran in sample] == names]
    times = [tuple(sample[place].seconds for sample in same) for place in range(len(names))]
    return tuple(
        Launched(ran.kernel, seconds, ran.programs, ran.threads, ran.registers, ran.shared_bytes)
        for ran, seconds in zip(samples[0], times, strict=True)
    )
