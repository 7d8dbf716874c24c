"""`tilefold.video.sparsify` on small models of Diffusers: dense at full density, a policy's lists against fp64, the way back."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.42", exc_type=ImportError, reason="needs diffusers 0.42")

import video_models as small
from cases import judge, one_graph
from cases.refusals import refuses
from tilefold import reference, video
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.sparse import BlockIndex, GridTiling

ALL = video.Pooled(sparsity=0.0)
HALF = video.Pooled(sparsity=0.5)
CASES = {
    "wan": (small.wan, {}),
    "wan, image, a time for each token": (small.wan, {"image": True, "times": True}),
    "hunyuan": (small.hunyuan, {}),
    "hunyuan, first frame given": (small.hunyuan, {"condition": "token_replace"}),
    "ltx": (small.ltx, {}),
    "ltx, a time for each token": (small.ltx, {"times": True}),
    "cogvideox": (small.cogvideox, {}),
    "cogvideox, no rotary": (small.cogvideox, {"rotary": False}),
}
POLICIES = {
    "pooled": HALF,
    "top p": video.Pooled(top_p=(0.6, 0.9)),
    "nabla": video.Pooled(top_p=0.3, window=(1, 0, 1)),
    "antidiagonal": video.Antidiagonal(sparsity=(0.5, 0.2), stride=4),
    "gini": video.Gini(0.3, 0.8),
    "sliding tile": video.SlidingTile((0, 1, 1)),
    "radial": video.Radial(0.4),
    "by head": video.ByHead((video.SlidingTile(0), video.Dense())),
    "dense at the ends": video.DenseFirst(HALF, first=1),
}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="small models on the CPU")


def made(name):
    family, options = CASES[name]
    return family(**options)


@pytest.mark.parametrize("name", CASES)
def test_full_density_is_dense(name, monkeypatch):
    """Output and gradients against the dense model in fp64: every block listed, and the policy that attends without lists."""
    model, inputs = made(name)
    weight = torch.randn(inputs["hidden_states"].shape)
    found = []
    for policy in (ALL, video.Dense()):
        video.sparsify(model, policy, cube=small.CUBE)
        found.append(small.gradients(model, inputs, weight))
        video.desparsify(model)
    twin, given = small.twin_of(model, monkeypatch), small.double_of(inputs)
    small.held(twin, given, weight, *found)


@pytest.mark.parametrize(
    ("family", "policy"),
    [("wan", "antidiagonal"), ("wan", "gini"), ("wan", "dense at the ends"), *(("hunyuan", one) for one in POLICIES)],
)
def test_policies_against_fp64(family, policy, monkeypatch):
    """Each policy's own lists followed by the oracle, with text, padding and two different videos in a batch."""
    options = {"layers": 2} if family == "wan" and policy == "dense at the ends" else {}
    if policy == "nabla":
        options["grid"] = small.GRID  # whose window leaves something out
    model, inputs = small.FAMILIES[family](**options)
    weight = torch.randn(inputs["hidden_states"].shape)
    recorded = small.Recorded()
    video.sparsify(model, POLICIES[policy], cube=small.CUBE, observe=recorded)
    got = small.gradients(model, inputs, weight)
    dense = small.Recorded()
    twin, given = small.twin_of(model, monkeypatch), small.double_of(inputs)
    sparse = twin.__dict__["_tilefold_sparse"]
    assert sparse.model is twin
    sparse.policy, sparse.observe = recorded.policy(), dense
    small.held(twin, given, weight, got)
    listed = [index for index in recorded.lists if index is not None]
    assert len(listed) == len(sparse.layers) - (policy == "dense at the ends")
    assert any(float(index.counts.float().mean()) < index.kv_blocks for index in listed), "nothing was left out"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((one, torch.bfloat16) for one in small.FAMILIES), *((one, torch.float16) for one in [*small.FAMILIES][1:])],
)
def test_half_precision(family, dtype, monkeypatch):
    """At full density a model in 16 bits is as near to fp64 as its dense form is held to be."""
    model, inputs = small.FAMILIES[family]()
    model = model.to(dtype)
    narrow = {n: x.to(dtype) if n.startswith(("hidden", "encoder_hidden", "pooled")) else x for n, x in inputs.items()}
    video.sparsify(model, ALL, cube=small.CUBE)
    got = small.sample(model, narrow)
    assert got.dtype == dtype
    video.desparsify(model)
    twin, given = small.twin_of(model, monkeypatch), small.double_of(narrow)

    def wanted():
        return small.sample(twin, given)

    judge(got, wanted(), reference.deviating(wanted, dtype, kept=dtype), "out")


