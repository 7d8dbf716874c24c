"""Gradients of dense attention on sm_90 with changes of scores, by the Gluon kernel that adds dq in memory, against the fp64
oracle and the portable kernels.

`-k first` runs every change once, in seconds."""

from dataclasses import replace

import pytest
import torch

import tilefold
from cases import qkv, rand, same
from cases.device import DEVICE, SM_90, compiled_once, followed, near
from cases.gradient import BOX_BACKWARD, gradients, judged, oracle, upstream, with_stored_ds
from cases.mods import alone, filled, sliding, sliding_twin, users
from tilefold import masks
from tilefold.plan.backward.attention_backward_reduce import KERNEL, ReduceOptions

pytestmark = [pytest.mark.no_poison, SM_90]
BF = torch.bfloat16
MASKS = [{}, {"causal": True}, {"window": (200, 50)}]
LENGTHS = ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000), (2000, 63))
LATE, EARLY = ReduceOptions(ordered=True, late=True), ReduceOptions(ordered=True)
STORED = replace(LATE, stored=True)
USERS = ("slanted", "relative", "squashed", "numbered", "dilated", "sliding")
BUILT_IN = ("softcap", "alibi", "bias", "bias of keys", "mask", "mask of heads", "mask of keys", "odd mask")
EACH = [(name,) for name in (*BUILT_IN, *USERS)]
TOGETHER = [
    ("softcap", "alibi"),
    ("softcap", "numbered"),
    ("alibi", "squashed", "sliding"),
    ("softcap", "alibi", "bias", "mask of heads", "relative", "dilated"),
]
SOME = [("softcap",), ("alibi",), ("mask",), ("squashed",), TOGETHER[-1]]


