"""quantize, LowBitLinear, files and tilefold.quant called wrongly; and what a call must leave as it was."""

import pytest
import torch
from torch import nn

import tilefold
from cases import rand
from tilefold import quant
from tilefold.errors import DeviceError, DtypeError, LayoutError, ValueRangeError
from tilefold.nn import LowBitLinear, load_quantized, save_quantized


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
    ):
        with pytest.raises(ValueRangeError, match=message):
            tilefold.quantize(made, skip=skip, progress=False)
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
    with pytest.raises(DtypeError, match="linear must be a torch.nn.Linear, got Tensor"):
        LowBitLinear.from_linear(rand(64, 64))
    with pytest.raises(DtypeError, match="bias must be a torch.Tensor or None, got list"):
        LowBitLinear(weight, [0.0] * 64)
    with pytest.raises(ValueRangeError, match="model must be a torch.nn.Module, got dict"):
        save_quantized({}, tmp_path / "x.safetensors")
    with pytest.raises(ValueRangeError, match="model must be a torch.nn.Module, got dict"):
        load_quantized({}, {})
    with pytest.raises(ValueRangeError, match="source must be a state_dict or an existing file, got int"):
        load_quantized(model(), 3)


def test_weights_that_are_none():
    weight = rand(64, 64, dtype=torch.float32)
    for given, error, message in (
        ([1.0], DtypeError, "w must be a torch.Tensor, got list"),
        (weight.to("meta"), DeviceError, "w is on the meta device"),
        (weight.to_sparse(), LayoutError, "w must be a dense strided tensor, got layout torch.sparse_coo"),
    ):
        with pytest.raises(error, match=message):
            quant.quantize_weight(given)
    with pytest.raises(DtypeError, match="q must be a QuantizedTensor, got Tensor"):
        quant.dequantize(weight)
    with pytest.raises(DtypeError, match="codes must be uint8, got list"):
        quant.pack([1], 4)
    with pytest.raises(DtypeError, match="packed must be int32, got list"):
        quant.unpack([1], None, 4, (64, 64))
