"""The random numbers of dropout, as `device/dropout.py` makes them: Philox 4x32 with 7 rounds, in torch's integers."""

import torch

LOW = 0xFFFFFFFF
ROUNDS = 7
FACTORS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # of the key, from round to round


def uniform(seed: int, *counter: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 1 in fp32, of 24 bits, of the shape that the four numbers of the counter broadcast to.

    counter: query, key, sequence, head.  Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    c0, c1, c2, c3 = (c.long() for c in counter)
    key0, key1 = seed & LOW, seed >> 32 & LOW
    for _ in range(ROUNDS):
        high0, low0 = _product(FACTORS[0], c0)
        high1, low1 = _product(FACTORS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + STEPS[0] & LOW, key1 + STEPS[1] & LOW
    return (c0 >> 8).float() * (1.0 / (1 << 24))


def _product(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32 by 32 bits: in two halves, since int64 cannot hold all of it."""
    upper, lower = x * (factor >> 16), x * (factor & 0xFFFF)
    sum_ = ((upper & 0xFFFF) << 16) + lower
    return (upper >> 16) + (sum_ >> 32), sum_ & LOW
