"""The table of studies, read from their folders without Optuna: columns, export, notes."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pandas as pd
import pytest
import torch

import workbench as wb
from tests.helpers.study_folders import PLAIN, filled, opened, study
from tests.helpers.workloads import small_workload
from workbench import cli
from workbench.errors import RecordError, UsageError
from workbench.ledger.table import COLUMNS, EXTRA
from workbench.record.folder import lock
from workbench.views.summary import study_sentence

NASTY = ['=HYPERLINK("http://x")', "+1", "-1", "@sum", 'two\nlines, and a "quote"', "bell \x07 rings", "é – ü"]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies, and one for each nasty note."""
    root = tmp_path_factory.mktemp("runs")
    study(root / "one")
    study(root / "two", mode="max", values=(0.5, 0.25, math.nan, 0.75))
    for number, note in enumerate(NASTY):
        opened(root / f"z{number}", note=note).close()
    return root


def test_a_study_is_a_row_and_its_numbers_are_those_of_the_record(root: Path) -> None:
    assert wb.list_studies(root).columns.tolist() == COLUMNS
    table = wb.list_studies(root, extra=list(EXTRA)).set_index("study")
    assert table.shape == (2 + len(NASTY), 5 + len(EXTRA))
    for name, best, best_trial, trials in (("one", 0.25, 1, 6), ("two", 0.75, 3, 7)):
        row, frame = table.loc[name], wb.open(root / name).trials
        assert (row["best_value"], row["best_trial"], row["trials"]) == (best, best_trial, trials)
        assert row["best_trial"] == wb.open(root / name).best().number
        assert row["trials"] == len(frame), "failed ones included"
        assert row["failed"] == (frame["state"] == "failed").sum() == 1
        assert row["diverged"] == (frame["state"] == "diverged").sum() == 1
        assert row["best_lr"] == wb.open(root / name).trial(best_trial).config["peak_lr"]
        assert (row["unfinished"], row["state"], row["note"], row["best_step"]) == (1, "unfinished", "a note", 3)
        assert row["reproduce"].endswith("workbench diagnose w")
        assert hashlib.sha256(Path(row["config"]).read_bytes()).hexdigest() == row["config_sha256"]
    with pytest.raises(UsageError, match=r"no further column 'fialed'.*failed") as caught:
        wb.list_studies(root, extra=["fialed"])
    assert str(caught.value).count("config_sha256") == 1, "what is allowed is listed once"


def test_the_best_value_is_that_of_a_learning_rate_below_the_unstable_one(tmp_path: Path) -> None:
    study(tmp_path / "s")
    best = wb.open(tmp_path / "s").best()
    above = {"findings": [{"code": "lr.unstable", "value": best.config["peak_lr"]}]}
    (tmp_path / "s" / "diagnosis.json").write_text(json.dumps(above))
    stable = wb.open(tmp_path / "s").best()
    assert stable.config["peak_lr"] < best.config["peak_lr"]
    row = wb.list_studies(tmp_path, extra=["best_lr", "best_trial"]).iloc[0]
    assert (row["best_lr"], row["best_trial"]) == (stable.config["peak_lr"], stable.number)
    ends = above | {"recommendation": {"adopted": False, "baseline": {"trials": [best.number]}}}
    (tmp_path / "s" / "diagnosis.json").write_text(json.dumps(ends))
    assert wb.open(tmp_path / "s").best().number == best.number, "of the config that the diagnosis ends with"


def test_a_sweep_has_its_two_learning_rates_in_the_table_without_a_diagnosis(tmp_path: Path) -> None:
    swept = wb.lr_sweep.Study(lrs=[0.01, 0.1, 1e6]).run(small_workload(), out=tmp_path / "s")
    found = wb.lr_sweep.diagnose(swept)
    row = wb.list_studies(tmp_path, extra=["lr_best", "lr_unstable"]).iloc[0]
    assert (row["lr_best"], row["lr_unstable"]) == (found["lr.best"].value, found["lr.unstable"].value)
    assert row[["lr_best", "lr_unstable"]].notna().all()


