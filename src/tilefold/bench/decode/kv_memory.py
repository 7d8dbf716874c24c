"""What a KV cache takes, contiguous and in pages, for a model and a workload: the allocator's own figures, not a formula's."""

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from tilefold.bench.page import new_figure
from tilefold.errors import OutOfPages, Unsupported, ValueRangeError
from tilefold.paged import PageAllocator

GIB = 1 << 30
MOST_SEQUENCES = 1 << 30  # no bound: pages are
MOST_PAGES = 1 << 24  # that a simulation allocates: more would take minutes and gigabytes


@dataclass(frozen=True, slots=True)
class KVModel:
    """What of a model decides the size of its cache."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    head_dim_v: int

    def row_bytes(self, itemsize: int) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * self.kv_heads * (self.head_dim + self.head_dim_v) * itemsize


# layers, KV heads, head dim: from each model's published config.json
MODELS = {
    name: KVModel(name, layers, heads, dim, dim)
    for name, layers, heads, dim in (
        ("llama-2-7b", 32, 32, 128),
        ("llama-3.1-8b", 32, 8, 128),
        ("llama-3.1-70b", 80, 8, 128),
        ("mistral-7b", 32, 8, 128),
        ("qwen2.5-0.5b", 24, 2, 64),
        ("qwen2.5-1.5b", 28, 2, 128),
        ("qwen2.5-7b", 28, 4, 128),
        ("qwen2.5-14b", 48, 8, 128),
        ("qwen2.5-32b", 64, 8, 128),
        ("qwen2.5-72b", 80, 8, 128),
        ("qwen3-8b", 36, 8, 128),
    )
}


@dataclass(frozen=True, slots=True)
class Workload:
    """lengths: tokens of each sequence when it ends; max_tokens: what a contiguous cache keeps for each; shared: the first
    tokens of every sequence that are the same."""

    lengths: tuple[int, ...]
    max_tokens: int
    shared: int = 0

    @classmethod
    def drawn(
        cls, count: int, prompt: float, output: float, spread: float, max_tokens: int, seed: int, shared: int = 0
    ) -> "Workload":
        """Prompts and outputs lognormal, of these medians and sigma `spread`; sums are cut at max_tokens."""
        draw = random.Random(seed)

        def some(median: float) -> int:
            return max(1, round(draw.lognormvariate(math.log(median), spread)))

        return cls(tuple(min(max_tokens, some(prompt) + some(output)) for _ in range(count)), max_tokens, shared)


def lengths_in(path: Path, max_tokens: int) -> tuple[int, ...]:
    """One length a line; empty lines and those that begin with # are skipped.  ValueRangeError names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueRangeError(f"--lengths must be a text file that can be read, got {str(path)!r}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= max_tokens):
            raise ValueRangeError(
                f"{path}, line {number}: expected a length from 1 to {max_tokens} (--max-tokens), got {text!r}"
            )
        found.append(int(text))
    if not found:
        raise ValueRangeError(f"--lengths must hold at least one length, {str(path)!r} has none")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Layout:
    """page_size 0: contiguous, max_tokens rows a sequence.  Bytes are of the whole workload at once, each sequence at its full
    length; concurrent: how many of its sequences, in order and again from the first, fit the budget together.  Of the budget,
    in bytes: pool_used by their tokens, pool_wasted in their pages (or rows kept for them), pool_unused for no sequence."""

    page_size: int
    bytes_allocated: int
    bytes_used: int
    concurrent: int
    pool_used: int
    pool_wasted: int
    pool_unused: int

    @property
    def name(self) -> str:
        return f"pages of {self.page_size}" if self.page_size else "contiguous"

    @property
    def bytes_wasted(self) -> int:
        """Allocated for no token."""
        return self.bytes_allocated - self.bytes_used


