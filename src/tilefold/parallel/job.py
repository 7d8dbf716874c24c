"""From what a call was given to a `Job`: checks, the plan, and what all ranks have to have in common."""

import itertools
from typing import Any, NamedTuple

import torch

from ..check import FLOATS, TensorSpec, bind, check_number
from ..errors import DtypeError, ShapeError, Unsupported
from ..ops.call import check_heads, check_kinds, window_of
from ..ops.numerics import is_invariant, refuse_invariant
from ..ops.watch import refuse_tangents
from ..plan.parallel.plan import ParallelPlan, plan_parallel
from ..plan.parallel.problem import Links, ParallelProblem
from ..plan.parallel.sharding import Sharding
from ..types import Window
from .agree import agree, keep, known
from .group import Ranks, check_device, check_sharding
from .local import Kernels, Pair
from .schemes import Job

OWN = Kernels()
COMMON = ("batch", "heads", "kv_heads", "dim_qk", "dim_v")  # sizes that are the same on all ranks

Scores = tuple[bool, Window | None, float | None, float, bool]
"""causal, window, scale, softcap, deterministic, as given."""


class Setting(NamedTuple):
    """What calls have in common that do not differ by their tensors: all that a compiled program knows as one number."""

    ranks: Ranks
    q_tokens: Sharding
    k_tokens: Sharding
    scheme: str = "auto"
    links: Links | None = None
    kernels: Kernels = OWN


_SETTINGS: dict[int, Setting] = {}  # by number, the one used last at the end
_NUMBERS: dict[Setting, int] = {}
_KEPT = 4096
_NEXT = itertools.count()


def number_for(setting: Setting) -> int:
    """The number of an equal setting, the same for each that is opened anew: a compiled program holds it as a constant.

    Of settings that differ in every step, as packed sequences make them, the last ones are kept."""
    found = _NUMBERS.get(setting)
    if found is None:
        found = _NUMBERS[setting] = next(_NEXT)
    _SETTINGS[found] = _SETTINGS.pop(found, setting)
    if len(_SETTINGS) > _KEPT:
        del _NUMBERS[_SETTINGS.pop(next(iter(_SETTINGS)))]
    return found


def setting_of(number: int) -> Setting:
    """Back."""
    return _SETTINGS[number]


def wanted(*tensors: object) -> bool:
    """Whether a gradient follows."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def agreed_job(
    setting: Setting,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    needs: bool,
    return_lse: object = True,
) -> Job:
    """The job of a call that all ranks make in the same way: a collective, the first time that this rank sees such a call.

    Raises on every rank what is wrong on any."""
    key = None if is_invariant() else _key(setting, (q, k, v), scores, needs, return_lse)
    kept: Job | None = None if key is None else known(key)
    if kept is not None:
        refuse_tangents({"q": q, "k": k, "v": v})
        return kept
    with agree(setting.ranks, "attention", q) as facts:
        refuse_invariant("attention over several ranks", "pieces of the keys are merged as the ranks have them")
        check_kinds(return_lse, deterministic=scores[4])
        refuse_tangents({"q": q, "k": k, "v": v})
        sizes = sizes_of(setting, q, k, v)
        job = job_of(setting, q, sizes, scores, needs)
        facts |= call_facts(sizes, q, needs) | {
            "scheme": repr(job.scheme),
            "sharding": job.q_tokens,
            "kv_sharding": job.k_tokens,
            "window": job.pair.window,
            "scale": job.pair.scale and float(job.pair.scale),
            "softcap": job.pair.softcap,
            "deterministic": job.pair.deterministic,
            "ranks per node": job.ranks.per_node,
        }
    if key is not None:
        keep(key, job)
    return job


def _key(setting: Setting, tensors: tuple[object, ...], scores: Scores, needs: bool, return_lse: object) -> Any:
    """All that decides a call's job; None of what cannot be a key."""
    if not all(type(t) is torch.Tensor for t in tensors):
        return None
    shapes = tuple((t.shape, t.stride(-1) if t.dim() else 0, t.dtype, t.device) for t in tensors)  # type: ignore[attr-defined]
    key = setting, shapes, scores, needs, return_lse, tuple(map(type, (*scores, return_lse)))  # 1 is not True
    try:
        hash(key)
    except TypeError:
        return None
    return key


def check_kernels(kernels: object) -> None:
    """DtypeError unless it is a Kernels."""
    if not isinstance(kernels, Kernels):
        raise DtypeError(f"kernels must be a Kernels or None, got {type(kernels).__name__}")


