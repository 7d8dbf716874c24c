"""Generate for many requests at once with a Qwen2 model over `tilefold.PagedKVCache`, and compare with Transformers.

    python examples/generate.py                                # random weights; tiny in the interpreter, larger on a GPU
    python examples/generate.py --model DIR --prompts FILE     # a local Qwen2 directory, one prompt a line
    python examples/generate.py --pages 24 --preempt swap      # too few pages: who came last gives its own back

Needs `pip install "tilefold[cli,transformers]"`.  docs/guides/generate.md explains what it prints."""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.console import Console

    from continuous.compare import Comparison
    from continuous.engine import Engine, Request
    from continuous.qwen2 import Qwen2
    from continuous.report import Run

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Without a GPU the interpreter takes about 20 ms for each program of a kernel: a model and a workload of seconds.
USUAL: dict[bool, dict[str, Any]] = {
    True: {"layers": 24, "hidden": 896, "heads": 14, "kv_heads": 2, "vocabulary": 32000, "positions": 2048, "requests": 64,
           "rate": 0.5, "prompt": (32, 512), "new": (32, 128), "pages": 512, "page_size": 16, "running": 32, "tokens": 1024,
           "chunk": 256, "dtype": "bf16", "check": 4},
    False: {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "vocabulary": 64, "positions": 64, "requests": 6,
            "rate": 0.7, "prompt": (3, 20), "new": (4, 10), "pages": 18, "page_size": 4, "running": 4, "tokens": 16,
            "chunk": 8, "dtype": "fp32", "check": 6},
}  # fmt: skip

NUMBERS = {
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "vocabulary"), "of the random model"),
    "positions": "the most tokens of a request",
    "requests": "how many",
    "rate": "requests that arrive in a step, Poisson",
    "pages": "of the cache",
    "page_size": "tokens of a page",
    "running": "the most requests at a time",
    "tokens": "the most tokens of a step",
    "chunk": "the most of one request's in a step",
}


def arguments(argv: Sequence[str] | None, gpu: bool) -> argparse.Namespace:
    """What was asked for; what was not is as USUAL says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, usual = parser.add_argument, USUAL[gpu]
    add("--model", type=Path, metavar="DIR", help="local directory with config.json and weights; else random weights")
    text = "one prompt a line, for --model with a tokenizer; else random tokens"
    add("--prompts", type=Path, metavar="FILE", help=text)
    for name, what in NUMBERS.items():
        text = f"{what} (default %(default)s)"
        add(f"--{name.replace('_', '-')}", type=type(usual[name]), default=usual[name], help=text)
    for name, what in (("prompt", "prompt tokens"), ("new", "generated tokens")):
        text = f"{what} of a request (default %(default)s)"
        add(f"--{name}", type=_bounds, default=usual[name], metavar="LEAST,MOST", help=text)
    add("--preempt", choices=("recompute", "swap"), default="recompute", help="what becomes of keys when pages run out")
    add("--dtype", choices=tuple(DTYPES), default=usual["dtype"], help="(default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts and arrivals")
    text = "requests compared with Transformers (default %(default)s)"
    add("--check", type=int, default=usual["check"], metavar="N", help=text)
    add("--json", type=Path, metavar="FILE", help="write all figures, steps and tokens")
    return parser.parse_args(argv)


def _bounds(text: str) -> tuple[int, int]:
    least, _, most = text.partition(",")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two integers LEAST,MOST, got {text!r}") from None


def has_gpu() -> bool:
    """Whether kernels run on a GPU: there is one, and Triton's interpreter was not asked for."""
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")


def choose_device(gpu: bool, console: "Console") -> torch.device:
    """The GPU, or Triton's interpreter, which has to be switched on before triton is imported."""
    if gpu:
        console.print(f"Kernels run on {torch.cuda.get_device_name()}.", style="dim")
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    console.print(
        "Kernels run on the CPU in Triton's interpreter (TRITON_INTERPRET=1); its times say nothing about a GPU.",
        style="yellow",
    )
    return torch.device("cpu")


