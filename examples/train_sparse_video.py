"""A small video model that learns dense, is made sparse, and learns back what it lost.

    python examples/train_sparse_video.py              # on a GPU, 8,192 tokens a video
    python examples/train_sparse_video.py --tiny       # on a CPU, 512 tokens

Videos are rendered (`tilefold.video.scene`); the model learns to remove noise from them (flow matching).  Then its attention
follows lists that leave out 80 % of the blocks, which costs quality.  With `trainable=True` each layer has a gated coarse branch
besides; all of the model goes on learning, from the videos and from the dense model's answers (distillation).  The losses of
videos that no step has seen are printed: of the dense model, of what learns on densely as long, of the sparse one before and
behind its learning.  Exit code 1 if less than `--recover` of what the sparse model is behind the dense one comes back."""

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilefold
from tilefold import video
from tilefold.video.scene import Scene, render

PATCH, CUBE = 4, (4, 4, 4)  # pixels of a token's side; tokens of a block


@dataclass(frozen=True)
class Size:
    """Of a run: the grid of tokens, the model, videos of a step and of all, steps of learning dense and sparse."""

    grid: tuple[int, int, int]
    dim: int
    heads: int
    layers: int
    batch: int
    videos: int
    dense: int
    sparse: int


SIZES = {
    "cuda": Size((16, 16, 32), 512, 4, 6, 8, 1024, 1500, 600),
    "tiny": Size((8, 8, 8), 64, 2, 2, 4, 128, 500, 200),
}


