"""Tiles that were measured to be best, by device class and problem class, each with its evidence.

An entry wins over the rules for long queries. Add one only with a measurement: what was timed, where, against what.
"""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.plan.device import Device
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem


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


MANY_MODS = 3  # measured with one modification; three and more need registers that the measured tiles do not leave

_WHERE = "on one H200 (2026-11-21, torch 2.11.0, triton 3.6.0, bf16; cuDNN and FA2 in the same run)"


def _measured(tile: Tile, what: str) -> Tuned:
    return Tuned(tile, f"Best of the tiles tried {_WHERE}: {what}.")


TUNED: dict[TunedKey, Tuned] = {
    TunedKey(90, "half", 64, 64, "box", "plain"): _measured(
        Tile(64, 128, 4, 2), "448 TFLOP/s at N=4096 x 4 (cuDNN 484, FA2 305), 493 at N=16384 (475, 303), 32 heads"
    ),
    TunedKey(90, "half", 64, 64, "box", "band"): _measured(
        Tile(64, 64, 4, 3), "causal 401 TFLOP/s at N=4096 x 4 (cuDNN 432, FA2 281), 446 at N=16384 (471, 285), 32 heads"
    ),
    TunedKey(90, "half", 64, 64, "pointer", "plain"): _measured(
        Tile(128, 64, 8, 3), "410 TFLOP/s at N=4096 x 4, 442 at N=16384, 32 heads"
    ),
    TunedKey(90, "half", 64, 64, "pointer", "band"): _measured(
        Tile(64, 64, 4, 3), "causal 360 TFLOP/s at N=4096 x 4, 402 at N=16384, 32 heads"
    ),
    TunedKey(90, "half", 128, 128, "box", "plain"): _measured(
        Tile(64, 64, 4, 3),
        "532 TFLOP/s at N=4096 x 4 (cuDNN 672, FA2 356), 570 at N=16384 (654, 335), 456 at N=1024 x 16 (602, 330), 16 heads",
    ),
    TunedKey(90, "half", 128, 128, "box", "band"): _measured(
        Tile(64, 64, 4, 3),
        "causal 468 TFLOP/s at N=4096 x 4 (cuDNN 579, FA2 292), 539 at N=16384 (635, 289), 345 at N=1024 x 16 (435, 246)",
    ),
    TunedKey(90, "half", 128, 128, "pointer", "plain"): _measured(
        Tile(128, 64, 8, 3), "429 TFLOP/s at N=4096 x 4, 455 at N=16384, 16 heads"
    ),
    TunedKey(90, "half", 128, 128, "pointer", "band"): _measured(
        Tile(64, 64, 4, 3), "causal 411 TFLOP/s at N=4096 x 4, 454 at N=16384, 16 heads"
    ),
    TunedKey(90, "half", 64, 64, "box", "mods"): _measured(
        Tile(64, 64, 4, 3), "causal ALiBi 312 TFLOP/s (best tile 314), sinks 383 at N=4096 x 4, 16 heads"
    ),
    TunedKey(90, "half", 64, 64, "box", "tensors"): _measured(
        Tile(64, 64, 4, 3), "bias 352 TFLOP/s, boolean mask 276 at N=4096 x 4, 16 heads"
    ),
    TunedKey(90, "half", 128, 128, "box", "mods"): _measured(
        Tile(64, 64, 4, 3), "causal ALiBi 410 TFLOP/s, sinks 486 at N=4096 x 4, 16 heads"
    ),
    TunedKey(90, "half", 128, 128, "box", "tensors"): _measured(
        Tile(128, 64, 8, 3), "bias 416 TFLOP/s, boolean mask 356 at N=4096 x 4, 16 heads"
    ),
    TunedKey(90, "half", 256, 256, "box", "mods"): _measured(
        Tile(128, 64, 8, 2), "causal softcap 350 TFLOP/s at N=4096 x 4, 16 heads (the next tile 322)"
    ),
    TunedKey(90, "half", 256, 256, "box", "plain"): _measured(
        Tile(128, 64, 8, 2), "550 TFLOP/s at N=16384 (cuDNN 750, FA2 318), 8 heads"
    ),
    TunedKey(90, "half", 256, 256, "box", "band"): _measured(
        Tile(128, 64, 8, 2), "causal 554 TFLOP/s at N=16384 (cuDNN 659, FA2 283), 8 heads"
    ),
    TunedKey(90, "half", 256, 256, "pointer", "plain"): _measured(
        Tile(128, 64, 8, 2), "461 TFLOP/s at N=16384, 8 heads"
    ),
    TunedKey(90, "half", 256, 256, "pointer", "band"): _measured(
        Tile(128, 64, 8, 2), "causal 461 TFLOP/s at N=16384, 8 heads"
    ),
}


@lru_cache(maxsize=256)  # asked by several rules of a plan
def tuned_tile(problem: AttentionProblem, device: Device, loads: str) -> Tuned | None:
    """The measured tile for a problem on a device with the given loads, or None if nothing was measured."""
    if len(problem.score_mods + problem.mask_mods) >= MANY_MODS:
        return None
    dtype_class = "float32" if problem.dtype == "float32" else "half"
    banded = problem.causal or problem.window != (-1, -1)
    # Measured with a bias or a mask alone; with more modifications its registers run out.
    reads = problem.score_mods + problem.mask_mods in (("bias",), ("mask",))
    features = "tensors" if reads else "mods" if not problem.plain else "band" if banded else "plain"
    return TUNED.get(TunedKey(device.arch, dtype_class, problem.block_qk, problem.block_v, loads, features))
