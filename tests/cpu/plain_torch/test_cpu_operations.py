"""Operations in plain torch: the kernels' tests again, those named here of each file, and some of their own."""

import importlib
import sys

import pytest
import torch

import tilefold
from cases.invariant import WAYS, draw
from tilefold.cpu import ordered
from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")
AGAIN = {
    "test_attention": """bands dtypes tiles range_edges head_dims groups strides layout_bhsd unaligned_pointers empty
        dead_rows scale softcap alibi bias_and_mask bias_dtypes_and_strides sinks nan_stays_in_its_rows
        nan_survives_a_softcap enormous_windows infinite_scores same_bits_every_run""",
    "test_attention_backward": """bands range_edges dtypes head_dims groups strides dead_rows huge_scores empty
        only_what_is_asked only_lse_and_double_use same_bits_and_checkpoints in_place_changes_are_found""",
    "test_attention_dropout": """out_and_gradients packed mask seeds_come_from_the_generator checkpoints_and_same_bits
        compile refusals""",
    "test_attention_varlen": """lengths dtypes_and_dims strides maxima_may_be_loose rows_of_no_sequence_are_left_alone
        equals_dense offsets_that_do_not_begin_at_0_are_refused a_max_seqlen_below_the_longest_is_refused
        offsets_are_checked_in_the_interpreter""",
    "test_attention_compile": """fake_tensors_launch_nothing meta_tensors_give_shapes""",
    "test_masks": """lengths_of_a_prefix a_mask_that_is_used_again""",
    "test_sparse_layouts": """cases tails what_is_no_key_is_not_read rows_of_no_sequence_are_left_alone all_blocks_is_dense
        equals_one_call_a_sequence equals_contiguous_keys no_queries refusals gradients_over_pages_are_refused
        values_are_checked_in_the_interpreter""",
    "test_sparse_backward": """lists tails block_sizes the_mask_goes_by_block_and_not_by_place_in_the_list
        sizes_per_head_and_query_sizes shared_lists_and_strides gradient_of_a_sum only_what_is_asked only_lse empty
        same_bits packed_sequences""",
    "test_coarse": """kinds reductions flat_and_peaked_rows equal_rows dead_blocks_and_poisoned_padding query_sizes
        sizes_per_batch_and_head groups_of_heads lengths head_dims strides_and_layouts the_same_bits_every_run
        nothing_to_compute weights_of_the_mean_are_the_mean project attend_rows_is_coarse_over_rows_made_before""",
    "test_select": """kinds_of_rows lengths_of_rows bounds forced forced_by_a_map the_mass_of_forced_blocks_counts
        empty_blocks_have_no_score settings_per_head_and_row the_smallest_shares_are_shares ties_go_to_the_lower_block
        infinite_scores_come_first_and_have_no_mass minus_zero_is_zero gini nothing_to_do
        logits the_record_goes_on_to_attention""",
    "test_fuse": """gates gates_in_the_branches_dtype heads_first one_branch strides in_place nothing_to_compute
        only_what_is_wanted refusals""",
    "test_video_module": """lists_that_are_given one_module_on_several_grids""",
    "test_matmul": """layouts bias_and_activation batches a_bias_of_the_batch batch_strides sizes empty out_dtype
        eight_bits specials refusals refusals_of_batches""",
    "test_matmul_gradient": """matmul batches gradients_of_any_strides only_what_is_asked_for empty
        the_same_bits_every_run compile_fullgraph""",
    "test_lowbit": """the_dequantised_path_recovers_the_weight groups the_order_of_columns_is_undone against_fp64
        gradients strided_and_odd_activations""",
    "test_rms_norm": """against_the_oracle strides_and_a_wider_weight gradients_of_one_result
        the_same_bits_and_nothing compiled""",
    "test_rms_norm_rotary": """against_the_oracle sizes_and_partial_rotary slices_of_a_fused_projection
        it_is_the_norm_and_then_the_rotation the_same_bits_and_nothing only_what_is_asked compiled refusals""",
    "test_invariant_products": """matmul bmm lowbit what_is_refused""",
    "test_decode": """equal_sequences rows pages masks window_sequences_shorter_than_queries scores padding
        packed_queries low_precision bytes all_bytes_and_large_queries values_are_part_of_keys many_rows
        batch_index_and_strides check_names_the_entry nothing_there""",
    "test_cache_append": """coded_caches_bit_for_bit every_rounding rotary_turns_keys_and_queries
        coded_and_turned_is_rounded_once strides nothing_to_do quantize_kv wrong_arguments compiled""",
    "test_rotary": """against_the_oracle offsets_steps_and_the_table_s_end strides_and_packed_sequences
        gradient_kernel compiled wrong_arguments""",
    "test_shared_prefix": """merge merge_strides_and_packed merge_refuses shared_prefix a_prefix_in_8_bits
        packed_queries_and_nothing_behind_the_prefix caches_by_index_and_strided_queries""",
    "test_invariant": """dense caches bytes_with_halves values_that_are_part_of_the_keys packed_queries_and_pads
        nothing strides masks_and_rules gradients_are_those_of_the_bits contexts refusals""",
    "test_torch_door": """both_passes_in_every_memory_layout shapes_and_windows nothing_to_do a_gradient_from_sum
        varlen_attn dropout_is_the_same_in_both_passes what_torch_keeps_is_counted""",
}
for file, names in AGAIN.items():
    globals().update(again(file, names))

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


@pytest.mark.parametrize("seed", range(3))
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


door, original = (getattr(sys.modules["test_torch_door"], name) for name in ("door", "original"))


_counted = sys.modules["test_torch_door"]._counted
