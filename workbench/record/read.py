"""Reading a study: `StudyRecord` and `TrialRecord`, finished or running, from disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.errors import RecordError, nearest
from workbench.record.events import read_events
from workbench.record.folder import is_locked, read_json
from workbench.record.json_values import number
from workbench.record.missing import missing
from workbench.record.tables import read_parts

SCHEMA = 1
"""Of `study.json`: raised when an older version of this package would read a folder wrongly."""

STEP_COLUMNS = ["trial", "step", "loss", "loss_se", "lr", "grad_norm", "clipped", "update_norm", "param_norm"]
EVAL_COLUMNS = ["trial", "step", "split", "setting", "metric", "value", "num_examples", "num_correct", "seconds", "subset"]  # fmt: skip
PREDICTION_COLUMNS = ["trial", "step", "split", "example", "prediction", "label", "loss"]

_FROM_EVENTS = ("state", "best_step", "best_value", "steps_run", "seconds", "gradients", "lanes")


class Best(NamedTuple):
    """The retrospectively selected evaluation of a trial (P4.5)."""

    step: int
    value: float
    checkpoint: Path | None


@dataclass(frozen=True)
class StudyRecord:
    """All trials of one study folder. Frames are pandas; read when first asked for, see `reload`.

    Attributes:
        path: the study's folder.
        only: numbers of the trials to see; None is all.
    """

    path: Path
    only: frozenset[int] | None = None

    def __post_init__(self) -> None:
        """Take a string, too."""
        object.__setattr__(self, "path", Path(self.path))

    @cached_property
    def study(self) -> dict[str, Any]:
        """The contents of `study.json`."""
        study = read_json(self.path / "study.json")
        schema, by = study.get("schema", SCHEMA), (study.get("versions") or {}).get("workbench")
        if isinstance(schema, int) and schema > SCHEMA:
            raise RecordError(
                f"{self.path} was written by a newer version of workbench{f' ({by})' if by else ''}: its schema is {schema}, and "
                f"this version reads up to {SCHEMA}. Update workbench to open it; nothing in it was touched."
            )
        if lacking := {"name", "kind", "workload", "config"} - {*study}:
            raise RecordError(f"{self.path / 'study.json'} describes no study: no {', '.join(sorted(lacking))} in it.")
        return study

    @property
    def name(self) -> str:
        """Name of the study."""
        return str(self.study["name"])

    @property
    def workload(self) -> str:
        """Name of the workload."""
        return str(self.study["workload"])

    @property
    def command(self) -> str | None:
        """What reproduces the study (P5.7)."""
        return self.study.get("command")

    @property
    def config(self) -> dict[str, Any]:
        """The baseline's `TrainConfig` as plain values."""
        return dict(self.study["config"])

    @property
    def facts(self) -> dict[str, Any]:
        """What was measured on the live model: JSON values."""
        return dict(self.study.get("facts", {}))

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row a trial: trial, stage, state, seed, every config field, best_step, best_value, seconds.

        `gradients` says by which way its gradients were taken, `lanes` how many trials trained together with it, itself
        included; `seconds` is its equal share of their time.
        """
        return pd.DataFrame(_trial_rows([p for p in trial_folders(self.path) if self.only is None or int(p.name) in self.only]))  # fmt: skip

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a step and trial, sorted; row k is measured before update k."""
        return self._rows("steps", STEP_COLUMNS)

    @cached_property
    def evals(self) -> pd.DataFrame:
        """One row an evaluated metric; at step k, k updates have been made: 0 is before training.

        setting is "periodic" for what training evaluated itself, "offline" for `evaluate_offline` (P2.2, P2.3); `subset`
        names the part of the split that was evaluated, "" is all of it.
        """
        table = self._rows("evals", EVAL_COLUMNS)
        return table.assign(subset=table["subset"].fillna("") if "subset" in table else "")

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """What was predicted for each tracked example at each evaluation (P2.12), sorted by trial, step and example.

        trial, step, split, example (its index in the split), prediction, label, loss. A prediction is a class, a number, or
        a flat array of them; NaN where the outputs are none of these.
        """
        table = self._rows("predictions", PREDICTION_COLUMNS)
        return table.sort_values(["trial", "step", "example"], kind="stable", ignore_index=True)

    @cached_property
    def lanes(self) -> pd.DataFrame:
        """How each trial was trained, one row a trial.

        trial, stage, lanes (that trained together, itself included), gradients ("loop" or "vmap"), lanes_per_call, threads,
        reason, and what a step of one lane took when the ways were measured, in milliseconds: loop_ms, step_ms (by the way
        taken) and their ratio, faster. Missing values: not measured.
        """
        folders = [self.path / "trials" / str(number) for number in self.trials.get("trial", [])]
        return pd.DataFrame([_lanes_row(folder) for folder in folders], columns=_LANES)

    def _rows(self, folder: str, columns: list[str]) -> pd.DataFrame:
        table = read_parts(self.path / folder, columns=columns)
        own = {"steps": "split" not in table, "evals": "metric" in table, "predictions": "example" in table}
        if not own[folder]:
            raise RecordError(f"{self.path / folder} holds the rows of another table: its files were replaced.")
        if self.only is not None:
            table = table[table["trial"].isin(self.only)]
        return table.sort_values(["trial", "step"], kind="stable", ignore_index=True)

    def trial(self, number: int) -> TrialRecord:
        """Return one trial; an unknown number is a `RecordError`."""
        if not (self.path / "trials" / str(number) / "config.json").exists():
            known = ", ".join(str(n) for n in self.trials.get("trial", [])) or "none yet"
            raise RecordError(f"study {self.name!r} has no trial {number}; it has: {known}.")
        return TrialRecord(self.path, number)

    def __iter__(self) -> Iterator[TrialRecord]:
        """Iterate over the trials."""
        return (TrialRecord(self.path, int(n)) for n in self.trials.get("trial", []))

    def best(self) -> TrialRecord:
        """Return the trial whose selected checkpoint is best (P4.7, P5.6)."""
        table = ranked_trials(self)
        if table.empty or math.isnan(table["best_value"].iloc[0]):
            raise RecordError(f"study {self.name!r} has no finished evaluation yet, so there is no best trial.")
        return self.trial(int(table["trial"].iloc[0]))

    def reload(self) -> StudyRecord:
        """Return the same study read anew from disk, for a study that is still running."""
        return StudyRecord(self.path, self.only)

    def __repr__(self) -> str:
        """Return name, workload and the number of trials in each state."""
        states = self.trials["state"].value_counts().to_dict() if len(self.trials) else {}
        shown = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no trial yet"
        return f"StudyRecord({self.name!r}, workload={self.workload!r}, {shown})"


