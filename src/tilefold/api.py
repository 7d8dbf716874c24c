"""What users call of dense attention, and rotary embedding: sign, document, delegate."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .errors import Unsupported
from .keywords import refusing, unexpected, unexpected_of
from .masks import Mask
from .ops.bound import Prepared
from .ops.call import Call, check_kinds
from .ops.dense import attention as _ops
from .ops.dense.fp8 import E4M3, is_fp8, refuse_packed
from .ops.dense.library import ATTENTION, resolved
from .ops.device import device_asked
from .ops.faults import mode_for
from .ops.masking import Terms, holds_tensor, named_terms, spelled
from .ops.numerics import check_numerics, is_invariant
from .ops.quantise import quantize_fp8
from .ops.route import STACK, refuse, route
from .ops.source import Packed, Scales
from .scores import Score
from .types import Constant, Layout, ModArgs, ModFunction, Numerics, Window

if TYPE_CHECKING:
    from .plan import AttentionFp8Plan, AttentionPlan, DecodePlan, Device, InvariantPlan
    from .plan.backward.attention_backward import AttentionBackwardPlan

__all__ = [
    "apply_rotary",
    "attention",
    "attention_backward_plan",
    "attention_plan",
    "attention_varlen",
    "quantize_fp8",
]


@refusing
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
    mask: torch.Tensor | Mask | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    layout: Layout = "bshd",
    return_lse: bool = False,
    plan: "AttentionPlan | DecodePlan | InvariantPlan | AttentionFp8Plan | Constant | None" = None,
    score_grad: ModFunction | Constant | None = None,
    backward_plan: "AttentionBackwardPlan | Constant | None" = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool = True,
    score: Score | None = None,
    numerics: Numerics | None = None,
    **others: NoReturn,
) -> Any:
    """Attention of every query over every key it may see: softmax(scale * q k^T, modified and masked) v.

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16, fp32 or float8_e4m3fn (see below); dim 1 to 512 (e4m3: 256); any strides with
            a contiguous last dimension.
        k: [batch, seq_k, kv_heads, dim], dtype of q; heads must be a multiple of kv_heads (MHA, GQA, MQA).
        v: [batch, seq_k, kv_heads, dim_v], dtype of q; dim_v 1 to 512, may differ from dim.
        causal: query i sees key j if j <= i + seq_k - seq_q (aligned to the bottom right).
        window: (left, right): it also needs i + seq_k - seq_q - left <= j <= i + seq_k - seq_q + right; None or -1: unbounded.
        scale: factor on q k^T, greater than 0; default 1 / sqrt(dim).
        softcap: cap > 0 turns a score s into cap * tanh(s / cap) (Gemma 2); 0 is off.
        alibi_slopes: [heads] or [batch, heads] fp32: subtracts slope * |i + seq_k - seq_q - j| (ALiBi).
        bias: [batch or 1, heads or 1, seq_q or 1, seq_k] floating point, added to the score; never expanded in memory.
            Its gradient is summed up in fp32.  For a bias in q's dtype dS of all pairs may be stored, in 16 bits, at most 4 GiB.
        mask: like bias, bool: true where the query sees the key; or a `Mask` (`tilefold.masks`), made of parts by &, | and ~,
            beside which causal, window and mask_mod have to hold as well, where they are given.  A tensor that heads share is
            listed as a mask_mod is.
        sinks: [heads] floating point: a score that joins each row's softmax without a value (attention sinks).
        score_mod: @triton.jit function of (score, batch, head, q_index, kv_index, args) giving the new score; score is an
            fp32 tile [M, N] in natural units (scale applied), q_index [M, 1] and kv_index [1, N] are int32 and always inside
            the sequence, args is score_args followed by seq_q and seq_k.  Applied after softcap, ALiBi and bias, in this order.
        score_args: tuple of tensors (passed as pointers), ints and floats; other numbers compile nothing anew.  Floating tensors
            that require a gradient get one (docs/reference/mods.md), by addresses: what a mod loads from outside gives nothing.
        mask_mod: as score_mod, but returns bool: true where the query sees the key.
        mask_args: as score_args, without gradients.  On sm_90 lists of the tiles that a mask_mod shows are kept until an argument
            changes (docs/explanation/masks.md).  A tensor that changes where torch does not count it needs plans that make them
            in every call: plan.with_tile(options=(*plan.options, "anew")), and
            backward_plan.with_tiles(options=dataclasses.replace(backward_plan.options, anew=True)).
        layout: "bshd" as above, or "bhsd" for [batch, heads, seq, dim] of q, k, v and out.  A ShapeError says so if all shapes
            fit the other one.
        return_lse: also return the logarithm of each row's softmax denominator.
        plan: the plan to follow exactly, made by `attention_plan` and perhaps changed; PlanError if it does not fit.  A
            `DecodePlan` splits the keys, an `AttentionPlan` does not; numerics="invariant" follows an `InvariantPlan`.
            Inside torch.compile, pass score_mod, mask_mod, score_grad and the plans as `tilefold.constant(...)`, made outside.
        score_grad: as score_mod, but returns the derivative of the new score by the given one.  None: for gradients it is made of
            the source of score_mod, if that is differentiable (docs/reference/mods.md says what is).
        backward_plan: an `AttentionBackwardPlan` to follow exactly in the backward pass, made by `attention_backward_plan`.
        dropout_p: probability, from 0 to less than 1, of dropping each weight of the softmax; those kept are divided by
            1 - dropout_p, as in flash_attn.  lse is that of all.  Give 0 when not training.
        dropout_seed: [1] int64 on the same device, not read on the host: what is dropped is a function of it, batch, head, query
            and key alone.  Default: drawn from torch's generator of the device, as activation checkpoints and CUDA graphs want
            it.  Not used if dropout_p is 0.
        q_descale: [batch, heads] or [batch, kv_heads] fp32, greater than 0 (not read on the host), for e4m3 inputs: what q is to
            be multiplied with; default 1.  `quantize_fp8` makes e4m3 tensors and their factors.
        k_descale, v_descale: [batch, kv_heads] fp32, the same of k and v.
        deterministic: False lets gradients be made by a kernel that adds dq in memory, in fp32, in an order that changes from run
            to run, and their last bits with it; `attention_backward_plan` says whether one does, or why not.  Those of score_args
            are then made in one pass instead of two.
        score: a `Score` (`tilefold.scores`) instead of softcap, alibi_slopes, bias and score_mod.
        numerics: "invariant": out and lse of a query depend on its own sequence alone, to the bit, whatever the batch, packing,
            padding, chunks and pages (docs/invariance.md).  "fast": the fastest kernel.  None: what `tilefold.numerics` or the
            environment variable TILEFOLD_NUMERICS says, else "fast".

    Where few queries meet many keys (at most 128 query rows a KV head) the keys are shared out over the SMs, and K and V are read
    once for all query heads of a KV head; `attention_plan` says whether, and in how many parts.

    With q, k and v in float8_e4m3fn there are causal, window, scale, layout, return_lse and an `AttentionFp8Plan` as plan, and no
    gradients; out is bfloat16.  On sm_90 the products are of bytes where V has 65 to 128 columns: each softmax weight is rounded
    to e4m3, 2^8 times as large, so what is below 2^-18 of the largest one counts in lse alone.  Elsewhere, and where the plan
    says so, the tensors are dequantised to bfloat16.

    Returns:
        out, like q with dim_v for dim; with return_lse (out, lse), lse [batch, heads, seq_q] fp32, natural log, sinks included.
        A row without a live key is 0 with lse -inf (the sink, if there are sinks).  Products are accumulated in fp32.  NaN in
        q, k, v, bias or sinks makes NaN in the rows that see it; NaN in a masked key does not, NaN or infinity in a masked value
        may (its weight is 0, and 0 times either is NaN).  Sinks are finite or -inf.
        Both are differentiable in q, k, v, bias, sinks and score_args, once, with the same bits every run if deterministic; a
        row without a live key passes no gradient.  The backward pass computes scores again: it keeps q, k, v, out and lse, and
        two numbers a row while it runs.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, PlanError, Unsupported: before anything is launched,
        naming the argument; Unsupported if alibi_slopes or mask_args require a gradient, if score_args do and score_mod loads
        from them in a way that is not differentiated, or if anything does, and score_mod is not differentiable and comes without
        score_grad.

    Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691); online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    if others:
        raise unexpected_of(attention, others)
    if type(return_lse) is not bool or type(deterministic) is not bool or backward_plan is not None:
        check_kinds(return_lse, backward_plan, "AttentionBackwardPlan", deterministic)
    asked = check_numerics(numerics)
    if isinstance(mask, Mask) or score is not None:
        terms = Terms(
            causal, window, softcap, alibi_slopes, bias, mask, score_mod, score_args, mask_mod, mask_args, score_grad
        )
        (causal, window, softcap, alibi_slopes, bias, mask, score_mod, score_args, mask_mod, mask_args,
         score_grad) = spelled(q, k, terms, score, layout)  # fmt: skip
    scaled = q_descale is not None or k_descale is not None or v_descale is not None
    if (scaled or getattr(q, "dtype", None) is E4M3) and is_fp8(q, q_descale, k_descale, v_descale):
        from .ops.dense import attention_fp8  # here: `import tilefold` stays light

        refuse("e4m3 tensors")
        attention_fp8.refuse_others(
            q, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks, score_mod=score_mod,
            score_args=score_args, mask_mod=mask_mod, mask_args=mask_args, score_grad=score_grad, backward_plan=backward_plan,
            dropout_p=dropout_p, dropout_seed=dropout_seed)  # fmt: skip
        descales = (q_descale, k_descale, v_descale)
        given = Call(causal, window, scale, layout=layout, plan=plan, scales=Scales(*descales), numerics=asked)
        out, lse = attention_fp8.run(q, k, v, given)
        return (out, lse) if return_lse else out
    call = Call(causal, window, scale, softcap, layout, alibi_slopes, bias, mask, sinks, score_mod,  # type: ignore[arg-type]
                score_args, mask_mod, mask_args, None, plan, score_grad, backward_plan, dropout_p, dropout_seed,
                deterministic, numerics=asked)  # fmt: skip
    out, lse = _attend(q, k, v, call)
    return (out, lse) if return_lse else out


