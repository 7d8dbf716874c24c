"""The one launcher: kernels compiled once for everything that decides their compilation, launched without Triton's dispatch.

The first launch goes through Triton's own dispatch, which specialises and compiles.  Later launches reuse the compiled
kernel and skip that dispatch (about two thirds of the host time of a launch), also from calls of other lengths, as long as
what Triton specialises on is the same: dtypes, 16-byte alignment, integers that are 1 or multiples of 16, functions, constants.
Of integers in tuples it does so even where a kernel says `do_not_specialize`; a `RuntimeInt` stands for any.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.errors import InterpreterError

from ..errors import DeviceError
from .device import interpreting
from .integers import RuntimeInt, general, is_wide

OBSERVERS: list[Callable[[str, tuple[int, int, int], float], None]] = []
"""In the interpreter, where no profiler sees a launch: told the kernel's name, its grid and the seconds that it took."""

# torch.cuda.current_device without its look at whether CUDA is initialised: a kernel that is compiled says that it is
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

DIRECT = ("3.6.",)  # versions of Triton whose C launcher is called as `_entry` says
_COMPILED: dict[
    Any, tuple[Any, Any]
] = {}  # specialisation -> what `_entry` made of the compiled kernel, and the functions that keep their ids


class Launch:
    """fn[grid](*args, **constants, **options) on `device`, for args that Triton specialises alike.

    Tensors may change from call to call if dtype and 16-byte alignment do not; the class of every integer has to stay.  Once
    `warm`, an address does for a tensor."""

    __slots__ = ("_compiled", "_tail", "device", "fn", "grid", "keywords", "names")

    def __init__(
        self, fn: Any, grid: tuple[int, int, int], constants: Mapping[str, Any], options: Mapping[str, Any], device: int
    ) -> None:
        self.fn = fn
        self.grid = grid
        self.device = device
        self.keywords = {**constants, **options}
        self.names, named = _names(tuple(fn.arg_names), tuple(constants), tuple(options))
        self._tail = tuple([constants[name] for name in named])
        self._compiled: Any = None

    def alike(self, at: int, old: Any, new: Any) -> bool:
        """Whether the kernel that was compiled, if any, takes another integer in this place."""
        if self._compiled is None or new == old:
            return True
        if type(new) is not int or type(old) is not int:
            return False
        if is_wide(old) != is_wide(new):
            return False
        one = self.fn.params[at].do_not_specialize or ((old == 1) == (new == 1) and (old % 16 == 0) == (new % 16 == 0))
        return bool(one)

    def on_grid(self, grid: tuple[int, int, int] | None, alike: bool) -> "Launch":
        """The same on another grid, or the same one; alike: args are specialised as before."""
        made = object.__new__(Launch)
        made.fn, made.device, made.keywords, made.names = self.fn, self.device, self.keywords, self.names
        made.grid, made._tail, made._compiled = grid or self.grid, self._tail, self._compiled if alike else None
        return made

    def __call__(self, args: Sequence[Any]) -> None:
        """Launch on the current stream of the device (in the interpreter: run)."""
        if self._compiled is None or _hooked():
            self._first(args)
            return
        run, head, current_stream, middle = self._compiled
        if current_device() == self.device:
            run(*self.grid, current_stream(self.device), *head, *middle, *args, *self._tail)
        else:
            with torch.cuda.device(self.device):
                run(*self.grid, current_stream(self.device), *head, *middle, *args, *self._tail)

    def compile(self, args: Sequence[Any]) -> None:
        """Compile for args, whose tensors may lie anywhere, without launching; raises what the compiler raises.

        The next launch has args that Triton specialises as these."""
        if self.found(args):  # Triton's own way to the same answer takes most of a millisecond
            return
        with torch.cuda.device(self.device):
            self.fn.warmup(*general(args), grid=self.grid, **self.keywords)

    def found(self, args: Sequence[Any]) -> bool:
        """Whether a launch has compiled the kernel for what Triton specialises as these args; then this one is ready, too."""
        found = _COMPILED.get(self._key(args))
        if found is not None:
            self._compiled = found[0]
        return found is not None

    def flat(self, args: Sequence[Any]) -> None:
        """`__call__` of a `warm` launch with `maps`, of the arguments behind them."""
        run, head, current_stream, middle = self._compiled
        if current_device() == self.device:
            run.launch(*self.grid, current_stream(self.device), *head, *middle, *args, *self._tail)
        else:
            with torch.cuda.device(self.device):
                run.launch(*self.grid, current_stream(self.device), *head, *middle, *args, *self._tail)

    @property
    def maps(self) -> dict[int, Callable[[Any], list[Any]]] | None:
        """What makes the driver's arguments of each descriptor, by its place; empty: nothing does; None: not known yet."""
        if self._compiled is None:
            return None
        run, head, _, middle = self._compiled
        first = len(self.grid) + 1 + len(head) + len(middle)
        return (
            {at - first: functools.partial(run.made, facts) for at, facts in run.places} if type(run) is Mapped else {}
        )

    @property
    def warm(self) -> bool:
        """Whether the next launch reuses the compiled kernel: then pointers may be given as addresses, too."""
        return self._compiled is not None and not _hooked()

    def _first(self, args: Sequence[Any]) -> None:
        """Through Triton, unless another call of the same specialisation has been there."""
        if type(self.fn).__name__ == "InterpretedFunction" or interpreting():
            if isinstance(self.fn, triton.JITFunction):
                raise DeviceError("Triton was imported before TRITON_INTERPRET=1 was set: restart Python with it set")
            begin = time.perf_counter()
            try:
                self.fn[self.grid](*args, **self.keywords)
            except InterpreterError as error:
                raise _plainly(error) from error.__cause__
            for tell in OBSERVERS:
                tell(self.fn.__name__, self.grid, time.perf_counter() - begin)
            return
        key = self._key(args)
        found = _COMPILED.get(key)
        if found is not None and not _hooked():
            self._compiled = found[0]
            self(args)
            return
        with torch.cuda.device(self.device):
            if _has_runtime_ints(args):  # compiled for other numbers than it is launched with
                compiled = self.fn.warmup(*general(args), grid=self.grid, **self.keywords)
                compiled[self.grid](*args, *self._tail)
            else:
                compiled = self.fn[self.grid](*args, **self.keywords)
        self._compiled = _entry(compiled)
        _COMPILED[key] = (self._compiled, [self.fn, *args_functions(args)])

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Everything that decides the compilation."""
        return id(self.fn), self.device, *self.keywords.items(), *_specialisations(self.fn, args)


@functools.cache
def _names(
    names: tuple[str, ...], constants: tuple[str, ...], options: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of a kernel's parameters are arguments of a launch, and which are constants of it."""
    given = {*constants, *options}
    return tuple(name for name in names if name not in given), tuple(name for name in names if name in constants)