@dataclass(frozen=True)
class TrialRecord:
    """One trial: the same attributes as its study, restricted to its own rows.

    Attributes:
        path: the study's folder.
        number: the trial's number.
    """

    path: Path
    number: int

    @cached_property
    def _study(self) -> StudyRecord:
        return StudyRecord(self.path, frozenset({self.number}))

    @property
    def folder(self) -> Path:
        """The trial's own folder: config.json, checkpoints, events.jsonl."""
        return self.path / "trials" / str(self.number)

    @property
    def study(self) -> dict[str, Any]:
        """The contents of `study.json`."""
        return self._study.study

    @property
    def workload(self) -> str:
        """Name of the workload."""
        return self._study.workload

    @property
    def command(self) -> str | None:
        """What reproduces the study."""
        return self._study.command

    @property
    def facts(self) -> dict[str, Any]:
        """What was measured on the live model of the study."""
        return self._study.facts

    @cached_property
    def config(self) -> dict[str, Any]:
        """This trial's `TrainConfig` as plain values."""
        return dict(read_json(self.folder / "config.json")["config"])

    @cached_property
    def trials(self) -> pd.DataFrame:
        """This trial's row, as a frame of one row."""
        return self._study.trials

    @cached_property
    def state(self) -> str:
        """One of complete, diverged, failed, stopped, running."""
        return str(self.trials["state"].iloc[0])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a step; columns that only other trials of the study have are left out."""
        rows = self._study.steps
        return rows.drop(columns=[c for c in rows.columns if c not in STEP_COLUMNS and rows[c].isna().all()])

    @cached_property
    def evals(self) -> pd.DataFrame:
        """One row an evaluated metric."""
        return self._study.evals

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """One row a tracked example and evaluation."""
        return self._study.predictions

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the checkpoints on disk, by step."""
        return sorted(p for p in (self.folder / "checkpoints").glob("step-*") if p.is_dir())

    def best(self) -> Best:
        """Return the best evaluation by `select` (P4.5); NaN never wins, ties go to the earliest step."""
        select, mode = self.config["select"], self.config["select_mode"]
        split, metric = select.split("/", 1)
        evals = periodic_rows(self.evals)
        rows = evals[(evals["split"] == split) & (evals["metric"] == metric)]
        best = select_best(rows["step"].tolist(), rows["value"].tolist(), mode=mode)
        if best is None:
            there = sorted({f"{s}/{m}" for s, m in zip(self.evals["split"], self.evals["metric"], strict=True)})
            evaluated = ", ".join(there) or "nothing"
            raise RecordError(f"trial {self.number} has no finite {select!r} yet; evaluated: {evaluated}.")
        checkpoint = self.folder / "checkpoints" / f"step-{best[0]:08d}"
        return Best(*best, checkpoint if checkpoint.exists() else None)

    def __repr__(self) -> str:
        """Return number, state and learning rate."""
        config = self.config
        return f"TrialRecord({self.number}, {self.state}, lr={config['peak_lr']:g}, steps={config['total_steps']})"


