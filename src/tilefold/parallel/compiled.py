"""Context-parallel attention as operators of torch's dispatcher, so that torch.compile sees one opaque collective each way.

What cannot be in an operator's schema, the process groups and the sharding, is a `Setting`, which travels as its number."""

from collections.abc import Sequence
from typing import Any

import torch

from ..types import Window
from . import schemes
from .heads import spread_of
from .job import agreed_job, job_of, setting_of, sizes_of

Seven = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("tilefold::context_attention", mutates_args=())
def context_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    number: int,
    needs: bool,
    causal: bool,
    left: int,
    right: int,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> Seven:
    """(out, lse) of this rank's queries; and q, k, v, out and lse after the head exchange, empty where there is none."""
    scores = causal, (left, right), scale, softcap, deterministic
    job = agreed_job(setting_of(number), q, k, v, scores, needs)
    found, saved = schemes.forward(job, q, k, v)
    kept = saved if needs and job.inner is not None else [q.new_empty(0) for _ in range(5)]
    return _apart((*found, *kept))  # type: ignore[return-value]


@context_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int, needs: bool, *scores: Any) -> Seven:
    setting, (causal, left, right, *rest) = setting_of(number), scores
    job = job_of(setting, q, sizes_of(setting, q, k, v), (causal, (left, right), *rest), needs)
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=exact)
    if not needs or job.inner is None:
        return out, lse, *(q.new_empty(0) for _ in range(5))  # type: ignore[return-value]
    ranks = job.ranks.size // job.nodes
    rows, cols = (sum(b - a for a, b in spans) for spans in (job.mine, job.held[job.node]))
    heads, kv_heads = q.shape[2] // ranks, k.shape[2] * spread_of(k.shape[2], ranks) // ranks
    return (
        out,
        lse,
        q.new_empty((q.shape[0], rows, heads, q.shape[3])),
        q.new_empty((q.shape[0], cols, kv_heads, k.shape[3])),
        q.new_empty((q.shape[0], cols, kv_heads, v.shape[3])),
        q.new_empty((q.shape[0], rows, heads, v.shape[3])),
        q.new_empty((q.shape[0], heads, rows), dtype=exact),
    )


@torch.library.custom_op("tilefold::context_attention_backward", mutates_args=())
def context_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tokens: list[int],
    number: int,
    causal: bool,
    left: int,
    right: int,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> Three:
    """dq, dk, dv of this rank's tokens; q to lse as the forward pass saved them; tokens: the shapes of q, k and v before."""
    setting = setting_of(number)
    sizes = {"batch": tokens[0], "heads": tokens[2], "kv_heads": tokens[6], "dim_qk": tokens[3], "dim_v": tokens[11]}
    job = job_of(setting, q, sizes, (causal, (left, right), scale, softcap, deterministic), True)
    found = schemes.backward(job, (q, k, v, out, lse), dout, dlse, tokens[6])
    return _apart(found)  # type: ignore[return-value]


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Contiguous tensors, each in memory of its own, as an operator has to return them."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    for t in tensors:
        one = t.contiguous()
        if one.untyped_storage().data_ptr() in seen and one.numel():
            one = one.clone()
        seen.add(one.untyped_storage().data_ptr())
        found.append(one)
    return tuple(found)


@context_attention_backward_op.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, tokens: list[int], *rest: Any,
) -> Three:  # fmt: skip
    return tuple(t.new_empty(tokens[4 * i : 4 * i + 4]) for i, t in enumerate((q, k, v)))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Seven) -> None:
    q, k, v, number, _, *options = inputs
    exchanged = output[2].dim() > 1
    ctx.save_for_backward(*(output[2:] if exchanged else (q, k, v, *output[:2])))
    ctx.rest = [*q.shape, *k.shape, *v.shape], number, *options
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * 11
    shape = ctx.rest[0]
    if dout is None:
        saved = ctx.saved_tensors[0]
        dout = saved.new_zeros((*shape[:3], shape[11]))
    return (*context_attention_backward_op(dout, dlse, *ctx.saved_tensors, *ctx.rest), *(None,) * 8)


context_attention_op.register_autograd(_differentiate, setup_context=_keep)


def compiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int, needs: bool, causal: bool, window: Window | None,
    scale: float | None, softcap: float, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) through the dispatcher; number: of the Setting."""
    left, right = (-1 if side is None else side for side in window or (None, None))
    found = context_attention_op(q, k, v, number, needs, causal, left, right, scale, float(softcap), deterministic)
    return found[0], found[1]
