"""The estimates of shared memory and registers against what triton 3.6.0 compiled from a causal fold."""

import pytest

from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.limits import BOX, POINTER, Tile, box_refusal, registers_estimate, shared_bytes, tile_violation

# device, head dim, tile, kernel, dtype, bytes of shared memory, registers per thread; none of these spills over 8 bytes
COMPILED = [
    ("h200", 64, Tile(128, 64, 8, 3), BOX, "bfloat16", 66560, 108),
    ("h200", 64, Tile(128, 128, 8, 3), BOX, "bfloat16", 115712, 220),
    ("h200", 128, Tile(64, 64, 4, 3), BOX, "bfloat16", 115712, 139),
    ("h200", 128, Tile(64, 64, 4, 2), BOX, "bfloat16", 82944, 138),
    ("h200", 128, Tile(128, 64, 8, 3), POINTER, "bfloat16", 131072, 172),
    ("h200", 128, Tile(16, 128, 4, 3), POINTER, "bfloat16", 139264, 163),
    ("h200", 256, Tile(64, 32, 4, 2), BOX, "bfloat16", 98336, 196),
    ("h200", 128, Tile(32, 16, 4, 2), POINTER, "float32", 34944, 190),
    ("h200", 64, Tile(64, 32, 8, 2), POINTER, "float32", 41216, 92),
    ("b200", 128, Tile(64, 64, 4, 3), BOX, "bfloat16", 115712, 139),
    ("b200", 256, Tile(64, 32, 4, 2), BOX, "bfloat16", 98368, 168),
    ("a100", 64, Tile(128, 64, 4, 3), POINTER, "bfloat16", 49152, 255),
    ("a100", 128, Tile(128, 64, 8, 3), POINTER, "bfloat16", 98304, 227),
    ("a100", 256, Tile(64, 32, 8, 2), POINTER, "bfloat16", 69632, 211),
    ("a100", 256, Tile(32, 64, 4, 3), POINTER, "bfloat16", 151552, 201),
    ("mi300x", 64, Tile(128, 64, 4, 2), POINTER, "bfloat16", 16384, 260),
    ("mi300x", 128, Tile(128, 64, 4, 2), POINTER, "bfloat16", 32768, 370),
    ("mi300x", 128, Tile(64, 64, 4, 2), POINTER, "bfloat16", 40960, 304),
    ("mi300x", 256, Tile(64, 32, 4, 2), POINTER, "bfloat16", 36864, 336),
    ("mi300x", 256, Tile(16, 16, 4, 2), POINTER, "float32", 33792, 200),
]


@pytest.mark.parametrize(("name", "dim", "tile", "kernel", "dtype", "shared", "registers"), COMPILED)
def test_estimates_match_compilations(
    name: str, dim: int, tile: Tile, kernel: str, dtype: str, shared: int, registers: int
) -> None:
    device, problem = device_named(name), AttentionProblem(1, 4096, 4096, 4, 4, dim, dim, dtype, causal=True)
    assert tile_violation(problem, device, kernel, tile) is None
    # Never too small, or a launch could fail; rarely too large, or good tiles would be refused.
    assert shared <= shared_bytes(problem, device, tile) <= shared * 1.05
    assert registers_estimate(problem, device, kernel, tile) == pytest.approx(registers, rel=1 / 3)


def test_modifications_that_load_per_score_need_shared_memory() -> None:
    device, tile = device_named("h200"), Tile(64, 64, 4, 3)
    plain = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128)
    light = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128, score_mods=("softcap", "alibi"))
    heavy = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128, score_mods=("bias",), mask_mods=("mask",))
    assert shared_bytes(light, device, tile) == shared_bytes(plain, device, tile)
    assert shared_bytes(heavy, device, tile) == shared_bytes(plain, device, tile) + 3 * 64 * 64 * 5


def test_box_refusals_say_why() -> None:
    problem = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128)
    assert box_refusal(problem, device_named("h200")) is None
    assert "sm_80 has no tensor-descriptor loads" in str(box_refusal(problem, device_named("a100")))
    assert "gfx942 has no tensor-descriptor loads" in str(box_refusal(problem, device_named("mi300x")))
