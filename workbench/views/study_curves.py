"""`StudyCurves`: what a page is told of one study: its trials, its curves and one line on how far it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.curves.smoothing import kept
from workbench.record.folder import last_change, read_json
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.roles import STAGES

METRICS = ("loss", "grad_norm", "lr", "seconds")
_COLUMNS = (*METRICS[:-1], "step_time_s")
SECONDS = METRICS.index("seconds")
CLOCK_COLUMNS = 100  # of training time, which hardly bends (rule of thumb)
COLUMNS = 1000  # a page is no wider: two points in each of them
MOST_ROWS = 1 << 20  # rule of thumb: 20 MB; what a longer study has beyond is thinned
THINNED = 4 * COLUMNS  # columns that are left of it
KEPT_COLUMNS, KEPT_POINTS = 400, 30_000  # that stay in a notebook, of a curve and of a metric (rule of thumb: 1 MB)

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Rows(NamedTuple):
    """Rows of some trials, trial after trial and in order of steps; values of `METRICS` have shape (4, rows); seconds are counted from the trial's first."""

    trial: Ints
    step: Ints
    values: Floats


class Curve(NamedTuple):
    """One metric of one trial."""

    trial: int
    step: Ints
    value: Floats


class CurvePoints:
    """Every curve of one study; what a long study has too much of is thinned as it comes."""

    def __init__(self) -> None:
        self._parts: list[Rows] = []
        self._thinned: list[list[Curve]] = [[] for _ in METRICS]
        self._held = 0
        self._clocks: dict[int, float] = {}

    def add(self, blocks: Sequence[Mapping[str, Any]]) -> Rows:
        """Keep blocks of rows of the table of steps, and return them as one."""
        rows = _joined(blocks)
        if not len(rows.trial):
            return rows
        for trial, where in _runs(rows.trial):
            seconds = rows.values[SECONDS, where]
            clock = self._clocks.get(trial, 0.0) + np.nancumsum(seconds, dtype=np.float64)
            rows.values[SECONDS, where] = np.where(
                np.isnan(seconds), np.nan, clock
            )  # a step whose time is missing has no place
            self._clocks[trial] = float(clock[-1])
        self._parts.append(rows)
        self._held += len(rows.trial)
        if self._held > MOST_ROWS:
            self._thinned = [self.curves(metric, THINNED) for metric in range(len(METRICS))]
            self._parts, self._held = [], 0
        return rows

    def rewind(self, trial: int, step: int) -> None:
        """Drop the trial's rows of `step` and later."""
        earlier = [(p, (p.trial != trial) | (p.step < step)) for p in self._parts]
        parts = [Rows(p.trial[kept], p.step[kept], p.values[:, kept]) for p, kept in earlier]
        self._parts = [part for part in parts if len(part.trial)]
        self._held = sum(len(part.trial) for part in self._parts)
        self._thinned = [
            [c if c.trial != trial else Curve(trial, c.step[c.step < step], c.value[c.step < step]) for c in curves]
            for curves in self._thinned
        ]
        self._clocks[trial] = next(
            (float(np.fmax.reduce(c.value, initial=0.0)) for c in self.curves(SECONDS) if c.trial == trial), 0.0
        )

    def curves(self, metric: int, columns: int = COLUMNS) -> list[Curve]:
        """Return the curve of every trial that has one, at most `columns` times two points and its ends."""
        pieces: dict[int, list[tuple[Ints, Floats]]] = {}
        for curve in self._thinned[metric]:
            pieces.setdefault(curve.trial, []).append((curve.step, curve.value))
        if len(self._parts) > 1:  # what was joined once need not be again
            self._parts = [_sorted(*(np.concatenate(each, axis=-1) for each in zip(*self._parts, strict=True)))]
        for part in self._parts:
            for trial, run in _runs(part.trial):
                pieces.setdefault(trial, []).append((part.step[run], part.values[metric, run]))
        found = []
        for trial, pairs in sorted(pieces.items()):
            steps, values = (np.concatenate(each) for each in zip(*pairs, strict=True))
            where = kept(steps, values, columns)
            found.append(Curve(trial, steps[where], values[where]))
        return found


