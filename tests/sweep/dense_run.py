"""One problem of dense attention: inputs, the call by whichever of its names, what it has to be."""

from typing import Any

import torch

import tilefold
from tilefold.compat import flash_attn as flash

from .bounds import FP32, Wrong, limit, steps
from .context import Context
from .mods import keywords, rule
from .oracle import Rules, attend, gradients

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DROPPED = 0.3


class Problem:
    """The tensors of a problem: [batch, seq, heads, dim] or packed, as the call takes them, and fp64 ones of each sequence."""

    def __init__(self, ctx: Context, o: dict[str, Any], dims: dict[str, Any], s: dict[str, Any]) -> None:
        self.ctx, self.o, self.s = ctx, o, s
        self.dtype, self.packed = DTYPES[o["dtype"]], "varlen" in o["api"]
        self.d, self.dv, self.kv = dims["d"], dims["dv"], s["kv"]
        self.heads = self.kv * o["group"]
        self.batch = len(s["q"]) if self.packed else s["batch"]
        self.lq = s["q"] if self.packed else s["q"][:1] * self.batch
        self.lk = (s["k"] if self.packed else s["k"][:1] * self.batch)[: len(self.lq)]
        if "qkv" in o["api"]:
            self.lk = self.lq
        self.grad = o["grad"] != "none"
        self._tensors()
        self.options = self._options()

    def _tensors(self) -> None:
        ctx, name = self.ctx, self.o["api"]
        if self.packed:
            total_q, total_k = sum(self.lq) + self.s["spare"], sum(self.lk) + self.s["spare"]
            if "qkv" in name:
                total_k = total_q
            lead_q, lead_k = (total_q,), (total_k,)
        else:
            lead_q, lead_k = (self.batch, self.lq[0]), (self.batch, self.lk[0])
        shapes = {"q": (*lead_q, self.heads, self.d), "k": (*lead_k, self.kv, self.d), "v": (*lead_k, self.kv, self.dv)}
        made = {n: ctx.normal(*shape, dtype=self.dtype) for n, shape in shapes.items()}
        if self.packed and self.s["spare"]:
            made["q"][sum(self.lq) :], made["k"][sum(self.lk) :], made["v"][sum(self.lk) :] = (float("nan"),) * 3
        parts = ("q", "k", "v") if name.endswith("qkv") else ("k", "v") if name.endswith("_kv") else ()
        if parts:
            whole = torch.stack([made[n] for n in parts], -3)
            self.whole = ctx.place(whole, self.o["form"], "qkv").requires_grad_(self.grad)
            views = dict(zip(parts, self.whole.detach().unbind(-3), strict=True))
        else:
            views = {}
        for n, values in made.items():
            if name == "bhsd":
                values = values.transpose(1, 2)
            setattr(self, n, views[n] if n in views else ctx.place(values, self.o["form"], n).requires_grad_(self.grad))

    def _options(self) -> dict[str, Any]:
        o, ctx, found = self.o, self.ctx, {}
        found["causal"] = o["causal"]
        if self.s["window"] is not None:
            found["window"] = tuple(self.s["window"])
        if self.s["scale"] is not None:
            found["scale"] = self.s["scale"]
        if o["softcap"]:
            found["softcap"] = 1.5
        if o["alibi"] != "off":
            shape = (self.heads,) if o["alibi"] == "heads" else (self.batch, self.heads)
            found["alibi_slopes"] = ctx.place(ctx.uniform(*shape, high=0.2))
        if o["sinks"] != "off":
            kind = self.dtype if o["sinks"] == "same" else torch.float32
            found["sinks"] = ctx.place(ctx.normal(self.heads, dtype=kind)).requires_grad_(o["more_grads"])
        if o["bias"] != "off":
            kind = torch.float32 if o["bias"] in ("head", "row") else self.dtype
            bias = self._outside(ctx.normal(*self._shape(o["bias"]), dtype=kind), o["bias"])
            found["bias"] = ctx.place(bias, name="bias").requires_grad_(o["more_grads"])
        if o["mask"] != "off":
            found["mask"] = ctx.place(ctx.uniform(*self._shape(o["mask"])) < 0.7, name="mask")
        found |= keywords(ctx, o, max([*self.lq, *self.lk, 1]), self.grad)
        if o["dropout"] and "flash" not in o["api"]:
            found["dropout_p"] = DROPPED
            found["dropout_seed"] = ctx.integers(0, 1 << 40, 1)
        return found

    def _shape(self, kind: str) -> tuple[int, ...]:
        n, m = max([*self.lq, 0]), max([*self.lk, 0])
        return {"full": (self.batch, self.heads, n, m), "row": (1, 1, 1, m), "head": (1, self.heads, n, m),
                "batch": (self.batch, 1, n, m)}[kind]  # fmt: skip

    def _outside(self, bias: torch.Tensor, kind: str) -> torch.Tensor:
        """NaN where no sequence has a query or a key."""
        if self.packed and kind in ("full", "batch"):
            for b in range(self.batch):
                bias[b, :, self.lq[b] :] = float("nan")
                bias[b, :, :, self.lk[b] :] = float("nan")
        return bias

    def cu(self, counts: list[int]) -> torch.Tensor:
        return self.ctx.whole([sum(counts[:i]) for i in range(len(counts) + 1)])

    # ------------------------------------------------------------ the call

    def call(self, q: Any, k: Any, v: Any) -> Any:
        """(out, lse or None, S_dmask or None)."""
        o, name = self.o, self.o["api"]
        given = dict(self.options)
        longest = max([*self.lq, 0]), max([*self.lk, 0])
        if "flash" not in name:
            if o["nondeterministic"]:
                given["deterministic"] = False
            if self.packed:
                found = tilefold.attention_varlen(q, k, v, self.cu(self.lq), self.cu(self.lk), *longest,
                                                  return_lse=o["lse"], **given)  # fmt: skip
            else:
                found = tilefold.attention(q, k, v, layout=name, return_lse=o["lse"], **given)
            return (*found, None) if o["lse"] else (found, None, None)
        renamed = {"window": "window_size", "scale": "softmax_scale"}
        given = {renamed.get(key, key): value for key, value in given.items()}
        want = o["lse"] or o["dropout"]
        given.update(return_attn_probs=want, dropout_p=DROPPED if o["dropout"] else 0.0)
        if name == "flash":
            found = flash.flash_attn_func(q, k, v, **given)
        elif name == "flash_kv":
            found = flash.flash_attn_kvpacked_func(q, self.whole, **given)
        elif name == "flash_qkv":
            found = flash.flash_attn_qkvpacked_func(self.whole, **given)
        elif name == "flash_varlen_qkv":
            found = flash.flash_attn_varlen_qkvpacked_func(self.whole, self.cu(self.lq), longest[0], **given)
        elif name == "flash_varlen_kv":
            found = flash.flash_attn_varlen_kvpacked_func(
                q, self.whole, self.cu(self.lq), self.cu(self.lk), *longest, **given
            )
        else:
            found = flash.flash_attn_varlen_func(q, k, v, self.cu(self.lq), self.cu(self.lk), *longest, **given)
        return found if want else (found, None, None)

    # ------------------------------------------------------------ sequences

    def one(self, x: torch.Tensor, b: int, lens: list[int]) -> torch.Tensor:
        """Sequence b of a tensor laid out like q, [n, heads, dim] in fp64."""
        if self.packed:
            first = sum(lens[:b])
            return x[first : first + lens[b]].double()
        return (x[b].transpose(0, 1) if self.o["api"] == "bhsd" else x[b]).double()

    def rules(self, b: int, keep: torch.Tensor | None) -> Rules:
        g, o, n, m = self.options, self.o, self.lq[b], self.lk[b]
        slopes = g.get("alibi_slopes")
        r = Rules(g.get("scale", self.d**-0.5), g["causal"], g.get("window"), g.get("softcap", 0.0), keep=keep, batch=b)
        r.slopes = None if slopes is None else (slopes if slopes.dim() == 1 else slopes[b]).double()
        r.sinks = g["sinks"].detach().double() if "sinks" in g else None
        for name, field in (("bias", "bias"), ("mask", "seen")):
            if name in g:
                t = g[name].detach()
                t = t[b if t.shape[0] > 1 else 0, :, : n if t.shape[2] > 1 else 1, :m]
                setattr(r, field, t if name == "mask" else t.double())
        rule(r, o, g)
        return r


