"""Plans of block-sparse attention, of selection and of the video pipeline."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilefold
from cases.refusals import refuses
from tilefold.errors import PlanError, ShapeError, Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward.kept_backward import MOST_KEPT
from tilefold.plan.cost import Cost, bound
from tilefold.plan.limits import Tile
from tilefold.plan.sparse import sparse_backward_hopper as list_gradients
from tilefold.plan.sparse.select import LONGEST_ROW, SelectProblem, kept_blocks, plan_select
from tilefold.plan.sparse.sparse import MIN_KEYS, SparseProblem, choose_splits, plan_sparse
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward
from tilefold.plan.sparse.sparse_hopper import KERNEL as HOPPER
from tilefold.plan.sparse.sparse_hopper import programs_per_sm, shared_bytes
from tilefold.plan.sparse.video import STAGES, VideoShape, dense_cost, stage_costs
from tilefold.sparse.select_arguments import kept_by


def problem(seq_q=23296, seq_k=23296, capacity=128, masked=False, dim=128, **changes):
    dense = AttentionProblem(1, seq_q, seq_k, 12, 12, dim, dim, **changes)
    return SparseProblem(dense, 64, 64, capacity, masked)


def test_video_shape_takes_boxes_and_no_splits():
    plan = plan_sparse(problem(), device_named("h200"), portable=True)
    assert (plan.kernel, plan.splits, plan.grid) == ("sparse_forward_box", 1, (364 * 12, 1, 1))


def test_blocks_with_sizes_are_read_by_pointers():
    assert plan_sparse(problem(masked=True), device_named("h200"), portable=True).kernel == "sparse_forward"


def test_hopper_takes_its_own_kernel():
    packed = problem(varlen=True)
    paged = [replace(problem(), page_size=size, block_k=block) for size in (16, 64, 256) for block in (64, 128)]
    whole = (
        problem(),
        problem(causal=True),
        problem(masked=True),
        problem(dim=64, dtype="float16"),
        problem(seq_q=23290, seq_k=70),
    )
    for made in (*whole, packed, replace(packed, block_q=128, block_k=128), *paged):
        plan = plan_sparse(made, device_named("h200"))
        assert plan.kernel == HOPPER
        assert programs_per_sm(made) * (shared_bytes(made, plan.tile) + 1024) <= plan.device.smem_per_sm


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (problem(dim=96), "head dims of 64 and 128"),
        (problem(dtype="float32"), "multiplies bfloat16 and float16"),
        (problem(mask_mods=("user",)), "no masks but causal ones"),
        (problem(score_mods=("softcap",)), "no changes of scores"),
        (problem(descriptors=False), "strides of K or V"),
        (replace(problem(), descriptors=False), "strides of Q"),
        (replace(problem(), block_q=32), "blocks of 64 and 128 tokens"),
        (replace(problem(), page_size=8), "pages of 16, 32, 64, ... keys, not of 8"),
        (replace(problem(), page_size=100), "pages of 16, 32, 64, ... keys, not of 100"),
    ],
)
def test_what_the_hopper_kernel_refuses(made, why):
    plan = plan_sparse(made, device_named("h200"))
    assert plan.kernel != HOPPER
    assert f"{HOPPER} does not serve it: " in plan.reason
    assert why in plan.reason
    refuses(tilefold.PlanError, why, plan.with_tile, kernel=HOPPER)


def test_other_devices_take_portable_kernels():
    for device in ("a100", "b200", "mi300x", "interpreter"):
        assert plan_sparse(problem(), device_named(device)).kernel != HOPPER
    with pytest.raises(tilefold.PlanError, match="written for sm_90"):
        plan_sparse(problem(), device_named("b200")).with_tile(kernel=HOPPER)


def test_changing_the_kernel_brings_its_tile():
    for blocks in (64, 128):
        made = replace(problem(), block_q=blocks, block_k=blocks)
        plan = plan_sparse(made, device_named("h200"))
        box = plan.with_tile(kernel="sparse_forward_box")
        assert (box.tile, box.programs) == (plan_sparse(made, device_named("h200"), portable=True).tile, 0)
        assert box.with_tile(kernel=HOPPER).tile == plan.tile
        for fields in ({"block_n": 32}, {"splits": 2}, {"num_stages": 8}, {"programs": -1}, {"num_warps": 8}):
            refuses(tilefold.PlanError, next(iter(fields)), plan.with_tile, **fields)
        refuses(tilefold.PlanError, "programs", box.with_tile, programs=4)


def test_one_query_block_is_split():
    plan = plan_sparse(problem(seq_q=64, capacity=328), device_named("h200"))
    assert plan.splits > 8
    assert "split-lists" in str(plan)


@pytest.mark.parametrize(
    ("changes", "capacity", "said"),
    [
        ({"seq_q": 64}, 4, "12 query blocks, each with its whole list, use 12 of 264 places: lists of at most 256 keys are too "
                           "short for two shares of at least 256."),
        ({"seq_q": 64}, 8, "12 query tiles would leave 120 of 132 places idle; 2 shares of each list are 24 programs, which use "
                           "24 of 132 places: lists of at most 512 keys are too short for 3 shares of at least 256."),
        ({"seq_q": 64}, 328, "12 query tiles would leave 120 of 132 places idle; 11 shares of each list are 132 programs, which "
                             "fill 132 places."),
        ({"seq_q": 128, "batch": 5}, 328, "120 query tiles would leave 12 of 132 places idle; 11 shares of each list are 1320 "
                                          "programs, which fill 132 places."),
        ({}, 128, "4368 query blocks, each with its whole list, fill 264 places."),
        ({"seq_q": 0}, 128, "0 query blocks: there is nothing to compute."),
    ],
)  # fmt: skip
def test_reasons_tell_short_lists_from_devices_partly_and_wholly_filled(changes, capacity, said):
    made = replace(problem(capacity=capacity), attention=replace(problem().attention, **changes))
    reason = plan_sparse(made, device_named("h200")).reason
    refusal = f" {HOPPER} does not serve it: it makes no shares of lists." if "shares of each list" in said else ""
    assert reason.removeprefix("A loading warp, folding warpgroups and wgmma; ") == said + refusal


def test_splits_are_sane():
    for items, tiles in itertools.product((1, 3, 8, 32, 100, 256), (0, 1, 2, 7, 33, 64, 2048)):
        splits = choose_splits(items, tiles, 64, 264)
        assert 1 <= splits <= max(1, tiles * 64 // MIN_KEYS)
        assert splits == 1 or items < 264


@pytest.mark.parametrize("device", ["h200", "a100", "b200", "mi300x", "rtx4090", "l4", "interpreter"])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_device_has_a_plan(device, dim, dtype):
    plan = plan_sparse(problem(dim=dim, dtype=dtype), device_named(device))
    assert plan.problem.block_q % plan.block_m == 0
    assert plan.problem.block_k % plan.block_n == 0


@pytest.mark.parametrize("device", ["h200", "a100", "b200", "mi300x", "rtx4090", "l4", "interpreter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_layouts_have_a_plan_on_every_device(device, dtype):
    for dim, capacity in itertools.product((16, 64, 128, 256), (0, 4, 300)):
        dense = problem(dim=dim, dtype=dtype, capacity=capacity, seq_q=64)
        packed = plan_sparse(replace(dense, attention=replace(dense.attention, varlen=True)), device_named(device))
        paged = [plan_sparse(replace(dense, page_size=size), device_named(device)) for size in (1, 16, 64, 100)]
        own = {HOPPER} if (device, dtype) == ("h200", "bfloat16") and dim in (64, 128) and capacity < 300 else set()
        assert packed.kernel in (own or {"sparse_forward_varlen"})
        assert {plan.kernel for plan in paged} == {"sparse_forward_paged"} | own  # pages of 1 and of 100 have no boxes


def test_stages_that_a_list_or_a_table_takes():
    """A table is loaded ahead of its pages and takes every second stage; so does a list whose blocks no mask looks at; where one
    does, every stage is a buffer (as compiled, tests/cpu/aot/test_aot_sparse.py)."""
    h200 = device_named("h200")
    few = problem(seq_q=64, capacity=328)
    causal = replace(few, attention=replace(few.attention, causal=True))
    stages = [
        plan_sparse(p, h200).num_stages for p in (few, causal, replace(few, masked=True), replace(few, page_size=64))
    ]
    assert stages == [7, 4, 4, 7]
    assert plan_sparse(replace(problem(), page_size=64), h200, portable=True).num_stages == 3
    assert plan_sparse(replace(problem(), masked=True), h200, portable=True).num_stages == 2
    assert (
        len({plan_sparse(p, h200).splits for p in (causal, replace(few, masked=True), replace(few, page_size=64))}) == 1
    )


def test_layouts_are_told_apart():
    packed = AttentionProblem(1, 64, 64, 2, 2, 64, 64, varlen=True)
    refuses(Unsupported, "page_size must be 0 with varlen=True", SparseProblem, packed, 64, 64, 1, page_size=16)
    refuses(ShapeError, "page_size must be an integer of at least 0, got -1", replace, problem(), page_size=-1)
    plan = plan_sparse(problem(), device_named("h200"))
    for kernel in ("sparse_forward_varlen", "sparse_forward_paged"):
        refuses(PlanError, f"{kernel} does not serve varlen=False, page_size=0", plan.with_tile, kernel=kernel)


def test_backward_keeps_a_bounded_scratch():
    """The Gluon backward pass keeps ds of as many heads as fit a limit; where one does not, of spans of its queries."""
    h200 = device_named("h200")
    for capacity in (1, 36, 127, 239):
        plan = plan_sparse_backward(problem(capacity=capacity), h200)
        assert plan.kernel == "sparse_backward_hopper"
        assert 0 < plan.scratch_bytes <= MOST_KEPT
        assert f"dS of {plan.heads_at_once} KV heads at a time" in str(plan)
        room = plan.heads_at_once * 364 * capacity * 64 * 64 * 2
        assert plan.scratch_bytes == room * min(4, MOST_KEPT // room)
    # A batch has work on keys for every place of the device; its heads divide all.
    for seq, heads in ((23296, 1), (8192, 3), (4096, 6), (1024, 12)):
        made = problem(seq_q=seq, seq_k=seq, capacity=4)
        assert plan_sparse_backward(made, h200).heads_at_once == heads
    for seq, capacity, count in (
        (23296, 240, 2),
        (23296, 364, 3),
        (83200, 260, 2),
        (119040, 372, 3),
        (1 << 20, 1024, 64),
    ):
        plan = plan_sparse_backward(problem(seq_q=seq, seq_k=seq, capacity=capacity), h200)
        assert (plan.kernel, plan.heads_at_once) == ("sparse_backward_hopper", 1)
        assert -(-seq // plan.queries_at_once) == count
        sums = seq * 2 * 128 * 4  # of dk and dv
        assert plan.scratch_bytes <= MOST_KEPT + sums
        assert f"in {count} spans of {plan.queries_at_once} queries, {plan.scratch_bytes / 2**20:.0f} MiB" in str(plan)
    # Spans whose KV tiles meet few queries move more sums than pairs.
    few = plan_sparse_backward(problem(seq_q=1 << 20, seq_k=1 << 22, capacity=4096), h200)
    assert (few.kernel, few.scratch_bytes) == ("sparse_backward_box", 0)
    assert plan_sparse_backward(problem(), device_named("a100")).kernel == "sparse_backward"
    plan = plan_sparse_backward(problem(), h200)
    assert plan.with_tiles(kernel="sparse_backward_box").scratch_bytes == 0
    portable = plan.with_tiles(kernel="sparse_backward_box")
    assert portable.with_tiles(kernel="sparse_backward_hopper").heads_at_once == plan.heads_at_once
    wrong = {"heads_at_once": (0, 5, 24), "queries": (Tile(64, 64, 8, 4),), "queries_at_once": (-64, 32, 64.0)}
    for field, value in ((field, value) for field, values in wrong.items() for value in values):
        refuses(PlanError, field, plan.with_tiles, **{field: value})
    refuses(PlanError, "queries_at_once", portable.with_tiles, queries_at_once=64)
    for other in (replace(problem(), block_q=32, block_k=32), problem(seq_k=0, capacity=0)):
        small = plan_sparse_backward(other, h200)
        assert small.kernel == "sparse_backward_box"
        refuses(PlanError, "sparse_backward_hopper cannot be used", small.with_tiles, kernel="sparse_backward_hopper")
    none = plan_sparse_backward(problem(seq_q=0), h200)
    assert (none.queries_at_once, none.scratch_bytes) == (0, 0)
    # A span of more queries than there are is all of them: as many programs, and as much room.
    for queries in (23296, 23360, 1 << 20):
        more = plan.with_tiles(queries_at_once=queries)
        assert (more.scratch_bytes, list_gradients.spans(more.problem, queries)) == (plan.scratch_bytes, 1)
        assert list_gradients.items(more.problem, 1, queries) == 12 * 2 * 364
    refuses(PlanError, "num_stages", plan.with_tiles, queries=Tile(64, 64, 4, 9), keys=Tile(64, 64, 4, 9))


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize("device", ["h200", "a100", "b200", "mi300x", "interpreter"])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("blocks", [0, 1, 31, 32, 33, 364, 1024, 1025, 2048, LONGEST_ROW])
def test_rows_fit_their_lanes(blocks, forced, device):
    plan = plan_select(SelectProblem(1, 12, 364, blocks, forced), device_named(device))
    assert plan.kernel == "select"
    assert plan.regs * plan.lanes == 1 << plan.log >= blocks
    assert plan.lanes == plan.num_warps * plan.device.warp_size
    assert plan.regs & (plan.regs - 1) == 0
    assert plan.lanes & (plan.lanes - 1) == 0
    assert plan.rows * plan.programs >= plan.problem.rows > plan.rows * (plan.programs - 1)
    assert plan.reason


def test_the_shape_of_a_video():
    plan = plan_select(SelectProblem(1, 12, 364, 364), device_named("h200"))
    assert (plan.rows, plan.regs, plan.lanes, plan.num_warps, plan.programs) == (1, 16, 32, 1, 4368)


def test_long_rows_go_to_torch():
    plan = plan_select(SelectProblem(1, 1, 1, LONGEST_ROW + 1), device_named("h200"))
    assert (plan.kernel, plan.programs) == ("torch", 0)


def test_too_many_rows():
    with pytest.raises(
        Unsupported, match="^selection is made for at most 2147483647 rows of scores a call, got 2147483648$"
    ):
        plan_select(SelectProblem(2, 1024, 1024 * 1024, 1), device_named("h200"))


@given(st.integers(0, 1000), st.integers(1, LONGEST_ROW))
def test_a_sparsity_keeps_at_least_what_it_asks_for_and_no_block_more(thousandths, blocks):
    asked = (1 - Fraction(thousandths, 1000)) * blocks  # what a person means by 0.651, without binary rounding
    kept = kept_blocks(thousandths / 1000, blocks)
    assert kept >= asked and (kept - 1 < asked or kept == 1)
    for dtype in (torch.float32, torch.float64):
        share = torch.tensor([thousandths / 1000], dtype=dtype)
        assert kept_by(share, blocks).tolist() == kept_by(share, torch.tensor([blocks])).tolist() == [kept]
    assert kept_by(thousandths / 1000, torch.tensor([blocks])).tolist() == [kept]


# ---------------------------------------------------------------- the video pipeline


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
    refuses(ValueRangeError, "kind must be one of block, dense, pooled, got 'mean'", stage_costs, shape, 4, "mean")


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
    refuses(ShapeError, "seq must be an integer of at least 1, got 0", VideoShape, 1, 1, 1, 0, 8)
    refuses(ShapeError, "heads (3) must be a multiple of kv_heads (2)", VideoShape, 1, 3, 2, 8, 8)
    with pytest.raises(ValueRangeError, match="dtype must be one of float16, bfloat16, float32, got 'int8'"):
        VideoShape(1, 2, 2, 8, 8, "int8")
