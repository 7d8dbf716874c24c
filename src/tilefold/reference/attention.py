"""fp64 oracles of dense and packed attention: every score is written out, nothing is tiled or clever."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ..masks import Mask
from ..scores import Score
from .rounding import attended, in_dtype

Mod = Callable[..., torch.Tensor]
"""A mod in torch: of (score, batch, head, q_index, kv_index, args)."""

SHARED = ("causal", "window", "scale", "softcap", "sinks", "layout", "dtype")
"""Options that are the same for all sequences of a packed call."""


@in_dtype
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | Mask | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: Mod | None = None,
    score_args: tuple[Any, ...] = (),
    mask_mod: Mod | None = None,
    mask_args: tuple[Any, ...] = (),
    layout: str = "bshd",
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    first_batch: int = 0,
    score: Score | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `tilefold.attention(..., return_lse=True)` defines them, computed in `dtype`; values of masks
    and scores by their own `dense`.

    score_mod and mask_mod are Python functions of (score, batch, head, q_index, kv_index, args) on whole tensors: score
    [B, H, Sq, Sk], batch [B, 1, 1, 1], head [1, H, 1, 1], q_index [Sq, 1], kv_index [1, Sk]; args ends with seq_q and seq_k.
    first_batch: the number of the first sequence, which decides what is dropped.  Without a seed nothing is."""
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    group = heads // max(1, kv_heads)
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    index = torch.arange
    i_b, i_h = index(batch, device=q.device)[:, None, None, None], index(heads, device=q.device)[None, :, None, None]
    i_q, i_k = index(seq_q, device=q.device)[:, None], index(seq_k, device=q.device)[None, :]
    position = i_q + seq_k - seq_q

    s = (q @ k.mT) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes.to(dtype)[:, :, None, None] * (position - i_k).abs()
    if bias is not None:
        s = s + bias.to(dtype)
    if score is not None:
        s = score.dense(s)
    if score_mod is not None:
        s = score_mod(s, i_b, i_h, i_q, i_k, (*score_args, seq_q, seq_k))

    keep = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
    left, right = (None if w in (None, -1) or w > seq_q + seq_k else w for w in (window or (None, None)))
    if causal:
        keep &= i_k <= position
    if left is not None:
        keep &= i_k >= position - left
    if right is not None:
        keep &= i_k <= position + right
    if isinstance(mask, Mask):
        mask = mask.dense(batch, heads, seq_q, seq_k, q.device)
    if mask is not None:
        keep = keep & mask
    if mask_mod is not None:
        keep = keep & mask_mod(s, i_b, i_h, i_q, i_k, (*mask_args, seq_q, seq_k))
    factor = None
    if dropout_p and dropout_seed is not None:
        numbers = philox(int(dropout_seed), i_q, i_k, i_b + first_batch, i_h) >> 8
        factor = torch.where(numbers.float() / (1 << 24) < dropout_p, 0.0, 1.0 / (1.0 - dropout_p)).to(dtype)
    out, lse = _softmax_times(s.masked_fill(~keep, float("-inf")), v, sinks, factor)
    return (out.transpose(1, 2) if layout == "bshd" else out), lse


def _softmax_times(
    s: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, factor: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor * softmax(s)) v and the row's log-sum-exp; sinks join the sum with value 0; a dead row is 0 and -inf."""
    if sinks is not None:
        column = sinks.to(s.dtype)[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
        s = torch.cat([s, column], 3)
        factor = None if factor is None else torch.cat([factor, torch.zeros_like(factor[..., :1])], 3)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1]) if v.shape[2] else v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    if s.shape[3] == 0:
        return s.new_zeros(*s.shape[:3], v.shape[3]), s.new_full(s.shape[:3], float("-inf"))
    lse = torch.logsumexp(s, 3)
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return attended(p if factor is None else p * factor, v, lse), lse


