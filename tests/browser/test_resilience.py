"""Nothing is lost: interrupt, reload, a closed page, a restarted kernel, the same cell twice, two kernels on one study."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.browser.lab import WAIT_S, Desk

pytestmark = pytest.mark.browser

IMPORTS = "import time\nimport workbench as wb"
SLOW = """
class Slow(wb.hooks.Hook):
    def on_step(self, step):
        time.sleep(PAUSE)
""".strip()
TRAIN = """
workload = wb.load_workload("digits_mlp")
config = workload.config.replace(total_steps=STEPS, eval_every_steps=20)
record = wb.Trainer(hooks=[Slow()]).run(workload, config, out="OUT")
""".strip()


def cells(out: str, *, steps: int = 200, pause: float = 0.05) -> list[str]:
    train = TRAIN.replace("OUT", out).replace("STEPS", str(steps))
    return [IMPORTS, SLOW.replace("PAUSE", str(pause)), train, f"wb.open({out!r})"]


def wait_for_rows(folder: Path, count: int) -> None:
    """Wait until a study has so many rows on disk."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if (folder / "study.json").exists() and len(wb.open(folder).steps) >= count:
            return
        time.sleep(0.2)
    raise AssertionError(f"{folder} never had {count} rows")


def wait_until_complete(folder: Path) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if (folder / "study.json").exists() and wb.open(folder).state == "complete":
            return
        time.sleep(0.2)
    raise AssertionError(f"{folder} never ended")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of the run that nobody disturbs."""
    workload = wb.load_workload("digits_mlp")
    config = workload.config.replace(total_steps=200, eval_every_steps=20)
    return wb.Trainer().run(workload, config, out=tmp_path_factory.mktemp("whole") / "w").steps["loss"].to_numpy()


def test_interrupt_keeps_all_and_the_same_cell_goes_on(desk: Desk, whole: np.ndarray) -> None:
    folder = desk.lab.root / "interrupted"
    desk.open(desk.lab.write("interrupt.ipynb", cells("interrupted")))
    for number in (0, 1):
        desk.run_cell(number)
    desk.run_cell(2)
    wait_for_rows(folder, 20)
    desk.interrupt()
    desk.page.get_by_text("resumes from what is kept").first.wait_for()
    desk.wait_for_kernel()
    (said,) = desk.cells()[2]["outputs"]
    assert said["ename"] == "StudyInterrupted"
    assert len("".join(said["traceback"]).splitlines()) == 1, "no traceback through the trainer for what is no error"
    desk.cell(2)
    desk.screenshot("interrupted")
    stopped = wb.open(folder)
    assert stopped.state == "stopped"
    assert 0 < len(stopped.steps) < 200
    desk.run_cell(3)
    desk.page.get_by_text("1 stopped").wait_for()
    desk.run_cell(2)
    desk.wait_until_run()
    wait_until_complete(folder)
    np.testing.assert_array_equal(wb.open(folder).steps["loss"].to_numpy(), whole)


def test_a_second_kernel_on_the_same_study_is_refused_and_reads_it(desk: Desk) -> None:
    folder = desk.lab.root / "shared"
    desk.open(desk.lab.write("one.ipynb", cells("shared", steps=4000)))
    for number in (0, 1, 2):
        desk.run_cell(number)
    wait_for_rows(folder, 20)
    desk.open(desk.lab.write("two.ipynb", cells("shared", steps=4000, pause=0.0)))
    for number in (0, 1, 2):
        desk.run_cell(number)
    desk.page.get_by_text("another process is writing").first.wait_for()
    (said,) = desk.cells()[2]["outputs"]
    assert len(said["traceback"]) == 2, "the message, and the line of the cell"
    desk.run_cell(3)
    desk.page.get_by_text("1 running").wait_for()
    desk.screenshot("second_kernel")
    desk.open("one.ipynb", wait=False)
    desk.interrupt()
    desk.page.get_by_text("resumes from what is kept").first.wait_for()
    steps = wb.open(folder).steps["step"]
    assert steps.tolist() == list(range(len(steps)))
