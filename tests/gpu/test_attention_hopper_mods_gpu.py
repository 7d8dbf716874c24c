"""Biases, ALiBi, boolean masks and users' functions in the Gluon kernel for dense attention on sm_90, against the fp64 oracle."""

import math
from functools import partial
from types import MappingProxyType

import pytest
import torch
from gallery import softcap_approximate

import tilefold
from cases import hold, hopper, hopper_plan, judge, packed, qkv, rand
from cases.device import DEVICE, SM_90, alike_every_run, captured, followed
from cases.gradient import gradients, judged, oracle, upstream
from cases.hopper import held, held_packed
from cases.mods import alone, filled, slanted, sliding, sliding_twin, users
from tilefold import masks, reference
from tilefold.plan import plan_attention
from tilefold.plan.backward.attention_backward_reduce import ReduceOptions

HOPPER = "attention_forward_hopper"
BF = torch.bfloat16
pytestmark = [pytest.mark.no_poison, SM_90]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}]
LENGTHS = [(1, 8), (127, 136), (333, 1000), (1001, 336), (64, 2000)]


def draw(*shape, dtype=BF):
    return rand(*shape, dtype=dtype, device=DEVICE)


def some(*shape, share=0.5):
    """Booleans, of which this share is true."""
    return torch.rand(*shape).to(DEVICE) < share


@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_bias(options, dim):
    for sq, sk in LENGTHS:
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=BF, device=DEVICE)
        held(q, k, v, bias=draw(2, 8, sq, sk), **options)
        held(q, k, v, bias=draw(1, 1, sq, sk, dtype=torch.float32), **options)


@pytest.mark.parametrize("shape", [(1, 8), (2, 1), (1, 1), (2, 8)], ids=str)
def test_broadcast(shape):
    q, k, v = qkv(2, 300, 520, 8, 8, 128, dtype=BF, device=DEVICE)
    for bias in (draw(*shape, 300, 520), draw(*shape, 1, 520), draw(*shape, 1, 520).expand(2, 8, 300, -1)):
        held(q, k, v, bias=bias)
        held(q, k, v, bias=bias, causal=True)
    mask = some(*shape, 300, 528)[..., :520]
    held(q, k, v, mask=mask)
    held(q, k, v, mask=mask[:, :, :1], causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [torch.float16, torch.bfloat16])
def test_dtypes(dtype, inputs):
    q, k, v = qkv(1, 300, 520, 4, 4, 128, dtype=inputs, device=DEVICE)
    held(q, k, v, bias=draw(1, 4, 300, 520, dtype=dtype))
    held(q, k, v, bias=draw(1, 4, 1, 520, dtype=dtype), causal=True)


@pytest.mark.parametrize("dims", [(72, 72), (96, 96), (64, 256), (192, 128), (192, 192), (256, 256)], ids=str)
def test_head_dims(dims):
    q, k, v = qkv(1, 300, 528, 4, 2, *dims, dtype=BF, device=DEVICE)
    held(q, k, v, bias=draw(1, 4, 300, 528))
    held(q, k, v, bias=draw(1, 4, 300, 528, dtype=torch.float32), causal=True)
    held(q, k, v, bias=draw(1, 4, 1, 528), causal=True)
    held(q, k, v, mask=some(1, 4, 300, 528), causal=True)
    held(q, k, v, mask=some(1, 1, 1, 528))
    held(q, k, v, alibi_slopes=torch.rand(4, device=DEVICE), window=(100, 30))
    held(q, k, v, bias=draw(1, 1, 300, 528), mask=some(1, 4, 300, 528), alibi_slopes=torch.rand(4, device=DEVICE))


def test_strides_and_lengths_that_boxes_overhang():
    q, k, v = qkv(2, 201, 333, 4, 4, 128, dtype=BF, device=DEVICE)
    held(q, k, v, bias=draw(2, 4, 201, 336)[..., :333])
    held(q, k, v, bias=draw(201, 2, 3, 4, 352).permute(1, 3, 0, 2, 4)[:, :, :, 1, 8:341], causal=True)
    held(q, k, v, mask=some(2, 4, 201, 352)[..., 16:349])
    dirty = torch.full((2, 4, 201, 336), math.nan, dtype=BF, device=DEVICE)
    dirty[..., :333] = draw(2, 4, 201, 333)
    held(q, k, v, bias=dirty[..., :333])
    odd = tilefold.attention_plan(q, k, v, bias=draw(2, 4, 201, 333))
    assert "strides of the bias are not multiples of 16 bytes" in " ".join(entry.why for entry in odd.rejected)


