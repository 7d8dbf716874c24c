"""Continuous batching of transformers: the tokens of `generate_batch` are those of its own `sdpa` and `paged|eager`."""

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.23", exc_type=ImportError, reason="its manager takes no other name before"
)

from transformers import AttentionInterface, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, initialization

import tilefold
from hf_models import make
from tilefold import reference
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
    options = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, "auto_switch_to_flash": False,
               "use_cuda_graph": False, **changes}  # fmt: skip
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
    [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "paged|eager")],
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


@pytest.fixture
def block_tables(monkeypatch):
    """The manager's fast path, which it has on GPUs alone; how many sequences each call of it had."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    seen = []
    decode = hf_attention.attention_kvcache

    def counted(q, *args, **options):
        seen.append(len(q))
        return decode(q, *args, **options)

    monkeypatch.setattr(hf_attention, "attention_kvcache", counted)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_steps_that_decode_read_pages(family, block_tables, lengths):
    model = make(family, "cpu")
    expected = tokens(model, "sdpa", max_blocks_per_request=0)
    assert tokens(model, "tilefold", max_blocks_per_request=16) == expected
    assert max(block_tables) == len(PROMPTS)
    assert all(max(queries) > 1 for queries, _ in lengths)  # prefill goes by index


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_sequences_that_pad_a_batch(numerics):
    """Their rows are 0, and no page is written for them."""
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(7, 4, 2, 16, generator=generator) for _ in range(2))
    before = k_cache.clone()
    table = torch.tensor([[1, 2], [3, -1], [5, 4], [-1, -1], [-1, -1]], dtype=torch.int32)
    offsets = torch.tensor([0, 6, 9, 17, 17, 17], dtype=torch.int32)  # the new token of each sequence is counted
    q, k, v = (torch.randn(1, h, 5, 16, generator=generator) for h in (4, 2, 2))

    class Cache:
        def update(self, key_states, value_states, layer_idx, kwargs):
            kwargs |= {"cu_seq_lens_k": offsets, "k_cache": k_cache, "v_cache": v_cache}
            return key_states, value_states

    layer = torch.nn.Identity()
    layer.layer_idx = 0
    queries = torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32)
    asked = {"cu_seq_lens_q": queries, "cu_seq_lens_k": {}, "max_length_k": {}, "cache": Cache(), "block_table": table}
    with tilefold.numerics(numerics):
        out, _ = AttentionInterface()["tilefold"](layer, q, k, v, None, scaling=0.25, **asked)
    assert torch.equal(out[:, 3:], torch.zeros(1, 2, 4, 16))
    for b, (page, row) in enumerate([(2, 1), (3, 2), (4, 3)]):
        assert torch.equal(k_cache[page, row], k[0, :, b])
        before[page, row] = k[0, :, b]
        pages = table[b][table[b] >= 0]
        keys, values = (cache[pages].flatten(0, 1)[: offsets[b + 1] - offsets[b]] for cache in (k_cache, v_cache))
        alone = reference.attention(q[:, :, b : b + 1].transpose(1, 2), keys[None], values[None], scale=0.25)[0]
        torch.testing.assert_close(out[:, b : b + 1], alone.to(out.dtype))
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        ({"block_indices": 1}, "does not take block_indices"),
        ({"position_bias": torch.zeros(1, 2, 5, 5)}, "position_bias is not served with packed sequences"),
        ({"block_table": 1, "dropout": 0.1}, "no dropout over block tables, got 0.1"),
        ({"block_table": 1, "cu_seq_lens_k": None}, "does not take block_table"),
    ],
    ids=["block_indices", "position_bias", "dropout", "no cache"],
)
def test_what_is_refused_is_refused_before_the_cache_is_written(refused, match):
    q = torch.randn(1, 2, 5, 16)
    asked = {"cu_seq_lens_k": {}, "max_length_k": {}, "cache": None} | refused
    with pytest.raises(tilefold.errors.Unsupported, match=match):
        AttentionInterface()["tilefold"](torch.nn.Identity(), q, q, q, None, **asked)


def test_unregister_gives_the_manager_its_own_check_back():
    ours = ContinuousBatchingManager.switch_to_cb_friendly_attn
    tilefold.register()
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is ours
    assert initialization.is_flash_attention_requested(make("llama", "cpu").config) is False
    tilefold.unregister()
    theirs = ContinuousBatchingManager.switch_to_cb_friendly_attn
    assert theirs is not ours and theirs.__module__ == ContinuousBatchingManager.__module__
    assert initialization.is_flash_attention_requested.__module__ == "transformers.utils.generic"
