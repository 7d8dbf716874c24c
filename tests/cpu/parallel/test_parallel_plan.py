"""The planner of context parallelism: what each scheme costs, which is chosen and why, for any number of ranks."""

import dataclasses

import pytest

from cases.refusals import refuses
from tilefold.errors import DtypeError, PlanError, Unsupported, ValueRangeError
from tilefold.plan.parallel.cost import head_refusal
from tilefold.plan.parallel.plan import SCHEMES, plan_parallel
from tilefold.plan.parallel.problem import Links, ParallelProblem

LONG = ParallelProblem(1, 1 << 20, 1 << 20, 64, 8, 128, 128, window=(-1, 0), kind="zigzag")
SHORT = ParallelProblem(1, 8192, 8192, 32, 8, 128, 128)


def costs(problem, links):
    plan = plan_parallel(problem, links)
    return {one.scheme: one for one in (plan.cost, *plan.rejected)}


def test_bytes_by_hand():
    """8 ranks, 1024 tokens each: K and V are 1024 * 8 * 256 elements of two bytes."""
    found = costs(SHORT, Links(8))
    kv, q = 1024 * 8 * 256 * 2, 1024 * 32 * 128 * 2
    assert found["ring"].inside == 7 * kv
    assert found["all_gather"].inside == 7 * kv
    assert found["heads"].inside == (2 * q + kv) * 7 / 8
    assert found["ring"].across == found["heads"].across == 0
    assert found["ring"].messages == 7


def test_backward_moves_keys_again_and_their_gradients_in_fp32():
    forward, both = (costs(dataclasses.replace(SHORT, backward=b), Links(8)) for b in (False, True))
    kv = 1024 * 8 * 256 * 2
    assert both["ring"].inside == 2 * forward["ring"].inside + 8 * 2 * kv
    assert both["all_gather"].inside == 2 * forward["all_gather"].inside + 7 * 2 * kv
    assert all(both[s].seconds > 3 * forward[s].seconds / 1.5 for s in ("ring", "all_gather", "heads"))


def test_two_levels_send_less_between_nodes():
    found = costs(LONG, Links(64, 8))
    kv = (1 << 14) * 8 * 256 * 2
    assert found["two_level"].across == 7 * kv
    assert found["ring"].across + found["ring"].inside == 63 * kv


def test_a_slow_network_favours_two_levels_and_fast_links_heads():
    slow = plan_parallel(dataclasses.replace(LONG, seq_q=1 << 17, seq_k=1 << 17), Links(64, 8, across=5e9))
    assert slow.scheme == "two_level"
    assert (slow.heads, slow.ring) == (8, 8)
    few = dataclasses.replace(SHORT, heads=8, window=(-1, 0))  # contiguous causal shards are uneven, heads are not
    assert plan_parallel(few, Links(8)).scheme == "heads"


def test_a_long_sequence_hides_the_ring():
    plan = plan_parallel(dataclasses.replace(LONG, heads=60, kv_heads=4), Links(8), "ring")
    fold = plan.problem.flops / 8 / plan.links.flops
    assert fold < plan.cost.seconds < 1.01 * fold, "nothing but merging comes to the folds"
    merged = plan.cost.seconds - fold
    q, kv = (1 << 17) * 60 * 128 * 2, (1 << 17) * 4 * 256 * 2
    assert merged == pytest.approx((2 * kv + 7 * 0.75 * 5 * q) / plan.links.dram, rel=1e-6)


def test_of_those_that_are_as_fast_the_smallest():
    """More heads than divide: the ring and gathering, whose predictions differ by less than what they are good for."""
    for backward, scheme in ((False, "all_gather"), (True, "ring")):
        plan = plan_parallel(dataclasses.replace(LONG, heads=60, kv_heads=4, backward=backward), Links(8))
        found = {one.scheme: one for one in (plan.cost, *plan.rejected) if not one.refusal}
        assert set(found) == {"ring", "all_gather"}
        assert max(one.seconds for one in found.values()) < 1.005 * min(one.seconds for one in found.values())
        assert plan.scheme == scheme == min(found.values(), key=lambda one: one.memory).scheme
    assert "within 0." in plan.reason, plan.reason


