"""Attention and products whose bits depend on a row alone: numerics="invariant" in plain torch.

torch's products, and its exponentials at a tensor's ends, follow shapes.  Here sums are trees over halves of a fixed length, and
every step is an addition, a product or a maximum of single elements, which have the same bits wherever an element lies.
Tiles are counted from a sequence's first key.  It takes many times as long as `cpu.dense`."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from ..plan.torch_cpu import INVARIANT_BLOCK_N as BLOCK_N
from .state import LEAST, LN2, LOG2E
from .terms import Place, Terms, band_of, hide
from .tiles import rows_of, spans

ELEMENTS = 1 << 21  # of products that are summed at once
LANES = 4096  # a multiple of what any processor computes at once, and too few for a second thread
# 2^f, -0.5 <= f <= 0.5, by its series: the first term that is left out is below 2^-26
SERIES = (1.0, 0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530, 0.000015252734)
TANH = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)  # tanh(x) / x of x^2, for x below 0.35


def product(a: torch.Tensor, b: torch.Tensor, size: int = 0) -> torch.Tensor:
    """a b^T in fp32, [.., m, n] of [.., m, k] and [.., n, k], whose dimensions in front broadcast; size: of k, at least."""
    a, b = a.float(), b.float()
    made = a.new_empty((*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2]))
    each = max(1, made[..., :1, :1].numel() * a.shape[-1])
    columns = max(1, min(b.shape[-2], ELEMENTS // each))
    for n in spans(0, b.shape[-2], columns):
        for m in spans(0, a.shape[-2], max(1, ELEMENTS // (each * columns))):
            made[..., m, n] = tree(a[..., m, None, :] * b[..., None, n, :], size)
    return made


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), LANES elements at a time: torch computes those at a tensor's ends in another way than the others."""
    flat = functional.pad(x.flatten(), (0, -x.numel() % LANES)).view(-1, LANES)
    made = torch.stack([function(part) for part in flat]) if len(flat) else flat
    return made.flatten()[: x.numel()].view(x.shape)


def tree(x: torch.Tensor, size: int = 0) -> torch.Tensor:
    """The sum over the last dimension, which has at most `size` elements, by halves of the next power of two."""
    size = 1 << (max(size, x.shape[-1], 1) - 1).bit_length()
    x = functional.pad(x, (0, size - x.shape[-1])) if size > x.shape[-1] else x
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x to 2 units in the last place for x up to 127, 0 below -126."""
    whole = x.clamp_min(-150.0).round()
    f = x.clamp_min(-150.0) - whole
    made = torch.full_like(f, SERIES[-1])
    for term in SERIES[-2::-1]:
        made = made * f + term
    power = ((whole.nan_to_num(0.0).clamp(-126.0, 127.0).int() + 127) << 23).view(torch.float32)
    return torch.where(whole < -126.0, 0.0, made * power)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """To some units in the last place."""
    square, made = x * x, torch.full_like(x, TANH[-1])
    for term in TANH[-2::-1]:
        made = made * square + term
    far = 1.0 - 2.0 / (exp2(x.abs().clamp_max(20.0) * (2.0 * LOG2E)) + 1.0)
    return torch.where(x.abs() < 0.35, x * made, torch.copysign(far, x))


def log2(x: torch.Tensor) -> torch.Tensor:
    """log2 of x >= 0 to a unit in the last place of fp32: -inf of 0."""
    part, power = torch.frexp(x.double())
    low = part < 0.7071067811865476
    part, power = torch.where(low, part * 2.0, part), power - low.int()
    z = (part - 1.0) / (part + 1.0)  # at most 0.172: 2 atanh(z) = log(part), by its series
    square, total = z * z, torch.zeros_like(z)
    for term in range(19, 0, -2):
        total = total * square + 1.0 / term
    made = (total * z * (2.0 / LN2) + power.double()).float()
    return torch.where(x == 0, -torch.inf, made)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """`cpu.dense.forward`, but for dropout."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(kv_heads):
            heads = slice(h * group, (h + 1) * group)
            own_k, own_v = rows_of(k[b : b + 1, h : h + 1])[0], rows_of(v[b : b + 1, h : h + 1])[0]
            for rows in spans(0, q.shape[2], max(1, 256 // group)):
                places = _places(b, h, group, rows, q, k, terms)
                sinks = None if terms.sinks is None else terms.sinks[heads]
                made, log = _rows(q[b, heads, rows].float(), own_k, own_v, places, terms, sinks)
                out[b, heads, rows], lse[b, heads, rows] = made, log


Tiles = Iterator[tuple[Place, tuple[int, int, int, int]]]


def _places(b: int, h: int, group: int, rows: slice, q: torch.Tensor, k: torch.Tensor, terms: Terms) -> Tiles:
    """The tiles of keys that some query of `rows` may see, with the queries' band."""
    shift = k.shape[2] - q.shape[2]
    band = band_of(terms, rows.start + shift, rows.stop - 1 + shift, k.shape[2])
    for begin in range(band[0] // BLOCK_N * BLOCK_N, band[3], BLOCK_N):
        keys = slice(begin, min(begin + BLOCK_N, k.shape[2]))
        yield Place(slice(b, b + 1), slice(h, h + 1), group, rows, keys, shift), band


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Tiles, terms: Terms, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of rows [group, rows, dim] of a KV head over its keys [seq_k, ..], all fp32."""
    acc, m, l = torch.zeros(*q.shape[:2], v.shape[-1]), torch.full(q.shape[:2], LEAST), torch.zeros(q.shape[:2])
    if sinks is not None:
        sinks = (sinks.float() * LOG2E)[:, None].expand_as(m)
        m = sinks.clamp_min(LEAST)
        l = exp2(sinks - m)
    for place, band in places:
        scores = product(q, k[place.keys])
        _modify(scores[None, None], terms, place)
        hide(scores[None, None], terms, place, band)
        top = torch.maximum(m, scores.amax(-1))
        p, keep = exp2(scores - top[..., None]), exp2(m - top)
        l = l * keep + tree(p, BLOCK_N)
        acc = acc * keep[..., None] + product(p, v[place.keys].mT, BLOCK_N)
        m = top
    return acc / torch.where(l == 0, 1.0, l)[..., None] + 0.0, (m + log2(l)) * LN2


def _modify(scores: torch.Tensor, terms: Terms, place: Place) -> None:
    """Products [1, 1, group, rows, keys] to scores in base 2, in place: scaled, softcap, ALiBi, bias, as `terms.modify`."""
    if terms.bare:
        scores.mul_(terms.scale * LOG2E)
        return
    scores.mul_(terms.scale)
    if terms.softcap:
        scores.copy_(tanh(scores / terms.softcap) * terms.softcap)
    if terms.slopes is not None:
        positions, keys = place.numbers()
        slopes = Place(*place[:3], slice(None), slice(None), 0).cut(terms.slopes[:, :, None, None])
        scores.sub_((positions - keys).abs().float() * slopes.float())
    if terms.bias is not None:
        scores.add_(place.cut(terms.bias).float())
    scores.mul_(LOG2E)
