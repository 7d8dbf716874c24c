"""Calibration: what each policy leaves out in each layer, head and step of a model; the cheapest choice that meets an error."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..check import check_number
from ..errors import DtypeError, Unsupported, ValueRangeError
from ..sparse import BlockIndex, gini
from . import policies
from .adapters import Adapter
from .measure import dense_results, left_out
from .model import desparsify, sparsify
from .policies import ByHead, ByLayer, Dense, Pooled, Radial, SlidingTile
from .site import Policy, Site

CANDIDATES: tuple[Policy, ...] = (
    *(Pooled(sparsity=one) for one in (0.5, 0.7, 0.8, 0.9, 0.95)),
    *(SlidingTile(radii) for radii in ((0, 1, 1), 1, (1, 2, 2), 2)),
    Radial(0.25),
    Radial(0.5),
)
"""What `calibrate` tries if it is not told; `Dense` is always among the candidates."""

Inputs = Sequence[Mapping[str, Any]]
"""Keyword arguments of model.forward, one mapping for each measured step."""

RUNS = 14  # of the model at most, to find the cheapest choice
LIGHTEST, HEAVIEST = -3.0, 6.0  # powers of 10: what a layer's squared error weighs beside the share of pairs


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the candidates leave out; fp32 tensors on the CPU.

    candidates: the last one is `Dense`.
    listed, mass: [steps, layers, candidates, heads], the share of pairs of blocks, and of a query's attention probability, that
        is kept.
    error: of the same shape, the relative L2 error of the head's output.
    energy: [steps, layers, heads], the squared norm of a head's dense output.
    gini: [steps, layers, heads], how concentrated a head is: the mean Gini coefficient of its rows of pooled scores.
    outputs: the dense model's, one for each step."""

    candidates: tuple[Policy, ...]
    listed: torch.Tensor
    mass: torch.Tensor
    error: torch.Tensor
    energy: torch.Tensor
    gini: torch.Tensor
    outputs: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        """A line for each candidate: what it lists and holds in the mean, and its worst head's error."""
        steps, layers, _, heads = self.error.shape
        lines = [f"{steps} steps, {layers} layers of {heads} heads; of pairs listed, mass held, worst error of a head:"]
        rows = (x.movedim(2, 0).flatten(1) for x in (self.listed, self.mass, self.error))
        for one, listed, mass, error in zip(self.candidates, *rows, strict=True):
            lines.append(f"  {listed.mean():.2f}  {mass.mean():.3f}  {error.max():.3f}  {one}")
        return "\n".join(lines)

    @property
    def layer_error(self) -> torch.Tensor:
        """[layers, candidates, heads]: the share of its layer's squared norm that a head's error has, over all steps."""
        away = (self.error.square() * self.energy[:, :, None]).sum(0)
        return away / self.energy.sum((0, 2))[:, None, None].clamp_min(torch.finfo(torch.float32).tiny)

    def choice(self, weight: float | torch.Tensor) -> torch.Tensor:
        """int64 [layers, heads]: the candidate of the least share of pairs + weight * squared error; of equal ones the first.
        weight: one number, or [layers]."""
        weights = torch.as_tensor(weight).view(-1, 1, 1)
        return (self.listed.mean(0) + weights * self.layer_error).min(1).indices

    def cost(self, choice: torch.Tensor) -> float:
        """The share of all pairs of blocks that these candidates list."""
        return float(self.listed.mean(0).gather(1, choice[:, None]).mean())

    def policy(self, choice: torch.Tensor) -> ByLayer:
        """These candidates as a policy: dense where all heads of a layer are."""
        chosen: dict[int, Policy] = {}
        for layer, heads in enumerate(choice.tolist()):
            kinds = [self.candidates[one] for one in heads]
            if all(one == Dense() for one in kinds):
                continue
            chosen[layer] = kinds[0] if all(one == kinds[0] for one in kinds) else ByHead(tuple(kinds))
        return ByLayer(chosen)


