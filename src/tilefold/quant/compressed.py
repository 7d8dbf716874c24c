"""Reads weights in the layout "pack-quantized" of compressed-tensors (vLLM project), the format that llm-compressor writes."""

import torch

from ..errors import ShapeError, ValueRangeError
from .packing import check_bits
from .tensor import DTYPES, QuantizedTensor
from .words import build, check_tensor, column_order, read_fields, read_stream

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
    dense: bool | None = None,
) -> QuantizedTensor:
    """The weight [N, K] of a "pack-quantized" layer: W[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g], q signed.

    weight_packed: int32 [N, words]; q + 2**(bits - 1) along K, lowest bits first, 32 // bits to a word.
    weight_shape: (N, K).
    dense: at 3 bits, newer releases lay codes end to end, ceil(3 K / 32) words, some across a word's end (True), older ones ten
    to a word, two bits unused, ceil(K / 10) words (False).  None: as the words' number says, for every K above 150.
    strategy: "tensor": weight_scale has one element; "channel": [N, 1]; "group": [N, groups], k // group or weight_g_idx[k] being
    the group of a column (all -1 means that there is none).
    weight_zero_point: None for 0, int8 like weight_scale, or int32 [words, groups], packed along N like the codes.
    group: columns of a group, needed only if K is no multiple of the number of groups.  dtype: as in `from_gptq`.

    Raises DtypeError, ShapeError, DeviceError, ValueRangeError, each naming the argument."""
    check_bits(bits)
    if strategy not in STRATEGIES:
        raise ValueRangeError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    sizes = weight_shape.tolist() if isinstance(weight_shape, torch.Tensor) else list(weight_shape)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ShapeError(f"weight_shape must be (N, K), both at least 1, got {sizes}")
    n, k = (int(size) for size in sizes)
    device = weight_packed.device
    dense = _is_dense(weight_packed, bits, k, dense)
    check_tensor("weight_packed", weight_packed, (torch.int32,), (n, _words(k, bits, dense)), device)
    rows, groups = _scale_shape(weight_scale, strategy, n)
    scales = weight_scale.reshape(rows, groups)
    check_tensor("weight_scale", scales, DTYPES, (rows, groups), device)
    zeros = None if weight_zero_point is None else _zero_points(weight_zero_point, bits, dense, rows, groups)
    if weight_g_idx is not None and bool((weight_g_idx == -1).all()):
        weight_g_idx = None
    if strategy != "group":
        if weight_g_idx is not None or group is not None:
            name = "group" if weight_g_idx is None else "weight_g_idx"
            raise ValueRangeError(f"{name} goes with strategy='group', got it with {strategy!r}")
        perm, size = None, k
    else:
        perm, size = column_order(weight_g_idx, "weight_g_idx", k, groups, group, device)
    codes = _read(weight_packed, bits, k, dense)
    return build(codes.contiguous(), scales.t(), None if zeros is None else zeros.t(), bits, size, dtype, perm)


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


def _words(count: int, bits: int, dense: bool) -> int:
    """int32 words that hold `count` values."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def _is_dense(packed: torch.Tensor, bits: int, k: int, dense: bool | None) -> bool:
    """Whether codes lie end to end; raises ValueRangeError where neither the argument nor the number of words says so."""
    if bits != 3 or k <= 10:
        return False  # both layouts are the same
    if dense is None and packed.dim() == 2:
        sizes = {_words(k, bits, kind): kind for kind in (False, True)}
        if len(sizes) == 1:
            raise ValueRangeError(f"dense must be True or False where K = {k} makes as many words either way, got None")
        return sizes.get(packed.shape[1], True)
    return bool(dense)


def _read(words: torch.Tensor, bits: int, count: int, dense: bool) -> torch.Tensor:
    """Values uint8 [R, count] along the rows of words int32 [R, W]."""
    return read_stream(words.t(), bits, count).t() if dense else read_fields(words, bits, count)


def _zero_points(zeros: torch.Tensor, bits: int, dense: bool, rows: int, groups: int) -> torch.Tensor:
    """Zero points of unsigned codes, uint8 [rows, groups]."""
    device = zeros.device
    if zeros.dtype == torch.int32:
        check_tensor("weight_zero_point", zeros, (torch.int32,), (_words(rows, bits, dense), groups), device)
        return _read(zeros.t(), bits, rows, dense).t()
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
