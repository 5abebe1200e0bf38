"""`WatchCallback` for the Trainer of `transformers`: what `wb.callbacks.transformers` returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.adapters.watching import Watching, libraries
from workbench.topics.loop.collect import WatchedRun

_BASE: Any = libraries("transformers")[0].TrainerCallback
_ITS_OWN = re.compile(
    r"loss|grad_norm|learning_rate|epoch|step|total_flos|num_input_tokens_seen|train_.*|.*_(runtime|per_second|preparation_time)"
)
"""What the Trainer logs of itself; loss, gradient norm and learning rate are recorded at every update instead."""


class WatchCallback(_BASE):
    """Records every `train`; `evaluate` and `predict` alone record nothing.

    The Trainer tells its callbacks of no exception: a `with` around `train` ends the record there, else the next `train` or the end of
    the program does.
    """

    def __init__(self, out: str | Path | None = None, *, name: str | None = None, note: str | None = None, every: int = 50, share: float | None = 0.01) -> None:  # fmt: skip
        self._watching = Watching(out, name=name, note=note, every=every, share=share)

    @property
    def run(self) -> WatchedRun | None:
        """The run in progress, or else the last one."""
        return self._watching.run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
        self._watching.end(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if state.is_world_process_zero:
            self._watching.begin(about["model"], [about["optimizer"]])
            self._watching.plan(state.max_steps - state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **about: Any) -> None:
        self._watching.log({name: value for name, value in logs.items() if not _ITS_OWN.fullmatch(name)}, split="train")

    def on_train_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self._watching.end()
