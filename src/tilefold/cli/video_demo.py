"""The demo of `tilefold video`: a rendered scene, attended by each policy, as a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilefold import reference, sparse_attention, video
from tilefold.bench.page import Part, Picture, Rows, Words, new_figure
from tilefold.cli.options import numbers
from tilefold.errors import ValueRangeError
from tilefold.plan.device import H200
from tilefold.plan.sparse.video import VideoShape
from tilefold.sparse import GridTiling
from tilefold.video import scene
from tilefold.video.measure import dense_results, least_seconds, left_out

HEAD = ("policy", "left out", "mass", "error", "ms at least", "x dense", "")
PATCH, HEADS, DIM = (1, 4, 4), 4, 64
RED, PALE = "#e5182b", 0.92


def policies_at(sparsity: float) -> list[Any]:
    """What the demo shows."""
    ranked = [video.Pooled(sparsity=sparsity), video.Antidiagonal(sparsity=sparsity)]
    return [*ranked, video.Gini(0.4, 0.7), video.SlidingTile(1), video.Radial(0.25)]


def policy_of(path: Path, layer: int) -> tuple[Any, int]:
    """(the policy of a layer that a file of `calibrate` names, its number of heads)."""
    try:
        policy: Any = video.policy_from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueRangeError(f"policy must be a file that calibrate wrote, got {path} ({error})") from None
    if isinstance(policy, video.ByLayer):
        policy = policy.policies.get(layer, policy.otherwise)
    if policy == video.Dense():
        raise ValueRangeError(f"layer {layer} is dense in {path}: there are no lists to show")
    return policy, len(policy.policies) if isinstance(policy, video.ByHead) else HEADS


class Demo:
    """A scene attended by each policy: rows of the table, and of the picture."""

    def __init__(
        self,
        device: str,
        quick: bool,
        tried: Sequence[Any],
        head: int,
        query: str | None,
        seed: int,
        heads: int = HEADS,
    ) -> None:
        size = scene.Scene(8, 32, 48) if quick else scene.Scene(16, 64, 96)
        self.frames = scene.render(size, seed=seed, device=device)
        tokens, grid = scene.patches(self.frames, PATCH)
        self.tiling, self.head = GridTiling(grid), head
        self.heads = heads
        t, h, w = (side // 2 for side in grid) if query is None else whole_numbers(query, "query")
        if not (t < grid[0] and h < grid[1] and w < grid[2]):
            raise ValueRangeError(f"query must lie in the grid {grid} of tokens, got {(t, h, w)}")
        self.qkv = scene.project(tokens, self.tiling, heads, DIM, seed=seed)
        site = video.Site(0, 1, heads, None, self.tiling, DIM**-0.5, {})
        _, down, across = grid
        self.block = int(self.tiling.destination(device)[(t * down + h) * across + w]) // self.tiling.slots
        self.dense = dense_results(*self.qkv, self.tiling, site.scale)
        self.rows: list[tuple[str, ...]] = []
        self.shown = [("how much its queries attend each block", self._mass())]
        for policy in tried:
            self._attend(policy, site)

    def _mass(self) -> torch.Tensor:
        """[blocks]: the probability that the query block puts on each block, as a share of the largest."""
        q, k, _ = (one[0, :, self.head] for one in self.qkv)
        own = q[self.block * self.tiling.slots :][: self.tiling.slots]
        mass = (own @ k.T * DIM**-0.5).softmax(-1).mean(0).view(-1, self.tiling.slots).sum(-1)
        bright: torch.Tensor = (mass / mass.max()).sqrt()
        return bright

    def _attend(self, policy: Any, site: Any) -> None:
        index = policy(*self.qkv[:2], site)
        found = left_out(*self.qkv, index, self.tiling, site.scale, self.dense)
        listed, mass, error = (float(one.mean()) for one in found)
        shown = policy.policies[self.head] if isinstance(policy, video.ByHead) else policy
        name = repr(shown).replace(", top_p=None, window=None", "")
        if shown is not policy:
            name = f"head {self.head}: {name}"
        figures = (f"{1 - listed:.1%}", f"{mass:.1%}", f"{error:.3f}", *least_times(listed))
        self.rows.append((name, *figures, self._judged(index, site)))
        here = index.expand(1, self.heads).to_map()[0, self.head, self.block]
        self.shown.append((f"{name}\nleaves out {1 - listed:.0%}, keeps {mass:.0%} of the mass", here.float()))

    def _judged(self, index: Any, site: Any) -> str:
        """ok, or WRONG: the rows of the block that is shown, of the head that is shown, against fp64 over its list."""
        out = sparse_attention(*self.qkv, index, scale=site.scale)
        rows = slice(self.block * self.tiling.slots, (self.block + 1) * self.tiling.slots)
        q, k, v = (one[:, :, self.head, None].double().cpu() for one in self.qkv)
        listed = index.expand(1, self.heads).to_map()[:, self.head, None, self.block, None]
        keep = listed.repeat_interleave(self.tiling.slots, -1).cpu()

        def exact() -> Any:
            return reference.attention(q[:, rows], k, v, mask=keep, scale=site.scale)[0]

        shown = out[:, rows, self.head, None].cpu()
        verdict = reference.compare(shown, exact(), reference.deviating(exact, out.dtype))
        return "ok" if verdict.ok else "WRONG"

    @property
    def words(self) -> str:
        t, blocks = self.tiling.grid[0], self.tiling.block_count
        return (
            f"A rendered video of {t} frames, {self.tiling.tokens} tokens in {blocks} cubes of 4 x 4 x 4, {self.heads} heads of "
            f"{DIM}. mass: the mean share of a query's attention that is kept. error: relative L2 distance from dense "
            "attention's output. ms at least: one layer's attention of Wan 14B at 720p (75,600 tokens, 40 heads of 128, bf16) "
            "with as large a share of blocks listed, by the rates of an H200, scores and selection included; x dense: how many "
            "times less than dense. A kernel takes longer. The last column: the shown block's rows against fp64."
        )

    def said(self) -> list[Part]:
        """What is printed."""
        return [Words(self.words), Rows(HEAD, tuple(self.rows))]

    def parts(self) -> list[Part]:
        """Of the page."""
        caption = (
            "One frame of each row of cubes in time. Framed: the query's block. The first row shows how much its queries attend "
            "each block; the others which blocks a policy lists for it, the rest is pale."
        )
        return [*self.said(), Picture(self.figure(), caption)]

    def figure(self) -> Any:
        """A row for each way to attend, a frame for each row of cubes in time."""
        (times, down, across), cube = self.tiling.blocks, self.tiling.cube
        at = self.block // (down * across), self.block // across % down, self.block % across
        height, width = self._sides()
        figure: Any = new_figure(9, 1.75 * len(self.shown))
        from matplotlib.patches import Rectangle

        grid = figure.subplots(len(self.shown), times, squeeze=False)
        for line, (title, lit) in zip(grid, self.shown, strict=True):
            light = lit.view(times, down, across).cpu()
            for t, axes in enumerate(line):
                self._draw(axes, min(t * cube[0] + cube[0] // 2, self.tiling.grid[0] - 1), light[t])
            corner = at[2] * width - 0.5, at[1] * height - 0.5
            line[at[0]].add_patch(Rectangle(corner, width, height, fill=False, edgecolor=RED, linewidth=2))
            line[0].set_title(title, fontsize=11, loc="left")
        figure.suptitle(f"The blocks that one block of queries attends, head {self.head}", fontsize=14)
        return figure

    def _draw(self, axes: Any, frame: int, light: torch.Tensor) -> None:
        """A frame, paler where its blocks are not lit."""
        height, width = self._sides()
        picture = self.frames[0, frame * PATCH[0]].permute(1, 2, 0).cpu()
        clear = (0.15 + 0.85 * light).repeat_interleave(height, 0).repeat_interleave(width, 1)
        clear = clear[: picture.shape[0], : picture.shape[1], None]
        axes.imshow((picture * clear + PALE * (1 - clear)).numpy(), interpolation="nearest")
        axes.set_axis_off()

    def _sides(self) -> tuple[int, int]:
        """Height and width of a block, in pixels."""
        return self.tiling.cube[1] * PATCH[1], self.tiling.cube[2] * PATCH[2]


def least_times(listed: float) -> tuple[str, str]:
    """Cells, with such a share of blocks listed: the least milliseconds of a layer's attention of Wan 14B at 720p on an H200, and
    how many times less than dense attention that is."""
    sparse, dense = least_seconds(VideoShape(1, 40, 40, 75600, 128), listed, H200)
    return f"{1e3 * sparse:.1f}", f"{dense / sparse:.1f}"


def whole_numbers(text: str, name: str) -> tuple[int, int, int]:
    """T,H,W."""
    t, h, w = numbers(text, f"{name} must be T,H,W, three whole numbers", counts=(3,), above=-1)
    return t, h, w
