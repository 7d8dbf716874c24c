"""Context parallelism on the ranks that there are: every scheme and PyTorch's own, checked, timed, memory beside the plan's.

All ranks go through the same lines in the same order; what a line costs is what its slowest rank takes.  A line that fails on one
rank has failed."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tilefold import parallel as tp
from tilefold.bench.parallel.check import Inputs, Results, inputs_of, judged
from tilefold.bench.parallel.rates import Rates, flops_of, rates_of, step_of, timed, together
from tilefold.bench.parallel.setup import barrier, warmed
from tilefold.bench.parallel.trace import Trace, overlaps_of, traced, written
from tilefold.errors import TilefoldError
from tilefold.ops.device import device_of
from tilefold.plan.parallel import ParallelPlan, plan_parallel
from tilefold.plan.parallel_problem import Links, ParallelProblem
from tilefold.plan.parallel_scratch import memory_on

__all__ = ["HEAD", "PEERS", "SCHEMES", "Line", "Work", "cells_of", "measure", "rows_of", "to_json", "to_markdown"]

SCHEMES = ("ring", "all_gather", "heads", "two_level")
PEERS = ("torch", "torch-alltoall")
"""torch.distributed.tensor.experimental.context_parallel, by its two ways to rotate K and V."""

Traces = dict[str, dict[str, list[Trace]]]  # way, line, ranks


@dataclass(frozen=True)
class Work:
    """What all ranks do.  tokens: of the whole sequence; heads: of Q and of K and V; ways: of SCHEMES and PEERS; rounds: timed
    calls; budget: seconds after which no line begins; per_node: ranks of a node, for two_level; trace: a file's stem, or "".
    """

    tokens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    backward: tuple[bool, ...] = (False, True)
    ways: tuple[str, ...] = (*SCHEMES[:3], *PEERS)
    rounds: int = 3
    budget: float | None = None
    per_node: int = 1
    trace: str = ""

    def problem(self, tokens: int, backward: bool) -> ParallelProblem:
        window = (-1, 0) if self.causal else (-1, -1)
        return ParallelProblem(
            1, tokens, tokens, *self.heads, self.dim, self.dim, self.dtype, window, "zigzag", backward
        )


@dataclass(frozen=True)
class Line:
    """One way at one length.  ms: of the slowest rank.  status: "ok", "WRONG", "failed" or "not usable", note says why.
    tflops: of one rank, the mean.  efficiency: beside what rank 0 reaches alone; of_all: beside what all ranks reach at once
    that exchange nothing; both as `rates` says.  memory: bytes at the peak of forward, and backward, beyond q, k, v and dout.
    predicted_*: by the plan, with the FLOP/s of the slowest rank, all at once.  hidden: share of the transfers behind kernels,
    exposed_ms: what is left of them, waiting_ms: for others to come to a transfer with nothing else to do; all of the worst
    rank."""

    way: str
    ranks: int
    tokens: int
    direction: str
    status: str
    note: str = ""
    ms: float = float("nan")
    tflops: float = float("nan")
    efficiency: float = float("nan")
    memory: int = 0
    predicted_ms: float = float("nan")
    predicted_memory: float = float("nan")
    hidden: float | None = None
    exposed_ms: float | None = None
    waiting_ms: float | None = None
    of_all: float = float("nan")
    rates: Rates | None = None


def measure(
    work: Work, step: Callable[[str], None] = lambda what: None, said: Callable[[str], None] = lambda text: None
) -> list[Line]:
    """The lines, the same on every rank; a collective of the default process group.  step: told what comes next; said: what was
    found, at once."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    began = time.monotonic()
    lines: list[Line] = []
    traces: Traces = {}
    for backward in work.backward:
        for tokens in work.tokens:
            what = f"{tokens} tokens, {'backward' if backward else 'forward'}"
            rates: Rates | None = None
            for way in work.ways:
                if not _agreed(work.budget is None or time.monotonic() - began < work.budget):
                    continue
                if rates is None:
                    step(f"without exchange, {what}")
                    rates = rates_of(work.problem(tokens, backward), work.rounds, device)
                    said(f"{what}: {rates}")
                step(f"{way}, {what}")
                lines.append(_line(work, way, tokens, backward, rates, device, traces))
                said("  ".join(filter(None, cells_of(lines[-1]))))
    if traces and dist.get_rank() == 0:
        written(work.trace, traces)
    return lines


