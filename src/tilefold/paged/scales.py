"""What the bytes of a paged cache in 8 bits stand for: a factor for each KV head, of each layer, checked once."""

import torch

from ..cache_formats import listed
from ..check import CODED
from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError

Scales = tuple[torch.Tensor | None, torch.Tensor | None]  # of K and V, [kv_heads] fp32


def scales_of(
    dtype: torch.dtype,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    layers: int,
    kv_heads: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Copies of both factors as [layers, kv_heads] fp32, None for a cache in floats; without factors e4m3 has ones.

    Reads them, as nothing later does: a factor of 0 would make NaN of every key."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    kind = str(dtype).removeprefix("torch.")
    if dtype not in CODED:
        for name, t in given.items():
            if t is not None:
                raise DtypeError(f"{name} was given, but the cache holds {kind}: factors go with {listed('and')}")
        return None
    if (k_scale is None) != (v_scale is None):
        raise ValueRangeError("k_scale and v_scale come together, got one of them")
    if k_scale is None or v_scale is None:
        if CODED[dtype].needs_factors:
            raise ValueRangeError(f"k_scale and v_scale must be given with an {CODED[dtype].short} cache")
        k_scale = v_scale = torch.ones(kv_heads, dtype=torch.float32, device=device)
    return (
        _checked("k_scale", k_scale, layers, kv_heads, device),
        _checked("v_scale", v_scale, layers, kv_heads, device),
    )


def _checked(name: str, scale: object, layers: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor or None, got {type(scale).__name__}")
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name} must be float32, got {str(scale.dtype).removeprefix('torch.')}")
    if scale.device != device:
        raise DeviceError(f"{name} is on {scale.device}, the cache on {device}")
    wanted = f"[{kv_heads}] (KV heads) or [{layers}, {kv_heads}] (layers, KV heads)"
    if tuple(scale.shape) not in ((kv_heads,), (layers, kv_heads)):
        if scale.dim() == 3:
            wanted += (
                "; factors of single pages are not kept: they would have to follow every page that is copied or moved"
            )
        raise ShapeError(f"{name} has shape {tuple(scale.shape)}, expected {wanted}")
    own = scale.detach().expand(layers, kv_heads).clone(memory_format=torch.contiguous_format)
    for layer, row in enumerate(own.tolist()):
        for head, value in enumerate(row):
            if not 0 < value < float("inf"):
                place = f"{head}" if scale.dim() == 1 else f"{layer}, {head}"
                raise ValueRangeError(f"{name}[{place}] must be a number above 0, got {value}")
    return own
