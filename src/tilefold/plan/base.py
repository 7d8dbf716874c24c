"""What every plan has: its text in a notebook, JSON, and how it refuses what it does not serve."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from tilefold.errors import PlanError
from tilefold.plan import serialise

if TYPE_CHECKING:
    from tilefold.plan.device import Device

Own = TypeVar("Own", bound="Plan")
Record = TypeVar("Record")
Fault = tuple[str, str] | None
"""(field, sentence) of the first limit that is broken, or None."""


class Shown:
    """What a notebook shows as its text."""

    __slots__ = ()
    _repr_pretty_: Any

    def __init_subclass__(cls) -> None:
        cls._repr_pretty_ = _pretty  # IPython takes it from the class that has `__repr__`


def _pretty(self: object, printer: Any, cycle: bool) -> None:
    printer.text(str(self))


def said_sizes(problem: Any) -> str:
    """The sizes of a problem of attention, in words."""
    n = problem
    return (
        f"{n.batch} x {n.seq_q} queries, {n.seq_k} keys, {n.heads} heads on {n.kv_heads} KV heads, D={n.dim_qk} (V {n.dim_v}), "
        f"{n.dtype}"
    )


class Plan(Shown):
    """A frozen record: `print` it, keep it as JSON.  What no launch needs of it is made when somebody asks: see `decided`."""

    __slots__ = ("_rest",)

    @classmethod
    def decided(cls: type[Own], rest: Callable[[], Mapping[str, object]], **fields: object) -> Own:
        """A plan that its planner has checked.  rest: makes the fields that are not given, all of them."""
        made = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        object.__setattr__(made, "_rest", rest)
        return made

    def alike(self: Own, problem: object, deferred: tuple[str, ...], again: Callable[[], Own]) -> Own:
        """The same decision for another problem.  deferred: fields that no launch needs; again: plans it, when somebody asks for
        one."""

        def rest() -> dict[str, object]:
            made = again()
            return {name: getattr(made, name) for name in deferred}

        names: tuple[str, ...] = _others(type(self), deferred)  # type: ignore[arg-type]
        return self.decided(rest, problem=problem, **{name: getattr(self, name) for name in names})

    def later(self: Own, **made: Callable[[], object]) -> Own:
        """The same plan with fields that are made when somebody asks."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in made}  # type: ignore[attr-defined]
        return self.decided(lambda: {name: make() for name, make in made.items()}, **own)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A field that `decided` left for now."""
            if name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            for field, value in self._rest().items():
                object.__setattr__(self, field, value)
            return object.__getattribute__(self, name)

    def to_json(self) -> str:
        """The plan, with its problem and device, as JSON; `from_json` gives an equal plan."""
        return serialise.to_json(self)

    @classmethod
    def from_json(cls: type[Own], text: str) -> Own:
        """The plan that `to_json` wrote. PlanError names a missing, unknown, mistyped or contradictory field."""
        return serialise.from_json(cls, text)


@cache
def _others(plan: type[Plan], deferred: tuple[str, ...]) -> tuple[str, ...]:
    """The fields that are neither deferred nor the problem."""
    return tuple(name for name in plan.__dataclass_fields__ if name not in (*deferred, "problem"))  # type: ignore[attr-defined]


def require_fit(fault: Fault) -> None:
    """PlanError, naming the field, if there is a fault."""
    if fault:
        raise PlanError(f"plan field {fault[0]}: {fault[1]}")


def unusable(kernel: str, refusal: str | None) -> Fault:
    """The fault of a kernel that is asked for, None without a refusal."""
    return ("kernel", f"{kernel} cannot be used: {refusal}") if refusal else None


def require_derived(plan: Plan, expected: Mapping[str, object]) -> None:
    """PlanError, naming the field, unless the fields that follow from a plan's problem and tile do."""
    for name, value in expected.items():
        if getattr(plan, name) != value:
            raise PlanError(
                f"plan field {name} must be {value!r} for this problem and tile, got {getattr(plan, name)!r}"
            )


def require_device(made: "Device", asked: "Device") -> None:
    """PlanError unless backend and architecture are the same."""
    for name in ("backend", "arch"):
        mine, here = getattr(made, name), getattr(asked, name)
        if mine != here:
            raise PlanError(f"plan was made for a device with {name}={mine!r}, this device has {name}={here!r}")


def require_equal(made: Any, asked: Any, names: tuple[str, ...] = ()) -> None:
    """PlanError, naming the field, unless those of a problem (all, if none are named) are what a call has."""
    for name in names or tuple(field.name for field in fields(made)):
        mine, wanted = getattr(made, name), getattr(asked, name)
        if mine != wanted:
            raise PlanError(f"plan was made for {name}={mine!r}, the call has {name}={wanted!r}")


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a record with slots, by name: what of a tile a plan has as its own."""
    return {name: getattr(record, name) for name in record.__slots__}


def changed(record: Record, **given: Any) -> Record:
    """The record with the fields that are not None.  PlanError, naming the field, for what is no int where an int stood."""
    for name, value in given.items():
        if value is not None and type(getattr(record, name, None)) is int and type(value) is not int:
            raise PlanError(f"plan field {name}: must be an int, got {value!r}")
    found: Record = replace(record, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]
    return found
