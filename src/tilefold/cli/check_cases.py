"""What `tilefold check` runs: attention calls that together go through every kernel, mask and modification."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold import BlockIndex

POINTERS, BOX, VARLEN = "attention_forward", "attention_forward_box", "attention_forward_varlen"
SPARSE, SPARSE_BOX = "sparse_forward", "sparse_forward_box"
SPARSE_VARLEN, SPARSE_PAGED = "sparse_forward_varlen", "sparse_forward_paged"


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One call. title: what is special about it. kernel: forced by a plan, or None for the one that the planner takes (VARLEN and
    SPARSE_VARLEN make a packed call, SPARSE_PAGED a paged one). lengths: (queries, keys) of each sequence; a dense call has equal
    ones, a paged one equal numbers of queries. options: names of the tensor options to make ("alibi", "bias", "mask", "sinks";
    "sizes": valid tokens per KV block). cap: the softcap. lists: "" for dense attention, "random", or "full", whose oracle is
    dense. blocks: tokens per query and KV block. page_size: keys per page. splits: of each list."""

    title: str
    kernel: str | None = None
    dtype: str = "float16"
    lengths: tuple[tuple[int, int], ...] = ((65, 65), (65, 65))
    heads: int = 2
    kv_heads: int = 2
    dim_qk: int = 64
    dim_v: int = 64
    causal: bool = False
    window: tuple[int, int] | None = None
    cap: float = 0.0
    options: tuple[str, ...] = ()
    quick: bool = False
    lists: str = ""
    blocks: tuple[int, int] = (16, 16)
    page_size: int = 16
    splits: int = 1

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed along the first dimension."""
        return self.kernel in (VARLEN, SPARSE_VARLEN)

    @property
    def function(self) -> str:
        """Which of tilefold's functions is called."""
        layout = "_varlen" if self.packed else "_paged" if self.kernel == SPARSE_PAGED else ""
        return f"{'sparse_' if self.lists else ''}attention{layout}"

    @property
    def oracle(self) -> str:
        """Which of the oracles judges it."""
        return self.function.removeprefix("sparse_") if self.lists == "full" else self.function


ONE = ((70, 70),)
GROWN = ((20, 70), (20, 0), (20, 33))
RAGGED = ((40, 40), (0, 5), (17, 33), (1, 64), (9, 0))

_CASES = (
    CheckCase("plain, pointers", POINTERS, quick=True),
    CheckCase("plain, descriptors", BOX, lengths=((64, 64),), quick=True),
    CheckCase("plain, packed", VARLEN, lengths=RAGGED, quick=True),
    CheckCase("causal, GQA group 7", lengths=ONE, heads=7, kv_heads=1, causal=True, quick=True),
    CheckCase("causal, descriptors", BOX, lengths=((96, 96),), causal=True),
    CheckCase("causal, packed", VARLEN, lengths=RAGGED, causal=True, heads=4, quick=True),
    CheckCase("causal, more queries than keys", lengths=((50, 33),), causal=True),
    CheckCase("one query, 28 heads on 4", lengths=((1, 130),), heads=28, kv_heads=4),
    CheckCase("window (16, 0)", lengths=ONE, window=(16, 0), quick=True),
    CheckCase("window (5, 9), packed", VARLEN, lengths=RAGGED, window=(5, 9)),
    CheckCase("softcap", lengths=ONE, cap=20.0),
    CheckCase("ALiBi", lengths=ONE, options=("alibi",)),
    CheckCase("bias and mask", lengths=ONE, options=("bias", "mask"), quick=True),
    CheckCase("sinks, causal", lengths=ONE, causal=True, options=("sinks",)),
    CheckCase(
        "all at once",
        lengths=((70, 90),),
        causal=True,
        cap=30.0,
        options=("alibi", "bias", "mask", "sinks"),
        quick=True,
    ),
    CheckCase("rows without a key", lengths=((20, 40),), options=("dead",), quick=True),
    CheckCase("bfloat16", dtype="bfloat16", lengths=ONE, causal=True, quick=True),
    CheckCase("bfloat16, packed", VARLEN, dtype="bfloat16", lengths=RAGGED),
    CheckCase("float32", dtype="float32", lengths=ONE, causal=True),
    CheckCase("head dim 1", lengths=ONE, dim_qk=1, dim_v=1),
    CheckCase("head dim 40, V 96", lengths=ONE, dim_qk=40, dim_v=96, quick=True),
    CheckCase("head dim 128", lengths=ONE, dim_qk=128, dim_v=128, heads=1, kv_heads=1),
    CheckCase("head dim 192, V 128", lengths=ONE, dim_qk=192, dim_v=128, heads=1, kv_heads=1),
    CheckCase("head dim 256", lengths=ONE, dim_qk=256, dim_v=256, heads=1, kv_heads=1, causal=True),
    CheckCase("no keys at all", lengths=((12, 0),)),
    CheckCase("full lists are dense", SPARSE, lists="full", quick=True),
    CheckCase("full lists, packed", SPARSE_VARLEN, lists="full", lengths=RAGGED, causal=True),
    CheckCase("random lists, GQA group 4", SPARSE, lists="random", lengths=ONE, heads=8, quick=True),
    CheckCase("random lists, descriptors", SPARSE_BOX, lists="random", lengths=((64, 64),)),
    CheckCase("random lists, split in 3", SPARSE, lists="random", lengths=((20, 90),), splits=3, quick=True),
    CheckCase("lists, causal, blocks 32 x 64", SPARSE, lists="random", lengths=ONE, blocks=(32, 64), causal=True),
    CheckCase("lists, valid tokens per block", SPARSE, lists="random", lengths=ONE, options=("sizes",), quick=True),
    CheckCase("lists, packed, causal", SPARSE_VARLEN, lists="random", lengths=RAGGED, causal=True, quick=True),
    CheckCase("lists, packed, bf16, split in 2", SPARSE_VARLEN, "bfloat16", lists="random", lengths=RAGGED, splits=2),
    CheckCase("lists, pages of 16, causal", SPARSE_PAGED, lists="random", lengths=GROWN, causal=True, quick=True),
    CheckCase(
        "lists, pages of 24, one query", SPARSE_PAGED, lists="random", lengths=((1, 90),), page_size=24, heads=14
    ),
    CheckCase(
        "lists, pages of 64, bf16", SPARSE_PAGED, "bfloat16", lists="random", lengths=GROWN, page_size=64, splits=2
    ),
)


