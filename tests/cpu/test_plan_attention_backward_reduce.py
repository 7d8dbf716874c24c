"""The plan of the dense backward kernel for sm_90 that adds dq in memory: who asks for it, what it refuses, its versions."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilefold
from tilefold.errors import DtypeError, PlanError
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan import attention_backward_reduce as rules
from tilefold.plan.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.limits import Tile

H200 = device_named("h200")
LONG = AttentionProblem(1, 65536, 65536, 16, 16, 128, 128)
NARROW = replace(LONG, heads=32, kv_heads=32, dim_qk=64, dim_v=64)
DETERMINISTIC = "attention_backward_hopper"


def free(problem: AttentionProblem, **fields: Any) -> AttentionBackwardPlan:
    return plan_attention_backward(problem, H200, deterministic=False, **fields)


def test_taken_when_asked_for_alone() -> None:
    for problem, tile in ((LONG, Tile(64, 128, 4, 2)), (replace(NARROW, causal=True), Tile(128, 128, 4, 2))):
        assert plan_attention_backward(problem, H200).kernel == DETERMINISTIC
        plan = free(problem)
        assert (plan.kernel, plan.keys, plan.rule) == (rules.KERNEL, tile, "hopper-reduce")
        assert "change from run to run" in plan.reason
        assert "dq added by copies out of 1 buffer," in str(plan)
        assert free(problem, portable=True).kernel == "attention_backward_box"
        assert AttentionBackwardPlan.from_json(plan.to_json()) == plan
        assert plan.with_tiles(kernel=DETERMINISTIC).options is None
        plan.check(problem, H200, ())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32"}, "it multiplies bfloat16 and float16, not float32"),
        ({"dim_v": 64}, "it has head dims of 64 and 128, the same for V, not 128 and 64"),
        ({"dim_qk": 256, "dim_v": 256}, "not 256 and 256"),
        ({"sinks": True}, "no sinks"),
        ({"dropout": True}, "no dropout"),
        ({"mask_mods": ("mask",)}, "no masks but causal and window"),
        ({"score_mods": ("bias",)}, "no changes of scores"),
        ({"varlen": True}, "it has no packed batches"),
        ({"query_descriptors": False}, "strides of Q are not multiples of 16 bytes"),
        ({"descriptors": False}, "strides of K or V are not multiples of 16 bytes"),
        ({"seq_k": 0}, "there are no keys"),
        ({"batch": 1 << 10, "seq_q": 1 << 17}, "more rows than a descriptor can count"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], why: str) -> None:
    """By name where the kernel is asked for; else the plan is the deterministic one, and says so."""
    problem = replace(LONG, **changes)
    plan = free(problem)
    assert plan == replace(plan_attention_backward(problem, H200), reason=plan.reason)
    assert f"{rules.KERNEL} is not taken: " in plan.reason
    assert why in plan.reason
    with pytest.raises(PlanError, match=f"{rules.KERNEL} cannot be used: .*{why}"):
        plan.with_tiles(kernel=rules.KERNEL)


def test_other_chips_and_short_keys() -> None:
    for problem in (LONG, NARROW):
        assert free(replace(problem, seq_k=1024)).kernel == free(replace(problem, seq_k=16383)).kernel == DETERMINISTIC
        assert free(replace(problem, seq_k=16384)).kernel == rules.KERNEL
    assert "fewer than 16384 keys" in free(replace(LONG, seq_k=1024)).reason
    assert "not measured with a window" in free(replace(LONG, window=(4096, 0))).reason
    assert free(replace(LONG, seq_k=1024)).with_tiles(kernel=rules.KERNEL).kernel == rules.KERNEL
    other = plan_attention_backward(LONG, device_named("a100"), deterministic=False)
    assert other.kernel == plan_attention_backward(LONG, device_named("a100")).kernel
    assert f"{rules.KERNEL} is not taken: it is written for sm_90" in other.reason


@pytest.mark.parametrize(
    ("problem", "fields", "why"),
    [
        (LONG, {"sum_slots": 3}, "options.sum_slots: must be 0, 1 or 2, got 3"),
        (LONG, {"order": "first"}, "options.order: must be one of 'keys first'"),
        (LONG, {"stagger": -1}, "options.stagger: must be from 0 to 1023, got -1"),
        (LONG, {"fence": 1}, "options.fence: must be a bool, got 1"),
        (LONG, {"rounded": None}, "options.rounded: must be a bool, got None"),
        (
            NARROW,
            {"order": "queries first"},
            "options.order: must be 'keys first' or 'keys late' with a head dim of 64",
        ),
        (NARROW, {"rounded": False}, "options.rounded: must be True with a head dim of 64"),
    ],
    ids=str,
)
def test_versions_that_do_not_exist(problem: AttentionProblem, fields: dict[str, Any], why: str) -> None:
    plan = free(problem)
    assert plan.options is not None
    with pytest.raises(PlanError, match=why):
        plan.with_tiles(options=replace(plan.options, **fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"keys": Tile(128, 128, 4, 2)}, "queries: must be the tile of keys"),
        ({"heads_at_once": 3}, "heads_at_once: must be a divisor of 16"),
        ({"keys_at_once": 64}, "keys_at_once: must be 0"),
        ({"bias_shares": 1}, "bias_shares: must be 0"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        free(LONG).with_tiles(**fields)
    tile = Tile(64, 128, 4, 4)
    with pytest.raises(PlanError, match="KiB of shared memory"):
        free(LONG).with_tiles(tile, tile, tile)
    with pytest.raises(PlanError, match="options: must be None with attention_backward_hopper"):
        plan_attention_backward(LONG, H200).with_tiles(options=rules.ReduceOptions())


def test_heads_share_the_second_level_cache() -> None:
    """As many heads at a time as 16 MiB hold sums of dq of."""

    def at_once(seq: int, problem: AttentionProblem = LONG, **changes: Any) -> int:
        plan = plan_attention_backward(replace(problem, seq_q=seq, seq_k=seq, **changes), H200)
        return plan.with_tiles(kernel=rules.KERNEL).heads_at_once

    assert at_once(16384) == 2
    assert at_once(16384, NARROW) == 4
    assert at_once(4096, batch=4) == 8
    assert at_once(8192, kv_heads=4) == 1
    assert free(LONG).heads_at_once == 1
    assert free(LONG).scratch_bytes == 4 * (16 * 1024 + 1) * 64 * (128 + 2)


def test_argument_of_attention() -> None:
    """A bool, which any device takes; the plan of the call follows it."""
    q, k, v = (torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(DtypeError, match="deterministic must be a bool, got 1"):
        tilefold.attention(q, k, v, deterministic=1)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="deterministic must be a bool, got 'no'"):
        tilefold.attention_backward_plan(q, k, v, deterministic="no")
