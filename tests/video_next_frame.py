"""A small model that learns to draw the next frame of rendered video: does training with sparse attention go as with dense?"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilefold import reference
from tilefold.nn import Rotary3D, SparseVideoAttention
from tilefold.reference.rounding import plain
from tilefold.sparse import BlockIndex
from tilefold.video.scene import COLOURS, Scene, patches, render

_REFERENCE: Any = reference
HELD_OUT = 1 << 20  # seeds of the evaluation's videos begin here


@dataclass(frozen=True)
class Training:
    """A task and how long to learn it.

    The model sees scene.frames - 1 frames and draws the last one; its loss is the mean squared error over the pixels of that
    frame.  patch: (rows, columns) of a token, one frame deep.  attention: further arguments of `SparseVideoAttention`.

    By default everything pans by one token a frame, and three frames in cubes of two leave cut blocks: without attention a token
    cannot know what will come into it, so the loss says whether attention reaches its neighbours."""

    scene: Scene = Scene(frames=4, height=32, width=32, objects=3, speed=0.5, pan=(0.0, 4.0))  # noqa: RUF009 - frozen
    patch: tuple[int, int] = (4, 4)
    cube: tuple[int, int, int] = (2, 2, 4)
    dim: int = 64
    heads: int = 2
    layers: int = 1
    batch: int = 8
    steps: int = 250
    rate: float = 3e-3
    seed: int = 0
    rotary: Rotary3D = Rotary3D(theta=30.0)  # noqa: RUF009 - frozen; short periods for a small grid
    attention: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingResult:
    """losses: of every training step, each on new videos.  held_out: mean squared error on videos that were not trained on;
    copy: that of drawing the last seen frame again.  sparsity: part of the pairs of blocks that were not listed for them."""

    losses: list[float]
    held_out: float
    copy: float
    sparsity: float


class PlainVideoAttention(SparseVideoAttention):
    """The same module computed by the reference in plain torch, in the dtype of its tensors: for the CPU, where the
    interpreter is slower, and for comparison.  A top_k is taken by `BlockIndex.from_topk`: the reference goes row by row."""

    @plain()
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        coarse, select = options["coarse"], options.get("select")
        if coarse is not None and select is not None and isinstance(select.top_k, int):
            names = ("weight_k", "weight_v", "scale", "block", "block_sizes", "query_sizes")
            given: Any = {name: options[name] for name in names}
            scores = _REFERENCE.coarse(
                q, k, v, kind=coarse.kind, reduction=coarse.reduction, **given, dtype=q.dtype
            ).scores
            block, sizes = given["block"], {name: given[name] for name in names[-2:]}
            shape = {"block_q": block, "block_k": block, "seq_q": q.shape[1], "seq_k": k.shape[1]}
            options["index"] = BlockIndex.from_topk(scores, select.top_k, **shape, **sizes)
        return _REFERENCE.sparse_video_attention(q, k, v, **options, dtype=q.dtype)


class NextFrame(nn.Module):
    """Tokens of frames to the patches of the next frame: embedding, pre-norm layers of attention and MLP, a residual head.

    forward(x [B, T * H * W, features], grid (T, H, W)) -> [B, H * W, features], the last frame's patches plus what the model says
    changes; at the start it says nothing changes."""

    def __init__(self, features: int, dim: int, attentions: list[SparseVideoAttention]) -> None:
        super().__init__()
        self.embed = nn.Linear(features, dim)
        self.attentions = nn.ModuleList(attentions)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in attentions
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in attentions)
        self.head = nn.Linear(dim, features)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor, grid: tuple[int, int, int], density: list[float] | None = None) -> torch.Tensor:
        """density: a list to which each layer adds the part of the pairs of blocks that it listed (reads values on the host)."""
        y = self.embed(x)
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            if density is None:
                y = y + attention(norm(y), grid)
            else:
                out, stages = attention(norm(y), grid, return_stages=True)
                density.append(float(stages.index.counts.float().mean()) / stages.index.kv_blocks)
                y = y + out
            y = y + mlp(y)
        last = grid[1] * grid[2]
        drawn: torch.Tensor = x[:, -last:] + self.head(y[:, -last:])
        return drawn


def train(
    training: Training, attention: type[SparseVideoAttention] = SparseVideoAttention, device: torch.device | str = "cpu"
) -> TrainingResult:
    """Learn the task and report.  A seed gives two kinds of attention the same videos and the same start of what they share.

    attention: the class of the attention modules."""
    given = training
    features = COLOURS * given.patch[0] * given.patch[1]
    torch.manual_seed(given.seed)
    options = {"cube": given.cube, "rotary": given.rotary, **given.attention}
    modules = [attention(given.dim, given.heads, **options) for _ in range(given.layers)]
    torch.manual_seed(given.seed + 1)  # attention modules of different kinds draw different amounts
    model = NextFrame(features, given.dim, modules).to(device)
    _same_start(modules, given.seed)
    optimiser = torch.optim.AdamW(model.parameters(), given.rate, weight_decay=0.01)
    losses = []
    for step in range(given.steps):
        for one in optimiser.param_groups:
            one["lr"] = given.rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / given.steps))
        seen, target, grid = _example(given, given.seed * HELD_OUT + step, device)
        loss = nn.functional.mse_loss(model(seen, grid), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return _evaluated(model, given, [float(one) for one in losses], device)


def _same_start(modules: list[SparseVideoAttention], seed: int) -> None:
    """Draw the projections that every kind of attention has, the same for all of them."""
    torch.manual_seed(seed + 2)
    for one in modules:
        one.qkv.reset_parameters()
        one.out.reset_parameters()


def _example(
    given: Training, seed: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """(seen [B, T * H * W, features], target [B, H * W, features], grid of what is seen)."""
    tokens, (t, h, w) = patches(render(given.scene, given.batch, seed, device), (1, *given.patch))
    tokens = 2 * tokens - 1
    seen, target = tokens.split((t * h * w - h * w, h * w), 1)
    return seen, target, (t - 1, h, w)


@torch.no_grad()
def _evaluated(
    model: NextFrame, given: Training, losses: list[float], device: torch.device | str, rounds: int = 8
) -> TrainingResult:
    """Mean squared errors and density over `rounds` batches of new videos."""
    drawn, copied = 0.0, 0.0
    density: list[float] = []
    for number in range(rounds):
        seen, target, grid = _example(given, HELD_OUT // 2 + number, device)
        drawn += float(nn.functional.mse_loss(model(seen, grid, density), target)) / rounds
        copied += float(nn.functional.mse_loss(seen[:, -target.shape[1] :], target)) / rounds
    return TrainingResult(losses, drawn, copied, 1 - sum(density) / len(density))
