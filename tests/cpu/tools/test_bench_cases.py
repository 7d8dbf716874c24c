"""The benchmark's cases: the published shapes, FLOPs as published, names and filters."""

import pytest

from tilefold.bench.attention.cases import DENSE, SIZES, cases_of, lognormal_lengths
from tilefold.bench.choice import figures_in, select_cases
from tilefold.errors import DtypeError, ValueRangeError

# (D, H, N, B) of the published dense table.
PUBLISHED = {
    (128, 16, 16384, 1),
    (128, 16, 4096, 4),
    (128, 16, 1024, 16),
    (64, 32, 16384, 1),
    (64, 32, 4096, 4),
    (256, 8, 16384, 1),
}


def test_full_dense_cases_begin_with_the_published_shapes_causal_and_not():
    cases = cases_of("dense")[:12]
    shapes = {(c.problem.dim_qk, c.problem.heads, c.problem.seq_q, c.problem.batch, c.problem.causal) for c in cases}
    assert shapes == {(*shape, causal) for shape in PUBLISHED for causal in (False, True)}
    assert all(c.problem.seq_q == c.problem.seq_k and c.problem.heads == c.problem.kv_heads for c in cases)
    assert all(c.problem.heads * c.problem.dim_qk == 2048 and c.problem.batch * c.problem.seq_q == 16384 for c in cases)


def test_full_dense_cases_go_on_with_other_lengths_groups_windows_and_packed_batches():
    names = {case.name for case in cases_of("dense")[12:]}
    for dim, heads in ((128, 16), (64, 32)):
        for tokens in ("512x32", "2048x8", "8192x2", "65536x1"):
            assert {f"d{dim}_h{heads}_n{tokens}", f"d{dim}_h{heads}_n{tokens}_causal"} <= names
        assert {f"d{dim}_h{heads}_packed64", f"d{dim}_h{heads}_packed64_causal"} <= names
    assert {"d128_h32k4_n8192x2", "d128_h32k4_n8192x2_causal", "d128_h16_n16384x1_window4095_0"} <= names


def test_a_packed_batch_counts_its_own_pairs():
    packed = next(case for case in cases_of("dense") if case.lengths and case.problem.causal)
    assert len(packed.lengths) == packed.problem.batch == 64
    assert max(packed.lengths) == packed.problem.seq_q > 2048
    assert sum(packed.lengths) == pytest.approx(65536, abs=64)
    p = packed.problem
    assert packed.flops == 4 * p.heads * p.dim_qk * sum(n * (n + 1) // 2 for n in packed.lengths)
    assert packed.lengths == lognormal_lengths(64, 1024)  # the same in every process


@pytest.mark.parametrize("size", SIZES)
def test_flops_follow_the_published_convention(size):
    """Forward 4 B H N N D; the convention halves it when causal, where the exact count has the diagonal on top: N + 1 for N."""
    for case in cases_of("dense", size):
        p = case.problem
        if case.lengths or p.window != (-1, -1):
            continue
        full = 4 * p.batch * p.heads * p.seq_q * p.seq_k * p.dim_qk
        exact = full if not p.causal else full // 2 * (p.seq_q + 1) // p.seq_q
        assert case.flops == exact
        if p.causal and p.seq_q >= 1024:
            assert case.flops / (full / 2) == pytest.approx(1.0, rel=1e-3)


def test_names_are_distinct_and_say_the_shape():
    for size in SIZES:
        names = [case.name for case in cases_of("dense", size)]
        assert len(set(names)) == len(names)
    assert cases_of("dense")[1].name == "d128_h16_n16384x1_causal"


def test_tiny_cases_are_small_enough_for_the_interpreter():
    assert all(case.flops < 2e7 for case in cases_of("dense", "tiny"))
    assert set(DENSE) == set(SIZES)


def test_filters():
    cases = cases_of("dense")
    chosen = select_cases(cases, "d128, causal")
    assert {c.name for c in chosen} == {
        c.name for c in cases if c.name.startswith("d128") and c.name.endswith("causal")
    }
    assert select_cases(cases, None) == cases
    with pytest.raises(ValueRangeError, match=r"case filter 'd96' matches none of: d128_h16_n16384x1, "):
        select_cases(cases, "d96")


def test_unknown_names_are_refused():
    with pytest.raises(ValueRangeError, match="family must be one of dense, sparse, got 'paged'"):
        cases_of("paged")
    with pytest.raises(ValueRangeError, match="size must be one of full, quick, tiny, got 'big'"):
        cases_of("dense", "big")
    with pytest.raises(DtypeError, match="dtype must be one of"):
        cases_of("dense", "tiny", "int8")


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("1,10,20,...,99", (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99)),
        ("10,20,...,40", (10, 20, 30, 40)),
        ("10, 20, ..., 25, 80", (10, 20, 25, 80)),
        ("0.1,0.2,...,0.5", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("65.1", (65.1,)),
    ],
)
def test_dots_go_on_in_the_last_step(text, figures):
    assert figures_in(text, "--sparsity") == figures


@pytest.mark.parametrize(
    "text", ["", "a", "1,...,9", "1,2,...", "...,9", "9,5,...,1", "5,5,...,9", "1,2,...,inf", "1,2,...,nan"]
)
def test_a_list_of_numbers_that_is_none_is_named(text):
    with pytest.raises(ValueRangeError, match=f"--sparsity must be comma-separated numbers, .* got {text!r}"):
        figures_in(text, "--sparsity")
