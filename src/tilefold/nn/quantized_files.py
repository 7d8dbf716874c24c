"""Files of quantised models: `save_quantized` and `load_quantized`."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import Unsupported, ValueRangeError
from ..quant import QuantizedTensor
from .convert import linear_layers, replace_layer
from .lowbit import LowBitLinear, holds_weight


def save_quantized(model: nn.Module, path: str | Path) -> None:
    """Write a model's state_dict as one safetensors file; tensors that several names share are written once.

    Needs the package safetensors.  `load_quantized` reads it."""
    _check_model(model)
    save_file = safetensors_torch().save_file
    first: dict[tuple[Any, ...], str] = {}
    tensors, other = {}, {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            raise Unsupported(
                f"{name} in the model's state_dict is a {type(tensor).__name__}; safetensors holds tensors only"
            )
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            other[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.contiguous()
    save_file(tensors, str(path), metadata={"format": "pt", **{f"same:{name}": kept for name, kept in other.items()}})


def load_quantized(
    model: nn.Module,
    source: str | Path | Mapping[str, torch.Tensor],
    *,
    device: torch.device | str | None = None,
    assign: bool = False,
) -> nn.Module:
    """Load a quantised model's weights into a model built afresh, its linear layers still as they were; the model itself.

    source: a state_dict, or a file: .safetensors as `save_quantized` writes it, else what torch.save wrote.
    Where the source holds the codes of a layer, the model's Linear gives way to a LowBitLinear; everything else is loaded as
    `load_state_dict` does it.  device: where the model is to lie (None: where its parameters lie now).  assign: take the
    source's tensors themselves, as for a model on the meta device.

    Raises ValueRangeError for what is missing, left over or of another shape, with the names."""
    _check_model(model)
    if not isinstance(source, str | Path | Mapping):
        raise ValueRangeError(f"source must be a state_dict or an existing file, got {type(source).__name__}")
    state = dict(source) if isinstance(source, Mapping) else read_tensors(Path(source))
    ready: dict[int, QuantizedTensor] = {}  # by address: layers that share a weight in the source share it again
    for layer in linear_layers(model):
        held = [name for name in layer.names if holds_weight(state, f"{name}.")]
        if not held:
            continue
        given, old = QuantizedTensor.from_state(state, f"{held[0]}."), layer.weight
        if given.shape != tuple(old.shape):
            raise ValueRangeError(f"{held[0]} is {list(old.shape)} in the model, {list(given.shape)} in the source")
        keep = assign or old.device.type == "meta"
        weight = ready.setdefault(given.packed.data_ptr(), given if keep else copy.deepcopy(given).to(old.device))
        bias = state.get(f"{held[0]}.bias")
        replace_layer(
            model, layer, LowBitLinear(weight, None if bias is None else bias.to(weight.device, copy=not keep))
        )
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        raise ValueRangeError(f"source does not fit the model: {error}") from error
    loaded = {id(t) for name, t in _tensors(model) if name in state}
    missing = [name for name, t in _tensors(model) if name in set(missing) and id(t) not in loaded]
    if missing or unexpected:
        raise ValueRangeError(f"source does not fit the model: missing {missing[:8]}, left over {list(unexpected)[:8]}")
    empty = [name for name, t in _tensors(model) if t.device.type == "meta"]
    if empty:
        raise ValueRangeError(
            f"{empty[:8]} are still on the meta device: the source does not hold them (with assign=True it fills what it holds); "
            f"build the model on a real device"
        )
    return model if device is None else model.to(device)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueRangeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name."""
    if not path.is_file():
        raise ValueRangeError(f"source must be a state_dict or an existing file, got {str(path)!r}")
    if path.suffix != ".safetensors":
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    tensors: dict[str, torch.Tensor] = safetensors_torch().load_file(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        same = {key[5:]: kept for key, kept in (file.metadata() or {}).items() if key.startswith("same:")}
    return tensors | {name: tensors[kept] for name, kept in same.items()}


def safetensors_torch() -> Any:
    """The module safetensors.torch; Unsupported if it is not installed."""
    try:
        from safetensors import torch as found
    except ModuleNotFoundError:
        raise Unsupported(
            "files need the Python package 'safetensors'; install it with: pip install safetensors"
        ) from None
    return found
