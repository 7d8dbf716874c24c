"""The video pipeline stage by stage: what each takes, what it should take, and dense attention beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

import tilefold
from tilefold import sparse
from tilefold.bench import timers
from tilefold.bench.attention.cases import Case
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.family import Peer
from tilefold.bench.implementation import Inputs
from tilefold.bench.loop import first_line
from tilefold.bench.timers import Timing
from tilefold.ops.call import Call as Attention
from tilefold.ops.source import Lists
from tilefold.ops.sparse.sparse_mixed import attend_and_fuse
from tilefold.plan.cost import Bound, Cost, bound
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.sparse.video import STAGES, VideoShape, dense_cost, index_cost, stage_costs
from tilefold.plan.sparse.video_launches import TOGETHER
from tilefold.sparse import BlockIndex
from tilefold.sparse.stages import CoarseOptions, SelectOptions, Stages

Call = Callable[[], object]
PEERS = ("cudnn", "flash", "efficient", "math", "fa4")  # dense
LISTED = ("bsa", "tk", "fastvideo", "flex", "fa4-lists")  # they follow lists
USUAL = {"cuda": ("cudnn", "fa4", "bsa", "tk"), "cpu": ("math",)}  # who is measured unasked
TOTAL = "pipeline"
ALONE = "index alone"  # the lists of a map of blocks; `select` makes its own lists in its launch


@dataclass(frozen=True, slots=True)
class StageRow:
    """One line of the table: a stage, the whole pipeline, or dense attention by another library.

    timing: of a call of its own; share: of the sum of the stages, None for what is no stage. cost, bound: None where they are not
    defined (backward)."""

    name: str
    timing: Timing
    share: float | None
    cost: Cost | None
    bound: Bound | None

    @property
    def of_bound(self) -> float | None:
        """The least time that the slowest resource needs, over the time taken: 1 is the roof."""
        return None if self.bound is None or not self.timing.ms else self.bound.seconds * 1e3 / self.timing.ms


@dataclass(frozen=True, slots=True)
class VideoRun:
    """A profile: its shape, the share of pairs of blocks that were listed, and its rows; notes say what is missing and why."""

    shape: VideoShape
    density: float
    listed: int
    rows: tuple[StageRow, ...]
    notes: tuple[str, ...]

    def row(self, name: str) -> StageRow | None:
        return next((row for row in self.rows if row.name == name), None)


def profile_video(
    made: "Made", device: Device, where: str, peers: tuple[str, ...] = (), backward: bool = False, rounds: int = 5
) -> VideoRun:
    """Time each stage that `prepare_stages` made, the whole of it, and dense peers, in rounds whose order alternates.

    device: whose roofs count; where: "cuda" or "cpu".  backward: also the gradients of q, k, v and both gates, with the forward
    pass, as one row each."""
    inputs, calls, shape = made.inputs, dict(made.calls), made.shape
    tensors = inputs.q, inputs.k, inputs.v
    named = dict(zip("qkv", tensors, strict=True)) | inputs.gates
    leaves: dict[str, Any] = {name: t.detach().clone().requires_grad_() for name, t in named.items()}
    grad = torch.randn(inputs.q.shape, generator=inputs.generator, device=where, dtype=inputs.q.dtype)
    if backward:
        calls["pipeline, forward + backward"] = lambda: torch.autograd.grad(
            sparse.sparse_video_attention(**leaves, **made.options), [*leaves.values()], grad
        )
    dense, notes = calls_of("dense", peers, Inputs(dense_case(shape), *tensors), where, grad if backward else None)
    timings = time_calls(calls | dense, where, rounds)
    costs = stage_costs(shape, made.listed, made.options["coarse"].kind)
    beside = {ALONE: index_cost(shape, made.index.capacity)}
    total = sum(timings[name].ms for name in STAGES)
    rows = tuple(_row(name, timing, costs, beside, shape, device, total) for name, timing in timings.items())
    return VideoRun(shape, made.listed / listed_pairs(None, shape), made.listed, rows, tuple(notes))


def prepare_stages(shape: VideoShape, where: str, coarse: CoarseOptions, select: SelectOptions) -> "Made":
    """Inputs on a device ("cuda" or "cpu") and what `profile_video` times over them: the stages, fine and fuse at once, the index
    alone, and the whole."""
    inputs = video_inputs(shape, where)
    made = self_attention(shape, inputs, coarse, select)
    fine, branch, whole = Attention(lists=Lists.of(made.index)), made.stages.coarse_out, made.calls.pop(TOTAL)
    if branch is not None:
        made.calls[TOGETHER] = lambda: attend_and_fuse(
            inputs.q, inputs.k, inputs.v, fine, branch, *inputs.gates.values()
        )
    keep, (block_q, block_k, seq_q, seq_k) = made.index.to_map(), made.index.geometry
    sizes: dict[str, Any] = {"block_q": block_q, "block_k": block_k, "seq_q": seq_q, "seq_k": seq_k}
    made.calls.update({ALONE: lambda: sparse.index(keep, **sizes, capacity=made.index.capacity), TOTAL: whole})
    return made


# ---------------------------------------------------------------- what the sweeps measure, too


@dataclass(frozen=True, slots=True)
class VideoInputs:
    """q [batch, queries, heads, dim], k and v [batch, seq, kv_heads, dim], gate_coarse and gate_fine [batch, queries, heads]
    from 0 to 1, and the generator that they were drawn from."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Any]
    generator: Generator


@dataclass(frozen=True, slots=True)
class Made:
    """A pipeline that ran once, with which options: its output, what its stages made, and a call for each stage and, last, for
    the whole."""

    shape: VideoShape
    inputs: VideoInputs
    options: dict[str, Any]
    out: Tensor
    stages: Stages
    calls: dict[str, Call]

    @property
    def index(self) -> BlockIndex:
        """The lists of the fine stage."""
        return self.stages.index

    @property
    def listed(self) -> int:
        """Pairs of blocks that all lists name together."""
        return listed_pairs(self.stages, self.shape)


