"""Other libraries' products with weights of few bits.

Those that take our codes are judged as we are; those that round weights by themselves get the dequantised weight, and are judged
by what they have made of it."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tilefold.bench.family import Calls, Peer, absent, each
from tilefold.bench.matrix.eight import EightCase
from tilefold.bench.matrix.product import Call, product_of
from tilefold.errors import Unsupported

NF4_BLOCK = 64


def _refuses(module: str, bits: tuple[int, ...], dtypes: tuple[str, ...], groups: tuple[int, ...] = ()) -> Any:
    def refuses(case: Any, device: str) -> str | None:
        if isinstance(case, EightCase):
            return "multiplies 16-bit activations only"
        if why := absent(module, device, module):
            return why
        if case.bits not in bits:
            return f"has {', '.join(map(str, bits))} bits only"
        if groups and case.group not in groups:
            return f"has groups of {', '.join(map(str, groups))} only"
        return None if case.dtype in dtypes else f"takes {' and '.join(dtypes)} only"

    return refuses


def by_own_weight(
    make: Callable[[Any], tuple[Call, Callable[[torch.dtype], Tensor]]],
) -> Callable[[Sequence[Any]], Calls]:
    """A prepare that treats every set by itself, judged by the weight that the first one's call multiplies by.

    make: of a set -> (the call, its weight in a dtype)."""

    def prepare(sets: Sequence[Any]) -> Calls:
        made = [make(one) for one in sets]
        return Calls([call for call, _ in made], judge=product_of(sets[0].x, made[0][1]))

    return prepare


# --- torch's tinygemm -------------------------------------------------------------------------------------------------------


def tinygemm_parts(weight: Any) -> tuple[Tensor, Tensor]:
    """(codes as two a byte, [groups, N, 2] scales and zero points) as torch._weight_int4pack_mm has them.

    It computes (code - 8) scale + zero, so its zero is (8 - z) times our scale: the same weights, but for that one rounding."""
    codes = weight.codes()
    halves = (codes[:, ::2] << 4) | codes[:, 1::2]
    zeros = 8.0 if weight.zeros is None else weight.zeros.float()
    scales = weight.scales.float()
    both = torch.stack([scales, (8.0 - zeros) * scales], -1)
    return halves.to(torch.uint8), both.to(torch.bfloat16).contiguous()


def _tinygemm(inputs: Any) -> Call:
    if inputs.case.n % 8 or inputs.case.k % 128:
        raise Unsupported("takes N in multiples of 8 and K in multiples of 128")
    halves, both = tinygemm_parts(inputs.y)
    packed = torch.ops.aten._convert_weight_to_int4pack(halves, 8)
    x, group = inputs.x, inputs.case.group
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, group, both)


# --- torchao, GemLite, bitsandbytes -----------------------------------------------------------------------------------------


def _torchao(inputs: Any) -> tuple[Call, Callable[[torch.dtype], Tensor]]:
    quantization: Any = importlib.import_module("torchao.quantization")
    x, case = inputs.x, inputs.case
    config = {8: "Int8WeightOnlyConfig", 4: "Int4WeightOnlyConfig"}[case.bits]
    options = {"group_size": case.group} if case.bits == 4 else {}
    layer = torch.nn.Linear(case.k, case.n, bias=False, device=x.device, dtype=x.dtype)
    layer.weight = torch.nn.Parameter(inputs.y.dequantize(x.dtype), requires_grad=False)
    model = torch.nn.Sequential(layer)
    quantization.quantize_(model, getattr(quantization, config)(**options))
    weight = cast(Any, model[0].weight)
    return (lambda: model(x)), (lambda dtype: weight.dequantize().to(dtype))


def _gemlite(inputs: Any) -> Call:
    core: Any = importlib.import_module("gemlite.core")
    case, weight, dtype = inputs.case, inputs.y, inputs.x.dtype
    kind = core.DType.FP16 if case.dtype == "float16" else core.DType.BF16
    sizes = {"group_size": weight.group, "in_features": case.k, "out_features": case.n}
    layer = core.GemLiteLinear(case.bits, **sizes, input_dtype=kind, output_dtype=kind)
    zeros = torch.full_like(weight.scales, 2 ** (case.bits - 1)) if weight.zeros is None else weight.zeros
    rows = (t.t().contiguous().to(dtype).view(-1, 1) for t in (weight.scales, zeros))
    layer.pack(weight.codes(), *rows, None)
    return lambda: layer(inputs.x)


def _bitsandbytes(inputs: Any) -> tuple[Call, Callable[[torch.dtype], Tensor]]:
    library: Any = importlib.import_module("bitsandbytes")
    x, functional = inputs.x, library.functional
    packed, state = functional.quantize_4bit(inputs.y.dequantize(x.dtype), blocksize=NF4_BLOCK, quant_type="nf4")
    return (
        lambda: library.matmul_4bit(x, packed.t(), quant_state=state),
        lambda dtype: functional.dequantize_4bit(packed, state).to(dtype),
    )


HALVES = ("bfloat16", "float16")
# name, title, package or module, what, prepare, bits, dtypes and groups that it takes
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("tinygemm", "tinygemm", "torch", "torch._weight_int4pack_mm over the same codes", each(_tinygemm),
     (4,), HALVES[:1], (32, 64, 128, 256)),
    ("torchao", "torchao", "torchao", "torchao's weight-only layers, if installed, rounded by it", by_own_weight(_torchao),
     (8, 4), HALVES[:1]),
    ("gemlite", "GemLite", "gemlite", "GemLite over the same codes, if installed", each(_gemlite), (8, 4, 2), HALVES),
    ("bitsandbytes", "bitsandbytes", "bitsandbytes", "its NF4 product in blocks of 64, if installed, rounded by it",
     by_own_weight(_bitsandbytes), (4,), HALVES),
)  # fmt: skip
LIBRARIES = tuple(
    Peer(name, title, what, package, prepare, _refuses(package, *takes))
    for name, title, package, what, prepare, *takes in _ROWS
)
