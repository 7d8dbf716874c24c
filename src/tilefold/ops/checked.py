"""Index tensors in range for kernels that trust them: one small launch before the call, no synchronisation; and operators for
torch's dispatcher, where somebody traces or watches.

The kernels of decoding and appending look at what they follow by themselves (ops.cache); this is for all others, whose calls take
a hundred times as long as such a launch."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from .bound import Bound, Example, meta
from .device import device_of
from .faults import WORDS, Mode, Watch, note_of, require_kernels, watch_of
from .places import check_packed
from .records import recorded
from .source import Packed, facts_of_values
from .watch import is_watched

CHUNK = 128  # entries that a program looks at at a time
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Maybe = torch.Tensor | None
Places = tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]  # cu_q, cu_k, lengths, pads, batch_index, table


def checked_places(
    places: Places, watch: Watch, total: tuple[int, int] = (0, 0), longest: tuple[int, int] = (0, 0), capacity: int = 0,
    more: int = 0, limit: int = 0, page: int = 1,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(cu_q, cu_k, lengths, batch_index) in range, None where they were None (lengths may come new where there is a table).

    places: cu_q, cu_k, lengths, pads, batch_index, table of `Cache`; total, longest: rows of q and k, and the longest sequences;
    capacity, more: as there; limit: how many caches or pages there are; page: rows of one."""
    numbers = [*total, *longest, capacity, more, limit, page, *watch]
    through = torch.compiler.is_compiling() or is_watched(places)
    made = (checked_places_op if through else _places)(*places, numbers)
    return tuple(None if shape is None else t for t, shape in zip(made, _news(places), strict=True))  # type: ignore[return-value]


def checked_packed(q: Any, k: Any, packed: Packed, mode: Mode, operation: str) -> Packed:
    """The places of packed sequences as `check` asks for them: looked at on the host, or in range by a launch; k None: queries
    alone.  What is no such tensor is left to the call's own checks."""
    both = (packed.cu_q,) if k is None else (packed.cu_q, packed.cu_k)
    if not all(isinstance(t, torch.Tensor) for t in (q, *both, *(() if k is None else (k,)))):
        return packed
    fits = all(t.dtype == torch.int32 and t.dim() == 1 and t.is_contiguous() and t.device == q.device for t in both)
    numbers = (packed.max_q, packed.max_k)
    packs = q.dim() == 3 and (k is None or k.dim() == 3)
    if not fits or len({t.shape[0] for t in both}) > 1 or both[0].shape[0] < 1 or not packs:
        return packed
    if any(
        isinstance(n, bool) or not isinstance(n, int | torch.SymInt) or (isinstance(n, int) and n < 0) for n in numbers
    ):
        return packed
    rows = q.shape[0], q.shape[0] if k is None else k.shape[0]
    if mode != "device":
        check_packed(packed, *rows, operation)
        return packed
    places: Places = (packed.cu_q, None if k is None else packed.cu_k, None, None, None, None)
    cu_q, cu_k, _, _ = checked_places(places, watch_of(operation), rows, numbers)
    return packed._replace(cu_q=cast("torch.Tensor", cu_q), cu_k=cast("torch.Tensor", cu_q if cu_k is None else cu_k))


