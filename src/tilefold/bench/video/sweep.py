"""The video pipeline over a range of sparsities, lengths and cached tokens, checked and timed beside dense peers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold import reference, sparse
from tilefold.bench.attention.cases import Case
from tilefold.bench.attention.lists import Pattern
from tilefold.bench.implementation import Inputs
from tilefold.bench.judge import Judge, verdict_of
from tilefold.bench.loop import OK, WRONG, first_line
from tilefold.bench.timers import Timing
from tilefold.bench.video.stages import (
    LISTED,
    PEERS,
    TOTAL,
    Made,
    VideoInputs,
    calls_of,
    dense_case,
    listed_pairs,
    self_attention,
    time_calls,
    video_inputs,
)
from tilefold.errors import ShapeError, ValueRangeError
from tilefold.plan.cost import Cost
from tilefold.plan.sparse.video import STAGES, VideoShape, stage_costs
from tilefold.reference import Comparison
from tilefold.sparse.coarse import attend_rows
from tilefold.sparse.stages import CoarseOptions, SelectOptions

# What is swept -> its unit.
SWEEPS = {"sparsity": "% sparsity", "length": "tokens", "cached": "cached tokens"}
FINE = "fine"


@dataclass(frozen=True, slots=True)
class Point:
    """One place of a sweep: attention over shape.seq tokens by top-k at a sparsity (per cent of the blocks left out, at most).

    sweep: one of SWEEPS. In "cached" the newest block's queries attend a cache that then holds shape.seq tokens, in pages of
    page_size tokens or in one piece (None); in the others every token attends every other one."""

    sweep: str
    shape: VideoShape
    sparsity: float
    page_size: int | None = None

    def __post_init__(self) -> None:
        if self.sweep not in SWEEPS:
            raise ValueRangeError(f"sweep must be one of {', '.join(SWEEPS)}, got {self.sweep!r}")
        if not 0 <= self.sparsity < 100:
            raise ValueRangeError(f"sparsity must be from 0 to below 100 per cent, got {self.sparsity!r}")
        if self.queries is not None and (self.shape.seq % self.shape.block or self.shape.seq <= self.shape.block):
            raise ShapeError(
                f"cached tokens must be at least two whole blocks of {self.shape.block}, the newest one included, "
                f"got {self.shape.seq}"
            )

    @property
    def queries(self) -> int | None:
        """How many tokens attend; None: all of them."""
        return self.shape.block if self.sweep == "cached" else None

    @property
    def series(self) -> str:
        """What is fixed along one line of the sweep, beside the shape."""
        if self.sweep == "sparsity":
            return f"{self.shape.seq} tokens"
        where = (
            "" if self.sweep == "length" else "contiguous" if self.page_size is None else f"pages of {self.page_size}"
        )
        return ", ".join(filter(None, (where, f"{self.sparsity:g} % sparsity")))

    @property
    def name(self) -> str:
        """As result files keep it, such as "cached_d128_h12_n8192x1_s90_pages64"."""
        s = self.shape
        heads = f"h{s.heads}" if s.heads == s.kv_heads else f"h{s.heads}k{s.kv_heads}"
        pages = "" if self.page_size is None else f"_pages{self.page_size}"
        return f"{self.sweep}_d{s.dim}_{heads}_n{s.seq}x{s.batch}_b{s.block}_s{self.sparsity:g}{pages}"


@dataclass(frozen=True, slots=True)
class SweepRow:
    """What was measured at a point.

    listed: pairs of blocks that the lists name. timings: of each stage, of "pipeline" (the whole), of "dense NAME" for each dense
    peer and of "lists NAME" for each that follows the fine stage's lists; a result that failed its check has none. verdicts: of
    what was checked. notes: why something is missing. failure: why there is nothing at all, a status of bench.loop."""

    point: Point
    listed: int = 0
    timings: dict[str, Timing] = field(default_factory=dict)
    verdicts: dict[str, Comparison] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str = ""

    @property
    def status(self) -> str:
        """What became of tilefold's results: a status of bench.loop."""
        return self.failure or (WRONG if self.wrong else OK)

    @property
    def density(self) -> float:
        """The share of all pairs of blocks that is listed, 0 to 1."""
        return self.listed / listed_pairs(None, self.point.shape, self.point.queries)

    @property
    def kept(self) -> str:
        """KV blocks that a list keeps, of how many; all lists are of one length."""
        shape = self.point.shape
        lists = listed_pairs(None, shape, self.point.queries) // shape.blocks
        return f"{self.listed / lists:g}/{shape.blocks}"

    @property
    def value(self) -> float:
        """Where on its sweep the row is: per cent of the blocks that were left out, after rounding to whole ones, or tokens."""
        if self.point.sweep != "sparsity":
            return float(self.point.shape.seq)
        return float(self.point.sparsity) if self.failure else 100 * (1 - self.density)

    def ms(self, name: str) -> float | None:
        return self.timings[name].ms if name in self.timings else None

    @property
    def sum_ms(self) -> float | None:
        """All stages, each timed as a call of its own; None if one is missing."""
        parts = [self.ms(name) for name in STAGES]
        known = [ms for ms in (*parts, self.ms("append")) if ms is not None]
        return None if None in parts else sum(known)

    @property
    def dense(self) -> tuple[str, ...]:
        """The dense peers that were timed, as "dense cuDNN"."""
        return tuple(name for name in self.timings if name.startswith("dense "))

    @property
    def listed_peers(self) -> tuple[str, ...]:
        """Those over the same lists that were timed, as "lists TK"."""
        return tuple(name for name in self.timings if name.startswith("lists "))

    @property
    def cost(self) -> Cost:
        """The fine stage's; its l2_bytes are what the tiles draw of K and V, for one query block from memory."""
        return stage_costs(self.point.shape, self.listed)[FINE]

    def speedup(self, name: str, dense: str) -> float | None:
        """How many times as fast as a dense peer; None where either has no time."""
        mine, other = self.ms(name), self.ms(dense)
        return other / mine if mine and other else None

    @property
    def wrong(self) -> tuple[str, ...]:
        """Our own results that failed their check."""
        return tuple(name for name in (FINE, TOTAL) if name in self.verdicts and not self.verdicts[name].ok)


