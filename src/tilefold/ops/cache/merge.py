"""Merging two finished results over disjoint keys: check, launch; and the operator for torch's dispatcher.

`merge_into` is the same kernel for results that are made of many: it writes where the caller says, in place if that is the
first result, and each of the three has a dtype of its own: the sum can be fp32, and its last merge what was asked for."""

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import Unsupported
from ..bound import Bound, Example, Launched, meta
from ..device import interpreting
from ..operator import Operation
from ..records import recorded
from ..serve import function_at
from ..watch import refuse_at_once
from .cache_append import LARGEST_DIM

ELEMENTS = 2048  # of a program's tile
MOST_ROWS = 1 << 30


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tilefold.merge_attention`."""
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    refuse_at_once(named, "merge_attention passes none: call it under torch.no_grad()")
    return MERGE_ATTENTION(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]


def _run(found: Launched, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[:2])
    if found.bound is not None:
        found.bound((*tensors, out, lse))
    return out, lse


def merge_into(*tensors: torch.Tensor) -> None:
    """Write the merge of a and b to out and lse, which may be a's own, in one pass.

    tensors: out_a, lse_a, out_b, lse_b, out, lse: [batch, seq, heads, dim] of any dtypes and strides with a contiguous last
    dimension, lse [batch, heads, seq].  Where no kernel runs (`_served`), in torch's operations."""
    _, lse_a, _, lse_b, out, lse = tensors
    if not _served(out, lse_a, lse_b, lse):
        _merge_plainly(*tensors)
    elif (bound := _bind(*tensors)) is not None:
        bound(tensors)


def _served(out: torch.Tensor, *sums: torch.Tensor) -> bool:
    """Does the kernel serve this?  On a GPU or in the interpreter, lse in fp32, and nothing too large for its indices."""
    return (
        (out.device.type == "cuda" or interpreting())
        and all(lse.dtype == torch.float32 for lse in sums)
        and out.shape[-1] <= LARGEST_DIM
        and sums[0].numel() < MOST_ROWS
    )


def _merge_plainly(*tensors: torch.Tensor) -> None:
    """`merge_into` in torch: in fp64 where lse is fp64, otherwise in fp32."""
    out_a, lse_a, out_b, lse_b, out, lse = tensors
    first, second = lse_a.to(lse.dtype), lse_b.to(lse.dtype)
    total = torch.logaddexp(first, second)
    base = total.masked_fill(total == float("-inf"), 0.0)  # dead in both: both weights are exp(-inf - 0)
    old, new = (torch.exp(part - base).transpose(1, 2)[..., None] for part in (first, second))
    out.copy_(out_a * old + out_b * new)
    lse.copy_(total)


def _sizes(*tensors: torch.Tensor) -> dict[str, int]:
    out_a = tensors[0]
    packed = isinstance(out_a, torch.Tensor) and out_a.dim() == 3
    out, lse = ("seq heads dim", "heads seq") if packed else ("batch seq heads dim", "batch heads seq")
    specs = (
        TensorSpec("out_a", out, FLOATS, contiguous_last=True),
        TensorSpec("lse_a", lse, (torch.float32,)),
        TensorSpec("out_b", out, FLOATS, same_dtype_as="out_a", contiguous_last=True),
        TensorSpec("lse_b", lse, (torch.float32,)),
    )
    n = {"batch": 1} | bind(specs, dict(zip(("out_a", "lse_a", "out_b", "lse_b"), tensors, strict=True)))
    if not 1 <= n["dim"] <= LARGEST_DIM:
        raise Unsupported(f"out_a and out_b have head dim {n['dim']}; accepted: 1 to {LARGEST_DIM}")
    return n


@recorded("merge_attention")
def _prepare(*tensors: torch.Tensor) -> Launched:
    n, (out_a, lse_a, *_) = _sizes(*tensors), tensors
    if (own := function_at("merge_attention", out_a.device)) is not None:
        return Launched(None, own, run=_run)
    total = n["batch"] * n["seq"] * n["heads"]
    if total >= MOST_ROWS:
        raise Unsupported(f"out_a has shape {tuple(out_a.shape)}: {total} rows, accepted: below 2^30")
    return Launched(None, _bind(*tensors, meta(*out_a.shape, dtype=out_a.dtype), meta(*lse_a.shape)), run=_run)


@recorded("merge_into")
def _bind(*tensors: torch.Tensor) -> Bound | None:
    """The launch, None if there is nothing to do."""
    from ...kernels.cache.merge import merge_results as kernel

    out_a, lse_a, out_b, lse_b, out, lse = tensors
    if out.numel() == 0:
        return None
    sizes = (1, *out.shape) if out.dim() == 3 else tuple(out.shape)
    total, dim = sizes[0] * sizes[1] * sizes[2], sizes[3]
    width = 1 << (dim - 1).bit_length()
    rows = max(1, min(1 << (total - 1).bit_length(), ELEMENTS // width))
    emulate = interpreting() and out.dtype == torch.bfloat16
    constants = {"EMULATE": emulate, "DIM": dim, "BLOCK_M": rows, "BLOCK_D": width}

    def strides(t: torch.Tensor) -> tuple[int, ...]:
        return (0, *t.stride()[:2]) if out.dim() == 3 else t.stride()[:3]

    numbers = (*sizes[:3], *(s for t in (out_a, out_b, out, lse_a, lse_b, lse) for s in strides(t)))
    return Bound.of(kernel, -(-total // rows), 6, numbers, constants, out_a.device)


def _fake(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _sizes(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), out_a.new_empty(lse_a.shape, dtype=torch.float32)


MERGE_ATTENTION = Operation("merge_attention", _prepare, _fake, "merge_attention passes no gradients")


def example_launch(dtype: str, dim: int, first: str | None = None, to: str | None = None) -> Example:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time.  first, to: dtypes of the first
    result and of the merge, if not that of the second."""
    a, b, out = (meta(64, 1, 32, dim, dtype=getattr(torch, name or dtype)) for name in (first, dtype, to))
    lse = meta(64, 32, 1)
    tensors = a, lse, b, lse, out, lse
    bound = _bind(*tensors)
    assert bound is not None
    return bound.example(tensors)
