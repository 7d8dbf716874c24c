"""A linear layer over a weight of few bits: a drop-in for torch.nn.Linear where the weight is not trained."""

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from ..errors import DeviceError, DtypeError, ShapeError, TilefoldError, ValueRangeError
from ..ops.matrix.lowbit import lowbit_matmul
from ..quant import QuantizedTensor, quantize_weight
from ..quant.tensor import DTYPES, PLAIN, SHARED, TENSORS

META = "meta"


class LowBitLinear(nn.Module):
    """y = x weight^T + bias, x [..., K] in fp16, bf16 or fp32 to [..., N], by `tilefold.ops.lowbit_matmul`.

    weight: QuantizedTensor [N, K].  bias: [N] in a float dtype, or None.

    The weight's tensors are buffers named as its fields, so `.to`, `.half` and deepcopy move them; a state_dict has them and
    `meta`, which is `QuantizedTensor.state(prefix)`.  Loading takes over whatever weight of the same [N, K] the state holds, in
    other bits, groups or another scheme, too: in place where every tensor fits, so that captured CUDA graphs go on.  The weight
    is frozen: x gets a gradient, codes and scales have none; bias is a parameter that starts frozen, too.
    `.half()`, `.to(dtype)` round the scales (and say so where that loses one); zero points and tables keep their dtype.

    Raises ShapeError, DtypeError, DeviceError naming bias."""

    bias: nn.Parameter | None
    packed: torch.Tensor
    scales: torch.Tensor
    _plain: tuple[tuple[str, Any], ...]
    _kept: QuantizedTensor | None

    def __init__(self, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(weight, QuantizedTensor):
            raise DtypeError(
                f"weight must be a quant.QuantizedTensor, got {type(weight).__name__}; LowBitLinear.from_linear takes a Linear"
            )
        self._take(weight)
        if bias is None:
            self.register_parameter("bias", None)
            return
        if not isinstance(bias, torch.Tensor):
            raise DtypeError(f"bias must be a torch.Tensor or None, got {type(bias).__name__}")
        if tuple(bias.shape) != (self.out_features,):
            raise ShapeError(f"bias must be [N] = [{self.out_features}], got {list(bias.shape)}")
        if not bias.is_floating_point():
            raise DtypeError(f"bias must be of a float dtype, got {bias.dtype}")
        if bias.device != weight.device:
            raise DeviceError(f"bias must lie on {weight.device} like weight, got {bias.device}")
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int = 4, group: int | EllipsisType | None = ..., **options: Any
    ) -> "LowBitLinear":
        """The layer with its weight rounded; options as for `tilefold.quant.quantize_weight`.  The bias is shared, not copied."""
        if not isinstance(linear, nn.Linear):
            raise DtypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        made = cls(quantize_weight(linear.weight, bits, group, **options), linear.bias)
        return made.train(linear.training)

    @classmethod
    def from_state(
        cls, state: Mapping[str, torch.Tensor], prefix: str = "", bias: torch.Tensor | None = None
    ) -> "LowBitLinear":
        """From `state_dict()`'s entries of one layer; bias: state[prefix + "bias"] if not given and there."""
        return cls(QuantizedTensor.from_state(state, prefix), state.get(prefix + "bias") if bias is None else bias)

    @property
    def weight(self) -> QuantizedTensor:
        """The weight: the buffers, with what they mean.  It has shape, dtype and device as a tensor has, and `dequantize`."""
        if not torch.compiler.is_compiling():
            kept, held = self._kept, self._buffers
            if kept is not None and (
                kept.packed is held["packed"]
                and kept.packed_high is held["packed_high"]
                and kept.scales is held["scales"]
                and kept.zeros is held["zeros"]
                and kept.table is held["table"]
                and kept.perm is held["perm"]
            ):  # written out: this is a good part of what an eager call costs the host
                return kept
        made = QuantizedTensor(**{name: getattr(self, name) for name in TENSORS}, **dict(self._plain))
        if not torch.compiler.is_compiling():
            self._kept = made
        return made

    @property
    def out_features(self) -> int:
        """N."""
        return int(dict(self._plain)["shape"][0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(dict(self._plain)["shape"][1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lowbit_matmul(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        weight = self.weight
        groups = SHARED.get(weight.per, f"group={weight.group}")
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={weight.bits}, {groups}, {weight.scheme}, {str(weight.dtype).removeprefix('torch.')}"
        )

    def _take(self, weight: QuantizedTensor) -> None:
        """Hold this weight from now on."""
        for name in TENSORS:
            self.register_buffer(name, getattr(weight, name))
        self._plain = tuple((name, getattr(weight, name)) for name in PLAIN)
        self._kept = weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LowBitLinear":
        """What `.to`, `.half`, `.cuda` and their kin do.  Only the scales change their dtype."""
        weight = self.weight
        dtype = fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype
        if dtype not in DTYPES:
            raise DtypeError(f"a LowBitLinear can be moved to float16, bfloat16 or float32, not to {dtype}")
        if fn(weight.scales[:0]).dtype != weight.scales.dtype and weight.device.type != "meta":
            weight.to(dtype=dtype)  # raises where a scale is lost
        moved: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
        for name in TENSORS:
            tensor = getattr(weight, name)
            if tensor is not None:
                new = fn(tensor)
                moved[name] = new if name == "scales" or new.dtype == tensor.dtype else tensor.to(new.device)
        self._buffers.update(dict.fromkeys(TENSORS))  # else Module._apply would change the dtype of all
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(moved)
        self._plain = tuple((dict(self._plain) | {"dtype": dtype}).items())
        self._kept = None
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + META] = self.weight.state()[META]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take over the weight in the state, whatever its scheme; an error where it is of another shape or cannot be read."""
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        if prefix + META not in mine:
            given = [key for key in mine if key != prefix + "bias"]
            missing_keys.extend(prefix + name for name in (META, "packed", "scales"))
            if prefix + "weight" in mine:
                error_msgs.append(
                    f"{prefix}weight is not quantised, but the layer is: load it into the Linear, then quantize the model"
                )
            unexpected_keys.extend(given if strict else [])
            return
        try:
            weight = QuantizedTensor.from_state(mine, prefix)
            if weight.shape != self.weight.shape:
                raise ShapeError(f"the layer's weight is {list(self.weight.shape)}, got {list(weight.shape)}")
        except TilefoldError as error:
            error_msgs.append(f"{prefix or 'LowBitLinear'}: {error}")
            return
        if local_metadata.get("assign_to_params_buffers", False):
            self._take(weight)
        else:
            self._fit(weight)
        del mine[prefix + META]
        super()._load_from_state_dict(mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _fit(self, weight: QuantizedTensor) -> None:
        """Buffers into which this weight can be copied, on the layer's device; those that fit stay where they are."""
        device = self.packed.device
        self._plain = tuple((name, getattr(weight, name)) for name in PLAIN)
        self._kept = None
        for name in TENSORS:
            given, held = getattr(weight, name), getattr(self, name)
            if given is None:
                self._buffers[name] = None
            elif held is None or held.shape != given.shape or held.dtype != given.dtype:
                self._buffers[name] = torch.zeros_like(given, device=device)


def holds_weight(state: Mapping[str, torch.Tensor], prefix: str) -> bool:
    """Whether the state has a LowBitLinear's weight under the prefix."""
    if prefix + META not in state or prefix + "packed" not in state:
        return False
    if prefix + "scales" not in state:
        raise ValueRangeError(f"state has {prefix}packed but no {prefix}scales")
    return True
