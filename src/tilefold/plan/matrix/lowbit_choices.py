"""Which kernel and which tiles a product with weights of few bits gets on sm_90: rows of a table, the first that fits. Pure.

Each row says for which bits, up to how many rows of x (m), rows of the weight (n) and columns (k) it holds, 0 meaning any, and
whether it was measured.  Edit it after a measurement; nothing else decides.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A row: where it holds, then fields of LowbitPlan.

    block_m 0: the least power of two that has all rows of x, from 16 on.  stages: at most.
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
    Choice((4,), 8, 4096, 0, "rows", 16, 8, 8, 1, registers=128),
    Choice((8, 3, 2), 8, 4096, 0, "rows", 16, 8, 8, 4, registers=128),
    Choice(ALL, 8, 16384, 0, "rows", 16, 8, 4, 1, per_sm=4, least=8, registers=128),
    Choice(ALL, 8, 0, 0, "rows", 32, 8, 2, 1, per_sm=8, least=8, registers=128),
    # up to 16
    Choice((8, 4, 2), 16, 0, 0, "tile", 128, 16, 4, 4, per_sm=2, least=4, join=True, early=False),
    # up to 32
    Choice((8, 4), 32, 0, 0, "tile", 128, 32, 4, 4, per_sm=2, least=4, join=True),
    # up to 64
    Choice((4,), 64, 4096, 8192, "hopper", 128, 64, 4, 4, least=4, scaled="before"),
    Choice((4,), 64, 4096, 0, "tile", 64, 64, 4, 4, per_sm=2, least=4, join=True),
    Choice((4,), 64, 0, 0, "hopper", 256, 64, 4, 4, least=4, scaled="before"),
    Choice((8,), 64, 0, 0, "tile", 128, 64, 4, 4, per_sm=2, least=4, scaled="before", join=True),
    Choice((3, 2), 64, 0, 0, "hopper", 128, 0, 4, 4, least=4, scaled="before"),
    # more
    Choice(ALL, 128, 0, 0, "hopper", 128, 128, 4, 5, least=4, scaled="before"),
    Choice((8, 4), 1024, 0, 0, "hopper", 128, 256, 4, 5, least=4, scaled="before"),
    Choice((3, 2), 1024, 0, 0, "hopper", 128, 128, 4, 5, least=4, scaled="before"),
)


def choice_for(bits: int, m: int, n: int, k: int, possible: tuple[str, ...]) -> Choice | None:
    """The first row for a product whose path is among the possible ones."""
    for row in CHOICES:
        fits = bits in row.bits and m <= row.m and n <= (row.n or n) and k <= (row.k or k)
        if fits and row.path in possible:
            return row
    return None
