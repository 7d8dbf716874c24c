"""Rows for blocks: weighted sums over the valid tokens of each block, the map back, and their gradients."""

from dataclasses import dataclass
from typing import Any, cast

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import ShapeError, Unsupported, ValueRangeError
from .. import torch_cpu
from ..call import MAX_HEAD_DIM, check_integer, facts_of
from ..dense.attention_parts import head_strides
from ..device import device_of, interpreting
from ..operator import Operator
from ..records import remember

__all__ = [
    "KINDS",
    "NAMES",
    "SIZES",
    "check_block",
    "check_layout",
    "facts",
    "gather",
    "project_op",
    "size_strides",
    "spread",
    "spread_op",
]

MEAN, WEIGHTED, SUM = KINDS = (0, 1, 2)
SMALLEST_BLOCK = 16

SIZES = "{1} / batch|1 {1} / batch|1 {0}|1 {1}"
NAMES = "x weight block_sizes"  # what the caller calls them
_DIMS = {"bshd": "batch seq heads dim", "bhsd": "batch heads seq dim"}


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key; launch None: nothing to compute."""

    shape: tuple[int, ...]
    launch: Any = None
    tail: tuple[Any, ...] = ()


_CACHE: dict[Any, Prepared] = {}


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
    if not 1 <= found["dim"] <= MAX_HEAD_DIM:
        raise Unsupported(f"{name} has head dim {found['dim']}; accepted: 1 to {MAX_HEAD_DIM}")
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
    names: str = NAMES,
) -> torch.Tensor:
    """Rows [B, blocks, H, D] of x [B, seq, H, D] (or both with H before): see kernels.project."""
    key = "gather", *map(facts, (x, weight, sizes)), block, kind, layout
    p = _CACHE.get(key) or _keep(key, _bind_gather(x, weight, sizes, block, kind, layout, names), x.device)
    rows = torch.empty(p.shape, dtype=x.dtype, device=x.device)
    if p.launch is not None:
        p.launch((x, weight, sizes, rows, *p.tail))
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
    key = "spread", *map(facts, (rows, weight, sizes)), length, block, kind, layout
    p = _CACHE.get(key) or _keep(key, _bind_spread(rows, weight, sizes, length, block, kind, layout), rows.device)
    x = torch.empty(p.shape, dtype=rows.dtype, device=rows.device)
    if p.launch is not None:
        p.launch((rows, weight, sizes, x, *p.tail))
    return x


def weight_gradient(
    x: torch.Tensor, drows: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor | None, block: int, layout: str
) -> torch.Tensor:
    """Gradient of a learned weight [block] or [heads or 1, block], in its dtype: the sum of what each block adds."""
    key = "weight", *map(facts, (x, drows, weight, sizes)), block, layout
    p = _CACHE.get(key) or _keep(key, _bind_weight(x, drows, weight, sizes, block, layout), x.device)
    if p.launch is None:
        return torch.zeros_like(weight)
    part = torch.empty(p.shape, dtype=torch.float32, device=x.device)
    p.launch((x, drows, sizes, part, *p.tail))
    total = part.sum((0, 1))  # [H, block]
    if weight.shape[:-1] != total.shape[:1]:
        total = total.sum(0).expand_as(weight)
    return total.to(weight.dtype, copy=True)


def facts(t: Any) -> Any:
    """What of a tensor decides checks and launch; of what is no tensor its type, which the checks refuse."""
    return facts_of(t) if isinstance(t, torch.Tensor) else type(t)


def _keep(key: Any, prepared: Prepared, device: torch.device) -> Prepared:
    device_of(device, "gather_blocks")  # refuses one where nothing serves it
    return remember(_CACHE, key, prepared)


def _bind_gather(x: Any, weight: Any, sizes: Any, block: int, kind: int, layout: str, names: str) -> Prepared:
    n = _check(x, weight, sizes, block, layout, names)
    shape = _result_shape(n, "blocks", layout)
    strides = (*head_strides(x, layout), *_fresh(shape, layout), _head_stride(weight))  # type: ignore[arg-type]
    return _bind("gather_blocks", n, shape, x, strides, sizes, layout, {"KIND": kind})


def _bind_spread(rows: Any, weight: Any, sizes: Any, length: int, block: int, kind: int, layout: str) -> Prepared:
    n = _check(rows, weight, sizes, block, layout, "rows weight block_sizes", length)
    shape = _result_shape(n, "seq", layout)
    strides = (*head_strides(rows, layout), *_fresh(shape, layout), _head_stride(weight))  # type: ignore[arg-type]
    return _bind("spread_blocks", n, shape, rows, strides, sizes, layout, {"KIND": kind})


def _bind_weight(x: Any, drows: Any, weight: Any, sizes: Any, block: int, layout: str) -> Prepared:
    n = _check(x, weight, sizes, block, layout)
    shape = (n["batch"], n["blocks"], n["heads"], block)
    strides = (*head_strides(x, layout), *head_strides(drows, layout))  # type: ignore[arg-type]
    return _bind("block_weight_gradient", n, shape, x, strides, sizes, layout, {})


def _bind(name: str, n: dict[str, int], shape: tuple[int, ...], like: torch.Tensor, strides: tuple[int, ...], sizes: Any,
          layout: str, constants: dict[str, Any]) -> Prepared:  # fmt: skip
    """name: of the kernel."""
    from ...plan.coarse import rows_at_once
    from ...plan.limits import MAX_GRID
    from ...plan.problem import padded_head_dim

    programs = n["heads"] * n["blocks"] * n["batch"]
    if programs == 0:
        return Prepared(shape)
    if programs > MAX_GRID:
        raise ShapeError(f"{programs} blocks of all heads are more than the {MAX_GRID} that one launch can make")
    if like.device.type != "meta" and device_of(like.device, name).backend == "cpu":
        return Prepared(shape, _on_cpu(name, layout, n["block"], constants))
    from ...kernels import project as kernels
    from ..launch import Launch

    width = padded_head_dim(n["dim"])
    constants |= {
        "EMULATE": interpreting() and like.dtype == torch.bfloat16,
        "DIM": n["dim"],
        "BLOCK": n["block"],
        "ROWS": rows_at_once(n["block"], width),
        "BLOCK_D": width,
    }
    launch = Launch(getattr(kernels, name), (programs, 1, 1), constants, {"num_warps": 4}, like.device.index or 0)
    return Prepared(shape, launch, (n["seq"], n["heads"], n["blocks"], *strides, *size_strides(sizes)))


def _on_cpu(name: str, layout: str, block: int, constants: dict[str, Any]) -> Any:
    """What a launch of this kernel does, in torch: of heads first, but for the parts of a weight's gradient."""
    run = torch_cpu.served(name)

    def launch(given: tuple[Any, ...]) -> None:
        run(
            *(t if t is None or t.dim() < 4 else torch_cpu.heads_first(t, layout) for t in given[:2]),
            *given[2:3],
            given[3] if name == "block_weight_gradient" else torch_cpu.heads_first(given[3], layout),
            block,
            *constants.values(),
        )

    return launch


