"""The kernels of dense attention that are written for one architecture: a record each, which rules, plans and binders ask."""

from collections.abc import Callable
from typing import NamedTuple

from tilefold.plan.base import Fault
from tilefold.plan.dense import attention_hopper as hopper
from tilefold.plan.device import Device
from tilefold.plan.hopper import REGISTERS
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem


class SpecialisedKernel(NamedTuple):
    """A kernel whose programs draw their blocks from a counter; `plan/capabilities.py` says for which architecture.

    why: name, reason and evidence of its rule.  unserved: why the rule does not take it, as a sentence.  tile, options: that are
    taken.  violation: the first limit that is broken.  grid: blocks.  shared_bytes: of a program.  programs: at once.  widths: of
    the tiles of K and V.  loads, registers: what plans print of these.  binder: the module that binds it."""

    why: tuple[str, str, str]
    unserved: Callable[[AttentionProblem, Device], str | None]
    tile: Callable[[AttentionProblem, Device], Tile]
    options: Callable[[AttentionProblem, Tile, Device], tuple[str, ...]]
    violation: Callable[[AttentionProblem, Device, Tile, tuple[str, ...]], Fault]
    grid: Callable[[AttentionProblem, Tile, tuple[str, ...]], tuple[int, int, int]]
    shared_bytes: Callable[[AttentionProblem, Tile, tuple[str, ...]], int]
    programs: Callable[[AttentionProblem, Tile, Device, tuple[str, ...]], int]
    widths: Callable[[AttentionProblem], tuple[int, int]]
    loads: Callable[[AttentionProblem, Tile, tuple[str, ...]], str]
    registers: Callable[[AttentionProblem, Tile], str]
    binder: str


def folders(consumers: int, options: tuple[str, ...]) -> str:
    """Which warps of a program for sm_90 do what."""
    number = ("one warpgroup folds", "two warpgroups fold", "three warpgroups fold")[consumers - 1]
    versions = f" ({', '.join(options)})" if options else ""
    return f"{number}{versions}, one warp loads"


SPECIALISED = {
    hopper.KERNEL: SpecialisedKernel(
        why=(
            "hopper",
            "Warpgroups fold while one more warp loads, so the exponentials of one run beside the products of another.",
            "0.94 to 1.21 times FlashAttention-4 from 512 tokens on, 0.84 to 1.36 times cuDNN (H200, 2026-11-21, triton 3.6.0); "
            "with head dims above 256 1.56 to 2.63 times portable kernels (H200, 2026-11-28).",
        ),
        unserved=lambda n, device: (
            hopper.hopper_refusal(n, device) or hopper.hopper_unmeasured(n) or hopper.hopper_few(n, device)
        ),
        tile=hopper.hopper_tile,
        options=hopper.hopper_options,
        violation=hopper.hopper_violation,
        grid=hopper.hopper_grid,
        shared_bytes=hopper.hopper_shared_bytes,
        programs=hopper.hopper_programs,
        widths=hopper.widths_of,
        loads=lambda n, tile, options: (
            f"Q, K and V by descriptor boxes; {folders(hopper.warpgroups_of(n, tile), options)}"
        ),
        registers=lambda n, tile: (
            f"{(hopper.columns_of(n) + tile.block_n) // 2} of "
            f"{REGISTERS[hopper.warpgroups_of(n, tile)][1]} registers per folding thread"
        ),
        binder="tilefold.ops.dense.attention_hopper",
    )
}
