"""Which calls are of e4m3 tensors: what every call asks, before anything else of theirs is loaded."""

from typing import Any

import torch

from ...errors import DtypeError, Unsupported

E4M3 = torch.float8_e4m3fn
DESCALES = ("q_descale", "k_descale", "v_descale")


def is_fp8(q: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> bool:
    """Whether a call is one of e4m3 tensors; factors without them are refused."""
    if getattr(q, "dtype", None) is E4M3:
        return True
    if q_descale is None and k_descale is None and v_descale is None:
        return False
    for name, t in zip(DESCALES, (q_descale, k_descale, v_descale), strict=True):
        if t is not None:
            dtype = str(getattr(q, "dtype", type(q).__name__)).removeprefix("torch.")
            raise DtypeError(f"{name} goes with q, k and v of dtype float8_e4m3fn, but q has dtype {dtype}")
    return False


def refuse_packed(q: Any) -> None:
    """Unsupported for packed e4m3 sequences: V^T would need a place of its own for each of them."""
    if getattr(q, "dtype", None) is E4M3:
        raise Unsupported(
            "q has dtype float8_e4m3fn, which attention_varlen does not take: use attention, or dequantise"
        )
