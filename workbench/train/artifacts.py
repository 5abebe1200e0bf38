"""What a checkpoint is good for after training: a model in another process, or an exported program (P2.13)."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import CheckpointError, RecordError, WorkbenchError, WorkloadError
from workbench.record.folder import read_json
from workbench.record.read import TrialRecord
from workbench.train.batches import eval_batches, resolve_device
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import eval_mode
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload


def load_trained(workload: Workload, checkpoint: str | Path | TrialRecord, *, device: str = "cpu") -> nn.Module:
    """Return the model of a checkpoint, built anew, in evaluation mode.

    Evaluated with the config's precision it gives the metric that was logged.

    Args:
        checkpoint: folder of the checkpoint, or a trial, whose best one is taken (P4.5).
        device: where to put it.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the model.
    """
    if isinstance(checkpoint, TrialRecord):
        checkpoint = best_checkpoint(checkpoint)
    config = trained_with(workload, Path(checkpoint))
    with isolated_rng():
        model = build_model(workload, config, resolve_device(device))
    return load_model(model, checkpoint).eval()


def best_checkpoint(trial: TrialRecord) -> Path:
    """Return the folder of a trial's best checkpoint (P4.5).

    Raises:
        CheckpointError: it is not kept.
    """
    best = trial.best()
    if best.checkpoint is None:
        raise CheckpointError(
            f"trial {trial.number} keeps no checkpoint of its best step {best.step}; give the folder of another one, or train "
            "with a larger keep_best."
        )
    return best.checkpoint


def trained_with(workload: Workload, checkpoint: Path) -> TrainConfig:
    """Return the workload's config with the precision and the seeds that a checkpoint was trained with.

    Raises:
        CheckpointError: the folder is no checkpoint within a study.
    """
    try:
        stored = read_json(checkpoint.resolve().parents[1] / "config.json")["config"]
        return workload.config.replace(**{name: stored[name] for name in ("precision", "shared_seed", "per_host_seed")})
    except (RecordError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint} is no checkpoint of a study. Give a folder like runs/study/trials/0/checkpoints/step-00000100, "
            "as `record.trial(0).checkpoints` lists them."
        ) from error


def export_program(workload: Workload, model: nn.Module, path: str | Path) -> Path:
    """Export a model with `torch.export`, for use without its source code, and return the file's path.

    The program takes what `forward` passes to the model; the number of examples is left open where the model allows it. It is
    run on a batch before it is saved, and has to return what the model returns.

    Args:
        workload: says how the model is called.
        model: to export, left as it was.
        path: the file, by custom ending in .pt2; `torch.export.load(path).module()` reads it.

    Raises:
        WorkloadError: the model cannot be exported; the reason is given.
    """
    device = next(model.parameters()).device
    precision = {torch.float64: "float64"}.get(next(model.parameters()).dtype)
    batch, examples = next(eval_batches(workload, "validation", 4, device, precision))
    try:
        with eval_mode(model):
            args, expected = _call(workload, model, batch)
            batch_dim = {0: torch.export.Dim("batch")}
            tensors = (isinstance(arg, torch.Tensor) and arg.dim() and arg.shape[0] == examples for arg in args)
            shapes: Any = tuple(batch_dim if of_batch else None for of_batch in tensors)
            kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
            with torch.no_grad(), warnings.catch_warnings(), isolated_rng():
                warnings.simplefilter("ignore")
                try:
                    variadic = inspect.Parameter.VAR_POSITIONAL in kinds
                    program = torch.export.export(model, args, dynamic_shapes=(shapes,) if variadic else shapes)
                except Exception:  # the number of examples cannot be left open
                    program = torch.export.export(model, args)
            found = program.module()(*args)
            torch.testing.assert_close(found, expected)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.stem}.tmp.pt2")
        torch.export.save(program, temporary)
        temporary.replace(target)
        return target
    except WorkbenchError:
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "no message").strip()
        raise WorkloadError(
            f"workload {workload.name!r}: {type(model).__name__} cannot be exported ({type(error).__name__}: {reason}). "
            "torch.export takes no control flow that depends on the data; keep the checkpoint instead: state dict and config "
            "give the model back (load_trained)."
        ) from error


def _call(workload: Workload, model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments that forward passes to the model, and what the model returns."""
    seen: list[tuple[Any, ...]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise WorkloadError(
                f"workload {workload.name!r}: forward calls the model with keywords ({', '.join(kwargs)}); pass them by place to export it."
            )
        seen.append(args)

    returned: list[Any] = []
    handles = [
        model.register_forward_pre_hook(note, with_kwargs=True),
        model.register_forward_hook(lambda _, __, output: returned.append(output)),
    ]
    try:
        with torch.no_grad(), isolated_rng():
            workload.forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != 1:
        raise WorkloadError(
            f"workload {workload.name!r}: forward calls the model {len(seen)} times, and a program stands for one call."
        )
    return seen[0], returned[0]
