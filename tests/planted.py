"""Faults that kernels could have, planted into results that are exact otherwise: what the limits have to catch, in every dtype.

A fault is computed in fp64 and rounded once, so that nothing but the fault, and the least rounding there is, shows.
`python tests/planted.py` prints benchmarks/results/planted_faults.csv."""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tilefold import BlockIndex, quant, reference
from tilefold.reference import matrix

Tensors = dict[str, torch.Tensor]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Planted:
    """One family: what is right by dtype of the computation, given inputs of a dtype, and the faults: (inputs) -> results."""

    make: Callable[[torch.dtype], Any]
    right: Callable[..., Tensors]
    faults: dict[str, Callable[[Any], Tensors]] = field(default_factory=dict)

    def fault(self, title: str) -> Callable[[Any], Any]:
        def keep(made: Callable[[Any], Tensors]) -> Callable[[Any], Tensors]:
            self.faults[title] = made
            return made

        return keep

    def judged(self, dtype: torch.dtype) -> tuple[Any, Callable[[Tensors], dict[str, reference.Comparison]]]:
        """Inputs, and how results over them are judged."""
        torch.manual_seed(0)
        made = self.make(dtype)
        exact, plain = self.right(made, torch.float64), self.right(made, dtype)

        def verdicts(got: Tensors) -> dict[str, reference.Comparison]:
            found = {}
            for name, x in got.items():
                log = name == "lse"
                x = x.to(torch.float32 if log else dtype)
                found[name] = reference.compare(x, exact[name], plain[name], float(log))
            return found

        return made, verdicts


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def in_bf16(a: torch.Tensor, b: torch.Tensor, step: int) -> torch.Tensor:
    """a @ b, the sum kept in bf16 from one `step` terms to the next."""
    total = torch.zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]).bfloat16()
    for i in range(0, a.shape[-1], step):
        total = (total.double() + a[..., i : i + step].double() @ b[..., i : i + step, :].double()).bfloat16()
    return total.double()


# ---------------------------------------------------------------- dense attention

Q, K, H, KV, D = 40, 96, 4, 2, 32
SCALE = D**-0.5


class Dense:
    def __init__(self, dtype: torch.dtype) -> None:
        self.q, self.dout = normal(2, Q, H, D, dtype=dtype, scale=2.0), normal(2, Q, H, D, dtype=dtype)
        self.k, self.v = (normal(2, K, KV, D, dtype=dtype) for _ in range(2))
        self.bias, self.sinks = normal(1, H, Q, K, dtype=dtype), normal(H, dtype=dtype, scale=2.0)
        self.slopes, self.dlse = torch.rand(H) / 4 + 0.1, torch.randn(2, H, Q)

    def given(self) -> dict[str, Any]:
        return {"causal": True, "bias": self.bias, "sinks": self.sinks, "alibi_slopes": self.slopes, "softcap": 3.0}


