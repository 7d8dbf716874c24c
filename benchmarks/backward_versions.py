"""The dense backward kernels of sm_90 beside FlashAttention-4's, in turns: the one that keeps dS, and the one that adds dq in
memory, in any order and in one.

    PYTHONPATH=src python benchmarks/backward_versions.py [--packed | --windows | --wide [--packed] [--softcap 50]]
                                                          [--only "D128 16k"] [--rounds 5] [--jsonl FILE]

Milliseconds and TFLOP/s of the backward pass alone; gradients are held to those of the first version that keeps an order.
results/backward_*.jsonl have what was measured; tests hold the plans to them.  cuDNN and FA2 in backward_wide.jsonl are torch's,
from a script of that day."""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import tilefold
from tilefold.bench import timers
from tilefold.bench.implementation import output_of
from tilefold.plan.backward.attention_backward import HOPPER, plan_attention_backward
from tilefold.plan.backward.attention_backward_hopper import is_kept_well
from tilefold.plan.backward.attention_backward_packed import packed_refusal
from tilefold.plan.backward.attention_backward_reduce import KERNEL, ReduceOptions

CASES = [  # batch, tokens, heads, KV heads, head dim; full and causal
    (1, 16384, 16, 16, 128),
    (1, 32768, 8, 8, 128),
    (2, 8192, 16, 16, 128),
    (4, 4096, 16, 16, 128),
    (4, 4096, 32, 8, 128),
    (2, 8192, 32, 4, 128),
    (1, 16384, 32, 8, 128),
    (2, 8192, 16, 16, 96),
    (4, 4096, 16, 16, 96),
    (16, 1024, 16, 16, 96),
    (4, 4096, 32, 8, 96),
    (4, 4096, 16, 16, 80),
    (16, 1024, 16, 16, 80),
    (4, 4096, 16, 16, 72),
    (16, 1024, 16, 16, 72),
    (1, 65536, 8, 8, 64),
    (1, 32768, 16, 16, 64),
    (1, 16384, 32, 32, 64),
    (2, 8192, 32, 32, 64),
    (4, 4096, 32, 32, 64),
    (8, 2048, 32, 32, 64),
    (16, 1024, 32, 32, 64),
    (32, 512, 32, 32, 64),
    (8, 2048, 32, 8, 64),
    (4, 4096, 32, 4, 64),
    (2, 8192, 32, 8, 64),
    (1, 16384, 32, 4, 64),
    (1, 16384, 8, 8, 64),
    (1, 16384, 3, 3, 64),
]
WINDOWS = [  # the same, with the keys that a query sees beside its own; narrow ones are where versions change places
    (*case, keys)
    for case in ((2, 4096, 64, 8, 64), (4, 4096, 32, 32, 64), (1, 16384, 16, 16, 64), (8, 1024, 32, 32, 64))
    for keys in (127, 255, 511, 1023, 2047)
    if keys <= case[1]
]
WIDE = [  # and V's own head dim
    (4, 4096, 16, 16, (192, 128)),
    (1, 16384, 16, 16, (192, 128)),
    (1, 4096, 128, 128, (192, 128)),
    (8, 1024, 16, 16, (192, 128)),
    (16, 512, 16, 16, (192, 128)),
    (4, 4096, 16, 16, (192, 192)),
    (1, 16384, 8, 8, (192, 192)),
    (4, 4096, 16, 16, (160, 160)),
    (1, 16384, 8, 8, (256, 256)),
    (8, 1024, 8, 8, (256, 256)),
    (1, 16384, 8, 8, (256, 128)),
]
WIDE_PACKED = [(16, 2048, 16, 16, (192, 128)), (8, 4096, 16, 16, (192, 128)), (16, 2048, 8, 8, (256, 256))]
PACKED = [  # sequences, tokens of one in the mean, heads, KV heads, head dim; lengths are lognormal (sigma 0.6)
    *[(65536 // mean // (dim // 64), mean, 2048 // dim, 2048 // dim, dim)
      for dim in (64, 128) for mean in (512, 1024, 2048, 4096, 8192)],
    *[(32768 // mean, mean, 16, 16, dim) for dim in (32, 40, 72, 80, 96, 112) for mean in (128, 256, 512, 1024, 2048, 4096)],
    (16, 2048, 32, 8, 128),
    (16, 2048, 32, 4, 64),
]  # fmt: skip
Gradients = Sequence[torch.Tensor]
Backward = Callable[[], Gradients]
Shape = tuple[int, int, int, int, int | tuple[int, int], bool | int]  # the last: causal or full, or keys of a window


KEPT = "dS kept"
VERSIONS = {"added": ReduceOptions(), "added in order": ReduceOptions(ordered=True)}
APART = {
    f"{name} apart": replace(options, apart=True) for name, options in VERSIONS.items()
}  # where heads share KV heads


def backward_of(out: torch.Tensor, inputs: Gradients, dout: torch.Tensor) -> Backward:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def plans_of(plan: Any, group: int) -> dict[str, Any]:
    if max(plan.problem.dim_qk, plan.problem.dim_v) > 128:
        return {KEPT: plan, "portable": plan_attention_backward(plan.problem, plan.device, portable=True)}
    versions = VERSIONS | (APART if group > 1 else {})
    plans = {name: plan.with_tiles(kernel=KERNEL, options=options) for name, options in versions.items()}
    if plan.problem.varlen and packed_refusal(plan.problem, plan.device):
        plans["portable"] = plan_attention_backward(plan.problem, plan.device, portable=True)
    elif plan.problem.varlen or is_kept_well(plan.problem, plan.device):
        plans[KEPT] = plan.with_tiles(kernel=HOPPER)
    return plans


def lengths_of(sequences: int, mean: int) -> list[int]:
    """Lognormal ones, the same every time."""
    drawn = torch.randn(sequences, generator=torch.Generator().manual_seed(mean)).mul(0.6).exp()
    return (drawn * (mean * sequences / float(drawn.sum()))).int().clamp(min=1).tolist()


def candidates(shape: Shape, packed: bool, softcap: float) -> dict[str, Backward]:
    batch, tokens, heads, kv_heads, dim, causal = shape
    lengths = lengths_of(batch, tokens)
    lead = (sum(lengths),) if packed else (batch, tokens)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(n: int, columns: int) -> torch.Tensor:
        return torch.randn(*lead, n, columns, device="cuda", generator=generator).bfloat16()

    of_q, of_v = dims_of(dim)
    sides = (heads, of_q), (kv_heads, of_q), (kv_heads, of_v)
    q, k, v = (draw(*side).requires_grad_() for side in sides)
    dout = draw(heads, of_v)
    options: dict[str, Any] = {"causal": causal} if isinstance(causal, bool) else {"window": (causal, 0)}
    options |= {"softcap": softcap} if softcap else {}
    if packed:
        offsets = torch.tensor([sum(lengths[:i]) for i in range(batch + 1)], dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    attend: Any = tilefold.attention_varlen if packed else tilefold.attention
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    made = {}
    for name, own in plans_of(plan, heads // kv_heads).items():
        made[name] = backward_of(attend(q, k, v, **options, backward_plan=own), (q, k, v), dout)
    try:
        cute: Any = importlib.import_module("flash_attn.cute")
    except ImportError:
        return made
    theirs = cute.flash_attn_varlen_func if packed else cute.flash_attn_func
    for name, deterministic in (("FA4", False), ("FA4 deterministic", True)):
        out = output_of(theirs(q, k, v, **options, deterministic=deterministic))
        made[name] = backward_of(out, (q, k, v), dout)
    return made


def dims_of(dim: int | tuple[int, int]) -> tuple[int, int]:
    """Head dims of Q and V."""
    return (dim, dim) if isinstance(dim, int) else dim


def far(got: Gradients, wanted: Gradients) -> float:
    """The largest relative L2 difference of the gradients."""
    pairs = zip(got, wanted, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def named(shape: Shape, packed: bool = False) -> str:
    batch, tokens, heads, kv_heads, dim, causal = shape
    group = f"/{kv_heads}" * (kv_heads != heads)
    size = f"{tokens} x {batch} packed" if packed else f"{tokens // 1024}k x {batch}"
    mask = ("causal" if causal else "full") if isinstance(causal, bool) else f"window {causal}"
    of_q, of_v = dims_of(dim)
    dim = of_q if of_q == of_v else f"{of_q}, V {of_v}"  # type: ignore[assignment]
    return f"D{dim} {size}, {heads}{group} heads, {mask}"


def pairs_of(shape: Shape, packed: bool) -> float:
    """Queries times keys, of all sequences."""
    batch, tokens, *_, causal = shape
    if not isinstance(causal, bool):
        return float(batch * tokens * (causal + 1) - batch * causal * (causal + 1) / 2)
    squares = sum(n * n for n in lengths_of(batch, tokens)) if packed else batch * tokens**2
    return squares / (2 if causal else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packed", action="store_true", help="packed sequences")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--wide", action="store_true", help="head dims above 128")
    others.add_argument("--windows", action="store_true", help="dense, under windows")
    parser.add_argument("--softcap", type=float, default=0.0, help="of wide head dims")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jsonl", help="a file to which a line a time is added")
    options = parser.parse_args()
    packed = options.packed and not options.windows
    softcap = options.softcap if options.wide else 0.0
    cases = (WIDE_PACKED if packed else WIDE) if options.wide else PACKED if packed else CASES
    shapes = [(*case, causal) for case in cases for causal in (False, True)]
    for shape in WINDOWS if options.windows else shapes:
        if options.only not in named(shape, packed):
            continue
        calls = candidates(shape, packed, softcap)
        wanted = calls["added in order" if "added in order" in calls else KEPT]()
        wrong = {each: far(call(), wanted) for each, call in calls.items()}
        flops = 2 * shape[2] * (3 * dims_of(shape[4])[0] + 2 * dims_of(shape[4])[1]) * pairs_of(shape, packed)
        samplers = {each: (lambda call=call: timers.queued_samples(call, 4)) for each, call in calls.items()}
        failed: dict[str, Exception] = {}
        times = timers.time_alternating(samplers, options.rounds, failed=failed)
        print(f"\n{named(shape, packed)}", flush=True)
        for each, taken in times.items():
            print(
                f"  {each:24} {taken.ms:8.3f} ms {flops / taken.ms / 1e9:6.0f} TFLOP/s   {wrong[each]:.1e}", flush=True
            )
            if options.jsonl:
                row = {"device": torch.cuda.get_device_name(), "case": shape, "version": each, "ms": round(taken.ms, 4)}
                row |= ({"packed": True} if packed else {}) | ({"softcap": softcap} if softcap else {})
                row["date"] = time.strftime("%Y-%m-%d")
                with open(options.jsonl, "a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)
        for each, error in failed.items():
            print(f"  {each:24} {type(error).__name__}: {error}", flush=True)
        del calls, samplers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
