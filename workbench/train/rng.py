"""Random state: seeded per trial, saved with a checkpoint, given back to the caller afterwards."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import WorkbenchError


def seed_all(*seeds: int) -> None:
    """Seed Python, NumPy and torch from a tuple of seeds."""
    # Without the key (1, 0) would give what (1,) gives, and dropout would repeat the draws of the initialisation.
    words = np.random.SeedSequence(list(seeds), spawn_key=tuple(range(1, len(seeds)))).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[0]))  # noqa: NPY002  # datasets of the user's own draw from the global generators
    torch.manual_seed(int(words[0]) << 16 ^ int(words[1]))


def capture_rng() -> dict[str, Tensor]:
    """Return the state of all global generators as tensors."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        tensors["mps"] = torch.mps.get_rng_state()
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    tensors["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    tensors["numpy"] = torch.from_numpy(np.append(keys, [position, has_gauss]).astype(np.int64))
    tensors["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return tensors


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Put the state of all global generators back."""
    torch.set_rng_state(tensors["torch"])
    for name, state in tensors.items():
        if name.startswith("cuda/") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, int(name.split("/")[1]))
    if "mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["mps"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = tensors["numpy"].tolist()
    cached = float(tensors["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leave the caller's random state bit for bit as it was, also when the block raises."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


WATCHED_PASSES = 4  # rule of thumb: a model that draws from Python or NumPy does so within its first steps


class LateDraws(WorkbenchError):
    """Lanes drew from Python's or NumPy's generators, which were not kept apart any more: what came after the last checkpoint counts for nothing."""


class LaneRng:
    """Random state of the model, lane by lane: dropout in one lane leaves the draws of the others alone.

    Python's and NumPy's generators take longer to exchange than a small model to train, so they are kept apart in the first passes of
    each lane, and in later ones where somebody drew from them then; `check_host` finds out who begins to draw later.
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
        self._device = device
        self._key = {"cuda": f"cuda/{device.index or 0}", "mps": "mps"}.get(device.type)
        self._single = len(states) == 1
        self._host_random = False
        self._watched = dict.fromkeys((True, False), WATCHED_PASSES * len(states))  # in training, in evaluation
        self._seen: tuple[Any, ...] | None = None
        if self._single:
            restore_rng(states[0])
            self.generators = [global_generator(device)]
            self._cpu, self._rest = self.generators, [dict(states[0])]
            return
        self._cpu = [torch.Generator() for _ in states]
        self.generators = self._cpu if device.type == "cpu" else [torch.Generator(device) for _ in states]
        self._rest = [dict(state) for state in states]
        for lane, state in enumerate(states):
            self.load(lane, state)

    @contextmanager
    def lane(self, lane: int, *, training: bool = True) -> Iterator[None]:
        """Put the lane's state in the global generators for the block, and take it back afterwards."""
        if self._single:
            yield
            return
        watched = not self._host_random and self._watched[training] > 0
        whole = watched or self._host_random
        with isolated_rng() if watched else nullcontext():
            if whole:
                restore_rng(self.state(lane))
            else:
                torch.set_rng_state(self._cpu[lane].get_state())
                if self._device.type != "cpu":
                    global_generator(self._device).set_state(self.generators[lane].get_state())
            before = host_random() if watched else None
            try:
                yield
            finally:
                self._cpu[lane].set_state(torch.get_rng_state())
                if self._device.type != "cpu":
                    self.generators[lane].set_state(global_generator(self._device).get_state())
                if watched:
                    self._watched[training] -= 1
                    self._host_random = before != host_random()
                if whole:
                    self._rest[lane] = capture_rng()

    def keep_apart(self) -> None:
        """Keep Python's and NumPy's generators apart from now on, whoever draws."""
        self._host_random = True

    def check_host(self) -> None:
        """Raise `LateDraws` where somebody drew from Python's or NumPy's generators since the first call, while they were not kept apart."""
        if self._single or self._host_random:
            return
        seen, self._seen = self._seen, host_random()
        if seen is not None and seen != self._seen:
            raise LateDraws(
                f"a model or a hook draws from Python's or NumPy's random numbers, and did not in its first {WATCHED_PASSES} passes: "
                "the trials go on from their newest checkpoints, with these numbers kept apart trial by trial"
            )

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return all random state of one lane, under the names that `capture_rng` gives it."""
        if self._single:
            return capture_rng()
        own = {"torch": self._cpu[lane].get_state()}
        if self._key is not None:
            own[self._key] = self.generators[lane].get_state()
        return self._rest[lane] | own

    def load(self, lane: int, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` returned, for this lane or for the same trial trained alone."""
        if self._single:
            restore_rng(state)
            return
        self._rest[lane] = dict(state)
        self._cpu[lane].set_state(state["torch"])
        if self._key is not None and self._key in state:
            self.generators[lane].set_state(state[self._key])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these."""
        self._cpu = [self._cpu[row] for row in rows]
        self.generators = [self.generators[row] for row in rows]
        self._rest = [self._rest[row] for row in rows]


def global_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on `device` draw from when they are given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


def host_random() -> tuple[Any, ...]:
    """Return the state of Python's and NumPy's global generators, to compare."""
    _, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), np.asarray(keys).tobytes(), rest
