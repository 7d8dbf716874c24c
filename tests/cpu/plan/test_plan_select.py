"""plan_select: rows over a warp or a few, long rows to torch, too many rows refused."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilefold.errors import Unsupported
from tilefold.plan import device_named
from tilefold.plan.sparse.select import LONGEST_ROW, SelectProblem, kept_blocks, plan_select
from tilefold.sparse.select_arguments import kept_by


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