@pytest.mark.parametrize("options", [*MASKS, {"window": (0, -1)}], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_alibi(dim, options):
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)], device=DEVICE)
    for sq, sk in ((1, 1), (127, 129), (333, 1001), (1001, 333), (64, 2000)):
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=BF, device=DEVICE)
        held(q, k, v, alibi_slopes=slopes, **options)
        held(q, k, v, {"options": ("pack",)}, alibi_slopes=torch.stack((slopes, -slopes / 100)), **options)


@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_mask(options, dim):
    for sq, sk in ((1, 16), (127, 144), (333, 1008), (1008, 336)):
        q, k, v = qkv(2, sq, sk, 4, 2, dim, dtype=BF, device=DEVICE)
        mask = some(2, 4, sq, sk)
        mask[:, :, ::7] = False  # rows that see nothing
        held(q, k, v, mask=mask, **options)
        held(q, k, v, mask=some(1, 4, sq, sk, share=0.02), **options)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_everything(dim, options):
    for sq, sk in ((200, 528), (700, 336)):
        q, k, v = qkv(2, sq, sk, 4, 2, dim, dtype=BF, device=DEVICE)
        every = {"softcap": 20.0, "alibi_slopes": torch.rand(2, 4, device=DEVICE), "bias": draw(1, 4, sq, sk)}
        held(q, k, v, sinks=draw(4), **every, **options)
        held(q, k, v, mask=some(2, 1, sq, sk), sinks=draw(4), **every, **options)


VERSIONS = [
    (64, {"block_m": 64}),
    (64, {"block_m": 192, "num_stages": 2}),
    (64, {"options": ()}),
    (64, {"block_n": 64}),
    (128, {"options": ()}),
    (128, {"options": ("fence", "turns", "skip", "late")}),
    (128, {"options": ("fence", "turns", "skip", "polynomial 2")}),
    (128, {"block_m": 64}),
    (128, {"block_n": 64, "num_stages": 4}),
    (256, {"options": ("fence",)}),
]


@pytest.mark.parametrize(("dim", "changes"), VERSIONS, ids=str)
def test_versions(dim, changes):
    for options in ({}, {"causal": True}):
        q, k, v = qkv(2, 333, 1008, 4, 2, dim, dtype=BF, device=DEVICE)
        held(q, k, v, changes, bias=draw(2, 4, 333, 1008), **options)
        held(q, k, v, changes, mask=some(2, 1, 333, 1008), alibi_slopes=torch.rand(4, device=DEVICE), **options)


def test_biases_that_mask():
    q, k, v = qkv(1, 300, 520, 4, 4, 128, dtype=BF, device=DEVICE)
    seen = some(1, 4, 300, 520)
    seen[:, :, 5] = False
    for value in (-math.inf, -1e9):
        bias = torch.where(seen, 0.0, value).to(BF)
        held(q, k, v, bias=bias, causal=True)
        held(q, k, v, bias=bias)
    held(q, k, v, bias=torch.where(seen[:, :, :1], 0.0, -math.inf).to(BF))


def test_nan_in_a_bias_stays_in_its_rows_and_behind_a_mask():
    q, k, v = qkv(1, 512, 512, 2, 2, 128, dtype=BF, device=DEVICE)
    bias = draw(1, 2, 512, 512)
    plan = hopper_plan(tilefold.attention_plan(q, k, v, causal=True, bias=bias))
    behind = bias[0, 1, 100, 101:]  # not seen
    hopper.nan_stays(
        partial(tilefold.attention, q, k, v, causal=True, bias=bias, plan=plan), bias[0, 0, 100, 7], behind
    )


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_packed_sequences(options):
    lengths = (300, 300), (1, 50), (129, 700), (128, 128), (64, 3), (700, 90)
    (q, k, v), batch = packed(*zip(*lengths, strict=True), 4, 2, 128, 128, dtype=BF, device=DEVICE)
    every = {"bias": draw(6, 4, 700, 704)[..., :700], "alibi_slopes": torch.rand(6, 4, device=DEVICE), **options}
    masked = {**every, "mask": some(6, 1, 1, 704)[..., :700]}
    for mods in (every, masked, {"alibi_slopes": torch.rand(4, device=DEVICE)}):
        held_packed((q, k, v), batch, **mods)


