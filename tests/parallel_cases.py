"""What runs on several ranks: each scheme beside one process that has all tokens, in fp64, forward and backward."""

from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tilefold
from cases import same
from cases.refusals import refuses
from parallel_plain import PLAIN, noting
from tilefold import parallel as tp
from tilefold import reference
from tilefold.reference import compare, deviating

# ---------------------------------------------------------------- one case


def expected(q, k, v, w, u, starts, k_starts, used="both", **options):
    """(out, lse, dq, dk, dv) of one process with all tokens, in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    outs, sums = [], []
    for i in range(len(starts) - 1):
        rows, cols = slice(*starts[i : i + 2]), slice(*k_starts[i : i + 2])
        out, lse = reference.attention(leaves[0][:, rows], leaves[1][:, cols], leaves[2][:, cols], **options)
        outs.append(out)
        sums.append(lse)
    out, lse = torch.cat(outs, 1), torch.cat(sums, 2)
    loss_of(out, lse, w.double(), u.double(), used).backward()
    return out.detach(), lse.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)


def loss_of(out, lse, w, u, used):
    """A number that depends on out, on lse, or on both."""
    alive = torch.where(lse.isfinite(), lse, 0.0)
    return (out * w).sum() * (used != "lse") + (alive * u).sum() if used != "out" else (out * w).sum()


def check(scheme, kind="contiguous", tokens=13, k_tokens=None, batch=1, heads=(4, 4), dims=(8, 8), dtype=torch.float64,
          kernels=PLAIN, lengths=None, group=None, packed=False, used="both", strided=False, **options):  # fmt: skip
    """One scheme beside the oracle, on the device of the ranks: out, lse and the three gradients of this rank's tokens."""
    ranks = tp.ranks_of(group)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    sharding = tp.shard(tokens, ranks.size, kind, lengths)
    other = sharding if k_tokens is None else tp.shard(k_tokens, ranks.size, kind)
    random = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype)

    q = normal(batch, sharding.total, heads[0], dims[0])
    k, v = (normal(batch, other.total, heads[1], d) for d in dims)
    w, u = normal(batch, sharding.total, heads[0], dims[1]), normal(batch, heads[0], sharding.total)
    oracle = expected(q, k, v, w, u, sharding.starts, other.starts, used, **options)
    narrow = torch.float32 if dtype == torch.float64 else dtype  # what parts are handed on in, and added up
    plain = deviating(
        lambda: expected(q, k, v, w, u, sharding.starts, other.starts, used, **options), narrow, kept=narrow
    )
    mine = [
        tp.shard_sequence(t, s, ranks.rank).detach() for t, s in ((q, sharding), (k, other), (v, other), (w, sharding))
    ]
    mine = [torch.cat([t, t], 3)[..., : t.shape[3]] if strided else t.clone() for t in mine]
    leaves = [(t[0] if packed else t).detach().requires_grad_() for t in mine[:3]]
    call = {"group": ranks, "scheme": scheme, "kernels": kernels, "return_lse": True, **options}
    out, lse = tp.attention(*leaves, sharding, kv_sharding=None if k_tokens is None else other, **call)
    own_u = tp.shard_sequence(u, sharding, ranks.rank, 2)
    loss_of(out, lse, mine[3], own_u, used).backward()
    got = [t[None] if packed else t for t in (out, lse, *(t.grad for t in leaves))]
    places = ((sharding, 1), (sharding, 2), (sharding, 1), (other, 1), (other, 1))
    for name, one, exact, simple, place in zip(
        ("out", "lse", "dq", "dk", "dv"), got, oracle, plain, places, strict=True
    ):
        exact, simple = (tp.shard_sequence(t, place[0], ranks.rank, place[1]) for t in (exact, simple))
        assert one.shape == exact.shape, f"{name}: {tuple(one.shape)} instead of {tuple(exact.shape)}"
        verdict = compare(one, exact, simple, unit=1.0 if name == "lse" else 0.0)
        assert verdict.ok, f"{name} of {scheme}: {verdict}"
    return out


# ---------------------------------------------------------------- suites


def nodes():
    return tp.ranks_of(None, ranks_per_node=2)


SCHEMES = ("ring", "all_gather", "heads")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "causal-window": {"causal": True, "window": (4, None)},
    "right-window": {"window": (None, 2)},
}