def run(ctx: Context, o: dict[str, Any], dims: dict[str, Any], s: dict[str, Any]) -> None:
    """Forward, and backward if asked for, held to fp64."""
    p = Problem(ctx, o, dims, s)
    out, lse, marks = p.call(p.q, p.k, p.v)
    keeps = _kept(p, marks) if o["dropout"] else [None] * p.batch
    seqs = [[p.one(x.detach(), b, n) for x, n in ((p.q, p.lq), (p.k, p.lk), (p.v, p.lk))] for b in range(p.batch)]
    rules = [p.rules(b, keeps[b]) for b in range(p.batch)]
    folds = [attend(*seqs[b], rules[b], p.dtype) for b in range(p.batch)]
    for b, f in enumerate(folds):
        ctx.compare(f"out of sequence {b}", p.one(out, b, p.lq).to(out.dtype), f.out, f.out_limit)
        if lse is not None:
            first = sum(p.lq[:b])
            got = lse[:, first : first + p.lq[b]] if p.packed else lse[b, :, : p.lq[b]]
            exact = f.lse
            if "flash" in o["api"]:
                exact = exact.masked_fill(exact == float("-inf"), float("inf"))
            ctx.compare(f"lse of sequence {b}", got, exact, f.lse_limit)
    if p.grad:
        _backward(p, out, lse, seqs, rules, folds)


