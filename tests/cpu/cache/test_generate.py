"""examples/generate.py: its engine under any workload, its model and tokens beside Transformers', what it prints and refuses."""

import json
import string
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples

pytest.importorskip("rich", reason="the example needs the cli extra")

from continuous.engine import Engine, Limits, Request
from continuous.qwen2 import Shape
from continuous.workload import arrivals, random_requests
from generate import arguments, main
from tilefold import PagedKVCache

# ---------------------------------------------------------------- the engine, over a model without attention


class Remembering:
    """A model whose next token depends on every token of the sequence: what was not written where it belongs is missed.

    It keeps the tokens by sequence and row, as the cache keeps their keys."""

    def __init__(self, vocabulary=17):
        self.rows, self.vocabulary, self.calls = {}, vocabulary, []

    def __call__(self, tokens, cache, batch, rows):
        places = [(one, n) for one, n in zip(batch.sequences, batch.counts, strict=True) for _ in range(n)]
        assert len(places) == len(tokens) == batch.total
        for (one, _), at, token in zip(places, batch.positions.tolist(), tokens.tolist(), strict=True):
            self.rows[one, at] = token
        self.calls.append(dict(zip(batch.sequences, batch.counts, strict=True)))
        logits = torch.zeros(len(rows), self.vocabulary)
        for i, row in enumerate(rows.tolist()):
            one, at = places[row][0], int(batch.positions[row])
            assert cache.length(one) == at + 1
            logits[i, self.next([self.rows[one, j] for j in range(at + 1)])] = 1
        return logits

    def next(self, known):
        return sum((i + 1) * token for i, token in enumerate(known)) % self.vocabulary

    def greedy(self, request):
        known = list(request.prompt)
        while len(known) < len(request.prompt) + request.new_tokens:
            known.append(self.next(known))
            if known[-1] in request.ends:
                break
        return known[len(request.prompt) :]


def serve(requests, limits, pages, page_size):
    model = Remembering()
    cache = PagedKVCache(1, 1, 1, num_pages=pages, page_size=page_size, max_sequences=max(1, len(requests)), max_tokens=64,
                         dtype=torch.float32, device="cpu")  # fmt: skip
    engine = Engine(model, cache, limits)
    engine.submit(requests)
    steps = []
    while engine.busy:
        oldest = min((one for one in (*engine.running, *engine.swapped, *engine.waiting)), key=by_age, default=None)
        before = oldest and (oldest.cached, len(oldest.known))
        steps.append(engine.step())
        assert oldest is None or oldest.finished is not None or (oldest.cached, len(oldest.known)) != before
        assert steps[-1].prefill + steps[-1].decode <= limits.tokens
        assert len(engine.running) <= limits.running
        assert [one.number for one in engine.running] == [one.number for one in sorted(engine.running, key=by_age)]
        assert len(steps) < 5000
    assert cache.free_pages == pages and cache.sequences == ()
    assert sorted(one.number for one in engine.finished) == list(range(len(requests)))
    for one in requests:
        assert one.generated == model.greedy(one)
        assert one.arrives <= one.first <= one.finished
    assert sum(one.preempted for one in requests) == sum(one.preempted for one in steps)
    return model, steps


def test_the_peak_counts_those_who_leave_in_its_step():
    """A request that fits one step takes pages, though none is left after it."""
    model, limits = Remembering(), Limits(tokens=8, chunk=8, running=1)
    cache = PagedKVCache(
        1, 1, 1, num_pages=4, page_size=4, max_sequences=1, max_tokens=16, dtype=torch.float32, device="cpu"
    )
    engine = Engine(model, cache, limits)
    engine.submit([Request(0, prompt=(1, 2, 3, 4, 5), new_tokens=1)])
    record = engine.step()
    assert not engine.busy and cache.free_pages == 4
    assert record.pages == engine.peak.pages_used == 2


