"""A small library of score_mod and mask_mod: each as Triton compiles it and as fp64 has it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["MASKS", "SCORES", "Mod", "documents", "keywords", "rule"]

SPAN = 64  # of the table that `distance` reads


@triton.jit
def near(score, batch, head, q_index, kv_index, args):
    seq_q, seq_k = args
    return score - 0.03 * (q_index + seq_k - seq_q - kv_index) * (head + 1 + batch)


@triton.jit
def near_grad(score, batch, head, q_index, kv_index, args):
    return score * 0.0 + 1.0


@triton.jit
def bent(score, batch, head, q_index, kv_index, args):
    slope, seq_q, seq_k = args
    return tl.where(score > 0, score * slope, score * 0.5)


@triton.jit
def bent_grad(score, batch, head, q_index, kv_index, args):
    slope, seq_q, seq_k = args
    return tl.where(score > 0, slope, 0.5)


@triton.jit
def table(score, batch, head, q_index, kv_index, args):
    values, seq_q, seq_k = args
    return score + tl.load(values + (q_index + kv_index) % 64)


@triton.jit
def thirds(score, batch, head, q_index, kv_index, args):
    return (q_index + kv_index + head) % 3 != 0


@triton.jit
def document(score, batch, head, q_index, kv_index, args):
    numbers, seq_q, seq_k = args
    return tl.load(numbers + q_index) == tl.load(numbers + kv_index)


class Mod(NamedTuple):
    """fn, grad: for the kernel; args(ctx, most): their tensors and numbers; score, slope: in fp64 (see `Rules`)."""

    fn: Any
    grad: Any
    args: Callable[..., tuple[Any, ...]]
    score: Callable[..., Any]
    slope: Callable[..., Any] | None = None


def _near(args: Any, s: Any, b: int, h: Any, i: Any, j: Any, n: int, m: int) -> Any:
    return s - 0.03 * (i + m - n - j) * (h + 1 + b)


def _bent(args: Any, s: Any, b: int, h: Any, i: Any, j: Any, n: int, m: int) -> Any:
    return torch.where(s > 0, s * args[0], s * 0.5)


def _bent_slope(args: Any, s: Any, b: int, h: Any, i: Any, j: Any, n: int, m: int) -> Any:
    return torch.where(s > 0, torch.full_like(s, args[0]), torch.full_like(s, 0.5))


def _table(args: Any, s: Any, b: int, h: Any, i: Any, j: Any, n: int, m: int) -> Any:
    return s + args[0].double()[(i + j) % SPAN]


def _thirds(args: Any, s: Any, b: int, h: Any, i: Any, j: Any, n: int, m: int) -> Any:
    return (i + j + h) % 3 != 0


def _document(args: Any, s: Any, b: int, h: Any, i: Any, j: Any, n: int, m: int) -> Any:
    return args[0][i] == args[0][j]


def documents(ctx: Any, most: int) -> tuple[Any, ...]:
    """The number of the document of each token."""
    return (ctx.place((torch.arange(max(most, 1), device=ctx.device) // 7).to(torch.int32)),)


SCORES = {
    "near": Mod(near, near_grad, lambda ctx, most: (), _near),
    "bent": Mod(bent, bent_grad, lambda ctx, most: (1.25,), _bent, _bent_slope),
    "table": Mod(table, near_grad, lambda ctx, most: (ctx.place(ctx.normal(SPAN)),), _table),
}
MASKS = {
    "thirds": Mod(thirds, None, lambda ctx, most: (), _thirds),
    "document": Mod(document, None, documents, _document),
}


def keywords(ctx: Any, o: dict[str, Any], most: int, grad: bool) -> dict[str, Any]:
    """What the options of a problem add to its call."""
    given: dict[str, Any] = {}
    for kind, library in (("score", SCORES), ("mask", MASKS)):
        if o[f"{kind}_mod"] != "off":
            mod = library[o[f"{kind}_mod"]]
            given[f"{kind}_mod"], given[f"{kind}_args"] = mod.fn, mod.args(ctx, most)
            if kind == "score" and grad:
                given["score_grad"] = mod.grad
    return given


def rule(r: Any, o: dict[str, Any], given: dict[str, Any]) -> None:
    """The same in `Rules`."""
    if o["score_mod"] != "off":
        mod, args = SCORES[o["score_mod"]], given["score_args"]
        r.score_mod = lambda *a: mod.score(args, *a)
        r.score_grad = (lambda *a: mod.slope(args, *a)) if mod.slope else None
    if o["mask_mod"] != "off":
        which, margs = MASKS[o["mask_mod"]], given["mask_args"]
        r.mask_mod = lambda *a: which.score(margs, *a)
