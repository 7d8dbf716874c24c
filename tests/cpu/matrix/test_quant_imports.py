"""Weights of GPTQ, AWQ, compressed-tensors and NF4 checkpoints, packed here bit by bit, come back bit for bit."""

import pytest
import torch

from quant_formats import awq, compressed, explicit, gptq, nf4, nf4_state
from tilefold.errors import DtypeError, ShapeError, TilefoldError, Unsupported, ValueRangeError
from tilefold.quant import NF4_CODE, QuantizedTensor, from_awq, from_compressed_tensors, from_gptq, from_nf4

BITS = (8, 4, 3, 2)


def weight(n: int, k: int, groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], zeros [groups, N] (0 and the largest among them) and fp16 scales [groups, N], all random."""
    zeros = torch.randint(0, 2**bits, (groups, n))
    zeros[0, 0], zeros[-1, -1] = 0, 2**bits - 1
    return torch.randint(0, 2**bits, (n, k)), zeros, (torch.rand(groups, n) + 0.5).half()


def same(q: QuantizedTensor, wanted: torch.Tensor) -> bool:
    return torch.equal(q.dequantize(wanted.dtype), wanted)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", BITS)
def test_gptq(bits, version):
    n, k, group = 96, 160, 32
    codes, zeros, scales = weight(n, k, 5, bits)
    q = from_gptq(*gptq(codes, zeros, bits, version), scales, bits=bits, version=version)
    assert (q.shape, q.group, q.scheme, q.dtype, q.perm) == ((n, k), group, "asymmetric", torch.float16, None)
    plain = torch.arange(k) // group
    assert same(q, explicit(codes, zeros, scales, plain, torch.float16))
    assert from_gptq(*gptq(codes, zeros, bits, version), scales, plain.int(), bits, version) == q
    assert QuantizedTensor.from_state(q.state()) == q


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("k", [160, 144])
def test_gptq_act_order(bits, k):
    """Columns in any order, each group with 32 of them; at K = 144 the last with 16."""
    n, groups = 64, 5
    codes, zeros, scales = weight(n, k, groups, bits)
    g_idx = (torch.arange(k) // 32)[torch.randperm(k)].int()
    q = from_gptq(*gptq(codes, zeros, bits, 1), scales, g_idx, bits)
    wanted = explicit(codes, zeros, scales, g_idx, torch.float16)
    assert same(q, wanted) and q.perm is not None
    x = torch.randn(3, k, dtype=torch.float64)
    stored = q.dequantize(torch.float64)[:, q.perm.long()]
    torch.testing.assert_close(x[:, q.perm.long()] @ stored.t(), x @ q.dequantize(torch.float64).t())
    assert QuantizedTensor.from_state(q.state()) == q
    assert torch.equal(g_idx[q.perm.long()], torch.arange(k).int() // 32)


def test_gptq_odd_sizes():
    """N = 704 and 2112 need not be a multiple of 32 at 3 bits; one group a row; zero points in the middle are symmetric."""
    for n, bits in ((704, 3), (44, 3), (70, 4)):
        codes, zeros, scales = weight(n, 32, 1, bits)
        assert same(
            from_gptq(*gptq(codes, zeros, bits, 2), scales, bits=bits, version=2),
            explicit(codes, zeros, scales, torch.zeros(32, dtype=torch.int64), torch.float16),
        )
    codes, zeros, scales = weight(16, 96, 2, 4)
    q = from_gptq(*gptq(codes, torch.full_like(zeros, 8), 4, 1), scales, group=64)
    assert q.scheme == "symmetric" and q.zeros is None
    assert same(q, explicit(codes, torch.full_like(zeros, 8), scales, torch.arange(96) // 64, torch.float16))


@pytest.mark.parametrize("shape", [(704, 64), (8, 96)])
def test_awq(shape):
    n, k = shape
    codes, zeros, scales = weight(n, k, 2, 4)
    qweight, qzeros = awq(codes, zeros)
    wanted = explicit(codes, zeros, scales, torch.arange(k) // (k // 2), torch.float16)
    q = from_awq(qweight, qzeros, scales)
    assert same(q, wanted) and (q.shape, q.group) == ((n, k), k // 2)
    assert not same(from_awq((qweight & 0x0F0F0F0F) << 4 | (qweight >> 4 & 0x0F0F0F0F), qzeros, scales), wanted)
    assert not same(from_awq(qweight, qzeros.roll(1, 0), scales), wanted)
    assert not same(from_awq(qweight, torch.full_like(qzeros, -0x77777778), scales), wanted)


def test_awq_of_one_word():
    """Nibbles 0 to 7 of a word hold columns 0 2 4 6 1 3 5 7."""
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    q = from_awq(words, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8))
    assert q.dequantize().flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("bits", BITS)
def test_compressed_tensors(bits, strategy):
    n, k, dtype = 45, 155, torch.bfloat16
    groups, middle = (5 if strategy == "group" else 1), 2 ** (bits - 1)
    rows = 1 if strategy == "tensor" else n
    codes = torch.randint(-middle, middle, (n, k))
    zeros = torch.randint(-middle, middle, (rows, groups))
    zeros[0, 0] = -middle
    scales = (torch.rand(rows, groups) + 0.5).to(dtype)
    packed, packed_zeros = compressed(codes, zeros, bits)
    g_idx = torch.arange(k) // (k // groups)
    wanted = explicit(codes, zeros.t(), scales.t(), g_idx, dtype)
    size = torch.tensor([n, k])
    plain = from_compressed_tensors(packed, scales, size, zeros.to(torch.int8), bits=bits, strategy=strategy)
    assert same(plain, wanted) and plain.per == strategy
    assert from_compressed_tensors(packed, scales, (n, k), packed_zeros, bits=bits, strategy=strategy) == plain
    even = from_compressed_tensors(packed, scales, size, bits=bits, strategy=strategy)
    assert even.scheme == "symmetric" and same(even, explicit(codes, 0 * zeros.t(), scales.t(), g_idx, dtype))
    assert not same(even, wanted)
    assert not same(
        from_compressed_tensors(packed ^ 1, scales, size, packed_zeros, bits=bits, strategy=strategy), wanted
    )
    if strategy == "group":
        rolled = scales.roll(1, 1)
        assert not same(from_compressed_tensors(packed, rolled, size, packed_zeros, bits=bits), wanted)
        order = g_idx[torch.randperm(k)]
        q = from_compressed_tensors(packed, scales, size, packed_zeros, order, bits)
        assert same(q, explicit(codes, zeros.t(), scales.t(), order, dtype))
        assert from_compressed_tensors(packed, scales, size, packed_zeros, -torch.ones_like(order), bits) == plain


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("k", [12, 20, 44, 152, 160, 2112])
def test_compressed_tensors_of_three_bits_in_both_layouts(k, dense):
    """End to end or ten to a word: told by the number of words where that differs, else by the argument; zero points alike."""
    n = 45
    codes, zeros = torch.randint(-4, 4, (n, k)), torch.randint(-4, 4, (n, 2))
    scales = torch.rand(n, 2) + 0.5
    packed, packed_zeros = compressed(codes, zeros, 3, dense)
    wanted = explicit(codes, zeros.t(), scales.t(), torch.arange(k) // (k // 2), torch.float32)
    told = None if k > 150 else dense
    q = from_compressed_tensors(packed, scales, (n, k), packed_zeros, bits=3, dense=told)
    assert same(q, wanted)
    if k <= 150:
        with pytest.raises(ValueRangeError, match="dense must be True or False"):
            from_compressed_tensors(packed, scales, (n, k), packed_zeros, bits=3)
        other, _ = compressed(codes, zeros, 3, not dense)
        assert not same(
            from_compressed_tensors(other, scales, (n, k), zeros.to(torch.int8), bits=3, dense=dense), wanted
        )


@pytest.mark.parametrize(
    ("shape", "block"), [((8, 128), 64), ((704, 64), 64), ((6, 96), 64), ((5, 40), 64), ((3, 8), 128), ((2, 704), 128)]
)
@pytest.mark.parametrize("nested", [False, True])
def test_nf4(shape, block, nested):
    """Blocks of the flattened weight, in rows, across rows and over several rows; the last one cut short."""
    n, k = shape
    codes = torch.randint(0, 16, shape)
    blocks = -(-n * k // block)
    packed = nf4(codes)
    if nested:
        code, scale, offset = torch.randn(256).sort()[0], torch.rand(-(-blocks // 256)) + 0.5, 0.125
        small = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        absmax = torch.stack([code[int(c)] * scale[b // 256] + offset for b, c in enumerate(small)])
        state = nf4_state(shape, block, offset)
        q = from_nf4(packed, small, nested_absmax=scale, nested_code=code, quant_state=state)
    else:
        absmax = torch.rand(blocks) + 0.5
        q = from_nf4(packed, absmax, quant_state=nf4_state(shape, block))
        assert from_nf4(packed.flatten(), absmax, shape, torch.tensor(NF4_CODE), block, dtype=torch.bfloat16) == q
    table = torch.tensor(NF4_CODE)
    wanted = (table[codes.flatten()] * absmax.repeat_interleave(block)[: n * k]).view(shape)
    assert (q.scheme, q.shape, q.dtype) == ("table", shape, torch.bfloat16)
    assert torch.equal(q.dequantize(torch.float32), wanted) and same(q, wanted.bfloat16())
    assert QuantizedTensor.from_state(q.state()) == q
    swapped = from_nf4(packed << 4 | packed >> 4, absmax, shape, blocksize=block)
    assert not torch.equal(swapped.dequantize(torch.float32), wanted)
    if blocks > 1:
        rolled = from_nf4(packed, absmax.roll(1), shape, blocksize=block)
        assert not torch.equal(rolled.dequantize(torch.float32), wanted)


def test_nested_absmax_over_several_blocks_of_blocks():
    codes = torch.randint(0, 16, (130, 256))
    small = torch.randint(0, 256, (520,), dtype=torch.uint8)
    code, scale = torch.linspace(-1, 1, 256), torch.tensor([1.0, 2.0, 4.0])
    q = from_nf4(nf4(codes), small, (130, 256), nested_absmax=scale, nested_code=code, nested_offset=0.5)
    absmax = torch.stack([code[int(c)] * scale[b // 256] + 0.5 for b, c in enumerate(small)])
    wanted = torch.tensor(NF4_CODE)[codes] * absmax.repeat_interleave(64).view(130, 256)
    assert torch.equal(q.dequantize(torch.float32), wanted)


def refused(error: type[TilefoldError], text: str, call, *args, **options) -> None:
    with pytest.raises(error, match=text):
        call(*args, **options)


def test_bad_gptq_and_awq_are_refused():
    codes, zeros, scales = weight(32, 128, 4, 4)
    qweight, qzeros = gptq(codes, zeros, 4, 1)
    g_idx = torch.arange(128) // 32
    refused(ValueRangeError, "version must be 1 .* got 3", from_gptq, qweight, qzeros, scales, version=3)
    refused(ValueRangeError, "bits must be one of", from_gptq, qweight, qzeros, scales, bits=5)
    refused(ShapeError, r"qzeros must be \[4, 4\], got \[4, 3\]", from_gptq, qweight, qzeros[:, :3], scales)
    refused(
        DtypeError, r"qweight must be one of torch\.int32, got torch\.int64", from_gptq, qweight.long(), qzeros, scales
    )
    refused(ShapeError, r"qweight must be \[16, 31\]", from_gptq, qweight, qzeros, scales[:, :31])
    refused(ValueRangeError, "group must cut K = 128 into the 4 groups", from_gptq, qweight, qzeros, scales, group=64)
    refused(ValueRangeError, "group must be given where K = 128", from_gptq, qweight, qzeros[:3], scales[:3])
    past = g_idx + (g_idx == 3)
    refused(ValueRangeError, "g_idx must be from 0 to 3, got 0 to 4", from_gptq, qweight, qzeros, scales, past)
    uneven = torch.where(torch.arange(128) == 0, 1, g_idx)
    refused(ValueRangeError, "as many columns, got", from_gptq, qweight, qzeros, scales, uneven)
    refused(
        ValueRangeError, "group is 64, but g_idx has groups of 32", from_gptq, qweight, qzeros, scales, g_idx, group=64
    )
    refused(DtypeError, "g_idx must be integers", from_gptq, qweight, qzeros, scales, g_idx.float())
    refused(ShapeError, r"qweight must be \[12, 32\], got \[16, 32\]", from_gptq, qweight, qzeros, scales, g_idx[:96])
    refused(Unsupported, "AWQ's layout is for bits = 4, got 8", from_awq, qweight, qzeros, scales, 8)
    refused(ShapeError, r"qweight must be \[16, 4\], got \[16, 32\]", from_awq, qweight, qzeros, scales)
    refused(ShapeError, "N a multiple of 8", from_awq, qweight, qzeros, scales[:, :30])


def test_bad_compressed_tensors_are_refused():
    packed, zeros = compressed(torch.zeros(16, 64, dtype=torch.long), torch.zeros(16, 2, dtype=torch.long), 4)
    scales, size = torch.ones(16, 2), (16, 64)
    call = from_compressed_tensors
    refused(ValueRangeError, "strategy must be one of .* got 'block'", call, packed, scales, size, strategy="block")
    refused(ShapeError, r"weight_packed must be \[16, 9\]", call, packed, scales, (16, 72))
    refused(ShapeError, "one element for strategy='tensor'", call, packed, scales, size, strategy="tensor")
    refused(ShapeError, r"weight_scale must be \[16, 1\]", call, packed, scales, size, strategy="channel")
    refused(ShapeError, r"weight_scale must be \[16, groups\]", call, packed, scales[:3], size)
    refused(
        ShapeError, r"weight_zero_point must be \[2, 2\], got \[16, 2\]", call, packed, scales, size, zeros.repeat(8, 1)
    )
    high = torch.full((16, 2), 8, dtype=torch.int8)
    text = "weight_zero_point must be from -8 to 7 at 4 bits, got 8 to 8"
    refused(ValueRangeError, text, call, packed, scales, size, high)
    text, channel = "group goes with strategy='group'", {"strategy": "channel", "group": 32}
    refused(ValueRangeError, text, call, packed, scales[:, :1], size, **channel)
    refused(ShapeError, r"weight_packed must be \[16, 15\], got \[16, 8\]", call, packed, scales, (16, 160), bits=3)
    refused(ValueRangeError, "dense must be True or False where K = 60", call, packed, scales, (16, 60), bits=3)
    refused(ShapeError, r"weight_shape must be \(N, K\)", call, packed, scales, (16,))


def test_bad_nf4_is_refused():
    packed, absmax = nf4(torch.zeros(4, 64, dtype=torch.long)), torch.ones(4)
    refused(ValueRangeError, "shape must be given", from_nf4, packed, absmax)
    refused(ShapeError, r"packed must be \[160\], got \[128\]", from_nf4, packed, absmax, (5, 64))
    refused(ShapeError, r"absmax must be \[8\], got \[4\]", from_nf4, packed, absmax, (4, 64), blocksize=32)
    refused(ValueRangeError, "blocksize must be an integer", from_nf4, packed, absmax, (4, 64), blocksize=0)
    refused(ValueRangeError, "nested_absmax must be given", from_nf4, packed, absmax.to(torch.uint8), (4, 64))
    refused(DtypeError, "absmax must be uint8 where", from_nf4, packed, absmax, (4, 64), nested_absmax=absmax)
    refused(ShapeError, r"code must be \[16\], got \[8\]", from_nf4, packed, absmax, (4, 64), torch.ones(8))
    refused(Unsupported, "share only 1 columns", from_nf4, packed[:124], absmax, (8, 31))
    refused(
        Unsupported, "quant_type 'nf4', got 'fp4'", from_nf4, packed, absmax, (4, 64), quant_state={"quant_type": "fp4"}
    )
    refused(DtypeError, "got 'float64'", from_nf4, packed, absmax, (4, 64), quant_state={"dtype": "float64"})
    broken = torch.tensor([123], dtype=torch.uint8)
    refused(ValueRangeError, "quant_state must be JSON", from_nf4, packed, absmax, quant_state=broken)
