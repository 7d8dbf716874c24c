"""Reads weights in the layout "pack-quantized" of compressed-tensors (vLLM project), the format that llm-compressor writes."""

import torch

from ..errors import ShapeError, ValueRangeError
from .packing import check_bits
from .tensor import DTYPES, QuantizedTensor
from .words import build, check_tensor, column_order, group_size, read_fields

__all__ = ["from_compressed_tensors"]

STRATEGIES = ("tensor", "channel", "group")


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor | tuple[int, int],
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    bits: int = 4,
    strategy: str = "group",
    group: int | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """The weight [N, K] of a "pack-quantized" layer: W[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g], q signed.

    weight_packed: int32 [N, ceil(K / (32 // bits))]; q + 2**(bits - 1) along K, 32 // bits to a word, lowest bits first, none
    across a word's end (at 3 bits ten to a word, two bits unused).  weight_shape: (N, K).
    strategy: "tensor": weight_scale has one element; "channel": [N, 1]; "group": [N, groups], k // group or weight_g_idx[k] being
    the group of a column (all -1 means that there is none).
    weight_zero_point: None for 0, int8 like weight_scale, or int32 [ceil(N / (32 // bits)), groups], packed along N like the
    codes.
    group: columns of a group, needed only if K is no multiple of the number of groups.  dtype: as in `from_gptq`.

    Raises DtypeError, ShapeError, DeviceError, ValueRangeError, each naming the argument."""
    check_bits(bits)
    if strategy not in STRATEGIES:
        raise ValueRangeError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    sizes = weight_shape.tolist() if isinstance(weight_shape, torch.Tensor) else list(weight_shape)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ShapeError(f"weight_shape must be (N, K), both at least 1, got {sizes}")
    n, k = (int(size) for size in sizes)
    device, fields = weight_packed.device, 32 // bits
    check_tensor("weight_packed", weight_packed, (torch.int32,), (n, -(-k // fields)), device)
    rows, groups = _scale_shape(weight_scale, strategy, n)
    scales = weight_scale.reshape(rows, groups)
    check_tensor("weight_scale", scales, DTYPES, (rows, groups), device)
    zeros = None if weight_zero_point is None else _zero_points(weight_zero_point, bits, rows, groups, device)
    perm = None
    if weight_g_idx is not None and bool((weight_g_idx == -1).all()):
        weight_g_idx = None
    if strategy != "group":
        if weight_g_idx is not None or group is not None:
            name = "group" if weight_g_idx is None else "weight_g_idx"
            raise ValueRangeError(f"{name} goes with strategy='group', got it with {strategy!r}")
        size = k
    elif weight_g_idx is not None:
        check_tensor("weight_g_idx", weight_g_idx, (weight_g_idx.dtype,), (k,), device)
        perm, size = column_order(weight_g_idx, "weight_g_idx", groups, group)
    else:
        size = group_size(group, k, groups, "group")
    codes = read_fields(weight_packed, bits, k).contiguous()
    return build(codes, scales.t(), None if zeros is None else zeros.t(), bits, size, dtype, perm)


def _scale_shape(scale: torch.Tensor, strategy: str, n: int) -> tuple[int, int]:
    """(rows, groups) of the scales; raises ShapeError where the strategy does not allow their shape."""
    shape = tuple(scale.shape)
    if strategy == "tensor" and scale.numel() == 1:
        return 1, 1
    if strategy == "channel" and shape in ((n, 1), (n,)):
        return n, 1
    if strategy == "group" and len(shape) == 2 and shape[0] == n and shape[1] > 0:
        return n, shape[1]
    wanted = {"tensor": "one element", "channel": f"[{n}, 1]", "group": f"[{n}, groups]"}[strategy]
    raise ShapeError(f"weight_scale must be {wanted} for strategy={strategy!r}, got {list(shape)}")


def _zero_points(zeros: torch.Tensor, bits: int, rows: int, groups: int, device: torch.device) -> torch.Tensor:
    """Zero points of unsigned codes, uint8 [rows, groups]."""
    if zeros.dtype == torch.int32:
        check_tensor("weight_zero_point", zeros, (torch.int32,), (-(-rows // (32 // bits)), groups), device)
        return read_fields(zeros.t(), bits, rows).t()
    if zeros.numel() == rows * groups:
        zeros = zeros.reshape(rows, groups)
    check_tensor("weight_zero_point", zeros, (torch.int8, torch.int32), (rows, groups), device)
    middle = 2 ** (bits - 1)
    if int(zeros.min()) < -middle or int(zeros.max()) >= middle:
        raise ValueRangeError(
            f"weight_zero_point must be from {-middle} to {middle - 1} at {bits} bits, "
            f"got {int(zeros.min())} to {int(zeros.max())}"
        )
    shifted: torch.Tensor = zeros.to(torch.int16) + middle
    return shifted.to(torch.uint8)
