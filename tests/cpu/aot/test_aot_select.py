"""The selection kernels, as planned for real devices, compile for their targets under two Tritons and stay in their registers."""

import pytest

from aot_cases import DEVICES, Results, compiled
from tilefold.aot import Job
from tilefold.plan import device_named
from tilefold.plan.sparse.select import SelectProblem, plan_select

ROWS = {"364": 364, "32": 32, "1000": 1000, "2048": 2048, "4096": 4096}
KERNELS = {
    "gini": ("example_select", {}),
    "count": ("example_select", {"method": "count", "tensors": True}),
    "unsorted count": ("example_select", {"method": "count", "sizes": True}),
    "unsorted mass": ("example_select", {"method": "mass"}),
    "mass forced sizes": ("example_select", {"method": "mass", "sizes": True}),
    "coefficient": ("example_gini", {}),
}
BOTH = ("gini", "mass forced sizes", "unsorted count")  # for every target, and for sm_90 at every length
JOBS = {
    (f"{kernel} {length}", target): Job(
        f"tilefold.ops.sparse.select:{builder}",
        {
            "plan": plan_select(
                SelectProblem(1, 12, 364, blocks, "forced" in kernel, "unsorted" not in kernel), device_named(device)
            ),
            **options,
        },
        target,
        label=f"{kernel} {length} for {target}",
    )
    for kernel, (builder, options) in KERNELS.items()
    for length, blocks in ROWS.items()
    for target, device in DEVICES.items()
    if (kernel in BOTH and (length == "364" or target == "sm_90")) or (length, target) == ("364", "sm_90")
}
NEWEST = [f"{name} 364" for name in ("gini", "count", "mass forced sizes", "coefficient")]  # too, for sm_90
NEWEST.append("mass forced sizes 4096")
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_planned_configuration(results: Results, name: str, target: str) -> None:
    many = "forced" in name and name.split()[-1] not in (
        "32",
        "364",
    )  # everything at once: two registers wait in memory
    report = results.clean(name, target, tensor="none", spills="any" if many else "none")
    assert report.spills <= 16


@pytest.mark.parametrize("kernel", ["gini", "count", "coefficient"])
def test_a_warp_a_row_stays_in_its_lanes(results: Results, kernel: str) -> None:
    """No shared memory, no barrier: the numbers lie as the kernel means them to.  What the prediction of its time counts."""
    report = results.of(f"{kernel} 364", "sm_90").report
    assert report is not None
    assert report.shared_bytes == 0
    assert "BAR" not in " ".join(report.opcodes)
    assert report.registers <= 128
    assert sum(report.opcodes.values()) < 3300
    assert (
        report.opcodes["SHFL"] < 360
    )  # 15 steps of the sort over lanes, 5 of the running count, for 16 numbers a thread; sums
