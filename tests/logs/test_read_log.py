"""`read_log` against what the loops themselves saw (tests/data/logs/make_logs.py), and against logs that are none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from workbench.errors import RecordError, UnknownNameError, UsageError
from workbench.logs.event_file import EventFile

DATA = Path(__file__).parents[1] / "data" / "logs"
TRUTH = json.loads((DATA / "truth.json").read_text())
STEPS = np.arange(200)
LOSS = 2.0 * np.exp(-STEPS / 50) + 0.3 + 0.02 * np.random.default_rng(0).standard_normal(200)


def write(path: Path, **columns: object) -> Path:
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("library", ["tensorboard", "tensors", "wandb"])
def test_a_loop_that_logs_every_step_is_read_to_the_digit(library: str) -> None:
    record, seen = wb.read_log(DATA / library), TRUTH[library]
    for name in ("step", "loss", "lr", "grad_norm"):
        np.testing.assert_allclose(record.steps[name], seen[name], rtol=1e-5, err_msg=name)
    assert record.trials["peak_lr"].tolist() == [0.01]
    assert record.trials["total_steps"].tolist() == [60]
    held = record.evals[(record.evals["split"] == "validation") & (record.evals["metric"] == "loss")]
    assert held["step"].tolist() == list(range(0, 60, 6))


def test_lightning_logs_every_second_step_in_rows_that_hold_a_part_each() -> None:
    record, seen = wb.read_log(DATA / "lightning"), TRUTH["lightning"]
    assert record.steps["step"].tolist() == list(range(1, 60, 2))
    for name in ("loss", "lr", "grad_norm"):
        np.testing.assert_allclose(record.steps[name], seen[name][1::2], rtol=1e-4, err_msg=name)


def test_hugging_faces_newest_state_has_means_of_what_the_model_saw() -> None:
    record = wb.read_log(DATA / "transformers")
    pairs = np.asarray(TRUTH["transformers"]["loss"]).reshape(-1, 2).mean(1)
    assert record.steps["step"].tolist() == list(range(2, 61, 2))
    np.testing.assert_allclose(record.steps["loss"], pairs, rtol=1e-4)
    assert record.trials["state"].tolist() == ["complete"]
    early = wb.read_log(DATA / "transformers" / "checkpoint-30")
    assert early.trials[["state", "total_steps"]].to_numpy().tolist() == [["stopped", 60]], "max_steps is the plan"


def test_hugging_faces_zero_beside_a_norm_that_is_nan_is_a_loss_of_nan(tmp_path: Path) -> None:
    rows = [{"step": k, "loss": 2.0, "grad_norm": 1.0} for k in range(1, 20)] + [
        {"step": 20, "loss": 0.0, "grad_norm": float("nan")}
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"max_steps": 20, "log_history": rows}))
    assert wb.read_log(tmp_path).trials["state"].tolist() == ["diverged"]


def test_a_folder_of_runs_is_a_sweep() -> None:
    record = wb.read_log(DATA)
    assert len(record.trials) == 5
    assert set(record.trials["stage"]) == {"lr_sweep"}


def test_our_own_event_files_are_read_and_a_cut_off_end_is_passed_over(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for step, loss in zip(STEPS, LOSS, strict=True):
        file.scalar("train/loss", float(loss), int(step))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-7])
    record = wb.read_log(tmp_path)
    assert record.steps["step"].tolist() == list(range(199))
    np.testing.assert_allclose(record.steps["loss"], LOSS[:199], rtol=1e-6)


def test_a_wandb_record_that_spans_blocks_is_put_together(tmp_path: Path) -> None:
    """By LevelDB's own description of its log: blocks of 32 KiB, a record whole (1) or first, middle, last (2, 3, 4)."""

    def text(field: int, value: bytes) -> bytes:
        size, found = len(value), bytearray()
        while size > 0x7F:
            found.append(size & 0x7F | 0x80)
            size >>= 7
        return (
            struct.pack("<B", field << 3 | 2) + bytes([*found, size]) + value
            if field < 16
            else b"\x82\x01" + bytes([*found, size]) + value
        )

    log = bytearray(b":W&B\xe1\xbe\x00")

    def append(record: bytes) -> None:
        at, first = 0, True
        while True:
            left = 32768 - len(log) % 32768
            if left < 7:
                log.extend(bytes(left))
                continue
            piece = record[at : at + left - 7]
            at += len(piece)
            done = at == len(record)
            kind = 1 if first and done else 2 if first else 4 if done else 3
            log.extend(struct.pack("<IHB", 0, len(piece), kind) + piece)
            first = False
            if done:
                return

    for step, loss in enumerate(LOSS[:20]):
        cells = [
            ("_step", str(step)),
            ("loss", repr(float(loss))),
            ("words", json.dumps("x" * (40_000 if step % 5 == 1 else 900))),
        ]
        append(text(2, b"".join(text(1, text(1, name.encode()) + text(16, value.encode())) for name, value in cells)))
    (tmp_path / "run-x.wandb").write_bytes(bytes(log))
    np.testing.assert_allclose(wb.read_log(tmp_path).steps["loss"], LOSS[:20])


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("empty.csv", "", "is empty"),
        ("head.csv", "step,loss\n", "no row below it"),
        ("numbers.csv", "1,2.0\n2,1.9\n", "no header line"),
        ("other.csv", "step,accuracy\n1,0.5\n", "loss=NAME.*accuracy, step"),
        ("two.csv", "step,kl_loss,ce_loss\n1,1,1\n", "several columns.*kl_loss, ce_loss"),
        ("text.csv", "step,loss\n1,2.0\n2,tensor(1.9)\n", r"'tensor\(1.9\)' in row 2.*loss.item"),
        (
            "back.csv",
            "step,loss\n" + "".join(f"{99 - k},1.0\n" for k in range(99)),
            "falls 98 times, so it is not the step",
        ),
        ("no.json", '{"loss": 1}', "trainer_state.json"),
        ("no.jsonl", "{\n{\n", "not valid JSON"),
        ("no.wandb", "hello", "does not begin with ':W&B'"),
        ("x.tfevents.1", "hello, this is no event file at all", "not an event file"),
        ("model.pt", "hello", "a log is CSV"),
    ],
)
def test_what_is_no_log_says_what_it_is_and_what_to_do(tmp_path: Path, name: str, contents: str, said: str) -> None:
    (tmp_path / name).write_text(contents)
    with pytest.raises(RecordError, match=said):
        wb.read_log(tmp_path / name)


