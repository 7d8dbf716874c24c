"""FlexAttention's functions on a GPU: the gallery against fp64, beside torch's own, and what is compiled."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from cases import flex, judge, rand
from cases.device import DEVICE, SM_90, no_waiting
from cases.flex import MASKS, SCORES, SEQ, blocks_of, checked, tables_of
from cases.gradient import judged, oracle, upstream
from tilefold import masks, reference
from tilefold.compat.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, flex_attention_plan
from tilefold.ops import launch

pytestmark = pytest.mark.no_poison
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, dtype):
    checked(SCORES[name][0], tables_of(name, dtype), dtype=dtype, dim=64)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    checked(None, (), MASKS[name], blocks_of(MASKS[name], name, 128), dtype, dim=128)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_score_and_a_mask(dtype):
    mask = MASKS["documents"]
    checked(SCORES["softcap"][0], (), mask, blocks_of(mask, "documents", 64), dtype, dim=64)


@pytest.mark.parametrize("length", [1000, 4096])
def test_block_masks_are_those_of_torch(length):
    document = torch.arange(length, device=DEVICE) // 700

    def mask(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    given = (mask, None, None, length, length, DEVICE)
    create_block_mask(*given)  # compiled
    with no_waiting():
        mine = create_block_mask(*given)
    own = torch_block_mask(*given)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(mine, name), getattr(own, name)), name


def test_beside_torch_compiled():
    """Theirs takes our BlockMask, and ours theirs."""
    q, k, v = (rand(1, 4, 1000, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    document = torch.arange(1000, device=DEVICE) // 300
    mask = and_masks(flex.causal, lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx])
    given = (mask, None, None, 1000, 1000, DEVICE)
    theirs = torch.compile(torch_flex_attention)(q, k, v, SCORES["softcap"][0](), create_block_mask(*given))
    ours = flex_attention(q, k, v, SCORES["softcap"][0](), torch_block_mask(*given))
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@SM_90
@pytest.mark.parametrize("size", [128, 64, (256, 128), (96, 200)])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("dtype", HALVES)
def test_tables_by_hand(heads, size, dtype):
    """Tables that show what the mask_mod hides, and hide what it shows, over lists of tiles: fp64, and torch compiled."""
    q, k, v = (rand(2, n, 1100, 128, dtype=dtype, device=DEVICE).requires_grad_() for n in (16, 4, 4))
    block = size if isinstance(size, tuple) else (size, size)
    kinds = torch.randint(0, 3, (2, heads, *(-(-1100 // n) for n in block)), dtype=torch.uint8)
    kinds[0, :, 1] = 0  # rows without keys
    parts = []
    for kind in (1, 2):
        keep = (kinds == kind).to(torch.int8)
        parts += [keep.sum(-1).int().to(DEVICE), keep.argsort(dim=-1, descending=True, stable=True).int().to(DEVICE)]
    given = {"BLOCK_SIZE": block, "mask_mod": flex.causal, "seq_lengths": (1100, 1100)}
    by_hand = BlockMask.from_kv_blocks(*parts, **given)
    assert "lists" in flex_attention_plan(q, k, v, block_mask=by_hand, enable_gqa=True).options
    dout, dlse = upstream(q, v, "bhsd")
    for _ in range(2):
        out, lse = flex_attention(q, k, v, block_mask=by_hand, enable_gqa=True, return_lse=True)
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    ((*_, table),) = by_hand.__dict__["_tilefold"].values()
    assert len(table.__dict__["_tilefold_lists"]) == 2  # of the forward and the backward kernel, once each
    options = {"layout": "bhsd", "mask": masks.blocks(kinds.to(DEVICE), block, masks.causal())}
    want, plain = (oracle((q, k, v), dout, dlse, each, **options) for each in (torch.float64, dtype))
    judged(got, want, plain, f"{heads} {size} {dtype}")
    with torch.no_grad():
        want, plain = (reference.attention(q, k, v, dtype=each, **options) for each in (torch.float64, dtype))
        for name, *three in zip(("out", "lse"), (out, lse), want, plain, strict=True):
            judge(*three, name)
        if block == (128, 128):
            theirs = torch.compile(torch_flex_attention)(q, k, v, block_mask=by_hand, enable_gqa=True)
            torch.testing.assert_close(out, theirs, atol=2e-2, rtol=2e-2)


def test_new_lengths_and_tensors_compile_nothing():
    """Past the first ones, which differ in what Triton specialises on."""

    def run(n):
        q, k, v = (rand(1, 4, n, 64, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for _ in range(3))
        table = rand(4, 2 * n + 7, device=DEVICE).requires_grad_()
        flex_attention(q, k, v, flex.relative(table)).sum().backward()

    for n in (333, 336, 512):
        run(n)
    before = len(launch._COMPILED)
    for n in range(337, 437):
        run(n)
    assert len(launch._COMPILED) == before


def test_inside_compiled_code():
    """A graph break, and the same result."""
    q, k, v = (rand(1, 4, SEQ, 64, dtype=torch.float16, device=DEVICE) for _ in range(3))
    mod = SCORES["ALiBi"][0]()
    compiled = torch.compile(lambda q: 2 * flex_attention(q + 0, k, v, mod))
    assert torch.equal(compiled(q), 2 * flex_attention(q, k, v, mod))
