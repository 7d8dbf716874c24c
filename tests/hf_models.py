"""Tiny transformers models with random weights, and how their results are judged: by the same model in fp64.

Eager attention is no oracle in fp64: it computes its softmax in fp32, and makes NaN of rows that see nothing.  So the tests bring
an attention implementation of their own, `exact`, written from the formulas."""

import copy
import importlib

import torch

import tilefold
from tilefold.reference import compare, deviating

TOKENS = 64  # the vocabulary: ids 0 and 1 begin and pad

_DECODER = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # wide enough that generations differ from token to token
    "tie_word_embeddings": False,
}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

# By family: config class, model class, what differs from _DECODER.
DECODERS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 4}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
}  # fmt: skip

_BERT = {
    "vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 1,
}  # fmt: skip
_BART = {
    "vocab_size": TOKENS, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.3,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4, "pad_token_id": 1,
    "decoder_start_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
OTHERS = {
    "bert": ("BertConfig", "BertModel", _BERT),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
}


def make(family, device="cpu", dtype=torch.float32, **changes):
    """A model with random weights, the same for the same family and changes, in eval mode."""
    transformers = importlib.import_module("transformers")
    name, model, facts = DECODERS.get(family) or OTHERS[family]
    facts = {**(_DECODER if family in DECODERS else {}), **facts, **changes}
    torch.manual_seed(1)
    made = getattr(transformers, model)(getattr(transformers, name)(**facts))
    with torch.no_grad():
        for tensor_name, tensor in made.named_parameters():
            if tensor_name.endswith("sinks"):  # they start as zeros, or as whatever memory held
                tensor.normal_()
    return made.to(device, dtype).eval()


def exact(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **_):
    """Attention with every score written out, in the inputs' dtype; the mask is dense, and rows that see nothing are 0."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    score = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if position_bias is not None:
        score = score + position_bias
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
    if s_aux is not None:
        score = torch.cat([score, s_aux[None, :, None, None].expand(*score.shape[:3], 1).to(score)], dim=-1)
    weight = score.softmax(-1)[..., : key.shape[2]].nan_to_num()
    return (weight @ value).transpose(1, 2).contiguous(), None


def exact_mask(**facts):
    """Transformers' dense boolean mask, never skipped."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**{**facts, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def register_exact():
    """Make `exact` known to transformers, beside tilefold."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    tilefold.register()
    AttentionInterface.register("exact", exact)
    AttentionMaskInterface.register("exact", exact_mask)


def made_by(model, implementation, *, double=False):
    """A copy of the model that attends by `implementation`, in fp64 if asked."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    if double and hasattr(other, "set_experts_implementation"):
        other.set_experts_implementation("eager")  # torch's grouped product takes no fp64
    return other.double() if double else other


def logits(model, **inputs):
    """What comes out last, without gradients."""
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def judge(family, model, live=None, **inputs):
    """tilefold's logits are as near to the oracle's as the dtype's rounding allows; `live`: [batch, tokens] bool that count."""
    double = made_by(model, "exact", double=True)
    oracle = logits(double, **inputs)
    plain = deviating(lambda: logits(double, **inputs), *[next(model.parameters()).dtype] * 2)
    got = logits(made_by(model, "tilefold"), **inputs)
    picked = (x if live is None else x[live.to(x.device)] for x in (got, oracle, plain))
    result = compare(*picked)
    assert result.ok, f"{family}: {result}"


def trained_once(model, **inputs):
    """(loss, gradients of the first layer's four projections) where every token is predicted."""
    model.train().zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    attention = model.model.layers[0].self_attn
    return loss.detach(), {name: getattr(attention, name).weight.grad.clone() for name in PROJECTIONS}


def trained(model, batches, steps, rate, checkpoints=False):
    """The losses of plain gradient descent on batches in turn."""
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimiser = torch.optim.SGD(model.train().parameters(), lr=rate)
    losses = []
    for step in range(steps):
        ids, mask = batches[step % len(batches)]
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def judge_compiled(model, backend="inductor", **inputs):
    """With its layers compiled a model's gradients are as near to those in fp64 as rounding allows, in relative L2."""
    double = made_by(model, "exact", double=True)
    _, exact = trained_once(double, **inputs)
    plain = deviating(lambda: trained_once(double, **inputs)[1], *[next(model.parameters()).dtype] * 2)
    model = made_by(model, "tilefold")
    plain_loss, _ = trained_once(model, **inputs)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    loss, found = trained_once(model, **inputs)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-2, atol=1e-2)
    for name in PROJECTIONS:
        error, allowed = ((x[name].double() - exact[name]).norm() / exact[name].norm() for x in (found, plain))
        assert error <= 2 * allowed, f"{name}: {error:.2e} from fp64, a standard deviation is {allowed:.2e}"


def padded(batch, tokens, left=True, device="cpu"):
    """Token ids and padding of a batch whose rows have fewer and fewer tokens."""
    ids = torch.randint(3, TOKENS, (batch, tokens), device=device)
    mask = torch.ones(batch, tokens, dtype=torch.long, device=device)
    for row in range(1, batch):
        hidden = slice(None, 2 * row + 1) if left else slice(-2 * row - 1, None)
        mask[row, hidden] = 0
        ids[row, hidden] = 1
    return ids, mask
