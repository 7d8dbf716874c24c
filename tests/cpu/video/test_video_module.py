"""SparseVideoAttention: its parameters against fp64 autograd, how it starts, and what a torch module has to live with."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilefold
from cases import judge, one_graph, rand, same
from cases.refusals import refuses
from cases.video import gradients_held, oracle_of
from tilefold import reference
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.nn import CoarseProjection, Gate, Rotary3D, SparseVideoAttention, rotary
from tilefold.sparse import BlockIndex, CoarseOptions, GridTiling, SelectOptions, video_window

CUBE = (2, 2, 4)
GRID, RAGGED, SMALL = (4, 2, 8), (3, 3, 6), (3, 2, 6)  # 4 blocks of 16; 8, most of them cut; 4, most of them cut
DIM, HEADS = 32, 2


def module(grid=GRID, device="cpu", shake=True, **options):
    """A module, its parameters away from their start if `shake`."""
    made = SparseVideoAttention(DIM, HEADS, **{"kv_heads": 1, "grid": grid, "cube": CUBE, "device": device, **options})
    if shake:
        with torch.no_grad():
            for p in made.parameters():
                p.add_(torch.randn_like(p, device="cpu").to(p) * 0.1)
    return made


def tokens(grid, batch=1, **kind):
    return rand(batch, grid[0] * grid[1] * grid[2], DIM, **kind)


OPTIONS = {
    "block": {},
    "block, ragged, per head": {"grid": RAGGED, "coarse_per_head": True, "kv_heads": 2, "qk_norm": True},
    "dense, ragged": {"grid": RAGGED, "coarse": "dense", "gate_coarse": "sigmoid", "gate_fine": "sigmoid"},
    "dense, per head": {
        "coarse": "dense",
        "coarse_per_head": True,
        "kv_heads": 2,
        "qkv_bias": False,
        "out_bias": False,
    },
    "pooled": {"coarse": CoarseOptions("pooled"), "gate_coarse": "head", "gate_fine": "head"},
    "no gates, no rotary": {"gate_coarse": None, "gate_fine": None, "rotary": None, "scale": 0.5},
    "top k, split rotary": {"select": SelectOptions("top_k", top_k=2), "rotary": Rotary3D(100.0, (4, 4, 4), False)},
    "no coarse, ragged": {"grid": RAGGED, "coarse": None},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_gradients_against_fp64(name, device):
    """Of x and of every parameter, over the lists that were selected."""
    made = module(device=device, **OPTIONS[name])
    x = tokens(made.grid, device=device)
    gradients_held(made, x)


def test_state_dict_names():
    """A name here is a promise: checkpoints hold it."""
    shapes = {n: list(t.shape) for n, t in module(qk_norm=True).state_dict().items()}
    assert shapes == {
        "qkv.weight": [64, 32],
        "qkv.bias": [64],
        "norm_q.weight": [16],
        "norm_k.weight": [16],
        "coarse.weight_k": [16],
        "coarse.weight_v": [16],
        "gate_coarse.weight": [2, 32],
        "gate_coarse.bias": [2],
        "gate_fine.weight": [2, 32],
        "gate_fine.bias": [2],
        "out.weight": [32, 32],
        "out.bias": [32],
    }
    options = {"coarse_per_head": True, "kv_heads": 2, "gate_coarse": "head", "gate_fine": None, "qkv_bias": False}
    made = module(RAGGED, coarse="dense", **options)
    shapes = {n: list(t.shape) for n, t in made.state_dict().items()}
    assert shapes == {
        "qkv.weight": [96, 32],
        "coarse.weight_k": [2, 8, 128],
        "coarse.weight_v": [2, 8, 128],
        "gate_coarse.bias": [2],
        "out.weight": [32, 32],
        "out.bias": [32],
    }
    assert not list(made.buffers())
    assert set(module(coarse=None).state_dict()) == {
        f"{n}.{p}" for n in ("qkv", "gate_fine", "out") for p in ("weight", "bias")
    }


@pytest.mark.parametrize("grid", [GRID, RAGGED], ids=["even", "ragged"])
def test_starts_as_dense_attention(grid, device):
    """With all blocks listed a fresh module is dense attention of its projections; the coarse gate has a gradient."""
    made = module(grid, device, shake=False, select=SelectOptions("top_p", top_p=1.0))
    x = tokens(grid, device=device)
    out = made(x)
    dense = SparseVideoAttention(
        DIM, HEADS, kv_heads=1, grid=grid, cube=CUBE, coarse=None, gate_fine=None, device=device
    )
    missing = dense.load_state_dict(made.state_dict(), strict=False)
    assert not missing.missing_keys
    assert torch.allclose(out, dense(x), atol=1e-6)
    tiling = made.tiling()
    q, k, v = (tiling.untile(t) for t in made.project(tiling.tile(x), tiling))
    exact, _ = reference.attention(q, k, v)
    assert torch.allclose(out, made.out(exact.float().flatten(2)), atol=1e-5)
    made(x).square().sum().backward()
    assert bool(made.gate_coarse.bias.grad.any())
    assert not bool(made.coarse.weight_v.grad.any()), "behind a closed gate"


def test_sigmoid_gates_start_nearly_there():
    for start, want in ((1.0, 0.98), (0.0, 0.02)):
        gate = Gate(DIM, HEADS, "sigmoid", start)
        assert torch.allclose(gate(rand(1, 5, DIM)), torch.full((1, 5, HEADS), want))


def test_dense_projection_starts_at_the_mean_of_each_blocks_tokens(device):
    tiling = GridTiling(RAGGED, CUBE)
    weight, _ = CoarseProjection(tiling.slots, tiling, device=device)()
    x = rand(tiling.tokens, 3, device=device)
    tiled = tiling.tile(x[None])[0]
    want = tiled.view(tiling.block_count, tiling.slots, 3).sum(1) / tiling.block_sizes(device)[:, None]
    assert torch.allclose(weight @ tiled, want, atol=1e-6)


def test_lists_that_are_given(device):
    tiling = GridTiling(RAGGED, CUBE)
    sizes = tiling.sizes(device)
    index = BlockIndex.from_predicate(
        video_window(tiling.blocks, (1, 0, 1)), seq_q=tiling.padded, seq_k=tiling.padded, block_q=16, block_k=16,
        block_sizes=sizes, query_sizes=sizes, device=device,
    )  # fmt: skip
    made = module(RAGGED, device, coarse=None)
    x = tokens(RAGGED, device=device)
    out, got = made(x, index=index, return_stages=True)
    assert got.index is index
    assert torch.allclose(out.double(), oracle_of(made, index)(x.double()), atol=1e-5)
    assert not torch.allclose(out, made(x), atol=1e-3), "without lists: all blocks"


def test_one_module_on_several_grids(device):
    made = module(None, device)
    for grid in (GRID, RAGGED, (1, 2, 4)):
        x = tokens(grid, device=device)
        out, got = made(x, grid, return_stages=True)
        assert out.shape == x.shape
        assert got.index.seq_q == GridTiling(grid, CUBE).padded


# ---------------------------------------------------------------- what a module has to live with


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters(dtype, device):
    made = module(SMALL, device).to(dtype)
    x = tokens(SMALL, device=device, dtype=dtype)
    out, got = made(x, return_stages=True)
    assert out.dtype == dtype
    twin = oracle_of(made, got.index)
    judge(out, twin(x.double()), reference.deviating(lambda: twin(x.double()), dtype, kept=dtype), "out")


def test_autocast(device):
    """Parameters and gradients stay fp32, the attention runs in bf16."""
    made = module(SMALL, device, qk_norm=True, gate_coarse="head")
    x = tokens(SMALL, device=device)
    with torch.autocast(x.device.type, torch.bfloat16):
        out, got = made(x, return_stages=True)
    assert got.fine_out.dtype == out.dtype == torch.bfloat16
    want = oracle_of(made, got.index)(x.double())
    assert float((out.double() - want).detach().norm() / want.detach().norm()) < 0.03
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in made.parameters())


@pytest.mark.no_poison
def test_compile_fullgraph(device):
    made = module(SMALL, device, qk_norm=True)
    x = tokens(SMALL, device=device)
    compiled = one_graph(made)
    results = []
    for fn in (made, compiled):
        out = fn(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(made.parameters()))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.no_poison
def test_compile_fullgraph_of_stages_and_another_grid(device):
    torch._dynamo.reset()
    made = module(None, device)
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    for grid in (GRID, SMALL):
        x = tokens(grid, device=device)
        (out, got), (want, other) = compiled(x, grid, return_stages=True), made(x, grid, return_stages=True)
        assert torch.allclose(out, want, atol=1e-6)
        assert torch.equal(got.index.counts, other.index.counts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, device):
    made = module(SMALL, device)
    x = tokens(SMALL, device=device).requires_grad_()
    (want,) = torch.autograd.grad(made(x).square().sum(), x)
    checkpoint(made, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, want)
    assert all(p.grad is not None for p in made.parameters())


def test_copies_and_pickles(device):
    made = module(SMALL, device, coarse="dense", qk_norm=True)
    x = tokens(SMALL, device=device)
    want = made(x)
    assert torch.equal(copy.deepcopy(made)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(made))(x), want)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other = module(SMALL, device, coarse="dense", qk_norm=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), want)


@pytest.mark.parametrize("coarse", ["block", "dense"])
def test_meta_device(coarse, device):
    """Made without memory, then materialised and reset: as made in place, module by module too, as sharding does it."""
    options = {"grid": SMALL, "coarse": coarse, "qk_norm": True, "gate_coarse": "sigmoid", "shake": False}
    with torch.device("meta"):
        made = module(**{**options, "device": "meta"})
    assert {t.device.type for t in made.parameters()} == {"meta"}
    made.to_empty(device=device)
    torch.manual_seed(1)
    made.reset_parameters()
    torch.manual_seed(1)
    want = module(**options, device=device)
    torch.manual_seed(1)
    want.reset_parameters()
    assert same(made.parameters(), want.parameters())
    for child in made.modules():
        if list(child.parameters(recurse=False)):
            child.reset_parameters()
    assert bool((made.gate_fine.bias == 1).all()) and not bool(made.gate_fine.weight.any())


@pytest.mark.no_poison
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the output of a Linear is a view
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_parameter_sharding(tmp_path, device):
    """FSDP over one process: parameters are shards between calls, gathered for each; results and gradients are the same."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        made = module(SMALL, device)
        x = tokens(SMALL, device=device)
        want = made(x)
        grads = torch.autograd.grad(want.square().sum(), list(made.parameters()))
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
        sharded = fully_shard(copy.deepcopy(made), mesh=mesh)
        out = sharded(x)
        assert torch.equal(out, want)
        out.square().sum().backward()
        for p, g in zip(sharded.parameters(), grads, strict=True):
            assert torch.equal(p.grad.full_tensor(), g)
    finally:
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- norms and gates without a call


