"""`tilefold profile video | script | case | import`: tables, files, reports judged without a GPU, scripts run as main."""

import json
import sys

import pytest
import torch

from cases.cli import command, refused, reports
from tilefold.bench.choice import select_cases
from tilefold.bench.timers import Timing
from tilefold.bench.video.stages import ALONE, StageRow, VideoRun, prepare_stages
from tilefold.cli import profile, profile_run
from tilefold.ladder import RUNGS
from tilefold.plan import device_named
from tilefold.plan.sparse.video import VideoShape
from tilefold.profiling import session
from tilefold.profiling.cases import FAMILIES, cases_in, prepare_case
from tilefold.profiling.counters import USED_LOADS
from tilefold.sparse import CoarseOptions, SelectOptions

run = command("profile", "video")


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_every_stage_and_every_report(tmp_path):
    files, options = reports(tmp_path, "report", "json", "png", "html")
    result = run("--shape 1,2,128,16 --dtype fp32 --sparsity 0.5 --peers math,fa4 --backward", *options)
    document = json.loads(files["json"].read_text())
    rows = {row["name"]: row for row in document["rows"]}
    stages = ("coarse", "select", "fine", "fuse")
    assert list(rows)[:4] == list(stages)
    assert {"pipeline", "pipeline, forward + backward", "dense math", "dense math, forward + backward"} <= set(rows)
    assert sum(rows[name]["share"] for name in stages) == pytest.approx(1)
    assert rows["pipeline"]["cost"]["flops"] == sum(rows[name]["cost"]["flops"] for name in stages)
    assert rows["pipeline, forward + backward"]["cost"] is None
    assert document["density"] == 0.5 and "1 of 2 blocks kept" in document["title"]
    alone = rows["index alone"]
    assert alone["share"] is None and alone["timing"]["ms"] > 0
    assert alone["cost"]["bytes"] == 2 * 2 * (2 + 4 * 1 + 4)  # rows: two pairs of blocks, an entry, a length
    assert "index alone: from a map of blocks" in result.output
    assert document["reported_ms"] == {} and "reported" not in result.output
    assert any("FA4" in note for note in document["notes"])
    check_explained(document["explained"])
    assert "pipeline takes" in result.output
    assert "Times in the interpreter say nothing about a GPU" in result.output
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert "<svg" in page and "gather_blocks (k)" in page and "adds up" in page and "Not explained" in page


@pytest.mark.interpreter
def test_the_index_alone_makes_the_lists_of_the_stages():
    ready = prepare_stages(
        VideoShape(2, 2, 1, 200, 16, "float32"), "cpu", CoarseOptions(), SelectOptions("top_p", top_p=0.6)
    )
    made, index = ready.calls[ALONE](), ready.index
    assert made.capacity == index.capacity and made.geometry == index.geometry
    assert torch.equal(made.counts, index.counts) and torch.equal(made.to_map(), index.to_map())
    assert int(made.counts.sum()) == ready.listed


def test_the_published_shape_has_what_its_authors_report():
    """In a column of its own that names their device, and with a sentence; no other shape has it."""
    names = ("coarse", "select", "fine", "fuse", "index alone", "pipeline", "dense cuDNN")
    rows = tuple(StageRow(name, Timing(2.0, 2.0, 2.0, 1, "events"), None, None, None) for name in names)
    table = profile._table(VideoRun(VideoShape(1, 12, 12, 23296, 128), 0.35, 1, rows, ()))
    assert table.head[:4] == ("", "ms", "reported (H800)", "%")
    assert [row[2] for row in table.rows] == ["1.007", "0.400", "3.125", "0.231", "0.097", "4.860", ""]
    notes = profile._notes(VideoRun(VideoShape(1, 12, 12, 23296, 128), 0.35, 1, rows, ()))
    assert any("by the pipeline's authors, on an H800; not measured here; 3.666 ms in all" in note for note in notes)
    for other in (VideoShape(1, 12, 12, 23296, 128, "float16"), VideoShape(1, 12, 4, 23296, 128)):
        assert profile._table(VideoRun(other, 0.35, 1, rows, ())).head == profile.HEAD
        assert not any("reported" in note for note in profile._notes(VideoRun(other, 0.35, 1, rows, ())))


