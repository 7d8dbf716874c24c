"""The coarse stage of video attention: `coarse` over `project`, forward and backward."""

import random
from typing import Any

import torch

from tilefold import sparse

from .axes import Family, never
from .bounds import FP32, limit, roundoff, steps
from .context import FORMS, Context
from .dense_run import DTYPES
from .oracle import Rules, attend, gradients
from .sizes import DIMS, dims_of_heads, length


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    n = length(rng, most, 1)
    return {
        "batch": rng.randint(1, 2),
        "q": [n],
        "k": [n if rng.random() < 0.5 else length(rng, most, 1)],
        "kv": rng.choice((1, 2)),
        "scale": 0.3 if o["scale"] else None,
    }


class Coarse:
    """The tensors of a problem of the coarse stage."""

    def __init__(self, ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
        self.ctx, self.o, self.dtype, self.block, self.b = ctx, o, DTYPES[o["dtype"]], o["block"], s["batch"]
        (n,), (m,), kv = s["q"], s["k"], s["kv"]
        self.n, self.m = n, m
        shapes = {
            "q": (self.b, n, kv * o["group"], d["d"]),
            "k": (self.b, m, kv, d["d"]),
            "v": (self.b, m, kv, d["dv"]),
        }
        self.raw = {name: ctx.normal(*shape, dtype=self.dtype) for name, shape in shapes.items()}
        self.few: dict[str, Any] = {}
        self.have: dict[str, Any] = {}
        for name, length_ in (("block_sizes", m), ("query_sizes", n)):
            count = -(-length_ // self.block)
            left = (length_ - torch.arange(count, device=ctx.device) * self.block).clamp(max=self.block)
            self.have[name] = left.expand(self.b, count)
            if o["sizes"]:
                self.have[name] = (ctx.uniform(self.b, count) * (left + 1)).floor().clamp(max=left).long()
                self.few[name] = ctx.place(self.have[name].to(torch.int32))
        self.weights: dict[str, Any] = {}
        if o["weights"]:
            for name in "kv":
                shape = (kv, -(-m // self.block), m) if o["kind"] == "dense" else (kv, self.block)
                self.weights[name] = (ctx.normal(*shape) / shape[-1] ** 0.5).requires_grad_(o["grad"])
        turn = o["layout"] == "bhsd"
        self.t = {
            name: ctx.place(x.transpose(1, 2) if turn else x, o["form"], name).requires_grad_(o["grad"])
            for name, x in self.raw.items()
        }

    def straight(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, heads, dim] of either layout."""
        return x.transpose(1, 2) if self.o["layout"] == "bhsd" else x

    def rows(self, x: torch.Tensor, name: str, i: int, weight: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One row a block of a sequence, and how far off it may be."""
        kind = "block" if name == "query_sizes" else self.o["kind"]
        return _rows(x, weight, self.have[name][i], self.block, kind, self.dtype)


def run(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    c = Coarse(ctx, o, d, s)
    given = {
        "kind": o["kind"],
        "reduction": o["reduction"],
        "scale": s["scale"],
        "block": c.block,
        "layout": o["layout"],
    }
    weights = {f"weight_{name}": w for name, w in c.weights.items()}
    found = sparse.coarse(c.t["q"], c.t["k"], c.t["v"], return_lse=o["lse"], **given, **weights, **c.few)
    out, pooled = c.straight(found.out), o["kind"] == "pooled"
    live = (
        torch.arange(c.n, device=ctx.device) % c.block < c.have["query_sizes"].repeat_interleave(c.block, 1)[:, : c.n]
    )
    folds = []
    for i in range(c.b):
        (k, k_off), (v, v_off) = (
            c.rows(c.raw[x][i].double(), "block_sizes", i, _plain(c.weights.get(x))) for x in "kv"
        )
        seen = (c.have["block_sizes"][i] > 0)[None, None, :]
        r = Rules(s["scale"] or d["d"] ** -0.5, seen=seen, k_off=k_off, v_off=v_off)
        q = c.raw["q"][i].double()
        if pooled:
            q, r.q_off = c.rows(q, "query_sizes", i)
        f = attend(q, k, v, r, c.dtype)
        folds.append((q, k, v, r, f))
        outs, bound = (x.repeat_interleave(c.block, 0)[: c.n] if pooled else x for x in (f.out, f.out_limit))
        alive = live[i][:, None, None]
        ctx.compare(f"out of batch {i}", out[i], torch.where(alive, outs, 0.0), torch.where(alive, bound, 0.0))
        _scores(c, found, f, live[i], i)
    if o["grad"]:
        _pull(c, found.out, folds, live)


def _plain(weight: Any) -> Any:
    return None if weight is None else weight.detach()


def _scores(c: Coarse, found: Any, f: Any, live: torch.Tensor, i: int) -> None:
    """What each query block puts on each row, and lse."""
    off, blocks = f.error * f.p, c.have["query_sizes"].shape[1]
    if c.o["kind"] == "pooled":
        some = (c.have["query_sizes"][i] > 0)[None, :, None]
        scores, slack = torch.where(some, f.p, 0.0), off
    else:
        scores = _reduced(f.p, live, c.block, blocks, c.o["reduction"])
        slack = _reduced(off, live, c.block, blocks, "max")
    bound = slack + (16 + steps(c.block)) * FP32 * scores + 1e-30
    c.ctx.compare(f"scores of batch {i}", found.scores[i], scores, bound)
    if c.o["lse"] and c.o["kind"] != "pooled":
        exact = torch.where(live[None], f.lse, float("-inf"))
        c.ctx.compare(f"lse of batch {i}", found.lse[i], exact, f.lse_limit)


def _pull(c: Coarse, out: torch.Tensor, folds: Any, live: torch.Tensor) -> None:
    """Gradients of q, k, v and the weights: those of the rows, pulled back through the (linear) projection."""
    cot = c.ctx.normal(*out.shape, dtype=c.dtype)
    leaves = {**c.t, **{f"weight of {name}": w for name, w in c.weights.items()}}
    made = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), cot), strict=True))
    sums: dict[str, Any] = {}
    for i, (q, k, v, r, f) in enumerate(folds):
        do = torch.where(live[i][:, None, None], c.straight(cot)[i].double(), 0.0)
        g = gradients(q, k, v, r, f, do, None, c.dtype)
        c.ctx.compare(f"gradient of q of batch {i}", c.straight(made["q"])[i], g.q, g.limits[0])
        for name, rows, bound in (("k", g.k, g.limits[1]), ("v", g.v, g.limits[2])):
            x, w, few = c.raw[name][i].double(), _plain(c.weights.get(name)), c.have["block_sizes"][i]
            w = None if w is None else w.to(c.dtype).double() if c.o["kind"] == "dense" else w.double()
            sizes = x.abs(), None if w is None else w.abs()
            unsure = bound + roundoff(c.dtype) * rows.abs()
            exact, size, slack = (
                _back(*pair, few, c, t) for pair, t in (((x, w), rows), (sizes, rows.abs()), (sizes, unsure))
            )
            got, most = c.straight(made[name])[i], limit(exact[0], c.dtype, size[0], extra=slack[0])
            c.ctx.compare(f"gradient of {name} of batch {i}", got, exact[0], most)
            if w is not None:  # its terms are many, and their errors go by the root of their squares
                up = (
                    1.0
                    if c.o["kind"] == "dense"
                    else torch.where(few > 0, c.block / few.clamp_min(1), 0.0)[:, None, None]
                )
                squares = _back(x**2, w, few, c, unsure**2 * up)
                old = sums.get(name, (0.0, 0.0, 0.0, 0.0))
                sums[name] = tuple(a + b[1] for a, b in zip(old, (exact, size, slack, squares), strict=True))
    for name, (exact, size, slack, squares) in sums.items():
        slack = torch.minimum(slack, squares.sqrt() + slack / 8)
        most = limit(exact, torch.float32, size, terms=c.m * c.b, extra=slack)
        c.ctx.compare(f"gradient of weight {name}", made[f"weight of {name}"], exact, most)


def _back(x: torch.Tensor, w: Any, few: torch.Tensor, c: Coarse, rows: torch.Tensor) -> Any:
    """The gradients of x and w (if there is one) of sum(project(x, w) * rows)."""
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (x, w) if t is not None]
        made = _projected(leaves[0], leaves[1] if w is not None else None, few, c.block, c.o["kind"])
        return torch.autograd.grad((made * rows).sum(), leaves)


