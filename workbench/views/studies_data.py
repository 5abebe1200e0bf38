"""What the study browser shows, read from the folders: rows of studies, one opened, some compared. Nothing is held or changed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.config import shown_name
from workbench.errors import UsageError, WorkbenchError
from workbench.ledger.table import SEEDS, of_config, read_folders, same, study_row, verdict_text
from workbench.playbook import diagnosis_of
from workbench.plots.loss import plot_trial_curves
from workbench.plots.render import Picture
from workbench.record.json_values import to_json
from workbench.record.read import StudyRecord, ranked_trials
from workbench.record.roles import STAGES
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep
from workbench.views.summary import study_picture, study_sentence

STUDY_COLUMNS = [
    "study", "note", "mean_value", "select", "best_lr", "verdict", "lr_best", "lr_unstable", "state", "trials", "workload", "diverged", "failed",
]  # fmt: skip
"""What a row of the table of studies shows; `created`, `seeds`, `path`, `kind` and `reproduce` go with it unseen."""
MOST_COMPARED = 6
"""Studies or trials that are compared at once: more curves cannot be told apart (rule of thumb)."""
CURVES = 4
"""Trials whose curves are drawn of a large study: more cannot be told apart at a glance (rule of thumb)."""
JUDGED = 64
"""Trials up to which a study is diagnosed for its picture: more would take longer than a person likes to wait (rule of thumb)."""
_RUN = ("trial", "stage", "state", "best_value", "best_step", "steps_run", "seconds")
_SWEEPS = ("lr_sweep", "instability", "diagnosis")


def study_table(root: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return the table of studies, the newest first, and why some could not be read."""
    rows, problems = read_folders(root) if root.is_dir() else ([], [])
    table = pd.DataFrame(rows, columns=[*STUDY_COLUMNS, "created", "seeds", "kind", "reproduce", "path"])
    return table.sort_values("created", ascending=False, kind="stable", ignore_index=True), problems


def nothing(folder: Path) -> str:
    """Say that there is no study, and what makes one."""
    where = f"No studies in {folder}" if folder.is_dir() else f"There is no folder {folder} here"
    return f"{where}: workbench diagnose digits_mlp makes one, as does any study of a notebook. Give another folder, or run one."


def open_study(path: str | Path) -> tuple[dict[str, Any], StudyRecord]:
    """Return one study as JSON values for the browser, and its record, from which pictures are drawn.

    The values are its `row` in the table of studies; `columns` of its trials (number, state, results and the config fields that
    differ); `trials`, the best first; `select`, the metric that selects and what is better; and a sentence `said` on what it found.

    Raises:
        RecordError: there is none, it is damaged or of a newer version.
    """
    record = StudyRecord(Path(path))
    row = study_row(record.path) | {"path": str(path)}
    trials = ranked_trials(record)
    fields = [name for name in varied(trials) if name != "seed"]
    columns = [name for name in ("trial", "stage", "state", *fields, "seed", *_RUN[3:]) if name in trials]
    opened: dict[str, Any] = to_json(
        {
            "row": row,
            "columns": columns,
            "trials": trials[columns].replace({"stage": STAGES}).to_dict("records") if len(trials) else [],
            "select": f"{record.config['select']} ({record.config['select_mode']})",
            "said": study_sentence(record),
        }
    )
    return opened, record


def varied(trials: pd.DataFrame) -> list[str]:
    """Return the config fields in which trials differ, in the order of the config."""
    known = {*_RUN, "seed", "train_examples", "gradients", "lanes", "shared_seed", "per_host_seed"}
    return [str(name) for name in trials.columns if name not in known and len(set(trials[name].astype(str))) > 1]


def draw_study(record: StudyRecord) -> Picture | None:
    """Return the study's picture; None where no trial has a step on disk yet.

    A study of up to `JUDGED` trials, and one whose diagnosis is kept, has the picture of its kind, as `show_study` draws it. Any other
    has the sweep, where it is one, and the loss curves of its best trials.
    """
    trials = ranked_trials(record)
    if not len(trials) or record.steps.empty:
        return None
    not_of_its_making = (WorkbenchError, LookupError, TypeError, ValueError, AttributeError)
    with contextlib.suppress(*not_of_its_making):
        if (record.path / "diagnosis.json").exists() or len(trials) <= JUDGED:
            return study_picture(record, diagnosis_of(record))
    if record.study.get("kind") in _SWEEPS and len(set(trials["peak_lr"])) > 1:
        return Picture([lambda ax: plot_lr_sweep(record, ax=ax), partial(_curves, record, trials)], "")
    return draw_curves(record)


