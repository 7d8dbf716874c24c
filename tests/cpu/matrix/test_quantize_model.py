"""quantize: which layers, which not and why, ties, devices, the report's figures; saved models load into fresh ones."""

import copy
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import cases
import tilefold
from cases.refusals import refuses
from tilefold.errors import ShapeError, TilefoldError, Unsupported, ValueRangeError
from tilefold.nn import LowBitLinear, QuantizeReport
from tilefold.quant import quantize_weight

D, HIDDEN, WORDS = 128, 192, 160
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "lowbit_linear.md"


def rand(*shape):
    return cases.rand(*shape, device=DEVICE)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Words to words; tied: the head is the embedding's weight."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, WORDS, bias=False)
        for name, parameter in self.named_parameters():  # fresh memory is NaN in tests
            parameter.data = rand(*parameter.shape) * (
                D**-0.5 if name.endswith("weight") and parameter.dim() == 2 else 0.1
            )
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words, scale=1.0):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


def words(rows=3):
    return torch.randint(0, WORDS, (rows, 7), device=DEVICE)


def quantised(model, *arguments, **options) -> QuantizeReport:
    return tilefold.quantize(model, *arguments, progress=False, **options)


def low(model):
    return [name for name, module in model.named_modules() if isinstance(module, LowBitLinear)]


NAMES = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]


def test_all_linear_layers_in_place():
    model = Model()
    before, plain = copy.deepcopy(model), words()
    report = quantised(model.eval(), 8)
    assert low(model) == NAMES == [layer.name for layer in report.layers] and not report.skipped
    assert not any(layer.training for layer in model.modules())
    for name in NAMES:
        kept, made = before.get_submodule(name), model.get_submodule(name)
        assert made.weight == quantize_weight(kept.weight, 8)
        assert (made.bias is None) == (kept.bias is None)
    assert torch.equal(model.embed.weight, before.embed.weight)
    with torch.no_grad():
        want = before(plain)
        assert (model(plain) - want).norm() < 0.02 * want.norm()


def test_options_reach_the_weights():
    model, kept = Model(), Model()
    kept.load_state_dict(model.state_dict())
    quantised(model, 3, 64, refine="hqq", dtype=torch.float16)
    for name in NAMES:
        want = quantize_weight(kept.get_submodule(name).weight, 3, 64, refine="hqq", dtype=torch.float16)
        assert model.get_submodule(name).weight == want
    model = Model()
    quantised(model, 8, per="channel", scheme="symmetric")
    assert "bits=8, a scale a row, symmetric" in repr(model.head)


# ---------------------------------------------------------------- what is left alone


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("head", {"head"}),
        (["blocks.0", "head"], {"blocks.0.up", "blocks.0.down", "head"}),
        ("up", {"blocks.0.up", "blocks.1.up"}),
        ("*.1.*", {"blocks.1.up", "blocks.1.down"}),
        (("blocks.*.down",), {"blocks.0.down", "blocks.1.down"}),
        (lambda name, module: module.bias is None, {"blocks.0.down", "blocks.1.down", "head"}),
    ],
)
def test_skip(skip, left):
    model = Model()
    report = quantised(model, skip=skip)
    assert {one.name for one in report.skipped} == left == set(NAMES) - set(low(model))
    assert all(one.why == "as asked" for one in report.skipped)


class Own(nn.Linear):
    pass


def test_layers_that_cannot_or_should_not():
    model = nn.ModuleDict(
        {
            "good": nn.Linear(D, D),
            "own": Own(D, D),
            "attention": nn.MultiheadAttention(D, 2),
            "layer": nn.TransformerEncoderLayer(D, 2, HIDDEN),
            "hooked": nn.Linear(D, D),
            "wide": nn.Linear(D, D).double(),
            "small": nn.Linear(D, 2),
            "meta": nn.Linear(D, D, device="meta"),
            "normed": torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D)),
        }
    )
    nn.init.normal_(model["good"].weight)
    model["hooked"].register_forward_hook(lambda *given: None)
    report = quantised(model)
    assert low(model) == ["good"]
    why = {one.name: one.why for one in report.skipped}
    for name, text in (
        ("own", "Own is a class of its own"),
        ("attention.out_proj", "NonDynamicallyQuantizableLinear is a class of its own"),
        ("layer.linear1", "torch's TransformerEncoderLayer reads the weight by itself"),
        ("hooked", "hooks or parametrisations"),
        ("wide", "torch.float64"),
        ("small", r"it would be larger (4096 bytes, now 1024)"),
        ("meta", "meta device"),
        ("normed", "class of its own"),
    ):
        assert text in why[name]
    assert len(why) == 10  # linear2 and the out_proj of the layer, too


