"""Lists of block numbers as tensors: from a map and back, sorted, top-k, CSR; plain torch, and nothing is read on the host.

A list is a row of `indices` int32 [..., rows, capacity], of which the first `counts` int32 [..., rows] entries are
meant.  Every function's shapes follow from its arguments' shapes alone, so all of them run under CUDA-graph capture
and torch.compile.  What they write past a row's count is a block number in range, so that a kernel may load it ahead
and drop it."""

import torch


def as_int32(t: torch.Tensor) -> torch.Tensor:
    """int32 or int64 as int32; what does not fit stays out of range (negative, or the largest)."""
    return t if t.dtype == torch.int32 else t.clamp(-1, 2**31 - 1).to(torch.int32)


def padded(t: torch.Tensor, dims: int) -> torch.Tensor:
    """With dimensions of size 1 in front until it has `dims`; a view."""
    return t[(None,) * (dims - t.dim())]


def sizes_by_row(t: torch.Tensor) -> torch.Tensor:
    """Sizes of blocks [N], [B, N] or [B, H, N] as [B or 1, H or 1, N]; a view."""
    return t[:, None] if t.dim() == 2 else padded(t, 3)


def live_entries(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """bool [..., rows, capacity]: true at the entries before a row's count."""
    return torch.arange(capacity, device=counts.device, dtype=torch.int32) < counts[..., None]


def map_to_lists(keep: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices int32 [..., rows, capacity], counts int32 [..., rows], wanted int32 [..., rows]) of a bool map [...,
    rows, columns].

    Ascending.  wanted is the number of true columns; counts stops at capacity, which keeps the lowest columns.  Entry
    c of a row is the first column at which the running count reaches c + 1: a binary search, whose result does not
    depend on any order of execution.  Memory beside the result: 5 bytes a map element (4 if the map is contiguous) and
    4 bytes a list entry."""
    columns = keep.shape[-1]
    wanted = keep.sum(-1, dtype=torch.int32)
    if columns == 0 or capacity == 0:
        return wanted.new_zeros(*wanted.shape, capacity), torch.zeros_like(wanted), wanted
    running = keep.contiguous().cumsum(-1, dtype=torch.int32)
    ordinal = torch.arange(1, capacity + 1, device=keep.device, dtype=torch.int32)
    indices = torch.searchsorted(running, ordinal.expand(*wanted.shape, capacity).contiguous(), out_int32=True)
    return indices.clamp_(max=columns - 1), wanted.clamp(max=capacity), wanted


def lists_to_map(indices: torch.Tensor, counts: torch.Tensor, columns: int) -> torch.Tensor:
    """bool [..., rows, columns], true where a list names the column; indices and counts broadcast over leading dimensions.

    Memory beside the result: 13 bytes a list entry and a second byte a map element.  Block numbers must be in range."""
    live = live_entries(counts, indices.shape[-1])
    column = torch.where(live, indices, columns).long()  # one column too many takes what is past a row's count
    keep = torch.zeros(*column.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return keep.scatter_(-1, column, True)[..., :columns].contiguous()


def sort_lists(indices: torch.Tensor, counts: torch.Tensor, columns: int) -> torch.Tensor:
    """The same lists in ascending order, int32 [..., rows, capacity].  Memory beside the result: 16 bytes a list entry."""
    key = torch.where(live_entries(counts, indices.shape[-1]), indices, columns).to(torch.int32)
    return key.sort(-1).values.clamp_(max=max(0, columns - 1))


def topk_to_lists(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices int32 [..., rows, k] ascending, counts int32 [..., rows]): the k columns of highest score in each row.

    Equal scores go to the lower column (the sort is stable, which torch.topk is not); -inf and NaN are never listed.
    Memory beside the result: 17 bytes a score of 4 bytes, and 16 bytes a list entry."""
    eligible = scores > float("-inf")  # false for NaN too
    counts = eligible.sum(-1, dtype=torch.int32).clamp(max=k)
    order = scores.masked_fill(~eligible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return sort_lists(order, counts, scores.shape[-1]), counts


def csr_to_lists(
    crow: torch.Tensor, col: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices, counts, wanted) as `map_to_lists`, of crow [..., rows + 1] and col [..., entries]: row r is
    col[crow[r]:crow[r + 1]].

    In the order of col.  Memory beside the result: 24 bytes a list entry."""
    wanted = crow.diff(dim=-1).to(torch.int32).contiguous()
    counts = wanted.clamp(0, capacity)
    if col.shape[-1] == 0 or capacity == 0:
        return wanted.new_zeros(*wanted.shape, capacity), torch.zeros_like(wanted), wanted
    place = crow[..., :-1, None].long() + torch.arange(capacity, device=crow.device)
    place = place.clamp_(0, col.shape[-1] - 1).flatten(-2)  # no read outside col, whatever crow holds
    return as_int32(col.gather(-1, place)).view(*wanted.shape, capacity), counts, wanted
