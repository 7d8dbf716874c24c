"""Reads weights in the layouts of GPTQ (versions 1 and 2, act-order) and AWQ checkpoints.

GPTQ: Elias Frantar, Saleh Ashkboos, Torsten Hoefler, Dan Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", ICLR 2023; the checkpoint layout is AutoGPTQ's and GPTQModel's (`checkpoint_format` "gptq" is version
1, "gptq_v2" 2).
AWQ: Ji Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024; the layout
"gemm"."""

import torch

from ..errors import ShapeError, Unsupported, ValueRangeError
from .packing import check_bits
from .tensor import DTYPES, QuantizedTensor, check_dtype
from .words import build, check_tensor, column_order, group_size, read_fields, read_stream

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of the eight that each nibble of a word holds, lowest first


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    bits: int = 4,
    version: int = 1,
    group: int | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """The weight [N, K] of a GPTQ layer: W[n, k] = (code[k, n] - zero[g, n]) * scales[g, n] with g = g_idx[k].

    qweight: int32 [K * bits / 32, N]; codes down K end to end, lowest bits first (at 3 bits some cross a word's end).
    qzeros: int32 [groups, N * bits / 32]; zero points along N likewise; version 1 stores them minus one, modulo 2**bits; 2 as
    they are.  Without g_idx, K is as many codes as qweight can hold.
    scales: [groups, N].  g_idx: integers [K], the group of each column; None, or a plain one, for neighbours.  With act-order it
    becomes `perm`: columns are stored group by group, and `dequantize` puts them back.  That needs groups of equal size (the last
    may be shorter), which is how act-order makes them; other g_idx are refused.  group: columns of a group, needed only if K is
    no multiple of the number of groups and there is no g_idx.  dtype: what `dequantize` gives, scales' dtype by default.

    Zero points that are all 2**(bits - 1) make it "symmetric".  Raises DtypeError, ShapeError, DeviceError, ValueRangeError."""
    check_bits(bits)
    if version not in (1, 2):
        raise ValueRangeError(f"version must be 1 (zero points stored minus one) or 2, got {version!r}")
    groups, n = _two("scales", scales, DTYPES)
    rows, _ = _two("qweight", qweight, (torch.int32,))
    if g_idx is not None and g_idx.dim() != 1:
        raise ShapeError(f"g_idx must be [K], got {list(g_idx.shape)}")
    k = rows * 32 // bits if g_idx is None else g_idx.shape[0]
    check_tensor("qweight", qweight, (torch.int32,), (-(-k * bits // 32), n), qweight.device)
    check_tensor("scales", scales, DTYPES, (groups, n), qweight.device)
    check_tensor("qzeros", qzeros, (torch.int32,), (groups, -(-n * bits // 32)), qweight.device)
    perm, size = column_order(g_idx, "g_idx", k, groups, group, qweight.device)
    codes = read_stream(qweight, bits, k).t()
    zeros = read_stream(qzeros.t(), bits, n).t()
    if version == 1:
        zeros = (zeros + 1) & (2**bits - 1)
    return build(codes.contiguous(), scales, zeros, bits, size, dtype, perm)


def from_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int = 4,
    group: int | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """The weight [N, K] of an AWQ layer ("gemm"): W[n, k] = (code[k, n] - zero[g, n]) * scales[g, n] with g = k // group.

    qweight: int32 [K, N / 8]; qzeros: int32 [groups, N / 8]; scales: [groups, N].  A word holds eight neighbouring columns of N
    in nibbles, lowest first, in the order 0 2 4 6 1 3 5 7; zero points are stored as they are.  group: needed only if K is no
    multiple of the number of groups.  Raises Unsupported for other bits than 4, else as `from_gptq`."""
    if bits != 4:
        raise Unsupported(f"AWQ's layout is for bits = 4, got {bits!r}")
    groups, n = _two("scales", scales, DTYPES)
    k, _ = _two("qweight", qweight, (torch.int32,))
    if n % 8:
        raise ShapeError(f"scales must be [groups, N] with N a multiple of 8, got {list(scales.shape)}")
    check_tensor("qweight", qweight, (torch.int32,), (k, n // 8), qweight.device)
    check_tensor("qzeros", qzeros, (torch.int32,), (groups, n // 8), qweight.device)
    check_tensor("scales", scales, DTYPES, (groups, n), qweight.device)
    size = group_size(group, k, groups)
    codes = read_fields(qweight, 4, n, AWQ_ORDER).t()
    return build(codes.contiguous(), scales, read_fields(qzeros, 4, n, AWQ_ORDER), 4, size, dtype, None)


def _two(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """Both sizes of a matrix that is not empty."""
    check_dtype(name, tensor.dtype, dtypes)
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise ShapeError(f"{name} must be a matrix that is not empty, got {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]
