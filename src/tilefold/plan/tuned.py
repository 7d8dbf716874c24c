"""Tiles that were measured to be best on an H200, by class of problem, each with its evidence.

An entry wins over the rules for long queries. Add one only with a measurement: what was timed, where, against what.
"""

from functools import lru_cache

from tilefold.plan.architecture import SM_90
from tilefold.plan.device import Device
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem

MANY_MODS = 3  # measured with one modification; three and more need registers that the measured tiles do not leave

TUNED = {
    (64, "box", "plain"): (
        Tile(64, 128, 4, 2),
        "448 TFLOP/s at N=4096 x 4 (cuDNN 484, FA2 305), 493 at N=16384 (475, 303), 32 heads",
    ),
    (64, "box", "band"): (
        Tile(64, 64, 4, 3),
        "causal 401 TFLOP/s at N=4096 x 4 (cuDNN 432, FA2 281), 446 at N=16384 (471, 285), 32 heads",
    ),
    (64, "pointer", "plain"): (Tile(128, 64, 8, 3), "410 TFLOP/s at N=4096 x 4, 442 at N=16384, 32 heads"),
    (64, "pointer", "band"): (Tile(64, 64, 4, 3), "causal 360 TFLOP/s at N=4096 x 4, 402 at N=16384, 32 heads"),
    (64, "box", "mods"): (
        Tile(64, 64, 4, 3),
        "causal ALiBi 312 TFLOP/s (best tile 314), sinks 383 at N=4096 x 4, 16 heads",
    ),
    (64, "box", "tensors"): (Tile(64, 64, 4, 3), "bias 352 TFLOP/s, boolean mask 276 at N=4096 x 4, 16 heads"),
    (128, "box", "plain"): (
        Tile(64, 64, 4, 3),
        "532 TFLOP/s at N=4096 x 4 (cuDNN 672, FA2 356), 570 at N=16384 (654, 335), 456 at N=1024 x 16 (602, 330), 16 heads",
    ),
    (128, "box", "band"): (
        Tile(64, 64, 4, 3),
        "causal 468 TFLOP/s at N=4096 x 4 (cuDNN 579, FA2 292), 539 at N=16384 (635, 289), 345 at N=1024 x 16 (435, 246)",
    ),
    (128, "pointer", "plain"): (Tile(128, 64, 8, 3), "429 TFLOP/s at N=4096 x 4, 455 at N=16384, 16 heads"),
    (128, "pointer", "band"): (Tile(64, 64, 4, 3), "causal 411 TFLOP/s at N=4096 x 4, 454 at N=16384, 16 heads"),
    (128, "box", "mods"): (Tile(64, 64, 4, 3), "causal ALiBi 410 TFLOP/s, sinks 486 at N=4096 x 4, 16 heads"),
    (128, "box", "tensors"): (Tile(128, 64, 8, 3), "bias 416 TFLOP/s, boolean mask 356 at N=4096 x 4, 16 heads"),
    (256, "box", "plain"): (Tile(128, 64, 8, 2), "550 TFLOP/s at N=16384 (cuDNN 750, FA2 318), 8 heads"),
    (256, "box", "band"): (Tile(128, 64, 8, 2), "causal 554 TFLOP/s at N=16384 (cuDNN 659, FA2 283), 8 heads"),
    (256, "pointer", "plain"): (Tile(128, 64, 8, 2), "461 TFLOP/s at N=16384, 8 heads"),
    (256, "pointer", "band"): (Tile(128, 64, 8, 2), "causal 461 TFLOP/s at N=16384, 8 heads"),
    (256, "box", "mods"): (
        Tile(128, 64, 8, 2),
        "causal softcap 350 TFLOP/s at N=4096 x 4, 16 heads (the next tile 322)",
    ),
}
"""By padded head dim, of V too; loads, "box" or "pointer"; and features, as of `tuned_tile`: the tile, and what was measured.  On
sm_90, in 16 bits."""


@lru_cache(maxsize=256)  # asked by several rules of a plan
def tuned_tile(problem: AttentionProblem, device: Device, loads: str) -> tuple[Tile, str] | None:
    """The measured tile for a problem on a device with the given loads, with its evidence, or None if nothing was measured."""
    n, mods = problem, problem.score_mods + problem.mask_mods
    if device.architecture is not SM_90 or n.dtype == "float32" or n.block_qk != n.block_v or len(mods) >= MANY_MODS:
        return None
    banded = n.causal or n.window != (-1, -1)
    # Measured with a bias or a mask alone; with more modifications its registers run out.
    reads = mods in (("bias",), ("mask",))
    features = "tensors" if reads else "mods" if not n.plain else "band" if banded else "plain"
    if (found := TUNED.get((n.block_qk, loads, features))) is None:
        return None
    where = "on one H200 (2026-11-21, torch 2.11.0, triton 3.6.0, bf16; cuDNN and FA2 in the same run)"
    return found[0], f"Best of the tiles tried {where}: {found[1]}."
