"""Transformers through tilefold at lengths and on kernels that only a GPU reaches: bf16, generations, training, CUDA graphs."""

import importlib.metadata

import pytest
import torch

from cases.device import DEVICE

pytest.importorskip("transformers", minversion="4.56", exc_type=ImportError, reason="needs the transformers extra")

import hf_models
from hf_models import DECODERS, OTHERS, judge, judge_compiled, logits, made_by, make, padded, trained

VERSION = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
WIDE = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 1024}
SEVEN = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024}
pytestmark = pytest.mark.no_poison


@pytest.fixture(autouse=True)
def registered():
    hf_models.register_exact()


def wide(family, **changes):
    """Heads of 64, windows of 100, one expert: which of several is best would be decided by rounding."""
    facts = {**(SEVEN if family == "qwen2" else WIDE), **changes}
    if "sliding_window" in DECODERS[family][2]:
        facts["sliding_window"] = 100
    if family == "gpt_oss":
        facts |= {"num_local_experts": 1, "num_experts_per_tok": 1}
    return make(family, DEVICE, **facts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", DECODERS)
def test_logits(family, dtype):
    """Without padding (the kernels for sm_90 where they are), padded, packed, and once with heads of 128."""
    model = wide(family, initializer_range=0.05).to(dtype)
    ids, mask = padded(3, 333, device=DEVICE)
    judge(family, model, input_ids=ids, use_cache=False)
    judge(family, model, mask.bool(), input_ids=ids, attention_mask=mask)
    if family in ("llama", "mistral"):
        positions = torch.tensor([[*range(133), *range(200)]], device=DEVICE).expand(3, -1)
        judge(family, model, input_ids=ids, position_ids=positions, use_cache=False)
        model = make(family, DEVICE, dtype, initializer_range=0.05, **{**WIDE, "head_dim": 128})
        judge(family, model, input_ids=ids, use_cache=False)


@pytest.mark.parametrize("family", OTHERS)
def test_encoders_and_cross_attention(family):
    model = make(family, DEVICE, torch.bfloat16, **({"max_position_embeddings": 512} if family != "t5" else {}))
    model.set_attn_implementation("tilefold")
    if model.config._attn_implementation != "tilefold":
        pytest.skip(f"transformers {VERSION} does not send {family}'s attention through AttentionInterface")
    ids, mask = padded(3, 200, False, DEVICE)
    if family == "bert":
        judge(family, model, mask.bool(), input_ids=ids, attention_mask=mask)
    else:
        judge(family, model, input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :100])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "gpt_oss"])
def test_64_greedy_tokens(family, cache):
    """Token by token as eager attention in fp32: a padded batch, groups of 7, beyond the windows."""
    model = wide(family)
    ids, mask = padded(3, 70, device=DEVICE)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    found = [
        made_by(model, name).generate(ids, attention_mask=mask, **options)[:, 70:].tolist()
        for name in ("eager", "tilefold")
    ]
    assert found[0] == found[1]
    assert len({*found[0][0]}) > 4, "too plain to tell anything"


@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_50_steps_of_training(family):
    """As near to the curve in fp64 as PyTorch's own, twice over, with and without gradient checkpoints."""
    model = wide(family, initializer_range=0.02)
    torch.manual_seed(5)
    batches = [padded(4, 96, step % 2 == 0, DEVICE) for step in range(4)]  # padded left and right
    exact = trained(made_by(model, "exact", double=True), batches, 50, 0.02)
    plain = [
        trained(made_by(model, name), batches, 50, 0.02)
        for name in ("eager", *([] if family == "gpt_oss" else ["sdpa"]))
    ]
    limit = 2 * max(abs(a - b) for curve in plain for a, b in zip(curve, exact, strict=True)) + 1e-5
    for checkpoints in (False, True):
        found = trained(made_by(model, "tilefold"), batches, 50, 0.02, checkpoints)
        worst = max(abs(a - b) for a, b in zip(found, exact, strict=True))
        assert worst <= limit, f"{worst:.2e} from fp64, limit {limit:.2e}"
        assert found[-1] < found[0]


def test_a_compiled_decoder_layer():
    """Inductor rounds elsewhere than eager PyTorch does, and may be as far from fp64 as that, twice over."""
    torch._dynamo.reset()
    model = wide("qwen2", initializer_range=0.05).bfloat16()
    ids, mask = padded(3, 128, device=DEVICE)
    judge_compiled(model, input_ids=ids, attention_mask=mask)


