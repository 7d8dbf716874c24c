"""A bias or a boolean mask as TMA reads it: whether it can, the boxes, and what a broadcast dimension becomes."""

import torch

from ..bound import Box

ROWS = 64  # queries of a warpgroup
SHARED = 4  # heads that share a mask: looking at it once is then little beside what each of them does with it


def tiles_of(t: torch.Tensor | None) -> str:
    """How descriptors can read t [B or 1, H or 1, Sq or 1, Sk]: "tiles" of 64 queries, "keys" where one row serves all of
    them, or "" if they cannot: the base or a stride is no multiple of 16 bytes, or the keys do not lie side by side."""
    if t is None or not t.numel() or t.data_ptr() % 16:
        return ""
    step = 16 // t.element_size()
    outer = [(n, s) for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1 and s]
    if any(s < 0 or s % step or s * t.element_size() >= 1 << 40 for _, s in outer):
        return ""
    if t.shape[3] > 1 and t.stride(3) != 1:
        return ""
    return "tiles" if _own(t)[2] else "keys"


def steps_of(t: torch.Tensor) -> tuple[int, int]:
    """What to multiply batch entry and head with: 1, or 0 where one serves all."""
    batch, heads, _ = _own(t)
    return batch, heads


def is_listed(mask: torch.Tensor, heads: int) -> bool:
    """Whether lists of tiles are made of a mask: some heads share it, or no box reads it and kernels ask it as a mask_mod."""
    return heads >= SHARED * (mask.shape[1] if steps_of(mask)[1] else 1) or not tiles_of(mask)


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor that the descriptor is of: booleans are bytes to TMA."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t


def tile_box(t: torch.Tensor, keys: int, queries: int = ROWS) -> Box:
    """Boxes of so many queries and 128 bytes of keys, or of one row of all keys of a tile where one serves all queries."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ...kernels.hopper.score_mods import panel_of_tile, tile_layout

    t = bytes_of(t)
    own = _own(t)
    rows = queries if own[2] else 1
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.uint8: gl.uint8}[
        t.dtype
    ]
    panel = panel_of_tile(dtype, rows, keys)
    flat = tile_layout(dtype, rows, keys)
    layout = gl.NVMMASharedLayout(flat.swizzle_byte_width, flat.element_bitwidth, rank=4)
    # the stride of a dimension of size 1 means nothing and may be invalid
    row = -(-t.shape[3] * t.element_size() // 16) * 16 // t.element_size()
    shape = [n if used else 1 for n, used in zip(t.shape[:3], own, strict=True)]
    strides = [s if used else row for s, used in zip(t.stride()[:3], own, strict=True)]
    return Box(t, [*shape, t.shape[3]], [*strides, 1], [1, 1, rows, panel], TensorDescriptor, layout)


def _own(t: torch.Tensor) -> tuple[int, int, int]:
    """For batch, heads and queries: 1 if each has numbers of its own, 0 if the same ones serve all."""
    batch, heads, queries = (int(n > 1 and s != 0) for n, s in zip(t.shape[:3], t.stride()[:3], strict=True))
    return batch, heads, queries