def test_a_window_shortens_the_ring():
    near = dataclasses.replace(SHORT, window=(1500, 0))
    kv = 1024 * 8 * 256 * 2
    assert costs(near, Links(8))["ring"].inside == 2 * kv
    assert costs(near, Links(8, 4))["two_level"].across == kv
    assert costs(dataclasses.replace(near, kind="zigzag"), Links(8))["ring"].inside == 7 * kv


def test_memory_rules_out_gathering():
    plan = plan_parallel(LONG, Links(64, 8, across=1e12, memory=2e9))
    assert plan.scheme != "all_gather"
    gather = next(one for one in plan.rejected if one.scheme == "all_gather")
    assert "are free" in gather.refusal
    refuses(PlanError, "no scheme fits", plan_parallel, LONG, Links(64, 8, memory=1e6))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 96, 4096])
def test_any_number_of_ranks(ranks):
    plan = plan_parallel(LONG, Links(ranks))
    assert plan.heads * plan.ring == ranks
    assert len(plan.rejected) == len(SCHEMES) - 1
    assert plan is plan_parallel(LONG, Links(ranks))


def test_the_text_names_everything():
    text = str(plan_parallel(dataclasses.replace(LONG, heads=60, kv_heads=4, backward=True), Links(16, 8)))
    for part in ("16 ranks, 2 nodes", "zigzag, with backward", "assumed", "reason", "rejected  heads: 60 query heads"):
        assert part in text


def test_one_process_needs_no_transfer():
    found = costs(SHORT, Links(1))
    assert all(one.inside == one.across == 0 for one in found.values())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "fits"),
    [(32, 8, 8, True), (32, 8, 16, True), (32, 8, 4, True), (28, 4, 8, False), (24, 3, 8, False), (8, 1, 8, True)],
)
def test_which_heads_can_be_shared_out(heads, kv_heads, ranks, fits):
    assert (head_refusal(heads, kv_heads, ranks) == "") == fits


def test_what_is_asked_for_and_impossible_is_refused():
    with pytest.raises(
        Unsupported, match="28 query heads are not a multiple of 8 ranks; possible here: ring, all_gather"
    ):
        plan_parallel(dataclasses.replace(SHORT, heads=28, kv_heads=4), Links(8), "heads")
    refuses(Unsupported, "all ranks lie in one node", plan_parallel, SHORT, Links(8, 8), "two_level")
    assert plan_parallel(SHORT, Links(8), "ring").reason == "asked for"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Links(0), "ranks"),
        (lambda: Links(8, 3), "ranks_per_node"),
        (lambda: Links(8, inside=0.0), "inside"),
        (lambda: Links(8, latency=-1.0), "latency"),
        (lambda: Links(8, memory=-1.0), "memory"),
        (lambda: dataclasses.replace(SHORT, dtype="int8"), "dtype"),
        (lambda: dataclasses.replace(SHORT, kind="zig"), "kind"),
        (lambda: dataclasses.replace(SHORT, seq_q=-1), "seq_q"),
        (lambda: dataclasses.replace(SHORT, heads=60), "heads must be a multiple of kv_heads=8"),
        (lambda: plan_parallel(SHORT, Links(8), "rings"), "scheme"),
    ],
)
def test_wrong_values_are_named(make, name):
    refuses(ValueRangeError, name, make)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Links(8, inside="290"), "inside must be a number, got '290' of type str"),
        (lambda: plan_parallel(SHORT, 8), "links must be a Links, got int"),
        (lambda: plan_parallel(8, Links(8)), "problem must be a ParallelProblem, got int"),
    ],
)
def test_wrong_types_are_named(make, text):
    refuses(DtypeError, text, make)


def test_one_is_one_and_the_same_memory_is_said():
    text = str(plan_parallel(ParallelProblem(1, 100, 100, 4, 2, 16, 16, window=(-1, 0)), Links(2)))
    assert "for 2 ranks, 1 node:" in text
    assert "with the same memory" in text
