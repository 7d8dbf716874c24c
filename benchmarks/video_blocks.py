"""Video transformers of random weights in plain torch, for `video_transformer.py`: their shapes, a block, an adapter.

A block is a modulated norm, projections, RMS norms and rotary embedding of queries and keys, attention, a gate; cross-attention
to the text where the text is not in the same attention; a modulated feed-forward layer with its gate."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilefold
from tilefold import video
from tilefold.nn import Rotary3D
from tilefold.nn.rotary import rotate
from tilefold.ops import rms_norm_rotary

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """What a model's block is.  text: tokens of the text.  joint: they are in the same attention, with weights of their own, as
    in a double block; otherwise attended by cross-attention.  wide: norms in fp32."""

    dim: int
    heads: int
    ffn: int
    layers: int
    grid: tuple[int, int, int]
    text: int
    joint: bool = False
    wide: bool = True
    says: str = ""


SHAPES = {
    "wan-1.3b": Shape(1536, 12, 8960, 30, (21, 30, 52), 512, says="Wan 2.1 1.3B, 480p, 81 frames"),
    "wan-14b": Shape(5120, 40, 13824, 40, (21, 45, 80), 512, says="Wan 2.1 14B, 720p, 81 frames"),
    "hunyuan": Shape(3072, 24, 12288, 60, (33, 45, 80), 256, True, False, "HunyuanVideo, 720p, 129 frames, all blocks double"),
}  # fmt: skip
TINY = {
    "tiny": Shape(32, 2, 64, 3, (3, 6, 10), 16, says="cross-attention"),
    "tiny-joint": Shape(32, 2, 64, 3, (3, 6, 10), 16, True, False, "text in the same attention"),
}


class Stream(nn.Module):
    """The weights that one kind of tokens has in a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim = shape.dim
        self.heads, self.wide, self.each = shape.heads, shape.wide, shape.joint
        self.qkv = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        normed = dim // shape.heads if shape.joint else dim  # each head's channels, or all of them
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(normed)) for _ in range(2))
        self.out, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, shape.ffn), nn.Linear(shape.ffn, dim)
        self.times = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def normed(self, x: Tensor, shift: int) -> Tensor:
        """Layer norm with shift and scale of the denoising time."""
        wide = x.float() if self.wide else x
        return (F.layer_norm(wide, x.shape[-1:]) * (1 + self.times[shift + 1]) + self.times[shift]).to(x.dtype)

    def gated(self, x: Tensor, change: Tensor, gate: int) -> Tensor:
        return ((x.float() if self.wide else x) + change * self.times[gate]).to(x.dtype)

    def project(self, x: Tensor) -> list[Tensor]:
        return [one(x) for one in self.qkv]

    def split(
        self, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor] | None = None, fused: bool = False
    ) -> list[Tensor]:
        """[batch, tokens, heads, dim] each: q and k with RMS norm and, given tables, with the rotary embedding; fused: in one
        pass."""
        shape = (self.heads, -1)
        if fused and tables is not None:
            weights = (norm if self.each else norm.view(shape) for norm in self.norms)
            q, k, v = (x.unflatten(2, shape) for x in (q, k, v))
            made = [rms_norm_rotary(x, w, *tables, interleaved=True) for x, w in zip((q, k), weights, strict=True)]
            return [*made, v]
        if self.each:
            q, k = q.unflatten(2, shape), k.unflatten(2, shape)
        q, k = (F.rms_norm(x, x.shape[-1:], norm, 1e-6) for x, norm in zip((q, k), self.norms, strict=True))
        q, k, v = (x if x.dim() == 4 else x.unflatten(2, shape) for x in (q, k, v))
        return [q, k, v] if tables is None else [rotate(q, *tables, True), rotate(k, *tables, True), v]

    def feed(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return fed


class Attention(nn.Module):
    """Self-attention of a block, with the text's tokens where they are joint; `dense` is how, until an adapter gives `attend`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.streams = nn.ModuleList(Stream(shape) for _ in range(1 + shape.joint))
        self.dense = "ours"

    def forward(self, x: Tensor, text: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.compute(partial(dense, DENSE[self.dense]), x, text, tables)

    def compute(
        self, attend: Any, x: Tensor, text: Tensor, tables: Any, fused: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        main: Any = self.streams[0]
        q, k, v = main.split(*main.project(x), tables, fused)
        if len(self.streams) == 1:
            return main.out(attend(q, k, v).flatten(2)), None
        beside: Any = self.streams[1]
        found, found_text = attend(q, k, v, text=video.Text(*beside.split(*beside.project(text))))
        return main.out(found.flatten(2)), beside.out(found_text.flatten(2))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.cross = None if shape.joint else Stream(shape)  # q is not turned, k and v are the text's
        if self.cross is not None:
            del self.cross.up, self.cross.down

    def across(self, x: Tensor, text: Tensor) -> Tensor:
        """Cross-attention to the text."""
        assert self.cross is not None
        wide = F.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)
        q, k, v = self.cross.split(*(one(t) for one, t in zip(self.cross.qkv, (wide, text, text), strict=True)))
        return x + self.cross.out(sdpa(q, k, v).flatten(2))

    def forward(self, x: Tensor, text: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        streams: list[Any] = list(self.attention.streams)
        tokens = [x, text][: len(streams)]
        normed = [one.normed(t, 0) for one, t in zip(streams, tokens, strict=True)]
        changes = self.attention(normed[0], normed[-1], tables)
        tokens = [one.gated(t, c, 2) for one, t, c in zip(streams, tokens, changes, strict=False)]
        if self.cross is not None:
            tokens[0] = self.across(tokens[0], text)
        tokens = [one.gated(t, one.feed(one.normed(t, 3)), 5) for one, t in zip(streams, tokens, strict=True)]
        return tokens[0], tokens[1] if len(streams) == 2 else text


class Tables(nn.Module):
    """Rotary tables [tokens, pairs] of a grid in row-major order."""

    def forward(self, grid: tuple[int, int, int], dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return Rotary3D().tiled_tables(tilefold.sparse.GridTiling(grid, (1, 1, 1)), dim, device)


class Transformer(nn.Module):
    """`depth` blocks, over the weights of two in turn, between an embedding of patches and the last norm and projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.depth = shape, 1
        self.embed, self.last, self.tables = nn.Linear(64, shape.dim), nn.Linear(shape.dim, 64), Tables()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(2))

    def forward(self, patches: Tensor, text: Tensor, grid: tuple[int, int, int]) -> Tensor:
        x = self.embed(patches)
        tables = self.tables(grid, self.shape.dim // self.shape.heads, x.device)
        for layer in range(self.depth):
            x, text = self.blocks[layer % 2](x, text, tables)
        done: Tensor = self.last(x)
        return done


class Adapter(video.Adapter):
    """Tokens and tables are turned into cubes once, behind the embedding, and back before the last projection."""

    def layers(self, model: Any) -> list[nn.Module]:
        return [block.attention for block in model.blocks]

    def grid(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[int, int, int]:
        grid: tuple[int, int, int] = inputs["grid"]
        return grid

    def once(self, model: nn.Module) -> bool:
        return True

    def hooks(self, model: Any, now: Callable[[], Any]) -> list[Any]:
        def tile(module: nn.Module, args: Any, found: Tensor) -> Tensor:
            return now().tiling.tile(found)

        def tables(module: nn.Module, args: Any, found: Any) -> Any:
            return tuple(now().tiling.tile(one[None]) for one in found)

        def untile(module: nn.Module, args: Any) -> Any:
            return (now().tiling.untile(args[0]),)

        embed, turned = model.embed.register_forward_hook(tile), model.tables.register_forward_hook(tables)
        return [embed, turned, model.last.register_forward_pre_hook(untile)]

    def forward(self, layer: Any, attend: Any, *args: Any, **kwargs: Any) -> Any:
        return layer.compute(attend, *args, fused=True)  # as tilefold's own adapters of Diffusers' models do


# --- dense attention --------------------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = importlib.import_module("flash_attn.cute").flash_attn_func(q, k, v)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilefold.attention(q, k, v)


DENSE: dict[str, Callable[..., Tensor]] = {"SDPA": sdpa, "ours": ours}


def dense(how: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, text: video.Text | None = None) -> Any:
    if text is None:
        return how(q, k, v)
    out = how(*(torch.cat(pair, 1) for pair in zip((q, k, v), text[:3], strict=True)))
    return out[:, : q.shape[1]], out[:, q.shape[1] :]
