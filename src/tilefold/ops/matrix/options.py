"""Options that products and convolutions share: the activations that they may end in, by name, and tf32."""

from typing import Any

import torch

from ...errors import DtypeError, ValueRangeError

CODES = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}  # of device.activation
NAMES = tuple(CODES)


def check_activation(activation: Any) -> None:
    """ValueRangeError unless it is None or the name of an activation, whatever its type."""
    known = NAMES[1:]
    if activation is not None and (not isinstance(activation, str) or activation not in known):
        raise ValueRangeError(f"activation must be None or one of {', '.join(map(repr, known))}, got {activation!r}")


def check_tf32(name: str, t: torch.Tensor, tf32: Any) -> None:
    """DtypeError unless tf32 is a bool, ValueRangeError if it is asked for of other factors than float32; name: of t."""
    if not isinstance(tf32, bool):
        raise DtypeError(f"tf32 must be a bool, got {tf32!r}")
    if tf32 and t.dtype != torch.float32:
        raise ValueRangeError(f"tf32 is for float32, but {name} has dtype {str(t.dtype).removeprefix('torch.')}")
