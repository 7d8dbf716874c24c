"""The plan of the dense backward kernel for sm_90 that adds dq in memory: who asks for it, what it refuses, its versions."""

import json
import re
from dataclasses import replace
from typing import Any

import changed_scores
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tilefold
from cases.backward_record import APART, NAMES, PEERS, RESULTS, planned, planned_packed, record
from cases.refusals import refuses
from examples import examples
from tilefold.errors import DtypeError, PlanError
from tilefold.plan import AttentionProblem, device_named, plan_attention
from tilefold.plan.backward import attention_backward_hopper as dense
from tilefold.plan.backward import attention_backward_reduce as rules
from tilefold.plan.backward import attention_backward_short as short
from tilefold.plan.backward.attention_backward import (
    STORED_TILE,
    AttentionBackwardPlan,
    OtherGradients,
    plan_attention_backward,
)
from tilefold.plan.limits import Tile

H200 = device_named("h200")
LONG = AttentionProblem(1, 65536, 65536, 16, 16, 128, 128)
GROUPS = replace(LONG, kv_heads=4)
NARROW = replace(LONG, heads=32, kv_heads=32, dim_qk=64, dim_v=64)
DETERMINISTIC = "attention_backward_hopper"
ORDERED = rules.ReduceOptions(ordered=True)
LATE = rules.ReduceOptions(ordered=True, late=True)
LENGTHS = st.sampled_from([1, 63, 512, 1024, 4096, 8192, 16383, 16384, 16385, 65536]) | st.integers(1, 1 << 17)
CHANGES = st.sampled_from(
    [{}, {}, {}, {"causal": True}, {"causal": True}, {"window": (4095, 0)}, {"window": (-1, 512)}, {"sinks": True},
     {"dropout": True}, {"score_mods": ("bias",)}, {"mask_mods": ("mask",)}, {"score_mods": ("softcap",), "causal": True},
     {"mask_mods": ("mask",), "mask_descriptors": "tiles"}, {"mask_mods": ("mask", "user"), "mask_descriptors": "keys"},
     {"score_mods": ("alibi", "user"), "window": (4095, 0)}, {"mask_mods": ("user",)}, {"mask_mods": ("prefix", "user")},
     {"varlen": True}, {"descriptors": False}, {"query_descriptors": False}, {"dtype": "float16"}, {"dtype": "float32"}]
)  # fmt: skip


def free(problem: AttentionProblem, **fields: Any) -> AttentionBackwardPlan:
    return plan_attention_backward(problem, H200, deterministic=False, **fields)


