"""The runner of tests/gpu, over test files made here: every way a test can end, pieces, what must be alone, the record."""

import json
import sys
from pathlib import Path

import pytest

from gpu_run.cli import GREEN, NO_GPU, UNFINISHED, identity, main
from gpu_run.records import key_of, rows_of, slow_ones
from gpu_run.report import add_row
from gpu_run.worker import GONE

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"device": "a GPU", "driver": "1", "torch": "2", "triton": "3", "python": "3"}
EVERY_END = """
import os, time, pytest

@pytest.mark.parametrize("n", range(6))
def test_right(n): pass

def test_wrong(): assert 1 + 1 == 3, "sums"

@pytest.mark.skip(reason="no such GPU")
def test_skipped(): pass

def test_skips_itself(): pytest.skip("no such GPU")

@pytest.mark.xfail(reason="known", strict=True)
def test_known(): assert False

@pytest.fixture
def broken():
    yield
    raise ValueError("torn")

def test_teardown(broken): pass

def test_dies():
    os.write(2, b"its last words are these")
    os._exit(77)

def test_hangs(): time.sleep(60)

def test_device_gone(): pytest.skip("no GPU that torch can use")

def test_no_room():
    if os.environ["GPU_RUN"].count("together"):
        raise MemoryError("CUDA out of memory. Tried to allocate")
"""
ALONE = """
import json, os, pathlib, time, pytest

HERE = pathlib.Path(__file__).parent
def mark(n):
    begin = time.time(); time.sleep(0.05)
    (HERE / f"span-{n}.json").write_text(json.dumps([begin, time.time()]))

@pytest.mark.parametrize("n", range(8))
def test_together(n): mark(n)

@pytest.mark.large
def test_large(): mark("large")

@pytest.mark.alone
def test_alone(): mark("alone")

@pytest.mark.several_gpus
@pytest.mark.parametrize("n", range(2))
def test_several(n):
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    mark(f"several{n}")

@pytest.mark.large
def test_larger(): mark("larger")

def test_one_gpu(): assert os.environ["CUDA_VISIBLE_DEVICES"] in "01"
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Call the runner over files given by name; returns (exit code, rows, what it printed)."""
    tests, folder = tmp_path / "tests", tmp_path / "run"
    tests.mkdir()
    (tests / "pytest.ini").write_text("[pytest]\nmarkers = large\n    alone\n    several_gpus\n    long\n    slow\n")

    def call(*arguments, machine=MACHINE, **files):
        for name, text in files.items():
            (tests / f"{name}.py").write_text(text)
        options = ["--tests", str(tests), "--folder", str(folder), "--jobs", "2", *map(str, arguments)]
        code = main(options, machine)
        rows = {test.split("::")[-1]: row for test, row in rows_of(folder).items()}
        return code, rows, capsys.readouterr()

    return call


def test_every_end(run, tmp_path):
    options = ("--limit", 2, "--record", tmp_path / "record.jsonl")
    code, rows, said = run(*options, test_every_end=EVERY_END, test_broken="import nothing_of_the_kind")
    assert code == 1
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {
        **{f"test_right[{n}]": "passed" for n in range(6)},
        "test_wrong": "failed", "test_skipped": "skipped", "test_skips_itself": "skipped", "test_known": "skipped",
        "test_teardown": "failed", "test_dies": "crashed", "test_hangs": "hung", "test_no_room": "passed",
        "test_broken.py": "failed", "test_device_gone": "failed",
    }  # fmt: skip
    assert "sums" in rows["test_wrong"]["why"] and "torn" in rows["test_teardown"]["why"]
    assert "ended with 77" in rows["test_dies"]["why"] and "its last words are these" in rows["test_dies"]["why"]
    assert "time.sleep(60)" in rows["test_hangs"]["why"] or "in test_hangs" in rows["test_hangs"]["why"]
    assert "nothing_of_the_kind" in rows["test_broken.py"]["why"]
    assert rows["test_no_room"]["phase"] == "large"
    assert "16 tests: 13 ran, 7 passed, 4 failed, 1 crashed, 1 hung, 3 skipped" in said.out
    (row,) = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    assert row["skipped"] == {"no such GPU": 2, "expected to fail: known": 1}
    assert sorted(row["bad"].values()) == ["crashed", *["failed"] * 4, "hung"]
    assert row["device"] == "a GPU" and row["tests"] == 16 and row["passed"] == 7


