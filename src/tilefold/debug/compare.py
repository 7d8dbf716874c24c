"""Judge one output of a watched kernel: what nobody wrote, and the first element that is wrong, with its writer."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilefold.check import check_number
from tilefold.debug.guard import Guarded, place_of
from tilefold.debug.report import Fault
from tilefold.debug.trace import Trace, as_ids, at_index
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.reference import compare, deviating
from tilefold.reference.tolerance import errors


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Absolute and relative limits for each element; None in both is the library's rule."""

    atol: float | None
    rtol: float | None

    @classmethod
    def of(cls, atol: float | None, rtol: float | None) -> "Tolerance":
        """Checked; ValueRangeError for a negative one. One that is missing is 0 where the other is given."""
        if atol is None and rtol is None:
            return cls(None, None)
        return cls(*(check_number(name, value or 0.0, low=0.0) for name, value in (("atol", atol), ("rtol", rtol))))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an output should be.

    exact: fp64, or integers; plain: one standard deviation of rounding off, None where limits are given."""

    exact: torch.Tensor
    plain: torch.Tensor | None


def references(
    reference: Callable[..., Any], bound: Mapping[str, Any], outputs: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> dict[str, Wanted | None]:
    """Call the reference with fp64 copies of the arguments that it names and, for the library's tolerance, again with errors as
    rounding to the tensors' dtypes makes them."""
    exact = _called(reference, bound, outputs, torch.float64)
    plain: dict[str, torch.Tensor | None] = dict.fromkeys(outputs)
    if tolerance.atol is None and any(
        outputs[name].is_floating_point() and one is not None for name, one in exact.items()
    ):
        tensors = [t for t in (*bound.values(), *outputs.values()) if isinstance(t, torch.Tensor)]
        floats = {
            t.dtype for t in tensors if t.is_floating_point() and t.element_size() > 1
        }  # torch computes in no float8
        dtype = max(floats or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
        plain = deviating(lambda: _called(reference, bound, outputs, torch.float64), dtype, kept=dtype)
    return {name: None if one is None else Wanted(one, plain[name]) for name, one in exact.items()}


def _called(
    reference: Callable[..., Any], bound: Mapping[str, Any], outputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    """The reference's results by output, on the CPU; its errors pass through."""
    parameters = inspect.signature(reference).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = [name for name, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    for name in named:
        if name not in bound and parameters[name].default is inspect.Parameter.empty:
            raise ValueRangeError(
                f"reference takes {name!r}, which is no argument of the kernel; those are {', '.join(bound)}"
            )
    chosen = {name: _taken(value, dtype) for name, value in bound.items() if everything or name in named}
    result = reference(**chosen)
    if isinstance(result, torch.Tensor) or result is None:
        result = (result,)
    if isinstance(result, Mapping):
        for name in result:
            if name not in outputs:
                raise ValueRangeError(f"reference returned {name!r}, but the outputs are {', '.join(outputs)}")
        return {name: _result(name, result.get(name), out) for name, out in outputs.items()}
    if not isinstance(result, tuple) or len(result) != len(outputs):
        what = f"{len(result)} of them" if isinstance(result, tuple) else type(result).__name__
        raise ShapeError(
            f"reference must return one tensor for each of {len(outputs)} outputs ({', '.join(outputs)}), got {what}"
        )
    return {name: _result(name, one, out) for (name, out), one in zip(outputs.items(), result, strict=True)}


def _taken(value: Any, dtype: torch.dtype) -> Any:
    """An argument for the reference: a copy on the CPU, floating point in dtype."""
    if isinstance(value, tuple):
        parts = [_taken(part, dtype) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach().cpu().clone()
    return own.to(dtype) if own.is_floating_point() else own


def _result(name: str, one: Any, output: torch.Tensor) -> torch.Tensor | None:
    if one is None:
        return None
    if not isinstance(one, torch.Tensor):
        raise DtypeError(f"reference must return tensors, got {type(one).__name__} for {name}")
    if one.shape != output.shape:
        raise ShapeError(
            f"reference returned shape {tuple(one.shape)} for {name}, which has shape {tuple(output.shape)}"
        )
    return one.detach().cpu()


def judge(
    copy: Guarded, wanted: Wanted | None, tolerance: Tolerance, trace: Trace, in_place: bool
) -> tuple[list[Fault], str]:
    """Unwritten elements of an output that has a reference, and its first wrong element among those that were written; and in
    words how near it came (empty without a reference)."""
    if wanted is None:
        return [], ""
    here = np.full(copy.view.numel(), -1, np.int64)  # offset in memory by flat index
    filled = np.flatnonzero(copy.element >= 0)
    here[copy.element[filled]] = filled
    writer = copy.writer[here]
    missing = (writer < 0) & (not in_place)
    faults = [_unwritten(copy, here, missing, trace)] if missing.any() else []
    wrong, words = _wrong(copy.view, wanted, tolerance, torch.from_numpy(missing))
    if wrong.any():
        faults.append(_mismatch(copy, wanted, int(np.argmax(wrong)), here, int(wrong.sum()), words, trace))
    return faults, words


def _wrong(
    view: torch.Tensor, wanted: Wanted, tolerance: Tolerance, missing: torch.Tensor
) -> tuple[np.ndarray[Any, Any], str]:
    """Which elements (flat) are wrong, unwritten ones left out, and the comparison in words."""
    got, exact = view.detach().clone().flatten(), wanted.exact.flatten()
    if tolerance.atol is None and not got.is_floating_point():
        wrong = got != exact.to(got.dtype) if not exact.is_floating_point() else got.double() != exact.double()
        wrong &= ~missing
        return wrong.numpy(), f"ok: {got.numel()} equal" if not wrong.any() else "WRONG: not equal"
    e = exact.double()
    g = torch.where(missing, e, got.double())  # what is missing is reported by itself
    error = (g - e).abs()
    same = (g == e) | (g.isnan() & e.isnan())
    if tolerance.atol is not None:
        limit = tolerance.atol + (tolerance.rtol or 0.0) * e.abs()
        wrong = ~same & ~((error <= limit) & e.isfinite() & g.isfinite())
        largest = float(torch.where(same, 0.0, error).nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0
        verdict = "WRONG" if wrong.any() else "ok"
        return wrong.numpy(), f"{verdict}: max error {largest:.3e} (atol {tolerance.atol:g}, rtol {tolerance.rtol:g})"
    assert wanted.plain is not None
    near = g.to(got.dtype)
    comparison = compare(near, e, wanted.plain.flatten())
    if comparison.ok:
        return np.zeros(got.numel(), bool), str(comparison)
    off, *_, limit = errors(near, e, wanted.plain.flatten())
    wrong = ~same & ~((off <= limit) & near.isfinite())
    if not wrong.any():  # all elements are near enough, their sum is not: the worst one stands for it
        wrong[int(torch.where(same, 0.0, error).argmax())] = True
    return wrong.numpy(), str(comparison)


def _mismatch(copy: Guarded, wanted: Wanted, flat: int, here: Any, count: int, words: str, trace: Trace) -> Fault:
    index = place_of(flat, copy.shape)
    writer = int(copy.writer[here[flat]])
    program = trace.ids(writer) if writer >= 0 else None
    by = f"program {as_ids(program)} wrote it" if program is not None else "no program wrote it"
    got, want = copy.view.flatten()[flat].item(), wanted.exact.flatten()[flat].item()
    many = f"{count} of {copy.view.numel()} elements differ ({words})"
    text = f"{copy.name}{at_index(index)} is {got!r}, wanted {want!r}; {by}; {many}"
    return Fault("mismatch", copy.name, index, program, count, text)


def _unwritten(copy: Guarded, here: Any, missing: Any, trace: Trace) -> Fault:
    """The first element that nobody wrote: who had it masked off, else who wrote the one before it."""
    flat = int(np.argmax(missing))
    index = place_of(flat, copy.shape)
    count = int(missing.sum())
    text = f"no program wrote {copy.name}{at_index(index)} ({count} of {copy.view.numel()} elements are missing); "
    skipped = int(copy.skipped[here[flat]])
    before = np.flatnonzero(~missing[:flat])
    program = None
    if skipped >= 0:
        program = trace.ids(skipped)
        text += f"program {as_ids(program)} addressed it with the mask off"
    elif before.size:
        last = int(before[-1])
        end = place_of(last, copy.shape)
        program = trace.ids(int(copy.writer[here[last]]))
        text += f"none addressed it, and the last one written before it is {at_index(end)} by program {as_ids(program)}"
    else:
        text += "none addressed it"
    return Fault("unwritten", copy.name, index, program, count, text)