def test_wrong_arguments_are_usage_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", step=STEPS, loss=LOSS)
    with pytest.raises(UnknownNameError, match="Did you mean 'loss'"):
        wb.read_log(path, loss="los")
    with pytest.raises(UsageError, match="no log was given"):
        wb.read_log([])
    with pytest.raises(UsageError, match="above 0"):
        wb.read_log(path, lr=-0.1)
    with pytest.raises(UsageError, match=r"there is no .*In .* there is: a.csv"):
        wb.read_log(tmp_path / "b.csv")
    with pytest.raises(RecordError, match="no row"):
        wb.read_log(pd.DataFrame())


def test_a_loss_that_became_an_empty_cell_diverged_and_a_summary_at_the_end_is_no_loss(tmp_path: Path) -> None:
    gone = np.where(STEPS < 120, LOSS, np.nan)
    lost = wb.read_log(write(tmp_path / "a.csv", step=STEPS, loss=gone, lr=0.1))
    assert lost.trials["state"].tolist() == ["diverged"]
    assert lost.steps["step"].max() == 120
    path = write(tmp_path / "b.csv", step=STEPS, loss=LOSS, test_loss=np.nan)
    path.write_text(path.read_text() + "200,,0.5\n")
    assert wb.read_log(path).trials["state"].tolist() == ["complete"]
    (tmp_path / "c.csv").write_text("step,loss\n" + "".join(f"{k},{v}\n" for k, v in zip(STEPS, gone, strict=True)))
    assert wb.read_log(tmp_path / "c.csv").trials["state"].tolist() == ["diverged"], "nan in words"


