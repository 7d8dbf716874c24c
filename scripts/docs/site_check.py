"""Look at the built site in a browser: `make docs site-check`, or `python scripts/docs/site_check.py [PAGE...]`.

Each page is opened in light and dark, at 1280 and at 390 pixels.  axe-core has to find no violation; the page may not scroll
sideways; blocks of code have at least 14 pixels; pictures have a title; nothing is asked of another host.  Pictures of what was
seen are written with --shots FOLDER.  Needs Chromium with its driver (Debian: chromium, chromium-driver), selenium, and axe-core
as axe-playwright-python carries it: constraints/release.txt.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "out" / "site"
# A page of each kind: home, the one for a lost address, a tutorial, a guide, the API, pages to look things up, formulas, records.
PAGES = (
    "index.html",
    "404.html",
    "tutorials/first_call.html",
    "guides/video_models.html",
    "api/tilefold.html",
    "reference/features.html",
    "explanation/fold.html",
    "explanation/masks.html",
    "explanation/paged_cache.html",
    "explanation/hopper.html",
    "explanation/limits.html",
    "explanation/sparse.html",
    "explanation/parallel.html",
    "explanation/quantisation.html",
    "notebooks/fold.html",
    "notebooks/plan.html",
    "performance/overview.html",
    "performance/attention_hopper.html",
    "changelog.html",
    "support.html",
    "versions.html",
)
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
LEAST_CODE = 14.0  # pixels
LEAST_TEXT = 9.5  # pixels of text in a picture, as it is shown
SEEN = (ROOT / "scripts" / "docs" / "site_check.js").read_text(encoding="utf-8")
AXE = (
    "const done = arguments[0];"
    "axe.run().then(found => done(found.violations), error => done([{id: String(error), nodes: []}]))"
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files, without a line for each."""

    def log_message(self, format: str, *args: Any) -> None:  # the base class's signature
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which this process serves a folder on the loopback interface."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()


def axe_source() -> str:
    """axe-core's script, out of the Python package that carries it."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        raise SystemExit("site-check: axe-core is not here: pip install --no-deps axe-playwright-python")
    (script,) = Path(found.origin).parent.rglob("axe.min.js")
    return script.read_text(encoding="utf-8")


def browser() -> Any:
    """A headless Chromium."""
    from selenium import webdriver

    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        raise SystemExit("site-check: no chromium or no chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for one in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(one)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def show(driver: Any, address: str, scheme: str, width: int) -> None:
    """Open a page as a reader of that scheme and width has it."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    prefers = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": prefers})
    driver.get(address)
    driver.execute_script("localStorage.clear()")
    driver.get(address)


def faults(driver: Any, axe: str) -> list[str]:
    """What is wrong with the page that is open."""
    seen = driver.execute_script(SEEN, LEAST_CODE, LEAST_TEXT)
    found = [f"asks another host: {one}" for one in seen["far"]]
    if seen["wide"] > seen["room"]:
        found.append(f"scrolls sideways: {seen['wide']} of {seen['room']} pixels; {seen['out']}")
    if seen["small"]:
        found.append(f"{seen['small']} blocks of code below {LEAST_CODE:g} pixels")
    if seen["untitled"]:
        found.append(f"{seen['untitled']} pictures without a title")
    found += [f"text of a picture below {LEAST_TEXT:g} pixels: {one}" for one in seen["tiny"]]
    driver.execute_script(axe)
    for one in driver.execute_async_script(AXE):
        where = [
            f"{' '.join(map(str, node['target']))}: {node.get('failureSummary', '')[:240]}" for node in one["nodes"]
        ]
        found.append("\n      ".join([f"axe {one['id']} ({one.get('impact')}), {len(where)} times", *where[:3]]))
    return found


def main() -> None:
    """Look at all pages and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="pages below the site; default: one of each kind")
    parser.add_argument("--site", type=Path, default=SITE)
    parser.add_argument("--all", action="store_true", help="every page of the site")
    parser.add_argument("--shots", type=Path, help="a folder for pictures of what was seen")
    asked = parser.parse_args()
    if not (asked.site / "index.html").is_file():
        raise SystemExit(f"site-check: no site in {asked.site}: make docs")
    pages = sorted(str(one.relative_to(asked.site)) for one in asked.site.rglob("*.html")) if asked.all else asked.pages
    os.environ.setdefault("SE_OFFLINE", "true")  # the driver is here: selenium asks nobody for one
    axe, driver, wrong, looked = axe_source(), browser(), 0, 0
    try:
        with served(asked.site) as address:
            for page in pages:
                for scheme in SCHEMES:
                    for width in WIDTHS:
                        show(driver, address + page, scheme, width)
                        looked += 1
                        if asked.shots is not None:
                            asked.shots.mkdir(parents=True, exist_ok=True)
                            name = page.removesuffix(".html").replace("/", "-")
                            driver.save_screenshot(str(asked.shots / f"{name}-{scheme}-{width}.png"))
                        for one in faults(driver, axe):
                            wrong += 1
                            print(f"{page}, {scheme}, {width}: {one}", flush=True)
    finally:
        driver.quit()
    print(f"site-check: {looked} views of {len(pages)} pages, {wrong} faults")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
