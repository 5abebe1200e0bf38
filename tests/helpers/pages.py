"""The Python blocks of README and docs, as a reader copies them."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}


def blocks(page: str) -> list[str]:
    """All Python blocks of a page."""
    found = re.findall(r"^ *```py\w*.*?\n(.*?)^ *```", PAGES[page].read_text(), re.MULTILINE | re.DOTALL)
    return [dedent(text) for text in found]


def block(page: str, word: str) -> str:
    """The one block of a page that has the word in it."""
    (found,) = (text for text in blocks(page) if word in text)
    return found
