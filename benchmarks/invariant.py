"""What numerics="invariant" costs: prompts and decoding beside the default, in turns; and products.  Bits are looked at first.

    PYTHONPATH=src python benchmarks/invariant.py [--only decode] [--rounds 5] [--chunk 512] [--dtype float16] [--fa2]

Milliseconds, and how much of the default's speed is left (prompts, aim 0.95) or how many times its time it takes (decoding, aim
1.10).  --chunk: keys of a chunk, to see what others would cost; they have bits of their own.  --fa2: flash_attn beside it."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import tilefold
from tilefold.bench import timers
from tilefold.plan import DecodeProblem, InvariantPlan, plan_invariant
from tilefold.quant import quantize_weight

Call = Callable[[], Any]
PROMPTS = [
    (4, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
    (8, 2048, 28, 4, 128),
    (4, 4096, 16, 16, 96),
    (4, 4096, 16, 16, 72),
    (4, 4096, 16, 16, 64),
    (4, 4096, 16, 16, 32),
    (2, 4096, 16, 16, 192),
    (2, 4096, 8, 8, 256),
    (1, 16384, 8, 8, 256),
]
TOKENS = [
    (1, 1024, 28, 4, 128),
    (1, 4096, 28, 4, 128),
    (1, 32768, 32, 8, 128),
    (16, 8192, 32, 8, 128),
    (64, 4096, 28, 4, 128),
    (64, 4096, 32, 32, 128),
]
PRODUCTS = [(1, 4096, 4096), (16, 4096, 4096), (64, 4096, 11008), (512, 4096, 4096), (8192, 4096, 4096)]


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
chosen = torch.bfloat16


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(chosen)


def planned(plan: Any, chunk: int) -> dict[str, Any]:
    """The keywords of the invariant call, perhaps with other chunks."""
    print("   ", " ".join(str(plan).splitlines()[2].split()))
    if not chunk:
        return {"numerics": "invariant"}
    if not isinstance(plan, InvariantPlan):
        plan = plan_invariant(DecodeProblem(plan.problem), plan.device)
    return {"numerics": "fast", "plan": replace(plan, chunk=chunk)}


def prompt(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, chunk: int) -> dict[str, Call]:
    q, k, v = draw(batch, tokens, heads, dim), draw(batch, tokens, kv_heads, dim), draw(batch, tokens, kv_heads, dim)
    asked = planned(tilefold.attention_plan(q, k, v, causal=True, numerics="invariant"), chunk)
    calls: dict[str, Call] = {
        "default": lambda: tilefold.attention(q, k, v, causal=True),
        "invariant": lambda: tilefold.attention(q, k, v, causal=True, **asked),
    }
    if not chunk:
        whole, cut = calls["invariant"](), tokens // 2 + 3
        for first, end in ((0, cut), (cut, tokens), (tokens - 1, tokens)):
            lengths = torch.full((1,), end, dtype=torch.int32, device="cuda")
            part = tilefold.attention_kvcache(
                q[-1:, first:end], k[-1:], v[-1:], cache_seqlens=lengths, causal=True, **asked
            )
            assert torch.equal(part, whole[-1:, first:end]), f"queries {first} to {end} have other bits"
    return calls


def token(batch: int, keys: int, heads: int, kv_heads: int, dim: int, chunk: int) -> dict[str, Call]:
    q, page = draw(batch, 1, heads, dim), 64
    k, v = (draw(batch * keys // page, page, kv_heads, dim) for _ in range(2))
    table = torch.randperm(len(k), device="cuda").view(batch, -1).int()
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    places = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    asked = planned(tilefold.attention_kvcache_plan(q, k, v, numerics="invariant", **places), chunk)
    calls: dict[str, Call] = {
        "default": lambda: tilefold.attention_kvcache(q, k, v, **places),
        "invariant": lambda: tilefold.attention_kvcache(q, k, v, **places, **asked),
    }
    if not chunk:
        own_k, own_v = (t[table[-1].long()].flatten(0, 1)[None] for t in (k, v))
        alone = tilefold.attention(q[-1:], own_k, own_v, causal=True, **asked)
        assert torch.equal(calls["invariant"]()[-1:], alone), "a token alone has other bits"
    return calls


def product(rows: int, k: int, n: int, chunk: int) -> dict[str, Call]:
    a, w = draw(rows, k), draw(n, k)
    calls: dict[str, Call] = {
        "default": lambda: tilefold.matmul(a, w.t()),
        "invariant": lambda: tilefold.matmul(a, w.t(), numerics="invariant"),
    }
    assert torch.equal(tilefold.matmul(a[-1:], w.t(), numerics="invariant"), calls["invariant"]()[-1:]), "other bits"
    return calls


def lowbit(rows: int, k: int, n: int, chunk: int) -> dict[str, Call]:
    x, weight = draw(rows, k), quantize_weight(draw(n, k), bits=4, group=128)
    calls: dict[str, Call] = {
        "default": lambda: tilefold.lowbit_matmul(x, weight),
        "invariant": lambda: tilefold.lowbit_matmul(x, weight, numerics="invariant"),
    }
    alone = tilefold.lowbit_matmul(x[-1:], weight, numerics="invariant")
    assert torch.equal(alone, calls["invariant"]()[-1:]), "other bits"
    return calls


FAMILIES: dict[str, tuple[Callable[..., dict[str, Call]], list[tuple[int, ...]]]] = {
    "prompt": (prompt, PROMPTS), "decode": (token, TOKENS), "matmul": (product, PRODUCTS), "lowbit": (lowbit, PRODUCTS),
}  # fmt: skip


def with_fa2(calls: dict[str, Call], shape: tuple[int, ...]) -> None:
    from flash_attn import flash_attn_func

    batch, tokens, heads, kv_heads, dim = shape
    q, k, v = draw(batch, tokens, heads, dim), draw(batch, tokens, kv_heads, dim), draw(batch, tokens, kv_heads, dim)
    calls["flash_attn"] = lambda: flash_attn_func(q, k, v, causal=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--fa2", action="store_true")
    options = parser.parse_args()
    global chosen
    chosen = DTYPES[options.dtype]
    print(
        torch.cuda.get_device_name(),
        f"chunk {options.chunk or 'as planned'}",
        "bits: looked at" if not options.chunk else "",
    )
    for name, (make, shapes) in FAMILIES.items():
        if options.only not in (None, name):
            continue
        for shape in shapes:
            torch.manual_seed(0)
            calls = make(*shape, options.chunk)
            if options.fa2 and name == "prompt":
                with_fa2(calls, shape)
            for call in calls.values():
                call()
            samplers = {which: partial(timers.queued_samples, call) for which, call in calls.items()}
            found = timers.time_alternating(samplers, rounds=options.rounds)
            default, invariant = found["default"].ms, found["invariant"].ms
            ratio = default / invariant if name == "prompt" else invariant / default
            beside = f"   flash_attn {found['flash_attn'].ms:9.4f}" if "flash_attn" in found else ""
            print(f"{name:8} {shape!s:28} default {default:9.4f}   invariant {invariant:9.4f}   {ratio:6.3f}{beside}")


if __name__ == "__main__":
    main()
