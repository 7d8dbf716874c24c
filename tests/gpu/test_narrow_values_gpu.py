"""V narrower than K, at dims whose rows go through registers: what ptxas 12.8 got wrong until V's tile had K's swizzle."""

import pytest
import torch

from cases import check, packed, qkv
from cases.decode import Case, run
from cases.device import DEVICE

pytestmark = pytest.mark.no_poison
BF16 = torch.bfloat16
DIMS = [(40, 24), (34, 18), (33, 17), (100, 20), (20, 10), (63, 9), (24, 40), (64, 32)]


@pytest.mark.parametrize("tokens", [[65, 64], [33, 20]])
@pytest.mark.parametrize("page", [0, 3, 16, 128])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_prompts_over_caches(dim, dim_v, page, tokens):
    for options in ({"causal": True}, {"causal": True, "window": (127, 0)}):
        run(
            Case(
                [225, 131], tokens, heads=16, kv_heads=4, dim=dim, dim_v=dim_v, page=page, dtype=BF16, options=options
            ),
            DEVICE,
        )


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_dense_and_packed(dim, dim_v, dtype):
    for options in ({}, {"causal": True}, {"window": (100, 3)}):
        check(*qkv(2, 200, 333, 8, 2, dim, dim_v, dtype, DEVICE), tile=None, **options)
        tensors, offsets = packed([200, 0, 77], [333, 5, 140], 8, 2, dim, dim_v, dtype, DEVICE)
        check(*tensors, tile=None, varlen=offsets, **options)
