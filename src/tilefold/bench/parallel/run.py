"""Context parallelism on the ranks that there are: every scheme and PyTorch's own, checked, timed, memory beside the plan's.

All ranks go through the same lines in the same order; what a line costs is what its slowest rank takes.  A line that fails on one
rank has failed."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from tilefold.bench.parallel.check import Inputs, Results, inputs_of, judged
from tilefold.bench.parallel.loads import PEERS, Load, Note, Work, dense, sharding_of, sparse, way_of
from tilefold.bench.parallel.setup import Rates, barrier, rates_of, step_of, timed, together, warmed
from tilefold.bench.parallel.table import Line, cells_of
from tilefold.bench.parallel.trace import Trace, overlaps_of, traced, written
from tilefold.errors import TilefoldError
from tilefold.ops.device import device_of
from tilefold.plan.parallel.plan import ParallelPlan, plan_parallel
from tilefold.plan.parallel.problem import Links
from tilefold.plan.parallel.scratch import memory_on
from tilefold.plan.parallel.sharding import Sharding

Traces = dict[str, dict[str, list[Trace]]]  # way, line, ranks


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
            rates: dict[bool, Rates] = {}
            for way in work.ways:
                if not _agreed(work.budget is None or time.monotonic() - began < work.budget):
                    continue
                blocks = way == "sparse"
                if blocks not in rates:
                    step(f"without exchange, {what}")
                    rates[blocks] = rates_of(work, tokens, backward, blocks, device)
                    said(f"{what}{', sparse' * blocks}: {rates[blocks]}")
                step(f"{way}, {what}")
                lines.append(_line(work, way, tokens, backward, rates[blocks], device, traces))
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
    sharding = sharding_of(work, way, tokens, ranks)
    load = sparse(work, tokens, backward, device) if way == "sparse" else dense(work, tokens, backward)
    slowest_rate = min(rates.each)
    plan, refusal = _plan(work, way, tokens, backward, ranks, slowest_rate)
    if refusal:
        return replace(line, note=refusal)
    trace: Trace | None = None
    failure, seconds, memory, note = "", float("nan"), 0, Note()
    wrong: list[str] = []
    if plan is not None:
        warmed(plan, device)
    try:
        with way_of(work, way, sharding, device) as (call, note):
            inputs = inputs_of(sharding, rank, work.heads, work.dim, getattr(torch, work.dtype), device)
            seconds, memory, wrong = _checked(work, load, call, inputs, sharding, backward, device)
            if work.trace and device.type == "cuda" and not wrong:
                trace = traced(step_of(call, inputs, backward), barrier)
    except (TilefoldError, RuntimeError, NotImplementedError, ValueError) as error:
        failure = f"rank {rank}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    every = together((failure, wrong, seconds, memory, trace, note))
    failures = [one[0] for one in every if one[0]]
    if failures:
        unusable = way in PEERS and len(failures) == ranks
        return replace(line, status="not usable" if unusable else "failed", note=failures[0])
    wrongs = [f"rank {r}: {text}" for r, one in enumerate(every) for text in one[1]]
    if wrongs:
        return replace(line, status="WRONG", note="; ".join(wrongs[:3]))
    slowest = max(one[2] for one in every)
    reached = load.flops / slowest
    found = [one[4] for one in every if one[4] is not None]
    if found:
        traces.setdefault(way, {})[f"{tokens} tokens, {line.direction}"] = found
    overlaps = overlaps_of(found, way == "ring")
    forward = plan and _plan(work, way, tokens, False, ranks, slowest_rate)[0]
    predicted = plan.cost.seconds - (forward.cost.seconds if backward and forward else 0.0) if plan else float("nan")
    least = memory_on(plan, device_of(device, "attention"))[0] if plan else float("nan")
    return replace(
        line, status="ok", note=max(one[5] for one in every).text,
        ms=slowest * 1e3, tflops=reached / ranks / 1e12, efficiency=reached / ranks / rate, of_all=reached / rates.sum,
        memory=max(one[3] for one in every),
        predicted_ms=predicted * 1e3, predicted_memory=least,
        hidden=min((one.share for one, _ in overlaps), default=None),
        exposed_ms=max((one.exposed * 1e3 for one, _ in overlaps), default=None),
        waiting_ms=max((seconds * 1e3 for _, seconds in overlaps), default=None),
    )  # fmt: skip


def _plan(
    work: Work, way: str, tokens: int, backward: bool, ranks: int, rate: float
) -> tuple[ParallelPlan | None, str]:
    """The prediction for one of ours, with so many FLOP/s a rank; or why it is impossible."""
    if way == "sparse":
        return None, ""
    if way in PEERS:
        return None, "" if tokens % (2 * ranks) == 0 else f"tokens must be a multiple of {2 * ranks}"
    try:
        links = Links(ranks, work.per_node, flops=rate, flops_backward=rate, flops_nondeterministic=rate)
        return plan_parallel(work.problem(tokens, backward), links, way), ""
    except TilefoldError as error:
        return None, str(error)


def _checked(
    work: Work, load: Load, call: Callable[..., torch.Tensor], inputs: Inputs, sharding: Sharding, backward: bool,
    device: torch.device,
) -> tuple[float, int, list[str]]:  # fmt: skip
    """(seconds of this rank, bytes, what is wrong): the output is checked before anything is timed."""
    leaves = [t.detach().requires_grad_(backward) for t in inputs[:3]]
    out = call(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout) if backward else ()
    wrong = judged(inputs, Results(out.detach(), *grads), sharding, dist.get_rank(), load.seen)
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
