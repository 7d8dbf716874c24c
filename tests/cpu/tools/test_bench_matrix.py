"""`tilefold bench gemm`, `conv`, `lowbit` and `move`: cases, bytes, judges, peers over the same numbers, tables, commands."""

import json
import sys
import types
from dataclasses import replace

import pytest
import torch

from cases.cli import command
from tilefold import ops, reference
from tilefold.bench.family_report import family_table
from tilefold.bench.matrix.conv import CONV, ConvCase
from tilefold.bench.matrix.eight import EightCase
from tilefold.bench.matrix.gemm import GEMM, GemmCase
from tilefold.bench.matrix.lowbit import LOWBIT, LowbitCase, lowbit_inputs
from tilefold.bench.matrix.lowbit_peers import tinygemm_parts
from tilefold.bench.matrix.move import MOVE, MoveCase
from tilefold.bench.matrix.product import activated
from tilefold.bench.run import Cell, Row
from tilefold.bench.timers import Timing
from tilefold.errors import ValueRangeError

FAMILIES = {family.name: family for family in (GEMM, CONV, LOWBIT, MOVE)}
TINY = [(family, case) for family in FAMILIES.values() for case in family.cases("tiny")]


run = command("bench")


@pytest.fixture
def stand_ins(monkeypatch):
    """The operations by torch: the adapters are held to their arguments, and the interpreter is not needed."""

    def product(a, b, *, bias=None, activation=None, order="grouped"):
        assert order in ("grouped", "plain")
        out = torch.matmul(a, b)
        return activated(out if bias is None else out + bias, activation)

    def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, method="auto"):
        assert method in ("auto", "implicit", "im2col")
        return torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)

    known = {"matmul": product, "bmm": product, "conv2d": conv2d}
    known["lowbit_matmul"] = lambda x, w: x @ w.dequantize(x.dtype).t()
    known |= {"add": torch.add, "transpose": lambda x, method: x.t().contiguous()}
    known["matmul_w8a8"] = lambda x, w, s: reference.matmul_w8a8(x, w, s, None, torch.float32).to(x.dtype)
    for name, function in known.items():
        monkeypatch.setitem(vars(ops), name, function)


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_unique_and_sizes_known(name):
    family = FAMILIES[name]
    for size in ("full", "quick", "tiny"):
        names = [case.name for case in family.cases(size)]
        assert len(names) == len(set(names)) and names
    assert {case.name for case in family.cases("quick")} <= {case.name for case in family.cases("full")}
    with pytest.raises(ValueRangeError, match="size must be one of"):
        family.cases("huge")


def test_bytes_and_operations():
    gemm = GemmCase(64, 32, 16)
    assert (gemm.bytes, gemm.flops) == (2 * (64 * 16 + 16 * 32 + 64 * 32), 2 * 64 * 32 * 16)
    many = replace(gemm, batch=3, shared="b", bias="batch", dtype="float32")
    assert many.bytes == 4 * (3 * 64 * 16 + 16 * 32 + 3 + 3 * 64 * 32) and many.flops == 3 * gemm.flops
    assert replace(gemm, bias="n").bytes == gemm.bytes + 2 * 32
    conv = ConvCase(2, 4, 9, 6, stride=2, groups=2)
    assert conv.side == 5 and conv.flops == 2 * 2 * 6 * 25 * 2 * 9
    assert conv.bytes == 2 * (2 * 4 * 81 + 2 * 6 * 25 + 6 * 2 * 9 + 6)
    add, turn = MoveCase("add", 6, 8, "apart"), MoveCase("transpose", 6, 8, dtype="uint8")
    assert (add.bytes, add.flops, turn.bytes, turn.flops) == (3 * 48 * 2, 48, 2 * 48, 0)
    assert MoveCase("add", 0, 7, dtype="float32").bytes == 3 * 7 * 4
    low = LowbitCase(1)
    assert low.bytes == 8192 * 8192 // 2 + 64 * 8192 * 3 + 2 * 2 * 8192 and low.flops == 2 * 8192**2
    eight = EightCase(16, 64, 32)
    assert eight.bytes == 64 * 32 + 4 * 64 + 2 * 16 * 96 + 2 * 16 * 32 and eight.flops == 2 * 16 * 64 * 32
    e4m3 = replace(gemm, transposed=True, dtype="float8_e4m3fn")
    assert e4m3.bytes == 64 * 16 + 16 * 32 + 2 * 64 * 32
    assert replace(low, group=0, scheme="symmetric", bits=3).bytes == 8192 * 8192 * 3 // 8 + 2 * 8192 + 2 * 2 * 8192