def test_a_decoding_step_in_a_cuda_graph():
    """Captured once, replayed for every further token; the batch is padded."""
    from transformers import StaticCache

    model = made_by(wide("qwen2"), "tilefold")
    ids, mask = padded(2, 40, device=DEVICE)
    steps = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    expected = made_by(model, "eager").generate(ids, attention_mask=mask, **steps)[:, 40:]
    whole = torch.ones(2, 80, dtype=torch.long, device=DEVICE)
    whole[:, :40] = mask
    position = (mask.sum(-1, keepdim=True) - 1).clone()
    place = torch.full((1,), 39, device=DEVICE)
    cache = StaticCache(config=model.config, max_cache_len=80)
    token = torch.empty(2, 1, dtype=torch.long, device=DEVICE)

    def step(tokens, positions):
        older = {"cache_position": place - tokens.shape[1] + 1 + torch.arange(tokens.shape[1], device=DEVICE)}
        out = model(
            input_ids=tokens, attention_mask=whole, position_ids=positions, past_key_values=cache, use_cache=True,
            **(older if VERSION < (5, 0) else {}),
        )  # fmt: skip
        token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)
        place.add_(1)

    with torch.no_grad():
        step(ids, (mask.cumsum(-1) - 1).clamp_min(0))
        found = [token.clone()]
        for _ in range(3):  # compiles what the graph will hold
            step(token, position)
            found.append(token.clone())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step(token, position)
        for _ in range(20):
            graph.replay()
            found.append(token.clone())
    assert torch.cat(found, 1).tolist() == expected.tolist()


def test_compiled_generation():
    """What generate() does by itself with a static cache: compiles a step and, where it can, captures it."""
    torch._dynamo.reset()
    model = wide("qwen2")
    ids, mask = padded(2, 40, device=DEVICE)
    steps = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    expected = made_by(model, "eager").generate(ids, attention_mask=mask, **steps)
    model = made_by(model, "tilefold")
    for _ in range(2):
        found = model.generate(ids, attention_mask=mask, cache_implementation="static", **steps)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_decoding_never_waits(family, cache, monkeypatch):
    """torch raises at any synchronisation inside the mask function and the layers, from the second token on."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from tilefold.integrations import hf_attention, hf_mask

    single = []

    def watched(function, queries):
        def call(*args, **kwargs):
            one = queries(args, kwargs) == 1
            torch.cuda.set_sync_debug_mode("error" if one else "default")
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                single.append(one)

        return call

    def of_mask(args, kwargs):
        return kwargs["cache_position"].shape[0] if "cache_position" in kwargs else kwargs["q_length"]

    model = made_by(wide(family), "tilefold")
    ids, mask = padded(2, 40, device=DEVICE)
    options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    model.generate(ids, attention_mask=mask, **options)  # compiles
    attention = watched(hf_attention.attention_forward, lambda args, kwargs: args[1].shape[2])
    monkeypatch.setitem(AttentionInterface._global_mapping, "tilefold", attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "tilefold", watched(hf_mask.make_mask, of_mask))
    model.generate(ids, attention_mask=mask, **options)
    assert sum(single) >= 3 * 2


def test_autocast():
    model = made_by(wide("qwen3", initializer_range=0.05), "tilefold")
    ids, _ = padded(2, 200, device=DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = logits(model, input_ids=ids)
        plain = logits(made_by(model, "sdpa"), input_ids=ids)
    exact = logits(made_by(model, "exact", double=True), input_ids=ids)
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.skipif(VERSION < (5, 23), reason="the manager of older versions takes no other name")
@pytest.mark.parametrize(
    ("family", "peer"), [("llama", "sdpa"), ("qwen2", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "paged|eager")]
)
def test_continuous_batching(family, peer):
    """Prompts of odd lengths, in chunks of at most 128 beside decoding, windows of 100: tokens as those of transformers' own, by
    index and, where no layer slides, by block tables, in CUDA graphs."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = wide(family)
    prompts = [[2 + (7 * i * i + 3 * n) % 60 for i in range(n)] for n in (3, 301, 1, 129, 64)]
    generation = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=1)
    graphs = False if family == "gpt_oss" else None  # its experts cannot be captured
    found = []
    for implementation, options in (
        (peer, {"use_cuda_graph": False, "max_blocks_per_request": 0}),
        ("tilefold", {"use_cuda_graph": False, "max_blocks_per_request": 0}),
        ("tilefold", {"use_cuda_graph": graphs}),
    ):
        model.set_attn_implementation(implementation)
        config = ContinuousBatchingConfig(
            page_size=16, num_blocks=256, max_batch_tokens=128, auto_switch_to_flash=False, **options
        )
        outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
        found.append({name: one.generated_tokens for name, one in outputs.items()})
    assert len(found[0]) == len(prompts)
    assert found[0] == found[1] == found[2]
