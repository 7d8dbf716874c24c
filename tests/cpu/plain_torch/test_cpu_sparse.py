"""Block-sparse attention, forward and backward: the kernels' tests in plain torch."""

import pytest

from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

globals().update(
    again(
        "test_sparse_attention",
        "lists tails block_sizes sizes_per_head_and_query_sizes sizes_per_sequence "
        "blocks_of_several_tiles shared_lists_and_strides order_of_a_list all_blocks_is_dense empty "
        "refusals",
    )
)
globals().update(
    again(
        "test_sparse_backward",
        "lists tails block_sizes the_mask_goes_by_block_and_not_by_place_in_the_list "
        "sizes_per_head_and_query_sizes shared_lists_and_strides gradient_of_a_sum "
        "only_what_is_asked only_lse empty same_bits packed_sequences",
    )
)
globals().update(
    again(
        "test_sparse_varlen",
        "lengths dtypes_and_dims shared_lists_and_strides sizes "
        "what_lies_past_a_sequence_is_not_read rows_of_no_sequence_are_left_alone "
        "equals_one_call_a_sequence no_queries",
    )
)
globals().update(
    again(
        "test_sparse_paged",
        "page_sizes dtypes_and_layouts one_query_each more_queries_than_keys "
        "strides_and_shared_pages order_of_a_list_and_sizes equals_contiguous_keys no_queries "
        "gradients_are_refused values_are_checked_in_the_interpreter",
    )
)
globals().update(
    again(
        "test_sparse_defects",
        "no_nan_when_an_empty_block_comes_first every_dtype lengths_that_are_no_multiple_of_64",
    )
)