@refusing
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
    mask: torch.Tensor | Mask | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    return_lse: bool = False,
    plan: "AttentionPlan | DecodePlan | InvariantPlan | Constant | None" = None,
    score_grad: ModFunction | Constant | None = None,
    backward_plan: "AttentionBackwardPlan | Constant | None" = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    check: bool | str | None = None,
    score: Score | None = None,
    numerics: Numerics | None = None,
    **others: NoReturn,
) -> Any:
    """`attention` within each of many sequences that are packed along the first dimension.

    Args:
        q: [total_q, heads, dim] fp16, bf16 or fp32: the queries of all sequences, one after the other.
        k: [total_k, kv_heads, dim], dtype of q.
        v: [total_k, kv_heads, dim_v], dtype of q.
        cu_seqlens_q: [batch + 1] int32 on the same device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
            They must begin at 0, ascend and stay within total_q.  The host does not read them, but in the interpreter, which
            refuses others.
        cu_seqlens_k: [batch + 1] int32, the same for k and v.  Lengths of 0 are fine on either side.
        max_seqlen_q: at least the longest query sequence; rows of a longer one may not be computed.
        max_seqlen_k: at least the longest key sequence: planning, and the last dimension of bias and mask.
        bias, mask: [batch or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k], indexed within each sequence.
        alibi_slopes: [heads] or [batch, heads].
        check: True: first read cu_seqlens_q and cu_seqlens_k, and raise ValueRangeError naming what is out of range, does not
            begin at 0 or is longer than max_seqlen_q or max_seqlen_k (the default on the CPU).  "device": a launch before
            the kernel's takes note of offsets that are out of range or descend, and replaces each by the one before it (in both
            passes); nothing waits: `last_fault` tells.  Unsupported then with bias or mask, whose keys such a
            launch cannot bound.  Default: what the environment variable TILEFOLD_CHECK said, else False.
        The other arguments are those of `attention`; masks are aligned to the bottom right of each sequence, dropout goes by the
        indices in the sequence.

    Returns:
        out [total_q, heads, dim_v]; with return_lse (out, lse), lse [heads, total_q] fp32, natural log.  Rows of q that belong to
        no sequence are not written, and their gradient is 0.

    Raises:
        As `attention`.

    Source: the packed layout and its names are flash-attention's (https://github.com/Dao-AILab/flash-attention).
    """
    if others:
        raise unexpected_of(attention_varlen, others)
    check_kinds(return_lse, backward_plan, "AttentionBackwardPlan")
    refuse_packed(q)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if isinstance(mask, Mask) or score is not None:
        terms = Terms(
            causal, window, softcap, alibi_slopes, bias, mask, score_mod, score_args, mask_mod, mask_args, score_grad
        )
        (causal, window, softcap, alibi_slopes, bias, mask, score_mod, score_args, mask_mod, mask_args,
         score_grad) = spelled(q, k, terms, score, packed=packed)  # fmt: skip
    if mode := mode_for(check, cu_seqlens_q):
        from .ops.checked import checked_packed  # here: `import tilefold` stays light

        if mode == "device" and (bias is not None or mask is not None or holds_tensor(mask_mod)):
            raise Unsupported(
                "check='device' (or TILEFOLD_CHECK=device) with bias or mask: what they hold past max_seqlen_k is read where a "
                "sequence is longer; pass check=False or True, or give a mask_mod or score_mod"
            )
        packed = checked_packed(q, k, packed, mode, "attention_varlen")
    call = Call(causal, window, scale, softcap, "bshd", alibi_slopes, bias, mask, sinks, score_mod,  # type: ignore[arg-type]
                score_args, mask_mod, mask_args, packed, plan, score_grad, backward_plan, dropout_p, dropout_seed,
                numerics=check_numerics(numerics))  # fmt: skip
    out, lse = _attend(q, k, v, call)
    return (out, lse) if return_lse else out


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    offsets: int | torch.Tensor = 0,
    step: int = 1,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    check: bool | str | None = None,
) -> torch.Tensor:
    """x with its first 2 * pairs channels turned by each token's position.

    Args:
        x: [batch, seq, heads, dim] fp16, bf16 or fp32, dim 1 to 512, any strides with a contiguous last dimension; or
            [total, heads, dim] with cu_seqlens.
        cos, sin: [positions, pairs] of one float dtype, 2 * pairs at most dim: the angles' cosines and sines.
        interleaved: pair i is the channels (2i, 2i + 1); otherwise (i, i + pairs).
        offsets: position of each sequence's first token: an int, or [batch] int32 or int64 on x's device, not read on the host.
            Tokens whose position the table does not hold are not turned; an int that leads past it is refused.
        step: positions from one token to the next; 0: all tokens of a sequence are at its offset.
        cu_seqlens: [batch + 1] int32: x is packed, sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: at least the longest sequence, needed with cu_seqlens.  Rows beyond it are not written.
        inplace: write into x and return it.
        conjugate: turn back.
        check: of cu_seqlens, as for `attention_varlen`.

    Returns:
        Like x; arithmetic in fp32.  Differentiable in x, once.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument, before anything is
        launched; Unsupported if cos or sin require a gradient.

    Source: RoPE (Su et al. 2021, arXiv:2104.09864)."""
    from .ops.cache import rotary  # here: `import tilefold` stays light

    if (mode := mode_for(check, cu_seqlens)) and cu_seqlens is not None and isinstance(max_seqlen, int):
        cu_seqlens = rotary.checked_offsets(x, cu_seqlens, max_seqlen, mode)
    return rotary.apply_rotary(x, cos, sin, interleaved=interleaved, offsets=offsets, step=step, cu_seqlens=cu_seqlens,
                               max_seqlen=max_seqlen, inplace=inplace, conjugate=conjugate)  # fmt: skip


