"""Rung 2, profile: measure, find what bounds a program, change that, and measure again.

The table says of naive that its products run on the FP32 pipe, an eleventh as fast as the tensor cores: keep Q, K, V and P in
their own dtype.  The sweep says that tiles of 16 x 16 load each row of K 256 times at 4096 queries: take larger ones.  Then the
table says that what is left is memory, S and P on their way out and back: no setting of these three kernels changes that, and
the next rungs get rid of it.  What it teaches: the roofline, that is the longest of FLOPs over the rate of the pipe that makes
them and bytes over the rate of memory, and not to optimise what is not the bound.

    python -m tilefold.ladder.profile
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from tilefold.bench import timers
from tilefold.bench.loop import first_line
from tilefold.ladder import naive
from tilefold.ladder.inputs import Tile, checked, fitted
from tilefold.ladder.masks import mask_arguments
from tilefold.plan.cost import Bound, Cost, attention_cost, bound
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem

TILE = Tile(128, 128, 8, 2)
TILES = (Tile(16, 16, 4, 1), Tile(32, 32, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), TILE)
ROW = 2048  # a row of the softmax in fewer, longer pieces
GRAPH_MS = 4.0  # of work in a replay
SDPA = "torch SDPA"  # the row of torch's own choice of kernel


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, *, bias: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """`ladder.naive.attention` by the same kernels, on tensor cores, with larger tiles and P in q's dtype."""
    p = checked(q, k, v, causal, tile, bias=bias, padding_mask=padding_mask)
    masks, kernels = mask_arguments(bias, padding_mask), cast("Any", naive)
    return cast("torch.Tensor", kernels.run(q, k, v, p, masks, tile or tile_for(p), ROW, q.dtype))


def tile_for(p: AttentionProblem) -> Tile:
    """The tile of a problem."""
    return fitted(TILE, p)


def cost(p: AttentionProblem, tile: Tile | None = None) -> Cost:
    """naive's, with P in q's dtype."""
    return cast("Cost", cast("Any", naive).cost(p, tile or tile_for(p), weight_bytes=p.itemsize))


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table.

    ms: median of a call. gbs: bytes that have to move, once a kernel, over the time. tflops: those of the formula, the same for
    every implementation, over the time. speedup: over the first row; over_torch: over torch's SDPA, if that is a row. bound: what
    is busy longest, and how long at least; of_bound: the share of the time that it explains. intensity: FLOPs a byte of memory;
    intensity_l2: a byte from the L2 cache. None where nothing is declared (torch, the library's plan, a student's kernel)."""

    name: str
    ms: float
    tflops: float
    speedup: float
    over_torch: float | None = None
    gbs: float | None = None
    bound: Bound | None = None
    of_bound: float | None = None
    intensity: float | None = None
    intensity_l2: float | None = None


def measure(calls: Mapping[str, Callable[[], Any]], gpu: bool, rounds: int = 3) -> dict[str, float]:
    """Milliseconds of a call each, in turns: replays of CUDA graphs, events where there is no capture, a CPU's wall."""
    samplers = {name: _sampler(call, gpu) for name, call in calls.items()}
    return {name: timing.ms for name, timing in timers.time_alternating(samplers, rounds if gpu else 1).items()}


def _sampler(call: Callable[[], Any], gpu: bool) -> timers.Sampler:
    if not gpu:
        return lambda: timers.wall_samples(call, budget_s=0.0, least=1)
    call()  # compiled, and what it keeps is there
    try:
        return timers.graph_sampler([call], replays=3, target_ms=GRAPH_MS)
    except RuntimeError:  # it waits for the GPU, or allocates in a way that a graph cannot hold
        torch.cuda.synchronize()
        return lambda: timers.event_samples(call, 5, 20)


def table(times: Mapping[str, float], costs: Mapping[str, Cost], p: AttentionProblem, device: Device) -> list[Line]:
    """The table's rows: of measured times, and of declared costs where there are some."""
    first, useful, sdpa = next(iter(times.values())), attention_cost(p).flops, times.get(SDPA)
    lines = []
    for name, ms in times.items():
        line = Line(name, ms, useful / ms * 1e-9, first / ms, sdpa and sdpa / ms)
        if name in costs:
            c = costs[name]
            least = bound(c, device, "float32" if name == "naive" else p.dtype)  # naive turns everything to fp32
            line = replace(line, gbs=c.bytes / ms * 1e-6, bound=least, of_bound=least.seconds * 1e3 / ms,
                           intensity=c.flops / c.bytes, intensity_l2=c.flops / c.l2_bytes)  # fmt: skip
        lines.append(line)
    return lines


def why(line: Line) -> str:
    """Which resource bounds a row, and whether it does."""
    if line.bound is None or line.of_bound is None:
        return ""
    times = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in line.bound.times)
    if line.of_bound >= 0.6:
        verdict = f"the {line.bound.resource} bounds it"
    else:
        verdict = (
            f"the {line.bound.resource} needs {line.of_bound:.0%} of its time: latency, or work that no axis shows"
        )
    return f"{line.name}: {verdict} (at least {times})"


def sweep(
    settings: Mapping[str, Callable[[], Callable[[], Any]]],
    measured: Callable[[Mapping[str, Callable[[], Any]]], Mapping[str, float]],
    step: Callable[[str], None],
) -> dict[str, float | str]:
    """What is measured with each setting, or in words why nothing is: a tile may need more shared memory than there is.

    settings: name -> what prepares its call, and raises where the result is wrong."""
    calls: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for name, prepare in settings.items():
        step(name)
        try:
            calls[name] = prepare()
        except Exception as error:  # what a compiler raises differs; the table says it
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
    figures = measured(calls)
    return {name: failed.get(name, figures.get(name, "")) for name in settings}


if __name__ == "__main__":
    from tilefold.ladder.rungs import show

    show("profile")
