"""`LaneRng`: every lane draws what it would draw if it were trained alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.train.rng import capture_rng, restore_rng

__all__ = ["LaneRng"]

WATCHED_STEPS = (
    4  # rule of thumb: a model that draws from Python's or NumPy's generators does so within its first steps
)


class LaneRng:
    """Random state of the model, lane by lane: dropout in one lane leaves the draws of the others alone.

    A single lane draws from the global generators and pays nothing. Several lanes have generators of their own for torch;
    Python's and NumPy's state is kept per lane from the moment that a model is seen to draw from them.

    Attributes:
        generators: one per lane, on the device that the model is trained on.
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        self._device = device
        self._single = len(states) == 1
        self._host_random = False
        self._watched = WATCHED_STEPS * len(states)
        if self._single:
            restore_rng(states[0])
            self.generators = [_global_generator(device)]
            self._cpu, self._rest = self.generators, [dict(states[0])]
            return
        self._cpu = [torch.Generator() for _ in states]
        self.generators = self._cpu if device.type == "cpu" else [torch.Generator(device) for _ in states]
        self._rest = [dict(state) for state in states]
        for lane, state in enumerate(states):
            self.load(lane, state)

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """Put the lane's state in the global generators for the block, and take it back afterwards."""
        if self._single:
            yield
            return
        watching = not self._host_random and self._watched > 0
        before = _host_state() if watching else None
        whole = self._host_random or watching
        if whole:
            restore_rng(self.state(lane))
        else:
            self._swap_in(lane)
        try:
            yield
        finally:
            self._swap_out(lane)
            if before is not None:
                self._watched -= 1
                self._host_random = not _same(before, _host_state())
            if whole:
                self._rest[lane] = capture_rng()

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return all random state of one lane, under the names that `capture_rng` gives it."""
        if self._single:
            return capture_rng()
        own = {"torch": self._cpu[lane].get_state()}
        if self._device.type == "cuda":
            own[f"cuda/{self._device.index or 0}"] = self.generators[lane].get_state()
        elif self._device.type == "mps":
            own["mps"] = self.generators[lane].get_state()
        return self._rest[lane] | own

    def load(self, lane: int, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` returned, for this lane or for the same trial trained alone."""
        if self._single:
            restore_rng(state)
            return
        self._rest[lane] = dict(state)
        self._cpu[lane].set_state(state["torch"])
        key = {"cuda": f"cuda/{self._device.index or 0}", "mps": "mps"}.get(self._device.type)
        if key is not None and key in state:
            self.generators[lane].set_state(state[key])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these."""
        self._cpu = [self._cpu[row] for row in rows]
        self.generators = [self.generators[row] for row in rows]
        self._rest = [self._rest[row] for row in rows]

    def _swap_in(self, lane: int) -> None:
        torch.set_rng_state(self._cpu[lane].get_state())
        if self._device.type != "cpu":
            _global_generator(self._device).set_state(self.generators[lane].get_state())

    def _swap_out(self, lane: int) -> None:
        self._cpu[lane].set_state(torch.get_rng_state())
        if self._device.type != "cpu":
            self.generators[lane].set_state(_global_generator(self._device).get_state())


def _global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


def _host_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002


def _same(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    (python, (_, keys, *rest)), (python_now, (_, keys_now, *rest_now)) = before, after
    return bool(python == python_now and rest == rest_now and (keys == keys_now).all())
