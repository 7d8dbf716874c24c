"""`attention` of e4m3 tensors."""

import random
from typing import Any

import torch

import tilefold

from .axes import Family
from .bounds import roundoff
from .context import FORMS, Context
from .oracle import Rules, attend
from .sizes import DIMS, WINDOWS, dims_of_heads, length, window_of


def sizes(rng: random.Random, o: dict[str, Any], dims: dict[str, Any], most: int) -> dict[str, Any]:
    n = length(rng, most)
    return {
        "batch": rng.choice((1, 1, 2, 3)),
        "q": [n],
        "k": [n if rng.random() < 0.4 else length(rng, most)],
        "kv": rng.choice((1, 2, 3)),
        "window": window_of(rng, o["window"], most),
        "scale": 0.2 if o["scale"] else None,
    }


def run(ctx: Context, o: dict[str, Any], dims: dict[str, Any], s: dict[str, Any]) -> None:
    kind, (n,), (m,), b, kv = torch.float8_e4m3fn, s["q"], s["k"], s["batch"], s["kv"]
    h = kv * o["group"]
    shapes = {"q": (b, n, h, dims["d"]), "k": (b, m, kv, dims["d"]), "v": (b, m, kv, dims["dv"])}
    given: dict[str, Any] = {"causal": o["causal"], "layout": o["layout"], "scale": s["scale"], "return_lse": o["lse"]}
    if s["window"] is not None:
        given["window"] = tuple(s["window"])
    values, wide = {}, {}
    for name, shape in shapes.items():
        x = ctx.normal(*shape).to(kind)
        heads = h if name == "q" and o["descale"] == "head" else kv
        factor = (
            ctx.uniform(b, heads, low=0.5, high=1.5)
            if o["descale"] != "off"
            else torch.ones(b, heads, device=ctx.device)
        )
        if o["descale"] != "off":
            given[f"{name}_descale"] = ctx.place(factor)
        wide[name] = x.double() * factor.double().repeat_interleave(shape[2] // heads, 1)[:, None, :, None]
        values[name] = ctx.place(x.transpose(1, 2) if o["layout"] == "bhsd" else x, o["form"], name)
    found = tilefold.attention(*values.values(), **given)
    out, lse = found if o["lse"] else (found, None)
    out = out.transpose(1, 2) if o["layout"] == "bhsd" else out
    bytes_ = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and 65 <= dims["dv"] <= 128
    r = Rules(s["scale"] or dims["d"] ** -0.5, o["causal"], given.get("window"), noise=roundoff(torch.bfloat16))
    if (
        bytes_
    ):  # docs: weights in e4m3, what is below 2^-18 of the largest in lse alone; tensor cores add bytes with 14 bits
        r.weights, r.lost, r.sums = 2.0**-4, 2.0**-17, 2.0**-12
    else:
        r.weights = 2 * roundoff(torch.bfloat16)
    for i in range(b):
        f = attend(wide["q"][i], wide["k"][i], wide["v"][i], r, torch.bfloat16)
        ctx.compare(f"out of batch {i}", out[i], f.out, f.out_limit)
        if lse is not None:
            ctx.compare(f"lse of batch {i}", lse[i], f.lse, f.lse_limit)


EIGHT = Family(
    "eight",
    {
        "layout": ("bshd", "bhsd"),
        "dim": DIMS,
        "dim_v": ("same", "less", "1", "odd", "64", "128", "256"),
        "group": (1, 4, 7, 8),
        "form": FORMS,
        "causal": (False, True),
        "window": WINDOWS,
        "scale": (False, True),
        "descale": ("off", "kv", "head"),
        "lse": (False, True),
    },
    run,
    sizes,
    dims_of_heads,
)
