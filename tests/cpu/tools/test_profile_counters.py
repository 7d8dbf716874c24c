"""Nsight Compute: its command, its CSV in the format that it prints, a stand-in for the program, and what it cannot read."""

import sys

import pytest

from cases.refusals import refuses
from tilefold.errors import Unsupported, ValueRangeError
from tilefold.profiling import counters
from tilefold.profiling.counters import STALL, import_report, parse_csv
from tilefold.profiling.evidence import Evidence
from tilefold.profiling.verdict import judge

HEAD = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device",
        "CC")  # fmt: skip
PEAK = counters.PEAK


def row_of(number, name, grid, values):
    return (number, 812, "python3.11", "127.0.0.1", name, 1, 7, "(128, 1, 1)", grid, 0, "9.0", *values)


def table(metrics, units, rows):
    """As ncu prints it: everything quoted, thousands separated, its own lines and the program's before and between."""
    quoted = [",".join(f'"{cell}"' for cell in line) for line in ((*HEAD, *metrics), ("",) * len(HEAD) + units, *rows)]
    before = ["==PROF== Connected to process 812 (/usr/bin/python3.11)", "step 1 done"]
    before += ['==PROF== Profiling "k": 0%....100% - 19 passes']
    return "\n".join([*before, *quoted[:3], "==PROF== Disconnected from process 812", *quoted[3:]])


FULL = {
    # block-sparse attention, as it was reported: 83.5 % of the way from L2, 61.6 % of the tensor pipe, 4 % of DRAM, and loads
    # that use 4 of the 32 bytes of a sector
    "gpu__time_duration.sum": ("nsecond", "3,125,408"),
    "dram__throughput" + PEAK: ("%", "4.02"),
    "lts__t_sectors" + PEAK: ("%", "55.10"),
    "l1tex__m_xbar2l1tex_read_sectors" + PEAK: ("%", "83.50"),
    "lts__lts2xbar_cycles_active" + PEAK: ("%", "79.90"),
    "sm__pipe_tensor_cycles_active" + PEAK: ("%", "61.60"),
    "l1tex__data_pipe_lsu_wavefronts" + PEAK: ("%", "12.00"),
    "sm__inst_executed_pipe_xu" + PEAK: ("%", "n/a"),
    "dram__bytes_read.sum": ("Mbyte", "400"),
    "dram__bytes_write.sum": ("byte", "71,565,312"),
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio": ("byte/sector", "4"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "1,000"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "10,000"),
    **{name: ("sector", value) for name, value in zip(counters.SECTORS, ("900", "0", "60", "40"), strict=True)},
    STALL.format("long_scoreboard"): ("inst", "1.50"),
    STALL.format("gmma"): ("inst", "4.50"),
    STALL.format("selected"): ("inst", "1.00"),
}
METRICS, UNITS = tuple(FULL), tuple(unit for unit, _ in FULL.values())
VALUES = tuple(value for _, value in FULL.values())
SPARSE = table(METRICS, UNITS, [row_of(0, "sparse_forward", "(364, 12, 1)", VALUES)])


def test_the_table():
    (found,) = parse_csv(SPARSE)
    assert (found.kernel, found.launches, found.programs, found.threads) == ("sparse_forward", 1, 364 * 12, 128)
    assert found.seconds == pytest.approx(3.125408e-3)
    c = found.counters
    assert (c.dram, c.l2, c.l2_to_sm, c.tensor) == (4.02, 55.1, 83.5, 61.6)
    assert c.exp is None and c.issue is None, "n/a and absent are not zero"
    assert c.dram_bytes == 400e6 + 71565312
    assert c.bytes_per_sector == 4 and c.wasted_share is None and c.store_bytes_per_sector is None
    assert c.conflict_share == pytest.approx(0.1)
    assert c.local_share == pytest.approx(0.1)
    assert c.stalls == {"long_scoreboard": 1.5, "gmma": 4.5, "selected": 1.0}
    assert c.top_stall == ("gmma", 0.75)


def test_its_verdict_is_the_way_from_l2():
    (found,) = parse_csv(SPARSE)
    verdict = judge(Evidence(found.kernel, seconds=found.seconds, counters=found.counters))
    assert verdict.resource == "L2-to-SM path"
    assert "83.5 %" in verdict.sentence and "tensor pipe 61.6 %" in verdict.sentence


# Block-sparse attention with half of 364 blocks in each list: 64 x 128 keys and values of 2 bytes a listed block come by copies;
# each of four warps reads the block's number, one sector for 4 bytes.
LISTED = 364 * 12 * 182
COPIED, NUMBERS = LISTED * 2 * 64 * 128 * 2 // 32, LISTED * 4


def counted(loads, arrived, used="4", name=counters.ARRIVED):
    """The reported profile with these sectors by load instructions, and arriving at the SMs."""
    changed = dict.fromkeys(counters.SECTORS, 0)
    changed |= {counters.SECTORS[0]: loads, name: arrived, counters.USED_LOADS: used}
    values = {**{key: value for key, (_, value) in FULL.items()}, **{key: str(value) for key, value in changed.items()}}
    units = {**{key: unit for key, (unit, _) in FULL.items()}, name: "sector"}
    (found,) = parse_csv(
        table(tuple(values), tuple(units[key] for key in values), [row_of(0, "k", "(4368, 1, 1)", values.values())])
    )
    return found


