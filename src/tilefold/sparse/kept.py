"""Small tensors that follow from a few numbers (a grid's index tensors, tables of angles), made once and kept out of the modules.

A buffer would do the same, but buffers are in the way of sharding, of meta-device construction and of a stable state_dict.
"""

from collections.abc import Callable, Hashable

import torch

__all__ = ["kept"]

_LIMIT = 64
_KEPT: dict[Hashable, torch.Tensor] = {}


def kept(key: Hashable, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """make(), or what it gave the last time it was asked for under this key, device and stream.

    make must follow from the key alone and place its result on `device`.  Nothing is looked up inside a graph that is being
    traced or under a level of torch.func or a dispatch mode (their tensors end with them), and nothing is kept that was made
    while a CUDA graph was being captured: it has values only after a replay."""
    if torch.compiler.is_compiling() or _transformed():
        return make()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    full = (key, device, stream)
    found = _KEPT.get(full)
    if found is None:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # a tensor of inference mode may not be saved for a backward pass
            found = make()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found
        if len(_KEPT) >= _LIMIT:
            _KEPT.clear()
        _KEPT[full] = found
    return found


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0