def test_optuna_is_not_needed(root: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules.update(optuna=None, sqlalchemy=None, psycopg=None)\n"
        "import workbench as wb\n"
        "from tests.helpers.workloads import small_workload\n"
        f"assert len(wb.list_studies({str(root)!r})) == 9\n"
        f"wb.Trainer().run(small_workload(), out={str(tmp_path / 'mine')!r})\n"
        f"wb.set_note({str(tmp_path / 'mine')!r}, 'noted')\n"
        f"wb.export_studies({str(tmp_path / 't.csv')!r}, {str(tmp_path)!r})\n"
        "from workbench import cli\n"
        "assert cli.main(['studies', 'mine', '--push', 'sqlite:///none.db']) == 1"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env=os.environ | {"PYTHONPATH": ROOT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pip install 'training-workbench[ledger]'" in done.stderr
    assert "noted" in (tmp_path / "t.csv").read_text()


def test_the_config_link_says_what_has_become_of_the_config(tmp_path: Path) -> None:
    path = study(tmp_path / "one") / "config.json"
    was = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    path.write_text(path.read_text() + "\n")
    assert wb.list_studies(tmp_path)["config"][0].startswith(f"{path} (changed: was {was}, is ")
    path.unlink()
    assert wb.list_studies(tmp_path)["config"].tolist() == [f"{path} (missing)"]


def test_a_spreadsheet_shows_the_table_and_computes_nothing(root: Path, tmp_path: Path) -> None:
    table = wb.list_studies(root, extra=["failed"])
    with wb.export_studies(tmp_path / "t.csv", root).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["study"], row["trials"]) for row in rows] == [(r.study, str(r.trials)) for r in table.itertuples()]
    assert [row["note"] for row in rows[2:]] == [f"'{note}" if note[0] in "=+-@" else note for note in NASTY]
    head, *sheet = openpyxl.load_workbook(
        wb.export_studies(tmp_path / "t.xlsx", root, extra=["failed"])
    ).active.iter_rows()
    assert [cell.value for cell in head] == [*COLUMNS, "failed"]
    for cells, expected in zip(sheet, table.itertuples(index=False), strict=True):
        assert all(cell.data_type != "f" for cell in cells)
        for cell, value in zip(cells, expected, strict=True):
            missing = isinstance(value, float) and math.isnan(value)
            assert cell.value == (None if missing else value.replace("\x07", "") if isinstance(value, str) else value)
    link = sheet[0][COLUMNS.index("config")].hyperlink
    assert link.target == (root / "one" / "config.json").resolve().as_uri()


def test_a_note_is_written_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = study(tmp_path / "one")
    before = json.loads((path / "study.json").read_text())
    assert wb.set_note(path, " warmup did\n not help ") == "warmup did not help"
    assert json.loads((path / "study.json").read_text()) == before | {"note": "warmup did not help"}
    assert wb.set_note(path, "with --token pw") == "with --token ***"
    assert wb.set_note(path, "warmup did not help")
    with pytest.raises(UsageError, match=r"note is empty.*P5\.4"):
        wb.set_note(path, "  \n")
    with lock(path), pytest.raises(RecordError, match="another process is writing"):
        wb.set_note(path, "after")

    def full(*_: Any, **__: Any) -> None:
        raise RecordError("no space")

    monkeypatch.setattr("workbench.ledger.studies.write_json", full)
    with pytest.raises(RecordError, match="no space"):
        wb.set_note(path, "after")
    assert wb.list_studies(tmp_path)["note"].tolist() == ["warmup did not help"]
    with lock(path):
        pass


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study(Path("runs/one"))
    assert cli.main(["studies", "--columns", "failed, select", "--export", "table.xlsx"]) == 0
    out = capsys.readouterr().out
    assert "Table: table.xlsx" in out
    assert "failed:    1" in out
    assert pd.read_excel("table.xlsx").columns.tolist() == [*COLUMNS, "failed", "select"]
    for given, note in (("one", "by name"), ("runs/one", "by folder")):
        assert cli.main(["studies", "--note", given, note]) == 0
        assert note in capsys.readouterr().out
    assert [
        cli.main(["studies", *w]) for w in (["--note", "one", ""], ["--note", "two", "x"], ["--columns", "no"])
    ] == [2, 2, 2]


