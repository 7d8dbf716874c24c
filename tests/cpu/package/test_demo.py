"""The demo on made-up data: judging, ranking, pictures, page; and its main line on a tiny random BERT, given transformers."""

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich", reason="the demo needs the cli extra")

from tilefold.cli.demo import DemoOptions, judge, show
from tilefold.cli.demo.judge import Check
from tilefold.cli.demo.model import Capture, Encoder, Tokens, batches_of, padding_mask
from tilefold.cli.demo.sentences import SENTENCES, chosen
from tilefold.cli.demo.show import Head, Report, Variant
from tilefold.errors import Unsupported, ValueRangeError

HEADS, DIM, LAYERS = 2, 16, 2


class Layer(torch.nn.Module):
    """Stands for a transformers attention layer."""

    is_causal = False


def attend(device, lengths=(5, 9)):
    """A capture with two layers called padded, as transformers calls them: [batch, heads, seq, dim] views."""
    capture = Capture()
    longest = max(lengths)
    live = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    mask = padding_mask(attention_mask=live.long().to(device), batch_size=len(lengths))
    for _ in range(LAYERS):
        q, k, v = (torch.randn(len(lengths), longest, HEADS, DIM, device=device).transpose(1, 2) for _ in range(3))
        out, weights = capture(Layer(), q, k, v, mask, scaling=DIM**-0.5)
        assert out.shape == (len(lengths), longest, HEADS, DIM)
        assert weights is None
    return capture


def test_layer_errors_judge_every_layer(device):
    capture = attend(device)
    errors = judge.layer_errors(capture.calls, LAYERS)
    assert [error.layer for error in errors] == [0, 1]
    assert all(error.ok for error in errors)


def test_a_wrong_layer_is_found(device):
    capture = attend(device)
    call = capture.calls[1]
    capture.calls[1] = replace(call, out=call.out + 1e-3)
    errors = judge.layer_errors(capture.calls, LAYERS)
    assert errors[0].ok and not errors[1].ok
    capture.calls[1] = replace(call, lse=call.lse + 1e-3)
    assert not judge.layer_errors(capture.calls, LAYERS)[1].ok


def test_packed_calls_equal_padded_ones(device):
    lengths = (3, 20)
    q, k, v = (torch.randn(1, HEADS, sum(lengths), DIM, device=device) for _ in range(3))
    offsets = torch.tensor([0, 3, 23], dtype=torch.int32, device=device)
    packed, alone = Capture(), Capture()
    out, _ = packed(Layer(), q, k, v, None, scaling=0.25, cu_seq_lens_q=offsets, max_length_q=20)
    part, _ = alone(Layer(), q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], None, scaling=0.25)
    torch.testing.assert_close(out[:, 3:], part)
    assert all(error.ok for error in judge.layer_errors(packed.calls, 1))
    assert packed.calls[0].plan().kernel == "attention_forward_varlen"
    ours, theirs = (judge.probabilities(c.calls[0], row, 20, 1) for c, row in ((packed, 1), (alone, 0)))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_probabilities_come_back_from_the_lse(device):
    call = attend(device).calls[0]
    p = judge.probabilities(call, 0, 5, 1)
    q, k = (x[0, :5, 1].double().cpu() for x in (call.q, call.k))
    torch.testing.assert_close(p, torch.softmax(call.options["scale"] * q @ k.T, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(p.sum(1), torch.ones(5, dtype=torch.float64), atol=1e-5, rtol=0)


def test_dropout_and_causal_layers_are_refused(device):
    q = torch.randn(1, HEADS, 4, DIM, device=device)
    with pytest.raises(Unsupported, match="no dropout"):
        Capture()(Layer(), q, q, q, None, dropout=0.1)


def test_ranking_orders_the_others_nearest_first():
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0])
    ranking = judge.rank(torch.stack([angles.cos(), angles.sin()], 1))
    assert ranking.order.tolist() == [[1, 2, 3], [0, 2, 3], [1, 0, 3], [2, 1, 0]]
    assert [j for j, _ in ranking.nearest] == [1, 0, 1, 2]
    assert ranking.gap > 0
    other = judge.rank(torch.stack([angles.sin(), angles.cos()], 1)[[1, 0, 2, 3]])
    assert not torch.equal(ranking.order, other.order)


