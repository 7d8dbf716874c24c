"""What launches of attention have in common, whichever kernel: strides, boxes, the band, mods, dropout."""

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from ...masks import BANDS
from ...types import Layout, Rules
from ..bound import Box, Slot, attribute, contiguous, strides_named
from ..call import UNBOUNDED, Call
from ..integers import runtime_ints
from .attention_tiles import is_listed, tiles_of

if TYPE_CHECKING:  # imported where they are needed: `import tilefold` stays light
    from ...plan import AttentionProblem

GIVEN = ("q", "k", "v", "out", "lse", "call")
"""What a call gives to a `Bound` of forward attention."""
HOOKS = ("score_mod", "mask_mod", "plan", "score_grad", "backward_plan")
hooks_of: Callable[[Call], tuple[Any, ...]] = attrgetter(*HOOKS)
"""The objects whose ids are part of the call's key."""
TENSORS = {name: Slot(name.lower()) for name in ("Q", "K", "V", "Out", "Lse")}


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    sizes: dict[str, int],
    window: tuple[int, int],
    band: str = "",
    dtype: str = "",
) -> "AttentionProblem":
    """The problem of a call; band: of `band_of`, where the kernels have it; dtype: of the output, if not q's."""
    from ...plan import AttentionProblem
    from ..reads import reads

    score = [n for n, used in (("softcap", call.softcap > 0), ("alibi", call.alibi_slopes is not None),
                               ("bias", call.bias is not None), ("user", call.score_mod is not None)) if used]  # fmt: skip
    ruled = call.mask_mod is not None and not (band and len(call.mask_mod.tree) == 2)  # type: ignore[union-attr]
    listed = call.mask is not None and is_listed(call.mask, sizes["heads"])
    by_place = not reads(call.mask_mod).score if ruled else listed
    masks = [n for n, used in ((band, band), ("mask", call.mask is not None), ("user", ruled)) if used]

    return AttentionProblem(
        sizes["batch"],
        sizes["seq_q"],
        sizes["seq_k"],
        sizes["heads"],
        sizes["kv_heads"],
        sizes["dim_qk"],
        sizes["dim_v"],
        dtype or _name_of(q.dtype),
        causal=window == (-1, 0),
        window=(-1, -1) if window == (-1, 0) else window,
        varlen=call.packed is not None,
        score_mods=tuple(score),
        mask_mods=tuple(masks),
        sinks=call.sinks is not None,
        dropout=call.dropout_p > 0,
        descriptors=boxable(k) and boxable(v),
        query_descriptors=boxable(q),
        bias_descriptors=tiles_of(call.bias),
        mask_descriptors=tiles_of(call.mask),
        mask_by_place=by_place,
    )


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def boxable(t: torch.Tensor) -> bool:
    """Can TMA read t?  16-byte base and strides, no broadcast dimension, nothing empty."""
    return t.data_ptr() % 16 == 0 and _boxable(t.shape, t.stride(), t.element_size())


