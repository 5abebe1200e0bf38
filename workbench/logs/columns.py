"""What a log holds: its columns as they were written, and which of them is the loss, the learning rate, the step: by the usual names, or the one given."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import RecordError, UnknownNameError, nearest

_MISSING = {"", "none", "null", "-", "n/a", "na"}
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RawLog:
    """One run's log."""

    path: Path  # its file, or a name where it came from memory
    columns: Mapping[str, pd.Series]  # name -> the cells that were written, in order, their index the row of the log
    rows: int  # how many there are
    # what else the log says: "total_steps" planned, "lr" of its config, "max_grad_norm", "notes" for the reader
    known: Mapping[str, Any] = field(default_factory=dict)
    text: bool = False  # missing cells at the end may be a NaN that was written as an empty cell

    def numbers(self, name: str) -> tuple[Ints, Floats]:
        """Return rows and values of a column; cells that say that there is none are left out."""
        cells = self.columns[name]
        if not pd.api.types.is_numeric_dtype(cells.dtype):
            said = cells.astype(str).str.strip()
            there = ~said.str.lower().isin(_MISSING)
            cells, said = cells[there], said[there]
            values = pd.to_numeric(said, errors="coerce")
            bad = values.isna() & (said.str.lower().str.lstrip("+-") != "nan")
            if bad.any():
                row = int(bad.to_numpy().argmax())
                raise RecordError(
                    f"{self.path}: column {name!r} holds {said.iloc[row][:60]!r} in row {int(said.index[row]) + 1}, which is not a number, "
                    f"and {int(bad.sum()) - 1} more like it. Write plain numbers (float(loss), loss.item()), or name another column."
                )
            cells = values
        return cells.index.to_numpy(dtype=np.int64), cells.to_numpy(dtype=np.float64)


def columns_of(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the written cells of each column of a frame whose rows are numbered 0, 1, 2, ..."""
    numbered = frame.reset_index(drop=True)
    return {str(name): numbered[name].dropna() for name in numbered.columns}


USUAL: Mapping[str, tuple[str, ...]] = {
    "loss": (
        "train_loss_step", "training_loss_step", "loss_step", "train_step_loss", "train_batch_loss", "batch_loss", "loss_batch",
        "train_loss", "training_loss", "loss_train", "loss_training", "loss", "train_loss_epoch", "loss_epoch", "epoch_loss",
    ),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate", "lr_step", "peak_lr"),
    "step": (
        "global_step", "trainer_global_step", "train_global_step", "step", "steps", "train_step", "iteration", "iterations", "iter",
        "num_steps", "num_updates", "update", "_step",
    ),
    "grad_norm": (
        "grad_norm", "gradient_norm", "train_grad_norm", "train_gradient_norm", "grad_norm_2_0_total", "grad_2_0_norm_total",
        "grad_norm_total", "total_grad_norm", "total_norm", "gnorm", "train_gnorm",
    ),
}  # fmt: skip
"""Names that a column may have, lower case with _ for every other sign; the first that is there is taken."""
_HELD = re.compile(r"^(?:(val|valid|validation|eval|dev|test)_(.+)|(.+)_(val|valid|validation|eval|dev|test))$")
_FEWEST = 0.1
"""Share of the cells of the fullest candidate that a column needs: a final summary is no curve (rule of thumb)."""
_NO_METRICS = ("runtime", "per_second", "epoch_time", "time", "step", "seconds", "batch", "idx")


@dataclass(frozen=True, kw_only=True)
class Names:
    """Columns of a log; None where there is none. `held` is (split, metric) -> column of what was evaluated."""

    loss: str
    lr: str | None
    step: str | None
    grad_norm: str | None
    held: Mapping[tuple[str, str], str]


def plain(name: str) -> str:
    """Return a name in lower case, with _ for everything but letters and digits; a leading _ stays."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()).rstrip("_")


def find_columns(
    log: RawLog,
    *,
    loss: str | None = None,
    lr: str | None = None,
    step: str | None = None,
    grad_norm: str | None = None,
    validation: str | None = None,
) -> Names:
    """Return which columns are which; a name that is given counts, whatever it looks like."""
    given = {"loss": loss, "lr": lr, "step": step, "grad_norm": grad_norm, "validation": validation}
    for word, name in given.items():
        if name is not None and name not in log.columns:
            raise UnknownNameError(f"{log.path} has no column {name!r} ({word}=...).{nearest(name, log.columns)}")
    found = {word: given[word] or _usual(log, word) for word in ("lr", "step", "grad_norm")}
    held = _evaluated(log.columns, taken={name for name in (*found.values(), loss) if name})
    if validation is not None:
        held = {key: name for key, name in held.items() if name != validation and key != ("validation", "loss")}
        held[("validation", "loss")] = validation
    chosen = loss or _usual(log, "loss") or _only_loss(log, set(held.values()))
    return Names(
        loss=chosen, lr=found["lr"] or _groups_lr(log), step=found["step"], grad_norm=found["grad_norm"],
        held={key: name for key, name in held.items() if name != chosen},
    )  # fmt: skip


def _usual(log: RawLog, word: str) -> str | None:
    """Return the first usual name whose column has not only a few cells."""
    names = {plain(name): name for name in reversed(list(log.columns))}
    there = [names[usual] for usual in USUAL[word] if usual in names]
    most = max((len(log.columns[name]) for name in there), default=0)
    return next((name for name in there if len(log.columns[name]) >= max(1.0, _FEWEST * most)), None)


def _only_loss(log: RawLog, held: set[str]) -> str:
    """Return the one column that speaks of a loss, whatever else it is called."""
    found = [name for name in log.columns if "loss" in plain(name) and name not in held]
    if len(found) == 1:
        return found[0]
    there = ", ".join(sorted(log.columns)) or "none"
    which = (
        f"several columns may be the training loss ({', '.join(found)})"
        if found
        else "no column has a usual name of a training loss"
    )
    raise RecordError(f"{log.path}: {which}. Say which with loss=NAME (--loss NAME). Its columns: {there}.")


def _groups_lr(log: RawLog) -> str | None:
    """Return the learning rate of an optimizer by name, such as lr-AdamW or train/lr_pg0; of several groups the first."""
    found = sorted(
        n
        for n in log.columns
        if re.match(r"^(train_)?(lr|learning_rate)_", plain(n)) and not plain(n).endswith("momentum")
    )
    optimizers = {re.sub(r"_pg\d+$", "", plain(name)) for name in found}
    if len(optimizers) > 1 and len({re.sub(r"_\d+$", "", name) for name in optimizers}) > 1:
        raise RecordError(
            f"{log.path}: there are learning rates of several optimizers ({', '.join(found)}). Say which with lr=NAME (--lr NAME)."
        )
    return found[0] if found else None


def _evaluated(columns: Iterable[str], *, taken: set[str]) -> dict[tuple[str, str], str]:
    """Return (split, metric) -> column of everything that was evaluated on examples that were not trained on."""
    found: dict[tuple[str, str], str] = {}
    for name in columns:
        match = _HELD.match(plain(name))
        if match is None or name in taken:
            continue
        word, metric = match[1] or match[4], re.sub(r"_(epoch|step)$", "", match[2] or match[3])
        if not any(part in metric for part in _NO_METRICS):
            found.setdefault(("test" if word == "test" else "validation", metric), name)
    return found


def listed(names: Sequence[str | None]) -> str:
    """Return the names that are there, for a sentence."""
    return ", ".join(name for name in names if name)
