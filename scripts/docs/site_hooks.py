"""What mkdocs calls while it builds the site: pages that are not files below docs/, and links that also work in a checkout."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

import notebooks
import pictures
import site_api
from formulas import set_formulas
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Files of the checkout that are pages of the site, by the page's place below docs/.
ELSEWHERE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(rf'<img[^>]* src="[^"]*assets/({"|".join(pictures.PICTURES)}|gallery/\w+)\.svg"[^>]*>')
LEAST = 9.6  # pixels that the smallest text of a picture has on a narrow screen: most pictures then fit 390 pixels
LEVEL = re.compile(
    r'(<nav class="md-nav" data-md-level="\d" )aria-labelledby="\w+"([^>]*>\s*<label class="md-nav__title".*?</label>)',
    re.DOTALL,
)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that follow from the source."""
    api = ["api/index.md", *({path: site_api.page_of(path)} for path in site_api.MODULES)]
    shown = re.findall(r"\]\((\w+)\.py\)", (notebooks.FOLDER / "README.md").read_text(encoding="utf-8"))  # in its order
    filled = {"API": api, "NOTEBOOKS": ["notebooks/README.md", *(f"notebooks/{name}.md" for name in shown)]}
    config.nav = _filled(config.nav, filled)
    config.copyright = f"tilefold {version()} · Apache-2.0"
    return config


@cache
def version() -> str:
    """The version of the checkout."""
    return str(re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/tilefold/__init__.py").read_text(), re.MULTILINE)[0])


@cache
def released() -> str:
    """When that version was released, as the changelog has it; "not released" if it does not."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version())}, ([\d-]+)$", text, re.MULTILINE)
    return found[1] if found else "not released"


def _filled(nav: Any, parts: dict[str, Any]) -> Any:
    """The navigation with each name in `parts` replaced by what it stands for."""
    if isinstance(nav, list):
        return [_filled(one, parts) for one in nav]
    if isinstance(nav, dict):
        return {title: _filled(one, parts) for title, one in nav.items()}
    return parts.get(nav, nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made: those of the checkout's root, and the API reference."""
    made = {place: (ROOT / name).read_text(encoding="utf-8") for place, name in ELSEWHERE.items()}
    made |= site_api.pages() | notebook_files()
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def notebook_files() -> dict[str, str]:
    """Every notebook, run here, as a page, its figures, and Jupyter's format to take away."""
    notebooks.prepare()
    made: dict[str, str] = {}
    for path in notebooks.paths():
        outputs = notebooks.execute(path)
        page, figures = notebooks.as_page(path, outputs)
        made[f"notebooks/{path.stem}.md"] = page
        made[f"notebooks/{path.stem}.ipynb"] = notebooks.as_ipynb(path, outputs)
        made |= {f"notebooks/{name}": figure for name, figure in figures.items()}
    return made


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead to where a file lies in the checkout lead to its page; formulas are set.  Records are found last."""
    place = page.file.src_uri
    if place.startswith("performance/"):
        page.meta.setdefault("search", {"boost": 0.4})
    if place == "versions.md":
        markdown = markdown.replace("| VERSION | DATE |", f"| {version()} | {released()} |")
    return set_formulas(relink(markdown, place))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pictures stand inside the page, so that they have its colours.  A cell without text heads no column."""
    return PICTURE.sub(lambda found: inlined(found[1]), re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The page for an address without a page, which is no Page."""
    return _named(output) if template_name == "404.html" else output


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Names, and on the page of versions the version, as scripts/docs/site_versions.py reads it."""
    output = _named(output)
    if page.file.src_uri == "versions.md":
        output = output.replace("</head>", f'<meta name="release" content="{version()}, {released()}"></head>', 1)
    return output


def _named(output: str) -> str:
    """A page with names for the parts that the theme leaves without one."""
    output = output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    return LEVEL.sub(lambda found: f'{found[1]}aria-label="{_title(found[2])}"{found[2]}', output)


def _title(label: str) -> str:
    """The text of an element's HTML."""
    return " ".join(re.sub(r"<[^>]*>", " ", label[label.index(">") + 1 :]).split()).replace('"', "&quot;")


@cache
def inlined(name: str) -> str:
    """A picture of docs/assets without a style of its own."""
    made = (pictures.ASSETS / f"{name}.svg").read_text(encoding="utf-8")
    wide, least = (
        float(min(re.findall(one, made), key=float)) for one in (r'<svg [^>]* width="(\d+)"', r'font-size="(\d+)"')
    )
    begin = f'<svg class="picture" style="min-width:{wide * LEAST / least:.0f}px" '
    return re.sub(r"<style>.*?</style>\n", "", made.strip(), flags=re.DOTALL).replace("<svg ", begin, 1)


def relink(markdown: str, place: str) -> str:
    """The text of the page `place` with its links to files of the checkout turned into links to pages."""
    here = posixpath.dirname(ELSEWHERE.get(place, f"docs/{place}"))

    def turned(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found[2]))
        goal = next((page for page, name in ELSEWHERE.items() if name == target), None)
        goal = goal or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if goal and goal.startswith("notebooks/") and goal.endswith(".py"):
            goal = goal.removesuffix(".py") + ".md"
        if goal is None:
            return found[0]  # mkdocs warns of it, and a strict build fails
        relative = posixpath.relpath(goal, posixpath.dirname(place) or ".")
        return f"{found[1]}{relative}{found[3] or ''}{found[4]}"

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(turned, part) for i, part in enumerate(parts))


def on_post_build(config: MkDocsConfig) -> None:
    """Every public name has its place in the built reference."""
    missing = undocumented(Path(config.site_dir))
    if missing:
        raise PluginError(f"not in the API reference: {', '.join(missing)}")


def undocumented(site: Path) -> list[str]:
    """Public names whose page has no heading of theirs."""
    text = {module: (site / "api" / f"{module}.html").read_text(encoding="utf-8") for module in site_api.MODULES}
    owners = site_api.owners()
    missing = []
    for one in site_api.public_names():
        owner = owners[one.defined]
        if f'id="{owner.anchor}"' not in text[owner.module]:
            missing.append(one.path)
    return missing
