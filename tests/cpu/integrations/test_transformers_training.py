"""Training through `attn_implementation="tilefold"`: loss curves, checkpoints, dropout; and torch.compile without breaks."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", exc_type=ImportError, reason="needs the transformers extra")

import hf_models
from cases import one_graph
from hf_models import judge_compiled, logits, made_by, make, padded, trained


@pytest.fixture(autouse=True)
def registered():
    hf_models.register_exact()


@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_loss_curves(family, device):
    """As close to the oracle's in fp64 as eager's, twice over; sinks are trained too."""
    model = make(family, device, initializer_range=0.1)
    batches = [padded(2, 6, left, device) for left in (True, False)]
    exact = trained(made_by(model, "exact", double=True), batches, 3, 0.05)
    eager = trained(made_by(model, "eager"), batches, 3, 0.05)
    found = trained(made_by(model, "tilefold"), batches, 3, 0.05)
    assert abs(found[-1] - found[0]) > 1e-3, "nothing was learnt"
    limit = 2 * max(abs(a - b) for a, b in zip(eager, exact, strict=True)) + 1e-6
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) <= limit, (found, eager, exact)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints(reentrant, device):
    """The same gradients, dropped weights included: the second run of a layer drops what the first did."""
    model = made_by(make("mistral", device, attention_dropout=0.3), "tilefold").train()
    ids, mask = padded(2, 8, device=device)

    def gradients(model):
        torch.manual_seed(3)
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters()]

    kept = gradients(copy.deepcopy(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for one, other in zip(kept, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_position_bias(device):
    """T5 learns what it adds to the scores, in its encoder and its decoder."""
    from tilefold.reference import compare, deviating

    model = make("t5", device)
    model.set_attn_implementation("tilefold")
    if model.config._attn_implementation != "tilefold":
        pytest.skip("this transformers does not send T5's attention through AttentionInterface")
    ids, mask = padded(2, 7, False, device)

    def gradients_of(other):
        other.zero_grad()
        other(input_ids=ids, attention_mask=mask, labels=ids[:, :5].contiguous()).loss.backward()
        return [p.grad.clone() for name, p in other.named_parameters() if "relative_attention_bias" in name]

    double = made_by(model, "exact", double=True)
    found = [gradients_of(made_by(model, "tilefold")), gradients_of(double)]
    found.append(deviating(lambda: gradients_of(double), torch.float32))
    assert len(found[0]) == 2
    for got, exact, plain in zip(*found, strict=True):
        assert float(exact.abs().max()) > 0
        result = compare(got, exact, plain)
        assert result.ok, str(result)


def test_dropout_is_for_training_only(device):
    model = made_by(make("llama", device, attention_dropout=0.5), "tilefold")
    ids, _ = padded(1, 8, device=device)
    plain = logits(model, input_ids=ids)
    assert torch.equal(plain, logits(model, input_ids=ids))
    assert not torch.allclose(plain, logits(model.train(), input_ids=ids))


@pytest.mark.no_poison
@pytest.mark.xdist_group("compile")
@pytest.mark.parametrize(("family", "padding"), [("qwen2", True), ("gemma3", True), ("mistral", False)])
def test_compiled_layers(family, padding, device):
    """A decoder layer is one graph, with whatever form its mask has."""
    torch._dynamo.reset()
    model = made_by(make(family, device), "tilefold")
    ids, mask = padded(2, 8, device=device)
    given = {"attention_mask": mask} if padding else {}
    eager = logits(model, input_ids=ids, use_cache=False, **given)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(model, input_ids=ids, use_cache=False, **given), eager)


@pytest.mark.no_poison
@pytest.mark.xdist_group("compile")
def test_compiled_layers_train(device):
    torch._dynamo.reset()
    ids, mask = padded(2, 12, device=device)
    model = make("qwen2", device, torch.bfloat16, initializer_range=0.05)
    judge_compiled(model, "aot_eager", input_ids=ids, attention_mask=mask)


@pytest.mark.no_poison
@pytest.mark.xdist_group("compile")
def test_a_compiled_model(device):
    """The masks are made inside the graph; so is the backward pass."""
    model = made_by(make("gemma3", device), "tilefold")
    ids, mask = padded(2, 8, device=device)
    for given in ({}, {"attention_mask": mask}):
        results = []
        for call in (model, one_graph(model)):
            model.zero_grad()
            loss = call(input_ids=ids, labels=ids, use_cache=False, **given).loss
            loss.backward()
            results.append((loss.detach(), *(p.grad for p in model.parameters())))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
