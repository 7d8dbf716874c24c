"""tilefold as a sparse attention plugin of vLLM-Omni, whose backend SPARSE_ATTN finds it by the entry point `tilefold`.

vLLM-Omni tells a plugin the video's grid and the denoising step, not the layer.  So tokens are turned into cubes and back in each
layer, and policies that go by the layer are refused.

Contract: https://github.com/vllm-project/vllm-omni, vllm_omni/diffusion/attention/backends/sparse_attn.py."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..api import attention
from ..errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..sparse import GridTiling
from ..video import ByLayer, DenseFirst, KeepFor, Policy, Pooled, Site, fitting_cube, policy_from_json
from ..video.attend import attend_lists, lists_of

__all__ = ["sparse_attn"]

SHORT = ("sparsity", "top_p", "window")  # of Pooled, which is taken if no policy is given


@torch.compiler.disable
def sparse_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: Mapping[str, Any],
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Self-attention of one layer of a video model, over the blocks that a policy chooses.

    Args:
        query: [batch, tokens, heads, dim] fp16, bf16 or fp32; key, value: [batch, tokens, kv_heads, dim].
        params: what vLLM-Omni merged.  Of the configuration: `policy`, a policy of `tilefold.video` as `policy_to_json` writes it
            (text, what json.loads makes of it, or the path of a file), or a callable; without it `sparsity`, `top_p` and
            `window`, of `Pooled`.  `dense_steps`: steps at the beginning that stay dense.  `cube`: (t, h, w) tokens of a block,
            `fitting_cube` of the grid if not given.  `grid`: (T, H, W) tokens, for models that publish none.
            Of the framework: `latent_shape`, `patch_size`, `denoise_step_idx`.  Other keys are ignored.
        softmax_scale: of the scores; None: dim ** -0.5.

    Returns:
        [batch, tokens, heads, dim].  Differentiable.  Dense attention, with a warning once, where no grid is known that has as
        many tokens as there are.

    Raises:
        ValueRangeError, DtypeError for params that cannot be read; Unsupported for is_causal, keys that are not the queries' own
        tokens, and policies that go by the layer."""
    if is_causal:
        raise Unsupported("is_causal=True is not served: lists of a video's blocks have no order in time")
    if query.ndim != 4 or key.shape[1] != query.shape[1]:
        raise ShapeError(
            f"query and key must be [batch, tokens, heads, dim] of the same tokens, got {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    policy = _policy_of(params)
    grid = _grid_of(params)
    fits = grid is not None and math.prod(grid) == query.shape[1]
    if not fits:
        _warn_dense(grid, query.shape[1])
    if not fits or _is_early(params):
        return attention(query, key, value, scale=scale)  # type: ignore[no-any-return]
    cube = params.get("cube")
    tiling = _tiling(grid, None if cube is None else _triple("cube", cube))
    q, k, v = (tiling.tile(one) for one in (query, key, value))
    site = Site(0, 1, q.shape[2], _step_of(params) if _goes_by_step(policy) else None, tiling, scale, {})
    out, _ = attend_lists(q, k, v, lists_of(policy, q, k, site), tiling, None, scale)
    return tiling.untile(out)


# ---------------------------------------------------------------- what params say


def _policy_of(params: Mapping[str, Any]) -> Policy:
    given = params.get("policy")
    if given is None:
        short = {name: _hashable(params[name]) for name in SHORT if name in params}
        if not {"sparsity", "top_p"} & set(short):
            raise ValueRangeError("params must have sparsity or top_p, or a policy, of the attention's configuration")
        return _pooled(tuple(short.items()))
    if isinstance(given, Mapping):
        given = json.dumps(given)
    if isinstance(given, (str, Path)):
        return _read(str(given))
    if not callable(given):
        raise DtypeError(f"params['policy'] must be a policy, its JSON or a path, got {type(given).__name__}")
    return _checked(given)


@lru_cache(maxsize=64)
def _pooled(settings: tuple[tuple[str, Any], ...]) -> Policy:
    return Pooled(**dict(settings))


@lru_cache(maxsize=64)
def _read(text: str) -> Policy:
    """The policy of a text, or of the file that it names."""
    return _checked(policy_from_json(text if text.lstrip().startswith("{") else Path(text).read_text()))


def _checked(policy: Any) -> Policy:
    by_layer = isinstance(policy, (ByLayer, KeepFor)) or (
        isinstance(policy, DenseFirst) and bool(policy.first or policy.last)
    )
    if by_layer:
        raise Unsupported(f"policy {policy!r} goes by the layer, which vLLM-Omni does not tell a plugin")
    if isinstance(policy, DenseFirst):
        _checked(policy.policy)
    return policy  # type: ignore[no-any-return]


def _goes_by_step(policy: Policy) -> bool:
    """Whether the step is read, on the host: policies of the library, but for one, do not."""
    return isinstance(policy, DenseFirst) or not type(policy).__module__.startswith("tilefold.")


def _is_early(params: Mapping[str, Any]) -> bool:
    steps = params.get("dense_steps", 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueRangeError(f"params['dense_steps'] must be a whole number of at least 0, got {steps!r}")
    step = _step_of(params) if steps else None
    return step is not None and step < steps


def _step_of(params: Mapping[str, Any]) -> int | None:
    """The step of the sample that is least far."""
    step = params.get("denoise_step_idx")
    if step is None:
        return None
    return int(step.min()) if isinstance(step, torch.Tensor) else int(step)


def _grid_of(params: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(T, H, W) in tokens, if it is known and all samples have the same."""
    if "grid" in params:
        return _triple("grid", params["grid"])
    latent, patch = (params.get(name) for name in ("latent_shape", "patch_size"))
    if latent is None or patch is None:
        return None
    sizes, patches = _triple("latent_shape", latent), _triple("patch_size", patch)
    if sizes is None or patches is None or 0 in patches:
        return None
    return sizes[0] // patches[0], sizes[1] // patches[1], sizes[2] // patches[2]


def _triple(name: str, value: Any) -> tuple[int, int, int] | None:
    """Three numbers, or one row of them for each sample; None where rows differ."""
    rows = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(rows, Sequence) and rows and isinstance(rows[0], Sequence):
        if any(list(row) != list(rows[0]) for row in rows):
            return None
        rows = rows[0]
    if not isinstance(rows, Sequence) or len(rows) != 3:
        raise ShapeError(f"params[{name!r}] must be three numbers, or three for each sample, got {value!r}")
    return int(rows[0]), int(rows[1]), int(rows[2])


@lru_cache(maxsize=64)
def _tiling(grid: tuple[int, int, int], cube: tuple[int, int, int] | None) -> GridTiling:
    return GridTiling(grid, fitting_cube(grid) if cube is None else cube)


@lru_cache(maxsize=64)
def _warn_dense(grid: tuple[int, int, int] | None, tokens: int) -> None:
    """Once for each."""
    known = "no grid is known" if grid is None else f"the grid {grid} has {math.prod(grid)}"
    warnings.warn(
        f"attention of {tokens} tokens stays dense: {known}; padding of sequence parallelism and text in the same sequence are "
        f"not served",
        RuntimeWarning,
        stacklevel=3,
    )


def _hashable(value: Any) -> Any:
    return tuple(_hashable(one) for one in value) if isinstance(value, (list, tuple)) else value
