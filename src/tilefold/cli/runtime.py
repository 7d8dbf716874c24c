"""What every command shares: where kernels run, user errors as one red line, tables, output files."""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilefold.bench.page import Heading, Part, Picture, Rows, Words, columns_that_fit, grouped_tables, save_png, to_html
from tilefold.cli.options import dtype_named, integers
from tilefold.errors import DeviceError, TilefoldError, ValueRangeError
from tilefold.ops.device import device_of, interpreting
from tilefold.ops.environment import check_environment, triton_fault
from tilefold.plan.device import Device
from tilefold.plan.sparse.video import VideoShape
from tilefold.plan.table import VARIABLE, table_in_use

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where kernels run in this process: "cuda" (also ROCm) or "cpu" (the interpreter), and a sentence that says so."""

    device: str
    note: str

    @property
    def gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.device == "cuda"

    def record(self) -> Device:
        """What plans and bounds know of it."""
        here = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        return device_of(here, "attention")


def prepare_runtime(kernels: bool = True) -> Runtime:
    """Choose the GPU, or Triton's interpreter where there is none; to be called before anything imports triton.

    kernels: False: plain torch on the CPU will do, unless TRITON_INTERPRET asks for the interpreter.
    Raises DeviceError where neither can be used.
    """
    asked, gpu = os.environ.get("TRITON_INTERPRET"), torch.cuda.is_available()
    where = "kernels run on the CPU in Triton's interpreter"
    if not kernels and not gpu and not interpreting():
        return Runtime("cpu", "No GPU here: plain torch on the CPU.")
    if asked is None and not gpu:
        if "triton" in sys.modules and not interpreting():
            raise DeviceError("there is no GPU, and triton was imported before its interpreter could be switched on")
        os.environ["TRITON_INTERPRET"] = "1"
        check_environment(True)
        return Runtime("cpu", f"No GPU here: {where} (TRITON_INTERPRET=1), on small shapes.")
    if interpreting():
        return Runtime("cpu", f"TRITON_INTERPRET is set: {where}, on small shapes.")
    if not gpu:
        raise DeviceError(
            f"there is no GPU here and TRITON_INTERPRET={asked} keeps the interpreter off; "
            f"unset it or set it to 1 to run on the CPU"
        )
    note = f"Kernels run on {torch.cuda.get_device_name()}."
    if triton_fault() is None and (found := table_in_use(Runtime("cuda", "").record())):
        note += f" Plans measured here are used, of {found[0]} ({VARIABLE}=none: the rules alone)."
    return Runtime("cuda", note)


def user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """A command that ends with one red line on standard error and exit code 2 when tilefold refuses what it was asked."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TilefoldError as error:
            line = " ".join(str(error).split())
            Console(stderr=True).print(Text(f"error: {line}", style="bold red"), soft_wrap=True)
            raise typer.Exit(2) from None

    return guarded


def video_shape(
    text: str | None, usual: tuple[int, ...], dtype: str, kv_heads: int | None = None, block: int = 64
) -> VideoShape:
    """Of --shape B,H,N,D, or the usual one; dtype: as `dtype_named` takes it; kv_heads: None: as many as heads."""
    batch, heads, seq, dim = integers(text, "--shape", 4) if text else usual
    return VideoShape(batch, heads, kv_heads or heads, seq, dim, dtype_named(dtype), block)


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A plain table; the first `left` columns are left-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i >= left else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_tables(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, keys: int | None = None
) -> None:
    """Print a table, an empty line behind it.  One that is wider than the console is cut into several: each has the first `keys`
    columns (by default those that are left-aligned) and as many more as fit, one at least; where the keys leave no room for a
    column, the first of them are lines with their rows below (`grouped_tables`)."""
    keys = left if keys is None else keys
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    if keys > 1 and sum(widths[:keys]) + max(widths[keys:], default=0) - 2 > console.width:
        for piece in grouped_tables(head, rows, console.width, keys, left):
            console.print(piece)
        return
    for at in columns_that_fit(head, rows, console.width, keys):
        console.print(table_of([head[i] for i in at], [[row[i] for i in at] for row in rows], left))
        console.print()


def show(console: Console, parts: Sequence[Part]) -> None:
    """Print the parts of a report but its pictures; prose in tables is wrapped, tables of figures are cut."""
    for part in parts:
        if isinstance(part, Heading):
            console.print(Text(f"\n{part.text}", style="bold"), soft_wrap=True)
        elif isinstance(part, Words):
            say([part.text], console, part.style)
        elif isinstance(part, Rows) and any(part.head) and part.left < len(part.head):
            print_tables(console, part.head, part.rows, part.left)
        elif isinstance(part, Rows):
            table = table_of(part.head, part.rows, len(part.head))
            table.show_header = any(part.head)
            console.print(table)


class Outputs:
    """The files that a command was asked for, by the options that name them: ValueRangeError now if one cannot be written later,
    when an hour of work would be lost."""

    def __init__(self, **files: Path | None) -> None:
        self.files = {kind: path for kind, path in files.items() if path is not None}
        for kind, path in self.files.items():
            known = path if path.exists() else path.parent
            if path.is_dir() or not path.parent.is_dir() or not os.access(known, os.W_OK):
                raise ValueRangeError(
                    f"--{kind} must be a file that can be written in an existing folder, got {str(path)!r}"
                )

    def write(self, console: Console, **makers: Callable[[], Any]) -> None:
        """Write them, and say so.  makers: make the text of each, a mapping for JSON, or the figure of a picture."""
        for kind, path in self.files.items():
            made = makers[kind]()
            if isinstance(made, Mapping):
                made = json.dumps(made, indent=2, allow_nan=False) + "\n"
            if isinstance(made, str):
                path.write_text(made, encoding="utf-8")
            else:
                save_png(made, path)
            say([f"wrote {path}"], console)


def folder(path: Path) -> Path:
    """A folder for what a command writes, made if it is not there.  ValueRangeError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueRangeError(f"out must be a folder that can be written, got {path} ({error.strerror})") from None
    return path


def write_report(out: Path, name: str, title: str, parts: Sequence[Part]) -> tuple[Path, Path]:
    """The parts as a page, and their one picture by itself: NAME.html and NAME.png in a folder."""
    page, drawing = (folder(out) / f"{name}.{kind}" for kind in ("html", "png"))
    save_png(next(part.figure for part in parts if isinstance(part, Picture)), drawing)
    page.write_text(to_html(title, parts), encoding="utf-8")
    return page, drawing


LOUD = ("WRONG", "failed", "ended with", "DEVICE", "GPU was lost")


def say(lines: Iterable[str], console: Console, style: str = "dim") -> None:
    """Print sentences, what is wrong in red."""
    for line in lines:
        loud = any(word in line for word in LOUD)
        console.print(Text(line, style="bold red" if loud else style), soft_wrap=True)
