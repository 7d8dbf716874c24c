"""The sites of several releases beside each other: plain files that name each other."""

import re
from pathlib import Path

import pytest
import site_versions

PAGE = '<html><head>{head}</head><body><div data-md-component="announce">\n  \n</div>\n{body}</body></html>\n'
LISTED = "<!-- versions --><table></table><!-- end of versions -->"


def built(folder: Path, release: str, *pages: str) -> Path:
    """A site as the build leaves it."""
    folder.mkdir()
    meta = f'<meta name="release" content="{release}, 2026-01-0{release[2]}">'
    (folder / "versions.html").write_text(PAGE.format(head=meta, body=LISTED))
    for page in ("index.html", *pages):
        (folder / page).parent.mkdir(exist_ok=True)
        (folder / page).write_text(PAGE.format(head="", body=release))
    return folder


def everything(tree: Path) -> dict[str, str]:
    return {str(page.relative_to(tree)): page.read_text() for page in sorted(tree.rglob("*.html"))}


def test_releases_know_each_other(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert site_versions.add(built(tmp_path / "a", "0.9.0", "guides/old.html", "guides/both.html"), tree) == ["0.9.0"]
    newer = built(tmp_path / "b", "0.10.0", "guides/both.html")
    assert site_versions.add(newer, tree) == ["0.10.0", "0.9.0"]
    pages = everything(tree)
    assert 'url=0.10.0/index.html"' in pages["index.html"]
    for name, text in pages.items():
        for link in re.findall(r'(?:href="|url=)([^"]+)"', text):  # no link leads nowhere, or to another host
            assert ((tree / name).parent / link).resolve().is_file(), (name, link)
    for own, other in (("0.9.0", "0.10.0"), ("0.10.0", "0.9.0")):
        listed = pages[f"{own}/versions.html"]
        assert f'<a href="../{other}/index.html">{other}</a>' in listed
        assert f"<td>{own}</td><td>2026-01-0{own[2]}</td>" in listed
    assert '<a href="../../0.10.0/guides/both.html">0.10.0</a>' in pages["0.9.0/guides/both.html"]
    assert '<a href="../../0.10.0/index.html">0.10.0</a>' in pages["0.9.0/guides/old.html"]
    assert "This is" not in "".join(text for name, text in pages.items() if name.startswith("0.10.0"))
    site_versions.add(newer, tree)
    assert everything(tree) == pages


def test_an_older_release_may_come_later(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    site_versions.add(built(tmp_path / "b", "0.3.0"), tree)
    assert site_versions.add(built(tmp_path / "a", "0.2.1"), tree) == ["0.3.0", "0.2.1"]
    assert "This is 0.2.1" in (tree / "0.2.1" / "index.html").read_text()
    assert 'url=0.3.0/index.html"' in (tree / "index.html").read_text()


def test_what_is_no_release_is_refused(tmp_path: Path) -> None:
    for content in ("", '<meta name="release" content="0.2.0, not released">'):
        (tmp_path / "versions.html").write_text(content)
        with pytest.raises(SystemExit, match="no site of a release"):
            site_versions.add(tmp_path, tmp_path / "tree")


def test_the_build_says_which_release_it_is() -> None:
    pytest.importorskip("mkdocs")
    import site_hooks

    import tilefold

    page = type("Page", (), {"file": type("File", (), {"src_uri": "versions.md"})})()
    text = (Path(site_hooks.ROOT) / "docs" / "versions.md").read_text(encoding="utf-8")
    shown = site_hooks.on_page_markdown(text, page, None, None)  # type: ignore[arg-type]
    assert f"| {tilefold.__version__} | {site_hooks.released()} | this site |" in shown
    assert site_versions.LIST.search(shown)
    made = site_hooks.on_post_page("<head></head>", page, None)  # type: ignore[arg-type]
    assert site_versions.DATE.search(made)[1] == tilefold.__version__  # type: ignore[index]
