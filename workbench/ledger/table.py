"""The table of studies, one row a study, read from the study folders (P5)."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import RecordError, UsageError, nearest
from workbench.record.folder import check_path, is_locked
from workbench.record.json_values import to_json
from workbench.record.missing import not_ended
from workbench.record.read import StudyRecord, diagnosed, ranked_trials

COLUMNS = ["study", "config", "note", "trials", "best_value", "reproduce"]
"""The six columns of the playbook's table of studies (P5.1 to P5.7)."""

SEEDS = ("shared_seed", "per_host_seed")

EXTRA = {
    "workload": "name of the workload",
    "kind": "what was studied",
    "state": "finished, running (a process writes it now) or unfinished",
    "created": "when it was begun, UTC",
    "failed": "trials that ended in an error",
    "diverged": "trials whose loss became non-finite or far too high",
    "unfinished": "trials that are running or were stopped",
    "left": "the same in words, with what resumes them",
    "best_trial": "number of the trial with the best value, of the config that the diagnosis ends with where there is one",
    "best_step": "step of its selected checkpoint",
    "best_lr": "its learning rate",
    "seeds": "trials with a value of that config, alike but for their seeds: of a config that was proven, those of the proof",
    "mean_value": "mean of their best values: the value of the study",
    "select": "metric that selects, and what is better",
    "config_sha256": "hash of the config when the study was begun",
    "commit": "git commit of the code",
    "tags": "words of the note that begin with #",
    "verdict": "badge of its diagnosis, where there is one",
    "alarms": "codes of its diagnosis that fail or warn, but for those that follow from others",
    "lr_best": "lr.best of its diagnosis, or of a sweep; the config that it ends with may have another that is as good, or better by the metric",
    "lr_unstable": "lr.unstable of its diagnosis, or of a sweep: where training becomes unstable",
}
"""Further columns -> what they hold; they are there on request."""


