"""SparseVideoAttention: self-attention of a video's tokens over the blocks that matter, as a torch module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..check import check_number, check_whole
from ..errors import DtypeError, ShapeError, ValueRangeError
from ..sparse import BlockIndex, CoarseOptions, GridTiling, SelectOptions, sparse_video_attention
from ..sparse.kept import every_block
from ..sparse.tiling import block_cube, triple
from .coarse import CoarseProjection
from .gate import Gate, GateKind, both_gates
from .rotary import Rotary3D, normed

EPS = 1e-6  # of the norms, said: torch's default differs between its versions and dtypes


class SparseVideoAttention(nn.Module):
    """Self-attention of the tokens of a (T, H, W) grid: projections, rotary embedding, cubes, the sparse pipeline, gates.

    Args:
        dim: channels of a token.
        heads, kv_heads: query heads, and key and value heads (a divisor of heads; None: heads).
        head_dim: channels of a head, 1 to 256; None: dim / heads.
        grid: tokens (T, H, W) of a video; None: given at each call.
        cube: tokens of a block (t, h, w): together a power of two of at least 16.
        coarse: the coarse branch, a kind ("block", "dense", "pooled") or a `CoarseOptions`; "dense" needs grid.  None: no coarse
            branch, and attention over lists that are given at each call, or over all blocks.
        coarse_per_head: each key and value head has its own projections of the coarse branch, or all share one.
        select: how blocks are selected, a `SelectOptions`; None: its defaults.
        gate_coarse, gate_fine: "linear", "sigmoid" or "head", see `Gate`; None: 1.  A branch that is not there has no gate.
        rotary: the position embedding, a `Rotary3D`; None: none.
        qk_norm: normalise each head's q and k (root mean square, with a learned scale; eps 1e-6) before they are turned.
        qkv_bias, out_bias: whether the projections have one.
        scale: of the scores; None: 1 / sqrt(head_dim).
        device, dtype: of the parameters.

    At the start gate_fine is 1 and gate_coarse is 0 (0.98 and 0.02 with "sigmoid"): the module is attention over the listed
    blocks, nearly dense attention if they hold most of its mass, so weights of a dense model can be loaded into qkv and out.  The
    gradient of gate_coarse is not 0 there, so the coarse branch opens with the first step and its projections, which start at
    the mean over a block, learn from the second one on.  The kind "pooled" has no projections.

    state_dict: qkv, norm_q, norm_k, coarse.weight_k, coarse.weight_v, gate_coarse, gate_fine, out; there are no buffers.
    Works on the meta device with `reset_parameters`, in autocast, torch.compile(fullgraph=True), activation checkpointing, and
    under parameter sharding.

    Raises ShapeError, DtypeError or ValueRangeError naming the argument."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        grid: Sequence[int] | None = None,
        cube: Sequence[int] = (4, 4, 4),
        coarse: CoarseOptions | str | None = "block",
        coarse_per_head: bool = False,
        select: SelectOptions | None = None,
        gate_coarse: GateKind | None = "linear",
        gate_fine: GateKind | None = "linear",
        rotary: Rotary3D | None = Rotary3D(),  # noqa: B008 - a frozen value
        qk_norm: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads, self.head_dim = _sizes(dim, heads, kv_heads, head_dim)
        self.cube = block_cube(cube)
        self.grid = None if grid is None else triple("grid", grid)
        self.coarse_options = _coarse(coarse, self.grid, coarse_per_head, select)
        self.select = SelectOptions() if select is None else _is("select", select, SelectOptions)
        self.rotary = None if rotary is None else _is("rotary", rotary, Rotary3D)
        if self.rotary is not None:
            self.rotary.channels(self.head_dim)
        self.scale = None if scale is None else check_number("scale", scale)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        wide = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(self.dim, wide, bias=qkv_bias, **place)
        self.norm_q = nn.RMSNorm(self.head_dim, EPS, **place) if qk_norm else None
        self.norm_k = nn.RMSNorm(self.head_dim, EPS, **place) if qk_norm else None
        self.coarse = None
        if self.coarse_options is not None and self.coarse_options.kind != "pooled":
            tiling = GridTiling(self.grid, self.cube) if self.coarse_options.kind == "dense" and self.grid else None
            slots = self.cube[0] * self.cube[1] * self.cube[2]
            self.coarse = CoarseProjection(slots, tiling, self.kv_heads if coarse_per_head else None, **place)
        has_coarse = self.coarse_options is not None and gate_coarse is not None
        self.gate_coarse = Gate(self.dim, self.heads, gate_coarse, 0.0, **place) if has_coarse and gate_coarse else None
        self.gate_fine = Gate(self.dim, self.heads, gate_fine, 1.0, **place) if gate_fine is not None else None
        self.out = nn.Linear(self.heads * self.head_dim, self.dim, bias=out_bias, **place)

    def reset_parameters(self) -> None:
        """Every parameter back to its start, as the constructor leaves it; after `to_empty` from the meta device."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: torch.Tensor,
        grid: Sequence[int] | None = None,
        *,
        index: BlockIndex | None = None,
        return_stages: bool = False,
    ) -> Any:
        """x [B, T * H * W, dim], tokens in row-major order of the grid, to the same shape.

        grid: (T, H, W), if it was not given to the constructor or differs from that.  index: the lists to attend (of
        `GridTiling(grid, cube).padded` tokens), only without a coarse branch.  return_stages: (out, `Stages`), whose tensors
        are in the tiled order of tokens.

        Raises ShapeError or ValueRangeError naming the argument, and what `sparse_video_attention` raises."""
        tiling = self.tiling(grid)
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[1:] != (tiling.tokens, self.dim):
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, expected [batch, {tiling.tokens}, {self.dim}]: the tokens of grid {tiling.grid}"
            )
        x = tiling.tile(x)
        q, k, v = self.project(x, tiling)
        options = {**self.gates(x), **self._lists(tiling, x.device, index)}
        result = self.attend(q, k, v, **options, return_stages=return_stages)
        out, stages = result if return_stages else (result, None)
        out = self.out(tiling.untile(out.flatten(2)))
        return (out, stages) if return_stages else out

    def tiling(self, grid: Sequence[int] | None = None) -> GridTiling:
        """How the tokens of `grid`, by default the constructor's, lie in blocks."""
        if grid is None:
            grid = self.grid
        if grid is None:
            raise ValueRangeError("grid is None: give (T, H, W) to the constructor or to the call")
        tiling = GridTiling(grid, self.cube)  # type: ignore[arg-type]
        dense = self.coarse_options is not None and self.coarse_options.kind == "dense"
        if dense and tiling.grid != self.grid:
            raise ShapeError(f"grid is {tiling.grid}, but the dense coarse projection was made for {self.grid}")
        return tiling

    def project(self, x: torch.Tensor, tiling: GridTiling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, seq, heads, head_dim], k and v [B, seq, kv_heads, head_dim] of tiled tokens x [B, seq, dim]."""
        return self.turn(self.qkv(x), tiling)

    def turn(self, joint: torch.Tensor, tiling: GridTiling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of what qkv gives, [B, seq, (heads + 2 * kv_heads) * head_dim]: norms and the rotary embedding."""
        heads, kv_heads = self.heads, self.kv_heads
        joint = joint.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
        tables, interleaved = None, True
        if self.rotary is not None:
            angles = torch.promote_types(joint.dtype, torch.float32)
            tables = self.rotary.tiled_tables(tiling, self.head_dim, joint.device, angles)
            interleaved = self.rotary.interleaved
        both, v = joint.split((heads + kv_heads, kv_heads), 2)
        if self.norm_q is None:
            both = normed(both, None, tables, interleaved)  # q and k by one launch
        q, k = both.split((heads, kv_heads), 2)
        if self.norm_q is not None:
            q, k = (normed(one, norm, tables, interleaved) for one, norm in ((q, self.norm_q), (k, self.norm_k)))
        return q, k, v

    def gates(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """gate_coarse and gate_fine of tiled tokens x, as `sparse_video_attention` takes them."""
        coarse, fine = both_gates(x, self.gate_coarse, self.gate_fine)
        return {"gate_coarse": coarse, "gate_fine": fine}

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """`tilefold.sparse.sparse_video_attention`; a subclass may compute the same in another way."""
        return sparse_video_attention(q, k, v, **options)

    def _lists(self, tiling: GridTiling, device: torch.device, index: BlockIndex | None = None) -> dict[str, Any]:
        """What says which blocks are attended, as keyword arguments of the pipeline."""
        shared: dict[str, Any] = {"coarse": self.coarse_options, "scale": self.scale}
        if self.coarse_options is None:
            if index is not None and index.block_sizes is None and not tiling.even:
                raise ValueRangeError(
                    f"index has no block_sizes, but cubes of {tiling.cube} do not divide the grid {tiling.grid}: make it with "
                    "block_sizes=tiling.sizes(device) and query_sizes, or padding is attended"
                )
            return {**shared, "index": whole_index(tiling, device) if index is None else index}
        if index is not None:
            raise ValueRangeError("index was given, but this module selects its own lists: make it with coarse=None")
        weights = (None, None) if self.coarse is None else self.coarse()
        sizes = tiling.sizes(device)
        return {
            **shared,
            "select": self.select,
            "weight_k": weights[0],
            "weight_v": weights[1],
            "block": tiling.slots,
            "block_sizes": sizes,
            "query_sizes": sizes,
        }

    def extra_repr(self) -> str:
        kind = None if self.coarse_options is None else self.coarse_options.kind
        return (
            f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, grid={self.grid}, "
            f"cube={self.cube}, coarse={kind!r}, select={self.select.method!r}"
        )


def whole_index(tiling: GridTiling, device: torch.device) -> BlockIndex:
    """Every block listed for every block: dense attention over a grid's tokens."""
    n, seq, slots, sizes = tiling.block_count, tiling.padded, tiling.slots, tiling.sizes(device)
    return BlockIndex(*every_block(n, n, device), slots, slots, seq, seq, sizes, sizes)


def _sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int, int]:
    kv_heads = heads if kv_heads is None else kv_heads
    for name, value in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
        check_whole(name, value, 1)
    if heads % kv_heads:
        raise ValueRangeError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
    if head_dim is None and dim % heads:
        raise ValueRangeError(f"dim must be a multiple of heads if head_dim is not given, got {dim} and {heads}")
    head_dim = dim // heads if head_dim is None else check_whole("head_dim", head_dim, 1)
    if head_dim > 256:
        raise ValueRangeError(f"head_dim must be 1 to 256, got {head_dim}")
    return dim, heads, kv_heads, head_dim


def _coarse(coarse: CoarseOptions | str | None, grid: object, per_head: bool, select: object) -> CoarseOptions | None:
    """The options of the branch; nothing that was asked of a branch which is not there is passed over."""
    options = CoarseOptions(coarse) if isinstance(coarse, str) else coarse  # type: ignore[arg-type]
    if options is not None and _is("coarse", options, CoarseOptions).kind == "dense" and grid is None:
        raise ValueRangeError(
            "coarse is 'dense', a matrix over all tokens of one grid: give grid to the constructor, got None"
        )
    kind = None if options is None else options.kind
    if per_head and kind in (None, "pooled"):
        raise ValueRangeError(
            f"coarse_per_head is True, but coarse {kind!r} has no projections; they come with 'block' and 'dense'"
        )
    if select is not None and options is None:
        raise ValueRangeError("select was given with coarse=None: without a coarse branch nothing is selected")
    return options


def _is(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise DtypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    return value
