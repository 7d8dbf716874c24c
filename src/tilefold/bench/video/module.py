"""`tilefold bench video --module`: `nn.SparseVideoAttention` part by part, beside the same layer over dense attention."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.bench.attention.cases import Case
from tilefold.bench.attention.lists import Pattern
from tilefold.bench.implementation import Inputs
from tilefold.bench.judge import Judge
from tilefold.bench.loop import OK, WRONG, first_line
from tilefold.bench.record import Sheet, head, tail, times
from tilefold.bench.setting import Options, Setting
from tilefold.bench.timers import Timing
from tilefold.bench.video.engine import PipelineEngine
from tilefold.bench.video.stages import PEERS, USUAL, Call, dense_case, implementations, time_calls
from tilefold.errors import ValueRangeError
from tilefold.nn import SparseVideoAttention
from tilefold.plan.sparse.video import VideoShape
from tilefold.reference import Comparison
from tilefold.sparse import GridTiling, SelectOptions

GRID = {True: (16, 28, 52), False: (4, 8, 8)}  # tokens (T, H, W), on a GPU and without
SPARSITIES = {True: (65.1, 90.0), False: (50.0,)}
MODULE, COMPILED = "module", "module, compiled"
PRODUCTS, PIPELINE = "products of qkv and out", "pipeline"
PARTS = ("tokens to cubes and back", PRODUCTS, "norms and rotary embedding", "gates", PIPELINE)
BOTH = ", forward + backward"


@dataclass(frozen=True, slots=True)
class ModuleCase:
    """A layer of shape.heads heads over a (T, H, W) grid; sparsity: per cent of the blocks left out, by top-k."""

    shape: VideoShape
    grid: tuple[int, int, int]
    sparsity: float
    qk_norm: bool = False

    @property
    def name(self) -> str:
        t, h, w = self.grid
        norm = "_norm" * self.qk_norm
        return f"module_d{self.shape.dim}_h{self.shape.heads}_{t}x{h}x{w}_s{self.sparsity:g}{norm}"


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What was measured of a case.  timings: of PARTS, of the module, of the same layer with each dense peer, and of passes in
    both directions; verdicts: of the attention inside, against fp64; what failed its check has no time."""

    case: ModuleCase
    timings: dict[str, Timing] = field(default_factory=dict)
    verdicts: dict[str, Comparison] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str = ""

    @property
    def status(self) -> str:
        """What became of tilefold's layer: a status of bench.loop."""
        return self.failure or (WRONG if MODULE in self.verdicts and not self.verdicts[MODULE].ok else OK)

    @property
    def least_ms(self) -> float | None:
        """The products and the pipeline alone: what a layer takes that does nothing else."""
        parts = [self.timings[name].ms for name in (PRODUCTS, PIPELINE) if name in self.timings]
        return sum(parts) if len(parts) == 2 else None

    def cells(self, name: str) -> tuple[str, ...]:
        """Name; ms; over the products and the pipeline, of a forward pass; over the module, of a dense layer."""
        ms, least = self.timings[name].ms, self.least_ms
        mine = self.timings.get(MODULE + (BOTH if name.endswith(BOTH) else ""))
        beside = f"{ms / mine.ms:.2f}" if mine and name.startswith("dense") else ""
        return name, f"{ms:.3f}", f"{ms / least:.2f}" if least and not name.endswith(BOTH) else "", beside


class Dense(nn.Module):
    """The same layer over all tokens, by another library's attention."""

    def __init__(self, layer: SparseVideoAttention, peer: Any, case: ModuleCase) -> None:
        super().__init__()
        self.layer, self.peer, self.problem = layer, peer, dense_case(case.shape)
        self.order = GridTiling(case.grid, (1, 1, 1))

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        run = self.peer.prepare(Inputs(self.problem, q, k, v))
        with run.context():
            found: Tensor = run.call()
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer.out(self.attention(*self.layer.project(x, self.order)).flatten(2))
        return found


def cases_of(shape: VideoShape, grid: Sequence[int], sparsities: Sequence[float]) -> tuple[ModuleCase, ...]:
    """One case a sparsity, and the last also with norms of q and k.

    ValueRangeError for a grid that cubes of 4 do not divide: what is checked has no padding."""
    t, h, w = grid
    if t % 4 or h % 4 or w % 4:
        raise ValueRangeError(f"--grid must be three multiples of 4 (cubes of 4 x 4 x 4 tokens), got {tuple(grid)}")
    if wrong := [one for one in sparsities if not 0 <= one < 100]:
        raise ValueRangeError(f"--sparsity must be from 0 to below 100 per cent, got {wrong[0]!r}")
    shape = replace(shape, seq=math.prod(grid))
    plain = [ModuleCase(shape, (t, h, w), sparsity) for sparsity in sparsities]
    return (*plain, replace(plain[-1], qk_norm=True))


