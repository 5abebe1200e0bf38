"""`Trainer`: where trials are trained, one alone or many together; the loop itself is in `loop.py`."""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

from workbench.config import TrainConfig, code_name
from workbench.errors import ConfigError
from workbench.progress import Progress, interruptible, progress_bar
from workbench.record.read import TrialRecord
from workbench.record.repro import source_of
from workbench.record.roles import Role
from workbench.record.write import StudyWriter, TrialWriter
from workbench.train.batches import resolve_device, train_batches
from workbench.train.distributed.data_parallel import begin_together, check_shares, finished, open_together
from workbench.train.distributed.process_group import ALONE, HostGroup, host_group, local_device
from workbench.train.evaluation import check_track, tracked_examples
from workbench.train.forward import autocast, per_example
from workbench.train.hooks import Hook, Logits, Norms, Timing
from workbench.train.lane import Lane, check_lanes, group_lanes, lanes_in_a_stack, train_stacks
from workbench.train.lanes.backend import choose_gradients
from workbench.train.lanes.threads import step_threads
from workbench.train.loop import TrainingLoop
from workbench.train.rng import isolated_rng, seed_all
from workbench.train.stacked_weights import build_model
from workbench.train.steps.own_step import check_own_step
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_selection, chosen_config
from workbench.workloads.losses import classes_of
from workbench.workloads.registry import call_on


