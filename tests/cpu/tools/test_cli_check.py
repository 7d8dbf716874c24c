"""`tilefold check`: the cases reach every kernel and option, a wrong result is exit code 1."""

import pytest
from rich.console import Console

import tilefold
from cases.cli import command
from tilefold.cli import check
from tilefold.cli.check_cases import (
    BOX,
    POINTERS,
    SPARSE,
    SPARSE_BOX,
    SPARSE_PAGED,
    SPARSE_VARLEN,
    VARLEN,
    CheckCase,
    arguments,
    check_cases,
)
from tilefold.cli.runtime import Runtime

run = command("check", columns=100)


def test_cases_cover_every_kernel_option_and_dtype():
    for quick in (False, True):
        cases = check_cases(quick, gpu=False)
        assert {case.kernel for case in cases} >= {POINTERS, BOX, VARLEN, SPARSE, SPARSE_VARLEN, SPARSE_PAGED}
        options = {"alibi", "bias", "mask", "sinks", "dead", "sizes"}
        assert {option for case in cases for option in case.options} >= options
        assert {case.lists for case in cases} == {"", "full", "random"}
        assert {case.dtype for case in cases} >= {"float16", "bfloat16"}
        assert len({case.title for case in cases}) == len(cases)
    assert {case.dim_qk for case in cases} <= {case.dim_qk for case in check_cases(False, gpu=False)}
    assert SPARSE_BOX in {case.kernel for case in check_cases(False, gpu=False)}
    assert {1, 40, 64, 128, 192, 256} <= {case.dim_qk for case in check_cases(False, gpu=False)}


def test_a_gpu_gets_longer_odd_lengths():
    small, large = check_cases(False, gpu=False), check_cases(False, gpu=True)
    assert large[0].lengths == tuple((9 * q, 9 * k) for q, k in small[0].lengths)
    assert large[0].lengths[0][0] % 2 == 1


def test_help_says_what_is_covered_and_what_is_not():
    text = " ".join(run("--help").output.split())
    everything, quick = check_cases(False, gpu=False), check_cases(True, gpu=False)
    assert f"Covered: {len(everything)} calls ({len(quick)} with --quick) of attention, attention_varlen, " in text
    assert all(case.function in text for case in everything)
    assert "Not covered: gradients" in text and "Exit code 1 if a result is wrong; 2 if none is" in text


def test_arguments_are_the_same_every_time():
    case = CheckCase("x", options=("alibi", "bias", "mask", "sinks"), cap=2.0, lengths=((9, 12),))
    (q, k, v), packing, options = arguments(case, "cpu")
    again = arguments(case, "cpu")
    assert q.equal(again[0][0])
    assert packing == {}
    assert (q.shape, k.shape, v.shape) == ((1, 9, 2, 64), (1, 12, 2, 64), (1, 12, 2, 64))
    assert options["bias"].shape == (1, 2, 9, 12)
    assert options["mask"].equal(again[2]["mask"])


def test_packed_arguments():
    (q, k, _), packing, _ = arguments(CheckCase("x", VARLEN, lengths=((3, 4), (0, 2))), "cpu")
    assert (q.shape[0], k.shape[0]) == (3, 6)
    assert packing["cu_seqlens_q"].tolist() == [0, 3, 3]
    assert packing["cu_seqlens_k"].tolist() == [0, 4, 6]
    assert (packing["max_seqlen_q"], packing["max_seqlen_k"]) == (3, 4)


def test_sparse_arguments():
    case = CheckCase("x", SPARSE_PAGED, lists="random", lengths=((3, 40), (3, 0)), page_size=7, options=("sizes",))
    (q, k, _), where, options = arguments(case, "cpu")
    assert (q.shape, k.shape, "window" in options) == ((2, 3, 2, 64), (12, 7, 2, 64), False)
    assert list(where) == ["index", "block_table", "cache_seqlens"]
    assert (where["index"].seq_k, where["index"].block_sizes.shape) == (40, (2, 3))
    assert (case.function, case.oracle) == ("sparse_attention_paged", "sparse_attention_paged")
    full = CheckCase("x", SPARSE_VARLEN, lists="full")
    assert (full.function, full.oracle) == ("sparse_attention_varlen", "attention_varlen")


@pytest.mark.interpreter
def test_the_quick_check_passes_in_the_interpreter():
    result = run("--quick")
    assert "WRONG" not in result.output
    assert "…" not in result.output
    kernels = (
        "attention_forward, attention_forward_box, attention_forward_varlen, sparse_forward, sparse_forward_paged, "
    )
    assert f"agree with fp64 ({kernels}sparse_forward_varlen)" in result.said


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(
        check, "check_cases", lambda quick, gpu: (CheckCase("only", lengths=((8, 8),), dim_qk=16, dim_v=16),)
    )


@pytest.mark.parametrize(
    ("off", "said"), [((0.1, 0.0), "1 of 1 cases are WRONG."), ((0.0, 0.5), "only: lse: WRONG")], ids=["out", "lse"]
)
def test_a_wrong_result_is_exit_code_1(monkeypatch, one_case, off, said):
    honest = tilefold.attention

    def wrong(*tensors, **options):
        out, lse = honest(*tensors, **options)
        return out + off[0], lse + off[1]

    monkeypatch.setattr(tilefold, "attention", wrong)
    assert said in run(code=1).output


def test_after_a_crash_the_others_go_on(monkeypatch):
    calls = []

    def run_check(case, device):
        calls.append(case.title)
        if len(calls) == 1:
            raise RuntimeError("CUDA error\nlong story")
        return check.Result(case, POINTERS, True)

    monkeypatch.setattr(check, "run_check", run_check)
    cases = (CheckCase("first"), CheckCase("second"))
    results = check.run_all(cases, Runtime("cpu", ""), Console(quiet=True))
    assert [(result.ok, result.failed) for result in results] == [(None, True), (True, False)]
    assert results[0].note == "RuntimeError: CUDA error"


@pytest.mark.parametrize("wrong", [False, True])
def test_what_could_not_run_is_not_called_wrong(wrong, monkeypatch):
    """Exit code 2; 1 where another case gave a wrong result."""
    cases = (CheckCase("broken"), CheckCase("judged"))

    def run_check(case, device):
        if case.title == "broken":
            raise ImportError("no module named triton")
        return check.Result(case, "attention_forward", not wrong)

    monkeypatch.setattr(check, "check_cases", lambda quick, gpu: cases)
    monkeypatch.setattr(check, "run_check", run_check)
    result = run(code=1 if wrong else 2)
    assert "1 of 2 cases could not run: nothing is said of them." in result.output
    assert "broken: ImportError: no module named triton" in result.output and "agree with fp64" not in result.output
    assert ("1 of 1 cases are WRONG." in result.output) is wrong and ("WRONG" in result.output) is wrong
    assert "no result" in result.output
