"""What `sparsify` has to know of a model, and the models of Diffusers that it knows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import Unsupported
from ..nn.rotary import normed
from .site import Pass, Text

Tables = tuple[torch.Tensor, torch.Tensor]


class Adapter:
    """Where a model makes q, k and v, and in which grid its tokens lie.  A user's own model needs these three methods.

    Tokens reach `forward` in row-major order of the grid; `attend` turns them into cubes and back.  A subclass whose `once`
    is true turns them once a forward pass: it does so in `hooks`, and hands the `Pass` that `begin` is given to `attend`."""

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules of self-attention, in the order in which they run."""
        raise NotImplementedError

    def grid(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[int, int, int]:
        """Tokens (T, H, W) of a forward pass; inputs: the arguments of model.forward by name."""
        raise NotImplementedError

    def forward(self, layer: nn.Module, attend: Any, *args: Any, **kwargs: Any) -> Any:
        """What layer.forward computes, with `attend` for its attention.

        out = attend(q, k, v): [batch, T * H * W, heads, dim] each, out like q; k and v may have fewer heads.
        out, out_text = attend(q, k, v, text=Text(q, k, v, lengths)): with text, which is not part of the grid: it is seen by all
        and sees all.  attend(.., scale=): of the scores; 1 / sqrt(dim) if not given.  attend(.., hidden=x): what q is a
        projection of, [batch, T * H * W, channels]; the gates of a trainable model read it, nothing else does."""
        raise NotImplementedError

    def sizes(self, layer: nn.Module) -> tuple[int, int, int]:
        """(channels, heads, dim) of a layer's `hidden` and v; only trainable models need it."""
        raise NotImplementedError

    # ------------------------------------------------------------ for adapters that turn tokens once a pass

    def once(self, model: nn.Module) -> bool:
        """Whether tokens are turned into cubes once a forward pass, or in each layer."""
        return False

    def begin(self, now: Pass, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of model.forward to be replaced."""
        return {}

    def hooks(self, model: nn.Module, now: Callable[[], Pass]) -> list[Any]:
        """Handles of the hooks that turn tokens and tables; now: the present forward pass."""
        return []

    def install(self, layer: nn.Module, attend: Any) -> Any:
        """Let `forward` take the place of the layer's own; what `remove` needs."""
        original = layer.__dict__.get("forward")
        layer.forward = functools.partial(self.forward, layer, attend)
        return original

    def remove(self, layer: nn.Module, original: Any) -> None:
        """Undo `install`."""
        if original is None:
            del layer.forward
        else:
            layer.forward = original


class DiffusersAdapter(Adapter):
    """A transformer of Diffusers: processors are swapped, tokens are turned once, and the rotary argument carries the `Pass`.

    blocks: names of the lists of blocks.  attention: the module in a block.  embed: the module that gives the video's tokens.
    rope: the module that gives the rotary tables; None: they are an argument.  last: the module behind the last block."""

    blocks: tuple[str, ...] = ("transformer_blocks",)
    attention = "attn1"
    embed = ""
    rope: str | None = "rope"
    last = ""

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        return [getattr(block, self.attention) for name in self.blocks for block in getattr(model, name)]

    def sizes(self, layer: Any) -> tuple[int, int, int]:
        projection = layer.to_qkv if getattr(layer, "fused_projections", False) else layer.to_q
        return projection.in_features, layer.heads, layer.inner_dim // layer.heads

    def install(self, layer: Any, attend: Any) -> Any:
        original = layer.processor
        layer.set_processor(Processor(self, attend))
        return original

    def remove(self, layer: Any, original: Any) -> None:
        layer.set_processor(original)

    def once(self, model: nn.Module) -> bool:
        return True

    def hooks(self, model: nn.Module, now: Callable[[], Pass]) -> list[Any]:
        turn = _Turn(self, now)
        handles = [model.get_submodule(self.embed).register_forward_hook(turn.embed)]
        handles.append(model.get_submodule(self.last).register_forward_pre_hook(turn.last, with_kwargs=True))
        if self.rope is not None:
            handles.append(model.get_submodule(self.rope).register_forward_hook(turn.rope))
        return handles

    # ------------------------------------------------------------ what differs between models

    def embedded(self, found: Any, now: Pass) -> Any:
        """The output of `embed`, [batch, tokens, channels], in the tiled order."""
        return now.tiling.tile(found)

    def with_tables(self, now: Pass, cos: torch.Tensor, sin: torch.Tensor) -> Pass:
        """The pass with the tables of rotary embedding, [1 or batch, tokens, channels], each number twice."""
        cos, sin = cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()
        if now.tiled:
            cos, sin = now.tiling.tile(cos), now.tiling.tile(sin)
        return now._replace(cos=cos, sin=sin)


class Processor:
    """An attention processor of Diffusers; the rotary argument is the `Pass`."""

    _attention_backend = None
    _parallel_config = None  # Diffusers sets it

    def __init__(self, adapter: DiffusersAdapter, attend: Any) -> None:
        self.adapter, self.attend = adapter, attend

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Pass | None = None,
    ) -> Any:
        if self._parallel_config is not None:
            raise Unsupported(
                "a sparse model does not take Diffusers' _parallel_config: desparsify it before enable_parallelism"
            )
        given = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return self.adapter.forward(attn, self.attend, *given)


class _Turn:
    """The hooks of a model: what they get turned into the order of the present pass."""

    def __init__(self, adapter: DiffusersAdapter, now: Callable[[], Pass]) -> None:
        self.adapter, self.now = adapter, now

    def embed(self, module: nn.Module, args: Any, found: Any) -> Any:
        now = self.now()
        return self.adapter.embedded(found, now) if now.tiled else found

    def rope(self, module: nn.Module, args: Any, found: Tables) -> Pass:
        cos, sin = (table if table.dim() > 2 else table[None] for table in found)
        return self.adapter.with_tables(self.now(), cos, sin)

    def last(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = self.now()
        if not now.tiled:
            return None
        if args:
            return (now.tiling.untile(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": now.tiling.untile(kwargs["hidden_states"])}


def _projected(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """q, k, v [batch, tokens, heads * dim], of one fused projection or of three."""
    if getattr(layer, "fused_projections", False):
        return list(layer.to_qkv(x).chunk(3, -1))
    return [layer.to_q(x), layer.to_k(x), layer.to_v(x)]


def _turned(layer: Any, now: Pass, q: torch.Tensor, k: torch.Tensor, together: bool = False) -> list[torch.Tensor]:
    """q, k [batch, tokens, heads, dim] with the layer's norms, together of all heads of a token, and the rotary embedding."""
    tables = None if now.cos is None or now.sin is None else (now.cos, now.sin)
    return [normed(one, norm, tables, together=together) for one, norm in ((q, layer.norm_q), (k, layer.norm_k))]


def _out(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The projection of [batch, tokens, heads, dim] and the dropout behind it."""
    projected: torch.Tensor = layer.to_out[1](layer.to_out[0](x.flatten(2)))
    return projected


class Wan(DiffusersAdapter):
    """WanTransformer3DModel: Wan 2.1 and 2.2, text and image to video.  Norms are over all heads; cross-attention stays."""

    blocks = ("blocks",)
    embed, last = "patch_embedding", "norm_out"

    def grid(self, model: Any, inputs: dict[str, Any]) -> tuple[int, int, int]:
        return _patches(inputs["hidden_states"].shape[2:], model.config.patch_size)

    def hooks(self, model: nn.Module, now: Callable[[], Pass]) -> list[Any]:
        embedder = model.get_submodule("condition_embedder")
        return [*super().hooks(model, now), embedder.register_forward_hook(functools.partial(_tile_wan_times, now))]

    def embedded(self, found: torch.Tensor, now: Pass) -> torch.Tensor:
        """[batch, channels, T, H, W] to [batch, channels, slots, 1, 1], which the model flattens."""
        return now.tiling.tile(found.flatten(2).transpose(1, 2)).transpose(1, 2)[..., None, None]

    def with_tables(self, now: Pass, cos: torch.Tensor, sin: torch.Tensor) -> Pass:
        return super().with_tables(now, cos[:, :, 0], sin[:, :, 0])  # [1, tokens, 1, channels]

    def forward(self, layer: Any, attend: Any, x: torch.Tensor, text: Any, mask: Any, now: Pass) -> torch.Tensor:
        q, k, v = (one.unflatten(2, (layer.heads, -1)) for one in _projected(layer, x))
        return _out(layer, attend(*_turned(layer, now, q, k, together=True), v, now=now, hidden=x))


def _tile_wan_times(now: Callable[[], Pass], module: nn.Module, args: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wan 2.2 has a time for each token: what blocks take of them follows the tokens."""
    temb, projected, *rest = found
    return (temb, now().tiling.tile(projected) if projected.dim() == 3 else projected, *rest)


class LTXVideo(DiffusersAdapter):
    """LTXVideoTransformer3DModel: tables differ between heads, so q and k are turned before they are taken apart."""

    embed, last = "proj_in", "norm_out"

    def grid(self, model: Any, inputs: dict[str, Any]) -> tuple[int, int, int]:
        t, h, w = (inputs.get(name) for name in ("num_frames", "height", "width"))
        if t is None or h is None or w is None:
            raise Unsupported(
                f"num_frames, height and width must be given to the model, got {(t, h, w)}: they say where tokens lie"
            )
        return t, h, w

    def hooks(self, model: nn.Module, now: Callable[[], Pass]) -> list[Any]:
        embedder = model.get_submodule("time_embed")
        return [*super().hooks(model, now), embedder.register_forward_hook(functools.partial(_tile_ltx_times, now))]

    def forward(self, layer: Any, attend: Any, x: torch.Tensor, text: Any, mask: Any, now: Pass) -> torch.Tensor:
        q, k, v = _projected(layer, x)
        q, k = (one.squeeze(2) for one in _turned(layer, now, q.unsqueeze(2), k.unsqueeze(2)))
        q, k, v = (one.unflatten(2, (layer.heads, -1)) for one in (q, k, v))
        return _out(layer, attend(q, k, v, now=now, hidden=x))


def _tile_ltx_times(now: Callable[[], Pass], module: nn.Module, args: Any, found: Tables) -> Tables:
    """A time for each token, where the first frames are given: [batch * tokens, channels] in the tiled order."""
    times, embedded = found
    tiling, rows = now().tiling, times.shape[0]
    if tiling.tokens == 1 or rows % tiling.tokens:
        return found
    return tiling.tile(times.view(-1, tiling.tokens, times.shape[-1])).flatten(0, 1), embedded


class HunyuanVideo(DiffusersAdapter):
    """HunyuanVideoTransformer3DModel: video and text in one attention, from two streams or from one.

    With image_condition_type "token_replace" blocks count the tokens of the first frame: tokens are turned in each layer."""

    blocks = ("transformer_blocks", "single_transformer_blocks")
    attention = "attn"
    embed, last = "x_embedder", "norm_out"

    def grid(self, model: Any, inputs: dict[str, Any]) -> tuple[int, int, int]:
        p = model.config.patch_size
        return _patches(inputs["hidden_states"].shape[2:], (model.config.patch_size_t, p, p))

    def once(self, model: Any) -> bool:
        return bool(model.config.image_condition_type != "token_replace")

    def forward(self, layer: Any, attend: Any, x: torch.Tensor, text: torch.Tensor, mask: Any, now: Pass) -> Any:
        two = layer.add_q_proj is not None  # text has projections of its own
        norms = (layer.norm_added_q, layer.norm_added_k) if two else (layer.norm_q, layer.norm_k)
        added = (layer.add_q_proj, layer.add_k_proj, layer.add_v_proj)
        words = [one(text) for one in added] if two else _projected(layer, text)
        lengths = None if mask is None else mask[:, 0, 0, x.shape[1] :].sum(-1, dtype=torch.int32)
        out, out_text = _beside(layer, attend, now, x, words, norms, lengths)
        out = out.flatten(2) if getattr(layer, "to_out", None) is None else _out(layer, out)
        out_text = out_text.flatten(2)
        return out, out_text if getattr(layer, "to_add_out", None) is None else layer.to_add_out(out_text)


class CogVideoX(DiffusersAdapter):
    """CogVideoXTransformer3DModel: text before the video's tokens in one attention; rotary tables, if any, are an argument."""

    embed, rope, last = "patch_embed", None, "norm_final"

    def grid(self, model: Any, inputs: dict[str, Any]) -> tuple[int, int, int]:
        frames, _, height, width = inputs["hidden_states"].shape[1:]
        p, p_t = model.config.patch_size, model.config.patch_size_t or 1
        return _patches((frames + p_t - 1, height, width), (p_t, p, p))

    def begin(self, now: Pass, inputs: dict[str, Any]) -> dict[str, Any]:
        tables = inputs.get("image_rotary_emb")
        return {"image_rotary_emb": now if tables is None else self.with_tables(now, *(one[None] for one in tables))}

    def embedded(self, found: torch.Tensor, now: Pass) -> torch.Tensor:
        text = found.shape[1] - now.tiling.tokens
        return torch.cat([found[:, :text], now.tiling.tile(found[:, text:])], 1)

    def forward(self, layer: Any, attend: Any, x: torch.Tensor, text: torch.Tensor, mask: Any, now: Pass) -> Any:
        if mask is not None:
            raise Unsupported(
                f"attention_mask was given, of shape {tuple(mask.shape)}: CogVideoX is attended without one"
            )
        norms = layer.norm_q, layer.norm_k
        out, out_text = _beside(layer, attend, now, x, _projected(layer, text), norms)
        return _out(layer, out), _out(layer, out_text)


def _beside(
    layer: Any, attend: Any, now: Pass, x: torch.Tensor, words: list[torch.Tensor], norms: Any, lengths: Any = None
) -> Any:
    """(video, text) of one attention; words: q, k, v of the text [batch, tokens, heads * dim]; norms: of its q and k."""
    (q, k, v), (qt, kt, vt) = (
        [one.unflatten(2, (layer.heads, -1)) for one in three] for three in (_projected(layer, x), words)
    )
    qt, kt = (normed(one, norm, None) for norm, one in zip(norms, (qt, kt), strict=True))
    return attend(*_turned(layer, now, q, k), v, text=Text(qt, kt, vt, lengths), now=now, hidden=x)


def _patches(sizes: Sequence[int], patch: Sequence[int]) -> tuple[int, int, int]:
    t, h, w = (size // step for size, step in zip(sizes, patch, strict=True))
    return t, h, w


ADAPTERS: dict[str, type[Adapter]] = {
    "WanTransformer3DModel": Wan,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "LTXVideoTransformer3DModel": LTXVideo,
    "CogVideoXTransformer3DModel": CogVideoX,
}


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter of a class of Diffusers, or of one that was made of it, as by `fully_shard`; None of another model."""
    for kind in type(model).__mro__:
        if kind.__name__ in ADAPTERS and kind.__module__.startswith("diffusers."):
            return ADAPTERS[kind.__name__]()
    return None