def check_explained(why):
    """Every launch by name and stage, with its work; times that add up; the pipeline's launches back with their stages."""
    launches = [(row["stage"], row["evidence"]["kernel"], row["what"]) for row in why["launches"]]
    coarse = [("coarse", "gather_blocks", "k"), ("coarse", "gather_blocks", "v"), ("coarse", "coarse_forward", "")]
    last = [("sparse_forward", ""), ("fuse_forward", "")]
    together = "fine + fuse at once"
    alone = [("select", "select", ""), ("fine", *last[0]), ("fuse", *last[1])]
    assert launches == [*coarse, *alone, *((together, *each) for each in last)]
    inside = [(each["stage"], each["launches"]) for each in why["inside"]]
    assert inside == [("coarse", 3), ("select", 1), (together, 2)]
    for row in why["launches"]:
        assert row["predicted"]["seconds"] > 0 and row["evidence"]["seconds"] > 0 and row["verdict"]["sentence"]
        assert (row["inside"] is None) == (row["stage"] in ("fine", "fuse"))
    for row in why["sums"]:
        assert row["device"] == pytest.approx(row["kernels"] + row["gaps"] + row["left"])
        assert 0 <= row["share"] < 0.9 and row["waits"] == 0
    sums = {row["name"]: row for row in why["sums"]}
    assert sums["pipeline"]["launches"] == 6
    assert sum(each["seconds"] for each in why["inside"]) * 1e3 == pytest.approx(sums["pipeline"]["kernels"])


def test_refusals(tmp_path):
    refused(
        run,
        ("--shape 1,2,3", "--shape must be 4 integers of at least 1, comma-separated, got '1,2,3'"),
        ("--method best", "--method must be one of top_k, top_p, gini, got 'best'"),
        ("--tau 0.5", "--tau must be two numbers MIN,MAX from 0 to 1, got '0.5'"),
        ("--peers tk", "--peers must be from cudnn, flash, efficient, math, fa4 (or none), got 'tk'"),
        ("--coarse mean", "kind must be one of block, dense, pooled, got 'mean'"),
        (("--json", tmp_path / "no" / "file.json"), "--json must be a file that can be written"),
    )


# ---------------------------------------------------------------- script, case, import


HEAD = '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum","{}","{}","{}"'
PATHS = ("l1tex__m_xbar2l1tex_read_sectors", "sm__pipe_tensor_cycles_active")
REPORT = "\n".join(
    [
        "==PROF== Connected to process 7",
        HEAD.format(*(path + ".avg.pct_of_peak_sustained_elapsed" for path in PATHS), USED_LOADS),
        '"","","","","ns","%","%","byte/sector"',
        '"0","sparse_forward","(128, 1, 1)","(364, 12, 1)","3,125,408","83.5","61.6","4.0"',
    ]
)


run_any = command("profile")


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def test_the_pages_table_of_counters(tmp_path):
    """DRAM, occupancy and what warps wait for, a row a kernel; being ready is no waiting; what was not read is empty."""
    names = ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__warps_active.avg.pct_of_peak_sustained_active")
    stalls = {"long_scoreboard": 3.0, "wait": 2.0, "barrier": 4.0, "selected": 1.0, "not_selected": 9.0, "gmma": 1.0}
    launch = ("ID", "Kernel Name", "Block Size", "Grid Size", "gpu__time_duration.sum")
    head = [*launch, *names, *map(STALLED.format, stalls)]
    unit = ["", "", "", "", "ns", "%", "%", *("inst" for _ in stalls)]
    row = ["0", "flash_kernel", "(256, 1, 1)", "(512, 1, 1)", "330,000", "12.4", "24.6", *map(str, stalls.values())]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in (head, unit, row))
    (tmp_path / "report.csv").write_text(text)
    run_any("import", tmp_path / "report.csv", "--markdown", tmp_path / "out.md")
    page = (tmp_path / "out.md").read_text().splitlines()
    at = page.index("| kernel | DRAM | L2 | L2 to SM | L1 | tensor | exp | warps | waits for |")
    waits = "barrier 40%, long_scoreboard 30%, wait 20%"
    assert page[at + 2] == f"| flash_kernel | 12 % |  |  |  |  |  | 25 % | {waits} |"


def test_a_report_of_counters(tmp_path):
    (tmp_path / "report.csv").write_text(REPORT)
    result = run_any(
        "import", tmp_path / "report.csv", "--json", tmp_path / "out.json", "--markdown", tmp_path / "out.md"
    )
    assert "L2-to-SM path at 83.5 % of its peak" in result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0]["verdict"]["resource"] == "L2-to-SM path"
    assert "| sparse_forward |" in (tmp_path / "out.md").read_text()


