"""The dense backward kernel that adds dq in memory, in any order and in one, beside the default and FlashAttention-4, in turns.

    PYTHONPATH=src python benchmarks/backward_versions.py [--only "D128 16k"] [--rounds 5]

Milliseconds and TFLOP/s of the backward pass alone; gradients are held to the default's before anything is timed."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilefold
from tilefold.bench import timers
from tilefold.errors import PlanError
from tilefold.plan.backward.attention_backward_reduce import KERNEL, ReduceOptions

CASES = {  # batch, tokens, heads, KV heads, head dim, causal
    "D128 16k full": (1, 16384, 16, 16, 128, False),
    "D128 16k causal": (1, 16384, 16, 16, 128, True),
    "D128 4k x 4 causal": (4, 4096, 16, 16, 128, True),
    "D128 32/4 8k x 2 causal": (2, 8192, 32, 4, 128, True),
    "D64 16k full": (1, 16384, 32, 32, 64, False),
    "D64 16k causal": (1, 16384, 32, 32, 64, True),
}
Gradients = Sequence[torch.Tensor]
Backward = Callable[[], Gradients]


VERSIONS = {"added": ReduceOptions(), "added in order": ReduceOptions(ordered=True)}


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
    made = {"default": backward_of(tilefold.attention(q, k, v, causal=causal), (q, k, v), dout)}
    plan = tilefold.attention_backward_plan(q, k, v, causal=causal, deterministic=False)
    for name, options in VERSIONS.items():
        try:
            own = plan.with_tiles(kernel=KERNEL, options=options)
        except PlanError:
            continue
        out = tilefold.attention(q, k, v, causal=causal, deterministic=False, backward_plan=own)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, shape in CASES.items():
        if options.only not in name:
            continue
        batch, tokens, heads, _, dim, causal = shape
        calls = candidates(shape)
        wanted = calls["default"]()
        wrong = {each: far(call(), wanted) for each, call in calls.items()}
        flops = 10 * batch * heads * tokens**2 * dim / (2 if causal else 1)
        samplers = {each: (lambda call=call: timers.queued_samples(call, 4)) for each, call in calls.items()}
        failed: dict[str, Exception] = {}
        times = timers.time_alternating(samplers, options.rounds, failed=failed)
        print(f"\n{name}", flush=True)
        for each, time in times.items():
            print(f"  {each:24} {time.ms:8.3f} ms {flops / time.ms / 1e9:6.0f} TFLOP/s   {wrong[each]:.1e}", flush=True)
        for each, error in failed.items():
            print(f"  {each:24} {type(error).__name__}: {error}", flush=True)
        del calls, samplers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
