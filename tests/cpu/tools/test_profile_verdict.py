"""Verdicts from evidence alone: the counters of known profiles, the signatures of planted faults, and when not to know."""

from dataclasses import replace
from pathlib import Path

import pytest

from tilefold.profiling.evidence import Counters, Evidence, Region, waves_of
from tilefold.profiling.verdict import TRY, judge, judge_region

# A block-sparse forward pass as it was reported: the roofline's two axes would call it compute bound. Its loads are entries of
# lists, 4 bytes of a sector each; keys and values come by copies, which that ratio leaves out.
SPARSE = Counters(l2_to_sm=83.5, tensor=61.6, dram=4.0, bytes_per_sector=4.0)
KERNEL = Evidence(
    "kernel", seconds=1e-3, programs=4 * 132, threads=128, registers=64, spills=0, shared_bytes=0, resident=2, sms=132,
    limit="registers", launch_seconds=1.8e-6,
)  # fmt: skip


def with_counters(evidence=KERNEL, **counters):
    return replace(evidence, counters=Counters(**counters))


def test_the_way_from_l2_is_a_resource_of_its_own():
    verdict = judge(replace(KERNEL, counters=SPARSE))
    assert verdict.resource == "L2-to-SM path"
    assert "83.5 %" in verdict.sentence and "tensor pipe 61.6 %" in verdict.sentence
    assert "4.0 of the 32 bytes" in verdict.sentence and "not read" in verdict.sentence
    assert verdict.advice and not verdict.missing


@pytest.mark.parametrize(
    ("share", "resource"), [(0.001, "L2-to-SM path"), (0.49, "L2-to-SM path"), (0.51, "uncoalesced"), (0.875, "uncoalesced")]
)  # fmt: skip
def test_waste_is_weighed_by_its_share_of_the_traffic(share, resource):
    verdict = judge(replace(KERNEL, counters=replace(SPARSE, wasted_share=share)))
    assert verdict.resource == resource, verdict
    assert ("% of the traffic for nothing" in verdict.sentence) == (resource == "uncoalesced")
    assert "not read" not in verdict.sentence


def test_waste_without_its_share_counts_where_warps_wait_to_load_more():
    stalled = replace(SPARSE, stalls={"lg_throttle": 3.0, "wait": 1.0})
    assert judge(replace(KERNEL, counters=stalled)).resource == "uncoalesced"
    assert judge(replace(KERNEL, counters=replace(stalled, wasted_share=0.1))).resource == "L2-to-SM path"


def test_the_same_kernel_without_counters_is_unknown_not_compute_bound():
    """61.6 % of the tensor pipe by declared FLOPs: nothing says that the rest of the time is the pipe's."""
    verdict = judge(replace(KERNEL, flops=0.616e12, tensor_rate=1e15, bytes=0.04 * 4e9, dram_rate=4e12))
    assert verdict.resource == "unknown"
    assert "61.6 %" in verdict.sentence and "L2" in verdict.sentence
    assert any("Nsight Compute" in each for each in verdict.missing) and not verdict.advice


def test_declared_l2_bytes_can_prove_it_too():
    verdict = judge(
        replace(KERNEL, flops=0.616e12, tensor_rate=1e15, l2_bytes=8.4e9, l2_rate=1e13, measured_roofs=True)
    )
    assert verdict.resource == "L2-to-SM path"
    assert "84.0 % of the measured roof by declared work" in verdict.sentence


FULL_MEMORY = {"dram": 35.0, "l2": 80.0, "l2_to_sm": 88.0, "l1": 90.0, "tensor": 0.0}
SIGNATURES = {
    # what the counters of each fault look like: waste beside saturation must win, hidden waste must not
    "launch": replace(KERNEL, seconds=2.1e-6),
    "spills": with_counters(replace(KERNEL, spills=190, registers=255), local_share=0.83, l1=92.0, dram=40.0),
    "uncoalesced": with_counters(bytes_per_sector=4.0, wasted_share=0.875, **FULL_MEMORY),
    "bank conflicts": with_counters(conflict_share=0.93, l1=91.0, shared=90.0, dram=20.0),
    "DRAM": with_counters(dram=91.0, l2=60.0, l2_to_sm=30.0, bytes_per_sector=32.0),
    "tensor pipe": with_counters(tensor=86.0, l2_to_sm=55.0, dram=10.0),
    "exp unit": with_counters(exp=93.0, dram=12.0, issue=60.0),
    "too few programs": with_counters(replace(KERNEL, programs=8), dram=4.0, stalls={"long_scoreboard": 9.0}),
    "tail wave": with_counters(replace(KERNEL, programs=2 * 132 + 4, resident=2), dram=40.0, tensor=45.0),
    "memory latency": with_counters(
        dram=30.0, l2_to_sm=9.0, stalls={"long_scoreboard": 9.0, "wait": 2.0, "selected": 1.0}
    ),
    "tensor latency": with_counters(tensor=45.0, stalls={"gmma": 5.0, "barrier": 1.0}),
    "barriers": with_counters(tensor=25.0, stalls={"gmma": 1.0, "barrier": 5.0}),
}


@pytest.mark.parametrize("resource", SIGNATURES)
def test_signatures(resource):
    verdict = judge(SIGNATURES[resource])
    assert verdict.resource == resource, verdict
    assert any(c.isdigit() for c in verdict.sentence), "the numbers that prove it"
    assert verdict.advice == TRY[resource]


