"""`tilefold demo`: a trained model on real sentences, its attention layers running through tilefold."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tilefold.cli.options import DemoOptions
from tilefold.cli.runtime import prepare_runtime, user_errors
from tilefold.errors import Unsupported

__all__ = ["EPILOG", "demo"]

EPILOG = """
**Examples**

    tilefold demo

    tilefold demo --out /tmp/demo
"""


@user_errors
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the results.")] = Path("out/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sentences.")] = False,
) -> None:
    """Embed real sentences with a small trained model whose attention layers run through tilefold.

    Shows the plan, the error of every layer against fp64, that the nearest-sentence ranking equals PyTorch's, and the time;
    writes a heat map of one attention head.
    """
    runtime = prepare_runtime()
    console = Console()
    console.print(f"[dim]{runtime.note}[/]")
    try:
        from tilefold.cli.demo import run_demo
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"the demo needs the Python package {error.name!r}; install it with: pip install 'tilefold[demo]'"
        ) from None
    raise typer.Exit(run_demo(DemoOptions(out, quick, runtime.device), console) or 0)
