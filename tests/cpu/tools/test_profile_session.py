"""Profiles from traces: kernels, times, overlap, declared work, counters, reports; the region over a stand-in for the GPU."""

import json

import pytest
import torch
from triton import knobs

import tilefold
from cases.cli import command
from cases.refusals import refuses
from tilefold.errors import DeviceError, Unsupported, ValueRangeError
from tilefold.plan import device_named
from tilefold.profiling import counters, roofs, session
from tilefold.profiling.counters import Measured
from tilefold.profiling.evidence import Counters
from tilefold.profiling.launches import Code, Launched, code_for, occupancy_on, read_trace, region_of, same_kernel
from tilefold.profiling.session import Declared, profile_of, profile_of_counters, with_counters

H200 = device_named("h200")


def event(name, begin_us, us, grid=(132, 1, 1), block=(128, 1, 1), category="kernel", registers=64, shared=0):
    """A kernel as torch's profiler writes it into a Chrome trace."""
    args = {"grid": list(grid), "block": list(block), "stream": 7}
    args |= {"registers per thread": registers, "shared memory": shared}
    return {"ph": "X", "cat": category, "name": name, "ts": 1e9 + begin_us, "dur": us, "pid": 0, "tid": 7, "args": args}


def trace_of(*events):
    process = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    return {"schemaVersion": 1, "traceEvents": [process, *events]}


LAUNCH = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1e9, "dur": 4.0, "args": {}}
FOLD = [
    event("fold", at, us, grid=(364, 12, 1), registers=168, shared=100 << 10)
    for at, us in ((0, 900), (1000, 1100), (2200, 1000))
]
TRACE = trace_of(
    LAUNCH, *FOLD, event("merge", 3300, 50, grid=(8, 1, 1)), event("Memcpy DtoH", 3360, 40, category="gpu_memcpy")
)


def test_a_trace():
    kernels, spans, replayed = read_trace(TRACE)
    assert [(each.kernel, len(each.seconds)) for each in kernels] == [("fold", 3), ("merge", 1)]
    fold = kernels[0]
    assert (fold.programs, fold.threads, fold.registers, fold.shared_bytes) == (4368, 128, 168, 102400)
    assert fold.seconds == pytest.approx((9e-4, 1.1e-3, 1e-3))
    assert len(spans) == 5 and not replayed
    assert read_trace(trace_of({**LAUNCH, "name": "cudaGraphLaunch"}))[2]
    assert read_trace({}) == ((), (), False)
    apart = read_trace(trace_of(event("k", 0, 1), event("k", 2, 1, grid=(5, 1, 1))))[0]
    assert sorted(each.programs for each in apart) == [5, 132], "another grid is another case"


def test_what_overlaps_is_busy_once():
    kernels, spans, _ = read_trace(trace_of(event("a", 0, 10), event("b", 2, 4), event("a", 5, 10), event("c", 20, 5)))
    region = region_of(kernels, spans, False)
    assert region.span == pytest.approx(25e-6) and region.busy == pytest.approx(20e-6)
    assert region.idle == pytest.approx(0.2) and region.kernels == 4
    assert region_of((), (), False).idle == 0


def test_a_profile():
    made = profile_of(TRACE, H200, declare={"fold": Declared(flops=6e11, bytes=2e8), "absent": Declared(flops=1.0)})
    fold, merge = made.rows
    e = fold.evidence
    assert e.seconds == pytest.approx(1e-3) and e.launches == 3
    assert e.share == pytest.approx(3000 / 3050)
    assert e.tensor_share == pytest.approx(100 * 6e14 / 760e12)
    assert (e.resident, e.limit) == (2, "shared memory")
    assert e.waves.waves == pytest.approx(4368 / 264)
    assert fold.verdict.resource == "unknown", "79 % of a roof without counters proves nothing"
    assert merge.verdict.resource == "too few programs" and "8 of 132 SMs" in merge.verdict.sentence
    assert made.verdict is None
    assert "declared work of absent, which did not run" in made.notes
    assert any("roofline --measure" in note for note in made.notes)
    assert made.row("merge") is merge
    with pytest.raises(KeyError):
        made.row("absent")


