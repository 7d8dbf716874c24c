"""Attention of one sequence in fp64, forward and backward by its formulas, with the error that rounding explains beside each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .bounds import FP32, limit, of_offsets, roundoff, steps

Mod = Callable[..., torch.Tensor]


@dataclass
class Rules:
    """What is done to the scores of one sequence; tensors in fp64, a leading dimension of heads or 1.

    before: rows of the cache that are no keys.  seen: bool [heads or 1, queries or 1, keys].  keep: what dropout leaves, and by
    how much it is multiplied.  noise: relative error of each of q's and k's numbers beside those given."""

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    score_mod: Mod | None = None
    score_grad: Mod | None = None
    mask_mod: Mod | None = None
    keep: torch.Tensor | None = None
    before: int = 0
    batch: int = 0
    noise: float = 0.0
    weights: float = 0.0  # roundoff of the weights, where it is not that of the dtype
    lost: float = 0.0  # weights below this share of the largest one count in lse alone
    k_off: torch.Tensor | None = None  # how far keys and values may lie from those given, [m, kv heads, dim]
    v_off: torch.Tensor | None = None
    q_off: torch.Tensor | None = None  # of queries, [n, heads, dim]
    sums: float = FP32  # what sums of products are cut off by


class Result(NamedTuple):
    out: torch.Tensor  # [queries, heads, dim_v]
    lse: torch.Tensor  # [heads, queries]
    out_limit: torch.Tensor
    lse_limit: torch.Tensor
    p: torch.Tensor
    chain: torch.Tensor  # derivative of the score by scale * q . k
    late: torch.Tensor  # derivative of the score by the bias
    error: torch.Tensor  # relative, of each weight


class Grads(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None  # [heads, queries, keys]
    sinks: torch.Tensor | None
    limits: tuple[torch.Tensor, ...]  # of q, k, v, bias, sinks


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, kv heads, dim] as [heads, n, dim]."""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, r: Rules) -> tuple[torch.Tensor, ...]:
    """(scores with -inf where masked, their absolute error, derivative by the product, derivative by the bias)."""
    heads, n, m = q.shape[1], q.shape[0], k.shape[0]
    qh, kh = q.transpose(0, 1), _spread(k, heads)
    s = qh @ kh.mT * r.scale
    size = qh.abs() @ kh.abs().mT * r.scale
    error = r.sums * (steps(q.shape[2]) if r.sums == FP32 else 1.0) * size
    if r.noise:
        error = error + r.noise * (5 * 1.5 * ((qh * r.scale) ** 2 @ (kh**2).mT).sqrt() + size / 8)
    if r.k_off is not None:
        error = error + of_offsets(qh.abs() * r.scale, _spread(r.k_off, heads))
    if r.q_off is not None:
        error = error + of_offsets(kh.abs() * r.scale, r.q_off.transpose(0, 1)).mT
    chain = torch.ones_like(s)
    if r.softcap:
        turned = torch.tanh(s / r.softcap)
        s, chain = r.softcap * turned, 1 - turned**2
        error = error + 8 * FP32 * r.softcap
    i = torch.arange(n, device=q.device)[:, None]
    j = torch.arange(m, device=q.device)[None, :]
    here = i + m - n
    if r.slopes is not None:
        term = r.slopes[:, None, None] * (here - j).abs()
        s, error = s - term, error + 4 * FP32 * term.abs()
    if r.bias is not None:
        s, error = s + r.bias, error + 4 * FP32 * r.bias.abs()
    late = torch.ones_like(s)
    if r.score_mod is not None:
        h = torch.arange(heads, device=q.device)[:, None, None]
        if r.score_grad is not None:
            late = r.score_grad(s, r.batch, h, i, j, n, m)
        new = r.score_mod(s, r.batch, h, i, j, n, m)
        s, error = new, error * late.abs().clamp_min(1) + 8 * FP32 * (s.abs() + new.abs() + 1)
    error = error + 8 * FP32 * (s.abs() + 1)
    return s.masked_fill(~_seen(r, s, i, j, here), float("-inf")), error, chain * late, late