def attention_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, device: "str | Device | None" = None, **options: Any
) -> Any:
    """The plan that `attention(q, k, v, **options)` follows, without running it; `print` it to read the decision.

    An `AttentionPlan`; a `DecodePlan` where few queries meet many keys, which are split (see `tilefold.plan.plan_forward`); an
    `AttentionFp8Plan` for e4m3 tensors; an `InvariantPlan` with numerics="invariant", but for prompts on sm_90.

    For a packed batch give cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k too.  Raises what the call would raise, and
    Unsupported for a call that has nothing to compute (no queries).

    device: plans as on another one, wherever the tensors lie ("meta", too): a name of `tilefold.plan.DEVICES` ("h100"), "cpu"
    for plain torch, or a `tilefold.plan.Device`.  Nothing is compiled: kernels count as ones that compile there."""
    options = _spelled(q, k, options)
    if is_fp8(q, *(options.get(name) for name in ("q_descale", "k_descale", "v_descale"))):
        from .ops.dense import attention_fp8  # here: `import tilefold` stays light

        return attention_fp8.plan_of(q, k, v, options, device_asked(device))
    return _prepared("attention_plan", q, k, v, options, device_asked(device))[0].plan


def attention_backward_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, device: "str | Device | None" = None, **options: Any
) -> "AttentionBackwardPlan":
    """The plan that the backward pass of `attention(q, k, v, **options)` follows; `print` it to read the decision.

    It makes gradients of the bias and of the tensors of score_args that require one.  The rest as for `attention_plan`."""
    from .ops.backward.attention_backward import backward_plan_of
    from .ops.backward.attention_backward_loads import needed

    on = device_asked(device)
    prepared, call = _prepared("attention_backward_plan", q, k, v, options, on)
    with_bias = call.bias is not None and call.bias.requires_grad
    return backward_plan_of(prepared.problem, call, q, with_bias, needed(call), on)


