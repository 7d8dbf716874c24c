"""Decoding steps: flash_attn_with_kvcache that appends, turns and attends; PagedKVCache with forks and truncation."""

import random
from typing import Any

import torch

import tilefold
from tilefold.compat import flash_attn as flash

from .append import FRACTIONS, dims, tables, turned
from .axes import Family, never
from .bounds import roundoff
from .caches import PAGES, STORES, Caches
from .context import FORMS, Context
from .dense_run import DTYPES
from .oracle import Rules, attend
from .sizes import DIMS, WINDOWS, length, lengths, window_of


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    count = rng.randint(1, 3)
    return {"new": rng.randint(1, 9), "old": lengths(rng, most, count), "kv": rng.choice((1, 2)), "room": rng.choice((0, 5)),
            "window": window_of(rng, o["window"], most)}  # fmt: skip


def run_new(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    n, old, batch, kv, dtype = s["new"], s["old"], len(s["old"]), s["kv"], DTYPES[o["dtype"]]
    if o["lengths"] == "int":
        old = old[:1] * batch
    caches = Caches(ctx, {**o, "store": "same"}, d, batch, kv, max(old) + n + s["room"])
    kc, vc = (
        ctx.place(caches.filled(d[x], [(0, m) for m in old]), "plain", "cache", writable=True) for x in ("d", "dv")
    )
    q = ctx.place(ctx.normal(batch, n, kv * o["group"], d["d"], dtype=dtype), o["form"], "q")
    k, v = (ctx.place(ctx.normal(batch, n, kv, d[x], dtype=dtype), o["form"], x) for x in ("d", "dv"))
    given: dict[str, Any] = {"causal": o["causal"], **caches.where([m + n for m in old])}
    given["cache_seqlens"] = old[0] if o["lengths"] == "int" else ctx.whole(old)
    if s["window"] is not None:
        given["window_size"] = tuple(s["window"])
    cos = None
    if d["pairs"]:
        cos, sin = tables(ctx, o, caches.room + n, d["pairs"])
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=o["interleaved"])
    out, lse = flash.flash_attn_with_kvcache(q, kc, vc, k, v, return_softmax_lse=True, num_splits=o["splits"], **given)
    # a window that reaches past the cache is none
    local = o["causal"] or any(x is not None and 0 <= x < caches.room for x in s["window"] or ())
    for b in range(batch):
        at = torch.arange(n, device=ctx.device) + old[b]
        qb, kb = q[b].double(), k[b].double()
        if cos is not None:
            kb = turned(kb, cos, sin, at, o["interleaved"])[0]
            qb = turned(qb, cos, sin, at if local else torch.full_like(at, old[b]), o["interleaved"])[0]
        keys = torch.cat([caches.exact(kc, "k", b, 0, old[b]), kb])
        values = torch.cat([caches.exact(vc, "v", b, 0, old[b]), v[b].double()])
        r = Rules(
            d["d"] ** -0.5, o["causal"], given.get("window_size"), noise=roundoff(dtype) if cos is not None else 0.0
        )
        f = attend(qb, keys, values, r, dtype)
        ctx.compare(f"out of sequence {b}", out[b], f.out, f.out_limit)
        ctx.compare(
            f"lse of sequence {b}", lse[b], f.lse.masked_fill(f.lse == float("-inf"), float("inf")), f.lse_limit
        )
        ctx.compare("v in the cache", caches.exact(vc, "v", b, old[b], old[b] + n), v[b].double(), 0.0)


FLASHNEW = Family(
    "flashnew",
    {
        "dtype": ("fp16", "bf16", "fp32"),
        "place": ("rows", "indexed", "pages"),
        "page": PAGES,
        "rotary": FRACTIONS,
        "interleaved": (True, False),
        "tables": ("fp32", "same"),
        "lengths": ("tensor", "int"),
        "causal": (True, False),
        "window": WINDOWS,
        "splits": (0, 1, 3),
        "dim": DIMS,
        "dim_v": ("same",),
        "group": (1, 4, 7, 8),
        "form": FORMS,
    },
    run_new,
    sizes,
    dims,
    (
        never("place", {"rows", "indexed"}, "page", PAGES[1:]),
        never("rotary", {"off"}, "interleaved", {False}),
        never("rotary", {"off"}, "tables", {"same"}),
        never("dim", {"1"}, "rotary", {"full", "half", "odd", "one"}),
    ),
)


