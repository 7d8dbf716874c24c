"""What comes before the lines: the group, kernels compiled once for all ranks, what links and ranks do by themselves."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilefold.bench.parallel.check import Inputs, inputs_of
from tilefold.bench.parallel.loads import Load, Work, dense, sparse
from tilefold.errors import TilefoldError
from tilefold.ops.cache.merge import merge_into
from tilefold.ops.call import Call
from tilefold.parallel import Kernels
from tilefold.parallel.exchange import pass_on
from tilefold.plan.parallel.plan import ParallelPlan
from tilefold.plan.parallel.scratch import calls_of
from tilefold.plan.parallel.sharding import shard
from tilefold.plan.problem import AttentionProblem

LONGEST = 1 << 17
LONG = 0.7  # seconds of a call on one rank, above which a shorter one stands for it
BASE = {"cuda": 32768, "cpu": 64}  # tokens of the first call: enough to fill a GPU
_WARM: set[Any] = set()


def join(gpu: bool, device: int, **options: Any) -> None:
    """init_process_group; NCCL's kernels on a stream of high priority, so that they need not wait behind a fold."""
    if not gpu:
        dist.init_process_group("gloo", **options)
        return
    torch.cuda.set_device(device)
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    nccl._timeout = options.setdefault("timeout", timedelta(minutes=5))
    dist.init_process_group("nccl", device_id=torch.device("cuda", device), pg_options=nccl, **options)


def barrier() -> None:
    """All ranks are here."""
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def together(value: Any) -> list[Any]:
    """The value of every rank of the default group."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


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


def warmed(plan: ParallelPlan, device: torch.device) -> None:
    """Let rank 0 compile what the calls of a plan need; the others find it in Triton's cache.  A collective."""
    backward, deterministic = plan.problem.backward, plan.problem.deterministic
    calls = tuple(call for call in calls_of(plan) if (call, backward, deterministic) not in _WARM)
    _WARM.update((call, backward, deterministic) for call in calls)
    if device.type == "cuda" and dist.get_rank() == 0:
        for call in calls:
            with suppress(TilefoldError, RuntimeError):  # the line itself will say
                _warm(call, backward, deterministic, device)
        torch.cuda.synchronize()
    barrier()


def _warm(n: AttentionProblem, backward: bool, deterministic: bool, device: torch.device) -> None:
    """One call with a merge of every kind, of at most LONGEST queries and keys."""
    rows, keys = min(n.seq_q, LONGEST), min(n.seq_k, LONGEST)
    shapes = (rows, n.heads, n.dim_qk), (keys, n.kv_heads, n.dim_qk), (keys, n.kv_heads, n.dim_v)
    q, k, v = (torch.zeros(n.batch, *shape, dtype=getattr(torch, n.dtype), device=device) for shape in shapes)
    window = None if n.causal or n.window == (-1, -1) else n.window
    call = Call(causal=n.causal, window=window, deterministic=deterministic)
    kernels = Kernels()
    out, lse = kernels.forward(q, k, v, call)
    exact = out.float()
    for first, to in ((out, out), (out, exact), (exact, exact), (exact, out)):
        merge_into(first, lse, out, lse, to, lse)
    if backward:
        kernels.backward((q, k, v, out, lse), out, None, call, (True, True, True, False, False))


class MeasuredLinks(NamedTuple):
    """Bytes/s that one rank sends to the next while all do, and to all others at once; seconds of a message of 8 bytes."""

    neighbour: float
    everyone: float
    latency: float

    def __str__(self) -> str:
        return (
            f"links: {self.neighbour / 1e9:.1f} GB/s a rank to the next, {self.everyone / 1e9:.1f} GB/s to all others, "
            f"{self.latency * 1e6:.0f} us a small message (explain --link {self.neighbour / 1e9:.0f})"
        )


def links_of(device: torch.device, size: int | None = None, rounds: int = 5) -> MeasuredLinks:
    """Of the default group, by the slowest rank: a collective.  size: bytes of a message."""
    size = size or (1 << 28 if device.type == "cuda" else 1 << 16)
    ranks = dist.get_world_size()
    each = size // (4 * ranks)
    a, b = (torch.zeros(each * ranks, dtype=torch.float32, device=device) for _ in range(2))

    def shift(count: int) -> Callable[[], None]:
        return lambda: pass_on(a[:count], b[:count], dist.group.WORLD, "measuring").wait()

    steps = shift(a.numel()), lambda: dist.all_to_all_single(b, a), shift(2)
    seconds = [max(together(timed(step, rounds, device, barrier))) for step in steps]
    sent, started = 4 * each * ranks, seconds[2]  # what the host and a small message take is not the links'
    moving = [max(each - started, each / 10) for each in seconds[:2]]
    return MeasuredLinks(sent / moving[0], sent * (ranks - 1) / ranks / moving[1], started)


# --- what ranks reach without each other -------------------------------------------------------------------------------------


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
        seconds, most = seconds_of(least, lambda: None), tokens
        while most > 2 * least and seconds * (most / least) ** 2 > LONG:
            most //= 2
        if most > least:
            least, seconds = most, seconds_of(most, lambda: None)
        found = [(seconds, least)]
    dist.broadcast_object_list(found, src=0)
    seconds, alone = found[0]
    flops = load_of(alone).flops
    each = together(seconds_of(alone, barrier)) if dist.get_world_size() > 1 else [seconds]
    return Rates(flops / seconds, alone, tuple(flops / one for one in each))


def step_of(call: Callable[..., torch.Tensor], inputs: Inputs, backward: bool) -> Callable[[], object]:
    """Forward, or backward alone over a graph that is kept."""
    leaves = [t.detach().requires_grad_(backward) for t in inputs[:3]]
    if not backward:
        return lambda: call(*leaves)
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
