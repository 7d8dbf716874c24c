"""Fuse two finished branches by their gates: check, launch, and the operator with its gradients."""

from dataclasses import dataclass
from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import ShapeError, Unsupported, ValueRangeError
from .. import torch_cpu
from ..call import MAX_HEAD_DIM
from ..device import device_of, interpreting
from ..operator import Operator
from ..records import remember
from .project import facts, readable

__all__ = ["BRANCHES", "GATES", "check", "forward", "fuse_op", "gate_shapes"]

BRANCHES, GATES = ("coarse", "fine"), ("gate_coarse", "gate_fine")
TILE_ELEMENTS = 2048  # of each tensor that a program holds: 16 bytes a thread and load in 16 bits
Pair = tuple[torch.Tensor | None, torch.Tensor | None]

_DIMS = {"bshd": ("batch", "seq", "heads", "dim"), "bhsd": ("batch", "heads", "seq", "dim")}


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key; launch None: nothing to compute."""

    launch: Any
    tail: tuple[Any, ...] = ()


_CACHE: dict[Any, Prepared] = {}


def check(coarse: Any, fine: Any, gate_coarse: Any, gate_fine: Any, layout: str) -> tuple[int, ...]:
    """The shape of the result, after every check of the tensors."""
    branches = dict(zip(BRANCHES, (coarse, fine), strict=True))
    given = [name for name in BRANCHES if branches[name] is not None]
    if not given:
        raise ValueRangeError("coarse and fine are both None: one of the branches must be a tensor")
    names = _DIMS[layout]
    first, *others = given
    specs = [TensorSpec(first, " ".join(names), FLOATS, contiguous_last=True)]
    specs += [TensorSpec(name, " ".join(names), FLOATS, same_dtype_as=first, contiguous_last=True) for name in others]
    n = bind(specs, branches)
    if not 1 <= n["dim"] <= MAX_HEAD_DIM:
        raise Unsupported(f"{first} has head dim {n['dim']}; accepted: 1 to {MAX_HEAD_DIM}")
    rows = [f"{name}|1" for name in names[:3]]
    forms = " / ".join(("heads", " ".join(names[:3]), " ".join([*rows, "dim|1"])))
    for branch, name, gate in zip(BRANCHES, GATES, (gate_coarse, gate_fine), strict=True):
        if gate is not None and branches[branch] is None:
            raise ValueRangeError(f"{name} was given without the branch that it multiplies: {branch} is None")
        bind((TensorSpec(name, forms, FLOATS, optional=True),), {name: gate}, known=n, beside=(first, branches[first]))
    return tuple(n[name] for name in names)


def gate_shapes(gate: torch.Tensor, layout: str) -> tuple[int, ...]:
    """A gate [heads], [batch, seq, heads] or [.., .., .., dim or 1] as four dimensions, 1 where it is broadcast."""
    if gate.dim() == 1:
        return (1, 1, gate.shape[0], 1) if layout == "bshd" else (1, gate.shape[0], 1, 1)
    return tuple(gate.shape) if gate.dim() == 4 else (*gate.shape, 1)


def gate_strides(gate: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """Of the first three dimensions of the result, 0 where the gate is broadcast."""
    if gate.dim() == 1:
        one = gate.stride(0)
        return (0, 0, one) if layout == "bshd" else (0, one, 0)
    a, b, c = (0 if n == 1 else s for n, s in zip(gate.shape[:3], gate.stride()[:3], strict=True))
    return a, b, c


def forward(branches: Pair, gates: Pair, layout: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """gate_coarse * coarse + gate_fine * fine; out: where to write it, which may be a branch."""
    key = *map(facts, (*branches, *gates, out)), layout
    found = _CACHE.get(key)
    if found is None:
        prepared = _bind(branches, gates, layout, out)
        found = _keep(key, prepared, _like(branches).device)
    p, like = found, _like(branches)
    result = torch.empty(like.shape, dtype=like.dtype, device=like.device) if out is None else out
    if p.launch is not None:
        p.launch((*branches, *_readable(gates), result, *p.tail))
    return result


def _like(branches: Pair) -> torch.Tensor:
    """A branch that there is."""
    like = branches[0] if branches[0] is not None else branches[1]
    assert like is not None
    return like


def _readable(gates: Pair) -> Pair:
    """A gate's channels have to lie side by side, or be one."""
    a, b = (g if g is None or g.dim() < 4 or g.shape[3] == 1 or g.stride(3) == 1 else g.contiguous() for g in gates)
    return a, b


