"""What `tilefold.quantize` did: layers with their errors, what was skipped and why, bytes before and after."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..quant import QuantizedTensor

HEAD = ("layers", "", "shape", "bits", "MB before", "MB after", "weights' error", "worst", "outputs' error", "worst")
ROWS = 1 << 12  # of a weight that are compared at a time: no fp32 copy of all of it


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A layer that was quantised.  before, after: bytes of its weight; errors: ||difference|| / ||original||, of the weight,
    and of x weight^T over inputs x that the layer saw (None without inputs, or where none came to it).
    shares: its weight is another layer's too, which is where its bytes are counted."""

    name: str
    shape: tuple[int, int]
    bits: int
    before: int
    after: int
    weight_error: float
    output_error: float | None = None
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Skipped:
    """A linear layer that was left alone, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """before, after: bytes of all parameters and buffers of the model, each counted once.  str() is a table, in which layers
    whose names differ in numbers only share a line."""

    layers: tuple[LayerReport, ...]
    skipped: tuple[Skipped, ...]
    before: int
    after: int

    def __str__(self) -> str:
        rows = [HEAD, *(_line(name, part) for name, part in _groups(self.layers))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        lines = ["  ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))).rstrip()
                 for r in rows]  # fmt: skip
        reasons: dict[str, list[str]] = {}
        for one in self.skipped:
            reasons.setdefault(one.why, []).append(one.name)
        for why, names in reasons.items():
            some = ", ".join(sorted({_pattern(name) for name in names}))
            lines.append(f"left alone ({len(names)}): {some}: {why}")
        ratio = f", {self.before / self.after:.2f} times less" if self.after else ""
        lines.append(f"the whole model: {_mega(self.before)} MB before, {_mega(self.after)} MB after{ratio}")
        return "\n".join(lines)


def _groups(layers: Sequence[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    found: dict[tuple[str, tuple[int, int]], list[LayerReport]] = {}
    for layer in layers:
        found.setdefault((_pattern(layer.name), layer.shape), []).append(layer)
    return [(part[0].name if len(part) == 1 else name, part) for (name, _), part in found.items()]


def _pattern(name: str) -> str:
    """The name with its numbers replaced by stars."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _line(name: str, part: Sequence[LayerReport]) -> tuple[str, ...]:
    n, k = part[0].shape
    weights = [layer.weight_error for layer in part]
    outputs = [layer.output_error for layer in part if layer.output_error is not None]
    shared = " (shared)" if all(layer.shares for layer in part) else ""
    return (
        name + shared,
        f"x{len(part)}" if len(part) > 1 else "",
        f"{n} x {k}",
        str(part[0].bits),
        _mega(sum(layer.before for layer in part)),
        _mega(sum(layer.after for layer in part)),
        *_figures(weights),
        *_figures(outputs),
    )


def _figures(errors: Sequence[float]) -> tuple[str, str]:
    """Mean and largest in percent."""
    if not errors:
        return "", ""
    return f"{100 * sum(errors) / len(errors):.3g} %", f"{100 * max(errors):.3g} %"


def _mega(size: int) -> str:
    return f"{size / 1e6:.3g}" if size < 1e8 else f"{size / 1e6:.0f}"


def model_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers; memory that several share is counted once."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        # On the meta device nothing has an address: the tensor itself stands for it.
        where = id(tensor) if tensor.device.type == "meta" else tensor.data_ptr()
        key = (tensor.device, where)
        sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return sum(sizes.values())


def weight_error(weight: torch.Tensor, made: QuantizedTensor) -> float:
    """||weight - dequantised|| / ||weight||; 0 where both are 0."""
    back = made.dequantize(torch.float32)
    lost = size = 0.0
    for start in range(0, weight.shape[0], ROWS):
        some = weight[start : start + ROWS].float()
        lost += float((some - back[start : start + ROWS]).double().square().sum())
        size += float(some.double().square().sum())
    return (lost / size) ** 0.5 if size else 0.0


def output_error(x: torch.Tensor, weight: torch.Tensor, made: QuantizedTensor) -> float:
    """||x weight^T - x dequantised^T|| / ||x weight^T||, in fp32; 0 where both are 0."""
    x = x.float()
    back = made.dequantize(torch.float32)
    want, got = x @ weight.float().t(), x @ back.t()
    size = float(want.double().norm())
    return float((got - want).double().norm()) / size if size else 0.0
