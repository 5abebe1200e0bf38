"""Progress where nobody looks at a terminal: a line for each part, with the share that is done and the time that is left."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.workloads import small_workload
from workbench.errors import StudyInterrupted
from workbench.programs.session import PRINTED_LOSS, near_miss, printed_score
from workbench.progress import ProgressBar, interruptible, progress_bar
from workbench.studies.budget import Budget
from workbench.studies.session import Session, open_session


def test_a_log_gets_one_line_a_part_with_share_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 110.0, 330.0])
    monkeypatch.setattr("workbench.progress.time.monotonic", lambda: next(clock))
    bar = ProgressBar(label="wine")
    bar.expect(1000)
    bar.status("1 of 2: baseline")
    bar.advance(250)
    bar.status("2 of 2: learning rates", ", lr 0.1 to 0.4")
    bar.status("2 of 2: learning rates", ", lr 0.2")
    bar.advance(250)
    bar.status("done soon")
    bar.advance(600)
    bar.status("longer than thought")
    assert capsys.readouterr().err.splitlines() == [
        "wine: 1 of 2: baseline", "wine: 2 of 2: learning rates (25%, about 30 s left)",
        "wine: done soon (50%, about 4 min left)", "wine: longer than thought",
    ]  # fmt: skip


def test_what_an_earlier_call_has_trained_counts_as_done_and_takes_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("workbench.progress.time.monotonic", lambda: next(clock))
    bar = ProgressBar(label="wine")
    bar.expect(1000)
    bar.skip(400)
    bar.status("goes on")
    bar.advance(100)
    bar.status("finer")
    assert capsys.readouterr().err.splitlines() == ["wine: goes on (40%)", "wine: finer (50%, about 50 s left)"]


@pytest.mark.parametrize("folder", [None, Path("runs/s")])
def test_ctrl_c_is_one_line_that_says_what_is_kept(folder: Path | None) -> None:
    with pytest.raises(StudyInterrupted, match=r"the same command or cell") as said, interruptible(folder):
        raise KeyboardInterrupt
    assert (str(folder) in str(said.value)) == (folder is not None)
    with pytest.raises(StudyInterrupted, match="^as it was$"), interruptible(folder):
        raise StudyInterrupted("as it was")


def test_ctrl_c_while_torch_is_imported_waits_until_it_is() -> None:
    """An import of torch that is broken off cannot be made again in the same process, so a notebook's kernel would be lost."""
    code = """
        import signal, sys
        import workbench as wb
        class PressesStop:
            at = ["torch", "sklearn.datasets"]
            def find_spec(self, name, *_):
                if name in self.at:
                    self.at.remove(name)
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, PressesStop())
        for _ in range(3):
            try:
                print(wb.load_workload("digits_mlp").name)
            except KeyboardInterrupt as said:
                print(type(said).__name__)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["StudyInterrupted", "StudyInterrupted", "digits_mlp"]


def test_a_bar_grows_where_more_is_trained_than_was_expected() -> None:
    from tqdm import tqdm

    with tqdm(file=io.StringIO()) as made:
        bar = ProgressBar(made)
        bar.expect(10)
        bar.advance(4)
        assert (made.n, made.total) == (4, 10)
        assert "<" in str(made)
        bar.advance(8)
        assert (made.n, made.total) == (12, 12)
        assert "<" not in str(made), "nobody knows how long it takes beyond what was planned"


@pytest.mark.parametrize(
    ("wide", "said"), [(110, "4 of 4: proof under fresh seeds, lr 0.064"), (85, "4 of 4: proof under …")]
)
def test_a_narrow_terminal_shortens_what_is_trained_at_a_word(wide: int, said: str) -> None:
    from tqdm import tqdm

    with tqdm(file=io.StringIO(), ncols=wide, desc="train-program", total=10) as made:
        bar = ProgressBar(made)
        bar.expect(10)
        bar.status("4 of 4: proof under fresh seeds, lr 0.064")
        assert str(made).rstrip().endswith(said)


def test_nothing_is_said_where_nothing_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_LIVE", "1")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for show in (False, True):
        with progress_bar(None, "x", show=show) as bar:
            bar.status("begins")
    assert re.findall(r".+", capsys.readouterr().err) == ["x: begins"]


def test_a_stage_has_the_number_of_its_part_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ProgressBar, "status", lambda _, text, more="": said.append(text))
    with open_session(small_workload(), stem="lr_sweep", settings={}, out=tmp_path / "s") as session:
        session.plan(4.0, ("baseline", "search", "proof under 2 fresh seeds"))
        for part, detail in (("baseline", ""), ("proof", ""), ("search", "learning rates"), ("unplanned", "")):
            session.stage(part, detail)
        assert len(said) == 2, "nothing of the search was asked for yet"
        session.trial(session.config, stage="lr_sweep")
    assert said == ["1 of 3: baseline", "3 of 3: proof under 2 fresh seeds", "3 of 3: search again: learning rates"]


@pytest.mark.parametrize(("reached", "told"), [
    ("baseline", ["3 of 3: search and proof under 2 fresh seeds: left out, a fault comes first"]), ("proof", []),
])  # fmt: skip
def test_parts_that_never_begin_are_told_at_the_end(
    reached: str, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ProgressBar, "status", lambda _, text, more="": said.append(text))
    with open_session(small_workload(), stem="lr_sweep", settings={}, out=tmp_path / "s") as session:
        session.plan(4.0, ("baseline", "search", "proof under 2 fresh seeds"))
        session.stage(reached)
        session.left_out("a fault comes first")
    assert said[1:] == told


def test_where_a_time_is_given_the_end_is_what_it_pays_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline of 10 s and a minute: 6 runs and what is done, where 12 were planned; runs without a limit are as planned."""
    told: list[int] = []
    monkeypatch.setattr(ProgressBar, "expect", lambda _, steps: told.append(steps))
    budget = Budget.of("1m", 3)
    monkeypatch.setattr(Budget, "left_s", lambda _: 60.0)
    monkeypatch.setattr(Session, "run_s", 10.0)
    workload = small_workload()
    with open_session(workload, stem="lr_sweep", settings={}, out=tmp_path / "timed", budget=budget) as session:
        session.plan(12.0, ())
        session.budget = Budget()
        session.plan(12.0, ())
    steps = workload.config.total_steps
    assert told == [6 * steps, 12 * steps]


