"""Where `tilefold.attention` goes while something has asked for its calls: a stack, empty but inside `context_parallel`."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import Unsupported
from .call import Call

Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Call], tuple[torch.Tensor, torch.Tensor]]

STACK: list[tuple[str, Route]] = []  # of the process: what autograd's threads compute again goes the same way


def refuse(what: str) -> None:
    """For calls that cannot be routed: they must not be computed on one rank's tokens as if these were all."""
    if STACK:
        raise Unsupported(f"{what} inside {STACK[-1][0]}: not served there")


def route(q: Any, k: Any, v: Any, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the call to the innermost context."""
    return STACK[-1][1](q, k, v, call)
