"""What was once wrong about gradients: where dout lies, which tensors get one, what is refused and when."""

import pytest
import torch

import tilefold
from cases import looped, one, qkv, rand, relative, same
from cases.refusals import refuses
from tilefold import sparse
from tilefold.ops import hopper
from tilefold.ops.backward import backward_parts
from tilefold.plan import AttentionProblem, SparseProblem, Tile, device_named, plan_attention_backward, plan_sparse
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward


def listed(seq_q, seq_k, device):
    keep = torch.ones(1, 1, -(-seq_q // 16), -(-seq_k // 16), dtype=torch.bool, device=device)
    return tilefold.BlockIndex.from_map(keep, block_q=16, block_k=16, seq_q=seq_q, seq_k=seq_k)


def test_a_part_of_a_larger_gradient_may_begin_anywhere(device):
    """torch.cat hands out contiguous parts at any address; boxes need multiples of 16 bytes."""
    whole = rand(3 + 2 * 16 * 2 * 16, dtype=torch.float16, device=device)
    dout = whole[3:].view(2, 16, 2, 16)
    assert dout.is_contiguous()
    assert dout.data_ptr() % 16
    got = backward_parts.readable(dout)
    assert got.data_ptr() % 16 == 0
    assert got.is_contiguous()
    assert torch.equal(got, dout)
    aligned = rand(2, 16, 2, 16, dtype=torch.float16, device=device)
    assert backward_parts.readable(aligned) is aligned
    summed = rand(1, device=device).expand(2, 16, 2, 16)
    assert backward_parts.readable(summed).is_contiguous()


def test_dout_at_any_address_gives_the_same_gradients(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 33, 40, 2, 2, 16, dtype=torch.float16, device=device))
    dout = rand(1, 33, 2, 16, dtype=torch.float16, device=device)
    for fn in (lambda: tilefold.attention(q, k, v), lambda: tilefold.sparse_attention(q, k, v, listed(33, 40, device))):
        head = rand(3, dtype=torch.float16, device=device).requires_grad_()
        want = torch.autograd.grad(fn(), (q, k, v), dout)
        joined = torch.cat([head, fn().flatten()])
        got = torch.autograd.grad(joined, (q, k, v), torch.cat([torch.zeros_like(head), dout.flatten()]))
        assert same(got, want)


@pytest.mark.no_poison
def test_compiled_sparse_attention_refuses_what_the_eager_one_refuses(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 16, 32, 1, 1, 16, device=device))
    index, table = listed(16, 32, device), rand(1, 65, device=device)
    mod, grad = tilefold.constant(relative), tilefold.constant(one)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(table, score_grad):
        return tilefold.sparse_attention(
            q, k, v, index, score_mod=mod, score_args=(table, 32), score_grad=score_grad
        ).sum()

    run(table, grad).backward()
    assert q.grad is not None
    # the compiler puts the refusal into an error of its own
    with pytest.raises(Exception, match=r"score_args\[0\] requires a gradient, but only q, k and v get one"):
        run(table.clone().requires_grad_(), grad).backward()
    run(table, None).backward()  # its derivative is made of its source


def test_functorch_refuses_what_gets_no_gradient(device):
    q, k, v = qkv(1, 16, 32, 2, 2, 16, device=device)
    index, table, slopes = listed(16, 32, device), rand(2, 65, device=device), rand(2, device=device).abs()
    hooks = {"score_mod": relative, "score_grad": one}
    calls = {
        "alibi_slopes": (lambda t: tilefold.attention(q, k, v, alibi_slopes=t).sum(), slopes),
        r"score_args\[0\]": (
            lambda t: tilefold.sparse_attention(q, k, v, index, score_args=(t, 32), **hooks).sum(),
            table,
        ),
    }
    for name, (fn, tensor) in calls.items():
        with pytest.raises(tilefold.Unsupported, match=f"{name} requires a gradient, but only"):
            torch.func.grad(fn)(tensor)


def test_functorch_asks_for_no_derivative_that_nobody_needs(device):
    """The gradient of something beside a call with a score_mod needs no derivative of it; that of the call does."""
    q, k, v = qkv(1, 16, 32, 2, 2, 16, device=device)
    mod = {"score_mod": looped}
    index = listed(16, 32, device)
    for fn in (
        lambda q: tilefold.attention(q, k, v, **mod).sum(),
        lambda q: tilefold.sparse_attention(q, k, v, index, **mod).sum(),
    ):
        got = torch.func.grad(lambda x, fn=fn: (x * fn(q).detach()).sum())(torch.ones((), device=device))
        assert got.isfinite()
        refuses(tilefold.Unsupported, "give score_grad", torch.func.grad(fn), q)


def test_masks_args_get_no_gradient_either(device):
    q, k, v = qkv(1, 16, 32, 1, 1, 16, device=device)

    def run(**options):
        return tilefold.attention(q, k, v, score_mod=relative, score_args=(rand(1, 65, device=device), 32), **options)

    with pytest.raises(
        tilefold.Unsupported,
        match=r"mask_args\[0\] requires a gradient, but only q, k, v, bias, sinks and score_args get one",
    ):
        run(mask_mod=relative, mask_args=(rand(1, 65, device=device).requires_grad_(), 32))


