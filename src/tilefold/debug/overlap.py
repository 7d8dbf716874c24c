"""Do two tensors, or two elements of one, share memory? Asked of strided views on any device, without reading them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

EFFORT = 100_000  # candidate solutions that numpy tries before the answer is "perhaps"


def _layout(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Address, shape and strides as numpy takes them; the memory itself is never touched, so a GPU's address is as good."""
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    known = {"version": 3, "data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__={**known, "typestr": f"|V{size}"}))


def extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory, the gaps between rows included; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    """Whether an element of a and one of b share memory; None where that is too hard to tell (interlocked strides)."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    one, other = _layout(a), _layout(b)
    if not np.may_share_memory(one, other):
        return False
    try:
        return bool(np.shares_memory(one, other, max_work=EFFORT))
    except np.exceptions.TooHardError:
        return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of one tensor share memory, as after `expand` or `unfold`."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if tensor.numel() == 0 or not steps:
        return False
    if steps[0][0] == 0:
        return True
    reach = 0
    for stride, size in steps:
        if stride <= reach:  # rows may lie in the gaps of others: count
            return bool(np.unique(offsets(tensor)).size < tensor.numel())
        reach += (size - 1) * stride
    return False


def offsets(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each element lies, in elements from the first, in the order of the flattened tensor; int64 [numel]."""
    places: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places