def test_what_is_taken() -> None:
    """In order, so the same bits every run; for deterministic=False in any order."""
    short, groups = (replace(one, seq_q=16384, seq_k=16384) for one in (NARROW, GROUPS))
    causal, few = replace(short, causal=True), replace(short, causal=True, heads=1, kv_heads=1)
    masked = (replace(one, causal=True) for one in (LONG, GROUPS, NARROW))
    for problem in (LONG, groups, short, causal, few, *masked):
        plan, apart = free(problem), problem.causal and problem.group > 1
        options = rules.ReduceOptions(apart=apart)
        assert (plan.kernel, plan.rule, plan.options) == (rules.KERNEL, "hopper-reduce", options)
        assert ("each head of a group by itself" in str(plan)) == apart
        assert plan.keys == Tile(128 if problem.dim_qk == 64 else 64, 128, 4, 2)
        assert "change from run to run" in plan.reason
        assert "dq added in memory, in any order" in str(plan)
        assert free(problem, portable=True).kernel == "attention_backward_box"
        assert plan.with_tiles(kernel=DETERMINISTIC).options is None
        plan.check(problem, H200, ())
    wide = replace(LONG, seq_q=8192, seq_k=8192)
    windows = replace(wide, window=(5000, 0)), replace(NARROW, window=(1000, 0))
    for problem in (LONG, replace(LONG, causal=True), groups, short, causal, wide, replace(wide, dim_v=96), *windows):
        assert plan_attention_backward(problem, H200).options == ORDERED
    for problem in (replace(GROUPS, causal=True), replace(GROUPS, seq_q=8192, seq_k=8192, window=(5000, 0))):
        assert plan_attention_backward(problem, H200).options == replace(ORDERED, apart=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seq_k": 1023, "causal": True}, "fewer than 1024 queries or keys"),
        ({"seq_q": 511}, "fewer than 512 queries or keys"),
        ({"dim_qk": 128, "dim_v": 128, "seq_q": 4096, "seq_k": 4096}, "there is room for dS"),
        (
            {"batch": 4, "dim_qk": 128, "dim_v": 128, "seq_q": 4096, "seq_k": 4096, "causal": True, "kv_heads": 8},
            "room",
        ),
        ({"dim_qk": 128, "dim_v": 128, "kv_heads": 8, "seq_q": 2047, "seq_k": 2047}, "room for dS"),
        ({"dim_qk": 128, "dim_v": 128, "seq_q": 16384, "seq_k": 16384, "window": (1023, 0)}, "room for dS"),
        ({"heads": 2, "kv_heads": 2, "seq_q": 4096, "seq_k": 4096}, "fewer than 384 tiles of queries"),
        ({"causal": True, "seq_q": 4096, "heads": 31, "kv_heads": 31}, "fewer than 1024 tiles of queries"),
    ],
    ids=str,
)
def test_where_keeping_ds_is_faster(changes: dict[str, Any], why: str) -> None:
    problem = replace(NARROW, **changes)
    assert re.search(why, str(rules.options_for(problem, H200, True)))
    plan = plan_attention_backward(problem, H200)
    assert plan.kernel == DETERMINISTIC
    assert plan.with_tiles(kernel=rules.KERNEL, options=ORDERED).options == ORDERED


def adds(problem: AttentionProblem, ordered: bool, any_order: bool) -> None:
    """Whether the plan adds dq in memory, where the same bits are asked for and where not; else it keeps dS."""
    for deterministic, taken in ((True, ordered), (False, any_order)):
        plan = plan_attention_backward(problem, device_named("h100"), deterministic=deterministic)
        assert plan.kernel == (rules.KERNEL if taken else DETERMINISTIC)
        assert not taken or plan.options == rules.ReduceOptions(deterministic)


@pytest.mark.parametrize(
    ("dim", "tokens", "batch", "changes", "ordered", "any_order"),
    [  # measured on an H100, as CUDA graphs: whether an order, and no order, is faster than keeping dS
        (80, 512, 32, {}, True, True),
        (80, 512, 32, {"causal": True}, False, True),
        (72, 2048, 1, {}, True, True),
        (96, 512, 32, {}, False, True),
        (96, 2048, 1, {"heads": 8, "kv_heads": 8}, False, True),
        (96, 2048, 8, {"causal": True}, True, True),
        (96, 2048, 8, {"window": (255, 0)}, False, False),
        (96, 8192, 2, {"window": (1023, 0)}, True, True),
        (80, 8192, 2, {"window": (4095, 0)}, True, True),
        (104, 2048, 8, {}, False, False),
    ],
    ids=str,
)
def test_head_dims_of_two_parts(
    dim: int, tokens: int, batch: int, changes: dict[str, Any], ordered: bool, any_order: bool
) -> None:
    shape = {"dim_qk": dim, "dim_v": dim, "seq_q": tokens, "seq_k": tokens, "batch": batch, "heads": 16, "kv_heads": 16}
    problem = replace(LONG, **{**shape, **changes})
    adds(problem, ordered, any_order)


def test_heads_of_a_group_of_two_parts() -> None:
    """By themselves in order: under a causal mask where a group's sums take more than 8 MiB, under a window from 4096 on."""
    window = {"window": (2047, 0)}
    for tokens, mask, deterministic, apart in (
        (4096, {"causal": True}, True, False), (8192, {"causal": True}, True, True), (8192, {"causal": True}, False, False),
        (2048, window, True, False), (4096, window, True, True), (4096, {}, True, False),
    ):  # fmt: skip
        problem = replace(GROUPS, dim_qk=96, dim_v=96, seq_q=tokens, seq_k=tokens, batch=4, heads=16, kv_heads=4)
        problem = replace(problem, **mask)
        plan = plan_attention_backward(problem, H200, deterministic=deterministic)
        assert plan.options == rules.ReduceOptions(deterministic, apart=apart)