def _keep(key: Any, prepared: Prepared, device: torch.device) -> Prepared:
    device_of(device, "fuse")  # refuses one where nothing serves it
    return remember(_CACHE, key, prepared)


def _bind(branches: Pair, gates: Pair, layout: str, out: torch.Tensor | None) -> Prepared:
    shape = check(*branches, *gates, layout)
    like = _like(branches)
    if out is not None:
        _check_out(out, like, shape, layout)
    strides = torch.empty(shape, device="meta").stride() if out is None else out.stride()
    return _launch("fuse_forward", branches, gates, layout, shape, like, (strides[:3],))


def _check_out(out: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...], layout: str) -> None:
    spec = TensorSpec("out", " ".join(_DIMS[layout]), (like.dtype,), contiguous_last=True)
    bind((spec,), {"out": out}, known=dict(zip(_DIMS[layout], shape, strict=True)), beside=("the branches", like))
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueRangeError(f"out has strides {out.stride()} for shape {shape}: several elements share one place")


def _launch(name: str, branches: Pair, gates: Pair, layout: str, shape: tuple[int, ...], like: torch.Tensor,
            more: tuple[tuple[int, ...], ...]) -> Prepared:  # fmt: skip
    """name: of the kernel.  more: strides of what comes after those of branches and gates."""
    from ...plan.limits import MAX_GRID
    from ...plan.problem import padded_head_dim

    if 0 in shape:
        return Prepared(None)
    if like.device.type != "meta" and device_of(like.device, "fuse").backend == "cpu":
        return Prepared(_on_cpu(name, layout))
    from ...kernels import gate as kernels
    from ..launch import Launch

    width = padded_head_dim(shape[3])
    at_once = max(1, TILE_ELEMENTS // width)
    rows = shape[0] * shape[1] * shape[2]
    programs = -(-rows // at_once)
    if programs > MAX_GRID:
        raise ShapeError(f"{rows} rows of all heads are more than one launch can make")
    read = _readable(gates)
    constants = {
        **{
            f"CHANNELS_{side}": g is not None and g.dim() == 4 and g.shape[3] > 1
            for side, g in zip("CF", gates, strict=True)
        },
        "EMULATE": interpreting() and torch.bfloat16 in [t.dtype for t in (like, *gates) if t is not None],
        "DIM": shape[3],
        "ROWS": at_once,
        "BLOCK_D": width,
    }
    strides = (
        *((0, 0, 0) if t is None else tuple(t.stride()[:3]) for t in branches),
        *((0, 0, 0) if g is None else gate_strides(g, layout) for g in read),
        *more,
    )
    launch = Launch(getattr(kernels, name), (programs, 1, 1), constants, {"num_warps": 4}, like.device.index or 0)
    return Prepared(launch, (rows, shape[1], shape[2], *strides))


def _on_cpu(name: str, layout: str) -> Any:
    """What a launch of this kernel does, in torch."""

    def launch(given: tuple[Any, ...]) -> None:
        gates = tuple(g if g is None else g.reshape(gate_shapes(g, layout)) for g in given[2:4])
        if name == "fuse_forward":
            torch_cpu.served("fuse")(given[:2], gates, given[4])
        else:
            torch_cpu.served("fuse_backward")(given[:2], gates, given[4], list(given[5:9]))

    return launch


def gradients(
    dout: torch.Tensor, branches: Pair, gates: Pair, layout: str, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Of coarse, fine, gate_coarse, gate_fine; None where not wanted.  A branch is read only for the gradient of its gate.

    A gate that is broadcast is summed by torch, from fp32 numbers of every row, or of every element if it has channels."""
    dout = readable(dout)
    key = "backward", *map(facts, (dout, *branches, *gates)), layout, wanted
    p = _CACHE.get(key) or _keep(key, _bind_backward(dout, branches, gates, layout), dout.device)
    found: list[torch.Tensor | None] = [None] * 4
    for i in range(2):
        if wanted[i]:
            found[i] = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    for i, gate in enumerate(gates):
        if gate is not None and wanted[2 + i]:
            found[2 + i] = _room(gate, tuple(dout.shape), layout)
    if p.launch is not None:
        p.launch((*branches, *_readable(gates), dout, *found, *p.tail))
    for i, gate in enumerate(gates):
        if found[2 + i] is not None and gate is not None:
            found[2 + i] = _summed(found[2 + i], gate, layout)  # type: ignore[arg-type]
    return found


def _bind_backward(dout: torch.Tensor, branches: Pair, gates: Pair, layout: str) -> Prepared:
    shape = tuple(dout.shape)
    fresh = torch.empty(shape, device="meta").stride()
    return _launch("fuse_backward", branches, gates, layout, shape, dout, (dout.stride()[:3], fresh[:3]))


def _room(gate: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """What the kernel writes of a gate's gradient: itself where nothing is broadcast, else fp32 to be summed."""
    full = (*shape[:3], shape[3] if gate_shapes(gate, layout)[3] > 1 else 1)
    dtype = gate.dtype if gate_shapes(gate, layout) == full else torch.float32
    return torch.empty(full, dtype=dtype, device=gate.device)


def _summed(parts: torch.Tensor, gate: torch.Tensor, layout: str) -> torch.Tensor:
    dims = [i for i, (a, b) in enumerate(zip(gate_shapes(gate, layout), parts.shape, strict=True)) if a != b]
    total = parts.sum(dims) if dims else parts
    return total.view(gate.shape).to(gate.dtype)


# ---------------------------------------------------------------- the operator


def _fuse(
    coarse: torch.Tensor | None, fine: torch.Tensor | None, gate_coarse: torch.Tensor | None, gate_fine: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:  # fmt: skip
    """gate_coarse * coarse + gate_fine * fine."""
    return forward((coarse, fine), (gate_coarse, gate_fine), layout)


def _fuse_fake(
    coarse: torch.Tensor | None, fine: torch.Tensor | None, gate_coarse: torch.Tensor | None, gate_fine: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:  # fmt: skip
    shape = check(coarse, fine, gate_coarse, gate_fine, layout)
    return _like((coarse, fine)).new_empty(shape)


def _gradient(
    dout: torch.Tensor, coarse: torch.Tensor | None, fine: torch.Tensor | None, gate_coarse: torch.Tensor | None,
    gate_fine: torch.Tensor | None, layout: str, want_coarse: bool, want_fine: bool, want_gate_coarse: bool, want_gate_fine: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of coarse, fine, gate_coarse, gate_fine; empty where not wanted."""
    wanted = want_coarse, want_fine, want_gate_coarse, want_gate_fine
    found = gradients(dout, (coarse, fine), (gate_coarse, gate_fine), layout, wanted)
    a, b, c, d = (dout.new_empty(0) if g is None else g for g in found)
    return a, b, c, d


def _gradient_fake(dout: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    like, wanted = (dout, dout, *args[2:4]), args[5:]
    a, b, c, d = (dout.new_empty(0) if not w else t.new_empty(t.shape) for t, w in zip(like, wanted, strict=True))
    return a, b, c, d


def _keep_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.layout = inputs
    # A branch is read again only for the gradient of its gate.
    branches = (t if wanted else None for t, wanted in zip(tensors, ctx.needs_input_grad[2:4], strict=False))
    ctx.save_for_backward(*branches, *tensors[2:])
    ctx.set_materialize_grads(False)


def _arguments(ctx: Any, dout: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if dout is None else (dout, *ctx.saved_tensors, ctx.layout, *ctx.needs_input_grad[:4])


def _give(ctx: Any, results: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return *(g if want else None for g, want in zip(results, ctx.needs_input_grad, strict=False)), None


fuse_op = Operator("fuse", _fuse, _fuse_fake, _gradient, _gradient_fake, _keep_context, _arguments, _give)


# ---------------------------------------------------------------- without a GPU


def example_launch(backward: bool, dtype: str, dim: int, channels: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) with both branches and gates a token, on tensors without memory, to compile ahead."""

    def meta(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    x = meta(2, 4096, 4, dim, kind=getattr(torch, dtype))
    gate = meta(2, 4096, 4, dim if channels else 1, kind=torch.float32)
    pairs = (x, x), (gate, gate)
    if backward:
        p = _bind_backward(x, *pairs, "bshd")
        return p.launch.fn, (x, x, gate, gate, x, x, x, gate, gate, *p.tail), p.launch.keywords
    p = _bind(*pairs, "bshd", None)
    return p.launch.fn, (x, x, gate, gate, x, *p.tail), p.launch.keywords