def prepare(given: argparse.Namespace, device: torch.device) -> "tuple[Qwen2, Any, list[Request], Any]":
    """(model, how to get Transformers', requests, tokenizer or None)."""
    from continuous.weights import end_tokens, load_directory, random_config, random_model, reference_model
    from continuous.workload import random_requests, text_requests

    if given.model is None:
        sizes = (given.layers, given.hidden, given.heads, given.kv_heads, given.vocabulary, given.positions)
        config = random_config(*sizes)
        model, theirs = random_model(config, given.seed)
        reference: Any = partial(copy.copy, theirs)
    else:
        model, config = load_directory(given.model)
        reference = partial(reference_model, given.model)
    ends, tokenizer = end_tokens(config), None
    if given.prompts is not None:
        if given.model is None:
            raise ValueError("--prompts needs the tokenizer of a --model")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
        lines = [line for line in given.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        requests = text_requests(
            [tokenizer(line)["input_ids"] for line in lines], given.new[1], given.rate, given.seed, ends
        )
    else:
        shape = (given.requests, model.shape.vocabulary, given.prompt, given.new, given.rate, given.seed, ends)
        requests = random_requests(*shape)
    return model.place(device, DTYPES[given.dtype]), reference, requests, tokenizer


def generate(engine: "Engine", requests: "list[Request]", console: "Console") -> "Run":
    """Run everything under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from continuous.report import Run

    steps, seconds = [], 0.0
    engine.submit(requests)
    columns = (
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(one.new_tokens for one in requests))
        while engine.busy:
            begin = time.perf_counter()
            steps.append(engine.step())  # ends with a read of the new tokens, so the GPU is done
            seconds += time.perf_counter() - begin
            last = steps[-1]
            text = f"{last.running} running, {last.waiting} waiting, {last.swapped} swapped out, {last.pages} pages"
            progress.update(task, advance=last.generated, description=text)
    return Run(sorted(engine.finished, key=lambda one: one.number), steps, seconds, engine.peak, engine.cache.page_size)


def check(
    given: argparse.Namespace, run: "Run", reference: Any, device: torch.device, console: "Console"
) -> "list[Comparison]":
    """Compare the first requests with Transformers and say how that went."""
    from rich.progress import track

    from continuous.compare import compare_requests

    chosen = run.requests[: given.check]
    if not chosen:
        return []
    theirs = reference().to(device)
    found: list[Comparison] = []
    for request in track(chosen, "Transformers", console=console, transient=True):
        found += compare_requests([request], theirs, DTYPES[given.dtype])
    equal = sum(one.equal for one in found)
    console.print(
        f"{equal} of {len(found)} requests compared have exactly the tokens of Transformers' greedy generation"
    )
    for one in found:
        if not one.equal:
            why = f"two tokens {one.gap:.2e} apart, rounding {one.rounding:.2e}" if one.gap is not None else "WRONG"
            text = f"request {one.number}: {one.same} tokens equal, then {why}"
            console.print(text, style="dim" if one.ok else "bold red")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if a request's tokens are wrong, or 2 if what was asked for cannot be done."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    gpu, console = has_gpu(), Console()
    given = arguments(argv, gpu)
    device = choose_device(gpu, console)
    from continuous.engine import Engine, Limits
    from continuous.report import lines_of, record_of
    from tilefold import PagedKVCache, TilefoldError

    try:
        model, reference, requests, tokenizer = prepare(given, device)
        shape = model.shape
        cache = PagedKVCache(
            shape.layers, shape.kv_heads, shape.head_dim, num_pages=given.pages, page_size=given.page_size,
            max_sequences=len(requests), max_tokens=min(given.positions, shape.positions), dtype=DTYPES[given.dtype],
            device=device,
        )  # fmt: skip
        limits = Limits(given.tokens, given.chunk, given.running, given.preempt == "swap")
        run = generate(Engine(model, cache, limits), requests, console)
    except (TilefoldError, ValueError, FileNotFoundError) as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 2
    except ModuleNotFoundError as error:
        line = f"error: {error}; install it with: pip install 'tilefold[cli,transformers]'"
        Console(stderr=True).print(line, style="bold red", markup=False, soft_wrap=True)
        return 2
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for what, figures in lines_of(run):
        table.add_row(what, figures)
    console.print(table)
    if tokenizer is not None:
        for one in run.requests:
            text = Text(f"{one.number}: {tokenizer.decode(list(one.prompt))}")
            console.print(text.append(tokenizer.decode(one.generated), style="bold"))
    found = check(given, run, reference, device, console)
    if given.json is not None:
        given.json.write_text(json.dumps(record_of(run), indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {given.json}", style="dim", markup=False)
    return 0 if all(one.ok for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
