"""Reads weights in bitsandbytes' NF4 layout: four bits that index a table of normal quantiles, a maximum a block, itself
quantised or not.

NF4: Tim Dettmers, Artidoro Pagnoni, Ari Holtzman, Luke Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS
2023, appendix E."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from .tensor import DTYPES, NAMED, QuantizedTensor, check_dtype, packed_weight
from .words import check_tensor

NF4_CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to [-1, 1], with an exact 0: seven below it, eight above (QLoRA, appendix E)."""
SETTINGS = ("shape", "blocksize", "nested_blocksize", "nested_offset")
LEAST_GROUP = 8  # below it the repeated scales outweigh the codes


def from_nf4(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    shape: tuple[int, int] | None = None,
    code: torch.Tensor | None = None,
    blocksize: int | None = None,
    nested_absmax: torch.Tensor | None = None,
    nested_code: torch.Tensor | None = None,
    nested_blocksize: int | None = None,
    nested_offset: float | None = None,
    quant_state: torch.Tensor | Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """The weight [N, K] of a bitsandbytes 4-bit layer: W.flatten()[i] = code[nibble i] * absmax[i // blocksize], in fp32.

    packed: uint8, ceil(N K / 2) of them in any shape; two numbers a byte, the first in the high nibble (`weight`).
    absmax: fp32 [blocks], or uint8 [blocks] with nested quantisation: absmax[b] = nested_code[absmax[b]] * nested_absmax[b //
    nested_blocksize] + nested_offset; nested_absmax fp32, nested_code fp32 [256] (`weight.absmax`, `weight.nested_absmax`,
    `weight.nested_quant_map`).
    code: fp32 [16], NF4_CODE by default (`weight.quant_map`).
    quant_state: what the checkpoint keeps as `weight.quant_state.bitsandbytes__nf4`, JSON in uint8 or the mapping in it; it gives
    shape, blocksize, nested_blocksize, nested_offset and dtype where they are not given (else: 64, 256, 0.0, float16).

    Blocks run over the flattened weight.  Where they cross rows (K no multiple of blocksize) groups are the greatest common
    divisor of both, with scales repeated: the same numbers.  Below 8 columns that is refused (Unsupported).
    Raises DtypeError, ShapeError, DeviceError, ValueRangeError, each naming the argument."""
    state = _read_state(quant_state)
    given = dict(zip(SETTINGS, (shape, blocksize, nested_blocksize, nested_offset), strict=True))
    known = {"blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.0, **state}
    known |= {name: value for name, value in given.items() if value is not None}
    n, k = _check_shape(known.get("shape"))
    for name in ("blocksize", "nested_blocksize"):
        if type(known[name]) is not int or known[name] < 1:
            raise ValueRangeError(f"{name} must be an integer from 1 on, got {known[name]!r}")
    device, block = packed.device, known["blocksize"]
    dtype = state.get("dtype", torch.float16) if dtype is None else dtype
    check_dtype("dtype", dtype, DTYPES)
    check_tensor("packed", packed.reshape(-1), (torch.uint8,), (-(-n * k // 2),), device)
    blocks = -(-n * k // block)
    check_tensor("absmax", absmax, (torch.float32, torch.uint8), (blocks,), device)
    if absmax.dtype == torch.uint8:
        absmax = _unnest(absmax, nested_absmax, nested_code, known["nested_blocksize"], float(known["nested_offset"]))
    elif nested_absmax is not None or nested_code is not None:
        raise DtypeError(f"absmax must be uint8 where nested_absmax or nested_code is given, got {absmax.dtype}")
    table = torch.tensor(NF4_CODE, device=device) if code is None else code
    check_tensor("code", table, (torch.float32,), (16,), device)
    group = math.gcd(k, block)  # of columns that lie in one row and one block
    if group < min(LEAST_GROUP, k):
        raise Unsupported(
            f"blocksize = {block} and K = {k} share only {group} columns; give the weight in bf16 and quantise it anew"
        )
    packed = packed.reshape(-1)
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten()[: n * k].view(n, k)
    rows, groups = (torch.arange(size, device=device) for size in (n, k // group))
    first = rows[None, :] * k + groups[:, None] * group
    scales = absmax[first // block].contiguous()
    return packed_weight(codes, 4, scales=scales, table=table, group=group, scheme="table", dtype=dtype)


def _check_shape(shape: Any) -> tuple[int, int]:
    if shape is None:
        raise ValueRangeError("shape must be given, as (N, K) or in quant_state, got None")
    if len(shape) != 2 or min(shape) < 1:
        raise ShapeError(f"shape must be (N, K), both at least 1, got {tuple(shape)}")
    return int(shape[0]), int(shape[1])


def _read_state(quant_state: torch.Tensor | Mapping[str, Any] | None) -> dict[str, Any]:
    """shape, blocksize, dtype and the nested values of a bitsandbytes quant_state, as far as it has them."""
    if quant_state is None:
        return {}
    if isinstance(quant_state, torch.Tensor):
        try:
            quant_state = json.loads(bytes(quant_state.cpu().tolist()))
        except (ValueError, TypeError) as error:
            raise ValueRangeError(f"quant_state must be JSON in uint8: {error}") from error
    if not isinstance(quant_state, Mapping):
        raise ValueRangeError(f"quant_state must hold a JSON object, got {quant_state!r}")
    if quant_state.get("quant_type", "nf4") != "nf4":
        raise Unsupported(f"quant_state must have quant_type 'nf4', got {quant_state['quant_type']!r}")
    state = {name: quant_state[name] for name in SETTINGS if quant_state.get(name) is not None}
    if "dtype" in quant_state:
        if quant_state["dtype"] not in NAMED:
            raise DtypeError(f"quant_state must have a dtype of {sorted(NAMED)}, got {quant_state['dtype']!r}")
        state["dtype"] = NAMED[quant_state["dtype"]]
    return state


def _unnest(
    absmax: torch.Tensor, scale: torch.Tensor | None, code: torch.Tensor | None, block: int, offset: float
) -> torch.Tensor:
    """fp32 [blocks] from uint8 [blocks]: code[absmax] * scale of the block of blocks + offset, in fp32."""
    if scale is None or code is None:
        missing = "nested_absmax" if scale is None else "nested_code"
        raise ValueRangeError(f"{missing} must be given where absmax is uint8, got None")
    blocks = absmax.shape[0]
    check_tensor("nested_absmax", scale, (torch.float32,), (-(-blocks // block),), absmax.device)
    check_tensor("nested_code", code, (torch.float32,), (256,), absmax.device)
    return code[absmax.int()] * scale.repeat_interleave(block)[:blocks] + offset
