"""Quantise a weight by rounding to nearest: scales and zero points per tensor, channel or group, and an optional refinement."""

from collections.abc import Iterator
from types import EllipsisType

import torch

from ..errors import DeviceError, DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError
from .packing import check_bits
from .refine import nearest_codes, refine_zeros, squared_errors
from .tensor import QuantizedTensor, check_dtype, packed_weight

GROUP = 128
CHUNK = 1 << 22  # weights handled at a time, so that temporaries stay small
LEAST_GAIN = 0.1  # of the squared error, for which floating zero points are taken unasked


def quantize_weight(
    w: torch.Tensor,
    bits: int = 4,
    group: int | EllipsisType | None = ...,
    scheme: str = "asymmetric",
    per: str = "group",
    refine: str = "none",
    dtype: torch.dtype | None = None,
    zeros: str = "auto",
) -> QuantizedTensor:
    """Round a weight [N, K] (out_features, in_features; fp16, bf16 or fp32, finite) to codes of 8, 4, 3 or 2 bits.

    group: columns that share a scale: 32, 64, 128 or another multiple of 32; K, more, or None for whole rows.  128 if not given.
    Where it does not divide K, the last group of a row is shorter.
    scheme: "symmetric" has scale = max |w| / (2**(bits - 1) - 1/2) and codes around 2**(bits - 1), so that the largest weight,
    too, is at most half a step off; "asymmetric" has scale = (max(w, 0) - min(w, 0)) / (2**bits - 1) and a zero point that is a
    code, so that 0 stays 0; see zeros for groups without a 0.  Scales are rounded up to `dtype` (w's by default), never down,
    which would clip.
    per: "group"; "channel" for a scale a row; "tensor" for one in all (group is not given then).
    refine: "hqq" moves zero points between codes (`tilefold.quant.refine`), "asymmetric" only; no group's error grows.
    zeros: of "asymmetric" groups whose weights all lie on one side of 0.  "integer" stretches their range to 0, as of any group.
    "float" takes the range that they have, scale = (max w - min w) / (2**bits - 1), with the zero point -min w / scale,
    which is no code, wherever that lessens the group's squared error; all zero points are stored in float16 then (float32 with
    float32 scales).  "auto": "float" if the whole weight's squared error falls by a tenth or more, else "integer", whose
    products more kernels take.

    Without refinement no weight is more than half a scale off (and fp32 rounding).
    Raises DtypeError, ShapeError, DeviceError (meta: no values), LayoutError, ValueRangeError (NaN,
    infinities, scales that `dtype` cannot hold) and Unsupported."""
    _check_tensor(w)
    check_dtype("w", w.dtype)
    if w.dim() != 2 or 0 in w.shape:
        raise ShapeError(f"w must be [N, K] with both at least 1, got {list(w.shape)}")
    check_bits(bits)
    _check_words(scheme, per, refine, zeros)
    n, k = w.shape
    size = _group_size(group, per, k)
    dtype = w.dtype if dtype is None else dtype
    check_dtype("dtype", dtype)
    w = w.detach()
    if not bool(w.isfinite().all()):
        raise ValueRangeError(
            f"w must be finite, got {int((~w.isfinite()).sum())} NaN or infinite values of {w.numel()}"
        )
    rows, size = (w.reshape(1, n * k), n * k) if per == "tensor" else (w, size)
    floats = scheme == "asymmetric" and zeros != "integer" and _floats(rows, size, bits, dtype, zeros)
    parts = [_quantize_rows(part, size, bits, scheme, refine, dtype, floats) for part in _parts(rows)]
    codes, scales, points = (torch.cat([part[i] for part in parts]) for i in range(3))
    return packed_weight(
        codes.view(n, k),
        bits,
        scales=scales.t().contiguous(),
        zeros=points.t().contiguous() if scheme == "asymmetric" else None,
        group=min(size, k),
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


def _check_words(scheme: str, per: str, refine: str, zeros: str) -> None:
    words = {
        "scheme": (scheme, ("symmetric", "asymmetric")),
        "per": (per, ("group", "channel", "tensor")),
        "refine": (refine, ("none", "hqq")),
        "zeros": (zeros, ("auto", "integer", "float")),
    }
    for name, (given, accepted) in words.items():
        if given not in accepted:
            raise ValueRangeError(f"{name} must be one of {accepted}, got {given!r}")
    if refine == "hqq" and scheme == "symmetric":
        raise Unsupported(
            "refine='hqq' moves zero points, which scheme='symmetric' does not have; use scheme='asymmetric'"
        )
    if zeros == "float" and scheme == "symmetric":
        raise Unsupported("zeros='float' needs scheme='asymmetric': scheme='symmetric' has no zero points")


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


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK // rows.shape[1])
    yield from (rows[i : i + step] for i in range(0, len(rows), step))


def _floats(rows: torch.Tensor, group: int, bits: int, dtype: torch.dtype, zeros: str) -> bool:
    """Whether some group takes a floating zero point, and with "auto" whether that pays."""
    if not any(bool(_one_sided(*_extremes(*_grouped(part, group))).any()) for part in _parts(rows)):
        return False
    before, after, some = 0.0, 0.0, False
    for part in _parts(rows):
        grouped, real = _grouped(part, group)
        whole = _whole_codes(grouped, bits, dtype)
        own, taken = _own_range(grouped, real, whole, bits, dtype)
        some = some or bool(taken.any())
        if zeros == "auto":
            lost = [squared_errors(grouped, scales, points, bits, real) for scales, points in (whole, own)]
            before, after = before + float(lost[0].sum()), after + float(lost[1].sum())
    return some and (zeros == "float" or after <= (1 - LEAST_GAIN) * before)


def _grouped(w: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, groups, group], zero past the last column, and bool [groups, group], true up to it."""
    n, k = w.shape
    groups = -(-k // group)
    grouped = torch.nn.functional.pad(w.float(), (0, groups * group - k)).view(n, groups, group)
    return grouped, (torch.arange(groups * group, device=w.device) < k).view(groups, group)


def _quantize_rows(
    w: torch.Tensor, group: int, bits: int, scheme: str, refine: str, dtype: torch.dtype, floats: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scales [N, groups] in dtype, zeros [N, groups]: uint8, or floats if refined or asked for."""
    n, k = w.shape
    grouped, real = _grouped(w, group)
    if scheme == "symmetric":
        scales = _round_up(grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5), dtype)
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8)
    else:
        scales, zeros = _whole_codes(grouped, bits, dtype)
        if floats:
            (scales, zeros), _ = _own_range(grouped, real, (scales, zeros), bits, dtype)
    if refine == "hqq":
        zeros = refine_zeros(grouped, scales, zeros, bits, real, _of_zeros(dtype))
    codes = nearest_codes(grouped, scales.float(), zeros.float(), bits).to(torch.uint8)
    return codes.view(n, -1)[:, :k], scales, zeros


