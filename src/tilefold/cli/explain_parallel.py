"""`tilefold explain --ranks`: which scheme of context parallelism a problem gets, what it sends and needs, and on more ranks."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem
from tilefold.plan.device import Device


class RanksOptions(NamedTuple):
    """What was given: ranks, ranks of a node, "inside,across" in GB/s, TFLOP/s a rank, spare GB, kind of shards, backward,
    whether its gradients may be non-deterministic."""

    ranks: int | None
    per_node: int | None
    link: str | None
    tflops: float | None
    memory: float | None
    shards: str | None
    backward: bool
    nondeterministic: bool


def check_ranks(asked: RanksOptions, others: Mapping[str, object]) -> None:
    """Unsupported naming the option that needs --ranks, or does not go with it; others: false if not given."""
    if asked.nondeterministic and not asked.backward:
        raise Unsupported("--non-deterministic needs --backward")
    if asked.ranks is None:
        names = ("--per-node", "--link", "--tflops", "--memory", "--shards")
        for name, value in zip(names, asked[1:6], strict=True):
            if value:
                raise Unsupported(f"{name} needs --ranks")
        return
    for name, given in others.items():
        if given:
            raise Unsupported(f"{name} does not go with --ranks")


def explain_ranks(asked: RanksOptions, problem: AttentionProblem, device: Device, as_json: bool) -> str:
    """The ParallelPlan, its formulas, what its kernels take on that device, and the predictions for other numbers of ranks."""
    from tilefold.plan.parallel.plan import plan_parallel
    from tilefold.plan.parallel.problem import Links, ParallelProblem
    from tilefold.plan.parallel.scale import FORMULAS, LETTERS, scaling
    from tilefold.plan.parallel.scratch import memory_on
    from tilefold.plan.parallel.sharding import KINDS

    kind = asked.shards or "zigzag"
    if kind not in KINDS:
        raise ValueRangeError(f"--shards must be one of {', '.join(KINDS)}, got {kind!r}")
    rates = _rates(asked.link)
    if asked.tflops is not None:
        rates |= dict.fromkeys(("flops", "flops_backward", "flops_nondeterministic"), asked.tflops * 1e12)
    memory = None if asked.memory is None else asked.memory * 1e9
    links = Links(1 if asked.ranks is None else asked.ranks, asked.per_node or 1, memory=memory, **rates)
    window = (problem.window[0], 0) if problem.causal else problem.window
    whole = ParallelProblem(problem.batch, problem.seq_q, problem.seq_k, problem.heads, problem.kv_heads, problem.dim_qk,
                            problem.dim_v, problem.dtype, window, kind, asked.backward,
                            deterministic=not asked.nondeterministic)  # fmt: skip
    plan = plan_parallel(whole, links)
    scaled = scaling(whole, links)
    most, scratch = memory_on(plan, device)
    if as_json:
        kernels = {"device": device.name, "scratch": scratch, "memory": most}
        every = [[ranks, p and asdict(p.cost)] for ranks, p in scaled.plans]
        return json.dumps({"plan": asdict(plan), "kernels": kernels, "scaling": every})
    traffic, extra = FORMULAS[plan.scheme]
    return "\n".join((
        str(plan),
        f"  traffic   {traffic}",
        f"  memory    {extra}",
        *(f"            {line}" for line in LETTERS),
        f"  kernels   {scratch / 1e9:.3f} GB for themselves while they run on {device.title}: {most / 1e9:.3f} GB at the most",
        "",
        "The same problem on other numbers of ranks, predicted:",
        str(scaled),
    ))  # fmt: skip


def _rates(link: str | None) -> dict[str, float]:
    if link is None:
        return {}
    try:
        found = [float(part) * 1e9 for part in link.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, 2) or min(found) <= 0:
        raise ValueRangeError(f"--link must be INSIDE or INSIDE,ACROSS in GB/s, as 290,50, got {link!r}")
    return dict(zip(("inside", "across"), found, strict=False))
