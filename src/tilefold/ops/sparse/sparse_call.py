"""The checks of a call of block-sparse attention."""

import torch

from ...errors import DeviceError, DtypeError, ModifiedError, ShapeError, ValueRangeError
from ...types import ModArgs
from ..call import Call, check_hooks, check_options, check_slope, layout_hint, scale_of, sizes_of
from ..source import Lists


def check_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[dict[str, int], float]:
    """(the sizes of all named dimensions, the softmax scale), after every check that reads no value."""
    from ...plan.sparse.sparse import SparsePlan
    from ...plan.torch_cpu import TorchPlan

    check_options(call)
    sizes = _sizes(q, k, v, call)
    check_hooks(call, q.device)
    check_slope(call.score_mod, call.score_grad, call.score_args)
    if call.plan is not None and not isinstance(call.plan, (SparsePlan, TorchPlan)):
        raise DtypeError(f"plan must be a SparsePlan or None, got {type(call.plan).__name__}")
    return sizes, scale_of(call, sizes["dim_qk"])


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    """The sizes of all named dimensions, of tensors and lists that agree; a ShapeError says how the layout was taken."""
    try:
        return _fitting(q, k, v, call)
    except ShapeError as error:
        if call.packed is not None:
            raise
        text, hint = str(error), layout_hint(call.layout, lambda other: _fitting(q, k, v, call._replace(layout=other)))
        raise ShapeError(f"{text.removesuffix(hint) if hint else text} (layout is {call.layout!r}){hint}") from None


def _fitting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    sizes = sizes_of(q, k, v, call)
    if call.paged is not None:
        _check_room(call.lists, sizes)
    _check_lists(call.lists, sizes, q.device, "q" if call.packed is None else "cu_seqlens_q")
    return sizes


def _check_room(index: Lists, sizes: dict[str, int]) -> None:
    """The index counts the keys of a paged cache, whose table may have room for more."""
    room = sizes["max_pages"] * sizes["page_size"]
    if index.seq_k > room:
        raise ShapeError(
            f"index was made for seq_k={index.seq_k}, but block_table has room for {room} keys: "
            f"{sizes['max_pages']} pages of {sizes['page_size']}"
        )
    sizes["seq_k"] = index.seq_k


def _check_lists(index: Lists, sizes: dict[str, int], device: torch.device, batch_of: str) -> None:
    """The index describes these sequences, on this device; batch_of: the argument that says how many they are."""
    for name in ("seq_q", "seq_k"):
        if getattr(index, name) != sizes[name]:
            raise ShapeError(
                f"index was made for {name}={getattr(index, name)}, but the tensors have {name}={sizes[name]}"
            )
    for part in ("indices", "counts", "block_sizes", "query_sizes"):
        t = getattr(index, part)
        if t is None:
            continue
        shared = t.shape[: 2 if part in ("indices", "counts") else t.dim() - 1]
        for name, size in zip(("batch", "heads"), shared, strict=False):
            if size not in (1, sizes[name]):
                whose = batch_of if name == "batch" else "q"
                raise ShapeError(f"index.{part} has {name}={size}, expected {sizes[name]} (as in {whose}) or 1")
        if t.device != device:
            raise DeviceError(f"index.{part} is on {t.device}, but q is on {device}")


def check_lists(lists: Lists) -> None:
    """The values of the lists: only in the interpreter, where a number out of range would end the process."""
    capacity, blocks = lists.indices.shape[3], -(-lists.seq_k // lists.block_k)
    counts = lists.counts
    if (wrong := (counts < 0) | (counts > capacity)).any():
        raise _error("counts", counts, wrong, f"0 to {capacity}, the capacity of the lists")
    meant = torch.arange(capacity, device=counts.device) < counts[..., None]
    if (wrong := meant & ((lists.indices < 0) | (lists.indices >= blocks))).any():
        raise _error("indices", lists.indices.expand_as(wrong), wrong, f"0 to {blocks - 1}, the last KV block")


def _error(part: str, values: torch.Tensor, wrong: torch.Tensor, expected: str) -> ValueRangeError:
    place = wrong.nonzero()[0].tolist()
    return ValueRangeError(f"index.{part}{place} is {int(values[tuple(place)])}, expected {expected}")


# ---------------------------------------------------------------- unchanged until the backward pass


def versions_of(call: Call) -> tuple[int | None, ...]:
    """How often torch has changed each of the call's own tensors in place; None where nothing counts it."""
    lists = call.lists
    indices, counts, sizes, queries = lists.indices, lists.counts, lists.block_sizes, lists.query_sizes
    if sizes is None and queries is None and call.packed is None and not call.score_args and not call.mask_args:
        try:  # in every call that needs a gradient: half a microsecond less than the general way
            return indices._version, counts._version, None, None
        except RuntimeError:  # made in inference mode, where nothing counts
            pass
    return tuple(None if t is None or t.is_inference() else t._version for t in _read_again(call))


def check_unchanged(call: Call, versions: tuple[int | None, ...]) -> None:
    """ModifiedError, in torch's words, if a tensor that the backward pass reads again has changed since `versions_of`."""
    now = versions_of(call)
    if now == versions:
        return
    at = next(i for i, (old, new) in enumerate(zip(versions, now, strict=True)) if old != new)
    where = () if call.packed is None else ("cu_seqlens_q", "cu_seqlens_k")
    args = (f"{n}_args[{i}]" for n, given in _args_of(call) for i, t in enumerate(given) if isinstance(t, torch.Tensor))
    name = ("index.indices", "index.counts", "index.block_sizes", "index.query_sizes", *where, *args)[at]
    t = _read_again(call)[at]
    raise ModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {name}, "
        f"shape {tuple(() if t is None else t.shape)}, is at version {now[at]}; expected version {versions[at]} instead"
    )


def _read_again(call: Call) -> tuple[torch.Tensor | None, ...]:
    own = (*call.lists[:4], *call.placement)
    if not call.score_args and not call.mask_args:
        return own
    return own + tuple(t for _, given in _args_of(call) for t in given if isinstance(t, torch.Tensor))


def _args_of(call: Call) -> tuple[tuple[str, ModArgs], tuple[str, ModArgs]]:
    return ("score", call.score_args), ("mask", call.mask_args)