class AnyTrainer(Protocol):
    """A frozen dataclass that trains trials into a study's folder, in one process or on many: `Trainer`, `ParameterServerTrainer`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def device(self) -> str:
        """Where trials compute."""

    @property
    def hooks(self) -> Sequence[Hook]:
        """Observers."""

    @property
    def track(self) -> int | Sequence[int]:
        """Examples whose predictions every evaluation writes down."""

    @property
    def evaluate_also(self) -> Sequence[str]:
        """Splits that are evaluated beside "validation" and the one that selection compares."""

    def run_trials(
        self,
        workload: Workload,
        configs: Sequence[TrainConfig],
        study: StudyWriter,
        *,
        stage: str,
        progress: Progress | None = None,
    ) -> list[TrialRecord]:
        """Train what is not finished yet and return all records, in the order of `configs`."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Where and under which eyes a trial is trained; what is trained is the workload's and its config's business.

    Attributes:
        device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", ...
        gradients: how lanes get theirs. "loop" is plain autograd, one lane after the other; "vmap" one traced program for
            many lanes, or for one; "auto" measures a few steps of each and takes the faster, or plain autograd where the model
            cannot be traced or the stack makes fewer than 1,000 updates. Measured is the processor time of one thread, and of ways of about
            the same cost a fixed order takes one, so that it is the same on a busy machine. What was found holds for the study, whose record
            says it, and for later ones of this model, batch and processor (`gradient_backends.json` in $WORKBENCH_CACHE, or ~/.cache/workbench).
        memory_gb: bound on the memory that the lanes of a stack take, in units of 1e9 bytes. None is four fifths of what is
            free when they begin (rule of thumb). Weights, gradients and optimizer state take half of it at most, which says
            how many lanes are in a stack; the others train in further stacks, one after the other. Activations, measured on
            a single lane, say how many lanes share a call in the rest. A single lane is always tried. A stack that runs out
            of memory all the same is halved and goes on. Every worker of an executor counts for itself.
        hooks: observers, in addition to `Norms`, `Timing` and `Logits`, which every run has.
        evaluate_also: splits that are evaluated beside "validation" and the one that selection compares, such as "test"; no
            decision looks at them.
        track: examples of the validation split whose predictions every evaluation writes down (P2.12): so many, evenly spaced,
            or their ids; 0 is none.
        synchronise_batch_norm: on many hosts, whether batch norm takes its statistics over all of them; by default each takes
            those of its share, which is another training than that of one host (P6.3). Alone it changes nothing.
        threads: of torch, while it or its study runs. None measures whether a few steps take less time with as many as torch has than
            with one, where any operation is so large that torch would split it; what was found holds for the study. A number of
            your own (OMP_NUM_THREADS, `torch.set_num_threads`) stays. What `torch.set_num_threads` sets to as many as the processors
            that this process may use, or half of them, is not told apart from torch's own default: give such a number here.
    """

    device: str = "auto"
    gradients: Literal["auto", "loop", "vmap"] = "auto"
    hooks: Sequence[Hook] = ()
    memory_gb: float | None = None
    evaluate_also: Sequence[str] = ()
    track: int | Sequence[int] = 8
    synchronise_batch_norm: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments that need no machine."""
        if self.gradients not in ("auto", "loop", "vmap"):
            raise ConfigError(f"gradients={self.gradients!r} is not known. Allowed: 'auto', 'loop', 'vmap'.")
        number = isinstance(self.memory_gb, (int, float)) and not isinstance(self.memory_gb, bool)
        if self.memory_gb is not None and not (number and 0 < self.memory_gb < math.inf):
            raise ConfigError(
                f"memory_gb={self.memory_gb!r} must be above 0: the memory that a stack of lanes may take, in units of 1e9 "
                "bytes. None takes what is free."
            )
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ConfigError(f"threads={self.threads!r} must be an integer of at least 1, or None.")
        check_track(self.track)
        for hook in self.hooks:
            if not isinstance(hook, Hook):
                raise ConfigError(
                    f"hooks must hold workbench.hooks.Hook instances, not {type(hook).__name__}: {hook!r}."
                )

    @interruptible()
    def run(
        self,
        workload: Workload,
        config: TrainConfig | None = None,
        *,
        out: str | Path | None = None,
        name: str | None = None,
        note: str | None = None,
        progress: bool = False,
    ) -> TrialRecord:
        """Train `workload` once and return its record; the same call again resumes an unfinished run.

        Args:
            config: how; None is the workload's baseline.
            out: the study's folder; None is the one under `runs/` in which this very run was interrupted, or a new one.
            name: name of the study; None is the folder's.
            note: a short description (P5.4); None writes one.
            progress: show a progress bar.

        Raises:
            UsageError: `workload` is no `Workload`.
            ConfigError: `config` is no `TrainConfig`.
            WorkloadError: model, data or loss are broken; what was saved is kept.
            RecordError: the folder cannot be used.
            StudyInterrupted: Ctrl-C; everything is saved and the same call resumes.
        """
        config = chosen_config(workload, config)
        device = local_device(resolve_device(self.device))
        # no text stands for what is the user's own
        source = None if self.hooks else f"wb.Trainer(device={self.device!r})"
        how: dict[str, Any] = {"out": out, "name": name, "note": note, "progress": progress}
        with host_group(device) as hosts:

            def train(
                workload: Workload, configs: Sequence[TrainConfig], study: StudyWriter, **more: Any
            ) -> list[TrialRecord]:
                with step_threads(workload, config, device, self.threads, study=study if hosts.size == 1 else None):
                    return self.run_trials(workload, configs, study, hosts=hosts, **more)

            record = run_alone(self, workload, config, train, device=device, source=source, hosts=hosts, **how)
            hosts.any(False)  # nobody reads the record before it is whole
            return record

    def run_trials(
        self,
        workload: Workload,
        configs: Sequence[TrainConfig],
        study: StudyWriter,
        *,
        stage: str,
        progress: Progress | None = None,
        hosts: HostGroup = ALONE,
        elsewhere: Sequence[TrainConfig] = (),
    ) -> list[TrialRecord]:
        """Train trials that do not depend on each other as lanes of one program; finished ones are only returned.

        They may differ in anything, and train together where batches are alike; `hosts` train a single trial together. Trials of the same
        question that are trained `elsewhere` are as if they were in the same stack.

        Raises:
            UsageError: `configs` is empty.
            ConfigError: two are the same, or one cannot be trained; it is named.
            WorkloadError: model, data or loss are broken; what was saved is kept.
            StudyInterrupted: Ctrl-C; everything is saved and the same call resumes.
        """
        device = local_device(resolve_device(self.device))
        missing = [split for split in self.evaluate_also if split not in workload.splits]
        if missing:
            raise ConfigError(
                f"evaluate_also={tuple(self.evaluate_also)!r}: workload {workload.name!r} has no split {missing[0]!r}; it has "
                f"{', '.join(workload.splits)}. Give it with {missing[0]}_data=..., or leave it out."
            )
        sizes = check_lanes(workload, configs)
        check_own_step(workload, configs, gradients=self.gradients, workers=hosts.size if hosts.size > 1 else 0)
        tracked = tracked_examples(workload, self.track)
        writers = [study.trial(c.to_dict(), stage=stage, train_examples=sizes["train"]) for c in configs]
        memory = None if self.memory_gb is None else int(self.memory_gb * 1e9)
        wanted = "loop" if hosts.size > 1 else self.gradients  # hosts do not measure: each might choose another backend
        given = {type(hook) for hook in self.hooks}
        loop = partial(
            TrainingLoop,
            workload,
            study=study,
            device=device,
            hooks=[hook for hook in (Norms(), Timing(), Logits()) if type(hook) not in given] + list(self.hooks),
            tracked=tracked,
            choose=partial(
                choose_gradients, wanted=wanted, memory=memory, share=hosts.size > 1, beside=[*configs, *elsewhere]
            ),
            progress=progress,
            splits=self.evaluate_also,
            hosts=hosts,
            synchronised=self.synchronise_batch_norm,
        )

        def train(stack: Sequence[Lane]) -> None:
            with _noted(*(lane.writer for lane in stack)):
                made = loop(stack)
            made.train()

        with isolated_rng():
            lanes = []
            for config, writer in zip(configs, writers, strict=True):
                if not finished(hosts, writer):
                    with _noted(writer):
                        lanes.append(begin_together(hosts, Lane(config, writer)))
            for group in group_lanes(lanes):
                with _noted(*(lane.writer for lane in group)):
                    fit = lanes_in_a_stack(workload, group, device, memory)
                train_stacks(group, train, fit=fit)
        return [writer.record for writer in writers]


