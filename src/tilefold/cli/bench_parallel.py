"""`tilefold bench parallel`: context parallelism over the GPUs of this machine, or over processes without one."""

import os
import pickle
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from tilefold.bench.setting import setting_of
from tilefold.cli.bench_flow import header, warn_of_times
from tilefold.cli.options import Budget, Json, Markdown, dtype_named, integers, names_from
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Outputs, Runtime, prepare_runtime, print_tables, say, user_errors
from tilefold.errors import CommunicationError, ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.parallel.loads import Work
    from tilefold.bench.parallel.table import Line

EPILOG = """
**Examples**

    tilefold bench parallel --quick

    tilefold bench parallel --ranks 4 --tokens 32768,131072 --budget 240 --json parallel.json

    torchrun --nproc-per-node 8 -m tilefold bench parallel --tokens 131072,524288,1048576 --trace trace

**Ways**: ring, all_gather, heads and two_level (with --per-node) are tilefold's; torch and torch-alltoall are
torch.distributed.tensor.experimental.context_parallel with its two ways to rotate K and V, over cuDNN's or Flash's attention.
sparse is attention over lists of blocks in contiguous shards: of each block's nearest ones and some all over the sequence, a
tenth of all; only the K/V blocks that a rank's lists name travel, and how much that is is said below the table.

**Method**: zigzag shards. First of all the links are measured. Sampled rows and keys of one head are compared with fp64 on
every rank; what is wrong is not timed. Times are medians of the slowest rank, backward alone over a graph that is kept.
*of rank 0*: TFLOP/s a rank beside tilefold's attention on rank 0 with the same tokens, in the same run while the other ranks
wait (fewer tokens, where a call would take more than 0.7 s): 100 % is linear scaling. *of all*: beside what all ranks reach
together that do the same at once and exchange nothing; GPUs of one host differ by several per cent under their power limits,
and shares of equal size wait for the slowest of them. *GB*: the peak of forward, and backward, beyond q, k, v and dout,
beside the plan's formula with the kernels' own scratch. *hidden*, with --trace: the share of the transfers' time during which
other kernels run, *exposed* the ms that are left of it, and *waiting* those in which a rank did nothing but wait for others to
come to a transfer; of the worst rank.
Exit code 1 if a result of tilefold is wrong or failed.
"""
TOKENS = {True: (32768, 131072), False: (32,)}
QUICK = {True: (32768,), False: (32,)}


