"""Shared by the tests of attention_kvcache: random calls over caches in one piece or in pages, and the oracle of each
sequence."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

import tilefold
from cases import judge, rand
from cases.flash import in_pages
from tilefold import reference

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


@dataclass
class Case:
    """lengths: keys of each sequence (pads included).  seq_q: tokens of each sequence, an int or, packed, a list.  page: 0 for
    one
    piece.  stored: dtype of K and V if not q's; scales: "head" or "page" (of caches where there are no pages)."""

    lengths: list[int]
    seq_q: Any = 1
    heads: int = 2
    kv_heads: int = 1
    dim: int = 32
    dim_v: int | None = None
    capacity: int = 0
    page: int = 0
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    scales: str = "head"
    pads: list[int] | None = None
    shared: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def quantised(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [B, N, H, D] fp32 in bytes that stand for multiples of scale [B or 1, N or 1, H]."""
    y = x / scale[..., None]
    return y.round().clamp(-127, 127).to(INT8) if dtype == INT8 else y.to(E4M3)


def caches_of(case: Case, device: Any) -> dict[str, Any]:
    """What the call takes, and under "k" and "v" what it stands for, [B, N, H, D] in fp32 or q's dtype."""
    batch, rows = len(case.lengths), case.capacity or max(*case.lengths, 1)
    dim_v = case.dim_v or case.dim
    x = [rand(batch, rows, case.kv_heads, d, device=device) for d in (case.dim, dim_v)]
    if case.stored is None:
        held = [t.to(case.dtype) for t in x]
        if case.shared:
            held[1] = held[0][..., :dim_v]
        meant, scales = held, [None, None]
    else:
        each = -(-rows // case.page) if case.page else 1
        per = case.scales != "head"
        shape = (batch, each, case.kv_heads) if per else (1, 1, case.kv_heads)
        most = 30.0 if case.stored == INT8 else 100.0
        scales = [(torch.rand(shape) + 0.5).to(device) / most for _ in x]
        if case.shared:
            scales[1] = scales[0]
        wide = [
            s.repeat_interleave(case.page if case.page and per else rows, 1)[:, :rows].expand(-1, rows, -1)
            for s in scales
        ]
        held = [quantised(t, s, case.stored) for t, s in zip(x, wide, strict=True)]
        if case.shared:
            held[1] = held[0][..., :dim_v]
        meant = [t.float() * s[..., None] for t, s in zip(held, wide, strict=True)]
    return {"held": held, "meant": meant, "scales": scales}


def stale(held: list[torch.Tensor], lengths: list[int]) -> None:
    """NaN, or bytes of any kind, behind the last key."""
    for t in held:
        for b, n in enumerate(lengths):
            if t.is_floating_point() and t.dtype != E4M3:
                t[b, n:] = float("nan")
            else:
                t[b, n:].view(torch.uint8).fill_(0x7F)


def paged(case: Case, made: dict[str, Any], device: Any) -> tuple[list[torch.Tensor], torch.Tensor, list[Any]]:
    """(pages of K and V, table, scales): pages of nobody are poison, and the table names them behind each sequence's last key."""
    both = torch.cat([t.view(torch.uint8) if t.element_size() == 1 else t for t in made["held"]], -1)
    pages, table = in_pages(both.float(), case.page)
    pages = pages.nan_to_num(127).to(torch.uint8) if both.dtype == torch.uint8 else pages.to(both.dtype)
    k, v = pages[..., : case.dim], pages[..., case.dim :]
    if case.shared:
        v = k[..., : case.dim_v or case.dim]
    k, v = (t.view(case.stored) if case.stored is not None else t for t in (k, v))
    scales = made["scales"]
    if case.stored is not None and case.scales == "page":
        spread = []
        for s in scales:
            of_pages = torch.full((len(pages), case.kv_heads), float("nan"), device=device)
            of_pages[table.flatten().long()] = s.flatten(0, 1)
            spread.append(of_pages)
        scales = [spread[0], spread[0] if case.shared else spread[1]]
    elif case.stored is not None:
        scales = [s.flatten() for s in scales]
    for b, n in enumerate(case.lengths):
        table[b, -(-n // case.page) :] = 1 << 30  # reading it would fault
    return [k, v], table, scales


def changed(plan: Any, fields: dict[str, Any]) -> Any:
    """The plan with other fields."""
    return replace(plan, **fields)


def run(case: Case, device: Any, plan: Any = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the call, hold it to the oracle, return (out, lse).  plan: changes of the planner's plan."""
    batch, packed = len(case.lengths), isinstance(case.seq_q, list)
    made = caches_of(case, device)
    tokens = case.seq_q if packed else [case.seq_q] * batch
    q = rand(sum(tokens), case.heads, case.dim, dtype=case.dtype, device=device)
    given: dict[str, Any] = {
        **case.options,
        **more,
        "cache_seqlens": torch.tensor(case.lengths, dtype=torch.int32, device=device),
    }
    stale(made["held"][:1] if case.shared else made["held"], case.lengths)
    held, scales = made["held"], made["scales"]
    if case.page:
        held, given["block_table"], scales = paged(case, made, device)
    elif case.stored is not None:
        scales = [s[:, 0] if case.scales == "page" else s.flatten() for s in scales]
    if case.stored is not None:
        given |= {"k_scale": scales[0], "v_scale": scales[1]}
    if case.pads is not None:
        given["cache_leftpad"] = torch.tensor(case.pads, dtype=torch.int32, device=device)
    if packed:
        given["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(tokens).cumsum(0)], dtype=torch.int32, device=device)
        given["max_seqlen_q"] = max(tokens)
    else:
        q = q.view(batch, case.seq_q, case.heads, case.dim)
    if plan is not None:
        given["plan"] = changed(tilefold.attention_kvcache_plan(q, *held, **given), plan)
    out, lse = tilefold.attention_kvcache(q, *held, return_lse=True, **given)
    hold(case, q, made["meant"], tokens, out, lse)
    return out, lse


def hold(case: Case, q: torch.Tensor, meant: Any, tokens: list[int], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Every sequence against fp64, all of them judged at once; several of the same lengths are one call of the oracle."""
    packed, got, exact, plain = isinstance(case.seq_q, list), [], [], []
    firsts = [0, *torch.tensor(tokens).cumsum(0).tolist()]
    slopes = case.options.get("alibi_slopes")
    own = slopes is not None and slopes.dim() == 2  # of each sequence
    alike: dict[Any, list[int]] = {}
    for b, (n, t) in enumerate(zip(case.lengths, tokens, strict=True)):
        pad = min(case.pads[b], n) if case.pads else 0
        if t > 0:
            alike.setdefault((n, t, pad, b if own else 0), []).append(b)
    for (n, t, pad, _), each in alike.items():
        at = [slice(firsts[b], firsts[b] + t) for b in each]
        rows = torch.stack([q[mine] for mine in at]) if packed else q[each]
        keys = [x[each, pad:n] for x in meant]
        options = {**case.options, "alibi_slopes": slopes[each[0]]} if own else case.options
        options = {name: value for name, value in options.items() if name != "num_splits"}
        exact.append([x.flatten() for x in reference.attention(rows, *keys, **options)])
        plain.append([x.flatten() for x in reference.attention(rows, *keys, dtype=case.dtype, **options)])
        outs = torch.stack([out[mine] for mine in at]) if packed else out[each]
        lses = torch.stack([lse[:, mine] for mine in at]) if packed else lse[each]
        got.append([outs, lses])
    for i, name in enumerate(("out", "lse")):
        if got:
            judge(torch.cat([g[i].flatten() for g in got]), torch.cat([e[i] for e in exact]),
                  torch.cat([p[i] for p in plain]), f"{name} {case}")  # fmt: skip


def small(device, **changes):
    """Arguments of a call over two sequences in pages, of which the table's last entry lies behind its keys."""
    int32 = {"dtype": torch.int32, "device": device}
    given = {
        "q": rand(2, 2, 4, 16, device=device),
        "k_cache": rand(6, 8, 2, 16, device=device),
        "v_cache": rand(6, 8, 2, 16, device=device),
        "cache_seqlens": torch.tensor([9, 3], **int32),
        "block_table": torch.tensor([[0, 5], [2, 99]], **int32),
    }
    return {**given, **changes}
