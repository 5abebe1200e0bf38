"""`LogRecord`: logs of runs made elsewhere, with the frames that every diagnosis of curves reads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import RecordError, UsageError
from workbench.logs.columns import Names, RawLog
from workbench.logs.series import Series, in_order, thinned
from workbench.record.metrics import larger_is_better
from workbench.record.read import EVAL_COLUMNS, StudyRecord
from workbench.record.roles import Role
from workbench.record.write import StudyWriter

_SAME_LENGTH = 0.95  # runs whose lengths differ by less than this are of one length (rule of thumb)
_RISEN = 0.99  # share of the peak at which a warmup counts as over (rule of thumb)
_MOST_RESTARTS = 50
_MOST_ROWS = 100_000
"""Longer logs are seen as means over so many steps that this many are left: what a few steps of a million do is no verdict on it."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One or several logged runs; several with different learning rates are a sweep.

    Attributes:
        trials: one row a run.
        steps: one row a logged training loss: trial, step, loss, and lr and grad_norm where they were logged.
        lrs: one row a logged learning rate: trial, step, lr; there may be more of them than losses.
        evals: what was logged of validation and test data.
        facts: under "log" for each run its file, columns and notes.
    """

    trials: pd.DataFrame
    steps: pd.DataFrame
    lrs: pd.DataFrame
    evals: pd.DataFrame
    config: dict[str, Any]
    workload: str
    path: Path
    command: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the runs with their learning rates and lengths, and what was taken for what."""
        runs = [
            f"  {row['trial']}: lr {row['peak_lr']:.4g}, {row['rows']:,} losses up to step {row['last_step']:,}, {row['state']}; {log['said']}"
            for row, log in zip(self.trials.to_dict("records"), self.facts["log"], strict=True)
        ]
        return "\n".join([f"LogRecord({self.workload!r}, {len(runs)} run{'s' * (len(runs) != 1)})", *runs])


@dataclass(frozen=True, kw_only=True)
class Run:
    """The quantities of one log against the step."""

    log: RawLog
    names: Names
    loss: Series
    lr: Series | None
    grad_norm: Series | None
    held: dict[tuple[str, str], Series]
    notes: list[str]
    own_lr: float | None

    @property
    def peak_lr(self) -> float:
        """Largest learning rate logged, to four digits, else the config's; NaN where none is known."""
        known = self.own_lr if self.own_lr is not None else self.log.known.get("lr", math.nan)
        if self.lr is None or not np.isfinite(self.lr.value).any():
            return float(known)
        peak = float(np.nanmax(self.lr.value[np.isfinite(self.lr.value)]))
        if not peak > 0:
            return math.nan
        return float(known) if math.isclose(peak, known, rel_tol=0.02) else float(f"{peak:.4g}")

    @property
    def length(self) -> int:
        """Steps up to the one that would have been logged next."""
        return int(self.loss.steps[-1]) + self.loss.every

    @property
    def diverged(self) -> bool:
        """The last loss is not finite."""
        return not math.isfinite(self.loss.value[-1])

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate first comes up to its peak; 0 where it begins there."""
        if self.lr is None or not np.isfinite(self.lr.value).any():
            return 0
        high = np.flatnonzero(self.lr.value >= _RISEN * np.nanmax(self.lr.value))
        return int(self.lr.steps[high[0]]) if high[0] > 0 else 0


def read_run(log: RawLog, names: Names, *, own_lr: float | None) -> Run:
    """Return the quantities of one log, each put in order."""
    notes = list(log.known.get("notes", ()))
    steps = _steps(log, names, notes)
    rows, values = log.numbers(names.loss)
    if not rows.size:
        raise RecordError(
            f"{log.path}: no row has a value in column {names.loss!r}. Its columns: {', '.join(sorted(log.columns))}."
        )
    if log.text and (cut := _broke_off(log, names, rows, steps)) is not None:
        rows, values = np.append(rows, cut), np.append(values, np.nan)
    loss, said = in_order(Series(steps=steps[rows], value=values))
    if len(said) > _MOST_RESTARTS:
        raise RecordError(
            f"{log.path}: column {names.step!r} falls {len(said):,} times, so it is not the step. Name the column with step=NAME (--step NAME)."
        )
    notes += [f"the steps fall back within this log, which was taken as a run that {what}" for what in said]

    def series(name: str | None) -> Series | None:
        if name is None:
            return None
        places, found = log.numbers(name)
        return in_order(Series(steps=steps[places], value=found), said)[0].once() if places.size else None

    loss = loss.once(mean=True)
    held = {
        key: _on_the_steps(found, loss, notes, name)
        for key, name in names.held.items()
        if (found := series(name)) is not None
    }
    return Run(
        log=log, names=names, loss=loss, lr=series(names.lr), grad_norm=series(names.grad_norm), held=held, notes=notes, own_lr=own_lr,
    )  # fmt: skip


def _steps(log: RawLog, names: Names, notes: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the step of every row: as written, the last one before where a row has none; the rows' numbers without a column."""
    if names.step is None:
        epochs = next((name for name in log.columns if name.lower() in ("epoch", "train/epoch")), None)
        what = "rows are counted as steps"
        if epochs is not None:
            rows, values = log.numbers(epochs)
            whole = values.size == log.rows and np.isfinite(values).all() and (np.diff(values) >= 1).all()
            if whole and (values == np.round(values)).all():
                notes.append("no column of steps: epochs are counted as steps")
                return values.astype(np.int64)
        notes.append(f"no column of steps: {what}")
        return np.arange(log.rows, dtype=np.int64)
    rows, values = log.numbers(names.step)
    known = np.isfinite(values)
    if known.any() and np.unique(np.round(values[known])).size < 0.5 * np.unique(values[known]).size:
        notes.append(f"{names.step} holds fractions: rows are counted as steps")
        return np.arange(log.rows, dtype=np.int64)
    if not known.any():
        raise RecordError(f"{log.path}: column {names.step!r} holds no step. Name one with step=NAME (--step NAME).")
    filled = np.full(log.rows, np.nan)
    filled[rows[known]] = values[known]
    place = np.maximum.accumulate(np.where(np.isfinite(filled), np.arange(log.rows), -1))
    first = int(np.flatnonzero(np.isfinite(filled))[0])
    return np.round(filled[np.where(place < 0, first, place)]).astype(np.int64)


