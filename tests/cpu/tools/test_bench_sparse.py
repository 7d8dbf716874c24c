"""The sparse family: its cases and FLOPs, its judges, gradients beside fp64, the crossing, and reports of made-up times."""

import json
from dataclasses import replace

import pytest
import torch

from cases.bench import RIGHT, SETTING, rows, shown, timing
from tilefold import reference
from tilefold.bench import record
from tilefold.bench.attention import report
from tilefold.bench.attention.cases import DECODE, VIDEO, Case, cases_of
from tilefold.bench.attention.crossing import crossing_of
from tilefold.bench.attention.lists import Pattern, lists_of
from tilefold.bench.attention.peers import SPARSE as FAMILY
from tilefold.bench.family import Peer
from tilefold.bench.implementation import make_inputs, prepared
from tilefold.bench.judge import Judge, sampled_heads, visible
from tilefold.bench.run import Cell, run_case
from tilefold.bench.setting import Options
from tilefold.errors import ValueRangeError
from tilefold.plan.problem import AttentionProblem
from tilefold.reference.sparse import element_mask

PROBLEM = AttentionProblem(2, 96, 160, 4, 2, 16, 8, dtype="float32")
SPARSE = Case("sparse", PROBLEM, Pattern("uneven", 0, 32, 16))
QUICK = Options(rounds=1, rep_ms=1.0)


# --- cases ----------------------------------------------------------------------------------------------------------------------


def test_the_full_family_is_what_the_published_table_and_more_ask_for():
    names = [case.name for case in cases_of("sparse")]
    assert len(set(names)) == len(names)
    main = "d128_h12_n23296x1_b64_"
    for wanted in ("random_s50", "random_s65.1", "random_s80", "random_s90", "random_s99", "video_s80", "uneven"):
        assert main + wanted in names
    others = ("d128_h12k3_n23296x1", "d64_h12_n23296x1", "d128_h12_n23296x4")
    assert {f"{name}_b64_random_s80" for name in others} < set(names)
    assert {main + "random_s80_float16", "d128_h12_n23296x1_b128_random_s80"} < set(names)
    assert {"d128_h12_q64k23296x1_b64_random_s9.9", "d128_h12_q64k23296x1_b64_random_s90"} < set(names)


def test_sparsities_that_are_asked_for_take_the_place_of_the_usual_cases():
    found = cases_of("sparse", "full", "float16", "both", (1, 50, 99))
    assert [case.kept for case in found] == ["361/364", "182/364", "4/364"] * 2
    assert {case.pattern.kind for case in found} == {"random"}
    assert {replace(case.problem, dtype="bfloat16") for case in found} == {VIDEO}
    assert [case.backward for case in found] == [False] * 3 + [True] * 3
    assert cases_of("sparse", "tiny", sparsities=(50,))[0].problem.seq_q == 256
    assert cases_of("dense", sparsities=(50,)) == cases_of("dense")


def test_flops_count_the_listed_blocks_and_two_and_a_half_times_backward():
    case = Case("sparse", VIDEO, Pattern("random", 80))
    assert case.flops == 4 * 64 * 64 * 128 * 12 * 364 * 73
    assert replace(case, backward=True).flops == case.flops * 5 // 2
    assert Case("sparse", VIDEO, Pattern("random", 0)).flops == Case("dense", VIDEO).flops
    assert Case("sparse", replace(VIDEO, kv_heads=3), Pattern("random", 80)).flops == case.flops


def test_bytes_of_a_decoding_step_are_those_of_the_blocks_it_touches():
    case = Case("sparse", DECODE, Pattern("random", 90))
    rows = 64 * 12 * (256 * 2 + 4)
    assert case.bytes == rows + 37 * 64 * 12 * 256 * 2
    assert case.replayed
    assert not Case("sparse", VIDEO, Pattern("random", 90)).replayed


def test_backward_leaves_decoding_out_and_both_has_forward_first():
    forward, backward = cases_of("sparse"), cases_of("sparse", direction="backward")
    assert len(backward) == len(forward) - 2
    assert all(case.backward and case.name.endswith("_backward") for case in backward)
    assert cases_of("sparse", direction="both") == forward + backward
    assert len(cases_of("dense", direction="both")) == 2 * len(cases_of("dense"))
    with pytest.raises(ValueRangeError, match="direction must be one of forward, backward, both, got 'down'"):
        cases_of("sparse", direction="down")


