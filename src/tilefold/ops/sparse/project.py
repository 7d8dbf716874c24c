"""Rows for blocks: weighted sums over the valid tokens of each block, the map back, and their gradients."""

from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import ShapeError, Unsupported, ValueRangeError
from ..bound import Bound, Example, Launched, meta, strides_named
from ..call import NARROW_HEAD_DIM, check_integer
from ..dense.attention_parts import head_strides
from ..device import interpreting
from ..operator import Gradient, Operation
from ..records import recorded
from ..serve import function_at

MEAN, WEIGHTED, SUM = KINDS = (0, 1, 2)
SMALLEST_BLOCK = 16

SIZES = "{1} / batch|1 {1} / batch|1 {0}|1 {1}"
NAMES = "x weight block_sizes"  # what the caller calls them
_DIMS = {"bshd": "batch seq heads dim", "bhsd": "batch heads seq dim"}


def check_block(block: object) -> None:
    """A power of two of at least 16 tokens; raises DtypeError or ValueRangeError."""
    check_integer("block", block)
    if isinstance(block, int) and (block < SMALLEST_BLOCK or block & (block - 1)):
        raise ValueRangeError(f"block must be a power of two and at least {SMALLEST_BLOCK} tokens, got {block}")


def check_layout(layout: object) -> None:
    if layout not in ("bshd", "bhsd"):
        raise ValueRangeError(f"layout must be 'bshd' or 'bhsd', got {layout!r}")


def size_strides(sizes: torch.Tensor | None) -> tuple[int, int]:
    """(batch, head) strides of sizes [N], [B or 1, N] or [B or 1, H or 1, N], 0 where shared."""
    if sizes is None:
        return 0, 0
    strides = (0,) * (3 - sizes.dim()) + sizes.stride()
    shape = (1,) * (3 - sizes.dim()) + tuple(sizes.shape)
    if sizes.dim() == 2:  # [batch, blocks]: never per head
        strides, shape = (sizes.stride(0), 0, 0), (sizes.shape[0], 1, 0)
    return (0 if shape[0] == 1 else strides[0]), (0 if shape[1] == 1 else strides[1])


