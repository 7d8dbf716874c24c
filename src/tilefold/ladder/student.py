"""A student's own kernel: a file that defines attention(q, k, v, causal=False); where it fails, the line of that file."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilefold.errors import DtypeError, ShapeError, ValueRangeError


class StudentError(Exception):
    """What went wrong in the student's file: `file:line: error`, and that line."""


def complaint(error: BaseException, path: Path) -> str:
    """The error in one line with the deepest line of the file that took part in it; of a SyntaxError the line that it names.

    Triton wraps what a kernel raises; the chain of causes is searched to its end."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    line: int | None = None
    for each in reversed(chain):
        line = line or _line_in(each, path)
    innermost = chain[-1] if not isinstance(error, SyntaxError) else error
    words = str(innermost).strip().splitlines()
    text = f"{type(innermost).__name__}: {words[-1].strip() if words else 'no message'}"
    if line is None:
        return f"{path.name}: {text}"
    source = path.read_text(encoding="utf-8").splitlines()
    return f"{path.name}:{line}: {text}\n    {source[line - 1].strip() if line <= len(source) else ''}"


def _line_in(error: BaseException, path: Path) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    found = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            found = frame.tb_lineno
        frame = frame.tb_next
    node, source = getattr(error, "node", None), getattr(error, "src", None)
    if (
        found is not None and node is not None and source is not None
    ):  # Triton's compiler: a line of the kernel's own source
        start = _line_of(source, path)
        return found if start is None else start + int(node.lineno) - 1
    return found


def _line_of(source: str, path: Path) -> int | None:
    """The line of the file where a kernel's source begins."""
    place = path.read_text(encoding="utf-8").find(source.strip())
    return None if place < 0 else path.read_text(encoding="utf-8")[:place].count("\n") + 1


def load(path: Path) -> Callable[..., Any]:
    """The file's `attention`.  ValueRangeError if there is no such file or function, StudentError if running it fails."""
    path = path.resolve()
    if not path.is_file():
        raise ValueRangeError(
            f"--new must be a Python file that defines attention(q, k, v, causal=False), got {str(path)!r}"
        )
    name = f"tilefold_student_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueRangeError(f"--new must be a Python file (.py), got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton finds a kernel's globals there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise StudentError(complaint(error, path)) from error
    function = getattr(module, "attention", None)
    if not callable(function):
        raise ValueRangeError(f"{path.name} defines no function attention(q, k, v, causal=False)")
    found: Callable[..., Any] = function
    return found


def called(
    function: Callable[..., Any], path: Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Its result, of q's shape and dtype: DtypeError or ShapeError otherwise, StudentError if it raises."""
    try:
        out = function(q, k, v, causal=causal)
        if q.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        raise StudentError(complaint(error, path.resolve())) from error
    if not isinstance(out, torch.Tensor) or out.dtype != q.dtype:
        given = out.dtype if isinstance(out, torch.Tensor) else type(out).__name__
        raise DtypeError(f"attention in {path.name} must return a tensor of q's dtype, {q.dtype}, got {given}")
    if out.shape != q.shape:
        raise ShapeError(f"attention in {path.name} must return q's shape {tuple(q.shape)}, got {tuple(out.shape)}")
    return out
