"""Calibration: heads that were planted are found, the fitted policy beats one for all heads, and policies as text."""

import itertools

import pytest
import torch

from cases.refusals import refuses
from tilefold import video
from tilefold.errors import DtypeError, Unsupported, ValueRangeError
from tilefold.video.calibrate import Calibration, calibrate, fit, model_error, policy_from_json, policy_to_json
from tilefold.video.planted import Planted, PlantedAdapter
from torch_cpu import torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

GRID, CUBE = (8, 8, 12), (2, 4, 4)
KINDS = [["local", "scattered", "global", "local"], ["scattered", "local", "global", "scattered"]]
OPTIONS = {"cube": CUBE, "adapter": PlantedAdapter()}


def planted():
    model = Planted(GRID, KINDS, channels=16)
    return model, [{"hidden_states": torch.randn(1, model.tiling.tokens, 16)} for _ in range(2)]


def test_planted_heads_are_found_and_the_fit_beats_one_policy_for_all():
    """By concentration and by what a window leaves out of them; the fit needs fewer pairs for the error of one policy for all."""
    torch.manual_seed(0)
    model, inputs = planted()
    before = model(**inputs[0])
    window, half = video.SlidingTile(1), video.Pooled(sparsity=0.5)
    candidates = (half, *(video.Pooled(sparsity=one) for one in (0.7, 0.8, 0.9)), video.SlidingTile((0, 1, 1)), window)
    found = calibrate(model, inputs, candidates, **OPTIONS)
    assert torch.equal(model(**inputs[0]), before), "the model is as it was"
    assert found.candidates == (*candidates, video.Dense())
    assert found.listed.shape == (2, 2, 7, 4) and found.gini.shape == (2, 2, 4)
    error, at = found.error.mean(0), found.candidates.index(window)
    for layer, head in itertools.product(range(2), range(4)):
        by_window, by_score = float(error[layer, at, head]), float(error[layer, 0, head])
        told = "scattered" if by_window > 4 * by_score else "local"
        told = "global" if float(found.gini[:, layer, head].max()) < 0.1 else told
        assert told == KINDS[layer][head], (layer, head, by_window, by_score)
    pairs = []
    for number, uniform in enumerate(candidates[1:4], 1):
        limit = model_error(model, inputs, found.outputs, uniform, **OPTIONS)
        fitted = fit(model, inputs, found, limit, **OPTIONS)
        assert 0 < fitted.error <= limit
        pairs.append((fitted.listed, float(found.listed[:, :, number].mean())))
    assert all(own <= uniform for own, uniform in pairs)
    assert sum(own < uniform for own, uniform in pairs) >= 2, (
        "of few heads and few blocks there is not always a cheaper choice"
    )
    assert fitted.error == model_error(model, inputs, found.outputs, fitted.policy, **OPTIONS)
    again = policy_from_json(policy_to_json(fitted.policy))
    assert model_error(model, inputs, found.outputs, again, **OPTIONS) == fitted.error


def test_dense_meets_any_error():
    model, inputs = planted()
    found = calibrate(model, inputs[:1], (video.SlidingTile(0),), **OPTIONS)
    fitted = fit(model, inputs[:1], found, 1e-6, **OPTIONS)
    assert fitted.listed == 1 and fitted.error <= 1e-6 and not fitted.policy.policies


def test_choices():
    """The least share of pairs + weight * error of each head, by trying all; costs and policies of a choice."""
    torch.manual_seed(3)
    listed, error = torch.rand(2, 3, 4, 2), torch.rand(2, 3, 4, 2)
    energy = torch.rand(2, 3, 2)
    kinds = tuple(video.Pooled(sparsity=one) for one in (0.2, 0.4, 0.6))
    found = Calibration((*kinds, video.Dense()), listed, listed, error, energy, torch.zeros(2, 3, 2), ())
    away = (error.double().square() * energy[:, :, None]).sum(0) / energy.double().sum((0, 2))[:, None, None]
    for weight in (0.0, 0.3, 1e6):
        wanted = (listed.double().mean(0) + weight * away).argmin(1)
        assert torch.equal(found.choice(weight), wanted)
    choice = torch.tensor([[0, 0], [1, 3], [3, 3]])
    cost = sum(float(listed.mean(0)[i, choice[i, h], h]) for i in range(3) for h in range(2)) / 6
    assert found.cost(choice) == pytest.approx(cost)
    policies = found.policy(choice)
    assert policies.policies == {0: kinds[0], 1: video.ByHead((kinds[1], video.Dense()))}
    assert policies.otherwise == video.Dense()
    head, *lines = str(found).splitlines()
    assert head.startswith("2 steps, 3 layers of 2 heads; ")
    assert [line.split("  ")[-1] for line in lines] == [str(one) for one in found.candidates]
    assert lines[1].split()[2] == f"{error[:, :, 1].max():.3f}"


def test_a_failed_calibration_leaves_the_model_as_it_was():
    model, inputs = planted()

    def broken(q, k, site):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        calibrate(model, inputs, (broken,), **OPTIONS)
    assert "_tilefold_sparse" not in model.__dict__
    refuses(ValueRangeError, "inputs is empty", calibrate, model, [], **OPTIONS)
    found = calibrate(model, inputs[:1], (), **OPTIONS)
    for error in (0.0, -1):
        refuses(ValueRangeError, "error must be greater than 0", fit, model, inputs[:1], found, error, **OPTIONS)

    class Empty(Planted):
        def forward(self, hidden_states):
            super().forward(hidden_states)

    with pytest.raises(DtypeError, match="model returned no tensor, but a NoneType"):
        calibrate(Empty(GRID, KINDS, channels=16), inputs, (), **OPTIONS)
    refuses(ValueRangeError, "kinds must be of local, scattered, global, got 'far'", Planted, GRID, [["far"]])


POLICIES = [
    video.Dense(),
    video.Pooled(sparsity=(0.5, 0.25)),
    video.Pooled(top_p=0.5, window=(1, 0, 2)),
    video.Antidiagonal(top_p=0.9, stride=8),
    video.Gini(0.1, 0.2, "pooled"),
    video.SlidingTile((0, 1, 2)),
    video.Radial(0.5),
    video.DenseFirst(video.KeepFor(video.Pooled(sparsity=0.5), 3), steps=2, last=1),
    video.ByHead((video.Radial(), video.SlidingTile(1))),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: type(one).__name__)
def test_policies_as_text(policy):
    assert policy_from_json(policy_to_json(policy)) == policy


def test_policies_of_layers_as_text():
    policy = video.ByLayer({3: POLICIES[1], 11: POLICIES[-1]}, otherwise=POLICIES[4])
    again = policy_from_json(policy_to_json(policy))
    assert again.policies == policy.policies and again.otherwise == policy.otherwise


def test_what_is_no_text():
    for policy in (lambda q, k, site: None, video.FixedMap(torch.ones(2, 2, dtype=torch.bool))):
        refuses(Unsupported, "cannot be written as text", policy_to_json, video.DenseFirst(policy))
    refuses(ValueRangeError, "give sparsity or top_p", policy_from_json, '{"type": "Pooled"}')
    for text in ("{", "3", '{"type": "Site"}', '{"type": "Pooled", "share": 1}', "[1]", '{"a": 1}'):
        refuses(ValueRangeError, "this is no policy", policy_from_json, text)
