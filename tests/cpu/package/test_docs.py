"""The documentation: its code compiles, its commands exist, its reference has every public name, its site is built strictly."""

import importlib
import inspect
import logging
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`(tilefold [a-z-][^`]*)`(?!`)")


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line, language, text) of each fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 2, found[2], inspect.cleandoc(found[3])) for found in FENCE.finditer(text)
    ]


def uncompilable(page: Path) -> list[str]:
    """The Python blocks of a page that are not Python."""
    found = []
    for line, language, text in blocks(page):
        if language == "python":
            try:
                compile(text, f"{page.name}:{line}", "exec")
            except SyntaxError as error:
                found.append(f"{page.relative_to(page.anchor)}:{line}: {error}")
    return found


def test_code_on_pages_is_python(tmp_path: Path) -> None:
    assert sum(language == "python" for page in PAGES for _, language, _ in blocks(page)) > 50
    wrong = [one for page in PAGES for one in uncompilable(page)]
    assert not wrong, "\n".join(wrong)
    bad = tmp_path / "bad.md"
    bad.write_text("text\n\n```python\nx = 1\n```\n\n```python\nx = (1,\n```\n")
    assert [one.split(": ")[0].rpartition(":")[2] for one in uncompilable(bad)] == ["8"]


LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    slug = pytest.importorskip("pymdownx.slugs").slugify(case="lower")
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        slug(re.sub(r"\[([^]]+)\]\([^)]*\)|`", r"\1", title), "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file of the checkout, or to no heading.  The API's pages are made with the site."""
    text, found = FENCE.sub("", page.read_text(encoding="utf-8")), []
    if page.suffix == ".py":  # a notebook: its text is comments
        text = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for target in (link or picture for link, picture in LINK.findall(text)):
        name, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        goal = (page.parent / name).resolve() if name else page
        if (ROOT / "docs" / "api") in goal.parents:
            continue
        if not goal.is_file() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            found.append(f"{page.relative_to(page.anchor)}: {target}")
    return found


def test_links_lead_to_files_and_headings(tmp_path: Path) -> None:
    """Also those of README, CHANGELOG and notebooks, and the pages that docstrings, errors and tests name."""
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
    assert sum(len(LINK.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 500
    wrong = [one for page in [*PAGES, *notebooks] for one in broken(page)]
    assert not wrong, "\n".join(wrong)
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n[a](#a-page) [b](other.md) [c](#c) `x` [d](https://e.f)\n")
    assert [one.rpartition(" ")[2] for one in broken(page)] == ["other.md", "#c"]
    named = re.compile(r"\bdocs/[\w/]+\.md\b")
    sources = [
        path
        for folder in ("src", "tests", "examples", "scripts", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in sources if path.name != "test_docs.py"}
    lost = [
        f"{path}: {name}" for path, text in texts.items() for name in named.findall(text) if not (ROOT / name).is_file()
    ]
    assert not lost, "\n".join(lost)


def commands(page: Path) -> list[str]:
    """The shell commands of tilefold that a page names: in spans of code, and as lines of blocks without a language."""
    text = page.read_text(encoding="utf-8")
    found = [" ".join(one.split()) for one in SPAN.findall(FENCE.sub("", text))]
    for _, language, block in blocks(page):
        prompt = "$ " if language == "console" else ""
        if language in ("console", "", "sh", "bash"):
            found += [line.removeprefix(prompt) for line in block.splitlines() if line.startswith(f"{prompt}tilefold ")]
    return found


@cache
def tree() -> Any:
    """The command line as click has it."""
    typer = pytest.importorskip("typer")
    from tilefold.cli.app import app

    return typer.main.get_command(app)


def problem(text: str) -> str:
    """What is wrong with a command line as documentation: a command or an option that is not there, or "" if nothing is."""
    command = tree()
    words = shlex.split(text, comments=True)[1:]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if command.name == "profile" and words[0].lower().endswith(".py"):
            words.insert(0, "script")
        if words[0] not in command.commands:
            return f"{text}: no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    words = words[: words.index("--")] if "--" in words else words
    within = [command, *getattr(command, "commands", {}).values()]  # `tilefold bench --json`: what its commands take
    options = {"--help", *(name for part in within for one in part.params for name in (*one.opts, *one.secondary_opts))}
    for name in (word.split("=")[0] for word in words):
        if name.startswith("--") and name not in options:
            return f"{text}: no option {name}"
    return ""


def test_commands_on_pages_exist() -> None:
    named = [(page.name, text) for page in PAGES for text in commands(page)]
    assert len(named) > 70
    usual = {"bench", "check", "explain", "ladder", "profile", "roofline", "kv-memory"}
    assert {text.split()[1] for _, text in named} >= usual
    wrong = [f"{name}: {found}" for name, text in named if (found := problem(text))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tilefold explode", "no command"),
        ("tilefold bench nothing", "no command"),
        ("tilefold explain --hats 3", "no option"),
        ("tilefold bench --hats", "no option"),
        ("tilefold profile train.py -- --steps 3", ""),
        ("tilefold explain --heads 28 --device h200 # comment --hats", ""),
    ],
)
def test_a_command_that_is_not_there_is_seen(text: str, expected: str) -> None:
    assert expected in problem(text) if expected else not problem(text)


STRUCTURE = ("docs/architecture.md", "docs/testing.md", "docs/reference/additions.md", "CONTRIBUTING.md")
NAMED = re.compile(r"`([\w./-]+(?:\.py|/))`")
OWNED = re.compile(r"`([\w/]+\.py)`\s+`(\w+)`|`(\w+)`\s+(?:of|in)\s+`([\w/]+\.py)`")
PLACES = (ROOT / "src" / "tilefold", ROOT)


def absent(text: str) -> list[str]:
    """The files and folders that a developer's page names and that are nowhere."""
    alone = {path.name for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")}
    return [
        name
        for name in NAMED.findall(FENCE.sub("", text))
        if not (
            name.startswith("../") or name.endswith("/x.py") or name in alone
        )  # links; files that are to be written
        and not any((place / name).exists() for place in PLACES)
    ]


def misplaced(text: str) -> list[str]:
    """The names that a page says are of a file that does not define them."""
    lost = []
    for first, defined, other, last in OWNED.findall(FENCE.sub("", text)):
        path, name = first or last, defined or other
        found = next((place / path for place in PLACES if (place / path).is_file()), None)
        body = found.read_text(encoding="utf-8") if found else ""
        if not re.search(rf"^\s*(?:(?:def|class) {name}\b|{name}\b.*=)", body, re.MULTILINE):
            lost.append(f"{name} in {path}")
    return lost


def test_the_structure_is_what_pages_say() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    texts |= {name: (ROOT / name).read_text(encoding="utf-8") for name in STRUCTURE}
    assert sum(len(NAMED.findall(texts[name])) for name in STRUCTURE) > 100
    assert sum(len(OWNED.findall(text)) for text in texts.values()) > 30
    assert {name: lost for name in STRUCTURE if (lost := absent(texts[name]))} == {}
    assert {name: lost for name, text in texts.items() if (lost := misplaced(text))} == {}
    wrong = "`ops/nowhere.py` `run`, `ops/bound.py` `run`, `decide`\nof `ops/bound.py`, `state.py`, `nofolder/`"
    assert absent(wrong) == ["ops/nowhere.py", "nofolder/"]
    assert misplaced(wrong) == ["run in ops/nowhere.py", "decide in ops/bound.py"]


OTHER_RECORDS = {"index", "overview", "bench", "checks", "cpu", "dispatch", "host", "invariant", "ladder", "limits",
                 "lowbit_model", "paging", "parallel", "releases", "tune", "video_scene", "video_transformer"}  # fmt: skip
RECORD = ["How fast", "How it works", "The bound", "What was tried", "Open"]


def prose(text: str) -> int:
    """The words of a page outside of its tables and blocks of code."""
    lines = [line for line in FENCE.sub("", text).splitlines() if not line.startswith("|")]
    return sum(bool(re.search(r"\w", word)) for line in lines for word in line.split())


def test_records_stay_short() -> None:
    """A kernel's record: a summary in five lines, the same five parts, at most three pages."""
    pages = {
        page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "performance").glob("*.md"))
    }
    assert len(pages) > 15
    assert {name: count for name, text in pages.items() if (count := prose(text)) > 1500} == {}
    for name in pages.keys() - OTHER_RECORDS:
        first, *parts = re.split(r"^## (.+)$", pages[name], flags=re.MULTILINE)
        assert parts[::2] == RECORD, name
        assert len(re.findall(r"^\* \*\*", first, re.MULTILINE)) == 5, name
    assert prose("# One two\n\n| a | b |\n\n```\nc d\n```\n\n* three `four`: 5 %") == 5


SUMMARY = re.compile(r"# [^\n]+\n\n((?:\* \*\*[^*\n]+\*\*[^\n]*\n)+)(?:\n|\Z)")


def test_records_begin_with_a_summary_and_have_a_table() -> None:
    """All but the list of them: three to five lines below the title, what each is about in bold; figures stand in tables."""
    pages = [page for page in sorted((ROOT / "docs" / "performance").glob("*.md")) if page.stem != "index"]
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        found = SUMMARY.match(text)
        assert found and 3 <= found[1].count("\n") <= 5, page.name
        assert re.search(r"^\|[ :|-]*-[ :|-]*\|$", FENCE.sub("", text), re.MULTILINE), page.name
    for wrong in ("# A\n\nText.\n", "# A\n\n* **B.** c\n* d\n"):
        assert not SUMMARY.match(wrong)


def test_every_public_name_is_in_the_reference() -> None:
    """What the source says, read without importing it, is what a user gets, and each name has its place on one page."""
    pytest.importorskip("griffe")
    import site_api

    names, pages, owners = site_api.public_names(), site_api.pages(), site_api.owners()
    assert len(names) > 200
    for path in site_api.MODULES:
        module = importlib.import_module(path)
        assert {one.name for one in names if one.module == path} == set(module.__all__), path
        for one in (one for one in names if one.module == path):
            value = getattr(module, one.name)
            assert inspect.isclass(value) == site_api.definition(one).is_class, one.path
            assert inspect.ismodule(value) == site_api.definition(one).is_module, one.path
            owner = owners[one.defined]
            assert f"\n::: {owner.anchor}\n" in pages[site_api.page_of(owner.module)], one.path
            assert owner.anchor in pages["api/index.md"], one.path
            assert site_api.definition(one).docstring is not None or one.name == "__version__", (
                f"{one.path} says nothing"
            )


def test_the_reference_begins_with_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By importance: every name of tilefold itself has its place in a group, a module's page follows the groups."""
    pytest.importorskip("griffe")
    import site_api

    import tilefold

    grouped = {name for names in site_api.GROUPS.values() for name in names}
    assert set(tilefold.__all__) <= grouped, "give them a place in scripts/docs/site_api.py"
    index, page = (site_api.pages()[name] for name in ("api/index.md", "api/tilefold.md"))
    for text, names in (
        (
            index,
            ("`tilefold.attention`", "`tilefold.sparse_attention`", "`tilefold.matmul`", "`tilefold.TilefoldError`"),
        ),
        (page, ("::: tilefold.attention\n", "::: tilefold.kvcache_append\n", "::: tilefold.TilefoldError\n")),
    ):
        places = [text.index(name) for name in names]
        assert places == sorted(places)
    for wrong, message in (("no_such_name", "not public"), ("attention", "there already")):
        monkeypatch.setitem(site_api.GROUPS, "Errors", (wrong,))
        site_api._ranks.cache_clear()
        with pytest.raises(ValueError, match=message):
            site_api.pages()
    monkeypatch.undo()
    site_api._ranks.cache_clear()


def test_types_of_signatures_have_their_place() -> None:
    """Those that a signature names and that are no public names, so that it links to them; each says what it is."""
    pytest.importorskip("griffe")
    import site_api

    from tilefold import types

    source = (ROOT / "src/tilefold/api.py").read_text(encoding="utf-8") + (
        ROOT / "src/tilefold/sparse_api.py"
    ).read_text(encoding="utf-8")
    named = {name for name in types.__all__ if re.search(rf": {name}\b|\| {name}\b", source)}
    placed, pages = site_api.types_in_signatures(), site_api.pages()
    assert {f"tilefold.types.{name}" for name in named} == set(placed["tilefold"])
    assert "tilefold.video.policies.Share" in placed["tilefold.video"]
    assert "tilefold.sparse.select_arguments.Number" in placed["tilefold.sparse"]
    every = [name for names in placed.values() for name in names]
    assert len(every) == len(set(every)) > 30
    for path, names in placed.items():
        assert all(f"\n::: {name}\n" in pages[site_api.page_of(path)] for name in names), path
    silent = [name for name in every if site_api.package()[tuple(name.split(".")[1:])].docstring is None]
    assert not silent


def test_every_public_module_is_in_the_reference() -> None:
    """The parts that `import tilefold` leads to, and those that are public by themselves."""
    pytest.importorskip("griffe")
    import site_api

    import tilefold

    assert {f"tilefold.{part}" for part in tilefold.PARTS if part != "compat"} < set(site_api.MODULES)


def test_a_name_without_its_place_is_seen(tmp_path: Path) -> None:
    """The build ends with this check of what it has written."""
    pytest.importorskip("mkdocs")
    import site_api
    import site_hooks

    (tmp_path / "api").mkdir()
    owners = set(site_api.owners().values())
    for path in site_api.MODULES:
        headings = [
            f'<h2 id="{one.anchor}">' for one in owners if one.module == path and one.path != "tilefold.plan.Tile"
        ]
        (tmp_path / "api" / f"{path}.html").write_text("\n".join(headings))
    assert site_hooks.undocumented(tmp_path) == ["tilefold.plan.Tile"]


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe")
    from site_docstrings import as_markdown

    text = "A sum.\n\nArgs:\n    x, y: [n] numbers,\n        or more.\n    *z: x_1 * 2.\n\nReturns:\n    x <= y.\n\n    code\n"
    expected = (
        "A sum.\n\n\n**Arguments**\n\n\n- `x`, `y`: [n] numbers,\n    or more.\n- `*z`: x\\_1 \\* 2.\n\n\n"
        "**Returns**\n\nx &lt;= y.\n\ncode\n"
    )
    assert as_markdown(text, {"x", "y", "z"}) == expected
    fields = "A record.\n\nsize: of it.\nNote: not a field.\n\n    a * b\n"
    assert as_markdown(fields, {"size"}) == "A record.\n\n\n- `size`: of it.\n    Note: not a field.\n\n    a * b\n"
    assert "[`attention`][tilefold.attention]" in as_markdown("As `attention`.", set(), "tilefold.api.attention_varlen")
    raising = as_markdown("A sum.\n\nx: numbers,\n    many.  Raises ShapeError,\n    too.\n", {"x"})
    assert raising == "A sum.\n\n\n- `x`: numbers,\n    many.\n\nRaises ShapeError,\ntoo.\n"
    resting = as_markdown("A sum.\n\nArgs:\n    x: numbers,\n        many.\n    The rest as there.\n", {"x"})
    assert resting.endswith("- `x`: numbers,\n    many.\n\nThe rest as there.\n")
    unknown = as_markdown("A record.\n\nsize: of it.\nplaces: what\nfollows: it.\n", {"size"})  # set where nobody looks
    assert unknown == "A record.\n\n\n- `size`: of it.\n- `places`: what\n    follows: it.\n"
    own = as_markdown("As `attention`.", set(), "tilefold.api.attention_varlen", frozenset({"attention"}))
    assert own == "As `attention`.\n"  # a parameter, or a member of the same class
    assert as_markdown("Bits (docs/a/flash_attn.md).", set()) == "Bits ([flash attn](../a/flash_attn.html)).\n"


def test_links_lead_to_files_and_to_pages() -> None:
    pytest.importorskip("mkdocs")
    from site_hooks import relink

    assert relink("[a](docs/explanation/plan.md#cost)", "changelog.md") == "[a](explanation/plan.md#cost)"
    assert relink("[a](../CONTRIBUTING.md)", "index.md") == "[a](contributing.md)"
    assert relink("[a](../notebooks/plan.py)", "explanation/plan.md") == "[a](../notebooks/plan.md)"
    assert relink("[a](../../CHANGELOG.md)", "explanation/plan.md") == "[a](../changelog.md)"
    for same in ("[a](https://b.c/d.md)", "[a](#here)", "```\nx[0](docs/a.md)\n```", "[a](../missing.txt)"):
        assert relink(same, "index.md") == same


def test_pictures_stand_inside_the_page() -> None:
    """Without the style that they have alone: colours are the page's."""
    pytest.importorskip("mkdocs")
    import pictures
    from site_hooks import on_page_content

    for name in (*pictures.PICTURES, "gallery/causal"):
        asked = f'<p><img alt="x" src="../assets/{name}.svg" /></p>'
        made = on_page_content(asked, *[None] * 3)  # type: ignore[arg-type]
        assert made.startswith('<p><svg class="picture" style="min-width:'), name
        assert "<style>" not in made
        assert "currentColor" in made
    other = '<img alt="demo" src="demo.png" />'
    assert on_page_content(other, *[None] * 3) == other  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](other.md#part)", ""),
        ("[a](missing.md)", "missing.md"),
        ("[a](other.md#nowhere)", "nowhere"),
        ("[a](#nowhere)", "nowhere"),
        ("![a](missing.png)", "missing.png"),
        ("[a](/other.md)", "absolute"),
    ],
)
def test_the_build_is_strict(text: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The site's own settings, over two pages: what is broken ends the build."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Home\n\n{text}\n")
    (docs / "other.md").write_text("# Other\n\n## Part\n")
    nav = ["index.md", "other.md"]
    own = {
        "docs_dir": str(docs),
        "site_dir": str(tmp_path / "site"),
        "nav": nav,
        "hooks": [],
        "plugins": [],
        "theme": "mkdocs",
    }
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, extra_css=[], **own)
    if not expected:
        build(config)
        return
    with pytest.raises(Abort):
        build(config)
    assert expected in caplog.text


def test_a_page_outside_the_navigation_ends_the_build() -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), hooks=[], plugins=[])
    levels = [*config.validation.nav.values(), *config.validation.links.values()]
    assert len(levels) == 7
    assert min(levels) >= logging.WARNING  # and of a warning a strict build fails