def _whole_codes(grouped: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in dtype and zero points uint8 of ranges that hold 0; the padding behind a row, 0, changes none of them."""
    largest = 2**bits - 1
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    scales = _round_up(high / largest - low / largest, dtype)  # the difference itself may overflow
    return scales, (-low / scales.float()).round().clamp(0, largest).to(torch.uint8)


def _own_range(
    grouped: torch.Tensor, real: torch.Tensor, whole: tuple[torch.Tensor, torch.Tensor], bits: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Scales and floating zero points, those of `whole` but for groups on one side of 0 that lose less over their own range, and
    which groups those are [N, groups].  A zero point whose rounding would move the grid by more than half a step is not taken."""
    largest, of_zeros = 2**bits - 1, _of_zeros(dtype)
    low, high = _extremes(grouped, real)
    scales = _round_up(high / largest - low / largest, dtype)
    exact = -low / scales.float()
    zeros = exact.to(of_zeros)
    taken = _one_sided(low, high) & (high > low) & ((zeros.float() - exact).abs() <= 0.5)
    if bool(taken.any()):
        safe = torch.where(taken, zeros, 0.0)
        lost = [squared_errors(grouped, one, z, bits, real) for one, z in (whole, (scales, safe))]
        taken &= lost[1] < lost[0]
    return (torch.where(taken, scales, whole[0]), torch.where(taken, zeros, whole[1].to(of_zeros))), taken


def _extremes(grouped: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest weight of each group, without the padding."""
    return torch.where(real, grouped, torch.inf).amin(-1), torch.where(real, grouped, -torch.inf).amax(-1)


def _one_sided(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (low > 0) | (high < 0)


def _of_zeros(dtype: torch.dtype) -> torch.dtype:
    """Of floating zero points beside scales in dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


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