def test_every_resource_is_explained():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "verdicts.md").read_text(encoding="utf-8")
    lines = page.split("## What each says")[1].split("##")[0].strip().splitlines()[2:]
    said = {name for line in lines for name in line.split(" | ")[0].removeprefix("| ").split(" (")[0].split(", ")}
    assert said == {*TRY, "unknown"}


def test_waste_that_costs_nothing_is_not_the_verdict():
    # scattered accesses beside a full tensor pipe, conflicts nobody waits for, spills outside of the loop
    scattered = with_counters(bytes_per_sector=4.0, wasted_share=0.875, tensor=90.0, dram=10.0)
    assert judge(scattered).resource == "tensor pipe"
    assert judge(with_counters(conflict_share=0.5, shared=20.0, dram=88.0)).resource == "DRAM"
    spilling = replace(KERNEL, spills=40)
    assert judge(with_counters(spilling, local_share=0.01, dram=88.0)).resource == "DRAM"
    assert judge(spilling).resource == "spills"  # without counters the compiler's word is what there is
    assert judge(replace(KERNEL, spills=2)).resource == "unknown"


def test_without_counters_declared_work_decides_from_80_percent():
    memory = replace(KERNEL, bytes=3.4e9, dram_rate=4e12)
    assert judge(memory).resource == "DRAM"
    assert "85.0 % of the recorded roof" in judge(memory).sentence
    assert judge(replace(memory, bytes=3.0e9)).resource == "unknown"
    assert judge(replace(KERNEL, programs=20)).resource == "too few programs"


def test_nothing_known():
    verdict = judge(Evidence("kernel"))
    assert verdict.resource == "unknown" and verdict.missing[0] == "its time"
    assert "Missing: its time" in str(verdict)
    nearly = judge(with_counters(dram=50.0, stalls={"wait": 1.0, "math_pipe_throttle": 1.0}))
    assert nearly.resource == "unknown" and not nearly.missing


def test_a_verdict_needs_no_field_that_nobody_measured():
    """Each field alone: a verdict or "unknown", never an error."""
    for name, value in {"seconds": 1e-3, "programs": 3, "sms": 132, "resident": 2, "flops": 1.0, "spills": 9}.items():
        assert judge(Evidence("kernel", **{name: value})).resource in {*TRY, "unknown"}
    for name in ("dram", "conflict_share", "bytes_per_sector", "wasted_share", "local_share", "occupancy"):
        assert judge(Evidence("kernel", counters=Counters(**{name: 0.9}))).resource in {*TRY, "unknown"}


@pytest.mark.parametrize(
    ("programs", "resident", "waves", "filled"),
    [
        (132, 1, 1.0, 1.0), (133, 1, 133 / 132, 133 / 264), (264, 4, 0.5, 1.0), (200, 4, 200 / 528, 200 / 264),
        (12, 2, 12 / 264, 12 / 132),
    ],
)  # fmt: skip
def test_waves(programs, resident, waves, filled):
    found = waves_of(programs, 132, resident)
    assert found.waves == pytest.approx(waves)
    assert found.filled == pytest.approx(filled)


def test_persistent_kernels_have_no_tail():
    assert judge(with_counters(replace(KERNEL, programs=132, resident=1), dram=30.0)).resource == "unknown"
    assert judge(with_counters(replace(KERNEL, programs=40 * 264 + 4), dram=30.0)).resource == "unknown"


def test_regions():
    busy = Region(span=1e-3, busy=0.9e-3, kernels=10, median=90e-6)
    assert judge_region(busy) is None
    tiny = judge_region(Region(span=1e-3, busy=0.3e-3, kernels=150, median=2e-6, launch_seconds=4e-6))
    assert tiny.resource == "launch" and "70 %" in tiny.sentence and "150 kernels" in tiny.sentence
    host = judge_region(Region(span=20e-3, busy=2e-3, kernels=10, median=200e-6, launch_seconds=4e-6))
    assert host.resource == "host" and "2000.0 us between" in host.sentence
    assert judge_region(Region(0.0, 0.0, 0, 0.0)) is None


# What Nsight Compute counted on an H200 (2026-11-22) in kernels of tests/faults.py: two that had been taken for uncoalesced ones.
COUNTED = {
    "uncoalesced": Counters(dram=62.64, l2=56.79, l2_to_sm=13.88, l1=17.87, issue=0.92, occupancy=81.79, bytes_per_sector=4.0,
                            store_bytes_per_sector=32.0, conflict_share=0.0, local_share=0.0,
                            stalls={"drain": 141.91, "lg_throttle": 549.95, "long_scoreboard": 288.68, "mio_throttle": 313.05}),
    "memory latency": Counters(dram=53.29, l2=52.97, l2_to_sm=13.55, l1=6.36, issue=0.51, occupancy=24.72, bytes_per_sector=4.02,
                               store_bytes_per_sector=32.0, conflict_share=0.0, local_share=0.0,
                               stalls={"long_scoreboard": 751.98, "wait": 2.82}),
    "L2-to-SM path": Counters(dram=0.11, l2=50.78, l2_to_sm=74.03, l1=33.54, alu=23.1, issue=17.34, occupancy=49.85,
                              bytes_per_sector=32.0, store_bytes_per_sector=4.0, conflict_share=0.0003, local_share=0.0,
                              stalls={"long_scoreboard": 41.21, "barrier": 0.35, "wait": 1.73}),
}  # fmt: skip


@pytest.mark.parametrize("resource", COUNTED)
def test_counters_of_planted_faults(resource):
    programs = 4096 if resource == "uncoalesced" else 528
    verdict = judge(replace(KERNEL, programs=programs, seconds=3e-4, counters=COUNTED[resource]))
    assert verdict.resource == resource, verdict