def _prepared(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], on: "Device | None"
) -> tuple[Prepared, Call]:
    """The record of a call given by keywords, which has a plan, and the call.  on: its plan alone, as on that device."""
    options = _spelled(q, k, options)
    options.pop("return_lse", None)
    options["numerics"] = check_numerics(options.get("numerics"))
    check_kinds(False, deterministic=options.get("deterministic", True))
    packed = {key: options.pop(key, None) for key in _PACKED}
    for option in options:
        if option not in _OPTIONS:
            raise unexpected(name, option, (*_OPTIONS, *_PACKED))
    if any(value is not None for value in packed.values()):
        options["source"] = Packed(*packed.values())
    call = resolved(_tidy(Call(**options)))
    prepared = _ops.prepare_anew(q, k, v, call, on) if on else _ops.prepare(q, k, v, call)
    if prepared.plan is None:
        raise Unsupported(
            f"q has shape {tuple(q.shape)}: there is no query, so nothing is launched and there is no plan"
        )
    return prepared, call


def _spelled(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Keywords with the masks and scores in them as kernels take them."""
    packed = [options.get(name) for name in _PACKED]
    where = Packed(*packed) if any(one is not None for one in packed) else None  # type: ignore[arg-type]
    return named_terms(options, q, k, options.get("layout", "bshd"), where)


_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_OPTIONS = set(Call._fields) - {"source", "scales", "lists", "prepared"}


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), from who has asked for calls or from the operation."""
    if STACK:
        if is_invariant(call.numerics):
            refuse('numerics="invariant"')
        return route(q, k, v, call)
    if call.dropout_p or isinstance(call.window, list):
        call = _seeded(_tidy(call), q)
    return ATTENTION(q, k, v, call)  # type: ignore[no-any-return]


def _seeded(call: Call, q: torch.Tensor) -> Call:
    """The call with a seed from torch's generator, if it drops anything and has none."""
    if call.dropout_seed is not None or not isinstance(call.dropout_p, float) or not 0.0 < call.dropout_p < 1.0:
        return call
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)
    return call._replace(dropout_seed=seed)


def _tidy(call: Call) -> Call:
    """A window given as a list is a pair too."""
    return call._replace(window=tuple(call.window)) if isinstance(call.window, list) else call
