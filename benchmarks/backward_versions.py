"""The dense backward kernels of sm_90 beside FlashAttention-4's, in turns: the one that keeps dS, and the one that adds dq in
memory, in any order and in one.

    PYTHONPATH=src python benchmarks/backward_versions.py [--only "D128 16k"] [--rounds 5] [--jsonl FILE]

Milliseconds and TFLOP/s of the backward pass alone; gradients are held to those of the version that adds in order first.
results/backward_versions.jsonl has what was measured; a test holds the plans to it."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import tilefold
from tilefold.bench import timers
from tilefold.plan.backward.attention_backward import HOPPER
from tilefold.plan.backward.attention_backward_hopper import is_kept_well
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
    (1, 16384, 32, 4, 64),
    (1, 16384, 8, 8, 64),
    (1, 16384, 3, 3, 64),
]
Gradients = Sequence[torch.Tensor]
Backward = Callable[[], Gradients]


KEPT = "dS kept"
VERSIONS = {"added": ReduceOptions(), "added in order": ReduceOptions(ordered=True)}
APART = {
    f"{name} apart": replace(options, apart=True) for name, options in VERSIONS.items()
}  # where heads share KV heads


def flash_attention(deterministic: bool) -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        found = flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)
        return found[0] if isinstance(found, tuple) else found

    return attend


def backward_of(out: torch.Tensor, inputs: Gradients, dout: torch.Tensor) -> Backward:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def candidates(shape: tuple[int, int, int, int, int, bool]) -> dict[str, Backward]:
    batch, tokens, heads, kv_heads, dim, causal = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(n: int) -> torch.Tensor:
        return torch.randn(batch, tokens, n, dim, device="cuda", generator=generator).bfloat16()

    q, k, v = (draw(n).requires_grad_() for n in (heads, kv_heads, kv_heads))
    dout = draw(heads)
    plan = tilefold.attention_backward_plan(q, k, v, causal=causal)
    versions = VERSIONS | (APART if heads > kv_heads else {})
    plans = {name: plan.with_tiles(kernel=KERNEL, options=options) for name, options in versions.items()}
    if is_kept_well(plan.problem, plan.device):
        plans[KEPT] = plan.with_tiles(kernel=HOPPER)
    made = {}
    for name, own in plans.items():
        out = tilefold.attention(q, k, v, causal=causal, backward_plan=own)
        made[name] = backward_of(out, (q, k, v), dout)
    for name, deterministic in (("FA4", False), ("FA4 deterministic", True)):
        try:
            made[name] = backward_of(flash_attention(deterministic)(q, k, v, causal), (q, k, v), dout)
        except ImportError:
            continue
    return made


def far(got: Gradients, wanted: Gradients) -> float:
    """The largest relative L2 difference of the gradients."""
    pairs = zip(got, wanted, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def named(shape: tuple[int, int, int, int, int, bool]) -> str:
    batch, tokens, heads, kv_heads, dim, causal = shape
    group = f"/{kv_heads}" * (kv_heads != heads)
    return f"D{dim} {tokens // 1024}k x {batch}, {heads}{group} heads, {'causal' if causal else 'full'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jsonl", help="a file to which a line a time is added")
    options = parser.parse_args()
    for shape in [(*case, causal) for case in CASES for causal in (False, True)]:
        if options.only not in named(shape):
            continue
        batch, tokens, heads, _, dim, causal = shape
        calls = candidates(shape)
        wanted = calls["added in order"]()
        wrong = {each: far(call(), wanted) for each, call in calls.items()}
        flops = 10 * batch * heads * tokens**2 * dim / (2 if causal else 1)
        samplers = {each: (lambda call=call: timers.queued_samples(call, 4)) for each, call in calls.items()}
        failed: dict[str, Exception] = {}
        times = timers.time_alternating(samplers, options.rounds, failed=failed)
        print(f"\n{named(shape)}", flush=True)
        for each, time in times.items():
            print(f"  {each:24} {time.ms:8.3f} ms {flops / time.ms / 1e9:6.0f} TFLOP/s   {wrong[each]:.1e}", flush=True)
            if options.jsonl:
                row = {"device": torch.cuda.get_device_name(), "case": shape, "version": each, "ms": round(time.ms, 4)}
                with open(options.jsonl, "a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)
        for each, error in failed.items():
            print(f"  {each:24} {type(error).__name__}: {error}", flush=True)
        del calls, samplers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
