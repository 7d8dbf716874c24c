"""`tilefold kv-memory`: what a KV cache takes, contiguous and in pages, for a model and a workload. Needs no GPU."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from tilefold.bench.decode import kv_memory as memory
from tilefold.bench.decode.kv_memory import MODELS, KVModel, Layout, Workload
from tilefold.cache_formats import FORMATS
from tilefold.cli.options import DTYPES, dtype_named, integers
from tilefold.cli.runtime import Outputs, print_tables, say, user_errors
from tilefold.errors import ValueRangeError
from tilefold.paged.statistics import readable_bytes

EPILOG = """
**Examples**

    tilefold kv-memory --model qwen2.5-7b

    tilefold kv-memory --model llama-3.1-8b --prompt 2000 --output 500 --max-tokens 16384 --budget 80 --plot memory.png

    tilefold kv-memory --layers 28 --kv-heads 4 --dim 128 --lengths lengths.txt --shared-prefix 300 --json

**Method**: every sequence is allocated at its full length by the allocator that `PagedKVCache` uses; a contiguous cache keeps
--max-tokens for each. *In the budget* are sequences of the workload, in order and again from the first, until pages are out;
*wasted* are rows of their pages that hold no token, *unused pool* is memory that no sequence has. *When paging helps* counts
sequences of one length without a common beginning, which pages would share.
"""


CODED = {each.name: each.itemsize for each in FORMATS}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, **CODED}  # of what a cache may hold
STORED = {**DTYPES, **{name: each.name for each in FORMATS for name in (each.short, each.name)}}


@user_errors
def kv_memory(
    model: Annotated[str | None, Option(metavar="NAME", help="A model known by name, as qwen2.5-7b.")] = None,
    layers: Annotated[int | None, Option(help="Without --model: layers.")] = None,
    kv_heads: Annotated[int | None, Option(help="Without --model: KV heads.")] = None,
    dim: Annotated[int | None, Option(help="Without --model: head dimension of K.")] = None,
    dim_v: Annotated[int | None, Option(help="Without --model: head dimension of V.", show_default="dim")] = None,
    dtype: Annotated[str, Option(help="bf16, fp16, fp32, e4m3 or int8.")] = "bf16",
    requests: Annotated[int, Option(min=1, max=1_000_000, help="Sequences that are drawn.")] = 256,
    prompt: Annotated[int, Option(min=1, help="Median tokens of a prompt.")] = 512,
    output: Annotated[int, Option(min=1, help="Median tokens that are generated.")] = 256,
    spread: Annotated[float, Option(min=0, max=5, help="Sigma of both lognormal distributions.")] = 0.8,
    seed: Annotated[int, Option(help="Of the lengths.")] = 0,
    lengths: Annotated[
        Path | None, Option(metavar="FILE", help="Lengths of sequences, one a line, instead of drawn ones.")
    ] = None,
    max_tokens: Annotated[int, Option(min=1, help="The most tokens of a sequence.")] = 8192,
    shared_prefix: Annotated[int, Option(min=0, help="First tokens that all sequences have in common.")] = 0,
    budget: Annotated[float, Option(min=0, metavar="GIB", help="Memory for the cache.")] = 40.0,
    page_sizes: Annotated[str, Option(metavar="N,N", help="Tokens of a page.")] = "1,16,64,256",
    plot: Annotated[Path | None, Option(metavar="FILE", help="Draw it, as .png or .svg (needs matplotlib).")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare the memory of a contiguous KV cache with that of a paged one, for a model and a workload."""
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ValueRangeError(f"--plot must end with .png or .svg, got {str(plot)!r}")
    Outputs(plot=plot)
    sizes = integers(page_sizes, "--page-sizes")
    chosen = _model(model, {"--layers": layers, "--kv-heads": kv_heads, "--dim": dim}, dim_v)
    stored = dtype_named(dtype, STORED, "bf16, fp16, fp32, e4m3 or int8")
    factors = 8 * chosen.layers * chosen.kv_heads if stored in CODED else 0
    if lengths is not None:
        work = Workload(memory.lengths_in(lengths, max_tokens), max_tokens, shared_prefix)
    else:
        work = Workload.drawn(requests, prompt, output, spread, max_tokens, seed, shared_prefix)
    row = chosen.row_bytes(ITEMSIZE[stored])
    found = memory.layouts_of(work, row, sizes, max(0, int(budget * memory.GIB) - factors))
    study = Study(chosen, stored, row, factors, work, budget, found)
    if as_json:
        typer.echo(json.dumps(study.document(), indent=2))
    else:
        _print(study)
    if plot is not None:
        memory.draw_plot(
            found, f"KV cache of {chosen.name}, {len(work.lengths)} sequences", int(budget * memory.GIB), plot
        )
        if not as_json:
            Console().print(Text(f"wrote {plot}", style="dim"), soft_wrap=True)


