"""`sparsify(.., trainable=True)`: gates that start closed, the whole formula in fp64, parameters saved and loaded apart."""

import copy

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.42", exc_type=ImportError, reason="needs diffusers 0.42")

import video_models as small
from cases import one_graph
from cases.refusals import refuses
from tilefold import video
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.video import attend

HALF = video.Pooled(sparsity=0.5)


def opened(family, **options):
    """A trainable model whose gates are not 0."""
    model, inputs = small.FAMILIES[family](**options)
    video.sparsify(model, HALF, cube=small.CUBE, trainable=True)
    with torch.no_grad():
        for one in video.trainable_parameters(model).values():
            one.normal_(0, 0.5)
    return model, inputs


@pytest.mark.parametrize("family", small.FAMILIES)
def test_starts_as_sparse_learns_and_goes_back(family):
    model, inputs = small.FAMILIES[family]()
    dense, names = small.sample(model, inputs), list(model.state_dict())
    video.sparsify(model, HALF, cube=small.CUBE)
    wanted = small.sample(model, inputs)
    video.desparsify(model)
    sparse = video.sparsify(model, HALF, cube=small.CUBE, trainable=True)
    assert torch.equal(small.sample(model, inputs), wanted)
    added = video.trainable_parameters(model)
    assert len(added) == 2 * len(sparse.layers)
    assert {id(one) for one in added.values()} <= {id(one) for one in model.parameters()}
    assert len(model.state_dict()) == len(names) + len(added)
    model(**inputs).sample.square().mean().backward()
    assert all(one.grad.abs().max() > 0 for one in added.values())
    assert all(one.to_q.weight.grad.abs().max() > 0 for one in sparse.layers)
    torch.optim.SGD(added.values(), 1.0).step()
    assert not torch.equal(small.sample(model, inputs), wanted)
    video.desparsify(model)
    assert list(model.state_dict()) == names
    assert torch.equal(small.sample(model, inputs), dense)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_against_fp64(family, monkeypatch):
    """fine + gate * coarse with its gradients, in padding, text and a batch."""
    model, inputs = opened(family)
    weight = torch.randn(inputs["hidden_states"].shape)
    recorded = small.Recorded()
    model.__dict__["_tilefold_sparse"].observe = recorded
    got = small.gradients(model, inputs, weight)
    gates = list(video.trainable_parameters(model))
    twin, given = small.twin_of(model, monkeypatch), small.double_of(inputs)
    mine = attend.add_coarse

    def formula(q, k, v, fine, gate, tiling, scale):
        if q.dtype != torch.float64:
            return mine(q, k, v, fine, gate, tiling, scale)
        slots, live = tiling.slots, torch.arange(tiling.slots) < tiling.block_sizes()[:, None]
        rows = [
            (x.unflatten(1, (-1, slots)) * live[:, :, None, None]).sum(2) / live.sum(1)[:, None, None]
            for x in (q, k, v)
        ]
        chance = (torch.einsum("bqhd,bkhd->bhqk", *rows[:2]) * scale).softmax(-1)
        coarse = torch.einsum("bhqk,bkhd->bqhd", chance, rows[2]).repeat_interleave(slots, 1)
        return fine + gate * coarse * live.view(1, -1, 1, 1)

    monkeypatch.setattr(attend, "add_coarse", formula)
    monkeypatch.setattr("tilefold.video.model.add_coarse", formula)
    sparse = twin.__dict__["_tilefold_sparse"]
    sparse.policy, sparse.observe = recorded.policy(), None
    assert list(video.trainable_parameters(twin)) == gates
    small.held(twin, given, weight, got)


@pytest.mark.usefixtures("torch_cpu")
def test_saved_and_loaded_apart(tmp_path):
    pytest.importorskip("safetensors")
    model, inputs = opened("hunyuan")
    path = tmp_path / "gates.safetensors"
    video.save_trained(model, path)
    wanted = small.sample(model, inputs)
    other = copy.deepcopy(model)
    for one in video.trainable_parameters(other).values():
        torch.nn.init.zeros_(one)
    assert torch.equal(small.sample(model, inputs), wanted), "a copy has gates of its own"
    assert not torch.equal(small.sample(other, inputs), wanted)
    video.load_trained(other, path)
    assert torch.equal(small.sample(other, inputs), wanted)
    held = {name: one.detach() for name, one in video.trainable_parameters(model).items()}
    name = "layers.0.gate.bias"
    less = {key: one for key, one in held.items() if key != name}
    refuses(ValueRangeError, f"missing ['{name}'], left over []", video.load_trained, other, less)
    refuses(ValueRangeError, "left over ['x']", video.load_trained, other, {**held, "x": held[name]})
    refuses(ShapeError, f"source: {name} is ", video.load_trained, other, {**held, name: held[name][1:]})
    refuses(DtypeError, "source must be tensors by name or a path, got int", video.load_trained, other, 3)


@pytest.mark.usefixtures("torch_cpu")
def test_gates_of_fastvideo(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model, inputs = opened("wan", layers=2)
    wanted = small.sample(model, inputs)
    held = {
        "blocks." + name[7:].replace("gate", "to_gate_compress"): one.detach().clone()
        for name, one in video.trainable_parameters(model).items()
    }
    assert "blocks.1.to_gate_compress.weight" in held
    for one in video.trainable_parameters(model).values():
        torch.nn.init.zeros_(one)
    beside = {"blocks.0.to_q.weight": torch.zeros(1)}
    save_file({**held, **beside}, tmp_path / "model.safetensors")
    for source in (held | beside, tmp_path, tmp_path / "model.safetensors"):
        video.load_fastvideo_gates(model, source)
        assert torch.equal(small.sample(model, inputs), wanted)
    less = {key: one for key, one in held.items() if not key.startswith("blocks.1")}
    refuses(ValueRangeError, "missing ['layers.1.gate.bias'", video.load_fastvideo_gates, model, less)
    refuses(ValueRangeError, "source holds no blocks.N.to_gate_compress", video.load_fastvideo_gates, model, beside)


@pytest.mark.usefixtures("torch_cpu")
@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_gradient_checkpointing(family):
    model, inputs = opened(family)
    found = []
    for _ in range(2):
        model.train().zero_grad()
        model(**inputs).sample.sum().backward()
        found.append([one.grad for one in video.trainable_parameters(model).values()])
        model.enable_gradient_checkpointing()
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="small models on the CPU")
@pytest.mark.long
@pytest.mark.no_poison
def test_compiled():
    model, inputs = opened("wan")
    wanted = small.sample(model, inputs)
    assert torch.allclose(small.sample(one_graph(model), inputs), wanted, rtol=1e-4, atol=1e-5)


def test_refusals():
    model, _ = small.wan()
    refuses(ValueRangeError, "model has no gates to be trained", video.trainable_parameters, model)
    refuses(DtypeError, "trainable must be True or False, got 1", video.sparsify, model, trainable=1)

    class Mine(video.Adapter):
        def layers(self, model):
            return [model]

    linear = torch.nn.Linear(1, 1)
    with pytest.raises(Unsupported, match=r"adapter Mine has no method sizes\(layer\)"):
        video.sparsify(linear, adapter=Mine(), trainable=True)
    assert "forward" not in linear.__dict__, "nothing was changed"