def test_another_dtype_moves_every_case_once():
    half = cases_of("sparse", dtype="float16")
    assert {case.problem.dtype for case in half} == {"float16"}
    assert len({case.name for case in half}) == len(half) == len(cases_of("sparse")) - 1


# --- judges ---------------------------------------------------------------------------------------------------------------------


def whole_reference(inputs):
    return reference.sparse_attention(inputs.q, inputs.k, inputs.v, inputs.index)[0]


@pytest.mark.parametrize("batch", [0, 1])
def test_visible_is_the_element_mask_of_the_lists(batch):
    inputs = make_inputs(SPARSE, "cpu")
    rows = [0, 5, 31, 32, 95]
    want = element_mask(inputs.index, 2, 4)[batch : batch + 1][:, :, rows]
    assert torch.equal(visible(inputs, rows, batch=batch), want)
    assert torch.equal(visible(inputs, rows, batch=batch, heads=slice(2, 4)), want[:, 2:4])
    assert visible(inputs, rows, lists=False).all()


def test_the_judge_follows_the_lists_or_not_as_told():
    inputs = make_inputs(SPARSE, "cpu")
    sparse, dense = whole_reference(inputs).float(), reference.attention(inputs.q, inputs.k, inputs.v)[0].float()
    assert Judge(inputs).verdict(sparse).ok
    assert not Judge(inputs).verdict(dense).ok
    assert Judge(inputs, lists=False).verdict(dense).ok


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_the_judge_of_gradients_agrees_with_autograd_through_the_whole_reference(causal, lists, monkeypatch):
    monkeypatch.setattr("tilefold.bench.judge.STRETCH", 40 * 320)  # several stretches
    case = replace(SPARSE, backward=True, problem=replace(PROBLEM, causal=causal))
    inputs = make_inputs(case, "cpu")
    leaves = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    if lists:
        out = reference.sparse_attention(*leaves, inputs.index, causal=causal)[0]
    else:
        out = reference.attention(*leaves, causal=causal)[0]
    want = torch.autograd.grad(out, leaves, inputs.grad.double())
    judge = Judge(inputs, lists=lists)
    for mine, whole in zip(judge.want, judge._sampled(want), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-11, atol=1e-11)
    assert judge.verdict(tuple(t.float() for t in want)).ok
    b, h = judge.heads[-1]
    for which, head in ((0, h * 2 + 1), (1, h), (2, h)):
        wrong = [t.float().clone() for t in want]
        wrong[which][b, 3, head] += 1e-2
        assert not judge.verdict(tuple(wrong)).ok
    unsampled = [t.float().clone() for t in want]
    unsampled[1][0, 0, 0, 0] = float("nan")
    assert not judge.verdict(tuple(unsampled)).finite


def test_sampled_heads_are_distinct_and_keep_the_last():
    assert sampled_heads(1, 1) == [(0, 0)]
    assert sampled_heads(1, 2, 5) == [(0, 0), (0, 1)]
    found = sampled_heads(4, 12)
    assert len(set(found)) == 2
    assert (3, 11) in found
    assert found == sorted(found)


# --- running --------------------------------------------------------------------------------------------------------------------


def by_lists(inputs):
    return prepared(inputs, lambda q, k, v: reference.sparse_attention(q, k, v, inputs.index)[0].to(q.dtype))


def by_every_pair(inputs):
    return prepared(inputs, lambda q, k, v: reference.attention(q, k, v)[0].to(q.dtype))


def made_up(name, prepare, lists):
    return Peer(name, name, "made up", "torch", prepare, lambda case, device: None, lists=lists)


@pytest.mark.parametrize("backward", [False, True])
def test_each_is_judged_by_what_it_claims_to_compute(backward):
    case = replace(SPARSE, backward=backward)
    everyone = [
        made_up("lists", by_lists, True),
        made_up("pairs", by_every_pair, False),
        made_up("liar", by_every_pair, True),
    ]
    cells = run_case(FAMILY, case, everyone, "cpu", QUICK, lambda case, what: None).cells
    assert [cell.status for cell in cells] == ["ok", "ok", "WRONG"]
    assert cells[0].scratch is None  # a GPU's figure