def _seen(r: Rules, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    live = (j >= r.before).expand(s.shape)
    if r.causal:
        live = live & (j <= here)
    left, right = r.window or (None, None)
    if left is not None and left >= 0:
        live = live & (j >= here - left)
    if right is not None and right >= 0:
        live = live & (j <= here + right)
    if r.seen is not None:
        live = live & r.seen
    if r.mask_mod is not None:
        h = torch.arange(s.shape[0], device=s.device)[:, None, None]
        live = live & r.mask_mod(s, r.batch, h, i, j, s.shape[1], s.shape[2])
    return live


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, r: Rules, dtype: torch.dtype, out: Any = None) -> Result:
    """q [n, heads, dim], k and v [m, kv heads, ..], fp64; dtype: what weights are rounded to; out: the result's dtype."""
    out = out or dtype
    heads, m = q.shape[1], k.shape[0]
    s, error, chain, late = _scores(q, k, r)
    joined = s if r.sinks is None else torch.cat([s, r.sinks[:, None, None].expand(-1, s.shape[1], 1)], 2)
    lse = torch.logsumexp(joined, 2) if joined.shape[2] else s.new_full(s.shape[:2], float("-inf"))
    dead = lse == float("-inf")
    base = lse.masked_fill(dead, 0.0)[..., None]
    p = torch.exp(s - base)
    vh = _spread(v, heads)
    pz = p if r.keep is None else p * r.keep
    found = pz @ vh
    off = (p * error).sum(2)
    unit = r.weights or roundoff(dtype)
    # the sum of p e (v - found) over the keys, by Cauchy and Schwarz: a row whose values are equal does not care for its scores
    apart = (p if r.keep is None else p * r.keep**2) @ vh**2 - found**2 * (2 - p.sum(2, keepdim=True))
    extra = ((p * torch.expm1(error) ** 2).sum(2, keepdim=True) * apart.clamp_min(0.0)).sqrt() + off[..., None] * FP32
    if r.v_off is not None:
        extra = extra + of_offsets(pz, _spread(r.v_off, heads).mT)
    if r.sums != FP32:
        extra = extra + r.sums * (pz @ vh.abs())
    if r.lost and m:
        extra = extra + (pz * (p < r.lost * p.amax(2, keepdim=True))) @ vh.abs()
    extra = extra + _grain(pz, dtype, vh)
    bound = limit(found, out, pz @ vh.abs(), pz**2 @ vh**2, unit, m, extra)
    lse_off = off + FP32 * (8 + steps(m) + 4 * base[..., 0].abs())
    return Result(found.transpose(0, 1), lse, bound.transpose(0, 1), lse_off, p, chain, late, error + off[..., None])