def _kept(p: Problem, marks: Any) -> list[torch.Tensor]:
    """What dropout leaves of each sequence's weights, times 1 / (1 - p): read off S_dmask, or off a V of unit rows."""
    up, found, dropped, count = 1 / (1 - DROPPED), [], 0.0, 0
    if marks is None:
        marks = _seen_by_unit_rows(p)
        found = [x > 0 for x in marks]
        return [x.double() * up for x in found]
    for b in range(p.batch):
        live = ~marks[b, :, : p.lq[b], : p.lk[b]].signbit()
        found.append(live.double() * up)
        dropped, count = dropped + float((~live).sum()), count + live.numel()
    share = (DROPPED * (1 - DROPPED) * count) ** 0.5
    if not any(p.o[x] not in ("off", False, "none") for x in ("mask", "mask_mod", "causal", "window")) and count:
        p.ctx.expect(
            "share of dropped weights", abs(dropped - DROPPED * count) <= 7 * share + 1, f"{dropped} of {count}"
        )
    return found


def _seen_by_unit_rows(p: Problem) -> list[torch.Tensor]:
    """The weights themselves, [heads, n, m]: column c of V is 1 in row c, dim_v keys a call."""
    m, parts = max([*p.lk, 0]), [[] for _ in range(p.batch)]
    with torch.no_grad():
        for first in range(0, m, p.dv):
            v = torch.zeros_like(p.v)
            for b in range(p.batch):
                for j in range(first, min(first + p.dv, p.lk[b])):
                    row = v[sum(p.lk[:b]) + j] if p.packed else v[b, :, j] if p.o["api"] == "bhsd" else v[b, j]
                    row[..., j - first] = 1
            out = p.call(p.q.detach(), p.k.detach(), v)[0]
            for b in range(p.batch):
                parts[b].append(p.one(out, b, p.lq).transpose(0, 1)[..., : max(0, min(p.dv, p.lk[b] - first))])
    empty = [torch.zeros(p.heads, n, 0, device=p.ctx.device, dtype=torch.float64) for n in p.lq]
    return [torch.cat(x, 2) if x else e for x, e in zip(parts, empty, strict=True)]


