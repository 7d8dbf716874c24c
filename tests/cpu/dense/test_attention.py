"""Dense forward attention against the fp64 oracle: lengths, heads, dims, dtypes, masks, strides, mods, empty inputs."""

import itertools
import sys

import pytest
import torch
import triton
import triton.language as tl

import cases
import tilefold
from cases import BOX, check, dilated, dilated_twin, judge, prefix, prefix_twin, qkv, rand, relative, relative_twin
from tilefold import reference
from tilefold.device import mods

BOTH = (None, BOX)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [  # B, Sq, Sk, H, Hk, D
    (1, 64, 64, 2, 2, 64),
    (2, 33, 77, 4, 1, 32),
    (1, 70, 19, 8, 1, 16),
    (1, 1, 130, 4, 4, 64),
    (1, 129, 129, 2, 2, 32),
    (1, 5, 1, 1, 1, 16),
]
BANDS = [
    {},
    {"causal": True},
    {"window": (17, 5)},
    {"causal": True, "window": (40, 7)},
    {"window": (0, -1)},
    {"window": (None, 3)},
    {"window": (0, 0)},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_bands(shape, device):
    q, k, v = qkv(*shape, dtype=torch.float16, device=device)
    for band in BANDS:
        check(q, k, v, (32, 16), BOTH, **band)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, device):
    q, k, v = qkv(2, 45, 70, 4, 2, 32, 64, dtype=dtype, device=device)
    for band in BANDS[:3]:
        check(q, k, v, **band, kernel=None if dtype == torch.float32 else BOTH)  # boxes are of 16 bits


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (16, 16), None])
def test_tiles(tile, device):
    q, k, v = qkv(1, 75, 90, 2, 2, 32, dtype=torch.float16, device=device)
    for band in BANDS:
        check(q, k, v, tile, **band)


def test_range_edges(device):
    """Every offset of the diagonal against tiles of 16, behind a whole tile of keys: an off-by-one shows at one shift."""
    for sk in (1, *range(18, 36)):
        q, k, v = qkv(1, 20, sk, 1, 1, 16, device=device)
        for band in ({"causal": True}, {"window": (7, 4)}, {"causal": True, "window": (16, 0)}, {"window": (-1, 3)}):
            check(q, k, v, **band)


DIMS = [
    (1, 1),
    (3, 5),
    (8, 8),
    (32, 32),
    (40, 40),
    (64, 96),
    (96, 64),
    (128, 128),
    (192, 128),
    (80, 256),
    (256, 256),
    (320, 512),
    (512, 512),
]


@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(dims, device):
    q, k, v = qkv(1, 21, 37, 2, 1, *dims, dtype=torch.float16, device=device)
    check(q, k, v, causal=True)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_groups(group, device):
    q, k, v = qkv(2, 18, 33, 2 * group, 2, 32, device=device)
    check(q, k, v, causal=True)


def test_strides(device):
    """Cut from one fused projection, [B, H, S, D] seen as [B, S, H, D], every second row, a slice of a wider head, broadcast."""
    q, k, v = rand(2, 50, 3, 4, 32, dtype=torch.float16, device=device).unbind(2)
    check(q, k, v, causal=True, kernel=BOTH)
    q, k, v = (rand(2, 4, 50, 32, dtype=torch.float16, device=device).transpose(1, 2) for _ in range(3))
    check(q, k, v, causal=True, kernel=BOTH)
    q, k, v = (rand(2, 100, 4, 48, dtype=torch.float16, device=device)[:, ::2, :, 8:40] for _ in range(3))
    check(q, k, v, causal=True)
    one = rand(1, 30, 1, 32, dtype=torch.float16, device=device)
    check(one, one.expand(1, 30, 1, 32), one, causal=True)
    wide = one.expand(3, 30, 4, 32)
    check(wide, wide, wide, causal=True)


def test_layout_bhsd(device):
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv(2, 20, 33, 4, 2, 32, 16, device=device))
    out, _ = check(q, k, v, layout="bhsd", causal=True)
    assert out.shape == (2, 4, 20, 16)
    assert out.is_contiguous()


def test_unaligned_pointers(device):
    """A base that is 2 bytes off takes the path without 16-byte loads, also after an aligned call of the same shape."""
    shape = (1, 20, 2, 32)
    for offset in (0, 1, 0, 3):
        q, k, v = (
            rand(1 * 20 * 2 * 32 + 8, dtype=torch.float16, device=device)[offset:][:1280].view(shape) for _ in range(3)
        )
        check(q, k, v)


def test_empty(device):
    q, k, v = qkv(1, 7, 5, 2, 2, 32, device=device)
    out, lse = tilefold.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    sinks = rand(2, device=device)
    out, lse = tilefold.attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, 2, 7))
    for shape in ((1, 0, 2, 32), (0, 7, 2, 32)):
        out, lse = tilefold.attention(q.new_zeros(shape), k[: shape[0]], v[: shape[0]], return_lse=True)
        assert out.shape == shape
        assert lse.shape == (shape[0], 2, shape[1])
    none = q[:, :, :0]
    assert tilefold.attention(none, k[:, :, :0], v[:, :, :0]).shape == (1, 7, 0, 32)


