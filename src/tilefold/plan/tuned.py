"""Tiles that were measured to be best, by device class and problem class, each with its evidence.

An entry wins over the rules for long queries. Add one only with a measurement: what was timed, where, against what.
"""

from dataclasses import dataclass

from tilefold.plan.device import Device
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem

__all__ = ["TUNED", "Tuned", "TunedKey", "tuned_tile"]


@dataclass(frozen=True, slots=True)
class TunedKey:
    """What a measurement is valid for.

    arch: as in Device. dtype_class: "half" or "float32". block_qk, block_v: padded head dims.
    loads: "box" or "pointer". features: "plain", or "mods" if scores are modified or masked, or there are sinks.
    """

    arch: int | str
    dtype_class: str
    block_qk: int
    block_v: int
    loads: str
    features: str = "plain"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A tile and the sentence that says what was measured."""

    tile: Tile
    evidence: str


_WHERE = "on one H200 (torch 2.11.0, triton 3.6.0, bf16)"

TUNED: dict[TunedKey, Tuned] = {
    TunedKey(90, "half", 64, 64, "box"): Tuned(
        Tile(128, 64, 8, 3), f"Best portable forward at D=64, N=16384 {_WHERE}: 0.90 of cuDNN's speed."
    ),
    TunedKey(90, "half", 128, 128, "box"): Tuned(
        Tile(64, 64, 4, 3), f"Best portable forward at D=128, N=16384 {_WHERE}: 508 TFLOP/s where cuDNN reached 691."
    ),
    TunedKey(90, "half", 128, 128, "pointer"): Tuned(
        Tile(128, 64, 8, 3),
        f"One program of 128 rows and 8 warps ran at 460 to 505 TFLOP/s at D=128, N=16384 {_WHERE}.",
    ),
}


def tuned_tile(problem: AttentionProblem, device: Device, loads: str) -> Tuned | None:
    """The measured tile for a problem on a device with the given loads, or None if nothing was measured."""
    dtype_class = "float32" if problem.dtype == "float32" else "half"
    features = "plain" if problem.plain else "mods"
    return TUNED.get(TunedKey(device.arch, dtype_class, problem.block_qk, problem.block_v, loads, features))