def dense():
    """Every scheme, kind of shards and mask: a mask with one kind on two ranks, and with the other on four; what does not ask
    how many ranks there are is left to four."""
    two = dist.get_world_size() == 2
    for turn, scheme in enumerate(SCHEMES):
        for at, (name, mask) in enumerate(MASKS.items()):
            kind = ("contiguous", "zigzag")[(turn + at + two) % 2]
            yield f"{scheme}-{kind}-{name}", lambda s=scheme, k=kind, m=mask: check(s, k, tokens=21, **m)
        yield f"{scheme}-gqa", lambda s=scheme: check(s, "zigzag", 19, batch=2, heads=(8, 4), dims=(8, 5), causal=True)
        if two:
            yield f"{scheme}-varlen-full", lambda s=scheme: check(s, "zigzag", [0, 9, 17, 31])
            yield f"{scheme}-window-batch", lambda s=scheme: check(s, "zigzag", 23, batch=2, causal=True, window=(5, 0))
        yield f"{scheme}-mqa", lambda s=scheme: check(s, heads=(4, 1), causal=True, scale=0.3, softcap=2.0)
        yield f"{scheme}-varlen", lambda s=scheme: check(s, "zigzag", [0, 9, 9, 12, 31], packed=True, causal=True)
        yield f"{scheme}-cross", lambda s=scheme: check(s, "contiguous", 11, k_tokens=18, causal=True)
        if two:
            continue
        yield f"{scheme}-varlen-stream", lambda s=scheme: check(s, "contiguous", [0, 9, 12, 12, 31], window=(3, 0))
        yield f"{scheme}-few", lambda s=scheme: check(s, "zigzag", 3, causal=True)  # more ranks than some have tokens
        yield f"{scheme}-only-out", lambda s=scheme: check(s, "zigzag", 14, used="out", causal=True)
        yield f"{scheme}-only-lse", lambda s=scheme: check(s, "zigzag", 14, used="lse", causal=True)
        yield f"{scheme}-strided", lambda s=scheme: check(s, "zigzag", 14, strided=True, causal=True)
        yield f"{scheme}-fp32", lambda s=scheme: check(s, "zigzag", 33, dtype=torch.float32, causal=True)
        yield f"{scheme}-bf16", lambda s=scheme: check(s, "zigzag", 33, dtype=torch.bfloat16, causal=True)


def uneven():
    ranks = dist.get_world_size()
    lengths = [9, 0, 3, 5][:ranks]
    for scheme in SCHEMES:
        yield f"{scheme}-uneven", lambda s=scheme: check(s, tokens=sum(lengths), lengths=lengths, causal=True)


def library():
    """Through tilefold's kernels in the interpreter."""
    for scheme, kind, dtype in (
        ("ring", "zigzag", torch.float32),
        ("all_gather", "contiguous", torch.float16),
        ("heads", "zigzag", torch.bfloat16),
    ):
        yield (
            f"{scheme}-library",
            lambda s=scheme, k=kind, d=dtype: check(
                s, k, 37, batch=1, heads=(4, 2), dims=(16, 16), dtype=d, kernels=None, causal=True
            ),
        )
    yield (
        "ring-library-varlen",
        lambda: check(
            "ring",
            "zigzag",
            [0, 19, 24, 50],
            heads=(2, 1),
            dims=(16, 16),
            dtype=torch.float32,
            kernels=None,
            window=(9, 0),
        ),
    )


def two():
    """On two ranks."""
    yield from dense()
    yield from uneven()
    yield from library()
    yield "helpers", helpers
    yield "context", context
    yield "non-deterministic", nondeterministic
    yield "decode", decode
    yield "repeated-bits", repeated_bits
    yield "auto", lambda: check("auto", "zigzag", 21, causal=True)
    yield "plan", planned
    yield from import_module("parallel_sparse_cases").suite()
    yield from import_module("parallel_model_cases").on_two()