@dataclass(frozen=True, eq=False)
class Fitted:
    """policy: the cheapest that was found.  choice: its candidates, int64 [layers, heads].  error: the relative L2 error of the
    model's output, over all steps; listed: the share of pairs of blocks."""

    policy: ByLayer
    choice: torch.Tensor
    error: float
    listed: float


def calibrate(
    model: nn.Module,
    inputs: Inputs,
    candidates: Sequence[Policy] = CANDIDATES,
    *,
    cube: Sequence[int] | None = None,
    adapter: Adapter | None = None,
) -> Calibration:
    """Run a dense model and measure in every attention what each candidate would leave out.

    Args:
        model: as for `sparsify`; not sparse.
        inputs: keyword arguments of model.forward, one mapping for each step that is to be measured.
        candidates: policies that need no step and treat each head by itself.
        cube, adapter: as for `sparsify`.

    Costs a dense pass, and for each candidate its attention.  Text in the same attention is left out of the measures.

    Raises as `sparsify`; ValueRangeError if there are no inputs."""
    if not inputs:
        raise ValueRangeError("inputs is empty: give the arguments of at least one forward pass")
    tried: tuple[Policy, ...] = (*[one for one in candidates if one != Dense()], Dense())
    found: list[dict[int, tuple[torch.Tensor, ...]]] = []

    def observe(site: Site, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], index: BlockIndex | None) -> None:
        found[-1][site.layer] = _measured(site, qkv, tried)

    sparsify(model, Dense(), cube=cube, adapter=adapter, observe=observe)
    outputs = []
    try:
        for one in inputs:
            found.append({})
            outputs.append(_output(model, one))
    finally:
        desparsify(model)
    steps = [[step[layer] for layer in sorted(step)] for step in found]
    listed, mass, error, energy, concentrated = (
        torch.stack([torch.stack([layer[i] for layer in step]) for step in steps]) for i in range(5)
    )
    return Calibration(tried, listed, mass, error, energy, concentrated, tuple(outputs))


def fit(
    model: nn.Module,
    inputs: Inputs,
    found: Calibration,
    error: float,
    *,
    cube: Sequence[int] | None = None,
    adapter: Adapter | None = None,
) -> Fitted:
    """The choice of the fewest pairs whose model is at most `error` from the dense one.

    First each layer alone is made sparse, once over the inputs: how much of its own error reaches the output.  Then each head of
    each layer takes the candidate of the least cost + weight * that much of its squared error.  The weight is found by bisection,
    each time by running the sparse model, 14 times over the inputs.  Then one candidate for all heads, where that is cheaper and
    meets the error.  Dense attention everywhere meets any error.

    error: relative L2, of all outputs together, more than 0.  The other arguments are those of `calibrate`."""
    limit = check_number("error", error, above=0)
    low, high = LIGHTEST, HEAVIEST
    error_of = partial(model_error, model, inputs, found.outputs, cube=cube, adapter=adapter)
    reach = _reach(found, error_of)
    dense = torch.full(found.gini.shape[1:], len(found.candidates) - 1)
    best = Fitted(found.policy(dense), dense, 0.0, 1.0)
    for _ in range(RUNS):
        middle = (low + high) / 2
        choice = found.choice(10**middle * reach)
        policy = found.policy(choice)
        made = error_of(policy)
        if made <= limit:
            high = middle
            best = min(best, Fitted(policy, choice, made, found.cost(choice)), key=lambda one: one.listed)
        else:
            low = middle
    for cost, one in sorted((float(found.listed[:, :, i].mean()), i) for i in range(len(found.candidates))):
        if cost >= best.listed:
            break
        choice = torch.full_like(dense, one)
        policy = found.policy(choice)
        made = error_of(policy)
        if made <= limit:
            return Fitted(policy, choice, made, cost)
    return best