READ_IN_ALL = 45_000  # words of pages that are neither reference nor records, as `wc -w` counts: bars of tables, too
PROSE_IN_ALL = 32_500


def words(text: str) -> int:
    """Words of a page, its code and tables included: what lies between spaces and has a letter or a digit."""
    return sum(any(c.isalnum() for c in one) for one in text.split())


def most(page: Path) -> int | None:
    """How many words a page may have, counted as `words`; None: it is looked up, or grows with each release."""
    folder = page.relative_to(ROOT).parts[1:2] if "docs" in page.relative_to(ROOT).parts else ()
    if page.name == "CHANGELOG.md" or folder == ("reference",):
        return None
    return 2500 if folder == ("performance",) else 1500


def test_pages_are_short() -> None:
    """A reader's pages, a developer's and records; and what is read, all together."""
    assert words("| a | --- | 2 `x = 1` |") == 4
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES if most(page) is not None}
    limits = {page.name: most(page) for page in texts}
    assert limits["CONTRIBUTING.md"] == limits["architecture.md"] == limits["masks.md"] == 1500
    assert limits["host.md"] == 2500
    assert "glossary.md" not in limits
    long = {page.name: count for page, text in texts.items() if (count := words(text)) > (most(page) or 0)}
    assert not long, f"words of pages that have too many: {long}"
    read = [len(text.split()) for page, text in texts.items() if most(page) == 1500]
    assert len(read) > 60
    assert sum(read) <= READ_IN_ALL


