"""What select refuses, in which words, before anything is launched."""

import re

import pytest
import torch

from tilefold import sparse
from tilefold.errors import DtypeError, LayoutError, ShapeError, ValueRangeError

SCORES = torch.rand(2, 3, 4, 8)
HEADS = torch.rand(3)

REFUSED = {
    "no tensor": ((7,), {}, DtypeError, "scores must be a torch.Tensor, got int"),
    "dtype": ((SCORES.double(),), {}, DtypeError, "scores has dtype float64, accepted: float16, bfloat16, float32"),
    "rank": ((SCORES[0],), {}, ShapeError,
             "scores has 3 dimensions, shape (3, 4, 8); expected [batch, heads, q_blocks, kv_blocks]"),
    "last stride": ((SCORES.transpose(2, 3),), {}, LayoutError,
                    "scores needs a contiguous last dimension (stride 1), got strides (96, 32, 1, 8) "
                    "for shape (2, 3, 8, 4); call scores.contiguous() first if a copy is acceptable"),
    "method": ((SCORES,), {"method": "best"}, ValueRangeError, "method must be one of 'gini', 'top_p', 'top_k', got 'best'"),
    "another method's": ((SCORES,), {"top_k": 3}, ValueRangeError, "top_k is for method 'top_k', got method 'gini'"),
    "tau for top_p": ((SCORES,), {"method": "top_p", "top_p": 0.5, "tau_min": 0.1}, ValueRangeError,
                      "tau_min is for method 'gini', got method 'top_p'"),
    "no top_p": ((SCORES,), {"method": "top_p"}, ValueRangeError, "method 'top_p' needs top_p, got neither"),
    "no top_k": ((SCORES,), {"method": "top_k"}, ValueRangeError, "method 'top_k' needs top_k or sparsity, got neither"),
    "both top_k": ((SCORES,), {"method": "top_k", "top_k": 2, "sparsity": 0.5}, ValueRangeError,
                   "method 'top_k' needs top_k or sparsity, got top_k and sparsity"),
    "tau twice": ((SCORES,), {"tau": lambda g: g, "tau_max": 0.5}, ValueRangeError,
                  "tau takes the place of tau_min and tau_max, got tau_max, tau"),
    "tau a number": ((SCORES,), {"tau": 0.5}, DtypeError,
                     "tau must be a function of the Gini tensor, got float; for one share use method 'top_p'"),
    "tau range": ((SCORES,), {"tau_max": 1.5}, ValueRangeError, "tau_max must be at most 1, got 1.5"),
    "tau low": ((SCORES,), {"tau_min": -0.5}, ValueRangeError, "tau_min must be at least 0, got -0.5"),
    "tau order": ((SCORES,), {"tau_min": 0.75, "tau_max": 0.5}, ValueRangeError, "tau_min is 0.75, more than tau_max, 0.5"),
    "tau's result": ((SCORES,), {"tau": lambda g: g[..., None]}, ShapeError,
                     "what tau returns has shape (2, 3, 4, 1), expected [heads] = [3] or what broadcasts to "
                     "[batch, heads, Q blocks] = [2, 3, 4]"),
    "tau's type": ((SCORES,), {"tau": lambda g: None}, DtypeError,
                   "what tau returns must be a number, got None of type NoneType"),
    "top_p type": ((SCORES,), {"method": "top_p", "top_p": HEADS > 0}, DtypeError,
                   "top_p must be a number or a tensor of real numbers, got dtype bool"),
    "heads": ((SCORES,), {"method": "top_p", "top_p": torch.rand(4)}, ShapeError,
              "top_p has shape (4,), expected [heads] = [3] or what broadcasts to [batch, heads, Q blocks] = [2, 3, 4]"),
    "top_k kind": ((SCORES,), {"method": "top_k", "top_k": 2.5}, DtypeError, "top_k must be an int, got 2.5 of type float"),
    "top_k low": ((SCORES,), {"method": "top_k", "top_k": -1}, ValueRangeError, "top_k must be at least 0, got -1"),
    "sparsity": ((SCORES,), {"method": "top_k", "sparsity": 90}, ValueRangeError, "sparsity must be at most 1, got 90"),
    "min_blocks": ((SCORES,), {"min_blocks": -1}, ValueRangeError, "min_blocks must be at least 0, got -1"),
    "max_blocks": ((SCORES,), {"max_blocks": 0}, ValueRangeError, "max_blocks must be at least 1, got 0"),
    "min over max": ((SCORES,), {"min_blocks": 5, "max_blocks": 4}, ValueRangeError, "min_blocks is 5, more than max_blocks, 4"),
    "min over capacity": ((SCORES,), {"min_blocks": 5, "capacity": 4}, ValueRangeError, "min_blocks is 5, more than capacity, 4"),
    "capacity": ((SCORES,), {"capacity": 0}, ValueRangeError, "capacity must be at least 1, got 0"),
    "forced over max": ((SCORES,), {"max_blocks": 3, "local_window": 1, "force_first": 1}, ValueRangeError,
                        "max_blocks leaves room for 3 blocks a list, but force_first, force_self and local_window force up to 4"),
    "force_self": ((SCORES,), {"force_self": 1}, DtypeError, "force_self must be a bool, got 1 of type int"),
    "force_first": ((SCORES,), {"force_first": -1}, ValueRangeError, "force_first must be at least 0, got -1"),
    "local_window": ((SCORES,), {"local_window": -1}, ValueRangeError, "local_window must be at least 0, got -1"),
    "force dtype": ((SCORES,), {"force": torch.zeros(4, 8)}, DtypeError, "force must be a bool tensor, got float32"),
    "force type": ((SCORES,), {"force": "self"}, DtypeError, "force must be a bool tensor, got str"),
    "force shape": ((SCORES,), {"force": torch.zeros(8, 4, dtype=torch.bool)}, ShapeError,
                    "force has shape (8, 4), which does not broadcast to [batch, heads, Q blocks, KV blocks] = [2, 3, 4, 8]"),
    "block": ((SCORES,), {"block_k": 48}, ValueRangeError, "block_k must be a power of two and at least 16 tokens, got 48"),
    "length": ((SCORES,), {"seq_k": 449, "block_k": 128}, ShapeError,
               "scores has 8 KV blocks, shape (2, 3, 4, 8); expected 4 for seq_k 449 in blocks of 128"),
    "sizes": ((SCORES,), {"block_sizes": torch.zeros(7, dtype=torch.int32)}, ShapeError,
              "block_sizes has shape (7,), expected [kv_blocks]: dimension 0 (kv_blocks) is 7, should be 8"),
    "sizes dtype": ((SCORES,), {"block_sizes": torch.zeros(8)}, DtypeError, "block_sizes has dtype float32, accepted: int32"),
    "query sizes": ((SCORES,), {"query_sizes": torch.zeros(8, dtype=torch.int32)}, ShapeError,
                    "query_sizes has shape (8,), expected [q_blocks]: dimension 0 (q_blocks) is 8, should be 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    args, options, kind, text = REFUSED[name]
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        sparse.select(*args, **options)


def test_refused_in_words_of_their_own():
    meta = torch.zeros(3, device="meta")
    for name, options in {
        "top_p": {"method": "top_p", "top_p": meta},
        "force": {"force": meta.bool()[:, None, None]},
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is on meta, but scores is on cpu$"):
            sparse.select(SCORES, **options)


def test_gini_refuses_the_same():
    with pytest.raises(DtypeError, match="^scores has dtype int64, accepted: float16, bfloat16, float32$"):
        sparse.gini(SCORES.long())
