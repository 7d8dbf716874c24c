"""Cases of the benchmarks as calls to profile: the same inputs and the same call, with the work that they declare."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tilefold.bench.suites import ENGINES
from tilefold.errors import ValueRangeError

FAMILIES = (*(name for name in ENGINES if name != "video"), "ladder")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A case ready to run: its name, the call, what has to be open while it runs, FLOPs and bytes of one call; l2_bytes: drawn
    from the L2 cache, where the case declares it."""

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[Any]]
    flops: int
    bytes: int
    dtype: str
    l2_bytes: int | None = None


def cases_in(family: str, size: str, direction: str = "forward") -> tuple[Any, ...]:
    """The cases of a family at a size ("full", "quick" or "tiny"); direction: of dense and sparse, "forward" or "backward".
    ValueRangeError for an unknown family or size, and for a direction that the family has not."""
    if family not in FAMILIES:
        raise ValueRangeError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    found = _family(family)
    if found.attention:
        return tuple(found.cases(size, direction=direction))
    if direction != "forward":
        raise ValueRangeError(f"direction of family {family!r} must be 'forward', got {direction!r}")
    return tuple(found.cases(size))


def _family(name: str) -> Any:
    if name != "ladder":
        return ENGINES[name].family
    from tilefold.ladder.cases import LADDER

    return LADDER


def prepare_case(family: str, case: Any, device: str) -> Chosen:
    """Inputs and call of one case by tilefold, as its benchmark makes them. Unsupported where tilefold refuses it."""
    found = _family(family)
    calls = found.prepare(found.peers["tilefold"], [found.inputs(case, device, 0)])
    drawn = getattr(case, "l2_bytes", None)
    return Chosen(case.name, calls.calls[0], calls.context, case.flops, case.bytes, case.dtype, drawn)
