"""Which kernel and which tiles a product with weights of few bits gets on sm_90: rows of a table, the first that fits. Pure.

Each row says for which bits, up to how many rows of x (m), rows of the weight (n) and columns (k) it holds, 0 meaning any, and
whether it was measured.  Edit it after a measurement; nothing else decides.
"""

from dataclasses import dataclass

__all__ = ["CHOICES", "Choice", "choice_for"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A row: where it holds, then fields of LowbitPlan.

    block_m 0: the least power of two that has all rows of x, from 16 to 256; 128 where 256 would leave SMs idle.
    per_sm: programs an SM that a split of K may fill.  least: blocks of K that a split has at least."""

    bits: tuple[int, ...]
    m: int
    n: int
    k: int
    path: str
    block_n: int
    block_m: int
    num_warps: int
    stages: int
    per_sm: int = 1
    least: int = 16
    scaled: str = "after"
    join: bool = False
    early: bool = True
    registers: int = 0


ALL = (8, 4, 3, 2)
CHOICES = (
    # one to eight rows of x
    Choice((4,), 8, 4096, 4096, "rows", 16, 8, 8, 4, registers=128),
    Choice((4,), 8, 16384, 0, "rows", 32, 8, 4, 1, per_sm=4, least=8),
    Choice((4,), 8, 100000, 4096, "rows", 16, 8, 4, 1, least=8),
    Choice((4,), 8, 0, 4096, "rows", 32, 8, 2, 1, least=8),
    Choice((8, 3, 2), 8, 4096, 0, "rows", 16, 8, 8, 4, registers=128),
    Choice((2,), 8, 0, 8192, "rows", 32, 8, 4, 6, least=8),
    Choice((2,), 8, 0, 0, "rows", 32, 8, 8, 6),
    Choice((8,), 8, 0, 2048, "rows", 32, 8, 4, 1, least=8),
    Choice((8,), 8, 0, 0, "rows", 16, 8, 8, 1),
    Choice((3,), 8, 0, 8192, "rows", 32, 8, 4, 1, least=8),
    Choice(ALL, 8, 0, 0, "rows", 32, 8, 8, 1),
    # up to 16
    Choice((4,), 16, 4096, 0, "rows", 32, 16, 4, 6, least=8),
    Choice((4,), 16, 0, 0, "tile", 128, 16, 4, 4, per_sm=2, least=4, join=True),
    Choice((8,), 16, 4096, 0, "rows", 16, 16, 8, 4, registers=128),
    Choice((8,), 16, 0, 0, "rows", 16, 16, 4, 6, least=8, registers=128),
    # more
    Choice(ALL, 64, 0, 0, "hopper", 128, 0, 4, 8, least=4, scaled="before"),
    Choice(ALL, 128, 0, 0, "hopper", 128, 0, 4, 6, least=4, scaled="before"),
    Choice(ALL, 1024, 0, 0, "hopper", 128, 0, 4, 5, least=4, scaled="before"),
)


def choice_for(bits: int, m: int, n: int, k: int, possible: tuple[str, ...]) -> Choice | None:
    """The first row for a product whose path is among the possible ones."""
    for row in CHOICES:
        fits = bits in row.bits and m <= row.m and n <= (row.n or n) and k <= (row.k or k)
        if fits and row.path in possible:
            return row
    return None