def run_alone(
    trainer: AnyTrainer,
    workload: Workload,
    config: TrainConfig | None,
    train: Callable[..., list[TrialRecord]],
    *,
    device: torch.device,
    source: str | None,
    out: str | Path | None,
    name: str | None,
    note: str | None,
    progress: bool,
    hosts: HostGroup = ALONE,
) -> TrialRecord:
    """Train one trial in a study of its own: what `run` of every trainer does."""
    config = chosen_config(workload, config)
    check_data(workload, config)
    check_selection(workload, config)
    tracked_examples(workload, trainer.track)
    check_shares(config, hosts)
    call = None
    if source is not None and not config.has_callables:
        call = call_on(workload, f"{source}.run({{workload}}, {source_of(config)}, out={out and str(out)!r})")
    folder = None if out is None else Path(out)
    about: dict[str, Any] = {"kind": "trial", "workload": workload.name, "config": config.to_dict()}
    opened = partial(StudyWriter.open, folder, name=name, note=note, call=call, **about)
    study = open_together(hosts, opened)
    try:
        if hosts.main:  # in a new study, what is broken fails in its trial below
            with contextlib.suppress(Exception) if study.created else contextlib.nullcontext():
                study.hold_against(fingerprint(workload, config, device))
        with progress_bar(config.total_steps, workload.name, show=progress and hosts.main) as bar:
            (record,) = train(workload, [config], study, stage=Role.TRIAL, progress=bar.advance)
        study.finish()
    finally:
        study.close()
    return record


@contextlib.contextmanager
def _noted(*writers: TrialWriter) -> Iterator[None]:
    """Record trials that could not even begin as failed."""
    try:
        yield
    except Exception as error:
        for writer in writers:
            writer.event("ended", state="failed", error=f"{type(error).__name__}: {error}")
        raise


def fingerprint(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return sizes of the splits, a hash of the parameters' names and shapes, the loss of the first batch, and the classes.

    A dataset that knows the hash of its contents, as an attribute `sha256`, has it recorded as well. One forward pass in evaluation
    mode; a change that shows in none of these, such as another augmentation of later batches, goes unseen.
    """
    with isolated_rng(), torch.no_grad():
        model = build_model(workload, config, device).eval()
        shapes = repr([(name, tuple(p.shape)) for name, p in model.named_parameters()])
        seed_all(config.shared_seed, config.per_host_seed)
        batch, examples = next(train_batches(workload, config, device))[0]
        with autocast(device, config.precision):
            outputs, losses, _ = per_example(workload, model, batch, examples)
    loss = float(losses.float().mean())
    hashes = {split: data.sha256 for split, data in workload.splits.items() if hasattr(data, "sha256")}
    return {
        "examples": check_data(workload, config),
        **({"sha256": hashes} if hashes else {}),
        "parameters": f"{zlib.crc32(shapes.encode()):08x}",
        "first_loss": loss if math.isfinite(loss) else None,
        "classes": classes_of(workload.loss, outputs),
        **({} if workload.step is None else {"step": code_name(workload.step)}),
    }
