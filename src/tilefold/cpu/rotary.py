"""Rotary embedding of rows at given positions, in fp32."""

import torch


def turned(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    conjugate: bool = False,
) -> torch.Tensor:
    """x [.., tokens, heads, dim] in fp32, its first 2 * pairs channels turned by the tables' rows at `positions` [.., tokens].

    cos, sin: [positions, pairs]; tokens whose position they do not hold stay."""
    made = x.float().clone() if x.dtype == torch.float32 else x.float()
    if not cos.shape[0]:
        return made
    inside = ((positions >= 0) & (positions < cos.shape[0]))[..., None, None]
    at = positions.clamp(0, cos.shape[0] - 1)
    c, s = (torch.where(inside, t[at][..., None, :].float(), other) for t, other in ((cos, 1.0), (sin, 0.0)))
    s = -s if conjugate else s
    pairs = cos.shape[1]
    if interleaved:
        first, second = made[..., 0 : 2 * pairs : 2].clone(), made[..., 1 : 2 * pairs : 2].clone()
        made[..., 0 : 2 * pairs : 2] = first * c - second * s
        made[..., 1 : 2 * pairs : 2] = first * s + second * c
    else:
        first, second = made[..., :pairs].clone(), made[..., pairs : 2 * pairs].clone()
        made[..., :pairs] = first * c - second * s
        made[..., pairs : 2 * pairs] = first * s + second * c
    return made


def rotary(
    x: torch.Tensor,
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offset: int,
    step: int,
    longest: int,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Write x [batch, seq, heads, dim], turned, into out, which may be x; packed [total, heads, dim] with cu_seqlens, of whose
    sequences the first `longest` rows."""
    if cu_seqlens is None:
        first = torch.full((x.shape[0],), offset) if offsets is None else offsets.long()
        positions = first[:, None] + torch.arange(x.shape[1]) * step
        out.copy_(turned(x, cos, sin, positions, interleaved, conjugate))
        return
    starts = cu_seqlens.tolist()
    for b in range(len(starts) - 1):
        rows = slice(starts[b], min(starts[b + 1], starts[b] + longest))
        begin = offset if offsets is None else int(offsets[b])
        positions = begin + torch.arange(rows.stop - rows.start) * step
        out[rows] = turned(x[rows], cos, sin, positions, interleaved, conjugate).to(out.dtype)
