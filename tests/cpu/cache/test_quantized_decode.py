"""examples/quantized_decode.py: its step beside Transformers', what it prints, and that a wrong weight is found."""

import json

import pytest
import torch

pytest.importorskip("transformers")

import quantized_decode
from quantized_decode import Decoder, build, by_torch, in_few_bits, judged, main, merge

TINY = ["--layers", "1", "--new", "1", "--prompt", "2", "--no-compile", "--group", "64"]

pytestmark = [pytest.mark.interpreter, pytest.mark.no_poison]


def test_it_runs_and_says_that_all_is_right(tmp_path, capsys):
    assert main([*TINY, "--json", str(tmp_path / "run.json")]) == 0
    text = capsys.readouterr().out
    assert "model.layers.0.self_attn.qkv_proj" in text and "the whole model: " in text
    assert text.count("logits after the prompt beside fp32: ok") == 2
    run = json.loads((tmp_path / "run.json").read_text())
    assert [(row["name"], row["way"]) for row in run["rows"]] == [("bfloat16", "eager"), ("4 bits", "eager")]
    assert run["rows"][0]["megabytes"] > run["rows"][1]["megabytes"] > 0


def test_the_step_is_transformers_own():
    options = quantized_decode.arguments([*TINY, "--layers", "2", "--prompt", "4"], False)
    model, prompt = build(options, "cpu").float(), torch.tensor([5, 9, 3, 77])
    want = model(prompt[None]).logits[:, -1]
    merge(model)
    decoder = Decoder(model, 4, False, torch.float32, by_torch(torch.float32))
    got = decoder.run(prompt, decoder.step)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_wrong_weight_is_found():
    options, prompt = quantized_decode.arguments(TINY, False), torch.tensor([5, 9])
    model = build(options, "cpu")
    merge(model)
    low, _ = in_few_bits(model, 8, 64)
    assert low.model.embed_tokens.weight is model.model.embed_tokens.weight
    decoder = Decoder(low, 2, False, torch.bfloat16)
    logits = decoder.run(prompt, decoder.step)[0]
    assert judged(low, logits, prompt).ok
    low.lm_head.scales.mul_(1.05)
    assert not judged(low, logits, prompt).ok