@pytest.mark.parametrize(
    ("dim", "mean", "changes", "ordered", "any_order"),
    [  # measured on an H100, lognormal lengths: whether an order, and any order, is faster than keeping dS
        (64, 512, {}, True, True),
        (64, 512, {"causal": True}, False, False),
        (64, 1024, {"causal": True}, True, True),
        (64, 2048, {"causal": True, "kv_heads": 4}, True, True),
        (64, 4096, {"window": (255, 0)}, False, False),
        (128, 4096, {}, False, False),
        (128, 8192, {}, True, True),
        (128, 2048, {"causal": True}, False, False),
        (128, 4096, {"causal": True}, False, True),
        (128, 8192, {"causal": True}, False, True),
    ],
    ids=str,
)
def test_packed_batches(dim: int, mean: int, changes: dict[str, Any], ordered: bool, any_order: bool) -> None:
    shape = {
        "dim_qk": dim,
        "dim_v": dim,
        "batch": 8,
        "seq_q": 3 * mean,
        "seq_k": 3 * mean,
        "mean_q": mean,
        "varlen": True,
    }
    problem = replace(LONG, **{**shape, "heads": 16, **changes})
    adds(problem, ordered, any_order)


@pytest.mark.parametrize("dim", [16, 40, 72, 80, 96, 112])
@pytest.mark.parametrize("deterministic", [True, False])
def test_packed_head_dims_of_no_other_kernel(dim: int, deterministic: bool) -> None:
    problem = replace(LONG, dim_qk=dim, dim_v=dim, batch=8, seq_q=700, seq_k=700, mean_q=512, varlen=True)
    plan = plan_attention_backward(problem, H200, deterministic=deterministic)
    assert plan.options == rules.ReduceOptions(deterministic)
    short = plan_attention_backward(replace(problem, mean_q=64), H200, deterministic=deterministic)
    assert short.kernel.startswith("attention_backward") and short.options is None


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=20), st.sampled_from((64, 96))
)
def test_memory_of_packed_batches(lengths: list[tuple[int, int]], dim: int) -> None:
    """Whatever the tokens, no more than the plan says."""
    longest = [max(1, *(pair[side] for pair in lengths)) for side in (0, 1)]
    shape = {"batch": len(lengths), "seq_q": longest[0], "seq_k": longest[1], "dim_qk": dim, "dim_v": dim}
    problem = replace(GROUPS, **shape, varlen=True)
    tokens = sum(pair[0] for pair in lengths), sum(pair[1] for pair in lengths)
    for options in (ORDERED, rules.ReduceOptions(ordered=True, apart=True)):
        for sized in (rules.rows, rules.q_tiles, rules.blocks):
            assert sized(problem, tokens=tokens) <= sized(problem)
        for counted in (rules.programs, rules.counters, rules.key_sums):
            assert counted(problem, options, tokens) <= counted(problem, options)


