"""Rotary position embedding: check, allocate, launch; differentiable, as an operator of torch's dispatcher, and in place."""

from typing import Any, NamedTuple

import torch

from ...check import FLOATS, TensorSpec, bind, check_own_rows
from ...errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..bound import Bound, Example, Launched, meta, strides_named
from ..call import MAX_HEAD_DIM, check_integer
from ..dense.attention_parts import sequence_strides
from ..device import interpreting, on_host
from ..faults import Mode
from ..operator import Gradient, Operation
from ..places import check_offsets
from ..records import recorded
from ..serve import function_at
from ..source import Packed, facts_of_values
from ..watch import is_transformed, is_watched, refuse_gradients, resolved, wants_gradient

ELEMENTS = 2048  # of a program's tile, about: 16 bytes a thread and load with 4 warps
INDICES = (torch.int32, torch.int64)


GIVEN = ("X", "Out", "Cos", "Sin", "Offsets", "CuSeqlens", "offset")
"""What a call gives to the kernel; its offset may change from call to call."""


class Turn(NamedTuple):
    """All of a call but x; offset: where offsets is None; max_seqlen -1: not packed."""

    cos: torch.Tensor
    sin: torch.Tensor
    offsets: torch.Tensor | None
    offset: int
    step: int
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    interleaved: bool
    conjugate: bool
    inplace: bool = False


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    offsets: int | torch.Tensor = 0,
    step: int = 1,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """See `tilefold.apply_rotary`."""
    for name, flag in (("interleaved", interleaved), ("inplace", inplace), ("conjugate", conjugate)):
        if not isinstance(flag, bool):
            raise DtypeError(f"{name} must be a bool, got {flag!r}")
    for name, value in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(value, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
        raise DtypeError(f"cu_seqlens must be a torch.Tensor or None, got {type(cu_seqlens).__name__}")
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueRangeError(f"cu_seqlens and max_seqlen come together, got max_seqlen={max_seqlen!r}")
    if torch.is_grad_enabled():
        refuse_gradients((("cos", cos), ("sin", sin)), "x")
    table, offset = (offsets, 0) if isinstance(offsets, torch.Tensor) else (None, offsets)
    check_integer("offsets", offset)
    length = -1 if max_seqlen is None else max_seqlen
    call = Turn(cos, sin, table, offset, step, cu_seqlens, length, interleaved, conjugate, inplace)
    if not inplace:
        result: torch.Tensor = ROTARY(x, *call[:-1])
        return result
    if torch.compiler.is_compiling() or is_transformed() or is_watched((x, cos, sin, table, cu_seqlens)):
        return x.copy_(ROTARY(x, *call[:-1]))
    if torch.is_grad_enabled() and wants_gradient((x,)):
        turned: torch.Tensor = _InPlace.apply(x, call)  # type: ignore[no-untyped-call]
        return turned
    return _turn(_prepare(x, *call), x, x, call)


def _turn(found: Launched, x: torch.Tensor, out: torch.Tensor, call: Turn) -> torch.Tensor:
    """Launch from x into out, which may be x."""
    _check_offset(call, found.shape)
    if found.bound is not None:
        if call.cu_seqlens is not None and on_host(x):
            check_offsets("cu_seqlens", call.cu_seqlens.tolist(), x.shape[0])
        found.bound((x, out, call.cos, call.sin, call.offsets, call.cu_seqlens, call.offset))
    return out


def _run(found: Launched, x: torch.Tensor, *given: Any) -> torch.Tensor:
    call = Turn(*given)
    new = torch.empty_like if call.cu_seqlens is None else torch.zeros_like  # rows of no sequence have no program
    return _turn(found, x, new(x, memory_format=torch.contiguous_format), call)


def checked_offsets(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, mode: Mode) -> torch.Tensor:
    """The offsets of a packed call in range, as `check` asks for it."""
    from ..checked import checked_packed

    packed = Packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return checked_packed(x, None, packed, mode, "apply_rotary").cu_q


def angles_of(
    cos: torch.Tensor, sin: torch.Tensor, dim: int, beside: Any, names: tuple[str, str] = ("cos", "sin")
) -> tuple[int, int]:
    """(positions, pairs) of the tables, checked; dim: channels there are; names: what the caller calls the tables."""
    specs = tuple(
        TensorSpec(name, "seq_table pairs", FLOATS, same_dtype_as=same, contiguous_last=True)
        for name, same in zip(names, (None, names[0]), strict=True)
    )
    sizes = bind(specs, dict(zip(names, (cos, sin), strict=True)), beside=beside)
    if sizes["pairs"] < 1 or 2 * sizes["pairs"] > dim:
        raise ShapeError(
            f"{names[0]} has shape {tuple(cos.shape)}: it turns {2 * sizes['pairs']} channels, {beside[0]} has {dim}"
        )
    return sizes["seq_table"], sizes["pairs"]


def _sizes(x: torch.Tensor, call: Turn) -> dict[str, int]:
    """Everything that is wrong with a call but its offset; the sizes of its dimensions."""
    cos, sin, offsets, _, step, cu_seqlens, max_seqlen, *_ = call
    packed = cu_seqlens is not None
    form = "total heads dim" if packed else "batch seq heads dim"
    specs = (
        TensorSpec("x", form, FLOATS, contiguous_last=True),
        TensorSpec("cu_seqlens", "batch+1", (torch.int32,), optional=True, contiguous_last=True),
    )
    sizes = bind(specs, {"x": x, "cu_seqlens": cu_seqlens})
    if packed:
        if sizes["batch+1"] < 1:
            raise ShapeError("cu_seqlens is empty, expected [batch + 1] offsets")
        check_integer("max_seqlen", max_seqlen)
        if isinstance(max_seqlen, int) and max_seqlen < 0:
            raise ValueRangeError(f"max_seqlen must be at least 0, got {max_seqlen}")
        sizes |= {"batch": sizes["batch+1"] - 1, "seq": max_seqlen}
    if not 1 <= sizes["dim"] <= MAX_HEAD_DIM:
        raise Unsupported(f"x has head dim {sizes['dim']}; accepted: 1 to {MAX_HEAD_DIM}")
    spec = TensorSpec("offsets", "batch", INDICES, optional=True, contiguous_last=True)
    bind((spec,), {"offsets": offsets}, known=sizes, beside=("x", x))
    positions, pairs = angles_of(cos, sin, sizes["dim"], ("x", x))
    check_integer("step", step)
    return sizes | {"positions": positions, "pairs": pairs}


def _check_offset(call: Turn, n: dict[str, int]) -> None:
    """An offset that the host knows has to be in the table with all of its tokens."""
    offset, step = call.offset, call.step
    if call.offsets is not None:
        return
    if offset < 0:
        raise ValueRangeError(f"offsets must be at least 0, got {offset}")
    last = offset + step * (n["seq"] - 1)
    if n["seq"] > 0 and not 0 <= last < n["positions"]:
        raise ShapeError(
            f"cos has {n['positions']} positions, offsets={offset} with {n['seq']} tokens needs {last + 1}"
        )


def _key(x: torch.Tensor, *given: Any) -> Any:
    return facts_of_values(x, *given[:3], *given[4:])  # a new offset is no new call


@recorded("apply_rotary", _key)
def _prepare(x: torch.Tensor, *given: Any) -> Launched:
    call = Turn(*given)
    n, (cos, sin, *_), inplace = _sizes(x, call), call, call.inplace
    if inplace:
        check_own_rows("x", x)
    own = function_at("apply_rotary", x.device, call.step, n["seq"], call.interleaved, call.conjugate)
    if 0 in (n["batch"], n["seq"], n["heads"]) or x.numel() == 0:
        return Launched(n, run=_run)
    if own is not None:
        return Launched(n, own, run=_run)
    from ...kernels.cache.rotary import rotary

    width = 1 << (n["pairs"] - 1).bit_length()
    rest = n["dim"] - 2 * n["pairs"]
    rows = max(1, min(1 << (n["seq"] - 1).bit_length(), ELEMENTS // (2 * width)))
    constants = {
        "INTERLEAVED": call.interleaved,
        "CONJUGATE": call.conjugate,
        "COPY": not inplace and rest > 0,
        "EMULATE": interpreting() and x.dtype == torch.bfloat16,
        "DIM": n["dim"],
        "PAIRS": n["pairs"],
        "BLOCK_M": rows,
        "BLOCK_P": width,
        "BLOCK_R": 1 << max(0, rest - 1).bit_length(),
    }
    programs = -(-n["seq"] // rows) * n["heads"] * n["batch"]
    if programs >= 1 << 31:
        raise Unsupported(f"x has shape {tuple(x.shape)}: {programs} programs, a grid takes 2^31 - 1")
    values = {
        "seq": n["seq"],
        "seq_table": n["positions"],
        "heads": n["heads"],
        "step": call.step,
        **strides_named("x", sequence_strides(x, "bshd"), "bmh"),
        **strides_named("o", sequence_strides(x if inplace else tuple(x.shape), "bshd"), "bmh"),
        "stride_c": cos.stride(0),
        "stride_s": sin.stride(0),
    }
    return Launched(n, Bound.of(rotary, programs, GIVEN, values, constants, x.device), run=_run)


# ---------------------------------------------------------------- autograd and the dispatcher


def _fake(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offsets: torch.Tensor | None, offset: int, step: int,
    cu_seqlens: torch.Tensor | None, max_seqlen: int, interleaved: bool, conjugate: bool,
) -> torch.Tensor:  # fmt: skip
    call = Turn(cos, sin, offsets, offset, step, cu_seqlens, max_seqlen, interleaved, conjugate)
    _check_offset(call, _sizes(x, call))
    return x.new_empty(x.shape)


def _back(grad: torch.Tensor, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient turns the other way; given: all of a call but x."""
    *others, conjugate = given
    return grad if grad.stride(-1) == 1 else grad.contiguous(), *others, not conjugate


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: Any) -> tuple[torch.Tensor]:
    given = _back(grads[0], args[1:])
    return (_run(_prepare(*given), *given),)


GRADIENT = Gradient(("x",), _gradients, unread=(0,), kept=lambda tensors, _: (None, *tensors[1:]))
ROTARY = Operation("rotary", _prepare, _fake, GRADIENT)


class _InPlace(torch.autograd.Function):
    """The eager in-place call: x itself comes out, marked as changed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Turn) -> torch.Tensor:
        ctx.bare, tensors, _ = ROTARY.arguments.take((x, *call[:-1]))
        ctx.save_for_backward(None, *tensors[1:])
        ctx.mark_dirty(x)
        return _turn(_prepare(x, *call), x, x, call)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None
        _, *given = ROTARY.arguments.joined(ctx.bare, ctx.saved_tensors)
        return ROTARY(*_back(resolved(grads[0]), tuple(given))), None


# ---------------------------------------------------------------- without a GPU


def example_launch(dtype: str, dim: int, pairs: int, interleaved: bool, packed: bool = False) -> Example:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    kind = getattr(torch, dtype)
    x = meta(*((512, 16, dim) if packed else (2, 256, 16, dim)), dtype=kind)
    cos, offsets = meta(512, pairs, dtype=kind), meta(2, dtype=torch.int32)
    cu = meta(3, dtype=torch.int32) if packed else None
    call = Turn(cos, cos, offsets, 0, 1, cu, 256 if packed else -1, interleaved, False)
    p = _prepare(x, *call)
    assert p.bound is not None
    return p.bound.example((x, x, cos, cos, offsets, cu, 0))