def test_a_gradient_is_computed_over_a_graph_that_is_made_once():
    calls = []

    def prepare(inputs):
        def function(q, k, v):
            calls.append(1)
            return reference.sparse_attention(q, k, v, inputs.index)[0].to(q.dtype)

        return prepared(inputs, function)

    inputs = make_inputs(replace(SPARSE, backward=True), "cpu")
    ready = prepare(inputs)
    first, again = ready.call(), ready.call()
    assert len(calls) == 1
    assert [t.shape for t in first] == [inputs.q.shape, inputs.k.shape, inputs.v.shape]
    assert all(map(torch.equal, first, again))
    assert not inputs.q.requires_grad


def test_the_gradient_of_a_case_does_not_change_its_other_inputs():
    forward, backward = make_inputs(SPARSE, "cpu"), make_inputs(replace(SPARSE, backward=True), "cpu")
    assert forward.grad is None
    assert backward.grad.shape == (2, 96, 4, 8)
    assert all(torch.equal(getattr(forward, name), getattr(backward, name)) for name in "qkv")
    assert torch.equal(forward.index.to_map(), lists_of(SPARSE.pattern, PROBLEM).to_map())


# --- the crossing ---------------------------------------------------------------------------------------------------------------


def test_the_crossing_is_where_the_straight_lines_meet():
    points = [(90, 1.0, 5.0), (50, 4.0, 5.0), (25, 6.0, 5.0), (0, 8.0, 5.0)]
    found = crossing_of(points)
    assert (found.sparsity, found.least, found.most) == (pytest.approx(37.5), 25, 50)
    assert str(found) == "at 37.5 % sparsity (between 25 and 50 %)"


def test_the_crossing_is_the_last_one_on_the_way_up():
    found = crossing_of([(0, 4.0, 5.0), (25, 6.0, 5.0), (50, 4.0, 5.0)])
    assert (found.least, found.most) == (25, 50)


def test_without_a_change_of_sides_the_crossing_is_a_bound():
    assert str(crossing_of([(50, 4.0, 5.0), (90, 1.0, 5.0)])) == "below 50 % sparsity"
    assert str(crossing_of([(50, 9.0, 5.0), (90, 6.0, 5.0)])) == "not up to 90 % sparsity"
    assert crossing_of([(50, 9.0, 5.0)]) is None


# --- reports --------------------------------------------------------------------------------------------------------------------


def measured(sparsities=(0, 50, 90)):
    """tilefold and TK in 10 ms for all blocks and in proportion, BSA in 1.25 times that, dense cuDNN in 7; each forward and
    2.5 times that backward; FA4 refuses."""
    cells = []
    for backward in (False, True):
        for sparsity in sparsities:
            case = Case("sparse", VIDEO, Pattern("random", sparsity), backward)
            ms = 10 * case.density * (2.5 if backward else 1)

            def cell(name, ms, case=case):
                return Cell(case, name, "ok", "", RIGHT, timing(ms), scratch=1_200_000)

            dense = 17.5 if backward else 7
            cells += [cell("tilefold", ms), cell("bsa", 1.25 * ms), cell("tk", ms), cell("cudnn", dense)]
            cells.append(Cell(case, "fa4", "refused", "flash-attn-4 is not installed"))
    return rows(cells)


def test_the_best_peer_does_the_same_work_and_is_not_ours():
    row = measured()[0]
    assert report.best_ratio(row) == 1  # TK's: dense cuDNN is faster, but computes something else
    own = replace(row.cells[0], implementation="portable", timing=timing(0.1))
    assert report.best_ratio(replace(row, cells=(*row.cells, own))) == 1
    assert report.best_ratio(replace(row, cells=row.cells[:1])) is None
    assert report.best_ratio(replace(row, case=Case("dense", VIDEO))) is None


