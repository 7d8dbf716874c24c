"""The demo's main line: load, embed three ways, judge, show, write."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tilefold import reference
from tilefold.cli.demo import judge, kernels, show
from tilefold.cli.demo.capture import LayerCall
from tilefold.cli.demo.model import Batch, Encoder, Tokens, batches_of, load, tokenize
from tilefold.cli.demo.options import Check, DemoOptions, DemoResult, Stage
from tilefold.cli.demo.report import Head, Report, Variant, environment
from tilefold.cli.demo.sentences import Sentence, chosen
from tilefold.debug import patch_interpreter
from tilefold.errors import ValueRangeError
from tilefold.ops.device import interpreting
from tilefold.ops.environment import interpreter_fault


@dataclass(slots=True)
class Clock:
    """Times the stages and moves the progress bar: one step per stage, and one per attention call."""

    progress: Progress
    task: TaskID
    stages: list[Stage] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside under this name."""
        self.progress.update(self.task, description=name)
        start = time.perf_counter()
        yield
        self.stages.append(Stage(name, time.perf_counter() - start))
        self.tick()

    def tick(self) -> None:
        """One step done."""
        self.progress.advance(self.task)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a variant is compared with: embeddings in fp64, one standard deviation of fp32's rounding off, and by eager PyTorch in
    fp32 with their ranking."""

    exact: torch.Tensor
    plain: torch.Tensor
    eager: torch.Tensor
    ranking: judge.Ranking


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Run the demo, print to `console`, write page, picture into options.out.

    Raises Unsupported where a package is missing, ValueRangeError for a layer, head or sentence that does not exist.
    On the CPU in plain torch, or, with TRITON_INTERPRET=1, in Triton's interpreter.
    """
    if interpreting():
        patch_interpreter()
    console.print(show.heading())
    sentences = chosen(options.quick)
    if not 0 <= options.sentence < len(sentences):
        raise ValueRangeError(f"sentence must be 0 to {len(sentences) - 1}, got {options.sentence}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueRangeError(
            f"out must be a folder that can be written, got {options.out} ({error.strerror})"
        ) from None
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
                report = replace(report, checks=(*report.checks, kernels.finish(beside)))
        with clock.stage("write the page and the picture"):
            files = show.write(report, options.out)
    show.report(report, files, clock.stages, console)
    return DemoResult(report.checks, tuple(clock.stages), files)


def examine(
    encoder: Encoder, tokens: list[Tokens], sentences: tuple[Sentence, ...], options: DemoOptions, clock: Clock
) -> Report:
    """Embed by PyTorch in fp64 and fp32 and through tilefold padded and packed; judge all of it."""
    _check_head(encoder, options)
    batches = batches_of(tokens, options.device)
    clock.progress.update(clock.task, total=6 + encoder.layers * (len(batches) + 1))
    with clock.stage("embed by eager PyTorch, fp32"):
        eager = encoder.eager(batches)
    with clock.stage("embed by eager PyTorch, fp64 (the oracle)"):
        double = encoder.in_double()
        exact = double.eager(batches)
        plain = reference.deviating(lambda: double.eager(batches), torch.float32)
    truth = Truth(exact, plain, eager, judge.rank(eager))
    ways: tuple[tuple[str, str, Callable[[Callable[[], None]], tuple[torch.Tensor, list[LayerCall]]]], ...] = (
        ("attention", "padded batches, with the padding mask", lambda tick: encoder.padded(batches, tick)),
        ("attention_varlen", "one packed batch, without padding", lambda tick: encoder.packed(tokens, tick)),
    )
    variants, kept = [], []
    for function, note, embed in ways:
        if options.device == "cuda":
            with clock.stage(f"tilefold.{function}: first run, compiles"):
                embed(lambda: None)
        with clock.stage(f"embed through tilefold.{function}"):
            embeddings, calls = embed(clock.tick)
        kept.append(calls)
        variants.append(_variant(function, note, embeddings, calls, truth, encoder.layers))
    with clock.stage("one head from its lse"):
        head = _head(kept[0], batches, tokens, sentences, options, encoder.layers)
    layer = variants[0].layers[options.layer]
    checks = [check for variant in variants for check in _checks(variant, truth)]
    return Report(
        environment(options.device),
        sentences,
        tuple(len(one.ids) for one in tokens),
        tuple(variants),
        truth.ranking,
        head,
        (*checks, _rows_sum_to_one(head, layer)),
        tuple(clock.stages),
    )


