"""Merging two finished results over disjoint keys: check, launch; and the operator for torch's dispatcher."""

from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import Unsupported
from ..call import keyed
from ..device import device_of, interpreting
from ..records import remember
from ..watch import is_transformed, is_watched, refuse_tangents, wants_gradient
from .cache_append import LARGEST_DIM

__all__ = ["example_launch", "merge_attention", "merge_results"]

ELEMENTS = 2048  # of a program's tile

_CACHE: dict[Any, Any] = {}


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tilefold.merge_attention`."""
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    refuse_tangents(named)
    if torch.is_grad_enabled():
        for name, t in named.items():
            if wants_gradient((t,)):
                raise Unsupported(
                    f"{name} requires a gradient, but merge_attention passes none: call it under torch.no_grad()"
                )
    if torch.compiler.is_compiling() or is_transformed() or is_watched(named.values()):
        found: tuple[torch.Tensor, torch.Tensor] = merge_attention_op(out_a, lse_a, out_b, lse_b)
        return found
    return merge_results(out_a, lse_a, out_b, lse_b)


def merge_results(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The launch of `merge_attention`."""
    tensors = out_a, lse_a, out_b, lse_b
    key = keyed(tensors)
    found = None if key is None else _CACHE.get(key)
    if found is None:
        found = remember(_CACHE, key, _prepare(*tensors))
    launch, scalars = found
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    if launch is not None:
        launch((*tensors, out, lse, *scalars))
    return out, lse


def _sizes(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> dict[str, int]:
    packed = isinstance(out_a, torch.Tensor) and out_a.dim() == 3
    out, lse = ("seq heads dim", "heads seq") if packed else ("batch seq heads dim", "batch heads seq")
    specs = (
        TensorSpec("out_a", out, FLOATS, contiguous_last=True),
        TensorSpec("lse_a", lse, (torch.float32,)),
        TensorSpec("out_b", out, FLOATS, same_dtype_as="out_a", contiguous_last=True),
        TensorSpec("lse_b", lse, (torch.float32,)),
    )
    n = {"batch": 1} | bind(specs, {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})
    if not 1 <= n["dim"] <= LARGEST_DIM:
        raise Unsupported(f"out_a and out_b have head dim {n['dim']}; accepted: 1 to {LARGEST_DIM}")
    return n


def _prepare(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[Any, tuple[int, ...]]:
    from ...kernels.merge import merge_results as kernel
    from ..launch import Launch

    n = _sizes(out_a, lse_a, out_b, lse_b)
    if out_a.device.type != "meta":
        device_of(out_a.device)
    total = n["batch"] * n["seq"] * n["heads"]
    if total == 0:
        return None, ()
    if total >= 1 << 30:
        raise Unsupported(f"out_a has shape {tuple(out_a.shape)}: {total} rows, accepted: below 2^30")
    width = 1 << (n["dim"] - 1).bit_length()
    rows = max(1, min(1 << (total - 1).bit_length(), ELEMENTS // width))
    constants = {
        "EMULATE": interpreting() and out_a.dtype == torch.bfloat16,
        "DIM": n["dim"],
        "BLOCK_M": rows,
        "BLOCK_D": width,
    }

    def strides(t: torch.Tensor, own: int) -> tuple[int, ...]:
        return (0, *t.stride()[: own - 1]) if out_a.dim() == 3 else t.stride()[:own]

    row = n["heads"] * n["dim"]
    scalars = (
        n["batch"], n["seq"], n["heads"], *strides(out_a, 3), *strides(out_b, 3), n["seq"] * row, row, n["dim"],
        *strides(lse_a, 3), *strides(lse_b, 3), n["heads"] * n["seq"], n["seq"], 1,
    )  # fmt: skip
    grid = (-(-total // rows), 1, 1)
    return Launch(kernel, grid, constants, {"num_warps": 4}, out_a.device.index or 0), scalars


@torch.library.custom_op("tilefold::merge_attention", mutates_args=())
def merge_attention_op(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attention` for those who trace or watch."""
    return merge_results(out_a, lse_a, out_b, lse_b)


@merge_attention_op.register_fake
def _(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _sizes(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), out_a.new_empty(lse_a.shape, dtype=torch.float32)


def example_launch(dtype: str, dim: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    out = torch.empty((64, 1, 32, dim), dtype=getattr(torch, dtype), device="meta")
    lse = torch.empty((64, 32, 1), dtype=torch.float32, device="meta")
    launch, scalars = _prepare(out, lse, out, lse)
    return launch.fn, (out, lse, out, lse, out, lse, *scalars), launch.keywords