@pytest.mark.parametrize(
    ("steps", "loss", "kept", "said"),
    [
        ([*range(150), *range(100, 200)], [*LOSS[:150] + 9, *LOSS[100:]], 200, "resumed from step 100"),
        ([*range(100), *range(100)], LOSS, 200, "went on with its steps counted from the start"),
        ([*range(100), *range(200)], [*LOSS[:100], *LOSS], 200, "was begun anew"),
    ],
)
def test_steps_that_fall_back(steps: list[int], loss: np.ndarray, kept: int, said: str) -> None:
    record = wb.read_log(pd.DataFrame({"step": steps, "loss": loss}))
    assert record.steps["step"].tolist() == list(range(kept))
    np.testing.assert_allclose(record.steps["loss"][100:], LOSS[100:])
    assert said in record.facts["log"][0]["notes"][0]


def test_steps_written_twice_are_the_mean_of_their_micro_batches() -> None:
    record = wb.read_log(pd.DataFrame({"step": np.repeat([1, 2, 3], 2), "loss": [1.0, 3.0, 2.0, 2.0, 0.0, 1.0]}))
    assert record.steps["loss"].tolist() == [2.0, 2.0, 0.5]


def test_without_a_step_rows_are_counted_and_epochs_where_a_row_is_one() -> None:
    assert "rows are counted" in wb.read_log(pd.DataFrame({"loss": LOSS})).facts["log"][0]["notes"][0]
    epochs = wb.read_log(pd.DataFrame({"epoch": np.arange(1, 21), "loss": LOSS[:20], "val_loss": LOSS[:20]}))
    assert epochs.steps["step"].tolist() == list(range(1, 21))
    assert epochs.evals["step"].tolist() == list(range(1, 21))


def test_a_learning_rate_that_was_logged_elsewhere_is_read_between_the_lines() -> None:
    rows = [{"step": k, "loss": LOSS[k]} for k in range(0, 200, 10)] + [
        {"step": k, "lr": 0.1 * (1 - k / 200)} for k in range(5, 200, 10)
    ]
    record = wb.read_log(pd.DataFrame(rows).sort_values("step"))
    np.testing.assert_allclose(record.steps["lr"][1:], 0.1 * (1 - np.arange(10, 200, 10) / 200))
    assert len(record.lrs) == 20


def test_names_and_numbers_that_are_given_count() -> None:
    frame = pd.DataFrame({"k": 2 * STEPS, "ce": LOSS, "loss": 0.0, "held": LOSS})
    record = wb.read_log(frame, loss="ce", step="k", validation="held", lr=0.1, max_grad_norm=1.0, total_steps=1000)
    np.testing.assert_allclose(record.steps["loss"], LOSS)
    row = record.trials.iloc[0]
    assert (row["peak_lr"], row["total_steps"], row["state"], row["max_grad_norm"]) == (0.1, 1000, "stopped", 1.0)
    assert len(record.evals) == 200


def test_a_long_log_is_seen_as_means() -> None:
    loss = np.tile(LOSS, 1500)
    record = wb.read_log(pd.DataFrame({"step": np.arange(loss.size), "loss": loss}))
    assert len(record.steps) == 100_000
    np.testing.assert_allclose(record.steps["loss"], loss.reshape(-1, 3).mean(1))
    assert "means over 3 steps" in record.facts["log"][0]["notes"][0]


def test_runs_logged_at_other_distances_are_seen_at_the_widest() -> None:
    frames = [
        pd.DataFrame({"step": STEPS[::every], "loss": LOSS[::every], "lr": lr}) for every, lr in ((1, 0.1), (5, 0.2))
    ]
    record = wb.read_log(frames)
    assert record.steps.groupby("trial").size().tolist() == [40, 40]
