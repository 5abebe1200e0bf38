"""The pages of batch runs in a browser: they show what they hold, ask nothing of a network, and links lead to the runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext

from tests.helpers.notebooks import VERDICT, write_notebook
from workbench.notebook.batch import run_notebooks

pytestmark = pytest.mark.browser
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);\nprint('said')"
SCRIPT = 'from IPython.display import HTML\nHTML(\'<p>kept</p><script>document.title = "ran"</script><img src="https://example.org/x.png">\')'


def test_summary_and_page_stand_alone(
    context: BrowserContext, tmp_path: Path, shots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = write_notebook(tmp_path / "n.ipynb", FIGURE, SCRIPT, VERDICT)
    done = run_notebooks(notebook, [{"status": "ok"}, {"status": "fail"}])
    page, asked, refused = context.new_page(), set(), {}
    page.on("request", lambda request: asked.add(request.url))
    page.on("requestfailed", lambda request: refused.update({request.url: request.failure}))
    page.goto((tmp_path / done.folder / "summary.html").as_uri())
    assert page.get_by_role("row").count() == 3
    page.screenshot(path=shots / "batch-summary.png")
    page.get_by_role("link", name="2").click()
    page.get_by_text("said", exact=True).wait_for()
    assert page.get_by_role("img").first.evaluate("(image) => image.naturalWidth") > 100
    assert page.get_by_text("kept", exact=True).is_visible()
    assert page.title() == "A title", "no script of an output runs"
    page.screenshot(path=shots / "batch-page.png", full_page=True)
    outside = {url for url in asked if not url.startswith(("file:", "data:"))}
    assert outside == {"https://example.org/x.png"}, "the one that was planted"
    assert refused["https://example.org/x.png"] == "csp", (
        "kept back by the page itself, not by a network that is not there"
    )