def _broke_off(log: RawLog, names: Names, rows: Any, steps: Any) -> int | None:
    """Return the row from which on the loss is an empty cell in rows like those before it: a NaN, as pandas writes it."""
    last, more = int(rows[-1]), log.rows - 1 - int(rows[-1])
    gap = int(np.diff(rows, prepend=-1).max()) - 1
    if more <= 2 * gap or more < 1 or steps[last + 1] <= steps[last]:
        return None

    def filled(row: int) -> set[str]:
        return {name for name, cells in log.columns.items() if row in cells.index}

    return last + 1 if filled(last + 1) and filled(last + 1) <= filled(last) - {names.loss} else None


def _on_the_steps(series: Series, loss: Series, notes: list[str], name: str) -> Series:
    """Return an evaluation on the steps of the loss, where it was counted 0, 1, 2, ... or 1, 2, 3, ... by epochs."""
    count, last = series.steps.size, int(loss.steps[-1])
    by_ones = count > 2 and (np.diff(series.steps) == 1).all() and series.steps[0] in (0, 1)
    if not by_ones or series.steps[-1] * 2 > last or (loss.every > 1 and last < 2 * count):
        return series
    notes.append(f"{name} is counted in epochs; {count} of them were laid evenly over {last:,} steps")
    ends = (series.steps - series.steps[0] + 1) * last // count
    return Series(steps=ends.astype(np.int64), value=series.value)