def _fresh(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return head_strides(torch.empty(shape, device="meta"), layout)  # type: ignore[arg-type]


def _head_stride(weight: torch.Tensor | None) -> int:
    return 0 if weight is None or weight.dim() == 1 or weight.shape[0] == 1 else weight.stride(0)


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


def _project(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    sizes: torch.Tensor | None,
    block: int,
    kind: int,
    layout: str,
    names: str,
) -> torch.Tensor:
    """Rows of the blocks of x; kind: MEAN, WEIGHTED or SUM; names: of x, weight and sizes, for errors."""
    return gather(x, weight, sizes, block, kind, layout, names)


def _project_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    sizes: torch.Tensor | None,
    block: int,
    kind: int,
    layout: str,
    names: str,
) -> torch.Tensor:
    return x.new_empty(_result_shape(_check(x, weight, sizes, block, layout, names), "blocks", layout))


def _project_gradient(
    drows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, sizes: torch.Tensor | None, block: int, kind: int,
    layout: str, want_x: bool, want_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dweight), empty where not wanted."""
    drows = readable(drows)
    length = x.shape[1 if layout == "bshd" else 2]
    dx = spread(drows, weight, sizes, length, block, kind, layout) if want_x else x.new_empty(0)
    if weight is None or not want_weight:
        return dx, x.new_empty(0)
    return dx, weight_gradient(x, drows, weight, sizes, block, layout)


def _project_gradient_fake(drows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, sizes: torch.Tensor | None,
                           block: int, kind: int, layout: str, want_x: bool, want_weight: bool,
                           ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dx = x.new_empty(x.shape if want_x else 0)
    return dx, (x.new_empty(0) if weight is None or not want_weight else weight.new_empty(weight.shape))


def _project_keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, sizes, *rest = inputs
    ctx.rest = rest[:3]
    ctx.save_for_backward(x, weight, sizes)
    ctx.set_materialize_grads(False)


def _project_arguments(ctx: Any, drows: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if drows is None else (drows, *ctx.saved_tensors, *ctx.rest, *ctx.needs_input_grad[:2])


def _project_give(ctx: Any, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    return *(g if want else None for g, want in zip(results, ctx.needs_input_grad, strict=False)), *(None,) * 5


def _spread(rows: torch.Tensor, sizes: torch.Tensor | None, length: int, block: int, layout: str) -> torch.Tensor:
    """Every valid token of a block gets its row, the others 0."""
    return spread(rows, None, sizes, length, block, SUM, layout)


def _spread_fake(rows: torch.Tensor, sizes: torch.Tensor | None, length: int, block: int, layout: str) -> torch.Tensor:
    return rows.new_empty(
        _result_shape(_check(rows, None, sizes, block, layout, "rows weight block_sizes", length), "seq", layout)
    )


def _spread_gradient(dx: torch.Tensor, sizes: torch.Tensor | None, block: int, layout: str) -> torch.Tensor:
    """The sum over each block's valid tokens."""
    return gather(readable(dx), None, sizes, block, SUM, layout)