def gradients(q: Any, k: Any, v: Any, r: Rules, f: Result, dout: Any, dlse: Any, dtype: torch.dtype) -> Grads:
    """Of sum(out * dout) + sum(lse * dlse); dout [n, heads, dim_v], dlse [heads, n] or None."""
    heads, kv, n, m = q.shape[1], k.shape[1], q.shape[0], k.shape[0]
    unit = roundoff(dtype)
    qh, kh, vh, do = q.transpose(0, 1), _spread(k, heads), _spread(v, heads), dout.transpose(0, 1)
    p = f.p
    keep = 1.0 if r.keep is None else r.keep
    dp, dp_size = do @ vh.mT * keep, do.abs() @ vh.abs().mT * keep
    delta = (p * dp).sum(2, keepdim=True)
    rounded = do * f.out.transpose(0, 1)
    pdp = p * dp
    unsure = unit * (5 * ((rounded**2).sum(2, keepdim=True) + (pdp**2).sum(2, keepdim=True)).sqrt()
                     + pdp.abs().sum(2, keepdim=True) / 8)  # fmt: skip
    unsure = (
        unsure
        + FP32 * steps(v.shape[2] + m) * (p * dp_size).sum(2, keepdim=True)
        + (p * f.error * dp.abs()).sum(2, keepdim=True)
    )
    ds = p * (dp - delta + (0.0 if dlse is None else dlse[..., None]))
    dp_off = FP32 * steps(v.shape[2]) * dp_size
    if r.v_off is not None:
        dp_off = dp_off + do.abs() @ _spread(r.v_off, heads).mT
    blind = p * dp_off + ds.abs() * f.error  # what is off in each element by itself
    if (
        r.keep is not None and dtype == torch.float16
    ):  # weights that float16 does not hold do not show whether they were dropped
        blind = blind + torch.where(p < 2.0**-24, 2 * p, 0.0) * (do.abs() @ vh.abs().mT)
    if dlse is not None:
        blind = blind + 2 * FP32 * p * dlse.abs()[..., None]
    t = f.chain * r.scale
    w, w_blind, w_shared = ds * t, blind * t.abs(), p * t.abs() * unsure
    if r.softcap:  # the derivative 1 - tanh^2 is a difference of numbers around 1 where the cap is reached
        w_blind = w_blind + (ds.abs() + blind + p * unsure) * f.late.abs() * r.scale * 8 * FP32
    size_q = w.abs() @ kh.abs()
    dq = w @ kh
    off_q = 0.0 if r.k_off is None else w.abs() @ _spread(r.k_off, heads)
    blind_q = w_blind @ kh.abs() + ((p * t) @ kh).abs() * unsure + _grain(w, dtype, kh)
    dq_limit = off_q + limit(dq, dtype, size_q, w**2 @ kh**2, unit, m, blind_q)
    apart = _grain(w.mT, dtype, qh) + w_blind.mT @ qh.abs() + w_shared.mT @ qh.abs() / 8
    back = [w.mT @ qh, w.abs().mT @ qh.abs(), (w**2).mT @ qh**2, apart, (w_shared**2).mT @ qh**2]
    back = [_gather(x, kv) for x in back]
    dk_limit = limit(back[0], dtype, back[1], back[2], unit, n * heads // kv, back[3] + back[4].sqrt())
    z = p * keep
    side = [
        _gather(x, kv)
        for x in (z.mT @ do, z.mT @ do.abs(), (z**2).mT @ do**2, (z * f.error).mT @ do.abs() + _grain(z.mT, dtype, do))
    ]
    dv_limit = limit(side[0], dtype, side[1], side[2], unit, n * heads // kv, side[3])
    limits = [dq_limit.transpose(0, 1), dk_limit, dv_limit]
    dbias = ds * f.late
    limits.append((blind + p * unsure) * f.late.abs() + FP32 * 4 * dbias.abs())
    dsinks = None
    if r.sinks is not None:
        dsinks, slack = _sinks(r.sinks, f, delta[..., 0], unsure[..., 0], 0.0 if dlse is None else dlse)
        limits.append(slack)
    return Grads(dq.transpose(0, 1), back[0], side[0], dbias, dsinks, tuple(limits))


def _sinks(sinks: Any, f: Result, delta: Any, unsure: Any, dlse: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of each head's sink, and what it may be off."""
    weight = torch.exp(sinks[:, None] - f.lse)
    part, share = weight * (dlse - delta), weight * unsure
    known = (part.abs() * (f.error.amax(2) if f.p.shape[2] else 0.0)).sum(1)
    size = (weight * (delta.abs() + abs(dlse))).sum(1)
    slack = share.sum(1) / 8 + (share**2).sum(1).sqrt() + known + FP32 * steps(delta.shape[1]) * 4 * size
    return part.sum(1), slack


def _grain(x: torch.Tensor, dtype: torch.dtype, other: torch.Tensor) -> torch.Tensor | float:
    """What a product with `other` loses because the dtype's smallest numbers are no smaller: fp16 has few below 6e-5."""
    if dtype != torch.float16:
        return 0.0
    lost = x.abs().clamp(max=2.0**-25)
    return 2 * (lost**2 @ other**2).sqrt() + lost @ other.abs() / 8


def _gather(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[heads, m, d] summed over the heads of each group, as [m, kv heads, d]."""
    return x.view(kv, x.shape[0] // kv, *x.shape[1:]).sum(1).transpose(0, 1)
