"""Two stages of video attention: `select`, `fuse`."""

import random
from typing import Any

import torch

from tilefold import sparse

from .axes import Family, never
from .bounds import FP32, limit
from .context import FORMS, Context
from .dense_run import DTYPES
from .sizes import DIMS, dims_of_heads, length

# ---------------------------------------------------------------- select, fuse


def select_sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    return {"batch": rng.randint(1, 2), "heads": rng.randint(1, 3), "rows": length(rng, 20, 1), "columns": length(rng, most, 1),
            "keep": rng.randint(0, 12), "share": rng.choice((0.0, 0.3, 0.8, 1.0)), "least": rng.randint(0, 3)}  # fmt: skip


def run_select(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, shape = DTYPES[o["dtype"]], (s["batch"], s["heads"], s["rows"], s["columns"])
    scores = torch.rand(shape, generator=ctx.generator, device=ctx.device) ** 3
    if o["zeros"]:
        scores = torch.where(ctx.uniform(*shape) < 0.5, 0.0, scores)
    scores = scores.to(dtype)
    given: dict[str, Any] = {"method": o["method"], "min_blocks": s["least"]}
    if o["method"] == "top_k":
        given["top_k"] = s["keep"]
    if o["method"] == "top_p":
        given["top_p"] = s["share"]
    if o["most"]:
        given["max_blocks"] = _most(s)
    if o["force"]:
        given["force_first"] = 2
    found = sparse.select(ctx.place(scores, o["form"], "scores"), **given)
    x, columns = scores.double(), s["columns"]
    total = x.sum(3, keepdim=True)
    order = x.sort(3).values
    rank = torch.arange(1, columns + 1, device=ctx.device, dtype=torch.float64)
    g = torch.where(
        total[..., 0] == 0, 0.0, ((2 * rank - columns - 1) * order).sum(3) / (columns * total[..., 0].clamp_min(1e-300))
    )
    ctx.compare("gini", found.gini, g, 64 * FP32)
    taken = found.index.to_map()
    mass = torch.where(total[..., 0] == 0, 1.0, (x * taken).sum(3) / total[..., 0].clamp_min(1e-300))
    ctx.compare("mass", found.mass, mass, 2.0**-17)
    count = taken.sum(3)
    forced = torch.zeros_like(taken)
    if o["force"]:
        forced[..., :2] = True
        ctx.expect("forced blocks are listed", bool((taken | ~forced).all()))
    # whatever is listed without being forced has no better score outside
    least = torch.where(taken & ~forced, x, float("inf")).amin(3)
    ctx.expect("the highest scores are listed", bool((torch.where(taken, -1.0, x).amax(3) <= least).all()))
    ctx.expect("at least min_blocks", o["most"] or bool((count >= min(s["least"], columns)).all()))
    if o["most"]:
        ctx.expect("at most max_blocks", bool((count <= torch.clamp(forced.sum(3), min=_most(s))).all()))
    if o["method"] == "top_k" and not o["most"]:
        want = torch.maximum(torch.full_like(count, max(s["keep"], s["least"])), forced.sum(3)).clamp(max=columns)
        ctx.compare("top_k", count, want.double(), 0.0)
    if o["method"] != "top_k" and not o["most"]:
        tau = 0.5 + 0.45 * (1 - g) if o["method"] == "gini" else torch.full_like(g, s["share"])
        ctx.compare("tau", found.tau, tau, 64 * FP32)
        ctx.expect("mass is enough", bool((mass >= tau - 2.0**-16).all()))
        last = torch.where(taken & ~forced, x, float("inf")).amin(3)  # without the last one it would not be
        fewer = mass - last / total[..., 0].clamp_min(1e-300)
        over = (count > max(s["least"], 0)) & last.isfinite() & (total[..., 0] > 0) & (fewer >= tau + 2.0**-16)
        ctx.expect("the fewest blocks are listed", not bool(over.any()))


def _most(s: dict[str, Any]) -> int:
    """max_blocks: no less than min_blocks and what is forced, which would be refused."""
    return max(s["keep"] + 1, s["least"], 2)


SELECT = Family(
    "select",
    {
        "method": ("gini", "top_p", "top_k"),
        "dtype": ("fp32", "fp16", "bf16"),
        "form": FORMS,
        "zeros": (False, True),
        "most": (False, True),
        "force": (False, True),
    },
    run_select,
    select_sizes,
)


def fuse_sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    return {"batch": rng.randint(1, 3), "n": length(rng, most), "heads": rng.randint(1, 5)}


def run_fuse(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, turn, grad = DTYPES[o["dtype"]], o["layout"] == "bhsd", o["grad"]
    shape = (s["batch"], s["heads"], s["n"], d["d"]) if turn else (s["batch"], s["n"], s["heads"], d["d"])
    leaves: dict[str, Any] = {}
    for name in ("coarse", "fine"):
        if o["branches"] in ("both", name):
            leaves[name] = ctx.place(ctx.normal(*shape, dtype=dtype), o["form"], name).requires_grad_(grad)
    kinds = {"head": (s["heads"],), "token": shape[:3], "channel": shape,
             "row": (shape[0], 1, shape[2], 1) if turn else (shape[0], shape[1], 1, 1)}  # fmt: skip
    for name in ("coarse", "fine"):
        if name in leaves and o[f"gate_{name}"] != "off":
            kind = torch.float32 if o["gates"] == "fp32" else dtype
            leaves[f"gate_{name}"] = ctx.place(ctx.normal(*kinds[o[f"gate_{name}"]], dtype=kind)).requires_grad_(grad)
    got = sparse.fuse(
        leaves.get("coarse"), leaves.get("fine"), leaves.get("gate_coarse"), leaves.get("gate_fine"), layout=o["layout"]
    )
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    with torch.enable_grad():
        parts = [x * _gate(wide.get(f"gate_{name}"), turn) for name, x in wide.items() if not name.startswith("gate")]
        exact = sum(parts)
    size = sum(x.detach().abs() for x in parts)
    ctx.compare("fused", got, exact.detach(), limit(exact.detach(), dtype, size))
    if grad:
        cot = ctx.normal(*shape, dtype=dtype)
        mine = torch.autograd.grad(got, list(leaves.values()), cot)
        theirs = torch.autograd.grad(exact, list(wide.values()), cot.double())
        plain = {name: x.detach().abs().requires_grad_() for name, x in wide.items()}
        with torch.enable_grad():
            both = sum(
                x * _gate(plain.get(f"gate_{name}"), turn) for name, x in plain.items() if not name.startswith("gate")
            )
        sizes = torch.autograd.grad(both, list(plain.values()), cot.double().abs())
        for name, x, y, z in zip(leaves, mine, theirs, sizes, strict=True):
            count = max(1, got.numel() // max(1, y.numel())) * d["d"]
            ctx.compare(f"gradient of {name}", x, y, limit(y, leaves[name].dtype, z, terms=count))


def _gate(gate: Any, turn: bool) -> Any:
    if gate is None:
        return 1.0
    if gate.dim() == 1:
        return gate[:, None, None] if turn else gate[:, None]
    return gate[..., None] if gate.dim() == 3 else gate


GATES = ("off", "head", "token", "row", "channel")
FUSE = Family(
    "fuse",
    {
        "branches": ("both", "coarse", "fine"),
        "gate_coarse": GATES,
        "gate_fine": GATES,
        "gates": ("same", "fp32"),
        "dtype": ("fp16", "bf16", "fp32"),
        "layout": ("bshd", "bhsd"),
        "dim": DIMS,
        "form": FORMS,
        "grad": (False, True),
    },
    run_fuse,
    fuse_sizes,
    dims_of_heads,
    (never("branches", {"fine"}, "gate_coarse", GATES[1:]), never("branches", {"coarse"}, "gate_fine", GATES[1:])),
)
