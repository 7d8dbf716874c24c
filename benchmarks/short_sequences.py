"""Attention of many short sequences (windows of images, patches), both passes, in turns: tilefold's plans, other tiles, SDPA.

    PYTHONPATH=src python benchmarks/short_sequences.py [--tokens 16,64] [--dims 32,64] [--batch 1] [--jsonl FILE] [--warm 1/14]
    ... --packed equal|uniform

bf16, 32 MiB a tensor unless --batch says how many sequences; milliseconds; L2 is cleared before a call.  "bias" [1, H, N, N]
is learned, "fixed" is not; "grouped" has four query heads a KV head.  --packed: by attention_varlen, beside torch's varlen_attn
(FlashAttention-2); sequences have so many tokens, or from one to so many, of as many tokens in all.  Gradients are those of q, k
and v, and of a learned bias.  plan: what is taken.  Tiles are block_m x block_n x warps x stages, of the portable forward kernel
or of `attention_backward_short`.  before: gradients by the kernel that is taken without that.  Results are held to the plan's
first; results/short_sequences.jsonl and short_packed.jsonl have what was measured, and a test holds the plans to them."""

import argparse
import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilefold
from tilefold.bench import timers
from tilefold.errors import PlanError, TilefoldError
from tilefold.plan import AttentionPlan
from tilefold.plan.backward import attention_backward_short as short
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.cache.decode import DecodeProblem, plan_decode
from tilefold.plan.dense.attention_hopper import KERNEL as HOPPER
from tilefold.plan.dense.attention_hopper import hopper_refusal
from tilefold.plan.dense.specialised import SPECIALISED
from tilefold.plan.limits import BOX, VARLEN, Tile
from tilefold.plan.problem import next_power_of_two

Call = Callable[[], Any]
TOKENS = (16, 32, 49, 64, 96, 128, 144, 196, 256)
HEADS = 8
CHANGES = ("none", "causal", "fixed", "bias", "grouped")
PEERS = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
MOST = 1e-2  # relative L2 error


def text_of(tile: Any) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.num_warps}x{tile.num_stages}"


def tiles_of(tokens: int) -> list[Tile]:
    most = min(64, max(16, next_power_of_two(tokens)))
    if most < 64:
        return [Tile(most, most, warps, 1) for warps in (1, 2, 4)]
    return [
        Tile(64, 64, 4, 1),
        Tile(64, 32, 4, 1),
        Tile(64, 32, 4, 2),
        Tile(64, 64, 8, 1),
        Tile(64, 64, 2, 1),
        Tile(32, 32, 2, 1),
    ]


def attend(tensors: tuple[torch.Tensor, ...], options: dict[str, Any], **plans: Any) -> Any:
    q, k, v = tensors
    call: Any = tilefold.attention_varlen if "max_seqlen_q" in options else tilefold.attention
    return call(q, k, v, **options, **plans)


def forward_calls(tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """The plan, the kernel of decoding, the one for sm_90, and tiles of the portable one."""
    q, k, v = tensors
    plan: Any = tilefold.attention_plan(q, k, v, **options)
    plans = {f"plan {getattr(plan, 'kernel', 'attention_decode')}": plan}
    if isinstance(plan, AttentionPlan):
        problem, device = plan.problem, plan.device
        with contextlib.suppress(TilefoldError):
            plans["decode"] = plan_decode(DecodeProblem(problem, equal=not problem.varlen), device)
        own = SPECIALISED[HOPPER].tile(problem, device) if not hopper_refusal(problem, device) else None
        for tile in (own, *tiles_of(problem.seq_q)):
            if tile is None:
                continue
            sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "num_warps": tile.num_warps}
            kernel = HOPPER if tile is own else VARLEN if problem.varlen else BOX
            with contextlib.suppress(PlanError):
                name = "sm_90" if tile is own else f"tile {text_of(tile)}"
                plans[name] = plan.with_tile(**sizes, num_stages=tile.num_stages, kernel=kernel)
    for name, each in plans.items():
        yield name, partial(attend, tensors, options, plan=each)


def backward_calls(
    tensors: tuple[torch.Tensor, ...], learned: list[torch.Tensor], dout: torch.Tensor, options: dict[str, Any]
) -> Iterator[tuple[str, Call]]:
    """The plan, the kernel that is taken without this one, and this one with other tiles."""
    q, k, v = tensors
    plan: Any = tilefold.attention_backward_plan(q, k, v, **options)
    taken, short.is_short = short.is_short, lambda *_: False
    plan_attention_backward.cache_clear()
    before = plan_attention_backward(plan.problem, plan.device, plan.bias)
    short.is_short = taken
    plan_attention_backward.cache_clear()
    plans = {f"plan {plan.kernel}": plan, f"before {before.kernel}": before}
    for tile in tiles_of(plan.problem.seq_q):
        if tile.num_stages > 1:
            continue
        with contextlib.suppress(PlanError):
            made = plan.with_tiles(kernel=short.KERNEL)
            own = tile if made.scores == made.keys else None
            plans[f"short {text_of(tile)}"] = made.with_tiles(tile, tile, own)
    for name, each in plans.items():
        out = attend(tensors, options, backward_plan=each)
        yield name, partial(torch.autograd.grad, out, learned, dout, retain_graph=True)


