"""Decoding over a KV cache whose tokens lie on several ranks: each attends to its own, one exchange, one merge."""

from typing import Any

import torch

from ..cache_api import attention_kvcache as _local
from ..errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..ops.watch import wants_gradient
from .agree import agree
from .exchange import gather_flat, guarded
from .group import ranks_of

_REFUSED = ("window", "alibi_slopes", "plan")


def attention_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, group: Any = None, **options: Any
) -> Any:
    """`tilefold.attention_kvcache` over the caches of all ranks of a group, each of which holds some tokens of every sequence.

    A collective.  Works under CUDA graphs: nothing is read on the host, the exchange is one all-gather, once the first call
    with these shapes (which compares them between the ranks) has been made outside the capture.

    Args:
        q: [batch, seq_q, heads, dim] or packed, the same on every rank; all heads.
        k_cache, v_cache: this rank's tokens, in any order and in pages or not: without a window, which token lies where does not
            matter.  A rank may have none of a sequence (cache_seqlens 0).  `cache_lengths` says how many where tokens go to
            the ranks in turn.
        group: a ProcessGroup, DeviceMesh or Ranks; default all processes.
        options: of `tilefold.attention_kvcache`, about this rank's cache; cache_seqlens counts this rank's keys.  sinks: the same
            on every rank, they count once.  causal: only with one query a sequence, which sees every key.

    Returns:
        out, and lse with return_lse, over the keys of all ranks: the same bits on every rank.  There are no gradients.

    Raises:
        What the local call raises; ShapeError on every rank if the queries' shapes differ between them; Unsupported for window,
        alibi_slopes and plan, and for causal with several queries; CommunicationError."""
    ranks = ranks_of(group)
    wants_lse = options.pop("return_lse", False)
    with agree(ranks, "attention_kvcache", q) as facts:
        _check(q, k_cache, v_cache, options, wants_lse)
        options.pop("causal", None)
        sinks = options.pop("sinks", None)
        mine = options if sinks is None or ranks.rank else options | {"sinks": sinks}
        out, lse = _local(q, k_cache, v_cache, return_lse=True, **mine)
        scale, softcap = (options.get(name) for name in ("scale", "softcap"))
        facts |= {
            "shape of q": tuple(q.shape),
            "dtype of q": q.dtype,
            "heads and dim of v_cache": tuple(v_cache.shape[2:]),
            "scale": scale and float(scale),
            "softcap": float(softcap or 0.0),
            "sinks given": sinks is not None,
        }
    out, lse = merge_ranks(out, lse, ranks)
    return (out, lse) if wants_lse else out


def merge_ranks(out: torch.Tensor, lse: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge of all ranks' results over disjoint keys, the same bits on each: one all-gather of out in fp32 and lse.

    out: [batch, seq, heads, dim] or [total, heads, dim]; lse: [batch, heads, seq] or [heads, total] fp32, the same shapes on all
    ranks.  There are no gradients."""
    ranks = ranks_of(group)
    _check_parts(out, lse)
    if ranks.size == 1:
        return out, lse
    message = torch.cat([out.reshape(-1).float(), lse.reshape(-1)])
    every = torch.empty(ranks.size * message.numel(), dtype=message.dtype, device=message.device)
    with guarded(ranks.flat, "exchanging the results over each rank's keys"):
        gather_flat(every, message, group=ranks.flat)
    parts = every.view(ranks.size, -1)
    outs = parts[:, : out.numel()].view(ranks.size, *out.shape)
    sums = parts[:, out.numel() :].view(ranks.size, *lse.shape)
    total = torch.logsumexp(sums, 0)
    weights = torch.exp(sums - total.masked_fill(total == float("-inf"), 0.0)).transpose(-1, -2)[..., None]
    return (outs * weights).sum(0).to(out.dtype), total


def _check_parts(out: Any, lse: Any) -> None:
    for name, t in (("out", out), ("lse", lse)):
        if not isinstance(t, torch.Tensor):
            raise DtypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if lse.dtype != torch.float32:
        raise DtypeError(f"lse has dtype {lse.dtype}, accepted: torch.float32")
    if out.dim() not in (3, 4) or lse.shape != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
        raise ShapeError(
            f"lse has shape {tuple(lse.shape)} and out {tuple(out.shape)}; expected out [batch, seq, heads, dim] and lse "
            "[batch, heads, seq], or [total, heads, dim] and [heads, total]"
        )


def cache_lengths(lengths: torch.Tensor, rank: int, ranks: int, block: int = 1) -> torch.Tensor:
    """[batch] int32: how many of each sequence's tokens a rank has, if blocks of so many tokens go to ranks 0, 1, ... in turn.

    lengths: [batch] int32 or int64, of all ranks together, not read on the host.  Token t is row t // (block * ranks) * block
    + t % block of rank t // block % ranks."""
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"lengths must be an int32 or int64 tensor, got {getattr(lengths, 'dtype', type(lengths).__name__)}"
        )
    if not 0 <= rank < ranks:
        raise ValueRangeError(f"rank must be 0 to {ranks - 1}, got {rank}")
    if block < 1:
        raise ValueRangeError(f"block must be at least 1, got {block}")
    turn = block * ranks
    rounds = lengths // turn
    return (rounds * block + (lengths - rounds * turn - rank * block).clamp(0, block)).to(torch.int32)


def _check(q: Any, k_cache: Any, v_cache: Any, options: dict[str, Any], wants_lse: object) -> None:
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(t, torch.Tensor):
            raise DtypeError(f"{name} must be a tensor, got {type(t).__name__}")
        if torch.is_grad_enabled() and wants_gradient((t,)):
            raise Unsupported(f"{name} requires a gradient, but decoding passes none: call it under torch.no_grad()")
    if not isinstance(wants_lse, bool):
        raise DtypeError(f"return_lse must be a bool, got {wants_lse!r}")
    for name in _REFUSED:
        if options.get(name) is not None:
            raise Unsupported(
                f"{name} was given, but the keys of a rank are not one range of the sequence: leave it None"
            )
    if options.get("causal") and not (q.dim() == 4 and q.shape[1] == 1) and options.get("max_seqlen_q") != 1:
        raise Unsupported("causal with several queries a sequence: which keys a query sees depends on where they lie")
