"""The launch that says of each block of a mask whether it is empty, partial or full."""

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch

from ...errors import DtypeError, Unsupported
from ..bound import runtime_ints
from ..call import Call, check_hooks, check_mod_args
from ..device import device_of

__all__ = ["block_kinds", "reads"]

TILE = 32, 128  # queries and keys that are looked at at a time, at most


def block_kinds(
    mask_mod: Any, args: tuple[Any, ...], grid: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """uint8 [batch, heads, Q blocks, KV blocks]: 0 no query sees a key, 2 all see all, 1 else; grid: batch, heads, seq_q, seq_k.

    Nothing but the result is allocated, and nothing is read on the host."""
    if mask_mod is None:
        raise DtypeError("mask_mod must be a @triton.jit function, got None")
    check_mod_args("mask", mask_mod, args)
    if torch.compiler.is_compiling():
        raise Unsupported(
            "blocks of a mask_mod inside torch.compile: make the lists outside, and give them to the function"
        )
    device_of(device)
    check_hooks(Call(mask_mod=mask_mod, mask_args=args), device)
    from ...kernels.sparse.classify import classify_blocks
    from ..launch import Launch

    batch, heads, seq_q, seq_k = grid
    blocks = -(-seq_q // block[0]), -(-seq_k // block[1])
    kinds = torch.empty((batch, heads, *blocks), dtype=torch.uint8, device=device)
    if kinds.numel() == 0:
        return kinds
    constants = {
        "Q_BLOCK": block[0],
        "KV_BLOCK": block[1],
        "BLOCK_M": min(block[0], TILE[0]),
        "BLOCK_N": min(block[1], TILE[1]),
    }
    launch = Launch(classify_blocks, (kinds.numel(), 1, 1), constants, {"num_warps": 4}, device.index or 0)
    launch((kinds, seq_q, seq_k, heads, *blocks, ((mask_mod, runtime_ints(args)),)))
    return kinds


@functools.lru_cache(maxsize=256)
def reads(mask_mod: Any) -> tuple[bool, bool]:
    """Whether a mod looks at batch and head: whether its source has the names.  True where the source cannot be read."""
    function = getattr(mask_mod, "fn", mask_mod)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        _, batch, head, *_ = inspect.signature(function).parameters
    except (OSError, TypeError, ValueError, SyntaxError):
        return True, True
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return batch in names, head in names
