"""`conv2d`, forward and backward, against torch's in fp64."""

import random
from typing import Any

import torch

import tilefold

from .axes import Family, never
from .bounds import FP32, TF32, limit, of_terms, roundoff
from .context import Context
from .dense_run import DTYPES
from .products import ACTS, acted


def dims(rng: random.Random, o: dict[str, Any]) -> dict[str, int]:
    """Channels in and out of a group, the filter."""
    c = {"one": 1, "few": rng.choice((2, 3, 5)), "odd": rng.choice((7, 19, 33)), "even": rng.choice((16, 32, 64))}
    r = {"1": (1, 1), "3": (3, 3), "5": (5, 5), "1x3": (1, 3), "2x4": (2, 4)}[o["filter"]]
    return {"c": c[o["c"]], "k": c[o["k"]], "r": r[0], "s": r[1]}


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    low_h, low_w = ((d[x] - 1) * dil + 1 for x, dil in zip("rs", _two(o["dilation"]), strict=True))
    high = max(2, min(most // 12, 26))
    return {"batch": rng.choice((0, 1, 1, 2, 3)), "h": low_h + rng.randint(0, high), "w": low_w + rng.randint(0, high)}


def _two(text: str) -> tuple[int, int]:
    found = [int(x) for x in text.split("x")]
    return found[0], found[-1]


def run(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, groups, grad = DTYPES[o["dtype"]], o["groups"], o["grad"]
    x = ctx.normal(s["batch"], d["c"] * groups, s["h"], s["w"], dtype=dtype)
    w = ctx.normal(d["k"] * groups, d["c"], d["r"], d["s"], dtype=dtype, scale=(d["c"] * d["r"] * d["s"]) ** -0.5)
    lay = lambda t, how: ctx.place(t.permute(0, 2, 3, 1).contiguous(), how.split()[-1]).permute(0, 3, 1, 2)  # noqa: E731
    place = lambda t, form: lay(t, form) if form.startswith("last") else ctx.place(t, form)  # noqa: E731
    x, w = place(x, o["x"]).requires_grad_(grad), place(w, o["weight"]).requires_grad_(grad)
    bias = ctx.place(ctx.normal(d["k"] * groups, dtype=dtype)).requires_grad_(grad) if o["bias"] else None
    stride, dilation = _two(o["stride"]), _two(o["dilation"])
    padding = o["padding"] if o["padding"] in ("same", "valid") else _two(o["padding"])
    act = None if o["act"] == "none" else o["act"]
    got = tilefold.conv2d(
        x, w, bias, stride, padding, dilation, groups, method=o["method"], activation=act, tf32=o["tf32"]
    )
    f = lambda a, b, c: torch.nn.functional.conv2d(a, b, c, stride, padding, dilation, groups)  # noqa: E731
    wx, ww = x.detach().double(), w.detach().double()
    wb = None if bias is None else bias.detach().double()
    z, size, square = f(wx, ww, wb), f(wx.abs(), ww.abs(), None if wb is None else wb.abs()), f(wx**2, ww**2, None)
    y, slope, bend = acted(z, o["act"])
    terms, unit = d["c"] * d["r"] * d["s"], TF32 if o["tf32"] else 0.0
    extra = (5e-5 * y.abs() + 1e-8 if o["act"] == "gelu" else 0.0) + 8 * FP32 * z.abs() * (o["act"] != "none")
    ctx.compare(
        "convolution", got, y, limit(y, dtype, 1.2 * size, 1.44 * square, unit, terms, extra + 1.2 * unit * z.abs())
    )
    if not grad:
        return
    cot = ctx.normal(*got.shape, dtype=dtype)
    leaves = [t for t in (x, w, bias) if t is not None]
    made = torch.autograd.grad(got, leaves, cot)
    g = cot.double()
    dz = g * slope
    kept = (roundoff(dtype) + unit) * z.abs() + FP32 * 24 * size + of_terms(unit, size, square)
    off = bend * g.abs() * kept + 8 * FP32 * dz.abs() * (o["act"] != "none")
    if o["act"] == "relu":
        off = off + torch.where(z.abs() <= kept, g.abs(), 0.0)
    u = max(unit, roundoff(dtype) if o["act"] != "none" else 0.0)
    exact, lin, sq, err = (_pulled(f, a, b, c) for a, b, c in (
        (wx, ww, dz), (wx.abs(), ww.abs(), dz.abs()), (wx**2, ww**2, dz**2), (wx.abs(), ww.abs(), off)))  # fmt: skip
    pixels = s["batch"] * z.shape[2] * z.shape[3]
    counts = (terms * d["k"] // max(1, d["c"]), pixels, pixels)
    for i, (name, mine) in enumerate(zip(("x", "weight", "bias"), made, strict=False)):
        ctx.compare(
            f"gradient of {name}", mine, exact[i], limit(exact[i], dtype, lin[i], sq[i], u, counts[i], err[i], unit)
        )


def _pulled(f: Any, x: Any, w: Any, cot: Any) -> list[torch.Tensor]:
    """The gradients of x, w and a bias of zeros by torch in fp64: linear in each, so also the sums of sizes and of squares."""
    with torch.enable_grad():
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        bias = torch.zeros(w.shape[0], dtype=torch.float64, device=x.device, requires_grad=True)
        return list(torch.autograd.grad(f(x, w, bias), (x, w, bias), cot))


CONV = Family(
    "conv",
    {
        "dtype": ("fp16", "bf16", "fp32"),
        "c": ("even", "one", "few", "odd"),
        "k": ("even", "one", "few", "odd"),
        "filter": ("3", "1", "5", "1x3", "2x4"),
        "stride": ("1", "2", "3", "1x2", "4x3"),
        "padding": ("0", "1", "2x1", "same", "valid"),
        "dilation": ("1", "2", "3", "2x1"),
        "groups": (1, 2, 5),
        "method": ("auto", "implicit", "relayout", "im2col"),
        "x": ("plain", "gap", "last plain", "last gap", "last offset"),
        "weight": ("plain", "last plain"),
        "bias": (False, True),
        "act": ACTS,
        "tf32": (False, True),
        "grad": (False, True),
    },
    run,
    sizes,
    dims,
    (never("padding", {"same"}, "stride", {"2", "3", "1x2", "4x3"}), never("dtype", {"fp16", "bf16"}, "tf32", {True})),
    {"c": ("one", "few"), "k": ("one", "few"), "filter": ("3", "1", "1x3"), "groups": (1, 2)},
)
