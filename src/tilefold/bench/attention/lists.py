"""The lists of blocks that the sparse benchmarks attend: drawn on the CPU from a seed, so that every run meets the same ones."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor

from tilefold.errors import ShapeError, ValueRangeError
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.sparse.select import kept_blocks
from tilefold.sparse import BlockIndex

KINDS = ("random", "video", "uneven")
LATENT = (16, 28, 52)  # a video's latent tokens (frames, height, width): 23296, the length of the published table
CUBE = (4, 4, 4)  # the tokens of one block of 64, neighbours in time and space
REGION = (2, 2, 2)  # cubes whose queries look at much the same keys
# What a KV block's mass is made of: the head's part, the region's and the query block's own, each uniform up to this.
MASS = (1.0, 0.4, 0.1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which KV blocks the query blocks list.

    kind:
        "random": each list holds `kept` blocks, drawn without replacement, every choice as likely as another.
        "video": the tokens are a latent video cut into cubes of 4 x 4 x 4 tokens, block number (t * H + h) * W + w. Half of a
            list are the cubes nearest to its own (3-D distance of the centres, in tokens; at a border the window leans inside),
            the other half those of highest mass among the rest. Mass is mostly the head's, less the region's of 2 x 2 x 2 cubes
            around the query, least the query block's own (`MASS`), so neighbouring query blocks share most of their blocks.
        "uneven": the counts of a head's query blocks climb geometrically from 1 to all blocks, in random order (Zipf: a count c
            comes up in proportion to 1 / c), the blocks are drawn as in "random". The sparsity follows: 83.0 % of 364 blocks.
    sparsity: per cent of the blocks that a list leaves out at most (`kept` is rounded up); of "uneven" it says nothing (0).
    block_q, block_k: tokens per query and KV block. latent: tokens of the video (frames, height, width).
    """

    kind: str
    sparsity: float = 0.0
    block_q: int = 64
    block_k: int = 64
    latent: tuple[int, int, int] = LATENT

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueRangeError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0 <= self.sparsity < 100:
            raise ValueRangeError(f"sparsity must be from 0 to below 100 per cent, got {self.sparsity!r}")

    @property
    def blocks(self) -> str:
        """The block sizes, as "64" or "64x128"."""
        return f"{self.block_q}" if self.block_q == self.block_k else f"{self.block_q}x{self.block_k}"

    @property
    def name(self) -> str:
        """As in a case's name: "b64_random_s65.1", "b64_uneven"."""
        return f"b{self.blocks}_{self.kind}" + ("" if self.kind == "uneven" else f"_s{self.sparsity:g}")

    @property
    def title(self) -> str:
        """As in a table: "64 random 65.1 %"."""
        return f"{self.blocks} {self.kind}" + ("" if self.kind == "uneven" else f" {self.sparsity:g} %")

    def kept(self, kv_blocks: int) -> int:
        """How many of `kv_blocks` a list keeps: at least what the sparsity asks for, and one."""
        return kept_blocks(self.sparsity / 100, kv_blocks)