def _boxable(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """`boxable` of an aligned tensor."""
    if 0 in shape:
        return False
    for at in range(len(shape) - 1):
        if shape[at] > 1 and (strides[at] <= 0 or strides[at] * size % 16 or strides[at] * size >= 1 << 40):
            return False
    return True


def sides_of(q: tuple[Any, ...], k: tuple[Any, ...], v: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """`side_of` of all three."""
    side = side_of(k, at)
    return side_of(q, at), side, side if v == k else side_of(v, at)


def side_of(facts: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """What of a tensor's `facts_of` is the same in calls that differ in their lengths alone: all but its dimension `at` and the
    strides by which rows lie, where TMA reads it as before."""
    kind, shape, strides, dtype, *_, aligned, _ = facts
    sizes = list(shape)
    sizes[at] = -1
    return kind, tuple(sizes), strides[-1], aligned and _boxable(shape, strides, dtype.itemsize), facts[3:]


def kind_of(window: tuple[int, int], band: str = "") -> int:
    """Which kind of device.ranges a call's band is: that of its window, or the one that `band_of` found."""
    from ...device import ranges

    kind = {(-1, -1): ranges.FULL, (-1, 0): ranges.CAUSAL}.get(window, ranges.WINDOW)
    return int((getattr(ranges, band.upper()) if band else kind).value)


def band_of(call: Call, window: tuple[int, int]) -> str:
    """The band that the call's first rule is, where there is no window, "" for none; the first of mask_args is its `left`."""
    return BANDS.get(call.mask_mod.first, "") if isinstance(call.mask_mod, Rules) and window == (-1, -1) else ""


def lengths_of(problem: Any) -> dict[str, Any]:
    """Lengths of a problem of attention, by the kernels' names."""
    return {name: getattr(problem, name) for name in ("batch", "seq_q", "seq_k", "heads", "kv_heads", "group")}


def dims_of(problem: Any) -> dict[str, Any]:
    """Head dims of a problem of attention and columns of their tiles: constants of the portable kernels."""
    return {name.upper(): getattr(problem, name) for name in ("dim_qk", "dim_v", "block_qk", "block_v")}


def sides_named(window: tuple[int, int]) -> dict[str, int]:
    """The sides of a window by the kernels' names."""
    return dict(zip(("left", "right"), (UNBOUNDED if side < 0 else side for side in window), strict=True))


def head_strides(t: torch.Tensor | tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """(batch, row, head), or (row, head) of a packed tensor; t: or the shape of a contiguous tensor."""
    strides = contiguous(t) if isinstance(t, tuple) else t.stride()
    if len(strides) == 3 or layout == "bshd":
        return strides[:-1]
    batch, head, row, _ = strides
    return batch, row, head


def sequence_strides(t: torch.Tensor | tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """(batch, row, head), as `head_strides`; a packed tensor has batch stride 0."""
    strides = contiguous(t) if isinstance(t, tuple) else t.stride()
    if len(strides) == 3:
        return 0, *strides[:-1]
    batch, second, third, _ = strides
    return (batch, second, third) if layout == "bshd" else (batch, third, second)


def describe_box(t: torch.Tensor, layout: Layout, rows: int, block_d: int, *kind: Any) -> Box:
    """The descriptor of [B, H, N, D]; kind: as of Box.  A packed batch is one sequence to TMA.  The stride of a dimension of size
    1 means nothing and may be invalid: use one row's."""
    if t.dim() == 3:
        (length, heads, dim), (stride_n, stride_h, _), batch, stride_b = t.shape, t.stride(), 1, 0
    elif layout == "bshd":
        (batch, length, heads, dim), (stride_b, stride_n, stride_h, _) = t.shape, t.stride()
    else:
        (batch, heads, length, dim), (stride_b, stride_h, stride_n, _) = t.shape, t.stride()
    if batch == 1 or heads == 1 or length == 1:
        step = 16 // t.element_size()
        row = -(-dim // step) * step
        stride_b = row if batch == 1 else stride_b
        stride_h = row if heads == 1 else stride_h
        stride_n = row if length == 1 else stride_n
    return Box(t, [batch, heads, length, dim], [stride_b, stride_h, stride_n, 1], [1, 1, rows, block_d], *kind)


def shared_values(
    sizes: Mapping[str, int], scale: float, q: Any, k: Any, v: Any, out_shape: tuple[int, ...], layout: Layout
) -> dict[str, Any]:
    """What all forward kernels of attention take, by their names; sizes: at least seq_q, heads, kv_heads."""
    return {
        **TENSORS,
        "scale": scale,
        **sizes,
        "max_q": sizes["seq_q"],
        "group": sizes["heads"] // max(1, sizes["kv_heads"]),
        **strides_named("q", sequence_strides(q, layout), "bmh"),
        **strides_named("k", sequence_strides(k, layout), "bnh"),
        **strides_named("v", sequence_strides(v, layout), "bnh"),
        **strides_named("o", sequence_strides(out_shape, layout), "bmh"),
    }


def boxed(k: torch.Tensor, v: torch.Tensor, layout: Layout, rows: int, blocks: tuple[int, int]) -> dict[str, Slot]:
    """K and V by descriptors of `rows` rows; blocks: columns of each."""
    pair = zip("KV", (k, v), blocks, strict=True)
    return {name: Slot(name.lower(), describe_box(t, layout, rows, block_d).over) for name, t, block_d in pair}


def option_values(
    call: Call, window: tuple[int, int], mods: Any, softcap: float, dtype: torch.dtype, band: str = ""
) -> dict[str, Any]:
    """Options by the kernels' names: the same for every kernel that takes mods; band: of `band_of`."""
    sides: dict[str, Any] = {"left": Slot("call", lambda given: given.mask_args[0])} if band else {}
    exact = dtype == torch.float32
    made: dict[str, Any] = {
        **sides_named(window),
        **sides,
        "Sinks": attribute("call", "sinks", call.sinks),
        "stride_sinks": 0 if call.sinks is None else call.sinks.stride(0),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        "score_mods": (),
        "mask_mods": (),
        "dropout": Slot("call", dropout_of) if call.dropout_p else (),
    }
    if score_mods_of(mods, softcap, call, exact):
        made["score_mods"] = Slot("call", lambda given: score_mods_of(mods, softcap, given, exact))
    if mask_mods_of(mods, call, band):
        made["mask_mods"] = Slot("call", lambda given: mask_mods_of(mods, given, band))
    return made


def dropout_of(call: Call) -> tuple[Any, ...]:
    """(seed, p, factor of what is kept) for the kernels, () without dropout."""
    p = call.dropout_p
    return (call.dropout_seed, float(p), 1.0 / (1.0 - p)) if p else ()


def score_mods_of(mods: Any, softcap: float, call: Call, exact: bool) -> tuple[Any, ...]:
    """(function, its arguments) of each, in the order applied; mods: the module device.mods; exact: the inputs are fp32."""
    score: list[Any] = []
    if softcap:
        score.append((mods.softcap_exact if exact else mods.softcap, (softcap,)))
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
        score.append((mods.alibi, (slopes, slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))))
    if call.bias is not None:
        t = call.bias
        near = (t.shape[2] - 1) * t.stride(2) + (t.shape[3] - 1) * t.stride(3) < 1 << 31
        score.append((mods.near_bias if near else mods.bias, (t, *element_strides(t))))
    if call.score_mod is not None:
        score.append((call.score_mod, runtime_ints(call.score_args)))
    return tuple(score)


def mask_mods_of(mods: Any, call: Call, band: str = "") -> tuple[Any, ...]:
    """(function, its arguments) of each, but of the one that is the band of `band_of`."""
    masks: list[Any] = []
    if call.mask is not None:
        masks.append((mods.keep, (call.mask, *element_strides(call.mask))))
    if isinstance(call.mask_mod, Rules):
        masks += call.mask_mod.bound(mods, runtime_ints(call.mask_args), 1 if band else 0)
    elif call.mask_mod is not None:
        masks.append((call.mask_mod, runtime_ints(call.mask_args)))
    return tuple(masks)


def element_strides(t: torch.Tensor) -> tuple[int, ...]:
    """Those of `broadcast_strides` for device.mods: where rows begin at multiples of 16 elements a kernel is compiled for that,
    otherwise for any strides.  So lengths make two kernels, not one for each that is 1 or a multiple."""
    b, h, q, k = broadcast_strides(t)
    k = k if t.shape[3] > 1 else 1
    return (b, h, q, k) if (b | h | q) % 16 == 0 else (*runtime_ints((b, h, q)), k)


def broadcast_strides(t: torch.Tensor) -> tuple[int, ...]:
    """The four strides of a bias or mask, 0 where a dimension of size 1 is broadcast."""
    b, h, q, k = t.stride()
    shape = t.shape
    return b if shape[0] > 1 else 0, h if shape[1] > 1 else 0, q if shape[2] > 1 else 0, k