def test_sums_and_memory_of_two_parts() -> None:
    """Sums of dq have as many columns as products; of 104 columns and more they are 128."""
    memory = {}
    for dim in (64, 72, 80, 96, 104, 128):
        problem = replace(LONG, dim_qk=dim, dim_v=dim)
        memory[dim] = rules.columns_of(problem), rules.scratch_bytes(problem, ORDERED) // (65536 * 16)
    assert {dim: columns for dim, (columns, _) in memory.items()} == {
        64: 64,
        72: 80,
        80: 80,
        96: 96,
        104: 128,
        128: 128,
    }
    assert {dim: each for dim, (_, each) in memory.items()} == {
        dim: 4 * (columns + 2) for dim, (columns, _) in memory.items()
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32"}, "it multiplies bfloat16 and float16, not float32"),
        ({"dim_v": 8}, "it has head dims of 16 to 128, multiples of 4, not 128 and 8"),
        ({"dim_qk": 256, "dim_v": 256}, "not 256 and 256"),
        ({"dim_v": 68}, "the rows of the gradient of out are not multiples of 16 bytes"),
        ({"dropout": True}, "no dropout"),
        ({"mask_mods": ("prefix",)}, "it has no prefix"),
        ({"score_mods": ("alibi",), "seq_q": 0}, "there are no queries"),
        ({"varlen": True, "score_mods": ("softcap",)}, "of packed batches it has no changes of scores"),
        ({"varlen": True, "descriptors": False}, "strides of K or V are not multiples of 16 bytes"),
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
    for problem, least, why in (
        (replace(LONG, heads=2, kv_heads=2, seq_q=8192), 8192, "room for dS"),
        (NARROW, 512, "fewer than 512 queries or keys"),
        (replace(NARROW, causal=True), 1024, "fewer than 1024 queries or keys"),
    ):
        short = free(replace(problem, seq_k=least - 1))
        assert short.kernel == DETERMINISTIC and why in short.reason
        assert short.with_tiles(kernel=rules.KERNEL).kernel == rules.KERNEL
        assert free(replace(problem, seq_k=least)).kernel == rules.KERNEL
    for deterministic in (True, False):
        other = plan_attention_backward(NARROW, device_named("a100"), deterministic=deterministic)
        assert other.options is None
        assert deterministic or f"{rules.KERNEL} is not taken: it is written for sm_90" in other.reason


def changed_and_served(problem: AttentionProblem, device: str) -> bool:
    """What the kernel alone serves on sm_90: changes of scores, of 256 to 1024 queries and keys on, in the order asked for."""
    n = problem
    whole = device in ("h100", "h200") and n.dtype != "float32" and n.descriptors and n.query_descriptors
    whole = whole and not (n.varlen or n.dropout) and all(32 <= dim <= 128 for dim in (n.dim_qk, n.dim_v))
    few, diagonal = 512, max(n.sides) >= 0
    if max(n.dim_qk, n.dim_v) <= 64:
        plain = {*n.score_mods, *n.mask_mods} <= {"softcap", "mask"}
        few = (256 if max(n.dim_qk, n.dim_v) == 64 else 512) << diagonal >> (plain and not diagonal)
    return whole and "prefix" not in n.mask_mods and min(n.seq_q, n.seq_k) >= few


def plain_and_long(problem: AttentionProblem, device: str) -> bool:
    """What the kernel was measured to be faster with, of no packed batch: nothing else may be planned otherwise for
    deterministic=False."""
    n = problem
    plain = n.unchanged and not n.varlen and n.dtype != "float32" and n.descriptors and n.query_descriptors
    if device not in ("h100", "h200") or not plain or not all(16 <= dim <= 128 for dim in (n.dim_qk, n.dim_v)):
        return False
    tokens, full = min(n.seq_q, n.seq_k), n.window == (-1, -1) and not n.causal
    least = 512 if rules.columns_of(n) < 128 else 2048 if full and n.group > 1 else 8192
    return tokens >= least or not dense.is_kept_well(n, device_named(device))


@examples(400)
@given(
    batch=st.integers(1, 16),
    lengths=st.tuples(LENGTHS, LENGTHS) | LENGTHS.map(lambda n: (n, n)),
    heads=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4, 7])),
    dims=st.sampled_from([(64, 64), (128, 128), (96, 96), (128, 64), (256, 256), (40, 40)]),
    changes=CHANGES,
    device=st.sampled_from(["h200", "h100", "a100", "b200", "mi300x"]),
)
@example(16, (1024, 1024), (16, 1), (128, 128), {"causal": True}, "h200")
@example(1, (16384, 16384), (16, 1), (128, 128), {"causal": True}, "h100")
def test_being_allowed_more_changes_nothing_but_the_kernel(
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    changes: dict[str, Any],
    device: str,
) -> None:
    """Where the non-deterministic kernel is not admitted, the plan is the default's, field for field, and says why."""
    kv_heads, group = heads
    chip = device_named(device)
    problem = AttentionProblem(batch, *lengths, kv_heads * group, kv_heads, *dims, **changes)
    if device == "mi300x" and problem.dtype == "float32" and max(dims) > 128:
        return  # no tile fits
    kept, other = (plan_attention_backward(problem, chip, deterministic=d) for d in (True, False))
    if short.is_short(problem, chip):
        assert kept == other and kept.kernel == short.KERNEL
        return
    if (problem.score_mods or problem.mask_mods) and max(dims) <= 128:
        served = changed_and_served(problem, device)
        assert [plan.kernel == rules.KERNEL for plan in (kept, other)] == [served, served]
        alone = (problem.score_mods, problem.mask_mods) == ((), ("mask",)) and problem.mask_descriptors
        mine = ORDERED if alone else LATE
        unlike = group > 1 and (problem.causal or max(problem.window) >= 0) and not problem.mask_by_place
        for plan, ordered in ((kept, True), (other, False)):
            options = [replace(mine, ordered=ordered, apart=apart) for apart in {False, unlike}]
            assert plan.options in (options if served else [None])
        assert served or kept == other
        return
    if kept.kernel == rules.KERNEL:
        assert problem.varlen or plain_and_long(problem, device)  # packed batches have rules and a record of their own
        assert kept.options in (ORDERED, replace(ORDERED, apart=True))
    if other.kernel == rules.KERNEL:
        assert problem.varlen or plain_and_long(problem, device)
        return
    assert other == replace(kept, reason=other.reason)
    assert other.reason.startswith(f"{kept.reason} {rules.KERNEL} is not taken: ")
    slower = (max(dims) <= 64 and problem.sides == (-1, -1)) or not dense.is_kept_well(problem, chip)  # to keep dS
    assert not (slower and plain_and_long(problem, device)) or rules.reduce_refusal(problem, chip)


