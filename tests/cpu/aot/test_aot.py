"""Ahead-of-time compilation: four targets under the installed and the newest Triton, and that faults are reported."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_kept import unpack
from tilefold.aot import TARGETS, CompileReport, Job, JobResult, newest_triton, occupancy, run_jobs, target_named
from tilefold.aot.cache import CACHE_VARIABLE
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.aot.registers import undefined_registers
from tilefold.aot.sass import parse_listing, tensor_loops, wgmma_hazards
from tilefold.errors import Unsupported, ValueRangeError

HERE = Path(__file__).parent
FOLD = "aot_samples:build_fold"
# Small enough that nothing spills anywhere, large enough for the tensor instructions of each generation.
GOOD = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
TENSOR = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma_"}
PTX_TENSOR = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}

JOBS = {
    **{target: Job(FOLD, GOOD, target) for target in TARGETS},
    "no mods": Job(FOLD, {**GOOD, "mods": False}, "sm_90"),
    "spill": Job(FOLD, {"mods": False, "maxnreg": 128, "num_stages": 2}, "sm_80"),
    "spill amd": Job(FOLD, {"mods": False, "dim": 128, "num_warps": 1}, "gfx942"),
    "shared": Job(FOLD, {**GOOD, "mods": False, "block_n": 128, "dim": 128, "num_stages": 5}, "sm_90"),
    "serial": Job(FOLD, {"mods": False, "maxnreg": 128, "num_stages": 2, "block_n": 128}, "sm_90"),
    "copy": Job("aot_samples:build_copy", {}, "sm_90"),
    "gluon": Job("aot_samples:build_gluon", {}, "sm_90"),
    "dead": Job("aot_samples:build_dead", {}, "sm_90"),
    "after": Job("aot_samples:build_copy", {}, "sm_80"),
    "plain": Job("aot_samples:build_plain", {}, "sm_90"),
    "unknown option": Job("aot_samples:build_fold", {"num_wraps": 4}, "sm_90"),
}
pytestmark = pytest.mark.xdist_group("test_aot")  # one process compiles, the others would only repeat it


@pytest.fixture(scope="module", params=["installed", "newest"])
def results(request: pytest.FixtureRequest) -> dict[str, JobResult]:
    """Every job, compiled once per Triton (or read from the cache)."""
    folder = newest_triton() if request.param == "newest" else None
    if request.param == "newest" and folder is None:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py (needs a network) or set {NEWEST_VARIABLE}")
    unpack()
    return dict(zip(JOBS, run_jobs(list(JOBS.values()), triton=folder, import_from=[HERE]), strict=True))


def report(result: JobResult) -> CompileReport:
    assert result.report is not None, result.error
    return result.report


@pytest.mark.parametrize("target", TARGETS)
def test_good_configuration_has_no_problems(results: dict[str, JobResult], target: str) -> None:
    """Pointers, descriptors, tuples of JIT functions and of their arguments, None: all four targets take them."""
    found = report(results[target])
    assert results[target].problems() == ()
    assert found.target == target and found.loops and found.occupancy.programs >= 1
    assert 0 < found.registers <= target_named(target).registers_per_thread
    assert 0 < found.shared_bytes <= target_named(target).shared_per_program
    assert found.threads == 4 * target_named(target).warp_size
    assert any(name.startswith(TENSOR[target]) for name in found.opcodes)
    assert any(name.startswith(TENSOR[target]) for loop in found.loops for name in loop.opcodes)
    assert target == "gfx942" or PTX_TENSOR[target] in found.ptx
    assert "(constexpr, constexpr)" in found.signature and "((fp32), (*fp32))" in found.signature
    assert "tensordesc<bf16[32" in found.signature


def test_functions_in_a_tuple_change_the_code(results: dict[str, JobResult]) -> None:
    assert report(results["no mods"]).opcodes != report(results["sm_90"]).opcodes


@pytest.mark.parametrize("name", ["spill", "spill amd"])
def test_planted_spill_is_reported(results: dict[str, JobResult], name: str) -> None:
    found = report(results[name])
    assert found.spills > 0 and found.loop_spills > 0
    assert any("spills: a thread stores" in problem for problem in found.problems())
    assert any("in the main loop" in problem for problem in found.problems(spills="outside loops"))
    assert not any("spills" in problem for problem in found.problems(spills="any"))


def test_planted_shared_memory_is_reported(results: dict[str, JobResult]) -> None:
    found = report(results["shared"])
    assert found.shared_bytes > TARGETS["sm_90"].shared_per_program and found.occupancy.programs == 0
    assert any(problem.startswith("shared memory") and "232448" in problem for problem in found.problems())


def test_serial_wgmma_is_reported(results: dict[str, JobResult]) -> None:
    """ptxas either says that it made the wgmma serial or gives up; both are problems."""
    assert any("wgmma.mma_async instructions are serialized" in problem for problem in results["serial"].problems())


def test_missing_tensor_instructions_are_reported(results: dict[str, JobResult]) -> None:
    assert results["copy"].problems() == ("tensor instructions: none of HGMMA, QGMMA, IGMMA in the machine code",)
    assert results["copy"].problems(tensor="none") == ()


def test_gluon_kernel_compiles(results: dict[str, JobResult]) -> None:
    assert results["gluon"].problems() == ()
    assert report(results["gluon"]).best_tensor_instructions > 0


def test_dead_compiler_takes_only_its_own_job(results: dict[str, JobResult]) -> None:
    assert results["dead"].error == "WorkerDied: exit status 134; the compiler fell over"
    assert results["after"].problems(tensor="none") == ()


def test_errors_of_builder_and_binder_are_results(results: dict[str, JobResult]) -> None:
    assert "got function, expected a @triton.jit or @gluon.jit function" in results["plain"].error
    assert "num_wraps" in results["unknown option"].error
    assert results["plain"].problems()[0].startswith("does not compile: Unsupported")


def test_report_is_json_both_ways(results: dict[str, JobResult]) -> None:
    for name in TARGETS:
        found = report(results[name])
        assert CompileReport.from_json(found.to_json()) == found
        assert f"for {name}, triton {found.triton}" in str(found) and "main loop of" in str(found)


def test_newest_triton_is_another_one(results: dict[str, JobResult], request: pytest.FixtureRequest) -> None:
    """The worker really ran under the Triton that it was told to use."""
    installed = request.node.callspec.params["results"] == "installed"
    folder = newest_triton()
    if installed or folder is None:
        return
    assert (folder / f"triton-{report(results['sm_90']).triton}.dist-info").is_dir()


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run reads the report; a change to the arguments' types, the options or the target does not."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    copy = Job("aot_samples:build_copy", {}, "sm_90")
    first, again, other = run_jobs([copy, copy, dataclasses.replace(copy, target="sm_80")], import_from=[HERE])
    assert (first.cached, again.cached, other.cached) == (False, True, False)
    assert first.report == again.report
    assert run_jobs([copy], import_from=[HERE])[0].cached  # in another process
    for kept in tmp_path.glob("*/*.json"):
        kept.write_text("{")  # damaged files are made anew
    assert not run_jobs([copy], import_from=[HERE])[0].cached
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert not any(result.cached for result in run_jobs([copy, copy], import_from=[HERE]))


def test_cache_sees_functions_in_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Editing a function that the kernel gets in a constexpr tuple makes a new report, of the new code."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    module = tmp_path / "edited_sample.py"
    found: list[JobResult] = []
    for expression in ("x + 1.0", "tl.exp2(x)"):
        module.write_text((HERE / "aot_constexpr_sample.txt").read_text().replace("EXPRESSION", expression))
        found += run_jobs([Job("edited_sample:build", {}, "sm_90")], import_from=[tmp_path])
    assert not any(result.cached for result in found)
    assert ["MUFU.EX2" in report(result).opcodes for result in found] == [False, True]


def test_two_processes_keep_the_order() -> None:
    jobs = [Job("aot_samples:build_copy", {}, target) for target in TARGETS]
    results = run_jobs(jobs, import_from=[HERE], processes=2)
    assert [report(result).target for result in results] == list(TARGETS)


def test_overdue_job_is_stopped() -> None:
    (result,) = run_jobs([Job("aot_samples:build_slow", {}, "sm_90")], import_from=[HERE], timeout_s=2)
    assert result.error == "WorkerDied: no result within 2 s"


@pytest.fixture
def worker_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2] / "src"), str(HERE)])}


def worker(text: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tilefold.aot.worker", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment, check=False)


def test_worker_takes_json(worker_environment: dict[str, str]) -> None:
    worker_environment.pop("TRITON_INTERPRET", None)
    listed = [{"builder": "aot_samples:build_copy", "target": "gfx942", "label": "copy"}]
    done = worker(json.dumps(listed), worker_environment)
    (line,) = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert json.loads(line)["label"] == "copy" and json.loads(line)["report"]["target"] == "gfx942"


def test_worker_refuses_the_interpreter(worker_environment: dict[str, str]) -> None:
    """In the interpreter there is nothing to compile; run_jobs therefore removes the variable."""
    done = worker('[{"builder": "aot_samples:build_copy"}]', {**worker_environment, "TRITON_INTERPRET": "1"})
    assert done.returncode == 1 and "TRITON_INTERPRET is on" in json.loads(done.stdout)["error"]


def test_unknown_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from tilefold.aot.versions import triton_version

    for version in ("3.5.1", "3.10.0", "4.0.0+git1234"):
        monkeypatch.setattr(triton, "__version__", version)
        with pytest.raises(Unsupported, match=f"triton {version.split('+')[0]}.* is installed, known are 3.6 to 3.9"):
            triton_version()


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="target: got 'sm_70', known are sm_80, sm_90, sm_100, gfx942"):
        run_jobs([Job(FOLD, {}, "sm_70")])


def test_newest_triton_must_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(NEWEST_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=NEWEST_VARIABLE):
        newest_triton()


def test_importing_aot_imports_no_triton(worker_environment: dict[str, str]) -> None:
    code = "import sys, tilefold.aot; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=worker_environment, check=False).returncode == 0


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "columns", "programs", "limit"),
    [
        ("sm_90", 128, 128, 0, 0, 4, "registers"),  # 65536 / (128 * 128)
        ("sm_90", 128, 129, 0, 0, 3, "registers"),  # rounded up to 136
        ("sm_90", 128, 32, 76 * 1024, 0, 2, "shared memory"),  # (76 + 1) * 3 > 228
        ("sm_90", 256, 32, 0, 0, 8, "registers"),
        ("sm_80", 128, 16, 0, 0, 16, "warps"),
        ("sm_100", 128, 64, 0, 256, 2, "tensor memory"),
        ("gfx942", 256, 236, 16384, 0, 2, "registers"),  # LLVM says 2 waves a SIMD
        ("gfx942", 256, 64, 65536, 0, 1, "shared memory"),
    ],
)
def test_occupancy(
    target: str, threads: int, registers: int, shared: int, columns: int, programs: int, limit: str
) -> None:
    found = occupancy(
        target_named(target), threads=threads, registers=registers, shared_bytes=shared, tensor_columns=columns
    )
    assert (found.programs, found.limit) == (programs, limit)


def loop_lines() -> Iterator[str]:
    """A main loop with a wgmma whose A operand is in registers R4 to R7, then a slow path behind the end."""
    yield from (".L_x_1:", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0", "MUFU.EX2 R60, R61")
    yield from ("{hole}", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 FADD R4, R5, R6", "STL [R1], R60", "@P0 BRA `(.L_x_1)")
    yield from ("EXIT", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "BRA `(.L_x_1)")


def listing(hole: str) -> str:
    lines = (line.replace("{hole}", hole) for line in loop_lines())
    return "\n".join(line if line.startswith(".L") else f"        /*0010*/   {line} ;" for line in lines)


@pytest.mark.parametrize(
    ("hole", "register"),
    [
        ("FADD R7, R8, R9", "R7"),  # an A operand
        ("@!P1 FMUL R55, R55, R9", "R55"),  # the last of 32 accumulators
        ("LDS.128 R20, [R2]", None),  # R20 to R23: just below
        ("LDS.128 R21, [R2]", "R24"),  # R21 to R24
        ("SHFL.BFLY PT, R5, R9, 0x1, 0x1f", "R5"),
        ("FSETP.GT.AND P1, PT, R4, R5, PT", None),  # reads only
        ("ST.E [R4], R9", None),
        ("@P2 EXIT", None),  # conditional: still a loop
    ],
)
def test_wgmma_hazards(hole: str, register: str | None) -> None:
    parsed = parse_listing(listing(hole), "sass")
    (loop,) = tensor_loops(parsed, ("HGMMA",))
    assert (loop.start, loop.end, loop.spills, loop.opcodes["HGMMA"]) == (0, 6, 1, 1)
    assert [text.split()[0] for text in loop.hazards] == ([register] if register else [])


def test_wgmma_hazard_over_the_back_edge() -> None:
    """The write comes before the wgmma in the body, but one of the last lap is still in flight."""
    body = ["FADD R4, R5, R6", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"]
    assert wgmma_hazards(body) == ("R4 is written while a wgmma uses it: FADD R4, R5, R6",)
    assert wgmma_hazards([*body, "WARPGROUP.DEPBAR.LE gsb0, 0x0"]) == ()
    assert wgmma_hazards([*body, "WARPGROUP.DEPBAR.LE gsb0, 0x1"]) != ()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (("R2UR UR4, R2", "UIADD3 UR5, UR4, 0x40, URZ"), []),
        (("VOTEU.ANY UR16, UPT, PT", "UPOPC UR14, UR16"), []),
        (("UIADD3 UR54, UP0, UR54, 0x40, URZ",), ["UR54"]),
        (("UIMAD.WIDE.U32 UR4, UR6, UR7, URZ", "UMOV UR8, UR5"), ["UR6,7"]),
        (("ULDC.64 UR12, c[0x0][0x208]", "LDG.E R4, desc[UR12][R2.64]"), []),
        (("UMOV UR12, 0x1", "LDG.E R4, desc[UR12][R2.64]"), ["UR13"]),
        (("UMOV UR34, 0x1", "UMOV UR35, 0x1", "HGMMA.64x32x16.F32.BF16 R88, R28, gdesc[UR32].tnspB, R88"), []),
        (("UMOV UR34, 0x1", "UMOV UR35, 0x1", "HGMMA.64x32x16.F32.BF16 R88, gdesc[UR32], R88"), ["UR32,33"]),
        (("@P0 BRA `(.L_x_1)", "UMOV UR4, 0x1", ".L_x_1:", "UMOV UR5, UR4"), ["UR4"]),  # one way leads past the write
        (("@P0 UMOV UR4, 0x1", "UMOV UR5, UR4"), []),
        (("BRA `(.L_x_2)", ".L_x_1:", "UMOV UR5, UR4", "EXIT", ".L_x_2:", "UMOV UR4, 0x1", "BRA `(.L_x_1)"), []),
        (("CALL.REL.NOINC `(divide)", "UMOV UR5, UR9", "EXIT", "UMOV UR9, 0x1", "RET.REL.NODEC R10 `(kernel)"), []),
    ],
)  # fmt: skip
def test_undefined_registers(lines: tuple[str, ...], found: list[str]) -> None:
    text = "\n".join(line if line.startswith(".L") else f"        /*0010*/   {line} ;" for line in lines)
    assert [one.split()[0] for one in undefined_registers(parse_listing(text, "sass"))] == found