@lru_cache(maxsize=2)
def lists_of(pattern: Pattern, problem: AttentionProblem, seed: int = 0) -> BlockIndex:
    """The index of a pattern on a problem, on the CPU: lists of their own for every batch entry and query head, ascending.

    The same for a seed everywhere. Memory while it is made: about 25 bytes for each pair of blocks of one batch entry.
    Raises ShapeError if the tokens of a video pattern are not those of the problem."""
    p = problem
    rows, columns = -(-p.seq_q // pattern.block_q), -(-p.seq_k // pattern.block_k)
    draw = {"random": random_map, "video": video_map, "uneven": uneven_map}[pattern.kind]
    generator = torch.Generator().manual_seed(seed)
    if pattern.kind == "video":
        _check_video(pattern, problem)
    keep = torch.stack([draw(pattern, p.heads, rows, columns, generator) for _ in range(p.batch)])
    return BlockIndex.from_map(
        keep,
        block_q=pattern.block_q,
        block_k=pattern.block_k,
        seq_q=p.seq_q,
        seq_k=p.seq_k,
        capacity=int(keep.sum(-1).max()),
        check=True,
    )


def random_map(pattern: Pattern, heads: int, rows: int, columns: int, generator: Generator) -> Tensor:
    """bool [heads, rows, columns] of the kind "random"."""
    return highest(torch.rand(heads, rows, columns, generator=generator), pattern.kept(columns))


def uneven_map(pattern: Pattern, heads: int, rows: int, columns: int, generator: Generator) -> Tensor:
    """bool [heads, rows, columns] of the kind "uneven"."""
    ladder = [round(columns ** (row / max(1, rows - 1))) for row in range(rows)]
    counts = torch.tensor(ladder)[torch.rand(heads, rows, generator=generator).argsort(-1)]
    rank = torch.rand(heads, rows, columns, generator=generator).argsort(-1).argsort(-1)
    return rank < counts[..., None]


def video_map(pattern: Pattern, heads: int, rows: int, columns: int, generator: Generator) -> Tensor:
    """bool [heads, rows, columns] of the kind "video"."""
    kept = pattern.kept(columns)
    cubes = [size // side for size, side in zip(pattern.latent, CUBE, strict=True)]
    place = torch.cartesian_prod(*(torch.arange(n) for n in cubes))
    centre = place * torch.tensor(CUBE)
    distance = (centre[:, None] - centre[None]).square().sum(-1)
    near = highest(-(distance * columns + torch.arange(columns)), kept // 2)  # of equally near cubes the first
    parts = [-(-n // side) for n, side in zip(cubes, REGION, strict=True)]
    t, h, w = (place // torch.tensor(REGION)).unbind(-1)
    region = (t * parts[1] + h) * parts[2] + w
    mass = MASS[0] * torch.rand(heads, 1, columns, generator=generator)
    mass = mass + MASS[1] * torch.rand(heads, math.prod(parts), columns, generator=generator)[:, region]
    mass = mass + MASS[2] * torch.rand(heads, rows, columns, generator=generator)
    return highest(mass + sum(MASS) * near, kept)


def highest(scores: Tensor, count: int) -> Tensor:
    """bool, true at the `count` highest scores of each row."""
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    return keep.scatter_(-1, scores.topk(count, -1).indices, True)


def _check_video(pattern: Pattern, problem: AttentionProblem) -> None:
    tokens, sides = math.prod(pattern.latent), zip(pattern.latent, CUBE, strict=True)
    if (problem.seq_q, problem.seq_k) != (tokens, tokens) or any(size % side for size, side in sides):
        raise ShapeError(
            f"a latent video of {pattern.latent} has {tokens} tokens in cubes of {CUBE}, but the problem has "
            f"{problem.seq_q} queries and {problem.seq_k} keys"
        )
    if (pattern.block_q, pattern.block_k) != (math.prod(CUBE),) * 2:
        raise ShapeError(f"a block of a video is a cube of {math.prod(CUBE)} tokens, got blocks of {pattern.blocks}")


# --- what lists hold ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def listed_blocks(pattern: Pattern, problem: AttentionProblem) -> int:
    """How many pairs of a query block and a KV block are listed, over all batch entries and query heads."""
    return int(lists_of(pattern, problem).counts.sum())


@lru_cache(maxsize=256)
def kept_counts(pattern: Pattern, problem: AttentionProblem) -> tuple[int, int]:
    """The shortest and the longest list, in KV blocks."""
    if pattern.kind != "uneven":
        kept = pattern.kept(-(-problem.seq_k // pattern.block_k))
        return kept, kept
    counts = lists_of(pattern, problem).counts
    return int(counts.min()), int(counts.max())


@lru_cache(maxsize=256)
def touched_blocks(pattern: Pattern, problem: AttentionProblem) -> int:
    """How many KV blocks some query lists, over all batch entries and KV heads: those that have to be read at least once."""
    keep = lists_of(pattern, problem).to_map()
    return int(keep.unflatten(1, (problem.kv_heads, problem.group)).any(3).any(2).sum())


def density(pattern: Pattern, problem: AttentionProblem) -> float:
    """The share of all pairs of blocks that is listed, 0 to 1."""
    rows, columns = -(-problem.seq_q // pattern.block_q), -(-problem.seq_k // pattern.block_k)
    return listed_blocks(pattern, problem) / (rows * columns * problem.batch * problem.heads)