def specs_of(lead: str, floats: tuple[torch.dtype, ...]) -> tuple[TensorSpec, ...]:
    """What q, k and v of one rank have to be; lead: "batch ", or "" without that dimension."""
    return (
        TensorSpec("q", f"{lead}seq_q heads dim_qk", floats, contiguous_last=True),
        TensorSpec("k", f"{lead}seq_k kv_heads dim_qk", floats, same_dtype_as="q", contiguous_last=True),
        TensorSpec("v", f"{lead}seq_k kv_heads dim_v", floats, same_dtype_as="q", contiguous_last=True),
    )


def sizes_of(setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """The sizes of all named dimensions, after every check that needs nothing but this rank's tensors."""
    ranks, tokens, other, _, _, kernels = setting
    for name, one in (("sharding", tokens), ("kv_sharding", other)):
        check_sharding(one, ranks, name)
    if tokens.sequences != other.sequences:
        raise ShapeError(f"sharding has {tokens.sequences} sequences, kv_sharding {other.sequences}")
    check_kernels(kernels)
    floats = FLOATS if kernels is OWN else (*FLOATS, torch.float64)
    lead = "" if isinstance(q, torch.Tensor) and q.dim() == 3 else "batch "
    for name, t in (("q", q), ("k", k), ("v", v)):
        if type(t).__name__ == "DTensor":
            raise Unsupported(
                f"{name} is a DTensor: give this rank's own part, {name}.to_local(), of its tokens and heads"
            )
    sizes = {"batch": 1} | bind(specs_of(lead, floats), {"q": q, "k": k, "v": v})
    check_device("q", q, ranks.flat)
    for name, one, side in (("q", tokens, "seq_q"), ("k", other, "seq_k")):
        if sizes[side] != one.length(ranks.rank):
            raise ShapeError(
                f"{name} has {sizes[side]} tokens, rank {ranks.rank} of the sharding has {one.length(ranks.rank)}"
            )
    check_heads(sizes)
    if tokens.sequences > 1 and sizes["batch"] != 1:
        raise ShapeError(f"q has batch {sizes['batch']}, but a sharding of {tokens.sequences} packed sequences needs 1")
    return sizes


def job_of(setting: Setting, q: torch.Tensor, sizes: dict[str, int], scores: Scores, needs: bool) -> Job:
    """The scheme, by the plan, and the scores; a pure function of its arguments."""
    causal, window, scale, softcap, deterministic = scores
    band = window_of(tuple(window) if isinstance(window, list) else window, causal)
    if scale is not None:
        check_number("scale", scale, above=0.0)
    check_number("softcap", softcap, low=0.0)
    plan = plan_of(setting, q, sizes, band, needs, deterministic)
    tokens, other = setting.q_tokens, setting.k_tokens
    pair = Pair(tokens.starts, other.starts, band, scale, float(softcap), setting.kernels, deterministic)
    return Job(setting.ranks, plan.scheme, tokens, other, pair)


def plan_of(
    setting: Setting, q: torch.Tensor, sizes: dict[str, int], band: tuple[int, int], backward: bool, deterministic: bool
) -> ParallelPlan:
    """What plan_parallel says of a call."""
    ranks, tokens, other, scheme, links, _ = setting
    named = {name: int(sizes[name]) for name in COMMON}
    dtype = str(q.dtype).removeprefix("torch.")
    problem = ParallelProblem(seq_q=tokens.total, seq_k=other.total, dtype=dtype, window=band, kind=tokens.kind,
                              backward=backward, sequences=tokens.sequences, deterministic=deterministic, **named)  # fmt: skip
    if links is None:
        links = Links(ranks.size, ranks.per_node)
    elif not isinstance(links, Links):
        raise DtypeError(f"links must be a Links or None, got {type(links).__name__}")
    if links.ranks != ranks.size or links.ranks_per_node not in (1, ranks.per_node):
        raise ShapeError(
            f"links are of {links.ranks} ranks, {links.ranks_per_node} to a node; the group has {ranks.size}, {ranks.per_node}"
        )
    if scheme != "two_level" or ranks.inner is not None:
        return plan_parallel(problem, links, scheme)
    raise Unsupported("scheme 'two_level' needs a group of two levels: ranks_of(group, ranks_per_node=...)")


def call_facts(sizes: dict[str, int], q: torch.Tensor, needs: bool) -> dict[str, object]:
    """What all ranks have to have in common in a call of any attention."""
    return {name: int(sizes[name]) for name in COMMON} | {"dtype of q": q.dtype, "gradients wanted": needs}
