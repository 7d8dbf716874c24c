"""What the mask function makes of transformers' descriptions: nothing, a rule, or a dense mask; decoding reads no value."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="4.56", exc_type=ImportError, reason="needs the transformers extra")

import inspect

from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

import hf_models
from hf_models import made_by, make, padded
from tilefold.integrations import hf_attention, hf_mask
from tilefold.integrations.hf_mask import Rule, make_mask, read_rule
from tilefold.integrations.visible import Visible

OLDER = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


def facts(function, q, kv, start=0, growing=True, **others):
    """The arguments that transformers gives, as of the version that is installed; growing: the cache is a dynamic one."""
    if OLDER:
        at = {"cache_position": torch.arange(start, start + q), "allow_is_causal_skip": growing}
    else:
        offset = start if growing else torch.tensor(start)
        at = {"q_length": q, "q_offset": offset, "allow_is_causal_skip": growing or q > 1, "device": "cpu"}
    always = {"batch_size": 2, "kv_length": kv, "kv_offset": 0, "mask_function": function, "dtype": torch.float32}
    return {**always, **at, **others}


def dense(arguments):
    return hf_models.exact_mask(**arguments)


CAUSAL = masking_utils.causal_mask_function
LEFT = torch.tensor([[True] * 6, [False, False, True, True, True, True]])


def test_rules_are_read():
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    documents = torch.tensor([[0, 0, 1, 1]])
    packed = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(documents), sliding)
    assert read_rule(CAUSAL) == Rule(causal=True)
    assert read_rule(sliding) == Rule(causal=True, left=3)
    assert read_rule(sliding).window == (3, -1)
    assert read_rule(packed) == Rule(True, 3, None, documents)
    assert read_rule(masking_utils.and_masks(sliding, masking_utils.sliding_window_overlay(2))).left == 1
    assert read_rule(masking_utils.or_masks(sliding, CAUSAL)) is None
    assert read_rule(masking_utils.and_masks(sliding, masking_utils.padding_mask_function(documents))) is None
    assert read_rule(lambda batch, head, q, kv: kv <= q) is None
    if hasattr(masking_utils, "sliding_window_bidirectional_mask_function"):
        assert read_rule(masking_utils.bidirectional_mask_function) == Rule()
        both = masking_utils.sliding_window_bidirectional_mask_function(2)
        assert read_rule(both).window == (2, 2)
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        remapped = masking_utils.packed_sequence_compatibility_function(sliding, documents, documents)
        assert read_rule(remapped) == Rule(True, 3, None, documents)


def test_what_needs_no_mask():
    assert make_mask(**facts(CAUSAL, 6, 6)) is None
    assert make_mask(**facts(CAUSAL, 6, 6, attention_mask=torch.ones(2, 6, dtype=torch.bool))) is None
    assert make_mask(**facts(CAUSAL, 2, 6, start=4)) is None
    assert make_mask(**facts(CAUSAL, 1, 6, start=5)) is None


def test_windows_padding_and_static_caches_are_rules():
    window = make_mask(**facts(masking_utils.sliding_window_causal_mask_function(4), 6, 6))
    assert isinstance(window, Visible)
    assert (window.causal, window.window, window.end, window.keys, window.rows) == (True, (3, -1), 6, None, None)
    left = make_mask(**facts(CAUSAL, 6, 6, attention_mask=LEFT))
    assert torch.equal(left.keys, LEFT)
    prompt = make_mask(**facts(CAUSAL, 6, 32, growing=False, attention_mask=LEFT))
    assert prompt.end == 6
    assert torch.equal(prompt.keys, LEFT)
    assert prompt.shape == (2, 1, 6, 32)
    more = make_mask(**facts(CAUSAL, 3, 32, start=6, growing=False, attention_mask=torch.cat([LEFT, LEFT[:, -3:]], 1)))
    assert more.end == 9
    assert more.keys.shape == (2, 9)
    assert more.to("cpu").end == more.contiguous().end == 9
    assert "padding" in str(more)


def test_one_query_gets_lengths_and_padding():
    """Of every key of the cache: the host does not know how far it is filled."""
    for growing, kv, padding in ((True, 6, LEFT), (False, 32, LEFT), (False, 32, None)):
        arguments = facts(CAUSAL, 1, kv, start=5, growing=growing, attention_mask=padding)
        found = make_mask(**arguments)
        assert found.shape == (2, 1, 1, kv) and found.end == kv
        assert (found.lengths is None) == growing and (found.keys is None) == (padding is None)
        seen = torch.ones(2, kv, dtype=torch.bool) if found.keys is None else found.keys
        if found.lengths is not None:
            assert found.lengths.dtype == torch.int32
            seen = seen & (torch.arange(kv) < found.to("cpu").lengths[:, None])
            assert "lengths" in str(found)
        assert torch.equal(seen[:, None, None], dense(arguments))


def test_one_query_of_a_window_gets_a_row_of_booleans():
    arguments = facts(masking_utils.sliding_window_causal_mask_function(4), 1, 6, start=5, attention_mask=LEFT)
    assert torch.equal(make_mask(**arguments), dense(arguments))


def test_what_is_not_known_is_dense():
    mixed = masking_utils.or_masks(CAUSAL, masking_utils.sliding_window_overlay(2))
    for arguments in (
        facts(mixed, 6, 6, attention_mask=LEFT),
        facts(lambda batch, head, q, kv: (kv <= q) | (kv < 2), 6, 6),
        facts(CAUSAL, 6, 4),  # queries before the first key
    ):
        assert torch.equal(make_mask(**arguments), dense(arguments))


@pytest.mark.skipif(OLDER, reason="this transformers has no masks that see both ways")
def test_both_ways():
    both = masking_utils.bidirectional_mask_function
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert make_mask(**facts(both, 6, 6) | skips) is None
    padding = make_mask(**facts(both, 6, 6, attention_mask=LEFT) | skips)
    assert padding.shape == (2, 1, 6, 6)
    assert padding.stride(2) == 0
    assert torch.equal(padding, dense(facts(both, 6, 6, attention_mask=LEFT)))
    window = make_mask(
        **facts(masking_utils.sliding_window_bidirectional_mask_function(2), 6, 6, attention_mask=LEFT) | skips
    )
    assert (window.causal, window.window) == (False, (2, 2))
    # A model that reads its mask says so, and a decoder that is made to see both ways has layers that think otherwise.
    assert isinstance(make_mask(**facts(both, 6, 6) | skips | {"allow_is_bidirectional_skip": False}), torch.Tensor)
    seen = make_mask(**facts(both, 6, 6) | skips, config=type("Config", (), {"is_causal": False}))
    assert seen.causal is False


class Reads(TorchDispatchMode):
    """Counts the values that the host waits for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            Reads.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_reads_no_value(cache, device, monkeypatch):
    """Of the mask function and the layers, at every token after the prompt; generation itself asks whether to stop."""
    hf_models.register_exact()
    steps = []

    def watched(function):
        def call(*args, **kwargs):
            queries = args[1].shape[2] if len(args) > 1 else facts_length(kwargs)
            Reads.count = 0
            with Reads():
                result = function(*args, **kwargs)
            steps.append((queries, Reads.count))
            return result

        return call

    def facts_length(kwargs):
        return kwargs["cache_position"].shape[0] if "cache_position" in kwargs else kwargs["q_length"]

    monkeypatch.setitem(AttentionInterface._global_mapping, "tilefold", watched(hf_attention.attention_forward))
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "tilefold", watched(hf_mask.make_mask))
    model = made_by(make("gpt_oss", device), "tilefold")
    ids, mask = padded(2, 6, device=device)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, disable_compile=True, **options)
    single = [count for queries, count in steps if queries == 1]
    assert len(single) >= 2 * (2 + 2)  # tokens times (layers and kinds of layers)
    assert not any(single)
