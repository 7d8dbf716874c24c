"""fp64 oracle of block selection: each row as a Python list, by the rules as they are written down."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .coarse import by_head


class SelectedRows(NamedTuple):
    """keep bool [B, H, Qb, KVb]; gini, tau, mass fp64 [B, H, Qb]; tau None for "top_k".

    gap fp64 [B, H, Qb]: how far tau is from the nearest share that a set of best blocks has: what rounding must not reach for the
    set to be certain (inf where no mass decides, and for a tau of 0 or 1)."""

    keep: torch.Tensor
    gini: torch.Tensor
    tau: torch.Tensor | None
    mass: torch.Tensor
    gap: torch.Tensor


def gini(scores: torch.Tensor, *, block_sizes: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 [B, H, Qb]: sum_i sum_j |x_i - x_j| / (2 n sum x) over the finite scores of each row of [B, H, Qb, KVb]; 0 if they sum
    to 0.  From the sorted row, as sum_i (2 i - n - 1) x_i / (n sum x), x ascending and i from 1."""
    sizes = _expanded(block_sizes, scores)
    return _by_row(scores, lambda at, row: _gini([x for x, n in zip(row, sizes[at], strict=True) if x >= 0 and n > 0]))


def select(
    scores: torch.Tensor,
    *,
    method: str = "gini",
    tau_min: Any = None,
    tau_max: Any = None,
    tau: Callable[[torch.Tensor], Any] | None = None,
    top_p: Any = None,
    top_k: Any = None,
    sparsity: Any = None,
    min_blocks: Any = 1,
    max_blocks: Any = None,
    capacity: int | None = None,
    force_self: bool = False,
    force_first: int = 0,
    local_window: int | None = None,
    force: torch.Tensor | None = None,
    block_q: int = 64,
    block_k: int = 64,
    seq_q: int | None = None,
    seq_k: int | None = None,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
) -> SelectedRows:
    """The selection of `tilefold.sparse.select`, with its arguments, in fp64 on the host; checks nothing."""
    blocks, shape = scores.shape[3], tuple(scores.shape[:3])
    coefficients = gini(scores, block_sizes=block_sizes)
    share: torch.Tensor | None = None
    if method == "gini" and tau is not None:
        share = _setting(tau(coefficients), shape)
    elif method == "gini":
        low, high = (_setting(default if t is None else t, shape) for t, default in ((tau_min, 0.5), (tau_max, 0.95)))
        share = low + (high - low) * (1 - coefficients)
    elif method == "top_p":
        share = _setting(top_p, shape)
    if share is not None:
        share = share.nan_to_num(1.0).clamp(0, 1)
    if sparsity is not None:
        top_k = torch.ceil((1 - _setting(sparsity, shape) - 1e-6) * blocks).clamp(
            min=1
        )  # up to a millionth is rounding
    asked = {
        "k": 0 if top_k is None else top_k,
        "least": min_blocks,
        "most": blocks if max_blocks is None else max_blocks,
    }
    numbers = {name: _setting(value, shape) for name, value in asked.items()}
    window = 0 if force_self and local_window is None else local_window
    lengths = shape[2] * block_q if seq_q is None else seq_q, blocks * block_k if seq_k is None else seq_k
    forced = _forced(scores.shape, force_first, window, force, (block_q, block_k, *lengths))
    sizes = _expanded(block_sizes, scores)
    room = blocks if capacity is None else min(capacity, blocks)
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    mass, gap = torch.ones(shape, dtype=torch.float64), torch.full(shape, math.inf, dtype=torch.float64)
    for at in itertools.product(*map(range, shape)):
        row = scores[at].double().tolist()
        wanted = {name: max(0, min(blocks, int(t[at]))) for name, t in numbers.items()}
        mine = {j for j, one in enumerate(forced[at].tolist()) if one}
        chosen, mass[at], gap[at] = _row(
            row, sizes[at], mine, None if share is None else float(share[at]), wanted, room
        )
        keep[at][chosen] = True
    return SelectedRows(keep, coefficients, share, mass, gap)