def test_gradients_from_its_out_and_lse():
    q, k, v = qkv(1, 300, 520, 4, 2, 128, dtype=BF, device=DEVICE)
    bias = draw(1, 4, 300, 520)
    plan = tilefold.attention_plan(q, k, v, bias=bias, causal=True)
    tensors = [t.requires_grad_() for t in (q, k, v, bias)]
    found = []
    for chosen in (hopper_plan(plan), plan.with_tile()):
        out = tilefold.attention(q, k, v, bias=bias, causal=True, plan=chosen)
        found.append(torch.autograd.grad(out.float().square().sum(), tensors))
    for ours, others in zip(*found, strict=True):
        assert (ours - others).float().norm() < 0.02 * others.float().norm()


def test_the_same_bits_every_run_and_in_graphs():
    q, k, v = qkv(2, 1500, 1512, 16, 4, 128, dtype=BF, device=DEVICE)
    options = {"bias": draw(1, 16, 1500, 1512), "mask": some(2, 1, 1, 1536)[..., :1512], "causal": True}
    plan = hopper_plan(tilefold.attention_plan(q, k, v, **options))
    step = partial(tilefold.attention, q, k, v, plan=plan, **options)
    alike_every_run(step, 30)

    def change():
        options["bias"].copy_(draw(1, 16, 1500, 1512))
        options["mask"].copy_(some(2, 1, 1, 1512))

    followed(step, *[change] * 3)


@pytest.mark.large
def test_a_bias_of_more_than_two_to_the_31_elements():
    n = 47104
    q, k, v = qkv(1, n, n, 1, 1, 64, dtype=BF, device=DEVICE)
    bias = torch.randn(1, 1, n, n, dtype=BF, device=DEVICE)
    out = tilefold.attention(q, k, v, bias=bias, plan=hopper_plan(tilefold.attention_plan(q, k, v, bias=bias)))
    rows = slice(n - 64, n)
    hold(out[:, rows], reference.attention, q[:, rows], k, v, bias=bias[:, :, rows])


# ---------------------------------------------------------------- the user's functions, inlined


def held_user(names, q, k, v, changes=None, **options):
    """Hold the kernel with these mods to the oracle, and that the portable one is held as well."""
    twins, unit = {}, 1.0
    for name in names:
        mod, twin, own = users(name, q.shape[1], k.shape[1], q.shape[0], q.shape[2])
        options, twins, unit = {**options, **mod}, {**twins, **twin}, max(unit, own)
    planned = tilefold.attention_plan(q, k, v, **options)
    portable = plan_attention(planned.problem, planned.device, portable=True)
    held(q, k, v, changes, [portable], twins, unit, **options)


USERS = ["slanted", "relative", "squashed", "numbered", "dilated", "sliding"]


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF])
def test_user(name, options, dtype):
    for (sq, sk), dim in zip([*LENGTHS, (333, 1001)], (64, 128, 128, 64, 128, 64), strict=True):
        q, k, v = qkv(2, sq, sk, 4, 2, dim, dtype=dtype, device=DEVICE)
        held_user([name], q, k, v, **options)


