"""LowBitLinear: the oracle, its state in every direction, moves and copies, gradients of x, compilation, what is refused."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import cases
from cases import judge, one_graph
from cases.refusals import refuses
from tilefold import reference
from tilefold.errors import DeviceError, DtypeError, ShapeError, TilefoldError, ValueRangeError
from tilefold.nn import LowBitLinear
from tilefold.quant import QuantizedTensor, from_nf4, quantize_weight

N, K = 72, 192
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4, "group": 64},
    "4 bits symmetric": {"bits": 4, "group": 32, "scheme": "symmetric"},
    "4 bits refined": {"bits": 4, "group": 64, "refine": "hqq"},
    "3 bits a row": {"bits": 3, "per": "channel"},
    "2 bits one scale": {"bits": 2, "per": "tensor"},
}


def rand(*shape, dtype=torch.float32, device=DEVICE):
    """On the device unless a test says otherwise."""
    return cases.rand(*shape, dtype=dtype, device=device)


def linear(dtype=torch.float32, bias=True, device=DEVICE, n=N, k=K):
    """A layer without NaN, whatever fresh memory holds."""
    made = nn.Linear(k, n, bias=bias, device=device, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(rand(n, k, device=device) * k**-0.5)
        if bias:
            made.bias.copy_(rand(n, device=device))
    return made


def made(name="4 bits", **options):
    return LowBitLinear.from_linear(linear(**options), **WAYS[name])


def same(a, b):
    """Equal weights (the same settings and values) and biases."""
    return (
        a.weight == b.weight
        and (a.bias is None) == (b.bias is None)
        and (a.bias is None or torch.equal(a.bias, b.bias))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WAYS)
def test_it_is_the_dequantised_layer(name, dtype, device):
    layer = made(name, dtype=dtype, device=device)
    x = rand(2, 5, K, dtype=dtype, device=device).requires_grad_()
    out = layer(x)
    exact = [t.detach().double() for t in (x, layer.weight.dequantize(torch.float64), layer.bias)]
    wide = exact[0].requires_grad_()
    plain = reference.lowbit_matmul(wide, layer.weight, layer.bias, dtype)
    judge(out, nn.functional.linear(*exact), plain, f"{name} {dtype}")
    dout = rand(2, 5, N, dtype=dtype, device=device)
    (got,) = torch.autograd.grad(out, x, dout)
    (off,) = torch.autograd.grad(plain, wide, dout.double())
    judge(got, dout.double() @ exact[1], off, f"gradient, {name} {dtype}")
    assert all(not p.requires_grad for p in layer.parameters())


def test_without_bias_and_without_rows(device):
    layer = made(bias=False, device=device)
    assert layer.bias is None and layer(rand(0, K, device=device)).shape == (0, N)
    assert layer(rand(K, device=device)).shape == (N,)


def test_it_says_what_it_is():
    assert "bits=4, group=64, asymmetric, float32" in repr(made())
    assert f"in_features={K}, out_features={N}, bias=False, bits=3, a scale a row" in repr(
        made("3 bits a row", bias=False)
    )
    layer = made()
    assert (layer.in_features, layer.out_features) == (K, N)
    assert layer.weight is layer.weight and layer.weight.shape == (N, K)
    assert not LowBitLinear.from_linear(linear().eval(), 4).training


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("name", WAYS)
def test_state_dicts_are_states_of_the_weight(name):
    layer = made(name)
    state = nn.ModuleDict({"a": layer}).state_dict()
    assert QuantizedTensor.from_state(state, "a.") == layer.weight
    assert set(state) == {*layer.weight.state("a."), "a.bias"}
    assert same(LowBitLinear.from_state(state, "a."), layer)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("start", ["4 bits", "3 bits a row", "2 bits one scale"])
@pytest.mark.parametrize("assign", [False, True])
def test_any_scheme_loads_into_any(name, start, assign):
    given, into = made(name), made(start)
    x = rand(3, K)
    into(x)
    assert not into.load_state_dict(given.state_dict(), assign=assign).missing_keys
    assert same(into, given) and torch.equal(into(x), given(x))
    assert (into.packed.data_ptr() == given.packed.data_ptr()) == assign


def test_loading_the_same_scheme_keeps_addresses():
    given, into = made(), made()
    into.load_state_dict(made("8 bits").state_dict())
    into.load_state_dict(given.state_dict())
    before = [t.data_ptr() for t in (into.packed, into.scales, into.zeros, into.bias)]
    into.load_state_dict(made().state_dict())
    assert [t.data_ptr() for t in (into.packed, into.scales, into.zeros, into.bias)] == before
    assert not same(into, given)


def test_tables_and_permutations_load():
    absmax = torch.rand(N * K // 64, device=DEVICE) + 0.5
    codes = torch.randint(0, 256, (N * K // 2, 1), dtype=torch.uint8, device=DEVICE)
    weight = from_nf4(codes, absmax, (N, K), blocksize=64)
    perm = torch.randperm(K, dtype=torch.int32, device=DEVICE)
    permuted = QuantizedTensor(**{**quantize_weight(rand(N, K)).__dict__, "perm": perm})
    for given in (LowBitLinear(weight), LowBitLinear(permuted, torch.ones(N, device=DEVICE))):
        into = made(bias=given.bias is not None)
        into.load_state_dict(given.state_dict())
        assert same(into, given)
        assert same(LowBitLinear.from_state(given.state_dict()), given)
    assert torch.equal(LowBitLinear(weight).half().table, weight.table)


def test_what_does_not_load_says_why():
    layer = made()
    for other, message in (
        (
            LowBitLinear.from_linear(linear(k=128), 4).state_dict(),
            r"the layer's weight is \[72, 192\], got \[72, 128\]",
        ),
        (linear().state_dict(), "weight is not quantised, but the layer is"),
        (made(bias=False).state_dict(), "Missing key.*bias"),
        ({**layer.state_dict(), "odd": torch.ones(1)}, "Unexpected key.*odd"),
        ({**layer.state_dict(), "meta": torch.zeros(3, dtype=torch.uint8)}, "meta is not JSON"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            made().load_state_dict(other)
    with pytest.raises(RuntimeError, match="Missing key"):
        made().load_state_dict({})


@pytest.mark.parametrize("name", WAYS)
def test_copies_and_pickles(name):
    layer = made(name)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False))
    x = rand(3, K)
    for one in copies:
        assert same(one, layer) and torch.equal(one(x), layer(x))
        assert one.packed.data_ptr() != layer.packed.data_ptr() and one.weight.packed is one.packed


# ---------------------------------------------------------------- moves


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WAYS)
def test_dtypes_are_those_of_scales_and_bias(name, dtype):
    layer = made(name)
    want, zeros = layer.weight.to(dtype=dtype), layer.zeros
    moved = nn.Sequential(layer).to(dtype)[0]
    assert moved is layer and layer.weight == want and layer.weight.dtype == dtype
    assert layer.bias.dtype == layer.scales.dtype == dtype and layer.packed.dtype == torch.int32
    assert zeros is None or layer.zeros.dtype == zeros.dtype
    assert layer(rand(2, K, dtype=dtype)).dtype == dtype


def test_half_back_and_to_nowhere():
    layer = made()
    assert layer.half().weight.dtype == torch.float16
    assert layer.float().weight.dtype == torch.float32
    before = copy.deepcopy(layer)
    refuses(DtypeError, "float16, bfloat16 or float32, not to torch.float64", layer.double)
    small = LowBitLinear(quantize_weight(rand(N, K) * 1e-10))
    refuses(ValueRangeError, "cannot hold the scale", small.half)
    assert same(layer, before) and small.scales.dtype == torch.float32
    meta = copy.deepcopy(layer).to("meta")
    assert meta.packed.device.type == "meta" and meta.weight.shape == (N, K)
    meta.half().to_empty(device=DEVICE).load_state_dict(layer.state_dict())
    assert meta.weight == layer.weight


def test_swapped_buffers_are_used():
    """functional_call, and whoever else puts other tensors into the buffers."""
    a, b = made(), made()
    x = rand(3, K)
    swapped = {name: tensor for name, tensor in b.state_dict().items() if name != "meta"}
    assert torch.equal(torch.func.functional_call(a, swapped, (x,)), b(x))
    assert not torch.equal(a(x), b(x))


# ---------------------------------------------------------------- compilation


@pytest.mark.no_poison
@pytest.mark.parametrize("name", ["4 bits", "3 bits a row"])
def test_compiled_without_breaks(name, device):
    layers = nn.Sequential(made(name, device=device, n=K), nn.GELU(), made(name, device=device)).to(device)
    x = rand(4, K, device=device).requires_grad_()
    compiled = one_graph(layers)
    out, want = compiled(x), layers(x)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x)[0] for t in (out, want)))


@pytest.mark.no_poison
def test_equal_layers_share_one_compilation():
    """As for a decoder whose layers are compiled one by one: the second layer of a shape compiles nothing."""
    from torch._dynamo.testing import CompileCounter

    count = CompileCounter()

    @torch.compile(backend=count, fullgraph=True)
    def step(layer, x):
        return layer(x)

    x = rand(2, K)
    for layer in (made(), made(), made()):
        with torch.no_grad():
            torch.testing.assert_close(step(layer, x), layer(x))
    assert count.frame_count == 1


# ---------------------------------------------------------------- refusals


def test_refusals():
    weight = quantize_weight(rand(N, K))
    for arguments, error, message in (
        ((rand(N, K),), DtypeError, "weight must be a quant.QuantizedTensor, got Tensor"),
        ((weight, rand(N + 1)), ShapeError, r"bias must be \[N\] = \[72\], got \[73\]"),
        ((weight, torch.ones(N, dtype=torch.int32, device=DEVICE)), DtypeError, "bias must be of a float dtype"),
        ((weight, torch.ones(N, device="meta")), DeviceError, "bias must lie on c"),
    ):
        with pytest.raises(error, match=message):
            LowBitLinear(*arguments)
    with pytest.raises(TilefoldError):
        made()(rand(3, K + 1))
