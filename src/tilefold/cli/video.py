"""`tilefold video`: which blocks of a video each policy attends, and what that leaves out."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.runtime import prepare_runtime, table_of, user_errors
from tilefold.errors import ValueRangeError

__all__ = ["app"]

EPILOG = """
**Examples**

    tilefold video demo

    tilefold video demo --head 3 --query 12,20,10 --sparsity 0.9

Exit code 1 if attention over listed blocks differs from fp64 by more than rounding allows.
"""

app = typer.Typer(help="Sparse attention in video models: demo.", no_args_is_help=True, epilog=EPILOG)


@app.callback()
def video() -> None:
    """Sparse attention in video models: which blocks each policy attends, what it leaves out."""


@app.command(name="demo", epilog=EPILOG)
@user_errors
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the results.")] = Path("out/demo-video"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller video.")] = False,
    sparsity: Annotated[float, typer.Option(min=0, max=1, help="What policies that are told leave out.")] = 0.8,
    head: Annotated[int, typer.Option(min=0, help="The head whose blocks are shown, 0 to 3.")] = 2,
    query: Annotated[
        str | None, typer.Option(metavar="T,H,W", help="The token whose block is shown.", show_default="in the middle")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the rendered video.")] = 0,
) -> None:
    """Render a short video, attend it densely and by each policy, and draw the blocks that one query attends.

    Queries and keys are fixed random projections of its patches, turned by the rotary embedding: alike patches attend each
    other, near ones most. No model is loaded. Writes a page and a picture.
    """
    import torch

    from tilefold.cli.video_demo import HEAD, HEADS, Demo

    runtime = prepare_runtime(kernels=False)
    console = Console()
    console.print(Text(runtime.note, style="dim"))
    if head >= HEADS:
        raise ValueRangeError(f"head must be 0 to {HEADS - 1}, got {head}")
    with torch.no_grad():
        found = Demo(runtime.device, quick, sparsity, head, query, seed)
    rows = tuple(found.rows)
    console.print(table_of(HEAD, rows, left=1))
    console.print(Text(found.words, style="dim"), soft_wrap=True)
    for path in found.write(out):
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    if any(row[-1] != "ok" for row in rows):
        raise typer.Exit(1)
