"""The kernel that makes every gradient of a KV head of a short sequence in one program, against fp64 autograd."""

from dataclasses import replace

import pytest
import torch

import tilefold
from cases import judge, packed, qkv, rand, same
from cases.gradient import WHERE, check_gradients, gradients, judged, learned, oracle, upstream, with_stored_ds
from cases.mods import slanted, slanted_twin, sliding, sliding_twin
from tilefold.errors import PlanError
from tilefold.ops.backward.attention_backward import _portable_parts
from tilefold.ops.call import Call
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.backward.attention_backward_short import KERNEL, MOST, short_refusal, short_tile, side_of_tile
from tilefold.plan.limits import Tile

HALF = torch.float16
BANDS = [{}, {"causal": True}, {"window": (17, 5)}, {"window": (None, 3)}, {"window": (0, 0)}]
H200, A100 = device_named("h200"), device_named("a100")
SMALL = Tile(16, 16, 1, 1)


def fitting(tile, lengths):
    """The tile, no larger than the kernel takes at these lengths."""
    return tuple(min(size, side_of_tile(n)) for size, n in zip(tile, lengths, strict=True))


@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 64), None], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (16, 16), (33, 50), (50, 19), (64, 64), (5, 64)], ids=str)
def test_lengths(lengths, tile, device):
    """Slices and tiles of keys that are full, cut, and more than one; rows before every key."""
    q, k, v = qkv(2, *lengths, 2, 2, 16, dtype=HALF, device=device)
    for i, band in enumerate(BANDS):
        few = ("dq", "dk") if 1 in lengths else ()
        check_gradients(
            q, k, v, lse=i % 2 == 1, tile=tile and fitting(tile, lengths), kernel=KERNEL, unjudged=few, **band
        )


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (7, 1)])
def test_groups(heads, kv_heads, dtype, device):
    for band in BANDS[:3]:
        check_gradients(
            *qkv(2, 37, 50, heads, kv_heads, 16, dtype=dtype, device=device), tile=(16, 64), kernel=KERNEL, **band
        )


@pytest.mark.parametrize(
    ("dims", "lengths"), [((3, 5), (21, 37)), ((24, 16), (130, 200)), ((40, 64), (70, 128)), ((128, 96), (64, 33))]
)
def test_head_dims(dims, lengths, device):
    tensors = qkv(1, *lengths, 2, 2, *dims, dtype=HALF, device=device)
    check_gradients(*tensors, tile=fitting((64, 64), lengths), kernel=KERNEL, causal=True)


def test_strides(device):
    """Cut from one projection, the other layout, every second row, and a gradient of out with strides of 0."""
    q, k, v = rand(2, 30, 3, 2, 32, dtype=HALF, device=device).unbind(2)
    check_gradients(q, k, v, kernel=KERNEL)
    got = check_gradients(*(t.transpose(1, 2) for t in (q, k, v)), kernel=KERNEL, layout="bhsd")
    assert all(g.is_contiguous() for g in got)
    q, k, v = (rand(1, 60, 2, 48, dtype=HALF, device=device)[:, ::2, :, 8:40] for _ in range(3))
    check_gradients(q, k, v, kernel=KERNEL)
    plan = tilefold.attention_backward_plan(q, k, v).with_tiles(kernel=KERNEL)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(tilefold.attention(*leaves, backward_plan=plan).sum(), leaves)
    ones = torch.ones_like(q)
    for name, a, b, c in zip(
        ("dq", "dk", "dv"), got, *(oracle((q, k, v), ones, None, d) for d in (torch.float64, q.dtype)), strict=True
    ):
        judge(a, b, c, name)


