"""The parameters that `sparsify(.., trainable=True)` adds: listed, saved and loaded apart from the dense weights."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import DtypeError, ShapeError, ValueRangeError
from ..nn.quantized_files import read_tensors, safetensors_torch
from .model import BRANCH, sparse_of

_GATE = re.compile(r"blocks\.(\d+)\.(?:attn1\.)?to_gate_compress\.(weight|bias)$")

Source = str | Path | Mapping[str, torch.Tensor]
"""A safetensors file, a folder of such files, or tensors by name."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What `sparsify(model, trainable=True)` added, by name: "layers.0.gate.weight" [heads * dim, channels] and
    "layers.0.gate.bias" [heads * dim], layers in the order of `Sparse.layers`.

    Raises ValueRangeError if the model is not sparse and trainable."""
    sparse = sparse_of(model)
    if sparse is None or not sparse.trainable:
        raise ValueRangeError("model has no gates to be trained: tilefold.video.sparsify(model, trainable=True) first")
    return {
        f"layers.{number}.{name}": one
        for number, layer in enumerate(sparse.layers)
        for name, one in getattr(layer, BRANCH).named_parameters()
    }


def save_trained(model: nn.Module, path: str | Path) -> None:
    """Write `trainable_parameters` as a safetensors file; needs the package safetensors.  Dense weights are not in it.

    Parameters that FSDP2 sharded are gathered: every rank calls, and rank 0 writes."""
    tensors, sharded = {}, False
    for name, one in trainable_parameters(model).items():
        whole: Any = one.detach()
        if hasattr(whole, "full_tensor"):
            whole, sharded = whole.full_tensor(), True
        tensors[name] = whole.contiguous()
    if not sharded or torch.distributed.get_rank() == 0:
        safetensors_torch().save_file(tensors, str(path), metadata={"format": "pt"})


def load_trained(model: nn.Module, source: Source) -> None:
    """Load what `save_trained` wrote, a file or its tensors by name, into a trainable sparse model.

    Raises ValueRangeError for names that are missing or left over, ShapeError for another shape; nothing is loaded then."""
    _load(model, _tensors(source))


def load_fastvideo_gates(model: nn.Module, source: Source) -> None:
    """Load the gates of a model that FastVideo trained with VSA: to_gate_compress of every block.

    source: a state_dict, a safetensors file, or a folder of such files.  Names are blocks.N.to_gate_compress.weight and .bias,
    with any prefix, and attn1 before to_gate_compress or not; all other tensors are passed over.  Block N is layer N.  Dense
    weights are loaded by whoever made the model.  FastVideo's cubes are (4, 4, 4): sparsify with that cube and `Pooled`.

    Raises as `load_trained`.

    Source: https://github.com/hao-ai-lab/FastVideo, WanTransformerBlock_VSA."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(source).items():
        match = _GATE.search(name)
        if match is not None:
            found[f"layers.{match[1]}.gate.{match[2]}"] = tensor
    if not found:
        raise ValueRangeError(
            "source holds no blocks.N.to_gate_compress: it is no model that FastVideo trained with VSA"
        )
    _load(model, found)


def _load(model: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    mine = trainable_parameters(model)
    missing, left = sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
    if missing or left:
        raise ValueRangeError(f"source does not fit the model: missing {missing[:8]}, left over {left[:8]}")
    for name, one in mine.items():
        if given[name].shape != one.shape:
            raise ShapeError(f"source: {name} is {list(given[name].shape)}, but {list(one.shape)} in the model")
    with torch.no_grad():
        for name, one in mine.items():
            whole: Any = given[name].to(one.device, one.dtype)
            if hasattr(one, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, one.device_mesh, one.placements)  # type: ignore[attr-defined]
            one.copy_(whole)


def _tensors(source: Source) -> dict[str, torch.Tensor]:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        raise DtypeError(f"source must be tensors by name or a path, got {type(source).__name__}")
    path = Path(source)
    if not path.is_dir():
        return read_tensors(path)
    return {name: one for file in sorted(path.glob("*.safetensors")) for name, one in read_tensors(file).items()}
