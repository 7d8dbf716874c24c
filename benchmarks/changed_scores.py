"""Changes of scores at short lengths and narrow heads: the kernels for sm_90 beside portable ones, both passes, in turns.

    PYTHONPATH=src python benchmarks/changed_scores.py [--dims 32,64] [--rounds 3] [--jsonl FILE] [--warm 1/14]

bf16; milliseconds.  "learned": a bias [1, H, N, N] with its gradient, for which the kernel for sm_90 stores dS.  Results are
held to the portable kernels' first.  results/changed_scores.jsonl has what was measured; a test holds the plans to it."""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

import tilefold
from tilefold.bench import timers
from tilefold.plan import AttentionPlan, plan_attention
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.backward.attention_backward_reduce import KERNEL as REDUCE
from tilefold.plan.backward.attention_backward_reduce import ReduceOptions, is_late
from tilefold.plan.dense.attention_hopper import KERNEL
from tilefold.plan.dense.specialised import SPECIALISED

SIZES = ((256, 128), (128, 256), (96, 384), (64, 512), (16, 1024), (4, 2048))  # sequences, tokens
HEADS = {32: 4, 64: 8, 80: 8, 96: 8, 128: 8}
PROBLEMS: dict[str, dict[str, Any]] = {  # fields of an AttentionProblem
    "bias": {"score_mods": ("bias",), "bias_descriptors": "tiles"},
    "learned": {"score_mods": ("bias",), "bias_descriptors": "tiles"},
    "mask": {"mask_mods": ("mask",), "mask_descriptors": "tiles"},
    "alibi": {"score_mods": ("alibi",)},
    "user": {"score_mods": ("user",)},
    "softcap": {"score_mods": ("softcap",)},
}
MOST = 1e-2  # relative L2 error beside portable kernels


@triton.jit
def distance(score, batch, head, q_index, kv_index, args):
    return score + tl.exp2(-0.5 * (head + 1)) * (kv_index - q_index)


def options_of(change: str, batch: int, tokens: int, heads: int) -> dict[str, Any]:
    """Keywords of `attention`."""
    if change in ("bias", "learned"):
        shape = (1, heads, tokens, tokens)
        return {"bias": torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=change == "learned")}
    if change == "mask":
        return {"mask": torch.rand(batch, 1, tokens, tokens, device="cuda") < 0.5}
    if change == "alibi":
        return {"alibi_slopes": torch.rand(heads, device="cuda"), "causal": True}
    return {"user": {"score_mod": distance}, "softcap": {"softcap": 20.0}}[change]


def by_sm_90(plan: AttentionPlan) -> AttentionPlan:
    """The plan with the kernel for sm_90 and its own tile, whether plans take it or not."""
    tile = SPECIALISED[KERNEL].tile(plan.problem, plan.device)
    sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "num_warps": tile.num_warps}
    return plan.with_tile(**sizes, num_stages=tile.num_stages, kernel=KERNEL)


def measure(batch: int, tokens: int, dim: int, change: str, rounds: int) -> dict[str, Any]:
    """A record; AssertionError if kernels disagree."""
    torch.manual_seed(1)
    heads = HEADS[dim]
    q, k, v = (
        torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    options, dout = options_of(change, batch, tokens, heads), torch.randn_like(q)
    plan: Any = tilefold.attention_plan(q, k, v, **options)
    problem, device = plan.problem, plan.device
    forward = {"portable": plan_attention(problem, device, portable=True), "sm_90": by_sm_90(plan)}
    learned = (q, k, v, options["bias"]) if change == "learned" else (q, k, v)
    shape = (1, heads, tokens) if change == "learned" else ()
    portable = plan_attention_backward(problem, device, shape, portable=True)
    options_of_sm_90 = ReduceOptions(ordered=True, late=is_late(problem), stored=change == "learned")
    backward = {"portable": portable, "sm_90": portable.with_tiles(kernel=REDUCE, options=options_of_sm_90)}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "backward": {}}
    for name in forward:
        calls["forward"][name] = partial(tilefold.attention, q, k, v, plan=forward[name], **options)
        out = tilefold.attention(q, k, v, backward_plan=backward[name], **options)
        calls["backward"][name] = partial(torch.autograd.grad, out, learned, dout, retain_graph=True)
    record = {"change": change, "batch": batch, "tokens": tokens, "heads": heads, "dim": dim}
    for kind, both in calls.items():
        made = [call() if kind == "backward" else (call(),) for call in both.values()]
        for want, got in zip(*made, strict=True):
            assert (got - want).float().norm() < MOST * want.float().norm(), (record, kind)
        samplers = {name: partial(timers.queued_samples, call, samples=4) for name, call in both.items()}
        record[kind] = {name: round(one.ms, 4) for name, one in timers.time_alternating(samplers, rounds).items()}
    return record | {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jsonl", default="")
    parser.add_argument("--warm", default="", help="i/n: compile the i-th of n parts, and time nothing")
    asked = parser.parse_args()
    sizes = [
        (batch, tokens, dim, change)
        for dim in map(int, asked.dims.split(","))
        for change in PROBLEMS
        for batch, tokens in SIZES
    ]
    if asked.warm:
        part, parts = map(int, asked.warm.split("/"))
        sizes = sizes[part::parts]
        timers.time_alternating = lambda samplers, rounds: {}  # type: ignore[assignment]
    for size in sizes:
        record = measure(*size, asked.rounds)
        print(record, flush=True)
        if asked.jsonl and not asked.warm:
            with open(asked.jsonl, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