OPTIONS = {
    "alibi and softcap": {"alibi_slopes": True, "softcap": 5.0, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "mask": {"mask": True},
    "user": {"score_mod": slanted, "mask_mod": sliding},
    "prefix": {"prefix": True},
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_changes_of_scores(name, kv_heads, device):
    q, k, v = qkv(2, 37, 50, 4, kv_heads, 32, dtype=HALF, device=device)
    options, twins = dict(OPTIONS[name]), None
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(4, device=device)
    if "sinks" in options:
        options["sinks"] = rand(4, device=device)
    if "mask" in options:
        options["mask"] = rand(2, 1, 37, 50, device=device) > 0
        options["mask"][:, :, 7] = False
    if "score_mod" in options:
        options |= {"score_args": (torch.rand(4, device=device),), "mask_args": (20,)}
        twins = {"score_mod": slanted_twin, "mask_mod": sliding_twin}
    if "prefix" in options:
        options, at = {"mask": tilefold.masks.prefix(20)}, torch.arange(50, device=device)
        twins = {"mask": ((at < 20) | (at <= at[:37, None] + 13))[None, None]}
    check_gradients(q, k, v, tile=(16, 64), kernel=KERNEL, twins=twins, **options)


def test_dropout(device):
    """The same drawn factors as the kernels whose programs own rows."""
    q, k, v = qkv(2, 37, 50, 2, 2, 32, dtype=HALF, device=device)
    dout, dlse = upstream(q, v)
    options = {"dropout_p": 0.3, "dropout_seed": torch.tensor([7], device=device)}
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    want = gradients((q, k, v), dout, dlse, backward_plan=plan, **options)
    got = gradients((q, k, v), dout, dlse, backward_plan=plan.with_tiles(kernel=KERNEL), **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 4, 37, 50), (1, 4, 37, 50), (2, 1, 37, 50), (1, 1, 37, 50), (1, 4, 1, 50)], ids=str
)
def test_learned_bias(shape, dtype, device):
    """dS is stored where each query has a row, but of a shared bias in float16."""
    q, k, v = qkv(2, 37, 50, 4, 2, 16, dtype=dtype, device=device)
    bias = rand(*shape, dtype=dtype, device=device)
    dout, dlse = upstream(q, v)
    leaves, options = learned((q, k, v), {"bias": bias, "causal": True})
    plan = tilefold.attention_backward_plan(*leaves[:3], **options).with_tiles(kernel=KERNEL)
    shared = shape[:2] != (2, 4)
    assert plan.stores_ds == (shape[2] > 1 and not (shared and dtype == HALF))
    got = gradients((q, k, v), dout, dlse, backward_plan=plan, bias=bias, causal=True)
    want, plain = (oracle((q, k, v), dout, dlse, d, bias=bias, causal=True) for d in (torch.float64, dtype))
    if plan.stores_ds:
        plain = with_stored_ds(plain, (q, k, v), dout, dlse, bias=bias, causal=True)
    judged(got, want, plain, shape, ("dq", "dk", "dv", "dbias"))
    fixed = gradients((q, k, v), dout, dlse, fixed=("bias",), backward_plan=plan, bias=bias, causal=True)
    assert all(map(torch.equal, fixed, got))


def test_a_bias_behind_softcap_is_not_summed_from_ds(device):
    """dS has softcap's derivative, which lies before the bias."""
    q, k, v = qkv(2, 20, 20, 2, 2, 16, dtype=torch.bfloat16, device=device)
    bias = rand(2, 2, 20, 20, dtype=torch.bfloat16, device=device)
    check_gradients(q, k, v, tile=(32, 32), kernel=KERNEL, bias=bias, softcap=2.0)
    plan = plan_attention_backward(problem(49, 32, score_mods=("softcap", "bias")), H200, (1024, 8, 49))
    assert plan.kernel == KERNEL and not plan.stored
    with pytest.raises(PlanError, match="plan field stored: must be False: dS has the derivative of softcap"):
        plan.with_tiles(stored=True)


def test_out_whose_rows_lie_far_apart(device):
    """What all tiles read, out among it, decides the width of addresses."""
    q = torch.empty(1, 1 << 18, 64, 128, dtype=HALF, device="meta").transpose(1, 2)
    out = torch.empty(1, 64, 1 << 18, 128, dtype=HALF, device="meta")
    n = AttentionProblem(1, 64, 64, 1 << 18, 1 << 18, 128, 128, dtype="float16")
    plan = plan_attention_backward(n, H200)
    constants, _ = _portable_parts(1.0, (q, q, q, out), q, Call(), plan)
    assert plan.kernel == KERNEL and constants["WIDE"]


LENGTHS = [([20, 0, 33, 1], [10, 30, 0, 5]), ([5, 40, 16], [50, 2, 16]), ([1] * 5, [3] * 5), ([0, 0, 17], [0, 9, 64])]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences(lengths, heads, kv_heads, device):
    tensors, where = packed(*lengths, h=heads, hk=kv_heads, d=24, dv=16, dtype=HALF, device=device)
    for i, band in enumerate(BANDS):
        tile = fitting((16, 64 if heads > kv_heads else 16), where[2:])
        few = ("dq", "dk") if max(lengths[0]) == 1 else ()
        check_gradients(*tensors, varlen=where, lse=i % 2 == 0, tile=tile, kernel=KERNEL, unjudged=few, **band)


