"""The arguments of `select`, checked and brought into the one form that kernels take; no value of a tensor is read."""

from typing import Any, TypeAlias

import torch

from ..check import FLOATS, TensorSpec, bind, check_share, check_whole
from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from ..ops.sparse.select import NOWHERE, SelectCall, Setting
from ..plan.sparse.select import SHARE_ROUNDING, kept_blocks
from .lists import padded, sizes_by_row
from .validate import SIZES, check_block

Number: TypeAlias = float | torch.Tensor
"""A number, or a tensor that broadcasts to [batch, heads, Q blocks], of one dimension: [heads]."""

Geometry: TypeAlias = tuple[int, int, int, int]
METHODS = {"gini": ("tau_min", "tau_max", "tau"), "top_p": ("top_p",), "top_k": ("top_k", "sparsity")}
TAU_MIN, TAU_MAX = 0.5, 0.95  # where nothing is said; ours, to be tuned per model
LARGEST_COUNT = float(2**24)  # settings travel as fp32, which holds whole numbers up to here

_SCORES = TensorSpec("scores", "batch heads q_blocks kv_blocks", FLOATS, contiguous_last=True)


def bind_scores(scores: torch.Tensor) -> None:
    """Raise unless scores are what `select` takes."""
    bind((_SCORES,), {"scores": scores})


def bind_sizes(
    scores: torch.Tensor, geometry: Geometry | None, block_sizes: torch.Tensor | None, query_sizes: torch.Tensor | None
) -> torch.Tensor | None:
    """Check the geometry and both sizes against scores; block_sizes as a view [B, H, KVb]."""
    known = dict(zip(("batch", "heads", "q_blocks", "kv_blocks"), scores.shape, strict=True))
    if geometry is not None:
        _check_geometry(scores, geometry)
    specs = [
        TensorSpec(name, SIZES.format(dim), (torch.int32,), optional=True)
        for name, dim in (("block_sizes", "kv_blocks"), ("query_sizes", "q_blocks"))
    ]
    bind(specs, {"block_sizes": block_sizes, "query_sizes": query_sizes}, known, ("scores", scores))
    if block_sizes is None:
        return None
    return sizes_by_row(block_sizes).expand(scores.shape[0], scores.shape[1], scores.shape[3])


def _check_geometry(scores: torch.Tensor, geometry: Geometry) -> None:
    names = ("Q blocks", "block_q", "seq_q"), ("KV blocks", "block_k", "seq_k")
    for (what, of_block, of_length), size, block, length in zip(
        names, scores.shape[2:], geometry[:2], geometry[2:], strict=True
    ):
        check_block(of_block, block)
        blocks = -(-check_whole(of_length, length) // block)
        if size != blocks:
            raise ShapeError(
                f"scores has {size} {what}, shape {tuple(scores.shape)}; expected {blocks} for {of_length} {length} in blocks of "
                f"{block}"
            )


def make_call(
    scores: torch.Tensor,
    method: str,
    numbers: dict[str, Any],
    bounds: tuple[Setting, Number | None],
    capacity: int | None,
    window: tuple[bool, int, int | None, torch.Tensor | None],
    geometry: Geometry,
    sizes: torch.Tensor | None,
) -> SelectCall:
    """numbers: the settings of all methods by name; bounds: min_blocks, already a setting, and max_blocks; window: force_self,
    force_first, local_window, force; sizes: as `bind_sizes` gives them."""
    check_method(method, numbers)
    amount = _amount(method, numbers, scores)
    least, blocks = bounds[0], scores.shape[3]
    most = LARGEST_COUNT if bounds[1] is None else blocks_setting("max_blocks", bounds[1], scores, 1)
    if (
        not isinstance(least, torch.Tensor)
        and not isinstance(most, torch.Tensor)
        and bounds[1] is not None
        and least > most
    ):
        raise ValueRangeError(f"min_blocks is {least:g}, more than max_blocks, {most:g}")
    first, reach, force = _window(scores, *window)
    forced = blocks if force is not None else _most_forced(first, reach, geometry)
    if capacity is not None:
        room = check_whole("capacity", capacity, 1)
        if not isinstance(least, torch.Tensor) and least > room:
            raise ValueRangeError(f"min_blocks is {least:g}, more than capacity, {room}")
    elif bounds[1] is not None:
        room = blocks if isinstance(most, torch.Tensor) or force is not None else int(most)
    elif method == "top_k" and not isinstance(amount[0], torch.Tensor) and not isinstance(least, torch.Tensor):
        room = max(int(amount[0]), int(least), forced)
    else:
        room = blocks
    kind = {"gini": "gini", "top_p": "mass", "top_k": "count"}[method]
    return SelectCall(kind, amount, (least, most), min(room, blocks), geometry, first, reach, force, sizes)


def check_method(method: str, numbers: dict[str, Any]) -> None:
    if method not in METHODS:
        raise ValueRangeError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    for owner, names in METHODS.items():
        for name in names:
            if owner != method and numbers[name] is not None:
                raise ValueRangeError(f"{name} is for method {owner!r}, got method {method!r}")
    given = [name for name in METHODS[method] if numbers[name] is not None]
    if method == "gini":
        if numbers["tau"] is not None and len(given) > 1:
            raise ValueRangeError(f"tau takes the place of tau_min and tau_max, got {', '.join(given)}")
    elif len(given) != 1:
        wanted = " or ".join(METHODS[method])
        none = "neither" if len(METHODS[method]) > 1 else "none"
        raise ValueRangeError(f"method {method!r} needs {wanted}, got {' and '.join(given) or none}")


def _amount(method: str, numbers: dict[str, Any], scores: torch.Tensor) -> tuple[Setting, ...]:
    if method == "top_p":
        return (setting_of("top_p", numbers["top_p"], scores),)
    if method == "top_k":
        if numbers["top_k"] is not None:
            return (blocks_setting("top_k", numbers["top_k"], scores),)
        sparsity, blocks = setting_of("sparsity", numbers["sparsity"], scores), scores.shape[3]
        return (
            kept_by(sparsity, blocks) if isinstance(sparsity, torch.Tensor) else float(kept_blocks(sparsity, blocks)),
        )
    tau = numbers["tau"]
    if tau is not None:
        if not callable(tau):
            raise DtypeError(
                f"tau must be a function of the Gini tensor, got {type(tau).__name__}; for one share use method 'top_p'"
            )
        return (1.0, 1.0)
    low, high = (
        setting_of(name, default if numbers[name] is None else numbers[name], scores)
        for name, default in (("tau_min", TAU_MIN), ("tau_max", TAU_MAX))
    )
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor) and low > high:
        raise ValueRangeError(f"tau_min is {low:g}, more than tau_max, {high:g}")
    return low, high


