"""Run a kernel under watch and compare what it wrote with a reference."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.runtime import interpreter
from triton.runtime.autotuner import Heuristics
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from tilefold.debug.compare import Tolerance, judge, references
from tilefold.debug.guard import Guarded
from tilefold.debug.report import Fault, KernelReport
from tilefold.debug.tensors import check_outputs, check_tensors, tensor_names
from tilefold.debug.trace import Trace
from tilefold.errors import DtypeError, Unsupported, ValueRangeError

__all__ = ["CheckedKernel", "check_kernel", "checked"]

ORDER = ("raised", "store", "load", "input", "race", "guard", "unwritten", "mismatch")
LAUNCH_OPTIONS = (
    "num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid", "enable_fp_fusion",
)  # fmt: skip
Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]
"""Programs along each axis, or a function of the launch's arguments that gives them."""


def check_kernel(
    kernel: Any,
    grid: Grid,
    args: Mapping[str, Any] | Sequence[Any],
    reference: Callable[..., Any],
    outputs: Sequence[str],
    *,
    in_place: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
) -> KernelReport:
    """Run a kernel in the interpreter on guarded copies of its tensors, and report what it did wrong; args stay as they are.

    kernel: a @triton.jit function made under TRITON_INTERPRET=1 (also under @triton.heuristics; of an autotuned one pass `.fn`).
    grid: as in a launch. args: its arguments by name, or in order; tensors on any device, also in tuples, where they are called
    `name[0]`. outputs: names of the tensors that it writes; they start as poison (NaN, or a pattern of bytes), but those also
    named in in_place, which start with their values. Each tensor is copied with its strides and with poison around it and between
    its rows; tensors that overlap may be read, but not written.

    reference: what is right, in torch: called with those arguments that its parameters name, it returns a tensor (one output), a
    tuple in the order of outputs, or a mapping by name; None for an output is not compared (scratch memory). With atol or rtol
    (the other is 0) an element is right if |got - wanted| <= atol + rtol * |wanted|. Without, the library's tolerance decides
    (tilefold.reference.compare): reference is called with floating-point tensors in fp64, and as they are (float8 in fp32) for
    how far PyTorch itself is off. Integers have to be equal then. NaN is right where the reference has NaN.

    Raises Unsupported outside of the interpreter; ValueRangeError, DtypeError, LayoutError, ShapeError for arguments that do not
    fit."""
    function = _interpreted(kernel)
    bound, options = _bind(kernel, function, args)
    tolerance = Tolerance.of(atol, rtol)
    given = tensor_names(bound)
    _check_names(given, outputs, in_place)
    wanted = references(reference, bound, {name: given[name] for name in outputs}, tolerance)
    copies = {
        name: Guarded(name, one, name in outputs, name not in outputs or name in in_place)
        for name, one in given.items()
    }
    trace = Trace(list(copies.values()))
    replaced = {name: _replaced(name, value, copies) for name, value in bound.items()}
    faults = _run(kernel, grid, {**replaced, **options}, copies, trace)
    words: list[tuple[str, str]] = []
    for name in () if any(fault.kind == "raised" for fault in faults) else outputs:
        found, near = judge(copies[name], wanted[name], tolerance, trace, name in in_place)
        faults += found
        words += [(name, near)] if near else []
    return KernelReport(
        function.__name__,
        trace.programs,
        tuple(sorted(faults, key=lambda fault: ORDER.index(fault.kind))),
        tuple(words),
    )


def _run(
    kernel: Any, grid: Grid, arguments: Mapping[str, Any], copies: Mapping[str, Guarded], trace: Trace
) -> list[Fault]:
    """Launch, and look at the memory around: the faults that are seen before anything is compared."""
    faults: list[Fault] = []

    def counted(meta: Mapping[str, Any]) -> tuple[int, ...]:
        sizes = grid(meta) if callable(grid) else grid
        trace.rank, trace.started = len(sizes), True
        return tuple(int(size) for size in sizes)

    with trace.watching():
        try:
            kernel[counted](**arguments)
        except InterpreterError as error:
            cause: BaseException = error
            while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
                cause = cause.__cause__  # one for each call of a device function
            text = f"program ({', '.join(map(str, trace.program))}) ended with {type(cause).__name__}: {cause}"
            faults.append(Fault("raised", "", None, trace.program, 1, text))
    faults += trace.found.values()
    for name, copy in copies.items():
        where = copy.touched()
        if where is not None:
            text = f"memory around {name} was changed, {where} bytes from its first element, by something that is no tl.store"
            faults.append(Fault("guard", name, None, None, 1, text))
    return faults


