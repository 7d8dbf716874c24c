"""Gradients of random problems against fp64 autograd: hypothesis looks for the shape and options that break."""

import pytest
import torch

from cases import dilated, dilated_twin, one, rand, relative, relative_twin
from cases.gradient import check_gradients
from examples import examples

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SIDE = st.one_of(st.none(), st.integers(4, 30))  # rows that see one key have gradient 0: no statistic
CHOICES = ["alibi", "bias", "mask", "sinks", "score_mod", "mask_mod", "softcap"]


def options_of(chosen, b, h, sq, sk, shared, device):
    """The options by name, with a bias that any of its dimensions may share, and the Python versions of the mods."""
    sizes = tuple(1 if share else n for share, n in zip(shared, (b, h, sq), strict=True))
    table = rand(h, 9, device=device)
    every = {
        "alibi": {"alibi_slopes": rand(b, h, device=device).abs()},
        "bias": {"bias": rand(*sizes, sk, device=device)},
        "mask": {"mask": rand(*sizes, sk, device=device) > -0.7},
        "sinks": {"sinks": rand(h, device=device)},
        "score_mod": {"score_mod": relative, "score_grad": one, "score_args": (table, 4)},
        "mask_mod": {"mask_mod": dilated, "mask_args": (3,)},
        "softcap": {"softcap": 2.5},
    }
    twins = {"score_mod": relative_twin, "mask_mod": dilated_twin}
    options = {name: value for each in sorted(chosen) for name, value in every[each].items()}
    return options, {name: twin for name, twin in twins.items() if name in chosen}


@pytest.mark.parametrize("packed", [False, True])
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(9, 33), st.integers(0, 12)), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    dims=st.tuples(st.integers(8, 32), st.integers(8, 32)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(SIDE, SIDE)),
    chosen=st.sets(st.sampled_from(CHOICES), max_size=2),
    shared=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    lse=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(6)
def test_problems(packed, lengths, heads, dims, dtype, causal, window, chosen, shared, lse, seed, device):
    torch.manual_seed(seed)
    (h, hk), batch = heads, len(lengths)
    lengths_q, more = zip(*(lengths if packed else [max(lengths)] * batch), strict=True)
    lengths_k = [n + m for n, m in zip(lengths_q, more, strict=True)]
    sq, sk = max(lengths_q), max(lengths_k)
    options, twins = options_of(chosen, batch, h, sq, sk, shared, device)
    rows = ((sum(lengths_q),), (sum(lengths_k),)) if packed else ((batch, sq), (batch, sk))
    q = rand(*rows[0], h, dims[0], dtype=dtype, device=device)
    k, v = (rand(*rows[1], hk, dim, dtype=dtype, device=device) for dim in dims)

    def offsets(each):
        return torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32, device=device)

    where = (offsets(lengths_q), offsets(lengths_k), sq, sk) if packed else None
    check_gradients(
        q, k, v, lse=lse, unjudged=("dsinks",), varlen=where, twins=twins, causal=causal, window=window, **options
    )