def read_folders(root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for every study under `root`, with its `path`, and why the others could not be read."""
    rows, problems = [], []
    for folder in study_folders(root):
        try:
            check_path(folder)
            row = study_row(folder) | {"path": str(folder)}
            rows.append({key: _printable(value) for key, value in row.items()})
        except RecordError as error:
            problems.append(str(error))
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            problems.append(f"{folder} holds no study that can be read ({type(error).__name__}: {error}).")
    return rows, problems


def _printable(value: Any) -> Any:
    """Return a text with what is no UTF-8 spelled out: one such name must not cost the whole table."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def check_extra(extra: Sequence[str]) -> None:
    """Check that every further column is one that there is."""
    for name in extra:
        if name not in EXTRA:
            raise UsageError(f"the table of studies has no further column {name!r}.{nearest(name, list(EXTRA))}")


def study_folders(root: Path) -> list[Path]:
    """Return the folders of all studies under `root`."""
    if not root.is_dir():
        raise RecordError(
            f"{root} is not a folder of studies. Run a diagnosis first, or give the folder: workbench studies DIR."
        )
    return sorted(path.parent for path in root.glob("*/study.json"))


def study_row(folder: Path) -> dict[str, Any]:
    """Return the six columns and all further ones of one study."""
    record = StudyRecord(folder)
    study, config, trials = record.study, record.config, ranked_trials(record)
    scored = trials[np.isfinite(trials["best_value"])].to_dict("records") if len(trials) else []
    best = scored[0] if scored else {}
    seeds = of_config(record, trials, best["trial"]) if best else pd.Series(dtype=float)
    states = [str(state) for state in trials.get("state", ())]
    return {
        "study": study["name"],
        "config": _config_link(folder, study),
        "note": study["note"],
        "trials": len(trials),
        "best_value": best.get("best_value", math.nan),
        "reproduce": _reproduce(folder, study),
        "workload": study["workload"],
        "kind": study.get("kind"),
        "state": _state(folder, study, states),
        "created": study.get("created"),
        "failed": states.count("failed"),
        "diverged": states.count("diverged"),
        "unfinished": sum(state in ("running", "stopped") for state in states),
        "left": not_ended(record)
        or {"finished": "", "failed": "ended in an error"}.get(state := _state(folder, study, states), state),
        "best_trial": best.get("trial"),
        "best_step": best.get("best_step"),
        "best_lr": best.get("peak_lr"),
        "seeds": len(seeds),
        "mean_value": float(seeds.mean()),
        "select": f"{config['select']} ({config['select_mode']})",
        "config_sha256": study.get("config_sha256"),
        "commit": study.get("commit"),
        "tags": " ".join(word for word in str(study["note"]).split() if word.startswith("#")),
        **_diagnosed(folder, study),
    }


def verdict_text(row: Mapping[Any, Any]) -> str:
    """Return the badge of a study's diagnosis and the first alarm, "fail loop.scheduler_unit"; "" where there is none."""
    first = str(row["alarms"]).partition(" ")[0]
    return f"{row['verdict']} {first}".rstrip() if isinstance(row["verdict"], str) else ""


def of_config(record: StudyRecord, trials: pd.DataFrame, number: int) -> pd.Series[float]:
    """Return the finite best values of a trial's config, a seed each: those that the study's verdict rests on, else of all with this config but for the seeds."""
    kept, config = diagnosed(record.path)[1], record.trial(number).config
    trials = trials[np.isfinite(trials["best_value"].astype(float))]
    if number in kept:
        return trials["best_value"][trials["trial"].isin(kept)].astype(float)
    for name in trials.columns.intersection([*config]).difference([*SEEDS]):
        trials = trials.loc[[same(config[name], other) for other in trials[name]]]
    return trials["best_value"].astype(float)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values of a config, or of a study's settings, are the same; missing ones are."""
    if pd.api.types.is_scalar(one) and pd.api.types.is_scalar(other):
        return bool(one == other or (pd.isna(one) and pd.isna(other)))
    return json.dumps(to_json(one), sort_keys=True) == json.dumps(to_json(other), sort_keys=True)


def _state(folder: Path, study: dict[str, Any], trials: Sequence[str]) -> str:
    if trials and set(trials) == {"failed"}:
        return "failed"
    if "finished" in study:
        return "finished"
    return "running" if is_locked(folder) else "unfinished"


def _diagnosed(folder: Path, study: dict[str, Any]) -> dict[str, Any]:
    """Return what the study's diagnosis measured, or what a sweep did; None where there is neither."""
    swept = study.get("facts", {}).get("swept") or {}
    try:
        found = json.loads((folder / "diagnosis.json").read_text(encoding="utf-8"))
        values = {str(f["code"]): f["value"] for f in found["findings"]}
        return {
            "verdict": found.get("badge", found["verdict"]),
            "alarms": " ".join(
                f["code"]
                for f in found["findings"]
                if f.get("status") in ("fail", "warn") and not f.get("follows_from")
            ),
            "lr_best": values.get("lr.best"),
            "lr_unstable": values.get("lr.unstable"),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {"verdict": None, "alarms": "", "lr_best": swept.get("lr.best"), "lr_unstable": swept.get("lr.unstable")}


def _config_link(folder: Path, study: dict[str, Any]) -> str:
    """Return where the study's configuration is, and whether it is still the one whose hash was stored (P5.3)."""
    stored, path = str(study.get("config_sha256")), folder / "config.json"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return f"{path} (missing)"
    return str(path) if found == stored else f"{path} (changed: was {stored[:12]}, is {found[:12]})"


def _reproduce(folder: Path, study: dict[str, Any]) -> str:
    """Return what reproduces a study from anywhere in the repository: in a tree of its own, so that this one stays as it is."""
    command = str(study.get("command"))
    if not study.get("commit"):
        return command
    tree = f"../again-{folder.name}"
    where = shlex.quote(os.path.join(tree, study.get("folder") or "").rstrip("/"))
    steps = [f"git worktree add --detach {shlex.quote(tree)} {study['commit'][:12]}"]
    if study.get("patch"):
        steps.append(f"git -C {shlex.quote(tree)} apply - < {shlex.quote(str(folder / study['patch']))}")
    return " && ".join([*steps, f"cd {where}", command])