def changes(names, q, k):
    """-> options, and the Python twins of users' functions."""
    heads = q.shape[2]
    options, twins = {}, {}
    for name in names:
        if name == "softcap":
            options["softcap"] = 5.0
        elif name.startswith("bias"):
            shape = (1, heads, 1, k.shape[1]) if name == "bias of keys" else (q.shape[0], 1, q.shape[1], k.shape[1])
            dtype = torch.float32 if name == "bias of keys" else q.dtype
            options["bias"] = rand(*shape, dtype=dtype, device=DEVICE)
        elif name == "odd mask":  # no box reads it
            options["mask"] = torch.rand(1, heads, q.shape[1], k.shape[1] + 3, device=DEVICE)[..., 3:] < 0.5
        elif name.startswith("mask"):  # a third of the rows sees nothing
            rows = 1 if name == "mask of keys" else q.shape[1]
            shared = 1 if name == "mask" else heads
            mask = torch.rand(q.shape[0], shared, rows, -(-k.shape[1] // 16) * 16, device=DEVICE) < 0.5
            mask &= torch.rand(rows, 1, device=DEVICE) < (0.7 if rows > 1 else 2.0)
            options["mask"] = mask[..., : k.shape[1]]
        elif name == "sinks":  # one that weighs nothing, one that weighs all
            options["sinks"] = torch.tensor([(0.3, -60.0, 20.0, -2.0)[i % 4] for i in range(heads)], device=DEVICE)
        elif name == "alibi":
            options["alibi_slopes"] = torch.tensor([2.0 ** -(i % 8 + 1) for i in range(heads)], device=DEVICE)
        else:
            mod, twin, _ = users(name, q.shape[1], k.shape[1], q.shape[0], heads)
            options, twins = options | mod, twins | twin
    return options, twins


def plan_of(tensors, version, **options):
    return tilefold.attention_backward_plan(*tensors, **options).with_tiles(kernel=KERNEL, options=version)


def held(names, tensors, version=LATE, **options):
    """Hold the kernel to the oracle, and the one that makes the gradient of a bias, of enough numbers for a statistic."""
    made, twins = changes(names, *tensors[:2])
    options = options | made
    fixed = ("bias",) if min(tensors[0].shape[1], tensors[1].shape[1]) < 63 else ()
    if "bias" in options:
        options["bias"].requires_grad_(not fixed)
    dout, dlse = upstream(tensors[0], tensors[2])
    python = options | twins
    want = oracle(tensors, dout, dlse, torch.float64, fixed=fixed, **python)
    plain = oracle(tensors, dout, dlse, tensors[0].dtype, fixed=fixed, **python)
    if version.stored:
        plain = with_stored_ds(plain, tensors, dout, dlse, **python)
    got = gradients(tensors, dout, dlse, fixed=fixed, backward_plan=plan_of(tensors, version, **options), **options)
    note = f"{names} {[tuple(t.shape) for t in tensors]} {tensors[0].dtype} {version} {sorted(options)}"
    learned = [f"d{name}" for name in ("bias", "sinks") if name in options and name not in fixed]
    judged(got, want, plain, note, ("dq", "dk", "dv", *learned))


@pytest.mark.parametrize("dim", [32, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("names", EACH, ids="-".join)
def test_first(names, dim):
    """Two blocks of keys, a few tiles of queries."""
    held(names, qkv(1, 200, 250, 2, 1, dim, dtype=BF, device=DEVICE))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("names", EACH, ids="-".join)
def test_lengths(names, options, dim):
    for sq, sk in LENGTHS:
        held(names, qkv(2, sq, sk, 4, 2, dim, dtype=BF, device=DEVICE), **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("names", SOME, ids="-".join)
def test_fp16(names, dim):
    for sq, sk in LENGTHS:
        held(names, qkv(2, sq, sk, 4, 2, dim, dtype=torch.float16, device=DEVICE), causal=True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_together(names, options, dim):
    for sq, sk in ((333, 1001), (1001, 333)):
        held(names, qkv(2, sq, sk, 4, 2, dim, dtype=BF, device=DEVICE), **options)


@pytest.mark.parametrize("version", [EARLY, replace(LATE, ordered=False), replace(EARLY, ordered=False)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("names", SOME, ids="-".join)
def test_versions(names, dim, version):
    for options in MASKS[:2]:
        held(names, qkv(2, 333, 500, 4, 2, dim, dtype=BF, device=DEVICE), version, **options)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("names", [*SOME, ("bias",), ("sliding",)], ids="-".join)
def test_sinks(names, dim):
    """Beside changes of scores, and lists of what functions hide."""
    versions = [LATE, replace(EARLY, ordered=False)]
    if "mask" in names or "sliding" in names:
        versions += [replace(each, lists=True) for each in versions]
    for version in versions:
        for options in MASKS:
            held((*names, "sinks"), qkv(2, 333, 500, 4, 2, dim, dtype=BF, device=DEVICE), version, **options)


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 3), (7, 1)], ids=str)
@pytest.mark.parametrize("names", [("alibi",), ("slanted",), ("numbered",)], ids="-".join)
def test_heads(names, heads):
    for options in MASKS:
        held(names, qkv(3, 400, 700, *heads, 128, dtype=BF, device=DEVICE), **options)


def test_slopes_of_each_sequence_and_strides():
    fused = rand(2, 500, 3, 4, 128, dtype=BF, device=DEVICE).unbind(2)
    held(("relative", "sliding"), fused)
    slopes = torch.rand(4, 2, device=DEVICE).t()
    held(("softcap",), fused, alibi_slopes=slopes, causal=True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
@pytest.mark.parametrize(
    "names", [("softcap",), ("alibi",), ("bias",), ("mask",), ("slanted",), ("numbered",)], ids="-".join
)
def test_many_runs_and_the_portable_kernel(names, options, dim):
    """The plan takes it by itself; the same bits every run; what the portable kernels make, to rounding."""
    tensors = qkv(2, 4096, 4096, 16, 8, dim, dtype=BF, device=DEVICE)
    made, _ = changes(names, *tensors[:2])
    options = options | made
    plan = tilefold.attention_backward_plan(*tensors, **options)
    assert plan.kernel == KERNEL
    lists = names[0] in ("mask", "numbered")
    version = EARLY if names == ("mask",) else LATE
    assert plan.options == replace(version, lists=lists, apart=dim == 128 and len(options) > len(made) and not lists)
    dout, dlse = upstream(tensors[0], tensors[2])
    if "bias" in options:
        plan = tilefold.attention_backward_plan(*tensors, **options | {"bias": options["bias"].requires_grad_()})
    first = gradients(tensors, dout, dlse, **options)
    assert all(same(first, gradients(tensors, dout, dlse, **options)) for _ in range(20))
    assert near(first, gradients(tensors, dout, dlse, backward_plan=plan.with_tiles(kernel=BOX_BACKWARD), **options))


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("shape", [(1, 4), (6, 1), (1, 1), (6, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"layout": "bhsd"}], ids=str)
@pytest.mark.parametrize("version", [LATE, STORED], ids=str)
def test_biases_that_are_shared(options, shape, dim, version):
    """By sequences and by heads, each in shares or in one sum; with the mask of keys that pair biases come with; lengths that
    end inside of tiles; the tiles that the plan takes, and the same bits every run."""
    q, k, v = qkv(6, 300, 328, 4, 4, dim, dtype=BF, device=DEVICE)
    mask = (torch.rand(6, 1, 1, 328, device=DEVICE) < 0.8) | (torch.arange(328, device=DEVICE) == 0)
    bias = rand(*shape, 300, 328, dtype=BF, device=DEVICE).requires_grad_()
    if "layout" in options:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    dout, dlse = upstream(q, v, options.get("layout", "bshd"))
    options = options | {"bias": bias, "mask": mask}
    plan = plan_of((q, k, v), version, **options)
    got = gradients((q, k, v), dout, dlse, backward_plan=plan, **options)
    want = oracle((q, k, v), dout, dlse, torch.float64, **options)
    plain = oracle((q, k, v), dout, dlse, BF, **options)
    if version.stored:
        plain = with_stored_ds(plain, (q, k, v), dout, dlse, **options)
    judged(got, want, plain, f"{shape} {dim} {sorted(options)}", ("dq", "dk", "dv", "dbias"))
    assert all(same(got, gradients((q, k, v), dout, dlse, backward_plan=plan, **options)) for _ in range(3))
    other = plan.with_tiles(bias_shares=1)
    assert near(got, gradients((q, k, v), dout, dlse, backward_plan=other, **options))


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_stored_ds(options, dim):
    """dS in memory for the bias: behind ALiBi and before a function, in every version; what lists leave out is 0."""
    any_order, lists = replace(STORED, ordered=False), replace(STORED, lists=True)
    versions = [
        STORED,
        any_order,
        replace(STORED, late=False),
        replace(STORED, apart=True),
        replace(any_order, apart=True),
    ]
    for sq, sk in ((333, 1001), (64, 640)):
        for version in versions:
            held(("alibi", "bias", "squashed"), qkv(2, sq, sk, 4, 2, dim, dtype=BF, device=DEVICE), version, **options)
    for version in (STORED, lists, replace(lists, ordered=False)):
        held(("bias", "sliding"), qkv(2, 1001, 333, 4, 2, dim, dtype=torch.float16, device=DEVICE), version, **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS[:2], ids=str)
def test_stored_ds_is_planned(options, dim):
    """Beside the gradient of sinks; the same bits every run; a bias of more bits than q is summed up from fp32."""
    tensors = qkv(2, 1024, 1100, 8, 4, dim, dtype=BF, device=DEVICE)
    options = options | {"bias": rand(1, 8, 1024, 1100, dtype=BF, device=DEVICE).requires_grad_()}
    options["sinks"] = torch.randn(8, device=DEVICE).requires_grad_()
    plan = tilefold.attention_backward_plan(*tensors, **options)
    assert plan.stores_ds
    dout, dlse = upstream(tensors[0], tensors[2])
    first = gradients(tensors, dout, dlse, **options)
    assert all(same(first, gradients(tensors, dout, dlse, **options)) for _ in range(20))
    assert near(first, gradients(tensors, dout, dlse, backward_plan=plan.with_tiles(kernel=BOX_BACKWARD), **options))
    wide = options | {"bias": options["bias"].detach().float().requires_grad_()}
    assert not tilefold.attention_backward_plan(*tensors, **wide).stores_ds


@pytest.mark.parametrize("dim", [32, 128])
def test_a_bias_beside_a_prefix(dim):
    """Each sequence has a band of its own; portable kernels by boxes, beside those by pointers."""
    q, k, v = qkv(3, 300, 328, 4, 2, dim, dtype=BF, device=DEVICE)
    lengths = torch.tensor([0, 70, 328], dtype=torch.int32, device=DEVICE)
    options = {"mask": masks.prefix(lengths), "bias": rand(1, 4, 300, 328, dtype=BF, device=DEVICE).requires_grad_()}
    dout, dlse = upstream(q, v)
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    assert plan.kernel == BOX_BACKWARD
    pointers = gradients((q, k, v), dout, dlse, backward_plan=plan.with_tiles(kernel="attention_backward"), **options)
    assert near(gradients((q, k, v), dout, dlse, **options), pointers)


def test_rows_without_keys():
    """Queries that see nothing get 0, and give nothing."""
    q, k, v = qkv(1, 600, 600, 2, 2, 128, dtype=BF, device=DEVICE)
    documents = (
        torch.zeros(1, 600, dtype=torch.int32, device=DEVICE),
        torch.ones(1, 600, dtype=torch.int32, device=DEVICE),
    )
    documents[0][:, 300:] = 1
    options = users("numbered", 600, 600, 1, 2)[0] | {"mask_args": documents}
    dout, _ = upstream(q, v)
    dq, dk, dv = gradients((q, k, v), dout, None, backward_plan=plan_of((q, k, v), LATE, **options), **options)
    assert not dq[:, :300].any() and dq[:, 300:].any()
    assert all(t.isfinite().all() for t in (dq, dk, dv))
    later = gradients((q[:, 300:], k, v), dout[:, 300:], None, causal=True)
    assert near((dq[:, 300:], dk, dv), later)


def test_graph():
    q, k, v = (t.requires_grad_() for t in qkv(1, 1024, 1024, 8, 2, 128, dtype=BF, device=DEVICE))
    options = changes(("softcap", "alibi", "mask", "relative", "numbered"), q, k)[0]
    dout = rand(1, 1024, 8, 128, dtype=BF, device=DEVICE)

    def step():
        return torch.autograd.grad(tilefold.attention(q, k, v, **options), (q, k, v), dout)

    assert tilefold.attention_backward_plan(q, k, v, **options).kernel == KERNEL

    def change():
        q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))
        options["score_args"][0].normal_()

    followed(step, *[change] * 3)


def test_one_compilation_serves_all_lengths_and_numbers():
    from tilefold.kernels.hopper.attention_backward_reduce import attention_backward_reduce as function

    def run(b, sq, sk, h, hk, reach, cap):
        tensors = qkv(b, sq, sk, h, hk, 64, dtype=BF, device=DEVICE)
        options = users("sliding", sq, sk)[0] | {"mask_args": (reach,), "softcap": cap}
        plan = plan_of(tensors, LATE, **options)
        gradients(tensors, *upstream(tensors[0], tensors[2]), backward_plan=plan, **options)

    sizes = (1, 320, 300, 2, 1, 7, 5.0), (2, 640, 1024, 16, 2, 1, 30.0), (3, 17, 777, 5, 5, 500, 20.0)
    compiled_once(function, [lambda at=at: run(*at) for at in sizes])


def test_what_does_not_compile_runs_in_the_portable_kernel():
    """A score_mod that makes a tensor of its own: a warning names the fault, and the gradients are the portable kernel's."""
    tensors = qkv(1, 777, 555, 2, 2, 128, dtype=BF, device=DEVICE)
    dout, dlse = upstream(tensors[0], tensors[2])
    plan = tilefold.attention_backward_plan(*tensors, score_mod=filled)
    assert plan.kernel == KERNEL
    with pytest.warns(RuntimeWarning, match="does not compile"):
        got = gradients(tensors, dout, dlse, score_mod=filled)
    other = gradients(tensors, dout, dlse, score_mod=filled, backward_plan=plan.with_tiles(kernel=BOX_BACKWARD))
    assert same(got, other)


# ---------------------------------------------------------------- lists of tiles

MASK_MODS = ("numbered", "dilated", "sliding", "alone", "by_head")
LISTS = replace(LATE, lists=True)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("name", MASK_MODS)
def test_lists_first(name, dim):
    """Tiles of every kind: hidden, partial, whole; blocks of keys that nobody sees."""
    held((name,), qkv(1, 700, 1100, 4, 2, dim, dtype=BF, device=DEVICE), LISTS)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("name", MASK_MODS)
def test_lists(name, options, dim):
    for sq, sk in ((1, 1), (127, 129), (1001, 333), (64, 2000), (2000, 63)):
        held((name,), qkv(2, sq, sk, 4, 2, dim, dtype=BF, device=DEVICE), LISTS, **options)
    for version in (
        replace(EARLY, lists=True),
        replace(LISTS, ordered=False),
        replace(EARLY, ordered=False, lists=True),
    ):
        held((name,), qkv(2, 333, 1001, 6, 2, dim, dtype=torch.float16, device=DEVICE), version, **options)


@pytest.mark.parametrize(
    "names", [("softcap", "alibi", "mask of heads", "relative", "dilated"), ("slanted", "by_head")], ids="-".join
)
def test_lists_behind_the_others(names):
    for options in MASKS:
        held(names, qkv(2, 333, 1001, 4, 2, 128, dtype=BF, device=DEVICE), LISTS, **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("names", [("mask",), ("odd mask",), ("odd mask", "sliding")], ids="-".join)
def test_lists_of_masks(names, dim):
    """A mask that no box reads is asked in partial tiles alone, as a mask_mod is."""
    version = replace(EARLY if names == ("mask",) else LATE, lists=True)
    for options in MASKS:
        for heads in ((4, 2), (8, 8)):
            tensors = qkv(2, 333, 1001, *heads, dim, dtype=BF, device=DEVICE)
            held(names, tensors, version, **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (256, 384), (96, 200)], ids=str)
def test_tables_of_blocks(block, dim):
    """Lists of the table, of any blocks; where it tells heads of a group apart it is asked in partial tiles."""
    for shape, heads, inner in (
        ((2, 1), (4, 2), True),
        ((1, 4), (4, 2), True),
        ((2, 4), (4, 4), True),
        ((1, 1), (4, 2), False),
    ):
        q, k, v = qkv(2, 700, 1100, *heads, dim, dtype=BF, device=DEVICE)
        kinds = torch.randint(0, 3, (*shape, -(-700 // block[0]), -(-1100 // block[1])), dtype=torch.uint8)
        kinds[:, :, 1] = 0
        sees = [masks.rule(sliding, (77,), sliding_twin)] * inner
        mask = masks.blocks(kinds.to(DEVICE), block, *sees)
        held((), (q, k, v), LISTS, mask=mask)


@pytest.mark.parametrize("dim", [64, 128])
def test_lists_are_planned_and_give_the_same_bits(dim):
    """By default, many blocks of keys that wait for one another; what changes in place changes the lists."""
    q, k, v = (t.requires_grad_() for t in qkv(2, 4096, 4096, 8, 2, dim, dtype=BF, device=DEVICE))
    numbers = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    options = {"mask_mod": alone, "mask_args": (numbers,)}
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    assert plan.kernel == KERNEL and plan.options == LISTS
    bare = plan.with_tiles(options=LATE)
    forward = tilefold.attention_plan(q, k, v, **options)
    forward = forward.with_tile(options=(*forward.options, "anew"))
    for documents in (1, 7, 64, 4096):
        numbers.copy_(torch.arange(4096) * documents // 4096)
        dout = torch.randn_like(q)
        made = [torch.autograd.grad(tilefold.attention(q, k, v, **options), (q, k, v), dout) for _ in range(10)]
        assert all(same(made[0], each) for each in made[1:])
        want = torch.autograd.grad(tilefold.attention(q, k, v, backward_plan=bare, **options), (q, k, v), dout)
        assert near(made[0], want)
    anew = plan.with_tiles(options=replace(LISTS, anew=True))
    numbers.data.zero_()  # torch counts no change
    got = torch.autograd.grad(tilefold.attention(q, k, v, backward_plan=anew, plan=forward, **options), (q, k, v), dout)
    assert near(got, torch.autograd.grad(tilefold.attention(q, k, v), (q, k, v), dout))
