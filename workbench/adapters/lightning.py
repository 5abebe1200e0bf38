"""`WatchCallback` for the Trainer of `lightning` or `pytorch_lightning`: what `wb.callbacks.lightning` returns."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.adapters.watching import Watching, libraries
from workbench.topics.loop.collect import WatchedRun

_BASE: Any = type("_Base", tuple(module.Callback for module in libraries("lightning.pytorch", "pytorch_lightning")), {})


class WatchCallback(_BASE):
    """Records every `fit`, from after the sanity check to its end; `validate`, `test` and `predict` alone record nothing."""

    def __init__(self, out: str | Path | None = None, *, name: str | None = None, note: str | None = None, every: int = 50, share: float | None = 0.01) -> None:  # fmt: skip
        super().__init__()
        self._watching = Watching(out, name=name, note=note, every=every, share=share)
        self._known: dict[str, Any] = {}

    @property
    def run(self) -> WatchedRun | None:
        """The run in progress, or else the last one."""
        return self._watching.run

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not (trainer.enable_validation and trainer.num_sanity_val_steps):
            self.on_sanity_check_end(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._watching.open:  # resumed, without the sanity check; the loader has begun: its draws are not seen
            self.on_sanity_check_end(trainer, pl_module)
        self._watching.plan(_planned(trainer, pl_module))  # asked earlier, it would make the loaders before their time

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:  # the record begins
        if trainer.is_global_zero:
            self._watching.begin(pl_module, trainer.optimizers)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._known = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.log({k: v for k, v in trainer.callback_metrics.items() if v is not self._known.get(k)})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._watching.end(exception)


def _planned(trainer: Any, module: Any) -> int | None:
    """Return how many updates are left; None where Lightning cannot tell."""
    with suppress(Exception):  # it refuses, as for a changing accumulation, or has no end: no reason to end a training
        left = int(trainer.estimated_stepping_batches - trainer.global_step)
        return left if module.automatic_optimization else None
    return None
