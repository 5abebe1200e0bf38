"""A training loop as a user may write one, whose checkpoint leaves out what it is told to."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

EVERYTHING = frozenset({"parameters", "buffers", "optimizer", "scheduler", "position", "rng", "ema"})
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(5))
Y = torch.sin(X.sum(1, keepdim=True))


def epochs(start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 8, a new order in each epoch, which its number decides; from batch `start` on."""
    for number in itertools.count(start):
        epoch, place = divmod(number, 5)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
        rows = order[8 * place : 8 * place + 8]
        yield X[rows], Y[rows]


class UserTraining:
    """The four functions that an audit takes.

    Attributes:
        lost: what the checkpoint leaves out, of `EVERYTHING`.
        noise: added to every loss by a generator that nothing seeds: training that does not repeat itself.
    """

    def __init__(self, *lost: str, noise: float = 0.0, hidden: bool = False) -> None:
        assert set(lost) <= EVERYTHING
        self.kept = EVERYTHING - set(lost)
        self.noise, self.hidden = noise, hidden
        self._unseeded = np.random.default_rng()

    def build(self) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": schedule,
            "batches": epochs(),
            "ema": ema,
            "done": 0,
        }
        if self.hidden:
            model.scale = 1.0  # no buffer, no parameter: no state dict knows of it
        return parts

    def step(self, parts: dict[str, Any]) -> float:
        model = parts["model"]
        x, y = next(parts["batches"])
        loss = ((model(x) - y) ** 2).mean() * getattr(model, "scale", 1.0)
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        parts["ema"].update_parameters(model)
        parts["done"] += 1
        if self.hidden:
            model.scale *= 0.9
        if self.noise:
            with torch.no_grad():
                model[4].bias += self.noise * self._unseeded.standard_normal()
        return float(loss.detach())

    def save(self, parts: dict[str, Any]) -> dict[str, Any]:
        model = parts["model"]
        weights = dict(model.named_parameters())
        state = {
            k: v for k, v in model.state_dict().items() if ("parameters" if k in weights else "buffers") in self.kept
        }
        found: dict[str, Any] = {"model": state, "done": parts["done"]}
        found |= {name: parts[name].state_dict() for name in ("optimizer", "scheduler", "ema") if name in self.kept}
        if "rng" in self.kept:
            found["rng"] = (torch.get_rng_state(), random.getstate(), np.random.get_state())
        return copy.deepcopy(found)

    def load(self, parts: dict[str, Any], found: dict[str, Any]) -> None:
        parts["model"].load_state_dict(found["model"], strict=False)
        for name in {"optimizer", "scheduler", "ema"} & set(found):
            parts[name].load_state_dict(found[name])
        parts["done"] = found["done"]
        if "position" in self.kept:
            parts["batches"] = epochs(found["done"])
        if "rng" in found:
            torch.set_rng_state(found["rng"][0])
            random.setstate(found["rng"][1])
            np.random.set_state(found["rng"][2])

    @property
    def functions(self) -> tuple[Any, Any, Any, Any]:
        return self.build, self.step, self.save, self.load