@pytest.mark.parametrize("family", small.FAMILIES)
def test_desparsify_restores_the_bits(family):
    model, inputs = small.FAMILIES[family]()
    before, names = small.sample(model, inputs), list(model.state_dict())
    processors = {name: id(one) for name, one in model.attn_processors.items()}
    sparse = video.sparsify(model, HALF, cube=small.CUBE)
    assert list(model.state_dict()) == names, "a sparse model has the same parameters"
    assert len(sparse.layers) == (2 if family == "hunyuan" else 1)
    assert not torch.equal(small.sample(model, inputs), before)
    video.desparsify(model)
    video.desparsify(model)
    assert torch.equal(small.sample(model, inputs), before)
    assert {name: id(one) for name, one in model.attn_processors.items()} == processors
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 2, 8), (3, 5, 9)])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_grids(family, grid):
    """One token, whole cubes, cut cubes; the cube chosen for each grid; every token is its own again."""
    model, inputs = small.FAMILIES[family](grid, batch=1)
    before = small.sample(model, inputs)
    for cube in (None, small.CUBE):
        sparse = video.sparsify(model, ALL, cube=cube)
        assert torch.allclose(small.sample(model, inputs), before, rtol=1e-4, atol=1e-5)
        assert sparse.now.tiling.grid == grid
        video.desparsify(model)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_guidance_is_two_calls_or_one(family):
    """The rows of a batch do not see each other: both videos at once, and one after the other."""
    model, inputs = small.FAMILIES[family]()
    video.sparsify(model, HALF, cube=small.CUBE)
    both = small.sample(model, inputs)
    for row in range(2):
        one = {n: x[row : row + 1] if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        assert torch.allclose(small.sample(model, one), both[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_gradient_checkpointing_gives_the_same_bits(family):
    """Also where a pass over another grid comes between forward and backward: each recomputes in its own."""
    model, inputs = small.FAMILIES[family]()
    other = small.FAMILIES[family]((2, 4, 6), batch=1)[1]
    video.sparsify(model, HALF, cube=small.CUBE)
    wanted = small.gradients(model.train(), inputs, torch.ones_like(inputs["hidden_states"]))
    model.enable_gradient_checkpointing()
    latents = inputs["hidden_states"].detach().requires_grad_()
    out = model(**{**inputs, "hidden_states": latents}).sample
    model(**other)
    assert torch.equal(torch.autograd.grad(out.sum(), latents)[0], wanted["latents"])


@on_cpu
@pytest.mark.long
@pytest.mark.no_poison
@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_compiled(family):
    """One graph for the whole model; blocks compiled one by one."""
    model, inputs = small.FAMILIES[family]()
    video.sparsify(model, HALF, cube=small.CUBE)
    wanted = small.sample(model, inputs)
    compiled = one_graph(model)
    assert torch.allclose(small.sample(compiled, inputs), wanted, rtol=1e-4, atol=1e-5)
    refuses(Unsupported, "model is compiled already: sparsify the model itself", video.sparsify, compiled)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")  # their operators were compiled above
    assert torch.allclose(small.sample(model, inputs), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("torch_cpu")
def test_copies():
    """A deep copy is sparse by itself; a pickle holds no hook of another model."""
    model, inputs = small.wan()
    sparse = video.sparsify(model, HALF, cube=small.CUBE)
    wanted = small.sample(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(small.sample(other, inputs), wanted)
        mine = other.__dict__["_tilefold_sparse"]
        assert mine is not sparse
        mine.policy = ALL
        assert not torch.equal(small.sample(other, inputs), wanted)
        video.desparsify(other)
        assert torch.equal(small.sample(model, inputs), wanted)


@pytest.mark.usefixtures("torch_cpu")
def test_fused_projections():
    model, inputs = small.wan()
    video.sparsify(model, HALF, cube=small.CUBE)
    wanted = small.sample(model, inputs)
    model.fuse_qkv_projections()
    assert torch.allclose(small.sample(model, inputs), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("torch_cpu")
def test_tokens_are_turned_once_a_pass(monkeypatch):
    """Not once a layer: as often with three layers as with one."""
    tile, counts = GridTiling.tile, [0]

    def counted(self, x):
        counts[-1] += 1
        return tile(self, x)

    monkeypatch.setattr(GridTiling, "tile", counted)
    for layers in (1, 3):
        model, inputs = small.wan(layers=layers)
        video.sparsify(model, HALF, cube=small.CUBE)
        counts.append(0)
        small.sample(model, inputs)
    assert counts[1:] == [3, 3], "the tokens, cosines and sines"


# ---------------------------------------------------------------- steps


class Scheduler:
    """Its step_index is what Diffusers' schedulers have: None before the first step."""

    step_index = None


def pipeline():
    """What a pipeline of two transformers looks like, as Wan 2.2's."""
    first, inputs = small.wan()
    second, _ = small.wan()
    scheduler = Scheduler()
    parts = {"transformer": first, "transformer_2": second, "vae": torch.nn.Linear(1, 1), "scheduler": scheduler}
    return SimpleNamespace(components=parts, scheduler=scheduler), inputs


@pytest.mark.usefixtures("torch_cpu")
def test_a_pipeline_says_its_steps():
    pipe, inputs = pipeline()
    first, second = pipe.components["transformer"], pipe.components["transformer_2"]
    dense = small.sample(first, inputs)
    recorded = small.Recorded()
    made = video.sparsify(pipe, video.DenseFirst(video.KeepFor(HALF, 2), steps=1), cube=small.CUBE, observe=recorded)
    assert [one.model for one in made] == [first, second]
    found = []
    for step in (None, 1, 2, 3, 0):
        pipe.scheduler.step_index = step
        found.append(small.sample(first, inputs))
    assert torch.allclose(found[0], dense, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[4], found[0])
    lists = recorded.lists
    assert lists[0] is None and lists[1] is lists[2] and lists[3] is not lists[2] and lists[4] is None
    assert [site.step for site in recorded.sites] == [0, 1, 2, 3, 0]
    pipe.scheduler.step_index = 1
    small.sample(second, inputs)
    assert recorded.lists[-1] is not lists[1], "each model keeps its own lists"
    video.desparsify(pipe)
    assert torch.equal(small.sample(first, inputs), dense)


def test_a_model_alone_is_told_its_steps():
    model, inputs = small.wan()
    sparse = video.sparsify(model, video.DenseFirst(HALF, steps=1), cube=small.CUBE)
    with pytest.raises(ValueRangeError, match=r"DenseFirst\(.*\) needs the denoising step, which nobody said"):
        model(**inputs)
    sparse.step = 0
    first = small.sample(model, inputs)
    sparse.step = 1
    assert not torch.equal(small.sample(model, inputs), first)
    for wrong in (-1, 0.5, True):
        with pytest.raises(ValueRangeError, match="step must be a whole number of at least 0"):
            sparse.step = wrong


# ---------------------------------------------------------------- refusals


def test_refusals():
    model, inputs = small.wan()
    with pytest.raises(Unsupported, match="model is a Linear, which needs an adapter of its own: known are Wan"):
        video.sparsify(torch.nn.Linear(1, 1))
    refuses(DtypeError, "model must be a torch.nn.Module or a pipeline of Diffusers, got int", video.sparsify, 3)
    with pytest.raises(Unsupported, match="without a transformer that is known"):
        video.sparsify(SimpleNamespace(components={"vae": torch.nn.Linear(1, 1)}))
    with pytest.raises(ValueRangeError, match="adapter was given with a pipeline"):
        video.sparsify(pipeline()[0], adapter=video.Adapter())
    refuses(DtypeError, "policy must be a function, got 0.5", video.sparsify, model, 0.5)
    refuses(DtypeError, "observe must be a function, got 'x'", video.sparsify, model, observe="x")
    refuses(DtypeError, "adapter must be a tilefold.video.Adapter", video.sparsify, model, adapter=video.Adapter)
    for cube in ((3, 4, 4), (1, 1, 8), (0, 4, 4)):
        refuses(ValueRangeError, "cube must", video.sparsify, model, cube=cube)
    assert "_tilefold_sparse" not in model.__dict__, "nothing was changed"
    video.sparsify(model, lambda q, k, site: 3, cube=small.CUBE)
    refuses(ValueRangeError, "model is sparse already", video.sparsify, model)
    refuses(DtypeError, "must return a BlockIndex or None, got int", model, **inputs)
    sparse = model.__dict__["_tilefold_sparse"]
    keep = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    sparse.policy = lambda q, k, site: BlockIndex.from_map(keep, block_q=16, block_k=16)
    with pytest.raises(
        ShapeError, match=r"returned lists with .* = \(16, 16, 64, 64\), expected \(16, 16, 128, 128\) for grid"
    ):
        model(**inputs)
    model.blocks[0].attn1.processor._parallel_config = object()
    refuses(Unsupported, "does not take Diffusers' _parallel_config", model, **inputs)
    ltx, inputs = small.ltx()
    video.sparsify(ltx)
    refuses(Unsupported, "num_frames, height and width must be given to the model", ltx, **{**inputs, "height": None})
    cog, inputs = small.cogvideox()
    video.sparsify(cog)
    with pytest.raises(Unsupported, match="attention_mask was given"):
        cog(**inputs, attention_kwargs={"attention_mask": torch.ones(2, 1)})


def test_the_cube_of_a_grid_whose_sizes_are_symbols():
    def scaled(x):
        t, h, w = video.fitting_cube(x.shape)
        return x * (100 * t + 10 * h + w)

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="eager")
    for grid in ((5, 8, 8), (6, 8, 9), (21, 30, 52), (3, 4, 5)):
        x = torch.ones(grid)
        assert torch.equal(compiled(x), scaled(x))
