"""`tilefold bench decode` on a GPU: peers are right, both ways of timing agree, replays do not find their caches in L2."""

import json
from dataclasses import replace

import pytest
import torch

from cases.device import command
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.decode.peers import DECODE, DECODE_DEFAULTS
from tilefold.bench.run import run_case
from tilefold.bench.setting import Options

pytestmark = pytest.mark.no_poison
SMALL = DecodeCase((2048,) * 4)


def cells_of(case, names):
    row = run_case(
        DECODE, case, [DECODE.peers[name] for name in ("tilefold", *names)], "cuda", Options(1), lambda *_: None
    )
    return row, {cell.implementation: cell for cell in row.cells}


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, queries=4),
        replace(SMALL, page=16),
        replace(SMALL, heads=28, kv_heads=4, dtype="float16"),
        DecodeCase((1, 5000, 77, 2048), page=64),
    ],
    ids=lambda case: case.name,
)
def test_every_available_implementation_is_right_and_timed(case):
    row, cells = cells_of(case, DECODE_DEFAULTS["cuda"])
    assert cells["tilefold"].status == "ok", cells["tilefold"].note
    assert not [cell for cell in row.cells if cell.status == "WRONG"]
    assert cells["tilefold"].graph is not None, cells["tilefold"].note
    assert case.uneven or cells["cudnn"].status == cells["flash"].status == "ok", row.cells


@pytest.mark.alone
def test_no_step_is_faster_than_memory():
    row, cells = cells_of(DecodeCase((8192,)), ("cudnn",))
    properties = torch.cuda.get_device_properties()
    assert row.sets * row.case.bytes >= 6 * properties.L2_cache_size
    for cell in cells.values():
        assert cell.graph.ms > 0.9 * row.floor_ms
    assert row.copied > 1e11


def test_the_command_line(tmp_path):
    figures = tmp_path / "decode.json"
    given = ("--quick", "--case", "b1", "--peers", "plain,flash", "--rounds", "1", "--json", str(figures))
    command("bench", "decode", *given)
    rows = json.loads(figures.read_text())["rows"]
    assert all(row["graph_us"] and row["events_us"] for row in rows if row["status"] == "ok")