@pytest.mark.no_poison
def test_no_queries_and_keys_with_strides(device):
    """The dispatcher is told contiguous gradients: they must be, without queries, too, and dk and dv come together."""
    from tilefold.ops.call import Call
    from tilefold.ops.dense.library import ATTENTION

    q, k, v = qkv(2, 0, 5, 2, 2, 16, device=device)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert not k.is_contiguous()
    lse = rand(2, 2, 0, device=device)
    args = ([True, True, False, False, False], q, lse, q, lse, *ATTENTION.flat(q, k, v, Call()))
    torch.library.opcheck(ATTENTION.gradient_op, args)
    leaves = [t.clone().requires_grad_() for t in (q, k.contiguous(), v)]
    got = torch.autograd.grad(tilefold.sparse_attention(*leaves, listed(0, 5, device)).sum(), leaves)
    assert all(g.is_contiguous() and not g.any() for g in got)


@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_kinds_that_no_record_depends_on(name, device):
    q, k, v = qkv(1, 16, 32, 1, 1, 16, device=device)
    where = ()
    if name == "attention_varlen":
        q, k, v = (t[0] for t in (q, k, v))
        where = (*(torch.tensor([0, n], dtype=torch.int32, device=device) for n in (16, 32)), 16, 32)
    run = getattr(tilefold, name)
    with pytest.raises(tilefold.DtypeError, match="^return_lse must be a bool, got 'no'$"):
        run(q, k, v, *where, return_lse="no")
    with pytest.raises(tilefold.DtypeError, match="^backward_plan must be an AttentionBackwardPlan or None, got int$"):
        run(q, k, v, *where, backward_plan=3)


def test_a_sparse_plan_does_not_care_where_q_lies():
    made = SparseProblem(AttentionProblem(1, 256, 256, 2, 2, 64, 64), 64, 64, 4)
    from dataclasses import replace

    other = replace(made, attention=replace(made.attention, query_descriptors=False), descriptors=False)
    device = device_named("h200")
    plan_sparse(made, device, portable=True).check(other, device)
    pointers = plan_sparse_backward(made, device, portable=True).with_tiles(kernel="sparse_backward")
    pointers.check(other, device)
    with pytest.raises(tilefold.PlanError, match="the base or the strides of Q are not multiples of 16 bytes"):
        pointers.with_tiles(kernel="sparse_backward_box").check(other, device)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_warps": 3}, "queries.num_warps: must be a power of two from 1 to 32, got 3"),
        ({"num_stages": 9}, "queries.num_stages: must be from 1 to 8, got 9"),
        ({"maxnreg": 64}, "queries.maxnreg: must be None in a backward pass, got 64"),
    ],
)
def test_each_field_of_a_tile_is_named(fields, words):
    device, problem = device_named("h200"), AttentionProblem(1, 256, 256, 2, 2, 64, 64)
    plans = (
        plan_attention_backward(problem, device, (), portable=True),
        plan_sparse_backward(SparseProblem(problem, 64, 64, 4), device, True),
    )
    for plan in plans:
        tile = Tile(**{"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2, **fields})
        with pytest.raises(tilefold.PlanError, match=words):
            plan.with_tiles(queries=tile)
        refuses(tilefold.PlanError, "queries: must be a Tile, got 3 of type int", plan.with_tiles, queries=3)


def test_a_tangent_of_a_gate_is_not_lost(device):
    import torch.autograd.forward_ad as forward_ad

    x, gate = rand(1, 32, 1, 16, device=device), rand(1, 32, 1, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(gate, torch.ones_like(gate))
        with pytest.raises(tilefold.Unsupported, match="carries a forward-mode tangent"):
            sparse.sparse_video_attention(x, x, x, block=16, gate_fine=dual)


def test_a_cache_holds_what_kernels_read():
    with pytest.raises(tilefold.DtypeError, match="^dtype must be float16, bfloat16 or float32, got torch.float64$"):
        sparse.VideoCache(1, 160, 2, 16, block=16, dtype=torch.float64)


def test_a_launch_of_the_dispatcher_keeps_no_counter():
    """A compiled region may run in the memory pool of a graph, where nothing may be kept."""
    seen = []
    assert not hopper._PLACE.operator
    with hopper.inside_operator():
        seen.append(hopper._PLACE.operator)
        with hopper.inside_operator():
            pass
        seen.append(hopper._PLACE.operator)
        first, second = (hopper.work_counter(torch.device("cpu")) for _ in range(2))
    assert seen == [True, True]
    assert not hopper._PLACE.operator
    assert first is not second
    assert first.tolist() == second.tolist() == [0]


def test_vjp_of_dense_attention_is_the_gradient(device):
    """As docs/reference/features.md says; of block-sparse attention torch refuses it."""
    q, k, v = qkv(1, 20, 33, 2, 1, 16, device=device)
    dout = rand(1, 20, 2, 16, device=device)
    _, pull = torch.func.vjp(lambda *t: tilefold.attention(*t, causal=True), q, k, v)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(tilefold.attention(*leaves, causal=True), leaves, dout)
    assert same(pull(dout), want)
    index = listed(20, 33, device)
    with pytest.raises(NotImplementedError):
        torch.func.vjp(lambda *t: tilefold.sparse_attention(*t, index), q, k, v)[1](dout)
