"""Which blocks a video's blocks attend: policies as values, each with its source, all of them over one `BlockIndex`.

A policy is a function of (q, k, site); see `tilefold.video.Policy`.  Those here are frozen dataclasses, which print as they are
written.  A setting for each head is a tuple of numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..check import check_number, check_share, check_whole
from ..errors import DtypeError, ShapeError, ValueRangeError
from ..plan.sparse.select import kept_blocks
from ..sparse import BlockIndex, GridTiling, coarse, project, select, video_window
from ..sparse.convert import map_of_predicate
from ..sparse.kept import kept
from ..sparse.tiling import triple
from .site import Policy, Site

__all__ = [
    "Antidiagonal",
    "ByHead",
    "ByLayer",
    "Dense",
    "DenseFirst",
    "FixedMap",
    "Gini",
    "KeepFor",
    "Pooled",
    "Radial",
    "SlidingTile",
]

Share: TypeAlias = float | tuple[float, ...]
"""0 to 1, for all heads or for each."""

AT_ONCE = 1 << 26  # scores of one piece of `Antidiagonal`


@dataclass(frozen=True)
class Dense:
    """Every block: attention as the model has it, without lists."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> None:
        return None


# ---------------------------------------------------------------- by scores


@dataclass(frozen=True)
class Pooled:
    """The blocks of highest score, scores from the means of each block's queries and keys: softmax(mean q . mean k * scale).

    sparsity: the share of blocks that each row leaves out, 0 to 1, or top_p: the share of a row's probability that it keeps at
    least.  One number, or one for each head; exactly one of the two.  window: also keep the blocks at most so many blocks
    (t, h, w), or a number for all axes, from the row's own; they count.

    Source: VSA's coarse stage (Zhang et al. 2025, arXiv:2505.13389) with sparsity; with top_p and a window NABLA (Mikhailov
    et al. 2025, arXiv:2507.13546), whose scores are these."""

    sparsity: Share | None = None
    top_p: Share | None = None
    window: int | tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if (self.sparsity is None) == (self.top_p is None):
            raise ValueRangeError(f"give sparsity or top_p, got sparsity={self.sparsity} and top_p={self.top_p}")
        name = "top_p" if self.sparsity is None else "sparsity"
        given = getattr(self, name)
        if isinstance(given, list):
            given = tuple(given)
            object.__setattr__(self, name, given)
        for one in _each(given):
            check_share(name, one)
        if self.window is not None:
            object.__setattr__(self, "window", _radii("window", self.window))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex:
        return self.chosen(self.logits(q, k, site), site, softmax_scale=site.scale)

    def logits(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> torch.Tensor:
        """fp32 [batch, heads, blocks, blocks]: products of mean queries and mean keys."""
        slots, sizes = site.tiling.slots, site.tiling.sizes(q.device)
        rows_q, rows_k = (project(one, block=slots, block_sizes=sizes) for one in (q, k))
        return _products(_by_head(rows_q), _by_head(rows_k, site.heads))

    def scores(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> torch.Tensor:
        """fp32 [batch, heads, blocks, blocks]: what each query block is taken to put on each KV block."""
        return (self.logits(q, k, site) * site.scale).softmax(-1)

    def chosen(self, scores: torch.Tensor, site: Site, softmax_scale: float | None = None) -> BlockIndex:
        """The lists of these scores, or of logits, as `select` takes them."""
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "return_gini": False}
        if self.sparsity is not None:
            blocks = [kept_blocks(one, scores.shape[3]) for one in _each(self.sparsity)]
            options |= {"method": "top_k", "top_k": self._setting(blocks, site, scores.device)}
            if self.window is None:
                options["capacity"] = max(blocks)
        else:
            options |= {"method": "top_p", "top_p": self._setting(list(_each(self.top_p)), site, scores.device)}
        if self.window is not None:
            options["force"] = _window_map(site.tiling, self.window, False, scores.device)
        return _select(scores, site, **options)

    def _setting(self, numbers: list[Any], site: Site, device: torch.device) -> Any:
        """One number, or a tensor of one for each head."""
        if len(numbers) == 1:
            return numbers[0]
        if len(numbers) != site.heads:
            raise ShapeError(f"{self!r} has {len(numbers)} numbers, expected one, or {site.heads}: one for each head")
        return kept(("numbers", tuple(numbers)), device, lambda: torch.tensor(numbers, device=device))


@dataclass(frozen=True)
class Antidiagonal(Pooled):
    """The blocks of highest score, scores from antidiagonals: of each stride x stride tile of q k^T the mean of one antidiagonal,
    softmax over a row of tiles, the mean over a block's rows and the sum over its columns.

    sparsity, top_p, window: as for `Pooled`.  stride: a divisor of a block's tokens; scores cost 1 / stride of q k^T.

    Source: XAttention (Xu et al. 2025, arXiv:2503.16428), with top_p its threshold."""

    stride: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_whole("stride", self.stride, 1) & (self.stride - 1):
            raise ValueRangeError(f"stride must be a power of two, got {self.stride}")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex:
        return self.chosen(self.scores(q, k, site), site)

    def scores(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> torch.Tensor:
        tiling, step, n = site.tiling, self.stride, site.tiling.block_count
        if step > tiling.slots:
            raise ValueRangeError(f"stride is {step}, more than the {tiling.slots} tokens of a block")
        sizes, per = tiling.block_sizes(q.device), tiling.slots // step
        live = torch.arange(tiling.slots, device=q.device) < sizes[:, None]  # [blocks, slots]
        live_tiles = live.view(n, per, step).any(-1).view(-1)
        q, k = (one.masked_fill(~live.view(1, -1, 1, 1), 0) for one in (q, k))
        tiles_k = _by_head(k.unflatten(1, (-1, step)).transpose(2, 3).flatten(3), site.heads).transpose(-1, -2)
        tiles_q = _by_head(q.unflatten(1, (-1, step)).flip(2).transpose(2, 3).flatten(3))
        rows = live_tiles.view(n, per, 1)
        at_once = max(1, AT_ONCE // max(1, q.shape[0] * site.heads * per * n * per))
        found = []
        for start in range(0, n, at_once):
            part = tiles_q[:, :, start * per : (start + at_once) * per]
            logits = torch.matmul(part, tiles_k).float() * (site.scale / step)
            shares = logits.masked_fill_(~live_tiles, -torch.inf).softmax(-1)
            each = shares.unflatten(-1, (n, per)).sum(-1).unflatten(2, (-1, per))
            some = rows[start : start + at_once]
            found.append((each * some).sum(3) / some.sum(1))
        return torch.cat(found, 2)


@dataclass(frozen=True)
class Gini:
    """As many blocks as a row needs: mass of at least tau of the coarse branch's probability.

    tau = tau_min + (tau_max - tau_min) * (1 - G), G the Gini coefficient of the row's scores: concentrated rows keep fewer.

    kind: scores from a softmax of each query over mean keys ("block"), or from mean queries, too ("pooled").

    Source: the scores of a coarse branch, VSA (Zhang et al. 2025, arXiv:2505.13389); the map from G to tau is our own."""

    tau_min: float = 0.5
    tau_max: float = 0.95
    kind: str = "block"

    def __post_init__(self) -> None:
        check_share("tau_min", self.tau_min)
        check_share("tau_max", self.tau_max)
        if self.tau_min > self.tau_max:
            raise ValueRangeError(f"tau_min is {self.tau_min:g}, more than tau_max, {self.tau_max:g}")
        if self.kind not in ("block", "pooled"):
            raise ValueRangeError(f"kind must be 'block' or 'pooled', got {self.kind!r}")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex:
        chosen: dict[str, Any] = {"method": "gini", "tau_min": self.tau_min, "tau_max": self.tau_max}
        if self.kind == "pooled":
            return _select(Pooled(sparsity=0.0).logits(q, k, site), site, softmax_scale=site.scale, **chosen)
        slots, sizes = site.tiling.slots, site.tiling.sizes(q.device)
        found = coarse(q, k, k, scale=site.scale, block=slots, block_sizes=sizes, query_sizes=sizes)
        return _select(found.scores, site, **chosen)


# ---------------------------------------------------------------- by places


@dataclass(frozen=True)
class SlidingTile:
    """The blocks at most `radii` (t, h, w), or a number for all axes, from the row's own; at a border the window moves inside.

    Source: sliding tile attention (Zhang et al. 2025, arXiv:2502.04507), whose windows count blocks as these do."""

    radii: int | tuple[int, int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "radii", _radii("radii", self.radii))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex:
        return _of_map(_window_map(site.tiling, self.radii, True, q.device), site.tiling)


@dataclass(frozen=True)
class Radial:
    """A window over the blocks of a frame that halves whenever the distance in time doubles, and the first frame for all.

    Frames are rows of blocks in time, of s blocks each.  At a distance of d frames, r = floor(log2(max(d, 1))): places in the
    frame that are at most width * s / 2^r - 1 apart; where that is less than one block, the same place in every frame whose
    distance is a multiple of 2^r / (width * s), rounded up.  width: of the published window, 1.

    Source: radial attention (Li et al. 2025, arXiv:2506.19852), over blocks instead of tokens."""

    width: float = 1.0

    def __post_init__(self) -> None:
        check_number("width", self.width, above=0)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex:
        tiling = site.tiling
        return _of_map(kept((self, tiling), q.device, lambda: self.map(tiling, q.device)), tiling)

    def map(self, tiling: GridTiling, device: torch.device) -> torch.Tensor:
        """bool [1, 1, blocks, blocks]."""
        places = tiling.blocks[1] * tiling.blocks[2]
        block = torch.arange(tiling.block_count, device=device)
        frame, place = block // places, block % places
        apart = (frame[:, None] - frame).abs()
        near = (place[:, None] - place).abs()
        band = 2.0 ** apart.clamp(min=1).log2().floor()
        window = self.width * places / band
        every = (band / (self.width * places)).ceil().long()
        keep = torch.where(window >= 1, near + 1 <= window, (near == 0) & (apart % every == 0))
        return (keep | (frame == 0))[None, None]


@dataclass(frozen=True, eq=False)
class FixedMap:
    """A map that was measured before: bool [blocks, blocks], [heads, blocks, blocks] or [batch or 1, heads or 1, blocks, blocks],
    for one grid; or a mapping from a layer's number to such a map, dense for layers that it leaves out.

    Source: calibration, see `tilefold.video.calibrate`."""

    maps: torch.Tensor | Mapping[int, torch.Tensor]

    def __post_init__(self) -> None:
        for one in self.maps.values() if isinstance(self.maps, Mapping) else [self.maps]:
            if not isinstance(one, torch.Tensor) or one.dtype != torch.bool:
                raise DtypeError(f"maps must be bool tensors, got {getattr(one, 'dtype', type(one).__name__)}")
            if not 2 <= one.dim() <= 4 or one.shape[-1] != one.shape[-2]:
                raise ShapeError(f"maps must be [.., blocks, blocks], got shape {tuple(one.shape)}")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex | None:
        found = self.maps.get(site.layer) if isinstance(self.maps, Mapping) else self.maps
        if found is None:
            return None
        if found.shape[-1] != site.tiling.block_count:
            raise ShapeError(
                f"maps of layer {site.layer} are for {found.shape[-1]} blocks, but grid {site.tiling.grid} has "
                f"{site.tiling.block_count}"
            )
        return _of_map(found[(None,) * (4 - found.dim())].to(q.device), site.tiling)


# ---------------------------------------------------------------- policies of policies


@dataclass(frozen=True)
class DenseFirst:
    """Dense attention in the first `steps` denoising steps and in the first and last layers; elsewhere `policy`.

    Source: radial attention (Li et al. 2025, arXiv:2506.19852) keeps its first steps and layers dense."""

    policy: Policy
    steps: int = 0
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "first", "last"):
            check_whole(name, getattr(self, name))
        _check_policy("policy", self.policy)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex | None:
        if site.layer < self.first or site.layer >= site.layers - self.last:
            return None
        if self.steps and _step(self, site) < self.steps:
            return None
        return self.policy(q, k, site)


@dataclass(frozen=True, eq=False)
class ByLayer:
    """A policy for each layer: policies by the layer's number, `otherwise` for the layers that are left out."""

    policies: Mapping[int, Policy]
    otherwise: Policy = Dense()

    def __post_init__(self) -> None:
        if not isinstance(self.policies, Mapping):
            raise DtypeError(f"policies must be a mapping from layers' numbers to policies, got {self.policies!r}")
        for number, one in self.policies.items():
            check_whole("policies", number)
            _check_policy(f"policies[{number}]", one)
        _check_policy("otherwise", self.otherwise)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex | None:
        return self.policies.get(site.layer, self.otherwise)(q, k, site)


@dataclass(frozen=True)
class ByHead:
    """A policy for each query head, one after the other; heads that share a policy are given to it together."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.policies, Sequence) or not self.policies:
            raise DtypeError(f"policies must be a sequence of policies, one for each head, got {self.policies!r}")
        object.__setattr__(self, "policies", tuple(self.policies))
        for number, one in enumerate(self.policies):
            _check_policy(f"policies[{number}]", one)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex | None:
        if len(self.policies) != site.heads:
            raise ShapeError(f"policies are {len(self.policies)}, expected one for each of {site.heads} heads")
        if k.shape[2] != site.heads:
            k = k.repeat_interleave(site.heads // k.shape[2], 2)
        n = site.tiling.block_count
        maps: dict[int, torch.Tensor] = {}
        for policy in dict.fromkeys(self.policies):
            heads = [head for head, one in enumerate(self.policies) if one == policy]
            memory = site.memory.setdefault(f"heads {heads}", {})
            part = site._replace(heads=len(heads), memory=memory)
            found = policy(q[:, :, heads], k[:, :, heads], part)
            keep = q.new_ones(1, 1, n, n, dtype=torch.bool) if found is None else found.to_map()
            maps.update(zip(heads, keep.expand(-1, len(heads), -1, -1).unbind(1), strict=True))
        batch = max(one.shape[0] for one in maps.values())
        return _of_map(torch.stack([maps[head].expand(batch, -1, -1) for head in range(site.heads)], 1), site.tiling)


@dataclass(frozen=True)
class KeepFor:
    """The lists that `policy` made, kept for so many denoising steps; all calls of a layer in these steps share them.

    The lists of every layer stay in memory.  They are made anew for another grid, batch size or device, and where steps begin
    again.

    Source: AdaSpa (Xia et al. 2025, arXiv:2502.21079), which finds that patterns hardly change between steps."""

    policy: Policy
    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1)
        _check_policy("policy", self.policy)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex | None:
        step = _step(self, site)
        key = (self, site.tiling, q.shape[0], site.heads, q.device)
        known, since, found = site.memory.get("kept", (None, 0, None))
        if known == key and since <= step < since + self.steps:
            return found  # type: ignore[no-any-return]
        found = self.policy(q, k, site)
        site.memory["kept"] = key, step, found
        return found


# ---------------------------------------------------------------- parts


def _select(scores: torch.Tensor, site: Site, **options: Any) -> BlockIndex:
    slots, seq, sizes = site.tiling.slots, site.tiling.padded, site.tiling.sizes(scores.device)
    options |= {"block_sizes": sizes, "query_sizes": sizes}
    return select(scores, block_q=slots, block_k=slots, seq_q=seq, seq_k=seq, **options).index


def _of_map(keep: torch.Tensor, tiling: GridTiling) -> BlockIndex:
    slots, seq = tiling.slots, tiling.padded
    return BlockIndex.from_map(keep, block_q=slots, block_k=slots, seq_q=seq, seq_k=seq)


def _window_map(tiling: GridTiling, radii: Any, keep_size: bool, device: torch.device) -> torch.Tensor:
    """bool [1, 1, blocks, blocks] of `video_window`."""

    def make() -> torch.Tensor:
        predicate = video_window(tiling.blocks, radii, keep_size=keep_size)
        return map_of_predicate(predicate, (1, 1), (tiling.padded,) * 2, (tiling.slots,) * 2, device)

    return kept(("window", tiling, radii, keep_size), device, make)


def _by_head(rows: torch.Tensor, heads: int | None = None) -> torch.Tensor:
    """[batch, rows, heads, dim] with the heads first, of the keys as many as there are query heads."""
    rows = rows.transpose(1, 2)
    if heads is None or rows.shape[1] == heads:
        return rows
    return rows.repeat_interleave(heads // rows.shape[1], 1)


def _products(rows_q: torch.Tensor, rows_k: torch.Tensor) -> torch.Tensor:
    """fp32 [batch, heads, rows, rows] of [batch, heads, rows, dim]; 16-bit products are exact, and summed in fp32."""
    if rows_q.dtype == torch.float32 or not rows_q.is_cuda or torch.version.hip:
        return torch.matmul(rows_q.float(), rows_k.float().transpose(-1, -2))
    flat = rows_q.flatten(0, 1), rows_k.flatten(0, 1).transpose(-1, -2)
    products = torch.bmm(*flat, out_dtype=torch.float32).unflatten(0, rows_q.shape[:2])
    return products  # type: ignore[no-any-return]


def _each(share: Share | None) -> Sequence[Any]:
    return share if isinstance(share, tuple) else (share,)


def _radii(name: str, given: Any) -> tuple[int, int, int]:
    return triple(name, (given,) * 3 if isinstance(given, int) else given, low=0)


def _step(policy: object, site: Site) -> int:
    if site.step is None:
        raise ValueRangeError(
            f"{policy!r} needs the denoising step, which nobody said: sparsify the pipeline, or set Sparse.step before each step"
        )
    return site.step


def _check_policy(name: str, given: object) -> None:
    if isinstance(given, type):
        raise DtypeError(f"{name} must be a policy, got its class: call {given.__name__}(..)")
    if not isinstance(given, Callable):  # type: ignore[arg-type]
        raise DtypeError(f"{name} must be a policy, a function of (q, k, site), got {given!r}")