def video_inputs(shape: VideoShape, where: str, seed: int = 0, queries: int | None = None) -> VideoInputs:
    """Normally distributed inputs in the shape's dtype; queries: how many, None: as many as keys."""
    generator = torch.Generator(device=where).manual_seed(seed)
    rows = shape.seq if queries is None else queries

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=where, dtype=getattr(torch, shape.dtype))

    q = normal(shape.batch, rows, shape.heads, shape.dim)
    k, v = (normal(shape.batch, shape.seq, shape.kv_heads, shape.dim) for _ in range(2))
    gates = {name: normal(shape.batch, rows, shape.heads).sigmoid() for name in ("gate_coarse", "gate_fine")}
    return VideoInputs(q, k, v, gates, generator)


def self_attention(shape: VideoShape, inputs: VideoInputs, coarse: CoarseOptions, select: SelectOptions) -> Made:
    """`sparse_video_attention` of all tokens over all tokens."""
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.gates
    options: dict[str, Any] = {"coarse": coarse, "select": select, "block": shape.block}
    out, made = sparse.sparse_video_attention(q, k, v, return_stages=True, **options, **gates)
    geometry: dict[str, Any] = {"block_q": shape.block, "block_k": shape.block, "seq_q": shape.seq, "seq_k": shape.seq}
    calls: dict[str, Call] = {
        "coarse": lambda: sparse.coarse(q, k, v, kind=coarse.kind, reduction=coarse.reduction, block=shape.block),
        "select": lambda: sparse.select(made.scores, **select.arguments(), **geometry),
        "fine": lambda: tilefold.sparse_attention(q, k, v, made.index),
        "fuse": lambda: sparse.fuse(made.coarse_out, made.fine_out, **gates),
        TOTAL: lambda: sparse.sparse_video_attention(q, k, v, **options, **gates),
    }
    return Made(shape, inputs, options, out, made, calls)


def listed_pairs(stages: Stages | None, shape: VideoShape, queries: int | None = None) -> int:
    """How many pairs of a query and a KV block the lists name, over all heads; without stages how many there are."""
    if stages is not None:
        return int(stages.index.expand(shape.batch, shape.heads).counts.sum())
    rows = shape.blocks if queries is None else -(-queries // shape.block)
    return shape.batch * shape.heads * rows * shape.blocks


def dense_case(shape: VideoShape, queries: int | None = None) -> Case:
    """Dense attention of the same tokens; queries: how many, None: as many as keys."""
    rows, keys = shape.seq if queries is None else queries, shape.seq
    heads = (shape.heads, shape.kv_heads)
    return Case("dense", AttentionProblem(shape.batch, rows, keys, *heads, shape.dim, shape.dim, dtype=shape.dtype))


def implementations() -> dict[str, Peer]:
    """Everybody who may take part, by name: dense PEERS, and LISTED, who follow lists ("fa4-lists": fa4 over them)."""
    known = {name: IMPLEMENTATIONS[name] for name in ("tilefold", *PEERS, *LISTED) if name in IMPLEMENTATIONS}
    return known | {"fa4-lists": replace(IMPLEMENTATIONS["fa4"], name="fa4-lists")}


def calls_of(
    kind: str, names: Sequence[str], inputs: Inputs, where: str, grad: Tensor | None = None
) -> tuple[dict[str, Call], list[str]]:
    """(calls of the peers by "kind title", forward, and with a grad forward + backward; why any of them is missing)."""
    calls: dict[str, Call] = {}
    notes = []
    for peer in map(implementations().__getitem__, names):
        if why := peer.refuses(inputs.case, where):
            notes.append(f"{peer.title}: {why}")
            continue
        try:
            run = peer.prepare(inputs)
            with run.context():
                run.call()
        except Exception as error:  # another library's: the table goes without it
            notes.append(f"{peer.title}: failed: {type(error).__name__}: {first_line(error)}")
            continue

        def forward(run: Any = run) -> object:
            with run.context():
                return run.call()

        calls[f"{kind} {peer.title}"] = forward
        if grad is not None:
            leaves = [t.detach().clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
            both = peer.prepare(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]))

            def step(run: Any = both, leaves: Any = leaves) -> object:
                with run.context():
                    return torch.autograd.grad(run.call(), leaves, grad)

            calls[f"{kind} {peer.title}, forward + backward"] = step
    return calls, notes


def time_calls(calls: dict[str, Call], where: str, rounds: int) -> dict[str, Timing]:
    """All against each other; what is not a GPU is timed by the wall."""

    def sampler(call: Call) -> timers.Sampler:
        call()
        if where == "cuda":
            return lambda: timers.event_samples(call)
        return lambda: timers.wall_samples(call, budget_s=0, least=1)

    return timers.time_alternating({name: sampler(call) for name, call in calls.items()}, rounds)


def _row(
    name: str,
    timing: Timing,
    costs: dict[str, Cost],
    beside: dict[str, Cost],
    shape: VideoShape,
    device: Device,
    total: float,
) -> StageRow:
    """costs: of the stages; beside: of what is none."""
    cost = costs.get(name, beside.get(name))
    if name == TOTAL:
        cost = sum(costs.values(), Cost(0, 0, 0))
    elif name == TOGETHER:
        cost = costs["fine"] + costs["fuse"]
    elif name.startswith("dense") and "backward" not in name:
        cost = dense_cost(shape)
    share = timing.ms / total if name in STAGES and total else None
    return StageRow(name, timing, share, cost, None if cost is None else bound(cost, device, shape.dtype))