def _entry(compiled: Any) -> tuple[Any, ...]:
    """(function, what it takes behind the stream, who knows the stream, no hooks and no metadata of them), looked up once.

    Triton's launcher of a kernel is a Python object around a C function, which costs 2 us: where a kernel needs no scratch
    memory, and the launcher is Triton 3.6's, it is left out; so is what makes the maps of descriptors in every launch."""
    run, current_stream = compiled.run, triton.runtime.driver.active.get_current_stream
    head: tuple[Any, ...] = (compiled.function,)
    middle = (compiled.packed_metadata, None, None, None)
    scratch = (getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile"))
    if triton.__version__.startswith(DIRECT) and hasattr(run, "launch_pdl") and all(size == 0 for size in scratch):
        head += (run.launch_cooperative_grid, run.launch_pdl, None, None)
        run = mapped(run.launch)
    return run, head, current_stream, middle


def _plainly(error: BaseException) -> InterpreterError:
    """What went wrong inside, said once: the interpreter wraps an error anew in every function that it passes through."""
    while error.__cause__ is not None:
        error = error.__cause__
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or isinstance(error, InterpreterError | AssertionError):  # an assertion of a kernel says it all
        return InterpreterError(str(error))
    code = frame.tb_frame.f_code
    return InterpreterError(f"{type(error).__name__} in {code.co_name} ({code.co_filename}:{frame.tb_lineno}): {error}")


def _specialisations(fn: Any, args: Sequence[Any]) -> list[Any]:
    """What of the args decides a compilation; parameters that fn does not specialise count by their type alone."""
    return [
        None if arg is None
        else (32 if -LIMIT <= arg < LIMIT else 64) if type(arg) is int and param.do_not_specialize
        else _class(arg)
        for arg, param in zip(args, fn.params, strict=False)
    ]  # fmt: skip


LIMIT = 1 << 31  # of integers of 32 bits


def _class(arg: Any) -> Any:
    kind = type(arg)
    if kind is int:
        return 64 if is_wide(arg) else 32, arg == 1, arg % 16 == 0
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, tuple):
        return tuple([_class(item) for item in arg])
    if hasattr(arg, "block_shape"):  # Triton's descriptors and Gluon's
        return arg.base.dtype, tuple(arg.block_shape)
    if kind is RuntimeInt:
        return 64 if is_wide(arg) else 32
    return id(arg) if callable(arg) else kind


