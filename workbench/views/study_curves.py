"""`StudyCurves`: what a page is told of one study: its trials, its curves and one line on how far it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.record.read import StudyRecord, TrialRecord, read_json
from workbench.views.curve_points import METRICS, CurvePoints, packed

__all__ = ["Message", "StudyCurves"]

Message = tuple[dict[str, Any], list[Any]]
"""JSON values and the binary buffers that belong to them."""

RATE_SECONDS = 5.0  # rule of thumb: the rate is that of the last seconds
_OWN = (
    "peak_lr",
    "total_steps",
    "eval_every_steps",
    "checkpoint_every_steps",
)  # told by other means, or of no interest


class StudyCurves:
    """One study, as far as it has been told.

    Args:
        path: its folder.
        loaded: whether to begin with what the folder holds already.
    """

    def __init__(self, path: Path, *, loaded: bool = False) -> None:
        study = read_json(path / "study.json")
        self.path, self._points = path, CurvePoints()
        self._name, self._workload, self._config = str(study["name"]), str(study["workload"]), dict(study["config"])
        self._trials: dict[int, dict[str, Any]] = {}
        self._changed: set[int] = set()
        self._blocks: list[Mapping[str, Any]] = []
        self._steps, self._stage = 0, ""
        self._times: deque[tuple[float, int]] = deque()
        self.whole = True
        """Whether the page must forget what it has: it gets all of it again."""
        if loaded:
            self._load(StudyRecord(path))

    @classmethod
    def of(cls, record: StudyRecord | TrialRecord) -> StudyCurves:
        """Return the curves of a record as it is on disk."""
        made = cls(record.path)
        made._load(record)
        return made

    def trial(self, number: int, stage: str, config: Mapping[str, Any], state: str = "waiting") -> None:
        """Note a trial; one that is known keeps its state."""
        known = self._trials.get(number, {})
        differs = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in config.items()
            if name not in _OWN and name in self._config and value != self._config[name] and value is not None
        ]
        self._trials[number] = {
            "trial": number, "stage": stage, "lr": config["peak_lr"], "steps": config["total_steps"],
            "clip": config.get("max_grad_norm"), "note": ", ".join(differs), "state": known.get("state", state),
        }  # fmt: skip
        self._changed.add(number)
        self._stage = stage

    def state(self, number: int, state: str) -> None:
        """Note how a trial stands."""
        if number in self._trials:
            self._trials[number]["state"] = state
            self._stage = self._trials[number]["stage"]
            self._changed.add(number)

    def rows(self, columns: Mapping[str, Any]) -> None:
        """Note rows of the table of steps."""
        self._blocks.append(columns)
        self._steps += len(columns["trial"])

    def rewind(self, number: int, step: int) -> None:
        """Forget rows that come again."""
        self._take()
        self._points.rewind(number, step)
        self.whole = True

    def message(self, now: float) -> Message:
        """Return what is new since the last message; everything where the page has to begin anew."""
        self._times.append((now, self._steps))
        while len(self._times) > 2 and now - self._times[0][0] > RATE_SECONDS:
            self._times.popleft()
        if self.whole:
            return self.everything()
        parts, buffers = packed(self._take())
        trials = [self._trials[number] for number in sorted(self._changed)]
        self._changed.clear()
        return {"kind": "delta", "trials": trials, "status": self._status(), "parts": parts}, buffers

    def everything(self) -> Message:
        """Return all of the study, each curve thinned to what a page can show."""
        self._take()
        self._changed.clear()
        self.whole = False
        parts, buffers = [], []
        for index, metric in enumerate(METRICS):
            curves = self._points.curves(index)
            if curves:
                parts.append({"metrics": [metric], "rows": [[curve.trial, len(curve.step)] for curve in curves]})
                buffers += [
                    np.concatenate([c.step for c in curves]).data,
                    np.concatenate([c.value for c in curves]).data,
                ]
        content = {
            "kind": "all", "name": self._name, "workload": self._workload, "status": self._status(), "parts": parts,
            "trials": list(self._trials.values()),
        }  # fmt: skip
        return content, buffers

    def _take(self) -> Any:
        blocks, self._blocks = self._blocks, []
        return self._points.add(blocks)

    def _status(self) -> dict[str, Any]:
        states = [trial["state"] for trial in self._trials.values()]
        (first, before), (last, after) = (self._times[0], self._times[-1]) if self._times else ((0.0, 0), (0.0, 0))
        rate = (after - before) / (last - first) if last > first else None
        return {
            "stage": self._stage, "steps": self._steps, "rate": rate, "states": {s: states.count(s) for s in set(states)},
        }  # fmt: skip

    def _load(self, record: StudyRecord | TrialRecord) -> None:
        for row in record.trials.to_dict("records"):
            config = {
                name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()
            }
            self.trial(
                int(row["trial"]), str(row["stage"]), {k: config[k] for k in self._config if k in config}, row["state"]
            )
        steps = record.steps.reindex(columns=["trial", "step", *METRICS])
        if len(steps):
            self.rows({name: steps[name].to_numpy() for name in ("trial", "step", *METRICS)})