# ---------------------------------------------------------------- PagedKVCache


def paged_sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    return {"kv": rng.choice((1, 2)), "steps": rng.randint(2, 5), "new": [length(rng, most // 3, 1) for _ in range(12)]}


def run_paged(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, kv, rng = DTYPES[o["dtype"]], s["kv"], ctx.rng
    kind = STORES.get(o["store"], dtype)
    most = 8 * max(s["new"]) + 8
    given = {} if o["store"] == "same" else {f"{x}_scale": torch.full((kv,), 1 / 30, device=ctx.device) for x in "kv"}
    cache = tilefold.PagedKVCache(1, kv, d["d"], num_pages=4 * (-(-most // d["page"]) + 1), page_size=d["page"], max_sequences=4,
                                  max_tokens=most, dtype=kind, device=ctx.device, head_dim_v=d["dv"], **given)  # fmt: skip
    held: dict[int, list[torch.Tensor]] = {}
    for step in range(s["steps"]):
        if len(held) < 3:
            held[cache.add()] = [torch.zeros(0, kv, d[x], device=ctx.device, dtype=torch.float64) for x in ("d", "dv")]
        ids = list(held)
        counts = [min(s["new"][(step + i) % 12], most - held[x][0].shape[0]) for i, x in enumerate(ids)]
        batch, total = cache.batch(ids, counts), sum(counts)
        q, k, v = (ctx.normal(total, h, d[x], dtype=dtype) for h, x in ((kv * o["group"], "d"), (kv, "d"), (kv, "dv")))
        cache.append(0, ctx.place(k, o["form"]), ctx.place(v, o["form"]), batch)
        out, lse = cache.attend(0, ctx.place(q, o["form"]), batch, o["causal"], return_lse=True)
        first = 0
        for i, name in enumerate(ids):
            part = slice(first, first + counts[i])
            first += counts[i]
            new = [_stored(x[part].double(), o["store"]) for x in (k, v)]
            held[name] = [torch.cat(pair) for pair in zip(held[name], new, strict=True)]
            r = Rules(d["d"] ** -0.5, o["causal"])
            if o["store"] != "same":
                r.noise, r.weights = roundoff(dtype), 2 * roundoff(dtype)
            f = attend(q[part].double(), *held[name], r, dtype)
            ctx.compare(f"out of sequence {i} in step {step}", out[part], f.out, f.out_limit)
            ctx.compare(f"lse of sequence {i} in step {step}", lse[:, part], f.lse, f.lse_limit)
        if o["fork"] and len(held) < 4:
            held[cache.fork(ids[0])] = list(held[ids[0]])
        if o["truncate"]:
            name = rng.choice(list(held))
            left = rng.randint(0, held[name][0].shape[0])
            cache.truncate(name, left)
            held[name] = [x[:left] for x in held[name]]
        if o["move"]:
            cache.defragment()


def _stored(x: torch.Tensor, store: str) -> torch.Tensor:
    """What a cache in 8 bits makes of x, a factor of 1 / 30; quotients as fp32 has them."""
    if store == "same":
        return x
    f = torch.tensor(1 / 30, dtype=torch.float32, device=x.device)
    codes = x.float() / f
    codes = codes.round().clamp(-128, 127) if store == "int8" else codes.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * f.double()


PAGED = Family(
    "paged",
    {
        "dtype": ("fp16", "bf16", "fp32"),
        "store": ("same", "e4m3", "int8"),
        "page": PAGES,
        "dim": DIMS,
        "dim_v": ("same", "less", "64"),
        "group": (1, 4),
        "form": FORMS,
        "causal": (True, False),
        "fork": (False, True),
        "truncate": (False, True),
        "move": (False, True),
    },
    run_paged,
    paged_sizes,
    dims,
)