@pytest.mark.parametrize(
    ("pattern", "lines", "better"),
    [
        ("val loss ([0-9.]+)", ["epoch 0 val_loss: 0.5", "epoch 1 val_loss: 0.4"], r"val_loss: ([0-9.eE+-]+)"),
        ("validation_accuracy (x)", ["1: loss=0.5 Val acc = 0.5, lr 1e-3"] * 2, "Val acc = ([0-9.eE+-]+)"),
        ("top1 ([0-9.]+)", ["top1=0.5 top5=0.9"] * 2, "top1=([0-9.eE+-]+)"),
        ("val loss ([0-9.]+)", ["loss=0.5 vl 0.4 evaluation 3"] * 9, None),
        ("val loss ([0-9.]+)", ["epoch 0 val_loss: 0.5", "val loss 0.4"], None),
        ("val loss ([0-9.]+)", ["epoch 0 val_loss: 0.5", "train loss 0.4"], None),
        ("val loss ([0-9.]+)", ["the validation loss is 0.5", "interval loss 0.4"] * 9, None),
        (r"([0-9.]+) at the end", ["0.5 at the start"] * 9, None),
    ],
)
def test_a_pattern_that_misses_by_a_sign_or_a_shorter_word_is_known_while_the_program_runs(
    pattern: str, lines: list[str], better: str | None
) -> None:
    assert near_miss(pattern, lines) == better
    assert better is None or re.search(better, lines[0])


@pytest.mark.parametrize(
    "line",
    [
        "Epoch 3 val loss: 0.5", "loss_train: 0.7 loss_val: 0.5 acc_val: 0.9", "{'eval_loss': '0.5'}", "train loss 2, valLoss=0.5 lr 1",
        "Validation set: Average loss: 0.5, Accuracy: 90/100 (90%)",
    ],
)  # fmt: skip
def test_a_validation_loss_that_a_program_prints_is_found_however_it_is_named(line: str) -> None:
    assert re.findall(PRINTED_LOSS, line) == ["0.5"]


@pytest.mark.parametrize(
    "line",
    ["train loss 0.7", "value loss 0.7", "evaluated: loss 0.5", "interval loss 0.4", "val acc 0.9 loss 0.5", "loss: 0.3 (val 0.4)"],
)  # fmt: skip
def test_another_loss_is_not_taken_for_that_of_validation(line: str) -> None:
    assert re.findall(PRINTED_LOSS, line) == []


def test_a_validation_score_that_a_program_prints_is_offered_and_once_may_be_a_result() -> None:
    pattern = printed_score(["epoch 1: val auc 0.75 loss 3"] * 2)
    assert pattern is not None
    assert re.findall(pattern, "epoch 2: val auc 0.81 loss 2") == ["0.81"]
    assert printed_score(["epoch 1: val auc 0.75 loss 3"]) is None
    assert printed_score(["train acc 0.75", "val err 0.2"] * 2) is None