def test_refusals_change_nothing():
    model = Model()
    for arguments, options, error, message in (
        ((5,), {}, ValueRangeError, "bits must be one of"),
        ((4, 48), {}, ValueRangeError, "group must be None, a multiple of 32"),
        ((), {"scheme": "odd"}, ValueRangeError, "scheme must be one of"),
        ((), {"refine": "hqq", "scheme": "symmetric"}, Unsupported, "refine='hqq' moves zero points"),
        ((), {"tied": "maybe"}, ValueRangeError, "tied must be one of"),
    ):
        with pytest.raises(error, match=message):
            quantised(model, *arguments, **options)
        assert not low(model)
    refuses(ValueRangeError, "model must be a module that holds linear layers", quantised, nn.Linear(4, 4))
    model.blocks[1].up.weight.data[3, 3] = float("nan")
    refuses(ValueRangeError, "blocks.1.up: w must be finite, got 1 NaN", quantised, model)


# ---------------------------------------------------------------- shared weights


def test_a_head_tied_to_the_embedding_is_left_alone_or_copied():
    model = Model(tied=True)
    report = quantised(model)
    assert [(one.name, "its weight is embed.weight, too" in one.why) for one in report.skipped] == [("head", True)]
    assert model.head.weight is model.embed.weight
    model = Model(tied=True)
    report = quantised(model, tied="quantize")
    assert low(model) == NAMES and not report.skipped
    assert model.head.weight == quantize_weight(model.embed.weight)
    assert report.after == report.before - sum(layer.before for layer in report.layers[:-1]) + sum(
        layer.after for layer in report.layers
    )


def test_layers_that_share_a_weight_share_it_still():
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    nn.init.normal_(first.weight)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second, "again": first})
    report = quantised(model)
    assert model["a"] is model["again"] and model["a"] is not model["b"]
    assert model["a"].packed is model["b"].packed
    assert [layer.shares for layer in report.layers] == [False, True]
    assert report.after == model["a"].weight.nbytes + 2 * first.bias.nbytes
    assert "b (shared)" in str(report)


def test_conv1d_of_transformers():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(HIDDEN, D).to(DEVICE)
    layer.weight.data = rand(D, HIDDEN) * D**-0.5
    model, x = nn.Sequential(layer), rand(3, D)
    want = model(x).detach()
    quantised(model, 8)
    assert model[0].weight == quantize_weight(layer.weight.t(), 8) and model[0].out_features == HIDDEN
    assert (model(x) - want).norm() < 0.02 * want.norm()


def test_the_originals_are_gone_as_it_goes(monkeypatch):
    """A layer's weight must not wait for the last one's."""
    from tilefold.nn import convert

    model = Model()
    weights = {name: weakref.ref(model.get_submodule(name).weight) for name in NAMES}
    alive = []
    real = convert.replaced

    def watched(*arguments):
        gc.collect()
        alive.append(sum(ref() is not None for ref in weights.values()))
        return real(*arguments)

    monkeypatch.setattr(convert, "replaced", watched)
    quantised(model)
    assert alive == [5, 4, 3, 2, 1] or alive == [5, 5, 4, 3, 2]


def test_device_moves_all_of_the_model():
    model = Model()
    report = quantised(model.cpu(), device=DEVICE)
    assert model(words()).shape == (3, 7, WORDS)
    assert low(model) == NAMES and report.before > report.after


# ---------------------------------------------------------------- the report


def test_errors_and_bytes():
    model, given = Model(), words(4)
    kept = copy.deepcopy(model)
    report = quantised(model, inputs=(given,))
    assert model.training
    for layer in report.layers:
        w, back = kept.get_submodule(layer.name).weight.detach(), model.get_submodule(layer.name).weight.dequantize()
        assert layer.weight_error == pytest.approx(float((w - back).norm() / w.norm()), rel=1e-4)
        assert 0.05 < layer.weight_error < 0.15 and 0.03 < layer.output_error < 0.2
        assert layer.before == w.nbytes and layer.after == model.get_submodule(layer.name).weight.nbytes
    # The first layer's inputs, all 28 rows of them, are at hand.
    x = kept.blocks[0].norm(kept.embed(given)).detach().flatten(0, 1)
    w, back = kept.blocks[0].up.weight.detach(), model.blocks[0].up.weight.dequantize()
    assert report.layers[0].output_error == pytest.approx(float((x @ (w - back).T).norm() / (x @ w.T).norm()), rel=1e-3)
    assert report.before == sum(p.nbytes for p in kept.parameters())
    assert report.after == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def test_inputs_by_name_and_layers_that_saw_none():
    model = Model()
    model.idle = nn.Linear(D, D).to(DEVICE)
    model.idle.weight.data = rand(D, D)
    report = quantised(model, inputs={"words": words(), "scale": 2.0})
    assert [layer.name for layer in report.layers if layer.output_error is None] == ["idle"]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_table():
    report = quantised(Model(tied=True), skip="blocks.1.down", inputs=words())
    text = str(report)
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["layers", "shape", "bits"]
    (up,) = [line for line in lines if line.startswith("blocks.*.up")]
    assert up.split()[1:6] == ["x2", "192", "x", "128", "4"] and up.count("%") == 4
    assert lines[2].startswith("blocks.0.down ")  # a single one keeps its name
    assert (
        "left alone (1): blocks.*.down: as asked" in text and "left alone (1): head: its weight is embed.weight" in text
    )
    assert lines[-1].startswith("the whole model: ") and lines[-1].endswith("times less")