@user_errors
def parallel(
    ranks: Annotated[
        int | None, Option(min=1, help="Processes to start.", show_default="all GPUs, or 2 without")
    ] = None,
    tokens: Annotated[
        str | None, Option(metavar="N,N", help="Lengths of the whole sequence.", show_default="by device")
    ] = None,
    heads: Annotated[
        str | None, Option(metavar="Q,KV", help="Heads of Q, and of K and V.", show_default="32,8")
    ] = None,
    dim: Annotated[int | None, Option(help="Head dimension.", show_default="128")] = None,
    dtype: Annotated[str | None, Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    ways: Annotated[
        str | None,
        Option(metavar="NAMES", help="Comma-separated, see below.", show_default="all but two_level and sparse"),
    ] = None,
    direction: Annotated[str, Option(help="forward, backward or both.")] = "both",
    full: Annotated[bool, Option("--full", help="Without a causal mask.")] = False,
    per_node: Annotated[int, Option(min=1, help="Ranks of a node, for two_level.")] = 1,
    nondeterministic: Annotated[
        bool, Option("--non-deterministic", help="Gradients by deterministic=False: non-deterministic, as torch's are.")
    ] = False,
    quick: Annotated[bool, Option("--quick", help="One length.")] = False,
    rounds: Annotated[int, Option(min=1, help="Timed calls of each line.")] = 3,
    budget: Budget = None,
    trace: Annotated[
        str, Option(metavar="STEM", help="Trace one call of each line (GPU); a file STEM-WAY.json.gz for each way.")
    ] = "",
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Time every scheme of context parallelism, beside PyTorch's own, each output checked first."""
    outputs = Outputs(json=json, markdown=markdown)
    if direction not in ("forward", "backward", "both"):
        raise ValueRangeError(f"--direction must be forward, backward or both, got {direction!r}")
    runtime = prepare_runtime(kernels=False)
    from tilefold.bench.parallel.loads import PEERS, SCHEMES, Work

    small = not runtime.gpu
    lengths = (QUICK if quick else TOKENS)[runtime.gpu]
    if tokens is not None:
        lengths = integers(tokens, "--tokens")
    heads = heads or ("2,1" if small else "32,8")
    query_heads, kv_heads = integers(heads, "--heads", 2)
    if query_heads % kv_heads:
        raise ValueRangeError(f"--heads must be Q,KV with Q a multiple of KV, got {heads!r}")
    work = Work(
        tokens=lengths,
        heads=(query_heads, kv_heads),
        dim=dim or (16 if small else 128),
        dtype=dtype_named(dtype or ("fp32" if small else "bf16")),
        causal=not full,
        backward={"forward": (False,), "backward": (True,), "both": (False, True)}[direction],
        ways=names_from(ways, "--ways", (*SCHEMES, "sparse", *PEERS)) if ways else (*SCHEMES[:3], *PEERS),
        rounds=1 if small else rounds,
        budget=budget,
        per_node=per_node,
        trace=trace,
        deterministic=not nondeterministic,
    )
    lines = _run(work, runtime, ranks)
    if lines is not None:
        _report(work, lines, runtime, outputs)


def _run(work: "Work", runtime: Runtime, ranks: int | None) -> "list[Line] | None":
    """The lines, or None on ranks that do not report.  In torchrun's processes, or in some that are started here."""
    import torch.distributed as dist
    from torch.multiprocessing.spawn import ProcessException, spawn

    if dist.is_available() and dist.is_initialized():
        return _on_rank(work)
    if "RANK" in os.environ:
        from tilefold.bench.parallel.setup import join

        join(runtime.gpu, int(os.environ.get("LOCAL_RANK", "0")))
        try:
            return _on_rank(work)
        finally:
            dist.destroy_process_group()
    here = torch.cuda.device_count() if runtime.gpu else 2
    ranks = ranks or here
    if runtime.gpu and ranks > here:
        raise ValueRangeError(f"--ranks must be at most {here}, the GPUs of this machine, got {ranks}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_started, (ranks, work, folder), ranks)
        except ProcessException as error:
            raise CommunicationError(
                f"the ranks did not come to an end: {str(error).strip().splitlines()[-1]}"
            ) from None
        return pickle.loads((Path(folder) / "lines").read_bytes())  # type: ignore[no-any-return]  # of our own process


def _on_rank(work: "Work") -> "list[Line] | None":
    """The lines on rank 0, which shows how far it is."""
    import torch.distributed as dist

    from tilefold.bench.parallel.run import measure
    from tilefold.bench.parallel.setup import links_of

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    links = links_of(device)
    if dist.get_rank():
        measure(work)
        return None
    console = Console()

    def show(text: str) -> None:  # at once: a run that is cut short has shown what it had
        say([text], console)

    show(str(links))
    total = len(work.tokens) * len(work.ways) * len(work.backward)
    with measuring(console, total, False) as step:
        return measure(work, lambda what: step("parallel", what), show)


def _started(rank: int, ranks: int, work: "Work", folder: str) -> None:
    """One process of those that are started here; rank 0 leaves the lines in a file."""
    runtime = prepare_runtime(kernels=False)
    import torch.distributed as dist

    from tilefold.bench.parallel.setup import join

    if not runtime.gpu:
        torch.set_num_threads(1)
    join(runtime.gpu, rank, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    lines = _on_rank(work)
    if lines is not None:
        (Path(folder) / "lines").write_bytes(pickle.dumps(lines))
    dist.destroy_process_group()
    sys.stdout.flush()


def _report(work: "Work", lines: "list[Line]", runtime: Runtime, outputs: Outputs) -> None:
    from tilefold.bench.parallel.loads import PEERS
    from tilefold.bench.parallel.table import HEAD, cells_of, markdown, to_json

    console = Console()
    setting = setting_of(runtime.device)
    header(setting, runtime, console)
    console.print(
        Text(
            f"{lines[0].ranks if lines else 0} ranks, {work.heads[0]} heads on {work.heads[1]}, D={work.dim}, {work.dtype}, "
            f"{'causal' if work.causal else 'full'}{'' if work.deterministic else ', non-deterministic'}; ms, TFLOP/s a rank, "
            "GB a rank"
        )
    )
    print_tables(console, HEAD, [*map(cells_of, lines)], keys=3)
    for line in lines:
        if line.note:
            said = "" if line.status == "ok" else f"{line.status}: "
            say([f"{line.way}, {line.tokens} tokens, {line.direction}: {said}{line.note}"], console)
    wanted = len(work.tokens) * len(work.ways) * len(work.backward)
    if len(lines) < wanted:
        console.print(Text(f"{len(lines)} of {wanted} lines were reached", style="yellow"))
    warn_of_times(runtime, console)
    outputs.write(console, json=lambda: to_json(lines, asdict(setting), work), markdown=lambda: markdown(lines))
    if any(line.way not in PEERS and line.status in ("WRONG", "failed") for line in lines):
        raise typer.Exit(1)
