"""Biases and masks that descriptors of the dense kernel for sm_90 can read, and the tiles that leave them room."""

from dataclasses import replace

import pytest
import torch

import tilefold
from cases import qkv, rand
from cases.refusals import refuses
from tilefold.errors import PlanError, ValueRangeError
from tilefold.ops.dense.attention_tiles import steps_of, tiles_of
from tilefold.plan import AttentionPlan, AttentionProblem, device_named, plan_attention
from tilefold.plan.dense import attention_hopper
from tilefold.plan.dense.attention_hopper import KERNEL, hopper_options, hopper_refusal, hopper_tile

H200 = device_named("h200")
LONG = AttentionProblem(1, 4096, 4096, 16, 4, 128, 128)
BIAS = {"score_mods": ("bias",), "bias_descriptors": "tiles"}
MASK = {"mask_mods": ("mask",), "mask_descriptors": "tiles"}


# ---------------------------------------------------------------- which tensors


def test_what_descriptors_can_read():
    plain = rand(2, 3, 70, 264)
    wide = rand(2, 3, 70, 272)
    for bias, tiles, steps in (
        (plain, "tiles", (1, 1)),
        (plain.half(), "tiles", (1, 1)),
        (plain > 0, "", (1, 1)),  # rows of 264 bytes
        (wide > 0, "tiles", (1, 1)),
        (wide[..., 16:272] > 0, "tiles", (1, 1)),
        (wide[..., 8:264].bfloat16(), "tiles", (1, 1)),
        (wide.bfloat16()[..., 8:264], "tiles", (1, 1)),
        (wide.bfloat16()[..., 1:257], "", (1, 1)),  # the base
        (wide.bfloat16()[..., :261], "tiles", (1, 1)),  # the rows stay where they are
        (rand(1, 1, 70, 261).bfloat16(), "", (0, 0)),
        (plain.transpose(2, 3), "", (1, 1)),
        (plain[:, :1], "tiles", (1, 0)),
        (plain[:1], "tiles", (0, 1)),
        (plain[:1].expand(4, -1, -1, -1), "tiles", (0, 1)),
        (plain[:, :, :1], "keys", (1, 1)),
        (plain[:, :1, :1].expand(-1, 8, 70, -1), "keys", (1, 0)),
        (rand(1, 1, 1, 261), "keys", (0, 0)),
        (rand(2, 1, 1, 261), "", (1, 0)),
        (plain[..., :1].expand(-1, -1, -1, 264), "", (1, 1)),  # one number for all keys
        (plain.flip(1), "tiles", (1, 1)),
        (rand(0, 1, 70, 264), "", (0, 0)),
    ):
        assert tiles_of(bias) == tiles, (bias.shape, bias.stride())
        if tiles:
            assert steps_of(bias) == steps, (bias.shape, bias.stride())
    assert tiles_of(None) == ""


def test_the_plan_knows():
    q, k, v = qkv(1, 70, 264, 4, 2, 64, dtype=torch.bfloat16)
    for bias, mask, tiles in (
        (None, None, ("", "")),
        (rand(1, 4, 70, 264), rand(1, 1, 1, 264) > 0, ("tiles", "keys")),
        (rand(1, 1, 1, 264), rand(1, 1, 70, 264) > 0, ("keys", "")),
    ):
        made = tilefold.attention_plan(q, k, v, bias=bias, mask=mask).problem
        assert (made.bias_descriptors, made.mask_descriptors) == tiles
    with pytest.raises(ValueRangeError, match="bias_descriptors must be 'tiles', 'keys' or '', got 'rows'"):
        replace(LONG, bias_descriptors="rows")


# ---------------------------------------------------------------- the plan


def forced(problem: AttentionProblem, **changes: object) -> AttentionPlan:
    tile = hopper_tile(problem, H200)
    asked = {"block_m": tile.block_m, "block_n": tile.block_n, "num_warps": 4, "num_stages": tile.num_stages, **changes}
    return plan_attention(problem, H200, portable=True).with_tile(kernel=KERNEL, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("mods", [BIAS, MASK, {**BIAS, **MASK}, {**BIAS, "bias_descriptors": "keys"}], ids=str)
def test_tiles_leave_a_bias_room(widths, mods):
    problem = replace(LONG, dim_qk=widths[0], dim_v=widths[1], **mods)
    plan = forced(problem)
    assert plan.num_stages >= (1 if widths[1] == 256 and len(mods) == 4 else 2)
    assert plan.shared_bytes <= H200.smem_per_block
    assert "pack" not in plan.options
    bare = attention_hopper.hopper_shared_bytes(replace(problem, score_mods=(), mask_mods=()), plan.tile, plan.options)
    elements = plan.block_m * plan.block_n
    if mods is BIAS:
        assert 4 * elements < plan.shared_bytes - bare < 4 * elements + 512
    elif mods is MASK:
        assert 2 * elements < plan.shared_bytes - bare < 2 * elements + 512


def test_the_measured_tiles_stay_where_they_fit():
    for dim, stages in ((64, 4), (128, 2)):
        tile = hopper_tile(replace(LONG, dim_qk=dim, dim_v=dim, **BIAS), H200)
        assert (tile.block_m, tile.block_n, tile.num_stages) == (128, 128, stages)


def test_heads_with_a_bias_are_not_packed():
    tile = hopper_tile(LONG, H200)
    assert "pack" in hopper_options(replace(LONG, score_mods=("alibi",)), tile, H200)
    for mods in (BIAS, MASK):
        refuses(PlanError, "a tile of a bias or a mask does not hold", forced, replace(LONG, **mods), options=("pack",))


def test_a_plan_refuses_a_bias_that_its_descriptors_cannot_read():
    problem = replace(LONG, **BIAS)
    assert hopper_refusal(problem, H200) is None
    plan = forced(problem)
    plan.check(problem, H200)
    with pytest.raises(PlanError, match="strides of the bias are not multiples of 16 bytes"):
        plan.check(replace(problem, bias_descriptors=""), H200)
