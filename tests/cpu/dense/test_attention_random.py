"""Random problems against the fp64 oracle: hypothesis looks for the shape and options that break."""

import pytest
import torch

from cases import BOX, check, dilated, dilated_twin, rand, relative, relative_twin
from examples import examples

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIDE = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def problems(draw):
    """Sizes small enough for the interpreter, odd on purpose, and a random subset of the options."""
    group, kv_heads = draw(st.sampled_from([1, 2, 3, 4, 7])), draw(st.integers(1, 2))
    sizes = {
        "batch": draw(st.integers(1, 2)),
        "seq_q": draw(st.integers(1, 50)),
        "seq_k": draw(st.integers(0, 60)),
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
        "dim": draw(st.integers(1, 48)),
        "dim_v": draw(st.integers(1, 48)),
    }
    chosen = draw(
        st.sets(st.sampled_from(["alibi", "bias", "mask", "sinks", "score_mod", "mask_mod", "softcap"]), max_size=3)
    )
    window = draw(st.one_of(st.none(), st.tuples(SIDE, SIDE)))
    tile = draw(st.sampled_from([(16, 16), (16, 32), (32, 16)]))
    return sizes, draw(st.sampled_from(DTYPES)), draw(st.booleans()), window, chosen, tile, draw(st.integers(0, 2**31))


def build(sizes, dtype, causal, window, chosen, device):
    b, sq, sk, h = (sizes[n] for n in ("batch", "seq_q", "seq_k", "heads"))
    q = rand(b, sq, h, sizes["dim"], dtype=dtype, device=device)
    k = rand(b, sk, sizes["kv_heads"], sizes["dim"], dtype=dtype, device=device)
    v = rand(b, sk, sizes["kv_heads"], sizes["dim_v"], dtype=dtype, device=device)
    options, twins = {"causal": causal, "window": window}, {}
    if "softcap" in chosen:
        options["softcap"] = 2.5
    if "alibi" in chosen:
        options["alibi_slopes"] = rand(b, h, device=device).abs()
    if "bias" in chosen:
        options["bias"] = rand(1, h, sq, sk, device=device)
    if "mask" in chosen:
        options["mask"] = rand(b, 1, sq, sk, device=device) > -0.7
    if "sinks" in chosen:
        options["sinks"] = rand(h, device=device)
    if "score_mod" in chosen:
        options |= {"score_mod": relative, "score_args": (rand(h, 9, device=device), 4)}
        twins["score_mod"] = relative_twin
    if "mask_mod" in chosen:
        options |= {"mask_mod": dilated, "mask_args": (3,)}
        twins["mask_mod"] = dilated_twin
    return (q, k, v), options, twins


# In shards, so that processes share the work: 5 x 12 dense and 3 x 8 packed problems a run.
@pytest.mark.parametrize("shard", range(5))
@hypothesis.given(problem=problems())
@examples(9)
def test_dense(shard, problem, device):
    sizes, dtype, causal, window, chosen, tile, seed = problem
    rows = sizes["batch"] * sizes["seq_q"] * sizes["heads"]
    hypothesis.assume(rows >= 16 and rows * sizes["dim_v"] >= 64)  # fewer errors make no statistic
    torch.manual_seed(seed)
    tensors, options, twins = build(sizes, dtype, causal, window, chosen, device)
    boxes = dtype != torch.float32 and sizes["seq_k"] > 0 and sizes["dim"] % 8 == 0 and sizes["dim_v"] % 8 == 0
    check(*tensors, tile, BOX if boxes else "attention_forward", twins=twins, **options)


@pytest.mark.parametrize("shard", range(3))
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (7, 1)]),
    dims=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(SIDE, SIDE)),
    softcap=st.sampled_from([0.0, 3.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(6)
def test_varlen(shard, lengths, heads, dims, dtype, causal, window, softcap, with_sinks, seed, device):
    torch.manual_seed(seed)
    lengths_q, lengths_k = zip(*lengths, strict=True)
    hypothesis.assume(sum(lengths_q) * heads[0] >= 16 and sum(lengths_q) * heads[0] * dims[1] >= 64)

    def offsets(each):
        return torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32, device=device)

    q = rand(sum(lengths_q), heads[0], dims[0], dtype=dtype, device=device)
    k = rand(sum(lengths_k), heads[1], dims[0], dtype=dtype, device=device)
    v = rand(sum(lengths_k), heads[1], dims[1], dtype=dtype, device=device)
    where = (offsets(lengths_q), offsets(lengths_k), max(lengths_q), max(lengths_k))
    sinks = rand(heads[0], device=device) if with_sinks else None
    check(q, k, v, varlen=where, causal=causal, window=window, softcap=softcap, sinks=sinks)
