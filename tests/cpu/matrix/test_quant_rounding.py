"""Rounding to few bits: formulas against plain loops, bounds of the error, values on the grid, the promise of the refinement."""

import pytest
import torch

from examples import examples
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.quant import QuantizedTensor, dequantize, pack, quantize_weight
from tilefold.quant.refine import LEAST, P

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

BITS = (8, 4, 3, 2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def steps_of(q: QuantizedTensor) -> torch.Tensor:
    """The scale of every weight, fp64 [N, K]."""
    return torch.stack([q.scales[k // q.group].double().expand(q.shape[0]) for k in range(q.shape[1])], 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", BITS)
def test_no_weight_is_more_than_half_a_step_off(bits, scheme, dtype):
    w = (torch.randn(33, 330) * torch.rand(33, 1) + 0.3 * torch.randn(33, 1)).to(dtype)
    for per, group in (("group", 32), ("group", 128), ("group", None), ("channel", None), ("tensor", None)):
        q = quantize_weight(w, bits, group, scheme, per)
        error = (q.dequantize(torch.float64) - w.double()).abs()
        assert (error <= steps_of(q) * (0.5 + 1e-4)).all()
        assert q.per == ("channel" if group is None and per == "group" else per)
        assert q.dequantize().dtype == q.scales.dtype == dtype


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", BITS)
def test_the_formulas(bits, scheme):
    """Scales, zero points and codes of each group, from its weights alone."""
    w = torch.randn(5, 100)
    q = quantize_weight(w, bits, 32, scheme)
    assert q.groups == 4 and q.scales.shape == (4, 5)
    codes = q.codes()
    for n in range(5):
        for g in range(4):
            part = w[n, 32 * g : 32 * g + 32].double()  # the last has four columns
            scale = q.scales[g, n].double()
            if scheme == "symmetric":
                wanted, zero = part.abs().max() / (2 ** (bits - 1) - 0.5), torch.tensor(2.0 ** (bits - 1))
            else:
                wanted = (part.max().clamp_min(0) - part.min().clamp_max(0)) / (2**bits - 1)
                zero = q.zeros[g, n].double()
                assert abs(-part.min().clamp_max(0) / scale - zero) <= 0.5 + 1e-5
            assert torch.isclose(scale, wanted, rtol=1e-6)
            mine = codes[n, 32 * g : 32 * g + 32].double()
            off = part / scale + zero - mine
            inside = (mine > 0) & (mine < 2**bits - 1)
            assert (off[inside].abs() <= 0.5 + 1e-5).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("floats", [False, True])
def test_dequantize_is_difference_and_product_rounded_once(bits, dtype, floats):
    """Random scales and zero points, another in every group; a group of 48 that K is no multiple of."""
    n, k, group = 70, 200, 48
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scales = (torch.rand(5, n) + 0.5).to(dtype)
    zeros = torch.rand(5, n).half() * 2**bits if floats else torch.randint(0, 2**bits, (5, n), dtype=torch.uint8)
    packed, high = pack(codes, bits)
    q = QuantizedTensor(packed, scales, bits, group, (n, k), "asymmetric", dtype, zeros=zeros, packed_high=high)
    columns = [(codes[:, j].float() - zeros[j // group].float()) * scales[j // group].float() for j in range(k)]
    assert torch.equal(q.dequantize(), torch.stack(columns, 1).to(dtype))
    doubles = [(codes[:, j].double() - zeros[j // group].double()) * scales[j // group].double() for j in range(k)]
    assert torch.equal(dequantize(q, torch.float64), torch.stack(doubles, 1))


@pytest.mark.parametrize("bits", BITS)
def test_weights_on_the_grid_come_back_bit_for_bit(bits):
    """Powers of two as scales and both ends of the range in every group: nothing is left to rounding."""
    n, k, group = 65, 160, 32
    codes = torch.randint(0, 2**bits, (n, k))
    zeros = torch.randint(0, 2**bits, (n, 5))
    codes[:, ::group], codes[:, 1::group] = 0, 2**bits - 1
    scales = 2.0 ** torch.randint(-6, 6, (n, 5))
    w = (codes - zeros.repeat_interleave(group, 1)).float() * scales.repeat_interleave(group, 1)
    q = quantize_weight(w, bits, group)
    assert torch.equal(q.dequantize(), w)
    assert torch.equal(q.codes(), codes.to(torch.uint8)) and torch.equal(q.zeros.t(), zeros.to(torch.uint8))


def measures(w: torch.Tensor, q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over each group, fp64 [N, groups]: |error in steps|**p and squared error."""
    error = w.double() - q.dequantize(torch.float32).double()
    size = (error / steps_of(q)).abs()
    lp, l2 = size * size.clamp_min(LEAST) ** (P - 1), error**2
    cut = [slice(i, i + q.group) for i in range(0, q.shape[1], q.group)]
    return torch.stack([lp[:, c].sum(1) for c in cut], 1), torch.stack([l2[:, c].sum(1) for c in cut], 1)


@examples(40)
@hypothesis.given(
    bits=st.sampled_from(BITS),
    n=st.integers(1, 9),
    k=st.integers(1, 200),
    group=st.sampled_from([32, 64, None]),
    dtype=st.sampled_from(FLOATS),
    shift=st.floats(-2, 2),
    tail=st.sampled_from([1.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_refinement_never_ends_worse(bits, n, k, group, dtype, shift, tail, seed):
    """In no group, in neither measure, whatever the weights."""
    noise = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    w = (noise.abs() ** tail * noise.sign() + shift).to(dtype)
    start, end = (quantize_weight(w, bits, group, refine=refine, dtype=torch.float32) for refine in ("none", "hqq"))
    assert torch.equal(start.scales, end.scales)
    (lp0, l20), (lp1, l21) = measures(w, start), measures(w, end)
    assert (l21 <= l20 * (1 + 1e-12)).all()
    assert (lp1 <= lp0 * (1 + 1e-5)).all()


@pytest.mark.parametrize("per", ["group", "channel", "tensor"])
def test_refinement_gains(per):
    """On weights with outliers the error falls, with half-precision scales and zero points, too."""
    w = torch.randn(64, 512)
    w[:, ::97] *= 4
    for bits in (4, 3, 2):
        for dtype in FLOATS:
            start, end = (quantize_weight(w, bits, per=per, refine=r, dtype=dtype) for r in ("none", "hqq"))
            assert end.zeros.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
            old, new = ((q.dequantize(torch.float32) - w).norm() for q in (start, end))
            assert new <= old if per == "tensor" else new < old  # one zero point for all may be the best one already


@examples(60)
@hypothesis.given(
    bits=st.sampled_from(BITS),
    n=st.integers(1, 9),
    k=st.integers(1, 200),
    group=st.sampled_from([32, 64, None]),
    dtype=st.sampled_from(FLOATS),
    shift=st.sampled_from([0.0, 0.5, -1.5, 4.0, -40.0, 3000.0]),
    zeros=st.sampled_from(["auto", "float"]),
    seed=st.integers(0, 2**31),
)
def test_floating_zero_points_are_never_worse(bits, n, k, group, dtype, shift, zeros, seed):
    """In no group; and every group around 0 keeps its scale and a zero point that is a code."""
    w = (torch.rand(n, k, generator=torch.Generator().manual_seed(seed)) + shift).to(dtype)
    whole, own = (quantize_weight(w, bits, group, zeros=way) for way in ("integer", zeros))
    assert whole.zeros.dtype == torch.uint8
    (_, before), (_, after) = measures(w, whole), measures(w, own)
    assert (after <= before).all()
    assert ((own.dequantize(torch.float64) - w.double()).abs() <= steps_of(own) * (0.5 + 1e-3)).all()
    if own.zeros.dtype == torch.uint8:
        assert own == whole
        return
    assert own.zeros.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
    parts = [w[:, at : at + own.group].double() for at in range(0, k, own.group)]
    around = torch.stack([(part.amin(1) <= 0) & (part.amax(1) >= 0) for part in parts])
    assert torch.equal(own.zeros[around], whole.zeros[around].to(own.zeros.dtype))
    assert torch.equal(own.scales[around], whole.scales[around])
    if zeros == "auto":
        assert after.sum() <= 0.9 * before.sum() * (1 + 1e-9)


def test_zeros_stay_zero_beside_groups_on_one_side():
    w = torch.rand(8, 96) + 1
    w[:, 32:64] -= 1.5
    w[:, 40] = 0
    q = quantize_weight(w, 4, 32)
    assert q.zeros.is_floating_point()
    assert torch.equal(q.dequantize()[:, 40], torch.zeros(8))
    assert torch.equal(q.zeros[1], q.zeros[1].round()) and (q.zeros[0] < 0).all()
    few = torch.randn(64, 512)
    few[0, :32] = few[0, :32].abs() + 1  # one group of a thousand is not worth another format, unless it is asked for
    assert quantize_weight(few, 4, 32).zeros.dtype == torch.uint8
    assert quantize_weight(few, 4, 32, zeros="float").zeros.dtype == torch.float32


def test_a_zero_point_that_float16_cannot_hold_is_not_taken():
    """At 3000 steps from 0 and more float16 is two and more steps apart: the grid would lie beside the weights."""
    w = (torch.rand(4, 128) + 100).half()
    near, far = (quantize_weight(w, bits, zeros="float") for bits in (2, 8))
    assert near.zeros.dtype == torch.float16 and far.zeros.dtype == torch.uint8
    wide = quantize_weight(w, 8, zeros="float", dtype=torch.float32)
    assert wide.zeros.dtype == torch.float32
    assert (wide.dequantize() - w).norm() < 0.2 * (far.dequantize(torch.float32) - w).norm()


def test_size_of_the_weight_does_not_matter():
    w = torch.randn(8, 256)
    a, b = (quantize_weight(x, 3, refine="hqq") for x in (w, 1024 * w))
    assert (
        torch.equal(a.codes(), b.codes()) and torch.equal(a.zeros, b.zeros) and torch.equal(1024 * a.scales, b.scales)
    )


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("refine", ["none", "hqq"])
def test_rows_are_independent_however_they_are_cut(refine, rows, monkeypatch):
    """Also those that lie on one side of 0: their zero points are floating."""
    for w in (torch.randn(40, 96), torch.rand(40, 96) + torch.linspace(-1, 1, 40)[:, None]):
        monkeypatch.setattr("tilefold.quant.rounding.CHUNK", 1 << 22)
        whole = quantize_weight(w, 4, 32, refine=refine)
        monkeypatch.setattr("tilefold.quant.rounding.CHUNK", rows * 96)
        assert quantize_weight(w, 4, 32, refine=refine) == whole
    assert whole.zeros.is_floating_point()


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_and_extremes(dtype):
    w = torch.zeros(3, 64, dtype=dtype)
    w[1, 5] = torch.finfo(dtype).tiny
    w[2] = torch.finfo(dtype).max * 0.9
    for scheme in ("symmetric", "asymmetric"):
        q = quantize_weight(w, 8, 64, scheme)
        assert (q.dequantize()[0] == 0).all()
        assert q.dequantize(torch.float64).isfinite().all() and (q.scales > 0).all()


def test_a_transposed_weight_and_a_parameter():
    w = torch.nn.Parameter(torch.randn(96, 40).t())
    q = quantize_weight(w, 4, 32)
    assert q == quantize_weight(w.detach().contiguous(), 4, 32) and not q.scales.requires_grad


def test_default_is_four_bits_in_groups_of_128():
    q = quantize_weight(torch.randn(16, 300).bfloat16())
    assert (q.bits, q.group, q.scheme, q.groups) == (4, 128, "asymmetric", 3)
    assert quantize_weight(torch.randn(16, 100)).group == 100


def test_bad_input_is_refused():
    w = torch.randn(4, 96)
    cases = [
        (ValueRangeError, "bits must be one of", {"bits": 5}),
        (ValueRangeError, r"group must be None, a multiple of 32, or at least K = 96, got 33", {"group": 33}),
        (ValueRangeError, "group must be None", {"group": 0}),
        (ValueRangeError, "group must be None", {"group": -1}),
        (
            ValueRangeError,
            "group goes with per='group'; with per='tensor' leave it out, got 32",
            {"group": 32, "per": "tensor"},
        ),
        (ValueRangeError, "scheme must be one of .* got 'table'", {"scheme": "table"}),
        (ValueRangeError, "per must be one of .* got 'row'", {"per": "row"}),
        (ValueRangeError, "refine must be one of .* got 'gptq'", {"refine": "gptq"}),
        (Unsupported, "refine='hqq' moves zero points", {"refine": "hqq", "scheme": "symmetric"}),
        (ValueRangeError, "zeros must be one of .* got 'whole'", {"zeros": "whole"}),
        (Unsupported, "zeros='float' needs scheme='asymmetric'", {"zeros": "float", "scheme": "symmetric"}),
        (DtypeError, r"dtype must be one of .* got torch\.float64", {"dtype": torch.float64}),
    ]
    for error, text, options in cases:
        with pytest.raises(error, match=text):
            quantize_weight(w, **options)
    with pytest.raises(DtypeError, match=r"w must be one of .* got torch\.float64"):
        quantize_weight(w.double())
    with pytest.raises(ShapeError, match=r"w must be \[N, K\].*got \[4, 96, 1\]"):
        quantize_weight(w[..., None])
    w[1, 2], w[3, 4] = float("nan"), float("inf")
    with pytest.raises(ValueRangeError, match="w must be finite, got 2 NaN or infinite values of 384"):
        quantize_weight(w)
    with pytest.raises(ValueRangeError, match=r"dtype torch\.float16 cannot hold the scale"):
        quantize_weight(torch.full((2, 64), 1e9), dtype=torch.float16)