def _backward(p: Problem, out: Any, lse: Any, seqs: Any, rules: Any, folds: Any) -> None:
    ctx, o = p.ctx, p.o
    dout = ctx.normal(*out.shape, dtype=p.dtype)
    dlse = ctx.normal(*lse.shape) if o["grad"] == "lse" else None
    whole = {"flash_qkv": ("whole",), "flash_kv": ("q", "whole"), "flash_varlen_qkv": ("whole",),
             "flash_varlen_kv": ("q", "whole")}.get(o["api"], ("q", "k", "v"))  # fmt: skip
    wanted = {name: getattr(p, name) for name in whole}
    wanted.update({n: p.options[n] for n in ("bias", "sinks") if n in p.options and o["more_grads"]})
    outs, cots = ([out, lse], [dout, dlse]) if dlse is not None else ([out], [dout])
    made = dict(zip(wanted, torch.autograd.grad(outs, list(wanted.values()), cots), strict=True))
    if "whole" in made:
        names = ("q", "k", "v") if "q" not in made else ("k", "v")
        made.update(zip(names, made.pop("whole").unbind(-3), strict=True))
    biased = _Sums(p.options["bias"]) if "bias" in made else None
    sunk = _Sums(p.options["sinks"]) if "sinks" in made else None
    for b in range(p.batch):
        first = sum(p.lq[:b])
        dl = None if dlse is None else (dlse[:, first : first + p.lq[b]] if p.packed else dlse[b]).double()
        if dl is not None:
            dl = dl.masked_fill(folds[b].lse == float("-inf"), 0.0)
        g = gradients(*seqs[b], rules[b], folds[b], p.one(dout, b, p.lq), dl, p.dtype)
        for name, exact, bound, lens in (("q", g.q, g.limits[0], p.lq), ("k", g.k, g.limits[1], p.lk),
                                         ("v", g.v, g.limits[2], p.lk)):  # fmt: skip
            ctx.compare(f"gradient of {name} of sequence {b}", p.one(made[name], b, lens).to(p.dtype), exact, bound)
        if biased is not None:
            biased.add(b, g.bias, g.limits[3])
        if sunk is not None:
            sunk.add(0, g.sinks, g.limits[4])
    for name, sums in (("bias", biased), ("sinks", sunk)):
        if sums is not None:
            ctx.compare(f"gradient of {name}", made[name], sums.exact, sums.limit(made[name].dtype))
    if p.packed and p.s["spare"]:
        for name, lens in (("q", p.lq), ("k", p.lk), ("v", p.lk)):
            rest = made[name][sum(lens) :]
            if not torch.equal(rest, torch.zeros_like(rest)):
                raise Wrong(f"gradient of {name} is not 0 in rows of no sequence")


class _Sums:
    """A gradient that sums over what its tensor is broadcast along."""

    def __init__(self, like: torch.Tensor) -> None:
        self.exact, self.lin, self.sq, self.size = (
            torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in range(4)
        )
        self.terms = 0

    def add(self, b: int, part: torch.Tensor, slack: torch.Tensor) -> None:
        if part.dim() == 3 and part.shape[1] * part.shape[2] == 0:
            return
        self.terms += part.numel() // max(1, self.exact.shape[-1])
        for total, x in ((self.exact, part), (self.lin, slack), (self.sq, slack**2), (self.size, part.abs())):
            if part.dim() == 1:
                total += x
                continue
            into = total[b if total.shape[0] > 1 else 0]
            x = x.sum(0, keepdim=True) if into.shape[0] == 1 else x
            x = x.sum(1, keepdim=True) if into.shape[1] == 1 else x
            into[:, : x.shape[1], : x.shape[2]] += x

    def limit(self, dtype: torch.dtype) -> torch.Tensor:
        slack = self.sq.sqrt() + self.lin / 8 if self.terms > 1 else self.lin
        return limit(
            self.exact, dtype, self.size, extra=torch.minimum(slack, self.lin) + FP32 * steps(self.terms) * self.size
        )
