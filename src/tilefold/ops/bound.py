"""A launch whose arguments go by the names of the kernel's own parameters."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .launch import Launch

__all__ = ["Bound", "Prepared", "Slot", "attribute", "meta", "strides_named"]


class Slot(NamedTuple):
    """An argument that differs from call to call: `of` names what the call gives, `make` turns that into the argument."""

    of: str
    make: Callable[[Any], Any] | None = None


class Bound:
    """A kernel's launch, and its arguments: what all calls of a key share, and slots for the rest.

    launch: of the kernel.  given: names of what a call gives, in order.  values: by the kernel's names; more than it has may be
    there, so that kernels share a table.  A parameter without a value is what a call gives by its name; KeyError names one that
    nobody gives."""

    __slots__ = ("_as_given", "_made", "_template", "launch", "names", "values")

    def __init__(self, launch: "Launch", given: Sequence[str], values: Mapping[str, Any]) -> None:
        self.launch, self.values = launch, values
        self.names = [name for name in launch.fn.arg_names if name not in launch.keywords]
        self._template: list[Any] = []
        as_given: list[tuple[int, int]] = []
        made: list[tuple[int, int, Callable[[Any], Any]]] = []
        for at, name in enumerate(self.names):
            if name not in values and name not in given:
                raise KeyError(f"{launch.fn.__name__} has a parameter {name!r} that its binding does not know")
            value = values[name] if name in values else Slot(name)
            if not isinstance(value, Slot):
                self._template.append(value)
                continue
            self._template.append(None)
            place = given.index(value.of)
            if value.make is None:
                as_given.append((at, place))
            else:
                made.append((at, place, value.make))
        self._as_given, self._made = tuple(as_given), tuple(made)

    def __call__(self, given: tuple[Any, ...]) -> None:
        """Launch for a call that gives these."""
        self.launch(self.arguments(given))

    def arguments(self, given: tuple[Any, ...]) -> list[Any]:
        """The kernel's run-time arguments, in its order."""
        arguments = self._template.copy()
        for at, place in self._as_given:
            arguments[at] = given[place]
        for at, place, make in self._made:
            arguments[at] = make(given[place])
        return arguments

    def compile(self, given: tuple[Any, ...]) -> None:
        """Compile without launching; tensors may lie anywhere.  Raises what the compiler raises."""
        self.launch.compile(self.arguments(given))

    def example(self, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(kernel, args, kwargs) of a call, to compile ahead of time."""
        return self.launch.fn, tuple(self.arguments(given)), self.launch.keywords

    @property
    def warm(self) -> bool:
        """Whether pointers may be given as addresses, too."""
        return self.launch.warm

    def with_values(self, values: Mapping[str, Any]) -> "Bound":
        """The same launch with other values; KeyError for a name that is no parameter of the kernel, or a slot."""
        made = object.__new__(Bound)
        made.launch, made.names, made._template = self.launch, self.names, self._template.copy()
        made.values, made._as_given, made._made = {**self.values, **values}, self._as_given, self._made
        slots = {at for at, *_ in (*self._as_given, *self._made)}
        for name, value in values.items():
            if name not in self.names or self.names.index(name) in slots:
                raise KeyError(f"{self.launch.fn.__name__} has no parameter {name!r} that is the same in all calls")
            made._template[self.names.index(name)] = value
        return made


class Prepared(NamedTuple):
    """The record of a call that one launch makes: what its result is made by, and the launch, None for nothing to compute."""

    shape: Any
    bound: Bound | None = None


def attribute(of: str, path: str, value: object) -> Slot | None:
    """The slot of an attribute of what a call gives; None, for the kernel too, where `value`, this call's, is None."""
    return None if value is None else Slot(of, operator.attrgetter(path))


def strides_named(letter: str, strides: Sequence[int], dims: Sequence[str]) -> dict[str, int]:
    """The values of stride_qb, stride_qm, stride_qh for ("q", strides, "bmh"); of a packed tensor the last two."""
    return {f"stride_{letter}{dim}": stride for dim, stride in zip(dims[-len(strides) :], strides, strict=True)}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor without memory: for its strides, or as an example to compile with."""
    return torch.empty(shape, dtype=dtype, device="meta")
