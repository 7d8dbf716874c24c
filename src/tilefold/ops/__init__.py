"""Host side of the kernels: check, plan, allocate, launch.  The only place that launches anything.

dense     attention forward          backward  its gradients
sparse    block-sparse attention and the stages of its pipeline
cache     KV caches: attention over them, new keys into them, rotary embedding, merging
matrix    the operator collection: add, matmul, bmm, transpose, conv2d, RMSNorm, weights of few bits
here      what all of them use: the call and its checks, the device, launches, operators, records of calls
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .matrix.add import add
    from .matrix.conv import conv2d
    from .matrix.eight import matmul_w8a8, matmul_w8a8_plan
    from .matrix.lowbit import lowbit_matmul, lowbit_matmul_plan
    from .matrix.matmul import bmm, matmul
    from .matrix.rms_norm import rms_norm, rms_norm_plan
    from .matrix.rms_norm_rotary import rms_norm_rotary
    from .matrix.transpose import transpose

__all__ = [
    "add",
    "bmm",
    "conv2d",
    "lowbit_matmul",
    "lowbit_matmul_plan",
    "matmul",
    "matmul_w8a8",
    "matmul_w8a8_plan",
    "rms_norm",
    "rms_norm_plan",
    "rms_norm_rotary",
    "transpose",
]

# The operator collection's functions, by the module of ops.matrix that holds each; loaded when first used.
COLLECTION: dict[str, str] = {
    "bmm": "matmul",
    "matmul": "matmul",
    "add": "add",
    "conv2d": "conv",
    "transpose": "transpose",
    "lowbit_matmul": "lowbit",
    "lowbit_matmul_plan": "lowbit",
    "matmul_w8a8": "eight",
    "matmul_w8a8_plan": "eight",
    "rms_norm": "rms_norm",
    "rms_norm_plan": "rms_norm",
    "rms_norm_rotary": "rms_norm_rotary",
}


def __getattr__(name: str) -> Any:
    if name in COLLECTION:
        return getattr(importlib.import_module(f".matrix.{COLLECTION[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *COLLECTION])