def layouts_of(work: Workload, row_bytes: int, page_sizes: Sequence[int], budget: int) -> list[Layout]:
    """Contiguous first, then each page size.  budget: bytes.  ValueRangeError for a shared prefix that leaves nothing."""
    if work.shared >= max(work.lengths):
        raise ValueRangeError(
            f"--shared-prefix must be less than the longest sequence, {max(work.lengths)} tokens, got {work.shared}: any number "
            f"of such sequences fits"
        )
    rows = sum(work.lengths)
    contiguous, fit = len(work.lengths) * work.max_tokens, budget // (work.max_tokens * row_bytes)
    times, rest = divmod(fit, len(work.lengths))
    held = times * rows + sum(work.lengths[:rest])
    pool = _pool_bytes(fit, held, fit * work.max_tokens - held, row_bytes, budget)
    found = [Layout(0, contiguous * row_bytes, rows * row_bytes, *pool)]
    for size in page_sizes:
        enough = sum(-(-n // size) for n in work.lengths) + -(-work.shared // size)
        allocator = _pool(work, size, enough)
        prefix = _prefix(allocator, work)
        for length in work.lengths:
            _admit(allocator, prefix, length)
        if prefix is not None:
            allocator.free_sequence(prefix)
        s = allocator.statistics(row_bytes)
        pool = _pool_bytes(*_concurrent(work, size, budget // (size * row_bytes)), row_bytes, budget)
        found.append(Layout(size, s.bytes_in_pages, s.bytes_used, *pool))
    return found


def _pool_bytes(fit: int, held: int, empty: int, row_bytes: int, budget: int) -> tuple[int, int, int, int]:
    """(sequences, bytes used, wasted and unused) from rows that hold a token, and rows that are taken and hold none."""
    return fit, held * row_bytes, empty * row_bytes, budget - (held + empty) * row_bytes


FILLED = (5, 10, 25, 50, 75, 90, 100)  # per cent of max_tokens


def paging_gains(max_tokens: int, size: int) -> tuple[list[float], int]:
    """How many times as many sequences fit in pages of `size` tokens as with max_tokens rows for each, at each of FILLED; and up
    to how many tokens a sequence takes less memory (0: never)."""
    lengths = [-(-max_tokens * share // 100) for share in FILLED]
    gains = [max_tokens / (-(-length // size) * size) for length in lengths]
    return gains, (-(-max_tokens // size) - 1) * size


def _pool(work: Workload, size: int, pages: int) -> PageAllocator:
    if pages > MOST_PAGES:
        raise Unsupported(
            f"{pages} pages of {size} tokens are more than the {MOST_PAGES} that are simulated: take fewer requests, a smaller "
            f"--budget or larger --page-sizes"
        )
    return PageAllocator(pages, size, MOST_SEQUENCES, work.max_tokens)


def _prefix(allocator: PageAllocator, work: Workload) -> int | None:
    """A sequence that holds what all of them begin with."""
    if not work.shared:
        return None
    made = allocator.add()
    allocator.reserve(allocator.members([made]), [min(work.shared, work.max_tokens)])
    return made


def _admit(allocator: PageAllocator, prefix: int | None, length: int) -> None:
    """One sequence at its full length.  Raises OutOfPages."""
    if prefix is None:
        made, more = allocator.add(), length
    else:
        common = min(length, allocator.find(prefix).length)
        made, more = allocator.share(prefix, common), length - common
    allocator.reserve(allocator.members([made]), [more])


def _concurrent(work: Workload, size: int, pages: int) -> tuple[int, int, int]:
    """(sequences admitted, in order and again from the first, until the pages are out; rows that hold a token, shared ones once;
    rows of taken pages that hold none)."""
    if not pages:
        return 0, 0, 0
    allocator = _pool(work, size, pages)
    admitted = 0
    with suppress(OutOfPages):
        prefix = _prefix(allocator, work)
        for length in cycle(work.lengths):
            _admit(allocator, prefix, length)
            admitted += 1
    s = allocator.statistics()
    return admitted, s.rows_used, s.pages_used * size - s.rows_used


def draw_plot(layouts: Sequence[Layout], title: str, budget: int, path: Path) -> None:
    """Used and wasted bytes, and sequences in the budget, as bars; PNG or SVG by the file's name.

    Unsupported if matplotlib is not installed."""
    figure: Any = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    names = [each.name for each in layouts]
    used = [each.bytes_used / GIB for each in layouts]
    wasted = [each.bytes_wasted / GIB for each in layouts]
    left.bar(names, used, color="#2a6f97", label="tokens")
    left.bar(names, wasted, bottom=used, color="#e07a5f", label="wasted")
    left.set_ylabel("GiB for the workload")
    left.legend()
    bars = right.bar(names, [each.concurrent for each in layouts], color="#2a6f97")
    right.bar_label(bars)
    right.set_ylabel(f"sequences in {budget / GIB:g} GiB")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=20)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path)
