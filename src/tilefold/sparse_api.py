"""What users call of block-sparse attention: sign, document, delegate."""

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch

from .errors import DtypeError, Unsupported, ValueRangeError
from .keywords import refusing, unexpected, unexpected_of
from .masks import Mask
from .ops.call import Call, args_of, check_kinds
from .ops.checked import checked_lists, checked_packed, checked_places
from .ops.dense.library import resolved
from .ops.device import device_asked
from .ops.faults import Mode, asked, mode_for, mode_of, watch_of
from .ops.masking import Terms, spelled_for_lists
from .ops.places import check_pages
from .ops.source import Lists, Packed, Paged
from .ops.sparse import sparse as _sparse
from .ops.sparse.sparse_call import check_lists
from .ops.sparse.sparse_library import SPARSE, SPARSE_PAGED
from .ops.watch import wants_gradient
from .scores import Score
from .types import Constant, Layout, ModArgs, ModFunction

if TYPE_CHECKING:
    from .plan import Device
    from .plan.sparse.sparse import SparsePlan
    from .plan.sparse.sparse_backward import SparseBackwardPlan
    from .sparse import BlockIndex

NO_TENSORS = (None, None, None, None)  # alibi_slopes, bias, mask and sinks, which block-sparse attention does not have

__all__ = ["sparse_attention", "sparse_attention_paged", "sparse_attention_varlen", "sparse_plan"]


@refusing
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    score_grad: ModFunction | Constant | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    plan: "SparsePlan | Constant | None" = None,
    backward_plan: "SparseBackwardPlan | Constant | None" = None,
    check: bool | str | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    **others: NoReturn,
) -> Any:
    """Attention of each query block over the KV blocks that its list names.

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32; dim 1 to 256; any strides with a contiguous last dimension.
        k: [batch, seq_k, kv_heads, dim], dtype of q; heads must be a multiple of kv_heads.
        v: [batch, seq_k, kv_heads, dim_v], dtype of q.
        index: the lists, a `BlockIndex` made for seq_q and seq_k; shared over batch or heads by a size of 1.  One that is
            `masked` needs a mask_mod or causal=True.
        causal: query i sees key j only if j <= i + seq_k - seq_q; cuts inside the listed blocks, lists nothing.
        scale: of q . k, 1e-30 to 1e30; None: 1 / sqrt(dim).
        softcap, score_mod, score_args, mask_mod, mask_args, layout, return_lse: as for `attention`.  There is no window,
            bias, alibi_slopes or sinks: a mask or a score_mod does what the first three do.
        score_grad: @triton.jit function with the arguments of score_mod that returns the derivative of the new score by the given
            one.  None: for gradients it is made of the source of score_mod, as for `attention`.
        plan: a `SparsePlan` to follow exactly, made by `sparse_plan` and perhaps changed; PlanError if it does not fit.
        backward_plan: the same for the backward pass, a `SparseBackwardPlan`.
        check: True: first read the lists and raise ValueRangeError naming what is out of range.  "device": a launch before the
            kernel's takes note of it and makes copies in range of counts and sizes: a list ends before the first block that does
            not exist; nothing waits, `last_fault` tells.  Gradients then transpose the lists in each call.  Default: what the
            environment variable TILEFOLD_CHECK said, else False.
        mask: a `Mask` (`tilefold.masks`) that has to hold, too, inside the listed blocks; it lists nothing.
        score: a `Score` (`tilefold.scores`) of softcap and a rule, instead of softcap and score_mod.

    Returns:
        out, like q with dim_v for dim; with return_lse (out, lse), lse [batch, heads, seq_q] fp32, natural log.  A row without a
        live key (an empty list, only empty blocks, a query past query_sizes) is 0 with lse -inf.  The order of a list changes
        nothing but rounding.  Few query blocks: each list is split over the SMs and merged, the same way every run.

        Both are differentiable in q, k and v, once; gradients are contiguous, 0 for keys that no query sees, and the same to the
        last bit in every run.  The backward pass needs the transposed lists: `index.transpose()`, made when it is first asked for
        and kept on the index.  Its scratch is two fp32 numbers a query and head; on sm_90 also one int32 an entry of the lists
        and dS of some heads at a time, 8 KiB a pair of blocks of 64, at most 4 GiB (`print` a `SparseBackwardPlan`).

    Raises:
        As `attention`.  ModifiedError from the backward pass if a tensor of index (or of score_args or mask_args) was changed in
        place after this call.  Unsupported if a gradient is needed and score_mod has no derivative, or args require one;
        and if index is masked and the call has no mask.

    Source: block-sparse FlashAttention (Dao et al. 2022, arXiv:2205.14135, section 3.3).
    """
    if others:
        raise unexpected_of(sparse_attention, others)
    if type(return_lse) is not bool or backward_plan is not None:
        check_kinds(return_lse, backward_plan, "SparseBackwardPlan")
    if mask is not None or score is not None:
        given = Terms(causal, None, softcap, None, None, mask, score_mod, score_args, mask_mod, mask_args, score_grad)
        causal, softcap, score_mod, score_args, mask_mod, mask_args, score_grad = _spelled(
            q, index, given, score, layout
        )
    if check is not None or asked(check, "sparse_attention"):
        index = _checked(index, mode_of(check), "sparse_attention")
    call = Call(causal, None, scale, softcap, layout, None, None, None, None, score_mod, score_args, mask_mod, mask_args, None,
                plan, score_grad, backward_plan, lists=_lists_of(index))  # fmt: skip
    if index.masked:
        _check_masked(index, mask_mod, causal)
    out, lse = SPARSE(q, k, v, call, index.transpose)
    return (out, lse) if return_lse else out


