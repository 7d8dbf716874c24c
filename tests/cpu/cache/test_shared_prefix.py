"""merge_attention against fp64 and its properties; attention over shared prefixes against fp64 and plain attention; the rule."""

from functools import partial

import pytest
import torch

import tilefold
from cases import graph_gives, in_two_parts, ints, judge, rand
from tilefold import reference
from tilefold.plan import PrefixProblem, device_named, plan_shared_prefix

NONE = float("-inf")


# ---------------------------------------------------------------- merge


def merged(out_a, lse_a, out_b, lse_b, dtype=torch.float64):
    """out [B, S, H, D], lse [B, H, S] in `dtype`."""
    a, b, u, w = (t.to(dtype) for t in (lse_a, lse_b, out_a, out_b))
    lse = torch.logaddexp(a, b)
    top = torch.where(lse == NONE, 0.0, lse)
    spread = [torch.exp(t - top).transpose(-1, -2).unsqueeze(-1) for t in (a, b)]
    u, w = (torch.where(s == 0, 0.0, t) for s, t in zip(spread, (u, w), strict=True))
    return spread[0] * u + spread[1] * w, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "dim"), [((2, 5, 3), 20), ((1, 1, 1), 1), ((3, 7, 2), 128), ((2, 3, 1), 300)])
def test_merge(device, shape, dim, dtype):
    b, s, h = shape
    out_a, out_b = rand(b, s, h, dim, dtype=dtype, device=device), rand(b, s, h, dim, dtype=dtype, device=device)
    lse_a, lse_b = rand(b, h, s, device=device) * 30, rand(b, h, s, device=device) * 30
    lse_a[0, 0], lse_b[-1, -1] = NONE, NONE
    out_a[0, :, 0] = float("nan")  # no keys: what out holds there does not matter
    out, lse = tilefold.merge_attention(out_a, lse_a, out_b, lse_b)
    exact = merged(out_a, lse_a, out_b, lse_b)
    plain = merged(out_a, lse_a, out_b, lse_b, torch.float32)
    judge(out, exact[0], plain[0], "out")
    judge(lse, exact[1], plain[1], "lse")
    assert out.dtype == dtype and out.is_contiguous() and lse.is_contiguous()


def test_merge_strides_and_packed(device):
    out_a, out_b = (
        rand(2, 3, 5, 20, device=device).transpose(1, 2),
        rand(5, 2, 3, 24, device=device)[..., :20].transpose(0, 1),
    )
    lse_a, lse_b = rand(2, 5, 3, device=device).transpose(1, 2), rand(3, 2, 5, device=device).transpose(0, 1)
    found = tilefold.merge_attention(out_a, lse_a, out_b, lse_b)
    same = tilefold.merge_attention(*(t.contiguous() for t in (out_a, lse_a, out_b, lse_b)))
    flat = tilefold.merge_attention(out_a[0], lse_a[0], out_b[0], lse_b[0])
    for one, other, part in zip(found, same, flat, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[0], part)


def test_merge_properties(device):
    out, lse = rand(2, 6, 3, 16, device=device), rand(2, 3, 6, device=device) * 50
    nothing = torch.full_like(out, float("nan")), torch.full_like(lse, NONE)
    for found in (tilefold.merge_attention(out, lse, *nothing), tilefold.merge_attention(*nothing, out, lse)):
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)  # the identity, to the bit
    both = tilefold.merge_attention(*nothing, *nothing)
    assert not both[0].any() and (both[1] == NONE).all()
    other = rand(2, 6, 3, 16, device=device), rand(2, 3, 6, device=device) * 50
    one, two = tilefold.merge_attention(out, lse, *other), tilefold.merge_attention(*other, out, lse)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    empty = tilefold.merge_attention(out[:0], lse[:0], out[:0], lse[:0])
    assert empty[0].shape == (0, 6, 3, 16)


def test_merge_refuses(device):
    out, lse = rand(2, 6, 3, 16, device=device), rand(2, 3, 6, device=device)
    for change, name in (
        ((out, lse, out, lse[..., :5]), "lse_b"), ((out, lse, out.half(), lse), "out_b"),
        ((out, lse.double(), out, lse), "lse_a"),
        ((out, lse.transpose(1, 2), out, lse), "lse_a"), ((out.clone().requires_grad_(), lse, out, lse), "out_a requires"),
        ((out[..., ::2], lse, out, lse), "out_a"),
    ):  # fmt: skip
        with pytest.raises(tilefold.TilefoldError, match=name):
            tilefold.merge_attention(*change)


