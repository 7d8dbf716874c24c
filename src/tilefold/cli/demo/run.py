"""The demo's main line: load, embed three ways, judge, show, write."""

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import tilefold
from tilefold import reference
from tilefold.cli.demo import judge, kernels, show
from tilefold.cli.demo.judge import Check
from tilefold.cli.demo.model import Encoder, LayerCall, Tokens, batches_of, load, tokenize
from tilefold.cli.demo.sentences import Sentence, chosen
from tilefold.cli.demo.show import Head, Report, Variant
from tilefold.cli.runtime import folder
from tilefold.debug import patch_interpreter
from tilefold.errors import ValueRangeError
from tilefold.ops.device import interpreting
from tilefold.ops.environment import interpreter_fault, triton_version


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """out: folder for what the demo writes. quick: fewer sentences. device: "cuda" or "cpu".

    layer, head, sentence: whose attention the heat map shows, counted from 0. In the trained model layer 3's head 1
    ties words to what they refer to: in sentence 0, "they" to "owls".
    """

    out: Path = Path("out/demo")
    quick: bool = False
    device: str = "cpu"
    layer: int = 3
    head: int = 1
    sentence: int = 0


@dataclass(slots=True)
class Clock:
    """Times the stages and moves the progress bar: one step per stage, and one per attention call."""

    progress: Progress
    task: TaskID
    stages: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside under this name."""
        self.progress.update(self.task, description=name)
        start = time.perf_counter()
        yield
        self.stages.append((name, time.perf_counter() - start))
        self.tick()

    def tick(self) -> None:
        """One step done."""
        self.progress.advance(self.task)


def run_demo(options: DemoOptions, console: Console) -> Report:
    """Run the demo, print to `console`, write page, picture into options.out.

    Raises Unsupported where a package is missing, ValueRangeError for a layer, head or sentence that does not exist.
    On the CPU in plain torch, or, with TRITON_INTERPRET=1, in Triton's interpreter.
    """
    if interpreting():
        patch_interpreter()
    console.print(show.heading())
    sentences = chosen(options.quick)
    _check(sentence=(options.sentence, len(sentences)))
    folder(options.out)
    alone = options.device == "cpu" and not interpreting() and interpreter_fault() is None
    beside = kernels.begin() if alone else None
    columns = (
        BarColumn(30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        clock = Clock(progress, progress.add_task("loading", total=60))
        with clock.stage("load torch, transformers and the model"):
            encoder, tokenizer = load(options.device)
            tokens = tokenize(tokenizer, [sentence.text for sentence in sentences])
        report = examine(encoder, tokens, sentences, options, clock)
        if beside is not None:
            with clock.stage("one kernel in Triton's interpreter, begun with the first stage"):
                report.checks.append(kernels.finish(beside))
        with clock.stage("write the page and the picture"):
            files = show.write(report, options.out)
    show.report(report, files, console)
    return report


def _check(**places: tuple[int, int]) -> None:
    """ValueRangeError for a number, by name, that is not below its count."""
    for name, (value, count) in places.items():
        if not 0 <= value < count:
            raise ValueRangeError(f"{name} must be 0 to {count - 1}, got {value}")


def examine(
    encoder: Encoder, tokens: list[Tokens], sentences: tuple[Sentence, ...], options: DemoOptions, clock: Clock
) -> Report:
    """Embed by PyTorch in fp64 and fp32 and through tilefold padded and packed; judge all of it."""
    _check(layer=(options.layer, encoder.layers), head=(options.head, encoder.heads))
    batches = batches_of(tokens, options.device)
    clock.progress.update(clock.task, total=6 + encoder.layers * (len(batches) + 1))
    with clock.stage("embed by eager PyTorch, fp32"):
        eager = encoder.eager(batches)
    with clock.stage("embed by eager PyTorch, fp64 (the oracle)"):
        double = encoder.in_double()
        exact = double.eager(batches)
        plain = reference.deviating(lambda: double.eager(batches), torch.float32)
    ranking = judge.rank(eager)
    ways: tuple[tuple[str, str, Callable[[Callable[[], None]], tuple[torch.Tensor, list[LayerCall]]]], ...] = (
        ("attention", "padded batches, with the padding mask", lambda tick: encoder.padded(batches, tick)),
        ("attention_varlen", "one packed batch, without padding", lambda tick: encoder.packed(tokens, tick)),
    )
    variants, kept, checks = [], [], []
    for function, note, embed in ways:
        if options.device == "cuda":
            with clock.stage(f"tilefold.{function}: first run, compiles"):
                embed(lambda: None)
        with clock.stage(f"embed through tilefold.{function}"):
            embeddings, calls = embed(clock.tick)
        kept.append(calls)
        plans = [call.plan() for call in calls[:: encoder.layers]]
        variants.append(Variant(function, note, plans, judge.layer_errors(calls, encoder.layers)))
        checks += _checks(variants[-1], embeddings, (exact, plain, eager), ranking)
    with clock.stage("one head from its lse"):  # from the padded run
        i = options.sentence
        number = next(n for n, batch in enumerate(batches) if i in batch.index)
        call, row, words = (
            kept[0][number * encoder.layers + options.layer],
            batches[number].index.index(i),
            tokens[i].texts,
        )
        p = judge.probabilities(call, row, len(words), options.head)
        head = Head(options.layer, options.head, sentences[i].text, words, p)
    checks.append(_rows_sum_to_one(head, variants[0].layers[options.layer]))
    lengths = [len(one.ids) for one in tokens]
    return Report(environment(options.device), sentences, lengths, variants, ranking, head, checks, clock.stages)


def environment(device: str) -> list[tuple[str, str]]:
    """Versions and the device, as (name, value)."""
    import transformers

    how = "Triton's interpreter" if interpreting() else "plain torch"
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {how}, {torch.get_num_threads()} threads"
    return [
        ("device", where),
        ("tilefold", tilefold.__version__),
        ("torch", torch.__version__),
        ("triton", triton_version() or "not installed"),
        ("transformers", transformers.__version__),
        ("python", platform.python_version()),
        ("model", "all-MiniLM-L6-v2: 6 layers, 12 heads of dim 32, 22.7 M weights, fp32"),
    ]


def _checks(
    variant: Variant, embeddings: torch.Tensor, truth: tuple[torch.Tensor, ...], wanted: judge.Ranking
) -> list[Check]:
    """The claims about one way of running the model; truth: embeddings in fp64, one standard deviation of fp32's rounding off,
    and by eager PyTorch in fp32, whose ranking is `wanted`."""
    exact, plain, eager = truth
    e, ranking = reference.compare(embeddings, exact, plain), judge.rank(embeddings)
    apart = float((ranking.similarity - wanted.similarity).abs().max())
    difference, own = float((embeddings - eager).abs().max()), float((eager.double() - exact).abs().max())
    # Both lie around the fp64 result: within tilefold's limit and PyTorch's own error, so within their sum of each other.
    limit = e.largest_limit + own
    same = torch.equal(ranking.order, wanted.order)
    right, name = sum(layer.ok for layer in variant.layers), f"tilefold.{variant.function}"
    return [
        Check(f"{name}: layers", right == len(variant.layers), f"{right} of {len(variant.layers)} within the limit"),
        Check(
            f"{name}: embeddings",
            e.ok and difference <= limit,
            f"differ from PyTorch's by at most {difference:.1e} (limit {limit:.1e}); from fp64 by "
            f"{e.max_error:.1e} (limit {e.max_limit:.1e}; PyTorch {own:.1e})",
        ),
        Check(
            f"{name}: nearest-sentence ranking",
            same,
            f"{'identical' if same else 'DIFFERS'}; similarities differ by at most {apart:.1e}, the closest decision in "
            f"the ranking is {wanted.gap:.1e}",
        ),
    ]


def _rows_sum_to_one(head: Head, layer: judge.LayerError) -> Check:
    """An error d of the lse scales its row by exp(-d), so the rows may miss 1 by exp(limit of the lse) - 1."""
    off = float((head.probabilities.sum(1) - 1).abs().max())
    limit = float(torch.expm1(torch.tensor(layer.lse.largest_limit, dtype=torch.float64)))
    return Check(
        "lse: the head's probabilities sum to 1", off <= limit, f"rows miss 1 by at most {off:.1e} (limit {limit:.1e})"
    )
