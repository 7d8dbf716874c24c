"""A whole model's linear layers in few bits, in place, one after the other."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, cast

import torch
from torch import nn

from ..errors import DeviceError, TilefoldError, ValueRangeError
from ..quant import QuantizedTensor, quantize_weight
from ..quant.packing import packed_shapes
from ..quant.tensor import DTYPES
from .bare import HOOKS
from .lowbit import LowBitLinear
from .quantize_report import LayerReport, QuantizeReport, Skipped, model_bytes, output_error, weight_error

Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""A name, an end of names or a glob, several of these, or a predicate (name, module)."""

TIED = ("skip", "quantize")
ROWS = 256  # of a layer's inputs that are kept to measure its outputs' error


@dataclass(frozen=True, slots=True)
class Found:
    """A linear layer: all names that the model has for it, and its weight as [N, K]."""

    names: tuple[str, ...]
    module: nn.Module

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: transformers' Conv1D keeps it the other way round."""
        weight = cast(torch.Tensor, self.module.weight)
        return weight.t() if is_conv1d(self.module) else weight


def quantize(
    model: nn.Module,
    bits: int = 4,
    group: int | EllipsisType | None = ...,
    *,
    skip: Skip = (),
    scheme: str = "asymmetric",
    per: str = "group",
    refine: str | None = None,
    dtype: torch.dtype | None = None,
    zeros: str = "auto",
    tied: str = "skip",
    device: torch.device | str | None = None,
    inputs: Any = None,
    progress: bool = True,
) -> QuantizeReport:
    """Replace the linear layers of a model, in place, by `LowBitLinear`s; what was done and skipped, with errors and bytes.

    bits, group, scheme, per, refine (None or "hqq"), dtype, zeros: as for `tilefold.quant.quantize_weight`; group: 128 if not
    given.
    skip: names to leave alone: a name, a part of names' ends ("lm_head"), a name that others lie under ("encoder.layer.0"),
    a glob over whole names ("*.mlp.*"), several of those, or a predicate (name, module) -> bool.  A pattern that matches no
    linear layer raises.
    tied: "skip" leaves a layer alone whose weight is also an embedding's (an lm_head): in few bits it would be a second copy
    beside the embedding, more memory, not less; "quantize" makes that copy, for speed.  Linear layers that share one weight
    share one quantised weight.
    device: move the model there, layer by layer: a weight arrives, is rounded there, and only its codes stay, so that a model
    larger than the device's memory in its own dtype can be quantised from the CPU.  None: everything stays where it is.
    inputs: one batch for the model (a tensor, a tuple of arguments, or a dict of named ones): it runs once before, where the
    model lies, and the report has the relative error of every layer's outputs on the inputs that the layer saw.
    progress: a bar on the terminal, where rich is installed.

    Replaced: torch.nn.Linear itself and transformers' Conv1D, trained or not.  Left alone, and named in the report: what `skip`
    says, subclasses of Linear and layers under torch's own attention and transformer modules (they read the weight by
    themselves), layers with hooks or parametrisations, weights of other dtypes than fp16, bf16 and fp32, and layers that would
    be larger than before.  Buffers and parameters of everything else stay as they are.

    Raises ValueRangeError (skip, tied, a weight that is not finite, with the layer's name) and what quantize_weight raises;
    layers before the one that raised are quantised then."""
    if not isinstance(model, nn.Module) or type(model) is nn.Linear:
        raise ValueRangeError(
            f"model must be a module that holds linear layers (LowBitLinear.from_linear takes one), got {type(model).__name__}"
        )
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError) as wrong:
            raise DeviceError(f"device must be one that torch has here, got {device!r}: {wrong}") from wrong
    if tied not in TIED:
        raise ValueRangeError(f"tied must be one of {TIED}, got {tied!r}")
    refined = "none" if refine is None else refine
    options: dict[str, Any] = {"scheme": scheme, "per": per, "refine": refined, "dtype": dtype, "zeros": zeros}
    quantize_weight(
        torch.zeros(1, 64), bits, group, **options | {"dtype": dtype or torch.float32}
    )  # raises now if ever
    found = linear_layers(model)
    wanted, skipped = chosen(model, found, skip, tied, bits)
    before, seen = model_bytes(model), captured(model, wanted, inputs)
    keys = [id(layer.module.weight) for layer in wanted]  # while all are there: no two weights have one id
    done: dict[int, QuantizedTensor] = {}
    reports = []
    found.clear()  # what is replaced must be gone
    wanted.reverse()
    with bar(len(wanted), progress) as step:
        for key in keys:
            layer = wanted.pop()
            step(layer.name)
            reports.append(replaced(model, layer, (bits, group, options), device, (key, done), seen.get(layer.name)))
    if device is not None:
        model.to(device)
    return QuantizeReport(tuple(reports), tuple(skipped), before, model_bytes(model))


def replaced(
    model: nn.Module,
    layer: Found,
    how: tuple[int, int | EllipsisType | None, dict[str, Any]],
    device: torch.device | str | None,
    weights: tuple[int, dict[int, QuantizedTensor]],
    inputs: torch.Tensor | None,
) -> LayerReport:
    """Quantise one layer and put it into the model; weights: a key for its weight, and what such weights have become so far."""
    (bits, group, options), (key, done) = how, weights
    given = layer.weight.detach()
    weight = given if device is None else given.to(device)
    shared = key in done
    if not shared:
        try:
            done[key] = quantize_weight(weight, bits, group, **options)
        except TilefoldError as error:
            raise type(error)(f"{layer.name}: {error}") from error
    made, bias = done[key], cast(torch.Tensor | None, layer.module.bias)
    replace_layer(model, layer, LowBitLinear(made, None if bias is None else bias.detach().to(made.device)))
    return LayerReport(
        name=layer.name,
        shape=made.shape,
        bits=bits,
        before=0 if shared else given.nbytes,
        after=0 if shared else made.nbytes,
        weight_error=weight_error(weight, made),
        output_error=None if inputs is None else output_error(inputs.to(weight.device), weight, made),
        shares=shared,
    )