def points_of(
    sweep: str,
    shape: VideoShape,
    values: Sequence[float],
    sparsities: Sequence[float] = (),
    page_sizes: Sequence[int | None] = (None,),
) -> tuple[Point, ...]:
    """The points of a sweep over values: per cent for "sparsity", tokens for the others, at each of the sparsities, for "cached"
    with each page size, too. Raises ValueRangeError, ShapeError."""
    if sweep == "sparsity":
        return tuple(Point(sweep, shape, value) for value in values)
    for value in values:
        if value != int(value):
            raise ShapeError(f"tokens must be integers, got {value!r}")
    return tuple(
        Point(sweep, replace(shape, seq=int(value)), sparsity, pages)
        for sparsity in sparsities
        for pages in (page_sizes if sweep == "cached" else (None,))
        for value in values
    )


@torch.no_grad()
def measure_point(point: Point, where: str, peers: tuple[str, ...], rounds: int, graph: bool) -> SweepRow:
    """Check and time the pipeline and dense peers at a point, on "cuda" or "cpu".

    graph: time replays of CUDA graphs instead of calls; a step over a cache always is, on a GPU, for it takes less time than
    its launches."""
    coarse, select = CoarseOptions(), SelectOptions(method="top_k", sparsity=point.sparsity / 100)
    replays = where == "cuda" and (graph or point.queries is not None)
    shape, case = point.shape, dense_case(point.shape, point.queries)
    inputs = video_inputs(shape, where, queries=point.queries)
    made = (
        self_attention(shape, inputs, coarse, select)
        if point.queries is None
        else cached_step(point, inputs, coarse, select)
    )
    tensors, index = (inputs.q, inputs.k, inputs.v), made.index
    lists = Case("sparse", case.problem, Pattern("random", point.sparsity, index.block_q, index.block_k))
    whole, over_lists = Inputs(case, *tensors), Inputs(lists, *tensors, index)
    dense, notes = calls_of("dense", [name for name in peers if name in PEERS], whole, where)
    listed, more = calls_of("lists", [name for name in peers if name in LISTED], over_lists, where)
    notes += more
    judge = Judge(over_lists)
    verdicts = _own_verdicts(point, inputs, made, judge)
    if dense:
        every_pair = Judge(whole)
        verdicts |= {name: every_pair.verdict(call()) for name, call in dense.items()}
    verdicts |= {name: judge.verdict(call()) for name, call in listed.items()}
    for name, verdict in verdicts.items():
        if not verdict.ok:
            notes.append(f"{name} at {point.name}: WRONG: {verdict.words}")
    calls = {
        name: call for name, call in (made.calls | dense | listed).items() if name not in verdicts or verdicts[name].ok
    }
    if replays:
        calls, missing = _captured(calls)
        notes += missing
    return SweepRow(point, made.listed, time_calls(calls, where, rounds), verdicts, tuple(notes))