def _check(x: torch.Tensor, weight: torch.Tensor | None, sizes: torch.Tensor | None, block: int, layout: str, names: str = NAMES,
           length: int | None = None) -> dict[str, int]:  # fmt: skip
    """Sizes of the named dimensions of a projection of x (length: x are its rows, this is the length of the sequence)."""
    name, of_weight, of_sizes = names.split()
    dims = _DIMS[layout] if length is None else _DIMS[layout].replace("seq", "blocks")
    known = {} if length is None else {"blocks": -(-length // block), "seq": length}
    found = bind((TensorSpec(name, dims, FLOATS, contiguous_last=True),), {name: x}, known=known)
    if not 1 <= found["dim"] <= NARROW_HEAD_DIM:
        raise Unsupported(f"{name} has head dim {found['dim']}; accepted: 1 to {NARROW_HEAD_DIM}")
    found |= {"block": block, "blocks": -(-found["seq"] // block)}
    specs = (
        TensorSpec(of_weight, "block / heads|1 block", FLOATS, contiguous_last=True, optional=True),
        TensorSpec(of_sizes, SIZES.format("heads", "blocks"), (torch.int32,), contiguous_last=True, optional=True),
    )
    return bind(specs, {of_weight: weight, of_sizes: sizes}, known=found, beside=(name, x))


def _result_shape(n: dict[str, int], rows: str, layout: str) -> tuple[int, ...]:
    middle = (n[rows], n["heads"]) if layout == "bshd" else (n["heads"], n[rows])
    return (n["batch"], *middle, n["dim"])


# ---------------------------------------------------------------- the three kernels


def gather(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    sizes: torch.Tensor | None,
    block: int,
    kind: int,
    layout: str,
    names: str,
) -> torch.Tensor:
    """Rows [B, blocks, H, D] of x [B, seq, H, D] (or both with H before): see kernels.project."""
    p = _bind_gather(x, weight, sizes, block, kind, layout, names)
    rows = torch.empty(p.shape, dtype=x.dtype, device=x.device)
    if p.bound is not None:
        p.bound((x, weight, sizes, rows))
    return rows


def spread(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    sizes: torch.Tensor | None,
    length: int,
    block: int,
    kind: int,
    layout: str,
) -> torch.Tensor:
    """x [B, length, H, D] of rows [B, blocks, H, D]: the transpose of gather."""
    p = _bind_spread(rows, weight, sizes, length, block, kind, layout)
    x = torch.empty(p.shape, dtype=rows.dtype, device=rows.device)
    if p.bound is not None:
        p.bound((rows, weight, sizes, x))
    return x


def weight_gradient(
    x: torch.Tensor, drows: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor | None, block: int, layout: str
) -> torch.Tensor:
    """Gradient of a learned weight [block] or [heads or 1, block], in its dtype: the sum of what each block adds."""
    p = _bind_weight(x, drows, weight, sizes, block, layout)
    if p.bound is None:
        return torch.zeros_like(weight)
    part = torch.empty(p.shape, dtype=torch.float32, device=x.device)
    p.bound((x, drows, sizes, part))
    total = part.sum((0, 1))  # [H, block]
    if weight.shape[:-1] != total.shape[:1]:
        total = total.sum(0).expand_as(weight)
    return total.to(weight.dtype, copy=True)


@recorded("project: gather")
def _bind_gather(x: Any, weight: Any, sizes: Any, block: int, kind: int, layout: str, names: str) -> Launched:
    n = _check(x, weight, sizes, block, layout, names)
    shape = _result_shape(n, "blocks", layout)
    given = ("X", "Weight", "Sizes", "Rows")
    return Launched(
        shape, _bind("gather_blocks", given, n, x, meta(*shape, dtype=x.dtype), weight, sizes, layout, KIND=kind)
    )


@recorded("project: spread")
def _bind_spread(rows: Any, weight: Any, sizes: Any, length: int, block: int, kind: int, layout: str) -> Launched:
    n = _check(rows, weight, sizes, block, layout, "rows weight block_sizes", length)
    shape = _result_shape(n, "seq", layout)
    given = ("Rows", "Weight", "Sizes", "X")
    return Launched(
        shape, _bind("spread_blocks", given, n, meta(*shape, dtype=rows.dtype), rows, weight, sizes, layout, KIND=kind)
    )


@recorded("project: weight gradient")
def _bind_weight(x: Any, drows: Any, weight: Any, sizes: Any, block: int, layout: str) -> Launched:
    n = _check(x, weight, sizes, block, layout)
    shape = (n["batch"], n["blocks"], n["heads"], block)
    given = ("X", "DRows", "Sizes", "Part")
    return Launched(shape, _bind("block_weight_gradient", given, n, x, drows, weight, sizes, layout))


def _bind(name: str, given: tuple[str, ...], n: dict[str, int], x: torch.Tensor, rows: torch.Tensor, weight: Any, sizes: Any,
          layout: Any, **constants: Any) -> Bound | None:  # fmt: skip
    """The launch of a kernel between tokens x and the rows of their blocks; one of the two may be without memory."""
    from ...plan.limits import MAX_GRID
    from ...plan.problem import padded_head_dim
    from ...plan.sparse.coarse import rows_at_once

    device = x.device if rows.is_meta else rows.device
    own = function_at(name, device, layout, n["block"], *constants.values())
    programs = n["heads"] * n["blocks"] * n["batch"]
    if programs == 0:
        return None
    if programs > MAX_GRID:
        raise ShapeError(f"{programs} blocks of all heads are more than the {MAX_GRID} that one launch can make")
    if own is not None:
        return own  # type: ignore[no-any-return]
    from ...kernels.sparse import project as kernels

    width = padded_head_dim(n["dim"])
    rows_read, warps = rows_at_once(n["block"], width, name == "gather_blocks")
    constants |= {
        "EMULATE": interpreting() and x.dtype == torch.bfloat16,
        "DIM": n["dim"],
        "BLOCK": n["block"],
        "ROWS": rows_read,
        "BLOCK_D": width,
    }
    values = {
        **n,
        **strides_named("x", head_strides(x, layout), "bnh"),
        **strides_named("r", head_strides(rows, layout), "bnh"),
        "stride_wh": 0 if weight is None or weight.dim() == 1 or weight.shape[0] == 1 else weight.stride(0),
        **strides_named("s", size_strides(sizes), "bh"),
    }
    return Bound.of(getattr(kernels, name), programs, given, values, constants, device, num_warps=warps)


# ---------------------------------------------------------------- the operators


def readable(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as the kernels read it: after sum() it has every element at one address, also an empty one."""
    if gradient.shape[-1] == 1 or gradient.stride(-1) == 1:
        return gradient
    return (
        gradient.contiguous()
        if gradient.numel()
        else torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    )


def _project_fake(
    x: torch.Tensor, weight: Any, sizes: Any, block: int, kind: int, layout: str, names: str
) -> torch.Tensor:
    return x.new_empty(_result_shape(_check(x, weight, sizes, block, layout, names), "blocks", layout))


def _project_gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    x, weight, sizes, block, kind, layout, _ = args
    drows = readable(grads[0])
    length = x.shape[1 if layout == "bshd" else 2]
    dx = spread(drows, weight, sizes, length, block, kind, layout) if wanted[0] else None
    return dx, weight_gradient(x, drows, weight, sizes, block, layout) if weight is not None and wanted[1] else None


def _spread(rows: torch.Tensor, sizes: torch.Tensor | None, length: int, block: int, layout: str) -> torch.Tensor:
    """Every valid token of a block gets its row, the others 0."""
    return spread(rows, None, sizes, length, block, SUM, layout)


def _spread_fake(rows: torch.Tensor, sizes: torch.Tensor | None, length: int, block: int, layout: str) -> torch.Tensor:
    n = _check(rows, None, sizes, block, layout, "rows weight block_sizes", length)
    return rows.new_empty(_result_shape(n, "seq", layout))


def _spread_gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    """The sum over each block's valid tokens."""
    _, sizes, _, block, layout = args
    return (gather(readable(grads[0]), None, sizes, block, SUM, layout, NAMES),)


PROJECT = Operation("project_blocks", gather, _project_fake, Gradient(("x", "weight"), _project_gradients, unread=(0,)))
"""Rows of the blocks of x; kind: MEAN, WEIGHTED or SUM; names: of x, weight and sizes, for errors."""
SPREAD = Operation("spread_blocks", _spread, _spread_fake, Gradient(("rows",), _spread_gradients, unread=(0,)))


# ---------------------------------------------------------------- without a GPU


def example_launch(part: str, dtype: str, dim: int, sized: bool = False) -> Example:
    """(kernel, args, kwargs) of "gather", "spread" or "weight" with a learned weight, on tensors without memory, to compile."""
    stored = getattr(torch, dtype)
    x, rows = meta(2, 4096, 4, dim, dtype=stored), meta(2, 64, 4, dim, dtype=stored)
    weight, sizes = meta(4, 64), meta(64, dtype=torch.int32) if sized else None
    if part == "gather":
        p, given = _bind_gather(x, weight, sizes, 64, WEIGHTED, "bshd", NAMES), (x, weight, sizes, rows)
    elif part == "spread":
        p, given = _bind_spread(rows, weight, sizes, 4096, 64, WEIGHTED, "bshd"), (rows, weight, sizes, x)
    else:
        p = _bind_weight(x, rows, weight, sizes, 64, "bshd")
        given = (x, rows, sizes, meta(*p.shape))
    assert p.bound is not None
    return p.bound.example(given)