@refusing
def sparse_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    score_grad: ModFunction | Constant | None = None,
    return_lse: bool = False,
    plan: "SparsePlan | Constant | None" = None,
    backward_plan: "SparseBackwardPlan | Constant | None" = None,
    check: bool | str | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    **others: NoReturn,
) -> Any:
    """`sparse_attention` within each of many sequences that are packed along the first dimension, each with its own lists.

    Args:
        q: [total_q, heads, dim] fp16, bf16 or fp32: the queries of all sequences, one after the other.
        k: [total_k, kv_heads, dim], dtype of q.
        v: [total_k, kv_heads, dim_v], dtype of q.
        index: the lists of sequence b are [b] (or shared, by a size of 1); seq_q and seq_k are at least the longest sequences.
            Blocks are counted from each sequence's own start: query block i begins at its row i * block_q.  Query blocks past
            a shorter sequence's end are not looked at, and a KV block that begins at or past its end adds nothing.
        cu_seqlens_q: [batch + 1] int32 on the same device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
            The values are not read on the host (but in the interpreter, which refuses others): they must begin at 0, ascend and
            stay within total_q.
        cu_seqlens_k: [batch + 1] int32, the same for k and v.  Lengths of 0 are fine on either side.
        causal: aligned to the bottom right of each sequence.
        check: as for `sparse_attention` and `attention_varlen`.
        The other arguments are those of `sparse_attention`.

    Returns:
        out [total_q, heads, dim_v]; with return_lse (out, lse), lse [heads, total_q] fp32, natural log.  Rows of q that belong to
        no sequence, or lie past seq_q in theirs, hold anything.

    Raises:
        As `sparse_attention`.
    """
    if others:
        raise unexpected_of(sparse_attention_varlen, others)
    check_kinds(return_lse, backward_plan, "SparseBackwardPlan")
    if mask is not None or score is not None:
        given = Terms(causal, None, softcap, None, None, mask, score_mod, score_args, mask_mod, mask_args, score_grad)
        (causal, softcap, score_mod, score_args, mask_mod, mask_args,
         score_grad) = _spelled(q, index, given, score, batch_of=cu_seqlens_q)  # fmt: skip
    index = _checked(index, mode_of(check), "sparse_attention_varlen")
    lists = _lists_of(index)
    _check_masked(index, mask_mod, causal)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, lists.seq_q, lists.seq_k)
    if mode := mode_for(check, cu_seqlens_q):
        packed = checked_packed(q, k, packed, mode, "sparse_attention_varlen")
    mods = (score_mod, score_args, mask_mod, mask_args)
    call = Call(
        causal, None, scale, softcap, "bshd", *NO_TENSORS, *mods, packed, plan, score_grad, backward_plan, lists=lists
    )
    out, lse = SPARSE(q, k, v, call, index.transpose)
    return (out, lse) if return_lse else out


