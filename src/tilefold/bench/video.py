"""The video pipeline stage by stage: what each takes, what it should take, and dense attention beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilefold.bench import timers
from tilefold.bench.timers import Timing
from tilefold.plan.cost import Bound, Cost, bound
from tilefold.plan.video import STAGES, VideoShape, dense_cost, stage_costs

if TYPE_CHECKING:
    from torch import Tensor

    from tilefold.plan.device import Device
    from tilefold.sparse.pipeline import CoarseOptions, SelectOptions

__all__ = ["PEERS", "StageRow", "VideoRun", "profile_video"]

PEERS = ("cudnn", "flash", "efficient", "math", "fa4")
TOGETHER = "fine + fuse at once"  # what a call without gradients does
TOTAL = "pipeline"


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
    shape: VideoShape,
    device: "Device",
    where: str,
    coarse: "CoarseOptions",
    select: "SelectOptions",
    *,
    peers: tuple[str, ...] = (),
    backward: bool = False,
    rounds: int = 5,
    seed: int = 0,
) -> VideoRun:
    """Time each stage of `sparse_video_attention` on normally distributed inputs, the whole of it, and dense peers, in rounds
    whose order alternates.

    device: whose roofs count; where: "cuda" or "cpu". coarse, select: the pipeline's options. backward: also the gradients of
    q, k, v and both gates, with the forward pass, as one row each."""
    import torch

    from tilefold import sparse
    from tilefold.ops.sparse_call import Lists, SparseCall
    from tilefold.ops.sparse_mixed import attend_and_fuse

    generator = torch.Generator(device=where).manual_seed(seed)

    def normal(*size: int) -> "Tensor":
        return torch.randn(size, generator=generator, device=where, dtype=getattr(torch, shape.dtype))

    q = normal(shape.batch, shape.seq, shape.heads, shape.dim)
    k, v = (normal(shape.batch, shape.seq, shape.kv_heads, shape.dim) for _ in range(2))
    gates: dict[str, Any] = {
        name: normal(shape.batch, shape.seq, shape.heads).sigmoid() for name in ("gate_coarse", "gate_fine")
    }

    def pipeline(q: "Tensor", k: "Tensor", v: "Tensor", **gates: Any) -> Any:
        return sparse.sparse_video_attention(q, k, v, coarse=coarse, select=select, block=shape.block, **gates)

    _, made = sparse.sparse_video_attention(
        q, k, v, coarse=coarse, select=select, block=shape.block, return_stages=True, **gates
    )
    listed = int(made.index.expand(shape.batch, shape.heads).counts.sum())
    geometry: dict[str, Any] = {"block_q": shape.block, "block_k": shape.block, "seq_q": shape.seq, "seq_k": shape.seq}
    fine = SparseCall(Lists(*made.index.tensors(), *made.index.geometry))
    branch_gates = {"gate_branch": gates["gate_coarse"], "gate": gates["gate_fine"]}
    calls: dict[str, Callable[[], object]] = {
        "coarse": lambda: sparse.coarse(q, k, v, kind=coarse.kind, reduction=coarse.reduction, block=shape.block),
        "select": lambda: sparse.select(made.scores, **select.arguments(), **geometry),
        "fine": lambda: _sparse_attention(q, k, v, made.index),
        "fuse": lambda: sparse.fuse(made.coarse_out, made.fine_out, gates["gate_coarse"], gates["gate_fine"]),
        TOGETHER: lambda: attend_and_fuse(q, k, v, fine, made.coarse_out, **branch_gates),
        TOTAL: lambda: pipeline(q, k, v, **gates),
    }
    leaves: dict[str, Any] = {
        name: t.detach().clone().requires_grad_() for name, t in {"q": q, "k": k, "v": v, **gates}.items()
    }
    grad = normal(*q.shape)
    if backward:
        calls["pipeline, forward + backward"] = lambda: torch.autograd.grad(
            pipeline(**leaves), [*leaves.values()], grad
        )
    notes = [*_dense_calls(calls, shape, where, (q, k, v), grad if backward else None, peers)]
    timings = _time(calls, where, rounds)
    costs = stage_costs(shape, listed, coarse.kind)
    total = sum(timings[name].ms for name in STAGES)
    rows = tuple(_row(name, timing, costs, shape, device, total) for name, timing in timings.items())
    pairs = shape.batch * shape.heads * shape.blocks**2
    return VideoRun(shape, listed / pairs, listed, rows, tuple(notes))


def _sparse_attention(q: "Tensor", k: "Tensor", v: "Tensor", index: Any) -> Any:
    import tilefold

    return tilefold.sparse_attention(q, k, v, index)


def _dense_calls(
    calls: dict[str, Callable[[], object]],
    shape: VideoShape,
    where: str,
    tensors: "tuple[Tensor, Tensor, Tensor]",
    grad: "Tensor | None",
    peers: tuple[str, ...],
) -> list[str]:
    """Add the dense calls of the peers, forward, and with a grad forward + backward; -> why any of them is missing."""
    import torch

    from tilefold.bench.cases import Case
    from tilefold.bench.implementation import Inputs
    from tilefold.bench.peers import IMPLEMENTATIONS
    from tilefold.plan.problem import AttentionProblem

    problem = AttentionProblem(
        shape.batch, shape.seq, shape.seq, shape.heads, shape.kv_heads, shape.dim, shape.dim, dtype=shape.dtype
    )
    notes = []
    for name in peers:
        peer, case = IMPLEMENTATIONS[name], Case("dense", problem)
        if why := peer.refuses(case, where):
            notes.append(f"{peer.title}: {why}")
            continue
        try:
            run = peer.prepare(Inputs(case, *tensors))
            with run.context():
                run.call()
        except Exception as error:  # another library's: the table goes without it
            notes.append(
                f"{peer.title}: failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            continue

        def forward(run: Any = run) -> object:
            with run.context():
                return run.call()

        calls[f"dense {peer.title}"] = forward
        if grad is not None:
            leaves = [t.detach().clone().requires_grad_() for t in tensors]
            both = peer.prepare(Inputs(case, leaves[0], leaves[1], leaves[2]))

            def step(run: Any = both, leaves: Any = leaves) -> object:
                with run.context():
                    return torch.autograd.grad(run.call(), leaves, grad)

            calls[f"dense {peer.title}, forward + backward"] = step
    return notes


def _time(calls: dict[str, Callable[[], object]], where: str, rounds: int) -> dict[str, Timing]:
    """All against each other; what is not a GPU is timed by the wall."""

    def sampler(call: Callable[[], object]) -> timers.Sampler:
        call()
        if where == "cuda":
            return lambda: timers.event_samples(call)
        return lambda: timers.wall_samples(call, budget_s=0, least=1)

    return timers.time_alternating({name: sampler(call) for name, call in calls.items()}, rounds)


def _row(
    name: str, timing: Timing, costs: dict[str, Cost], shape: VideoShape, device: "Device", total: float
) -> StageRow:
    cost = costs.get(name)
    if name == TOTAL:
        cost = sum(costs.values(), Cost(0, 0, 0))
    elif name == TOGETHER:
        cost = costs["fine"] + costs["fuse"]
    elif name.startswith("dense") and "backward" not in name:
        cost = dense_cost(shape)
    share = timing.ms / total if name in STAGES and total else None
    return StageRow(name, timing, share, cost, None if cost is None else bound(cost, device, shape.dtype))
