"""The ladder on a GPU: every rung at real sizes, dtypes and masks; empty splits; each rung faster than the one before."""

import json

import pytest
import torch

from cases import qkv, rand
from cases.device import DEVICE, command
from cases.ladder import NAMES, held, held_by_lengths
from tilefold import ladder

pytestmark = pytest.mark.no_poison


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name, dtype):
    """Past 1024 keys, off every tile, grouped heads."""
    q, k, v = qkv(2, 1000, 1500, 4, 2, 128, dtype=dtype, device=DEVICE)
    held(name, q, k, v, causal=dtype != torch.float32, block=16)


@pytest.mark.parametrize("name", ["naive", "profile", "flash"])
def test_masks(name):
    q, k, v = qkv(2, 300, 1300, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    there = torch.rand(2, 1300, device=DEVICE) < 0.7
    there[1] = False
    for shape in ((1, 4, 300, 1300), (4, 300, 1300), (300, 1300)):
        bias = rand(*shape, device=DEVICE)
        got = held(name, q, k, v, True, {"causal": True, "bias": bias, "mask": there[:, None, None]}, bias=bias,
                   padding_mask=there, block=16)  # fmt: skip
        assert not got[1].any()


@pytest.mark.parametrize("splits", [2, 7, 64])
def test_empty_splits_under_a_causal_mask(splits):
    q, k, v = qkv(1, 512, 512, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    assert held("split", q, k, v, causal=True, block=16, splits=splits).isfinite().all()


@pytest.mark.parametrize("name", ["paged", "split"])
def test_lengths_of_a_decoding_step(name):
    q, k, v = qkv(4, 1, 5000, 8, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    lengths = torch.tensor([5000, 0, 1, 2049], dtype=torch.int32, device=DEVICE)
    held_by_lengths(name, q, k, v, True, lengths, block=16)


def times(names, sq, n):
    from tilefold.ladder import profile

    q, k, v = qkv(1, sq, n, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    return profile.measure({name: ladder.RUNGS[name].prepare(q, k, v) for name in names}, True)


def test_each_rung_is_faster_than_the_one_before():
    found = times(NAMES[:4], 4096, 4096)
    ms = list(found.values())
    assert ms == sorted(ms, reverse=True), found
    assert found["naive"] >= 20 * found["flash"], found


def test_splits_are_faster_than_flash_for_one_query():
    found = times(("flash", "split"), 1, 4096)
    assert found["split"] < found["flash"], found


def test_the_command_with_its_sweeps_and_its_page(tmp_path):
    """Torch's rows, tiles and each number of a tile alone: everything right, most of it timed."""
    files = {kind: tmp_path / f"ladder.{kind}" for kind in ("json", "markdown")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    given = ("ladder", "--rung", "profile", "--seq", "512,1000", "--dtype", "bf16,fp16", "--heads", "4", "--causal")
    command(*given, "--sweep", "--vary", *options)
    found = json.loads(files["json"].read_text())
    assert len(found["results"]) == 4 and len(found["sweeps"]) == 4
    for each in found["results"]:
        assert [line["name"] for line in each["lines"]] == ["naive", "profile", "torch math", "torch SDPA", "tilefold"]
        assert all(line["over_torch"] > 0 for line in each["lines"])
    for each in found["sweeps"]:
        timed = [cell for cell in each["cells"].values() if isinstance(cell, float)]
        assert each["unit"] == "ms" and len(timed) >= len(each["cells"]) / 2 and min(timed) > 0, each
    assert "over SDPA" in files["markdown"].read_text()


@pytest.mark.parametrize("name", [*(f"{rung}_n1024" for rung in NAMES), "split_q1_n1024"])
def test_a_rung_is_profiled(name, tmp_path):
    """`tilefold profile case ladder`: its kernels with registers and programs an SM, and rates of declared work."""
    page = tmp_path / "page.md"
    output = command("profile", "case", "ladder", name, "--quick", "--markdown", str(page))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and "_kernel |" in line]
    assert len(rows) == {"naive": 3, "profile": 3, "split": 2}.get(name.split("_")[0], 1), output
    assert f"ladder {name}" in output and "TFLOP/s" in output
