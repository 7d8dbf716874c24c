"""Shared by the tests of the ladder: every rung as one function, and launches caught to compile them ahead of time."""

import importlib
from typing import Any

import torch

from cases import hold
from tilefold import reference

NAMES = ("naive", "profile", "paged", "flash", "split")


def rung(name: str, q, k, v, causal=False, tile=None, block=5, **options):
    """Out of a rung; the paged one over blocks of `block` keys, made from k and v."""
    from tilefold import ladder

    program = getattr(ladder, name)
    if name == "paged":
        cache = ladder.paged_cache(k, v, options.pop("lengths", None), block)
        return program.attention(q, cache, causal, tile=tile, **options)
    return program.attention(q, k, v, causal, tile=tile, **options)


def held(name: str, q, k, v, causal=False, oracle=None, **options):
    """Hold a rung to the oracle; oracle: its options, if they are not only `causal`."""
    given = {"causal": causal} if oracle is None else oracle
    got = rung(name, q, k, v, causal, **options)
    assert got.dtype == q.dtype and got.shape == q.shape
    hold(got, reference.attention, q, k, v, what=f"{name} {tuple(q.shape)} {tuple(k.shape)} {sorted(options)}", **given)
    return got


def held_by_lengths(name: str, q, k, v, causal, lengths, **options):
    """Hold a rung to the oracle of each sequence by itself."""
    got = rung(name, q, k, v, causal, lengths=lengths, **options)
    for b, n in enumerate(lengths.tolist()):
        one = (q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        hold(got[b : b + 1], reference.attention, *one, what=f"{name} of {n} keys", causal=causal)


def example_launch(
    name: str, kernel: str, dtype: str = "bfloat16", causal: bool = True, masks: bool = False, dim: int = 128,
    tile: tuple[int, int, int, int] | None = None,
):  # fmt: skip
    """(kernel, args, kwargs) of what a rung launches for 2 x 1024 tokens as on an H200, caught before it runs.  tile: queries,
    keys, warps, stages."""
    from tilefold import ladder
    from tilefold.ladder import inputs
    from tilefold.plan.device import device_named

    program = importlib.import_module(f"tilefold.ladder.{name}")
    owner = importlib.import_module("tilefold.ladder.naive") if name == "profile" else program
    caught: dict[str, Any] = {}

    class Catch:
        def __init__(self, title: str) -> None:
            self.title, self.fn = title, getattr(owner, title)

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **named: Any) -> None:
                caught[self.title] = (self.fn, args, named)

            return launch

    inputs.device_of = lambda device: device_named("h200")
    program.here = inputs.here = lambda: device_named("h200")
    kept = {title: getattr(owner, title) for title in dir(owner) if title.endswith("_kernel")}
    for title in kept:
        setattr(owner, title, Catch(title))
    q, k, v = (torch.zeros(2, 1024, heads, dim, dtype=getattr(torch, dtype)) for heads in (4, 2, 2))
    if name == "split":
        q = q[:, :1]
    options = (
        {"bias": torch.zeros(1, 4, 1024, 1024), "padding_mask": torch.ones(2, 1024, dtype=torch.bool)} if masks else {}
    )
    given = None if tile is None else ladder.Tile(*tile)
    try:
        if name == "paged":
            program.attention(q, ladder.paged_cache(k, v), causal, tile=given)
        else:
            program.attention(q, k, v, causal, tile=given, **options)
    finally:
        for title, fn in kept.items():
            setattr(owner, title, fn)
    return caught[kernel]


TILE_HEAD = (
    "tile", "warps", "stages", "registers", "spilled, B", "in the loop", "shared, KiB", "programs an SM", "warps an SM",
    "wgmma", "barriers", "FLOP/B of L2",
)  # fmt: skip


def tile_cells(tile, report, flops_a_byte: float) -> tuple[str, ...]:
    """What the compiler made of flash with a tile, under TILE_HEAD; flops_a_byte: of L2, as the rung declares it."""
    (loop,) = report.loops
    fit = report.occupancy
    counts = (str(loop.opcodes.get(name, 0)) for name in ("HGMMA", "BAR.SYNC"))
    return (
        f"{tile.block_m} x {tile.block_n}", str(tile.warps), str(tile.stages), str(report.registers), str(report.spills),
        str(loop.spills), f"{report.shared_bytes / 1024:g}", f"{fit.programs}", f"{fit.programs * tile.warps}", *counts,
        f"{flops_a_byte:.0f}",
    )  # fmt: skip
