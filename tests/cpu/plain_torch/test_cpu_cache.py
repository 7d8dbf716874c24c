"""Attention over KV caches, appending, rotary embedding and merging: the kernels' tests in plain torch."""

import pytest

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
