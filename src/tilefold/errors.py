"""The one exception family of tilefold.

Every error names the argument, says what was given and what is accepted, and is raised before anything is launched.
Each class also derives from the built-in exception that a caller would expect (`ValueError`, `TypeError`, ...).
"""

__all__ = [
    "CommunicationError",
    "DeviceError",
    "DtypeError",
    "LayoutError",
    "ModifiedError",
    "OutOfPages",
    "PlanError",
    "ShapeError",
    "TilefoldError",
    "Unsupported",
    "ValueRangeError",
]


class TilefoldError(Exception):
    """Base class: `except TilefoldError` catches everything that tilefold itself raises."""


class ShapeError(TilefoldError, ValueError):
    """A tensor has the wrong rank or size, or two tensors disagree about a size."""


class DtypeError(TilefoldError, TypeError):
    """A tensor or an argument has a type that the operation does not take."""


class DeviceError(TilefoldError, ValueError):
    """Tensors lie on different devices, or on one where tilefold cannot run."""


class LayoutError(TilefoldError, ValueError):
    """The strides of a tensor cannot be honoured (tilefold never copies silently)."""


class CommunicationError(TilefoldError, RuntimeError):
    """Another rank did not answer, or left, while tensors were being exchanged; the process group is not usable afterwards."""


class ModifiedError(TilefoldError, RuntimeError):
    """A tensor that the backward pass reads was changed in place after the forward pass; torch says the same of its own."""


class ValueRangeError(TilefoldError, ValueError):
    """A number, string or tuple argument is outside what is accepted."""


class OutOfPages(TilefoldError, MemoryError):
    """A paged cache has fewer free pages than a call needs; the call has changed nothing.

    needed, free: pages.  reclaimable: pages that freeing, or swapping out, all sequences but those of the call would give."""

    def __init__(self, needed: int, free: int, reclaimable: int, total: int, holders: int) -> None:
        super().__init__(
            f"{needed} pages are needed, {free} of {total} are free; freeing or swapping out the other {holders} sequences "
            f"that hold pages would give {reclaimable} more"
        )
        self.needed = needed
        self.free = free
        self.reclaimable = reclaimable
        self.total = total
        self.holders = holders

    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        return type(self), (self.needed, self.free, self.reclaimable, self.total, self.holders)


class PlanError(TilefoldError, ValueError):
    """A plan does not fit the call or the device."""


class Unsupported(TilefoldError, NotImplementedError):
    """A combination that is meaningful but not implemented (yet); the message says what to use instead."""