class Attention(nn.Module):
    """Dense self-attention; `sparsify` puts its own in the place of `attend`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.out(tilefold.attention(*self.project(x)).flatten(2))
        return done


class Block(nn.Module):
    """A transformer's block, whose norms a time shifts and scales."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.time = nn.Linear(dim, 4 * dim)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, shift_feed, scale_feed = self.time(time)[:, None].chunk(4, -1)
        x = x + self.attention(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        done: Tensor = x + self.feed(F.layer_norm(x, x.shape[-1:]) * (1 + scale_feed) + shift_feed)
        return done


class Model(nn.Module):
    """Noised patches [batch, T * H * W, channels] and times [batch] to the velocity from videos to noise."""

    def __init__(self, size: Size, channels: int = 3 * PATCH * PATCH) -> None:
        super().__init__()
        self.grid, tokens = size.grid, size.grid[0] * size.grid[1] * size.grid[2]
        self.embed, self.last = nn.Linear(channels, size.dim), nn.Linear(size.dim, channels)
        self.time = nn.Sequential(nn.Linear(1, size.dim), nn.SiLU(), nn.Linear(size.dim, size.dim))
        self.place = nn.Parameter(torch.randn(tokens, size.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(size.dim, size.heads) for _ in range(size.layers))

    def forward(self, patches: Tensor, time: Tensor) -> Tensor:
        x, when = self.embed(patches) + self.place, self.time(time[:, None])
        for block in self.blocks:
            x = block(x, when)
        done: Tensor = self.last(F.layer_norm(x, x.shape[-1:]))
        return done


class Adapter(video.Adapter):
    """What `sparsify` asks of this model."""

    def layers(self, model: Any) -> list[nn.Module]:
        return [block.attention for block in model.blocks]

    def grid(self, model: Any, inputs: dict[str, Any]) -> tuple[int, int, int]:
        grid: tuple[int, int, int] = model.grid
        return grid

    def forward(self, layer: Any, attend: Any, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0]
        done: Tensor = layer.out(attend(*layer.project(x), hidden=x).flatten(2))
        return done

    def sizes(self, layer: Any) -> tuple[int, int, int]:
        return layer.qkv.in_features, layer.heads, layer.qkv.in_features // layer.heads


# ---------------------------------------------------------------- learning


@functools.cache
def patches(size: Size, videos: int, seed: int, device: str) -> Tensor:
    """Rendered videos as tokens, about 0 and of deviation 1."""
    frames, height, width = size.grid
    scene = Scene(frames, height * PATCH, width * PATCH, speed=1.0, objects=3)
    pixels = torch.cat([render(scene, 8, seed + first, device) for first in range(0, videos, 8)])
    cut = pixels.unflatten(3, (height, PATCH)).unflatten(5, (width, PATCH))  # [B, T, 3, H, P, W, P]
    tokens: Tensor = cut.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(1, 3)
    return (tokens - 0.5) * 4


def example(size: Size, seed: int, device: str, unseen: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Noised patches, their times and the velocity that is wanted."""
    draw = torch.Generator().manual_seed(seed)
    videos = patches(size, 32 if unseen else size.videos, int(unseen) << 20, device)
    clean = videos[torch.randint(len(videos), (size.batch,), generator=draw).to(device)]
    noise = torch.randn(clean.shape, generator=draw).to(device)
    time = torch.rand(len(clean), generator=draw).to(device)
    share = time[:, None, None]
    return (1 - share) * clean + share * noise, time, noise - clean


def learn(
    model: nn.Module, size: Size, steps: int, rate: float, seed: int, device: str, teacher: nn.Module | None = None
) -> None:
    """Steps of Adam over new videos; teacher: whose answers are learnt, too."""
    gates = {id(one) for name, one in model.named_parameters() if "sparse_branch" in name}  # they begin at 0
    groups = [[one for one in model.parameters() if (id(one) in gates) == are] for are in (False, True)]
    rates = [rate, 10 * rate]
    optimiser = torch.optim.AdamW([{"params": some} for some in groups if some], rate, weight_decay=0.0)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates[: len(optimiser.param_groups)], steps, pct_start=0.1)
    for step in range(steps):
        given, time, wanted = example(size, seed + step, device)
        found = model(given, time)
        loss = F.mse_loss(found, wanted)
        if teacher is not None:
            with torch.no_grad():
                answer = teacher(given, time)
            loss = loss + F.mse_loss(found, answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        plan.step()


@torch.no_grad()
def loss_of(model: nn.Module, size: Size, device: str, batches: int = 8) -> float:
    """Over videos that no step has seen, the same each time."""
    total = 0.0
    for number in range(batches):
        given, time, wanted = example(size, 10_000_000 + number, device, unseen=True)
        total += F.mse_loss(model(given, time), wanted).item()
    return total / batches


def run(size: Size, device: str, sparsity: float, say: Callable[[str], None] = print) -> dict[str, float]:
    """Losses: dense, dense with as many steps more, sparse before learning, sparse with gates behind it."""
    torch.manual_seed(0)
    model, begin = Model(size).to(device), time.perf_counter()

    def row(what: str, loss: float) -> float:
        say(f"| {what} | {loss:.4f} | {time.perf_counter() - begin:.0f} |")
        return loss

    say(
        f"{size.grid} tokens, {sum(p.numel() for p in model.parameters()):,} weights\n\n| | loss | s |\n|---|---:|---:|"
    )
    rates = (2e-3, 1e-3) if size.dim < 256 else (5e-4, 2e-4)
    learn(model, size, size.dense, rates[0], 0, device)
    losses = {"dense": row(f"dense, {size.dense} steps", loss_of(model, size, device))}
    teacher, control = copy.deepcopy(model).eval(), copy.deepcopy(model)
    learn(control, size, size.sparse, rates[1], 1_000_000, device, teacher)
    losses["control"] = row(f"dense, {size.sparse} steps more", loss_of(control, size, device))
    video.sparsify(model, video.Pooled(sparsity=sparsity), adapter=Adapter(), cube=CUBE, trainable=True)
    losses["before"] = row(f"{sparsity:.0%} left out", loss_of(model, size, device))
    learn(model, size, size.sparse, rates[1], 1_000_000, device, teacher)
    losses["after"] = row(f"{sparsity:.0%} left out, {size.sparse} steps", loss_of(model, size, device))
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--sparsity", type=float, default=0.8, help="share of the blocks that is left out (0.8)")
    parser.add_argument("--recover", type=float, default=0.5, help="share of what was lost that has to come back (0.5)")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("needs a GPU; on a CPU: --tiny")
    losses = run(SIZES["tiny" if asked.tiny else "cuda"], "cpu" if asked.tiny else "cuda", asked.sparsity)
    lost, behind = losses["before"] - losses["dense"], losses["after"] - losses["control"]
    print(f"\nbehind the dense model {lost:.4f} before learning, {behind:.4f} then: {1 - behind / lost:.0%} came back")
    return int(behind > (1 - asked.recover) * lost)


if __name__ == "__main__":
    sys.exit(main())