def test_what_must_be_alone_is(run, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, rows, _ = run(machine={**MACHINE, "gpus": 2}, test_alone=ALONE)
    assert code == GREEN and len(rows) == 14
    spans = {path.stem[5:]: json.loads(path.read_text()) for path in (tmp_path / "tests").glob("span-*.json")}
    assert {"several0", "several1"} < set(spans)
    for one in ("large", "larger", "alone"):
        beside = {one} if one == "alone" else {"large", "larger"}  # each on a GPU of its own
        assert all(
            spans[one][0] >= end or spans[one][1] <= begin for name, (begin, end) in spans.items() if name not in beside
        )


def test_pieces(run, tmp_path):
    """The next call goes on where one stopped; each test runs once; a change of a source begins anew."""
    body = (
        "import json, os, pathlib, pytest, time\n@pytest.mark.parametrize('n', range(6))\ndef test_slow(n):\n"
        "    left = json.loads(os.environ['GPU_RUN'])['until'] - time.time()\n"
        "    time.sleep(left + 0.1 if n > 1 and left < 60 else 0)  # two take what is left\n"
        "    with (pathlib.Path(__file__).parent / 'ran').open('a') as f: f.write(f'{n}\\n')\n"
    )
    record, seconds, tries, rows = tmp_path / "record.jsonl", 1.2, 0, []
    while not rows:  # a busy machine may need longer to begin at all
        code, rows, said = run("--seconds", seconds, "--record", record, test_slow=body)
        assert code == UNFINISHED
        seconds, tries = 2 * seconds, tries + 1
    assert len(rows) < 6 and not record.exists()
    assert f"{6 - len(rows)} tests are left" in said.out and "not recorded" in said.out
    code, rows, _ = run("--record", record)
    assert code == GREEN and len(rows) == 6
    assert sorted((tmp_path / "tests" / "ran").read_text().split()) == list("012345")
    (row,) = map(json.loads, record.read_text().splitlines())
    assert len(row["pieces"]) == tries + 1 and sum(tests for _, tests in row["pieces"]) == 6


def test_a_selection_is_not_recorded(tmp_path):
    assert "not all tests were selected" in add_row(tmp_path / "record", {"selected": ["-k", "x"]}, {"left": 0})


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"torch": "2.11.0", "triton": "3.6.0", "pytest": "9"}, "needs a GPU. The torch 2.11.0 of"),
        ({"error": "No module named 'torch'"}, "cannot import torch (No module named 'torch')"),
        ({"device": "a GPU", "torch": "2", "triton": "3", "pytest": "none"}, "has no pytest"),
    ],
)
def test_a_machine_that_cannot(machine, words, run):
    code, rows, said = run(machine=machine)
    assert code == NO_GPU and not rows
    assert words in said.err and "GPU_PYTHON=" in said.err and sys.executable in said.err


def test_a_change_of_a_test_is_another_run(tmp_path):
    (tmp_path / "test_one.py").write_text("x = 1")
    before = identity(tmp_path)
    (tmp_path / "test_one.py").write_text("x = 2")
    assert identity(tmp_path)["sources"] != before["sources"]


def test_what_conftest_says_without_a_gpu():
    assert f'reason="{GONE}"' in (ROOT / "tests" / "conftest.py").read_text()


def test_slow_ones_of_a_record(tmp_path):
    (tmp_path / "record").write_text(json.dumps({"slowest": [["a", 3.0], ["b", 2.0]]}) + "\n")
    assert slow_ones(tmp_path / "record") == {"a", "b"} and slow_ones(tmp_path / "none") == set()


def test_the_tests_are_in_the_same_order_everywhere():
    assert key_of("a") == "ca978112ca1bbdcafac231b3"
