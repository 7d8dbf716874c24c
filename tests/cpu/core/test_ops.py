"""The host side: which device record a driver's name gets, and what a length may decide."""

from types import SimpleNamespace

import pytest
import torch

from tilefold.ops import device as ops_device
from tilefold.ops.dense.attention import example_launch
from tilefold.plan import AttentionProblem, device_named, plan_attention


@pytest.mark.parametrize(
    ("driver", "arch", "name", "own"),
    [
        ("NVIDIA H200", (9, 0), "h200", True),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100", True),
        ("NVIDIA GH200 480GB", (9, 0), "gh200-480gb", False),
        ("NVIDIA H100 PCIe", (9, 0), "h100-pcie", False),
        ("NVIDIA L40S", (8, 9), "l40s", False),
        ("NVIDIA L4", (8, 9), "l4", True),
    ],
)
def test_only_exact_models_get_their_record(driver, arch, name, own, monkeypatch):
    properties = SimpleNamespace(name=driver, major=arch[0], minor=arch[1], multi_processor_count=77, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = ops_device._probe.__wrapped__(0)
    assert found.name == name
    assert found.sms == 77
    assert found.source.startswith("probed") is not own


@pytest.mark.parametrize("shape", [(1, 16384, 16, 128), (1, 8192, 32, 128), (1, 16384, 32, 64), (1, 23296, 12, 128)])
def test_lengths_do_not_decide_a_compilation(shape):
    """Long sequences take the constants of short ones (the same tile given)."""
    b, n, h, d = shape
    long, short = (AttentionProblem(b, seq, seq, h, h, d, d) for seq in (n, 4096))
    constants = []
    for problem in (long, short):
        _, _, keywords = example_launch(problem, plan_attention(problem, device_named("h200")))
        constants.append({k: v for k, v in keywords.items() if k.isupper()})
    assert constants[0] == constants[1]
