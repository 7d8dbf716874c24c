"""Block-sparse attention: `sparse_attention`, packed, over pages, forward and backward."""

import random
from typing import Any

import torch

import tilefold

from .axes import Family, never
from .caches import PAGES, Caches, page_of
from .context import FORMS, Context
from .dense_run import DTYPES
from .mods import keywords, rule
from .oracle import Rules, attend, gradients
from .sizes import DIMS, dims_of_heads, length


def dims(rng: random.Random, o: dict[str, Any]) -> dict[str, int]:
    return {**dims_of_heads(rng, o), "page": page_of(rng, o["page"])}


def sizes(rng: random.Random, o: dict[str, Any], d: dict[str, Any], most: int) -> dict[str, Any]:
    count = rng.randint(1, 3)
    if max(d["d"], d["dv"]) > 128 or o["group"] > 4:
        most = most // 2
    q = [length(rng, most) for _ in range(count)]
    k = list(q) if rng.random() < 0.4 else [length(rng, most) for _ in range(count)]
    if o["api"] in ("bshd", "bhsd", "paged"):
        q = q[:1] * count
    if o["api"] in ("bshd", "bhsd"):
        k = k[:1] * count
    return {
        "q": q,
        "k": k,
        "kv": rng.choice((1, 1, 2)),
        "more": rng.choice((0, 0, 9)),
        "listed": rng.choice((0.1, 0.4, 0.7, 1.0)),
        "scale": 0.2 if o["scale"] else None,
    }