def packed(rows: Rows) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Return how rows lie in buffers, and the buffers: int32 steps, then float32 values of one metric after the other."""
    if not len(rows.trial):
        return [], []
    counts = [[trial, where.stop - where.start] for trial, where in _runs(rows.trial)]
    buffers = [rows.step.data, *(np.ascontiguousarray(values).data for values in rows.values)]
    return [{"metrics": list(METRICS), "rows": counts}], buffers


def _joined(blocks: Sequence[Mapping[str, Any]]) -> Rows:
    def column(name: str, dtype: Any) -> NDArray[Any]:
        parts = [np.asarray(block.get(name, np.full(len(block["trial"]), np.nan))) for block in blocks]
        return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)

    with np.errstate(over="ignore"):  # beyond float32 is infinite, for a picture
        values = np.stack([column(name, np.float32) for name in _COLUMNS])
    return _sorted(column("trial", np.int32), column("step", np.int32), values)


def _sorted(trial: Ints, step: Ints, values: Floats) -> Rows:
    """Put the rows of a trial together; their order stays."""
    if (np.diff(trial) >= 0).all():
        return Rows(trial, step, values)
    order = np.argsort(trial, kind="stable")
    return Rows(trial[order], step[order], values[:, order])


def _runs(trials: Ints) -> Iterator[tuple[int, slice]]:
    begins = np.flatnonzero(np.diff(trials, prepend=-1)).tolist()
    for begin, end in zip(begins, [*begins[1:], len(trials)], strict=True):
        yield int(trials[begin]), slice(begin, end)


Message = tuple[dict[str, Any], list[Any]]
"""JSON values and the binary buffers that belong to them."""

RATE_SECONDS = 5.0  # rule of thumb: the rate is that of the last seconds
_OWN = ("peak_lr", "total_steps", "eval_every_steps", "checkpoint_every_steps")  # told by other means


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
        self.plan: tuple[str, int] = "", 0
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
        known, stage = self._trials.get(number, {}), STAGES.get(stage, stage)
        differs = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in config.items()
            if name not in _OWN and name in self._config and value != self._config[name] and value is not None
        ]
        self._trials[number] = {
            "trial": number, "stage": stage, "lr": config["peak_lr"], "steps": config["total_steps"],
            "clip": config.get("max_grad_norm"), "examples": config.get("batch_size"), "note": ", ".join(differs), "state": known.get("state", state),
        }  # fmt: skip
        self._changed.add(number)
        self._stage = stage

    def state(self, number: int, state: str) -> None:
        """Note how a trial stands."""
        if number in self._trials:
            self._trials[number]["state"] = state
            self._stage = self._trials[number]["stage"]
            self._changed.add(number)

    def close(self) -> None:
        """Note that the study is written no more: what has not ended has stopped."""
        for number, trial in self._trials.items():
            if trial["state"] in ("waiting", "running"):
                trial["state"] = "stopped"
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

    def everything(self, columns: int = COLUMNS) -> Message:
        """Return all of the study, each curve thinned to what a page of so many columns can show."""
        self._take()
        self._changed.clear()
        self.whole = False
        parts, buffers = [], []
        for index, metric in enumerate(METRICS):
            curves = self._points.curves(index, min(columns, CLOCK_COLUMNS) if index == SECONDS else columns)
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

    def stays(self) -> Message:
        """Return all of the study as small as a notebook should be."""
        return self.everything(max(20, min(KEPT_COLUMNS, KEPT_POINTS // max(1, 2 * len(self._trials)))))

    def _take(self) -> Any:
        blocks, self._blocks = self._blocks, []
        return self._points.add(blocks)

    def _status(self) -> dict[str, Any]:
        states = [trial["state"] for trial in self._trials.values()]
        (first, before), (last, after) = (self._times[0], self._times[-1]) if self._times else ((0.0, 0), (0.0, 0))
        rate = (after - before) / (last - first) if last > first else None
        return {
            "stage": self._stage, "plan": self.plan[0] or self._stage, "planned": self.plan[1], "steps": self._steps, "rate": rate, "states": {s: states.count(s) for s in set(states)},
        }  # fmt: skip

    def _load(self, record: StudyRecord | TrialRecord) -> None:
        for row in record.trials.to_dict("records"):
            known = {k: row[k] for k in self._config if k in row}
            config = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in known.items()}
            self.trial(int(row["trial"]), str(row["stage"]), config, row["state"])
        steps = record.steps.reindex(columns=["trial", "step", *_COLUMNS])
        if len(steps):
            self.rows({name: steps[name].to_numpy() for name in ("trial", "step", *_COLUMNS)})
        if told := record.study.get("progress"):
            self.plan = told["stage"], told["planned"]
            self._times.extend([(told["since"], told["rows"]), (last_change(self.path, "part-*"), self._steps)])
