"""Attention over KV caches, appending, rotary embedding and merging: the kernels' tests in plain torch."""

import pytest
import torch

from cases.invariant import WAYS, draw
from tilefold.cpu import ordered
from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

globals().update(
    again(
        "test_decode",
        "equal_sequences rows pages masks window_sequences_shorter_than_queries scores padding "
        "packed_queries low_precision bytes all_bytes_and_large_queries values_are_part_of_keys "
        "many_rows batch_index_and_strides check_names_the_entry nothing_there",
    )
)
globals().update(
    again(
        "test_cache_append",
        "coded_caches_bit_for_bit every_rounding rotary_turns_keys_and_queries "
        "coded_and_turned_is_rounded_once strides nothing_to_do quantize_kv wrong_arguments "
        "compiled",
    )
)
globals().update(
    again(
        "test_rotary_kernel",
        "against_the_oracle offsets_steps_and_the_table_s_end strides_and_packed_sequences gradient "
        "compiled wrong_arguments",
    )
)
globals().update(
    again(
        "test_shared_prefix",
        "merge merge_strides_and_packed merge_refuses shared_prefix a_prefix_in_8_bits "
        "packed_queries_and_nothing_behind_the_prefix caches_by_index_and_strided_queries",
    )
)
globals().update(
    again(
        "test_invariant",
        "dense caches bytes_with_halves values_that_are_part_of_the_keys packed_queries_and_pads nothing strides masks_and_rules "
        "gradients_are_those_of_the_bits contexts refusals",
    )
)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_bits(way, seed, device):  # noqa: F811
    """torch's products follow shapes; those of numerics="invariant" do not."""
    way(draw(seed, device, 90, (torch.float32, torch.bfloat16)))


def test_the_function_s_parts():
    """Powers and logarithms that do not depend on where a number lies, to some units in the last place."""
    x = torch.cat([torch.linspace(-126, 127, 5001), torch.linspace(-1, 1, 2001)])
    assert ((ordered.exp2(x).double() / x.double().exp2()) - 1).abs().max() < 2.0**-22
    assert ordered.exp2(torch.tensor([-torch.inf, 0.0, torch.nan])).isnan().tolist() == [False, False, True]
    assert ordered.exp2(torch.tensor([-torch.inf, 0.0, -127.0])).tolist() == [0.0, 1.0, 0.0]
    y = torch.linspace(0.1, 5000, 5001)
    torch.testing.assert_close(ordered.log2(y).double(), y.double().log2(), rtol=2.0**-23, atol=2.0**-23)
    torch.testing.assert_close(ordered.tanh(x).double(), x.double().tanh(), rtol=2.0**-21, atol=0)
    a, b = torch.randn(3, 5, 70), torch.randn(3, 9, 70)
    torch.testing.assert_close(ordered.product(a, b), a @ b.mT, rtol=1e-5, atol=1e-5)