def four():
    """On four ranks, as two nodes of two where there are levels."""
    yield from dense()
    yield from uneven()
    yield (
        "ring-library",
        lambda: check(
            "ring", "zigzag", 40, heads=(2, 1), dims=(16, 16), dtype=torch.bfloat16, kernels=None, causal=True
        ),
    )
    for kind in ("contiguous", "zigzag"):
        for name, mask in MASKS.items():
            yield f"two_level-{kind}-{name}", lambda k=kind, m=mask: check("two_level", k, 29, group=nodes(), **m)
    yield "two_level-varlen", lambda: check("two_level", "zigzag", [0, 9, 12, 31], group=nodes(), causal=True)
    yield "two_level-mqa", lambda: check("two_level", "zigzag", 26, heads=(4, 1), group=nodes(), causal=True)
    yield "two_level-uneven", lambda: check("two_level", tokens=17, lengths=[9, 0, 3, 5], group=nodes(), causal=True)
    yield "mesh", mesh
    yield "decode", decode
    yield from import_module("parallel_failure_cases").on_four()
    yield from import_module("parallel_memory_cases").suite()
    yield from import_module("parallel_sparse_cases").suite()
    yield from import_module("parallel_model_cases").on_four()


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "cp"))
    check("two_level", "zigzag", 23, group=both, causal=True)
    check("ring", "zigzag", 23, group=both["cp"], causal=True)  # two sequences at once, each on two ranks


def helpers():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = tp.shard([0, 7, 18], ranks, "zigzag")
    x = torch.arange(36.0).view(18, 2)
    mine = tp.shard_sequence(x, sharding, rank, 0)
    assert torch.equal(tp.gather_sequence(mine, sharding, dim=0), x)
    eight = x.float().to(torch.float8_e4m3fn)
    found = tp.gather_sequence(tp.shard_sequence(eight.float(), sharding, rank, dim=0).to(eight.dtype), sharding, dim=0)
    assert torch.equal(found.float(), eight.float())
    assert torch.equal(
        tp.unshard_sequence([tp.shard_sequence(x, sharding, r, 0) for r in range(ranks)], sharding, 0), x
    )
    inside = torch.cat([torch.arange(7), torch.arange(11)])
    assert torch.equal(tp.positions(sharding, rank), tp.shard_sequence(inside, sharding, rank, 0))
    tokens = torch.arange(100, 118)
    labels = torch.cat([tokens[1:7], torch.tensor([-100]), tokens[8:], torch.tensor([-100])])
    assert torch.equal(tp.next_tokens(tokens, sharding, rank, 0), tp.shard_sequence(labels, sharding, rank, 0))
    keep = tp.shard_sequence(labels, sharding, rank, 0) != -100
    whole = torch.arange(18.0).square().requires_grad_()
    own = tp.shard_sequence(whole.detach(), sharding, rank, 0).requires_grad_()
    want = whole[labels != -100].mean()
    got = tp.loss_mean(own, keep)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(own.grad, tp.shard_sequence(whole.grad, sharding, rank, 0))
    assert float(tp.loss_mean(own.detach(), torch.zeros_like(keep))) == 0.0


