"""What is called inside kernels: conditions on the program, printing and stopping.

Each is one function for both ways of running a kernel. Triton's compiler calls what is marked as a builtin while it compiles and
hands over its `_semantic`; in the interpreter a kernel is Python, and the call arrives without one.
"""

import pdb
import sys
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

from tilefold.debug.conditions import parse_condition
from tilefold.errors import DtypeError, ShapeError, Unsupported

F = TypeVar("F")
COMPARE = {"=": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}
LAUNCH = interpreter.GridExecutor.__call__.__code__
FP8 = {  # Triton's names
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def _builtin(function: F) -> F:
    """Mark as callable by the compiler. Triton's own decorator refuses calls without `_semantic`, the interpreter's way."""
    setattr(function, tl.core.TRITON_BUILTIN, True)
    return function


@_builtin
def when(condition: Any, _semantic: Any = None) -> Any:
    """Whether this program is meant: `if when("0,>1"):` inside a kernel, compiled or interpreted; a scalar of int1.

    condition: a string that `parse_condition` reads, known at compile time. Raises DtypeError or ValueRangeError for one that
    cannot be read (the compiler words it as a CompilationError with the line), Unsupported outside of a kernel."""
    parsed = parse_condition(_plain(condition))
    semantic = _semantic_of("when", _semantic)
    result = None
    for part in parsed.parts:
        one = tl.program_id(part.axis, _semantic=semantic)
        one = getattr(one, COMPARE[part.relation])(part.value, _semantic=semantic)
        result = one if result is None else result.__and__(one, _semantic=semantic)
    return semantic.to_tensor(True) if result is None else result


@_builtin
def print_if(condition: Any, *values: Any, _semantic: Any = None, **named: Any) -> None:
    """Print values where a condition holds.

    condition: a string for `when`, or a scalar that is true or false. values, named: tensors of the kernel or numbers. In the
    interpreter each is printed with the program id, its name (the keyword, else the variable that holds it), shape and dtype, and
    as numpy prints it. Compiled, it is `tl.device_print` under the condition, one call a value and in its format; names are
    keywords there, values without one are called by their place. Raises DtypeError or ShapeError for another condition."""
    semantic = _semantic_of("print_if", _semantic)
    if _semantic is not None:
        _print_compiled(condition, values, named, semantic)
    elif _holds("print_if", condition):
        frame = sys._getframe(1)
        own = [(_name_of(frame, value, place), value) for place, value in enumerate(values)]
        lines = [f"program {program()}", *(f"{name}{_described(value)}" for name, value in (*own, *named.items()))]
        print("\n".join(lines).replace("\n", "\n  "))


@_builtin
def breakpoint_if(condition: Any, _semantic: Any = None) -> None:
    """Enter pdb in the kernel's frame where a condition (as of `print_if`) holds; its variables print as numpy arrays.

    In the interpreter only: a compiled kernel has no frame, and is refused with Unsupported while it compiles."""
    if _semantic is not None:
        raise Unsupported(
            "breakpoint_if works in Triton's interpreter only and this kernel is being compiled; start Python with "
            "TRITON_INTERPRET=1, or use print_if"
        )
    _semantic_of("breakpoint_if", None)
    if _holds("breakpoint_if", condition):
        frame = sys._getframe(1)
        print(f"program {program()} stops in {frame.f_code.co_name}, line {frame.f_lineno}")
        pdb.Pdb().set_trace(frame)


def program() -> tuple[int, ...]:
    """Ids of the program that the interpreter runs, on three axes."""
    ids: tuple[int, ...] = interpreter.interpreter_builder.grid_idx
    return ids


def _semantic_of(name: str, given: Any) -> Any:
    """What makes operations: the compiler's, or the interpreter's if it is running a kernel; Unsupported if neither."""
    if given is not None:
        return given
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is LAUNCH:
            return interpreter.interpreter_semantic
        frame = frame.f_back
    raise Unsupported(f"{name} asks which program is running and is called inside kernels only")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _holds(name: str, condition: Any) -> bool:
    """The truth of a condition in the interpreter."""
    given = _plain(condition)
    if isinstance(given, str):
        return parse_condition(given).holds(program())
    if isinstance(given, bool):
        return given
    _check_scalar(name, given, compiled=False)
    return bool(given.handle.data.item())


def _check_scalar(name: str, given: Any, compiled: bool) -> None:
    """DtypeError for a condition that is no tensor of the kernel, ShapeError for a tile."""
    if not isinstance(given, tl.tensor):
        raise DtypeError(
            f"{name}: condition must be a string like '0,>1', a bool or a scalar of the kernel, got {given!r} of type "
            f"{type(given).__name__}"
        )
    if given.type.is_block() if compiled else given.handle.data.size != 1:
        raise ShapeError(
            f"{name}: condition is a tile of shape {_sizes(given)}, a scalar is needed: reduce it, as in "
            "tl.max(tile.to(tl.int32), axis=None) > 0"
        )


def _sizes(given: Any) -> list[int]:
    return [int(_plain(size)) for size in given.shape]


def _name_of(frame: FrameType, value: Any, place: int) -> str:
    """The variable that holds a tensor; other values may be held by several, and constants by none, and are numbered."""
    if isinstance(value, tl.tensor):
        for name, held in frame.f_locals.items():
            if held is value:
                return name
    return f"value {place}"


def _described(value: Any) -> str:
    """` [2, 4] fp32 = [[...]]`: shape, Triton's dtype and the elements, bfloat16 and float8 as numbers, not as bits."""
    given = _plain(value)
    if not isinstance(given, tl.tensor):
        return f" = {given!r}"
    data = numbers(given)
    shape = f" {_sizes(given)}" if given.type.is_block() else ""
    text = str(data.reshape(-1)[0] if not shape else data)
    return f"{shape} {given.dtype} = " + (f"\n{text}" if "\n" in text else text)


def numbers(value: Any) -> np.ndarray[Any, Any]:
    """The elements of an interpreter's tensor; its bfloat16 and float8 are kept as bits, which are widened to fp32 here."""
    data: np.ndarray[Any, Any] = value.handle.data
    dtype = value.dtype
    if dtype.is_ptr():
        return data
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype.name in FP8:
        widened: np.ndarray[Any, Any] = torch.from_numpy(data.copy()).view(FP8[dtype.name]).float().numpy()
        return widened
    return data


def _print_compiled(condition: Any, values: tuple[Any, ...], named: dict[str, Any], semantic: Any) -> None:
    """`if condition: tl.device_print(...)` as the compiler would build it from that source."""
    given = _plain(condition)
    if isinstance(given, str):
        given = when(given, _semantic=semantic)
    if isinstance(given, bool):
        given = semantic.to_tensor(given)
    _check_scalar("print_if", given, compiled=True)
    given = given.to(tl.int1, _semantic=semantic)
    builder = semantic.builder
    block = builder.create_if_op([], given.handle, False).get_then_block()
    after = builder.get_insertion_point()
    builder.set_insertion_point_to_start(block)
    for name, value in (*((f"value {place}", value) for place, value in enumerate(values)), *named.items()):
        tl.device_print(name, value, _semantic=semantic)
    builder.restore_insertion_point(after)


def interpreting() -> bool:
    """Whether kernels decorated now run in the interpreter."""
    return bool(knobs.runtime.interpret)