def _replaced(name: str, value: Any, copies: Mapping[str, Guarded]) -> Any:
    """An argument with its tensors exchanged for their copies; a tuple with names stays one."""
    if isinstance(value, torch.Tensor):
        return copies[name].view
    if isinstance(value, tuple):
        parts = [_replaced(f"{name}[{place}]", part, copies) for place, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _under_heuristics(kernel: Any) -> Any:
    while isinstance(kernel, Heuristics):
        kernel = kernel.fn
    return kernel


def _interpreted(kernel: Any) -> Any:
    """The interpreter's function under the heuristics; Unsupported for anything else."""
    function = _under_heuristics(kernel)
    if isinstance(function, interpreter.InterpretedFunction):
        return function
    if hasattr(function, "configs"):
        raise Unsupported(
            "kernel is autotuned and would run once for each configuration; pass kernel.fn and the values of one"
        )
    if isinstance(function, JITFunction):
        raise Unsupported(
            "kernel is compiled, and its loads and stores cannot be watched; set TRITON_INTERPRET=1 before its module is imported"
        )
    raise DtypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")


def _bind(kernel: Any, function: Any, args: Mapping[str, Any] | Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments by name, and launch options; ValueRangeError for a name that is neither, or missing."""
    names = function.arg_names
    given = dict(args) if isinstance(args, Mapping) else dict(zip(names, args, strict=False))
    if len(given) < len(args):
        raise ValueRangeError(
            f"args has {len(args)} values, {function.__name__} takes {len(names)}: {', '.join(names)}"
        )
    options = {name: given.pop(name) for name in LAUNCH_OPTIONS if name in given and name not in names}
    for name in given:
        if name not in names:
            raise ValueRangeError(f"args names {name!r}, but {function.__name__} takes {', '.join(names)}")
    computed: set[str] = set()
    while isinstance(kernel, Heuristics):
        computed |= set(kernel.values)
        kernel = kernel.fn
    for name, parameter in inspect.signature(function.fn).parameters.items():
        if name not in given and name not in computed and parameter.default is parameter.empty:
            raise ValueRangeError(f"args lacks {name!r}, which {function.__name__} takes without a default")
    for name, value in given.items():
        if type(value).__name__ == "TensorDescriptor":
            raise Unsupported(
                f"{name} is a TensorDescriptor made on the host; make it in the kernel, by tl.make_tensor_descriptor"
            )
    return given, options


def _check_names(given: Mapping[str, torch.Tensor], outputs: Sequence[str], in_place: Sequence[str]) -> None:
    if isinstance(outputs, str) or isinstance(in_place, str):
        raise DtypeError(f"outputs and in_place must be tuples of names, got {outputs!r} and {in_place!r}")
    if not outputs:
        raise ValueRangeError("outputs is empty: name at least one tensor that the kernel writes")
    for option, names, known in (("outputs", outputs, tuple(given)), ("in_place", in_place, tuple(outputs))):
        for name in names:
            if name not in known:
                raise ValueRangeError(
                    f"{option} names {name!r}, accepted: {', '.join(known) or 'none, there is no tensor'}"
                )
    for name, tensor in given.items():
        check_tensors(device=tensor.device, contiguous=False, aligned=0, **{name: tensor})  # type: ignore[arg-type]
    check_outputs(given, outputs)


class CheckedKernel:
    """A kernel that `check_kernel` goes over at each launch: `kernel[grid](...)` raises KernelFault, or fills its outputs."""

    def __init__(self, kernel: Any, outputs: Sequence[str], options: Mapping[str, Any]) -> None:
        self.kernel, self.outputs, self.options = kernel, tuple(outputs), dict(options)
        self.report: KernelReport | None = None
        self.__doc__ = getattr(kernel, "__doc__", None)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            function = _interpreted(self.kernel)
            if len(args) > len(function.arg_names):
                raise ValueRangeError(
                    f"{len(args)} arguments given, {function.__name__} takes {len(function.arg_names)}"
                )
            positional = dict(zip(function.arg_names, args, strict=False))
            if twice := sorted(positional.keys() & named.keys()):
                raise ValueRangeError(f"{twice[0]} is given twice, by place and by name")
            self.report = check_kernel(self.kernel, grid, {**positional, **named}, outputs=self.outputs, **self.options)
            self.report.raise_if_wrong()
            self.kernel[grid](*args, **named)

        return launch


def checked(
    *,
    reference: Callable[..., Any],
    outputs: Sequence[str],
    in_place: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
) -> Callable[[Any], Any]:
    """Decorator over @triton.jit: under TRITON_INTERPRET=1 `check_kernel` with these arguments goes over every launch first.

    A launch that fails raises KernelFault with the report and leaves the tensors as they were; one that passes runs the kernel
    on them. Where kernels are compiled nothing can be watched, and the kernel is given back as it is."""
    Tolerance.of(atol, rtol)

    def decorate(kernel: Any) -> Any:
        if isinstance(_under_heuristics(kernel), JITFunction):
            return kernel
        _interpreted(kernel)
        return CheckedKernel(
            kernel, outputs, {"reference": reference, "in_place": tuple(in_place), "atol": atol, "rtol": rtol}
        )

    return decorate