def replace_layer(model: nn.Module, layer: Found, new: LowBitLinear) -> None:
    """Put a layer in place of another under all of its names."""
    new.train(layer.module.training)
    for name in layer.names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)


# --- which layers ------------------------------------------------------------------------------------------------------------


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D (GPT-2's linear layer), without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def linear_layers(model: nn.Module) -> list[Found]:
    """Every linear layer once, with all its names, in the model's order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) or is_conv1d(module):
            names.setdefault(module, []).append(name)
    return [Found(tuple(each), module) for module, each in names.items()]


def chosen(model: nn.Module, found: list[Found], skip: Skip, tied: str, bits: int) -> tuple[list[Found], list[Skipped]]:
    """Those to quantise, and those not, with why."""
    asked = skipping(skip, found)
    linear = {id(layer.module) for layer in found}
    elsewhere: dict[int, str] = {}
    for name, module in model.named_modules():
        if id(module) not in linear:
            elsewhere.update({id(p): f"{name}.{key}".strip(".") for key, p in module.named_parameters(recurse=False)})
    wanted, skipped = [], []
    for layer in found:
        owner = elsewhere.get(id(layer.module.weight)) if tied == "skip" else None
        why = "as asked" if asked(layer) else obstacle(model, layer, bits)
        if why is None and owner is not None:
            why = f'its weight is {owner}, too: in few bits it would be a second copy (tied="quantize" makes it)'
        if why is None:
            wanted.append(layer)
        else:
            skipped.append(Skipped(layer.name, why))
    return wanted, skipped


def obstacle(model: nn.Module, layer: Found, bits: int) -> str | None:
    """Why a layer cannot, or should not, be replaced."""
    module, weight = layer.module, layer.weight
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"{type(module).__name__} is a class of its own, which may use its weight in other ways"
    for name in layer.names:
        parts = name.split(".")
        for end in range(len(parts)):
            parent = model.get_submodule(".".join(parts[:end]))
            if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                return f"torch's {type(parent).__name__} reads the weight by itself"
    if any(getattr(module, name) for name in HOOKS) or hasattr(module, "parametrizations"):
        return "it has hooks or parametrisations, which a new layer would lose"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    if weight.device.type == "meta":
        return "its weight is on the meta device: it has no values"
    if 0 in weight.shape:
        return f"its weight is empty, {list(weight.shape)}"
    codes = sum(4 * torch.Size(size).numel() for size in packed_shapes(bits, (weight.shape[0], weight.shape[1])))
    if codes >= weight.nbytes:
        return f"in {bits} bits, padded to whole tiles, it would be larger ({codes} bytes, now {weight.nbytes})"
    return None


def skipping(skip: Skip, found: list[Found]) -> Callable[[Found], bool]:
    """Whether a layer is to be left alone by the caller's wish.  ValueRangeError for a pattern that matches no layer."""
    if isinstance(skip, type):
        raise ValueRangeError(
            f"skip must be names, globs or a predicate of (name, module), got the class {skip.__name__}"
        )
    if callable(skip):
        predicate: Callable[[str, nn.Module], bool] = skip
        return lambda layer: any(predicate(name, layer.module) for name in layer.names)
    if not isinstance(skip, Iterable):
        raise ValueRangeError(f"skip must be names, globs or a predicate, got {skip!r}")
    patterns = [skip] if isinstance(skip, str) else list(skip)

    def matches(pattern: str, name: str) -> bool:
        under = name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
        return under or fnmatch.fnmatchcase(name, pattern)

    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueRangeError(f"skip must be names, globs or a predicate, got {pattern!r}")
        if not any(matches(pattern, name) for layer in found for name in layer.names):
            some = ", ".join(layer.name for layer in found[:6])
            raise ValueRangeError(f"skip {pattern!r} matches no linear layer; there are {len(found)}: {some} ...")
    return lambda layer: any(matches(pattern, name) for pattern in patterns for name in layer.names)


def captured(model: nn.Module, layers: list[Found], inputs: Any) -> dict[str, torch.Tensor]:
    """Up to ROWS rows of what each layer gets as the model runs over `inputs`; nothing without them."""
    if inputs is None:
        return {}
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].detach().flatten(0, -2)
            some = rows[:: max(1, -(-rows.shape[0] // ROWS))].clone()
            seen[name] = torch.cat([seen[name], some])[:ROWS] if name in seen else some

        return hook

    handles = [layer.module.register_forward_pre_hook(keep(layer.name)) for layer in layers]
    modes = {module: module.training for module in model.modules()}  # parts of a model may have modes of their own
    try:
        with torch.no_grad():
            model.eval()
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    finally:
        for module, training in modes.items():
            module.training = training
        for handle in handles:
            handle.remove()
    return seen


@contextmanager
def bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar of so many steps, where rich is installed -> step(what is done now)."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        shown = False
    if not shown:
        yield lambda name: None
        return
    what = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("quantising"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), what)
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown_bar:
        task = shown_bar.add_task("", total=total, completed=-1)

        def step(name: str) -> None:
            shown_bar.update(task, description=name, advance=1)

        yield step
