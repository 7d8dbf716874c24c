"""What users call of dense attention: sign, document, delegate."""

from typing import TYPE_CHECKING, Any

import torch

from .errors import Unsupported
from .ops import attention as _ops
from .ops.call import Call, Packed, needs_gradient, value_of
from .ops.library import dispatched, is_traced
from .types import Constant, Layout, ModArgs, ModFunction, Window

if TYPE_CHECKING:
    from .plan import AttentionPlan

__all__ = ["attention", "attention_plan", "attention_varlen"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    layout: Layout = "bshd",
    return_lse: bool = False,
    plan: "AttentionPlan | Constant | None" = None,
) -> Any:
    """Attention of every query over every key it may see: softmax(scale * q k^T, modified and masked) v.

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32; dim 1 to 256; any strides with a contiguous last dimension.
        k: [batch, seq_k, kv_heads, dim], dtype of q; heads must be a multiple of kv_heads (MHA, GQA, MQA).
        v: [batch, seq_k, kv_heads, dim_v], dtype of q; dim_v 1 to 256, may differ from dim.
        causal: query i sees key j if j <= i + seq_k - seq_q (aligned to the bottom right).
        window: (left, right): it also needs i + seq_k - seq_q - left <= j <= i + seq_k - seq_q + right; None or -1: unbounded.
        scale: factor on q k^T, greater than 0; default 1 / sqrt(dim).
        softcap: cap > 0 turns a score s into cap * tanh(s / cap) (Gemma 2); 0 is off.
        alibi_slopes: [heads] or [batch, heads] fp32: subtracts slope * |i + seq_k - seq_q - j| (ALiBi).
        bias: [batch or 1, heads or 1, seq_q or 1, seq_k] floating point, added to the score; never expanded in memory.
        mask: like bias, bool: true where the query sees the key.
        sinks: [heads] floating point: a score that joins each row's softmax without a value (attention sinks).
        score_mod: @triton.jit function of (score, batch, head, q_index, kv_index, args) giving the new score; score is an
            fp32 tile [M, N] in natural units (scale applied), q_index [M, 1] and kv_index [1, N] are int32 and always inside
            the sequence, args is score_args followed by seq_q and seq_k.  Applied after softcap, ALiBi and bias, in this order.
        score_args: tuple of tensors (passed as pointers), ints and floats.
        mask_mod: as score_mod, but returns bool: true where the query sees the key.
        mask_args: as score_args.
        layout: "bshd" as above, or "bhsd" for [batch, heads, seq, dim] of q, k, v and out.
        return_lse: also return the logarithm of each row's softmax denominator.
        plan: an `AttentionPlan` to follow exactly, made by `attention_plan` and perhaps changed; PlanError if it does not fit.
            Inside torch.compile, pass score_mod, mask_mod and plan as `tilefold.constant(...)`, made outside.

    Returns:
        out, like q with dim_v for dim; with return_lse (out, lse), lse [batch, heads, seq_q] fp32, natural log, sinks included.
        A row without a live key is 0 with lse -inf (the sink, if there are sinks).  Products are accumulated in fp32.  NaN in
        q, k, v, bias or sinks makes NaN in the rows that see it; NaN in a masked key does not, NaN or infinity in a masked value
        may (its weight is 0, and 0 times either is NaN).  Sinks are finite or -inf.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, PlanError, Unsupported: before anything is launched,
        naming the argument.  Gradients are not implemented in this release: Unsupported if any input requires one.

    Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691); online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    call = Call(causal, window, scale, softcap, layout, alibi_slopes, bias, mask, sinks, score_mod, score_args, mask_mod,
                mask_args, None, plan)  # fmt: skip
    out, lse = _run(q, k, v, call)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    return_lse: bool = False,
    plan: "AttentionPlan | Constant | None" = None,
) -> Any:
    """`attention` within each of many sequences that are packed along the first dimension.

    Args:
        q: [total_q, heads, dim] fp16, bf16 or fp32: the queries of all sequences, one after the other.
        k: [total_k, kv_heads, dim], dtype of q.
        v: [total_k, kv_heads, dim_v], dtype of q.
        cu_seqlens_q: [batch + 1] int32 on the same device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
            The values are not read on the host: they must be ascending and within total_q.
        cu_seqlens_k: [batch + 1] int32, the same for k and v.  Lengths of 0 are fine on either side.
        max_seqlen_q: at least the longest query sequence; rows beyond it are not computed.
        max_seqlen_k: at least the longest key sequence: planning, and the last dimension of bias and mask.
        bias, mask: [batch or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k], indexed within each sequence.
        alibi_slopes: [heads] or [batch, heads].
        The other arguments are those of `attention`; masks are aligned to the bottom right of each sequence.

    Returns:
        out [total_q, heads, dim_v]; with return_lse (out, lse), lse [heads, total_q] fp32, natural log.  Rows of q that belong to
        no sequence are not written.

    Raises:
        As `attention`.

    Source: the packed layout and its names are flash-attention's (https://github.com/Dao-AILab/flash-attention).
    """
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = Call(causal, window, scale, softcap, "bshd", alibi_slopes, bias, mask, sinks, score_mod, score_args, mask_mod,
                mask_args, packed, plan)  # fmt: skip
    out, lse = _run(q, k, v, call)
    return (out, lse) if return_lse else out


def attention_plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> "AttentionPlan":
    """The plan that `attention(q, k, v, **options)` follows, without running it; `print` it to read the decision.

    For a packed batch give cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k too.  Raises what the call would raise, and
    Unsupported for a call that has nothing to compute (no queries)."""
    options.pop("return_lse", None)
    packed = {name: options.pop(name, None) for name in _PACKED}
    if any(value is not None for value in packed.values()):
        options["packed"] = Packed(*packed.values())
    for name in options:
        if name not in Call._fields:
            raise TypeError(f"attention_plan() got an unexpected keyword argument {name!r}")
    prepared = _ops.prepare(q, k, v, _resolved(_tidy(Call(**options))))
    if prepared.plan is None:
        raise Unsupported(
            f"q has shape {tuple(q.shape)}: there is no query, so nothing is launched and there is no plan"
        )
    return prepared.plan


_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Straight to the kernel when eager; through torch's dispatcher when something traces."""
    call = _tidy(call)
    if is_traced(q, k, v, call):
        return dispatched(q, k, v, call)
    if torch.is_grad_enabled() and needs_gradient(q, k, v, call):
        raise Unsupported(_NO_GRADIENT)
    return _ops.forward(q, k, v, _resolved(call))


def _tidy(call: Call) -> Call:
    """A window given as a list is a pair too."""
    return call._replace(window=tuple(call.window)) if isinstance(call.window, list) else call


def _resolved(call: Call) -> Call:
    """The call with the objects that its `Constant`s name."""
    if isinstance(call.score_mod, Constant) or isinstance(call.mask_mod, Constant) or isinstance(call.plan, Constant):
        hooks = {name: value_of(getattr(call, name)) for name in ("score_mod", "mask_mod", "plan")}
        return call._replace(**hooks)
    return call


_NO_GRADIENT = (
    "an input requires a gradient, but this release has the forward pass only: "
    "call under torch.no_grad(), or detach() the inputs"
)
