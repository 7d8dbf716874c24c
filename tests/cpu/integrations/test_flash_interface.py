"""What code that imports flash_attn sees: signatures, modules, versions, errors, and what is refused by name."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilefold.compat import flash_attn as fa
from tilefold.compat.flash_attn import bert_padding, flash_attn_interface
from tilefold.compat.flash_attn.layers import rotary

SRC = Path(__file__).resolve().parents[3] / "src"

COMMON = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
          "deterministic": False, "return_attn_probs": False}  # fmt: skip
NEEDED = inspect.Parameter.empty
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def needed(*names):
    return dict.fromkeys(names, NEEDED)


# flash-attention 2.8's positional parameters and defaults, in its order.
SIGNATURES = {
    fa.flash_attn_func: {**needed("q", "k", "v"), **COMMON},
    fa.flash_attn_kvpacked_func: {**needed("q", "kv"), **COMMON},
    fa.flash_attn_qkvpacked_func: {**needed("qkv"), **COMMON},
    fa.flash_attn_varlen_func: {**needed("q", "k", "v", *LENGTHS), **COMMON, "block_table": None},
    fa.flash_attn_varlen_kvpacked_func: {**needed("q", "kv", *LENGTHS), **COMMON},
    fa.flash_attn_varlen_qkvpacked_func: {**needed("qkv", "cu_seqlens", "max_seqlen"), **COMMON},
    fa.flash_attn_with_kvcache: {
        **needed("q", "k_cache", "v_cache"),
        **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table",
                         "softmax_scale")),
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None,
        "num_splits": 0, "return_softmax_lse": False,
    },
    flash_attn_interface._flash_attn_forward: needed(
        "q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap",
        "alibi_slopes", "return_softmax"),
    flash_attn_interface._flash_attn_varlen_forward: {
        **needed("q", "k", "v", *LENGTHS, "dropout_p", "softmax_scale", "causal"), "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False, "block_table": None,
        "leftpad_k": None, "seqused_k": None, "zero_tensors": False},
    flash_attn_interface._flash_attn_backward: {
        **needed("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "dropout_p", "softmax_scale", "causal",
                 "window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic"), "rng_state": None},
    flash_attn_interface._flash_attn_varlen_backward: {
        **needed("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *LENGTHS, "dropout_p", "softmax_scale", "causal",
                 "window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic"), "rng_state": None,
        "zero_tensors": False},
    flash_attn_interface._get_block_size_n: needed("device", "head_dim", "is_dropout", "is_causal"),
    rotary.apply_rotary_emb: {
        **needed("x", "cos", "sin"), "interleaved": False, "inplace": False, "seqlen_offsets": 0, "cu_seqlens": None,
        "max_seqlen": None},
    rotary.apply_rotary_emb_qkv_: {
        **needed("qkv", "cos", "sin"), "cos_k": None, "sin_k": None, "interleaved": False, "seqlen_offsets": 0,
        "num_heads_q": None},
    rotary.apply_rotary_emb_kv_: {**needed("kv", "cos", "sin"), "interleaved": False, "seqlen_offsets": 0},
    rotary.apply_rotary_emb_torch: {**needed("x", "cos", "sin"), "interleaved": False},
    rotary.RotaryEmbedding: {
        **needed("dim"), "base": 10000.0, "interleaved": False, "scale_base": None, "device": None},
    rotary.RotaryEmbedding.forward: {
        **needed("self", "qkv"), "kv": None, "seqlen_offset": 0, "max_seqlen": None, "num_heads_q": None},
    bert_padding.unpad_input: {**needed("hidden_states", "attention_mask"), "unused_mask": None},
    bert_padding.unpad_input_for_concatenated_sequences: needed("hidden_states", "attention_mask_in_length"),
    bert_padding.pad_input: needed("hidden_states", "indices", "batch", "seqlen"),
    bert_padding.index_first_axis: needed("input", "indices"),
    bert_padding.index_put_first_axis: needed("values", "indices", "first_axis_dim"),
}  # fmt: skip


@pytest.mark.parametrize("fn", SIGNATURES, ids=lambda fn: fn.__qualname__)
def test_signature(fn):
    parameters = inspect.signature(fn).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(SIGNATURES[fn].items())
    more = [p for p in parameters if p.name not in positional]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not NEEDED for p in more)


def test_names_of_flash_attn_s_own_tests():
    assert flash_attn_interface.USE_TRITON_ROCM is False
    assert flash_attn_interface._get_block_size_n("cuda", 64, True, False) >= 1 << 20  # one maximum a row
    assert all(
        hasattr(module, name) for module in (fa, flash_attn_interface, bert_padding, rotary) for name in module.__all__
    )


INSTALL = """
import importlib.metadata as metadata, importlib.util, pickle, sys
import tilefold.compat.flash_attn as fa
assert importlib.util.find_spec("flash_attn") is None
fa.install()
fa.install()
assert importlib.util.find_spec("flash_attn") is not None
assert importlib.util.find_spec("flash_attn.bert_padding") is not None
assert metadata.version("flash_attn") == metadata.version("flash-attn") == fa.__version__
assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
assert any(d.metadata["Name"] == "flash-attn" for d in metadata.distributions())
assert metadata.distribution("flash-attn").files is None
import flash_attn
import flash_attn.flash_attn_interface as interface
import flash_attn.layers.rotary
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_backward
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
assert flash_attn.__version__ == fa.__version__ and flash_attn_func is fa.flash_attn_func
assert flash_attn.layers.rotary is sys.modules["flash_attn.layers.rotary"] and not hasattr(flash_attn, "torch")
assert pickle.loads(pickle.dumps(RotaryEmbedding(8))).dim == 8
try:
    import flash_attn.cute
