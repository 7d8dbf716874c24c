"""The bridge into transformers: an attention function that calls tilefold and keeps what went in and what came out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import tilefold
from tilefold.errors import Unsupported
from tilefold.plan import AttentionPlan, TorchPlan

NAME = "tilefold_demo"  # the attention implementation's name while the demo runs


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One attention call of one layer.

    q, k, v, out: [batch, seq, heads, dim], or packed [total, heads, dim]; lse: [batch, heads, seq] or [heads, total], fp32,
    natural log. mask: [batch, 1, 1, seq] bool or None. offsets: [batch + 1] int32 where packed, else None.
    longest: most tokens of a sequence. seconds: wall time of the call.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    offsets: torch.Tensor | None
    longest: int
    scale: float
    out: torch.Tensor
    lse: torch.Tensor
    seconds: float

    def plan(self) -> AttentionPlan | TorchPlan:
        """The plan that the call followed."""
        if self.offsets is None:
            plan: AttentionPlan | TorchPlan = tilefold.attention_plan(
                self.q, self.k, self.v, mask=self.mask, scale=self.scale
            )
            return plan
        packing = {"cu_seqlens_q": self.offsets, "cu_seqlens_k": self.offsets}
        longest = {"max_seqlen_q": self.longest, "max_seqlen_k": self.longest}
        packed: AttentionPlan | TorchPlan = tilefold.attention_plan(
            self.q, self.k, self.v, **packing, **longest, scale=self.scale
        )
        return packed


def padding_mask(**facts: Any) -> torch.Tensor | None:
    """The mask function: the tokenizer's [batch, seq] padding mask as [batch, 1, 1, seq] bool, true where a key is a token.

    tilefold broadcasts it over heads and queries; nothing of size seq x seq is ever written.
    """
    mask = facts.get("attention_mask")
    return None if mask is None else mask[:, None, None, :].bool()


@dataclass(slots=True)
class Capture:
    """Callable with transformers' attention signature; `calls` grows by one per layer and batch, in the order they run."""

    tick: Callable[[], None] = lambda: None  # called after every layer
    calls: list[LayerCall] = field(default_factory=list)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key, value [batch, heads, seq, dim] to ([batch, seq, heads, dim], None); one row of packed tokens where
        `cu_seq_lens_q` and `max_length_q` are given, transformers' names for a batch without padding."""
        if dropout or getattr(module, "is_causal", False):
            raise Unsupported("the demo runs an encoder for inference: no dropout, no causal mask")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # views: tilefold takes any strides
        offsets, longest = options.get("cu_seq_lens_q"), int(options.get("max_length_q") or q.shape[1])
        if offsets is not None:
            q, k, v = q[0], k[0], v[0]
        start = _now(q.device)
        out, lse = _attend(q, k, v, attention_mask, offsets, longest, scale)
        seconds = _now(q.device) - start
        self.calls.append(LayerCall(q, k, v, attention_mask, offsets, longest, scale, out, lse, seconds))
        self.tick()
        return (out if offsets is None else out[None]), None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    offsets: torch.Tensor | None,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the public functions, padded or packed."""
    if offsets is None:
        out, lse = tilefold.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    else:
        out, lse = tilefold.attention_varlen(q, k, v, offsets, offsets, longest, longest, scale=scale, return_lse=True)
    return out, lse


def _now(device: torch.device) -> float:
    """Wall clock in seconds, after the work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
