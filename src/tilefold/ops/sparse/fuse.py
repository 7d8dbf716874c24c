"""Fuse two finished branches by their gates: check, launch, and the operator with its gradients."""

from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import ShapeError, Unsupported, ValueRangeError
from ..bound import Bound, Example, meta
from ..call import NARROW_HEAD_DIM
from ..device import interpreting
from ..operator import Operator
from ..records import recorded
from ..serve import function_at
from ..source import facts_of_values
from .project import readable

BRANCHES, GATES = ("coarse", "fine"), ("gate_coarse", "gate_fine")
TILE_ELEMENTS = 2048  # of each tensor that a program holds: 16 bytes a thread and load in 16 bits
Pair = tuple[torch.Tensor | None, torch.Tensor | None]

_DIMS = {"bshd": ("batch", "seq", "heads", "dim"), "bhsd": ("batch", "heads", "seq", "dim")}


FORWARD = ("Coarse", "Fine", "GateC", "GateF", "Out")
BACKWARD = ("Coarse", "Fine", "GateC", "GateF", "DOut", "DCoarse", "DFine", "DGateC", "DGateF")
"""What a call gives to the kernels."""


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
    if not 1 <= n["dim"] <= NARROW_HEAD_DIM:
        raise Unsupported(f"{first} has head dim {n['dim']}; accepted: 1 to {NARROW_HEAD_DIM}")
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
    bound, like = _prepare(branches, gates, out, layout), _like(branches)
    result = torch.empty(like.shape, dtype=like.dtype, device=like.device) if out is None else out
    if bound is not None:
        bound((*branches, *_readable(gates), result))
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


def _key(branches: Pair, gates: Pair, *others: Any) -> Any:
    return facts_of_values(*branches, *gates, *others)


@recorded("fuse", _key)
def _prepare(branches: Pair, gates: Pair, out: torch.Tensor | None, layout: str) -> Bound | None:
    shape, like = check(*branches, *gates, layout), _like(branches)
    own = function_at("fuse", like.device, layout)
    if out is not None:
        _check_out(out, like, shape, layout)
    strides = meta(*shape).stride() if out is None else out.stride()
    return own or _bind("fuse_forward", FORWARD, branches, gates, layout, shape, like, strides_o=strides[:3])


def _check_out(out: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...], layout: str) -> None:
    spec = TensorSpec("out", " ".join(_DIMS[layout]), (like.dtype,), contiguous_last=True)
    bind((spec,), {"out": out}, known=dict(zip(_DIMS[layout], shape, strict=True)), beside=("the branches", like))
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueRangeError(f"out has strides {out.stride()} for shape {shape}: several elements share one place")


def _bind(kernel: str, given: tuple[str, ...], branches: Pair, gates: Pair, layout: str, shape: tuple[int, ...],
          like: torch.Tensor, **strides: tuple[int, ...]) -> Bound | None:  # fmt: skip
    """The launch of a kernel; strides: of what it reads or writes beside branches and gates."""
    from ...plan.limits import MAX_GRID
    from ...plan.problem import padded_head_dim

    if 0 in shape:
        return None
    from ...kernels.sparse import gate as kernels

    width = padded_head_dim(shape[3])
    at_once = max(1, TILE_ELEMENTS // width)
    rows = shape[0] * shape[1] * shape[2]
    programs = -(-rows // at_once)
    if programs > MAX_GRID:
        raise ShapeError(f"{rows} rows of all heads are more than one launch can make")
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
    values = {"rows": rows, "d1": shape[1], "d2": shape[2], **strides}
    for name, t in zip("cf", branches, strict=True):
        values[f"strides_{name}"] = (0, 0, 0) if t is None else t.stride()[:3]
    for name, g in zip("cf", _readable(gates), strict=True):
        values[f"strides_g{name}"] = (0, 0, 0) if g is None else gate_strides(g, layout)
    return Bound.of(getattr(kernels, kernel), programs, given, values, constants, like.device)


def gradients(
    dout: torch.Tensor, branches: Pair, gates: Pair, layout: str, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Of coarse, fine, gate_coarse, gate_fine; None where not wanted.  A branch is read only for the gradient of its gate.

    A gate that is broadcast is summed by torch, from fp32 numbers of every row, or of every element if it has channels."""
    dout = readable(dout)
    bound = _prepare_backward(branches, gates, dout, layout, wanted)
    found: list[torch.Tensor | None] = [None] * 4
    for i in range(2):
        if wanted[i]:
            found[i] = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    for i, gate in enumerate(gates):
        if gate is not None and wanted[2 + i]:
            found[2 + i] = _room(gate, tuple(dout.shape), layout)
    if bound is not None:
        bound((*branches, *_readable(gates), dout, *found))
    for i, gate in enumerate(gates):
        if found[2 + i] is not None and gate is not None:
            found[2 + i] = _summed(found[2 + i], gate, layout)  # type: ignore[arg-type]
    return found


@recorded("fuse backward", _key)
def _prepare_backward(
    branches: Pair, gates: Pair, dout: torch.Tensor, layout: str, wanted: tuple[bool, ...]
) -> Bound | None:
    shape, own = tuple(dout.shape), function_at("fuse_backward", dout.device, layout)
    strides = {"strides_o": dout.stride()[:3], "strides_d": meta(*shape).stride()[:3]}
    return own or _bind("fuse_backward", BACKWARD, branches, gates, layout, shape, dout, **strides)


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


def _fuse_fake(coarse: Any, fine: Any, gate_coarse: Any, gate_fine: Any, layout: str) -> torch.Tensor:
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


def example_launch(backward: bool, dtype: str, dim: int, channels: bool) -> Example:
    """(kernel, args, kwargs) with both branches and gates a token, on tensors without memory, to compile ahead."""
    x, gate = meta(2, 4096, 4, dim, dtype=getattr(torch, dtype)), meta(2, 4096, 4, dim if channels else 1)
    shape, fresh = tuple(x.shape), x.stride()[:3]
    pairs = (x, x), (gate, gate)
    if backward:
        bound = _bind("fuse_backward", BACKWARD, *pairs, "bshd", shape, x, strides_o=fresh, strides_d=fresh)
        given: tuple[Any, ...] = (x, x, gate, gate, x, x, x, gate, gate)
    else:
        bound = _bind("fuse_forward", FORWARD, *pairs, "bshd", shape, x, strides_o=fresh)
        given = (x, x, gate, gate, x)
    assert bound is not None
    return bound.example(given)