@pytest.mark.parametrize("name", counters.ARRIVED_AT)
def test_loads_beside_copies_waste_little_of_the_traffic(name):
    found = counted(NUMBERS, COPIED + NUMBERS, name=name)
    assert found.counters.wasted_share == pytest.approx(NUMBERS * 28 / 32 / (COPIED + NUMBERS))
    assert found.counters.wasted_share < 0.01
    verdict = judge(Evidence(found.kernel, seconds=found.seconds, counters=found.counters))
    assert verdict.resource == "L2-to-SM path" and "not read" not in verdict.sentence


def test_loads_that_are_the_traffic_waste_it():
    for arrived in (COPIED, COPIED // 2):  # half of them held by L1
        found = counted(COPIED, arrived)
        assert found.counters.wasted_share == 28 / 32
        verdict = judge(Evidence(found.kernel, seconds=found.seconds, counters=found.counters))
        assert verdict.resource == "uncoalesced" and "88 % of the traffic" in verdict.sentence
    assert counted(COPIED, COPIED, used="32").counters.wasted_share == 0


def test_spills_are_weighed_against_copies_too():
    values = dict(zip(counters.SECTORS, (0.0, 0.0, 60.0, 40.0), strict=True))
    assert counters.counters_of(values).local_share == 1
    assert counters.counters_of({**values, counters.ARRIVED: 960.0}).local_share == pytest.approx(0.1)


def test_launches_of_a_kernel_are_their_median():
    rows = [
        row_of(i, name, "(4, 1, 1)", (time,))
        for i, (name, time) in enumerate([("a", "100"), ("b", "7"), ("a", "300"), ("a", "120")])
    ]
    found = parse_csv(table(("gpu__time_duration.sum",), ("ns",), rows))
    assert [(each.kernel, each.launches) for each in found] == [("a", 3), ("b", 1)]
    assert found[0].seconds == pytest.approx(120e-9)


@pytest.mark.parametrize("text", ["", "==ERROR== nothing\n", ",".join(f'"{h}"' for h in HEAD), table((), (), [])])
def test_text_without_a_table(text):
    refuses(ValueRangeError, "table of ncu", parse_csv, text)


def test_the_command():
    command = counters.command_of("ncu", ["python", "a.py"], ("x", "y"), kernels="fold", launches=5, marked=True)
    assert command[-2:] == ["python", "a.py"]
    for part in (["--metrics", "x,y"], ["--kernel-name", "regex:fold"], ["--launch-count", "5"], ["--profile-from-start", "off"],
                 ["--clock-control", "none"]):  # fmt: skip
        at = command.index(part[0])
        assert command[at : at + 2] == part
    plain = counters.command_of("ncu", ["a"], ("x",))
    assert not {"--kernel-name", "--launch-count", "--profile-from-start"} & set(plain)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """A program in ncu's place: knows all metrics but one, prints the table, fails if told to."""

    def make(body):
        path = tmp_path / "ncu"
        path.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("NCU", str(path))
        return path

    (tmp_path / "table.csv").write_text(SPARSE)
    return make


QUERY = """
if "--query-metrics" in sys.argv:
    print("Device NVIDIA H200 (GH100)")
    for name in {known!r}:
        print(name.split(".")[0] + "    Counter  %  what it counts")
    sys.exit()
"""


def test_running_it(fake_ncu, tmp_path):
    known = [name for name in counters.METRICS if "lts2xbar" not in name]
    fake_ncu(QUERY.format(known=known) + f"""
assert os.environ["TILEFOLD_PROFILE_ROLE"] == "ncu"
asked = sys.argv[sys.argv.index("--metrics") + 1]
assert "lts2xbar" not in asked and "xbar2l1tex" in asked, asked
assert "long_scoreboard" in asked
print(open({str(tmp_path / "table.csv")!r}).read())
""")  # fmt: skip
    (found,) = counters.run_ncu(["python", "a.py"])
    assert found.counters.l2_to_sm == 83.5


def test_what_it_says_when_it_cannot(fake_ncu, monkeypatch, tmp_path):
    fake_ncu('print("==ERROR== ERR_NVGPUCTRPERM - no permission to access GPU Performance Counters"); sys.exit(1)')
    with pytest.raises(Unsupported, match=r"exit code 1\).*ERR_NVGPUCTRPERM"):
        counters.run_ncu(["python", "a.py"])
    monkeypatch.setenv("NCU", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    if not __import__("os").access("/usr/local/cuda/bin/ncu", 1):
        refuses(Unsupported, "Nsight Compute", counters.run_ncu, ["python", "a.py"])


def test_reports(fake_ncu, tmp_path):
    assert import_report(tmp_path / "table.csv")[0].kernel == "sparse_forward"
    fake_ncu(f'assert "--import" in sys.argv; print(open({str(tmp_path / "table.csv")!r}).read())')
    (tmp_path / "report.ncu-rep").write_bytes(b"")
    assert import_report(tmp_path / "report.ncu-rep")[0].kernel == "sparse_forward"
    refuses(ValueRangeError, "absent", import_report, tmp_path / "absent.csv")