def test_what_is_taken_was_measured_to_be_the_fastest() -> None:
    """In every case of the record, within 4 %: of the versions with the same bits every run by default, of all without; dS has to
    have room, and where it was not kept in the newest run it stands alone."""
    for (device, _, case), times in (record() | record("windows")).items():
        if times.keys() == {"dS kept"}:
            continue
        for deterministic in (True, False):
            plan = planned(device, case, deterministic)
            roomy = case[4] == 64 or dense.is_kept_well(plan.problem, plan.device)
            own = {name for name in times.keys() - {*PEERS} if roomy or name != "dS kept"}
            versions = {name for name in own if not deterministic or name not in ("added", "added apart")}
            taken, best = NAMES[plan.options], min(versions, key=lambda name: times[name])
            assert taken in versions and times[taken] <= 1.04 * times[best], (device, case, deterministic, taken, times)
    assert {case[4] for _, _, case in record()} == {64, 72, 80, 96, 128}
    assert sum(times.keys() == {"dS kept"} for times in record().values()) == 40 < len(record()) / 3


def test_what_is_taken_of_packed_batches_was_measured_to_be_the_fastest() -> None:
    """As above, within 6 %: a plan knows the mean length only rounded up to a power of two."""
    for (device, _, case), times in record("packed").items():
        for deterministic in (True, False):
            plan = planned_packed(device, case, deterministic)
            taken = NAMES[plan.options] if plan.kernel in (rules.KERNEL, DETERMINISTIC) else "portable"
            versions = times.keys() - {*PEERS} - ({"added", "added apart"} if deterministic else set())
            assert times[taken] <= 1.06 * min(times[name] for name in versions), (case, deterministic, taken, times)


def test_times_are_predicted() -> None:
    """Of what plans take, within 10 % of the record; printed, or said not to be known."""
    for (device, _, case), times in record().items():
        if times.keys() == {"dS kept"}:
            continue
        for deterministic in (True, False):
            plan = planned(device, case, deterministic)
            if plan.options in APART or case[4] not in (64, 128):
                assert plan.seconds is None
                continue
            assert plan.seconds is not None
            assert abs(1e3 * plan.seconds / times[NAMES[plan.options]] - 1) <= 0.10, (device, case, plan.options)
            assert f"about {1e3 * plan.seconds:.3g} ms" in str(plan)
    for changes in ({"window": (100, 0)}, {"dim_qk": 96, "dim_v": 96}, {"sinks": True}, {"varlen": True}):
        assert plan_attention_backward(replace(LONG, **changes), H200).seconds is None
    assert plan_attention_backward(LONG, H200).with_tiles(kernel=DETERMINISTIC).seconds is None  # in spans
    assert plan_attention_backward(LONG, device_named("a100")).seconds is None