def watched(one, how, seen):
    """Somebody who looks at the calls of a module."""
    if how == "pre":
        return one.register_forward_pre_hook(lambda *_: seen.append(how))
    if how == "hook":
        return one.register_forward_hook(lambda *_: seen.append(how))
    if how == "gradient":
        return one.register_full_backward_hook(lambda *_: seen.append(how))
    if how == "all":
        every = torch.nn.modules.module.register_module_forward_hook
        return every(lambda module, *_: seen.append(how) if module is one else None)
    forward, weight = one.forward, one.weight.detach().clone()

    def loaded(x):  # as offloading does: the weight is elsewhere but for a call
        seen.append(how)
        one.weight = torch.nn.Parameter(weight.clone())
        try:
            return forward(x)
        finally:
            one.weight = torch.nn.Parameter(weight.to("meta"))

    one.weight = torch.nn.Parameter(weight.to("meta"))
    one.forward = loaded


@pytest.mark.no_poison
@pytest.mark.parametrize("how", ["pre", "hook", "gradient", "all", "offloaded"])
def test_modules_that_somebody_watches_are_called(how, device, monkeypatch):
    made = module(SMALL, device, shake=True, qk_norm=True)
    x, fused = tokens(SMALL, device=device), []
    own = rotary.rms_norm_rotary
    monkeypatch.setattr(rotary, "rms_norm_rotary", lambda *args, **options: fused.append(1) or own(*args, **options))
    want = made(x)
    assert len(fused) == 2, "q and k, by a launch each"
    for one in (made.norm_q, made.gate_coarse):
        seen = []
        handle = watched(one, how, seen)
        got = made(x)
        if how == "gradient":
            got.sum().backward()
        assert seen == [how]
        torch.testing.assert_close(got, want)
        if handle is not None:
            handle.remove()
    assert len(fused) == {"all": 2, "offloaded": 4}.get(how, 5), "of the norms that nobody watched"