def test_a_bar_is_shown_where_rich_is(capsys):
    pytest.importorskip("rich")
    tilefold.quantize(Model(), progress=True)
    assert capsys.readouterr().out == ""  # on standard error, if anywhere


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_models_load_into_fresh_ones(tmp_path, suffix, tied):
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    model, path = Model(tied=tied), tmp_path / f"model.{suffix}"
    quantised(model, 4, 64, skip="blocks.1.up", tied="skip")
    if suffix == "pt":
        torch.save(model.state_dict(), path)
    else:
        tilefold.save_quantized(model, path)
    fresh = Model(tied=tied)
    assert tilefold.load_quantized(fresh, path) is fresh
    assert low(fresh) == low(model)
    given = words()
    assert torch.equal(fresh(given), model(given))
    assert (fresh.head.weight is fresh.embed.weight) == tied
    assert fresh.blocks[0].up.packed.data_ptr() != model.blocks[0].up.packed.data_ptr()


def test_a_quantised_copy_of_a_tied_head_loads():
    model, fresh, given = Model(tied=True), Model(tied=True), words()
    quantised(model, tied="quantize")
    tilefold.load_quantized(fresh, model.state_dict())
    assert torch.equal(fresh(given), model(given)) and low(fresh) == NAMES


def test_shared_codes_are_written_and_kept_once(tmp_path):
    pytest.importorskip("safetensors")

    def twins():
        first, second = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        first.weight.data, first.bias.data = rand(D, D), rand(D)
        second.weight = first.weight
        return nn.ModuleDict({"a": first, "b": second})

    model, fresh = twins(), twins()
    quantised(model)
    tilefold.save_quantized(model, tmp_path / "twins.safetensors")
    size = (tmp_path / "twins.safetensors").stat().st_size
    assert size < 1.5 * model["a"].weight.nbytes + 2048
    tilefold.load_quantized(fresh, tmp_path / "twins.safetensors")
    assert fresh["a"].packed is fresh["b"].packed and fresh["a"].weight == model["a"].weight
    assert torch.equal(fresh["a"].bias, model["a"].bias) and fresh["b"].bias is None


def test_onto_the_meta_device():
    model, given = Model(), words()
    quantised(model)
    with torch.device("meta"):
        fresh = nn.ModuleDict({"inner": nn.Linear(D, WORDS, bias=False), "embed": nn.Embedding(WORDS, D)})
    state = {f"inner.{k}": v for k, v in model.head.state_dict().items()} | {
        "embed.weight": model.embed.weight.detach()
    }
    tilefold.load_quantized(fresh, state, assign=True)
    assert torch.equal(fresh["inner"](fresh["embed"](given)), model.head(model.embed(given)))
    with torch.device("meta"):
        fresh = nn.ModuleDict({"norm": nn.BatchNorm1d(D)})
        fresh["norm"].register_buffer("rate", torch.zeros(3), persistent=False)
    with pytest.raises(ValueRangeError, match=r"\['norm.rate'\] are still on the meta device"):
        tilefold.load_quantized(fresh, nn.ModuleDict({"norm": nn.BatchNorm1d(D)}).state_dict(), assign=True)


def test_what_does_not_fit_says_so(tmp_path):
    model = Model()
    quantised(model)
    state = model.state_dict()
    for change, message in (
        ({"odd": torch.ones(1)}, r"left over \['odd'\]"),
        ({"blocks.0.norm.bias": None}, r"missing \['blocks.0.norm.bias'\]"),
        ({"embed.weight": torch.ones(3, D)}, "size mismatch for embed.weight"),
        ({"head.scales": None}, "head.packed but no head.scales"),
    ):
        broken = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        with pytest.raises(ValueRangeError, match=message):
            tilefold.load_quantized(Model(), broken)
    other = Model()
    other.head = nn.Linear(D, WORDS + 1, bias=False)
    with pytest.raises(ValueRangeError, match=r"head is \[161, 128\] in the model, \[160, 128\] in the source"):
        tilefold.load_quantized(other, state)
    refuses(ValueRangeError, "existing file", tilefold.load_quantized, Model(), tmp_path / "none.safetensors")
    assert issubclass(ShapeError, TilefoldError)


@pytest.mark.no_poison
@pytest.mark.interpreter
def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(examples) == 1
    names: dict[str, object] = {}
    exec(examples[0], names)
    with torch.no_grad():
        x = torch.randn(2, 512, dtype=torch.bfloat16)
        assert torch.equal(names["fresh"](x), names["model"](x))