@pytest.mark.parametrize("dims", [(72, 72), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
def test_user_head_dims(dims):
    q, k, v = qkv(1, 300, 523, 4, 2, *dims, dtype=BF, device=DEVICE)
    for names in (["relative"], ["numbered"], ["slanted", "sliding"]):
        held_user(names, q, k, v)
        held_user(names, q, k, v, causal=True)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_user_behind_the_others(options):
    """softcap, ALiBi, bias, score_mod, mask, mask_mod: in this order."""
    q, k, v = qkv(2, 333, 1008, 4, 2, 128, dtype=BF, device=DEVICE)
    every = {"softcap": 20.0, "bias": draw(1, 4, 333, 1008), "mask": some(2, 1, 333, 1008), "sinks": draw(4)}
    held_user(["relative", "dilated"], q, k, v, **every, **options)
    held_user(["squashed"], q, k, v, softcap=20.0, **options)
    held_user(["sliding"], q, k, v, softcap=20.0, **options)
    held_user(["relative"], q, k, v, mask=every["mask"], **options)
    held_user(["numbered"], q, k, v, bias=every["bias"], **options)


@pytest.mark.parametrize(("dim", "changes"), VERSIONS, ids=str)
def test_user_versions(dim, changes):
    for options in ({}, {"causal": True}):
        q, k, v = qkv(2, 333, 1001, 4, 2, dim, dtype=BF, device=DEVICE)
        held_user(["relative", "dilated"], q, k, v, changes, **options)
        held_user(["numbered"], q, k, v, changes, **options)


MASK_MODS = ["numbered", "dilated", "sliding", "alone", "by_head"]


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_lists_first(name, dim):
    """Over lists of tiles, in which every kind of tile is: hidden, partial, whole; one program an SM and two."""
    for tile in (
        {},
        {"block_m": 64, "block_n": 64, "num_stages": 2},
        {"block_m": 128, "block_n": 128, "num_stages": 2},
    ):
        held_lists([name], *qkv(1, 1024, 1280, 4, 2, dim, dtype=BF, device=DEVICE), tile=tile)


def held_lists(names, q, k, v, tile=MappingProxyType({}), **options):
    given = {**options, **users(names[0], q.shape[1], k.shape[1], q.shape[0], q.shape[2])[0]}
    versions = hopper_plan(tilefold.attention_plan(q, k, v, **given)).options
    versions = tuple(one for one in dict.fromkeys((*versions, "lists")) if one != "turns" or tile.get("block_m") != 64)
    held_user(names, q, k, v, {**tile, "options": versions}, **options)


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF])
def test_lists(name, options, dtype):
    for (sq, sk), dim in zip([*LENGTHS, (333, 1001)], (64, 128, 128, 64, 256, 64), strict=True):
        held_lists([name], *qkv(2, sq, sk, 4, 2, dim, dtype=dtype, device=DEVICE), **options)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_lists_behind_the_others(options):
    q, k, v = qkv(2, 333, 1008, 4, 2, 128, dtype=BF, device=DEVICE)
    every = {"softcap": 20.0, "bias": draw(1, 4, 333, 1008), "mask": some(2, 1, 333, 1008), "sinks": draw(4)}
    held_lists(["numbered", "relative"], q, k, v, **every, **options)
    held_lists(["sliding", "slanted"], q, k, v, alibi_slopes=torch.rand(4, device=DEVICE), **options)