def _variant(
    function: str, note: str, embeddings: torch.Tensor, calls: list[LayerCall], truth: Truth, layers: int
) -> Variant:
    """Judge one way of running the model."""
    ranking = judge.rank(embeddings)
    return Variant(
        function,
        note,
        tuple(call.plan() for call in calls[::layers]),
        tuple(judge.layer_errors(calls, layers)),
        reference.compare(embeddings, truth.exact, truth.plain),
        float((embeddings - truth.eager).abs().max()),
        float((ranking.similarity - truth.ranking.similarity).abs().max()),
        judge.same_ranking(ranking, truth.ranking),
    )


def _checks(variant: Variant, truth: Truth) -> list[Check]:
    """The claims about one variant."""
    right = sum(layer.ok for layer in variant.layers)
    e, name = variant.embeddings, f"tilefold.{variant.function}"
    own = float((truth.eager.double() - truth.exact).abs().max())
    # Both lie around the fp64 result: within tilefold's limit and PyTorch's own error, so within their sum of each other.
    equal = e.ok and variant.difference <= e.largest_limit + own
    return [
        Check(f"{name}: layers", right == len(variant.layers), f"{right} of {len(variant.layers)} within the limit"),
        Check(
            f"{name}: embeddings",
            equal,
            f"differ from PyTorch's by at most {variant.difference:.1e} (limit {e.largest_limit + own:.1e}); from fp64 by "
            f"{e.max_error:.1e} (limit {e.max_limit:.1e}; PyTorch {own:.1e})",
        ),
        Check(
            f"{name}: nearest-sentence ranking",
            variant.ranked_the_same,
            f"{'identical' if variant.ranked_the_same else 'DIFFERS'}; similarities differ by at most "
            f"{variant.similarity_difference:.1e}, the closest decision in the ranking is {truth.ranking.gap:.1e}",
        ),
    ]


def _rows_sum_to_one(head: Head, layer: judge.LayerError) -> Check:
    """An error d of the lse scales its row by exp(-d), so the rows may miss 1 by exp(limit of the lse) - 1."""
    off = float((head.probabilities.sum(1) - 1).abs().max())
    limit = float(torch.expm1(torch.tensor(layer.lse.largest_limit, dtype=torch.float64)))
    return Check(
        "lse: the head's probabilities sum to 1", off <= limit, f"rows miss 1 by at most {off:.1e} (limit {limit:.1e})"
    )


def _check_head(encoder: Encoder, options: DemoOptions) -> None:
    for name, value, count in (("layer", options.layer, encoder.layers), ("head", options.head, encoder.heads)):
        if not 0 <= value < count:
            raise ValueRangeError(f"{name} must be 0 to {count - 1}, got {value}")


def _head(
    calls: list[LayerCall],
    batches: list[Batch],
    tokens: list[Tokens],
    sentences: tuple[Sentence, ...],
    options: DemoOptions,
    layers: int,
) -> Head:
    """The probabilities of the head that is shown, from the padded run."""
    i = options.sentence
    number = next(n for n, batch in enumerate(batches) if i in batch.index)
    call, row, words = calls[number * layers + options.layer], batches[number].index.index(i), tokens[i].texts
    p = judge.probabilities(call, row, len(words), options.head)
    return Head(options.layer, options.head, sentences[i].text, words, p)
