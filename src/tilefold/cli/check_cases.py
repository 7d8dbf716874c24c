"""What `tilefold check` runs: attention calls that together go through every kernel, mask and modification."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CheckCase", "arguments", "check_cases"]

POINTERS, BOX, VARLEN = "attention_forward", "attention_forward_box", "attention_forward_varlen"


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One call. title: what is special about it. kernel: forced by a plan, or None for the one that the planner takes (VARLEN
    makes a packed call). lengths: (queries, keys) of each sequence; a dense call has equal ones. options: names of the tensor
    options to make ("alibi", "bias", "mask", "sinks"). cap: the softcap."""

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

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed along the first dimension."""
        return self.kernel == VARLEN


ONE = ((70, 70),)
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
)


def check_cases(quick: bool, gpu: bool) -> tuple[CheckCase, ...]:
    """The cases for this machine: a GPU gets lengths nine times as long (odd ones stay odd)."""
    chosen = tuple(case for case in _CASES if case.quick or not quick)
    if not gpu:
        return chosen
    return tuple(replace(case, lengths=tuple((9 * q, 9 * k) for q, k in case.lengths)) for case in chosen)


def arguments(
    case: CheckCase, device: str
) -> tuple[tuple["Tensor", "Tensor", "Tensor"], dict[str, Any], dict[str, Any]]:
    """q, k, v; the keyword arguments that say where packed sequences lie (none for a dense call); the other keyword arguments.

    Everything is drawn from a fixed seed on the CPU, so that all machines judge the same numbers.
    """
    import torch

    generator = torch.Generator().manual_seed(20260)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, kind: Any = dtype) -> "Tensor":
        return torch.randn(shape, generator=generator).to(kind).to(device)

    batch, longest = len(case.lengths), (max(q for q, _ in case.lengths), max(k for _, k in case.lengths))
    rows: list[tuple[int, ...]] = [(batch, n) for n in longest]
    packing: dict[str, Any] = {}
    if case.packed:
        rows = [(sum(q for q, _ in case.lengths),), (sum(k for _, k in case.lengths),)]
        for name, side in (("q", 0), ("k", 1)):
            ends = torch.tensor([0] + [lengths[side] for lengths in case.lengths]).cumsum(0)
            packing[f"cu_seqlens_{name}"] = ends.to(torch.int32).to(device)
        packing |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    q = normal(*rows[0], case.heads, case.dim_qk)
    k = normal(*rows[1], case.kv_heads, case.dim_qk)
    v = normal(*rows[1], case.kv_heads, case.dim_v)
    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.cap}
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
    return (q, k, v), packing, options
