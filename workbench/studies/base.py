"""`Study`: what every study is: fields that say what to try, and trials that go into one folder."""

from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from workbench.progress import interruptible
from workbench.record.read import StudyRecord
from workbench.record.repro import source_of
from workbench.studies.session import Session, open_session
from workbench.train.trainer import AnyTrainer
from workbench.workloads.base import Workload
from workbench.workloads.registry import call_on


class Study(ABC):
    """Base of the frozen dataclasses that are studies; they say which trials to run in `extend`.

    Attributes:
        stem: the study's name on every floor.
        steps: length of a full trial; None is the baseline's.
    """

    stem: ClassVar[str]
    steps: int | None

    @abstractmethod
    def extend(self, session: Session) -> None:
        """Run the study's trials inside a folder that is already open."""

    def conclude(self, session: Session) -> None:  # noqa: B027
        """Store what the table of studies shows of it."""

    def settings(self) -> dict[str, Any]:
        """Return the fields as JSON values: another value in the same folder is another study."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # every study is a dataclass

    @interruptible()
    def run(
        self,
        workload: Workload,
        trainer: AnyTrainer | None = None,
        executor: str = "local",
        out: str | Path | None = None,
        *,
        address: str | None = None,
        name: str | None = None,
        note: str | None = None,
        progress: bool = False,
    ) -> StudyRecord:
        """Run the study and return its record; the same call again goes on where it was.

        Args:
            trainer: None is the local `Trainer`.
            executor: where trials run: "local" is this process, "ray" a cluster.
            out: the study's folder; None is the one under `runs/` in which this very study was interrupted, or a new one.
            address: of the Ray cluster; None takes the one that this process has joined, or starts one for as long as the study runs.
            name: of the study; None is the folder's.
            note: a short description (P5.4); None writes one.
            progress: show one progress bar.

        Raises:
            WorkloadError: model, data or loss are broken; what was saved is kept.
            RecordError: the folder cannot be used.
            StudyInterrupted: Ctrl-C; everything is saved and the same call resumes.
        """
        with open_session(
            workload,
            stem=self.stem,
            settings=self.settings(),
            steps=self.steps,
            trainer=trainer,
            executor=executor,
            address=address,
            out=out,
            name=name,
            note=note,
            call=None if trainer is not None and trainer.hooks else call_on(workload, self._call(trainer, out)),
            progress=progress,
        ) as session:
            self.extend(session)
            self.conclude(session)
            return session.record

    def _call(self, trainer: AnyTrainer | None, out: str | Path | None) -> str:
        """Return the expression that runs it again; another trainer than the default one is part of what is repeated."""
        by = "" if trainer is None else f", trainer={source_of(trainer)}"
        return f"{source_of(self)}.run({{workload}}, out={out and str(out)!r}{by})"
