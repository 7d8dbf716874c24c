"""What the build backend asks for: links and the readme of the package's metadata.  hatchling runs it; see pyproject.toml.

TILEFOLD_URL is the address of the repository, for instance what CI knows as its own.  Without it no links are declared, and those
of the readme stay relative: no address is written down here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["Links", "absolute", "links"]

LINK = re.compile(r'(\]\(|src=")(?![a-z]+:|#)([^)"\s]+)')
LABELS = {
    "Documentation": "blob/{ref}/docs/index.md",
    "Changelog": "blob/{ref}/CHANGELOG.md",
    "Source": "tree/{ref}",
    "Issues": "issues",
    "Support": "blob/{ref}/docs/support.md",
}


def links(url: str, ref: str) -> dict[str, str]:
    """By label, an address of the repository at a tag."""
    return {label: f"{url}/{place.format(ref=ref)}" for label, place in LABELS.items()}


def absolute(readme: str, url: str, ref: str) -> str:
    """The readme with links to files of the repository made into addresses, pictures to what they show."""

    def turned(one: re.Match[str]) -> str:
        kind = "raw" if one[1].startswith("src") else "blob"
        return f"{one[1]}{url}/{kind}/{ref}/{one[2]}"

    return LINK.sub(turned, readme)


class Links(MetadataHookInterface):
    """Fills in `urls` and `readme`, which pyproject.toml declares dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both."""
        url, ref = os.environ.get("TILEFOLD_URL", "").rstrip("/"), f"v{metadata['version']}"
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = links(url, ref) if url else {}
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(readme, url, ref) if url else readme,
        }