def measure(case: ModuleCase, where: str, names: Sequence[str], rounds: int) -> ModuleRow:
    """Check the attention inside, then time the parts, the module and the dense layers against each other."""
    torch.manual_seed(0)
    shape, dtype = case.shape, getattr(torch, case.shape.dtype)
    select = SelectOptions(method="top_k", sparsity=case.sparsity / 100)
    wide = shape.heads * shape.dim
    layer = SparseVideoAttention(
        wide, shape.heads, kv_heads=shape.kv_heads, grid=case.grid, select=select, qk_norm=case.qk_norm, device=where,
        dtype=dtype,
    )  # fmt: skip
    x = torch.randn(shape.batch, shape.seq, wide, device=where, dtype=dtype)
    verdicts: dict[str, Comparison] = {}
    notes: list[str] = []
    with torch.no_grad():
        tiled = layer.tiling().tile(x)
        verdicts[MODULE] = _verdict(case, layer, x, tiled)
        peers = {name: Dense(layer, implementations()[name], case) for name in names if name in PEERS}
        flat = layer.project(x, GridTiling(case.grid, (1, 1, 1)))
        judge = Judge(Inputs(dense_case(shape), *flat)) if peers else None
        for name in list(peers):
            try:
                verdicts[f"dense {name}"] = judge.verdict(peers[name].attention(*flat))  # type: ignore[union-attr]
            except Exception as error:  # another library's: the table goes without it
                notes.append(f"{name}: {type(error).__name__}: {first_line(error)}")
                del peers[name]
    wrong = [name for name, verdict in verdicts.items() if not verdict.ok]
    notes += [f"{name} at {case.name}: WRONG: {verdicts[name].words}" for name in wrong]
    layers: dict[str, Callable[[Tensor], Tensor]] = {MODULE: layer}
    if where == "cuda":
        layers[COMPILED] = torch.compile(layer)
    layers |= {f"dense {name}": one for name, one in peers.items()}
    layers = {name: one for name, one in layers.items() if name.split(",")[0] not in wrong}
    calls = {name: torch.no_grad()(call) for name, call in _parts(layer, x, tiled).items()}
    calls |= {name: torch.no_grad()(partial(one, x)) for name, one in layers.items()}
    calls |= {name + BOTH: _both(layer, one, x) for name, one in layers.items()}
    return ModuleRow(case, time_calls(calls, where, rounds), verdicts, tuple(notes))


def _both(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    leaf, grad = x.detach().clone().requires_grad_(), torch.randn_like(x)
    leaves = [leaf, *layer.parameters()]
    return lambda: torch.autograd.grad(run(leaf), leaves, grad, allow_unused=True)


def _parts(layer: SparseVideoAttention, x: Tensor, tiled: Tensor) -> dict[str, Call]:
    """What the module does, each by itself."""
    tiling = layer.tiling()
    with torch.no_grad():
        joint, gates = layer.qkv(tiled), layer.gates(tiled)
        q, k, v = layer.turn(joint, tiling)
    made: tuple[Call, ...] = (
        lambda: (tiling.tile(x), tiling.untile(tiled)),
        lambda: (layer.qkv(tiled), layer.out(tiled)),
        lambda: layer.turn(joint, tiling),
        lambda: layer.gates(tiled),
        lambda: layer.attend(q, k, v, **gates, **layer._lists(tiling, x.device)),
    )
    return dict(zip(PARTS, made, strict=True))


def _verdict(case: ModuleCase, layer: SparseVideoAttention, x: Tensor, tiled: Tensor) -> Comparison:
    """Of the pipeline as the module calls it: sampled rows against fp64 over its lists, since its gates start at 0 and 1."""
    _, stages = layer(x, return_stages=True)
    q, k, v = layer.project(tiled, layer.tiling())
    index = stages.index
    problem = replace(dense_case(case.shape).problem, seq_q=q.shape[1], seq_k=k.shape[1])
    listed = Case("sparse", problem, Pattern("random", case.sparsity, index.block_q, index.block_k))
    options = {**layer.gates(tiled), **layer._lists(layer.tiling(), x.device)}
    return Judge(Inputs(listed, q, k, v, index)).verdict(layer.attend(q, k, v, **options))


class ModuleEngine(PipelineEngine):
    """A case is a layer."""

    name, row = "video_module", ModuleRow

    @property
    def known(self) -> Mapping[str, Any]:
        return {name: one for name, one in implementations().items() if name in ("tilefold", *PEERS)}

    def usual(self, device: str) -> tuple[str, ...]:
        return tuple(name for name in USUAL[device] if name in PEERS)

    def timed(self, case: ModuleCase, device: str, names: tuple[str, ...], options: Options) -> ModuleRow:
        return measure(case, device, names, options.rounds)

    def records(self, result: ModuleRow, setting: Setting) -> list[dict[str, Any]]:
        case, rounds = result.case, {name: list(one.values) for name, one in result.timings.items()}
        note = result.notes[0] if result.notes else ""
        return [
            {
                **head(setting, self.name, case.name, "forward"),
                "implementation": "tilefold",
                "status": result.status,
                "sparsity": case.sparsity,
                "qk_norm": case.qk_norm,
                "ms": {name: one.ms for name, one in result.timings.items()},
                "least_ms": result.least_ms,
                **tail(setting, result.verdicts.get(MODULE), note, rounds),
            }
        ]

    def sheets(self, results: Sequence[ModuleRow], setting: Setting) -> list[Sheet]:
        columns = ("a layer", "ms", "over least", "over ours")
        return [
            Sheet(_title(row.case, setting), columns, tuple(map(row.cells, row.timings)), brackets=False)
            for row in results
        ]

    def notes(self, results: Sequence[ModuleRow]) -> list[str]:
        said = [line for row in results for line in row.notes]
        for row in results:
            if row.least_ms and MODULE in row.timings:
                over = times(row.timings[MODULE].ms / row.least_ms)
                said.append(f"{row.case.name}: {over} of what products and pipeline take")
        return said


def _title(case: ModuleCase, setting: Setting) -> str:
    shape, norm = case.shape, ", norms of q and k" * case.qk_norm
    return (
        f"module: {' x '.join(map(str, case.grid))} tokens, batch {shape.batch}, {shape.heads} heads on {shape.kv_heads}, "
        f"D={shape.dim}, {shape.dtype}, {case.sparsity:g} % left out{norm}, on {setting.device}; least: products and pipeline"
    )
