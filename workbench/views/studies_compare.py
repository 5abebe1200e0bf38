"""Two studies, or two trials, side by side: what differs in their configs, their best values with the noise of seeds, both curves."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import UsageError
from workbench.plots.render import png
from workbench.plots.trial_curves import plot_trial_curves
from workbench.record.json_values import to_json
from workbench.record.read import StudyRecord
from workbench.views.studies_data import best_trials

__all__ = ["NOISE", "Side", "compare", "draw_comparison", "side"]

NOISE = 2.0
"""Standard errors that a difference of means has to exceed (about 5 % by chance; rule of thumb)."""
_SEEDS = ("shared_seed", "per_host_seed")
_UNSHOWN = ("select", "select_mode")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two that are compared.

    Attributes:
        name: to call it by.
        record: its study.
        trial: number of the trial that is compared: its own, or its study's best one.
        config: of that trial.
        value: its best value; NaN without one.
        seeds: best values of the trials of the study with the same config but for the seeds, its own included.
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
    """Read one side.

    Args:
        path: the study's folder.
        trial: number of a trial; None takes the study's best one.

    Raises:
        RecordError: there is no such study or trial, or it is damaged.
        UsageError: the study has no trial.
    """
    record = StudyRecord(Path(path))
    trials = best_trials(record)
    if not len(trials):
        raise UsageError(f"study {record.name!r} has no trial yet, so there is nothing to compare.")
    number = int(trials["trial"].iloc[0]) if trial is None else record.trial(trial).number
    config = record.trial(number).config
    row = trials[trials["trial"] == number].iloc[0]
    alike = trials
    for name, value in config.items():
        if name not in _SEEDS and name in alike:
            alike = alike[[_same(value, other) for other in alike[name]]]
    values = alike["best_value"].astype(float)
    return Side(
        name=record.name if trial is None else f"{record.name}, trial {number}",
        record=record,
        trial=number,
        config=config,
        value=float(row["best_value"]),
        seeds=tuple(values[np.isfinite(values)]),
    )


def compare(left: Side, right: Side) -> dict[str, Any]:
    """Return `names`, `rows` of (what, left, right) and a sentence `said`, as JSON values.

    The rows are the config fields that differ, what was asked of the study where that differs, and the best values with the mean
    and standard deviation over seeds.
    """
    one, other = left.record, right.record
    rows: list[tuple[str, Any, Any]] = []
    if one.path != other.path:
        for key in ("workload", "kind", "commit"):
            rows += _differing(key, one.study.get(key), other.study.get(key))
        theirs = other.study.get("settings") or {}
        for key, value in (one.study.get("settings") or {}).items():
            rows += _differing(f"study: {key}", value, theirs.get(key))
    names = [name for name in dict.fromkeys([*left.config, *right.config]) if name not in _UNSHOWN]
    for name in names:
        rows += _differing(name, left.config.get(name), right.config.get(name))
    rows += [
        ("trial", left.trial, right.trial),
        ("selected by", _select(left), _select(right)),
        ("best value", left.value, right.value),
        ("seeds of this config", len(left.seeds), len(right.seeds)),
        ("mean over seeds", left.mean, right.mean),
        ("standard deviation over seeds", left.deviation, right.deviation),
    ]
    shown = {"names": [left.name, right.name], "rows": [list(row) for row in rows], "said": _said(left, right)}
    plain: dict[str, Any] = to_json(shown)
    return plain


def draw_comparison(left: Side, right: Side) -> bytes:
    """Return both training-loss curves in one picture, as PNG."""
    curves = [(s.record, s.trial, s.name) for s in (left, right)]
    return png([partial(_draw, curves)], size=(8.4, 3.8))


def _draw(curves: Any, ax: Any) -> Any:
    return plot_trial_curves(curves, ax=ax)


def _select(found: Side) -> str:
    return f"{found.config['select']} ({found.config['select_mode']})"


def _differing(name: str, one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    return [] if _same(one, other) else [(name, _shown(one), _shown(other))]


def _same(one: Any, other: Any) -> bool:
    if pd.api.types.is_scalar(one) and pd.api.types.is_scalar(other):
        return bool(one == other or (pd.isna(one) and pd.isna(other)))
    return json.dumps(to_json(one), sort_keys=True) == json.dumps(to_json(other), sort_keys=True)


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(to_json(value))


def _said(left: Side, right: Side) -> str:
    """Which is better, and whether the seeds can tell."""
    if _select(left) != _select(right):
        return f"Not comparable: one is selected by {_select(left)}, the other by {_select(right)}."
    if left.record.workload != right.record.workload:
        return "The workloads differ, so their values cannot be compared; the configs can."
    if not (math.isfinite(left.value) and math.isfinite(right.value)):
        without = left if not math.isfinite(left.value) else right
        return f"{without.name} has no best value yet."
    same_config = all(_same(left.config.get(n), right.config.get(n)) for n in left.config if n not in _SEEDS)
    gap = abs(left.value - right.value)
    sign = 1.0 if left.config["select_mode"] == "min" else -1.0
    if same_config:
        return f"They differ in nothing but the seed: the difference of {gap:.3g} is noise."
    better, worse = (left, right) if sign * (left.value - right.value) <= 0 else (right, left)
    said = f"{better.name} is better by {gap:.3g} ({better.value:.4g} against {worse.value:.4g})"
    if min(len(left.seeds), len(right.seeds)) < 2:
        return f"{said}; with a single seed on a side, chance cannot be told from a difference."
    between = sign * (worse.mean - better.mean)
    error = math.hypot(*(s.deviation / math.sqrt(len(s.seeds)) for s in (left, right)))
    if between > NOISE * error:
        return f"{said}; over the seeds by {between:.3g}, more than {NOISE:g} standard errors ({error:.2g} each)."
    return f"{said}; over the seeds by {between:.3g}, within {NOISE:g} standard errors ({error:.2g} each): that may be chance."