def record_of(
    runs: Sequence[Run], *, max_grad_norm: float | None, total_steps: int | None, workload: str, path: Path
) -> LogRecord:
    """Return the record of some runs."""
    total = total_steps or _common_length(runs)
    widest = max(run.loss.every for run in runs)
    trials, steps, lrs, evals, seeds = [], [], [], [], dict[float, int]()
    for number, run in enumerate(runs):
        loss = run.loss if run.loss.every * 1.5 > widest else thinned(run.loss, widest)
        if loss.steps.size > _MOST_ROWS:
            loss = thinned(loss, loss.every * math.ceil(loss.steps.size / _MOST_ROWS))
        if loss is not run.loss:
            run.notes.append(f"losses are means over {loss.every:,} steps each")
        planned = int(run.log.known.get("total_steps", total)) if total_steps is None else total
        planned = max(planned, total) if len(runs) > 1 else planned
        key = run.peak_lr if math.isfinite(run.peak_lr) else -1.0
        seeds[key] = seeds.get(key, -1) + 1
        done = run.loss.steps[-1] + 2 * run.loss.every > planned
        limit = max_grad_norm if max_grad_norm is not None else run.log.known.get("max_grad_norm")
        trials.append({
            "trial": number, "stage": str(Role.TRIAL), "state": "diverged" if run.diverged else "complete" if done else "stopped",
            "seed": seeds[key], "train_examples": math.nan, "peak_lr": run.peak_lr, "total_steps": min(planned, run.length) if done else planned,
            "batch_size": None, "optimizer": None, "warmup_steps": run.warmup_steps, "max_grad_norm": limit,
            "rows": loss.steps.size, "last_step": int(loss.steps[-1]), "steps_run": int(loss.steps[-1]),
        })  # fmt: skip
        lr = None if run.lr is None else run.lr.at(loss.steps)
        norm = None if run.grad_norm is None else run.grad_norm.nearest(loss.steps)
        if run.grad_norm is not None and norm is None:
            run.notes.append(f"{run.names.grad_norm} is logged too rarely to be compared with the loss")
        columns = {"step": loss.steps, "loss": loss.value, "lr": lr, "grad_norm": norm}
        steps.append(pd.DataFrame({"trial": number} | {n: v for n, v in columns.items() if v is not None}))
        if run.lr is not None:
            lrs.append(pd.DataFrame({"trial": number, "step": run.lr.steps, "lr": run.lr.value}))
        evals += [_evals(number, key, series) for key, series in run.held.items()]
    table = pd.DataFrame(trials)
    if len(runs) > 1:
        whole = table["state"] != "stopped"
        table.loc[whole, "total_steps"] = int(table.loc[whole, "total_steps"].min()) if whole.any() else total
        table.loc[~whole, "total_steps"] = max(total, int(table["total_steps"].max()))
    known = sorted({float(lr) for lr in table["peak_lr"] if math.isfinite(lr)})
    if len(known) > 1:
        table["stage"] = str(Role.LR_SWEEP)
    config = {
        "peak_lr": known[0] if len(known) == 1 else None, "total_steps": int(table["total_steps"].max()), "batch_size": None,
        "optimizer": None, "max_grad_norm": max_grad_norm, "shared_seed": 0, **_select(runs),
    }  # fmt: skip
    return LogRecord(
        trials=table, steps=pd.concat(steps, ignore_index=True),
        lrs=pd.concat(lrs, ignore_index=True) if lrs else pd.DataFrame(columns=["trial", "step", "lr"]),
        evals=pd.concat(evals, ignore_index=True) if evals else pd.DataFrame(columns=EVAL_COLUMNS),
        config=config, workload=workload, path=path, facts={"log": [_origin(run) for run in runs]},
    )  # fmt: skip


def _common_length(runs: Sequence[Run]) -> int:
    longest = max(int(run.log.known.get("total_steps", run.length)) for run in runs)
    return min((run.length for run in runs if run.length >= _SAME_LENGTH * longest), default=longest)


def _evals(number: int, key: tuple[str, str], series: Series) -> pd.DataFrame:
    rows = pd.DataFrame({"trial": number, "step": series.steps, "value": series.value})
    rows = rows.assign(
        split=key[0], setting="periodic", metric=key[1], num_examples=math.nan, num_correct=math.nan, seconds=math.nan
    )
    return rows.assign(subset="")[EVAL_COLUMNS]


def _select(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the metric that checkpoints would be chosen by: the validation loss, else a score that is better when it is higher."""
    there = set.intersection(*(set(run.held) for run in runs))
    if ("validation", "loss") not in there:
        for split, metric in sorted(there):
            if split == "validation" and larger_is_better(metric):
                return {"select": f"{split}/{metric}", "select_mode": "max"}
    return {"select": "validation/loss", "select_mode": "min"}


def _origin(run: Run) -> dict[str, Any]:
    """Return which file and columns a run was read from, as JSON values and in words."""
    names = run.names
    columns = {"loss": names.loss, "lr": names.lr, "grad_norm": names.grad_norm, "step": names.step}
    used = {word: name for word, name in columns.items() if name is not None}
    used |= {"/".join(key): name for key, name in names.held.items()}
    said = ", ".join(f"{word} from {name}" if word != name else word for word, name in used.items())
    return {"file": str(run.log.path), "columns": used, "every": run.loss.every, "notes": run.notes, "said": said}


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