def _agreed(value: bool) -> bool:
    """What rank 0 says."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return bool(said[0])


def _line(
    work: Work, way: str, tokens: int, backward: bool, rates: Rates, device: torch.device, traces: Traces
) -> Line:
    ranks, rank, rate = dist.get_world_size(), dist.get_rank(), rates.alone
    line = Line(way, ranks, tokens, "backward" if backward else "forward", "not usable", rates=rates)
    sharding = tp.shard(tokens, ranks, "zigzag")
    slowest_rate = min(rates.each)
    plan, refusal = _plan(work, way, tokens, backward, ranks, slowest_rate)
    if refusal:
        return replace(line, note=refusal)
    trace: Trace | None = None
    failure, seconds, memory = "", float("nan"), 0
    wrong: list[str] = []
    if plan is not None:
        warmed(plan, device)
    try:
        with _way(work, way, sharding) as call:
            inputs = inputs_of(sharding, rank, work.heads, work.dim, getattr(torch, work.dtype), device)
            seconds, memory, wrong = _checked(work, call, inputs, sharding, backward, device)
            if work.trace and device.type == "cuda" and not wrong:
                trace = traced(step_of(call, inputs, backward), barrier)
    except (TilefoldError, RuntimeError, NotImplementedError, ValueError) as error:
        failure = f"rank {rank}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    every = together((failure, wrong, seconds, memory, trace))
    failures = [one[0] for one in every if one[0]]
    if failures:
        unusable = way in PEERS and len(failures) == ranks
        return replace(line, status="not usable" if unusable else "failed", note=failures[0])
    wrongs = [f"rank {r}: {text}" for r, one in enumerate(every) for text in one[1]]
    if wrongs:
        return replace(line, status="WRONG", note="; ".join(wrongs[:3]))
    slowest = max(one[2] for one in every)
    reached = flops_of(work.problem(tokens, backward)) / slowest
    found = [one[4] for one in every if one[4] is not None]
    if found:
        traces.setdefault(way, {})[f"{tokens} tokens, {line.direction}"] = found
    overlaps = overlaps_of(found, way == "ring")
    forward = plan and _plan(work, way, tokens, False, ranks, slowest_rate)[0]
    predicted = plan.cost.seconds - (forward.cost.seconds if backward and forward else 0.0) if plan else float("nan")
    return replace(
        line, status="ok", ms=slowest * 1e3, tflops=reached / ranks / 1e12, efficiency=reached / ranks / rate,
        of_all=reached / rates.sum,
        memory=max(one[3] for one in every),
        predicted_ms=predicted * 1e3, predicted_memory=memory_on(plan, device_of(device))[0] if plan else float("nan"),
        hidden=min((one.share for one, _ in overlaps), default=None),
        exposed_ms=max((one.exposed * 1e3 for one, _ in overlaps), default=None),
        waiting_ms=max((seconds * 1e3 for _, seconds in overlaps), default=None),
    )  # fmt: skip


def _plan(
    work: Work, way: str, tokens: int, backward: bool, ranks: int, rate: float
) -> tuple[ParallelPlan | None, str]:
    """The prediction for one of ours, with so many FLOP/s a rank; or why it is impossible."""
    if way in PEERS:
        return None, "" if tokens % (2 * ranks) == 0 else f"tokens must be a multiple of {2 * ranks}"
    try:
        links = Links(ranks, work.per_node, flops=rate, flops_backward=rate)
        return plan_parallel(work.problem(tokens, backward), links, way), ""
    except TilefoldError as error:
        return None, str(error)


@contextmanager
def _way(work: Work, way: str, sharding: tp.Sharding) -> Iterator[Callable[..., torch.Tensor]]:
    """The call on this rank's tensors [1, tokens, heads, dim]."""
    if way not in PEERS:
        ranks = tp.ranks_of(None, ranks_per_node=work.per_node if way == "two_level" else None)
        yield lambda q, k, v: tp.attention(q, k, v, sharding, group=ranks, scheme=way, causal=work.causal)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    set_rotate_method("alltoall" if way == "torch-alltoall" else "allgather")
    with ExitStack() as stack:
        # What it shards is a stand-in: our shards are the same, chunks r and 2N - 1 - r, and are there already.
        buffer = torch.zeros(sharding.total, device=device)
        stack.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]))
        if device == "cuda":
            stack.enter_context(
                sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
            )

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            group = q.shape[2] // k.shape[2]  # it serves no grouped heads
            q, k, v = (t.transpose(1, 2) for t in (q, *(x.repeat_interleave(group, 2) for x in (k, v))))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=work.causal)
            return out.transpose(1, 2)

        yield call


