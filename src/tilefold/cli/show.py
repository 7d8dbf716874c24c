"""`tilefold demo`: a trained model on real sentences, its attention layers running through tilefold."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from tilefold.cli.runtime import prepare_runtime, user_errors
from tilefold.errors import Unsupported

EPILOG = """
**Examples**

    tilefold demo

    tilefold demo --out /tmp/demo --layer 3 --head 5

Exit code 1 if a result differs from PyTorch's by more than the tolerance.
"""


@user_errors
def demo(
    out: Annotated[Path, Option(metavar="DIR", help="Where to write the results.")] = Path("out/demo"),
    quick: Annotated[bool, Option("--quick", help="Fewer sentences.")] = False,
    layer: Annotated[int, Option(min=0, help="The layer of the heat map, from 0.")] = 3,
    head: Annotated[int, Option(min=0, help="The head of the heat map, from 0.")] = 1,
    sentence: Annotated[int, Option(min=0, help="The sentence of the heat map, from 0.")] = 0,
) -> None:
    """Embed real sentences with a small trained model whose attention layers run through tilefold.

    Shows the plan, the error of every layer against fp64, that the nearest-sentence ranking equals PyTorch's, and the time;
    writes a heat map of one attention head.
    """
    runtime = prepare_runtime(kernels=False)
    console = Console()
    console.print(Text(runtime.note, style="dim"))
    try:
        from tilefold.cli.demo import DemoOptions, run_demo

        result = run_demo(DemoOptions(out, quick, runtime.device, layer, head, sentence), console)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tilefold.") and error.name != "tilefold.cli.demo":
            raise
        raise Unsupported(
            f"the demo needs the Python package {error.name!r}; install it with: pip install 'tilefold[demo]'"
        ) from None
    raise typer.Exit(0 if result.ok else 1)