def test_changes_of_scores_of_packed_sequences(device):
    tensors, where = packed([20, 0, 33], [10, 30, 25], h=2, hk=1, d=16, dv=16, dtype=torch.bfloat16, device=device)
    check = {"tile": (32, 32), "kernel": KERNEL, "varlen": where}
    options = {"alibi_slopes": torch.rand(3, 2, device=device), "softcap": 5.0, "causal": True}
    check_gradients(*tensors, sinks=rand(2, device=device), **options, **check)
    check_gradients(*tensors, mask=rand(1, 1, 33, 30, device=device) > -0.5, **check)
    check_gradients(*tensors, bias=rand(1, 2, 33, 30, device=device), **check)
    mods = {
        "score_mod": slanted,
        "mask_mod": sliding,
        "score_args": (torch.rand(2, device=device),),
        "mask_args": (20,),
    }
    check_gradients(*tensors, twins={"score_mod": slanted_twin, "mask_mod": sliding_twin}, **mods, **check)
    loose = (*where[:2], where[2] + 20, where[3] + 20)
    check_gradients(*tensors, **check | {"varlen": loose, "tile": (32, 64)}, causal=True)


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize(("before", "behind"), [(0, 7), (40, 0), (3, 90)])
def test_rows_of_no_sequence(before, behind, kv_heads, device):
    """They get zeros, and the others the bits that they have without them."""
    tensors, (cu_q, cu_k, *longest) = packed(
        [20, 7, 0], [33, 12, 4], h=2, hk=kv_heads, d=24, dv=16, dtype=HALF, device=device
    )
    dout, dlse = upstream(tensors[0], tensors[2])

    def run(tensors, dout, dlse, add=0):
        where = (cu_q + add, cu_k + add, *longest)
        named = dict(zip(WHERE, where, strict=True))
        plan = tilefold.attention_backward_plan(*tensors, **named).with_tiles(kernel=KERNEL)
        return gradients(tensors, dout, dlse, where, backward_plan=plan, check=False)  # of the offsets

    def around(t, dim=0):
        sizes = [[n if at == dim else size for at, size in enumerate(t.shape)] for n in (before, behind)]
        first, last = (torch.full(size, torch.nan, dtype=t.dtype, device=device) for size in sizes)
        return torch.cat([first, t, last], dim)

    want = run(tensors, dout, dlse)
    got = run([around(t) for t in tensors], around(dout), around(dlse, 1), before)
    assert same([t[before : len(t) - behind] for t in got], want)
    assert not any(t[:before].any() or t[len(t) - behind :].any() for t in got)