def kept_by(sparsity: Number, blocks: int | torch.Tensor) -> torch.Tensor:
    """`plan.select.kept_blocks` where the sparsity or the number of blocks, or both, are on the device: whole numbers in fp64."""
    share = sparsity.double() if isinstance(sparsity, torch.Tensor) else sparsity
    kept: torch.Tensor = (1.0 - share - SHARE_ROUNDING) * blocks  # type: ignore[assignment]
    return kept.ceil().clamp(min=1.0)


def blocks_setting(name: str, value: Number, scores: torch.Tensor, low: int = 0) -> Setting:
    """A number of blocks as a setting."""
    if isinstance(value, torch.Tensor):
        return setting_of(name, value, scores)
    return min(float(check_whole(name, value, low)), LARGEST_COUNT)


def setting_of(name: str, value: Number, scores: torch.Tensor) -> Setting:
    """A share as a float, a tensor as a view [B, H, Qb]."""
    if not isinstance(value, torch.Tensor):
        return check_share(name, value)
    rows = tuple(scores.shape[:3])
    if value.dtype == torch.bool or value.is_complex():
        kind = str(value.dtype).removeprefix("torch.")
        raise DtypeError(f"{name} must be a number or a tensor of real numbers, got dtype {kind}")
    if value.device != scores.device:
        raise DeviceError(f"{name} is on {value.device}, but scores is on {scores.device}")
    wide = value[:, None] if value.dim() == 1 else value
    shape = tuple(padded(wide, 3).shape) if wide.dim() <= 3 else ()
    if len(shape) != 3 or any(n not in (1, m) for n, m in zip(shape, rows, strict=True)):
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}, expected [heads] = [{rows[1]}] or what broadcasts to "
            f"[batch, heads, Q blocks] = {list(rows)}"
        )
    return padded(wide, 3).detach().expand(rows)


def _window(
    scores: torch.Tensor, force_self: bool, force_first: int, local_window: int | None, force: torch.Tensor | None
) -> tuple[int, int, torch.Tensor | None]:
    """(force_first, reach, force as a view [B, H, Qb, KVb])."""
    if not isinstance(force_self, bool):
        raise DtypeError(f"force_self must be a bool, got {force_self!r} of type {type(force_self).__name__}")
    first = min(check_whole("force_first", force_first), scores.shape[3])
    reach = NOWHERE
    if local_window is not None:
        reach = min(check_whole("local_window", local_window), scores.shape[3])
    elif force_self:
        reach = 0
    if force is None:
        return first, reach, None
    if not isinstance(force, torch.Tensor) or force.dtype != torch.bool:
        kind = str(force.dtype).removeprefix("torch.") if isinstance(force, torch.Tensor) else type(force).__name__
        raise DtypeError(f"force must be a bool tensor, got {kind}")
    if force.device != scores.device:
        raise DeviceError(f"force is on {force.device}, but scores is on {scores.device}")
    wide = padded(force, 4) if force.dim() <= 4 else force
    if wide.dim() != 4 or any(n not in (1, m) for n, m in zip(wide.shape, scores.shape, strict=True)):
        raise ShapeError(
            f"force has shape {tuple(force.shape)}, which does not broadcast to [batch, heads, Q blocks, KV blocks] = "
            f"{list(scores.shape)}"
        )
    return first, reach, wide.expand(scores.shape)


def _most_forced(first: int, reach: int, geometry: Geometry) -> int:
    """No list can have more forced blocks; a bound from the arguments alone."""
    if reach == NOWHERE:
        return first
    block_q, block_k, seq_q, seq_k = geometry
    aligned = (seq_k - seq_q) % min(block_q, block_k) == 0
    own = max(1, block_q // block_k) + (0 if aligned else 1)
    return first + own + 2 * reach
