"""The stages of sparse video attention: the kernels' tests in plain torch."""

import pytest

from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

globals().update(
    again(
        "test_coarse",
        "kinds reductions flat_and_peaked_rows equal_rows dead_blocks_and_poisoned_padding "
        "query_sizes sizes_per_batch_and_head groups_of_heads lengths head_dims strides_and_layouts "
        "the_same_bits_every_run nothing_to_compute weights_of_the_mean_are_the_mean project "
        "attend_rows_is_coarse_over_rows_made_before",
    )
)
globals().update(
    again(
        "test_select",
        "kinds_of_rows lengths_of_rows bounds forced forced_by_a_map "
        "the_mass_of_forced_blocks_counts empty_blocks_have_no_score settings_per_head_and_row "
        "the_smallest_shares_are_shares ties_go_to_the_lower_block "
        "infinite_scores_come_first_and_have_no_mass minus_zero_is_zero gini nothing_to_do "
        "the_record_goes_on_to_attention",
    )
)
globals().update(
    again(
        "test_fuse",
        "gates gates_in_the_branches_dtype heads_first one_branch strides in_place "
        "nothing_to_compute only_what_is_wanted refusals",
    )
)
globals().update(
    again(
        "test_video_module",
        "output_and_gradients_against_fp64 lists_that_are_given one_module_on_several_grids",
    )
)
