"""Small operations: `merge_attention`, `transpose`, `add`, `quantize_fp8`, `quantize_kv`."""

import random
from typing import Any

import torch

import tilefold

from .axes import Family, never
from .bounds import FP32, limit
from .caches import STORES
from .context import FORMS, Context
from .dense_run import DTYPES
from .sizes import DIMS, dim_of, length

WHOLE = {"int8": torch.int8, "int32": torch.int32, "int64": torch.int64}
EVERY = {**DTYPES, "fp64": torch.float64, **WHOLE}


def dims(rng: random.Random, o: dict[str, Any]) -> dict[str, int]:
    return {"d": rng.randint(257, 1024) if o["dim"] == "1024" else dim_of(rng, o["dim"])}


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    return {
        "batch": rng.choice((0, 1, 1, 2, 3)),
        "n": length(rng, most),
        "heads": rng.randint(1, 6),
        "rows": length(rng, most),
    }


def run_merge(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype = DTYPES[o["dtype"]]
    lead, stat = ((s["n"], s["heads"]), (s["heads"], s["n"])) if o["packed"] else (
        (s["batch"], s["n"], s["heads"]), (s["batch"], s["heads"], s["n"]))  # fmt: skip
    outs, lses = [], []
    for _ in "ab":
        lse = ctx.normal(*stat, scale=o["spread"])
        lse = torch.where(ctx.uniform(*stat) < 0.2, float("-inf"), lse)
        x = ctx.normal(*lead, d["d"], dtype=dtype)
        dead = lse.mT == float("-inf")
        x[dead] = float("nan")  # a result without keys changes nothing, whatever it holds
        outs.append(ctx.place(x, o["form"], "out"))
        lses.append(ctx.place(lse, "plain" if o["form"] == "offset" else o["form"], "lse"))
    out, lse = tilefold.merge_attention(outs[0], lses[0], outs[1], lses[1])
    wide = [x.double() for x in lses]
    exact = torch.logaddexp(*wide)
    base = exact.masked_fill(exact == float("-inf"), 0.0)
    w = [torch.exp(x - base).mT[..., None] for x in wide]
    a, b = (torch.where(wi == 0, 0.0, x.double()) for wi, x in zip(w, outs, strict=True))
    z, size = w[0] * a + w[1] * b, w[0] * a.abs() + w[1] * b.abs()
    slack = 8 * FP32 * (1 + (wide[0].nan_to_num(neginf=0.0).abs() + wide[1].nan_to_num(neginf=0.0).abs()).mT[..., None])
    alone = (wide[0] == float("-inf")) | (wide[1] == float("-inf"))
    ctx.compare("lse", lse, exact, torch.where(alone, 0.0, 4 * FP32 * (1 + base.abs())))
    ctx.compare("out", out, z, torch.where(alone.mT[..., None], 0.0, limit(z, dtype, size, extra=slack * size)))


MERGE = Family(
    "merge",
    {
        "dtype": ("fp16", "bf16", "fp32"),
        "dim": (*DIMS, "1024"),
        "form": FORMS,
        "packed": (False, True),
        "spread": (1, 8, 40),
    },
    run_merge,
    sizes,
    dims,
)


def matrix(ctx: Context, o: dict[str, Any], form: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix, or a vector, of any strides."""
    dtype = EVERY[o["dtype"]]
    x = ctx.integers(-60, 60, *shape) if o["dtype"] in WHOLE else ctx.normal(*shape, dtype=torch.float64)
    x = x.to(dtype)
    if form == "columns":
        return ctx.place(x.mT.contiguous()).mT if len(shape) == 2 else ctx.place(x)
    if form == "steps":
        wide = torch.stack([x, x], -1)
        return ctx.place(wide)[..., 0]
    if form == "broadcast":
        return ctx.place(x[:1].contiguous()).expand(shape) if shape[0] else ctx.place(x)
    return ctx.place(x, form)


def run_transpose(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    x = matrix(ctx, o, o["x"], (s["n"], s["rows"]))
    got = tilefold.transpose(x, method=o["method"])
    ctx.expect("contiguous", got.is_contiguous())
    ctx.compare("transposed", got, x.double().mT, 0.0)


def run_add(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    shape = (s["n"], s["rows"]) if o["rank"] == 2 else (s["n"],)
    x, y = matrix(ctx, o, o["x"], shape), matrix(ctx, o, o["y"], shape)
    grad = o["grad"]
    if grad:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    got = tilefold.add(x, y)
    wide = x.detach().double() + y.detach().double()
    if o["dtype"] == "int8":
        wide = (wide + 128) % 256 - 128
    exact = 0.0 if o["dtype"] in (*WHOLE, "fp64") else limit(wide, EVERY[o["dtype"]], torch.zeros_like(wide))
    ctx.compare("sum", got, wide, exact)
    if grad:
        for mine in torch.autograd.grad(got.sum(), (x, y)):
            ctx.compare("gradient", mine, torch.ones_like(wide), 0.0)


MATRICES = ("plain", "gap", "offset", "columns", "steps", "broadcast")
TRANSPOSE = Family(
    "transpose",
    {"dtype": tuple(EVERY), "x": MATRICES, "method": ("auto", "registers", "strides")},
    run_transpose,
    sizes,
)
ADD = Family(
    "add",
    {"dtype": tuple(EVERY), "x": MATRICES, "y": MATRICES, "rank": (2, 1), "grad": (False, True)},
    run_add,
    sizes,
    clashes=(never("dtype", WHOLE, "grad", {True}),),
)


def run_quantise(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    b, n, h, kind = s["batch"], s["n"], s["heads"], STORES[o["kind"]]
    turn = o["api"] == "fp8 bhsd"
    x = (
        ctx.normal(b, h, n, d["d"], dtype=DTYPES[o["dtype"]])
        if turn
        else ctx.normal(b, n, h, d["d"], dtype=DTYPES[o["dtype"]])
    )
    t = ctx.place(x, o["form"], "x")
    top = 127.0 if kind == torch.int8 else 448.0
    largest = x.double().abs().transpose(1, 2) if not turn else x.double().abs()
    largest = largest.amax((2, 3)) if largest.shape[2] else largest.new_zeros(b, h)
    if o["api"] == "kv":
        given = ctx.uniform(h, low=0.01, high=0.02) if o["per"] == "given" else None
        per = {"scale": given} if given is not None else {"per": "page" if o["per"] == "page" else "head"}
        codes, scale = tilefold.quantize_kv(t, kind, **per)
        if o["per"] == "head":
            largest = largest.amax(0) if b else largest.new_zeros(h)
        want = torch.where(largest == 0, 1.0, largest / top) if given is None else given.double()
        spread = scale.double()[..., None, :, None]
    else:
        whole = o["per"] == "given"  # here: one factor of all
        codes, scale = tilefold.quantize_fp8(t, per="tensor" if whole else "head", layout="bhsd" if turn else "bshd")
        if whole and largest.numel():
            largest = largest.amax().expand(b, h)
        want = torch.where(largest == 0, 1.0, largest / top)
        spread = scale.double()[:, :, None, None] if turn else scale.double()[:, None, :, None]
    ctx.compare("scale", scale, want, 2 * FP32 * want)
    low = -128.0 if kind == torch.int8 else -448.0
    exact = (x.double() / spread).clamp(low, top)
    step = torch.full_like(exact, 0.5) if kind == torch.int8 else (exact.abs() * 2.0**-4).clamp_min(2.0**-10)
    ctx.compare("codes", codes, exact, step + 2 * FP32 * exact.abs())


QUANTISE = Family(
    "quantise",
    {
        "api": ("kv", "fp8 bshd", "fp8 bhsd"),
        "dtype": ("fp16", "bf16", "fp32"),
        "kind": ("e4m3", "int8"),
        "per": ("head", "page", "given"),
        "dim": DIMS,
        "form": FORMS,
    },
    run_quantise,
    sizes,
    dims,
    (never("api", {"fp8 bshd", "fp8 bhsd"}, "kind", {"int8"}), never("api", {"fp8 bshd", "fp8 bhsd"}, "per", {"page"})),
)
