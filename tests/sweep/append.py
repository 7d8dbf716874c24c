"""New tokens into caches, and rotary embedding: `kvcache_append`, `apply_rotary`."""

import random
from typing import Any

import torch

import tilefold

from .axes import Family, never
from .bounds import FP32, limit, roundoff
from .caches import PAGES, Caches, bits, page_of
from .context import FORMS, Context
from .dense_run import DTYPES
from .sizes import DIMS, dims_of_heads, length, lengths

FRACTIONS = ("off", "full", "half", "odd", "one")


def pairs_of_channels(rng: random.Random, kind: str, d: int) -> int:
    """Pairs that turn, of d channels: all, half of them, an odd number, one."""
    most = d // 2
    odd = rng.randrange(1, max(2, most + 1), 2)
    return {"off": 0, "full": most, "half": max(1, most // 2), "odd": min(odd, most), "one": min(1, most)}[kind]


def dims(rng: random.Random, o: dict[str, Any]) -> dict[str, int]:
    found = dims_of_heads(rng, o)
    return {
        **found,
        "page": page_of(rng, o.get("page", "16")),
        "pairs": pairs_of_channels(rng, o.get("rotary", "off"), found["d"]),
    }


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor, interleaved: bool
) -> tuple[Any, Any]:
    """x [n, heads, d] fp64 with token i turned by row at[i] of the tables, and what rounding in fp32 may cost."""
    pairs, found, size = cos.shape[1], x.clone(), torch.zeros_like(x)
    inside = ((at >= 0) & (at < cos.shape[0]))[:, None, None]
    row = at.clamp(0, max(0, cos.shape[0] - 1))
    if not cos.shape[0] or not pairs:
        return found, size
    c, s = (t.double()[row][:, None] for t in (cos, sin))
    low, high = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    a, b = x[..., low], x[..., high]
    found[..., low] = torch.where(inside, a * c - b * s, a)
    found[..., high] = torch.where(inside, b * c + a * s, b)
    size[..., low] = torch.where(inside, (a * c).abs() + (b * s).abs(), 0.0)
    size[..., high] = torch.where(inside, (b * c).abs() + (a * s).abs(), 0.0)
    return found, size


def tables(ctx: Context, o: dict[str, Any], rows: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.float32 if o["tables"] == "fp32" else DTYPES[o["dtype"]]
    angle = ctx.uniform(rows, pairs, high=6.3)
    return ctx.place(angle.cos().to(kind)), ctx.place(angle.sin().to(kind))


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    count = rng.randint(1, 4)
    q = lengths(rng, most // 2, count)
    return {"q": q if o["packed"] else q[:1] * count, "k": lengths(rng, most // 2, count), "kv": rng.choice((1, 2, 3)),
            "group": rng.choice((1, 3)), "short": rng.choice((0, 0, 0, 1, 5)), "table": rng.choice((0, 0, 3)),
            "spare": rng.choice((0, 2))}  # fmt: skip


def run(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    new, old, dtype, kv = s["q"], s["k"], DTYPES[o["dtype"]], s["kv"]
    batch = len(new)
    new = new if o["packed"] else new[:1] * batch
    need = [a + b for a, b in zip(old, new, strict=True)]
    room = max(
        1, max(need) - (0 if ctx.small else s["short"])
    )  # some rows have no place: not written (the interpreter refuses)
    caches = Caches(ctx, o, d, batch, kv, room)
    given: dict[str, Any] = {"cache_seqlens": ctx.whole(old), **caches.where([caches.room] * batch)}
    lead = (sum(new) + s["spare"],) if o["packed"] else (batch, new[0])
    k, v = (ctx.place(ctx.normal(*lead, kv, d[x], dtype=dtype), o["form"], x) for x in ("d", "dv"))
    if o["packed"]:
        given["cu_seqlens"] = ctx.whole([sum(new[:i]) for i in range(batch + 1)])
        given["max_seqlen"] = 0 if max(new) + max(old) > caches.room else max(new)
    elif new[0] > caches.room:
        return
    cos = sin = None
    if d["pairs"]:
        cos, sin = tables(ctx, o, max(1, caches.room - s["table"]), d["pairs"])
        given.update(rotary_cos=cos, rotary_sin=sin, interleaved=o["interleaved"])
    if o["store"] != "same":
        value = 1 / 40 if o["store"] == "int8" else 1 / 100
        given.update(k_scale=caches.factors("k", value), v_scale=caches.factors("v", value))
    if o["q"] and cos is not None:
        given["q"] = ctx.place(ctx.normal(*lead, kv * s["group"], d["d"], dtype=dtype), o["form"], "q")
    before = [caches.filled(d[x], [(0, min(n, caches.room)) for n in old]) for x in ("d", "dv")]
    kc, vc = (ctx.place(x, o["form"], "cache", writable=True) for x in before)
    back = tilefold.kvcache_append(k, v, kc, vc, **given)
    for b in range(batch):
        at = torch.arange(new[b], device=ctx.device) + old[b]
        part = [x[sum(new[:b]) : sum(new[: b + 1])] if o["packed"] else x[b] for x in (k, v)]
        for name, cache, image, x in (("k", kc, before[0], part[0]), ("v", vc, before[1], part[1])):
            wide, size = x.double(), torch.zeros_like(x, dtype=torch.float64)
            if name == "k" and cos is not None:
                wide, size = turned(wide, cos, sin, at, o["interleaved"])
            _stored(ctx, caches, name, b, old[b], cache, image, wide, size)
        if back is not None:
            q = given["q"]
            q, got = (x[sum(new[:b]) : sum(new[: b + 1])] if o["packed"] else x[b] for x in (q, back))
            wide, size = turned(q.double(), cos, sin, at, o["interleaved"])
            ctx.compare("turned q", got, wide, limit(wide, dtype, size))
    for name, cache, image in (("k", kc, before[0]), ("v", vc, before[1])):  # what was not appended is as it was
        same = (cache.view(torch.uint8) == image.view(torch.uint8)) if cache.is_contiguous() else (
            cache.contiguous().view(torch.uint8) == image.contiguous().view(torch.uint8))  # fmt: skip
        ctx.compare(f"{name}_cache elsewhere", same.double(), torch.ones_like(same, dtype=torch.float64), 0.0)


def _stored(
    ctx: Context, caches: Caches, name: str, b: int, first: int, cache: Any, image: Any, wide: Any, size: Any
) -> None:
    """Compare rows of the cache with what they have to hold, and put them into the image of it."""
    last = min(first + wide.shape[0], caches.room)
    count = max(0, last - first)
    at = caches.rows(b, min(first, caches.room), max(last, min(first, caches.room)))
    got, wide, size = bits(cache)[at].view(cache.dtype), wide[:count], size[:count]
    off = 3 * FP32 * size
    if caches.kind in (torch.int8, torch.float8_e4m3fn):
        f = caches.scales[name].double()
        f = (f[at[0]] if f.dim() == 2 else f)[..., None]
        wide, off = wide / f, off / f + FP32 * (wide / f).abs()
        low, high = (-128.0, 127.0) if caches.kind == torch.int8 else (-448.0, 448.0)
        wide = wide.clamp(low, high)
        step = (
            0.5 if caches.kind == torch.int8 else torch.maximum(wide.abs() * 2.0**-4, torch.full_like(wide, 2.0**-10))
        )
        ctx.compare(f"{name} in the cache", got, wide, step + off)
    else:
        exact = torch.where(
            size == 0, 0.0, roundoff(caches.kind) * wide.abs() + off + 1e-30 + torch.finfo(caches.kind).tiny * 1e-3
        )
        ctx.compare(f"{name} in the cache", got, wide, exact)
    bits(image)[at] = bits(got)


APPEND = Family(
    "append",
    {
        "dtype": ("fp16", "bf16", "fp32"),
        "store": ("same", "e4m3", "int8"),
        "place": ("rows", "indexed", "pages"),
        "page": PAGES,
        "packed": (False, True),
        "rotary": FRACTIONS,
        "interleaved": (False, True),
        "tables": ("fp32", "same"),
        "q": (False, True),
        "scales": ("head", "page"),
        "dim": DIMS,
        "dim_v": ("same", "less", "1", "odd", "64", "128", "256"),
        "form": FORMS,
    },
    run,
    sizes,
    dims,
    (
        never("rotary", {"off"}, "q", {True}),
        never("rotary", {"off"}, "interleaved", {True}),
        never("rotary", {"off"}, "tables", {"same"}),
        never("store", {"same"}, "scales", {"page"}),
        never("place", {"rows", "indexed"}, "page", PAGES[1:]),
        never("dim", {"1"}, "rotary", {"full", "half", "odd", "one"}),
    ),
)


# ---------------------------------------------------------------- apply_rotary


def rotary_sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    count = rng.randint(1, 4)
    q = lengths(rng, most, count)
    return {"q": q if o["packed"] else q[:1] * count, "heads": rng.randint(1, 5), "offset": rng.randint(0, 9),
            "spare": rng.choice((0, 2)), "short": length(rng, 8)}  # fmt: skip


def run_rotary(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    n, dtype, batch = s["q"], DTYPES[o["dtype"]], len(s["q"])
    lead = (sum(n) + s["spare"],) if o["packed"] else (batch, n[0])
    x = ctx.normal(*lead, s["heads"], d["d"], dtype=dtype)
    firsts = {"zero": [0] * batch, "int": [s["offset"]] * batch, "tensor": [s["offset"] + 2 * b for b in range(batch)]}[
        o["offsets"]
    ]
    rows = max(max(firsts) + o["step"] * max([*n, 1]), 1) + 1
    if o["offsets"] == "tensor":
        rows = max(1, rows - s["short"])  # some positions are not in the table
    cos, sin = tables(ctx, o, rows, d["pairs"])
    given: dict[str, Any] = {"interleaved": o["interleaved"], "step": o["step"], "conjugate": o["conjugate"]}
    given["offsets"] = ctx.whole(firsts) if o["offsets"] == "tensor" else firsts[0]
    if o["packed"]:
        given.update(cu_seqlens=ctx.whole([sum(n[:i]) for i in range(batch + 1)]), max_seqlen=max(n))
    t = ctx.place(x, o["form"], "x", writable=o["inplace"])
    if o["grad"]:
        t.requires_grad_()
    out = tilefold.apply_rotary(t, cos, sin, inplace=o["inplace"], **given)
    ctx.expect("inplace returns x", not o["inplace"] or out.data_ptr() == t.data_ptr())
    cot = ctx.normal(*x.shape, dtype=dtype)
    made = torch.autograd.grad(out, t, cot)[0] if o["grad"] else None
    for b in range(batch):
        at = torch.arange(n[b] if o["packed"] else n[0], device=ctx.device) * o["step"] + firsts[b]
        take = slice(sum(n[:b]), sum(n[: b + 1])) if o["packed"] else b
        for name, got, given_, sign in (
            ("out", out, x, -1 if o["conjugate"] else 1),
            ("gradient", made, cot, 1 if o["conjugate"] else -1),
        ):
            if got is not None:
                exact, size = turned(given_[take].double(), cos, sin * sign, at, o["interleaved"])
                ctx.compare(name, got[take], exact, limit(exact, dtype, size))


ROTARY = Family(
    "rotary",
    {
        "dtype": ("fp16", "bf16", "fp32"),
        "tables": ("fp32", "same"),
        "interleaved": (False, True),
        "offsets": ("zero", "int", "tensor"),
        "step": (1, 0, 2),
        "packed": (False, True),
        "inplace": (False, True),
        "conjugate": (False, True),
        "rotary": FRACTIONS[1:],
        "dim": DIMS,
        "form": FORMS,
        "grad": (False, True),
    },
    run_rotary,
    rotary_sizes,
    dims,
    (never("inplace", {True}, "grad", {True}), never("dim", {"1"}, "rotary", {"full", "half", "odd", "one"})),
)
