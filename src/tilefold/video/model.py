"""`sparsify`: a video model whose self-attention follows lists of blocks, and `desparsify`, the way back."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..sparse import GridTiling
from ..sparse.tiling import block_cube, triple
from ..sparse.validate import SMALLEST_BLOCK
from .adapters import ADAPTERS, Adapter, adapter_of
from .attend import add_coarse, attend_lists, lists_of
from .policies import Pooled
from .site import Observer, Pass, Policy, Site, Text

_NAME = "_tilefold_sparse"
BRANCH = "sparse_branch"  # the attribute of a layer, and so a part of its parameters' names
LONGEST_SIDE = 8


def sparsify(
    model: Any,
    policy: Policy | None = None,
    *,
    cube: Sequence[int] | None = None,
    adapter: Adapter | None = None,
    observe: Observer | None = None,
    trainable: bool = False,
) -> Any:
    """Make the self-attention of a video model follow the lists of a policy, in place.

    Args:
        model: a WanTransformer3DModel, HunyuanVideoTransformer3DModel, LTXVideoTransformer3DModel or CogVideoXTransformer3DModel
            of Diffusers; a pipeline of Diffusers, of which every such transformer is taken; or any module with an `adapter`.
        policy: which blocks are attended, see `tilefold.video.policies`; None: `Pooled(sparsity=0.8)`.
        cube: tokens of a block (t, h, w), together a power of two of at least 16; None: for each grid the cube of 64 tokens that
            pads it least, `fitting_cube`.
        adapter: where the model makes q, k and v, an `Adapter`; None: that of the model's class.
        observe: a function of (site, (q, k, v), lists), called before each attention.
        trainable: add a coarse branch with a gate to each layer: out = fine + gate * coarse, the gate a linear layer of the
            hidden states, 0 at the start.  The layer owns it as `sparse_branch`.  Layers and steps that a policy leaves dense
            stay without it.  See `trainable_parameters`.

    Returns:
        A `Sparse` for a model, a list of them for a pipeline, in the order of its components.

    Tokens are turned into cubes once a forward pass, behind the patch embedding, with the rotary tables, and back before the last
    norm.  Cross-attention stays as it is.  Text in the same attention is seen by all tokens and sees all.  Slots that pad a cube
    go through the model's other layers, too.  Sparsify before torch.compile.

    Raises:
        Unsupported for a model that nobody knows or that was compiled, and with trainable for one that is sharded already or
        whose adapter has no `sizes`; ValueRangeError for one that is sparse already;
        ValueRangeError, ShapeError or DtypeError naming cube, policy, observe, adapter or trainable.

    Source: block-sparse attention over cubes of a video (Zhang et al. 2025, arXiv:2502.04507 and arXiv:2505.13389)."""
    chosen: Policy = Pooled(sparsity=0.8) if policy is None else policy
    for name, value in (("policy", chosen), ("observe", observe)):
        if isinstance(value, type):
            raise DtypeError(f"{name} must be a function, got the class {value.__name__}: call it")
        if value is not None and not callable(value):
            raise DtypeError(f"{name} must be a function, got {value!r}")
    if adapter is not None and not isinstance(adapter, Adapter):
        raise DtypeError(f"adapter must be a tilefold.video.Adapter, got {adapter!r}")
    if not isinstance(trainable, bool):
        raise DtypeError(f"trainable must be True or False, got {trainable!r}")
    sides = None if cube is None else block_cube(cube)
    if isinstance(model, nn.Module):
        return Sparse(model, _adapter(model, adapter), chosen, sides, observe, None, trainable)
    if adapter is not None:
        raise ValueRangeError("adapter was given with a pipeline, which has many modules: sparsify its transformer")
    found = [part for part in _parts(model) if adapter_of(part) is not None]
    if not found:
        raise Unsupported(f"model is a {type(model).__name__} without a transformer that is known: {_known()}")
    scheduler = getattr(model, "scheduler", None)
    return [Sparse(part, _adapter(part, None), chosen, sides, observe, scheduler, trainable) for part in found]


def desparsify(model: Any) -> None:
    """Undo `sparsify`: the layers and processors that were there, the same bits; nothing for a model that is not sparse."""
    for part in [model] if isinstance(model, nn.Module) else _parts(model):
        made = part.__dict__.get(_NAME)
        if made is not None:
            made.restore()


def fitting_cube(grid: Sequence[int], tokens: int = 64) -> tuple[int, int, int]:
    """The cube of `tokens` tokens, a power of two, that pads a grid (T, H, W) least; of several the one with the least surface.
    No side is longer than 8, so that a block's tokens are neighbours; sides may be longer if 8 x 8 x 8 is too small."""
    sizes = triple("grid", grid)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < SMALLEST_BLOCK or tokens & (tokens - 1):
        raise ValueRangeError(f"tokens must be a power of two of at least {SMALLEST_BLOCK}, got {tokens!r}")
    longest = max(LONGEST_SIDE, 2 ** math.ceil(math.log2(tokens) / 3))
    powers = [1 << i for i in range(tokens.bit_length()) if 1 << i <= longest]
    cubes = [(t, h, tokens // (t * h)) for t in powers for h in powers if tokens // (t * h) in powers]

    best, least, surface = cubes[0], 0, 0
    for t, h, w in cubes:  # no min(.., key=): compilers do not take it of symbolic sizes
        padded, sides = GridTiling(sizes, (t, h, w)).padded, t * h + t * w + h * w
        if least == 0 or padded < least or (padded == least and sides < surface):
            best, least, surface = (t, h, w), padded, sides
    return best


class CoarseBranch(nn.Module):
    """The gate of one layer: a linear layer of the hidden states, one number for each token, head and channel.

    gate [B, S, channels] -> [B, S, heads, dim].  Weight and bias start at 0, so the layer starts as attention over the lists.
    The coarse branch has no weights: it is attention among the means of blocks.

    Source: VSA (Zhang et al. 2025, arXiv:2505.13389), whose to_gate_compress it is."""

    def __init__(
        self, channels: int, heads: int, dim: int, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.gate = nn.Linear(channels, heads * dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Closed: the gate is 0 for every token."""
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.gate(hidden).unflatten(-1, (self.heads, self.dim))
        return gate


class Sparse:
    """What `sparsify` made of one model.

    model, adapter, policy, observe: as given; policy and observe may be set between forward passes.
    layers: the modules whose attention is sparse, in order.  trainable: whether they have gates.
    now: the present or last forward pass.
    step: number of the denoising step, from 0; a pipeline's scheduler says it, for a model alone whoever runs it sets it."""

    def __init__(
        self, model: nn.Module, adapter: Adapter, policy: Policy, cube: tuple[int, int, int] | None, observe: Observer | None,
        scheduler: Any, trainable: bool = False,
    ) -> None:  # fmt: skip
        if _NAME in model.__dict__:
            raise ValueRangeError("model is sparse already: tilefold.video.desparsify(model) first")
        self.model, self.adapter, self.policy, self.observe = model, adapter, policy, observe
        self.cube, self.scheduler, self.trainable = cube, scheduler, trainable
        self.layers = list(adapter.layers(model))
        branches = [_branch(adapter, layer) if trainable else None for layer in self.layers]
        self.now: Pass | None = None
        self._step: int | None = None
        self._names = list(inspect.signature(model.forward).parameters)
        self._once = adapter.once(model)
        self._originals = []
        for number, (layer, branch) in enumerate(zip(self.layers, branches, strict=True)):
            if branch is not None:
                layer.add_module(BRANCH, branch)
            self._originals.append(adapter.install(layer, Attend(self, number, branch)))
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        self._handles += adapter.hooks(model, self._present)
        model.__dict__[_NAME] = self

    def __repr__(self) -> str:
        return f"Sparse({type(self.model).__name__}, {self.policy!r}, {len(self.layers)} layers)"

    @property
    def step(self) -> int | None:
        if self._step is None and self.scheduler is not None:
            return getattr(self.scheduler, "step_index", None) or 0
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ValueRangeError(f"step must be a whole number of at least 0, or None, got {step!r}")
        self._step = step

    def tiling(self, grid: Sequence[int]) -> GridTiling:
        """How the tokens of a grid (T, H, W) lie in blocks."""
        sizes = triple("grid", grid)
        return GridTiling(sizes, fitting_cube(sizes) if self.cube is None else self.cube)

    def restore(self) -> None:
        """See `desparsify`."""
        for handle in self._handles:
            handle.remove()
        for layer, original in zip(self.layers, self._originals, strict=True):
            self.adapter.remove(layer, original)
            if self.trainable:
                delattr(layer, BRANCH)
        del self.model.__dict__[_NAME]

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        now = Pass(self.tiling(self.adapter.grid(model, inputs)), self.step, self._once)
        self.now = now
        changed = self.adapter.begin(now, inputs)
        return ((), inputs | changed) if changed else None

    def _present(self) -> Pass:
        if self.now is None:
            raise Unsupported("attention was called outside of the model's forward pass, so its grid is not known")
        return self.now


class Attend:
    """The attention of one layer, which its adapter calls: see `Adapter.forward`."""

    def __init__(self, sparse: Sparse, layer: int, branch: CoarseBranch | None = None) -> None:
        self.sparse, self.layer, self.branch = sparse, layer, branch
        self.memory: dict[str, Any] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        text: Text | None = None,
        scale: float | None = None,
        now: Pass | None = None,
        hidden: torch.Tensor | None = None,
    ) -> Any:
        now = self.sparse._present() if now is None else now
        tiling = now.tiling
        if not now.tiled:
            q, k, v = (tiling.tile(one) for one in (q, k, v))
        elif q.shape[1] != tiling.padded:
            raise ShapeError(f"q has {q.shape[1]} tokens, expected {tiling.padded}, those of {tiling}")
        q, k = q.to(v.dtype), k.to(v.dtype)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        site = Site(self.layer, len(self.sparse.layers), q.shape[2], now.step, tiling, scale, self.memory)
        index = lists_of(self.sparse.policy, q, k, site)
        if self.sparse.observe is not None:
            with torch.no_grad():
                self.sparse.observe(site, (q, k, v), index)
        out, out_text = attend_lists(q, k, v, index, tiling, text, scale)
        if index is not None and self.branch is not None:
            if hidden is None:
                raise Unsupported(
                    "hidden was not given to attend, but the model is trainable: its gates read the hidden states"
                )
            gate = self.branch(hidden)
            out = add_coarse(q, k, v, out, gate if now.tiled else tiling.tile(gate), tiling, scale)
        if not now.tiled:
            out = tiling.untile(out)
        return out if text is None else (out, out_text)


def sparse_of(model: nn.Module) -> Sparse | None:
    """What `sparsify` made of a model, compiled since or not; None if it is not sparse."""
    model = getattr(model, "_orig_mod", model)
    found: Sparse | None = model.__dict__.get(_NAME)
    return found


def _branch(adapter: Adapter, layer: nn.Module) -> CoarseBranch:
    try:
        sizes = adapter.sizes(layer)
    except NotImplementedError:
        raise Unsupported(
            f"adapter {type(adapter).__name__} has no method sizes(layer), which a trainable model needs: (channels, heads, dim)"
        ) from None
    like = next((one for one in layer.parameters() if one.is_floating_point()), None)
    if hasattr(like, "device_mesh"):
        raise Unsupported("model is sharded already: sparsify it with trainable=True first, then shard it")
    return CoarseBranch(*sizes, None if like is None else like.device, None if like is None else like.dtype)


def _adapter(model: nn.Module, given: Adapter | None) -> Adapter:
    if hasattr(model, "_orig_mod"):
        raise Unsupported("model is compiled already: sparsify the model itself, then compile it")
    found = adapter_of(model) if given is None else given
    if found is None:
        raise Unsupported(f"model is a {type(model).__name__}, which needs an adapter of its own: {_known()}")
    return found


def _known() -> str:
    return f"known are {', '.join(ADAPTERS)}; for another model give adapter, a tilefold.video.Adapter"


def _parts(pipeline: Any) -> list[nn.Module]:
    """The modules of a pipeline."""
    parts = getattr(pipeline, "components", None)
    if not isinstance(parts, dict):
        raise DtypeError(f"model must be a torch.nn.Module or a pipeline of Diffusers, got {type(pipeline).__name__}")
    return [part for part in parts.values() if isinstance(part, nn.Module)]
