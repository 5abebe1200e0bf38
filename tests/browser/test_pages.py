"""Pages that stand alone, the documentation's and that of a notebook that was run: nobody is kept out, on a phone and in the dark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.open_to_all import serious
from tests.helpers.notebooks import write_notebook
from workbench.notebook.runner import run_notebook

ROOT = Path(__file__).parents[2]
SHOWN = """
import matplotlib.pyplot as plt
import workbench as wb
from tests.helpers.records import study
figure, axes = plt.subplots(1, 2, figsize=(11, 4))
wb.lr_sweep.plot(study(), ax=axes[0])
plt.show()
wb.lr_sweep.diagnose(study())
"""
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, and `run.html`."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder], cwd=ROOT, check=True)
    run_notebook(write_notebook(folder / "n.ipynb", SHOWN), output=folder / "run.ipynb", cwd=ROOT)
    assert "wb-figures" in (folder / "run.html").read_text()
    return folder


@pytest.mark.parametrize("width", [560, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "index", "17_comparison", "reference_wb"])
def test_nothing_keeps_people_out(browser: Browser, folder: Path, name: str, scheme: str, width: int) -> None:
    with browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto((folder / f"{name}.html").as_uri())
        assert serious(page) == []