def test_lists_follow_their_arguments():
    """By default, eager, in a graph and compiled: what changes in place changes the lists."""
    q, k, v = qkv(1, 2048, 2048, 16, 2, 128, dtype=BF, device=DEVICE)
    numbers = torch.zeros(2048, dtype=torch.int32, device=DEVICE)
    options = {"mask_mod": alone, "mask_args": (numbers,)}
    plan = tilefold.attention_plan(q, k, v, **options)
    assert plan.kernel == HOPPER and "lists" in plan.options
    bare = plan.with_tile(options=tuple(option for option in plan.options if option != "lists"))
    fresh = plan.with_tile(options=(*plan.options, "anew"))
    compiled = torch.compile(lambda: tilefold.attention(q, k, v, **options))
    graph, out = captured(lambda: tilefold.attention(q, k, v, **options))
    for documents in (1, 5, 16, 2048):
        numbers.copy_(torch.arange(2048) * documents // 2048)
        want = tilefold.attention(q, k, v, plan=bare, **options)
        graph.replay()
        made = [tilefold.attention(q, k, v, **options) for _ in range(2)]
        assert all(torch.equal(want, each) for each in (*made, out, compiled()))
        assert torch.equal(want, tilefold.attention(q, k, v, plan=fresh, **options))
    with torch.inference_mode():
        numbers = torch.zeros(2048, dtype=torch.int32, device=DEVICE)
        for documents in (3, 7):
            numbers.copy_(torch.arange(2048) * documents // 2048)
            given = {**options, "mask_args": (numbers,)}
            want = tilefold.attention(q, k, v, plan=bare, **given)
            assert torch.equal(want, tilefold.attention(q, k, v, **given))
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        made = tilefold.attention(q, k, v, **options)
    other.synchronize()
    assert torch.equal(made, tilefold.attention(q, k, v, plan=bare, **options))


def patched(*shape):
    """A mask with tiles of every kind: documents of 150 to 400, and random holes in the first."""
    sq, sk = shape[-2:]
    ends = torch.randint(150, 400, (40,)).cumsum(0)
    of_queries, of_keys = (torch.searchsorted(ends, torch.arange(n), right=True) for n in (sq, sk))
    mask = (of_queries[:, None] == of_keys).expand(shape).clone()
    mask[..., :200, :200] &= torch.rand(200, 200) < 0.5
    return mask.to(DEVICE)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 8)], ids=str)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_lists_of_masks(options, shape):
    """A mask that heads share is listed, alone and beside a mask_mod; one of each head is not."""
    for (sq, sk), dim in (((1024, 1296), 128), ((333, 1008), 64), ((1008, 336), 128)):
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=BF, device=DEVICE)
        mask = patched(*shape, sq, sk)
        planned = hopper_plan(tilefold.attention_plan(q, k, v, mask=mask, **options))
        lists = ("lists",) if shape[1] == 1 else ()
        held(q, k, v, {"options": tuple(dict.fromkeys((*planned.options, *lists)))}, mask=mask, **options)
        held_lists(["sliding"], q, k, v, mask=mask, **options)


def test_lists_of_masks_follow_them():
    """By default, eager and in a graph: what changes in place changes the lists."""
    q, k, v = qkv(1, 2048, 2048, 16, 2, 128, dtype=BF, device=DEVICE)
    mask = torch.ones(1, 1, 2048, 2048, dtype=torch.bool, device=DEVICE)
    plan = tilefold.attention_plan(q, k, v, mask=mask)
    assert plan.kernel == HOPPER and "lists" in plan.options
    bare = plan.with_tile(options=tuple(option for option in plan.options if option != "lists"))
    graph, out = captured(lambda: tilefold.attention(q, k, v, mask=mask))
    for _ in range(3):
        mask.copy_(patched(1, 1, 2048, 2048))
        want = tilefold.attention(q, k, v, mask=mask, plan=bare)
        graph.replay()
        made = [tilefold.attention(q, k, v, mask=view) for view in (mask, mask[:, :, :, :2048], mask.clone())]
        assert all(torch.equal(want, each) for each in (*made, out))