def test_the_shapes_that_were_promised():
    assert {"m4096_n4096_k4096", "m8192_n8192_k8192", "m4096_n4096_k4096_bias_gelu"} <= {
        c.name for c in GEMM.cases("full")
    }
    assert {"b32_c256_s14_o256_r3", "b32_c256_s14_o256_r3_im2col"} <= {c.name for c in CONV.cases("full")}
    assert {"add_n67108864", "add_m8192_n8192_turned", "transpose_m8192_n8192_descriptors"} <= {
        c.name for c in MOVE.cases("full")
    }
    assert {"4bit_m1_n8192_k8192_g128", "2bit_m1_n8192_k8192_g128"} <= {c.name for c in LOWBIT.cases("full")}


# ---------------------------------------------------------------- inputs, judges, who takes part


@pytest.mark.parametrize(("family", "case"), TINY, ids=lambda x: x.name)
def test_peers_are_judged_and_wrong_ones_found(family, case, stand_ins):
    sets = [family.inputs(case, "cpu", seed) for seed in range(2)]
    for name in ("tilefold", *family.defaults["cpu"]):
        calls = family.peers[name].prepare(sets)
        with calls.context():
            outs = [call() for call in calls.calls]
        for one, out in zip(sets, outs, strict=True):
            if calls.judge is not None and one is not sets[0]:
                continue
            judge = calls.judge or family.judge(one)  # cuBLAS's x is not rounded to 8 bits
            assert judge.verdict(out).ok, name
            assert not judge.verdict((out * 1.1).to(out.dtype)).ok and not judge.verdict(out.flip(-1)).ok
            if not out.is_floating_point():
                continue
            broken = out.clone()
            broken[(-1,) * broken.dim()] = float("nan")
            assert not judge.verdict(broken).finite
        assert not torch.equal(*outs)
    assert family.peers["tilefold"].ours and not family.peers[family.defaults["cpu"][0]].ours


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_tinygemm_gets_the_same_weights(scheme):
    inputs = lowbit_inputs(LowbitCase(1, 24, 160, group=32, scheme=scheme), "cpu")
    halves, both = tinygemm_parts(inputs.y)
    codes = torch.stack([halves >> 4, halves & 15], -1).flatten(1).double()
    scale, zero = (both[..., i].double().t().repeat_interleave(32, 1) for i in (0, 1))
    want = inputs.y.dequantize(torch.float64)
    torch.testing.assert_close((codes - 8) * scale + zero, want, rtol=0, atol=float(want.abs().max()) * 2**-8)


def test_libraries_that_round_by_themselves_are_judged_by_their_own(monkeypatch):
    """bitsandbytes, as a stand-in that rounds to eighths."""

    def quantize_4bit(w, blocksize, quant_type):
        assert (blocksize, quant_type) == (64, "nf4")
        return (w * 8).round() / 8, "state"

    def matmul_4bit(x, packed, quant_state):
        assert quant_state == "state"
        return x @ packed

    functional = types.SimpleNamespace(quantize_4bit=quantize_4bit, dequantize_4bit=lambda packed, state: packed)
    monkeypatch.setitem(
        sys.modules, "bitsandbytes", types.SimpleNamespace(functional=functional, matmul_4bit=matmul_4bit)
    )
    inputs = lowbit_inputs(LowbitCase(3, 72, 160, group=32), "cpu")
    calls = LOWBIT.peers["bitsandbytes"].prepare([inputs])
    assert calls.judge.verdict(calls.calls[0]()).ok
    assert not LOWBIT.judge(inputs).verdict(calls.calls[0]()).ok


