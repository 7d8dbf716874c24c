"""Small tensors that follow from a few numbers (a grid's index tensors, tables of angles), made once and kept out of the modules.

A buffer would do the same, but buffers are in the way of sharding, of meta-device construction and of a stable state_dict.
"""

from collections.abc import Callable, Hashable

import torch

from ..ops.watch import is_transformed

_LIMIT = 128 << 20  # bytes of all together; a large video's table of angles is 12 MB
_KEPT: dict[Hashable, torch.Tensor] = {}  # the oldest first
_CAPTURED: dict[Hashable, torch.Tensor] = {}  # what CUDA graphs read: never let go, their replays hold addresses only


def kept(key: Hashable, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """make(), or what it gave the last time it was asked for under this key, device and stream.

    make must follow from the key alone and place its result on `device`.  Nothing is looked up inside a graph that is being
    traced or under a level of torch.func or a dispatch mode (their tensors end with them), and nothing is kept that was made
    while a CUDA graph was being captured: it has values only after a replay.  Past 128 MiB the oldest ones are let go."""
    if torch.compiler.is_compiling() or is_transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return make()
    on_gpu = device.type == "cuda"
    full = (key, device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    found = _KEPT.get(full)
    if found is None:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what inference mode makes may not be saved for a backward pass
            found = make()
        if not capturing:
            _KEPT[full] = found
            _let_go()
    elif capturing:
        _CAPTURED[full] = found
    return found


def every_block(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """indices [1, 1, rows, columns] and counts [1, 1, rows] of lists that each name every block: dense attention."""
    column = kept(("columns", columns), device, lambda: torch.arange(columns, dtype=torch.int32, device=device))
    count = kept(
        ("count", rows, columns), device, lambda: torch.full((rows,), columns, dtype=torch.int32, device=device)
    )
    return column.expand(1, 1, rows, columns), count.expand(1, 1, rows)


def _let_go() -> None:
    excess = sum(t.nbytes for t in _KEPT.values()) - _LIMIT
    for key in list(_KEPT)[:-1]:  # never what was just made
        if excess <= 0:
            break
        excess -= _KEPT.pop(key).nbytes