def _checked(
    work: Work, call: Callable[..., torch.Tensor], inputs: Inputs, sharding: tp.Sharding, backward: bool,
    device: torch.device,
) -> tuple[float, int, list[str]]:  # fmt: skip
    """(seconds of this rank, bytes, what is wrong): the output is checked before anything is timed."""
    leaves = [t.detach().requires_grad_(backward) for t in inputs[:3]]
    out = call(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout) if backward else ()
    wrong = judged(inputs, Results(out.detach(), *grads), sharding, dist.get_rank(), work.causal)
    if any(together(bool(wrong))):
        return float("nan"), 0, wrong
    del out, grads, leaves
    memory = _memory(call, inputs, backward) if device.type == "cuda" else 0
    return timed(step_of(call, inputs, backward), work.rounds, device, barrier), memory, wrong


def _memory(call: Callable[..., torch.Tensor], inputs: Inputs, backward: bool) -> int:
    """Bytes at the peak of forward, and backward, beyond what was there before: q, k, v and dout."""
    leaves = [t.detach().requires_grad_(backward) for t in inputs[:3]]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout) if backward else ()
    torch.cuda.synchronize()
    del out, grads
    return int(torch.cuda.max_memory_allocated() - before)


# ---------------------------------------------------------------- what is written

HEAD = (
    "way",
    "ranks",
    "tokens",
    "direction",
    "ms",
    "predicted",
    "TFLOP/s a rank",
    "of rank 0",
    "of all",
    "memory",
    "predicted",
    "hidden",
    "exposed ms",
    "waiting ms",
)


def cells_of(line: Line) -> tuple[str, ...]:
    """A line of the table."""
    first = (line.way, str(line.ranks), str(line.tokens), line.direction)
    if line.status != "ok":
        return (*first, line.status, *("",) * 9)
    return (
        *first, f"{line.ms:.3f}", _number(line.predicted_ms, ".3f"), f"{line.tflops:.3g}", f"{line.efficiency:.1%}",
        _number(line.of_all, ".1%"),
        f"{line.memory / 1e9:.3f} GB" if line.memory else "", _number(line.predicted_memory / 1e9, ".3f", " GB"),
        "" if line.hidden is None else f"{line.hidden:.0%}",
        *("" if one is None else f"{one:.3f}" for one in (line.exposed_ms, line.waiting_ms)),
    )  # fmt: skip


def _number(value: float, form: str, unit: str = "") -> str:
    return "" if value != value else f"{value:{form}}{unit}"


def rows_of(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    return [cells_of(line) for line in lines]


def to_json(lines: Sequence[Line], setting: dict[str, Any], work: Work) -> str:
    return json.dumps({"setting": setting, "work": asdict(work), "lines": [asdict(line) for line in lines]}, indent=1)


def to_markdown(lines: Sequence[Line]) -> str:
    rows = [HEAD, tuple("---" for _ in HEAD), *rows_of(lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
