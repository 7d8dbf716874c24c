"""What the stages of the video pipeline cost, counted one by one on small shapes."""

import pytest

from tilefold import ShapeError, ValueRangeError
from tilefold.plan import device_named
from tilefold.plan.cost import Cost, bound
from tilefold.plan.sparse.video import STAGES, VideoShape, dense_cost, stage_costs


def test_counted_one_by_one():
    shape = VideoShape(2, 4, 2, 100, 8, "bfloat16", 16)
    blocks = 7
    costs = stage_costs(shape, listed=50)
    assert tuple(costs) == STAGES
    # a multiplication and an addition each: k and v to rows; queries on rows twice, probabilities on rows once
    projected = sum(
        2 * 16 for tensor in range(2) for b in range(2) for h in range(2) for row in range(blocks) for d in range(8)
    )
    attended = sum(2 * 8 * 3 for b in range(2) for h in range(4) for i in range(100) for row in range(blocks))
    assert costs["coarse"].flops == projected + attended
    assert costs["fine"].flops == sum(2 * 2 * 8 for pair in range(50) for i in range(16) for j in range(16))
    assert costs["fine"].l2_bytes == 50 * 2 * 16 * 8 * 2
    assert costs["fuse"].bytes == 3 * (2 * 100 * 4 * 8) * 2
    assert dense_cost(shape).flops == 2 * 4 * 100 * 100 * 8 * 4


def test_other_projections():
    shape = VideoShape(1, 2, 2, 128, 16)
    block, dense, pooled = (stage_costs(shape, 4, kind)["coarse"] for kind in ("block", "dense", "pooled"))
    assert dense.flops - block.flops == 2 * (2 * 2 * 2 * 16) * (128 - 64)
    assert pooled.flops < block.flops
    with pytest.raises(ValueRangeError, match="kind must be one of block, dense, pooled, got 'mean'"):
        stage_costs(shape, 4, "mean")


def test_the_way_from_l2_bounds_small_blocks():
    """At the published shape: neither axis of a roofline says what bounds attention over blocks of 64."""
    shape, h200 = VideoShape(1, 12, 12, 23296, 128), device_named("h200")
    fine = stage_costs(shape, 12 * 364 * 127)["fine"]
    assert bound(fine, h200).resource == "L2 to SM"
    assert bound(Cost(fine.flops, fine.bytes, fine.exps), h200).resource == "tensor pipe"
    assert bound(fine, device_named("a100")).resource == "tensor pipe"  # its L2 was not measured
    total = sum(stage_costs(shape, 12 * 364 * 127).values(), Cost(0, 0, 0))
    assert total.flops == sum(cost.flops for cost in stage_costs(shape, 12 * 364 * 127).values())


def test_refusals():
    with pytest.raises(ShapeError, match="seq must be an integer of at least 1, got 0"):
        VideoShape(1, 1, 1, 0, 8)
    with pytest.raises(ShapeError, match=r"heads \(3\) must be a multiple of kv_heads \(2\)"):
        VideoShape(1, 3, 2, 8, 8)
    with pytest.raises(ValueRangeError, match="dtype must be one of float16, bfloat16, float32, got 'int8'"):
        VideoShape(1, 2, 2, 8, 8, "int8")