def checked_lists(
    lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], geometry: tuple[int, ...], watch: Watch
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(counts, block_sizes, query_sizes) in range; a list ends before the first block that does not exist."""
    numbers = [*geometry, watch.operation]
    through = torch.compiler.is_compiling() or is_watched(lists)
    made = (checked_lists_op if through else _lists)(*lists, numbers)
    given = lists[1:]
    return tuple(None if old is None else new for old, new in zip(given, made, strict=True))  # type: ignore[return-value]


# ---------------------------------------------------------------- where sequences lie


def _news(places: Places) -> list[tuple[int, ...] | None]:
    """Shapes of what is made of cu_q, cu_k, lengths and batch_index."""
    cu_q, cu_k, lengths, _, batch_index, table = places
    cut = table[:, 0] if lengths is None and table is not None else lengths
    return [None if t is None else tuple(t.shape) for t in (cu_q, cu_k, cut, batch_index)]


def _empty(like: torch.Tensor, shapes: Sequence[tuple[int, ...] | None]) -> list[torch.Tensor]:
    return [torch.empty((0,) if shape is None else shape, dtype=torch.int32, device=like.device) for shape in shapes]


def _places(
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    lengths: torch.Tensor | None,
    pads: torch.Tensor | None,
    batch_index: torch.Tensor | None,
    table: torch.Tensor | None,
    numbers: Sequence[int],
) -> Four:
    places: Places = (cu_q, cu_k, lengths, pads, batch_index, table)
    like = next(t for t in places if t is not None)
    shapes = _news(places)
    news = _empty(like, shapes)
    given = [None if shape is None else t for t, shape in zip(news, shapes, strict=True)]
    bound = _bind_places(places, numbers)
    if bound is not None:
        bound((note_of(like.device), *places, *given))
    return news[0], news[1], news[2], news[3]


@recorded("checked places", lambda places, numbers: facts_of_values(*places, *numbers))
def _bind_places(places: Places, numbers: Sequence[int]) -> Bound | None:
    """The launch, None for no sequence."""
    for given in places:
        if given is not None:
            require_kernels(given.device)
    from ..kernels.cache.check_places import check_places

    cu_q, cu_k, lengths, pads, batch_index, table = places
    offsets = next((t for t in (cu_q, cu_k) if t is not None), None)
    each = next((t for t in (lengths, pads, batch_index, table) if t is not None), None)
    batch = offsets.shape[0] - 1 if offsets is not None else each.shape[0] if each is not None else 0
    total_q, total_k, max_q, max_k, capacity, more, limit, page, operation, fewest, shift, columns = numbers
    width = 0 if table is None else table.shape[1]
    scalars = (
        batch, total_q, total_k, max_q, max_k, capacity, more, limit, max(1, page), 0 if table is None else table.stride(0),
        operation, fewest, shift, columns or width,
    )  # fmt: skip
    like = offsets if offsets is not None else each
    if like is not None and like.device.type != "meta":
        device_of(like.device)  # a kernel can run there
    programs = batch + (offsets is not None)
    if like is None or programs == 0:
        return None
    return Bound.of(check_places, programs, 11, scalars, {"CHUNK": CHUNK}, like.device, num_warps=1)


# ---------------------------------------------------------------- lists


def _lists(
    indices: torch.Tensor,
    counts: torch.Tensor,
    block_sizes: torch.Tensor | None,
    query_sizes: torch.Tensor | None,
    numbers: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = tuple(None if t is None else t.contiguous() for t in (block_sizes, query_sizes))
    new, *news = _empty(counts, _list_shapes(indices, counts, *sizes))
    bound = _bind_lists(indices, counts, sizes, numbers)
    if bound is not None:
        outs = [None if given is None else t for given, t in zip(sizes, news, strict=True)]
        bound((note_of(counts.device), indices, counts, *sizes, new, *outs))
    return new, news[0], news[1]


def _list_shapes(
    indices: torch.Tensor, counts: torch.Tensor, block_sizes: torch.Tensor | None, query_sizes: torch.Tensor | None
) -> list[tuple[int, ...] | None]:
    shared = tuple(torch.broadcast_shapes(indices.shape[:3], counts.shape))
    return [shared, *(None if t is None else tuple(t.shape) for t in (block_sizes, query_sizes))]


@recorded(
    "checked lists",
    lambda indices, counts, sizes, numbers: facts_of_values(indices, counts, *sizes, *numbers),
)
def _bind_lists(
    indices: torch.Tensor, counts: torch.Tensor, sizes: tuple[torch.Tensor | None, ...], numbers: Sequence[int]
) -> Bound | None:
    require_kernels(counts.device)
    from ..kernels.sparse.check_lists import check_lists

    if counts.device.type != "meta":
        device_of(counts.device)
    block_q, block_k, seq_q, seq_k, operation = numbers
    batch, heads, q_blocks = torch.broadcast_shapes(indices.shape[:3], counts.shape)
    rows = batch * heads * q_blocks

    def strides(t: torch.Tensor) -> tuple[int, int]:
        return (0 if t.shape[0] == 1 else t.stride(0)), (0 if t.shape[1] == 1 else t.stride(1))

    def shape(t: torch.Tensor | None) -> tuple[int, int]:
        return (0, 0) if t is None else (t.numel(), t.shape[1] if t.dim() == 3 else t.dim() - 2)

    (size_k, heads_k), (size_q, heads_q) = (shape(t) for t in sizes)
    rows_k = -(-size_k // CHUNK)
    scalars = (
        rows, rows_k, max(1, q_blocks), max(1, -(-seq_k // block_k)), max(1, heads), indices.shape[3], block_q, block_k, seq_q,
        seq_k, *strides(indices), indices.stride(2), *strides(counts), heads_k, heads_q, size_k, size_q, operation,
    )  # fmt: skip
    programs = rows + rows_k + -(-size_q // CHUNK)
    if programs == 0:
        return None
    return Bound.of(check_lists, programs, 8, scalars, {"CHUNK": CHUNK}, counts.device, num_warps=1)


# ---------------------------------------------------------------- the dispatcher

checked_places_op = torch.library.custom_op("tilefold::checked_places", mutates_args=())(_places)
checked_lists_op = torch.library.custom_op("tilefold::checked_lists", mutates_args=())(_lists)


@checked_places_op.register_fake
def _(
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, lengths: torch.Tensor | None, pads: torch.Tensor | None,
    batch_index: torch.Tensor | None, table: torch.Tensor | None, numbers: Sequence[int],
) -> Four:  # fmt: skip
    places: Places = (cu_q, cu_k, lengths, pads, batch_index, table)
    news = _empty(next(t for t in places if t is not None), _news(places))
    return news[0], news[1], news[2], news[3]


@checked_lists_op.register_fake
def _(
    indices: torch.Tensor, counts: torch.Tensor, block_sizes: torch.Tensor | None, query_sizes: torch.Tensor | None,
    numbers: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    new, *news = _empty(counts, _list_shapes(indices, counts, block_sizes, query_sizes))
    return new, news[0], news[1]


# ---------------------------------------------------------------- without a GPU


def example_launch(what: str, full: bool) -> Example:
    """(kernel, args, kwargs) on tensors without memory: to compile ahead of time.  what: "places", full: of a paged cache, else
    of packed sequences; "lists", full: with sizes of blocks."""

    i32 = torch.int32
    note, cu, each = meta(WORDS, dtype=torch.int64), meta(17, dtype=i32), meta(16, dtype=i32)
    if what == "places":
        packed: Places = (cu, cu, None, None, None, None)
        places: Places = (None, None, each, each, each, meta(16, 512, dtype=i32)) if full else packed
        bound = _bind_places(places, [16384, 16384, 1024, 1024, 8192, 0, 8192, 16, 1, 0, 0, 0])
        news = [None if shape is None else meta(*shape, dtype=i32) for shape in _news(places)]
        given: tuple[Any, ...] = (note, *places, *news)
    else:
        indices, counts = meta(1, 24, 364, 364, dtype=i32), meta(1, 24, 364, dtype=i32)
        sizes = meta(364, dtype=i32) if full else None
        bound = _bind_lists(indices, counts, (sizes, sizes), [64, 64, 23296, 23296, 5])
        given = note, indices, counts, sizes, sizes, counts, sizes, sizes
    assert bound is not None
    return bound.example(given)
