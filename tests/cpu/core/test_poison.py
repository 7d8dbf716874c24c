"""Fresh memory really is poisoned in every test, and only where it should be."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 4, dtype=dtype)
    assert torch.empty(3, 4, dtype=dtype).isnan().all()
    assert torch.empty_like(like).isnan().all()
    assert torch.empty_strided((3, 4), (8, 1), dtype=dtype).isnan().all()
    assert like.new_empty(5).isnan().all()
    assert like.new_empty_strided((2, 2), (2, 1)).isnan().all()
    assert torch.empty(3, dtype=dtype, requires_grad=True).isnan().all()


def test_fresh_integers_are_left_alone() -> None:
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32


@pytest.mark.no_poison
def test_a_test_can_do_without() -> None:
    assert "allocate_nan" not in repr(torch.empty)
    assert "allocate_nan" not in repr(torch.Tensor.new_empty)
