"""Cases of the benchmarks as calls to profile: the same inputs and the same call."""

from typing import Any

from tilefold.bench.family import Calls
from tilefold.bench.suites import ENGINES
from tilefold.errors import ValueRangeError
from tilefold.ladder.cases import LADDER

FAMILIES = (*(name for name in ENGINES if name != "video"), "ladder")


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
    return LADDER if name == "ladder" else ENGINES[name].family


def prepare_case(family: str, case: Any, device: str) -> Calls:
    """Inputs and call of one case by tilefold, as its benchmark makes them. Unsupported where tilefold refuses it."""
    found = _family(family)
    calls: Calls = found.prepare(found.peers["tilefold"], [found.inputs(case, device, 0)])
    return calls
