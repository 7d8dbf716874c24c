"""Which numerics a call has: those that are given, or those of the innermost context, or of the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import DtypeError, Unsupported, ValueRangeError

NUMERICS = ("fast", "invariant")
VARIABLE = "TILEFOLD_NUMERICS"
ASKED = [os.environ.get(VARIABLE, "") or "fast"]
"""What the environment said when tilefold was imported, then what contexts of the process say.  Keys of records hold the last, or
what a call says itself."""


@contextmanager
def numerics(kind: str) -> Iterator[None]:
    """Calls inside that do not say otherwise have these numerics: "fast", or "invariant" (docs/invariance.md).

    It holds for the process, as gradients and checkpoints compute on threads of their own.  Also as a decorator.
    Raises ValueRangeError for another word."""
    check_numerics(kind)
    ASKED.append(kind)
    try:
        yield
    finally:
        ASKED.pop()


def check_numerics(given: object) -> str:
    """An argument `numerics` as calls keep it, "" for None: what the context says when the call runs.  A call that Dynamo traces
    in a context is in that one.  Raises DtypeError or ValueRangeError, naming it."""
    if given is not None and not isinstance(given, str):
        raise DtypeError(f"numerics must be 'fast', 'invariant' or None, got {type(given).__name__}")
    if given and given not in NUMERICS:
        raise ValueRangeError(f"numerics must be 'fast', 'invariant' or None, got {given!r}")
    if not given and torch.compiler.is_compiling() and len(ASKED) > 1:
        return ASKED[-1]
    return given or ""


def is_invariant(given: str = "") -> bool:
    """Whether a call is to be "invariant"; given: its argument, "" for what the context says."""
    asked = given or ASKED[-1]
    if asked not in NUMERICS:
        raise ValueRangeError(f"{VARIABLE} must be fast or invariant, got {asked!r}")
    return asked == "invariant"


def refuse_invariant(what: str, why: str, given: str = "") -> None:
    """Unsupported for a call that is to be "invariant" and cannot be."""
    if is_invariant(given):
        raise Unsupported(
            f'{what} with numerics="invariant": {why}; call it inside tilefold.numerics("fast") if its bits may differ'
        )