def test_prose_in_all() -> None:
    """Of every page but the changelog, without tables and blocks of code: counted as `prose`."""
    assert sum(prose(page.read_text(encoding="utf-8")) for page in PAGES if page.name != "CHANGELOG.md") <= PROSE_IN_ALL


def test_every_environment_variable_is_on_its_page() -> None:
    """All that the source, the scripts and the tests read or set, each in one row."""
    files = [path for folder in ("src", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in files for name in re.findall(r"TILEFOLD_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(TILEFOLD_[A-Z_]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(used)


def test_every_page_is_in_the_navigation() -> None:
    """Each file of docs once, in the part that is named as its folder; notebooks and the API are filled in."""
    yaml = pytest.importorskip("yaml")
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (nav,) = (yaml.safe_load("nav:" + part.split("\nvalidation:")[0])["nav"] for part in text.split("\nnav:")[1:])

    def leaves(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [leaf for one in (part.values() if isinstance(part, dict) else part) for leaf in leaves(one)]

    found = [leaf for leaf in leaves(nav) if leaf.endswith(".md")]
    assert len(found) == len(set(found))
    docs = ROOT / "docs"
    there = {str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.parent.name != "notebooks"}
    assert set(found) - there == {"contributing.md", "changelog.md"}
    assert there <= set(found)
    folders = {
        title: {leaf.split("/")[0] for leaf in leaves(one) if "/" in leaf}
        for part in nav
        for title, one in part.items()
    }
    kinds = ("Tutorials", "Guides", "Reference", "Explanation")
    assert {kind: folders[kind] for kind in kinds} == {kind: {kind.lower()} for kind in kinds}
    assert folders["Engineering records"] == {"performance"}