class Lists:
    """A random index and, of each sequence, which keys its lists name, bool [heads, n, m], and which queries count [heads, n]."""

    def __init__(self, ctx: Context, o: dict[str, Any], s: dict[str, Any], heads: int, n: int, m: int) -> None:
        batch, self.bq, self.bk, self.heads = len(s["q"]), o["block_q"], o["block_k"], heads
        qb, kb = -(-n // self.bq), -(-m // self.bk)
        nb = 1 if o["shared"] in ("batch", "both") else batch
        nh = 1 if o["shared"] in ("heads", "both") else heads
        self.map = ctx.uniform(nb, nh, qb, kb) < s["listed"]
        sizes: dict[str, Any] = {}
        if o["sizes"]:
            for name, blocks, block, seq in (("block_sizes", kb, self.bk, m), ("query_sizes", qb, self.bq, n)):
                left = (seq - torch.arange(blocks, device=ctx.device) * block).clamp(max=block)
                drawn = (ctx.uniform(nb, nh, blocks) * (left + 1)).floor().clamp(max=left)
                sizes[name] = ctx.place(
                    torch.where(ctx.uniform(nb, nh, blocks) < 0.5, left.double(), drawn.double()).to(torch.int32)
                )
        self.sizes = sizes
        geometry = {"block_q": self.bq, "block_k": self.bk, "seq_q": n, "seq_k": m, **sizes}
        if o["order"] == "map":
            self.index = tilefold.BlockIndex.from_map(self.map, **geometry)
        else:  # lists in any order, behind each nothing that is meant
            counts = self.map.sum(3).to(torch.int32)
            rank = torch.where(self.map, ctx.uniform(*self.map.shape), 2.0)
            self.index = tilefold.BlockIndex.from_indices(
                rank.argsort(3).to(torch.int32), counts, sort=False, **geometry
            )

    def seen(self, b: int, n: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        pick = lambda t: t[b if t.shape[0] > 1 else 0].expand(self.heads, *t.shape[2:])  # noqa: E731
        wide = pick(self.map).repeat_interleave(self.bq, 1).repeat_interleave(self.bk, 2)[:, :n, :m]
        rows = torch.ones(self.heads, n, dtype=torch.bool, device=wide.device)
        if self.sizes:
            j, i = torch.arange(m, device=wide.device), torch.arange(n, device=wide.device)
            few = pick(self.sizes["block_sizes"])[:, j // self.bk]
            wide = wide & (j % self.bk < few)[:, None]
            rows = i % self.bq < pick(self.sizes["query_sizes"])[:, i // self.bq]
        return wide & rows[..., None], rows


def run(ctx: Context, o: dict[str, Any], d: dict[str, Any], s: dict[str, Any]) -> None:
    dtype, heads, batch, api = DTYPES[o["dtype"]], s["kv"] * o["group"], len(s["q"]), o["api"]
    nq, nk = s["q"], s["k"]
    if api != "varlen":
        nq = nq[:1] * batch
    if api in ("bshd", "bhsd"):
        nk = nk[:1] * batch
    n, m = max(nq), max(nk) + (s["more"] if api == "paged" else 0)
    packed = api == "varlen"
    caches = (
        Caches(ctx, {**o, "place": "pages", "store": "same"}, d, batch, s["kv"], max(m, 1)) if api == "paged" else None
    )
    lists = Lists(ctx, o, s, heads, n, m)
    grad = o["grad"] != "none"
    lead_q = (sum(nq),) if packed else (batch, n)
    lead_k = (sum(nk),) if packed else (batch, nk[0])
    shapes = {"q": (*lead_q, heads, d["d"]), "k": (*lead_k, s["kv"], d["d"]), "v": (*lead_k, s["kv"], d["dv"])}
    t, turn = {}, api == "bhsd" or (api == "paged" and o["turned"])
    for name, shape in shapes.items():
        x = ctx.normal(*shape, dtype=dtype)
        if caches is not None and name != "q":
            x = caches.filled(shape[-1], [(0, k) for k in nk])
        t[name] = ctx.place(x.transpose(1, 2) if turn else x, o["form"], name).requires_grad_(grad)
    given: dict[str, Any] = {"causal": o["causal"], "scale": s["scale"], "softcap": 1.5 if o["softcap"] else 0.0}
    given |= keywords(ctx, o, max([n, m, 1]), grad)
    out, lse = _call(ctx, o, t, lists, given, nq, nk, caches)

    def one(x: Any, b: int, lens: list[int]) -> torch.Tensor:
        if packed:
            return x[sum(lens[:b]) : sum(lens[: b + 1])].double()
        return (x[b].transpose(0, 1) if turn else x[b]).double()

    cots = [ctx.normal(*out.shape, dtype=dtype)] if grad else []
    cots += [ctx.normal(*lse.shape)] if o["grad"] == "lse" else []
    made = torch.autograd.grad([out, lse][: len(cots)], list(t.values()), cots) if grad else None
    for b in range(batch):
        q = one(t["q"].detach(), b, nq)
        if caches is not None:
            k, v = (caches.exact(t[x].transpose(1, 2) if turn else t[x], x, b, 0, nk[b]) for x in ("k", "v"))
        else:
            k, v = one(t["k"].detach(), b, nk), one(t["v"].detach(), b, nk)
        seen = lists.seen(b, nq[b], nk[b])[0]
        r = Rules(s["scale"] or d["d"] ** -0.5, o["causal"], softcap=given["softcap"], seen=seen, batch=b)
        rule(r, o, given)
        f = attend(q, k, v, r, dtype)
        ctx.compare(f"out of sequence {b}", one(out, b, nq), f.out, f.out_limit)
        part = slice(sum(nq[:b]), sum(nq[: b + 1]))
        if lse is not None:
            ctx.compare(f"lse of sequence {b}", lse[:, part] if packed else lse[b], f.lse, f.lse_limit)
        if made is not None:
            dl = None
            if len(cots) > 1:
                dl = (cots[1][:, part] if packed else cots[1][b]).double().masked_fill(f.lse == float("-inf"), 0.0)
            g = gradients(q, k, v, r, f, one(cots[0], b, nq), dl, dtype)
            exact = zip("qkv", made, (g.q, g.k, g.v), g.limits[:3], (nq, nk, nk), strict=True)
            for name, got, x, bound, lens in exact:
                ctx.compare(f"gradient of {name} of sequence {b}", one(got, b, lens), x, bound)


def _call(ctx: Context, o: dict[str, Any], t: Any, lists: Lists, given: Any, nq: Any, nk: Any, caches: Any) -> Any:
    index, want = lists.index, {"return_lse": o["lse"]}
    if o["api"] == "varlen":
        cu = [ctx.whole([sum(x[:i]) for i in range(len(x) + 1)]) for x in (nq, nk)]
        found = tilefold.sparse_attention_varlen(t["q"], t["k"], t["v"], index, *cu, **given, **want)
    elif o["api"] == "paged":
        table = caches.where(nk)["block_table"]
        layout = "bhsd" if o["turned"] else "bshd"
        found = tilefold.sparse_attention_paged(
            t["q"], t["k"], t["v"], index, table, ctx.whole(nk), layout=layout, **given, **want
        )
    else:
        found = tilefold.sparse_attention(t["q"], t["k"], t["v"], index, layout=o["api"], **given, **want)
    return found if o["lse"] else (found, None)


SPARSE = Family(
    "sparse",
    {
        "api": ("bshd", "bhsd", "varlen", "paged"),
        "dtype": ("fp16", "bf16", "fp32"),
        "dim": DIMS,
        "dim_v": ("same", "less", "1", "odd", "64", "128", "256"),
        "group": (1, 4, 7, 8),
        "form": FORMS,
        "block_q": (64, 16, 32, 128),
        "block_k": (64, 16, 32, 128),
        "shared": ("none", "batch", "heads", "both"),
        "sizes": (False, True),
        "order": ("map", "any"),
        "causal": (False, True),
        "scale": (False, True),
        "softcap": (False, True),
        "score_mod": ("off", "near", "bent", "table"),
        "mask_mod": ("off", "thirds", "document"),
        "lse": (False, True),
        "grad": ("none", "out", "lse"),
        "page": PAGES,
        "turned": (False, True),
    },
    run,
    sizes,
    dims,
    (
        never("api", {"paged"}, "grad", {"out", "lse"}),
        never("api", {"bshd", "bhsd", "varlen"}, "page", PAGES[1:]),
        never("api", {"bshd", "bhsd", "varlen"}, "turned", {True}),
        never("lse", {False}, "grad", {"lse"}),
    ),
)
