"""Put a built site beside those of earlier releases: `python scripts/docs/site_versions.py out/site TREE`.

TREE is a folder of plain files that any web server, or none, can show: one folder a release, and an index.html that leads to the
newest.  Every release's versions.html lists all of them, later ones too, and pages of older ones say on top which is the newest,
with a link to the same page there.  Nothing is asked of a server or a script.  Adding a release again replaces it.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
from pathlib import Path

__all__ = ["add", "releases"]

RELEASE = re.compile(r"\d+\.\d+\.\d+")
DATE = re.compile(r'<meta name="release" content="([\d.]+), ([\d-]+)">')
LIST = re.compile(r"(<!-- versions -->).*?(<!-- end of versions -->)", re.DOTALL)
BANNER = re.compile(r'(<div data-md-component="announce">)(?:\s*|<aside.*?</aside>)(</div>)', re.DOTALL)
INDEX = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<title>tilefold</title>
<p><a href="{newest}/index.html">tilefold {newest}</a></p>
</html>
"""


def number(release: str) -> tuple[int, ...]:
    """What releases are ordered by."""
    return tuple(int(part) for part in release.split("."))


def stated(site: Path) -> tuple[str, str]:
    """A built site's release and its date, as its versions.html has them."""
    page = site / "versions.html"
    found = DATE.search(page.read_text(encoding="utf-8")) if page.is_file() else None
    if found is None or not RELEASE.fullmatch(found[1]):
        raise SystemExit(f"{site} is no site of a release: its versions.html does not say which")
    return found[1], found[2]


def releases(tree: Path) -> list[str]:
    """Those that are there, the newest first."""
    there = (one.name for one in tree.iterdir() if one.is_dir() and RELEASE.fullmatch(one.name))
    return sorted(there, key=number, reverse=True)


def table(tree: Path, own: str) -> str:
    """All releases, as one of them shows them."""
    every, rows = releases(tree), []
    for one in every:
        link = f'<a href="{os.path.relpath(tree / one, tree / own)}/index.html">{one}</a>' if one != own else one
        notes = [note for note, holds in (("newest", one == every[0]), ("this site", one == own)) if holds]
        rows.append(f"<tr><td>{link}</td><td>{stated(tree / one)[1]}</td><td>{', '.join(notes)}</td></tr>")
    head = "<thead><tr><th>release</th><th>date</th><th>which</th></tr></thead>"
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def banner(page: Path, tree: Path, own: str, newest: str) -> str:
    """What an older release's page says on top; "" for the newest."""
    if own == newest:
        return ""
    same = tree / newest / page.relative_to(tree / own)
    goal = os.path.relpath(same if same.is_file() else tree / newest / "index.html", page.parent)
    text = f'This is {own}. The newest release is <a href="{html.escape(goal)}">{newest}</a>.'
    return f'<aside class="md-banner"><div class="md-banner__inner md-grid md-typeset">{text}</div></aside>'


def put(text: str, place: re.Pattern[str], page: str) -> str:
    """The page with `text` between the two ends of a place, the first one."""
    found = place.search(page)
    return page if found is None else page[: found.end(1)] + text + page[found.start(2) :]


def add(site: Path, tree: Path) -> list[str]:
    """Copy the site into the tree and tell every release of it.  Returns the releases, the newest first."""
    release, _ = stated(site)
    tree.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(tree / release, ignore_errors=True)
    shutil.copytree(site, tree / release)
    every = releases(tree)
    for one in every:
        rows = table(tree, one)
        for page in sorted((tree / one).rglob("*.html")):
            before = page.read_text(encoding="utf-8")
            said = banner(page, tree, one, every[0])
            after = put(said, BANNER, before)
            if page == tree / one / "versions.html":
                after = put(rows, LIST, after)
            if after != before:
                page.write_text(after, encoding="utf-8")
    (tree / "index.html").write_text(INDEX.format(newest=every[0]), encoding="utf-8")
    return every


def main() -> None:
    """Add the site named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="a built site: out/site")
    parser.add_argument("tree", type=Path, help="the folder of all releases; made if it is not there")
    asked = parser.parse_args()
    print(f"site: {asked.tree} has {', '.join(add(asked.site, asked.tree))}")


if __name__ == "__main__":
    main()
