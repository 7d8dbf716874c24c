"""What `tilefold explain` says with --cache, --policy, --trace and --ranks, from the shapes and a device's record alone.

asked: the command's options by name."""

import json
from dataclasses import asdict, replace
from typing import Any

from tilefold.cache_formats import FORMATS
from tilefold.cli.options import numbers, one_of, pair_of
from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem, Device, Generation, plan_splits, trace_generation
from tilefold.plan.cache.decode import DecodeProblem, decode_kernel_refusal, plan_decode
from tilefold.plan.capabilities import plan_of
from tilefold.plan.parallel.plan import plan_parallel
from tilefold.plan.parallel.problem import Links, ParallelProblem
from tilefold.plan.parallel.scale import FORMULAS, LETTERS, scaling
from tilefold.plan.parallel.scratch import memory_on
from tilefold.plan.parallel.sharding import KINDS

HELD = {"same": "plain", **{each.short: each.name for each in FORMATS}}  # --cache -> what `DecodeProblem` calls it


def said(plan: Any, as_json: bool) -> str:
    """A plan as text or JSON."""
    return plan.to_json() if as_json else str(plan)


def explain_cache(asked: Any, problem: AttentionProblem, device: Device) -> str:
    """What `attention_kvcache` does: a DecodePlan; of a prompt, which is attention_cached's, a SplitDecision."""
    one_of(asked.cache, "--cache", HELD)
    if asked.page_size < 0:
        raise ValueRangeError(f"--page-size must be at least 0, got {asked.page_size}")
    if not (problem.batch and problem.seq_q):
        raise Unsupported("there is nothing to plan: no queries")
    made = _decode_problem(asked, problem)
    if (own := plan_of("attention_kvcache", made, device)) is not None:
        return said(own, asked.as_json)
    prompt = decode_kernel_refusal(made.attention) if made.storage == "plain" and not made.shared else ""
    if not prompt:
        return said(plan_decode(made, device, asked.num_splits), asked.as_json)
    room = made.attention.seq_k
    cut = plan_splits(problem, device, capacity=room, paged=asked.page_size > 0, splits=asked.num_splits)
    return (
        cut.to_json() if asked.as_json else f"attention_kvcache gives this call to attention_cached: {prompt}.\n{cut}"
    )


def _decode_problem(asked: Any, problem: AttentionProblem) -> DecodeProblem:
    """Of caches with room for problem.seq_k keys, all rows beginning at 16 bytes where they can."""
    storage = HELD[asked.cache]
    itemsize = problem.itemsize if storage == "plain" else 1
    # V as part of K lies where K's rows begin
    boxes = all(dim * itemsize % 16 == 0 for dim in (problem.dim_qk, problem.dim_qk if asked.v_in_k else problem.dim_v))
    if problem.seq_k % max(1, asked.page_size):  # room comes in whole pages
        problem = replace(problem, seq_k=-(-problem.seq_k // asked.page_size) * asked.page_size)
    problem = replace(problem, descriptors=boxes, query_descriptors=problem.dim_qk * problem.itemsize % 16 == 0)
    return DecodeProblem(problem, storage, asked.page_size, asked.v_in_k)


def explain_split(asked: Any, problem: AttentionProblem, device: Device) -> str:
    """The decision of --policy for one call."""
    if device.architecture.planner:
        return _no_splits(device, asked.as_json)
    made = plan_splits(problem, device, asked.policy, call=asked.call or "dense", capacity=asked.capacity,
                       paged=asked.paged, append=asked.append, splits=asked.num_splits)  # fmt: skip
    return said(made, asked.as_json)


def _no_splits(device: Device, as_json: bool) -> str:
    """Of an architecture whose functions fold all keys of a row at once."""
    why = f"{device.title} has no plan of that: nothing splits keys there. Name a GPU, or set TRITON_INTERPRET=1."
    return json.dumps({"device": device.name, "plan": None, "reason": why}) if as_json else why


def explain_steps(asked: Any, dtype: str, device: Device) -> str:
    """The decisions of --policy for all steps of a generation."""
    left, right = (-1, -1) if asked.window is None else pair_of(asked.window, "--window")
    if right not in (-1, 0):
        raise ValueRangeError(f"--window must be LEFT,0 with --trace: no later key exists, got {asked.window!r}")
    if asked.capacity is not None and asked.capacity < 1:
        raise ValueRangeError(f"--capacity must be at least 1, got {asked.capacity}")
    for name, value in (("--prompt", asked.prompt), ("--new", asked.new)):
        if value is None:
            raise ValueRangeError(f"{name} must be given with --trace, in tokens")
    run = Generation(
        heads=asked.heads, kv_heads=asked.heads if asked.kv_heads is None else asked.kv_heads, dim=asked.dim,
        prompt=asked.prompt, new=asked.new, batch=asked.batch, dtype=dtype, call=asked.call or "dense",
        capacity=asked.capacity or 0, window=left, paged=asked.paged, append=asked.append,
    )  # fmt: skip
    if device.architecture.planner:
        return _no_splits(device, asked.as_json)
    return said(trace_generation(run, device, asked.policy or "tilefold"), asked.as_json)


def explain_ranks(asked: Any, problem: AttentionProblem, device: Device) -> str:
    """The ParallelPlan, its formulas, what its kernels take on that device, and the predictions for other numbers of ranks."""
    kind = one_of(asked.shards or "zigzag", "--shards", KINDS)
    rates: dict[str, float] = {}
    if asked.link is not None:
        found = numbers(asked.link, "--link must be INSIDE or INSIDE,ACROSS in GB/s, as 290,50", float, (1, 2), above=0)
        rates = {name: rate * 1e9 for name, rate in zip(("inside", "across"), found, strict=False)}
    if asked.tflops is not None:
        rates |= dict.fromkeys(("flops", "flops_backward", "flops_nondeterministic"), asked.tflops * 1e12)
    memory = None if asked.memory is None else asked.memory * 1e9
    links = Links(asked.ranks, asked.per_node or 1, memory=memory, **rates)
    window = (problem.window[0], 0) if problem.causal else problem.window
    whole = ParallelProblem(problem.batch, problem.seq_q, problem.seq_k, problem.heads, problem.kv_heads, problem.dim_qk,
                            problem.dim_v, problem.dtype, window, kind, asked.backward,
                            deterministic=not asked.nondeterministic)  # fmt: skip
    plan = plan_parallel(whole, links)
    scaled = scaling(whole, links)
    most, scratch = memory_on(plan, device)
    kernels: dict[str, Any] = {"device": device.name, "scratch": scratch, "memory": most}
    taken = f"{scratch / 1e9:.3f} GB for themselves while they run on {device.title}: {most / 1e9:.3f} GB at the most"
    if device.architecture.planner:
        taken = f"{device.title} has none, and no plan of what its functions take for themselves"
        kernels = {"device": device.name, "plan": None, "reason": taken}
    if asked.as_json:
        every = [[ranks, p and asdict(p.cost)] for ranks, p in scaled.plans]
        return json.dumps({"plan": asdict(plan), "kernels": kernels, "scaling": every})
    traffic, extra = FORMULAS[plan.scheme]
    return "\n".join((
        str(plan),
        f"  traffic   {traffic}",
        f"  memory    {extra}",
        *(f"            {line}" for line in LETTERS),
        f"  kernels   {taken}",
        "",
        "The same problem on other numbers of ranks, predicted:",
        str(scaled),
    ))  # fmt: skip
