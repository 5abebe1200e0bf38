"""`python -m workbench.hosts.rehearsal SPEC`: a workload trained for some steps on all ranks, as P7 asks for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.plain import to_json
from workbench.schedules import schedule_of
from workbench.train.forward import autocast, per_example
from workbench.train.rng import seed_all
from workbench.workloads.base import Workload
from workbench.workloads.indexed import in_its_own_order
from workbench.workloads.registry import load_workload

__all__ = ["check_rehearsal", "main"]

_RULES: dict[str, Any] = {
    "sgd": lambda p, c: torch.optim.SGD(p, lr=c.peak_lr, weight_decay=c.weight_decay),
    "momentum": lambda p, c: torch.optim.SGD(p, lr=c.peak_lr, momentum=c.momentum, weight_decay=c.weight_decay),
    "nesterov": lambda p, c: torch.optim.SGD(p, lr=c.peak_lr, momentum=c.momentum, nesterov=True, weight_decay=c.weight_decay),
    "rmsprop": lambda p, c: torch.optim.RMSprop(p, lr=c.peak_lr, alpha=c.rho, eps=c.eps, momentum=c.momentum),
    "adam": lambda p, c: torch.optim.Adam(p, lr=c.peak_lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay),
    "nadam": lambda p, c: torch.optim.NAdam(p, lr=c.peak_lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay),
    "adamw": lambda p, c: torch.optim.AdamW(p, lr=c.peak_lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay),
}  # fmt: skip


def check_rehearsal(workload: Workload, config: TrainConfig, hosts: int) -> None:
    """Refuse what cannot be trained on several hosts, before any process starts.

    Args:
        workload: what is trained.
        config: how.
        hosts: processes that share each batch.

    Raises:
        UsageError: no other process can load the workload, its data are a stream, or a batch cannot be shared out.
    """
    if workload.source is None:
        raise UsageError(
            f"workload {workload.name!r} was built in this process, and other processes cannot load it. Put it into a file and "
            "name it: load_workload('path/to/file.py:attribute')."
        )
    if in_its_own_order(workload.train_data) or in_its_own_order(workload.validation_data):
        raise UsageError(
            f"workload {workload.name!r} reads its data as a stream, and this rehearsal needs data with __getitem__."
        )
    if len(workload.train_data) < config.batch_size:
        raise UsageError(
            f"batch_size={config.batch_size} must be at most the {len(workload.train_data)} training examples of {workload.name!r}."
        )
    if config.batch_size % (hosts * config.accumulate_steps):
        raise UsageError(
            f"batch_size={config.batch_size} is no multiple of hosts * accumulate_steps = {hosts} * {config.accumulate_steps}: every "
            "host takes an equal part of each batch. Give another number of hosts, or another batch size."
        )


def main(words: list[str]) -> None:
    """Train on this rank.

    Args:
        words: path of a JSON file: {"workload": name, "config": changed fields, "out": folder of log and checkpoint}.
    """
    spec: Mapping[str, Any] = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    workload = load_workload(spec["workload"])
    config = workload.config.replace(**spec["config"])
    dist.init_process_group("gloo")
    _Rehearsal(workload, config, Path(spec["out"])).run()
    dist.destroy_process_group()


class _Rehearsal:
    def __init__(self, workload: Workload, config: TrainConfig, out: Path) -> None:
        self.workload, self.config, self.out = workload, config, out
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        seed_all(config.shared_seed)  # equal on all hosts: the model's initialisation (P7.5)
        self.model = workload.build_model()
        seed_all(config.per_host_seed, self.rank)  # its own on every host: order and preprocessing of the data (P7.6)
        self.wrapped = DistributedDataParallel(self.model)

    def run(self) -> None:
        """Train, evaluate at the config's interval, and save at the end."""
        config, lr_at = self.config, schedule_of(self.config)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        make = config.optimizer if callable(config.optimizer) else None
        optimizer = make(parameters, config.peak_lr) if make else _RULES[str(config.optimizer)](parameters, config)
        batches = self._batches()
        for step in range(config.total_steps):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step)
            optimizer.zero_grad()
            self.model.train()
            for _ in range(config.accumulate_steps):
                (self._loss(next(batches)) / config.accumulate_steps).backward()  # type: ignore[no-untyped-call]
            if config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            optimizer.step()
            if (step + 1) % config.eval_interval == 0 or step + 1 == config.total_steps:
                _merge_statistics(self.model)
                self._log(step + 1, self._evaluate())
        if self.rank == 0:
            torch.save(self.model.state_dict(), self.out / "last.pt")
        dist.barrier()

    def _batches(self) -> Any:
        data, config = self.workload.train_data, self.config
        sampler: Any = DistributedSampler(data, seed=config.per_host_seed)
        size = config.batch_size // (self.world * config.accumulate_steps)
        loader: Any = DataLoader(
            data,
            size,
            sampler=sampler,
            collate_fn=self.workload.collate,
            num_workers=self.workload.num_workers,
            drop_last=True,
        )
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def _values(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor, Tensor]:
        examples = len(batch[0]) if isinstance(batch, (list, tuple)) else len(next(iter(batch.values())))
        with autocast(torch.device("cpu"), self.config.precision):
            outputs, losses, weights = per_example(self.workload, model, batch, examples)
        return outputs, losses, torch.ones_like(losses) if weights is None else weights

    def _loss(self, batch: Any) -> Tensor:
        """Return this host's part of the weighted mean over all hosts, times their number: the wrapper divides by it."""
        _, losses, weights = self._values(self.wrapped, batch)
        total = weights.sum().detach()
        dist.all_reduce(total)
        return (losses * weights).sum() * self.world / total

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return loss and metrics over the validation split; each example is on one host, and sums are joined."""
        self.model.eval()
        data, names = self.workload.validation_data, ["loss", *self.workload.metrics]
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)
        part = Subset(data, range(self.rank, len(data), self.world))
        loader: Any = DataLoader(part, self.config.evaluation_batch, collate_fn=self.workload.collate)
        for batch in loader:
            outputs, losses, weights = self._values(self.model, batch)
            columns = [
                losses,
                *(metric(outputs, batch) for metric in self.workload.metrics.values()),
                torch.ones_like(losses),
            ]
            sums += torch.stack([(column.double() * weights).sum() for column in columns])
        dist.all_reduce(sums)
        return {name: float(value / sums[-1]) for name, value in zip(names, sums, strict=False)}

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self.rank == 0:
            with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_json({"step": step, **values})) + "\n")


def _merge_statistics(model: nn.Module) -> None:
    """Give all hosts the mean of their running statistics, the spread between their means included (P7.3)."""
    for module in model.modules():
        mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            both = torch.stack([mean, variance + mean**2]).double()
            dist.all_reduce(both)
            both /= dist.get_world_size()
            mean.copy_(both[0])
            variance.copy_(both[1] - both[0] ** 2)


if __name__ == "__main__":
    main(sys.argv[1:])
