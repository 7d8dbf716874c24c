"""kvcache_append: packed input, coded caches bit for bit, queries turned on the way, rows not to be written, compilation."""

import pytest
import torch

import tilefold
from cases import ints, judge, one_graph, pairs, rand
from cases.flash import angles, in_pages, turned

CODED = [torch.float8_e4m3fn, torch.int8]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def bits(t):
    """For comparisons: NaN is NaN, and 8-bit floats compare as bytes."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def expected(x, cache, rows, table, scale, angle=None):
    """`cache` with x[i] in row rows[i] = (page or cache, row), encoded as `quantize_kv` does; keys turned by angle(i)."""
    want = cache.clone()
    for i, (page, row, position) in enumerate(rows):
        if page is None:
            continue
        token = x[i][None, None]  # [1, 1, H, D]
        if angle is not None:
            cos, sin, interleaved = angle
            token = turned(token, cos, sin, interleaved, torch.tensor([position], device=x.device), torch.float32)
        if scale is not None:
            mine = scale if scale.dim() == 1 else scale[page : page + 1]
            bits(want)[page, row] = bits(tilefold.quantize_kv(token.float(), cache.dtype, scale=mine)[0])[0, 0]
        else:
            want[page, row] = token[0, 0].to(cache.dtype)
    return want


def places(lengths, new, table=None, page=0, index=None):
    """(page or cache, row, position) of each new token, sequence by sequence."""
    found = []
    for b, (n, more) in enumerate(zip(lengths, new, strict=True)):
        for row in range(n, n + more):
            if table is not None:
                found.append((int(table[b, row // page]), row % page, row))
            else:
                found.append((b if index is None else index[b], row, row))
    return found


def caches(device, dtype, page, batch=4, rows=24, heads=2, dim=16, dim_v=10):
    """(k_cache, v_cache, table or None), numbers everywhere."""
    shape = (batch, rows, heads)
    k, v = (rand(*shape, d, device=device) for d in (dim, dim_v))
    table = None
    if page:
        both, table = in_pages(torch.cat((k, v), -1).nan_to_num(), page)
        k, v = both[..., :dim].nan_to_num(), both[..., dim:].nan_to_num()
    return (k * 20).to(dtype), (v * 20).to(dtype), table


def factors(kind, device, pages, heads=2):
    if kind == "head":
        return torch.rand(heads, device=device) * 0.02 + 0.001
    return (torch.rand(heads, pages, device=device) * 0.02 + 0.001).T  # strided


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page", [0, 5, 16])
@pytest.mark.parametrize("kind", ["head", "page"])
@pytest.mark.parametrize("dtype", CODED)
def test_coded_caches_bit_for_bit(device, dtype, kind, page, packed):
    lengths, new = [3, 0, 20, 7], [4, 0, 1, 9] if packed else [3] * 4
    k_cache, v_cache, table = caches(device, dtype, page)
    k_scale, v_scale = (factors(kind, device, len(k_cache)) for _ in range(2))
    tokens = sum(new)
    for source in FLOATS:
        k, v = rand(tokens, 2, 16, dtype=source, device=device), rand(tokens, 2, 10, dtype=source, device=device)
        held = k_cache.clone(), v_cache.clone()
        given = {}
        if packed:
            given["cu_seqlens"] = ints(0, *torch.tensor(new).cumsum(0).tolist(), device=device)
        shaped = (k, v) if packed else (k.unflatten(0, (4, 3)), v.unflatten(0, (4, 3)))
        got = tilefold.kvcache_append(*shaped, *held, cache_seqlens=ints(*lengths, device=device), block_table=table,
                                      k_scale=k_scale, v_scale=v_scale, **given)  # fmt: skip
        assert got is None
        rows = places(lengths, new, table, page)
        for one, x, cache, scale in ((held[0], k, k_cache, k_scale), (held[1], v, v_cache, v_scale)):
            assert torch.equal(bits(one), bits(expected(x, cache, rows, table, scale)))


@pytest.mark.parametrize("dtype", CODED)
def test_every_rounding(device, dtype):
    """All halves between neighbours, the neighbours of halves, subnormals, what saturates, infinities and NaN."""
    codes = (
        torch.arange(256, dtype=torch.uint8).view(dtype).float() if dtype == CODED[0] else torch.arange(-128.0, 128.0)
    )
    ordered = codes[codes.isfinite()].unique()
    middles = (ordered[1:] + ordered[:-1]) / 2
    up, down = torch.tensor(float("inf")), torch.tensor(float("-inf"))
    x = torch.cat([ordered, middles, middles.nextafter(up), middles.nextafter(down), -ordered.flip(0)])
    x = torch.cat(
        [x, torch.tensor([449.0, -449.0, 464.0, 500.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), -0.0])]
    )
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).view(1, -1, 1, 16).to(device)
    for factor in (1.0, 0.5, 0.3):
        scale = torch.tensor([factor], device=device)
        held = [torch.zeros(x.shape, device=device).to(dtype) for _ in range(2)]
        tilefold.kvcache_append(x, x, *held, cache_seqlens=ints(0, device=device), k_scale=scale, v_scale=scale)
        want = (x / factor if factor != 0.3 else x / scale).clamp(*((-448, 448) if dtype == CODED[0] else (-128, 127)))
        want = (want if dtype == CODED[0] else want.round().nan_to_num()).to(dtype)
        for one in held:
            both_nan = one.float().isnan() & want.float().isnan()
            assert torch.equal(bits(one)[~both_nan], bits(want)[~both_nan])
        assert torch.equal(bits(tilefold.quantize_kv(x, dtype, scale=scale)[0])[~both_nan], bits(want)[~both_nan])


@pytest.mark.parametrize(
    ("dtype", "packed", "page", "interleaved"), pairs(FLOATS, [False, True], [0, 7], [False, True])
)
def test_rotary_turns_keys_and_queries(device, dtype, packed, page, interleaved):
    lengths, new = [3, 0, 19, 7], [4, 0, 1, 9] if packed else [5] * 4
    k_cache, v_cache, table = caches(device, dtype, page)
    cos, sin = angles(21, 6, dtype, device)  # shorter than the cache: the last rows do not turn
    tokens = sum(new)
    k, v = rand(tokens, 2, 16, dtype=dtype, device=device), rand(tokens, 2, 10, dtype=dtype, device=device)
    q = rand(tokens, 6, 16, dtype=dtype, device=device)
    given = (
        {"cu_seqlens": ints(0, *torch.tensor(new).cumsum(0).tolist(), device=device), "max_seqlen": 9} if packed else {}
    )
    shaped = (k, v, q) if packed else tuple(t.unflatten(0, (4, 5)) for t in (k, v, q))
    held = k_cache.clone(), v_cache.clone()
    got = tilefold.kvcache_append(
        *shaped[:2], *held, cache_seqlens=ints(*lengths, device=device), block_table=table, rotary_cos=cos, rotary_sin=sin,
        interleaved=interleaved, q=shaped[2], **given)  # fmt: skip
    rows = places(lengths, new, table, page)
    position = torch.tensor([p for *_, p in rows], device=device)
    assert got.shape == shaped[2].shape
    exact = turned(q, cos, sin, interleaved, position)
    judge(got.flatten(0, -3), exact, turned(q, cos, sin, interleaved, position, dtype), "q")
    assert torch.equal(held[1], expected(v, v_cache, rows, table, None))
    want = k_cache.double()
    plain = k_cache.clone()
    for i, (at, row, p) in enumerate(rows):
        where = torch.tensor([p], device=device)
        want[at, row] = turned(k[i][None], cos, sin, interleaved, where)[0]
        plain[at, row] = turned(k[i][None], cos, sin, interleaved, where, dtype)[0].to(dtype)
    judge(held[0], want, plain, "k")
    untouched = torch.ones(held[0].shape[:2], dtype=torch.bool, device=device)
    for at, row, _ in rows:
        untouched[at, row] = False
    assert torch.equal(held[0][untouched], k_cache[untouched])
    if not packed:
        with pytest.raises(
            tilefold.ValueRangeError, match=r"rotary_cos has 21 positions, .*\[2\] = 19 and 5 more need 24"
        ):
            tilefold.kvcache_append(*shaped[:2], *held, cache_seqlens=ints(*lengths, device=device), block_table=table,
                                    rotary_cos=cos, rotary_sin=sin, check=True)  # fmt: skip


@pytest.mark.parametrize("dtype", CODED)
def test_coded_and_turned_is_rounded_once(device, dtype):
    k_cache, v_cache, _ = caches(device, dtype, 0)
    cos, sin = angles(24, 8, device=device)
    k, v = (
        rand(4, 3, 2, 16, device=device, dtype=torch.bfloat16),
        rand(4, 3, 2, 10, device=device, dtype=torch.bfloat16),
    )
    scale = factors("head", device, 4)
    tilefold.kvcache_append(k, v, k_cache, v_cache, cache_seqlens=ints(0, 3, 21, 8, device=device), rotary_cos=cos,
                            rotary_sin=sin, k_scale=scale, v_scale=scale)  # fmt: skip
    for b, n in enumerate((0, 3, 21, 8)):
        exact = turned(k[b], cos, sin, False, n + torch.arange(3, device=device)) / scale.double()[:, None]
        got = k_cache[b, n : n + 3].double()
        step = 1.0 if dtype == torch.int8 else (2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3))
        low, high = (-128, 127) if dtype == torch.int8 else (-448, 448)
        turn = 2.0**-22 * exact.abs().max()  # fp32 sums of two products, which may cancel
        assert ((got - exact.clamp(low, high)).abs() <= step / 2 + turn).all()


def test_more_sequences_than_one_step_of_the_search_and_rows_of_none(device, monkeypatch):
    from tilefold.ops.cache import cache_append

    monkeypatch.setattr(cache_append, "BLOCK_SEQUENCES", 4)
    new = [2, 0, 1, 0, 0, 3, 1, 0, 2, 1, 0]
    lengths = [i % 5 for i in range(len(new))]
    cu = ints(0, *torch.tensor(new).cumsum(0).tolist(), device=device)  # three rows after the last
    k = rand(sum(new) + 3, 1, 8, device=device)
    q = rand(sum(new) + 3, 3, 8, device=device)
    cos, sin = angles(12, 4, device=device)
    k_cache, v_cache = (rand(11, 9, 1, 8, device=device) for _ in range(2))
    held = k_cache.clone(), v_cache.clone()
    index = list(range(10, -1, -1))
    got = tilefold.kvcache_append(k, k, *held, cache_seqlens=ints(*lengths, device=device), cu_seqlens=cu, rotary_cos=cos,
                                  rotary_sin=sin, q=q, cache_batch_idx=ints(*index, device=device))  # fmt: skip
    rows = places(lengths, new, index=index)
    assert torch.equal(held[1], expected(k[:-3], v_cache, rows, None, None))
    assert torch.equal(got[-3:], q[-3:])
    position = torch.tensor([p for *_, p in rows], device=device)
    exact = turned(q[:-3], cos, sin, False, position)
    judge(got[:-3], exact, turned(q[:-3], cos, sin, False, position, torch.float32), "q")


def test_strides(device):
    k_cache, v_cache = (rand(3, 2, 12, 16, device=device).transpose(1, 2) for _ in range(2))
    qkv = rand(3, 4, 8, 16, device=device)  # heads of q, k and v side by side
    q, k, v = qkv.split([4, 2, 2], 2)
    cos, sin = angles(12, 8, device=device)
    held = k_cache.clone(), v_cache.clone()  # clone keeps strides
    lengths = ints(0, 8, 3, device=device)
    got = tilefold.kvcache_append(k, v, *held, cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, q=q)
    flat = k_cache.contiguous(), v_cache.contiguous()
    same = tilefold.kvcache_append(*(t.contiguous() for t in (k, v)), *flat, cache_seqlens=lengths, rotary_cos=cos,
                                   rotary_sin=sin, q=q.contiguous())  # fmt: skip
    assert torch.equal(got, same)
    assert got.is_contiguous()
    for one, other in zip(held, flat, strict=True):
        assert torch.equal(one, other)


def test_rows_that_have_no_place_are_not_written(device, monkeypatch):
    """On a GPU nobody looks at the values before the kernel does."""
    from tilefold.ops.cache import cache_append

    monkeypatch.setattr(cache_append, "_check_values", lambda *args: None)
    k = rand(4, 3, 2, 16, device=device)
    whole = [rand(4, 6, 2, 16, device=device) for _ in range(3)]
    before = [t.clone() for t in whole]
    cache = whole[1]
    far = 1 << 30
    tilefold.kvcache_append(k, k, cache, cache, cache_seqlens=ints(5, far, -2, -far, device=device))
    want = before[1].clone()
    want[0, 5] = k[0, 0]
    want[2, 0] = k[2, 2]
    assert torch.equal(cache, want)
    table = ints(-1, 0, 4, 1, 2, 3, 9, 9, device=device).view(4, 2)
    cache.copy_(before[1])
    tilefold.kvcache_append(k, k, cache, cache, cache_seqlens=ints(4, 5, 11, 2, device=device), block_table=table)
    want = before[1].clone()
    want[0, 0], want[1, :2], want[3, 5] = k[0, 2], k[1, 1:], k[2, 0]
    assert torch.equal(cache, want)
    cache.copy_(before[1])
    tilefold.kvcache_append(k[:2], k[:2], cache, cache, cache_seqlens=ints(0, 0, device=device),
                            cache_batch_idx=ints(-1, 4, device=device))  # fmt: skip
    assert torch.equal(cache, before[1])
    assert all(torch.equal(now, then) for now, then in zip(whole, before, strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0), (0, 0, 0)])
def test_nothing_to_do(device, shape):
    b, s, h = shape
    cache = rand(b, 5, h, 8, device=device)
    k = rand(b, s, h, 8, device=device)
    cos, sin = angles(8, 4, device=device)
    q = rand(b, s, 4, 8, device=device)
    lengths = torch.zeros(b, dtype=torch.int32, device=device)
    got = tilefold.kvcache_append(
        k, k, cache, cache.clone(), cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, q=q
    )
    assert got.shape == q.shape
    assert got.isfinite().all()
    cu = torch.zeros(b + 1, dtype=torch.int32, device=device)
    empty = k.new_zeros(0, h, 8)
    assert tilefold.kvcache_append(empty, empty, cache, cache.clone(), cache_seqlens=lengths, cu_seqlens=cu) is None


@pytest.mark.parametrize("per", ["head", "page"])
@pytest.mark.parametrize("dtype", CODED)
def test_quantize_kv(device, dtype, per):
    x = rand(3, 5, 2, 16, device=device) * torch.tensor([1.0, 30.0], device=device)[:, None]
    x[1, :, 0] = 0
    codes, scale = tilefold.quantize_kv(x, dtype, per=per)
    assert codes.dtype == dtype and codes.shape == x.shape and scale.dtype == torch.float32
    assert scale.shape == ((2,) if per == "head" else (3, 2))
    if per == "page":
        assert scale[1, 0] == 1
    back = codes.float() * scale[..., None, :, None]
    largest = x.abs().amax((0, 1, 3) if per == "head" else (1, 3))[..., None, :, None]
    assert ((back - x).abs() <= largest * (0.5 / 127 if dtype == torch.int8 else 0.5 * 32 / 448) * 1.001).all()
    assert codes.float().abs().amax() == (127 if dtype == torch.int8 else 448)
    for change, name in (
        ({"per": "row"}, "per"),
        ({"dtype": torch.int16}, "dtype"),
        ({"scale": scale.half()}, "scale"),
    ):
        with pytest.raises(tilefold.TilefoldError, match=name):
            tilefold.quantize_kv(x, **{"dtype": dtype, **change})
    assert tilefold.quantize_kv(x[:0], dtype, per=per)[0].shape == (0, 5, 2, 16)


WRONG = [
    (lambda c: {"q": c["k"]}, "q was given"),
    (lambda c: {"k_scale": torch.ones(2)}, "k_scale"),
    (lambda c: {"k_cache": c["k_cache"].to(torch.int8), "v_cache": c["k_cache"].to(torch.int8)}, "k_scale"),
    (lambda c: {"k_cache": c["k_cache"].to(torch.int8)}, "v_cache"),
    (lambda c: {"k_cache": c["k_cache"].half(), "v_cache": c["k_cache"].half()}, "k has dtype"),
    (lambda c: {"cu_seqlens": ints(0, 2, 4)}, "k has 4 dimensions"),
    (lambda c: {"cu_seqlens": ints(0, 2), "k": c["k"][0], "v": c["v"][0]}, "cu_seqlens"),
    (lambda c: {"cu_seqlens": ints(0, 3, 2), "k": c["k"][0], "v": c["v"][0]}, "cu_seqlens must ascend"),
    (lambda c: {"cu_seqlens": ints(0, 3, 3), "k": c["k"][0], "v": c["v"][0], "max_seqlen": 2}, "max_seqlen is 2"),
    (lambda c: {"cu_seqlens": ints(0, 3, 3), "k": c["k"][0], "v": c["v"][0], "max_seqlen": 7}, "max_seqlen is 7"),
    (lambda c: {"max_seqlen": 3}, "max_seqlen"),
    (lambda c: {"max_seqlen": 1.5}, "max_seqlen"),
    (lambda c: {"interleaved": 1}, "interleaved"),
    (lambda c: {"cache_seqlens": None}, "cache_seqlens"),
    (lambda c: {"cache_seqlens": ints(0, 4)}, r"cache_seqlens\[1\] is 4"),
    (lambda c: {"cache_batch_idx": ints(0, 2)}, r"cache_batch_idx\[1\]"),
    (lambda c: {"block_table": ints(0, 2).view(2, 1)}, r"block_table\[1, 0\]"),
    (
        lambda c: {"block_table": ints(0, 1).view(2, 1), "cache_batch_idx": ints(0, 1)},
        "cache_batch_idx and block_table",
    ),
    (lambda c: {"rotary_cos": torch.ones(6, 4)}, "rotary_cos and rotary_sin"),
    (lambda c: {"k": c["k"].clone().requires_grad_()}, "k requires a gradient"),
    (lambda c: {"k_cache": c["k_cache"][:1].expand(2, -1, -1, -1)}, "k_cache is written in place"),
    (lambda c: {"v": None}, "v must be a torch.Tensor"),
    (lambda c: {"k": torch.ones(2, 7, 2, 8), "v": torch.ones(2, 7, 2, 8)}, "k has 7 new tokens"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments(case):
    change, name = WRONG[case]
    call = {"k": rand(2, 3, 2, 8), "v": rand(2, 3, 2, 8), "k_cache": rand(2, 6, 2, 8), "v_cache": rand(2, 6, 2, 8)}
    call["cache_seqlens"] = ints(0, 1)
    with pytest.raises(tilefold.TilefoldError, match=name):
        tilefold.kvcache_append(**{**call, **change(call)})


@pytest.mark.no_poison
def test_compiled(device):
    cos, sin = angles(24, 8, device=device)
    scale = torch.tensor([0.01, 0.02], device=device)
    cu, lengths = ints(0, 2, 2, 5, 6, device=device), ints(3, 0, 9, 1, device=device)

    def step(k, v, q, k_cache, v_cache):
        found = tilefold.kvcache_append(k, v, k_cache, v_cache, cache_seqlens=lengths, cu_seqlens=cu, rotary_cos=cos,
                                        rotary_sin=sin, k_scale=scale, v_scale=scale, q=q)  # fmt: skip
        return found + 1

    k, v, q = (rand(6, h, 16, device=device) for h in (2, 2, 4))
    one = [torch.zeros(4, 24, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    other = [t.clone() for t in one]
    want = step(k, v, q, *one)
    got = one_graph(step)(k, v, q, *other)
    assert torch.equal(got, want)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert bits(a).any()


@pytest.mark.no_poison
def test_operator_is_what_its_schema_says(device):
    from tilefold.ops.cache.cache_append import cache_append_op

    k, q = rand(6, 2, 16, device=device), rand(6, 4, 16, device=device)
    held = [torch.zeros(4, 24, 2, 16, device=device) for _ in range(2)]
    cos, sin = angles(24, 8, device=device)
    args = (*held, k, k, ints(3, 0, 9, 1, device=device), None, None, cos, sin, False, ints(0, 2, 2, 5, 6, device=device), None,
            None, q, 0)  # fmt: skip
    torch.library.opcheck(cache_append_op, args, test_utils=("test_schema", "test_faketensor"))