def attended(s: Dense, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    given = {**s.given(), **changed}
    q, k, v = (given.pop(name, getattr(s, name)) for name in ("q", "k", "v"))
    return dict(zip(("out", "lse"), reference.attention(q, k, v, **given, dtype=dtype), strict=True))


def simple(s: Dense, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    given = {"causal": True, **changed}
    q, k, v = (given.pop(name, getattr(s, name)) for name in ("q", "k", "v"))
    return dict(zip(("out", "lse"), reference.attention(q, k, v, **given, dtype=dtype), strict=True))


def seen_but(first: int, last: int) -> torch.Tensor:
    mask = torch.ones(1, 1, 1, K, dtype=torch.bool)
    mask[..., first:last] = False
    return mask


dense = Planted(Dense, simple)
dense.fault("a tile of keys dropped")(lambda s: simple(s, mask=seen_but(16, 32)))
dense.fault("one key dropped")(lambda s: simple(s, mask=seen_but(17, 18)))
dense.fault("causal edge off by one")(lambda s: simple(s, causal=False, window=(None, 1)))
dense.fault("scale 1 % off")(lambda s: simple(s, scale=SCALE * 1.01))
dense.fault("another group's keys")(lambda s: simple(s, k=s.k.flip(2)))
dense.fault("out 1 % too large")(lambda s: {"out": simple(s)["out"] * 1.01})
dense.fault("lse in base 2")(lambda s: {"lse": simple(s)["lse"] / math.log(2)})
dense.fault("a weight's sum without its last tile")(
    lambda s: {
        "out": simple(s)["out"] * torch.exp(simple(s)["lse"] - simple(s, mask=seen_but(16, 32))["lse"]).mT[..., None]
    }
)


@dense.fault("a stale largest score")
def _(s: Dense) -> Tensors:
    """The first half's sums are not multiplied when the largest score grows."""
    low, high = (simple(s, mask=seen_but(*span)) for span in ((48, K), (0, 48)))
    eye = torch.eye(K, dtype=torch.float64)[None, :, None].expand(2, K, KV, K)
    p = reference.attention(s.q, s.k, eye, causal=True)[0]
    grown = torch.log(p.amax(-1)) - torch.log(p[..., :48].amax(-1))
    a, b = (x["lse"].mT + y for x, y in ((low, grown), (high, 0.0)))
    w = torch.sigmoid(a - b)[..., None]
    return {"out": low["out"] * w + high["out"] * (1 - w)}


@dense.fault("a row of v read from beside it")
def _(s: Dense) -> Tensors:
    v = s.v.clone()
    v[:, 20] = v[:, 21]
    return simple(s, v=v)


options = Planted(Dense, attended)
options.fault("softcap 1 % off")(lambda s: attended(s, softcap=3.03))
options.fault("a sink forgotten")(lambda s: attended(s, sinks=s.sinks.index_fill(0, torch.tensor([1]), -math.inf)))
options.fault("slopes of the next head")(lambda s: attended(s, alibi_slopes=s.slopes.roll(1)))
options.fault("bias one row off")(lambda s: attended(s, bias=s.bias.roll(1, 2)))


# ---------------------------------------------------------------- gradients


def pulled(s: Dense, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    """dq, dk, dv, and of bias and sinks, of sum(out dout) + sum(lse dlse)."""
    given = {"dout": s.dout, "dlse": s.dlse, "scale": SCALE, **changed}
    leaves = [t.detach().double().requires_grad_() for t in (s.q, s.k, s.v, s.bias, s.sinks)]
    learned = {"bias": leaves[3], "sinks": leaves[4]}
    out, lse = reference.attention(*leaves[:3], causal=True, scale=given["scale"], **learned, dtype=dtype)
    loss = (out * given["dout"].to(out)).sum() + (lse * given["dlse"].to(lse)).sum()
    return dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), torch.autograd.grad(loss, leaves), strict=True))


