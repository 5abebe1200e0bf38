"""Logged runs as a study on disk, to be opened, listed and reported like one that was trained here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.logs.record import LogRecord
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter

KIND = "log"


def write_study(record: LogRecord, out: str | Path, *, command: str | None = None) -> StudyRecord:
    """Return the study that was written from logged runs."""
    path = Path(out)
    if (path / "study.json").exists():
        raise UsageError(f"{path} holds a study already. Give a new folder, or delete this one.")
    files = [log["file"] for log in record.facts["log"]]
    note = f"{len(files)} logged run{'s' * (len(files) != 1)}: {', '.join(files[:3])}{', ...' * (len(files) > 3)}"
    writer = StudyWriter.open(
        path, kind=KIND, workload=record.workload, config=record.config, settings={"files": files}, note=note,
        command=command, call="judge",
    )  # fmt: skip
    try:
        for row, file in zip(record.trials.to_dict("records"), files, strict=True):
            number = int(row["trial"])
            trial = writer.trial(_config(record, row) | {"file": file}, stage=str(row["stage"]), train_examples=0)
            for parts, table in ((writer.steps, record.steps), (writer.evals, record.evals)):
                mine = table[table["trial"] == number].dropna(axis="columns", how="all")
                if len(mine):
                    parts.add(
                        {str(name): mine[name].to_numpy() for name in mine.columns}
                        | {"trial": [trial.number] * len(mine)}
                    )
            trial.event("read", state=row["state"], steps_run=int(row["steps_run"]), **_best(record, number))
        writer.add_facts(**record.facts)
        writer.finish()
    finally:
        writer.close()
    return StudyRecord(path)


def _config(record: LogRecord, row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what is known of how one run was trained."""
    known = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in row.items()}
    fields = ("peak_lr", "total_steps", "batch_size", "optimizer", "warmup_steps", "max_grad_norm")
    own = {name: known[name] for name in fields}
    return own | {"shared_seed": int(row["seed"])} | {name: record.config[name] for name in ("select", "select_mode")}


def _best(record: LogRecord, number: int) -> dict[str, Any]:
    split, metric = record.config["select"].split("/", 1)
    evals = record.evals
    rows = evals[(evals["trial"] == number) & (evals["split"] == split) & (evals["metric"] == metric)]
    rows = rows[rows["value"].astype(float).map(math.isfinite)] if len(rows) else rows
    if not len(rows):
        return {}
    values = rows["value"].astype(float)
    place = values.idxmin() if record.config["select_mode"] == "min" else values.idxmax()
    return {"best_step": int(rows.loc[place, "step"]), "best_value": float(values[place])}