def model_error(
    model: nn.Module,
    inputs: Inputs,
    outputs: Sequence[torch.Tensor],
    policy: Policy,
    *,
    cube: Sequence[int] | None = None,
    adapter: Adapter | None = None,
) -> float:
    """The relative L2 error of the model under a policy, of all outputs together; outputs: `Calibration.outputs`."""
    sparsify(model, policy, cube=cube, adapter=adapter)
    away = size = 0.0
    try:
        for one, wanted in zip(inputs, outputs, strict=True):
            away += float((_output(model, one) - wanted).double().square().sum())
            size += float(wanted.double().square().sum())
    finally:
        desparsify(model)
    return (away / size) ** 0.5 if size else 0.0


def _reach(found: Calibration, error_of: Callable[[Policy], float]) -> torch.Tensor:
    """[layers]: the output's squared relative error for the squared error of a layer's attention, at the candidate whose error is
    the median; 1 where no candidate has one."""
    made = []
    for layer, errors in enumerate(found.layer_error.sum(2)):
        place = int(errors.argsort()[len(errors) // 2])
        if not float(errors[place]):
            made.append(1.0)
            continue
        error = error_of(ByLayer({layer: found.candidates[place]}))
        made.append(error**2 / float(errors[place]))
    return torch.tensor(made)


def _measured(site: Site, qkv: Any, tried: Sequence[Policy]) -> tuple[torch.Tensor, ...]:
    """(listed, mass, error [candidates, heads], energy, gini [heads]) of one attention."""
    q, k, v = qkv
    dense = dense_results(q, k, v, site.tiling, site.scale)
    rows = []
    for policy in tried:
        index = policy(q, k, site)
        if index is None:
            one = torch.ones(site.heads, device=q.device)
            rows.append((one, one, 0 * one))
        else:
            rows.append(left_out(q, k, v, index, site.tiling, site.scale, dense))
    scores = Pooled(sparsity=0.0).scores(q, k, site)
    concentrated = gini(scores, block_sizes=site.tiling.sizes(scores.device)).mean((0, 2))
    energy = dense[0].float().square().sum((0, 1, 3))
    stacked = [torch.stack([row[i] for row in rows]) for i in range(3)]
    return tuple(one.float().cpu() for one in (*stacked, energy, concentrated))


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The first tensor that the model returns."""
    with torch.no_grad():
        out = model(**inputs)
    tensors = [one for one in tree_leaves(dict(out) if isinstance(out, dict) else out) if isinstance(one, torch.Tensor)]
    if not tensors:
        raise DtypeError(f"model returned no tensor, but a {type(out).__name__}")
    return tensors[0].detach().float().cpu()


# ---------------------------------------------------------------- files


def policy_to_json(policy: Policy) -> str:
    """A policy of `tilefold.video` as text.  Unsupported for functions of one's own and for maps."""
    return json.dumps(_encoded(policy), indent=1)


def policy_from_json(text: str) -> Policy:
    """The policy that `policy_to_json` wrote; ValueRangeError if the text says something else."""
    try:
        made: Policy = _decoded(json.loads(text))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueRangeError(f"this is no policy that policy_to_json wrote: {error}") from error
    if not callable(made):
        raise ValueRangeError(f"this is no policy that policy_to_json wrote: {made!r}")
    return made


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _encoded(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_encoded(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    if getattr(policies, name, None) is not type(value) or name == "FixedMap":
        raise Unsupported(f"{value!r} cannot be written as text: it is no policy of numbers of tilefold.video")
    given = {one.name: getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != one.default}
    return {"type": name, **{key: _encoded(one) for key, one in given.items()}}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(one) for one in value)
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        return {int(key) if key.isdigit() else key: _decoded(one) for key, one in value.items()}
    kind = getattr(policies, value["type"]) if value["type"] in policies.__all__ else None
    if kind is None:
        raise KeyError(value["type"])
    return kind(**{key: _decoded(one) for key, one in value.items() if key != "type"})
