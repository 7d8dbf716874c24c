"""What ranks reach without each other: the rate that a scheme is held to, and how unlike the GPUs are."""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilefold.api import attention
from tilefold.bench.parallel.check import Inputs, inputs_of
from tilefold.bench.parallel.setup import barrier
from tilefold.plan.parallel_problem import BACKWARD_FLOPS, ParallelProblem
from tilefold.plan.sharding import shard

__all__ = ["Rates", "flops_of", "rates_of", "step_of", "timed", "together"]

LONG = 0.7  # seconds of a call on one rank, above which a shorter one stands for it
BASE = {"cuda": 32768, "cpu": 64}  # tokens of the first call: enough to fill a GPU


class Rates(NamedTuple):
    """FLOP/s of attention over `tokens` tokens.  alone: of rank 0 while the others wait.  each: of every rank, all at once and
    without exchanging anything: GPUs of one host differ by their chips, their cooling and what power they get."""

    alone: float
    tokens: int
    each: tuple[float, ...]

    @property
    def sum(self) -> float:
        """What all ranks reach that do not need each other."""
        return sum(self.each)

    def __str__(self) -> str:
        each = ", ".join(f"{one / 1e12:.3g}" for one in self.each)
        return (
            f"{self.tokens} tokens without exchange: rank 0 alone {self.alone / 1e12:.3g} TFLOP/s; all at once {each}"
        )


def flops_of(n: ParallelProblem) -> float:
    """Of forward, or of backward without forward."""
    return n.flops * (BACKWARD_FLOPS if n.backward else 1.0)


def together(value: Any) -> list[Any]:
    """The value of every rank of the default group."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rates_of(n: ParallelProblem, rounds: int, device: torch.device) -> Rates:
    """A collective of the default group.  Of all tokens; where a call would take longer than LONG, of the longest half, quarter,
    ... that does not."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        tokens = min(BASE[device.type], n.seq_q)
        seconds = _alone(n, tokens, rounds, device, _nobody)
        most = n.seq_q
        while most > 2 * tokens and seconds * (most / tokens) ** 2 > LONG:
            most //= 2
        if most > tokens:
            tokens, seconds = most, _alone(n, most, rounds, device, _nobody)
        found = [(seconds, tokens)]
    dist.broadcast_object_list(found, src=0)
    seconds, tokens = found[0]
    flops = flops_of(_of(n, tokens))
    if dist.get_world_size() == 1:
        return Rates(flops / seconds, tokens, (flops / seconds,))
    each = together(_alone(n, tokens, rounds, device, barrier))
    return Rates(flops / seconds, tokens, tuple(flops / one for one in each))


def _nobody() -> None:
    pass


def _of(n: ParallelProblem, tokens: int) -> ParallelProblem:
    return replace(n, seq_q=tokens, seq_k=tokens)


def _alone(n: ParallelProblem, tokens: int, rounds: int, device: torch.device, ready: Callable[[], object]) -> float:
    """Seconds of a call on this rank."""
    heads = n.heads, n.kv_heads
    inputs = inputs_of(shard(tokens, 1), 0, heads, n.dim_qk, getattr(torch, n.dtype), device)
    causal = n.window == (-1, 0)
    step = step_of(lambda q, k, v: attention(q, k, v, causal=causal), inputs, n.backward)
    return timed(step, rounds, device, ready)


def step_of(call: Callable[..., torch.Tensor], inputs: Inputs, backward: bool) -> Callable[[], object]:
    """Forward, or backward alone over a graph that is kept."""
    leaves = [t.detach().requires_grad_(backward) for t in inputs[:3]]
    if not backward:
        return lambda: call(*leaves)
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def timed(step: Callable[[], object], rounds: int, device: torch.device, ready: Callable[[], object]) -> float:
    """Median seconds; ready: comes before each."""
    seconds = []
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        step()  # warm
    for _ in range(rounds):
        ready()
        wait()
        began = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