def test_a_region_that_waits():
    made = profile_of(trace_of(*(event("tiny", 20 * i, 2) for i in range(50))), H200)
    assert made.verdict.resource == "launch"
    assert made.rows[0].verdict.resource == "launch"
    slow = profile_of(trace_of(*(event("work", 5000 * i, 200) for i in range(5))), H200)
    assert slow.verdict.resource == "host"
    assert "the region: host" in str(slow)
    assert profile_of({}, H200).rows == ()


def test_counters_are_joined_by_kernel_and_grid():
    seen = Counters(l2_to_sm=83.5, tensor=61.6, dram=4.0)
    read = [Measured("fold", 1, 3e-3, seen, 4368, 128), Measured("merge", 1, None, Counters(), 9, 128)]
    made = with_counters(profile_of(TRACE, H200), read)
    fold, merge = made.rows
    assert fold.verdict.resource == "L2-to-SM path"
    assert fold.evidence.seconds == pytest.approx(1e-3), "times are of the run that nobody slowed"
    assert merge.evidence.counters is None
    assert "no counters of merge" in made.notes
    assert with_counters(made, []).notes[-1] == "no counters of fold, merge"


def test_counters_alone():
    made = profile_of_counters(
        [Measured("a", 2, 1e-5, Counters(dram=10.0), 8, 128), Measured("b", 1, 1e-3, Counters(dram=92.0), 999, 128)], ""
    )  # fmt: skip
    found = [(row.evidence.kernel, row.verdict.resource) for row in made.rows]
    assert found == [("b", "DRAM"), ("a", "unknown")]


def test_names_of_two_tools():
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int, FillFunctor)"
    assert same_kernel(long, "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>")
    assert same_kernel("fold", "fold") and not same_kernel("fold", "fold_wide")


def test_the_compiled_kernel_of_a_launch():
    codes = (Code("fold", 168, 0, 1024, b"a"), Code("fold", 255, 12, 2048, b"b"), Code("other", 1, 0, 0))
    assert code_for(Launched("fold", (1.0,), registers=255, shared_bytes=2048), codes).spills == 12
    assert code_for(Launched("fold", (1.0,)), codes) is None, "two that differ: nobody knows which"
    assert code_for(Launched("absent", (1.0,)), codes) is None
    twins = (Code("fold", 168, 0, 1024, b"a"), Code("fold", 168, 0, 1024, b"b"))
    assert code_for(Launched("fold", (1.0,), registers=168), twins).binary == b"", "resources agree, code does not"


OCCUPANCY = [("h200", 128, 168, 0, 3), ("h200", 256, 255, 0, 1), ("l4", 128, 32, 40 << 10, 2), ("a100", 1024, 32, 0, 2)]


@pytest.mark.parametrize(("device", "threads", "registers", "shared", "programs"), OCCUPANCY)
def test_occupancy(device, threads, registers, shared, programs):
    assert occupancy_on(device_named(device), threads, registers, shared).programs == programs


def test_reports():
    made = profile_of(TRACE, H200, declare={"fold": Declared(flops=6e11, bytes=2e8)})
    document = json.loads(made.to_json())
    assert document["kind"] == "profile" and document["rows"][0]["evidence"]["kernel"] == "fold"
    (point,) = document["points"]
    assert (point["name"], point["flops"], point["bytes"]) == ("fold", 6e11, 2e8)
    text = str(made)
    assert "600.0" in text and "2 (shared memory)" in text and "unknown: nothing is full" in text
    markdown = made.markdown()
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({line.count("|") for line in rows}) == 1


def test_refusals():
    refuses(ValueRangeError, "declare must map kernels' names to", tilefold.profile, declare=[Declared()])
    with pytest.raises(ValueRangeError, match=r"declare\['fold'\] must be a tilefold.profiling.Declared, got 3"):
        tilefold.profile(declare={"fold": 3})
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="torch sees none"), tilefold.profile():
            pass


# ---------------------------------------------------------------- the region


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
    said = "fold: L2-to-SM path: L2-to-SM path at 83.5 % of its peak by the counters; next tensor pipe 61.6 %"
    assert said in command("profile", columns=250)(*arguments).output
    assert asked[0][0][1:] == [str(script), "--steps", "3"] and asked[0][1:] == ("fold", 40, False)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0]["evidence"]["counters"]["l2_to_sm"] == 83.5