def philox(
    seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, rounds: int = 7
) -> torch.Tensor:
    """The first 32 bits of Philox 4x32 (Salmon et al. 2011) as int64, for a 64-bit seed and a counter of four numbers."""
    low = 0xFFFFFFFF

    def product(a: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """High and low half of 32 by 32 bits: int64 holds the parts, not the whole."""
        upper, lower = x * (a >> 16), x * (a & 0xFFFF)
        middle = (upper & 0xFFFF) * 65536 + lower
        return (upper >> 16) + (middle >> 32), middle & low

    key0, key1 = seed & low, seed >> 32 & low
    c0, c1, c2, c3 = c0.long(), c1.long(), c2.long(), c3.long()
    for _ in range(rounds):
        (high_b, low_b), (high_a, low_a) = product(0xCD9E8D57, c2), product(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = key0 + 0x9E3779B9 & low, key1 + 0xBB67AE85 & low
    return c0


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `tilefold.attention_varlen(..., return_lse=True)`: the dense oracle, sequence by sequence, or several of
    the same lengths at once."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float64, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    offsets = zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
    places = [(slice(*each[:2]), slice(*each[2:])) for each in offsets]
    for same in _alike(places, options):
        b, (rows, keys) = same[0], places[same[0]]
        seq_q, seq_k = rows.stop - rows.start, keys.stop - keys.start
        mine = dict(options)
        for name in ("bias", "mask"):
            if isinstance(mine.get(name), torch.Tensor):
                mine[name] = _tensor_of(mine[name], b, seq_q, seq_k)
        slopes = mine.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            mine["alibi_slopes"] = slopes[b]
        if isinstance(mine.get("mask"), Mask):
            mine["mask"] = _mask_of(mine["mask"], b, seq_q, seq_k)
        if mine.get("score") is not None:
            mine["score"] = Score(
                tuple((kind, _score_args(kind, a, b, seq_q, seq_k)) for kind, a in mine["score"].steps)
            )
        for name in ("score_mod", "mask_mod"):
            if mine.get(name) is not None:
                mine[name] = _in_batch(mine[name], b)
        at_once = [torch.stack([t[places[i][side]] for i in same]) for t, side in ((q, 0), (k, 1), (v, 1))]
        o, e = attention(*at_once, first_batch=b, **mine)
        for i, each in enumerate(same):
            out[places[each][0]], lse[:, places[each][0]] = o[i], e[i]
    return out, lse


def _alike(places: list[tuple[slice, slice]], options: dict[str, Any]) -> list[list[int]]:
    """Sequences that are one call of the dense oracle: of the same lengths, where no option differs between sequences."""
    others = [value for name, value in options.items() if name not in SHARED]
    if any(isinstance(value, torch.Tensor) or value not in (None, (), 0.0) for value in others):
        return [[b] for b in range(len(places))]
    found: dict[tuple[int, int], list[int]] = {}
    for b, (rows, keys) in enumerate(places):
        found.setdefault((rows.stop - rows.start, keys.stop - keys.start), []).append(b)
    return list(found.values())


def _in_batch(mod: Mod, b: int) -> Mod:
    return lambda score, batch, *rest: mod(score, batch + b, *rest)


def _tensor_of(t: torch.Tensor, b: int, seq_q: int, seq_k: int) -> torch.Tensor:
    """What of a bias or mask is of sequence b."""
    t = t[b : b + 1] if t.shape[0] > 1 else t
    return t[:, :, : seq_q if t.shape[2] > 1 else 1, :seq_k]


def _mask_of(mask: Mask, b: int, seq_q: int, seq_k: int) -> Mask:
    """A mask for sequence b alone."""
    args = mask.args
    if mask.kind in ("all", "any", "not"):
        return Mask(mask.kind, tuple(_mask_of(part, b, seq_q, seq_k) for part in args))
    if mask.kind == "tensor":
        return Mask("tensor", (_tensor_of(args[0], b, seq_q, seq_k),))
    if mask.kind == "blocks":
        kinds, block = args[0][b : b + 1] if args[0].shape[0] > 1 else args[0], args[1]
        return Mask("blocks", (kinds, block, *(_mask_of(part, b, seq_q, seq_k) for part in args[2:])))
    if mask.kind in ("keys", "prefix") and isinstance(args[0], torch.Tensor):
        return Mask(mask.kind, (args[0][b : b + 1],))
    return Mask("rule", (*args[:2], _in_batch(args[2], b))) if mask.kind == "rule" and args[2] else mask


def _score_args(kind: str, args: tuple[Any, ...], b: int, seq_q: int, seq_k: int) -> tuple[Any, ...]:
    """Of a step, for sequence b alone."""
    if kind == "bias":
        return (_tensor_of(args[0], b, seq_q, seq_k),)
    if kind == "alibi" and args[0].dim() == 2:
        return (args[0][b],)
    return (*args[:3], _in_batch(args[3], b)) if kind == "rule" and args[3] else args