def by_age(one):
    return one.arrives, one.number


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 12)), max_size=8),
    st.integers(1, 5),
    st.integers(0, 12),
    st.builds(
        Limits, tokens=st.integers(1, 12), chunk=st.integers(1, 6), running=st.integers(1, 4), swap=st.booleans()
    ),
    st.sampled_from([(), (0, 3)]),
)
def test_every_workload_ends_with_the_right_tokens_and_no_page_lost(sizes, page_size, spare, limits, ends):
    requests = [
        Request(i, tuple((7 * i + j) % 17 for j in range(prompt)), new, arrives, ends)
        for i, (prompt, new, arrives) in enumerate(sizes)
    ]
    pages = max((-(-one.longest // page_size) for one in requests), default=1) + spare
    serve(requests, limits, pages, page_size)


@pytest.mark.parametrize("swap", [False, True])
def test_the_youngest_gives_back_its_pages_and_goes_on_later(swap):
    requests = [Request(i, (i + 1, 2, 3), 12, 0) for i in range(3)]
    model, steps = serve(requests, Limits(tokens=64, chunk=64, running=3, swap=swap), pages=9, page_size=2)
    assert requests[0].preempted == 0 and requests[2].preempted > 0
    assert requests[0].finished <= requests[1].finished <= requests[2].finished
    again = sum(sum(counts.values()) for counts in model.calls) - sum(one.longest for one in requests)
    assert (sum(one.resumed for one in steps) > 0) == swap and (again == 0) == swap


def test_long_prompts_come_in_chunks_beside_decoding():
    requests = [Request(0, (1, 2), 12, 0), Request(1, tuple(range(16)), 2, 1)]
    _, steps = serve(requests, Limits(tokens=5, chunk=4, running=2), pages=16, page_size=4)
    assert sum(one.prefill == 4 and one.decode == 1 for one in steps) == 4
    assert not any(one.preempted for one in steps)


def test_nobody_waits_for_steps_in_which_nothing_would_run():
    requests = [Request(0, (1,), 1, 0), Request(1, (2,), 1, 500)]
    _, steps = serve(requests, Limits(), pages=2, page_size=4)
    assert [one.step for one in steps] == [0, 500]


def test_what_can_never_run_is_refused_before_anything_does():
    cache = PagedKVCache(
        1, 1, 1, num_pages=2, page_size=4, max_sequences=1, max_tokens=64, dtype=torch.float32, device="cpu"
    )
    engine = Engine(Remembering(), cache, Limits())
    for one, message in (
        (Request(5, (1, 2), 8), "request 5 needs 9 rows of the cache, which holds 8 of a sequence"),
        (Request(6, (), 8), "request 6 needs a prompt and at least 1 new token"),
        (Request(7, (1,), 0), "request 7 needs a prompt and at least 1 new token"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit([one])
    assert not engine.busy
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        Engine(Remembering(), cache, Limits(chunk=0))


def test_arrivals_are_a_poisson_process_by_seed():
    import random

    times = arrivals(4000, 0.5, random.Random(1))
    assert times == sorted(times) == arrivals(4000, 0.5, random.Random(1)) and times[0] == 0
    assert times[-1] / 4000 == pytest.approx(2, rel=0.1)
    counts = [times.count(step) for step in range(4000)]
    mean = sum(counts) / 4000
    assert sum((n - mean) ** 2 for n in counts) / 4000 == pytest.approx(mean, rel=0.15)  # variance and mean of Poisson
    with pytest.raises(ValueError, match="rate must be positive, got 0"):
        arrivals(1, 0, random.Random(1))
    with pytest.raises(ValueError, match="prompt must be two lengths"):
        random_requests(1, 8, (3, 2), (1, 1), 1.0, 0)


# ---------------------------------------------------------------- beside Transformers


@pytest.mark.interpreter
@pytest.mark.parametrize(("swap", "heads", "kv_heads"), [(False, 2, 1), (True, 4, 2)])
def test_every_request_has_the_tokens_of_transformers(swap, heads, kv_heads):
    pytest.importorskip("transformers")
    from cases.generation import LIMITS, run_engine, tiny, workload
    from continuous.compare import compare_requests

    model, theirs = tiny("cpu", heads=heads, kv_heads=kv_heads, hidden=16 * heads, layers=kv_heads)
    requests = workload(4, new=(4, 6))
    _, steps = run_engine(model, requests, replace(LIMITS, swap=swap), pages=8)
    assert any(one.prefill and one.decode for one in steps)
    assert any(one.preempted for one in steps) and any(one.resumed for one in steps) == swap
    found = compare_requests(requests, theirs, torch.float32)
    assert all(one.equal for one in found), found
    assert len({tuple(one.got) for one in found}) == len(found)  # answers that say something
    requests[2].known[-1] = (requests[2].known[-1] + 1) % 64
    assert [one.number for one in compare_requests(requests, theirs, torch.float32) if not one.ok] == [2]


@pytest.mark.interpreter
def test_answers_end_with_the_end_token_as_they_do_there():
    pytest.importorskip("transformers")
    from cases.generation import LIMITS, run_engine, tiny
    from continuous.compare import compare_requests

    model, theirs = tiny("cpu", layers=1)
    (free,) = [Request(0, (5, 9, 2), 8)]
    run_engine(model, [free], LIMITS, pages=4)
    ended = Request(0, free.prompt, 8, ends=(free.generated[2],))
    run_engine(model, [ended], LIMITS, pages=4)
    assert ended.generated == free.generated[: free.generated.index(free.generated[2]) + 1]
    assert compare_requests([ended], theirs, torch.float32)[0].equal


def test_only_rounding_may_part_answers_in_16_bits():
    pytest.importorskip("transformers")
    from cases.generation import tiny
    from continuous.compare import compare_requests

    _, theirs = tiny("cpu", layers=1)
    one = Request(0, (5, 9, 2), 6)
    (right,) = compare_requests([one], theirs, torch.bfloat16)
    one.known += right.wanted
    assert compare_requests([one], theirs, torch.bfloat16)[0].equal
    logits = theirs(torch.tensor([[*one.prompt, *right.wanted[:3]]])).logits[0, -1]
    one.known[6] = int(logits.argmin())
    (wrong,) = compare_requests([one], theirs, torch.bfloat16)
    assert (wrong.same, wrong.ok) == (3, False) and wrong.gap > wrong.rounding > 0


def test_rounded_weights_leave_the_rotary_frequencies_alone():
    """In fp16 answers parted where none may, as the model compared with had been rounded in its frequencies, too."""
    pytest.importorskip("transformers")
    from cases.generation import tiny
    from continuous.compare import with_weights

    _, theirs = tiny("cpu")
    for dtype in (torch.float16, torch.float32):
        made = with_weights(with_weights(theirs, torch.float16), dtype)
        assert {one.dtype for one in made.parameters()} == {dtype}
        buffers = dict(made.named_buffers())
        assert any("inv_freq" in name for name in buffers)
        assert all(torch.equal(one, buffers[name]) for name, one in theirs.named_buffers())


def test_shapes_that_the_model_does_not_compute_are_refused():
    transformers = pytest.importorskip("transformers")
    for changes, message in (
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type must be 'default', got 'linear'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Shape.of(transformers.Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, **changes))
    with pytest.raises(ValueError, match="model_type must be 'qwen2', got 'llama'"):
        Shape.of(transformers.LlamaConfig())


# ---------------------------------------------------------------- the program


@pytest.mark.interpreter
def test_the_program_says_what_it_does(tmp_path, capsys):
    pytest.importorskip("transformers")
    figures = tmp_path / "run.json"
    small = ["--requests", "3", "--layers", "1", "--prompt", "2,9", "--new", "3,4", "--pages", "6", "--rate", "2"]
    assert main([*small, "--json", str(figures)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "Kernels run on the CPU in Triton's interpreter",
        "generated tokens/s",
        "at the peak, 4 tokens each",
        "3 of 3 requests compared have exactly the tokens of Transformers' greedy generation",
    ):
        assert words in printed
    record = json.loads(figures.read_text())
    assert record["generated"] == sum(len(one["generated"]) for one in record["requests"])
    assert record["peak"]["pages_used"] <= 6 and len(record["steps"]) == len({one["step"] for one in record["steps"]})
    assert main([*small, "--new", "40,40"]) == 2
    assert "rows of the cache, which holds" in capsys.readouterr().err


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_local_directory_with_a_tokenizer(tmp_path, capsys, kind):
    pytest.importorskip("transformers")
    from cases.generation import tiny
    from continuous.weights import load_directory

    # One token a letter, as Qwen2's tokenizer has for bytes; Ġ is a space.
    letters = {letter: i for i, letter in enumerate(("Ġ", *string.ascii_lowercase, "<|endoftext|>"))}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    _, theirs = tiny("cpu", layers=1)
    theirs.save_pretrained(tmp_path)
    if kind == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("an owl\n\nsees\n")
    arguments = ["--model", str(tmp_path), "--prompts", str(prompts), "--new", "3"]
    if kind == "safetensors":
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert "0: an owl" in printed and "2 of 2 requests compared" in " ".join(printed.split())
    else:
        ours, _ = load_directory(tmp_path)
        assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
        (tmp_path / "pytorch_model.bin").unlink()
        assert main(arguments) == 2
        assert "neither *.safetensors nor pytorch_model*.bin" in capsys.readouterr().err
    assert main(["--prompts", str(prompts)]) == 2
    assert main(["--model", str(tmp_path / "nowhere")]) == 2


@pytest.mark.interpreter
def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["--requests", "1"]) == 2
    assert "pip install 'tilefold[cli,transformers]'" in capsys.readouterr().err


# ---------------------------------------------------------------- its page

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "generate.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_are_understood():
    commands = [line.split("#")[0].split()[2:] for line in PAGE.splitlines() if line.startswith("python examples/")]
    assert len(commands) == 4
    for gpu in (False, True):
        for command in commands:
            assert arguments(command, gpu).requests > 0


@pytest.mark.interpreter
def test_the_example_of_the_page_runs():
    pytest.importorskip("transformers")
    (example,) = (part.split("```")[0] for part in PAGE.split("```python\n")[1:])
    names = {}
    exec(example.replace('"cuda"', '"cpu"'), names)
    assert {number: len(tokens) for number, tokens in names["answers"].items()} == {0: 4, 1: 3}
    assert names["cache"].free_pages == 8
