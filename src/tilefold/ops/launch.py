"""The one launcher: a kernel bound to everything about a call that decides its compilation.

The first launch goes through Triton's own dispatch, which specialises and compiles.  Later launches with the same
Launcher reuse the compiled kernel and skip that dispatch (about two thirds of the host time of a launch), provided that
every pointer is 16-byte aligned, as at the first launch, and that no profiler has hooked the launches; otherwise they take
the long way again, which is always right.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import interpreting

__all__ = ["Box", "Launcher"]


class Launcher:
    """fn[grid](*args, **constants, **options) with the compiled kernel kept.

    All integers among the args must be the same at every call of one Launcher: they decide the compilation.  Tensors may
    change if their dtypes do not."""

    __slots__ = ("_compiled", "_tail", "fn", "grid", "keywords")

    def __init__(
        self, fn: Any, grid: tuple[int, int, int], constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self.fn = fn
        self.grid = grid
        self.keywords = {**constants, **options}
        self._tail = tuple(constants[name] for name in fn.arg_names if name in constants)
        self._compiled: Any = None

    def __call__(self, args: tuple[Any, ...], device: int, aligned: bool) -> None:
        """Launch on the current stream of CUDA device `device` (ignored in the interpreter); aligned: every pointer is."""
        compiled = self._compiled
        if compiled is None or not aligned or _hooked():
            self._launch_by_triton(args, device, aligned)
            return
        current = torch.cuda.current_device()
        if current != device:
            with torch.cuda.device(device):
                self._launch(compiled, args, device)
        else:
            self._launch(compiled, args, device)

    def _launch(self, compiled: Any, args: tuple[Any, ...], device: int) -> None:
        stream = triton.runtime.driver.active.get_current_stream(device)
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *self._tail
        )

    def _launch_by_triton(self, args: tuple[Any, ...], device: int, aligned: bool) -> None:
        if interpreting():
            self.fn[self.grid](*args, **self.keywords)
            return
        with torch.cuda.device(device):
            compiled = self.fn[self.grid](*args, **self.keywords)
        if aligned:
            self._compiled = compiled


class Box:
    """A host tensor descriptor that moves from tensor to tensor of the same shape and strides.

    Making one anew costs the host 3 us of checks that the first one already passed; `over` skips them."""

    __slots__ = ("_fields",)

    def __init__(self, tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> None:
        self._fields = {**TensorDescriptor(tensor, shape, strides, block).__dict__, "base": None}

    def over(self, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor of `tensor`, whose base has to be 16-byte aligned."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(self._fields)
        descriptor.base = tensor
        return descriptor


def _hooked() -> bool:
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))