def test_norms_that_no_launch_takes(device):
    """Without a weight, of all heads together, with eps 0, of tables for more tokens, under vmap: by the module and torch."""
    x = torch.randn(2, 20, 2, 8, device=device)
    tables = tuple(torch.randn(20, 4, device=device) for _ in range(2))
    for norm, together in (
        (torch.nn.RMSNorm(16, elementwise_affine=False), True),
        (torch.nn.RMSNorm(8, eps=0.0, device=device), False),
        (torch.nn.LayerNorm(16, device=device), True),
        (None, False),
    ):
        y = x if norm is None else norm(x.flatten(-2)).view(x.shape) if together else norm(x)
        want = rotary.rotate(y, *tables, True)
        torch.testing.assert_close(rotary.normed(x, norm, tables, together=together), want)
        mapped = torch.vmap(
            lambda one, norm=norm, together=together: rotary.normed(one[None], norm, tables, together=together)[0]
        )
        torch.testing.assert_close(mapped(x), want)
    with pytest.raises(RuntimeError):
        rotary.normed(x[:, :19], None, tables)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dim": 0}, ValueRangeError, "dim must be at least 1, got 0"),
        ({"heads": 2.0}, DtypeError, "heads must be an int, got 2.0"),
        ({"heads": 4, "kv_heads": 3}, ValueRangeError, "kv_heads must divide heads, got 3 and 4"),
        ({"heads": 5}, ValueRangeError, "dim must be a multiple of heads if head_dim is not given, got 32 and 5"),
        ({"head_dim": 257}, ValueRangeError, "head_dim must be 1 to 256, got 257"),
        (
            {"cube": (2, 2, 2)},
            ValueRangeError,
            r"cube must hold a power of two of at least 16 tokens, got \(2, 2, 2\): 8",
        ),
        ({"cube": (3, 4, 4)}, ValueRangeError, "cube must hold a power of two"),
        ({"grid": (4, 4)}, ShapeError, r"grid must be three ints \(t, h, w\), got \(4, 4\)"),
        ({"coarse": "mean"}, ValueRangeError, "kind must be one of block, dense, pooled, got 'mean'"),
        ({"coarse": "dense", "grid": None}, ValueRangeError, "coarse is 'dense', .* got None"),
        ({"coarse": 1}, DtypeError, "coarse must be a CoarseOptions, got 1"),
        ({"select": "gini"}, DtypeError, "select must be a SelectOptions, got 'gini'"),
        ({"coarse": None, "select": SelectOptions()}, ValueRangeError, "select was given with coarse=None"),
        (
            {"coarse": None, "coarse_per_head": True},
            ValueRangeError,
            "coarse_per_head is True, but coarse None has no projections",
        ),
        ({"coarse": "pooled", "coarse_per_head": True}, ValueRangeError, "but coarse 'pooled' has no projections"),
        ({"rotary": 10000.0}, DtypeError, "rotary must be a Rotary3D, got 10000.0"),
        ({"rotary": Rotary3D(split=(8, 8, 8))}, ValueRangeError, "24 channels, more than the head dim 16"),
        ({"gate_fine": "tanh"}, ValueRangeError, "kind of a gate must be one of linear, sigmoid, head, got 'tanh'"),
        ({"scale": "1"}, DtypeError, "scale must be a number"),
    ],
)
def test_errors_of_the_constructor(options, error, text):
    with pytest.raises(error, match=text):
        SparseVideoAttention(**{"dim": DIM, "heads": HEADS, "grid": GRID, "cube": CUBE, **options})


def test_errors_of_the_call():
    made, x = module(None), tokens(GRID)
    refuses(DtypeError, "x must be a torch.Tensor, got list", made, [x], GRID)
    refuses(ValueRangeError, "grid is None", made, x)
    refuses(ShapeError, "x has shape (1, 64, 32), expected [batch, 54, 32]: the tokens of grid", made, x, RAGGED)
    with pytest.raises(ValueRangeError, match="index was given, but this module selects its own lists"):
        made(x, GRID, index=tilefold.nn.sparse_video.whole_index(made.tiling(GRID), x.device))
    with pytest.raises(
        ShapeError, match=r"grid is \(3, 3, 6\), but the dense coarse projection was made for \(4, 2, 8\)"
    ):
        module(GRID, coarse="dense")(x, RAGGED)