def context():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = tp.shard(20, ranks, "zigzag")
    q, k, v = (torch.randn(1, 20, 2, 8, dtype=torch.float64) for _ in range(3))
    mine = [tp.shard_sequence(t, sharding, rank) for t in (q, k, v)]
    want, lse = reference.attention(q, k, v, causal=True)
    with tp.context_parallel(None, sharding, scheme="ring", kernels=PLAIN):
        out, sums = tilefold.attention(*mine, causal=True, return_lse=True)
        flipped = tilefold.attention(*(t.transpose(1, 2) for t in mine), causal=True, layout="bhsd")
        for name, value in (("dropout_p", 0.1), ("bias", torch.zeros(1, 1, 1, 20)), ("sinks", torch.zeros(2))):
            refuses(tilefold.Unsupported, name, tilefold.attention, *mine, **{name: value})
        cu = torch.tensor([0, 4], dtype=torch.int32)
        packed = [t[0].float() for t in mine]
        refuses(tilefold.Unsupported, "packed", tilefold.attention_varlen, *packed, cu, cu, 4, 4)
        refuses(tilefold.ShapeError, "q has 20 tokens", tilefold.attention, q, k, v)
        grads = []
        for repeat in (False, True):  # what a checkpoint computes again goes the same way
            leaves = [t.clone().requires_grad_() for t in mine]
            run = partial(checkpoint, tilefold.attention, use_reentrant=False) if repeat else tilefold.attention
            run(*leaves, causal=True).square().sum().backward()
            grads.append([t.grad for t in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    for got, exact, dim in ((out, want, 1), (flipped.transpose(1, 2), want, 1), (sums, lse, 2)):
        exact = tp.shard_sequence(exact, sharding, rank, dim)
        assert compare(got, exact, exact).ok
    near = [t.float() for t in mine]  # outside again
    exact, plain = (reference.attention(*near, dtype=d)[0] for d in (torch.float64, torch.float32))
    assert compare(tilefold.attention(*near), exact, plain).ok


def nondeterministic():
    """deterministic reaches every rank's kernels, from the function and from the context, and nothing else changes."""
    rank, sharding = dist.get_rank(), tp.shard(20, dist.get_world_size(), "zigzag")
    q, k, v = (tp.shard_sequence(torch.randn(1, 20, 2, 8, dtype=torch.float64), sharding, rank) for _ in range(3))
    told = []
    kernels = noting(told)
    for scheme in SCHEMES:
        found = []
        for options in ({}, {"deterministic": True}, {"deterministic": False}):
            with tp.context_parallel(None, sharding, scheme=scheme, kernels=kernels):
                for call in (
                    tilefold.attention,
                    partial(tp.attention, sharding=sharding, scheme=scheme, kernels=kernels),
                ):
                    told.clear()
                    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
                    call(*leaves, causal=True, **options).square().sum().backward()
                    assert told
                    assert set(told) == {options.get("deterministic", True)}
                    found.append([t.grad for t in leaves])
        assert all(same(other, found[0]) for other in found[1:])
    refuses(tilefold.DtypeError, "deterministic must be a bool", tp.attention, q, k, v, sharding, deterministic=0)


def decode():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(3)
    lengths = torch.tensor([11, 3, 1, 0], dtype=torch.int32)  # fewer keys than ranks, and none
    q = torch.randn(4, 1, 4, 16, generator=random)
    k, v = (torch.randn(4, 12, 2, 16, generator=random) for _ in range(2))
    sinks = torch.randn(4, generator=random)
    places = torch.arange(12)
    own = places[places // 2 % ranks == rank]  # blocks of two tokens in turn
    mine = tp.cache_lengths(lengths, rank, ranks, block=2)
    assert mine.tolist() == [int((own < n).sum()) for n in lengths.tolist()]
    for extra in ({"sinks": sinks}, {"softcap": 1.5, "scale": 0.4, "causal": True})[: 2 if ranks == 2 else 1]:
        out, lse = tp.attention_kvcache(
            q, k[:, own].contiguous(), v[:, own].contiguous(), cache_seqlens=mine, return_lse=True, **extra
        )
        for b, n in enumerate(lengths.tolist()):
            options = {key: value for key, value in extra.items() if key != "causal"}
            exact, sums = reference.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **options)
            plain, rough = reference.attention(
                q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], dtype=torch.float32, **options
            )
            assert compare(out[b : b + 1], exact, plain).ok
            assert compare(lse[b : b + 1], sums, rough, unit=1.0).ok
        every = [torch.empty_like(out) for _ in range(ranks)]
        dist.all_gather(every, out)
        assert all(torch.equal(one, out) for one in every)
    for name, value in (("window", (3, 0)), ("alibi_slopes", torch.ones(4))):
        refuses(tilefold.Unsupported, name, tp.attention_kvcache, q, k, v, **{name: value})


def planned():
    """What attention_plan says is what runs, and what it assumes can be given."""
    ranks = dist.get_world_size()
    sharding = tp.shard(16, ranks)
    x = torch.zeros(1, sharding.length(dist.get_rank()), 4, 8)
    plan = tp.attention_plan(x, x, x, sharding, causal=True, links=tp.Links(ranks, inside=1.0))
    assert (plan.problem.window, plan.problem.seq_q, plan.links.inside) == ((-1, 0), 16, 1.0)
    assert tp.attention_plan(x, x, x, sharding, scheme="ring").scheme == "ring"
    refuses(tilefold.ShapeError, "links are of 64", tp.attention_plan, x, x, x, sharding, links=tp.Links(64))


def repeated_bits():
    for scheme in SCHEMES:
        first, second = (check(scheme, "zigzag", 33, dtype=torch.float32, causal=True) for _ in range(2))
        assert torch.equal(first, second)
