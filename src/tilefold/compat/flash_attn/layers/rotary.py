"""flash_attn.layers.rotary: rotary position embedding of x, of qkv, of kv, and the module that holds the angles."""

from typing import Any

import torch

from ....check import check_number
from ....errors import ShapeError, ValueRangeError
from ....ops.cache.rotary import apply_rotary
from ..arguments import check_tensor, flash_errors, host_int

__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_",
           "apply_rotary_emb_torch", "rotate_half"]  # fmt: skip

Offsets = int | torch.Tensor


@flash_errors(offsets="seqlen_offsets")
def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x [batch, seqlen, heads, head dim], or [total, heads, head dim] with cu_seqlens [batch + 1] int32 and max_seqlen, its first
    channels turned by cos, sin [positions, rotated / 2]; seqlen_offsets: position of each first token, an int or [batch]."""
    longest = None if max_seqlen is None or cu_seqlens is None else host_int("max_seqlen", max_seqlen)
    return apply_rotary(x, cos, sin, interleaved=interleaved, offsets=seqlen_offsets, cu_seqlens=cu_seqlens,
                        max_seqlen=longest, inplace=inplace)  # fmt: skip


apply_rotary_emb_func = apply_rotary_emb


@flash_errors(offsets="seqlen_offsets", x="qkv")
def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Turn q and k of qkv [batch, seqlen, 3, heads, head dim], or [batch, seqlen, heads_q + 2 heads_k, head dim] with
    num_heads_q, in place.  cos_k, sin_k: other tables for k."""
    if (cos_k is None) != (sin_k is None):
        raise ValueRangeError(
            f"cos_k and sin_k come together, got {'cos_k' if cos_k is None else 'sin_k'}=None, the other one not"
        )
    check_tensor("qkv", qkv)
    if num_heads_q is not None and host_int("num_heads_q", num_heads_q) < 1:
        raise ValueRangeError(f"num_heads_q must be at least 1, got {num_heads_q}")
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
        # One launch for both where they lie side by side and turn alike.
        both = qkv.flatten(2, 3)[:, :, : 2 * qkv.shape[3]] if qkv.is_contiguous() else None
    elif qkv.dim() == 4 and num_heads_q is not None:
        heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if odd or heads_k < 0:
            raise ShapeError(
                f"qkv has shape {tuple(qkv.shape)}, expected {num_heads_q} + 2 * heads_k heads for num_heads_q"
            )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
        both = qkv[:, :, : num_heads_q + heads_k]
    else:
        raise ShapeError(
            f"qkv has shape {tuple(qkv.shape)}, expected [batch, seqlen, 3, heads, head dim], or [batch, seqlen, heads, "
            f"head dim] with num_heads_q"
        )
    options: dict[str, Any] = {"interleaved": interleaved, "offsets": seqlen_offsets, "inplace": True}
    if cos_k is None or sin_k is None:
        if both is not None:
            apply_rotary(both, cos, sin, **options)
            return qkv
        cos_k, sin_k = cos, sin
    apply_rotary(q, cos, sin, **options)
    apply_rotary(k, cos_k, sin_k, **options)
    return qkv


@flash_errors(offsets="seqlen_offsets", x="kv")
def apply_rotary_emb_kv_(
    kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> torch.Tensor:
    """Turn k of kv [batch, seqlen, 2, heads, head dim] in place."""
    check_tensor("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ShapeError(f"kv has shape {tuple(kv.shape)}, expected [batch, seqlen, 2, heads, head dim]")
    apply_rotary(kv[:, :, 0], cos, sin, interleaved=interleaved, offsets=seqlen_offsets, inplace=True)
    return kv


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """(a, b) -> (-b, a) of each pair of channels."""
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-second, first), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """The same in plain torch: cos, sin [seqlen, rotated / 2] or [batch, seqlen, rotated / 2]."""
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise ShapeError(f"cos turns {width} channels, x has shape {tuple(x.shape)}")
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    turned = x[..., :width] * cos.unsqueeze(-2) + rotate_half(x[..., :width], interleaved) * sin.unsqueeze(-2)
    return torch.cat((turned, x[..., width:]), -1)


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding whose angles are base ** (-2i / dim) times the position, kept for the longest sequence so far.

    dim: channels that turn.  interleaved: pairs are (2i, 2i + 1), else (i, i + dim / 2).  scale_base: also grow and shrink with
    the position (XPos, Sun et al. 2022, arXiv:2212.10554), queries one way, keys the other; None: do not.

    Source: RoPE (Su et al. 2021, arXiv:2104.09864)."""

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    @flash_errors()
    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if host_int("dim", dim) < 2 or dim % 2:
            raise ValueRangeError(f"dim must be even and at least 2, got {dim}")
        check_number("base", base, above=0.0)
        if scale_base is not None:
            check_number("scale_base", scale_base, above=0.0)
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer(
            "scale", None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim), persistent=False
        )
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None
        self._cos_k_cached: torch.Tensor | None = None
        self._sin_k_cached: torch.Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> torch.Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Make the tables [seqlen, dim / 2] unless those at hand will do."""
        kept = self._cos_cached
        if (
            kept is not None
            and seqlen <= self._seq_len_cached
            and kept.device == device
            and kept.dtype == dtype
            and not (self.training and not torch.compiler.is_compiling() and kept.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        place = torch.arange(seqlen, device=device, dtype=torch.float32)
        turn = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        angle = torch.outer(place, turn.to(device))  # in fp32, though the module may have been cast
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        growth = self.scale.to(device=device, dtype=torch.float32) ** ((place - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * growth).to(dtype), (sin * growth).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / growth).to(dtype), (sin / growth).to(dtype)

    @flash_errors(seqlen_offsets="seqlen_offset")
    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """qkv as for apply_rotary_emb_qkv_, or q [batch, seqlen, heads, head dim] with kv [batch, seqlen, 2, heads, head dim]:
        turned in place and returned.  max_seqlen: needed where seqlen_offset is a tensor and the tables may have to grow."""
        check_tensor("qkv", qkv, (4, 5))
        if (
            not isinstance(seqlen_offset, torch.Tensor)
            and (seqlen_offset := host_int("seqlen_offset", seqlen_offset)) < 0
        ):
            raise ValueRangeError(f"seqlen_offset must be at least 0, got {seqlen_offset}")
        if max_seqlen is not None:
            self._update_cos_sin_cache(host_int("max_seqlen", max_seqlen), qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueRangeError("max_seqlen must be given in the first call if seqlen_offset is a tensor")
        scaled = self.scale is not None
        cos_k, sin_k = (self._cos_k_cached, self._sin_k_cached) if scaled else (None, None)
        if kv is None:
            found: torch.Tensor = apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
            return found
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        table = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *table, self.interleaved, seqlen_offset)
