"""The plans of the backward kernels for sm_90, dense and packed: what they refuse and why, how much they keep, that nothing locks
up."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import backward_versions
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.refusals import refuses
from examples import examples
from tilefold.errors import PlanError, TilefoldError
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward import attention_backward_hopper as rules
from tilefold.plan.backward import attention_backward_packed as packed
from tilefold.plan.backward import attention_backward_spans as spans
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.backward.kept_backward import MOST_KEPT, kept_limit
from tilefold.plan.limits import Tile

H200, ROOT = device_named("h200"), Path(__file__).parents[3]
LONG = AttentionProblem(1, 16384, 16384, 16, 16, 128, 128)
MIXED = AttentionProblem(64, 7251, 7251, 16, 16, 128, 128, varlen=True)


MANY = replace(LONG, batch=8, seq_q=8192, seq_k=8192)


def forced(problem: AttentionProblem = LONG, **fields: Any) -> AttentionBackwardPlan:
    return plan_attention_backward(problem, H200).with_tiles(kernel=rules.KERNEL, **fields)


def test_taken_where_it_can_be() -> None:
    """A plan that does not take the kernel says why."""
    assert plan_attention_backward(replace(MANY, seq_q=4096, seq_k=4096), H200).kernel == rules.KERNEL
    assert plan_attention_backward(LONG, H200, portable=True).kernel == "attention_backward_box"
    for problem in (MANY, MIXED, replace(LONG, dim_qk=256, dim_v=256)):  # sinks change lse, and no product
        plan, sunk = (plan_attention_backward(replace(problem, sinks=sinks), H200) for sinks in (False, True))
        assert sunk == replace(plan, problem=sunk.problem)
    capped = replace(LONG, dim_qk=256, dim_v=256, score_mods=("softcap",))
    for problem in (capped, replace(capped, causal=True), replace(MIXED, dim_qk=192, score_mods=("softcap",))):
        plan, other = (plan_attention_backward(replace(problem, score_mods=mods), H200) for mods in (("softcap",), ()))
        assert plan == replace(other, problem=plan.problem) and plan.kernel == rules.KERNEL
        for more in ({"mask_mods": ("mask",)}, {"score_mods": ("softcap", "alibi")}, {"dropout": True}):
            assert plan_attention_backward(replace(problem, **more), H200).kernel != rules.KERNEL
    odd = plan_attention_backward(replace(LONG, dim_qk=320, dim_v=128), H200)
    assert odd.kernel == "attention_backward_box"
    assert "it has head dims to 256, not 320 and 128" in odd.reason
    assert "hopper" not in plan_attention_backward(LONG, device_named("a100")).reason
    assert plan_attention_backward(MIXED, H200).kernel == rules.KERNEL
    assert plan_attention_backward(MIXED, H200, portable=True).kernel == "attention_backward"


REFUSED = {
    "dense": (
        LONG,
        [
            ({"dtype": "float32"}, "it multiplies bfloat16 and float16, not float32"),
            ({"dim_v": 32}, "with head dims below 40, which it pads to 64"),
            ({"dim_v": 66}, "it stores 4 columns at a time, head dims are 128 and 66"),
            ({"dim_v": 132}, "the rows of the gradient of out are not multiples of 16 bytes"),
            ({"dim_v": 260}, "it has head dims to 256, not 128 and 260"),
            ({"dropout": True}, "and no dropout"),
            ({"mask_mods": ("mask",)}, "no masks but causal and window"),
            ({"query_descriptors": False}, "strides of Q are not multiples of 16 bytes"),
            ({"descriptors": False}, "strides of K or V are not multiples of 16 bytes"),
            ({"seq_k": 0}, "there are no keys"),
            (
                {"heads": 1 << 11, "kv_heads": 1, "seq_k": 1 << 20},
                "of two batches would take|fewer than the 25344 that keep",
            ),
            (
                {"batch": 1 << 13, "heads": 256, "kv_heads": 256, "seq_q": 4096},
                "more than 2\\*\\*24 tiles of 64 queries",
            ),
        ],
    ),
    "packed": (
        MIXED,
        [
            ({"dtype": "float32"}, "it multiplies bfloat16 and float16, not float32"),
            ({"dim_v": 64}, "it has head dims of 64 and 128, the same for V, or wider ones, not 128 and 64"),
            ({"dropout": True}, "and no dropout"),
            ({"query_descriptors": False}, "strides of Q are not multiples of 16 bytes"),
            ({"descriptors": False}, "strides of K or V are not multiples of 16 bytes"),
            ({"seq_k": 0}, "there are no keys"),
            (
                {"seq_q": 65536, "seq_k": 65536},
                "4 GiB hold dS of 32768 keys of sequences of up to 65536 queries, fewer than",
            ),
            ({"batch": 1 << 20}, "sequences times heads are 16777216, more than 4194303"),
        ],
    ),
}


def several(table: dict[str, Any]) -> list[Any]:
    """Rows of a table, each behind its problem."""
    return [
        pytest.param(problem, *row, id=f"{name} {row}") for name, (problem, found) in table.items() for row in found
    ]


@pytest.mark.parametrize(("problem", "changes", "why"), several(REFUSED))
def test_refusals(problem: AttentionProblem, changes: dict[str, Any], why: str) -> None:
    problem = replace(problem, **changes)
    assert plan_attention_backward(problem, H200).kernel != rules.KERNEL
    with pytest.raises(PlanError, match=f"attention_backward_hopper cannot be used: .*{why}"):
        forced(problem)


@pytest.mark.parametrize(
    ("dims", "width", "programs", "stages"),
    [
        ((64, 64), 64, 264, 4),
        ((80, 72), 128, 264, 2),
        ((64, 128), 128, 264, 2),
        ((256, 256), 256, 132, 2),
        ((256, 64), 256, 132, 2),
        ((192, 128), 192, 132, 3),
        ((72, 136), 192, 132, 3),
    ],
)
def test_head_dims_are_padded_to_a_width(dims: tuple[int, int], width: int, programs: int, stages: int) -> None:
    problem = replace(LONG, dim_qk=dims[0], dim_v=dims[1])
    plan = plan_attention_backward(problem, H200).with_tiles(kernel=rules.KERNEL)
    assert (rules.width_of(problem), rules.places(problem, H200)) == (width, programs)
    assert plan.keys == Tile(64, 64, 4, stages)
    assert rules.sum_tiles(replace(problem, seq_q=64), H200) == {192: 4, 256: 2}.get(width, 1)


def test_what_is_kept() -> None:
    """Whole heads where four have room, KV splits of one head beyond; half the memory under a causal mask; a window's width; of
    one batch entry 256 MiB, and queries in spans."""
    for problem, kept in (
        (MANY, (1, 8192, 8, 1.0)),
        (replace(MANY, causal=True), (1, 8192, 8, 0.5)),
        (replace(LONG, batch=4, seq_q=4096, seq_k=4096), (2, 4096, 8, 0.5)),
        (replace(LONG, seq_q=65536, seq_k=65536, window=(4096, 0)), (1, 8192, 8, 0.5)),
        (replace(LONG, window=(4095, 0)), (1, 5504, 11, 0.47)),
    ):
        plan = forced(problem)
        slots = rules.slots(problem, H200, plan.heads_at_once, plan.keys_at_once)
        gib = rules.kept_bytes(problem, H200, plan.heads_at_once, plan.keys_at_once) / 2**30
        assert (plan.heads_at_once, plan.keys_at_once, slots) == kept[:3]
        assert kept[3] <= gib < kept[3] + 0.02
        assert plan.scratch_bytes >= gib * 2**30
    assert "dS of 1 KV heads and 8192 of their keys is kept at a time" in str(forced(MANY))
    assert len(forced(LONG).spans) == 5 and forced(LONG).scratch_bytes < 0.52 * 2**30


def test_the_widest_heads_come_in_two_spans_or_more_where_kv_splits_are_short() -> None:
    """Faster than in KV splits of 4096 keys, and in less memory.  Up to 192 columns splits are faster."""
    for dims, heads, cut in (((192, 128), 16, 1), ((256, 256), 8, 2)):
        problem = replace(LONG, dim_qk=dims[0], dim_v=dims[1], heads=heads, kv_heads=heads)
        plan = plan_attention_backward(problem, H200)
        assert (plan.kernel, len(plan.spans)) == (rules.KERNEL, cut)
        if cut == 2:
            assert plan.queries_at_once == 8192
            assert plan.scratch_bytes < 0.85 * 2**30 < plan.with_tiles(queries_at_once=0).scratch_bytes
        shorter = plan_attention_backward(replace(problem, seq_q=8192, seq_k=8192), H200)
        assert (shorter.queries_at_once, shorter.keys_at_once) == (0, 8192)


def test_wide_heads_were_measured_to_be_the_fastest() -> None:
    """In every case of the record, of FA4's in any order, too; and so is the table of the overview."""
    times: dict[tuple[str, bool, float], dict[str, float]] = {}
    for line in (ROOT / "benchmarks" / "results" / "backward_wide.jsonl").read_text().splitlines():
        row = json.loads(line)
        of = json.dumps(row["case"]), row.get("packed", False), row.get("softcap", 0.0)
        times.setdefault(of, {})[row["version"]] = row["ms"]
    overview = (ROOT / "docs" / "performance" / "overview.md").read_text(encoding="utf-8")
    table = overview.split("### Head dims above 128")[1].split("\n## ")[0]
    shown = 0
    for (case, is_packed, softcap), ms in times.items():
        batch, tokens, heads, kv_heads, (dim_qk, dim_v), causal = shape = json.loads(case)
        mods = ("softcap",) if softcap else ()
        problem = AttentionProblem(batch, tokens, tokens, heads, kv_heads, dim_qk, dim_v, causal=causal, score_mods=mods,
                                   varlen=is_packed)  # fmt: skip
        assert plan_attention_backward(problem, H200).kernel == rules.KERNEL
        assert ms["dS kept"] < min(ms["portable"], ms["FA4"], ms["FA4 deterministic"])
        dims = f"{dim_qk} (V {dim_v})" if dim_v != dim_qk else f"{dim_qk}"
        kind = f"{'packed: ' * is_packed}{dims}, {heads}{', softcap' * bool(softcap)}"
        start = f"| {kind} | {tokens} x {batch} | {'causal' if causal else 'full'} | "
        if start in table:
            work = 2e-9 * heads * (3 * dim_qk + 2 * dim_v) * backward_versions.pairs_of(shape, is_packed)
            names = ("dS kept", "portable", "cuDNN", "FA4 deterministic", "FA4")
            cells = [cell.strip(" *").split() for cell in table.split(start)[1].splitlines()[0].rstrip(" |").split("|")]
            for name, cell in zip(names, cells, strict=True):
                assert (float(cell[0]) if cell else None) == (
                    pytest.approx(work / ms[name], abs=1) if cell else None
                ), case
                if name.startswith("FA4"):
                    assert float(cell[1].strip("()x")) == pytest.approx(ms[name] / ms["dS kept"], abs=0.006), case
            shown += 1
    assert shown == table.count("\n|") - 2
    for name in ("FA4 deterministic", "FA4"):
        over = [ms[name] / ms["dS kept"] for ms in times.values()]
        for page in (ROOT / "README.md", ROOT / "docs" / "performance" / "attention_backward_hopper.md"):
            assert f"{min(over):.2f} to {max(over):.2f}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 192), (64, 256), (136, 40)])
