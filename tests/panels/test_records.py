"""A record on a page: `show_study` in figure, sentence and verdicts, `curves_panel` with every row that there is."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

import workbench as wb
from tests.helpers.simulated_records import record, trial
from tests.helpers.study_folders import write_study
from tests.helpers.workloads import small_workload
from tests.panels.test_live import Page, same_curves
from workbench.findings.diagnosis import Diagnosis
from workbench.notebook.runner import run_notebook
from workbench.playbook import diagnosis_of
from workbench.record.folder import read_json, write_json
from workbench.record.read import StudyRecord
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.registry import STUDIES
from workbench.train.trainer import Trainer
from workbench.views.curves import CurvesWidget, curves_panel
from workbench.views.summary import show_study, study_picture, study_sentence


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two that end and one that diverges."""
    folder = tmp_path_factory.mktemp("summary") / "sweep"
    wb.lr_sweep.Study(lrs=[0.5, 1.0, 1e9], steps=60).run(wb.load_workload("quadratic"), out=folder)
    return folder


def shown(monkeypatch: pytest.MonkeyPatch, record: Any) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda shown, **_: seen.append(shown))
    show_study(record)
    return seen


def test_three_outputs_in_this_order(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, sentence, verdict = shown(monkeypatch, wb.open(study))
    assert image.imread(io.BytesIO(picture.png()), format="png").std() > 0
    assert sentence["text/plain"] == study_sentence(wb.open(study))
    assert isinstance(verdict, Diagnosis)
    assert verdict["lr.best"].value == wb.lr_sweep.diagnose(wb.open(study))["lr.best"].value


def test_the_sentence_counts_by_state_and_has_the_best_beside_the_baseline(study: Path, tmp_path: Path) -> None:
    record = wb.open(study)
    best, other = (record.trials.sort_values("best_value").iloc[k] for k in (0, 1))
    said = (
        f"3 trials of quadratic: 2 complete, 1 diverged; lowest validation/loss {best['best_value']:.4g} in trial {best['trial']} "
        f"at lr {best['peak_lr']:.4g}, step {best['best_step']:.0f}"
    )
    assert (record.config["peak_lr"], study_sentence(record)) == (best["peak_lr"], f"{said}.")
    copy = shutil.copytree(study, tmp_path / "s")
    told = read_json(copy / "study.json")
    write_json(copy / "study.json", told | {"config": told["config"] | {"peak_lr": other["peak_lr"]}})
    assert (
        study_sentence(wb.open(copy))
        == f"{said}; at {other['peak_lr']:.4g}, the baseline's, {other['best_value']:.4g}: one seed each, by itself no reason to change."
    )


def test_seeds_of_the_best_learning_rate_are_told_by_their_mean(tmp_path: Path) -> None:
    record = wb.lr_sweep.Study(lrs=[0.001, 0.1], seeds=3, steps=40).run(small_workload(), out=tmp_path / "s")
    trials = record.trials[record.trials["peak_lr"] == 0.1]
    best, mean = trials.loc[trials["best_value"].idxmin(), "trial"], trials["best_value"].mean()
    assert len(trials) == 3
    assert f"in trial {best} at lr 0.1, " in study_sentence(record)
    assert f" (mean of 3 seeds there: {mean:.4g})" in study_sentence(record)


def test_runs_of_other_lengths_are_no_seeds_and_a_verdict_has_its_mean(tmp_path: Path) -> None:
    """Two seeds were trained to the end, the first also for half of the steps, and a third was stopped."""
    runs = [(0, 40, "complete", 0.3), (1, 40, "complete", 0.2), (0, 20, "complete", 0.1), (2, 40, "stopped", 0.15)]
    rows = [trial(np.ones(40), 0.1, seed=seed, state=state, total_steps=steps) for seed, steps, state, _ in runs]
    made = record(rows, total_steps=40)
    made.path = tmp_path
    made.trials = made.trials.assign(best_value=[value for *_, value in runs], best_step=10)
    assert "; lowest validation/loss 0.1 in trial 2 at lr 0.1, step 10." in study_sentence(made)
    write_json(tmp_path / "diagnosis.json", {"findings": [], "recommendation": {"baseline": {"trials": [0]}}})
    said = "; the config of the verdict has validation/loss 0.25 at lr 0.1, mean of 2 seeds (0.2 to 0.3)."
    assert said in study_sentence(made)


def test_a_name_with_markup_is_text_in_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = wb.open(write_study(tmp_path / "s", trials=1, workload="<img src=x> [a](b:c) `d"))
    assert study_sentence(record).startswith("1 trial of <img src=x> [a](b:c) `d: 1 complete")
    assert shown(monkeypatch, record)[1]["text/html"].startswith(
        "<p>1 trial of &lt;img src=x&gt; [a](b:c) `d: 1 complete"
    )


@pytest.mark.parametrize("kind", sorted({*STUDIES, "trial", "comparison"}))
def test_every_kind_has_a_picture_even_of_a_record_that_holds_nothing_of_it(
    kind: str, study: Path, tmp_path: Path
) -> None:
    (tmp_path / "of").mkdir()
    write_json(tmp_path / "of" / "study.json", read_json(study / "study.json") | {"kind": kind})
    record = wb.open(tmp_path / "of")
    diagnosis = diagnosis_of(record)
    assert {f.status for f in diagnosis} - {"ok", "not_measured", "warn"} == set()
    assert len(list(diagnosis)) > 0
    assert np.std(image.imread(io.BytesIO(study_picture(record, diagnosis).png()), format="png")) > 0.01, "not blank"


def test_a_kernel_draws_the_record_of_a_cells_last_line(study: Path, tmp_path: Path) -> None:
    import nbformat

    cells = [f"import workbench as wb\nrecord = wb.open({str(study)!r})", "record", "record.trial(0)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(notebook, tmp_path / "opens.ipynb")
    done = nbformat.read(run_notebook(tmp_path / "opens.ipynb", output=tmp_path / "done.ipynb"), as_version=4)
    assert done.cells[0].outputs == []
    for cell in done.cells[1:]:
        picture, sentence, verdict = cell.outputs
        assert "image/png" in picture.data
        assert "<svg" in picture.data["text/html"], "the page beside it is themed"
        assert "of quadratic" in sentence.data["text/plain"]
        assert "application/vnd.workbench.verdict+json" in verdict.data


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    out = tmp_path_factory.mktemp("runs") / "sweep"
    return LRSweep(lrs=[0.01, 0.05, 1e20]).run(small_workload(), Trainer(device="cpu"), out=out)


def told(panel: Any) -> Page:
    """What a page is told that asks, as it does when it is drawn."""
    page = Page()
    panel.send = page.tell
    panel._handle_custom_msg({"kind": "all"}, [])
    return page


def test_a_study_is_a_widget_that_answers_with_its_curves(swept: StudyRecord) -> None:
    panel = curves_panel(swept, live=True)
    assert isinstance(panel, CurvesWidget)
    assert panel.still
    page = told(panel)
    same_curves(page, swept)
    assert {n: t["state"] for n, t in page.trials.items()} == {0: "complete", 1: "complete", 2: "diverged"}
    assert page.trials[2]["lr"] == 1e20
    assert [t["note"] for t in page.trials.values()] == ["", "", ""]
    panel.close()
