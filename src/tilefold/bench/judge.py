"""Is an output right? Asked of every implementation before it is timed, against the fp64 reference on a sample of query rows.

The whole of a large case does not fit in fp64, and need not: each row of attention depends on its own query only, so a random
set of rows, with the first and the last among them, judges a kernel at any size.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilefold.bench.peers import Inputs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Judge", "Verdict", "sampled_rows"]

ROWS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison found: the largest absolute error and the relative L2 error, the limits that they had to meet, and
    whether they did. finite: no NaN or infinity anywhere in the output, the rows that were not sampled included."""

    ok: bool
    max_error: float
    max_limit: float
    l2_error: float
    l2_limit: float
    finite: bool = True


def sampled_rows(seq_q: int, count: int = ROWS, seed: int = 1) -> list[int]:
    """`count` different query rows, ascending, the first and the last among them; all rows if there are fewer."""
    import torch

    if seq_q <= count:
        return list(range(seq_q))
    inner = torch.randperm(seq_q - 2, generator=torch.Generator().manual_seed(seed))[: count - 2] + 1
    return sorted([0, *inner.tolist(), seq_q - 1])


class Judge:
    """The reference of one case, computed once, on the device that holds the inputs.

    The rows go through `tilefold.reference.attention`, one batch entry at a time, with the causal mask and the window of their
    true positions given as a boolean mask. The same rows computed by plain PyTorch in the inputs' dtype say how much error that
    dtype allows (`tilefold.reference.compare`).
    """

    def __init__(self, inputs: Inputs, count: int = ROWS) -> None:
        import torch

        from tilefold import reference

        self.rows = sampled_rows(inputs.problem.seq_q, count)
        mask = visible(inputs, self.rows)
        want, plain = [], []
        for b in range(inputs.problem.batch):
            q, k, v = inputs.q[b : b + 1, self.rows], inputs.k[b : b + 1], inputs.v[b : b + 1]
            want.append(reference.attention(q, k, v, mask=mask)[0])
            plain.append(reference.attention(q, k, v, mask=mask, dtype=q.dtype)[0])
        self.want: Tensor = torch.cat(want)
        self.plain: Tensor = torch.cat(plain)

    def verdict(self, out: "Tensor") -> Verdict:
        """Judge an output [B, Sq, H, Dv]."""
        from tilefold import reference

        found = reference.compare(out[:, self.rows], self.want, self.plain)
        finite = bool(out.isfinite().all())
        errors = (found.max_error, found.max_limit, found.l2_error, found.l2_limit)
        return Verdict(found.ok and finite, *errors, finite=finite)


def visible(inputs: Inputs, rows: list[int]) -> "Tensor":
    """Which keys each of the rows sees: bool [1, 1, len(rows), seq_k], on the inputs' device."""
    import torch

    p, device = inputs.problem, inputs.q.device
    place = torch.tensor(rows, device=device)[:, None] + (p.seq_k - p.seq_q)
    keys = torch.arange(p.seq_k, device=device)[None, :]
    left, right = p.sides
    seen = torch.ones(len(rows), p.seq_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= keys >= place - left
    if right >= 0:
        seen &= keys <= place + right
    return seen[None, None]
