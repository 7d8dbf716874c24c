"""Wrong arguments of the flash_attn functions: each is refused by its own name, with its value, before anything is written."""

import re

import pytest
import torch

import tilefold
import tilefold.compat.flash_attn as fa
from cases.refusals import refuses
from tilefold.compat.flash_attn import bert_padding, flash_attn_interface
from tilefold.compat.flash_attn.layers import rotary

NAN, INF = float("nan"), float("inf")
F16, I32 = torch.float16, torch.int32


def given():
    """Right arguments of every function, small."""
    half = dict.fromkeys("kv", torch.ones(2, 7, 2, 16, dtype=F16))
    caches = {f"{x}_cache": torch.zeros(2, 16, 2, 16, dtype=F16) for x in "kv"}
    new = dict.fromkeys("kv", torch.ones(2, 1, 2, 16, dtype=F16))
    cu = torch.tensor([0, 3, 10], dtype=I32)
    packed = dict.fromkeys("kv", torch.ones(10, 2, 16, dtype=F16))
    lengths = torch.tensor([3, 5], dtype=I32)
    x, table = torch.ones(2, 5, 4, 16), {"cos": torch.ones(20, 4), "sin": torch.ones(20, 4)}
    mask = torch.ones(2, 5, dtype=torch.int64)
    private = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size_left": -1, "window_size_right": -1,
        "softcap": 0.0, "alibi_slopes": None, "deterministic": False,
    }  # fmt: skip
    return {
        "dense": (fa.flash_attn_func, {"q": torch.ones(2, 5, 4, 16, dtype=F16), **half}),
        "qkv": (fa.flash_attn_qkvpacked_func, {"qkv": torch.ones(2, 5, 3, 4, 16, dtype=F16)}),
        "kv": (
            fa.flash_attn_kvpacked_func,
            {"q": torch.ones(2, 5, 4, 16, dtype=F16), "kv": torch.ones(2, 7, 2, 2, 16, dtype=F16)},
        ),
        "varlen kv": (
            fa.flash_attn_varlen_kvpacked_func,
            {"q": torch.ones(10, 4, 16, dtype=F16), "kv": torch.ones(10, 2, 2, 16, dtype=F16), "cu_seqlens_q": cu,
             "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7},
        ),
        "varlen forward": (
            flash_attn_interface._flash_attn_varlen_forward,
            {"q": torch.ones(10, 4, 16, dtype=F16), **packed, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7,
             "max_seqlen_k": 7, "dropout_p": 0.0, "softmax_scale": 1.0, "causal": False},
        ),
        "varlen": (
            fa.flash_attn_varlen_func,
            {"q": torch.ones(10, 4, 16, dtype=F16), **packed, "cu_seqlens_q": cu, "cu_seqlens_k": cu,
             "max_seqlen_q": 7, "max_seqlen_k": 7},
        ),
        "varlen qkv": (
            fa.flash_attn_varlen_qkvpacked_func,
            {"qkv": torch.ones(10, 3, 4, 16, dtype=F16), "cu_seqlens": cu, "max_seqlen": 7},
        ),
        "cache": (
            fa.flash_attn_with_kvcache,
            {"q": torch.ones(2, 1, 4, 16, dtype=F16), **caches, **new, "cache_seqlens": lengths},
        ),
        "pages": (
            fa.flash_attn_with_kvcache,
            {"q": torch.ones(2, 1, 4, 16, dtype=F16), **{name: t.view(8, 4, 2, 16) for name, t in caches.items()}, **new,
             "cache_seqlens": lengths, "block_table": torch.arange(8, dtype=I32).view(2, 4)},
        ),
        "backward": (
            flash_attn_interface._flash_attn_backward,
            {**dict.fromkeys(("q", "out", "dout"), torch.ones(2, 5, 4, 16, dtype=F16)), **half,
             "softmax_lse": torch.ones(2, 4, 5), "dq": torch.zeros(2, 5, 4, 16, dtype=F16),
             **dict.fromkeys(("dk", "dv"), torch.zeros(2, 7, 2, 16, dtype=F16)), **private},
        ),
        "varlen backward": (
            flash_attn_interface._flash_attn_varlen_backward,
            {**dict.fromkeys(("q", "out", "dout"), torch.ones(10, 4, 16, dtype=F16)), **packed, "cu_seqlens_q": cu,
             "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7, "softmax_lse": torch.ones(4, 10),
             **dict.fromkeys(("dq", "dk", "dv")), **private},
        ),
        "rotary": (rotary.apply_rotary_emb, {"x": x, **table}),
        "rotary qkv": (rotary.apply_rotary_emb_qkv_, {"qkv": torch.ones(2, 5, 8, 16), **table, "num_heads_q": 4}),
        "rotary kv": (rotary.apply_rotary_emb_kv_, {"kv": torch.ones(2, 5, 2, 4, 16), **table}),
        "module": (rotary.RotaryEmbedding, {"dim": 8}),
        "module call": (rotary.RotaryEmbedding(8), {"qkv": torch.ones(2, 5, 3, 4, 16)}),
        "unpad": (bert_padding.unpad_input, {"hidden_states": torch.ones(2, 5, 8), "attention_mask": mask}),
        "rows": (
            bert_padding.unpad_input_for_concatenated_sequences,
            {"hidden_states": torch.ones(2, 5, 8), "attention_mask_in_length": mask},
        ),
        "pad": (
            bert_padding.pad_input,
            {"hidden_states": torch.ones(10, 8), "indices": torch.arange(10), "batch": 2, "seqlen": 5},
        ),
    }  # fmt: skip


EXPANDED = torch.zeros(1, 16, 2, 16, dtype=F16).expand(2, -1, -1, -1)
SHORT = torch.ones(1, dtype=I32)
REFUSED = [
    ("dense", {"q": torch.ones(2, 5, 4, 16, dtype=F16).to_sparse()}, "q must be a dense strided tensor"),
    ("dense", {name: torch.ones(2, 5, 2, 0, dtype=F16) for name in "qkv"}, "q and k have head dim 0; accepted: 1 to 512"),
    ("dense", {"q": torch.ones(())}, "q has shape (), expected [batch, seqlen_q, heads, head dim]"),
    ("dense", {"q": None}, "q must be a torch.Tensor, got NoneType"),
    ("dense", {"q": torch.ones(5, 4, 16, dtype=F16)}, "q has 3 dimensions"),
    ("dense", {name: torch.ones(2, 7, 3, 16, dtype=F16) for name in "kv"}, "q has 4 heads"),
    ("dense", {"k": torch.ones(2, 7, 2, 16)}, "k has dtype float32, but q has float16"),
    ("dense", {"v": torch.ones(2, 5, 2, 16, dtype=F16)}, "v has shape (2, 5, 2, 16), expected [batch, seq_k"),
    ("dense", {name: torch.ones(2, 5, 2, 513, dtype=F16) for name in "qkv"}, "q and k have head dim 513; accepted: 1 to 512"),
    ("dense", {"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
    ("dense", {"dropout_p": -0.1}, "dropout_p must be at least 0, got -0.1"),
    ("dense", {"dropout_p": None}, "dropout_p must be a number, got None of type NoneType"),
    ("dense", {"dropout_p": "a"}, "dropout_p must be a number, got 'a' of type str"),
    ("dense", {"dropout_p": NAN}, "dropout_p must be at least 0, got nan"),
    ("dense", {"dropout_p": 2}, "dropout_p must be at least 0 and less than 1, got 2"),
    ("dense", {"softmax_scale": 0.0}, "softmax_scale must be greater than 0, got 0.0"),
    ("dense", {"softcap": -1.0}, "softcap must be at least 0, got -1.0"),
    ("dense", {"window_size": None}, "window_size must be a pair (left, right), got None"),
    ("dense", {"window_size": (1, True)}, "window_size[1] must be an int, got True"),
    ("dense", {"alibi_slopes": torch.ones(3)}, "alibi_slopes has shape (3,), expected [heads]"),
    ("dense", {"alibi_slopes": torch.ones(4, dtype=F16)}, "alibi_slopes has dtype float16, accepted: float32"),
    ("dense", {"deterministic": 1}, "deterministic must be a bool, got 1"),
    ("dense", {"causal": 1}, "causal must be a bool, got 1"),
    ("dense", {"return_attn_probs": None}, "return_attn_probs must be a bool, got None"),
    ("dense", {"v_descale": torch.ones(1, 2)}, "v_descale must be None, got a Tensor"),
    ("dense", dict.fromkeys(("s_aux", "learnable_sink"), torch.ones(2)), "learnable_sink and s_aux are names of one argument"),
    ("dense", {"softmax_scale": NAN}, "softmax_scale must be greater than 0, got nan"),
    ("dense", {"softmax_scale": INF}, "softmax_scale must be between 1e-30 and 1e+30 in size, got inf"),
    ("dense", {"softcap": NAN}, "softcap must be at least 0, got nan"),
    ("dense", {"window_size": (NAN, 0)}, "window_size[0] must be an int, got nan"),
    ("dense", {"num_splits": "2"}, "num_splits must be an int, got '2'"),
    ("dense", {"num_splits": 2}, "num_splits must be 0 or 1, got 2"),
    ("dense", {"sm_margin": "x"}, "sm_margin must be an int, got 'x'"),
    ("dense", {"sm_margin": 4}, "sm_margin must be 0, got 4"),
    ("dense", {"pack_gqa": True}, "pack_gqa must be None, got True"),
    ("dense", {"attention_chunk": 64}, "attention_chunk must be 0, got 64"),
    ("dense", {"attention_chunk": "0"}, "attention_chunk must be an int, got '0'"),
    ("dense", {"qv": SHORT}, "qv must be None, got a Tensor"),
    ("dense", {"s_aux": torch.ones(2)}, "s_aux has shape (2,), expected [heads]"),
    ("dense", {"learnable_sink": 1.0}, "learnable_sink must be a torch.Tensor or None, got float"),
    ("qkv", {"qkv": torch.ones(2, 5, 4, 16)}, "qkv has shape (2, 5, 4, 16), expected [batch, seqlen, 3, heads, head dim]"),
    ("qkv", {"qkv": torch.ones(2, 5, 2, 4, 16)}, "qkv has shape (2, 5, 2, 4, 16), expected [batch, seqlen, 3"),
    ("kv", {"kv": None}, "kv must be a torch.Tensor, got NoneType"),
    ("varlen kv", {"kv": torch.ones(10, 2, 16)}, "kv has shape (10, 2, 16), expected [total, 2, heads, head dim]"),
    ("varlen qkv", {"qkv": torch.ones(10, 4, 16)}, "qkv has shape (10, 4, 16), expected [total, 3, heads, head dim]"),
    ("varlen", {"cu_seqlens_q": torch.tensor([0, 3, 10])}, "cu_seqlens_q has dtype int64, accepted: int32"),
    ("varlen", {"max_seqlen_q": 4.0}, "max_seqlen_q must be an int, got 4.0"),
    ("varlen", {"max_seqlen_k": -1}, "max_seqlen_k must be at least 0, got -1"),
    ("varlen", {"seqused_q": SHORT}, "seqused_q must be None, got a Tensor"),
    ("varlen", {"seqused_k": torch.ones(3, dtype=I32)}, "seqused_k has shape (3,)"),
    ("varlen", {"seqused_k": torch.ones(2, dtype=I32), "dropout_p": 0.1, "return_attn_probs": True}, "S_dmask is not made there"),
    ("varlen forward", {"num_splits": 2}, "num_splits > 1 is not supported here, got 2"),
    ("qkv", {"qkv": None}, "qkv must be a torch.Tensor, got NoneType"),
    ("varlen", {"cu_seqlens_q": [0, 10], "seqused_k": SHORT}, "cu_seqlens_q must be a torch.Tensor, got list"),
    ("varlen", {"cu_seqlens_k": None, "seqused_k": SHORT}, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    ("varlen qkv", {"cu_seqlens": torch.tensor([0, 3, 10])}, "cu_seqlens has dtype int64, accepted: int32"),
    ("varlen qkv", {"cu_seqlens": None}, "cu_seqlens must be a torch.Tensor, got NoneType"),
    ("varlen qkv", {"max_seqlen": -7}, "max_seqlen must be at least 0, got -7"),
    ("cache", {"v": None}, "k and v come together, got v=None"),
    ("cache", {"v": "v"}, "v must be a torch.Tensor, got str"),
    ("cache", {"k": SHORT}, "k has shape (1,), expected [batch, seqlen_new, kv heads, head dim]"),
    ("cache", {name: torch.ones(3, 1, 2, 16, dtype=F16) for name in "kv"}, "k has shape (3, 1, 2, 16), expected a batch of 2"),
    ("cache", {"rotary_cos": SHORT}, "rotary_cos and rotary_sin come together, got rotary_sin=None"),
    ("cache", dict.fromkeys(("rotary_cos", "rotary_sin"), "c"), "rotary_cos must be a torch.Tensor, got str"),
    ("cache", dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 9)), "rotary_cos has shape (9, 9): it turns 18"),
    ("cache", {"cu_seqlens_q": [0], "max_seqlen_q": 1}, "cu_seqlens_q must be a torch.Tensor, got list"),
    ("cache", {"cache_seqlens": 16}, "cache_seqlens must be 0 to 15, for which the cache has room, got 16"),
    ("cache", {"k_cache": EXPANDED, "v_cache": EXPANDED}, "k_cache is written in place, but elements of it share memory"),
    ("cache", {"sm_margin": 1}, "sm_margin must be 0, got 1"),
    ("cache", {"pack_gqa": 1}, "pack_gqa must be None or False, got 1"),
    ("cache", {"softcap": -1.0}, "softcap must be at least 0, got -1.0"),
    ("cache", {"softmax_scale": NAN}, "softmax_scale must be greater than 0, got nan"),
    ("cache", {"num_splits": 129}, "num_splits must be 0 to 128, got 129"),
    ("cache", {"alibi_slopes": torch.ones(3)}, "alibi_slopes has shape (3,), expected [heads]"),
    ("cache", {"s_aux": torch.ones(3)}, "s_aux has shape (3,), expected [heads]"),
    ("cache", {"cache_leftpad": torch.ones(2)}, "cache_leftpad has dtype float32, accepted: int32"),
    ("cache", {"q": torch.ones(2, 1, 4, 16)}, "dtype"),
    ("cache", {"q": torch.ones(1, 1, 4, 16, dtype=F16), **dict.fromkeys("kv"), "cache_seqlens": 3}, "cache_batch_idx"),
    ("cache", {"cache_seqlens": None}, "cache_seqlens"),
    ("cache", {"cache_seqlens": torch.tensor([3, 5])}, "cache_seqlens has dtype int64"),
    ("cache", {"cache_seqlens": SHORT}, "cache_seqlens has shape (1,)"),
    ("cache", dict.fromkeys("kv") | dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(20, 4)), "rotary_cos"),
    ("cache", {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=I32)}, "max_seqlen_q"),
    ("cache", {"return_softmax_lse": 1}, "return_softmax_lse must be a bool, got 1"),
    ("cache", {"qv": SHORT}, "qv must be None, got a Tensor"),
    ("cache", {"k_descale": SHORT}, "k_descale must be None, got a Tensor"),
    ("cache", {"scheduler_metadata": SHORT}, "scheduler_metadata must be None, got a Tensor"),
    ("pages", {"cache_batch_idx": torch.tensor([0, 1], dtype=I32)}, "cache_batch_idx"),
    ("pages", {"block_table": [[0]]}, "block_table must be a torch.Tensor, got list"),
    ("pages", {"block_table": torch.tensor(1, dtype=I32)}, "block_table has shape (), expected [batch, pages]"),
    ("pages", {"block_table": None, "page_table": torch.zeros(2, 4)}, "page_table has dtype float32, accepted: int32"),
    ("backward", {"q": None}, "q must be a torch.Tensor, got NoneType"),
    ("backward", {"dout": None}, "dout must be a torch.Tensor, got NoneType"),
    ("backward", {"dout": torch.ones(1, 5, 4, 16, dtype=F16)}, "dout has shape (1, 5, 4, 16), expected [batch, seq_q"),
    ("backward", {"out": torch.ones(2, 4, 4, 16, dtype=F16)}, "out has shape (2, 4, 4, 16), expected [batch, seq_q"),
    ("backward", {"softmax_lse": torch.ones(1, 4, 5)}, "softmax_lse has shape (1, 4, 5), expected [batch, heads, seq_q]"),
    ("backward", {"softmax_lse": torch.ones(2, 4, 5, dtype=F16)}, "softmax_lse has dtype float16, accepted: float32"),
    ("backward", {"dq": "dq"}, "dq must be a torch.Tensor or None, got str"),
    ("backward", {"dk": torch.ones(2, 7, 4, 16, dtype=F16)}, "dk has shape (2, 7, 4, 16), expected [batch, seq_k, kv_heads"),
    ("backward", {"dv": torch.ones(2, 7, 2, 16)}, "dv has dtype float32, but q has float16"),
    ("backward", {"dropout_p": 0.1}, "rng_state must be given with dropout_p"),
    ("backward", {"dropout_p": 0.1, "rng_state": torch.ones(2)}, "rng_state has dtype float32, accepted: int64"),
    ("varlen backward", {"out": torch.ones(9, 4, 16, dtype=F16)}, "out has shape (9, 4, 16), expected [total_q"),
    ("varlen backward", {"softmax_lse": torch.ones(4, 9)}, "softmax_lse has shape (4, 9), expected [heads, total_q]"),
    ("rotary", {"x": None}, "x must be a torch.Tensor, got NoneType"),
    ("rotary", {"sin": None}, "sin must be a torch.Tensor, got NoneType"),
    ("rotary", {"seqlen_offsets": 1.0}, "seqlen_offsets must be an int, got float"),
    ("rotary", {"seqlen_offsets": SHORT}, "seqlen_offsets has shape (1,), expected [batch]"),
    ("rotary", {"seqlen_offsets": 18}, "cos has 20 positions, seqlen_offsets=18 with 5 tokens needs 23"),
    ("rotary", {"x": torch.ones(1, 5, 4, 16).expand(2, -1, -1, -1), "inplace": True}, "x is written in place"),
    ("rotary qkv", {"qkv": None}, "qkv must be a torch.Tensor, got NoneType"),
    ("rotary qkv", {"num_heads_q": "4"}, "num_heads_q must be an int, got '4'"),
    ("rotary qkv", {"num_heads_q": -4}, "num_heads_q must be at least 1, got -4"),
    ("rotary qkv", {"num_heads_q": True}, "num_heads_q must be an int, got True"),
    ("rotary qkv", {"qkv": torch.ones(2, 5, 8, 16).double()}, "qkv has dtype float64"),
    ("rotary kv", {"kv": None}, "kv must be a torch.Tensor, got NoneType"),
    ("rotary kv", {"kv": torch.ones(2, 5, 2, 4, 16).int()}, "kv has dtype int32"),
    ("module", {"dim": 7}, "dim must be even and at least 2, got 7"),
    ("module", {"dim": "8"}, "dim must be an int, got '8'"),
    ("module", {"base": 0}, "base must be greater than 0, got 0"),
    ("module", {"scale_base": 0}, "scale_base must be greater than 0, got 0"),
    ("module call", {"qkv": None}, "qkv must be a torch.Tensor, got NoneType"),
    ("module call", {"seqlen_offset": "3"}, "seqlen_offset must be an int, got '3'"),
    ("module call", {"seqlen_offset": -3}, "seqlen_offset must be at least 0, got -3"),
    ("module call", {"seqlen_offset": SHORT, "max_seqlen": 9}, "seqlen_offset has shape (1,), expected [batch]"),
    ("module call", {"max_seqlen": "9"}, "max_seqlen must be an int, got '9'"),
    ("unpad", {"hidden_states": None}, "hidden_states must be a torch.Tensor, got NoneType"),
    ("unpad", {"attention_mask": [1]}, "attention_mask must be a torch.Tensor, got list"),
    ("unpad", {"unused_mask": torch.ones(1, 5)}, "unused_mask has shape (1, 5), expected the [batch, seqlen]"),
    ("rows", {"attention_mask_in_length": torch.ones(2, 5)}, "attention_mask_in_length has dtype torch.float32"),
    ("rows", {"attention_mask_in_length": torch.tensor([[9, 0, 0, 0, 0]] * 2)}, "got 9 and a row with 9"),
    ("rows", {"attention_mask_in_length": torch.tensor([[-1, 0, 0, 0, 0]] * 2)}, "got -1 and a row with -1"),
    ("pad", {"hidden_states": None}, "hidden_states must be a torch.Tensor, got NoneType"),
    ("pad", {"indices": torch.arange(10.0)}, "indices has dtype torch.float32, accepted: int32, int64"),
    ("pad", {"indices": torch.arange(8)}, "indices has shape (8,), expected one for each of 10 rows"),
    ("pad", {"batch": "2"}, "batch must be an int, got '2'"),
    ("pad", {"batch": -2}, "batch must be at least 0, got -2"),
]  # fmt: skip