def scores_only(s: Dense) -> dict[str, torch.Tensor]:
    """p, dp, ds [B, H, Q, K] and the inputs by head."""
    leaves = {n: getattr(s, n).double().transpose(1, 2) for n in ("q", "k", "v", "dout")}
    k, v = (leaves[n].repeat_interleave(H // KV, 1) for n in "kv")
    x = leaves["q"] @ k.mT * SCALE + s.bias.double()
    x = x.masked_fill(~torch.ones(Q, K, dtype=torch.bool).tril(K - Q), -math.inf)
    p = torch.softmax(torch.cat([x, s.sinks.double()[None, :, None, None].expand(2, -1, Q, 1)], 3), 3)[..., :K]
    dp = leaves["dout"] @ v.mT
    delta = (p * dp).sum(3, keepdim=True)
    return {
        "p": p,
        "dp": dp,
        "delta": delta,
        "dlse": s.dlse.double()[..., None],
        "q": leaves["q"],
        "k": k,
        "dout": leaves["dout"],
    }


def back(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


gradients = Planted(Dense, pulled)
gradients.fault("dq without delta")(
    lambda s: (lambda t: {"dq": back((t["p"] * (t["dp"] + t["dlse"])) @ t["k"] * SCALE)})(scores_only(s))
)
gradients.fault("no term of dlse")(lambda s: pulled(s, dlse=torch.zeros(2, H, Q)))
gradients.fault("dlse in base 2")(lambda s: pulled(s, dlse=s.dlse / math.log(2)))
gradients.fault("a tile of queries missing in dk")(
    lambda s: {"dk": pulled(s)["dk"] - pulled(s, dout=_rows(s.dout, 1), dlse=_rows(s.dlse, 2))["dk"]}
)
gradients.fault("a head of the group missing in dv")(
    lambda s: {"dv": pulled(s, dout=s.dout.index_fill(2, torch.tensor([1]), 0))["dv"]}
)
gradients.fault("dk 1 % too large")(lambda s: {"dk": pulled(s)["dk"] * 1.01})
gradients.fault("dq of a scale 1 % off")(lambda s: {"dq": pulled(s, scale=SCALE * 1.01)["dq"]})
gradients.fault("a sequence missing in dbias")(
    lambda s: {
        "dbias": pulled(
            s,
            dout=s.dout * torch.tensor([1, 0])[:, None, None, None],
            dlse=s.dlse * torch.tensor([1, 0])[:, None, None],
        )["dbias"]
    }
)
gradients.fault("dsinks of the wrong sign")(lambda s: {"dsinks": -pulled(s)["dsinks"]})


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x in the queries 16 to 31 only."""
    keep = torch.zeros(Q)
    keep[16:32] = 1
    return x * keep.view(*(Q if i == dim else 1 for i in range(x.dim()))).to(x)


class Long:
    """Many keys and many queries of about the same weight, and values that do not cancel."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.q, self.k = normal(1, 384, 1, D, dtype=dtype, scale=0.1), normal(1, 1024, 1, D, dtype=dtype)
        self.v, self.dout = (normal(1, n, 1, D, dtype=dtype) + 1 for n in (1024, 384))


def summed(s: Long, dtype: torch.dtype = torch.float64) -> Tensors:
    v = s.v.detach().double().requires_grad_()
    out, lse = reference.attention(s.q, s.k, v, dtype=dtype)
    (dv,) = torch.autograd.grad(out, v, s.dout.to(out.dtype))
    return {"out": out.detach(), "lse": lse.detach(), "dv": dv}


def weights(s: Long) -> torch.Tensor:
    """[1, 1, Sq, Sk] fp64."""
    return torch.softmax(s.q.double().transpose(1, 2) @ s.k.double().permute(0, 2, 3, 1) * SCALE, 3)


sums = Planted(Long, summed)
sums.fault("sums over keys in bf16")(lambda s: {"out": back(in_bf16(weights(s), back(s.v), 1))})
sums.fault("sums over queries in bf16")(lambda s: {"dv": back(in_bf16(weights(s).mT, back(s.dout), 1))})


# ---------------------------------------------------------------- sparse, decode, coarse, fuse


class Sparse(Dense):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.keep = torch.rand(1, H, 3, 6) < 0.6
        self.keep[..., 0] = True
        self.few = torch.tensor([16, 9, 16, 16, 7, 16], dtype=torch.int32)

    def index(self, keep: torch.Tensor | None = None, few: torch.Tensor | None = None) -> BlockIndex:
        keep, few = self.keep if keep is None else keep, self.few if few is None else few
        return BlockIndex.from_map(keep, block_q=16, block_k=16, seq_q=Q, seq_k=K, block_sizes=few)


def listed(s: Sparse, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    leaves = [t.detach().double().requires_grad_() for t in (s.q, s.k, s.v)]
    out, lse = reference.sparse_attention(*leaves, s.index(**changed), dtype=dtype)
    found = torch.autograd.grad((out * s.dout.to(out)).sum(), leaves)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), found, strict=True))}


def flipped(s: Sparse, at: tuple[int, ...]) -> torch.Tensor:
    keep = s.keep.clone()
    keep[at] = ~keep[at]
    return keep


