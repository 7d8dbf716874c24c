"""Fuse two finished branches by their gates: check, launch, and the operator with its gradients."""

from collections.abc import Sequence
from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import ShapeError, Unsupported, ValueRangeError
from ..bound import Bound, Example, Launched, meta
from ..call import NARROW_HEAD_DIM
from ..device import interpreting
from ..operator import Gradient, Operation
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


def forward(
    coarse: torch.Tensor | None, fine: torch.Tensor | None, gate_coarse: torch.Tensor | None, gate_fine: torch.Tensor | None,
    layout: str, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """gate_coarse * coarse + gate_fine * fine; out: where to write it, which may be a branch."""
    given = coarse, fine, gate_coarse, gate_fine, layout, out
    made: torch.Tensor = _run(_prepare(*given), *given)
    return made


def _run(
    found: Launched, coarse: Any, fine: Any, gate_coarse: Any, gate_fine: Any, layout: str, out: Any = None
) -> Any:
    like = fine if coarse is None else coarse
    result = torch.empty_like(like, memory_format=torch.contiguous_format) if out is None else out
    if found.bound is not None:
        found.bound((coarse, fine, *_readable((gate_coarse, gate_fine)), result))
    return result


def _readable(gates: Pair) -> Pair:
    """A gate's channels have to lie side by side, or be one."""
    a, b = (g if g is None or g.dim() < 4 or g.shape[3] == 1 or g.stride(3) == 1 else g.contiguous() for g in gates)
    return a, b


@recorded("fuse")
def _prepare(coarse: Any, fine: Any, gate_coarse: Any, gate_fine: Any, layout: str, out: Any = None) -> Launched:
    shape, like = check(coarse, fine, gate_coarse, gate_fine, layout), fine if coarse is None else coarse
    own = function_at("fuse", like.device, layout)
    if out is not None:
        _check_out(out, like, shape, layout)
    strides, pairs = (meta(*shape) if out is None else out).stride(), ((coarse, fine), (gate_coarse, gate_fine))
    bound = own or _bind("fuse_forward", FORWARD, *pairs, layout, shape, like, strides_o=strides[:3])
    return Launched(shape, bound, run=_run)


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
            found[i] = torch.empty_like(dout, memory_format=torch.contiguous_format)
    for i, gate in enumerate(gates):
        if gate is not None and wanted[2 + i]:
            found[2 + i] = _room(gate, tuple(dout.shape), layout)
    if bound is not None:
        bound((*branches, *_readable(gates), dout, *found))
    for i, gate in enumerate(gates):
        if found[2 + i] is not None and gate is not None:
            found[2 + i] = _summed(found[2 + i], gate, layout)  # type: ignore[arg-type]
    return found


@recorded("fuse backward", lambda branches, gates, *others: facts_of_values(*branches, *gates, *others))
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


def _fake(
    coarse: torch.Tensor | None, fine: torch.Tensor | None, gate_coarse: torch.Tensor | None, gate_fine: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:  # fmt: skip
    like: Any = fine if coarse is None else coarse
    return like.new_empty(check(coarse, fine, gate_coarse, gate_fine, layout))  # type: ignore[no-any-return]


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    coarse, fine, gate_coarse, gate_fine, layout = args
    branches = coarse if wanted[2] else None, fine if wanted[3] else None
    return gradients(grads[0], branches, (gate_coarse, gate_fine), layout, wanted)


def _kept(tensors: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    """A branch is read again only for the gradient of its gate."""
    branches = (t if wanted else None for t, wanted in zip(tensors[:2], needs[2:], strict=True))
    return *branches, *tensors[2:]


GRADIENT = Gradient((*BRANCHES, *GATES), _gradients, unread=(0,), kept=_kept)
FUSE = Operation("fuse", _prepare, _fake, GRADIENT)


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