def test_peers_say_why_not(monkeypatch):
    case = LowbitCase(1)
    for name, device, other, why in (
        ("gemlite", "cuda", {}, "gemlite is not installed"),
        ("tinygemm", "cpu", {}, "needs a GPU"),
        ("tinygemm", "cuda", {"bits": 8}, "has 4 bits only"),
        ("tinygemm", "cuda", {"dtype": "float16"}, "takes bfloat16 only"),
        ("tinygemm", "cuda", {"group": 0}, "has groups of 32, 64, 128, 256 only"),
    ):
        assert LOWBIT.peers[name].refuses(replace(case, **other), device) == why
    assert LOWBIT.peers["tinygemm"].refuses(case, "cuda") is None
    eight = EightCase(16)
    assert LOWBIT.peers["tinygemm"].refuses(eight, "cuda") == "multiplies 16-bit activations only"
    assert LOWBIT.peers["scaled_mm"].refuses(case, "cuda") == "multiplies 8-bit activations only"
    assert LOWBIT.peers["scaled_mm"].refuses(eight, "cuda") == "torch._int_mm takes more than 16 rows"
    assert LOWBIT.peers["scaled_mm"].refuses(replace(eight, kind="e4m3"), "cuda") is None
    assert "multiples of 16" in LOWBIT.peers["scaled_mm"].refuses(EightCase(64, 72, 100), "cuda")


# ---------------------------------------------------------------- tables and commands


def test_the_table_counts_from_the_nearer_roof():
    def cell(name, ms):
        return Cell(case, name, "ok", graph=Timing(ms, ms, ms, 1, "made up"))

    case = GemmCase(4096, 4096, 4096)
    row = Row(GEMM, case, (cell("tilefold", 0.25), cell("torch", 0.2)), 4e12, roof=760e12)
    (line,) = family_table([row], "graph").rows
    assert family_table([row], "graph").head == ("case", "us", "GB/s", "TFLOP/s", "of roof", "best", "torch")
    assert line == (case.name, "250", "403", "550", "72 %", "0.80x", "200 (0.80x)")
    low = LowbitCase(1)
    row = Row(LOWBIT, low, (cell("tilefold", 0.0125),), 4e12, roof=760e12)
    assert row.floor_ms == pytest.approx(low.bytes / 4e9)


@pytest.mark.interpreter
@pytest.mark.no_poison
@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_on_tiny_cases(name, tmp_path):
    case = {
        "gemm": "m20_n33_k17_sharedb|m70",
        "conv": "stride2",
        "lowbit": "4bit|8bit|w8a8_int8",
        "move": "add|uint8|strides",
    }[name]
    files = ["--json", tmp_path / "x.json", "--markdown", tmp_path / "x.md", "--results", tmp_path / "results"]
    run(name, "--case", case, "--rounds", 1, *files)
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    peer = FAMILIES[name].defaults["cpu"][0]
    assert all(row["events_us"] > 0 for row in rows if row["implementation"] == peer)
    for row in rows:
        assert row["family"] == name and row["bytes"] > 0 and (row["flops"] > 0 or row["op"] == "transpose")
        if row["implementation"] == "tilefold":
            assert row["status"] == "ok" and row["events_us"] is not None, row
    kept = (tmp_path / "results" / f"{name}.jsonl").read_text().splitlines()
    assert len(kept) == len(rows)
    assert "| case | us | " in (tmp_path / "x.md").read_text()


def test_a_transpose_is_judged_by_its_bits_and_its_layout():
    inputs = MOVE.inputs(MoveCase("transpose", 5, 9, dtype="float32"), "cpu", 0)
    judge = MOVE.judge(inputs)
    right = inputs.x.t().contiguous()
    assert judge.verdict(right).ok
    assert not judge.verdict(inputs.x.t()).ok  # a view, which nobody wrote
    assert not judge.verdict(inputs.x).ok
    near = right.clone()
    near[3, 2] = torch.nextafter(near[3, 2], torch.tensor(9.0))
    assert not judge.verdict(near).ok
    x = MOVE.inputs(MoveCase("add", 5, 9, "apart"), "cpu", 0)
    assert x.x.stride() == x.y.stride() == (17, 1) and x.x.data_ptr() != x.y.data_ptr()
    assert MOVE.inputs(MoveCase("add", 9, 9, "turned"), "cpu", 0).y.stride() == (1, 9)
