"""Shared by the tests of block selection: rows of every kind, the bound of rounding, and the comparison with the oracle."""

from typing import Any

import torch

from tilefold import reference, sparse
from tilefold.ops.device import device_of
from tilefold.plan.sparse.select import SelectProblem, plan_select

UNIT = 2.0**-24  # of fp32: the largest relative error of one rounding


def bounds(scores: torch.Tensor) -> tuple[float, float, float]:
    """How far rounding can move (gini, the mass of a set of blocks, the share at which the last block is taken).

    Masses: a block's is a product (one rounding), half added (another), cut to a whole 2^-30th, so n of them are off by at most 2
    units plus n / 2 parts; the row's sum, by which they are divided, by less; then two integers go to fp32 and are divided,
    on GPUs to two units in the last place.  Gini: sums over regs + log2 lanes levels above the line (each product rounded once)
    and below it, the product with n, the division.  The share: the Gini coefficient's error, four roundings of tau (number to
    fp32, difference, product, sum), the masses', tau and the goal cut to whole parts."""
    plan = plan_select(SelectProblem(*scores.shape), device_of(scores.device))
    n = scores.shape[3]
    levels = plan.regs + plan.lanes.bit_length() if plan.kernel == "select" else n.bit_length()
    gini = (2 * levels + 6) * UNIT
    mass = 2 * (2 * UNIT + n * 2.0**-31)
    return gini, mass + 6 * UNIT, gini + 4 * UNIT + mass + 2.0**-30 + 2.0**-31


def rows(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """fp32 scores [B, H, Qb, KVb] of one kind."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(*shape, generator=g)
    if kind == "random":
        return x
    if kind == "peaked":
        return (30 * torch.randn(*shape, generator=g)).softmax(-1)
    if kind == "flat":
        return 1 + 1e-3 * x
    if kind == "tied":
        return (4 * x).floor() / 4
    if kind == "equal":
        return torch.full(shape, 0.37)
    if kind == "huge":
        return x * 3e38
    if kind == "tiny":
        return x * 1e-37
    holes = torch.rand(*shape, generator=g)
    if kind == "infinite":
        return x.masked_fill(holes < 0.4, float("-inf")).masked_fill(holes > 0.97, float("inf"))
    assert kind == "nan"
    x = x.masked_fill(holes < 0.4, float("nan")).masked_fill(holes > 0.9, -1.0)
    x[..., ::3, :] = float("nan")
    return x


KINDS = ("random", "peaked", "flat", "tied", "equal", "huge", "tiny", "infinite", "nan")


def kept(selection: sparse.Selection) -> torch.Tensor:
    """bool [B, H, Qb, KVb] on the CPU, after a look at the lists."""
    index = selection.index
    index.validate()
    lists = index.indices.cpu()
    live = torch.arange(index.capacity) < index.counts.cpu()[..., None]
    rising = (lists[..., 1:] > lists[..., :-1]) | ~live[..., 1:]
    assert bool(rising.all()), "a list is not ascending"
    inside = (lists >= 0) & (lists < max(1, index.kv_blocks))
    assert bool(inside.all()), "an entry past a count is out of range"
    return index.to_map().cpu()


def held(scores: torch.Tensor, **options: Any) -> tuple[sparse.Selection, torch.Tensor]:
    """Select and hold everything to the oracle; the result, and the rows whose set is certain (bool [B, H, Qb])."""
    got = sparse.select(scores, **options)
    on_host = {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    want = reference.select(scores.cpu(), **{**on_host, "capacity": got.index.capacity})
    gini, mass, share = bounds(scores)
    sure = want.gap > share
    same = (kept(got) == want.keep).all(-1)
    assert bool((same | ~sure).all()), f"rows {(~same & sure).nonzero().tolist()} of {options} keep other blocks"
    assert bool(((got.gini.cpu() - want.gini).abs() <= gini).all())
    assert bool(((got.mass.cpu() - want.mass).abs() <= mass)[same].all())
    assert (got.tau is None) == (want.tau is None)
    if got.tau is not None and want.tau is not None:
        assert bool(((got.tau.cpu() - want.tau).abs() <= gini + 4 * UNIT).all())
    if options.get("method", "gini") != "gini":
        unsorted = sparse.select(scores, **options, return_gini=False)
        assert unsorted.gini is None
        assert torch.equal(kept(unsorted), kept(got))
        assert torch.equal(unsorted.mass, got.mass)
    return got, sure
