"""The region itself over a stand-in for the GPU and for torch's profiler: what it starts, ends, reads and refuses."""

import json

import pytest
import torch
import typer.testing
from triton import knobs

import tilefold
from tilefold.cli.app import app
from tilefold.errors import Unsupported
from tilefold.plan import device_named
from tilefold.profiling import counters, roofs, session
from tilefold.profiling.evidence import Counters
from tilefold.profiling.session import Declared

ARGS = {"grid": [4368, 1, 1], "block": [128, 1, 1], "registers per thread": 168, "shared memory": 0}
KERNEL = {"ph": "X", "cat": "kernel", "name": "fold", "ts": 10.0, "dur": 1000.0, "args": ARGS}


@pytest.fixture
def machine(monkeypatch):
    """A GPU that ran one kernel; the log of what was asked of it."""
    log = []

    class Profiler:
        def __init__(self, activities):
            log.append([each.name for each in activities])

        def __enter__(self):
            log.append("begin")

        def __exit__(self, *error):
            log.append("end")

        def export_chrome_trace(self, path):
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": [KERNEL]}, file)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: log.append("mark"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("unmark"))
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr("tilefold.profiling.session.device_of", lambda device: device_named("h200"))
    monkeypatch.setenv(roofs.FOLDER_VARIABLE, "off")
    yield log
    session.FINISHED.clear()
    assert not session._ACTIVE


def test_a_region(machine):
    with tilefold.profile(declare={"fold": Declared(flops=7e11, bytes=1e8)}) as p:
        with pytest.raises(Unsupported, match="its region has not ended"):
            _ = p.profile
        with pytest.raises(Unsupported, match="cannot be nested.*--marked"), tilefold.profile():
            pass
    assert machine == ["wait", ["CUDA"], "begin", "wait", "wait", "end"]
    (row,) = p.profile.rows
    assert row.evidence.kernel == "fold" and row.evidence.tensor_share == pytest.approx(100 * 7e14 / 760e12)
    assert row.verdict.resource == "tensor pipe"
    assert [p.profile] == session.FINISHED


def test_what_fails_inside_passes_through_and_ends_the_region(machine):
    with pytest.raises(KeyError), tilefold.profile() as p:
        raise KeyError
    with pytest.raises(Unsupported):
        _ = p.profile
    assert machine[-1] == "end" and not session.FINISHED
    with tilefold.profile() as p:
        pass
    assert p.profile.rows


def test_under_another_profiler_it_only_marks(machine, monkeypatch):
    monkeypatch.setenv(counters.ROLE_VARIABLE, "ncu")
    with tilefold.profile() as p:
        pass
    assert machine == ["wait", "mark", "wait", "unmark"]
    with pytest.raises(Unsupported, match="Nsight Compute watches"):
        _ = p.profile


def test_what_kernels_declare_of_themselves(machine):
    class Metadata:
        def __init__(self, **said):
            self.said = {"name": "fold", "function": 1, "stream": 0, **said}

        def get(self):
            return self.said

    with tilefold.profile(metadata=True) as p:
        assert knobs.runtime.launch_enter_hook.calls == [p._declared_by_launch]
        for flops in (1e11, 3e11):
            knobs.runtime.launch_enter_hook(Metadata(flops16=flops, bytes=1e8))
        knobs.runtime.launch_enter_hook(Metadata(name="silent"))
    assert knobs.runtime.launch_enter_hook.calls == []
    assert (p.profile.rows[0].evidence.flops, p.profile.rows[0].evidence.bytes) == (2e11, 1e8)


def test_a_script_from_the_command_line(machine, monkeypatch, tmp_path):
    """The whole command, ncu's answer put in."""
    seen = counters.Measured("fold", 1, 3e-3, Counters(l2_to_sm=83.5, tensor=61.6, dram=4.0), 4368, 128)
    asked = []
    monkeypatch.setattr(counters, "run_ncu", lambda *arguments: asked.append(arguments) or (seen,))
    monkeypatch.setattr("tilefold.cli.profile_run._gpu", lambda: None)
    script = tmp_path / "job.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--steps', '3']\n")
    arguments = [str(script), "--ncu", "--kernels", "fold", "--json", str(tmp_path / "out.json"), "--", "--steps", "3"]
    result = typer.testing.CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert (
        "fold: L2-to-SM path: L2-to-SM path at 83.5 % of its peak by the counters; next tensor pipe 61.6 %"
        in result.output
    )
    assert asked[0][0][1:] == [str(script), "--steps", "3"] and asked[0][1:] == ("fold", 40, False)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0]["evidence"]["counters"]["l2_to_sm"] == 83.5