def test_dead_rows(device):
    """More queries than keys under a causal mask, and rows that a mask closes: 0 and -inf, never NaN."""
    q, k, v = qkv(1, 40, 13, 2, 1, 16, device=device)
    out, lse = check(q, k, v, causal=True)
    assert (out[:, :27] == 0).all()
    assert (lse[:, :, :27] == float("-inf")).all()
    mask = rand(1, 2, 40, 13, device=device) > 0
    mask[:, 1, 5] = False
    mask[:, :, 7, :] = False
    out, lse = check(q, k, v, mask=mask)
    assert (out[:, 7] == 0).all()
    check(q, k, v, mask=torch.zeros_like(mask))
    check(q, k, v, mask=mask, sinks=rand(2, device=device), causal=True)


@pytest.mark.parametrize("scale", [1e-3, 0.7, 4.0])
def test_scale(scale, device):
    check(*qkv(1, 20, 40, 2, 2, 32, device=device), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cap", [0.5, 15.0, 50.0])
def test_softcap(cap, dtype, device):
    q, k, v = qkv(1, 20, 40, 2, 2, 32, dtype=dtype, device=device)
    check(q, k, v, softcap=cap, causal=True)
    check(10 * q, k, v, softcap=cap)
    check(0.01 * q, k, v, softcap=cap)


@triton.jit
def cap_kernel(X, Y, cap, CAP: tl.constexpr):
    o = tl.arange(0, 4096)
    tl.store(Y + o, CAP(tl.load(X + o), 0, 0, 0, 0, (cap,)))


@pytest.mark.parametrize("cap", [mods.softcap, mods.softcap_exact])
def test_tanh_of_the_caps(cap, device):
    """tanh(x), and tanh(x) / x, which shows relative errors near 0; over all magnitudes and both signs."""
    x = torch.cat([torch.logspace(-6, 2, 2048), -torch.logspace(-6, 2, 2048)]).to(device)
    y = torch.empty_like(x)
    cap_kernel[(1,)](x, y, 1.0, cap)
    wide = x.double()
    want, plain = torch.tanh(wide), reference.deviating(lambda: torch.tanh(wide), torch.float32)
    judge(y, want, plain, "tanh")
    judge(y / x, want / wide, plain / wide, "tanh(x) / x")


@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi(per_batch, device):
    q, k, v = qkv(2, 20, 40, 4, 2, 32, device=device)
    slopes = rand(2, 4, device=device).abs() if per_batch else rand(4, device=device).abs()
    check(q, k, v, alibi_slopes=slopes)
    check(q, k, v, alibi_slopes=slopes, causal=True)
    check(q, k, v, alibi_slopes=rand(8, device=device).abs()[::2], causal=True)


@pytest.mark.parametrize("broadcast", list(itertools.product([False, True], repeat=3)))
def test_bias_and_mask(broadcast, device):
    q, k, v = qkv(2, 20, 37, 4, 2, 32, device=device)
    shape = tuple(1 if b else n for b, n in zip(broadcast, (2, 4, 20), strict=True))
    bias, mask = rand(*shape, 37, device=device), rand(*shape, 37, device=device) > -0.5
    check(q, k, v, bias=bias)
    check(q, k, v, mask=mask, causal=True)
    check(q, k, v, bias=bias, mask=mask, window=(9, 9))


def test_bias_dtypes_and_strides(device):
    q, k, v = qkv(2, 20, 37, 4, 2, 32, dtype=torch.float16, device=device)
    bias = rand(37, 4, 20, 2, dtype=torch.bfloat16, device=device).permute(3, 1, 2, 0)
    check(q, k, v, bias=bias)
    check(q, k, v, bias=rand(2, 4, 20, 74, device=device)[..., ::2])
    check(q, k, v, mask=(rand(2, 4, 37, 20, device=device) > 0).transpose(2, 3))


def test_sinks(device):
    q, k, v = qkv(2, 20, 37, 4, 2, 32, device=device)
    for sinks in (rand(4, device=device), torch.tensor([30.0, -30.0, 0.0, float("-inf")], device=device)):
        check(q, k, v, sinks=sinks, causal=True)
    check(q, k, v, sinks=rand(4, dtype=torch.bfloat16, device=device))
    check(q, k, v, sinks=rand(8, device=device)[::2])
    check(q, k, v, sinks=rand(1, device=device).expand(4))


def test_score_mod(device):
    q, k, v = qkv(2, 20, 37, 4, 2, 32, device=device)
    table = rand(4, 13, device=device)
    hook = {"score_mod": relative, "score_args": (table, 6)}
    check(q, k, v, **hook, twins={"score_mod": relative_twin})
    more = {"causal": True, "softcap": 3.0, "bias": rand(1, 1, 20, 37, device=device)}
    check(q, k, v, **hook, twins={"score_mod": relative_twin}, **more)
    check(q, k, v, score_mod=relative, score_args=(table[:, :9].contiguous(), 4), twins={"score_mod": relative_twin})


def test_mask_mod(device):
    q, k, v = qkv(2, 20, 37, 4, 2, 32, device=device)
    for args in ((2,), (3,)):
        check(q, k, v, mask_mod=dilated, mask_args=args, twins={"mask_mod": dilated_twin})
    check(q, k, v, mask_mod=prefix, mask_args=(5,), twins={"mask_mod": prefix_twin})
    check(q, k, v, mask_mod=prefix, mask_args=(5,), twins={"mask_mod": prefix_twin}, window=(30, 30), kernel=None)


def test_everything_at_once(device):
    q, k, v = qkv(2, 35, 50, 4, 2, 40, 24, dtype=torch.float16, device=device)
    check(
        q, k, v, (16, 32), BOTH,
        causal=True, window=(33, 0), scale=0.2, softcap=8.0, alibi_slopes=rand(2, 4, device=device).abs(),
        bias=rand(1, 4, 35, 50, device=device), mask=rand(2, 1, 35, 50, device=device) > -1, sinks=rand(4, device=device),
        score_mod=relative, score_args=(rand(4, 5, device=device), 2), mask_mod=dilated, mask_args=(2,),
        twins={"score_mod": relative_twin, "mask_mod": dilated_twin},
    )  # fmt: skip


def test_nan_stays_in_its_rows(device):
    """NaN in a query or a bias makes NaN in exactly the rows that see it; NaN in a masked key makes none."""
    q, k, v = qkv(1, 20, 40, 2, 2, 16, device=device)
    q[0, 3, 1] = float("nan")
    out, lse = tilefold.attention(q, k, v, return_lse=True)
    assert out[0, 3, 1].isnan().all()
    assert lse[0, 1, 3].isnan()
    assert out.isnan().sum() == 16
    q, k, v = qkv(1, 20, 40, 2, 2, 16, device=device)
    bias = rand(1, 1, 20, 40, device=device)
    bias[0, 0, 5, 30] = float("nan")
    out = tilefold.attention(q, k, v, bias=bias)
    assert out[0, 5].isnan().all()
    assert out.isnan().sum() == 32
    k[0, 39] = float("nan")
    out = tilefold.attention(q, k, v, causal=True)
    assert not out[0, :19].isnan().any()
    assert out[0, 19].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_survives_a_softcap(dtype, device):
    q, k, v = qkv(1, 20, 40, 2, 2, 16, dtype=dtype, device=device)
    q[0, 3, 1] = float("nan")
    out = tilefold.attention(q, k, v, softcap=5.0)
    assert out[0, 3, 1].isnan().all()
    assert out.isnan().sum() == 16


@pytest.mark.parametrize("side", [10**9, 2**30, 2**31 - 1, 2**31, sys.maxsize, 2**70])
def test_enormous_windows(side, device):
    """A side beyond every length is no bound at all."""
    q, k, v = qkv(1, 40, 50, 2, 2, 16, device=device)
    for window in ((side, side), (None, side), (side, 0), (3, side)):
        clipped = tuple(None if w == side else w for w in window)
        assert torch.equal(tilefold.attention(q, k, v, window=window), tilefold.attention(q, k, v, window=clipped))
        check(q, k, v, window=window)


def test_infinite_scores(device):
    """A bias of -inf is a mask; a whole row of it is a dead row."""
    q, k, v = qkv(1, 20, 40, 2, 2, 16, device=device)
    bias = rand(1, 2, 20, 40, device=device)
    bias[bias > 1] = float("-inf")
    bias[0, 1, 4] = float("-inf")
    out, _ = check(q, k, v, bias=bias)
    assert (out[0, 4, 1] == 0).all()


def test_same_bits_every_run(device):
    q, k, v = qkv(2, 50, 70, 4, 2, 32, dtype=torch.float16, device=device)
    first = tilefold.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(5):
        again = tilefold.attention(q, k, v, causal=True, return_lse=True)
        assert cases.same(first, again)


@pytest.mark.no_poison
def test_rows_far_apart(device):
    """Rows of one query tile more than 2^31 elements apart."""
    stride = (1 << 31) // 16 + 8
    with torch.no_grad():
        q = torch.empty(17 * stride, dtype=torch.float16, device=device).as_strided((1, 17, 1, 16), (0, stride, 16, 1))
        q.copy_(rand(1, 17, 1, 16, dtype=torch.float16))
        k, v = qkv(1, 17, 20, 1, 1, 16, dtype=torch.float16, device=device)[1:]
        check(q, k, v, causal=True)