# ---------------------------------------------------------------- a step over a cache


def cached_step(point: Point, inputs: VideoInputs, coarse: CoarseOptions, select: SelectOptions) -> Made:
    """`sparse_video_attention` of the newest block's queries over a `VideoCache` that all tokens but theirs are in.

    Every call makes the same step: it goes on from a copy of the cache's lengths and shares the rest, so a timed append or
    step includes that copy of one number a sequence."""
    shape, q, gates = point.shape, inputs.q, inputs.gates
    cache = sparse.VideoCache(
        shape.batch, shape.seq, shape.kv_heads, shape.dim, block=shape.block, page_size=point.page_size,
        dtype=q.dtype, device=q.device,
    )  # fmt: skip
    old = shape.seq - q.shape[1]
    cache.append(inputs.k[:, :old], inputs.v[:, :old])
    k, v = inputs.k[:, old:], inputs.v[:, old:]

    def before() -> Any:
        again = copy.copy(cache)
        again.lengths = cache.lengths.clone()
        return again

    options: dict[str, Any] = {"coarse": coarse, "select": select, "block": shape.block}
    after = before()
    out, made = sparse.sparse_video_attention(q, k, v, cache=after, return_stages=True, **options, **gates)
    sizes: dict[str, Any] = {"block_sizes": after.block_sizes}
    blocks = {"block_q": shape.block, "block_k": shape.block, "seq_q": q.shape[1], "seq_k": after.capacity}

    def fine() -> object:
        if after.block_table is None:
            return tilefold.sparse_attention(q, after.k, after.v, made.index)
        return tilefold.sparse_attention_paged(q, after.k, after.v, made.index, after.block_table, after.lengths)

    return Made(shape, inputs, options, out, made, {
        "append": lambda: before().append(k, v),
        "coarse": lambda: attend_rows(
            q, after.rows_k, after.rows_v, reduction=coarse.reduction, block=shape.block, **sizes
        ),
        "select": lambda: sparse.select(made.scores, **select.arguments(), **blocks, **sizes),
        "fine": fine,
        "fuse": lambda: sparse.fuse(made.coarse_out, made.fine_out, **gates),
        TOTAL: lambda: sparse.sparse_video_attention(q, k, v, cache=before(), **options, **gates),
    })  # fmt: skip


def _captured(calls: dict[str, Callable[[], object]]) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Replays of the calls' CUDA graphs, and which peers have none."""
    found: dict[str, Callable[[], object]] = {}
    notes = []
    stream = torch.cuda.Stream()
    for name, call in calls.items():
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # another library's: the table goes without it
            if not name.startswith(("dense ", "lists ")):
                raise
            notes.append(f"{name}: cannot be captured in a CUDA graph: {first_line(error)}")
            continue
        found[name] = graph.replay
    return found, notes


# ---------------------------------------------------------------- checks


def _own_verdicts(point: Point, inputs: VideoInputs, made: Made, judge: Judge) -> dict[str, Comparison]:
    """The fine stage over its lists, which judge knows, and the whole as both branches times their gates, on sampled rows against
    fp64."""
    q, k, v = inputs.q, inputs.k, inputs.v
    rows = judge.rows

    def mixed(fine: Tensor, dtype: torch.dtype) -> Tensor:
        rough = reference.coarse(q[:, rows], k, v, block=point.shape.block, dtype=dtype).out
        first, second = (inputs.gates[name][:, rows, :, None].to(dtype) for name in ("gate_coarse", "gate_fine"))
        both: Tensor = first * rough + second * fine
        return both

    fine: Any = made.calls[FINE]()
    want, plain = mixed(judge.want[0], torch.float64), mixed(judge.plain[0], q.dtype)
    return {FINE: judge.verdict(fine), TOTAL: verdict_of((made.out,), [(made.out[:, rows], want, plain)])}
