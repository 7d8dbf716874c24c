"""`tilefold`'s command line in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tilefold.cli.app import app


def command(*names: str, columns: int = 150, **environment: str) -> Callable[..., Any]:
    """run(*arguments, code=0): the command `names` with arguments, which has to end with that exit code; None: with any.

    -> the runner's result, and as `said` its output with every run of white space as one space."""

    def run(*arguments: Any, code: int | None = 0, **more: str) -> Any:
        given = {"COLUMNS": str(columns), "NO_COLOR": "1", **environment, **more}
        result: Any = CliRunner().invoke(app, [*names, *map(str, arguments)], env=given)
        assert code is None or result.exit_code == code, result.output
        result.said = " ".join(result.output.split())
        return result

    return run


def reports(folder: Path, name: str, *kinds: str) -> tuple[dict[str, Path], list[str]]:
    """({kind: file}, the options that ask for them)."""
    files = {kind: folder / f"{name}.{kind}" for kind in kinds}
    return files, [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
