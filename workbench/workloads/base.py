"""`Workload`: a model, its data, its loss and the baseline it is trained with today."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.config import TrainConfig, check_names, shows_fields
from workbench.errors import UnknownNameError, WorkloadError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

PerExample = Callable[[Any, Any], "Tensor"]
SPLITS = ("train", "validation", "test")


def first_of_batch(model: Callable[[Any], Any], batch: Any) -> Any:
    """Return `model(batch[0])`: the default `forward`, for batches of the form `(inputs, targets)`."""
    _expect_sequence(batch, "forward=lambda model, batch: model(batch['inputs'])")
    return model(batch[0])


def second_of_batch(batch: Any) -> Any:
    """Return `batch[1]`: the default place of the targets."""
    _expect_sequence(batch, "targets=lambda batch: batch['labels']")
    return batch[1]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. Everything that a study varies is in `config`, everything else is here.

    Attributes:
        name: how records and reports call it.
        build_model: builds a new model each time; its random numbers come from shared_seed.
        train_data: a map-style dataset (anything with `__len__` and `__getitem__`), shuffled anew each epoch without its incomplete last batch, or
            an iterable one with `__len__`, read in its own order. Not a `DataLoader`.
        validation_data: what decides between trials and checkpoints.
        test_data: never used for a decision; None when there is none.
        loss: `(outputs, batch) -> (batch,)`: one value per example, no reduction, so that padding can weigh zero. One value a batch, of shape (),
            is allowed as well, as `model(**batch).loss` is: it is trained as it is, and evaluated in batches of training, each weighing as
            much as it has examples. What takes a loss of each example is then not measured.
        weights: `batch -> (batch,)`; None is ones. Every mean, of loss and metrics, is weighted.
        forward: `(model, batch) -> outputs`; the default is `model(batch[0])`.
        metrics: name -> `(outputs, batch) -> (batch,)`, one value per example.
        collate: list of items -> batch; None is PyTorch's default.
        num_workers: processes that load data; 0 loads in the training process. Iterable data is read by one at most.
        step: `(state, batch) -> loss`: makes one update by itself, where a loss and one optimizer cannot say it (several optimizers, LBFGS,
            reinforcement learning); it returns a scalar, or a dict of some. None is the gradient of `loss` and one step of the config's
            optimizer. `state` has `model`, `optimizer` or `optimizers` as the config's factory returned them, `scaler` (of float16),
            `autocast()`, `device` and `index`. With it `forward` and `loss` only evaluate.
        minimised: whether a smaller loss is better. False where it is adversarial, or a surrogate as in reinforcement learning: no
            run is judged by it, and configs are compared by the metric that `config.select` names.
        config: the baseline that the person trains with today.
        source: the name that `load_workload` found it by; None for one that was built in place.

    Raises:
        WorkloadError: a field has the wrong type; data and model are not touched, beyond `len()`.
    """

    name: str
    build_model: Callable[[], nn.Module]
    train_data: Any
    validation_data: Any
    config: TrainConfig
    loss: PerExample
    test_data: Any = None
    weights: Callable[[Any], Tensor] | None = None
    forward: Callable[[Any, Any], Any] = first_of_batch
    metrics: Mapping[str, PerExample] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    step: Callable[[Any, Any], Any] | None = None
    minimised: bool = True
    source: str | None = None

    def __new__(cls, *_: Any, **given: Any) -> Workload:
        """Refuse what is no field, with the nearest one."""
        check_names(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field that can be checked without building a model or loading an item."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise WorkloadError(f"name={self.name!r} must be a non-empty string, for example 'digits_cnn'.")
        if not self.name.isprintable():
            raise WorkloadError(
                f"name={self.name!a} holds a line break, a NUL or bytes that are no UTF-8: give a name that can be printed."
            )
        for name in ("build_model", "loss", "forward", "weights", "collate", "step"):
            self._check_callable(name)
        self._check_metrics()
        for split in SPLITS:
            self._check_dataset(split)
        if not isinstance(self.config, TrainConfig):
            raise WorkloadError(
                f"workload {self.name!r}: config must be a TrainConfig, not {_kind(self.config)}. Write "
                "config=TrainConfig(peak_lr=..., total_steps=..., batch_size=...)."
            )
        if not isinstance(self.minimised, bool):
            raise WorkloadError(f"workload {self.name!r}: minimised={self.minimised!r} must be True or False.")
        if isinstance(self.num_workers, bool) or not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise WorkloadError(
                f"workload {self.name!r}: num_workers={self.num_workers!r} must be an integer of at least 0; "
                "0 loads data in the training process."
            )

    def _check_callable(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name in ("weights", "collate", "step"):
            return
        if not callable(value):
            raise WorkloadError(f"workload {self.name!r}: {name} must be callable, not {_kind(value)}.")
        if name == "build_model" and hasattr(value, "parameters") and not isinstance(value, type):
            raise WorkloadError(
                f"workload {self.name!r}: build_model is a model ({type(value).__name__}), but must be a function that "
                "returns a fresh one, because every trial starts from its own. Write build_model=lambda: Net()."
            )

    def _check_metrics(self) -> None:
        known: object = self.metrics
        if not isinstance(known, Mapping):
            raise WorkloadError(
                f"workload {self.name!r}: metrics must map names to functions of (outputs, batch), not {_kind(known)}."
            )
        for name, metric in known.items():
            if not isinstance(name, str) or not name or "/" in name or name == "loss":
                raise WorkloadError(
                    f"workload {self.name!r}: metric name {name!r} must be a non-empty string without '/' and not 'loss'."
                )
            if not callable(metric):
                raise WorkloadError(f"workload {self.name!r}: metric {name!r} must be callable, not {_kind(metric)}.")

    def _check_dataset(self, split: str) -> None:
        data = getattr(self, f"{split}_data")
        if data is None and split == "test":
            return
        if not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
            raise WorkloadError(
                f"workload {self.name!r}: {split}_data must be a dataset with __len__ and __getitem__, not {_kind(data)}."
            )
        if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
            raise WorkloadError(
                f"workload {self.name!r}: {split}_data is a DataLoader; give its dataset instead, because the trainer "
                f"shuffles and batches itself: {split}_data=loader.dataset, collate=loader.collate_fn."
            )

    @property
    def splits(self) -> dict[str, Any]:
        """The datasets that are there, by split name: train, validation and, where given, test."""
        return {s: data for s in SPLITS if (data := getattr(self, f"{s}_data")) is not None}

    def data(self, split: str) -> Any:
        """Return the dataset of `split`; a split that is not there is an `UnknownNameError`."""
        if split not in self.splits:
            raise UnknownNameError(f"workload {self.name!r} has no split {split!r}.{nearest(split, self.splits)}")
        return self.splits[split]

    def replace(self, **changes: Any) -> Workload:
        """Return a copy with `changes`; one that differs in more than its config has no `source` any more."""
        check_names(Workload, changes)
        if changes.keys() - {"config"}:
            changes.setdefault("source", None)
        return dataclasses.replace(self, **changes)


shows_fields(Workload)


def _kind(value: object) -> str:
    return f"{type(value).__name__} ({str(value)[:60]})"


def _expect_sequence(batch: Any, instead: str) -> None:
    if isinstance(batch, Mapping):
        raise WorkloadError(
            f"the batch is a mapping with keys {', '.join(map(str, batch))}, so it has no position 0 or 1: "
            f"say where to look, for example {instead}."
        )