def test_wide_heads_of_packed_sequences(dims: tuple[int, int]) -> None:
    """Of two consumers each makes dq of one tile of queries: two a work tile, however few there are."""
    problem = replace(MIXED, dim_qk=dims[0], dim_v=dims[1])
    plan = plan_attention_backward(problem, H200)
    stages = 3 if rules.width_of(problem) == 192 else 2
    assert (plan.kernel, plan.keys) == (rules.KERNEL, Tile(64, 64, 4, stages))
    assert packed.tiles_together(problem, H200, 64) == 2
    assert packed.tiles_together(replace(problem, dim_qk=128, dim_v=128), H200, 64) == 1


def test_sums_between_splits_are_scratch() -> None:
    apart = forced(MANY, keys_at_once=4096).scratch_bytes - forced(MANY, keys_at_once=8192).scratch_bytes
    assert apart > 8 * 16 * 8192 * 128 * 4 - (1 << 20)


def test_what_is_kept_of_packed_sequences() -> None:
    """Four key items for each running program and the longest sequence, or what 4 GiB hold; a window's width."""
    for problem, kept in (
        (MIXED, (1171, 1.0)),
        (replace(MIXED, causal=True), (1171, 1.0)),
        (replace(MIXED, kv_heads=4), (1149, 4.0)),
        (replace(MIXED, window=(512, 0)), (1171, 0.1)),
        (replace(MIXED, batch=2, seq_q=100, seq_k=100, heads=2, kv_heads=2), (12, 0.0)),
    ):
        plan = forced(problem)
        gib = packed.kept_bytes(problem, plan.keys_at_once) / 2**30
        assert (plan.heads_at_once, plan.keys_at_once // 64) == (1, kept[0])
        assert kept[1] <= round(gib, 1) + 0.05 < kept[1] + 0.15
        assert plan.scratch_bytes >= gib * 2**30
    assert "as many are made: dS of 74944 keys is kept at a time" in str(forced(MIXED))


OVERRIDES = {
    "dense": (
        MANY,
        [
            ({"heads_at_once": 3}, "heads_at_once: must be a divisor of 128"),
            ({"heads_at_once": 32}, "heads_at_once: dS of a batch would take 4.0 GiB, more than 2"),
            ({"heads_at_once": 16}, "heads_at_once: dS of two batches would take 4.0 GiB, more than 2"),
            ({"keys_at_once": 100}, "keys_at_once: must be a multiple of 64 up to 8192, got 100"),
            ({"keys_at_once": 32768}, "keys_at_once: must be a multiple of 64 up to 8192"),
            ({"queries": Tile(64, 64, 4, 1)}, "queries: must be the tile of keys"),
            ({"bias_shares": 1}, "bias_shares: must be 0"),
        ],
    ),
    "packed": (
        MIXED,
        [
            ({"heads_at_once": 2}, "heads_at_once: must be 1 for a packed batch, got 2"),
            (
                {"keys_at_once": 64 * 114},
                "keys_at_once: must be a multiple of 64 from 7360, the longest sequence, got 7296",
            ),
            ({"keys_at_once": 7401}, "keys_at_once: must be a multiple of 64"),
            ({"keys_at_once": 64 * 5000}, "keys_at_once: dS of 320000 keys would take 4.3 GiB, more than 4"),
            ({"queries": Tile(64, 64, 4, 1)}, "queries: must be the tile of keys"),
        ],
    ),
}


@pytest.mark.parametrize(("problem", "fields", "named"), several(OVERRIDES))
def test_overrides_that_do_not_fit(problem: AttentionProblem, fields: dict[str, Any], named: str) -> None:
    refuses(PlanError, named, forced, problem, **fields)


def test_tiles_that_do_not_fit() -> None:
    for tile, named in (
        (Tile(64, 128, 4, 2), "block_n: must be 64"),
        (Tile(64, 64, 4, 1), "num_stages: must be at least 2"),
        (Tile(64, 64, 4, 9), "num_stages: must be from 1 to 8"),
        (Tile(64, 64, 4, 8), "num_stages: needs 301 KiB"),
    ):
        refuses(PlanError, named, forced, queries=tile, keys=tile, scores=tile)
    with pytest.raises(PlanError, match="must be 0, as keys_at_once"):
        plan_attention_backward(LONG, H200, portable=True).with_tiles(heads_at_once=2)


def problems(longest: int, **fixed: Any) -> st.SearchStrategy[AttentionProblem]:
    lengths = st.one_of(st.integers(1, 300), st.integers(1, longest), st.integers(1, 2**30))
    return st.builds(
        lambda kv_heads, group, dim, **rest: AttentionProblem(
            heads=kv_heads * group, kv_heads=kv_heads, dim_qk=dim, dim_v=dim, **rest, **fixed
        ),
        kv_heads=st.integers(1, 16),
        group=st.sampled_from([1, 2, 7, 8]),
        dim=st.sampled_from([64, 128]),
        batch=st.one_of(st.integers(1, 8), st.integers(1, 100_000)),
        seq_q=lengths,
        seq_k=lengths,
        causal=st.booleans(),
        window=st.sampled_from([(-1, -1), (4096, 0), (0, -1), (100, 100)]),
    )


@examples(200)
@given(problem=problems(200_000))
def test_any_problem(problem: AttentionProblem) -> None:
    """Whatever is not refused fits: memory, a descriptor's rows, and an order in which nothing waits for what comes later."""
    try:
        plan = forced(problem)
    except TilefoldError:
        return
    for span in {plan.spans[0], plan.spans[-1]}:
        if span.k_high > span.k_low:
            fits(spans.problem_of(problem, span), plan)
    assert plan.with_tiles(kernel="attention_backward_box").heads_at_once == 0


def fits(problem: AttentionProblem, plan: AttentionBackwardPlan) -> None:
    """One launch of a plan."""
    heads, keys = spans.batch_of(problem, plan.heads_at_once, plan.keys_at_once)
    slots, batches = rules.slots(problem, H200, heads, keys), rules.batches_of(problem, heads, keys)
    batch, delay = heads * keys // 64, rules.delay(problem, H200, heads, keys)
    assert rules.kept_bytes(problem, H200, heads, keys) <= kept_limit(problem)
    assert slots == batches or slots >= 2
    assert batch <= delay <= (batches * batch if slots == batches else (slots - 1) * batch)


@examples(200)
@given(problem=problems(40_000, varlen=True), share=st.floats(0.001, 1.0))
def test_any_packed_problem(problem: AttentionProblem, share: float) -> None:
    """Whatever is not refused fits: memory, a descriptor's rows, and lines for the longest sequence and the shift."""
    try:
        plan = forced(problem)
    except TilefoldError:
        return
    n = problem
    totals = (min(1 << 26, max(m, int(share * n.batch * m))) for m in (n.seq_q, n.seq_k))
    order = packed.order_of(n, H200, plan.keys_at_once, *totals)
    assert packed.kept_bytes(n, plan.keys_at_once) <= MOST_KEPT
    assert order.slots * n.group * order.width * 64 < 1 << 31
    assert order.shift >= 0
    assert order.slots == order.keys or order.longest + order.shift <= order.slots
    assert order.slots >= min(order.keys, order.longest + rules.places(problem, H200) // 2)
    with contextlib.suppress(PlanError):  # lengths that no grid of portable programs counts
        assert plan.with_tiles(kernel="attention_backward").heads_at_once == 0