def test_options_are_checked() -> None:
    plan = free(NARROW)
    with pytest.raises(PlanError, match="options.ordered: must be a bool, got 1"):
        plan.with_tiles(options=rules.ReduceOptions(ordered=1))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="options.late: must be a bool, got 'no'"):
        plan.with_tiles(options=rules.ReduceOptions(late="no"))  # type: ignore[arg-type]
    refuses(PlanError, "options.late: is a version of changes of scores", plan.with_tiles, options=LATE)
    with pytest.raises(PlanError, match="options.apart: is a version of groups of query heads"):
        plan.with_tiles(options=rules.ReduceOptions(apart=True))


def test_where_changes_of_scores_take_it_was_measured() -> None:
    """In every case of the record the plans of both passes take the faster kernel, within 2 %."""
    lines = (RESULTS / "changed_scores.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 180
    ratios: dict[bool, list[float]] = {False: [], True: []}  # of gradients that took a portable kernel before
    for case in map(json.loads, lines):
        causal = case["change"] == "alibi"
        problem = AttentionProblem(
            case["batch"], case["tokens"], case["tokens"], case["heads"], case["heads"], case["dim"], case["dim"],
            causal=causal, **changed_scores.PROBLEMS[case["change"]],
        )  # fmt: skip
        bias = (1, case["heads"], case["tokens"]) if case["change"] == "learned" else ()
        for plan, taken in (
            (plan_attention(problem, H200), "forward"),
            (plan_attention_backward(problem, H200, bias), "backward"),
        ):
            ms = case[taken]
            mine = "sm_90" if plan.kernel.endswith(("hopper", "reduce")) else "portable"
            assert ms[mine] <= 1.02 * min(ms.values()), (case, plan.kernel)
        if case["dim"] > 64 and case["tokens"] < 512 and case["change"] != "learned" and mine == "sm_90":
            ratios[causal].append(ms["sm_90"] / ms["portable"])
    full, alibi = (f"{min(some):.2f} to {max(some):.2f}" for some in (ratios[False], ratios[True]))
    assert f"D=80 to 128, full / to 96, causal ALiBi | portable | {full} / {alibi} of the time" in (
        RESULTS.parents[1] / "docs" / "performance" / "releases.md"
    ).read_text(encoding="utf-8")


def test_changes_of_scores() -> None:
    """Late by itself, however the plan is asked for; no time, since none was measured; gradients of score_args are portable."""
    for dim, changes in ((64, {"score_mods": ("softcap",)}), (128, {"mask_mods": ("user",), "causal": True})):
        problem = replace(LONG, seq_q=4096, seq_k=4096, dim_qk=dim, dim_v=dim, **changes)
        plan = plan_attention_backward(problem, H200)
        assert (plan.kernel, plan.options, plan.seconds) == (rules.KERNEL, LATE, None)
        assert "dP behind the changes of scores" in str(plan)
        assert plan.with_tiles(kernel=rules.KERNEL, options=ORDERED).options == ORDERED
        portable = plan.with_tiles(kernel="attention_backward_box")
        assert portable.with_tiles(kernel=rules.KERNEL).options == rules.ReduceOptions(late=True)
        least = 128 if dim == 64 else 512
        short = plan_attention_backward(replace(problem, seq_q=least - 1), H200)
        assert f"fewer than {least} queries or keys and changes of scores it was not faster" in short.reason
    masked = plan_attention_backward(replace(LONG, mask_mods=("mask",), mask_descriptors="tiles"), H200)
    assert (masked.kernel, masked.options) == (rules.KERNEL, ORDERED)
    tile = replace(masked.keys, num_stages=3)
    refuses(PlanError, "KiB of shared memory", masked.with_tiles, tile, tile, tile)
    biased = replace(LONG, score_mods=("bias",))
    assert plan_attention_backward(biased, H200).options == LATE
    for terms in (OtherGradients((1, 1, 1)), OtherGradients(loads=(16,), load_passes=2)):
        problem = biased if terms.bias else replace(LONG, score_mods=("user",))
        learned = plan_attention_backward(problem, H200, terms.bias, loads=terms.loads)
        assert (learned.kernel, learned.options, learned._others) == (rules.KERNEL, LATE, terms)
        assert learned.scratch_bytes > plan_attention_backward(problem, H200).scratch_bytes
        portable = learned.with_tiles(kernel="attention_backward_box")
        assert portable._others == terms
        assert portable.with_tiles(kernel=rules.KERNEL)._others == terms


def test_ds_that_is_stored_for_a_bias() -> None:
    """Of a bias with a row for each query, in q's dtype, if there is room; from shorter lengths on than without."""
    problem = replace(LONG, batch=2, seq_q=1000, seq_k=1100, score_mods=("alibi", "bias"))
    own = problem.batch, problem.heads, problem.seq_q
    plan = plan_attention_backward(problem, H200, own)
    stored = replace(LATE, stored=True)
    assert (plan.options, plan.scores, plan.stores_ds) == (stored, STORED_TILE, True)
    assert "dS stored for the bias" in str(plan) and "the sum of dS that is stored" in str(plan)
    without = plan.with_tiles(options=LATE)
    assert not without.stores_ds and without.scores != STORED_TILE
    assert without.with_tiles(options=stored) == replace(plan, rule="override", reason="The caller chose these fields.")
    bytes_of_scores = 2 * 16 * (9 * 128) * 1024 * 2  # heads of sequences, keys, queries, bytes
    rows = 8 * problem.batch * problem.heads * problem.seq_q
    assert plan.scratch_bytes == without.scratch_bytes - rows + bytes_of_scores
    for more in ({"dtype": "float16"}, {"window": (200, 30)}):
        assert plan_attention_backward(replace(problem, **more), H200, own).stores_ds
    with_sinks = plan_attention_backward(replace(problem, sinks=True), H200, own)
    assert with_sinks.scratch_bytes == plan.scratch_bytes + rows
    assert plan.without_bias() == plan_attention_backward(problem, H200)
    shared = plan_attention_backward(problem, H200, (1, 1, problem.seq_q))
    assert shared.bias_shares == 1 and shared.options == stored  # a program for each 64 x 32
    assert plan_attention_backward(replace(problem, seq_q=300, seq_k=300), H200, (1, 1, 300)).bias_shares > 1
    for bias, exact, changed in (
        ((2, 16, 1), False, problem),
        (own, True, problem),
        (own, False, replace(problem, score_mods=("softcap", "bias"))),
        (
            (1, 1, 1000),
            False,
            replace(problem, dtype="float16"),
        ),  # the least of its numbers are 0 before they are added
        (own, False, replace(problem, window=(100, 30))),
        ((1, 16, 1 << 16), False, replace(problem, seq_q=1 << 16, seq_k=1 << 16)),
    ):
        assert not plan_attention_backward(changed, H200, bias, exact_bias=exact).stores_ds
    for dim, least in ((40, 512), (64, 128), (80, 128), (96, 128), (128, 128)):
        for tokens in (least - 1, least):
            short = replace(problem, seq_q=tokens, seq_k=tokens, dim_qk=dim, dim_v=dim)
            assert plan_attention_backward(short, H200, (1, 16, tokens)).stores_ds is (tokens == least)
    refuses(PlanError, "options.stored: dS cannot be stored for a bias: the problem has none",
            plan_attention_backward(replace(LONG, score_mods=("alibi",)), H200).with_tiles, options=stored)  # fmt: skip
    refuses(PlanError, "options.stored: is a version of gradients of a bias with a row for each query, got None",
            plan_attention_backward(problem, H200).with_tiles, options=stored)  # fmt: skip
    refuses(
        PlanError, "scores: must be at most 64 x 128 where dS is stored", plan.with_tiles, scores=Tile(128, 32, 4, 1)
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"keys": Tile(128, 128, 4, 2)}, "queries: must be the tile of keys"),
        ({"heads_at_once": 3}, "heads_at_once: must be a divisor of 4"),
        ({"keys_at_once": 64}, "keys_at_once: must be 0"),
        ({"bias_shares": 1}, "bias_shares: must be 0"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit(fields: dict[str, Any], why: str) -> None:
    refuses(PlanError, why, free(GROUPS).with_tiles, **fields)
    tile = Tile(64, 128, 4, 4)
    refuses(PlanError, "KiB of shared memory", free(GROUPS).with_tiles, tile, tile, tile)
    with pytest.raises(PlanError, match="options: must be None with attention_backward_hopper"):
        plan_attention_backward(LONG, H200).with_tiles(kernel=DETERMINISTIC).with_tiles(options=rules.ReduceOptions())


def test_heads_share_the_second_level_cache() -> None:
    """As many heads at a time as 16 MiB hold sums of dq of, or half or twice of it, as was measured."""

    def at_once(seq: int, problem: AttentionProblem = LONG, ordered: bool = True, **changes: Any) -> int:
        return rules.heads_at_once(replace(problem, seq_q=seq, seq_k=seq, **changes), rules.ReduceOptions(ordered))

    causal: dict[str, Any] = {"causal": True}
    assert (at_once(8192), at_once(16384), at_once(16384, **causal)) == (2, 4, 2)
    assert (at_once(8192, **causal), at_once(4096, **causal, batch=4), at_once(4096, batch=4)) == (4, 4, 4)
    assert (at_once(16384, NARROW), at_once(16384, NARROW, **causal)) == (2, 2)
    assert (at_once(16384, NARROW, False, **causal), at_once(8192, NARROW, False, **causal)) == (4, 4)
    assert at_once(16384, NARROW, window=(4095, 0)) == at_once(16384, NARROW, score_mods=("softcap",)) == 4
    few: dict[str, Any] = {"kv_heads": 5, "heads": 5}  # one at a time or all
    assert (at_once(16384, **few), at_once(16384, **few, **causal), at_once(32768, **few, **causal)) == (5, 5, 1)
    assert (at_once(16384, NARROW, **few), at_once(16384, NARROW, False, **few, **causal)) == (5, 5)
    assert (at_once(16384, NARROW, False, **few), at_once(16384, NARROW, **few, window=(4095, 0))) == (1, 1)
    assert (at_once(16384, NARROW, heads=9, kv_heads=9), at_once(16384, NARROW, heads=11, kv_heads=11)) == (3, 1)
    assert at_once(8192, kv_heads=4) == 2  # a program adds to one query head at a time
    assert at_once(4096, NARROW, **causal, kv_heads=8) == 4  # and here to all of a group
    assert at_once(4096, NARROW, window=(2047, 0), kv_heads=8) == 8
    assert free(GROUPS).heads_at_once == 1
    sums = (16 * 1024 + 1) * 64 * (128 + 2)
    assert free(GROUPS).scratch_bytes == 4 * (sums + 1)
    apart = free(replace(GROUPS, causal=True, seq_q=8192, seq_k=8192))
    assert apart.heads_at_once == 4 and "4 query heads at a time" in str(apart)
    keys, tiles = 4 * 8192, 16 * 128 + 1
    assert apart.scratch_bytes == 4 * (tiles * 64 * (128 + 2) + tiles + keys // 64 + 2 * keys * 128)


def test_argument_of_attention() -> None:
    """A bool, which any device takes; the plan of the call follows it."""
    q, k, v = (torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    refuses(DtypeError, "deterministic must be a bool, got 1", tilefold.attention, q, k, v, deterministic=1)
    with pytest.raises(DtypeError, match="deterministic must be a bool, got 'no'"):
        tilefold.attention_backward_plan(q, k, v, deterministic="no")