def draw_curves(record: StudyRecord) -> Picture:
    """Return the loss curves of the study's best trials: of a large study the picture that is there at once."""
    return Picture([partial(_curves, record, ranked_trials(record))], "")


def _curves(record: StudyRecord, trials: pd.DataFrame, ax: Any) -> Any:
    return plot_loss_curves(record, trials=[int(t) for t in trials["trial"].head(CURVES)], ax=ax)


NOISE = 2.0
"""Standard errors that a difference of means has to exceed (about 5 % by chance; rule of thumb)."""
_UNSHOWN = ("select", "select_mode")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of those that are compared: a trial, or its study's best one.

    Attributes:
        value: its best value; NaN without one.
        seeds: best values of its config under each seed, as `of_config` takes them.
    """

    name: str
    record: StudyRecord
    trial: int
    config: dict[str, Any]
    value: float
    seeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.seeds)) if self.seeds else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; NaN with fewer than two."""
        return float(np.std(self.seeds, ddof=1)) if len(self.seeds) > 1 else math.nan


def side(path: str | Path, trial: int | None = None) -> Side:
    """Read one side: a trial, or the study's best one."""
    record = StudyRecord(Path(path))
    trials = ranked_trials(record)
    if not len(trials):
        raise UsageError(f"study {record.name!r} has no trial yet, so there is nothing to compare.")
    number = int(trials["trial"].iloc[0]) if trial is None else record.trial(trial).number
    config = record.trial(number).config
    row = trials[trials["trial"] == number].iloc[0]
    return Side(
        name=record.name if trial is None else f"{record.name}, trial {number}",
        record=record,
        trial=number,
        config=config,
        value=float(row["best_value"]),
        seeds=tuple(of_config(record, trials, number)),
    )


def compare(sides: Sequence[Side]) -> dict[str, Any]:
    """Return `names`, `rows` of a name and a value for each side, and a sentence `said`, as JSON values.

    The rows are the config fields that differ, what was asked of the study where that differs, and the best values with the mean
    and standard deviation over seeds.

    Raises:
        UsageError: there are fewer than two, or more than `MOST_COMPARED`.
    """
    if not 2 <= len(sides) <= MOST_COMPARED:
        raise UsageError(f"{len(sides)} given: compare 2 to {MOST_COMPARED} studies or trials.")
    rows: list[list[Any]] = []
    studies = [each.record.study for each in sides]
    if len({each.record.path for each in sides}) > 1:
        settings = [study.get("settings") or {} for study in studies]
        for key in ("workload", "kind", "commit"):
            rows += _differing(key, [study.get(key) for study in studies])
        rows += _differing("budget", [study.get("facts", {}).get("budget_given") for study in studies])
        found = [study_row(each.record.path) for each in sides]
        rows += _differing("trials", [row["trials"] for row in found])
        rows += [["verdict", *verdicts]] if any(verdicts := [verdict_text(row) for row in found]) else []
        for key in settings[0] if len({study.get("kind") for study in studies}) == 1 else ():
            rows += _differing(f"study: {key}", [each.get(key) for each in settings])
    names = dict.fromkeys(name for each in sides for name in each.config if name not in _UNSHOWN)
    for name in names:
        rows += _differing(name, [each.config.get(name) for each in sides])
    told: dict[str, Callable[[Side], Any]] = {
        "selected by": _select,
        "value": lambda each: each.mean,
        "seeds": lambda each: len(each.seeds) or None,
        "standard deviation over seeds": lambda each: each.deviation,
        "trial": lambda each: each.trial,
        "value of that trial": lambda each: each.value,
    }
    if all(len(each.seeds) < 2 for each in sides):
        told.pop("value of that trial")
    rows += [row for what, of in told.items() if any(pd.notna((row := [what, *map(of, sides)])[1:]))]
    plain: dict[str, Any] = to_json({"names": [each.name for each in sides], "rows": rows, "said": _best_two(sides)})
    return plain


