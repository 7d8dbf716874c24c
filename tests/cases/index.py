"""Shared by the tests of BlockIndex and sparse attention: random maps, lists as Python sees them, pages, the oracle's verdict."""

from typing import Any

import torch

import tilefold
from cases import judge, packed, qkv
from tilefold import BlockIndex, reference

PORTABLE = {  # the kernels that take K and V by pointers, in shares of a list if asked
    "sparse_attention": "sparse_forward",
    "sparse_attention_varlen": "sparse_forward_varlen",
    "sparse_attention_paged": "sparse_forward_paged",
}


def random_map(*shape: int, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def lists_of(index: BlockIndex) -> list[list[int]]:
    """Every list up to its count, rows of all batches and heads one after the other."""
    shape = torch.broadcast_shapes(index.indices.shape[:3], index.counts.shape)
    rows = index.indices.expand(*shape, -1).flatten(0, 2).tolist()
    return [row[:n] for row, n in zip(rows, index.counts.expand(shape).flatten().tolist(), strict=True)]


def map_lists(keep: torch.Tensor) -> list[list[int]]:
    return [[c for c, one in enumerate(row) if one] for row in keep.flatten(0, -2).tolist()]


def lists(b, h, sq, sk, block=16, density=0.5, block_q=None, device="cpu", **sizes):
    """Random maps whose rows include none, one and all blocks."""
    block_q = block_q or block
    shape = (b, h, -(-sq // block_q), -(-sk // block))
    chosen = torch.rand(shape) < density
    chosen[..., :1, :] = False
    chosen[..., -1:, :] = True
    return BlockIndex.from_map(chosen.to(device), block_q=block_q, block_k=block, seq_q=sq, seq_k=sk, **sizes)


def uneven(b, h, sq, sk, block_q=64, block_k=64, density=0.5, most=3, unlisted=False, device="cuda", **options):
    """Random lists: query blocks with none, one, up to `most` and all KV blocks; unlisted: a KV block that nobody lists."""
    chosen = torch.rand(b, h, -(-sq // block_q), -(-sk // block_k)) < density
    for row in range(min(most + 1, chosen.shape[2])):
        chosen[..., row, :] = False
        chosen[..., row, -row:] = row > 0
    chosen[..., -1, :] = True
    if unlisted and chosen.shape[3] > 3:
        chosen[..., 1] = False
    return BlockIndex.from_map(chosen.to(device), block_q=block_q, block_k=block_k, seq_q=sq, seq_k=sk, **options)


def offsets(lengths_q, lengths_k, heads=4, kv_heads=2, dim=128, dtype=torch.bfloat16, device="cuda"):
    """[q, k, v], {cu_seqlens_q, cu_seqlens_k}."""
    tensors, (cu_q, cu_k, _, _) = packed(lengths_q, lengths_k, heads, kv_heads, dim, dim, dtype, device)
    return list(tensors), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def plan_of(q, k, v, index, **options):
    return tilefold.sparse_plan(q, k, v, index, **options)


def held(name: str, tensors: Any, index: BlockIndex, where: dict[str, torch.Tensor], twins: dict[str, Any] | None = None,
         splits: int = 1, tile: dict[str, int] | None = None, **options: Any):  # fmt: skip
    """Run tilefold's `name` under a plan with these splits and tile fields (splits=0: the planner's own) and hold out, lse and
    their dtypes to the oracle of that name.  where: its arguments after the index; twins: Python versions of score_mod and
    mask_mod."""
    plan = tilefold.sparse_plan(*tensors, index, **where, **options) if splits else None
    if plan is not None:
        portable = {"kernel": PORTABLE[name]} if splits > 1 and plan.kernel not in PORTABLE.values() else {}
        plan = plan.with_tile(splits=splits, **{**portable, **(tile or {})})
    out, lse = getattr(tilefold, name)(*tensors, index, **where, plan=plan, return_lse=True, **options)
    assert (out.dtype, lse.dtype) == (tensors[0].dtype, torch.float32)
    python = {**options, **(twins or {})}
    oracle, plain = (
        getattr(reference, name)(*tensors, index, **where, **python, **dtype) for dtype in ({}, {"dtype": out.dtype})
    )
    what = f"{[tuple(t.shape) for t in tensors]} {out.dtype} splits={splits} {sorted(options)}"
    judge(out, oracle[0], plain[0], f"out {what}")
    judge(lse, oracle[1], plain[1], f"lse {what}")
    return out, lse


def cache(lengths, page, h=4, hk=2, sq=20, d=32, dv=24, room=None, dtype=torch.float32, device="cpu", layout="bshd"):
    """(q, k_pages, v_pages), {block_table, cache_seqlens}: pages in random order among others, NaN wherever no key of a
    sequence lies, -1 in the table past its end.  room: keys that the table has pages for."""
    width = -(-(room or max(lengths)) // page)
    used = [-(-n // page) for n in lengths]
    pool = torch.randperm(sum(used) + 3)
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    pages = [torch.full((len(pool), page, hk, width_d), float("nan")) for width_d in (d, dv)]
    for b, length in enumerate(lengths):
        table[b, : used[b]], pool = pool[: used[b]], pool[used[b] :]
        for side in pages:
            for j in range(length):
                side[int(table[b, j // page]), j % page] = torch.randn(hk, side.shape[3])
    q = qkv(len(lengths), sq, 0, h, hk, d)[0]
    tensors = [t.to(device=device, dtype=dtype) for t in (q, *pages)]
    if layout == "bhsd":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    where = {"block_table": table, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
    return tensors, {name: t.to(device) for name, t in where.items()}


def top(sq, sk, keep, heads=4, batch=1, device="cuda", block=64, **sizes):
    """The `keep` KV blocks of highest random score for each query block."""
    scores = torch.rand(batch, heads, -(-sq // block), -(-sk // block), device=device)
    return BlockIndex.from_topk(scores, keep, block_q=block, block_k=block, seq_q=sq, seq_k=sk, **sizes)
