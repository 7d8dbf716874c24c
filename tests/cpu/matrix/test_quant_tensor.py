"""QuantizedTensor: what construction refuses, moving, saving, loading, equality, size, and what a changed bit does to it."""

import copy
import dataclasses
import importlib.util
import io
import json
import pickle

import pytest
import torch

import tilefold
from tilefold.errors import DeviceError, DtypeError, ShapeError, TilefoldError, ValueRangeError
from tilefold.quant import NF4_CODE, QuantizedTensor, pack, quantize_weight

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


def test_the_package_is_reached_lazily():
    assert tilefold.quant.QuantizedTensor is QuantizedTensor


@pytest.mark.parametrize("name", list(samples()))
def test_state_round_trip(name):
    q = samples()[name]
    state = q.state("layer.weight.")
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in state.values())
    back = QuantizedTensor.from_state({**state, "layer.bias": torch.ones(3)}, "layer.weight.")
    assert back == q and torch.equal(back.dequantize(), q.dequantize())
    assert json.loads(bytes(state["layer.weight.meta"].tolist()))["version"] == 1


@pytest.mark.parametrize("name", list(samples()))
def test_files_round_trip(name, tmp_path):
    q = samples()[name]
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

    with pytest.raises(ValueRangeError, match="meta must be of version 1, got 2"):
        QuantizedTensor.from_state(with_meta(version=2))
    with pytest.raises(ValueRangeError, match="state must hold 'x.meta'"):
        QuantizedTensor.from_state(state, "x.")
    with pytest.raises(ValueRangeError, match="dtype"):
        QuantizedTensor.from_state(with_meta(dtype="float8"))
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


def swap_nibbles(q: QuantizedTensor) -> QuantizedTensor:
    low, high = q.packed & 0x0F0F0F0F, (q.packed >> 4) & 0x0F0F0F0F
    return change(q, packed=(low << 4) | high)


MUTATIONS = {
    "swapped nibbles": swap_nibbles,
    "swapped lanes": lambda q: change(q, packed=(q.packed << 16) | (q.packed >> 16 & 0xFFFF)),
    "wrong group": lambda q: change(q, scales=q.scales.roll(1, 0)),
    "wrong group of zeros": lambda q: change(q, zeros=q.zeros.roll(1, 0)),
    "dropped zero point": lambda q: change(q, zeros=None, scheme="symmetric"),
    "zero points minus one": lambda q: change(q, zeros=q.zeros - 1),
    "rows rolled": lambda q: change(q, scales=q.scales.roll(1, 1)),
    "smaller group": lambda q: change(q, group=64, scales=q.scales.repeat(2, 1)[:5], zeros=q.zeros.repeat(2, 1)[:5]),
    "another order": lambda q: change(q, perm=torch.arange(q.shape[1]).flip(0).int()),
}


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_the_exactness_check_sees_mutations(name):
    """Identity activations give the weights bit for bit, each group with a scale and a zero point of its own; no mutant does."""
    codes = torch.randint(0, 16, (70, 288), dtype=torch.uint8)
    scales = torch.rand(3, 70) + 0.5
    zeros = torch.stack([torch.randperm(15)[:3] + 1 for _ in range(70)], 1).to(torch.uint8)
    wanted = torch.stack([(codes[:, k].float() - zeros[k // 128]) * scales[k // 128] for k in range(288)], 1)
    q = QuantizedTensor(pack(codes, 4)[0], scales, 4, 128, (70, 288), "asymmetric", torch.float32, zeros=zeros)
    got = (MUTATIONS[name](q) if name else q).dequantize()
    assert torch.equal(torch.eye(288) @ got.t(), wanted.t()) == (name is None)


def test_to_moves_and_rounds_scales():
    q = samples()["refined"]
    low = q.to(dtype=torch.bfloat16)
    assert low.dtype == low.scales.dtype == torch.bfloat16 and low.zeros.dtype == torch.float16
    assert torch.equal(low.scales, q.scales.bfloat16()) and torch.equal(low.packed_high, q.packed_high)
    assert q.to("cpu") == q and q.to() == q
    away = q.to("meta")
    assert away.device.type == "meta" and away != q
    tiny = change(q, scales=torch.full_like(q.scales, 1e-30, dtype=torch.float32))
    with pytest.raises(ValueRangeError, match=r"cannot hold the scale 1e-30: it would become 0"):
        tiny.to(dtype=torch.float16)
    with pytest.raises(DtypeError, match="dtype must be one of"):
        q.to(dtype=torch.int8)


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
    with pytest.raises(DtypeError, match="dtype must be one of"):
        q.dequantize(torch.int8)