@pytest.mark.interpreter
def test_refusals_any(tmp_path):
    there = tmp_path / "there.py"
    there.write_text("")
    refused(
        run_any,
        ("absent.py", "the script must be a file, got 'absent.py'"),  # short for: script absent.py
        ("script absent.py", "the script must be a file, got 'absent.py'"),
        ((there,), "a profile needs a GPU"),
        ("case dense nothing-like-it", "matches none of"),
        ("case dance d128", "family must be one of dense"),
        ("case dense d128", "a profile needs a GPU"),
        (("import", tmp_path / "absent.ncu-rep"), "must be a .ncu-rep or a CSV file"),
        (("import", there), "no table of ncu"),
    )


def test_scripts_run_as_main_with_their_arguments(tmp_path):
    """--marked, whose regions stand here for ones that a GPU would have filled."""
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, beside\nfrom tilefold.profiling import session\nfrom tilefold.plan import device_named\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--steps', '3'] and beside.NAME\n"
        "session.FINISHED.append(session.profile_of({}, device_named('h200')))\nsys.exit(0)\n"
    )
    before, place = list(sys.argv), sys.path[0]
    try:
        found = profile_run._run_script(script, ["--steps", "3"], marked=True)
    finally:
        session.FINISHED.clear()
        sys.modules.pop("beside", None)
    assert len(found) == 1 and found[0].device == device_named("h200").title
    assert (sys.argv, sys.path[0]) == (before, place)
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit):
        profile_run._run_script(script, [], marked=True)
    script.write_text("x = 1\n")
    with pytest.raises(profile_run.ValueRangeError, match="no region"):
        profile_run._run_script(script, [], marked=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.interpreter
@pytest.mark.no_poison
def test_every_family_gives_a_call(family):
    case = cases_in(family, "tiny")[0]
    made = prepare_case(family, case, "cpu")
    with made.context():
        assert made.call() is not None
    assert case.flops > 0 and case.bytes > 0
    assert family != "ladder" or case.l2_bytes > 0
    assert device_named("h200").matmul_rate(case.dtype) > 0


def test_a_direction_that_a_family_has_not_is_refused():
    with pytest.raises(
        profile_run.ValueRangeError, match="direction of family 'gemm' must be 'forward', got 'backward'"
    ):
        cases_in("gemm", "tiny", "backward")
    assert cases_in("dense", "tiny", "backward")


def test_the_work_of_a_call_goes_to_its_one_kernel():
    args = {"grid": [132, 1, 1], "block": [128, 1, 1], "registers per thread": 64, "shared memory": 0}
    events = [{"ph": "X", "cat": "kernel", "name": "fold", "ts": 2e3 * i, "dur": 1e3, "args": args} for i in range(4)]
    h200 = device_named("h200")
    work = session.Declared(flops=6e11, bytes=1e9, l2_bytes=2e9, dtype="tf32")
    made = session.with_declared(session.profile_of({"traceEvents": events}, h200), work, 2, h200)
    evidence = made.rows[0].evidence
    assert (evidence.flops, evidence.bytes, evidence.l2_bytes) == (3e11, 5e8, 1e9), "two launches a call"
    assert evidence.tensor_rate == h200.matmul_rate("tf32")
    other = {**events[0], "name": "merge", "ts": 1e5}
    made = session.with_declared(session.profile_of({"traceEvents": [*events, other]}, h200), work, 2, h200)
    assert all(row.evidence.flops is None for row in made.rows)
    assert any("of declared work" in note for note in made.notes)


def test_every_rung_is_a_case():
    """At each length plain and causal, split and flash with one query too; a filter finds the plain one first."""
    cases = cases_in("ladder", "full")
    assert len({case.name for case in cases}) == len(cases)
    for n in (512, 1024, 2048, 4096, 8192):
        for rung in RUNGS:
            for suffix in ("", "_causal"):
                (case,) = (one for one in cases if one.name == f"{rung}_n{n}{suffix}")
                assert case.problem.causal == bool(suffix) and case.problem.seq_q == case.problem.seq_k == n
            assert select_cases(cases, f"{rung}_n{n}")[0].name == f"{rung}_n{n}"
    for rung in ("flash", "split"):
        (case,) = (one for one in cases if one.name == f"{rung}_q1_n4096")
        assert case.problem.seq_q == 1
    assert {case.name for case in cases_in("ladder", "quick")} <= {case.name for case in cases}
    with pytest.raises(profile_run.ValueRangeError, match="size must be one of full, quick, tiny, got 'huge'"):
        cases_in("ladder", "huge")