def test_a_watched_loop_shows_its_best_evaluation_wherever_studies_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first loop logs a loss, a score and values that say nothing of the best step; the second clips, and logs no evaluation."""
    study(tmp_path / "one")
    for name, logged in (("loop", True), ("blind", False)):
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with wb.watch(model, optimizer, out=tmp_path / name) as run:
            for loss, score in ((0.5, 0.7), (math.nan, 0.9), (0.25, 0.8), (0.25, 0.9), (0.3, 0.9), (0.3, 0.9)):
                model(torch.ones(2, 3)).mean().backward()
                if not logged:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5)
                optimizer.step()
                values = {"accuracy": score, "validation_loss": loss, "train_loss": 0.1, "epoch": 0.0}
                run.log(**values if logged else {"train_loss": 0.1})
        page = wb.write_report(run.record, run.diagnose(), tmp_path / name).read_text()
        assert (
            "Gradients are clipped at a norm of 1.5" in page,
            "are clipped at 1.5" in page.partition("<h2>Figures")[2],
        ) == (not logged,) * 2
    record = wb.open(tmp_path / "loop")
    assert record.best()[:2] == (3, 0.25), "NaN never wins, ties go to the earliest step"
    assert record.trials[["best_value", "best_step"]].to_numpy().tolist() == [[0.25, 3]]
    (drawn,) = [line for line in wb.loop.plot(record).get_lines() if line.get_label() == "validation/loss"]
    assert np.array_equal(drawn.get_ydata(), [0.5, np.nan, 0.25, 0.25, 0.3, 0.3], equal_nan=True)
    assert "Best validation/loss: 0.25, at step 3." in wb.summarise(record, run.diagnose())
    assert "Best" not in wb.summarise(wb.open(tmp_path / "blind"), run.diagnose())
    assert "lowest validation/loss 0.25 in trial 0 at lr 0.3, step 3" in study_sentence(record)
    assert cli.main(["studies", str(tmp_path)]) == 0
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert ["loop", "1", "0.25", "validation/loss", "0.3"] in lines
    assert ["blind", "1"] in lines
    assert cli.main(["studies", str(tmp_path), "--compare", "loop", "one"]) == 0
    said, *rows = capsys.readouterr().out.splitlines()
    assert said == f"The workloads differ ({record.workload}, w): compare the configs, not the values."
    found = {what: values for what, *values in (re.split("  +", row) for row in rows)}
    assert (found["value"], found["seeds"]) == (["0.25", "0.25"], ["1", "1"])
    assert found["verdict"][0].startswith("fail loop.")
    assert cli.main(["studies", str(tmp_path), "--compare", "loop", "blind"]) == 0
    said, *rows = capsys.readouterr().out.splitlines()
    assert said == "No value to compare in blind, where no metric was evaluated; the configs can be compared."
    assert any(re.fullmatch("verdict +fail loop.* fail loop.*", row) for row in rows), "also where both are the same"


@pytest.mark.parametrize(
    ("logged", "chosen", "best"),
    [
        ({"iou_loss": (0.2, 0.1, 0.3), "mAP": (0.2, 0.5, 0.1)}, ("validation/iou_loss", "min"), 0.1),
        ({"test_loss": (0.1, 0.2, 0.3), "val_top1": (0.2, 0.5, 0.1)}, ("validation/top1", "max"), 0.5),
        ({"reward": (1.0, -2.0, 3.0), "epoch_seconds": (1.0, 2.0, 3.0)}, ("validation/reward", "max"), 3.0),
        ({"lr": (0.1, 0.2, 0.3), "train_accuracy": (0.1, 0.2, 0.3)}, ("train/loss", "min"), None),
    ],
)
def test_what_is_best_is_told_by_the_name_of_what_is_logged(
    logged: dict[str, tuple[float, ...]], chosen: tuple[str, str], best: float | None, tmp_path: Path
) -> None:
    model = torch.nn.Linear(3, 1)
    with wb.watch(model, torch.optim.SGD(model.parameters(), lr=0.3), out=tmp_path / "loop") as run:
        for values in zip(*logged.values(), strict=True):
            run.log(**dict(zip(logged, values, strict=True)))
    record = wb.open(tmp_path / "loop")
    assert (record.config["select"], record.config["select_mode"]) == chosen
    assert record.trials["best_value"].dropna().tolist() == ([] if best is None else [best])


def test_the_command_shows_what_was_measured_and_how_to_reproduce_it_when_asked(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path / "one")
    findings = [{"code": "lr.best", "value": 0.4}, {"code": "lr.unstable", "value": None}]
    faults = [{"code": "loop.no_step", "value": 1, "status": "fail", "follows_from": f} for f in (None, "data.labels")]
    (tmp_path / "one" / "diagnosis.json").write_text(
        json.dumps({"verdict": "not_measured", "badge": "ok, 1 not measured", "findings": [*findings, *faults]})
    )
    study(tmp_path / "two")
    (tmp_path / "two" / "diagnosis.json").write_text("cut off {")
    row = wb.list_studies(tmp_path, extra=["verdict", "lr_best", "lr_unstable"]).set_index("study")
    assert row.loc["one", ["verdict", "lr_best"]].tolist() == ["ok, 1 not measured", 0.4]
    assert row.loc["two", ["verdict", "lr_best", "lr_unstable"]].isna().all()
    assert cli.main(["studies", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, one, said, two, alone = ([cell.strip() for cell in line.split("  ") if cell] for line in lines[:5])
    assert [line.partition(":")[0] for line in lines[5:]] == ["", "value, at lr", "lr.best"], "what the columns hold"
    assert head == ["study", "trials", "value", "metric", "at lr", "lr.best", "lr.unstable"]
    assert one == ["one", "6", "0.25", "validation/loss", "0.2", "0.4"]
    assert two == ["two", "6", "0.25", "validation/loss", "0.2"]
    assert (said, alone) == (
        ["ok, 1 not measured loop.no_step: 1 of 6 runs was stopped early: a note"],
        ["1 of 6 runs was stopped early: a note"],
    )
    assert cli.main(["studies", str(tmp_path), "--note", "two", "after the fix #lr #fix"]) == 0
    capsys.readouterr()
    assert cli.main(["studies", str(tmp_path), "--tag", "lr"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["study", "two", "1"]
    assert cli.main(["studies", str(tmp_path), "--tag", "after"]) == 0
    assert "has the tag #after" in capsys.readouterr().out
    assert cli.main(["studies", str(tmp_path), "--compare", "one", str(tmp_path / "two")]) == 0
    compared = capsys.readouterr().out
    assert [line.split() for line in compared.splitlines() if line.startswith("value")] == [["value", "0.25", "0.25"]]
    assert cli.main(["studies", str(tmp_path), "--compare", "one"]) == 2
    assert "standard deviation over seeds" not in compared, "a row without a value says nothing"
    assert cli.main(["studies", str(tmp_path), "--note", "two", "long " * 60]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 110
    assert cli.main(["studies", str(tmp_path), "--verbose"]) == 0
    assert capsys.readouterr().out.count("reproduce: ") == 2


def test_a_whole_run_that_stayed_finite_is_the_best_and_a_study_of_failures_has_failed(tmp_path: Path) -> None:
    config = PLAIN | {"total_steps": 40}
    for name, ends in (("good", [(40, "complete", 0.5), (10, "complete", 0.1), (40, "diverged", 0.0)]), ("bad", [(40, "failed", None)])):  # fmt: skip
        writer = opened(tmp_path / name, config=config)
        for number, (steps, state, value) in enumerate(ends):
            trial = writer.trial(config | {"total_steps": steps, "peak_lr": 0.1 * (number + 1)}, stage="lr_sweep", train_examples=32)  # fmt: skip
            trial.event("ended", state=state, best_value=value, best_step=3, steps_run=steps, seconds=1.0)
        writer.finish()
        writer.close()
    table = wb.list_studies(tmp_path, extra=["state"]).set_index("study")
    assert (table.loc["good", "best_value"], table.loc["good", "state"]) == (0.5, "finished")
    assert table.loc["bad", "state"] == "failed"
    assert wb.open(tmp_path / "good").best().number == 0


@pytest.mark.slow
def test_a_study_of_two_thousand_trials_is_in_the_table_within_a_second(tmp_path: Path) -> None:
    """Ten thousand within five: its trials are read once, not once for each of the others."""
    filled(tmp_path / "many", trials=2000, steps=1).close()
    begun = time.process_time()
    assert wb.list_studies(tmp_path)["trials"].tolist() == [2000]
    assert time.process_time() - begun < 1.0


def test_a_study_that_was_stopped_says_how_far_its_best_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = opened(tmp_path / "cut", config=PLAIN | {"total_steps": 40})
    for steps, ended, value in [(4, 4, 0.1), (40, 30, 0.5)]:
        trial = writer.trial(PLAIN | {"total_steps": steps}, stage="lr_sweep", train_examples=32)
        state = "complete" if steps == ended else "stopped"
        trial.event("ended", state=state, best_value=value, best_step=3, steps_run=ended, seconds=1.0, gradients="vmap")
    writer.close()
    assert "0.5, so far and of a run that is stopped at 30 of 40 steps, in trial 1" in study_sentence(
        wb.open(tmp_path / "cut")
    )
    assert cli.main(["studies", str(tmp_path)]) == 0
    assert "1 of 2 runs was stopped early; the same call resumes it: lr_sweep of w" in capsys.readouterr().out


def test_the_value_of_a_proven_config_is_that_of_its_proof(tmp_path: Path) -> None:
    """The run that chose it was the luckiest of those with its config, and is not counted."""
    writer = opened(tmp_path / "proof", config=PLAIN)
    for seed, value in enumerate([0.1, 0.4, 0.6]):
        trial = writer.trial(PLAIN | {"shared_seed": seed}, stage="proof", train_examples=32)
        trial.event("ended", state="complete", best_value=value, best_step=3, steps_run=4, seconds=1.0)
    writer.finish()
    writer.close()
    advised = {"adopted": True, "recommended": {"trials": [1, 2]}}
    (tmp_path / "proof" / "diagnosis.json").write_text(
        json.dumps({"verdict": "ok", "findings": [], "recommendation": advised})
    )
    row = wb.list_studies(tmp_path, extra=["mean_value", "seeds"]).iloc[0]
    assert (row["mean_value"], row["seeds"]) == (0.5, 2)