def draw_comparison(sides: Sequence[Side]) -> Picture:
    """Return the training-loss curves of all in one picture."""
    curves = [(s.record, s.trial, s.name) for s in sides]
    return Picture([lambda ax: plot_trial_curves(curves, ax=ax)], "", size=(8.4, 3.8))


def _select(found: Side) -> str | None:
    if not math.isfinite(found.value):
        return None
    return f"{found.config['select']} ({found.config['select_mode']})"


def _differing(name: str, values: Sequence[Any]) -> list[list[Any]]:
    if name in ("optimizer", "schedule"):
        values = [value and shown_name(value) for value in values]
    return [] if all(same(values[0], other) for other in values[1:]) else [[name, *map(_shown, values)]]


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(to_json(value))


def _best_two(sides: Sequence[Side]) -> str:
    """Which is best, held against the second best; or why they cannot be compared."""
    workloads = dict.fromkeys(s.record.workload for s in sides)
    if len(workloads) > 1:
        return f"The workloads differ ({', '.join(workloads)}): compare the configs, not the values."
    if len({_program(s.record.study) for s in sides}) > 1:
        return "Different programs: not comparable; their values come of other models or data."
    valued = [s for s in sides if math.isfinite(s.value)]
    if len(valued) < 2:
        without = " and ".join(s.name for s in sides if s not in valued)
        return f"No value to compare in {without}, where no metric was evaluated; the configs can be compared."
    first = valued[0]
    if stranger := next((s for s in valued if _select(s) != _select(first)), None):
        return f"Not comparable: one is selected by {_select(first)}, the other by {_select(stranger)}."
    ranked = sorted(valued, key=lambda s: s.mean if first.config["select_mode"] == "min" else -s.mean)
    top, others = ([s for s in ranked if _alike(s, ranked[0]) is alike] for alike in (True, False))
    said = [f"{len(top)} of {len(ranked)}: " * bool(others) + _answer_text(top[0], top[-1])] if top[1:] else []
    return " ".join([*said, *(_answer_text(top[0], other) for other in others[:1])])


def _program(study: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return which program was trained, the same for other arguments and edited code; () for a workload."""
    settings = study.get("settings") or {}
    words = settings.get("function") or " ".join(str(settings.get("command", "")).split()[:2])
    return (words, settings.get("folder")) if study.get("kind") == "program" else ()


def _alike(one: Side, other: Side) -> bool:
    """Tell whether two sides have the same config, but for the seeds."""
    return all(same(one.config.get(n), other.config.get(n)) for n in one.config if n not in SEEDS)


def _answer_text(left: Side, right: Side) -> str:
    """Which is better, and whether the seeds can tell."""
    if _alike(left, right):
        one_study = left.record.path == right.record.path
        gap = abs(left.value - right.value if one_study else left.mean - right.mean)
        if all(same(left.config.get(n), right.config.get(n)) for n in SEEDS) and len(left.seeds) == len(right.seeds):
            which = "seed" if one_study or len(left.seeds) == 1 else "seeds"
            return f"The same config with the same {which}: values {f'differ by {gap:.3g}' if gap else 'are equal'}."
        return f"They differ in nothing but the seed: the difference of {gap:.3g} is noise."
    sign = 1.0 if left.config["select_mode"] == "min" else -1.0
    better, worse = (left, right) if sign * (left.mean - right.mean) <= 0 else (right, left)
    gap, seeds = abs(left.mean - right.mean), [len(better.seeds), len(worse.seeds)]
    over = "" if seeds == [1, 1] else f", means over {' and '.join(map(str, dict.fromkeys(seeds)))} seeds"
    said = f"{better.name} is better by {gap:.3g} ({better.mean:.4g} against {worse.mean:.4g}{over})"
    lengths = [each.config.get("total_steps") for each in (better, worse)]
    if not same(*lengths):
        said += f" in runs of {lengths[0]:,} against {lengths[1]:,} steps, which alone may make the difference"
    if min(seeds) == 1:
        return f"{said}; {'each' if max(seeds) == 1 else 'one side'} has one seed, so the difference may be noise."
    error = math.hypot(*(s.deviation / math.sqrt(len(s.seeds)) for s in (better, worse)))
    held = f"{NOISE:g} standard errors ({error:.2g} each)"
    return (
        f"{said}: more than {held}."
        if gap > NOISE * error
        else f"{said}: within {held}, so the difference may be noise."
    )
