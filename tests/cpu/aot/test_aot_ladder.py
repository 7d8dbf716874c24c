"""The ladder's kernels compile for an H200: tensor cores from the second rung on, nothing spilled in a loop."""

import pytest

from aot_cases import Results, compiled
from tilefold.aot import Job

KERNELS = {
    "naive values": ("naive", "value_kernel", {}, "none"),
    "profile scores": ("profile", "score_kernel", {}, "best"),
    "profile values": ("profile", "value_kernel", {}, "best"),
    "paged": ("paged", "paged_kernel", {}, "best"),
    "flash": ("flash", "flash_kernel", {}, "best"),
    "flash masks": ("flash", "flash_kernel", {"masks": True, "dtype": "float16"}, "best"),
    "flash fp32, D=256": ("flash", "flash_kernel", {"dtype": "float32", "dim": 256}, "none"),
    "split": ("split", "split_kernel", {}, "any"),
}
JOBS = {
    (name, "sm_90"): Job("cases.ladder:example_launch", {"name": rung, "kernel": kernel, **more}, "sm_90")
    for name, (rung, kernel, more, _) in KERNELS.items()
}
results = compiled(__name__, JOBS, tritons=("installed",))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(results: Results, name: str) -> None:
    results.clean(name, "sm_90", tensor=KERNELS[name][3], spills="outside loops")