def ranked_trials(record: StudyRecord | TrialRecord) -> pd.DataFrame:
    """Return the table of trials, the best value first: of the config that its diagnosis ends with, then of the others; then short runs (of less than half
    of the config's updates and examples), those that diverged or are at or above `lr.unstable` with the config's warmup and clipping, and those without a value.
    """
    trials, own = record.trials, record.config
    if trials.empty:
        return trials
    unstable_lr, kept, _ = diagnosed(record.path)
    plain = trials["peak_lr"] >= unstable_lr
    for name in ("warmup_steps", "max_grad_norm"):
        plain &= trials[name].isna() if own.get(name) is None else trials[name] == own[name]
    size = trials["batch_size"].astype(float).div(own["batch_size"] or math.nan).fillna(1)  # a log may not say it
    short = trials["total_steps"] * size.clip(lower=1) < own["total_steps"] / 2
    place = short.astype(int).mask(plain | (trials["state"] == "diverged"), 2).mask(trials["trial"].isin(kept), -1).mask(trials["best_value"].isna(), 3)  # fmt: skip
    best = trials["best_value"] * (1.0 if own["select_mode"] == "min" else -1.0)
    order = pd.DataFrame({"place": place, "best": best, "trial": trials["trial"]}).sort_values(["place", "best", "trial"])  # fmt: skip
    return trials.loc[order.index].reset_index(drop=True)


def diagnosed(path: Path) -> tuple[float, list[int], list[int]]:
    """Return the lr from which on its diagnosis found training unstable, the trials of the config that it ends with, and the baseline's; infinite and none without one."""
    with suppress(RecordError, ValueError, KeyError, TypeError, AttributeError):
        found = read_json(path / "diagnosis.json")
        lr = next((f["value"] for f in found["findings"] if f["code"] == "lr.unstable"), None)
        advised = found.get("recommendation") or {}
        arms = [(advised.get(arm) or {}).get("trials", ()) for arm in ("recommended", "baseline")]
        return float(lr or math.inf), list(arms[not advised.get("adopted")]), list(arms[1])
    return math.inf, [], []


