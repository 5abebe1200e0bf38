"""`diagnose_function`: the playbook for a function that builds and trains, as in a notebook (F1, F2, F3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.checks import check_integer
from workbench.errors import UsageError, WorkbenchError
from workbench.findings.diagnosis import Diagnosis
from workbench.playbook.program import walk
from workbench.programs.function import Function, FunctionRun, check_function
from workbench.programs.session import metric_of
from workbench.programs.trainer import ProgramTrainer
from workbench.studies.budget import Budget


def diagnose_function(
    train: Callable[[FunctionRun], object],
    out: str | Path | None = None,
    *,
    steps: int | None = None,
    metric: str | None = None,
    metric_mode: str | None = None,
    seeds: int = 3,
    jobs: int | None = None,
    budget: str | None = None,
    name: str | None = None,
    note: str | None = None,
    command: str | None = None,
    progress: bool | None = None,
) -> Diagnosis:
    """Walk the playbook for a function `train(run)` that builds its model and optimizer and trains: verdict, evidence, and the lines to change.

    It is called as it is, and again with learning rates times a factor, with a warmup, with its gradients clipped, under other seeds, and
    ended early: all at the boundary of its optimizer. Before each call the generators of torch, Python and NumPy are seeded with
    `run.seed`, and a seed that it sets itself is moved by that. What it prints is not shown. Runs are compared by
    `run.log(validation_loss=...)` where it logs that, else by their training loss.

        def train(run):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for inputs, targets in loader:
                ...
            run.log(validation_loss=evaluate(model))

    Args:
        train: called as often as there are trials; everything that is trained has to be made anew inside it.
        out: the study's folder; None is the one under `runs/` in which this function's was left unfinished, or a new one.
        steps: updates after which every call is ended; None lets it end by itself.
        metric: the name of a value that it logs, by which runs are compared; None is `validation_loss`, else the training loss.
        metric_mode: "min" or "max"; None tells by the name.
        seeds: runs of the baseline and of a candidate that prove it, under seeds that had no part in choosing it; 1 proves nothing.
        jobs: processes that call it at a time, each of which has to be able to import it; None calls it in this process.
        budget: what it may cost, as for `workbench.diagnose`.
        progress: as for `workbench.diagnose`.

    Raises:
        UsageError: `train` takes other arguments, or `jobs` is given and no other process can import it.
        WorkbenchError: it fails by itself, or never steps a torch optimizer.
        StudyInterrupted: Ctrl-C; the same call goes on.
    """
    check_function(train, jobs)
    for what, value in (("steps", steps), ("seeds", seeds), ("jobs", jobs)):
        if value is not None:
            check_integer(what, value, error=UsageError)
    _, select, mode = metric_of(metric, metric_mode)
    call = f"wb.diagnose_function({getattr(train, '__name__', 'train')})"
    try:
        return walk(
            Function(train=train, jobs=jobs), ProgramTrainer(jobs=jobs), out, steps=steps, metric=metric, select=select, mode=mode, seeds=seeds, name=name,
            note=note, command=command, call=call, progress=progress, budget=Budget.of(budget, seeds),
        )  # fmt: skip
    except WorkbenchError as error:  # which names the line of the function: our own frames say nothing of it
        raise error.with_traceback(None) from error.__cause__