def table(block, batch, heads, sq, sk):
    """Kinds of blocks; the second row of blocks sees nothing, and the last has no full one."""
    kinds = torch.randint(0, 3, (batch, heads, -(-sq // block[0]), -(-sk // block[1])), dtype=torch.uint8)
    kinds[:, :, 1] = 0
    kinds[:, :, -1] = kinds[:, :, -1].clamp(max=1)
    return kinds.to(DEVICE)


BLOCKS = [(128, 128), (256, 128), (64, 64), (96, 200), (128, 384)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("inner", ["rule", "documents", "none"])
def test_tables_of_blocks(block, inner):
    """Lists of the table, of any blocks: of those that hold whole tiles the rest alone is asked."""
    for (sq, sk), dim, shape in (((1024, 1280), 128, (2, 1)), ((900, 1501), 64, (1, 8)), ((700, 300), 128, (2, 8))):
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=BF, device=DEVICE)
        starts = torch.tensor([0, 333, 334, sk], dtype=torch.int32, device=DEVICE)
        rule = masks.rule(sliding, (77,), sliding_twin)
        mods = {"rule": (rule,), "documents": (masks.documents(starts),), "none": ()}
        mask = masks.blocks(table(block, *shape, sq, sk), block, *mods[inner])
        options = hopper_plan(tilefold.attention_plan(q, k, v, mask=mask)).options
        held(q, k, v, {"options": tuple(dict.fromkeys((*options, "lists")))}, mask=mask)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_user_packed(options):
    """Indices begin anew in each sequence; some have no key, where nothing is loaded."""
    lengths = (300, 300), (1, 50), (129, 700), (128, 128), (64, 0), (700, 90)
    (q, k, v), batch = packed(*zip(*lengths, strict=True), 4, 2, 128, 128, dtype=BF, device=DEVICE)
    for name in USERS:
        if name == "numbered":  # its rows are of one length
            continue
        mod, twins, unit = users(name, 700, 700)
        held_packed((q, k, v), batch, None, slice(None), twins, unit, **mod, **options)


def test_user_masks_as_values():
    q, k, v = qkv(2, 333, 1001, 4, 2, 128, dtype=BF, device=DEVICE)
    starts = torch.tensor([0, 333, 1001], dtype=torch.int32, device=DEVICE)
    for mask in (
        masks.documents(starts),
        masks.documents(starts) & ~masks.window(100, 0),
        masks.prefix(50) | masks.window(9, 9),
    ):
        plan = hopper_plan(tilefold.attention_plan(q, k, v, mask=mask))
        out = tilefold.attention(q, k, v, mask=mask, plan=plan)
        judge(
            out, reference.attention(q, k, v, mask=mask)[0], reference.attention(q, k, v, dtype=BF, mask=mask)[0], "out"
        )


def test_user_is_taken_and_compiled_once_for_all_numbers():
    q, k, v = qkv(2, 4096, 4096, 16, 4, 128, dtype=BF, device=DEVICE)
    slopes = torch.rand(16, device=DEVICE)
    plan = tilefold.attention_plan(q, k, v, score_mod=slanted, score_args=(slopes,))
    assert plan.kernel == HOPPER
    first = tilefold.attention(q, k, v, score_mod=slanted, score_args=(slopes,))
    assert torch.equal(first, tilefold.attention(q, k, v, score_mod=slanted, score_args=(slopes.clone(),)))
    for reach in (1, 16, 1000):  # of which Triton would compile three
        twin = reference.attention(q[:, -64:], k, v, mask_mod=sliding_twin, mask_args=(reach,))
        plain = reference.attention(q[:, -64:], k, v, dtype=BF, mask_mod=sliding_twin, mask_args=(reach,))
        out = tilefold.attention(q, k, v, mask_mod=sliding, mask_args=(reach,))
        judge(out[:, -64:], twin[0], plain[0], f"out {reach}")


@pytest.mark.parametrize("dim", [40, 64, 128])
def test_tanh_by_one_instruction(dim):
    """As the softcap that is built in, forward and backward, in the kernels for sm_90."""
    tensors = qkv(2, 333, 1001, 4, 2, dim, dtype=BF, device=DEVICE)
    capped = {"score_mod": softcap_approximate, "score_args": (2.0,)}
    out = tilefold.attention(*tensors, **capped, plan=hopper_plan(tilefold.attention_plan(*tensors, **capped)))
    wanted, plain = (reference.attention(*tensors, softcap=2.0, **how)[0] for how in ({}, {"dtype": BF}))
    judge(out, wanted, plain, "out")
    dout, _ = upstream(tensors[0], tensors[2], lse=False)
    exact, rounded = (oracle(tensors, dout, None, dtype, softcap=2.0) for dtype in (torch.float64, BF))
    planned = tilefold.attention_backward_plan(*tensors, **capped)
    for plan in (planned, planned.with_tiles(kernel="attention_backward_reduce", options=ReduceOptions(late=True))):
        judged(gradients(tensors, dout, None, backward_plan=plan, **capped), exact, rounded, plan.kernel)


def test_a_mod_that_cannot_be_inlined_runs_in_a_portable_kernel():
    q, k, v = qkv(2, 4096, 4096, 16, 4, 64, dtype=BF, device=DEVICE)
    plan = tilefold.attention_plan(q, k, v, score_mod=filled)
    assert plan.kernel != HOPPER
    assert any(entry.what == HOPPER and "does not compile with this score_mod" in entry.why for entry in plan.rejected)
    out = tilefold.attention(q, k, v, score_mod=filled)
    judge(
        out[:, :64], reference.attention(q[:, :64], k, v)[0], reference.attention(q[:, :64], k, v, dtype=BF)[0], "out"
    )