def test_tables_have_a_column_for_the_best_peer_and_one_table_a_direction():
    parts = report.directions(measured())
    assert [part[0].case.direction for part in parts] == ["forward", "backward"]
    sheets = report.sheets_of(measured())
    assert sheets[1].title == "sparse attention, backward, bfloat16, TFLOP/s on the listed blocks"
    assert sheets[0].head == ("D, H", "N x B", "lists", "kept", "ms", "tilefold", "best peer", "BSA", "TK", "cuDNN")
    text = shown(sheets[0], *report.detail_tables(parts[0]), width=120)
    assert "64 random 90 %" in text
    assert "1.00x" in text
    assert "1.25x" in text
    assert "MB more" in text
    assert "…" not in text


def test_what_others_report_stands_beside_ours_and_says_whose_it_is():
    sheet = report.reported_sheet(measured((1, 50, 80, 90, 99)))
    assert sheet.title == "reported: by the pipeline's authors, on an H800; not measured here"
    assert sheet.head == ("sparsity", "kept", "tilefold ms", "Triton ms (H800)", "TK ms (H800)")
    assert [(row[0], row[1], *row[3:]) for row in sheet.rows] == [
        ("1 %", "361/364", "8.15", "7.1"),
        ("50 %", "182/364", "4.18", "3.22"),
        ("90 %", "37/364", "0.883", "0.704"),
        ("99 %", "4/364", "0.161", "0.118"),
    ]
    assert sheet.rows[1][2] == "5.00"
    document = record.markdown_text(report.sheets_of(measured()), SETTING, ())
    assert "| sparsity | kept | tilefold ms | Triton ms (H800) | TK ms (H800) |" in document
    assert "not measured here." in document
    for problem, pattern in (
        (replace(VIDEO, dtype="float16"), Pattern("random", 50)),
        (replace(VIDEO, batch=2), Pattern("random", 50)),
        (replace(VIDEO, kv_heads=3), Pattern("random", 50)),
        (DECODE, Pattern("random", 90)),
        (VIDEO, Pattern("random", 50, 128, 128)),
        (VIDEO, Pattern("video", 90)),
        (VIDEO, Pattern("random", 80)),
    ):
        assert report.reported_sheet(rows([Cell(Case("sparse", problem, pattern), "tilefold", "ok")])) is None
    assert report.reported_sheet(rows([Cell(Case("dense", VIDEO), "tilefold", "ok")])) is None


def test_rows_say_their_lists():
    def what(pattern, **changes):
        return report.what_of(Case("sparse", replace(VIDEO, **changes), pattern))

    assert what(Pattern("random", 0)) == "64 random 0 %"
    assert what(Pattern("uneven")) == "64 uneven 83.0 %"
    assert what(Pattern("video", 65.1)) == "64 video 65.1 %"
    assert what(Pattern("random", 80, 128, 128), dtype="float16") == "128 random 80 % fp16"


def test_the_crossing_is_said_once_for_each_direction():
    lines = report.crossing_lines(measured())
    assert len(lines) == 2
    assert lines[0].startswith(
        "tilefold overtakes dense cuDNN at 30.0 % sparsity (between 0 and 50 %): forward, d128_h12"
    )
    assert ": backward, d128_h12_n23296x1, blocks of 64" in lines[1]


def test_documents_and_rows_carry_the_new_figures():
    found = measured()
    text = record.markdown_text(report.sheets_of(found), SETTING, report.crossing_lines(found))
    assert text.count("| D, H | N x B | lists | kept | ms | tilefold | best peer | BSA | TK | cuDNN |") == 2
    assert "tilefold overtakes dense cuDNN at 30.0 %" in text
    document = json.loads(record.json_text(SETTING, report.records_of(found, SETTING), **report.findings(found)))
    assert document["geometric_means"]["bsa"]["tilefold_speedup"] == pytest.approx(1.25)
    assert document["geometric_means"]["bsa, backward"]["cases"] == 3
    assert document["crossings"]["forward, d128_h12_n23296x1, blocks of 64"]["sparsity"] == pytest.approx(30)
    row = document["rows"][0]
    assert (row["direction"], row["density"], row["scratch_bytes"]) == ("forward", 1.0, 1_200_000)
    assert row["kept"] == "364/364"
    assert row["version"] == "0.1.0"
    assert row["tflops"] == pytest.approx(VIDEO.seq_q**2 * 4 * 128 * 12 / 10e-3 / 1e12)