def _has_runtime_ints(args: Sequence[Any]) -> bool:
    return any(_has_runtime_ints(arg) if type(arg) is tuple else type(arg) is RuntimeInt for arg in args)


def args_functions(args: Sequence[Any]) -> list[Any]:
    """The functions among the args: kept, so that their ids stay theirs."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, tuple):
            found += args_functions(arg)
        elif callable(arg) and not isinstance(arg, torch.Tensor):
            found.append(arg)
    return found


class Mapped:
    """Triton 3.6's C launcher of a kernel with descriptors, for which it takes tensor maps.

    Triton makes the maps in every launch; so does this, for the first calls of a `Bound`, which keeps them for all later ones.

    places: (index among the launcher's arguments, what the kernel knows of the descriptor), in order."""

    __slots__ = ("launch", "make", "places")

    def __init__(self, launch: Any, places: Sequence[tuple[int, Any]], make: Callable[[Any, Any], list[Any]]) -> None:
        self.launch, self.make, self.places = launch, make, tuple(places)[::-1]

    def made(self, facts: Any, descriptor: Any) -> list[Any]:
        """What the launcher takes for a descriptor: its map, shape and strides."""
        return self.make(descriptor, facts)

    def __call__(self, *args: Any) -> None:
        given = list(args)
        for at, facts in self.places:  # the last first: the others stay where they are
            given[at : at + 1] = self.make(args[at], facts)
        self.launch(*given)


def mapped(launch: Any) -> Any:
    """Triton 3.6's launcher as one that `Launch` knows; as it is where it takes no descriptors, or is none that is known here."""
    from triton.backends.nvidia import driver

    code = getattr(launch, "__code__", None)
    if code is None or set(code.co_freevars) != {"launcher", "tensordesc_indices", "tensordesc_meta"}:
        return launch
    parts = dict(zip(code.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True))
    if None in parts["tensordesc_meta"]:  # no TMA: the kernel takes base, shape and strides
        return launch
    indices = [driver._BASE_ARGS_FORMAT_LEN + i for i in sorted(parts["tensordesc_indices"])]
    places = zip(indices, parts["tensordesc_meta"], strict=True)
    return Mapped(parts["launcher"], tuple(places), driver.make_tensordesc_arg)


def _hooked() -> bool:
    """Has a profiler hooked the launches?  Then they take Triton's way, which calls it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