def _rows(
    x: torch.Tensor, weight: Any, few: torch.Tensor, block: int, kind: str, dtype: torch.dtype
) -> tuple[Any, Any]:
    """project, of one sequence x [m, heads, d], and how far off its rows may be: a dense weight is rounded to the dtype first."""
    given = None if weight is None else weight.to(dtype).double() if kind == "dense" else weight.double()
    found = _projected(x, given, few, block, kind)
    size = _projected(x.abs(), None if given is None else given.abs(), few, block, kind)
    return found, limit(found, dtype, size, terms=block if kind != "dense" else x.shape[0])


def _projected(x: torch.Tensor, weight: Any, few: torch.Tensor, block: int, kind: str) -> torch.Tensor:
    m, blocks = x.shape[0], few.shape[0]
    at = torch.arange(m, device=x.device)
    x = torch.where((at % block < few[at // block])[:, None, None], x, 0.0)
    if kind == "dense":
        return torch.einsum("hbm,mhd->bhd", weight, x)
    share = (
        torch.full((x.shape[1], block), 1 / block, device=x.device, dtype=torch.float64) if weight is None else weight
    )
    full = torch.zeros(blocks * block, *x.shape[1:], device=x.device, dtype=torch.float64)
    full[:m] = x
    found = torch.einsum("hs,bshd->bhd", share, full.view(blocks, block, *x.shape[1:]))
    return found * torch.where(few > 0, block / few.clamp_min(1), 0.0)[:, None, None]


def _reduced(p: torch.Tensor, live: torch.Tensor, block: int, blocks: int, how: str) -> torch.Tensor:
    """[heads, n, rows] to [heads, blocks, rows] over the valid queries of each block."""
    h, n, rows = p.shape
    full = torch.zeros(h, blocks * block, rows, device=p.device, dtype=p.dtype)
    full[:, :n] = torch.where(live[None, :, None], p, 0.0)
    full = full.view(h, blocks, block, rows)
    if how == "max":
        return full.amax(2)
    count = torch.zeros(blocks * block, device=p.device, dtype=p.dtype)
    count[:n] = live.double()
    return full.sum(2) / count.view(blocks, block).sum(1).clamp_min(1)[None, :, None]


COARSE = Family(
    "coarse",
    {
        "kind": ("block", "pooled", "dense"),
        "dtype": ("fp16", "bf16", "fp32"),
        "layout": ("bshd", "bhsd"),
        "dim": DIMS,
        "dim_v": ("same", "less", "1", "odd", "64", "128", "256"),
        "group": (1, 4, 7),
        "form": FORMS,
        "block": (64, 16, 32, 128),
        "weights": (False, True),
        "sizes": (False, True),
        "reduction": ("mean", "max"),
        "scale": (False, True),
        "lse": (False, True),
        "grad": (False, True),
    },
    run,
    sizes,
    dims_of_heads,
    (
        never("kind", {"dense"}, "weights", {False}),
        never("kind", {"dense"}, "sizes", {True}),
        never("kind", {"pooled"}, "grad", {True}),
    ),
)