def peer_calls(tensors: tuple[torch.Tensor, ...], learned: list[torch.Tensor], dout: torch.Tensor, options: dict[str, Any],
               backward: bool) -> Iterator[tuple[str, Call]]:  # fmt: skip
    """SDPA by its backends, where they serve; of packed sequences torch's varlen_attn."""
    if "max_seqlen_q" in options:
        out = packed_peer(tensors, options)
        gradients = partial(torch.autograd.grad, out, learned, dout, retain_graph=True)
        yield "fa2", gradients if backward else partial(packed_peer, tensors, options)
        return
    q, k, v = (t.transpose(1, 2) for t in tensors)
    bias = options.get("bias")
    mask = None if bias is None else bias.expand(q.shape[0], -1, -1, -1)
    for name, backend in PEERS.items():
        if mask is not None and name != "efficient":
            continue

        def call(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=options.get("causal", False), enable_gqa=q.shape[1] != k.shape[1]
                )

        with contextlib.suppress(RuntimeError):
            out = call()
            yield (
                name,
                partial(torch.autograd.grad, out, learned, dout.transpose(1, 2), retain_graph=True)
                if backward
                else call,
            )


def packed_peer(tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    call: Any = varlen_attn
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    causal, known = options.get("causal", False), inspect.signature(call).parameters
    more: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    if "window_size" not in known:  # before torch 2.11
        more = {"is_causal": causal}
    if "enable_gqa" in known:
        more["enable_gqa"] = True
    return call(*tensors, *(options[name] for name in names), **more)


def packed(made: list[torch.Tensor], tokens: int, how: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The same as packed sequences, and what attention_varlen is told of them."""
    batch = made[0].shape[0]
    lengths = torch.full((batch,), tokens)
    if how == "uniform":
        lengths = torch.randint(1, tokens + 1, (2 * batch,))
        while int(lengths.sum()) > batch * tokens:
            lengths = lengths[:-1]
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().cuda()
    flat = [t.flatten(0, 1)[: int(lengths.sum())] for t in made]
    return flat, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": tokens, "max_seqlen_k": tokens}


def flat(made: Any) -> torch.Tensor:
    return torch.cat([t.float().flatten() for t in (made if isinstance(made, tuple) else (made,))])


def measure(tokens: int, dim: int, change: str, rounds: int, batch: int, how: str = "") -> Iterator[dict[str, Any]]:
    """A record of each pass; AssertionError if results disagree."""
    torch.manual_seed(1)
    heads, kv_heads = HEADS, HEADS // 4 if change == "grouped" else HEADS
    batch = batch or (16 << 20) // (tokens * heads * dim)
    made = [
        torch.randn(batch, tokens, n, dim, device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)
    ]
    made, options = packed(made, tokens, how) if how else (made, {})
    if change == "causal":
        options["causal"] = True
    if change in ("fixed", "bias"):
        options["bias"] = torch.randn(1, heads, tokens, tokens, device="cuda", dtype=torch.bfloat16)
    record = {"tokens": tokens, "dim": dim, "batch": batch, "heads": heads, "kv_heads": kv_heads, "change": change}
    record |= {"packed": how, "batch": options["cu_seqlens_q"].numel() - 1} if how else {}
    stamp = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    for backward in (False, True):
        leaves = [t.requires_grad_(backward) for t in made]
        if change == "bias":
            options["bias"].requires_grad_(backward)
        learned = [*leaves, options["bias"]] if change == "bias" else leaves
        dout = torch.randn_like(made[0])
        tensors = (leaves[0], leaves[1], leaves[2])
        ours = backward_calls(tensors, learned, dout, options) if backward else forward_calls(tensors, options)
        calls, peers = dict(ours), dict(peer_calls(tensors, learned, dout, options, backward))
        want = flat(next(iter(calls.values()))())
        for name, call in (calls | peers).items():
            turned = name in peers and not backward and not how
            got = flat(call().transpose(1, 2) if turned else call())
            assert (got - want).norm() < MOST * want.norm(), (record, name)
        samplers = {name: partial(timers.queued_samples, call, samples=4) for name, call in (calls | peers).items()}
        times = {name: round(one.ms, 4) for name, one in timers.time_alternating(samplers, rounds).items()}
        yield {**record, "pass": ("forward", "backward")[backward], "ms": times, **stamp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dims", default="32,64,128")
    parser.add_argument("--changes", default=",".join(CHANGES))
    parser.add_argument("--batch", type=int, default=0, help="0: as many as make 32 MiB")
    parser.add_argument("--packed", default="", choices=("", "equal", "uniform"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jsonl", default="")
    parser.add_argument("--warm", default="", help="i/n: compile the i-th of n parts, and time nothing")
    asked = parser.parse_args()
    sizes = [
        (tokens, dim, change)
        for tokens in map(int, asked.tokens.split(","))
        for dim in map(int, asked.dims.split(","))
        for change in asked.changes.split(",")
    ]
    if asked.warm:
        part, parts = map(int, asked.warm.split("/"))
        sizes = sizes[part::parts]
        timers.time_alternating = lambda samplers, rounds: {}  # type: ignore[assignment]
    for size in sizes:
        for record in measure(*size, asked.rounds, asked.batch, asked.packed):
            print(record, flush=True)
            if asked.jsonl and not asked.warm:
                with open(asked.jsonl, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