sparse = Planted(Sparse, listed)
sparse.fault("a listed block dropped")(lambda s: listed(s, keep=flipped(s, (0, 1, 1, 0))))
sparse.fault("a block that is not listed")(lambda s: listed(s, keep=flipped(s, tuple((~s.keep).nonzero()[0].tolist()))))
sparse.fault("a block's size off by one")(
    lambda s: listed(s, few=s.few + torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.int32))
)
sparse.fault("dk without one block of queries")(lambda s: {"dk": listed(s)["dk"] - _part(s)})
sparse.fault("lists of the next head")(lambda s: listed(s, keep=s.keep.roll(1, 1)))


def _part(s: Sparse) -> torch.Tensor:
    leaves = [t.detach().double().requires_grad_() for t in (s.q, s.k, s.v)]
    out, _ = reference.sparse_attention(*leaves, s.index())
    return torch.autograd.grad((out * _rows(s.dout, 1).double()).sum(), leaves)[1]


class Decode(Dense):
    """One query over a cache in two splits; keys as codes of 8 bits times a factor a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.q = self.q[:, :1]
        self.codes = [torch.randint(-127, 128, (2, K, KV, D)).double() for _ in range(2)]
        self.factors = [(torch.rand(KV) + 0.5) / 60 for _ in range(2)]

    def cache(self, factors: Any = None, codes: Any = None) -> list[torch.Tensor]:
        pairs = zip(codes or self.codes, factors or self.factors, strict=True)
        return [c * f.double()[None, None, :, None] for c, f in pairs]


def decoded(s: Decode, dtype: torch.dtype = torch.float64, n: int = 9, first: int = 0, **changed: Any) -> Tensors:
    k, v = (x[:, first:n] for x in s.cache(**changed))
    return dict(zip(("out", "lse"), reference.attention(s.q, k, v, dtype=dtype), strict=True))


decode = Planted(Decode, decoded)
decode.fault("a split left out")(lambda s: decoded(s, first=5))
decode.fault("splits merged as if equal")(lambda s: {"out": (decoded(s, n=5)["out"] + decoded(s, first=5)["out"]) / 2})
decode.fault("length one too long")(lambda s: decoded(s, n=10))
decode.fault("two pages swapped")(lambda s: decoded(s, codes=[s.codes[0], s.codes[1].roll(4, 1)]))
decode.fault("a key's factor 1 % off")(lambda s: decoded(s, factors=[s.factors[0] * 1.01, s.factors[1]]))
decode.fault("factors of the other head")(lambda s: decoded(s, factors=[s.factors[0], s.factors[1].flip(0)]))


def rough(s: Dense, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    few = torch.tensor([16, 9, 16, 16, 7, 16], dtype=torch.int32)
    leaves = [t.detach().double().requires_grad_() for t in (s.q, s.k, s.v)]
    given = {"block": 16, "block_sizes": few, "return_lse": True, **changed}
    found = reference.coarse(*leaves, **given, dtype=dtype)
    made = torch.autograd.grad((found.out * s.dout.to(found.out)).sum(), leaves)
    return {"out": found.out.detach(), "lse": found.lse.detach(), **dict(zip(("dq", "dk", "dv"), made, strict=True))}


coarse = Planted(Dense, rough)
coarse.fault("a mean over one token more")(
    lambda s: rough(s, block_sizes=torch.tensor([16, 10, 16, 16, 7, 16], dtype=torch.int32))
)
coarse.fault("means not divided by the sizes")(lambda s: rough(s, weight_k=_shares(), weight_v=_shares()))
coarse.fault("a block without a row")(
    lambda s: rough(s, block_sizes=torch.tensor([16, 9, 0, 16, 7, 16], dtype=torch.int32))
)
coarse.fault("dk 1 % too small")(lambda s: {"dk": rough(s)["dk"] * 0.99})


def _shares() -> torch.Tensor:
    return torch.full((16,), 1 / 15.0, dtype=torch.float64)


class Gates:
    def __init__(self, dtype: torch.dtype) -> None:
        self.x, self.y, self.dout = (normal(2, 37, 3, 24, dtype=dtype) for _ in range(3))
        self.a, self.b = torch.rand(2, 37, 3).to(dtype), torch.rand(3).to(dtype)


def fused(s: Gates, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    given = [changed.get(name, getattr(s, name)).detach().double().requires_grad_() for name in ("x", "y", "a", "b")]
    out = reference.fuse(*given, dtype=dtype)
    found = torch.autograd.grad((out * s.dout.to(out)).sum(), given)
    return {"out": out.detach(), **dict(zip(("dx", "dy", "da", "db"), found, strict=True))}


fuse = Planted(Gates, fused)
fuse.fault("gates of the next token")(lambda s: fused(s, a=s.a.roll(1, 1)))
fuse.fault("a gate 1 % off")(lambda s: {"out": fused(s, a=s.a.double() * 1.01, b=s.b.double() * 1.01)["out"]})
fuse.fault("a gate's gradient without one channel")(
    lambda s: {"da": fused(s)["da"] - s.x.double()[..., 5] * s.dout.double()[..., 5]}
)


# ---------------------------------------------------------------- products


class Product:
    def __init__(self, dtype: torch.dtype) -> None:
        self.a, self.b, self.bias = (
            normal(48, 256, dtype=dtype),
            normal(256, 40, dtype=dtype),
            normal(40, dtype=dtype, scale=8.0),
        )
        self.dout = normal(48, 40, dtype=dtype)


def product(s: Product, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    leaves = [changed.get(name, getattr(s, name)).detach().double().requires_grad_() for name in ("a", "b", "bias")]
    out = reference.matmul(*leaves[:2], bias=leaves[2], activation="silu", dtype=dtype)
    found = torch.autograd.grad((out * s.dout.to(out)).sum(), leaves)
    return {"out": out.detach(), **dict(zip(("da", "db", "dbias"), found, strict=True))}


def zeroed(x: torch.Tensor, dim: int, *at: int) -> torch.Tensor:
    return x.index_fill(dim, torch.tensor(at), 0)


matmul = Planted(Product, product)
matmul.fault("the last column of a forgotten")(lambda s: product(s, a=zeroed(s.a, 1, 255)))
matmul.fault("a tile of columns of a forgotten")(lambda s: product(s, a=zeroed(s.a, 1, *range(64, 96))))
matmul.fault("the next column's bias")(lambda s: product(s, bias=s.bias.roll(1)))
matmul.fault("out 1 % too small")(lambda s: {"out": product(s)["out"] * 0.99})
matmul.fault("the activation before the bias")(lambda s: {"out": F.silu(s.a.double() @ s.b.double()) + s.bias.double()})
matmul.fault("sums in bf16")(lambda s: {"out": F.silu(in_bf16(s.a, s.b, 1) + s.bias.double())})
matmul.fault("db without the activation's slope")(lambda s: {"db": s.a.double().mT @ s.dout.double()})


class Conv:
    def __init__(self, dtype: torch.dtype) -> None:
        self.x, self.w = normal(2, 16, 9, 11, dtype=dtype), normal(24, 8, 3, 3, dtype=dtype, scale=1 / 8)
        self.dout = normal(2, 24, 9, 11, dtype=dtype)


def convolved(s: Conv, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    leaves = [changed.pop(name, getattr(s, name)).detach().double().requires_grad_() for name in ("x", "w")]
    out = matrix.conv2d(*leaves, padding=1, groups=2, dtype=dtype, **changed)
    found = torch.autograd.grad((out * s.dout.to(out)).sum(), leaves)
    return {"out": out.detach(), **dict(zip(("dx", "dw"), found, strict=True))}


conv = Planted(Conv, convolved)
conv.fault("a pixel off")(lambda s: convolved(s, x=s.x.roll(1, 3)))
conv.fault("a tap forgotten")(lambda s: convolved(s, w=_tap(s.w)))
conv.fault("another group's channels")(lambda s: convolved(s, x=s.x.roll(8, 1)))
conv.fault("dw without one image")(lambda s: {"dw": convolved(s, x=zeroed(s.x, 0, 1))["dw"]})
conv.fault("dx 1 % too large")(lambda s: {"dx": convolved(s)["dx"] * 1.01})


def _tap(w: torch.Tensor) -> torch.Tensor:
    w = w.clone()
    w[:, :, 2, 1] = 0
    return w


class Low:
    def __init__(self, dtype: torch.dtype) -> None:
        self.x, self.weight = normal(64, 256, dtype=dtype), quant.quantize_weight(torch.randn(40, 256), 4, 64)
        self.wide = self.weight.dequantize(torch.float64)
        self.step = self.weight.scales.double().T.repeat_interleave(64, 1)
        self.codes = torch.round((self.wide - self.wide.view(40, 4, 64).amin(2).repeat_interleave(64, 1)) / self.step)


def lowered(s: Low, dtype: torch.dtype = torch.float64) -> Tensors:
    return {"out": reference.lowbit_matmul(s.x, s.weight, None, dtype)}


def with_weight(s: Low, w: torch.Tensor) -> Tensors:
    return {"out": s.x.double() @ w.T}


lowbit = Planted(Low, lowered)
lowbit.fault("nibbles swapped")(lambda s: with_weight(s, s.wide.view(40, 128, 2).flip(2).flatten(1)))
lowbit.fault("a zero point off by one")(lambda s: with_weight(s, s.wide + s.step * (torch.arange(256) // 64 == 1)))
lowbit.fault("scales of the next group")(lambda s: with_weight(s, s.wide / s.step * s.step.roll(64, 1)))
lowbit.fault("a code's high bit lost")(lambda s: with_weight(s, torch.where(s.codes >= 8, s.wide - 8 * s.step, s.wide)))


class Eight:
    def __init__(self, dtype: torch.dtype) -> None:
        self.x, self.w = normal(64, 256, dtype=dtype), (torch.randn(40, 256) * 40).clamp(-127, 127).to(torch.int8)
        self.scale, self.bias = torch.rand(40) / 50 + 0.01, normal(40, dtype=dtype)


def coded(s: Eight, dtype: torch.dtype = torch.float64, **changed: Any) -> Tensors:
    given = [changed.get(name, getattr(s, name)) for name in ("x", "w", "scale", "bias")]
    return {"out": reference.matmul_w8a8(*given, dtype=dtype)}


w8a8 = Planted(Eight, coded)
w8a8.fault("scales of the next row")(lambda s: coded(s, scale=s.scale.roll(1)))
w8a8.fault("codes cut off, not rounded")(lambda s: {"out": _cut(s)})
w8a8.fault("scale 1 % off")(lambda s: coded(s, scale=s.scale * 1.01))


def _cut(s: Eight) -> torch.Tensor:
    most = s.x.double().abs().amax(1, keepdim=True) / 127
    return torch.trunc(s.x.double() / most) * most @ s.w.double().T * s.scale.double() + s.bias.double()


FAMILIES = {
    "attention": dense,
    "attention, options": options,
    "attention, gradients": gradients,
    "attention, many keys": sums,
    "sparse attention": sparse,
    "decoding": decode,
    "coarse stage": coarse,
    "fuse": fuse,
    "products": matmul,
    "convolution": conv,
    "weights of few bits": lowbit,
    "products of 8 bits": w8a8,
}


def strain(verdicts: dict[str, reference.Comparison]) -> float:
    """How many times its limit the worst error is."""
    found = [0.0]
    for v in verdicts.values():
        pairs = (v.max_error, v.max_limit), (v.l2_error, v.l2_limit)
        found += [math.inf] if not v.same_specials else [error / limit for error, limit in pairs]
    return max(found)


def table() -> str:
    """CSV: by fault, how many times its limit the error is in each dtype."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["family", "fault", *DTYPES])
    for name, family in FAMILIES.items():
        made = {dtype: family.judged(dtype) for dtype in DTYPES.values()}
        for title, fault in family.faults.items():
            lines.writerow([name, title, *(f"{strain(judge(fault(inputs))):.2g}" for inputs, judge in made.values())])
    return text.getvalue()


if __name__ == "__main__":
    print(table(), end="")
