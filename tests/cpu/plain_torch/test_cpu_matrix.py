"""Matrix products and weights of few bits: the kernels' tests in plain torch."""

import pytest

from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

globals().update(
    again(
        "test_matmul",
        "layouts bias_and_activation batches a_bias_of_the_batch batch_strides sizes empty "
        "out_dtype eight_bits specials refusals refusals_of_batches",
    )
)
globals().update(
    again(
        "test_matmul_gradient",
        "matmul batches gradients_of_any_strides only_what_is_asked_for empty "
        "the_same_bits_every_run compile_fullgraph",
    )
)
globals().update(
    again(
        "test_lowbit",
        "the_dequantised_path_recovers_the_weight groups the_order_of_columns_is_undone "
        "against_fp64 gradients strided_and_odd_activations",
    )
)
globals().update(again("test_invariant_products", "matmul bmm lowbit what_is_refused"))
