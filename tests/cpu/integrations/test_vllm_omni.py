"""The plugin for vLLM-Omni, called as its dispatcher calls one: tensors [batch, tokens, heads, dim] and a flat dict."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tilefold
from cases import judge, rand
from tilefold import reference, video
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.integrations import vllm_omni
from tilefold.integrations.vllm_omni import sparse_attn

GRID = (3, 6, 10)  # of tokens: no multiple of any cube
TOKENS = GRID[0] * GRID[1] * GRID[2]


def geometry(samples=1, **more):
    """As the framework publishes it: a row a sample."""
    return {
        "latent_shape": torch.tensor([[3, 12, 20]] * samples),
        "patch_size": torch.tensor([[1, 2, 2]] * samples),
        **more,
    }


def qkv(batch=1, heads=2, kv_heads=1, dim=16, tokens=TOKENS, dtype=torch.float32):
    return [rand(batch, tokens, h, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


def sparse(q, k, v, policy, step=None):
    """The same by the parts of a sparse model."""
    tiling = tilefold.sparse.GridTiling(GRID, video.fitting_cube(GRID))
    q, k, v = (tiling.tile(one) for one in (q, k, v))
    lists = policy(q, k, video.Site(0, 1, q.shape[2], step, tiling, q.shape[-1] ** -0.5, {}))
    sizes = tiling.sizes(q.device)
    lists = lists.with_tensors(lists.indices, lists.counts, sizes, sizes)
    return tiling.untile(tilefold.sparse_attention(q, k, v, lists))


def test_the_entry_point_is_the_function():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    found = re.search(r'\[project.entry-points."vllm_omni.sparse_attn"\]\ntilefold = "(.+):(.+)"', text)
    assert found is not None
    assert found.groups() == (vllm_omni.__name__, sparse_attn.__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{"sparsity": 0.0}, {"top_p": 1.0}, {"sparsity": 0.0, "cube": [4, 4, 4]}], ids=str)
def test_with_every_block_it_is_dense_attention(params, dtype):
    q, k, v = qkv(dtype=dtype)
    out = sparse_attn(q, k, v, geometry() | params, is_causal=False, softmax_scale=0.2)
    oracle, _ = reference.attention(q, k, v, scale=0.2)
    plain, _ = reference.attention(q, k, v, scale=0.2, dtype=dtype)
    judge(out, oracle, plain, "out")


@pytest.mark.parametrize(
    ("params", "policy"),
    [
        ({"sparsity": 0.6}, video.Pooled(sparsity=0.6)),
        ({"top_p": 0.5, "window": 1}, video.Pooled(top_p=0.5, window=1)),
        ({"policy": video.SlidingTile(1)}, video.SlidingTile(1)),
        ({"policy": video.policy_to_json(video.Gini(0.1, 0.2))}, video.Gini(0.1, 0.2)),
    ],
    ids=str,
)
def test_a_policy_chooses_the_blocks(params, policy):
    q, k, v = qkv()
    out = sparse_attn(q, k, v, geometry(**params))
    assert torch.equal(out, sparse(q, k, v, policy))
    assert not torch.allclose(out, tilefold.attention(q, k, v), atol=1e-3)


def test_a_policy_of_a_file(tmp_path):
    q, k, v = qkv()
    path = tmp_path / "policy.json"
    path.write_text(video.policy_to_json(video.Pooled(sparsity=0.5)))
    assert torch.equal(sparse_attn(q, k, v, geometry(policy=str(path))), sparse(q, k, v, video.Pooled(sparsity=0.5)))


@pytest.mark.parametrize("step", [0, 4, 5, torch.tensor([4, 9]), torch.tensor([5, 5])], ids=str)
@pytest.mark.parametrize(
    "params", [{"sparsity": 0.6, "dense_steps": 5}, {"policy": video.DenseFirst(video.Pooled(sparsity=0.6), steps=5)}], ids=str
)  # fmt: skip
def test_first_steps_stay_dense(params, step):
    q, k, v = qkv()
    out = sparse_attn(q, k, v, geometry(2, denoise_step_idx=step, **params))
    early = int(step.min() if isinstance(step, torch.Tensor) else step) < 5
    dense = tilefold.attention(q, k, v)
    assert torch.allclose(out, dense, atol=1e-5) == early
    if not early:
        assert torch.equal(out, sparse(q, k, v, video.Pooled(sparsity=0.6)))


def test_gradients():
    q, k, v = (one.requires_grad_() for one in qkv())
    dout = rand(*q.shape)
    got = torch.autograd.grad(sparse_attn(q, k, v, geometry(sparsity=0.6)), (q, k, v), dout)
    want = torch.autograd.grad(sparse(q, k, v, video.Pooled(sparsity=0.6)), (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("params", "tokens", "text"),
    [
        ({}, TOKENS, "no grid is known"),
        (geometry(), TOKENS + 7, "has 180"),  # padding or text in the same sequence
        ({"grid": (3, 6, 11)}, TOKENS, "has 198"),
        ({"latent_shape": [[3, 12, 20], [3, 6, 40]], "patch_size": [[1, 2, 2]] * 2}, TOKENS, "no grid is known"),
    ],
    ids=str,
)
def test_without_a_grid_it_is_dense_and_says_so_once(params, tokens, text):
    vllm_omni._warn_dense.cache_clear()
    q, k, v = qkv(tokens=tokens)
    with pytest.warns(RuntimeWarning, match=text):
        out = sparse_attn(q, k, v, params | {"sparsity": 0.5})
    assert torch.equal(out, tilefold.attention(q, k, v, scale=q.shape[-1] ** -0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        sparse_attn(q, k, v, params | {"sparsity": 0.5})


def test_other_keys_are_ignored_and_a_grid_may_be_given():
    q, k, v = qkv()
    params = {"grid": GRID, "sparsity": 0.6, "kv_cache_dtype": "fp8", "total_denoise_steps": torch.tensor([50])}
    assert torch.equal(sparse_attn(q, k, v, params), sparse(q, k, v, video.Pooled(sparsity=0.6)))


@dataclass(frozen=True)
class ByStep:
    """A policy of the user's own."""

    def __call__(self, q, k, site):
        return video.Pooled(sparsity=0.1 * site.step)(q, k, site)


