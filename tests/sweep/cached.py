"""Attention over KV caches: `attention_kvcache`, `attention_shared_prefix`, and flash_attn's functions over caches."""

import random
from typing import Any

import torch

import tilefold
from tilefold.compat import flash_attn as flash

from .axes import Family, never
from .bounds import roundoff
from .caches import PAGES, Caches, bits, page_of
from .context import FORMS, Context
from .dense_run import DTYPES
from .oracle import Rules, attend
from .sizes import DIMS, WINDOWS, dims_of_heads, length, window_of


def dims(rng: random.Random, o: dict[str, Any]) -> dict[str, int]:
    if o["dim"] == "576":
        return {"d": 576, "dv": 512, "page": page_of(rng, o["page"])}
    found = dims_of_heads(rng, o)
    if o.get("mla"):
        found["dv"] = min(found.values())
    return {**found, "page": page_of(rng, o["page"])}


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    """Queries and keys of each sequence; the prompts have more than 128 rows a KV head."""
    count, group = rng.randint(1, 4 if most > 40 else 2), o["group"]
    kind = o.get("queries", "few")
    low, high = {
        "one": (1, 1),
        "few": (1, max(1, 64 // group)),
        "prompt": (129 // group + 1, max(130 // group + 2, most // 2)),
    }[kind]
    if most <= 40:  # the interpreter
        high = min(high, low + 3)
    if d["d"] > 256:
        most = min(most, 200)
    q = [rng.randint(low, high) if rng.random() < 0.9 or kind == "one" else 0 for _ in range(count)]
    if kind == "prompt":
        q[0] = rng.randint(low, high)
    if not o["packed"]:
        q = [max(q[0], low)] * count
    k = [length(rng, most) if rng.random() < 0.5 else n + length(rng, most) for n in q]
    room = max([*k, 1]) + rng.choice((0, 0, 1, 7))
    return {
        "q": q,
        "k": k,
        "room": room,
        "kv": rng.choice((1, 1, 2, 3)) if most > 40 else 1,
        "pad": rng.choice((1, 5, 17)) if o.get("leftpad") else 0,
        "window": window_of(rng, o.get("window", "none"), most),
        "scale": 0.2 if o["scale"] else None,
        "prefix": rng.randint(0, most),
        "spare": rng.choice((0, 0, 3)),
    }


class Query:
    """What both kinds of call share: queries, options, and the comparison with fp64."""

    def __init__(self, ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
        self.ctx, self.o, self.d, self.s, self.dtype = ctx, o, d, s, DTYPES[o["dtype"]]
        self.n, self.batch, self.heads = s["q"], len(s["q"]), s["kv"] * o["group"]
        if not o["packed"]:
            self.n = s["q"][:1] * self.batch
        lead = (sum(self.n) + s["spare"],) if o["packed"] else (self.batch, self.n[0])
        self.q = ctx.place(ctx.normal(*lead, self.heads, d["d"], dtype=self.dtype), o["form"], "q")
        self.options: dict[str, Any] = {"causal": o["causal"], "softcap": 1.5 if o["softcap"] else 0.0}
        if s["scale"] is not None:
            self.options["scale"] = s["scale"]
        if o["sinks"] != "off":
            self.options["sinks"] = ctx.place(
                ctx.normal(self.heads, dtype=self.dtype if o["sinks"] == "same" else torch.float32)
            )
        if o.get("alibi", "off") != "off":
            shape = (self.heads,) if o["alibi"] == "heads" else (self.batch, self.heads)
            self.options["alibi_slopes"] = ctx.place(ctx.uniform(*shape, high=0.2))
        if s["window"] is not None and "window" in o:
            self.options["window"] = tuple(s["window"])

    def packing(self) -> dict[str, Any]:
        if not self.o["packed"]:
            return {}
        cu = [sum(self.n[:i]) for i in range(self.batch + 1)]
        return {"cu_seqlens_q": self.ctx.whole(cu), "max_seqlen_q": max(1, *self.n)}

    def rules(self, b: int) -> Rules:
        g = self.options
        r = Rules(g.get("scale", self.d["d"] ** -0.5), g["causal"], g.get("window"), g["softcap"], batch=b)
        slopes = g.get("alibi_slopes")
        r.slopes = None if slopes is None else (slopes if slopes.dim() == 1 else slopes[b]).double()
        r.sinks = g["sinks"].double() if "sinks" in g else None
        if self.o["store"] != "same":
            r.noise, r.weights = roundoff(self.dtype), 2 * roundoff(self.dtype)
        return r

    def check(self, out: Any, lse: Any, keys: Any, up: bool = False) -> None:
        """keys(b): (k, v, rows that are no keys) of a sequence in fp64.  up: lse is +inf where no key is seen."""
        for b in range(self.batch):
            first, r = sum(self.n[:b]), self.rules(b)
            q, got = (x[first : first + self.n[b]] if self.o["packed"] else x[b] for x in (self.q, out))
            k, v, r.before = keys(b)
            f = attend(q.double(), k, v, r, self.dtype)
            self.ctx.compare(f"out of sequence {b}", got, f.out, f.out_limit)
            if lse is not None:
                exact = f.lse.masked_fill(f.lse == float("-inf"), float("inf")) if up else f.lse
                part = lse[:, first : first + self.n[b]] if self.o["packed"] else lse[b]
                self.ctx.compare(f"lse of sequence {b}", part, exact, f.lse_limit)


def run(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    query = Query(ctx, o, d, s)
    pads = [min(s["pad"] + b, n) for b, n in enumerate(s["k"])] if s["pad"] else [0] * query.batch
    caches = Caches(ctx, o, d, query.batch, s["kv"], max([s["room"], *s["k"]]))
    lens = s["k"] if o["lens"] else [caches.room] * query.batch
    spans = list(zip(pads, lens, strict=True))
    k = ctx.place(caches.filled(d["d"], spans), o["form"], "k_cache")
    v = k[..., : d["dv"]] if o["mla"] else ctx.place(caches.filled(d["dv"], spans), o["form"], "v_cache")
    given = {**query.options, **caches.where(lens)}
    if o["lens"]:
        given["cache_seqlens"] = ctx.whole(lens)
    if s["pad"]:
        given["cache_leftpad"] = ctx.whole(pads)
    if o["scales"] != "none":
        value = 1 / 40 if o["store"] == "int8" else 1.0
        given["k_scale"] = caches.factors("k", value)
        given["v_scale"] = given["k_scale"] if o["mla"] else caches.factors("v", value)
        if o["mla"]:
            caches.scales["v"] = caches.scales["k"]
    out, lse = _call(query, o, k, v, given)
    query.check(out, lse, lambda b: (caches.exact(k, "k", b, 0, lens[b]).nan_to_num(),
                                     caches.exact(v, "v", b, 0, lens[b]).nan_to_num(), pads[b]), o["api"] != "kv")  # fmt: skip


def _call(query: Query, o: dict[str, Any], k: Any, v: Any, given: dict[str, Any]) -> Any:
    if o["api"] == "kv":
        found = tilefold.attention_kvcache(
            query.q, k, v, **given, **query.packing(), num_splits=o["splits"], return_lse=o["lse"]
        )
        return found if o["lse"] else (found, None)
    names = {"window": "window_size", "scale": "softmax_scale"}
    given = {names.get(name, name): value for name, value in given.items()}
    if o["api"] == "flash":
        found = flash.flash_attn_with_kvcache(query.q, k, v, **given, **query.packing(), num_splits=o["splits"],
                                              return_softmax_lse=o["lse"])  # fmt: skip
        return found if o["lse"] else (found, None)
    names = {"cache_seqlens": "seqused_k", "cache_leftpad": "leftpad_k"}
    given = {names.get(name, name): value for name, value in given.items()}
    p, room = query.packing(), k.shape[1] * given["block_table"].shape[1]
    cu = query.ctx.whole([room * b for b in range(query.batch + 1)])
    found = flash.flash_attn_varlen_func(query.q, k, v, p["cu_seqlens_q"], cu, p["max_seqlen_q"], room, **given,
                                         num_splits=o["splits"], return_attn_probs=o["lse"])  # fmt: skip
    return found[:2] if o["lse"] else (found, None)


AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp16", "bf16", "fp32"),
    "store": ("same", "e4m3", "int8"),
    "place": ("rows", "indexed", "pages"),
    "page": PAGES,
    "packed": (False, True),
    "causal": (False, True),
    "scale": (False, True),
    "softcap": (False, True),
    "sinks": ("off", "same", "fp32"),
    "scales": ("none", "head", "page"),
    "splits": (0, 1, 3, 128),
    "lse": (False, True),
    "dim": (*DIMS, "576"),
    "dim_v": ("same", "less", "1", "odd", "64", "128", "256"),
    "group": (1, 4, 7, 8, 16),
    "form": FORMS,
}
CLASHES = (
    never("store", {"same"}, "scales", {"head", "page"}),
    never("store", {"int8"}, "scales", {"none"}),
    never("place", {"rows", "indexed"}, "page", PAGES[1:]),
)
FLASH = {"flash", "flash_varlen"}
KVCACHE = Family(
    "kvcache",
    {
        "api": ("kv", "flash", "flash_varlen"),
        "queries": ("one", "few", "prompt"),
        **AXES,
        "lens": (True, False),
        "leftpad": (False, True),
        "window": WINDOWS,
        "alibi": ("off", "heads", "batch"),
        "mla": (False, True),
    },
    run,
    sizes,
    dims,
    (
        *CLASHES,
        never("api", FLASH, "store", {"e4m3", "int8"}),
        never("api", {"flash_varlen"}, "place", {"rows", "indexed"}),
        never("api", {"flash_varlen"}, "packed", {False}),
        never("mla", {False}, "dim", {"576"}),
        never("dim", {"576"}, "dim_v", ("less", "1", "odd", "64", "128", "256")),
        never("api", FLASH, "mla", {True}),
    ),
    {"queries": ("one", "few")},
)


def run_prefix(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    query, prefix = Query(ctx, o, d, s), s["prefix"]
    lens = [prefix + n + k for n, k in zip(query.n, s["k"], strict=True)]
    caches = Caches(ctx, o, d, query.batch, s["kv"], max(lens), prefix if o["place"] == "pages" else 0)
    spans = [(0, n) for n in lens]
    k, v = (caches.filled(d[x], spans) for x in ("d", "dv"))
    if not caches.page:
        for cache in (k, v):  # everybody's first rows are those of sequence 0
            for b in range(query.batch):
                bits(cache)[caches.index[b], :prefix] = bits(cache)[caches.index[0], :prefix]
    k, v = ctx.place(k, o["form"], "k_cache"), ctx.place(v, o["form"], "v_cache")
    given = {**query.options, **caches.where(lens), "cache_seqlens": ctx.whole(lens), "prefix_length": prefix,
             "num_splits": o["splits"], "cascade": o["cascade"], "return_lse": o["lse"]}  # fmt: skip
    if o["scales"] != "none":
        value = 1 / 40 if o["store"] == "int8" else 1.0
        given["k_scale"], given["v_scale"] = caches.factors("k", value), caches.factors("v", value)
    found = tilefold.attention_shared_prefix(query.q, k, v, **given, **query.packing())
    out, lse = found if o["lse"] else (found, None)
    merged = Query.rules

    def rules(b: int) -> Rules:  # two results, each rounded, are merged
        r = merged(query, b)
        r.weights = max(r.weights, 2 * roundoff(query.dtype))
        return r

    query.rules = rules  # type: ignore[method-assign]
    query.check(out, lse, lambda b: (caches.exact(k, "k", b, 0, lens[b]), caches.exact(v, "v", b, 0, lens[b]), 0))


PREFIX = Family(
    "prefix",
    {
        **{n: x for n, x in AXES.items() if n != "dim"},
        "dim": DIMS,
        "queries": ("one", "few", "prompt"),
        "cascade": (None, True, False),
    },
    run_prefix,
    sizes,
    dims,
    (*CLASHES, never("place", {"rows", "indexed"}, "scales", {"page"})),
    {"queries": ("one", "few")},
)