@pytest.mark.no_poison
def test_merge_compiled(device):
    args = [rand(*shape, device=device) for shape in ((2, 6, 3, 16), (2, 3, 6)) * 2]
    graph_gives(lambda *a: tilefold.merge_attention(*a)[0] * 2, *args)
    from tilefold.ops.cache.merge import MERGE_ATTENTION

    torch.library.opcheck(MERGE_ATTENTION.op, args, test_utils=("test_schema", "test_faketensor"))


# ---------------------------------------------------------------- shared prefixes


def a_batch(device, batch=3, capacity=44, prefix=20, kv_heads=2, dim=16, page=0, dtype=torch.float32, dim_v=None):
    """(k, v, block table or None) of sequences that begin alike, and k, v [B, capacity, H, D] as each sequence sees them."""
    dims = (dim, dim_v or dim)
    whole = [rand(batch, capacity, kv_heads, d, dtype=dtype, device=device) for d in dims]
    for t in whole:
        t[1:, :prefix] = t[:1, :prefix]
    if not page:
        held = [t.clone() for t in whole]
        for t in held:
            t[1:, :prefix] = float("nan")  # nobody reads what they share but in the first
        return (*held, None), whole
    each, shared = -(-capacity // page), prefix // page
    numbers = torch.randperm(shared + batch * (each - shared)) + 1
    table = torch.empty(batch, each, dtype=torch.int32)
    table[:, :shared] = numbers[:shared]
    table[:, shared:] = numbers[shared:].view(batch, -1)
    pages = []
    for t in whole:
        room = torch.full((batch, each * page, *t.shape[2:]), float("nan"), dtype=dtype, device=device)
        room[:, :capacity] = t
        p = torch.full((len(numbers) + 2, page, *t.shape[2:]), float("nan"), dtype=dtype, device=device)
        p[table.long().flatten()] = room.view(-1, page, *t.shape[2:]).nan_to_num()
        pages.append(p)
    return (*pages, table.to(device)), whole


def oracle(q, whole, lengths, dtype=torch.float64, prefix=None, **options):
    """Each sequence by itself; q a list of [S, H, D] -> outs [S, H, D] and lses [H, S].  prefix: one deviation off, by a merge of
    two parts."""
    of = reference.attention if prefix is None else partial(in_two_parts, first=prefix)
    found = [
        of(x[None], whole[0][b : b + 1, :n], whole[1][b : b + 1, :n], dtype=dtype, **options)
        for b, (x, n) in enumerate(zip(q, lengths, strict=True))
    ]
    return [o[0] for o, _ in found], [e[0] for _, e in found]


@pytest.mark.parametrize(
    ("heads", "seq_q", "page", "dtype"),
    [(6, 1, 8, torch.bfloat16), (2, 3, 0, torch.float32), (4, 1, 5, torch.float32), (6, 3, 5, torch.float16)],
)
def test_shared_prefix(device, heads, seq_q, page, dtype):
    held, whole = a_batch(device, page=page, dtype=dtype)
    q = rand(3, seq_q, heads, 16, dtype=dtype, device=device)
    lengths = [20 + seq_q, 44, 31]
    for splits, options in ((0, {}), (3, {"softcap": 2.0, "scale": 0.4}), (3, {"sinks": rand(heads, device=device)})):
        exact = oracle(q, whole, lengths, causal=True, **options)
        plain = oracle(q, whole, lengths, dtype, 20, **options)
        out, lse = tilefold.attention_shared_prefix(
            q, *held[:2], prefix_length=20, cache_seqlens=ints(*lengths, device=device), block_table=held[2], cascade=True,
            num_splits=splits, return_lse=True, **options)  # fmt: skip
        judge(out, torch.stack(exact[0]), torch.stack(plain[0]), "out")
        judge(lse, torch.stack(exact[1]), torch.stack(plain[1]), "lse")
    if page:
        sides = [
            tilefold.attention_shared_prefix(q, *held[:2], prefix_length=20, cache_seqlens=ints(*lengths, device=device),
                                             block_table=held[2], cascade=way) for way in (True, False, None)
        ]  # fmt: skip
        for side in sides[1:]:
            assert torch.allclose(sides[0].float(), side.float(), atol=1e-5 if dtype == torch.float32 else 0.02)


E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def coded(held, whole, stored, per, dtype, shared=16):
    """(codes of the caches or pages, their factors, what they stand for as each sequence sees it, fp32)."""
    pages = held[2] is not None
    codes, scales, meant = [], [], []
    for t, mine in zip(held[:2], whole, strict=True):
        code, scale = tilefold.quantize_kv(t.nan_to_num(0).to(dtype), stored, per=per)
        wide = code.float() * scale[..., None, :, None]
        if pages:
            seen = wide[held[2].long()].flatten(1, 2)[:, : mine.shape[1]]
        else:
            seen = wide.clone()
            seen[1:, :shared] = seen[:1, :shared]
            code[1:, :shared].view(torch.uint8).fill_(0x7F)
        codes.append(code)
        scales.append(scale)
        meant.append(seen)
    return codes, scales, meant


@pytest.mark.parametrize(
    ("page", "stored", "per", "seq_q", "dtype"),
    [(8, E4M3, "head", 1, torch.bfloat16), (8, INT8, "page", 3, torch.float32), (0, INT8, "page", 1, torch.float16)],
)
def test_a_prefix_in_8_bits(device, page, stored, per, seq_q, dtype):
    held, whole = a_batch(device, page=page, prefix=16)
    codes, scales, meant = coded(held, whole, stored, per, dtype)
    q, lengths = rand(3, seq_q, 4, 16, dtype=dtype, device=device), [16 + seq_q, 44, 31]
    exact = oracle(q, meant, lengths, causal=True)
    plain = oracle(q, meant, lengths, dtype, 16)
    for cascade in (True, False) if page else (True,):
        out, lse = tilefold.attention_shared_prefix(
            q, *codes, prefix_length=16, cache_seqlens=ints(*lengths, device=device), block_table=held[2], cascade=cascade,
            k_scale=scales[0], v_scale=scales[1], return_lse=True)  # fmt: skip
        judge(out, torch.stack(exact[0]), torch.stack(plain[0]), f"out, cascade={cascade}")
        judge(lse, torch.stack(exact[1]), torch.stack(plain[1]), f"lse, cascade={cascade}")


def test_all_keys_are_the_prefix_and_v_is_part_of_k(device):
    """A latent cache of one KV head, which is read once; no rows are left behind the prefix."""
    (k, _, _), (whole, _) = a_batch(device, capacity=20, kv_heads=1, dim=24)
    q = rand(3, 2, 4, 24, device=device)
    exact, plain = (oracle(q, [whole, whole[..., :16]], [20] * 3, d) for d in (torch.float64, torch.float32))
    given = {"prefix_length": 20, "cache_seqlens": ints(20, 20, 20, device=device), "causal": False}
    out = tilefold.attention_shared_prefix(q, k, k[..., :16], **given, cascade=True)
    judge(out, torch.stack(exact[0]), torch.stack(plain[0]), "out")


@pytest.mark.parametrize("page", [0, 8])
def test_packed_queries_and_nothing_behind_the_prefix(device, page):
    held, whole = a_batch(device, page=page, prefix=16, dim_v=10)
    new, lengths = [3, 0, 7], [20, 16, 44]
    q = rand(10, 4, 16, device=device)
    parts = list(q.split(new))
    for causal in (True, False):
        if not causal:
            lengths = [16, 16, 20]
        exact, plain = (oracle(parts, whole, lengths, d, causal=causal) for d in (torch.float64, torch.float32))
        out, lse = tilefold.attention_shared_prefix(
            q, *held[:2], prefix_length=16, cache_seqlens=ints(*lengths, device=device), block_table=held[2], causal=causal,
            cu_seqlens_q=ints(0, 3, 3, 10, device=device), max_seqlen_q=7, cascade=True, return_lse=True)  # fmt: skip
        judge(out, torch.cat(exact[0]), torch.cat(plain[0]), "out")
        judge(lse, torch.cat(exact[1], 1), torch.cat(plain[1], 1), "lse")


def test_caches_by_index_and_strided_queries(device):
    held, whole = a_batch(device)
    order = [2, 0, 1]
    for t in held[:2]:
        t[2, :20], t[0, :20] = t[0, :20].clone(), float("nan")  # the first sequence's cache is the third
    q = rand(4, 3, 4, 16, device=device).transpose(0, 1)[:, :2]  # batch and rows are not evenly apart
    lengths = [44, 22, 30]
    mine = [t[order] for t in whole]
    exact, plain = (oracle(q, mine, lengths, d, causal=True) for d in (torch.float64, torch.float32))
    out = tilefold.attention_shared_prefix(q, *held[:2], prefix_length=20, cache_seqlens=ints(*lengths, device=device),
                                           cache_batch_idx=ints(*order, device=device), cascade=True)  # fmt: skip
    judge(out, torch.stack(exact[0]), torch.stack(plain[0]), "out")


@pytest.mark.no_poison
def test_shared_prefix_compiled(device):
    held, _ = a_batch(device, page=8)
    q, lengths = rand(3, 1, 4, 16, device=device), ints(21, 44, 30, device=device)

    def call(q, k, v, table):
        found = tilefold.attention_shared_prefix(
            q, k, v, prefix_length=16, cache_seqlens=lengths, block_table=table, cascade=True
        )
        return found * 2

    graph_gives(call, q, *held)


WRONG = [
    ({"window": (3, 0)}, "window"),
    ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
    ({"prefix_length": 45}, "prefix_length"),
    ({"prefix_length": -1}, "prefix_length"),
    ({"prefix_length": 1.5}, "prefix_length"),
    ({"cascade": 1}, "cascade"),
    ({"return_lse": 1}, "return_lse"),
    ({"cache_seqlens": ints(20, 44, 30)}, r"cache_seqlens\[0\] is 20, expected at least 21"),
    ({"cache_seqlens": None}, "cache_seqlens"),
    ({"max_seqlen_q": 4}, "max_seqlen_q"),
    ({"num_splits": 200}, "num_splits"),
    ({"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "scales go with bytes"),
    ({"k_scale": torch.ones(2)}, "k_scale and v_scale come together"),
    ({"q": torch.ones(3, 1, 4, 16, requires_grad=True)}, "q requires a gradient"),
    ({"block_table": ints(0, 1, 1, 2, 0, 1).view(3, 2)}, "begins with pages"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_shared_prefix_refuses(case):
    change, name = WRONG[case]
    held, _ = a_batch("cpu")
    call = {"q": rand(3, 1, 4, 16), "k_cache": held[0], "v_cache": held[1], "prefix_length": 20}
    if "block_table" in change:
        call["prefix_length"] = 44
        change = {**change, "cache_seqlens": ints(45, 45, 45)}
    with pytest.raises(tilefold.TilefoldError, match=name):
        tilefold.attention_shared_prefix(**{**call, "cache_seqlens": ints(21, 44, 30), "cascade": True, **change})


# ---------------------------------------------------------------- the rule


def problem(**changes):
    shape = {"batch": 64, "tokens": 64, "heads": 32, "kv_heads": 8, "dim_qk": 128, "dim_v": 128, "prefix": 8192}
    shape["dtype"] = "bfloat16"
    return PrefixProblem(**{**shape, **changes})


def test_the_rule():
    h200 = device_named("h200")
    plan = plan_shared_prefix(problem(), h200)
    assert plan.cascade and plan.plain_bytes == 64 * 8192 * 8 * 256 * 2
    assert plan.cascade_bytes < plan.plain_bytes / 20 and plan.cascade_s < plan.plain_s / 5
    assert "64 sequences" in plan.reason
    for changes in (
        {"batch": 1, "tokens": 1},
        {"prefix": 0},
        {"prefix": 16, "batch": 8, "tokens": 8},
        {"batch": 8, "tokens": 8 * 4096},
    ):  # a prefill is bound by its products either way
        assert not plan_shared_prefix(problem(**changes), h200).cascade, changes
    halved = plan_shared_prefix(problem(storage="int8"), h200)
    assert halved.cascade and halved.plain_bytes == plan.plain_bytes // 2
    longer = [plan_shared_prefix(problem(prefix=n, batch=8, tokens=8), h200) for n in (64, 256, 1024, 4096, 16384)]
    found = [plan.cascade for plan in longer]
    assert found == sorted(found) and found[-1]
