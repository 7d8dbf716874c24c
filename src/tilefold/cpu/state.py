"""The state of the online softmax of a tile of rows, as `device/state.py` has it: init, step, finish; and the exact merge.

Scores and maxima are in base 2, as everywhere in the library: exp2 is also the faster one on a CPU.  The maximum of a row
without a live key so far is the least finite number, so that no difference is infinity minus infinity.
"""

import math
from typing import NamedTuple

import torch

LEAST = torch.finfo(torch.float32).min
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


class State(NamedTuple):
    """acc [.., rows, dim_v], m [.., rows, 1], l [.., rows, 1], all fp32: the sum of weighted values, the maximum, the sum of
    weights."""

    acc: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor


def init(lead: tuple[int, ...], dim_v: int, sinks: torch.Tensor | None = None) -> State:
    """The state of no keys; sinks [.., rows, 1] fp32, natural units: scores that join the softmax without a value."""
    acc = torch.zeros((*lead, dim_v))
    if sinks is None:
        return State(acc, torch.full((*lead, 1), LEAST), torch.zeros((*lead, 1)))
    sinks = (sinks * LOG2E).expand((*lead, 1))
    m = sinks.clamp_min(LEAST)
    return State(acc, m, (sinks - m).exp2_())


def step(state: State, scores: torch.Tensor, v: torch.Tensor, factor: torch.Tensor | None = None) -> State:
    """Take in one tile of keys: scores [.., rows, n] fp32 in base 2, which it
    overwrites, -inf where masked; v [.., n, dim_v] fp32.

    factor: what dropout multiplies each weight by; the sum of weights is that of all."""
    acc, m, l = state
    top = torch.maximum(m, scores.amax(-1, keepdim=True))
    weights = scores.sub_(top).exp2_()
    keep = (m - top).exp2_()
    l = l * keep + weights.sum(-1, keepdim=True)
    if factor is not None:
        weights.mul_(factor)
    acc.mul_(keep).baddbmm_(weights, v)
    return State(acc, top, l)


def finish(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [.., rows, dim_v], lse [.., rows] in natural log): 0 and -inf for a row without a live key."""
    acc, m, l = state
    lse = (m + l.log2()).mul_(LN2).squeeze(-1)
    return acc.div_(l.masked_fill(l == 0, 1.0)), lse


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32, lse) over two disjoint sets of keys; out [.., rows, dim], lse [.., rows].  A side without keys changes nothing,
    whatever its out holds."""
    top = torch.maximum(lse_a, lse_b).clamp_min(LEAST)
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    total = a + b
    whole = total.masked_fill(total == 0, 1.0)
    parts = (
        torch.where((share == 0)[..., None], 0.0, out.float() * (share / whole)[..., None])
        for out, share in ((out_a, a), (out_b, b))
    )
    return sum(parts, torch.zeros(())), top + total.log()
