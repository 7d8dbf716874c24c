"""The public API is what tests/public_api.txt lists: a change of it is seen, and meant."""

from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe")
typer = pytest.importorskip("typer")
import public_api  # noqa: E402  griffe is part of what builds the site


def test_nothing_public_changed() -> None:
    assert not public_api.difference(), "\n".join(
        [*public_api.difference(), "If this is meant: make api API=--write, and a line in CHANGELOG.md"]
    )


def test_a_change_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = public_api.lines()
    (attention,) = (one for one in lines if one.startswith("tilefold.attention("))
    kept = tmp_path / "public_api.txt"
    kept.write_text("\n".join(one for one in lines if one != attention) + "\ntilefold.zzz(x: int)\n")
    monkeypatch.setattr(public_api, "KEPT", kept)
    assert public_api.difference()[2:] == [f"+{attention}", "-tilefold.zzz(x: int)"]
    monkeypatch.setattr("sys.argv", ["public_api.py"])
    with pytest.raises(SystemExit, match="make api API=--write"):
        public_api.main()
    monkeypatch.setattr("sys.argv", ["public_api.py", "--write"])
    public_api.main()
    assert public_api.difference() == []


SOURCE = """
class One:
    a: int
    b: str = "x"
    def go(self, x, /, y: int = 2, *rest: str, key: bool = True, **more: object) -> None: ...
    def only(self, *, key): ...
    def _hidden(self): ...
    @property
    def size(self) -> int: return 1
"""


def test_signatures_are_whole() -> None:
    with griffe.temporary_visited_module(SOURCE, module_name="sample") as module:
        assert public_api._members("One", module["One"]) == [
            "One.a: int",
            "One.b: str = 'x'",
            "One.go(self, x, /, y: int = 2, *rest: str, key: bool = True, **more: object) -> None",
            "One.only(self, *, key)",
            "One.size: int",
        ]


def test_commands_have_their_options() -> None:
    app = typer.Typer()

    @app.command()
    def show(path: str, wide: bool = False, limit: int = typer.Option(3, "--limit", "-n")) -> None:
        """Show."""

    @app.command()
    def other() -> None:
        """Another."""

    assert public_api.commands("t", typer.main.get_command(app)) == [
        "$ t",
        "$ t other",
        "$ t show PATH --limit/-n --wide/--no-wide",
    ]
