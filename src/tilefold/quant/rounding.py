"""Quantise a weight by rounding to nearest: scales and zero points per tensor, channel or group, and an optional refinement."""

from types import EllipsisType

import torch

from ..errors import DeviceError, DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError
from .packing import check_bits, pack
from .refine import nearest_codes, refine_zeros
from .tensor import DTYPES, QuantizedTensor, check_dtype

__all__ = ["dequantize", "quantize_weight"]

GROUP = 128
CHUNK = 1 << 22  # weights handled at a time, so that temporaries stay small


def quantize_weight(
    w: torch.Tensor,
    bits: int = 4,
    group: int | EllipsisType | None = ...,
    scheme: str = "asymmetric",
    per: str = "group",
    refine: str = "none",
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Round a weight [N, K] (out_features, in_features; fp16, bf16 or fp32, finite) to codes of 8, 4, 3 or 2 bits.

    group: columns that share a scale: 32, 64, 128 or another multiple of 32; K, more, or None for whole rows.  128 if not given.
    Where it does not divide K, the last group of a row is shorter.
    scheme: "symmetric" has scale = max |w| / (2**(bits - 1) - 1/2) and codes around 2**(bits - 1), so that the largest weight,
    too, is at most half a step off; "asymmetric" has scale = (max(w, 0) - min(w, 0)) / (2**bits - 1) and a zero point that is a
    code, so that 0 stays 0.  Scales are rounded up to `dtype` (w's by default), never down, which would clip.
    per: "group"; "channel" for a scale a row; "tensor" for one in all (group is not given then).
    refine: "hqq" moves zero points between codes (`tilefold.quant.refine`), "asymmetric" only; no group's error grows.

    Without refinement no weight is more than half a scale off (and fp32 rounding).
    Raises DtypeError, ShapeError, DeviceError (meta: no values), LayoutError, ValueRangeError (NaN,
    infinities, scales that `dtype` cannot hold) and Unsupported."""
    _check_tensor(w)
    if w.dtype not in DTYPES:
        raise DtypeError(f"w must be one of {', '.join(map(str, DTYPES))}, got {w.dtype}")
    if w.dim() != 2 or 0 in w.shape:
        raise ShapeError(f"w must be [N, K] with both at least 1, got {list(w.shape)}")
    check_bits(bits)
    _check_words(scheme, per, refine)
    n, k = w.shape
    size = _group_size(group, per, k)
    dtype = w.dtype if dtype is None else dtype
    check_dtype("dtype", dtype)
    w = w.detach()
    if not bool(w.isfinite().all()):
        raise ValueRangeError(
            f"w must be finite, got {int((~w.isfinite()).sum())} NaN or infinite values of {w.numel()}"
        )
    if per == "tensor":
        codes, scales, zeros = _quantize_rows(w.reshape(1, n * k), n * k, bits, scheme, refine, dtype)
        codes = codes.view(n, k)
    else:
        step = max(1, CHUNK // k)
        parts = [_quantize_rows(w[i : i + step], size, bits, scheme, refine, dtype) for i in range(0, n, step)]
        codes, scales = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        zeros = torch.cat([part[2] for part in parts])
    packed, high = pack(codes, bits)
    return QuantizedTensor(
        packed=packed,
        packed_high=high,
        scales=scales.t().contiguous(),
        zeros=zeros.t().contiguous() if scheme == "asymmetric" else None,
        bits=bits,
        group=size,
        shape=(n, k),
        scheme=scheme,
        dtype=dtype,
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The weight [N, K] that `q` stands for, in `dtype` (q.dtype by default): `q.dequantize(dtype)`.  DtypeError."""
    if not isinstance(q, QuantizedTensor):
        raise DtypeError(f"q must be a QuantizedTensor, got {type(q).__name__}")
    return q.dequantize(dtype)


def _check_tensor(w: object) -> None:
    """Raise unless it is a tensor whose values lie in memory."""
    if not isinstance(w, torch.Tensor):
        raise DtypeError(f"w must be a torch.Tensor, got {type(w).__name__}")
    if w.is_meta:
        raise DeviceError("w is on the meta device: it has no values to quantise")
    if w.layout != torch.strided:
        raise LayoutError(f"w must be a dense strided tensor, got layout {w.layout}")


def _check_words(scheme: str, per: str, refine: str) -> None:
    words = {
        "scheme": (scheme, ("symmetric", "asymmetric")),
        "per": (per, ("group", "channel", "tensor")),
        "refine": (refine, ("none", "hqq")),
    }
    for name, (given, accepted) in words.items():
        if given not in accepted:
            raise ValueRangeError(f"{name} must be one of {accepted}, got {given!r}")
    if refine == "hqq" and scheme == "symmetric":
        raise Unsupported(
            "refine='hqq' moves zero points, which scheme='symmetric' does not have; use scheme='asymmetric'"
        )


def _group_size(group: int | EllipsisType | None, per: str, k: int) -> int:
    """Columns of a group, at most K."""
    if per != "group":
        if group is not ... and group is not None and group != k:
            raise ValueRangeError(f"group goes with per='group'; with per={per!r} leave it out, got {group!r}")
        return k
    if group is ...:
        return min(GROUP, k)
    if group is None:
        return k
    if type(group) is not int or group < 1 or (group < k and group % 32):
        raise ValueRangeError(f"group must be None, a multiple of 32, or at least K = {k}, got {group!r}")
    return min(group, k)


def _quantize_rows(
    w: torch.Tensor, group: int, bits: int, scheme: str, refine: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scales [N, groups] in dtype, zeros [N, groups]: uint8, or floats if refined."""
    n, k = w.shape
    groups, largest = -(-k // group), 2**bits - 1
    # Padding with zeros changes no extreme that is used: both schemes keep 0 among the values they can hold.
    grouped = torch.nn.functional.pad(w.float(), (0, groups * group - k)).view(n, groups, group)
    if scheme == "symmetric":
        scales = _round_up(grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5), dtype)
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8)
    else:
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
        scales = _round_up(high / largest - low / largest, dtype)  # the difference itself may overflow
        zeros = (-low / scales.float()).round().clamp(0, largest).to(torch.uint8)
    if refine == "hqq":
        zeros = refine_zeros(
            grouped, scales, zeros, bits, k, torch.float32 if dtype == torch.float32 else torch.float16
        )
    codes = nearest_codes(grouped, scales.float(), zeros.float(), bits).to(torch.uint8)
    return codes.view(n, groups * group)[:, :k], scales, zeros


def _round_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in `dtype`, not below what they were; 1 where all weights are 0."""
    rounded = scales.to(dtype)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    above = (rounded.view(word) + 1).view(dtype)  # the next float, since scales are not negative
    rounded = torch.where(rounded.float() < scales, above, rounded)
    if not bool(rounded.isfinite().all()):
        raise ValueRangeError(
            f"dtype {dtype} cannot hold the scale {float(scales.max()):g}; give dtype=torch.float32 or torch.bfloat16"
        )
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
