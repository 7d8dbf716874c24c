"""Qwen2 in plain PyTorch, for packed tokens of many sequences: keys and values go to a paged cache, attention comes from it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from tilefold import CacheBatch, PagedKVCache

__all__ = ["Qwen2", "Shape"]


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen2 configuration that its arithmetic depends on."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    theta: float
    epsilon: float
    tied: bool

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """From Transformers' Qwen2Config.  Raises ValueError for what this model does not compute."""
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if config.model_type != "qwen2":
            raise ValueError(f"model_type must be 'qwen2', got {config.model_type!r}")
        theta = rope.get("rope_theta")  # of its own in older versions of Transformers
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope_type must be 'default', got {kind!r}")
        if config.use_sliding_window:
            raise ValueError("use_sliding_window must be false: every layer of this model attends everything before")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {config.hidden_act!r}")
        return cls(
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.max_position_embeddings,
            float(config.rope_theta if theta is None else theta),
            config.rms_norm_eps,
            config.tie_word_embeddings,
        )


class Norm(nn.Module):
    """x / rms(x) in fp32, then the weight in x's dtype."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Step:
    """What all layers of one forward pass share: the batch in the cache, and the rotary angles of its tokens."""

    def __init__(self, cache: PagedKVCache, batch: CacheBatch, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [positions, head_dim / 2] fp32."""
        self.cache, self.batch, self.cos, self.sin = cache, batch, cos, sin
        self.cos_here, self.sin_here = (t[batch.positions, None] for t in (cos, sin))

    def turn(self, q: Tensor) -> Tensor:
        """q [T, heads, head_dim] at its tokens' positions: channel i with channel i + head_dim / 2."""
        first, second = q.float().chunk(2, -1)
        turned = (
            first * self.cos_here - second * self.sin_here,
            second * self.cos_here + first * self.sin_here,
        )
        return torch.cat(turned, -1).to(q.dtype)


class Attention(nn.Module):
    """Writes the keys and values of its tokens into its layer of the cache and attends over all that is there."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide)
        self.k_proj = nn.Linear(shape.hidden, narrow)
        self.v_proj = nn.Linear(shape.hidden, narrow)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)) for each in (self.q_proj, self.k_proj, self.v_proj))
        step.cache.append(self.layer, k, v, step.batch, rotary_cos=step.cos, rotary_sin=step.sin)
        out: Tensor = step.cache.attend(self.layer, step.turn(q), step.batch, causal=True)
        attended: Tensor = self.o_proj(out.flatten(-2))
        return attended


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers, norm: what Transformers calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)


class Qwen2(nn.Module):
    """The names of its parameters are Transformers', so that one's weights are the other's."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def place(self, device: torch.device, dtype: torch.dtype) -> "Qwen2":
        """Move to a device and dtype, ready to generate; the rotary tables stay in fp32."""
        self.to(device, dtype).eval().requires_grad_(False)
        pairs = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float64) / self.shape.head_dim
        rates = torch.exp(-math.log(self.shape.theta) * pairs)
        angles = torch.arange(self.shape.positions, dtype=torch.float64)[:, None] * rates
        self.cos, self.sin = (t.float().to(device) for t in (angles.cos(), angles.sin()))
        return self

    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: PagedKVCache, batch: CacheBatch, rows: Tensor) -> Tensor:
        """Logits [len(rows), vocabulary] fp32 of the tokens whose places in the packed batch `rows` holds.

        tokens: [T] int64, the batch's new tokens, whose rows in the cache are reserved."""
        step = Step(cache, batch, self.cos, self.sin)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, step)
        logits: Tensor = self.lm_head(self.model.norm(x[rows]))
        return logits.float()
