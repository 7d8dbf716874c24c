"""Continuous batching of transformers: the tokens of `generate_batch` are those of its own `sdpa` and `paged|eager`."""

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.23", exc_type=ImportError, reason="its manager takes no other name before"
)

from transformers import AttentionInterface, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import tilefold
from hf_models import make
from tilefold.integrations import hf_attention

PROMPTS = [[3, 4, 5], list(range(7, 20)), [9], list(range(30, 53)), [7, 8, 9, 10, 11]]


@pytest.fixture(autouse=True)
def registered():
    tilefold.register()
    yield
    tilefold.register()


@pytest.fixture
def lengths(monkeypatch):
    """Queries and keys of the packed sequences of every call that went to tilefold."""
    seen = []
    varlen = hf_attention.attention_varlen

    def counted(q, k, v, queries, keys, *others, **options):
        seen.append((queries.diff().tolist(), keys.diff().tolist()))
        return varlen(q, k, v, queries, keys, *others, **options)

    monkeypatch.setattr(hf_attention, "attention_varlen", counted)
    return seen


def tokens(model, implementation, prompts=PROMPTS, **changes):
    model.set_attn_implementation(implementation)
    options = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, "auto_switch_to_flash": False, **changes}
    generation = GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=-1, pad_token_id=1)
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**options)
    )
    found = [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.split("_")[1]))]
    assert [len(one) for one in found] == [7] * len(prompts)
    return found


# gemma2 has softcaps, gpt_oss sinks: `sdpa` takes neither, and `paged|eager` no softcap
@pytest.mark.parametrize(
    ("family", "peer"),
    [("llama", "sdpa"), ("qwen2", "sdpa"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "paged|eager")],
)
def test_tokens(family, peer, lengths):
    """Full and sliding layers, groups of heads and sinks; prompts in chunks beside decoding."""
    model = make(family, "cpu")
    expected = tokens(model, peer)
    assert not lengths
    assert tokens(model, "tilefold") == expected
    assert any(1 in queries and max(queries) > 1 for queries, _ in lengths)  # prefill and decoding in one call
    assert any(max(keys) > max(queries) > 1 for queries, keys in lengths)  # a chunk after others


def test_softcap(lengths):
    """No paged peer of transformers takes it: tokens as those of its own `generate`, a prompt at a time."""
    model = make("gemma2", "cpu")
    found = tokens(model, "tilefold")
    assert lengths
    model.set_attn_implementation("eager")
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
        assert own[0, len(prompt) :].tolist() == one


def test_prefixes_are_shared(lengths):
    """The second prompt begins with pages of the first: they are read, not computed."""
    model = make("llama", "cpu")
    prompts = [list(range(5, 25)), [*range(5, 21), 40, 41]]
    options = {"prompts": prompts, "max_requests_per_batch": 1}
    assert tokens(model, "tilefold", **options) == tokens(model, "sdpa", **options)
    assert ([2], [18]) in lengths


def test_the_prefix_of_the_name():
    """`paged|tilefold` is the same, as of this version all but `paged|eager`."""
    model = make("llama", "cpu")
    with pytest.warns(FutureWarning, match="no longer needed"):
        found = tokens(model, "paged|tilefold")
    assert model.config._attn_implementation == "tilefold"
    assert found == tokens(model, "sdpa")


def test_block_tables_are_refused_before_the_cache_is_written():
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(tilefold.errors.Unsupported, match="does not take block_table"):
        AttentionInterface()["tilefold"](
            torch.nn.Identity(), q, q, q, None, cu_seq_lens_k={}, max_length_k={}, cache=None, block_table=q
        )


def test_unregister_gives_the_manager_its_own_check_back():
    ours = ContinuousBatchingManager.switch_to_cb_friendly_attn
    tilefold.register()
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is ours
    tilefold.unregister()
    theirs = ContinuousBatchingManager.switch_to_cb_friendly_attn
    assert theirs is not ours and theirs.__module__ == ContinuousBatchingManager.__module__