def test_the_same_bits_every_run(device):
    q, k, v = qkv(2, 64, 64, 2, 2, 32, dtype=HALF, device=device)
    dout, dlse = upstream(q, v)
    plan = tilefold.attention_backward_plan(q, k, v).with_tiles(kernel=KERNEL)
    first, second = (gradients((q, k, v), dout, dlse, backward_plan=plan) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_the_sum_of_stored_ds_reads_what_is_there(device):
    """Tiles of dS and of its sum are the sequence's own; room behind them is not read into what is stored."""
    for tokens in (5, 16, 20, 33, 64):
        q, k, v = qkv(3, tokens, tokens, 2, 2, 16, dtype=torch.bfloat16, device=device)
        bias = rand(1, 2, tokens, tokens, dtype=torch.bfloat16, device=device)
        dout, dlse = upstream(q, v)
        leaves, options = learned((q, k, v), {"bias": bias})
        plan = tilefold.attention_backward_plan(*leaves[:3], **options).with_tiles(kernel=KERNEL)
        got = gradients((q, k, v), dout, dlse, backward_plan=plan, bias=bias)[3]
        want = oracle((q, k, v), dout, dlse, torch.float64, bias=bias)[3]
        assert (got - want).norm() < 6e-3 * want.norm(), tokens


def problem(tokens, dim=64, batch=1024, **more):
    return AttentionProblem(batch, tokens, tokens, 8, more.pop("kv_heads", 8), dim, dim, **more)


@pytest.mark.parametrize("dim", sorted(MOST))
def test_taken_up_to_what_was_measured(dim):
    most = MOST[dim]
    assert plan_attention_backward(problem(most, dim), H200).kernel == KERNEL
    assert plan_attention_backward(problem(most, dim), H200, portable=True).kernel == KERNEL
    assert plan_attention_backward(problem(most + 1, dim), H200).kernel != KERNEL
    assert plan_attention_backward(problem(64, dim), A100).kernel == KERNEL  # where nothing was measured
    assert plan_attention_backward(problem(65, dim), A100).kernel != KERNEL
    assert plan_attention_backward(problem(64, dim, score_mods=("alibi",)), H200).kernel == KERNEL
    assert plan_attention_backward(problem(65, dim, score_mods=("alibi",)), H200).kernel != KERNEL
    assert plan_attention_backward(problem(64, dim, varlen=True), H200).kernel == KERNEL
    assert not plan_attention_backward(problem(64, dim, varlen=True, score_mods=("bias",)), H200, (1, 8, 64)).stored
    assert short_tile(problem(16, dim)) == Tile(16, 16, 1 if dim == 32 else 2, 1)


def test_refused():
    """The plan names what the kernel does not serve."""
    for n, why in [
        (problem(64, dtype="float32"), "it multiplies float16 and bfloat16, not float32"),
        (problem(64, 160), "it has head dims up to 128"),
        (problem(65, 128), "it has up to 64 queries and keys at these head dims, not 65 and 65"),
        (problem(100, kv_heads=2), "with groups of heads it has up to 64 keys"),
    ]:
        assert short_refusal(n, H200) == why
        assert plan_attention_backward(n, H200).kernel != KERNEL
        with pytest.raises(PlanError, match=f"kernel.*{KERNEL} cannot be used: {why}"):
            plan_attention_backward(n, H200).with_tiles(kernel=KERNEL)
    assert plan_attention_backward(problem(64, batch=8, kv_heads=2), H200).kernel != KERNEL  # 16 programs
    assert plan_attention_backward(problem(64), device_named("interpreter")).kernel != KERNEL


UNFIT = [
    (Tile(64, 64, 3, 1), "num_warps"),
    (Tile(64, 64, 4, 0), "num_stages"),
    (Tile(64, 64, 4, 1, 96), "maxnreg"),
    (Tile(48, 64, 4, 1), "block_m"),
]


def test_fields_that_do_not_fit():
    plan = plan_attention_backward(problem(64), H200)
    for changes, name in [
        ({"keys": Tile(128, 64, 4, 1), "queries": Tile(128, 64, 4, 1), "scores": Tile(128, 64, 4, 1)}, "keys.block_m"),
        ({"queries": Tile(32, 64, 4, 1)}, "queries"),
        ({"heads_at_once": 1}, "heads_at_once"),
        ({"keys_at_once": 1}, "heads_at_once: must be 0, as keys_at_once, with attention_backward_short, got 0 and 1"),
        ({"stored": True}, "stored"),
        ({"stored": 1}, "stored: must be a bool"),
        ({"bias": (1, 8)}, "bias"),
        *((dict.fromkeys(("queries", "keys", "scores"), tile), f"keys.{field}") for tile, field in UNFIT),
    ]:
        with pytest.raises(PlanError, match=f"plan field {name}"):
            replace(plan, **changes)
    with pytest.raises(PlanError, match="plan field stored: must be False: it would take 8 GiB, more than 4"):
        plan_attention_backward(problem(64, 64, 2**17, score_mods=("bias",)), H200, (1, 8, 64)).with_tiles(stored=True)
    with pytest.raises(PlanError, match="plan field grid: more than"):
        replace(plan, problem=problem(1, 16, 2**30), queries=SMALL, keys=SMALL, scores=SMALL)
    grouped = plan_attention_backward(problem(64, kv_heads=2), H200)
    small = Tile(64, 32, 4, 1)
    with pytest.raises(PlanError, match="keys.block_n: must be at least the 64 keys"):
        replace(grouped, queries=small, keys=small, scores=small)


def test_plans_are_kept_and_say_what_they_cost():
    n = problem(49, 32, score_mods=("bias",))
    plan = plan_attention_backward(n, H200, (1, 8, 49))
    assert plan.kernel == KERNEL and plan.stored and AttentionBackwardPlan.from_json(plan.to_json()) == plan
    assert plan.scratch_bytes == 1024 * 8 * 64 * 64 * 2 + 4 * plan.bias_shares * 8 * 49 * 49 * (plan.bias_shares > 1)
    text = str(plan)
    assert "dS is stored" in text and "a program makes all of a KV head" in text
    assert (
        "all gradients by tiles of 64 x 64, 4 warps, 1 stage; queries in 1 slice" in text and "8192 programs on" in text
    )
    assert not plan.without_bias().stored and plan.without_bias() == plan_attention_backward(n, H200)


def test_errors_name_the_backward_plan(device):
    """A call may be given two plans."""
    q, k, v = qkv(2, 20, 20, 2, 2, 16, dtype=HALF, device=device)
    plan = tilefold.attention_backward_plan(q, k, v)
    with pytest.raises(PlanError, match="^backward_plan was made for batch=2, the call has batch=1"):
        tilefold.attention(*(t[:1].detach().requires_grad_() for t in (q, k, v)), backward_plan=plan)
    bias = rand(2, 2, 20, 20, dtype=HALF, device=device).requires_grad_()
    plan = tilefold.attention_backward_plan(q, k, v, bias=bias).with_tiles(kernel=KERNEL)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with pytest.raises(PlanError, match=r"^backward_plan stores dS in torch.float16 .*: with_tiles\(stored=False\)"):
        tilefold.attention(*leaves, bias=bias.detach().float().requires_grad_(), backward_plan=plan)
    fixed = plan.with_tiles(stored=False, scores=Tile(16, 16, 4, 1))
    out = tilefold.attention(*leaves, bias=bias.detach().float().requires_grad_(), backward_plan=fixed)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))
