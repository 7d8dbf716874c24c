"""What ranks reach without each other: the rate that a scheme is held to, and how unlike the GPUs are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilefold.bench.parallel.check import Inputs, inputs_of
from tilefold.bench.parallel.loads import Load, Work, dense, sparse
from tilefold.bench.parallel.setup import barrier, timed, together
from tilefold.plan.parallel.sharding import shard

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


def rates_of(work: Work, tokens: int, backward: bool, blocks: bool, device: torch.device) -> Rates:
    """A collective of the default group.  Of all tokens; where a call would take longer than LONG, of the longest half, quarter,
    ... that does not.  blocks: over lists of blocks, else dense."""

    def load_of(tokens: int) -> Load:
        return sparse(work, tokens, backward, device) if blocks else dense(work, tokens, backward)

    def seconds_of(tokens: int, ready: Callable[[], object]) -> float:
        inputs = inputs_of(shard(tokens, 1), 0, work.heads, work.dim, getattr(torch, work.dtype), device)
        return timed(step_of(load_of(tokens).alone, inputs, backward), work.rounds, device, ready)

    found: list[Any] = [None]
    if dist.get_rank() == 0:
        least = min(BASE[device.type], tokens)
        seconds, most = seconds_of(least, _nobody), tokens
        while most > 2 * least and seconds * (most / least) ** 2 > LONG:
            most //= 2
        if most > least:
            least, seconds = most, seconds_of(most, _nobody)
        found = [(seconds, least)]
    dist.broadcast_object_list(found, src=0)
    seconds, alone = found[0]
    flops = load_of(alone).flops
    each = together(seconds_of(alone, barrier)) if dist.get_world_size() > 1 else [seconds]
    return Rates(flops / seconds, alone, tuple(flops / one for one in each))


def _nobody() -> None:
    pass


def step_of(call: Callable[..., torch.Tensor], inputs: Inputs, backward: bool) -> Callable[[], object]:
    """Forward, or backward alone over a graph that is kept."""
    leaves = [t.detach().requires_grad_(backward) for t in inputs[:3]]
    if not backward:
        return lambda: call(*leaves)
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
