"""`tilefold profile script | case | import`: reports are judged without a GPU, scripts run as main, refusals."""

import json
import sys

import pytest

from cases.cli import command, refused
from tilefold import ladder
from tilefold.bench.choice import select_cases
from tilefold.cli import profile_run
from tilefold.ladder import RUNGS
from tilefold.plan import device_named
from tilefold.profiling import session
from tilefold.profiling.cases import FAMILIES, cases_in, prepare_case
from tilefold.profiling.counters import USED_LOADS

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


run = command("profile")


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def test_the_pages_table_of_counters(tmp_path):
    """DRAM, occupancy and what warps wait for, a row a kernel; being ready is no waiting; what was not read is empty."""
    names = ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__warps_active.avg.pct_of_peak_sustained_active")
    stalls = {"long_scoreboard": 3.0, "wait": 2.0, "barrier": 4.0, "selected": 1.0, "not_selected": 9.0, "gmma": 1.0}
    head = [
        "ID",
        "Kernel Name",
        "Block Size",
        "Grid Size",
        "gpu__time_duration.sum",
        *names,
        *map(STALLED.format, stalls),
    ]
    unit = ["", "", "", "", "ns", "%", "%", *("inst" for _ in stalls)]
    row = ["0", "flash_kernel", "(256, 1, 1)", "(512, 1, 1)", "330,000", "12.4", "24.6", *map(str, stalls.values())]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in (head, unit, row))
    (tmp_path / "report.csv").write_text(text)
    run("import", tmp_path / "report.csv", "--markdown", tmp_path / "out.md")
    page = (tmp_path / "out.md").read_text().splitlines()
    at = page.index("| kernel | DRAM | L2 | L2 to SM | L1 | tensor | exp | warps | waits for |")
    waits = "barrier 40%, long_scoreboard 30%, wait 20%"
    assert page[at + 2] == f"| flash_kernel | 12 % |  |  |  |  |  | 25 % | {waits} |"


def test_a_report_of_counters(tmp_path):
    (tmp_path / "report.csv").write_text(REPORT)
    result = run("import", tmp_path / "report.csv", "--json", tmp_path / "out.json", "--markdown", tmp_path / "out.md")
    assert "L2-to-SM path at 83.5 % of its peak" in result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0]["verdict"]["resource"] == "L2-to-SM path"
    assert "| sparse_forward |" in (tmp_path / "out.md").read_text()


@pytest.mark.interpreter
def test_refusals(tmp_path):
    there = tmp_path / "there.py"
    there.write_text("")
    refused(
        run,
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
    assert made.name == case.name and made.flops > 0 and made.bytes > 0
    assert (made.l2_bytes or 0) > 0 or family != "ladder"
    assert device_named("h200").matmul_rate(made.dtype) > 0


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
    work = session.Declared(flops=6e11, bytes=1e9, dtype="tf32")
    made = session.with_declared(session.profile_of({"traceEvents": events}, h200), work, 2, h200)
    evidence = made.rows[0].evidence
    assert evidence.flops == 3e11, "two launches a call"
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


@pytest.mark.interpreter
@pytest.mark.no_poison
@pytest.mark.parametrize("place", range(12))
def test_every_case_of_the_ladder_runs_and_declares_what_it_loads(place):
    """The call that is profiled is counted: what it declares of the L2 cache and of products is what it does."""
    case = cases_in("ladder", "tiny")[place]
    made = prepare_case("ladder", case, "cpu")
    with ladder.counting() as counts:
        made.call()
    assert (counts.bytes, counts.flops) == (made.l2_bytes, made.flops)


def test_the_work_of_a_rung_is_drawn_from_l2_too():
    args = {"grid": [512, 1, 1], "block": [256, 1, 1], "registers per thread": 168, "shared memory": 65536}
    events = [{"ph": "X", "cat": "kernel", "name": "flash_kernel", "ts": 0, "dur": 330, "args": args}]
    h200 = device_named("h200")
    work = session.Declared(flops=1.4e11, bytes=6.7e7, l2_bytes=1.1e9)
    made = session.with_declared(session.profile_of({"traceEvents": events}, h200), work, 1, h200)
    assert made.rows[0].evidence.l2_bytes == 1.1e9
