"""Profiles of kernels: their times, resources and counters, the roofs of the machine, and one verdict each.

    with tilefold.profile() as p:
        step()
    print(p.profile)

`evidence` and `verdict` are plain values and rules over them; `roofs` measures the machine; `launches` and `session` see
what runs; `counters` asks Nsight Compute; `report` and `roofline` show it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Declared, Session, profile

__all__ = ["Declared", "Session", "profile"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
