"""What axe-core finds on a page that keeps people out."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page


def serious(page: Page, *parts: str) -> list[str]:
    """Rules that a page, or the parts of it that these selectors match, breaks, of impact serious or critical."""
    found = Axe().run(page, context={"include": [[part] for part in parts]} if parts else None).response
    broken = [rule for rule in found["violations"] if rule["impact"] in ("serious", "critical")]
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for rule in broken
        for node in rule["nodes"]
    ]
