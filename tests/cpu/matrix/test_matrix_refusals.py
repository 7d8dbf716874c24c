"""The matrix collection, quantize, LowBitLinear and files called wrongly: an error that names the argument, before all else."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import tilefold
from cases import rand
from cases.refusals import refuses
from tilefold import ops, quant
from tilefold.errors import DeviceError, DtypeError, LayoutError, PlanError, ValueRangeError
from tilefold.nn import LowBitLinear, load_quantized, save_quantized
from tilefold.ops.matrix import conv, lowbit
from tilefold.ops.matrix.conv import conv_plan
from tilefold.plan import device_named

F16, F32 = torch.float16, torch.float32


def test_an_option_is_judged_by_its_type_after_a_call_with_its_equal(device):
    """1 == True: what was right once must not let it through."""
    a, b = rand(4, 8, dtype=F32, device=device), rand(8, 4, dtype=F32, device=device)
    ops.matmul(a, b, tf32=True)
    refuses(DtypeError, "tf32 must be a bool, got 1", ops.matmul, a, b, tf32=1)
    x = torch.randn(4, 8, dtype=torch.complex64, device=device)
    ops.transpose(x)
    refuses(LayoutError, "x is a lazy conjugate", ops.transpose, x.conj())


def test_options_that_cannot_be_honoured(device):
    a, b = rand(4, 8, dtype=F16, device=device), rand(8, 4, dtype=F16, device=device)
    refuses(ValueRangeError, "tf32 is for float32, but a has dtype float16", ops.matmul, a, b, tf32=True)
    x, w = rand(1, 4, 5, 5, dtype=F16, device=device), rand(4, 4, 3, 3, dtype=F16, device=device)
    refuses(ValueRangeError, "tf32 is for float32, but x has dtype float16", ops.conv2d, x, w, tf32=True)
    with pytest.raises(ValueRangeError, match="activation must be None or one of 'relu', .*, got 'none'"):
        ops.conv2d(x, w, activation="none")
    with pytest.raises(ValueRangeError, match=r"method must be one of .*, got \[\]"):
        ops.transpose(a, method=[])


def test_a_plan_of_a_convolution_is_followed_or_refused(device):
    x, w = rand(1, 4, 5, 5, dtype=F16, device=device), rand(4, 4, 3, 3, dtype=F16, device=device)
    plan = conv_plan(x, w)
    with pytest.raises(PlanError, match="plan has method 'implicit', this call asks for method='im2col'"):
        ops.conv2d(x, w, plan=plan, method="im2col")
    narrow = rand(4, 1, 3, 3, dtype=F16, device=device)
    direct = conv_plan(x, narrow, groups=4, method="implicit")
    assert direct.method == "direct"  # which writes no columns either
    ops.conv2d(x, narrow, groups=4, method="implicit", plan=direct)
    with pytest.raises(PlanError, match="plan is for h100, this call is on"):
        ops.conv2d(x, w, plan=replace(plan, device=device_named("h100")))


@pytest.mark.parametrize(("changes", "words"), [
    ({"rows": 24}, "rows must be a power of two from 16 to 256, got 24"),
    ({"columns": 512}, "columns must be a power of two from 16 to 256, got 512"),
    ({"depth": 32.0}, r"depth must be an int, got 32\.0"),
    ({"num_warps": 3}, "num_warps must be a power of two from 1 to 32, got 3"),
    ({"num_stages": 0}, "num_stages must be from 1 to 8, got 0"),
    ({"splits": 1 << 16}, "splits must be from 1 to 65535, got 65536"),
])  # fmt: skip
def test_a_tile_of_a_convolution(changes, words):
    plan = conv_plan(torch.empty(1, 16, 5, 5, dtype=F16), torch.empty(16, 16, 3, 3, dtype=F16))
    with pytest.raises(PlanError, match=f"plan field forward: {words}"):
        plan.with_tile("forward", **changes)
    refuses(PlanError, "part must be one of 'forward', 'input', 'weight', got 'dx'", plan.with_tile, "dx", rows=16)


def test_a_gradient_that_lies_more_widely_than_the_result_gets_wide_offsets():
    """As the gradient of one of many results that were joined: a view of a tensor of more than 2^31 elements."""
    x, w = torch.empty(8, 16, 8, 8, dtype=F16, device="meta"), torch.empty(16, 16, 1, 1, dtype=F16, device="meta")
    call = conv._call(x, w, None, 1, 0, 1, 1, "auto", None, False, None)
    joined = torch.empty(8, 1 << 23, 8, 8, dtype=F16, device="meta")
    near, far = (conv.problem_of(x, w, call, dy) for dy in (torch.empty_like(x), joined[:, :16]))
    assert (near.wide64, far.wide64) == (False, True)


@pytest.fixture
def weight(device):
    return quant.quantize_weight(rand(16, 64, dtype=F32, device=device), 4, 32)


def test_lowbit_options(weight, device):
    x = rand(3, 64, dtype=F16, device=device)
    for given in (x, x.clone().requires_grad_()):
        for plan in ("x", []):
            refuses(DtypeError, "plan must be a LowbitPlan or None, got", ops.lowbit_matmul, given, weight, plan=plan)
    refuses(DtypeError, "weight must be a tilefold.quant.QuantizedTensor, got Tensor", ops.lowbit_matmul_plan, x, x)
    with pytest.raises(DtypeError, match="deterministic must be True or False, got 1"):
        ops.lowbit_matmul_plan(x, weight, deterministic=1)


@pytest.mark.parametrize(("changes", "words"), [
    ({"block_n": 48}, "block_n must be a power of two from 1 to 256, got 48"),
    ({"num_warps": 64}, "num_warps must be a power of two from 1 to 32, got 64"),
    ({"stages": 1000}, "stages must be an integer from 1 to 16, got 1000"),
    ({"registers": "x"}, "registers must be an integer from 0 to 255, got 'x'"),
    ({"splits": 0}, "splits must be an integer from 1 to 65535, got 0"),
])  # fmt: skip
def test_a_plan_of_few_bits(changes, words, weight, device):
    plan = ops.lowbit_matmul_plan(rand(3, 64, dtype=F16, device=device), weight)
    with pytest.raises(PlanError, match=f"plan field {words}"):
        replace(plan, **changes)


def test_lowbit_results_keep_their_dtype_under_autocast(weight, device):
    """torch's product, which the planner takes for fp32 and for many rows, follows autocast; this one says x's dtype."""
    x = rand(3, 64, dtype=F32, device=device)
    wanted = ops.lowbit_matmul(x, weight)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(ops.lowbit_matmul(x, weight), wanted)
        given = None, None, *(getattr(weight, name) for name in lowbit.FIELDS), 4, 32, 16, 64, False, "", "fast"
        assert lowbit._gradients(given, wanted, (wanted,), (True, False))[0].dtype == F32


def test_the_gradient_of_a_bias_beside_a_single_row(weight, device):
    x, bias = rand(64, dtype=F32, device=device), rand(16, dtype=F32, device=device).requires_grad_()
    ops.lowbit_matmul(x, weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.ones_like(bias))


# ---------------------------------------------------------------- quantize


def model(device="cpu"):
    """Three linear layers, fresh memory filled."""
    made = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64))
    for parameter in made.parameters():
        parameter.data = rand(*parameter.shape, dtype=torch.float32)
    return made.to(device)


def low(made):
    return [name for name, module in made.named_modules() if isinstance(module, LowBitLinear)]


def test_a_pattern_that_matches_nothing_raises():
    made = model()
    for skip, message in (
        ("lm_head", "skip 'lm_head' matches no linear layer; there are 3: 0, 2.0, 3"),
        ("2.", "matches no linear layer"),  # a part of a name's part
        ([3], "skip must be names, globs or a predicate, got 3"),
        (3, "skip must be names, globs or a predicate, got 3"),
        (torch.nn.Linear, "skip must be names, .* got the class Linear"),
    ):
        with pytest.raises(ValueRangeError, match=message):
            tilefold.quantize(made, skip=skip, progress=False)
    with pytest.raises(DeviceError, match="device must be one that torch has here, got 'gpu'"):
        tilefold.quantize(made, device="gpu", progress=False)
    assert not low(made)


def test_the_run_over_inputs_leaves_every_module_in_its_mode():
    """A part that is frozen in evaluation stays so in a model that trains, and its statistics stay."""
    made = model().train()
    made[1].eval()
    before = {name: tensor.clone() for name, tensor in made[1].state_dict().items()}
    report = tilefold.quantize(made, 8, inputs=rand(4, 64, dtype=torch.float32), progress=False)
    assert all(layer.output_error is not None for layer in report.layers) and len(low(made)) == 3
    assert made.training and made[2].training and not made[1].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in made[1].state_dict().items())


def test_modules_and_files(tmp_path):
    weight = quant.quantize_weight(rand(64, 64, dtype=torch.float32))
    refuses(DtypeError, "linear must be a torch.nn.Linear, got Tensor", LowBitLinear.from_linear, rand(64, 64))
    refuses(DtypeError, "bias must be a torch.Tensor or None, got list", LowBitLinear, weight, [0.0] * 64)
    with pytest.raises(ValueRangeError, match="model must be a torch.nn.Module, got dict"):
        save_quantized({}, tmp_path / "x.safetensors")
    refuses(ValueRangeError, "model must be a torch.nn.Module, got dict", load_quantized, {}, {})
    refuses(ValueRangeError, "source must be a state_dict or an existing file, got int", load_quantized, model(), 3)


def test_weights_that_are_none():
    weight = rand(64, 64, dtype=torch.float32)
    for given, error, message in (
        ([1.0], DtypeError, "w must be a torch.Tensor, got list"),
        (weight.to("meta"), DeviceError, "w is on the meta device"),
        (weight.to_sparse(), LayoutError, "w must be a dense strided tensor, got layout torch.sparse_coo"),
    ):
        with pytest.raises(error, match=message):
            quant.quantize_weight(given)
    refuses(DtypeError, "q must be a QuantizedTensor, got Tensor", quant.dequantize, weight)
    refuses(DtypeError, "codes must be uint8, got list", quant.pack, [1], 4)
    refuses(DtypeError, "packed must be int32, got list", quant.unpack, [1], None, 4, (64, 64))
