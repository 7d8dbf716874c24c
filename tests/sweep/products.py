"""Matrix products: `matmul`, `bmm`, `matmul_w8a8`, `lowbit_matmul`."""

import random
from typing import Any

import torch

import tilefold
from tilefold.quant import quantize_weight

from .axes import Family, never
from .bounds import FP32, TF32, limit, of_terms, roundoff
from .context import Context
from .dense_run import DTYPES
from .sizes import length

KINDS = {**DTYPES, "e4m3": torch.float8_e4m3fn}
ACTS = ("none", "relu", "silu", "gelu", "gelu_tanh")


def acted(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(activation, its derivative, the size of its second one's bound) of fp64 x."""
    f = torch.nn.functional
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        y = {"none": lambda: z * 1.0, "relu": lambda: f.relu(z), "silu": lambda: f.silu(z), "gelu": lambda: f.gelu(z),
             "gelu_tanh": lambda: f.gelu(z, approximate="tanh")}[name]()  # fmt: skip
        (slope,) = torch.autograd.grad(y.sum(), z)
    return y.detach(), slope, torch.full_like(x, 0.0 if name in ("none", "relu") else 1.2)


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    return {"m": length(rng, most), "n": length(rng, most), "k": length(rng, most), "batch": rng.choice((0, 1, 2, 5))}


def operand(ctx: Context, x: torch.Tensor, major: str, name: str, grad: bool) -> torch.Tensor:
    """x with rows or columns side by side, or with gaps between rows."""
    if major == "columns":
        return ctx.place(x.mT.contiguous(), "plain", name).mT.requires_grad_(grad)
    return ctx.place(x, {"rows": "plain", "gap": "gap", "offset": "offset"}[major], name).requires_grad_(grad)


def run_matmul(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    m, n, k, dtype = s["m"], s["n"], s["k"], KINDS[o["dtype"]]
    eight, grad = o["dtype"] == "e4m3", o["grad"]
    lead = {
        "matmul": ((), ()),
        "bmm": ((s["batch"],),) * 2,
        "bmm a": ((s["batch"],), ()),
        "bmm b": ((), (s["batch"],)),
    }[o["api"]]
    a = operand(ctx, ctx.normal(*lead[0], m, k).to(dtype), o["a"], "a", grad)
    b = operand(ctx, ctx.normal(*lead[1], k, n).to(dtype), o["b"], "b", grad)
    out = DTYPES[o["out"]] if o["out"] != "same" else torch.bfloat16 if eight else dtype
    given: dict[str, Any] = {"activation": None if o["act"] == "none" else o["act"], "order": o["order"]}
    if o["out"] != "same":
        given["out_dtype"] = out
    if o["tf32"]:
        given["tf32"] = True
    if o["bias"] != "off":
        shape = {"n": (n,), "m1": (m, 1), "mn": (m, n)}[o["bias"]]
        given["bias"] = ctx.place(ctx.normal(*shape, dtype=torch.float32 if eight else dtype)).requires_grad_(grad)
    wide = [a.detach().double(), b.detach().double()]
    if o["scaled"]:
        given["scale_a"], given["scale_b"] = ctx.uniform(m, low=0.5), ctx.uniform(1, low=0.5)
        wide[0], wide[1] = wide[0] * given["scale_a"].double()[:, None], wide[1] * given["scale_b"].double()
    call = tilefold.matmul if o["api"] == "matmul" else tilefold.bmm
    got = call(a, b, **given)
    z, size = wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
    square = wide[0] ** 2 @ wide[1] ** 2
    if "bias" in given:
        z, size = z + given["bias"].detach().double(), size + given["bias"].detach().double().abs()
    y, slope, bend = acted(z, o["act"])
    unit = TF32 if o["tf32"] else 0.0
    # e4m3: tensor cores add with about 14 bits; a 16-bit GELU is right to 5e-5 of the result (docs/explanation/matmul.md)
    extra = (5e-5 * y.abs() + 1e-8 if o["act"] == "gelu" and out != torch.float32 else 0.0) + 8 * FP32 * z.abs() * (
        o["act"] != "none"
    )
    extra = extra + (2.0**-12 * size if eight else 0.0)
    ctx.compare("product", got, y, limit(y, out, 1.2 * size, 1.44 * square, unit, k, extra + 1.2 * unit * z.abs()))
    if grad:
        _backward(ctx, o, got, (a, b, given.get("bias")), (*wide, z, size, square, slope, bend), unit)


def _backward(ctx: Context, o: dict[str, Any], got: Any, leaves: Any, exact: Any, unit: float) -> None:
    wa, wb, z, size, square, slope, bend = exact
    cot = ctx.normal(*got.shape, dtype=got.dtype)
    made = torch.autograd.grad(got, [x for x in leaves if x is not None], cot)
    g = cot.double()
    dz = g * slope
    dtype, u = leaves[0].dtype, max(unit, roundoff(leaves[0].dtype))
    kept = (
        (roundoff(got.dtype) + unit) * z.abs() + FP32 * 24 * size + of_terms(unit, size, square)
    )  # of what the activation was applied to
    off = bend * g.abs() * kept * (o["act"] != "none") + 8 * FP32 * dz.abs()
    if o["act"] == "relu":  # which side of 0 a sum lies on is not known where it is no larger than its error
        off = off + torch.where(z.abs() <= kept, g.abs(), 0.0)
    u = u if o["act"] != "none" or unit or got.dtype != dtype else 0.0  # else dz is the cotangent itself
    pairs = [
        (leaves[0], made[0], dz @ wb.mT, dz.abs() @ wb.abs().mT, dz**2 @ wb.mT**2, off @ wb.abs().mT, wb.shape[-1]),
        (leaves[1], made[1], wa.mT @ dz, wa.abs().mT @ dz.abs(), wa.mT**2 @ dz**2, wa.abs().mT @ off, wa.shape[-2]),
    ]
    if leaves[2] is not None:
        pairs.append((leaves[2], made[2], dz, dz.abs(), dz**2, off, 1))
    for name, (leaf, mine, x, lin, sq, err, terms) in zip(("a", "b", "bias"), pairs, strict=False):
        x, lin, sq, err = (t.sum_to_size(leaf.shape) for t in (x, lin, sq, err))
        count = terms * max(1, dz.numel() // max(1, leaf.numel()))
        ctx.compare(f"gradient of {name}", mine, x, limit(x, leaf.dtype, lin, sq, u, count, err, unit))


MATMUL = Family(
    "matmul",
    {
        "api": ("matmul", "bmm", "bmm a", "bmm b"),
        "dtype": ("fp16", "bf16", "fp32", "e4m3"),
        "a": ("rows", "columns", "gap", "offset"),
        "b": ("rows", "columns", "gap", "offset"),
        "bias": ("off", "n", "m1", "mn"),
        "act": ACTS,
        "order": ("grouped", "plain"),
        "out": ("same", "fp16", "bf16", "fp32"),
        "tf32": (False, True),
        "scaled": (False, True),
        "grad": (False, True),
    },
    run_matmul,
    sizes,
    clashes=(
        never("dtype", {"fp16", "bf16", "e4m3"}, "tf32", {True}),
        never("dtype", {"fp16", "bf16", "fp32"}, "scaled", {True}),
        never("dtype", {"e4m3"}, "grad", {True}),
        never("api", {"bmm", "bmm a", "bmm b"}, "dtype", {"e4m3"}),
    ),
)


# ---------------------------------------------------------------- weights of few bits


def low_sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    m = length(rng, most) if rng.random() < 0.5 else rng.randint(0, 9)
    return {"m": m, "n": length(rng, most, 1), "k": length(rng, most, 1), "lead": rng.choice((0, 1))}


def _rows(ctx: Context, o: dict[str, Any], s: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    lead = (s["m"],) if not s["lead"] else (1, s["m"])
    return ctx.place(ctx.normal(*lead, s["k"], dtype=dtype), o["form"], "x").requires_grad_(o.get("grad", False))


def run_lowbit(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, w = DTYPES[o["dtype"]], ctx.normal(s["n"], s["k"])
    kept = torch.float32 if o["scales"] == "fp32" else torch.float16 if dtype == torch.float32 else dtype
    group = None if o["per"] in ("channel", "tensor") else int(o["per"])
    given = (
        {"per": "tensor"} if o["per"] == "tensor" else {"per": "channel"} if o["per"] == "channel" else {"group": group}
    )
    refine = {"refine": "hqq"} if o["refine"] else {}
    weight = quantize_weight(w, o["bits"], scheme=o["scheme"], dtype=kept, **given, **refine)
    wide = weight.dequantize(torch.float64)
    worst = (w.double() - wide).abs()
    ctx.expect("no weight is more than half a scale off", o["refine"] or bool((worst <= 0.5005 * _steps(weight)).all()))
    x = _rows(ctx, o, s, dtype)
    bias = ctx.place(ctx.normal(s["n"], dtype=dtype)) if o["bias"] else None
    got = tilefold.lowbit_matmul(x, weight, bias, deterministic=o["deterministic"])
    xs = x.detach().double()
    y, size = xs @ wide.T, xs.abs() @ wide.abs().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    square = xs**2 @ wide.T**2
    ctx.compare("product", got, y, limit(y, dtype, size, square, roundoff(dtype), s["k"]))
    if o["grad"]:
        cot = ctx.normal(*got.shape, dtype=dtype)
        (made,) = torch.autograd.grad(got, x, cot)
        g = cot.double()
        ctx.compare(
            "gradient of x",
            made,
            g @ wide,
            limit(g @ wide, dtype, g.abs() @ wide.abs(), g**2 @ wide**2, roundoff(dtype), s["n"]),
        )


def _steps(weight: Any) -> torch.Tensor:
    """What a code counts for, a weight."""
    scales = weight.scales.double()
    if scales.shape[0] == 1:
        return scales.T.expand(weight.shape[0], 1)
    return scales.T.repeat_interleave(weight.group, 1)[:, : weight.shape[1]]


LOWBIT = Family(
    "lowbit",
    {
        "bits": (4, 8, 3, 2),
        "dtype": ("fp16", "bf16", "fp32"),
        "scheme": ("asymmetric", "symmetric"),
        "per": ("64", "32", "128", "channel", "tensor"),
        "refine": (False, True),
        "scales": ("same", "fp32"),
        "bias": (False, True),
        "form": ("plain", "gap", "offset"),
        "deterministic": (True, False),
        "grad": (False, True),
    },
    run_lowbit,
    low_sizes,
    clashes=(never("scheme", {"symmetric"}, "refine", {True}),),
)


def run_w8a8(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, kind = DTYPES[o["dtype"]], torch.int8 if o["weight"] == "int8" else torch.float8_e4m3fn
    x = _rows(ctx, o, s, dtype)
    w = ctx.normal(s["n"], s["k"]) * 30
    w = ctx.place(w.round().clamp(-127, 127).to(kind) if kind == torch.int8 else w.to(kind), o["form"], "weight")
    factor = ctx.place(ctx.uniform(s["n"] if o["scale"] == "row" else 1, low=0.01, high=0.03))
    bias = ctx.place(ctx.normal(s["n"], dtype=dtype)) if o["bias"] else None
    got = tilefold.matmul_w8a8(x, w, factor, bias)
    top = 127.0 if kind == torch.int8 else 448.0
    wide, xs = w.double(), x.double()
    largest = xs.abs().amax(-1, keepdim=True) if s["k"] else xs.new_zeros(*xs.shape[:-1], 1)
    scale = torch.where(largest == 0, 1.0, largest / top)
    codes = xs / scale
    near, low, high = (_rounded(codes * (1 + e), kind) for e in (0.0, -4 * FP32, 4 * FP32))
    doubt = torch.maximum((near - low).abs(), (near - high).abs())  # fp32 does not say which of two codes is nearer
    f = factor.double()
    y, size = (near @ wide.T) * scale * f, (near.abs() @ wide.abs().T) * scale * f
    extra = (doubt @ wide.abs().T) * scale * f + (0.0 if kind == torch.int8 else 2.0**-12 * size) + 6 * FP32 * y.abs()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    ctx.compare(
        "product", got, y, limit(y, dtype, size * (kind != torch.int8), None, 0.0, s["k"], extra + 2 * FP32 * y.abs())
    )


def _rounded(codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    if kind == torch.int8:
        return codes.round().clamp(-127, 127)
    return codes.float().clamp(-448, 448).to(kind).double()


W8A8 = Family(
    "w8a8",
    {
        "dtype": ("fp16", "bf16"),
        "weight": ("int8", "e4m3"),
        "scale": ("row", "one"),
        "bias": (False, True),
        "form": ("plain", "gap", "offset"),
    },
    run_w8a8,
    low_sizes,
)
