"""Dense and packed attention, forward and backward: the kernels' tests in plain torch."""

import importlib

import pytest

import tilefold
from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

globals().update(
    again(
        "test_attention",
        "bands dtypes tiles range_edges head_dims groups strides layout_bhsd unaligned_pointers "
        "empty dead_rows scale softcap alibi bias_and_mask bias_dtypes_and_strides sinks "
        "nan_stays_in_its_rows nan_survives_a_softcap enormous_windows infinite_scores "
        "same_bits_every_run",
    )
)
globals().update(
    again(
        "test_attention_backward",
        "bands range_edges dtypes head_dims groups strides dead_rows huge_scores empty "
        "only_what_is_asked only_lse_and_double_use same_bits_and_checkpoints "
        "in_place_changes_are_found",
    )
)
globals().update(
    again(
        "test_attention_dropout",
        "out_and_gradients packed mask seeds_come_from_the_generator checkpoints_and_same_bits compile refusals",
    )
)
globals().update(
    again(
        "test_attention_varlen",
        "lengths dtypes_and_dims strides maxima_may_be_loose rows_of_no_sequence_are_left_alone "
        "equals_dense offsets_that_do_not_begin_at_0_are_refused "
        "a_max_seqlen_below_the_longest_is_refused offsets_are_checked_in_the_interpreter",
    )
)
globals().update(
    again(
        "test_attention_compile",
        "fake_tensors_launch_nothing meta_tensors_give_shapes",
    )
)
globals().update(again("test_masks", "lengths_of_a_prefix a_mask_that_is_used_again"))
test_masks = importlib.import_module("test_masks")  # `again` has found its folder


@pytest.mark.parametrize(
    "name", ["documents", "prefix of each", "keys", "tensors", "prefix in a window", "either", "not"]
)
def test_masks_of_rules(name, device):  # noqa: F811
    """Rules that the library has in torch, too; a user's is a Triton function."""
    test_masks.test_forward(name, device)
    test_masks.test_gradients(name, device)


def test_masks_of_a_users_rule_are_refused(device):  # noqa: F811
    with pytest.raises(tilefold.Unsupported, match="mask_mod is not served by torch"):
        test_masks.test_forward("nested", device)