def periodic_rows(evals: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that training wrote itself: what live curves and retrospective selection are made of (P2.3, P4.5)."""
    return evals[evals["setting"] == "periodic"] if "setting" in evals else evals


def select_best(steps: list[int], values: list[float], *, mode: str) -> tuple[int, float] | None:
    """Return (step, value) of the best finite value, the earliest among equals; None if none is finite."""
    sign = 1.0 if mode == "min" else -1.0
    pairs = [(sign * v, s) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not pairs:
        return None
    value, step = min(pairs)
    return int(step), float(sign * value)


def open_record(path: str | Path) -> StudyRecord | TrialRecord:
    """Open any study folder, finished or running: a `TrialRecord` where one trial was trained alone; what is missing is a warning each.

    Raises:
        RecordError: there is no study in this folder, or one of a newer version of this package.
    """
    folder = Path(path)
    study = StudyRecord(folder)
    if not (folder / "study.json").exists():
        raise no_study(folder)
    for lacking in missing(folder):
        logging.getLogger(__name__).warning("%s", lacking)
    return study.trial(0) if study.study.get("kind") in ("trial", "watch") and len(study.trials) else study


def no_study(folder: Path) -> RecordError:
    """Say what is not there, and which studies lie where it was looked for."""
    around, inside = (sorted(p.parent.name for p in at.glob("*/study.json")) for at in (folder.parent, folder))
    said = f"{folder} holds no study (no study.json)." if folder.exists() else f"there is no folder {folder}."
    if inside:
        more = f" and {len(inside) - 5} more" * (len(inside) > 5)
        return RecordError(f"{said} The studies in it are {', '.join(inside[-5:])}{more}: open one of these.")
    if around:
        near = nearest(folder.name, around, listed="There are", most=10)
        return RecordError(f"{said}{near} workbench studies {folder.parent} lists them all.")
    return RecordError(f"{said} Give the folder of out=..., or list what there is with workbench studies.")


def _trial_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of the table of trials; where no process writes the study any more, what was running has stopped."""
    rows = []
    for folder in folders:
        stored = read_json(folder / "config.json")
        if str(stored.get("trial")) != folder.name or not isinstance(stored.get("config"), dict):
            raise RecordError(
                f"{folder / 'config.json'} is not the configuration of trial {folder.name}: the file was replaced."
            )
        row = {name: stored[name] for name in ("trial", "stage", "seed", "train_examples")}
        rows.append({**row, **trial_outcome(folder), **stored["config"]})
    running = [row for row in rows if row["state"] == "running"]
    if running and not is_locked(folders[0].parents[1]):
        for row in running:
            row["state"] = "stopped"
    return rows


def trial_outcome(folder: Path) -> dict[str, Any]:
    """Return what the events of one trial say of its state, best evaluation, length and gradients."""
    row: dict[str, Any] = {"state": "running", "best_step": None, "best_value": math.nan, "steps_run": 0}
    row |= {"seconds": math.nan, "gradients": None, "lanes": None}
    for event in read_events(folder):
        row |= {key: event[key] for key in _FROM_EVENTS if key in event}
    return row | {"best_value": number(row["best_value"])}


_LANES = ["trial", "stage", "lanes", "gradients", "lanes_per_call", "threads", "reason", "loop_ms", "step_ms", "faster"]


def _lanes_row(folder: Path) -> dict[str, Any]:
    stored = read_json(folder / "config.json")
    row: dict[str, Any] = {"trial": stored["trial"], "stage": stored["stage"], "loop_ms": math.nan, "step_ms": math.nan}
    for event in read_events(folder):
        if "gradients" in event and event.get("event") != "changed":
            row |= {"lanes_per_call": None, "threads": None, "loop_ms": math.nan, "step_ms": math.nan}
        row |= {key: event[key] for key in _LANES if key in event}
        lanes = event.get("measured_lanes", event.get("lanes"))
        measured = {way: ms / lanes for way, ms in (event.get("measured_ms") or {}).items()}
        if measured:
            others = [ms for way, ms in measured.items() if way != "loop"]
            row["loop_ms"] = measured["loop"]
            row["step_ms"] = measured["loop"] if event["gradients"] == "loop" else min(others)
        if event.get("event") == "changed":  # plain autograd took over
            row |= {"lanes_per_call": None, "threads": None, "step_ms": row["loop_ms"]}
    return row | {"faster": row["loop_ms"] / row["step_ms"]}


def trial_folders(path: Path) -> list[Path]:
    """Return the folders of a study's trials that were begun, in order of their numbers."""
    folders = [p for p in (path / "trials").glob("*") if p.name.isdigit() and (p / "config.json").exists()]
    return sorted(folders, key=lambda p: int(p.name))