@pytest.mark.parametrize("name", given())
def test_the_arguments_that_are_changed_below_are_right(name, device):
    function, options = given()[name]
    (function.to(device) if isinstance(function, torch.nn.Module) else function)(**on(device, options))


def on(device, options):
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}


@pytest.mark.parametrize(
    ("name", "change", "text"), REFUSED, ids=[f"{name}-{'-'.join(change)}-{i}" for i, (name, change, _) in enumerate(REFUSED)]
)  # fmt: skip
def test_a_wrong_argument_is_named_and_nothing_is_written(name, change, text, device):
    function, options = given()[name]
    options = {**on(device, options), **on(device, change)}
    if change.keys() & {"k_cache"}:  # .to() would give every row its own memory
        options |= {key: EXPANDED[:1].to(device).expand(2, -1, -1, -1) for key in ("k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        function(**options)
    assert isinstance(caught.value, tilefold.TilefoldError)
    for cache in ("k_cache", "v_cache"):
        assert cache not in options or not options[cache].any(), f"{cache} was written"


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "argument", "values", "text"),
    [
        ("pages", "block_table", [[0, 1, 2, 3], [4, 99, 6, 7]], "block_table[1, 1] is 99, expected 0 to 7"),
        ("cache", "cache_seqlens", [3, 16], "cache_seqlens[1] leads to 17 keys"),
        ("cache", "cache_batch_idx", [0, 2], "cache_batch_idx[1] is 2"),
        ("cache", "cache_leftpad", [0, -1], "leftpad[1] is -1"),
    ],
)
def test_a_wrong_value_is_refused_before_new_keys_are_written(name, argument, values, text):
    """Where the interpreter reads them: a GPU's are not read."""
    function, options = given()[name]
    refuses(RuntimeError, text, function, **{**options, argument: torch.tensor(values, dtype=I32)})
    assert not options["k_cache"].any()


@pytest.mark.parametrize("number", [2, -1, 0.5])
def test_masks_of_any_number_count_tokens(number):
    """Lengths that are counted otherwise than rows would lead a kernel past the end."""
    x, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    unused = torch.tensor([[0, 0, 1, 1, 0], [0] * 5])
    expected = bert_padding.unpad_input(x, mask, (unused != 0) & (mask == 0))
    found = bert_padding.unpad_input(x, mask * number, unused)
    assert found[2].tolist() == [0, 4, 8] and found[3] == 4 and found[4].tolist() == [3, 4]
    for a, b in zip(found, expected, strict=True):
        assert a == b if isinstance(a, int) else torch.equal(a, b)
