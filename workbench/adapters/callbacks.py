"""Callbacks that watch the training of another library's trainer, as `wb.watch` watches a loop; the library is imported when one is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.adapters import lightning as for_lightning
    from workbench.adapters import transformers as for_transformers

__all__ = ["lightning", "transformers"]


def lightning(
    out: str | Path | None = None,
    *,
    name: str | None = None,
    note: str | None = None,
    every: int = 50,
    share: float | None = 0.01,
) -> for_lightning.WatchCallback:
    """Return a callback for the Trainer of `lightning` or `pytorch_lightning` that records each `fit` as a study.

        watched = wb.callbacks.lightning(out="runs/mine")
        L.Trainer(callbacks=[watched]).fit(module, loader)
        watched.run.diagnose()

    Recorded are loss and lr of every update, the unclipped gradient norm as often as it may cost, and the metrics of each validation. It observes only.

    Args:
        out: the study's folder; None is a new one under `runs/`. One that holds a study is left alone: "mine-2" is taken.
        name: of the study; None is the folder's.
        note: a short description; None writes one.
        every: updates between two looks at parameter and update norms.
        share: as of `wb.watch`; None looks at every update.

    Raises:
        WorkbenchError: neither library is installed.
    """
    from workbench.adapters.lightning import WatchCallback

    return WatchCallback(out, name=name, note=note, every=every, share=share)


def transformers(
    out: str | Path | None = None,
    *,
    name: str | None = None,
    note: str | None = None,
    every: int = 50,
    share: float | None = 0.01,
) -> for_transformers.WatchCallback:
    """Return a callback for the Trainer of `transformers` that records each `train` as a study.

        with wb.callbacks.transformers(out="runs/mine") as watched:
            Trainer(model, args, train_dataset=data, callbacks=[watched]).train()
        watched.run.diagnose()

    Recorded are loss and lr of every update, the unclipped gradient norm as often as it may cost, the metrics of each evaluation, and what else is logged. It
    observes only. The `with` may be left out: it is for trainings that end with an exception, of which the Trainer tells nobody.

    Args:
        out: the study's folder; None is a new one under `runs/`. One that holds a study is left alone: "mine-2" is taken.
        name: of the study; None is the folder's.
        note: a short description; None writes one.
        every: updates between two looks at parameter and update norms.
        share: as of `wb.watch`; None looks at every update.

    Raises:
        WorkbenchError: `transformers` is not installed.
    """
    from workbench.adapters.transformers import WatchCallback

    return WatchCallback(out, name=name, note=note, every=every, share=share)
