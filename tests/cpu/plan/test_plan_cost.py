"""Costs are exact: every closed form against counting one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilefold.plan import AttentionProblem, attention_cost, bound, device_named, live_pairs
from tilefold.plan.cost import live_keys, visited_tiles


def visible(problem: AttentionProblem, query: int, key: int) -> bool:
    """The definition of the mask, written without sharing anything with the code under test."""
    position = query + problem.seq_k - problem.seq_q
    if problem.causal and key > position:
        return False
    left, right = problem.window
    return not (left >= 0 and key < position - left) and not (right >= 0 and key > position + right)


Sizes = tuple[int, int, int, int, int, int, int]

side = st.integers(-1, 70)
problems = st.builds(
    AttentionProblem,
    batch=st.integers(0, 3),
    seq_q=st.integers(0, 60),
    seq_k=st.integers(0, 60),
    heads=st.just(6),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    dim_qk=st.integers(1, 256),
    dim_v=st.integers(1, 256),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    causal=st.booleans(),
    window=st.tuples(side, side),
)


@examples(300)
@given(problems)
def test_live_pairs_and_keys_are_counted_exactly(problem: AttentionProblem) -> None:
    live = [(i, j) for i in range(problem.seq_q) for j in range(problem.seq_k) if visible(problem, i, j)]
    assert live_pairs(problem) == len(live)
    assert live_keys(problem) == len({j for _, j in live})


@examples(300)
@given(problems, st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))
def test_visited_tiles_are_counted_exactly(problem: AttentionProblem, block_m: int, block_n: int) -> None:
    visited = 0
    for start in range(0, problem.seq_q, block_m):
        rows = range(start, min(start + block_m, problem.seq_q))
        keys = [j for i in rows for j in range(problem.seq_k) if visible(problem, i, j)]
        visited += max(keys) // block_n - min(keys) // block_n + 1 if keys else 0
    assert visited_tiles(problem, block_m, block_n) == visited


def test_counts_of_huge_problems_need_no_loop() -> None:
    n = 2**30
    problem = AttentionProblem(1, n, n, 1, 1, 128, 128, causal=True)
    assert live_pairs(problem) == n * (n + 1) // 2
    assert visited_tiles(problem, 64, 64) == (n // 64) * (n // 64 + 1) // 2


def test_flops_bytes_and_exponentials() -> None:
    problem = AttentionProblem(2, 1, 8192, 28, 4, 128, 64, score_mods=("softcap", "alibi"))
    cost = attention_cost(problem)
    assert cost.flops == 2 * 8192 * (128 + 64) * 2 * 28
    elements = 2 * (28 * 128 + 28 * 64 + 8192 * 4 * (128 + 64))
    assert cost.bytes == elements * 2 + 2 * 28 * 4
    assert cost.exps == 2 * (8192 * 2 * 28), "a softcap takes one exponential more"


def test_a_window_reads_only_the_keys_it_shows() -> None:
    windowed = AttentionProblem(1, 1, 1_000_000, 8, 8, 128, 128, causal=True, window=(127, 0))
    assert live_keys(windowed) == 128
    assert attention_cost(windowed).bytes == (8 + 8 * 128) * 256 * 2 + 8 * 4


@pytest.mark.parametrize(
    ("sizes", "dtype", "resource"),
    [
        ((1, 16384, 16384, 16, 16, 128, 128), "bfloat16", "tensor pipe"),
        ((1, 1, 8192, 28, 4, 128, 128), "bfloat16", "DRAM"),
        ((1, 16384, 16384, 16, 16, 16, 16), "bfloat16", "exp unit"),
        ((1, 4096, 4096, 16, 16, 64, 64), "float32", "FP32 pipe"),
        ((0, 4096, 4096, 16, 16, 64, 64), "float32", "none"),
    ],
)
def test_the_bound_names_the_resource(sizes: Sizes, dtype: str, resource: str) -> None:
    problem = AttentionProblem(*sizes, dtype=dtype)
    found = bound(attention_cost(problem), device_named("h200"), dtype)
    assert found.resource == resource
    assert found.seconds == max(seconds for _, seconds in found.times)


def test_measured_roofs_replace_the_datasheet() -> None:
    h200, h100 = device_named("h200"), device_named("h100")
    assert h200.matmul_rate("bfloat16") == 760e12
    assert h200.matmul_rate("float16") == h100.matmul_rate("float16") == 989.4e12
    assert h200.dram_rate == 4.27e12
    assert h200.exp_rate == pytest.approx(3.87e12, rel=0.01)