def test_batches_hold_every_sentence_once():
    tokens = [Tokens(tuple(range(1, n + 1)), ("a",) * n) for n in (3, 100, 7, 64, 65)]
    batches = batches_of(tokens, "cpu")
    assert [batch.index for batch in batches] == [(0, 2, 3), (1, 4)]
    for batch in batches:
        assert batch.mask.sum(1).tolist() == [len(tokens[i].ids) for i in batch.index]
        assert torch.equal(batch.ids > 0, batch.mask > 0)


def test_sentences_have_topics_with_company():
    for sentences in (SENTENCES, chosen(quick=True)):
        topics = [sentence.topic for sentence in sentences]
        assert min(topics.count(topic) for topic in topics) >= 2
        assert topics == sorted(topics, key=topics.index)  # topics lie together: the picture draws lines between them


def made_up_report(device) -> Report:
    """A report with every part filled."""
    call = attend(device).calls
    errors = judge.layer_errors(call, LAYERS)
    ranking = judge.rank(torch.nn.functional.normalize(torch.randn(len(SENTENCES), 8), dim=1))
    variant = Variant("attention", "padded", [call[0].plan()], errors)
    head = Head(0, 1, "a <b> c", ("[CLS]", "a", "<b>", "c", "[SEP]"), judge.probabilities(call[0], 0, 5, 1))
    checks = [Check("first", True, "fine"), Check("second", False, "1 > 0")]
    surroundings = [("device", "a <device>"), ("torch", torch.__version__)]
    return Report(surroundings, SENTENCES, [5] * len(SENTENCES), [variant], ranking, head, checks, [])


def test_page_needs_nothing_else_and_says_what_failed(device, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the plots extra")
    report = made_up_report(device)
    files = show.write(report, tmp_path)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    text = files[0].read_text()
    assert not re.search(r"(src|[^:]href)=|@import|<script|<link", text)
    assert not re.search(r"http(?!://www.w3.org/)", text)
    assert text.count("<svg") == 1 and "a &lt;b&gt; c" in text and "a <b> c" not in text
    assert "1 of 2 checks FAILED" in text
    good = replace(report, checks=report.checks[:1])
    assert good.ok and not report.ok
    assert "All 1 checks hold" in show.write(good, tmp_path)[0].read_text()
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ET.fromstring(svg)


def test_links_leave_marks_and_punctuation_out(device):
    found = made_up_report(device).head.links(10)
    assert {(a, b) for a, b, _ in found} == {("a", "c"), ("c", "a")}
    assert found[0][2] >= found[1][2]


def test_terminal_shows_the_plan_and_the_verdict(device, tmp_path):
    from rich.console import Console

    console = Console(record=True, width=80, file=io.StringIO())
    show.report(made_up_report(device), [tmp_path / "demo.html"], console)
    text = console.export_text()
    assert "Attention plan for" in text and "1 of 2 checks FAILED" in text and "demo.html" in text


@pytest.fixture
def tiny(device):
    """A random BERT of two layers, and made-up tokens for the quick sentences."""
    transformers = pytest.importorskip("transformers", reason="the model part of the demo needs transformers")
    sizes = {"hidden_size": HEADS * DIM, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    config = transformers.BertConfig(
        vocab_size=50, num_attention_heads=HEADS, max_position_embeddings=80, attn_implementation="eager", **sizes
    )
    encoder = Encoder(transformers.BertModel(config).eval().to(device))
    lengths = [3 + i for i in range(len(chosen(True)) - 1)] + [70]
    ids = [tuple(torch.randint(1, 50, (n,)).tolist()) for n in lengths]
    return encoder, [Tokens(one, tuple(f"w{i}" for i in one)) for one in ids]


def test_whole_line_on_a_tiny_model(tiny, device, tmp_path):
    from rich.progress import Progress

    from tilefold.cli.demo.run import Clock, examine

    encoder, tokens = tiny
    options = DemoOptions(tmp_path, True, device.type, layer=1, head=1, sentence=2)
    with Progress(disable=True) as progress:
        clock = Clock(progress, progress.add_task("", total=1))
        report = examine(encoder, tokens, chosen(True), options, clock)
        with pytest.raises(ValueRangeError, match="head must be 0 to 1, got 5"):
            examine(encoder, tokens, chosen(True), replace(options, head=5), clock)
    assert [variant.function for variant in report.variants] == ["attention", "attention_varlen"]
    assert {plan.problem.mask_mods for plan in report.variants[0].plans} == {("mask",)}
    wrong = [check for check in report.checks if not check.ok]
    assert not wrong, wrong
    assert len(show.write(report, tmp_path)) == 2