@refusing
def sparse_attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    index: "BlockIndex",
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    score_mod: ModFunction | Constant | None = None,
    score_args: ModArgs = (),
    mask_mod: ModFunction | Constant | None = None,
    mask_args: ModArgs = (),
    layout: Layout = "bshd",
    return_lse: bool = False,
    plan: "SparsePlan | Constant | None" = None,
    check: bool | str | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    **others: NoReturn,
) -> Any:
    """`sparse_attention` over a KV cache in pages: key j of sequence b is row j % page_size of page
    block_table[b, j // page_size].

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32.
        k_pages: [pages, page_size, kv_heads, dim], dtype of q; a page holds any number of keys, whatever block_k is.
        v_pages: [pages, page_size, kv_heads, dim_v], dtype of q.  Both with any strides and a contiguous last dimension.
        index: the lists, made for seq_q and for as many keys as the cache may come to hold, seq_k <= max_pages * page_size.
        block_table: [batch, max_pages] int32 on the same device: the page of each page_size keys of a sequence.  Entries past a
            sequence's last key are never looked up; pages may be shared.
        cache_seqlens: [batch] int32: how many keys each sequence has, 0 to seq_k.  A listed block that begins past them adds
            nothing.  Neither tensor is read on the host: a captured CUDA graph follows their values.  In the interpreter
            both are, and ValueRangeError names the entry that is out of range.
        causal: query i sees key j only if j <= i + cache_seqlens[b] - seq_q: the queries are the last ones of the sequence.
        layout: "bshd" as above, or "bhsd" for [batch, heads, seq, dim] of q and out and [pages, kv_heads, page_size, dim].
        check: as for `sparse_attention`, of block_table and cache_seqlens, too: a sequence ends before the first page that does
            not exist.
        The other arguments are those of `sparse_attention`.  Mods are given cache_seqlens[b] as seq_k.

    Returns:
        As `sparse_attention`, without gradients.

    Raises:
        As `sparse_attention`; Unsupported if an input requires a gradient.

    Source: paged K and V are vLLM's (Kwon et al. 2023, arXiv:2309.06180), the names flash-attention's.
    """
    if others:
        raise unexpected_of(sparse_attention_paged, others)
    check_kinds(return_lse)
    if mask is not None or score is not None:
        given = Terms(causal, None, softcap, None, None, mask, score_mod, score_args, mask_mod, mask_args)
        causal, softcap, score_mod, score_args, mask_mod, mask_args, _ = _spelled(q, index, given, score, layout)
    mode = mode_of(check)
    index = _checked(index, mode, "sparse_attention_paged")
    paged = _checked_pages(k_pages, Paged(block_table, cache_seqlens), index, layout, mode)
    mods = (score_mod, score_args, mask_mod, mask_args)
    call = Call(causal, None, scale, softcap, layout, *NO_TENSORS, *mods, paged, plan, lists=_lists_of(index))
    _check_masked(index, mask_mod, causal)
    if torch.is_grad_enabled() and wants_gradient((q, k_pages, v_pages, *args_of(call).values())):
        raise Unsupported(
            "an input requires a gradient, but attention over pages has no backward pass: call under torch.no_grad(), or "
            "detach() the inputs"
        )
    out, lse = SPARSE_PAGED(q, k_pages, v_pages, call)
    return (out, lse) if return_lse else out


@overload
def sparse_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    *,
    direction: Literal["forward"] = "forward",
    device: "str | Device | None" = None,
    **options: Any,
) -> "SparsePlan": ...


@overload
def sparse_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    *,
    direction: Literal["backward"],
    device: "str | Device | None" = None,
    **options: Any,
) -> "SparseBackwardPlan": ...


def sparse_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    *,
    direction: Literal["forward", "backward"] = "forward",
    device: "str | Device | None" = None,
    **options: Any,
) -> "SparsePlan | SparseBackwardPlan":
    """The `tilefold.plan.SparsePlan` that `sparse_attention(q, k, v, index, **options)` follows, without running it; `print` it
    to read the decision.

    With cu_seqlens_q and cu_seqlens_k that of `sparse_attention_varlen`, with block_table and cache_seqlens that of
    `sparse_attention_paged`.  direction="backward": the `tilefold.plan.SparseBackwardPlan` of the call's backward pass, which
    the call takes as backward_plan (change it by `with_tiles`).  device: as for `attention_plan`.  Raises what the call would
    raise, and Unsupported for a call that has nothing to compute."""
    options.pop("return_lse", None)
    lists = _lists_of(index)
    cu_q, cu_k = (options.pop(name, None) for name in _PACKED)
    table, lengths = (options.pop(name, None) for name in _PAGED)
    for name in options:
        if name not in (*_OPTIONS, "mask", "score"):
            raise unexpected("sparse_plan", name, (*_OPTIONS, *_PACKED, *_PAGED))
    if (cu_q is not None or cu_k is not None) and (table is not None or lengths is not None):
        raise Unsupported(
            f"{' and '.join(_PACKED)} were given with {' and '.join(_PAGED)}: no kernel takes packed queries to pages"
        )
    if cu_q is not None or cu_k is not None:
        options["source"] = Packed(cu_q, cu_k, lists.seq_q, lists.seq_k)
    if table is not None or lengths is not None:
        options["source"] = Paged(table, lengths)
    if direction not in ("forward", "backward"):
        raise ValueRangeError(f"direction must be 'forward' or 'backward', got {direction!r}")
    mask, score = options.pop("mask", None), options.pop("score", None)
    if mask is not None or score is not None:
        given = Terms(mask=mask, **{name: options[name] for name in _SPELLED if name in options})
        made = _spelled(q, index, given, score, options.get("layout", "bshd"), cu_q)
        options |= dict(zip(_SPELLED, made, strict=True))
    _check_masked(index, options.get("mask_mod"), options.get("causal"))
    call = resolved(Call(lists=lists, **options))
    on = device_asked(device)
    prepared = _sparse.prepare_anew(q, k, v, call, on) if on else _sparse.prepare(q, k, v, call)
    if prepared.plan is None:
        raise Unsupported(
            f"q has shape {tuple(q.shape)}: there is no query, so nothing is launched and there is no plan"
        )
    if direction == "backward":
        from .ops.sparse.sparse_backward import backward_plan_of  # here: `import tilefold` stays light

        return backward_plan_of(q, k, v, call, on)
    return prepared.plan  # type: ignore[no-any-return]


