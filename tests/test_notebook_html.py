"""A notebook as a page: everything in it, nothing from outside, no script, the code left out where asked."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from workbench.errors import NotebookError
from workbench.notebook.html import page, write_notebook_html
from workbench.plots.render import png

PICTURE = base64.b64encode(png([lambda ax: ax])).decode()


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    outputs = [
        new_output("stream", name="stdout", text="printed & <shown>"),
        new_output("display_data", {"image/png": PICTURE, "text/plain": "Figure"}),
        new_output("display_data", {"text/html": "<table><tr><td>cell</td></tr></table>", "text/plain": "t"}),
        new_output(
            "display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "a widget"}
        ),
    ]
    cells = [
        new_markdown_cell("# Is *this* <it>?\n\nText with `code` and [a link](https://example.org)."),
        new_code_cell("secret = 41 + 1", outputs=outputs, execution_count=1),
    ]
    made = new_notebook(cells=cells)
    made.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    nbformat.write(made, tmp_path / "n.ipynb")
    return tmp_path / "n.ipynb"


def asks_for(text: str) -> list[str]:
    """Addresses that a browser would fetch for showing a page."""
    fetched = re.findall(
        r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*?\b(?:src|href|data)=[\"']([^\"']*)", text
    )
    return [url for url in fetched + re.findall(r"url\(([^)]*)\)|@import", text) if not url.startswith("data:")]


def test_everything_is_in_the_page_and_nothing_outside_it(notebook: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = notebook.read_bytes()
    made = write_notebook_html(notebook)
    text = made.read_text()
    assert made == notebook.with_suffix(".html")
    assert notebook.read_bytes() == before
    assert caplog.text == ""
    for shown in (
        "printed &amp; &lt;shown&gt;",
        f"data:image/png;base64,{PICTURE[:40]}",
        "<td>cell</td>",
        "secret",
        "a widget",
    ):
        assert shown in text
    assert asks_for(text) == []
    assert "<script" not in text
    assert "default-src 'none'" in text
    assert "<title>Is *this* &lt;it&gt;?</title>" in text


def test_the_check_above_can_see_a_page_that_asks() -> None:
    assert asks_for(
        '<script src="https://a.b/c.js"></script><img src="data:x"><style>@import x; a { b: url(c) }</style>'
    )


def test_code_is_left_out_where_asked(notebook: Path) -> None:
    text = write_notebook_html(notebook, show_input=False).read_text()
    assert "secret" not in text
    assert "printed" in text


def test_what_is_no_notebook_says_so(tmp_path: Path) -> None:
    for name, content in {"a.ipynb": "{", "b.ipynb": "[]"}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(NotebookError, match="cannot be read as a notebook"):
            write_notebook_html(tmp_path / name)
    with pytest.raises(NotebookError, match="cannot be read"):
        write_notebook_html(tmp_path / "none.ipynb")


def test_a_title_is_text() -> None:
    assert "<title>&lt;b&gt;</title>" in page("<b>", "")