except ModuleNotFoundError as error:
    assert error.name == "flash_attn.cute"
else:
    raise AssertionError("flash_attn.cute is nowhere")
fa.uninstall()
fa.uninstall()
assert importlib.util.find_spec("flash_attn") is None and not any(n.split(".")[0] == "flash_attn" for n in sys.modules)
try:
    metadata.version("flash_attn")
except metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError("flash_attn has a version")
print("done")
"""
OVER_ANOTHER = """
import importlib, sys
import tilefold.compat.flash_attn as fa
import flash_attn as other
import flash_attn.cute as cute
assert other.REAL
fa.install()
import flash_attn
assert flash_attn.flash_attn_func is fa.flash_attn_func and not hasattr(flash_attn, "REAL")
import flash_attn.cute
assert flash_attn.cute.HERE  # what is not served comes from the other one
fa.uninstall()
import flash_attn
assert flash_attn is other and sys.modules["flash_attn.cute"] is cute
print("done")
"""


def run(code, folder=None):
    path = [str(SRC), *([str(folder)] if folder else [])]
    code = f"import sys; sys.path[:0] = {path!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


def test_install_in_a_fresh_process():
    if any(Path(p, "flash_attn").is_dir() for p in sys.path):
        pytest.skip("a flash_attn is installed here")
    run(INSTALL)


def test_install_over_another_flash_attn(tmp_path):
    package = tmp_path / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text("REAL = True\n")
    (package / "cute" / "__init__.py").write_text("HERE = True\n")
    run(OVER_ANOTHER, tmp_path)


# ---------------------------------------------------------------- bert_padding


def test_padding_there_and_back(device):
    x = torch.randn(3, 6, 2, 4, device=device).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0] * 6, [1, 0, 1, 1, 1, 1]], device=device)
    unused = torch.tensor([[0, 0, 0, 1, 0, 0], [0] * 6, [0, 1, 0, 0, 0, 0]], device=device)
    out, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert cu.tolist() == [0, 3, 3, 8] and cu.dtype == torch.int32
    assert longest == 5 and type(longest) is int
    assert used.tolist() == [3, 0, 5]
    assert torch.equal(out, x[mask.bool()])
    back = bert_padding.pad_input(out, indices.int(), 3, 6)  # transformers gives int32
    assert torch.equal(back, bert_padding.pad_input(out, indices, 3, 6))
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())
    out, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert cu.tolist() == [0, 4, 4, 10] and longest == 6 and used.tolist() == [3, 0, 5]
    with pytest.raises(RuntimeError, match="attention_mask"):
        bert_padding.unpad_input(x, mask[:, :5])


def test_several_sequences_in_a_row(device):
    x = torch.randn(2, 6, 4, device=device)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    out, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 11] and longest == 6
    assert torch.equal(out, torch.cat((x[0, :5], x[1])))
    rows, same = bert_padding.index_first_axis_residual(x[0], indices[:2])
    assert torch.equal(rows, x[0, :2]) and torch.equal(same, x[0])