def _spread_gradient_fake(dx: torch.Tensor, sizes: torch.Tensor | None, block: int, layout: str) -> torch.Tensor:
    return _project_fake(dx, None, sizes, block, SUM, layout, NAMES)


def _spread_keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, sizes, _, *ctx.rest = inputs
    ctx.save_for_backward(sizes)
    ctx.set_materialize_grads(False)


def _spread_arguments(ctx: Any, dx: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if dx is None else (dx, *ctx.saved_tensors, *ctx.rest)


def _spread_give(ctx: Any, drows: torch.Tensor) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", (drows, None, None, None, None))


project_op = Operator("project_blocks", _project, _project_fake, _project_gradient, _project_gradient_fake, _project_keep,
                      _project_arguments, _project_give)  # fmt: skip
spread_op = Operator("spread_blocks", _spread, _spread_fake, _spread_gradient, _spread_gradient_fake, _spread_keep,
                     _spread_arguments, _spread_give)  # fmt: skip


# ---------------------------------------------------------------- without a GPU


def example_launch(part: str, dtype: str, dim: int, sized: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of "gather", "spread" or "weight" with a learned weight, on tensors without memory, to compile."""

    def meta(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    stored = getattr(torch, dtype)
    x, rows, weight = (
        meta(2, 4096, 4, dim, kind=stored),
        meta(2, 64, 4, dim, kind=stored),
        meta(4, 64, kind=torch.float32),
    )
    sizes = meta(64, kind=torch.int32) if sized else None
    if part == "gather":
        p = _bind_gather(x, weight, sizes, 64, WEIGHTED, "bshd", NAMES)
        args: tuple[Any, ...] = (x, weight, sizes, rows)
    elif part == "spread":
        p = _bind_spread(rows, weight, sizes, 4096, 64, WEIGHTED, "bshd")
        args = (rows, weight, sizes, x)
    else:
        p = _bind_weight(x, rows, weight, sizes, 64, "bshd")
        args = (x, rows, sizes, meta(*p.shape, kind=torch.float32))
    return p.launch.fn, (*args, *p.tail), p.launch.keywords
