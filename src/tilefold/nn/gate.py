"""Gates: how much of a finished branch enters the output, learned for each head, from the token or for all tokens alike."""

import math
from typing import Literal, get_args

import torch
from torch import nn

from ..errors import ValueRangeError
from .bare import is_bare

GateKind = Literal["linear", "sigmoid", "head"]
"""A linear map of each token, its sigmoid, or one number a head."""

_NEARLY = 0.98  # where a sigmoid starts that should start at 1, and 1 less this for 0: it cannot reach either


class Gate(nn.Module):
    """A factor for each head and, but for the kind "head", each token: [B, seq, dim] to [B, seq, heads] or [heads].

    dim: channels of the tokens.  heads: query heads.
    kind: "linear" (weight x + bias), "sigmoid" (of the same, 0 to 1) or "head" (bias alone: one number a head).
    start: the value for every token and head before training, 0 or 1; a sigmoid starts at 0.02 or 0.98.

    The weight starts at 0, so that the start does not depend on the tokens; its gradient does not vanish there.

    Raises ValueRangeError naming kind or start."""

    weight: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        heads: int,
        kind: GateKind,
        start: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(GateKind):
            raise ValueRangeError(f"kind of a gate must be one of {', '.join(get_args(GateKind))}, got {kind!r}")
        if start not in (0.0, 1.0):
            raise ValueRangeError(f"start of a gate must be 0 or 1, got {start!r}")
        self.kind, self.start = kind, float(start)
        if kind == "head":
            self.register_parameter("weight", None)
        else:
            self.weight = nn.Parameter(torch.empty(heads, dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the start."""
        if self.weight is not None:
            nn.init.zeros_(self.weight)
        logit = math.log(_NEARLY / (1 - _NEARLY))
        nn.init.constant_(self.bias, self.start if self.kind != "sigmoid" else logit if self.start else -logit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return self.bias
        return self._gate(nn.functional.linear(x, self.weight, self.bias))

    def _gate(self, raw: torch.Tensor) -> torch.Tensor:
        """The gate of what its linear map gives."""
        return raw.sigmoid() if self.kind == "sigmoid" else raw

    def extra_repr(self) -> str:
        return f"{self.kind!r}, heads={self.bias.shape[0]}, start={self.start:g}"


def both_gates(
    x: torch.Tensor, one: Gate | None, other: Gate | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gates of x, those that there are; in one product where both have weights and `is_bare` holds of both."""
    if one is not None and other is not None and _is_linear(one, x) and _is_linear(other, x):
        weight, bias = torch.cat([one.weight, other.weight]), torch.cat([one.bias, other.bias])  # type: ignore[list-item]
        raw, more = nn.functional.linear(x, weight, bias).split([one.bias.shape[0], other.bias.shape[0]], -1)
        return one._gate(raw), other._gate(more)
    return None if one is None else one(x), None if other is None else other(x)


def _is_linear(gate: Gate, x: torch.Tensor) -> bool:
    return type(gate) is Gate and gate.weight is not None and is_bare(gate, x.device)