def _forced(
    shape: torch.Size, first: int, window: int | None, force: torch.Tensor | None, geometry: tuple[int, int, int, int]
) -> torch.Tensor:
    """bool [B, H, Qb, KVb]: the first blocks, those within `window` of the query block's own, those of `force`."""
    block_q, block_k, seq_q, seq_k = geometry
    forced = torch.zeros(shape, dtype=torch.bool)
    forced[..., :first] = True
    for i in range(shape[2] if window is not None else 0):
        ends = (i * block_q, min((i + 1) * block_q, seq_q) - 1)
        low, high = ((t + seq_k - seq_q) // block_k for t in ends)
        forced[:, :, i, max(0, low - (window or 0)) : max(0, high + (window or 0) + 1)] = True
    return forced if force is None else forced | force


def _row(
    row: list[float], sizes: list[int], forced: set[int], share: float | None, wanted: dict[str, int], room: int
) -> tuple[list[int], float, float]:
    """(blocks kept, their share of the mass, the gap) of one row."""
    blocks = range(len(row))
    scored = {j for j in blocks if row[j] >= 0 and sizes[j] > 0}  # false for NaN
    mass = [row[j] if j in scored and math.isfinite(row[j]) else 0.0 for j in blocks]
    total = math.fsum(mass)

    def key(j: int) -> tuple[bool, bool, float, int]:
        return j not in scored, sizes[j] <= 0, -row[j] if j in scored else 0.0, j

    free = sorted((j for j in blocks if j not in forced), key=key)
    gap = math.inf
    if share is None:
        best = [j for j in free if j in scored][: max(0, wanted["k"] - len(forced))]
    elif share <= 0:
        best = []
    elif share >= 1:
        best = [j for j in free if j in scored and row[j] > 0]
    else:
        have = [*itertools.accumulate((mass[j] for j in free), initial=math.fsum(mass[j] for j in forced))]
        best = [j for j, before in zip(free, have, strict=False) if before < share * total]
        gap = min(abs(one / total - share) for one in have) if total else math.inf
    count = max(len(forced) + len(best), wanted["least"])
    count = min(max(min(count, wanted["most"]), len(forced)), room)
    chosen = [*sorted(forced), *free][:count]
    return chosen, math.fsum(mass[j] for j in chosen) / total if total else 1.0, gap


def _gini(scored: list[float]) -> float:
    x = sorted(value for value in scored if math.isfinite(value))
    total = math.fsum(x)
    if not total:
        return 0.0
    n = len(x)
    return max(0.0, math.fsum((2 * i - n - 1) * value for i, value in enumerate(x, 1)) / (n * total))


def _setting(value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """fp64 [B, H, Qb]; one dimension: [heads]."""
    t = value.detach().cpu().double() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    return (t[:, None] if t.dim() == 1 else t).expand(shape)


def _by_row(scores: torch.Tensor, of: Callable[[tuple[int, int, int], list[float]], float]) -> torch.Tensor:
    made = torch.zeros(scores.shape[:3], dtype=torch.float64)
    for b in range(made.shape[0]):
        for h in range(made.shape[1]):
            for i, row in enumerate(scores[b, h].double().tolist()):
                made[b, h, i] = of((b, h, i), row)
    return made


def _expanded(block_sizes: torch.Tensor | None, scores: torch.Tensor) -> dict[tuple[int, ...], list[int]]:
    """The sizes of the KV blocks that each row sees, all 1 where none are given."""
    b, h, q, n = scores.shape
    lists = by_head(torch.ones(1, 1, n) if block_sizes is None else block_sizes).expand(b, h, n).tolist()
    return {(i, j, k): lists[i][j] for i in range(b) for j in range(h) for k in range(q)}
