"""Attention with the user's own score_mod or mask_mod, or its gradients: on sm_90, in a portable kernel and by FlexAttention, in
turns.

    PYTHONPATH=src python benchmarks/mods.py [--backward] [--only relative] [--dim 128] [--tokens 4096] [--rounds 5]

Milliseconds and TFLOP/s as if every query saw every key, or half of them with causal; of the backward pass alone.  Results are
held to the portable kernel's before anything is timed."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

import tilefold
from tilefold.bench import timers
from tilefold.compat import flex_attention as door
from tilefold.plan import plan_attention

DOCUMENTS, REACH, CAP = 8, 128, 30.0
DOOR = "tilefold's flex_attention"
Call = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]


@triton.jit
def alibi(score, batch, head, q_index, kv_index, args):
    slopes = args[0]
    return score - tl.load(slopes + head) * tl.abs(q_index - kv_index)


@triton.jit
def distance(score, batch, head, q_index, kv_index, args):
    return score + tl.exp2(-0.5 * (head + 1)) * (kv_index - q_index)


@triton.jit
def relative(score, batch, head, q_index, kv_index, args):
    table, reach = args[0], args[1]
    place = tl.minimum(tl.maximum(kv_index - q_index, -reach), reach) + reach
    return score + tl.load(table + head * (2 * reach + 1) + place)


@triton.jit
def softcap(score, batch, head, q_index, kv_index, args):
    cap = args[0]
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 / cap))))


@triton.jit
def causal(score, batch, head, q_index, kv_index, args):
    return kv_index <= q_index


@triton.jit
def documents(score, batch, head, q_index, kv_index, args):
    numbers = args[0]
    return tl.load(numbers + q_index) == tl.load(numbers + kv_index)


@triton.jit
def sliding(score, batch, head, q_index, kv_index, args):
    reach = args[0]
    return (kv_index <= q_index) & (q_index - kv_index < reach)


@triton.jit
def dilated(score, batch, head, q_index, kv_index, args):
    reach = args[0]
    return (kv_index <= q_index) & (q_index - kv_index < reach) & ((q_index - kv_index) % 2 == 0)


@triton.jit
def prefix(score, batch, head, q_index, kv_index, args):
    length = args[0]
    return (kv_index < length) | (kv_index <= q_index)


@triton.jit
def neighbourhood(score, batch, head, q_index, kv_index, args):
    """2-D, NATTEN's without its shift at the edges: args = (width of the image, reach)."""
    width, reach = args[0], args[1]
    rows = tl.abs(q_index // width - kv_index // width)
    columns = tl.abs(q_index % width - kv_index % width)
    return (rows <= reach) & (columns <= reach)


@triton.jit
def transfusion(score, batch, head, q_index, kv_index, args):
    """Causal, and both ways within an image: args = (the image's number at each place, 0 for text)."""
    numbers = args[0]
    image = tl.load(numbers + q_index)
    return (kv_index <= q_index) | ((image > 0) & (image == tl.load(numbers + kv_index)))


def cases(heads: int, tokens: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """-> name: (tilefold's options, FlexAttention's functions)."""
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)], device="cuda")
    table = torch.randn(heads, 2 * REACH + 1, device="cuda")
    mask = torch.rand(1, 1, tokens, tokens, device="cuda") < 0.5
    bias = torch.randn(1, heads, tokens, tokens, device="cuda").bfloat16()
    numbers = (torch.arange(tokens, device="cuda") * DOCUMENTS // tokens).int()
    images = torch.where(
        torch.arange(tokens, device="cuda") % 1024 < 256, torch.arange(tokens, device="cuda") // 1024 + 1, 0
    ).int()
    window, width = tokens // 8, 1 << (tokens.bit_length() // 2)
    return {
        "none": ({}, {}),
        "alibi_slopes": ({"alibi_slopes": slopes}, {}),
        "alibi": (
            {"score_mod": alibi, "score_args": (slopes,)},
            {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()},
        ),
        "distance": ({"score_mod": distance}, {"score_mod": lambda s, b, h, i, j: s + torch.exp2(-0.5 * (h + 1)) * (j - i)}),
        "relative": (
            {"score_mod": relative, "score_args": (table, REACH)},
            {"score_mod": lambda s, b, h, i, j: s + table[h, (j - i).clamp(-REACH, REACH) + REACH]},
        ),
        "softcap": (
            {"score_mod": softcap, "score_args": (CAP,)},
            {"score_mod": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)},
        ),
        "softcap, built in": ({"softcap": CAP}, {"score_mod": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)}),
        "boolean mask": ({"mask": mask}, {}),
        "boolean mask of documents": ({"mask": (numbers[:, None] == numbers)[None, None]}, {}),
        "bias": ({"bias": bias}, {"score_mod": lambda s, b, h, i, j: s + bias[0, h, i, j]}),
        "causal mask_mod": ({"mask_mod": causal}, {"mask_mod": lambda b, h, i, j: j <= i}),
        "sliding": (
            {"mask_mod": sliding, "mask_args": (window,)},
            {"mask_mod": lambda b, h, i, j: (j <= i) & (i - j < window)},
        ),
        "dilated": (
            {"mask_mod": dilated, "mask_args": (window,)},
            {"mask_mod": lambda b, h, i, j: (j <= i) & (i - j < window) & ((i - j) % 2 == 0)},
        ),
        "prefix": (
            {"mask_mod": prefix, "mask_args": (window,)},
            {"mask_mod": lambda b, h, i, j: (j < window) | (j <= i)},
        ),
        "neighbourhood": (
            {"mask_mod": neighbourhood, "mask_args": (width, 6)},
            {
                "mask_mod": lambda b, h, i, j: (
                    ((i // width - j // width).abs() <= 6) & ((i % width - j % width).abs() <= 6)
                )
            },
        ),
        "transfusion": (
            {"mask_mod": transfusion, "mask_args": (images,)},
            {"mask_mod": lambda b, h, i, j: (j <= i) | ((images[i] > 0) & (images[i] == images[j]))},
        ),
        "causal and documents": (
            {"mask_mod": documents, "mask_args": (numbers,), "causal": True},
            {"mask_mod": lambda b, h, i, j: (j <= i) & (numbers[i] == numbers[j])},
        ),
    }  # fmt: skip


def candidates(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ours: dict[str, Any], flex: dict[str, Any]
) -> dict[str, Call]:
    plan: Any = tilefold.attention_plan(q, k, v, **ours)
    portable = plan_attention(plan.problem, plan.device, portable=True)
    made: dict[str, Call] = {
        "portable": lambda: tilefold.attention(q, k, v, plan=portable, **ours),
        plan.kernel: lambda: tilefold.attention(q, k, v, **ours),
    }
    if "lists" in plan.options:
        bare = plan.with_tile(options=tuple(option for option in plan.options if option != "lists"))
        made["without lists"] = lambda: tilefold.attention(q, k, v, plan=bare, **ours)
    if "mask" in ours:
        made["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=ours["mask"]
        ).transpose(1, 2)
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        tokens = q.shape[1]
        sees = flex.get("mask_mod")
        mask = None if sees is None else create_block_mask(sees, None, None, tokens, tokens, device="cuda")
        turned = [t.transpose(1, 2) for t in (q, k, v)]
        made["flex"] = lambda: compiled(*turned, score_mod=flex.get("score_mod"), block_mask=mask).transpose(1, 2)
        made[DOOR] = lambda: door.flex_attention(*turned, flex.get("score_mod"), mask).transpose(1, 2)
    return made


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ours: dict[str, Any], flex: dict[str, Any]
) -> dict[str, Call]:
    """Backward passes, which give dq, dk and dv."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    dout = torch.randn_like(q)
    plan = tilefold.attention_backward_plan(*inputs, **ours)
    plans = {"portable": plan.with_tiles(kernel="attention_backward_box"), plan.kernel: plan}
    if plan.options is not None and plan.options.late:
        plans["dP beside the changes"] = plan.with_tiles(options=replace(plan.options, late=False))
    if plan.options is not None and plan.options.lists:
        plans["without lists"] = plan.with_tiles(options=replace(plan.options, lists=False))
        plans["any order"] = plan.with_tiles(options=replace(plan.options, ordered=False))
    outs: dict[str, Any] = {n: tilefold.attention(*inputs, **ours, backward_plan=one) for n, one in plans.items()}
    outs |= {n: call() for n, call in candidates(*inputs, ours, flex).items() if n in ("flex", "sdpa", DOOR)}
    return {n: lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True) for n, out in outs.items()}


def flat(made: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([t.detach().float().flatten() for t in ((made,) if isinstance(made, torch.Tensor) else made)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--backward", action="store_true", help="the gradients instead")
    for name, size in (("batch", 4), ("heads", 16), ("tokens", 4096), ("dim", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    o = parser.parse_args()
    q, k, v = (torch.randn(o.batch, o.tokens, o.heads, o.dim, device="cuda").bfloat16() for _ in range(3))
    for name, (ours, flex) in cases(o.heads, o.tokens).items():
        if o.only not in name:
            continue
        calls = (gradients if o.backward else candidates)(q, k, v, ours, flex)
        wanted = flat(calls["portable"]())
        wrong = {each: float((flat(call()) - wanted).norm() / wanted.norm()) for each, call in calls.items()}
        flops = (10 if o.backward else 4) * o.batch * o.heads * o.tokens**2 * o.dim / (2 if "causal" in ours else 1)
        samplers = {each: (lambda call=call: timers.queued_samples(call, 4)) for each, call in calls.items()}
        failed: dict[str, Exception] = {}
        print(f"\n{name}", flush=True)
        for each, time in timers.time_alternating(samplers, o.rounds, failed=failed).items():
            print(f"  {each:28} {time.ms:8.3f} ms {flops / time.ms / 1e9:6.0f} TFLOP/s   {wrong[each]:.1e}", flush=True)
        for each, error in failed.items():
            print(f"  {each:28} {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