def _model(name: str | None, flags: dict[str, int | None], dim_v: int | None) -> KVModel:
    """The named model, or the one that the flags describe."""
    given = {flag: value for flag, value in {**flags, "--dim-v": dim_v}.items() if value is not None}
    for flag, value in given.items():
        if value < 1:
            raise ValueRangeError(f"{flag} must be at least 1, got {value}")
    if name is not None:
        if given:
            raise ValueRangeError(f"{next(iter(given))} does not go with --model, which says it all")
        if name.lower() not in MODELS:
            raise ValueRangeError(
                f"--model must be one of {', '.join(MODELS)}, got {name!r}; or give --layers, --kv-heads, --dim"
            )
        return MODELS[name.lower()]
    absent = [flag for flag, value in flags.items() if value is None]
    if absent:
        raise ValueRangeError(f"{absent[0]} must be given, or --model: one of {', '.join(MODELS)}")
    layers, heads, dim = given["--layers"], given["--kv-heads"], given["--dim"]
    value_dim = given.get("--dim-v", dim)
    return KVModel(f"{layers} layers, {heads} KV heads, head dim {dim}", layers, heads, dim, value_dim)


class Study(NamedTuple):
    """What is shown.  row: bytes of a token; factors: bytes of a quantised cache's; budget: GiB."""

    model: KVModel
    dtype: str
    row: int
    factors: int
    work: Workload
    budget: float
    layouts: list[Layout]

    def document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": asdict(self.model),
            "dtype": self.dtype,
            "bytes_per_token": self.row,
            "bytes_of_factors": self.factors,
            "sequences": len(self.work.lengths),
            "tokens": sum(self.work.lengths),
            "longest": max(self.work.lengths),
            "max_tokens": self.work.max_tokens,
            "shared_prefix": self.work.shared,
            "budget_gib": self.budget,
            "layouts": [
                {"name": each.name, **asdict(each), "bytes_wasted": each.bytes_wasted} for each in self.layouts
            ],
        }


def _print(study: Study) -> None:
    console, work, found, factors = Console(), study.work, study.layouts, study.factors
    at_most = sum(n == work.max_tokens for n in work.lengths)
    lines = [
        f"{study.model.name}, {study.dtype}: {readable_bytes(study.row)} a token"
        + (f", and {readable_bytes(factors)} of factors, one a KV head and layer for K and for V" if factors else ""),
        f"{len(work.lengths)} sequences of {min(work.lengths)} to {max(work.lengths)} tokens, "
        f"{sum(work.lengths) / len(work.lengths):.0f} in the mean; room for {work.max_tokens} each"
        + (f", which {at_most} reach" if at_most else "")
        + (f"; the first {work.shared} are the same" if work.shared else ""),
    ]
    say([*lines, ""], console, "")
    first, rows, pools = found[0].concurrent, [], []
    for each in found:
        sizes = map(readable_bytes, (each.bytes_allocated, each.bytes_used, each.bytes_wasted))
        rows.append((each.name, *sizes, f"{each.bytes_wasted / each.bytes_allocated:.1%}"))
        gain = f"{each.concurrent / first:.1f}x" if first else "-"
        parts = map(readable_bytes, (each.pool_used, each.pool_wasted, each.pool_unused))
        pools.append((each.name, str(each.concurrent), gain, *parts))
    print_tables(console, ("the workload", "allocated", "used", "wasted", "share"), rows)
    print_tables(console, (f"in {study.budget:g} GiB", "sequences", "gain", "used", "wasted", "unused pool"), pools)
    rows = []
    for size in (each.page_size for each in found if each.page_size):
        gains, most = memory.paging_gains(work.max_tokens, size)
        rows.append((f"pages of {size}", *(f"{gain:.3g}x" for gain in gains), f"{most} tokens" if most else "never"))
    line = f"When paging helps: sequences in the same memory, if each fills so much of {work.max_tokens} tokens"
    console.print(Text(line, style="bold"), soft_wrap=True)
    print_tables(console, ("", *(f"{share} %" for share in memory.FILLED), "helps up to"), rows)