_SPELLED = ("causal", "softcap", "score_mod", "score_args", "mask_mod", "mask_args", "score_grad")


def _spelled(
    q: torch.Tensor,
    index: "BlockIndex",
    given: Terms,
    score: Score | None,
    layout: Layout = "bshd",
    batch_of: Any = None,
) -> tuple[Any, ...]:
    """Keywords (_SPELLED) with the mask and the score as kernels take them; batch_of: cu_seqlens of a packed call."""
    lists = _lists_of(index)
    batch = q.shape[0] if batch_of is None else batch_of.shape[0] - 1
    sizes = (batch, lists.seq_q, lists.seq_k)
    made = spelled_for_lists(q, given, score, sizes, layout, batch_of is not None)
    return tuple(getattr(made, name) for name in _SPELLED)


_PACKED = ("cu_seqlens_q", "cu_seqlens_k")
_PAGED = ("block_table", "cache_seqlens")
_OPTIONS = {*_SPELLED, "scale", "layout", "plan", "backward_plan"}


def _checked(index: "BlockIndex", mode: Mode, operation: str) -> "BlockIndex":
    """The index as `check` asks for it; what is none is left to `_lists_of`."""
    from .sparse import BlockIndex

    if not mode or not isinstance(index, BlockIndex):
        return index
    if mode != "device":
        check_lists(_lists_of(index))
        return index.validate()
    counts, block_sizes, query_sizes = checked_lists(index.tensors(), index.geometry, watch_of(operation))
    return index.with_tensors(index.indices, counts, block_sizes, query_sizes)


def _checked_pages(k_pages: Any, paged: Paged, index: Any, layout: str, mode: Mode) -> Paged:
    """Where the keys of a paged call lie, as `check` asks for it; what is no such tensor is left to the call's own checks."""
    from .sparse import BlockIndex

    table, lengths = paged
    if not mode or not isinstance(index, BlockIndex) or layout not in ("bshd", "bhsd"):
        return paged
    if not all(isinstance(t, torch.Tensor) for t in (k_pages, *paged)) or k_pages.dim() != 4:
        return paged
    page = k_pages.shape[1 if layout == "bshd" else 2]
    shapes = table.dim() == 2 and lengths.shape == table.shape[:1] and index.seq_k <= page * table.shape[1]
    if not shapes or any(t.dtype != torch.int32 or t.device != k_pages.device or t.stride(-1) != 1 for t in paged):
        return paged
    if mode != "device":
        check_pages(paged, k_pages.shape[0], page, index.seq_k)
        return paged
    places = (None, None, lengths, None, None, table)
    limit, watch = k_pages.shape[0], watch_of("sparse_attention_paged")
    _, _, lengths, _ = checked_places(places, watch, capacity=index.seq_k, limit=limit, page=page)  # type: ignore[assignment]
    return Paged(table, lengths)


def _instead(given: object) -> str:
    """What to do with something that holds lists, but is no BlockIndex."""
    from .sparse import Selection

    if isinstance(given, Selection):
        return ": pass its .index"
    if hasattr(given, "kv_num_blocks"):
        return ": make one with BlockIndex.from_flex(mask)"
    return ""


def _check_masked(index: "BlockIndex", mask_mod: object, causal: object) -> None:
    """A record whose lists came from a mask that also cuts inside blocks needs a mask in the call, too."""
    if index.masked and mask_mod is None and causal is not True:
        raise Unsupported(
            "index was made from a mask that also cuts inside blocks, which it does not hold (BlockIndex.masked), and the call "
            "has no mask_mod: every token of its partial blocks would be attended.  Give the mask as mask_mod, or as causal=True "
            "if it is no more than that; or make the index with masked=False if blocks are meant whole"
        )


def _lists_of(index: "BlockIndex") -> Lists:
    """What kernels need of the index; DtypeError for anything else."""
    if not hasattr(index, "_kept"):  # of a BlockIndex alone, whose class takes a millisecond to import
        raise DtypeError(f"index must be a tilefold.BlockIndex, got {type(index).__name__}{_instead(index)}")
    return Lists.of(index)