def check_cases(quick: bool, gpu: bool) -> tuple[CheckCase, ...]:
    """The cases for this machine: a GPU gets lengths nine times as long (odd ones stay odd)."""
    chosen = tuple(case for case in _CASES if case.quick or not quick)
    if not gpu:
        return chosen
    return tuple(replace(case, lengths=tuple((9 * q, 9 * k) for q, k in case.lengths)) for case in chosen)


def arguments(case: CheckCase, device: str) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], dict[str, Any]]:
    """q, k, v; the arguments after them (index, where packed sequences or pages lie); the other keyword arguments.

    Everything is drawn from a fixed seed on the CPU, so that all machines judge the same numbers.
    """
    generator = torch.Generator().manual_seed(20260)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, kind: Any = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind).to(device)

    batch, longest = len(case.lengths), (max(q for q, _ in case.lengths), max(k for _, k in case.lengths))
    rows: list[tuple[int, ...]] = [(batch, n) for n in longest]
    where = _index(case, longest, generator, device) if case.lists else {}
    if case.packed:
        rows = [(sum(q for q, _ in case.lengths),), (sum(k for _, k in case.lengths),)]
        for name, side in (("q", 0), ("k", 1)):
            ends = torch.tensor([0] + [lengths[side] for lengths in case.lengths]).cumsum(0)
            where[f"cu_seqlens_{name}"] = ends.to(torch.int32).to(device)
        if not case.lists:
            where |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    if case.kernel == SPARSE_PAGED:
        pages = -(-longest[1] // case.page_size)
        rows[1] = (batch * pages, case.page_size)
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages)
        where["block_table"] = table.to(torch.int32).to(device)
        where["cache_seqlens"] = torch.tensor([k for _, k in case.lengths], dtype=torch.int32).to(device)
    q = normal(*rows[0], case.heads, case.dim_qk)
    k = normal(*rows[1], case.kv_heads, case.dim_qk)
    v = normal(*rows[1], case.kv_heads, case.dim_v)
    return (q, k, v), where, _options(case, longest, generator, normal, device)


def _index(case: CheckCase, longest: tuple[int, int], generator: Any, device: str) -> dict[str, Any]:
    """The lists of a sparse call, other ones for every sequence and head."""
    batch, blocks = len(case.lengths), [-(-n // block) for n, block in zip(longest, case.blocks, strict=True)]
    keep = torch.rand(batch, case.heads, *blocks, generator=generator) < (1.0 if case.lists == "full" else 0.5)
    sizes = None
    if "sizes" in case.options:
        sizes = torch.randint(0, case.blocks[1] + 1, (batch, blocks[1]), generator=generator).to(torch.int32).to(device)
    block_q, block_k = case.blocks
    index = BlockIndex.from_map(keep.to(device), block_q=block_q, block_k=block_k, seq_q=longest[0], seq_k=longest[1],
                                block_sizes=sizes)  # fmt: skip
    return {"index": index}


def _options(
    case: CheckCase, longest: tuple[int, int], generator: Any, normal: Callable[..., Tensor], device: str
) -> dict[str, Any]:
    batch = len(case.lengths)
    options: dict[str, Any] = {"causal": case.causal, "softcap": case.cap}
    if not case.lists:
        options["window"] = case.window
    if "alibi" in case.options:
        slopes = torch.tensor([2 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)])
        options["alibi_slopes"] = slopes.to(device)
    if "bias" in case.options:
        options["bias"] = normal(1, case.heads, *longest)
    if "mask" in case.options:
        options["mask"] = (torch.rand(batch, 1, *longest, generator=generator) < 0.7).to(device)
    if "dead" in case.options:
        keep = torch.arange(longest[0])[:, None] % 3 != 0
        options["mask"] = keep.expand(longest).reshape(1, 1, *longest).to(device)
    if "sinks" in case.options:
        options["sinks"] = normal(case.heads, kind=torch.float32)
    return options