def test_a_users_policy_sees_the_step():
    q, k, v = qkv()
    out = sparse_attn(q, k, v, geometry(policy=ByStep(), denoise_step_idx=torch.tensor([6])))
    assert torch.equal(out, sparse(q, k, v, ByStep(), step=6))


@pytest.mark.parametrize(
    ("error", "text", "params", "options"),
    [
        (Unsupported, "is_causal=True is not served", {"sparsity": 0.5}, {"is_causal": True}),
        (ValueRangeError, "params must have sparsity or top_p", {}, {}),
        (ValueRangeError, "give sparsity or top_p", {"sparsity": 0.5, "top_p": 0.5}, {}),
        (ValueRangeError, "sparsity", {"sparsity": 1.5}, {}),
        (DtypeError, "must be a policy", {"policy": 3}, {}),
        (ValueRangeError, "no policy that policy_to_json wrote", {"policy": {"kind": "nothing"}}, {}),
        (ValueRangeError, "dense_steps", {"sparsity": 0.5, "dense_steps": -1}, {}),
        (ShapeError, "params\\['cube'\\] must be three", {"sparsity": 0.5, "cube": 64}, {}),
        (Unsupported, "goes by the layer", {"policy": video.KeepFor(video.Dense(), 3)}, {}),
        (Unsupported, "goes by the layer", {"policy": video.DenseFirst(video.Dense(), first=1)}, {}),
        (Unsupported, "goes by the layer", {"policy": video.DenseFirst(video.KeepFor(video.Dense(), 3), 2)}, {}),
    ],
    ids=str,
)
def test_refusals(error, text, params, options):
    with pytest.raises(error, match=text):
        sparse_attn(*qkv(), geometry() | params, **options)


def test_keys_of_other_tokens_are_refused():
    q, k, v = qkv()
    with pytest.raises(ShapeError, match="of the same tokens"):
        sparse_attn(q, k[:, :50], v[:, :50], geometry(sparsity=0.5))
